//! Flushes of a queue that have to reach several controllers one after another, or may have to report
//! lost writes.

use std::sync::Arc;

use tenmil_base::IoStatus;

use crate::caches::{Association, CacheTracker, Owed};

/// The special flushes of a queue.
pub(crate) struct FlushFanout {
    caches: Arc<CacheTracker>,
    /// Whether there are volatile caches at all.
    is_needed: bool,
    under_way: Vec<Flush>,
    /// Losses that this queue has failed a flush for, or that precede it.
    told: u64,
}

/// A flush in progress.
struct Flush {
    /// Slot of the request.
    slot: u32,
    /// Writes owed at its submission that are not durable yet.
    owed: Vec<Owed>,
    /// Losses that its queue had reported at its submission.
    told: u64,
    /// The association that it was last sent to, and what that covers.
    sent: Option<(u64, Vec<Owed>)>,
}

/// Route of a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlushRoute {
    /// Like any other request.
    Anywhere,
    To(usize),
    /// On a path that is backed off at present.
    Later,
}

/// Meaning of the completion of a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlushResult {
    /// Final: deliver it to the submitter.
    Told,
    /// Another controller has to be flushed as well, or a different one than intended has completed it.
    MoreControllers,
    /// All available controllers have been flushed, and writes are lost.
    Lost,
}

/// Status of a flush when writes are lost.
pub(crate) const LOST: IoStatus = IoStatus::WRITE_FAULT;

/// Available paths as bit masks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FlushScope {
    /// Paths that accept requests now.
    pub(crate) now: u32,
    /// The same, and those that will after their back-off.
    pub(crate) soon: u32,
}

impl FlushFanout {
    pub(crate) fn new(caches: Arc<CacheTracker>, is_needed: bool) -> Self {
        let told = caches.reported();
        Self { caches, is_needed, under_way: Vec::new(), told }
    }

    /// Whether all flushes in flight are ordinary.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Registers a submitted flush in `slot`. Returns false if it is an ordinary request.
    #[cold]
    pub(crate) fn begin(&mut self, slot: u64) -> bool {
        if !self.is_needed {
            return false;
        }
        let (owed, losses) = self.caches.owing();
        if owed.is_empty() && losses == self.told {
            return false;
        }
        self.under_way.push(Flush { slot: index_of(slot), owed, told: self.told, sent: None });
        true
    }

    /// The route of the request in `slot`.
    pub(crate) fn goes(&self, slot: u64, reach: FlushScope) -> FlushRoute {
        let slot = index_of(slot);
        let Some(flush) = self.under_way.iter().find(|flush| flush.slot == slot) else {
            return FlushRoute::Anywhere;
        };
        let mut owed = flush.owed.clone();
        self.caches.reduce(&mut owed);
        let paths = |reach| owed.iter().map(|it| self.caches.paths(*it, reach)).find(|it| *it != 0);
        match (paths(reach.now), paths(reach.soon)) {
            (Some(bits), _) => FlushRoute::To(bits.trailing_zeros() as usize),
            (None, Some(_)) => FlushRoute::Later,
            (None, None) => FlushRoute::Anywhere,
        }
    }

    /// Records that the request in `slot` is about to be sent to `to`.
    pub(crate) fn sent(&mut self, slot: u64, to: Option<&Association>, reach: FlushScope) {
        let slot = index_of(slot);
        let Self { under_way, caches, .. } = self;
        if let Some(flush) = under_way.iter_mut().find(|flush| flush.slot == slot) {
            flush.sent = to.map(|to| (to.number(), caches.flushing(to, &flush.owed, reach.soon)));
        }
    }

    /// Handles the completion of the request in `slot` by `by`, with the paths available now.
    pub(crate) fn answered(
        &mut self,
        slot: u64,
        outcome: IoStatus,
        by: Option<&Association>,
        reach: FlushScope,
    ) -> FlushResult {
        let index = index_of(slot);
        let Some(at) = self.under_way.iter().position(|flush| flush.slot == index) else {
            return FlushResult::Told;
        };
        if !outcome.is_success() {
            self.under_way.swap_remove(at);
            return FlushResult::Told;
        }
        let (caches, flush) = (&self.caches, &mut self.under_way[at]);
        match flush.sent.take() {
            Some((to, covered)) if by.is_some_and(|by| by.number() == to) => {
                caches.flushed(&covered);
            }
            // It was sent over a connection that was established while it was in the ring.
            _ => return FlushResult::MoreControllers,
        }
        caches.reduce(&mut flush.owed);
        if flush.owed.iter().any(|owed| caches.paths(*owed, reach.soon) != 0) {
            return FlushResult::MoreControllers;
        }
        let is_known = caches.give_up(&flush.owed);
        let is_lost = !is_known || caches.losses() > flush.told;
        self.under_way.swap_remove(at);
        if !is_lost {
            return FlushResult::Told;
        }
        self.told = caches.report();
        FlushResult::Lost
    }

    /// Number of known losses of writes.
    pub(crate) fn losses(&self) -> u64 {
        self.caches.losses()
    }

    /// Makes flushes not fail for the first `count` losses.
    pub(crate) fn acknowledge(&mut self, count: u64) {
        self.told = self.told.max(count);
        self.under_way.iter_mut().for_each(|flush| flush.told = flush.told.max(count));
    }

    /// Removes the request in `slot`, which ended without a completion.
    pub(crate) fn forget(&mut self, slot: u64) {
        let slot = index_of(slot);
        self.under_way.retain(|flush| flush.slot != slot);
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a slot is the lower half of a token")]
const fn index_of(token: u64) -> u32 {
    token as u32
}
