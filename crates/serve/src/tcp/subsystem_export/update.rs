//! Updates of an exported subsystem at run time, without effect on hosts that they do not concern.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tenmil_base::Error;

use tenmil_nvme_controller::controller::{AnaState, NamespaceConfig};
use tenmil_nvme_controller::transport::fabrics::AssociationEndReason;

use super::{AllowedHosts, ExportState, SubsystemExport};
use crate::tcp::association::Association;
use crate::tcp::security::SubsystemSecurity;

/// New configuration of an exported subsystem.
#[derive(Clone, Debug)]
pub struct SubsystemExportUpdate {
    /// Hosts that may use it.
    pub hosts: AllowedHosts,
    /// Ports at which it is visible, and the ANA state of each group there.
    pub ports: BTreeMap<u16, Vec<(u32, AnaState)>>,
    /// Namespaces that are visible to the listed hosts only.
    pub masks: BTreeMap<u32, BTreeSet<String>>,
    /// What hosts must prove, and their rights.
    pub security: SubsystemSecurity,
}

impl SubsystemExport {
    /// Applies an update. Associations end whose host is no longer allowed, or whose port no longer
    /// shows the subsystem; other hosts are notified of what concerns them. Returns whether
    /// anything changed.
    pub(in crate::tcp) fn apply_update(&self, change: SubsystemExportUpdate) -> bool {
        let SubsystemExportUpdate { hosts, ports, masks, security } = change;
        let mut state = self.lock_state();
        let is_security_same = state.security.security == security;
        if state.hosts == hosts && state.ports == ports && state.masks == masks && is_security_same
        {
            return false;
        }
        state.hosts = hosts;
        if !is_security_same {
            state.security.replace(security);
        }
        let masks_before = std::mem::replace(&mut state.masks, masks);
        let ports_before = std::mem::replace(&mut state.ports, ports);
        drop(state);
        for association in self.associations() {
            let may_stay =
                self.allows_host(&association.host.nqn) && self.is_visible_at(association.port);
            if !may_stay {
                association
                    .lock_transport()
                    .end_association(AssociationEndReason::SubsystemRemoved);
                continue;
            }
            association.end_unless_permitted();
            let rights = self.rights_of_host(&association.host.nqn).namespace_rights();
            self.subsystem.set_namespace_rights(association.cntlid, rights);
            let state = self.lock_state();
            self.update_visible_namespaces(&association, &masks_before, &state);
            let before = ports_before.get(&association.port).map_or(&[][..], Vec::as_slice);
            let after = state.ports.get(&association.port).map_or(&[][..], Vec::as_slice);
            for (group, state) in changed_ana_states(before, after) {
                self.subsystem.set_ana_state(association.cntlid, group, state);
            }
        }
        true
    }

    /// Updates the visibility of masked namespaces for an association.
    fn update_visible_namespaces(
        &self,
        association: &Arc<Association>,
        before: &BTreeMap<u32, BTreeSet<String>>,
        state: &ExportState,
    ) {
        for nsid in before.keys().chain(state.masks.keys()) {
            let is_visible = state.can_see_namespace(&association.host.nqn, *nsid);
            self.subsystem.set_namespace_visible(association.cntlid, *nsid, is_visible);
        }
    }

    /// Adds a namespace and notifies the hosts that can see it.
    pub(in crate::tcp) fn add_namespace(&self, config: NamespaceConfig) -> Result<u32, Error> {
        let state = self.lock_state();
        let Some((nsid, _)) = config.nsid.and_then(|nsid| state.masks.get_key_value(&nsid)) else {
            return self.subsystem.add_namespace(config);
        };
        // A controller that is being created evaluates the masks itself.
        let associations = state.associations.iter();
        let entry = associations.filter_map(|(cntlid, entry)| Some((*cntlid, entry.upgrade()?)));
        // Dropped after the lock is released: the end of an association takes it.
        let present: Vec<_> = entry.collect();
        let affected =
            present.iter().filter(|(_, entry)| state.can_see_namespace(&entry.host.nqn, *nsid));
        let cntlids: BTreeSet<u16> = affected.map(|(cntlid, _)| *cntlid).collect();
        let added =
            self.subsystem.add_namespace_visible_to(config, |cntlid| cntlids.contains(&cntlid));
        drop(state);
        added
    }
}

impl ExportState {
    /// Whether a host that may use the subsystem can see a namespace.
    pub(super) fn can_see_namespace(&self, host: &str, nsid: u32) -> bool {
        self.masks.get(&nsid).is_none_or(|hosts| hosts.contains(host))
    }
}

/// Groups whose ANA state changes. A group that is not listed is optimized.
fn changed_ana_states(
    before: &[(u32, AnaState)],
    after: &[(u32, AnaState)],
) -> Vec<(u32, AnaState)> {
    let of = |states: &[(u32, AnaState)], group: u32| {
        let found = states.iter().rev().find(|(listed, _)| *listed == group);
        found.map_or(AnaState::Optimized, |(_, state)| *state)
    };
    let groups: BTreeSet<u32> = before.iter().chain(after).map(|(group, _)| *group).collect();
    let changed = groups.into_iter().filter(|group| of(before, *group) != of(after, *group));
    changed.map(|group| (group, of(after, group))).collect()
}
