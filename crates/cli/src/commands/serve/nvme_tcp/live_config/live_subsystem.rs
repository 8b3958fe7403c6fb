//! Live subsystem with its namespaces, and its transition to a new configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tenmil_base::BlockDevice;
use tenmil_block::uri::Uri;
use tenmil_block::{Bdev, BdevDescriptor, BdevEvent, DeviceControl};
use tenmil_nvme_controller::controller::{
    AnaState, NamespaceConfig, ReservationPersistenceMode, Subsystem, SubsystemConfig,
};
use tenmil_nvme_controller::namespace::RevocableCacheInstance;
use tenmil_rpc::target_config::{self, AnaStateConfig};
use tenmil_serve::tcp::{
    AllowedHosts, ControllerModel, StateDirectory, SubsystemExportConfig, SubsystemExportUpdate,
    SubsystemSecurity,
};

use super::{AppliedChanges, ApplyError, LiveListener, TargetContext, disk_identity};
use tenmil_base::Error;

/// Subsystem that is served.
#[derive(Clone)]
pub(in crate::commands::serve::nvme_tcp) struct LiveSubsystem {
    pub(super) requested: target_config::SubsystemConfig,
    pub(super) subsystem: Subsystem,
    /// What hosts must prove, with the keys as they were read.
    pub(super) security: SubsystemSecurity,
    pub(super) namespaces: Vec<LiveNamespace>,
    /// ANA states that follow from the owners of a gateway group, the same at each listener.
    pub(super) ana_states: BTreeMap<u32, AnaState>,
}

/// Namespace that is served.
#[derive(Clone)]
pub(in crate::commands::serve::nvme_tcp) struct LiveNamespace {
    pub(super) requested: target_config::NamespaceConfig,
    pub(super) description: String,
    pub(super) device: Bdev,
    pub(super) descriptor: Arc<BdevDescriptor>,
    /// What queues open channels to: the descriptor, or what a gateway group has in front of it.
    pub(super) served: Arc<dyn BlockDevice>,
    /// Confirms to reconnecting hosts that the write cache of the device is still the same instance.
    pub(super) cache: Option<Arc<RevocableCacheInstance>>,
    pub(super) handles: Vec<DeviceControl>,
    /// Identities of the devices below, by URI.
    pub(super) identities: Vec<(Uri, String)>,
}

impl LiveSubsystem {
    pub(in crate::commands::serve::nvme_tcp) fn nqn(&self) -> &str {
        &self.requested.nqn
    }

    /// Whether its hosts must authenticate.
    pub(in crate::commands::serve::nvme_tcp) const fn requires_authentication(&self) -> bool {
        self.security.authentication_required
    }

    /// Whether connections in the clear are rejected at all its listeners.
    pub(in crate::commands::serve::nvme_tcp) const fn requires_secure_channel(&self) -> bool {
        self.security.secure_channel_required
    }

    pub(in crate::commands::serve::nvme_tcp) fn namespaces(&self) -> &[LiveNamespace] {
        &self.namespaces
    }

    /// Removes the namespaces from the subsystem, which stops persisting their reservations: the next
    /// export of the same namespaces reads the state directory, and queued changes must not be written
    /// after that.
    pub(super) fn remove_namespaces(&self) {
        for served in &self.namespaces {
            self.subsystem.remove_namespace(served.requested.nsid);
        }
    }

    /// Whether the fixed properties of the subsystem equal those of `requested`.
    pub(super) fn has_same_fixed_properties(
        &self,
        requested: &target_config::SubsystemConfig,
    ) -> bool {
        self.requested.serial == requested.serial
    }

    /// Whether it is the same subsystem as `before` from the hosts' point of view.
    pub(super) fn is_same_subsystem(&self, before: &Self) -> bool {
        self.requested.nqn == before.requested.nqn
            && before.has_same_fixed_properties(&self.requested)
    }

    /// The open device for a namespace of the configuration, preferring the one with the same NSID.
    pub(super) fn find_open_namespace(
        &self,
        requested: &target_config::NamespaceConfig,
    ) -> Option<&LiveNamespace> {
        let is_it = |served: &&LiveNamespace| {
            // A device that is open for writing can be served read-only, and not the other way round.
            served.requested.uri == requested.uri
                && (requested.is_read_only || !served.descriptor.claim().is_read_only())
        };
        let mut found = self.namespaces.iter().filter(is_it);
        let same = found.clone().find(|served| served.requested.nsid == requested.nsid);
        same.or_else(|| found.next())
    }

    fn ana_states_by_port(
        &self,
        listeners: &[LiveListener],
    ) -> BTreeMap<u16, Vec<(u32, AnaState)>> {
        let port = |at: &usize| {
            let paths = self.requested.paths.iter().filter(|path| path.listener == *at);
            let states = paths.map(|path| (path.ana_group, ana_state(path.access)));
            let of_group = self.ana_states.iter().map(|(group, state)| (*group, *state));
            let states = states.chain(of_group).collect();
            Some((listeners.get(*at)?.number, states))
        };
        self.requested.listeners.iter().filter_map(port).collect()
    }

