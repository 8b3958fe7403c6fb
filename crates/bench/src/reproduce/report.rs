//! Reports of the experiments as text, JSON and HTML. Style sheet, plots and number formats are
//! shared with `perf`.

pub mod html_report;
pub mod json_report;
#[cfg(test)]
mod sample_run;
pub mod text_report;

use crate::experiment::{
    Criterion, CriterionResult, Experiment, MedianAndRange, Operand, Threshold, Unit, Verdict,
};

use super::{BenchTask, ExperimentResult};
use crate::perf::report::number_format::{scale_to_prefix, show_byte_rate, show_ns_f64};

/// Formats a value with its unit.
pub fn format_value(unit: Unit, value: f64) -> String {
    match unit {
        Unit::PerSecond => {
            let (number, prefix) = scale_to_prefix(value);
            format!("{number} {prefix}").trim_end().to_owned()
        }
        Unit::Ns => show_ns_f64(value),
        Unit::BytesPerSecond => show_byte_rate(value),
        Unit::Times | Unit::Processors => format!("{value:.2}"),
    }
}

/// Formats a median with minimum and maximum.
pub fn format_median_and_range(unit: Unit, spread: &MedianAndRange) -> String {
    let MedianAndRange { median, least, most, .. } = *spread;
    format!(
        "{} ({}–{})",
        format_value(unit, median),
        format_value(unit, least),
        format_value(unit, most)
    )
}

/// Unit of the values of a criterion.
fn unit_of_criterion(experiment: &Experiment<BenchTask>, question: &Criterion) -> Unit {
    match question.compared {
        Operand::Ratio { .. } => Unit::Times,
        Operand::Alone { figure, .. } => {
            let mut figures = experiment.figures.iter();
            figures.find(|known| known.key == figure).map_or(Unit::Times, |known| known.unit)
        }
    }
}

/// Formats the threshold of a criterion.
fn format_threshold(unit: Unit, bound: Threshold) -> String {
    let times = |value: f64| match unit {
        Unit::Times => format!("{} times", format_value(unit, value)),
        _ => format_value(unit, value),
    };
    match bound {
        Threshold::AtLeast(least) => format!("at least {}", times(least)),
        Threshold::AtMost(most) => format!("at most {}", times(most)),
        Threshold::Between(least, most) => {
            format!("{} to {}", format_value(unit, least), times(most))
        }
    }
}

/// Formats the result of a criterion: a number, or why there is none.
fn format_criterion_result(unit: Unit, finding: &CriterionResult) -> String {
    let times = if unit == Unit::Times { " times" } else { "" };
    match (&finding.values, finding.verdict) {
        (Some(values), Verdict::Confirmed | Verdict::Refuted) => {
            let MedianAndRange { median, least, most, .. } = *values;
            let range = format!("({}–{})", format_value(unit, least), format_value(unit, most));
            format!(
                "{}{times} {range}{}",
                format_value(unit, median),
                format_disturbed_rounds(finding)
            )
        }
        _ => finding.reason.clone(),
    }
}

/// Formats the number of disturbed rounds, if any.
fn format_disturbed_rounds(finding: &CriterionResult) -> String {
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
pub struct CriterionRow {
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
    pub fn criterion_rows(&self) -> Vec<CriterionRow> {
        let pairs = self.experiment.questions.iter().zip(&self.findings);
        let row = |(question, finding): (&Criterion, &CriterionResult)| {
            let unit = unit_of_criterion(&self.experiment, question);
            CriterionRow {
                question: question.question,
                verdict: finding.verdict,
                criterion: format_threshold(unit, question.bound),
                found: format_criterion_result(unit, finding),
            }
        };
        pairs.map(row).collect()
    }

    /// Source numbers: `1, 2`.
    pub fn source_numbers(&self) -> String {
        let seeds: Vec<String> = self.experiment.seeds.iter().map(u8::to_string).collect();
        seeds.join(", ")
    }
}

/// Verdicts in the order of the summary.
pub const VERDICTS: [Verdict; 4] =
    [Verdict::Confirmed, Verdict::Refuted, Verdict::Inconclusive, Verdict::NotMeasured];

/// Number of claims by verdict: `12 hold, 3 do not, …`.
pub fn verdict_counts_text(evidence: &super::ReproduceRun) -> String {
    let counts = VERDICTS.map(|verdict| evidence.claim_count_with_verdict(verdict));
    let [holds, fails, open, missing] = counts;
    format!(
        "{holds} of {} claims hold here, {fails} do not, {open} could not be decided, {missing} \
         cannot be shown here",
        evidence.experiment_results.len()
    )
}
