//! Report on a mirror.

use std::fmt::Write as _;

use tenmil_base::ErrorCategory;

use super::assembly::{LegCandidate, LegReadResult, MirrorAssembly, assemble};
use super::progress::Health;
use super::{open_legs, parse_options, read_leg_candidates};
use tenmil_base::Error;
use tenmil_block::Opener;
use tenmil_block::uri::Uri;
use tenmil_volume::mirror::{MirrorSuperblock, SuperblockError, uuid_text};

/// Output of `tenmil mirror show`.
#[derive(Clone, Debug)]
pub struct MirrorReport {
    /// For each given leg: its name, and its superblock or why it has none.
    pub legs: Vec<(String, Result<MirrorSuperblock, Error>)>,
    /// How the mirror would open: a description, or why it would not.
    pub verdict: Result<String, Error>,
    /// Health of the mirror, if it would open.
    pub health: Option<Health>,
}

/// Reads the superblocks of a mirror's legs, and checks whether it would open.
///
/// # Errors
///
/// If the URI is not that of a mirror.
pub fn read_mirror_report(opener: &Opener<'_>, uri: &Uri) -> Result<MirrorReport, Error> {
    if uri.scheme() != "mirror" {
        return Err(uri.error("not a mirror, expected mirror:[URI],[URI]").into());
    }
    let options = parse_options(uri)?;
    let legs = open_legs(opener, uri.children()).legs;
    let mut now = || opener.clock.now();
    let candidates = read_leg_candidates(opener.regions, &legs, &mut now)
        .map_err(|problem| Error::new(ErrorCategory::Environment, problem))?;
    let assembly = assemble(&candidates, options.start_policy());
    let health = assembly
        .as_ref()
        .ok()
        .map(|it| Health::from_leg_masks(u8::MAX >> (8 - it.legs) & !it.gone, it.in_sync, 0));
    let verdict = assembly.map(|assembly| describe_assembly(&assembly, &candidates));
    let said = legs.into_iter().zip(candidates).map(|(leg, LegCandidate { found, .. })| {
        let found = match found {
            LegReadResult::Leg(superblock) => Ok(*superblock),
            LegReadResult::Missing(why) => Err(Error::environment(why)),
            LegReadResult::Foreign(SuperblockError::Absent) => {
                Err(Error::environment("no superblock"))
            }
            LegReadResult::Foreign(SuperblockError::Damaged(why)) => Err(Error::environment(why)),
        };
        (leg.name, found)
    });
    Ok(MirrorReport { legs: said.collect(), verdict, health })
}

/// One line on an assembled mirror.
pub(super) fn describe_assembly(assembly: &MirrorAssembly, candidates: &[LegCandidate]) -> String {
    let MirrorAssembly { uuid, legs, gone, in_sync, fresh, places, dirty, geometry, .. } = assembly;
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
    for LegCandidate { name, found, .. } in candidates {
        if let LegReadResult::Missing(why) = found {
            let _ = write!(text, "; {name} cannot be had: {why}");
        }
    }
    let is_fresh = assembly.present_mask() & fresh != 0;
    let count = if is_fresh { geometry.regions() } else { dirty.count() };
    if (sound > 1 || assembly.present_mask() & !in_sync != 0) && count > 0 {
        let source = in_sync.trailing_zeros();
        let share = format_percentage(count, geometry.regions());
        let _ = write!(text, "; {count} regions ({share}) are copied, from leg {source}");
    }
    text
}

/// Formats a share as a percentage.
pub fn format_percentage(count: u64, whole: u64) -> String {
    let permille = u128::from(count) * 1_000 / u128::from(whole.max(1));
    format!("{}.{} %", permille / 10, permille % 10)
}
