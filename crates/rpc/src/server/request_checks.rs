//! Checks of a request before it is dispatched: where it comes from, and whether it may do that.
//!
//! Clients of a Unix socket are known by their user. TCP clients are any user of this machine, and any
//! web page that runs in a browser on it, so for those:
//!
//! | | without a token file | with one |
//! |---|---|---|
//! | files of the page, `/healthz`, `/readyz` | yes | yes |
//! | requests that read | yes | with the token |
//! | requests that change something | no | with the token |
//! | requests for a host name other than `localhost` (DNS rebinding) | no | no |
//! | requests of a page of another origin | no | no |
//!
//! With TLS the host name is that of the certificate, so any is accepted. A client whose certificate has
//! been verified needs no token if there is no token file. Other machines can connect only if there is a
//! token file or an authority of client certificates, so the first column concerns this machine alone.

use core::fmt;
use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLock};

use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, HeaderName, ORIGIN};

use super::admission::TcpSecurity;
use crate::api::{Api, JSON};
use crate::error::{ErrorCode, RpcError, quote_untrusted};

/// Token that a TCP client sends as `Authorization: Bearer TOKEN`. Clones share it, so that it can be replaced
/// while a server uses it.
#[derive(Clone)]
pub struct ControlToken(Arc<RwLock<String>>);

/// Head of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestHead<'a> {
    pub(super) verb: &'a str,
    pub(super) path: &'a str,
    pub(super) headers: &'a HeaderMap,
    /// How the TCP connection is protected; none for a Unix socket.
    pub(super) security: Option<TcpSecurity>,
}

/// Shortest token.
const TOKEN_LEN_MIN: usize = 16;
const TOKEN_LEN_MAX: usize = 512;
const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

impl ControlToken {
    /// Token of this text, without white space around it.
    ///
    /// # Errors
    ///
    /// If it is too short, too long, or has other characters than printable ASCII.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("has other characters than printable ASCII, expected one word".to_owned());
        }
        if !(TOKEN_LEN_MIN..=TOKEN_LEN_MAX).contains(&text.len()) {
            return Err(format!(
                "has {} characters, expected {TOKEN_LEN_MIN} to {TOKEN_LEN_MAX}",
                text.len()
            ));
        }
        Ok(Self(Arc::new(RwLock::new(text.to_owned()))))
    }

    /// Replaces the token of all clones, for requests from now on.
    pub fn replace(&self, new: &Self) {
        let new = new.text();
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = new;
    }

    fn text(&self) -> String {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Value of the header that a client sends.
    pub(crate) fn authorization(&self) -> String {
        format!("Bearer {}", self.text())
    }

    /// Compares with a token of a client, in a time that does not depend on where they differ.
    fn matches(&self, other: &[u8]) -> bool {
        let own = self.text();
        let own = own.as_bytes();
        own.len() == other.len()
            && own.iter().zip(other).fold(0, |differs, (one, other)| differs | (one ^ other)) == 0
    }
}

impl fmt::Debug for ControlToken {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("ControlToken")
    }
}

/// Checks the head of a request.
pub(super) fn check_request_head(
    head: RequestHead<'_>,
    token: Option<&ControlToken>,
) -> Result<(), RpcError> {
    check_origin(head)?;
    let Some(security) = head.security else { return Ok(()) };
    if security == TcpSecurity::Plaintext {
        check_host(head)?;
    }
    if Api::is_public(head.path) && !Api::is_change(head.verb) {
        return Ok(());
    }
    check_token(head, security, token)?;
    check_media_type(head)
}

fn header<'a>(head: RequestHead<'a>, name: &HeaderName) -> Option<&'a str> {
    head.headers.get(name).map(|value| value.to_str().unwrap_or("-"))
}

/// A browser names the origin of the page that makes a request. Only a page of this server may.
fn check_origin(head: RequestHead<'_>) -> Result<(), RpcError> {
    let refused = |found: &str| {
        let text = format!("request: it comes from {found}, expected the page of this server");
        Err(RpcError::usage(ErrorCode::NotAllowed, text))
    };
    if let Some(site) = header(head, &FETCH_SITE)
        && !matches!(site, "same-origin" | "none")
        && (Api::is_change(head.verb) || !Api::is_public(head.path))
    {
        return refused(&format!("a page of another site ({})", quote_untrusted(site)));
    }
    let Some(origin) = header(head, &ORIGIN) else { return Ok(()) };
    let host = header(head, &HOST).unwrap_or_default();
    let scheme = match head.security {
        None | Some(TcpSecurity::Plaintext) => "http://",
        Some(TcpSecurity::Tls | TcpSecurity::ClientCertificate) => "https://",
    };
    if origin.strip_prefix(scheme) == Some(host) {
        return Ok(());
    }
    refused(&format!("a page of {}", quote_untrusted(origin)))
}

