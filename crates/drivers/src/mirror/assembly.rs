//! Assembly of a mirror from the superblocks of its legs: decides which legs are in sync. No I/O.

use super::mirror_state::SuperblockSequenceNumbers;
use super::superblock_commit::leg_numbers_in;
use tenmil_base::Error;
use tenmil_volume::mirror::MirrorOwnership;
use tenmil_volume::mirror::RegionBitmap;
use tenmil_volume::mirror::{
    LEGS_MAX, MirrorGeometry, MirrorSuperblock, SuperblockError, uuid_text,
};

/// A device where a leg is expected.
#[derive(Clone, Debug)]
pub(super) struct LegCandidate {
    /// Device name.
    pub name: String,
    /// Result of reading its superblock.
    pub found: LegReadResult,
    /// Losses of completed writes that the device had counted by then.
    pub losses: u64,
}

/// Result of reading a superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LegReadResult {
    /// The device could not be opened or read, and why.
    Missing(String),
    /// A device without a valid superblock.
    Foreign(SuperblockError),
    /// A leg of some mirror.
    Leg(Box<MirrorSuperblock>),
}

/// A mirror assembled from its superblocks.
#[derive(Clone, Debug)]
pub(super) struct MirrorAssembly {
    /// UUID of the mirror.
    pub uuid: u128,
    /// Geometry.
    pub geometry: MirrorGeometry,
    /// One more than the highest leg number, whether present or not.
    pub legs: u8,
    /// Bit mask of leg numbers that were removed.
    pub gone: u8,
    /// The highest generation found.
    pub generation: u64,
    /// Index of the candidate of each leg.
    pub places: [Option<usize>; LEGS_MAX],
    /// Superblock sequence numbers of each leg.
    pub sequences: [SuperblockSequenceNumbers; LEGS_MAX],
    /// Bit mask of in-sync legs.
    pub in_sync: u8,
    /// Legs that the superblock of an in-sync leg states to be in sync.
    pub claimed: u8,
    /// Stale legs without any data, according to any leg.
    pub fresh: u8,
    /// Generation of each leg, as found or as last known.
    pub(super) known: [u64; LEGS_MAX],
    /// Regions in which legs may differ, according to any leg.
    pub dirty: RegionBitmap,
    /// Owner recorded by the legs; after the claim, the claiming owner.
    pub(super) owner: MirrorOwnership,
    /// First superblock sequence of each leg written by the claiming owner.
    pub(super) first: [u64; LEGS_MAX],
}

const REMEDY: &str = "a mirror is made by `tenmil mirror create --overwrite URI URI`, which \
                      destroys what is there";

/// Whether a mirror may start without a leg that may have newer blocks than those present.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum DegradedStartPolicy {
    /// All legs that were last recorded in sync are present.
    #[default]
    Complete,
    /// The operator accepts the loss of blocks written only to absent legs.
    Degraded,
}

