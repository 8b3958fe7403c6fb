//! Where `serve` listens, and for whom.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use host::stream::Address;

/// A place to listen at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Listen {
    /// For NBD clients.
    Nbd(Address),
    /// For NVMe/TCP hosts.
    NvmeTcp(SocketAddr),
    /// For virtual machines and other drivers.
    VfioUser(PathBuf),
}

/// The port that IANA has reserved for NVMe over TCP (TCP 1.0 §3.1.2).
const PORT: u16 = 4420;

/// The place that `text` stands for: `nbd:PATH`, `nbd://HOST:PORT`, `tcp://HOST:PORT` or
/// `vfio-user:PATH`.
pub(super) fn parse_listen(text: &str) -> Result<Listen, String> {
    if let Some(path) = text.strip_prefix("vfio-user:") {
        return match path {
            "" => Err(format!("`{text}` names no socket, expected vfio-user:/path/of/a/socket")),
            path => Ok(Listen::VfioUser(path.into())),
        };
    }
    let Some(place) = text.strip_prefix("tcp://") else {
        return target::nbd::parse_address(text).map(Listen::Nbd).map_err(|why| {
            let others = format!("tcp://127.0.0.1:{PORT} or vfio-user:/path/of/a/socket");
            if text.starts_with("nbd:") { why } else { format!("{why}, {others}") }
        });
    };
    let place = place.strip_suffix('/').unwrap_or(place);
    let expected = format!("expected tcp://127.0.0.1:{PORT}");
    if place.is_empty() || place.contains('/') {
        return Err(format!("`{text}` names no host, {expected}"));
    }
    let bare = place.trim_start_matches('[').trim_end_matches(']');
    let numeric = place.parse().ok();
    let numeric = numeric.or_else(|| Some(SocketAddr::new(bare.parse().ok()?, PORT)));
    if let Some(address) = numeric {
        return Ok(Listen::NvmeTcp(address));
    }
    let named = if place.contains(':') { place.to_owned() } else { format!("{place}:{PORT}") };
    let found = named.to_socket_addrs();
    let mut found =
        found.map_err(|error| format!("`{text}`: look up {place}: {error}, {expected}"))?;
    let found = found.next().ok_or_else(|| format!("`{text}`: {place} has no address"))?;
    Ok(Listen::NvmeTcp(found))
}

#[cfg(test)]
mod tests {
    use super::{Listen, parse_listen};

    #[test]
    fn the_scheme_says_which_protocol_is_spoken() {
        let tcp = |text: &str| Ok(Listen::NvmeTcp(text.parse().unwrap()));
        assert_eq!(parse_listen("tcp://127.0.0.1:4421"), tcp("127.0.0.1:4421"));
        assert_eq!(parse_listen("tcp://127.0.0.1/"), tcp("127.0.0.1:4420"));
        assert_eq!(parse_listen("tcp://[::1]"), tcp("[::1]:4420"));
        assert_eq!(parse_listen("tcp://[::]:0"), tcp("[::]:0"));
        assert!(matches!(parse_listen("nbd:/run/x"), Ok(Listen::Nbd(_))));
        assert_eq!(parse_listen("vfio-user:/run/x"), Ok(Listen::VfioUser("/run/x".into())));
        for text in [
            "",
            "vfio-user:",
            "tcp:",
            "tcp://",
            "tcp://a/b",
            "udp://1.2.3.4",
            "tcp://127.0.0.1:99999",
        ] {
            let refused = parse_listen(text).unwrap_err();
            assert!(refused.contains("expected"), "{text}: {refused}");
            assert!(refused.contains(&format!("`{text}`")), "{text}: {refused}");
        }
    }
}
