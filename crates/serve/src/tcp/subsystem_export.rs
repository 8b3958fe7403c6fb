//! Exported subsystem: its allowed hosts, ports and controllers.

mod update;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tenmil_base::{BlockDevice, Instant, Random};
use tenmil_nvme_auth::TlsPsk;
use tenmil_nvme_controller::IoStatsTable;
use tenmil_nvme_controller::controller::{
    AnaState, Controller, ControllerConfig, ControllerInstance, HostIdentifierInUse, Subsystem,
    TransportModel,
};
use tenmil_nvme_controller::transport::fabrics::AssociationEndReason;
use tenmil_wire::admin::CrossControllerReset;
use tenmil_wire::fabrics::{CNTLID_DYNAMIC, CNTLID_MAX, CNTLID_STATIC};

use super::association::{Association, HostIds};
use super::rate_limits::{ConnectionLimiters, ExportLimiters, ExportLimits};
use super::security::{
    GeneratedPsks, HostRights, PskIdentity, SecurityState, SubsystemSecurity, Verdict,
};
use super::service::ServiceLimits;
use crate::peer_network::connection_limit_key_of_peer;
use crate::slow_io::SlowIoThresholds;

pub use self::update::SubsystemExportUpdate;

/// Hosts that may use a subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllowedHosts {
    /// Any host.
    Any,
    /// Hosts with these NQNs.
    Listed(BTreeSet<String>),
}

/// Controller model of a subsystem (Base 2.1 §3.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControllerModel {
    /// Dynamic: a controller is created for every association.
    Dynamic,
    /// Static: this many controllers, numbered from 1. A host requests a specific one or any.
    Static(u16),
}

/// Configuration of an exported subsystem.
pub struct SubsystemExportConfig {
    /// The subsystem.
    pub subsystem: Subsystem,
    /// NQN that the subsystem was created with.
    pub nqn: String,
    /// Hosts that may use it.
    pub hosts: AllowedHosts,
    /// Ports at which it is visible, and the ANA state of each group there. It is invisible at
    /// other ports.
    pub ports: BTreeMap<u16, Vec<(u32, AnaState)>>,
    /// Controller model.
    pub model: ControllerModel,
    /// Namespaces that are visible to the listed hosts only.
    pub masks: BTreeMap<u32, BTreeSet<String>>,
    /// What hosts must prove, and their rights.
    pub security: SubsystemSecurity,
}

/// Exported subsystem.
pub(super) struct SubsystemExport {
    nqn: String,
    subsystem: Subsystem,
    model: ControllerModel,
    io_stats: Arc<IoStatsTable>,
    slow_io: Mutex<SlowIoThresholds>,
    /// Number of slow commands.
    slow_io_count: Arc<AtomicU64>,
    limiters: Mutex<ExportLimiters>,
    state: Mutex<ExportState>,
}

struct ExportState {
    hosts: AllowedHosts,
    ports: BTreeMap<u16, Vec<(u32, AnaState)>>,
    masks: BTreeMap<u32, BTreeSet<String>>,
    security: SecurityState,
    associations: BTreeMap<u16, Weak<Association>>,
    /// First and last controller identifier of a dynamic controller; none while the gateway is no member of
    /// its group.
    cntlids: Option<(u16, u16)>,
    /// Next controller identifier to try, so that an identifier is not reused at once.
    next: u16,
    /// Random source for controller instances.
    instance_random: Random,
    instance_number: u8,
    /// Ended controllers, oldest first, which a Cross-Controller Reset may name.
    ended: VecDeque<(u16, ControllerInstance)>,
    /// Whether the subsystem is no longer exported.
    is_removed: bool,
}

/// Why no controller was created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ControllerError {
    /// The host is not allowed.
    Host,
    /// There is no such controller, or it must not be requested.
    Identifier(u16),
    /// All controllers are in use.
    Busy,
    /// The host identifier is in use by another NQN.
    HostInUse(HostIdentifierInUse),
    /// This controller has ended and its queues have not stopped.
    Unstopped(u16),
    /// The host has proved its NQN, and its other controllers have this host identifier.
    OtherIdentifier(u128),
    /// The gateway is no member of its group at present, and has no controller identifiers.
    NoMember,
    /// The controller could not be created.
    Trouble(String),
}

