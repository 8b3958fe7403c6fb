//! Tracks which controllers may hold completed but unflushed writes in volatile caches, and which writes
//! were lost with a controller.
//!
//! ```text
//!   epochs of a controller   1 · · · · · 2 · · · · · 3 · ·   each submitted flush starts the next
//!   writes completed           1   1         2   2           recorded once per epoch
//!   flush completed                    1 ┘ · · · ·           all writes up to its epoch are durable
//! ```
//!
//! A flush covers what its own controller has completed before receiving it (NVM Express Base 2.1,
//! section 7.2). So it is sent to each controller that has completed writes since its last flush. If a
//! controller was lost with such writes, another one covers them if it writes through the same cache:
//!
//! | same [cache instance](tenmil_wire::cache_instance) | it writes through the same cache as long as the instance exists |
//! |---|---|
//! | the controllers of the subsystem share a cache ([`CacheScope::Shared`]), and both were known to be alive at the same time | the cache cannot have been lost in between |
//! | neither | the writes are lost, and every queue fails a flush for it |
//!
//! That is found out when the next controller on the path of the lost one is known, before anything is read
//! from it, or by a flush that comes earlier.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::Instant;
use tenmil_wire::cache_instance::CacheInstance;

use crate::options::InjectedBugs;

/// Whether the controllers of a subsystem share a volatile write cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheScope {
    /// All share one: a flush completed by one controller makes durable what another one has completed,
    /// if both were connected at the same time.
    #[default]
    Shared,
    /// Each has its own: completed but unflushed writes may be lost with their controller, and flushes
    /// then fail.
    Separate,
}

/// Cache state of all controllers of one device.
pub(crate) struct CacheTracker {
    cache: CacheScope,
    bugs: InjectedBugs,
    epochs: Mutex<CacheEpochs>,
    /// How often writes were lost with a controller. Stored under the lock.
    losses: AtomicU64,
}

/// An association with a controller, from Connect to its loss.
#[derive(Debug)]
pub(crate) struct Association {
    number: u64,
    /// A write of the current epoch has been recorded.
    has_recorded_write: AtomicBool,
}

struct CacheEpochs {
    records: Vec<AssociationRecord>,
    next: u64,
    /// Losses that some queue has failed a flush for.
    reported_losses: u64,
}

struct AssociationRecord {
    association: Arc<Association>,
    path: usize,
    is_lost: bool,
    epoch: u64,
    /// The last epoch with a completed write; zero if there is none.
    written_epoch: u64,
    /// The last epoch whose writes are durable.
    durable_epoch: u64,
    instance: Option<CacheInstance>,
    /// Time of the connect.
    connected_at: Instant,
    /// The latest time at which it, or a controller that covers it, is known to have been alive.
    alive_at: Instant,
}

/// Writes of one controller up to an epoch, which a flush has to make durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnflushedWrites {
    association: u64,
    epoch: u64,
}

