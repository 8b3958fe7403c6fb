//! Experiments with interleaved trials, and verdicts on their results.
//!
//! ```text
//!   Experiment ── claim, variants A B …, criteria with a threshold each
//!       │  measure: A B A B …; a round has one trial of each variant
//!       ▼
//!   Record ── metrics of each trial, and the CPU time that others used meanwhile
//!       │  judge: ratios within a round, with bounds for the disturbance
//!       ▼
//!   CriterionResult ── confirmed, refuted, inconclusive or not measured, with the reason
//! ```
//!
//! The module does not know what a variant executes, which is up to a [`TrialRunner`]. It has no
//! clock.

mod definition;
mod effort;
mod judge;
pub mod loops;
mod record;
mod rounds;
#[cfg(test)]
mod test_data;

pub use definition::{Criterion, Experiment, Metric, Operand, Threshold, Unit, Variant};
pub use effort::{Effort, OVERHEAD};
pub use judge::{
    COUNTED_LEAST, CriterionResult, LOST_MAX, OTHERS_MAX, STEAL_MAX, Summary, TRIMMED_FROM,
    Verdict, judge, spread,
};
pub use record::{Record, Round, TrialResult};
pub use rounds::{Canceled, LEFT_OUT, RoundProgress, TrialError, TrialRunner, measure};
