//! Policy for a device number that exists already: recover, replace, wait, or leave it.

use tenmil_base::Error;
use tenmil_wire::ublk::{DeviceInfo, DeviceState, Parameters};

use super::disk::UblkDisk;

/// Action for an existing device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TakeoverAction {
    /// Take it over: its server is dead.
    Recover,
    /// Delete it and create a new one.
    Replace,
    /// Check again later: its server is dying.
    Wait,
    /// Fail with this error.
    Leave(Error),
}

/// State of a device's server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ServerProcess {
    /// Whether the process that the kernel names is alive.
    pub(super) is_alive: bool,
    /// Whether some process has `/dev/ublkcN` open.
    pub(super) has_it_open: bool,
}

/// Device that this process would create.
#[derive(Debug)]
pub(super) struct DesiredDevice<'a> {
    pub(super) disk: &'a UblkDisk,
    pub(super) signature: u64,
    pub(super) channels_max: u32,
    /// Whether to delete a device left behind by a dead server of something else.
    pub(super) replaces: bool,
}

/// Decides what to do with the device `found`.
pub(super) fn decide_takeover(
    found: &DeviceInfo,
    parameters: Option<&Parameters>,
    server: ServerProcess,
    desired: &DesiredDevice<'_>,
) -> TakeoverAction {
    let number = found.device;
    match found.state {
        DeviceState::Live if server.is_alive => TakeoverAction::Leave(
            Error::usage(format!(
                "ublk:{number} is in use: process {} serves /dev/ublkb{number}",
                found.process
            ))
            .with_hint("leave the number to the kernel, as ublk:, or end that process"),
        ),
        DeviceState::Live => TakeoverAction::Wait,
        DeviceState::Dead if server.has_it_open => TakeoverAction::Leave(Error::usage(format!(
            "ublk:{number} is in use: another process is creating or deleting it"
        ))),
        // No requests wait there: a recoverable device is quiesced, not dead.
        DeviceState::Dead => TakeoverAction::Replace,
        DeviceState::Quiesced if desired.replaces => TakeoverAction::Replace,
        DeviceState::Quiesced => match takeover_obstacle(found, parameters, desired) {
            None => TakeoverAction::Recover,
            Some(why) => TakeoverAction::Leave(
                Error::usage(format!(
                    "ublk:{number} was left behind by process {}, which has died: {why}",
                    found.process
                ))
                .with_hint(format!(
                    "serve what it served, or another number; ublk:{number}?replace=yes deletes \
                     it, and data that is not written yet is lost"
                )),
            ),
        },
        DeviceState::Other(state) => TakeoverAction::Leave(Error::environment(format!(
            "ublk:{number} is in state {state}, expected one of 0 to 2"
        ))),
    }
}

/// Why a device cannot be taken over, if it differs from the desired one.
fn takeover_obstacle(
    found: &DeviceInfo,
    parameters: Option<&Parameters>,
    desired: &DesiredDevice<'_>,
) -> Option<String> {
    if found.signature != desired.signature {
        return Some("it served something else, expected the same URI".to_owned());
    }
    let Some(theirs) = parameters else {
        return Some("it does not describe its disk".to_owned());
    };
    let wanted = desired.disk.parameters();
    if (theirs.sectors, theirs.block_shift) != (wanted.sectors, wanted.block_shift) {
        return Some(format!(
            "its disk has {} sectors in blocks of {} bytes, expected {} in blocks of {}",
            theirs.sectors,
            1_u64 << theirs.block_shift.min(63),
            wanted.sectors,
            1_u64 << wanted.block_shift,
        ));
    }
    if theirs.attributes != wanted.attributes {
        return Some(format!(
            "its disk has attributes {:#x}, expected {:#x}: one may write, or has a cache, and the \
             other has not",
            theirs.attributes.0, wanted.attributes.0
        ));
    }
    if found.io_bytes_max > desired.disk.io_bytes_max() {
        return Some(format!(
            "its requests have {} bytes, expected {} at most",
            found.io_bytes_max,
            desired.disk.io_bytes_max()
        ));
    }
    let queues = u32::from(found.queues);
    (queues > desired.channels_max)
        .then(|| format!("it has {queues} queues, expected {} at most", desired.channels_max))
}
