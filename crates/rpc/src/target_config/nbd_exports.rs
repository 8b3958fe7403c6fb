//! NBD exports of a configuration: `[nbd]` and `[[export]]`.
//!
//! ```toml
//! [nbd]
//! tls-certificate = "/etc/tenmil/nbd.pem"
//! tls-key = "/etc/tenmil/nbd.key"
//!
//! [[export]]
//! name = "images"
//! uri = "file:/srv/images?size=10g"
//! read-only = true
//! listen = ["nbd:/run/tenmil/images.sock", "nbds://192.0.2.1:10809"]
//! limits = { iops = "20k", bytes = "200m" }
//! ```

use std::path::{Path, PathBuf};

use serde::Deserialize;
use tenmil_base::Span;
use tenmil_block::QosLimits;
use tenmil_block::quantity_parser::parse_time;
use tenmil_block::uri::Uri;
use tenmil_linux::socket_stream::ListenAddress;
use toml::Spanned;

use super::IgnoredLineNumber;
use super::config_checker::{CheckResult, ConfigChecker};
use super::rate_limits::RateLimitsTable;

/// Settings of all NBD exports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NbdConfig {
    /// Certificate chain, a PEM file.
    pub tls_certificate: Option<PathBuf>,
    /// Private key of the certificate, a PEM file.
    pub tls_key: Option<PathBuf>,
    /// Authority that the certificates of clients must be of, a PEM file.
    pub tls_client_ca: Option<PathBuf>,
    /// Pre-shared keys of clients.
    pub tls_psk: Option<PathBuf>,
    /// How long a client may ask for nothing.
    pub idle_timeout: Option<Span>,
    /// Largest number of connections.
    pub connections: Option<u32>,
    /// Largest number of connections of an address.
    pub connections_per_address: Option<u32>,
    /// Line of the table.
    pub line: IgnoredLineNumber,
}

/// NBD export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportConfig {
    /// Name by which clients select it.
    pub name: String,
    /// URI of its device.
    pub uri: Uri,
    /// Line of the URI.
    pub line: IgnoredLineNumber,
    /// Whether clients may only read.
    pub is_read_only: bool,
    /// Whether clients may resize it.
    pub allows_resize: bool,
    /// Whether clients of other machines may write without authentication.
    pub allows_remote_write: bool,
    /// Listeners that offer it: at least one.
    pub listeners: Vec<NbdListener>,
    /// Rate limits of all clients together.
    pub limits: QosLimits,
}

/// Listen address of NBD.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdListener {
    /// Socket file, or address and port.
    pub address: ListenAddress,
    /// Whether clients must use TLS.
    pub requires_tls: bool,
}

/// `[nbd]` as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct NbdTable {
    tls_certificate: Option<Spanned<String>>,
    tls_key: Option<Spanned<String>>,
    tls_client_ca: Option<Spanned<String>>,
    tls_psk: Option<Spanned<String>>,
    idle_timeout: Option<Spanned<String>>,
    connections: Option<Spanned<u32>>,
    connections_per_address: Option<Spanned<u32>>,
}

/// `[[export]]` as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct ExportTable {
    name: Spanned<String>,
    uri: Spanned<String>,
    listen: Spanned<Vec<Spanned<String>>>,
    #[serde(default)]
    read_only: bool,
    allow_resize: Option<Spanned<bool>>,
    #[serde(default)]
    allow_remote_write: bool,
    limits: Option<Spanned<RateLimitsTable>>,
}

/// Longest name of an export, which is the longest string of the protocol (NBD, "Values").
const NAME_MAX: usize = 4096;
/// Largest number of connections.
const CONNECTIONS_MAX: u32 = 1 << 16;

impl NbdConfig {
    /// Whether clients may use TLS.
    #[must_use]
    pub const fn has_tls(&self) -> bool {
        self.tls_certificate.is_some() || self.tls_psk.is_some()
    }

