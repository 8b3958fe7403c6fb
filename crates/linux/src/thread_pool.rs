//! Thread pool for blocking work: opening files, resolving names, binding devices.
//!
//! A polling thread submits such a task and continues; the task reports its result through what it
//! captured, for instance a [`Sender`](crate::Sender) and a [`Notifier`](crate::Notifier).

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::event_loop::is_in_event_loop;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Thread pool. Threads are started on demand, when a task is queued and no thread is idle.
pub struct ThreadPool(PoolHandle);

/// Handle that submits tasks to a pool. Unlike the pool itself it may be dropped at any time on any
/// thread, including the pool's own: its drop does not wait for tasks.
#[derive(Clone)]
pub struct PoolHandle {
    shared: Arc<PoolShared>,
    threads_max: usize,
    waiting_max: usize,
}

/// Task that may block.
pub struct BlockingTask {
    name: &'static str,
    work: Box<dyn FnOnce() + Send>,
}

/// A task ended without a result because it panicked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskPanicked {
    /// Name of the task.
    pub task: &'static str,
    /// Panic message.
    pub message: String,
}

struct PoolShared {
    state: Mutex<PoolState>,
    /// Signaled when a task is queued and when the pool is closed.
    changed: Condvar,
    /// CPU affinity of the thread that created the pool. Polling threads are pinned, and their
    /// child threads would inherit that.
    processors: Option<CpuSet>,
}

#[derive(Default)]
struct PoolState {
    waiting: VecDeque<BlockingTask>,
    running: Vec<&'static str>,
    panicked: Vec<TaskPanicked>,
    idle: usize,
    threads: Vec<JoinHandle<()>>,
    ended: bool,
}

/// Number of panics kept for [`ThreadPool::take_panicked`]; later ones are only printed.
const PANICKED_MAX: usize = 64;

impl BlockingTask {
    /// Creates a task with a name for reports.
    pub fn new(name: &'static str, work: impl FnOnce() + Send + 'static) -> Self {
        Self { name, work: Box::new(work) }
    }

    /// Name of the task.
    pub fn name(&self) -> &'static str {
        self.name
    }
}

impl ThreadPool {
    /// Creates a pool of up to `threads_max` threads and `waiting_max` queued tasks. Starts no
    /// thread yet; threads get the CPU affinity of the current thread.
    pub fn new(threads_max: usize, waiting_max: usize) -> Self {
        let shared = PoolShared {
            state: Mutex::default(),
            changed: Condvar::new(),
            processors: sched_getaffinity(None).ok(),
        };
        Self(PoolHandle { shared: Arc::new(shared), threads_max, waiting_max })
    }

    /// Returns a handle that submits tasks.
    pub fn handle(&self) -> PoolHandle {
        self.0.clone()
    }

    /// As [`PoolHandle::submit`].
    pub fn submit(&self, job: BlockingTask) -> Result<(), BlockingTask> {
        self.0.submit(job)
    }

    /// Names of the running tasks.
    pub fn running_tasks(&self) -> Vec<&'static str> {
        self.0.shared.lock().running.clone()
    }

    /// Takes the reports of tasks that panicked.
    pub fn take_panicked(&self) -> Vec<TaskPanicked> {
        std::mem::take(&mut self.0.shared.lock().panicked)
    }
}

impl PoolHandle {
    /// Submits a task without blocking.
    ///
    /// The task is returned if the queue is full, if no thread could be started, or if the pool is
    /// closed. An accepted task is run, even if the pool is dropped.
    pub fn submit(&self, job: BlockingTask) -> Result<(), BlockingTask> {
        let mut state = self.shared.lock();
        if state.ended || state.waiting.len() >= self.waiting_max {
            return Err(job);
        }
        if state.needs_thread() && state.threads.len() < self.threads_max {
            // If no thread could be started, an existing one runs the task later.
            let started = self.start_thread(state.threads.len());
            state.threads.extend(started.ok());
        }
        if state.threads.is_empty() {
            return Err(job);
        }
        state.waiting.push_back(job);
        drop(state);
        self.shared.changed.notify_one();
        Ok(())
    }

