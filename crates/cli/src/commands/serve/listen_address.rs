//! Listen addresses of `serve`.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use tenmil_linux::socket_stream::ListenAddress;

/// Listen address and its transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TransportAddress {
    /// NBD over a Unix or TCP socket.
    Nbd(ListenAddress),
    /// The same, for clients with TLS only.
    NbdOverTls(ListenAddress),
    /// NVMe/TCP.
    NvmeTcp(SocketAddr),
    /// vfio-user, for virtual machines and other drivers.
    VfioUser(PathBuf),
    /// vhost-user-blk, for virtual machines.
    VhostUser(PathBuf),
    /// ublk block device of this machine.
    Ublk(UblkListenOptions),
}

/// Options of a ublk device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct UblkListenOptions {
    /// Device number N of /dev/ublkbN; without it the kernel picks one.
    pub(super) number: Option<u32>,
    /// Number of queues; without it one per serving core.
    pub(super) queues: Option<u16>,
    /// Queue depth.
    pub(super) depth: Option<u16>,
    /// Whether a device that another server has left behind is deleted first.
    pub(super) replaces: bool,
    /// Whether data are copied even if zero copy is possible.
    pub(super) copies: bool,
}

/// Port registered with IANA for NVMe/TCP (NVMe/TCP Transport Specification 1.0, section 3.1.2).
const PORT: u16 = 4420;

/// Parses a listen address: `nbd:PATH`, `nbd://HOST:PORT`, the same with `nbds:`, `tcp://HOST:PORT`, `vfio-user:PATH`,
/// `vhost-user:PATH` or `ublk:N`.
pub(super) fn parse_listen(text: &str) -> Result<TransportAddress, String> {
    if let Some(place) = text.strip_prefix("ublk:") {
        return parse_ublk_listen_options(place).map(TransportAddress::Ublk).ok_or_else(|| {
            format!("`{text}` is no disk, expected ublk:, ublk:0 or ublk:0?queues=2&depth=128")
        });
    }
    if let Some(path) = text.strip_prefix("vfio-user:") {
        return match path {
            "" => Err(format!("`{text}` names no socket, expected vfio-user:/path/of/a/socket")),
            path => Ok(TransportAddress::VfioUser(path.into())),
        };
    }
    if let Some(path) = text.strip_prefix("vhost-user:") {
        return match path {
            "" => Err(format!("`{text}` names no socket, expected vhost-user:/path/of/a/socket")),
            path => Ok(TransportAddress::VhostUser(path.into())),
        };
    }
    if let Some(place) = text.strip_prefix("nbds:") {
        let address = tenmil_serve::nbd::parse_listen_address(&format!("nbd:{place}"));
        return address.map(TransportAddress::NbdOverTls).map_err(|_| {
            format!(
                "`{text}` is no address, expected nbds:/path/of/a/socket or nbds://127.0.0.1:10809"
            )
        });
    }
    let Some(place) = text.strip_prefix("tcp://") else {
        return tenmil_serve::nbd::parse_listen_address(text).map(TransportAddress::Nbd).map_err(
            |why| {
                let others = format!(
                    "tcp://127.0.0.1:{PORT}, vfio-user:/path/of/a/socket, \
                 vhost-user:/path/of/a/socket or ublk:"
                );
                if text.starts_with("nbd:") { why } else { format!("{why}, {others}") }
            },
        );
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
        return Ok(TransportAddress::NvmeTcp(address));
    }
    let named = if place.contains(':') { place.to_owned() } else { format!("{place}:{PORT}") };
    let found = named.to_socket_addrs();
    let mut found =
        found.map_err(|error| format!("`{text}`: look up {place}: {error}, {expected}"))?;
    let found = found.next().ok_or_else(|| format!("`{text}`: {place} has no address"))?;
    Ok(TransportAddress::NvmeTcp(found))
}