    /// Whether a client that uses TLS has proved that it may.
    #[must_use]
    pub const fn authenticates_clients(&self) -> bool {
        let is_open = self.tls_certificate.is_some() && self.tls_client_ca.is_none();
        self.has_tls() && !is_open
    }

    /// Files of certificates and keys.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let files = [&self.tls_certificate, &self.tls_key, &self.tls_client_ca, &self.tls_psk];
        files.into_iter().filter_map(|file| file.as_deref())
    }
}

impl NbdListener {
    /// Parses `nbd:PATH`, `nbd://HOST:PORT`, or the same with `nbds:` for clients with TLS only.
    ///
    /// # Errors
    ///
    /// What was found and what was expected.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (requires_tls, plain) = match text.strip_prefix("nbds:") {
            Some(rest) => (true, format!("nbd:{rest}")),
            None => (false, text.to_owned()),
        };
        let address = tenmil_serve::nbd::parse_listen_address(&plain).map_err(|_| {
            format!(
                "`{text}` is no address, expected such as nbd:/run/disk.sock, nbd://127.0.0.1:10809 \
                 or nbds://192.0.2.1:10809"
            )
        })?;
        Ok(Self { address, requires_tls })
    }

    /// Its socket file.
    #[must_use]
    pub fn socket_file(&self) -> Option<&Path> {
        match &self.address {
            ListenAddress::Path(path) => Some(path),
            ListenAddress::Tcp(_) => None,
        }
    }

    /// Its TCP port.
    #[must_use]
    pub fn port(&self) -> Option<u16> {
        match &self.address {
            ListenAddress::Path(_) => None,
            ListenAddress::Tcp(address) => Some(address.port()),
        }
    }

    /// URI of an export there, as the NBD specification defines it.
    #[must_use]
    pub fn uri_of(&self, export: &str) -> String {
        let scheme = if self.requires_tls { "nbds" } else { "nbd" };
        let name: String = export.bytes().map(percent_encoded).collect();
        match &self.address {
            ListenAddress::Path(path) => {
                format!("{scheme}+unix:///{name}?socket={}", path.display())
            }
            ListenAddress::Tcp(address) => format!("{scheme}://{address}/{name}"),
        }
    }
}

/// A byte of a name, escaped unless it may stand in a URI.
fn percent_encoded(byte: u8) -> String {
    match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
            char::from(byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    }
}

impl std::fmt::Display for NbdListener {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let scheme = if self.requires_tls { "nbds" } else { "nbd" };
        match &self.address {
            ListenAddress::Path(path) => write!(out, "{scheme}:{}", path.display()),
            ListenAddress::Tcp(address) => write!(out, "{scheme}://{address}"),
        }
    }
}

