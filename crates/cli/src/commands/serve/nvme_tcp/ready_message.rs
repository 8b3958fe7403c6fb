//! Output printed once the NVMe/TCP target listens.

use std::net::SocketAddr;

use serde_json::json;
use tenmil_base::BlockDevice;
use tenmil_base::text::quote_shell_word;
use tenmil_rpc::target_config::NbdListener;
use tenmil_serve::nbd::ExportedDevice;
use tenmil_serve::tcp::PortSecurity;

use super::live_config::{LiveConfig, LiveNamespace, LiveSubsystem};
use crate::commands::serve::ServeArguments;

/// The ready message: the listen addresses and, per namespace, the commands that connect to it.
pub(super) fn ready_message(arguments: &ServeArguments, standing: &LiveConfig) -> String {
    if let Some(message) = single_export_message(arguments, standing) {
        return message;
    }
    let listens = standing.addresses().map(|address| format!("tcp://{address}"));
    let listens: Vec<String> =
        listens.chain(standing.exports().listeners().map(ToString::to_string)).collect();
    let all = || {
        let of = |stood: &'_ LiveSubsystem| stood.nqn().to_owned();
        standing.subsystems().iter().flat_map(move |stood| {
            stood.namespaces().iter().map(move |served| (of(stood), stood, served))
        })
    };
    let ways =
        |nqn: &str, stood: &LiveSubsystem, served: &LiveNamespace| -> Vec<(String, String)> {
            let there = standing.addresses_of(stood);
            there
                .map(|(at, port)| {
                    let needs = Needs::of(stood, port);
                    (linux_connect_command(&at, nqn, needs), tenmil_uri(&at, nqn, served, needs))
                })
                .collect()
        };
    if arguments.json {
        let namespace = |(nqn, stood, served): (String, &LiveSubsystem, &LiveNamespace)| {
            let limits = served.descriptor().limits();
            let ways = ways(&nqn, stood, served);
            json!({
                "nqn": nqn,
                "nsid": served.nsid(),
                "uri": served.uri().to_string(),
                "description": served.description(),
                "size_bytes": limits.block_count * u64::from(limits.block_size),
                "nvme": ways.iter().map(|(linux, _)| linux.clone()).collect::<Vec<_>>(),
                "connect": ways.iter().map(|(_, uri)| uri.clone()).collect::<Vec<_>>(),
            })
        };
        let namespaces: Vec<_> = all().map(namespace).collect();
        let export = |(served, listeners): (&ExportedDevice, Vec<&NbdListener>)| {
            let export = served.export();
            json!({
                "name": export.name(),
                "uri": served.uri(),
                "size_bytes": export.size_bytes(),
                "read_only": export.is_read_only(),
                "connect": listeners.iter().map(|at| at.uri_of(export.name())).collect::<Vec<_>>(),
            })
        };
        let exports: Vec<_> = standing.exports().exports().map(export).collect();
        let mut line = json!({ "ready": true, "listen": listens, "namespaces": namespaces });
        if !exports.is_empty() {
            line["exports"] = exports.into();
        }
        return format!("{line}\n");
    }
    let mut text = format!("ready {}", listens.join(" ")).trim_end().to_owned() + "\n";
    for (nqn, stood, served) in all() {
        text += &format!("namespace {} of {nqn}: {}\n", served.nsid(), served.uri());
        for (linux, uri) in ways(&nqn, stood, served) {
            text += &format!("  {linux}\n  {}\n", quote_shell_word(&uri));
        }
    }
    for (served, listeners) in standing.exports().exports() {
        let name = served.export().name();
        text += &format!("export {name}: {}\n", served.uri());
        for listener in listeners {
            text += &format!("  {}\n", quote_shell_word(&listener.uri_of(name)));
        }
    }
    text
}

/// The message of a server that exports one device over NBD, by arguments: one line, and as JSON the export
/// itself. Its clients use the empty name.
fn single_export_message(arguments: &ServeArguments, standing: &LiveConfig) -> Option<String> {
    let mut exports = standing.exports().exports();
    let (Some((served, listeners)), None) = (exports.next(), exports.next()) else { return None };
    if arguments.config.is_some() || standing.addresses().next().is_some() {
        return None;
    }
    let listens: Vec<String> = listeners.iter().map(ToString::to_string).collect();
    if !arguments.json {
        return Some(format!("ready {}\n", listens.join(" ")));
    }
    let connect = |listener: &&NbdListener| {
        let uri = listener.uri_of("");
        uri.strip_suffix('/').map(str::to_owned).unwrap_or(uri)
    };
    let export = served.export();
    let line = json!({
        "ready": true,
        "listen": listens,
        "connect": listeners.iter().map(connect).collect::<Vec<_>>(),
        "uri": served.uri(),
        "name": export.name(),
        "description": export.description(),
        "size_bytes": export.size_bytes(),
        "block_size": export.block_size(),
        "read_only": export.is_read_only(),
    });
    Some(format!("{line}\n"))
}

/// What a connection needs.
#[derive(Clone, Copy)]
struct Needs {
    tls: bool,
    authentication: bool,
}

impl Needs {
    fn of(stood: &LiveSubsystem, port: PortSecurity) -> Self {
        Self {
            tls: port == PortSecurity::TlsRequired || stood.requires_secure_channel(),
            authentication: stood.requires_authentication(),
        }
    }
}

/// The `nvme connect` command for a Linux host, with words in place of keys.
fn linux_connect_command(address: &SocketAddr, nqn: &str, needs: Needs) -> String {
    let (ip, port) = (address.ip(), address.port());
    let tls = if needs.tls { " --tls" } else { "" };
    let authentication = if needs.authentication { " --dhchap-secret SECRET" } else { "" };
    format!(
        "nvme connect --transport tcp --traddr {ip} --trsvcid {port} --nqn {nqn}{tls}{authentication}"
    )
}

/// The tenmil URI of a namespace, with words in place of the names of keys.
fn tenmil_uri(address: &SocketAddr, nqn: &str, served: &LiveNamespace, needs: Needs) -> String {
    let options = match (needs.tls, needs.authentication) {
        (false, false) => "",
        (true, false) => "?tls=required&key=NAME",
        (false, true) => "?dhchap=NAME",
        (true, true) => "?tls=required&key=NAME&dhchap=NAME",
    };
    format!("tcp://{address}/{nqn}/{}{options}", served.nsid())
}
