//! Load loop of one queue pair: the innermost loop of `perf`.
//!
//! ```text
//!   poll ──> completions ──> for each: count, time, draw the next ──> requests ──> submit, flush
//!                               │                                        │
//!                               └── token = index of the task ───────────┘
//! ```
//!
//! A task is one I/O in flight: it owns a buffer for the whole run, and its index is the token. The
//! clock is read once per batch of completions. All tasks submitted in one batch carry the same
//! time stamp, so their latencies are recorded as a run of equal values rather than one by one.

mod depth_one;

use std::collections::BTreeMap;

use tenmil_base::{
    CompletionBatch, Histogram, Instant, IoChannel, IoCompletion, IoStatus, Operation, Request,
    RequestFlags, Segment, Span, WakeSource,
};
use tenmil_linux::Clock;

pub(super) use self::depth_one::DepthOneLimits;
use super::verifier::Verifier;
use crate::perf::arrival_times::ArrivalTimes;
use crate::perf::perf_result::{FastPathCounters, IoCounts};
use crate::perf::workload::{self, IoSpec, Workload};

/// A queue pair with its tasks and counters.
pub(super) struct QueueRunner<S> {
    backend: Box<dyn IoChannel>,
    addresses: workload::AddressStream,
    /// Submission time, or intended start, of the I/O of each task, in nanoseconds.
    sent: Box<[u64]>,
    tasks: Box<[InflightIo]>,
    /// Properties common to all I/Os, if they have any: no task stores them then.
    fixed: Option<FixedIo>,
    /// Segment `index` is the buffer of task `index`, with the length of its current I/O.
    segments: Box<[Segment]>,
    /// Requests that the I/O channel has not accepted yet.
    requests: Vec<Request>,
    /// Request of a runner with one I/O in flight. Only its address changes, so the reader need not
    /// wait for the stores of the other fields.
    again: Request,
    completions: CompletionBatch,
    /// Tasks that wait for an arrival. Empty in a closed loop.
    idle: Vec<u32>,
    /// Number of I/Os that may still be started.
    budget: u64,
    in_flight: u32,
    scrutiny: S,
    sums: QueueTotals,
    /// Counters since the runner was created. Doorbells are counted by the I/O channel.
    counters: FastPathCounters,
}

/// One I/O in flight.
#[derive(Clone, Copy, Debug)]
struct InflightIo {
    len_bytes: u32,
    operation: Operation,
}

/// The only kind of I/O of a runner.
#[derive(Clone, Copy, Debug)]
struct FixedIo {
    operation: Operation,
    len_bytes: u32,
    blocks: u32,
    segment_count: u16,
}

/// Counters of a runner since they were last cleared.
#[derive(Clone, Debug, Default)]
pub(super) struct QueueTotals {
    pub(super) latency: BTreeMap<Operation, Histogram>,
    pub(super) bytes: u64,
    pub(super) errors: BTreeMap<u16, u64>,
    /// Longest time of a batch from its time stamp to its doorbell.
    pub(super) longest_batch: Span,
    /// Open loop: I/Os started late because no task was idle.
    pub(super) delayed: u64,
    /// Open loop: last time at which no task was idle.
    full_until: Instant,
    /// Histogram of the operation counted last.
    recent: Option<(Operation, Histogram)>,
}

/// Number of draws per task that may hit blocks with an operation in progress, before the task
/// waits for the next iteration.
const REDRAWS_MAX: u32 = 64;

/// Consecutive completions with the same operation and submission time.
#[derive(Clone, Copy)]
struct CompletionRun {
    sent_ns: u64,
    operation: Operation,
    count: u64,
}

/// Completions of one batch, divided into runs with the same submission time: only the end of a run
/// needs work.
struct CompletionRuns {
    stamp: Instant,
    operation: Operation,
    /// Index in the batch of the first completion of the current run.
    first: usize,
    /// Submission time of the current run.
    sent_ns: u64,
    /// Successful completions in the finished runs.
    good: u64,
}

/// Submission time that never occurs.
const NO_STAMP: u64 = u64::MAX;

