//! Blocking work on the thread pool of a runtime.
//!
//! The end of such a task may wake a task of the program, drop it, and with it the last handle of a
//! runtime. A runtime must therefore know whether the thread that drops it is one that it would have to
//! wait for.

use std::cell::Cell;

use tenmil_linux::event_loop::is_in_event_loop;
use tenmil_linux::thread_pool::BlockingTask;

thread_local! {
    /// Whether this thread runs a task of a pool.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

/// Resets the flag, also after a panic: the threads of a pool survive those.
struct InTaskGuard;

impl Drop for InTaskGuard {
    fn drop(&mut self) {
        IN_TASK.set(false);
    }
}

/// Task for the thread pool.
pub(crate) fn blocking_task(
    name: &'static str,
    work: impl FnOnce() + Send + 'static,
) -> BlockingTask {
    BlockingTask::new(name, move || {
        IN_TASK.set(true);
        let _in_task = InTaskGuard;
        work();
    })
}

/// Whether the current thread may wait for reactors and for the threads of a pool.
pub(crate) fn may_block() -> bool {
    !is_in_event_loop() && !IN_TASK.get()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use tenmil_linux::thread_pool::ThreadPool;

    use super::{blocking_task, may_block};

    #[test]
    fn pool_thread_must_not_block_during_a_task() {
        let pool = ThreadPool::new(1, 8);
        let (send, may) = channel();
        pool.submit(blocking_task("panics", || panic!("on purpose"))).unwrap();
        let found = send.clone();
        pool.submit(blocking_task("asks", move || found.send(may_block()).unwrap())).unwrap();
        let outside = tenmil_linux::thread_pool::BlockingTask::new("outside", move || {
            send.send(may_block()).unwrap();
        });
        pool.submit(outside).unwrap();
        assert_eq!([may.recv().unwrap(), may.recv().unwrap()], [false, true]);
        assert!(may_block());
    }
}
