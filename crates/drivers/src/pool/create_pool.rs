//! Creates, opens, checks and takes over pools.

use tenmil_base::{BlockDevice, ErrorCategory, IoStatus};
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_volume::device_table::LABEL_BLOCKS;
use tenmil_volume::format::STORE_BLOCKS_MIN;
use tenmil_volume::{
    CreateStep, OpenedPool as OpenedStore, Pool, PoolConfig, PoolError, PoolOpening, PoolOwner,
};

use super::grow_pool::GrowResult;
use super::page_io::BlockingPageIo;
use super::parent_image::{self, ChildPool};
use super::pool_check::{PoolCheckResult, ReadOnlyWalker};
use super::pool_devices::{PoolDevice, PoolDevices};
use super::{OpenPool, PageGeometry, VolumeRef, pool_error};
use crate::owner_identity;
use tenmil_base::Error;
use tenmil_block::Opener;
use tenmil_block::uri::Uri;
use tenmil_block::{ExistingData, overwrite};

/// Result of creating a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateResult {
    /// Number of 4 KiB blocks.
    pub blocks: u64,
    /// The pool existed with this name and size; nothing was written.
    pub was_there: bool,
}

/// Creates a pool on a device, unless it exists already.
///
/// # Errors
///
/// If the device cannot be opened or is too small, or has other data and `overwrite` is not set.
pub fn create_pool(
    opener: &Opener<'_>,
    uri: &Uri,
    name: &str,
    overwrite: bool,
) -> Result<CreateResult, Error> {
    create_on_devices(opener, (uri, &[]), name, overwrite)
}

/// Creates a pool on one or more devices, unless it exists already.
///
/// # Errors
///
/// The same as for [`create_pool`] and [`OpenPool::grow_pool`]. Nothing is written if one of the devices is rejected.
pub fn create_on_devices(
    opener: &Opener<'_>,
    (uri, others): (&Uri, &[Uri]),
    name: &str,
    overwrite: bool,
) -> Result<CreateResult, Error> {
    let below = opener.open(uri)?;
    let geometry = PageGeometry::from_limits(uri, &below.medium.limits())?;
    let steps = pool_create_steps(uri, name, &geometry)?;
    let there = open_pool_store(opener, &VolumeRef::pool_on(uri), &*below.medium, &geometry, None);
    if let Some(owner) = there.as_ref().ok().and_then(|there| there.store.owner())
        && overwrite
        && !owner_identity::has_owner_ended(&owner)
    {
        return Err(pool_error(&format!("{uri:#}"), &PoolError::Owned { by: Box::new(owner) }));
    }
    let is_there = !overwrite
        && there.is_ok_and(|there| is_pool_being_created(&there.store, name, &geometry, others));
    if !is_there {
        let mut existing = below.existing.clone();
        for other in others {
            existing.extend(check_device_for_new_pool(opener, other)?);
        }
        overwrite::check_overwrite_allowed(
            "pool create",
            &existing,
            overwrite,
            &KernelFiles::live_system(),
        )?;
        commit_created_files()?;
        run_create_steps(opener, uri, &*below.medium, &geometry, steps)?;
    }
    drop(below);
    if others.is_empty() {
        return Ok(CreateResult { blocks: geometry.pages, was_there: is_there });
    }
    // They have been checked, and some may have been created just now.
    let grown = open_and_grow(opener, &VolumeRef::pool_on(uri), others, !is_there)?;
    let was_there = is_there && grown.before == grown.blocks;
    Ok(CreateResult { blocks: grown.blocks, was_there })
}

/// Makes the files that were opened and are not there yet: nothing is refused any more.
pub(super) fn commit_created_files() -> Result<(), Error> {
    tenmil_linux::storage_file::commit_created()
        .map_err(|error| Error::new(error.category(), error.to_string()))
}

/// Whether a store is the one that is to be made, or one from which it was begun.
fn is_pool_being_created(
    store: &Pool,
    name: &str,
    geometry: &PageGeometry,
    others: &[Uri],
) -> bool {
    let devices = store.devices();
    store.name() == name && devices.first == geometry.pages && devices.count() <= 1 + others.len()
}

/// Checks whether a device can be added, and returns its existing data.
fn check_device_for_new_pool(opener: &Opener<'_>, uri: &Uri) -> Result<Vec<ExistingData>, Error> {
    let member = PoolDevice::from_opened(uri, opener.open(uri)?)?;
    let (blocks, needed) = (member.geometry.pages, STORE_BLOCKS_MIN + LABEL_BLOCKS);
    if blocks < needed {
        let error = PoolError::DeviceTooSmall { blocks, needed };
        return Err(pool_error(&format!("{uri:#}"), &error));
    }
    Ok(member.opened.existing)
}

/// The steps to create a pool.
pub(super) fn pool_create_steps(
    uri: &Uri,
    name: &str,
    geometry: &PageGeometry,
) -> Result<Vec<CreateStep>, Error> {
    let uuid =
        u128::from(tenmil_linux::random_seed()) << 64 | u128::from(tenmil_linux::random_seed());
    let new = PoolConfig { name: name.into(), uuid, blocks: geometry.pages };
    new.create_steps().map_err(|error| pool_error(&format!("{uri:#}"), &error))
}

