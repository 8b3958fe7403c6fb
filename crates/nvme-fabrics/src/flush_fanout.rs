//! Flushes of a queue that have to reach several controllers one after another, or may have to report
//! lost writes.

use std::sync::Arc;

use tenmil_base::IoStatus;

use crate::cache_tracker::{Association, CacheTracker, UnflushedWrites};

/// The special flushes of a queue.
pub(crate) struct FlushFanout {
    caches: Arc<CacheTracker>,
    /// Whether there are volatile caches at all.
    is_needed: bool,
    active: Vec<FlushInProgress>,
    /// Losses that this queue has failed a flush for, or that precede it.
    reported_losses: u64,
}

/// A flush in progress.
struct FlushInProgress {
    /// Slot of the request.
    slot: u32,
    /// Writes that were unflushed at its submission and are not durable yet.
    unflushed: Vec<UnflushedWrites>,
    /// Losses that its queue had reported at its submission.
    reported_losses: u64,
    /// The association that it was last sent to, and what that covers.
    sent: Option<(u64, Vec<UnflushedWrites>)>,
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
    Final,
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
        let reported_losses = caches.reported_loss_count();
        Self { caches, is_needed, active: Vec::new(), reported_losses }
    }

    /// Whether all flushes in flight are ordinary.
    #[inline]
    pub(crate) fn has_only_ordinary_flushes(&self) -> bool {
        self.active.is_empty()
    }

    /// Registers a submitted flush in `slot`. Returns false if it is an ordinary request.
    #[cold]
    pub(crate) fn register_flush(&mut self, slot: u64) -> bool {
        if !self.is_needed {
            return false;
        }
        let (unflushed, losses) = self.caches.unflushed_writes_and_losses();
        if unflushed.is_empty() && losses == self.reported_losses {
            return false;
        }
        self.active.push(FlushInProgress {
            slot: slot_index_of(slot),
            unflushed,
            reported_losses: self.reported_losses,
            sent: None,
        });
        true
    }

    /// The route of the request in `slot`.
    pub(crate) fn route(&self, slot: u64, scope: FlushScope) -> FlushRoute {
        let slot = slot_index_of(slot);
        let Some(flush) = self.active.iter().find(|flush| flush.slot == slot) else {
            return FlushRoute::Anywhere;
        };
        let mut unflushed = flush.unflushed.clone();
        self.caches.retain_volatile(&mut unflushed);
        let paths = |scope| {
            unflushed.iter().map(|it| self.caches.covering_paths(*it, scope)).find(|it| *it != 0)
        };
        match (paths(scope.now), paths(scope.soon)) {
            (Some(bits), _) => FlushRoute::To(bits.trailing_zeros() as usize),
            (None, Some(_)) => FlushRoute::Later,
            (None, None) => FlushRoute::Anywhere,
        }
    }

    /// Records that the request in `slot` is about to be sent to `association`.
    pub(crate) fn record_sent(
        &mut self,
        slot: u64,
        association: Option<&Association>,
        scope: FlushScope,
    ) {
        let slot = slot_index_of(slot);
        let Self { active, caches, .. } = self;
        if let Some(flush) = active.iter_mut().find(|flush| flush.slot == slot) {
            flush.sent = association.map(|association| {
                (
                    association.number(),
                    caches.begin_flush(association, &flush.unflushed, scope.soon),
                )
            });
        }
    }

    /// Handles the completion of the request in `slot` by `by`, with the paths available now.
    pub(crate) fn handle_completion(
        &mut self,
        slot: u64,
        status: IoStatus,
        by: Option<&Association>,
        scope: FlushScope,
    ) -> FlushResult {
        let index = slot_index_of(slot);
        let Some(at) = self.active.iter().position(|flush| flush.slot == index) else {
            return FlushResult::Final;
        };
        if !status.is_success() {
            self.active.swap_remove(at);
            return FlushResult::Final;
        }
        let (caches, flush) = (&self.caches, &mut self.active[at]);
        match flush.sent.take() {
            Some((association, covered)) if by.is_some_and(|by| by.number() == association) => {
                caches.complete_flush(&covered);
            }
            // It was sent over a connection that was established while it was in the ring.
            _ => return FlushResult::MoreControllers,
        }
        caches.retain_volatile(&mut flush.unflushed);
        if flush
            .unflushed
            .iter()
            .any(|unflushed| caches.covering_paths(*unflushed, scope.soon) != 0)
        {
            return FlushResult::MoreControllers;
        }
        let is_certain = caches.give_up_writes(&flush.unflushed);
        let is_lost = !is_certain || caches.loss_count() > flush.reported_losses;
        self.active.swap_remove(at);
        if !is_lost {
            return FlushResult::Final;
        }
        self.reported_losses = caches.mark_losses_reported();
        FlushResult::Lost
    }

    /// Number of known losses of writes.
    pub(crate) fn known_loss_count(&self) -> u64 {
        self.caches.loss_count()
    }

    /// Makes flushes not fail for the first `count` losses.
    pub(crate) fn acknowledge_losses(&mut self, count: u64) {
        self.reported_losses = self.reported_losses.max(count);
        self.active
            .iter_mut()
            .for_each(|flush| flush.reported_losses = flush.reported_losses.max(count));
    }

    /// Removes the request in `slot`, which ended without a completion.
    pub(crate) fn remove(&mut self, slot: u64) {
        let slot = slot_index_of(slot);
        self.active.retain(|flush| flush.slot != slot);
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a slot is the lower half of a token")]
const fn slot_index_of(token: u64) -> u32 {
    token as u32
}
