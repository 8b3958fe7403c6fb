//! Provided buffers: a ring of receive buffers shared by all sockets of a thread.
//!
//! ```text
//!    ring      [ address, length, number ] × count, and the tail, in the first pages
//!    buffer    [ headroom | received data ] × count
//! ```
//!
//! The headroom takes bytes of a stream that were not consumed when its next buffer arrived: they
//! are moved in front of it, so that unconsumed data is contiguous.

use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::{AtomicU16, Ordering};

use io_uring::IoUring;
use io_uring::types::BufRingEntry;
use rustix::io::Errno;
use tenmil_base::Segment;
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};

/// Buffer ring and its buffers.
pub(super) struct ProvidedBuffers {
    memory: BufferMemory,
    count: u16,
    /// Number of entries ever added to the ring; wraps as in the kernel.
    tail: u16,
    /// Buffers owned by the kernel.
    free: usize,
}

/// Memory of the buffers. Alive as long as a `FilledBuffer` exists.
#[derive(Clone)]
pub(super) struct BufferMemory {
    regions: RegionTable,
    whole: Segment,
    buffers_at: usize,
    len_bytes: usize,
}

/// Part of a buffer filled by the kernel. Its owner has exclusive use of the buffer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FilledBuffer {
    number: u16,
    start: usize,
    end: usize,
}

/// Buffer group named by receives.
pub(super) const GROUP: u16 = 0;
/// Maximum number of bytes moved in front of the next buffer.
pub(super) const HEADROOM: usize = 4096;
const PAGE: usize = 4096;

impl ProvidedBuffers {
    /// Creates `count` buffers, a power of two, of `len_bytes` each, and registers them with a ring
    /// that is not in use yet.
    pub(super) fn new(uring: &IoUring, count: u16, len_bytes: usize) -> Result<Self, Errno> {
        let ring_bytes = (usize::from(count) * size_of::<BufRingEntry>()).next_multiple_of(PAGE);
        let total = ring_bytes + usize::from(count) * (HEADROOM + len_bytes);
        let regions = RegionTable::new(1);
        let mapping =
            MemoryMapping::new(total, MemoryBacking::Private).map_err(|_| Errno::NOMEM)?;
        let whole = regions.add_mapping(mapping).map_err(|_| Errno::NOMEM)?;
        let memory = BufferMemory { regions, whole, buffers_at: ring_bytes, len_bytes };
        let address = memory.address_of(0, ring_bytes).as_ptr() as u64;
        // SAFETY: the address is that of `ring_bytes` of zeroed, page-aligned memory in exclusive
        // use, and `count` is a power of two. The kernel holds its own reference to the pages.
        let registered =
            unsafe { uring.submitter().register_buf_ring_with_flags(address, count, GROUP, 0) };
        registered.map_err(|error| super::errno_of(&error))?;
        let mut buffers = Self { memory, count, tail: 0, free: 0 };
        for number in 0..count {
            buffers.provide_buffer(number);
        }
        Ok(buffers)
    }

    /// Memory of the buffers.
    pub(super) fn memory(&self) -> &BufferMemory {
        &self.memory
    }

    /// Number of buffers.
    pub(super) fn buffer_count(&self) -> usize {
        self.count.into()
    }

    /// Number of buffers owned by the kernel.
    pub(super) fn kernel_owned_count(&self) -> usize {
        self.free
    }

    /// Takes over the buffer that the kernel reports as filled.
    pub(super) fn take_filled(&mut self, number: u16, len: usize) -> FilledBuffer {
        self.free -= 1;
        FilledBuffer { number, start: HEADROOM, end: HEADROOM + len }
    }

    /// Returns a buffer to the kernel.
    pub(super) fn release_buffer(&mut self, leased: &FilledBuffer) {
        self.provide_buffer(leased.number);
    }

