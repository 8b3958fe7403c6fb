//! Which legs make a mirror, and which of them are to be believed. No I/O.

use super::bits::Bits;
use super::commit::legs_of;
use super::fence::Ownership;
use super::meta::Sequence;
use super::superblock::{LEGS_MAX, NoSuperblock, Shape, Superblock, uuid_text};

/// What was found where a leg should be.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    /// What it is called.
    pub name: String,
    /// Its superblock; `Err(None)` if it could not even be opened or read, and why.
    pub found: Found,
}

/// What was found where a leg should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Nothing that answers, and why.
    Missing(String),
    /// Something without a superblock, or with a bad one.
    Strange(NoSuperblock),
    /// A leg of some mirror.
    Leg(Box<Superblock>),
}

/// A mirror, put together from its legs.
#[derive(Clone, Debug)]
pub(super) struct Assembly {
    /// Which mirror it is.
    pub uuid: u128,
    /// Its geometry.
    pub shape: Shape,
    /// One more than the highest number of a leg, there or not.
    pub legs: u8,
    /// Numbers that have no leg any more.
    pub gone: u8,
    /// The highest generation found.
    pub generation: u64,
    /// Which candidate each leg is.
    pub places: [Option<usize>; LEGS_MAX],
    /// The numbers of the legs' superblocks.
    pub sequences: [Sequence; LEGS_MAX],
    /// Legs that hold everything.
    pub in_sync: u8,
    /// Legs that are said to be in sync by a leg that is.
    pub claimed: u8,
    /// Stale legs that hold nothing, as any leg says.
    pub fresh: u8,
    /// The generation of each leg, as found or as last heard of.
    pub(super) known: [u64; LEGS_MAX],
    /// Regions in which legs may differ, as any of them says.
    pub dirty: Bits,
    /// Who has it open for writing, as the legs say; once it is claimed, who claimed it.
    pub(super) owner: Ownership,
    /// The first superblock of each leg that the one who claimed it wrote.
    pub(super) first: [u64; LEGS_MAX],
}

const REMEDY: &str = "a mirror is made by `tenmil mirror create --overwrite URI URI`, which \
                      destroys what is there";

/// Whether a mirror may start without a leg that may hold newer blocks than those that are there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Start {
    /// Every leg that was last recorded in sync is there.
    #[default]
    Complete,
    /// The operator accepts that blocks written without these legs are lost.
    Degraded,
}

/// Puts a mirror together, or says why these are not the legs of one.
///
/// A leg that is absent may have gone on alone and hold flushed writes that nobody else has. Only
/// what the others recorded durably, that it is stale, proves that it has not. A majority proves
/// nothing: a mirror goes on for as long as one leg is left.
pub(super) fn assemble(candidates: &[Candidate], start: Start) -> Result<Assembly, String> {
    let legs = sorted(candidates)?;
    let sound = legs.iter().flatten().filter(|(_, leg)| leg.is_sound());
    let Some((newest_name, newest)) = sound.max_by_key(|(_, leg)| leg.generation).copied() else {
        return Err(none_in_sync(candidates));
    };
    for leg in legs.iter().flatten() {
        belongs(*leg, newest)?;
    }
    if start == Start::Complete {
        is_complete(candidates, &legs, (newest_name, newest))?;
    }
    let (given, count) = (candidates.len(), newest.members());
    if given > count as usize {
        return Err(format!("{given} legs are given, expected at most {count}: so many it has"));
    }
    let mut in_sync = 0;
    for (name, leg) in legs.iter().flatten().filter(|(_, leg)| leg.is_sound()) {
        // What a leg said while the newest knew of it is old news; what it said since is not.
        let calls_it_stale = leg.in_sync & (1 << newest.leg) == 0;
        if calls_it_stale && leg.generation > newest.known[usize::from(leg.leg)] {
            return Err(format!(
                "split brain: legs {} ({newest_name}, generation {}) and {} ({name}, generation {}) \
                 each say that the other is stale, expected one to be newer: both were written \
                 without the other; open each alone to see which data is wanted, then give the \
                 other's place to the same device again, which discards what it holds: `tenmil \
                 mirror replace --overwrite 'mirror:[{newest_name}]' {} '{name}'` keeps leg {}",
                newest.leg, newest.generation, leg.leg, leg.generation, leg.leg, newest.leg
            ));
        }
        in_sync |= newest.in_sync & (1 << leg.leg);
    }
    let mut assembly = Assembly {
        uuid: newest.uuid,
        shape: newest.shape,
        legs: newest.legs,
        gone: newest.gone,
        generation: 0,
        places: [None; LEGS_MAX],
        sequences: [Sequence::default(); LEGS_MAX],
        in_sync,
        claimed: 0,
        fresh: 0,
        dirty: Bits::new(newest.shape.regions()),
        known: newest.known,
        owner: newest.owner,
        first: [0; LEGS_MAX],
    };
    for (_, leg) in legs.iter().flatten() {
        assembly.add(leg);
    }
    for (index, candidate) in candidates.iter().enumerate() {
        if let Found::Leg(leg) = &candidate.found {
            assembly.places[usize::from(leg.leg)] = Some(index);
        }
    }
    Ok(assembly)
}

