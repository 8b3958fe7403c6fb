//! Output printed once the NVMe/TCP target listens.

use std::net::SocketAddr;

use serde_json::json;
use tenmil_base::BlockDevice;

use super::live_config::{LiveConfig, LiveNamespace, LiveSubsystem};

/// The ready message: the listen addresses and, per namespace, the commands that connect to it.
pub(super) fn ready_message(is_json: bool, standing: &LiveConfig) -> String {
    let listens: Vec<String> =
        standing.addresses().map(|address| format!("tcp://{address}")).collect();
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
                .map(|at| (linux_connect_command(&at, nqn), tenmil_uri(&at, nqn, served.nsid())))
                .collect()
        };
    if is_json {
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
        let line = json!({ "ready": true, "listen": listens, "namespaces": namespaces });
        return format!("{line}\n");
    }
    let mut text = format!("ready {}\n", listens.join(" "));
    for (nqn, stood, served) in all() {
        text += &format!("namespace {} of {nqn}: {}\n", served.nsid(), served.uri());
        for (linux, uri) in ways(&nqn, stood, served) {
            text += &format!("  {linux}\n  {uri}\n");
        }
    }
    text
}

/// The `nvme connect` command for a Linux host.
fn linux_connect_command(address: &SocketAddr, nqn: &str) -> String {
    let (ip, port) = (address.ip(), address.port());
    format!("nvme connect --transport tcp --traddr {ip} --trsvcid {port} --nqn {nqn}")
}

/// The tenmil URI of a namespace.
fn tenmil_uri(address: &SocketAddr, nqn: &str, nsid: u32) -> String {
    format!("tcp://{address}/{nqn}/{nsid}")
}
