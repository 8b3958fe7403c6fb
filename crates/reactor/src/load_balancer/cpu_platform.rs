//! CPU platform of a balancer: reads cpuset and quota, sets frequencies, never blocks.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use tenmil_linux::CpuList;
use tenmil_linux::cpu_topology::AvailableCpus;
use tenmil_linux::frequency_control::{FrequencyControl, FrequencyError, FrequencyRequest};
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::thread_pool::{BlockingTask, ThreadPool};

/// CPU platform as seen by a balancer. No call may block.
///
/// A reactor whose core is taken away runs where the kernel places it; when the core comes back,
/// the kernel (6.2 and later) restores the affinity by itself.
pub trait CpuPlatform: Send {
    /// Available CPUs and quota, as last known.
    fn available_cpus(&mut self) -> AvailableCpus;

    /// Whether it controls frequencies.
    fn controls_frequency(&self) -> bool;

    /// Accepts frequency requests, and returns the errors of earlier ones.
    fn request_frequencies(
        &mut self,
        requests: Vec<(u32, FrequencyRequest)>,
    ) -> Vec<FrequencyError>;
}

/// Kernel files, read and written by a [`ThreadPool`] thread once
/// per period. Results are available in the next period. Dropping this restores the frequencies, on
/// the pool.
pub struct LinuxPlatform {
    pool: Arc<ThreadPool>,
    shared: Arc<Mutex<PlatformShared>>,
    known: AvailableCpus,
    governs: bool,
}

struct PlatformShared {
    machine: KernelFiles,
    cores: CpuList,
    ours: AvailableCpus,
    frequency: Option<FrequencyControl>,
    requests: Vec<(u32, FrequencyRequest)>,
    errors: Vec<FrequencyError>,
}

impl LinuxPlatform {
    /// Creates the platform of reactors on these cores. Without a `frequency` no frequency is
    /// changed. Reads the files once before it returns.
    pub fn new(
        machine: KernelFiles,
        cores: CpuList,
        frequency: Option<FrequencyControl>,
        pool: Arc<ThreadPool>,
    ) -> Self {
        let known = AvailableCpus::read_available(&machine, &cores);
        let ours = known.clone();
        let (governs, requests, errors) = (frequency.is_some(), Vec::new(), Vec::new());
        let shared = PlatformShared { machine, cores, ours, frequency, requests, errors };
        Self { pool, shared: Arc::new(Mutex::new(shared)), known, governs }
    }
}

impl CpuPlatform for LinuxPlatform {
    fn available_cpus(&mut self) -> AvailableCpus {
        self.known.clone()
    }

    fn controls_frequency(&self) -> bool {
        self.governs
    }

    fn request_frequencies(
        &mut self,
        requests: Vec<(u32, FrequencyRequest)>,
    ) -> Vec<FrequencyError> {
        let errors = {
            let mut shared = match self.shared.try_lock() {
                Ok(shared) => shared,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                // The last task is still running; its requests are only one period old.
                Err(TryLockError::WouldBlock) => return Vec::new(),
            };
            shared.requests = requests;
            self.known = shared.ours.clone();
            std::mem::take(&mut shared.errors)
        };
        let shared = Arc::clone(&self.shared);
        let look = move || lock(&shared).apply_and_reread();
        // If the pool is full, the next period retries.
        let _ = self.pool.submit(BlockingTask::new("cpuset and frequencies", look));
        errors
    }
}

impl Drop for LinuxPlatform {
    /// Dropped on a reactor, which must not block on kernel files.
    fn drop(&mut self) {
        let shared = Arc::clone(&self.shared);
        let put_back = move || drop(lock(&shared).frequency.take());
        // If no thread is available it is done here: late is better than never.
        drop(
            self.pool.handle().submit_reliable(BlockingTask::new("frequencies put back", put_back)),
        );
    }
}

fn lock(shared: &Mutex<PlatformShared>) -> MutexGuard<'_, PlatformShared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PlatformShared {
    fn apply_and_reread(&mut self) {
        self.ours = AvailableCpus::read_available(&self.machine, &self.cores);
        if let Some(frequency) = &mut self.frequency {
            let requests = std::mem::take(&mut self.requests);
            self.errors.extend(frequency.apply_requests(&requests));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tenmil_linux::CpuList;
    use tenmil_linux::frequency_control::{FrequencyControl, FrequencyRequest};
    use tenmil_linux::kernel_files::KernelFiles;
    use tenmil_linux::runtime_directory::RuntimeDirectory;
    use tenmil_linux::thread_pool::ThreadPool;

    use super::{CpuPlatform, LinuxPlatform};

    const MAX: &str = "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq";
    const MIN: &str = "sys/devices/system/cpu/cpu0/cpufreq/scaling_min_freq";

    #[test]
    fn cpu_state_is_read_on_a_worker_and_known_at_the_next_call() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            let mut file = std::fs::OpenOptions::new()
                .create(true)
                .write(true)
                .truncate(true)
                .open(path)
                .unwrap();
            std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
        };
        write("sys/devices/system/cpu/online", "0-1\n");
        write(MIN, "800000\n");
        write(MAX, "3600000\n");
        let machine = KernelFiles::under_root(root.path());
        let both: CpuList = (0..2).collect();
        let directory = RuntimeDirectory::at_path(root.path().join("run")).unwrap();
        let frequency = FrequencyControl::take_control(machine.clone(), &both, &directory).unwrap();
        let pool = || Arc::new(ThreadPool::new(1, 4));
        let mut ground = LinuxPlatform::new(machine.clone(), both.clone(), Some(frequency), pool());
        assert_eq!(
            (ground.available_cpus().cores, ground.controls_frequency()),
            (both.clone(), true)
        );

        write("sys/devices/system/cpu/online", "0\n");
        assert_eq!(ground.request_frequencies(vec![(0, FrequencyRequest::Lowest)]), []);
        // Dropping a pool waits for its jobs.
        drop(std::mem::replace(&mut ground.pool, pool()));
        assert_eq!(machine.read_trimmed(MAX).as_deref(), Some("800000"));
        assert_eq!(ground.available_cpus().cores, both, "not reported yet");
        std::fs::remove_file(root.path().join(MAX)).unwrap();
        assert_eq!(ground.request_frequencies(vec![(0, FrequencyRequest::Highest)]), []);
        assert_eq!(ground.available_cpus().cores, (0..1).collect());
        drop(std::mem::replace(&mut ground.pool, pool()));
        assert_eq!(ground.request_frequencies(Vec::new()).len(), 1, "a file is gone");

        write(MAX, "800000\n");
        drop(ground);
        assert_eq!(machine.read_trimmed(MAX).as_deref(), Some("3600000"), "put back");
    }
}
