//! Submitting thread: a poller on a reactor that runs its queue runners for the duration of the
//! test.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use tenmil_base::{Instant, Span};
use tenmil_linux::Clock;
use tenmil_linux::poll_set::{Interest, PollSet};
use tenmil_reactor::{Context, LONG_LATENCY, PollResult, Poller, PollerWake};

use super::cpu_placement::CoreAssignment;
use super::queue_runner::{DepthOneLimits, QueueRunner, QueueTotals};
use super::verifier::Verifier;
use crate::perf::arrival_times::ArrivalTimes;
use crate::perf::perf_options::{OpenLoop, PerfOptions};
use crate::perf::perf_result::{FastPathCounters, IoCounts, RunEndReason, VerifyResult};
use crate::perf::progress::{RunPhase, RunProgress};
use crate::perf::workload::Workload;

/// Submitting thread. It ends its lightweight thread after it has reported its result.
pub(super) struct LoadWorker<S> {
    queues: Vec<DeviceQueue<S>>,
    workload: Workload,
    clock: Clock,
    plan: WorkerPlan,
    /// Index among the submitting threads.
    index: usize,
    progress: Arc<RunProgress>,
    results: Sender<WorkerResult>,
    stage: WorkerStage,
    /// Next time at which there is work besides the queue runners.
    next_due: Instant,
    series: IntervalRecorder,
    /// Mean latency of an I/O. Used to predict the next completion.
    latency: Span,
}

/// Constructor arguments of a worker.
pub(super) struct WorkerParts<S> {
    pub(super) queues: Vec<DeviceQueue<S>>,
    pub(super) workload: Workload,
    pub(super) clock: Clock,
    pub(super) plan: WorkerPlan,
    pub(super) index: usize,
    pub(super) progress: Arc<RunProgress>,
    pub(super) results: Sender<WorkerResult>,
}

/// Phase of a worker.
enum WorkerStage {
    /// Nothing has been submitted.
    Begin,
    /// Running, counters are discarded.
    WarmUp { until: Instant },
    /// Running, counters are kept.
    Measure { since: Instant, ticks: u64, until: Instant, before: Vec<FastPathCounters> },
    /// No new I/Os; waiting for those in flight.
    Drain { until: Instant, share: Box<WorkerResult> },
    /// The result has been reported.
    Over,
}

/// A queue runner and the index of its device.
pub(super) struct DeviceQueue<S> {
    pub(super) queue: QueueRunner<S>,
    pub(super) device: usize,
    /// Share of the rate, in an open loop.
    pub(super) rate: Option<RateShare>,
    /// Arrivals of that share, created when the thread starts.
    pub(super) arrivals: Option<ArrivalTimes>,
}

/// Share of one queue runner in a rate.
#[derive(Clone, Copy, Debug)]
pub(super) struct RateShare {
    pub(super) rate: OpenLoop,
    pub(super) part: u64,
    pub(super) parts: u64,
    pub(super) seed: u64,
}

/// Schedule of a worker.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkerPlan {
    pub(super) warm_up: Span,
    pub(super) time: Span,
    /// Whether the device side shares this CPU.
    pub(super) yields: bool,
}

impl WorkerPlan {
    /// Schedule of `options`.
    pub(super) fn new(options: &PerfOptions, places: &CoreAssignment) -> Self {
        Self {
            warm_up: if options.io_count.is_some() { Span { ns: 0 } } else { options.warm_up },
            time: options.time,
            yields: places.yields,
        }
    }
}

/// Result of a submitting thread.
pub(super) struct WorkerResult {
    pub(super) queues: Vec<QueueResult>,
    pub(super) elapsed: Span,
    pub(super) ticks: u64,
    pub(super) ended: RunEndReason,
    /// I/Os and bytes in each interval.
    pub(super) series: Vec<(u64, u64)>,
    /// I/Os that were due and not started at the end.
    pub(super) backlog: u64,
    /// I/Os that did not complete before the drain timeout.
    pub(super) unanswered: u64,
}

