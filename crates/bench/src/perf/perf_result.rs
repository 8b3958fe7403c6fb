//! Result of a `perf` run: plain values that the engine fills in and the reports show.

use std::collections::BTreeMap;

use tenmil_base::{Durability, Histogram, Operation, Span};

use super::environment::RunEnvironment;
use super::perf_options::PerfOptions;
use super::report::number_format::show_count;
use tenmil_base::Error;
use tenmil_devices::Uri;

/// Result of a run.
#[derive(Clone, Debug)]
pub struct PerfResult {
    /// Options of the run.
    pub options: PerfOptions,
    /// Duration of the measurement without the warm-up. Shorter than requested if interrupted.
    pub elapsed: Span,
    /// What ended the measurement.
    pub ended: RunEndReason,
    /// One entry per device, in the order of the URIs.
    pub devices: Vec<DeviceResult>,
    /// Sums over all devices and threads.
    pub totals: IoCounts,
    /// Latency of every I/O, from the intended start in an open loop.
    pub latency: Histogram,
    /// Latency by operation, for operations that occurred.
    pub latency_by_operation: Vec<(Operation, Histogram)>,
    /// Error bound of each latency: time stamps are taken once per batch and once per poll.
    pub time_stamp_error: Span,
    /// I/Os over time.
    pub series: TimeSeries,
    /// Counters of the I/O path.
    pub counters: FastPathCounters,
    /// Number of times that a submitting thread slept.
    pub sleeps: u64,
    /// Ticks of the time stamp counter during the measurement, on one submitting thread. None if
    /// the CPU has no usable counter.
    pub tsc_ticks: Option<u64>,
    /// Failed I/Os by status (NVMe status field without the phase tag).
    pub errors_by_status: BTreeMap<u16, u64>,
    /// Driver options in effect, with `auto` resolved.
    pub techniques: Vec<DriverOption>,
    /// Result of the verification.
    pub verified: Option<VerifyResult>,
    /// Result of the open-loop load.
    pub open_loop: Option<OpenLoopResult>,
    /// Baseline.
    pub baseline: Option<BaselineResult>,
    /// Result of the same workload over RAM.
    pub ram: Option<RamResult>,
    /// Comparison of the modes of the block layer.
    pub null_blk: Option<NullBlkResult>,
    /// Errors of the measurements that should have followed the run.
    pub missing: Vec<Error>,
    /// Placement of the threads.
    pub threads: Vec<ThreadPlacement>,
    /// Environment of the run.
    pub environment: RunEnvironment,
}

/// What ended a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEndReason {
    /// The time has passed.
    Time,
    /// All I/Os have completed.
    Count,
    /// Ctrl-C (SIGINT).
    Interrupt,
}

/// Sums of a run, a device or a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoCounts {
    /// Successful I/Os.
    pub ios: u64,
    /// Bytes of the successful I/Os.
    pub bytes: u64,
    /// Failed I/Os.
    pub errors: u64,
    /// Successful reads.
    pub reads: u64,
    /// Successful writes.
    pub writes: u64,
}

/// Result of one device.
#[derive(Clone, Debug)]
pub struct DeviceResult {
    /// URI, with a number if it describes several devices.
    pub name: String,
    /// Model number of the controller, or a description of another device.
    pub model: String,
    /// Durability of a completed write.
    pub durability: Durability,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Block size in bytes.
    pub block_size: u32,
    /// Sums.
    pub counts: IoCounts,
    /// Latencies.
    pub latency: Histogram,
}

impl From<tenmil_devices::emu::SsdDescription> for DeviceResult {
    fn from(ssd: tenmil_devices::emu::SsdDescription) -> Self {
        Self {
            name: ssd.name,
            model: ssd.model,
            durability: ssd.durability,
            size_bytes: ssd.size_bytes,
            block_size: ssd.block_size,
            counts: IoCounts::default(),
            latency: Histogram::new(),
        }
    }
}

/// I/Os over time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TimeSeries {
    /// Interval between two points.
    pub interval: Span,
    /// I/Os completed in each interval.
    pub ios: Vec<u64>,
    /// Bytes transferred in each interval.
    pub bytes: Vec<u64>,
}

