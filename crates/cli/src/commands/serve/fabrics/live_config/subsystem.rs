//! Live subsystem with its namespaces, and its transition to a new configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tenmil_base::BlockDevice;
use tenmil_block::uri::Uri;
use tenmil_block::{Bdev, BdevDescriptor, DeviceControl, Event};
use tenmil_nvme_controller::controller::{
    AnaState, NamespaceConfig, Persistence, Subsystem, SubsystemConfig,
};
use tenmil_nvme_controller::namespace::CacheVoucher;
use tenmil_rpc::config::{self, AnaStateConfig};
use tenmil_serve::tcp::{
    ControllerModel, Hosts, StateDirectory, SubsystemExportConfig, SubsystemExportUpdate,
};

use super::{ApplyError, Changes, Listener, TargetContext, disk};
use tenmil_base::Error;

/// Subsystem that is served.
#[derive(Clone)]
pub(in crate::commands::serve::fabrics) struct LiveSubsystem {
    pub(super) asked: config::Subsystem,
    pub(super) subsystem: Subsystem,
    pub(super) namespaces: Vec<LiveNamespace>,
}

/// Namespace that is served.
#[derive(Clone)]
pub(in crate::commands::serve::fabrics) struct LiveNamespace {
    pub(super) asked: config::Namespace,
    pub(super) description: String,
    pub(super) device: Bdev,
    pub(super) descriptor: Arc<BdevDescriptor>,
    /// Confirms to reconnecting hosts that the write cache of the device is still the same instance.
    pub(super) cache: Option<Arc<CacheVoucher>>,
    pub(super) handles: Vec<DeviceControl>,
    /// Identities of the devices below, by URI.
    pub(super) identities: Vec<(Uri, String)>,
}

impl LiveSubsystem {
    pub(in crate::commands::serve::fabrics) fn nqn(&self) -> &str {
        &self.asked.nqn
    }

    pub(in crate::commands::serve::fabrics) fn namespaces(&self) -> &[LiveNamespace] {
        &self.namespaces
    }

    /// Removes the namespaces from the subsystem, which stops persisting their reservations: the next
    /// export of the same namespaces reads the state directory, and queued changes must not be written
    /// after that.
    pub(super) fn let_go(&self) {
        for served in &self.namespaces {
            self.subsystem.remove_namespace(served.asked.nsid);
        }
    }

    /// Whether the fixed properties of the subsystem equal those of `asked`.
    pub(super) fn is_same(&self, asked: &config::Subsystem) -> bool {
        self.asked.serial == asked.serial && self.asked.ana_groups() == asked.ana_groups()
    }

    /// Whether it is the same subsystem as `before` from the hosts' point of view.
    pub(super) fn continues(&self, before: &Self) -> bool {
        self.asked.nqn == before.asked.nqn && before.is_same(&self.asked)
    }

    /// The open device for a namespace of the configuration, preferring the one with the same NSID.
    pub(super) fn opened(&self, asked: &config::Namespace) -> Option<&LiveNamespace> {
        let is_it = |served: &&LiveNamespace| {
            served.asked.uri == asked.uri && served.asked.is_read_only == asked.is_read_only
        };
        let mut found = self.namespaces.iter().filter(is_it);
        let same = found.clone().find(|served| served.asked.nsid == asked.nsid);
        same.or_else(|| found.next())
    }

    fn ports(&self, listeners: &[Listener]) -> BTreeMap<u16, Vec<(u32, AnaState)>> {
        let port = |at: &usize| {
            let paths = self.asked.paths.iter().filter(|path| path.listener == *at);
            let states = paths.map(|path| (path.ana_group, state(path.access))).collect();
            Some((listeners.get(*at)?.number, states))
        };
        self.asked.listeners.iter().filter_map(port).collect()
    }

    fn hosts(&self) -> Hosts {
        match &self.asked.hosts {
            config::Hosts::Any => Hosts::Any,
            config::Hosts::Only(hosts) => Hosts::Listed(hosts.iter().cloned().collect()),
        }
    }

    fn masks(&self) -> BTreeMap<u32, BTreeSet<String>> {
        let mask = |served: &LiveNamespace| match &served.asked.hosts {
            config::Hosts::Any => None,
            config::Hosts::Only(hosts) => {
                Some((served.asked.nsid, hosts.iter().cloned().collect()))
            }
        };
        self.namespaces.iter().filter_map(mask).collect()
    }

    /// Adds the subsystem to the service.
    pub(super) fn offer(
        &self,
        listeners: &[Listener],
        world: &TargetContext,
        changes: &mut Changes,
    ) {
        let TargetContext { service, state, .. } = world;
        let state = state.as_ref();
        for served in &self.namespaces {
            if let Err(why) = self.subsystem.add_namespace(served.config(self.kept(state))) {
                changes.fail(format!("cannot serve {}: {why}", served.asked.uri));
            }
        }
        let plan = SubsystemExportConfig {
            subsystem: self.subsystem.clone(),
            nqn: self.asked.nqn.clone(),
            hosts: self.hosts(),
            ports: self.ports(listeners),
            model: ControllerModel::Dynamic,
            masks: self.masks(),
        };
        match service.add_subsystem(plan) {
            Ok(()) => changes.note(format!("offers {}", self.asked.nqn)),
            Err(why) => changes.fail(format!("cannot {why}")),
        }
    }

