//! I/O channel of one device of a copy, with its queued requests.

use std::collections::VecDeque;

use tenmil_base::{
    BlockDevice, CompletionBatch, Instant, IoChannel, IoCompletion, Operation, Request,
    RequestFlags, Segment,
};

use super::copy_result::CopySide;

/// Channel addressed in bytes.
pub(super) struct ByteAddressedChannel {
    channel: Box<dyn IoChannel>,
    block_size: u64,
    waiting: VecDeque<(Request, Segment)>,
    in_flight: usize,
    completions: CompletionBatch,
}

/// Queued request: operation, byte range and buffer, which is [`Segment::default`] if no data move.
#[derive(Clone, Copy, Debug)]
pub(super) struct ByteRequest {
    pub(super) token: u64,
    pub(super) operation: Operation,
    pub(super) at: u64,
    pub(super) len_bytes: u64,
    pub(super) memory: Segment,
}

const COMPLETIONS_MAX: usize = 64;

impl ByteAddressedChannel {
    /// Opens a channel of `medium`.
    pub(super) fn open(medium: &dyn BlockDevice) -> Result<Self, String> {
        let channel = medium.channel().map_err(|error| error.to_string())?;
        Ok(Self {
            block_size: u64::from(channel.limits().block_size),
            channel,
            waiting: VecDeque::new(),
            in_flight: 0,
            completions: CompletionBatch::with_capacity(COMPLETIONS_MAX),
        })
    }

    /// Queues a request. The range must consist of whole blocks.
    pub(super) fn submit(&mut self, ask: &ByteRequest) {
        let ByteRequest { token, operation, at, len_bytes, memory } = *ask;
        debug_assert!(at.is_multiple_of(self.block_size), "{ask:?}");
        debug_assert!(len_bytes.is_multiple_of(self.block_size), "{ask:?}");
        let moves = matches!(operation, Operation::Read | Operation::Write);
        let zeroes = operation == Operation::WriteZeroes;
        let request = Request {
            token,
            lba: at / self.block_size,
            operand: 0,
            segment_first: 0,
            blocks: u32::try_from(len_bytes / self.block_size).unwrap_or(u32::MAX),
            segment_count: u16::from(moves),
            metadata_count: 0,
            operation,
            flags: if zeroes { RequestFlags::DEALLOCATE } else { RequestFlags::NONE },
        };
        self.waiting.push_back((request, memory));
    }

    /// Submits queued requests as far as the channel accepts them, and collects completions. Returns
    /// whether anything was done.
    pub(super) fn poll(&mut self, now: Instant, taken: &mut Vec<IoCompletion>) -> bool {
        let before = self.in_flight;
        while let Some((request, memory)) = self.waiting.front() {
            if self.channel.submit(now, &[*request], &[*memory]) == 0 {
                break;
            }
            self.waiting.pop_front();
            self.in_flight += 1;
        }
        let submitted = self.in_flight - before;
        if submitted > 0 {
            self.channel.flush_submissions();
        }
        let count = self.channel.poll(now, &mut self.completions);
        self.in_flight -= count;
        taken.extend(self.completions.drain());
        submitted > 0 || count > 0
    }

    /// Whether no request is queued or in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.in_flight == 0
    }

    /// The channel, for waiting on its completions.
    pub(super) fn channel(&mut self) -> &mut dyn IoChannel {
        &mut *self.channel
    }
}

/// Channels of both devices.
pub(super) struct CopyChannels {
    pub(super) source: ByteAddressedChannel,
    pub(super) target: ByteAddressedChannel,
    taken: Vec<IoCompletion>,
}

impl CopyChannels {
    pub(super) fn open(source: &dyn BlockDevice, target: &dyn BlockDevice) -> Result<Self, String> {
        let (source, target) =
            (ByteAddressedChannel::open(source)?, ByteAddressedChannel::open(target)?);
        Ok(Self { source, target, taken: Vec::new() })
    }

    /// Polls both channels and collects their completions.
    pub(super) fn poll(
        &mut self,
        now: Instant,
        completions: &mut Vec<(CopySide, IoCompletion)>,
    ) -> bool {
        let sides = [(CopySide::Source, &mut self.source), (CopySide::Target, &mut self.target)];
        let mut has_moved = false;
        for (which, side) in sides {
            has_moved |= side.poll(now, &mut self.taken);
            completions.extend(self.taken.drain(..).map(|completion| (which, completion)));
        }
        has_moved
    }

    /// Earliest time at which a channel must be polled without a wake-up.
    pub(super) fn wake_at(&self) -> Instant {
        self.source.channel.wake_at().min(self.target.channel.wake_at())
    }

    /// Arms the wake-ups of both channels; returns true if there are completions already.
    pub(super) fn arm(&mut self) -> bool {
        let source = !self.source.is_idle() && self.source.channel.arm();
        let target = !self.target.is_idle() && self.target.channel.arm();
        source || target
    }

    /// Disarms the wake-ups after a sleep.
    pub(super) fn disarm(&mut self) {
        self.source.channel.disarm();
        self.target.channel.disarm();
    }
}
