//! What is told about a mirror.

use std::fmt::Write as _;

use base::Blame;

use super::assemble::{Assembly, Candidate, Found, assemble};
use super::progress::Health;
use super::superblock::{NoSuperblock, Superblock, uuid_text};
use super::{look, open_legs, parse};
use crate::MediumError;
use crate::open::Opener;
use crate::uri::Uri;

/// What `tenmil mirror show` tells.
#[derive(Clone, Debug)]
pub struct Report {
    /// For each leg that was named: its name, and what it says or why it says nothing.
    pub legs: Vec<(String, Result<Superblock, String>)>,
    /// How the mirror would open: a description, or why it would not.
    pub verdict: Result<String, String>,
    /// Whether all of its legs hold everything, if it would open.
    pub health: Option<Health>,
}

/// What the legs of a mirror say, and whether it would open.
///
/// # Errors
///
/// If the name is not that of a mirror.
pub fn show(opener: &Opener<'_>, uri: &Uri) -> Result<Report, MediumError> {
    if uri.scheme() != "mirror" {
        return Err(uri.refuse("not a mirror, expected mirror:[URI],[URI]").into());
    }
    let options = parse(uri)?;
    let legs = open_legs(opener, uri.children()).legs;
    let mut now = || opener.clock.now();
    let candidates = look(opener.regions, &legs, &mut now)
        .map_err(|problem| MediumError::new(Blame::Machine, problem))?;
    let assembly = assemble(&candidates, options.start());
    let health = assembly
        .as_ref()
        .ok()
        .map(|it| Health::of(u8::MAX >> (8 - it.legs) & !it.gone, it.in_sync, 0));
    let verdict = assembly.map(|assembly| describe(&assembly, &candidates));
    let said = candidates.into_iter().map(|Candidate { name, found }| {
        let found = match found {
            Found::Leg(superblock) => Ok(*superblock),
            Found::Missing(why) => Err(why),
            Found::Strange(NoSuperblock::Raw) => Err("no superblock".into()),
            Found::Strange(NoSuperblock::Damaged(why)) => Err(why),
        };
        (name, found)
    });
    Ok(Report { legs: said.collect(), verdict, health })
}

/// One line about a mirror that has been put together.
pub(super) fn describe(assembly: &Assembly, candidates: &[Candidate]) -> String {
    let Assembly { uuid, legs, gone, in_sync, fresh, places, dirty, shape, .. } = assembly;
    let (uuid, sound) = (uuid_text(*uuid), in_sync.count_ones());
    let members = u32::from(*legs) - gone.count_ones();
    let mut text = format!("mirror {uuid}: {sound} of {members} legs in sync");
    if sound < members {
        text += ", degraded";
    }
    for leg in (0..*legs).filter(|leg| gone & 1 << leg == 0) {
        let place = places[usize::from(leg)];
        match place.map(|index| &candidates[index].name) {
            Some(_) if in_sync & (1 << leg) != 0 => {}
            Some(name) => {
                let _ = write!(text, "; leg {leg} ({name}) is stale and is copied to");
            }
            None => {
                let _ = write!(text, "; leg {leg} is missing");
            }
        }
    }
    for Candidate { name, found } in candidates {
        if let Found::Missing(why) = found {
            let _ = write!(text, "; {name} cannot be had: {why}");
        }
    }
    let is_fresh = assembly.present() & fresh != 0;
    let count = if is_fresh { shape.regions() } else { dirty.count() };
    if (sound > 1 || assembly.present() & !in_sync != 0) && count > 0 {
        let source = in_sync.trailing_zeros();
        let share = share_of(count, shape.regions());
        let _ = write!(text, "; {count} regions ({share}) are copied, from leg {source}");
    }
    text
}

/// A share as people read it.
pub fn share_of(count: u64, whole: u64) -> String {
    let permille = u128::from(count) * 1_000 / u128::from(whole.max(1));
    format!("{}.{} %", permille / 10, permille % 10)
}
