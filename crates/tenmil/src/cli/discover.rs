//! `tenmil discover`.

mod watch;

use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use base::Span;
use block::quantity::parse_time;
use clap::Args;
use serde_json::{Value, json};
use wire::log::discovery::{DiscoveryEntry, SubsystemType, TransportType};

use super::write_out;
use crate::Refused;
use crate::tcp::{Discovered, discover, discovery_service};

/// Ask a discovery service over NVMe/TCP which SSDs there are behind it, and how each is reached.
///
/// A URI may say who asks and how long is waited, as in tcp://HOST:PORT?host=NQN&give-up=1m: what is
/// shown depends on who asks, and `tenmil policy` explains the times.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct DiscoverArguments {
    /// Where the service is: tcp://HOST:PORT, usually port 8009 or that of the SSDs
    #[arg(value_name = "ADDRESS")]
    address: String,

    /// Print JSON; with --watch, one object on a line
    #[arg(long)]
    json: bool,

    /// Stay connected, and print what comes and goes, a line each, until Ctrl-C
    #[arg(short, long)]
    watch: bool,

    /// Watch for this time, such as 10 or 500ms
    #[arg(short, long, value_name = "TIME", value_parser = parse_time, requires = "watch")]
    time: Option<Span>,

    /// Stop after so many changes
    #[arg(long, value_name = "N", value_parser = super::perf::whole::<u64>, requires = "watch")]
    count: Option<u64>,
}

const EXAMPLES: &str = "\
Examples:
  tenmil discover tcp://127.0.0.1:4420
  tenmil discover tcp://192.0.2.7:8009 --json | jq -r '.entries[].uri'
  tenmil discover tcp://192.0.2.7:8009 --watch --json | jq -r 'select(.change == \"came\").uri'";

/// Asks and prints.
pub(super) fn run(arguments: &DiscoverArguments, out: &mut dyn Write) -> Result<ExitCode, Refused> {
    let name = discovery_service(&arguments.address)?;
    if arguments.watch {
        return watch::run(arguments, &name, out);
    }
    let found = discover(&name)?;
    let printed = if arguments.json { as_json(&found) } else { as_text(&name.address, &found) };
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
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {}", line_of(entry));
    }
    text
}

/// A transport as `nvme connect --transport` has it.
const fn transport_of(transport: TransportType) -> &'static str {
    match transport {
        TransportType::Tcp => "tcp",
        TransportType::Rdma => "rdma",
        TransportType::FibreChannel => "fc",
        TransportType::Loop => "loop",
        _ => "unknown",
    }
}

/// An entry in a line.
fn line_of(entry: &DiscoveryEntry) -> String {
    let uri = uri_of(entry).unwrap_or_else(|| {
        format!("{} over {}, which is not supported", entry.subnqn(), transport_of(entry.trtype()))
    });
    format!("{:<10} port {:<5} {}", kind_of(entry), entry.portid(), base::text::plain(&uri))
}

fn as_json(found: &Discovered) -> String {
    let entries: Vec<_> = found.entries.iter().map(object_of).collect();
    format!("{:#}\n", json!({ "generation": found.generation, "entries": entries }))
}

fn object_of(entry: &DiscoveryEntry) -> Value {
    json!({
        "kind": kind_of(entry),
        "uri": uri_of(entry),
        "subsystem": entry.subnqn().to_string(),
        "transport": transport_of(entry.trtype()),
        "address": entry.traddr().to_string(),
        "service": entry.trsvcid().to_string(),
        "port": entry.portid(),
        "controller": entry.cntlid(),
    })
}