/// Result of one queue runner.
pub(super) struct QueueResult {
    pub(super) device: usize,
    pub(super) sums: QueueTotals,
    pub(super) counters: FastPathCounters,
    pub(super) verified: Option<VerifyResult>,
}

/// Interval of the time series.
pub(super) const INTERVAL: Span = Span::from_ms(100);

/// Empty rounds over the queue runners before a poll reports no work. A round is several times
/// cheaper than the reactor iteration around it, and sees completions in between earlier.
const POLLS_MAX: u32 = 8;

/// Limits of one poll while I/Os complete: number of rounds, and number of completions. A reactor
/// iteration costs as much as two I/Os, and its messages can wait for so many.
const ROUNDS: u32 = 32;
const ENOUGH: usize = 32;

/// The same limits for a single queue runner of depth 1.
const DEPTH_ONE_BOUNDS: DepthOneLimits =
    DepthOneLimits { ios: ENOUGH as u64, polls: POLLS_MAX as u64 };

/// Drain timeout.
const DRAIN: Span = Span::from_secs(5);

impl<S: Verifier> LoadWorker<S> {
    /// Creates a worker that has not started.
    pub(super) fn new(parts: WorkerParts<S>) -> Self {
        let WorkerParts { queues, workload, clock, plan, index, progress, results } = parts;
        Self {
            queues,
            workload,
            clock,
            plan,
            index,
            progress,
            results,
            stage: WorkerStage::Begin,
            next_due: Instant::default(),
            series: IntervalRecorder::default(),
            latency: Span::default(),
        }
    }

    /// Wake-up sources of its queue runners. None if one of them has none.
    pub(super) fn wake_sources(&self) -> io::Result<PollerWake> {
        if let [of] = self.queues.as_slice() {
            return PollerWake::from_source(of.queue.wake_source());
        }
        let watch = PollSet::new()?;
        for (token, of) in (0..).zip(&self.queues) {
            match of.queue.wake_source() {
                tenmil_base::WakeSource::Descriptor(descriptor) => {
                    watch.add(descriptor, token, Interest { readable: true, writable: false })?;
                }
                tenmil_base::WakeSource::Deadline => {}
                tenmil_base::WakeSource::None => return Ok(PollerWake::Never),
            }
        }
        Ok(PollerWake::Descriptor(watch.into()))
    }

    /// Whether the kernel performs all I/O of all queue runners.
    pub(super) fn does_kernel_deliver_completions(&self) -> bool {
        self.queues.iter().all(|of| of.queue.does_kernel_deliver_completions())
    }

    fn start_load(&mut self, now: Instant) {
        for DeviceQueue { queue, rate, arrivals, .. } in &mut self.queues {
            *arrivals = rate.map(|RateShare { rate, part, parts, seed }| {
                ArrivalTimes::new(rate, part, parts, now, seed)
            });
            if arrivals.is_none() {
                queue.start_idle_tasks(now, &mut self.workload);
            }
        }
        self.series = IntervalRecorder::from(now);
        self.stage = WorkerStage::WarmUp { until: now.after(self.plan.warm_up) };
        self.run_periodic(now);
    }

    /// Runs each queue runner once. Returns the number of completions and starts, and the time as
    /// last read.
    #[inline]
    fn run_queues_once(&mut self, mut now: Instant) -> (usize, Instant) {
        let mut found = 0;
        for of in &mut self.queues {
            let count;
            (count, now) = match &mut of.arrivals {
                None => of.queue.step_closed_loop(now, &self.clock, &mut self.workload),
                Some(arrivals) => {
                    of.queue.step_open_loop(now, &self.clock, &mut self.workload, arrivals)
                }
            };
            found += count;
        }
        (found, now)
    }

