//! Join handle of a task: its result, and the means to cancel it.

use std::any::Any;
use std::fmt;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tenmil_base::{OneshotReceiver, OneshotSender, oneshot};

use crate::panic_text::panic_text;

/// Handle that awaits the result of a task, on any thread. Dropping it drops the task, on the
/// task's own thread and soon.
#[must_use = "a task whose handle is dropped is dropped; `detach` lets it go on"]
pub struct JoinHandle<T> {
    result: OneshotReceiver<Result<T, JoinError>>,
    cancellation: Arc<Cancellation>,
    is_detached: bool,
}

/// A task ended without a result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JoinError {
    /// The task panicked.
    Panicked {
        /// Panic message.
        panic: String,
    },
    /// Its executor is gone, and the task with it.
    Gone,
}

/// Task's side of the handle. Dropped without a result, it reports `Gone`.
pub(super) struct TaskCompleter<T> {
    result: OneshotSender<Result<T, JoinError>>,
    cancellation: Arc<Cancellation>,
}

/// Cancellation of a task whose handle was dropped.
#[derive(Default)]
struct Cancellation {
    is_requested: AtomicBool,
    /// Waker of the task while it runs.
    task: Mutex<Option<Waker>>,
}

/// Creates both sides for a task.
pub(super) fn completer_and_handle<T>() -> (TaskCompleter<T>, JoinHandle<T>) {
    let (sender, receiver) = oneshot();
    let cancellation = Arc::<Cancellation>::default();
    let completer = TaskCompleter { result: sender, cancellation: Arc::clone(&cancellation) };
    (completer, JoinHandle { result: receiver, cancellation, is_detached: false })
}

/// Polls `future` until it completes, panics or is detached from its handle, drops it, and sets the
/// result. Returns the message of a panic.
pub(super) async fn run_task<F: Future>(
    future: F,
    completer: TaskCompleter<F::Output>,
) -> Option<String> {
    let ended = {
        let mut future = pin!(future);
        let mut is_begun = false;
        poll_fn(|context| {
            let is_begun = std::mem::replace(&mut is_begun, true);
            completer.poll_unless_canceled(future.as_mut(), is_begun, context)
        })
        .await
    };
    match ended {
        TaskState::Done(output) => completer.complete(Ok(output)),
        TaskState::Detached => {}
        TaskState::Panicked(panic) => {
            let panic = panic_text(&*panic);
            completer.complete(Err(JoinError::Panicked { panic: panic.clone() }));
            return Some(panic);
        }
    }
    None
}

/// State of a task.
enum TaskState<T> {
    Done(T),
    Detached,
    Panicked(Box<dyn Any + Send>),
}

impl<T> TaskCompleter<T> {
    fn poll_unless_canceled<F: Future<Output = T>>(
        &self,
        future: Pin<&mut F>,
        is_begun: bool,
        context: &mut Context<'_>,
    ) -> Poll<TaskState<T>> {
        if !is_begun {
            *self.cancellation.lock_waker() = Some(context.waker().clone());
        }
        // Pairs with the release in the drop of the handle.
        if self.cancellation.is_requested.load(Ordering::Acquire) {
            return Poll::Ready(TaskState::Detached);
        }
        match catch_unwind(AssertUnwindSafe(|| future.poll(context))) {
            Ok(poll) => poll.map(TaskState::Done),
            Err(panic) => Poll::Ready(TaskState::Panicked(panic)),
        }
    }

    fn complete(self, result: Result<T, JoinError>) {
        // Dropping a waker may run arbitrary code: not under the lock.
        let task = self.cancellation.lock_waker().take();
        drop(task);
        self.result.send(result);
    }
}

impl<T> JoinHandle<T> {
    /// Lets the task continue without a handle.
    pub fn detach(mut self) {
        self.is_detached = true;
    }

    /// Whether the task has ended.
    pub fn is_finished(&self) -> bool {
        self.result.is_complete()
    }

    /// Blocks an OS thread until the task has ended. Must not be called on a reactor, which it
    /// would block.
    pub fn wait(self) -> Result<T, JoinError> {
        self.result.wait().unwrap_or(Err(JoinError::Gone))
    }
}

impl<T> Future for JoinHandle<T> {
    type Output = Result<T, JoinError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.result).poll(context).map(|sent| sent.unwrap_or(Err(JoinError::Gone)))
    }
}

impl<T> Drop for JoinHandle<T> {
    fn drop(&mut self) {
        if self.is_detached {
            return;
        }
        // A task that has not started checks this when it does, under the same lock.
        self.cancellation.is_requested.store(true, Ordering::Release);
        let task = self.cancellation.lock_waker().take();
        if let Some(task) = task {
            task.wake();
        }
    }
}

impl Cancellation {
    fn lock_waker(&self) -> MutexGuard<'_, Option<Waker>> {
        self.task.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> fmt::Debug for JoinHandle<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_finished = self.is_finished();
        out.debug_struct("JoinHandle").field("is_finished", &is_finished).finish_non_exhaustive()
    }
}

impl fmt::Display for JoinError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Panicked { panic } => write!(out, "a task panicked: {panic}"),
            Self::Gone => out.write_str("a task was dropped: its executor is gone"),
        }
    }
}

impl std::error::Error for JoinError {}