/// Controller identifier that a controller is created with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestedCntlid {
    /// CNTLID of a Connect, which may request any.
    OfHost(u16),
    /// Identifier that the host was told before it authenticated.
    Proposed(u16),
}

impl SubsystemExport {
    pub(super) fn new(config: SubsystemExportConfig) -> Arc<Self> {
        let SubsystemExportConfig { subsystem, nqn, hosts, ports, model, masks, security } = config;
        let (associations, next, is_removed) = (BTreeMap::new(), 1, false);
        let state = ExportState {
            hosts,
            ports,
            masks,
            security: SecurityState::new(security),
            associations,
            cntlids: Some((1, CNTLID_MAX)),
            next,
            instance_random: Random::new(tenmil_linux::random_seed()),
            instance_number: 0,
            ended: VecDeque::new(),
            is_removed,
        };
        let io_stats = Arc::default();
        let (slow_io, slow_io_count) = Default::default();
        let state = Mutex::new(state);
        let limiters = Mutex::default();
        let export =
            Self { nqn, subsystem, model, io_stats, slow_io, slow_io_count, limiters, state };
        Arc::new(export)
    }

    /// Thresholds for slow commands, and their number.
    pub(super) fn slow_io(&self) -> (SlowIoThresholds, Arc<AtomicU64>) {
        (self.lock_slow_io().clone(), Arc::clone(&self.slow_io_count))
    }

    /// Changes the thresholds for slow commands, also of open queues.
    pub(super) fn set_slow_io(&self, thresholds: SlowIoThresholds) {
        if std::mem::replace(&mut *self.lock_slow_io(), thresholds.clone()) != thresholds {
            self.associations().iter().for_each(|one| one.lock_transport().poll_queues());
        }
    }

    fn lock_slow_io(&self) -> MutexGuard<'_, SlowIoThresholds> {
        self.slow_io.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Rate limits.
    pub(super) fn limits(&self) -> ExportLimits {
        self.lock_limiters().limits().clone()
    }

    /// Changes the rate limits, also of commands that wait for them.
    pub(super) fn set_limits(&self, now: Instant, limits: ExportLimits) {
        if self.lock_limiters().set(now, limits) {
            self.associations().iter().for_each(|one| one.lock_transport().poll_queues());
        }
    }

    /// The limiters of a connection of this host, unless they are of this generation.
    pub(super) fn newer_limiters(&self, generation: u64, host: &str) -> Option<ConnectionLimiters> {
        let mut limiters = self.lock_limiters();
        limiters.is_newer_than(generation).then(|| limiters.of_connection(host))
    }

    fn lock_limiters(&self) -> MutexGuard<'_, ExportLimiters> {
        self.limiters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Statistics of the commands of its hosts.
    pub(super) fn io_stats(&self) -> &Arc<IoStatsTable> {
        &self.io_stats
    }

    pub(super) fn nqn(&self) -> &str {
        &self.nqn
    }

    /// Whether the subsystem is visible at a port.
    pub(super) fn is_visible_at(&self, port: u16) -> bool {
        self.lock_state().ports.contains_key(&port)
    }

    /// Whether a host may use the subsystem.
    pub(super) fn allows_host(&self, host: &str) -> bool {
        match &self.lock_state().hosts {
            AllowedHosts::Any => true,
            AllowedHosts::Listed(names) => names.contains(host),
        }
    }

    /// Whether the subsystem lists its hosts.
    pub(super) fn has_host_list(&self) -> bool {
        matches!(self.lock_state().hosts, AllowedHosts::Listed(_))
    }

    /// Whether a connection needs a secure channel.
    pub(super) fn requires_secure_channel(&self) -> bool {
        self.lock_state().security.security.secure_channel_required
    }

    /// Rights of a host.
    pub(super) fn rights_of_host(&self, host_nqn: &str) -> HostRights {
        self.lock_state().security.security.rights_of_host(host_nqn)
    }

    /// Calls `read` with the security.
    pub(super) fn with_security<R>(&self, read: impl FnOnce(&SecurityState) -> R) -> R {
        read(&self.lock_state().security)
    }

    /// Calls `change` with the keys that authentications generate.
    pub(super) fn with_generated_psks<R>(&self, change: impl FnOnce(&mut GeneratedPsks) -> R) -> R {
        change(&mut self.lock_state().security.generated)
    }

