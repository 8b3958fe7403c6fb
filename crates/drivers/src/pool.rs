//! Volumes of a pool as block devices.
//!
//! ```text
//!   volume:[file:/pool]/db ──┐
//!                            ├── one open pool ── file:/pool
//!   volume:[file:/pool]/log ─┘
//! ```
//!
//! The crate `volume` implements the pool without I/O. This module provides the threads: a pool is open
//! once in a process, for all of its volumes. Every channel of a volume has its own channel to the pool's
//! devices for its data, and a metadata thread performs the I/O of the pool itself.

mod blocking_volume_io;
mod bounce_memory;
mod cached_extent_reads;
mod capacity_events;
mod create_pool;
mod decouple;
mod device_key;
mod device_reservations;
mod extent_cache;
mod group_fence;
mod grow_pool;
mod inflate;
mod metadata_thread;
mod missing_device;
mod page_io;
mod parent_image;
mod parented_channel;
mod pool_check;
mod pool_devices;
mod pool_registry;
mod pool_shared;
mod read_epochs;
mod receive_stream;
mod rescue_volumes;
mod scrub;
mod send_stream;
mod spanned_device;
mod stop_events;
mod surviving_devices;
#[cfg(test)]
pub(crate) mod tests;
mod throttle;
mod transfer_table;
mod volume_channel;
mod volume_pins;
mod volume_ref;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{
    BlockDevice, BlockExtent, Durability, ErrorCategory, ExtentKind, HoleReporting, IoChannel,
    IoStatus, Limits, Operation, OperationSet, Span,
};
use tenmil_dma::RegionTable;
use tenmil_linux::{Clock, NamedThread, Sleeper};
use tenmil_volume::{
    ActionResult, DeviceAction, PoolError, PoolOwner as Owning, PoolRequest, PoolResponse,
    PoolUsage, VolumeInfo,
};

pub use self::capacity_events::{CapacityEvent, subscribe_capacity};
pub use self::create_pool::{
    CreateResult, check_closed_pool, create_on_devices, create_pool, open_and_grow, take_over_pool,
};
pub use self::decouple::DecoupleResult;
pub use self::device_key::{device_key, file_lock_holder};
pub use self::group_fence::{owner_names, take_over_pools};
pub use self::grow_pool::GrowResult;
pub use self::inflate::InflateResult;
pub use self::parent_image::ParentCheckResult;
pub use self::pool_check::PoolCheckResult;
pub use self::pool_devices::DeviceInfo;
pub use self::pool_registry::list_open_pools;
pub use self::receive_stream::INCOMPLETE;
pub use self::rescue_volumes::{RescueReport, RescuedVolumeReport, rescue_pool};
pub use self::scrub::{DamageCause, DamagedRun, VolumeScrubReport};
pub use self::send_stream::{ChangedRange, ProgressFn, TransferSummary};
pub use self::stop_events::{PoolStopEvent, subscribe_stops};
pub use self::volume_ref::VolumeRef;
pub use tenmil_volume::{
    CapacityState, CheckFinding, CheckReport, CountedUsage, ParentInfo, SNAPSHOTS_MAX,
    SnapshotMember, SpaceUsage, VolumeInfo as Info, VolumeOp,
};

use self::device_reservations::PoolReservations;
use self::metadata_thread::MetadataThread;
use self::parent_image::ParentImage;
use self::pool_devices::PoolDevices;
use self::pool_shared::{ClientInbox, ClientMessage, PoolShared, PoolSharedState};
use self::volume_channel::VolumeChannel;
use crate::owner_identity;
use crate::owner_reservations::PreemptionPolicy;
use tenmil_base::Error;
use tenmil_block::ExistingData;
use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};

/// A pool that is open in this process. It is closed when the last reference is dropped; data written to
/// its volumes is then flushed.
pub struct OpenPool {
    shared: Arc<PoolShared>,
    /// Devices of the pool. The lock is held to open a channel to them, or to grow the pool.
    pool_devices: Mutex<PoolDevices>,
    regions: RegionTable,
    clock: Clock,
    /// How pages are laid out on the blocks of the first device; all pool addresses are in its blocks.
    geometry: PageGeometry,
    /// URI of the first device.
    device: String,
    /// Name of the first device in messages: the short form of its URI.
    name: String,
    /// Identity of the device, independent of the spelling of its URI.
    identity: String,
    owner: Option<NamedThread<()>>,
    /// The owner id of this process, which is recorded in the pool.
    owns: owner_identity::RegisteredOwner,
    /// Whether the devices refuse the writes of other hosts.
    reserved: Arc<PoolReservations>,
}

