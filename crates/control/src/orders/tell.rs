//! What is told of a store, its volumes, and what was done with them: the same to whoever has the store
//! open himself and to whoever asks the process that has.

use std::fmt::Write as _;
use std::sync::Arc;

use block::MediumError;
use block::store::{
    Account, Bad, Carried, Cause, Checked, CheckedParent, Counted, DeviceInfo, Grown, Info,
    OpenStore, PAGE_BYTES, Parent, Scrubbed,
};
use serde_json::{Value, json};

use crate::shape::{Field, Shape};

const TEXT: Shape = Shape::Maybe(&Shape::Text);
const FLAG: Shape = Shape::Maybe(&Shape::Flag);

const DEVICE: &[Field] = &[
    Field::new("number", Shape::Whole, "its number; that of the first is 0"),
    Field::new("uri", Shape::Text, "where it is"),
    Field::new("size_bytes", Shape::Whole, "how much of it the store has"),
];

/// What is told of a store.
pub const STORE: &[Field] = &[
    Field::new("uri", Shape::Text, "the device that it is on, as it was opened"),
    Field::new("name", Shape::Text, "its name"),
    Field::new("uuid", Shape::Text, "which store it is"),
    Field::new("generation", Shape::Whole, "the last transaction that survives a loss of power"),
    Field::new("volumes", Shape::Whole, "how many volumes and snapshots it has"),
    Field::new("size_bytes", Shape::Whole, "how large it is"),
    Field::new("used_bytes", Shape::Whole, "taken by data and metadata, as of the last commit"),
    Field::new("free_bytes", Shape::Whole, "may be given out"),
    Field::new("reserved_bytes", Shape::Whole, "how much of that is kept for what must not fail"),
    Field::new("reserved_for_thick_bytes", Shape::Whole, "and how much of it for thick volumes"),
    Field::new("written_bytes", Shape::Whole, "written by all volumes, each for itself"),
    Field::new("promised_bytes", Shape::Whole, "the sizes of all that can be written, together"),
    Field::new(
        "thresholds_percent",
        Shape::Wholes,
        "how much of its room is taken when it is told",
    ),
    Field::new("health", Shape::Text, "healthy, or stopped: it takes no changes"),
    Field::new("stopped_because", TEXT, "why it takes none"),
    Field::new("losses", Shape::Whole, "how often its device failed with unflushed writes"),
    Field::new("identity", Shape::Text, "its device, files by their numbers"),
    Field::new("devices", Shape::Rows(DEVICE), "all that it lies on"),
];

const PARENT: &[Field] = &[
    Field::new("uri", Shape::Text, "what it is"),
    Field::new("size_bytes", Shape::Whole, "how large it is"),
    Field::new("block_bytes", Shape::Whole, "bytes in its blocks"),
    Field::new("reach_bytes", Shape::Whole, "how much of the volume is read from it still"),
];

/// What is told of a volume without reading its map.
pub const VOLUME: &[Field] = &[
    Field::new("name", Shape::Text, "its name"),
    Field::new("number", Shape::Whole, "its number, which no other volume of the store ever has"),
    Field::new("uuid", Shape::Text, "which volume it is"),
    Field::new("origin", TEXT, "what it was made from, if that is there"),
    Field::new("read_only", Shape::Flag, "whether it is a snapshot"),
    Field::new("size_bytes", Shape::Whole, "how large it is"),
    Field::new("used_bytes", Shape::Whole, "what was written to it and not trimmed"),
    Field::new("unit_bytes", Shape::Whole, "in what pieces room is given to it"),
    Field::new("checksums", Shape::Flag, "whether its blocks have checksums"),
    Field::new("thick", Shape::Flag, "whether it has room for all of its blocks"),
    Field::new(
        "parent",
        Shape::Maybe(&Shape::Record(PARENT)),
        "the image below it, if there is one",
    ),
];

