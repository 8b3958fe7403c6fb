//! How long a run takes: rounds, turns, and the time that they may not exceed.

use base::Span;

use crate::{Experiment, Side};

/// How thorough a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Its name in reports.
    pub name: &'static str,
    /// Rounds of each experiment.
    pub rounds: u32,
    /// More rounds of an experiment at most, in place of such as were disturbed.
    pub spare: u32,
    /// How long a turn is measured.
    pub turn: Span,
    /// How long it runs before.
    pub warm_up: Span,
    /// How long the whole run may take.
    pub limit: Span,
    /// Whether sides and experiments that take their time are left out.
    pub is_quick: bool,
}

/// What a turn takes beside its warm-up and its measurement: devices are brought up and taken down.
pub const OVERHEAD: Span = Span::from_ms(140);

impl Pace {
    /// Within three minutes.
    pub const QUICK: Self = Self {
        name: "quick",
        rounds: 3,
        spare: 1,
        turn: Span::from_ms(200),
        warm_up: Span::from_ms(60),
        limit: Span::from_secs(180),
        is_quick: true,
    };

    /// Within half an hour.
    pub const FULL: Self = Self {
        name: "full",
        rounds: 5,
        spare: 2,
        turn: Span::from_ms(1000),
        warm_up: Span::from_ms(200),
        limit: Span::from_secs(1800),
        is_quick: false,
    };

    /// Whether a side takes part.
    pub fn takes<W>(&self, side: &Side<W>) -> bool {
        !(self.is_quick && side.is_for_full)
    }

    /// How long an experiment takes at most, its spare rounds among it.
    pub fn planned<W>(&self, experiment: &Experiment<W>) -> Span {
        let sides = experiment.sides.iter().filter(|side| self.takes(side));
        let round: u64 = sides.map(|side| u64::from(side.lengths) * self.length().ns).sum();
        Span { ns: round * u64::from(self.rounds + self.spare) }
    }

    /// A turn of the usual length, with all that belongs to it.
    pub const fn length(&self) -> Span {
        Span { ns: self.turn.ns + self.warm_up.ns + OVERHEAD.ns }
    }
}

#[cfg(test)]
mod tests {
    use super::{OVERHEAD, Pace};
    use crate::sample::experiment;

    #[test]
    fn what_is_planned_is_every_turn_of_every_round_and_the_spare_ones() {
        let mut experiment = experiment();
        let turn = Pace::QUICK.turn.ns + Pace::QUICK.warm_up.ns + OVERHEAD.ns;
        assert_eq!(Pace::QUICK.planned(&experiment).ns, turn * 2 * 4);
        experiment.sides[1].lengths = 3;
        assert_eq!(Pace::QUICK.planned(&experiment).ns, turn * 4 * 4);
        experiment.sides[1].is_for_full = true;
        assert_eq!(Pace::QUICK.planned(&experiment).ns, turn * 4);
        let turn = Pace::FULL.turn.ns + Pace::FULL.warm_up.ns + OVERHEAD.ns;
        assert_eq!(Pace::FULL.planned(&experiment).ns, turn * 4 * 7);
    }
}
