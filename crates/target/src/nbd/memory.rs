//! What a connection has of memory, and who uses which part of it.
//!
//! ```text
//!   | inbox   | words   | headers         | small            | large            |
//!   | 128 KiB | 64 KiB  | 256 × 256 bytes | 256 × 16 KiB     | 128 × 256 KiB    |
//!                         one of each for every request under way, whoever is free
//! ```
//!
//! The kernel gives memory when it is touched, and what was free last is used first, so a connection
//! takes the room of what it has under way and not of what it could have.

use base::Segment;

/// Requests that a connection may have under way.
pub(super) const SLOTS: u16 = 256;
/// Bytes in a piece of large memory.
pub(super) const LARGE_BYTES: u32 = 256 << 10;
/// Bytes that a small request may move.
pub(super) const SMALL_BYTES: u32 = 16 << 10;

const INBOX_BYTES: u32 = 128 << 10;
const WORDS_BYTES: u32 = 64 << 10;
const HEADER_BYTES: u32 = 256;
const LARGE_COUNT: u16 = 128;

const WORDS: u32 = INBOX_BYTES;
const HEADERS: u32 = WORDS + WORDS_BYTES;
const SMALL: u32 = HEADERS + SLOTS as u32 * HEADER_BYTES;
const LARGE: u32 = SMALL + SLOTS as u32 * SMALL_BYTES;

/// Memory that a connection is made with.
pub const MEMORY_BYTES: u32 = LARGE + LARGE_COUNT as u32 * LARGE_BYTES;

const _: () = assert!(SMALL.is_multiple_of(4096), "buffers are aligned for direct I/O");
const _: () = assert!(
    LARGE_COUNT as u32 * LARGE_BYTES >= wire::nbd::PAYLOAD_BYTES_MAX,
    "the largest request fits"
);

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

/// The large pieces.
#[derive(Debug)]
pub(super) struct Store {
    layout: Layout,
    /// The piece that follows, by piece.
    next: Box<[u16]>,
    free: Vec<u16>,
}

/// No piece follows.
const END: u16 = u16::MAX;

impl Store {
    pub(super) fn new(layout: Layout) -> Self {
        let free = (0..LARGE_COUNT).rev().collect();
        Self { layout, next: vec![END; usize::from(LARGE_COUNT)].into(), free }
    }

    /// Memory for `len_bytes`, if there is enough just now.
    #[inline]
    pub(super) fn take(&mut self, len_bytes: u32) -> Option<Holding> {
        if len_bytes <= SMALL_BYTES {
            return Some(Holding::Small);
        }
        let count = len_bytes.div_ceil(LARGE_BYTES) as usize;
        if self.free.len() < count {
            return None;
        }
        let mut pieces = self.free.drain(self.free.len() - count..).rev();
        let first = pieces.next()?;
        let mut last = first;
        for piece in pieces {
            self.next[usize::from(last)] = piece;
            last = piece;
        }
        self.next[usize::from(last)] = END;
        Some(Holding::Large { first })
    }

    /// Takes memory back.
    #[inline]
    pub(super) fn give_back(&mut self, holding: Holding) {
        let Holding::Large { first } = holding else { return };
        let mut piece = first;
        while piece != END {
            self.free.push(piece);
            piece = self.next[usize::from(piece)];
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
                put(cut(self.layout.large(piece), from, count));
                (from, len_bytes) = (0, len_bytes - count);
            } else {
                from -= LARGE_BYTES;
            }
            piece = self.next[usize::from(piece)];
        }
    }
}

/// A part of `segment` that is known to lie inside.
#[inline]
pub(super) fn cut(segment: Segment, from: u32, len_bytes: u32) -> Segment {
    segment.slice(from, len_bytes).expect("it lies inside")
}

#[cfg(test)]
mod tests {
    use base::{RegionId, Segment};

    use super::{Holding, LARGE_BYTES, Layout, MEMORY_BYTES, SLOTS, SMALL_BYTES, Store};

    fn layout() -> Layout {
        Layout::new(Segment { region: RegionId(1), offset: 4096, len_bytes: MEMORY_BYTES })
    }

    #[test]
    fn no_two_parts_overlap_and_all_lie_inside() {
        let layout = layout();
        let mut parts = vec![layout.inbox(), layout.words()];
        parts.extend((0..SLOTS).flat_map(|slot| [layout.header(slot), layout.small(slot)]));
        parts.extend((0..super::LARGE_COUNT).map(|piece| layout.large(piece)));
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
        let mut store = Store::new(layout());
        for len in [1, SMALL_BYTES, SMALL_BYTES + 1, LARGE_BYTES, LARGE_BYTES + 1, 3 * LARGE_BYTES]
        {
            let holding = store.take(len).unwrap();
            for from in [0, 1, len / 2, len - 1] {
                let mut total = 0;
                store.each((3, holding), from, len - from, |part| total += part.len_bytes);
                assert_eq!(total, len - from, "{len} from {from}");
            }
            store.give_back(holding);
        }
        assert_eq!(store.free.len(), usize::from(super::LARGE_COUNT));
    }

    #[test]
    fn memory_that_is_gone_is_refused_until_it_comes_back() {
        let mut store = Store::new(layout());
        let all = store.take(wire::nbd::PAYLOAD_BYTES_MAX).unwrap();
        assert_eq!(store.take(SMALL_BYTES + 1), None);
        assert_eq!(store.take(SMALL_BYTES), Some(Holding::Small), "its slot always has some");
        store.give_back(all);
        assert!(store.take(SMALL_BYTES + 1).is_some());
    }
}
