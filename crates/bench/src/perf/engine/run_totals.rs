//! Sums of the results of all threads.

use tenmil_base::{Histogram, Operation, Span};
use tenmil_linux::Clock;

use super::cpu_placement::CoreAssignment;
use super::worker::{INTERVAL, WorkerResult};
use crate::perf::environment::RunEnvironment;
use crate::perf::perf_options::PerfOptions;
use crate::perf::perf_result::{
    DeviceResult, DriverOption, FastPathCounters, IoCounts, OpenLoopResult, PerfResult, RamResult,
    RunEndReason, TimeSeries, VerifyResult,
};

/// Sums over all threads.
pub(super) struct RunTotals {
    devices: Vec<DeviceResult>,
    totals: IoCounts,
    latency: Histogram,
    by_operation: Vec<(Operation, Histogram)>,
    errors: std::collections::BTreeMap<u16, u64>,
    counters: FastPathCounters,
    longest_batch: Span,
    verified: Option<VerifyResult>,
    series: TimeSeries,
    elapsed: Span,
    ticks: u64,
    ended: RunEndReason,
    open_loop: OpenLoopResult,
    sleeps: u64,
    frequency_scaling: String,
}

impl RunTotals {
    /// Creates empty sums over these devices. `sleeps` is the number of sleeps of all threads, and
    /// `frequency_scaling` describes the frequency scaling of their cores.
    pub(super) fn new(devices: Vec<DeviceResult>, sleeps: u64, frequency_scaling: String) -> Self {
        Self {
            devices,
            totals: IoCounts::default(),
            latency: Histogram::new(),
            by_operation: Vec::new(),
            errors: std::collections::BTreeMap::new(),
            counters: FastPathCounters::default(),
            longest_batch: Span { ns: 0 },
            verified: None,
            series: TimeSeries { interval: INTERVAL, ..TimeSeries::default() },
            elapsed: Span { ns: 0 },
            ticks: 0,
            ended: RunEndReason::Time,
            open_loop: OpenLoopResult::default(),
            sleeps,
            frequency_scaling,
        }
    }

    /// Description of the frequency scaling.
    pub(super) fn frequency_scaling(&self) -> &str {
        &self.frequency_scaling
    }

    /// Adds the result of one thread.
    pub(super) fn add_worker(&mut self, share: WorkerResult) {
        for queue in share.queues {
            let counts = queue.sums.io_counts();
            self.devices[queue.device].counts.merge(&counts);
            self.totals.merge(&counts);
            self.counters.merge(&queue.counters);
            self.open_loop.delayed += queue.sums.delayed;
            self.longest_batch = self.longest_batch.max(queue.sums.longest_batch);
            for (operation, histogram) in &queue.sums.latency {
                self.devices[queue.device].latency.merge(histogram);
                self.latency.merge(histogram);
                self.latency_of_operation(*operation).merge(histogram);
            }
            for (status, count) in &queue.sums.errors {
                *self.errors.entry(*status).or_default() += count;
            }
            if let Some(verified) = queue.verified {
                self.verified.get_or_insert_default().merge(&verified);
            }
        }
        self.add_series(&share.series);
        self.elapsed = self.elapsed.max(share.elapsed);
        self.ticks = self.ticks.max(share.ticks);
        self.open_loop.backlog += share.backlog;
        // I/Os that did not complete before the drain timeout count as failed.
        self.totals.errors += share.unanswered;
        if share.unanswered > 0 {
            *self.errors.entry(tenmil_base::IoStatus::ABORTED_BY_HOST.0).or_default() +=
                share.unanswered;
        }
        if share.ended != RunEndReason::Time {
            self.ended = share.ended;
        }
    }

    fn latency_of_operation(&mut self, operation: Operation) -> &mut Histogram {
        let known = self.by_operation.iter().position(|(other, _)| *other == operation);
        let index = known.unwrap_or_else(|| {
            self.by_operation.push((operation, Histogram::new()));
            self.by_operation.len() - 1
        });
        &mut self.by_operation[index].1
    }

    fn add_series(&mut self, points: &[(u64, u64)]) {
        let len = self.series.ios.len().max(points.len());
        self.series.ios.resize(len, 0);
        self.series.bytes.resize(len, 0);
        for (index, (ios, bytes)) in points.iter().enumerate() {
            self.series.ios[index] += ios;
            self.series.bytes[index] += bytes;
        }
    }

    /// Converts the sums into the result of the run. Baselines and the run over RAM are added
    /// later.
    pub(super) fn into_result(
        self,
        options: &PerfOptions,
        places: &CoreAssignment,
        clock: &Clock,
        environment: RunEnvironment,
    ) -> PerfResult {
        let mut open_loop = self.open_loop;
        open_loop.intended_per_second = options.rate.map_or(0, |rate| rate.per_second);
        PerfResult {
            options: options.clone(),
            elapsed: self.elapsed,
            ended: self.ended,
            devices: self.devices,
            totals: self.totals,
            latency: self.latency,
            latency_by_operation: self.by_operation,
            // A batch has one time stamp, taken after its poll and before its submission. Polling
            // takes less time than submitting.
            time_stamp_error: Span { ns: 2 * self.longest_batch.ns },
            series: self.series,
            counters: self.counters,
            sleeps: self.sleeps,
            tsc_ticks: clock.tsc_hz().map(|_| self.ticks),
            errors_by_status: self.errors,
            techniques: driver_options(options),
            verified: self.verified,
            open_loop: options.rate.map(|_| open_loop),
            baseline: None,
            ram: None,
            null_blk: None,
            missing: Vec::new(),
            threads: places.thread_placements(),
            environment,
        }
    }

    /// Number of successful I/Os, and the elapsed time.
    pub(super) fn ios_and_elapsed(&self) -> (u64, Span) {
        (self.totals.ios, self.elapsed)
    }

    /// Converts the sums into the result of the run over RAM. None if it was interrupted.
    pub(super) fn into_ram_result(self, options: &PerfOptions) -> Option<RamResult> {
        let uri = options.uris.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let Self { elapsed, totals: counts, latency, ended, .. } = self;
        (ended != RunEndReason::Interrupt).then_some(RamResult { uri, elapsed, counts, latency })
    }
}

/// Driver options in effect.
fn driver_options(options: &PerfOptions) -> Vec<DriverOption> {
    let techniques = &options.techniques;
    let switch = |on: bool| if on { "on".to_owned() } else { "off".to_owned() };
    let store = tenmil_devices::emu::command_store(techniques);
    let mut rows = vec![
        DriverOption {
            name: "submission doorbell per iteration",
            setting: switch(techniques.doorbell_batching),
            switch: "--no-doorbell-batching",
        },
        DriverOption {
            name: "completion doorbell",
            setting: techniques.completion_doorbell.name().into(),
            switch: "--cq-doorbell each|poll|deferred",
        },
        DriverOption {
            name: "command store",
            setting: store.name().into(),
            switch: "--command-store auto|plain|sse2|movdir64b",
        },
        DriverOption {
            name: "shadow doorbells",
            setting: switch(techniques.shadow_doorbells),
            switch: "--shadow-doorbells",
        },
        DriverOption {
            name: "huge pages",
            setting: switch(techniques.huge_pages),
            switch: "--no-huge-pages",
        },
    ];
    if options.emulated_ssds().next().is_none() {
        rows.retain(|technique| technique.name == "huge pages");
    }
    rows
}
