//! Live subsystem with its namespaces, and its transition to a new configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tenmil_base::BlockDevice;
use tenmil_block::uri::Uri;
use tenmil_block::{Bdev, BdevDescriptor, BdevEvent, DeviceControl};
use tenmil_nvme_controller::controller::{
    AnaState, NamespaceConfig, Persistence, Subsystem, SubsystemConfig,
};
use tenmil_nvme_controller::namespace::RevocableCacheInstance;
use tenmil_rpc::config::{self, AnaStateConfig};
use tenmil_serve::tcp::{
    ControllerModel, Hosts, StateDirectory, SubsystemExportConfig, SubsystemExportUpdate,
};

use super::{ApplyError, Changes, Listener, TargetContext, disk};
use tenmil_base::Error;

/// Subsystem that is served.
#[derive(Clone)]
pub(in crate::commands::serve::fabrics) struct LiveSubsystem {
    pub(super) requested: config::Subsystem,
    pub(super) subsystem: Subsystem,
    pub(super) namespaces: Vec<LiveNamespace>,
}

/// Namespace that is served.
#[derive(Clone)]
pub(in crate::commands::serve::fabrics) struct LiveNamespace {
    pub(super) requested: config::Namespace,
    pub(super) description: String,
    pub(super) device: Bdev,
    pub(super) descriptor: Arc<BdevDescriptor>,
    /// Confirms to reconnecting hosts that the write cache of the device is still the same instance.
    pub(super) cache: Option<Arc<RevocableCacheInstance>>,
    pub(super) handles: Vec<DeviceControl>,
    /// Identities of the devices below, by URI.
    pub(super) identities: Vec<(Uri, String)>,
}

impl LiveSubsystem {
    pub(in crate::commands::serve::fabrics) fn nqn(&self) -> &str {
        &self.requested.nqn
    }

    pub(in crate::commands::serve::fabrics) fn namespaces(&self) -> &[LiveNamespace] {
        &self.namespaces
    }

    /// Removes the namespaces from the subsystem, which stops persisting their reservations: the next
    /// export of the same namespaces reads the state directory, and queued changes must not be written
    /// after that.
    pub(super) fn let_go(&self) {
        for served in &self.namespaces {
            self.subsystem.remove_namespace(served.requested.nsid);
        }
    }

    /// Whether the fixed properties of the subsystem equal those of `requested`.
    pub(super) fn is_same(&self, requested: &config::Subsystem) -> bool {
        self.requested.serial == requested.serial
            && self.requested.ana_groups() == requested.ana_groups()
    }

    /// Whether it is the same subsystem as `before` from the hosts' point of view.
    pub(super) fn continues(&self, before: &Self) -> bool {
        self.requested.nqn == before.requested.nqn && before.is_same(&self.requested)
    }

    /// The open device for a namespace of the configuration, preferring the one with the same NSID.
    pub(super) fn opened(&self, requested: &config::Namespace) -> Option<&LiveNamespace> {
        let is_it = |served: &&LiveNamespace| {
            served.requested.uri == requested.uri
                && served.requested.is_read_only == requested.is_read_only
        };
        let mut found = self.namespaces.iter().filter(is_it);
        let same = found.clone().find(|served| served.requested.nsid == requested.nsid);
        same.or_else(|| found.next())
    }

    fn ports(&self, listeners: &[Listener]) -> BTreeMap<u16, Vec<(u32, AnaState)>> {
        let port = |at: &usize| {
            let paths = self.requested.paths.iter().filter(|path| path.listener == *at);
            let states = paths.map(|path| (path.ana_group, state(path.access))).collect();
            Some((listeners.get(*at)?.number, states))
        };
        self.requested.listeners.iter().filter_map(port).collect()
    }

    fn hosts(&self) -> Hosts {
        match &self.requested.hosts {
            config::Hosts::Any => Hosts::Any,
            config::Hosts::Only(hosts) => Hosts::Listed(hosts.iter().cloned().collect()),
        }
    }

    fn masks(&self) -> BTreeMap<u32, BTreeSet<String>> {
        let mask = |served: &LiveNamespace| match &served.requested.hosts {
            config::Hosts::Any => None,
            config::Hosts::Only(hosts) => {
                Some((served.requested.nsid, hosts.iter().cloned().collect()))
            }
        };
        self.namespaces.iter().filter_map(mask).collect()
    }

    /// Adds the subsystem to the service.
    pub(super) fn offer(
        &self,
        listeners: &[Listener],
        context: &TargetContext,
        changes: &mut Changes,
    ) {
        let TargetContext { service, state, .. } = context;
        let state = state.as_ref();
        for served in &self.namespaces {
            if let Err(why) = self.subsystem.add_namespace(served.config(self.unchanged(state))) {
                changes.fail(format!("cannot serve {}: {why}", served.requested.uri));
            }
        }
        let plan = SubsystemExportConfig {
            subsystem: self.subsystem.clone(),
            nqn: self.requested.nqn.clone(),
            hosts: self.hosts(),
            ports: self.ports(listeners),
            model: ControllerModel::Dynamic,
            masks: self.masks(),
        };
        match service.add_subsystem(plan) {
            Ok(()) => changes.record(format!("offers {}", self.requested.nqn)),
            Err(why) => changes.fail(format!("cannot {why}")),
        }
    }

