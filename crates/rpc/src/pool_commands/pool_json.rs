//! JSON descriptions of pools, volumes and command results, the same for local and remote
//! execution.

use std::fmt::Write as _;
use std::sync::Arc;

use serde_json::{Value, json};
use tenmil_base::Error;
use tenmil_drivers::pool::{
    CountedUsage, DamageCause, DamagedRun, DeviceInfo, GrowResult, Info, OpenPool, PAGE_BYTES,
    ParentCheckResult, ParentInfo, PoolCheckResult, SpaceUsage, TransferSummary, VolumeScrubReport,
};

use crate::result_type::{FieldSchema, ResultType};
use tenmil_block::uri::short_form_for_terminal;

const TEXT: ResultType = ResultType::Maybe(&ResultType::Text);
const FLAG: ResultType = ResultType::Maybe(&ResultType::Flag);

const DEVICE: &[FieldSchema] = &[
    FieldSchema::new("number", ResultType::Whole, "number of the device; the first is 0"),
    FieldSchema::new("uri", ResultType::Text, "URI"),
    FieldSchema::new("size_bytes", ResultType::Whole, "space used by the pool"),
];

/// Members of a pool description.
pub const STORE: &[FieldSchema] = &[
    FieldSchema::new("uri", ResultType::Text, "URI of its device"),
    FieldSchema::new("name", ResultType::Text, "name"),
    FieldSchema::new("uuid", ResultType::Text, "UUID of the pool"),
    FieldSchema::new("generation", ResultType::Whole, "number of the last committed transaction"),
    FieldSchema::new("volumes", ResultType::Whole, "number of volumes and snapshots"),
    FieldSchema::new("size_bytes", ResultType::Whole, "size"),
    FieldSchema::new(
        "used_bytes",
        ResultType::Whole,
        "space used by data and metadata as of the last commit",
    ),
    FieldSchema::new("free_bytes", ResultType::Whole, "free space"),
    FieldSchema::new(
        "reserved_bytes",
        ResultType::Whole,
        "free space reserved for operations that must not fail",
    ),
    FieldSchema::new(
        "reserved_for_thick_bytes",
        ResultType::Whole,
        "part of it that is reserved for thick volumes",
    ),
    FieldSchema::new(
        "allocated_bytes",
        ResultType::Whole,
        "sum of the allocated space of all volumes; shared blocks count for each",
    ),
    FieldSchema::new(
        "provisioned_bytes",
        ResultType::Whole,
        "provisioned space: sum of the sizes of all writable volumes",
    ),
    FieldSchema::new(
        "thresholds_percent",
        ResultType::Wholes,
        "used space, in percent, at which a warning is emitted",
    ),
    FieldSchema::new(
        "health",
        ResultType::Text,
        "`healthy`, or `stopped` if the pool accepts no changes",
    ),
    FieldSchema::new("stopped_because", TEXT, "why the pool is stopped"),
    FieldSchema::new(
        "losses",
        ResultType::Whole,
        "number of device failures with unflushed writes",
    ),
    FieldSchema::new(
        "identity",
        ResultType::Text,
        "identity of its device, with files identified by inode",
    ),
    FieldSchema::new("devices", ResultType::Rows(DEVICE), "devices of the pool"),
];

const PARENT: &[FieldSchema] = &[
    FieldSchema::new("uri", ResultType::Text, "URI of the image"),
    FieldSchema::new("size_bytes", ResultType::Whole, "size"),
    FieldSchema::new("block_bytes", ResultType::Whole, "block size"),
    FieldSchema::new(
        "overlap_bytes",
        ResultType::Whole,
        "size of the part of the volume that may still be read from the image",
    ),
];

/// Members of a volume description that do not require its map.
pub const VOLUME: &[FieldSchema] = &[
    FieldSchema::new("name", ResultType::Text, "name"),
    FieldSchema::new("number", ResultType::Whole, "identifier, never reused in the pool"),
    FieldSchema::new("uuid", ResultType::Text, "UUID of the volume"),
    FieldSchema::new(
        "origin",
        TEXT,
        "volume or snapshot that it was created from, if that still exists",
    ),
    FieldSchema::new("read_only", ResultType::Flag, "whether the volume is a snapshot"),
    FieldSchema::new("size_bytes", ResultType::Whole, "size"),
    FieldSchema::new("used_bytes", ResultType::Whole, "allocated space: written and not trimmed"),
    FieldSchema::new("cluster_bytes", ResultType::Whole, "cluster size"),
    FieldSchema::new("checksums", ResultType::Flag, "whether its blocks have checksums"),
    FieldSchema::new("thick", ResultType::Flag, "whether space is reserved for all of its blocks"),
    FieldSchema::new(
        "parent",
        ResultType::Maybe(&ResultType::Record(PARENT)),
        "parent image, if there is one",
    ),
];

