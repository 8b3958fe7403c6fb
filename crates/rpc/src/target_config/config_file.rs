//! Syntax of the file: tables and keys with their positions. Only types are checked.

use serde::Deserialize;
use tenmil_keyring::contains_key_text;
use toml::Spanned;

use super::allowed_host::AllowedHost;
use super::connection_limits::LimitsTable;
use super::gateway_group::GroupTable;
use super::nbd_exports::{ExportTable, NbdTable};
use super::rate_limits::RateLimitsTable;
use super::{ConfigError, migrate};

/// Whole file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct ConfigFile {
    pub(super) buffer_memory: Option<Spanned<String>>,
    pub(super) state_dir: Option<Spanned<String>>,
    pub(super) keyring: Option<Spanned<String>>,
    pub(super) slow_io: Option<Spanned<String>>,
    pub(super) group: Option<Spanned<GroupTable>>,
    pub(super) discovery: Option<DiscoveryTable>,
    pub(super) limits: Option<Spanned<LimitsTable>>,
    #[serde(default)]
    pub(super) referrals: Vec<Spanned<String>>,
    #[serde(default)]
    pub(super) listener: Vec<ListenerTable>,
    #[serde(default)]
    pub(super) device: Vec<DeviceTable>,
    #[serde(default)]
    pub(super) subsystem: Vec<SubsystemTable>,
    pub(super) nbd: Option<Spanned<NbdTable>>,
    #[serde(default)]
    pub(super) export: Vec<ExportTable>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct ListenerTable {
    pub(super) address: Spanned<String>,
    pub(super) tls: Option<Spanned<String>>,
    pub(super) allowed_networks: Option<Spanned<Vec<Spanned<String>>>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct DiscoveryTable {
    pub(super) allowed_hosts: Option<Spanned<Vec<Spanned<AllowedHost>>>>,
    pub(super) authentication: Option<Spanned<String>>,
    pub(super) secure_channel: Option<Spanned<String>>,
    pub(super) dhchap_hashes: Option<Spanned<Vec<Spanned<String>>>>,
    pub(super) dhchap_groups: Option<Spanned<Vec<Spanned<String>>>>,
    pub(super) concatenation: Option<Spanned<String>>,
    pub(super) allowed_networks: Option<Spanned<Vec<Spanned<String>>>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct DeviceTable {
    pub(super) name: Spanned<String>,
    pub(super) uri: Spanned<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct SubsystemTable {
    pub(super) nqn: Spanned<String>,
    pub(super) serial: Option<Spanned<String>>,
    pub(super) allowed_hosts: Option<Spanned<Vec<Spanned<AllowedHost>>>>,
    pub(super) allow_any_host: Option<Spanned<bool>>,
    pub(super) authentication: Option<Spanned<String>>,
    pub(super) secure_channel: Option<Spanned<String>>,
    pub(super) authenticate_io_queues: Option<bool>,
    pub(super) dhchap_hashes: Option<Spanned<Vec<Spanned<String>>>>,
    pub(super) dhchap_groups: Option<Spanned<Vec<Spanned<String>>>>,
    pub(super) concatenation: Option<Spanned<String>>,
    pub(super) allowed_networks: Option<Spanned<Vec<Spanned<String>>>>,
    pub(super) listeners: Option<Spanned<Vec<Spanned<String>>>>,
    pub(super) limits: Option<Spanned<RateLimitsTable>>,
    pub(super) host_limits: Option<Spanned<RateLimitsTable>>,
    #[serde(default)]
    pub(super) namespace: Vec<NamespaceTable>,
    #[serde(default)]
    pub(super) path: Vec<AnaStateTable>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct NamespaceTable {
    pub(super) uri: Spanned<String>,
    pub(super) nsid: Option<Spanned<u32>>,
    #[serde(default)]
    pub(super) read_only: bool,
    pub(super) allowed_hosts: Option<Spanned<Vec<Spanned<String>>>>,
    pub(super) ana_group: Option<Spanned<u32>>,
    pub(super) slow_io: Option<Spanned<String>>,
    pub(super) limits: Option<Spanned<RateLimitsTable>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct AnaStateTable {
    pub(super) listener: Spanned<String>,
    pub(super) ana_group: Option<Spanned<u32>>,
    pub(super) ana_state: Spanned<String>,
}

impl ConfigFile {
    /// Parses a file. One that holds a key in place of its name is rejected before anything repeats
    /// its text.
    pub(super) fn parse_toml(text: &str) -> Result<Self, ConfigError> {
        if let Some(at) = text.lines().position(contains_key_text) {
            let problem = "it holds a key, expected the name of one in the keyring: store it with \
                           `tenmil key import NAME < FILE`";
            let key = "the file".to_owned();
            return Err(ConfigError { line: at + 1, key, problem: problem.to_owned() });
        }
        toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            let mut problem = error.message().trim().replace('\n', ", ");
            if let Some(new) = migrate::new_name_of_key(&key_name(text, at)) {
                problem = format!(
                    "it is now `{new}`; convert the file with `tenmil config migrate FILE`"
                );
            }
            ConfigError { line: line_of_byte(text, at), key: quoted_key_at(text, at), problem }
        })
    }
}

/// Line of byte `at`, from 1.
pub(super) fn line_of_byte(text: &str, at: usize) -> usize {
    text.as_bytes()[..at.min(text.len())].iter().filter(|byte| **byte == b'\n').count() + 1
}

/// Key or table header on the line of byte `at`.
fn quoted_key_at(text: &str, at: usize) -> String {
    let key = key_name(text, at);
    if key.is_empty() { "the file".to_owned() } else { format!("`{key}`") }
}

fn key_name(text: &str, at: usize) -> String {
    let line = text.lines().nth(line_of_byte(text, at) - 1).unwrap_or_default();
    line.split('=').next().unwrap_or_default().trim().to_owned()
}