/// Assembles a mirror, or explains why these are not the legs of one.
///
/// An absent leg may have continued alone and have flushed writes that no other leg has. Only a durable
/// record on the others that it is stale proves that it has not. A majority proves nothing, because a
/// mirror continues for as long as one leg is left.
pub(super) fn assemble(
    candidates: &[LegCandidate],
    start: DegradedStartPolicy,
) -> Result<MirrorAssembly, Error> {
    let legs = legs_by_number(candidates)?;
    let sound = legs.iter().flatten().filter(|(_, leg)| leg.is_leg_in_sync());
    let Some((newest_name, newest)) = sound.max_by_key(|(_, leg)| leg.generation).copied() else {
        return Err(Error::environment(no_leg_in_sync_text(candidates)));
    };
    for leg in legs.iter().flatten() {
        check_is_member(*leg, newest)?;
    }
    if start == DegradedStartPolicy::Complete {
        check_no_newer_leg_absent(candidates, &legs, (newest_name, newest))?;
    }
    let (given, count) = (candidates.len(), newest.members());
    if given > count as usize {
        return Err(Error::environment(format!(
            "{given} legs are given, expected at most {count}: so many it has"
        )));
    }
    let mut in_sync = 0;
    for (name, leg) in legs.iter().flatten().filter(|(_, leg)| leg.is_leg_in_sync()) {
        // A statement that a leg made before the newest leg's knowledge of it is obsolete; a later one is
        // a split brain.
        let calls_it_stale = leg.in_sync & (1 << newest.leg) == 0;
        if calls_it_stale && leg.generation > newest.known[usize::from(leg.leg)] {
            return Err(Error::environment(format!(
                "split brain: legs {} ({newest_name}, generation {}) and {} ({name}, generation {}) \
                 each record that the other is stale, expected one to be newer: both were written \
                 without the other; open each alone to see which data to keep, then give the \
                 other's place to the same device again, which discards what it holds: `tenmil \
                 mirror replace --overwrite 'mirror:[{newest_name}]' {} '{name}'` keeps leg {}",
                newest.leg, newest.generation, leg.leg, leg.generation, leg.leg, newest.leg
            )));
        }
        in_sync |= newest.in_sync & (1 << leg.leg);
    }
    let mut assembly = MirrorAssembly {
        uuid: newest.uuid,
        geometry: newest.geometry,
        legs: newest.legs,
        gone: newest.gone,
        generation: 0,
        places: [None; LEGS_MAX],
        sequences: [SuperblockSequenceNumbers::default(); LEGS_MAX],
        in_sync,
        claimed: 0,
        fresh: 0,
        dirty: RegionBitmap::new(newest.geometry.regions()),
        known: newest.known,
        owner: newest.owner,
        first: [0; LEGS_MAX],
    };
    for (_, leg) in legs.iter().flatten() {
        assembly.merge_leg_superblock(leg);
    }
    for (index, candidate) in candidates.iter().enumerate() {
        if let LegReadResult::Leg(leg) = &candidate.found {
            assembly.places[usize::from(leg.leg)] = Some(index);
        }
    }
    Ok(assembly)
}

impl MirrorAssembly {
    /// Bit mask of the present legs.
    pub(super) fn present_mask(&self) -> u8 {
        let there = self.places.iter().zip(0..).filter(|(place, _)| place.is_some());
        there.fold(0, |mask, (_, leg)| mask | 1 << leg)
    }

    fn merge_leg_superblock(&mut self, leg: &MirrorSuperblock) {
        let sequence = SuperblockSequenceNumbers { good: leg.sequence, used: leg.sequence };
        self.sequences[usize::from(leg.leg)] = sequence;
        self.generation = self.generation.max(leg.generation);
        self.known[usize::from(leg.leg)] = leg.generation;
        self.dirty.add(&leg.dirty);
        self.owner.epoch = self.owner.epoch.max(leg.owner.epoch);
        self.fresh |= leg.fresh & !self.in_sync;
        if self.in_sync & (1 << leg.leg) != 0 {
            self.claimed |= leg.in_sync;
        }
    }
}

type LegsByNumber<'a> = [Option<(&'a str, &'a MirrorSuperblock)>; LEGS_MAX];

/// Orders the legs by number; rejects devices that are not legs, and legs of different mirrors.
fn legs_by_number(candidates: &[LegCandidate]) -> Result<LegsByNumber<'_>, Error> {
    let mut legs: LegsByNumber<'_> = [None; LEGS_MAX];
    let mut first: Option<(&str, &MirrorSuperblock)> = None;
    for LegCandidate { name, found, .. } in candidates {
        let leg = match found {
            LegReadResult::Leg(leg) => &**leg,
            LegReadResult::Missing(_) => continue,
            LegReadResult::Foreign(SuperblockError::Absent) => {
                return Err(Error::environment(format!(
                    "{name} is not a leg of a mirror: found no superblock, expected one; {REMEDY}"
                )));
            }
            LegReadResult::Foreign(SuperblockError::Damaged(problem)) => {
                return Err(Error::environment(format!(
                    "{name} has a damaged superblock: {problem}; leave it out of the name and end \
                     that with `?degraded=yes` to open the mirror without it, or {REMEDY}"
                )));
            }
        };
        let (first_name, like) = *first.get_or_insert((name, leg));
        if leg.uuid != like.uuid {
            return Err(Error::environment(format!(
                "{name} is a leg of mirror {}, expected {} as on {first_name}",
                uuid_text(leg.uuid),
                uuid_text(like.uuid)
            )));
        }
        if leg.geometry != like.geometry {
            return Err(Error::environment(format!(
                "{name} and {first_name} differ about the shape of their mirror"
            )));
        }
        let place = &mut legs[usize::from(leg.leg)];
        if let Some((other, _)) = place {
            return Err(Error::environment(format!(
                "{name} and {other} are both labeled leg {}",
                leg.leg
            )));
        }
        *place = Some((name, leg));
    }
    Ok(legs)
}

