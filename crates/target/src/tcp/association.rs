//! An association: a host, a controller, and the connections between the two (Base 2.1 §1.5, §3.3).

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ctrl::controller::{HostIdentity, Instance};
use ctrl::front::fabrics::FabricsFrontEnd;
use wire::admin::CrossControllerReset;

use super::offer::Offer;

/// What the connections of one host to one controller share. It ends with the last of them, and the
/// controller with it.
pub(super) struct Association {
    pub(super) cntlid: u16,
    pub(super) host: HostNames,
    /// By which port it has come.
    pub(super) port: u16,
    /// Which life of the controller it is.
    instance: Option<Instance>,
    front: Mutex<FabricsFrontEnd>,
    /// Goes last: its number is free when its controller is gone.
    place: Place,
}

/// A number among those of a subsystem's controllers.
struct Place {
    offer: Arc<Offer>,
    cntlid: u16,
    /// The life of the controller that is gone, with nothing of it under way.
    ended: Option<Instance>,
}

/// The names that a host gives with Connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HostNames {
    /// HOSTNQN; empty if the host gives none.
    pub(super) nqn: String,
    /// HOSTID; zero identifies no host.
    pub(super) identifier: u128,
}

impl HostNames {
    /// Whether two controllers have the same host. One that gives no identifier is the same as no
    /// other (Base 2.1 §5.1.25.1.28).
    pub(super) fn is_same_host(&self, other: &Self) -> bool {
        self.identifier != 0 && self == other
    }

    /// The NQN, for messages.
    pub(super) fn shown(&self) -> &str {
        if self.nqn.is_empty() { "a host without an NQN" } else { &self.nqn }
    }

    /// The host identifier, for messages: as nvme-cli shows it.
    pub(super) fn identifier_shown(&self) -> String {
        HostIdentity::Extended(self.identifier).to_string()
    }
}

impl Association {
    pub(super) fn new(
        offer: Arc<Offer>,
        cntlid: u16,
        (host, port): (HostNames, u16),
        mut front: FabricsFrontEnd,
    ) -> Arc<Self> {
        let place = Place { offer, cntlid, ended: None };
        let instance = front.controller().configuration().instance;
        Arc::new(Self { cntlid, host, port, instance, front: Mutex::new(front), place })
    }

    /// Whether it is the one that a Cross-Controller Reset names, and no other under that number.
    pub(super) fn is_meant(&self, reset: &CrossControllerReset) -> bool {
        self.cntlid == reset.icid
            && self.instance.is_some_and(|Instance { uniquifier, random, .. }| {
                (uniquifier, random) == (reset.ciu, reset.cirn)
            })
    }

    /// What is asked rarely: nothing of it is on the way of an I/O.
    pub(super) fn front(&self) -> MutexGuard<'_, FabricsFrontEnd> {
        self.front.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn offer(&self) -> &Arc<Offer> {
        &self.place.offer
    }
}

impl Drop for Association {
    fn drop(&mut self) {
        let front = self.front.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Commands that were given up may still take effect.
        self.place.ended = self.instance.filter(|_| front.is_drained());
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.offer.leave(self.cntlid, self.ended);
    }
}

impl fmt::Debug for Association {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Association")
            .field("cntlid", &self.cntlid)
            .field("host", &self.host)
            .field("subsystem", &self.place.offer.nqn())
            .finish_non_exhaustive()
    }
}