/// A name of another site may resolve to this machine; an address and `localhost` are this machine.
fn check_host(head: RequestHead<'_>) -> Result<(), RpcError> {
    let host = header(head, &HOST).unwrap_or_default();
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    if name.eq_ignore_ascii_case("localhost") || address.parse::<IpAddr>().is_ok() {
        return Ok(());
    }
    let text = format!(
        "request: host is {}, expected localhost or the address of the listener",
        quote_untrusted(host)
    );
    Err(RpcError::usage(ErrorCode::NotAllowed, text))
}

fn check_token(
    head: RequestHead<'_>,
    security: TcpSecurity,
    token: Option<&ControlToken>,
) -> Result<(), RpcError> {
    let Some(token) = token else {
        if security == TcpSecurity::ClientCertificate || !Api::is_change(head.verb) {
            return Ok(());
        }
        let text =
            "request: the process has no token file, expected a request that changes nothing";
        return Err(RpcError::usage(ErrorCode::NotAllowed, text)
            .with_hint("start the process with --control-token FILE, or use its Unix socket"));
    };
    let given = header(head, &AUTHORIZATION).and_then(|value| value.split_once(' '));
    let given = given.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
    match given {
        Some((_, given)) if token.matches(given.trim().as_bytes()) => Ok(()),
        Some(_) => {
            let text = "request: the token is another one, expected that of --control-token";
            Err(RpcError::usage(ErrorCode::NoToken, text))
        }
        None => {
            let text = "request: no token, expected `Authorization: Bearer TOKEN`";
            Err(RpcError::usage(ErrorCode::NoToken, text))
        }
    }
}

/// A form of another site can be sent with few media types only, of which JSON is none.
fn check_media_type(head: RequestHead<'_>) -> Result<(), RpcError> {
    if !matches!(head.verb, "POST" | "PATCH" | "PUT") {
        return Ok(());
    }
    let found = header(head, &CONTENT_TYPE).unwrap_or_default();
    let essence = found.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case(JSON) {
        return Ok(());
    }
    let text = format!("request: media type is {}, expected {JSON}", quote_untrusted(found));
    Err(RpcError::usage(ErrorCode::WrongMediaType, text))
}

#[cfg(test)]
mod tests {
    use hyper::header::{HeaderMap, HeaderName, HeaderValue};

    use super::{ControlToken, RequestHead, TcpSecurity, check_request_head};
    use crate::error::ErrorCode;

    const TOKEN: &str = "0123456789abcdef";

    fn check(
        is_tcp: bool,
        verb: &str,
        path: &str,
        headers: &[(&str, &str)],
        token: Option<&str>,
    ) -> Result<(), ErrorCode> {
        let security = is_tcp.then_some(TcpSecurity::Plaintext);
        check_with(security, verb, path, headers, token)
    }

    fn check_with(
        security: Option<TcpSecurity>,
        verb: &str,
        path: &str,
        headers: &[(&str, &str)],
        token: Option<&str>,
    ) -> Result<(), ErrorCode> {
        let headers: HeaderMap = headers
            .iter()
            .map(|(name, value)| {
                let name: HeaderName = name.parse().unwrap();
                (name, HeaderValue::from_str(value).unwrap())
            })
            .collect();
        let head = RequestHead { verb, path, headers: &headers, security };
        let token = token.map(|token| ControlToken::parse(token).unwrap());
        check_request_head(head, token.as_ref()).map_err(|refusal| refusal.code)
    }

    #[test]
    fn unix_clients_need_neither_host_nor_token_nor_media_type() {
        assert_eq!(check(false, "POST", "/v1/x", &[], Some(TOKEN)), Ok(()));
        assert_eq!(check(false, "GET", "/v1/x", &[("host", "tenmil")], None), Ok(()));
    }

