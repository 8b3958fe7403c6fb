//! Exclusion of other hosts by the devices of a pool or a mirror: an NVMe reservation, Write Exclusive.
//!
//! The key is derived from the identity of the owner that the superblocks name. So another host can see that
//! the owner writes through the reservation, and can take the pool over without a doubt: once it has preempted
//! that key, the device refuses every write of the former owner. A device that takes no reservations, or
//! rejects them, excludes no host, and is no error.
//!
//! After such a takeover the former owner may still run, so the reservation is kept when the pool is closed:
//! [`KEPT`] in the key informs the next process of this host.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{BlockDevice, Error, ReservationHolder};

/// The reservations of one owner.
pub(super) struct OwnerReservations {
    key: u64,
    held: Mutex<Vec<HeldReservation>>,
}

/// A device that this owner has reserved.
struct HeldReservation {
    medium: Arc<dyn BlockDevice>,
    key: u64,
}

/// Which reservation of another host is preempted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PreemptionPolicy {
    /// None.
    Nothing,
    /// That of an owner that is known to have ended.
    Departed(u128),
    /// That of an owner that may still run.
    Owner(u128),
    /// Any: the superblocks name no owner.
    Any,
    /// Any, from an owner that may still run.
    Force,
}

/// What a device does about the writes of other hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ReservationOutcome {
    /// It refuses them from now on. Another host held the reservation, or not.
    Reserved { was_preempted: bool },
    /// It takes no reservations, or refused one for this reason.
    Not(Option<String>),
}

/// Set in a key whose reservation is kept when the pool is closed.
const KEPT: u64 = 1 << 63;

impl OwnerReservations {
    pub(super) fn new(owner: u128) -> Self {
        Self { key: reservation_key(owner), held: Mutex::default() }
    }

    /// Whether the owner of this identity is the one that the device lets write, so that preempting it
    /// excludes it.
    ///
    /// # Errors
    ///
    /// Why it is not.
    pub(super) fn check_holds_reservation(
        medium: &dyn BlockDevice,
        owner: u128,
    ) -> Result<(), Error> {
        let Some(reservations) = medium.reservations() else {
            return Err(Error::environment("it takes no reservations"));
        };
        match reservations.holder()? {
            Some(holder)
                if !holder.is_this_host && holder.key & !KEPT == reservation_key(owner) =>
            {
                Ok(())
            }
            Some(ReservationHolder { host, key, .. }) => Err(Error::environment(format!(
                "host {host} has reserved it, with key {key:016x}, which is not the owner's"
            ))),
            None => Err(Error::environment("it is not reserved")),
        }
    }

    /// Reserves a device, if it takes reservations.
    ///
    /// # Errors
    ///
    /// If another host has the reservation, which is not to be preempted.
    pub(super) fn acquire(
        &self,
        medium: &Arc<dyn BlockDevice>,
        preempts: PreemptionPolicy,
    ) -> Result<ReservationOutcome, Error> {
        let Some(reservations) = medium.reservations() else {
            return Ok(ReservationOutcome::Not(None));
        };
        let holder = match reservations.holder() {
            Ok(holder) => holder,
            Err(why) => return Ok(ReservationOutcome::Not(Some(why.to_string()))),
        };
        let preempted = match &holder {
            Some(holder) if !holder.is_this_host && !preempts.permits_key(holder.key) => {
                return Err(Error::environment(conflict_message(holder)));
            }
            Some(holder) if !holder.is_this_host => Some(holder.key),
            _ => None,
        };
        let was_kept = holder.is_some_and(|holder| holder.key & KEPT != 0);
        let may_run = match preempts {
            PreemptionPolicy::Force => true,
            PreemptionPolicy::Nothing | PreemptionPolicy::Departed(_) => false,
            PreemptionPolicy::Owner(_) | PreemptionPolicy::Any => preempted.is_some(),
        };
        let key = if was_kept || may_run { self.key | KEPT } else { self.key };
        match reservations.acquire(key, preempted) {
            Ok(true) => {}
            Ok(false) => return Err(Error::environment("another host has reserved it meanwhile")),
            Err(why) => return Ok(ReservationOutcome::Not(Some(why.to_string()))),
        }
        let mut held = self.lock_held();
        held.retain(|one| !Arc::ptr_eq(&one.medium, medium));
        held.push(HeldReservation { medium: Arc::clone(medium), key });
        Ok(ReservationOutcome::Reserved { was_preempted: preempted.is_some() })
    }

    /// Releases what is reserved, except what is kept because a former owner may still run.
    pub(super) fn release(&self) {
        for HeldReservation { medium, key } in std::mem::take(&mut *self.lock_held()) {
            let reservations = medium.reservations().filter(|_| key & KEPT == 0);
            // If that fails, the next process of this host replaces the key.
            let _ = reservations.map(|reservations| reservations.release_and_unregister(key));
        }
    }

    fn lock_held(&self) -> MutexGuard<'_, Vec<HeldReservation>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PreemptionPolicy {
    fn permits_key(self, key: u64) -> bool {
        match self {
            Self::Nothing => false,
            Self::Departed(owner) | Self::Owner(owner) => key & !KEPT == reservation_key(owner),
            Self::Any | Self::Force => true,
        }
    }
}

/// The key of an owner. Zero is no key (Base 2.1 §8.1.22.2).
fn reservation_key(owner: u128) -> u64 {
    let [low, high] = [owner, owner >> 64].map(|part| u64::try_from(part & u128::from(u64::MAX)));
    let folded = low.unwrap_or(0) ^ high.unwrap_or(0);
    (folded & !KEPT).max(1)
}

fn conflict_message(holder: &ReservationHolder) -> String {
    let ReservationHolder { host, key, .. } = holder;
    format!(
        "host {host} has reserved it, with key {key:016x}, so that other hosts cannot write, expected no \
         reservation of another host"
    )
}
