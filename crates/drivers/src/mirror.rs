//! Mirror: keeps every block on several devices (RAID 1).
//!
//! ```text
//!   write ─┬─▶ leg 0     completes when all in-sync legs have it
//!          └─▶ leg 1
//!   read ────▶ one of them
//! ```
//!
//! Each leg has a [superblock](tenmil_volume::mirror) at its start. It records which legs are in sync, and in which regions legs
//! may differ because of writes in flight.
//!
//! - A region is marked dirty on all legs before its first block is written. It becomes clean once it has
//!   not been written for a while and everything is flushed. After a power loss, only dirty regions are
//!   resynchronized.
//! - When a leg fails, the others durably record that it is stale before any write completes that it does
//!   not have. When it returns, its superblock is marked stale, it receives every write from then on,
//!   then a copy of every region written while it was gone, and only then is it in sync.
//! - The superblocks of all legs are compared whenever a mirror is opened; legs that contradict each
//!   other are rejected. A leg that may be newer than all others must be present, unless the operator
//!   accepts the loss of its data; then all others record that it is stale before the mirror serves I/O.
//! - The superblocks name the owner, which has the mirror open. The owner checks that it still is the
//!   owner before it writes the next superblocks: see [ownership].
//!
//! Concurrent writes to the same block may leave the legs different, with one write on each. The
//! submitter has to serialize such writes, as file systems do.

mod assembly;
mod create;
mod events;
mod leg_reservations;
mod maintenance;
mod maintenance_thread;
mod membership;
mod mirror_channel;
mod mirror_request;
mod mirror_shared;
mod mirror_state;
mod options;
pub(crate) mod ownership;
mod ownership_claim;
mod progress;
mod read_only;
mod resync;
mod status;
mod superblock_commit;
mod superblock_io;
pub mod takeover;

#[cfg(test)]
pub(crate) mod tests;

use std::sync::Arc;

use tenmil_base::{BlockDevice, Durability, Instant, IoChannel, Limits, Operation, OperationSet};
use tenmil_dma::RegionTable;

use self::assembly::assemble;
use self::create::check_leg;
pub use self::create::create_mirror;
pub use self::events::{MirrorEvent, MirrorEventCounters, MirrorNotice, subscribe_mirror_events};
use self::leg_reservations::{LegReservations, OwnerPolicy, reserve_legs_and_read_superblocks};
use self::maintenance_thread::MaintenanceThread;
pub use self::membership::{ConfirmReplace, add_leg, remove_leg, replace_leg};
use self::mirror_channel::MirrorChannel;
use self::mirror_shared::{MirrorShared, superblock_len_bytes};
use self::mirror_state::MirrorState;
pub use self::options::{InjectedBugs, MirrorOptions};
use self::ownership_claim::OwnershipClaim;
pub use self::progress::{Health, LegProgress, LegState, MirrorMonitor, MirrorProgress};
pub use self::read_only::open_mirror_read_only;
use self::status::describe_assembly;
pub use self::status::{MirrorReport, format_percentage, read_mirror_report};
use self::superblock_io::read_leg_candidates;
pub use self::takeover::take_over_mirror;
use crate::owner_identity;
use crate::owner_reservations::OwnerReservations;
use tenmil_base::Error;
use tenmil_block::ExistingData;
use tenmil_block::uri::{Uri, short_form_for_terminal};
use tenmil_block::{DeviceControl, OpenedDevice, Opener};
use tenmil_volume::mirror::MirrorGeometry;

/// A device whose legs store the same blocks.
pub struct Mirror {
    shared: Arc<MirrorShared>,
    description: String,
    /// Device name of each leg.
    names: Arc<[Option<String>]>,
    /// Maintenance thread, which works without I/O of clients. Present if the mirror was opened by its
    /// URI.
    owner: Option<Arc<MaintenanceThread>>,
}

/// A device that is, or is to become, a leg.
#[derive(Clone)]
pub struct MirrorLegDevice {
    /// URI.
    pub name: String,
    /// The device, or why it could not be opened.
    pub medium: Result<Arc<dyn BlockDevice>, Error>,
}

impl MirrorLegDevice {
    /// Name in messages: the short form of the URI.
    fn display_name(&self) -> String {
        short_form_for_terminal(&self.name)
    }
}

/// The open legs of a mirror, and their descriptions.
#[derive(Default)]
struct OpenedLegs {
    legs: Vec<MirrorLegDevice>,
    existing: Vec<ExistingData>,
    handles: Vec<DeviceControl>,
    identities: Vec<(Uri, String)>,
}

/// Bytes that a resync copies at once, if the legs accept that much.
const CHUNK_BYTES: u32 = 256 << 10;
const DEPTH_MAX: u32 = 1024;
/// Operations of a mirror, if its legs support them. Copy is not among them. Data read after a
/// deallocation would depend on the leg, and legs have to be equal, so deallocate becomes write zeroes.
const OPERATIONS: [Operation; 7] = [
    Operation::Read,
    Operation::Write,
    Operation::Flush,
    Operation::Deallocate,
    Operation::WriteZeroes,
    Operation::Compare,
    Operation::Verify,
];

