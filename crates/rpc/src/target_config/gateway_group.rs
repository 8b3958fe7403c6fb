//! `[group]` table: the gateway group that the target is a member of.

use std::net::SocketAddr;

use serde::Deserialize;
use tenmil_base::Span;
use tenmil_block::quantity_parser::parse_time;
use tenmil_block::uri::Uri;
use toml::Spanned;

use super::config_checker::{CheckResult, ConfigChecker};
use super::{GroupConfig, IgnoredLineNumber, ListenerConfig, NamespaceConfig, SubsystemConfig};
use crate::GroupStoreUri;

/// Table as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct GroupTable {
    name: Spanned<String>,
    member: Spanned<String>,
    store: Spanned<String>,
    lease: Option<Spanned<String>>,
    addresses: Option<Spanned<Vec<Spanned<String>>>>,
}

/// Range of the lease in seconds: etcd rounds shorter ones up.
const LEASE_SECS: std::ops::RangeInclusive<u64> = 2..=60;
const NAME_MAX: usize = 64;
/// Device type of volumes.
const VOLUME: &str = "volume";

impl ConfigChecker<'_> {
    /// Checks the group, and that nothing is configured that its gateways could not agree about.
    pub(super) fn check_group(
        &self,
        table: &Spanned<GroupTable>,
        subsystems: &[SubsystemConfig],
        has_exports: bool,
        has_state: bool,
    ) -> CheckResult<GroupConfig> {
        let of = table.get_ref();
        let name = self.parse_group_name("name", &of.name)?;
        let member = self.parse_group_name("member", &of.member)?;
        let store = GroupStoreUri::parse(of.store.get_ref())
            .map_err(|error| self.config_error("store", &of.store, error.text))?;
        let lease = match &of.lease {
            None => tenmil_group::LeaseTiming::LEASE,
            Some(text) => self.parse_lease(text)?,
        };
        let addresses = match &of.addresses {
            Some(listed) => self.parse_group_addresses(listed)?,
            None => self.listener_addresses(table)?,
        };
        let refuse = |problem: &str| Err(self.config_error("group", table, problem));
        if has_exports {
            return refuse("the file has NBD exports, expected none: they do not fail over");
        }
        if has_state {
            return refuse(
                "the file has `state-dir`, expected none: reservations do not hold across gateways, and \
                 hosts cannot make any",
            );
        }
        if let Some(subsystem) = subsystems.iter().find(|one| !one.paths.is_empty()) {
            let problem = format!(
                "{} has ANA states, expected none: that of each ANA group follows from its owner",
                subsystem.nqn
            );
            return refuse(&problem);
        }
        let namespaces = subsystems.iter().flat_map(|one| &one.namespaces);
        if let Some(shared) = namespaces.clone().find(|one| one.uri.scheme() == super::SCHEME) {
            let problem = format!(
                "namespace {} is on a named device, expected a URI: a device of several namespaces would \
                 have several owners",
                shared.nsid
            );
            return Err(self.config_error("group", table, problem));
        }
        if let Some((pool, [first, second])) = pool_of_two_groups(namespaces.clone()) {
            let problem = format!(
                "the pool on {pool:#} has volumes in the ANA groups {first} and {second}, expected one: a pool is open \
                 at one gateway at a time"
            );
            return Err(self.config_error("group", table, problem));
        }
        if namespaces.count() == 0 {
            return refuse("no subsystem has a namespace, expected one at least");
        }
        let line = self.line_number(table);
        Ok(GroupConfig { name, member, store, lease, addresses, line })
    }

    fn parse_group_name(&self, key: &str, found: &Spanned<String>) -> CheckResult<String> {
        let text = found.get_ref();
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if text.is_empty() || text.len() > NAME_MAX || !text.bytes().all(is_plain) {
            let problem = format!(
                "'{text}', expected 1 to {NAME_MAX} letters, digits, hyphens, underscores and periods"
            );
            return Err(self.config_error(key, found, problem));
        }
        Ok(text.clone())
    }

    fn parse_lease(&self, found: &Spanned<String>) -> CheckResult<Span> {
        let text = found.get_ref();
        let lease = parse_time(text).ok().filter(|lease| {
            lease.ns % 1_000_000_000 == 0 && LEASE_SECS.contains(&(lease.ns / 1_000_000_000))
        });
        lease.ok_or_else(|| {
            let (least, most) = (LEASE_SECS.start(), LEASE_SECS.end());
            let problem = format!("'{text}', expected whole seconds from {least}s to {most}s");
            self.config_error("lease", found, problem)
        })
    }

    fn parse_group_addresses(
        &self,
        listed: &Spanned<Vec<Spanned<String>>>,
    ) -> CheckResult<Vec<SocketAddr>> {
        let parse = |text: &Spanned<String>| {
            let found = text.get_ref().parse::<SocketAddr>().ok();
            found
                .filter(|address| address.port() != 0 && !address.ip().is_unspecified())
                .ok_or_else(|| {
                    let text_found = text.get_ref();
                    let problem = format!(
                        "'{text_found}', expected an address that hosts can connect to, such as \
                         192.0.2.1:4420"
                    );
                    self.config_error("addresses", text, problem)
                })
        };
        let addresses = listed.get_ref().iter().map(parse).collect::<CheckResult<Vec<_>>>()?;
        match addresses.is_empty() {
            false => Ok(addresses),
            true => {
                let problem = "none are named, expected at least one, or no such key";
                Err(self.config_error("addresses", listed, problem))
            }
        }
    }

    /// Addresses of the listeners, if hosts can connect to each as it is written.
    fn listener_addresses(&self, table: &Spanned<GroupTable>) -> CheckResult<Vec<SocketAddr>> {
        let is_vague =
            |one: &&ListenerConfig| one.address.port() == 0 || one.address.ip().is_unspecified();
        if let Some(vague) = self.listeners.iter().find(is_vague) {
            let problem = format!(
                "hosts cannot connect to {}, expected `addresses` with those of this gateway",
                vague.address
            );
            return Err(self.config_error("group", table, problem));
        }
        Ok(self.listeners.iter().map(|one| one.address).collect())
    }
}