    fn allowed_hosts(&self) -> AllowedHosts {
        match &self.requested.hosts {
            target_config::HostsConfig::Any => AllowedHosts::Any,
            target_config::HostsConfig::Only(hosts) => {
                AllowedHosts::Listed(hosts.iter().cloned().collect())
            }
        }
    }

    fn namespace_masks(&self) -> BTreeMap<u32, BTreeSet<String>> {
        let mask = |served: &LiveNamespace| match &served.requested.hosts {
            target_config::HostsConfig::Any => None,
            target_config::HostsConfig::Only(hosts) => {
                Some((served.requested.nsid, hosts.iter().cloned().collect()))
            }
        };
        self.namespaces.iter().filter_map(mask).collect()
    }

    /// Adds the subsystem to the service.
    pub(super) fn add_to_service(
        &self,
        listeners: &[LiveListener],
        context: &TargetContext,
        changes: &mut AppliedChanges,
    ) {
        let TargetContext { service, state, .. } = context;
        let state = state.as_ref();
        for served in &self.namespaces {
            if let Err(why) = self
                .subsystem
                .add_namespace(served.namespace_config(self.state_directory_and_nqn(state)))
            {
                changes.add_failure(format!("cannot serve {}: {why}", served.requested.uri));
            }
        }
        let plan = SubsystemExportConfig {
            subsystem: self.subsystem.clone(),
            nqn: self.requested.nqn.clone(),
            hosts: self.allowed_hosts(),
            ports: self.ana_states_by_port(listeners),
            model: ControllerModel::Dynamic,
            masks: self.namespace_masks(),
            security: self.security.clone(),
        };
        match service.add_subsystem(plan) {
            Ok(()) => {
                self.set_limits(context);
                changes.add_change(format!("offers {}", self.requested.nqn));
            }
            Err(why) => changes.add_failure(format!("cannot {why}")),
        }
    }

    /// Sets the rate limits, of new and of connected hosts.
    fn set_limits(&self, context: &TargetContext) {
        let TargetContext { service, clock, .. } = context;
        let target_config::SubsystemConfig { nqn, limits, .. } = &self.requested;
        service.set_export_limits(clock.now(), nqn, limits.clone());
    }

    /// Publishes its ANA states.
    pub(super) fn update_ana_states(&self, listeners: &[LiveListener], context: &TargetContext) {
        let change = SubsystemExportUpdate {
            hosts: self.allowed_hosts(),
            ports: self.ana_states_by_port(listeners),
            masks: self.namespace_masks(),
            security: self.security.clone(),
        };
        context.service.update_export(&self.requested.nqn, change);
    }

    /// Ends the associations through ports that now require TLS: a connection in the clear must not
    /// go on. Their hosts connect again.
    pub(super) fn end_associations_at(
        &self,
        before: &Self,
        listeners: &[LiveListener],
        ports: &[u16],
        context: &TargetContext,
    ) {
        if ports.is_empty() {
            return;
        }
        let mut rest = self.ana_states_by_port(listeners);
        rest.retain(|port, _| !ports.contains(port));
        let change = SubsystemExportUpdate {
            hosts: before.allowed_hosts(),
            ports: rest,
            masks: before.namespace_masks(),
            security: before.security.clone(),
        };
        context.service.update_export(&self.requested.nqn, change);
    }

    /// Replaces `before` in place: removes, changes and adds namespaces, hosts and ports.
    pub(super) fn replace_in_service(
        &self,
        before: &Self,
        listeners: &[LiveListener],
        context: &TargetContext,
        changes: &mut AppliedChanges,
    ) {
        let TargetContext { service, state, .. } = context;
        let (nqn, state) = (&self.requested.nqn, state.as_ref());
        let stays = |one: &LiveNamespace, all: &[LiveNamespace]| {
            all.iter().any(|other| one.is_same_namespace(other))
        };
        // Removal comes first, because a new namespace may reuse the NSID.
        for gone in before.namespaces.iter().filter(|gone| !stays(gone, &self.namespaces)) {
            self.subsystem.remove_namespace(gone.requested.nsid);
            changes.add_change(format!("removes namespace {} of {nqn}", gone.requested.nsid));
        }
        let (hosts, ports, masks) =
            (self.allowed_hosts(), self.ana_states_by_port(listeners), self.namespace_masks());
        if self.has_changed_access(before) {
            changes.add_change(format!("changes hosts, masks or paths of {nqn}"));
        }
        // Hosts and masks change before namespaces are added, so that no host sees one that it must
        // not.
        if self.security != before.security {
            changes.add_change(format!("changes keys, requirements or rights of {nqn}"));
        }
        let security = self.security.clone();
        service.update_export(nqn, SubsystemExportUpdate { hosts, ports, masks, security });
        // Also if the file has not changed them: clients may have, and the file applies again.
        self.set_limits(context);
        if self.requested.limits != before.requested.limits {
            changes.add_change(format!("changes rate limits of {nqn}"));
        }
        for new in self.namespaces.iter().filter(|new| !stays(new, &before.namespaces)) {
            match service
                .add_namespace(nqn, new.namespace_config(self.state_directory_and_nqn(state)))
            {
                Ok(nsid) => changes
                    .add_change(format!("adds namespace {nsid} to {nqn}: {}", new.requested.uri)),
                Err(why) => {
                    changes.add_failure(format!("cannot serve {}: {why}", new.requested.uri))
                }
            }
        }
    }

