//! Errors of controllers and of their interface, with their categories.
//!
//! Each error is one line in lower case, without a full stop: the operation, the value found, the value
//! expected. [`ControllerError::category`] returns the category, and [`ControllerError::hint`] what to try,
//! if anything.

use core::fmt;

use tenmil_base::{ErrorCategory, Span};
use tenmil_wire::Status;

use crate::bringup::{BringupError, Register};
use crate::{InvalidCompletion, ResetReason};

/// Reason why a controller cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ControllerError {
    /// The initialization failed.
    Bringup(BringupError),
    /// No memory is left that the controller can access.
    Memory {
        /// Purpose of the memory.
        what: &'static str,
        /// Requested bytes.
        len_bytes: u32,
    },
    /// Memory allocated for the controller has no device address.
    Unreachable {
        /// Purpose of the memory.
        what: &'static str,
    },
    /// The controller failed a mandatory command.
    CommandFailed {
        /// Command and its object.
        command: &'static str,
        /// Status of the completion.
        status: Status,
    },
    /// The controller returned data that the specification does not allow.
    InvalidData(InvalidValue),
    /// The registers of the controller memory buffer are invalid.
    MemoryBuffer(CmbRegisterError),
    /// The controller was enabled and then failed before start-up was complete.
    StartupFailed {
        /// Cause, which would trigger a reset later.
        cause: ResetCause,
    },
    /// The reset limit was exceeded.
    TooManyResets {
        /// Number of resets.
        resets: u32,
        /// Time in which they occurred.
        within: Span,
        /// Cause of the last reset.
        cause: ResetCause,
    },
    /// DMA is still in flight after its revocation.
    DmaActive {
        /// Time since the revocation.
        waited: Span,
    },
}

/// Value from a controller that the specification does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidValue {
    /// Name of the field.
    pub field: &'static str,
    /// Value found.
    pub found: u64,
    /// Values that the specification allows.
    pub expected: &'static str,
}

/// Invalid registers of a controller memory buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CmbRegisterError {
    /// A field has a value that the specification does not allow.
    Field(InvalidValue),
    /// The buffer ends beyond its BAR (CMBLOC, CMBSZ).
    OutOfBar {
        /// BAR number.
        bar: u8,
        /// Offset of the buffer's end in the BAR.
        end: u64,
        /// Length of the BAR; zero if it does not exist.
        bar_bytes: u64,
    },
}

/// Reason for a controller reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResetCause {
    /// Requested by the owner.
    Requested,
    /// A queue pair cannot continue.
    Queue {
        /// Queue identifier; 0 is the admin queue.
        id: u16,
        /// Reason from the queue.
        reason: ResetReason,
    },
    /// An Abort command timed out.
    AbortTimeout {
        /// Queue of the command to be aborted.
        queue: u16,
        /// Its command identifier.
        cid: u16,
    },
    /// The controller reports a fatal status (CSTS.CFS).
    Fatal {
        /// Value of CSTS.
        csts: u32,
    },
    /// CSTS.RDY was cleared without a request.
    NotReady {
        /// Value of CSTS.
        csts: u32,
    },
    /// The previous reset failed.
    Bringup(BringupError),
    /// After the previous reset, the controller returned data that the specification does not allow.
    InvalidData(InvalidValue),
    /// The controller failed to delete a queue.
    QueueDeletionFailed {
        /// Queue pair identifier.
        id: u16,
        /// Status of the deletion.
        status: Status,
    },
    /// The controller failed a mandatory command.
    CommandFailed {
        /// Command and its object.
        command: &'static str,
        /// Status of the completion.
        status: Status,
    },
}

/// Reason why a call was rejected. Nothing was sent; the arguments belong to the caller again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RequestError {
    /// The controller accepts no commands at present: it is being initialized, reset or shut down, or it
    /// is gone. Events report when that changes.
    NotReady,
    /// The maximum number of commands is outstanding. The caller may retry after a poll.
    Full,
    /// The queue pair does not exist.
    NoSuchQueue {
        /// Identifier given.
        id: u16,
    },
    /// No command with this token is outstanding.
    NoSuchToken {
        /// Token given.
        token: u64,
    },
    /// The controller grants no more I/O queue pairs.
    QueueLimit {
        /// Number of queue pairs granted.
        granted: u16,
    },
    /// An argument is out of the range permitted by the controller.
    OutOfRange {
        /// Name of the argument.
        what: &'static str,
        /// Value given.
        found: u64,
        /// Minimum.
        min: u64,
        /// Maximum.
        max: u64,
    },
    /// No memory is left that the controller can access.
    Memory {
        /// Requested bytes.
        len_bytes: u32,
    },
    /// The command is reserved for the driver, which tracks its use.
    Reserved {
        /// Name of the command.
        command: &'static str,
    },
    /// The controller does not support the command.
    Unsupported {
        /// Name of the command.
        command: &'static str,
    },
}

