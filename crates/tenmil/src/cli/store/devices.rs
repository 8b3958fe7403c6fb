//! What a store lies on: `tenmil store grow`.

use block::Opener;
use block::store::{Grown, PAGE_BYTES, Place};
use block::uri::Uri;
use clap::Args;
use control::orders::{Order, device, grown_text};
use serde_json::{Value, json};

use super::super::hand::Hand;
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
    let mut hand = Hand::on(opener, &Place::of(device)?)?;
    if let Hand::Here { open, .. } = &hand {
        let grown = open.grow(opener, add, *overwrite)?;
        return Ok(if *json { grown_json(&grown) } else { grown_text(&grown) });
    }
    let before = hand.store()?["size_bytes"].take();
    let one = |add| Order::Grow { add, overwrite: *overwrite };
    let orders = match &add[..] {
        [] => vec![one(None)],
        add => add.iter().map(|uri| one(Some(uri.clone()))).collect(),
    };
    let mut text = String::new();
    for order in &orders {
        text += &hand.order(order)?.text;
    }
    let store = hand.store()?;
    Ok(match json {
        true => {
            let (size, devices) = (&store["size_bytes"], &store["devices"]);
            document(&before, size, devices, hand.pid())
        }
        false => text + &hand.by(),
    })
}

fn grown_json(grown: &Grown) -> String {
    let [before, now] =
        [grown.before, grown.blocks].map(|blocks| (blocks * u64::from(PAGE_BYTES)).into());
    document(&before, &now, &grown.devices.iter().map(device).collect(), None)
}

fn document(before: &Value, size: &Value, devices: &Value, process: Option<u32>) -> String {
    let document = json!({
        "before_bytes": before,
        "size_bytes": size,
        "changed": before != size,
        "devices": devices,
        "process": process,
    });
    format!("{document:#}\n")
}
