//! The devices of a pool refuse the writes of other hosts while this process owns it, where they can.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{BlockDevice, ErrorCategory};
use tenmil_volume::device_table::DeviceTable;
use tenmil_volume::{Pool, PoolRequest};

use super::pool_devices::PoolDevices;
use crate::owner_identity::has_owner_ended;
use crate::owner_reservations::{OwnerReservations, PreemptionPolicy, ReservationOutcome};
use tenmil_base::Error;

/// The reservations of an open pool.
pub(super) struct PoolReservations {
    name: String,
    exclusion: OwnerReservations,
    devices: Mutex<DevicesToReserve>,
}

struct DevicesToReserve {
    media: Vec<Arc<dyn BlockDevice>>,
    /// They are reserved, as far as they can be.
    is_done: bool,
}

impl PoolReservations {
    pub(super) fn new(name: &str, owner: u128, pool_devices: &PoolDevices) -> Self {
        let media =
            pool_devices.members.iter().map(|member| Arc::clone(&member.opened.medium)).collect();
        let devices = Mutex::new(DevicesToReserve { media, is_done: false });
        Self { name: name.into(), exclusion: OwnerReservations::new(owner), devices }
    }

    /// Reserves all devices before the first change, as far as they take reservations.
    ///
    /// # Errors
    ///
    /// Which host has one of them.
    pub(super) fn acquire_reservations(&self, preempts: PreemptionPolicy) -> Result<(), Error> {
        let mut pool = self.lock_devices();
        if !pool.is_done {
            for medium in &pool.media {
                self.exclusion
                    .acquire(medium, preempts)
                    .map_err(|why| self.reservation_error(why))?;
            }
            pool.is_done = true;
        }
        Ok(())
    }

    /// Reserves a device that the pool gains.
    ///
    /// # Errors
    ///
    /// Which host has it.
    pub(super) fn reserve_added_device(&self, medium: &Arc<dyn BlockDevice>) -> Result<(), Error> {
        let mut pool = self.lock_devices();
        if pool.is_done {
            let acquired = self.exclusion.acquire(medium, PreemptionPolicy::Nothing);
            acquired.map_err(|why| self.reservation_error(why))?;
        }
        pool.media.push(Arc::clone(medium));
        Ok(())
    }

    /// Preempts the owner of a pool. Returns it if all devices refuse its writes from now on.
    ///
    /// # Errors
    ///
    /// Which host has one of the devices, if that is not the owner's.
    pub(super) fn preempt_owner(&self, store: &Pool, force: bool) -> Result<Option<u128>, Error> {
        let Some(owner) = store.owner() else {
            return self.acquire_reservations(PreemptionPolicy::Any).map(|()| None);
        };
        if force {
            return self.acquire_reservations(PreemptionPolicy::Force).map(|()| None);
        }
        if has_owner_ended(&owner) {
            return Ok(None);
        }
        let mut pool = self.lock_devices();
        for medium in &pool.media {
            if let Err(why) = OwnerReservations::check_holds_reservation(&**medium, owner.id) {
                let text = format!(
                    "{}: {owner} has the pool open for writing, and its devices do not exclude that \
                     process from writing ({why})",
                    self.name
                );
                return Err(Error::new(ErrorCategory::Environment, text).with_hint(format!(
                    "end that process; if it or its machine has certainly ended: `tenmil pool takeover \
                     {} --force`.",
                    self.name
                )));
            }
        }
        for medium in &pool.media {
            let acquired = self.exclusion.acquire(medium, PreemptionPolicy::Owner(owner.id));
            match acquired.map_err(|why| self.reservation_error(why))? {
                ReservationOutcome::Reserved { was_preempted: true } => {}
                other => {
                    let why = match other {
                        ReservationOutcome::Not(why) => why,
                        ReservationOutcome::Reserved { .. } => None,
                    };
                    let why = why.unwrap_or_else(|| "it was not reserved any more".into());
                    let text = format!("{}: preempt {owner}: {why}", self.name);
                    return Err(Error::new(ErrorCategory::Remote, text));
                }
            }
        }
        pool.is_done = true;
        Ok(Some(owner.id))
    }

    /// Refuses a pool that gained devices while its owner was preempted: those are not reserved.
    ///
    /// # Errors
    ///
    /// How many devices there are.
    pub(super) fn check_device_count_unchanged(
        &self,
        before: &DeviceTable,
        now: &DeviceTable,
    ) -> Result<(), Error> {
        let (found, expected) = (now.count(), before.count());
        if found == expected {
            return Ok(());
        }
        let text = format!(
            "{}: found {found} devices, expected {expected}: the pool gained devices during the takeover",
            self.name
        );
        Err(Error::new(ErrorCategory::Environment, text).with_hint("take it over again."))
    }

    /// Lets other hosts write again, unless a former owner may still run.
    pub(super) fn release(&self) {
        self.exclusion.release();
    }

    fn reservation_error(&self, why: impl std::fmt::Display) -> Error {
        let text = format!("{}: {why}", self.name);
        Error::new(ErrorCategory::Environment, text).with_hint(format!(
            "close the pool there; if that host has ended: `tenmil pool takeover {}`.",
            self.name
        ))
    }

    fn lock_devices(&self) -> MutexGuard<'_, DevicesToReserve> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a question changes the pool, so that it is claimed first.
pub(super) const fn is_changing_request(ask: &PoolRequest) -> bool {
    matches!(
        ask,
        PoolRequest::Change(_)
            | PoolRequest::ReserveThick(_)
            | PoolRequest::MakeExclusive { .. }
            | PoolRequest::CopyFromParent { .. }
            | PoolRequest::Write { .. }
            | PoolRequest::Trim { .. }
            | PoolRequest::Claim
            | PoolRequest::Grow(_)
    )
}
