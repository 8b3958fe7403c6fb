//! Arithmetic and random numbers of authentications: threads for Diffie-Hellman, and the kernel's
//! generator.

use std::sync::LazyLock;

use tenmil_linux::thread_pool::{BlockingTask, ThreadPool};
use tenmil_nvme_auth::{DhExecutor, DhJob, DhResult};
use tenmil_nvme_fabrics::SecureRandom;

/// Runs Diffie-Hellman computations on threads of this process. Many paths may be connected at once.
pub(super) struct DhThreads;

/// Random numbers of the kernel.
pub(super) struct KernelRandom;

/// Threads for computations of milliseconds, and computations that wait for one.
const THREADS: usize = 2;
const WAITING: usize = 1024;

static POOL: LazyLock<ThreadPool> = LazyLock::new(|| ThreadPool::new(THREADS, WAITING));

impl DhExecutor for DhThreads {
    /// A computation that is one too many is dropped, and its exchange ends by its time limit.
    fn execute(&self, job: DhJob, done: Box<dyn FnOnce(DhResult) + Send>) {
        let _ = POOL.submit(BlockingTask::new("dh", move || done(job.run())));
    }
}

impl SecureRandom for KernelRandom {
    fn fill(&self, bytes: &mut [u8]) -> Result<(), String> {
        tenmil_linux::fill_secure_random(bytes).map_err(|error| error.to_string())
    }
}