/// One volume of a pool.
struct VolumeDevice {
    open: Arc<OpenPool>,
    info: VolumeInfo,
    /// The parent image that unmapped blocks are read from, if there is one and it could be opened.
    parent: Option<ParentImage>,
    limits: Limits,
    /// Current number of blocks, shared with all channels.
    block_count: Arc<AtomicU64>,
    is_written: bool,
    /// It is open for a user outside this module, so changes that would lose data are rejected.
    is_used: bool,
}

/// How pool pages are laid out on the blocks of a device.
#[derive(Clone, Copy, Debug)]
struct PageGeometry {
    block_size: u32,
    blocks_in_page: u64,
    /// Whole pages on the device.
    pages: u64,
    /// Maximum number of pages in one request.
    request_pages: u32,
}

/// Performs the transfer of an action. Returns the checksums of its blocks where they are required, or
/// the status.
type TransferFn<'a> = dyn FnMut(&DeviceAction) -> Result<TransferResult, IoStatus> + 'a;

/// Result of a transfer.
enum TransferResult {
    Data,
    /// The checksums of the blocks.
    Sums(Vec<u32>),
    /// Whether each block contains non-zero data.
    Contents(Vec<bool>),
}

/// Block size of a pool and its volumes in bytes.
pub const PAGE_BYTES: u32 = 4096;
/// Default size in bytes of the metadata cache.
pub const CACHE_DEFAULT: u64 = 32 << 20;
const DEPTH_MAX: u32 = 256;
/// Operations of a volume that its devices must support.
const READING: [Operation; 4] =
    [Operation::Read, Operation::Flush, Operation::Compare, Operation::Verify];
/// Maximum number of pages in a request.
const REQUEST_PAGES_MAX: u32 = 256;
/// Maximum time of the last flush when a pool is closed.
const CLOSING_MAX: Span = Span::from_secs(30);
/// Maximum time of a pool request outside the I/O path.
const TIME_LIMIT: Span = Span::from_secs(120);

/// Opens `volume:[URI]/name?metadata-cache=32m`.
pub(crate) fn open(opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
    open_volume_with_identity(opener, (&VolumeRef::parse(uri)?, uri), true)
}

/// Opens the same to look at it: the pool gets no owner by that, and its devices are not written.
///
/// # Errors
///
/// As of any opening.
pub fn open_volume_read_only(opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
    open_volume_with_identity(opener, (&VolumeRef::parse(uri)?, uri), false)
}

fn open_volume_with_identity(
    opener: &Opener<'_>,
    (place, uri): (&VolumeRef, &Uri),
    claims: bool,
) -> Result<OpenedDevice, Error> {
    let name = place.volume_name(uri)?;
    let mut opened = open_volume(
        opener,
        &pool_registry::open_or_share_pool(opener, place)?,
        (uri, name),
        claims,
    )?;
    // A volume has an identity of its own, although it is stacked on other devices.
    if !uri.children().is_empty() {
        opened.add_identity(uri);
    }
    Ok(opened)
}