    /// Runs the queue runners until enough I/Os have completed, or until several rounds in a row
    /// were empty.
    #[inline]
    fn run_queues(&mut self, mut now: Instant) -> (usize, Instant) {
        if let [DeviceQueue { queue, arrivals: None, .. }] = self.queues.as_mut_slice()
            && queue.qualifies_for_depth_one_loop()
        {
            return queue.run_depth_one(now, &self.clock, &mut self.workload, DEPTH_ONE_BOUNDS);
        }
        let (mut found, mut polls) = (0, 0);
        for _ in 0..ROUNDS {
            let count;
            (count, now) = self.run_queues_once(now);
            found += count;
            polls += u32::from(count == 0);
            let is_over =
                if found > 0 { count == 0 || found >= ENOUGH } else { polls >= POLLS_MAX };
            if is_over {
                break;
            }
        }
        (found, now)
    }

    /// Performs periodic work: publishes the counters and changes the phase.
    #[cold]
    fn run_periodic(&mut self, now: Instant) {
        if now >= self.series.mark {
            self.publish_counters(now);
        }
        let (is_stopping, is_done) = (self.progress.is_stopping(), self.are_all_queues_done());
        let is_over = is_stopping || is_done;
        if matches!(self.stage, WorkerStage::WarmUp { until } if is_over || now >= until) {
            self.start_measuring(now);
        }
        match self.stage {
            WorkerStage::Measure { until, .. } if now >= until => {
                self.finish_measuring(now, RunEndReason::Time)
            }
            WorkerStage::Measure { .. } if is_stopping => {
                self.finish_measuring(now, RunEndReason::Interrupt)
            }
            WorkerStage::Measure { .. } if is_done => {
                self.finish_measuring(now, RunEndReason::Count)
            }
            WorkerStage::WarmUp { until } | WorkerStage::Measure { until, .. } => {
                self.next_due = self.series.mark.min(until);
            }
            WorkerStage::Begin | WorkerStage::Drain { .. } | WorkerStage::Over => {}
        }
    }

    /// Ends the warm-up and clears the counters.
    fn start_measuring(&mut self, now: Instant) {
        let before = self.queues.iter().map(|of| of.queue.counters()).collect();
        self.queues.iter_mut().for_each(|of| of.queue.clear_counters());
        self.progress.set_phase(RunPhase::Measure);
        self.series = IntervalRecorder::from(now);
        let ticks = self.clock.raw_ticks();
        let until = now.after(self.plan.time);
        self.stage = WorkerStage::Measure { since: now, ticks, until, before };
    }

    /// Ends the measurement, collects its results and begins to drain.
    fn finish_measuring(&mut self, now: Instant, ended: RunEndReason) {
        let stage = std::mem::replace(&mut self.stage, WorkerStage::Over);
        let WorkerStage::Measure { since, ticks, before, .. } = stage else { return };
        let queues = self.queues.iter().zip(before).map(|(of, before)| QueueResult {
            device: of.device,
            sums: of.queue.totals(),
            counters: of.queue.counters().difference_since(&before),
            verified: None,
        });
        let backlog = self.queues.iter().filter_map(|of| of.arrivals.as_ref());
        let share = WorkerResult {
            queues: queues.collect(),
            elapsed: now.since(since),
            ticks: self.clock.raw_ticks().saturating_sub(ticks),
            ended,
            series: std::mem::take(&mut self.series.points),
            backlog: backlog.map(|arrivals| arrivals.due_count(now)).sum(),
            unanswered: 0,
        };
        self.stage = WorkerStage::Drain { until: now.after(DRAIN), share: Box::new(share) };
        self.next_due = now;
    }

    /// Drains the I/Os in flight, and reports the result when none is left or the timeout has
    /// passed.
    fn drain_in_flight(&mut self, context: &mut Context<'_>) {
        let now = context.now();
        self.queues.iter_mut().for_each(|of| of.queue.reap_without_submitting(now));
        let left: u64 = self.queues.iter().map(|of| u64::from(of.queue.in_flight_ios())).sum();
        let WorkerStage::Drain { until, share } = &mut self.stage else { return };
        if left > 0 && now < *until {
            return;
        }
        share.unanswered = left;
        for (of, queue) in self.queues.iter().zip(&mut share.queues) {
            queue.verified = of.queue.verifier().verify_result();
        }
        if let WorkerStage::Drain { share, .. } =
            std::mem::replace(&mut self.stage, WorkerStage::Over)
        {
            // The receiver is dropped only if the run was cancelled.
            let _ = self.results.send(*share);
        }
        context.request_thread_end();
    }

