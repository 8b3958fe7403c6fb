//! Communication between an endpoint and its virtqueues, which run on different threads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tenmil_linux::RemoteEventFd;
use tenmil_reactor::ThreadHandle;

/// Channel between a virtqueue and the endpoint.
#[derive(Debug)]
pub(super) struct QueueControl {
    has_orders: AtomicBool,
    orders: Mutex<QueueCommands>,
    ended: Mutex<Option<QueueEnd>>,
    bell: Arc<EndpointWaker>,
}

/// Commands to a virtqueue.
#[derive(Debug, Default)]
pub(super) struct QueueCommands {
    /// Stop once all requests taken have completed.
    pub(super) ends: bool,
    /// New call eventfd, if it has changed.
    pub(super) call: Option<Option<RemoteEventFd>>,
    /// New number of blocks, if it has changed.
    pub(super) block_count: Option<u64>,
}

/// Final state of a virtqueue that accesses nothing any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct QueueEnd {
    /// Next available index.
    pub(super) next: u16,
    /// Error, if the stop was not requested.
    pub(super) why: Option<String>,
}

/// Waker of the endpoint, used by virtqueues and the server.
#[derive(Debug, Default)]
pub(super) struct EndpointWaker {
    has_rung: AtomicBool,
    has_resized: AtomicBool,
    thread: OnceLock<ThreadHandle>,
}

impl QueueControl {
    pub(super) fn new(bell: &Arc<EndpointWaker>) -> Self {
        Self {
            has_orders: AtomicBool::new(false),
            orders: Mutex::default(),
            ended: Mutex::default(),
            bell: Arc::clone(bell),
        }
    }

    /// Changes the commands. The caller wakes the virtqueue afterwards.
    pub(super) fn send_command(&self, change: impl FnOnce(&mut QueueCommands)) {
        change(&mut lock(&self.orders));
        // Release; pairs with the acquire load in `orders`.
        self.has_orders.store(true, Ordering::Release);
    }

    /// Takes the pending commands, if any.
    #[inline]
    pub(super) fn orders(&self) -> Option<QueueCommands> {
        if !self.has_orders.load(Ordering::Acquire) {
            return None;
        }
        self.has_orders.store(false, Ordering::Relaxed);
        Some(std::mem::take(&mut lock(&self.orders)))
    }

    /// Records the end of the virtqueue.
    pub(super) fn end(&self, ended: QueueEnd) {
        *lock(&self.ended) = Some(ended);
        self.bell.ring();
    }

    /// Final state of the virtqueue, if it has ended.
    pub(super) fn ended(&self) -> Option<QueueEnd> {
        lock(&self.ended).clone()
    }
}

impl EndpointWaker {
    /// Sets the light thread to wake.
    pub(super) fn belongs_to(&self, thread: ThreadHandle) {
        // Called once, when the light thread is spawned.
        let _ = self.thread.set(thread);
    }

    /// Reports that the device was resized.
    pub(super) fn resized(&self) {
        // Release; pairs with the acquire in `take_resized`. The wake-up follows.
        self.has_resized.store(true, Ordering::Release);
        self.ring();
    }

    /// Consumes the resize flag.
    pub(super) fn take_resized(&self) -> bool {
        self.has_resized.swap(false, Ordering::AcqRel)
    }

    fn ring(&self) {
        // Release; pairs with the acquire load in `take`.
        self.has_rung.store(true, Ordering::Release);
        if let Some(thread) = self.thread.get() {
            thread.notify();
        }
    }

    /// Consumes a pending wake-up. Returns whether there was one.
    #[inline]
    pub(super) fn take(&self) -> bool {
        let has_rung = self.has_rung.load(Ordering::Acquire);
        if has_rung {
            self.has_rung.store(false, Ordering::Relaxed);
        }
        has_rung
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
