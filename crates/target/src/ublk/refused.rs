//! Why something is not served as a local block device.

use std::fmt;

use base::Blame;
use host::Errno;
use host::ublk::NoControl;
use wire::ublk::{ControlOp, Features};

/// Why: whose move it is, a line, and what mends it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Whose move it is.
    pub blame: Blame,
    /// The line.
    pub text: String,
    /// What mends it, if that is known.
    pub hint: Option<String>,
}

impl Refused {
    pub(super) fn new(blame: Blame, text: impl Into<String>) -> Self {
        Self { blame, text: text.into(), hint: None }
    }

    pub(super) fn caller(text: impl Into<String>) -> Self {
        Self::new(Blame::Caller, text)
    }

    pub(super) fn machine(text: impl Into<String>) -> Self {
        Self::new(Blame::Machine, text)
    }

    pub(super) fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }

    /// The kernel has answered a command so.
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

    /// The kernel lacks something that is needed.
    pub(super) fn too_old(has: Features, needs: Features) -> Self {
        let missing: Vec<_> = needs.without(has).names().collect();
        let text = format!(
            "ublk: the kernel has features {:#x}, expected {} as well",
            has.0,
            missing.join(", ")
        );
        Self::machine(text).hint("use Linux 6.5 or newer")
    }
}

impl From<NoControl> for Refused {
    fn from(why: NoControl) -> Self {
        Self { blame: why.blame(), text: why.to_string(), hint: why.hint() }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text)
    }
}

impl std::error::Error for Refused {}