/// Rejects a device that is no longer, or not yet, a leg according to the newest leg.
fn check_is_member(
    (name, leg): (&str, &MirrorSuperblock),
    newest: &MirrorSuperblock,
) -> Result<(), Error> {
    let MirrorSuperblock { leg: number, generation, .. } = *leg;
    let has_place = number < newest.legs && newest.gone & 1 << number == 0;
    if !has_place && generation > newest.generation {
        return Err(Error::environment(format!(
            "{name} is leg {number}, expected one that the others know of: adding it was not \
             finished; leave it out of the name, or add it again with `tenmil mirror add \
             --overwrite`"
        )));
    }
    if !has_place {
        return Err(Error::environment(format!(
            "{name} is leg {number}, expected one that the mirror still has: it has been removed; \
             leave it out of the name, or add it again with `tenmil mirror add --overwrite`"
        )));
    }
    let least = newest.known[usize::from(number)];
    if generation < least {
        return Err(Error::environment(format!(
            "{name} is leg {number} of generation {generation}, expected {least} or later: it is an \
             old copy, or another device has its place now; leave it out of the name, or give it \
             a place with `tenmil mirror replace --overwrite`"
        )));
    }
    Ok(())
}

/// Rejects a start without a leg that may be newer than all present ones.
fn check_no_newer_leg_absent(
    candidates: &[LegCandidate],
    legs: &LegsByNumber<'_>,
    (newest_name, newest): (&str, &MirrorSuperblock),
) -> Result<(), Error> {
    // A leg that was marked stale later also knows which legs were to continue without the newest. They have not if
    // they are here and no newer: nothing is written without a leg before that is durable on all others.
    let is_sound = |(_, leg): &&(&str, &MirrorSuperblock)| leg.is_leg_in_sync();
    let sound =
        legs.iter().flatten().filter(is_sound).fold(0_u8, |mask, (_, leg)| mask | 1 << leg.leg);
    let doubts = legs.iter().flatten().find(|(_, leg)| {
        let excludes = leg.generation > newest.generation && leg.in_sync & 1 << newest.leg == 0;
        excludes && leg.in_sync & !sound != 0
    });
    if let Some((name, leg)) = doubts {
        let number = newest.leg;
        return Err(Error::environment(format!(
            "leg {number} ({newest_name}, generation {}) is stale, as leg {} ({name}, generation \
             {}) has recorded, expected legs {} that were in sync then; {}",
            newest.generation,
            leg.leg,
            leg.generation,
            format_leg_numbers(leg.in_sync),
            degraded_hint("those legs hold")
        )));
    }
    let there = legs.iter().flatten().fold(0_u8, |mask, (_, leg)| mask | 1 << leg.leg);
    let absent = newest.in_sync & !there & !newest.gone;
    if absent == 0 {
        return Ok(());
    }
    let missing = candidates.iter().filter_map(|one| match &one.found {
        LegReadResult::Missing(why) => Some(format!(" ({} is missing: {why})", one.name)),
        _ => None,
    });
    Err(Error::environment(format!(
        "leg {} is absent{}, and may hold newer blocks than leg {} ({newest_name}), which last \
         recorded legs {} in sync; expected every leg that was in sync; {}",
        format_leg_numbers(absent),
        missing.collect::<String>(),
        newest.leg,
        format_leg_numbers(newest.in_sync),
        degraded_hint("it alone holds")
    )))
}

fn degraded_hint(what: &str) -> String {
    format!(
        "attach it, or open with `?degraded=yes` at the end of the name to go on without: what \
         {what} is lost then, and it is recorded as stale"
    )
}

/// Lists the legs of a mask: `0, 2`.
pub(super) fn format_leg_numbers(mask: u8) -> String {
    let legs: Vec<String> = leg_numbers_in(mask).map(|leg| leg.to_string()).collect();
    if legs.is_empty() { "none".into() } else { legs.join(", ") }
}

