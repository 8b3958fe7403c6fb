//! `tenmil volume list`: lists the volumes of a pool.

use clap::Args;
use serde_json::{Value, json};
use tenmil_block::Opener;
use tenmil_block::uri::{Uri, short_form_for_terminal};
use tenmil_drivers::pool::VolumeRef;
use tenmil_rpc::pool_commands::format_bytes;

use super::super::pool::align_columns;
use super::super::pool_access::PoolAccess;
use tenmil_base::Error;

#[derive(Debug, Args)]
pub(super) struct ListArguments {
    /// Pool, by its device
    #[arg(value_name = "URI")]
    pub(super) store: Uri,

    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// All volumes with their space usage.
pub(super) fn list_volumes(opener: &Opener<'_>, list: &ListArguments) -> Result<String, Error> {
    let mut access = PoolAccess::open_or_connect(opener, &VolumeRef::parse(&list.store)?)?;
    let volumes = access.volumes_json()?;
    if list.json {
        return Ok(format!("{:#}\n", json!({ "volumes": volumes, "process": access.owner_pid() })));
    }
    Ok(volumes_text(volumes.as_array().map_or(&[], Vec::as_slice)) + &access.owner_line())
}

fn volumes_text(volumes: &[Value]) -> String {
    let head = ["volume", "size", "used", "shared", "unique", "reserved", "cluster", "kind"];
    let head = head.map(String::from);
    let rows: Vec<[String; 8]> = volumes.iter().map(volume_row).collect();
    align_columns(&[&[head][..], &rows].concat())
}

fn volume_row(volume: &Value) -> [String; 8] {
    let text = |name: &str| volume[name].as_str();
    let is = |name: &str| volume[name] == true;
    let of = text("origin").map(|name| format!(" of {name}")).unwrap_or_default();
    let over = volume["parent"]["uri"].as_str();
    let over =
        over.map(|uri| format!(" over {}", short_form_for_terminal(uri))).unwrap_or_default();
    let kind = match (is("read_only"), text("origin")) {
        (true, _) => "snapshot",
        (false, None) => "volume",
        (false, Some(_)) => "clone",
    };
    let sums = if is("checksums") { ", checksums" } else { "" };
    let thick = match volume["fully_allocated"].as_bool() {
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
        "cluster_bytes",
    ];
    let [whole, used, shared, unique, reserved, unit] =
        names.map(|name| format_bytes(volume[name].as_u64().unwrap_or_default()));
    let kind = format!("{kind}{of}{over}{sums}{thick}");
    let name = text("name").unwrap_or_default().to_owned();
    [name, whole, used, shared, unique, reserved, unit, kind]
}