/// Opens a volume of an open pool.
fn open_volume(
    opener: &Opener<'_>,
    open: &Arc<OpenPool>,
    (uri, name): (&Uri, &str),
    claims: bool,
) -> Result<OpenedDevice, Error> {
    let info = open.find_volume(name)?;
    let parent = open.open_parent(opener, &info)?;
    let pool_devices = open.lock_pool_devices();
    let below = pool_devices.description();
    let size = info.blocks * u64::from(PAGE_BYTES);
    let kind = if info.is_read_only { "snapshot" } else { "volume" };
    let store = open.name();
    let mut description =
        format!("{kind} `{name}` of {size} bytes, of pool `{store}` over {below}");
    let mut found = format!("{} of {size} bytes written", info.mapped * u64::from(PAGE_BYTES));
    let handles = pool_devices.members.iter().flat_map(|member| &member.opened.handles);
    let mut handles: Vec<_> = handles.cloned().collect();
    let identities = pool_devices.members.iter().flat_map(|member| &member.opened.identities);
    let mut identities: Vec<_> = identities.cloned().collect();
    drop(pool_devices);
    if let Some(parent) = &parent {
        description += &format!("; the rest is read from {}", parent.opened.description);
        found += &format!(", and the rest a clone of {}", parent.uri);
        handles.extend_from_slice(&parent.opened.handles);
        identities.extend_from_slice(&parent.opened.identities);
    }
    let is_anything = info.mapped > 0 || parent.is_some();
    let existing =
        is_anything.then(|| ExistingData { name: format!("{uri:#}"), found, path: None });
    let medium = VolumeDevice::open(open, &info, parent).map_err(|problem| uri.error(problem))?;
    if medium.is_written && claims {
        open.claim_ownership()?;
    } else if let Some(owner) = open.other_owner() {
        // Another owner could delete a snapshot, and its blocks would then be reused for other data.
        return Err(open.pool_error(&PoolError::Owned { by: Box::new(owner) }));
    }
    let medium = medium.mark_in_use();
    let existing = existing.filter(|_| !info.is_read_only).into_iter().collect();
    Ok(OpenedDevice { medium: Arc::new(medium), description, existing, handles, identities })
}

impl OpenPool {
    /// Opens the pool on the given device, unless it is open in this process already.
    ///
    /// # Errors
    ///
    /// If the device cannot be opened, or contains no valid pool.
    pub fn open(opener: &Opener<'_>, place: &VolumeRef) -> Result<Arc<Self>, Error> {
        pool_registry::open_or_share_pool(opener, place)
    }

    /// Opens the pool on an open device.
    fn open_on_device(
        opener: &Opener<'_>,
        place: &VolumeRef,
        below: OpenedDevice,
        closing_max: Span,
    ) -> Result<Self, Error> {
        let (regions, clock) = (opener.regions, opener.clock);
        let mut pool_devices = PoolDevices::with_single_device(&place.store, below)?;
        let owns = owner_identity::RegisteredOwner::for_this_process();
        let me = Some(owns.owner_record());
        let (first, geometry) = (Arc::clone(&pool_devices.medium), pool_devices.geometry);
        let mut opened = create_pool::open_pool_store(opener, place, &*first, &geometry, me)?;
        pool_devices.open_others(opener, place, &opened.store, false)?;
        let (device, name) = (place.store.to_string(), format!("{:#}", place.store));
        let reserved = PoolReservations::new(&name, owns.owner_record().id, &pool_devices);
        let mut excluded = None;
        if place.takes_over {
            excluded =
                reserved.preempt_owner(&opened.store, place.takes_from_any(&opened.store))?;
            // Until then the former owner may have changed it.
            let devices = opened.store.devices().clone();
            opened = create_pool::open_pool_store(opener, place, &*first, &geometry, me)?;
            reserved.check_device_count_unchanged(&devices, opened.store.devices())?;
        }
        let claim = place.claim_condition(&opened.store, excluded);
        opened.store.set_claim_condition(claim);
        let (reserved, geometry) = (Arc::new(reserved), pool_devices.geometry);
        let machine =
            |problem: Error| Error::new(ErrorCategory::Environment, format!("{name}: {problem}"));
        let mut sleeper = Sleeper::new().map_err(|error| machine(Error::environment(error)))?;
        let backend = pool_devices.medium.channel().map_err(machine)?;
        let shared = Arc::new(PoolShared::new(
            opened.store,
            backend.known_write_loss_count(),
            sleeper.notifier(),
        ));
        let inbox = shared.register_client(None, true).map_err(machine)?;
        let owner =
            MetadataThread::new(&name, Arc::clone(&shared), (inbox, backend), geometry, regions);
        let owner = owner.map_err(machine)?.with_reservations(&reserved);
        let owner = NamedThread::spawn("pool", None, move |stop| {
            owner.run(stop, &clock, &mut sleeper, closing_max)
        })
        .map_err(|error| machine(Error::environment(format!("start a thread: {error}"))))?;
        let (regions, identity) = (regions.clone(), device_key(&place.store));
        let (pool_devices, owner) = (Mutex::new(pool_devices), Some(owner));
        Ok(Self {
            shared,
            pool_devices,
            regions,
            clock,
            geometry,
            device,
            name,
            identity,
            owner,
            owns,
            reserved,
        })
    }

