//! Carrying out what is ordered of a store that is open in this process. Whoever says the same twice is
//! told that it is so already, and nothing is done.

use std::sync::Arc;

use base::{Blame, Span};
use block::MediumError;
use block::store::{Change, OpenStore, PAGE_BYTES, Place};
use block::uri::Uri;
use host::random_seed;

use super::already;
use super::order::Order;
use super::similar;
use super::tell::{self, Told, percents, size};
use crate::orders::Kinds;

/// How long the room of what was deleted is waited for. The rest is given back afterwards.
const GIVING_BACK_MAX: Span = Span::from_secs(60);

/// Carries out an order.
///
/// # Errors
///
/// Why it was not.
pub fn carry_out(open: &Arc<OpenStore>, kinds: Kinds, order: &Order) -> Result<Told, MediumError> {
    let uri = |name: &str| name_of(open, name);
    match order {
        Order::Create { name, size_bytes, unit_bytes, checksums, thick } => {
            create(open, order_of(name, *size_bytes, *unit_bytes, *checksums), *thick)
        }
        Order::CreateOver { name, image, size_bytes, unit_bytes, checksums } => {
            let made = order_of(
                name,
                size_bytes.unwrap_or(u64::from(PAGE_BYTES)),
                *unit_bytes,
                *checksums,
            );
            create_over(open, kinds, made, image, size_bytes.is_some())
        }
        Order::Delete { name, orphan, if_exists } => delete(open, name, *orphan, *if_exists),
        Order::Rename { name, to } => {
            let change = Change::Rename { name: name.clone(), to: to.clone() };
            make(open, change, Some(to), || format!("volume `{name}` is called `{to}` now\n"))
        }
        Order::Resize { name, size_bytes, shrink } => resize(open, name, *size_bytes, *shrink),
        Order::Snapshot { volume, name } => {
            let (of, named) = (volume.clone(), name.clone());
            let change = Change::Snapshot { volume: of, name: named, uuid: uuid() };
            make(open, change, Some(name), || format!("snapshot `{name}` of `{volume}`\n"))
        }
        Order::Clone { from, name } => {
            let change = Change::Clone { from: from.clone(), name: name.clone(), uuid: uuid() };
            let text = || format!("volume `{name}`, a clone of `{from}`: {}\n", uri(name));
            make(open, change, Some(name), text)
        }
        Order::Revert { volume, snapshot } => {
            let change = Change::Revert { volume: volume.clone(), snapshot: snapshot.clone() };
            make(open, change, Some(volume), || {
                open.settle(GIVING_BACK_MAX);
                format!("volume `{volume}` holds what it held when `{snapshot}` was made\n")
            })
        }
        Order::Grow { add, overwrite } => {
            let grown = open.grow(&open.opener(kinds), add.as_slice(), *overwrite)?;
            let (text, is_changed) = (tell::grown_text(&grown), grown.before != grown.blocks);
            Ok(Told { text, is_changed, volume: None, settings: Some(tell::store(open)?) })
        }
        Order::Device { number, uri } => {
            let is_changed = open.note_place(&open.opener(kinds), *number, uri)?;
            let already = if is_changed { "" } else { " already" };
            let text = format!("device {number} of store `{}` is at {uri}{already}\n", open.name());
            Ok(Told { text, is_changed, volume: None, settings: Some(tell::store(open)?) })
        }
        Order::Thresholds { percent } => thresholds(open, *percent),
    }
}

/// What a volume of this store is called by whoever opens it.
fn name_of(open: &OpenStore, name: &str) -> String {
    let device: Result<Uri, _> = open.device().parse();
    device.map_or_else(|_| name.to_owned(), |device| Place::on(&device).with_name(name).to_string())
}

/// A volume that is to be made.
struct New {
    name: String,
    size_bytes: u64,
    unit_bytes: u64,
    checksums: bool,
}

fn order_of(name: &str, size_bytes: u64, unit_bytes: u64, checksums: bool) -> New {
    New { name: name.to_owned(), size_bytes, unit_bytes, checksums }
}

/// Makes a change, unless it is made already. `text` says that it was made, and `name` what the volume
/// is called that it is about.
fn make(
    open: &Arc<OpenStore>,
    change: Change,
    name: Option<&str>,
    text: impl FnOnce() -> String,
) -> Result<Told, MediumError> {
    if let Some(already) = already::say(open, &change)? {
        return Told::new(open, false, already, name);
    }
    open.change(change)?;
    let text = text();
    Told::new(open, true, text, name)
}