fn no_leg_in_sync_text(candidates: &[LegCandidate]) -> String {
    let each = candidates.iter().map(|LegCandidate { name, found, .. }| match found {
        LegReadResult::Missing(why) => format!("{name} is missing ({why})"),
        _ => format!("{name} is stale"),
    });
    let each: Vec<String> = each.collect();
    format!("no leg is in sync: {}; expected at least one that is", each.join(", "))
}

#[cfg(test)]
mod tests {
    use super::{DegradedStartPolicy, LegCandidate, LegReadResult, MirrorAssembly, assemble};
    use tenmil_volume::mirror::MirrorOwnership;
    use tenmil_volume::mirror::RegionBitmap;
    use tenmil_volume::mirror::{LEGS_MAX, MirrorGeometry, MirrorSuperblock, SuperblockError};

    fn sample_superblock(index: u8, generation: u64, in_sync: u8) -> MirrorSuperblock {
        let geometry = MirrorGeometry::for_legs(512, 1 << 16).unwrap();
        let mut dirty = RegionBitmap::new(geometry.regions());
        dirty.set(u64::from(index) + 1);
        dirty.set(0);
        let (uuid, sequence, legs, gone, fresh) = (7, generation + 3, 2, 0, 0);
        let (leg, known) = (index, [1; LEGS_MAX]);
        MirrorSuperblock {
            uuid,
            sequence,
            generation,
            leg,
            legs,
            geometry,
            in_sync,
            gone,
            fresh,
            known,
            owner: MirrorOwnership::NONE,
            dirty,
        }
    }

    fn assemble_two_with_complete_policy(
        found: [LegReadResult; 2],
    ) -> Result<MirrorAssembly, tenmil_base::Error> {
        assemble_with_policy(found, DegradedStartPolicy::Complete)
    }

    fn assemble_with_policy<const N: usize>(
        found: [LegReadResult; N],
        how: DegradedStartPolicy,
    ) -> Result<MirrorAssembly, tenmil_base::Error> {
        let names = ["a", "b", "c"].into_iter().map(String::from);
        let candidates =
            names.zip(found).map(|(name, found)| LegCandidate { name, found, losses: 0 });
        assemble(&candidates.collect::<Vec<_>>(), how)
    }

    fn leg_read_result(superblock: MirrorSuperblock) -> LegReadResult {
        LegReadResult::Leg(Box::new(superblock))
    }

    #[test]
    fn legs_in_sync_assemble_in_any_order() {
        for found in [
            [sample_superblock(0, 1, 3), sample_superblock(1, 1, 3)],
            [sample_superblock(1, 1, 3), sample_superblock(0, 1, 3)],
        ] {
            let second = usize::from(found[0].leg == 0);
            let assembly = assemble_two_with_complete_policy(found.map(leg_read_result)).unwrap();
            assert_eq!((assembly.in_sync, assembly.claimed, assembly.present_mask()), (3, 3, 3));
            assert_eq!(assembly.places[1], Some(second));
            assert_eq!(assembly.dirty.iter().collect::<Vec<_>>(), [0, 1, 2], "either says so");
        }
    }

    #[test]
    fn newest_generation_is_used() {
        let assembly = assemble_two_with_complete_policy([
            leg_read_result(sample_superblock(0, 1, 0b11)),
            leg_read_result(sample_superblock(1, 2, 0b10)),
        ])
        .unwrap();
        assert_eq!((assembly.in_sync, assembly.claimed, assembly.generation), (0b10, 0b10, 2));
        // Power failed while leg 0, which knew the superblock of leg 1, was being marked in sync again.
        let knows = |generation, in_sync| MirrorSuperblock {
            known: [3, 2, 0, 0, 0, 0, 0, 0],
            ..sample_superblock(0, generation, in_sync)
        };
        let assembly = assemble_two_with_complete_policy([
            leg_read_result(knows(3, 0b11)),
            leg_read_result(sample_superblock(1, 2, 0b10)),
        ])
        .unwrap();
        assert_eq!((assembly.in_sync, assembly.claimed), (0b11, 0b11));
        // Then leg 1 failed before it received that update.
        let assembly = assemble_two_with_complete_policy([
            leg_read_result(knows(4, 0b01)),
            leg_read_result(sample_superblock(1, 2, 0b10)),
        ])
        .unwrap();
        assert_eq!((assembly.in_sync, assembly.claimed, assembly.known[1]), (0b01, 0b01, 2));
        // But if it was written alone since then, there is no way to decide.
        assemble_two_with_complete_policy([
            leg_read_result(knows(4, 0b01)),
            leg_read_result(sample_superblock(1, 3, 0b10)),
        ])
        .unwrap_err();
        // The same, and leg 0 still states that it is stale.
        let assembly = assemble_two_with_complete_policy([
            leg_read_result(sample_superblock(0, 2, 0b10)),
            leg_read_result(sample_superblock(1, 3, 0b11)),
        ])
        .unwrap();
        assert_eq!((assembly.in_sync, assembly.claimed), (0b10, 0b11));
    }

