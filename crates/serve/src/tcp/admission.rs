//! Admission control: connection limits per address, per host, and for all hosts that no subsystem
//! lists, so that no client can exclude the others.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::Span;

use crate::address::network_of_peer;

/// Connection limits by origin. All connections also count towards
/// [`connections_max`](super::Limits::connections_max).
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
    /// addresses occupy half of the free slots, further ones have only [`SHORT`] to connect.
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
pub(super) enum NotAdmitted {
    Full { most: usize },
    Address { most: usize },
    Unconnected { most: usize },
    Loopback { most: usize },
    Host { most: usize },
    Discovery { most: usize },
    Reserved { reserved: usize },
}

/// Category under which a connection is counted.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// Connect has not been received yet.
    Unconnected,
    /// Queue of a host that no subsystem lists.
    Stranger { host: String },
    /// Connection to the discovery service.
    Discovery,
    /// Queue of a host that a subsystem lists.
    Named { host: String },
}

/// Connection counts and their limits.
#[derive(Debug)]
pub(super) struct Admission {
    limits: AdmissionLimits,
    connections_max: usize,
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    all: usize,
    named: usize,
    discovery: usize,
    hosts: BTreeMap<String, usize>,
    addresses: BTreeMap<IpAddr, usize>,
    unconnected: usize,
    unconnected_addresses: BTreeMap<IpAddr, usize>,
    loopback: usize,
    discovery_addresses: BTreeMap<IpAddr, usize>,
    refused: u64,
}

/// Admitted connection. It is counted until this is dropped.
#[derive(Debug)]
pub(super) struct Admitted {
    admission: Arc<Admission>,
    address: Option<IpAddr>,
    kind: Kind,
    /// Time that the connection has for Connect.
    connect_max: Span,
}

/// Time that a connection has for Connect.
const LONG: Span = Span::from_secs(10);
/// Time for Connect if, at accept, connections without Connect occupy half of the free slots.
const SHORT: Span = Span::from_secs(1);

