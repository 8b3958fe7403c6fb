//! What a store lies on: `tenmil store grow`, and how devices are told.

use std::fmt::Write as _;

use block::Opener;
use block::store::{self, DeviceInfo, Grown, PAGE_BYTES, Place};
use block::uri::Uri;
use clap::Args;
use control::orders::size;
use serde_json::{Value, json};

use crate::Refused;

#[derive(Debug, Args)]
pub(super) struct GrowArguments {
    /// The device that the store is on: the first one
    #[arg(value_name = "URI")]
    device: Uri,

    /// Have it lie on this device, too; may be given several times
    #[arg(long, value_name = "URI")]
    add: Vec<Uri>,

    /// Add a device even if it holds something, which is lost
    #[arg(long, requires = "add")]
    overwrite: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Grows a store, and says what it was and is.
pub(super) fn grow(opener: &Opener<'_>, arguments: &GrowArguments) -> Result<String, Refused> {
    let GrowArguments { device, add, overwrite, json } = arguments;
    let grown = store::grow(opener, &Place::of(device)?, add, *overwrite)?;
    Ok(if *json { grown_json(&grown) } else { grown_text(&grown) })
}

fn grown_text(grown: &Grown) -> String {
    let Grown { before, blocks, were_there, devices } = grown;
    let mut text = String::new();
    for number in were_there {
        if let Some(device) = devices.iter().find(|device| device.number == *number) {
            let _ = writeln!(text, "{} is device {number} of the store already", device.uri);
        }
    }
    let [before, now] = [before, blocks].map(|blocks| size(blocks * u64::from(PAGE_BYTES)));
    let _ = match before == now {
        true if devices.len() == 1 => {
            writeln!(text, "the store has {now} already, as its device has")
        }
        true => writeln!(text, "the store has {now} already, as its devices have"),
        false => writeln!(text, "the store has {now} now, and had {before}"),
    };
    text += &text_of(&devices.iter().map(as_json).collect());
    text
}

fn grown_json(grown: &Grown) -> String {
    let [before, now] = [grown.before, grown.blocks].map(|blocks| blocks * u64::from(PAGE_BYTES));
    let document = json!({
        "before_bytes": before,
        "size_bytes": now,
        "changed": before != now,
        "devices": grown.devices.iter().map(as_json).collect::<Vec<Value>>(),
    });
    format!("{document:#}\n")
}

/// A line for each of several devices.
pub(super) fn text_of(devices: &Value) -> String {
    let line = |device: &Value| {
        let [number, bytes] = ["number", "size_bytes"].map(|name| device[name].as_u64());
        let (uri, bytes) = (device["uri"].as_str().unwrap_or_default(), bytes.unwrap_or_default());
        format!("  device {}: {} on {uri}\n", number.unwrap_or_default(), size(bytes))
    };
    let several = devices.as_array().filter(|devices| devices.len() > 1);
    several.into_iter().flatten().map(line).collect()
}

pub(super) fn as_json(device: &DeviceInfo) -> Value {
    let DeviceInfo { number, uri, blocks } = device;
    json!({ "number": number, "uri": uri, "size_bytes": blocks * u64::from(PAGE_BYTES) })
}
