//! Why something was not done, and whose move it is.

use core::fmt;
use std::io;

use base::Blame;

/// Why something was not done: one line for people, and whose move it is for programs.
///
/// The line says what we were doing, to what, what we found and what we had expected; lower case,
/// no full stop, so that it can be joined to others with a colon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Whose move it is; the exit code is made from this and never from the text.
    pub blame: Blame,
    /// The line.
    pub text: String,
    /// What to do next, as a sentence, if we know it.
    pub hint: Option<String>,
}

impl Refused {
    /// It is `blame`'s move.
    pub fn of(blame: Blame, text: impl Into<String>) -> Self {
        Self { blame, text: text.into(), hint: None }
    }

    /// The caller asked for something that cannot be.
    pub fn caller(text: impl Into<String>) -> Self {
        Self::of(Blame::Caller, text)
    }

    /// The machine is not set up for it.
    pub fn machine(text: impl Into<String>) -> Self {
        Self::of(Blame::Machine, text)
    }

    /// The controller or peer broke its contract.
    pub fn peer(text: impl Into<String>) -> Self {
        Self::of(Blame::Peer, text)
    }

    /// The same, with the next thing to try.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text)
    }
}

impl core::error::Error for Refused {}

impl From<block::uri::UriError> for Refused {
    fn from(error: block::uri::UriError) -> Self {
        Self::of(error.blame(), error.to_string())
    }
}

impl From<block::guard::NotAllowed> for Refused {
    fn from(error: block::guard::NotAllowed) -> Self {
        Self::caller(error.text).with_hint(error.remedy)
    }
}

impl From<host::file::FileError> for Refused {
    fn from(error: host::file::FileError) -> Self {
        Self::of(error.blame(), error.to_string())
    }
}

impl From<block::MediumError> for Refused {
    fn from(error: block::MediumError) -> Self {
        let hint = error.hint().map(Into::into);
        Self { hint, ..Self::of(error.blame(), error.to_string()) }
    }
}

impl From<Refused> for block::MediumError {
    fn from(refused: Refused) -> Self {
        let error = Self::new(refused.blame, refused.text);
        match refused.hint {
            Some(hint) => error.with_hint(hint),
            None => error,
        }
    }
}

/// Why the kernel refused a path, in words that do not depend on error numbers.
pub(crate) fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "no such file or directory".into(),
        io::ErrorKind::PermissionDenied => "permission denied".into(),
        io::ErrorKind::IsADirectory => "is a directory".into(),
        io::ErrorKind::ReadOnlyFilesystem => "the filesystem is read-only".into(),
        _ => error.to_string(),
    }
}