/// Opens `mirror:[URI],[URI]?resync=100m&degraded=no`.
pub(crate) fn open(opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
    let options = parse_options(uri)?;
    let OpenedLegs { legs, existing, handles, mut identities } = open_legs(opener, uri.children());
    let mut now = || opener.clock.now();
    let refuse = |problem| Error::from(uri.error(problem));
    let mut mirror = Mirror::open(opener.regions, &legs, &options, &mut now).map_err(refuse)?;
    let names = &mirror.names;
    mirror.owner = MaintenanceThread::start(&mirror.shared, uri.to_string(), names, opener.clock)
        .map_err(refuse)?
        .map(Arc::new);
    let description = mirror.description.clone();
    let handle = mirror.progress_monitor();
    // The identity of the mirror does not depend on which legs are present.
    identities.extend(handle.progress().map(|progress| (uri.clone(), progress.uuid)));
    let handle = DeviceControl::new(uri, handle);
    let medium = Arc::new(mirror);
    Ok(OpenedDevice { medium, description, existing, handles, identities }.with_control(handle))
}

fn parse_options(uri: &Uri) -> Result<MirrorOptions, Error> {
    let mut fields = uri.options();
    let default = MirrorOptions::default();
    let resync = fields.size_value("resync")?.unwrap_or(default.resync);
    let degraded = fields.choice_value("degraded", &[("yes", true), ("no", false)])?;
    fields.reject_unconsumed()?;
    if uri.children().is_empty() {
        return Err(uri.error("the legs are missing, expected mirror:[URI],[URI]").into());
    }
    if resync == 0 {
        return Err(uri.error("resync is 0 bytes per second, expected at least 1").into());
    }
    Ok(MirrorOptions { resync, degraded: degraded.unwrap_or(false), ..default })
}

/// Opens every leg that can be opened.
fn open_legs(opener: &Opener<'_>, uris: &[Uri]) -> OpenedLegs {
    let mut open = OpenedLegs::default();
    for uri in uris {
        let opened = opener.open(uri);
        let medium = opened.map(|opened| {
            open.existing.extend(opened.existing);
            open.handles.extend(opened.handles);
            open.identities.extend(opened.identities);
            opened.medium
        });
        open.legs.push(MirrorLegDevice { name: uri.to_string(), medium });
    }
    open
}

