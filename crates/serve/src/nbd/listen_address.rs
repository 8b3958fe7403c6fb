//! Parser for listen addresses.

use std::net::{SocketAddr, ToSocketAddrs};

use tenmil_linux::socket_stream::ListenAddress;

/// Port that IANA assigned to NBD.
const PORT: u16 = 10_809;

/// Parses a listen address: `nbd:/path/of/a/socket`, `nbd://127.0.0.1:10809` or `nbd://[::1]:0`.
/// Port 0 selects any free port; the default port is 10809.
///
/// # Errors
///
/// A message that names what is wrong and what is accepted.
pub fn parse_listen_address(text: &str) -> Result<ListenAddress, String> {
    let expected = "expected nbd:/path/of/a/socket or nbd://127.0.0.1:10809";
    let Some(rest) = text.strip_prefix("nbd:") else {
        return Err(format!("`{text}` is no address to listen at, {expected}"));
    };
    let Some(memory) = rest.strip_prefix("//") else {
        return match rest {
            "" => Err(format!("`{text}` names no socket, {expected}")),
            path => Ok(ListenAddress::Path(path.into())),
        };
    };
    let memory = memory.strip_suffix('/').unwrap_or(memory);
    if memory.is_empty() || memory.contains('/') {
        return Err(format!("`{text}` names no host, {expected}"));
    }
    let numeric = memory.parse::<SocketAddr>().ok().or_else(|| {
        let bare = memory.trim_start_matches('[').trim_end_matches(']');
        Some(SocketAddr::new(bare.parse().ok()?, PORT))
    });
    if let Some(port) = numeric {
        return Ok(ListenAddress::Tcp(port));
    }
    let named = if memory.contains(':') { memory.to_owned() } else { format!("{memory}:{PORT}") };
    let mut found = named
        .to_socket_addrs()
        .map_err(|error| format!("`{text}`: look up {memory}: {error}, {expected}"))?;
    let found = found.next().ok_or_else(|| format!("`{text}`: {memory} has no address"))?;
    Ok(ListenAddress::Tcp(found))
}

#[cfg(test)]
mod tests {
    use tenmil_linux::socket_stream::ListenAddress;

    use super::parse_listen_address;

    #[test]
    fn socket_paths_and_tcp_ports_are_distinguished() {
        assert_eq!(parse_listen_address("nbd:/run/x"), Ok(ListenAddress::Path("/run/x".into())));
        assert_eq!(parse_listen_address("nbd:x"), Ok(ListenAddress::Path("x".into())));
        for (text, port) in [
            ("nbd://127.0.0.1:0", "127.0.0.1:0"),
            ("nbd://127.0.0.1:1/", "127.0.0.1:1"),
            ("nbd://127.0.0.1", "127.0.0.1:10809"),
            ("nbd://[::1]:7", "[::1]:7"),
            ("nbd://[::1]", "[::1]:10809"),
        ] {
            assert_eq!(
                parse_listen_address(text),
                Ok(ListenAddress::Tcp(port.parse().unwrap())),
                "{text}"
            );
        }
    }

    #[test]
    fn invalid_listen_address_is_rejected_with_its_text() {
        for text in
            ["", "tcp://x", "nbd:", "nbd://", "nbd:///x", "nbd://a/b", "nbd://127.0.0.1:99999"]
        {
            let refused = parse_listen_address(text).unwrap_err();
            assert!(
                refused.contains(&format!("`{text}`")) && refused.contains("expected"),
                "{refused}"
            );
        }
    }
}
