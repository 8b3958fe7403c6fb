//! One side of a copy: a channel, what waits for room in it, and what it owes an answer for.

use std::collections::VecDeque;

use base::{Answer, Answers, Backend, Flags, Instant, Medium, Operation, Request, Segment};

use super::outcome::Which;

/// A channel that is asked in bytes.
pub(super) struct Side {
    channel: Box<dyn Backend>,
    block_size: u64,
    waiting: VecDeque<(Request, Segment)>,
    in_flight: usize,
    answers: Answers,
}

/// What to do, where, and with which memory: [`Segment::default`] where no data moves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask {
    pub(super) token: u64,
    pub(super) operation: Operation,
    pub(super) at: u64,
    pub(super) len_bytes: u64,
    pub(super) memory: Segment,
}

const ANSWERS: usize = 64;

impl Side {
    /// A channel of `medium`.
    pub(super) fn open(medium: &dyn Medium) -> Result<Self, String> {
        let channel = medium.channel()?;
        Ok(Self {
            block_size: u64::from(channel.limits().block_size),
            channel,
            waiting: VecDeque::new(),
            in_flight: 0,
            answers: Answers::with_capacity(ANSWERS),
        })
    }

    /// Queues a request. The range is of whole blocks.
    pub(super) fn ask(&mut self, ask: &Ask) {
        let Ask { token, operation, at, len_bytes, memory } = *ask;
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
            flags: if zeroes { Flags::DEALLOCATE } else { Flags::NONE },
        };
        self.waiting.push_back((request, memory));
    }

    /// Submits what there is room for, and takes the answers that have come. Says whether anything
    /// has moved.
    pub(super) fn turn(&mut self, now: Instant, taken: &mut Vec<Answer>) -> bool {
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
            self.channel.flush();
        }
        let count = self.channel.poll(now, &mut self.answers);
        self.in_flight -= count;
        taken.extend(self.answers.drain());
        submitted > 0 || count > 0
    }

    /// Whether nothing is queued and nothing owed.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.in_flight == 0
    }

    /// The channel, for whoever sleeps until it has something.
    pub(super) fn channel(&mut self) -> &mut dyn Backend {
        &mut *self.channel
    }
}

/// Both sides.
pub(super) struct Sides {
    pub(super) source: Side,
    pub(super) target: Side,
    taken: Vec<Answer>,
}

impl Sides {
    pub(super) fn open(source: &dyn Medium, target: &dyn Medium) -> Result<Self, String> {
        let (source, target) = (Side::open(source)?, Side::open(target)?);
        Ok(Self { source, target, taken: Vec::new() })
    }

    /// A turn of each, and the answers of both.
    pub(super) fn turn(&mut self, now: Instant, answers: &mut Vec<(Which, Answer)>) -> bool {
        let sides = [(Which::Source, &mut self.source), (Which::Target, &mut self.target)];
        let mut has_moved = false;
        for (which, side) in sides {
            has_moved |= side.turn(now, &mut self.taken);
            answers.extend(self.taken.drain(..).map(|answer| (which, answer)));
        }
        has_moved
    }

    /// When either wants to be polled even if nothing happens.
    pub(super) fn wake_at(&self) -> Instant {
        self.source.channel.wake_at().min(self.target.channel.wake_at())
    }

    /// Gets both ready for a sleep; true if there must be none.
    pub(super) fn arm(&mut self) -> bool {
        let source = !self.source.is_idle() && self.source.channel.arm();
        let target = !self.target.is_idle() && self.target.channel.arm();
        source || target
    }

    /// The sleep is over.
    pub(super) fn disarm(&mut self) {
        self.source.channel.disarm();
        self.target.channel.disarm();
    }
}