    fn state_directory_and_nqn<'a>(
        &'a self,
        state: Option<&'a StateDirectory>,
    ) -> Option<(&'a StateDirectory, &'a str)> {
        state.map(|state| (state, self.requested.nqn.as_str()))
    }

    fn has_changed_access(&self, before: &Self) -> bool {
        self.requested.hosts != before.requested.hosts
            || self.requested.paths != before.requested.paths
            || self.namespace_masks() != before.namespace_masks()
    }
}

impl LiveNamespace {
    pub(in crate::commands::serve::nvme_tcp) fn nsid(&self) -> u32 {
        self.requested.nsid
    }

    pub(in crate::commands::serve::nvme_tcp) fn uri(&self) -> &Uri {
        &self.requested.uri
    }

    pub(in crate::commands::serve::nvme_tcp) fn description(&self) -> &str {
        &self.description
    }

    pub(in crate::commands::serve::nvme_tcp) fn descriptor(&self) -> &BdevDescriptor {
        &self.descriptor
    }

    /// Namespace configuration for the subsystem; `unchanged` is the state directory and the subsystem NQN.
    pub(super) fn namespace_config(
        &self,
        unchanged: Option<(&StateDirectory, &str)>,
    ) -> NamespaceConfig {
        let disk = || disk_identity::disk_identity(&self.requested.uri, &self.identities);
        let keeper = unchanged
            .map(|(state, nqn)| state.reservation_store(nqn, self.requested.nsid, &disk()));
        NamespaceConfig {
            persistence: keeper
                .map_or(ReservationPersistenceMode::None, ReservationPersistenceMode::Durable),
            nsid: Some(self.requested.nsid),
            ana_group: self.requested.ana_group,
            is_read_only: self.requested.is_read_only,
            cache: self.cache.clone(),
            ..NamespaceConfig::new(Arc::clone(&self.served))
        }
    }

    /// Whether a host finds the same namespace in both: device, NSID, ANA group and write protection.
    pub(super) fn is_same_namespace(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.descriptor, &other.descriptor)
            && self.requested.nsid == other.requested.nsid
            && self.requested.ana_group == other.requested.ana_group
            && self.requested.is_read_only == other.requested.is_read_only
    }

    /// Handles the events of its device. Returns whether the device was removed.
    pub(super) fn handle_device_event(&self, subsystem: &Subsystem) -> bool {
        let mut is_removed = false;
        let Self { requested, descriptor, .. } = self;
        while let Some(event) = descriptor.next_event() {
            match event {
                BdevEvent::Resized { .. } | BdevEvent::Overflowed { .. } => {
                    subsystem.reread_namespace_size(requested.nsid)
                }
                BdevEvent::Removed => is_removed = true,
                BdevEvent::MediumError { lba, blocks } => {
                    let uri = &requested.uri;
                    tracing::warn!(cause = %uri, "{uri:#} has lost {blocks} blocks from {lba} on");
                }
                BdevEvent::MediumChanged => {
                    tracing::info!(cause = %requested.uri, "{} has been changed", requested.uri);
                }
            }
        }
        is_removed
    }
}

/// Creates a subsystem without namespaces.
pub(super) fn new_subsystem(
    requested: &target_config::SubsystemConfig,
    is_of_group: bool,
) -> Result<Subsystem, ApplyError> {
    let config = SubsystemConfig {
        nqn: requested.nqn.clone(),
        model: "tenmil target".to_owned(),
        // As Linux's target: hosts learn of ANA at Identify only, so a state that is set later finds it there.
        ana_groups: target_config::ANA_GROUP_MAX,
        // They would not hold at the next owner of a namespace.
        reservations: !is_of_group,
        ..SubsystemConfig::new(
            requested.serial.as_deref().unwrap_or(&serial_number(&requested.nqn)),
            Vec::new(),
        )
    };
    Subsystem::new(config).map_err(|why| ApplyError {
        refused: Error::usage(why),
        line: requested.line,
        key: "nqn",
    })
}

/// Serial number derived from the NQN, so that it is the same after a restart.
fn serial_number(nqn: &str) -> String {
    let hash = nqn.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{hash:016x}")
}

const fn ana_state(access: AnaStateConfig) -> AnaState {
    match access {
        AnaStateConfig::Optimized => AnaState::Optimized,
        AnaStateConfig::NonOptimized => AnaState::NonOptimized,
        AnaStateConfig::Inaccessible => AnaState::Inaccessible,
    }
}