impl AdmissionLimits {
    /// Default limits for a number of connections: half of them for a host or an address, three
    /// quarters for loopback, a quarter for discovery, an eighth reserved for listed hosts; each
    /// with a lower bound. Half of the registrants of a namespace.
    #[must_use]
    pub const fn of(connections_max: usize) -> Self {
        const fn part(whole: usize, by: usize, least: usize) -> usize {
            if whole / by > least { whole / by } else { least }
        }
        Self {
            per_host_max: part(connections_max, 2, 130),
            per_address_max: part(connections_max, 2, 130),
            loopback_max: part(connections_max - connections_max / 4, 1, 130),
            discovery_per_address_max: part(connections_max, 16, 8),
            discovery_max: part(connections_max, 4, 8),
            unconnected_per_address_max: part(connections_max, 4, 130),
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
    pub(super) fn admit(this: &Arc<Self>, peer: &str) -> Result<Admitted, NotAdmitted> {
        let address = network_of_peer(peer);
        let mut counts = this.counts();
        let most = this.connections_max;
        let refused = if counts.all >= most {
            Some(NotAdmitted::Full { most })
        } else {
            // The connection may belong to a listed host, so it may exceed the limit of its address
            // until Connect.
            this.over_address(&counts, address, this.limits.reserved)
                .or_else(|| this.over_unconnected(&counts, address))
        };
        if let Some(refused) = refused {
            counts.refused += 1;
            return Err(refused);
        }
        let kind = Kind::Unconnected;
        counts.add(&kind, address);
        let connected = counts.all - counts.unconnected;
        let is_crowded = counts.unconnected > most.saturating_sub(connected) / 2;
        drop(counts);
        let connect_max = if is_crowded { SHORT } else { LONG };
        Ok(Admitted { admission: Arc::clone(this), address, kind, connect_max })
    }

    /// Number of rejected connections.
    pub(super) fn refused(&self) -> u64 {
        self.counts().refused
    }

    /// Checks the limits of an address, each raised by `more`.
    fn over_address(
        &self,
        counts: &Counts,
        address: Option<IpAddr>,
        more: usize,
    ) -> Option<NotAdmitted> {
        let AdmissionLimits { per_address_max, loopback_max, .. } = self.limits;
        let address = address?;
        let found = counts.addresses.get(&address).copied().unwrap_or(0);
        if found >= per_address_max.saturating_add(more) {
            return Some(NotAdmitted::Address { most: per_address_max });
        }
        let is_over = counts.loopback >= loopback_max.saturating_add(more);
        (address.is_loopback() && is_over).then_some(NotAdmitted::Loopback { most: loopback_max })
    }

    fn over_unconnected(&self, counts: &Counts, address: Option<IpAddr>) -> Option<NotAdmitted> {
        let most = self.limits.unconnected_per_address_max;
        let found = address.and_then(|it| counts.unconnected_addresses.get(&it));
        (found.copied().unwrap_or(0) >= most).then_some(NotAdmitted::Unconnected { most })
    }

    fn check(
        &self,
        counts: &Counts,
        kind: &Kind,
        address: Option<IpAddr>,
        names_hosts: bool,
    ) -> Option<NotAdmitted> {
        let AdmissionLimits { per_host_max, reserved, .. } = self.limits;
        let host = match kind {
            Kind::Stranger { host } | Kind::Named { host } => Some(host),
            Kind::Unconnected | Kind::Discovery => None,
        };
        let of_host = host.and_then(|host| counts.hosts.get(host)).copied().unwrap_or(0);
        if of_host >= per_host_max {
            return Some(NotAdmitted::Host { most: per_host_max });
        }
        if matches!(kind, Kind::Named { .. }) {
            return None;
        }
        if *kind == Kind::Discovery
            && let Some(refused) = self.over_discovery(counts, address)
        {
            return Some(refused);
        }
        if let Some(refused) = self.over_address(counts, address, 0) {
            return Some(refused);
        }
        let left = self.connections_max.saturating_sub(reserved);
        let is_over = names_hosts && counts.all - counts.named >= left;
        is_over.then_some(NotAdmitted::Reserved { reserved })
    }

    fn over_discovery(&self, counts: &Counts, address: Option<IpAddr>) -> Option<NotAdmitted> {
        let AdmissionLimits { discovery_max, discovery_per_address_max, .. } = self.limits;
        let of_address = address.and_then(|it| counts.discovery_addresses.get(&it));
        if counts.discovery >= discovery_max {
            return Some(NotAdmitted::Discovery { most: discovery_max });
        }
        let is_over = of_address.copied().unwrap_or(0) >= discovery_per_address_max;
        is_over.then_some(NotAdmitted::Discovery { most: discovery_per_address_max })
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Counts {
    fn add(&mut self, kind: &Kind, address: Option<IpAddr>) {
        self.all += 1;
        match kind {
            Kind::Named { .. } => self.named += 1,
            Kind::Discovery => self.discovery += 1,
            Kind::Unconnected => self.unconnected += 1,
            Kind::Stranger { .. } => {}
        }
        if let Kind::Named { host } | Kind::Stranger { host } = kind {
            *self.hosts.entry(host.clone()).or_default() += 1;
        }
        if let Some(address) = address.filter(|_| !matches!(kind, Kind::Named { .. })) {
            *self.addresses.entry(address).or_default() += 1;
            self.loopback += usize::from(address.is_loopback());
        }
        if let Some(address) = address.filter(|_| *kind == Kind::Discovery) {
            *self.discovery_addresses.entry(address).or_default() += 1;
        }
        if let Some(address) = address.filter(|_| *kind == Kind::Unconnected) {
            *self.unconnected_addresses.entry(address).or_default() += 1;
        }
    }

    fn remove(&mut self, kind: &Kind, address: Option<IpAddr>) {
        self.all -= 1;
        match kind {
            Kind::Named { .. } => self.named -= 1,
            Kind::Discovery => self.discovery -= 1,
            Kind::Unconnected => self.unconnected -= 1,
            Kind::Stranger { .. } => {}
        }
        if let Kind::Named { host } | Kind::Stranger { host } = kind {
            take(&mut self.hosts, host);
        }
        if let Some(address) = address.filter(|_| !matches!(kind, Kind::Named { .. })) {
            take(&mut self.addresses, &address);
            self.loopback -= usize::from(address.is_loopback());
        }
        if let Some(address) = address.filter(|_| *kind == Kind::Discovery) {
            take(&mut self.discovery_addresses, &address);
        }
        if let Some(address) = address.filter(|_| *kind == Kind::Unconnected) {
            take(&mut self.unconnected_addresses, &address);
        }
    }
}

/// Decrements a count and removes it at zero.
fn take<K: Ord>(counts: &mut BTreeMap<K, usize>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}

impl Admitted {
    /// Time that the connection has for Connect.
    pub(super) const fn connect_max(&self) -> Span {
        self.connect_max
    }

    /// Counts the connection as one to the discovery service.
    pub(super) fn discovers(&mut self, names_hosts: bool) -> Result<(), NotAdmitted> {
        self.become_one(Kind::Discovery, names_hosts)
    }

    /// Counts the connection as a queue of `host`, which a subsystem lists or not.
    pub(super) fn belongs_to(
        &mut self,
        host: &str,
        is_named: bool,
        names_hosts: bool,
    ) -> Result<(), NotAdmitted> {
        let host = host.to_owned();
        let kind = match is_named {
            true => Kind::Named { host },
            false => Kind::Stranger { host },
        };
        self.become_one(kind, names_hosts)
    }

    fn become_one(&mut self, kind: Kind, names_hosts: bool) -> Result<(), NotAdmitted> {
        let mut counts = self.admission.counts();
        // The connection must not count against its own new category.
        counts.remove(&self.kind, self.address);
        let refused = self.admission.check(&counts, &kind, self.address, names_hosts);
        match &refused {
            Some(_) => counts.refused += 1,
            None => self.kind = kind,
        }
        counts.add(&self.kind, self.address);
        drop(counts);
        refused.map_or(Ok(()), Err)
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut counts = self.admission.counts();
        counts.remove(&self.kind, self.address);
    }
}

impl std::fmt::Display for NotAdmitted {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Full { most } => {
                write!(
                    out,
                    "{most} are connected, expected fewer (`--max-connections` allows more)"
                )
            }
            Self::Address { most } => write!(
                out,
                "its address has {most} connections of hosts that no subsystem names, expected fewer; \
                 fix: name the host (--allowed-host), or allow more with --connections-per-address"
            ),
            Self::Unconnected { most } => write!(
                out,
                "its address has {most} connections that have not connected to a subsystem, expected \
                 fewer"
            ),
            Self::Loopback { most } => write!(
                out,
                "this machine has {most} connections of hosts that no subsystem names, expected fewer; \
                 fix: name the host (--allowed-host), or allow more with --max-connections"
            ),
            Self::Host { most } => write!(
                out,
                "its host has {most} connections, expected fewer; fix: allow more with \
                 --connections-per-host"
            ),
            Self::Discovery { most } => write!(
                out,
                "there are {most} connections to discovery, of its address or of all, expected fewer"
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

    use super::{Admission, AdmissionLimits, Admitted, NotAdmitted};

    fn admission(connections_max: usize) -> Arc<Admission> {
        Admission::new(AdmissionLimits::of(connections_max), connections_max)
    }

    fn peers(admission: &Arc<Admission>, peer: &str, count: usize) -> Vec<Admitted> {
        (0..count).map(|_| Admission::admit(admission, peer).unwrap()).collect()
    }

    /// Admits a connection and assigns it to a listed or an unlisted host.
    fn connect(
        admission: &Arc<Admission>,
        peer: &str,
        (host, is_named): (&str, bool),
    ) -> Result<Admitted, NotAdmitted> {
        let mut admitted = Admission::admit(admission, peer)?;
        admitted.belongs_to(host, is_named, true).map(|()| admitted)
    }

    /// Admits connections of a peer, each with another host name, until one is rejected.
    fn flood(admission: &Arc<Admission>, peer: &str) -> (Vec<Admitted>, NotAdmitted) {
        let mut held = Vec::new();
        loop {
            match connect(admission, peer, (&format!("nqn.{}", held.len()), false)) {
                Ok(admitted) => held.push(admitted),
                Err(refused) => return (held, refused),
            }
        }
    }

    #[test]
    fn one_address_takes_half_under_whatever_names() {
        for peer in ["192.0.2.1:5000", "127.0.0.1:5000", "[::1]:5000"] {
            let admission = admission(1100);
            let (held, refused) = flood(&admission, peer);
            assert_eq!((held.len(), refused), (550, NotAdmitted::Address { most: 550 }), "{peer}");
            assert!(connect(&admission, "192.0.2.2:1", ("nqn.other", false)).is_ok());
            // A listed host is admitted from the same address.
            assert!(connect(&admission, peer, ("nqn.named", true)).is_ok(), "{peer}");
        }
    }

    #[test]
    fn ipv4_within_ipv6_is_the_same_address() {
        let admission = admission(1100);
        let (_held, _) = flood(&admission, "192.0.2.1:5000");
        let refused = connect(&admission, "[::ffff:192.0.2.1]:6000", ("nqn.other", false));
        assert_eq!(refused.unwrap_err(), NotAdmitted::Address { most: 550 });
    }

    #[test]
    fn this_machine_leaves_a_quarter_to_others_by_whichever_addresses_it_comes() {
        let admission = admission(1100);
        let (_one, _) = flood(&admission, "127.0.0.1:5000");
        let (two, refused) = flood(&admission, "127.7.7.7:5000");
        assert_eq!((two.len(), refused), (275, NotAdmitted::Loopback { most: 825 }));
        assert!(connect(&admission, "192.0.2.2:1", ("nqn.other", false)).is_ok());
        assert!(connect(&admission, "[::1]:1", ("nqn.named", true)).is_ok());
    }

    #[test]
    fn connections_that_do_not_connect_have_a_bound_for_each_address() {
        let admission = admission(1100);
        let _held = peers(&admission, "127.0.0.1:5000", 275);
        let refused = Admission::admit(&admission, "127.0.0.1:5000").unwrap_err();
        assert_eq!((refused, admission.refused()), (NotAdmitted::Unconnected { most: 275 }, 1));
        assert!(connect(&admission, "127.0.0.2:1", ("nqn.other", false)).is_ok());
    }

    #[test]
    fn one_address_leaves_connections_to_discovery_to_others() {
        let admission = admission(1100);
        let visit = |peer: &str| {
            let mut admitted = Admission::admit(&admission, peer).unwrap();
            admitted.discovers(true).map(|()| admitted)
        };
        let held: Vec<_> = (0..68).map(|_| visit("192.0.2.1:5000").unwrap()).collect();
        assert_eq!(visit("192.0.2.1:6000").unwrap_err(), NotAdmitted::Discovery { most: 68 });
        assert!(visit("192.0.2.2:5000").is_ok());
        drop(held);
        assert!(visit("192.0.2.1:6000").is_ok());
    }

    /// Otherwise a few addresses could occupy all places for ten seconds, repeatedly.
    #[test]
    fn half_of_the_free_places_are_free_again_after_a_second() {
        let admission = admission(1100);
        let mut held: Vec<_> = (0..300)
            .map(|n| {
                connect(
                    &admission,
                    &format!("10.1.{}.{}:1", n / 250, n % 250),
                    (&format!("nqn.{n}"), true),
                )
            })
            .collect();
        let waits = |n: u32| {
            let admitted = Admission::admit(&admission, &format!("10.2.{}.{}:1", n / 250, n % 250));
            let admitted = admitted.unwrap();
            (admitted.connect_max(), admitted)
        };
        let (long, short): (Vec<_>, Vec<_>) =
            (0..800).map(waits).partition(|(span, _)| *span == super::LONG);
        assert_eq!((long.len(), short.len()), (400, 400));
        assert!(short.iter().all(|(span, _)| *span == super::SHORT));
        drop(short);
        held.push(connect(&admission, "192.0.2.2:1", ("nqn.other", false)));
        assert!(held.iter().all(Result::is_ok));
    }

    #[test]
    fn a_network_of_ipv6_counts_as_one_address() {
        let admission = admission(1100);
        let from = |host: u16| {
            connect(&admission, &format!("[2001:db8::{host:x}]:1"), (&format!("nqn.{host}"), false))
        };
        let held: Vec<Admitted> = (0..550).map(|host| from(host).unwrap()).collect();
        assert!(from(0xffff).is_err());
        assert!(connect(&admission, "[2001:db8:0:1::1]:1", ("nqn.other", false)).is_ok());
        drop(held);
        assert!(from(0xffff).is_ok());
    }

    #[test]
    fn strangers_do_not_take_what_is_kept_for_named_hosts() {
        let admission = admission(1100);
        // Regardless of the number of addresses.
        let mut strangers: Vec<Admitted> = (0..=1100 - 137)
            .map(|host| {
                let peer = format!("10.0.{}.{}:1", host / 250, host % 250);
                Admission::admit(&admission, &peer).unwrap()
            })
            .collect();
        let last = strangers.last_mut().unwrap();
        let refused = last.belongs_to("nqn.stranger", false, true).unwrap_err();
        assert_eq!(refused, NotAdmitted::Reserved { reserved: 137 });
        assert!(last.discovers(true).is_err());
        assert!(last.belongs_to("nqn.stranger", false, false).is_ok(), "none is named");
        let mut named = Admission::admit(&admission, "10.9.9.9:1").unwrap();
        assert!(named.belongs_to("nqn.named", true, true).is_ok());
    }

    /// Random admissions, assignments and releases: all counters return to zero.
    #[test]
    fn every_count_returns() {
        for seed in 0..50 {
            let (mut random, admission) = (Random::new(seed), admission(20));
            let mut held: Vec<Admitted> = Vec::new();
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
                            0 => one.discovers(true),
                            _ => one.belongs_to(&host, random.chance(1, 2), true),
                        };
                    }
                }
            }
            assert_eq!(admission.counts().all, held.len());
            held.clear();
            let counts = admission.counts();
            assert_eq!((counts.all, counts.named, counts.discovery), (0, 0, 0), "seed {seed}");
            assert_eq!((counts.loopback, counts.unconnected), (0, 0), "seed {seed}");
            assert!(counts.unconnected_addresses.is_empty(), "seed {seed}");
            let maps = (&counts.hosts, &counts.addresses, &counts.discovery_addresses);
            assert!(maps.0.is_empty() && maps.1.is_empty() && maps.2.is_empty(), "{maps:?}");
        }
    }
}
