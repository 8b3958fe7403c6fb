//! Checks of the security settings: values, and combinations with which no host could connect.

use std::collections::BTreeSet;

use tenmil_block::quantity_parser::parse_size;
use tenmil_keyring::KeyName;
use tenmil_nvme_auth::{ConcatenationPolicy, Group, Hash, KERNEL_KEYRING};
use tenmil_serve::PeerNetwork;
use tenmil_serve::tcp::{HostRights, NamespaceSelection, PortSecurity};
use toml::Spanned;

use super::allowed_host::{AllowedHost, HostTable, ReadOnly};
use super::config_checker::{CheckResult, ConfigChecker, NSID_MAX};
use super::config_file::{DiscoveryTable, SubsystemTable};
use super::security::{HostSecurityConfig, KeyReference, SecurityConfig, TLS_NAMES};
use super::{HostsConfig, IgnoredLineNumber, SubsystemConfig};

/// Security keys of a subsystem or of the discovery service.
pub(super) struct SecurityKeys<'a> {
    pub(super) allowed_hosts: Option<&'a Spanned<Vec<Spanned<AllowedHost>>>>,
    pub(super) authentication: Option<&'a Spanned<String>>,
    pub(super) secure_channel: Option<&'a Spanned<String>>,
    pub(super) authenticate_io_queues: Option<bool>,
    pub(super) dhchap_hashes: Option<&'a Spanned<Vec<Spanned<String>>>>,
    pub(super) dhchap_groups: Option<&'a Spanned<Vec<Spanned<String>>>>,
    pub(super) concatenation: Option<&'a Spanned<String>>,
    pub(super) allowed_networks: Option<&'a Spanned<Vec<Spanned<String>>>>,
}

const HASHES: [(&str, Hash); 3] =
    [("sha256", Hash::Sha256), ("sha384", Hash::Sha384), ("sha512", Hash::Sha512)];

const CONCATENATIONS: [(&str, ConcatenationPolicy); 3] = [
    ("refused", ConcatenationPolicy::Refused),
    ("allowed", ConcatenationPolicy::Allowed),
    ("required", ConcatenationPolicy::Required),
];

const REQUIREMENTS: [(&str, bool); 2] = [("optional", false), ("required", true)];

/// Highest connection limit of a host, and smallest buffer memory with which it can work.
const CONNECTIONS_MAX: u32 = 1 << 16;
const MEMORY_MIN: u64 = 4 << 20;

