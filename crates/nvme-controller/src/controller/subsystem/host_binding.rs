//! Binding of host identifiers to host NQNs.
//!
//! Reservations identify hosts by their identifiers alone, and every registrant can read the identifiers
//! of all others in a report. Therefore an identifier belongs, within a subsystem, to the NQN that is
//! connected with it or registered under it. A Connect of another NQN with that identifier is rejected.
//! The following holds, in every state, for all pairs of connected controllers and registrants:
//!
//! ```text
//!   same identifier  ⇒  same NQN, or one of the two has none
//! ```
//!
//! A registrant without an NQN comes from a record of a version that stored none; it belongs to the first
//! NQN that connects with its identifier.

use std::fmt;
use std::sync::Arc;
use tenmil_base::Error;

use super::{NamespaceEntry, Subsystem, SubsystemState};
use crate::controller::reservation::{HostId, HostNqn, Reservations};

/// Error: the host identifier belongs to another NQN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostIdentifierInUse {
    /// NQN that owns the identifier; empty if that host gave none.
    pub nqn: String,
    /// Namespace in which it is registered; `None` if it is only connected.
    pub registered_in: Option<u32>,
}

impl fmt::Display for HostIdentifierInUse {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nqn = if self.nqn.is_empty() { "a host without an NQN" } else { &self.nqn };
        match self.registered_in {
            Some(nsid) => {
                write!(out, "belongs to {nqn}, which is registered with it in namespace {nsid}")
            }
            None => write!(out, "belongs to {nqn}, which is connected with it"),
        }
    }
}

impl Subsystem {
    /// Binds a controller to a host, unless the identifier belongs to another NQN.
    pub(in crate::controller) fn bind_host(
        &self,
        cntlid: u16,
        host: HostId,
        nqn: &Arc<str>,
    ) -> Result<(), HostIdentifierInUse> {
        let mut state = self.lock_state();
        state.check_host_nqn(host, nqn)?;
        for record in state.records.values_mut() {
            record.reservations.set_nqn(host, nqn);
            record.change_queue.apply_to_state_being_written(|after| after.set_nqn(host, nqn));
        }
        if let Some(entry) = state.controllers.get_mut(&cntlid) {
            entry.host = host;
            entry.nqn = Some(Arc::clone(nqn));
        }
        self.publish_and_notify(state);
        Ok(())
    }
}

impl SubsystemState {
    /// Checks that `nqn` may use an identifier.
    fn check_host_nqn(&self, host: HostId, nqn: &Arc<str>) -> Result<(), HostIdentifierInUse> {
        let in_use =
            |nqn: &str, registered_in| HostIdentifierInUse { nqn: nqn.to_owned(), registered_in };
        let is_other = |found: &&Arc<str>| *found != nqn;
        if let Some((nsid, other)) = self.registered_nqns(host).find(|(_, found)| is_other(found)) {
            return Err(in_use(other, Some(nsid)));
        }
        let controllers = self.controllers.values().filter(|entry| entry.host == host);
        match controllers.filter_map(|entry| entry.nqn.as_ref()).find(is_other) {
            Some(other) => Err(in_use(other, None)),
            None => Ok(()),
        }
    }

    /// NQNs registered under an identifier, including registrations that are being persisted.
    fn registered_nqns(&self, host: HostId) -> impl Iterator<Item = (u32, &Arc<str>)> {
        self.records.values().flat_map(move |record| {
            let states = [Some(&record.reservations), record.change_queue.state_after_write()];
            let names = states.into_iter().flatten().filter_map(move |it| it.nqn_of(host));
            names.map(|nqn| (record.nsid, nqn))
        })
    }

    /// Checks that the registrants of a namespace to be added do not conflict with the existing bindings.
    /// The error is one line.
    pub(super) fn check_registrant_bindings(&self, new: &NamespaceEntry) -> Result<(), Error> {
        for (host, nqn) in new.reservations.registrants_with_nqn() {
            self.check_host_nqn(host, nqn).map_err(|why| {
                format!(
                    "add namespace {}: {nqn} is registered in it with host identifier {host}, which \
                     {why}, expected one NQN for an identifier",
                    new.nsid
                )
            }).map_err(Error::environment)?;
        }
        Ok(())
    }
}

impl Reservations {
    /// Sets the NQN of a registrant whose NQN is unknown.
    fn set_nqn(&mut self, host: HostId, nqn: &HostNqn) {
        if let Some(registrant) = self.registrant_mut(host) {
            registrant.nqn.get_or_insert_with(|| Arc::clone(nqn));
        }
    }
}