/// Counters of the I/O path, over all submitting threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FastPathCounters {
    /// Polls of a completion queue.
    pub polls: u64,
    /// Polls that found no completion.
    pub idle_polls: u64,
    /// Completions.
    pub completions: u64,
    /// Submission queue doorbell updates.
    pub submission_doorbells: u64,
    /// Completion queue doorbell updates.
    pub completion_doorbells: u64,
    /// Doorbell updates of both kinds that were written to a register.
    pub doorbell_registers: u64,
    /// Commands stored in a Controller Memory Buffer.
    pub cmb_commands: u64,
}

/// Setting of one driver option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverOption {
    /// Name of the option.
    pub name: &'static str,
    /// Its value.
    pub setting: String,
    /// Command line flag that changes it.
    pub switch: &'static str,
}

/// Result of the verification.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VerifyResult {
    /// Blocks with the expected contents.
    pub good_blocks: u64,
    /// Blocks that this run had not written, whose contents are not checked.
    pub unwritten_blocks: u64,
    /// Blocks with an older version than the last one written.
    pub stale_blocks: u64,
    /// Blocks with contents of more than one write.
    pub torn_blocks: u64,
    /// Blocks of another address.
    pub misplaced_blocks: u64,
    /// Blocks without a stamp of this run.
    pub foreign_blocks: u64,
    /// Description of the first bad block.
    pub first_bad: Option<String>,
}

/// Result of an open-loop load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenLoopResult {
    /// Requested rate in I/Os per second.
    pub intended_per_second: u64,
    /// I/Os that were due and not submitted at the end.
    pub backlog: u64,
    /// I/Os that were submitted late because the queues were full.
    pub delayed: u64,
}

/// Result of a baseline measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BaselineResult {
    /// Kind of the baseline.
    pub limit: Baseline,
    /// Ring entries, copies or message exchanges per second.
    pub iops: f64,
    /// Duration of the measurement.
    pub elapsed: Span,
    /// Number of rings or connections.
    pub rings: u32,
    /// Depth of each.
    pub depth: u32,
    /// Median round trip time at depth 1.
    pub round_trip: Option<Span>,
}

/// Upper bound that a run is compared with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Baseline {
    /// Ring between two threads.
    #[default]
    Ring,
    /// Memory copies between the same addresses.
    Copies,
    /// Messages over TCP, with this socket engine.
    Messages(&'static str),
}

/// Result of the same workload over RAM.
#[derive(Clone, Debug)]
pub struct RamResult {
    /// URI of the devices.
    pub uri: String,
    /// Duration of the measurement.
    pub elapsed: Span,
    /// Sums.
    pub counts: IoCounts,
    /// Latency of every I/O.
    pub latency: Histogram,
}

/// Comparison of the modes of the block layer over a null device.
#[derive(Clone, Debug, PartialEq)]
pub struct NullBlkResult {
    /// Queue depth of each thread.
    pub depth: u32,
    /// Duration of each measurement.
    pub time: Span,
    /// Results by mode.
    pub rows: Vec<NullBlkRow>,
}

/// Results of one mode of the block layer.
#[derive(Clone, Debug, PartialEq)]
pub struct NullBlkRow {
    /// Name of the mode.
    pub mode: &'static str,
    /// Number of hardware contexts, if the mode has several.
    pub contexts: Option<u32>,
    /// Results by number of threads, from one up.
    pub points: Vec<NullBlkPoint>,
}

/// Result of one mode with a number of threads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NullBlkPoint {
    /// Number of threads, each on its own core.
    pub threads: usize,
    /// I/Os per second of all threads.
    pub iops: f64,
    /// Fraction of time, from 0 to 1, that the threads waited for the lock.
    pub lock_wait_share: f64,
}

impl NullBlkRow {
    /// Name of the mode with its contexts, such as `mq, 2 contexts`.
    pub fn mode_text(&self) -> String {
        match self.contexts {
            None => self.mode.into(),
            Some(1) => format!("{}, 1 context", self.mode),
            Some(count) => format!("{}, {count} contexts", self.mode),
        }
    }
}

