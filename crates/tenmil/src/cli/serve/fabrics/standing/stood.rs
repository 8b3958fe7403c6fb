//! A subsystem that is served, with its namespaces, and how it becomes another.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use base::Medium;
use block::uri::Uri;
use block::{Descriptor, Device, Event, Handle};
use control::configuration::{self, Access};
use ctrl::controller::{AnaState, NamespaceConfig, Persistence, Subsystem, SubsystemConfig};
use ctrl::namespace::CacheVoucher;
use target::tcp::{ControllerModel, Hosts, OfferChange, OfferPlan, StateDirectory};

use super::{Changes, Listener, Unfit, World, disk};
use crate::Refused;

/// A subsystem that is served.
#[derive(Clone)]
pub(in crate::cli::serve::fabrics) struct Stood {
    pub(super) asked: configuration::Subsystem,
    pub(super) subsystem: Subsystem,
    pub(super) namespaces: Vec<Served>,
}

/// A namespace that is served.
#[derive(Clone)]
pub(in crate::cli::serve::fabrics) struct Served {
    pub(super) asked: configuration::Namespace,
    pub(super) description: String,
    pub(super) device: Device,
    pub(super) descriptor: Arc<Descriptor>,
    /// Says to hosts that come back that the cache of its device is the same as ever.
    pub(super) cache: Option<Arc<CacheVoucher>>,
    pub(super) handles: Vec<Handle>,
    /// What the devices that it stands on are known by.
    pub(super) identities: Vec<(Uri, String)>,
}

impl Stood {
    pub(in crate::cli::serve::fabrics) fn nqn(&self) -> &str {
        &self.asked.nqn
    }

    pub(in crate::cli::serve::fabrics) fn namespaces(&self) -> &[Served] {
        &self.namespaces
    }

    /// Nothing of it is kept any more: whoever offers the same namespaces next reads what is on the disk,
    /// and changes that wait here must not come behind that.
    pub(super) fn let_go(&self) {
        for served in &self.namespaces {
            self.subsystem.remove_namespace(served.asked.nsid);
        }
    }

    /// Whether what never changes about a subsystem is what is asked for.
    pub(super) fn is_same(&self, asked: &configuration::Subsystem) -> bool {
        self.asked.serial == asked.serial && self.asked.ana_groups() == asked.ana_groups()
    }

    /// Whether it is what `before` was, for its hosts.
    pub(super) fn continues(&self, before: &Self) -> bool {
        self.asked.nqn == before.asked.nqn && before.is_same(&self.asked)
    }

    /// The device that a namespace asks for, if it is open; the one that has its number rather than
    /// another.
    pub(super) fn opened(&self, asked: &configuration::Namespace) -> Option<&Served> {
        let is_it = |served: &&Served| {
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
            configuration::Hosts::Any => Hosts::Any,
            configuration::Hosts::Only(hosts) => Hosts::Listed(hosts.iter().cloned().collect()),
        }
    }

    fn masks(&self) -> BTreeMap<u32, BTreeSet<String>> {
        let mask = |served: &Served| match &served.asked.hosts {
            configuration::Hosts::Any => None,
            configuration::Hosts::Only(hosts) => {
                Some((served.asked.nsid, hosts.iter().cloned().collect()))
            }
        };
        self.namespaces.iter().filter_map(mask).collect()
    }

    /// Offers it, for the first time or anew.
    pub(super) fn offer(&self, listeners: &[Listener], world: &World, changes: &mut Changes) {
        let World { service, state, .. } = world;
        let state = state.as_ref();
        for served in &self.namespaces {
            if let Err(why) = self.subsystem.add_namespace(served.config(self.kept(state))) {
                changes.fail(format!("cannot serve {}: {why}", served.asked.uri));
            }
        }
        let plan = OfferPlan {
            subsystem: self.subsystem.clone(),
            nqn: self.asked.nqn.clone(),
            hosts: self.hosts(),
            ports: self.ports(listeners),
            model: ControllerModel::Dynamic,
            masks: self.masks(),
        };
        match service.offer(plan) {
            Ok(()) => changes.note(format!("offers {}", self.asked.nqn)),
            Err(why) => changes.fail(format!("cannot {why}")),
        }
    }

