//! `tenmil discover`: prints and watches discovery logs.

mod watch;

use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};
use tenmil_base::{Error, Span};
use tenmil_block::quantity_parser::parse_time;
use tenmil_wire::log::discovery::{DiscoveryEntry, SubsystemType, TransportType};

use super::write_stdout;
use tenmil_devices::tcp::{DiscoveryLog, discover, discovery_service};

/// Print the discovery log of an NVMe/TCP discovery controller: its subsystems and their addresses.
///
/// The host NQN and the timeouts are options of the URI, as in tcp://HOST:PORT?hostnqn=NQN&ctrl-loss-timeout=1m: the
/// log depends on the host NQN, and `tenmil timeouts` explains the timeouts.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct DiscoverArguments {
    /// Discovery service: tcp://HOST:PORT, usually port 8009 or the port of a subsystem
    #[arg(value_name = "ADDRESS")]
    address: String,

    /// Print JSON; with --watch, one object per line
    #[arg(long)]
    json: bool,

    /// Stay connected and print changes of the log, one per line, until Ctrl-C
    #[arg(short, long)]
    watch: bool,

    /// Watch for this time, such as 10 or 500ms
    #[arg(short, long, value_name = "TIME", value_parser = parse_time, requires = "watch")]
    time: Option<Span>,

    /// Stop after this many changes
    #[arg(long, value_name = "N", value_parser = super::perf::parse_integer::<u64>, requires = "watch")]
    count: Option<u64>,
}

const EXAMPLES: &str = "\
Examples:
  tenmil discover tcp://127.0.0.1:4420
  tenmil discover tcp://192.0.2.7:8009 --json | jq -r '.entries[].uri'
  tenmil discover tcp://192.0.2.7:8009 --watch --json | jq -r 'select(.change == \"added\").uri'";

/// Reads the log and prints it, or watches it with `--watch`.
pub(super) fn run_discover(
    arguments: &DiscoverArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let name = discovery_service(&arguments.address)?;
    if arguments.watch {
        return watch::watch_discovery_log(arguments, &name, out);
    }
    let found = discover(&name)?;
    let printed = if arguments.json {
        discovery_log_json(&found)
    } else {
        discovery_log_text(&name.address, &found)
    };
    write_stdout(out, &printed)?;
    Ok(ExitCode::SUCCESS)
}

/// The tenmil URI of a log entry, if its transport is supported.
fn uri_of(entry: &DiscoveryEntry) -> Option<String> {
    let port = entry.tcp_port().filter(|_| entry.trtype() == TransportType::Tcp)?;
    let address = entry.traddr().to_string();
    let address = if address.contains(':') { format!("[{address}]") } else { address };
    match entry.subtype() {
        SubsystemType::Nvm => Some(format!("tcp://{address}:{port}/{}", entry.subnqn())),
        _ => Some(format!("tcp://{address}:{port}")),
    }
}

fn subsystem_type_name(entry: &DiscoveryEntry) -> &'static str {
    match entry.subtype() {
        SubsystemType::Nvm => "SSD",
        SubsystemType::Referral => "referral",
        SubsystemType::Discovery => "discovery",
        _ => "unknown",
    }
}

fn discovery_log_text(address: &str, found: &DiscoveryLog) -> String {
    let count = found.entries.len();
    let entries = if count == 1 { "entry" } else { "entries" };
    let mut text = format!("tcp://{address}: {count} {entries}, generation {}\n", found.generation);
    for entry in &found.entries {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {}", entry_line(entry));
    }
    text
}

/// Transport name, as in `nvme connect --transport`.
const fn transport_name(transport: TransportType) -> &'static str {
    match transport {
        TransportType::Tcp => "tcp",
        TransportType::Rdma => "rdma",
        TransportType::FibreChannel => "fc",
        TransportType::Loop => "loop",
        _ => "unknown",
    }
}

/// A log entry as one line of text, without control characters: an `Ascii` field shows printable
/// characters only.
fn entry_line(entry: &DiscoveryEntry) -> String {
    let uri = uri_of(entry).unwrap_or_else(|| {
        format!(
            "{} over {}, which is not supported",
            entry.subnqn(),
            transport_name(entry.trtype())
        )
    });
    format!("{:<10} port {:<5} {uri}", subsystem_type_name(entry), entry.portid())
}

fn discovery_log_json(found: &DiscoveryLog) -> String {
    let entries: Vec<_> = found.entries.iter().map(entry_json).collect();
    format!("{:#}\n", json!({ "generation": found.generation, "entries": entries }))
}

fn entry_json(entry: &DiscoveryEntry) -> Value {
    json!({
        "kind": subsystem_type_name(entry),
        "uri": uri_of(entry),
        "subsystem": entry.subnqn().to_string(),
        "transport": transport_name(entry.trtype()),
        "address": entry.traddr().to_string(),
        "service": entry.trsvcid().to_string(),
        "port": entry.portid(),
        "controller": entry.cntlid(),
    })
}
