//! Send queue of a connection, which frees the slot of each reply that was sent.

use std::collections::VecDeque;

use tenmil_base::Segment;

use super::connection_memory::SLOTS;

/// Queue of segments to send.
#[derive(Debug)]
pub(super) struct SendQueue {
    segments: Vec<Segment>,
    /// Index of the first segment that was not sent completely.
    first: usize,
    /// Total bytes ever queued, and ever sent.
    queued_bytes: u64,
    sent_bytes: u64,
    /// Stream offset at which each reply ends, and its slot.
    ends: VecDeque<(u64, u16)>,
}

/// Longest queue: a header and a payload for each slot, and all large buffers.
const SEGMENTS: usize = 2 * SLOTS as usize + 256;

impl SendQueue {
    pub(super) fn new() -> Self {
        Self {
            segments: Vec::with_capacity(2 * SEGMENTS),
            first: 0,
            queued_bytes: 0,
            sent_bytes: 0,
            ends: VecDeque::with_capacity(usize::from(SLOTS)),
        }
    }

    /// Appends a segment.
    #[inline]
    pub(super) fn push(&mut self, segment: Segment) {
        if segment.len_bytes == 0 {
            return;
        }
        if self.segments.len() == self.segments.capacity() {
            self.segments.drain(..self.first);
            self.first = 0;
        }
        self.queued_bytes += u64::from(segment.len_bytes);
        self.segments.push(segment);
    }

    /// Marks the last queued byte as the end of the reply of `slot`.
    #[inline]
    pub(super) fn mark_reply_end(&mut self, slot: u16) {
        self.ends.push_back((self.queued_bytes, slot));
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.first == self.segments.len()
    }

    /// Segments to send.
    #[inline]
    pub(super) fn unsent_segments(&self) -> &[Segment] {
        &self.segments[self.first..]
    }

    /// Records that `count` bytes were sent. Calls `ended` with every slot whose reply was sent
    /// completely.
    #[inline]
    pub(super) fn record_sent(&mut self, count: usize, mut ended: impl FnMut(u16)) {
        self.sent_bytes += count as u64;
        assert!(self.sent_bytes <= self.queued_bytes, "no more is sent than was queued");
        let mut left = count;
        while left > 0 {
            let segment = &mut self.segments[self.first];
            let len = segment.len_bytes as usize;
            if left < len {
                let skip = u32::try_from(left).expect("less than the length of a segment");
                *segment =
                    super::connection_memory::subsegment(*segment, skip, segment.len_bytes - skip);
                break;
            }
            left -= len;
            self.first += 1;
        }
        if self.is_empty() {
            self.segments.clear();
            self.first = 0;
        }
        while let Some((end, slot)) = self.ends.front().copied()
            && end <= self.sent_bytes
        {
            self.ends.pop_front();
            ended(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{RegionId, Segment};

    use super::SendQueue;

    #[test]
    fn slot_is_freed_with_the_last_byte_of_its_reply() {
        let segment = |offset, len_bytes| Segment { region: RegionId(0), offset, len_bytes };
        for step in 1..=40 {
            let mut outbox = SendQueue::new();
            for slot in 0..4 {
                outbox.push(segment(u64::from(slot) * 100, 4));
                outbox.push(segment(u64::from(slot) * 100 + 50, u32::from(slot)));
                outbox.mark_reply_end(slot);
            }
            let (mut sent, mut ended) = (0, Vec::new());
            while !outbox.is_empty() {
                let left: u32 =
                    outbox.unsent_segments().iter().map(|segment| segment.len_bytes).sum();
                assert_eq!(left, 22 - sent);
                let count = step.min(left);
                outbox.record_sent(count as usize, |slot| ended.push(slot));
                sent += count;
                let expected = [4, 9, 15, 22].iter().filter(|end| **end <= sent).count();
                assert_eq!(ended.len(), expected, "after {sent} bytes");
            }
            assert_eq!(ended, [0, 1, 2, 3]);
        }
    }
}
