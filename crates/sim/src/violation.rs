//! Violations found by the harness.

use core::fmt;

use tenmil_base::Instant;

use crate::data_oracle::DataMismatch;

/// A violation of an invariant, with its circumstances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// The conforming device accessed memory that is not mapped for it.
    Stray {
        /// First byte of the access.
        iova: u64,
        /// Length of the access.
        len_bytes: u64,
        /// Whether it was a write.
        is_write: bool,
        /// When the memory was unmapped, if it was ever mapped.
        unmapped: Option<UnmapRecord>,
        /// Time of the access.
        at: Instant,
    },
    /// The driver accessed memory that it had released or never allocated.
    HostStray {
        /// Action of the driver.
        doing: &'static str,
        /// First byte.
        iova: u64,
        /// Length.
        len_bytes: u64,
        /// When the memory was unmapped.
        unmapped: Option<UnmapRecord>,
    },
    /// A request completed while one of its commands was still in a device with DMA access.
    CompletedEarly {
        /// Token of the request.
        token: u64,
        /// Identifier of the command.
        cid: u16,
        /// Opcode of the command.
        opcode: u8,
        /// Time at which the command was stored in its ring.
        stored_at: Instant,
        /// Time of the completion.
        at: Instant,
    },
    /// The device accessed a buffer after the request had completed.
    AccessAfterCompletion {
        /// Token of the request.
        token: u64,
        /// Time of the completion.
        returned_at: Instant,
        /// Address of the access.
        iova: u64,
        /// Whether it was a write.
        is_write: bool,
        /// Time of the access.
        at: Instant,
    },
    /// The device wrote to the source buffer of a write request.
    WroteSource {
        /// Token of the request.
        token: u64,
        /// Address of the access.
        iova: u64,
    },
    /// A completion for a token that is not outstanding.
    CompletedTwice {
        /// Token.
        token: u64,
    },
    /// Requests did not complete within the time limit.
    NeverCompleted {
        /// Token of the oldest one.
        token: u64,
        /// Number of requests.
        count: usize,
        /// Time at which the run failed.
        at: Instant,
    },
    /// Progress without end at the same instant.
    Spinning {
        /// Instant.
        at: Instant,
        /// Number of iterations.
        turns: u32,
    },
    /// A component wants to be polled at once for too long without progress.
    Restless {
        /// Component.
        who: &'static str,
        /// Time of the last progress.
        since: Instant,
        /// Time at which the run failed.
        at: Instant,
    },
    /// A read returned wrong data.
    Data {
        /// Token of the read.
        token: u64,
        /// Mismatch.
        complaint: DataMismatch,
    },
    /// A resource was not returned.
    Leak {
        /// Resource.
        what: &'static str,
        /// Amount found.
        found: u64,
        /// Amount expected.
        expected: u64,
    },
    /// A channel of the medium was dropped with requests in flight, which may still access memory.
    DroppedChannel {
        /// Number of requests.
        requests: usize,
    },
    /// Panic in the code under test.
    Panic {
        /// Panic message.
        message: String,
    },
    /// An expectation of a scenario was not met.
    Expectation {
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
}

/// Record of an unmapped page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnmapRecord {
    /// Number of the allocation since the start of the run.
    pub allocation: u64,
    /// Time of the release.
    pub at: Instant,
}

impl fmt::Display for Violation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stray { iova, len_bytes, is_write, unmapped, at } => {
                let verb = access_verb(*is_write);
                write!(out, "stray access: the device {verb} {iova:#x}+{len_bytes} at {at:?}")?;
                write_unmap_record(*unmapped, out)
            }
            Self::HostStray { doing, iova, len_bytes, unmapped } => {
                write!(out, "stray access: the driver was {doing} {iova:#x}+{len_bytes}")?;
                write_unmap_record(*unmapped, out)
            }
            Self::CompletedEarly { token, cid, opcode, stored_at, at } => write!(
                out,
                "token {token:#x} handed back at {at:?} while its command {cid} (opcode \
                 {opcode:#04x}, stored at {stored_at:?}) is with a device that can reach memory"
            ),
            Self::AccessAfterCompletion { token, returned_at, iova, is_write, at } => write!(
                out,
                "the device {} {iova:#x} at {at:?}, the buffer of token {token:#x}, which was \
                 handed back at {returned_at:?}",
                access_verb(*is_write)
            ),
            Self::WroteSource { token, iova } => {
                write!(out, "the device wrote {iova:#x}, which token {token:#x} gave it to read")
            }
            Self::CompletedTwice { token } => {
                write!(out, "token {token:#x} completed, but it is not outstanding")
            }
            Self::NeverCompleted { token, count, at } => {
                write!(out, "{count} requests unanswered at {at:?}, the oldest {token:#x}")
            }
            Self::Spinning { at, turns } => {
                write!(out, "{turns} iterations at {at:?} without coming to rest")
            }
            Self::Restless { who, since, at } => {
                write!(out, "no progress since {since:?}, and at {at:?} {who} is still busy")
            }
            Self::Data { token, complaint } => write!(out, "read {token:#x}: {complaint}"),
            Self::Leak { what, found, expected } => {
                write!(out, "{what}: found {found}, expected {expected}")
            }
            Self::DroppedChannel { requests } => {
                write!(out, "a channel to the medium was dropped with {requests} requests in it")
            }
            Self::Panic { message } => write!(out, "panic: {message}"),
            Self::Expectation { expected, found } => {
                write!(out, "found {found}, expected {expected}")
            }
        }
    }
}

fn access_verb(is_write: bool) -> &'static str {
    if is_write { "wrote" } else { "read" }
}

fn write_unmap_record(unmapped: Option<UnmapRecord>, out: &mut fmt::Formatter<'_>) -> fmt::Result {
    match unmapped {
        Some(UnmapRecord { allocation, at }) => {
            write!(out, "; it was allocation {allocation}, released at {at:?}")
        }
        None => write!(out, "; it was never mapped"),
    }
}
