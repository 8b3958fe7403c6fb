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
//! | same [cache instance](tenmil_wire::cache) | it writes through the same cache as long as the instance exists |
//! |---|---|
//! | the controllers of the subsystem share a cache ([`CacheScope::Shared`]), and both were known to be alive at the same time | the cache cannot have been lost in between |
//! | neither | the writes are lost, and every queue fails a flush for it |
//!
//! That is found out when the next controller on the path of the lost one is known, before anything is read
//! from it, or by a flush that comes earlier.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::Instant;
use tenmil_wire::cache::CacheInstance;

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
    known: Mutex<CacheEpochs>,
    /// How often writes were lost with a controller. Stored under the lock.
    losses: AtomicU64,
}

/// An association with a controller, from Connect to its loss.
#[derive(Debug)]
pub(crate) struct Association {
    number: u64,
    /// A write of the current epoch has been recorded.
    is_noted: AtomicBool,
}

struct CacheEpochs {
    records: Vec<Record>,
    next: u64,
    /// Losses that some queue has failed a flush for.
    reported: u64,
}

struct Record {
    of: Arc<Association>,
    path: usize,
    is_lost: bool,
    epoch: u64,
    /// The last epoch with a completed write; zero if there is none.
    wrote: u64,
    /// The last epoch whose writes are durable.
    flushed: u64,
    instance: Option<CacheInstance>,
    /// Time of the connect.
    since: Instant,
    /// The latest time at which it, or a controller that covers it, is known to have been alive.
    seen_at: Instant,
}

