//! The flushes of a queue that have to reach several controllers, one after the other.

use std::sync::Arc;

use base::Outcome;

use super::caches::{Cache, Owing};
use super::route::View;
use super::standings::Standings;

/// The flushes.
pub(super) struct Flushes {
    shared: Arc<Standings>,
    cache: Cache,
    /// Whether there are volatile caches at all.
    is_needed: bool,
    under_way: Vec<Flush>,
    /// Losses that were told.
    told: u64,
}

/// A flush.
#[derive(Clone, Copy)]
struct Flush {
    /// Where it is kept.
    slot: u32,
    /// Paths, by bits, that owed a flush when it was submitted and have not answered it.
    owed: u32,
    /// Where it was sent last, and in which epoch.
    path: usize,
    epoch: u64,
}

/// Where a flush goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Goes {
    /// As any other request.
    Anywhere,
    To(usize),
    /// To a path that rests just now.
    Later,
}

/// What the answer to a flush is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Worth {
    /// Whoever asked gets it.
    Told,
    /// Another path owes one, too.
    NotAll,
    /// All have answered that can, and writes may be lost.
    Lost,
}

/// What a flush is answered with when writes may be lost.
pub(super) const LOST: Outcome = Outcome::WRITE_FAULT;

impl Flushes {
    pub(super) fn new(shared: Arc<Standings>, cache: Cache, is_needed: bool) -> Self {
        let told = shared.caches().owing().losses;
        Self { shared, cache, is_needed, under_way: Vec::new(), told }
    }

    /// Whether the answers of all flushes under way are what they seem.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// A flush is kept in `slot` and would go to `path`: where it goes instead.
    #[cold]
    pub(super) fn begin(&mut self, slot: u64, path: usize, views: &[View]) -> usize {
        if !self.is_needed {
            return path;
        }
        let Owing { paths: owed, losses } = self.shared.caches().owing();
        if owed == 0 && (losses == self.told || self.cache == Cache::Shared) {
            return path;
        }
        self.under_way.push(Flush { slot: index_of(slot), owed, path, epoch: 0 });
        // One that rests is not waited for by what is new.
        let path = match self.goes(slot, views) {
            Goes::To(path) => path,
            Goes::Anywhere | Goes::Later => path,
        };
        self.sent(slot, path);
        path
    }

    /// Where the request in `slot` goes, if it is such a flush.
    pub(super) fn goes(&self, slot: u64, views: &[View]) -> Goes {
        let slot = index_of(slot);
        let Some(flush) = self.under_way.iter().find(|flush| flush.slot == slot) else {
            return Goes::Anywhere;
        };
        let owes = |path: &usize| flush.owed >> path & 1 == 1;
        if let Some(path) = (0..views.len()).filter(owes).find(|path| views[*path].is_usable()) {
            return Goes::To(path);
        }
        let can_rest = |path: &usize| reach(views) >> path & 1 == 1;
        match (0..views.len()).filter(owes).find(can_rest) {
            Some(_) => Goes::Later,
            None => Goes::Anywhere,
        }
    }

    /// The request in `slot` is about to be sent to `path`.
    pub(super) fn sent(&mut self, slot: u64, path: usize) {
        let slot = index_of(slot);
        if let Some(flush) = self.under_way.iter_mut().find(|flush| flush.slot == slot) {
            (flush.path, flush.epoch) = (path, self.shared.caches().flushing(path));
        }
    }

    /// The request in `slot` was answered, while paths could be [reached](reach).
    pub(super) fn answered(&mut self, slot: u64, outcome: Outcome, reach: u32) -> Worth {
        let index = index_of(slot);
        let Some(at) = self.under_way.iter().position(|flush| flush.slot == index) else {
            return Worth::Told;
        };
        if !outcome.is_success() {
            self.under_way.swap_remove(at);
            return Worth::Told;
        }
        let caches = self.shared.caches();
        let Flush { path, epoch, .. } = self.under_way[at];
        caches.flushed(path, epoch);
        // Others may have flushed some of them meanwhile.
        let Owing { paths, losses } = caches.owing();
        let owed = self.under_way[at].owed & !(1 << path) & paths;
        self.under_way[at].owed = owed;
        if owed & reach != 0 {
            return Worth::NotAll;
        }
        self.under_way.swap_remove(at);
        let is_lost = owed != 0 || losses != self.told;
        self.told = losses;
        if is_lost && self.cache == Cache::Separate { Worth::Lost } else { Worth::Told }
    }

    /// The request in `slot` has ended without an answer.
    pub(super) fn forget(&mut self, slot: u64) {
        let slot = index_of(slot);
        self.under_way.retain(|flush| flush.slot != slot);
    }
}

/// Paths, by bits, that take requests, or will when they have rested.
pub(super) fn reach(views: &[View]) -> u32 {
    let rested = |view: &View| View { is_resting: false, ..*view }.is_usable();
    let reached = views.iter().enumerate().filter(|(_, view)| rested(view));
    reached.fold(0, |bits, (path, _)| bits | 1 << path)
}

#[expect(clippy::cast_possible_truncation, reason = "a slot is the lower half of a token")]
const fn index_of(token: u64) -> u32 {
    token as u32
}
