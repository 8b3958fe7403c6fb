//! What may be wrong with a stream.

use std::fmt;

use base::Blame;

use super::VERSION;

/// Why a stream cannot be received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamError {
    /// How many bytes of it were right.
    pub at: u64,
    /// What is wrong behind them.
    pub wrong: Wrong,
}

/// What is wrong with a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// It does not begin like one.
    NoStream,
    /// It is of another version, or has features that are not known.
    Newer {
        /// Its version.
        version: u32,
        /// Bits of features.
        features: u64,
    },
    /// A checksum is wrong.
    Checksum {
        /// What stands there.
        found: u32,
        /// What was computed.
        expected: u32,
    },
    /// Numbers are beyond the limits.
    Contents,
    /// Records are missing, or not in their order.
    Order,
    /// It has ended before its end.
    Cut,
}

impl StreamError {
    /// Whose move it is.
    pub const fn blame(&self) -> Blame {
        match self.wrong {
            Wrong::NoStream | Wrong::Newer { .. } => Blame::Caller,
            _ => Blame::Peer,
        }
    }

    /// What can be done about it.
    pub const fn hint(&self) -> &'static str {
        match self.wrong {
            Wrong::NoStream => "Give it what `tenmil volume send` has written.",
            Wrong::Newer { .. } => "Receive it with a newer tenmil.",
            _ => "Send it again.",
        }
    }
}

impl fmt::Display for StreamError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "byte {} of the stream: ", self.at)?;
        match self.wrong {
            Wrong::NoStream => write!(out, "it does not begin like a stream of a snapshot"),
            Wrong::Newer { version, features } => write!(
                out,
                "version {version} with unknown features {features:#x}, expected version \
                 {VERSION} and none"
            ),
            Wrong::Checksum { found, expected } => {
                write!(out, "its checksum is {found:#010x}, expected {expected:#010x}")
            }
            Wrong::Contents => write!(out, "what it says is beyond the limits of the format"),
            Wrong::Order => write!(out, "records are missing or not in their order"),
            Wrong::Cut => write!(out, "it ends here, expected more"),
        }
    }
}

impl core::error::Error for StreamError {}
