//! Preempt and Abort completes once no write of a preempted host can reach the block device any more
//! (Base 2.1 §8.1.22.7).
//!
//! ```text
//!   preempted ─▶ pending updates of each controller of those hosts ─▶ its I/O queues ─▶ their writes have completed
//!      │              each arrow passes a clone of the `PreemptedWriterGuard`, dropped at the end               │
//!      └─ the command that preempted waits until none is left, or for WAIT_MAX ◀────────────┘
//! ```
//!
//! New writes are refused from the moment at which the reservation changes, so only those that a queue
//! has already taken are waited for.

use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};

use tenmil_base::{Instant, Span};
use tenmil_wire::Status;

use crate::controller::Controller;
use crate::controller::reservation::commands::with_dnr_unless_conflict;
use crate::controller::transport_interface::{
    AdminResult, QueueCommandId, ReservationCompletion, TransportAction,
};

/// Held by everything through which a preempted host may still write a namespace.
#[derive(Clone, Debug)]
pub struct PreemptedWriterGuard(Arc<()>);

/// Whether anything through which a preempted host may still write is left.
#[derive(Clone, Debug)]
pub(crate) struct PreemptedWriterTracker(Weak<()>);

/// A Preempt and Abort that is in effect and waits for the writes of the preempted hosts.
#[derive(Debug)]
pub(in crate::controller) struct PendingPreemption {
    pub(in crate::controller) from: QueueCommandId,
    writers: PreemptedWriterTracker,
    since: Instant,
}

/// How long Preempt and Abort waits: less than the 30 s after which hosts give up a command.
pub(super) const WAIT_MAX: Span = Span::from_secs(10);
/// Interval of checks whether those writes have completed.
const POLL_INTERVAL: Span = Span::from_ms(1);

impl PreemptedWriterGuard {
    /// Creates the guard of a preemption. Each potential writer holds a clone of it.
    #[expect(clippy::new_without_default, reason = "each is another preemption")]
    pub fn new() -> Self {
        Self(Arc::new(()))
    }

    pub(crate) fn tracker(&self) -> PreemptedWriterTracker {
        PreemptedWriterTracker(Arc::downgrade(&self.0))
    }
}

impl PartialEq for PreemptedWriterGuard {
    /// Whether both are of the same preemption.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for PreemptedWriterGuard {}

impl PreemptedWriterTracker {
    /// Whether none is left.
    pub(crate) fn have_all_writers_finished(&self) -> bool {
        let all_released = self.0.strong_count() == 0;
        // Pairs with the release with which the last one was dropped.
        fence(Ordering::Acquire);
        all_released
    }
}

impl Controller {
    /// A reservation command has taken effect or was refused: it ends now, or when the preempted hosts
    /// write no more.
    pub(in crate::controller) fn finish_reservation_command(
        &mut self,
        now: Instant,
        from: QueueCommandId,
        end: Result<Option<PreemptedWriterTracker>, Status>,
    ) {
        let end = match end {
            Ok(Some(writers)) => {
                self.pending_preemptions.push(PendingPreemption { from, writers, since: now });
                return;
            }
            Ok(None) => AdminResult::OK,
            Err(status) => AdminResult::failure(with_dnr_unless_conflict(status)),
        };
        self.reservation_completions.push_back(ReservationCompletion { from, end });
    }

    /// Handles a controller reset: its own preemptions are dropped. Its queues stop, and still receive the
    /// aborts of preemptions by other hosts, which wait for them.
    pub(in crate::controller) fn drop_own_preemptions(&mut self) {
        self.signals.retain(|signal| matches!(signal, TransportAction::AbortNamespace { .. }));
        self.pending_preemptions.clear();
    }

    /// Completes preemptions without outstanding writes, and has the queues check the writes that other
    /// preemptions wait for.
    #[inline]
    pub(in crate::controller) fn poll_preemptions(&mut self, now: Instant) {
        if !self.pending_preemptions.is_empty() || !self.preempted_writers.is_empty() {
            self.advance_preemptions(now);
        }
    }

    fn advance_preemptions(&mut self, now: Instant) {
        self.preempted_writers.retain(|writers| !writers.have_all_writers_finished());
        if !self.preempted_writers.is_empty() {
            self.signals.push_back(TransportAction::CheckPreempted);
        }
        for PendingPreemption { from, writers, since } in
            core::mem::take(&mut self.pending_preemptions)
        {
            if writers.have_all_writers_finished() {
                self.reservation_completions
                    .push_back(ReservationCompletion { from, end: AdminResult::OK });
            } else if now < since.after(WAIT_MAX) {
                self.pending_preemptions.push(PendingPreemption { from, writers, since });
            } else {
                let why = format!(
                    "preempt and abort, by a command of queue {}: media have not answered writes of \
                     preempted hosts after {} s; the reservation has changed, and those writes may \
                     still take effect; fix: look after that device",
                    from.queue,
                    WAIT_MAX.ns / 1_000_000_000
                );
                self.signals.push_back(TransportAction::PersistFailed { why });
                let end = AdminResult::failure(with_dnr_unless_conflict(Status::INTERNAL_ERROR));
                self.reservation_completions.push_back(ReservationCompletion { from, end });
            }
        }
    }

    pub(in crate::controller) fn preemptions_wake_at(&self, now: Instant) -> Instant {
        let is_idle = self.pending_preemptions.is_empty() && self.preempted_writers.is_empty();
        if is_idle { Instant::NEVER } else { now.after(POLL_INTERVAL) }
    }
}
