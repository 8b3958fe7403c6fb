//! One queue of a device: its ring, and the table in which the kernel says what it asks for.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use base::Segment;
use dma::Regions;
use io_uring::{IoUring, opcode, types};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use wire::ublk::queue::{data_at, table_at, table_bytes};
use wire::ublk::{Descriptor, QueueCommand, QueueOp};

use super::device::Device;
use super::errno;

/// A queue. The kernel knows it by the thread that has fetched first: only that thread may fetch and
/// commit from then on, and when it ends, the kernel says that the server has died.
pub struct Queue {
    ring: IoUring,
    table: Table,
    device: Arc<Device>,
    regions: Regions,
    number: u16,
    /// Commands that the kernel has not been told of.
    unsubmitted: usize,
}

/// The ring of a queue, made before its device is open: a device that was taken over from a dead
/// process cannot be taken over again if something goes wrong between.
pub struct Ring {
    ring: IoUring,
    depth: u16,
}

/// A command has come back from the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The tag, as it was given.
    pub tag: u64,
    /// How, as the kernel says it.
    pub result: i32,
}

/// `IORING_ENTER_GETEVENTS`: the kernel does its deferred work.
const GET_EVENTS: u32 = 1;

impl Ring {
    /// For a queue of `depth` requests.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub fn new(depth: u16) -> Result<Self, Errno> {
        let mut builder = IoUring::builder();
        // The kernel puts what has come into the ring when this thread enters it next, or at once if
        // it sleeps; it says in the ring that it wants to.
        builder.setup_coop_taskrun().setup_taskrun_flag();
        let ring = builder.build(u32::from(depth)).map_err(|error| errno(&error))?;
        Ok(Self { ring, depth })
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Ring").field("depth", &self.depth).finish_non_exhaustive()
    }
}

impl Queue {
    /// Queue `number` of `device`, over a ring of its depth; the data of its requests go to and come
    /// from the memory of `regions`.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub fn new(
        ring: Ring,
        device: Arc<Device>,
        regions: &Regions,
        number: u16,
    ) -> Result<Self, Errno> {
        let Ring { ring, depth } = ring;
        let table = Table::map(&device, number, depth)?;
        let regions = regions.clone();
        Ok(Self { ring, table, device, regions, number, unsubmitted: 0 })
    }

    /// Waits for a request with this tag: for the first one. Once for each.
    pub fn fetch(&mut self, tag: u16) {
        self.push(QueueOp::Fetch, tag, 0);
    }

    /// Says how the request with this tag has ended, and waits for the next one.
    #[inline]
    pub fn commit(&mut self, tag: u16, result: i32) {
        self.push(QueueOp::CommitAndFetch, tag, result);
    }

    /// Tells the kernel of all that was pushed.
    #[inline]
    pub fn flush(&mut self) {
        if self.unsubmitted == 0 {
            return;
        }
        // Whatever keeps the kernel from taking them all (EAGAIN, EBUSY, EINTR) passes; the rest goes
        // with the next turn.
        if let Ok(count) = self.ring.submit() {
            self.unsubmitted = self.unsubmitted.saturating_sub(count);
        }
    }

    /// Appends what has come back.
    #[inline]
    pub fn poll(&mut self, ended: &mut Vec<Ended>) {
        // What the kernel would not take the last time.
        self.flush();
        if self.ring.submission().taskrun() {
            // SAFETY: nothing is submitted and no argument is given: the kernel works on what it has.
            let entered =
                unsafe { self.ring.submitter().enter::<libc::sigset_t>(0, 0, GET_EVENTS, None) };
            // Refused, it wants to be entered again, and is, in the next turn.
            drop(entered);
        }
        let entries = self.ring.completion();
        ended.extend(entries.map(|one| Ended { tag: one.user_data(), result: one.result() }));
    }

    /// What the request with this tag asks for. It may be read between its arrival and its commit;
    /// else it says nothing.
    #[inline]
    pub fn descriptor(&self, tag: u16) -> Descriptor {
        Descriptor::from_bytes(&self.table.load(tag))
    }

    /// Copies the data of a write into memory, from their first byte on.
    ///
    /// # Errors
    ///
    /// What the kernel says: `IO` if there are fewer.
    #[inline]
    pub fn copy_in(&mut self, tag: u16, into: Segment) -> Result<(), Errno> {
        self.device.read(&self.regions, data_at(self.number, tag, 0), into)
    }

    /// Copies memory to where the data of a read go, from their first byte on.
    ///
    /// # Errors
    ///
    /// What the kernel says: `IO` if fewer are wanted.
    #[inline]
    pub fn copy_out(&mut self, tag: u16, from: Segment) -> Result<(), Errno> {
        self.device.write(&self.regions, from, data_at(self.number, tag, 0))
    }

    /// Tells the kernel of everything and looks once more. True if something has come back already,
    /// or could not be told: then do not sleep.
    pub fn arm(&mut self) -> bool {
        self.flush();
        self.unsubmitted > 0
            || self.ring.submission().taskrun()
            || !self.ring.completion().is_empty()
    }

    #[inline]
    fn push(&mut self, op: QueueOp, tag: u16, result: i32) {
        let file = types::Fd(self.device.as_fd().as_raw_fd());
        let command = QueueCommand { queue: self.number, tag, result, buffer: 0 };
        let entry = opcode::UringCmd16::new(file, op.code()).cmd(command.to_bytes()).build();
        let entry = entry.user_data(u64::from(tag));
        // SAFETY: the entry names the device's descriptor, which the queue keeps open, and no memory.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "the ring has an entry for every tag");
        self.unsubmitted += 1;
    }
}

