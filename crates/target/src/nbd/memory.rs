//! What a connection has of memory, and who uses which part of it.
//!
//! ```text
//!   | inbox   | words   | headers         | small            | large            |
//!   | 128 KiB | 64 KiB  | 256 × 256 bytes | 256 × 16 KiB     | 4 × 256 KiB      |
//!                         one of each for every request under way, whoever is free
//! ```
//!
//! More large pieces are leased from the [pool](super::pool) that all connections share.
//!
//! The kernel gives memory when it is touched, and what was free last is used first, so a connection
//! takes the room of what it has under way and not of what it could have.

use std::sync::Arc;

use base::Segment;

use super::pool::Pool;

/// Requests that a connection may have under way.
pub(super) const SLOTS: u16 = 256;
/// Bytes in a piece of large memory.
pub(super) const LARGE_BYTES: u32 = 256 << 10;
/// Bytes that a small request may move.
pub(super) const SMALL_BYTES: u32 = 16 << 10;

const INBOX_BYTES: u32 = 128 << 10;
const WORDS_BYTES: u32 = 64 << 10;
const HEADER_BYTES: u32 = 256;
/// Large pieces of a connection's own.
const OWN_COUNT: u16 = 4;

const WORDS: u32 = INBOX_BYTES;
const HEADERS: u32 = WORDS + WORDS_BYTES;
const SMALL: u32 = HEADERS + SLOTS as u32 * HEADER_BYTES;
const LARGE: u32 = SMALL + SLOTS as u32 * SMALL_BYTES;

/// Memory that a connection is made with.
pub const MEMORY_BYTES: u32 = LARGE + OWN_COUNT as u32 * LARGE_BYTES;

const _: () = assert!(SMALL.is_multiple_of(4096), "buffers are aligned for direct I/O");
/// Where is what.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    whole: Segment,
}

impl Layout {
    /// The parts of `whole`, which is [`MEMORY_BYTES`] long.
    ///
    /// # Panics
    ///
    /// If it is shorter.
    pub(super) fn new(whole: Segment) -> Self {
        assert!(whole.len_bytes >= MEMORY_BYTES, "a connection needs {MEMORY_BYTES} bytes");
        Self { whole }
    }

    fn part(&self, first: u32, len_bytes: u32) -> Segment {
        Segment { offset: self.whole.offset + u64::from(first), len_bytes, ..self.whole }
    }

    /// What was received and not yet understood.
    pub(super) fn inbox(&self) -> Segment {
        self.part(0, INBOX_BYTES)
    }

    /// What the handshake answers.
    pub(super) fn words(&self) -> Segment {
        self.part(WORDS, WORDS_BYTES)
    }

    /// The header of a reply.
    pub(super) fn header(&self, slot: u16) -> Segment {
        self.part(HEADERS + u32::from(slot) * HEADER_BYTES, HEADER_BYTES)
    }

    fn small(&self, slot: u16) -> Segment {
        self.part(SMALL + u32::from(slot) * SMALL_BYTES, SMALL_BYTES)
    }

    fn large(&self, piece: u16) -> Segment {
        self.part(LARGE + u32::from(piece) * LARGE_BYTES, LARGE_BYTES)
    }
}

/// The memory that a request holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holding {
    /// That of its slot.
    Small,
    /// This large piece, and those that are chained to it.
    Large {
        /// The first piece.
        first: u16,
    },
}

/// The large pieces: those of the connection first, then those of the pool.
#[derive(Debug)]
pub(super) struct Store {
    layout: Layout,
    pool: Arc<Pool>,
    /// The piece that follows, by piece.
    next: Box<[u16]>,
    /// Pieces of the connection that are free.
    own: Vec<u16>,
    /// Pieces of the pool that the connection has, and those of them that are free.
    leased: Vec<u16>,
    spare: Vec<u16>,
    /// Some memory was refused since some was taken last.
    is_short: bool,
    /// What is not free may still be touched, when this is dropped.
    is_abandoned: bool,
}

