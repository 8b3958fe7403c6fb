//! The devices of the legs refuse the writes of other hosts while this process owns a mirror, where they can.
//!
//! ```text
//!   open   read the superblocks: who owns it? | reserve every leg | read them again | claim
//!   back   a leg answers again | reserve it, by a thread of its own | read its superblock again | join it
//! ```
//!
//! A former owner that is refused by one leg answers no write any more: a leg that fails is recorded as stale
//! by the others before, and what they say is looked at first. So it is enough that the legs are reserved
//! one after the other and the superblocks are read once all are.

use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::{BlockDevice, Error, Instant};
use tenmil_dma::RegionTable;
use tenmil_linux::NamedThread;
use tenmil_volume::PoolOwner as Opener;

use super::MirrorLegDevice;
use super::assembly::{LegCandidate, LegReadResult};
use super::ownership::{check_no_live_owner, is_owner_record_superseded, other_owner};
use super::superblock_io::read_leg_candidates;
use crate::owner_identity::has_owner_ended;
use crate::owner_reservations::{OwnerReservations, PreemptionPolicy, ReservationOutcome};
use tenmil_volume::mirror::{LEGS_MAX, MirrorSuperblock};

/// How a mirror is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OwnerPolicy {
    /// Unless an owner may be there.
    Open,
    /// Even if one is, if the devices exclude it from writing.
    TakeOver,
    /// The owner.
    Force,
}

/// The reservations of an open mirror.
pub(super) struct LegReservations {
    pub(super) exclusion: Arc<OwnerReservations>,
    /// The reservation of a leg that has come back, while it is acquired.
    returning: Mutex<[Option<NamedThread<bool>>; LEGS_MAX]>,
}

/// Reads the superblocks, reserves the legs, and says what they hold then, and which owner they had.
///
/// # Errors
///
/// Which owner may be there; or which host has reserved a leg.
pub(super) fn reserve_legs_and_read_superblocks(
    (regions, legs): (&RegionTable, &[MirrorLegDevice]),
    (me, entry): (Option<Opener>, OwnerPolicy),
    exclusion: &OwnerReservations,
    now: &mut dyn FnMut() -> Instant,
) -> Result<(Vec<LegCandidate>, Option<Opener>), Error> {
    let candidates = read_leg_candidates(regions, legs, now)?;
    let owner = other_owner(&candidates, me);
    let is_bound = |owner: &Opener| {
        let media = legs.iter().filter_map(|leg| leg.medium.as_ref().ok());
        let mut bound =
            media.map(|medium| OwnerReservations::check_holds_reservation(&**medium, owner.id));
        bound.all(|bound| bound.is_ok())
    };
    let preempts = match (&owner, entry) {
        (Some(_), OwnerPolicy::Force) => PreemptionPolicy::Force,
        (None, OwnerPolicy::Force | OwnerPolicy::TakeOver) => PreemptionPolicy::Any,
        (None, OwnerPolicy::Open) => PreemptionPolicy::Nothing,
        (Some(owner), _) if has_owner_ended(owner) => PreemptionPolicy::Departed(owner.id),
        (Some(owner), OwnerPolicy::TakeOver) if is_bound(owner) => {
            PreemptionPolicy::Owner(owner.id)
        }
        (Some(_), _) => {
            let former = check_no_live_owner(&candidates, me, false)?;
            return Ok((candidates, former));
        }
    };
    let mut has_reserved = false;
    for (leg, candidate) in legs.iter().zip(&candidates) {
        let Ok(medium) = &leg.medium else { continue };
        let stale = match &candidate.found {
            LegReadResult::Leg(found) if is_owner_record_superseded(found, &candidates) => {
                found.owner.owner()
            }
            _ => None,
        };
        // A stale leg that was away while the mirror was taken over may be reserved by the owner before.
        let preempts = stale.as_ref().map_or(preempts, |owner| PreemptionPolicy::Owner(owner.id));
        let is_needed = stale.is_none() && matches!(preempts, PreemptionPolicy::Owner(_));
        let refuse = |why: Error| {
            let name = leg.display_name();
            Error::environment(format!(
                "{name}: {why}; close the mirror there; if that host has ended: `tenmil mirror takeover URI`"
            ))
        };
        match exclusion.acquire(medium, preempts).map_err(refuse)? {
            ReservationOutcome::Reserved { was_preempted: false } if is_needed => {
                return Err(refuse(Error::environment("it was not reserved any more")));
            }
            ReservationOutcome::Not(why) if is_needed => {
                return Err(refuse(Error::environment(
                    why.unwrap_or_else(|| "it takes no reservations".into()),
                )));
            }
            ReservationOutcome::Reserved { .. } => has_reserved = true,
            ReservationOutcome::Not(_) => {}
        }
    }
    // Until then another owner may have changed it.
    let candidates =
        if has_reserved { read_leg_candidates(regions, legs, now)? } else { candidates };
    let excluded = if let PreemptionPolicy::Owner(id) = preempts { Some(id) } else { None };
    let found = other_owner(&candidates, me);
    let is_excluded = found.is_some_and(|owner| Some(owner.id) == excluded);
    let former = check_no_live_owner(&candidates, me, entry == OwnerPolicy::Force || is_excluded)?;
    Ok((candidates, former))
}

impl LegReservations {
    pub(super) fn new(exclusion: OwnerReservations) -> Self {
        Self { exclusion: Arc::new(exclusion), returning: Mutex::default() }
    }

    /// Whether a leg that answers again, with this superblock, may be joined: its device refuses the writes of
    /// other hosts, or takes no reservations. Until it is known, a thread asks the device, and the leg is
    /// looked for again later.
    pub(super) fn may_leg_rejoin(
        &self,
        medium: &Arc<dyn BlockDevice>,
        found: &MirrorSuperblock,
    ) -> bool {
        if medium.reservations().is_none() {
            return true;
        }
        let mut returning = self.returning.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(place) = returning.get_mut(usize::from(found.leg)) else { return true };
        match place.take() {
            Some(thread) if thread.is_finished() => return thread.join(),
            Some(thread) => *place = Some(thread),
            None => {
                let (exclusion, medium) = (Arc::clone(&self.exclusion), Arc::clone(medium));
                let preempts = match found.owner.id {
                    0 => PreemptionPolicy::Nothing,
                    owner => PreemptionPolicy::Owner(owner),
                };
                let acquire =
                    move |_: &tenmil_linux::StopFlag| exclusion.acquire(&medium, preempts).is_ok();
                *place = NamedThread::spawn("reserve", None, acquire).ok();
            }
        }
        false
    }
}
