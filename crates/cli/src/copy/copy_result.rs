//! Results of a copy and of a comparison.

use std::fmt;
use std::ops::Range;

use tenmil_base::{ErrorCategory, IoStatus, Operation};

/// Progress and statistics of a copy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CopyStats {
    /// Everything up to here is done; after a flush, it is durable on the target.
    pub until: u64,
    /// Bytes read.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
    /// Bytes zeroed on the target.
    pub zeroed: u64,
    /// Bytes of zeroes that the target already held.
    pub kept: u64,
    /// Unreadable ranges, which are zeroes on the target.
    pub lost: Vec<Range<u64>>,
    /// Whether the target was flushed after its last write.
    pub is_flushed: bool,
}

/// Result of a comparison.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CompareResult {
    /// Bytes compared.
    pub compared: u64,
    /// Block size of the count: the larger of both devices.
    pub block: u64,
    /// Number of blocks that differ.
    pub different: u64,
    /// Byte offset of the first block that differs.
    pub first: Option<u64>,
}

/// Reason for an early end of a copy or comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CopyAbort {
    /// Canceled by the user.
    Interrupted,
    /// A request failed.
    Failed {
        /// Device of the request.
        side: CopySide,
        /// Operation of the request.
        operation: Operation,
        /// Byte range of the request; empty for a flush.
        range: Range<u64>,
        /// Status of the request.
        status: IoStatus,
    },
    /// The checkpoint could not be stored.
    Record(String),
    /// Local resource error: memory, a descriptor, a channel.
    Machine(String),
}

/// One of the two devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopySide {
    /// The device that is read.
    Source,
    /// The device that is written.
    Target,
}

impl CopyStats {
    /// Records an unreadable range; adjacent ranges are merged.
    pub(super) fn record_unreadable(&mut self, range: Range<u64>) {
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

    /// Number of unreadable bytes.
    pub fn lost_bytes(&self) -> u64 {
        self.lost.iter().map(|range| range.end - range.start).sum()
    }
}

impl CopyAbort {
    /// Error category.
    pub fn category(&self) -> ErrorCategory {
        match self {
            Self::Interrupted => ErrorCategory::Usage,
            Self::Failed { status: IoStatus::CAPACITY_EXCEEDED, .. }
            | Self::Record(_)
            | Self::Machine(_) => ErrorCategory::Environment,
            Self::Failed { .. } => ErrorCategory::Remote,
        }
    }
}

impl fmt::Display for CopySide {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Source => "the source",
            Self::Target => "the target",
        })
    }
}

impl fmt::Display for CopyAbort {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Interrupted => out.write_str("interrupted"),
            Self::Record(text) | Self::Machine(text) => out.write_str(text),
            Self::Failed { side, operation, range, status } => {
                write!(out, "{} of {side}", operation.name())?;
                if !range.is_empty() {
                    write!(out, ", bytes {} to {}", range.start, range.end - 1)?;
                }
                match *status {
                    IoStatus::CAPACITY_EXCEEDED => out.write_str(": no space left"),
                    IoStatus::NO_DEVICE | IoStatus::ABORTED_BY_HOST => {
                        out.write_str(": the device has been removed")
                    }
                    status => write!(out, ": {}", tenmil_wire::Status(status.0)),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{ErrorCategory, IoStatus, Operation};

    use super::{CopyAbort, CopySide, CopyStats};

    #[test]
    fn unreadable_ranges_are_sorted_and_merged() {
        let mut tally = CopyStats::default();
        for range in [8..9, 0..1, 3..4, 1..2, 4..6] {
            tally.record_unreadable(range);
        }
        assert_eq!(tally.lost, [0..2, 3..6, 8..9]);
        assert_eq!(tally.lost_bytes(), 6);
    }

    #[test]
    fn failure_names_its_range_and_category() {
        let failed = |status, range| CopyAbort::Failed {
            side: CopySide::Target,
            operation: Operation::Write,
            range,
            status,
        };
        for (ending, text, category) in [
            (
                failed(IoStatus::CAPACITY_EXCEEDED, 512..1024),
                "write of the target, bytes 512 to 1023: no space left",
                ErrorCategory::Environment,
            ),
            (
                failed(IoStatus::NO_DEVICE, 0..1),
                "write of the target, bytes 0 to 0: the device has been removed",
                ErrorCategory::Remote,
            ),
            (
                failed(IoStatus::WRITE_FAULT, 0..0),
                "write of the target: Write Fault (SCT 0x2, SC 0x80)",
                ErrorCategory::Remote,
            ),
        ] {
            assert_eq!(ending.to_string().to_lowercase(), text.to_lowercase());
            assert_eq!(ending.category(), category);
        }
    }
}