impl CacheScope {
    /// Names in URIs and configuration.
    pub const NAMES: [(&'static str, Self); 2] =
        [("shared", Self::Shared), ("separate", Self::Separate)];
}

impl Association {
    #[must_use]
    pub(crate) const fn number(&self) -> u64 {
        self.number
    }
}

impl CacheTracker {
    pub(crate) fn new(cache: CacheScope, bugs: InjectedBugs) -> Arc<Self> {
        let epochs = CacheEpochs { records: Vec::new(), next: 1, reported_losses: 0 };
        Arc::new(Self { cache, bugs, epochs: Mutex::new(epochs), losses: AtomicU64::new(0) })
    }

    /// Records a connect over `path`.
    pub(crate) fn record_connect(&self, path: usize, now: Instant) -> Arc<Association> {
        let mut epochs = self.lock();
        epochs.next += 1;
        let association = Arc::new(Association {
            number: epochs.next,
            has_recorded_write: AtomicBool::new(false),
        });
        epochs.records.retain(AssociationRecord::is_needed);
        epochs.records.push(AssociationRecord {
            association: Arc::clone(&association),
            path,
            is_lost: false,
            epoch: 1,
            written_epoch: 0,
            durable_epoch: 0,
            instance: None,
            connected_at: now,
            alive_at: now,
        });
        association
    }

    /// Records the cache instance that its namespace reports, if any. Writes that an earlier controller on its
    /// path has completed, and that no connected controller covers, are counted as lost.
    pub(crate) fn set_cache_instance(
        &self,
        association: &Association,
        instance: Option<CacheInstance>,
    ) {
        let mut epochs = self.lock();
        let Some(record) = epochs.record_mut(association.number) else { return };
        record.instance = instance;
        let path = record.path;
        let is_covered = |epochs: &CacheEpochs, record: &AssociationRecord| {
            epochs.records.iter().any(|one| !one.is_lost && self.covers(one, record))
        };
        for index in 0..epochs.records.len() {
            let record = &epochs.records[index];
            if record.path == path
                && record.is_lost
                && record.has_unflushed_writes()
                && !is_covered(&epochs, record)
            {
                self.count_write_loss(&mut epochs.records[index]);
            }
        }
        epochs.records.retain(AssociationRecord::is_needed);
    }

    /// Records that the controller completed a command that was sent at this time.
    pub(crate) fn record_alive(&self, association: &Association, at: Instant) {
        if let Some(record) = self.lock().record_mut(association.number) {
            record.alive_at = record.alive_at.max(at);
        }
    }

    /// Records the loss of a controller.
    pub(crate) fn record_loss(&self, association: &Association) {
        let mut epochs = self.lock();
        let Some(at) = epochs.record_index(association.number) else { return };
        let alive_at = epochs.records[at].alive_at;
        for index in 0..epochs.records.len() {
            let record = &epochs.records[index];
            if record.is_lost && self.covers(&epochs.records[at], record) {
                // What it covered is covered by controllers that were connected at the same time as it.
                epochs.records[index].alive_at = record.alive_at.max(alive_at);
            }
        }
        let record = &mut epochs.records[at];
        record.is_lost = true;
        record.association.has_recorded_write.store(false, Ordering::Release);
    }

    /// The number of the association over `path` that has followed `own`, unless that is lost as well.
    pub(crate) fn successor_number(&self, path: usize, own: Option<&Association>) -> Option<u64> {
        let epochs = self.lock();
        let current =
            epochs.records.iter().rev().find(|record| record.path == path && !record.is_lost)?;
        let number = current.association.number;
        own.is_none_or(|own| own.number != number).then_some(number)
    }

    /// Records a write completed by `association`, before the completion is delivered.
    #[inline]
    pub(crate) fn record_write(&self, association: &Association) {
        // A flush that starts at this moment is sent after this load, and so covers the write.
        if !association.has_recorded_write.load(Ordering::Acquire) {
            self.record_first_write(association);
        }
    }

    #[cold]
    fn record_first_write(&self, association: &Association) {
        let mut epochs = self.lock();
        // The record exists for as long as completions are polled from it.
        let Some(record) = epochs.record_mut(association.number) else { return };
        record.written_epoch = record.epoch;
        record.association.has_recorded_write.store(!record.is_lost, Ordering::Release);
    }

    /// The writes that a flush starting now has to make durable, and the number of losses so far.
    pub(crate) fn unflushed_writes_and_losses(&self) -> (Vec<UnflushedWrites>, u64) {
        let epochs = self.lock();
        let unflushed = epochs.records.iter().filter(|record| record.has_unflushed_writes());
        let to_writes = |record: &AssociationRecord| UnflushedWrites {
            association: record.association.number,
            epoch: record.epoch,
        };
        (unflushed.map(to_writes).collect(), self.loss_count())
    }

    /// The losses that a new queue need not report, because they have been reported.
    pub(crate) fn reported_loss_count(&self) -> u64 {
        self.lock().reported_losses
    }

    /// Removes from `unflushed` what is durable by now.
    pub(crate) fn retain_volatile(&self, unflushed: &mut Vec<UnflushedWrites>) {
        let mut epochs = self.lock();
        unflushed.retain(|unflushed| epochs.has_unflushed_writes(*unflushed));
    }

    /// Bit mask of the paths within `reachable` on which a flush makes `unflushed` durable: its own path, or else
    /// those of controllers that cover it.
    pub(crate) fn covering_paths(&self, unflushed: UnflushedWrites, reachable: u32) -> u32 {
        let epochs = self.lock();
        let Some(at) = epochs.record_index(unflushed.association) else { return 0 };
        let record = &epochs.records[at];
        let own = 1 << record.path;
        if !record.is_lost && own & reachable != 0 {
            return own;
        }
        let others =
            epochs.records.iter().filter(|other| !other.is_lost && self.covers(other, record));
        others.fold(0, |bits, other| bits | 1 << other.path) & reachable
    }

    /// Starts a new epoch for each controller covered by a flush for `unflushed` that is about to be sent to
    /// `association`, by a queue that can reach these paths. Pass the result to
    /// [`complete_flush`](Self::complete_flush) on completion.
    pub(crate) fn begin_flush(
        &self,
        association: &Association,
        unflushed: &[UnflushedWrites],
        reachable: u32,
    ) -> Vec<UnflushedWrites> {
        let mut epochs = self.lock();
        let Some(at) = epochs.record_index(association.number) else { return Vec::new() };
        let covers = |epochs: &CacheEpochs, record: &AssociationRecord| {
            let is_owed = unflushed
                .iter()
                .any(|unflushed| unflushed.association == record.association.number);
            // A controller that is reachable gets a flush of its own, even if it is assumed to share the
            // cache.
            let is_unreachable = record.is_lost || is_owed && reachable >> record.path & 1 == 0;
            record.association.number == association.number
                || is_unreachable && self.covers(&epochs.records[at], record)
        };
        let covered: Vec<usize> = (0..epochs.records.len())
            .filter(|record| covers(&epochs, &epochs.records[*record]))
            .collect();
        let begin = |index: usize| {
            let record = &mut epochs.records[index];
            record.epoch += 1;
            record.association.has_recorded_write.store(false, Ordering::Release);
            UnflushedWrites { association: record.association.number, epoch: record.epoch - 1 }
        };
        covered.into_iter().map(begin).collect()
    }

    /// Records the completion of a flush.
    pub(crate) fn complete_flush(&self, covered: &[UnflushedWrites]) {
        let mut epochs = self.lock();
        for unflushed in covered {
            if let Some(record) = epochs.record_mut(unflushed.association) {
                record.durable_epoch = record.durable_epoch.max(unflushed.epoch);
            }
        }
        epochs.records.retain(AssociationRecord::is_needed);
    }

    /// Gives up `unflushed`, which no controller can make durable; lost writes are counted. Returns false if
    /// some controllers are alive but not reachable for the caller: then a loss is not certain.
    pub(crate) fn give_up_writes(&self, unflushed: &[UnflushedWrites]) -> bool {
        let mut epochs = self.lock();
        let mut are_all_lost = true;
        for unflushed in unflushed {
            match epochs.record_mut(unflushed.association) {
                Some(record) if record.is_lost => self.count_write_loss(record),
                Some(_) => are_all_lost = false,
                None => {}
            }
        }
        epochs.records.retain(AssociationRecord::is_needed);
        are_all_lost
    }

    /// Marks all losses so far as reported by a failing flush. Returns their number.
    pub(crate) fn mark_losses_reported(&self) -> u64 {
        let mut epochs = self.lock();
        epochs.reported_losses = self.loss_count();
        epochs.reported_losses
    }

    /// Number of times that writes were lost.
    pub(crate) fn loss_count(&self) -> u64 {
        // Pairs with the release in `count_write_loss`: a read from a later controller sees the loss.
        self.losses.load(Ordering::Acquire)
    }

    /// Counts the unflushed writes of a controller as lost. The caller holds the lock.
    fn count_write_loss(&self, record: &mut AssociationRecord) {
        record.durable_epoch = record.epoch;
        record.epoch += 1;
        if !self.bugs.flush_ignores_lost_writes {
            self.losses.fetch_add(1, Ordering::Release);
        }
    }

    /// Whether a flush completed by `one` covers what `other` has completed before.
    fn covers(&self, one: &AssociationRecord, other: &AssociationRecord) -> bool {
        let is_same = one.instance.is_some() && one.instance == other.instance;
        let was_alive = one.connected_at <= other.connected_at.max(other.alive_at);
        is_same || self.cache == CacheScope::Shared && was_alive
    }

    fn lock(&self) -> MutexGuard<'_, CacheEpochs> {
        self.epochs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CacheEpochs {
    fn record_index(&self, number: u64) -> Option<usize> {
        self.records.iter().position(|record| record.association.number == number)
    }

    fn record_mut(&mut self, number: u64) -> Option<&mut AssociationRecord> {
        self.records.iter_mut().find(|record| record.association.number == number)
    }

    fn has_unflushed_writes(&mut self, unflushed: UnflushedWrites) -> bool {
        self.record_mut(unflushed.association).is_some_and(|record| {
            record.has_unflushed_writes() && record.durable_epoch < unflushed.epoch
        })
    }
}

impl AssociationRecord {
    const fn has_unflushed_writes(&self) -> bool {
        self.written_epoch > self.durable_epoch
    }

    /// A lost association is removed once it has no pending flush and no queue can poll its completions.
    fn is_needed(&self) -> bool {
        !self.is_lost || self.has_unflushed_writes() || Arc::strong_count(&self.association) > 1
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tenmil_base::Instant;
    use tenmil_wire::cache_instance::CacheInstance;

    use super::{Association, CacheScope, CacheTracker, UnflushedWrites};
    use crate::options::InjectedBugs;

    const ALL: u32 = u32::MAX;

    fn cache_tracker(cache: CacheScope) -> Arc<CacheTracker> {
        CacheTracker::new(cache, InjectedBugs::default())
    }

    fn instant_at_ns(ns: u64) -> Instant {
        Instant { ns }
    }

    fn unflushed_writes(caches: &CacheTracker) -> Vec<UnflushedWrites> {
        caches.unflushed_writes_and_losses().0
    }

    /// Sends a flush to `association`, and completes it.
    fn flush_to_completion(caches: &CacheTracker, association: &Association) {
        let covered = caches.begin_flush(association, &unflushed_writes(caches), ALL);
        caches.complete_flush(&covered);
    }

    /// Bit mask of the paths on which a flush makes the owed writes durable.
    fn covering_path_mask(caches: &CacheTracker) -> u32 {
        unflushed_writes(caches)
            .iter()
            .fold(0, |bits, unflushed| bits | caches.covering_paths(*unflushed, ALL))
    }

    #[test]
    fn controller_has_unflushed_writes_from_first_write_until_a_later_flush_completes() {
        let caches = cache_tracker(CacheScope::Separate);
        let one = caches.record_connect(1, instant_at_ns(1));
        assert_eq!(unflushed_writes(&caches), []);
        caches.record_write(&one);
        assert_eq!(covering_path_mask(&caches), 0b10);
        let first = caches.begin_flush(&one, &unflushed_writes(&caches), ALL);
        assert_eq!(covering_path_mask(&caches), 0b10, "not before it is completed");
        caches.record_write(&one);
        caches.complete_flush(&first);
        assert_eq!(covering_path_mask(&caches), 0b10, "the second write came after it");
        let (second, third) =
            (caches.begin_flush(&one, &[], ALL), caches.begin_flush(&one, &[], ALL));
        caches.complete_flush(&third);
        caches.complete_flush(&second);
        assert_eq!(unflushed_writes(&caches), []);
    }

    #[test]
    fn flush_of_a_later_controller_covers_nothing_of_a_lost_one() {
        let caches = cache_tracker(CacheScope::Separate);
        let one = caches.record_connect(0, instant_at_ns(1));
        caches.record_write(&one);
        caches.record_loss(&one);
        let two = caches.record_connect(0, instant_at_ns(2));
        let before = unflushed_writes(&caches);
        assert_eq!(covering_path_mask(&caches), 0);
        flush_to_completion(&caches, &two);
        assert_eq!(unflushed_writes(&caches).len(), 1);
        assert!(caches.give_up_writes(&before));
        assert_eq!(
            (unflushed_writes(&caches), caches.loss_count(), caches.reported_loss_count()),
            (vec![], 1, 0)
        );
        assert_eq!((caches.mark_losses_reported(), caches.reported_loss_count()), (1, 1));
    }

    #[test]
    fn completion_read_after_the_loss_counts_as_lost() {
        let caches = cache_tracker(CacheScope::Separate);
        let one = caches.record_connect(0, instant_at_ns(1));
        caches.record_loss(&one);
        assert_eq!(unflushed_writes(&caches), []);
        caches.record_connect(0, instant_at_ns(2));
        for _ in 0..2 {
            caches.record_write(&one);
            assert_eq!(unflushed_writes(&caches).len(), 1);
            assert!(caches.give_up_writes(&unflushed_writes(&caches)));
        }
        assert_eq!(caches.loss_count(), 2);
    }

    #[test]
    fn controller_with_the_same_cache_instance_covers_what_a_lost_one_has_completed() {
        for (second, is_same) in [(Some(1), true), (Some(2), false), (None, false)] {
            let caches = cache_tracker(CacheScope::Separate);
            let one = caches.record_connect(0, instant_at_ns(1));
            caches.set_cache_instance(&one, Some(CacheInstance([1; 16])));
            caches.record_write(&one);
            caches.record_loss(&one);
            let two = caches.record_connect(0, instant_at_ns(2));
            assert_eq!(covering_path_mask(&caches), 0, "nothing is known of it yet");
            caches.set_cache_instance(&two, second.map(|byte| CacheInstance([byte; 16])));
            assert_eq!(
                (covering_path_mask(&caches), caches.loss_count()),
                (u32::from(is_same), u64::from(!is_same))
            );
            flush_to_completion(&caches, &two);
            assert_eq!(unflushed_writes(&caches), []);
        }
    }

    /// The loss is counted before anything can be read from that controller, so a caller that compares
    /// the count reads no data that are too old.
    #[test]
    fn loss_is_counted_when_the_next_controller_of_the_path_is_known() {
        let caches = cache_tracker(CacheScope::Separate);
        let one = caches.record_connect(0, instant_at_ns(1));
        caches.record_write(&one);
        caches.record_loss(&one);
        let before = unflushed_writes(&caches);
        let other = caches.record_connect(1, instant_at_ns(2));
        caches.set_cache_instance(&other, None);
        assert_eq!(caches.loss_count(), 0, "its own path may lead to the same cache again");
        let two = caches.record_connect(0, instant_at_ns(3));
        caches.set_cache_instance(&two, None);
        assert_eq!((caches.loss_count(), caches.reported_loss_count()), (1, 0));
        let mut left = before;
        caches.retain_volatile(&mut left);
        assert_eq!(left, [], "a flush that is under way has to fail by the count");
        caches.set_cache_instance(&two, None);
        assert_eq!(caches.loss_count(), 1, "once");
    }

    /// One that says nothing is not the same as another one that says nothing.
    #[test]
    fn controllers_share_a_cache_only_while_both_are_known_to_be_connected() {
        for (alive_at, is_covered) in
            [(None, false), (Some(1), false), (Some(2), true), (Some(3), true)]
        {
            let caches = cache_tracker(CacheScope::Shared);
            let one = caches.record_connect(0, instant_at_ns(1));
            let two = caches.record_connect(1, instant_at_ns(2));
            if let Some(alive_at) = alive_at {
                caches.record_alive(&one, instant_at_ns(alive_at));
            }
            caches.record_write(&one);
            caches.record_loss(&one);
            // As after a power loss of a target with two addresses, of which one returns first.
            assert_eq!(
                covering_path_mask(&caches),
                if is_covered { 0b10 } else { 0 },
                "{alive_at:?}"
            );
            flush_to_completion(&caches, &two);
            assert_eq!(unflushed_writes(&caches).is_empty(), is_covered, "{alive_at:?}");
        }
        // The older of two needs no proof: the other one was alive later.
        let caches = cache_tracker(CacheScope::Shared);
        let one = caches.record_connect(0, instant_at_ns(1));
        let two = caches.record_connect(1, instant_at_ns(2));
        caches.record_write(&two);
        caches.record_loss(&two);
        flush_to_completion(&caches, &one);
        assert_eq!(unflushed_writes(&caches), []);
    }

    #[test]
    fn controllers_cover_each_other_in_a_chain() {
        for is_whole in [false, true] {
            let caches = cache_tracker(CacheScope::Shared);
            let one = caches.record_connect(0, instant_at_ns(1));
            caches.record_write(&one);
            let two = caches.record_connect(1, instant_at_ns(2));
            caches.record_alive(&one, instant_at_ns(2));
            caches.record_loss(&one);
            let three = caches.record_connect(0, instant_at_ns(5));
            if is_whole {
                caches.record_alive(&two, instant_at_ns(5));
            }
            caches.record_loss(&two);
            flush_to_completion(&caches, &three);
            assert_eq!(unflushed_writes(&caches).is_empty(), is_whole);
        }
    }

    #[test]
    fn lost_controllers_without_writes_are_forgotten() {
        let caches = cache_tracker(CacheScope::Separate);
        for round in 0..100 {
            let one = caches.record_connect(0, instant_at_ns(round));
            caches.record_write(&one);
            flush_to_completion(&caches, &one);
            caches.record_loss(&one);
        }
        assert!(caches.lock().records.len() < 3);
    }
}
