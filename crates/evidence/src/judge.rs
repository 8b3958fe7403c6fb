//! From readings to a verdict.
//!
//! A ratio is taken within a round, so that a machine that changes its mood between two rounds changes
//! both sides of it. If all values, or all but one at each end where there are nine or more, lie on one
//! side of the bound, that is the answer; otherwise there is none. With five rounds and sides that do
//! not differ, all ratios lie on one side of 1 by chance once in sixteen; with nine, all but one at
//! each end, once in 25.
//!
//! Where there are enough rounds in which the machine was ours, only they count. A round in which
//! others had part of it says less: whoever was kept waiting lost at most
//! what they had, so one side, or the other, would have done up to `1 / (1 - lost)` as much. That
//! range has to lie on one side of the bound as a whole. A figure of the tail may be made by a single
//! wait, and counts only from rounds in which the machine was ours.

use serde::Serialize;

use crate::{Compared, Question, Record, Round};

/// Where the answers of a question lie.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// The answer.
    pub verdict: Verdict,
    /// The values that it is made from; none if nothing was shown.
    pub values: Option<Spread>,
    /// How many of them come from rounds in which others had part of the machine.
    pub disturbed: usize,
    /// The largest part of its time that a thread can have lost by that.
    pub lost: f64,
    /// Why there is no answer; empty if there is.
    pub reason: String,
}

/// What a round says.
#[derive(Clone, Copy)]
struct Seen {
    value: f64,
    /// The part of its time that either side may have lost; zero if the machine was ours.
    lost: f64,
}

/// An answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// It is as claimed, here.
    Holds,
    /// It is not, here.
    DoesNotHold,
    /// Noise is larger than the difference, or others used the machine.
    NotConclusive,
    /// What it takes is not there.
    NotShown,
}

/// A median, and what lies around it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The value in the middle, the lower one of two.
    pub median: f64,
    /// The smallest.
    pub least: f64,
    /// The largest.
    pub most: f64,
    /// How many there are.
    pub count: usize,
}

/// More of all processors' time that the host gives to other guests disturbs a round.
pub const STOLEN_MAX: f64 = 0.02;
/// And more of it that other programs use.
pub const OTHERS_MAX: f64 = 0.10;
/// A round in which a thread may have lost more of its time says nothing.
pub const LOST_MAX: f64 = 0.5;
/// Fewer rounds that count have no answer.
pub const COUNTED_LEAST: usize = 3;
/// From so many values on, one at each end is left out.
pub const TRIMMED_FROM: usize = 9;

impl Verdict {
    /// The words of tables.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Holds => "holds",
            Self::DoesNotHold => "does not hold",
            Self::NotConclusive => "not conclusive",
            Self::NotShown => "not shown here",
        }
    }
}

/// What `record` answers to `question`.
pub fn judge(question: &Question, record: &Record) -> Finding {
    if let Some(why) = question.compared.sides().find_map(|side| record.missing.get(side)) {
        return Finding::none(Verdict::NotShown, why.clone());
    }
    let mut seen: Vec<Seen> =
        record.rounds.iter().filter_map(|round| Seen::of(round, question)).collect();
    if seen.iter().filter(|seen| seen.is_ours()).count() >= COUNTED_LEAST {
        seen.retain(|seen| seen.is_ours());
    }
    if seen.len() < COUNTED_LEAST {
        return Finding::none(Verdict::NotConclusive, too_few(seen.len(), record, question));
    }
    let values = sorted(seen.iter().map(|seen| seen.value).collect());
    let lows = sorted(seen.iter().map(|seen| seen.low()).collect());
    let highs = sorted(seen.iter().map(|seen| seen.high()).collect());
    let dropped = usize::from(seen.len() >= TRIMMED_FROM);
    let kept = |values: &[f64]| (values[dropped], values[values.len() - 1 - dropped]);
    let disturbed = seen.iter().filter(|seen| !seen.is_ours()).count();
    let lost = seen.iter().map(|seen| seen.lost).fold(0.0, f64::max);
    let bound = question.bound;
    let (low, high) = (kept(&lows).0, kept(&highs).1);
    let (verdict, reason) = if bound.admits(low) && bound.admits(high) {
        (Verdict::Holds, String::new())
    } else if bound.misses(low, high) {
        (Verdict::DoesNotHold, String::new())
    } else {
        let (least, most) = kept(&values);
        let is_clear = bound.admits(least) && bound.admits(most) || bound.misses(least, most);
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
        (Verdict::NotConclusive, reason)
    };
    Finding { verdict, values: spread(&values), disturbed, lost, reason }
}

impl Finding {
    /// No answer.
    pub const fn none(verdict: Verdict, reason: String) -> Self {
        Self { verdict, values: None, disturbed: 0, lost: 0.0, reason }
    }
}

impl Seen {
    /// What a round says to a question, if it counts.
    fn of(round: &Round, question: &Question) -> Option<Self> {
        let value = value(round, question.compared)?;
        if is_quiet(round, question.compared) {
            return Some(Self { value, lost: 0.0 });
        }
        let lost = round.lost(question.compared.sides());
        (!question.is_tail && lost <= LOST_MAX).then_some(Self { value, lost })
    }

