//! Where a process is called: its Unix socket, or its TCP port.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use tenmil_base::{Error, Span};

use crate::error::{ErrorCode, RpcError, quote_untrusted};
use crate::server::ControlToken;
use crate::tls::{ClientTls, ControlCertificate};

/// Where a process is called.
#[derive(Clone, Debug)]
pub enum ControlEndpoint {
    /// Unix socket.
    Socket(PathBuf),
    /// TCP port.
    Http(HttpEndpoint),
}

/// TCP port of a process, with what this client and the server prove to each other.
#[derive(Clone, Debug)]
pub struct HttpEndpoint {
    /// Host name or address, without brackets.
    host: String,
    port: u16,
    pub(super) tls: Option<ClientTls>,
    has_certificate: bool,
    token: Option<ControlToken>,
}

/// What a client of a TCP port has.
#[derive(Debug, Default)]
pub struct HttpCredentials {
    /// Authorities of servers, in PEM.
    pub ca_pem: Option<Vec<u8>>,
    /// Certificate of the client.
    pub certificate: Option<ControlCertificate>,
    /// Token.
    pub token: Option<ControlToken>,
}

impl ControlEndpoint {
    /// Whether `text` is the URL of a TCP port and not a path.
    #[must_use]
    pub fn is_url(text: &str) -> bool {
        text.starts_with("http://") || text.starts_with("https://")
    }

    /// Parses `https://HOST:PORT`, or `http://ADDRESS:PORT` with a loopback address or `localhost`.
    ///
    /// # Errors
    ///
    /// If the URL has another form, if it has no TLS and another machine could be meant, or if the
    /// credentials cannot be used.
    pub fn from_url(url: &str, credentials: HttpCredentials) -> Result<Self, Error> {
        let HttpCredentials { ca_pem, certificate, token } = credentials;
        let (has_tls, rest) = match url.strip_prefix("https://") {
            Some(rest) => (true, rest),
            None => (false, url.strip_prefix("http://").unwrap_or(url)),
        };
        let malformed = || {
            let shown = quote_untrusted(url);
            Error::usage(format!("{shown} is no URL of a process, expected https://HOST:PORT"))
        };
        let authority = rest.strip_suffix('/').unwrap_or(rest);
        let (host, port) = authority.rsplit_once(':').ok_or_else(malformed)?;
        let port = port.parse().map_err(|_| malformed())?;
        let host = match host.strip_prefix('[') {
            Some(rest) => rest.strip_suffix(']').ok_or_else(malformed)?,
            None => host,
        };
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte);
        if host.is_empty() || !host.bytes().all(is_name) {
            return Err(malformed());
        }
        if !has_tls {
            let address: Option<IpAddr> = host.parse().ok();
            let is_local = address.is_some_and(|address| address.is_loopback());
            if !is_local && !host.eq_ignore_ascii_case("localhost") {
                let text = format!(
                    "{url}: requests and the token would be sent without encryption to another \
                     machine, expected https://{authority}"
                );
                return Err(Error::usage(text));
            }
        }
        let has_certificate = certificate.is_some();
        let tls = match (has_tls, ca_pem) {
            (false, _) => None,
            (true, Some(ca_pem)) => Some(ClientTls::new(&ca_pem, host, certificate.as_ref())?),
            (true, None) => {
                let text = format!("{url}: no authority for the certificate of the server");
                return Err(Error::usage(format!("{text}, expected --control-ca FILE as well")));
            }
        };
        Ok(Self::Http(HttpEndpoint { host: host.to_owned(), port, tls, has_certificate, token }))
    }

    /// Adds what may be the cause of a connection that was closed before the response: a server that
    /// requires a certificate refuses the client when its own handshake has ended already.
    pub(super) fn explain(&self, error: RpcError) -> RpcError {
        match self {
            Self::Http(HttpEndpoint { tls: Some(_), has_certificate, .. })
                if error.code == ErrorCode::ConnectionClosed =>
            {
                let hint = if *has_certificate {
                    "the server may accept the certificates of another authority only"
                } else {
                    "the server may require a certificate of the client: --control-certificate and \
                     --control-key"
                };
                error.with_hint(hint)
            }
            _ => error,
        }
    }

    /// Text for messages.
    pub(super) fn text(&self) -> String {
        match self {
            Self::Socket(path) => path.display().to_string(),
            Self::Http(endpoint) => {
                let scheme = if endpoint.tls.is_some() { "https" } else { "http" };
                format!("{scheme}://{}", endpoint.authority())
            }
        }
    }

    /// Lines of the head of a request that depend on the endpoint.
    pub(super) fn headers(&self) -> String {
        match self {
            Self::Socket(_) => "host: tenmil\r\n".to_owned(),
            Self::Http(endpoint) => {
                let token = endpoint
                    .token
                    .as_ref()
                    .map(|token| format!("authorization: {}\r\n", token.authorization()));
                format!("host: {}\r\n{}", endpoint.authority(), token.unwrap_or_default())
            }
        }
    }
}

