//! Executor currently polled by this OS thread: wake-ups from its own tasks need no atomic
//! read-modify-write.

use std::cell::RefCell;

thread_local! {
    static CURRENT: RefCell<CurrentExecutor> = const { RefCell::new(CurrentExecutor::none()) };
}

/// Executor being polled.
pub(super) struct CurrentExecutor {
    /// Address of its shared state; 0 means none.
    executor: usize,
    woken: Vec<u32>,
}

/// Guard that ends the polling of an executor.
pub(super) struct EnterGuard {
    before: CurrentExecutor,
}

impl CurrentExecutor {
    const fn none() -> Self {
        Self { executor: 0, woken: Vec::new() }
    }
}

/// Marks `executor` as polled by this OS thread. Tasks it wakes are appended to `woken`.
pub(super) fn set_current_executor(executor: usize, woken: Vec<u32>) -> EnterGuard {
    EnterGuard { before: CURRENT.replace(CurrentExecutor { executor, woken }) }
}

impl EnterGuard {
    /// Ends the polling and returns the tasks woken.
    pub(super) fn end_and_take_woken(mut self) -> Vec<u32> {
        let before = std::mem::replace(&mut self.before, CurrentExecutor::none());
        CURRENT.replace(before).woken
    }
}

/// Marks task `index` as ready, if this OS thread is polling its executor.
pub(super) fn wake_local_task(executor: usize, index: impl FnOnce() -> Option<u32>) -> bool {
    // During thread exit the thread-local may be gone; nothing is polled then.
    let woken = CURRENT.try_with(|here| {
        let mut here = here.borrow_mut();
        let is_here = here.executor == executor;
        if is_here {
            here.woken.extend(index());
        }
        is_here
    });
    woken.unwrap_or(false)
}
