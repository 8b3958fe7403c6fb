//! A number that a device has already: whether one may go on with it, take it, or has to leave it.

use wire::ublk::{DeviceInfo, DeviceState, Parameters};

use super::disk::Disk;
use super::refused::Refused;

/// What becomes of a device that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Its server has died, and we go on with it.
    Recover,
    /// It is of no use to anybody: it is taken away, and another is made.
    Replace,
    /// Its server is dying: look again a little later.
    Wait,
    /// It is left alone.
    Leave(Refused),
}

/// Who serves a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Server {
    /// Whether the process that the kernel names lives.
    pub(super) is_alive: bool,
    /// Whether some process has `/dev/ublkcN` open.
    pub(super) has_it_open: bool,
}

/// What we would serve.
#[derive(Debug)]
pub(super) struct Ours<'a> {
    pub(super) disk: &'a Disk,
    pub(super) signature: u64,
    pub(super) channels_max: u32,
    /// Whether what a dead server of something else has left is to be taken away.
    pub(super) replaces: bool,
}

/// What becomes of `found`.
pub(super) fn judge(
    found: &DeviceInfo,
    parameters: Option<&Parameters>,
    server: Server,
    ours: &Ours<'_>,
) -> Verdict {
    let number = found.device;
    match found.state {
        DeviceState::Live if server.is_alive => Verdict::Leave(
            Refused::caller(format!(
                "ublk:{number} is in use: process {} serves /dev/ublkb{number}",
                found.process
            ))
            .hint("leave the number to the kernel, as ublk:, or end that process"),
        ),
        DeviceState::Live => Verdict::Wait,
        DeviceState::Dead if server.has_it_open => Verdict::Leave(Refused::caller(format!(
            "ublk:{number} is in use: another process is making it, or taking it away"
        ))),
        // Nobody's data wait there: what could be gone on with is quiesced.
        DeviceState::Dead => Verdict::Replace,
        DeviceState::Quiesced if ours.replaces => Verdict::Replace,
        DeviceState::Quiesced => match differs(found, parameters, ours) {
            None => Verdict::Recover,
            Some(why) => Verdict::Leave(
                Refused::caller(format!(
                    "ublk:{number} was left behind by process {}, which has died: {why}",
                    found.process
                ))
                .hint(format!(
                    "serve what it served, or another number; ublk:{number}?replace=yes takes it \
                     away, and what is not written yet is lost"
                )),
            ),
        },
        DeviceState::Other(state) => Verdict::Leave(Refused::machine(format!(
            "ublk:{number} is in state {state}, expected one of 0 to 2"
        ))),
    }
}

/// Why we cannot go on with a device.
fn differs(found: &DeviceInfo, parameters: Option<&Parameters>, ours: &Ours<'_>) -> Option<String> {
    if found.signature != ours.signature {
        return Some("it served something else, expected the same URI".to_owned());
    }
    let Some(theirs) = parameters else {
        return Some("it does not say what its disk is like".to_owned());
    };
    let wanted = ours.disk.parameters();
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
    if found.io_bytes_max > ours.disk.io_bytes_max() {
        return Some(format!(
            "its requests have {} bytes, expected {} at most",
            found.io_bytes_max,
            ours.disk.io_bytes_max()
        ));
    }
    let queues = u32::from(found.queues);
    (queues > ours.channels_max)
        .then(|| format!("it has {queues} queues, expected {} at most", ours.channels_max))
}
