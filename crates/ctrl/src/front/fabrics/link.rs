//! What an association and the connection of one of its I/O queues tell each other.
//!
//! The connection looks at one word per turn; everything else is behind a lock that is taken when
//! there is something in it.

use core::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use base::Instant;

use crate::controller::contract::AdminEnd;
use crate::controller::{Bell, Preempted};

/// Between an association and an I/O queue of it.
#[derive(Default)]
pub struct QueueLink {
    /// When the queue last took commands, in nanoseconds.
    heard_ns: AtomicU64,
    /// There are orders. Stored with release order after them.
    attention: AtomicBool,
    /// The connection is gone, or about to go.
    is_ending: AtomicBool,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    orders: Vec<Order>,
    bell: Option<Bell>,
}

/// What an association wants of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Stop, let go of everything, close the connection.
    Stop,
    /// Turn the queue once, even if it has nothing to do: another queue of the subsystem waits for that,
    /// or a preemption, for which [`Queue::check_preempted`](crate::queue::Queue::check_preempted) is
    /// called.
    Turn,
    /// Try to abort a command; answered with
    /// [`FabricsFrontEnd::aborted`](super::FabricsFrontEnd::aborted).
    Abort {
        /// The command, as the host calls it.
        cid: u16,
        /// Returned with the answer.
        admin_cid: u16,
    },
    /// End what is outstanding on a namespace.
    AbortNamespace {
        /// Which.
        nsid: u32,
        /// For [`Queue::abort_namespace`](crate::queue::Queue::abort_namespace).
        preempted: Preempted,
    },
    /// The answer to a letter that had to wait: for
    /// [`Queue::decide`](crate::queue::Queue::decide), without bytes.
    Decide {
        /// As it came in the letter.
        ticket: u32,
        /// How the command ends.
        end: AdminEnd,
    },
}

impl QueueLink {
    /// Has `bell` called when there is an order, so that a connection that sleeps can be woken.
    pub fn set_bell(&self, bell: Bell) {
        let mut inner = self.lock();
        if !inner.orders.is_empty() {
            bell();
        }
        inner.bell = Some(bell);
    }

    /// The queue has taken commands.
    #[inline]
    pub fn heard(&self, now: Instant) {
        // A number by itself: it orders nothing.
        self.heard_ns.store(now.ns, Ordering::Relaxed);
    }

    /// The queue takes no more commands, and will be gone when those that it has taken have ended.
    pub fn set_ending(&self) {
        // Pairs with the load below: who sees it finds what the media still write closed.
        self.is_ending.store(true, Ordering::Release);
    }

    pub(super) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }

    /// Whether there are orders.
    #[inline]
    pub fn has_orders(&self) -> bool {
        self.attention.load(Ordering::Acquire)
    }

    /// The orders, oldest first.
    pub fn take_orders(&self) -> Vec<Order> {
        let mut inner = self.lock();
        self.attention.store(false, Ordering::Relaxed);
        core::mem::take(&mut inner.orders)
    }

    pub(super) fn heard_at(&self) -> Instant {
        Instant { ns: self.heard_ns.load(Ordering::Relaxed) }
    }

    pub(super) fn order(&self, order: Order) {
        let mut inner = self.lock();
        if !inner.orders.contains(&order) {
            inner.orders.push(order);
        }
        self.attention.store(true, Ordering::Release);
        let bell = inner.bell.clone();
        drop(inner);
        if let Some(bell) = bell {
            bell();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for QueueLink {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("QueueLink").field("orders", &self.lock().orders).finish_non_exhaustive()
    }
}
