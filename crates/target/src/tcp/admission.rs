//! Admission control: how many connections one address, one host, and those whom no subsystem names may
//! have, so that none of them locks the others out.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::Span;

/// How many connections may be whose. All are counted within
/// [`connections_max`](super::Limits::connections_max).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmissionLimits {
    /// Connections of one host NQN.
    pub per_host_max: usize,
    /// Connections of one address beyond this machine (of IPv6, of one /64) that belong to no host which
    /// a subsystem names.
    pub per_address_max: usize,
    /// Connections to the discovery service, from one address.
    pub discovery_per_address_max: usize,
    /// Connections to the discovery service.
    pub discovery_max: usize,
    /// Connections that only hosts may have which a subsystem names, once one names any.
    pub reserved: usize,
    /// The longest keep-alive time-out that a host may ask for. Zero, none, is another matter: an idle
    /// discovery connection without one ends after 120 seconds.
    pub keep_alive_max: Span,
}

/// Why a connection is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotAdmitted {
    Full { most: usize },
    Address { most: usize },
    Host { most: usize },
    Discovery { most: usize },
    Reserved { reserved: usize },
}

/// What a connection is, as it is counted.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// It has not connected, or is a queue of a host that no subsystem names.
    Stranger { host: Option<String> },
    /// To the discovery service.
    Discovery,
    /// A queue of a host that a subsystem names.
    Named { host: String },
}

/// The counts.
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
    discovery_addresses: BTreeMap<IpAddr, usize>,
    refused: u64,
}

/// A connection that was admitted: it is counted for as long as this lives.
#[derive(Debug)]
pub(super) struct Admitted {
    admission: Arc<Admission>,
    address: Option<IpAddr>,
    kind: Kind,
}

impl AdmissionLimits {
    /// Those for so many connections: half of them for a host or an address, a quarter for discovery,
    /// an eighth kept for hosts that are named; but a few in any case.
    #[must_use]
    pub const fn of(connections_max: usize) -> Self {
        const fn part(whole: usize, by: usize, least: usize) -> usize {
            if whole / by > least { whole / by } else { least }
        }
        Self {
            per_host_max: part(connections_max, 2, 130),
            per_address_max: part(connections_max, 2, 130),
            discovery_per_address_max: part(connections_max, 16, 8),
            discovery_max: part(connections_max, 4, 8),
            reserved: connections_max / 8,
            keep_alive_max: Span::from_secs(600),
        }
    }
}

impl Admission {
    pub(super) fn new(limits: AdmissionLimits, connections_max: usize) -> Arc<Self> {
        Arc::new(Self { limits, connections_max, counts: Mutex::default() })
    }

    /// Admits a connection that has not said yet what it is; `peer` is its address, if it has one.
    pub(super) fn admit(this: &Arc<Self>, peer: &str) -> Result<Admitted, NotAdmitted> {
        let address = peer.parse().ok().map(|peer: SocketAddr| network_of(peer.ip()));
        let mut counts = this.counts();
        let most = this.connections_max;
        let refused = if counts.all >= most {
            Some(NotAdmitted::Full { most })
        } else {
            this.over_address(&counts, address)
        };
        if let Some(refused) = refused {
            counts.refused += 1;
            return Err(refused);
        }
        let kind = Kind::Stranger { host: None };
        counts.enter(&kind, address);
        drop(counts);
        Ok(Admitted { admission: Arc::clone(this), address, kind })
    }

    /// How many connections were refused.
    pub(super) fn refused(&self) -> u64 {
        self.counts().refused
    }

    fn over_address(&self, counts: &Counts, address: Option<IpAddr>) -> Option<NotAdmitted> {
        let most = self.limits.per_address_max;
        // Who is on this machine has other means.
        let address = address.filter(|address| !address.is_loopback())?;
        let found = counts.addresses.get(&address).copied().unwrap_or(0);
        (found >= most).then_some(NotAdmitted::Address { most })
    }

