//! Options of commands that run for some time: where they can be controlled, and by whom.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::Args;
use tenmil_base::Error;
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::key_file::read_key_file;
use tenmil_linux::sandbox::find_group;
use tenmil_rpc::{
    ControlCertificate, ControlEndpoint, ControlListeners, ControlTls, ControlToken, EventSender,
    HAS_CONTROL_TLS, HAS_OTLP, OtlpEndpoint, OtlpExport, ServerError,
};
use tenmil_serve::nbd::SecretBytes;

/// Where a process can be controlled besides its socket in the runtime directory.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Control")]
pub(super) struct ControlOptions {
    /// Control socket at this path, besides the one in the runtime directory [default of serve:
    /// $TENMIL_CONTROL]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,

    /// Group whose members may use the socket of --control
    #[arg(long, value_name = "GROUP")]
    control_group: Option<String>,

    /// Serve the HTTP API at this address too: a loopback address such as 127.0.0.1:9010, or any with
    /// TLS, such as https://192.0.2.1:9010; may be repeated
    #[arg(long, value_name = "ADDRESS", value_parser = parse_address)]
    control_listen: Vec<ControlAddress>,

    /// File with the token of TCP clients of the API; without it they can change nothing
    #[arg(long, value_name = "FILE")]
    control_token: Option<PathBuf>,

    /// Certificate chain for https:// addresses of --control-listen, a PEM file
    #[arg(long, value_name = "FILE", requires = "control_tls_key")]
    control_tls_certificate: Option<PathBuf>,

    /// Private key of the certificate, a PEM file that only its owner may access
    #[arg(long, value_name = "FILE", requires = "control_tls_certificate")]
    control_tls_key: Option<PathBuf>,

    /// Require clients of https:// addresses to have a certificate of this authority, a PEM file
    #[arg(long, value_name = "FILE", requires = "control_tls_certificate")]
    control_tls_client_ca: Option<PathBuf>,

    /// Send metrics and traces to the OpenTelemetry collector at this URL, by OTLP over HTTP, such as
    /// http://127.0.0.1:4318 [default: $OTEL_EXPORTER_OTLP_ENDPOINT]; needs a program built with `otlp`
    #[arg(long, value_name = "URL", value_parser = OtlpEndpoint::parse)]
    otlp_endpoint: Option<OtlpEndpoint>,

    /// Name of this process, by which --instance of other commands finds it
    #[arg(long, value_name = "NAME")]
    instance: Option<String>,
}

/// Listeners that are open, and the name of the process.
#[derive(Debug, Default)]
pub(super) struct PreparedControl {
    pub(super) listeners: ControlListeners,
    pub(super) instance: Option<String>,
    /// Export of metrics and traces.
    pub(super) otlp: Option<OtlpExport>,
}

/// Credentials of the control API in files, which are read again.
struct ControlCredentials {
    /// Token of TCP clients, and its file.
    token: Option<(ControlToken, PathBuf)>,
    tls: Option<(ControlTls, CertificateFiles)>,
}

/// Files of a server's certificate.
#[derive(Clone)]
struct CertificateFiles {
    chain: PathBuf,
    key: PathBuf,
    client_ca: Option<PathBuf>,
}

/// Variable that names the socket of --control, of the server and of its clients.
pub(super) const CONTROL_VARIABLE: &str = "TENMIL_CONTROL";

/// Address at which the API is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ControlAddress {
    address: SocketAddr,
    /// Whether clients use TLS.
    has_tls: bool,
}

/// Variables of OpenTelemetry: URL of the collector, name of the service, and intervals in milliseconds.
const ENDPOINT_VARIABLE: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const SERVICE_VARIABLE: &str = "OTEL_SERVICE_NAME";
const INTERVAL_VARIABLE: &str = "OTEL_METRIC_EXPORT_INTERVAL";
const DELAY_VARIABLE: &str = "OTEL_BSP_SCHEDULE_DELAY";
/// Their defaults.
const METRICS_INTERVAL_MS: u64 = 60_000;
const SPANS_INTERVAL_MS: u64 = 5_000;
const INTERVAL_MS_MIN: u64 = 100;

/// Longest file with a token.
const TOKEN_FILE_MAX: u64 = 1024;
/// Longest file of certificates or a key.
const PEM_FILE_MAX: u64 = 1 << 20;

/// What the command line asks for, until the control server of the process takes it. A process has one
/// command line and at most one control server.
static PREPARED: Mutex<Option<PreparedControl>> = Mutex::new(None);
/// Credentials that the control server of the process uses.
static CREDENTIALS: Mutex<Option<ControlCredentials>> = Mutex::new(None);

