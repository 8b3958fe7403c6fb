//! Error categories.

/// Class of an error. Exit codes and retry policies derive from it, never from text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorCategory {
    /// The request or its arguments are invalid.
    Usage,
    /// The local machine is not set up for the request.
    Environment,
    /// The device or peer violated its protocol, or failed.
    Remote,
}

impl ErrorCategory {
    /// Exit code of a program that fails with this category: 2 for usage, 1 for environment, 3 for
    /// remote.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Environment => 1,
            Self::Usage => 2,
            Self::Remote => 3,
        }
    }
}
