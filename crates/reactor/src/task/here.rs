//! Which executor this OS thread is polling, and whom of its tasks that wakes: the way of a wake-up
//! that needs no atomic read-modify-write.

use std::cell::RefCell;

thread_local! {
    static HERE: RefCell<Here> = const { RefCell::new(Here::nobody()) };
}

/// An executor that is being polled.
pub(super) struct Here {
    /// The address of what it shares; nobody has 0.
    executor: usize,
    woken: Vec<u32>,
}

/// Ends when the executor has been polled.
pub(super) struct Visit {
    before: Here,
}

impl Here {
    const fn nobody() -> Self {
        Self { executor: 0, woken: Vec::new() }
    }
}

/// Says that this OS thread polls `executor` from now on. Those it wakes are appended to `woken`.
pub(super) fn enter(executor: usize, woken: Vec<u32>) -> Visit {
    Visit { before: HERE.replace(Here { executor, woken }) }
}

impl Visit {
    /// Says that it does no more, and who was woken.
    pub(super) fn leave(mut self) -> Vec<u32> {
        let before = std::mem::replace(&mut self.before, Here::nobody());
        HERE.replace(before).woken
    }
}

/// Notes that task `index` is to be polled, if this OS thread is polling its executor.
pub(super) fn wake(executor: usize, index: impl FnOnce() -> Option<u32>) -> bool {
    // While a thread ends there may be no list any more, and nothing is polled either.
    let woken = HERE.try_with(|here| {
        let mut here = here.borrow_mut();
        let is_here = here.executor == executor;
        if is_here {
            here.woken.extend(index());
        }
        is_here
    });
    woken.unwrap_or(false)
}
