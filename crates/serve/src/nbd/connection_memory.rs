//! Memory layout of a connection, and its large buffers.
//!
//! ```text
//!   | inbox   | replies | headers         | small            | large            |
//!   | 128 KiB | 64 KiB  | 256 × 256 bytes | 256 × 16 KiB     | 4 × 256 KiB      |
//!                         one of each for every request slot   any request
//! ```
//!
//! Further large buffers are leased from the [pool](super::buffer_pool) that all connections share.
//!
//! The kernel allocates pages on first touch, and the slot freed last is reused first. A connection
//! therefore uses memory for its actual, not its largest possible, queue depth.

use std::sync::Arc;

use tenmil_base::Segment;

use super::buffer_pool::BufferPool;

/// Request slots of a connection.
pub(super) const SLOTS: u16 = 256;
/// Bytes in a large buffer.
pub(super) const LARGE_BYTES: u32 = 256 << 10;
/// Largest request that uses the small buffer of its slot, in bytes.
pub(super) const SMALL_BYTES: u32 = 16 << 10;

const INBOX_BYTES: u32 = 128 << 10;
/// Buffer for the replies to an option.
pub(super) const REPLIES_BYTES: u32 = 64 << 10;
const HEADER_BYTES: u32 = 256;
/// Number of large buffers that a connection owns.
const OWN_COUNT: u16 = 4;

const REPLIES: u32 = INBOX_BYTES;
const HEADERS: u32 = REPLIES + REPLIES_BYTES;
const SMALL: u32 = HEADERS + SLOTS as u32 * HEADER_BYTES;
const LARGE: u32 = SMALL + SLOTS as u32 * SMALL_BYTES;

/// Memory that a connection is created with, in bytes.
pub const MEMORY_BYTES: u32 = LARGE + OWN_COUNT as u32 * LARGE_BYTES;

const _: () = assert!(SMALL.is_multiple_of(4096), "buffers are aligned for direct I/O");
/// Divides the memory of a connection into its parts.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnectionMemory {
    whole: Segment,
}

impl ConnectionMemory {
    /// Divides `whole`, which is [`MEMORY_BYTES`] long.
    ///
    /// # Panics
    ///
    /// If it is shorter.
    pub(super) fn new(whole: Segment) -> Self {
        assert!(whole.len_bytes >= MEMORY_BYTES, "a connection needs {MEMORY_BYTES} bytes");
        Self { whole }
    }

    fn segment_at(&self, first: u32, len_bytes: u32) -> Segment {
        Segment { offset: self.whole.offset + u64::from(first), len_bytes, ..self.whole }
    }

    /// Receive buffer.
    pub(super) fn receive_buffer(&self) -> Segment {
        self.segment_at(0, INBOX_BYTES)
    }

    /// Buffer for negotiation replies.
    pub(super) fn negotiation_buffer(&self) -> Segment {
        self.segment_at(REPLIES, REPLIES_BYTES)
    }

    /// Reply header of a slot.
    pub(super) fn reply_header(&self, slot: u16) -> Segment {
        self.segment_at(HEADERS + u32::from(slot) * HEADER_BYTES, HEADER_BYTES)
    }

    fn small_buffer(&self, slot: u16) -> Segment {
        self.segment_at(SMALL + u32::from(slot) * SMALL_BYTES, SMALL_BYTES)
    }

    fn large_buffer(&self, piece: u16) -> Segment {
        self.segment_at(LARGE + u32::from(piece) * LARGE_BYTES, LARGE_BYTES)
    }
}

/// Memory held by a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestBuffer {
    /// The small buffer of its slot.
    Small,
    /// A chain of large buffers.
    Large {
        /// First buffer of the chain.
        first: u16,
    },
}

/// Large buffers of a connection: its own first, then those leased from the pool.
#[derive(Debug)]
pub(super) struct LargeBuffers {
    layout: ConnectionMemory,
    pool: Arc<BufferPool>,
    /// Next buffer of a chain, by buffer number.
    next: Box<[u16]>,
    /// Own buffers that are free.
    own: Vec<u16>,
    /// Buffers leased from the pool, and those of them that are free.
    leased: Vec<u16>,
    spare: Vec<u16>,
    /// Whether the pool refused the last lease.
    is_lease_refused: bool,
    /// Whether buffers in use must be leaked on drop, since the device may still access them.
    is_leaked: bool,
}

/// End of a chain.
const END: u16 = u16::MAX;

