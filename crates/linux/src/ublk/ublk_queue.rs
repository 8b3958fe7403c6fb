//! One queue of a ublk device: its ring, and the mapped table of request descriptors.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use io_uring::{IoUring, opcode, types};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use tenmil_base::Segment;
use tenmil_dma::RegionTable;
use tenmil_wire::ublk::queue::{
    descriptor_table_bytes, descriptor_table_offset, request_data_offset,
};
use tenmil_wire::ublk::{IoDescriptor, QueueCommand, QueueOp};

use super::errno_of;
use super::ublk_device::UblkCharDevice;

/// Queue of a ublk device. The kernel binds it to the thread that fetches first: only that thread
/// may fetch and commit from then on, and when it exits, the kernel considers the server dead.
pub struct UblkQueue {
    ring: IoUring,
    table: IoDescriptorTable,
    device: Arc<UblkCharDevice>,
    regions: RegionTable,
    number: u16,
    /// Commands pushed but not yet submitted.
    unsubmitted: usize,
}

/// Ring of a queue, created before the device is opened: after the recovery of a dead server's
/// device, a failure could not be recovered from again.
pub struct UblkQueueRing {
    ring: IoUring,
    depth: u16,
}

/// Completed fetch or commit command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchedTag {
    /// Tag of the request.
    pub tag: u64,
    /// Result code of the kernel.
    pub result: i32,
}

/// `IORING_ENTER_GETEVENTS`: run deferred work.
const GET_EVENTS: u32 = 1;

impl UblkQueueRing {
    /// Creates the ring of a queue of `depth` requests.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn new(depth: u16) -> Result<Self, Errno> {
        let mut builder = IoUring::builder();
        // The kernel posts completions when this thread enters the ring next, or at once if it
        // sleeps; the TASKRUN flag shows that completions are pending.
        builder.setup_coop_taskrun().setup_taskrun_flag();
        let ring = builder.build(u32::from(depth)).map_err(|error| errno_of(&error))?;
        Ok(Self { ring, depth })
    }
}

impl fmt::Debug for UblkQueueRing {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Ring").field("depth", &self.depth).finish_non_exhaustive()
    }
}

impl UblkQueue {
    /// Opens queue `number` of `device` on a ring of its depth. Request data is transferred to and
    /// from memory of `regions`.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn new(
        ring: UblkQueueRing,
        device: Arc<UblkCharDevice>,
        regions: &RegionTable,
        number: u16,
    ) -> Result<Self, Errno> {
        let UblkQueueRing { ring, depth } = ring;
        let table = IoDescriptorTable::map_table(&device, number, depth)?;
        let regions = regions.clone();
        Ok(Self { ring, table, device, regions, number, unsubmitted: 0 })
    }

    /// Fetches the first request with this tag. Call once per tag.
    pub fn fetch_request(&mut self, tag: u16) {
        self.push_command(QueueOp::Fetch, tag, 0);
    }

    /// Commits the result of the request with this tag, and fetches the next one.
    #[inline]
    pub fn commit_and_fetch(&mut self, tag: u16, result: i32) {
        self.push_command(QueueOp::CommitAndFetch, tag, result);
    }

    /// Submits all pushed commands.
    #[inline]
    pub fn submit_pushed_commands(&mut self) {
        if self.unsubmitted == 0 {
            return;
        }
        // A partial submission (EAGAIN, EBUSY, EINTR) is temporary; the rest is submitted in the
        // next iteration.
        if let Ok(count) = self.ring.submit() {
            self.unsubmitted = self.unsubmitted.saturating_sub(count);
        }
    }

    /// Appends completed commands.
    #[inline]
    pub fn poll(&mut self, ended: &mut Vec<FetchedTag>) {
        // Entries that the kernel did not accept the last time.
        self.submit_pushed_commands();
        if self.ring.submission().taskrun() {
            // SAFETY: nothing is submitted and no argument is passed: the kernel only runs its
            // deferred work.
            let entered =
                unsafe { self.ring.submitter().enter::<libc::sigset_t>(0, 0, GET_EVENTS, None) };
            // On failure the flag stays set, and the next iteration enters again.
            drop(entered);
        }
        let entries = self.ring.completion();
        ended.extend(entries.map(|one| FetchedTag { tag: one.user_data(), result: one.result() }));
    }

    /// Descriptor of the request with this tag. Valid between its fetch and its commit.
    #[inline]
    pub fn descriptor(&self, tag: u16) -> IoDescriptor {
        IoDescriptor::from_bytes(&self.table.load_descriptor(tag))
    }

    /// Copies the data of a write request into memory, from its first byte on.
    ///
    /// # Errors
    ///
    /// The error of the system call: `IO` if the request is shorter.
    #[inline]
    pub fn copy_from_request(&mut self, tag: u16, into: Segment) -> Result<(), Errno> {
        self.device.read_request_data(&self.regions, request_data_offset(self.number, tag, 0), into)
    }

    /// Copies memory to the data of a read request, from its first byte on.
    ///
    /// # Errors
    ///
    /// The error of the system call: `IO` if the request is shorter.
    #[inline]
    pub fn copy_to_request(&mut self, tag: u16, from: Segment) -> Result<(), Errno> {
        self.device.write_request_data(
            &self.regions,
            from,
            request_data_offset(self.number, tag, 0),
        )
    }

    /// Submits everything and polls once more. True if a command has completed, or could not be
    /// submitted: then the caller must not sleep.
    pub fn arm(&mut self) -> bool {
        self.submit_pushed_commands();
        self.unsubmitted > 0
            || self.ring.submission().taskrun()
            || !self.ring.completion().is_empty()
    }

    #[inline]
    fn push_command(&mut self, op: QueueOp, tag: u16, result: i32) {
        let file = types::Fd(self.device.as_fd().as_raw_fd());
        let command = QueueCommand { queue: self.number, tag, result, buffer: 0 };
        let entry = opcode::UringCmd16::new(file, op.code()).cmd(command.to_bytes()).build();
        let entry = entry.user_data(u64::from(tag));
        // SAFETY: the entry names the device's descriptor, which the queue keeps open, and no
        // memory.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "the ring has an entry for every tag");
        self.unsubmitted += 1;
    }
}

