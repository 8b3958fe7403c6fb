//! What is served: subsystems, to whom they are shown, and the memory for all of it.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use base::{Instant, Span, Stream};
use ctrl::Buffers;
use ctrl::controller::NamespaceConfig;
use dma::Regions;
use tcp::{ControllerConfig, Patience, SuccessFlag};
use wire::fabrics::{CNTLID_DYNAMIC, CNTLID_MAX};
use wire::layout::Ascii;
use wire::log::discovery::{
    ASQSZ_MIN, AddressFamily, DiscoveryEntry, DiscoveryHeader, SecureChannel, SubsystemType,
    TransportType,
};
use wire::nqn;

use super::admission::{Admission, AdmissionLimits};
use super::guest::{Guest, GuestParts};
use super::injected_bugs::InjectedBugs;
use super::io::ring_bytes;
use super::memory::{Budget, Purse};
use super::news::{News, Unread};
use super::offer::{Offer, OfferChange, OfferPlan};
use super::roster::{ConnectionSample, Known};
use super::seat::Seat;

/// Subsystems that are served over NVMe/TCP, by whatever carries the bytes.
///
/// ```text
///   let mut guest = service.accept(stream, port, now)?;     // a connection
///   guest.turn(now);                                        // everything that can be done just now
///   guest.is_over();                                        // it has ended
/// ```
///
/// A handle, cheap to clone.
#[derive(Clone)]
pub struct Service {
    shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub(super) limits: Limits,
    budget: Budget,
    pub(super) buffers: Buffers,
    state: Mutex<State>,
    news: Mutex<Unread>,
    /// Who is connected, by number.
    roster: Mutex<BTreeMap<u64, Known>>,
    connections: AtomicU64,
    connected: AtomicU64,
    admission: Arc<Admission>,
}

struct State {
    offers: BTreeMap<String, Arc<Offer>>,
    ports: BTreeMap<u16, Port>,
    generation: u64,
    /// Other discovery services that hosts are told of.
    referrals: Vec<SocketAddr>,
    /// Connections that want to know of changes.
    discoverers: Vec<Weak<Seat>>,
    /// The number of the last discovery controller.
    discovery_cntlid: u16,
    discovery: DiscoveryName,
}

/// What connections and controllers may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Memory for data and rings, of all connections together.
    pub memory_bytes: u64,
    /// Connections at a time.
    pub connections_max: usize,
    /// Entries of the longest queue: 2 to 65 535.
    pub queue_entries: u16,
    /// The most data of a command (MDTS): a power of two, at least 8192.
    pub transfer_bytes_max: u32,
    /// The most data in the capsule of an I/O command: a multiple of 16, at most 8192.
    pub in_capsule_bytes: u32,
    /// I/O queues of a controller.
    pub io_queues_max: u16,
    /// How long after its end an association is drained (CQT).
    pub quiesce: Span,
    /// How long a host may leave unsent what it was asked for, or untaken what it asked for.
    pub patience: Span,
    /// Whether headers and data may have digests.
    pub digests: bool,
    /// When a read ends without a response.
    pub success: SuccessFlag,
    /// How many connections may be whose; nothing leaves that to their number:
    /// [`AdmissionLimits::of`].
    pub admission: Option<AdmissionLimits>,
    #[doc(hidden)]
    pub injected_bugs: InjectedBugs,
}

/// Where hosts come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// As discovery tells it; none if nobody can be told. In place of an address that stands for all
    /// of them (`0.0.0.0`, `::`) a host is told the one by which it has come.
    pub address: Option<SocketAddr>,
}

/// What the discovery service says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveryName {
    /// Its name, under which it is found beside the one that all of them have.
    pub nqn: String,
    /// Its serial number, of at most 20 characters.
    pub serial: String,
}

/// Bounce buffers of all queues together, for the few commands that need one, and bytes in each.
const BUFFERS: u32 = 4;
const BUFFER_BYTES: u32 = 64 << 10;

impl Default for Limits {
    fn default() -> Self {
        Self {
            memory_bytes: 256 << 20,
            connections_max: 1100,
            // So that a host whose ring keeps an entry free has 128 commands under way.
            queue_entries: 129,
            transfer_bytes_max: 1 << 20,
            in_capsule_bytes: 8192,
            io_queues_max: 64,
            quiesce: Span::from_secs(1),
            patience: Span::from_secs(30),
            digests: true,
            success: SuccessFlag::WithoutFlowControl,
            admission: None,
            injected_bugs: InjectedBugs::default(),
        }
    }
}

