//! Taking a mirror from a process that is gone.

use base::Blame;

use super::assemble::assemble;
use super::claim::Claim;
use super::fence::{Ownership, admit};
use super::{look, open_legs, parse};
use crate::MediumError;
use crate::backend::owned;
use crate::open::Opener;
use crate::uri::Uri;

/// Clears the owner of a mirror, durably, so that any process may open it: only if the owner is known to
/// have ended, unless `force` is set. Returns the former owner.
///
/// # Errors
///
/// Who has it open and may still be there; or if it is no mirror, or cannot be put together or written.
pub fn take_over(
    opener: &Opener<'_>,
    uri: &Uri,
    force: bool,
) -> Result<Option<String>, MediumError> {
    if uri.scheme() != "mirror" {
        return Err(uri.refuse("not a mirror, expected mirror:[URI],[URI]").into());
    }
    let options = parse(uri)?;
    let legs = open_legs(opener, uri.children()).legs;
    let mut now = || opener.clock.now();
    let refuse = |problem: String| MediumError::new(Blame::Machine, format!("{uri}: {problem}"));
    let candidates = look(opener.regions, &legs, &mut now).map_err(refuse)?;
    let Some(former) = admit(&candidates, None, force).map_err(refuse)? else { return Ok(None) };
    let mut assembly = assemble(&candidates, options.start()).map_err(refuse)?;
    let claim = Claim { regions: opener.regions, legs: &legs, is_forced: force };
    let me = owned::Opener::draw();
    claim.claim(&mut assembly, me.owner(), &mut now).map_err(refuse)?;
    assembly.owner = Ownership { epoch: assembly.owner.epoch, ..Ownership::NONE };
    claim.record(&mut assembly, &mut now).map_err(refuse)?;
    Ok(Some(former.to_string()))
}
