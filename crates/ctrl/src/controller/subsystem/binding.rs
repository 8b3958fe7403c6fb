//! To which host NQN a host identifier belongs.
//!
//! Reservations know hosts by their identifiers alone, and every registrant reads those of all others
//! in a report. So within a subsystem an identifier belongs to the NQN that is connected with it or is
//! registered under it, and a Connect of another NQN with that identifier is refused. This holds, in
//! every state, for all pairs of connected controllers and registrants:
//!
//! ```text
//!   same identifier  ⇒  same NQN, or one of the two has none
//! ```
//!
//! A registrant without an NQN comes from a record of a version that wrote none; it belongs to the
//! first NQN that connects with its identifier.

use std::fmt;
use std::sync::Arc;

use super::{Record, State, Subsystem};
use crate::controller::reservation::{Host, HostNqn, Reservations};

/// Why a host may not use an identifier: it belongs to another NQN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostInUse {
    /// That NQN; empty if that host gave none.
    pub nqn: String,
    /// The namespace that it is registered in; none if it is only connected.
    pub registered_in: Option<u32>,
}

impl fmt::Display for HostInUse {
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
    /// Makes a controller that of a host, if the identifier is not another NQN's.
    pub(in crate::controller) fn bind_host(
        &self,
        cntlid: u16,
        host: Host,
        nqn: &Arc<str>,
    ) -> Result<(), HostInUse> {
        let mut state = self.lock();
        state.check_host(host, nqn)?;
        for record in state.records.values_mut() {
            record.reservations.name(host, nqn);
            record.line.beside(|after| after.name(host, nqn));
        }
        if let Some(seat) = state.seats.get_mut(&cntlid) {
            seat.host = host;
            seat.nqn = Some(Arc::clone(nqn));
        }
        self.settle(state);
        Ok(())
    }
}

impl State {
    /// Whether `nqn` may use an identifier.
    fn check_host(&self, host: Host, nqn: &Arc<str>) -> Result<(), HostInUse> {
        let in_use = |nqn: &str, registered_in| HostInUse { nqn: nqn.to_owned(), registered_in };
        let is_other = |found: &&Arc<str>| *found != nqn;
        if let Some((nsid, other)) = self.registered_names(host).find(|(_, found)| is_other(found))
        {
            return Err(in_use(other, Some(nsid)));
        }
        let seats = self.seats.values().filter(|seat| seat.host == host);
        match seats.filter_map(|seat| seat.nqn.as_ref()).find(is_other) {
            Some(other) => Err(in_use(other, None)),
            None => Ok(()),
        }
    }

    /// The NQNs that are registered under an identifier, or will be once that is written down.
    fn registered_names(&self, host: Host) -> impl Iterator<Item = (u32, &Arc<str>)> {
        self.records.values().flat_map(move |record| {
            let states = [Some(&record.reservations), record.line.after()];
            let names = states.into_iter().flatten().filter_map(move |it| it.nqn_of(host));
            names.map(|nqn| (record.nsid, nqn))
        })
    }

    /// Whether the registrants of a namespace that is to be added are the hosts that use their
    /// identifiers here. The error is a line.
    pub(super) fn check_registrants(&self, new: &Record) -> Result<(), String> {
        for (host, nqn) in new.reservations.named_registrants() {
            self.check_host(host, nqn).map_err(|why| {
                format!(
                    "add namespace {}: {nqn} is registered in it with host identifier {host}, which \
                     {why}, expected one NQN for an identifier",
                    new.nsid
                )
            })?;
        }
        Ok(())
    }
}

impl Reservations {
    /// Gives a registrant whose NQN is not known this one.
    fn name(&mut self, host: Host, nqn: &HostNqn) {
        if let Some(registrant) = self.registrant_mut(host) {
            registrant.nqn.get_or_insert_with(|| Arc::clone(nqn));
        }
    }
}