impl LargeBuffers {
    pub(super) fn new(layout: ConnectionMemory, pool: Arc<BufferPool>) -> Self {
        let own = (0..OWN_COUNT).rev().collect();
        let next = vec![END; usize::from(OWN_COUNT) + pool.buffer_count()].into();
        let (leased, spare) = (Vec::new(), Vec::new());
        Self { layout, pool, next, own, leased, spare, is_lease_refused: false, is_leaked: false }
    }

    /// Allocates memory for `len_bytes`, if enough is free.
    #[inline]
    pub(super) fn allocate(&mut self, len_bytes: u32) -> Option<RequestBuffer> {
        if len_bytes <= SMALL_BYTES {
            return Some(RequestBuffer::Small);
        }
        let count = len_bytes.div_ceil(LARGE_BYTES) as usize;
        if self.own.len() + self.spare.len() < count && !self.lease_missing(count) {
            return None;
        }
        let first = self.pop_free_buffer()?;
        let mut last = first;
        for _ in 1..count {
            let piece = self.pop_free_buffer()?;
            self.next[usize::from(last)] = piece;
            last = piece;
        }
        self.next[usize::from(last)] = END;
        Some(RequestBuffer::Large { first })
    }

    #[inline]
    fn pop_free_buffer(&mut self) -> Option<u16> {
        self.own.pop().or_else(|| self.spare.pop())
    }

    /// Leases the buffers that are missing from `count`.
    #[cold]
    fn lease_missing(&mut self, count: usize) -> bool {
        let missing = count - self.own.len() - self.spare.len();
        let before = self.leased.len();
        self.is_lease_refused = !self.pool.try_lease_buffers(missing, before, &mut self.leased);
        if self.is_lease_refused {
            // Other connections may wait for these, as this one waits for theirs; keeping them
            // could deadlock.
            self.release_idle_leases();
            return false;
        }
        for piece in &mut self.leased[before..] {
            *piece += OWN_COUNT;
        }
        self.spare.extend(self.leased[before..].iter().rev());
        true
    }

    /// Returns leased buffers that are free to the pool.
    pub(super) fn release_idle_leases(&mut self) {
        let Self { pool, leased, spare, .. } = self;
        if spare.is_empty() {
            return;
        }
        leased.retain(|piece| !spare.contains(piece));
        pool.release_buffers(spare.drain(..).map(|piece| piece - OWN_COUNT));
    }

    /// Whether a request waits for memory that other connections hold.
    #[inline]
    pub(super) fn is_lease_refused(&self) -> bool {
        self.is_lease_refused
    }

    /// Allows the next attempt to lease.
    pub(super) fn allow_lease(&mut self) {
        self.is_lease_refused = false;
    }

    /// Marks buffers in use as lost: the device may still access them, so they are never reused.
    pub(super) fn leak_buffers_in_use(&mut self) {
        self.is_leaked = true;
    }

    /// Frees the memory of a request.
    #[inline]
    pub(super) fn release_buffer(&mut self, buffer: RequestBuffer) {
        let RequestBuffer::Large { first } = buffer else { return };
        let mut piece = first;
        while piece != END {
            if piece < OWN_COUNT {
                self.own.push(piece)
            } else {
                self.spare.push(piece)
            }
            piece = self.next[usize::from(piece)];
        }
    }

    #[inline]
    fn buffer_segment(&self, piece: u16) -> Segment {
        match piece.checked_sub(OWN_COUNT) {
            None => self.layout.large_buffer(piece),
            Some(leased) => self.pool.buffer_segment(leased),
        }
    }

    /// Calls `put` with each segment of the `len_bytes` bytes from offset `from` of a request's
    /// memory.
    #[inline]
    pub(super) fn for_each_segment(
        &self,
        (slot, buffer): (u16, RequestBuffer),
        mut from: u32,
        mut len_bytes: u32,
        mut put: impl FnMut(Segment),
    ) {
        let RequestBuffer::Large { first } = buffer else {
            put(subsegment(self.layout.small_buffer(slot), from, len_bytes));
            return;
        };
        let mut piece = first;
        while len_bytes > 0 && piece != END {
            if from < LARGE_BYTES {
                let count = len_bytes.min(LARGE_BYTES - from);
                put(subsegment(self.buffer_segment(piece), from, count));
                (from, len_bytes) = (0, len_bytes - count);
            } else {
                from -= LARGE_BYTES;
            }
            piece = self.next[usize::from(piece)];
        }
    }
}

impl Drop for LargeBuffers {
    fn drop(&mut self) {
        if !self.is_leaked {
            self.spare.clone_from(&self.leased);
        }
        self.release_idle_leases();
    }
}

