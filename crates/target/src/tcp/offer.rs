//! A subsystem that is offered: to whom, where, and with which controllers.

mod change;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use base::{Instant, Random};
use ctrl::controller::{
    AnaState, Controller, ControllerConfig, HostInUse, Instance, Subsystem, Transport,
};
use ctrl::front::fabrics::Over;
use wire::admin::CrossControllerReset;
use wire::fabrics::{CNTLID_DYNAMIC, CNTLID_MAX, CNTLID_STATIC};

use super::association::{Association, HostNames};
use super::service::Limits;
use crate::address::network_of_peer;

pub use self::change::OfferChange;

/// Who may use a subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hosts {
    /// Anybody.
    Any,
    /// Those with these names.
    Listed(BTreeSet<String>),
}

/// Which controllers a host may ask for (Base 2.1 §3.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControllerModel {
    /// One is made for every association.
    Dynamic,
    /// There are so many, numbered from 1, and a host may ask for one of them or for any.
    Static(u16),
}

/// What is offered.
pub struct OfferPlan {
    /// The subsystem.
    pub subsystem: Subsystem,
    /// Its NVMe Qualified Name, the one that it was made with.
    pub nqn: String,
    /// Who may use it.
    pub hosts: Hosts,
    /// At which ports it is shown, and how namespaces of which group are reached there. A port that
    /// is not here does not show it.
    pub ports: BTreeMap<u16, Vec<(u32, AnaState)>>,
    /// Which controllers there are.
    pub model: ControllerModel,
    /// Namespaces that only these hosts see.
    pub masks: BTreeMap<u32, BTreeSet<String>>,
}

/// An offer that stands.
pub(super) struct Offer {
    nqn: String,
    subsystem: Subsystem,
    model: ControllerModel,
    state: Mutex<State>,
}

struct State {
    hosts: Hosts,
    ports: BTreeMap<u16, Vec<(u32, AnaState)>>,
    masks: BTreeMap<u32, BTreeSet<String>>,
    associations: BTreeMap<u16, Weak<Association>>,
    /// Where the search for a number begins, so that one is not used again at once.
    next: u16,
    /// What tells one life of a controller from the next.
    lives: Random,
    life: u8,
    /// Controllers that are gone, oldest first: what a Cross-Controller Reset may be told of.
    ended: VecDeque<(u16, Instance)>,
    /// It is not offered any more.
    is_withdrawn: bool,
}

/// Why a host gets no controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NoController {
    /// Its name is not among those that may use the subsystem.
    Host,
    /// There is no such controller, or it is not to be asked for.
    Identifier(u16),
    /// All are in use.
    Busy,
    /// Its host identifier belongs to another NQN.
    HostInUse(HostInUse),
    /// This one has ended and its queues have not stopped.
    Unstopped(u16),
    /// There cannot be one.
    Trouble(String),
}

impl Offer {
    pub(super) fn new(plan: OfferPlan) -> Arc<Self> {
        let OfferPlan { subsystem, nqn, hosts, ports, model, masks } = plan;
        let (associations, next, is_withdrawn) = (BTreeMap::new(), 1, false);
        let state = State {
            hosts,
            ports,
            masks,
            associations,
            next,
            lives: Random::new(host::random_seed()),
            life: 0,
            ended: VecDeque::new(),
            is_withdrawn,
        };
        Arc::new(Self { nqn, subsystem, model, state: Mutex::new(state) })
    }

    pub(super) fn nqn(&self) -> &str {
        &self.nqn
    }

    /// Whether it is shown at a port.
    pub(super) fn is_at(&self, port: u16) -> bool {
        self.state().ports.contains_key(&port)
    }

    /// Whether a host may use it.
    pub(super) fn admits(&self, host: &str) -> bool {
        match &self.state().hosts {
            Hosts::Any => true,
            Hosts::Listed(names) => names.contains(host),
        }
    }

    /// Whether it is for hosts that are named.
    pub(super) fn names_hosts(&self) -> bool {
        matches!(self.state().hosts, Hosts::Listed(_))
    }

    /// What discovery says of its controllers.
    pub(super) fn cntlid_told(&self) -> u16 {
        match self.model {
            ControllerModel::Dynamic => CNTLID_DYNAMIC,
            ControllerModel::Static(_) => CNTLID_STATIC,
        }
    }

    /// Opens a controller for a host that has come by `port`.
    pub(super) fn open(
        &self,
        now: Instant,
        asked: u16,
        (port, host, peer): (u16, &HostNames, &str),
        limits: &Limits,
    ) -> Result<Controller, NoController> {
        if !self.admits(&host.nqn) {
            return Err(NoController::Host);
        }
        if !limits.injected_bugs.unfenced_writes
            && let Some(cntlid) = self.unstopped()
        {
            return Err(NoController::Unstopped(cntlid));
        }
        let cntlid = self.number(asked)?;
        let keep_alive_max = limits.admission().keep_alive_max;
        let config = ControllerConfig {
            cntlid,
            queue_entries_max: limits.queue_entries.into(),
            transfer_bytes_max: limits.transfer_bytes_max,
            io_queues_max: limits.io_queues_max,
            vectors: 0,
            sgls: SGLS,
            fused_compare_and_write: true,
            keep_alive_max,
            // Whoever may come under any name does not stay for ever without a word.
            silence_max: (!self.names_hosts()).then_some(keep_alive_max),
            instance: Some(self.instance()),
            transport: Transport::Fabrics {
                command_capsule_bytes: 64 + limits.in_capsule_bytes,
                descriptors_max: 1,
                quiesce: limits.quiesce,
            },
            ..ControllerConfig::default()
        };
        let opened = self.subsystem.controller(now, config);
        let mut controller = opened.map_err(|text| {
            self.leave(cntlid, None);
            NoController::Trouble(text)
        })?;
        if let Err(why) = controller.connect_host(&host.nqn, host.identifier) {
            // Its number is free once the controller is gone.
            drop(controller);
            self.leave(cntlid, None);
            return Err(NoController::HostInUse(why));
        }
        if let Some(address) = network_of_peer(peer).filter(|_| !self.names_hosts()) {
            let most = limits.admission().registrants_per_address_max;
            controller.limit_registrants(&address.to_string(), most);
        }
        let state = self.state();
        for (nsid, hosts) in &state.masks {
            if hosts.contains(&host.nqn) {
                // It may have been added before this controller was known to be this host's.
                self.subsystem.show(cntlid, *nsid, true);
            } else {
                self.subsystem.hide(cntlid, *nsid);
            }
        }
        let states = state.ports.get(&port).cloned().unwrap_or_default();
        drop(state);
        for (group, state) in states {
            self.subsystem.set_ana_state(cntlid, group, state);
        }
        Ok(controller)
    }

