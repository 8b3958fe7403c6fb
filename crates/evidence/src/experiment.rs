//! What an experiment is: plain values.

/// A claim, and what is run to see whether it holds. `W` is what a side runs.
#[derive(Clone, Debug)]
pub struct Experiment<W> {
    /// One word, by which it is chosen.
    pub name: &'static str,
    /// What is claimed, in a sentence.
    pub claim: &'static str,
    /// The talks and articles that claim it, by number.
    pub seeds: &'static [u8],
    /// What those measured, on their machine.
    pub seen: &'static str,
    /// What is read off each turn and shown; the first is plotted.
    pub figures: &'static [Figure],
    /// What takes turns, the one that others are compared with first.
    pub sides: Vec<Side<W>>,
    /// What the claim comes down to; the first is the claim itself.
    pub questions: Vec<Question>,
    /// What this cannot show, on whatever machine or on most, and why.
    pub limits: &'static str,
}

/// One of the things that are compared.
#[derive(Clone, Debug)]
pub struct Side<W> {
    /// What it is called in tables; no other side of the experiment has this name.
    pub label: &'static str,
    /// What it runs.
    pub work: W,
    /// How many times the length of a turn it takes.
    pub lengths: u32,
    /// Whether it is left out of a quick run.
    pub is_for_full: bool,
}

/// Something that is read off a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Figure {
    /// Its key in a reading.
    pub key: &'static str,
    /// Its name in tables.
    pub title: &'static str,
    /// What it counts in.
    pub unit: Unit,
    /// Whether it is about the slowest few, so that one disturbance, however short, makes it.
    pub is_tail: bool,
}

/// What a figure counts in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// So many in a second.
    PerSecond,
    /// Nanoseconds.
    Ns,
    /// Bytes in a second.
    BytesPerSecond,
    /// A part of a whole, or so many times something.
    Times,
    /// Processors, as much as their time was used.
    Processors,
}

/// A question to the readings, with the bound that answers it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Question {
    /// What is looked at, so that a number can follow it: `batching is worth, times`.
    pub asks: &'static str,
    /// Of what.
    pub compared: Compared,
    /// Where it has to be.
    pub bound: Bound,
    /// Whether its figure is one of the [tail](Figure::is_tail).
    pub is_tail: bool,
}

/// What is held against a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compared {
    /// A figure of a side.
    Alone {
        /// The side's label.
        side: &'static str,
        /// The figure's key.
        figure: &'static str,
    },
    /// A figure of one side, divided by that of another in the same round.
    Ratio {
        /// The label of the one.
        of: &'static str,
        /// The label of the other.
        to: &'static str,
        /// The figure's key.
        figure: &'static str,
    },
}

/// Where a value has to be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// Here or above.
    AtLeast(f64),
    /// Here or below.
    AtMost(f64),
    /// From the one to the other.
    Between(f64, f64),
}

impl<W> Side<W> {
    /// A side whose turn has the usual length.
    pub const fn new(label: &'static str, work: W) -> Self {
        Self { label, work, lengths: 1, is_for_full: false }
    }

    /// The same, left out of a quick run.
    #[must_use]
    pub fn for_full(mut self) -> Self {
        self.is_for_full = true;
        self
    }

    /// The same, whose turn takes so many times the usual length.
    #[must_use]
    pub fn lasting(mut self, lengths: u32) -> Self {
        self.lengths = lengths;
        self
    }
}

impl Compared {
    /// The sides that it needs.
    pub fn sides(self) -> impl Iterator<Item = &'static str> {
        let sides = match self {
            Self::Alone { side, .. } => [Some(side), None],
            Self::Ratio { of, to, .. } => [Some(of), Some(to)],
        };
        sides.into_iter().flatten()
    }

    /// The figure that it needs.
    pub const fn figure(self) -> &'static str {
        match self {
            Self::Alone { figure, .. } | Self::Ratio { figure, .. } => figure,
        }
    }
}

impl Bound {
    /// Whether `value` is where it has to be.
    pub fn admits(self, value: f64) -> bool {
        match self {
            Self::AtLeast(least) => value >= least,
            Self::AtMost(most) => value <= most,
            Self::Between(least, most) => (least..=most).contains(&value),
        }
    }

    /// Whether neither end of a range is where it has to be, nor anything between them.
    pub fn misses(self, low: f64, high: f64) -> bool {
        match self {
            Self::AtLeast(least) => high < least,
            Self::AtMost(most) => low > most,
            Self::Between(least, most) => high < least || low > most,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Bound;

    #[test]
    fn a_range_misses_a_bound_only_as_a_whole() {
        assert!(Bound::AtLeast(2.0).admits(2.0) && !Bound::AtLeast(2.0).admits(1.9));
        assert!(Bound::AtLeast(2.0).misses(1.0, 1.9) && !Bound::AtLeast(2.0).misses(1.0, 2.0));
        assert!(Bound::AtMost(2.0).admits(2.0) && !Bound::AtMost(2.0).admits(2.1));
        assert!(Bound::AtMost(2.0).misses(2.1, 3.0) && !Bound::AtMost(2.0).misses(2.0, 3.0));
        let band = Bound::Between(0.9, 1.1);
        assert!(band.admits(0.9) && band.admits(1.1) && !band.admits(1.2));
        assert!(band.misses(1.2, 1.3) && band.misses(0.5, 0.8));
        assert!(!band.misses(0.5, 1.3), "what lies around a band may be inside it");
    }
}
