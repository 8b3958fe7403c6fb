//! Experiments as plain values.

/// A claim and the variants that test it. `W` is the work of a variant.
#[derive(Clone, Debug)]
pub struct Experiment<W> {
    /// Name by which it is selected.
    pub name: &'static str,
    /// The claim, in one sentence.
    pub claim: &'static str,
    /// Sources of the claim, by number.
    pub seeds: &'static [u8],
    /// Result reported by the sources, on their hardware.
    pub seen: &'static str,
    /// Metrics read from each trial. The first one is plotted.
    pub figures: &'static [Metric],
    /// Variants in the order of their trials, with the reference first.
    pub sides: Vec<Variant<W>>,
    /// Criteria of the claim. The first one decides the verdict.
    pub questions: Vec<Criterion>,
    /// What the experiment cannot show, and why.
    pub limits: &'static str,
}

/// A configuration that is compared with others.
#[derive(Clone, Debug)]
pub struct Variant<W> {
    /// Label, unique in the experiment.
    pub label: &'static str,
    /// Work to execute.
    pub work: W,
    /// Length of a trial, as a multiple of the normal length.
    pub lengths: u32,
    /// Whether it is omitted from quick runs.
    pub is_for_full: bool,
}

/// A value read from a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Key in the trial result.
    pub key: &'static str,
    /// Name in tables.
    pub title: &'static str,
    /// Unit.
    pub unit: Unit,
    /// Whether it describes the slowest few operations, which a single short disturbance can
    /// determine.
    pub is_tail: bool,
}

/// Unit of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Operations per second.
    PerSecond,
    /// Nanoseconds.
    Ns,
    /// Bytes per second.
    BytesPerSecond,
    /// Ratio.
    Times,
    /// CPUs: CPU time per elapsed time.
    Processors,
}

/// Comparison of an operand with a threshold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Criterion {
    /// What is compared, phrased so that a number can follow it: `batching is worth, times`.
    pub question: &'static str,
    /// Operand.
    pub compared: Operand,
    /// Threshold.
    pub bound: Threshold,
    /// Whether its metric is a [tail](Metric::is_tail) metric.
    pub is_tail: bool,
}

/// Value that is compared with a threshold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// Metric of one variant.
    Alone {
        /// Label of the variant.
        side: &'static str,
        /// Key of the metric.
        figure: &'static str,
    },
    /// Ratio of a metric of two variants in the same round.
    Ratio {
        /// Label of the variant in the numerator.
        of: &'static str,
        /// Label of the variant in the denominator.
        to: &'static str,
        /// Key of the metric.
        figure: &'static str,
    },
}

/// Accepted range of a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Threshold {
    /// This value or more.
    AtLeast(f64),
    /// This value or less.
    AtMost(f64),
    /// Between these values, inclusive.
    Between(f64, f64),
}

impl<W> Variant<W> {
    /// Creates a variant with trials of normal length.
    pub const fn new(label: &'static str, work: W) -> Self {
        Self { label, work, lengths: 1, is_for_full: false }
    }

    /// Omits the variant from quick runs.
    #[must_use]
    pub fn full_runs_only(mut self) -> Self {
        self.is_for_full = true;
        self
    }

    /// Sets the length of its trials, as a multiple of the normal length.
    #[must_use]
    pub fn with_trial_length(mut self, lengths: u32) -> Self {
        self.lengths = lengths;
        self
    }
}

impl Operand {
    /// Labels of the variants that it needs.
    pub fn variants(self) -> impl Iterator<Item = &'static str> {
        let sides = match self {
            Self::Alone { side, .. } => [Some(side), None],
            Self::Ratio { of, to, .. } => [Some(of), Some(to)],
        };
        sides.into_iter().flatten()
    }

    /// Key of the metric that it needs.
    pub const fn metric_key(self) -> &'static str {
        match self {
            Self::Alone { figure, .. } | Self::Ratio { figure, .. } => figure,
        }
    }
}

impl Threshold {
    /// Whether `value` is in the accepted range.
    pub fn is_met_by(self, value: f64) -> bool {
        match self {
            Self::AtLeast(least) => value >= least,
            Self::AtMost(most) => value <= most,
            Self::Between(least, most) => (least..=most).contains(&value),
        }
    }

    /// Whether the range from `low` to `high` is completely outside the accepted range.
    pub fn excludes_range(self, low: f64, high: f64) -> bool {
        match self {
            Self::AtLeast(least) => high < least,
            Self::AtMost(most) => low > most,
            Self::Between(least, most) => high < least || low > most,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Threshold;

    #[test]
    fn range_misses_a_threshold_only_if_completely_outside() {
        assert!(Threshold::AtLeast(2.0).is_met_by(2.0) && !Threshold::AtLeast(2.0).is_met_by(1.9));
        assert!(
            Threshold::AtLeast(2.0).excludes_range(1.0, 1.9)
                && !Threshold::AtLeast(2.0).excludes_range(1.0, 2.0)
        );
        assert!(Threshold::AtMost(2.0).is_met_by(2.0) && !Threshold::AtMost(2.0).is_met_by(2.1));
        assert!(
            Threshold::AtMost(2.0).excludes_range(2.1, 3.0)
                && !Threshold::AtMost(2.0).excludes_range(2.0, 3.0)
        );
        let band = Threshold::Between(0.9, 1.1);
        assert!(band.is_met_by(0.9) && band.is_met_by(1.1) && !band.is_met_by(1.2));
        assert!(band.excludes_range(1.2, 1.3) && band.excludes_range(0.5, 0.8));
        assert!(!band.excludes_range(0.5, 1.3), "what lies around a band may be inside it");
    }
}