impl Assembly {
    /// The legs that are there.
    pub(super) fn present(&self) -> u8 {
        let there = self.places.iter().zip(0..).filter(|(place, _)| place.is_some());
        there.fold(0, |mask, (_, leg)| mask | 1 << leg)
    }

    fn add(&mut self, leg: &Superblock) {
        let sequence = Sequence { good: leg.sequence, used: leg.sequence };
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

type Sorted<'a> = [Option<(&'a str, &'a Superblock)>; LEGS_MAX];

/// The legs by their numbers; refuses what is not a leg, and legs of different mirrors.
fn sorted(candidates: &[Candidate]) -> Result<Sorted<'_>, String> {
    let mut legs: Sorted<'_> = [None; LEGS_MAX];
    let mut first: Option<(&str, &Superblock)> = None;
    for Candidate { name, found } in candidates {
        let leg = match found {
            Found::Leg(leg) => &**leg,
            Found::Missing(_) => continue,
            Found::Strange(NoSuperblock::Raw) => {
                return Err(format!(
                    "{name} is not a leg of a mirror: found no superblock, expected one; {REMEDY}"
                ));
            }
            Found::Strange(NoSuperblock::Damaged(problem)) => {
                return Err(format!(
                    "{name} has a damaged superblock: {problem}; leave it out of the name and end \
                     that with `?degraded=yes` to open the mirror without it, or {REMEDY}"
                ));
            }
        };
        let (first_name, like) = *first.get_or_insert((name, leg));
        if leg.uuid != like.uuid {
            return Err(format!(
                "{name} is a leg of mirror {}, expected {} as on {first_name}",
                uuid_text(leg.uuid),
                uuid_text(like.uuid)
            ));
        }
        if leg.shape != like.shape {
            return Err(format!("{name} and {first_name} differ about the shape of their mirror"));
        }
        let place = &mut legs[usize::from(leg.leg)];
        if let Some((other, _)) = place {
            return Err(format!("{name} and {other} both say that they are leg {}", leg.leg));
        }
        *place = Some((name, leg));
    }
    Ok(legs)
}

/// Refuses a device that is no leg any more, or not yet, as the newest leg knows.
fn belongs((name, leg): (&str, &Superblock), newest: &Superblock) -> Result<(), String> {
    let Superblock { leg: number, generation, .. } = *leg;
    let has_place = number < newest.legs && newest.gone & 1 << number == 0;
    if !has_place && generation > newest.generation {
        return Err(format!(
            "{name} is leg {number}, expected one that the others know of: adding it was not \
             finished; leave it out of the name, or add it again with `tenmil mirror add \
             --overwrite`"
        ));
    }
    if !has_place {
        return Err(format!(
            "{name} is leg {number}, expected one that the mirror still has: it has been removed; \
             leave it out of the name, or add it again with `tenmil mirror add --overwrite`"
        ));
    }
    let least = newest.known[usize::from(number)];
    if generation < least {
        return Err(format!(
            "{name} is leg {number} of generation {generation}, expected {least} or later: it is an \
             old copy, or another device has its place now; leave it out of the name, or give it \
             a place with `tenmil mirror replace --overwrite`"
        ));
    }
    Ok(())
}

/// Refuses to start without a leg that may be ahead of all that are there.
fn is_complete(
    candidates: &[Candidate],
    legs: &Sorted<'_>,
    (newest_name, newest): (&str, &Superblock),
) -> Result<(), String> {
    // One that was told since that it is stale knows who went on without the newest, too.
    let doubts = legs
        .iter()
        .flatten()
        .find(|(_, leg)| leg.generation > newest.generation && leg.in_sync & 1 << newest.leg == 0);
    if let Some((name, leg)) = doubts {
        let number = newest.leg;
        return Err(format!(
            "leg {number} ({newest_name}, generation {}) is stale, as leg {} ({name}, generation \
             {}) has recorded, expected legs {} that were in sync then; {}",
            newest.generation,
            leg.leg,
            leg.generation,
            numbers(leg.in_sync),
            degraded_hint("those legs hold")
        ));
    }
    let there = legs.iter().flatten().fold(0_u8, |mask, (_, leg)| mask | 1 << leg.leg);
    let absent = newest.in_sync & !there & !newest.gone;
    if absent == 0 {
        return Ok(());
    }
    let missing = candidates.iter().filter_map(|one| match &one.found {
        Found::Missing(why) => Some(format!(" ({} is missing: {why})", one.name)),
        _ => None,
    });
    Err(format!(
        "leg {} is absent{}, and may hold newer blocks than leg {} ({newest_name}), which last \
         recorded legs {} in sync; expected every leg that was in sync; {}",
        numbers(absent),
        missing.collect::<String>(),
        newest.leg,
        numbers(newest.in_sync),
        degraded_hint("it alone holds")
    ))
}

fn degraded_hint(what: &str) -> String {
    format!(
        "attach it, or open with `?degraded=yes` at the end of the name to go on without: what \
         {what} is lost then, and it is recorded as stale"
    )
}

/// The legs of a mask: `0, 2`.
pub(super) fn numbers(mask: u8) -> String {
    let legs: Vec<String> = legs_of(mask).map(|leg| leg.to_string()).collect();
    if legs.is_empty() { "none".into() } else { legs.join(", ") }
}

fn none_in_sync(candidates: &[Candidate]) -> String {
    let each = candidates.iter().map(|Candidate { name, found }| match found {
        Found::Missing(why) => format!("{name} is missing ({why})"),
        _ => format!("{name} is stale"),
    });
    let each: Vec<String> = each.collect();
    format!("no leg is in sync: {}; expected at least one that is", each.join(", "))
}

#[cfg(test)]
mod tests {
    use super::{Assembly, Candidate, Found, Start, assemble};
    use crate::backend::mirror::bits::Bits;
    use crate::backend::mirror::fence::Ownership;
    use crate::backend::mirror::superblock::{LEGS_MAX, NoSuperblock, Shape, Superblock};

