//! Taking a store from a process that is gone: `tenmil store takeover`.

use block::Opener;
use block::store::{self, Place};
use block::uri::Uri;
use clap::Args;
use serde_json::json;

use crate::Refused;

#[derive(Debug, Args)]
pub(super) struct TakeoverArguments {
    /// The device that the store is on: the first one
    #[arg(value_name = "URI")]
    device: Uri,

    /// Take it although nobody here can tell whether its owner is gone: data are lost if it is not
    #[arg(long)]
    force: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Takes it, and says from whom.
pub(super) fn takeover(
    opener: &Opener<'_>,
    arguments: &TakeoverArguments,
) -> Result<String, Refused> {
    let TakeoverArguments { device, force, json } = arguments;
    let place = Place { force: *force, ..Place::of(device)? };
    let former = store::take_over(opener, &place)?;
    if *json {
        let taken = former.is_some();
        return Ok(format!(
            "{:#}\n",
            json!({ "device": device.to_string(), "changed": taken, "former_owner": former })
        ));
    }
    Ok(match former {
        Some(former) => format!("the store on {device} is taken over from {former}\n"),
        None => format!("nobody has the store on {device} open for writing\n"),
    })
}
