//! Why a controller or something of it cannot be used, and whose move it is.
//!
//! Each error is one line, lower case, no full stop: what we were doing, what we found, what we had
//! expected. [`ControllerError::blame`] says whose move it is and
//! [`ControllerError::hint`] what to try, if there is something to try.

use core::fmt;

use base::{Blame, Span};
use wire::Status;

use crate::bringup::{BringupError, Register};
use crate::{Nonsense, ResetReason};

/// Why a controller cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ControllerError {
    /// It did not come up.
    Bringup(BringupError),
    /// There is no memory left that it could reach.
    Memory {
        /// What for.
        what: &'static str,
        /// How much was asked for.
        len_bytes: u32,
    },
    /// Memory that was allocated for it has no address at which it could find it.
    Unreachable {
        /// What lies there.
        what: &'static str,
    },
    /// It refused a command without which nothing goes on.
    Refused {
        /// The command, and what it was about.
        command: &'static str,
        /// How it ended.
        status: Status,
    },
    /// It said something that the specification does not allow.
    Lie(Lie),
    /// Its memory buffer cannot be where or as it says.
    MemoryBuffer(BufferLie),
    /// It came up and then failed before start-up was done.
    NeverStarted {
        /// What it would have been reset for.
        cause: ResetCause,
    },
    /// It had to be reset too often.
    Hopeless {
        /// How many resets there have been.
        resets: u32,
        /// In how long.
        within: Span,
        /// What the last one was for.
        cause: ResetCause,
    },
    /// It was cut off from memory and has had an access under way ever since.
    StillReaches {
        /// For how long.
        waited: Span,
    },
}

/// Something a controller said that the specification does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lie {
    /// Which field of what.
    pub field: &'static str,
    /// What it held.
    pub found: u64,
    /// What the specification allows.
    pub expected: &'static str,
}

/// Something that registers say of a controller memory buffer and that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferLie {
    /// A field holds what the specification does not allow.
    Field(Lie),
    /// It ends behind the BAR that it lies in (CMBLOC, CMBSZ).
    Outside {
        /// Which BAR.
        bar: u8,
        /// Where in it the buffer would end.
        end: u64,
        /// How long the BAR is; zero if there is none.
        bar_bytes: u64,
    },
}

/// Why a controller is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResetCause {
    /// Somebody asked for it.
    Requested,
    /// A queue pair could not go on.
    Queue {
        /// Its identifier; 0 is the admin queue.
        id: u16,
        /// Why.
        reason: ResetReason,
    },
    /// An Abort was not answered in time.
    AbortUnanswered {
        /// Which queue the command to be aborted is on.
        queue: u16,
        /// Its command identifier.
        cid: u16,
    },
    /// It reports a fatal status (CSTS.CFS).
    Fatal {
        /// CSTS when it did.
        csts: u32,
    },
    /// It stopped being ready without being told to.
    NotReady {
        /// CSTS when it was seen.
        csts: u32,
    },
    /// The reset before did not bring it back.
    Bringup(BringupError),
    /// It said something after the reset before that the specification does not allow.
    Lie(Lie),
    /// It would not delete a queue.
    DeletionRefused {
        /// Which queue pair.
        id: u16,
        /// What it said.
        status: Status,
    },
    /// It refused a command without which nothing goes on.
    Refused {
        /// The command, and what it was about.
        command: &'static str,
        /// How it ended.
        status: Status,
    },
}

/// Why a call was refused. Nothing was sent; what was passed in is the caller's again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// The controller takes no commands at the moment: it is being brought up, reset or shut down,
    /// or it is gone. Events tell when that changes.
    NotReady,
    /// As many commands are outstanding as there is room for. Worth another try after a poll.
    Full,
    /// No such queue pair.
    NoSuchQueue {
        /// The identifier that was given.
        id: u16,
    },
    /// No command with this token is outstanding.
    NoSuchToken {
        /// The token that was given.
        token: u64,
    },
    /// The controller grants no more I/O queue pairs.
    NoQueueLeft {
        /// How many it has granted.
        granted: u16,
    },
    /// An argument is outside what the controller allows.
    OutOfRange {
        /// Which.
        what: &'static str,
        /// What it was.
        found: u64,
        /// The least that is accepted.
        min: u64,
        /// The most that is accepted.
        max: u64,
    },
    /// There is no memory left that the controller could reach.
    Memory {
        /// How much was asked for.
        len_bytes: u32,
    },
    /// The driver sends this command itself and keeps account of it.
    Reserved {
        /// Which.
        command: &'static str,
    },
    /// The controller has no such command.
    Unsupported {
        /// Which.
        command: &'static str,
    },
}

