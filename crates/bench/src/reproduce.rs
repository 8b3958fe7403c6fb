//! Experiments of `tenmil reproduce`: published claims about storage stacks, tested on this
//! machine.
//!
//! ```text
//!   experiments ── claims, and what is run to test each
//!       │  TestBench: perf in this process, targets in processes of their own, loops, other programs
//!       ▼
//!   ReportDirectory ── finished experiments, reused by the same program on the same machine
//!       ▼
//!   ReproduceRun ── verdicts, as text, JSON and HTML
//! ```

mod bench_task;
mod experiments;
pub mod report;
mod report_directory;
mod test_bench;

use crate::experiment::{
    CriterionResult, Effort, Experiment, ExperimentCanceled, ExperimentRecord, RoundProgress,
    Verdict,
};
use tenmil_base::Span;
use tenmil_linux::{Clock, MachineEnvironment};

pub use bench_task::{BenchTask, expand_placeholders};
pub use experiments::{experiments_by_name, perf_arguments_of_variants};
pub use report_directory::{ReportDirectory, record_key};
pub use test_bench::TestBench;

/// Result of a whole run.
#[derive(Debug)]
pub struct ReproduceRun {
    /// Effort: number and length of the trials.
    pub effort: Effort,
    /// Machine it ran on.
    pub machine: MachineEnvironment,
    /// Results of the experiments.
    pub experiment_results: Vec<ExperimentResult>,
    /// Command that repeats the run.
    pub command: String,
}

/// An experiment and its result.
#[derive(Debug)]
pub struct ExperimentResult {
    /// The experiment.
    pub experiment: Experiment<BenchTask>,
    /// Measured data.
    pub record: ExperimentRecord,
    /// One result per criterion.
    pub findings: Vec<CriterionResult>,
    /// Whether the data come from an earlier run.
    pub is_reused: bool,
}

/// Progress report.
pub enum ReproduceProgress<'a> {
    /// A trial of a variant begins.
    Turn {
        /// Number of the experiment, from 1.
        number: usize,
        /// Number of experiments.
        count: usize,
        /// Name of the experiment.
        name: &'static str,
        /// Round and variant.
        step: RoundProgress,
        /// Maximum remaining time.
        left: Span,
    },
    /// An experiment is finished.
    Finished(&'a ExperimentResult),
}

/// Progress callback.
type ProgressFn<'a> = dyn FnMut(&ReproduceProgress<'_>) + 'a;

/// Reason given for an experiment that did not fit into the time limit.
const NO_TIME: &str = "there was no time left; the same command again goes on from here";

/// Runs the `chosen` experiments or loads their saved data, and then repeats the disturbed ones as
/// long as there is time. If canceled, finished experiments stay saved.
pub fn run_experiments(
    chosen: Vec<Experiment<BenchTask>>,
    effort: Effort,
    stand: &mut TestBench,
    store: &ReportDirectory,
    clock: Clock,
    tell: &mut ProgressFn<'_>,
) -> Result<Vec<ExperimentResult>, ExperimentCanceled> {
    let begun = clock.now();
    let has_time = |planned: Span| clock.now().since(begun).ns + planned.ns <= effort.limit.ns;
    let count = chosen.len();
    let planned: Vec<Span> =
        chosen.iter().map(|experiment| effort.duration_max(experiment)).collect();
    let mut measure =
        |number, left, experiment: &Experiment<BenchTask>, tell: &mut ProgressFn<'_>| {
            let name = experiment.name;
            let mut reported =
                |step| tell(&ReproduceProgress::Turn { number, count, name, step, left });
            let measured = crate::experiment::run_rounds(experiment, &effort, stand, &mut reported);
            stand.stop_helpers();
            measured
        };
    let mut experiment_results = Vec::new();
    for (index, experiment) in chosen.into_iter().enumerate() {
        let saved = store.load_record(experiment.name);
        let is_reused = saved.is_some();
        let record = match saved {
            Some(record) => record,
            None if !has_time(planned[index]) => {
                experiment_results.push(ExperimentResult::skipped_for_time(experiment));
                continue;
            }
            None => {
                let left = Span { ns: planned[index..].iter().map(|span| span.ns).sum() };
                measure(index + 1, left, &experiment, tell)?
            }
        };
        let experiment_result = ExperimentResult::new(experiment, record, is_reused);
        experiment_result.save_and_report(store, tell);
        experiment_results.push(experiment_result);
    }
    // Second pass: disturbed experiments get additional rounds while there is time.
    for (index, experiment_result) in experiment_results.iter_mut().enumerate() {
        if experiment_result.was_disturbed() && has_time(planned[index]) {
            let left = Span { ns: effort.limit.ns - clock.now().since(begun).ns };
            let mut more = measure(index + 1, left, &experiment_result.experiment, tell)?;
            experiment_result.record.rounds.append(&mut more.rounds);
            experiment_result.evaluate_criteria();
            experiment_result.save_and_report(store, tell);
        }
    }
    Ok(experiment_results)
}

