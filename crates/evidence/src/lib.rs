//! Experiments whose sides take turns, and verdicts about what came of them.
//!
//! ```text
//!   Experiment ── claim, sides A B …, questions with a bound each
//!       │  measure: A B A B …, a round has a turn of each side
//!       ▼
//!   Record ── what each turn read, and what others took of the machine meanwhile
//!       │  judge: ratios within a round, and what others may have made of them
//!       ▼
//!   Finding ── holds, does not hold, not conclusive, not shown here; and why
//! ```
//!
//! Nothing here knows what a side runs: that is a [`Bench`]'s business. The crate has no clock.

#![forbid(unsafe_code)]

mod experiment;
mod judge;
pub mod loops;
mod pace;
mod record;
mod rounds;
#[cfg(test)]
mod sample;

pub use experiment::{Bound, Compared, Experiment, Figure, Question, Side, Unit};
pub use judge::{
    COUNTED_LEAST, Finding, LOST_MAX, OTHERS_MAX, STOLEN_MAX, Spread, TRIMMED_FROM, Verdict, judge,
    spread,
};
pub use pace::{OVERHEAD, Pace};
pub use record::{Reading, Record, Round};
pub use rounds::{Bench, Interrupted, LEFT_OUT, Step, Stopped, measure};