/// Placement of a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadPlacement {
    /// Role: `submit` or `device`.
    pub role: &'static str,
    /// Core it was pinned to, if any.
    pub core: Option<u32>,
}

impl PerfResult {
    /// Conditions that distort the result, and measurements that are missing.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = self.environment.warnings();
        warnings.extend(self.missing.iter().map(|refused| refused.text.clone()));
        warnings
    }

    /// I/Os per second.
    pub fn iops(&self) -> f64 {
        per_second(self.totals.ios, self.elapsed)
    }

    /// Bytes per second.
    pub fn bytes_per_second(&self) -> f64 {
        per_second(self.totals.bytes, self.elapsed)
    }

    /// Time of one submitting thread per I/O, in nanoseconds.
    pub fn thread_ns_per_io(&self) -> f64 {
        ratio(self.elapsed.ns.saturating_mul(self.submitting_threads()), self.totals.ios)
    }

    /// Ticks of the time stamp counter of one submitting thread per I/O.
    pub fn tsc_per_io(&self) -> Option<f64> {
        let threads = self.submitting_threads();
        self.tsc_ticks.map(|ticks| ratio(ticks.saturating_mul(threads), self.totals.ios))
    }

    /// Ratio of this run to the baseline.
    pub fn baseline_ratio(&self) -> Option<f64> {
        let baseline = self.baseline.filter(|baseline| baseline.iops > 0.0)?;
        Some(self.iops() / baseline.iops)
    }

    /// Whether the run was faster than a baseline that nothing can be faster than: one of the two was
    /// disturbed.
    pub fn is_above_baseline(&self) -> bool {
        let is_bound = self.baseline.is_some_and(|baseline| baseline.limit != Baseline::Copies);
        is_bound && self.baseline_ratio().is_some_and(|ratio| ratio > 1.0)
    }

    /// Whether any device transfers data.
    pub fn transfers_data(&self) -> bool {
        self.options.uris.iter().any(Uri::keeps_data)
    }

    /// Number of submitting threads.
    pub fn submitting_threads(&self) -> u64 {
        let submitting = self.threads.iter().filter(|place| place.role == "submit").count();
        u64::try_from(submitting.max(1)).unwrap_or(1)
    }

    /// Whether every I/O succeeded and every verified block was good.
    pub fn has_no_errors(&self) -> bool {
        self.totals.errors == 0
            && self.verified.as_ref().is_none_or(VerifyResult::has_no_bad_blocks)
    }
}

impl FastPathCounters {
    /// Completions per poll that found any.
    pub fn completions_per_nonempty_poll(&self) -> f64 {
        ratio(self.completions, self.polls.saturating_sub(self.idle_polls))
    }

    /// Doorbell updates of both kinds per completed I/O.
    pub fn doorbells_per_io(&self) -> f64 {
        ratio(self.submission_doorbells + self.completion_doorbells, self.completions)
    }

    /// Doorbell register writes per completed I/O.
    pub fn doorbell_registers_per_io(&self) -> f64 {
        ratio(self.doorbell_registers, self.completions)
    }

    /// Commands stored in a Controller Memory Buffer per completed I/O.
    pub fn cmb_commands_per_io(&self) -> f64 {
        ratio(self.cmb_commands, self.completions)
    }

    /// Difference to the earlier counters `before`.
    #[must_use]
    pub fn difference_since(&self, before: &Self) -> Self {
        Self {
            polls: self.polls - before.polls,
            idle_polls: self.idle_polls - before.idle_polls,
            completions: self.completions - before.completions,
            submission_doorbells: self.submission_doorbells - before.submission_doorbells,
            completion_doorbells: self.completion_doorbells - before.completion_doorbells,
            doorbell_registers: self.doorbell_registers - before.doorbell_registers,
            cmb_commands: self.cmb_commands - before.cmb_commands,
        }
    }

    /// Adds the counters of another thread.
    pub fn merge(&mut self, other: &Self) {
        self.polls += other.polls;
        self.idle_polls += other.idle_polls;
        self.completions += other.completions;
        self.submission_doorbells += other.submission_doorbells;
        self.completion_doorbells += other.completion_doorbells;
        self.doorbell_registers += other.doorbell_registers;
        self.cmb_commands += other.cmb_commands;
    }
}