/// No piece follows.
const END: u16 = u16::MAX;

impl Store {
    pub(super) fn new(layout: Layout, pool: Arc<Pool>) -> Self {
        let own = (0..OWN_COUNT).rev().collect();
        let next = vec![END; usize::from(OWN_COUNT) + pool.pieces()].into();
        let (leased, spare) = (Vec::new(), Vec::new());
        Self { layout, pool, next, own, leased, spare, is_short: false, is_abandoned: false }
    }

    /// Memory for `len_bytes`, if there is enough just now.
    #[inline]
    pub(super) fn take(&mut self, len_bytes: u32) -> Option<Holding> {
        if len_bytes <= SMALL_BYTES {
            return Some(Holding::Small);
        }
        let count = len_bytes.div_ceil(LARGE_BYTES) as usize;
        if self.own.len() + self.spare.len() < count && !self.lease(count) {
            return None;
        }
        let first = self.pop()?;
        let mut last = first;
        for _ in 1..count {
            let piece = self.pop()?;
            self.next[usize::from(last)] = piece;
            last = piece;
        }
        self.next[usize::from(last)] = END;
        Some(Holding::Large { first })
    }

    #[inline]
    fn pop(&mut self) -> Option<u16> {
        self.own.pop().or_else(|| self.spare.pop())
    }

    /// Leases what lacks of `count` pieces.
    #[cold]
    fn lease(&mut self, count: usize) -> bool {
        let lacks = count - self.own.len() - self.spare.len();
        let before = self.leased.len();
        self.is_short = !self.pool.lease(lacks, before, &mut self.leased);
        if self.is_short {
            // Others may wait for these, as this one does for theirs.
            self.release();
            return false;
        }
        for piece in &mut self.leased[before..] {
            *piece += OWN_COUNT;
        }
        self.spare.extend(self.leased[before..].iter().rev());
        true
    }

    /// Gives what is leased and free back.
    pub(super) fn release(&mut self) {
        let Self { pool, leased, spare, .. } = self;
        if spare.is_empty() {
            return;
        }
        leased.retain(|piece| !spare.contains(piece));
        pool.give_back(spare.drain(..).map(|piece| piece - OWN_COUNT));
    }

    /// Whether a request waits for memory that others have.
    #[inline]
    pub(super) fn is_short(&self) -> bool {
        self.is_short
    }

    /// It may be tried again.
    pub(super) fn try_again(&mut self) {
        self.is_short = false;
    }

    /// Somebody may touch what is not free for ever: it is nobody's from now on.
    pub(super) fn abandon(&mut self) {
        self.is_abandoned = true;
    }

