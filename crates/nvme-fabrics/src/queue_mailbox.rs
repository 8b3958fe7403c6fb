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
use crate::silence::Silence;
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
    order: Option<QueueCommand>,
    /// The connection was closed or lost.
    closed: Option<ClosedQueue>,
    /// [`ClosedQueue::may_linger`] of any report that the controller thread has not taken. A later close
    /// command does not reset it.
    may_linger: bool,
    /// A closed connection whose memory the kernel still reads, left by a dropped queue; with the report
    /// to deliver once it is released.
    left: Option<(ZeroCopyDrain, ClosedQueue)>,
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
    pub(crate) exchange: QueueConnection,
    /// Detects a stalled connection.
    pub(crate) silence: Silence,
    /// The association of the connection.
    pub(crate) association: Arc<Association>,
}

/// Report on a closed connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClosedQueue {
    /// The cause, unless it was closed by command.
    pub(crate) lost: Option<String>,
    /// A command was outstanding that would do harm if it were executed late.
    pub(crate) may_linger: bool,
}

/// Announces reports of the queues to the controller thread.
pub(crate) type EventMailbox = Mailbox<()>;

impl QueueChannel {
    /// Adds to `closed` what earlier reports stated that were not taken.
    fn with_what_lingers(&mut self, closed: ClosedQueue) -> ClosedQueue {
        let may_linger = core::mem::take(&mut self.may_linger);
        ClosedQueue { may_linger, ..closed }
    }
}

impl QueueMailbox {
    pub(crate) fn new(events: &Arc<EventMailbox>) -> Arc<Self> {
        let (busy, mailbox) = (AtomicU32::new(0), Mailbox::default());
        Arc::new(Self { busy, mailbox, events: Arc::clone(events) })
    }

    /// Controller thread: sets a command, and wakes the queue thread.
    pub(crate) fn set_command(&self, order: QueueCommand) {
        self.mailbox.send(|channel| {
            channel.closed = None;
            if matches!(order, QueueCommand::Attach(_)) {
                channel.may_linger = false;
            }
            // A command that was not taken is dropped, with a connection that was not used.
            channel.order = Some(order);
        });
        // Pairs with the fence in `begin`.
        fence(Ordering::SeqCst);
    }

    /// Controller thread: the report of the close, once the queue has closed, or is idle.
    pub(crate) fn closed(&self) -> Option<ClosedQueue> {
        let mut mailbox = self.mailbox.lock();
        let is_idle = self.busy.load(Ordering::Acquire) == 0;
        let closed = mailbox.closed.take().or_else(|| is_idle.then(ClosedQueue::default))?;
        Some(mailbox.with_what_lingers(closed))
    }

    /// Controller thread: the report of a loss, if any.
    pub(crate) fn lost(&self) -> Option<ClosedQueue> {
        let mut mailbox = self.mailbox.lock();
        let closed = mailbox.closed.take_if(|closed| closed.lost.is_some())?;
        Some(mailbox.with_what_lingers(closed))
    }

    /// Controller thread: takes the connection that a dropped queue has left, which is to be
    /// [reported](Self::report) as closed once it is drained.
    pub(crate) fn take_left(&self) -> Option<(ZeroCopyDrain, ClosedQueue)> {
        self.mailbox.lock().left.take()
    }

    /// Queue thread: whether there is a command.
    #[inline]
    pub(crate) fn has_command(&self) -> bool {
        self.mailbox.is_pending()
    }

    /// Queue thread: takes the command.
    pub(crate) fn take(&self) -> Option<QueueCommand> {
        self.mailbox.receive(|channel| channel.order.take()).flatten()
    }

    /// Queue thread: from now on something is in flight. [`has_command`](Self::has_command)
    /// has to be called after this.
    #[inline]
    pub(crate) fn begin(&self) {
        self.busy.store(1, Ordering::Relaxed);
        // Pairs with the fence in `set_command`.
        fence(Ordering::SeqCst);
    }

    /// Queue thread: nothing is in flight.
    #[inline]
    pub(crate) fn end(&self) {
        // Pairs with the acquire in `closed`: memory is not accessed after this.
        self.busy.store(0, Ordering::Release);
    }

    /// Queue thread: reports that the connection is closed.
    pub(crate) fn report(&self, closed: ClosedQueue) {
        let mut mailbox = self.mailbox.lock();
        mailbox.may_linger |= closed.may_linger;
        mailbox.closed = Some(closed);
        drop(mailbox);
        self.end();
        self.events.send(|()| {});
    }

    /// Queue thread: on drop, leaves a connection that is not drained to the controller thread.
    pub(crate) fn close(&self, left: (ZeroCopyDrain, ClosedQueue)) {
        self.begin();
        self.mailbox.lock().left = Some(left);
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
    fn what_may_linger_is_told_once_whatever_is_ordered_meanwhile() {
        let lost = ClosedQueue { lost: Some("it was cut".into()), may_linger: true };
        for obeys_late in [false, true] {
            let mailbox_slot = QueueMailbox::new(&std::sync::Arc::default());
            mailbox_slot.begin();
            if obeys_late {
                mailbox_slot.set_command(QueueCommand::Close);
            }
            mailbox_slot.report(lost.clone());
            if obeys_late {
                mailbox_slot.report(ClosedQueue::default());
            } else {
                mailbox_slot.set_command(QueueCommand::Close);
            }
            assert_eq!(mailbox_slot.closed(), Some(ClosedQueue { lost: None, may_linger: true }));
            assert_eq!(mailbox_slot.closed(), Some(ClosedQueue::default()), "{obeys_late}");
        }
    }
}
