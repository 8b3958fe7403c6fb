//! What channels have done, counted where it happens and read from anywhere.
//!
//! Every counter has one writer, the thread of its channel, so counting is a load, an addition and a
//! store; whoever reads takes no lock and holds nobody up. Answers are counted by runs: neighbours
//! that were submitted in one batch and did the same are one entry.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use base::{Count, Histogram, LiveHistogram, Operation, Span};
use host::Clock;

/// What was done, by one channel or by several together.
#[derive(Clone, Debug, Default)]
pub struct Statistics {
    operations: [Done; OPERATIONS],
    /// How long was waited for the lock of the queue: in mode `single` only, where it is measured.
    pub lock_wait: Span,
    /// Polls that found something, each a sample of how much was in flight.
    pub depth: DepthSamples,
}

/// What was done of one operation.
#[derive(Clone, Debug, Default)]
pub struct Done {
    /// Requests that succeeded.
    pub count: u64,
    /// Bytes in them.
    pub bytes: u64,
    /// Requests that did not.
    pub errors: u64,
    /// How long those that succeeded took, from batch to batch, in nanoseconds. Empty while nobody
    /// asks for it.
    pub latency: Histogram,
}

/// How much was in flight when answers were polled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DepthSamples {
    /// Polls that found something.
    pub samples: u64,
    /// What was in flight before each, all together.
    pub sum: u64,
}

const OPERATIONS: usize = Operation::ALL.len();

impl Statistics {
    /// What was done of `operation`.
    pub fn of(&self, operation: Operation) -> &Done {
        &self.operations[operation as usize]
    }

    /// Adds all of `other`: exact, in whatever order.
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

impl DepthSamples {
    /// How much was in flight on average. Zero if nothing was polled.
    #[expect(clippy::cast_precision_loss, reason = "shown to people")]
    pub fn mean(&self) -> f64 {
        self.sum as f64 / self.samples.max(1) as f64
    }
}

/// The counters of one channel.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Meter {
    counters: [Counter; OPERATIONS],
    depth_samples: Count,
    depth_sum: Count,
    lock_wait_ticks: Count,
    is_timing: AtomicBool,
    latencies: OnceLock<Box<[LiveHistogram; OPERATIONS]>>,
}

#[derive(Debug, Default)]
struct Counter {
    count: Count,
    bytes: Count,
    errors: Count,
}

impl Meter {
    pub(crate) fn new(timing: bool) -> Self {
        let meter = Self::default();
        meter.time(timing);
        meter
    }

    /// Switches the histograms on or off; what they hold stays. Allocates when they are first
    /// wanted, on the thread that wants them.
    pub(crate) fn time(&self, on: bool) {
        if on {
            self.latencies.get_or_init(Box::default);
        }
        self.is_timing.store(on, Ordering::Release);
    }

    /// Counts a run of requests that succeeded.
    #[inline]
    pub(crate) fn succeeded(&self, operation: usize, count: u64, bytes: u64, took_ns: u64) {
        let counter = &self.counters[operation];
        counter.count.add(count);
        counter.bytes.add(bytes);
        if self.is_timing.load(Ordering::Acquire)
            && let Some(latencies) = self.latencies.get()
        {
            latencies[operation].record_many(took_ns, count);
        }
    }

    /// Counts a request that did not succeed.
    pub(crate) fn failed(&self, operation: usize) {
        self.counters[operation].errors.add(1);
    }

    /// Counts a poll that found something while `depth` requests were in flight.
    #[inline]
    pub(crate) fn polled(&self, depth: u64) {
        self.depth_samples.add(1);
        self.depth_sum.add(depth);
    }

    /// Counts ticks that were spent waiting for a lock.
    pub(crate) fn waited(&self, ticks: u64) {
        self.lock_wait_ticks.add(ticks);
    }

    /// What has been counted. Exact while the channel rests; otherwise each number is one that was
    /// true at some time during the call.
    pub(crate) fn read(&self, clock: &Clock) -> Statistics {
        let mut statistics = Statistics {
            lock_wait: clock.span(self.lock_wait_ticks.get()),
            depth: DepthSamples { samples: self.depth_samples.get(), sum: self.depth_sum.get() },
            ..Statistics::default()
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
    use base::Operation;
    use host::Clock;

    use super::{Meter, Statistics};

    #[test]
    fn channels_sum_to_what_one_would_have_counted() {
        let clock = Clock::kernel();
        let (left, right, both) = (Meter::new(true), Meter::new(true), Meter::new(true));
        for value in 0..500_u64 {
            let operation = usize::try_from(value).unwrap() % Operation::ALL.len();
            for meter in [if value % 3 == 0 { &left } else { &right }, &both] {
                meter.succeeded(operation, value % 4, value * 512, value * value);
                meter.polled(value);
                meter.failed(operation);
                meter.waited(value);
            }
        }
        let mut sum = Statistics::default();
        sum.merge(&left.read(&clock));
        sum.merge(&right.read(&clock));
        let both = both.read(&clock);
        for operation in Operation::ALL {
            let (one, other) = (sum.of(operation), both.of(operation));
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
    fn latencies_are_kept_while_they_are_asked_for() {
        let meter = Meter::new(false);
        let timed = |meter: &Meter| {
            meter.succeeded(0, 2, 1024, 77);
            meter.read(&Clock::kernel()).of(Operation::Read).latency.count()
        };
        assert_eq!(timed(&meter), 0);
        meter.time(true);
        assert_eq!(timed(&meter), 2);
        meter.time(false);
        assert_eq!(timed(&meter), 2, "nothing new, and what was there stays");
        assert_eq!(meter.read(&Clock::kernel()).of(Operation::Read).count, 6);
    }
}
