//! What was received and not yet understood: headers are read where they lie.

use base::{Memory, Segment};
use dma::Regions;

use super::memory::cut;

/// ```text
///   0       start          end            the length of the place
///   | done  | not yet read | room         |
/// ```
#[derive(Debug)]
pub(super) struct Inbox {
    place: Segment,
    start: u32,
    end: u32,
}

/// Less room than this is not worth a system call.
const ROOM_MIN: u32 = 16 << 10;

impl Inbox {
    pub(super) fn new(place: Segment) -> Self {
        Self { place, start: 0, end: 0 }
    }

    /// How many bytes wait to be read.
    #[inline]
    pub(super) fn len(&self) -> u32 {
        self.end - self.start
    }

    /// Makes room: what waits moves to the front where that is cheap.
    #[inline]
    pub(super) fn tidy(&mut self, regions: &Regions) {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            return;
        }
        let len = self.len();
        if self.place.len_bytes - self.end < ROOM_MIN && self.start >= self.place.len_bytes / 2 {
            let (from, to) = (cut(self.place, self.start, len), cut(self.place, 0, len));
            regions.copy(from, to).expect("a connection has its memory as long as it lives");
            (self.start, self.end) = (0, len);
        }
    }

    /// Where more can be received.
    #[inline]
    pub(super) fn room(&self) -> Segment {
        cut(self.place, self.end, self.place.len_bytes - self.end)
    }

    /// So many bytes were received there.
    #[inline]
    pub(super) fn received(&mut self, count: u32) {
        self.end += count;
        assert!(self.end <= self.place.len_bytes, "no more is received than there is room for");
    }

    /// The next bytes, if as many wait.
    #[inline]
    pub(super) fn peek<const N: usize>(&self, regions: &Regions) -> Option<[u8; N]> {
        let len = u32::try_from(N).ok().filter(|len| *len <= self.len())?;
        let mut bytes = [0; N];
        let segment = cut(self.place, self.start, len);
        regions.load(segment, &mut bytes).expect("a connection has its memory as long as it lives");
        Some(bytes)
    }

    /// Takes the next bytes, of which there are as many: where they lie.
    #[inline]
    pub(super) fn take(&mut self, count: u32) -> Segment {
        let taken = cut(self.place, self.start, count.min(self.len()));
        self.start += taken.len_bytes;
        taken
    }
}