    /// Replaces `before` in place: removes, changes and adds namespaces, hosts and ports.
    pub(super) fn replace(
        &self,
        before: &Self,
        listeners: &[Listener],
        world: &TargetContext,
        changes: &mut Changes,
    ) {
        let TargetContext { service, state, .. } = world;
        let (nqn, state) = (&self.asked.nqn, state.as_ref());
        let stays = |one: &LiveNamespace, all: &[LiveNamespace]| {
            all.iter().any(|other| one.continues(other))
        };
        // Removal comes first, because a new namespace may reuse the NSID.
        for gone in before.namespaces.iter().filter(|gone| !stays(gone, &self.namespaces)) {
            self.subsystem.remove_namespace(gone.asked.nsid);
            changes.note(format!("removes namespace {} of {nqn}", gone.asked.nsid));
        }
        let (hosts, ports, masks) = (self.hosts(), self.ports(listeners), self.masks());
        if self.is_changed(before) {
            changes.note(format!("changes hosts, masks or paths of {nqn}"));
        }
        // Hosts and masks change before namespaces are added, so that no host sees one that it must
        // not.
        service.change(nqn, SubsystemExportUpdate { hosts, ports, masks });
        for new in self.namespaces.iter().filter(|new| !stays(new, &before.namespaces)) {
            match service.add_namespace(nqn, new.config(self.kept(state))) {
                Ok(nsid) => {
                    changes.note(format!("adds namespace {nsid} to {nqn}: {}", new.asked.uri))
                }
                Err(why) => changes.fail(format!("cannot serve {}: {why}", new.asked.uri)),
            }
        }
    }

    fn kept<'a>(
        &'a self,
        state: Option<&'a StateDirectory>,
    ) -> Option<(&'a StateDirectory, &'a str)> {
        state.map(|state| (state, self.asked.nqn.as_str()))
    }

    fn is_changed(&self, before: &Self) -> bool {
        self.asked.hosts != before.asked.hosts
            || self.asked.paths != before.asked.paths
            || self.masks() != before.masks()
    }
}

impl LiveNamespace {
    pub(in crate::commands::serve::fabrics) fn nsid(&self) -> u32 {
        self.asked.nsid
    }

    pub(in crate::commands::serve::fabrics) fn uri(&self) -> &Uri {
        &self.asked.uri
    }

    pub(in crate::commands::serve::fabrics) fn description(&self) -> &str {
        &self.description
    }

    pub(in crate::commands::serve::fabrics) fn descriptor(&self) -> &BdevDescriptor {
        &self.descriptor
    }

    /// Namespace configuration for the subsystem; `kept` is the state directory and the subsystem NQN.
    pub(super) fn config(&self, kept: Option<(&StateDirectory, &str)>) -> NamespaceConfig {
        let disk = || disk::identity(&self.asked.uri, &self.identities);
        let keeper = kept.map(|(state, nqn)| state.keeper(nqn, self.asked.nsid, &disk()));
        NamespaceConfig {
            persistence: keeper.map_or(Persistence::None, Persistence::Durable),
            nsid: Some(self.asked.nsid),
            ana_group: self.asked.ana_group,
            is_read_only: self.asked.is_read_only,
            cache: self.cache.clone(),
            ..NamespaceConfig::new(Arc::clone(&self.descriptor) as Arc<dyn BlockDevice>)
        }
    }

    /// Whether a host finds the same namespace in both: device, NSID and ANA group.
    pub(super) fn continues(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.descriptor, &other.descriptor)
            && self.asked.nsid == other.asked.nsid
            && self.asked.ana_group == other.asked.ana_group
    }

    /// Handles the events of its device.
    pub(super) fn handle_device_event(&self, subsystem: &Subsystem) {
        let Self { asked, descriptor, .. } = self;
        while let Some(event) = descriptor.next_event() {
            match event {
                Event::Resized { .. } | Event::Overflowed { .. } => subsystem.resized(asked.nsid),
                Event::Removed => {
                    subsystem.remove_namespace(asked.nsid);
                }
                Event::MediumError { lba, blocks } => {
                    let uri = &asked.uri;
                    tracing::warn!(cause = %uri, "{uri:#} has lost {blocks} blocks from {lba} on");
                }
                Event::MediumChanged => {
                    tracing::info!(cause = %asked.uri, "{} has been changed", asked.uri);
                }
            }
        }
    }
}

/// Creates a subsystem without namespaces.
pub(super) fn subsystem(asked: &config::Subsystem) -> Result<Subsystem, ApplyError> {
    let config = SubsystemConfig {
        nqn: asked.nqn.clone(),
        model: "tenmil target".to_owned(),
        ana_groups: asked.ana_groups(),
        ..SubsystemConfig::new(asked.serial.as_deref().unwrap_or(&serial(&asked.nqn)), Vec::new())
    };
    Subsystem::new(config).map_err(|why| ApplyError {
        refused: Error::usage(why),
        line: asked.line,
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