impl Service {
    /// A service that offers nothing yet. Its memory is a region of `regions`.
    ///
    /// # Errors
    ///
    /// If there cannot be so much memory, or a limit makes no sense.
    pub fn new(regions: &Regions, limits: Limits) -> Result<Self, String> {
        limits.check()?;
        let Limits { memory_bytes, transfer_bytes_max, connections_max, .. } = limits;
        let rings = ring_bytes(limits.queue_entries);
        let budget =
            Budget::new(regions, memory_bytes, transfer_bytes_max, connections_max, rings)?;
        let bounce = regions
            .allocate((BUFFERS * BUFFER_BYTES) as usize)
            .map_err(|why| format!("bounce buffers: {why}"))?;
        let whole = bounce.segment();
        let cut = |index: u32| whole.slice(index * BUFFER_BYTES, BUFFER_BYTES);
        let segments = (0..BUFFERS).filter_map(cut).collect();
        // It goes with the service, whose queues are gone by then.
        let memory = Arc::new(Bounce { regions: regions.clone(), _region: bounce });
        let state = State {
            offers: BTreeMap::new(),
            ports: BTreeMap::new(),
            generation: 0,
            referrals: Vec::new(),
            discoverers: Vec::new(),
            discovery_cntlid: 0,
            discovery: DiscoveryName { nqn: nqn::DISCOVERY.to_owned(), serial: "1".to_owned() },
        };
        let shared = Shared {
            limits,
            budget,
            buffers: Buffers::new(memory, segments),
            state: Mutex::new(state),
            news: Mutex::default(),
            roster: Mutex::default(),
            connections: AtomicU64::new(0),
            connected: AtomicU64::new(0),
            admission: Admission::new(limits.admission(), connections_max),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Offers a subsystem.
    ///
    /// # Errors
    ///
    /// If its name is none, or one of that name is offered.
    pub fn offer(&self, plan: OfferPlan) -> Result<(), String> {
        nqn::check(&plan.nqn).map_err(|why| format!("offer {}: {why}", plan.nqn))?;
        let mut state = self.state();
        if state.offers.contains_key(&plan.nqn) {
            return Err(format!(
                "offer {}: it is offered already, expected one of a name",
                plan.nqn
            ));
        }
        let offer = Offer::new(plan);
        state.offers.insert(offer.nqn().to_owned(), offer);
        changed(state);
        Ok(())
    }

    /// Lets hosts in at a port of this number.
    pub fn open_port(&self, number: u16, port: Port) {
        let mut state = self.state();
        state.ports.insert(number, port);
        changed(state);
    }

    /// Tells nobody of a port any more. Who has come by it stays.
    pub fn close_port(&self, number: u16) {
        let mut state = self.state();
        state.ports.remove(&number);
        changed(state);
    }

    /// Changes an offer: associations of hosts that may not use it any more, or that have come by a port
    /// that does not show it any more, end; others are told what concerns them. False if there is none
    /// of this name.
    pub fn change(&self, nqn: &str, change: OfferChange) -> bool {
        let Some(offer) = self.state().offers.get(nqn).cloned() else { return false };
        if offer.change(change) {
            changed(self.state());
        }
        true
    }

    /// Adds a namespace to a subsystem that is offered; hosts that may see it are told. One that is
    /// masked has a number of its own.
    ///
    /// # Errors
    ///
    /// If no subsystem of this name is offered, or it cannot have such a namespace.
    pub fn add_namespace(&self, nqn: &str, config: NamespaceConfig) -> Result<u32, String> {
        let offer = self.state().offers.get(nqn).cloned();
        let offer = offer.ok_or_else(|| format!("add namespace: {nqn} is not offered"))?;
        offer.add_namespace(config)
    }

    /// Gives the discovery service a name of its own, by which hosts know it from others; without one it
    /// has the name of all.
    ///
    /// # Errors
    ///
    /// If the name is none.
    pub fn name_discovery(&self, name: DiscoveryName) -> Result<(), String> {
        nqn::check(&name.nqn).map_err(|why| format!("discovery {}: {why}", name.nqn))?;
        let mut state = self.state();
        state.discovery = name;
        changed(state);
        Ok(())
    }

    pub(super) fn discovery_name(&self) -> DiscoveryName {
        self.state().discovery.clone()
    }

    /// Whether it is the discovery service that a host asks for.
    pub(super) fn is_discovery(&self, nqn: &str) -> bool {
        nqn == nqn::DISCOVERY || nqn == self.state().discovery.nqn
    }

    /// Tells hosts of other discovery services, in place of those that they were told of before.
    pub fn refer_to(&self, others: Vec<SocketAddr>) {
        let mut state = self.state();
        state.referrals = others;
        changed(state);
    }

    /// Takes an offer back: its associations end, and no new ones begin. False if there is none of
    /// this name.
    pub fn withdraw(&self, nqn: &str) -> bool {
        let mut state = self.state();
        let Some(offer) = state.offers.remove(nqn) else { return false };
        changed(state);
        offer.withdraw();
        true
    }

    /// A connection has been made at a port. Whoever has it turns it, as a poller or by
    /// [`Guest::turn`].
    ///
    /// # Errors
    ///
    /// If there are too many connections, or there is no memory for another.
    pub fn accept(
        &self,
        stream: Box<dyn Stream>,
        port: u16,
        now: Instant,
    ) -> Result<Guest, String> {
        let shared = &self.shared;
        let peer = stream.peer();
        let admitted = Admission::admit(&shared.admission, &peer);
        let admitted = admitted.map_err(|why| format!("connection of {peer}: {why}"))?;
        let seat = Seat::new();
        let bell = Arc::clone(&seat);
        let peer = stream.peer();
        let purse = Purse::new(&shared.budget, address_of(&peer), Arc::new(move || bell.ring()));
        let purse = purse.ok_or("all memory for connections is in use")?;
        shared.connected.fetch_add(1, Ordering::Relaxed);
        let connection = shared.connections.fetch_add(1, Ordering::Relaxed);
        self.tell(News::Connected { connection, peer: peer.clone() });
        let (seat_shown, held) = (Arc::clone(&seat), purse.held());
        let known = Known { seat: seat_shown, peer: peer.clone(), port, held };
        self.roster().insert(connection, known);
        let service = self.clone();
        Ok(Guest::new(GuestParts {
            service,
            stream,
            seat,
            purse,
            connection,
            peer,
            port,
            admitted,
            now,
        }))
    }

    /// The next thing that has happened, if something has.
    #[must_use]
    pub fn next_news(&self) -> Option<News> {
        self.news().next()
    }

    /// How many are connected.
    #[must_use]
    pub fn connected(&self) -> u64 {
        self.shared.connected.load(Ordering::Relaxed)
    }

    /// How many connections were refused for their number, or for that of their address or host.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.shared.admission.refused()
    }

    /// Whether any subsystem names the hosts that may use it.
    pub(super) fn names_hosts(&self) -> bool {
        self.state().offers.values().any(|offer| offer.names_hosts())
    }

    /// Each of them, in the order in which they came.
    #[must_use]
    pub fn connections(&self) -> Vec<ConnectionSample> {
        self.roster().iter().map(|(id, known)| known.sample(*id)).collect()
    }

    /// How many associations there are.
    #[must_use]
    pub fn associations(&self) -> usize {
        self.state().offers.values().map(|offer| offer.associations().len()).sum()
    }

    /// The memory of connections.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.shared.budget
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.shared.limits
    }