impl ExperimentResult {
    /// Creates the result of an experiment and evaluates its criteria.
    pub fn new(
        experiment: Experiment<BenchTask>,
        record: ExperimentRecord,
        is_reused: bool,
    ) -> Self {
        let mut experiment_result = Self { experiment, record, findings: Vec::new(), is_reused };
        experiment_result.evaluate_criteria();
        experiment_result
    }

    /// Evaluates the criteria again.
    fn evaluate_criteria(&mut self) {
        let asked = self.experiment.questions.iter();
        self.findings = asked
            .map(|question| crate::experiment::evaluate_criterion(question, &self.record))
            .collect();
    }

    /// Saves the data if they need not be measured again, and reports the result.
    fn save_and_report(&self, store: &ReportDirectory, tell: &mut ProgressFn<'_>) {
        if self.is_final() && !self.is_reused {
            store.save_record(&self.record);
        }
        tell(&ReproduceProgress::Finished(self));
    }

    /// Whether the result is final: nothing failed, was missing or was disturbed.
    fn is_final(&self) -> bool {
        let is_missing = self.findings.iter().any(|finding| {
            finding.verdict == Verdict::NotMeasured && finding.reason != crate::experiment::LEFT_OUT
        });
        !is_missing && !self.was_disturbed()
    }

    /// Whether a criterion is inconclusive because other programs or guests used the machine.
    fn was_disturbed(&self) -> bool {
        self.findings.iter().any(|finding| {
            let is_open = finding.verdict == Verdict::Inconclusive;
            is_open && (finding.values.is_none() || finding.disturbed > 0)
        })
    }

    fn skipped_for_time(experiment: Experiment<BenchTask>) -> Self {
        let open = || CriterionResult::without_value(Verdict::Inconclusive, NO_TIME.to_owned());
        let findings = experiment.questions.iter().map(|_| open()).collect();
        let record =
            ExperimentRecord { name: experiment.name.to_owned(), ..ExperimentRecord::default() };
        Self { experiment, record, findings, is_reused: false }
    }

    /// Verdict of the claim, which is the first criterion.
    pub fn claim_verdict(&self) -> Verdict {
        self.findings.first().map_or(Verdict::NotMeasured, |finding| finding.verdict)
    }
}

impl ReproduceRun {
    /// Number of claims with this verdict.
    pub fn claim_count_with_verdict(&self, verdict: Verdict) -> usize {
        self.experiment_results
            .iter()
            .filter(|experiment_result| experiment_result.claim_verdict() == verdict)
            .count()
    }

    /// Conditions that distort the results.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if cfg!(debug_assertions) {
            warnings.push("built without optimization: the numbers are not meaningful".to_owned());
        }
        if self.machine.allowed.len() < 2 {
            warnings.push(
                "one processor: driver and device share it, and no claim about several threads \
                 can be tested"
                    .to_owned(),
            );
        }
        warnings
    }
}