    /// Submits a task that must be run, and neither run nor dropped by a polling thread.
    ///
    /// If the pool rejects it, a detached thread runs it. It is returned only if no thread can be
    /// started. Does not block.
    pub fn submit_reliable(&self, job: BlockingTask) -> Result<(), BlockingTask> {
        let Err(job) = self.submit(job) else { return Ok(()) };
        // A failed spawn drops its closure, so the task is kept outside it.
        let kept = Arc::new(Mutex::new(Some(job)));
        let take = |kept: &Mutex<Option<BlockingTask>>| {
            kept.lock().unwrap_or_else(PoisonError::into_inner).take()
        };
        let (theirs, shared) = (Arc::clone(&kept), Arc::clone(&self.shared));
        let thread = std::thread::Builder::new().name("pool-late".into());
        let started = thread.spawn(move || {
            shared.restore_affinity();
            if let Some(job) = take(&theirs) {
                // The panic has been printed; a detached thread has no other report.
                let _ = catch_unwind(AssertUnwindSafe(job.work));
            }
        });
        match started {
            Ok(_) => Ok(()),
            Err(_) => take(&kept).map_or(Ok(()), Err),
        }
    }

    fn start_thread(&self, number: usize) -> std::io::Result<JoinHandle<()>> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name(format!("pool-{number}"));
        thread.spawn(move || {
            shared.restore_affinity();
            shared.run_tasks();
        })
    }
}

impl Drop for ThreadPool {
    /// Waits until every accepted task has been run. A thread in an [event loop](is_in_event_loop)
    /// does not wait; the tasks are run nevertheless.
    fn drop(&mut self) {
        let threads = {
            let mut state = self.0.shared.lock();
            state.ended = true;
            std::mem::take(&mut state.threads)
        };
        self.0.shared.changed.notify_all();
        if is_in_event_loop() {
            return;
        }
        for thread in threads {
            // Panics of tasks are caught inside the thread.
            let _ = thread.join();
        }
    }
}

impl PoolState {
    /// Whether the queue holds at least one task for each idle thread.
    fn needs_thread(&self) -> bool {
        self.waiting.len() >= self.idle
    }
}

impl PoolShared {
    /// Locks the state, ignoring poison: it is consistent whenever the lock is free.
    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Restores the CPU affinity that was current when the pool was created.
    fn restore_affinity(&self) {
        if let Some(processors) = &self.processors {
            // If the set is no longer allowed, the inherited affinity stays.
            let _ = sched_setaffinity(None, processors);
        }
    }

    /// Loop of a thread: runs until the pool is closed and the queue is empty.
    fn run_tasks(&self) {
        while let Some(BlockingTask { name, work }) = self.next_task() {
            let ended = catch_unwind(AssertUnwindSafe(work));
            let mut state = self.lock();
            if let Some(index) = state.running.iter().position(|running| *running == name) {
                state.running.swap_remove(index);
            }
            if let Err(panic) = ended
                && state.panicked.len() < PANICKED_MAX
            {
                state
                    .panicked
                    .push(TaskPanicked { task: name, message: panic_message(panic.as_ref()) });
            }
        }
    }

    fn next_task(&self) -> Option<BlockingTask> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.waiting.pop_front() {
                state.running.push(job.name);
                return Some(job);
            }
            if state.ended {
                return None;
            }
            state.idle += 1;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }
}

/// Message of a panic.
fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("something that is not text")
        .to_owned()
}

impl fmt::Display for TaskPanicked {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "run {}: panicked: {}", self.task, self.message)
    }
}

impl fmt::Debug for BlockingTask {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("Job").field(&self.name).finish()
    }
}

impl fmt::Debug for ThreadPool {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.0.shared.lock();
        out.debug_struct("Pool")
            .field("threads", &state.threads.len())
            .field("waiting", &state.waiting)
            .field("running", &state.running)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::sync::{Arc, Barrier};

    use tenmil_base::Span;

    use super::{BlockingTask, PoolState, TaskPanicked, ThreadPool};
    use crate::{Clock, CpuList, EventLoop, NamedThread, NextStep, Sleeper, event_loop, mailbox};

    /// A task that reports its start, then waits to be released.
    fn blocked_task(name: &'static str) -> (BlockingTask, Receiver<()>, Sender<()>) {
        let (begin, begun) = channel();
        let (release, released) = channel();
        let job = BlockingTask::new(name, move || {
            // The test may ignore either message.
            let _ = begin.send(());
            let _ = released.recv();
        });
        (job, begun, release)
    }