    /// TLS PSKs with an identity.
    pub(super) fn tls_psks(&self, now: Instant, identity: &PskIdentity<'_>) -> Vec<TlsPsk> {
        self.lock_state().security.tls_psks(now, identity)
    }

    /// Whether the subsystem has keys of hosts.
    pub(super) fn has_host_keys(&self) -> bool {
        !self.lock_state().security.security.hosts.is_empty()
    }

    /// CNTLID value for the discovery log page.
    pub(super) fn advertised_cntlid(&self) -> u16 {
        match self.model {
            ControllerModel::Dynamic => CNTLID_DYNAMIC,
            ControllerModel::Static(_) => CNTLID_STATIC,
        }
    }

    /// Creates a controller for a host that connected to `port`.
    pub(super) fn create_controller(
        &self,
        now: Instant,
        requested: RequestedCntlid,
        (port, host, peer): (u16, &HostIds, &str),
        limits: &ServiceLimits,
    ) -> Result<Controller, ControllerError> {
        if !self.allows_host(&host.nqn) {
            return Err(ControllerError::Host);
        }
        if !limits.injected_bugs.unfenced_writes
            && let Some(cntlid) = self.find_unstopped_cntlid()
        {
            return Err(ControllerError::Unstopped(cntlid));
        }
        let cntlid = match requested {
            RequestedCntlid::OfHost(requested) => self.reserve_cntlid(requested)?,
            RequestedCntlid::Proposed(cntlid) => self.reserve_proposed_cntlid(cntlid)?,
        };
        let keep_alive_max = limits.admission_limits().keep_alive_max;
        let config = ControllerConfig {
            cntlid,
            queue_entries_max: limits.queue_entries.into(),
            transfer_bytes_max: limits.transfer_bytes_max,
            io_queues_max: limits.io_queues_max,
            vectors: 0,
            sgls: SGLS,
            fused_compare_and_write: true,
            keep_alive_max,
            // A host that may connect under any NQN must not stay silent forever.
            idle_host_timeout: (!self.has_host_list()).then_some(keep_alive_max),
            instance: Some(self.new_controller_instance()),
            transport: TransportModel::Fabrics {
                command_capsule_bytes: 64 + limits.in_capsule_bytes,
                descriptors_max: 1,
                quiesce: limits.quiesce,
            },
            ..ControllerConfig::default()
        };
        let opened = self.subsystem.open_controller(now, config);
        let mut controller = opened.map_err(|text| {
            self.release_cntlid(cntlid, None);
            ControllerError::Trouble(text.to_string())
        })?;
        if let Err(why) = controller.connect_host(&host.nqn, host.identifier) {
            // The controller identifier may be reused only after the controller is gone.
            drop(controller);
            self.release_cntlid(cntlid, None);
            return Err(ControllerError::HostInUse(why));
        }
        if let Some(address) = connection_limit_key_of_peer(peer).filter(|_| !self.has_host_list())
        {
            let limit = limits.admission_limits().registrants_per_address_max;
            controller.limit_origin_registrants(&address.to_string(), limit);
        }
        let state = self.lock_state();
        // Without an event: the host has never seen them. Later changes of the masks, and namespaces added
        // before this controller was known to belong to the host, follow in `add_association`.
        for nsid in state.masks.keys().filter(|nsid| !state.can_see_namespace(&host.nqn, **nsid)) {
            self.subsystem.hide_new_namespace(cntlid, *nsid);
        }
        let states = state.ports.get(&port).cloned().unwrap_or_default();
        let rights = state.security.security.rights_of_host(&host.nqn).namespace_rights();
        drop(state);
        self.subsystem.set_namespace_rights(cntlid, rights);
        for (group, state) in states {
            self.subsystem.set_ana_state(cntlid, group, state);
        }
        Ok(controller)
    }

    /// Creates a value that distinguishes this controller from all earlier ones with its
    /// identifier.
    fn new_controller_instance(&self) -> ControllerInstance {
        let mut state = self.lock_state();
        state.instance_number = state.instance_number.checked_add(1).unwrap_or(1);
        ControllerInstance {
            uniquifier: state.instance_number,
            random: state.instance_random.next_u64(),
            resets_max: RESETS_MAX,
        }
    }

