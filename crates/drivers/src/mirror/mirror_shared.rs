//! State shared by all channels of a mirror: a few words for the I/O path, and the rest behind a lock.
//!
//! A write that does not change the mirror's state loads three of these words and stores none. It is safe
//! because a thread that closes a region to writes waits for a *grace period*: until every channel has
//! ended the writes that began before. A channel publishes the age of its oldest write in a word of its
//! own, its [`OldestWriteEpoch`], and stores there only on changes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{BlockDevice, Error, Instant, Limits, Segment};
use tenmil_dma::{Region, RegionTable};
use tenmil_linux::EventFdVectors;

use super::leg_reservations::LegReservations;
use super::mirror_state::MirrorState;
use crate::block_bitmap::BlockBitmap;
use crate::owner_identity::RegisteredOwner;
use tenmil_volume::mirror::MirrorGeometry;

/// State shared by all channels.
pub(super) struct MirrorShared {
    /// Devices of the legs, by leg number; `None` for an absent leg.
    pub(super) media: Box<[Option<Arc<dyn BlockDevice>>]>,
    pub(super) regions: RegionTable,
    pub(super) geometry: MirrorGeometry,
    pub(super) limits: Limits,
    /// Bytes that a resync copies at once.
    pub(super) chunk_bytes: u32,
    /// [`LegMasks`] as a word, stored under the lock.
    masks: AtomicU64,
    /// Incremented when regions are closed or legs fail or return.
    epoch: AtomicU64,
    /// Regions that need permission under the lock to be written.
    pub(super) closed: BlockBitmap,
    /// Regions in which legs may differ, so that all reads have to come from the same leg.
    pub(super) unequal: BlockBitmap,
    /// Incremented when something has happened that a request may wait for.
    new_events: AtomicU64,
    /// When the next maintenance is due.
    tend_at: AtomicU64,
    /// Number of times that no in-sync leg had all completed writes.
    loss_count: AtomicU64,
    /// Number of leg returns.
    leg_return_count: AtomicU64,
    /// Number of losses that some channel has reported.
    losses_reported: AtomicU64,
    /// Of each leg, its own count of write losses when it was last found to be back. Everything lost
    /// before is copied to it before it is in sync.
    repaired_losses: Box<[AtomicU64]>,
    /// Of each leg, how many losses some channel has acted on, as the leg counts them.
    noticed_losses: Box<[AtomicU64]>,
    /// Whether a thread of its own looks after the mirror.
    has_owner: AtomicBool,
    meta: Mutex<MirrorState>,
    /// The reservations of the legs.
    pub(super) reserved: LegReservations,
    /// The owner, as long as the mirror is open.
    _opener: RegisteredOwner,
}

/// Epoch of the oldest write of a channel, or [`OldestWriteEpoch::IDLE`].
#[derive(Clone, Debug)]
pub(super) struct OldestWriteEpoch(Arc<AtomicU64>);

/// Number of requests submitted to a channel; shows whether clients are active.
#[derive(Clone, Debug, Default)]
pub(super) struct SubmittedRequestCount(Arc<AtomicU64>);

/// Roles of the legs, packed in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LegMasks {
    /// Legs that may be read.
    pub(super) read: u8,
    /// Legs that every write goes to.
    pub(super) write: u8,
    /// Legs that some superblock may state to be in sync.
    pub(super) claimed: u8,
    /// There are regions in which legs may differ.
    pub(super) unequal: bool,
}

/// Memory of a channel: a superblock for each leg, both copies read from each leg, and a chunk. Dropped
/// after the legs have ended all requests that use it.
pub(super) struct ChannelMemory {
    memory: Region,
    superblock_bytes: u32,
    chunk_at: u32,
    chunk_bytes: u32,
}

