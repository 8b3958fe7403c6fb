//! Difference of two configurations, one line for each object.
//!
//! ```text
//!   + listener 192.0.2.1:4420
//!   - namespace 2 of nqn…:disks: ram:1g
//!   ~ host nqn…:db of nqn…:disks: dhchap
//! ```

use std::collections::BTreeSet;

use super::{
    ExportConfig, HostSecurityConfig, HostsConfig, ListenerConfig, NamespaceConfig,
    SubsystemConfig, TargetConfig,
};

impl TargetConfig {
    /// Lines that describe what `after` adds (`+`), removes (`-`) and changes (`~`).
    #[must_use]
    pub fn difference_to(&self, after: &Self) -> Vec<String> {
        let mut lines = Vec::new();
        let settings = [
            ("buffer-memory", self.memory_bytes != after.memory_bytes),
            ("state-dir", self.state != after.state),
            ("keyring", self.keyring != after.keyring),
            ("referrals", self.referrals != after.referrals),
            ("limits", self.limits != after.limits),
            ("group", self.group != after.group),
            ("discovery", self.discovery != after.discovery),
            ("nbd", self.nbd != after.nbd),
            ("slow-io", self.slow_io != after.slow_io),
        ];
        lines.extend(changed_keys("the target", &settings));
        self.add_listeners(after, &mut lines);
        for gone in &self.subsystems {
            match after.subsystems.iter().find(|one| one.nqn == gone.nqn) {
                None => lines.push(format!("- subsystem {}", gone.nqn)),
                Some(now) => self.add_subsystem((gone, now), after, &mut lines),
            }
        }
        let is_new = |one: &&SubsystemConfig| self.subsystems.iter().all(|old| old.nqn != one.nqn);
        for new in after.subsystems.iter().filter(is_new) {
            lines.push(format!("+ subsystem {}", new.nqn));
            let namespaces = new.namespaces.iter();
            lines.extend(namespaces.map(|one| format!("+ {}", namespace_text(one, new))));
            let hosts = listed_hosts(&new.hosts).iter();
            lines.extend(hosts.map(|host| format!("+ host {host} of {}", new.nqn)));
        }
        self.add_exports(after, &mut lines);
        lines
    }

    fn add_exports(&self, after: &Self, lines: &mut Vec<String>) {
        let text = |one: &ExportConfig| format!("export {}: {:#}", one.name, one.uri);
        for gone in &self.exports {
            match after.exports.iter().find(|one| one.name == gone.name) {
                None => lines.push(format!("- {}", text(gone))),
                // Another device is another export.
                Some(now) if now.uri != gone.uri => {
                    lines.extend([format!("- {}", text(gone)), format!("+ {}", text(now))]);
                }
                Some(now) => {
                    let settings = [
                        ("read-only", gone.is_read_only != now.is_read_only),
                        ("allow-resize", gone.allows_resize != now.allows_resize),
                        ("allow-remote-write", gone.allows_remote_write != now.allows_remote_write),
                        ("listen", gone.listeners != now.listeners),
                        ("limits", gone.limits != now.limits),
                    ];
                    lines.extend(changed_keys(&format!("export {}", now.name), &settings));
                }
            }
        }
        let is_new = |one: &&ExportConfig| self.exports.iter().all(|old| old.name != one.name);
        lines.extend(after.exports.iter().filter(is_new).map(|one| format!("+ {}", text(one))));
    }

    fn add_listeners(&self, after: &Self, lines: &mut Vec<String>) {
        // Several listeners may have port 0 of one address: the same one is the same of that address.
        let nth = |all: &[ListenerConfig], at: usize| {
            let address = all[at].address;
            (address, all[..at].iter().filter(|one| one.address == address).count())
        };
        let keys =
            |all: &[ListenerConfig]| (0..all.len()).map(|at| nth(all, at)).collect::<Vec<_>>();
        let (before, now) = (keys(&self.listeners), keys(&after.listeners));
        for (at, key) in before.iter().enumerate() {
            let name = format!("listener {}", key.0);
            let Some(same) = now.iter().position(|other| other == key) else {
                lines.push(format!("- {name}"));
                continue;
            };
            let (old, new) = (&self.listeners[at], &after.listeners[same]);
            let settings = [
                ("tls", old.security != new.security),
                ("allowed-networks", old.networks != new.networks),
            ];
            lines.extend(changed_keys(&name, &settings));
        }
        let is_new = |key: &&(std::net::SocketAddr, usize)| !before.contains(key);
        lines.extend(now.iter().filter(is_new).map(|key| format!("+ listener {}", key.0)));
    }

