//! Adding up what the threads have found.

use base::{Histogram, Operation, Span};
use host::Clock;

use super::places::Places;
use super::worker::{INTERVAL, Share};
use crate::perf::environment::RunEnvironment;
use crate::perf::options::PerfOptions;
use crate::perf::outcome::{
    Counts, DeviceOutcome, Ended, OpenLoopOutcome, PerfOutcome, RamOutcome, Series, Technique,
    Turns, Verified,
};

/// The sums over all threads.
pub(super) struct Tally {
    devices: Vec<DeviceOutcome>,
    totals: Counts,
    latency: Histogram,
    by_operation: Vec<(Operation, Histogram)>,
    errors: std::collections::BTreeMap<u16, u64>,
    turns: Turns,
    longest_batch: Span,
    verified: Option<Verified>,
    series: Series,
    elapsed: Span,
    ticks: u64,
    ended: Ended,
    open_loop: OpenLoopOutcome,
    sleeps: u64,
    frequency_scaling: String,
}

impl Tally {
    /// Nothing yet, over these SSDs, by threads that slept so often, on cores whose frequency was
    /// dealt with in this way.
    pub(super) fn new(devices: Vec<DeviceOutcome>, sleeps: u64, frequency_scaling: String) -> Self {
        Self {
            devices,
            totals: Counts::default(),
            latency: Histogram::new(),
            by_operation: Vec::new(),
            errors: std::collections::BTreeMap::new(),
            turns: Turns::default(),
            longest_batch: Span { ns: 0 },
            verified: None,
            series: Series { interval: INTERVAL, ..Series::default() },
            elapsed: Span { ns: 0 },
            ticks: 0,
            ended: Ended::Time,
            open_loop: OpenLoopOutcome::default(),
            sleeps,
            frequency_scaling,
        }
    }

    /// What was done about the frequency of cores.
    pub(super) fn frequency_scaling(&self) -> &str {
        &self.frequency_scaling
    }

    /// Adds one thread's share.
    pub(super) fn add(&mut self, share: Share) {
        for lane in share.lanes {
            let counts = lane.sums.counts();
            self.devices[lane.device].counts.merge(&counts);
            self.totals.merge(&counts);
            self.turns.merge(&lane.turns);
            self.open_loop.delayed += lane.sums.delayed;
            self.longest_batch = self.longest_batch.max(lane.sums.longest_batch);
            for (operation, histogram) in &lane.sums.latency {
                self.devices[lane.device].latency.merge(histogram);
                self.latency.merge(histogram);
                self.of_operation(*operation).merge(histogram);
            }
            for (status, count) in &lane.sums.errors {
                *self.errors.entry(*status).or_default() += count;
            }
            if let Some(verified) = lane.verified {
                self.verified.get_or_insert_default().merge(&verified);
            }
        }
        self.add_series(&share.series);
        self.elapsed = self.elapsed.max(share.elapsed);
        self.ticks = self.ticks.max(share.ticks);
        self.open_loop.backlog += share.backlog;
        self.totals.errors += share.unanswered;
        if share.unanswered > 0 {
            *self.errors.entry(base::Outcome::ABORTED_BY_HOST.0).or_default() += share.unanswered;
        }
        if share.ended != Ended::Time {
            self.ended = share.ended;
        }
    }

    fn of_operation(&mut self, operation: Operation) -> &mut Histogram {
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

    /// Everything that is known now; the ceiling, the phase over memory and the environment come
    /// later.
    pub(super) fn into_outcome(
        self,
        options: &PerfOptions,
        places: &Places,
        clock: &Clock,
        environment: RunEnvironment,
    ) -> PerfOutcome {
        let mut open_loop = self.open_loop;
        open_loop.intended_per_second = options.rate.map_or(0, |rate| rate.per_second);
        PerfOutcome {
            options: options.clone(),
            elapsed: self.elapsed,
            ended: self.ended,
            devices: self.devices,
            totals: self.totals,
            latency: self.latency,
            latency_by_operation: self.by_operation,
            // A batch is stamped once: after it was polled and before it is submitted. Polling takes
            // less than submitting.
            time_stamp_error: Span { ns: 2 * self.longest_batch.ns },
            series: self.series,
            turns: self.turns,
            sleeps: self.sleeps,
            tsc_ticks: clock.tsc_hz().map(|_| self.ticks),
            errors_by_status: self.errors,
            techniques: techniques(options),
            verified: self.verified,
            open_loop: options.rate.map(|_| open_loop),
            ceiling: None,
            ram: None,
            null_blk: None,
            missing: Vec::new(),
            threads: places.threads(),
            environment,
        }
    }

    /// I/Os that ended well, and in what time.
    pub(super) fn sums(&self) -> (u64, Span) {
        (self.totals.ios, self.elapsed)
    }

    /// The sums, as the phase over memory reports them; none if it was cut short.
    pub(super) fn into_ram_outcome(self, options: &PerfOptions) -> Option<RamOutcome> {
        let uri = options.uris.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let Self { elapsed, totals: counts, latency, ended, .. } = self;
        (ended != Ended::Interrupt).then_some(RamOutcome { uri, elapsed, counts, latency })
    }
}

/// What was switched on and off, as it came out.
fn techniques(options: &PerfOptions) -> Vec<Technique> {
    let techniques = &options.techniques;
    let switch = |on: bool| if on { "on".to_owned() } else { "off".to_owned() };
    let store = crate::emu::command_store(techniques);
    let mut rows = vec![
        Technique {
            name: "submission doorbell once per turn",
            setting: switch(techniques.doorbell_batching),
            switch: "--no-doorbell-batching",
        },
        Technique {
            name: "completion doorbell",
            setting: techniques.completion_doorbell.name().into(),
            switch: "--cq-doorbell each|poll|deferred",
        },
        Technique {
            name: "command store",
            setting: store.name().into(),
            switch: "--command-store auto|plain|sse2|avx512|movdir64b",
        },
        Technique {
            name: "completions copied by",
            setting: techniques.completion_copy.name().into(),
            switch: "--completion-copy line|one",
        },
        Technique {
            name: "prefetch",
            setting: techniques.prefetch.name(),
            switch: "--prefetch slots,ring,tasks|none|all",
        },
        Technique {
            name: "shadow doorbells",
            setting: switch(techniques.shadow_doorbells),
            switch: "--shadow-doorbells",
        },
        Technique {
            name: "huge pages",
            setting: switch(techniques.huge_pages),
            switch: "--no-huge-pages",
        },
    ];
    if options.emulated().next().is_none() {
        rows.retain(|technique| ["prefetch", "huge pages"].contains(&technique.name));
    }
    rows
}