impl ConfigChecker<'_> {
    /// TLS of a listener.
    pub(super) fn parse_tls(&self, tls: Option<&Spanned<String>>) -> CheckResult<PortSecurity> {
        tls.map_or(Ok(PortSecurity::Plaintext), |tls| self.one_of("tls", tls, &TLS_NAMES))
    }

    /// Security of a subsystem, without its combination with listeners.
    pub(super) fn check_security(&self, keys: &SecurityKeys<'_>) -> CheckResult<SecurityConfig> {
        let required = |key, value: Option<&Spanned<String>>| match value {
            None => Ok(false),
            Some(value) => self.one_of(key, value, &REQUIREMENTS),
        };
        let mut security = SecurityConfig {
            hosts: self.hosts_with_keys(keys.allowed_hosts)?,
            authentication_required: required("authentication", keys.authentication)?,
            secure_channel_required: required("secure-channel", keys.secure_channel)?,
            networks: self.parse_networks(keys.allowed_networks)?,
            ..SecurityConfig::default()
        };
        if let Some(each) = keys.authenticate_io_queues {
            security.authenticate_io_queues = each;
        }
        let policy = &mut security.policy;
        if let Some(hashes) = keys.dhchap_hashes {
            policy.hashes = self.list_of("dhchap-hashes", hashes, &HASHES)?;
        }
        if let Some(groups) = keys.dhchap_groups {
            let all = Group::ALL.map(|group| (group.to_string(), group));
            let all: Vec<_> = all.iter().map(|(name, group)| (name.as_str(), *group)).collect();
            policy.groups = self.list_of("dhchap-groups", groups, &all)?;
        }
        if let Some(concatenation) = keys.concatenation {
            policy.concatenation = self.one_of("concatenation", concatenation, &CONCATENATIONS)?;
        }
        self.check_authentication(keys, &security)?;
        Ok(security)
    }

    /// Security of the discovery service: keys of its own, or those of all subsystems. Without a table, a
    /// host may use its TLS keys and need not authenticate: not each host can in discovery.
    pub(super) fn check_discovery(
        &self,
        table: Option<&DiscoveryTable>,
        subsystems: &[SubsystemConfig],
    ) -> CheckResult<SecurityConfig> {
        let Some(table) = table else {
            let mut hosts = merged_hosts(subsystems);
            hosts.retain_mut(|host| {
                (host.dhchap, host.dhchap_controller) = (Vec::new(), None);
                !host.psk.is_empty()
            });
            return Ok(SecurityConfig { hosts, ..SecurityConfig::default() });
        };
        let mut keys = table.security_keys();
        let authentication = keys.authentication.take();
        let mut security = self.check_security(&keys)?;
        if let Some(authentication) = authentication {
            security.authentication_required =
                self.one_of("authentication", authentication, &REQUIREMENTS)?;
        }
        // Without a key, an entry has an effect only where hosts without keys are rejected.
        let is_restricted = security.authentication_required || security.secure_channel_required;
        let has_keys =
            |nqn: &str| security.hosts.iter().any(|host| host.nqn == nqn && host.has_keys());
        let mut hosts = keys.allowed_hosts.iter().flat_map(|hosts| hosts.get_ref());
        if let Some(host) = hosts.find(|host| !is_restricted && !has_keys(host.get_ref().nqn())) {
            let problem = "the host has no key, and discovery is open to other hosts, expected \
                           `authentication = \"required\"` or `secure-channel = \"required\"`";
            return Err(self.config_error("allowed-hosts", host, problem));
        }
        if keys.allowed_hosts.is_none() {
            security.hosts = merged_hosts(subsystems);
        }
        let has_secrets = security.hosts.iter().any(|host| !host.dhchap.is_empty());
        if let Some(found) =
            authentication.filter(|_| security.authentication_required && !has_secrets)
        {
            let problem = "no host has `dhchap`, expected one here or in a subsystem: no host could \
                           connect";
            return Err(self.config_error("authentication", found, problem));
        }
        Ok(security)
    }

    /// Rejects a subsystem that some host, or every host, could not use through its listeners, and
    /// rights in namespaces that it has not.
    pub(super) fn check_subsystem_security(
        &self,
        table: &SubsystemTable,
        subsystem: &SubsystemConfig,
    ) -> CheckResult<()> {
        self.check_read_only_namespaces(table, subsystem)?;
        let at = |index: &usize| self.listeners.get(*index);
        let listeners: Vec<_> = subsystem.listeners.iter().filter_map(at).collect();
        if let Some(found) = table.secure_channel.as_ref()
            && subsystem.security.secure_channel_required
            && let Some(plain) = listeners.iter().find(|one| !one.security.accepts_tls())
        {
            let problem = format!(
                "listener {} has no TLS, expected `tls = \"required\"` or \"allowed\" there, or other \
                 `listeners` here",
                plain.address
            );
            return Err(self.config_error("secure-channel", found, problem));
        }
        let mut psks =
            host_tables(table.allowed_hosts.as_ref()).filter_map(|host| host.psk.as_ref());
        if let Some(found) =
            psks.next().filter(|_| !listeners.iter().any(|one| one.security.accepts_tls()))
        {
            let problem = "no listener of the subsystem has TLS, expected `tls = \"required\"` or \
                           \"allowed\" at one";
            return Err(self.config_error("psk", found, problem));
        }
        // A subsystem may have no listener yet.
        if !listeners.is_empty()
            && listeners.iter().all(|one| one.security == PortSecurity::TlsRequired)
        {
            self.check_every_host_has_psk(table, subsystem)?;
        }
        Ok(())
    }

    fn check_read_only_namespaces(
        &self,
        table: &SubsystemTable,
        subsystem: &SubsystemConfig,
    ) -> CheckResult<()> {
        let has = |nsid: &u32| subsystem.namespaces.iter().any(|one| one.nsid == *nsid);
        for host in host_tables(table.allowed_hosts.as_ref()) {
            let Some(found) = &host.read_only else { continue };
            if let ReadOnly::Listed(nsids) = found.get_ref()
                && let Some(nsid) = nsids.iter().find(|nsid| !has(nsid))
            {
                let problem =
                    format!("the subsystem has no namespace {nsid}, expected one that it has");
                return Err(self.config_error("read-only", found, problem));
            }
        }
        Ok(())
    }

    /// Each host needs a PSK if all listeners require TLS.
    fn check_every_host_has_psk(
        &self,
        table: &SubsystemTable,
        subsystem: &SubsystemConfig,
    ) -> CheckResult<()> {
        let problem = |host: &str| {
            format!(
                "{host} has no `psk`, and each listener of the subsystem requires TLS, expected one"
            )
        };
        let HostsConfig::Only(hosts) = &subsystem.hosts else {
            return Err(self.config_error(
                "allowed-hosts",
                &table.nqn,
                problem("a host that is not named"),
            ));
        };
        let has_psk = |host: &&String| {
            let mut keys = subsystem.security.hosts.iter();
            keys.any(|one| one.nqn == **host && one.has_psk())
        };
        match (hosts.iter().find(|host| !has_psk(host)), &table.allowed_hosts) {
            (Some(host), Some(found)) => {
                Err(self.config_error("allowed-hosts", found, problem(host)))
            }
            _ => Ok(()),
        }
    }

    /// Names of hosts. A host that has a table is named once.
    pub(super) fn parse_allowed_hosts(
        &self,
        hosts: &Spanned<Vec<Spanned<AllowedHost>>>,
    ) -> CheckResult<Vec<String>> {
        let mut names = Vec::new();
        for host in hosts.get_ref() {
            let name = match host.get_ref() {
                AllowedHost::Name(name) => self.parse_hostnqn("allowed-hosts", host, name)?,
                AllowedHost::Table(table) => {
                    self.parse_hostnqn("nqn", &table.nqn, table.nqn.get_ref())?
                }
            };
            let is_table = |name: &str| {
                let mut all = hosts.get_ref().iter().map(Spanned::get_ref);
                all.any(|one| matches!(one, AllowedHost::Table(_)) && one.nqn() == name)
            };
            if names.contains(&name) && is_table(&name) {
                let problem =
                    format!("'{name}' is named twice, expected one table with all its keys");
                return Err(self.config_error("allowed-hosts", host, problem));
            }
            names.push(name);
        }
        Ok(names)
    }

    fn hosts_with_keys(
        &self,
        hosts: Option<&Spanned<Vec<Spanned<AllowedHost>>>>,
    ) -> CheckResult<Vec<HostSecurityConfig>> {
        host_tables(hosts).map(|table| self.check_host(table)).collect()
    }

    fn check_host(&self, table: &HostTable) -> CheckResult<HostSecurityConfig> {
        let dhchap = self.key_names("dhchap", table.dhchap.as_ref())?;
        let controller = table.dhchap_controller.as_ref();
        if let Some(found) = controller.filter(|_| dhchap.is_empty()) {
            let problem = "the host has no `dhchap`, expected one: the controller proves its identity in \
                           answer to an authentication of the host";
            return Err(self.config_error("dhchap-controller", found, problem));
        }
        let controller =
            controller.map(|name| self.key_name("dhchap-controller", name)).transpose()?;
        let connections_max = match &table.connections {
            None => None,
            Some(found) if (1..=CONNECTIONS_MAX).contains(found.get_ref()) => {
                Some(*found.get_ref() as usize)
            }
            Some(found) => {
                let problem = format!("{}, expected 1 to {CONNECTIONS_MAX}", found.get_ref());
                return Err(self.config_error("connections", found, problem));
            }
        };
        let (psk, kernel_psks) = self.psk_names(table.psk.as_ref())?;
        let memory = table.buffer_memory.as_ref().map(|memory| self.parse_host_memory(memory));
        Ok(HostSecurityConfig {
            nqn: table.nqn.get_ref().clone(),
            dhchap,
            dhchap_controller: controller,
            psk,
            kernel_psks,
            rights: HostRights {
                read_only: self.parse_read_only(table.read_only.as_ref())?,
                reservations: table.reservations.as_ref().is_none_or(|allowed| *allowed.get_ref()),
                connections_max,
                memory_bytes_max: memory.transpose()?,
            },
        })
    }

    fn parse_host_memory(&self, memory: &Spanned<String>) -> CheckResult<u64> {
        let text = memory.get_ref();
        let bytes = parse_size(text).ok().filter(|bytes| *bytes >= MEMORY_MIN);
        bytes.ok_or_else(|| {
            let problem = format!("'{text}', expected at least 4m, such as 16m");
            self.config_error("buffer-memory", memory, problem)
        })
    }

    fn parse_read_only(
        &self,
        read_only: Option<&Spanned<ReadOnly>>,
    ) -> CheckResult<NamespaceSelection> {
        let Some(found) = read_only else { return Ok(NamespaceSelection::None) };
        match found.get_ref() {
            ReadOnly::All(true) => Ok(NamespaceSelection::All),
            ReadOnly::All(false) => Ok(NamespaceSelection::None),
            ReadOnly::Listed(nsids) => {
                match nsids.iter().find(|nsid| !(1..=NSID_MAX).contains(*nsid)) {
                    Some(nsid) => {
                        let problem = format!("{nsid}, expected identifiers from 1 to {NSID_MAX}");
                        Err(self.config_error("read-only", found, problem))
                    }
                    None => Ok(NamespaceSelection::Listed(nsids.iter().copied().collect())),
                }
            }
        }
    }

    fn key_names(
        &self,
        key: &'static str,
        names: Option<&Spanned<Vec<Spanned<String>>>>,
    ) -> CheckResult<Vec<KeyReference>> {
        let Some(names) = names else { return Ok(Vec::new()) };
        if names.get_ref().is_empty() {
            let problem = "none are named, expected at least one, or no such key";
            return Err(self.config_error(key, names, problem));
        }
        names.get_ref().iter().map(|name| self.key_name(key, name)).collect()
    }

    /// Names of pre-shared keys, and the position of the kernel's keyring among them.
    fn psk_names(
        &self,
        names: Option<&Spanned<Vec<Spanned<String>>>>,
    ) -> CheckResult<(Vec<KeyReference>, Option<IgnoredLineNumber>)> {
        let all = names.into_iter().flat_map(|names| names.get_ref());
        let is_kernel = |name: &&Spanned<String>| name.get_ref() == KERNEL_KEYRING;
        let Some(kernel) = all.clone().find(is_kernel) else {
            return Ok((self.key_names("psk", names)?, None));
        };
        let named = all.filter(|name| !is_kernel(name)).map(|name| self.key_name("psk", name));
        Ok((named.collect::<CheckResult<_>>()?, Some(self.line_number(kernel))))
    }

    /// Name of a key. An error does not repeat the text, which may be a key.
    fn key_name(&self, key: &'static str, name: &Spanned<String>) -> CheckResult<KeyReference> {
        let parsed = name.get_ref().parse::<KeyName>();
        let parsed = parsed.map_err(|why| self.config_error(key, name, why.to_string()))?;
        Ok(KeyReference { name: parsed, line: self.line_number(name), key })
    }

    fn parse_networks(
        &self,
        networks: Option<&Spanned<Vec<Spanned<String>>>>,
    ) -> CheckResult<Vec<PeerNetwork>> {
        let Some(networks) = networks else { return Ok(Vec::new()) };
        if networks.get_ref().is_empty() {
            let problem = "none are named, expected at least one, or no such key for all of them";
            return Err(self.config_error("allowed-networks", networks, problem));
        }
        let network = |text: &Spanned<String>| {
            let parsed = text.get_ref().parse::<PeerNetwork>();
            parsed.map_err(|why| self.config_error("allowed-networks", text, why.to_string()))
        };
        networks.get_ref().iter().map(network).collect()
    }

    /// Networks of a listener.
    pub(super) fn networks_of_listener(
        &self,
        networks: Option<&Spanned<Vec<Spanned<String>>>>,
    ) -> CheckResult<Vec<PeerNetwork>> {
        self.parse_networks(networks)
    }

    /// If authentication is required, each named host needs a secret, and there are named hosts.
    fn check_authentication(
        &self,
        keys: &SecurityKeys<'_>,
        security: &SecurityConfig,
    ) -> CheckResult<()> {
        let Some(found) = keys.authentication.filter(|_| security.authentication_required) else {
            return Ok(());
        };
        let named = keys.allowed_hosts.iter().flat_map(|hosts| hosts.get_ref());
        let named: BTreeSet<&str> = named.map(|host| host.get_ref().nqn()).collect();
        if keys.allowed_hosts.is_none() {
            let problem =
                "no host has `dhchap`, expected `allowed-hosts` with one: no host could connect";
            return Err(self.config_error("authentication", found, problem));
        }
        let has_secret = |name: &&str| {
            security.hosts.iter().any(|host| host.nqn == *name && !host.dhchap.is_empty())
        };
        match named.iter().find(|name| !has_secret(name)) {
            Some(name) => {
                let problem = format!("{name} has no `dhchap`, expected one: it could not connect");
                Err(self.config_error("authentication", found, problem))
            }
            None => Ok(()),
        }
    }

    fn one_of<T: Copy>(
        &self,
        key: &str,
        found: &Spanned<String>,
        all: &[(&str, T)],
    ) -> CheckResult<T> {
        let word = found.get_ref();
        let value = all.iter().find(|(name, _)| name == word).map(|(_, value)| *value);
        value.ok_or_else(|| {
            let names: Vec<_> = all.iter().map(|(name, _)| *name).collect();
            let problem = format!("'{word}', expected one of {}", names.join(", "));
            self.config_error(key, found, problem)
        })
    }

    /// A list of different values, at least one.
    fn list_of<T: Copy + PartialEq>(
        &self,
        key: &str,
        found: &Spanned<Vec<Spanned<String>>>,
        all: &[(&str, T)],
    ) -> CheckResult<Vec<T>> {
        let mut values = Vec::new();
        for word in found.get_ref() {
            let value = self.one_of(key, word, all)?;
            if values.contains(&value) {
                let problem = format!("'{}' is named twice, expected once", word.get_ref());
                return Err(self.config_error(key, word, problem));
            }
            values.push(value);
        }
        match values.is_empty() {
            true => Err(self.config_error(key, found, "none are named, expected at least one")),
            false => Ok(values),
        }
    }
}

