//! Test bench: executes variants and measures the CPU time that others use meanwhile.

mod fio;
mod mixed_load;
mod target_processes;
mod thread_loop;
pub(super) mod veth_pair;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use crate::experiment::{Effort, TrialError, TrialResult, TrialRunner};
use serde_json::Value;
use tenmil_base::{Error, Instant, Span};
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::machine_environment::CpuTime;
use tenmil_linux::process_stats::cpu_time_with_reaped_children;
use tenmil_linux::{Clock, CpuList};

use self::target_processes::TargetProcesses;
use super::bench_task::{BenchTask, expand_placeholders};
use crate::perf::engine;
use crate::perf::perf_options::{MachineResources, PerfOptions};
use crate::perf::perf_result::PerfResult;
use crate::perf::progress::RunProgress;

/// Parser of the arguments of `tenmil perf`.
pub(crate) type PerfParser = fn(&[String]) -> Result<PerfOptions, Error>;

/// The machine and the helper processes.
pub struct TestBench {
    clock: Clock,
    /// Usable cores. Fractions of CPU time refer to these.
    cores: CpuList,
    parse: PerfParser,
    targets: TargetProcesses,
    /// Directory of programs with other build options.
    builds: Option<PathBuf>,
}

/// Metrics of a trial, by key.
type TrialMetrics = BTreeMap<String, f64>;

/// Snapshot of the CPU times of the kernel.
#[derive(Clone, Copy)]
struct CpuTimeSnapshot {
    at: Instant,
    all: CpuTime,
    ours: Span,
}

impl TestBench {
    /// Creates the test bench of this machine. `builds` is the output directory of `cargo xtask
    /// pgo`.
    pub fn new(clock: Clock, parse: PerfParser, builds: Option<PathBuf>) -> Self {
        let cores = CpuList::allowed_cpus();
        let targets = TargetProcesses::default();
        Self { clock, cores, parse, targets, builds }
    }

    /// Ends the helper processes of an experiment.
    pub fn stop_helpers(&mut self) {
        self.targets.stop_all();
    }

    fn run_trial(&mut self, work: &BenchTask, effort: &Effort) -> Result<TrialMetrics, TrialError> {
        match *work {
            BenchTask::Perf(words) => self.run_perf(words, "", effort),
            BenchTask::Phases(phases) => self.run_phases(phases, effort),
            BenchTask::Served { serve, perf } => {
                let target = self.target_uri(serve)?;
                self.run_perf(perf, &target, effort)
            }
            BenchTask::OverVeth { serve, perf } => {
                let words =
                    expand_placeholders(serve, &self.cores, "").map_err(TrialError::Missing)?;
                let target = self
                    .targets
                    .start_or_find_remote_target(&words)
                    .map_err(TrialError::Missing)?;
                self.run_perf(perf, &target, effort)
            }
            BenchTask::Mixed { serve, keys } => {
                let target = self.target_uri(serve)?;
                let uri = format!("{target}{keys}");
                let time = Span { ns: effort.warm_up.ns + effort.trial_time.ns };
                mixed_load::run_mixed_load(&uri, self.clock, time)
                    .map_err(|why| missing_variant_error(&why))
            }
            BenchTask::Loop { run, .. } => {
                let core = self.cores.iter().next();
                thread_loop::measure_loop_on_core(run, self.clock, core, effort)
                    .map_err(TrialError::Missing)
            }
            BenchTask::Fio(words) => {
                let words =
                    expand_placeholders(words, &self.cores, "").map_err(TrialError::Missing)?;
                fio::run_fio(&words).map_err(TrialError::Missing)
            }
            BenchTask::Built { variant, perf } => {
                self.run_build_variant(variant, perf, effort).map_err(TrialError::Missing)
            }
        }
    }

    fn target_uri(&mut self, serve: &str) -> Result<String, TrialError> {
        let words = expand_placeholders(serve, &self.cores, "").map_err(TrialError::Missing)?;
        self.targets.start_or_find_target(&words).map_err(TrialError::Missing)
    }

    fn run_perf(
        &mut self,
        words: &str,
        target: &str,
        effort: &Effort,
    ) -> Result<TrialMetrics, TrialError> {
        let words = expand_placeholders(words, &self.cores, target).map_err(TrialError::Missing)?;
        let mut options = (self.parse)(&words).map_err(|why| missing_variant_error(&why))?;
        options.time = effort.trial_time;
        options.warm_up = effort.warm_up;
        options.baseline_time = options.baseline_time.map(|_| effort.trial_time);
        options
            .validate(&MachineResources::probe_machine(&KernelFiles::live_system()))
            .map_err(|why| missing_variant_error(&why))?;
        let progress = Arc::new(RunProgress::new(options.cores.len().max(1)));
        let result = engine::run_perf(&options, &progress, &mut |_| {});
        if tenmil_linux::signal::is_stop_requested() {
            return Err(TrialError::Interrupted);
        }
        let result = result.map_err(|why| missing_variant_error(&why))?;
        if result.totals.ios == 0 || result.totals.errors > 0 {
            let why = format!(
                "{} I/Os ended well and {} badly, expected all of them to end well",
                result.totals.ios, result.totals.errors
            );
            return Err(TrialError::Missing(why));
        }
        Ok(metrics_of_result(&result))
    }

