//! The submission side: from a command to the ring, and from the ring to the doorbell.

use base::{Dma, Doorbell, Instant, Span, SubmissionRing};
use wire::{Command, Fuse};

use super::{QueuePair, step};
use crate::link::Order;
use crate::slot::{Mark, tick_of};
use crate::techniques::CompletionDoorbell;

impl<D: Dma, B: Doorbell> QueuePair<D, B> {
    /// Tells the controller of everything submitted so far.
    #[inline]
    pub fn flush(&mut self) {
        if self.tail != self.rung_tail {
            self.ring_submission();
        }
    }

    /// Adopts a new order, if there is one. Once per batch, before commands go in.
    #[inline]
    pub(crate) fn heed(&mut self, now: Instant) {
        if self.link.word() != self.ordinary {
            self.adopt_order(now);
        }
    }

    /// The index that the next command will have, so that its list can be written first.
    pub(crate) fn next_index(&self) -> Option<usize> {
        self.slots.next_index()
    }

    /// As [`next_index`](Self::next_index), for a fused pair.
    pub(crate) fn next_two_indexes(&self) -> Option<[usize; 2]> {
        self.slots.next_two_indexes()
    }

    /// Whether something is to be done after each command: [`enqueue`](Self::enqueue) knows of it.
    #[inline]
    pub(crate) fn is_eager(&self) -> bool {
        self.is_eager
    }

    /// Puts what `make` makes of each of `items`, a token and a command with an identifier field of
    /// zero, into the ring: until it makes nothing of one, there is no free slot, or none that can be
    /// seen from here ([`enqueue`](Self::enqueue) may know better). Returns how many went in.
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

    /// Puts one command into the ring: for any queue, with a mark, and for those who want to know
    /// the identifier.
    #[inline(never)]
    pub(crate) fn enqueue(
        &mut self,
        tick: u32,
        token: u64,
        mark: Mark,
        mut command: Command,
    ) -> Option<u16> {
        let Some(cid) = self.slots.take(token, tick, mark) else {
            return self.enqueue_injected(tick, token, mark, command);
        };
        command.0[0] |= u64::from(cid) << 16;
        self.put(&command);
        if self.is_eager {
            self.prefetch_and_ring();
        }
        Some(cid)
    }

    /// As [`enqueue`](Self::enqueue), with a time limit of its own.
    pub(crate) fn enqueue_within(
        &mut self,
        now: Instant,
        timeout: Span,
        token: u64,
        command: Command,
    ) -> Option<u16> {
        let cid = self.enqueue(tick_of(now), token, Mark::TIMED, command)?;
        self.limit(now, cid, timeout);
        Some(cid)
    }

    /// Puts both halves of a fused operation into the ring, or neither.
    pub(crate) fn enqueue_fused(
        &mut self,
        tick: u32,
        mark: Mark,
        first: (u64, Command),
        second: (u64, Command),
    ) -> Option<[u16; 2]> {
        if self.slots.next_two_indexes().is_none() || self.cold.standing != Order::Run {
            return None;
        }
        // No doorbell between the two, whatever the technique, and no injection into a pair.
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
        if self.is_eager {
            self.prefetch_and_ring();
        }
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

    /// What some techniques do after each command.
    #[inline(never)]
    pub(super) fn prefetch_and_ring(&mut self) {
        let ahead = self.techniques.submission_prefetch;
        if ahead > 0 {
            let ahead = ahead.min(self.submission_depth - 1);
            self.submission.prefetch(step(self.tail, ahead, self.submission_depth));
        }
        if !self.techniques.doorbell_batching {
            self.flush();
        }
    }

    /// The controller can post as many completions as are in flight. If it might find fewer free
    /// entries than that, it has to hear how many we have taken before it hears of new commands.
    ///
    /// Both doorbells ring one right after the other: they share a cache line, which an emulated
    /// controller looks at all the time, and two visits would cost it twice.
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

/// A count of entries, of which no ring has more.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "a ring has at most 65 536 entries")]
const fn entries_in(count: usize) -> u32 {
    count as u32
}
