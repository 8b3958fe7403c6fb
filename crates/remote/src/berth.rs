//! Where the controller's thread and a queue's thread meet: what is rare goes through a mailbox, and
//! one word, looked at once a turn, says that there is something in it.
//!
//! ```text
//!   front   close: order, word + 1 ── fence ── busy? no: nothing of it is under way
//!                                              yes: wait until it has closed
//!   queue   idle, and a command comes: busy ── fence ── word as it was? no: obey first
//! ```
//!
//! Each side stores before it looks, so at least one of the two sees the other. A queue with nothing
//! under way is not waited for: its thread may have no reason to turn for hours.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::Wake;

use crate::caches::Association;
use crate::exchange::Exchange;
use crate::farewell::Farewell;
use crate::rings::Rings;
use crate::silence::Silence;

/// The place of one queue.
pub(crate) struct Berth {
    /// Another number for each order.
    word: AtomicU32,
    /// Whether the queue's thread has anything under way.
    busy: AtomicU32,
    mailbox: Mutex<Mailbox>,
    news: Arc<News>,
}

/// What both say to each other.
#[derive(Default)]
struct Mailbox {
    order: Option<Order>,
    /// The connection was closed, or has been lost.
    closed: Option<Closed>,
    /// As [`Closed::may_linger`], of any report that the front has not taken. Not even an order to
    /// close makes it untrue.
    may_linger: bool,
    /// A connection whose memory is still read, and whose queue is gone; with what is to be reported
    /// when it is read no more.
    left: Option<(Farewell, Closed)>,
    /// What wakes the queue's thread.
    sleeper: Option<Arc<dyn Wake + Send + Sync>>,
}

/// What a queue is to do.
pub(crate) enum Order {
    /// Serve these rings over this connection.
    Serve(Box<Serving>),
    /// Close the connection.
    Close,
}

/// Rings and the connection that carries them.
pub(crate) struct Serving {
    pub(crate) rings: Rings,
    pub(crate) exchange: Exchange,
    /// Notices that it has stalled.
    pub(crate) silence: Silence,
    /// The controller at the other end.
    pub(crate) association: Arc<Association>,
}

/// A connection that is closed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Closed {
    /// Why, if nobody had ordered it.
    pub(crate) lost: Option<String>,
    /// Something was outstanding that would do harm if it were executed late.
    pub(crate) may_linger: bool,
}

/// That a queue has something to tell, for the thread of the controller.
#[derive(Default)]
pub(crate) struct News {
    is_there: AtomicBool,
    sleeper: Mutex<Option<Arc<dyn Wake + Send + Sync>>>,
}

impl News {
    pub(crate) fn is_there(&self) -> bool {
        self.is_there.load(Ordering::Acquire)
    }

    /// Whether there was any since it was last asked.
    pub(crate) fn take(&self) -> bool {
        self.is_there() && self.is_there.swap(false, Ordering::AcqRel)
    }

    /// Who is woken by it.
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

impl Mailbox {
    /// The front takes `closed`, and what earlier reports said that it has not taken.
    fn with_what_lingers(&mut self, closed: Closed) -> Closed {
        let may_linger = core::mem::take(&mut self.may_linger);
        Closed { may_linger, ..closed }
    }
}

impl Berth {
    pub(crate) fn new(news: &Arc<News>) -> Arc<Self> {
        Arc::new(Self {
            word: AtomicU32::new(0),
            busy: AtomicU32::new(0),
            mailbox: Mutex::default(),
            news: Arc::clone(news),
        })
    }

    fn mailbox(&self) -> MutexGuard<'_, Mailbox> {
        self.mailbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The front's: gives an order. Who sleeps is woken for it.
    pub(crate) fn order(&self, order: Order) {
        let mut mailbox = self.mailbox();
        mailbox.closed = None;
        if matches!(order, Order::Serve(_)) {
            mailbox.may_linger = false;
        }
        // What was not taken up goes, and with it a connection that nobody has used.
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

    /// The front's: how the connection was closed, once it is closed, or idle for good.
    pub(crate) fn closed(&self) -> Option<Closed> {
        let mut mailbox = self.mailbox();
        let is_idle = self.busy.load(Ordering::Acquire) == 0;
        let closed = mailbox.closed.take().or_else(|| is_idle.then(Closed::default))?;
        Some(mailbox.with_what_lingers(closed))
    }

    /// The front's: that the connection was lost, if it was.
    pub(crate) fn lost(&self) -> Option<Closed> {
        let mut mailbox = self.mailbox();
        let closed = mailbox.closed.take_if(|closed| closed.lost.is_some())?;
        Some(mailbox.with_what_lingers(closed))
    }

    /// The front's: what the queue has left behind, which is to be [reported](Self::report) as closed
    /// when it is over.
    pub(crate) fn take_left(&self) -> Option<(Farewell, Closed)> {
        self.mailbox().left.take()
    }

    /// The queue's: the number of the last order.
    #[inline]
    pub(crate) fn word(&self) -> u32 {
        self.word.load(Ordering::Acquire)
    }

    /// The queue's: takes the order, and the number it had.
    pub(crate) fn take(&self) -> (Option<Order>, u32) {
        let mut mailbox = self.mailbox();
        (mailbox.order.take(), self.word.load(Ordering::Relaxed))
    }

    /// The queue's: from now on something is under way. The word is to be looked at behind this.
    #[inline]
    pub(crate) fn begin(&self) {
        self.busy.store(1, Ordering::Relaxed);
        // Pairs with the fence in `order`.
        fence(Ordering::SeqCst);
    }

    /// The queue's: nothing is under way.
    #[inline]
    pub(crate) fn end(&self) {
        // Pairs with the acquire in `closed`: memory is not touched behind this.
        self.busy.store(0, Ordering::Release);
    }

    /// The queue's: the connection is closed.
    pub(crate) fn report(&self, closed: Closed) {
        let mut mailbox = self.mailbox();
        mailbox.may_linger |= closed.may_linger;
        mailbox.closed = Some(closed);
        drop(mailbox);
        self.end();
        self.news.tell();
    }

    /// The queue's, which goes: somebody else is to look when this is over.
    pub(crate) fn leave(&self, left: (Farewell, Closed)) {
        self.begin();
        self.mailbox().left = Some(left);
        self.news.tell();
    }

    /// The queue's: who is woken by an order.
    pub(crate) fn wakes(&self, sleeper: Arc<dyn Wake + Send + Sync>) {
        self.mailbox().sleeper = Some(sleeper);
    }
}

#[cfg(test)]
mod tests {
    use super::{Berth, Closed, Order};

    /// The queue's thread and the front's notice the same cut, in either order.
    #[test]
    fn what_may_linger_is_told_once_whatever_is_ordered_meanwhile() {
        let lost = Closed { lost: Some("it was cut".into()), may_linger: true };
        for obeys_late in [false, true] {
            let berth = Berth::new(&std::sync::Arc::default());
            berth.begin();
            if obeys_late {
                berth.order(Order::Close);
            }
            berth.report(lost.clone());
            if obeys_late {
                berth.report(Closed::default());
            } else {
                berth.order(Order::Close);
            }
            assert_eq!(berth.closed(), Some(Closed { lost: None, may_linger: true }));
            assert_eq!(berth.closed(), Some(Closed::default()), "{obeys_late}");
        }
    }
}
