//! `tenmil discover`: prints and watches discovery logs.

mod watch;

use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};
use tenmil_base::{Error, Span};
use tenmil_block::quantity_parser::parse_time;
use tenmil_wire::log::discovery::{DiscoveryEntry, SecureChannel, SecurityType, SubsystemType};

use super::write_stdout;
use tenmil_devices::tcp::{
    DiscoveryLog, TcpSecurity, discover, discovery_service, security_name, transport_name,
    uri_of_entry,
};

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

    /// TLS: off, required (with --key), or concatenate (with --dhchap)
    #[arg(long, value_name = "MODE")]
    tls: Option<String>,

    /// Name of the pre-shared key of TLS in the keyring; implies --tls required
    #[arg(long, value_name = "NAME")]
    key: Option<String>,

    /// Name of the DH-HMAC-CHAP secret of this host in the keyring
    #[arg(long, value_name = "NAME")]
    dhchap: Option<String>,

    /// Name of the DH-HMAC-CHAP secret that the discovery controller must have
    #[arg(long, value_name = "NAME", requires = "dhchap")]
    dhchap_controller: Option<String>,

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
  tenmil discover tcp://192.0.2.7:8009 --key tls-of-this-host
  tenmil discover tcp://192.0.2.7:8009 --json | jq -r '.entries[].uri'
  tenmil discover tcp://192.0.2.7:8009 --watch --json | jq -r 'select(.change == \"added\").uri'";

/// Reads the log and prints it, or watches it with `--watch`.
pub(super) fn run_discover(
    arguments: &DiscoverArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let name = discovery_service(&arguments.address_with_options())?;
    if arguments.watch {
        return watch::watch_discovery_log(arguments, &name, out);
    }
    let found = discover(&name)?;
    let printed = if arguments.json {
        discovery_log_json(&found, &name.security)
    } else {
        discovery_log_text(&name.address, &found, &name.security)
    };
    write_stdout(out, &printed)?;
    Ok(ExitCode::SUCCESS)
}

impl DiscoverArguments {
    /// The address with the options that the flags add to its URI.
    fn address_with_options(&self) -> String {
        let Self { tls, key, dhchap, dhchap_controller, .. } = self;
        let flags = [
            ("tls", tls),
            ("key", key),
            ("dhchap", dhchap),
            ("dhchap-controller", dhchap_controller),
        ];
        let mut address = self.address.clone();
        for (name, value) in flags {
            if let Some(value) = value {
                let mark = if address.contains('?') { '&' } else { '?' };
                // Writing to a string cannot fail.
                let _ = write!(address, "{mark}{name}={value}");
            }
        }
        address
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

fn discovery_log_text(address: &str, found: &DiscoveryLog, security: &TcpSecurity) -> String {
    let count = found.entries.len();
    let entries = if count == 1 { "entry" } else { "entries" };
    let mut text = format!("tcp://{address}: {count} {entries}, generation {}\n", found.generation);
    for entry in &found.entries {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {}", entry_line(entry, security));
    }
    text
}

/// A log entry as one line of text, without control characters: an `Ascii` field shows printable
/// characters only.
fn entry_line(entry: &DiscoveryEntry, security: &TcpSecurity) -> String {
    let uri = uri_of_entry(entry, security)
        .unwrap_or_else(|why| format!("{} is not used: {why}", entry.subnqn()));
    let kind = subsystem_type_name(entry);
    format!("{kind:<10} port {:<5} {:<13} {uri}", entry.portid(), security_name(entry))
}

fn discovery_log_json(found: &DiscoveryLog, security: &TcpSecurity) -> String {
    let entries: Vec<_> = found.entries.iter().map(|entry| entry_json(entry, security)).collect();
    format!("{:#}\n", json!({ "generation": found.generation, "entries": entries }))
}

fn entry_json(entry: &DiscoveryEntry, security: &TcpSecurity) -> Value {
    let tls = match entry.sectype() {
        SecurityType::Tls13 => "1.3",
        SecurityType::Tls12 => "1.2",
        _ => "none",
    };
    let requirement = match entry.secure_channel() {
        SecureChannel::Required => "required",
        SecureChannel::NotRequired => "not required",
        _ => "not specified",
    };
    let uri = uri_of_entry(entry, security);
    json!({
        "kind": subsystem_type_name(entry),
        "uri": uri.as_deref().ok(),
        "refused": uri.as_ref().err(),
        "subsystem": entry.subnqn().to_string(),
        "transport": transport_name(entry.trtype()),
        "address": entry.traddr().to_string(),
        "service": entry.trsvcid().to_string(),
        "port": entry.portid(),
        "controller": entry.cntlid(),
        "tls": tls,
        "secure-channel": requirement,
    })
}
