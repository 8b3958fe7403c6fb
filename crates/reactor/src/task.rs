//! Async tasks on a light thread.
//!
//! ```text
//!   ExecutorHandle (anywhere) ── spawn, sleep ───────┐
//!   a waker (anywhere) ── sets a bit, then notifies ─┴─▶ Executor: a poller of the thread
//!   a waker (inside its executor) ─────────────────────▶   its list of ready tasks
//! ```
//!
//! An [`Executor`] is a poller: what its tasks wait for is completed by other pollers or by time,
//! and while no task is ready its reactor may sleep. Everything that a task needs is reserved when
//! it is spawned: a slot in a table, with a preallocated waker. Waking and polling allocate nothing
//! and take no lock.
//!
//! The thread may migrate to another reactor, so futures are `Send`; they are polled only by the
//! thread's reactor.

mod current_executor;
mod executor;
mod executor_shared;
mod join_handle;
mod sleep;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use tenmil_base::Span;

use crate::message::{Message, ThreadHandle};

pub use executor::Executor;
use executor_shared::ExecutorShared;
pub use join_handle::{JoinError, JoinHandle};
pub use sleep::Sleep;

/// Handle of an executor, for its own tasks, other light threads and OS threads. Clones refer to
/// the same executor.
#[derive(Clone)]
pub struct ExecutorHandle(Arc<ExecutorShared>);

/// A future was not accepted.
pub struct SpawnTaskError<F> {
    /// Reason.
    pub kind: SpawnTaskErrorKind,
    /// The rejected future.
    pub future: F,
}

/// Reason why an executor did not accept a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpawnTaskErrorKind {
    /// The task table is full.
    TableFull {
        /// Maximum number of tasks.
        tasks_max: u32,
    },
    /// The thread has ended, or cannot hold another poller.
    ThreadGone,
}

impl ExecutorHandle {
    /// Starts an executor on a thread, or returns the message that was not delivered. If the thread
    /// has no poller number left, the executor is gone at once.
    pub fn start_on_thread(
        thread: &ThreadHandle,
        name: &str,
        tasks_max: u32,
    ) -> Result<Self, Message> {
        let (executor, tasks) = Executor::new(thread, name, tasks_max);
        // A rejected executor is dropped, which closes it.
        thread.send_closure(move |context| {
            drop(context.add_poller(executor.into_poller_builder()))
        })?;
        Ok(tasks)
    }

    /// Spawns a task, or returns the future. The task is first polled when the executor is polled
    /// next.
    ///
    /// Dropping the handle drops the task; [`JoinHandle::detach`] lets it continue.
    pub fn spawn_task<F>(&self, future: F) -> Result<JoinHandle<F::Output>, SpawnTaskError<F>>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        if let Err(why) = self.0.reserve_slot() {
            return Err(SpawnTaskError { kind: why, future });
        }
        let (completer, handle) = join_handle::completer_and_handle();
        self.0.submit_task(Box::pin(join_handle::run_task(future, completer)));
        Ok(handle)
    }

    /// Future that completes when `span` has passed since its first poll. A dropped one costs
    /// nothing further.
    pub fn sleep(&self, span: Span) -> Sleep {
        Sleep::new(&self.0, span)
    }

    /// Number of tasks.
    pub fn task_count(&self) -> u32 {
        self.0.task_count()
    }

    /// Whether the executor is gone. All of its tasks were dropped.
    pub fn has_ended(&self) -> bool {
        self.0.has_ended()
    }
}

impl fmt::Debug for ExecutorHandle {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Tasks").field("count", &self.task_count()).finish_non_exhaustive()
    }
}

impl<F> fmt::Debug for SpawnTaskError<F> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("NotTaken").field("why", &self.kind).finish_non_exhaustive()
    }
}

impl<F> fmt::Display for SpawnTaskError<F> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            SpawnTaskErrorKind::TableFull { tasks_max } => {
                write!(out, "spawn a task: there are {tasks_max}, the maximum")
            }
            SpawnTaskErrorKind::ThreadGone => {
                out.write_str("spawn a task: the executor's thread has ended")
            }
        }
    }
}

impl<F> std::error::Error for SpawnTaskError<F> {}
