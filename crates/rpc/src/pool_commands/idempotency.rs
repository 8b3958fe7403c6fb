//! Idempotency of commands: detects that the result of a command exists already, when a script is
//! restarted or a response was lost.

use std::sync::Arc;

use tenmil_base::Error;
use tenmil_block::uri::short_form_for_terminal;
use tenmil_drivers::pool::{Info, OpenPool, SnapshotMember, VolumeOp};

/// Returns the message if the result of the change exists already; `None` if the change must be
/// applied or rejected.
pub(super) fn message_if_already_done(
    open: &Arc<OpenPool>,
    change: &VolumeOp,
) -> Result<Option<String>, Error> {
    let volumes = open.list_volumes()?;
    let there = |name: &str| volumes.iter().find(|one| one.name == name);
    let text = match change {
        VolumeOp::Create { name, blocks, unit, checksums, .. } => {
            let is_same = |info: &&Info| {
                let is_made_empty = info.origin == 0 && !info.is_read_only;
                let geometry = (info.blocks, info.unit, info.has_checksums, info.is_thick);
                is_made_empty && info.reach == 0 && geometry == (*blocks, *unit, *checksums, false)
            };
            there(name).filter(is_same).map(|_| format!("volume `{name}` is there already\n"))
        }
        VolumeOp::CreateThick { name, blocks, unit, .. } => {
            let is_same = |info: &&Info| {
                info.is_thick && info.origin == 0 && (info.blocks, info.unit) == (*blocks, *unit)
            };
            there(name).filter(is_same).map(|_| format!("volume `{name}` is there already\n"))
        }
        VolumeOp::CreateOver { name, blocks, unit, checksums, parent, .. } => {
            let is_same = |info: &&Info| {
                let is_made_so = info.origin == 0 && !info.is_read_only && !info.is_thick;
                is_made_so
                    && (info.blocks, info.unit, info.has_checksums) == (*blocks, *unit, *checksums)
            };
            match there(name).filter(is_same) {
                Some(info) if open.parent(info)?.as_ref() == Some(parent) => {
                    let uri = short_form_for_terminal(&parent.uri);
                    Some(format!("volume `{name}`, a clone of {uri}, is there already\n"))
                }
                _ => None,
            }
        }
        VolumeOp::Rename { name, to } => {
            let is_done = name == to || there(name).is_none();
            let text = || match name == to {
                true => format!("volume `{to}` is called that already\n"),
                false => format!("there is no `{name}`, and `{to}` is there already\n"),
            };
            there(to).filter(|_| is_done).map(|_| text())
        }
        VolumeOp::Resize { name, blocks } => there(name)
            .filter(|info| info.blocks == *blocks && !info.is_read_only)
            .map(|_| format!("volume `{name}` has that size already\n")),
        VolumeOp::Decouple { name } => there(name)
            .filter(|info| info.origin == 0 && info.reach == 0 && !info.is_read_only)
            .map(|_| format!("volume `{name}` is on its own already\n")),
        VolumeOp::Snapshot { volume, name, .. } => match (there(volume), there(name)) {
            (Some(volume), Some(snapshot)) if is_snapshot_of(volume, snapshot) => {
                let said = format!("snapshot `{name}` of `{}` is there already\n", volume.name);
                is_unchanged_since_snapshot(open, volume, snapshot)?.then_some(said)
            }
            _ => None,
        },
        VolumeOp::Snapshots { members } => {
            for SnapshotMember { volume, name, .. } in members {
                match (there(volume), there(name)) {
                    (Some(volume), Some(snapshot))
                        if is_snapshot_of(volume, snapshot)
                            && is_unchanged_since_snapshot(open, volume, snapshot)? => {}
                    _ => return Ok(None),
                }
            }
            Some(format!("all {} snapshots are there already\n", members.len()))
        }
        VolumeOp::Clone { from, name, .. } => match (there(from), there(name)) {
            (Some(from), Some(clone)) if clone.origin == from.id && !clone.is_read_only => {
                Some(format!("volume `{name}`, a clone of `{}`, is there already\n", from.name))
            }
            _ => None,
        },
        VolumeOp::Rollback { volume, snapshot } => match (there(volume), there(snapshot)) {
            (Some(volume), Some(snapshot)) if is_snapshot_of(volume, snapshot) => {
                let (volume_name, name) = (&volume.name, &snapshot.name);
                let said = format!("volume `{volume_name}` holds what `{name}` has already\n");
                is_unchanged_since_snapshot(open, volume, snapshot)?.then_some(said)
            }
            _ => None,
        },
        VolumeOp::Delete { .. }
        | VolumeOp::ConvertToSnapshot { .. }
        | VolumeOp::Thresholds { .. } => None,
    };
    Ok(text)
}

fn is_snapshot_of(volume: &Info, snapshot: &Info) -> bool {
    snapshot.is_read_only && snapshot.origin == volume.id
}

/// Whether a volume is unchanged since its snapshot, according to their maps.
fn is_unchanged_since_snapshot(
    open: &Arc<OpenPool>,
    volume: &Info,
    snapshot: &Info,
) -> Result<bool, Error> {
    let mut differ = volume.blocks != snapshot.blocks;
    open.for_each_difference(Some(snapshot), volume, &mut |_| {
        differ = true;
        Ok(())
    })?;
    Ok(!differ)
}