impl MirrorShared {
    pub(super) fn new(
        media: Box<[Option<Arc<dyn BlockDevice>>]>,
        regions: RegionTable,
        limits: Limits,
        chunk_bytes: u32,
        (meta, (opener, reserved)): (MirrorState, (RegisteredOwner, LegReservations)),
        losses: &[u64],
    ) -> Self {
        let geometry = meta.geometry();
        let closed = BlockBitmap::new(geometry.regions());
        closed.set(0, geometry.regions());
        // What a leg has lost before the mirror was opened is in dirty regions, as after a power failure.
        let counts = || losses.iter().copied().map(AtomicU64::new).collect();
        let (repaired_losses, noticed_losses) = (counts(), counts());
        let shared = Self {
            media,
            regions,
            geometry,
            limits,
            chunk_bytes,
            masks: AtomicU64::new(0),
            epoch: AtomicU64::new(1),
            closed,
            unequal: BlockBitmap::new(geometry.regions()),
            new_events: AtomicU64::new(0),
            tend_at: AtomicU64::new(0),
            loss_count: AtomicU64::new(0),
            leg_return_count: AtomicU64::new(0),
            losses_reported: AtomicU64::new(0),
            repaired_losses,
            noticed_losses,
            has_owner: AtomicBool::new(false),
            meta: Mutex::new(meta),
            reserved,
            _opener: opener,
        };
        for region in shared.lock().unequal_regions() {
            shared.unequal.set(region, 1);
        }
        shared.publish_leg_masks(&shared.lock());
        shared
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, MirrorState> {
        self.meta.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(super) fn masks(&self) -> LegMasks {
        // Pairs with the release in `publish_leg_masks`.
        LegMasks::from_word(self.masks.load(Ordering::Acquire))
    }

    /// Publishes the roles of the legs.
    pub(super) fn publish_leg_masks(&self, meta: &MirrorState) {
        self.masks.store(meta.masks().to_word(), Ordering::Release);
    }

    #[inline]
    pub(super) fn current_write_epoch(&self) -> u64 {
        // Pairs with the release in `advance_write_epoch`: a thread that sees the new epoch sees what was closed
        // before it.
        self.epoch.load(Ordering::Acquire)
    }

    /// Starts a new epoch and returns it. Once no channel's epoch is older, every write knows of all that
    /// was closed and published before.
    pub(super) fn advance_write_epoch(&self) -> u64 {
        let epoch = self.epoch.fetch_add(1, Ordering::AcqRel) + 1;
        // Pairs with the fence in `WriteEpoch::register_first_write`: either the other side sees what was closed, or this
        // one sees its write epoch.
        fence(Ordering::SeqCst);
        epoch
    }

    #[inline]
    pub(super) fn wake_count(&self) -> u64 {
        self.new_events.load(Ordering::Acquire)
    }

    pub(super) fn wake_all(&self) {
        self.new_events.fetch_add(1, Ordering::AcqRel);
    }

    #[inline]
    pub(super) fn maintenance_due(&self) -> Instant {
        Instant { ns: self.tend_at.load(Ordering::Relaxed) }
    }

    pub(super) fn set_maintenance_due(&self, at: Instant) {
        self.tend_at.store(at.ns, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn all_leg_loss_count(&self) -> u64 {
        self.loss_count.load(Ordering::Acquire)
    }

    /// Records that completed writes may be lost on all legs: every channel has to report that. The
    /// caller holds the lock.
    pub(super) fn record_all_leg_loss(&self) {
        self.loss_count.fetch_add(1, Ordering::AcqRel);
    }

    #[inline]
    pub(super) fn leg_return_count(&self) -> u64 {
        // Pairs with the release in `add_return`: a channel that sees it sees that the leg is written.
        self.leg_return_count.load(Ordering::Acquire)
    }

    /// Records that a leg receives every write from now on. The caller holds the lock, and has published
    /// the roles.
    pub(super) fn count_leg_return(&self) {
        self.leg_return_count.fetch_add(1, Ordering::Release);
    }

    /// Whether the mirror has a maintenance thread.
    #[inline]
    pub(super) fn has_maintenance_thread(&self) -> bool {
        self.has_owner.load(Ordering::Relaxed)
    }

    /// Sets or removes the maintenance thread's waker. The caller holds the lock.
    pub(super) fn set_maintenance_waker(
        &self,
        meta: &mut MirrorState,
        waker: Option<EventFdVectors>,
    ) {
        self.has_owner.store(waker.is_some(), Ordering::Relaxed);
        meta.owner = waker;
    }

    /// Losses that a new channel need not report.
    pub(super) fn reported_loss_count(&self) -> u64 {
        self.losses_reported.load(Ordering::Acquire)
    }

    pub(super) fn record_reported_losses(&self, count: u64) {
        self.losses_reported.fetch_max(count, Ordering::AcqRel);
    }

    /// Losses of a leg that flushes need not report any more.
    pub(super) fn repaired_loss_count(&self, leg: usize) -> u64 {
        // A thread that has seen in the masks that the leg is written again sees this as well: it is
        // stored before they are published.
        self.repaired_losses[leg].load(Ordering::Acquire)
    }

    /// Records the loss count of a leg that is neither in sync nor written: all of that is copied before the leg
    /// is read, so no read of it has to act on it. The caller holds the lock.
    pub(super) fn record_repaired_losses(&self, leg: usize, count: u64) {
        self.record_handled_losses(leg, count);
        self.repaired_losses[leg].fetch_max(count, Ordering::AcqRel);
    }

    /// Losses of a leg that some channel has acted on.
    #[inline]
    pub(super) fn handled_loss_count(&self, leg: usize) -> u64 {
        self.noticed_losses[leg].load(Ordering::Relaxed)
    }

    /// So many losses of a leg are acted on now. The caller holds the lock.
    pub(super) fn record_handled_losses(&self, leg: usize, count: u64) {
        self.noticed_losses[leg].fetch_max(count, Ordering::Relaxed);
    }

    /// Bytes of a superblock as it is written: whole blocks.
    pub(super) fn superblock_bytes(&self) -> u32 {
        superblock_len_bytes(self.geometry.block_size)
    }
}

/// Bytes of a superblock in whole blocks.
pub(super) fn superblock_len_bytes(block_size: u32) -> u32 {
    block_size.max(4096)
}

impl LegMasks {
    const UNEQUAL: u64 = 1 << 24;

    fn from_word(word: u64) -> Self {
        let [read, write, claimed, ..] = word.to_le_bytes();
        Self { read, write, claimed, unequal: word & Self::UNEQUAL != 0 }
    }

    fn to_word(self) -> u64 {
        let unequal = u8::from(self.unequal);
        u64::from_le_bytes([self.read, self.write, self.claimed, unequal, 0, 0, 0, 0])
    }

    /// The leg that is read where legs may differ.
    pub(super) fn single_source_leg(self) -> u8 {
        self.read & self.read.wrapping_neg()
    }
}

impl SubmittedRequestCount {
    /// Counts requests. Called by the channel itself only.
    #[inline]
    pub(super) fn add(&self, count: usize) {
        self.0.store(self.count().wrapping_add(count as u64), Ordering::Relaxed);
    }

    pub(super) fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl OldestWriteEpoch {
    /// No write is in flight.
    const IDLE: u64 = u64::MAX;

    pub(super) fn idle() -> Self {
        Self(Arc::new(AtomicU64::new(Self::IDLE)))
    }

    /// Registers the first write. What the channel loads after it is at least as new as everything that
    /// was closed by a thread that found this idle.
    #[inline]
    pub(super) fn register_first_write(&self, epoch: u64) {
        self.0.store(epoch, Ordering::Relaxed);
        // Pairs with the fence in `MirrorShared::advance_write_epoch`.
        fence(Ordering::SeqCst);
    }

    /// All writes that began before `epoch` have ended.
    #[inline]
    pub(super) fn advance_to(&self, epoch: u64) {
        // Pairs with the acquire in `are_writes_before_ended`: the effects of the writes are visible.
        self.0.store(epoch, Ordering::Release);
    }

    /// The last write has ended.
    #[inline]
    pub(super) fn set_idle(&self) {
        self.advance_to(Self::IDLE);
    }

    /// Whether all writes that began before `epoch` have ended.
    pub(super) fn are_writes_before_ended(&self, epoch: u64) -> bool {
        self.0.load(Ordering::Acquire) >= epoch
    }

    pub(super) fn is_same_channel(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl ChannelMemory {
    pub(super) fn new(shared: &MirrorShared) -> Result<Self, Error> {
        let legs = u32::try_from(shared.media.len()).unwrap_or(u32::MAX);
        let (superblock_bytes, chunk_bytes) = (shared.superblock_bytes(), shared.chunk_bytes);
        let chunk_at = 3 * superblock_bytes * legs;
        let memory = allocate_memory(&shared.regions, chunk_at + chunk_bytes)?;
        Ok(Self { memory, superblock_bytes, chunk_at, chunk_bytes })
    }

    pub(super) fn superblock_segment(&self, leg: u8) -> Segment {
        self.segment_at(u32::from(leg) * self.superblock_bytes, self.superblock_bytes)
    }

    /// Buffer for a superblock copy that is read before a commit.
    pub(super) fn superblock_copy_segment(&self, leg: u8, copy: u8) -> Segment {
        let before = self.chunk_at / 3 / self.superblock_bytes;
        let place = before + 2 * u32::from(leg) + u32::from(copy);
        self.segment_at(place * self.superblock_bytes, self.superblock_bytes)
    }

    pub(super) fn chunk_segment(&self) -> Segment {
        self.segment_at(self.chunk_at, self.chunk_bytes)
    }

    fn segment_at(&self, at: u32, len_bytes: u32) -> Segment {
        self.memory.segment().slice(at, len_bytes).unwrap_or_default()
    }
}

/// Allocates memory of a mirror.
pub(super) fn allocate_memory(regions: &RegionTable, len_bytes: u32) -> Result<Region, Error> {
    regions.allocate_region(len_bytes as usize).map_err(Error::environment)
}

#[cfg(test)]
mod tests {
    use super::{LegMasks, OldestWriteEpoch};

    #[test]
    fn leg_masks_round_trip_through_a_word() {
        for unequal in [false, true] {
            let masks = LegMasks { read: 0b0110, write: 0b1110, claimed: 0xff, unequal };
            assert_eq!(LegMasks::from_word(masks.to_word()), masks);
            assert_eq!(masks.single_source_leg(), 0b0010);
        }
    }

    #[test]
    fn write_epoch_is_past_when_no_older_write_is_in_flight() {
        let write_epoch = OldestWriteEpoch::idle();
        assert!(write_epoch.are_writes_before_ended(7));
        write_epoch.register_first_write(6);
        assert!(!write_epoch.are_writes_before_ended(7) && write_epoch.are_writes_before_ended(6));
        write_epoch.advance_to(7);
        assert!(write_epoch.are_writes_before_ended(7));
        write_epoch.set_idle();
        assert!(
            write_epoch.are_writes_before_ended(u64::MAX)
                && write_epoch.is_same_channel(&write_epoch.clone())
                && !write_epoch.is_same_channel(&OldestWriteEpoch::idle())
        );
    }
}
