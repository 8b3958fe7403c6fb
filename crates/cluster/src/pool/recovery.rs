//! A pool whose device has failed reads again what is durable, and goes on; as `block` drives it.

use tenmil_base::{Instant, Span};

use super::{PoolHost, Stage};
use crate::host::Shared;

/// What a host knows of the losses of its pool.
#[derive(Debug, Default)]
pub(super) struct Recovery {
    /// Losses that were noticed.
    losses: u64,
    /// Losses that a flush has failed for.
    told: u64,
    /// When the next attempt is due, while the pool has stopped.
    next_at: Option<Instant>,
    /// The device has lost its power, and no flush was answered since.
    is_suspect: bool,
    /// When that has ended last.
    suspect_until: Instant,
}

/// How long after one attempt the next one begins.
const AGAIN: Span = Span::from_ms(500);

impl Recovery {
    /// Of a pool that was just opened.
    pub(super) const fn of(losses: u64) -> Self {
        let suspect_until = Instant { ns: 0 };
        Self { losses, told: losses, next_at: None, is_suspect: false, suspect_until }
    }

    pub(super) fn wake_at(&self) -> Instant {
        self.next_at.unwrap_or(Instant::NEVER)
    }
}

impl PoolHost {
    /// Has a pool recover that its device has stopped. True if that has begun.
    pub(super) fn recover(&mut self, now: Instant, shared: &mut Shared<'_>) -> bool {
        let Stage::Open(store) = &mut self.stage else { return false };
        let (losses, is_stopped) = (store.losses(), store.is_stopped());
        let is_due = is_stopped
            && !store.is_recovering()
            && self.recovery.next_at.is_none_or(|next_at| next_at <= now);
        let begins = is_due && {
            self.recovery.next_at = Some(now.after(AGAIN));
            store.recover()
        };
        let why = store.last_stop().map(ToString::to_string).unwrap_or_default();
        if losses != self.recovery.losses {
            self.recovery.losses = losses;
            self.end_suspicion(now);
            self.note(now, &format!("the pool has stopped: {why}"), shared);
            self.lose_unflushed(now, shared);
        }
        if !is_stopped && self.recovery.next_at.take().is_some() {
            self.note(now, "the pool has recovered", shared);
        }
        begins
    }

    /// The device has lost its power. Until a flush has told the pool what that means, blocks to which it has
    /// moved data that were not flushed may hold what was there before, of whatever volume.
    pub(crate) const fn suspect(&mut self) {
        self.recovery.is_suspect = true;
    }

    pub(super) const fn end_suspicion(&mut self, now: Instant) {
        if self.recovery.is_suspect {
            (self.recovery.is_suspect, self.recovery.suspect_until) = (false, now);
        }
    }

    /// Whether a read that has begun then may have found blocks of before a loss of power.
    pub(super) fn is_suspect(&self, begun: Instant) -> bool {
        self.recovery.is_suspect || begun <= self.recovery.suspect_until
    }

    /// What was not durable may be gone, and the next flush fails for it.
    fn lose_unflushed(&mut self, now: Instant, shared: &mut Shared<'_>) {
        if shared.checker.pool_owner(self.disk).is_none_or(|it| it == self.number) {
            shared.checker.power_lost(self.disk, now);
        }
        self.is_dirty = true;
        self.touched.clear();
    }

    /// A flush is answered. Whether it fails, or has to because writes were lost that no flush has failed for.
    pub(super) fn hears_of_losses(&mut self, is_success: bool) -> bool {
        let Stage::Open(store) = &self.stage else { return !is_success };
        let told = std::mem::replace(&mut self.recovery.told, store.losses());
        !is_success || told != self.recovery.told
    }
}
