//! Service: exported subsystems, their visibility, and the memory of all connections.

mod discovery_log;
mod limits;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tenmil_base::{BlockDevice, Error, Instant, Stream};
use tenmil_dma::RegionTable;
use tenmil_nvme_auth::{DhExecutor, TlsPsk};
use tenmil_nvme_controller::controller::NamespaceConfig;
use tenmil_nvme_controller::{BouncePool, IoStatsSample};
use tenmil_wire::fabrics::CNTLID_MAX;
use tenmil_wire::nqn;

use super::admission::Admission;
use super::audit::{ConnectionAudit, RefusalReason};
use super::authentication::AuthenticationContext;
use super::buffer_pool::{BufferCache, BufferPool};
use super::connection::{ConnectionParts, TargetConnection};
use super::connection_handle::ConnectionHandle;
use super::connection_table::{ConnectionEntry, ConnectionSample};
use super::event::{EventCounts, EventQueue, TargetEvent};
use super::fair_shares::FairShares;
use super::rate_limits::ExportLimits;
use super::refusal_limiter::RefusalLimiter;
use super::security::{GeneratedPsks, PortSecurity, PskIdentity, SecurityState, SubsystemSecurity};
use super::subsystem_export::{SubsystemExport, SubsystemExportConfig, SubsystemExportUpdate};
use crate::peer_network::{PeerNetwork, connection_limit_key_of_peer, is_peer_admitted};
use crate::slow_io::{SlowIoLog, SlowIoThresholds};

pub use self::limits::ServiceLimits;

/// Subsystems exported over NVMe/TCP, independent of what carries the bytes.
///
/// ```text
///   let mut connection = service.accept(stream, port, now)?;
///   connection.step(now);                                     // all work that is possible now
///   connection.is_over();                                     // it has ended
/// ```
///
/// A handle, cheap to clone.
#[derive(Clone)]
pub struct Service {
    shared: Arc<ServiceShared>,
}

pub(super) struct ServiceShared {
    pub(super) limits: ServiceLimits,
    budget: BufferPool,
    pub(super) buffers: BouncePool,
    state: Mutex<ServiceState>,
    events: Mutex<EventQueue>,
    /// Connections by id.
    connection_table: Mutex<BTreeMap<u64, ConnectionEntry>>,
    connections: AtomicU64,
    connected: AtomicU64,
    abandoned_commands: AtomicU64,
    is_closing: AtomicBool,
    admission: Arc<Admission>,
    authentication: Mutex<AuthenticationContext>,
    refusals: Mutex<RefusalLimiter>,
    slow_io: SlowIoLog,
    fair_shares: Arc<FairShares>,
}

struct ServiceState {
    exports: BTreeMap<String, Arc<SubsystemExport>>,
    ports: BTreeMap<u16, Port>,
    generation: u64,
    /// Addresses of other discovery services, reported as referrals.
    referrals: Vec<SocketAddr>,
    /// What the service knows of its gateway group, if it is in one.
    gateway_group: Option<GatewayGroupView>,
    /// Discovery connections to wake on a change.
    discovery_handles: Vec<Weak<ConnectionHandle>>,
    /// Controller identifier of the last discovery controller.
    discovery_cntlid: u16,
    discovery: DiscoveryName,
    discovery_security: SecurityState,
}

/// Port of the service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Port {
    /// Address that discovery reports; `None` if the port is not reported. An unspecified address
    /// (`0.0.0.0`, `::`) is replaced by the local address that the host connected to.
    pub address: Option<SocketAddr>,
    /// Which connections the port accepts.
    pub security: PortSecurity,
    /// Networks whose peers may connect; any if it is empty.
    pub networks: Vec<PeerNetwork>,
}

/// What a service knows of the gateway group that it is in.
#[derive(Clone)]
pub struct GatewayGroupView {
    /// First and last identifier of its controllers; none while it is no member.
    pub controller_ids: Option<(u16, u16)>,
    /// Addresses of the other gateways, with a port number for each.
    pub addresses: Vec<(u16, SocketAddr)>,
    /// Whether the controller with an identifier is of another gateway, and can execute no command any more.
    pub has_ended: Arc<dyn Fn(Instant, u16) -> bool + Send + Sync>,
}