impl AsFd for UblkQueue {
    /// Descriptor that becomes readable when a command completes: an io_uring is pollable.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor belongs to the ring and is open while the ring is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

impl fmt::Debug for UblkQueue {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Queue").field("number", &self.number).finish_non_exhaustive()
    }
}

/// Mapped table, written by the kernel: one descriptor per tag.
struct IoDescriptorTable {
    base: NonNull<u64>,
    len_bytes: usize,
    depth: u16,
}

/// Size of a descriptor in words.
const WORDS: usize = IoDescriptor::BYTES / 8;

// SAFETY: a mapping is valid on every thread, and is only read.
unsafe impl Send for IoDescriptorTable {}

impl IoDescriptorTable {
    fn map_table(device: &UblkCharDevice, queue: u16, depth: u16) -> Result<Self, Errno> {
        let page_bytes = rustix::param::page_size();
        let len_bytes = descriptor_table_bytes(depth, page_bytes);
        let (protection, flags) = (ProtFlags::READ, MapFlags::SHARED | MapFlags::POPULATE);
        let (file, at) = (device.as_fd(), descriptor_table_offset(queue, page_bytes));
        // SAFETY: a new mapping at an address chosen by the kernel; it replaces none of ours.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len_bytes, protection, flags, file, at)
        }?;
        let base = NonNull::new(base.cast()).ok_or(Errno::FAULT)?;
        Ok(Self { base, len_bytes, depth })
    }

    #[inline]
    fn load_descriptor(&self, tag: u16) -> [u8; IoDescriptor::BYTES] {
        assert!(tag < self.depth, "a tag below {}", self.depth);
        let mut bytes = [0; IoDescriptor::BYTES];
        for (index, into) in bytes.chunks_exact_mut(8).enumerate() {
            let at = self.base.as_ptr().wrapping_add(usize::from(tag) * WORDS + index);
            // SAFETY: `tag` is below the depth, so the word is inside the mapping, which lives as
            // long as `self`; the mapping begins at a page, so the word is aligned. The kernel may
            // write it, so it is read volatile and no reference to it exists. What the kernel wrote
            // before the completion of this tag is visible: the completion was loaded with acquire
            // (`completion`).
            let word = unsafe { at.read_volatile() };
            into.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }
}

impl Drop for IoDescriptorTable {
    fn drop(&mut self) {
        // SAFETY: exactly what `mmap` returned, unmapped once; no reference into it was ever made.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len_bytes) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tenmil_dma::RegionTable;
    use tenmil_wire::ublk::{IoDescriptor, IoFlags, IoOp};

    use super::{FetchedTag, UblkCharDevice, UblkQueue, UblkQueueRing};
    use crate::kernel_files::KernelFiles;

    /// A regular file with tables of two queues, in place of the device.
    fn test_queue(root: &tempfile::TempDir, asked: &[(u16, IoDescriptor)]) -> Option<UblkQueue> {
        let page_bytes = rustix::param::page_size();
        let at = usize::try_from(super::descriptor_table_offset(1, page_bytes)).unwrap();
        let mut bytes = vec![0; at + page_bytes];
        for (tag, descriptor) in asked {
            let at = at + usize::from(*tag) * IoDescriptor::BYTES;
            bytes[at..at + IoDescriptor::BYTES].copy_from_slice(&descriptor.to_bytes());
        }
        std::fs::create_dir(root.path().join("dev")).unwrap();
        std::fs::write(root.path().join("dev/ublkc0"), bytes).unwrap();
        let device =
            Arc::new(UblkCharDevice::open(&KernelFiles::under_root(root.path()), 0).unwrap());
        let ring = UblkQueueRing::new(8);
        let queue = ring.and_then(|ring| UblkQueue::new(ring, device, &RegionTable::new(4), 1));
        queue.inspect_err(|errno| println!("skipped: no ring: {errno}")).ok()
    }

    #[test]
    fn descriptor_is_read_from_the_table_of_its_queue() {
        let root = tempfile::tempdir().unwrap();
        let of = |first_sector| IoDescriptor {
            op: IoOp::Discard,
            flags: IoFlags::FUA,
            sectors: 9,
            first_sector,
        };
        let Some(queue) = test_queue(&root, &[(0, of(5)), (7, of(6))]) else { return };
        assert_eq!((queue.descriptor(0), queue.descriptor(7)), (of(5), of(6)));
        assert_ne!(queue.descriptor(1), of(5));
    }

    #[test]
    fn every_command_completes_with_its_tag() {
        let root = tempfile::tempdir().unwrap();
        let Some(mut queue) = test_queue(&root, &[]) else { return };
        for tag in 0..8 {
            queue.fetch_request(tag);
        }
        assert!(queue.arm(), "a file refuses at once");
        let mut ended = Vec::new();
        queue.poll(&mut ended);
        let tags: Vec<u64> = ended.iter().map(|FetchedTag { tag, .. }| *tag).collect();
        assert_eq!(tags, [0, 1, 2, 3, 4, 5, 6, 7]);
        assert!(ended.iter().all(|one| one.result < 0), "{ended:?}");
        assert!(!queue.arm(), "nothing more is to come");
    }
}