    /// Makes this process the owner of the pool before anything is changed. Rejected if another process
    /// has it open for writing and is not known to have exited.
    ///
    /// # Errors
    ///
    /// If there is another owner, or I/O fails.
    pub fn claim_ownership(&self) -> Result<(), Error> {
        self.request_and_wait(PoolRequest::Claim).map(|_| ())
    }

    /// Has the devices refuse the writes of other hosts, unless the claim is going to be refused anyway.
    fn reserve_devices(&self) -> Result<(), Error> {
        let owner = self.shared.lock().store.owner();
        let is_gone = |owner: &Owning| owner_identity::has_owner_ended(owner);
        match owner.filter(|owner| owner.id != self.owns.owner_record().id) {
            Some(owner) if is_gone(&owner) => {
                self.reserved.acquire_reservations(PreemptionPolicy::Departed(owner.id))
            }
            Some(_) => Ok(()),
            None => self.reserved.acquire_reservations(PreemptionPolicy::Nothing),
        }
    }

    /// Whether this process owns the pool already.
    fn is_owner(&self) -> bool {
        let owner = self.shared.lock().store.owner();
        owner.is_some_and(|owner| owner.id == self.owns.owner_record().id)
    }

    /// The process of this machine that has the pool open for writing, if it is another one.
    pub fn other_local_owner_pid(&self) -> Option<u32> {
        let owner = self.other_owner()?;
        let process = owner_identity::process_of_owner(&owner);
        let this = tenmil_linux::process_stats::ProcessIdentity::of_this_process();
        (process.is_same_boot(&this) && process.pid != this.pid).then_some(process.pid)
    }

    /// Another owner that has the pool open for writing and is not known to have ended.
    fn other_owner(&self) -> Option<Owning> {
        let owner = self.shared.lock().store.owner()?;
        (owner.id != self.owns.owner_record().id && !owner_identity::has_owner_ended(&owner))
            .then_some(owner)
    }

    fn lock_pool_devices(&self) -> MutexGuard<'_, PoolDevices> {
        self.pool_devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a client that transfers data, and opens its channel to the devices. The client is
    /// notified of added devices.
    fn open_transfer_channel(
        &self,
        reads: Option<read_epochs::OldestReadTransaction>,
    ) -> Result<(Arc<ClientInbox>, Box<dyn IoChannel>), Error> {
        let pool_devices = self.lock_pool_devices();
        let inbox = self.shared.register_client(reads, true)?;
        let way = pool_devices.medium.channel();
        if way.is_err() {
            self.shared.unregister_client(&inbox, core::iter::empty());
        }
        Ok((inbox, way?))
    }

    /// Sends a request without data transfer, and waits for the response.
    fn request_and_wait(&self, ask: PoolRequest) -> Result<PoolResponse, Error> {
        self.request_with_transfers(ask, &mut |_| Err(IoStatus::ABORTED))
    }

    /// Sends a request, performs its transfers by `carry`, and waits for the response.
    fn request_with_transfers(
        &self,
        ask: PoolRequest,
        carry: &mut TransferFn<'_>,
    ) -> Result<PoolResponse, Error> {
        self.request_with_transfers_if(ask, carry, |_| Ok(()))
    }

    /// The same, if `admit` permits it, evaluated under the lock at submission.
    fn request_with_transfers_if(
        &self,
        ask: PoolRequest,
        carry: &mut TransferFn<'_>,
        admit: impl FnOnce(&PoolSharedState) -> Result<(), Error>,
    ) -> Result<PoolResponse, Error> {
        let machine =
            |problem| Error::new(ErrorCategory::Environment, format!("{}: {problem}", self.name));
        if device_reservations::is_changing_request(&ask) {
            self.reserve_devices()?;
        }
        let inbox = self.shared.register_client(None, false).map_err(machine)?;
        let mut state = self.shared.lock_to_submit();
        if let Err(refused) = admit(&state) {
            drop(state);
            self.shared.unregister_client(&inbox, core::iter::empty());
            return Err(refused);
        }
        state.submit_request(&inbox, 0, ask);
        self.shared.dispatch_actions(&mut state);
        drop(state);
        // The waker is armed before the inbox is read, so that a message in between ends the wait.
        let (mut messages, until) = (Default::default(), self.clock.now().after(TIME_LIMIT));
        let completion = loop {
            let hears = inbox.waker.unmask(0);
            self.shared.lock().take_messages(&inbox, &mut messages);
            let note = messages.pop_front();
            if let Some(ClientMessage::Ended(_, completion)) = note {
                break completion.map_err(|error| self.pool_error(&error));
            }
            if let Some(ClientMessage::Do(action)) = note {
                self.report_transfer(&action, &carry(&action));
                continue;
            }
            if self.clock.now() > until {
                break Err(Error::new(
                    ErrorCategory::Remote,
                    format!("{}: no response within {TIME_LIMIT}", self.name),
                ));
            }
            let nap = if hears { Span::from_secs(1) } else { Span::from_ms(1) };
            // An error of the wait only makes the next check come sooner.
            let _ = inbox.waker.wait_for_signal(0, nap);
        };
        self.shared.unregister_client(&inbox, core::iter::empty());
        completion
    }

