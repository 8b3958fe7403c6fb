//! Membership changes of an offline mirror: adds, removes or replaces a leg.
//!
//! ```text
//!   add, replace   new leg: stale ──▶ all other legs: it is a leg, fresh ──▶ old leg: wiped
//!   remove                            all other legs: it is removed ───────▶ old leg: wiped
//! ```
//!
//! Each arrow is a superblock that is durable before the next is written, with a higher generation than
//! any before. The first leg that has it decides, so after a power loss the mirror is in its old or its
//! new state, and no data is lost in either.
//! The new leg is stale until the mirror has been open long enough to copy everything to it; the other
//! legs are not written for that.

use tenmil_base::{ErrorCategory, Instant};
use tenmil_dma::{Region, RegionTable};
use tenmil_linux::kernel_files::KernelFiles;

use super::assembly::{DegradedStartPolicy, LegCandidate, LegReadResult, MirrorAssembly, assemble};
use super::create::check_leg;
use super::ownership::check_no_live_owner;
use super::superblock_commit::leg_numbers_in;
use super::superblock_io::{self, SuperblockIo, read_leg_candidates};
use super::{MirrorLegDevice, OpenedLegs, open_legs, parse_options};
use tenmil_base::Error;
use tenmil_block::Opener;
use tenmil_block::device_identity::DeviceIdentity;
use tenmil_block::overwrite;
use tenmil_block::uri::{Uri, short_form_for_terminal};
use tenmil_volume::mirror::MirrorOwnership;
use tenmil_volume::mirror::RegionBitmap;
use tenmil_volume::mirror::{LEGS_MAX, MirrorCommonFields, MirrorSuperblock, uuid_text};

/// A mirror that is not open, and the contents of its superblocks.
pub(super) struct OfflineMirror<'a> {
    regions: &'a RegionTable,
    room: Region,
    legs: &'a [MirrorLegDevice],
    assembly: MirrorAssembly,
    /// World-wide names of the legs' devices, where known.
    identities: &'a [(Uri, String)],
}

/// New contents of all superblocks.
struct SuperblockUpdate {
    generation: u64,
    legs: u8,
    gone: u8,
    in_sync: u8,
    fresh: u8,
    known: [u64; LEGS_MAX],
    dirty: RegionBitmap,
}

/// Adds a leg to a mirror. Returns a report for the user.
///
/// # Errors
///
/// If the legs are not those of one mirror, or the device cannot be opened, does not fit, or has existing
/// data and `overwrite` is not set.
pub fn add_leg(
    opener: &Opener<'_>,
    uri: &Uri,
    new: &Uri,
    overwrite: bool,
) -> Result<String, Error> {
    let doing = format!("add {new}");
    run_membership_change(opener, uri, &doing, |members, now| {
        let leg = open_new_leg(opener, (uri, members.identities), new, overwrite, now)?;
        members.check_not_a_member(&leg, None, now).map_err(usage_error)?;
        members.add_leg(&leg, now).map_err(usage_error)
    })
}

/// Asks the operator to confirm a change, which is described in one line.
pub type ConfirmReplace<'a> = &'a mut dyn FnMut(&str) -> Result<(), Error>;

/// Replaces one leg by another device, if `consent` is given. The old leg is named by its number or by
/// its device, in any spelling. It may be absent. If it is present, its superblock is erased.
///
/// # Errors
///
/// The same as for [`add_leg`], and if there is no such leg, no other one is in sync, or consent is refused.
pub fn replace_leg(
    opener: &Opener<'_>,
    uri: &Uri,
    old: &str,
    new: &Uri,
    overwrite: bool,
    consent: ConfirmReplace<'_>,
) -> Result<String, Error> {
    let doing = format!("replace {old}");
    run_membership_change(opener, uri, &doing, |members, now| {
        let number = members.leg_number(old).map_err(usage_error)?;
        members.update_without_leg(number).map_err(usage_error)?;
        let leg = open_new_leg(opener, (uri, members.identities), new, overwrite, now)?;
        members.check_not_a_member(&leg, Some(number), now).map_err(usage_error)?;
        consent(&format!("{} is replaced by {new}", members.describe_leg(number)))?;
        members.replace_leg(number, &leg, now).map_err(usage_error)
    })
}

