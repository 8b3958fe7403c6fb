//! I/O statistics: counters updated by one thread and readable from any.
//!
//! Every counter has one writer, the thread of its channel or queue, so counting is a load, an addition
//! and a store. A reader takes no lock and does not block the writer. Completions are counted in runs:
//! consecutive ones of one batch and one kind are one update.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::{CoarseHistogram, Counter, IoStatus, LiveCoarseHistogram, Operation, Span};

/// Statistics of one channel, or of several combined.
#[derive(Clone, Debug, Default)]
pub struct IoStats {
    operations: [OperationStats; OPERATIONS],
    /// Time spent waiting for the lock of the queue. Measured in mode `single` only.
    pub lock_wait: Span,
    /// Queue depth samples, one for each poll that found completions.
    pub depth: QueueDepthSamples,
    /// Time with requests in flight. Only of served queues.
    pub busy: Span,
    /// Requests that waited for a rate limit.
    pub limited: u64,
    /// Sum of the times that they waited. It is not part of their latency.
    pub limit_wait: Span,
    /// Number of failed requests by status.
    pub errors_by_status: BTreeMap<u16, u64>,
}

/// Statistics of one operation.
#[derive(Clone, Debug, Default)]
pub struct OperationStats {
    /// Requests that succeeded.
    pub count: u64,
    /// Bytes of those requests.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Latency of successful requests in nanoseconds, from the submission of the batch to its poll. Empty
    /// unless recording is enabled.
    pub latency: CoarseHistogram,
}

/// Samples of the number of requests in flight at a poll.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueDepthSamples {
    /// Polls that found completions.
    pub samples: u64,
    /// Sum of the requests in flight before each of them.
    pub sum: u64,
}

const OPERATIONS: usize = Operation::ALL.len();

impl IoStats {
    /// The statistics of `operation`.
    pub fn operation_stats(&self, operation: Operation) -> &OperationStats {
        &self.operations[operation as usize]
    }

    /// Adds `other`. Exact, and independent of order.
    pub fn merge(&mut self, other: &Self) {
        for (mine, more) in self.operations.iter_mut().zip(&other.operations) {
            mine.count += more.count;
            mine.bytes += more.bytes;
            mine.errors += more.errors;
            mine.latency.merge(&more.latency);
        }
        self.lock_wait.ns += other.lock_wait.ns;
        self.depth.samples += other.depth.samples;
        self.depth.sum += other.depth.sum;
        self.busy.ns += other.busy.ns;
        self.limited += other.limited;
        self.limit_wait.ns += other.limit_wait.ns;
        for (status, count) in &other.errors_by_status {
            *self.errors_by_status.entry(*status).or_default() += count;
        }
    }

    /// Whether nothing was counted.
    pub fn is_empty(&self) -> bool {
        self.limited == 0 && self.operations.iter().all(|one| one.count == 0 && one.errors == 0)
    }
}

impl QueueDepthSamples {
    /// The average number of requests in flight; zero without samples.
    #[expect(clippy::cast_precision_loss, reason = "shown to people")]
    pub fn mean(&self) -> f64 {
        self.sum as f64 / self.samples.max(1) as f64
    }
}

/// Live counters of one channel or queue.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct IoCounters {
    counters: [OperationCounters; OPERATIONS],
    depth_samples: Counter,
    depth_sum: Counter,
    lock_wait_ticks: Counter,
    busy_ns: Counter,
    limited: Counter,
    limit_wait_ns: Counter,
    is_timing: AtomicBool,
    /// Allocated at the first value of each operation.
    latencies: [OnceLock<Box<LiveCoarseHistogram>>; OPERATIONS],
    errors_by_status: Mutex<BTreeMap<u16, u64>>,
}

#[derive(Debug, Default)]
struct OperationCounters {
    count: Counter,
    bytes: Counter,
    errors: Counter,
}

impl IoCounters {
    /// Creates counters that are zero.
    pub fn new(timing: bool) -> Self {
        let counters = Self::default();
        counters.set_latency_recording(timing);
        counters
    }

    /// Switches latency recording on or off; recorded values remain.
    pub fn set_latency_recording(&self, on: bool) {
        self.is_timing.store(on, Ordering::Relaxed);
    }

    /// Counts a run of successful requests.
    #[inline]
    pub fn count_success(&self, operation: usize, count: u64, bytes: u64, took_ns: u64) {
        let counter = &self.counters[operation];
        counter.count.add(count);
        counter.bytes.add(bytes);
        if self.is_timing.load(Ordering::Relaxed) {
            match self.latencies[operation].get() {
                Some(latency) => latency.record_many(took_ns, count),
                None => self.record_first_latency(operation, count, took_ns),
            }
        }
    }

    #[cold]
    fn record_first_latency(&self, operation: usize, count: u64, took_ns: u64) {
        self.latencies[operation].get_or_init(Box::default).record_many(took_ns, count);
    }

    /// Counts a failed request.
    #[cold]
    pub fn count_failure(&self, operation: usize, status: IoStatus) {
        self.counters[operation].errors.add(1);
        let mut by_status = self.errors_by_status.lock().unwrap_or_else(PoisonError::into_inner);
        *by_status.entry(status.0).or_default() += 1;
    }

