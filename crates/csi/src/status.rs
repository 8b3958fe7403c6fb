//! Error of a call: a code of gRPC and a message.

use std::fmt;

use tenmil_base::ErrorCategory;
use tenmil_rpc::{ErrorCode, RpcError};

/// Result of a call or of one of its steps.
pub(crate) type CallResult<T> = Result<T, Status>;

/// Error of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Status {
    pub(crate) code: Code,
    pub(crate) message: String,
}

/// Code of an error (gRPC status codes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    AlreadyExists = 6,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    /// Another call for the same object is in progress, or a token of a list is not one.
    Aborted = 10,
    OutOfRange = 11,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
}

impl Code {
    /// Name of the code in gRPC.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::InvalidArgument => "INVALID_ARGUMENT",
            Self::DeadlineExceeded => "DEADLINE_EXCEEDED",
            Self::NotFound => "NOT_FOUND",
            Self::AlreadyExists => "ALREADY_EXISTS",
            Self::ResourceExhausted => "RESOURCE_EXHAUSTED",
            Self::FailedPrecondition => "FAILED_PRECONDITION",
            Self::Aborted => "ABORTED",
            Self::OutOfRange => "OUT_OF_RANGE",
            Self::Unimplemented => "UNIMPLEMENTED",
            Self::Internal => "INTERNAL",
            Self::Unavailable => "UNAVAILABLE",
        }
    }

    /// `None` for a code that the driver does not use.
    pub(crate) fn from_number(number: u16) -> Option<Self> {
        let all = [
            Self::InvalidArgument,
            Self::DeadlineExceeded,
            Self::NotFound,
            Self::AlreadyExists,
            Self::ResourceExhausted,
            Self::FailedPrecondition,
            Self::Aborted,
            Self::OutOfRange,
            Self::Unimplemented,
            Self::Internal,
            Self::Unavailable,
        ];
        all.into_iter().find(|code| *code as u16 == number)
    }
}

impl Status {
    pub(crate) fn new(code: Code, message: impl fmt::Display) -> Self {
        Self { code, message: message.to_string() }
    }

    pub(crate) fn invalid_argument(message: impl fmt::Display) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    pub(crate) fn not_found(message: impl fmt::Display) -> Self {
        Self::new(Code::NotFound, message)
    }

    pub(crate) fn already_exists(message: impl fmt::Display) -> Self {
        Self::new(Code::AlreadyExists, message)
    }

    pub(crate) fn failed_precondition(message: impl fmt::Display) -> Self {
        Self::new(Code::FailedPrecondition, message)
    }

    pub(crate) fn internal(message: impl fmt::Display) -> Self {
        Self::new(Code::Internal, message)
    }

    pub(crate) fn unavailable(message: impl fmt::Display) -> Self {
        Self::new(Code::Unavailable, message)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.code.name(), self.message)
    }
}

impl From<RpcError> for Status {
    /// The driver checks what it asks for before it asks; what the API refuses nevertheless is a state of the
    /// storage server.
    fn from(error: RpcError) -> Self {
        let code = match error.code {
            ErrorCode::NotFound => Code::NotFound,
            ErrorCode::Timeout => Code::DeadlineExceeded,
            ErrorCode::Busy | ErrorCode::NoProcess | ErrorCode::ConnectionClosed => {
                Code::Unavailable
            }
            ErrorCode::Failed if error.category == ErrorCategory::Usage => Code::FailedPrecondition,
            _ => Code::Internal,
        };
        let hint = error.hint.map(|hint| format!(" ({hint})")).unwrap_or_default();
        Self::new(code, format!("{}{hint}", error.message))
    }
}

/// Error if a required field is empty.
pub(crate) fn check_present(field: &str, value: &str) -> CallResult<()> {
    match value.is_empty() {
        true => Err(Status::invalid_argument(format!("{field}: missing"))),
        false => Ok(()),
    }
}
