//! Memory that the kernel picks from when something comes: a ring of buffers, shared by all sockets
//! of a thread.
//!
//! ```text
//!    ring      [ address, length, number ] × count, and the tail, in the first pages
//!    buffer    [ headroom | room for what comes ] × count
//! ```
//!
//! The headroom is for bytes of a stream that were not consumed when its next buffer came: they are
//! moved in front of that, so that what waits is in one piece.

use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::{AtomicU16, Ordering};

use base::Segment;
use dma::{Backing, Mapping, Regions};
use io_uring::IoUring;
use io_uring::types::BufRingEntry;
use rustix::io::Errno;

/// The ring and its buffers.
pub(super) struct Buffers {
    memory: Memory,
    count: u16,
    /// Entries that were ever put into the ring; the kernel wraps it as this does.
    tail: u16,
    /// Buffers that the kernel has.
    free: usize,
}

/// The memory behind it. Alive for as long as anybody has it.
#[derive(Clone)]
pub(super) struct Memory {
    regions: Regions,
    whole: Segment,
    buffers_at: usize,
    len_bytes: usize,
}

/// A part of a buffer that the kernel has filled. Whoever has it is the only one to use that buffer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Lent {
    number: u16,
    start: usize,
    end: usize,
}

/// The group that receives name.
pub(super) const GROUP: u16 = 0;
/// What can be moved in front of what comes next.
pub(super) const HEADROOM: usize = 4096;
const PAGE: usize = 4096;

impl Buffers {
    /// `count` buffers, a power of two, for `len_bytes` each; registered with a ring that is not
    /// running yet.
    pub(super) fn new(uring: &IoUring, count: u16, len_bytes: usize) -> Result<Self, Errno> {
        let ring_bytes = (usize::from(count) * size_of::<BufRingEntry>()).next_multiple_of(PAGE);
        let total = ring_bytes + usize::from(count) * (HEADROOM + len_bytes);
        let regions = Regions::new(1);
        let mapping = Mapping::new(total, Backing::Private).map_err(|_| Errno::NOMEM)?;
        let whole = regions.add(mapping).map_err(|_| Errno::NOMEM)?;
        let memory = Memory { regions, whole, buffers_at: ring_bytes, len_bytes };
        let address = memory.address(0, ring_bytes).as_ptr() as u64;
        // SAFETY: the address is that of `ring_bytes` of zeroed, page-aligned memory that nobody
        // else uses, and `count` is a power of two. The kernel has pages of its own from then on.
        let registered =
            unsafe { uring.submitter().register_buf_ring_with_flags(address, count, GROUP, 0) };
        registered.map_err(|error| super::errno(&error))?;
        let mut buffers = Self { memory, count, tail: 0, free: 0 };
        for number in 0..count {
            buffers.give(number);
        }
        Ok(buffers)
    }

    /// Whose bytes lent parts are.
    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// How many buffers there are.
    pub(super) fn count(&self) -> usize {
        self.count.into()
    }

    /// How many buffers the kernel has left.
    pub(super) fn free(&self) -> usize {
        self.free
    }

    /// Takes the buffer that the kernel says it has filled.
    pub(super) fn lend(&mut self, number: u16, len: usize) -> Lent {
        self.free -= 1;
        Lent { number, start: HEADROOM, end: HEADROOM + len }
    }

    /// Gives a buffer back to the kernel.
    pub(super) fn give_back(&mut self, lent: &Lent) {
        self.give(lent.number);
    }

    fn give(&mut self, number: u16) {
        let index = usize::from(self.tail % self.count);
        let entry = self.memory.address(index * size_of::<BufRingEntry>(), 16).cast();
        let room = self.memory.address(self.memory.at(number) + HEADROOM, self.memory.len_bytes);
        let mut new: BufRingEntry = {
            let entry: NonNull<BufRingEntry> = entry;
            // SAFETY: the entry lies in the ring, is aligned to its 16 bytes, and any bytes are one.
            // The kernel only reads entries, and this one not before the tail is stored.
            unsafe { entry.read() }
        };
        new.set_addr(room.as_ptr() as u64);
        new.set_len(u32::try_from(self.memory.len_bytes).unwrap_or(u32::MAX));
        new.set_bid(number);
        // SAFETY: as above. The first entry's last two bytes, the tail, are written back as they were
        // read; only this thread ever changes them.
        unsafe { entry.write(new) };
        self.tail = self.tail.wrapping_add(1);
        self.free += 1;
        // Pairs with the kernel's acquire load of the tail: the entry is seen before it counts.
        self.tail_word().store(self.tail, Ordering::Release);
    }

    fn tail_word(&self) -> &AtomicU16 {
        let first = self.memory.address(0, 16).cast::<BufRingEntry>();
        // SAFETY: it is the address of the first entry, which lives as long as `self`.
        let tail = unsafe { BufRingEntry::tail(first.as_ptr()) };
        // SAFETY: aligned to two within an aligned entry, alive as long as `self`, and the kernel
        // accesses it atomically.
        unsafe { AtomicU16::from_ptr(tail.cast_mut()) }
    }
}

impl Memory {
    fn at(&self, number: u16) -> usize {
        self.buffers_at + usize::from(number) * (HEADROOM + self.len_bytes)
    }

    fn address(&self, at: usize, len: usize) -> NonNull<u8> {
        let part = u32::try_from(at).ok().zip(u32::try_from(len).ok());
        let part = part.and_then(|(at, len)| self.whole.slice(at, len));
        let address = part.and_then(|part| self.regions.address(part).ok());
        address.expect("the parts of the buffers lie in their memory")
    }

    /// The bytes of a lent part.
    #[inline]
    pub(super) fn bytes<'a>(&'a self, lent: &'a Lent) -> &'a [u8] {
        let address = self.address(self.at(lent.number) + lent.start, lent.end - lent.start);
        // SAFETY: the kernel has filled the buffer and does not touch it before it is given back,
        // for which the one `Lent` of it, borrowed here, must be given up. The memory is known to
        // nobody else and lives as long as `self`.
        unsafe { slice::from_raw_parts(address.as_ptr(), lent.end - lent.start) }
    }

    /// Moves bytes in front of a lent part. False if they have no room there.
    pub(super) fn put_before(&self, lent: &mut Lent, bytes: &[u8]) -> bool {
        let Some(start) = lent.start.checked_sub(bytes.len()) else { return false };
        let address = self.address(self.at(lent.number) + start, bytes.len());
        // SAFETY: the headroom of a lent buffer is used by whoever has the buffer alone; `bytes` is
        // of another buffer, or not of these at all.
        let room = unsafe { slice::from_raw_parts_mut(address.as_ptr(), bytes.len()) };
        room.copy_from_slice(bytes);
        lent.start = start;
        true
    }
}

impl Lent {
    /// How many bytes are left in it.
    pub(super) fn len(&self) -> usize {
        self.end - self.start
    }

    /// Takes bytes off the front.
    pub(super) fn consume(&mut self, count: usize) {
        self.start += count;
    }
}

impl std::fmt::Debug for Buffers {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Buffers").field("free", &self.free).finish_non_exhaustive()
    }
}
