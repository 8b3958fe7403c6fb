//! Control block of an I/O queue, between the controller thread and the queue thread: rare messages go
//! through a mailbox, and one word, checked in every iteration, announces them.
//!
//! ```text
//!   controller thread  close: command, word + 1 ── fence ── busy? no: nothing is in flight
//!                                                           yes: wait until it has closed
//!   queue thread       idle, and a request comes: busy ── fence ── word unchanged? no: handle it first
//! ```
//!
//! Each side stores before it loads, so at least one of the two sees the other. A queue with nothing in
//! flight is not waited for, because its thread may not run for hours.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::Wake;

use crate::caches::Association;
use crate::queue_connection::QueueConnection;
use crate::ring_bridge::Rings;
use crate::silence::Silence;
use crate::zero_copy_drain::ZeroCopyDrain;

/// Control block of one queue.
pub(crate) struct QueueControl {
    /// Incremented with each command.
    word: AtomicU32,
    /// Whether the queue thread has anything in flight.
    busy: AtomicU32,
    mailbox: Mutex<QueueChannel>,
    news: Arc<EventFlag>,
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
    /// Waker of the queue thread.
    sleeper: Option<Arc<dyn Wake + Send + Sync>>,
}

/// A command to a queue.
pub(crate) enum QueueCommand {
    /// Serve these rings over this connection.
    Attach(Box<AttachedQueue>),
    /// Close the connection.
    Close,
}

/// Rings and their connection.
pub(crate) struct AttachedQueue {
    pub(crate) rings: Rings,
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

/// Event flag from the queues to the controller thread.
#[derive(Default)]
pub(crate) struct EventFlag {
    is_there: AtomicBool,
    sleeper: Mutex<Option<Arc<dyn Wake + Send + Sync>>>,
}

impl EventFlag {
    pub(crate) fn is_there(&self) -> bool {
        self.is_there.load(Ordering::Acquire)
    }

    /// Takes the flag.
    pub(crate) fn take(&self) -> bool {
        self.is_there() && self.is_there.swap(false, Ordering::AcqRel)
    }

    /// Sets the waker of the controller thread.
    pub(crate) fn wakes(&self, sleeper: Arc<dyn Wake + Send + Sync>) {
        *self.sleeper.lock().unwrap_or_else(PoisonError::into_inner) = Some(sleeper);
    }

    fn tell(&self) {
        self.is_there.store(true, Ordering::Release);
        let sleeper = self.sleeper.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sleeper) = &*sleeper {
            sleeper.wake();
        }
    }
}

impl QueueChannel {
    /// Adds to `closed` what earlier reports stated that were not taken.
    fn with_what_lingers(&mut self, closed: ClosedQueue) -> ClosedQueue {
        let may_linger = core::mem::take(&mut self.may_linger);
        ClosedQueue { may_linger, ..closed }
    }
}

impl QueueControl {
    pub(crate) fn new(news: &Arc<EventFlag>) -> Arc<Self> {
        Arc::new(Self {
            word: AtomicU32::new(0),
            busy: AtomicU32::new(0),
            mailbox: Mutex::default(),
            news: Arc::clone(news),
        })
    }

    fn mailbox(&self) -> MutexGuard<'_, QueueChannel> {
        self.mailbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Controller thread: sets a command, and wakes the queue thread.
    pub(crate) fn set_command(&self, order: QueueCommand) {
        let mut mailbox = self.mailbox();
        mailbox.closed = None;
        if matches!(order, QueueCommand::Attach(_)) {
            mailbox.may_linger = false;
        }
        // A command that was not taken is dropped, with a connection that was not used.
        mailbox.order = Some(order);
        // Pairs with the acquire in `word`.
        self.word.store(self.word.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
        if let Some(sleeper) = &mailbox.sleeper {
            sleeper.wake();
        }
        drop(mailbox);
        // Pairs with the fence in `begin`.
        fence(Ordering::SeqCst);
    }

    /// Controller thread: the report of the close, once the queue has closed, or is idle.
    pub(crate) fn closed(&self) -> Option<ClosedQueue> {
        let mut mailbox = self.mailbox();
        let is_idle = self.busy.load(Ordering::Acquire) == 0;
        let closed = mailbox.closed.take().or_else(|| is_idle.then(ClosedQueue::default))?;
        Some(mailbox.with_what_lingers(closed))
    }

    /// Controller thread: the report of a loss, if any.
    pub(crate) fn lost(&self) -> Option<ClosedQueue> {
        let mut mailbox = self.mailbox();
        let closed = mailbox.closed.take_if(|closed| closed.lost.is_some())?;
        Some(mailbox.with_what_lingers(closed))
    }

    /// Controller thread: takes the connection that a dropped queue has left, which is to be
    /// [reported](Self::report) as closed once it is drained.
    pub(crate) fn take_left(&self) -> Option<(ZeroCopyDrain, ClosedQueue)> {
        self.mailbox().left.take()
    }

    /// Queue thread: the number of the last command.
    #[inline]
    pub(crate) fn word(&self) -> u32 {
        self.word.load(Ordering::Acquire)
    }

    /// Queue thread: takes the command, and its number.
    pub(crate) fn take(&self) -> (Option<QueueCommand>, u32) {
        let mut mailbox = self.mailbox();
        (mailbox.order.take(), self.word.load(Ordering::Relaxed))
    }

    /// Queue thread: from now on something is in flight. The word has to be loaded after this.
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
        let mut mailbox = self.mailbox();
        mailbox.may_linger |= closed.may_linger;
        mailbox.closed = Some(closed);
        drop(mailbox);
        self.end();
        self.news.tell();
    }

    /// Queue thread: on drop, leaves a connection that is not drained to the controller thread.
    pub(crate) fn close(&self, left: (ZeroCopyDrain, ClosedQueue)) {
        self.begin();
        self.mailbox().left = Some(left);
        self.news.tell();
    }

    /// Queue thread: sets its waker for commands.
    pub(crate) fn wakes(&self, sleeper: Arc<dyn Wake + Send + Sync>) {
        self.mailbox().sleeper = Some(sleeper);
    }
}

#[cfg(test)]
mod tests {
    use super::{ClosedQueue, QueueCommand, QueueControl};

    /// The queue thread and the controller thread notice the same loss, in either order.
    #[test]
    fn what_may_linger_is_told_once_whatever_is_ordered_meanwhile() {
        let lost = ClosedQueue { lost: Some("it was cut".into()), may_linger: true };
        for obeys_late in [false, true] {
            let berth = QueueControl::new(&std::sync::Arc::default());
            berth.begin();
            if obeys_late {
                berth.set_command(QueueCommand::Close);
            }
            berth.report(lost.clone());
            if obeys_late {
                berth.report(ClosedQueue::default());
            } else {
                berth.set_command(QueueCommand::Close);
            }
            assert_eq!(berth.closed(), Some(ClosedQueue { lost: None, may_linger: true }));
            assert_eq!(berth.closed(), Some(ClosedQueue::default()), "{obeys_late}");
        }
    }
}
