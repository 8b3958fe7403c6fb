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

pub use self::deadline::{Deadline, DeadlineOptions};
pub use self::merge::Merge;
pub use self::stream_batch::{StreamBatch, StreamBatchOptions};
use crate::uri::{Uri, UriError};
use tenmil_base::Error;

/// A scheduler and its parameters in text form: `merge`, `deadline?read=5ms&depth=8`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scheduler {
    /// No scheduler.
    #[default]
    None,
    /// [`Merge`].
    Merge,
    /// [`Deadline`].
    Deadline(DeadlineOptions),
    /// [`StreamBatch`].
    StreamBatch(StreamBatchOptions),
}

impl Scheduler {
    /// Wraps a channel in this scheduler.
    pub fn over(&self, below: Box<dyn IoChannel>) -> Box<dyn IoChannel> {
        match self {
            Self::None => below,
            Self::Merge => Box::new(Merge::new(below)),
            Self::Deadline(options) => Box::new(Deadline::new(below, options)),
            Self::StreamBatch(options) => Box::new(StreamBatch::new(below, options)),
        }
    }
}

impl FromStr for Scheduler {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (name, query) = text.split_once('?').unwrap_or((text, ""));
        let uri: Uri = format!("{name}:?{query}").parse().map_err(|_: UriError| unknown(text))?;
        let mut fields = uri.fields();
        let scheduler = match name {
            "none" => Self::None,
            "merge" => Self::Merge,
            "deadline" => Self::Deadline(DeadlineOptions::parse(&mut fields)?),
            "stream-batch" => Self::StreamBatch(StreamBatchOptions::parse(&mut fields)?),
            _ => return Err(unknown(text)),
        };
        fields.finish()?;
        Ok(scheduler)
    }
}

fn unknown(text: &str) -> Error {
    let expected = "expected none, merge, deadline?read=500ms or stream-batch?count=16";
    Error::new(tenmil_base::ErrorCategory::Usage, format!("no scheduler `{text}`, {expected}"))
}

impl fmt::Display for Scheduler {
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
fn reads(request: &Request) -> bool {
    matches!(request.operation, Operation::Read | Operation::Compare | Operation::Verify)
}

/// Whether the order of two requests must be preserved.
fn conflict(left: &Request, right: &Request) -> bool {
    let changed =
        |request: &Request| if reads(request) { 0..0 } else { range(request.lba, request) };
    let touches = |changed: &Range<u64>, request: &Request| {
        let source = request.operation == Operation::Copy;
        overlap(changed, &range(request.lba, request))
            || (source && overlap(changed, &range(request.operand, request)))
    };
    touches(&changed(left), right) || touches(&changed(right), left)
}

fn range(first: u64, request: &Request) -> Range<u64> {
    first..first.saturating_add(u64::from(request.blocks))
}

fn overlap(left: &Range<u64>, right: &Range<u64>) -> bool {
    left.start < right.end && right.start < left.end
}
