//! Credentials of NBD over TLS.

use std::path::{Path, PathBuf};

use clap::Args;
use tenmil_base::Error;
use tenmil_linux::key_file::read_key_file;
use tenmil_rpc::target_config::{IgnoredLineNumber, NbdConfig};
use tenmil_serve::nbd::{NbdCertificate, NbdPsk, NbdTls};

use crate::commands::serve::ServeArguments;

/// Options of NBD over TLS.
#[derive(Debug, Default, Args)]
pub(in crate::commands::serve) struct NbdTlsArguments {
    /// Certificate chain of NBD over TLS, a PEM file. Clients at nbds: must use TLS, clients at nbd: may
    #[arg(long, value_name = "FILE", requires = "nbd_tls_key", conflicts_with = "config")]
    nbd_tls_certificate: Option<PathBuf>,

    /// Private key of the certificate, a PEM file that only its owner may access
    #[arg(long, value_name = "FILE", requires = "nbd_tls_certificate")]
    nbd_tls_key: Option<PathBuf>,

    /// Require NBD clients over TLS to have a certificate of this authority, a PEM file
    #[arg(long, value_name = "FILE", requires = "nbd_tls_certificate")]
    nbd_tls_client_ca: Option<PathBuf>,

    /// Pre-shared keys of NBD clients over TLS, a file that only its owner may access: a line NAME:KEY
    /// for each client, as psktool writes it
    #[arg(long, value_name = "FILE", conflicts_with = "config")]
    nbd_tls_psk: Option<PathBuf>,
}

/// Longest file of keys or certificates.
const FILE_BYTES_MAX: u64 = 1 << 20;

impl NbdTlsArguments {
    /// The options, with those of connections, as settings of a configuration.
    pub(in crate::commands::serve) fn config(&self, arguments: &ServeArguments) -> NbdConfig {
        NbdConfig {
            tls_certificate: self.nbd_tls_certificate.clone(),
            tls_key: self.nbd_tls_key.clone(),
            tls_client_ca: self.nbd_tls_client_ca.clone(),
            tls_psk: self.nbd_tls_psk.clone(),
            idle_timeout: arguments.nbd_idle_timeout,
            // Those of `--max-connections` are the limits of each protocol.
            connections: arguments.max_connections,
            connections_per_address: arguments.connections_per_address,
            line: IgnoredLineNumber::default(),
        }
    }

    /// Whether any option is given.
    pub(in crate::commands::serve) fn is_given(&self) -> bool {
        self.nbd_tls_certificate.is_some() || self.nbd_tls_psk.is_some()
    }

    /// Whether a client that uses TLS has proved that it may.
    pub(super) fn authenticates_clients(&self) -> bool {
        let has_open_certificate =
            self.nbd_tls_certificate.is_some() && self.nbd_tls_client_ca.is_none();
        self.is_given() && !has_open_certificate
    }

    /// Reads the files. `required` says for each listener whether its clients must use TLS.
    pub(super) fn load(&self, required: Vec<bool>) -> Result<Option<NbdTls>, Error> {
        if !self.is_given() {
            if required.contains(&true) {
                let text = "listen at nbds: without a certificate or key, expected one";
                let hint = "Add --nbd-tls-certificate and --nbd-tls-key, or --nbd-tls-psk.";
                return Err(Error::usage(text).with_hint(hint));
            }
            return Ok(None);
        }
        let certificate = match (&self.nbd_tls_certificate, &self.nbd_tls_key) {
            (Some(chain), Some(key)) => Some(NbdCertificate {
                chain_pem: read_public(chain)?,
                key_pem: tenmil_serve::nbd::SecretBytes::new(read_secret(key)?),
                client_ca_pem: self.nbd_tls_client_ca.as_deref().map(read_public).transpose()?,
            }),
            _ => None,
        };
        let psks = match &self.nbd_tls_psk {
            Some(path) => read_psks(path)?,
            None => Vec::new(),
        };
        Ok(Some(NbdTls { required, certificate, psks }))
    }
}

/// Reads the certificate and the keys of a configuration.
pub(in crate::commands::serve) fn load_tls(config: &NbdConfig) -> Result<Option<NbdTls>, Error> {
    let files = NbdTlsArguments {
        nbd_tls_certificate: config.tls_certificate.clone(),
        nbd_tls_key: config.tls_key.clone(),
        nbd_tls_client_ca: config.tls_client_ca.clone(),
        nbd_tls_psk: config.tls_psk.clone(),
    };
    // Each listener says itself whether its clients must use TLS.
    files.load(Vec::new())
}

fn read_psks(path: &Path) -> Result<Vec<NbdPsk>, Error> {
    let shown = path.display();
    let bytes = tenmil_serve::nbd::SecretBytes::new(read_secret(path)?);
    let text = std::str::from_utf8(bytes.expose())
        .map_err(|_| Error::usage(format!("{shown}: it is not UTF-8, expected lines NAME:KEY")))?;
    let psks = NbdPsk::parse_file(text).map_err(|error| error.with_context(&shown))?;
    if psks.is_empty() {
        return Err(Error::usage(format!("{shown}: it has no key, expected lines NAME:KEY")));
    }
    Ok(psks)
}

fn read_secret(path: &Path) -> Result<Vec<u8>, Error> {
    read_key_file(path, FILE_BYTES_MAX).map_err(Error::usage)
}

fn read_public(path: &Path) -> Result<Vec<u8>, Error> {
    tenmil_linux::storage_file::read_text(path)
        .map(String::into_bytes)
        .map_err(|error| Error::usage(format!("read {}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::disallowed_methods, reason = "a test writes key files")]

    use std::os::unix::fs::PermissionsExt;

    use super::NbdTlsArguments;

    #[test]
    fn listener_that_requires_tls_needs_credentials() {
        let none = NbdTlsArguments::default();
        assert!(none.load(vec![false]).unwrap().is_none());
        let error = none.load(vec![false, true]).unwrap_err();
        assert!(error.text.contains("nbds:") && error.hint().unwrap().contains("--nbd-tls-psk"));
    }

    #[test]
    fn key_file_that_others_may_read_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys.psk");
        std::fs::write(&path, format!("alice:{}\n", "5a".repeat(32))).unwrap();
        let arguments =
            NbdTlsArguments { nbd_tls_psk: Some(path.clone()), ..NbdTlsArguments::default() };
        let with_mode = |mode| {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            arguments.load(vec![true])
        };
        assert!(with_mode(0o644).unwrap_err().text.contains("keys.psk"));
        let tls = with_mode(0o600).unwrap().unwrap();
        assert_eq!((tls.psks.len(), &*tls.psks[0].identity), (1, "alice"));
        std::fs::write(&path, "# none\n").unwrap();
        assert!(with_mode(0o600).unwrap_err().text.contains("it has no key"));
    }

    #[test]
    fn clients_are_authenticated_unless_any_client_may_use_the_certificate() {
        let file = || Some("file".into());
        let psk = NbdTlsArguments { nbd_tls_psk: file(), ..NbdTlsArguments::default() };
        let certificate = NbdTlsArguments {
            nbd_tls_certificate: file(),
            nbd_tls_key: file(),
            ..NbdTlsArguments::default()
        };
        assert!(psk.authenticates_clients());
        assert!(!NbdTlsArguments::default().authenticates_clients());
        assert!(!certificate.authenticates_clients());
        let both = NbdTlsArguments { nbd_tls_psk: file(), ..certificate };
        assert!(!both.authenticates_clients(), "a client may ignore the keys");
        assert!(NbdTlsArguments { nbd_tls_client_ca: file(), ..both }.authenticates_clients());
    }
}