impl ConfigChecker<'_> {
    /// Checks `[nbd]`.
    pub(super) fn check_nbd(&self, table: Option<&Spanned<NbdTable>>) -> CheckResult<NbdConfig> {
        let Some(found) = table else { return Ok(NbdConfig::default()) };
        let table = found.get_ref();
        let file = |key: &str, path: &Option<Spanned<String>>| {
            path.as_ref().map(|path| self.parse_directory(key, path)).transpose()
        };
        let count = |key: &str, value: &Option<Spanned<u32>>| match value {
            Some(found) if !(1..=CONNECTIONS_MAX).contains(found.get_ref()) => {
                let problem = format!("{}, expected 1 to {CONNECTIONS_MAX}", found.get_ref());
                Err(self.config_error(key, found, problem))
            }
            found => Ok(found.as_ref().map(|found| *found.get_ref())),
        };
        if let (Some(alone), None, key) | (None, Some(alone), key) =
            (&table.tls_certificate, &table.tls_key, "tls-certificate")
        {
            let problem = "a certificate and its key belong together, expected both \
                           `tls-certificate` and `tls-key`";
            return Err(self.config_error(key, alone, problem));
        }
        if let (Some(alone), None) = (&table.tls_client_ca, &table.tls_certificate) {
            let problem = "there is no certificate of the server, expected `tls-certificate`";
            return Err(self.config_error("tls-client-ca", alone, problem));
        }
        let timeout = |found: &Spanned<String>| {
            let span = parse_time(found.get_ref()).ok().filter(|span| span.ns >= 1_000_000_000);
            span.ok_or_else(|| {
                let problem =
                    format!("'{}', expected at least 1s, such as 90s or 15m", found.get_ref());
                self.config_error("idle-timeout", found, problem)
            })
        };
        Ok(NbdConfig {
            tls_certificate: file("tls-certificate", &table.tls_certificate)?,
            tls_key: file("tls-key", &table.tls_key)?,
            tls_client_ca: file("tls-client-ca", &table.tls_client_ca)?,
            tls_psk: file("tls-psk", &table.tls_psk)?,
            idle_timeout: table.idle_timeout.as_ref().map(timeout).transpose()?,
            connections: count("connections", &table.connections)?,
            connections_per_address: count(
                "connections-per-address",
                &table.connections_per_address,
            )?,
            line: self.line_number(found),
        })
    }

    /// Checks `[[export]]`.
    pub(super) fn check_exports(
        &mut self,
        tables: &[ExportTable],
        nbd: &NbdConfig,
    ) -> CheckResult<Vec<ExportConfig>> {
        let mut exports: Vec<ExportConfig> = Vec::new();
        for table in tables {
            let export = self.check_export(table, nbd)?;
            if exports.iter().any(|other| other.name == export.name) {
                let problem = "another export has this name, expected each to have its own";
                return Err(self.config_error("name", &table.name, problem));
            }
            if let Some(other) = exports.iter().find(|other| other.uri == export.uri) {
                let problem = format!(
                    "export `{}` has the same device, expected each to have its own",
                    other.name
                );
                return Err(self.config_error("uri", &table.uri, problem));
            }
            exports.push(export);
        }
        Ok(exports)
    }

    fn check_export(&mut self, table: &ExportTable, nbd: &NbdConfig) -> CheckResult<ExportConfig> {
        let name = table.name.get_ref();
        if name.is_empty() || name.len() > NAME_MAX || name.chars().any(char::is_control) {
            let problem =
                format!("'{name}', expected 1 to {NAME_MAX} bytes without control characters");
            return Err(self.config_error("name", &table.name, problem));
        }
        let uri = self.parse_export_uri(&table.uri, table.read_only)?;
        let allows_resize = table.allow_resize.as_ref().is_some_and(|allowed| *allowed.get_ref());
        if let Some(found) =
            table.allow_resize.as_ref().filter(|_| allows_resize && table.read_only)
        {
            let problem = "the export is read-only, expected one of the two";
            return Err(self.config_error("allow-resize", found, problem));
        }
        let mut listeners = Vec::new();
        for text in table.listen.get_ref() {
            let listener = NbdListener::parse(text.get_ref())
                .map_err(|problem| self.config_error("listen", text, problem))?;
            if listener.requires_tls && !nbd.has_tls() {
                let problem = format!(
                    "'{}': there is no certificate and no key, expected `tls-certificate` and \
                     `tls-key`, or `tls-psk`, in [nbd]",
                    text.get_ref()
                );
                return Err(self.config_error("listen", text, problem));
            }
            let is_remote =
                matches!(&listener.address, ListenAddress::Tcp(at) if !at.ip().is_loopback());
            let is_authenticated = listener.requires_tls && nbd.authenticates_clients();
            if is_remote && !is_authenticated && !table.read_only && !table.allow_remote_write {
                let problem = format!(
                    "'{}': other machines could write there without authentication, expected an \
                     address of loopback, `read-only = true` or `allow-remote-write = true`",
                    text.get_ref()
                );
                return Err(self.config_error("listen", text, problem));
            }
            listeners.push(listener);
        }
        if listeners.is_empty() {
            let problem = "no address is named, expected at least one, such as \
                           \"nbd://127.0.0.1:10809\"";
            return Err(self.config_error("listen", &table.listen, problem));
        }
        let limits = table.limits.as_ref();
        let limits = limits.map(|found| self.check_rate_limits("limits", found)).transpose()?;
        Ok(ExportConfig {
            name: name.clone(),
            uri,
            line: self.line_number(&table.uri),
            is_read_only: table.read_only,
            allows_resize,
            allows_remote_write: table.allow_remote_write,
            listeners,
            limits: limits.unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::TargetConfig;

    const WHOLE: &str = r#"
[nbd]
tls-psk = "/etc/tenmil/nbd.psk"
idle-timeout = "15m"
connections = 8

[[device]]
name = "disk"
uri = "file:/srv/disk"

[[export]]
name = "images"
uri = "ram:1g"
listen = ["nbd:/run/a.sock", "nbds://192.0.2.1:10809"]
allow-resize = true

[[export]]
name = "disk"
uri = "device:disk"
read-only = true
listen = ["nbd://192.0.2.1:1"]

[[subsystem]]
nqn = "nqn.2026-01.org.example:a"
[[subsystem.namespace]]
uri = "device:disk"
"#;

    #[test]
    fn exports_with_every_key_are_parsed() {
        let read = TargetConfig::parse(WHOLE).unwrap();
        let [images, disk] = read.exports.as_slice() else { panic!("two exports") };
        assert_eq!((images.name.as_str(), images.allows_resize), ("images", true));
        let listeners: Vec<_> = images.listeners.iter().map(ToString::to_string).collect();
        assert_eq!(listeners, ["nbd:/run/a.sock", "nbds://192.0.2.1:10809"]);
        assert_eq!(images.listeners[0].uri_of("a b"), "nbd+unix:///a%20b?socket=/run/a.sock");
        assert_eq!(images.listeners[1].uri_of("disk"), "nbds://192.0.2.1:10809/disk");
        assert!(disk.is_read_only && read.nbd.authenticates_clients());
        assert_eq!(read.nbd.connections, Some(8));
        // The device is that of the namespace.
        assert_eq!(disk.uri, read.subsystems[0].namespaces[0].uri);
    }

    #[test]
    fn exports_of_the_documentation_are_valid() {
        let document = include_str!("../../../../docs/operator/nbd.md");
        let file = document.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
        assert_eq!(TargetConfig::parse(file).unwrap().exports.len(), 2);
    }

    #[test]
    fn mistake_in_an_export_is_named_with_its_line() {
        for (found, by, expected) in [
            ("\"images\"", "\"disk\"", "line 18, `name`: another export has this name"),
            (
                "\"ram:1g\"",
                "\"device:disk\"",
                "line 19, `uri`: 'device:disk': device `disk` is used in line 13 too",
            ),
            ("\"nbd:/run/a.sock\", ", "\"tcp:x\", ", "line 14, `listen`: `tcp:x` is no address"),
            (
                "[\"nbd:/run/a.sock\", \"nbds://192.0.2.1:10809\"]",
                "[]",
                "line 14, `listen`: no address is named",
            ),
            (
                "tls-psk = \"/etc/tenmil/nbd.psk\"",
                "",
                "line 14, `listen`: 'nbds://192.0.2.1:10809': there is no certificate",
            ),
            (
                "read-only = true\n",
                "",
                "line 20, `listen`: 'nbd://192.0.2.1:1': other machines could write",
            ),
            (
                "tls-psk =",
                "tls-key =",
                "line 3, `tls-certificate`: a certificate and its key belong together",
            ),
            (
                "allow-resize = true",
                "allow-resize = true\nread-only = true",
                "line 15, `allow-resize`: the export is read-only",
            ),
            ("\"15m\"", "\"0s\"", "line 4, `idle-timeout`: '0s', expected at least 1s"),
        ] {
            assert_eq!(WHOLE.matches(found).count(), 1, "{found}");
            let error = TargetConfig::parse(&WHOLE.replace(found, by)).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{found} by {by}: {error}");
        }
    }
}
