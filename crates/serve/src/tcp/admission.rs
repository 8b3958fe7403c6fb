//! Admission control: connection limits per address, per host, and for all hosts that no subsystem
//! lists, so that no client can exclude the others.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::Span;

use crate::peer_network::connection_limit_key_of_peer;

/// Connection limits by origin. All connections also count towards
/// [`connections_max`](super::ServiceLimits::connections_max).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmissionLimits {
    /// Connections of one host NQN.
    pub per_host_max: usize,
    /// Connections of one address (for IPv6: one /64) that belong to hosts which no subsystem
    /// lists.
    pub per_address_max: usize,
    /// Connections over all loopback addresses that belong to hosts which no subsystem lists.
    pub loopback_max: usize,
    /// Connections of one address to the discovery service.
    pub discovery_per_address_max: usize,
    /// Connections of all addresses to the discovery service.
    pub discovery_max: usize,
    /// Connections of one address that have not completed Connect. When such connections of all
    /// addresses occupy half of the free slots, further ones have only [`CONNECT_TIMEOUT_CROWDED`] to connect.
    pub unconnected_per_address_max: usize,
    /// Connections reserved for hosts that a subsystem lists, if any subsystem lists hosts. An
    /// address may exceed its own limit by this number until its Connect names the host.
    pub reserved: usize,
    /// Registrants of one address in a namespace, for hosts that no subsystem lists.
    pub registrants_per_address_max: usize,
    /// Longest keep-alive timeout that a host may set with Connect or Set Features. An association
    /// without a keep-alive timeout ends after this time of silence, unless a subsystem lists its
    /// host; an idle discovery connection without one ends after 120 seconds.
    pub keep_alive_max: Span,
}

/// Limit that a rejected connection exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AdmissionError {
    Full { limit: usize },
    Address { limit: usize },
    Unconnected { limit: usize },
    Loopback { limit: usize },
    Host { limit: usize },
    HostRights { limit: usize },
    Discovery { limit: usize },
    Reserved { reserved: usize },
}

/// Category under which a connection is counted.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ConnectionCategory {
    /// Connect has not been received yet.
    Unconnected,
    /// Queue of a host that no subsystem lists.
    Unlisted { host: String },
    /// Connection to the discovery service.
    Discovery,
    /// Queue of a host that a subsystem lists.
    Listed { host: String },
}

impl ConnectionCategory {
    /// Host of the connection, once it is known.
    fn host(&self) -> Option<&str> {
        match self {
            Self::Unlisted { host } | Self::Listed { host } => Some(host),
            Self::Unconnected | Self::Discovery => None,
        }
    }
}

/// Connection counts and their limits.
#[derive(Debug)]
pub(super) struct Admission {
    limits: AdmissionLimits,
    connections_max: usize,
    counts: Mutex<ConnectionCounts>,
}

#[derive(Debug, Default)]
struct ConnectionCounts {
    all: usize,
    listed: usize,
    discovery: usize,
    hosts: BTreeMap<String, usize>,
    addresses: BTreeMap<IpAddr, usize>,
    unconnected: usize,
    unconnected_addresses: BTreeMap<IpAddr, usize>,
    loopback: usize,
    discovery_addresses: BTreeMap<IpAddr, usize>,
    rejected: u64,
}

/// Admitted connection. It is counted until this is dropped.
#[derive(Debug)]
pub(super) struct AdmittedConnection {
    admission: Arc<Admission>,
    address: Option<IpAddr>,
    category: ConnectionCategory,
    /// Time that the connection has for Connect.
    connect_timeout: Span,
}

/// Time that a connection has for Connect.
const CONNECT_TIMEOUT: Span = Span::from_secs(10);
/// Time for Connect if, at accept, connections without Connect occupy half of the free slots.
const CONNECT_TIMEOUT_CROWDED: Span = Span::from_secs(1);

