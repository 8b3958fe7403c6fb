//! Execution of commands on a pool that is open in this process. Commands are idempotent: repeating
//! one changes nothing and reports that the result exists already.

use std::sync::Arc;

use tenmil_base::Error;
use tenmil_base::{ErrorCategory, Span};
use tenmil_block::uri::Uri;
use tenmil_drivers::pool::{OpenPool, PAGE_BYTES, VolumeOp, VolumeRef};
use tenmil_linux::random_seed;

use super::command::PoolCommand;
use super::describe::{self, CommandResult, percents, size};
use super::idempotent;
use super::similar;
use crate::pool_commands::DeviceKinds;

/// Longest wait for the space of a deleted volume to be freed; the rest is freed in the background.
const GIVING_BACK_MAX: Span = Span::from_secs(60);

/// Executes a command.
///
/// # Errors
///
/// Why it failed.
pub fn execute(
    open: &Arc<OpenPool>,
    kinds: DeviceKinds,
    order: &PoolCommand,
) -> Result<CommandResult, Error> {
    let uri = |name: &str| name_of(open, name);
    match order {
        PoolCommand::Create { name, size_bytes, unit_bytes, checksums, thick } => {
            create(open, volume_spec(name, *size_bytes, *unit_bytes, *checksums), *thick)
        }
        PoolCommand::CreateOver { name, image, size_bytes, unit_bytes, checksums } => {
            let made = volume_spec(
                name,
                size_bytes.unwrap_or(u64::from(PAGE_BYTES)),
                *unit_bytes,
                *checksums,
            );
            create_over(open, kinds, made, image, size_bytes.is_some())
        }
        PoolCommand::Delete { name, orphan, if_exists } => delete(open, name, *orphan, *if_exists),
        PoolCommand::Rename { name, to } => {
            let change = VolumeOp::Rename { name: name.clone(), to: to.clone() };
            make(open, change, Some(to), || format!("volume `{name}` is called `{to}` now\n"))
        }
        PoolCommand::Resize { name, size_bytes, shrink } => {
            resize(open, name, *size_bytes, *shrink)
        }
        PoolCommand::Snapshot { volume, name } => {
            let (of, named) = (volume.clone(), name.clone());
            let change = VolumeOp::Snapshot { volume: of, name: named, uuid: uuid() };
            make(open, change, Some(name), || format!("snapshot `{name}` of `{volume}`\n"))
        }
        PoolCommand::Clone { from, name } => {
            let change = VolumeOp::Clone { from: from.clone(), name: name.clone(), uuid: uuid() };
            let text = || format!("volume `{name}`, a clone of `{from}`: {}\n", uri(name));
            make(open, change, Some(name), text)
        }
        PoolCommand::Rollback { volume, snapshot } => {
            let change = VolumeOp::Rollback { volume: volume.clone(), snapshot: snapshot.clone() };
            make(open, change, Some(volume), || {
                open.wait_for_reclaim(GIVING_BACK_MAX);
                format!("volume `{volume}` holds what it held when `{snapshot}` was made\n")
            })
        }
        PoolCommand::Grow { add, overwrite } => {
            let grown = open.grow_pool(&open.device_opener(kinds), add, *overwrite)?;
            let (text, is_changed) = (describe::grown_text(&grown), grown.before != grown.blocks);
            Ok(CommandResult {
                text,
                is_changed,
                volume: None,
                settings: Some(describe::store(open)?),
            })
        }
        PoolCommand::Device { number, uri } => {
            let is_changed = open.record_location(&open.device_opener(kinds), *number, uri)?;
            let already = if is_changed { "" } else { " already" };
            let text =
                format!("device {number} of pool `{}` is at {uri:#}{already}\n", open.name());
            Ok(CommandResult {
                text,
                is_changed,
                volume: None,
                settings: Some(describe::store(open)?),
            })
        }
        PoolCommand::Thresholds { percent } => thresholds(open, *percent),
    }
}