/// Parses `[N][?queues=N&depth=N&replace=yes&zero-copy=off]`.
fn parse_ublk_listen_options(text: &str) -> Option<UblkListenOptions> {
    let (number, pairs) = match text.split_once('?') {
        Some((number, pairs)) => (number, Some(pairs)),
        None => (text, None),
    };
    let mut place = UblkListenOptions::default();
    if !number.is_empty() {
        // The kernel reserves the largest number for "pick one".
        place.number = Some(number.parse().ok().filter(|number| *number < u32::MAX)?);
    }
    let some = |value: &str| value.parse().ok().filter(|count| *count > 0);
    for pair in pairs.iter().flat_map(|pairs| pairs.split('&')) {
        match pair.split_once('=')? {
            ("queues", value) => place.queues = Some(some(value)?),
            ("depth", value) => place.depth = Some(some(value)?),
            ("replace", "yes") => place.replaces = true,
            ("replace", "no") => place.replaces = false,
            ("zero-copy", "on") => place.copies = false,
            ("zero-copy", "off") => place.copies = true,
            _ => return None,
        }
    }
    Some(place)
}

#[cfg(test)]
mod tests {
    use super::{TransportAddress, UblkListenOptions, parse_listen};

    #[test]
    fn ublk_number_may_be_omitted() {
        let disk = |text: &str| match parse_listen(text) {
            Ok(TransportAddress::Ublk(place)) => place,
            other => panic!("{text}: {other:?}"),
        };
        assert_eq!(disk("ublk:"), UblkListenOptions::default());
        assert_eq!(
            disk("ublk:7"),
            UblkListenOptions { number: Some(7), ..UblkListenOptions::default() }
        );
        let (number, queues, depth) = (Some(0), Some(2), Some(64));
        let whole = UblkListenOptions { number, queues, depth, replaces: true, copies: true };
        assert_eq!(disk("ublk:0?queues=2&depth=64&replace=yes&zero-copy=off"), whole);
        assert!(!disk("ublk:0?zero-copy=on").copies);
        let any = UblkListenOptions { queues: Some(3), ..UblkListenOptions::default() };
        assert_eq!(disk("ublk:?queues=3"), any);
        for text in [
            "ublk:x",
            "ublk:-1",
            "ublk:4294967295",
            "ublk:1?",
            "ublk:1?queues=0",
            "ublk:1?queues=70000",
            "ublk:1?depth=",
            "ublk:1?width=1",
            "ublk:1?replace=perhaps",
            "ublk:1?zero-copy=no",
        ] {
            let refused = parse_listen(text).unwrap_err();
            assert!(refused.contains(&format!("`{text}`")), "{text}: {refused}");
            assert!(refused.contains("expected ublk:"), "{text}: {refused}");
        }
    }

    #[test]
    fn scheme_selects_the_protocol() {
        let tcp = |text: &str| Ok(TransportAddress::NvmeTcp(text.parse().unwrap()));
        assert_eq!(parse_listen("tcp://127.0.0.1:4421"), tcp("127.0.0.1:4421"));
        assert_eq!(parse_listen("tcp://127.0.0.1/"), tcp("127.0.0.1:4420"));
        assert_eq!(parse_listen("tcp://[::1]"), tcp("[::1]:4420"));
        assert_eq!(parse_listen("tcp://[::]:0"), tcp("[::]:0"));
        assert!(matches!(parse_listen("nbd:/run/x"), Ok(TransportAddress::Nbd(_))));
        assert!(matches!(parse_listen("nbds:/run/x"), Ok(TransportAddress::NbdOverTls(_))));
        assert!(matches!(parse_listen("nbds://[::1]"), Ok(TransportAddress::NbdOverTls(_))));
        assert_eq!(
            parse_listen("vfio-user:/run/x"),
            Ok(TransportAddress::VfioUser("/run/x".into()))
        );
        assert_eq!(
            parse_listen("vhost-user:/run/x"),
            Ok(TransportAddress::VhostUser("/run/x".into()))
        );
        for text in [
            "",
            "nbds:",
            "vfio-user:",
            "vhost-user:",
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
