//! What spreads the threads of a run over its reactors, and chooses how fast their cores run where
//! that was asked for.

use std::sync::Arc;

use host::Cores;
use host::frequency::{Frequency, FrequencyError, recover};
use host::machine::Machine;
use host::pool::Pool;
use host::runtime_directory::RuntimeDirectory;
use reactor::Directory;
use reactor::balance::{self, NotBalanced};
use reactor::schedule::Options;

use crate::Refused;
use crate::perf::options::PerfOptions;
use crate::perf::progress::Progress;

/// Keeps what a balancer works with. To be dropped when its reactors have stopped: then frequencies
/// have been put back.
pub(super) struct Balance {
    _pool: Arc<Pool>,
    /// What became of the frequency of cores, in words.
    frequency_scaling: String,
}

/// Once in a period there is one job, and the next is refused while it waits.
const JOBS_WAITING_MAX: usize = 1;

impl Balance {
    /// Starts balancing the threads of `directory` by the policy of `options`, on a light thread of
    /// its own, and shows by `progress` how to steer it.
    pub(super) fn start(
        options: &PerfOptions,
        directory: &Directory,
        cores: &Cores,
        progress: &Progress,
    ) -> Result<Self, Refused> {
        let pool = Arc::new(Pool::new(1, JOBS_WAITING_MAX));
        let frequency = frequency(options.governor, cores, progress);
        let frequency_scaling = words(options.governor, frequency.as_ref());
        let rules = Options { policy: options.scheduler, ..Options::default() };
        let started = balance::start(directory, rules, frequency, Arc::clone(&pool));
        let (_thread, steering) = started.map_err(refused)?;
        progress.show_steering(steering);
        Ok(Self { _pool: pool, frequency_scaling })
    }

    /// Ends it, and says what became of the frequency of cores.
    pub(super) fn into_frequency_scaling(self) -> String {
        self.frequency_scaling
    }
}

/// What is done about the frequency of cores.
fn words(is_wanted: bool, frequency: Option<&Frequency>) -> String {
    let cores = |frequency: &Frequency| {
        frequency.domains().iter().flat_map(|domain| domain.cores().iter()).collect::<Cores>()
    };
    match frequency.map(cores).filter(|cores| !cores.is_empty()) {
        Some(cores) => format!("lowest asleep, highest loaded, on cores {cores}"),
        None if is_wanted => "wanted, and could not be had".into(),
        None => "left alone".into(),
    }
}

/// Puts back what a run that crashed had in charge; then, if that is wanted, the frequency of these
/// cores, in our charge. What is in the way is noted, and the run goes on without.
fn frequency(is_wanted: bool, cores: &Cores, progress: &Progress) -> Option<Frequency> {
    let machine = Machine::this();
    match RuntimeDirectory::of_user() {
        Ok(directory) => {
            let recovered = recover(&machine, &directory);
            recovered.errors.iter().for_each(|error| progress.note(error.to_string()));
            is_wanted.then(|| take_charge(machine, cores, &directory, progress))?
        }
        Err(error) if is_wanted => {
            progress.note(format!("frequency scaling is left alone: {error}"));
            None
        }
        Err(_) => None,
    }
}

fn take_charge(
    machine: Machine,
    cores: &Cores,
    directory: &RuntimeDirectory,
    progress: &Progress,
) -> Option<Frequency> {
    let note = |error: &FrequencyError| progress.note(error.to_string());
    let opened = Frequency::open(machine, cores, directory);
    match &opened {
        Ok(frequency) => frequency.held().iter().for_each(note),
        Err(absent) => progress.note(absent.to_string()),
    }
    opened.ok()
}

fn refused(why: NotBalanced) -> Refused {
    match why {
        NotBalanced::Options(error) => Refused::caller(error.to_string()),
        NotBalanced::Refused(why) => super::refused(why),
    }
}

#[cfg(test)]
mod tests {
    use host::machine::Machine;
    use host::runtime_directory::RuntimeDirectory;

    use super::{take_charge, words};
    use crate::perf::progress::{LiveLine, Progress};

    #[test]
    fn a_machine_without_frequencies_is_told_of_in_one_line() {
        let root = tempfile::tempdir().unwrap();
        let directory = RuntimeDirectory::at(root.path().join("run")).unwrap();
        let progress = Progress::new(1);
        let cores = [0, 1].into_iter().collect();
        for _ in 0..2 {
            let machine = Machine::under(root.path());
            assert!(take_charge(machine, &cores, &directory, &progress).is_none());
        }
        let mut said = Vec::new();
        let mut line = LiveLine::new(false, base::Instant::default());
        line.tell(&progress, &mut said).unwrap();
        let expected = "note: frequency scaling is left alone: \
                        the kernel has no cpufreq for cores 0-1\n";
        assert_eq!(String::from_utf8(said).unwrap(), expected);
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "it makes a tree as the kernel has one")]
    fn cores_that_another_run_has_in_charge_are_left_to_it() {
        let root = tempfile::tempdir().unwrap();
        let cpufreq = root.path().join("sys/devices/system/cpu/cpu0/cpufreq");
        std::fs::create_dir_all(&cpufreq).unwrap();
        std::fs::write(cpufreq.join("scaling_min_freq"), "800000\n").unwrap();
        std::fs::write(cpufreq.join("scaling_max_freq"), "3600000\n").unwrap();
        let directory = RuntimeDirectory::at(root.path().join("run")).unwrap();
        let progress = Progress::new(1);
        let machine = || Machine::under(root.path());
        let cores = [0].into_iter().collect();
        let held = take_charge(machine(), &cores, &directory, &progress).unwrap();
        assert_eq!(held.domains().len(), 1);
        let second = take_charge(machine(), &cores, &directory, &progress).unwrap();
        assert_eq!((second.domains().len(), second.held().len()), (0, 1), "it is taken");
        assert_eq!(words(true, Some(&held)), "lowest asleep, highest loaded, on cores 0");
        assert_eq!(words(true, Some(&second)), "wanted, and could not be had");
        assert_eq!(words(false, None), "left alone");
        let mut said = Vec::new();
        let mut line = LiveLine::new(false, base::Instant::default());
        line.tell(&progress, &mut said).unwrap();
        let said = String::from_utf8(said).unwrap();
        assert!(said.starts_with("note: set frequency of core 0: held by "), "{said}");
    }
}