/// Hosts that have a table.
fn host_tables(
    hosts: Option<&Spanned<Vec<Spanned<AllowedHost>>>>,
) -> impl Iterator<Item = &HostTable> {
    let hosts = hosts.into_iter().flat_map(|hosts| hosts.get_ref());
    hosts.filter_map(|host| match host.get_ref() {
        AllowedHost::Table(table) => Some(&**table),
        AllowedHost::Name(_) => None,
    })
}

/// Keys of the hosts of all subsystems. A host has all that it has in any of them; rights are of a
/// subsystem.
fn merged_hosts(subsystems: &[SubsystemConfig]) -> Vec<HostSecurityConfig> {
    let mut merged: Vec<HostSecurityConfig> = Vec::new();
    for host in subsystems.iter().flat_map(|subsystem| &subsystem.security.hosts) {
        let add = |to: &mut Vec<KeyReference>, keys: &[KeyReference]| {
            for key in keys {
                if !to.iter().any(|known| known.name == key.name) {
                    to.push(key.clone());
                }
            }
        };
        match merged.iter_mut().find(|known| known.nqn == host.nqn) {
            Some(known) => {
                add(&mut known.dhchap, &host.dhchap);
                add(&mut known.psk, &host.psk);
                known.kernel_psks = known.kernel_psks.or(host.kernel_psks);
                if known.dhchap_controller.is_none() {
                    known.dhchap_controller = host.dhchap_controller.clone();
                }
            }
            None => {
                merged.push(HostSecurityConfig { rights: HostRights::default(), ..host.clone() })
            }
        }
    }
    merged
}