/// Executes the steps to create a pool.
pub(super) fn run_create_steps(
    opener: &Opener<'_>,
    uri: &Uri,
    medium: &dyn BlockDevice,
    geometry: &PageGeometry,
    steps: Vec<CreateStep>,
) -> Result<(), Error> {
    let refuse = |problem: String| Error::new(ErrorCategory::Remote, format!("{uri:#}: {problem}"));
    let mut raw = BlockingPageIo::open(opener.regions, &opener.clock, medium, geometry)
        .map_err(|problem| Error::new(ErrorCategory::Environment, format!("{uri:#}: {problem}")))?;
    for step in steps {
        let done = match &step {
            CreateStep::Write { at, bytes } => raw.write(*at, bytes),
            CreateStep::Flush => raw.flush(),
        };
        done.map_err(|status| refuse(format!("write a superblock: {status}, expected success")))?;
    }
    Ok(())
}

/// Opens a pool and grows it: see [`OpenPool::grow_pool`].
///
/// # Errors
///
/// If there is no valid pool, and as for [`OpenPool::grow_pool`].
pub fn open_and_grow(
    opener: &Opener<'_>,
    place: &VolumeRef,
    added: &[Uri],
    overwrite: bool,
) -> Result<GrowResult, Error> {
    OpenPool::open(opener, place)?.grow_pool(opener, added, overwrite)
}

/// Takes a pool over from its owner, durably, so that any process may open it: only from an owner
/// that is known to have ended, or that the devices exclude from writing, unless [`VolumeRef::force`] is set. Returns
/// the former owner.
///
/// # Errors
///
/// If the owner may still be running, or there is no valid pool.
pub fn take_over_pool(opener: &Opener<'_>, place: &VolumeRef) -> Result<Option<String>, Error> {
    let place = VolumeRef { takes_over: true, ..place.clone() };
    let open = OpenPool::open(opener, &place)?;
    let former = open.shared.lock().store.owner().map(|owner| owner.to_string());
    open.claim_ownership()?;
    Ok(former)
}

/// Checks all metadata of a pool that is not open. Nothing is written.
///
/// # Errors
///
/// If there is no valid pool.
pub fn check_closed_pool(opener: &Opener<'_>, place: &VolumeRef) -> Result<PoolCheckResult, Error> {
    let device = place.store.clone().read_only();
    let mut pool_devices = PoolDevices::with_single_device(&place.store, opener.open(&device)?)?;
    let opened =
        open_pool_store(opener, place, &*pool_devices.medium, &pool_devices.geometry, None)?;
    let OpenedStore { mut store, damaged } = opened;
    pool_devices.open_others(opener, place, &store, true)?;
    let mut raw = BlockingPageIo::open(
        opener.regions,
        &opener.clock,
        &*pool_devices.medium,
        &pool_devices.geometry,
    )
    .map_err(|problem| Error::new(ErrorCategory::Environment, format!("{device:#}: {problem}")))?;
    let mut walk = ReadOnlyWalker { pages: &mut raw, store: &mut store };
    let (report, found) = walk.check_pool(&mut |_| Ok(()))?;
    let name = place.store.to_string();
    let child = ChildPool { device: &name, uuid: store.uuid() };
    let parents = parent_image::check_parents(opener, child, found.into_iter());
    Ok(PoolCheckResult {
        name: store.name(),
        uuid: store.uuid(),
        generation: store.generation(),
        devices: pool_devices.infos(store.devices()),
        damaged: damaged.iter().map(ToString::to_string).collect(),
        report,
        parents,
    })
}

/// Reads and opens the pool on a device.
pub(super) fn open_pool_store(
    opener: &Opener<'_>,
    place: &VolumeRef,
    medium: &dyn BlockDevice,
    geometry: &PageGeometry,
    me: Option<PoolOwner>,
) -> Result<OpenedStore, Error> {
    let name = format!("{:#}", place.store);
    let mut raw = BlockingPageIo::open(opener.regions, &opener.clock, medium, geometry)
        .map_err(|problem| Error::new(ErrorCategory::Environment, format!("{name}: {problem}")))?;
    let mut opening = PoolOpening::new(geometry.pages, place.cache_bytes).with_bugs(place.bugs);
    if let Some(me) = me {
        opening = opening.for_writing(me);
    }
    while let Some(at) = opening.next_read() {
        read_page_for(&mut raw, at, |bytes| opening.handle_read(bytes));
    }
    opening.finish().map_err(|error| {
        let error = match error {
            PoolError::NotAPool(_) if geometry.pages < STORE_BLOCKS_MIN => {
                let needed = STORE_BLOCKS_MIN;
                PoolError::DeviceTooSmall { blocks: geometry.pages, needed }
            }
            error => error,
        };
        pool_error(&name, &error)
    })
}

pub(super) fn read_page_for(
    raw: &mut BlockingPageIo<'_>,
    at: u64,
    take: impl FnOnce(Result<&[u8; 4096], IoStatus>),
) {
    let mut page = [0; 4096];
    let read = raw.read(at, &mut page);
    take(read.map(|()| &page));
}
