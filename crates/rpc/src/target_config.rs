//! Configuration file of a target: NVMe/TCP subsystems and NBD exports.
//!
//! ```toml
//! buffer-memory = "64m"
//! state-dir = "/var/lib/tenmil"
//!
//! [[listener]]
//! address = "127.0.0.1:4420"
//!
//! [[device]]
//! name = "pool"
//! uri = "file:/var/tmp/disk?size=10g"
//!
//! [[subsystem]]
//! nqn = "nqn.2026-01.org.example:disks"
//! allowed-hosts = ["nqn.2014-08.org.nvmexpress:uuid:4b0c28c5-5b0d-4d4f-8f4c-8e0c2e3a1d11"]
//!
//! [[subsystem.namespace]]
//! uri = "split:[device:pool]?part=0&parts=2"
//! ```
//!
//! A file is parsed and checked completely before anything is applied: [`TargetConfig::parse`]
//! returns either a consistent configuration or the position of the first error.

mod allowed_host;
mod config_checker;
mod config_edit;
mod config_file;
mod connection_limits;
mod difference;
mod gateway_group;
mod in_memory_config;
mod migrate;
mod named_devices;
mod nbd_exports;
mod rate_limits;
mod security;
mod security_checker;
#[cfg(test)]
mod security_tests;
mod shared_config;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use tenmil_base::Span;
use tenmil_block::uri::Uri;
use tenmil_serve::tcp::{ExportLimits, PortSecurity};
use tenmil_serve::{PeerNetwork, SlowIoThresholds};

use crate::GroupStoreUri;

pub use self::config_edit::{ConfigEdit, ConfigObject};
pub use self::migrate::{MigratedConfig, migrate_config};
pub use self::named_devices::SCHEME;
pub use self::nbd_exports::{ExportConfig, NbdConfig, NbdListener};
pub use self::security::{
    HostSecurityConfig, KeyReference, KeySources, SecurityConfig, UnreadableKey,
};
pub use self::shared_config::SharedConfig;

/// Line of the file, from 1; 0 if there is no file. All lines compare equal, since the position of
/// a setting is not part of its value.
#[derive(Clone, Copy, Debug, Default)]
pub struct IgnoredLineNumber(pub usize);

impl PartialEq for IgnoredLineNumber {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for IgnoredLineNumber {}

/// Configuration of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetConfig {
    /// Buffer memory in bytes; `None` selects the default.
    pub memory_bytes: Option<u64>,
    /// Line of the setting.
    pub memory_line: IgnoredLineNumber,
    /// State directory, for reservations that persist through power loss. Without it, reservations
    /// do not persist.
    pub state: Option<PathBuf>,
    /// Line of the setting.
    pub state_line: IgnoredLineNumber,
    /// Directory of the keys that the file names; `None` selects the default.
    pub keyring: Option<PathBuf>,
    /// Line of the setting.
    pub keyring_line: IgnoredLineNumber,
    /// Gateway group that the target is a member of.
    pub group: Option<GroupConfig>,
    /// Security of the discovery service.
    pub discovery: SecurityConfig,
    /// Listeners. Without one no host can connect.
    pub listeners: Vec<ListenerConfig>,
    /// Exported subsystems.
    pub subsystems: Vec<SubsystemConfig>,
    /// Other discovery services, reported as referrals.
    pub referrals: Vec<SocketAddr>,
    /// Connection limits.
    pub limits: ConnectionLimits,
    /// Time from which a command is logged as slow; `None`: none is.
    pub slow_io: Option<Span>,
    /// Settings of all NBD exports.
    pub nbd: NbdConfig,
    /// NBD exports.
    pub exports: Vec<ExportConfig>,
}

/// Gateway group that a target is a member of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupConfig {
    /// Name of the group.
    pub name: String,
    /// Name of this member.
    pub member: String,
    /// Store of the group.
    pub store: GroupStoreUri,
    /// Lease of a member.
    pub lease: Span,
    /// Addresses at which hosts connect to this member.
    pub addresses: Vec<SocketAddr>,
    line: IgnoredLineNumber,
}

/// Connection limits by origin, and the keep-alive limit. Defaults are derived from the total
/// number of connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Largest number of connections in total.
    pub connections: Option<u32>,
    /// Limit per address, for hosts that no subsystem lists.
    pub per_address: Option<u32>,
    /// Limit per host NQN.
    pub per_host: Option<u32>,
    /// Limit of loopback connections, for hosts that no subsystem lists.
    pub of_loopback: Option<u32>,
    /// Limit of connections to the discovery service.
    pub discovery: Option<u32>,
    /// Limit of connections to the discovery service, per address.
    pub discovery_per_address: Option<u32>,
    /// Number of connections reserved for hosts that a subsystem lists.
    pub reserved: Option<u32>,
    /// Limit of registrants per address in a namespace, for hosts that no subsystem lists.
    pub registrants_per_address: Option<u32>,
    /// Longest keep-alive timeout.
    pub keep_alive_max: Option<Span>,
    /// Commands of a reactor that its hosts divide fairly.
    pub fair_depth: Option<u32>,
    /// Line of the table.
    pub line: IgnoredLineNumber,
}

