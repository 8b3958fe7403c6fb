//! Evaluation: from trial results to verdicts.
//!
//! Ratios are computed within a round, so that a drift of the machine between rounds affects both
//! variants. The verdict is clear if all values lie on one side of the threshold; with nine or more
//! values the extreme one at each end is ignored. Otherwise the result is inconclusive. With five
//! rounds and equal variants, all ratios lie on one side of 1 by chance in one of sixteen cases;
//! with nine, all but one at each end, in one of 25.
//!
//! If there are enough undisturbed rounds, only they count. In a disturbed round a thread lost at
//! most the CPU time that others used, so one variant or the other would have reached up to
//! `1 / (1 - lost)` times its value. This whole range has to lie on one side of the threshold. A tail
//! metric can be determined by a single wait, so it counts only in undisturbed rounds.

use serde::Serialize;

use crate::experiment::{Criterion, ExperimentRecord, Operand, Round};

/// Result of a criterion.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CriterionResult {
    /// Verdict.
    pub verdict: Verdict,
    /// Values behind the verdict. None if nothing was measured.
    pub values: Option<MedianAndRange>,
    /// Number of values from disturbed rounds.
    pub disturbed: usize,
    /// Largest fraction of its time that a thread can have lost in those rounds.
    pub lost: f64,
    /// Why there is no clear verdict. Empty if there is one.
    pub reason: String,
}

/// Value of a criterion in one round.
#[derive(Clone, Copy)]
struct RoundValue {
    value: f64,
    /// Fraction of its time that either variant may have lost. Zero in an undisturbed round.
    lost: f64,
}

/// Verdict on a claim or criterion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The claim is confirmed on this machine.
    Confirmed,
    /// The claim is refuted on this machine.
    Refuted,
    /// The noise exceeds the difference, or others used the machine.
    Inconclusive,
    /// Prerequisites are missing.
    NotMeasured,
}

/// Median and range of some values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MedianAndRange {
    /// Median; the lower one of the two middle values.
    pub median: f64,
    /// Minimum.
    pub least: f64,
    /// Maximum.
    pub most: f64,
    /// Number of values.
    pub count: usize,
}

/// Fraction of CPU time given to other guests above which a round counts as disturbed.
pub const STEAL_MAX: f64 = 0.02;
/// Fraction of CPU time used by other programs above which a round counts as disturbed.
pub const OTHERS_MAX: f64 = 0.10;
/// Fraction of its time that a thread may lose before a round is ignored.
pub const LOST_MAX: f64 = 0.5;
/// Minimum number of rounds for a verdict.
pub const COUNTED_LEAST: usize = 3;
/// Number of values from which the extreme one at each end is ignored.
pub const TRIMMED_FROM: usize = 9;

impl Verdict {
    /// Name in tables.
    pub const fn text(self) -> &'static str {
        match self {
            Self::Confirmed => "holds",
            Self::Refuted => "does not hold",
            Self::Inconclusive => "not conclusive",
            Self::NotMeasured => "not shown here",
        }
    }
}

/// Evaluates a criterion on a record.
pub fn evaluate_criterion(question: &Criterion, record: &ExperimentRecord) -> CriterionResult {
    if let Some(why) = question.compared.variants().find_map(|side| record.missing.get(side)) {
        return CriterionResult::without_value(Verdict::NotMeasured, why.clone());
    }
    let mut seen: Vec<RoundValue> =
        record.rounds.iter().filter_map(|round| RoundValue::from_round(round, question)).collect();
    // Undisturbed rounds alone, if there are enough.
    if seen.iter().filter(|seen| seen.is_undisturbed()).count() >= COUNTED_LEAST {
        seen.retain(|seen| seen.is_undisturbed());
    }
    if seen.len() < COUNTED_LEAST {
        return CriterionResult::without_value(
            Verdict::Inconclusive,
            too_few_rounds_reason(seen.len(), record, question),
        );
    }
    let values = sort_values(seen.iter().map(|seen| seen.value).collect());
    let lows = sort_values(seen.iter().map(|seen| seen.undisturbed_lower_bound()).collect());
    let highs = sort_values(seen.iter().map(|seen| seen.undisturbed_upper_bound()).collect());
    let dropped = usize::from(seen.len() >= TRIMMED_FROM);
    let kept = |values: &[f64]| (values[dropped], values[values.len() - 1 - dropped]);
    let disturbed = seen.iter().filter(|seen| !seen.is_undisturbed()).count();
    let lost = seen.iter().map(|seen| seen.lost).fold(0.0, f64::max);
    let bound = question.bound;
    // Range of the values that is possible without the disturbance.
    let (low, high) = (kept(&lows).0, kept(&highs).1);
    let (verdict, reason) = if bound.is_met_by(low) && bound.is_met_by(high) {
        (Verdict::Confirmed, String::new())
    } else if bound.excludes_range(low, high) {
        (Verdict::Refuted, String::new())
    } else {
        let (least, most) = kept(&values);
        let is_clear =
            bound.is_met_by(least) && bound.is_met_by(most) || bound.excludes_range(least, most);
        let count = values.len() - 2 * dropped;
        let reason = if is_clear {
            format!(
                "{disturbed} of {count} rounds may lie on either side of the criterion: others had \
                 up to {:.0} % of a processor",
                lost * 100.0
            )
        } else {
            format!("{count} rounds lie on both sides of the criterion")
        };
        (Verdict::Inconclusive, reason)
    };
    CriterionResult { verdict, values: median_and_range(&values), disturbed, lost, reason }
}

