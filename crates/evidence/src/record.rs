//! What was measured, as it is kept.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// All rounds of an experiment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The experiment's name.
    pub name: String,
    /// Round by round.
    pub rounds: Vec<Round>,
    /// Sides that could not be run here, and why.
    pub missing: BTreeMap<String, String>,
}

/// A turn of each side, by its label.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// What each turn has read.
    pub turns: BTreeMap<String, Reading>,
}

/// What one turn has read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Reading {
    /// Figures by their keys.
    pub figures: BTreeMap<String, f64>,
    /// The share of all processors' time, from 0 to 1, that the host gave to other guests.
    pub stolen: f64,
    /// The share of it that other programs of this machine used.
    pub others: f64,
    /// Of how many processors these are shares.
    pub processors: u32,
}

impl Round {
    /// A figure of a side.
    pub fn figure(&self, side: &str, figure: &str) -> Option<f64> {
        self.turns.get(side)?.figures.get(figure).copied()
    }

    /// The largest shares of time that were stolen, and that others used, while these sides ran.
    pub fn disturbance(&self, sides: impl Iterator<Item = &'static str>) -> (f64, f64) {
        let turns = sides.filter_map(|side| self.turns.get(side));
        turns.fold((0.0, 0.0), |(stolen, others): (f64, f64), turn| {
            (stolen.max(turn.stolen), others.max(turn.others))
        })
    }

    /// The largest part of its time that a thread can have lost while these sides ran: all that was
    /// taken of all processors, taken from this one.
    pub fn lost(&self, sides: impl Iterator<Item = &'static str>) -> f64 {
        let turns = sides.filter_map(|side| self.turns.get(side));
        let lost = |turn: &Reading| (turn.stolen + turn.others) * f64::from(turn.processors.max(1));
        turns.map(lost).fold(0.0, f64::max).min(1.0)
    }
}

impl Record {
    /// A figure of a side, round by round.
    pub fn values(&self, side: &str, figure: &str) -> Vec<f64> {
        self.rounds.iter().filter_map(|round| round.figure(side, figure)).collect()
    }
}
