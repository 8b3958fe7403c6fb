//! Execution of an experiment in rounds.

use crate::experiment::judge::is_quiet;
use crate::experiment::{Effort, Experiment, Record, Round, TrialResult};

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
pub struct Canceled;

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
pub fn measure<B: TrialRunner>(
    experiment: &Experiment<B::Work>,
    effort: &Effort,
    bench: &mut B,
    tell: &mut dyn FnMut(RoundProgress),
) -> Result<Record, Canceled> {
    let mut record = Record { name: experiment.name.to_owned(), ..Record::default() };
    for side in experiment.sides.iter().filter(|side| !effort.takes(side)) {
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
                Err(TrialError::Interrupted) => return Err(Canceled),
            }
        }
        if round.trials.is_empty() {
            break;
        }
        let is_disturbed =
            experiment.questions.iter().any(|asked| !is_quiet(&round, asked.compared));
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
    use super::{Canceled, LEFT_OUT, TrialError, TrialRunner, measure};
    use crate::experiment::test_data::{experiment, reading};
    use crate::experiment::{Effort, TrialResult, Verdict, judge};

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

    fn script<F: FnMut(&str, usize) -> Result<TrialResult, TrialError>>(answer: F) -> Script<F> {
        Script { asked: String::new(), answer }
    }

    fn speed(work: &str) -> TrialResult {
        reading(if work == "f" { 30.0 } else { 10.0 })
    }

    #[test]
    fn sides_take_turns_and_every_turn_is_told() {
        let mut bench = script(|work, _| Ok(speed(work)));
        let mut told = Vec::new();
        let record = measure(&experiment(), &Effort::QUICK, &mut bench, &mut |step| {
            told.push((step.round, step.rounds, step.label));
        });
        let record = record.unwrap();
        assert_eq!(bench.asked, "fsfsfs");
        assert_eq!((told[0], told[1]), ((1, 3, "fast"), (1, 3, "slow")));
        assert_eq!(told.last(), Some(&(3, 3, "slow")));
        assert_eq!(record.values("fast", "iops"), [30.0; 3]);
        let found = judge(&experiment().questions[0], &record);
        assert_eq!(found.verdict, Verdict::Confirmed);
    }

    #[test]
    fn a_disturbed_round_is_followed_by_a_spare_one_while_there_are_any() {
        let mut bench = script(|work, trial_time| {
            let others = if trial_time == 2 { 0.5 } else { 0.0 };
            Ok(TrialResult { others, ..speed(work) })
        });
        let record = measure(&experiment(), &Effort::QUICK, &mut bench, &mut |_| {}).unwrap();
        assert_eq!(record.rounds.len(), 4);
        assert_eq!(judge(&experiment().questions[0], &record).values.unwrap().count, 3);
        let mut always = script(|work, _| Ok(TrialResult { steal: 0.5, ..speed(work) }));
        let record = measure(&experiment(), &Effort::FULL, &mut always, &mut |_| {}).unwrap();
        assert_eq!(record.rounds.len(), 7, "five, and the two that are to spare");
        let found = judge(&experiment().questions[0], &record);
        assert_eq!(found.verdict, Verdict::Inconclusive);
    }

    #[test]
    fn a_side_that_is_not_there_is_tried_once_and_the_others_go_on() {
        let mut bench = script(|work, _| match work {
            "s" => Err(TrialError::Missing("no tool".into())),
            _ => Ok(speed(work)),
        });
        let record = measure(&experiment(), &Effort::QUICK, &mut bench, &mut |_| {}).unwrap();
        assert_eq!(bench.asked, "fsff");
        assert_eq!((record.missing["slow"].as_str(), record.rounds.len()), ("no tool", 3));
        let mut none = script(|_, _| Err(TrialError::Missing("nothing".into())));
        let record = measure(&experiment(), &Effort::QUICK, &mut none, &mut |_| {}).unwrap();
        assert_eq!((none.asked.as_str(), record.rounds.len()), ("fs", 0));
    }

    #[test]
    fn a_quick_run_leaves_sides_out_and_says_so() {
        let mut experiment = experiment();
        experiment.sides[1].is_for_full = true;
        let mut bench = script(|work, _| Ok(speed(work)));
        let record = measure(&experiment, &Effort::QUICK, &mut bench, &mut |_| {}).unwrap();
        assert_eq!((bench.asked.as_str(), record.missing["slow"].as_str()), ("fff", LEFT_OUT));
        let mut full = script(|work, _| Ok(speed(work)));
        let record = measure(&experiment, &Effort::FULL, &mut full, &mut |_| {}).unwrap();
        assert_eq!((full.asked.as_str(), record.missing.len()), ("fsfsfsfsfs", 0));
    }

    #[test]
    fn an_interrupted_experiment_keeps_nothing() {
        let mut bench = script(|work, trial_time| match trial_time {
            4 => Err(TrialError::Interrupted),
            _ => Ok(speed(work)),
        });
        let ended = measure(&experiment(), &Effort::QUICK, &mut bench, &mut |_| {});
        assert_eq!((ended, bench.asked.as_str()), (Err(Canceled), "fsfs"));
    }

    #[test]
    fn a_record_is_kept_as_text_and_read_back_alike() {
        let mut bench = script(|work, _| Ok(speed(work)));
        let record = measure(&experiment(), &Effort::QUICK, &mut bench, &mut |_| {}).unwrap();
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<crate::experiment::Record>(&text).unwrap(), record);
    }
}
