//! The flushes of a queue that have to reach several controllers, one after the other, or that may
//! have to report lost writes.

use std::sync::Arc;

use base::Outcome;

use crate::caches::{Association, Caches, Owed};

/// The flushes.
pub(crate) struct Flushes {
    caches: Arc<Caches>,
    /// Whether there are volatile caches at all.
    is_needed: bool,
    under_way: Vec<Flush>,
    /// Losses that this queue has failed a flush for, or was made after.
    told: u64,
}

/// A flush.
struct Flush {
    /// Where it is kept.
    slot: u32,
    /// What was owed when it was submitted and is not durable yet.
    owed: Vec<Owed>,
    /// Losses that its queue had reported when it was submitted.
    told: u64,
    /// To which controller it was sent last, and what that covers.
    sent: Option<(u64, Vec<Owed>)>,
}

/// Where a flush goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Goes {
    /// As any other request.
    Anywhere,
    To(usize),
    /// To a path that rests just now.
    Later,
}

/// What the answer to a flush is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Worth {
    /// Whoever asked gets it.
    Told,
    /// Another controller owes one, too, or another one was asked than has answered.
    NotAll,
    /// All have answered that can, and writes are lost.
    Lost,
}

/// What a flush is answered with when writes are lost.
pub(crate) const LOST: Outcome = Outcome::WRITE_FAULT;

/// Which paths there are, as bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reach {
    /// Paths that take requests now.
    pub(crate) now: u32,
    /// The same, and those that will when they have rested.
    pub(crate) soon: u32,
}

impl Flushes {
    pub(crate) fn new(caches: Arc<Caches>, is_needed: bool) -> Self {
        let told = caches.reported();
        Self { caches, is_needed, under_way: Vec::new(), told }
    }

    /// Whether the answers of all flushes under way are what they seem.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// A flush was submitted and is kept in `slot`. False if it is as any other request.
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

    /// Where the request in `slot` goes, if it is such a flush.
    pub(crate) fn goes(&self, slot: u64, reach: Reach) -> Goes {
        let slot = index_of(slot);
        let Some(flush) = self.under_way.iter().find(|flush| flush.slot == slot) else {
            return Goes::Anywhere;
        };
        let mut owed = flush.owed.clone();
        self.caches.reduce(&mut owed);
        let paths = |reach| owed.iter().map(|it| self.caches.paths(*it, reach)).find(|it| *it != 0);
        match (paths(reach.now), paths(reach.soon)) {
            (Some(bits), _) => Goes::To(bits.trailing_zeros() as usize),
            (None, Some(_)) => Goes::Later,
            (None, None) => Goes::Anywhere,
        }
    }

    /// The request in `slot` is about to be sent to `to`.
    pub(crate) fn sent(&mut self, slot: u64, to: Option<&Association>, reach: Reach) {
        let slot = index_of(slot);
        let Self { under_way, caches, .. } = self;
        if let Some(flush) = under_way.iter_mut().find(|flush| flush.slot == slot) {
            flush.sent = to.map(|to| (to.number(), caches.flushing(to, &flush.owed, reach.soon)));
        }
    }

    /// The request in `slot` was answered by `by`, while paths could be reached.
    pub(crate) fn answered(
        &mut self,
        slot: u64,
        outcome: Outcome,
        by: Option<&Association>,
        reach: Reach,
    ) -> Worth {
        let index = index_of(slot);
        let Some(at) = self.under_way.iter().position(|flush| flush.slot == index) else {
            return Worth::Told;
        };
        if !outcome.is_success() {
            self.under_way.swap_remove(at);
            return Worth::Told;
        }
        let (caches, flush) = (&self.caches, &mut self.under_way[at]);
        match flush.sent.take() {
            Some((to, covered)) if by.is_some_and(|by| by.number() == to) => {
                caches.flushed(&covered);
            }
            // It was sent over a connection that was made while it lay in the ring.
            _ => return Worth::NotAll,
        }
        caches.reduce(&mut flush.owed);
        if flush.owed.iter().any(|owed| caches.paths(*owed, reach.soon) != 0) {
            return Worth::NotAll;
        }
        let is_known = caches.give_up(&flush.owed);
        let is_lost = !is_known || caches.losses() > flush.told;
        self.under_way.swap_remove(at);
        if !is_lost {
            return Worth::Told;
        }
        self.told = caches.report();
        Worth::Lost
    }

    /// How often writes were lost so far, as far as somebody has found out.
    pub(crate) fn losses(&self) -> u64 {
        self.caches.losses()
    }

    /// No flush fails for the first `count` losses any more.
    pub(crate) fn heed(&mut self, count: u64) {
        self.told = self.told.max(count);
        self.under_way.iter_mut().for_each(|flush| flush.told = flush.told.max(count));
    }

    /// The request in `slot` has ended without an answer.
    pub(crate) fn forget(&mut self, slot: u64) {
        let slot = index_of(slot);
        self.under_way.retain(|flush| flush.slot != slot);
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a slot is the lower half of a token")]
const fn index_of(token: u64) -> u32 {
    token as u32
}