/// Members of a volume list, with space usage.
pub const LISTED: &[FieldSchema] = &[
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
    FieldSchema::new("shared_bytes", ResultType::Whole, "space shared with other volumes"),
    FieldSchema::new("unique_bytes", ResultType::Whole, "space that a deletion would free"),
    FieldSchema::new("reserved_bytes", ResultType::Whole, "reserved space without data"),
    FieldSchema::new(
        "fully_allocated",
        FLAG,
        "whether all blocks of a thick volume have reserved space",
    ),
    FieldSchema::new("users", ResultType::Whole, "number of times the volume is open"),
];

/// Members of a command result.
pub const FIELDS: &[FieldSchema] = &[
    FieldSchema::new("text", ResultType::Text, "result, as text for people"),
    FieldSchema::new(
        "changed",
        ResultType::Flag,
        "whether anything was changed; false if the result existed already",
    ),
    FieldSchema::new(
        "volume",
        ResultType::Maybe(&ResultType::Record(VOLUME)),
        "volume of the command, if it still exists",
    ),
    FieldSchema::new(
        "settings",
        ResultType::Maybe(&ResultType::Record(STORE)),
        "pool, if its settings were changed",
    ),
];

/// Result of a pool command.
#[derive(Clone, Debug, PartialEq)]
pub struct CommandResult {
    /// What was done, or why nothing had to be done, as lines for people.
    pub text: String,
    /// Whether the command changed anything.
    pub is_changed: bool,
    /// Volume of the command, if it still exists.
    pub volume: Option<Value>,
    /// Pool, if the command concerned its settings.
    pub settings: Option<Value>,
}

impl CommandResult {
    /// Creates the result of a command on the volume that has this name now.
    pub fn new(
        open: &OpenPool,
        is_changed: bool,
        text: String,
        name: Option<&str>,
    ) -> Result<Self, Error> {
        let volumes = open.list_volumes()?;
        let found = volumes.iter().find(|info| Some(&*info.name) == name);
        let volume = match found {
            Some(info) => Some(volume_json(info, &volumes, open.parent(info)?.as_ref())),
            None => None,
        };
        Ok(Self { text, is_changed, volume, settings: None })
    }

    /// JSON value of the result.
    pub fn as_json(&self) -> Value {
        let Self { text, is_changed, volume, settings } = self;
        json!({ "text": text, "changed": is_changed, "volume": volume, "settings": settings })
    }

