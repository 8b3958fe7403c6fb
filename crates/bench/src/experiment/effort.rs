//! Effort of a run: number of rounds, trial length, and time limit.

use tenmil_base::Span;

use crate::experiment::{Experiment, Variant};

/// Effort of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effort {
    /// Name in reports.
    pub name: &'static str,
    /// Rounds of each experiment.
    pub rounds: u32,
    /// Maximum number of additional rounds that replace disturbed ones.
    pub spare: u32,
    /// Duration of the measurement in a trial.
    pub trial_time: Span,
    /// Duration of the warm-up of a trial.
    pub warm_up: Span,
    /// Time limit of the whole run.
    pub limit: Span,
    /// Whether long variants and experiments are omitted.
    pub is_quick: bool,
}

/// Overhead of a trial besides warm-up and measurement: starting and stopping devices.
pub const OVERHEAD: Span = Span::from_ms(140);

impl Effort {
    /// At most three minutes.
    pub const QUICK: Self = Self {
        name: "quick",
        rounds: 3,
        spare: 1,
        trial_time: Span::from_ms(200),
        warm_up: Span::from_ms(60),
        limit: Span::from_secs(180),
        is_quick: true,
    };

    /// At most half an hour.
    pub const FULL: Self = Self {
        name: "full",
        rounds: 5,
        spare: 2,
        trial_time: Span::from_ms(1000),
        warm_up: Span::from_ms(200),
        limit: Span::from_secs(1800),
        is_quick: false,
    };

    /// Whether a variant is included.
    pub fn includes_variant<W>(&self, side: &Variant<W>) -> bool {
        !(self.is_quick && side.is_for_full)
    }

    /// Maximum duration of an experiment, including the additional rounds.
    pub fn duration_max<W>(&self, experiment: &Experiment<W>) -> Span {
        let sides = experiment.sides.iter().filter(|side| self.includes_variant(side));
        let round: u64 =
            sides.map(|side| u64::from(side.lengths) * self.normal_trial_duration().ns).sum();
        Span { ns: round * u64::from(self.rounds + self.spare) }
    }

    /// Duration of a trial of normal length, including warm-up and overhead.
    pub const fn normal_trial_duration(&self) -> Span {
        Span { ns: self.trial_time.ns + self.warm_up.ns + OVERHEAD.ns }
    }
}

#[cfg(test)]
mod tests {
    use super::{Effort, OVERHEAD};
    use crate::experiment::test_experiments::two_variant_experiment;

    #[test]
    fn planned_duration_covers_every_trial_of_every_round_and_the_extra_ones() {
        let mut experiment = two_variant_experiment();
        let trial_time = Effort::QUICK.trial_time.ns + Effort::QUICK.warm_up.ns + OVERHEAD.ns;
        assert_eq!(Effort::QUICK.duration_max(&experiment).ns, trial_time * 2 * 4);
        experiment.sides[1].lengths = 3;
        assert_eq!(Effort::QUICK.duration_max(&experiment).ns, trial_time * 4 * 4);
        experiment.sides[1].is_for_full = true;
        assert_eq!(Effort::QUICK.duration_max(&experiment).ns, trial_time * 4);
        let trial_time = Effort::FULL.trial_time.ns + Effort::FULL.warm_up.ns + OVERHEAD.ns;
        assert_eq!(Effort::FULL.duration_max(&experiment).ns, trial_time * 4 * 7);
    }
}
