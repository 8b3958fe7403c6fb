//! One I/O in flight, again and again: what a lane of depth 1 does, without anything that a batch
//! needs, and with all that stays the same looked at once for many turns.

use base::{Answer, Backend, Instant};
use host::Clock;

use super::{Fixed, Lane, Scrutiny, Sums, index_of};
use crate::perf::workload::{self, Workload};

/// How much a lane may do before whoever called it does something else.
#[derive(Clone, Copy, Debug)]
pub(in crate::perf::engine) struct Bounds {
    /// I/Os.
    pub(in crate::perf::engine) ios: u64,
    /// Polls that find nothing, if nothing has been found before.
    pub(in crate::perf::engine) looks: u64,
}

impl<S: Scrutiny> Lane<S> {
    /// Whether the lane has one task, which does the same kind of I/O for ever and has one in
    /// flight.
    #[inline]
    pub(in crate::perf::engine) fn goes_alone(&self) -> bool {
        let is_waiting = !self.requests.is_empty() || !self.idle.is_empty();
        self.sent.len() == 1 && self.fixed.is_some() && !S::IS_ON && !is_waiting && self.budget > 0
    }

    /// Turns of a lane that [goes alone](Self::goes_alone), for as long as they find something.
    /// Returns how many I/Os ended and were followed by another, and what the time was when the
    /// clock was last read.
    #[inline]
    pub(in crate::perf::engine) fn turns_alone(
        &mut self,
        now: Instant,
        clock: &Clock,
        workload: &mut Workload,
        bounds: Bounds,
    ) -> (usize, Instant) {
        let Some(fixed) = self.fixed else { return (0, now) };
        if let Some(kept) = workload.uniform() {
            // A copy, so that it is in a register for as long as the loop lasts.
            let mut random = kept.clone();
            let ended = self.turns_at(now, *clock, fixed, bounds, |lane| lane.uniform(&mut random));
            *kept = random;
            return ended;
        }
        let blocks = fixed.blocks;
        self.turns_at(now, *clock, fixed, bounds, |lane| workload.address(lane, blocks))
    }

    /// [`turns_alone`](Self::turns_alone), at the addresses that `address` draws.
    #[inline]
    fn turns_at(
        &mut self,
        mut now: Instant,
        clock: Clock,
        fixed: Fixed,
        bounds: Bounds,
        mut address: impl FnMut(&mut workload::Lane) -> u64,
    ) -> (usize, Instant) {
        let Self { backend, answers, sent, again, addresses, segments, sums, .. } = self;
        let most = bounds.ios.min(self.budget);
        let (mut ended, mut polls, mut taken) = (0, 0, 1);
        *again = fixed.request(0, 0);
        while ended < most && taken > 0 {
            polls += 1;
            if backend.poll(now, answers) == 0 {
                if ended > 0 || polls >= bounds.looks {
                    break;
                }
                continue;
            }
            now = clock.now();
            let answer = answers.as_slice()[0];
            answers.clear();
            let sent_ns = std::mem::replace(&mut sent[index_of(answer.token)], now.ns);
            sums.count_one(&answer, sent_ns, fixed, now);
            ended += 1;
            again.lba = address(addresses);
            taken = backend.submit(now, std::slice::from_ref(again), segments);
            backend.flush();
        }
        if taken == 0 {
            self.requests.push(self.again);
        }
        self.turns.polls += polls;
        self.turns.idle_polls += polls - ended;
        self.turns.completions += ended;
        self.budget -= ended;
        (usize::try_from(ended).unwrap_or(usize::MAX), now)
    }

    /// Counts an I/O that has ended alone, and sends the next one like it.
    #[inline]
    pub(super) fn repeat_one(&mut self, stamp: Instant, fixed: Fixed, workload: &mut Workload) {
        let answer = self.answers.as_slice()[0];
        self.answers.clear();
        let sent_ns = std::mem::replace(&mut self.sent[index_of(answer.token)], stamp.ns);
        self.sums.count_one(&answer, sent_ns, fixed, stamp);
        self.turns.completions += 1;
        self.budget -= 1;
        if self.again.token != answer.token || self.again.blocks == 0 {
            self.again = fixed.request(answer.token, 0);
        }
        self.again.lba = workload.address(&mut self.addresses, fixed.blocks);
        let alone = std::slice::from_ref(&self.again);
        let taken = self.backend.submit(stamp, alone, &self.segments);
        self.backend.flush();
        if taken == 0 {
            self.requests.push(self.again);
        }
    }
}

impl Sums {
    /// Counts one answer.
    #[inline]
    fn count_one(&mut self, answer: &Answer, sent_ns: u64, fixed: Fixed, now: Instant) {
        if answer.outcome.is_success() {
            self.count(super::Run { sent_ns, operation: fixed.operation, count: 1 }, now);
            self.bytes += u64::from(fixed.len_bytes);
        } else {
            self.fail(answer.outcome);
        }
    }
}