    /// Reports the result of a transfer to the pool.
    fn report_transfer(&self, action: &DeviceAction, done: &Result<TransferResult, IoStatus>) {
        let Some(io) = pool_shared::transfer_id(action) else { return };
        let end = match done {
            Err(status) => ActionResult::Failed(*status),
            Ok(TransferResult::Data) => ActionResult::Done,
            Ok(TransferResult::Sums(sums)) => ActionResult::Sums(sums),
            Ok(TransferResult::Contents(holds)) => ActionResult::Contents(holds),
        };
        let mut state = self.shared.lock_to_submit();
        state.store.handle_action_result(io, end);
        self.shared.dispatch_actions(&mut state);
    }

    fn pool_error(&self, error: &PoolError) -> Error {
        pool_error(&self.name, error)
    }

    /// The name of the pool.
    pub fn name(&self) -> String {
        self.shared.lock().store.name()
    }

    /// The UUID of the pool.
    pub fn uuid(&self) -> u128 {
        self.shared.lock().store.uuid()
    }

    /// The last durable transaction.
    pub fn generation(&self) -> u64 {
        self.shared.lock().store.generation()
    }

    /// Why the pool rejects changes, if it has stopped and not recovered.
    pub fn stop_reason(&self) -> Option<String> {
        let state = self.shared.lock();
        let why = state.store.last_stop_error().filter(|_| state.store.is_stopped());
        why.map(ToString::to_string)
    }

    /// Number of device failures after which completed but unflushed writes may have been lost.
    pub fn write_loss_count(&self) -> u64 {
        self.shared.lock().store.device_error_stop_count()
    }

    /// The volume with this name.
    ///
    /// # Errors
    ///
    /// If there is no such volume, or its metadata is damaged.
    pub fn find_volume(&self, name: &str) -> Result<VolumeInfo, Error> {
        match self.request_and_wait(PoolRequest::Find(name.into()))? {
            PoolResponse::Volume(info) => Ok(info),
            _ => Err(self.pool_error(&PoolError::NoVolume(name.into()))),
        }
    }

    /// All volumes and snapshots in order of creation.
    ///
    /// # Errors
    ///
    /// If the volume list is damaged.
    pub fn list_volumes(&self) -> Result<Vec<VolumeInfo>, Error> {
        match self.request_and_wait(PoolRequest::List)? {
            PoolResponse::Volumes(volumes) => Ok(volumes),
            _ => Ok(Vec::new()),
        }
    }

    /// Space usage of a volume, exclusive and shared.
    ///
    /// # Errors
    ///
    /// If there is no such volume, or its map is damaged.
    pub fn volume_usage(&self, name: &str) -> Result<SpaceUsage, Error> {
        match self.request_and_wait(PoolRequest::SpaceUsage(name.into()))? {
            PoolResponse::Account(account) => Ok(account),
            _ => Ok(SpaceUsage::default()),
        }
    }

    /// Space usage of the pool.
    ///
    /// # Errors
    ///
    /// If the pool does not respond.
    pub fn pool_usage(&self) -> Result<Option<PoolUsage>, Error> {
        match self.request_and_wait(PoolRequest::Usage)? {
            PoolResponse::Usage(usage) => Ok(Some(usage)),
            _ => Ok(None),
        }
    }

