//! Which devices are the legs of a mirror that nobody has open: one more, one less, one for another.
//!
//! ```text
//!   add, replace   new leg: stale ──▶ every other leg: it is one, and fresh ──▶ old leg: wiped
//!   remove                            every other leg: it is gone ────────────▶ old leg: wiped
//! ```
//!
//! Each arrow is a superblock that is written durably before the next one is begun, with a higher
//! generation than any before. The first leg that has it decides, so after a power cut the mirror
//! is what it was or what it was to become, and no data is lost either way. The new leg is stale
//! until the mirror has been open for long enough to copy everything to it; the others are not
//! written for that.

use base::{Blame, Instant};
use dma::{Region, Regions};
use host::machine::Machine;

use super::assemble::{Assembly, Candidate, Found, Start, assemble};
use super::bits::Bits;
use super::commit::legs_of;
use super::fence::{Ownership, admit};
use super::make::check_leg;
use super::raw::{self, Raw, look};
use super::superblock::{LEGS_MAX, Superblock, uuid_text};
use super::{Leg, OpenLegs, open_legs, parse};
use crate::identity::DeviceIdentity;
use crate::open::Opener;
use crate::uri::Uri;
use crate::{MediumError, guard};

/// A mirror that nobody has open, and what its legs say.
pub(super) struct Members<'a> {
    regions: &'a Regions,
    room: Region,
    legs: &'a [Leg],
    assembly: Assembly,
    /// The world-wide names of the legs' devices, as far as they have some.
    identities: &'a [(Uri, String)],
}

/// What the superblocks are to say from now on.
struct Change {
    generation: u64,
    legs: u8,
    gone: u8,
    in_sync: u8,
    fresh: u8,
    known: [u64; LEGS_MAX],
    dirty: Bits,
}

/// Gives a mirror one more leg. Returns what there is to say about it.
///
/// # Errors
///
/// If the legs are not those of one mirror, or the device cannot be had, does not fit, or holds
/// something and `overwrite` is not set.
pub fn add(
    opener: &Opener<'_>,
    uri: &Uri,
    new: &Uri,
    overwrite: bool,
) -> Result<String, MediumError> {
    let doing = format!("add {new}");
    with_members(opener, uri, &doing, |members, now| {
        let leg = fresh(opener, (uri, members.identities), new, overwrite, now)?;
        members.is_other(&leg, None, now).map_err(caller)?;
        host::file::keep().map_err(|error| caller(error.to_string()))?;
        members.add(&leg, now).map_err(caller)
    })
}

/// Asks the operator whether a change is meant, which it describes in a line.
pub type Consent<'a> = &'a mut dyn FnMut(&str) -> Result<(), MediumError>;

/// Gives the place of one leg to another device, if `consent` is given. The old leg is named by its
/// number, or by its device, however that is spelled; it need not be there. If it is, it is no leg of
/// any mirror afterwards.
///
/// # Errors
///
/// As [`add`], and if there is no such leg, no other one is in sync, or there is no consent.
pub fn replace(
    opener: &Opener<'_>,
    uri: &Uri,
    old: &str,
    new: &Uri,
    overwrite: bool,
    consent: Consent<'_>,
) -> Result<String, MediumError> {
    let doing = format!("replace {old}");
    with_members(opener, uri, &doing, |members, now| {
        let number = members.number(old).map_err(caller)?;
        members.change(number).map_err(caller)?;
        let leg = fresh(opener, (uri, members.identities), new, overwrite, now)?;
        members.is_other(&leg, Some(number), now).map_err(caller)?;
        consent(&format!("{} is replaced by {new}", members.described(number)))?;
        host::file::keep().map_err(|error| caller(error.to_string()))?;
        members.replace(number, &leg, now).map_err(caller)
    })
}

