//! A mirror that is looked at: its superblocks are read, and nothing is written, so it gets no owner.

use std::sync::Arc;

use tenmil_base::{BlockDevice, BlockExtent, Error, IoChannel, Limits, Operation, OperationSet};
use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};
use tenmil_volume::mirror::uuid_text;

use super::assembly::{MirrorAssembly, assemble};
use super::ownership::check_no_live_owner;
use super::status::describe_assembly;
use super::superblock_commit::leg_numbers_in;
use super::{
    MirrorLegDevice, OpenedLegs, check_leg, limits_of, open_legs, parse_options,
    read_leg_candidates,
};
use crate::split::SplitDevice;

/// The blocks of one leg in sync, to be read.
struct ReadOnlyMirror {
    blocks: SplitDevice,
    limits: Limits,
}

/// Operations that change nothing.
const READING: OperationSet = OperationSet::from_operations(&[
    Operation::Read,
    Operation::Compare,
    Operation::Verify,
    Operation::Flush,
]);

/// Opens `mirror:[URI],[URI]?degraded=no` to look at it. It can be read, from one leg.
///
/// # Errors
///
/// As of any opening: these legs are not one mirror, one may be newer, or the mirror has an owner.
pub fn open_mirror_read_only(opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
    let options = parse_options(uri)?;
    let OpenedLegs { legs, existing, handles, mut identities } = open_legs(opener, uri.children());
    let refuse = |problem: Error| Error::from(uri.error(problem));
    let mut now = || opener.clock.now();
    let candidates = read_leg_candidates(opener.regions, &legs, &mut now).map_err(refuse)?;
    check_no_live_owner(&candidates, None, false).map_err(refuse)?;
    let assembly = assemble(&candidates, options.start_policy()).map_err(refuse)?;
    let medium = ReadOnlyMirror::new(&legs, &assembly).map_err(refuse)?;
    let description = describe_assembly(&assembly, &candidates) + ", for reading only";
    identities.push((uri.clone(), uuid_text(assembly.uuid)));
    Ok(OpenedDevice { medium: Arc::new(medium), description, existing, handles, identities })
}

impl ReadOnlyMirror {
    fn new(legs: &[MirrorLegDevice], assembly: &MirrorAssembly) -> Result<Self, Error> {
        let geometry = &assembly.geometry;
        let there = assembly.places.iter().map(|place| place.map(|index| &legs[index]));
        let there: Vec<Option<&MirrorLegDevice>> = there.collect();
        there.iter().flatten().try_for_each(|leg| check_leg(leg, geometry))?;
        let medium =
            |leg: Option<&MirrorLegDevice>| leg.and_then(|leg| leg.medium.as_ref().ok().cloned());
        let media: Vec<_> = there.iter().map(|leg| medium(*leg)).collect();
        let mut sound = leg_numbers_in(assembly.in_sync & assembly.present_mask());
        let source = sound.find_map(|leg| media[usize::from(leg)].clone());
        let source = source.ok_or_else(|| Error::environment("no leg of the mirror is there"))?;
        let blocks = SplitDevice::new(source, geometry.first, geometry.block_count);
        let blocks = blocks?;
        let limits = limits_of(&media, geometry);
        let operations = READING.intersection(limits.operations);
        let limits = Limits { operations, ..limits };
        Ok(Self { blocks, limits })
    }
}

impl BlockDevice for ReadOnlyMirror {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        self.blocks.channel()
    }

    fn channels_max(&self) -> u32 {
        self.blocks.channels_max()
    }

    fn block_status(&self, lba: u64) -> Result<BlockExtent, Error> {
        self.blocks.block_status(lba)
    }
}
