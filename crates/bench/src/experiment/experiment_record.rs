//! Measured data, as saved.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// All rounds of an experiment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExperimentRecord {
    /// Name of the experiment.
    pub name: String,
    /// Rounds in order.
    pub rounds: Vec<Round>,
    /// Variants that could not be run, with the reason.
    pub missing: BTreeMap<String, String>,
}

/// One trial of each variant, by label.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// Results of the trials.
    pub trials: BTreeMap<String, TrialResult>,
}

/// Result of one trial.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrialResult {
    /// Metrics by key.
    pub figures: BTreeMap<String, f64>,
    /// Fraction of all CPU time, from 0 to 1, that the hypervisor gave to other guests.
    pub steal: f64,
    /// Fraction of all CPU time that other programs of this machine used.
    pub others: f64,
    /// Number of CPUs that the fractions refer to.
    pub processors: u32,
}

impl Round {
    /// Metric of a variant.
    pub fn metric_of_variant(&self, side: &str, figure: &str) -> Option<f64> {
        self.trials.get(side)?.figures.get(figure).copied()
    }

    /// Largest fractions of steal time, and of time used by others, during the trials of these
    /// variants.
    pub fn disturbance(&self, sides: impl Iterator<Item = &'static str>) -> (f64, f64) {
        let turns = sides.filter_map(|side| self.trials.get(side));
        turns.fold((0.0, 0.0), |(steal, others): (f64, f64), trial_time| {
            (steal.max(trial_time.steal), others.max(trial_time.others))
        })
    }

    /// Upper bound of the fraction of its time that a thread lost during the trials of these
    /// variants: all time that others used on all CPUs, taken from this one.
    pub fn lost_fraction(&self, sides: impl Iterator<Item = &'static str>) -> f64 {
        let turns = sides.filter_map(|side| self.trials.get(side));
        let lost = |trial_time: &TrialResult| {
            (trial_time.steal + trial_time.others) * f64::from(trial_time.processors.max(1))
        };
        turns.map(lost).fold(0.0, f64::max).min(1.0)
    }
}

impl ExperimentRecord {
    /// Metric of a variant in each round.
    pub fn metric_in_each_round(&self, side: &str, figure: &str) -> Vec<f64> {
        self.rounds.iter().filter_map(|round| round.metric_of_variant(side, figure)).collect()
    }
}
