//! Execution of an experiment in rounds.

use crate::experiment::verdict::is_undisturbed;
use crate::experiment::{Effort, Experiment, ExperimentRecord, Round, TrialResult};

/// Executes variants.
pub trait TrialRunner {
    /// Work of a variant.
    type Work;

    /// Runs one trial and returns its result.
    fn run(&mut self, work: &Self::Work, effort: &Effort) -> Result<TrialResult, TrialError>;
}

/// Why a trial has no result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TrialError {
    /// A prerequisite is missing or the trial failed. The variant is not tried again.
    Missing(String),
    /// Canceled by the user.
    Interrupted,
}

/// The user has canceled the experiment. Its data are discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExperimentCanceled;

/// Progress of an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundProgress {
    /// Round, from 1 on.
    pub round: u32,
    /// Planned number of rounds.
    pub rounds: u32,
    /// Label of the running variant.
    pub label: &'static str,
}

/// Runs an experiment: the rounds that `effort` specifies, and additional ones for disturbed rounds.
/// A variant that is missing is omitted from the following rounds; without any variant the
/// experiment ends.
pub fn run_rounds<B: TrialRunner>(
    experiment: &Experiment<B::Work>,
    effort: &Effort,
    bench: &mut B,
    tell: &mut dyn FnMut(RoundProgress),
) -> Result<ExperimentRecord, ExperimentCanceled> {
    let mut record =
        ExperimentRecord { name: experiment.name.to_owned(), ..ExperimentRecord::default() };
    for side in experiment.sides.iter().filter(|side| !effort.includes_variant(side)) {
        record.missing.insert(side.label.to_owned(), LEFT_OUT.to_owned());
    }
    let mut rounds = effort.rounds;
    let most = effort.rounds + effort.spare;
    let mut number = 0;
    while number < rounds {
        number += 1;
        let mut round = Round::default();
        for side in &experiment.sides {
            if record.missing.contains_key(side.label) {
                continue;
            }
            tell(RoundProgress { round: number, rounds, label: side.label });
            match bench.run(&side.work, effort) {
                Ok(reading) => drop(round.trials.insert(side.label.to_owned(), reading)),
                Err(TrialError::Missing(why)) => {
                    drop(record.missing.insert(side.label.to_owned(), why));
                }
                Err(TrialError::Interrupted) => return Err(ExperimentCanceled),
            }
        }
        if round.trials.is_empty() {
            break;
        }
        let is_disturbed =
            experiment.questions.iter().any(|asked| !is_undisturbed(&round, asked.compared));
        // A disturbed round is kept, and an additional one is run.
        if is_disturbed && rounds < most {
            rounds += 1;
        }
        record.rounds.push(round);
    }
    Ok(record)
}

/// Reason for a variant that quick runs omit.
pub const LEFT_OUT: &str = "left out of a quick run; `tenmil reproduce` without --quick has it";

#[cfg(test)]
mod tests {
    use super::{ExperimentCanceled, LEFT_OUT, TrialError, TrialRunner, run_rounds};
    use crate::experiment::test_experiments::{trial_result, two_variant_experiment};
    use crate::experiment::{Effort, TrialResult, Verdict, evaluate_criterion};

    /// Records the requests and returns scripted results.
    struct Script<F> {
        asked: String,
        answer: F,
    }

    impl<F: FnMut(&str, usize) -> Result<TrialResult, TrialError>> TrialRunner for Script<F> {
        type Work = &'static str;

        fn run(&mut self, work: &&'static str, _: &Effort) -> Result<TrialResult, TrialError> {
            self.asked += work;
            (self.answer)(work, self.asked.len())
        }
    }

    fn scripted_trial_runner<F: FnMut(&str, usize) -> Result<TrialResult, TrialError>>(
        answer: F,
    ) -> Script<F> {
        Script { asked: String::new(), answer }
    }

    fn trial_with_speed(work: &str) -> TrialResult {
        trial_result(if work == "f" { 30.0 } else { 10.0 })
    }

