//! What the guest and its lanes tell each other, each on a thread of its own.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use host::Line;
use reactor::Handle;

/// Between a lane and the guest.
#[derive(Debug)]
pub(super) struct Post {
    has_orders: AtomicBool,
    orders: Mutex<Orders>,
    ended: Mutex<Option<Ended>>,
    bell: Arc<Bell>,
}

/// What a lane is told.
#[derive(Debug, Default)]
pub(super) struct Orders {
    /// It is to end once all that it has taken is answered.
    pub(super) ends: bool,
    /// Whom it calls from now on, if that has changed.
    pub(super) call: Option<Option<Line>>,
    /// Blocks that the disk has from now on, if that has changed.
    pub(super) block_count: Option<u64>,
}

/// A lane that touches nothing any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ended {
    /// The available entry that it would have taken next.
    pub(super) next: u16,
    /// Why, if it was not told to.
    pub(super) why: Option<String>,
}

/// By which lanes, and whoever serves the disk, wake the guest.
#[derive(Debug, Default)]
pub(super) struct Bell {
    has_rung: AtomicBool,
    has_resized: AtomicBool,
    thread: OnceLock<Handle>,
}

impl Post {
    pub(super) fn new(bell: &Arc<Bell>) -> Self {
        Self {
            has_orders: AtomicBool::new(false),
            orders: Mutex::default(),
            ended: Mutex::default(),
            bell: Arc::clone(bell),
        }
    }

    /// Tells a lane. Whoever does rings its thread behind it.
    pub(super) fn order(&self, change: impl FnOnce(&mut Orders)) {
        change(&mut lock(&self.orders));
        // Pairs with the acquire in `orders`.
        self.has_orders.store(true, Ordering::Release);
    }

    /// What the lane is told, if it is something.
    #[inline]
    pub(super) fn orders(&self) -> Option<Orders> {
        if !self.has_orders.load(Ordering::Acquire) {
            return None;
        }
        self.has_orders.store(false, Ordering::Relaxed);
        Some(std::mem::take(&mut lock(&self.orders)))
    }

    /// The lane has ended.
    pub(super) fn end(&self, ended: Ended) {
        *lock(&self.ended) = Some(ended);
        self.bell.ring();
    }

    /// How the lane has ended, if it has.
    pub(super) fn ended(&self) -> Option<Ended> {
        lock(&self.ended).clone()
    }
}

impl Bell {
    /// The guest lives on this thread.
    pub(super) fn belongs_to(&self, thread: Handle) {
        // It is told once, when it is spawned.
        let _ = self.thread.set(thread);
    }

    /// The medium has become longer.
    pub(super) fn resized(&self) {
        // Pairs with the acquire in `take_resized`; it is rung behind it.
        self.has_resized.store(true, Ordering::Release);
        self.ring();
    }

    /// Whether it has, since this was asked last.
    pub(super) fn take_resized(&self) -> bool {
        self.has_resized.swap(false, Ordering::AcqRel)
    }

    fn ring(&self) {
        // Pairs with the acquire in `take`.
        self.has_rung.store(true, Ordering::Release);
        if let Some(thread) = self.thread.get() {
            thread.ring();
        }
    }

    /// Whether it was rung since this was asked last.
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
