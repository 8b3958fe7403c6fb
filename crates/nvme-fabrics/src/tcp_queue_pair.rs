//! Device side of an I/O queue, in the thread that submits to it.

use std::sync::Arc;

use tenmil_base::{Instant, SharedWaker};

use crate::caches::Association;
use crate::queue_connection::CompletedCommand;
use crate::queue_mailbox::{AttachedQueue, ClosedQueue, QueueCommand, QueueMailbox};
use crate::ring_bridge::Rings;
use crate::silence::Silence;
use crate::wait_handle::WaitHandle;
use crate::zero_copy_drain::ZeroCopyDrain;

/// Moves commands of one queue pair between its rings and its connection.
/// [`send_commands`](Self::send_commands) is called after the doorbell is written,
/// [`post_completions`](Self::post_completions) before completions are polled.
pub(crate) struct TcpQueuePair {
    mailbox_slot: Arc<QueueMailbox>,
    serving: Option<Box<AttachedQueue>>,
    /// The previous connection, whose memory the kernel still reads, and the report to deliver once it is
    /// drained.
    parting: Option<Box<(ZeroCopyDrain, ClosedQueue)>>,
    is_busy: bool,
    /// The thread's wait handle watches the connection.
    is_watched: bool,
    /// The last connection was lost by itself, and there is no new one yet.
    is_broken: bool,
    /// The association of the last connection, which its completions belong to.
    association: Option<Arc<Association>>,
}

impl TcpQueuePair {
    pub(crate) fn new(mailbox_slot: Arc<QueueMailbox>) -> Self {
        let (is_busy, is_watched, is_broken) = (false, false, false);
        let (serving, parting) = (None, None);
        let association = None;
        Self { mailbox_slot, serving, parting, is_busy, is_watched, is_broken, association }
    }

    /// Sends submitted commands.
    #[inline]
    pub(crate) fn send_commands(&mut self) {
        // The doorbell is loaded first: it is reset only after a command, which is then seen here.
        let doorbell = self.serving.as_ref().map(|serving| serving.rings.doorbell());
        if self.mailbox_slot.has_command() {
            return self.obey();
        }
        let (Some(serving), Some(doorbell)) = (&mut self.serving, doorbell) else { return };
        if serving.rings.has_commands(doorbell) {
            if !self.is_busy {
                self.mailbox_slot.begin();
                if self.mailbox_slot.has_command() {
                    return self.obey();
                }
                self.is_busy = true;
            }
            if !serving.silence.is_asking() {
                serving.rings.take(doorbell, &mut serving.exchange);
            }
        }
        let AttachedQueue { rings, exchange, silence, .. } = &mut **serving;
        exchange.send(&mut |answered| post_completion(rings, silence, answered));
        if exchange.lost().is_some() {
            self.lose();
        }
    }

    /// Receives data and posts completions.
    #[inline]
    pub(crate) fn post_completions(&mut self, now: Instant) {
        if self.mailbox_slot.has_command() {
            return self.obey();
        }
        let Some(serving) = &mut self.serving else { return self.end_drain(now) };
        let AttachedQueue { rings, exchange, silence, .. } = &mut **serving;
        exchange.receive(now, &mut |answered| post_completion(rings, silence, answered));
        if now >= silence.next() {
            silence.check(now, exchange);
        }
        if now >= exchange.deadline() {
            exchange.expire(now);
        }
        if exchange.lost().is_some() {
            return self.lose();
        }
        if self.is_busy && exchange.outstanding() == 0 {
            self.is_busy = false;
            self.mailbox_slot.end();
        }
    }

    /// Whether there is a connection.
    #[inline]
    pub(crate) fn is_connected(&self) -> bool {
        self.serving.is_some()
    }

    /// The association that the last completions belong to.
    #[inline]
    pub(crate) fn association(&self) -> Option<&Association> {
        self.association.as_deref()
    }

