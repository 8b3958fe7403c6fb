//! A pool whose device has failed reads again what is durable, and goes on; as `block` drives it.

use tenmil_base::{Instant, IoChannel, Span};

use super::{PoolHost, PoolStage};
use crate::cluster_host::HostsShared;

/// What a host knows of the losses of its pool.
#[derive(Debug, Default)]
pub(super) struct LossRecovery {
    /// Losses that were noticed.
    losses: u64,
    /// Losses that a flush has failed for.
    reported: u64,
    /// When the next attempt is due, while the pool has stopped.
    next_at: Option<Instant>,
    /// Losses that the device has counted.
    counted: u64,
    /// The same, before the durable state was read last.
    recovered: u64,
}

/// How long after one attempt the next one begins.
const AGAIN: Span = Span::from_ms(500);

impl LossRecovery {
    /// The pool was just opened.
    pub(super) const fn reset_at_open(&mut self, losses: u64) {
        let Self { counted, .. } = *self;
        *self = Self { losses, reported: losses, next_at: None, counted, recovered: counted };
    }

    pub(super) fn wake_at(&self) -> Instant {
        self.next_at.unwrap_or(Instant::NEVER)
    }
}

impl PoolHost {
    /// Has a pool recover that its device has stopped. True if that has begun.
    pub(super) fn recover_if_stopped(
        &mut self,
        now: Instant,
        shared: &mut HostsShared<'_>,
    ) -> bool {
        let PoolStage::Open(store) = &mut self.stage else { return false };
        let (losses, is_stopped) = (store.device_error_stop_count(), store.is_stopped());
        let is_due = is_stopped
            && !store.is_recovering()
            && self.recovery.next_at.is_none_or(|next_at| next_at <= now);
        let begins = is_due && {
            self.recovery.next_at = Some(now.after(AGAIN));
            store.start_recovery()
        };
        let why = store.last_stop_error().map(ToString::to_string).unwrap_or_default();
        if losses != self.recovery.losses {
            self.recovery.losses = losses;
            self.record_event(now, &format!("the pool has stopped: {why}"), shared);
            self.record_unflushed_loss(now, shared);
        }
        if !is_stopped && self.recovery.next_at.take().is_some() {
            self.record_event(now, "the pool has recovered", shared);
        }
        begins
    }

    /// The channel was polled, and counts so many losses. A read that it has completed may have found
    /// what the map does not refer to.
    pub(super) fn handle_loss_count(&mut self, counted: u64, has_polled: bool) {
        self.recovery.counted = counted;
        if let PoolStage::Open(store) = &mut self.stage
            && has_polled
            && counted > self.recovery.recovered
            && !self.bugs.pool_ignores_losses
        {
            store.handle_lost_writes();
        }
    }

    /// The superblocks are about to be read. If that is for a recovery, it is one from all losses so far.
    pub(super) fn acknowledge_losses(&mut self, queue: &mut impl IoChannel) {
        if let PoolStage::Open(store) = &self.stage
            && store.is_rereading()
        {
            self.recovery.recovered = queue.known_write_loss_count();
            queue.ack_repaired_write_losses(self.recovery.recovered);
        }
    }

    /// What was not durable may be gone, and the next flush fails for it.
    fn record_unflushed_loss(&mut self, now: Instant, shared: &mut HostsShared<'_>) {
        if shared.checker.pool_owner(self.disk).is_none_or(|it| it == self.number) {
            shared.checker.record_power_loss(self.disk, now);
        }
        self.is_dirty = true;
        self.touched.clear();
    }

    /// A flush completes. Whether it fails, or has to because writes were lost that no flush has failed for.
    pub(super) fn must_flush_fail(&mut self, is_success: bool) -> bool {
        let PoolStage::Open(store) = &self.stage else { return !is_success };
        let reported =
            std::mem::replace(&mut self.recovery.reported, store.device_error_stop_count());
        !is_success || reported != self.recovery.reported
    }
}
