//! TLS of an NBD export.

use tenmil_base::Error;
use tenmil_serve::nbd::{NbdCertificate, NbdPsk, SecretBytes};

/// TLS 1.3 of an NBD export, for [`Export::nbd_tls`](crate::Export::nbd_tls): a certificate, pre-shared keys
/// of clients, or both. It needs the feature `tls`.
///
/// Clients must use TLS, unless [`allow_plaintext`](Self::allow_plaintext) is called. They are authenticated
/// by a pre-shared key, or by a certificate of [`client_ca`](Self::client_ca).
///
/// ```no_run
/// use tenmil::{Access, Export, NbdTls, Runtime};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let rt = Runtime::new()?;
/// let (chain, key) = (std::fs::read("server.pem")?, std::fs::read("server-key.pem")?);
/// let tls = NbdTls::new().certificate(&chain, &key).client_ca(&std::fs::read("clients.pem")?);
/// rt.block_on(async {
///     let disk = rt.open("file:disk", Access::ReadWrite).await?;
///     let server = rt.serve(Export::nbd("0.0.0.0:10809").device("disk", disk).nbd_tls(tls)).await?;
///     println!("{}", server.uris()[0]);
///     Ok(())
/// })
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "it has an effect as a part of an export"]
pub struct NbdTls {
    certificate: Option<NbdCertificate>,
    client_ca_pem: Option<Vec<u8>>,
    psks: Vec<NbdPsk>,
    allows_plaintext: bool,
}

impl NbdTls {
    /// TLS without a certificate or a key, which cannot be served yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the certificate chain of the server and its private key, in PEM.
    pub fn certificate(mut self, chain_pem: &[u8], key_pem: &[u8]) -> Self {
        self.certificate = Some(NbdCertificate {
            chain_pem: chain_pem.to_vec(),
            key_pem: SecretBytes::new(key_pem.to_vec()),
            client_ca_pem: None,
        });
        self
    }

    /// Requires clients to have a certificate of this authority, in PEM.
    pub fn client_ca(mut self, pem: &[u8]) -> Self {
        self.client_ca_pem = Some(pem.to_vec());
        self
    }

    /// Adds a pre-shared key, with the name that its client uses.
    pub fn psk(mut self, name: &str, key: &[u8]) -> Self {
        let secret = SecretBytes::new(key.to_vec());
        self.psks.push(NbdPsk { identity: name.to_owned(), secret });
        self
    }

    /// Serves clients in plaintext, too.
    pub const fn allow_plaintext(mut self) -> Self {
        self.allows_plaintext = true;
        self
    }

    /// Whether each client has proved that it may connect.
    pub(crate) const fn authenticates_clients(&self) -> bool {
        let has_open_certificate = self.certificate.is_some() && self.client_ca_pem.is_none();
        !self.allows_plaintext && !has_open_certificate
    }

    /// Whether clients must use TLS.
    pub(crate) const fn is_required(&self) -> bool {
        !self.allows_plaintext
    }

    /// TLS of a server with one listener.
    pub(crate) fn of_listener(&self) -> Result<tenmil_serve::nbd::NbdTls, Error> {
        let refuse = |text: &str| Err(Error::usage(text));
        let certificate = match (&self.certificate, &self.client_ca_pem) {
            (None, None) if self.psks.is_empty() => {
                return refuse("TLS has neither a certificate nor a pre-shared key, expected one");
            }
            (None, Some(_)) => {
                return refuse("TLS has an authority of clients and no certificate, expected both");
            }
            (certificate, client_ca_pem) => certificate.clone().map(|certificate| NbdCertificate {
                client_ca_pem: client_ca_pem.clone(),
                ..certificate
            }),
        };
        let required = vec![!self.allows_plaintext];
        Ok(tenmil_serve::nbd::NbdTls { required, certificate, psks: self.psks.clone() })
    }
}