    /// Whether the last connection was lost by itself.
    pub(crate) fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// Latest time of the next poll.
    pub(crate) fn wake_at(&self) -> Instant {
        match (&self.serving, &self.parting) {
            (Some(serving), _) if self.is_busy => {
                serving.exchange.deadline().min(serving.silence.next())
            }
            (Some(serving), _) => serving.exchange.deadline(),
            (None, Some(parting)) => parting.0.wake_at(),
            (None, None) => Instant::NEVER,
        }
    }

    #[cold]
    fn obey(&mut self) {
        let order = self.mailbox_slot.take();
        if let Some(parting) = &mut self.parting {
            // The control block is busy with the closed connection, so the command can only be to close
            // it.
            parting.1.lost = None;
            return;
        }
        self.is_busy = false;
        let before = self.serving.take();
        match order {
            Some(QueueCommand::Attach(serving)) => {
                // The previous connection had nothing in flight, or it would have been closed first.
                drop(before);
                self.association = Some(Arc::clone(&serving.association));
                self.serving = Some(serving);
                (self.is_watched, self.is_broken) = (false, false);
                self.mailbox_slot.end();
            }
            Some(QueueCommand::Close) => {
                self.part(before, None);
            }
            None => self.mailbox_slot.end(),
        }
    }

    /// Handles the loss of the connection.
    #[cold]
    fn lose(&mut self) {
        let Some(serving) = self.serving.take() else { return };
        let lost = serving.exchange.lost().map(ToString::to_string);
        (self.is_busy, self.is_broken) = (false, true);
        self.part(Some(serving), lost);
    }

    /// Closes a connection, and reports that once its memory is released.
    fn part(&mut self, serving: Option<Box<AttachedQueue>>, lost: Option<String>) {
        // Whether a command was outstanding that would do harm if it were executed late.
        let may_linger = serving.as_ref().is_some_and(|it| it.exchange.may_execute_late(false));
        let closed = ClosedQueue { lost, may_linger };
        match serving.and_then(|serving| ZeroCopyDrain::begin(serving.exchange, may_linger)) {
            Some(farewell) => self.parting = Some(Box::new((farewell, closed))),
            None => self.mailbox_slot.report(closed),
        }
    }

    /// Reports a closed connection once its memory is released.
    #[inline]
    fn end_drain(&mut self, now: Instant) {
        let parting = self.parting.take_if(|parting| parting.0.is_drained(now));
        if let Some(parting) = parting {
            self.mailbox_slot.report(parting.1);
        }
    }

    /// Sets the waker for queue commands.
    pub(crate) fn wakes(&self, waker: SharedWaker) {
        self.mailbox_slot.set_waker(waker);
    }

    /// Arms the wake source of the connection. Returns true if there is work already, or it could come
    /// without a signal.
    pub(crate) fn arm(&mut self, sleep: &mut dyn WaitHandle) -> bool {
        if self.mailbox_slot.has_command() {
            return true;
        }
        let Some(serving) = &mut self.serving else { return false };
        if !self.is_watched {
            self.is_watched = sleep.watch(serving.exchange.wake_source());
        }
        !self.is_watched
            || serving.exchange.arm()
            || serving.rings.has_commands(serving.rings.doorbell())
    }

    pub(crate) fn disarm(&mut self) {
        if let Some(serving) = &mut self.serving {
            serving.exchange.disarm();
        }
    }
}

/// Posts a completion, unless it is of a probe.
#[inline]
fn post_completion(rings: &mut Rings, silence: &Silence, answered: CompletedCommand) {
    if !silence.is_ours(answered.tag) {
        rings.post_from_connection(answered);
    }
}

impl Drop for TcpQueuePair {
    fn drop(&mut self) {
        let serving = self.serving.take();
        self.part(serving, None);
        if let Some(parting) = self.parting.take() {
            self.mailbox_slot.close(*parting);
        }
    }
}