impl AdmissionLimits {
    /// Default limits for a number of connections: half of them for a host or an address, three
    /// quarters for loopback, a quarter for discovery, an eighth reserved for listed hosts; each
    /// with a lower bound. Half of the registrants of a namespace.
    #[must_use]
    pub const fn default_for(connections_max: usize) -> Self {
        const fn fraction(whole: usize, by: usize, minimum: usize) -> usize {
            if whole / by > minimum { whole / by } else { minimum }
        }
        Self {
            per_host_max: fraction(connections_max, 2, 130),
            per_address_max: fraction(connections_max, 2, 130),
            loopback_max: fraction(connections_max - connections_max / 4, 1, 130),
            discovery_per_address_max: fraction(connections_max, 16, 8),
            discovery_max: fraction(connections_max, 4, 8),
            unconnected_per_address_max: fraction(connections_max, 4, 130),
            reserved: connections_max / 8,
            registrants_per_address_max: 64,
            keep_alive_max: Span::from_secs(600),
        }
    }
}

impl Admission {
    pub(super) fn new(limits: AdmissionLimits, connections_max: usize) -> Arc<Self> {
        Arc::new(Self { limits, connections_max, counts: Mutex::default() })
    }

    /// Admits a connection whose category is not known yet. `peer` is its address, if it has one.
    pub(super) fn admit(
        this: &Arc<Self>,
        peer: &str,
    ) -> Result<AdmittedConnection, AdmissionError> {
        let address = connection_limit_key_of_peer(peer);
        let mut counts = this.lock_counts();
        let limit = this.connections_max;
        let rejected = if counts.all >= limit {
            Some(AdmissionError::Full { limit })
        } else {
            // The connection may belong to a listed host, so it may exceed the limit of its address
            // until Connect.
            this.check_address_limits(&counts, address, this.limits.reserved)
                .or_else(|| this.check_unconnected_limits(&counts, address))
        };
        if let Some(rejected) = rejected {
            counts.rejected += 1;
            return Err(rejected);
        }
        let category = ConnectionCategory::Unconnected;
        counts.add(&category, address);
        let connected = counts.all - counts.unconnected;
        let is_crowded = counts.unconnected > limit.saturating_sub(connected) / 2;
        drop(counts);
        let connect_timeout = if is_crowded { CONNECT_TIMEOUT_CROWDED } else { CONNECT_TIMEOUT };
        Ok(AdmittedConnection { admission: Arc::clone(this), address, category, connect_timeout })
    }

    /// Number of rejected connections.
    pub(super) fn rejected_connections(&self) -> u64 {
        self.lock_counts().rejected
    }

    /// Checks the limits of an address, each raised by `extra`.
    fn check_address_limits(
        &self,
        counts: &ConnectionCounts,
        address: Option<IpAddr>,
        extra: usize,
    ) -> Option<AdmissionError> {
        let AdmissionLimits { per_address_max, loopback_max, .. } = self.limits;
        let address = address?;
        let found = counts.addresses.get(&address).copied().unwrap_or(0);
        if found >= per_address_max.saturating_add(extra) {
            return Some(AdmissionError::Address { limit: per_address_max });
        }
        let is_exceeded = counts.loopback >= loopback_max.saturating_add(extra);
        (address.is_loopback() && is_exceeded)
            .then_some(AdmissionError::Loopback { limit: loopback_max })
    }

    fn check_unconnected_limits(
        &self,
        counts: &ConnectionCounts,
        address: Option<IpAddr>,
    ) -> Option<AdmissionError> {
        let limit = self.limits.unconnected_per_address_max;
        let found = address.and_then(|it| counts.unconnected_addresses.get(&it));
        (found.copied().unwrap_or(0) >= limit).then_some(AdmissionError::Unconnected { limit })
    }