    /// Reserves the requested controller identifier until its association is added, or removed.
    fn reserve_cntlid(&self, requested: u16) -> Result<u16, ControllerError> {
        let mut state = self.lock_state();
        let free = self.find_free_cntlid(&mut state, requested)?;
        state.associations.insert(free, Weak::new());
        Ok(free)
    }

    /// Selects a controller identifier for a host that must authenticate. It is not reserved, so that a
    /// host that does not authenticate holds none.
    pub(super) fn propose_cntlid(&self, requested: u16) -> Result<u16, ControllerError> {
        self.find_free_cntlid(&mut self.lock_state(), requested)
    }

    /// Reserves an identifier that was proposed. It may be in use meanwhile.
    fn reserve_proposed_cntlid(&self, cntlid: u16) -> Result<u16, ControllerError> {
        let mut state = self.lock_state();
        if state.associations.contains_key(&cntlid) {
            return Err(ControllerError::Busy);
        }
        state.associations.insert(cntlid, Weak::new());
        Ok(cntlid)
    }

    /// Finds the requested controller identifier, or a free one. The next search begins behind it.
    fn find_free_cntlid(
        &self,
        state: &mut ExportState,
        requested: u16,
    ) -> Result<u16, ControllerError> {
        let (lowest, last) = match self.model {
            ControllerModel::Dynamic if requested == CNTLID_DYNAMIC => {
                state.cntlids.ok_or(ControllerError::NoMember)?
            }
            ControllerModel::Dynamic => return Err(ControllerError::Identifier(requested)),
            ControllerModel::Static(count) => match requested {
                CNTLID_DYNAMIC | CNTLID_STATIC => (1, count),
                1.. if requested <= count => {
                    return match state.associations.contains_key(&requested) {
                        true => Err(ControllerError::Busy),
                        false => Ok(requested),
                    };
                }
                _ => return Err(ControllerError::Identifier(requested)),
            },
        };
        let first = state.next.clamp(lowest, last);
        let free = (first..=last)
            .chain(lowest..first)
            .find(|cntlid| !state.associations.contains_key(cntlid))
            .ok_or(ControllerError::Busy)?;
        state.next = if free == last { lowest } else { free + 1 };
        Ok(free)
    }

    /// Registers an association. Changes since its Connect apply to it as well: it ends at once if
    /// the host is no longer allowed.
    ///
    /// # Errors
    ///
    /// If the host has proved its NQN, and another controller of this host has another host identifier.
    pub(super) fn add_association(
        &self,
        association: &Arc<Association>,
    ) -> Result<(), ControllerError> {
        let mut state = self.lock_state();
        // Dropped after the lock is released: the end of an association takes it.
        let others: Vec<_> = state.associations.values().filter_map(Weak::upgrade).collect();
        if let Some(identifier) = other_host_identifier(association, &others) {
            drop(state);
            return Err(ControllerError::OtherIdentifier(identifier));
        }
        state.associations.insert(association.cntlid, Arc::downgrade(association));
        for nsid in state.masks.keys() {
            let is_visible = state.can_see_namespace(&association.host.nqn, *nsid);
            self.subsystem.set_namespace_visible(association.cntlid, *nsid, is_visible);
        }
        let is_removed = state.is_removed || !state.ports.contains_key(&association.port);
        let verdict = association.judge_queues(&state.security);
        let rights = state.security.security.rights_of_host(&association.host.nqn);
        drop(state);
        self.subsystem.set_namespace_rights(association.cntlid, rights.namespace_rights());
        if is_removed || !self.allows_host(&association.host.nqn) {
            association.lock_transport().end_association(AssociationEndReason::SubsystemRemoved);
        } else if verdict != Verdict::Permitted {
            association.lock_transport().end_association(AssociationEndReason::CredentialsRevoked);
        }
        Ok(())
    }

    /// Replaces the device of a namespace. Queues without commands are polled: they close their channels to the
    /// former device.
    pub(super) fn replace_namespace_device(&self, nsid: u32, device: Arc<dyn BlockDevice>) -> bool {
        let is_replaced = self.subsystem.replace_namespace_device(nsid, device);
        self.associations().iter().for_each(|one| one.lock_transport().poll_queues());
        is_replaced
    }

