//! What spreads the threads of a program over its reactors, and chooses how fast their cores run
//! where that was asked for.

mod rules;

use std::sync::Arc;

use host::Cores;
use host::frequency::{Frequency, FrequencyError, recover};
use host::machine::Machine;
use host::pool::Pool;
use host::runtime_directory::RuntimeDirectory;
use reactor::balance::{NotBalanced, Steering, start};
use reactor::schedule::Options;
use reactor::{Directory, Reactors};

use crate::Refused;
pub(crate) use rules::{check_cores, check_rules, parse_rules};

/// Keeps what a balancer works with. To be dropped when its reactors have stopped: then frequencies
/// have been put back.
pub(crate) struct Balance {
    _pool: Arc<Pool>,
    steering: Steering,
    /// What became of the frequency of cores, in words.
    frequency_scaling: String,
}

/// Where a note goes that the user should read.
pub(crate) type Tell<'a> = &'a dyn Fn(String);

/// Reactors and what balances them.
pub(crate) struct Balanced {
    pub(crate) reactors: Reactors,
    pub(crate) balance: Balance,
}

/// Once in a period there is one job, and the next is refused while it waits.
const JOBS_WAITING_MAX: usize = 1;

impl Balance {
    /// Starts balancing the threads of `directory` by these rules, on a light thread of its own; with
    /// a governor, it also chooses how fast `cores` run.
    pub(crate) fn start(
        rules: &Options,
        has_governor: bool,
        directory: &Directory,
        cores: &Cores,
        tell: Tell<'_>,
    ) -> Result<Self, Refused> {
        let pool = Arc::new(Pool::new(1, JOBS_WAITING_MAX));
        let frequency = frequency(has_governor, cores, tell);
        let frequency_scaling = words(has_governor, frequency.as_ref());
        let started = start(directory, rules.clone(), frequency, Arc::clone(&pool));
        let (_thread, steering) = started.map_err(refused)?;
        Ok(Self { _pool: pool, steering, frequency_scaling })
    }

    /// What it is steered by.
    pub(crate) fn steering(&self) -> &Steering {
        &self.steering
    }

    /// Ends it, and says what became of the frequency of cores.
    pub(crate) fn into_frequency_scaling(self) -> String {
        self.frequency_scaling
    }
}

impl Balanced {
    /// Stops the reactors, and puts back what they had changed.
    pub(crate) fn stop(self) {
        self.reactors.stop();
        drop(self.balance);
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

/// Puts back what a process that was killed had in charge, if there is any, and tells what could not
/// be. For every start of whatever runs for a while.
pub(crate) fn put_back_frequencies(
    machine: &Machine,
    directory: &RuntimeDirectory,
    tell: Tell<'_>,
) {
    let recovered = recover(machine, directory);
    recovered.errors.iter().for_each(|error| tell(error.to_string()));
}

/// If that is wanted, the frequency of these cores, in our charge. What is in the way is noted, and
/// the program goes on without.
fn frequency(is_wanted: bool, cores: &Cores, tell: Tell<'_>) -> Option<Frequency> {
    if !is_wanted {
        return None;
    }
    let machine = Machine::this();
    match RuntimeDirectory::of_user() {
        Ok(directory) => {
            put_back_frequencies(&machine, &directory, tell);
            take_charge(machine, cores, &directory, tell)
        }
        Err(error) => {
            tell(format!("frequency scaling is left alone: {error}"));
            None
        }
    }
}

fn take_charge(
    machine: Machine,
    cores: &Cores,
    directory: &RuntimeDirectory,
    tell: Tell<'_>,
) -> Option<Frequency> {
    let note = |error: &FrequencyError| tell(error.to_string());
    let opened = Frequency::open(machine, cores, directory);
    match &opened {
        Ok(frequency) => frequency.held().iter().for_each(note),
        Err(absent) => tell(absent.to_string()),
    }
    opened.ok()
}

fn refused(why: NotBalanced) -> Refused {
    match why {
        NotBalanced::Options(error) => Refused::caller(error.to_string()),
        NotBalanced::Refused(why) => Refused::of(why.blame(), why.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::path::Path;

    use host::frequency::{Frequency, Speed};
    use host::machine::Machine;
    use host::runtime_directory::RuntimeDirectory;

    use super::{put_back_frequencies, take_charge, words};

    /// What was told.
    #[derive(Default)]
    struct Told(RefCell<Vec<String>>);

    impl Told {
        fn tell(&self, text: String) {
            self.0.borrow_mut().push(text);
        }
    }

    #[expect(clippy::disallowed_methods, reason = "it makes a tree as the kernel has one")]
    fn machine_with_one_core(root: &Path) -> Machine {
        let cpufreq = root.join("sys/devices/system/cpu/cpu0/cpufreq");
        std::fs::create_dir_all(&cpufreq).unwrap();
        std::fs::write(cpufreq.join("scaling_min_freq"), "800000\n").unwrap();
        std::fs::write(cpufreq.join("scaling_max_freq"), "3600000\n").unwrap();
        Machine::under(root)
    }

    #[test]
    fn a_machine_without_frequencies_is_told_of_in_one_line() {
        let root = tempfile::tempdir().unwrap();
        let directory = RuntimeDirectory::at(root.path().join("run")).unwrap();
        let told = Told::default();
        let cores = [0, 1].into_iter().collect();
        let machine = Machine::under(root.path());
        assert!(take_charge(machine, &cores, &directory, &|text| told.tell(text)).is_none());
        let expected = "frequency scaling is left alone: the kernel has no cpufreq for cores 0-1";
        assert_eq!(*told.0.borrow(), [expected]);
    }

    #[test]
    fn cores_that_another_run_has_in_charge_are_left_to_it() {
        let root = tempfile::tempdir().unwrap();
        let machine = machine_with_one_core(root.path());
        let directory = RuntimeDirectory::at(root.path().join("run")).unwrap();
        let told = Told::default();
        let tell = |text| told.tell(text);
        let cores = [0].into_iter().collect();
        let held = take_charge(machine.clone(), &cores, &directory, &tell).unwrap();
        assert_eq!(held.domains().len(), 1);
        let second = take_charge(machine, &cores, &directory, &tell).unwrap();
        assert_eq!((second.domains().len(), second.held().len()), (0, 1), "it is taken");
        assert_eq!(words(true, Some(&held)), "lowest asleep, highest loaded, on cores 0");
        assert_eq!(words(true, Some(&second)), "wanted, and could not be had");
        assert_eq!(words(false, None), "left alone");
        let said = told.0.borrow();
        assert!(said[0].starts_with("set frequency of core 0: held by "), "{said:?}");
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "it leaves a file as one that was killed does")]
    fn what_a_killed_process_has_slowed_is_put_back_at_the_next_start() {
        const MAX: &str = "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq";
        let root = tempfile::tempdir().unwrap();
        let machine = machine_with_one_core(root.path());
        let directory = RuntimeDirectory::at(root.path().join("run")).unwrap();
        let cores = [0].into_iter().collect();
        let mut killed = Frequency::open(machine.clone(), &cores, &directory).unwrap();
        killed.apply(&[(0, Speed::Lowest)]);
        let journal = std::fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap().path();
        let left = std::fs::read(&journal).unwrap();
        drop(killed);
        std::fs::write(&journal, left).unwrap();
        machine.write(MAX, "800000").unwrap();
        let told = Told::default();
        put_back_frequencies(&machine, &directory, &|text| told.tell(text));
        assert_eq!(machine.text(MAX).as_deref(), Some("3600000"));
        assert!(told.0.borrow().is_empty() && !journal.exists());
    }
}
