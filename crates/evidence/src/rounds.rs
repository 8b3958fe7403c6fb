//! A run of one experiment: its sides take turns, round by round.

use crate::judge::is_quiet;
use crate::{Experiment, Pace, Reading, Record, Round};

/// Runs what a side runs.
pub trait Bench {
    /// What a side runs.
    type Work;

    /// One turn, and what was read off it.
    fn run(&mut self, work: &Self::Work, pace: &Pace) -> Result<Reading, Stopped>;
}

/// Why a turn has no reading.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// Something that it takes is not there, or it failed. The side is not tried again.
    Missing(String),
    /// Somebody has seen enough.
    Interrupted,
}

/// Somebody has seen enough; nothing of the experiment is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interrupted;

/// How far an experiment has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The round, from 1 on.
    pub round: u32,
    /// How many there are to be.
    pub rounds: u32,
    /// Which side has its turn.
    pub label: &'static str,
}

/// Runs an experiment: as many rounds as `pace` says, and spare ones for such as were disturbed. A
/// side that is missing is left out of those that follow; without any side there is no round.
pub fn measure<B: Bench>(
    experiment: &Experiment<B::Work>,
    pace: &Pace,
    bench: &mut B,
    tell: &mut dyn FnMut(Step),
) -> Result<Record, Interrupted> {
    let mut record = Record { name: experiment.name.to_owned(), ..Record::default() };
    for side in experiment.sides.iter().filter(|side| !pace.takes(side)) {
        record.missing.insert(side.label.to_owned(), LEFT_OUT.to_owned());
    }
    let mut rounds = pace.rounds;
    let most = pace.rounds + pace.spare;
    let mut number = 0;
    while number < rounds {
        number += 1;
        let mut round = Round::default();
        for side in &experiment.sides {
            if record.missing.contains_key(side.label) {
                continue;
            }
            tell(Step { round: number, rounds, label: side.label });
            match bench.run(&side.work, pace) {
                Ok(reading) => drop(round.turns.insert(side.label.to_owned(), reading)),
                Err(Stopped::Missing(why)) => {
                    drop(record.missing.insert(side.label.to_owned(), why));
                }
                Err(Stopped::Interrupted) => return Err(Interrupted),
            }
        }
        if round.turns.is_empty() {
            break;
        }
        let is_disturbed =
            experiment.questions.iter().any(|asked| !is_quiet(&round, asked.compared));
        if is_disturbed && rounds < most {
            rounds += 1;
        }
        record.rounds.push(round);
    }
    Ok(record)
}

/// Why a side is missing in a quick run.
pub const LEFT_OUT: &str = "left out of a quick run; `tenmil evidence` without --quick has it";

#[cfg(test)]
mod tests {
    use super::{Bench, Interrupted, LEFT_OUT, Stopped, measure};
    use crate::sample::{experiment, reading};
    use crate::{Pace, Reading, Verdict, judge};

    /// Says what was asked, and answers from a script.
    struct Script<F> {
        asked: String,
        answer: F,
    }

    impl<F: FnMut(&str, usize) -> Result<Reading, Stopped>> Bench for Script<F> {
        type Work = &'static str;

        fn run(&mut self, work: &&'static str, _: &Pace) -> Result<Reading, Stopped> {
            self.asked += work;
            (self.answer)(work, self.asked.len())
        }
    }

    fn script<F: FnMut(&str, usize) -> Result<Reading, Stopped>>(answer: F) -> Script<F> {
        Script { asked: String::new(), answer }
    }

    fn speed(work: &str) -> Reading {
        reading(if work == "f" { 30.0 } else { 10.0 })
    }

    #[test]
    fn sides_take_turns_and_every_turn_is_told() {
        let mut bench = script(|work, _| Ok(speed(work)));
        let mut told = Vec::new();
        let record = measure(&experiment(), &Pace::QUICK, &mut bench, &mut |step| {
            told.push((step.round, step.rounds, step.label));
        });
        let record = record.unwrap();
        assert_eq!(bench.asked, "fsfsfs");
        assert_eq!((told[0], told[1]), ((1, 3, "fast"), (1, 3, "slow")));
        assert_eq!(told.last(), Some(&(3, 3, "slow")));
        assert_eq!(record.values("fast", "iops"), [30.0; 3]);
        let found = judge(&experiment().questions[0], &record);
        assert_eq!(found.verdict, Verdict::Holds);
    }

    #[test]
    fn a_disturbed_round_is_followed_by_a_spare_one_while_there_are_any() {
        let mut bench = script(|work, turn| {
            let others = if turn == 2 { 0.5 } else { 0.0 };
            Ok(Reading { others, ..speed(work) })
        });
        let record = measure(&experiment(), &Pace::QUICK, &mut bench, &mut |_| {}).unwrap();
        assert_eq!(record.rounds.len(), 4);
        assert_eq!(judge(&experiment().questions[0], &record).values.unwrap().count, 3);
        let mut always = script(|work, _| Ok(Reading { stolen: 0.5, ..speed(work) }));
        let record = measure(&experiment(), &Pace::FULL, &mut always, &mut |_| {}).unwrap();
        assert_eq!(record.rounds.len(), 7, "five, and the two that are to spare");
        let found = judge(&experiment().questions[0], &record);
        assert_eq!(found.verdict, Verdict::NotConclusive);
    }

    #[test]
    fn a_side_that_is_not_there_is_tried_once_and_the_others_go_on() {
        let mut bench = script(|work, _| match work {
            "s" => Err(Stopped::Missing("no tool".into())),
            _ => Ok(speed(work)),
        });
        let record = measure(&experiment(), &Pace::QUICK, &mut bench, &mut |_| {}).unwrap();
        assert_eq!(bench.asked, "fsff");
        assert_eq!((record.missing["slow"].as_str(), record.rounds.len()), ("no tool", 3));
        let mut none = script(|_, _| Err(Stopped::Missing("nothing".into())));
        let record = measure(&experiment(), &Pace::QUICK, &mut none, &mut |_| {}).unwrap();
        assert_eq!((none.asked.as_str(), record.rounds.len()), ("fs", 0));
    }

    #[test]
    fn a_quick_run_leaves_sides_out_and_says_so() {
        let mut experiment = experiment();
        experiment.sides[1].is_for_full = true;
        let mut bench = script(|work, _| Ok(speed(work)));
        let record = measure(&experiment, &Pace::QUICK, &mut bench, &mut |_| {}).unwrap();
        assert_eq!((bench.asked.as_str(), record.missing["slow"].as_str()), ("fff", LEFT_OUT));
        let mut full = script(|work, _| Ok(speed(work)));
        let record = measure(&experiment, &Pace::FULL, &mut full, &mut |_| {}).unwrap();
        assert_eq!((full.asked.as_str(), record.missing.len()), ("fsfsfsfsfs", 0));
    }

    #[test]
    fn an_interrupted_experiment_keeps_nothing() {
        let mut bench = script(|work, turn| match turn {
            4 => Err(Stopped::Interrupted),
            _ => Ok(speed(work)),
        });
        let ended = measure(&experiment(), &Pace::QUICK, &mut bench, &mut |_| {});
        assert_eq!((ended, bench.asked.as_str()), (Err(Interrupted), "fsfs"));
    }

    #[test]
    fn a_record_is_kept_as_text_and_read_back_alike() {
        let mut bench = script(|work, _| Ok(speed(work)));
        let record = measure(&experiment(), &Pace::QUICK, &mut bench, &mut |_| {}).unwrap();
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<crate::Record>(&text).unwrap(), record);
    }
}
