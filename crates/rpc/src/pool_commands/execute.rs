//! Execution of commands on a pool that is open in this process. Commands are idempotent: repeating
//! one changes nothing and reports that the result exists already.

use std::sync::Arc;

use tenmil_base::Error;
use tenmil_base::{ErrorCategory, Span};
use tenmil_block::uri::Uri;
use tenmil_drivers::pool::{OpenPool, PAGE_BYTES, SnapshotMember, VolumeOp, VolumeRef};
use tenmil_linux::random_seed;

use super::idempotency;
use super::missing_volume;
use super::pool_command::PoolCommand;
use super::pool_json::{self, CommandResult, format_bytes, format_percents};
use crate::pool_commands::DeviceKinds;

/// Longest wait for the space of a deleted volume to be freed; the rest is freed in the background.
const GIVING_BACK_MAX: Span = Span::from_secs(60);

/// Executes a command.
///
/// # Errors
///
/// Why it failed.
pub fn execute_command(
    open: &Arc<OpenPool>,
    kinds: DeviceKinds,
    order: &PoolCommand,
) -> Result<CommandResult, Error> {
    let uri = |name: &str| volume_uri(open, name);
    match order {
        PoolCommand::Create { name, size_bytes, unit_bytes, checksums, thick } => {
            create_volume(open, volume_spec(name, *size_bytes, *unit_bytes, *checksums), *thick)
        }
        PoolCommand::CreateOver { name, image, size_bytes, unit_bytes, checksums } => {
            let made = volume_spec(
                name,
                size_bytes.unwrap_or(u64::from(PAGE_BYTES)),
                *unit_bytes,
                *checksums,
            );
            create_from_image(open, kinds, made, image, size_bytes.is_some())
        }
        PoolCommand::Delete { name, orphan, if_exists } => {
            delete_volume(open, name, *orphan, *if_exists)
        }
        PoolCommand::Rename { name, to } => {
            let change = VolumeOp::Rename { name: name.clone(), to: to.clone() };
            apply_unless_done(open, change, Some(to), || {
                format!("volume `{name}` is called `{to}` now\n")
            })
        }
        PoolCommand::Resize { name, size_bytes, shrink } => {
            resize_volume(open, name, *size_bytes, *shrink)
        }
        PoolCommand::Snapshot { volume, name } => {
            let (of, named) = (volume.clone(), name.clone());
            let change = VolumeOp::Snapshot { volume: of, name: named, uuid: new_uuid() };
            apply_unless_done(open, change, Some(name), || {
                format!("snapshot `{name}` of `{volume}`\n")
            })
        }
        PoolCommand::Snapshots { pairs } => {
            let member = |(volume, name): &(String, String)| SnapshotMember {
                volume: volume.clone(),
                name: name.clone(),
                uuid: new_uuid(),
            };
            let change = VolumeOp::Snapshots { members: pairs.iter().map(member).collect() };
            let line =
                |(volume, name): &(String, String)| format!("snapshot `{name}` of `{volume}`\n");
            apply_unless_done(open, change, None, || pairs.iter().map(line).collect())
        }
        PoolCommand::Clone { from, name } => {
            let change =
                VolumeOp::Clone { from: from.clone(), name: name.clone(), uuid: new_uuid() };
            let text = || format!("volume `{name}`, a clone of `{from}`: {}\n", uri(name));
            apply_unless_done(open, change, Some(name), text)
        }
        PoolCommand::Rollback { volume, snapshot } => {
            let change = VolumeOp::Rollback { volume: volume.clone(), snapshot: snapshot.clone() };
            apply_unless_done(open, change, Some(volume), || {
                open.wait_for_reclaim(GIVING_BACK_MAX);
                format!("volume `{volume}` holds what it held when `{snapshot}` was made\n")
            })
        }
        PoolCommand::Grow { add, overwrite } => {
            let grown = open.grow_pool(&open.opener_with_regions(kinds), add, *overwrite)?;
            let (text, is_changed) =
                (pool_json::format_growth(&grown), grown.before != grown.blocks);
            Ok(CommandResult {
                text,
                is_changed,
                volume: None,
                settings: Some(pool_json::pool_json(open)?),
            })
        }
        PoolCommand::Device { number, uri } => {
            let is_changed =
                open.record_device_uri(&open.opener_with_regions(kinds), *number, uri)?;
            let already = if is_changed { "" } else { " already" };
            let text =
                format!("device {number} of pool `{}` is at {uri:#}{already}\n", open.name());
            Ok(CommandResult {
                text,
                is_changed,
                volume: None,
                settings: Some(pool_json::pool_json(open)?),
            })
        }
        PoolCommand::Thresholds { percent } => set_thresholds(open, *percent),
    }
}