    #[test]
    fn variants_alternate_and_every_trial_is_reported() {
        let mut bench = scripted_trial_runner(|work, _| Ok(trial_with_speed(work)));
        let mut reported = Vec::new();
        let record =
            run_rounds(&two_variant_experiment(), &Effort::QUICK, &mut bench, &mut |step| {
                reported.push((step.round, step.rounds, step.label));
            });
        let record = record.unwrap();
        assert_eq!(bench.asked, "fsfsfs");
        assert_eq!((reported[0], reported[1]), ((1, 3, "fast"), (1, 3, "slow")));
        assert_eq!(reported.last(), Some(&(3, 3, "slow")));
        assert_eq!(record.metric_in_each_round("fast", "iops"), [30.0; 3]);
        let found = evaluate_criterion(&two_variant_experiment().questions[0], &record);
        assert_eq!(found.verdict, Verdict::Confirmed);
    }

    #[test]
    fn disturbed_round_is_followed_by_an_extra_one_while_allowed() {
        let mut bench = scripted_trial_runner(|work, trial_time| {
            let others = if trial_time == 2 { 0.5 } else { 0.0 };
            Ok(TrialResult { others, ..trial_with_speed(work) })
        });
        let record =
            run_rounds(&two_variant_experiment(), &Effort::QUICK, &mut bench, &mut |_| {}).unwrap();
        assert_eq!(record.rounds.len(), 4);
        assert_eq!(
            evaluate_criterion(&two_variant_experiment().questions[0], &record)
                .values
                .unwrap()
                .count,
            3
        );
        let mut always = scripted_trial_runner(|work, _| {
            Ok(TrialResult { steal: 0.5, ..trial_with_speed(work) })
        });
        let record =
            run_rounds(&two_variant_experiment(), &Effort::FULL, &mut always, &mut |_| {}).unwrap();
        assert_eq!(record.rounds.len(), 7, "five, and the two that are to spare");
        let found = evaluate_criterion(&two_variant_experiment().questions[0], &record);
        assert_eq!(found.verdict, Verdict::Inconclusive);
    }

    #[test]
    fn missing_variant_is_tried_once_and_others_continue() {
        let mut bench = scripted_trial_runner(|work, _| match work {
            "s" => Err(TrialError::Missing("no tool".into())),
            _ => Ok(trial_with_speed(work)),
        });
        let record =
            run_rounds(&two_variant_experiment(), &Effort::QUICK, &mut bench, &mut |_| {}).unwrap();
        assert_eq!(bench.asked, "fsff");
        assert_eq!((record.missing["slow"].as_str(), record.rounds.len()), ("no tool", 3));
        let mut none = scripted_trial_runner(|_, _| Err(TrialError::Missing("nothing".into())));
        let record =
            run_rounds(&two_variant_experiment(), &Effort::QUICK, &mut none, &mut |_| {}).unwrap();
        assert_eq!((none.asked.as_str(), record.rounds.len()), ("fs", 0));
    }

    #[test]
    fn quick_run_omits_variants_and_reports_that() {
        let mut experiment = two_variant_experiment();
        experiment.sides[1].is_for_full = true;
        let mut bench = scripted_trial_runner(|work, _| Ok(trial_with_speed(work)));
        let record = run_rounds(&experiment, &Effort::QUICK, &mut bench, &mut |_| {}).unwrap();
        assert_eq!((bench.asked.as_str(), record.missing["slow"].as_str()), ("fff", LEFT_OUT));
        let mut full = scripted_trial_runner(|work, _| Ok(trial_with_speed(work)));
        let record = run_rounds(&experiment, &Effort::FULL, &mut full, &mut |_| {}).unwrap();
        assert_eq!((full.asked.as_str(), record.missing.len()), ("fsfsfsfsfs", 0));
    }

    #[test]
    fn interrupted_experiment_keeps_no_data() {
        let mut bench = scripted_trial_runner(|work, trial_time| match trial_time {
            4 => Err(TrialError::Interrupted),
            _ => Ok(trial_with_speed(work)),
        });
        let ended = run_rounds(&two_variant_experiment(), &Effort::QUICK, &mut bench, &mut |_| {});
        assert_eq!((ended, bench.asked.as_str()), (Err(ExperimentCanceled), "fsfs"));
    }

    #[test]
    fn record_survives_serialization() {
        let mut bench = scripted_trial_runner(|work, _| Ok(trial_with_speed(work)));
        let record =
            run_rounds(&two_variant_experiment(), &Effort::QUICK, &mut bench, &mut |_| {}).unwrap();
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(
            serde_json::from_str::<crate::experiment::ExperimentRecord>(&text).unwrap(),
            record
        );
    }
}