    /// Adds time with requests in flight.
    #[inline]
    pub fn add_busy(&self, time: Span) {
        self.busy_ns.add(time.ns);
    }

    /// Counts requests that waited for a rate limit, and the sum of the times that they waited.
    pub fn add_limit_wait(&self, count: u64, time: Span) {
        self.limited.add(count);
        self.limit_wait_ns.add(time.ns);
    }

    /// Counts a poll that found completions while `depth` requests were in flight.
    #[inline]
    pub fn count_queue_depth(&self, depth: u64) {
        self.depth_samples.add(1);
        self.depth_sum.add(depth);
    }

    /// Adds ticks spent waiting for a lock.
    pub fn add_lock_wait(&self, ticks: u64) {
        self.lock_wait_ticks.add(ticks);
    }

    /// Counts of commands, bytes and errors and the busy time, without latencies and statuses: what a sum over
    /// many queues needs.
    pub fn totals(&self) -> IoStats {
        let mut totals = IoStats { busy: Span { ns: self.busy_ns.get() }, ..IoStats::default() };
        self.copy_counts(&mut totals);
        totals
    }

    /// A snapshot of the counters. Exact while the channel is idle; otherwise each number was true at
    /// some time during the call. `span_of_ticks` converts the ticks of
    /// [`add_lock_wait`](Self::add_lock_wait).
    pub fn snapshot(&self, span_of_ticks: impl FnOnce(u64) -> Span) -> IoStats {
        let by_status = self.errors_by_status.lock().unwrap_or_else(PoisonError::into_inner);
        let mut statistics = IoStats {
            lock_wait: span_of_ticks(self.lock_wait_ticks.get()),
            busy: Span { ns: self.busy_ns.get() },
            limited: self.limited.get(),
            limit_wait: Span { ns: self.limit_wait_ns.get() },
            errors_by_status: by_status.clone(),
            depth: QueueDepthSamples {
                samples: self.depth_samples.get(),
                sum: self.depth_sum.get(),
            },
            ..IoStats::default()
        };
        self.copy_counts(&mut statistics);
        drop(by_status);
        for (done, live) in statistics.operations.iter_mut().zip(&self.latencies) {
            if let Some(live) = live.get() {
                done.latency = live.snapshot();
            }
        }
        statistics
    }

    fn copy_counts(&self, to: &mut IoStats) {
        for (done, counter) in to.operations.iter_mut().zip(&self.counters) {
            done.count = counter.count.get();
            done.bytes = counter.bytes.get();
            done.errors = counter.errors.get();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{IoCounters, IoStats};
    use crate::{IoStatus, Operation, Span};

    fn snapshot(counters: &IoCounters) -> IoStats {
        counters.snapshot(|ticks| Span { ns: 2 * ticks })
    }

    #[test]
    fn statistics_of_channels_add_up() {
        let (left, right, both) =
            (IoCounters::new(true), IoCounters::new(true), IoCounters::new(true));
        for value in 0..500_u64 {
            let operation = usize::try_from(value).unwrap() % Operation::ALL.len();
            for meter in [if value % 3 == 0 { &left } else { &right }, &both] {
                meter.count_success(operation, value % 4, value * 512, value * value);
                meter.count_queue_depth(value);
                meter.count_failure(operation, IoStatus::NO_DEVICE);
                meter.add_busy(Span { ns: 5 });
                meter.add_limit_wait(2, Span { ns: value });
                meter.add_lock_wait(value);
            }
        }
        let mut sum = IoStats::default();
        sum.merge(&snapshot(&left));
        sum.merge(&snapshot(&right));
        let both = snapshot(&both);
        for operation in Operation::ALL {
            let (one, other) = (sum.operation_stats(operation), both.operation_stats(operation));
            assert_eq!(
                (one.count, one.bytes, one.errors),
                (other.count, other.bytes, other.errors)
            );
            assert!(one.count > 0 && one.latency.buckets().eq(other.latency.buckets()));
        }
        assert_eq!((sum.depth, sum.lock_wait, sum.busy), (both.depth, both.lock_wait, both.busy));
        assert_eq!((sum.limited, sum.limit_wait), (both.limited, both.limit_wait));
        assert_eq!((sum.limited, sum.limit_wait.ns), (1_000, 499 * 250));
        assert_eq!((sum.busy.ns, sum.lock_wait.ns), (2_500, 499 * 500));
        assert_eq!(sum.errors_by_status, both.errors_by_status);
        assert_eq!(sum.errors_by_status[&IoStatus::NO_DEVICE.0], 500);
        assert!((both.depth.mean() - 249.5).abs() < 1e-9);
    }

    #[test]
    fn latencies_are_recorded_while_enabled() {
        let meter = IoCounters::new(false);
        let timed = |meter: &IoCounters| {
            meter.count_success(0, 2, 1024, 77);
            snapshot(meter).operation_stats(Operation::Read).latency.count()
        };
        assert_eq!(timed(&meter), 0);
        meter.set_latency_recording(true);
        assert_eq!(timed(&meter), 2);
        meter.set_latency_recording(false);
        assert_eq!(timed(&meter), 2, "nothing new, and what was there stays");
        assert_eq!(snapshot(&meter).operation_stats(Operation::Read).count, 6);
    }
}