    fn check_category_limits(
        &self,
        counts: &ConnectionCounts,
        category: &ConnectionCategory,
        address: Option<IpAddr>,
        lists_hosts: bool,
    ) -> Option<AdmissionError> {
        let AdmissionLimits { per_host_max, reserved, .. } = self.limits;
        let host = match category {
            ConnectionCategory::Unlisted { host } | ConnectionCategory::Listed { host } => {
                Some(host)
            }
            ConnectionCategory::Unconnected | ConnectionCategory::Discovery => None,
        };
        let host_connections = host.and_then(|host| counts.hosts.get(host)).copied().unwrap_or(0);
        if host_connections >= per_host_max {
            return Some(AdmissionError::Host { limit: per_host_max });
        }
        if matches!(category, ConnectionCategory::Listed { .. }) {
            return None;
        }
        if *category == ConnectionCategory::Discovery
            && let Some(rejected) = self.check_discovery_limits(counts, address)
        {
            return Some(rejected);
        }
        if let Some(rejected) = self.check_address_limits(counts, address, 0) {
            return Some(rejected);
        }
        let unreserved = self.connections_max.saturating_sub(reserved);
        let is_exceeded = lists_hosts && counts.all - counts.listed >= unreserved;
        is_exceeded.then_some(AdmissionError::Reserved { reserved })
    }

    fn check_discovery_limits(
        &self,
        counts: &ConnectionCounts,
        address: Option<IpAddr>,
    ) -> Option<AdmissionError> {
        let AdmissionLimits { discovery_max, discovery_per_address_max, .. } = self.limits;
        let address_connections = address.and_then(|it| counts.discovery_addresses.get(&it));
        if counts.discovery >= discovery_max {
            return Some(AdmissionError::Discovery { limit: discovery_max });
        }
        let is_exceeded = address_connections.copied().unwrap_or(0) >= discovery_per_address_max;
        is_exceeded.then_some(AdmissionError::Discovery { limit: discovery_per_address_max })
    }

    fn lock_counts(&self) -> MutexGuard<'_, ConnectionCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionCounts {
    fn add(&mut self, category: &ConnectionCategory, address: Option<IpAddr>) {
        self.all += 1;
        match category {
            ConnectionCategory::Listed { .. } => self.listed += 1,
            ConnectionCategory::Discovery => self.discovery += 1,
            ConnectionCategory::Unconnected => self.unconnected += 1,
            ConnectionCategory::Unlisted { .. } => {}
        }
        if let ConnectionCategory::Listed { host } | ConnectionCategory::Unlisted { host } =
            category
        {
            *self.hosts.entry(host.clone()).or_default() += 1;
        }
        if let Some(address) =
            address.filter(|_| !matches!(category, ConnectionCategory::Listed { .. }))
        {
            *self.addresses.entry(address).or_default() += 1;
            self.loopback += usize::from(address.is_loopback());
        }
        if let Some(address) = address.filter(|_| *category == ConnectionCategory::Discovery) {
            *self.discovery_addresses.entry(address).or_default() += 1;
        }
        if let Some(address) = address.filter(|_| *category == ConnectionCategory::Unconnected) {
            *self.unconnected_addresses.entry(address).or_default() += 1;
        }
    }

    fn remove(&mut self, category: &ConnectionCategory, address: Option<IpAddr>) {
        self.all -= 1;
        match category {
            ConnectionCategory::Listed { .. } => self.listed -= 1,
            ConnectionCategory::Discovery => self.discovery -= 1,
            ConnectionCategory::Unconnected => self.unconnected -= 1,
            ConnectionCategory::Unlisted { .. } => {}
        }
        if let ConnectionCategory::Listed { host } | ConnectionCategory::Unlisted { host } =
            category
        {
            decrement(&mut self.hosts, host);
        }
        if let Some(address) =
            address.filter(|_| !matches!(category, ConnectionCategory::Listed { .. }))
        {
            decrement(&mut self.addresses, &address);
            self.loopback -= usize::from(address.is_loopback());
        }
        if let Some(address) = address.filter(|_| *category == ConnectionCategory::Discovery) {
            decrement(&mut self.discovery_addresses, &address);
        }
        if let Some(address) = address.filter(|_| *category == ConnectionCategory::Unconnected) {
            decrement(&mut self.unconnected_addresses, &address);
        }
    }
}

/// Decrements a count and removes it at zero.
fn decrement<K: Ord>(counts: &mut BTreeMap<K, usize>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}

impl AdmittedConnection {
    /// Time that the connection has for Connect.
    pub(super) const fn fabrics_connect_timeout(&self) -> Span {
        self.connect_timeout
    }

    /// Whether connections without Connect occupied half of the free slots when it was accepted.
    pub(super) fn is_crowded(&self) -> bool {
        self.connect_timeout == CONNECT_TIMEOUT_CROWDED
    }