/// Constructor arguments of a runner.
pub(super) struct QueueRunnerParts<S> {
    pub(super) backend: Box<dyn IoChannel>,
    pub(super) addresses: workload::AddressStream,
    pub(super) buffers: Vec<Segment>,
    pub(super) budget: u64,
    pub(super) scrutiny: S,
    /// Operation and size of all I/Os, if there is only one of each.
    pub(super) fixed: Option<(Operation, u32)>,
}

impl<S: Verifier> QueueRunner<S> {
    /// Creates a runner with one idle task per buffer.
    pub(super) fn new(parts: QueueRunnerParts<S>) -> Self {
        let depth = parts.buffers.len();
        let block_size = parts.backend.limits().block_size;
        let task = InflightIo { len_bytes: 0, operation: Operation::Read };
        let tasks = u32::try_from(depth).expect("a depth is a small number");
        Self {
            backend: parts.backend,
            addresses: parts.addresses,
            sent: vec![0; depth].into(),
            tasks: vec![task; depth].into(),
            fixed: parts
                .fixed
                .map(|(operation, len_bytes)| FixedIo::new(operation, len_bytes, block_size)),
            segments: parts.buffers.into(),
            requests: Vec::with_capacity(depth),
            again: Request::PLACEHOLDER,
            completions: CompletionBatch::with_capacity(depth),
            idle: (0..tasks).rev().collect(),
            budget: parts.budget,
            in_flight: 0,
            scrutiny: parts.scrutiny,
            sums: QueueTotals::default(),
            counters: FastPathCounters::default(),
        }
    }

    /// Starts an I/O for every idle task, at the beginning of a closed loop.
    pub(super) fn start_idle_tasks(&mut self, now: Instant, workload: &mut Workload) {
        let mut waiting = std::mem::take(&mut self.idle);
        while let Some(task) = waiting.pop() {
            self.start_io(task, now, workload);
        }
        self.submit(now);
    }

    /// One iteration of a closed loop: every completion is followed by a new I/O. Returns the
    /// number of completions, and the time as last read.
    #[inline(always)]
    pub(super) fn step_closed_loop(
        &mut self,
        now: Instant,
        clock: &Clock,
        workload: &mut Workload,
    ) -> (usize, Instant) {
        let count = self.backend.poll(now, &mut self.completions);
        self.counters.polls += 1;
        if count == 0 {
            self.counters.idle_polls += 1;
            if !(self.requests.is_empty() && self.idle.is_empty()) {
                self.start_idle_tasks(now, workload);
            }
            return (0, now);
        }
        let stamp = clock.now();
        match self.fixed {
            // Fast path: one kind of I/O, no verification, and enough budget for the whole batch.
            Some(fixed) if !S::IS_ON && self.budget >= count as u64 => {
                if count == 1 && self.requests.is_empty() {
                    self.complete_and_resubmit_one(stamp, fixed, workload);
                    return (1, stamp);
                }
                self.repeat_fixed(stamp, fixed, workload);
            }
            _ => {
                self.process_completions(stamp, |queue, task| queue.start_io(task, stamp, workload))
            }
        }
        self.submit(stamp);
        if count == 1 {
            return (1, stamp);
        }
        let end = clock.now();
        self.sums.longest_batch = self.sums.longest_batch.max(end.since(stamp));
        (count, end)
    }

    /// Replaces each completed I/O by one of the same kind at a new address.
    #[inline]
    fn repeat_fixed(&mut self, stamp: Instant, fixed: FixedIo, workload: &mut Workload) {
        if let Some(kept) = workload.uniform_address_generator() {
            // Works on a copy, which stays in registers during the loop.
            let mut random = kept.clone();
            self.repeat_fixed_at(stamp, fixed, |queue| queue.draw_uniform(&mut random));
            *kept = random;
        } else {
            self.repeat_fixed_at(stamp, fixed, |queue| workload.draw_address(queue, fixed.blocks));
        }
    }