    /// Runs phases one after the other. Rates are averaged, latencies are the worst of all phases.
    #[expect(clippy::cast_precision_loss, reason = "a few phases")]
    fn run_phases(&mut self, phases: &[&str], effort: &Effort) -> Result<TrialMetrics, TrialError> {
        let mut all = TrialMetrics::new();
        for words in phases {
            for (key, value) in self.run_perf(words, "", effort)? {
                let is_rate = key == "iops";
                let share = if is_rate { value / phases.len() as f64 } else { value };
                let found = all.entry(key).or_insert(0.0);
                *found = if is_rate { *found + share } else { found.max(share) };
            }
        }
        Ok(all)
    }

    fn run_build_variant(
        &self,
        variant: &str,
        words: &str,
        effort: &Effort,
    ) -> Result<TrialMetrics, String> {
        let Some(builds) = &self.builds else {
            return Err(
                "takes builds of several minutes: `cargo xtask pgo` makes and compares them"
                    .to_owned(),
            );
        };
        let program = builds.join(variant).join("tenmil");
        let times = [("-t", effort.trial_time), ("-a", effort.warm_up)];
        let times = times.map(|(flag, span)| [flag.to_owned(), span.as_secs_f64().to_string()]);
        let mut command = Command::new(&program);
        command.arg("perf").args(expand_placeholders(words, &self.cores, "")?).args(times.concat());
        let output = command.arg("--json").output();
        let output = output.map_err(|error| format!("{}: {error}", program.display()))?;
        let report: Value = serde_json::from_slice(&output.stdout).map_err(|_| {
            let said = String::from_utf8_lossy(&output.stderr);
            format!("{}: {}, expected a report", program.display(), said.trim())
        })?;
        let figure = |key: &str| Some((key.to_owned(), report[key].as_f64()?));
        Ok(["iops", "ns_per_io"].iter().filter_map(|key| figure(key)).collect())
    }

    fn cpu_times_of_others(&self) -> CpuTimeSnapshot {
        let ours = cpu_time_with_reaped_children(std::process::id()).unwrap_or_default();
        CpuTimeSnapshot {
            at: self.clock.now(),
            all: CpuTime::read(&self.cores),
            ours: Span { ns: ours.ns + self.targets.cpu_time().ns },
        }
    }

    /// Result of a trial that began with the snapshot `before`.
    #[expect(clippy::cast_precision_loss, reason = "a count of processors")]
    fn trial_result(&self, mut figures: TrialMetrics, before: CpuTimeSnapshot) -> TrialResult {
        let after = self.cpu_times_of_others();
        let seconds = after.at.since(before.at).as_secs_f64().max(1e-9);
        let ours = Span { ns: after.ours.ns.saturating_sub(before.ours.ns) }.as_secs_f64();
        figures.insert("cpu".to_owned(), ours / seconds);
        let used = after.all.used_fraction_since(before.all);
        let cores = self.cores.len().max(1) as f64;
        TrialResult {
            figures,
            steal: after.all.steal_since(before.all),
            others: (used - ours / (seconds * cores)).max(0.0),
            processors: u32::try_from(self.cores.len()).unwrap_or(u32::MAX),
        }
    }
}

impl TrialRunner for TestBench {
    type Work = BenchTask;

    fn run(&mut self, work: &BenchTask, effort: &Effort) -> Result<TrialResult, TrialError> {
        let before = self.cpu_times_of_others();
        let figures = self.run_trial(work, effort);
        if tenmil_linux::signal::is_stop_requested() {
            return Err(TrialError::Interrupted);
        }
        Ok(self.trial_result(figures?, before))
    }
}

/// Converts an error into the reason for a missing variant.
fn missing_variant_error(why: &Error) -> TrialError {
    TrialError::Missing(why.text.clone())
}

#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn metrics_of_result(result: &PerfResult) -> TrialMetrics {
    let at = |part| result.latency.percentile(part) as f64;
    let seconds = result.elapsed.as_secs_f64().max(1e-9);
    let mut figures = vec![
        ("iops", result.iops()),
        ("bytes_per_s", result.bytes_per_second()),
        ("ns_per_io", result.thread_ns_per_io()),
        ("mean", result.latency.mean()),
        ("p50", at(500_000)),
        ("p99", at(990_000)),
        ("p9999", at(999_900)),
        ("doorbells_per_io", result.counters.doorbells_per_io()),
        ("sleeps", result.sleeps as f64 / seconds),
    ];
    figures.extend(result.baseline_ratio().map(|ratio| ("of_baseline", ratio)));
    figures.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}
