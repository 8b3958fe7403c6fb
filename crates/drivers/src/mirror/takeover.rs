//! Takes a mirror over from an owner that has ended.

use tenmil_base::ErrorCategory;

use super::assembly::assemble;
use super::leg_reservations::{OwnerPolicy, reserve_legs_and_read_superblocks};
use super::ownership_claim::OwnershipClaim;
use super::{open_legs, parse_options};
use crate::owner_identity::{self, has_owner_ended};
use crate::owner_reservations::OwnerReservations;
use tenmil_base::Error;
use tenmil_block::Opener;
use tenmil_block::uri::Uri;
use tenmil_volume::mirror::MirrorOwnership;

/// Clears the owner of a mirror durably, so that any process may open it: only if the owner is known to
/// have exited or is excluded from writing by the devices, unless `force` is set. Returns the former owner.
///
/// # Errors
///
/// If the owner may still be running, or the mirror cannot be assembled or written.
pub fn take_over_mirror(
    opener: &Opener<'_>,
    uri: &Uri,
    force: bool,
) -> Result<Option<String>, Error> {
    if uri.scheme() != "mirror" {
        return Err(uri.error("not a mirror, expected mirror:[URI],[URI]").into());
    }
    let options = parse_options(uri)?;
    let legs = open_legs(opener, uri.children()).legs;
    let mut now = || opener.clock.now();
    let refuse =
        |problem: Error| Error::new(ErrorCategory::Environment, format!("{uri:#}: {problem}"));
    let me = owner_identity::RegisteredOwner::for_this_process();
    let exclusion = OwnerReservations::new(me.owner_record().id);
    let entry = if force { OwnerPolicy::Force } else { OwnerPolicy::TakeOver };
    let entered = reserve_legs_and_read_superblocks(
        (opener.regions, &legs),
        (None, entry),
        &exclusion,
        &mut now,
    );
    let (candidates, former) = entered.map_err(refuse)?;
    let assembled = assemble(&candidates, options.start_policy()).map_err(refuse);
    let Some(former) = former else {
        exclusion.release();
        // Devices that do not make up a mirror do not show whether it has an owner.
        return assembled.map(|_| None);
    };
    let mut assembly = assembled?;
    // Also an owner that the devices exclude may have sent superblocks that arrive late.
    let claim = OwnershipClaim {
        regions: opener.regions,
        legs: &legs,
        is_forced: force || !has_owner_ended(&former),
    };
    claim.claim_ownership(&mut assembly, me.owner_record(), &mut now).map_err(refuse)?;
    assembly.owner = MirrorOwnership { epoch: assembly.owner.epoch, ..MirrorOwnership::NONE };
    claim.write_superblocks(&mut assembly, &mut now).map_err(refuse)?;
    exclusion.release();
    Ok(Some(former.to_string()))
}