    /// Parses a result. `None` if it is malformed.
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

const fn bytes_of_blocks(blocks: u64) -> u64 {
    blocks * PAGE_BYTES as u64
}

/// Describes a volume without reading its map.
fn volume_json(info: &Info, volumes: &[Info], parent: Option<&ParentInfo>) -> Value {
    let origin = volumes.iter().find(|one| one.id == info.origin).map(|one| &*one.name);
    let parent = parent.map(|parent| {
        json!({
            "uri": parent.uri,
            "size_bytes": bytes_of_blocks(parent.blocks),
            "block_bytes": parent.block_bytes,
            "overlap_bytes": bytes_of_blocks(info.reach),
        })
    });
    json!({
        "name": info.name,
        "number": info.id,
        "uuid": format!("{:032x}", info.uuid),
        "origin": origin,
        "read_only": info.is_read_only,
        "size_bytes": bytes_of_blocks(info.blocks),
        "used_bytes": bytes_of_blocks(info.mapped),
        "cluster_bytes": bytes_of_blocks(info.unit),
        "checksums": info.has_checksums,
        "thick": info.is_thick,
        "parent": parent,
    })
}

/// Lists the volumes of a pool with their space usage.
///
/// # Errors
///
/// If the volume table or a map is damaged.
pub fn volumes_json(open: &Arc<OpenPool>) -> Result<Value, Error> {
    let all = open.list_volumes()?;
    let row = |info: &Info| {
        let account: SpaceUsage = open.volume_usage(&info.name)?;
        let mut row = volume_json(info, &all, open.parent(info)?.as_ref());
        row["shared_bytes"] = bytes_of_blocks(account.shared).into();
        row["unique_bytes"] = bytes_of_blocks(account.unique).into();
        row["reserved_bytes"] = bytes_of_blocks(account.reserved).into();
        row["fully_allocated"] =
            info.is_thick.then(|| account.exclusive_blocks() == info.blocks).into();
        row["users"] = open.user_count(info).into();
        Ok(row)
    };
    let is_there = |info: &Info| -> Result<bool, Error> {
        Ok(open.list_volumes()?.iter().any(|one| (one.id, &one.name) == (info.id, &info.name)))
    };
    let mut rows = Vec::with_capacity(all.len());
    for info in &all {
        match row(info) {
            Ok(row) => rows.push(row),
            Err(error) if is_there(info)? => return Err(error),
            // The volume was deleted or renamed meanwhile.
            Err(_) => {}
        }
    }
    Ok(rows.into())
}

/// Describes a pool and its space usage.
///
/// # Errors
///
/// If its metadata are damaged.
pub fn pool_json(open: &Arc<OpenPool>) -> Result<Value, Error> {
    let usage = open.pool_usage()?.ok_or_else(|| {
        let text = format!("{}: the pool has no record of its use", open.device_uri());
        Error::new(tenmil_base::ErrorCategory::Remote, text)
    })?;
    let volumes = open.list_volumes()?;
    let provisioned = volumes.iter().filter(|info| !info.is_read_only).map(|info| info.blocks);
    let thresholds: Vec<u8> = usage.thresholds.into_iter().filter(|one| *one > 0).collect();
    let stopped = open.stop_reason();
    Ok(json!({
        "uri": open.device_uri(),
        "name": open.name(),
        "uuid": format!("{:032x}", open.uuid()),
        "generation": open.generation(),
        "volumes": usage.volumes,
        "size_bytes": bytes_of_blocks(usage.blocks),
        "used_bytes": bytes_of_blocks(usage.used),
        "free_bytes": bytes_of_blocks(usage.free),
        "reserved_bytes": bytes_of_blocks(usage.kept + usage.provisioned),
        "reserved_for_thick_bytes": bytes_of_blocks(usage.provisioned),
        "allocated_bytes": volumes.iter().map(|info| bytes_of_blocks(info.mapped)).sum::<u64>(),
        "provisioned_bytes": bytes_of_blocks(provisioned.sum()),
        "thresholds_percent": thresholds,
        "health": if stopped.is_some() { "stopped" } else { "healthy" },
        "stopped_because": stopped,
        "losses": open.write_loss_count(),
        "identity": open.identity(),
        "devices": open.devices().iter().map(device_json).collect::<Vec<_>>(),
    }))
}

/// Describes a device of a pool.
pub fn device_json(device: &DeviceInfo) -> Value {
    let DeviceInfo { number, uri, blocks } = device;
    json!({ "number": number, "uri": uri, "size_bytes": bytes_of_blocks(*blocks) })
}

/// One line for each device, if there are several.
pub fn format_devices(devices: &Value) -> String {
    let line = |device: &Value| {
        let [number, bytes] = ["number", "size_bytes"].map(|name| device[name].as_u64());
        let uri = short_form_for_terminal(device["uri"].as_str().unwrap_or_default());
        let bytes = bytes.unwrap_or_default();
        format!("  device {}: {} on {uri}\n", number.unwrap_or_default(), format_bytes(bytes))
    };
    let several = devices.as_array().filter(|devices| devices.len() > 1);
    several.into_iter().flatten().map(line).collect()
}

/// Describes the growth of a pool, for people.
pub fn format_growth(grown: &GrowResult) -> String {
    let GrowResult { before, blocks, were_there, devices } = grown;
    let mut text = String::new();
    for number in were_there {
        if let Some(device) = devices.iter().find(|device| device.number == *number) {
            let _ = writeln!(text, "{} is device {number} of the pool already", device.uri);
        }
    }
    let [before, now] = [before, blocks].map(|blocks| format_bytes(bytes_of_blocks(*blocks)));
    let _ = match before == now {
        true if devices.len() == 1 => {
            writeln!(text, "the pool has {now} already, as its device has")
        }
        true => writeln!(text, "the pool has {now} already, as its devices have"),
        false => writeln!(text, "the pool has {now} now, and had {before}"),
    };
    text += &format_devices(&devices.iter().map(device_json).collect());
    text
}

/// Describes a sent or received snapshot.
pub fn transfer_json(carried: &TransferSummary) -> Value {
    let TransferSummary { info, base, data_blocks, hole_blocks, was_there } = carried;
    json!({
        "name": info.name,
        "uuid": format!("{:032x}", info.uuid),
        "size_bytes": bytes_of_blocks(info.blocks),
        "base": base.as_ref().map(|base| &base.name),
        "data_bytes": bytes_of_blocks(*data_blocks),
        "hole_bytes": bytes_of_blocks(*hole_blocks),
        "existed": was_there,
    })
}

/// Describes the result of a metadata check.
pub fn check_json(checked: &PoolCheckResult) -> Value {
    let PoolCheckResult { name, uuid, generation, devices, damaged, report, parents } = checked;
    let parent = |one: &ParentCheckResult| json!({ "uri": one.parent.uri, "volumes": one.volumes, "problem": one.problem });
    let counted = |CountedUsage { volume, name, volume_usage: account }: &CountedUsage| {
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
        "devices": devices.iter().map(device_json).collect::<Vec<Value>>(),
        "clean": problems.is_empty(),
        "problems": problems,
        "volumes": report.volumes,
        "accounts": report.accounts.iter().map(counted).collect::<Vec<Value>>(),
        "metadata_blocks": report.metadata,
        "used_blocks": report.used,
        "parents": parents.iter().map(parent).collect::<Vec<Value>>(),
    })
}