    pub(super) fn buffers(&self) -> &Buffers {
        &self.shared.buffers
    }

    /// The subsystem of this name, if it is shown at this port.
    pub(super) fn find(&self, nqn: &str, port: u16) -> Option<Arc<Offer>> {
        self.state().offers.get(nqn).filter(|offer| offer.is_at(port)).cloned()
    }

    /// Counts what discovery tells differently than before.
    pub(super) fn generation(&self) -> u64 {
        self.state().generation
    }

    /// The discovery log page as a host is shown it that has come by `port` and has reached the address
    /// `here`, and its generation (Base 2.1 §5.1.12.3.1).
    pub(super) fn discovery_page(
        &self,
        host: &str,
        (port, here): (u16, Option<SocketAddr>),
    ) -> (u64, Vec<u8>) {
        let state = self.state();
        let mut entries = Vec::new();
        for (&number, at) in &state.ports {
            let Some(address) = at.reached_by(here) else { continue };
            if number == port {
                let name = &state.discovery.nqn;
                entries.push(entry(name, SubsystemType::Discovery, number, address));
            }
            for offer in state.offers.values() {
                if offer.is_at(number) && offer.admits(host) {
                    let entry = entry(offer.nqn(), SubsystemType::Nvm, number, address);
                    entries.push(entry.with(|entry| entry.cntlid(offer.cntlid_told())));
                }
            }
        }
        let referral = |address| entry(nqn::DISCOVERY, SubsystemType::Referral, 0, address);
        entries.extend(state.referrals.iter().copied().map(referral));
        let header = DiscoveryHeader::zeroed()
            .with(|header| header.genctr(state.generation).numrec(entries.len() as u64));
        let mut page = header.as_bytes().to_vec();
        entries.iter().for_each(|entry| page.extend(entry.as_bytes()));
        (state.generation, page)
    }

    /// A number for a discovery controller, and `seat` is rung when there is a change.
    pub(super) fn discover(&self, seat: &Arc<Seat>) -> u16 {
        let mut state = self.state();
        state.discoverers.retain(|seat| seat.strong_count() > 0);
        state.discoverers.push(Arc::downgrade(seat));
        state.discovery_cntlid = state.discovery_cntlid % CNTLID_MAX + 1;
        state.discovery_cntlid
    }