    fn leg(index: u8, generation: u64, in_sync: u8) -> Superblock {
        let shape = Shape::over(512, 1 << 16).unwrap();
        let mut dirty = Bits::new(shape.regions());
        dirty.set(u64::from(index) + 1);
        dirty.set(0);
        let (uuid, sequence, legs, gone, fresh) = (7, generation + 3, 2, 0, 0);
        let (leg, known) = (index, [1; LEGS_MAX]);
        Superblock {
            uuid,
            sequence,
            generation,
            leg,
            legs,
            shape,
            in_sync,
            gone,
            fresh,
            known,
            owner: Ownership::NONE,
            dirty,
        }
    }

    fn put(found: [Found; 2]) -> Result<Assembly, String> {
        start(found, Start::Complete)
    }

    fn start<const N: usize>(found: [Found; N], how: Start) -> Result<Assembly, String> {
        let names = ["a", "b", "c"].into_iter().map(String::from);
        let candidates = names.zip(found).map(|(name, found)| Candidate { name, found });
        assemble(&candidates.collect::<Vec<_>>(), how)
    }

    fn is(superblock: Superblock) -> Found {
        Found::Leg(Box::new(superblock))
    }

    #[test]
    fn two_legs_in_sync_are_a_mirror_in_any_order() {
        for found in [[leg(0, 1, 3), leg(1, 1, 3)], [leg(1, 1, 3), leg(0, 1, 3)]] {
            let second = usize::from(found[0].leg == 0);
            let assembly = put(found.map(is)).unwrap();
            assert_eq!((assembly.in_sync, assembly.claimed, assembly.present()), (3, 3, 3));
            assert_eq!(assembly.places[1], Some(second));
            assert_eq!(assembly.dirty.iter().collect::<Vec<_>>(), [0, 1, 2], "either says so");
        }
    }