impl ControlOptions {
    /// Opens the listeners, so that an address that cannot be used ends the command before it does
    /// anything, and while it has all rights.
    pub(super) fn prepare(&self) -> Result<(), Error> {
        let mut listeners = ControlListeners::new();
        let group = self.group()?;
        if let Some(path) = &self.control {
            if let Some(url) = path.to_str().filter(|text| ControlEndpoint::is_url(text)) {
                let text = format!("--control {url}: it names another process, expected a path");
                return Err(Error::usage(text)
                    .with_hint("an address to listen at is given by --control-listen"));
            }
            listeners.add_socket(path, group).map_err(listen_error("--control"))?;
        } else if let Some(group) = &self.control_group {
            let text = format!("--control-group {group}: expected --control PATH as well");
            return Err(Error::usage(text).with_hint(
                "the runtime directory is its owner's alone, so a group needs a socket elsewhere",
            ));
        }
        let token = self.token()?;
        if let Some(token) = &token {
            listeners.set_token(token.clone());
        }
        let tls = self.tls()?;
        for ControlAddress { address, has_tls } in &self.control_listen {
            let added = match (&tls, has_tls) {
                (Some(tls), true) => listeners.add_tls(*address, tls),
                (None, true) => return Err(without_certificate(*address)),
                (_, false) => listeners.add_tcp(*address),
            };
            added.map_err(listen_error("--control-listen"))?;
        }
        let credentials = ControlCredentials {
            token: token.zip(self.control_token.clone()),
            tls: tls.zip(self.certificate_files()),
        };
        *CREDENTIALS.lock().unwrap_or_else(PoisonError::into_inner) = Some(credentials);
        let (instance, otlp) = (self.instance.clone(), self.telemetry_export()?);
        let prepared = PreparedControl { listeners, instance, otlp };
        *PREPARED.lock().unwrap_or_else(PoisonError::into_inner) = Some(prepared);
        Ok(())
    }

    /// The same with the socket that the environment names, if the command line names none.
    pub(super) fn or_from_environment(&self) -> Self {
        let variable = std::env::var_os(CONTROL_VARIABLE).filter(|path| !path.is_empty());
        let control = self.control.clone().or_else(|| variable.map(PathBuf::from));
        Self { control, ..self.clone() }
    }

    /// Whether metrics and traces are sent to a collector.
    pub(super) fn has_collector(&self) -> bool {
        HAS_OTLP && (self.otlp_endpoint.is_some() || text_variable(ENDPOINT_VARIABLE).is_some())
    }

    /// Export of metrics and traces, if the command line or the environment names a collector. Its name is
    /// resolved once, while this process has all rights.
    fn telemetry_export(&self) -> Result<Option<OtlpExport>, Error> {
        if self.otlp_endpoint.is_some() && !HAS_OTLP {
            let text = "--otlp-endpoint: this program is built without OTLP, expected one with the feature \
                        `otlp`";
            return Err(Error::usage(text));
        }
        let (endpoint, source) = match (&self.otlp_endpoint, text_variable(ENDPOINT_VARIABLE)) {
            (Some(endpoint), _) => (endpoint.clone(), "--otlp-endpoint"),
            (None, Some(url)) if HAS_OTLP => {
                let parsed = OtlpEndpoint::parse(&url);
                let refused = |why| Error::usage(format!("${ENDPOINT_VARIABLE}: {why}"));
                (parsed.map_err(refused)?, ENDPOINT_VARIABLE)
            }
            _ => return Ok(None),
        };
        let found = (endpoint.host.as_str(), endpoint.port).to_socket_addrs();
        let addresses = match found {
            Ok(addresses) => addresses.collect(),
            Err(why) => {
                let host = &endpoint.host;
                return Err(Error::environment(format!("{source}: resolve {host}: {why}")));
            }
        };
        Ok(Some(OtlpExport {
            addresses,
            resource: self.resource_attributes(),
            metrics_interval: interval(INTERVAL_VARIABLE, METRICS_INTERVAL_MS)?,
            spans_interval: interval(DELAY_VARIABLE, SPANS_INTERVAL_MS)?,
            report: report_export,
            counters: Arc::default(),
            endpoint,
        }))
    }

    /// Attributes of this process, as the semantic conventions of OpenTelemetry name them.
    fn resource_attributes(&self) -> Vec<(&'static str, String)> {
        let host = KernelFiles::live_system().read_trimmed("proc/sys/kernel/hostname");
        let host = host.unwrap_or_default();
        let pid = std::process::id();
        let instance = self.instance.clone().unwrap_or_else(|| format!("{host}:{pid}"));
        vec![
            (
                "service.name",
                text_variable(SERVICE_VARIABLE).unwrap_or_else(|| "tenmil".to_owned()),
            ),
            ("service.version", env!("CARGO_PKG_VERSION").to_owned()),
            ("service.instance.id", instance),
            ("host.name", host),
            ("process.pid", pid.to_string()),
        ]
    }

