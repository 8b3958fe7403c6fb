//! In what order requests go to a device, and how many of them at once.
//!
//! | scheduler | what it does | for |
//! |---|---|---|
//! | `none` | nothing: there is no wrapper at all | devices that are faster than any thought about them |
//! | `merge` | neighbours in a batch go down as one request | devices that pay by the request |
//! | `deadline` | reads first, in ascending order, none later than it may be | slow media |
//! | `stream-batch` | holds back until there is enough to send at once | one connection, one system call |
//!
//! What every one of them keeps to:
//!
//! - Requests that touch the same blocks, at least one of them changing them, go down in the order
//!   in which they were submitted.
//! - A flush goes down after everything that was answered before it was submitted. Nothing else is
//!   promised about it, as nothing else is by a [`Backend`].
//! - Every request goes down once and is answered once, under its own token.

mod deadline;
mod merge;
mod stream_batch;
#[cfg(test)]
pub(crate) mod tests;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use base::{Backend, Operation, Request};

pub use self::deadline::{Deadline, DeadlineOptions};
pub use self::merge::Merge;
pub use self::stream_batch::{StreamBatch, StreamBatchOptions};
use crate::MediumError;
use crate::uri::{Uri, UriError};

/// A scheduler by name, with its numbers: `merge`, `deadline?read=5ms&depth=8`.
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
    /// A channel with this scheduler in front of it.
    pub fn over(&self, below: Box<dyn Backend>) -> Box<dyn Backend> {
        match self {
            Self::None => below,
            Self::Merge => Box::new(Merge::new(below)),
            Self::Deadline(options) => Box::new(Deadline::new(below, options)),
            Self::StreamBatch(options) => Box::new(StreamBatch::new(below, options)),
        }
    }
}

impl FromStr for Scheduler {
    type Err = MediumError;

    fn from_str(text: &str) -> Result<Self, MediumError> {
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

fn unknown(text: &str) -> MediumError {
    let expected = "expected none, merge, deadline?read=500ms or stream-batch?count=16";
    MediumError::new(base::Blame::Caller, format!("no scheduler `{text}`, {expected}"))
}

impl fmt::Display for Scheduler {
    /// Writes what is read back as the same.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => out.write_str("none"),
            Self::Merge => out.write_str("merge"),
            Self::Deadline(options) => write!(out, "deadline?{options}"),
            Self::StreamBatch(options) => write!(out, "stream-batch?{options}"),
        }
    }
}

/// Whether a request is one of those that readers wait for.
fn reads(request: &Request) -> bool {
    matches!(request.operation, Operation::Read | Operation::Compare | Operation::Verify)
}

/// Whether two requests must not change places.
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
