//! Takes a mirror over from an owner that has ended.

use tenmil_base::ErrorCategory;

use super::assemble::assemble;
use super::claim::Claim;
use super::exclude::{Entry, enter};
use super::{open_legs, parse};
use crate::exclusion::Exclusion;
use crate::owned::{self, is_gone};
use tenmil_base::Error;
use tenmil_block::Opener;
use tenmil_block::uri::Uri;
use tenmil_volume::mirror::Ownership;

/// Clears the owner of a mirror durably, so that any process may open it: only if the owner is known to
/// have exited or is excluded from writing by the devices, unless `force` is set. Returns the former owner.
///
/// # Errors
///
/// If the owner may still be running, or the mirror cannot be assembled or written.
pub fn take_over(opener: &Opener<'_>, uri: &Uri, force: bool) -> Result<Option<String>, Error> {
    if uri.scheme() != "mirror" {
        return Err(uri.refuse("not a mirror, expected mirror:[URI],[URI]").into());
    }
    let options = parse(uri)?;
    let legs = open_legs(opener, uri.children()).legs;
    let mut now = || opener.clock.now();
    let refuse =
        |problem: Error| Error::new(ErrorCategory::Environment, format!("{uri:#}: {problem}"));
    let me = owned::Opener::draw();
    let exclusion = Exclusion::new(me.owner().id);
    let entry = if force { Entry::Force } else { Entry::TakeOver };
    let entered = enter((opener.regions, &legs), (None, entry), &exclusion, &mut now);
    let (candidates, former) = entered.map_err(refuse)?;
    let assembled = assemble(&candidates, options.start()).map_err(refuse);
    let Some(former) = former else {
        exclusion.release();
        // Devices that do not make up a mirror do not show whether it has an owner.
        return assembled.map(|_| None);
    };
    let mut assembly = assembled?;
    // Also an owner that the devices exclude may have sent superblocks that arrive late.
    let claim =
        Claim { regions: opener.regions, legs: &legs, is_forced: force || !is_gone(&former) };
    claim.claim(&mut assembly, me.owner(), &mut now).map_err(refuse)?;
    assembly.owner = Ownership { epoch: assembly.owner.epoch, ..Ownership::NONE };
    claim.record(&mut assembly, &mut now).map_err(refuse)?;
    exclusion.release();
    Ok(Some(former.to_string()))
}