    /// [`repeat_fixed`](Self::repeat_fixed), with the addresses that `address` draws.
    #[inline]
    fn repeat_fixed_at(
        &mut self,
        stamp: Instant,
        fixed: FixedIo,
        mut address: impl FnMut(&mut workload::AddressStream) -> u64,
    ) {
        let completions =
            std::mem::replace(&mut self.completions, CompletionBatch::with_capacity(0));
        let completed = completions.as_slice();
        let Self { sent, requests, addresses, sums, .. } = self;
        let FixedIo { operation, len_bytes, .. } = fixed;
        let mut runs = CompletionRuns { stamp, operation, first: 0, sent_ns: NO_STAMP, good: 0 };
        requests.extend(completed.iter().enumerate().map(|(index, completion)| {
            let sent_ns = std::mem::replace(&mut sent[task_of_token(completion.token)], stamp.ns);
            // Detects a new submission time and a failure with a single branch.
            if sent_ns ^ runs.sent_ns | u64::from(completion.status.0) != 0 {
                runs.start_next_run(sums, index, sent_ns, completion);
            }
            fixed.next_request(completion.token, address(addresses))
        }));
        runs.count_run(sums, completed.len());
        sums.bytes += runs.good * u64::from(len_bytes);
        self.counters.completions += completed.len() as u64;
        self.budget -= completed.len() as u64;
        self.completions = completions;
        self.completions.clear();
    }

    /// One iteration of an open loop: I/Os start when they arrive, and their latency counts from
    /// then. Returns the number of completions and starts, and the time as last read.
    pub(super) fn step_open_loop(
        &mut self,
        now: Instant,
        clock: &Clock,
        workload: &mut Workload,
        arrivals: &mut ArrivalTimes,
    ) -> (usize, Instant) {
        let count = self.backend.poll(now, &mut self.completions);
        self.counters.polls += 1;
        self.counters.idle_polls += u64::from(count == 0);
        let stamp = clock.now();
        self.process_completions(stamp, |queue, task| queue.idle.push(task));
        let waiting = self.budget;
        while self.budget > 0 && arrivals.next_due() <= stamp {
            let Some(task) = self.idle.pop() else {
                self.sums.full_until = stamp;
                break;
            };
            let Some(intended) = arrivals.take_due(stamp) else { break };
            self.sums.delayed += u64::from(intended <= self.sums.full_until);
            self.start_io(task, intended, workload);
        }
        self.submit(stamp);
        (count + usize::try_from(waiting - self.budget).unwrap_or(usize::MAX), stamp)
    }