/// The same, with the room that it takes.
pub const LISTED: &[Field] = &[
    VOLUME[0],
    VOLUME[1],
    VOLUME[2],
    VOLUME[3],
    VOLUME[4],
    VOLUME[5],
    VOLUME[6],
    VOLUME[7],
    VOLUME[8],
    VOLUME[9],
    VOLUME[10],
    Field::new("shared_bytes", Shape::Whole, "how much of it others have as well"),
    Field::new("unique_bytes", Shape::Whole, "what deleting it would give back"),
    Field::new("reserved_bytes", Shape::Whole, "room of its own that holds nothing"),
    Field::new("promise_kept", FLAG, "whether no first write to a thick one finds the store full"),
    Field::new("users", Shape::Whole, "how often it is open, to be served or used"),
];

/// What came of an order.
pub const TOLD: &[Field] = &[
    Field::new("text", Shape::Text, "what was done, or why nothing had to be, for people"),
    Field::new("changed", Shape::Flag, "whether it was done now; else it was so already"),
    Field::new("volume", Shape::Maybe(&Shape::Record(VOLUME)), "the volume, if there still is one"),
    Field::new("settings", Shape::Maybe(&Shape::Record(STORE)), "the store, if it was about that"),
];

/// What came of an order.
#[derive(Clone, Debug, PartialEq)]
pub struct Told {
    /// What was done, or why nothing had to be: lines for people.
    pub text: String,
    /// Whether it was done now; else it was so already.
    pub is_changed: bool,
    /// The volume that it was about, if there still is one.
    pub volume: Option<Value>,
    /// The store, if it was about that.
    pub settings: Option<Value>,
}

impl Told {
    /// What came of a change to the volume that has this name now.
    pub fn new(
        open: &OpenStore,
        is_changed: bool,
        text: String,
        name: Option<&str>,
    ) -> Result<Self, MediumError> {
        let volumes = open.list()?;
        let found = volumes.iter().find(|info| Some(&*info.name) == name);
        let volume = match found {
            Some(info) => Some(volume(info, &volumes, open.parent(info)?.as_ref())),
            None => None,
        };
        Ok(Self { text, is_changed, volume, settings: None })
    }

    /// As it stands in an answer.
    pub fn as_json(&self) -> Value {
        let Self { text, is_changed, volume, settings } = self;
        json!({ "text": text, "changed": is_changed, "volume": volume, "settings": settings })
    }

    /// Reads an answer. `None` if it is none.
    pub fn from_json(answer: &Value) -> Option<Self> {
        let some = |name: &str| answer.get(name).filter(|value| !value.is_null()).cloned();
        Some(Self {
            text: answer.get("text")?.as_str()?.to_owned(),
            is_changed: answer.get("changed")?.as_bool()?,
            volume: some("volume"),
            settings: some("settings"),
        })
    }
}

const fn bytes(blocks: u64) -> u64 {
    blocks * PAGE_BYTES as u64
}

/// What is known of a volume without reading its map.
fn volume(info: &Info, volumes: &[Info], parent: Option<&Parent>) -> Value {
    let origin = volumes.iter().find(|one| one.id == info.origin).map(|one| &*one.name);
    let parent = parent.map(|parent| {
        json!({
            "uri": parent.uri,
            "size_bytes": bytes(parent.blocks),
            "block_bytes": parent.block_bytes,
            "reach_bytes": bytes(info.reach),
        })
    });
    json!({
        "name": info.name,
        "number": info.id,
        "uuid": format!("{:032x}", info.uuid),
        "origin": origin,
        "read_only": info.is_read_only,
        "size_bytes": bytes(info.blocks),
        "used_bytes": bytes(info.mapped),
        "unit_bytes": bytes(info.unit),
        "checksums": info.has_checksums,
        "thick": info.is_thick,
        "parent": parent,
    })
}