    fn add_subsystem(
        &self,
        (old, new): (&SubsystemConfig, &SubsystemConfig),
        after: &Self,
        lines: &mut Vec<String>,
    ) {
        let addresses = |config: &Self, all: &[usize]| {
            let of = |at: &usize| config.listeners.get(*at).map(|listener| listener.address);
            all.iter().filter_map(of).collect::<Vec<_>>()
        };
        let states = |config: &Self, one: &SubsystemConfig| {
            let state = |path: &super::ListenerAnaState| {
                (addresses(config, &[path.listener]), path.ana_group, path.access.name())
            };
            one.paths.iter().map(state).collect::<Vec<_>>()
        };
        // One that names no listeners is at all of them, also at new ones.
        let is_everywhere =
            |config: &Self, one: &SubsystemConfig| one.listeners.len() == config.listeners.len();
        let has_other_listeners = !(is_everywhere(self, old) && is_everywhere(after, new))
            && addresses(self, &old.listeners) != addresses(after, &new.listeners);
        let (is_open, was_open) = (new.hosts == HostsConfig::Any, old.hosts == HostsConfig::Any);
        let (was, is) = (&old.security, &new.security);
        let settings = [
            ("serial", old.serial != new.serial),
            ("allow-any-host", is_open != was_open),
            ("listeners", has_other_listeners),
            ("ANA states", states(self, old) != states(after, new)),
            ("authentication", was.authentication_required != is.authentication_required),
            ("secure-channel", was.secure_channel_required != is.secure_channel_required),
            ("authenticate-io-queues", was.authenticate_io_queues != is.authenticate_io_queues),
            ("hashes, groups or concatenation", was.policy != is.policy),
            ("allowed-networks", was.networks != is.networks),
            ("limits", old.limits.subsystem != new.limits.subsystem),
            ("host-limits", old.limits.each_host != new.limits.each_host),
        ];
        lines.extend(changed_keys(&format!("subsystem {}", new.nqn), &settings));
        for gone in &old.namespaces {
            match new.namespaces.iter().find(|one| one.nsid == gone.nsid) {
                None => lines.push(format!("- {}", namespace_text(gone, old))),
                // Another device is another namespace.
                Some(now) if now.uri != gone.uri => {
                    lines.push(format!("- {}", namespace_text(gone, old)));
                    lines.push(format!("+ {}", namespace_text(now, new)));
                }
                Some(now) => {
                    let settings = [
                        ("read-only", gone.is_read_only != now.is_read_only),
                        ("allowed-hosts", gone.hosts != now.hosts),
                        ("ana-group", gone.ana_group != now.ana_group),
                        ("slow-io", gone.slow_io != now.slow_io),
                        (
                            "limits",
                            old.limits.namespaces.get(&gone.nsid)
                                != new.limits.namespaces.get(&now.nsid),
                        ),
                    ];
                    let name = format!("namespace {} of {}", now.nsid, new.nqn);
                    lines.extend(changed_keys(&name, &settings));
                }
            }
        }
        let is_new = |one: &&NamespaceConfig| old.namespaces.iter().all(|it| it.nsid != one.nsid);
        let added = new.namespaces.iter().filter(is_new);
        lines.extend(added.map(|one| format!("+ {}", namespace_text(one, new))));
        add_hosts(old, new, lines);
    }
}

fn add_hosts(old: &SubsystemConfig, new: &SubsystemConfig, lines: &mut Vec<String>) {
    let (before, now) = (listed_hosts(&old.hosts), listed_hosts(&new.hosts));
    let name = |host: &str| format!("host {host} of {}", new.nqn);
    let gone = before.iter().filter(|host| !now.contains(host));
    lines.extend(gone.map(|host| format!("- {}", name(host))));
    let added = now.iter().filter(|host| !before.contains(host));
    lines.extend(added.map(|host| format!("+ {}", name(host))));
    let keys = |of: &SubsystemConfig, host: &str| {
        of.security.hosts.iter().find(|one| one.nqn == *host).cloned().unwrap_or_else(|| {
            HostSecurityConfig {
                nqn: host.to_owned(),
                dhchap: Vec::new(),
                dhchap_controller: None,
                psk: Vec::new(),
                kernel_psks: None,
                rights: tenmil_serve::tcp::HostRights::default(),
            }
        })
    };
    if old.hosts == HostsConfig::Any && new.hosts == HostsConfig::Any {
        let named: BTreeSet<&String> =
            old.limits.hosts.keys().chain(new.limits.hosts.keys()).collect();
        lines.extend(named.into_iter().filter_map(|host| {
            let is_changed = old.limits.hosts.get(host) != new.limits.hosts.get(host);
            changed_keys(&name(host), &[("limits", is_changed)])
        }));
    }
    for host in now.iter().filter(|host| before.contains(host)) {
        let (was, is) = (keys(old, host), keys(new, host));
        let psks =
            |one: &HostSecurityConfig| one.psk_names().map(str::to_owned).collect::<Vec<_>>();
        let settings = [
            ("dhchap", was.dhchap != is.dhchap),
            ("dhchap-controller", was.dhchap_controller != is.dhchap_controller),
            ("psk", psks(&was) != psks(&is)),
            ("rights", was.rights != is.rights),
            ("limits", old.limits.hosts.get(host) != new.limits.hosts.get(host)),
        ];
        lines.extend(changed_keys(&name(host), &settings));
    }
}

