//! I/O schedulers: the order in which requests go to a device, and how many at once.
//!
//! | scheduler | what it does | use |
//! |---|---|---|
//! | `none` | nothing: no wrapper at all | devices faster than any scheduling |
//! | `merge` | merges adjacent requests of a batch | devices with a cost per request |
//! | `deadline` | reads first, in ascending order, each with a deadline | slow devices |
//! | `stream-batch` | holds requests until enough can be sent at once | one connection, one system call |
//!
//! Guarantees of every scheduler:
//!
//! - Requests that overlap, at least one of them changing blocks, keep their submission order.
//! - A flush goes down after everything that completed before it was submitted. It has no other ordering,
//!   as with any [`IoChannel`].
//! - Every request goes down once and completes once, under its own token.

mod deadline;
mod merge;
mod stream_batch;
#[cfg(test)]
pub(crate) mod tests;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use tenmil_base::{IoChannel, Operation, Request};

pub use self::deadline::{DeadlineOptions, DeadlineScheduler};
pub use self::merge::MergeScheduler;
pub use self::stream_batch::{StreamBatchOptions, StreamBatchScheduler};
use crate::uri::{Uri, UriError};
use tenmil_base::Error;

/// A scheduler and its parameters in text form: `merge`, `deadline?read=5ms&depth=8`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoScheduler {
    /// No scheduler.
    #[default]
    None,
    /// [`MergeScheduler`].
    Merge,
    /// [`DeadlineScheduler`].
    Deadline(DeadlineOptions),
    /// [`StreamBatchScheduler`].
    StreamBatch(StreamBatchOptions),
}

impl IoScheduler {
    /// Wraps a channel in this scheduler.
    pub fn wrap_channel(&self, below: Box<dyn IoChannel>) -> Box<dyn IoChannel> {
        match self {
            Self::None => below,
            Self::Merge => Box::new(MergeScheduler::new(below)),
            Self::Deadline(options) => Box::new(DeadlineScheduler::new(below, options)),
            Self::StreamBatch(options) => Box::new(StreamBatchScheduler::new(below, options)),
        }
    }
}

impl FromStr for IoScheduler {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (name, query) = text.split_once('?').unwrap_or((text, ""));
        let uri: Uri =
            format!("{name}:?{query}").parse().map_err(|_: UriError| unknown_scheduler(text))?;
        let mut fields = uri.options();
        let scheduler = match name {
            "none" => Self::None,
            "merge" => Self::Merge,
            "deadline" => Self::Deadline(DeadlineOptions::parse(&mut fields)?),
            "stream-batch" => Self::StreamBatch(StreamBatchOptions::parse(&mut fields)?),
            _ => return Err(unknown_scheduler(text)),
        };
        fields.reject_unconsumed()?;
        Ok(scheduler)
    }
}

fn unknown_scheduler(text: &str) -> Error {
    let expected = "expected none, merge, deadline?read=500ms or stream-batch?count=16";
    Error::new(tenmil_base::ErrorCategory::Usage, format!("no scheduler `{text}`, {expected}"))
}

impl fmt::Display for IoScheduler {
    /// Writes a text that parses to the same scheduler.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => out.write_str("none"),
            Self::Merge => out.write_str("merge"),
            Self::Deadline(options) => write!(out, "deadline?{options}"),
            Self::StreamBatch(options) => write!(out, "stream-batch?{options}"),
        }
    }
}

/// Whether the submitter of a request waits for data: reads, compares and verifies.
fn waits_for_data(request: &Request) -> bool {
    matches!(request.operation, Operation::Read | Operation::Compare | Operation::Verify)
}

/// Whether the order of two requests must be preserved.
fn must_keep_order(left: &Request, right: &Request) -> bool {
    let changed = |request: &Request| {
        if waits_for_data(request) { 0..0 } else { range_from_block(request.lba, request) }
    };
    let touches = |changed: &Range<u64>, request: &Request| {
        let source = request.operation == Operation::Copy;
        ranges_overlap(changed, &range_from_block(request.lba, request))
            || (source && ranges_overlap(changed, &range_from_block(request.operand, request)))
    };
    touches(&changed(left), right) || touches(&changed(right), left)
}

fn range_from_block(first: u64, request: &Request) -> Range<u64> {
    first..first.saturating_add(u64::from(request.blocks))
}

fn ranges_overlap(left: &Range<u64>, right: &Range<u64>) -> bool {
    left.start < right.end && right.start < left.end
}
