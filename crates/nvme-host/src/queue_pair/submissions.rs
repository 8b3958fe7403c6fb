//! Submission side of a queue pair: from a command to the ring, and from the ring to the doorbell.

use tenmil_base::{Dma, Doorbell, Instant, Span, SubmissionRing};
use tenmil_wire::{Command, Fuse};

use super::{QueuePair, step};
use crate::fast_path::CompletionDoorbell;
use crate::queue_link::QueueState;
use crate::slot::{SlotFlags, tick_of};

impl<D: Dma, B: Doorbell> QueuePair<D, B> {
    /// Makes all submitted commands visible to the controller.
    #[inline]
    pub fn flush(&mut self) {
        if self.tail != self.rung_tail {
            self.ring_submission();
        }
    }

    /// Applies a state change, if there is one. Called once per batch, before commands are stored.
    #[inline]
    pub(crate) fn check_state(&mut self, now: Instant) {
        if self.link.state_word() != self.ordinary {
            self.apply_state(now);
        }
    }

    /// Slot index of the next command, so that its list can be written first.
    pub(crate) fn next_index(&self) -> Option<usize> {
        self.slots.next_index()
    }

    /// Like [`next_index`](Self::next_index), for a fused pair.
    pub(crate) fn next_two_indexes(&self) -> Option<[usize; 2]> {
        self.slots.next_two_indexes()
    }

    /// Whether the doorbell is written after each command, which [`enqueue`](Self::enqueue) does.
    #[inline]
    pub(crate) fn is_eager(&self) -> bool {
        !self.techniques.doorbell_batching
    }

    /// Writes the doorbell of an [eager](Self::is_eager) queue.
    pub(super) fn flush_if_eager(&mut self) {
        if self.is_eager() {
            self.flush();
        }
    }

    /// Stores the results of `make` for `items` into the ring, each a token and a command with an
    /// identifier field of zero. Stops when `make` returns `None`, or when there is no free slot visible
    /// here ([`enqueue`](Self::enqueue) may still find one). Returns the number stored.
    ///
    /// Inlined where it matters, so that commands are built in registers and stored once. Only for a
    /// queue that is not [eager](Self::is_eager).
    #[inline(always)]
    pub(crate) fn enqueue_each<T>(
        &mut self,
        tick: u32,
        items: &[T],
        mut make: impl FnMut(&T) -> Option<(u64, Command)>,
    ) -> usize {
        let mut slots = self.slots.take_many();
        let mut count = 0;
        loop {
            let room = (self.submission_depth - self.tail) as usize;
            let run = &items[count..];
            let run = &run[..run.len().min(room)];
            let stored = self.submission.store_each(self.tail, run, |item| {
                let (token, Command(mut words)) = make(item)?;
                words[0] |= u64::from(slots.take_plain(token, tick)?) << 16;
                Some(words)
            });
            count += stored;
            self.tail = step(self.tail, entries_in(stored), self.submission_depth);
            if stored < room || count == items.len() {
                slots.finish(count);
                return count;
            }
        }
    }

    /// Stores one command into the ring: for any queue, with flags, and returning the identifier.
    #[inline(never)]
    pub(crate) fn enqueue(
        &mut self,
        tick: u32,
        token: u64,
        mark: SlotFlags,
        mut command: Command,
    ) -> Option<u16> {
        let Some(cid) = self.slots.take(token, tick, mark) else {
            return self.enqueue_injected(tick, token, mark, command);
        };
        command.0[0] |= u64::from(cid) << 16;
        self.put(&command);
        self.flush_if_eager();
        Some(cid)
    }

    /// Like [`enqueue`](Self::enqueue), with an individual timeout.
    pub(crate) fn enqueue_within(
        &mut self,
        now: Instant,
        timeout: Span,
        token: u64,
        command: Command,
    ) -> Option<u16> {
        let cid = self.enqueue(tick_of(now), token, SlotFlags::TIMED, command)?;
        self.limit(now, cid, timeout);
        Some(cid)
    }

    /// Stores both commands of a fused operation into the ring, or neither.
    pub(crate) fn enqueue_fused(
        &mut self,
        tick: u32,
        mark: SlotFlags,
        first: (u64, Command),
        second: (u64, Command),
    ) -> Option<[u16; 2]> {
        if self.slots.next_two_indexes().is_none() || self.cold.standing != QueueState::Running {
            return None;
        }
        // No doorbell write between the two, whatever the options, and no injection into a pair.
        let was_closed = self.slots.is_closed();
        self.slots.open();
        let halves = [(first, Fuse::First), (second, Fuse::Second)];
        let cids = halves.map(|((token, command), fuse)| {
            let cid = self.slots.take(token, tick, mark)?;
            self.put(&command.with_fuse(fuse).with_cid(cid));
            Some(cid)
        });
        if was_closed {
            self.slots.close();
        }
        self.flush_if_eager();
        match cids {
            [Some(first), Some(second)] => Some([first, second]),
            _ => unreachable!("two slots were free"),
        }
    }

    #[inline(always)]
    pub(super) fn put(&mut self, command: &Command) {
        let (index, next) = (self.tail, self.tail + 1);
        self.tail = if next == self.submission_depth { 0 } else { next };
        self.submission.store(index, &command.0);
    }

    /// Writes the submission doorbell. The controller can post as many completions as there are commands
    /// in flight. If it might find fewer free entries than that, the completion doorbell is written
    /// before the new commands are announced.
    ///
    /// Both doorbells are written consecutively: they share a cache line that an emulated controller
    /// polls, and two separate writes would cost it two misses.
    fn ring_submission(&mut self) {
        let is_due =
            self.unrung > 0 && self.techniques.completion_doorbell == CompletionDoorbell::Poll;
        if is_due || self.unrung + self.slots.in_flight() >= self.completion_depth {
            self.ring_completion();
        }
        self.submission.publish();
        self.submission_doorbell.ring(self.tail);
        self.rung_tail = self.tail;
        self.submission_rings += 1;
    }
}

/// Converts a count of entries, of which no ring has more than 32 bits.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "a ring has at most 65 536 entries")]
const fn entries_in(count: usize) -> u32 {
    count as u32
}
