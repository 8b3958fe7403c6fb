//! What the kernel says about our processors, and does to them, without ever waiting for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use host::Cores;
use host::frequency::{Frequency, FrequencyError, Speed};
use host::machine::Machine;
use host::pool::{Job, Pool};
use host::topology::Ours;

/// The machine as a balancer sees it. No call may block.
///
/// A reactor whose core is taken away runs wherever the kernel puts it; when the core comes back,
/// the kernel (6.2 and later) binds the thread to it again by itself.
pub trait Ground: Send {
    /// What there is of our processors, as far as that is known.
    fn ours(&mut self) -> Ours;

    /// Whether it changes how fast cores run.
    fn governs(&self) -> bool;

    /// Takes note of how fast each core is to run, and gives what could not be done about earlier
    /// wishes.
    fn run_at(&mut self, wishes: Vec<(u32, Speed)>) -> Vec<FrequencyError>;
}

/// The kernel's files, read and written by a thread of a [`Pool`] once in a period. What was found
/// is known in the next period. Frequencies are put back by the pool when this is dropped.
pub struct KernelGround {
    pool: Arc<Pool>,
    shared: Arc<Mutex<Shared>>,
    known: Ours,
    governs: bool,
}

struct Shared {
    machine: Machine,
    cores: Cores,
    ours: Ours,
    frequency: Option<Frequency>,
    wishes: Vec<(u32, Speed)>,
    errors: Vec<FrequencyError>,
}

impl KernelGround {
    /// The ground of reactors on these cores. Without a `frequency` nothing is made faster or
    /// slower. Looks once before it returns.
    pub fn new(
        machine: Machine,
        cores: Cores,
        frequency: Option<Frequency>,
        pool: Arc<Pool>,
    ) -> Self {
        let known = Ours::of(&machine, &cores);
        let ours = known.clone();
        let (governs, wishes, errors) = (frequency.is_some(), Vec::new(), Vec::new());
        let shared = Shared { machine, cores, ours, frequency, wishes, errors };
        Self { pool, shared: Arc::new(Mutex::new(shared)), known, governs }
    }
}

impl Ground for KernelGround {
    fn ours(&mut self) -> Ours {
        self.known.clone()
    }

    fn governs(&self) -> bool {
        self.governs
    }

    fn run_at(&mut self, wishes: Vec<(u32, Speed)>) -> Vec<FrequencyError> {
        let errors = {
            let mut shared = match self.shared.try_lock() {
                Ok(shared) => shared,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                // The last look is not over; its wishes are only a period old.
                Err(TryLockError::WouldBlock) => return Vec::new(),
            };
            shared.wishes = wishes;
            self.known = shared.ours.clone();
            std::mem::take(&mut shared.errors)
        };
        let shared = Arc::clone(&self.shared);
        let look = move || lock(&shared).look();
        // If the pool is full the next period asks again.
        let _ = self.pool.submit(Job::new("cpuset and frequencies", look));
        errors
    }
}

impl Drop for KernelGround {
    /// It is dropped on a reactor, where the kernel's files are not to be waited for.
    fn drop(&mut self) {
        let shared = Arc::clone(&self.shared);
        let put_back = move || drop(lock(&shared).frequency.take());
        // Without a single thread it is done here: late is better than never.
        drop(self.pool.intake().submit_surely(Job::new("frequencies put back", put_back)));
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn look(&mut self) {
        self.ours = Ours::of(&self.machine, &self.cores);
        if let Some(frequency) = &mut self.frequency {
            let wishes = std::mem::take(&mut self.wishes);
            self.errors.extend(frequency.apply(&wishes));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use host::Cores;
    use host::frequency::{Frequency, Speed};
    use host::machine::Machine;
    use host::pool::Pool;
    use host::runtime_directory::RuntimeDirectory;

    use super::{Ground, KernelGround};

    const MAX: &str = "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq";
    const MIN: &str = "sys/devices/system/cpu/cpu0/cpufreq/scaling_min_freq";

    #[test]
    fn a_look_is_taken_elsewhere_and_known_the_next_time() {
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
        let machine = Machine::under(root.path());
        let both: Cores = (0..2).collect();
        let directory = RuntimeDirectory::at(root.path().join("run")).unwrap();
        let frequency = Frequency::open(machine.clone(), &both, &directory).unwrap();
        let pool = || Arc::new(Pool::new(1, 4));
        let mut ground = KernelGround::new(machine.clone(), both.clone(), Some(frequency), pool());
        assert_eq!((ground.ours().cores, ground.governs()), (both.clone(), true));

        write("sys/devices/system/cpu/online", "0\n");
        assert_eq!(ground.run_at(vec![(0, Speed::Lowest)]), []);
        // Dropping a pool waits for its jobs.
        drop(std::mem::replace(&mut ground.pool, pool()));
        assert_eq!(machine.text(MAX).as_deref(), Some("800000"));
        assert_eq!(ground.ours().cores, both, "not told yet");
        std::fs::remove_file(root.path().join(MAX)).unwrap();
        assert_eq!(ground.run_at(vec![(0, Speed::Highest)]), []);
        assert_eq!(ground.ours().cores, (0..1).collect());
        drop(std::mem::replace(&mut ground.pool, pool()));
        assert_eq!(ground.run_at(Vec::new()).len(), 1, "a file is gone");

        write(MAX, "800000\n");
        drop(ground);
        assert_eq!(machine.text(MAX).as_deref(), Some("3600000"), "put back");
    }
}
