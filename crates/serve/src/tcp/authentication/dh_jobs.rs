//! Diffie-Hellman jobs of all connections: a bounded number runs at a time, and the addresses of
//! peers take turns, so that a flood from one of them delays no other.
//!
//! ```text
//!   QueueAuthentication ─ submit ─▶ queue of its address ─ round-robin ─▶ DhExecutor (threads)
//!        ▲                                                                    │
//!        └──────────── DhResultSlot, and a wake-up of the connection ◀────────┘
//! ```
//!
//! A connection has one job at most, so the number of queued jobs is limited by that of connections.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_nvme_auth::{DhExecutor, DhJob, DhResult, InlineDhExecutor};

use crate::tcp::connection_handle::ConnectionHandle;

/// Handle to the jobs of a service.
#[derive(Clone)]
pub(in crate::tcp) struct DhJobs {
    shared: Arc<Mutex<DhJobsState>>,
}

struct DhJobsState {
    executor: Arc<dyn DhExecutor>,
    running: usize,
    /// Queued jobs by address.
    queued: BTreeMap<String, VecDeque<QueuedJob>>,
    /// Addresses with queued jobs, in the order of their turns.
    turns: VecDeque<String>,
}

struct QueuedJob {
    job: DhJob,
    slot: Arc<DhResultSlot>,
}

/// Where the result of a job arrives.
#[derive(Debug)]
pub(in crate::tcp) struct DhResultSlot {
    state: Mutex<DhResultState>,
    handle: Arc<ConnectionHandle>,
}

/// State of a job, as its connection sees it.
#[derive(Debug)]
pub(in crate::tcp) enum DhResultState {
    /// The job is queued or running.
    Pending,
    /// The job has run.
    Done(DhResult),
    /// The executor has dropped the job.
    Dropped,
}

/// A job at the executor, until it has run or was dropped.
struct RunningJob {
    jobs: DhJobs,
    slot: Arc<DhResultSlot>,
    result: Option<DhResult>,
}

/// Largest number of jobs at the executor.
pub(in crate::tcp) const RUNNING_MAX: usize = 16;

impl DhJobs {
    /// Creates jobs that run at once on the calling thread, until an executor is set.
    pub(in crate::tcp) fn new() -> Self {
        let (executor, running) = (Arc::new(InlineDhExecutor), 0);
        let (queued, turns) = (BTreeMap::new(), VecDeque::new());
        let state = DhJobsState { executor, running, queued, turns };
        Self { shared: Arc::new(Mutex::new(state)) }
    }

    /// Sets the executor of further jobs.
    pub(in crate::tcp) fn set_executor(&self, executor: Arc<dyn DhExecutor>) {
        self.lock_state().executor = executor;
    }

    /// Queues a job of a connection with this peer address. The result arrives in the returned slot,
    /// and `handle` is woken.
    pub(in crate::tcp) fn submit(
        &self,
        address: &str,
        job: DhJob,
        handle: &Arc<ConnectionHandle>,
    ) -> Arc<DhResultSlot> {
        let slot = Arc::new(DhResultSlot {
            state: Mutex::new(DhResultState::Pending),
            handle: Arc::clone(handle),
        });
        let mut state = self.lock_state();
        let queue = state.queued.entry(address.to_owned()).or_default();
        queue.push_back(QueuedJob { job, slot: Arc::clone(&slot) });
        if queue.len() == 1 {
            state.turns.push_back(address.to_owned());
        }
        drop(state);
        self.start_queued_jobs();
        slot
    }

    /// Passes queued jobs to the executor, as many as may run.
    fn start_queued_jobs(&self) {
        loop {
            let mut state = self.lock_state();
            if state.running >= RUNNING_MAX {
                return;
            }
            let Some(QueuedJob { job, slot }) = state.next_job() else { return };
            state.running += 1;
            let executor = Arc::clone(&state.executor);
            // The executor may run the job before it returns.
            drop(state);
            let running = RunningJob { jobs: self.clone(), slot, result: None };
            // Dropped with or without a result, `running` makes room for the next job.
            executor.execute(job, Box::new(move |result| running.finish(result)));
        }
    }

    /// Jobs that are queued or at the executor.
    pub(in crate::tcp) fn count(&self) -> usize {
        let state = self.lock_state();
        state.running + state.queued.values().map(VecDeque::len).sum::<usize>()
    }

    fn lock_state(&self) -> MutexGuard<'_, DhJobsState> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DhJobsState {
    /// Next job whose connection still waits for it, of the address whose turn it is.
    fn next_job(&mut self) -> Option<QueuedJob> {
        loop {
            let address = self.turns.pop_front()?;
            let Some(queue) = self.queued.get_mut(&address) else { continue };
            let job = queue.pop_front();
            if queue.is_empty() {
                self.queued.remove(&address);
            } else {
                self.turns.push_back(address);
            }
            // A connection that has ended holds its slot no more.
            if let Some(job) = job.filter(|job| Arc::strong_count(&job.slot) > 1) {
                return Some(job);
            }
        }
    }
}

impl DhResultSlot {
    /// Takes the result once it is there.
    pub(in crate::tcp) fn take(&self) -> DhResultState {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *state, DhResultState::Pending)
    }
}

impl RunningJob {
    fn finish(mut self, result: DhResult) {
        self.result = Some(result);
    }
}

impl Drop for RunningJob {
    fn drop(&mut self) {
        let result = self.result.take().map_or(DhResultState::Dropped, DhResultState::Done);
        *self.slot.state.lock().unwrap_or_else(PoisonError::into_inner) = result;
        self.slot.handle.wake_connection();
        self.jobs.lock_state().running -= 1;
        self.jobs.start_queued_jobs();
    }
}

impl fmt::Debug for DhJobs {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock_state();
        out.debug_struct("DhJobs")
            .field("running", &state.running)
            .field("addresses", &state.turns.len())
            .finish_non_exhaustive()
    }
}
