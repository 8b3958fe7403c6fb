//! The error of every interface: a category for programs, one line for people, and a hint.

use core::fmt;

use crate::ErrorCategory;

/// Error with a category, one line of text and an optional hint.
///
/// The line names what was being done, to what, what was found and what was expected. It is lower case
/// without a full stop, so that it can follow a colon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// Category; exit codes and retries derive from it and never from the text.
    pub category: ErrorCategory,
    /// One line of text.
    pub text: String,
    /// Next step for the user, as a sentence, if one is known.
    pub hint: Option<String>,
}

impl Error {
    /// Creates an error from its category and its line.
    pub fn new(category: ErrorCategory, text: impl fmt::Display) -> Self {
        Self { category, text: text.to_string(), hint: None }
    }

    /// Creates a usage error: the request cannot be satisfied.
    pub fn usage(text: impl fmt::Display) -> Self {
        Self::new(ErrorCategory::Usage, text)
    }

    /// Creates an environment error: the machine is not set up for the request.
    pub fn environment(text: impl fmt::Display) -> Self {
        Self::new(ErrorCategory::Environment, text)
    }

    /// Creates a remote error: a controller or peer violated its contract.
    pub fn remote(text: impl fmt::Display) -> Self {
        Self::new(ErrorCategory::Remote, text)
    }

    /// Adds a hint: a sentence that describes the fix.
    #[must_use]
    pub fn with_hint(mut self, hint: impl fmt::Display) -> Self {
        self.hint = Some(hint.to_string());
        self
    }

    /// Prefixes the line with the operation that was in progress.
    #[must_use]
    pub fn with_context(self, what: impl fmt::Display) -> Self {
        Self { text: format!("{what}: {}", self.text), ..self }
    }

    /// The hint, if there is a fix.
    pub fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// The category.
    pub const fn category(&self) -> ErrorCategory {
        self.category
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text)
    }
}

impl core::error::Error for Error {}
