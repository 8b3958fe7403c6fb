//! Pair of veth interfaces between this process and a target, the far one in a network namespace.
//!
//! Unlike loopback, its receive queues have identifiers (NAPI), so busy polling is possible. This
//! requires GRO on the receiving end and TSO off on the sending end.

use std::path::Path;
use std::process::Command;

use tenmil_linux::ethtool::{set_gro, set_tso};

/// A veth pair. Dropping it removes both interfaces.
pub(super) struct VethPair {
    namespace: String,
}

/// Prefix of the namespace names, followed by the process identifier.
const NAME: &str = "tenmil-reproduce-";
/// Directory in which `ip` keeps named network namespaces.
const NAMESPACES: &str = "/run/netns";
/// Names of the near and the far interface.
const NEAR: &str = "tenmil-near";
const FAR: &str = "tenmil-far";
/// Addresses reserved for benchmarks (RFC 2544).
const NEAR_ADDRESS: &str = "198.18.79.1";
const FAR_ADDRESS: &str = "198.18.79.2";

impl VethPair {
    /// Creates the pair.
    pub(super) fn create() -> Result<Self, String> {
        remove_stale_pairs();
        let namespace = format!("{NAME}{}", std::process::id());
        let [first, rest @ ..] = veth_creation_arguments(&namespace);
        run_ip(&first)?;
        // From here on the pair is removed on any error.
        let wire = Self { namespace };
        let [pair, rest @ ..] = rest;
        run_ip(&pair)?;
        for card in [NEAR, FAR] {
            let set = set_gro(card, true).and_then(|()| set_tso(card, false));
            set.map_err(|why| format!("switch {card} to merging, and not cutting: {why}"))?;
        }
        rest.iter().try_for_each(|line| run_ip(line))?;
        Ok(wire)
    }

    /// Listen address of a target behind the pair.
    pub(super) fn listen_address(&self) -> String {
        format!("tcp://{FAR_ADDRESS}:0")
    }

    /// Command prefix that runs a program in the namespace.
    pub(super) fn namespace_command_prefix(&self) -> Vec<String> {
        ["ip", "netns", "exec", &self.namespace].map(str::to_owned).into()
    }
}

impl Drop for VethPair {
    fn drop(&mut self) {
        remove_pair(&self.namespace);
    }
}

/// Removes the pair and its namespace. Deleting the namespace alone would remove the interfaces
/// only later.
fn remove_pair(namespace: &str) {
    let _ = run_ip(&format!("link delete {NEAR}"));
    let _ = run_ip(&format!("netns delete {namespace}"));
}

/// Commands that create the pair manually.
pub(crate) fn manual_creation_commands() -> Vec<String> {
    let [namespace, pair, rest @ ..] =
        veth_creation_arguments("far").map(|line| format!("ip {line}"));
    let switches = [NEAR, FAR].map(|card| format!("ethtool -K {card} gro on tso off"));
    [namespace, pair].into_iter().chain(switches).chain(rest).collect()
}

/// Address of the far end and command prefix, as shown in reports.
pub(crate) const TYPED: (&str, &str) = (FAR_ADDRESS, "ip netns exec far");

/// Arguments of `ip`, in order.
fn veth_creation_arguments(namespace: &str) -> [String; 7] {
    [
        format!("netns add {namespace}"),
        format!("link add {NEAR} type veth peer name {FAR}"),
        format!("link set {FAR} netns {namespace}"),
        format!("addr add {NEAR_ADDRESS}/30 dev {NEAR}"),
        format!("link set {NEAR} up"),
        format!("-n {namespace} addr add {FAR_ADDRESS}/30 dev {FAR}"),
        format!("-n {namespace} link set {FAR} up"),
    ]
}

fn run_ip(line: &str) -> Result<(), String> {
    let output = Command::new("ip").args(line.split(' ')).output();
    let output = output.map_err(|error| format!("`ip {line}`: {error}, expected iproute2"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("`ip {line}`: {}, expected root with network namespaces", said.trim()))
}

/// Removes pairs that killed processes left behind.
fn remove_stale_pairs() {
    for entry in std::fs::read_dir(NAMESPACES).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let Some(process) = name.strip_prefix(NAME) else { continue };
        if !Path::new("/proc").join(process).exists() {
            remove_pair(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{NAMESPACES, VethPair, manual_creation_commands};

    #[test]
    fn veth_pair_exists_until_dropped_or_its_requirement_is_named() {
        let wire = match VethPair::create() {
            Ok(wire) => wire,
            Err(why) => return assert!(why.contains("expected "), "{why}"),
        };
        let place = Path::new(NAMESPACES).join(&wire.namespace);
        assert!(place.exists());
        let runner = wire.namespace_command_prefix();
        let far = std::process::Command::new(&runner[0])
            .args(&runner[1..])
            .args(["ip", "-o", "addr", "show", "up"])
            .output()
            .unwrap();
        assert!(String::from_utf8_lossy(&far.stdout).contains(super::FAR_ADDRESS), "{far:?}");
        drop(wire);
        assert!(!place.exists());
        drop(VethPair::create().unwrap());
    }

    #[test]
    fn creation_commands_can_be_typed_by_hand() {
        let lines = manual_creation_commands();
        assert_eq!(lines[0], "ip netns add far");
        assert_eq!(lines[2], "ethtool -K tenmil-near gro on tso off");
        assert_eq!(lines.last().unwrap(), "ip -n far link set tenmil-far up");
    }
}
