//! What a run of `perf` has found out: plain values that the engine fills and the reports show.

use std::collections::BTreeMap;

use base::{Durability, Histogram, Operation, Span};

use super::environment::RunEnvironment;
use super::options::PerfOptions;
use super::report::figures::show_count;
use crate::{Refused, Uri};

/// Everything a run has found out.
#[derive(Clone, Debug)]
pub struct PerfOutcome {
    /// What had been asked for.
    pub options: PerfOptions,
    /// How long was measured, without the warm-up; shorter than asked if interrupted.
    pub elapsed: Span,
    /// What ended the measurement.
    pub ended: Ended,
    /// One per SSD, in the order of the URIs.
    pub devices: Vec<DeviceOutcome>,
    /// Over all SSDs and threads.
    pub totals: Counts,
    /// Latency of every I/O. With open-loop arrivals from the intended start.
    pub latency: Histogram,
    /// Latency by operation; only operations that happened.
    pub latency_by_operation: Vec<(Operation, Histogram)>,
    /// Each latency is known to this: time stamps are taken once per batch and once per poll.
    pub time_stamp_error: Span,
    /// I/Os over time.
    pub series: Series,
    /// How often each thing on the fast path happened.
    pub turns: Turns,
    /// How often a submitting thread went to sleep.
    pub sleeps: u64,
    /// Time stamp counter ticks during the measurement on one submitting thread; none where the
    /// processor has no such counter.
    pub tsc_ticks: Option<u64>,
    /// Ended I/Os that failed, by status (NVMe status field without the phase).
    pub errors_by_status: BTreeMap<u16, u64>,
    /// What was done to the fast path, as it came out: `auto` resolved.
    pub techniques: Vec<Technique>,
    /// What checking the stamps found.
    pub verified: Option<Verified>,
    /// How well the intended rate was kept.
    pub open_loop: Option<OpenLoopOutcome>,
    /// The bare ring, or bare copies.
    pub ceiling: Option<CeilingOutcome>,
    /// The same workload over memory that is moved.
    pub ram: Option<RamOutcome>,
    /// The modes of the block layer, compared.
    pub null_blk: Option<NullBlkOutcome>,
    /// What was to follow the run and did not, and why.
    pub missing: Vec<Refused>,
    /// Which submitting threads ran where.
    pub threads: Vec<ThreadPlace>,
    /// The machine.
    pub environment: RunEnvironment,
}

/// What ended a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The time was over.
    Time,
    /// All I/Os were done.
    Count,
    /// Somebody pressed Ctrl-C.
    Interrupt,
}

/// Plain sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// I/Os that ended well.
    pub ios: u64,
    /// Bytes that those moved, or were asked to move.
    pub bytes: u64,
    /// I/Os that ended badly.
    pub errors: u64,
    /// Reads that ended well.
    pub reads: u64,
    /// Writes that ended well.
    pub writes: u64,
}

/// What one SSD did.
#[derive(Clone, Debug)]
pub struct DeviceOutcome {
    /// Which: the URI, with a number if it names several.
    pub name: String,
    /// What it is: the model number that a controller tells, or a line about a device without one.
    pub model: String,
    /// What an answered write is worth.
    pub durability: Durability,
    /// Bytes on it.
    pub size_bytes: u64,
    /// Bytes in a logical block.
    pub block_size: u32,
    /// Its sums.
    pub counts: Counts,
    /// Its latencies.
    pub latency: Histogram,
}

/// I/Os over time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Series {
    /// One point stands for so long.
    pub interval: Span,
    /// I/Os that ended in each interval.
    pub ios: Vec<u64>,
    /// Bytes in each interval.
    pub bytes: Vec<u64>,
}

/// How often each thing on the fast path happened, over all submitting threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turns {
    /// Looks at a completion ring.
    pub polls: u64,
    /// Looks that found nothing.
    pub idle_polls: u64,
    /// Completions found.
    pub completions: u64,
    /// Submission doorbells rung.
    pub submission_doorbells: u64,
    /// Completion doorbells rung.
    pub completion_doorbells: u64,
    /// How many of both were written to a register.
    pub doorbell_registers: u64,
    /// Commands that were stored into a controller memory buffer.
    pub cmb_commands: u64,
}

/// One technique of the fast path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Technique {
    /// Its name.
    pub name: &'static str,
    /// How it was set.
    pub setting: String,
    /// The switch that changes it.
    pub switch: &'static str,
}