impl GroupConfig {
    /// ANA groups of the namespaces of these subsystems.
    pub fn ana_groups(subsystems: &[SubsystemConfig]) -> std::collections::BTreeSet<u32> {
        let namespaces = subsystems.iter().flat_map(|one| &one.namespaces);
        namespaces.map(|namespace| namespace.ana_group).collect()
    }

    /// Line of the table.
    #[must_use]
    pub const fn line(&self) -> IgnoredLineNumber {
        self.line
    }
}

/// A pool with volumes in two ANA groups.
fn pool_of_two_groups<'a>(
    namespaces: impl Iterator<Item = &'a NamespaceConfig>,
) -> Option<(&'a Uri, [u32; 2])> {
    let mut groups: Vec<(&Uri, u32)> = Vec::new();
    for namespace in namespaces {
        for pool in pools_of(&namespace.uri) {
            match groups.iter().find(|(known, _)| *known == pool) {
                Some((_, group)) if *group != namespace.ana_group => {
                    return Some((pool, [*group, namespace.ana_group]));
                }
                Some(_) => {}
                None => groups.push((pool, namespace.ana_group)),
            }
        }
    }
    None
}

/// Devices of the pools that a device has a volume of.
fn pools_of(uri: &Uri) -> Vec<&Uri> {
    let own = uri.children().first().filter(|_| uri.scheme() == VOLUME);
    own.into_iter().chain(uri.children().iter().flat_map(pools_of)).collect()
}

#[cfg(test)]
mod tests {
    use crate::target_config::TargetConfig;

    const FILE: &str = "\
[group]
name = \"disks\"
member = \"a\"
store = \"etcd:http://127.0.0.1:2379\"

[[listener]]
address = \"127.0.0.1:4420\"

[[subsystem]]
nqn = \"nqn.2026-01.org.example:disks\"

[[subsystem.namespace]]
uri = \"tcp://127.0.0.1:4430/nqn.2026-01.org.example:b/1\"
";

    #[test]
    fn group_is_read_with_the_addresses_of_its_listeners() {
        let group = TargetConfig::parse(FILE).unwrap().group.unwrap();
        assert_eq!((group.name.as_str(), group.member.as_str()), ("disks", "a"));
        assert_eq!(group.addresses, ["127.0.0.1:4420".parse().unwrap()]);
        assert_eq!(group.lease, tenmil_base::Span::from_secs(3));
    }

    #[test]
    fn pool_is_in_one_ana_group() {
        let volumes = |pool: &str, group: u32| {
            let of = |at: u32, device: &str, group: u32| {
                format!(
                    "[[subsystem.namespace]]\nuri = \"volume:[file:/{device}]/v{at}\"\nana-group = {group}\n"
                )
            };
            let text = format!("{FILE}{}{}", of(1, "one", 1), of(2, pool, group));
            TargetConfig::parse(&text)
        };
        volumes("one", 1).unwrap();
        volumes("two", 2).unwrap();
        let wrong = volumes("one", 2).unwrap_err();
        assert!(wrong.problem.contains("in the ANA groups 1 and 2, expected one"), "{wrong}");
    }

    #[test]
    fn what_gateways_cannot_agree_about_is_rejected() {
        let path =
            "\n[[subsystem.path]]\nlistener = \"127.0.0.1:4420\"\nana-state = \"inaccessible\"\n";
        for (from, to, key, problem) in [
            ("etcd:http://127.0.0.1:2379", "redis:x", "store", "expected etcd:http://"),
            ("etcd:http://127.0.0.1:2379", "etcd:https://a:1", "store", "TLS to etcd"),
            ("member = \"a\"", "member = \"a/b\"", "member", "letters"),
            ("member = \"a\"", "member = \"a\"\nlease = \"1s\"", "lease", "from 2s"),
            ("127.0.0.1:4420", "127.0.0.1:0", "group", "`addresses`"),
            ("[group]", "state-dir = \"/tmp\"\n[group]", "group", "`state-dir`"),
            (
                "[[subsystem.namespace]]",
                &format!("{path}\n[[subsystem.namespace]]"),
                "group",
                "ANA",
            ),
            ("member = \"a\"", "member = \"a\"\naddresses = []", "addresses", "none"),
        ] {
            let wrong = TargetConfig::parse(&FILE.replacen(from, to, 1)).unwrap_err();
            assert_eq!(wrong.key, format!("`{key}`"), "{wrong}");
            assert!(wrong.problem.contains(problem), "{wrong}");
        }
    }
}