fn changed_keys(name: &str, keys: &[(&str, bool)]) -> Option<String> {
    let changed: Vec<&str> = keys.iter().filter(|(_, is)| *is).map(|(key, _)| *key).collect();
    (!changed.is_empty()).then(|| format!("~ {name}: {}", changed.join(", ")))
}

fn namespace_text(one: &NamespaceConfig, of: &SubsystemConfig) -> String {
    format!("namespace {} of {}: {:#}", one.nsid, of.nqn, one.uri)
}

fn listed_hosts(hosts: &HostsConfig) -> &[String] {
    match hosts {
        HostsConfig::Any => &[],
        HostsConfig::Only(hosts) => hosts,
    }
}

#[cfg(test)]
mod tests {
    use super::TargetConfig;

    const BEFORE: &str = "\
[[listener]]
address = '127.0.0.1:4420'
[[subsystem]]
nqn = 'nqn.2026-01.org.example:a'
allowed-hosts = ['nqn.2026-01.org.example:one', 'nqn.2026-01.org.example:two']
[[subsystem.namespace]]
uri = 'ram:1m'
[[subsystem.namespace]]
uri = 'ram:2m'
[[subsystem]]
nqn = 'nqn.2026-01.org.example:b'
";

    fn lines(edits: &[(&str, &str)]) -> Vec<String> {
        let mut text = BEFORE.to_owned();
        for (found, by) in edits {
            assert!(text.contains(found), "{found}");
            text = text.replacen(found, by, 1);
        }
        let [before, after] = [BEFORE, &text].map(|text| TargetConfig::parse(text).unwrap());
        before.difference_to(&after)
    }

    #[test]
    fn difference_has_a_line_for_each_object() {
        let of = "of nqn.2026-01.org.example:a";
        assert_eq!(lines(&[("'ram:1m'", "'ram:1m' # the first")]), [""; 0]);
        let found = lines(&[("[[listener]]", "[[listener]]\naddress='127.0.0.1:1'\n[[listener]]")]);
        assert_eq!(found, ["+ listener 127.0.0.1:1"]);
        assert_eq!(
            lines(&[("uri = 'ram:2m'", "uri = 'ram:3m'")]),
            [format!("- namespace 2 {of}: ram:2m"), format!("+ namespace 2 {of}: ram:3m")]
        );
        assert_eq!(
            lines(&[("'ram:2m'", "'ram:2m'\nread-only = true\nana-group = 2")]),
            [format!("~ namespace 2 {of}: read-only, ana-group")]
        );
        assert_eq!(
            lines(&[("'nqn.2026-01.org.example:one', ", "'nqn.2026-01.org.example:new', ")]),
            [
                format!("- host nqn.2026-01.org.example:one {of}"),
                format!("+ host nqn.2026-01.org.example:new {of}")
            ]
        );
        assert_eq!(
            lines(&[(
                "'nqn.2026-01.org.example:two'",
                "{ nqn = 'nqn.2026-01.org.example:two', dhchap = ['k'], connections = 4 }"
            )]),
            [format!("~ host nqn.2026-01.org.example:two {of}: dhchap, rights")]
        );
        assert_eq!(
            lines(&[("example:b", "example:c")]),
            ["- subsystem nqn.2026-01.org.example:b", "+ subsystem nqn.2026-01.org.example:c"]
        );
        assert_eq!(
            lines(&[("[[listener]]", "buffer-memory='8m'\n[[listener]]")]),
            ["~ the target: buffer-memory"]
        );
    }
}