    #[test]
    fn task_result_is_sent_by_message_and_wakes_the_requester() {
        let pool = ThreadPool::new(2, 4);
        let mut sleeper = Sleeper::new().unwrap();
        let (sender, mut receiver) = mailbox(1);
        let waker = sleeper.notifier();
        let job = BlockingTask::new("add", move || {
            sender.send(3 + 4).unwrap();
            waker.notify();
        });
        pool.submit(job).unwrap();
        while receiver.is_empty() {
            sleeper.announce_sleep();
            if receiver.is_empty() {
                sleeper.sleep_until_ready(Span::from_secs(20), &mut Vec::new());
            }
            sleeper.cancel_sleep();
        }
        assert_eq!(receiver.receive(), Some(7));
    }

    #[test]
    fn handle_outlives_its_pool_and_rejects_tasks() {
        let pool = ThreadPool::new(1, 4);
        let intake = pool.handle();
        let (send, ran) = channel();
        let (last, again) = (intake.clone(), send.clone());
        let job = BlockingTask::new("hands in", move || {
            let second = BlockingTask::new("second", move || again.send(2).unwrap());
            last.submit(second).unwrap();
            // The task's own handle is dropped in a pool thread.
            send.send(1).unwrap();
        });
        intake.submit(job).unwrap();
        assert_eq!((ran.recv().unwrap(), ran.recv().unwrap()), (1, 2));
        drop(pool);
        assert_eq!(intake.submit(BlockingTask::new("late", || {})).unwrap_err().name(), "late");
    }

    /// An event loop that drops a pool, and reports when that is done.
    struct Drops(Option<ThreadPool>, Sender<()>);

    impl EventLoop for Drops {
        fn iterate(&mut self, _: tenmil_base::Instant) -> NextStep {
            drop(self.0.take());
            self.1.send(()).unwrap();
            NextStep::Exit
        }

        fn arm(&mut self, _: tenmil_base::Instant) -> bool {
            false
        }

        fn disarm(&mut self, _: &[u64]) {}
    }

    #[test]
    fn polling_thread_never_waits_for_a_task() {
        let pool = ThreadPool::new(1, 4);
        let (job, begun, release) = blocked_task("held");
        let (send, ran) = channel();
        pool.submit(job).unwrap();
        pool.submit(BlockingTask::new("after", move || send.send(()).unwrap())).unwrap();
        begun.recv().unwrap();
        let (tell, dropped) = channel();
        let turns = NamedThread::spawn("turns", None, move |_| {
            let mut drops = Drops(Some(pool), tell);
            event_loop::run_event_loop(
                &mut drops,
                &Clock::on_kernel_clock(),
                &mut Sleeper::new().unwrap(),
            );
        });
        dropped.recv_timeout(std::time::Duration::from_secs(20)).unwrap();
        drop(release);
        ran.recv().unwrap();
        turns.unwrap().join();
    }

    #[test]
    fn reliable_task_runs_where_the_pool_is_full_or_gone() {
        let me = std::thread::current().id();
        let look = |intake: &super::PoolHandle| {
            let (send, ran) = channel();
            let job =
                BlockingTask::new("close", move || send.send(std::thread::current().id()).unwrap());
            intake.submit_reliable(job).unwrap();
            assert_ne!(ran.recv().unwrap(), me);
        };
        let pool = ThreadPool::new(1, 1);
        let intake = pool.handle();
        look(&intake);
        let (job, begun, release) = blocked_task("held");
        pool.submit(job).unwrap();
        begun.recv().unwrap();
        pool.submit(BlockingTask::new("waits", || {})).unwrap();
        look(&intake);
        drop(release);
        drop(pool);
        look(&intake);
    }

    #[test]
    fn full_queue_returns_the_task() {
        let pool = ThreadPool::new(1, 2);
        let (job, begun, release) = blocked_task("first");
        pool.submit(job).unwrap();
        begun.recv().unwrap();
        assert_eq!(pool.running_tasks(), ["first"]);
        pool.submit(BlockingTask::new("second", || {})).unwrap();
        pool.submit(BlockingTask::new("third", || {})).unwrap();
        let refused = pool.submit(BlockingTask::new("fourth", || {})).unwrap_err();
        assert_eq!(refused.name(), "fourth");
        assert!(format!("{pool:?}").contains("second"), "{pool:?}");
        drop(release);
    }

