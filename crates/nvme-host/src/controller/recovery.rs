//! Error recovery: the escalation for commands that time out.
//!
//! ```text
//!   command timed out --> Abort --> one more timeout --> reset --> … --> reset --> Dead
//!                           '-- Abort timed out -----------^  bounded in number
//! ```
//!
//! During a reset, all commands in flight are parked: they complete when the controller is disabled, or,
//! if that fails, when its DMA has been revoked.

use std::collections::VecDeque;

use tenmil_base::{Dma, Instant, IoCompletion, Mmio};
use tenmil_wire::admin::Abort;
use tenmil_wire::register::{self, ControllerStatus};

use super::admin_queue_pair::{ABORTS_MAX, AdminCommandPurpose};
use super::dma_revocation::AfterRevocation;
use super::{Controller, ControllerState, Phase, QueueTransports};
use crate::bringup::{BringupError, Register};
use crate::error::{ControllerError, ResetCause};
use crate::event::Event;
use crate::queue_link::{QueueState, TimedOutCommand};

/// Times of recent resets.
#[derive(Debug, Default)]
pub(super) struct ResetHistory {
    times: VecDeque<Instant>,
}

impl<M: Mmio, D: Dma, Q: QueueTransports<M, D>> Controller<M, D, Q> {
    /// Aborts timed-out commands, as many at once as the controller permits.
    pub(super) fn abort_overdue(&mut self, now: Instant) {
        if self.is_admin_queue_stopped() {
            return;
        }
        while let Some(overdue) = self.admin.link.next_timeout() {
            match self.admin.purpose_of(overdue.cid) {
                Some(AdminCommandPurpose::Abort { queue, overdue }) => {
                    let cause = ResetCause::AbortTimeout { queue, cid: overdue.cid };
                    return self.reset_with_cause(now, cause);
                }
                _ if self.can_abort() => self.submit_abort(now, 0, overdue),
                _ => self.admin.link.note_abort_completed(overdue),
            }
        }
        for index in 0..self.queues.len() {
            while self.can_abort()
                && let Some(overdue) = self.queues[index].link.next_timeout()
            {
                self.submit_abort(now, self.queues[index].id, overdue);
            }
        }
    }

    /// Whether one more Abort is permitted. The Abort Command Limit is 0's based (Base 2.1 §5.1.13, ACL).
    pub(super) fn can_abort(&self) -> bool {
        let limit = self.identity.as_ref().map_or(1, |identity| identity.limits.aborts);
        self.admin.outstanding_abort_count() < usize::from(limit).min(ABORTS_MAX)
    }

    fn submit_abort(&mut self, now: Instant, queue: u16, overdue: TimedOutCommand) {
        let command = Abort { sqid: queue, abort_cid: overdue.cid };
        self.admin.submit_internal(now, AdminCommandPurpose::Abort { queue, overdue }, &command);
        self.push_event(Event::CommandOverdue { queue, cid: overdue.cid });
    }

    /// Handles the completion of an Abort, with any status: if the aborted command does not complete, its
    /// queue pair requests a reset.
    pub(super) fn handle_abort_completion(&mut self, queue: u16, overdue: TimedOutCommand) {
        match queue {
            0 => self.admin.link.note_abort_completed(overdue),
            id => {
                if let Some(queue) = self.queues.iter().find(|queue| queue.id == id) {
                    queue.link.note_abort_completed(overdue);
                }
            }
        }
    }

    /// Resets the controller if a queue pair has requested it. Returns whether it did.
    pub(super) fn process_reset_requests(&mut self, now: Instant) -> bool {
        let admin = self.admin.link.take_reset_request().map(|reason| (0, reason));
        let wanted = admin.or_else(|| {
            let mut wanted = self.queues.iter().filter_map(|queue| {
                queue.link.take_reset_request().map(|reason| (queue.id, reason))
            });
            wanted.next()
        });
        if let Some((id, reason)) = wanted {
            self.reset_with_cause(now, ResetCause::Queue { id, reason });
        }
        wanted.is_some()
    }