impl IoCounts {
    /// Adds other sums.
    pub fn merge(&mut self, other: &Self) {
        self.ios += other.ios;
        self.bytes += other.bytes;
        self.errors += other.errors;
        self.reads += other.reads;
        self.writes += other.writes;
    }
}

impl VerifyResult {
    /// Whether no block was bad.
    pub fn has_no_bad_blocks(&self) -> bool {
        self.bad_blocks() == 0
    }

    /// Description of the result.
    pub fn text(&self) -> String {
        let checked = show_count(self.good_blocks + self.bad_blocks());
        if self.has_no_bad_blocks() {
            let unwritten = show_count(self.unwritten_blocks);
            return format!("{checked} blocks good; {unwritten} read before they were written");
        }
        let kinds = [
            (self.stale_blocks, "stale"),
            (self.torn_blocks, "torn"),
            (self.misplaced_blocks, "misplaced"),
            (self.foreign_blocks, "foreign"),
        ];
        let kinds = kinds.iter().filter(|(count, _)| *count > 0);
        let kinds: Vec<String> = kinds.map(|(count, kind)| format!("{count} {kind}")).collect();
        let bad = show_count(self.bad_blocks());
        let first = self.first_bad.as_deref().unwrap_or("unknown");
        format!("{bad} of {checked} blocks are bad: {}; first: {first}", kinds.join(", "))
    }

    /// Number of bad blocks of any kind.
    pub fn bad_blocks(&self) -> u64 {
        self.stale_blocks + self.torn_blocks + self.misplaced_blocks + self.foreign_blocks
    }

    /// Adds the result of another thread.
    pub fn merge(&mut self, other: &Self) {
        self.good_blocks += other.good_blocks;
        self.unwritten_blocks += other.unwritten_blocks;
        self.stale_blocks += other.stale_blocks;
        self.torn_blocks += other.torn_blocks;
        self.misplaced_blocks += other.misplaced_blocks;
        self.foreign_blocks += other.foreign_blocks;
        if self.first_bad.is_none() {
            self.first_bad.clone_from(&other.first_bad);
        }
    }
}

impl RamResult {
    /// I/Os per second.
    pub fn iops(&self) -> f64 {
        per_second(self.counts.ios, self.elapsed)
    }

    /// Bytes per second.
    pub fn bytes_per_second(&self) -> f64 {
        per_second(self.counts.bytes, self.elapsed)
    }
}

/// `count` per second of `elapsed`. Zero if `elapsed` is zero.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
pub fn per_second(count: u64, elapsed: Span) -> f64 {
    if elapsed.ns == 0 { 0.0 } else { count as f64 * 1e9 / elapsed.ns as f64 }
}

/// Ratio of `part` to `whole`. Zero if `whole` is zero.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::{FastPathCounters, per_second};
    use tenmil_base::Span;

    #[test]
    fn rate_over_zero_time_is_zero() {
        assert_eq!(per_second(5, Span { ns: 0 }).to_bits(), 0.0_f64.to_bits());
        assert_eq!(
            FastPathCounters::default().completions_per_nonempty_poll().to_bits(),
            0.0_f64.to_bits()
        );
        assert_eq!(FastPathCounters::default().doorbells_per_io().to_bits(), 0.0_f64.to_bits());
    }

    #[test]
    fn idle_polls_do_not_lower_completions_per_poll() {
        let counters = FastPathCounters {
            polls: 30,
            idle_polls: 20,
            completions: 80,
            submission_doorbells: 10,
            completion_doorbells: 6,
            doorbell_registers: 4,
            cmb_commands: 40,
        };
        assert!((counters.completions_per_nonempty_poll() - 8.0).abs() < 1e-12);
        assert!((counters.doorbells_per_io() - 0.2).abs() < 1e-12);
        assert!((counters.doorbell_registers_per_io() - 0.05).abs() < 1e-12);
        assert!((counters.cmb_commands_per_io() - 0.5).abs() < 1e-12);
    }
}
