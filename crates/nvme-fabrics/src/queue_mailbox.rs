//! Control block of an I/O queue, between the controller thread and the queue thread: a mailbox for
//! commands, and reports under the same lock.
//!
//! ```text
//!   controller thread  close: send the command ── fence ── busy? no: nothing is in flight
//!                                                          yes: wait until it has closed
//!   queue thread       idle, and a request comes: busy ── fence ── command pending? handle it first
//! ```
//!
//! Each side stores before it loads, so at least one of the two sees the other. A queue with nothing in
//! flight is not waited for, because its thread may not run for hours.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use tenmil_base::{Mailbox, SharedWaker};

use crate::caches::Association;
use crate::queue_connection::QueueConnection;
use crate::stall_detector::StallDetector;
use crate::zero_copy_drain::ZeroCopyDrain;

/// Control block of one queue.
pub(crate) struct QueueMailbox {
    /// Whether the queue thread has anything in flight.
    busy: AtomicU32,
    mailbox: Mailbox<QueueChannel>,
    events: Arc<EventMailbox>,
}

/// State exchanged by both threads.
#[derive(Default)]
struct QueueChannel {
    command: Option<QueueCommand>,
    /// The connection was closed or lost.
    closed: Option<ClosedQueue>,
    /// [`ClosedQueue::may_execute_late`] of any report that the controller thread has not taken. A later close
    /// command does not reset it.
    may_execute_late: bool,
    /// A closed connection whose memory the kernel still reads, left by a dropped queue; with the report
    /// to deliver once it is released.
    undrained: Option<(ZeroCopyDrain, ClosedQueue)>,
}

/// A command to a queue.
pub(crate) enum QueueCommand {
    /// Use this connection.
    Attach(Box<AttachedQueue>),
    /// Close the connection.
    Close,
}

/// A connection of the queue.
pub(crate) struct AttachedQueue {
    pub(crate) connection: QueueConnection,
    /// Detects a stalled connection.
    pub(crate) stall_detector: StallDetector,
    /// The association of the connection.
    pub(crate) association: Arc<Association>,
}

/// Report on a closed connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClosedQueue {
    /// The cause, unless it was closed by command.
    pub(crate) lost: Option<String>,
    /// A command was outstanding that would do harm if it were executed late.
    pub(crate) may_execute_late: bool,
}

/// Announces reports of the queues to the controller thread.
pub(crate) type EventMailbox = Mailbox<()>;

impl QueueChannel {
    /// Adds to `closed` what earlier reports stated that were not taken.
    fn with_earlier_reports(&mut self, closed: ClosedQueue) -> ClosedQueue {
        let may_execute_late = core::mem::take(&mut self.may_execute_late);
        ClosedQueue { may_execute_late, ..closed }
    }
}

impl QueueMailbox {
    pub(crate) fn new(events: &Arc<EventMailbox>) -> Arc<Self> {
        let (busy, mailbox) = (AtomicU32::new(0), Mailbox::default());
        Arc::new(Self { busy, mailbox, events: Arc::clone(events) })
    }

    /// Controller thread: sets a command, and wakes the queue thread.
    pub(crate) fn set_command(&self, command: QueueCommand) {
        self.mailbox.send(|channel| {
            channel.closed = None;
            if matches!(command, QueueCommand::Attach(_)) {
                channel.may_execute_late = false;
            }
            // A command that was not taken is dropped, with a connection that was not used.
            channel.command = Some(command);
        });
        // Pairs with the fence in `set_busy`.
        fence(Ordering::SeqCst);
    }

    /// Controller thread: the report of the close, once the queue has closed, or is idle.
    pub(crate) fn take_closed(&self) -> Option<ClosedQueue> {
        let mut mailbox = self.mailbox.lock_contents();
        let is_idle = self.busy.load(Ordering::Acquire) == 0;
        let closed = mailbox.closed.take().or_else(|| is_idle.then(ClosedQueue::default))?;
        Some(mailbox.with_earlier_reports(closed))
    }

    /// Controller thread: the report of a loss, if any.
    pub(crate) fn take_loss(&self) -> Option<ClosedQueue> {
        let mut mailbox = self.mailbox.lock_contents();
        let closed = mailbox.closed.take_if(|closed| closed.lost.is_some())?;
        Some(mailbox.with_earlier_reports(closed))
    }

    /// Controller thread: takes the connection that a dropped queue has left, which is to be
    /// [reported](Self::report) as closed once it is drained.
    pub(crate) fn take_undrained(&self) -> Option<(ZeroCopyDrain, ClosedQueue)> {
        self.mailbox.lock_contents().undrained.take()
    }

    /// Queue thread: whether there is a command.
    #[inline]
    pub(crate) fn has_command(&self) -> bool {
        self.mailbox.is_pending()
    }

    /// Queue thread: takes the command.
    pub(crate) fn take_command(&self) -> Option<QueueCommand> {
        self.mailbox.receive(|channel| channel.command.take()).flatten()
    }

    /// Queue thread: from now on something is in flight. [`has_command`](Self::has_command)
    /// has to be called after this.
    #[inline]
    pub(crate) fn set_busy(&self) {
        self.busy.store(1, Ordering::Relaxed);
        // Pairs with the fence in `set_command`.
        fence(Ordering::SeqCst);
    }

    /// Queue thread: nothing is in flight.
    #[inline]
    pub(crate) fn set_idle(&self) {
        // Pairs with the acquire in `take_closed`: memory is not accessed after this.
        self.busy.store(0, Ordering::Release);
    }

    /// Queue thread: reports that the connection is closed.
    pub(crate) fn report(&self, closed: ClosedQueue) {
        let mut mailbox = self.mailbox.lock_contents();
        mailbox.may_execute_late |= closed.may_execute_late;
        mailbox.closed = Some(closed);
        drop(mailbox);
        self.set_idle();
        self.events.send(|()| {});
    }

    /// Queue thread: on drop, leaves a connection that is not drained to the controller thread.
    pub(crate) fn close(&self, undrained: (ZeroCopyDrain, ClosedQueue)) {
        self.set_busy();
        self.mailbox.lock_contents().undrained = Some(undrained);
        self.events.send(|()| {});
    }

    /// Queue thread: sets its waker for commands.
    pub(crate) fn set_waker(&self, waker: SharedWaker) {
        self.mailbox.set_waker(waker);
    }
}

#[cfg(test)]
mod tests {
    use super::{ClosedQueue, QueueCommand, QueueMailbox};

    /// The queue thread and the controller thread notice the same loss, in either order.
    #[test]
    fn undrained_connections_are_reported_once_whatever_commands_follow() {
        let lost = ClosedQueue { lost: Some("it was cut".into()), may_execute_late: true };
        for commands_first in [false, true] {
            let mailbox = QueueMailbox::new(&std::sync::Arc::default());
            mailbox.set_busy();
            if commands_first {
                mailbox.set_command(QueueCommand::Close);
            }
            mailbox.report(lost.clone());
            if commands_first {
                mailbox.report(ClosedQueue::default());
            } else {
                mailbox.set_command(QueueCommand::Close);
            }
            assert_eq!(
                mailbox.take_closed(),
                Some(ClosedQueue { lost: None, may_execute_late: true })
            );
            assert_eq!(mailbox.take_closed(), Some(ClosedQueue::default()), "{commands_first}");
        }
    }
}
