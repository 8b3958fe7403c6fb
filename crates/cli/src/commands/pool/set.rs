//! `tenmil pool set`: capacity alerts and device locations of a pool.

use std::str::FromStr;

use clap::Args;
use serde_json::{Value, json};
use tenmil_block::Opener;
use tenmil_block::uri::Uri;
use tenmil_drivers::pool::{DeviceInfo, OpenPool, VolumeRef};
use tenmil_rpc::pool_commands::{PoolCommand, device_json};

use super::super::pool_access::PoolAccess;
use tenmil_base::Error;

#[derive(Debug, Args)]
pub(super) struct SetArguments {
    /// Device of the pool
    #[arg(value_name = "URI")]
    device: Uri,

    /// Alert at these percentages of used space, such as 80,95; or none
    #[arg(
        long,
        value_name = "PERCENT,PERCENT",
        required_unless_present = "moved",
        conflicts_with = "moved"
    )]
    thresholds: Option<LowSpaceThresholdsPercent>,

    /// Record URI as the location of device N of the pool; may be repeated
    #[arg(id = "moved", long = "device", value_name = "N=URI")]
    moved: Vec<RelocatedDevice>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Up to two thresholds in percent; 0 means none.
#[derive(Clone, Copy, Debug)]
struct LowSpaceThresholdsPercent([u8; 2]);

/// Device number and its new URI.
#[derive(Clone, Debug)]
struct RelocatedDevice(u32, Uri);

impl FromStr for RelocatedDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse =
            || format!("`{text}`, expected the number of a device from 1 on, as in 1=file:/b");
        let (number, uri) = text.split_once('=').ok_or_else(refuse)?;
        let number = number.parse().ok().filter(|number| *number > 0).ok_or_else(refuse)?;
        Ok(Self(number, uri.parse::<Uri>().map_err(|error| error.to_string())?))
    }
}

impl FromStr for LowSpaceThresholdsPercent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || format!("`{text}`, expected one or two per cent from 1 to 100, or none");
        let percent = |text: &str| {
            text.parse().ok().filter(|percent| (1..=100).contains(percent)).ok_or_else(refuse)
        };
        Ok(Self(match text.split_once(',') {
            None if text == "none" => [0, 0],
            None => [percent(text)?, 0],
            Some((low, high)) => [percent(low)?, percent(high)?],
        }))
    }
}

/// Sets the thresholds, or records the new device locations; idempotent.
pub(super) fn set_pool(opener: &Opener<'_>, arguments: &SetArguments) -> Result<String, Error> {
    let SetArguments { device, thresholds, moved, json } = arguments;
    let Some(LowSpaceThresholdsPercent(percent)) = thresholds else {
        return relocate_devices(opener, device, moved, *json);
    };
    let mut access = PoolAccess::open_or_connect(opener, &VolumeRef::parse(device)?)?;
    let result = access.execute_command(&PoolCommand::Thresholds { percent: *percent })?;
    if !json {
        return Ok(result.text + &access.owner_line());
    }
    let store = result.settings.unwrap_or_default();
    let member = |name: &str| store.get(name).cloned().unwrap_or(Value::Null);
    let document = json!({
        "name": member("name"),
        "changed": result.is_changed,
        "thresholds_percent": member("thresholds_percent"),
        "process": access.owner_pid(),
    });
    Ok(format!("{document:#}\n"))
}

/// Records device locations that differ from the recorded ones.
fn relocate_devices(
    opener: &Opener<'_>,
    device: &Uri,
    moved: &[RelocatedDevice],
    json: bool,
) -> Result<String, Error> {
    let mut place = VolumeRef::parse(device)?;
    place.moved = moved.iter().map(|RelocatedDevice(number, uri)| (*number, uri.clone())).collect();
    match PoolAccess::run_local_or_connect(opener, &place, OpenPool::open)? {
        Ok(open) => relocate_locally(&open, moved, json),
        Err(mut access) => relocate_remotely(&mut access, moved, json),
    }
}

/// Records the locations in the process that has the pool open.
fn relocate_remotely(
    access: &mut PoolAccess<'_>,
    moved: &[RelocatedDevice],
    json: bool,
) -> Result<String, Error> {
    let (mut text, mut is_changed, mut store) = (String::new(), false, Value::Null);
    for RelocatedDevice(number, uri) in moved {
        let result =
            access.execute_command(&PoolCommand::Device { number: *number, uri: uri.clone() })?;
        text += &result.text;
        is_changed |= result.is_changed;
        store = result.settings.unwrap_or_default();
    }
    if json {
        let (name, devices) = (&store["name"], &store["devices"]);
        let document = json!({
            "name": name, "changed": is_changed, "devices": devices, "process": access.owner_pid(),
        });
        return Ok(format!("{document:#}\n"));
    }
    Ok(text + &access.owner_line())
}

fn relocate_locally(
    open: &OpenPool,
    moved: &[RelocatedDevice],
    json: bool,
) -> Result<String, Error> {
    let (there, name) = (open.devices(), open.name());
    let unknown = |RelocatedDevice(number, _): &&RelocatedDevice| {
        !there.iter().any(|one| one.number == *number)
    };
    if let Some(RelocatedDevice(number, _)) = moved.iter().find(unknown) {
        let last = there.len() - 1;
        let text = format!("pool `{name}`: it has no device {number}, expected {last} at most");
        return Err(Error::usage(text));
    }
    let is_changed = open.record_device_uris()?;
    if json {
        let devices: Vec<Value> = there.iter().map(device_json).collect();
        let document = json!({
            "name": name, "changed": is_changed, "devices": devices, "process": null,
        });
        return Ok(format!("{document:#}\n"));
    }
    let already = if is_changed { "" } else { " already" };
    let line = |device: &DeviceInfo| {
        format!("device {} of pool `{name}` is at {}{already}\n", device.number, device.uri)
    };
    let named = |device: &&DeviceInfo| {
        moved.iter().any(|RelocatedDevice(number, _)| *number == device.number)
    };
    Ok(there.iter().filter(named).map(line).collect())
}
