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
    /// The caller asked for something that cannot be.
    pub fn caller(text: impl Into<String>) -> Self {
        Self { blame: Blame::Caller, text: text.into(), hint: None }
    }

    /// The machine is not set up for it.
    pub fn machine(text: impl Into<String>) -> Self {
        Self { blame: Blame::Machine, text: text.into(), hint: None }
    }

    /// The controller or peer broke its contract.
    pub fn peer(text: impl Into<String>) -> Self {
        Self { blame: Blame::Peer, text: text.into(), hint: None }
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