    /// Sets the first and the last controller identifier of dynamic controllers. If they change, all
    /// associations end: another gateway of the group may have their identifiers.
    pub(super) fn set_controller_ids(&self, cntlids: Option<(u16, u16)>) {
        let mut state = self.lock_state();
        if std::mem::replace(&mut state.cntlids, cntlids) == cntlids {
            return;
        }
        let present: Vec<_> = state.associations.values().filter_map(Weak::upgrade).collect();
        drop(state);
        for association in present {
            association.lock_transport().end_association(AssociationEndReason::SubsystemRemoved);
        }
    }

    /// Ends all associations, because the subsystem is no longer exported.
    pub(super) fn end_all_associations(&self) {
        self.lock_state().is_removed = true;
        for association in self.associations() {
            association.lock_transport().end_association(AssociationEndReason::SubsystemRemoved);
        }
    }

    /// Releases a controller identifier. `ended` is the instance, if no command of it is
    /// outstanding.
    pub(super) fn release_cntlid(&self, cntlid: u16, ended: Option<ControllerInstance>) {
        let mut state = self.lock_state();
        state.associations.remove(&cntlid);
        if let Some(instance) = ended {
            if state.ended.len() == ENDED_MAX {
                state.ended.pop_front();
            }
            state.ended.push_back((cntlid, instance));
        }
    }

    /// Whether exactly this controller instance existed here and is gone with no command
    /// outstanding.
    pub(super) fn has_instance_ended(&self, reset: &CrossControllerReset) -> bool {
        self.lock_state().ended.iter().any(|(cntlid, instance_number)| {
            (*cntlid, instance_number.uniquifier, instance_number.random)
                == (reset.icid, reset.ciu, reset.cirn)
        })
    }

    /// Controller identifier of an ended association whose queues may still start commands.
    fn find_unstopped_cntlid(&self) -> Option<u16> {
        let is_unstopped = |association: &Arc<Association>| {
            let front = association.lock_transport();
            front.end_reason().is_some() && !front.have_queues_stopped()
        };
        self.associations().iter().find(|it| is_unstopped(it)).map(|it| it.cntlid)
    }

    /// Association of a controller.
    pub(super) fn association_of_cntlid(&self, cntlid: u16) -> Option<Arc<Association>> {
        self.lock_state().associations.get(&cntlid).and_then(Weak::upgrade)
    }

    /// All associations.
    pub(super) fn associations(&self) -> Vec<Arc<Association>> {
        self.lock_state().associations.values().filter_map(Weak::upgrade).collect()
    }

    fn lock_state(&self) -> MutexGuard<'_, ExportState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Host identifier of the other controllers of a host that has proved its NQN, if it differs: such a host
/// has one at a time.
fn other_host_identifier(association: &Association, others: &[Arc<Association>]) -> Option<u128> {
    let host = &association.host;
    if host.identifier == 0 || !association.admin_credentials().prove_host() {
        return None;
    }
    let differs = |other: &&Arc<Association>| {
        other.host.nqn == host.nqn
            && other.host.identifier != host.identifier
            && other.host.identifier != 0
            && other.admin_credentials().prove_host()
            && other.lock_transport().end_reason().is_none()
    };
    others.iter().find(differs).map(|other| other.host.identifier)
}

/// Number of ended controllers that are remembered. A Cross-Controller Reset of an older one is
/// rejected, and its host waits.
const ENDED_MAX: usize = 1024;

/// Largest number of concurrent Cross-Controller Resets of a controller: the number of paths of a
/// host, with some reserve.
pub(super) const RESETS_MAX: u8 = 16;

/// SGLS: SGLs are supported, with an address or an offset in the capsule, and the transport data
/// block (Base 2.1 §5.1.13.2.1).
const SGLS: u32 = 1 | 1 << 20 | 1 << 21;

impl fmt::Debug for SubsystemExport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("SubsystemExport").field("nqn", &self.nqn).finish_non_exhaustive()
    }
}

impl fmt::Debug for SubsystemExportConfig {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("SubsystemExportConfig")
            .field("nqn", &self.nqn)
            .field("hosts", &self.hosts)
            .field("ports", &self.ports)
            .field("model", &self.model)
            .finish_non_exhaustive()
    }
}
