//! Load balancing of lightweight threads over the reactors of a program, and frequency scaling of
//! their cores if requested.

mod scheduler_rules;

use std::sync::Arc;

use tenmil_linux::CpuList;
use tenmil_linux::frequency_control::{FrequencyControl, FrequencyError, restore_after_crash};
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::runtime_directory::RuntimeDirectory;
use tenmil_linux::thread_pool::ThreadPool;
use tenmil_reactor::load_balancer::{BalancerError, BalancerHandle, start_balancer};
use tenmil_reactor::thread_scheduler::Options;
use tenmil_reactor::{Reactors, Registry};

pub use scheduler_rules::{check_cores_allowed, check_rule_cores_scheduled, parse_scheduler_rules};
use tenmil_base::Error;

/// Owner of a running balancer. Must be dropped after its reactors have stopped. Restores the core
/// frequencies on drop.
pub struct BalancerGuard {
    _pool: Arc<ThreadPool>,
    steering: BalancerHandle,
    /// Description of the frequency scaling.
    frequency_scaling: String,
}

/// Callback for notes that the user should read.
pub type NoteFn<'a> = &'a dyn Fn(String);

/// Reactors and their balancer.
pub struct BalancedReactors {
    /// The reactors.
    pub reactors: Reactors,
    /// Their balancer.
    pub balance: BalancerGuard,
}

/// The balancer submits one job per period. A second one is rejected while the first waits.
const JOBS_WAITING_MAX: usize = 1;

impl BalancerGuard {
    /// Starts balancing the threads of `directory` by `rules`, on a lightweight thread of its own.
    /// With a governor, it also sets the frequency of `cores`.
    pub fn start_balancer(
        rules: &Options,
        has_governor: bool,
        directory: &Registry,
        cores: &CpuList,
        report: NoteFn<'_>,
    ) -> Result<Self, Error> {
        let pool = Arc::new(ThreadPool::new(1, JOBS_WAITING_MAX));
        let frequency = control_frequency(has_governor, cores, report);
        let frequency_scaling = frequency_text(has_governor, frequency.as_ref());
        let started = start_balancer(directory, rules.clone(), frequency, Arc::clone(&pool));
        let (_thread, steering) = started.map_err(balancer_error)?;
        Ok(Self { _pool: pool, steering, frequency_scaling })
    }

    /// Run-time control of the balancer.
    pub fn scheduler_handle(&self) -> &BalancerHandle {
        &self.steering
    }

    /// Ends the balancer and returns the description of the frequency scaling.
    pub fn stop_and_describe_frequency(self) -> String {
        self.frequency_scaling
    }
}

impl BalancedReactors {
    /// Stops the reactors, then restores the frequencies.
    pub fn stop(self) {
        self.reactors.stop();
        drop(self.balance);
    }
}

/// Description of the frequency scaling of the cores.
fn frequency_text(is_wanted: bool, frequency: Option<&FrequencyControl>) -> String {
    let cores = |frequency: &FrequencyControl| {
        frequency.policies().iter().flat_map(|domain| domain.all_cpus().iter()).collect::<CpuList>()
    };
    match frequency.map(cores).filter(|cores| !cores.is_empty()) {
        Some(cores) => format!("lowest when idle, highest under load, on cores {cores}"),
        None if is_wanted => "requested, but not available".into(),
        None => "unchanged".into(),
    }
}

/// Restores the frequencies that a killed process left changed, and notes what could not be
/// restored. Called at the start of every long-running command.
pub fn restore_frequencies(
    machine: &KernelFiles,
    directory: &RuntimeDirectory,
    report: NoteFn<'_>,
) {
    let recovered = restore_after_crash(machine, directory);
    recovered.errors.iter().for_each(|error| report(error.to_string()));
}

/// Takes control of the frequency of these cores, if requested. Obstacles are noted, and the
/// program continues without frequency scaling.
fn control_frequency(
    is_wanted: bool,
    cores: &CpuList,
    report: NoteFn<'_>,
) -> Option<FrequencyControl> {
    if !is_wanted {
        return None;
    }
    let machine = KernelFiles::live_system();
    match RuntimeDirectory::of_user() {
        Ok(directory) => {
            restore_frequencies(&machine, &directory, report);
            start_governor(machine, cores, &directory, report)
        }
        Err(error) => {
            report(format!("frequency scaling is unchanged: {error}"));
            None
        }
    }
}