    #[test]
    fn the_newest_generation_is_believed() {
        let assembly = put([is(leg(0, 1, 0b11)), is(leg(1, 2, 0b10))]).unwrap();
        assert_eq!((assembly.in_sync, assembly.claimed, assembly.generation), (0b10, 0b10, 2));
        // Power failed while leg 0, which knew what leg 1 had said, was called in sync again.
        let knows = |generation, in_sync| Superblock {
            known: [3, 2, 0, 0, 0, 0, 0, 0],
            ..leg(0, generation, in_sync)
        };
        let assembly = put([is(knows(3, 0b11)), is(leg(1, 2, 0b10))]).unwrap();
        assert_eq!((assembly.in_sync, assembly.claimed), (0b11, 0b11));
        // And then leg 1 failed before it heard of that.
        let assembly = put([is(knows(4, 0b01)), is(leg(1, 2, 0b10))]).unwrap();
        assert_eq!((assembly.in_sync, assembly.claimed, assembly.known[1]), (0b01, 0b01, 2));
        // But if it was written alone since then, nobody knows which to believe.
        put([is(knows(4, 0b01)), is(leg(1, 3, 0b10))]).unwrap_err();
        // The same, and leg 0 still says that it is stale.
        let assembly = put([is(leg(0, 2, 0b10)), is(leg(1, 3, 0b11))]).unwrap();
        assert_eq!((assembly.in_sync, assembly.claimed), (0b10, 0b11));
    }

    #[test]
    fn the_newest_leg_knows_who_belongs() {
        let knows = |known, legs, gone, in_sync| Superblock {
            known: [5, known, 0, 0, 0, 0, 0, 0],
            legs,
            gone,
            ..leg(0, 5, in_sync)
        };
        // It has been replaced, and the one that came instead was in sync or was not.
        for in_sync in [0b01, 0b11] {
            let refused = put([is(knows(4, 2, 0, in_sync)), is(leg(1, 3, 0b11))]).unwrap_err();
            assert!(refused.contains("b is leg 1 of generation 3, expected 4 or"), "{refused}");
        }
        let refused = put([is(knows(1, 3, 0b10, 0b101)), is(leg(1, 3, 0b11))]).unwrap_err();
        assert!(refused.contains("b is leg 1, expected one that the mirror still"), "{refused}");
        let third = Superblock { legs: 3, ..leg(2, 6, 0b11) };
        let refused = put([is(knows(1, 2, 0, 0b11)), is(third.clone())]).unwrap_err();
        assert!(refused.contains("adding it was not finished"), "{refused}");
        // One leg knows of the new one, the other does not yet.
        let two = [is(knows(1, 3, 0, 0b11)), is(leg(1, 3, 0b11))];
        let assembly = put(two).unwrap();
        assert_eq!((assembly.in_sync, assembly.legs, assembly.places[2]), (0b11, 3, None));
        let two = [is(knows(1, 3, 0, 0b11)), is(third)];
        let assembly = start(two, Start::Degraded).unwrap();
        assert_eq!((assembly.in_sync, assembly.present()), (0b01, 0b101));
    }

