//! What a run has found out: as text, as JSON, and as one HTML page. Style sheet, plots and figures
//! are those of `perf`'s report.

pub(crate) mod html;
pub(crate) mod json;
#[cfg(test)]
mod sample;
pub(crate) mod text;

use evidence::{Bound, Compared, Experiment, Finding, Question, Spread, Unit, Verdict};

use super::{Chapter, Work};
use crate::perf::report::figures::{scaled, show_byte_rate, show_ns_f64};

/// A value in its unit.
pub(crate) fn show(unit: Unit, value: f64) -> String {
    match unit {
        Unit::PerSecond => {
            let (number, prefix) = scaled(value);
            format!("{number} {prefix}").trim_end().to_owned()
        }
        Unit::Ns => show_ns_f64(value),
        Unit::BytesPerSecond => show_byte_rate(value),
        Unit::Times | Unit::Processors => format!("{value:.2}"),
    }
}

/// A median with the smallest and the largest.
pub(crate) fn show_spread(unit: Unit, spread: &Spread) -> String {
    let Spread { median, least, most, .. } = *spread;
    format!("{} ({}–{})", show(unit, median), show(unit, least), show(unit, most))
}

/// What a question's values count in.
fn unit_of(experiment: &Experiment<Work>, question: &Question) -> Unit {
    match question.compared {
        Compared::Ratio { .. } => Unit::Times,
        Compared::Alone { figure, .. } => {
            let mut figures = experiment.figures.iter();
            figures.find(|known| known.key == figure).map_or(Unit::Times, |known| known.unit)
        }
    }
}

/// A criterion in words.
fn show_bound(unit: Unit, bound: Bound) -> String {
    let times = |value: f64| match unit {
        Unit::Times => format!("{} times", show(unit, value)),
        _ => show(unit, value),
    };
    match bound {
        Bound::AtLeast(least) => format!("at least {}", times(least)),
        Bound::AtMost(most) => format!("at most {}", times(most)),
        Bound::Between(least, most) => format!("{} to {}", show(unit, least), times(most)),
    }
}

/// What was found, as far as there is an answer: a number where there is one, else why not.
fn show_finding(unit: Unit, finding: &Finding) -> String {
    let times = if unit == Unit::Times { " times" } else { "" };
    match (&finding.values, finding.verdict) {
        (Some(values), Verdict::Holds | Verdict::DoesNotHold) => {
            let Spread { median, least, most, .. } = *values;
            let range = format!("({}–{})", show(unit, least), show(unit, most));
            format!("{}{times} {range}{}", show(unit, median), show_disturbance(finding))
        }
        _ => finding.reason.clone(),
    }
}

/// How many of the rounds were not ours alone, if any.
fn show_disturbance(finding: &Finding) -> String {
    let count = finding.values.map_or(0, |values| values.count);
    match finding.disturbed {
        0 => String::new(),
        disturbed => format!(
            "; {disturbed} of {count} rounds with up to {:.0} % of a processor lost to others",
            finding.lost * 100.0
        ),
    }
}

/// A question with its answer, as tables show it.
pub(crate) struct Row {
    pub(crate) asks: &'static str,
    pub(crate) verdict: Verdict,
    pub(crate) criterion: String,
    pub(crate) found: String,
}

impl Chapter {
    /// The questions with their answers, the claim itself first.
    pub(crate) fn rows(&self) -> Vec<Row> {
        let pairs = self.experiment.questions.iter().zip(&self.findings);
        let row = |(question, finding): (&Question, &Finding)| {
            let unit = unit_of(&self.experiment, question);
            Row {
                asks: question.asks,
                verdict: finding.verdict,
                criterion: show_bound(unit, question.bound),
                found: show_finding(unit, finding),
            }
        };
        pairs.map(row).collect()
    }

    /// `1, 2`.
    pub(crate) fn seeds(&self) -> String {
        let seeds: Vec<String> = self.experiment.seeds.iter().map(u8::to_string).collect();
        seeds.join(", ")
    }
}

/// The verdicts, in the order in which they are counted.
pub(crate) const VERDICTS: [Verdict; 4] =
    [Verdict::Holds, Verdict::DoesNotHold, Verdict::NotConclusive, Verdict::NotShown];

/// How many claims have which verdict: `12 hold, 3 do not, …`.
pub(crate) fn tally(evidence: &super::Evidence) -> String {
    let counts = VERDICTS.map(|verdict| evidence.count(verdict));
    let [holds, fails, open, missing] = counts;
    format!(
        "{holds} of {} claims hold here, {fails} do not, {open} could not be decided, {missing} \
         cannot be shown here",
        evidence.chapters.len()
    )
}