    #[test]
    fn newest_superblock_decides_membership() {
        let knows = |known, legs, gone, in_sync| MirrorSuperblock {
            known: [5, known, 0, 0, 0, 0, 0, 0],
            legs,
            gone,
            ..sample_superblock(0, 5, in_sync)
        };
        // It has been replaced, and its replacement was in sync or not.
        for in_sync in [0b01, 0b11] {
            let refused = assemble_two_with_complete_policy([
                leg_read_result(knows(4, 2, 0, in_sync)),
                leg_read_result(sample_superblock(1, 3, 0b11)),
            ])
            .unwrap_err();
            assert!(
                refused.text.contains("b is leg 1 of generation 3, expected 4 or"),
                "{refused}"
            );
        }
        let refused = assemble_two_with_complete_policy([
            leg_read_result(knows(1, 3, 0b10, 0b101)),
            leg_read_result(sample_superblock(1, 3, 0b11)),
        ])
        .unwrap_err();
        assert!(
            refused.text.contains("b is leg 1, expected one that the mirror still"),
            "{refused}"
        );
        let third = MirrorSuperblock { legs: 3, ..sample_superblock(2, 6, 0b11) };
        let refused = assemble_two_with_complete_policy([
            leg_read_result(knows(1, 2, 0, 0b11)),
            leg_read_result(third.clone()),
        ])
        .unwrap_err();
        assert!(refused.text.contains("adding it was not finished"), "{refused}");
        // One leg knows of the new one, the other does not yet.
        let two =
            [leg_read_result(knows(1, 3, 0, 0b11)), leg_read_result(sample_superblock(1, 3, 0b11))];
        let assembly = assemble_two_with_complete_policy(two).unwrap();
        assert_eq!((assembly.in_sync, assembly.legs, assembly.places[2]), (0b11, 3, None));
        let two = [leg_read_result(knows(1, 3, 0, 0b11)), leg_read_result(third)];
        let assembly = assemble_with_policy(two, DegradedStartPolicy::Degraded).unwrap();
        assert_eq!((assembly.in_sync, assembly.present_mask()), (0b01, 0b101));
    }

    #[test]
    fn leg_starts_alone_only_if_others_are_recorded_as_stale() {
        let missing = || LegReadResult::Missing("no such file".into());
        let assembly = assemble_two_with_complete_policy([
            missing(),
            leg_read_result(sample_superblock(1, 5, 0b10)),
        ])
        .unwrap();
        assert_eq!((assembly.in_sync, assembly.claimed, assembly.present_mask()), (2, 2, 2));
        let refused = assemble_two_with_complete_policy([
            missing(),
            leg_read_result(sample_superblock(1, 5, 0b11)),
        ])
        .unwrap_err();
        let expected = "leg 0 is absent (a is missing: no such file), and may hold newer blocks \
                        than leg 1 (b), which last recorded legs 0, 1 in sync; ";
        assert!(
            refused.text.starts_with(expected) && refused.text.contains("`?degraded=yes`"),
            "{refused}"
        );
        let assembly = assemble_with_policy(
            [missing(), leg_read_result(sample_superblock(1, 5, 0b11))],
            DegradedStartPolicy::Degraded,
        )
        .unwrap();
        assert_eq!((assembly.in_sync, assembly.present_mask()), (2, 2));
        let refused = assemble_two_with_complete_policy([
            missing(),
            leg_read_result(sample_superblock(1, 5, 0b01)),
        ])
        .unwrap_err();
        let expected = "no leg is in sync: a is missing (no such file), b is stale";
        assert!(refused.text.starts_with(expected), "{refused}");
    }

