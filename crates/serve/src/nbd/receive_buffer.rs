//! Received bytes that were not parsed yet. Headers are parsed in place.

use tenmil_base::{Memory, Segment};
use tenmil_dma::RegionTable;

use super::connection_memory::subsegment;

/// Receive buffer of a connection.
///
/// ```text
///   0        start      end                  place.len_bytes
///   | parsed | unparsed | free               |
/// ```
#[derive(Debug)]
pub(super) struct ReceiveBuffer {
    memory: Segment,
    start: u32,
    end: u32,
}

/// Smallest free space that is worth a receive call.
const FREE_BYTES_MIN: u32 = 16 << 10;

impl ReceiveBuffer {
    pub(super) fn new(memory: Segment) -> Self {
        Self { memory, start: 0, end: 0 }
    }

    /// Number of unparsed bytes.
    #[inline]
    pub(super) fn unparsed_bytes(&self) -> u32 {
        self.end - self.start
    }

    /// Moves the unparsed bytes to the front where that is cheap.
    #[inline]
    pub(super) fn compact(&mut self, regions: &RegionTable) {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            return;
        }
        let len = self.unparsed_bytes();
        if self.memory.len_bytes - self.end < FREE_BYTES_MIN
            && self.start >= self.memory.len_bytes / 2
        {
            let (from, to) =
                (subsegment(self.memory, self.start, len), subsegment(self.memory, 0, len));
            regions
                .copy_segment(from, to)
                .expect("a connection has its memory as long as it lives");
            (self.start, self.end) = (0, len);
        }
    }

    /// Free space for the next receive call.
    #[inline]
    pub(super) fn free_segment(&self) -> Segment {
        subsegment(self.memory, self.end, self.memory.len_bytes - self.end)
    }

    /// Records that `count` bytes were received there.
    #[inline]
    pub(super) fn record_received(&mut self, count: u32) {
        self.end += count;
        assert!(self.end <= self.memory.len_bytes, "no more is received than fits");
    }

    /// Returns the next `N` bytes without consuming them, if that many are unparsed.
    #[inline]
    pub(super) fn peek<const N: usize>(&self, regions: &RegionTable) -> Option<[u8; N]> {
        let len = u32::try_from(N).ok().filter(|len| *len <= self.unparsed_bytes())?;
        let mut bytes = [0; N];
        let segment = subsegment(self.memory, self.start, len);
        regions.load(segment, &mut bytes).expect("a connection has its memory as long as it lives");
        Some(bytes)
    }

    /// Consumes up to `count` bytes and returns the segment in which they lie.
    #[inline]
    pub(super) fn consume(&mut self, count: u32) -> Segment {
        let taken = subsegment(self.memory, self.start, count.min(self.unparsed_bytes()));
        self.start += taken.len_bytes;
        taken
    }
}
