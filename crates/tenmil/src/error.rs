//! User-facing error with a category, one line of text and an optional hint.

use core::fmt;
use std::io;

use tenmil_base::ErrorCategory;

/// User-facing error: a category for programs, one line for people.
///
/// The line names what was being done, to what, what was found and what was expected. It is lower case
/// without a full stop, so that it can follow a colon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandError {
    /// Category (usage, environment, remote); exit codes derive from it and never from the text.
    pub blame: ErrorCategory,
    /// One line of text.
    pub text: String,
    /// Next step for the user, as a sentence, if one is known.
    pub hint: Option<String>,
}

impl CommandError {
    /// Creates an error of the category `blame`.
    pub fn of(blame: ErrorCategory, text: impl Into<String>) -> Self {
        Self { blame, text: text.into(), hint: None }
    }

    /// Creates a usage error: the request cannot be satisfied.
    pub fn caller(text: impl Into<String>) -> Self {
        Self::of(ErrorCategory::Usage, text)
    }

    /// Creates an environment error: the machine is not set up for the request.
    pub fn machine(text: impl Into<String>) -> Self {
        Self::of(ErrorCategory::Environment, text)
    }

    /// Creates a remote error: a controller or peer violated its contract.
    pub fn peer(text: impl Into<String>) -> Self {
        Self::of(ErrorCategory::Remote, text)
    }

    /// Adds a hint.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text)
    }
}

impl core::error::Error for CommandError {}

impl From<tenmil_block::uri::UriError> for CommandError {
    fn from(error: tenmil_block::uri::UriError) -> Self {
        Self::of(error.blame(), error.to_string())
    }
}

impl From<tenmil_block::overwrite::OverwriteDenied> for CommandError {
    fn from(error: tenmil_block::overwrite::OverwriteDenied) -> Self {
        Self::caller(error.text).with_hint(error.remedy)
    }
}

impl From<tenmil_linux::file::FileError> for CommandError {
    fn from(error: tenmil_linux::file::FileError) -> Self {
        Self::of(error.blame(), error.to_string())
    }
}

impl From<tenmil_block::DeviceError> for CommandError {
    fn from(error: tenmil_block::DeviceError) -> Self {
        let hint = error.hint().map(Into::into);
        Self { hint, ..Self::of(error.blame(), error.to_string()) }
    }
}

impl From<CommandError> for tenmil_block::DeviceError {
    fn from(refused: CommandError) -> Self {
        let error = Self::new(refused.blame, refused.text);
        match refused.hint {
            Some(hint) => error.with_hint(hint),
            None => error,
        }
    }
}

/// Text of an I/O error on a path, without the error number for common causes.
pub(crate) fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file or directory".into(),
        io::ErrorKind::PermissionDenied => "permission denied".into(),
        io::ErrorKind::IsADirectory => "is a directory".into(),
        io::ErrorKind::ReadOnlyFilesystem => "the filesystem is read-only".into(),
        _ => error.to_string(),
    }
}