impl ControllerError {
    /// Whose move it is. Exit codes and retry policies are made from this, never from the text.
    pub const fn blame(&self) -> Blame {
        match self {
            Self::Memory { .. }
            | Self::Unreachable { .. }
            | Self::Bringup(BringupError::Unsupported { .. }) => Blame::Machine,
            Self::Bringup(_)
            | Self::Refused { .. }
            | Self::Lie(_)
            | Self::MemoryBuffer(_)
            | Self::NeverStarted { .. }
            | Self::Hopeless { .. }
            | Self::StillReaches { .. } => Blame::Peer,
        }
    }

    /// The next thing to try, as a sentence, if we know one.
    pub const fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Bringup(BringupError::Fatal { .. })
            | Self::NeverStarted { cause: ResetCause::Fatal { .. } }
            | Self::Hopeless { cause: ResetCause::Fatal { .. }, .. } => {
                Some("the controller reports a fatal error; power-cycle it.")
            }
            Self::Bringup(BringupError::Gone { .. }) => {
                Some("check that the device is still plugged in and its memory space enabled.")
            }
            Self::Memory { .. } => Some("raise the limit of memory that devices may reach."),
            _ => None,
        }
    }
}

impl Refusal {
    /// Whose move it is.
    pub const fn blame(&self) -> Blame {
        match self {
            Self::NotReady | Self::Full | Self::NoSuchQueue { .. } | Self::NoSuchToken { .. } => {
                Blame::Caller
            }
            Self::NoQueueLeft { .. }
            | Self::OutOfRange { .. }
            | Self::Reserved { .. }
            | Self::Unsupported { .. } => Blame::Caller,
            Self::Memory { .. } => Blame::Machine,
        }
    }
}

impl fmt::Display for ControllerError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bringup(error) => write!(out, "bring up: {error}"),
            Self::Memory { what, len_bytes } => {
                write!(out, "allocate {what}: no {len_bytes} bytes left that the device can reach")
            }
            Self::Unreachable { what } => {
                write!(out, "map {what}: no device address, expected one for allocated memory")
            }
            Self::Refused { command, status } => {
                write!(out, "{command}: {status}, expected success")
            }
            Self::Lie(lie) => lie.fmt(out),
            Self::MemoryBuffer(lie) => lie.fmt(out),
            Self::NeverStarted { cause } => write!(out, "start up: {cause}"),
            Self::Hopeless { resets, within, cause } => {
                write!(out, "reset: {resets} resets within {within}, the last because {cause}")
            }
            Self::StillReaches { waited } => write!(
                out,
                "cut off from memory: an access is under way after {waited}, expected none; what \
                 it may touch is kept"
            ),
        }
    }
}

impl fmt::Display for Lie {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { field, found, expected } = self;
        write!(out, "{field} is {found:#x}, expected {expected}")
    }
}

impl fmt::Display for BufferLie {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Field(lie) => lie.fmt(out),
            Self::Outside { bar, end, bar_bytes } => write!(
                out,
                "CMBLOC and CMBSZ: the controller memory buffer ends at byte {end} of BAR {bar}, \
                 expected at most {bar_bytes}"
            ),
        }
    }
}

impl fmt::Display for BringupError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gone { register } => {
                write!(
                    out,
                    "{} reads as all ones, expected a controller",
                    Register::name(*register)
                )
            }
            Self::Fatal { csts } => {
                write!(out, "CSTS is {csts:#010x} (fatal), expected no fatal status")
            }
            Self::Late { want_ready, allowed, csts } => {
                let ready = u8::from(*want_ready);
                write!(out, "CSTS is {csts:#010x} after {allowed}, expected RDY={ready}")
            }
            Self::Nonsense { field, found, expected }
            | Self::Unsupported { field, found, expected } => {
                Lie { field, found: *found, expected }.fmt(out)
            }
        }
    }
}

impl fmt::Display for ResetCause {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Requested => out.write_str("it was asked for"),
            Self::Queue { id, reason: ResetReason::Stuck { cid } } => {
                write!(out, "command {cid:#06x} on queue {id} missed its deadline and its abort")
            }
            Self::Queue { id, reason: ResetReason::Nonsense(nonsense) } => {
                let (what, found) = match nonsense {
                    Nonsense::UnknownIdentifier { cid } => ("unknown identifier", cid),
                    Nonsense::NotInFlight { cid } => ("identifier not in flight", cid),
                    Nonsense::SubmissionHead { head } => ("impossible submission head", head),
                };
                write!(out, "a completion on queue {id} carried the {what} {found:#06x}")
            }
            Self::AbortUnanswered { queue, cid } => {
                write!(out, "the abort of command {cid:#06x} on queue {queue} was not answered")
            }
            Self::Fatal { csts } => write!(out, "CSTS was {csts:#010x} (fatal)"),
            Self::NotReady { csts } => write!(out, "CSTS was {csts:#010x}, expected RDY=1"),
            Self::Bringup(error) => error.fmt(out),
            Self::Lie(lie) => lie.fmt(out),
            Self::DeletionRefused { id, status } => {
                write!(out, "deleting queue pair {id} ended with {status}, expected success")
            }
            Self::Refused { command, status } => {
                write!(out, "{command} ended with {status}, expected success")
            }
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotReady => out.write_str("controller is not ready, expected it to be"),
            Self::Full => out.write_str("admin queue is full, expected room for a command"),
            Self::NoSuchQueue { id } => write!(out, "queue pair {id} does not exist"),
            Self::NoSuchToken { token } => {
                write!(out, "no command with token {token:#x} is outstanding")
            }
            Self::NoQueueLeft { granted } => {
                write!(out, "all {granted} I/O queue pairs that the controller grants are in use")
            }
            Self::OutOfRange { what, found, min, max } => {
                write!(out, "{what} is {found}, expected {min} to {max}")
            }
            Self::Memory { len_bytes } => {
                write!(out, "no {len_bytes} bytes left that the device can reach")
            }
            Self::Reserved { command } => {
                write!(out, "{command} is sent by the driver itself and by nobody else")
            }
            Self::Unsupported { command } => write!(out, "controller does not support {command}"),
        }
    }
}

