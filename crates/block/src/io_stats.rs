//! I/O statistics: counters updated by channels and readable from any thread.
//!
//! Every counter has one writer, the thread of its channel, so counting is a load, an addition and a
//! store. A reader takes no lock and does not block the writer. Completions are counted in runs:
//! consecutive ones of one batch and one kind are one update.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use tenmil_base::{Counter, Histogram, LiveHistogram, Operation, Span};
use tenmil_linux::Clock;

/// Statistics of one channel, or of several combined.
#[derive(Clone, Debug, Default)]
pub struct IoStats {
    operations: [OperationStats; OPERATIONS],
    /// Time spent waiting for the lock of the queue. Measured in mode `single` only.
    pub lock_wait: Span,
    /// Queue depth samples, one for each poll that found completions.
    pub depth: QueueDepthSamples,
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
    pub latency: Histogram,
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
    }
}

impl QueueDepthSamples {
    /// The average number of requests in flight; zero without samples.
    #[expect(clippy::cast_precision_loss, reason = "shown to people")]
    pub fn mean(&self) -> f64 {
        self.sum as f64 / self.samples.max(1) as f64
    }
}

/// The live counters of one channel.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct IoCounters {
    counters: [OperationCounters; OPERATIONS],
    depth_samples: Counter,
    depth_sum: Counter,
    lock_wait_ticks: Counter,
    is_timing: AtomicBool,
    latencies: OnceLock<Box<[LiveHistogram; OPERATIONS]>>,
}

#[derive(Debug, Default)]
struct OperationCounters {
    count: Counter,
    bytes: Counter,
    errors: Counter,
}

impl IoCounters {
    pub(crate) fn new(timing: bool) -> Self {
        let meter = Self::default();
        meter.set_latency_recording(timing);
        meter
    }

    /// Switches latency recording on or off; recorded values remain. The first activation allocates, on
    /// the calling thread.
    pub(crate) fn set_latency_recording(&self, on: bool) {
        if on {
            self.latencies.get_or_init(Box::default);
        }
        self.is_timing.store(on, Ordering::Release);
    }

    /// Counts a run of successful requests.
    #[inline]
    pub(crate) fn count_success(&self, operation: usize, count: u64, bytes: u64, took_ns: u64) {
        let counter = &self.counters[operation];
        counter.count.add(count);
        counter.bytes.add(bytes);
        if self.is_timing.load(Ordering::Acquire)
            && let Some(latencies) = self.latencies.get()
        {
            latencies[operation].record_many(took_ns, count);
        }
    }

    /// Counts a failed request.
    pub(crate) fn count_failure(&self, operation: usize) {
        self.counters[operation].errors.add(1);
    }

    /// Counts a poll that found completions while `depth` requests were in flight.
    #[inline]
    pub(crate) fn count_queue_depth(&self, depth: u64) {
        self.depth_samples.add(1);
        self.depth_sum.add(depth);
    }

    /// Adds ticks spent waiting for a lock.
    pub(crate) fn add_lock_wait(&self, ticks: u64) {
        self.lock_wait_ticks.add(ticks);
    }

    /// A snapshot of the counters. Exact while the channel is idle; otherwise each number was true at
    /// some time during the call.
    pub(crate) fn snapshot(&self, clock: &Clock) -> IoStats {
        let mut statistics = IoStats {
            lock_wait: clock.span_of_ticks(self.lock_wait_ticks.get()),
            depth: QueueDepthSamples {
                samples: self.depth_samples.get(),
                sum: self.depth_sum.get(),
            },
            ..IoStats::default()
        };
        for (done, counter) in statistics.operations.iter_mut().zip(&self.counters) {
            done.count = counter.count.get();
            done.bytes = counter.bytes.get();
            done.errors = counter.errors.get();
        }
        if let Some(latencies) = self.latencies.get() {
            for (done, live) in statistics.operations.iter_mut().zip(latencies.iter()) {
                done.latency = live.snapshot();
            }
        }
        statistics
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Operation;
    use tenmil_linux::Clock;

    use super::{IoCounters, IoStats};

    #[test]
    fn statistics_of_channels_add_up() {
        let clock = Clock::on_kernel_clock();
        let (left, right, both) =
            (IoCounters::new(true), IoCounters::new(true), IoCounters::new(true));
        for value in 0..500_u64 {
            let operation = usize::try_from(value).unwrap() % Operation::ALL.len();
            for meter in [if value % 3 == 0 { &left } else { &right }, &both] {
                meter.count_success(operation, value % 4, value * 512, value * value);
                meter.count_queue_depth(value);
                meter.count_failure(operation);
                meter.add_lock_wait(value);
            }
        }
        let mut sum = IoStats::default();
        sum.merge(&left.snapshot(&clock));
        sum.merge(&right.snapshot(&clock));
        let both = both.snapshot(&clock);
        for operation in Operation::ALL {
            let (one, other) = (sum.operation_stats(operation), both.operation_stats(operation));
            assert_eq!(
                (one.count, one.bytes, one.errors),
                (other.count, other.bytes, other.errors)
            );
            assert!(one.count > 0 && one.latency.buckets().eq(other.latency.buckets()));
        }
        assert_eq!((sum.depth, sum.lock_wait), (both.depth, both.lock_wait));
        assert!((both.depth.mean() - 249.5).abs() < 1e-9);
    }

    #[test]
    fn latencies_are_recorded_while_enabled() {
        let meter = IoCounters::new(false);
        let timed = |meter: &IoCounters| {
            meter.count_success(0, 2, 1024, 77);
            meter
                .snapshot(&Clock::on_kernel_clock())
                .operation_stats(Operation::Read)
                .latency
                .count()
        };
        assert_eq!(timed(&meter), 0);
        meter.set_latency_recording(true);
        assert_eq!(timed(&meter), 2);
        meter.set_latency_recording(false);
        assert_eq!(timed(&meter), 2, "nothing new, and what was there stays");
        assert_eq!(
            meter.snapshot(&Clock::on_kernel_clock()).operation_stats(Operation::Read).count,
            6
        );
    }
}