    fn is_ours(&self) -> bool {
        self.lost <= 0.0
    }

    /// The least that it would have been on a machine of our own.
    fn low(self) -> f64 {
        self.value * (1.0 - self.lost)
    }

    /// The most.
    fn high(self) -> f64 {
        self.value / (1.0 - self.lost)
    }
}

/// The median of some values, and the ends; none if there are none.
pub fn spread(values: &[f64]) -> Option<Spread> {
    let values = sorted(values.to_vec());
    let (least, most) = (*values.first()?, *values.last()?);
    Some(Spread { median: values[(values.len() - 1) / 2], least, most, count: values.len() })
}

/// Whether a round was ours while the sides ran that are compared.
pub(crate) fn is_quiet(round: &Round, compared: Compared) -> bool {
    let (stolen, others) = round.disturbance(compared.sides());
    stolen <= STOLEN_MAX && others <= OTHERS_MAX
}

fn value(round: &Round, compared: Compared) -> Option<f64> {
    let value = match compared {
        Compared::Alone { side, figure } => round.figure(side, figure)?,
        Compared::Ratio { of, to, figure } => {
            let under = round.figure(to, figure).filter(|under| *under > 0.0)?;
            round.figure(of, figure)? / under
        }
    };
    value.is_finite().then_some(value)
}

fn too_few(counted: usize, record: &Record, question: &Question) -> String {
    let worst = record.rounds.iter().map(|round| round.disturbance(question.compared.sides()));
    let (stolen, others) = worst.fold((0.0, 0.0), |(stolen, others): (f64, f64), found| {
        (stolen.max(found.0), others.max(found.1))
    });
    let all = record.rounds.len();
    let mut reason = format!("{counted} of {all} rounds count, expected {COUNTED_LEAST}");
    if others > OTHERS_MAX {
        reason += &format!("; other programs used up to {:.0} % of the machine", others * 100.0);
    }
    if stolen > STOLEN_MAX {
        reason += &format!("; other guests took up to {:.0} % of it", stolen * 100.0);
    }
    reason
}

fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}

#[cfg(test)]
mod tests {
    use super::{Verdict, judge, spread};
    use crate::sample::{record, times};
    use crate::{Bound, Compared, Question, Record};

    fn asked(bound: Bound) -> Question {
        let compared = Compared::Ratio { of: "fast", to: "slow", figure: "iops" };
        Question { asks: "worth, times", compared, bound, is_tail: false }
    }

    #[test]
    fn what_lies_on_one_side_of_the_bound_in_every_round_is_the_answer() {
        let record = record(&[(20.0, 10.0), (22.0, 10.0), (36.0, 20.0)]);
        let verdict = |bound| judge(&asked(bound), &record).verdict;
        assert_eq!(verdict(Bound::AtLeast(1.8)), Verdict::Holds);
        assert_eq!(verdict(Bound::AtLeast(2.3)), Verdict::DoesNotHold);
        assert_eq!(verdict(Bound::AtMost(2.2)), Verdict::Holds);
        assert_eq!(verdict(Bound::Between(1.7, 2.3)), Verdict::Holds);
        assert_eq!(verdict(Bound::Between(1.0, 1.5)), Verdict::DoesNotHold);
        let open = judge(&asked(Bound::AtLeast(1.9)), &record);
        assert_eq!(open.verdict, Verdict::NotConclusive);
        assert_eq!(open.reason, "3 rounds lie on both sides of the criterion");
        assert!(times(open.values.unwrap().median, 2.0));
    }

    /// The machine is twice as fast in the second round: the ratio within a round does not notice.
    #[test]
    fn a_change_of_mood_between_rounds_changes_no_ratio() {
        let record = record(&[(11.0, 10.0), (22.0, 20.0), (5.5, 5.0)]);
        let found = judge(&asked(Bound::AtLeast(1.05)), &record);
        assert_eq!(found.verdict, Verdict::Holds);
        assert!(times(found.values.unwrap().most, 1.1));
    }

    #[test]
    fn from_nine_rounds_on_one_at_each_end_may_differ() {
        let mut rounds = vec![(20.0, 10.0); 7];
        rounds.extend([(9.0, 10.0), (90.0, 10.0)]);
        assert_eq!(judge(&asked(Bound::AtLeast(1.5)), &record(&rounds)).verdict, Verdict::Holds);
        rounds[0] = (9.0, 10.0);
        let two = judge(&asked(Bound::AtLeast(1.5)), &record(&rounds));
        assert_eq!(two.verdict, Verdict::NotConclusive);
        let eight = judge(&asked(Bound::AtLeast(1.5)), &record(&rounds[1..]));
        assert_eq!(eight.verdict, Verdict::NotConclusive, "none is left out of eight");
    }

