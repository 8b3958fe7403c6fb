//! What all channels of a mirror share: a few words that are read on the way of an I/O, and behind
//! a lock everything else.
//!
//! A write that changes nothing about the mirror looks at three of these words and stores none. What
//! makes that safe is that whoever closes a region to writes waits for a *grace*: until every
//! channel has ended the writes that it began before. A channel says how old its oldest write is in
//! a word of its own, its seat, and stores there only when that changes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{Instant, Limits, Medium, Segment};
use dma::{Region, Regions};
use host::EventVectors;

use super::exclude::Reserved;
use super::meta::Meta;
use super::superblock::Shape;
use crate::backend::marks::Marks;
use crate::backend::owned::Opener;

/// What all channels share.
pub(super) struct Shared {
    /// The legs' media, by their number; `None` for a leg that is not there.
    pub(super) media: Box<[Option<Arc<dyn Medium>>]>,
    pub(super) regions: Regions,
    pub(super) shape: Shape,
    pub(super) limits: Limits,
    /// Bytes that the background copies at once.
    pub(super) chunk_bytes: u32,
    /// [`Masks`], as stored by whoever holds the lock.
    masks: AtomicU64,
    /// Counts whenever regions are closed or legs come or go.
    epoch: AtomicU64,
    /// Regions into which a write may go only after asking.
    pub(super) closed: Marks,
    /// Regions in which legs may differ, so that all reads have to come from the same one.
    pub(super) unequal: Marks,
    /// Counts whenever something has happened that a request may be waiting for.
    news: AtomicU64,
    /// When the mirror wants to be looked after.
    tend_at: AtomicU64,
    /// How often no leg in sync was left that could vouch for all completed writes.
    losses: AtomicU64,
    /// How often legs have come back.
    returns: AtomicU64,
    /// How many of those some channel has reported.
    losses_reported: AtomicU64,
    /// Of each leg, how many losses of completed writes were known of it when it was last found to be back,
    /// as it counts them: all that these have taken is copied to it before it is in sync.
    repaired_losses: Box<[AtomicU64]>,
    /// Of each leg, how many losses some channel has acted on, as the leg counts them.
    noticed_losses: Box<[AtomicU64]>,
    /// Whether a thread of its own looks after the mirror.
    has_owner: AtomicBool,
    meta: Mutex<Meta>,
    /// The reservations of the legs.
    pub(super) reserved: Reserved,
    /// Who has it open, for as long as it is.
    _opener: Opener,
}

/// How old the oldest write of a channel is: the epoch in which it began, or [`Seat::IDLE`].
#[derive(Clone, Debug)]
pub(super) struct Seat(Arc<AtomicU64>);

/// How many requests a channel was given: for whoever wants to know whether there are more.
#[derive(Clone, Debug, Default)]
pub(super) struct Load(Arc<AtomicU64>);

/// Which legs do what, as one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Masks {
    /// Legs that may be read.
    pub(super) read: u8,
    /// Legs that every write goes to.
    pub(super) write: u8,
    /// Legs of which some superblock may say that they are in sync.
    pub(super) claimed: u8,
    /// Whether there are regions in which legs may differ.
    pub(super) unequal: bool,
}

/// A channel's own memory: room for a superblock of each leg, for both copies that are there, and for a
/// chunk. Dropped when the legs have ended everything that works on it.
pub(super) struct Own {
    memory: Region,
    superblock_bytes: u32,
    chunk_at: u32,
    chunk_bytes: u32,
}