impl AsFd for Queue {
    /// Becomes readable when something has come back: the kernel lets a ring be waited for as such.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the ring's own and open for as long as the ring is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Queue").field("number", &self.number).finish_non_exhaustive()
    }
}

/// What the kernel writes and we read: a descriptor for each tag.
struct Table {
    base: NonNull<u64>,
    len_bytes: usize,
    depth: u16,
}

/// A descriptor in words.
const WORDS: usize = Descriptor::BYTES / 8;

// SAFETY: a mapping is valid on every thread, and is only read.
unsafe impl Send for Table {}

impl Table {
    fn map(device: &Device, queue: u16, depth: u16) -> Result<Self, Errno> {
        let page_bytes = rustix::param::page_size();
        let len_bytes = table_bytes(depth, page_bytes);
        let (protection, flags) = (ProtFlags::READ, MapFlags::SHARED | MapFlags::POPULATE);
        let (file, at) = (device.as_fd(), table_at(queue, page_bytes));
        // SAFETY: a new mapping at a place of the kernel's choice; it covers nothing of ours.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len_bytes, protection, flags, file, at)
        }?;
        let base = NonNull::new(base.cast()).ok_or(Errno::FAULT)?;
        Ok(Self { base, len_bytes, depth })
    }

    #[inline]
    fn load(&self, tag: u16) -> [u8; Descriptor::BYTES] {
        assert!(tag < self.depth, "a tag below {}", self.depth);
        let mut bytes = [0; Descriptor::BYTES];
        for (index, into) in bytes.chunks_exact_mut(8).enumerate() {
            let at = self.base.as_ptr().wrapping_add(usize::from(tag) * WORDS + index);
            // SAFETY: `tag` is below the depth, so the word lies inside the mapping, which lives as
            // long as `self`; it begins at a page and is aligned. The kernel may write it, so it is
            // read by itself and never referred to. What the kernel wrote before the completion of
            // this tag is seen: that was loaded with acquire (`completion`).
            let word = unsafe { at.read_volatile() };
            into.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // SAFETY: exactly what `mmap` returned, unmapped once; no reference into it was ever made.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len_bytes) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dma::Regions;
    use wire::ublk::{Descriptor, IoFlags, IoOp};

    use super::{Device, Ended, Queue, Ring};
    use crate::machine::Machine;

    /// A file that takes no commands, with tables of two queues in it.
    fn queue(root: &tempfile::TempDir, asked: &[(u16, Descriptor)]) -> Option<Queue> {
        let page_bytes = rustix::param::page_size();
        let at = usize::try_from(super::table_at(1, page_bytes)).unwrap();
        let mut bytes = vec![0; at + page_bytes];
        for (tag, descriptor) in asked {
            let at = at + usize::from(*tag) * Descriptor::BYTES;
            bytes[at..at + Descriptor::BYTES].copy_from_slice(&descriptor.to_bytes());
        }
        std::fs::create_dir(root.path().join("dev")).unwrap();
        std::fs::write(root.path().join("dev/ublkc0"), bytes).unwrap();
        let device = Arc::new(Device::open(&Machine::under(root.path()), 0).unwrap());
        let ring = Ring::new(8);
        let queue = ring.and_then(|ring| Queue::new(ring, device, &Regions::new(4), 1));
        queue.inspect_err(|errno| println!("skipped: no ring: {errno}")).ok()
    }

    #[test]
    fn a_request_is_read_from_its_place_in_the_table_of_its_queue() {
        let root = tempfile::tempdir().unwrap();
        let of = |first_sector| Descriptor {
            op: IoOp::Discard,
            flags: IoFlags::FUA,
            sectors: 9,
            first_sector,
        };
        let Some(queue) = queue(&root, &[(0, of(5)), (7, of(6))]) else { return };
        assert_eq!((queue.descriptor(0), queue.descriptor(7)), (of(5), of(6)));
        assert_ne!(queue.descriptor(1), of(5));
    }

    #[test]
    fn every_command_comes_back_with_its_tag() {
        let root = tempfile::tempdir().unwrap();
        let Some(mut queue) = queue(&root, &[]) else { return };
        for tag in 0..8 {
            queue.fetch(tag);
        }
        assert!(queue.arm(), "a file refuses at once");
        let mut ended = Vec::new();
        queue.poll(&mut ended);
        let tags: Vec<u64> = ended.iter().map(|Ended { tag, .. }| *tag).collect();
        assert_eq!(tags, [0, 1, 2, 3, 4, 5, 6, 7]);
        assert!(ended.iter().all(|one| one.result < 0), "{ended:?}");
        assert!(!queue.arm(), "nothing more is to come");
    }
}