    /// Performs a change, and returns once it is durable, with the resulting volume if it still exists.
    ///
    /// # Errors
    ///
    /// Why the change was rejected. A change that would lose data of an open volume is rejected.
    pub fn execute_volume_op(&self, change: VolumeOp) -> Result<Option<VolumeInfo>, Error> {
        let at_stake = self.volume_losing_data(&change)?;
        if !self.is_owner() {
            // A change that is refused neither reserves the devices nor writes an owner to them.
            self.request_and_wait(PoolRequest::MayChange(change.clone()))?;
        }
        let admit =
            |state: &PoolSharedState| self.check_change_allowed(state, &change, at_stake.as_ref());
        let asked = PoolRequest::Change(change.clone());
        match self.request_with_transfers_if(asked, &mut |_| Err(IoStatus::ABORTED), admit)? {
            PoolResponse::Volume(info) => Ok(Some(info)),
            _ => Ok(None),
        }
    }

    /// Waits until the space of deleted volumes has been freed, or `at_most` has passed. Returns whether
    /// it was freed. Does not wait for I/O of open volumes.
    pub fn wait_for_reclaim(&self, at_most: Span) -> bool {
        let until = self.clock.now().after(at_most);
        let is_settled = || {
            let state = self.shared.lock();
            let is_used = !state.used.is_empty() || !state.written.is_empty();
            state.store.is_idle() || (is_used && state.store.are_deferred_frees_done())
        };
        while !is_settled() {
            if self.clock.now() > until {
                return false;
            }
            tenmil_linux::named_thread::sleep(Span::from_ms(1));
        }
        true
    }
}

impl Drop for OpenPool {
    fn drop(&mut self) {
        if let Some(owner) = self.owner.take() {
            owner.stop_flag().set();
            self.shared.wake_metadata_thread();
            drop(owner);
        }
    }
}

impl VolumeDevice {
    fn open(
        open: &Arc<OpenPool>,
        info: &VolumeInfo,
        parent: Option<ParentImage>,
    ) -> Result<Self, Error> {
        let pool_devices = open.lock_pool_devices();
        let limits = volume_limits(&pool_devices.medium.limits(), &pool_devices.geometry, info);
        drop(pool_devices);
        let limits = parent.iter().fold(limits, |limits, parent| parent.volume_limits(limits));
        let is_written = limits.operations.has(Operation::Write);
        let mut state = open.shared.lock();
        if is_written && state.written.contains(&info.id) {
            return Err(Error::environment(
                "it is already open for writing in this process, expected one writer",
            ));
        }
        if is_written {
            state.written.push(info.id);
        }
        state.volumes_open += 1;
        drop(state);
        let (open, info) = (Arc::clone(open), info.clone());
        let block_count = Arc::new(AtomicU64::new(limits.block_count));
        Ok(Self { open, info, parent, limits, block_count, is_written, is_used: false })
    }

    /// Marks the volume as in use outside this module.
    fn mark_in_use(mut self) -> Self {
        self.open.shared.lock().used.push(self.info.id);
        self.is_used = true;
        self
    }
}

impl Drop for VolumeDevice {
    fn drop(&mut self) {
        let mut state = self.open.shared.lock();
        state.volumes_open -= 1;
        if self.is_written {
            state.written.retain(|id| *id != self.info.id);
        }
        let place = state.used.iter().position(|id| self.is_used && *id == self.info.id);
        if let Some(place) = place {
            state.used.swap_remove(place);
        }
    }
}

impl BlockDevice for VolumeDevice {
    fn limits(&self) -> Limits {
        let block_count = self.block_count.load(Ordering::Relaxed);
        Limits { block_count, ..self.limits.clone() }
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let parent = self.parent.as_ref();
        let (limits, count) = (self.limits(), Arc::clone(&self.block_count));
        Ok(Box::new(VolumeChannel::open(&self.open, &self.info, parent, &limits, count)?))
    }

    fn hole_reporting(&self) -> HoleReporting {
        HoleReporting::AtReads
    }

    /// The UUID of the volume. A copy of the pool's device has volumes with the same UUIDs.
    fn identity(&self) -> Option<String> {
        Some(format!("{:032x}", self.info.uuid))
    }