/// Removes a leg from a mirror of three or more, if `consent` is given. The leg is named as for
/// [`replace_leg`].
///
/// # Errors
///
/// If the legs are not those of one mirror, there is no such leg, no other one is in sync, only one would
/// be left, or consent is refused.
pub fn remove_leg(
    opener: &Opener<'_>,
    uri: &Uri,
    old: &str,
    consent: ConfirmReplace<'_>,
) -> Result<String, Error> {
    let doing = format!("remove {old}");
    run_membership_change(opener, uri, &doing, |members, now| {
        let number = members.leg_number(old).map_err(usage_error)?;
        members.legs_left_without(number).map_err(usage_error)?;
        consent(&format!("{} is removed", members.describe_leg(number)))?;
        members.remove_leg(number, now).map_err(usage_error)
    })
}

fn run_membership_change(
    opener: &Opener<'_>,
    uri: &Uri,
    doing: &str,
    change: impl FnOnce(&mut OfflineMirror<'_>, &mut dyn FnMut() -> Instant) -> Result<String, Error>,
) -> Result<String, Error> {
    if uri.scheme() != "mirror" {
        return Err(uri.error("not a mirror, expected mirror:[URI],[URI]").into());
    }
    let options = parse_options(uri)?;
    let OpenedLegs { legs, identities, .. } = open_legs(opener, uri.children());
    let mut now = || opener.clock.now();
    let members = OfflineMirror::assemble(opener.regions, &legs, options.start_policy(), &mut now);
    let members = members.map(|members| OfflineMirror { identities: &identities, ..members });
    let members = members.map_err(usage_error);
    members
        .and_then(|mut members| change(&mut members, &mut now))
        .map_err(|error| error.with_context(format_args!("{uri:#}: {doing}")))
}

/// A usage error.
fn usage_error(text: impl std::fmt::Display) -> Error {
    Error::new(ErrorCategory::Usage, text)
}

/// Opens a device that is to become a leg: not a leg of this mirror, and without existing data unless
/// `overwrite` is set.
fn open_new_leg(
    opener: &Opener<'_>,
    (mirror, identities): (&Uri, &[(Uri, String)]),
    uri: &Uri,
    overwrite: bool,
    now: &mut dyn FnMut() -> Instant,
) -> Result<MirrorLegDevice, Error> {
    let is_taken = |device: &DeviceIdentity| {
        let legs = mirror.children().iter();
        let mut legs = legs.map(|leg| DeviceIdentity::of_stack_on_names(leg, identities));
        legs.any(|leg| leg.is_same_device(device))
    };
    let refused = || usage_error(format!("{uri:#} is a leg already, expected another device"));
    if mirror.children().contains(uri) || is_taken(&DeviceIdentity::of_uri(uri)) {
        return Err(refused());
    }
    let opened = opener.open(uri)?;
    if is_taken(&DeviceIdentity::of_opened(uri, &opened)) {
        return Err(refused());
    }
    let leg = MirrorLegDevice { name: uri.to_string(), medium: Ok(opened.medium) };
    overwrite::check_overwrite_allowed(
        "a new leg",
        &opened.existing,
        overwrite,
        &KernelFiles::live_system(),
    )?;
    let found = read_leg_candidates(opener.regions, std::slice::from_ref(&leg), now)
        .map_err(usage_error)?;
    check_no_live_owner(&found, None, false).map_err(usage_error)?;
    if let Some(LegReadResult::Leg(found)) = found.first().map(|candidate| &candidate.found)
        && !overwrite
    {
        let (number, uuid) = (found.leg, uuid_text(found.uuid));
        return Err(usage_error(format!(
            "{uri:#} is leg {number} of mirror {uuid}, expected none, or --overwrite"
        )));
    }
    Ok(leg)
}

impl<'a> OfflineMirror<'a> {
    pub(super) fn assemble(
        regions: &'a RegionTable,
        legs: &'a [MirrorLegDevice],
        start: DegradedStartPolicy,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<Self, Error> {
        let candidates: Vec<LegCandidate> = read_leg_candidates(regions, legs, now)?;
        check_no_live_owner(&candidates, None, false)?;
        let assembly = assemble(&candidates, start)?;
        Ok(Self {
            regions,
            room: superblock_io::allocate_superblock_memory(regions)?,
            legs,
            assembly,
            identities: &[],
        })
    }

    /// The leg with this number or on this device.
    fn leg_number(&self, name: &str) -> Result<u8, Error> {
        let all = self.leg_numbers();
        let found = match name.parse::<u8>() {
            Ok(number) => all & 1_u8.checked_shl(number.into()).unwrap_or(0),
            Err(_) => leg_numbers_in(all)
                .filter(|leg| self.is_leg_on_device(*leg, name))
                .fold(0, |all, leg| all | 1 << leg),
        };
        let mut found = leg_numbers_in(found);
        match (found.next(), found.next()) {
            (Some(number), None) => Ok(number),
            (first, _) => {
                let count = if first.is_none() { "no leg is" } else { "several legs are" };
                let all: Vec<String> =
                    leg_numbers_in(all).map(|leg| self.describe_leg(leg)).collect();
                Err(Error::environment(format!(
                    "{count} `{name}`, expected one of: {}",
                    all.join(", ")
                )))
            }
        }
    }

    /// Bit mask of the numbers that have a leg.
    fn leg_numbers(&self) -> u8 {
        u8::MAX >> (8 - self.assembly.legs) & !self.assembly.gone
    }

    /// Whether a leg is on the device with this name.
    fn is_leg_on_device(&self, leg: u8, name: &str) -> bool {
        let Some(found) = self.device_name(leg) else { return false };
        let same = |(one, other): (Uri, Uri)| {
            let device = |uri| DeviceIdentity::of_stack_on_names(uri, self.identities);
            device(&one).is_same_device(&device(&other))
        };
        found == name || found.parse().ok().zip(name.parse().ok()).is_some_and(same)
    }

    fn device_name(&self, leg: u8) -> Option<&str> {
        self.assembly.places[usize::from(leg)].map(|place| &*self.legs[place].name)
    }

    /// Description of a leg with its device and state.
    fn describe_leg(&self, leg: u8) -> String {
        let in_sync = self.assembly.in_sync & 1 << leg != 0;
        match self.device_name(leg).map(short_form_for_terminal) {
            Some(name) if in_sync => format!("leg {leg} ({name}, in sync)"),
            Some(name) => format!("leg {leg} ({name}, stale)"),
            None => format!("leg {leg} (absent)"),
        }
    }

    /// Rejects a device that is a remaining leg of this mirror under another name.
    fn check_not_a_member(
        &self,
        new: &MirrorLegDevice,
        replaced: Option<u8>,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<(), Error> {
        let found = read_leg_candidates(self.regions, std::slice::from_ref(new), now)?;
        let Some(LegReadResult::Leg(found)) = found.first().map(|one| &one.found) else {
            return Ok(());
        };
        let stays = self.assembly.present_mask() & !replaced.map_or(0, |leg| 1 << leg);
        if found.uuid != self.assembly.uuid || stays & 1 << found.leg == 0 {
            return Ok(());
        }
        Err(Error::environment(format!(
            "{} is {}, or a copy of it, expected another device",
            new.display_name(),
            self.describe_leg(found.leg)
        )))
    }

    pub(super) fn add_leg(
        &mut self,
        new: &MirrorLegDevice,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<String, Error> {
        let MirrorAssembly { legs, gone, .. } = self.assembly;
        let number = if gone == 0 { u32::from(legs) } else { gone.trailing_zeros() };
        let number = u8::try_from(number).ok().filter(|number| usize::from(*number) < LEGS_MAX);
        let number = number
            .ok_or(format!("it has {legs} legs, expected less than {LEGS_MAX}"))
            .map_err(Error::environment)?;
        let mut change = self.update_without_leg(number)?;
        (change.legs, change.gone) = (legs.max(number + 1), gone & !(1 << number));
        self.write_new_leg_superblocks(change, number, new, now)?;
        Ok(self.with_error_prefix(&format!(
            "leg {number} is {}; it is copied to while it is open",
            new.display_name()
        )))
    }

    pub(super) fn replace_leg(
        &mut self,
        number: u8,
        new: &MirrorLegDevice,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<String, Error> {
        let change = self.update_without_leg(number)?;
        self.write_new_leg_superblocks(change, number, new, now)?;
        let left = self.wipe_superblocks(number, now);
        let text = format!(
            "leg {number} is {}; it is copied to while it is open{left}",
            new.display_name()
        );
        Ok(self.with_error_prefix(&text))
    }

    /// The number of legs left without this one.
    fn legs_left_without(&self, number: u8) -> Result<u32, Error> {
        let left = self.leg_numbers().count_ones() - 1;
        if left < 2 {
            return Err(Error::environment(format!(
                "{left} leg would be left, expected 2; replace it instead"
            )));
        }
        self.update_without_leg(number).map(|_| left)
    }

    pub(super) fn remove_leg(
        &mut self,
        number: u8,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<String, Error> {
        let left = self.legs_left_without(number)?;
        let mut change = self.update_without_leg(number)?;
        change.gone |= 1 << number;
        self.write_other_superblocks(&change, number, now)?;
        let wiped = self.wipe_superblocks(number, now);
        Ok(self.with_error_prefix(&format!("leg {number} is removed; {left} are left{wiped}")))
    }

    fn with_error_prefix(&self, text: &str) -> String {
        format!("mirror {}: {text}", uuid_text(self.assembly.uuid))
    }

    /// The common part of every change: leg `number` is no longer in sync. Absent legs are not in sync
    /// either, as after a write without them.
    fn update_without_leg(&self, number: u8) -> Result<SuperblockUpdate, Error> {
        let MirrorAssembly { legs, gone, generation, known, ref dirty, .. } = self.assembly;
        let in_sync = self.assembly.in_sync & !(1 << number);
        if in_sync == 0 {
            return Err(Error::environment(format!(
                "leg {number} is the only one in sync, expected another one"
            )));
        }
        // Where legs differ, data is read from the first in-sync leg, and a client may have seen it.
        let is_source = self.assembly.in_sync.trailing_zeros() == u32::from(number);
        let unequal = dirty.iter().count();
        if is_source && unequal > 0 {
            return Err(Error::environment(format!(
                "leg {number} is the one that is read where legs may differ, and {unequal} regions \
                 may, expected none; keep the mirror open and idle until `tenmil get mirrors` shows \
                 that nothing is dirty"
            )));
        }
        let (generation, dirty) = (generation + 1, dirty.clone());
        let fresh = self.assembly.fresh & !(1 << number);
        Ok(SuperblockUpdate { generation, legs, gone, in_sync, fresh, known, dirty })
    }

    /// Writes the superblocks of a new, stale leg.
    fn write_new_leg_superblocks(
        &mut self,
        mut change: SuperblockUpdate,
        number: u8,
        new: &MirrorLegDevice,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<(), Error> {
        check_leg(new, &self.assembly.geometry)?;
        // Nothing is refused any more: the file of the new leg is made now.
        tenmil_linux::storage_file::commit_created().map_err(Error::environment)?;
        change.fresh |= 1 << number;
        change.known[usize::from(number)] = change.generation;
        // Both copies, so that nothing older remains.
        for sequence in [1, 2] {
            self.write_superblocks(new, &self.superblock(&change, number, sequence), now)?;
        }
        self.write_other_superblocks(&change, number, now)
    }

    /// Writes the superblocks of all other present legs, one after another.
    fn write_other_superblocks(
        &mut self,
        change: &SuperblockUpdate,
        except: u8,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<(), Error> {
        // In-sync legs first: the others decide nothing.
        let present = self.assembly.present_mask() & !(1 << except);
        let (first, last) = (present & change.in_sync, present & !change.in_sync);
        for leg in leg_numbers_in(first).chain(leg_numbers_in(last)) {
            let sequence = self.assembly.sequences[usize::from(leg)].next_for_older_copy();
            let superblock = self.superblock(change, leg, sequence);
            let place = self.assembly.places[usize::from(leg)]
                .ok_or("a leg has no place")
                .map_err(Error::environment)?;
            self.write_superblocks(&self.legs[place], &superblock, now)?;
        }
        Ok(())
    }

    fn superblock(&self, change: &SuperblockUpdate, leg: u8, sequence: u64) -> MirrorSuperblock {
        let SuperblockUpdate { generation, legs, gone, in_sync, fresh, known, ref dirty } = *change;
        let (uuid, geometry) = (self.assembly.uuid, self.assembly.geometry);
        let owner = MirrorOwnership { epoch: self.assembly.owner.epoch, ..MirrorOwnership::NONE };
        let common = MirrorCommonFields {
            uuid,
            generation,
            legs,
            geometry,
            in_sync,
            gone,
            fresh,
            known,
            owner,
            dirty,
        };
        common.superblock_of_leg(leg, sequence)
    }

    fn write_superblocks(
        &self,
        leg: &MirrorLegDevice,
        superblock: &MirrorSuperblock,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<(), Error> {
        let medium = leg.medium.clone()?;
        let mut raw = SuperblockIo::open(self.regions, &self.room, &*medium)?;
        raw.write(superblock, now)
            .map_err(|problem| format!("{}: {problem}", leg.display_name()))
            .map_err(Error::environment)
    }

    /// Erases the superblocks of the old leg, if present. Returns a note if that fails: the other legs
    /// know that it was removed, and reject it.
    fn wipe_superblocks(&self, number: u8, now: &mut dyn FnMut() -> Instant) -> String {
        let place = self.assembly.places[usize::from(number)];
        let Some(leg) = place.map(|place| &self.legs[place]) else { return String::new() };
        let wiped = leg.medium.clone().and_then(|medium| {
            SuperblockIo::open(self.regions, &self.room, &*medium).and_then(|mut raw| raw.wipe(now))
        });
        match wiped {
            Ok(()) => String::new(),
            Err(problem) => {
                format!("; {} is still labeled leg {number}: {problem}", leg.display_name())
            }
        }
    }
}