    fn check(
        &self,
        counts: &Counts,
        kind: &Kind,
        address: Option<IpAddr>,
        names_hosts: bool,
    ) -> Option<NotAdmitted> {
        let AdmissionLimits { per_host_max, reserved, .. } = self.limits;
        let AdmissionLimits { discovery_max, discovery_per_address_max, .. } = self.limits;
        let host = match kind {
            Kind::Stranger { host } => host.as_ref(),
            Kind::Named { host } => Some(host),
            Kind::Discovery => None,
        };
        let of_host = host.and_then(|host| counts.hosts.get(host)).copied().unwrap_or(0);
        if of_host >= per_host_max {
            return Some(NotAdmitted::Host { most: per_host_max });
        }
        if *kind == Kind::Discovery {
            let of_address = address.and_then(|it| counts.discovery_addresses.get(&it));
            let of_address = of_address.copied().unwrap_or(0);
            if counts.discovery >= discovery_max {
                return Some(NotAdmitted::Discovery { most: discovery_max });
            }
            if of_address >= discovery_per_address_max {
                return Some(NotAdmitted::Discovery { most: discovery_per_address_max });
            }
        }
        let is_named = matches!(kind, Kind::Named { .. });
        let left = self.connections_max.saturating_sub(reserved);
        // It is counted itself.
        let is_over = names_hosts && !is_named && counts.all - counts.named > left;
        is_over.then_some(NotAdmitted::Reserved { reserved })
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Counts {
    fn enter(&mut self, kind: &Kind, address: Option<IpAddr>) {
        self.all += 1;
        self.add(kind, address);
    }

    fn add(&mut self, kind: &Kind, address: Option<IpAddr>) {
        match kind {
            Kind::Named { .. } => self.named += 1,
            Kind::Discovery => self.discovery += 1,
            Kind::Stranger { .. } => {}
        }
        if let Kind::Named { host } | Kind::Stranger { host: Some(host) } = kind {
            *self.hosts.entry(host.clone()).or_default() += 1;
        }
        if let Some(address) = address.filter(|_| !matches!(kind, Kind::Named { .. })) {
            *self.addresses.entry(address).or_default() += 1;
        }
        if let Some(address) = address.filter(|_| *kind == Kind::Discovery) {
            *self.discovery_addresses.entry(address).or_default() += 1;
        }
    }

    fn remove(&mut self, kind: &Kind, address: Option<IpAddr>) {
        match kind {
            Kind::Named { .. } => self.named -= 1,
            Kind::Discovery => self.discovery -= 1,
            Kind::Stranger { .. } => {}
        }
        if let Kind::Named { host } | Kind::Stranger { host: Some(host) } = kind {
            take(&mut self.hosts, host);
        }
        if let Some(address) = address.filter(|_| !matches!(kind, Kind::Named { .. })) {
            take(&mut self.addresses, &address);
        }
        if let Some(address) = address.filter(|_| *kind == Kind::Discovery) {
            take(&mut self.discovery_addresses, &address);
        }
    }
}

/// One fewer; who has none is not kept.
fn take<K: Ord>(counts: &mut BTreeMap<K, usize>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
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

impl Admitted {
    /// It is to the discovery service.
    pub(super) fn discovers(&mut self, names_hosts: bool) -> Result<(), NotAdmitted> {
        self.become_one(Kind::Discovery, names_hosts)
    }

    /// It is a queue of this host, whom a subsystem names or none does.
    pub(super) fn belongs_to(
        &mut self,
        host: &str,
        is_named: bool,
        names_hosts: bool,
    ) -> Result<(), NotAdmitted> {
        let host = host.to_owned();
        let kind = match is_named {
            true => Kind::Named { host },
            false => Kind::Stranger { host: Some(host) },
        };
        self.become_one(kind, names_hosts)
    }

    fn become_one(&mut self, kind: Kind, names_hosts: bool) -> Result<(), NotAdmitted> {
        let mut counts = self.admission.counts();
        if let Some(refused) = self.admission.check(&counts, &kind, self.address, names_hosts) {
            counts.refused += 1;
            return Err(refused);
        }
        counts.remove(&self.kind, self.address);
        counts.add(&kind, self.address);
        drop(counts);
        self.kind = kind;
        Ok(())
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut counts = self.admission.counts();
        counts.all -= 1;
        counts.remove(&self.kind, self.address);
    }
}

impl std::fmt::Display for NotAdmitted {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Full { most } => {
                write!(out, "{most} are connected, expected fewer (`--connections` allows more)")
            }
            Self::Address { most } => write!(
                out,
                "its address has {most} connections of hosts that no subsystem names, expected fewer; \
                 fix: name the host (--host), or allow more with --connections"
            ),
            Self::Host { most } => write!(
                out,
                "its host has {most} connections, expected fewer; fix: allow more with --connections"
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

    use base::Random;

    use super::{Admission, AdmissionLimits, Admitted, NotAdmitted};

    fn admission(connections_max: usize) -> Arc<Admission> {
        Admission::new(AdmissionLimits::of(connections_max), connections_max)
    }

    fn peers(admission: &Arc<Admission>, peer: &str, count: usize) -> Vec<Admitted> {
        (0..count).map(|_| Admission::admit(admission, peer).unwrap()).collect()
    }

    #[test]
    fn one_address_does_not_take_all_and_this_machine_may() {
        let admission = admission(1100);
        let _held = peers(&admission, "192.0.2.1:5000", 550);
        let refused = Admission::admit(&admission, "192.0.2.1:6000").unwrap_err();
        assert_eq!(refused, NotAdmitted::Address { most: 550 });
        // IPv4 within IPv6 is the same address.
        assert!(Admission::admit(&admission, "[::ffff:192.0.2.1]:6000").is_err());
        let _others = peers(&admission, "127.0.0.1:5000", 550);
        let refused = Admission::admit(&admission, "127.0.0.1:5000").unwrap_err();
        assert_eq!((refused, admission.refused()), (NotAdmitted::Full { most: 1100 }, 3));
    }

    #[test]
    fn a_network_of_ipv6_counts_as_one_address() {
        let admission = admission(1100);
        let held: Vec<Admitted> = (0..550)
            .map(|host| Admission::admit(&admission, &format!("[2001:db8::{host:x}]:1")).unwrap())
            .collect();
        assert!(Admission::admit(&admission, "[2001:db8::ffff]:1").is_err());
        assert!(Admission::admit(&admission, "[2001:db8:0:1::1]:1").is_ok());
        drop(held);
        assert!(Admission::admit(&admission, "[2001:db8::ffff]:1").is_ok());
    }

    #[test]
    fn strangers_do_not_take_what_is_kept_for_named_hosts() {
        let admission = admission(1100);
        // However many addresses they have.
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

    /// Whatever comes, becomes what, and goes: in the end nothing is counted.
    #[test]
    fn every_count_returns() {
        for seed in 0..50 {
            let (mut random, admission) = (Random::new(seed), admission(20));
            let mut held: Vec<Admitted> = Vec::new();
            for _ in 0..300 {
                let host = format!("nqn.host-{}", random.below(3));
                let peer = format!("192.0.2.{}:1", random.below(3));
                match random.below(4) {
                    0 => held.extend(Admission::admit(&admission, &peer)),
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
            let maps = (&counts.hosts, &counts.addresses, &counts.discovery_addresses);
            assert!(maps.0.is_empty() && maps.1.is_empty() && maps.2.is_empty(), "{maps:?}");
        }
    }
}