    /// Somebody has gone.
    pub(super) fn left(&self, connection: u64) {
        self.roster().remove(&connection);
        self.shared.connected.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn tell(&self, news: News) {
        self.news().push(news);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn roster(&self) -> MutexGuard<'_, BTreeMap<u64, Known>> {
        self.shared.roster.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn news(&self) -> MutexGuard<'_, Unread> {
        self.shared.news.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The address of a peer without its port; all of it if there is none.
fn address_of(peer: &str) -> &str {
    peer.rsplit_once(':').map_or(peer, |(address, _)| address)
}

/// Something has changed that discovery tells of.
fn changed(mut state: MutexGuard<'_, State>) {
    state.generation += 1;
    let seats: Vec<Arc<Seat>> = state.discoverers.iter().filter_map(Weak::upgrade).collect();
    drop(state);
    seats.iter().for_each(|seat| seat.ring());
}

impl Port {
    /// Its address for a host that has reached `here`; none if no such host can reach it.
    fn reached_by(&self, here: Option<SocketAddr>) -> Option<SocketAddr> {
        let address = self.address?;
        match address.ip() {
            ip if !ip.is_unspecified() => Some(address),
            // `::` takes IPv4 as well.
            ip => here
                .filter(|here| ip.is_ipv6() || here.is_ipv4())
                .map(|here| SocketAddr::new(here.ip(), address.port())),
        }
    }
}

/// One way to a subsystem.
fn entry(name: &str, kind: SubsystemType, port: u16, address: SocketAddr) -> DiscoveryEntry {
    let family = if address.is_ipv6() { AddressFamily::Ipv6 } else { AddressFamily::Ipv4 };
    DiscoveryEntry::zeroed().with(|entry| {
        entry
            .trtype(TransportType::Tcp)
            .adrfam(family)
            .subtype(kind)
            .secure_channel(SecureChannel::NotRequired)
            .disable_sq_flow_control(true)
            .portid(port)
            .cntlid(CNTLID_DYNAMIC)
            .asqsz(ASQSZ_MIN)
            .persistent(kind != SubsystemType::Nvm)
            .trsvcid(Ascii::new(&address.port().to_string()))
            .subnqn(Ascii::nul_padded(name))
            .traddr(Ascii::new(&address.ip().to_string()))
    })
}

impl Limits {
    pub(super) fn admission(&self) -> AdmissionLimits {
        self.admission.unwrap_or(AdmissionLimits::of(self.connections_max))
    }

    fn check(&self) -> Result<(), String> {
        let refuse = |what: &str, found: u64, expected: &str| {
            Err(format!("limits: {what} is {found}, expected {expected}"))
        };
        if !self.transfer_bytes_max.is_power_of_two()
            || !(8192..=1 << 24).contains(&self.transfer_bytes_max)
        {
            let found = self.transfer_bytes_max.into();
            return refuse("transfer_bytes_max", found, "a power of two from 8192 to 16 MiB");
        }
        if self.in_capsule_bytes > 8192 || !self.in_capsule_bytes.is_multiple_of(16) {
            let found = self.in_capsule_bytes.into();
            return refuse("in_capsule_bytes", found, "a multiple of 16 up to 8192");
        }
        if !(2..=4096).contains(&self.queue_entries) {
            return refuse("queue_entries", self.queue_entries.into(), "2 to 4096");
        }
        Ok(())
    }

    /// What the end of a connection is made with.
    pub(super) fn end(&self) -> ControllerConfig {
        ControllerConfig {
            depth: self.queue_entries,
            in_capsule_bytes: self.in_capsule_bytes,
            transfer_bytes_max: self.transfer_bytes_max,
            header_digest: self.digests,
            data_digest: self.digests,
            h2c_bytes_max: self.transfer_bytes_max,
            success: self.success,
            patience: Patience::default(),
            ..ControllerConfig::default()
        }
    }
}

/// Bounce buffers and what keeps them.
struct Bounce {
    regions: Regions,
    _region: dma::Region,
}

impl base::Memory for Bounce {
    fn load(&self, segment: base::Segment, into: &mut [u8]) -> Result<(), base::NoSuchMemory> {
        self.regions.load(segment, into)
    }

    fn store(&self, segment: base::Segment, from: &[u8]) -> Result<(), base::NoSuchMemory> {
        self.regions.store(segment, from)
    }

    fn fill(&self, segment: base::Segment, byte: u8) -> Result<(), base::NoSuchMemory> {
        self.regions.fill(segment, byte)
    }
}

impl fmt::Debug for Service {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Service")
            .field("limits", &self.shared.limits)
            .field("connected", &self.connected())
            .finish_non_exhaustive()
    }
}
