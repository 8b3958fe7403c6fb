//! Text of a configuration that did not come from a file.
//!
//! A target that was started with arguments has its configuration in memory. It is changed as a file is,
//! and `tenmil config save` makes a file of it.

use std::fmt::Write as _;

use tenmil_block::QosLimits;
use tenmil_serve::tcp::{HostRights, NamespaceSelection};
use toml_edit::Value;

use super::security::TLS_NAMES;
use super::{
    HostSecurityConfig, HostsConfig, ListenerConfig, NbdConfig, SubsystemConfig, TargetConfig,
};

impl TargetConfig {
    /// The configuration as the text of a file. It has no named devices: a configuration with these comes
    /// from a file, whose text is kept.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        if let Some(bytes) = self.memory_bytes {
            let _ = writeln!(text, "buffer-memory = {}", quoted(&bytes.to_string()));
        }
        for (key, path) in [("state-dir", &self.state), ("keyring", &self.keyring)] {
            if let Some(path) = path {
                let _ = writeln!(text, "{key} = {}", quoted(&path.display().to_string()));
            }
        }
        if !self.referrals.is_empty() {
            let all = self.referrals.iter().map(ToString::to_string);
            let _ = writeln!(text, "referrals = {}", list(all));
        }
        self.write_limits(&mut text);
        self.listeners.iter().for_each(|listener| write_listener(listener, &mut text));
        self.subsystems.iter().for_each(|subsystem| self.write_subsystem(subsystem, &mut text));
        self.write_exports(&mut text);
        text.trim_start().to_owned()
    }

    fn write_exports(&self, text: &mut String) {
        let NbdConfig { connections, connections_per_address, idle_timeout, .. } = &self.nbd;
        let files = [
            ("tls-certificate", &self.nbd.tls_certificate),
            ("tls-key", &self.nbd.tls_key),
            ("tls-client-ca", &self.nbd.tls_client_ca),
            ("tls-psk", &self.nbd.tls_psk),
        ];
        let mut keys = String::new();
        for (key, file) in files {
            if let Some(file) = file {
                let _ = writeln!(keys, "{key} = {}", quoted(&file.display().to_string()));
            }
        }
        if let Some(span) = idle_timeout {
            let _ = writeln!(keys, "idle-timeout = \"{}s\"", span.ns / 1_000_000_000);
        }
        for (key, count) in
            [("connections", connections), ("connections-per-address", connections_per_address)]
        {
            if let Some(count) = count {
                let _ = writeln!(keys, "{key} = {count}");
            }
        }
        if !keys.is_empty() {
            let _ = write!(text, "\n[nbd]\n{keys}");
        }
        for export in &self.exports {
            let (name, uri) = (quoted(&export.name), quoted(&export.uri.to_string()));
            let listen = list(export.listeners.iter().map(ToString::to_string));
            let _ = writeln!(text, "\n[[export]]\nname = {name}\nuri = {uri}\nlisten = {listen}");
            for (key, is_set) in [
                ("read-only", export.is_read_only),
                ("allow-resize", export.allows_resize),
                ("allow-remote-write", export.allows_remote_write),
            ] {
                if is_set {
                    let _ = writeln!(text, "{key} = true");
                }
            }
            if let Some(table) = limits_table(&export.limits) {
                let _ = writeln!(text, "limits = {table}");
            }
        }
    }

    fn write_limits(&self, text: &mut String) {
        let limits = &self.limits;
        let counts = [
            ("connections", limits.connections),
            ("connections-per-address", limits.per_address),
            ("connections-per-host", limits.per_host),
            ("connections-of-loopback", limits.of_loopback),
            ("discovery-connections", limits.discovery),
            ("discovery-connections-per-address", limits.discovery_per_address),
            ("reserved-connections", limits.reserved),
            ("registrants-per-address", limits.registrants_per_address),
            ("fair-depth", limits.fair_depth),
        ];
        let given = counts.into_iter().filter_map(|(key, count)| Some((key, count?)));
        let given: String = given.map(|(key, count)| format!("{key} = {count}\n")).collect();
        let keep_alive = limits.keep_alive_max;
        let keep_alive = keep_alive.map(|span| {
            format!("keep-alive-max = {}\n", quoted(&format!("{}s", span.ns / 1_000_000_000)))
        });
        if !given.is_empty() || keep_alive.is_some() {
            let _ = write!(text, "\n[limits]\n{given}{}", keep_alive.unwrap_or_default());
        }
    }

    fn write_subsystem(&self, subsystem: &SubsystemConfig, text: &mut String) {
        let _ = writeln!(text, "\n[[subsystem]]\nnqn = {}", quoted(&subsystem.nqn));
        if let Some(serial) = &subsystem.serial {
            let _ = writeln!(text, "serial = {}", quoted(serial));
        }
        match &subsystem.hosts {
            HostsConfig::Any => {
                *text += "allow-any-host = true\n";
                let with_limits = subsystem.limits.hosts.iter().filter_map(|(host, limits)| {
                    Some(host_entry(host, None, &limits_table(limits)?))
                });
                let entries: Vec<_> = with_limits.collect();
                if !entries.is_empty() {
                    let _ = writeln!(text, "allowed-hosts = [{}]", entries.join(", "));
                }
            }
            HostsConfig::Only(hosts) => {
                let keys = |host: &str| subsystem.security.hosts.iter().find(|it| it.nqn == *host);
                let limits = |host: &str| {
                    subsystem.limits.hosts.get(host).and_then(limits_table).unwrap_or_default()
                };
                let entries: Vec<_> =
                    hosts.iter().map(|host| host_entry(host, keys(host), &limits(host))).collect();
                let _ = writeln!(text, "allowed-hosts = [{}]", entries.join(", "));
            }
        }
        if subsystem.security.authentication_required {
            *text += "authentication = \"required\"\n";
        }
        if subsystem.security.secure_channel_required {
            *text += "secure-channel = \"required\"\n";
        }
        if subsystem.listeners.len() != self.listeners.len() {
            let of = |at: &usize| self.listeners.get(*at).map(|it| it.address.to_string());
            let _ =
                writeln!(text, "listeners = {}", list(subsystem.listeners.iter().filter_map(of)));
        }
        for (key, limits) in
            [("limits", &subsystem.limits.subsystem), ("host-limits", &subsystem.limits.each_host)]
        {
            if let Some(table) = limits_table(limits) {
                let _ = writeln!(text, "{key} = {table}");
            }
        }
        for namespace in &subsystem.namespaces {
            let uri = quoted(&namespace.uri.to_string());
            let _ =
                writeln!(text, "\n[[subsystem.namespace]]\nuri = {uri}\nnsid = {}", namespace.nsid);
            if namespace.is_read_only {
                *text += "read-only = true\n";
            }
            if let HostsConfig::Only(hosts) = &namespace.hosts {
                let _ = writeln!(text, "allowed-hosts = {}", list(hosts.iter().cloned()));
            }
            let limits = subsystem.limits.namespaces.get(&namespace.nsid);
            if let Some(table) = limits.and_then(limits_table) {
                let _ = writeln!(text, "limits = {table}");
            }
            if namespace.ana_group != 1 {
                let _ = writeln!(text, "ana-group = {}", namespace.ana_group);
            }
        }
        for path in &subsystem.paths {
            let Some(listener) = self.listeners.get(path.listener) else { continue };
            let (address, state) = (quoted(&listener.address.to_string()), path.access.name());
            let _ = writeln!(
                text,
                "\n[[subsystem.path]]\nlistener = {address}\nana-group = {}\nana-state = \"{state}\"",
                path.ana_group
            );
        }
    }
}