    /// What a controller is known by that begins now, and no other before it under its number.
    fn instance(&self) -> Instance {
        let mut state = self.state();
        state.life = state.life.checked_add(1).unwrap_or(1);
        Instance { uniquifier: state.life, random: state.lives.draw(), resets_max: RESETS_MAX }
    }

    /// The number of the controller that is asked for: taken until its association is entered, or has
    /// left.
    fn number(&self, asked: u16) -> Result<u16, NoController> {
        let mut state = self.state();
        let last = match self.model {
            ControllerModel::Dynamic if asked == CNTLID_DYNAMIC => CNTLID_MAX,
            ControllerModel::Dynamic => return Err(NoController::Identifier(asked)),
            ControllerModel::Static(count) => match asked {
                CNTLID_DYNAMIC | CNTLID_STATIC => count,
                1.. if asked <= count => {
                    if state.associations.contains_key(&asked) {
                        return Err(NoController::Busy);
                    }
                    state.associations.insert(asked, Weak::new());
                    return Ok(asked);
                }
                _ => return Err(NoController::Identifier(asked)),
            },
        };
        let first = state.next.min(last);
        let free = (first..=last)
            .chain(1..first)
            .find(|number| !state.associations.contains_key(number))
            .ok_or(NoController::Busy)?;
        state.next = if free == last { 1 } else { free + 1 };
        state.associations.insert(free, Weak::new());
        Ok(free)
    }

    /// An association has come into being. What has changed since its host asked holds for it as well:
    /// it ends at once if the host may not use the offer any more.
    pub(super) fn enter(&self, association: &Arc<Association>) {
        let mut state = self.state();
        state.associations.insert(association.cntlid, Arc::downgrade(association));
        for nsid in state.masks.keys() {
            let is_shown = state.sees(&association.host.nqn, *nsid);
            self.subsystem.show(association.cntlid, *nsid, is_shown);
        }
        let is_withdrawn = state.is_withdrawn || !state.ports.contains_key(&association.port);
        drop(state);
        if is_withdrawn || !self.admits(&association.host.nqn) {
            association.front().end(Over::Withdrawn);
        }
    }

    /// It is not offered any more: all associations end.
    pub(super) fn withdraw(&self) {
        self.state().is_withdrawn = true;
        for association in self.associations() {
            association.front().end(Over::Withdrawn);
        }
    }

    /// A controller is gone; `ended` is its life, if nothing of it is under way.
    pub(super) fn leave(&self, cntlid: u16, ended: Option<Instance>) {
        let mut state = self.state();
        state.associations.remove(&cntlid);
        if let Some(instance) = ended {
            if state.ended.len() == ENDED_MAX {
                state.ended.pop_front();
            }
            state.ended.push_back((cntlid, instance));
        }
    }

    /// Whether this very controller was given out here, and is gone with nothing of it under way.
    pub(super) fn has_ended(&self, reset: &CrossControllerReset) -> bool {
        self.state().ended.iter().any(|(cntlid, life)| {
            (*cntlid, life.uniquifier, life.random) == (reset.icid, reset.ciu, reset.cirn)
        })
    }

    /// An association that has ended and of which a queue may still begin commands.
    fn unstopped(&self) -> Option<u16> {
        let is_unstopped = |association: &Arc<Association>| {
            let front = association.front();
            front.over().is_some() && !front.has_stopped()
        };
        self.associations().iter().find(|it| is_unstopped(it)).map(|it| it.cntlid)
    }

    /// The association of a controller.
    pub(super) fn association(&self, cntlid: u16) -> Option<Arc<Association>> {
        self.state().associations.get(&cntlid).and_then(Weak::upgrade)
    }

    /// All there are.
    pub(super) fn associations(&self) -> Vec<Arc<Association>> {
        self.state().associations.values().filter_map(Weak::upgrade).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Controllers that are gone and still known. Of those before them a Cross-Controller Reset is refused,
/// and its host waits.
const ENDED_MAX: usize = 1024;

/// Resets of other controllers that each may have under way: what a host has paths for, with some to
/// spare.
pub(super) const RESETS_MAX: u8 = 16;

/// SGLs are understood, with an address or as an offset in the capsule, and the transport's data block
/// (Base 2.1 §5.1.13.2.1).
const SGLS: u32 = 1 | 1 << 20 | 1 << 21;

impl fmt::Debug for Offer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Offer").field("nqn", &self.nqn).finish_non_exhaustive()
    }
}

impl fmt::Debug for OfferPlan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("OfferPlan")
            .field("nqn", &self.nqn)
            .field("hosts", &self.hosts)
            .field("ports", &self.ports)
            .field("model", &self.model)
            .finish_non_exhaustive()
    }
}