impl Shared {
    pub(super) fn new(
        media: Box<[Option<Arc<dyn Medium>>]>,
        regions: Regions,
        limits: Limits,
        chunk_bytes: u32,
        (meta, (opener, reserved)): (Meta, (Opener, Reserved)),
    ) -> Self {
        let shape = meta.shape();
        let closed = Marks::new(shape.regions());
        closed.set(0, shape.regions());
        let zeroes = || media.iter().map(|_| AtomicU64::new(0)).collect();
        let (repaired_losses, noticed_losses) = (zeroes(), zeroes());
        let shared = Self {
            media,
            regions,
            shape,
            limits,
            chunk_bytes,
            masks: AtomicU64::new(0),
            epoch: AtomicU64::new(1),
            closed,
            unequal: Marks::new(shape.regions()),
            news: AtomicU64::new(0),
            tend_at: AtomicU64::new(0),
            losses: AtomicU64::new(0),
            returns: AtomicU64::new(0),
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
        shared.publish(&shared.lock());
        shared
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Meta> {
        self.meta.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(super) fn masks(&self) -> Masks {
        // Pairs with the release in `publish`.
        Masks::of(self.masks.load(Ordering::Acquire))
    }

    /// Lets everyone see which legs do what now.
    pub(super) fn publish(&self, meta: &Meta) {
        self.masks.store(meta.masks().word(), Ordering::Release);
    }

    #[inline]
    pub(super) fn epoch(&self) -> u64 {
        // Pairs with the release in `advance`: who sees the new epoch sees what was closed before.
        self.epoch.load(Ordering::Acquire)
    }

    /// Begins a new epoch and returns it: once no seat is older, every write knows of all that was
    /// closed and published before this.
    pub(super) fn advance(&self) -> u64 {
        let epoch = self.epoch.fetch_add(1, Ordering::AcqRel) + 1;
        // Pairs with the one in `Seat::take`: either the other side sees what was closed, or we see
        // that its seat is taken.
        fence(Ordering::SeqCst);
        epoch
    }

    #[inline]
    pub(super) fn news(&self) -> u64 {
        self.news.load(Ordering::Acquire)
    }

    pub(super) fn tell(&self) {
        self.news.fetch_add(1, Ordering::AcqRel);
    }

    #[inline]
    pub(super) fn tend_at(&self) -> Instant {
        Instant { ns: self.tend_at.load(Ordering::Relaxed) }
    }

    pub(super) fn tend_again_at(&self, at: Instant) {
        self.tend_at.store(at.ns, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn losses(&self) -> u64 {
        self.losses.load(Ordering::Acquire)
    }

    /// Completed writes may be lost on all legs: every channel has to report that. The caller holds
    /// the lock.
    pub(super) fn add_loss(&self) {
        self.losses.fetch_add(1, Ordering::AcqRel);
    }

    #[inline]
    pub(super) fn returns(&self) -> u64 {
        // Pairs with the release in `add_return`: who sees it sees that the leg is written.
        self.returns.load(Ordering::Acquire)
    }

    /// A leg gets every write from now on. The caller holds the lock, and has published that.
    pub(super) fn add_return(&self) {
        self.returns.fetch_add(1, Ordering::Release);
    }

    /// Whether a thread of its own looks after the mirror.
    #[inline]
    pub(super) fn has_owner(&self) -> bool {
        self.has_owner.load(Ordering::Relaxed)
    }

    /// A thread begins to look after the mirror, or ends. The caller holds the lock.
    pub(super) fn own(&self, meta: &mut Meta, bell: Option<EventVectors>) {
        self.has_owner.store(bell.is_some(), Ordering::Relaxed);
        meta.owner = bell;
    }

    /// What a new channel need not report.
    pub(super) fn losses_reported(&self) -> u64 {
        self.losses_reported.load(Ordering::Acquire)
    }

    pub(super) fn report_losses(&self, count: u64) {
        self.losses_reported.fetch_max(count, Ordering::AcqRel);
    }

    /// Losses of a leg that no flush need fail for any more.
    pub(super) fn repaired_losses(&self, leg: usize) -> u64 {
        // Whoever has seen in the masks that the leg is written again sees this as well: it is stored
        // before they are published.
        self.repaired_losses[leg].load(Ordering::Acquire)
    }

    /// A leg that is not in sync, and not written, has lost writes so often. The caller holds the lock.
    pub(super) fn repair_losses(&self, leg: usize, count: u64) {
        self.repaired_losses[leg].fetch_max(count, Ordering::AcqRel);
    }

    /// Losses of a leg that some channel has acted on.
    #[inline]
    pub(super) fn noticed_losses(&self, leg: usize) -> u64 {
        self.noticed_losses[leg].load(Ordering::Relaxed)
    }

    /// So many losses of a leg are acted on now. The caller holds the lock.
    pub(super) fn notice_losses(&self, leg: usize, count: u64) {
        self.noticed_losses[leg].fetch_max(count, Ordering::Relaxed);
    }

    /// Bytes of a superblock as it is written: whole blocks.
    pub(super) fn superblock_bytes(&self) -> u32 {
        superblock_bytes(self.shape.block_size)
    }
}

/// Bytes of a superblock in whole blocks.
pub(super) fn superblock_bytes(block_size: u32) -> u32 {
    block_size.max(4096)
}

impl Masks {
    const UNEQUAL: u64 = 1 << 24;

    fn of(word: u64) -> Self {
        let [read, write, claimed, ..] = word.to_le_bytes();
        Self { read, write, claimed, unequal: word & Self::UNEQUAL != 0 }
    }

    fn word(self) -> u64 {
        let unequal = u8::from(self.unequal);
        u64::from_le_bytes([self.read, self.write, self.claimed, unequal, 0, 0, 0, 0])
    }

    /// The one leg that is read where legs may differ.
    pub(super) fn source(self) -> u8 {
        self.read & self.read.wrapping_neg()
    }
}

impl Load {
    /// Requests have come. Only the channel itself counts.
    #[inline]
    pub(super) fn add(&self, count: usize) {
        self.0.store(self.count().wrapping_add(count as u64), Ordering::Relaxed);
    }

    pub(super) fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Seat {
    /// No write is under way.
    const IDLE: u64 = u64::MAX;

    pub(super) fn idle() -> Self {
        Self(Arc::new(AtomicU64::new(Self::IDLE)))
    }

    /// A first write begins. What the channel looks at from here on is at least as new as what was
    /// closed by anyone who found this seat idle.
    #[inline]
    pub(super) fn take(&self, epoch: u64) {
        self.0.store(epoch, Ordering::Relaxed);
        // Pairs with the one in `Shared::advance`.
        fence(Ordering::SeqCst);
    }

    /// All writes that began before `epoch` have ended.
    #[inline]
    pub(super) fn move_up(&self, epoch: u64) {
        // Pairs with the acquire in `is_past`: what the writes did has been done.
        self.0.store(epoch, Ordering::Release);
    }

    /// The last write has ended.
    #[inline]
    pub(super) fn leave(&self) {
        self.move_up(Self::IDLE);
    }

    /// Whether all writes that began before `epoch` have ended.
    pub(super) fn is_past(&self, epoch: u64) -> bool {
        self.0.load(Ordering::Acquire) >= epoch
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Own {
    pub(super) fn new(shared: &Shared) -> Result<Self, String> {
        let legs = u32::try_from(shared.media.len()).unwrap_or(u32::MAX);
        let (superblock_bytes, chunk_bytes) = (shared.superblock_bytes(), shared.chunk_bytes);
        let chunk_at = 3 * superblock_bytes * legs;
        let memory = memory(&shared.regions, chunk_at + chunk_bytes)?;
        Ok(Self { memory, superblock_bytes, chunk_at, chunk_bytes })
    }

    pub(super) fn superblock(&self, leg: u8) -> Segment {
        self.part(u32::from(leg) * self.superblock_bytes, self.superblock_bytes)
    }

    /// Where a copy of a leg's superblock is read into before the next one is written.
    pub(super) fn look(&self, leg: u8, copy: u8) -> Segment {
        let before = self.chunk_at / 3 / self.superblock_bytes;
        let place = before + 2 * u32::from(leg) + u32::from(copy);
        self.part(place * self.superblock_bytes, self.superblock_bytes)
    }

    pub(super) fn chunk(&self) -> Segment {
        self.part(self.chunk_at, self.chunk_bytes)
    }

    fn part(&self, at: u32, len_bytes: u32) -> Segment {
        self.memory.segment().slice(at, len_bytes).unwrap_or_default()
    }
}

/// Memory of a mirror's own.
pub(super) fn memory(regions: &Regions, len_bytes: u32) -> Result<Region, String> {
    regions.allocate(len_bytes as usize).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::{Masks, Seat};

    #[test]
    fn masks_fit_into_a_word() {
        for unequal in [false, true] {
            let masks = Masks { read: 0b0110, write: 0b1110, claimed: 0xff, unequal };
            assert_eq!(Masks::of(masks.word()), masks);
            assert_eq!(masks.source(), 0b0010);
        }
    }

    #[test]
    fn a_seat_is_past_an_epoch_when_nothing_older_is_under_way() {
        let seat = Seat::idle();
        assert!(seat.is_past(7));
        seat.take(6);
        assert!(!seat.is_past(7) && seat.is_past(6));
        seat.move_up(7);
        assert!(seat.is_past(7));
        seat.leave();
        assert!(seat.is_past(u64::MAX) && seat.is(&seat.clone()) && !seat.is(&Seat::idle()));
    }
}
