//! Threads for the Diffie-Hellman computations of authentications.

use std::sync::{Arc, LazyLock};

use tenmil_linux::thread_pool::{BlockingTask, ThreadPool};
use tenmil_nvme_auth::{DhExecutor, DhJob, DhResult};

/// Runs computations on threads of this process, which all targets share: one takes milliseconds,
/// which would delay the I/O of a reactor.
struct DhThreads;

/// Threads, and computations that wait for one. The service submits fewer than wait.
const THREADS: usize = 2;
const WAITING: usize = 64;

static POOL: LazyLock<ThreadPool> = LazyLock::new(|| ThreadPool::new(THREADS, WAITING));

/// Executor on threads. They get the processors of the thread that calls this first, so it is not a
/// reactor.
pub(super) fn dh_threads() -> Arc<dyn DhExecutor> {
    LazyLock::force(&POOL);
    Arc::new(DhThreads)
}

impl DhExecutor for DhThreads {
    /// A computation that is one too many is dropped, and its exchange ends.
    fn execute(&self, job: DhJob, done: Box<dyn FnOnce(DhResult) + Send>) {
        let _ = POOL.submit(BlockingTask::new("dh", move || done(job.run())));
    }
}