    #[test]
    fn threads_are_started_on_demand_up_to_the_limit() {
        let pool = ThreadPool::new(3, 16);
        let threads = || pool.0.shared.lock().threads.len();
        assert_eq!(threads(), 0);
        let mut releases = Vec::new();
        for (count, name) in (1..).zip(["one", "two", "three"]) {
            let (job, begun, release) = blocked_task(name);
            pool.submit(job).unwrap();
            begun.recv().unwrap();
            assert_eq!(threads(), count);
            releases.push(release);
        }
        let names = pool.running_tasks().into_iter().collect::<BTreeSet<_>>();
        assert_eq!(names, BTreeSet::from(["one", "two", "three"]));
        let (job, begun, _release) = blocked_task("four");
        pool.submit(job).unwrap();
        assert_eq!(threads(), 3);
        releases.clear();
        begun.recv().unwrap();
    }

    #[test]
    fn idle_thread_is_reused() {
        let pool = ThreadPool::new(8, 8);
        for _ in 0..20 {
            let (job, begun, release) = blocked_task("again");
            pool.submit(job).unwrap();
            begun.recv().unwrap();
            drop(release);
            while pool.0.shared.lock().idle == 0 {
                crate::named_thread::yield_cpu();
            }
        }
        assert_eq!(pool.0.shared.lock().threads.len(), 1);
        assert!(pool.running_tasks().is_empty());
    }

    #[test]
    fn idle_thread_is_counted_for_one_task_only() {
        // A woken thread that has not run yet still counts as idle.
        let mut state = PoolState { idle: 2, ..PoolState::default() };
        for wanted in [false, false, true] {
            assert_eq!(state.needs_thread(), wanted);
            state.waiting.push_back(BlockingTask::new("open", || {}));
        }
    }

    #[test]
    fn tasks_run_concurrently() {
        let pool = ThreadPool::new(4, 8);
        let meeting = Arc::new(Barrier::new(4));
        for _ in 0..4 {
            let meeting = Arc::clone(&meeting);
            let meet = move || {
                meeting.wait();
            };
            pool.submit(BlockingTask::new("meet", meet)).unwrap();
        }
        // Dropping waits for them, and they end only if all four run concurrently.
    }

    #[test]
    fn accepted_task_runs_even_if_the_pool_is_dropped() {
        let pool = ThreadPool::new(1, 100);
        let (sender, receiver) = channel();
        for number in 0..100 {
            let sender = sender.clone();
            let job = BlockingTask::new("count", move || sender.send(number).unwrap());
            pool.submit(job).unwrap();
        }
        drop((pool, sender));
        assert!(receiver.into_iter().eq(0..100));
    }

    #[test]
    fn panicking_task_is_reported_by_name_and_its_thread_continues() {
        let pool = ThreadPool::new(1, 8);
        let number = 7;
        pool.submit(BlockingTask::new("open", || panic!("on purpose"))).unwrap();
        pool.submit(BlockingTask::new("bind", move || panic!("at {number}"))).unwrap();
        let (job, begun, release) = blocked_task("after");
        pool.submit(job).unwrap();
        begun.recv().unwrap();
        let panicked = |job, message: &str| TaskPanicked { task: job, message: message.into() };
        assert_eq!(
            pool.take_panicked(),
            [panicked("open", "on purpose"), panicked("bind", "at 7")]
        );
        assert!(pool.take_panicked().is_empty());
        assert_eq!(pool.running_tasks(), ["after"]);
        assert_eq!(panicked("open", "x").to_string(), "run open: panicked: x");
        drop(release);
    }

    #[test]
    fn pool_without_threads_rejects_tasks() {
        assert!(ThreadPool::new(0, 8).submit(BlockingTask::new("never", || {})).is_err());
        assert!(ThreadPool::new(8, 0).submit(BlockingTask::new("never", || {})).is_err());
    }

    #[test]
    fn pool_threads_have_the_affinity_of_the_creator() {
        let pool = Arc::new(ThreadPool::new(1, 1));
        let core = CpuList::allowed_cpus().iter().next();
        let (sender, receiver) = channel();
        let job = BlockingTask::new("look", move || sender.send(CpuList::allowed_cpus()).unwrap());
        let theirs = Arc::clone(&pool);
        let asks = NamedThread::spawn("asks", core, move |_| theirs.submit(job).unwrap());
        asks.unwrap().join();
        assert_eq!(receiver.recv().unwrap(), CpuList::allowed_cpus());
    }
}
