//! `tenmil pool grow`: grows a pool or adds devices.

use clap::Args;
use serde_json::{Value, json};
use tenmil_block::Opener;
use tenmil_block::uri::Uri;
use tenmil_drivers::pool::{GrowResult, PAGE_BYTES, VolumeRef};
use tenmil_rpc::pool_commands::{PoolCommand, device_json, format_growth};

use super::super::pool_access::PoolAccess;
use tenmil_base::Error;

#[derive(Debug, Args)]
pub(super) struct GrowArguments {
    /// First device of the pool
    #[arg(value_name = "URI")]
    device: Uri,

    /// Add this device to the pool; may be repeated
    #[arg(long, value_name = "URI")]
    add: Vec<Uri>,

    /// Overwrite existing data of added devices
    #[arg(long, requires = "add")]
    overwrite: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Grows a pool and reports its size before and after.
pub(super) fn grow_pool(opener: &Opener<'_>, arguments: &GrowArguments) -> Result<String, Error> {
    let GrowArguments { device, add, overwrite, json } = arguments;
    let mut access = PoolAccess::open_or_connect(opener, &VolumeRef::parse(device)?)?;
    if let PoolAccess::Here { open, .. } = &access {
        let grown = open.grow_pool(opener, add, *overwrite)?;
        return Ok(if *json { grown_json(&grown) } else { format_growth(&grown) });
    }
    let before = access.pool_json()?["size_bytes"].take();
    let command = PoolCommand::Grow { add: add.clone(), overwrite: *overwrite };
    let text = access.execute_command(&command)?.text;
    let store = access.pool_json()?;
    Ok(match json {
        true => {
            let (size, devices) = (&store["size_bytes"], &store["devices"]);
            grow_result_json(&before, size, devices, access.owner_pid())
        }
        false => text + &access.owner_line(),
    })
}

fn grown_json(grown: &GrowResult) -> String {
    let [before, now] =
        [grown.before, grown.blocks].map(|blocks| (blocks * u64::from(PAGE_BYTES)).into());
    grow_result_json(&before, &now, &grown.devices.iter().map(device_json).collect(), None)
}

fn grow_result_json(before: &Value, size: &Value, devices: &Value, process: Option<u32>) -> String {
    let document = json!({
        "before_bytes": before,
        "size_bytes": size,
        "changed": before != size,
        "devices": devices,
        "process": process,
    });
    format!("{document:#}\n")
}