impl Mirror {
    /// Opens a mirror over its legs, and records on each of them which legs it starts with. Requests
    /// refer to memory of `regions`, in which each channel registers a region. `now` is the clock while
    /// superblocks are read and written.
    ///
    /// # Errors
    ///
    /// If these are not the legs of one mirror, contradict each other, or none is in sync; if a leg is
    /// absent that may have newer blocks and `options` do not accept that; or if another owner has the
    /// mirror open.
    pub fn open(
        regions: &RegionTable,
        legs: &[MirrorLegDevice],
        options: &MirrorOptions,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<Self, Error> {
        // Order: check the owner, assemble, then write the claim. The mirror serves I/O only after the
        // claim is durable on all in-sync legs.
        let opener = options.opener.map_or_else(
            owner_identity::RegisteredOwner::for_this_process,
            owner_identity::RegisteredOwner::from_record,
        );
        let reserved = LegReservations::new(OwnerReservations::new(opener.owner_record().id));
        let exclusion = Arc::clone(&reserved.exclusion);
        let opened = Self::open_with_owner(regions, legs, options, (opener, reserved), now);
        opened.inspect_err(|_| exclusion.release())
    }

    fn open_with_owner(
        regions: &RegionTable,
        legs: &[MirrorLegDevice],
        options: &MirrorOptions,
        (opener, reserved): (owner_identity::RegisteredOwner, LegReservations),
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<Self, Error> {
        let is_forced = options.force || options.bugs.ignores_fence;
        let entry =
            (options.opener, if is_forced { OwnerPolicy::Force } else { OwnerPolicy::Open });
        let (candidates, former) =
            reserve_legs_and_read_superblocks((regions, legs), entry, &reserved.exclusion, now)?;
        let mut assembly = assemble(&candidates, options.start_policy())?;
        let there = assembly.places.iter().flatten().map(|index| &legs[*index]);
        there.into_iter().try_for_each(|leg| check_leg(leg, &assembly.geometry))?;
        let claim = OwnershipClaim { regions, legs, is_forced: is_forced && former.is_some() };
        claim.claim_ownership(&mut assembly, opener.owner_record(), now)?;
        let description = describe_assembly(&assembly, &candidates);
        let media: Box<[Option<Arc<dyn BlockDevice>>]> = assembly.places
            [..usize::from(assembly.legs)]
            .iter()
            .map(|place| place.and_then(|index| legs[index].medium.as_ref().ok().cloned()))
            .collect();
        let name = |place: &Option<usize>| place.map(|index| legs[index].name.clone());
        let names = assembly.places[..usize::from(assembly.legs)].iter().map(name).collect();
        let limits = limits_of(&media, &assembly.geometry);
        let chunk_bytes = CHUNK_BYTES
            .min(limits.request_blocks_max * limits.block_size)
            .max(2 * superblock_len_bytes(limits.block_size));
        let chunk_blocks = (chunk_bytes / limits.block_size).min(limits.request_blocks_max);
        let meta = MirrorState::new(&assembly, options, chunk_blocks);
        let owner = (opener, reserved);
        let losses = |place: &Option<usize>| place.map_or(0, |index| candidates[index].losses);
        let losses: Vec<_> = assembly.places[..media.len()].iter().map(losses).collect();
        let state = (meta, owner);
        let shared = MirrorShared::new(media, regions.clone(), limits, chunk_bytes, state, &losses);
        Ok(Self { shared: Arc::new(shared), description, names, owner: None })
    }

    /// Writes the superblocks of a new mirror to these legs without confirmation, for simulations.
    ///
    /// # Errors
    ///
    /// If a leg is absent or too small.
    #[doc(hidden)]
    pub fn write_new_superblocks(
        regions: &RegionTable,
        legs: &[MirrorLegDevice],
        uuid: u128,
        now: &mut dyn FnMut() -> Instant,
    ) -> Result<String, Error> {
        create::format_mirror(regions, legs, uuid, now)
    }

    /// One line: UUID of the mirror, and the state of its legs.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Monitor of the progress, valid for as long as the mirror is open.
    pub fn progress_monitor(&self) -> MirrorMonitor {
        MirrorMonitor::new(&self.shared, Arc::clone(&self.names))
    }

    /// Bit mask of the in-sync legs, and the number of regions to resynchronize.
    pub fn in_sync_mask_and_remaining_regions(&self) -> (u8, u64) {
        let meta = self.shared.lock();
        (meta.in_sync, meta.todo.count())
    }
}

impl BlockDevice for Mirror {
    fn limits(&self) -> Limits {
        self.shared.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let mut channel = MirrorChannel::open(&self.shared)?;
        channel.owner.clone_from(&self.owner);
        Ok(Box::new(channel))
    }

    fn channels_max(&self) -> u32 {
        let legs = self.shared.media.iter().flatten();
        // The maintenance thread uses one channel of each leg.
        let least = legs.map(|leg| leg.channels_max()).min().unwrap_or(u32::MAX);
        if self.owner.is_some() && least < u32::MAX { least - 1 } else { least }
    }

    fn block_status(&self, lba: u64) -> Result<tenmil_base::BlockExtent, Error> {
        let masks = self.shared.masks();
        let leg = self.shared.media.get(masks.single_source_leg().trailing_zeros() as usize);
        let leg = leg
            .and_then(Option::as_ref)
            .ok_or("no leg of the mirror is there")
            .map_err(Error::environment)?;
        let geometry = &self.shared.geometry;
        let left = geometry.block_count.saturating_sub(lba);
        let extent = leg.block_status(lba + geometry.first)?;
        Ok(tenmil_base::BlockExtent { blocks: extent.blocks.min(left), ..extent })
    }
}

/// The limits that all legs can meet.
fn limits_of(media: &[Option<Arc<dyn BlockDevice>>], geometry: &MirrorGeometry) -> Limits {
    let legs: Vec<Limits> = media.iter().flatten().map(|leg| leg.limits()).collect();
    let least = |of: fn(&Limits) -> u32| legs.iter().map(of).min().unwrap_or(0);
    let boundaries = legs.iter().map(|one| one.optimal_boundary_blocks);
    let boundary = boundaries.filter(|blocks| *blocks > 0).min().unwrap_or(0);
    let is_aligned = boundary > 0 && geometry.first.is_multiple_of(boundary.into());
    let durability = legs.iter().map(|one| one.durability).reduce(Durability::weaker);
    let has = |operation: Operation| {
        let needed = match operation {
            Operation::Deallocate => Operation::WriteZeroes,
            other => other,
        };
        legs.iter().all(|one| one.operations.has(needed))
    };
    let operations: Vec<Operation> = OPERATIONS.into_iter().filter(|one| has(*one)).collect();
    Limits {
        block_size: geometry.block_size,
        metadata_size: 0,
        block_count: geometry.block_count,
        request_blocks_max: least(|one| one.request_blocks_max),
        segments_max: legs.iter().map(|one| one.segments_max).min().unwrap_or(0),
        optimal_boundary_blocks: if is_aligned { boundary } else { 0 },
        atomic_write_blocks: least(|one| one.atomic_write_blocks),
        depth_max: least(|one| one.depth_max).min(DEPTH_MAX),
        durability: durability.unwrap_or(Durability::NonPersistent),
        operations: OperationSet::from_operations(&operations),
    }
}

impl std::fmt::Debug for Mirror {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("Mirror").field(&self.description).finish()
    }
}