fn create(open: &Arc<OpenStore>, new: New, is_thick: bool) -> Result<Told, MediumError> {
    let uri = name_of(open, &new.name);
    let (blocks, unit) =
        (blocks(&uri, "size", new.size_bytes)?, blocks(&uri, "unit", new.unit_bytes)?);
    let New { name, checksums, .. } = new;
    if is_thick && checksums {
        let text = format!(
            "create {uri}: found --thick and --checksums, expected one of them: a block with a \
             checksum moves whenever it is written"
        );
        let refused = MediumError::new(Blame::Caller, text);
        return Err(refused.with_hint("Leave one of them out."));
    }
    let (uuid, kind) = (uuid(), if is_thick { "thick volume" } else { "volume" });
    let change = match is_thick {
        true => Change::CreateThick { name: name.clone(), blocks, unit, uuid },
        false => Change::Create { name: name.clone(), blocks, unit, uuid, checksums },
    };
    let whole = size(blocks * u64::from(PAGE_BYTES));
    make(open, change, Some(&name), || format!("{kind} `{name}` of {whole}: {uri}\n"))
}

/// Makes a volume over an image elsewhere.
fn create_over(
    open: &Arc<OpenStore>,
    kinds: Kinds,
    new: New,
    image: &Uri,
    has_size: bool,
) -> Result<Told, MediumError> {
    let uri = name_of(open, &new.name);
    let unit = blocks(&uri, "unit", new.unit_bytes)?;
    let wanted = blocks(&uri, "size", new.size_bytes)?;
    let parent = open.look_at_parent(&open.opener(kinds), image)?;
    let blocks = if has_size { wanted } else { parent.blocks };
    let New { name, checksums, .. } = new;
    let uuid = uuid();
    let change = Change::CreateOver { name: name.clone(), blocks, unit, uuid, checksums, parent };
    let whole = size(blocks * u64::from(PAGE_BYTES));
    let text = || format!("volume `{name}` of {whole}, a clone of {image}: {uri}\n");
    make(open, change, Some(&name), text)
}

fn delete(
    open: &Arc<OpenStore>,
    name: &str,
    orphan: bool,
    if_exists: bool,
) -> Result<Told, MediumError> {
    let volumes = open.list()?;
    if !volumes.iter().any(|one| one.name == name) {
        if if_exists {
            let text = format!("there is no `{name}`: nothing was deleted\n");
            return Told::new(open, false, text, None);
        }
        return Err(similar::absent(&name_of(open, name), &volumes, name));
    }
    make(open, Change::Delete { name: name.to_owned(), orphan }, None, || {
        let rest = match open.settle(GIVING_BACK_MAX) {
            true => "its room is given back",
            false => "the rest of its room is given back later, while the store is open",
        };
        format!("`{name}` is deleted; {rest}\n")
    })
}

fn resize(
    open: &Arc<OpenStore>,
    name: &str,
    size_bytes: u64,
    shrink: bool,
) -> Result<Told, MediumError> {
    let uri = name_of(open, name);
    let blocks = blocks(&uri, "size", size_bytes)?;
    let info = open.find(name)?;
    let (before, page) = (info.blocks, u64::from(PAGE_BYTES));
    if blocks < before && !shrink {
        let found = before * page;
        let text = format!("resize {uri}: it has {found} bytes, expected {size_bytes} at most");
        let hint = "What lies behind the new end would be lost; if it may, add --shrink.";
        return Err(MediumError::new(Blame::Caller, text).with_hint(hint));
    }
    if blocks == before {
        // Who opened it while it grew may have missed that.
        open.tell_of_growth();
    }
    let text = || {
        let (told, users) = (open.tell_of_growth(), open.users(&info));
        open.settle(GIVING_BACK_MAX);
        let seen = match (told, users) {
            (_, 0) => "",
            (0, _) => "; whoever has it open finds its new end when he opens it again",
            _ if told < users => {
                "; some of those who have it open are told of its new end, the others find it when \
                 they open it again"
            }
            _ => "; those whom it is served to are told of its new end",
        };
        format!("volume `{name}` has {} now{seen}\n", size(size_bytes))
    };
    make(open, Change::Resize { name: name.to_owned(), blocks }, Some(name), text)
}

/// Gives a store other thresholds, unless it has these.
fn thresholds(open: &Arc<OpenStore>, percent: [u8; 2]) -> Result<Told, MediumError> {
    let is_changed = open.usage()?.map(|usage| usage.thresholds) != Some(percent);
    if is_changed {
        open.change(Change::Thresholds { percent })?;
    }
    let already = if is_changed { "" } else { " already" };
    let (parts, name) = (percents(percent), open.name());
    let text =
        format!("it is told when {parts} of the room of store `{name}` are taken{already}\n");
    Ok(Told { text, is_changed, volume: None, settings: Some(tell::store(open)?) })
}

fn blocks(volume: &str, what: &str, bytes: u64) -> Result<u64, MediumError> {
    let page = u64::from(PAGE_BYTES);
    if bytes == 0 || !bytes.is_multiple_of(page) {
        let text = format!("{volume}: {what} is {bytes} bytes, expected a multiple of {page}");
        return Err(MediumError::new(Blame::Caller, text));
    }
    Ok(bytes / page)
}

fn uuid() -> u128 {
    u128::from(random_seed()) << 64 | u128::from(random_seed())
}
