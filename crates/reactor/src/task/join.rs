//! What is left of a task outside of its executor: its end, and the right to bring that about.

use std::any::Any;
use std::fmt;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::panicked::panic_text;

/// The end of a task, to be awaited anywhere. Dropping it drops the task, on the task's own thread
/// and soon.
#[must_use = "a task whose handle is dropped is dropped; `detach` lets it go on"]
pub struct JoinHandle<T> {
    link: Arc<Link<T>>,
    is_detached: bool,
}

/// Why a task has no output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It panicked.
    Panicked {
        /// What the panic said.
        panic: String,
    },
    /// Its executor is gone, and the task with it.
    Gone,
}

/// The task's side. One that is dropped before it is kept never will be, and says so.
pub(super) struct Promise<T>(Option<Arc<Link<T>>>);

struct Link<T> {
    is_unwanted: AtomicBool,
    desk: Mutex<Desk<T>>,
    over: Condvar,
}

struct Desk<T> {
    answer: Option<Result<T, Ended>>,
    joiner: Option<Waker>,
    task: Option<Waker>,
}

/// Both sides of a task.
pub(super) fn pair<T>() -> (Promise<T>, JoinHandle<T>) {
    let desk = Mutex::new(Desk { answer: None, joiner: None, task: None });
    let link = Link { is_unwanted: AtomicBool::new(false), desk, over: Condvar::new() };
    let link = Arc::new(link);
    (Promise(Some(Arc::clone(&link))), JoinHandle { link, is_detached: false })
}

/// A task: polls `future` until it ends, panics or is unwanted, drops it, and keeps the promise.
/// Ends with what the panic said.
pub(super) async fn run<F: Future>(future: F, mut promise: Promise<F::Output>) -> Option<String> {
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
        Step::Done(output) => promise.keep(Ok(output)),
        Step::Unwanted => {}
        Step::Panicked(panic) => {
            let panic = panic_text(&*panic);
            promise.keep(Err(Ended::Panicked { panic: panic.clone() }));
            return Some(panic);
        }
    }
    None
}

/// How far a task is.
enum Step<T> {
    Done(T),
    Unwanted,
    Panicked(Box<dyn Any + Send>),
}

impl<T> Promise<T> {
    fn step<F: Future<Output = T>>(
        &self,
        future: Pin<&mut F>,
        is_begun: bool,
        context: &mut Context<'_>,
    ) -> Poll<Step<T>> {
        if let Some(link) = &self.0 {
            if !is_begun {
                link.desk().task = Some(context.waker().clone());
            }
            // Pairs with the release in the drop of the handle.
            if link.is_unwanted.load(Ordering::Acquire) {
                return Poll::Ready(Step::Unwanted);
            }
        }
        match catch_unwind(AssertUnwindSafe(|| future.poll(context))) {
            Ok(poll) => poll.map(Step::Done),
            Err(panic) => Poll::Ready(Step::Panicked(panic)),
        }
    }

    fn keep(&mut self, answer: Result<T, Ended>) {
        let Some(link) = self.0.take() else { return };
        let mut desk = link.desk();
        desk.answer = Some(answer);
        let (joiner, task) = (desk.joiner.take(), desk.task.take());
        drop(desk);
        drop(task);
        link.over.notify_all();
        if let Some(joiner) = joiner {
            joiner.wake();
        }
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        self.keep(Err(Ended::Gone));
    }
}

impl<T> JoinHandle<T> {
    /// Lets the task go on by itself: nobody waits for its end.
    pub fn detach(mut self) {
        self.is_detached = true;
    }

    /// Whether it has ended.
    pub fn is_finished(&self) -> bool {
        self.link.desk().answer.is_some()
    }

    /// Waits for the end of the task on an OS thread that has nothing else to do. Not to be called
    /// on a reactor, which it would stop.
    pub fn wait(self) -> Result<T, Ended> {
        let mut desk = self.link.desk();
        loop {
            if let Some(answer) = desk.answer.take() {
                return answer;
            }
            desk = self.link.over.wait(desk).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<T> Future for JoinHandle<T> {
    type Output = Result<T, Ended>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut desk = self.link.desk();
        if let Some(answer) = desk.answer.take() {
            return Poll::Ready(answer);
        }
        let old = desk.joiner.replace(context.waker().clone());
        // What a waker does when it goes is not known: not under the lock.
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
        // A task that has not begun looks at this when it does, behind the same lock.
        self.link.is_unwanted.store(true, Ordering::Release);
        let task = self.link.desk().task.take();
        if let Some(task) = task {
            task.wake();
        }
    }
}

impl<T> Link<T> {
    fn desk(&self) -> MutexGuard<'_, Desk<T>> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> fmt::Debug for JoinHandle<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_finished = self.is_finished();
        out.debug_struct("JoinHandle").field("is_finished", &is_finished).finish_non_exhaustive()
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Panicked { panic } => write!(out, "a task panicked: {panic}"),
            Self::Gone => out.write_str("a task was dropped: its executor is gone"),
        }
    }
}

impl std::error::Error for Ended {}