impl core::error::Error for ControllerError {}
impl core::error::Error for BringupError {}
impl core::error::Error for Lie {}
impl core::error::Error for Refusal {}

impl From<BringupError> for ControllerError {
    fn from(error: BringupError) -> Self {
        Self::Bringup(error)
    }
}

impl From<BufferLie> for ControllerError {
    fn from(lie: BufferLie) -> Self {
        Self::MemoryBuffer(lie)
    }
}

impl From<Lie> for ControllerError {
    fn from(lie: Lie) -> Self {
        Self::Lie(lie)
    }
}

#[cfg(test)]
mod tests {
    use base::{Blame, Span};
    use wire::Status;

    use super::{ControllerError, Lie, Refusal, ResetCause};
    use crate::bringup::{BringupError, Register};
    use crate::{Nonsense, ResetReason};

    #[test]
    fn the_text_says_what_was_found_and_what_expected() {
        let late = BringupError::Late { want_ready: true, allowed: Span::from_ms(7_500), csts: 0 };
        let cause = ResetCause::Queue { id: 3, reason: ResetReason::Stuck { cid: 0x105 } };
        let within = Span::from_ms(60_000);
        let lie = Lie { field: "identify controller: SQES", found: 0x55, expected: "6 included" };
        let cases: [(ControllerError, &str); 7] = [
            (late.into(), "bring up: CSTS is 0x00000000 after 7500 ms, expected RDY=1"),
            (
                BringupError::Gone { register: Register::Csts }.into(),
                "bring up: CSTS reads as all ones, expected a controller",
            ),
            (lie.into(), "identify controller: SQES is 0x55, expected 6 included"),
            (
                ControllerError::Refused { command: "identify", status: Status::INVALID_FIELD },
                "identify: Invalid Field in Command (SCT 0x0, SC 0x02), expected success",
            ),
            (
                ControllerError::Hopeless { resets: 4, within, cause },
                "reset: 4 resets within 60 s, the last because command 0x0105 on queue 3 missed \
                 its deadline and its abort",
            ),
            (
                ControllerError::StillReaches { waited: within },
                "cut off from memory: an access is under way after 60 s, expected none; what it \
                 may touch is kept",
            ),
            (
                ControllerError::Memory { what: "admin rings", len_bytes: 8192 },
                "allocate admin rings: no 8192 bytes left that the device can reach",
            ),
        ];
        for (error, text) in cases {
            assert_eq!(error.to_string(), text);
        }
        let lied = ResetReason::Nonsense(Nonsense::NotInFlight { cid: 9 });
        assert_eq!(
            ResetCause::Queue { id: 1, reason: lied }.to_string(),
            "a completion on queue 1 carried the identifier not in flight 0x0009"
        );
    }

    #[test]
    fn a_controller_that_lies_or_is_late_is_to_blame_and_the_machine_for_its_memory() {
        let late = BringupError::Late { want_ready: true, allowed: Span::from_ms(1), csts: 0 };
        let pages = BringupError::Unsupported { field: "CAP.MPSMIN", found: 1, expected: "0" };
        let memory = ControllerError::Memory { what: "x", len_bytes: 1 };
        assert_eq!(ControllerError::from(late).blame().exit_code(), 3);
        assert_eq!(ControllerError::from(pages).blame(), Blame::Machine);
        assert_eq!(memory.blame(), Blame::Machine);
        assert_eq!(Refusal::Full.blame().exit_code(), 2);
    }

    #[test]
    fn a_hint_is_given_only_when_there_is_something_to_do() {
        let late = BringupError::Late { want_ready: true, allowed: Span::from_ms(1), csts: 0 };
        assert_eq!(ControllerError::from(late).hint(), None);
        assert!(ControllerError::from(BringupError::Fatal { csts: 2 }).hint().is_some());
    }
}
