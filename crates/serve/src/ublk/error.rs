//! Errors of the ublk server.

use std::fmt;

use tenmil_base::ErrorCategory;
use tenmil_linux::Errno;
use tenmil_linux::ublk::ControlError;
use tenmil_wire::ublk::{ControlOp, Features};

/// Error with its category, message and hint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UblkError {
    /// Category: usage, environment or remote.
    pub category: ErrorCategory,
    /// One-line message.
    pub text: String,
    /// Command or change that fixes it, if known.
    pub hint: Option<String>,
}

impl UblkError {
    pub(super) fn new(category: ErrorCategory, text: impl Into<String>) -> Self {
        Self { category, text: text.into(), hint: None }
    }

    pub(super) fn caller(text: impl Into<String>) -> Self {
        Self::new(ErrorCategory::Usage, text)
    }

    pub(super) fn machine(text: impl Into<String>) -> Self {
        Self::new(ErrorCategory::Environment, text)
    }

    pub(super) fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }

    /// Translates a failed control command.
    pub(super) fn of(op: ControlOp, device: &str, errno: Errno) -> Self {
        let refused = Self::machine(format!("{device}: {}: {errno}", op.name()));
        match errno {
            Errno::PERM | Errno::ACCESS => refused.hint(
                "run it as root, with sudo: the kernel lets only CAP_SYS_ADMIN serve a disk by user \
                 copy",
            ),
            Errno::INVAL if op == ControlOp::StartRecovery => refused.hint(format!(
                "a process died before it had gone on with it, and the kernel lets nobody try again: \
                 {device}?replace=yes takes it away, and what is not written yet is lost"
            )),
            Errno::EXIST => refused.hint("another process was faster: try again"),
            Errno::INVAL if op == ControlOp::AddDevice => refused.hint(
                "the kernel has a largest number for devices: leave it to the kernel, as ublk:",
            ),
            _ => refused,
        }
    }

    /// Error for a kernel without a required feature.
    pub(super) fn too_old(has: Features, needs: Features) -> Self {
        let missing: Vec<_> = needs.difference(has).names().collect();
        let text = format!(
            "ublk: the kernel has features {:#x}, expected {} as well",
            has.0,
            missing.join(", ")
        );
        Self::machine(text).hint("use Linux 6.5 or newer")
    }
}

impl From<ControlError> for UblkError {
    fn from(why: ControlError) -> Self {
        Self { category: why.category(), text: why.to_string(), hint: why.hint() }
    }
}

impl fmt::Display for UblkError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text)
    }
}

impl std::error::Error for UblkError {}
