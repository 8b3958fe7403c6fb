//! Experiments and records for tests.

use std::collections::BTreeMap;

use crate::experiment::{
    Criterion, Experiment, ExperimentRecord, Metric, Operand, Round, Threshold, TrialResult, Unit,
    Variant,
};

/// Two variants; the first is claimed to be 1.5 times as fast as the second.
pub(crate) fn two_variant_experiment() -> Experiment<&'static str> {
    Experiment {
        name: "speed",
        claim: "Fast is faster.",
        seeds: &[1],
        seen: "2 times",
        figures: &[Metric { key: "iops", title: "IOPS", unit: Unit::PerSecond, is_tail: false }],
        sides: vec![Variant::new("fast", "f"), Variant::new("slow", "s")],
        questions: vec![Criterion {
            question: "worth, times",
            compared: Operand::Ratio { of: "fast", to: "slow", figure: "iops" },
            bound: Threshold::AtLeast(1.5),
            is_tail: false,
        }],
        limits: "",
    }
}

/// Undisturbed trial with this rate.
pub(crate) fn trial_result(iops: f64) -> TrialResult {
    let figures = BTreeMap::from([("iops".into(), iops)]);
    TrialResult { figures, processors: 2, ..TrialResult::default() }
}

/// Rounds of the variants `fast` and `slow`.
pub(crate) fn record_of_fast_and_slow(rounds: &[(f64, f64)]) -> ExperimentRecord {
    let round = |(fast, slow): &(f64, f64)| {
        let turns = [("fast", *fast), ("slow", *slow)];
        Round { trials: turns.map(|(side, iops)| (side.to_owned(), trial_result(iops))).into() }
    };
    ExperimentRecord {
        name: "speed".into(),
        rounds: rounds.iter().map(round).collect(),
        missing: BTreeMap::new(),
    }
}

/// Whether two numbers are equal except for rounding.
pub(crate) fn is_close(one: f64, other: f64) -> bool {
    (one / other - 1.0).abs() < 1e-9
}