    /// Takes memory back.
    #[inline]
    pub(super) fn give_back(&mut self, holding: Holding) {
        let Holding::Large { first } = holding else { return };
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
    fn large(&self, piece: u16) -> Segment {
        match piece.checked_sub(OWN_COUNT) {
            None => self.layout.large(piece),
            Some(leased) => self.pool.piece(leased),
        }
    }

    /// Calls `put` with the segments of `len_bytes` from byte `from` on of what `slot` holds.
    #[inline]
    pub(super) fn each(
        &self,
        (slot, holding): (u16, Holding),
        mut from: u32,
        mut len_bytes: u32,
        mut put: impl FnMut(Segment),
    ) {
        let Holding::Large { first } = holding else {
            put(cut(self.layout.small(slot), from, len_bytes));
            return;
        };
        let mut piece = first;
        while len_bytes > 0 && piece != END {
            if from < LARGE_BYTES {
                let count = len_bytes.min(LARGE_BYTES - from);
                put(cut(self.large(piece), from, count));
                (from, len_bytes) = (0, len_bytes - count);
            } else {
                from -= LARGE_BYTES;
            }
            piece = self.next[usize::from(piece)];
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if !self.is_abandoned {
            self.spare.clone_from(&self.leased);
        }
        self.release();
    }
}

/// A part of `segment` that is known to lie inside.
#[inline]
pub(super) fn cut(segment: Segment, from: u32, len_bytes: u32) -> Segment {
    segment.slice(from, len_bytes).expect("it lies inside")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use base::{RegionId, Segment};
    use dma::Regions;

    use super::{Holding, LARGE_BYTES, Layout, MEMORY_BYTES, OWN_COUNT, SLOTS, SMALL_BYTES, Store};
    use crate::nbd::pool::{POOL_BYTES, Pool};

    fn layout() -> Layout {
        Layout::new(Segment { region: RegionId(1), offset: 4096, len_bytes: MEMORY_BYTES })
    }

    fn pool(len_bytes: u32) -> Arc<Pool> {
        Arc::new(Pool::new(&Regions::new(1), len_bytes).unwrap())
    }

    #[test]
    fn no_two_parts_overlap_and_all_lie_inside() {
        let layout = layout();
        let mut parts = vec![layout.inbox(), layout.words()];
        parts.extend((0..SLOTS).flat_map(|slot| [layout.header(slot), layout.small(slot)]));
        parts.extend((0..OWN_COUNT).map(|piece| layout.large(piece)));
        parts.sort_by_key(|part| part.offset);
        let mut end = 4096;
        for part in parts {
            assert_eq!(part.offset, end, "they lie side by side");
            end += u64::from(part.len_bytes);
        }
        assert_eq!(end, 4096 + u64::from(MEMORY_BYTES));
    }

    #[test]
    fn what_is_held_is_as_long_as_was_asked_for_wherever_one_begins() {
        let pool = pool(POOL_BYTES);
        let mut store = Store::new(layout(), Arc::clone(&pool));
        let largest = wire::nbd::PAYLOAD_BYTES_MAX;
        for len in [1, SMALL_BYTES, SMALL_BYTES + 1, LARGE_BYTES, LARGE_BYTES + 1, largest] {
            let holding = store.take(len).unwrap();
            for from in [0, 1, len / 2, len - 1] {
                let mut total = 0;
                store.each((3, holding), from, len - from, |part| total += part.len_bytes);
                assert_eq!(total, len - from, "{len} from {from}");
            }
            store.give_back(holding);
        }
        store.release();
        assert_eq!(pool.free(), pool.pieces());
    }

    #[test]
    fn memory_that_is_gone_is_refused_until_it_comes_back() {
        let pool = pool(POOL_BYTES);
        let mut store = Store::new(layout(), Arc::clone(&pool));
        let all = store.take(wire::nbd::PAYLOAD_BYTES_MAX).unwrap();
        let more = store.take(OWN_COUNT as u32 * LARGE_BYTES).unwrap();
        assert_eq!(store.take(SMALL_BYTES + 1), None);
        assert!(store.is_short());
        assert_eq!(store.take(SMALL_BYTES), Some(Holding::Small), "its slot always has some");
        store.give_back(more);
        assert!(store.take(SMALL_BYTES + 1).is_some());
        store.give_back(all);
        drop(store);
        assert_eq!(pool.free(), pool.pieces(), "what was held is back with the connection");
    }

    #[test]
    fn connection_that_others_leave_nothing_has_its_own_pieces() {
        let pool = pool(128 * LARGE_BYTES);
        let mut greedy = Store::new(layout(), Arc::clone(&pool));
        let mut other = Store::new(layout(), Arc::clone(&pool));
        let _all = greedy.take(wire::nbd::PAYLOAD_BYTES_MAX).unwrap();
        let _leased = pool.lease(pool.free(), 0, &mut Vec::new());
        assert_eq!(other.take((OWN_COUNT as u32 + 1) * LARGE_BYTES), None);
        let own = other.take(OWN_COUNT as u32 * LARGE_BYTES).unwrap();
        assert!(other.take(LARGE_BYTES).is_none() && other.is_short());
        other.give_back(own);
        greedy.abandon();
        drop(greedy);
        assert_eq!(pool.free(), 0, "what may still be touched is nobody's");
    }
}