impl ControllerError {
    /// Error category. Exit codes and retry policies are derived from it, never from the text.
    pub const fn category(&self) -> ErrorCategory {
        match self {
            Self::Memory { .. }
            | Self::Unreachable { .. }
            | Self::Bringup(BringupError::Unsupported { .. }) => ErrorCategory::Environment,
            Self::Bringup(_)
            | Self::CommandFailed { .. }
            | Self::InvalidData(_)
            | Self::MemoryBuffer(_)
            | Self::StartupFailed { .. }
            | Self::TooManyResets { .. }
            | Self::DmaActive { .. } => ErrorCategory::Remote,
        }
    }

    /// Suggested next step, as a sentence, if known.
    pub const fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Bringup(BringupError::Fatal { .. })
            | Self::StartupFailed { cause: ResetCause::Fatal { .. } }
            | Self::TooManyResets { cause: ResetCause::Fatal { .. }, .. } => {
                Some("the controller reports a fatal error; power-cycle it.")
            }
            Self::Bringup(BringupError::Removed { .. }) => {
                Some("check that the device is still plugged in and its memory space enabled.")
            }
            Self::Memory { .. } => Some("raise the limit of memory that devices may reach."),
            _ => None,
        }
    }
}

impl RequestError {
    /// Error category.
    pub const fn category(&self) -> ErrorCategory {
        match self {
            Self::NotReady | Self::Full | Self::NoSuchQueue { .. } | Self::NoSuchToken { .. } => {
                ErrorCategory::Usage
            }
            Self::QueueLimit { .. }
            | Self::OutOfRange { .. }
            | Self::Reserved { .. }
            | Self::Unsupported { .. } => ErrorCategory::Usage,
            Self::Memory { .. } => ErrorCategory::Environment,
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
            Self::CommandFailed { command, status } => {
                write!(out, "{command}: {status}, expected success")
            }
            Self::InvalidData(lie) => lie.fmt(out),
            Self::MemoryBuffer(lie) => lie.fmt(out),
            Self::StartupFailed { cause } => write!(out, "start up: {cause}"),
            Self::TooManyResets { resets, within, cause } => {
                write!(out, "reset: {resets} resets within {within}, the last because {cause}")
            }
            Self::DmaActive { waited } => write!(
                out,
                "revoke DMA: an access is in progress after {waited}, expected none; its \
                 memory is not freed"
            ),
        }
    }
}

impl fmt::Display for InvalidValue {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { field, found, expected } = self;
        write!(out, "{field} is {found:#x}, expected {expected}")
    }
}

impl fmt::Display for CmbRegisterError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Field(lie) => lie.fmt(out),
            Self::OutOfBar { bar, end, bar_bytes } => write!(
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
            Self::Removed { register } => {
                write!(
                    out,
                    "{} reads as all ones, expected a controller",
                    Register::name(*register)
                )
            }
            Self::Fatal { csts } => {
                write!(out, "CSTS is {csts:#010x} (fatal), expected no fatal status")
            }
            Self::Timeout { want_ready, allowed, csts } => {
                let ready = u8::from(*want_ready);
                write!(out, "CSTS is {csts:#010x} after {allowed}, expected RDY={ready}")
            }
            Self::InvalidRegister { field, found, expected }
            | Self::Unsupported { field, found, expected } => {
                InvalidValue { field, found: *found, expected }.fmt(out)
            }
        }
    }
}

impl fmt::Display for ResetCause {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Requested => out.write_str("it was requested"),
            Self::Queue { id, reason: ResetReason::CommandTimeout { cid } } => {
                write!(out, "command {cid:#06x} on queue {id} missed its deadline and its abort")
            }
            Self::Queue { id, reason: ResetReason::InvalidCompletion(invalid_completion) } => {
                let (what, found) = match invalid_completion {
                    InvalidCompletion::UnknownIdentifier { cid } => ("unknown identifier", cid),
                    InvalidCompletion::NotInFlight { cid } => ("identifier not in flight", cid),
                    InvalidCompletion::SubmissionHead { head } => {
                        ("impossible submission head", head)
                    }
                };
                write!(out, "a completion on queue {id} carried the {what} {found:#06x}")
            }
            Self::AbortTimeout { queue, cid } => {
                write!(out, "the abort of command {cid:#06x} on queue {queue} timed out")
            }
            Self::Fatal { csts } => write!(out, "CSTS was {csts:#010x} (fatal)"),
            Self::NotReady { csts } => write!(out, "CSTS was {csts:#010x}, expected RDY=1"),
            Self::Bringup(error) => error.fmt(out),
            Self::InvalidData(lie) => lie.fmt(out),
            Self::QueueDeletionFailed { id, status } => {
                write!(out, "deleting queue pair {id} ended with {status}, expected success")
            }
            Self::CommandFailed { command, status } => {
                write!(out, "{command} ended with {status}, expected success")
            }
        }
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotReady => out.write_str("controller is not ready, expected it to be"),
            Self::Full => out.write_str("admin queue is full, expected a free entry"),
            Self::NoSuchQueue { id } => write!(out, "queue pair {id} does not exist"),
            Self::NoSuchToken { token } => {
                write!(out, "no command with token {token:#x} is outstanding")
            }
            Self::QueueLimit { granted } => {
                write!(out, "all {granted} I/O queue pairs that the controller grants are in use")
            }
            Self::OutOfRange { what, found, min, max } => {
                write!(out, "{what} is {found}, expected {min} to {max}")
            }
            Self::Memory { len_bytes } => {
                write!(out, "no {len_bytes} bytes left that the device can reach")
            }
            Self::Reserved { command } => {
                write!(out, "{command} is reserved for the driver itself")
            }
            Self::Unsupported { command } => write!(out, "controller does not support {command}"),
        }
    }
}

