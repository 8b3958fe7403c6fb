//! Join handle of a task: its result, and the means to cancel it.

use std::any::Any;
use std::fmt;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::panic_text::panic_text;

/// Handle that awaits the result of a task, on any thread. Dropping it drops the task, on the
/// task's own thread and soon.
#[must_use = "a task whose handle is dropped is dropped; `detach` lets it go on"]
pub struct JoinHandle<T> {
    state: Arc<JoinState<T>>,
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
pub(super) struct TaskCompleter<T>(Option<Arc<JoinState<T>>>);

struct JoinState<T> {
    is_dropped: AtomicBool,
    inner: Mutex<JoinInner<T>>,
    over: Condvar,
}

struct JoinInner<T> {
    result: Option<Result<T, JoinError>>,
    joiner: Option<Waker>,
    task: Option<Waker>,
}

/// Creates both sides for a task.
pub(super) fn pair<T>() -> (TaskCompleter<T>, JoinHandle<T>) {
    let desk = Mutex::new(JoinInner { result: None, joiner: None, task: None });
    let link = JoinState { is_dropped: AtomicBool::new(false), inner: desk, over: Condvar::new() };
    let link = Arc::new(link);
    (TaskCompleter(Some(Arc::clone(&link))), JoinHandle { state: link, is_detached: false })
}

/// Polls `future` until it completes, panics or is detached from its handle, drops it, and sets the
/// result. Returns the message of a panic.
pub(super) async fn run<F: Future>(
    future: F,
    mut promise: TaskCompleter<F::Output>,
) -> Option<String> {
    let ended = {
        let mut future = pin!(future);
        let mut is_begun = false;
        poll_fn(|context| {
            let is_begun = std::mem::replace(&mut is_begun, true);
            promise.step(future.as_mut(), is_begun, context)
        })
        .await
    };
    match ended {
        TaskState::Done(output) => promise.keep(Ok(output)),
        TaskState::Detached => {}
        TaskState::Panicked(panic) => {
            let panic = panic_text(&*panic);
            promise.keep(Err(JoinError::Panicked { panic: panic.clone() }));
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
    fn step<F: Future<Output = T>>(
        &self,
        future: Pin<&mut F>,
        is_begun: bool,
        context: &mut Context<'_>,
    ) -> Poll<TaskState<T>> {
        if let Some(link) = &self.0 {
            if !is_begun {
                link.inner().task = Some(context.waker().clone());
            }
            // Pairs with the release in the drop of the handle.
            if link.is_dropped.load(Ordering::Acquire) {
                return Poll::Ready(TaskState::Detached);
            }
        }
        match catch_unwind(AssertUnwindSafe(|| future.poll(context))) {
            Ok(poll) => poll.map(TaskState::Done),
            Err(panic) => Poll::Ready(TaskState::Panicked(panic)),
        }
    }

    fn keep(&mut self, answer: Result<T, JoinError>) {
        let Some(link) = self.0.take() else { return };
        let mut desk = link.inner();
        desk.result = Some(answer);
        let (joiner, task) = (desk.joiner.take(), desk.task.take());
        drop(desk);
        drop(task);
        link.over.notify_all();
        if let Some(joiner) = joiner {
            joiner.wake();
        }
    }
}

impl<T> Drop for TaskCompleter<T> {
    fn drop(&mut self) {
        self.keep(Err(JoinError::Gone));
    }
}

impl<T> JoinHandle<T> {
    /// Lets the task continue without a handle.
    pub fn detach(mut self) {
        self.is_detached = true;
    }

    /// Whether the task has ended.
    pub fn is_finished(&self) -> bool {
        self.state.inner().result.is_some()
    }

    /// Blocks an OS thread until the task has ended. Must not be called on a reactor, which it
    /// would block.
    pub fn wait(self) -> Result<T, JoinError> {
        let mut desk = self.state.inner();
        loop {
            if let Some(answer) = desk.result.take() {
                return answer;
            }
            desk = self.state.over.wait(desk).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<T> Future for JoinHandle<T> {
    type Output = Result<T, JoinError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut desk = self.state.inner();
        if let Some(answer) = desk.result.take() {
            return Poll::Ready(answer);
        }
        let old = desk.joiner.replace(context.waker().clone());
        // Dropping a waker may run arbitrary code: not under the lock.
        drop(desk);
        drop(old);
        Poll::Pending
    }
}

impl<T> Drop for JoinHandle<T> {
    fn drop(&mut self) {
        if self.is_detached {
            return;
        }
        // A task that has not started checks this when it does, under the same lock.
        self.state.is_dropped.store(true, Ordering::Release);
        let task = self.state.inner().task.take();
        if let Some(task) = task {
            task.wake();
        }
    }
}

impl<T> JoinState<T> {
    fn inner(&self) -> MutexGuard<'_, JoinInner<T>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
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