impl CriterionResult {
    /// Result without a value.
    pub const fn without_value(verdict: Verdict, reason: String) -> Self {
        Self { verdict, values: None, disturbed: 0, lost: 0.0, reason }
    }
}

impl RoundValue {
    /// Value of a criterion in a round, if the round counts.
    fn from_round(round: &Round, question: &Criterion) -> Option<Self> {
        let value = value_in_round(round, question.compared)?;
        if is_undisturbed(round, question.compared) {
            return Some(Self { value, lost: 0.0 });
        }
        let lost = round.lost_fraction(question.compared.variants());
        (!question.is_tail && lost <= LOST_MAX).then_some(Self { value, lost })
    }

    /// Whether no part of the round was lost to another load.
    fn is_undisturbed(&self) -> bool {
        self.lost <= 0.0
    }

    /// Lower bound of the value without the disturbance.
    fn undisturbed_lower_bound(self) -> f64 {
        self.value * (1.0 - self.lost)
    }

    /// Upper bound of the value without the disturbance.
    fn undisturbed_upper_bound(self) -> f64 {
        self.value / (1.0 - self.lost)
    }
}

/// Median and range of some values. None without values.
pub fn median_and_range(values: &[f64]) -> Option<MedianAndRange> {
    let values = sort_values(values.to_vec());
    let (least, most) = (*values.first()?, *values.last()?);
    Some(MedianAndRange {
        median: values[(values.len() - 1) / 2],
        least,
        most,
        count: values.len(),
    })
}

/// Whether a round was undisturbed during the trials of the operand.
pub(crate) fn is_undisturbed(round: &Round, compared: Operand) -> bool {
    let (steal, others) = round.disturbance(compared.variants());
    steal <= STEAL_MAX && others <= OTHERS_MAX
}

fn value_in_round(round: &Round, compared: Operand) -> Option<f64> {
    let value = match compared {
        Operand::Alone { side, figure } => round.metric_of_variant(side, figure)?,
        Operand::Ratio { of, to, figure } => {
            let under = round.metric_of_variant(to, figure).filter(|under| *under > 0.0)?;
            round.metric_of_variant(of, figure)? / under
        }
    };
    value.is_finite().then_some(value)
}

fn too_few_rounds_reason(
    counted: usize,
    record: &ExperimentRecord,
    question: &Criterion,
) -> String {
    let worst = record.rounds.iter().map(|round| round.disturbance(question.compared.variants()));
    let (steal, others) = worst.fold((0.0, 0.0), |(steal, others): (f64, f64), found| {
        (steal.max(found.0), others.max(found.1))
    });
    let all = record.rounds.len();
    let mut reason = format!("{counted} of {all} rounds count, expected {COUNTED_LEAST}");
    if others > OTHERS_MAX {
        reason += &format!("; other programs used up to {:.0} % of the machine", others * 100.0);
    }
    if steal > STEAL_MAX {
        reason += &format!("; other virtual machines used up to {:.0} % of it", steal * 100.0);
    }
    reason
}

fn sort_values(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_unstable_by(f64::total_cmp);
    values
}

#[cfg(test)]
mod tests {
    use super::{Verdict, evaluate_criterion, median_and_range};
    use crate::experiment::test_experiments::{is_close, record_of_fast_and_slow};
    use crate::experiment::{Criterion, ExperimentRecord, Operand, Threshold};

