//! A wire between this process and a target: a pair of veth cards, the far one in a network namespace
//! of its own.
//!
//! Unlike loopback its ends have receive queues that are known by a number (NAPI), so there is
//! something to poll: if the end that receives merges packets (GRO), and the other does not send long
//! ones.

use std::path::Path;
use std::process::Command;

use host::ethtool::{set_cutting, set_merging};

/// A wire. Dropped, it is taken away, with both cards.
pub(super) struct Wire {
    namespace: String,
}

/// What the namespaces of all such wires are called, before the number of the process.
const NAME: &str = "tenmil-evidence-";
/// Where `ip` keeps namespaces by name.
const NAMESPACES: &str = "/run/netns";
/// The card of this end, and that of the other one.
const NEAR: &str = "tenmil-near";
const FAR: &str = "tenmil-far";
/// Of the addresses that are there for measuring (RFC 2544).
const NEAR_ADDRESS: &str = "198.18.79.1";
const FAR_ADDRESS: &str = "198.18.79.2";

impl Wire {
    /// Lays a wire.
    pub(super) fn lay() -> Result<Self, String> {
        sweep();
        let namespace = format!("{NAME}{}", std::process::id());
        let [first, rest @ ..] = lines(&namespace);
        ip(&first)?;
        // From here on it is taken away whatever happens.
        let wire = Self { namespace };
        let [pair, rest @ ..] = rest;
        ip(&pair)?;
        for card in [NEAR, FAR] {
            let set = set_merging(card, true).and_then(|()| set_cutting(card, false));
            set.map_err(|why| format!("switch {card} to merging, and not cutting: {why}"))?;
        }
        rest.iter().try_for_each(|line| ip(line))?;
        Ok(wire)
    }

    /// Where a target at the other end listens.
    pub(super) fn address(&self) -> String {
        format!("tcp://{FAR_ADDRESS}:0")
    }

    /// What runs a program at the other end.
    pub(super) fn runner(&self) -> Vec<String> {
        ["ip", "netns", "exec", &self.namespace].map(str::to_owned).into()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        take_away(&self.namespace);
    }
}

/// Takes away what is there of a wire. With the namespace alone the cards would go, too, but later.
fn take_away(namespace: &str) {
    let _ = ip(&format!("link delete {NEAR}"));
    let _ = ip(&format!("netns delete {namespace}"));
}

/// How it can be typed.
pub(crate) fn typed() -> Vec<String> {
    let [namespace, pair, rest @ ..] = lines("far").map(|line| format!("ip {line}"));
    let switches = [NEAR, FAR].map(|card| format!("ethtool -K {card} gro on tso off"));
    [namespace, pair].into_iter().chain(switches).chain(rest).collect()
}

/// The address of the other end, and what runs a program there, as they are typed.
pub(crate) const TYPED: (&str, &str) = (FAR_ADDRESS, "ip netns exec far");

/// What `ip` is asked to do, in this order.
fn lines(namespace: &str) -> [String; 7] {
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

fn ip(line: &str) -> Result<(), String> {
    let output = Command::new("ip").args(line.split(' ')).output();
    let output = output.map_err(|error| format!("`ip {line}`: {error}, expected iproute2"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("`ip {line}`: {}, expected root with network namespaces", said.trim()))
}

/// Takes wires away that were left by processes that were killed.
fn sweep() {
    for entry in std::fs::read_dir(NAMESPACES).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let Some(process) = name.strip_prefix(NAME) else { continue };
        if !Path::new("/proc").join(process).exists() {
            take_away(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{NAMESPACES, Wire, typed};

    #[test]
    fn a_wire_is_there_until_it_is_dropped_or_what_it_takes_is_named() {
        let wire = match Wire::lay() {
            Ok(wire) => wire,
            Err(why) => return assert!(why.contains("expected "), "{why}"),
        };
        let place = Path::new(NAMESPACES).join(&wire.namespace);
        assert!(place.exists());
        let runner = wire.runner();
        let far = std::process::Command::new(&runner[0])
            .args(&runner[1..])
            .args(["ip", "-o", "addr", "show", "up"])
            .output()
            .unwrap();
        assert!(String::from_utf8_lossy(&far.stdout).contains(super::FAR_ADDRESS), "{far:?}");
        drop(wire);
        assert!(!place.exists());
        drop(Wire::lay().unwrap());
    }

    #[test]
    fn it_can_be_typed() {
        let lines = typed();
        assert_eq!(lines[0], "ip netns add far");
        assert_eq!(lines[2], "ethtool -K tenmil-near gro on tso off");
        assert_eq!(lines.last().unwrap(), "ip -n far link set tenmil-far up");
    }
}
