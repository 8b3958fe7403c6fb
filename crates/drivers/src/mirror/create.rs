//! Creation of a mirror: writes initial superblocks.

use std::sync::Arc;

use tenmil_base::{BlockDevice, ErrorCategory, ExtentKind, Instant, Operation};
use tenmil_dma::RegionTable;
use tenmil_linux::kernel_files::KernelFiles;

use super::assembly::LegReadResult;
use super::mirror_shared::superblock_len_bytes;
use super::ownership::check_no_live_owner;
use super::{MirrorLegDevice, OpenedLegs, open_legs, superblock_io};
use tenmil_base::Error;
use tenmil_block::Opener;
use tenmil_block::device_identity::DeviceIdentity;
use tenmil_block::overwrite;
use tenmil_block::uri::Uri;
use tenmil_volume::mirror::MirrorOwnership;
use tenmil_volume::mirror::RegionBitmap;
use tenmil_volume::mirror::{LEGS_MAX, MirrorCommonFields, MirrorGeometry, uuid_text};

/// Creates a mirror over the given devices, in that order.
///
/// # Errors
///
/// If a device cannot be opened or is too small, their block sizes differ, or there is existing data on
/// one of them and `overwrite` is not set.
pub fn create_mirror(opener: &Opener<'_>, uris: &[Uri], overwrite: bool) -> Result<String, Error> {
    let refuse = |text: Error| Error::new(ErrorCategory::Usage, format!("make a mirror: {text}"));
    if !(2..=LEGS_MAX).contains(&uris.len()) {
        let count = uris.len();
        return Err(refuse(Error::environment(format!(
            "{count} legs are given, expected 2 to {LEGS_MAX}"
        ))));
    }
    check_uris_differ(uris, &[]).map_err(refuse)?;
    let OpenedLegs { legs, existing, identities, .. } = open_legs(opener, uris);
    check_uris_differ(uris, &identities).map_err(refuse)?;
    if let Some(error) = legs.iter().find_map(|leg| leg.medium.as_ref().err()) {
        return Err(refuse(error.clone()));
    }
    overwrite::check_overwrite_allowed(
        "mirror create",
        &existing,
        overwrite,
        &KernelFiles::live_system(),
    )?;
    let uuid =
        u128::from(tenmil_linux::random_seed()) << 64 | u128::from(tenmil_linux::random_seed());
    let mut now = || opener.clock.now();
    // A mirror that is to be overwritten may still be open elsewhere.
    let found =
        superblock_io::read_leg_candidates(opener.regions, &legs, &mut now).map_err(refuse)?;
    check_no_live_owner(&found, None, false).map_err(refuse)?;
    format_mirror(opener.regions, &legs, uuid, &mut now).map_err(refuse)
}

/// Writes initial superblocks to every leg, all in sync.
pub(super) fn format_mirror(
    regions: &RegionTable,
    legs: &[MirrorLegDevice],
    uuid: u128,
    now: &mut dyn FnMut() -> Instant,
) -> Result<String, Error> {
    let media: Vec<(String, &Arc<dyn BlockDevice>)> = legs
        .iter()
        .map(|leg| {
            leg.medium.as_ref().map(|medium| (leg.display_name(), medium)).map_err(Clone::clone)
        })
        .collect::<Result<_, _>>()?;
    let (first_name, first) = &media[0];
    let block_size = first.limits().block_size;
    if let Some((name, other)) = media.iter().find(|(_, leg)| leg.limits().block_size != block_size)
    {
        return Err(Error::environment(format!(
            "{name} has blocks of {} bytes, expected {block_size} as on {first_name}",
            other.limits().block_size
        )));
    }
    let blocks = media.iter().map(|(_, leg)| leg.limits().block_count).min().unwrap_or(0);
    let geometry = MirrorGeometry::for_legs(block_size, blocks)
        .ok_or_else(|| {
            format!(
                "the shortest leg has {blocks} blocks of {block_size} bytes, expected over 1 MiB"
            )
        })
        .map_err(Error::environment)?;
    legs.iter().try_for_each(|leg| check_leg(leg, &geometry))?;
    let count =
        u8::try_from(legs.len()).map_err(|_| "too many legs").map_err(Error::environment)?;
    let dirty = regions_not_known_zero(&media, &geometry)?;
    tenmil_linux::storage_file::commit_created().map_err(Error::environment)?;
    let room = superblock_io::allocate_superblock_memory(regions)?;
    let common = MirrorCommonFields {
        uuid,
        generation: 1,
        legs: count,
        geometry,
        in_sync: u8::MAX >> (8 - count),
        gone: 0,
        fresh: 0,
        known: [1; LEGS_MAX],
        owner: MirrorOwnership::NONE,
        dirty: &dirty,
    };
    for (leg, (name, medium)) in (0..).zip(&media) {
        let mut raw = superblock_io::SuperblockIo::open(regions, &room, &***medium)?;
        // Both copies, so that nothing older remains.
        for sequence in [1, 2] {
            raw.write(&common.superblock_of_leg(leg, sequence), now)
                .map_err(|problem| format!("{name}: {problem}"))
                .map_err(Error::environment)?;
        }
    }
    check_devices_differ(regions, legs, now)?;
    let size = geometry.block_count * u64::from(block_size);
    let (uuid, copied) = (uuid_text(uuid), dirty.count());
    let regions = geometry.regions();
    Ok(format!("mirror {uuid}: {count} legs, {size} bytes, {copied} of {regions} regions to copy"))
}

