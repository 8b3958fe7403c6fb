//! Errors of the ublk server.

use tenmil_base::Error;
use tenmil_linux::Errno;
use tenmil_wire::ublk::{ControlOp, Features};

/// Translates a failed control command.
pub(super) fn control_command_error(op: ControlOp, device: &str, errno: Errno) -> Error {
    let refused = Error::environment(format!("{device}: {}: {errno}", op.action_text()));
    match errno {
        Errno::PERM | Errno::ACCESS => refused.with_hint(
            "run it as root, with sudo: the kernel lets only CAP_SYS_ADMIN serve a disk by user \
             copy",
        ),
        Errno::INVAL if op == ControlOp::StartRecovery => refused.with_hint(format!(
            "a process died before it had recovered the device, and the kernel allows no second attempt: \
             {device}?replace=yes deletes it, and data that is not written yet is lost"
        )),
        Errno::EXIST => refused.with_hint("another process was faster: try again"),
        Errno::INVAL if op == ControlOp::AddDevice => refused.with_hint(
            "the kernel has a largest number for devices: leave it to the kernel, as ublk:",
        ),
        _ => refused,
    }
}

/// Error for a kernel without a required feature.
pub(super) fn missing_features_error(has: Features, needs: Features) -> Error {
    let missing: Vec<_> = needs.difference(has).names().collect();
    let text = format!(
        "ublk: the kernel has features {:#x}, expected {} as well",
        has.0,
        missing.join(", ")
    );
    Error::environment(text).with_hint("use Linux 6.5 or newer")
}