    fn provide_buffer(&mut self, number: u16) {
        let index = usize::from(self.tail % self.count);
        let entry = self.memory.address_of(index * size_of::<BufRingEntry>(), 16).cast();
        let room = self
            .memory
            .address_of(self.memory.buffer_offset(number) + HEADROOM, self.memory.len_bytes);
        let mut new: BufRingEntry = {
            let entry: NonNull<BufRingEntry> = entry;
            // SAFETY: the entry is inside the ring and aligned to its 16 bytes, and any bit pattern
            // is valid. The kernel only reads entries, and this one not before the tail is stored.
            unsafe { entry.read() }
        };
        new.set_addr(room.as_ptr() as u64);
        new.set_len(u32::try_from(self.memory.len_bytes).unwrap_or(u32::MAX));
        new.set_bid(number);
        // SAFETY: as above. The last two bytes of the first entry, the tail, are written back as
        // they were read; only this thread changes them.
        unsafe { entry.write(new) };
        self.tail = self.tail.wrapping_add(1);
        self.free += 1;
        // Pairs with the kernel's acquire load of the tail: the entry is visible before it is
        // counted.
        self.tail_word().store(self.tail, Ordering::Release);
    }

    fn tail_word(&self) -> &AtomicU16 {
        let first = self.memory.address_of(0, 16).cast::<BufRingEntry>();
        // SAFETY: the address is that of the first entry, which lives as long as `self`.
        let tail = unsafe { BufRingEntry::tail(first.as_ptr()) };
        // SAFETY: aligned to two within an aligned entry, alive as long as `self`, and accessed
        // atomically by the kernel.
        unsafe { AtomicU16::from_ptr(tail.cast_mut()) }
    }
}

impl BufferMemory {
    fn buffer_offset(&self, number: u16) -> usize {
        self.buffers_at + usize::from(number) * (HEADROOM + self.len_bytes)
    }

    fn address_of(&self, at: usize, len: usize) -> NonNull<u8> {
        let part = u32::try_from(at).ok().zip(u32::try_from(len).ok());
        let part = part.and_then(|(at, len)| self.whole.slice(at, len));
        let address = part.and_then(|part| self.regions.host_address(part).ok());
        address.expect("the parts of the buffers lie in their memory")
    }

    /// Bytes of a filled buffer.
    #[inline]
    pub(super) fn filled_bytes<'a>(&'a self, leased: &'a FilledBuffer) -> &'a [u8] {
        let address = self.address_of(
            self.buffer_offset(leased.number) + leased.start,
            leased.end - leased.start,
        );
        // SAFETY: the kernel has filled the buffer and does not access it before it is returned,
        // for which the only `FilledBuffer` of it, borrowed here, must be given up. The memory is
        // private and lives as long as `self`.
        unsafe { slice::from_raw_parts(address.as_ptr(), leased.end - leased.start) }
    }

    /// Copies bytes in front of a filled part. False if the headroom is too small.
    pub(super) fn prepend_bytes(&self, leased: &mut FilledBuffer, bytes: &[u8]) -> bool {
        let Some(start) = leased.start.checked_sub(bytes.len()) else { return false };
        let address = self.address_of(self.buffer_offset(leased.number) + start, bytes.len());
        // SAFETY: the headroom belongs to the owner of the `FilledBuffer`; `bytes` belongs to
        // another buffer, or to none of these.
        let room = unsafe { slice::from_raw_parts_mut(address.as_ptr(), bytes.len()) };
        room.copy_from_slice(bytes);
        leased.start = start;
        true
    }
}

impl FilledBuffer {
    /// Number of unconsumed bytes.
    pub(super) fn len(&self) -> usize {
        self.end - self.start
    }

    /// Consumes bytes from the front.
    pub(super) fn consume(&mut self, count: usize) {
        self.start += count;
    }
}

impl std::fmt::Debug for ProvidedBuffers {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Buffers").field("free", &self.free).finish_non_exhaustive()
    }
}