/// Whether a controller is of another gateway of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ForeignController {
    /// It is not.
    No,
    /// It is, and it can execute no command any more.
    Ended,
    /// It is, or is of an earlier run of this gateway, and may execute commands.
    MayRun,
}

const fn is_within((first, last): (u16, u16), cntlid: u16) -> bool {
    first <= cntlid && cntlid <= last
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

impl Service {
    /// Creates a service without subsystems. Its memory is a region of `regions`.
    ///
    /// # Errors
    ///
    /// If the memory cannot be allocated or a limit is invalid.
    pub fn new(regions: &RegionTable, limits: ServiceLimits) -> Result<Self, Error> {
        limits.check_limits()?;
        let ServiceLimits { memory_bytes, transfer_bytes_max, connections_max, .. } = limits;
        let budget = BufferPool::new(regions, memory_bytes, transfer_bytes_max, connections_max)?;
        let bounce = regions
            .allocate_region((BUFFERS * BUFFER_BYTES) as usize)
            .map_err(|why| format!("bounce buffers: {why}"))
            .map_err(Error::environment)?;
        let whole = bounce.segment();
        let cut = |index: u32| whole.slice(index * BUFFER_BYTES, BUFFER_BYTES);
        let segments = (0..BUFFERS).filter_map(cut).collect();
        // Dropped with the service, after all queues are gone.
        let memory = Arc::new(BounceRegion { regions: regions.clone(), _region: bounce });
        let state = ServiceState {
            exports: BTreeMap::new(),
            ports: BTreeMap::new(),
            generation: 0,
            referrals: Vec::new(),
            gateway_group: None,
            discovery_handles: Vec::new(),
            discovery_cntlid: 0,
            discovery: DiscoveryName { nqn: nqn::DISCOVERY.to_owned(), serial: "1".to_owned() },
            discovery_security: SecurityState::default(),
        };
        let shared = ServiceShared {
            limits,
            budget,
            buffers: BouncePool::new(memory, segments),
            state: Mutex::new(state),
            events: Mutex::default(),
            connection_table: Mutex::default(),
            connections: AtomicU64::new(0),
            connected: AtomicU64::new(0),
            abandoned_commands: AtomicU64::new(0),
            is_closing: AtomicBool::new(false),
            admission: Admission::new(limits.admission_limits(), connections_max),
            authentication: Mutex::new(AuthenticationContext::new()),
            refusals: Mutex::default(),
            slow_io: SlowIoLog::default(),
            fair_shares: FairShares::new(limits.fair_depth),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Exports a subsystem.
    ///
    /// # Errors
    ///
    /// If its NQN is invalid or already exported, or its security is not [valid](SubsystemSecurity::check).
    pub fn add_subsystem(&self, config: SubsystemExportConfig) -> Result<(), Error> {
        nqn::check_nqn(&config.nqn)
            .map_err(|why| format!("export {}: {why}", config.nqn))
            .map_err(Error::environment)?;
        config.security.check(&config.nqn)?;
        let mut state = self.lock_state();
        if state.exports.contains_key(&config.nqn) {
            return Err(Error::environment(format!(
                "export {}: a subsystem with this NQN is exported already, expected another NQN",
                config.nqn
            )));
        }
        let export = SubsystemExport::new(config);
        if let Some(group) = &state.gateway_group {
            export.set_controller_ids(group.controller_ids);
        }
        state.exports.insert(export.nqn().to_owned(), export);
        notify_discovery_change(state);
        Ok(())
    }

    /// Adds a port with this number.
    pub fn add_port(&self, reserve_cntlid: u16, port: Port) {
        let mut state = self.lock_state();
        state.ports.insert(reserve_cntlid, port);
        notify_discovery_change(state);
    }

    /// Stops reporting a port in discovery. Its connections stay.
    pub fn remove_port(&self, reserve_cntlid: u16) {
        let mut state = self.lock_state();
        state.ports.remove(&reserve_cntlid);
        notify_discovery_change(state);
    }

    /// Updates an export. Associations end whose host is no longer allowed, or whose port no longer
    /// shows the subsystem; other hosts are notified of what concerns them. Returns false if no
    /// subsystem has this NQN.
    pub fn update_export(&self, nqn: &str, change: SubsystemExportUpdate) -> bool {
        let Some(export) = self.lock_state().exports.get(nqn).cloned() else { return false };
        if export.apply_update(change) {
            notify_discovery_change(self.lock_state());
        }
        true
    }

    /// Rate limits of a subsystem; `None` if none has this NQN.
    #[must_use]
    pub fn export_limits(&self, nqn: &str) -> Option<ExportLimits> {
        let export = self.lock_state().exports.get(nqn).cloned();
        export.map(|export| export.limits())
    }

    /// Rate limits of every subsystem, by NQN.
    #[must_use]
    pub fn all_limits(&self) -> Vec<(String, ExportLimits)> {
        let exports: Vec<_> = self.lock_state().exports.values().cloned().collect();
        exports.iter().map(|export| (export.nqn().to_owned(), export.limits())).collect()
    }

    /// Changes the rate limits of a subsystem. They apply to commands that wait for the old ones, too;
    /// what was used under the old ones counts against the new ones. Returns false if no subsystem has
    /// this NQN.
    pub fn set_export_limits(&self, now: Instant, nqn: &str, limits: ExportLimits) -> bool {
        let export = self.lock_state().exports.get(nqn).cloned();
        export.map(|export| export.set_limits(now, limits)).is_some()
    }

    /// Adds a namespace to an exported subsystem and notifies the hosts that can see it. A masked
    /// namespace needs an explicit NSID.
    ///
    /// # Errors
    ///
    /// If no subsystem has this NQN, or it cannot have such a namespace.
    pub fn add_namespace(&self, nqn: &str, config: NamespaceConfig) -> Result<u32, Error> {
        let export = self.lock_state().exports.get(nqn).cloned();
        let export = export
            .ok_or_else(|| format!("add namespace: {nqn} is not exported"))
            .map_err(Error::environment)?;
        export.add_namespace(config)
    }

    /// Replaces the device of a namespace, whose identity stays. Queues close their channels to the former one
    /// when its commands have completed. Returns false if there is no such namespace.
    pub fn replace_namespace_device(
        &self,
        nqn: &str,
        nsid: u32,
        device: Arc<dyn BlockDevice>,
    ) -> bool {
        let export = self.lock_state().exports.get(nqn).cloned();
        export.is_some_and(|export| export.replace_namespace_device(nsid, device))
    }

    /// Sets the unique NQN of the discovery service, which distinguishes it from others; the
    /// default is the well-known NQN alone.
    ///
    /// # Errors
    ///
    /// If the NQN is invalid.
    pub fn set_discovery_name(&self, name: DiscoveryName) -> Result<(), Error> {
        nqn::check_nqn(&name.nqn)
            .map_err(|why| format!("discovery {}: {why}", name.nqn))
            .map_err(Error::environment)?;
        let mut state = self.lock_state();
        state.discovery = name;
        notify_discovery_change(state);
        Ok(())
    }

    pub(super) fn discovery_name(&self) -> DiscoveryName {
        self.lock_state().discovery.clone()
    }

    /// Whether `nqn` names the discovery service.
    pub(super) fn is_discovery_nqn(&self, nqn: &str) -> bool {
        nqn == nqn::DISCOVERY || nqn == self.lock_state().discovery.nqn
    }

    /// Replaces the security of the discovery service.
    pub fn set_discovery_security(&self, security: SubsystemSecurity) {
        let mut state = self.lock_state();
        state.discovery_security.replace(security);
        notify_discovery_change(state);
    }

    /// Sets what computes the Diffie-Hellman exchanges of authentications. The default computes on the
    /// thread of the connection, which then serves no I/O for milliseconds.
    pub fn set_dh_executor(&self, executor: Arc<dyn DhExecutor>) {
        self.lock_authentication().jobs.set_executor(executor);
    }

    /// Replaces the generator of random bytes for authentications, which the kernel provides: for
    /// simulations. It returns false if it has none.
    pub fn set_random_source(&self, random: impl Fn(&mut [u8]) -> bool + Send + Sync + 'static) {
        self.lock_authentication().random = Arc::new(random);
    }

    pub(super) fn authentication_context(&self) -> AuthenticationContext {
        self.lock_authentication().clone()
    }

    /// Calls `read` with the security of a subsystem or of the discovery service, if it is exported.
    pub(super) fn with_security_of<R>(
        &self,
        nqn: &str,
        read: impl FnOnce(&SecurityState) -> R,
    ) -> Option<R> {
        if self.is_discovery_nqn(nqn) {
            return Some(self.with_discovery_security(read));
        }
        let export = self.lock_state().exports.get(nqn).cloned();
        export.map(|export| export.with_security(read))
    }

    /// Calls `read` with the security of the discovery service.
    pub(super) fn with_discovery_security<R>(&self, read: impl FnOnce(&SecurityState) -> R) -> R {
        read(&self.lock_state().discovery_security)
    }

    /// Calls `change` with the keys that authentications to the discovery service generate.
    pub(super) fn with_discovery_psks<R>(&self, change: impl FnOnce(&mut GeneratedPsks) -> R) -> R {
        change(&mut self.lock_state().discovery_security.generated)
    }

    /// Which connections a port accepts.
    pub(super) fn port_security(&self, port: u16) -> PortSecurity {
        self.lock_state().ports.get(&port).map_or(PortSecurity::default(), |port| port.security)
    }

    /// TLS PSKs with an identity that a client offers: those of configured keys in both derivations,
    /// and those that authentications have generated within the last hour. Several keys may have the
    /// same identity of version 0. Empty if the identity is of no key.
    #[must_use]
    pub fn tls_psks_of_identity(&self, now: Instant, identity: &str) -> Vec<TlsPsk> {
        let Some(identity) = PskIdentity::parse(identity) else { return Vec::new() };
        if self.is_discovery_nqn(identity.subsystem_nqn) {
            return self.lock_state().discovery_security.tls_psks(now, &identity);
        }
        let export = self.lock_state().exports.get(identity.subsystem_nqn).cloned();
        export.map_or(Vec::new(), |export| export.tls_psks(now, &identity))
    }

    /// Replaces the discovery referrals.
    pub fn set_referrals(&self, others: Vec<SocketAddr>) {
        let mut state = self.lock_state();
        state.referrals = others;
        notify_discovery_change(state);
    }

    /// Sets what the service knows of its gateway group. If the controller identifiers change, all associations
    /// end.
    pub fn set_gateway_group(&self, group: GatewayGroupView) {
        let mut state = self.lock_state();
        let exports: Vec<_> = state.exports.values().cloned().collect();
        let controller_ids = group.controller_ids;
        let before = state.gateway_group.replace(group);
        let is_same = before.is_some_and(|before| {
            Some(&before.addresses) == state.gateway_group.as_ref().map(|now| &now.addresses)
        });
        if is_same {
            drop(state);
        } else {
            notify_discovery_change(state);
        }
        exports.iter().for_each(|export| export.set_controller_ids(controller_ids));
    }

    /// Whether a controller is of another gateway of the group.
    pub(super) fn foreign_controller(&self, now: Instant, cntlid: u16) -> ForeignController {
        let found = self.lock_state().gateway_group.clone();
        match found {
            Some(group) if group.controller_ids.is_none_or(|ids| !is_within(ids, cntlid)) => {
                match (group.has_ended)(now, cntlid) {
                    true => ForeignController::Ended,
                    false => ForeignController::MayRun,
                }
            }
            _ => ForeignController::No,
        }
    }

    /// Stops exporting a subsystem: its associations end, and new ones are rejected. Returns false
    /// if no subsystem has this NQN.
    pub fn remove_subsystem(&self, nqn: &str) -> bool {
        let mut state = self.lock_state();
        let Some(export) = state.exports.remove(nqn) else { return false };
        notify_discovery_change(state);
        export.end_all_associations();
        true
    }

    /// Ends the connections that belong to no subsystem: to discovery, or to a host that has not sent its
    /// Connect. Those of a subsystem end when it is [removed](Self::remove_subsystem).
    pub fn close_unassociated_connections(&self) {
        self.shared.is_closing.store(true, Ordering::Release);
        self.lock_connection_table().values().for_each(|entry| entry.handle.wake_connection());
    }

    /// Whether [`close_unassociated_connections`](Self::close_unassociated_connections) was called. Each connection is woken after that.
    #[inline]
    pub(super) fn is_closing(&self) -> bool {
        self.shared.is_closing.load(Ordering::Acquire)
    }

    /// Accepts a connection on a port. The caller polls it, as a poller or with
    /// [`TargetConnection::poll_once`].
    ///
    /// # Errors
    ///
    /// If the port does not permit the peer or requires TLS, a connection limit is reached, or its memory
    /// cannot be allocated. The rejection is also an event.
    pub fn accept_stream(
        &self,
        stream: Box<dyn Stream>,
        port: u16,
        now: Instant,
    ) -> Result<TargetConnection, Error> {
        let shared = &self.shared;
        let peer = stream.peer_description();
        let refuse = |reason, why: String| {
            let secure_channel = stream.secure_channel().cloned();
            let audit =
                ConnectionAudit { secure_channel, ..ConnectionAudit::of_peer(None, &peer, port) };
            let error = Error::environment(format!("connection of {peer}: {why}"));
            self.emit_refusal(now, audit, reason, why);
            error
        };
        if self.is_closing() {
            let why = "the server is shutting down".to_owned();
            return Err(refuse(RefusalReason::Unavailable, why));
        }
        self.check_port_access(port, &peer, stream.secure_channel().is_some())
            .map_err(|(reason, why)| refuse(reason, why.to_owned()))?;
        // The admission and the cache give back what they hold when dropped, so an error below
        // leaves no trace.
        let admitted = Admission::admit(&shared.admission, &peer)
            .map_err(|why| refuse(RefusalReason::Limit, why.to_string()))?;
        let handle = ConnectionHandle::new();
        let waker = Arc::clone(&handle);
        let cache = BufferCache::new(
            &shared.budget,
            peer_address_without_port(&peer),
            Arc::new(move || waker.wake_connection()),
        );
        let cache = cache.ok_or_else(|| {
            let why = "all memory for connections is in use".to_owned();
            refuse(RefusalReason::Limit, why)
        })?;
        shared.connected.fetch_add(1, Ordering::Relaxed);
        let connection = shared.connections.fetch_add(1, Ordering::Relaxed);
        self.emit(TargetEvent::Connected { connection, peer: peer.clone() });
        let (table_handle, held) = (Arc::clone(&handle), cache.held_bytes());
        let entry = ConnectionEntry { handle: table_handle, peer: peer.clone(), port, held };
        self.lock_connection_table().insert(connection, entry);
        let service = self.clone();
        Ok(TargetConnection::new(ConnectionParts {
            service,
            stream,
            handle,
            cache,
            connection,
            peer,
            port,
            admitted,
            now,
        }))
    }

    /// Checks whether a peer may connect to a port, with or without a secure channel.
    fn check_port_access(
        &self,
        port: u16,
        peer: &str,
        is_secure: bool,
    ) -> Result<(), (RefusalReason, &'static str)> {
        let state = self.lock_state();
        let Some(at) = state.ports.get(&port) else { return Ok(()) };
        if !is_peer_admitted(&at.networks, peer) {
            let why = "its address is in no network that may connect to the port";
            return Err((RefusalReason::AddressNotPermitted, why));
        }
        match (at.security, is_secure) {
            (PortSecurity::TlsRequired, false) => {
                let why = "it is plaintext, expected TLS: the port requires it";
                Err((RefusalReason::SecureChannelRequired, why))
            }
            _ => Ok(()),
        }
    }

    /// Whether a port permits connections of a peer, before anything is received from it.
    #[must_use]
    pub fn permits_peer(&self, port: u16, peer: &str) -> bool {
        let state = self.lock_state();
        state.ports.get(&port).is_none_or(|port| is_peer_admitted(&port.networks, peer))
    }

    /// Reports a rejection, unless too many of this address were reported.
    pub fn emit_refusal(
        &self,
        now: Instant,
        audit: ConnectionAudit,
        reason: RefusalReason,
        why: String,
    ) {
        let address = connection_limit_key_of_peer(&audit.peer).map_or_else(
            || peer_address_without_port(&audit.peer).to_owned(),
            |address| address.to_string(),
        );
        let refusals = &self.shared.refusals;
        let reported = refusals.lock().unwrap_or_else(PoisonError::into_inner).count(now, &address);
        if let Some(unreported) = reported {
            self.emit(TargetEvent::Rejected { audit: Box::new(audit), reason, why, unreported });
        } else {
            self.lock_event_queue().count_unreported_refusal(reason);
        }
    }

    /// Numbers of connections, associations, refusals and disconnects since the start.
    #[must_use]
    pub fn event_counts(&self) -> EventCounts {
        self.lock_event_queue().counts()
    }

    /// Next event, if any.
    #[must_use]
    pub fn next_event(&self) -> Option<TargetEvent> {
        self.lock_event_queue().next()
    }

    /// Number of connections.
    #[must_use]
    pub fn connection_count(&self) -> u64 {
        self.shared.connected.load(Ordering::Relaxed)
    }

    /// Number of commands whose connection was dropped before their device had completed them.
    #[must_use]
    pub fn abandoned_commands(&self) -> u64 {
        self.shared.abandoned_commands.load(Ordering::Relaxed)
    }

    /// Counts abandoned commands, and reports them.
    pub(super) fn report_abandoned_commands(&self, peer: &str, commands: usize) {
        self.shared.abandoned_commands.fetch_add(commands as u64, Ordering::Relaxed);
        self.emit(TargetEvent::Error(format!(
            "{peer}: {commands} commands are abandoned: their device has not completed them"
        )));
    }

    /// Number of connections rejected by a limit in total, per address or per host.
    #[must_use]
    pub fn rejected_connections(&self) -> u64 {
        self.shared.admission.rejected_connections()
    }

    /// Whether any subsystem lists its hosts, or has keys of them.
    pub(super) fn has_access_list(&self) -> bool {
        let is_for_known_hosts =
            |export: &Arc<SubsystemExport>| export.has_host_list() || export.has_host_keys();
        self.lock_state().exports.values().any(is_for_known_hosts)
    }

    /// Snapshots of all connections, in the order of their creation.
    #[must_use]
    pub fn connections(&self) -> Vec<ConnectionSample> {
        self.lock_connection_table().iter().map(|(id, entry)| entry.sample(*id)).collect()
    }

    /// Statistics of every subsystem, by NQN.
    #[must_use]
    pub fn io_stats(&self) -> Vec<(String, Vec<IoStatsSample>)> {
        let exports: Vec<_> = self.lock_state().exports.values().cloned().collect();
        exports
            .iter()
            .map(|export| (export.nqn().to_owned(), export.io_stats().samples()))
            .collect()
    }

    /// Log of the slow commands of all subsystems.
    #[must_use]
    pub fn slow_io_log(&self) -> &SlowIoLog {
        &self.shared.slow_io
    }

    /// Thresholds for slow commands and the number of slow ones, of every subsystem by NQN.
    #[must_use]
    pub fn slow_io(&self) -> Vec<(String, SlowIoThresholds, u64)> {
        let exports: Vec<_> = self.lock_state().exports.values().cloned().collect();
        let row = |export: &Arc<SubsystemExport>| {
            let (thresholds, count) = export.slow_io();
            (export.nqn().to_owned(), thresholds, count.load(Ordering::Relaxed))
        };
        exports.iter().map(row).collect()
    }

    /// Changes the thresholds for slow commands of a subsystem, also of open queues. Returns false if no
    /// subsystem has this NQN.
    pub fn set_slow_io(&self, nqn: &str, thresholds: SlowIoThresholds) -> bool {
        let export = self.lock_state().exports.get(nqn).cloned();
        export.map(|export| export.set_slow_io(thresholds)).is_some()
    }

    /// Number of associations.
    #[must_use]
    pub fn association_count(&self) -> usize {
        self.lock_state().exports.values().map(|export| export.associations().len()).sum()
    }

    /// Buffer memory of the connections.
    #[must_use]
    pub fn buffer_pool(&self) -> &BufferPool {
        &self.shared.budget
    }

    pub(super) fn limits(&self) -> &ServiceLimits {
        &self.shared.limits
    }

    pub(super) fn fair_shares(&self) -> &Arc<FairShares> {
        &self.shared.fair_shares
    }

    pub(super) fn bounce_pool(&self) -> &BouncePool {
        &self.shared.buffers
    }

    /// Subsystem with this NQN, if it is visible at this port.
    pub(super) fn find_export(&self, nqn: &str, port: u16) -> Option<Arc<SubsystemExport>> {
        self.lock_state().exports.get(nqn).filter(|export| export.is_visible_at(port)).cloned()
    }

    /// Generation counter of the discovery log page.
    pub(super) fn discovery_generation(&self) -> u64 {
        self.lock_state().generation
    }

    /// Next identifier of a discovery controller.
    pub(super) fn next_discovery_cntlid(&self) -> u16 {
        let mut state = self.lock_state();
        state.discovery_cntlid = state.discovery_cntlid % CNTLID_MAX + 1;
        state.discovery_cntlid
    }

    /// Registers the connection of a discovery controller, which is woken on changes.
    pub(super) fn add_discovery_connection(&self, handle: &Arc<ConnectionHandle>) {
        let mut state = self.lock_state();
        state.discovery_handles.retain(|handle| handle.strong_count() > 0);
        state.discovery_handles.push(Arc::downgrade(handle));
    }

    /// Unregisters a connection.
    pub(super) fn remove_connection(&self, connection: u64) {
        self.lock_connection_table().remove(&connection);
        self.shared.connected.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn emit(&self, events: TargetEvent) {
        events.record_in_flight_recorder();
        self.lock_event_queue().push(events);
    }

    fn lock_state(&self) -> MutexGuard<'_, ServiceState> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_connection_table(&self) -> MutexGuard<'_, BTreeMap<u64, ConnectionEntry>> {
        self.shared.connection_table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_authentication(&self) -> MutexGuard<'_, AuthenticationContext> {
        self.shared.authentication.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_event_queue(&self) -> MutexGuard<'_, EventQueue> {
        self.shared.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Address of a peer without its port, or the whole string if it has none.
pub(super) fn peer_address_without_port(peer: &str) -> &str {
    peer.rsplit_once(':').map_or(peer, |(address, _)| address)
}

/// Increments the generation and wakes the discovery connections.
fn notify_discovery_change(mut state: MutexGuard<'_, ServiceState>) {
    state.generation += 1;
    let handles: Vec<Arc<ConnectionHandle>> =
        state.discovery_handles.iter().filter_map(Weak::upgrade).collect();
    drop(state);
    handles.iter().for_each(|handle| handle.wake_connection());
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
            .field("connected", &self.connection_count())
            .finish_non_exhaustive()
    }
}