    /// Wake-up source of the I/O channel.
    pub(super) fn wake_source(&self) -> WakeSource<'_> {
        self.backend.wake_source()
    }

    /// Whether a waiting thread should sleep at once: see [`is_done_by_local_kernel`](tenmil_base::ChannelWakeup::is_done_by_local_kernel).
    pub(super) fn does_kernel_deliver_completions(&self) -> bool {
        self.backend.is_done_by_local_kernel()
    }

    /// Prepares for a sleep: see [`arm`](tenmil_base::ChannelWakeup::arm).
    pub(super) fn arm(&mut self) -> bool {
        !self.requests.is_empty() || self.backend.arm()
    }

    /// Ends a sleep: see [`disarm`](tenmil_base::ChannelWakeup::disarm).
    pub(super) fn disarm(&mut self) {
        self.backend.disarm();
    }

    /// Time at which the I/O channel must be polled even without an event.
    pub(super) fn wake_at(&self) -> Instant {
        self.backend.wake_at()
    }

    /// Reaps completions without starting new I/Os, at the end of a run.
    pub(super) fn reap_without_submitting(&mut self, now: Instant) {
        self.in_flight -= u32::try_from(self.requests.len()).unwrap_or(0);
        for request in self.requests.drain(..) {
            self.scrutiny.handle_completion(
                IoStatus::ABORTED,
                task_of_token(request.token),
                Segment::default(),
            );
        }
        self.backend.flush_submissions();
        self.backend.poll(now, &mut self.completions);
        self.process_completions(now, |queue, task| queue.idle.push(task));
    }

    /// Counters since the runner was created.
    pub(super) fn counters(&self) -> FastPathCounters {
        let rung = self.backend.doorbell_stats();
        FastPathCounters {
            submission_doorbells: rung.submission,
            completion_doorbells: rung.completion,
            doorbell_registers: rung.registers,
            cmb_commands: rung.cmb_commands,
            ..self.counters
        }
    }

    /// Data verifier.
    pub(super) fn verifier(&self) -> &S {
        &self.scrutiny
    }

    /// Number of I/Os in flight.
    pub(super) fn in_flight_ios(&self) -> u32 {
        self.in_flight
    }

    /// Whether every I/O of the budget has completed.
    pub(super) fn is_done(&self) -> bool {
        self.budget == 0 && self.in_flight == 0
    }

    /// Clears the counters at the end of the warm-up.
    pub(super) fn clear_counters(&mut self) {
        self.sums = QueueTotals::default();
    }

    /// Plain sums of the counters.
    pub(super) fn io_counts(&self) -> IoCounts {
        self.sums.io_counts()
    }

    /// The counters.
    pub(super) fn totals(&self) -> QueueTotals {
        let mut sums = self.sums.clone();
        sums.store_recent_histogram();
        sums
    }

    /// Processes the completions: counts each and passes its task to `next`.
    #[inline]
    fn process_completions(&mut self, now: Instant, mut next: impl FnMut(&mut Self, u32)) {
        let completions =
            std::mem::replace(&mut self.completions, CompletionBatch::with_capacity(0));
        let mut run = CompletionRun { sent_ns: 0, operation: Operation::Read, count: 0 };
        for completion in completions.as_slice() {
            let index = task_of_token(completion.token);
            let (sent_ns, InflightIo { len_bytes, operation }) =
                (self.sent[index], self.tasks[index]);
            if completion.status.is_success() {
                if sent_ns != run.sent_ns || operation != run.operation {
                    self.sums.count_completions(run, now);
                    run = CompletionRun { sent_ns, operation, count: 0 };
                }
                run.count += 1;
                self.sums.bytes += u64::from(len_bytes);
            } else {
                self.sums.count_failure(completion.status);
            }
            // Before `next` reuses the task and its buffer.
            if S::IS_ON {
                self.scrutiny.handle_completion(completion.status, index, self.segments[index]);
            }
            #[expect(clippy::cast_possible_truncation, reason = "an index of the task table")]
            next(self, completion.token as u32);
        }
        self.sums.count_completions(run, now);
        let count = completions.as_slice().len();
        self.counters.completions += count as u64;
        self.in_flight -= u32::try_from(count).unwrap_or(0);
        self.completions = completions;
        self.completions.clear();
    }

    /// Draws the next I/O for `task` and queues its request. The task stays idle if the budget is
    /// used up or its blocks have operations in progress.
    #[inline]
    fn start_io(&mut self, task: u32, sent: Instant, workload: &mut Workload) {
        if self.budget == 0 {
            return;
        }
        let mut draw = workload.draw_io(&mut self.addresses);
        if S::IS_ON {
            let tries = (0..REDRAWS_MAX).find(|_| {
                self.scrutiny.try_begin_io(&draw, task as usize) || {
                    draw = workload.draw_io(&mut self.addresses);
                    false
                }
            });
            if tries.is_none() {
                self.idle.push(task);
                return;
            }
        }
        self.queue_request(task, sent, draw);
    }

    #[inline]
    fn queue_request(&mut self, task: u32, sent: Instant, draw: IoSpec) {
        let index = task as usize;
        let IoSpec { operation, lba, blocks, len_bytes } = draw;
        self.sent[index] = sent.ns;
        self.tasks[index] = InflightIo { len_bytes, operation };
        self.segments[index].len_bytes = len_bytes;
        if S::IS_ON {
            self.scrutiny.prepare_buffer(&draw, self.segments[index]);
        }
        self.budget -= 1;
        self.in_flight += 1;
        let transfers_data = matches!(operation, Operation::Read | Operation::Write);
        self.requests.push(Request {
            token: u64::from(task),
            lba,
            operand: 0,
            blocks,
            segment_first: task,
            segment_count: u16::from(transfers_data),
            metadata_count: 0,
            operation,
            flags: RequestFlags::NONE,
        });
    }

    /// Submits the queued requests. Requests that the I/O channel rejects stay queued.
    #[inline]
    fn submit(&mut self, now: Instant) {
        let taken = self.backend.submit(now, &self.requests, &self.segments);
        self.backend.flush_submissions();
        if taken == self.requests.len() {
            self.requests.clear();
        } else {
            self.requests.drain(..taken);
        }
    }
}