/// Writes of one controller up to an epoch, which a flush has to make durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owed {
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
        let known = CacheEpochs { records: Vec::new(), next: 1, reported: 0 };
        Arc::new(Self { cache, bugs, known: Mutex::new(known), losses: AtomicU64::new(0) })
    }

    /// Records a connect over `path`.
    pub(crate) fn connect(&self, path: usize, now: Instant) -> Arc<Association> {
        let mut known = self.lock();
        known.next += 1;
        let of = Arc::new(Association { number: known.next, is_noted: AtomicBool::new(false) });
        known.records.retain(Record::is_needed);
        known.records.push(Record {
            of: Arc::clone(&of),
            path,
            is_lost: false,
            epoch: 1,
            wrote: 0,
            flushed: 0,
            instance: None,
            since: now,
            seen_at: now,
        });
        of
    }

    /// Its namespace has said which instance of a cache it writes through, or nothing. What an earlier
    /// controller on its path has completed, and nobody vouches for, is lost.
    pub(crate) fn identify(&self, of: &Association, instance: Option<CacheInstance>) {
        let mut known = self.lock();
        let Some(record) = known.record(of.number) else { return };
        record.instance = instance;
        let path = record.path;
        let is_vouched_for = |known: &CacheEpochs, it: &Record| {
            known.records.iter().any(|one| !one.is_lost && self.vouches(one, it))
        };
        for index in 0..known.records.len() {
            let it = &known.records[index];
            if it.path == path && it.is_lost && it.owes() && !is_vouched_for(&known, it) {
                self.count_loss(&mut known.records[index]);
            }
        }
        known.records.retain(Record::is_needed);
    }

    /// Records that the controller completed a command that was sent at this time.
    pub(crate) fn seen(&self, of: &Association, at: Instant) {
        if let Some(record) = self.lock().record(of.number) {
            record.seen_at = record.seen_at.max(at);
        }
    }

    /// Records the loss of a controller.
    pub(crate) fn lose(&self, of: &Association) {
        let mut known = self.lock();
        let Some(at) = known.position(of.number) else { return };
        let seen_at = known.records[at].seen_at;
        for index in 0..known.records.len() {
            let it = &known.records[index];
            if it.is_lost && self.vouches(&known.records[at], it) {
                // What it covered is covered by controllers that were connected at the same time as it.
                known.records[index].seen_at = it.seen_at.max(seen_at);
            }
        }
        let record = &mut known.records[at];
        record.is_lost = true;
        record.of.is_noted.store(false, Ordering::Release);
    }

    /// The number of the association over `path` that has followed `own`, unless that is lost as well.
    pub(crate) fn successor(&self, path: usize, own: Option<&Association>) -> Option<u64> {
        let known = self.lock();
        let current = known.records.iter().rev().find(|it| it.path == path && !it.is_lost)?;
        let number = current.of.number;
        own.is_none_or(|own| own.number != number).then_some(number)
    }

    /// Records a write completed by `of`, before the completion is delivered.
    #[inline]
    pub(crate) fn wrote(&self, of: &Association) {
        // A flush that starts at this moment is sent after this load, and so covers the write.
        if !of.is_noted.load(Ordering::Acquire) {
            self.note(of);
        }
    }

    #[cold]
    fn note(&self, of: &Association) {
        let mut known = self.lock();
        // The record exists for as long as completions are polled from it.
        let Some(record) = known.record(of.number) else { return };
        record.wrote = record.epoch;
        record.of.is_noted.store(!record.is_lost, Ordering::Release);
    }

    /// The writes that a flush starting now has to make durable, and the number of losses so far.
    pub(crate) fn owing(&self) -> (Vec<Owed>, u64) {
        let known = self.lock();
        let owing = known.records.iter().filter(|record| record.owes());
        let owed = |it: &Record| Owed { association: it.of.number, epoch: it.epoch };
        (owing.map(owed).collect(), self.losses())
    }

    /// The losses that a new queue need not report, because they have been reported.
    pub(crate) fn reported(&self) -> u64 {
        self.lock().reported
    }

    /// Removes from `owed` what is durable by now.
    pub(crate) fn reduce(&self, owed: &mut Vec<Owed>) {
        let mut known = self.lock();
        owed.retain(|owed| known.owes(*owed));
    }

    /// Bit mask of the paths within `reach` on which a flush makes `owed` durable: its own path, or else
    /// those of controllers that cover it.
    pub(crate) fn paths(&self, owed: Owed, reach: u32) -> u32 {
        let known = self.lock();
        let Some(at) = known.position(owed.association) else { return 0 };
        let record = &known.records[at];
        let own = 1 << record.path;
        if !record.is_lost && own & reach != 0 {
            return own;
        }
        let others = known.records.iter().filter(|it| !it.is_lost && self.vouches(it, record));
        others.fold(0, |bits, it| bits | 1 << it.path) & reach
    }

    /// Starts a new epoch for each controller covered by a flush for `owed` that is about to be sent to
    /// `of`, by a queue that can reach these paths. Pass the result to [`flushed`](Self::flushed) on
    /// completion.
    pub(crate) fn flushing(&self, of: &Association, owed: &[Owed], reach: u32) -> Vec<Owed> {
        let mut known = self.lock();
        let Some(at) = known.position(of.number) else { return Vec::new() };
        let covers = |known: &CacheEpochs, it: &Record| {
            let is_owed = owed.iter().any(|owed| owed.association == it.of.number);
            // A controller that is reachable gets a flush of its own, even if it is assumed to share the
            // cache.
            let is_out_of_reach = it.is_lost || is_owed && reach >> it.path & 1 == 0;
            it.of.number == of.number || is_out_of_reach && self.vouches(&known.records[at], it)
        };
        let covered: Vec<usize> =
            (0..known.records.len()).filter(|it| covers(&known, &known.records[*it])).collect();
        let begin = |index: usize| {
            let record = &mut known.records[index];
            record.epoch += 1;
            record.of.is_noted.store(false, Ordering::Release);
            Owed { association: record.of.number, epoch: record.epoch - 1 }
        };
        covered.into_iter().map(begin).collect()
    }

    /// Records the completion of a flush.
    pub(crate) fn flushed(&self, covered: &[Owed]) {
        let mut known = self.lock();
        for owed in covered {
            if let Some(record) = known.record(owed.association) {
                record.flushed = record.flushed.max(owed.epoch);
            }
        }
        known.records.retain(Record::is_needed);
    }

    /// Gives up `owed`, which no controller can make durable; lost writes are counted. Returns false if
    /// some controllers are alive but not reachable for the caller: then a loss is not certain.
    pub(crate) fn give_up(&self, owed: &[Owed]) -> bool {
        let mut known = self.lock();
        let mut are_all_lost = true;
        for owed in owed {
            match known.record(owed.association) {
                Some(record) if record.is_lost => self.count_loss(record),
                Some(_) => are_all_lost = false,
                None => {}
            }
        }
        known.records.retain(Record::is_needed);
        are_all_lost
    }

    /// Marks all losses so far as reported by a failing flush. Returns their number.
    pub(crate) fn report(&self) -> u64 {
        let mut known = self.lock();
        known.reported = self.losses();
        known.reported
    }

    /// Number of times that writes were lost.
    pub(crate) fn losses(&self) -> u64 {
        // Pairs with the release in `count_loss`: whoever reads from a controller that came later sees it.
        self.losses.load(Ordering::Acquire)
    }

    /// What a controller owes is lost. The caller holds the lock.
    fn count_loss(&self, record: &mut Record) {
        record.flushed = record.epoch;
        record.epoch += 1;
        if !self.bugs.flush_ignores_lost_writes {
            self.losses.fetch_add(1, Ordering::Release);
        }
    }

    /// Whether a flush completed by `one` covers what `other` has completed before.
    fn vouches(&self, one: &Record, other: &Record) -> bool {
        let is_same = one.instance.is_some() && one.instance == other.instance;
        let was_there = one.since <= other.since.max(other.seen_at);
        is_same || self.cache == CacheScope::Shared && was_there
    }

    fn lock(&self) -> MutexGuard<'_, CacheEpochs> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CacheEpochs {
    fn position(&self, number: u64) -> Option<usize> {
        self.records.iter().position(|record| record.of.number == number)
    }

    fn record(&mut self, number: u64) -> Option<&mut Record> {
        self.records.iter_mut().find(|record| record.of.number == number)
    }

    fn owes(&mut self, owed: Owed) -> bool {
        self.record(owed.association).is_some_and(|it| it.owes() && it.flushed < owed.epoch)
    }
}