    /// Replaces `before` in place: removes, changes and adds namespaces, hosts and ports.
    pub(super) fn replace(
        &self,
        before: &Self,
        listeners: &[Listener],
        context: &TargetContext,
        changes: &mut Changes,
    ) {
        let TargetContext { service, state, .. } = context;
        let (nqn, state) = (&self.requested.nqn, state.as_ref());
        let stays = |one: &LiveNamespace, all: &[LiveNamespace]| {
            all.iter().any(|other| one.continues(other))
        };
        // Removal comes first, because a new namespace may reuse the NSID.
        for gone in before.namespaces.iter().filter(|gone| !stays(gone, &self.namespaces)) {
            self.subsystem.remove_namespace(gone.requested.nsid);
            changes.record(format!("removes namespace {} of {nqn}", gone.requested.nsid));
        }
        let (hosts, ports, masks) = (self.hosts(), self.ports(listeners), self.masks());
        if self.is_changed(before) {
            changes.record(format!("changes hosts, masks or paths of {nqn}"));
        }
        // Hosts and masks change before namespaces are added, so that no host sees one that it must
        // not.
        service.update(nqn, SubsystemExportUpdate { hosts, ports, masks });
        for new in self.namespaces.iter().filter(|new| !stays(new, &before.namespaces)) {
            match service.add_namespace(nqn, new.config(self.unchanged(state))) {
                Ok(nsid) => {
                    changes.record(format!("adds namespace {nsid} to {nqn}: {}", new.requested.uri))
                }
                Err(why) => changes.fail(format!("cannot serve {}: {why}", new.requested.uri)),
            }
        }
    }

    fn unchanged<'a>(
        &'a self,
        state: Option<&'a StateDirectory>,
    ) -> Option<(&'a StateDirectory, &'a str)> {
        state.map(|state| (state, self.requested.nqn.as_str()))
    }

    fn is_changed(&self, before: &Self) -> bool {
        self.requested.hosts != before.requested.hosts
            || self.requested.paths != before.requested.paths
            || self.masks() != before.masks()
    }
}

impl LiveNamespace {
    pub(in crate::commands::serve::fabrics) fn nsid(&self) -> u32 {
        self.requested.nsid
    }

    pub(in crate::commands::serve::fabrics) fn uri(&self) -> &Uri {
        &self.requested.uri
    }

    pub(in crate::commands::serve::fabrics) fn description(&self) -> &str {
        &self.description
    }

    pub(in crate::commands::serve::fabrics) fn descriptor(&self) -> &BdevDescriptor {
        &self.descriptor
    }

    /// Namespace configuration for the subsystem; `unchanged` is the state directory and the subsystem NQN.
    pub(super) fn config(&self, unchanged: Option<(&StateDirectory, &str)>) -> NamespaceConfig {
        let disk = || disk::identity(&self.requested.uri, &self.identities);
        let keeper = unchanged
            .map(|(state, nqn)| state.reservation_store(nqn, self.requested.nsid, &disk()));
        NamespaceConfig {
            persistence: keeper.map_or(Persistence::None, Persistence::Durable),
            nsid: Some(self.requested.nsid),
            ana_group: self.requested.ana_group,
            is_read_only: self.requested.is_read_only,
            cache: self.cache.clone(),
            ..NamespaceConfig::new(Arc::clone(&self.descriptor) as Arc<dyn BlockDevice>)
        }
    }

    /// Whether a host finds the same namespace in both: device, NSID and ANA group.
    pub(super) fn continues(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.descriptor, &other.descriptor)
            && self.requested.nsid == other.requested.nsid
            && self.requested.ana_group == other.requested.ana_group
    }

    /// Handles the events of its device.
    pub(super) fn handle_device_event(&self, subsystem: &Subsystem) {
        let Self { requested, descriptor, .. } = self;
        while let Some(event) = descriptor.next_event() {
            match event {
                BdevEvent::Resized { .. } | BdevEvent::Overflowed { .. } => {
                    subsystem.update_size(requested.nsid)
                }
                BdevEvent::Removed => {
                    subsystem.remove_namespace(requested.nsid);
                }
                BdevEvent::MediumError { lba, blocks } => {
                    let uri = &requested.uri;
                    tracing::warn!(cause = %uri, "{uri:#} has lost {blocks} blocks from {lba} on");
                }
                BdevEvent::MediumChanged => {
                    tracing::info!(cause = %requested.uri, "{} has been changed", requested.uri);
                }
            }
        }
    }
}

/// Creates a subsystem without namespaces.
pub(super) fn subsystem(requested: &config::Subsystem) -> Result<Subsystem, ApplyError> {
    let config = SubsystemConfig {
        nqn: requested.nqn.clone(),
        model: "tenmil target".to_owned(),
        ana_groups: requested.ana_groups(),
        ..SubsystemConfig::new(
            requested.serial.as_deref().unwrap_or(&serial(&requested.nqn)),
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
fn serial(nqn: &str) -> String {
    let hash = nqn.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{hash:016x}")
}

const fn state(access: AnaStateConfig) -> AnaState {
    match access {
        AnaStateConfig::Optimized => AnaState::Optimized,
        AnaStateConfig::NonOptimized => AnaState::NonOptimized,
        AnaStateConfig::Inaccessible => AnaState::Inaccessible,
    }
}
