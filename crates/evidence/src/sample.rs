//! Experiments and records for tests.

use std::collections::BTreeMap;

use crate::{Bound, Compared, Experiment, Figure, Question, Reading, Record, Round, Side, Unit};

/// Two sides, of which the first is claimed to do half as much again as the second.
pub(crate) fn experiment() -> Experiment<&'static str> {
    Experiment {
        name: "speed",
        claim: "Fast is faster.",
        seeds: &[1],
        seen: "2 times",
        figures: &[Figure { key: "iops", title: "IOPS", unit: Unit::PerSecond, is_tail: false }],
        sides: vec![Side::new("fast", "f"), Side::new("slow", "s")],
        questions: vec![Question {
            asks: "worth, times",
            compared: Compared::Ratio { of: "fast", to: "slow", figure: "iops" },
            bound: Bound::AtLeast(1.5),
            is_tail: false,
        }],
        limits: "",
    }
}

/// A turn that read so many IOPS and was not disturbed.
pub(crate) fn reading(iops: f64) -> Reading {
    let figures = BTreeMap::from([("iops".into(), iops)]);
    Reading { figures, processors: 2, ..Reading::default() }
}

/// Rounds of the sides `fast` and `slow`.
pub(crate) fn record(rounds: &[(f64, f64)]) -> Record {
    let round = |(fast, slow): &(f64, f64)| {
        let turns = [("fast", *fast), ("slow", *slow)];
        Round { turns: turns.map(|(side, iops)| (side.to_owned(), reading(iops))).into() }
    };
    Record {
        name: "speed".into(),
        rounds: rounds.iter().map(round).collect(),
        missing: BTreeMap::new(),
    }
}

/// Whether two numbers are the same but for rounding.
pub(crate) fn times(one: f64, other: f64) -> bool {
    (one / other - 1.0).abs() < 1e-9
}