/// URI of a volume of this pool.
fn volume_uri(open: &OpenPool, name: &str) -> String {
    let device: Result<Uri, _> = open.device_uri().parse();
    device.map_or_else(
        |_| name.to_owned(),
        |device| format!("{:#}", VolumeRef::pool_on(&device).uri_of_other_volume(name)),
    )
}

/// Properties of a volume to create.
struct VolumeSpec {
    name: String,
    size_bytes: u64,
    unit_bytes: u64,
    checksums: bool,
}

fn volume_spec(name: &str, size_bytes: u64, unit_bytes: u64, checksums: bool) -> VolumeSpec {
    VolumeSpec { name: name.to_owned(), size_bytes, unit_bytes, checksums }
}

/// Applies a change, unless its result exists already. `text` describes the change, and `name` is
/// the name of the affected volume afterwards.
fn apply_unless_done(
    open: &Arc<OpenPool>,
    change: VolumeOp,
    name: Option<&str>,
    text: impl FnOnce() -> String,
) -> Result<CommandResult, Error> {
    if let Some(already) = idempotency::message_if_already_done(open, &change)? {
        return CommandResult::new(open, false, already, name);
    }
    open.execute_volume_op(change)?;
    let text = text();
    CommandResult::new(open, true, text, name)
}

fn create_volume(
    open: &Arc<OpenPool>,
    new: VolumeSpec,
    is_thick: bool,
) -> Result<CommandResult, Error> {
    let uri = volume_uri(open, &new.name);
    let (blocks, unit) = (
        whole_blocks_of_bytes(&uri, "size", new.size_bytes)?,
        whole_blocks_of_bytes(&uri, "cluster size", new.unit_bytes)?,
    );
    let VolumeSpec { name, checksums, .. } = new;
    if is_thick && checksums {
        let text = format!(
            "create {uri}: found --thick and --checksums, expected one of them: a block with a \
             checksum is reallocated whenever it is written"
        );
        let refused = Error::new(ErrorCategory::Usage, text);
        return Err(refused.with_hint("Leave one of them out."));
    }
    let (uuid, kind) = (new_uuid(), if is_thick { "thick volume" } else { "volume" });
    let change = match is_thick {
        true => VolumeOp::CreateThick { name: name.clone(), blocks, unit, uuid },
        false => VolumeOp::Create { name: name.clone(), blocks, unit, uuid, checksums },
    };
    let whole = format_bytes(blocks * u64::from(PAGE_BYTES));
    apply_unless_done(open, change, Some(&name), || format!("{kind} `{name}` of {whole}: {uri}\n"))
}

/// Creates a volume backed by an image outside the pool.
fn create_from_image(
    open: &Arc<OpenPool>,
    kinds: DeviceKinds,
    new: VolumeSpec,
    image: &Uri,
    has_size: bool,
) -> Result<CommandResult, Error> {
    let uri = volume_uri(open, &new.name);
    let unit = whole_blocks_of_bytes(&uri, "cluster size", new.unit_bytes)?;
    let wanted = whole_blocks_of_bytes(&uri, "size", new.size_bytes)?;
    let parent = open.open_and_fingerprint_parent(&open.opener_with_regions(kinds), image)?;
    let blocks = if has_size { wanted } else { parent.blocks };
    let VolumeSpec { name, checksums, .. } = new;
    let uuid = new_uuid();
    let change = VolumeOp::CreateOver { name: name.clone(), blocks, unit, uuid, checksums, parent };
    let whole = format_bytes(blocks * u64::from(PAGE_BYTES));
    let text = || format!("volume `{name}` of {whole}, a clone of {image:#}: {uri}\n");
    apply_unless_done(open, change, Some(&name), text)
}