fn write_listener(listener: &ListenerConfig, text: &mut String) {
    let _ = writeln!(text, "\n[[listener]]\naddress = {}", quoted(&listener.address.to_string()));
    let tls = TLS_NAMES.iter().skip(1).find(|(_, security)| *security == listener.security);
    if let Some((name, _)) = tls {
        let _ = writeln!(text, "tls = \"{name}\"");
    }
    if !listener.networks.is_empty() {
        let all = listener.networks.iter().map(ToString::to_string);
        let _ = writeln!(text, "allowed-networks = {}", list(all));
    }
}

/// Rate limits as a table; `None` if there are none.
fn limits_table(limits: &QosLimits) -> Option<String> {
    let rates = [("", limits.total), ("read-", limits.reads), ("write-", limits.writes)];
    let mut keys = Vec::new();
    for (prefix, rate) in rates {
        keys.extend(rate.iops.map(|iops| format!("{prefix}iops = {iops}")));
        keys.extend(rate.bytes.map(|bytes| format!("{prefix}bytes = {bytes}")));
    }
    if keys.is_empty() {
        return None;
    }
    if limits.burst.ns > 0 {
        keys.push(format!("burst = \"{}us\"", limits.burst.ns / 1000));
    }
    Some(format!("{{ {} }}", keys.join(", ")))
}

