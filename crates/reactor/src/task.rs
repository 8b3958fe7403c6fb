//! Async programs on a light thread.
//!
//! ```text
//!   Tasks (anywhere) ── spawn, sleep ──┐
//!   a waker (anywhere) ── a bit, a bell ┴─▶ Executor: a poller of the thread
//!   a waker (inside its executor) ─────────▶   the list of those that are ready
//! ```
//!
//! An [`Executor`] is a poller like any other: what its tasks wait for is found by other pollers or
//! by time, and while no task is ready its reactor sleeps. All that a task may cost is taken when it
//! is spawned: a place in a table, with a waker that is there from the start. Waking and polling it
//! allocates nothing, and takes no lock.
//!
//! The thread may be moved to another reactor, so futures are `Send`; they are polled by nobody but
//! the thread's reactor.

mod executor;
mod here;
mod join;
mod shared;
mod sleep;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use base::Span;

use crate::message::{Handle, Message};

pub use executor::Executor;
pub use join::{Ended, JoinHandle};
use shared::Shared;
pub use sleep::Sleep;

/// An executor, for those who give it something to do: from its own tasks, other light threads and
/// OS threads alike. Clones are the same executor.
#[derive(Clone)]
pub struct Tasks(Arc<Shared>);

/// A future that was not taken.
pub struct NotTaken<F> {
    /// Why.
    pub why: Lack,
    /// The future.
    pub future: F,
}

/// What an executor lacks to take a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lack {
    /// Room: it has this many tasks.
    Room {
        /// How many.
        tasks_max: u32,
    },
    /// Its thread: that has ended, or has no room for another poller.
    Thread,
}

impl Tasks {
    /// Starts an executor on a thread, or gives the message back by which it was to go there. If the
    /// thread has no numbers left for pollers, the executor is gone before it has begun.
    pub fn start(thread: &Handle, name: &str, tasks_max: u32) -> Result<Self, Message> {
        let (executor, tasks) = Executor::new(thread, name, tasks_max);
        // What cannot be added is dropped, which is what being gone means.
        thread.call(move |context| drop(context.add(executor.registration())))?;
        Ok(tasks)
    }

    /// Gives it a task, or the future back. The task is polled when the executor is next.
    ///
    /// Dropping the handle drops the task; [`JoinHandle::detach`] lets it go on by itself.
    pub fn spawn<F>(&self, future: F) -> Result<JoinHandle<F::Output>, NotTaken<F>>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        if let Err(why) = self.0.reserve() {
            return Err(NotTaken { why, future });
        }
        let (promise, handle) = join::pair();
        self.0.admit(Box::pin(join::run(future, promise)));
        Ok(handle)
    }

    /// A future that ends when `span` has passed since it was first polled. Dropped, it costs
    /// nothing any more.
    pub fn sleep(&self, span: Span) -> Sleep {
        Sleep::new(&self.0, span)
    }

    /// How many tasks it has.
    pub fn count(&self) -> u32 {
        self.0.count()
    }

    /// Whether the executor is no more. All tasks that it had were dropped.
    pub fn is_gone(&self) -> bool {
        self.0.is_gone()
    }
}

impl fmt::Debug for Tasks {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Tasks").field("count", &self.count()).finish_non_exhaustive()
    }
}

impl<F> fmt::Debug for NotTaken<F> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("NotTaken").field("why", &self.why).finish_non_exhaustive()
    }
}

impl<F> fmt::Display for NotTaken<F> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.why {
            Lack::Room { tasks_max } => {
                write!(out, "spawn a task: there are {tasks_max}, which is all there is room for")
            }
            Lack::Thread => out.write_str("spawn a task: the executor's thread is gone"),
        }
    }
}

impl<F> std::error::Error for NotTaken<F> {}