    fn test_criterion(bound: Threshold) -> Criterion {
        let compared = Operand::Ratio { of: "fast", to: "slow", figure: "iops" };
        Criterion { question: "worth, times", compared, bound, is_tail: false }
    }

    #[test]
    fn values_on_one_side_in_every_round_decide_the_verdict() {
        let record = record_of_fast_and_slow(&[(20.0, 10.0), (22.0, 10.0), (36.0, 20.0)]);
        let verdict = |bound| evaluate_criterion(&test_criterion(bound), &record).verdict;
        assert_eq!(verdict(Threshold::AtLeast(1.8)), Verdict::Confirmed);
        assert_eq!(verdict(Threshold::AtLeast(2.3)), Verdict::Refuted);
        assert_eq!(verdict(Threshold::AtMost(2.2)), Verdict::Confirmed);
        assert_eq!(verdict(Threshold::Between(1.7, 2.3)), Verdict::Confirmed);
        assert_eq!(verdict(Threshold::Between(1.0, 1.5)), Verdict::Refuted);
        let open = evaluate_criterion(&test_criterion(Threshold::AtLeast(1.9)), &record);
        assert_eq!(open.verdict, Verdict::Inconclusive);
        assert_eq!(open.reason, "3 rounds lie on both sides of the criterion");
        assert!(is_close(open.values.unwrap().median, 2.0));
    }

    /// The machine is twice as fast in the second round, which does not affect the ratios within a
    /// round.
    #[test]
    fn drift_between_rounds_changes_no_ratio() {
        let record = record_of_fast_and_slow(&[(11.0, 10.0), (22.0, 20.0), (5.5, 5.0)]);
        let found = evaluate_criterion(&test_criterion(Threshold::AtLeast(1.05)), &record);
        assert_eq!(found.verdict, Verdict::Confirmed);
        assert!(is_close(found.values.unwrap().most, 1.1));
    }

    #[test]
    fn from_nine_rounds_on_one_outlier_at_each_end_is_ignored() {
        let mut rounds = vec![(20.0, 10.0); 7];
        rounds.extend([(9.0, 10.0), (90.0, 10.0)]);
        assert_eq!(
            evaluate_criterion(
                &test_criterion(Threshold::AtLeast(1.5)),
                &record_of_fast_and_slow(&rounds)
            )
            .verdict,
            Verdict::Confirmed
        );
        rounds[0] = (9.0, 10.0);
        let two = evaluate_criterion(
            &test_criterion(Threshold::AtLeast(1.5)),
            &record_of_fast_and_slow(&rounds),
        );
        assert_eq!(two.verdict, Verdict::Inconclusive);
        let eight = evaluate_criterion(
            &test_criterion(Threshold::AtLeast(1.5)),
            &record_of_fast_and_slow(&rounds[1..]),
        );
        assert_eq!(eight.verdict, Verdict::Inconclusive, "none is left out of eight");
    }

    #[test]
    fn disturbed_round_counts_unless_the_disturbance_could_change_the_verdict() {
        let mut record = record_of_fast_and_slow(&[(20.0, 10.0); 3]);
        let quiet = evaluate_criterion(&test_criterion(Threshold::AtLeast(1.9)), &record);
        assert_eq!((quiet.verdict, quiet.disturbed), (Verdict::Confirmed, 0));
        // 5 % of two CPUs is 10 % of one.
        record.rounds[1].trials.get_mut("fast").unwrap().steal = 0.05;
        let verdict = |bound| evaluate_criterion(&test_criterion(bound), &record);
        let found = verdict(Threshold::AtLeast(1.79));
        assert_eq!((found.verdict, found.disturbed), (Verdict::Confirmed, 1));
        assert!(is_close(found.lost, 0.1) && is_close(found.values.unwrap().least, 2.0));
        assert_eq!(verdict(Threshold::AtLeast(2.23)).verdict, Verdict::Refuted);
        assert_eq!(verdict(Threshold::AtMost(2.23)).verdict, Verdict::Confirmed);
        for bound in [Threshold::AtLeast(1.81), Threshold::AtMost(2.2), Threshold::AtLeast(2.2)] {
            let open = verdict(bound);
            assert_eq!(open.verdict, Verdict::Inconclusive, "{bound:?}");
            assert_eq!(
                open.reason,
                "1 of 3 rounds may lie on either side of the criterion: others had up to 10 % of a \
                 processor"
            );
        }
        record.rounds.push(record.rounds[0].clone());
        let found = evaluate_criterion(&test_criterion(Threshold::AtLeast(1.9)), &record);
        assert_eq!(
            (found.verdict, found.disturbed),
            (Verdict::Confirmed, 0),
            "three that are ours"
        );
    }

