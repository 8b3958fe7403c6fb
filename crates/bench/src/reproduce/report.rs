//! Reports of the experiments as text, JSON and HTML. Style sheet, plots and number formats are
//! shared with `perf`.

pub mod html;
pub mod json;
#[cfg(test)]
mod sample;
pub mod text;

use crate::experiment::{
    Criterion, CriterionResult, Experiment, Operand, Summary, Threshold, Unit, Verdict,
};

use super::{BenchTask, ExperimentResult};
use crate::perf::report::format::{scaled, show_byte_rate, show_ns_f64};

/// Formats a value with its unit.
pub fn show(unit: Unit, value: f64) -> String {
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

/// Formats a median with minimum and maximum.
pub fn show_spread(unit: Unit, spread: &Summary) -> String {
    let Summary { median, least, most, .. } = *spread;
    format!("{} ({}–{})", show(unit, median), show(unit, least), show(unit, most))
}

/// Unit of the values of a criterion.
fn unit_of(experiment: &Experiment<BenchTask>, question: &Criterion) -> Unit {
    match question.compared {
        Operand::Ratio { .. } => Unit::Times,
        Operand::Alone { figure, .. } => {
            let mut figures = experiment.figures.iter();
            figures.find(|known| known.key == figure).map_or(Unit::Times, |known| known.unit)
        }
    }
}

/// Formats the threshold of a criterion.
fn show_bound(unit: Unit, bound: Threshold) -> String {
    let times = |value: f64| match unit {
        Unit::Times => format!("{} times", show(unit, value)),
        _ => show(unit, value),
    };
    match bound {
        Threshold::AtLeast(least) => format!("at least {}", times(least)),
        Threshold::AtMost(most) => format!("at most {}", times(most)),
        Threshold::Between(least, most) => format!("{} to {}", show(unit, least), times(most)),
    }
}

/// Formats the result of a criterion: a number, or why there is none.
fn show_finding(unit: Unit, finding: &CriterionResult) -> String {
    let times = if unit == Unit::Times { " times" } else { "" };
    match (&finding.values, finding.verdict) {
        (Some(values), Verdict::Confirmed | Verdict::Refuted) => {
            let Summary { median, least, most, .. } = *values;
            let range = format!("({}–{})", show(unit, least), show(unit, most));
            format!("{}{times} {range}{}", show(unit, median), show_disturbance(finding))
        }
        _ => finding.reason.clone(),
    }
}

/// Formats the number of disturbed rounds, if any.
fn show_disturbance(finding: &CriterionResult) -> String {
    let count = finding.values.map_or(0, |values| values.count);
    match finding.disturbed {
        0 => String::new(),
        disturbed => format!(
            "; {disturbed} of {count} rounds with up to {:.0} % of a processor lost to others",
            finding.lost * 100.0
        ),
    }
}

/// Table row: a criterion with its result.
pub struct ClaimRow {
    /// Question of the criterion.
    pub question: &'static str,
    /// Verdict on it.
    pub verdict: Verdict,
    /// The criterion, with its threshold.
    pub criterion: String,
    /// The value found.
    pub found: String,
}

impl ExperimentResult {
    /// Table rows of all criteria, beginning with the claim.
    pub fn rows(&self) -> Vec<ClaimRow> {
        let pairs = self.experiment.questions.iter().zip(&self.findings);
        let row = |(question, finding): (&Criterion, &CriterionResult)| {
            let unit = unit_of(&self.experiment, question);
            ClaimRow {
                question: question.question,
                verdict: finding.verdict,
                criterion: show_bound(unit, question.bound),
                found: show_finding(unit, finding),
            }
        };
        pairs.map(row).collect()
    }

    /// Source numbers: `1, 2`.
    pub fn seeds(&self) -> String {
        let seeds: Vec<String> = self.experiment.seeds.iter().map(u8::to_string).collect();
        seeds.join(", ")
    }
}

/// Verdicts in the order of the summary.
pub const VERDICTS: [Verdict; 4] =
    [Verdict::Confirmed, Verdict::Refuted, Verdict::Inconclusive, Verdict::NotMeasured];

/// Number of claims by verdict: `12 hold, 3 do not, …`.
pub fn tally(evidence: &super::ReproduceRun) -> String {
    let counts = VERDICTS.map(|verdict| evidence.count(verdict));
    let [holds, fails, open, missing] = counts;
    format!(
        "{holds} of {} claims hold here, {fails} do not, {open} could not be decided, {missing} \
         cannot be shown here",
        evidence.experiment_results.len()
    )
}
