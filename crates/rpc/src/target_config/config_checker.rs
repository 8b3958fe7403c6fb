//! Semantic checks of a configuration file.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;

use tenmil_base::Span;
use tenmil_block::quantity_parser::parse_size;
use tenmil_block::uri::Uri;
use tenmil_wire::nqn;
use toml::Spanned;

use super::config_file::{
    AnaStateTable, ConfigFile, DeviceTable, ListenerTable, NamespaceTable, SubsystemTable,
    line_of_byte,
};
use super::named_devices::{DeviceUser, NamedDevices};
use super::rate_limits::RateLimitsTable;
use super::{
    ANA_GROUP_MAX, AnaStateConfig, ConfigError, HostsConfig, IgnoredLineNumber, ListenerAnaState,
    ListenerConfig, NamespaceConfig, SubsystemConfig, TargetConfig,
};
use crate::methods::parse_slow_io;

pub(super) type CheckResult<T> = Result<T, ConfigError>;

/// Longest serial number (Base 2.1 §5.1.13.2.1).
const SERIAL_MAX: usize = 20;
/// Highest NSID of a subsystem.
pub(super) const NSID_MAX: u32 = 1024;
/// Smallest buffer memory with which every command can be executed: one largest buffer, and small
/// ones.
const MEMORY_MIN: u64 = 4 << 20;

/// Checker of one file.
pub(super) struct ConfigChecker<'a> {
    text: &'a str,
    pub(super) listeners: Vec<ListenerConfig>,
    named: NamedDevices,
    /// Time from which a command is slow, of namespaces without a time of their own.
    slow_io: Option<Span>,
}

pub(super) fn check_config(text: &str, file: ConfigFile) -> CheckResult<TargetConfig> {
    let (listeners, named) = (Vec::new(), NamedDevices::default());
    let mut reader = ConfigChecker { text, listeners, named, slow_io: None };
    reader.slow_io = reader.slow_io_time(file.slow_io.as_ref())?;
    let memory_bytes =
        file.buffer_memory.as_ref().map(|memory| reader.parse_buffer_memory(memory)).transpose()?;
    let limits = reader.check_limits(file.limits.as_ref())?;
    let referral = |address| reader.parse_listen_address("referrals", address);
    let referrals = file.referrals.iter().map(referral).collect::<CheckResult<_>>()?;
    reader.check_listeners(&file.listener)?;
    for table in &file.device {
        reader.define_device(table)?;
    }
    let mut subsystems: Vec<SubsystemConfig> = Vec::new();
    for table in &file.subsystem {
        let subsystem = reader.check_subsystem(table)?;
        if subsystems.iter().any(|other| other.nqn == subsystem.nqn) {
            return Err(reader.config_error(
                "nqn",
                &table.nqn,
                "another subsystem has this name, expected each to have its own",
            ));
        }
        subsystems.push(subsystem);
    }
    let nbd = reader.check_nbd(file.nbd.as_ref())?;
    let exports = reader.check_exports(&file.export, &nbd)?;
    let has_state = file.state_dir.is_some();
    let group = file.group.as_ref();
    let group = group.map(|it| reader.check_group(it, &subsystems, !exports.is_empty(), has_state));
    let group = group.transpose()?;
    let line = |found: Option<&Spanned<String>>| {
        found.map_or(IgnoredLineNumber(1), |found| reader.line_number(found))
    };
    let (memory_line, state_line) =
        (line(file.buffer_memory.as_ref()), line(file.state_dir.as_ref()));
    let keyring_line = line(file.keyring.as_ref());
    let directory = |key: &'static str, found: &Option<Spanned<String>>| {
        found.as_ref().map(|path| reader.parse_directory(key, path)).transpose()
    };
    let state = directory("state-dir", &file.state_dir)?;
    let keyring = directory("keyring", &file.keyring)?;
    let discovery = reader.check_discovery(file.discovery.as_ref(), &subsystems)?;
    let (listeners, slow_io) = (reader.listeners, reader.slow_io);
    Ok(TargetConfig {
        memory_bytes,
        memory_line,
        state,
        state_line,
        keyring,
        keyring_line,
        group,
        discovery,
        listeners,
        subsystems,
        referrals,
        limits,
        slow_io,
        nbd,
        exports,
    })
}

