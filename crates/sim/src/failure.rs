//! What a run is failed for. Each names who did what, and when.

use core::fmt;

use base::Instant;

use crate::oracle::Complaint;

/// A promise that was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The device reached for memory that is not mapped for it, and nobody had made it misbehave.
    Stray {
        /// First byte of the access.
        iova: u64,
        /// Its length.
        len_bytes: u64,
        /// Whether it wrote.
        is_write: bool,
        /// Who unmapped the memory, if it was ever mapped.
        unmapped: Option<Unmapped>,
        /// When it was used.
        at: Instant,
    },
    /// The driver touched memory that it had given back to the pool, or never had.
    HostStray {
        /// What it did.
        doing: &'static str,
        /// First byte.
        iova: u64,
        /// Its length.
        len_bytes: u64,
        /// Who unmapped it.
        unmapped: Option<Unmapped>,
    },
    /// A request was answered while one of its commands was still with a device that could reach
    /// memory.
    HandedBackEarly {
        /// The request.
        token: u64,
        /// Its command.
        cid: u16,
        /// The opcode of that command.
        opcode: u8,
        /// When the command was stored into its ring.
        stored_at: Instant,
        /// When the answer came.
        at: Instant,
    },
    /// The device touched a buffer after its request had been answered.
    TouchedAfterReturn {
        /// The request.
        token: u64,
        /// When it was answered.
        returned_at: Instant,
        /// The access.
        iova: u64,
        /// Whether it wrote.
        is_write: bool,
        /// When.
        at: Instant,
    },
    /// The device wrote into a buffer that it was given to read.
    WroteSource {
        /// The request.
        token: u64,
        /// The access.
        iova: u64,
    },
    /// An answer for a token that is not outstanding.
    AnsweredTwice {
        /// The token.
        token: u64,
    },
    /// Requests that nobody answered within their bound.
    NeverAnswered {
        /// The oldest of them.
        token: u64,
        /// How many.
        count: usize,
        /// When the run gave up.
        at: Instant,
    },
    /// The same instant went on and on.
    Spinning {
        /// The instant.
        at: Instant,
        /// Turns taken in it.
        turns: u32,
    },
    /// Somebody wants to be called at once, again and again, and nothing comes of it.
    Restless {
        /// Who.
        who: &'static str,
        /// Since when nothing has moved.
        since: Instant,
        /// Until when.
        at: Instant,
    },
    /// A read brought what it must not.
    Data {
        /// The read.
        token: u64,
        /// What is wrong with it.
        complaint: Complaint,
    },
    /// Something was not given back.
    Leak {
        /// What.
        what: &'static str,
        /// How much there is.
        found: u64,
        /// How much there should be.
        expected: u64,
    },
    /// A channel to the medium was dropped with requests in it, which may touch memory yet.
    DroppedChannel {
        /// How many.
        requests: usize,
    },
    /// The code under test panicked.
    Panic {
        /// With these words.
        message: String,
    },
    /// What a scenario says must hold did not.
    Expectation {
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
}

/// How some memory stopped being mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unmapped {
    /// Which allocation it was, counted from the start of the run.
    pub allocation: u64,
    /// When it was released.
    pub at: Instant,
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stray { iova, len_bytes, is_write, unmapped, at } => {
                let verb = verb(*is_write);
                write!(out, "stray access: the device {verb} {iova:#x}+{len_bytes} at {at:?}")?;
                tell_unmapped(*unmapped, out)
            }
            Self::HostStray { doing, iova, len_bytes, unmapped } => {
                write!(out, "stray access: the driver was {doing} {iova:#x}+{len_bytes}")?;
                tell_unmapped(*unmapped, out)
            }
            Self::HandedBackEarly { token, cid, opcode, stored_at, at } => write!(
                out,
                "token {token:#x} handed back at {at:?} while its command {cid} (opcode \
                 {opcode:#04x}, stored at {stored_at:?}) is with a device that can reach memory"
            ),
            Self::TouchedAfterReturn { token, returned_at, iova, is_write, at } => write!(
                out,
                "the device {} {iova:#x} at {at:?}, the buffer of token {token:#x}, which was \
                 handed back at {returned_at:?}",
                verb(*is_write)
            ),
            Self::WroteSource { token, iova } => {
                write!(out, "the device wrote {iova:#x}, which token {token:#x} gave it to read")
            }
            Self::AnsweredTwice { token } => {
                write!(out, "token {token:#x} answered, but it is not outstanding")
            }
            Self::NeverAnswered { token, count, at } => {
                write!(out, "{count} requests unanswered at {at:?}, the oldest {token:#x}")
            }
            Self::Spinning { at, turns } => {
                write!(out, "{turns} turns at {at:?} and still something moves")
            }
            Self::Restless { who, since, at } => {
                write!(out, "nothing has moved since {since:?}, and at {at:?} {who} is still busy")
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

fn verb(is_write: bool) -> &'static str {
    if is_write { "wrote" } else { "read" }
}

fn tell_unmapped(unmapped: Option<Unmapped>, out: &mut fmt::Formatter<'_>) -> fmt::Result {
    match unmapped {
        Some(Unmapped { allocation, at }) => {
            write!(out, "; it was allocation {allocation}, released at {at:?}")
        }
        None => write!(out, "; it was never mapped"),
    }
}