fn start_governor(
    machine: KernelFiles,
    cores: &CpuList,
    directory: &RuntimeDirectory,
    report: NoteFn<'_>,
) -> Option<FrequencyControl> {
    let note = |error: &FrequencyError| report(error.to_string());
    let opened = FrequencyControl::take_control(machine, cores, directory);
    match &opened {
        Ok(frequency) => frequency.errors_of_foreign_policies().iter().for_each(note),
        Err(absent) => report(absent.to_string()),
    }
    opened.ok()
}

fn balancer_error(why: BalancerError) -> Error {
    match why {
        BalancerError::Options(error) => Error::usage(error.to_string()),
        BalancerError::Spawn(why) => Error::new(why.category(), why.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::path::Path;

    use tenmil_linux::frequency_control::{FrequencyControl, FrequencyRequest};
    use tenmil_linux::kernel_files::KernelFiles;
    use tenmil_linux::runtime_directory::RuntimeDirectory;

    use super::{frequency_text, restore_frequencies, start_governor};

    /// Recorded notes.
    #[derive(Default)]
    struct RecordingNotes(RefCell<Vec<String>>);

    impl RecordingNotes {
        fn collect_notes(&self, text: String) {
            self.0.borrow_mut().push(text);
        }
    }

    #[expect(clippy::disallowed_methods, reason = "it makes a tree as the kernel has one")]
    fn one_core_machine(root: &Path) -> KernelFiles {
        let cpufreq = root.join("sys/devices/system/cpu/cpu0/cpufreq");
        std::fs::create_dir_all(&cpufreq).unwrap();
        std::fs::write(cpufreq.join("scaling_min_freq"), "800000\n").unwrap();
        std::fs::write(cpufreq.join("scaling_max_freq"), "3600000\n").unwrap();
        KernelFiles::under_root(root)
    }

    #[test]
    fn machine_without_cpufreq_is_reported_in_one_line() {
        let root = tempfile::tempdir().unwrap();
        let directory = RuntimeDirectory::at_path(root.path().join("run")).unwrap();
        let reported = RecordingNotes::default();
        let cores = [0, 1].into_iter().collect();
        let machine = KernelFiles::under_root(root.path());
        assert!(
            start_governor(machine, &cores, &directory, &|text| reported.collect_notes(text))
                .is_none()
        );
        let expected = "frequency scaling is unchanged: the kernel has no cpufreq for cores 0-1";
        assert_eq!(*reported.0.borrow(), [expected]);
    }

    #[test]
    fn cores_controlled_by_another_run_are_left_alone() {
        let root = tempfile::tempdir().unwrap();
        let machine = one_core_machine(root.path());
        let directory = RuntimeDirectory::at_path(root.path().join("run")).unwrap();
        let reported = RecordingNotes::default();
        let report = |text| reported.collect_notes(text);
        let cores = [0].into_iter().collect();
        let held = start_governor(machine.clone(), &cores, &directory, &report).unwrap();
        assert_eq!(held.policies().len(), 1);
        let second = start_governor(machine, &cores, &directory, &report).unwrap();
        assert_eq!(
            (second.policies().len(), second.errors_of_foreign_policies().len()),
            (0, 1),
            "it is taken"
        );
        assert_eq!(
            frequency_text(true, Some(&held)),
            "lowest when idle, highest under load, on cores 0"
        );
        assert_eq!(frequency_text(true, Some(&second)), "requested, but not available");
        assert_eq!(frequency_text(false, None), "unchanged");
        let said = reported.0.borrow();
        assert!(said[0].starts_with("set frequency of core 0: held by "), "{said:?}");
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "it leaves a file as one that was killed does")]
    fn frequencies_of_a_killed_process_are_restored_at_the_next_start() {
        const MAX: &str = "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq";
        let root = tempfile::tempdir().unwrap();
        let machine = one_core_machine(root.path());
        let directory = RuntimeDirectory::at_path(root.path().join("run")).unwrap();
        let cores = [0].into_iter().collect();
        let mut killed =
            FrequencyControl::take_control(machine.clone(), &cores, &directory).unwrap();
        killed.apply_requests(&[(0, FrequencyRequest::Lowest)]);
        let journal = std::fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap().path();
        let left = std::fs::read(&journal).unwrap();
        drop(killed);
        std::fs::write(&journal, left).unwrap();
        machine.write_value(MAX, "800000").unwrap();
        let reported = RecordingNotes::default();
        restore_frequencies(&machine, &directory, &|text| reported.collect_notes(text));
        assert_eq!(machine.read_trimmed(MAX).as_deref(), Some("3600000"));
        assert!(reported.0.borrow().is_empty() && !journal.exists());
    }
}
