//! Claims: which holders may have a bdev open at the same time.
//!
//! | requested \ held | read-shared | write-once | exclusive |
//! |---|---|---|---|
//! | read-shared | yes | yes | no |
//! | write-once | yes | no | no |
//! | exclusive | no | no | no |

use std::fmt;

use crate::uri::short_form_for_terminal;
use tenmil_base::ErrorCategory;

/// The access that a holder requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Read beside other readers and one writer. Channels reject operations that change blocks.
    ReadShared,
    /// Read and write as the only writer, beside readers.
    WriteOnce,
    /// Exclusive access.
    Exclusive,
}

/// A granted claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Name of the holder.
    pub name: String,
    /// The granted access.
    pub claim: Claim,
}

/// Error: a bdev could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimError {
    /// Name of the bdev.
    pub device: String,
    /// Name of the holder that requested it.
    pub holder: String,
    /// The requested access.
    pub requested: Claim,
    /// The cause.
    pub found: ClaimConflict,
}

/// Why a bdev could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimConflict {
    /// It has been removed.
    Removed,
    /// These holders have conflicting claims.
    Holders(Vec<Holder>),
    /// The process is out of file descriptors for events.
    Machine(String),
}

impl Claim {
    /// Whether both can be granted at once.
    pub const fn is_compatible(self, other: Self) -> bool {
        matches!(
            (self, other),
            (Self::ReadShared, Self::ReadShared | Self::WriteOnce)
                | (Self::WriteOnce, Self::ReadShared)
        )
    }

    /// Whether it permits reads only.
    pub const fn is_read_only(self) -> bool {
        matches!(self, Self::ReadShared)
    }
}

impl ClaimError {
    /// The category of the error.
    pub const fn category(&self) -> ErrorCategory {
        match self.found {
            ClaimConflict::Removed | ClaimConflict::Holders(_) => ErrorCategory::Usage,
            ClaimConflict::Machine(_) => ErrorCategory::Environment,
        }
    }
}

impl fmt::Display for Claim {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::ReadShared => "read-shared",
            Self::WriteOnce => "write-once",
            Self::Exclusive => "exclusive",
        })
    }
}

impl fmt::Display for ClaimError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, holder, requested, found } = self;
        write!(out, "open {} {requested} for {holder}: ", short_form_for_terminal(device))?;
        let expected = match requested {
            Claim::ReadShared => "no exclusive holder",
            Claim::WriteOnce => "readers at most",
            Claim::Exclusive => "no other holder",
        };
        match found {
            ClaimConflict::Removed => {
                out.write_str("it has been removed, expected a device that is there")
            }
            ClaimConflict::Machine(problem) => {
                write!(out, "{problem}, expected an event descriptor")
            }
            ClaimConflict::Holders(holders) => {
                let held: Vec<String> =
                    holders.iter().map(|held| format!("{} ({})", held.name, held.claim)).collect();
                write!(out, "held by {}, expected {expected}", held.join(", "))
            }
        }
    }
}

impl std::error::Error for ClaimError {}