    /// Starts a reset, unless the reset limit is exceeded.
    pub(super) fn reset_with_cause(&mut self, now: Instant, cause: ResetCause) {
        self.freeze();
        if let Phase::Stopping { notification, .. } = self.phase {
            // The shutdown in progress disables the controller, which replaces the reset.
            return self.begin_shutdown(now, notification);
        }
        if !self.has_been_ready {
            return self.fail_permanently(now, ControllerError::StartupFailed { cause });
        }
        if !self.options.owner_counts_losses && self.is_controller_failure(&cause) {
            self.record_lost_writes();
        }
        self.push_event(Event::ResetStarted { cause });
        let (max, within) = (self.options.resets_max, self.options.resets_within);
        self.resets.times.retain(|time| now.since(*time) < within);
        if self.resets.times.len() >= max as usize {
            return self.fail_permanently(
                now,
                ControllerError::TooManyResets { resets: max, within, cause },
            );
        }
        self.resets.times.push_back(now);
        self.begin_bring_up(now);
    }

    /// Whether the controller has failed by itself, so that its volatile cache may be lost. A reset by
    /// the host preserves the cache. A timed-out command may be the first sign of a failure that CSTS
    /// shows; after a failed initialization, RDY has no meaning. An NVM subsystem reset (NSSRO) shows as
    /// RDY = 0.
    fn is_controller_failure(&mut self, cause: &ResetCause) -> bool {
        match cause {
            ResetCause::Fatal { .. } | ResetCause::NotReady { .. } => true,
            ResetCause::Bringup(error) => matches!(error, BringupError::Fatal { .. }),
            _ => {
                let csts = self.mmio.read32(Register::Csts.offset());
                let status = ControllerStatus(csts);
                csts == register::ALL_ONES || status.cfs() || !status.rdy()
            }
        }
    }

    /// Makes every queue pair that may have completed writes fail a flush, if there is a volatile cache.
    pub(super) fn record_lost_writes(&mut self) {
        self.has_lost_writes = true;
        self.queues.iter().for_each(|queue| queue.link.record_lost_writes());
    }

    /// Stops all access to rings and doorbells, and closes the connections of queues. The queues remain
    /// frozen until the controller is reset or has ended.
    pub fn freeze(&mut self) {
        self.asked = None;
        self.admin.link.freeze();
        self.queues.iter().for_each(|queue| queue.link.freeze());
    }

    /// Handles the disabled state of the controller: it may access its memory again.
    pub(super) fn handle_disabled(&mut self, now: Instant) {
        // DMA may have been revoked by this driver or by a previous one.
        self.dma.restore_access();
        self.complete_parked_commands(now);
    }

    /// Completes parked commands: the controller can no longer access memory.
    pub(super) fn complete_parked_commands(&mut self, now: Instant) {
        self.admin.link.set_state(QueueState::Released);
        self.release_queues();
        self.fail_admin_commands(now);
    }

    /// Completes all outstanding admin commands: those of the owner with an event, those of the driver
    /// silently.
    pub(super) fn fail_admin_commands(&mut self, now: Instant) {
        loop {
            let completions = self.admin.take_completions(now);
            if completions.is_empty() {
                return;
            }
            for (purpose, answer) in completions {
                if let AdminCommandPurpose::Owner { token, list } = purpose {
                    self.notify_owner(token, list, answer);
                }
            }
        }
    }

    pub(super) fn notify_owner(&mut self, token: u64, list: Option<u8>, answer: IoCompletion) {
        self.admin.pointers.release_list(list);
        let IoCompletion { status: outcome, result, .. } = answer;
        self.push_event(Event::AdminCompleted(IoCompletion { token, status: outcome, result }));
    }

    /// Fails the controller permanently: revokes its DMA and completes everything.
    pub(super) fn fail_permanently(&mut self, now: Instant, error: ControllerError) {
        self.revoke_dma(now, AfterRevocation::Die(error));
    }

    /// Handles the removal of the controller.
    pub(super) fn handle_removal(&mut self, now: Instant) {
        self.revoke_dma(now, AfterRevocation::Remove);
    }

    pub(super) fn end(&mut self, now: Instant, state: ControllerState, event: Event) {
        self.asked = None;
        self.end_queues();
        self.fail_admin_commands(now);
        self.phase = Phase::Ended(state);
        self.push_event(event);
    }
}