    /// Counts the connection as one to the discovery service.
    pub(super) fn count_as_discovery(&mut self, lists_hosts: bool) -> Result<(), AdmissionError> {
        self.set_category(ConnectionCategory::Discovery, lists_hosts, None)
    }

    /// Counts the connection as a queue of `host`, which a subsystem lists or not.
    pub(super) fn count_as_host_queue(
        &mut self,
        host: &str,
        (is_listed, connections_max): (bool, Option<usize>),
        lists_hosts: bool,
    ) -> Result<(), AdmissionError> {
        let host = host.to_owned();
        let category = match is_listed {
            true => ConnectionCategory::Listed { host },
            false => ConnectionCategory::Unlisted { host },
        };
        self.set_category(category, lists_hosts, connections_max)
    }

    fn set_category(
        &mut self,
        category: ConnectionCategory,
        lists_hosts: bool,
        connections_max: Option<usize>,
    ) -> Result<(), AdmissionError> {
        let mut counts = self.admission.lock_counts();
        // The connection must not count against its own new category.
        counts.remove(&self.category, self.address);
        let connections = category.host().and_then(|host| counts.hosts.get(host));
        let has_too_many = |limit: &usize| connections.copied().unwrap_or(0) >= *limit;
        let rejected = connections_max
            .filter(has_too_many)
            .map(|limit| AdmissionError::HostRights { limit })
            .or_else(|| {
                let address = self.address;
                self.admission.check_category_limits(&counts, &category, address, lists_hosts)
            });
        match &rejected {
            Some(_) => counts.rejected += 1,
            None => self.category = category,
        }
        counts.add(&self.category, self.address);
        drop(counts);
        rejected.map_or(Ok(()), Err)
    }
}

impl Drop for AdmittedConnection {
    fn drop(&mut self) {
        let mut counts = self.admission.lock_counts();
        counts.remove(&self.category, self.address);
    }
}

