//! Peer addresses: networks of an address filter, and the key under which the per-address
//! connection limit counts.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use tenmil_base::Error;

/// IP network, `192.0.2.0/24` or `2001:db8::/32`; an address alone is a network of one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PeerNetwork {
    /// First address; the bits behind the prefix are zero.
    address: IpAddr,
    prefix_bits: u8,
}

impl PeerNetwork {
    /// Whether an address belongs to the network. An IPv4 address mapped into IPv6 is an IPv4 address.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(network), IpAddr::V4(address)) => {
                let differing = u32::from(network) ^ u32::from(address);
                differing.leading_zeros() >= self.prefix_bits.into()
            }
            (IpAddr::V6(network), IpAddr::V6(address)) => {
                let differing = u128::from(network) ^ u128::from(address);
                differing.leading_zeros() >= self.prefix_bits.into()
            }
            _ => false,
        }
    }

    /// Bits of an address of the same family.
    const fn address_bits(address: IpAddr) -> u8 {
        if address.is_ipv4() { 32 } else { 128 }
    }

    /// Whether the bits behind the prefix are zero.
    fn is_first_address(&self) -> bool {
        let trailing_zeros = match self.address {
            IpAddr::V4(address) => u32::from(address).trailing_zeros(),
            IpAddr::V6(address) => u128::from(address).trailing_zeros(),
        };
        trailing_zeros + u32::from(self.prefix_bits) >= Self::address_bits(self.address).into()
    }
}

impl FromStr for PeerNetwork {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let refuse = |expected: &str| Error::usage(format!("network '{text}': {expected}"));
        let (address, prefix) = text.split_once('/').map_or((text, None), |(a, p)| (a, Some(p)));
        let address: IpAddr = address.parse().map_err(|_| {
            refuse("expected an IP address with a prefix length, as 192.0.2.0/24 or 2001:db8::/32")
        })?;
        let bits_max = Self::address_bits(address);
        let prefix_bits = match prefix {
            None => bits_max,
            Some(prefix) => {
                let bits = prefix.parse().ok().filter(|bits| *bits <= bits_max);
                let is_number = prefix.bytes().all(|byte| byte.is_ascii_digit());
                bits.filter(|_| is_number).ok_or_else(|| {
                    refuse(&format!("expected a prefix length of 0 to {bits_max}"))
                })?
            }
        };
        let network = Self { address, prefix_bits };
        if !network.is_first_address() {
            return Err(refuse(&format!(
                "the address has bits behind the prefix, expected zeros in all but the first \
                 {prefix_bits}"
            )));
        }
        if address.to_canonical() != address {
            return Err(refuse("expected the IPv4 network itself, not mapped into IPv6"));
        }
        Ok(network)
    }
}

impl fmt::Display for PeerNetwork {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.address, self.prefix_bits)
    }
}

/// Whether a filter admits a peer: any if it is empty, else one whose address is in a network.
pub(crate) fn is_peer_admitted(filter: &[PeerNetwork], peer: &str) -> bool {
    filter.is_empty()
        || address_of_peer(peer)
            .is_some_and(|address| filter.iter().any(|network| network.contains(address)))
}

/// IP address in the description of a peer; `None` for a Unix socket.
fn address_of_peer(peer: &str) -> Option<IpAddr> {
    peer.parse().ok().map(|peer: SocketAddr| peer.ip())
}

/// Returns the key under which connections of `peer` are counted; `None` for a Unix socket.
pub(crate) fn connection_limit_key_of_peer(peer: &str) -> Option<IpAddr> {
    address_of_peer(peer).map(connection_limit_key)
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

#[cfg(test)]
mod tests {
    use super::{PeerNetwork, is_peer_admitted};

    fn network(text: &str) -> PeerNetwork {
        text.parse().unwrap()
    }

    #[test]
    fn network_contains_exactly_the_addresses_with_its_prefix() {
        for (text, inside, outside) in [
            ("192.0.2.0/24", "192.0.2.255", "192.0.3.0"),
            ("192.0.2.128/25", "192.0.2.128", "192.0.2.127"),
            ("10.0.0.1", "10.0.0.1", "10.0.0.2"),
            ("10.0.0.1/32", "::ffff:10.0.0.1", "::ffff:10.0.0.3"),
            ("0.0.0.0/0", "255.1.2.3", "::1"),
            ("2001:db8::/32", "2001:db8:ffff::1", "2001:db9::"),
            ("::/0", "2001:db8::", "192.0.2.1"),
            ("fe80::1", "fe80::1", "fe80::2"),
        ] {
            assert!(network(text).contains(inside.parse().unwrap()), "{inside} in {text}");
            assert!(!network(text).contains(outside.parse().unwrap()), "{outside} in {text}");
        }
        assert_eq!(network("10.0.0.1").to_string(), "10.0.0.1/32");
        assert_eq!(network("2001:db8::/32").to_string(), "2001:db8::/32");
    }

    #[test]
    fn invalid_network_is_refused_with_what_was_expected() {
        for (text, expected) in [
            ("example.org", "expected an IP address"),
            ("192.0.2.0/33", "0 to 32"),
            ("192.0.2.0/", "0 to 32"),
            ("192.0.2.0/+8", "0 to 32"),
            ("2001:db8::/129", "0 to 128"),
            ("192.0.2.1/24", "bits behind the prefix"),
            ("2001:db8::1/64", "bits behind the prefix"),
            ("::ffff:192.0.2.1", "not mapped"),
        ] {
            let error = text.parse::<PeerNetwork>().unwrap_err().to_string();
            assert!(error.contains(text) && error.contains(expected), "{error}");
        }
    }

    #[test]
    fn empty_filter_admits_any_peer_and_a_filter_only_its_networks() {
        let filter = [network("192.0.2.0/24"), network("::1")];
        assert!(is_peer_admitted(&[], "198.51.100.1:5"));
        assert!(is_peer_admitted(&filter, "192.0.2.7:5"));
        assert!(is_peer_admitted(&filter, "[::ffff:192.0.2.7]:5"));
        assert!(is_peer_admitted(&filter, "[::1]:5"));
        assert!(!is_peer_admitted(&filter, "198.51.100.1:5"));
        assert!(is_peer_admitted(&[], "pipe"));
        assert!(!is_peer_admitted(&filter, "pipe"), "a peer without an address is in no network");
    }
}