/// Describes the result of a scrub.
pub fn scrub_json(open: &OpenPool, scrubbed: &[VolumeScrubReport]) -> Value {
    let bad = |bad: &DamagedRun| {
        json!({
            "offset_bytes": bytes_of_blocks(bad.block),
            "bytes": bytes_of_blocks(bad.blocks),
            "pool_block": bad.at,
            "cause": match bad.cause {
                DamageCause::Unread => "unread",
                DamageCause::Checksum => "checksum",
                DamageCause::Metadata => "metadata",
            },
            "shared_with": bad.shared_with,
        })
    };
    let volume = |volume: &VolumeScrubReport| {
        json!({
            "name": volume.info.name,
            "checksums": volume.info.has_checksums,
            "read_bytes": bytes_of_blocks(volume.blocks),
            "damaged_bytes": bytes_of_blocks(volume.bad_blocks),
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

/// Formats a byte count: `512 B`, `1.5 MiB`.
pub fn format_bytes(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let step = (63 - (bytes | 1).leading_zeros()) / 10;
    let Some(unit) = step.checked_sub(1).and_then(|index| units.get(index as usize)) else {
        return format!("{bytes} B");
    };
    let tenths = bytes / (1 << (10 * (step - 1))) * 10 / 1024;
    let (whole, tenth) = (tenths / 10, tenths % 10);
    if tenth == 0 { format!("{whole} {unit}") } else { format!("{whole}.{tenth} {unit}") }
}

/// Formats thresholds: `80 % and 95 %`.
pub fn format_percents(thresholds: [u8; 2]) -> String {
    let set = thresholds.into_iter().filter(|percent| *percent > 0);
    let each: Vec<String> = set.map(|percent| format!("{percent} %")).collect();
    if each.is_empty() { "none".into() } else { each.join(" and ") }
}

#[cfg(test)]
mod tests {
    use super::{format_bytes, format_percents};

    #[test]
    fn sizes_and_thresholds_are_formatted_for_people() {
        for (bytes, said) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (10 << 30, "10 GiB"),
            (u64::MAX, "15.9 EiB"),
        ] {
            assert_eq!(format_bytes(bytes), said);
        }
        assert_eq!(
            [[0, 0], [80, 0], [80, 95]].map(format_percents),
            ["none", "80 %", "80 % and 95 %"]
        );
    }
}
