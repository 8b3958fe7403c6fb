//! Errors of streams.

use std::fmt;

use tenmil_base::ErrorCategory;

use super::VERSION;

/// Reason why a stream cannot be received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamError {
    /// Number of valid bytes before the error.
    pub at: u64,
    /// The error after them.
    pub wrong: StreamErrorKind,
}

/// Kind of a stream error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamErrorKind {
    /// Its start is not that of a stream.
    NotAStream,
    /// Other version, or unknown features.
    Newer {
        /// Its version.
        version: u32,
        /// Feature bits.
        features: u64,
    },
    /// Wrong checksum.
    Checksum {
        /// Checksum in the stream.
        found: u32,
        /// Computed checksum.
        expected: u32,
    },
    /// Numbers exceed the limits.
    Contents,
    /// Records are missing, or out of order.
    Order,
    /// The input ended before the end of the stream.
    Truncated,
}

impl StreamError {
    /// Category of the error, by the party that has to act.
    pub const fn category(&self) -> ErrorCategory {
        match self.wrong {
            StreamErrorKind::NotAStream | StreamErrorKind::Newer { .. } => ErrorCategory::Usage,
            _ => ErrorCategory::Remote,
        }
    }

    /// Suggested remedy.
    pub const fn hint(&self) -> &'static str {
        match self.wrong {
            StreamErrorKind::NotAStream => "Give it what `tenmil volume send` has written.",
            StreamErrorKind::Newer { .. } => "Receive it with a newer tenmil.",
            _ => "Send it again.",
        }
    }
}

impl fmt::Display for StreamError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "byte {} of the stream: ", self.at)?;
        match self.wrong {
            StreamErrorKind::NotAStream => {
                write!(out, "it does not begin like a stream of a snapshot")
            }
            StreamErrorKind::Newer { version, features } => write!(
                out,
                "version {version} with unknown features {features:#x}, expected version \
                 {VERSION} and none"
            ),
            StreamErrorKind::Checksum { found, expected } => {
                write!(out, "its checksum is {found:#010x}, expected {expected:#010x}")
            }
            StreamErrorKind::Contents => {
                write!(out, "its contents exceed the limits of the format")
            }
            StreamErrorKind::Order => write!(out, "records are missing or not in their order"),
            StreamErrorKind::Truncated => write!(out, "it ends here, expected more"),
        }
    }
}

impl core::error::Error for StreamError {}