/// Returns a part of `segment` that is known to lie inside it.
#[inline]
pub(super) fn subsegment(segment: Segment, from: u32, len_bytes: u32) -> Segment {
    segment.slice(from, len_bytes).expect("the part lies inside the segment")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tenmil_base::{RegionId, Segment};
    use tenmil_dma::RegionTable;

    use super::{
        ConnectionMemory, LARGE_BYTES, LargeBuffers, MEMORY_BYTES, OWN_COUNT, RequestBuffer, SLOTS,
        SMALL_BYTES,
    };
    use crate::nbd::buffer_pool::{BufferPool, POOL_BYTES};

    fn layout() -> ConnectionMemory {
        ConnectionMemory::new(Segment {
            region: RegionId(1),
            offset: 4096,
            len_bytes: MEMORY_BYTES,
        })
    }

    fn pool(len_bytes: u32) -> Arc<BufferPool> {
        Arc::new(BufferPool::new(&RegionTable::new(1), len_bytes).unwrap())
    }

    #[test]
    fn memory_parts_are_disjoint_and_inside_the_segment() {
        let layout = layout();
        let mut parts = vec![layout.receive_buffer(), layout.negotiation_buffer()];
        parts.extend(
            (0..SLOTS).flat_map(|slot| [layout.reply_header(slot), layout.small_buffer(slot)]),
        );
        parts.extend((0..OWN_COUNT).map(|piece| layout.large_buffer(piece)));
        parts.sort_unstable_by_key(|part| part.offset);
        let mut end = 4096;
        for part in parts {
            assert_eq!(part.offset, end, "they lie side by side");
            end += u64::from(part.len_bytes);
        }
        assert_eq!(end, 4096 + u64::from(MEMORY_BYTES));
    }

    #[test]
    fn a_buffer_has_the_requested_length_from_any_offset() {
        let pool = pool(POOL_BYTES);
        let mut store = LargeBuffers::new(layout(), Arc::clone(&pool));
        let largest = tenmil_wire::nbd::PAYLOAD_BYTES_MAX;
        for len in [1, SMALL_BYTES, SMALL_BYTES + 1, LARGE_BYTES, LARGE_BYTES + 1, largest] {
            let buffer = store.allocate(len).unwrap();
            for from in [0, 1, len / 2, len - 1] {
                let mut total = 0;
                store.for_each_segment((3, buffer), from, len - from, |part| {
                    total += part.len_bytes
                });
                assert_eq!(total, len - from, "{len} from {from}");
            }
            store.release_buffer(buffer);
        }
        store.release_idle_leases();
        assert_eq!(pool.free_buffer_count(), pool.buffer_count());
    }

    #[test]
    fn an_exhausted_pool_rejects_requests_until_memory_is_freed() {
        let pool = pool(POOL_BYTES);
        let mut store = LargeBuffers::new(layout(), Arc::clone(&pool));
        let all = store.allocate(tenmil_wire::nbd::PAYLOAD_BYTES_MAX).unwrap();
        let more = store.allocate(OWN_COUNT as u32 * LARGE_BYTES).unwrap();
        assert_eq!(store.allocate(SMALL_BYTES + 1), None);
        assert!(store.is_lease_refused());
        assert_eq!(
            store.allocate(SMALL_BYTES),
            Some(RequestBuffer::Small),
            "its slot always has some"
        );
        store.release_buffer(more);
        assert!(store.allocate(SMALL_BYTES + 1).is_some());
        store.release_buffer(all);
        drop(store);
        assert_eq!(
            pool.free_buffer_count(),
            pool.buffer_count(),
            "what was held is back with the connection"
        );
    }

    #[test]
    fn connection_keeps_its_own_buffers_when_the_pool_is_exhausted() {
        let pool = pool(128 * LARGE_BYTES);
        let mut greedy = LargeBuffers::new(layout(), Arc::clone(&pool));
        let mut other = LargeBuffers::new(layout(), Arc::clone(&pool));
        let _all = greedy.allocate(tenmil_wire::nbd::PAYLOAD_BYTES_MAX).unwrap();
        let _leased = pool.try_lease_buffers(pool.free_buffer_count(), 0, &mut Vec::new());
        assert_eq!(other.allocate((OWN_COUNT as u32 + 1) * LARGE_BYTES), None);
        let own = other.allocate(OWN_COUNT as u32 * LARGE_BYTES).unwrap();
        assert!(other.allocate(LARGE_BYTES).is_none() && other.is_lease_refused());
        other.release_buffer(own);
        greedy.leak_buffers_in_use();
        drop(greedy);
        assert_eq!(pool.free_buffer_count(), 0, "leaked buffers are not returned");
    }
}