    /// Path of the socket.
    pub(super) fn socket_path(&self) -> Option<&Path> {
        self.control.as_deref()
    }

    fn group(&self) -> Result<Option<u32>, Error> {
        let Some(name) = &self.control_group else { return Ok(None) };
        let found = find_group(name)
            .map_err(|why| Error::environment(format!("--control-group {name}: {why}")))?;
        match found {
            Some(group) => Ok(Some(group)),
            None => {
                let text = format!("--control-group {name}: no such group, expected one");
                let hint = format!("create it: sudo groupadd --system {name}");
                Err(Error::usage(text).with_hint(hint))
            }
        }
    }

    fn token(&self) -> Result<Option<ControlToken>, Error> {
        self.control_token.as_deref().map(read_token).transpose()
    }

    /// TLS of the addresses with https://, if there is a certificate.
    fn tls(&self) -> Result<Option<ControlTls>, Error> {
        let Some(files) = self.certificate_files() else { return Ok(None) };
        if !self.control_listen.iter().any(|listen| listen.has_tls) {
            let text = "--control-tls-certificate: no address uses it, expected --control-listen \
                        https://ADDRESS:PORT as well";
            return Err(Error::usage(text));
        }
        let (certificate, client_ca) = files.read()?;
        ControlTls::new(&certificate, client_ca.as_deref()).map(Some)
    }

    fn certificate_files(&self) -> Option<CertificateFiles> {
        let (chain, key) = (self.control_tls_certificate.clone()?, self.control_tls_key.clone()?);
        Some(CertificateFiles { chain, key, client_ca: self.control_tls_client_ca.clone() })
    }

    /// Files of credentials, which are read again on SIGHUP and on a reload.
    pub(super) fn credential_files(&self) -> Vec<&Path> {
        let files = [
            &self.control_token,
            &self.control_tls_certificate,
            &self.control_tls_key,
            &self.control_tls_client_ca,
        ];
        files.into_iter().flatten().map(PathBuf::as_path).collect()
    }
}

impl CertificateFiles {
    /// The certificate, and the authority of client certificates if there is a file for it.
    fn read(&self) -> Result<(ControlCertificate, Option<Vec<u8>>), Error> {
        let client_ca = self.client_ca.as_deref().map(read_public).transpose()?;
        Ok((read_certificate(&self.chain, &self.key)?, client_ca))
    }
}

impl ControlCredentials {
    /// Reads all files, and then replaces what they contain.
    fn reload(&self) -> Result<(), Error> {
        let new_token = match &self.token {
            Some((_, file)) => Some(read_token(file)?),
            None => None,
        };
        if let Some((tls, files)) = &self.tls {
            let (certificate, client_ca) = files.read()?;
            tls.replace(&certificate, client_ca.as_deref())?;
        }
        if let (Some((token, _)), Some(new)) = (&self.token, new_token) {
            token.replace(&new);
        }
        Ok(())
    }
}

/// Reads the certificate and the token of the control API again, for connections and requests from now on, and
/// reports the result. After an error the former ones stay. Does nothing without any.
pub(super) fn reload_credentials(announcer: Option<&EventSender>) {
    let credentials = CREDENTIALS.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(credentials) =
        credentials.as_ref().filter(|found| found.token.is_some() || found.tls.is_some())
    else {
        return;
    };
    let done = credentials.reload();
    match &done {
        Ok(()) => tracing::info!("control API: credentials were read again"),
        Err(refused) => {
            tracing::warn!("control API: credentials are unchanged: {}", refused.text);
        }
    }
    if let Some(announcer) = announcer {
        announcer.emit_control_reload(done.as_ref().copied());
    }
}

/// Reads the file of --control-token.
pub(super) fn read_token(path: &Path) -> Result<ControlToken, Error> {
    let refused = |why: String| Error::usage(format!("--control-token: {why}"));
    let bytes = read_key_file(path, TOKEN_FILE_MAX).map_err(|why| refused(why.to_string()))?;
    ControlToken::parse(&String::from_utf8_lossy(&bytes))
        .map_err(|why| refused(format!("{}: {why}", path.display())))
}

/// Reads a certificate chain and its private key.
pub(super) fn read_certificate(chain: &Path, key: &Path) -> Result<ControlCertificate, Error> {
    let key_pem = read_key_file(key, PEM_FILE_MAX).map_err(Error::usage)?;
    Ok(ControlCertificate { chain_pem: read_public(chain)?, key_pem: SecretBytes::new(key_pem) })
}

/// Reads a file that is no secret.
pub(super) fn read_public(path: &Path) -> Result<Vec<u8>, Error> {
    tenmil_linux::storage_file::read_text(path)
        .map(String::into_bytes)
        .map_err(|error| Error::usage(format!("read {}: {error}", path.display())))
}

