//! Splits client requests into pieces that the device accepts.

use tenmil_base::{Operation, Request};
use tenmil_wire::nbd::RequestHeader;

use super::{BATCH, SEGMENTS, Transmission};

impl Transmission {
    /// Queues a request that was received completely.
    #[inline]
    pub(super) fn queue_request(&mut self, slot: u16) {
        let memory = &mut self.slots[usize::from(slot)];
        (memory.next_byte, memory.ready_at) = (0, self.times.now);
        memory.pieces = match memory.operation {
            Operation::Read | Operation::Write => {
                memory.header.len_bytes.div_ceil(self.export.request_bytes_max())
            }
            _ => 1,
        };
        self.queue.push_back(slot);
    }

    /// Builds requests from the queue, up to one batch; returns their number.
    #[inline]
    pub(in crate::nbd) fn build_batch(&mut self) -> usize {
        let before = self.requests.len();
        if before == 0 {
            self.segments.clear();
        }
        while self.requests.len() < BATCH
            && self.segments.len() + 4 <= SEGMENTS
            && let Some(slot) = self.queue.front().copied()
        {
            if self.build_device_request(slot) {
                self.queue.pop_front();
            }
        }
        self.requests.len() - before
    }

    /// Builds the next piece of a request. Returns whether it is the last one.
    #[inline]
    fn build_device_request(&mut self, slot: u16) -> bool {
        let memory = &mut self.slots[usize::from(slot)];
        let RequestHeader { offset, len_bytes, .. } = memory.header;
        let moves = matches!(memory.operation, Operation::Read | Operation::Write);
        let first = memory.next_byte;
        let remaining = len_bytes - first;
        let count = if moves { remaining.min(self.export.request_bytes_max()) } else { remaining };
        memory.next_byte += count;
        let segment_first = self.segments.len();
        if moves {
            let segments = &mut self.segments;
            self.store
                .for_each_segment((slot, memory.buffer), first, count, |part| segments.push(part));
        }
        let shift = self.export.block_size().trailing_zeros();
        let is_flush = memory.operation == Operation::Flush;
        self.requests.push(Request {
            token: u64::from(first) << 16 | u64::from(slot),
            lba: if is_flush { 0 } else { (offset + u64::from(first)) >> shift },
            operand: 0,
            segment_first: u32::try_from(segment_first).expect("a batch is short"),
            blocks: if is_flush { 0 } else { count >> shift },
            segment_count: u16::try_from(self.segments.len() - segment_first)
                .expect("a piece is short"),
            metadata_count: 0,
            operation: memory.operation,
            flags: memory.flags,
        });
        count == remaining
    }
}