/// Takes a leg out of a mirror of three or more, if `consent` is given. The leg is named as for
/// [`replace`].
///
/// # Errors
///
/// If the legs are not those of one mirror, there is no such leg, no other one is in sync, only one
/// would be left, or there is no consent.
pub fn remove(
    opener: &Opener<'_>,
    uri: &Uri,
    old: &str,
    consent: Consent<'_>,
) -> Result<String, MediumError> {
    let doing = format!("remove {old}");
    with_members(opener, uri, &doing, |members, now| {
        let number = members.number(old).map_err(caller)?;
        members.check_remove(number).map_err(caller)?;
        consent(&format!("{} is removed", members.described(number)))?;
        members.remove(number, now).map_err(caller)
    })
}

fn with_members(
    opener: &Opener<'_>,
    uri: &Uri,
    doing: &str,
    change: impl FnOnce(&mut Members<'_>, &mut dyn FnMut() -> Instant) -> Result<String, MediumError>,
) -> Result<String, MediumError> {
    if uri.scheme() != "mirror" {
        return Err(uri.refuse("not a mirror, expected mirror:[URI],[URI]").into());
    }
    let options = parse(uri)?;
    let OpenLegs { legs, identities, .. } = open_legs(opener, uri.children());
    let mut now = || opener.clock.now();
    let members = Members::of(opener.regions, &legs, options.start(), &mut now);
    let members = members.map(|members| Members { identities: &identities, ..members });
    let members = members.map_err(caller);
    members
        .and_then(|mut members| change(&mut members, &mut now))
        .map_err(|error| error.during(format_args!("{uri}: {doing}")))
}

/// What the caller asked for cannot be.
fn caller(text: String) -> MediumError {
    MediumError::new(Blame::Caller, text)
}

/// A device that is to become a leg: not one already, and with nothing on it that could be lost.
fn fresh(
    opener: &Opener<'_>,
    (mirror, identities): (&Uri, &[(Uri, String)]),
    uri: &Uri,
    overwrite: bool,
    now: &mut dyn FnMut() -> Instant,
) -> Result<Leg, MediumError> {
    let is_taken = |device: &DeviceIdentity| {
        let legs = mirror.children().iter();
        let mut legs = legs.map(|leg| DeviceIdentity::with_names(leg, identities));
        legs.any(|leg| leg.is_same(device))
    };
    let refused = || caller(format!("{uri} is a leg already, expected another device"));
    if mirror.children().contains(uri) || is_taken(&DeviceIdentity::of_uri(uri)) {
        return Err(refused());
    }
    let opened = opener.open(uri)?;
    if is_taken(&DeviceIdentity::of_opened(uri, &opened)) {
        return Err(refused());
    }
    let leg = Leg { name: uri.to_string(), medium: Ok(opened.medium) };
    guard::allow("a new leg", &opened.existing, overwrite, &Machine::this())?;
    let found = look(opener.regions, std::slice::from_ref(&leg), now).map_err(caller)?;
    admit(&found, None, false).map_err(caller)?;
    if let Some(Found::Leg(found)) = found.first().map(|candidate| &candidate.found)
        && !overwrite
    {
        let (number, uuid) = (found.leg, uuid_text(found.uuid));
        return Err(caller(format!(
            "{uri} is leg {number} of mirror {uuid}, expected none, or --overwrite"
        )));
    }
    Ok(leg)
}

impl<'a> Members<'a> {
    pub(super) fn of(
        regions: &'a Regions,
        legs: &'a [Leg],
        start: Start,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<Self, String> {
        let candidates: Vec<Candidate> = look(regions, legs, now)?;
        admit(&candidates, None, false)?;
        let assembly = assemble(&candidates, start)?;
        Ok(Self { regions, room: raw::room(regions)?, legs, assembly, identities: &[] })
    }

    /// The one leg with this number, or on this device.
    fn number(&self, name: &str) -> Result<u8, String> {
        let all = self.numbers();
        let found = match name.parse::<u8>() {
            Ok(number) => all & 1_u8.checked_shl(number.into()).unwrap_or(0),
            Err(_) => {
                legs_of(all).filter(|leg| self.is_on(*leg, name)).fold(0, |all, leg| all | 1 << leg)
            }
        };
        let mut found = legs_of(found);
        match (found.next(), found.next()) {
            (Some(number), None) => Ok(number),
            (first, _) => {
                let count = if first.is_none() { "no leg is" } else { "several legs are" };
                let all: Vec<String> = legs_of(all).map(|leg| self.described(leg)).collect();
                Err(format!("{count} `{name}`, expected one of: {}", all.join(", ")))
            }
        }
    }

    /// The numbers that have a leg.
    fn numbers(&self) -> u8 {
        u8::MAX >> (8 - self.assembly.legs) & !self.assembly.gone
    }

    /// Whether a leg is on the device that is named so.
    fn is_on(&self, leg: u8, name: &str) -> bool {
        let Some(found) = self.name_of(leg) else { return false };
        let same = |(one, other): (Uri, Uri)| {
            let device = |uri| DeviceIdentity::with_names(uri, self.identities);
            device(&one).is_same(&device(&other))
        };
        found == name || found.parse().ok().zip(name.parse().ok()).is_some_and(same)
    }

    fn name_of(&self, leg: u8) -> Option<&str> {
        self.assembly.places[usize::from(leg)].map(|place| &*self.legs[place].name)
    }

    /// A leg with its device and its state.
    fn described(&self, leg: u8) -> String {
        let in_sync = self.assembly.in_sync & 1 << leg != 0;
        match self.name_of(leg) {
            Some(name) if in_sync => format!("leg {leg} ({name}, in sync)"),
            Some(name) => format!("leg {leg} ({name}, stale)"),
            None => format!("leg {leg} (absent)"),
        }
    }

    /// Refuses a device that is a leg of this mirror which stays, whatever it is called.
    fn is_other(
        &self,
        new: &Leg,
        replaced: Option<u8>,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<(), String> {
        let found = look(self.regions, std::slice::from_ref(new), now)?;
        let Some(Found::Leg(found)) = found.first().map(|one| &one.found) else { return Ok(()) };
        let stays = self.assembly.present() & !replaced.map_or(0, |leg| 1 << leg);
        if found.uuid != self.assembly.uuid || stays & 1 << found.leg == 0 {
            return Ok(());
        }
        Err(format!(
            "{} is {}, or a copy of it, expected another device",
            new.name,
            self.described(found.leg)
        ))
    }

    pub(super) fn add(
        &mut self,
        new: &Leg,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<String, String> {
        let Assembly { legs, gone, .. } = self.assembly;
        let number = if gone == 0 { u32::from(legs) } else { gone.trailing_zeros() };
        let number = u8::try_from(number).ok().filter(|number| usize::from(*number) < LEGS_MAX);
        let number = number.ok_or(format!("it has {legs} legs, expected less than {LEGS_MAX}"))?;
        let mut change = self.change(number)?;
        (change.legs, change.gone) = (legs.max(number + 1), gone & !(1 << number));
        self.admit(change, number, new, now)?;
        Ok(self.said(&format!("leg {number} is {}; it is copied to while it is open", new.name)))
    }

    pub(super) fn replace(
        &mut self,
        number: u8,
        new: &Leg,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<String, String> {
        let change = self.change(number)?;
        self.admit(change, number, new, now)?;
        let left = self.wipe(number, now);
        let text = format!("leg {number} is {}; it is copied to while it is open{left}", new.name);
        Ok(self.said(&text))
    }

    /// How many legs are left without this one.
    fn check_remove(&self, number: u8) -> Result<u32, String> {
        let left = self.numbers().count_ones() - 1;
        if left < 2 {
            return Err(format!("{left} leg would be left, expected 2; replace it instead"));
        }
        self.change(number).map(|_| left)
    }

    pub(super) fn remove(
        &mut self,
        number: u8,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<String, String> {
        let left = self.check_remove(number)?;
        let mut change = self.change(number)?;
        change.gone |= 1 << number;
        self.tell(&change, number, now)?;
        let wiped = self.wipe(number, now);
        Ok(self.said(&format!("leg {number} is gone; {left} are left{wiped}")))
    }

    fn said(&self, text: &str) -> String {
        format!("mirror {}: {text}", uuid_text(self.assembly.uuid))
    }

    /// What changes whatever becomes of this leg: that it is not in sync. Legs that are missing are
    /// not either, as after a write without them.
    fn change(&self, number: u8) -> Result<Change, String> {
        let Assembly { legs, gone, generation, known, ref dirty, .. } = self.assembly;
        let in_sync = self.assembly.in_sync & !(1 << number);
        if in_sync == 0 {
            return Err(format!("leg {number} is the only one in sync, expected another one"));
        }
        // What differs is read from the first leg in sync, and may have been seen by somebody.
        let is_source = self.assembly.in_sync.trailing_zeros() == u32::from(number);
        let unequal = dirty.iter().count();
        if is_source && unequal > 0 {
            return Err(format!(
                "leg {number} is the one that is read where legs may differ, and {unequal} regions \
                 may, expected none; keep the mirror open and idle until `tenmil get mirrors` says \
                 that nothing is dirty"
            ));
        }
        let (generation, dirty) = (generation + 1, dirty.clone());
        let fresh = self.assembly.fresh & !(1 << number);
        Ok(Change { generation, legs, gone, in_sync, fresh, known, dirty })
    }

    /// Makes a device this leg, which is stale.
    fn admit(
        &mut self,
        mut change: Change,
        number: u8,
        new: &Leg,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<(), String> {
        check_leg(new, &self.assembly.shape)?;
        change.fresh |= 1 << number;
        change.known[usize::from(number)] = change.generation;
        // Both copies, so that nothing older is left.
        for sequence in [1, 2] {
            self.write(new, &self.superblock(&change, number, sequence), now)?;
        }
        self.tell(&change, number, now)
    }

    /// Writes the superblocks of all other legs that are there, one after the other.
    fn tell(
        &mut self,
        change: &Change,
        except: u8,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<(), String> {
        // Those in sync first: the others decide nothing.
        let present = self.assembly.present() & !(1 << except);
        let (first, last) = (present & change.in_sync, present & !change.in_sync);
        for leg in legs_of(first).chain(legs_of(last)) {
            let sequence = self.assembly.sequences[usize::from(leg)].draw();
            let superblock = self.superblock(change, leg, sequence);
            let place = self.assembly.places[usize::from(leg)].ok_or("a leg has no place")?;
            self.write(&self.legs[place], &superblock, now)?;
        }
        Ok(())
    }

    fn superblock(&self, change: &Change, leg: u8, sequence: u64) -> Superblock {
        let Change { generation, legs, gone, in_sync, fresh, known, ref dirty } = *change;
        let (uuid, shape, dirty) = (self.assembly.uuid, self.assembly.shape, dirty.clone());
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
            owner: Ownership { epoch: self.assembly.owner.epoch, ..Ownership::NONE },
            dirty,
        }
    }

    fn write(
        &self,
        leg: &Leg,
        superblock: &Superblock,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<(), String> {
        let medium = leg.medium.clone()?;
        let mut raw = Raw::open(self.regions, &self.room, &*medium)?;
        raw.write(superblock, now).map_err(|problem| format!("{}: {problem}", leg.name))
    }

    /// The old leg, if it is there, is no leg of anything any more. What there is to say if it could
    /// not be told so: the others know, and refuse it.
    fn wipe(&self, number: u8, now: &mut dyn FnMut() -> Instant) -> String {
        let place = self.assembly.places[usize::from(number)];
        let Some(leg) = place.map(|place| &self.legs[place]) else { return String::new() };
        let wiped = leg.medium.clone().and_then(|medium| {
            Raw::open(self.regions, &self.room, &*medium).and_then(|mut raw| raw.wipe(now))
        });
        match wiped {
            Ok(()) => String::new(),
            Err(problem) => {
                format!("; {} still says that it is leg {number}: {problem}", leg.name)
            }
        }
    }
}
