//! What happens to what does not answer.
//!
//! ```text
//!   command overdue --> Abort --> its time once more --> reset --> … --> reset --> Dead
//!                         '-- not answered itself --------^  bounded in number
//! ```
//!
//! During a reset everything in flight is parked: it is answered when the controller is disabled,
//! or, if it cannot be, when it has been cut off from memory.

use std::collections::VecDeque;

use base::{Answer, Dma, Instant, Mmio};
use wire::admin::Abort;
use wire::register::{self, ControllerStatus};

use super::admin::{ABORTS_MAX, Purpose};
use super::cut_off::Then;
use super::{Controller, Phase, State};
use crate::bringup::{BringupError, Register};
use crate::error::{ControllerError, ResetCause};
use crate::event::Event;
use crate::link::{Order, Overdue};

/// When the controller was reset lately.
#[derive(Debug, Default)]
pub(super) struct ResetHistory {
    times: VecDeque<Instant>,
}

impl<M: Mmio, D: Dma> Controller<M, D> {
    /// Aborts what is overdue, as many at once as the controller takes.
    pub(super) fn abort_overdue(&mut self, now: Instant) {
        if self.is_standing_still() {
            return;
        }
        while let Some(overdue) = self.admin.link.next_overdue() {
            match self.admin.purpose_of(overdue.cid) {
                Some(Purpose::Abort { queue, overdue }) => {
                    let cause = ResetCause::AbortUnanswered { queue, cid: overdue.cid };
                    return self.reset_because(now, cause);
                }
                _ if self.can_abort() => self.abort(now, 0, overdue),
                _ => self.admin.link.abort_ended(overdue),
            }
        }
        for index in 0..self.queues.len() {
            while self.can_abort()
                && let Some(overdue) = self.queues[index].link.next_overdue()
            {
                self.abort(now, self.queues[index].id, overdue);
            }
        }
    }

    /// The Abort Command Limit is a zeroes-based number of Aborts (Base 2.1 §5.1.13, ACL).
    pub(super) fn can_abort(&self) -> bool {
        let limit = self.identity.as_ref().map_or(1, |identity| identity.limits.aborts);
        self.admin.aborts() < usize::from(limit).min(ABORTS_MAX)
    }

    fn abort(&mut self, now: Instant, queue: u16, overdue: Overdue) {
        let command = Abort { sqid: queue, abort_cid: overdue.cid };
        self.admin.ask(now, Purpose::Abort { queue, overdue }, &command);
        self.tell(Event::CommandOverdue { queue, cid: overdue.cid });
    }

    /// An Abort has ended. Whether it helped shows in the command itself: if that does not end
    /// either, its queue pair asks for a reset.
    pub(super) fn handle_aborted(&mut self, queue: u16, overdue: Overdue) {
        match queue {
            0 => self.admin.link.abort_ended(overdue),
            id => {
                if let Some(queue) = self.queues.iter().find(|queue| queue.id == id) {
                    queue.link.abort_ended(overdue);
                }
            }
        }
    }

    /// Resets the controller if a queue pair cannot go on without. True if so.
    pub(super) fn heed_wanted_resets(&mut self, now: Instant) -> bool {
        let admin = self.admin.link.take_wanted_reset().map(|reason| (0, reason));
        let wanted = admin.or_else(|| {
            let mut wanted = self.queues.iter().filter_map(|queue| {
                queue.link.take_wanted_reset().map(|reason| (queue.id, reason))
            });
            wanted.next()
        });
        if let Some((id, reason)) = wanted {
            self.reset_because(now, ResetCause::Queue { id, reason });
        }
        wanted.is_some()
    }

    /// Begins a reset, unless there were too many.
    pub(super) fn reset_because(&mut self, now: Instant, cause: ResetCause) {
        self.freeze();
        if let Phase::Stopping { notification, .. } = self.phase {
            // It is going to be switched off: that is reset enough.
            return self.begin_shutdown(now, notification);
        }
        if !self.has_been_ready {
            return self.die(now, ControllerError::NeverStarted { cause });
        }
        if !self.options.owner_counts_losses && self.has_failed(&cause) {
            self.lose_writes();
        }
        self.tell(Event::ResetStarted { cause });
        let (max, within) = (self.options.resets_max, self.options.resets_within);
        self.resets.times.retain(|time| now.since(*time) < within);
        if self.resets.times.len() >= max as usize {
            return self.die(now, ControllerError::Hopeless { resets: max, within, cause });
        }
        self.resets.times.push_back(now);
        self.begin_bring_up(now);
    }

    /// Whether the controller has stopped by itself, so that its volatile cache may be lost. A reset by
    /// its host keeps the cache. A command that is overdue may be the first sign of a failure that CSTS
    /// shows; after a bring-up that has failed, RDY says nothing. A reset of the whole subsystem
    /// (NSSRO) shows as RDY = 0.
    fn has_failed(&mut self, cause: &ResetCause) -> bool {
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

    /// Every queue pair that may have completed writes fails a flush, if there is a volatile cache.
    pub(super) fn lose_writes(&mut self) {
        self.has_lost_writes = true;
        self.queues.iter().for_each(|queue| queue.link.lose_writes());
    }

    /// From now on nobody touches rings or doorbells.
    pub(super) fn freeze(&mut self) {
        self.asked = None;
        let queues = self.queues.iter().map(|queue| &queue.link);
        for link in core::iter::once(&self.admin.link).chain(queues) {
            // Who has been released touches nothing, and may not have heard of it yet.
            if matches!(link.order(), Order::Run | Order::Quiesce) {
                link.give(Order::Freeze);
            }
        }
    }

    /// The controller is disabled and will find its memory again.
    pub(super) fn handle_disabled(&mut self, now: Instant) {
        // It may have been cut off by us, or by a driver that had it before us.
        self.dma.reconnect();
        self.let_go(now);
    }

    /// The controller can touch no memory any more: what was parked is answered.
    pub(super) fn let_go(&mut self, now: Instant) {
        self.admin.link.give(Order::Release);
        self.release_queues();
        self.answer_admin(now);
    }

    /// Answers every admin command that is still outstanding, all in one go: the owner's with an
    /// event, ours with silence.
    pub(super) fn answer_admin(&mut self, now: Instant) {
        loop {
            let answers = self.admin.take(now);
            if answers.is_empty() {
                return;
            }
            for (purpose, answer) in answers {
                if let Purpose::Owner { token, list } = purpose {
                    self.tell_owner(token, list, answer);
                }
            }
        }
    }

    pub(super) fn tell_owner(&mut self, token: u64, list: Option<u8>, answer: Answer) {
        self.admin.lists.give_back(list);
        let Answer { outcome, result, .. } = answer;
        self.tell(Event::AdminCompleted(Answer { token, outcome, result }));
    }

    /// Gives the controller up. It is cut off from memory, and everything is answered.
    pub(super) fn die(&mut self, now: Instant, error: ControllerError) {
        self.cut_off(now, Then::Die(error));
    }

    /// The controller is no longer there.
    pub(super) fn remove(&mut self, now: Instant) {
        self.cut_off(now, Then::Remove);
    }

    pub(super) fn end(&mut self, now: Instant, state: State, event: Event) {
        self.asked = None;
        self.end_queues();
        self.answer_admin(now);
        self.phase = Phase::Ended(state);
        self.tell(event);
    }
}