impl core::error::Error for ControllerError {}
impl core::error::Error for BringupError {}
impl core::error::Error for InvalidValue {}
impl core::error::Error for RequestError {}

impl From<BringupError> for ControllerError {
    fn from(error: BringupError) -> Self {
        Self::Bringup(error)
    }
}

impl From<CmbRegisterError> for ControllerError {
    fn from(lie: CmbRegisterError) -> Self {
        Self::MemoryBuffer(lie)
    }
}

impl From<InvalidValue> for ControllerError {
    fn from(lie: InvalidValue) -> Self {
        Self::InvalidData(lie)
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{ErrorCategory, Span};
    use tenmil_wire::Status;

    use super::{ControllerError, InvalidValue, RequestError, ResetCause};
    use crate::bringup::{BringupError, Register};
    use crate::{InvalidCompletion, ResetReason};

    #[test]
    fn error_text_names_found_and_expected_values() {
        let late =
            BringupError::Timeout { want_ready: true, allowed: Span::from_ms(7_500), csts: 0 };
        let cause = ResetCause::Queue { id: 3, reason: ResetReason::CommandTimeout { cid: 0x105 } };
        let within = Span::from_ms(60_000);
        let lie = InvalidValue {
            field: "identify controller: SQES",
            found: 0x55,
            expected: "6 included",
        };
        let cases: [(ControllerError, &str); 7] = [
            (late.into(), "bring up: CSTS is 0x00000000 after 7500 ms, expected RDY=1"),
            (
                BringupError::Removed { register: Register::Csts }.into(),
                "bring up: CSTS reads as all ones, expected a controller",
            ),
            (lie.into(), "identify controller: SQES is 0x55, expected 6 included"),
            (
                ControllerError::CommandFailed {
                    command: "identify",
                    status: Status::INVALID_FIELD,
                },
                "identify: Invalid Field in Command (SCT 0x0, SC 0x02), expected success",
            ),
            (
                ControllerError::TooManyResets { resets: 4, within, cause },
                "reset: 4 resets within 60 s, the last because command 0x0105 on queue 3 missed \
                 its deadline and its abort",
            ),
            (
                ControllerError::DmaActive { waited: within },
                "revoke DMA: an access is in progress after 60 s, expected none; its memory \
                 is not freed",
            ),
            (
                ControllerError::Memory { what: "admin rings", len_bytes: 8192 },
                "allocate admin rings: no 8192 bytes left that the device can reach",
            ),
        ];
        for (error, text) in cases {
            assert_eq!(error.to_string(), text);
        }
        let lied = ResetReason::InvalidCompletion(InvalidCompletion::NotInFlight { cid: 9 });
        assert_eq!(
            ResetCause::Queue { id: 1, reason: lied }.to_string(),
            "a completion on queue 1 carried the identifier not in flight 0x0009"
        );
    }

    #[test]
    fn invalid_data_and_timeouts_are_remote_and_missing_memory_is_environment() {
        let late = BringupError::Timeout { want_ready: true, allowed: Span::from_ms(1), csts: 0 };
        let pages = BringupError::Unsupported { field: "CAP.MPSMIN", found: 1, expected: "0" };
        let memory = ControllerError::Memory { what: "x", len_bytes: 1 };
        assert_eq!(ControllerError::from(late).category().exit_code(), 3);
        assert_eq!(ControllerError::from(pages).category(), ErrorCategory::Environment);
        assert_eq!(memory.category(), ErrorCategory::Environment);
        assert_eq!(RequestError::Full.category().exit_code(), 2);
    }

    #[test]
    fn a_hint_is_given_only_when_there_is_something_to_do() {
        let late = BringupError::Timeout { want_ready: true, allowed: Span::from_ms(1), csts: 0 };
        assert_eq!(ControllerError::from(late).hint(), None);
        assert!(ControllerError::from(BringupError::Fatal { csts: 2 }).hint().is_some());
    }
}