impl std::fmt::Display for AdmissionError {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Full { limit } => {
                write!(
                    out,
                    "{limit} are connected, expected fewer (`--max-connections` allows more)"
                )
            }
            Self::Address { limit } => write!(
                out,
                "its address has {limit} connections of hosts that no subsystem names, expected fewer; \
                 fix: name the host (--allowed-host), or allow more with --connections-per-address"
            ),
            Self::Unconnected { limit } => write!(
                out,
                "its address has {limit} connections that have not connected to a subsystem, expected \
                 fewer"
            ),
            Self::Loopback { limit } => write!(
                out,
                "this machine has {limit} connections of hosts that no subsystem names, expected fewer; \
                 fix: name the host (--allowed-host), or allow more with --max-connections"
            ),
            Self::HostRights { limit } => {
                write!(
                    out,
                    "its host has {limit} connections, expected fewer: its rights limit them"
                )
            }
            Self::Host { limit } => write!(
                out,
                "its host has {limit} connections, expected fewer; fix: allow more with \
                 --connections-per-host"
            ),
            Self::Discovery { limit } => write!(
                out,
                "there are {limit} connections to discovery, of its address or of all, expected fewer"
            ),
            Self::Reserved { reserved } => write!(
                out,
                "the last {reserved} connections are for hosts that a subsystem names, expected its \
                 name among them"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tenmil_base::Random;

    use super::{Admission, AdmissionError, AdmissionLimits, AdmittedConnection};

    fn test_admission(connections_max: usize) -> Arc<Admission> {
        Admission::new(AdmissionLimits::default_for(connections_max), connections_max)
    }

    fn admit_connections(
        admission: &Arc<Admission>,
        peer: &str,
        count: usize,
    ) -> Vec<AdmittedConnection> {
        (0..count).map(|_| Admission::admit(admission, peer).unwrap()).collect()
    }

    /// Admits a connection and assigns it to a listed or an unlisted host.
    fn admit_and_connect(
        admission: &Arc<Admission>,
        peer: &str,
        (host, is_listed): (&str, bool),
    ) -> Result<AdmittedConnection, AdmissionError> {
        let mut admitted = Admission::admit(admission, peer)?;
        admitted.count_as_host_queue(host, (is_listed, None), true).map(|()| admitted)
    }

    /// Admits connections of a peer, each with another host name, until one is rejected.
    fn admit_until_rejected(
        admission: &Arc<Admission>,
        peer: &str,
    ) -> (Vec<AdmittedConnection>, AdmissionError) {
        let mut held = Vec::new();
        loop {
            match admit_and_connect(admission, peer, (&format!("nqn.{}", held.len()), false)) {
                Ok(admitted) => held.push(admitted),
                Err(rejected) => return (held, rejected),
            }
        }
    }

    #[test]
    fn one_address_uses_at_most_half_under_any_hostnqns() {
        for peer in ["192.0.2.1:5000", "127.0.0.1:5000", "[::1]:5000"] {
            let admission = test_admission(1100);
            let (held, rejected) = admit_until_rejected(&admission, peer);
            assert_eq!(
                (held.len(), rejected),
                (550, AdmissionError::Address { limit: 550 }),
                "{peer}"
            );
            assert!(admit_and_connect(&admission, "192.0.2.2:1", ("nqn.other", false)).is_ok());
            // A listed host is admitted from the same address.
            assert!(admit_and_connect(&admission, peer, ("nqn.named", true)).is_ok(), "{peer}");
        }
    }

    #[test]
    fn ipv4_within_ipv6_is_the_same_address() {
        let admission = test_admission(1100);
        let (_held, _) = admit_until_rejected(&admission, "192.0.2.1:5000");
        let rejected =
            admit_and_connect(&admission, "[::ffff:192.0.2.1]:6000", ("nqn.other", false));
        assert_eq!(rejected.unwrap_err(), AdmissionError::Address { limit: 550 });
    }

    #[test]
    fn loopback_leaves_a_quarter_to_others() {
        let admission = test_admission(1100);
        let (_one, _) = admit_until_rejected(&admission, "127.0.0.1:5000");
        let (two, rejected) = admit_until_rejected(&admission, "127.7.7.7:5000");
        assert_eq!((two.len(), rejected), (275, AdmissionError::Loopback { limit: 825 }));
        assert!(admit_and_connect(&admission, "192.0.2.2:1", ("nqn.other", false)).is_ok());
        assert!(admit_and_connect(&admission, "[::1]:1", ("nqn.named", true)).is_ok());
    }

    #[test]
    fn unconnected_connections_are_limited_for_each_address() {
        let admission = test_admission(1100);
        let _held = admit_connections(&admission, "127.0.0.1:5000", 275);
        let rejected = Admission::admit(&admission, "127.0.0.1:5000").unwrap_err();
        assert_eq!(
            (rejected, admission.rejected_connections()),
            (AdmissionError::Unconnected { limit: 275 }, 1)
        );
        assert!(admit_and_connect(&admission, "127.0.0.2:1", ("nqn.other", false)).is_ok());
    }

    #[test]
    fn one_address_cannot_exhaust_discovery_connections() {
        let admission = test_admission(1100);
        let visit = |peer: &str| {
            let mut admitted = Admission::admit(&admission, peer).unwrap();
            admitted.count_as_discovery(true).map(|()| admitted)
        };
        let held: Vec<_> = (0..68).map(|_| visit("192.0.2.1:5000").unwrap()).collect();
        assert_eq!(visit("192.0.2.1:6000").unwrap_err(), AdmissionError::Discovery { limit: 68 });
        assert!(visit("192.0.2.2:5000").is_ok());
        drop(held);
        assert!(visit("192.0.2.1:6000").is_ok());
    }

    /// Otherwise a few addresses could occupy all places for ten seconds, repeatedly.
    #[test]
    fn half_of_the_unconnected_slots_are_free_after_a_second() {
        let admission = test_admission(1100);
        let mut held: Vec<_> = (0..300)
            .map(|n| {
                admit_and_connect(
                    &admission,
                    &format!("10.1.{}.{}:1", n / 250, n % 250),
                    (&format!("nqn.{n}"), true),
                )
            })
            .collect();
        let waits = |n: u32| {
            let admitted = Admission::admit(&admission, &format!("10.2.{}.{}:1", n / 250, n % 250));
            let admitted = admitted.unwrap();
            (admitted.fabrics_connect_timeout(), admitted)
        };
        let (long, short): (Vec<_>, Vec<_>) =
            (0..800).map(waits).partition(|(span, _)| *span == super::CONNECT_TIMEOUT);
        assert_eq!((long.len(), short.len()), (400, 400));
        assert!(short.iter().all(|(span, _)| *span == super::CONNECT_TIMEOUT_CROWDED));
        drop(short);
        held.push(admit_and_connect(&admission, "192.0.2.2:1", ("nqn.other", false)));
        assert!(held.iter().all(Result::is_ok));
    }

    #[test]
    fn ipv6_addresses_of_one_64_prefix_count_as_one() {
        let admission = test_admission(1100);
        let from = |host: u16| {
            admit_and_connect(
                &admission,
                &format!("[2001:db8::{host:x}]:1"),
                (&format!("nqn.{host}"), false),
            )
        };
        let held: Vec<AdmittedConnection> = (0..550).map(|host| from(host).unwrap()).collect();
        assert!(from(0xffff).is_err());
        assert!(admit_and_connect(&admission, "[2001:db8:0:1::1]:1", ("nqn.other", false)).is_ok());
        drop(held);
        assert!(from(0xffff).is_ok());
    }

    #[test]
    fn unlisted_hosts_cannot_use_the_reserve_of_listed_hosts() {
        let admission = test_admission(1100);
        // Regardless of the number of addresses.
        let mut strangers: Vec<AdmittedConnection> = (0..=1100 - 137)
            .map(|host| {
                let peer = format!("10.0.{}.{}:1", host / 250, host % 250);
                Admission::admit(&admission, &peer).unwrap()
            })
            .collect();
        let last = strangers.last_mut().unwrap();
        let rejected = last.count_as_host_queue("nqn.stranger", (false, None), true).unwrap_err();
        assert_eq!(rejected, AdmissionError::Reserved { reserved: 137 });
        assert!(last.count_as_discovery(true).is_err());
        assert!(
            last.count_as_host_queue("nqn.stranger", (false, None), false).is_ok(),
            "none is named"
        );
        let mut listed = Admission::admit(&admission, "10.9.9.9:1").unwrap();
        assert!(listed.count_as_host_queue("nqn.named", (true, None), true).is_ok());
    }

    /// Random admissions, assignments and releases: all counters return to zero.
    #[test]
    fn counts_are_zero_after_all_connections_are_dropped() {
        for seed in 0..50 {
            let (mut random, admission) = (Random::new(seed), test_admission(20));
            let mut held: Vec<AdmittedConnection> = Vec::new();
            for _ in 0..300 {
                let host = format!("nqn.host-{}", random.below(3));
                let peer = ["192.0.2.1:1", "127.0.0.1:1", "[::1]:1"]
                    [usize::try_from(random.below(3)).unwrap()];
                match random.below(4) {
                    0 => held.extend(Admission::admit(&admission, peer)),
                    1 if !held.is_empty() => {
                        let at = random.below(held.len() as u64);
                        held.swap_remove(usize::try_from(at).unwrap());
                    }
                    _ => {
                        let Some(one) = held.last_mut() else { continue };
                        let _ = match random.below(2) {
                            0 => one.count_as_discovery(true),
                            _ => one.count_as_host_queue(&host, (random.chance(1, 2), None), true),
                        };
                    }
                }
            }
            assert_eq!(admission.lock_counts().all, held.len());
            held.clear();
            let counts = admission.lock_counts();
            assert_eq!((counts.all, counts.listed, counts.discovery), (0, 0, 0), "seed {seed}");
            assert_eq!((counts.loopback, counts.unconnected), (0, 0), "seed {seed}");
            assert!(counts.unconnected_addresses.is_empty(), "seed {seed}");
            let maps = (&counts.hosts, &counts.addresses, &counts.discovery_addresses);
            assert!(maps.0.is_empty() && maps.1.is_empty() && maps.2.is_empty(), "{maps:?}");
        }
    }
}
