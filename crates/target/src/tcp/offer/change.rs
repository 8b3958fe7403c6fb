//! What changes about an offer while it stands: whom it does not concern does not notice.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ctrl::controller::{AnaState, NamespaceConfig};
use ctrl::front::fabrics::Over;

use super::{Hosts, Offer, State};
use crate::tcp::association::Association;

/// What an offer is to be from now on, in place of what its plan said.
#[derive(Clone, Debug)]
pub struct OfferChange {
    /// Who may use it.
    pub hosts: Hosts,
    /// At which ports it is shown, and how namespaces of which group are reached there.
    pub ports: BTreeMap<u16, Vec<(u32, AnaState)>>,
    /// Namespaces that only these hosts see.
    pub masks: BTreeMap<u32, BTreeSet<String>>,
}

impl Offer {
    /// Makes a change: associations of hosts that may not use it any more, or that have come by a port
    /// that does not show it any more, end; the others are told what concerns them. Whether it was one.
    pub(in crate::tcp) fn change(&self, change: OfferChange) -> bool {
        let OfferChange { hosts, ports, masks } = change;
        let mut state = self.state();
        if state.hosts == hosts && state.ports == ports && state.masks == masks {
            return false;
        }
        state.hosts = hosts;
        let masks_before = std::mem::replace(&mut state.masks, masks);
        let ports_before = std::mem::replace(&mut state.ports, ports);
        drop(state);
        for association in self.associations() {
            let may_stay = self.admits(&association.host.nqn) && self.is_at(association.port);
            if !may_stay {
                association.front().end(Over::Withdrawn);
                continue;
            }
            let state = self.state();
            self.show(&association, &masks_before, &state);
            let before = ports_before.get(&association.port).map_or(&[][..], Vec::as_slice);
            let after = state.ports.get(&association.port).map_or(&[][..], Vec::as_slice);
            for (group, state) in changed(before, after) {
                self.subsystem.set_ana_state(association.cntlid, group, state);
            }
        }
        true
    }

    /// Shows an association what it may see now, and nothing else.
    fn show(
        &self,
        association: &Arc<Association>,
        before: &BTreeMap<u32, BTreeSet<String>>,
        state: &State,
    ) {
        for nsid in before.keys().chain(state.masks.keys()) {
            let is_shown = state.sees(&association.host.nqn, *nsid);
            self.subsystem.show(association.cntlid, *nsid, is_shown);
        }
    }

    /// Adds a namespace; hosts that may see it are told.
    pub(in crate::tcp) fn add_namespace(&self, config: NamespaceConfig) -> Result<u32, String> {
        let state = self.state();
        let Some((nsid, _)) = config.nsid.and_then(|nsid| state.masks.get_key_value(&nsid)) else {
            return self.subsystem.add_namespace(config);
        };
        // A controller that comes into being just now looks for itself.
        let associations = state.associations.iter();
        let known = associations.filter_map(|(cntlid, known)| Some((*cntlid, known.upgrade()?)));
        let gets_it = known.filter(|(_, known)| state.sees(&known.host.nqn, *nsid));
        let cntlids: BTreeSet<u16> = gets_it.map(|(cntlid, _)| cntlid).collect();
        self.subsystem.add_namespace_for(config, |cntlid| cntlids.contains(&cntlid))
    }
}

impl State {
    /// Whether a host sees a namespace, if it may use the subsystem.
    pub(super) fn sees(&self, host: &str, nsid: u32) -> bool {
        self.masks.get(&nsid).is_none_or(|hosts| hosts.contains(host))
    }
}

/// The groups that are reached in another way than before; a group that is not named is reached as
/// well as can be.
fn changed(before: &[(u32, AnaState)], after: &[(u32, AnaState)]) -> Vec<(u32, AnaState)> {
    let of = |states: &[(u32, AnaState)], group: u32| {
        let found = states.iter().rev().find(|(named, _)| *named == group);
        found.map_or(AnaState::Optimized, |(_, state)| *state)
    };
    let groups: BTreeSet<u32> = before.iter().chain(after).map(|(group, _)| *group).collect();
    let changed = groups.into_iter().filter(|group| of(before, *group) != of(after, *group));
    changed.map(|group| (group, of(after, group))).collect()
}
