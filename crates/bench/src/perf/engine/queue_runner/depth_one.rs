//! Loop of a queue runner at depth 1, without the work that only batches need. Conditions that do
//! not change are tested once for many iterations.

use tenmil_base::{Instant, IoChannel, IoCompletion};
use tenmil_linux::Clock;

use super::{FixedIo, QueueRunner, QueueTotals, Verifier, task_of_token};
use crate::perf::workload::{self, Workload};

/// Limits of one call.
#[derive(Clone, Copy, Debug)]
pub(in crate::perf::engine) struct DepthOneLimits {
    /// I/Os.
    pub(in crate::perf::engine) ios: u64,
    /// Polls without a completion, if there has been none in this call.
    pub(in crate::perf::engine) polls: u64,
}

impl<S: Verifier> QueueRunner<S> {
    /// Whether the runner has a single task with a fixed kind of I/O, and that I/O is in flight.
    #[inline]
    pub(in crate::perf::engine) fn qualifies_for_depth_one_loop(&self) -> bool {
        let is_waiting = !self.requests.is_empty() || !self.idle.is_empty();
        self.sent.len() == 1 && self.fixed.is_some() && !S::IS_ON && !is_waiting && self.budget > 0
    }

    /// Iterations of a runner that [qualifies](Self::qualifies_for_depth_one_loop), while I/Os complete. Returns the
    /// number of completions, each of which was followed by a new I/O, and the time as last read.
    #[inline]
    pub(in crate::perf::engine) fn run_depth_one(
        &mut self,
        now: Instant,
        clock: &Clock,
        workload: &mut Workload,
        bounds: DepthOneLimits,
    ) -> (usize, Instant) {
        let Some(fixed) = self.fixed else { return (0, now) };
        if let Some(kept) = workload.uniform_address_generator() {
            // Works on a copy, which stays in registers during the loop.
            let mut random = kept.clone();
            let ended = self.run_depth_one_at(now, *clock, fixed, bounds, |queue| {
                queue.draw_uniform(&mut random)
            });
            *kept = random;
            return ended;
        }
        let blocks = fixed.blocks;
        self.run_depth_one_at(now, *clock, fixed, bounds, |queue| {
            workload.draw_address(queue, blocks)
        })
    }

    /// [`run_depth_one`](Self::run_depth_one), with the addresses that `address` draws.
    #[inline]
    fn run_depth_one_at(
        &mut self,
        mut now: Instant,
        clock: Clock,
        fixed: FixedIo,
        bounds: DepthOneLimits,
        mut address: impl FnMut(&mut workload::AddressStream) -> u64,
    ) -> (usize, Instant) {
        let Self { backend, completions, sent, again, addresses, segments, sums, .. } = self;
        let most = bounds.ios.min(self.budget);
        let (mut ended, mut polls, mut taken) = (0, 0, 1);
        // Only the address changes per I/O; counters are updated once, after the loop.
        *again = fixed.next_request(0, 0);
        while ended < most && taken > 0 {
            polls += 1;
            if backend.poll(now, completions) == 0 {
                if ended > 0 || polls >= bounds.polls {
                    break;
                }
                continue;
            }
            now = clock.now();
            let completion = completions.as_slice()[0];
            completions.clear();
            let sent_ns = std::mem::replace(&mut sent[task_of_token(completion.token)], now.ns);
            sums.count_one_completion(&completion, sent_ns, fixed, now);
            ended += 1;
            again.lba = address(addresses);
            taken = backend.submit(now, std::slice::from_ref(again), segments);
            backend.flush_submissions();
        }
        // A rejected request is kept for the normal loop, which retries it.
        if taken == 0 {
            self.requests.push(self.again);
        }
        self.counters.polls += polls;
        self.counters.idle_polls += polls - ended;
        self.counters.completions += ended;
        self.budget -= ended;
        (usize::try_from(ended).unwrap_or(usize::MAX), now)
    }

    /// Counts the only completion and submits the next I/O of the same kind.
    #[inline]
    pub(super) fn complete_and_resubmit_one(
        &mut self,
        stamp: Instant,
        fixed: FixedIo,
        workload: &mut Workload,
    ) {
        let completion = self.completions.as_slice()[0];
        self.completions.clear();
        let sent_ns = std::mem::replace(&mut self.sent[task_of_token(completion.token)], stamp.ns);
        self.sums.count_one_completion(&completion, sent_ns, fixed, stamp);
        self.counters.completions += 1;
        self.budget -= 1;
        if self.again.token != completion.token || self.again.blocks == 0 {
            self.again = fixed.next_request(completion.token, 0);
        }
        self.again.lba = workload.draw_address(&mut self.addresses, fixed.blocks);
        let alone = std::slice::from_ref(&self.again);
        let taken = self.backend.submit(stamp, alone, &self.segments);
        self.backend.flush_submissions();
        if taken == 0 {
            self.requests.push(self.again);
        }
    }
}

impl QueueTotals {
    /// Counts one completion.
    #[inline]
    fn count_one_completion(
        &mut self,
        completion: &IoCompletion,
        sent_ns: u64,
        fixed: FixedIo,
        now: Instant,
    ) {
        if completion.status.is_success() {
            self.count_completions(
                super::CompletionRun { sent_ns, operation: fixed.operation, count: 1 },
                now,
            );
            self.bytes += u64::from(fixed.len_bytes);
        } else {
            self.count_failure(completion.status);
        }
    }
}