impl ConfigChecker<'_> {
    pub(super) fn config_error<T>(
        &self,
        key: &str,
        found: &Spanned<T>,
        problem: impl Into<String>,
    ) -> ConfigError {
        let line = line_of_byte(self.text, found.span().start);
        ConfigError { line, key: format!("`{key}`"), problem: problem.into() }
    }

    pub(super) fn line_number<T>(&self, found: &Spanned<T>) -> IgnoredLineNumber {
        IgnoredLineNumber(line_of_byte(self.text, found.span().start))
    }

    fn parse_buffer_memory(&self, memory: &Spanned<String>) -> CheckResult<u64> {
        let text = memory.get_ref();
        let bytes = parse_size(text).ok().filter(|bytes| *bytes >= MEMORY_MIN);
        bytes.ok_or_else(|| {
            self.config_error(
                "buffer-memory",
                memory,
                format!("'{text}', expected at least 4m, such as 64m"),
            )
        })
    }

    pub(super) fn parse_directory(
        &self,
        key: &str,
        found: &Spanned<String>,
    ) -> CheckResult<PathBuf> {
        let path = PathBuf::from(found.get_ref());
        if !path.is_absolute() {
            let problem = format!("'{}', expected a path from /", found.get_ref());
            return Err(self.config_error(key, found, problem));
        }
        Ok(path)
    }

    fn parse_listen_address(
        &self,
        key: &str,
        address: &Spanned<String>,
    ) -> CheckResult<SocketAddr> {
        let text = address.get_ref();
        let bare = text.strip_prefix("tcp://").unwrap_or(text);
        bare.parse().map_err(|_| {
            let problem =
                format!("'{text}', expected an address and a port, such as 127.0.0.1:4420");
            self.config_error(key, address, problem)
        })
    }

    fn check_listeners(&mut self, tables: &[ListenerTable]) -> CheckResult<()> {
        for table in tables {
            let address = self.parse_listen_address("address", &table.address)?;
            let is_twice = self.listeners.iter().any(|other| other.address == address);
            if is_twice && address.port() != 0 {
                let problem = format!("{address} is listened to already, expected it once");
                return Err(self.config_error("address", &table.address, problem));
            }
            self.listeners.push(ListenerConfig {
                address,
                security: self.parse_tls(table.tls.as_ref())?,
                networks: self.networks_of_listener(table.allowed_networks.as_ref())?,
                line: self.line_number(&table.address),
            });
        }
        Ok(())
    }

    /// Defines a named device, which may be built on devices defined above it.
    fn define_device(&mut self, table: &DeviceTable) -> CheckResult<()> {
        let uri = self.parse_device_uri(&table.uri, false)?;
        let defined = self.named.define_device(table.name.get_ref(), uri);
        defined.map_err(|problem| self.config_error("name", &table.name, problem))
    }

    fn parse_device_uri(&mut self, found: &Spanned<String>, only_reads: bool) -> CheckResult<Uri> {
        self.parse_uri_of(found, only_reads, DeviceUser::Namespace)
    }

    /// URI of an NBD export, which may be that of a namespace too.
    pub(super) fn parse_export_uri(
        &mut self,
        found: &Spanned<String>,
        only_reads: bool,
    ) -> CheckResult<Uri> {
        self.parse_uri_of(found, only_reads, DeviceUser::Export)
    }

    fn parse_uri_of(
        &mut self,
        found: &Spanned<String>,
        only_reads: bool,
        user: DeviceUser,
    ) -> CheckResult<Uri> {
        let (text, line) = (found.get_ref(), self.line_number(found));
        let parsed = Uri::parse_with_named_devices(text, &|name| self.named.device_uri_of(name));
        let parsed = parsed.map_err(|error| error.to_string());
        let meant =
            parsed.and_then(|uri| self.named.expand_and_check_uses(uri, line, only_reads, user));
        meant.map_err(|problem| self.config_error("uri", found, format!("'{text}': {problem}")))
    }

    fn check_subsystem(&mut self, table: &SubsystemTable) -> CheckResult<SubsystemConfig> {
        let name = self.parse_nqn("nqn", &table.nqn)?;
        if name == nqn::DISCOVERY {
            let problem = "this is the name of discovery, which is always there, expected another";
            return Err(self.config_error("nqn", &table.nqn, problem));
        }
        let serial = table.serial.as_ref().map(|serial| self.parse_serial(serial)).transpose()?;
        let listeners = self.listeners_of_subsystem(table)?;
        let hosts = self.hosts_of_subsystem(table, &listeners)?;
        let (namespaces, namespace_limits) = self.check_namespaces(table, &hosts)?;
        let limits = self.check_export_limits(table, &namespace_limits)?;
        let paths =
            table.path.iter().map(|path| self.check_ana_state(path)).collect::<CheckResult<_>>()?;
        let security = self.check_security(&table.security_keys())?;
        let line = self.line_number(&table.nqn);
        let subsystem = SubsystemConfig {
            nqn: name,
            line,
            serial,
            hosts,
            security,
            listeners,
            namespaces,
            paths,
            limits,
        };
        self.check_subsystem_security(table, &subsystem)?;
        Ok(subsystem)
    }

    fn parse_nqn(&self, key: &str, name: &Spanned<String>) -> CheckResult<String> {
        let text = name.get_ref();
        nqn::check_nqn(text).map_err(|malformed| {
            let problem =
                format!("'{text}': {malformed}, expected such as nqn.2026-01.org.example:disks");
            self.config_error(key, name, problem)
        })?;
        Ok(text.clone())
    }

    /// Parses the host NQN `text` at `found`. A name that no host could have is a mistake of the file.
    pub(super) fn parse_hostnqn<T>(
        &self,
        key: &str,
        found: &Spanned<T>,
        text: &str,
    ) -> CheckResult<String> {
        nqn::check_nqn(text).map_err(|malformed| {
            let problem = format!(
                "'{text}': {malformed}, expected the NQN of a host, such as \
                 nqn.2014-08.org.nvmexpress:uuid:4b0c28c5-5b0d-4d4f-8f4c-8e0c2e3a1d11"
            );
            self.config_error(key, found, problem)
        })?;
        Ok(text.to_owned())
    }

    fn parse_serial(&self, serial: &Spanned<String>) -> CheckResult<String> {
        let text = serial.get_ref();
        let is_printable = text.bytes().all(|byte| (0x20..0x7f).contains(&byte));
        if text.is_empty() || text.len() > SERIAL_MAX || !is_printable {
            let problem = format!("'{text}', expected 1 to {SERIAL_MAX} printable characters");
            return Err(self.config_error("serial", serial, problem));
        }
        Ok(text.clone())
    }

    /// Listeners of a subsystem, by default all of them.
    fn listeners_of_subsystem(&self, table: &SubsystemTable) -> CheckResult<Vec<usize>> {
        let Some(named) = &table.listeners else { return Ok((0..self.listeners.len()).collect()) };
        let found = named.get_ref().iter().map(|name| self.find_listener("listeners", name));
        let found: BTreeSet<usize> = found.collect::<CheckResult<_>>()?;
        if found.is_empty() {
            let problem = "none are named, expected at least one, or no such key for all of them";
            return Err(self.config_error("listeners", named, problem));
        }
        Ok(found.into_iter().collect())
    }

    fn find_listener(&self, key: &str, name: &Spanned<String>) -> CheckResult<usize> {
        let address = self.parse_listen_address(key, name)?;
        let at = self.listeners.iter().position(|listener| listener.address == address);
        at.ok_or_else(|| {
            let all: Vec<_> = self.listeners.iter().map(|one| one.address.to_string()).collect();
            let all = all.join(", ");
            self.config_error(key, name, format!("{address} is no listener, expected one of {all}"))
        })
    }

    /// Hosts that may connect. Without a list, listeners that are reachable from other machines
    /// require `allow-any-host`.
    fn hosts_of_subsystem(
        &self,
        table: &SubsystemTable,
        listeners: &[usize],
    ) -> CheckResult<HostsConfig> {
        let any = table.allow_any_host.as_ref();
        match (&table.allowed_hosts, any.is_some_and(|any| *any.get_ref())) {
            (Some(hosts), false) => Ok(HostsConfig::Only(self.parse_allowed_hosts(hosts)?)),
            (Some(hosts), true) => {
                self.parse_allowed_hosts(hosts)?;
                if !hosts.get_ref().iter().all(|host| host.get_ref().has_limits_alone()) {
                    let problem = "some are named and any host is allowed, expected one of the two, or \
                                   entries with `limits` alone";
                    return Err(self.config_error("allowed-hosts", hosts, problem));
                }
                Ok(HostsConfig::Any)
            }
            (None, true) => Ok(HostsConfig::Any),
            (None, false) => {
                let open = listeners.iter().map(|at| self.listeners[*at].address);
                match open.into_iter().find(|address| !address.ip().is_loopback()) {
                    None => Ok(HostsConfig::Any),
                    Some(address) => Err(self.config_error(
                        "allowed-hosts",
                        &table.nqn,
                        format!(
                            "no host is named and {address} can be reached from elsewhere, \
                             expected `allowed-hosts`, or `allow-any-host = true` if that is meant"
                        ),
                    )),
                }
            }
        }
    }

    fn parse_host_list(&self, hosts: &Spanned<Vec<Spanned<String>>>) -> CheckResult<HostsConfig> {
        if hosts.get_ref().is_empty() {
            let problem = "none are named, expected at least one";
            return Err(self.config_error("allowed-hosts", hosts, problem));
        }
        let names = hosts.get_ref().iter();
        let names = names.map(|host| self.parse_hostnqn("allowed-hosts", host, host.get_ref()));
        Ok(HostsConfig::Only(names.collect::<CheckResult<_>>()?))
    }

    /// Namespaces of a subsystem, and the tables of their rate limits.
    #[expect(clippy::type_complexity, reason = "the second part is for one caller")]
    fn check_namespaces<'a>(
        &mut self,
        table: &'a SubsystemTable,
        hosts: &HostsConfig,
    ) -> CheckResult<(Vec<NamespaceConfig>, Vec<(u32, Option<&'a Spanned<RateLimitsTable>>)>)> {
        let mut limits = Vec::new();
        let mut namespaces: Vec<NamespaceConfig> = Vec::new();
        for one in &table.namespace {
            let taken = |nsid: u32| namespaces.iter().any(|other| other.nsid == nsid);
            let nsid = match &one.nsid {
                Some(nsid) => self.check_nsid(nsid, taken)?,
                None => (1..=NSID_MAX).find(|nsid| !taken(*nsid)).unwrap_or(NSID_MAX),
            };
            let namespace = self.check_namespace(one, nsid, hosts)?;
            if let Some(other) = namespaces.iter().find(|other| other.uri == namespace.uri) {
                let problem = format!(
                    "namespace {} is the same device, expected each to have its own",
                    other.nsid
                );
                return Err(self.config_error("uri", &one.uri, problem));
            }
            namespaces.push(namespace);
            limits.push((nsid, one.limits.as_ref()));
        }
        namespaces.sort_unstable_by_key(|namespace| namespace.nsid);
        Ok((namespaces, limits))
    }

    fn check_nsid(&self, nsid: &Spanned<u32>, taken: impl Fn(u32) -> bool) -> CheckResult<u32> {
        let value = *nsid.get_ref();
        if !(1..=NSID_MAX).contains(&value) {
            return Err(self.config_error(
                "nsid",
                nsid,
                format!("{value}, expected 1 to {NSID_MAX}"),
            ));
        }
        if taken(value) {
            let problem = format!("another namespace has {value}, expected each to have its own");
            return Err(self.config_error("nsid", nsid, problem));
        }
        Ok(value)
    }

    fn check_namespace(
        &mut self,
        table: &NamespaceTable,
        nsid: u32,
        hosts: &HostsConfig,
    ) -> CheckResult<NamespaceConfig> {
        let uri = self.parse_device_uri(&table.uri, table.read_only)?;
        let seen_by = match &table.allowed_hosts {
            None => HostsConfig::Any,
            Some(named) => self.hosts_of_namespace(named, hosts)?,
        };
        let ana_group = self.check_ana_group(table.ana_group.as_ref())?;
        let (line, is_read_only) = (self.line_number(&table.uri), table.read_only);
        let slow_io = self.slow_io_time(table.slow_io.as_ref())?;
        Ok(NamespaceConfig { nsid, uri, line, is_read_only, hosts: seen_by, ana_group, slow_io })
    }

    /// Time from which a command is slow: `10ms`, or `off`. Without one, it is that of all.
    fn slow_io_time(&self, time: Option<&Spanned<String>>) -> CheckResult<Option<Span>> {
        let Some(time) = time else { return Ok(self.slow_io) };
        parse_slow_io(time.get_ref()).map_err(|problem| self.config_error("slow-io", time, problem))
    }

    /// Hosts that see a namespace, each of which must be allowed to connect.
    fn hosts_of_namespace(
        &self,
        named: &Spanned<Vec<Spanned<String>>>,
        hosts: &HostsConfig,
    ) -> CheckResult<HostsConfig> {
        for name in named.get_ref() {
            if !hosts.allows_host(name.get_ref()) {
                let problem = format!(
                    "'{}' may not connect to the subsystem, expected one of its `allowed-hosts`",
                    name.get_ref()
                );
                return Err(self.config_error("allowed-hosts", name, problem));
            }
        }
        self.parse_host_list(named)
    }

    fn check_ana_group(&self, group: Option<&Spanned<u32>>) -> CheckResult<u32> {
        let Some(group) = group else { return Ok(1) };
        let value = *group.get_ref();
        if !(1..=ANA_GROUP_MAX).contains(&value) {
            let problem = format!("{value}, expected 1 to {ANA_GROUP_MAX}");
            return Err(self.config_error("ana-group", group, problem));
        }
        Ok(value)
    }

    fn check_ana_state(&self, table: &AnaStateTable) -> CheckResult<ListenerAnaState> {
        let listener = self.find_listener("listener", &table.listener)?;
        let word = table.ana_state.get_ref();
        let access = AnaStateConfig::ALL.into_iter().find(|access| access.name() == word);
        let access = access.ok_or_else(|| {
            let all = AnaStateConfig::ALL.map(AnaStateConfig::name).join(", ");
            self.config_error(
                "ana-state",
                &table.ana_state,
                format!("'{word}', expected one of {all}"),
            )
        })?;
        Ok(ListenerAnaState {
            listener,
            ana_group: self.check_ana_group(table.ana_group.as_ref())?,
            access,
        })
    }
}
