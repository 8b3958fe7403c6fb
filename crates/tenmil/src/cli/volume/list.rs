//! `tenmil volume list`.

use block::Opener;
use block::store::Place;
use block::uri::Uri;
use clap::Args;
use control::orders::size;
use serde_json::{Value, json};

use super::super::hand::Hand;
use super::super::store::table;
use crate::Refused;

#[derive(Debug, Args)]
pub(super) struct ListArguments {
    /// The store: the device that it is on
    #[arg(value_name = "URI")]
    store: Uri,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// All volumes, and how much room each takes.
pub(super) fn list(opener: &Opener<'_>, list: &ListArguments) -> Result<String, Refused> {
    let mut hand = Hand::on(opener, &Place::of(&list.store)?)?;
    let volumes = hand.volumes()?;
    if list.json {
        return Ok(format!("{:#}\n", json!({ "volumes": volumes, "process": hand.pid() })));
    }
    Ok(as_text(volumes.as_array().map_or(&[], Vec::as_slice)) + &hand.by())
}

fn as_text(volumes: &[Value]) -> String {
    let head = ["volume", "size", "used", "shared", "unique", "reserved", "unit", "kind"];
    let head = head.map(String::from);
    let rows: Vec<[String; 8]> = volumes.iter().map(row).collect();
    table(&[&[head][..], &rows].concat())
}

fn row(volume: &Value) -> [String; 8] {
    let text = |name: &str| volume[name].as_str();
    let is = |name: &str| volume[name] == true;
    let of = text("origin").map(|name| format!(" of {name}")).unwrap_or_default();
    let over = volume["parent"]["uri"].as_str();
    let over = over.map(|uri| format!(" over {uri}")).unwrap_or_default();
    let kind = match (is("read_only"), text("origin")) {
        (true, _) => "snapshot",
        (false, None) => "volume",
        (false, Some(_)) => "clone",
    };
    let sums = if is("checksums") { ", checksums" } else { "" };
    let thick = match volume["promise_kept"].as_bool() {
        None => "",
        Some(true) => ", thick",
        Some(false) => ", thick: inflate it again",
    };
    let names = [
        "size_bytes",
        "used_bytes",
        "shared_bytes",
        "unique_bytes",
        "reserved_bytes",
        "unit_bytes",
    ];
    let [whole, used, shared, unique, reserved, unit] =
        names.map(|name| size(volume[name].as_u64().unwrap_or_default()));
    let kind = format!("{kind}{of}{over}{sums}{thick}");
    let name = text("name").unwrap_or_default().to_owned();
    [name, whole, used, shared, unique, reserved, unit, kind]
}