    #[test]
    fn host_of_a_tcp_request_is_an_address_or_localhost() {
        for host in
            ["localhost", "LOCALHOST:9010", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:80"]
        {
            assert_eq!(check(true, "GET", "/v1/x", &[("host", host)], None), Ok(()), "{host}");
        }
        for host in ["", "tenmil", "localhost.evil.example", "evil.example:9010", "127.0.0.1.evil"]
        {
            let found = check(true, "GET", "/healthz", &[("host", host)], None);
            assert_eq!(found, Err(ErrorCode::NotAllowed), "{host}");
        }
    }

    #[test]
    fn page_of_another_origin_is_refused() {
        let host = ("host", "localhost:9010");
        let refused = Err(ErrorCode::NotAllowed);
        for origin in ["null", "http://localhost", "http://evil.example", "https://localhost:9010"]
        {
            for is_tcp in [false, true] {
                let found = check(is_tcp, "GET", "/v1/x", &[host, ("origin", origin)], None);
                assert_eq!(found, refused, "{origin}");
            }
        }
        let same = ("origin", "http://localhost:9010");
        assert_eq!(check(true, "GET", "/v1/x", &[host, same], None), Ok(()));
        for (site, expected) in [
            ("cross-site", refused),
            ("same-site", refused),
            ("same-origin", Ok(())),
            ("none", Ok(())),
        ] {
            let found = check(true, "GET", "/v1/x", &[host, ("sec-fetch-site", site)], None);
            assert_eq!(found, expected, "{site}");
        }
    }

    #[test]
    fn tcp_client_without_a_token_reads_only_and_with_one_changes_json() {
        let host = ("host", "127.0.0.1");
        let json = ("content-type", "application/json; charset=utf-8");
        let bearer = ("authorization", "bearer 0123456789abcdef");
        assert_eq!(check(true, "GET", "/v1/x", &[host], None), Ok(()));
        for verb in ["POST", "PATCH", "DELETE", "PUT"] {
            let found = check(true, verb, "/v1/x", &[host, json], None);
            assert_eq!(found, Err(ErrorCode::NotAllowed), "{verb}");
            let found = check(true, verb, "/v1/x", &[host, json], Some(TOKEN));
            assert_eq!(found, Err(ErrorCode::NoToken), "{verb}");
            assert_eq!(check(true, verb, "/v1/x", &[host, json, bearer], Some(TOKEN)), Ok(()));
        }
        assert_eq!(check(true, "GET", "/v1/x", &[host], Some(TOKEN)), Err(ErrorCode::NoToken));
        assert_eq!(check(true, "GET", "/readyz", &[host], Some(TOKEN)), Ok(()));
        for wrong in ["bearer 0123456789abcdee", "bearer", "basic 0123456789abcdef", "bearer x"] {
            let found = check(true, "GET", "/v1/x", &[host, ("authorization", wrong)], Some(TOKEN));
            assert_eq!(found, Err(ErrorCode::NoToken), "{wrong}");
        }
        let form = ("content-type", "text/plain");
        let found = check(true, "POST", "/v1/x", &[host, bearer, form], Some(TOKEN));
        assert_eq!(found, Err(ErrorCode::WrongMediaType));
    }

    #[test]
    fn tls_client_may_use_any_host_name_and_is_of_an_https_origin() {
        let host = ("host", "storage.example:9010");
        let json = ("content-type", "application/json");
        let same = ("origin", "https://storage.example:9010");
        for security in [TcpSecurity::Tls, TcpSecurity::ClientCertificate] {
            let get = |headers: &[_]| check_with(Some(security), "GET", "/v1/x", headers, None);
            assert_eq!(get(&[host]), Ok(()));
            assert_eq!(get(&[host, same]), Ok(()));
            let other = ("origin", "http://storage.example:9010");
            assert_eq!(get(&[host, other]), Err(ErrorCode::NotAllowed));
        }
        let post =
            |security, token| check_with(Some(security), "POST", "/v1/x", &[host, json], token);
        assert_eq!(post(TcpSecurity::Tls, None), Err(ErrorCode::NotAllowed));
        assert_eq!(post(TcpSecurity::ClientCertificate, None), Ok(()));
        assert_eq!(post(TcpSecurity::Tls, Some(TOKEN)), Err(ErrorCode::NoToken));
        let found = post(TcpSecurity::ClientCertificate, Some(TOKEN));
        assert_eq!(found, Err(ErrorCode::NoToken), "the token is required as well");
    }

    #[test]
    fn token_is_one_word_of_some_length() {
        assert_eq!(format!("{:?}", ControlToken::parse(TOKEN).unwrap()), "ControlToken");
        assert!(ControlToken::parse(&format!(" {TOKEN}\n")).is_ok());
        for text in ["", "0123456789abcde", "0123456789 abcdef", "0123456789abcdeé"] {
            assert!(ControlToken::parse(text).is_err(), "{text}");
        }
    }
}