impl Record {
    const fn owes(&self) -> bool {
        self.wrote > self.flushed
    }

    /// A lost association is removed once it has no pending flush and no queue can poll its completions.
    fn is_needed(&self) -> bool {
        !self.is_lost || self.owes() || Arc::strong_count(&self.of) > 1
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tenmil_base::Instant;
    use tenmil_wire::cache::CacheInstance;

    use super::{Association, CacheScope, CacheTracker, Owed};
    use crate::options::InjectedBugs;

    const ALL: u32 = u32::MAX;

    fn caches(cache: CacheScope) -> Arc<CacheTracker> {
        CacheTracker::new(cache, InjectedBugs::default())
    }

    fn at(ns: u64) -> Instant {
        Instant { ns }
    }

    fn owed(caches: &CacheTracker) -> Vec<Owed> {
        caches.owing().0
    }

    /// Sends a flush to `of`, and completes it.
    fn flush(caches: &CacheTracker, of: &Association) {
        let covered = caches.flushing(of, &owed(caches), ALL);
        caches.flushed(&covered);
    }

    /// Bit mask of the paths on which a flush makes the owed writes durable.
    fn paths(caches: &CacheTracker) -> u32 {
        owed(caches).iter().fold(0, |bits, owed| bits | caches.paths(*owed, ALL))
    }

    #[test]
    fn controller_owes_a_flush_from_its_first_write_until_a_later_flush_is_completed() {
        let caches = caches(CacheScope::Separate);
        let one = caches.connect(1, at(1));
        assert_eq!(owed(&caches), []);
        caches.wrote(&one);
        assert_eq!(paths(&caches), 0b10);
        let first = caches.flushing(&one, &owed(&caches), ALL);
        assert_eq!(paths(&caches), 0b10, "not before it is completed");
        caches.wrote(&one);
        caches.flushed(&first);
        assert_eq!(paths(&caches), 0b10, "the second write came after it");
        let (second, third) = (caches.flushing(&one, &[], ALL), caches.flushing(&one, &[], ALL));
        caches.flushed(&third);
        caches.flushed(&second);
        assert_eq!(owed(&caches), []);
    }

    #[test]
    fn flush_of_a_later_controller_covers_nothing_of_a_lost_one() {
        let caches = caches(CacheScope::Separate);
        let one = caches.connect(0, at(1));
        caches.wrote(&one);
        caches.lose(&one);
        let two = caches.connect(0, at(2));
        let before = owed(&caches);
        assert_eq!(paths(&caches), 0);
        flush(&caches, &two);
        assert_eq!(owed(&caches).len(), 1);
        assert!(caches.give_up(&before));
        assert_eq!((owed(&caches), caches.losses(), caches.reported()), (vec![], 1, 0));
        assert_eq!((caches.report(), caches.reported()), (1, 1));
    }

    #[test]
    fn answer_that_is_read_after_the_loss_is_lost_too() {
        let caches = caches(CacheScope::Separate);
        let one = caches.connect(0, at(1));
        caches.lose(&one);
        assert_eq!(owed(&caches), []);
        caches.connect(0, at(2));
        for _ in 0..2 {
            caches.wrote(&one);
            assert_eq!(owed(&caches).len(), 1);
            assert!(caches.give_up(&owed(&caches)));
        }
        assert_eq!(caches.losses(), 2);
    }

    #[test]
    fn controller_with_the_same_cache_instance_covers_what_a_lost_one_has_completed() {
        for (second, is_same) in [(Some(1), true), (Some(2), false), (None, false)] {
            let caches = caches(CacheScope::Separate);
            let one = caches.connect(0, at(1));
            caches.identify(&one, Some(CacheInstance([1; 16])));
            caches.wrote(&one);
            caches.lose(&one);
            let two = caches.connect(0, at(2));
            assert_eq!(paths(&caches), 0, "nothing is known of it yet");
            caches.identify(&two, second.map(|byte| CacheInstance([byte; 16])));
            assert_eq!(
                (paths(&caches), caches.losses()),
                (u32::from(is_same), u64::from(!is_same))
            );
            flush(&caches, &two);
            assert_eq!(owed(&caches), []);
        }
    }

    /// Before anything can be read from it: whoever counts losses then reads nothing that is too old.
    #[test]
    fn loss_is_counted_when_the_next_controller_of_the_path_is_known() {
        let caches = caches(CacheScope::Separate);
        let one = caches.connect(0, at(1));
        caches.wrote(&one);
        caches.lose(&one);
        let before = owed(&caches);
        let other = caches.connect(1, at(2));
        caches.identify(&other, None);
        assert_eq!(caches.losses(), 0, "its own path may lead to the same cache again");
        let two = caches.connect(0, at(3));
        caches.identify(&two, None);
        assert_eq!((caches.losses(), caches.reported()), (1, 0));
        let mut left = before;
        caches.reduce(&mut left);
        assert_eq!(left, [], "a flush that is under way has to fail by the count");
        caches.identify(&two, None);
        assert_eq!(caches.losses(), 1, "once");
    }

    /// One that says nothing is not the same as another one that says nothing.
    #[test]
    fn controllers_share_a_cache_only_while_both_are_known_to_have_been_there() {
        for (seen_at, is_covered) in
            [(None, false), (Some(1), false), (Some(2), true), (Some(3), true)]
        {
            let caches = caches(CacheScope::Shared);
            let one = caches.connect(0, at(1));
            let two = caches.connect(1, at(2));
            if let Some(seen_at) = seen_at {
                caches.seen(&one, at(seen_at));
            }
            caches.wrote(&one);
            caches.lose(&one);
            // As after a power loss of a target with two addresses, of which one returns first.
            assert_eq!(paths(&caches), if is_covered { 0b10 } else { 0 }, "{seen_at:?}");
            flush(&caches, &two);
            assert_eq!(owed(&caches).is_empty(), is_covered, "{seen_at:?}");
        }
        // The older of two needs no proof: the other one was alive later.
        let caches = caches(CacheScope::Shared);
        let one = caches.connect(0, at(1));
        let two = caches.connect(1, at(2));
        caches.wrote(&two);
        caches.lose(&two);
        flush(&caches, &one);
        assert_eq!(owed(&caches), []);
    }

    #[test]
    fn controllers_vouch_for_each_other_in_a_chain() {
        for is_whole in [false, true] {
            let caches = caches(CacheScope::Shared);
            let one = caches.connect(0, at(1));
            caches.wrote(&one);
            let two = caches.connect(1, at(2));
            caches.seen(&one, at(2));
            caches.lose(&one);
            let three = caches.connect(0, at(5));
            if is_whole {
                caches.seen(&two, at(5));
            }
            caches.lose(&two);
            flush(&caches, &three);
            assert_eq!(owed(&caches).is_empty(), is_whole);
        }
    }

    #[test]
    fn lost_controllers_without_writes_are_forgotten() {
        let caches = caches(CacheScope::Separate);
        for round in 0..100 {
            let one = caches.connect(0, at(round));
            caches.wrote(&one);
            flush(&caches, &one);
            caches.lose(&one);
        }
        assert!(caches.lock().records.len() < 3);
    }
}