    /// Publishes the counters, ten times a second.
    fn publish_counters(&mut self, now: Instant) {
        let mut counts = IoCounts::default();
        self.queues.iter().for_each(|of| counts.merge(&of.queue.io_counts()));
        let IoCounts { ios, bytes, errors, .. } = counts;
        self.progress.thread_progress(self.index).store_sums(ios, bytes, errors);
        self.series.record_ended_intervals(now, (ios, bytes));
        let in_flight: u64 = self.queues.iter().map(|of| u64::from(of.queue.in_flight_ios())).sum();
        let rate = self.series.last_interval().map_or(0, |(ios, _)| ios);
        self.latency = Span { ns: (INTERVAL.ns * in_flight).checked_div(rate).unwrap_or(0) };
    }

    fn are_all_queues_done(&self) -> bool {
        self.queues.iter().all(|of| of.queue.is_done())
    }
}

impl<S: Verifier + Send> Poller for LoadWorker<S> {
    #[inline]
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        let now = context.now();
        let (found, now) = match self.stage {
            WorkerStage::WarmUp { .. } | WorkerStage::Measure { .. } => self.run_queues(now),
            WorkerStage::Begin => {
                self.start_load(now);
                return PollResult::Busy;
            }
            WorkerStage::Drain { .. } => {
                self.drain_in_flight(context);
                return PollResult::Busy;
            }
            WorkerStage::Over => (0, now),
        };
        if now >= self.next_due || found == 0 && self.are_all_queues_done() {
            self.run_periodic(now);
        }
        if found == 0 && self.plan.yields {
            tenmil_linux::named_thread::yield_cpu();
        }
        PollResult::from_count(found)
    }

    fn arm(&mut self) -> PollResult {
        // Arms every queue runner, even after one has reported work: each must be able to wake this
        // thread.
        let working = self.queues.iter_mut().filter_map(|of| of.queue.arm().then_some(())).count();
        PollResult::from_count(working)
    }

    fn disarm(&mut self) {
        self.queues.iter_mut().for_each(|of| of.queue.disarm());
    }

    fn wake_at(&self) -> Instant {
        let queues = self.queues.iter().map(|of| {
            let arrival = of.arrivals.as_ref().map_or(Instant::NEVER, ArrivalTimes::next_due);
            of.queue.wake_at().min(arrival)
        });
        queues.min().unwrap_or(Instant::NEVER).min(self.next_due)
    }

    fn expected_latency(&self) -> Option<Span> {
        let in_flight = self.queues.iter().any(|of| of.queue.in_flight_ios() > 0);
        (in_flight && self.latency.ns > 0).then_some(self.latency)
    }

    fn can_spin_help(&self) -> bool {
        self.latency < LONG_LATENCY
    }
}

/// Recorder of I/Os and bytes per interval.
#[derive(Default)]
struct IntervalRecorder {
    /// End of the current interval.
    mark: Instant,
    /// Sums at the last mark.
    seen: (u64, u64),
    points: Vec<(u64, u64)>,
}

impl IntervalRecorder {
    /// Creates a series that begins at `now`.
    fn from(now: Instant) -> Self {
        Self { mark: now.after(INTERVAL), ..Self::default() }
    }

    /// Ends every interval before `now`. `sums` are I/Os and bytes since the beginning.
    fn record_ended_intervals(&mut self, now: Instant, sums: (u64, u64)) {
        while now >= self.mark {
            self.points.push((sums.0 - self.seen.0, sums.1 - self.seen.1));
            self.seen = sums;
            self.mark = self.mark.after(INTERVAL);
        }
    }

    /// Last complete interval.
    fn last_interval(&self) -> Option<(u64, u64)> {
        self.points.last().copied()
    }
}