/// URI of a volume of this pool.
fn name_of(open: &OpenPool, name: &str) -> String {
    let device: Result<Uri, _> = open.device_uri().parse();
    device.map_or_else(
        |_| name.to_owned(),
        |device| format!("{:#}", VolumeRef::pool_on(&device).with_name(name)),
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
fn make(
    open: &Arc<OpenPool>,
    change: VolumeOp,
    name: Option<&str>,
    text: impl FnOnce() -> String,
) -> Result<CommandResult, Error> {
    if let Some(already) = idempotent::already_done(open, &change)? {
        return CommandResult::new(open, false, already, name);
    }
    open.change_volume(change)?;
    let text = text();
    CommandResult::new(open, true, text, name)
}

fn create(open: &Arc<OpenPool>, new: VolumeSpec, is_thick: bool) -> Result<CommandResult, Error> {
    let uri = name_of(open, &new.name);
    let (blocks, unit) =
        (blocks(&uri, "size", new.size_bytes)?, blocks(&uri, "cluster size", new.unit_bytes)?);
    let VolumeSpec { name, checksums, .. } = new;
    if is_thick && checksums {
        let text = format!(
            "create {uri}: found --thick and --checksums, expected one of them: a block with a \
             checksum is reallocated whenever it is written"
        );
        let refused = Error::new(ErrorCategory::Usage, text);
        return Err(refused.with_hint("Leave one of them out."));
    }
    let (uuid, kind) = (uuid(), if is_thick { "thick volume" } else { "volume" });
    let change = match is_thick {
        true => VolumeOp::CreateThick { name: name.clone(), blocks, unit, uuid },
        false => VolumeOp::Create { name: name.clone(), blocks, unit, uuid, checksums },
    };
    let whole = size(blocks * u64::from(PAGE_BYTES));
    make(open, change, Some(&name), || format!("{kind} `{name}` of {whole}: {uri}\n"))
}

/// Creates a volume backed by an image outside the pool.
fn create_over(
    open: &Arc<OpenPool>,
    kinds: DeviceKinds,
    new: VolumeSpec,
    image: &Uri,
    has_size: bool,
) -> Result<CommandResult, Error> {
    let uri = name_of(open, &new.name);
    let unit = blocks(&uri, "cluster size", new.unit_bytes)?;
    let wanted = blocks(&uri, "size", new.size_bytes)?;
    let parent = open.check_parent(&open.device_opener(kinds), image)?;
    let blocks = if has_size { wanted } else { parent.blocks };
    let VolumeSpec { name, checksums, .. } = new;
    let uuid = uuid();
    let change = VolumeOp::CreateOver { name: name.clone(), blocks, unit, uuid, checksums, parent };
    let whole = size(blocks * u64::from(PAGE_BYTES));
    let text = || format!("volume `{name}` of {whole}, a clone of {image:#}: {uri}\n");
    make(open, change, Some(&name), text)
}

fn delete(
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
        return Err(similar::absent(&name_of(open, name), &volumes, name));
    }
    make(open, VolumeOp::Delete { name: name.to_owned(), orphan }, None, || {
        let rest = match open.wait_for_reclaim(GIVING_BACK_MAX) {
            true => "its space is free",
            false => "the rest of its space is freed later, while the pool is open",
        };
        format!("`{name}` is deleted; {rest}\n")
    })
}

fn resize(
    open: &Arc<OpenPool>,
    name: &str,
    size_bytes: u64,
    shrink: bool,
) -> Result<CommandResult, Error> {
    let uri = name_of(open, name);
    let blocks = blocks(&uri, "size", size_bytes)?;
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
        open.notify_growth();
    }
    let text = || {
        let (told, users) = (open.notify_growth(), open.user_count(&info));
        open.wait_for_reclaim(GIVING_BACK_MAX);
        let seen = match (told, users) {
            (_, 0) => "",
            (0, _) => "; its users see the new size when they open it again",
            _ if told < users => {
                "; some of its users are notified of the new size, the others see it when \
                 they open it again"
            }
            _ => "; its users are notified of the new size",
        };
        format!("volume `{name}` has {} now{seen}\n", size(size_bytes))
    };
    make(open, VolumeOp::Resize { name: name.to_owned(), blocks }, Some(name), text)
}

/// Sets the thresholds, unless they are set already.
fn thresholds(open: &Arc<OpenPool>, percent: [u8; 2]) -> Result<CommandResult, Error> {
    let is_changed = open.pool_usage()?.map(|usage| usage.thresholds) != Some(percent);
    if is_changed {
        open.change_volume(VolumeOp::Thresholds { percent })?;
    }
    let already = if is_changed { "" } else { " already" };
    let (parts, name) = (percents(percent), open.name());
    let text = format!("capacity alerts of pool `{name}`{already}: {parts}\n");
    Ok(CommandResult { text, is_changed, volume: None, settings: Some(describe::store(open)?) })
}

fn blocks(volume: &str, what: &str, bytes: u64) -> Result<u64, Error> {
    let page = u64::from(PAGE_BYTES);
    if bytes == 0 || !bytes.is_multiple_of(page) {
        let text = format!("{volume}: {what} is {bytes} bytes, expected a multiple of {page}");
        return Err(Error::new(ErrorCategory::Usage, text));
    }
    Ok(bytes / page)
}

fn uuid() -> u128 {
    u128::from(random_seed()) << 64 | u128::from(random_seed())
}