/// All volumes of a store, and how much room each takes.
///
/// # Errors
///
/// If what lists them, or a map, is damaged.
pub fn volumes(open: &Arc<OpenStore>) -> Result<Value, MediumError> {
    let all = open.list()?;
    let row = |info: &Info| {
        let account: Account = open.account(&info.name)?;
        let mut row = volume(info, &all, open.parent(info)?.as_ref());
        row["shared_bytes"] = bytes(account.shared).into();
        row["unique_bytes"] = bytes(account.unique).into();
        row["reserved_bytes"] = bytes(account.reserved).into();
        row["promise_kept"] = info.is_thick.then(|| account.own() == info.blocks).into();
        row["users"] = open.users(info).into();
        Ok(row)
    };
    let is_there = |info: &Info| -> Result<bool, MediumError> {
        Ok(open.list()?.iter().any(|one| (one.id, &one.name) == (info.id, &info.name)))
    };
    let mut rows = Vec::with_capacity(all.len());
    for info in &all {
        match row(info) {
            Ok(row) => rows.push(row),
            Err(error) if is_there(info)? => return Err(error),
            // It went, or has another name, since the list was made.
            Err(_) => {}
        }
    }
    Ok(rows.into())
}

/// What a store is, and how its room is used.
///
/// # Errors
///
/// If what says so is damaged.
pub fn store(open: &Arc<OpenStore>) -> Result<Value, MediumError> {
    let usage = open.usage()?.ok_or_else(|| {
        let text = format!("{}: the store does not say how it is used", open.device());
        MediumError::new(base::Blame::Peer, text)
    })?;
    let volumes = open.list()?;
    let promised = volumes.iter().filter(|info| !info.is_read_only).map(|info| info.blocks);
    let thresholds: Vec<u8> = usage.thresholds.into_iter().filter(|one| *one > 0).collect();
    let stopped = open.stopped_because();
    Ok(json!({
        "uri": open.device(),
        "name": open.name(),
        "uuid": format!("{:032x}", open.uuid()),
        "generation": open.generation(),
        "volumes": usage.volumes,
        "size_bytes": bytes(usage.blocks),
        "used_bytes": bytes(usage.used),
        "free_bytes": bytes(usage.free),
        "reserved_bytes": bytes(usage.kept + usage.promised),
        "reserved_for_thick_bytes": bytes(usage.promised),
        "written_bytes": volumes.iter().map(|info| bytes(info.mapped)).sum::<u64>(),
        "promised_bytes": bytes(promised.sum()),
        "thresholds_percent": thresholds,
        "health": if stopped.is_some() { "stopped" } else { "healthy" },
        "stopped_because": stopped,
        "losses": open.losses(),
        "identity": open.identity(),
        "devices": open.devices().iter().map(device).collect::<Vec<_>>(),
    }))
}

/// A device of a store.
pub fn device(device: &DeviceInfo) -> Value {
    let DeviceInfo { number, uri, blocks } = device;
    json!({ "number": number, "uri": uri, "size_bytes": bytes(*blocks) })
}

/// A line for each of several devices.
pub fn devices_text(devices: &Value) -> String {
    let line = |device: &Value| {
        let [number, bytes] = ["number", "size_bytes"].map(|name| device[name].as_u64());
        let (uri, bytes) = (device["uri"].as_str().unwrap_or_default(), bytes.unwrap_or_default());
        format!("  device {}: {} on {uri}\n", number.unwrap_or_default(), size(bytes))
    };
    let several = devices.as_array().filter(|devices| devices.len() > 1);
    several.into_iter().flatten().map(line).collect()
}

/// What a store was and is, for people.
pub fn grown_text(grown: &Grown) -> String {
    let Grown { before, blocks, were_there, devices } = grown;
    let mut text = String::new();
    for number in were_there {
        if let Some(device) = devices.iter().find(|device| device.number == *number) {
            let _ = writeln!(text, "{} is device {number} of the store already", device.uri);
        }
    }
    let [before, now] = [before, blocks].map(|blocks| size(bytes(*blocks)));
    let _ = match before == now {
        true if devices.len() == 1 => {
            writeln!(text, "the store has {now} already, as its device has")
        }
        true => writeln!(text, "the store has {now} already, as its devices have"),
        false => writeln!(text, "the store has {now} now, and had {before}"),
    };
    text += &devices_text(&devices.iter().map(device).collect());
    text
}