impl HttpEndpoint {
    /// `HOST:PORT`, with brackets around an IPv6 address.
    fn authority(&self) -> String {
        let Self { host, port, .. } = self;
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }

    /// Addresses of the host. Without TLS only those of this machine.
    pub(super) fn addresses(&self) -> Result<Vec<SocketAddr>, RpcError> {
        let host = self.host.as_str();
        let found = (host, self.port).to_socket_addrs().map_err(|error| {
            RpcError::usage(ErrorCode::NoProcess, format!("connect {}: {error}", self.authority()))
        })?;
        let is_usable = |address: &SocketAddr| self.tls.is_some() || address.ip().is_loopback();
        Ok(found.filter(is_usable).collect())
    }
}

/// Part of a time limit for each of `count` attempts.
pub(super) fn share_of(time_limit: Span, count: usize) -> Span {
    Span { ns: time_limit.ns / count.max(1) as u64 }
}

#[cfg(test)]
mod tests {
    use super::{ControlEndpoint, HttpCredentials};
    use crate::server::ControlToken;

    fn parse(url: &str) -> Result<ControlEndpoint, String> {
        let token = Some(ControlToken::parse("0123456789abcdef").unwrap());
        let credentials = HttpCredentials { token, ..HttpCredentials::default() };
        ControlEndpoint::from_url(url, credentials).map_err(|error| error.text)
    }

    #[test]
    fn plaintext_is_for_this_machine() {
        for url in ["http://127.0.0.1:9010", "http://localhost:9010/", "http://[::1]:9010"] {
            let endpoint = parse(url).unwrap();
            assert_eq!(endpoint.text(), url.trim_end_matches('/'));
            let headers = endpoint.headers();
            assert!(headers.ends_with("authorization: Bearer 0123456789abcdef\r\n"), "{headers}");
        }
        for url in ["http://192.0.2.1:9010", "http://storage.example:9010", "http://0.0.0.0:1"] {
            let refused = parse(url).unwrap_err();
            assert!(refused.contains("expected https://"), "{refused}");
        }
    }

    #[test]
    fn url_has_a_host_and_a_port_and_https_needs_an_authority() {
        for url in [
            "http://",
            "http://localhost",
            "https://a b:1",
            "https://a\r\nx:1",
            "https://:1",
            "https://user@host:1",
            "https://host:1/v1",
            "https://[::1:1",
            "https://host:65536",
        ] {
            let refused = parse(url).unwrap_err();
            assert!(refused.contains("expected https://HOST:PORT"), "{url}: {refused}");
        }
        let refused = parse("https://storage.example:9010").unwrap_err();
        assert!(refused.contains("expected --control-ca FILE"), "{refused}");
        let url = "https://storage.example:9010";
        let ca_pem = Some(b"no certificate".to_vec());
        let credentials = HttpCredentials { ca_pem, ..HttpCredentials::default() };
        assert!(ControlEndpoint::from_url(url, credentials).is_err());
    }
}