fn delete_volume(
    open: &Arc<OpenPool>,
    name: &str,
    orphan: bool,
    if_exists: bool,
) -> Result<CommandResult, Error> {
    let volumes = open.list_volumes()?;
    if !volumes.iter().any(|one| one.name == name) {
        if if_exists {
            let text = format!("there is no `{name}`: nothing was deleted\n");
            return CommandResult::new(open, false, text, None);
        }
        return Err(missing_volume::missing_volume_error(&volume_uri(open, name), &volumes, name));
    }
    apply_unless_done(open, VolumeOp::Delete { name: name.to_owned(), orphan }, None, || {
        let rest = match open.wait_for_reclaim(GIVING_BACK_MAX) {
            true => "its space is free",
            false => "the rest of its space is freed later, while the pool is open",
        };
        format!("`{name}` is deleted; {rest}\n")
    })
}

fn resize_volume(
    open: &Arc<OpenPool>,
    name: &str,
    size_bytes: u64,
    shrink: bool,
) -> Result<CommandResult, Error> {
    let uri = volume_uri(open, name);
    let blocks = whole_blocks_of_bytes(&uri, "size", size_bytes)?;
    let info = open.find_volume(name)?;
    let (before, page) = (info.blocks, u64::from(PAGE_BYTES));
    if blocks < before && !shrink {
        let found = before * page;
        let text = format!("resize {uri}: it has {found} bytes, expected {size_bytes} at most");
        let hint = "What lies behind the new end would be lost; if it may, add --shrink.";
        return Err(Error::new(ErrorCategory::Usage, text).with_hint(hint));
    }
    if blocks == before {
        // A client that opened the volume during the growth may have missed the notification.
        open.refresh_all_device_sizes();
    }
    let text = || {
        let (reported, users) = (open.refresh_all_device_sizes(), open.user_count(&info));
        open.wait_for_reclaim(GIVING_BACK_MAX);
        let seen = match (reported, users) {
            (_, 0) => "",
            (0, _) => "; its users see the new size when they open it again",
            _ if reported < users => {
                "; some of its users are notified of the new size, the others see it when \
                 they open it again"
            }
            _ => "; its users are notified of the new size",
        };
        format!("volume `{name}` has {} now{seen}\n", format_bytes(size_bytes))
    };
    apply_unless_done(open, VolumeOp::Resize { name: name.to_owned(), blocks }, Some(name), text)
}

/// Sets the thresholds, unless they are set already.
fn set_thresholds(open: &Arc<OpenPool>, percent: [u8; 2]) -> Result<CommandResult, Error> {
    let is_changed = open.pool_usage()?.map(|usage| usage.thresholds) != Some(percent);
    if is_changed {
        open.execute_volume_op(VolumeOp::Thresholds { percent })?;
    }
    let already = if is_changed { "" } else { " already" };
    let (parts, name) = (format_percents(percent), open.name());
    let text = format!("capacity alerts of pool `{name}`{already}: {parts}\n");
    Ok(CommandResult {
        text,
        is_changed,
        volume: None,
        settings: Some(pool_json::pool_json(open)?),
    })
}

fn whole_blocks_of_bytes(volume: &str, what: &str, bytes: u64) -> Result<u64, Error> {
    let page = u64::from(PAGE_BYTES);
    if bytes == 0 || !bytes.is_multiple_of(page) {
        let text = format!("{volume}: {what} is {bytes} bytes, expected a multiple of {page}");
        return Err(Error::new(ErrorCategory::Usage, text));
    }
    Ok(bytes / page)
}

fn new_uuid() -> u128 {
    u128::from(random_seed()) << 64 | u128::from(random_seed())
}
