//! Addresses of peers, as their connections are counted.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// The address of a peer as it is counted, if it has one.
pub(crate) fn network_of_peer(peer: &str) -> Option<IpAddr> {
    peer.parse().ok().map(|peer: SocketAddr| network_of(peer.ip()))
}

/// What is counted as one address: one that IPv4 has, and of IPv6 what a site hands out to one machine.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) if !address.is_loopback() => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        other => other,
    }
}