    fn refresh_size(&self) -> Result<u64, Error> {
        let volumes = self.open.list_volumes().map_err(Error::environment)?;
        if let Some(now) = volumes.iter().find(|volume| volume.id == self.info.id)
            && self.block_count.fetch_max(now.blocks, Ordering::Relaxed) < now.blocks
        {
            self.open.shared.lock().reported += 1;
        }
        Ok(self.block_count.load(Ordering::Relaxed))
    }

    fn channels_max(&self) -> u32 {
        // One channel is used by the metadata thread.
        let own = self.open.lock_pool_devices().medium.channels_max().saturating_sub(1);
        self.parent.as_ref().map_or(own, |parent| own.min(parent.opened.medium.channels_max()))
    }

    fn block_status(&self, lba: u64) -> Result<BlockExtent, Error> {
        let asked =
            self.open.request_and_wait(PoolRequest::Extent { volume: self.info.id, block: lba });
        match asked.map_err(Error::environment)? {
            PoolResponse::Extent { blocks, is_parents: true, .. } => match &self.parent {
                Some(parent) => parent.extent(lba, blocks),
                None => Ok(BlockExtent { blocks, kind: ExtentKind::Data }),
            },
            PoolResponse::Extent { blocks, at, .. } => {
                let holds = if at.is_some() { ExtentKind::Data } else { ExtentKind::Hole };
                Ok(BlockExtent { blocks, kind: holds })
            }
            _ => Ok(BlockExtent { blocks: 0, kind: ExtentKind::Data }),
        }
    }
}

impl PageGeometry {
    fn from_limits(uri: &Uri, limits: &Limits) -> Result<Self, Error> {
        let Limits { block_size, metadata_size, .. } = *limits;
        let request_bytes = limits.request_blocks_max.saturating_mul(block_size);
        let refuse = |problem: Error| Err(Error::from(uri.error(problem)));
        if block_size > PAGE_BYTES || metadata_size != 0 {
            return refuse(Error::environment(format!(
                "it has blocks of {block_size} and {metadata_size} bytes of metadata, expected \
                 {PAGE_BYTES} at most and none"
            )));
        }
        if request_bytes < PAGE_BYTES {
            return refuse(Error::environment(format!(
                "it takes {request_bytes} bytes at once, expected {PAGE_BYTES} at least"
            )));
        }
        let needs = [Operation::Read, Operation::Flush];
        if let Some(lacks) = needs.into_iter().find(|need| !limits.operations.has(*need)) {
            return refuse(Error::environment(format!("it has no {}, expected one", lacks.name())));
        }
        let blocks_in_page = u64::from(PAGE_BYTES / block_size);
        let pages = limits.block_count / blocks_in_page;
        Ok(Self { block_size, blocks_in_page, pages, request_pages: request_bytes / PAGE_BYTES })
    }
}

/// The limits of a volume on devices with the limits `below`.
fn volume_limits(below: &Limits, geometry: &PageGeometry, info: &VolumeInfo) -> Limits {
    let reading = OperationSet::from_operations(&READING).intersection(below.operations);
    let writing = [Operation::Write, Operation::Deallocate, Operation::WriteZeroes];
    let is_writable = below.operations.has(Operation::Write) && !info.is_read_only;
    let support = match is_writable {
        true => writing.into_iter().fold(reading, OperationSet::with),
        false => reading,
    };
    let (depth, pages) = match info.has_checksums {
        true => (bounce_memory::DEPTH_MAX, bounce_memory::REQUEST_PAGES_MAX),
        false => (DEPTH_MAX, REQUEST_PAGES_MAX),
    };
    Limits {
        block_size: PAGE_BYTES,
        metadata_size: 0,
        block_count: info.blocks,
        request_blocks_max: geometry.request_pages.min(pages),
        segments_max: below.segments_max.min(257),
        optimal_boundary_blocks: 0,
        // Adjacent blocks of the volume may be in different places on the device.
        atomic_write_blocks: 1,
        depth_max: below.depth_max.min(depth),
        durability: below.durability.weaker(Durability::VolatileCache),
        operations: support,
    }
}

/// Converts an error of a pool on a device.
fn pool_error(name: &str, error: &PoolError) -> Error {
    let refused = Error::new(error.category(), format!("{name}: {error}"));
    match error.hint() {
        Some(hint) => refused.with_hint(hint),
        None => refused,
    }
}

impl std::fmt::Debug for OpenPool {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("OpenStore").field(&self.name).finish()
    }
}
