//! How a copy went.

use std::fmt;
use std::ops::Range;

use base::{Blame, Operation, Outcome};

/// What has been done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Up to here everything has been dealt with; after a flush, it is surely on the target.
    pub until: u64,
    /// Bytes that were read.
    pub read: u64,
    /// Bytes that were written.
    pub written: u64,
    /// Bytes that the target was told to make zeroes.
    pub zeroed: u64,
    /// Bytes of zeroes that lay on the target already.
    pub kept: u64,
    /// What could not be read, and is zeroes on the target.
    pub lost: Vec<Range<u64>>,
    /// Whether the target has flushed since its last write.
    pub is_flushed: bool,
}

/// What comparing both sides came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Comparison {
    /// Bytes that were compared.
    pub compared: u64,
    /// Bytes in what is counted as a block: the larger of both.
    pub block: u64,
    /// Blocks that differ.
    pub different: u64,
    /// Where the first of them lies.
    pub first: Option<u64>,
}

/// How a copy, or a comparison, ended early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Somebody wanted it to.
    Interrupted,
    /// A device could not do its part.
    Failed {
        /// Which of the two.
        side: Which,
        /// What it was asked for.
        operation: Operation,
        /// Where, in bytes. Nowhere, of a flush.
        range: Range<u64>,
        /// What it answered.
        outcome: Outcome,
    },
    /// The record could not be kept.
    Record(String),
    /// The machine lacks something: memory, a descriptor, a channel.
    Machine(String),
}

/// One of two devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// The one that is read.
    Source,
    /// The one that is written.
    Target,
}

impl Tally {
    /// Notes that a range could not be read; neighbours become one.
    pub(super) fn lose(&mut self, range: Range<u64>) {
        let place = self.lost.partition_point(|one| one.start < range.start);
        self.lost.insert(place, range);
        let mut joined: Vec<Range<u64>> = Vec::with_capacity(self.lost.len());
        for one in self.lost.drain(..) {
            match joined.last_mut() {
                Some(last) if one.start <= last.end => last.end = last.end.max(one.end),
                _ => joined.push(one),
            }
        }
        self.lost = joined;
    }

    /// Bytes that could not be read.
    pub fn lost_bytes(&self) -> u64 {
        self.lost.iter().map(|range| range.end - range.start).sum()
    }
}

impl Ending {
    /// Whose move it is.
    pub fn blame(&self) -> Blame {
        match self {
            Self::Interrupted => Blame::Caller,
            Self::Failed { outcome: Outcome::CAPACITY_EXCEEDED, .. }
            | Self::Record(_)
            | Self::Machine(_) => Blame::Machine,
            Self::Failed { .. } => Blame::Peer,
        }
    }
}

impl fmt::Display for Which {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Source => "the source",
            Self::Target => "the target",
        })
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Interrupted => out.write_str("interrupted"),
            Self::Record(text) | Self::Machine(text) => out.write_str(text),
            Self::Failed { side, operation, range, outcome } => {
                write!(out, "{} of {side}", operation.name())?;
                if !range.is_empty() {
                    write!(out, ", bytes {} to {}", range.start, range.end - 1)?;
                }
                match *outcome {
                    Outcome::CAPACITY_EXCEEDED => out.write_str(": there is no room left"),
                    Outcome::NO_DEVICE | Outcome::ABORTED_BY_HOST => {
                        out.write_str(": the device has been removed")
                    }
                    outcome => write!(out, ": {}", wire::Status(outcome.0)),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use base::{Blame, Operation, Outcome};

    use super::{Ending, Tally, Which};

    #[test]
    fn lost_ranges_are_in_order_and_joined() {
        let mut tally = Tally::default();
        for range in [8..9, 0..1, 3..4, 1..2, 4..6] {
            tally.lose(range);
        }
        assert_eq!(tally.lost, [0..2, 3..6, 8..9]);
        assert_eq!(tally.lost_bytes(), 6);
    }

    #[test]
    fn what_failed_is_named_with_its_range_and_whose_move_it_is() {
        let failed = |outcome, range| Ending::Failed {
            side: Which::Target,
            operation: Operation::Write,
            range,
            outcome,
        };
        for (ending, text, blame) in [
            (
                failed(Outcome::CAPACITY_EXCEEDED, 512..1024),
                "write of the target, bytes 512 to 1023: there is no room left",
                Blame::Machine,
            ),
            (
                failed(Outcome::NO_DEVICE, 0..1),
                "write of the target, bytes 0 to 0: the device has been removed",
                Blame::Peer,
            ),
            (
                failed(Outcome::WRITE_FAULT, 0..0),
                "write of the target: Write Fault (SCT 0x2, SC 0x80)",
                Blame::Peer,
            ),
        ] {
            assert_eq!(ending.to_string().to_lowercase(), text.to_lowercase());
            assert_eq!(ending.blame(), blame);
        }
    }
}