    #[test]
    fn disturbed_rounds_do_not_count_for_tail_latency() {
        let mut record = record_of_fast_and_slow(&[(20.0, 10.0); 5]);
        let tail = Criterion { is_tail: true, ..test_criterion(Threshold::AtLeast(1.5)) };
        for round in [0, 1] {
            record.rounds[round].trials.get_mut("slow").unwrap().steal = 0.03;
        }
        assert_eq!(evaluate_criterion(&tail, &record).values.unwrap().count, 3);
        record.rounds[2].trials.get_mut("slow").unwrap().steal = 0.03;
        assert_eq!(evaluate_criterion(&tail, &record).verdict, Verdict::Inconclusive);
        assert_eq!(
            evaluate_criterion(&test_criterion(Threshold::AtLeast(1.5)), &record).verdict,
            Verdict::Confirmed
        );
    }

    #[test]
    fn mostly_disturbed_rounds_do_not_count_and_too_few_are_inconclusive() {
        let mut record = record_of_fast_and_slow(&[(20.0, 10.0); 4]);
        record.rounds[0].trials.get_mut("slow").unwrap().others = 0.4;
        record.rounds[0].trials.get_mut("fast").unwrap().figures.insert("iops".into(), 1.0);
        let found = evaluate_criterion(&test_criterion(Threshold::AtLeast(1.5)), &record);
        assert_eq!((found.verdict, found.values.unwrap().count), (Verdict::Confirmed, 3));
        record.rounds[1].trials.get_mut("fast").unwrap().steal = 0.26;
        let found = evaluate_criterion(&test_criterion(Threshold::AtLeast(1.5)), &record);
        assert_eq!((found.verdict, found.values), (Verdict::Inconclusive, None));
        assert_eq!(
            found.reason,
            "2 of 4 rounds count, expected 3; other programs used up to 40 % of the machine; \
             other virtual machines used up to 26 % of it"
        );
    }

    #[test]
    fn noise_of_an_unrelated_variant_does_not_affect_a_criterion() {
        let mut record = record_of_fast_and_slow(&[(20.0, 10.0); 3]);
        for round in &mut record.rounds {
            let mut third = round.trials["slow"].clone();
            third.others = 0.9;
            round.trials.insert("third".into(), third);
        }
        assert_eq!(
            evaluate_criterion(&test_criterion(Threshold::AtLeast(1.5)), &record).verdict,
            Verdict::Confirmed
        );
    }

    #[test]
    fn missing_variant_is_reported_with_its_reason() {
        let mut record = record_of_fast_and_slow(&[(20.0, 10.0); 3]);
        record.missing.insert("fast".into(), "this processor has no movdir64b".into());
        let found = evaluate_criterion(&test_criterion(Threshold::AtLeast(1.5)), &record);
        assert_eq!(found.verdict, Verdict::NotMeasured);
        assert_eq!(found.reason, "this processor has no movdir64b");
    }

    #[test]
    fn zero_divided_by_zero_is_no_value() {
        let found = evaluate_criterion(
            &test_criterion(Threshold::AtLeast(1.5)),
            &record_of_fast_and_slow(&[(1.0, 0.0); 5]),
        );
        assert_eq!(found.verdict, Verdict::Inconclusive);
        let empty = evaluate_criterion(
            &test_criterion(Threshold::AtLeast(1.5)),
            &ExperimentRecord::default(),
        );
        assert_eq!(empty.reason, "0 of 0 rounds count, expected 3");
    }

    #[test]
    fn median_of_an_even_number_is_one_of_the_values() {
        let four = median_and_range(&[4.0, 1.0, 3.0, 2.0]).unwrap();
        assert!(
            is_close(four.median, 2.0) && is_close(four.least, 1.0) && is_close(four.most, 4.0)
        );
        assert!(is_close(median_and_range(&[3.0, 9.0, 1.0]).unwrap().median, 3.0));
        assert_eq!(median_and_range(&[]), None);
    }
}