/// What was sent or received.
pub fn carried(carried: &Carried) -> Value {
    let Carried { info, base, data_blocks, hole_blocks, was_there } = carried;
    json!({
        "name": info.name,
        "uuid": format!("{:032x}", info.uuid),
        "size_bytes": bytes(info.blocks),
        "base": base.as_ref().map(|base| &base.name),
        "data_bytes": bytes(*data_blocks),
        "hole_bytes": bytes(*hole_blocks),
        "was_there": was_there,
    })
}

/// What a look at all metadata has found.
pub fn checked(checked: &Checked) -> Value {
    let Checked { name, uuid, generation, devices, damaged, report, parents } = checked;
    let parent = |one: &CheckedParent| json!({ "uri": one.parent.uri, "volumes": one.volumes, "problem": one.problem });
    let counted = |Counted { volume, name, account }: &Counted| {
        json!({
            "number": volume,
            "name": name,
            "used_blocks": account.used,
            "shared_blocks": account.shared,
            "unique_blocks": account.unique,
            "reserved_blocks": account.reserved,
            "missing_blocks": account.missing,
        })
    };
    let found = report.findings.iter().map(ToString::to_string);
    let problems: Vec<String> = damaged.iter().cloned().chain(found).collect();
    json!({
        "name": name,
        "uuid": format!("{uuid:032x}"),
        "generation": generation,
        "devices": devices.iter().map(device).collect::<Vec<Value>>(),
        "clean": problems.is_empty(),
        "problems": problems,
        "volumes": report.volumes,
        "accounts": report.accounts.iter().map(counted).collect::<Vec<Value>>(),
        "metadata_blocks": report.metadata,
        "used_blocks": report.used,
        "parents": parents.iter().map(parent).collect::<Vec<Value>>(),
    })
}

/// What a scrub has found.
pub fn scrubbed(open: &OpenStore, scrubbed: &[Scrubbed]) -> Value {
    let bad = |bad: &Bad| {
        json!({
            "offset_bytes": bytes(bad.block),
            "bytes": bytes(bad.blocks),
            "store_block": bad.at,
            "cause": match bad.cause {
                Cause::Unread => "unread",
                Cause::Checksum => "checksum",
                Cause::Metadata => "metadata",
            },
            "shared_with": bad.shared_with,
        })
    };
    let volume = |volume: &Scrubbed| {
        json!({
            "name": volume.info.name,
            "checksums": volume.info.has_checksums,
            "read_bytes": bytes(volume.blocks),
            "damaged_bytes": bytes(volume.bad_blocks),
            "damaged": volume.bad.iter().map(bad).collect::<Vec<Value>>(),
        })
    };
    json!({
        "name": open.name(),
        "uuid": format!("{:032x}", open.uuid()),
        "clean": scrubbed.iter().all(|volume| volume.bad_blocks == 0),
        "volumes": scrubbed.iter().map(volume).collect::<Vec<Value>>(),
    })
}

/// A number of bytes for people: `512 B`, `1.5 MiB`.
pub fn size(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let step = (63 - (bytes | 1).leading_zeros()) / 10;
    let Some(unit) = step.checked_sub(1).and_then(|index| units.get(index as usize)) else {
        return format!("{bytes} B");
    };
    let tenths = bytes / (1 << (10 * (step - 1))) * 10 / 1024;
    let (whole, tenth) = (tenths / 10, tenths % 10);
    if tenth == 0 { format!("{whole} {unit}") } else { format!("{whole}.{tenth} {unit}") }
}

/// `80 % and 95 %`.
pub fn percents(thresholds: [u8; 2]) -> String {
    let set = thresholds.into_iter().filter(|percent| *percent > 0);
    let each: Vec<String> = set.map(|percent| format!("{percent} %")).collect();
    if each.is_empty() { "no part".into() } else { each.join(" and ") }
}

#[cfg(test)]
mod tests {
    use super::{percents, size};

    #[test]
    fn sizes_and_thresholds_are_for_people() {
        for (bytes, said) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (10 << 30, "10 GiB"),
            (u64::MAX, "15.9 EiB"),
        ] {
            assert_eq!(size(bytes), said);
        }
        assert_eq!([[0, 0], [80, 0], [80, 95]].map(percents), ["no part", "80 %", "80 % and 95 %"]);
    }
}
