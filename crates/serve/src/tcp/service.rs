//! Service: exported subsystems, their visibility, and the memory of all connections.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tenmil_base::{Error, Instant, Span, Stream};
use tenmil_dma::RegionTable;
use tenmil_nvme_controller::BouncePool;
use tenmil_nvme_controller::controller::NamespaceConfig;
use tenmil_nvme_tcp::{ControllerConfig, SuccessPolicy, Timeouts};
use tenmil_wire::fabrics::{CNTLID_DYNAMIC, CNTLID_MAX};
use tenmil_wire::layout::Ascii;
use tenmil_wire::log::discovery::{
    ASQSZ_MIN, AddressFamily, DiscoveryEntry, DiscoveryHeader, SecureChannel, SubsystemType,
    TransportType,
};
use tenmil_wire::nqn;

use super::admission::{Admission, AdmissionLimits};
use super::connection::{ConnectionParts, TargetConnection};
use super::connection_handle::ConnectionHandle;
use super::connection_table::{ConnectionEntry, ConnectionSample};
use super::event::{TargetEvent, Unread};
use super::injected_bugs::InjectedBugs;
use super::memory::{BufferCache, BufferPool};
use super::subsystem_export::{SubsystemExport, SubsystemExportConfig, SubsystemExportUpdate};

/// Subsystems exported over NVMe/TCP, independent of what carries the bytes.
///
/// ```text
///   let mut connection = service.accept(stream, port, now)?;
///   connection.turn(now);                                     // all work that is possible now
///   connection.is_over();                                     // it has ended
/// ```
///
/// A handle, cheap to clone.
#[derive(Clone)]
pub struct Service {
    shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub(super) limits: Limits,
    budget: BufferPool,
    pub(super) buffers: BouncePool,
    state: Mutex<ServiceState>,
    new_events: Mutex<Unread>,
    /// Connections by id.
    roster: Mutex<BTreeMap<u64, ConnectionEntry>>,
    connections: AtomicU64,
    connected: AtomicU64,
    given_up: AtomicU64,
    is_closing: AtomicBool,
    admission: Arc<Admission>,
}

struct ServiceState {
    offers: BTreeMap<String, Arc<SubsystemExport>>,
    ports: BTreeMap<u16, Port>,
    generation: u64,
    /// Addresses of other discovery services, reported as referrals.
    referrals: Vec<SocketAddr>,
    /// Discovery connections to wake on a change.
    discoverers: Vec<Weak<ConnectionHandle>>,
    /// Controller identifier of the last discovery controller.
    discovery_cntlid: u16,
    discovery: DiscoveryName,
}

/// Limits of connections and controllers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Memory for the data of all connections together, in bytes.
    pub memory_bytes: u64,
    /// Largest number of connections.
    pub connections_max: usize,
    /// Entries of the longest queue: 2 to 4096.
    pub queue_entries: u16,
    /// Largest transfer of a command (MDTS) in bytes: a power of two, at least 8192.
    pub transfer_bytes_max: u32,
    /// Largest in-capsule data of an I/O command in bytes: a multiple of 16, at most 8192.
    pub in_capsule_bytes: u32,
    /// I/O queues of a controller.
    pub io_queues_max: u16,
    /// Time after its end within which an association is drained (CQT).
    pub quiesce: Span,
    /// Time that a host has to send requested data, or to receive responses.
    pub time_limit: Span,
    /// Whether header and data digests are offered.
    pub digests: bool,
    /// When a read completes without a response capsule (SUCCESS flag).
    pub success: SuccessPolicy,
    /// Connection limits by origin; the default depends on the number of connections:
    /// [`AdmissionLimits::of`].
    pub admission: Option<AdmissionLimits>,
    #[doc(hidden)]
    pub injected_bugs: InjectedBugs,
}

/// Port of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// Address that discovery reports; `None` if the port is not reported. An unspecified address
    /// (`0.0.0.0`, `::`) is replaced by the local address that the host connected to.
    pub address: Option<SocketAddr>,
}

/// Identity of the discovery service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveryName {
    /// Its unique NQN, valid beside the well-known discovery NQN.
    pub nqn: String,
    /// Its serial number, at most 20 characters.
    pub serial: String,
}

/// Number of bounce buffers of all queues together, for the few commands that need one, and their
/// size.
const BUFFERS: u32 = 4;
const BUFFER_BYTES: u32 = 64 << 10;