    #[test]
    fn single_newer_leg_is_not_outvoted() {
        let three = |index, generation, in_sync| {
            leg_read_result(MirrorSuperblock {
                legs: 3,
                ..sample_superblock(index, generation, in_sync)
            })
        };
        let missing = || LegReadResult::Missing("no such file".into());
        // Both stopped at the same time; leg 2 may have continued.
        let both = || [three(0, 1, 0b111), three(1, 1, 0b111), missing()];
        let refused = assemble_with_policy(both(), DegradedStartPolicy::Complete).unwrap_err();
        assert!(refused.text.starts_with("leg 2 is absent"), "{refused}");
        assert_eq!(
            assemble_with_policy(both(), DegradedStartPolicy::Degraded).unwrap().in_sync,
            0b011
        );
        // One was marked stale by legs that continued without the other.
        let reported = || [three(0, 1, 0b001), three(1, 4, 0b100), missing()];
        let refused = assemble_with_policy(reported(), DegradedStartPolicy::Complete).unwrap_err();
        let expected = "leg 0 (a, generation 1) is stale, as leg 1 (b, generation 4) has recorded";
        assert!(refused.text.starts_with(expected), "{refused}");
        // The record reached a stale leg and not the one that was to continue, which is here.
        let cut = |second| [three(0, 7, 0b010), second, three(2, 6, 0b110)];
        assert_eq!(
            assemble_with_policy(cut(three(1, 6, 0b110)), DegradedStartPolicy::Complete)
                .unwrap()
                .in_sync,
            0b110
        );
        for second in [missing(), three(1, 5, 0b100)] {
            let refused =
                assemble_with_policy(cut(second), DegradedStartPolicy::Complete).unwrap_err();
            let expected = "leg 2 (c, generation 6) is stale, as leg 0 (a, generation 7) has";
            assert!(refused.text.starts_with(expected), "{refused}");
        }
        // The absent leg is known to be stale.
        let survivors = [three(0, 2, 0b011), three(1, 2, 0b011), missing()];
        assert_eq!(
            assemble_with_policy(survivors, DegradedStartPolicy::Complete).unwrap().in_sync,
            0b011
        );
    }

    #[test]
    fn devices_that_are_no_mirror_are_rejected_by_name() {
        let other = MirrorSuperblock { uuid: 8, ..sample_superblock(1, 1, 3) };
        let damaged =
            LegReadResult::Foreign(SuperblockError::Damaged("its CRC is 1, expected 2".into()));
        for (found, expected) in [
            (
                [
                    leg_read_result(sample_superblock(0, 2, 1)),
                    leg_read_result(sample_superblock(1, 2, 2)),
                ],
                "each record that the other is stale",
            ),
            (
                [
                    leg_read_result(sample_superblock(0, 9, 1)),
                    leg_read_result(sample_superblock(1, 2, 2)),
                ],
                "legs 0 (a, generation 9) and 1 (b, gen",
            ),
            (
                [
                    leg_read_result(sample_superblock(0, 1, 3)),
                    LegReadResult::Foreign(SuperblockError::Absent),
                ],
                "b is not a leg of a mirror",
            ),
            (
                [damaged, leg_read_result(sample_superblock(1, 1, 3))],
                "a has a damaged superblock: its CRC is 1",
            ),
            (
                [leg_read_result(sample_superblock(0, 1, 3)), leg_read_result(other)],
                "b is a leg of mirror 00000000-0000-0000-0000-00000",
            ),
            (
                [
                    leg_read_result(sample_superblock(0, 1, 3)),
                    leg_read_result(sample_superblock(0, 1, 3)),
                ],
                "b and a are both labeled leg 0",
            ),
        ] {
            let refused = assemble_two_with_complete_policy(found).unwrap_err();
            assert!(refused.text.contains(expected), "{refused}");
        }
        let three = ["a", "b", "c"].map(|name| LegCandidate {
            name: name.into(),
            found: if name == "c" {
                LegReadResult::Missing("x".into())
            } else {
                leg_read_result(sample_superblock(0, 1, 3))
            },
            losses: 0,
        });
        assert!(assemble(&three[1..], DegradedStartPolicy::Degraded).is_ok());
        let candidates = [three[0].clone(), three[2].clone(), three[2].clone()];
        let refused = assemble(&candidates, DegradedStartPolicy::Degraded).unwrap_err();
        assert!(refused.text.contains("3 legs are given, expected at most 2"), "{refused}");
    }
}