    #[test]
    fn a_leg_starts_alone_only_if_it_recorded_that_the_others_are_stale() {
        let missing = || Found::Missing("no such file".into());
        let assembly = put([missing(), is(leg(1, 5, 0b10))]).unwrap();
        assert_eq!((assembly.in_sync, assembly.claimed, assembly.present()), (2, 2, 2));
        let refused = put([missing(), is(leg(1, 5, 0b11))]).unwrap_err();
        let expected = "leg 0 is absent (a is missing: no such file), and may hold newer blocks \
                        than leg 1 (b), which last recorded legs 0, 1 in sync; ";
        assert!(refused.starts_with(expected) && refused.contains("`?degraded=yes`"), "{refused}");
        let assembly = start([missing(), is(leg(1, 5, 0b11))], Start::Degraded).unwrap();
        assert_eq!((assembly.in_sync, assembly.present()), (2, 2));
        let refused = put([missing(), is(leg(1, 5, 0b01))]).unwrap_err();
        let expected = "no leg is in sync: a is missing (no such file), b is stale";
        assert!(refused.starts_with(expected), "{refused}");
    }

    #[test]
    fn two_legs_of_three_do_not_outvote_one_that_went_on_alone() {
        let three = |index, generation, in_sync| {
            is(Superblock { legs: 3, ..leg(index, generation, in_sync) })
        };
        let missing = || Found::Missing("no such file".into());
        // Both stopped at once, and leg 2 goes on, as far as anybody here can know.
        let both = || [three(0, 1, 0b111), three(1, 1, 0b111), missing()];
        let refused = start(both(), Start::Complete).unwrap_err();
        assert!(refused.starts_with("leg 2 is absent"), "{refused}");
        assert_eq!(start(both(), Start::Degraded).unwrap().in_sync, 0b011);
        // One was told that it is stale by legs that went on without the other.
        let told = || [three(0, 1, 0b001), three(1, 4, 0b100), missing()];
        let refused = start(told(), Start::Complete).unwrap_err();
        let expected = "leg 0 (a, generation 1) is stale, as leg 1 (b, generation 4) has recorded";
        assert!(refused.starts_with(expected), "{refused}");
        // The one that is absent is known to be stale.
        let survivors = [three(0, 2, 0b011), three(1, 2, 0b011), missing()];
        assert_eq!(start(survivors, Start::Complete).unwrap().in_sync, 0b011);
    }

    #[test]
    fn what_is_no_mirror_is_refused_with_names() {
        let other = Superblock { uuid: 8, ..leg(1, 1, 3) };
        let damaged = Found::Strange(NoSuperblock::Damaged("its CRC is 1, expected 2".into()));
        for (found, expected) in [
            ([is(leg(0, 2, 1)), is(leg(1, 2, 2))], "each say that the other is stale"),
            ([is(leg(0, 9, 1)), is(leg(1, 2, 2))], "legs 0 (a, generation 9) and 1 (b, gen"),
            ([is(leg(0, 1, 3)), Found::Strange(NoSuperblock::Raw)], "b is not a leg of a mirror"),
            ([damaged, is(leg(1, 1, 3))], "a has a damaged superblock: its CRC is 1"),
            ([is(leg(0, 1, 3)), is(other)], "b is a leg of mirror 00000000-0000-0000-0000-00000"),
            ([is(leg(0, 1, 3)), is(leg(0, 1, 3))], "b and a both say that they are leg 0"),
        ] {
            let refused = put(found).unwrap_err();
            assert!(refused.contains(expected), "{refused}");
        }
        let three = ["a", "b", "c"].map(|name| Candidate {
            name: name.into(),
            found: if name == "c" { Found::Missing("x".into()) } else { is(leg(0, 1, 3)) },
        });
        assert!(assemble(&three[1..], Start::Degraded).is_ok());
        let candidates = [three[0].clone(), three[2].clone(), three[2].clone()];
        let refused = assemble(&candidates, Start::Degraded).unwrap_err();
        assert!(refused.contains("3 legs are given, expected at most 2"), "{refused}");
    }
}
