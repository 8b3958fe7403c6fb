//! `tenmil discover`.

use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use serde_json::json;
use wire::log::discovery::{DiscoveryEntry, SubsystemType, TransportType};

use super::write_out;
use crate::Refused;
use crate::tcp::{Discovered, discover};

/// Ask a discovery service over NVMe/TCP which SSDs there are behind it, and how each is reached.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct DiscoverArguments {
    /// Where the service is: tcp://HOST:PORT, usually port 8009 or that of the SSDs
    #[arg(value_name = "ADDRESS")]
    address: String,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  tenmil discover tcp://127.0.0.1:4420
  tenmil discover tcp://192.0.2.7:8009 --json | jq -r '.entries[].uri'";

/// Asks and prints.
pub(super) fn run(arguments: &DiscoverArguments, out: &mut dyn Write) -> Result<ExitCode, Refused> {
    let text = &arguments.address;
    let address =
        text.strip_prefix("tcp://").filter(|rest| !rest.is_empty() && !rest.contains('/'));
    let address = address.ok_or_else(|| {
        Refused::caller(format!("discover {text}: no address, expected tcp://HOST:PORT"))
    })?;
    let found = discover(address)?;
    let printed = if arguments.json { as_json(&found) } else { as_text(address, &found) };
    write_out(out, &printed)?;
    Ok(ExitCode::SUCCESS)
}

/// What an entry is called on the command line, if it can be.
fn uri_of(entry: &DiscoveryEntry) -> Option<String> {
    let port = entry.port().filter(|_| entry.trtype() == TransportType::Tcp)?;
    let address = entry.traddr().to_string();
    let address = if address.contains(':') { format!("[{address}]") } else { address };
    match entry.subtype() {
        SubsystemType::Nvm => Some(format!("tcp://{address}:{port}/{}", entry.subnqn())),
        _ => Some(format!("tcp://{address}:{port}")),
    }
}

fn kind_of(entry: &DiscoveryEntry) -> &'static str {
    match entry.subtype() {
        SubsystemType::Nvm => "SSD",
        SubsystemType::Referral => "referral",
        SubsystemType::Discovery => "discovery",
        _ => "unknown",
    }
}

fn as_text(address: &str, found: &Discovered) -> String {
    let count = found.entries.len();
    let ways = if count == 1 { "way" } else { "ways" };
    let mut text = format!("tcp://{address}: {count} {ways}, generation {}\n", found.generation);
    for entry in &found.entries {
        let uri = uri_of(entry).unwrap_or_else(|| {
            format!("{} over {:?}, which is not spoken here", entry.subnqn(), entry.trtype())
        });
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {:<10} port {:<5} {uri}", kind_of(entry), entry.portid());
    }
    text
}

fn as_json(found: &Discovered) -> String {
    let entries: Vec<_> = found
        .entries
        .iter()
        .map(|entry| {
            json!({
                "kind": kind_of(entry),
                "uri": uri_of(entry),
                "subsystem": entry.subnqn().to_string(),
                "transport": format!("{:?}", entry.trtype()),
                "address": entry.traddr().to_string(),
                "service": entry.trsvcid().to_string(),
                "port": entry.portid(),
                "controller": entry.cntlid(),
            })
        })
        .collect();
    format!("{:#}\n", json!({ "generation": found.generation, "entries": entries }))
}