fn without_certificate(address: SocketAddr) -> Error {
    let text = format!("--control-listen https://{address}: no certificate of the server");
    if HAS_CONTROL_TLS {
        let expected = "expected --control-tls-certificate and --control-tls-key";
        return Error::usage(format!("{text}, {expected}"));
    }
    Error::usage(format!(
        "{text}, and this program was built without the feature `tls`, expected one that was built \
         with `cargo build --features tls`"
    ))
}

/// Takes what [`ControlOptions::prepare`] has opened.
pub(super) fn take_prepared() -> PreparedControl {
    PREPARED.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default()
}

/// A variable with a text.
fn text_variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.is_empty())
}

/// An interval that a variable gives in milliseconds.
fn interval(variable: &str, default_ms: u64) -> Result<Duration, Error> {
    let Some(text) = text_variable(variable) else { return Ok(Duration::from_millis(default_ms)) };
    let found =
        text.parse::<u64>().ok().filter(|ms| (INTERVAL_MS_MIN..=u64::from(u32::MAX)).contains(ms));
    let expected =
        format!("${variable}: '{text}', expected milliseconds, at least {INTERVAL_MS_MIN}");
    found.map(Duration::from_millis).ok_or_else(|| Error::usage(expected))
}

/// Logs that the collector accepts nothing, or accepts it again.
fn report_export(endpoint: &OtlpEndpoint, result: Result<(), &str>) {
    match result {
        Ok(()) => tracing::info!(event = "otlp", "telemetry: {endpoint} accepts it again"),
        Err(why) => tracing::warn!(
            event = "otlp",
            "telemetry: {endpoint} does not accept it: {why}; it is tried again, and what is dropped is counted"
        ),
    }
}

fn listen_error(option: &'static str) -> impl Fn(ServerError) -> Error {
    move |refused| {
        let text = format!("{option}: {refused}");
        match refused.kind() {
            std::io::ErrorKind::PermissionDenied => Error::environment(text),
            _ => Error::usage(text),
        }
    }
}

/// Parses `ADDRESS:PORT` or `http://ADDRESS:PORT`, of which only this machine reaches the address, or
/// `https://ADDRESS:PORT`.
fn parse_address(text: &str) -> Result<ControlAddress, String> {
    let expected = "expected a loopback address and a port, such as 127.0.0.1:9010 or [::1]:9010, or any \
                    with TLS, such as https://192.0.2.1:9010";
    let (has_tls, place) = match text.strip_prefix("https://") {
        Some(place) => (true, place),
        None => (false, text.strip_prefix("http://").unwrap_or(text)),
    };
    let address: SocketAddr = place.parse().map_err(|_| format!("`{text}`: {expected}"))?;
    if has_tls || address.ip().is_loopback() {
        return Ok(ControlAddress { address, has_tls });
    }
    Err(format!(
        "`{text}` can be reached from other machines, and the API is not encrypted there: expected \
         https://{address} with a certificate and a token or certificates of clients, or a loopback \
         address"
    ))
}

#[cfg(test)]
mod tests {
    use super::{ControlAddress, ControlOptions, parse_address};

    #[test]
    fn addresses_other_than_loopback_need_tls() {
        for text in ["127.0.0.1:9010", "127.8.0.1:0", "[::1]:9010"] {
            let expected = ControlAddress { address: text.parse().unwrap(), has_tls: false };
            assert_eq!(parse_address(text).unwrap(), expected);
            assert_eq!(parse_address(&format!("http://{text}")).unwrap(), expected);
        }
        for text in ["0.0.0.0:9010", "[::]:1", "127.0.0.1:9010"] {
            let expected = ControlAddress { address: text.parse().unwrap(), has_tls: true };
            assert_eq!(parse_address(&format!("https://{text}")).unwrap(), expected);
        }
        for text in ["0.0.0.0:9010", "[::]:1", "192.0.2.1:1", "http://192.0.2.1:1"] {
            let refused = parse_address(text).unwrap_err();
            assert!(refused.contains("can be reached from other machines"), "{refused}");
        }
        for text in ["", "9010", "localhost:9010", "127.0.0.1", "https://storage:9010"] {
            let refused = parse_address(text).unwrap_err();
            assert!(refused.contains("expected a loopback address"), "{refused}");
        }
    }

    #[test]
    fn group_without_a_socket_and_an_unknown_group_are_refused() {
        let options = |group: &str| ControlOptions {
            control_group: Some(group.to_owned()),
            ..ControlOptions::default()
        };
        let refused = options("0").prepare().unwrap_err();
        assert!(refused.text.contains("expected --control PATH"), "{refused}");
        let refused = options("no-such-group").prepare().unwrap_err();
        assert!(refused.text.contains("no such group"), "{refused}");
        assert!(refused.hint.unwrap().contains("groupadd"));
    }
}
