//! Lock that costs its usual thread two stores and two loads, and no atomic exchange.
//!
//! ```text
//!   owner                              thread that takes over
//!   -----                              ----------------------
//!   store its flag: inside             hold the mutex of take-overs
//!   barrier, light half                owner = none
//!   load the owner; if not itself,     barrier, heavy half (membarrier)
//!     withdraw and take over           wait while the flag of the former owner says inside
//!   access the value                   store its own flag: inside; owner = itself
//!   store its flag: outside            access the value
//! ```
//!
//! Either the load sees that there is another owner, or the thread that takes over sees the flag.
//! Each thread has one flag and is the only one that writes it, so that a thread that withdraws late
//! does not clear the flag of another. A thread that finds the value free of others for a long time
//! pays nothing for that; two threads that alternate pay a `membarrier(2)` each time.

use std::fmt;

use super::sync::{
    AsymmetricBarrier, AtomicBool, AtomicPtr, Mutex, Ordering, PoisonError, UnsafeCell, yield_cpu,
};

/// Value that one thread at a time accesses, and usually the same one.
pub(crate) struct BiasedLock<T> {
    /// Flag of the thread that need not take over; null before the first access.
    owner: AtomicPtr<ThreadFlag>,
    /// Held while taking over.
    taking: Mutex<()>,
    barrier: AsymmetricBarrier,
    value: UnsafeCell<T>,
}

/// Whether a thread accesses the value of a lock. Written by that thread only. On a pair of cache
/// lines of its own.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct ThreadFlag {
    is_inside: AtomicBool,
}

/// Access of a thread. Clears its flag, also after a panic.
struct Access(&'static ThreadFlag);

// SAFETY: `access` passes the value to one thread at a time, so that `T: Send` suffices.
unsafe impl<T: Send> Sync for BiasedLock<T> {}

impl<T> BiasedLock<T> {
    pub(crate) fn new(value: T, barrier: AsymmetricBarrier) -> Self {
        Self {
            owner: AtomicPtr::new(std::ptr::null_mut()),
            taking: Mutex::new(()),
            barrier,
            value: UnsafeCell::new(value),
        }
    }

    /// Passes the value to `body`, which accesses no other lock of this kind. `flag` is that of the
    /// calling thread. Waits while another thread accesses the value.
    #[inline]
    pub(crate) fn access<R>(&self, flag: &'static ThreadFlag, body: impl FnOnce(&mut T) -> R) -> R {
        let mut access = Access::begin(flag);
        self.barrier.notifier_barrier();
        // Pairs with the store in `take_over`.
        if !std::ptr::eq(self.owner.load(Ordering::Acquire), flag) {
            drop(access);
            access = self.take_over(flag);
        }
        let found = self.value.with_mut(|value| {
            // SAFETY: only the owner gets here, with its flag set. A thread becomes the owner after
            // it has removed the former one, and has seen its flag clear after a barrier that both
            // have passed (see the head of the file). A thread does not get here twice, because
            // `body` accesses no other lock.
            body(unsafe { &mut *value })
        });
        drop(access);
        found
    }

    #[cold]
    #[inline(never)]
    fn take_over(&self, flag: &'static ThreadFlag) -> Access {
        let _held = self.taking.lock().unwrap_or_else(PoisonError::into_inner);
        let former = self.owner.swap(std::ptr::null_mut(), Ordering::Relaxed);
        // Refused only for lack of memory.
        while !self.barrier.sleeper_barrier() {
            yield_cpu();
        }
        // SAFETY: a pointer other than null is one to a flag that is never freed.
        if let Some(former) = unsafe { former.as_ref() } {
            // Pairs with the store at the end of an access.
            while former.is_inside.load(Ordering::Acquire) {
                yield_cpu();
            }
        }
        // The next thread that takes over sees the flag, because it holds the mutex later.
        let access = Access::begin(flag);
        self.owner.store(std::ptr::from_ref(flag).cast_mut(), Ordering::Release);
        access
    }
}

impl ThreadFlag {
    /// A flag that is never freed.
    pub(crate) fn leaked() -> &'static Self {
        Box::leak(Box::new(Self { is_inside: AtomicBool::new(false) }))
    }
}

impl Access {
    #[inline]
    fn begin(flag: &'static ThreadFlag) -> Self {
        flag.is_inside.store(true, Ordering::Relaxed);
        Self(flag)
    }
}

impl Drop for Access {
    #[inline]
    fn drop(&mut self) {
        // Pairs with the load of a thread that takes over.
        self.0.is_inside.store(false, Ordering::Release);
    }
}

impl<T> fmt::Debug for BiasedLock<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("BiasedLock").finish_non_exhaustive()
    }
}