impl SubsystemTable {
    /// Its security keys.
    pub(super) const fn security_keys(&self) -> SecurityKeys<'_> {
        SecurityKeys {
            allowed_hosts: self.allowed_hosts.as_ref(),
            authentication: self.authentication.as_ref(),
            secure_channel: self.secure_channel.as_ref(),
            authenticate_io_queues: self.authenticate_io_queues,
            dhchap_hashes: self.dhchap_hashes.as_ref(),
            dhchap_groups: self.dhchap_groups.as_ref(),
            concatenation: self.concatenation.as_ref(),
            allowed_networks: self.allowed_networks.as_ref(),
        }
    }
}

impl DiscoveryTable {
    /// Its security keys. It has no I/O queues.
    const fn security_keys(&self) -> SecurityKeys<'_> {
        SecurityKeys {
            allowed_hosts: self.allowed_hosts.as_ref(),
            authentication: self.authentication.as_ref(),
            secure_channel: self.secure_channel.as_ref(),
            authenticate_io_queues: None,
            dhchap_hashes: self.dhchap_hashes.as_ref(),
            dhchap_groups: self.dhchap_groups.as_ref(),
            concatenation: self.concatenation.as_ref(),
            allowed_networks: self.allowed_networks.as_ref(),
        }
    }
}