/// What checking the stamps found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Blocks that held what was last written to them.
    pub good_blocks: u64,
    /// Blocks that this run had not written yet, which may hold anything.
    pub unwritten_blocks: u64,
    /// Blocks with an older version than was last written.
    pub stale_blocks: u64,
    /// Blocks of which one part is of another version.
    pub torn_blocks: u64,
    /// Blocks that belong elsewhere.
    pub misplaced_blocks: u64,
    /// Blocks that hold no stamp of this run.
    pub foreign_blocks: u64,
    /// The first of the bad ones, in words.
    pub first_bad: Option<String>,
}

/// How well an intended rate was kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenLoopOutcome {
    /// The rate asked for, in I/Os per second.
    pub intended_per_second: u64,
    /// I/Os that had arrived and were not yet submitted at the end.
    pub backlog: u64,
    /// I/Os that were submitted later than intended because the queues were full.
    pub delayed: u64,
}

/// What a loop without everything else could do.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CeilingOutcome {
    /// What it was made of.
    pub limit: Limit,
    /// Entries, copies or exchanges per second.
    pub iops: f64,
    /// How long it was measured.
    pub elapsed: Span,
    /// Rings, or connections.
    pub rings: u32,
    /// Entries in flight on each.
    pub depth: u32,
    /// The median round trip, where the depth is 1.
    pub round_trip: Option<Span>,
}

/// What nothing can be faster than.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Limit {
    /// The bare ring between two threads.
    #[default]
    Ring,
    /// Bare copies between the same places in memory.
    Copies,
    /// Bare messages over TCP, by this engine for sockets.
    Messages(&'static str),
}

/// What the same workload did over memory that is moved.
#[derive(Clone, Debug)]
pub struct RamOutcome {
    /// The SSDs.
    pub uri: String,
    /// How long it was measured.
    pub elapsed: Span,
    /// Sums.
    pub counts: Counts,
    /// Latency of every I/O.
    pub latency: Histogram,
}

/// The modes of the block layer over a null device.
#[derive(Clone, Debug, PartialEq)]
pub struct NullBlkOutcome {
    /// I/Os in flight on each thread.
    pub depth: u32,
    /// How long each was measured.
    pub time: Span,
    /// Mode by mode.
    pub rows: Vec<NullBlkRow>,
}

/// One mode of the block layer.
#[derive(Clone, Debug, PartialEq)]
pub struct NullBlkRow {
    /// Its name.
    pub mode: &'static str,
    /// Hardware contexts, where the mode has several.
    pub contexts: Option<u32>,
    /// By number of threads, from one on.
    pub points: Vec<NullBlkPoint>,
}

/// One mode with so many threads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NullBlkPoint {
    /// Threads, a core for each.
    pub threads: usize,
    /// I/Os per second, all together.
    pub iops: f64,
    /// The share of their time, from 0 to 1, that they waited for the lock.
    pub lock_wait_share: f64,
}

impl NullBlkRow {
    /// The mode in words: `mq, 2 contexts`.
    pub fn words(&self) -> String {
        match self.contexts {
            None => self.mode.into(),
            Some(1) => format!("{}, 1 context", self.mode),
            Some(count) => format!("{}, {count} contexts", self.mode),
        }
    }
}

/// Where a thread ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadPlace {
    /// What it does: `submit` or `device`.
    pub role: &'static str,
    /// Its core, if it was pinned to one.
    pub core: Option<u32>,
}

impl PerfOutcome {
    /// What one should know before one believes the number, and what is missing beside it.
    pub fn caveats(&self) -> Vec<String> {
        let mut caveats = self.environment.caveats();
        caveats.extend(self.missing.iter().map(|refused| refused.text.clone()));
        caveats
    }

    /// I/Os per second.
    pub fn iops(&self) -> f64 {
        per_second(self.totals.ios, self.elapsed)
    }

    /// Bytes per second.
    pub fn bytes_per_second(&self) -> f64 {
        per_second(self.totals.bytes, self.elapsed)
    }

    /// Time that one submitting thread spent per I/O, in nanoseconds.
    pub fn ns_per_io(&self) -> f64 {
        ratio(self.elapsed.ns.saturating_mul(self.submitting_threads()), self.totals.ios)
    }

    /// Ticks of the time stamp counter per I/O on one submitting thread.
    pub fn tsc_per_io(&self) -> Option<f64> {
        let threads = self.submitting_threads();
        self.tsc_ticks.map(|ticks| ratio(ticks.saturating_mul(threads), self.totals.ios))
    }