impl Default for Limits {
    fn default() -> Self {
        Self {
            memory_bytes: 256 << 20,
            connections_max: 1100,
            // A host keeps one entry of its ring free, so this allows 128 outstanding commands.
            queue_entries: 129,
            transfer_bytes_max: 1 << 20,
            in_capsule_bytes: 8192,
            io_queues_max: 64,
            quiesce: Span::from_secs(1),
            time_limit: Span::from_secs(30),
            digests: true,
            success: SuccessPolicy::WithoutFlowControl,
            admission: None,
            injected_bugs: InjectedBugs::default(),
        }
    }
}

impl Service {
    /// Creates a service without subsystems. Its memory is a region of `regions`.
    ///
    /// # Errors
    ///
    /// If the memory cannot be allocated or a limit is invalid.
    pub fn new(regions: &RegionTable, limits: Limits) -> Result<Self, Error> {
        limits.check()?;
        let Limits { memory_bytes, transfer_bytes_max, connections_max, .. } = limits;
        let budget = BufferPool::new(regions, memory_bytes, transfer_bytes_max, connections_max)?;
        let bounce = regions
            .allocate((BUFFERS * BUFFER_BYTES) as usize)
            .map_err(|why| format!("bounce buffers: {why}"))
            .map_err(Error::environment)?;
        let whole = bounce.segment();
        let cut = |index: u32| whole.slice(index * BUFFER_BYTES, BUFFER_BYTES);
        let segments = (0..BUFFERS).filter_map(cut).collect();
        // Dropped with the service, after all queues are gone.
        let memory = Arc::new(BounceRegion { regions: regions.clone(), _region: bounce });
        let state = ServiceState {
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
            buffers: BouncePool::new(memory, segments),
            state: Mutex::new(state),
            new_events: Mutex::default(),
            roster: Mutex::default(),
            connections: AtomicU64::new(0),
            connected: AtomicU64::new(0),
            given_up: AtomicU64::new(0),
            is_closing: AtomicBool::new(false),
            admission: Admission::new(limits.admission(), connections_max),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Exports a subsystem.
    ///
    /// # Errors
    ///
    /// If its NQN is invalid or already exported.
    pub fn add_subsystem(&self, plan: SubsystemExportConfig) -> Result<(), Error> {
        nqn::check(&plan.nqn)
            .map_err(|why| format!("offer {}: {why}", plan.nqn))
            .map_err(Error::environment)?;
        let mut state = self.state();
        if state.offers.contains_key(&plan.nqn) {
            return Err(Error::environment(format!(
                "offer {}: it is offered already, expected one of a name",
                plan.nqn
            )));
        }
        let offer = SubsystemExport::new(plan);
        state.offers.insert(offer.nqn().to_owned(), offer);
        changed(state);
        Ok(())
    }

    /// Adds a port with this number.
    pub fn open_port(&self, number: u16, port: Port) {
        let mut state = self.state();
        state.ports.insert(number, port);
        changed(state);
    }

    /// Stops reporting a port in discovery. Its connections stay.
    pub fn close_port(&self, number: u16) {
        let mut state = self.state();
        state.ports.remove(&number);
        changed(state);
    }

    /// Updates an export. Associations end whose host is no longer allowed, or whose port no longer
    /// shows the subsystem; other hosts are notified of what concerns them. Returns false if no
    /// subsystem has this NQN.
    pub fn change(&self, nqn: &str, change: SubsystemExportUpdate) -> bool {
        let Some(offer) = self.state().offers.get(nqn).cloned() else { return false };
        if offer.change(change) {
            changed(self.state());
        }
        true
    }

    /// Adds a namespace to an exported subsystem and notifies the hosts that can see it. A masked
    /// namespace needs an explicit NSID.
    ///
    /// # Errors
    ///
    /// If no subsystem has this NQN, or it cannot have such a namespace.
    pub fn add_namespace(&self, nqn: &str, config: NamespaceConfig) -> Result<u32, Error> {
        let offer = self.state().offers.get(nqn).cloned();
        let offer = offer
            .ok_or_else(|| format!("add namespace: {nqn} is not offered"))
            .map_err(Error::environment)?;
        offer.add_namespace(config)
    }

    /// Gives the discovery service an NQN of its own, which distinguishes it from others; the
    /// default is the well-known NQN alone.
    ///
    /// # Errors
    ///
    /// If the NQN is invalid.
    pub fn name_discovery(&self, name: DiscoveryName) -> Result<(), Error> {
        nqn::check(&name.nqn)
            .map_err(|why| format!("discovery {}: {why}", name.nqn))
            .map_err(Error::environment)?;
        let mut state = self.state();
        state.discovery = name;
        changed(state);
        Ok(())
    }

    pub(super) fn discovery_name(&self) -> DiscoveryName {
        self.state().discovery.clone()
    }

    /// Whether `nqn` names the discovery service.
    pub(super) fn is_discovery(&self, nqn: &str) -> bool {
        nqn == nqn::DISCOVERY || nqn == self.state().discovery.nqn
    }

    /// Replaces the discovery referrals.
    pub fn set_referrals(&self, others: Vec<SocketAddr>) {
        let mut state = self.state();
        state.referrals = others;
        changed(state);
    }

    /// Stops exporting a subsystem: its associations end, and new ones are rejected. Returns false
    /// if no subsystem has this NQN.
    pub fn remove_subsystem(&self, nqn: &str) -> bool {
        let mut state = self.state();
        let Some(offer) = state.offers.remove(nqn) else { return false };
        changed(state);
        offer.remove();
        true
    }

    /// Ends the connections that belong to no subsystem: to discovery, or to a host that has not sent its
    /// Connect. Those of a subsystem end when it is [removed](Self::remove_subsystem).
    pub fn close(&self) {
        self.shared.is_closing.store(true, Ordering::Release);
        self.roster().values().for_each(|known| known.handle.ring());
    }

    /// Whether [`close`](Self::close) was called. Each connection is woken after that.
    #[inline]
    pub(super) fn is_closing(&self) -> bool {
        self.shared.is_closing.load(Ordering::Acquire)
    }

    /// Accepts a connection on a port. The caller polls it, as a poller or with
    /// [`TargetConnection::turn`].
    ///
    /// # Errors
    ///
    /// If a connection limit is reached or its memory cannot be allocated.
    pub fn accept(
        &self,
        stream: Box<dyn Stream>,
        port: u16,
        now: Instant,
    ) -> Result<TargetConnection, Error> {
        let shared = &self.shared;
        let peer = stream.peer();
        if self.is_closing() {
            return Err(Error::environment(format!(
                "connection of {peer}: the server is shutting down"
            )));
        }
        let admitted = Admission::admit(&shared.admission, &peer);
        let admitted = admitted
            .map_err(|why| format!("connection of {peer}: {why}"))
            .map_err(Error::environment)?;
        let handle = ConnectionHandle::new();
        let waker = Arc::clone(&handle);
        let peer = stream.peer();
        let quota =
            BufferCache::new(&shared.budget, address_of(&peer), Arc::new(move || waker.ring()));
        let quota =
            quota.ok_or("all memory for connections is in use").map_err(Error::environment)?;
        shared.connected.fetch_add(1, Ordering::Relaxed);
        let connection = shared.connections.fetch_add(1, Ordering::Relaxed);
        self.emit(TargetEvent::Connected { connection, peer: peer.clone() });
        let (seat_shown, held) = (Arc::clone(&handle), quota.held());
        let known = ConnectionEntry { handle: seat_shown, peer: peer.clone(), port, held };
        self.roster().insert(connection, known);
        let service = self.clone();
        Ok(TargetConnection::new(ConnectionParts {
            service,
            stream,
            handle,
            quota,
            connection,
            peer,
            port,
            admitted,
            now,
        }))
    }

    /// Next event, if any.
    #[must_use]
    pub fn next_event(&self) -> Option<TargetEvent> {
        self.unread_events().next()
    }

    /// Number of connections.
    #[must_use]
    pub fn connected(&self) -> u64 {
        self.shared.connected.load(Ordering::Relaxed)
    }

    /// Number of commands whose connection was dropped before their medium had answered.
    #[must_use]
    pub fn given_up(&self) -> u64 {
        self.shared.given_up.load(Ordering::Relaxed)
    }

    /// Counts commands that were given up, and reports them.
    pub(super) fn give_up(&self, peer: &str, commands: usize) {
        self.shared.given_up.fetch_add(commands as u64, Ordering::Relaxed);
        self.emit(TargetEvent::Trouble(format!(
            "{peer}: {commands} commands are given up: their medium has not answered, expected it to"
        )));
    }

    /// Number of connections rejected by a limit in total, per address or per host.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.shared.admission.refused()
    }

    /// Whether any subsystem lists its hosts.
    pub(super) fn names_hosts(&self) -> bool {
        self.state().offers.values().any(|offer| offer.names_hosts())
    }

    /// Snapshots of all connections, in the order of their creation.
    #[must_use]
    pub fn connections(&self) -> Vec<ConnectionSample> {
        self.roster().iter().map(|(id, known)| known.sample(*id)).collect()
    }

    /// Number of associations.
    #[must_use]
    pub fn associations(&self) -> usize {
        self.state().offers.values().map(|offer| offer.associations().len()).sum()
    }

    /// Buffer memory of the connections.
    #[must_use]
    pub fn budget(&self) -> &BufferPool {
        &self.shared.budget
    }

    pub(super) fn limits(&self) -> &Limits {
        &self.shared.limits
    }

    pub(super) fn buffers(&self) -> &BouncePool {
        &self.shared.buffers
    }

    /// Subsystem with this NQN, if it is visible at this port.
    pub(super) fn find(&self, nqn: &str, port: u16) -> Option<Arc<SubsystemExport>> {
        self.state().offers.get(nqn).filter(|offer| offer.is_at(port)).cloned()
    }

    /// Generation counter of the discovery log page.
    pub(super) fn generation(&self) -> u64 {
        self.state().generation
    }

    /// Builds the discovery log page for a host that connected to `port` at the local address
    /// `here`. Returns it with its generation (Base 2.1 §5.1.12.3.1).
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
                if offer.is_at(number) && offer.allows_host(host) {
                    let entry = entry(offer.nqn(), SubsystemType::Nvm, number, address);
                    entries.push(entry.with(|entry| entry.cntlid(offer.advertised_cntlid())));
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

    /// Allocates an identifier for a discovery controller, whose connection `handle` is woken on
    /// changes.
    pub(super) fn discover(&self, handle: &Arc<ConnectionHandle>) -> u16 {
        let mut state = self.state();
        state.discoverers.retain(|handle| handle.strong_count() > 0);
        state.discoverers.push(Arc::downgrade(handle));
        state.discovery_cntlid = state.discovery_cntlid % CNTLID_MAX + 1;
        state.discovery_cntlid
    }

    /// Unregisters a connection.
    pub(super) fn left(&self, connection: u64) {
        self.roster().remove(&connection);
        self.shared.connected.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn emit(&self, new_events: TargetEvent) {
        self.unread_events().push(new_events);
    }

    fn state(&self) -> MutexGuard<'_, ServiceState> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn roster(&self) -> MutexGuard<'_, BTreeMap<u64, ConnectionEntry>> {
        self.shared.roster.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unread_events(&self) -> MutexGuard<'_, Unread> {
        self.shared.new_events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Address of a peer without its port, or the whole string if it has none.
fn address_of(peer: &str) -> &str {
    peer.rsplit_once(':').map_or(peer, |(address, _)| address)
}

/// Increments the generation and wakes the discovery connections.
fn changed(mut state: MutexGuard<'_, ServiceState>) {
    state.generation += 1;
    let handles: Vec<Arc<ConnectionHandle>> =
        state.discoverers.iter().filter_map(Weak::upgrade).collect();
    drop(state);
    handles.iter().for_each(|handle| handle.ring());
}

impl Port {
    /// Address to report to a host that connected to `here`; `None` if such a host cannot reach it.
    fn reached_by(&self, here: Option<SocketAddr>) -> Option<SocketAddr> {
        let address = self.address?;
        match address.ip() {
            ip if !ip.is_unspecified() => Some(address),
            // A listener on `::` also accepts IPv4.
            ip => here
                .filter(|here| ip.is_ipv6() || here.is_ipv4())
                .map(|here| SocketAddr::new(here.ip(), address.port())),
        }
    }
}

/// Builds a discovery log page entry.
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

    fn check(&self) -> Result<(), Error> {
        let refuse = |what: &str, found: u64, expected: &str| {
            Err(Error::usage(format!("limits: {what} is {found}, expected {expected}")))
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

    /// Configuration of the protocol engine of a connection.
    pub(super) fn end(&self) -> ControllerConfig {
        ControllerConfig {
            depth: self.queue_entries,
            in_capsule_bytes: self.in_capsule_bytes,
            transfer_bytes_max: self.transfer_bytes_max,
            header_digest: self.digests,
            data_digest: self.digests,
            h2c_bytes_max: self.transfer_bytes_max,
            success: self.success,
            timeouts: Timeouts::default(),
            ..ControllerConfig::default()
        }
    }
}

/// Bounce buffers and the region that holds them.
struct BounceRegion {
    regions: RegionTable,
    _region: tenmil_dma::Region,
}

impl tenmil_base::Memory for BounceRegion {
    fn load(
        &self,
        segment: tenmil_base::Segment,
        into: &mut [u8],
    ) -> Result<(), tenmil_base::InvalidSegment> {
        self.regions.load(segment, into)
    }

    fn store(
        &self,
        segment: tenmil_base::Segment,
        from: &[u8],
    ) -> Result<(), tenmil_base::InvalidSegment> {
        self.regions.store(segment, from)
    }

    fn fill(
        &self,
        segment: tenmil_base::Segment,
        byte: u8,
    ) -> Result<(), tenmil_base::InvalidSegment> {
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