impl CompletionRuns {
    /// Ends the current run at this completion, which begins another run or has failed.
    #[inline(never)]
    fn start_next_run(
        &mut self,
        sums: &mut QueueTotals,
        index: usize,
        sent_ns: u64,
        completion: &IoCompletion,
    ) {
        self.count_run(sums, index);
        if completion.status.is_success() {
            (self.first, self.sent_ns) = (index, sent_ns);
        } else {
            sums.count_failure(completion.status);
            (self.first, self.sent_ns) = (index + 1, NO_STAMP);
        }
    }

    /// Counts the current run, which ends before the completion `index`.
    fn count_run(&mut self, sums: &mut QueueTotals, index: usize) {
        let count = (index - self.first) as u64;
        let Self { sent_ns, operation, .. } = *self;
        sums.count_completions(CompletionRun { sent_ns, operation, count }, self.stamp);
        self.good += count;
    }
}

impl FixedIo {
    fn new(operation: Operation, len_bytes: u32, block_size: u32) -> Self {
        let transfers_data = matches!(operation, Operation::Read | Operation::Write);
        let blocks = len_bytes >> block_size.trailing_zeros();
        Self { operation, len_bytes, blocks, segment_count: u16::from(transfers_data) }
    }

    /// Next request of the task `token`.
    #[inline(always)]
    fn next_request(self, token: u64, lba: u64) -> Request {
        #[expect(clippy::cast_possible_truncation, reason = "an index of the task table")]
        let segment_first = token as u32;
        Request {
            token,
            lba,
            operand: 0,
            segment_first,
            blocks: self.blocks,
            segment_count: self.segment_count,
            metadata_count: 0,
            operation: self.operation,
            flags: RequestFlags::NONE,
        }
    }
}

impl QueueTotals {
    /// Counts a run of completions at `now`.
    #[inline]
    fn count_completions(&mut self, run: CompletionRun, now: Instant) {
        if run.count == 0 {
            return;
        }
        if self.recent.as_ref().is_none_or(|(operation, _)| *operation != run.operation) {
            self.select_histogram(run.operation);
        }
        if let Some((_, histogram)) = &mut self.recent {
            histogram.record_many(now.ns.saturating_sub(run.sent_ns), run.count);
        }
    }

    /// Makes the histogram of another operation the recent one.
    fn select_histogram(&mut self, operation: Operation) {
        self.store_recent_histogram();
        let histogram = self.latency.remove(&operation).unwrap_or_default();
        self.recent = Some((operation, histogram));
    }

    fn store_recent_histogram(&mut self) {
        if let Some((operation, histogram)) = self.recent.take() {
            self.latency.insert(operation, histogram);
        }
    }

    #[cold]
    fn count_failure(&mut self, result: IoStatus) {
        *self.errors.entry(result.0).or_default() += 1;
    }

    /// Plain sums.
    pub(super) fn io_counts(&self) -> IoCounts {
        let mut counts = IoCounts { bytes: self.bytes, ..IoCounts::default() };
        let recent = self.recent.as_ref().map(|(operation, histogram)| (operation, histogram));
        for (operation, histogram) in self.latency.iter().chain(recent) {
            let count = histogram.count();
            counts.ios += count;
            match operation {
                Operation::Read => counts.reads += count,
                Operation::Write => counts.writes += count,
                _ => {}
            }
        }
        counts.errors = self.errors.values().sum();
        counts
    }
}

/// Task of a token.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "tokens are indices of the task table")]
fn task_of_token(token: u64) -> usize {
    token as usize
}