    /// What this run reached of what the bare ring, or bare copies, could do.
    pub fn ceiling_ratio(&self) -> Option<f64> {
        let ceiling = self.ceiling.filter(|ceiling| ceiling.iops > 0.0)?;
        Some(self.iops() / ceiling.iops)
    }

    /// Whether any of the bytes moved, and were not only asked for.
    pub fn moves_data(&self) -> bool {
        self.options.uris.iter().any(Uri::keeps_data)
    }

    /// How many threads submitted.
    pub fn submitting_threads(&self) -> u64 {
        let submitting = self.threads.iter().filter(|place| place.role == "submit").count();
        u64::try_from(submitting.max(1)).unwrap_or(1)
    }

    /// Whether every I/O ended well and every stamp was right.
    pub fn is_clean(&self) -> bool {
        self.totals.errors == 0 && self.verified.as_ref().is_none_or(Verified::is_clean)
    }
}

impl Turns {
    /// Completions per look that found something.
    pub fn completions_per_poll(&self) -> f64 {
        ratio(self.completions, self.polls.saturating_sub(self.idle_polls))
    }

    /// Doorbells of both kinds per completed I/O.
    pub fn doorbells_per_io(&self) -> f64 {
        ratio(self.submission_doorbells + self.completion_doorbells, self.completions)
    }

    /// Doorbells per completed I/O that were written to a register.
    pub fn doorbell_registers_per_io(&self) -> f64 {
        ratio(self.doorbell_registers, self.completions)
    }

    /// Commands per completed I/O that were stored into a controller memory buffer.
    pub fn cmb_commands_per_io(&self) -> f64 {
        ratio(self.cmb_commands, self.completions)
    }

    /// What has happened since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
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

    /// Adds another thread's.
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

impl Counts {
    /// Adds another's.
    pub fn merge(&mut self, other: &Self) {
        self.ios += other.ios;
        self.bytes += other.bytes;
        self.errors += other.errors;
        self.reads += other.reads;
        self.writes += other.writes;
    }
}

impl Verified {
    /// Whether no block was bad.
    pub fn is_clean(&self) -> bool {
        self.bad_blocks() == 0
    }

    /// The findings in words.
    pub fn words(&self) -> String {
        let checked = show_count(self.good_blocks + self.bad_blocks());
        if self.is_clean() {
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

    /// How many blocks were bad, in whatever way.
    pub fn bad_blocks(&self) -> u64 {
        self.stale_blocks + self.torn_blocks + self.misplaced_blocks + self.foreign_blocks
    }

    /// Adds another thread's.
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

impl RamOutcome {
    /// I/Os per second.
    pub fn iops(&self) -> f64 {
        per_second(self.counts.ios, self.elapsed)
    }

    /// Bytes per second.
    pub fn bytes_per_second(&self) -> f64 {
        per_second(self.counts.bytes, self.elapsed)
    }
}

/// `count` per second of `elapsed`; zero if there was no time.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
pub(crate) fn per_second(count: u64, elapsed: Span) -> f64 {
    if elapsed.ns == 0 { 0.0 } else { count as f64 * 1e9 / elapsed.ns as f64 }
}

/// `part` per `whole`; zero if there is no whole.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

#[cfg(test)]
mod tests {
    use super::{Turns, per_second};
    use base::Span;

    #[test]
    fn nothing_per_nothing_is_zero_and_not_an_accident() {
        assert_eq!(per_second(5, Span { ns: 0 }).to_bits(), 0.0_f64.to_bits());
        assert_eq!(Turns::default().completions_per_poll().to_bits(), 0.0_f64.to_bits());
        assert_eq!(Turns::default().doorbells_per_io().to_bits(), 0.0_f64.to_bits());
    }

    #[test]
    fn idle_polls_do_not_dilute_the_completions_per_poll() {
        let turns = Turns {
            polls: 30,
            idle_polls: 20,
            completions: 80,
            submission_doorbells: 10,
            completion_doorbells: 6,
            doorbell_registers: 4,
            cmb_commands: 40,
        };
        assert!((turns.completions_per_poll() - 8.0).abs() < 1e-12);
        assert!((turns.doorbells_per_io() - 0.2).abs() < 1e-12);
        assert!((turns.doorbell_registers_per_io() - 0.05).abs() < 1e-12);
        assert!((turns.cmb_commands_per_io() - 0.5).abs() < 1e-12);
    }
}
