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

mod effort;
mod experiment_definition;
mod experiment_record;
pub mod micro_benchmark_loops;
mod run_rounds;
#[cfg(test)]
mod test_experiments;
mod verdict;

pub use effort::{Effort, OVERHEAD};
pub use experiment_definition::{Criterion, Experiment, Metric, Operand, Threshold, Unit, Variant};
pub use experiment_record::{ExperimentRecord, Round, TrialResult};
pub use run_rounds::{
    ExperimentCanceled, LEFT_OUT, RoundProgress, TrialError, TrialRunner, run_rounds,
};
pub use verdict::{
    COUNTED_LEAST, CriterionResult, LOST_MAX, MedianAndRange, OTHERS_MAX, STEAL_MAX, TRIMMED_FROM,
    Verdict, evaluate_criterion, median_and_range,
};
