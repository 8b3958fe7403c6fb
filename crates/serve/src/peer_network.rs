//! Peer addresses as the per-address connection limit counts them.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// Returns the key under which connections of `peer` are counted; `None` for a Unix socket.
pub(crate) fn connection_limit_key_of_peer(peer: &str) -> Option<IpAddr> {
    peer.parse().ok().map(|peer: SocketAddr| connection_limit_key(peer.ip()))
}

/// Returns the counting key of an address: the whole IPv4 address, or the /64 prefix of an IPv6
/// address, which is what a site assigns to one machine.
fn connection_limit_key(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) if !address.is_loopback() => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        other => other,
    }
}
