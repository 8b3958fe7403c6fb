//! Deadlines: no cost per command, and a scan of the slots every eighth of the timeout.
//!
//! A timed-out command is posted to the controller, which aborts it, and gets one more timeout. After
//! that, the queue requests a reset.

use tenmil_base::{Instant, Span};

use super::{QueuePair, Transport};
use crate::queue_link::ResetReason;
use crate::slot_table::{SlotFlags, tick_of};

/// Limit that is never reached.
const NEVER_TICKS: u32 = u32::MAX;
/// Maximum limit (about a day and a half): longer ones would be lost in the wrap-around of the ticks.
const TICKS_MAX: u64 = 1 << 31;
const TICK_BITS: u32 = 16;

/// Converts a timeout to ticks, rounded up.
pub(super) fn timeout_to_ticks(limit: Span) -> u32 {
    if limit.ns == Instant::NEVER.ns {
        return NEVER_TICKS;
    }
    let ticks = (limit.ns >> TICK_BITS) + 1;
    u32::try_from(ticks.min(TICKS_MAX)).unwrap_or(NEVER_TICKS)
}

/// Scan interval for limits of `ticks`.
fn scan_interval_of(ticks: u32) -> Span {
    Span { ns: u64::from(ticks / 8 + 1) << TICK_BITS }
}

impl<T: Transport> QueuePair<T> {
    /// Sets an individual timeout for the command `cid`.
    pub(super) fn set_timeout(&mut self, now: Instant, cid: u16, timeout: Span) {
        let ticks = timeout_to_ticks(timeout);
        let index = self.slots.slot_index(cid);
        self.cold.own_limits[index] = ticks;
        self.scan_at = self.scan_at.min(now.after(scan_interval_of(ticks)));
    }

    /// Scans the commands in flight for timeouts.
    #[cold]
    pub(super) fn scan_deadlines(&mut self, now: Instant) {
        while let Some(cid) = self.link.next_ended_abort() {
            self.slots.note_abort_completed(cid);
        }
        let tick = tick_of(now);
        let mut shortest = self.cold.limit_ticks;
        for index in 0..self.slots.len() {
            let Some(cid) = self.slots.in_flight_at(index) else { continue };
            let (mark, age) = self.slots.age(cid, tick);
            let own = mark.has(SlotFlags::TIMED);
            let limit = if own { self.cold.own_limits[index] } else { self.cold.limit_ticks };
            shortest = shortest.min(limit);
            if age >= limit {
                self.handle_overdue(cid, mark, tick);
            }
        }
        self.scan_at = now.after(scan_interval_of(shortest));
    }

    fn handle_overdue(&mut self, cid: u16, mark: SlotFlags, tick: u32) {
        if mark.has(SlotFlags::OVERDUE) {
            self.link.signals().request_reset(ResetReason::CommandTimeout { cid });
        } else if self.link.post_timeout(cid) {
            self.slots.mark_overdue(cid, tick);
            self.cold.overdue_count += 1;
        }
    }
}