fn host_entry(host: &str, keys: Option<&HostSecurityConfig>, limits: &str) -> String {
    if keys.is_none() && limits.is_empty() {
        return quoted(host);
    }
    let mut entry = format!("{{ nqn = {}", quoted(host));
    if !limits.is_empty() {
        entry += &format!(", limits = {limits}");
    }
    let Some(keys) = keys else { return entry + " }" };
    let names = |names: Vec<String>, key: &str| {
        if names.is_empty() {
            String::new()
        } else {
            format!(", {key} = {}", list(names.into_iter()))
        }
    };
    entry += &names(keys.dhchap.iter().map(|key| key.name.to_string()).collect(), "dhchap");
    if let Some(controller) = &keys.dhchap_controller {
        entry += &format!(", dhchap-controller = {}", quoted(controller.name.as_str()));
    }
    entry += &names(keys.psk_names().map(str::to_owned).collect(), "psk");
    let HostRights { read_only, reservations, connections_max, memory_bytes_max, .. } =
        &keys.rights;
    match read_only {
        NamespaceSelection::None => {}
        NamespaceSelection::All => entry += ", read-only = true",
        NamespaceSelection::Listed(nsids) => {
            let nsids: Vec<String> = nsids.iter().map(ToString::to_string).collect();
            entry += &format!(", read-only = [{}]", nsids.join(", "));
        }
    }
    if !reservations {
        entry += ", reservations = false";
    }
    if let Some(most) = connections_max {
        entry += &format!(", connections = {most}");
    }
    if let Some(most) = memory_bytes_max {
        entry += &format!(", buffer-memory = {}", quoted(&most.to_string()));
    }
    entry + " }"
}

fn list(texts: impl Iterator<Item = String>) -> String {
    format!("[{}]", texts.map(|text| quoted(&text)).collect::<Vec<_>>().join(", "))
}

/// A string of TOML.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::TargetConfig;

    #[test]
    fn text_of_a_configuration_means_the_same() {
        let text = r#"
buffer-memory = "64m"
state-dir = "/var/lib/tenmil"
referrals = ["192.0.2.7:8009"]
[limits]
connections = 400
fair-depth = 32
keep-alive-max = "2m"
[[listener]]
address = "192.0.2.1:4420"
tls = "allowed"
allowed-networks = ["192.0.2.0/24"]
[[listener]]
address = "127.0.0.1:4420"
[[subsystem]]
nqn = "nqn.2026-01.org.example:a\"b"
serial = "D1"
limits = { bytes = "4g", burst = "2s" }
host-limits = { iops = 100 }
authentication = "required"
allowed-hosts = [{ nqn = "nqn.2026-01.org.example:one", dhchap = ["a", "b"], psk = ["p"], dhchap-controller = "c", read-only = [1], reservations = false, connections = 4, buffer-memory = "8m", limits = { read-iops = 5 } }]
listeners = ["192.0.2.1:4420"]
[[subsystem.namespace]]
uri = "file:/var/tmp/a disk?size=10g"
nsid = 1
read-only = true
allowed-hosts = ["nqn.2026-01.org.example:one"]
[[subsystem.namespace]]
uri = "ram:1g"
limits = { write-bytes = 4096 }
ana-group = 2
nsid = 7
[[subsystem.path]]
listener = "192.0.2.1:4420"
ana-group = 2
ana-state = "inaccessible"
[[subsystem]]
nqn = "nqn.2026-01.org.example:open"
allow-any-host = true
allowed-hosts = [{ nqn = "nqn.2026-01.org.example:one", limits = { iops = 7 } }]
[nbd]
tls-psk = "/etc/tenmil/nbd.psk"
idle-timeout = "15m"
connections = 8
[[export]]
name = "an image"
uri = "ram:1m"
listen = ["nbd:/run/a b.sock", "nbds://192.0.2.1:10809"]
allow-resize = true
limits = { read-bytes = "4m", burst = "1s" }
"#;
        let read = TargetConfig::parse(text).unwrap();
        let mut again = TargetConfig::parse(&read.to_text()).unwrap();
        // Discovery has no table, and what follows from the subsystems is the same.
        again.discovery = read.discovery.clone();
        assert_eq!(again, read, "{}", read.to_text());
        let empty = TargetConfig::parse("").unwrap();
        assert_eq!(empty.to_text(), "");
    }
}
