//! `tenmil pool takeover`: takes over the pool of a process that has ended.

use clap::Args;
use serde_json::json;
use tenmil_block::Opener;
use tenmil_block::uri::Uri;
use tenmil_drivers::pool::{self, VolumeRef};

use tenmil_base::Error;

#[derive(Debug, Args)]
pub(super) struct TakeoverArguments {
    /// First device of the pool
    #[arg(value_name = "URI")]
    device: Uri,

    /// Take over even if this machine cannot verify that the owner has ended: data are lost if it has
    /// not
    #[arg(long)]
    force: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Takes over the pool and reports its former owner.
pub(super) fn takeover_pool(
    opener: &Opener<'_>,
    arguments: &TakeoverArguments,
) -> Result<String, Error> {
    let TakeoverArguments { device, force, json } = arguments;
    let place = VolumeRef { force: *force, ..VolumeRef::parse(device)? };
    let former = pool::take_over_pool(opener, &place)?;
    if *json {
        let taken = former.is_some();
        return Ok(format!(
            "{:#}\n",
            json!({ "device": device.to_string(), "changed": taken, "former_owner": former })
        ));
    }
    Ok(match former {
        Some(former) => format!("the pool on {device:#} is taken over from {former}\n"),
        None => format!("no process has the pool on {device:#} open for writing\n"),
    })
}