/// Rejects URIs of which two lead to the same blocks. `identities` are those of open devices.
fn check_uris_differ(uris: &[Uri], identities: &[(Uri, String)]) -> Result<(), Error> {
    let device = |uri| DeviceIdentity::of_stack_on_names(uri, identities);
    let devices: Vec<DeviceIdentity> = uris.iter().map(device).collect();
    for (twice, uri) in uris.iter().enumerate() {
        for first in 0..twice {
            let is_same = *uri == uris[first];
            if is_same || devices[first].describe_overlap(&devices[twice]).is_some() {
                let first = &uris[first];
                return Err(Error::environment(format!(
                    "{first:#} and {uri:#} are one device, expected different ones"
                )));
            }
        }
    }
    Ok(())
}

/// Rejects devices that turn out to be the same: a superblock written to one of them is found on another.
fn check_devices_differ(
    regions: &RegionTable,
    legs: &[MirrorLegDevice],
    now: &mut dyn FnMut() -> Instant,
) -> Result<(), Error> {
    for (index, candidate) in
        superblock_io::read_leg_candidates(regions, legs, now)?.into_iter().enumerate()
    {
        match candidate.found {
            LegReadResult::Leg(found) if usize::from(found.leg) == index => {}
            LegReadResult::Leg(found) => {
                let name = &candidate.name;
                let other = legs
                    .get(usize::from(found.leg))
                    .map_or("another leg".to_owned(), MirrorLegDevice::display_name);
                return Err(Error::environment(format!(
                    "{name} and {other} are one device, expected different ones"
                )));
            }
            LegReadResult::Missing(why) => {
                return Err(Error::environment(format!("{}: {why}", candidate.name)));
            }
            LegReadResult::Foreign(_) => {
                let name = &candidate.name;
                return Err(Error::environment(format!(
                    "{name} does not hold what was written to it"
                )));
            }
        }
    }
    Ok(())
}

/// Regions that are not known to read as zeroes on all legs.
fn regions_not_known_zero(
    media: &[(String, &Arc<dyn BlockDevice>)],
    geometry: &MirrorGeometry,
) -> Result<RegionBitmap, Error> {
    let mut dirty = RegionBitmap::new(geometry.regions());
    for (_, medium) in media {
        let mut at = 0;
        while at < geometry.block_count {
            let extent = medium.block_status(at + geometry.first)?;
            let blocks = extent.blocks.clamp(1, geometry.block_count - at);
            if extent.kind == ExtentKind::Data {
                let (first, count) = geometry.regions_of(at, blocks);
                (first..first + count).for_each(|region| {
                    dirty.set(region);
                });
            }
            at += blocks;
        }
    }
    Ok(dirty)
}

/// Rejects a leg that does not fit this geometry.
pub(super) fn check_leg(leg: &MirrorLegDevice, geometry: &MirrorGeometry) -> Result<(), Error> {
    let Ok(medium) = &leg.medium else { return Ok(()) };
    let limits = medium.limits();
    let name = leg.display_name();
    if limits.block_size != geometry.block_size || limits.metadata_size != 0 {
        return Err(Error::environment(format!(
            "{name} has blocks of {} and {} bytes of metadata, expected {} and none",
            limits.block_size, limits.metadata_size, geometry.block_size
        )));
    }
    let needed = geometry.first + geometry.block_count;
    if limits.block_count < needed {
        return Err(Error::environment(format!(
            "{name} has {} blocks, expected {needed}",
            limits.block_count
        )));
    }
    let superblock_blocks = superblock_len_bytes(geometry.block_size) / geometry.block_size;
    if limits.request_blocks_max < superblock_blocks {
        return Err(Error::environment(format!(
            "{name} takes {} blocks at once, expected {superblock_blocks} for a superblock",
            limits.request_blocks_max
        )));
    }
    let needs = [Operation::Read, Operation::Write, Operation::Flush];
    if let Some(lacks) = needs.into_iter().find(|need| !limits.operations.has(*need)) {
        return Err(Error::environment(format!("{name} has no {}, expected one", lacks.name())));
    }
    Ok(())
}