    #[test]
    fn a_disturbed_round_counts_as_far_as_the_disturbance_leaves_no_doubt() {
        let mut record = record(&[(20.0, 10.0); 3]);
        let quiet = judge(&asked(Bound::AtLeast(1.9)), &record);
        assert_eq!((quiet.verdict, quiet.disturbed), (Verdict::Holds, 0));
        // A twentieth of two processors is a tenth of one.
        record.rounds[1].turns.get_mut("fast").unwrap().stolen = 0.05;
        let verdict = |bound| judge(&asked(bound), &record);
        let found = verdict(Bound::AtLeast(1.79));
        assert_eq!((found.verdict, found.disturbed), (Verdict::Holds, 1));
        assert!(times(found.lost, 0.1) && times(found.values.unwrap().least, 2.0));
        assert_eq!(verdict(Bound::AtLeast(2.23)).verdict, Verdict::DoesNotHold);
        assert_eq!(verdict(Bound::AtMost(2.23)).verdict, Verdict::Holds);
        for bound in [Bound::AtLeast(1.81), Bound::AtMost(2.2), Bound::AtLeast(2.2)] {
            let open = verdict(bound);
            assert_eq!(open.verdict, Verdict::NotConclusive, "{bound:?}");
            assert_eq!(
                open.reason,
                "1 of 3 rounds may lie on either side of the criterion: others had up to 10 % of a \
                 processor"
            );
        }
        record.rounds.push(record.rounds[0].clone());
        let found = judge(&asked(Bound::AtLeast(1.9)), &record);
        assert_eq!((found.verdict, found.disturbed), (Verdict::Holds, 0), "three that are ours");
    }

    #[test]
    fn disturbed_rounds_say_nothing_of_the_tail() {
        let mut record = record(&[(20.0, 10.0); 5]);
        let tail = Question { is_tail: true, ..asked(Bound::AtLeast(1.5)) };
        for round in [0, 1] {
            record.rounds[round].turns.get_mut("slow").unwrap().stolen = 0.03;
        }
        assert_eq!(judge(&tail, &record).values.unwrap().count, 3);
        record.rounds[2].turns.get_mut("slow").unwrap().stolen = 0.03;
        assert_eq!(judge(&tail, &record).verdict, Verdict::NotConclusive);
        assert_eq!(judge(&asked(Bound::AtLeast(1.5)), &record).verdict, Verdict::Holds);
    }

    #[test]
    fn rounds_that_were_mostly_others_do_not_count_and_too_few_have_no_answer() {
        let mut record = record(&[(20.0, 10.0); 4]);
        record.rounds[0].turns.get_mut("slow").unwrap().others = 0.4;
        record.rounds[0].turns.get_mut("fast").unwrap().figures.insert("iops".into(), 1.0);
        let found = judge(&asked(Bound::AtLeast(1.5)), &record);
        assert_eq!((found.verdict, found.values.unwrap().count), (Verdict::Holds, 3));
        record.rounds[1].turns.get_mut("fast").unwrap().stolen = 0.26;
        let found = judge(&asked(Bound::AtLeast(1.5)), &record);
        assert_eq!((found.verdict, found.values), (Verdict::NotConclusive, None));
        assert_eq!(
            found.reason,
            "2 of 4 rounds count, expected 3; other programs used up to 40 % of the machine; \
             other guests took up to 26 % of it"
        );
    }

    #[test]
    fn another_sides_noise_does_not_spoil_a_question() {
        let mut record = record(&[(20.0, 10.0); 3]);
        for round in &mut record.rounds {
            let mut third = round.turns["slow"].clone();
            third.others = 0.9;
            round.turns.insert("third".into(), third);
        }
        assert_eq!(judge(&asked(Bound::AtLeast(1.5)), &record).verdict, Verdict::Holds);
    }

    #[test]
    fn a_side_that_is_missing_says_why_nothing_is_shown() {
        let mut record = record(&[(20.0, 10.0); 3]);
        record.missing.insert("fast".into(), "this processor has no movdir64b".into());
        let found = judge(&asked(Bound::AtLeast(1.5)), &record);
        assert_eq!(found.verdict, Verdict::NotShown);
        assert_eq!(found.reason, "this processor has no movdir64b");
    }

    #[test]
    fn nothing_divided_by_nothing_is_no_value() {
        let found = judge(&asked(Bound::AtLeast(1.5)), &record(&[(1.0, 0.0); 5]));
        assert_eq!(found.verdict, Verdict::NotConclusive);
        let empty = judge(&asked(Bound::AtLeast(1.5)), &Record::default());
        assert_eq!(empty.reason, "0 of 0 rounds count, expected 3");
    }

    #[test]
    fn the_median_of_an_even_number_is_one_of_them() {
        let four = spread(&[4.0, 1.0, 3.0, 2.0]).unwrap();
        assert!(times(four.median, 2.0) && times(four.least, 1.0) && times(four.most, 4.0));
        assert!(times(spread(&[3.0, 9.0, 1.0]).unwrap().median, 3.0));
        assert_eq!(spread(&[]), None);
    }
}