/// Listen address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerConfig {
    /// Address and port.
    pub address: SocketAddr,
    /// Whether connections use TLS.
    pub security: PortSecurity,
    /// Networks whose peers may connect; any if it is empty.
    pub networks: Vec<PeerNetwork>,
    /// Line of the setting.
    pub line: IgnoredLineNumber,
}

/// Exported subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubsystemConfig {
    /// NQN.
    pub nqn: String,
    /// Line of the NQN.
    pub line: IgnoredLineNumber,
    /// Serial number; `None` derives one from the NQN.
    pub serial: Option<String>,
    /// Hosts that may connect.
    pub hosts: HostsConfig,
    /// What hosts must prove, and their rights.
    pub security: SecurityConfig,
    /// Listeners that show the subsystem, as ascending indexes into [`TargetConfig::listeners`].
    pub listeners: Vec<usize>,
    /// Namespaces in the order of their identifiers.
    pub namespaces: Vec<NamespaceConfig>,
    /// ANA states that are not optimized, by listener and group.
    pub paths: Vec<ListenerAnaState>,
    /// Rate limits of the subsystem, its namespaces and its hosts.
    pub limits: ExportLimits,
}

/// Hosts that may connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostsConfig {
    /// Any host.
    Any,
    /// Hosts with these NQNs.
    Only(Vec<String>),
}

/// Namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceConfig {
    /// NSID.
    pub nsid: u32,
    /// URI of its device; a device name is followed by what it refers to.
    pub uri: Uri,
    /// Line of the URI.
    pub line: IgnoredLineNumber,
    /// Whether it is write protected.
    pub is_read_only: bool,
    /// Hosts of the subsystem that see it; all of them if none are listed.
    pub hosts: HostsConfig,
    /// ANA group.
    pub ana_group: u32,
    /// Time from which a command is logged as slow; `None`: none is.
    pub slow_io: Option<Span>,
}

/// Highest ANA group identifier: each subsystem has this many groups, so that none has to be replaced when the
/// first state is set.
pub const ANA_GROUP_MAX: u32 = 128;

/// ANA state of a group at a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerAnaState {
    /// Index of the listener.
    pub listener: usize,
    /// ANA group.
    pub ana_group: u32,
    /// ANA state.
    pub access: AnaStateConfig,
}

/// ANA state (Base 2.1 §8.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnaStateConfig {
    /// ANA Optimized.
    Optimized,
    /// ANA Non-Optimized.
    NonOptimized,
    /// ANA Inaccessible.
    Inaccessible,
}

/// Error in a configuration file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// Line, from 1.
    pub line: usize,
    /// Key.
    pub key: String,
    /// What was found and what was expected.
    pub problem: String,
}

impl TargetConfig {
    /// Parses and checks a configuration file.
    ///
    /// # Errors
    ///
    /// The first error of the file.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        config_checker::check_config(text, config_file::ConfigFile::parse_toml(text)?)
    }

    /// Whether it names any key, so that a keyring is needed.
    #[must_use]
    pub fn names_keys(&self) -> bool {
        self.securities().any(SecurityConfig::names_keys)
    }

    /// Line of the first host with keys of the kernel's keyring.
    #[must_use]
    pub fn kernel_psks_line(&self) -> Option<IgnoredLineNumber> {
        let mut hosts = self.securities().flat_map(|security| &security.hosts);
        hosts.find_map(|host| host.kernel_psks)
    }

    fn securities(&self) -> impl Iterator<Item = &SecurityConfig> {
        let subsystems = self.subsystems.iter().map(|subsystem| &subsystem.security);
        subsystems.chain([&self.discovery])
    }
}

impl SubsystemConfig {
    /// Thresholds for slow commands, with this one of commands for no single namespace.
    #[must_use]
    pub fn slow_io_thresholds(&self, default: Option<Span>) -> SlowIoThresholds {
        let own = self.namespaces.iter().filter(|namespace| namespace.slow_io != default);
        let namespaces = own.map(|namespace| (namespace.nsid, namespace.slow_io)).collect();
        SlowIoThresholds { default, namespaces }
    }
}

impl AnaStateConfig {
    /// All ANA states.
    pub const ALL: [Self; 3] = [Self::Optimized, Self::NonOptimized, Self::Inaccessible];

    /// Name of the state in the file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Optimized => "optimized",
            Self::NonOptimized => "non-optimized",
            Self::Inaccessible => "inaccessible",
        }
    }
}

impl HostsConfig {
    /// Whether `host` may connect.
    pub fn allows_host(&self, host: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Only(hosts) => hosts.iter().any(|allowed| allowed == host),
        }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "line {}, {}: {}", self.line, self.key, self.problem)
    }
}

impl std::error::Error for ConfigError {}
