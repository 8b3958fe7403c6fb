//! Worker threads for commands that would block the server thread. A thread is started when there
//! is work and ends when there is none.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::Span;
use tenmil_linux::{Clock, NamedThread, StopFlag};

use crate::error::{ErrorCode, RpcError};

/// Work item.
pub(super) type WorkerTask = Box<dyn FnOnce() + Send>;

/// Worker threads and their queue.
#[derive(Default)]
pub(super) struct WorkerPool(Mutex<WorkerState>);

#[derive(Default)]
struct WorkerState {
    waiting: VecDeque<WorkerTask>,
    /// Threads, including ended ones that were not reaped yet.
    threads: Vec<NamedThread<()>>,
    /// Number of threads that take work.
    running: usize,
    is_over: bool,
}

/// Largest number of threads.
const THREADS_MAX: usize = 4;
/// Capacity of the queue: each connection has at most one item.
const WAITING_MAX: usize = 64;
/// Longest wait for a thread at the end of the process, which ends the remaining ones.
const END_MAX: Span = Span::from_ms(800);
const END_INTERVAL: Span = Span::from_ms(5);

impl WorkerPool {
    /// Queues a work item.
    pub(super) fn queue_task(self: &Arc<Self>, work: WorkerTask) -> Result<(), RpcError> {
        let mut pool_threads = self.lock();
        if pool_threads.is_over || pool_threads.waiting.len() >= WAITING_MAX {
            let text =
                format!("commands: {} wait already, expected fewer", pool_threads.waiting.len());
            return Err(RpcError::environment(ErrorCode::Busy, text).with_hint("repeat it later"));
        }
        pool_threads.threads.retain(|hand| !hand.is_finished());
        pool_threads.waiting.push_back(work);
        if pool_threads.running >= THREADS_MAX {
            return Ok(());
        }
        let workers = Arc::clone(self);
        match NamedThread::spawn("orders", None, move |stop| workers.run_queued_tasks(stop)) {
            Ok(hand) => {
                pool_threads.threads.push(hand);
                pool_threads.running += 1;
            }
            // The existing threads execute it.
            Err(_) if pool_threads.running > 0 => {}
            Err(error) => {
                pool_threads.waiting.pop_back();
                let text = format!("orders: start a thread: {error}");
                return Err(RpcError::environment(ErrorCode::Failed, text));
            }
        }
        Ok(())
    }

    /// Executes queued items until there are none.
    fn run_queued_tasks(&self, stop: &StopFlag) {
        loop {
            let mut pool_threads = self.lock();
            let work = if stop.is_stopped() { None } else { pool_threads.waiting.pop_front() };
            let Some(work) = work else {
                pool_threads.running -= 1;
                return;
            };
            drop(pool_threads);
            work();
        }
    }

    /// Drops queued items and waits a short time for running ones.
    pub(super) fn stop_workers(&self) {
        let mut pool_threads = self.lock();
        pool_threads.is_over = true;
        let (threads, waiting) =
            (std::mem::take(&mut pool_threads.threads), std::mem::take(&mut pool_threads.waiting));
        drop(pool_threads);
        // Dropping them completes their deferred responses with an error.
        drop(waiting);
        stop_and_join_threads(threads);
    }

    fn lock(&self) -> MutexGuard<'_, WorkerState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Stops threads and waits a short time for them.
pub(super) fn stop_and_join_threads(threads: Vec<NamedThread<()>>) {
    threads.iter().for_each(|hand| hand.stop_flag().set());
    let clock = Clock::start();
    let until = clock.now().after(END_MAX);
    while threads.iter().any(|hand| !hand.is_finished()) && clock.now() < until {
        tenmil_linux::named_thread::sleep(END_INTERVAL);
    }
    for hand in threads {
        if !hand.is_finished() {
            // It is blocked on a device; waiting for it would block the end of the process.
            std::mem::forget(hand);
        }
    }
}

impl fmt::Debug for WorkerPool {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pool_threads = self.lock();
        out.debug_struct("Workers")
            .field("waiting", &pool_threads.waiting.len())
            .field("running", &pool_threads.running)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{channel, sync_channel};
    use std::sync::{Arc, Mutex};

    use super::{THREADS_MAX, WAITING_MAX, WorkerPool};
    use crate::error::ErrorCode;

    #[test]
    fn tasks_run_on_all_workers_and_others_wait_in_order() {
        let workers = Arc::<WorkerPool>::default();
        let (begun, begins) = channel();
        let (go, gate) = sync_channel(0);
        let gate = Arc::new(Mutex::new(gate));
        for number in 0..THREADS_MAX + 3 {
            let (begun, gate) = (begun.clone(), Arc::clone(&gate));
            let work = move || {
                begun.send(number).unwrap();
                gate.lock().unwrap().recv().unwrap();
            };
            workers.queue_task(Box::new(work)).unwrap();
        }
        let first: Vec<usize> = begins.iter().take(THREADS_MAX).collect();
        assert!(begins.try_recv().is_err(), "{first:?}");
        for number in THREADS_MAX..THREADS_MAX + 3 {
            go.send(()).unwrap();
            assert_eq!(begins.recv().unwrap(), number);
        }
        (0..THREADS_MAX).for_each(|_| go.send(()).unwrap());
        workers.stop_workers();
    }

    #[test]
    fn full_queue_and_stopped_pool_reject_tasks() {
        let workers = Arc::<WorkerPool>::default();
        let (go, gate) = sync_channel::<()>(0);
        let gate = Arc::new(Mutex::new(gate));
        let work = || {
            let gate = Arc::clone(&gate);
            Box::new(move || assert!(gate.lock().unwrap().recv().is_err()))
        };
        let mut taken = 0;
        let refused = loop {
            match workers.queue_task(work()) {
                Ok(()) => taken += 1,
                Err(refused) => break refused,
            }
            assert!(taken <= THREADS_MAX + WAITING_MAX);
        };
        assert!(taken >= WAITING_MAX && refused.code == ErrorCode::Busy, "{taken} {refused}");
        drop(go);
        workers.stop_workers();
        assert_eq!(workers.queue_task(work()).unwrap_err().code, ErrorCode::Busy);
    }
}