    /// Takes the place of what was offered until now.
    pub(super) fn replace(
        &self,
        before: &Self,
        listeners: &[Listener],
        world: &World,
        changes: &mut Changes,
    ) {
        let World { service, state, .. } = world;
        let (nqn, state) = (&self.asked.nqn, state.as_ref());
        let stays = |one: &Served, all: &[Served]| all.iter().any(|other| one.continues(other));
        for gone in before.namespaces.iter().filter(|gone| !stays(gone, &self.namespaces)) {
            self.subsystem.remove_namespace(gone.asked.nsid);
            changes.note(format!("removes namespace {} of {nqn}", gone.asked.nsid));
        }
        let (hosts, ports, masks) = (self.hosts(), self.ports(listeners), self.masks());
        if self.is_changed(before) {
            changes.note(format!("changes hosts, masks or paths of {nqn}"));
        }
        service.change(nqn, OfferChange { hosts, ports, masks });
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

impl Served {
    pub(in crate::cli::serve::fabrics) fn nsid(&self) -> u32 {
        self.asked.nsid
    }

    pub(in crate::cli::serve::fabrics) fn uri(&self) -> &Uri {
        &self.asked.uri
    }

    pub(in crate::cli::serve::fabrics) fn description(&self) -> &str {
        &self.description
    }

    pub(in crate::cli::serve::fabrics) fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    /// What it is for its subsystem, which has this name and keeps its reservations there.
    pub(super) fn config(&self, kept: Option<(&StateDirectory, &str)>) -> NamespaceConfig {
        let disk = || disk::identity(&self.asked.uri, &self.identities);
        let keeper = kept.map(|(state, nqn)| state.keeper(nqn, self.asked.nsid, &disk()));
        NamespaceConfig {
            persistence: keeper.map_or(Persistence::None, Persistence::Kept),
            nsid: Some(self.asked.nsid),
            ana_group: self.asked.ana_group,
            is_read_only: self.asked.is_read_only,
            cache: self.cache.clone(),
            ..NamespaceConfig::new(Arc::clone(&self.descriptor) as Arc<dyn Medium>)
        }
    }

    /// Whether a host finds in one what it had in the other.
    pub(super) fn continues(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.descriptor, &other.descriptor)
            && self.asked.nsid == other.asked.nsid
            && self.asked.ana_group == other.asked.ana_group
    }

    /// Passes on what has happened to its device.
    pub(super) fn hear(&self, subsystem: &Subsystem) {
        let Self { asked, descriptor, .. } = self;
        while let Some(event) = descriptor.next_event() {
            match event {
                Event::Resized { .. } | Event::Overflowed { .. } => subsystem.resized(asked.nsid),
                Event::Removed => {
                    subsystem.remove_namespace(asked.nsid);
                }
                Event::MediumError { lba, blocks } => {
                    let uri = &asked.uri;
                    tracing::warn!(cause = %uri, "{uri} has lost {blocks} blocks from {lba} on");
                }
                Event::MediumChanged => {
                    tracing::info!(cause = %asked.uri, "{} has been changed", asked.uri);
                }
            }
        }
    }
}

/// A subsystem without namespaces.
pub(super) fn subsystem(asked: &configuration::Subsystem) -> Result<Subsystem, Unfit> {
    let config = SubsystemConfig {
        nqn: asked.nqn.clone(),
        model: "tenmil target".to_owned(),
        ana_groups: asked.ana_groups(),
        ..SubsystemConfig::new(asked.serial.as_deref().unwrap_or(&serial(&asked.nqn)), Vec::new())
    };
    Subsystem::new(config).map_err(|why| Unfit {
        refused: Refused::caller(why),
        line: asked.line,
        key: "nqn",
    })
}

/// A serial number made from a name, so that it is the same after a restart.
fn serial(nqn: &str) -> String {
    let hash = nqn.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{hash:016x}")
}

const fn state(access: Access) -> AnaState {
    match access {
        Access::Optimized => AnaState::Optimized,
        Access::NonOptimized => AnaState::NonOptimized,
        Access::Inaccessible => AnaState::Inaccessible,
    }
}
