//! cpufreq trees as drivers create them, and a model of a kernel that refuses writes.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;

use rustix::io::Errno;
use tenmil_base::{ErrorCategory, Random};

use super::{
    CpufreqFiles, CpufreqUnavailable, FrequencyControl, FrequencyError, FrequencyRequest,
    restore_after_crash,
};
use crate::CpuList;
use crate::kernel_files::{KernelFiles, tests::fake_kernel_files};
use crate::runtime_directory::RuntimeDirectory;

fn parse_cpu_list(text: &str) -> CpuList {
    CpuList::parse(text).unwrap()
}

fn runtime_directory(root: &Path) -> RuntimeDirectory {
    RuntimeDirectory::at_path(root.join("run")).unwrap()
}

fn cpufreq_path(core: u32, name: &str) -> String {
    format!("sys/devices/system/cpu/cpu{core}/cpufreq/{name}")
}

/// CpufreqFiles of one CPU.
type TestFiles = Vec<(String, String)>;

fn cpufreq_files_of_cpu(core: u32, files: &[(&str, &str)]) -> TestFiles {
    files.iter().map(|(name, text)| (cpufreq_path(core, name), format!("{text}\n"))).collect()
}

fn test_machine(trees: &[TestFiles]) -> (tempfile::TempDir, KernelFiles) {
    let files: Vec<(&str, &str)> =
        trees.iter().flatten().map(|(path, text)| (path.as_str(), text.as_str())).collect();
    fake_kernel_files(&files)
}

fn files_of_policy(machine: &KernelFiles, core: u32) -> Vec<Option<String>> {
    ["scaling_min_freq", "scaling_max_freq", "energy_performance_preference"]
        .map(|name| machine.read_trimmed(&cpufreq_path(core, name)))
        .to_vec()
}

/// Model of the kernel's behavior: it keeps the minimum below the maximum, and refuses configured
/// writes.
#[derive(Debug, Default)]
struct FakeKernel {
    files: RefCell<BTreeMap<String, String>>,
    refusals: RefCell<BTreeMap<String, Errno>>,
    writes: RefCell<Vec<(String, String)>>,
}

impl FakeKernel {
    fn new(trees: &[TestFiles]) -> Self {
        let kernel = Self::default();
        for (path, text) in trees.iter().flatten() {
            kernel.files.borrow_mut().insert(path.clone(), text.trim().into());
        }
        kernel
    }

    fn reject_writes(&self, core: u32, name: &str, errno: Errno) {
        self.refusals.borrow_mut().insert(cpufreq_path(core, name), errno);
    }

    fn read_number(&self, core: u32, name: &str) -> u64 {
        self.read_trimmed(&cpufreq_path(core, name)).unwrap().parse().unwrap()
    }
}

impl CpufreqFiles for &FakeKernel {
    fn read_trimmed(&self, path: &str) -> Option<String> {
        self.files.borrow().get(path).cloned()
    }

    fn write_value(&self, path: &str, value: &str) -> Result<(), Errno> {
        if let Some(errno) = self.refusals.borrow().get(path) {
            return Err(*errno);
        }
        let before = self.files.borrow_mut().insert(path.into(), value.into());
        let before = before.ok_or(Errno::NOENT)?;
        let number = |name: &str| {
            let other = path.rsplit_once('/').map(|(directory, _)| format!("{directory}/{name}"));
            self.read_trimmed(&other.unwrap()).and_then(|text| text.parse::<u64>().ok())
        };
        if number("scaling_min_freq") > number("scaling_max_freq") {
            self.files.borrow_mut().insert(path.into(), before);
            return Err(Errno::INVAL);
        }
        self.writes.borrow_mut().push((path.into(), value.into()));
        Ok(())
    }
}

fn files_without_energy_preference(core: u32) -> TestFiles {
    cpufreq_files_of_cpu(core, &[("scaling_min_freq", "800000"), ("scaling_max_freq", "3600000")])
}

fn files_with_energy_preference(core: u32) -> TestFiles {
    let mut files = files_without_energy_preference(core);
    files.extend(cpufreq_files_of_cpu(
        core,
        &[("energy_performance_preference", "balance_performance")],
    ));
    files
}

#[test]
fn missing_cpufreq_is_reported_in_one_line() {
    let (root, machine) = fake_kernel_files(&[("sys/devices/system/cpu/online", "0-1\n")]);
    let absent = FrequencyControl::take_control(
        machine,
        &parse_cpu_list("0-1"),
        &runtime_directory(root.path()),
    )
    .unwrap_err();
    assert_eq!(absent, CpufreqUnavailable::NoCpufreq { cores: parse_cpu_list("0-1") });
    assert_eq!(
        absent.to_string(),
        "frequency scaling is unchanged: the kernel has no cpufreq for cores 0-1"
    );
    assert_eq!(absent.category(), ErrorCategory::Environment);
}

#[test]
fn every_driver_is_set_to_both_limits_and_restored() {
    let common = [("scaling_min_freq", "800000"), ("scaling_max_freq", "3600000")];
    for (driver, governor, more, hint) in [
        (
            "acpi-cpufreq",
            "ondemand",
            ("scaling_available_frequencies", "3600000 2400000 800000"),
            false,
        ),
        ("intel_pstate", "powersave", ("energy_performance_preference", "balance_power"), true),
        ("intel_cpufreq", "schedutil", ("scaling_cur_freq", "800000"), false),
        ("amd-pstate-epp", "powersave", ("energy_performance_preference", "balance_power"), true),
        ("amd-pstate", "schedutil", ("amd_pstate_highest_perf", "166"), false),
        ("cppc_cpufreq", "schedutil", ("feedback_ctrs", "ref:1 del:1"), false),
    ] {
        let about = [("scaling_driver", driver), ("scaling_governor", governor), more];
        let files = [cpufreq_files_of_cpu(0, &common), cpufreq_files_of_cpu(0, &about)].concat();
        let (root, machine) = test_machine(&[files]);
        let before = files_of_policy(&machine, 0);
        let directory = runtime_directory(root.path());
        let mut frequency =
            FrequencyControl::take_control(machine.clone(), &parse_cpu_list("0"), &directory)
                .unwrap();
        let domain = &frequency.policies()[0];
        assert_eq!((domain.driver(), domain.governor()), (Some(driver), Some(governor)));
        assert_eq!(files_of_policy(&machine, 0), before, "looking changes nothing");

        for (speed, khz, word) in [
            (FrequencyRequest::Highest, "3600000", "performance"),
            (FrequencyRequest::Lowest, "800000", "power"),
        ] {
            assert_eq!(frequency.apply_requests(&[(0, speed)]), []);
            let khz = Some(khz.to_owned());
            let expected = [khz.clone(), khz, hint.then(|| word.to_owned())];
            assert_eq!(files_of_policy(&machine, 0), expected, "{driver} at {speed:?}");
        }
        drop(frequency);
        assert_eq!(files_of_policy(&machine, 0), before, "{driver} as it was");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "nothing is left");
    }
}

#[test]
fn steps_are_the_listed_frequencies_within_the_found_range() {
    let mut files = files_without_energy_preference(0);
    files.extend(cpufreq_files_of_cpu(
        0,
        &[("scaling_available_frequencies", "4000000 2400000 1200000 400000 ")],
    ));
    let kernel = FakeKernel::new(&[files]);
    let root = tempfile::tempdir().unwrap();
    let mut frequency = FrequencyControl::take_control(
        &kernel,
        &parse_cpu_list("0"),
        &runtime_directory(root.path()),
    )
    .unwrap();
    assert_eq!(
        frequency.policies()[0].frequencies_khz(),
        [800_000, 1_200_000, 2_400_000, 3_600_000]
    );
    let mut visited = Vec::new();
    let requests = [
        FrequencyRequest::Up,
        FrequencyRequest::Down,
        FrequencyRequest::Down,
        FrequencyRequest::Keep,
        FrequencyRequest::Down,
        FrequencyRequest::Down,
    ];
    for speed in requests.into_iter().chain([FrequencyRequest::Up]) {
        assert_eq!(frequency.apply_requests(&[(0, speed)]), []);
        visited.push(kernel.read_number(0, "scaling_max_freq") / 1000);
    }
    assert_eq!(visited, [3600, 2400, 1200, 1200, 800, 800, 1200]);
}

#[test]
fn driver_without_frequency_list_has_equal_steps() {
    let (root, machine) = test_machine(&[files_without_energy_preference(0)]);
    let frequency = FrequencyControl::take_control(
        machine,
        &parse_cpu_list("0"),
        &runtime_directory(root.path()),
    )
    .unwrap();
    let steps = frequency.policies()[0].frequencies_khz();
    assert_eq!((steps.len(), steps[0], steps[1], steps[10]), (11, 800_000, 1_080_000, 3_600_000));
}

#[test]
fn single_frequency_range_has_no_steps() {
    let files = cpufreq_files_of_cpu(
        0,
        &[("scaling_min_freq", "2000000"), ("scaling_max_freq", "2000000")],
    );
    let kernel = FakeKernel::new(&[files]);
    let root = tempfile::tempdir().unwrap();
    let mut frequency = FrequencyControl::take_control(
        &kernel,
        &parse_cpu_list("0"),
        &runtime_directory(root.path()),
    )
    .unwrap();
    for speed in [
        FrequencyRequest::Highest,
        FrequencyRequest::Lowest,
        FrequencyRequest::Up,
        FrequencyRequest::Down,
    ] {
        assert_eq!(frequency.apply_requests(&[(0, speed)]), []);
    }
    assert!(kernel.writes.borrow().is_empty());
}

#[test]
fn range_minimum_never_exceeds_its_maximum() {
    let speeds = [
        FrequencyRequest::Lowest,
        FrequencyRequest::Down,
        FrequencyRequest::Keep,
        FrequencyRequest::Restore,
        FrequencyRequest::Up,
        FrequencyRequest::Highest,
    ];
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let kernel =
            FakeKernel::new(&[files_with_energy_preference(0), files_without_energy_preference(1)]);
        let before = kernel.files.borrow().clone();
        let root = tempfile::tempdir().unwrap();
        let mut frequency = FrequencyControl::take_control(
            &kernel,
            &parse_cpu_list("0-1"),
            &runtime_directory(root.path()),
        )
        .unwrap();
        for _ in 0..40 {
            let mut draw = || speeds[usize::try_from(random.below(6)).unwrap()];
            let errors = frequency.apply_requests(&[(0, draw()), (1, draw())]);
            assert_eq!(errors, [], "seed {seed}: the kernel refuses min > max");
        }
        drop(frequency);
        assert_eq!(*kernel.files.borrow(), before, "seed {seed}");
    }
}

#[test]
fn rejected_write_is_reported_once_with_file_value_and_errno() {
    let kernel = FakeKernel::new(&[files_without_energy_preference(0)]);
    kernel.reject_writes(0, "scaling_max_freq", Errno::ACCESS);
    kernel.reject_writes(0, "scaling_min_freq", Errno::ACCESS);
    let root = tempfile::tempdir().unwrap();
    let mut frequency = FrequencyControl::take_control(
        &kernel,
        &parse_cpu_list("0"),
        &runtime_directory(root.path()),
    )
    .unwrap();
    let errors = frequency.apply_requests(&[(0, FrequencyRequest::Highest)]);
    let shown: Vec<String> = errors.iter().map(ToString::to_string).collect();
    let file = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_min_freq";
    assert_eq!(shown, [format!("write 3600000 to {file}: {}", Errno::ACCESS)]);
    assert!(errors[0].hint().unwrap().contains(&format!("`sudo chown $USER {file}`")));
    assert_eq!(frequency.apply_requests(&[(0, FrequencyRequest::Highest)]), [], "told already");
    assert_eq!(
        frequency.apply_requests(&[(0, FrequencyRequest::Lowest)]).len(),
        1,
        "another value"
    );

    kernel.refusals.borrow_mut().clear();
    assert_eq!(frequency.apply_requests(&[(0, FrequencyRequest::Highest)]), []);
    assert_eq!(kernel.read_number(0, "scaling_min_freq"), 3_600_000, "tried again");
}

#[test]
fn rejected_hint_does_not_prevent_the_range_change() {
    // As intel_pstate and amd-pstate do under the governor `performance`.
    let kernel = FakeKernel::new(&[files_with_energy_preference(0)]);
    kernel.reject_writes(0, "energy_performance_preference", Errno::BUSY);
    let root = tempfile::tempdir().unwrap();
    let mut frequency = FrequencyControl::take_control(
        &kernel,
        &parse_cpu_list("0"),
        &runtime_directory(root.path()),
    )
    .unwrap();
    let errors = frequency.apply_requests(&[(0, FrequencyRequest::Lowest)]);
    assert!(errors[0].to_string().starts_with("write power to /sys/"), "{errors:?}");
    assert_eq!(kernel.read_number(0, "scaling_max_freq"), 800_000);
    assert_eq!(
        frequency.restore_found(),
        [],
        "it was never changed, so there is nothing to put back"
    );
}

#[test]
fn policy_with_a_foreign_cpu_is_never_slowed() {
    let mut files = files_without_energy_preference(0);
    files.extend(cpufreq_files_of_cpu(0, &[("affected_cpus", "0 1")]));
    let kernel = FakeKernel::new(&[files]);
    let root = tempfile::tempdir().unwrap();
    let directory = runtime_directory(root.path());
    let mut frequency =
        FrequencyControl::take_control(&kernel, &parse_cpu_list("0"), &directory).unwrap();
    assert!(frequency.policies()[0].is_shared());
    frequency.apply_requests(&[(0, FrequencyRequest::Highest)]);
    assert_eq!(kernel.read_number(0, "scaling_min_freq"), 3_600_000);
    for slower in [FrequencyRequest::Lowest, FrequencyRequest::Down, FrequencyRequest::Restore] {
        frequency.apply_requests(&[(0, FrequencyRequest::Highest)]);
        frequency.apply_requests(&[(0, slower)]);
        assert_eq!(frequency.policies()[0].range_khz(), (800_000, 3_600_000), "as it was found");
    }
    drop(frequency);

    let mut both =
        FrequencyControl::take_control(&kernel, &parse_cpu_list("0-1"), &directory).unwrap();
    assert_eq!((both.policies().len(), both.policies()[0].is_shared()), (1, false));
    both.apply_requests(&[(0, FrequencyRequest::Lowest), (1, FrequencyRequest::Highest)]);
    assert_eq!(kernel.read_number(0, "scaling_min_freq"), 3_600_000, "the greatest request counts");
    both.apply_requests(&[(0, FrequencyRequest::Lowest), (1, FrequencyRequest::Lowest)]);
    assert_eq!(kernel.read_number(0, "scaling_max_freq"), 800_000);
}

#[test]
fn next_start_after_a_crash_restores_everything() {
    let (root, machine) =
        test_machine(&[files_with_energy_preference(0), files_without_energy_preference(1)]);
    let before = [files_of_policy(&machine, 0), files_of_policy(&machine, 1)];
    let directory = runtime_directory(root.path());
    let mut frequency =
        FrequencyControl::take_control(machine.clone(), &parse_cpu_list("0-1"), &directory)
            .unwrap();
    frequency.apply_requests(&[(0, FrequencyRequest::Lowest), (1, FrequencyRequest::Highest)]);

    assert_eq!(
        restore_after_crash(&machine, &directory).cores,
        CpuList::default(),
        "its process lives"
    );
    let journal = std::fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap().path();
    // An unlocked file is what a killed process leaves.
    let left = directory.path().join("1-0.frequency");
    std::fs::copy(&journal, &left).unwrap();
    assert_ne!([files_of_policy(&machine, 0), files_of_policy(&machine, 1)], before);
    let recovered = restore_after_crash(&machine, &directory);
    assert_eq!((recovered.cores, recovered.errors), (parse_cpu_list("0-1"), Vec::new()));
    assert_eq!([files_of_policy(&machine, 0), files_of_policy(&machine, 1)], before);
    assert!(!left.exists() && journal.exists());
}

#[test]
fn unrestorable_values_stay_in_the_journal() {
    let kernel = FakeKernel::new(&[files_without_energy_preference(0)]);
    let root = tempfile::tempdir().unwrap();
    let directory = runtime_directory(root.path());
    let left = directory.path().join("1-0.frequency");
    std::fs::write(&left, "0 400000 3000000 -\n7 1 2 -\n").unwrap();
    kernel.reject_writes(0, "scaling_max_freq", Errno::PERM);
    let recovered = restore_after_crash(&&kernel, &directory);
    assert_eq!((recovered.cores.len(), recovered.errors.len()), (0, 1), "there is no core 7");
    assert!(left.exists());
    kernel.refusals.borrow_mut().clear();
    assert_eq!(restore_after_crash(&&kernel, &directory).cores, parse_cpu_list("0"));
    assert_eq!(kernel.read_number(0, "scaling_min_freq"), 400_000);
    assert!(!left.exists());
}

#[test]
fn foreign_journal_content_is_ignored() {
    let kernel = FakeKernel::new(&[files_with_energy_preference(0)]);
    let root = tempfile::tempdir().unwrap();
    let directory = runtime_directory(root.path());
    let lines = [
        "",
        "0",
        "0 1 2",
        "0-1 1 2 -",
        "../0 1 2 -",
        "0 2 1 -",
        "0 1 2 - -",
        "0 1 2 power\u{9}",
        "0 1 x -",
        "9999 1 2 -",
    ];
    std::fs::write(directory.path().join("1-0.frequency"), lines.join("\n")).unwrap();
    let recovered = restore_after_crash(&&kernel, &directory);
    assert_eq!(recovered.errors.len(), lines.len());
    for (error, line) in recovered.errors.iter().zip(lines) {
        assert!(matches!(error, FrequencyError::Journal { .. }), "{error}");
        assert!(error.to_string().ends_with(&format!("line is '{line}'")), "{error}");
    }
    assert!(kernel.writes.borrow().is_empty());
}

#[test]
fn cpu_controlled_by_another_process_is_left_alone() {
    let kernel =
        FakeKernel::new(&[files_without_energy_preference(0), files_without_energy_preference(1)]);
    let root = tempfile::tempdir().unwrap();
    let directory = runtime_directory(root.path());
    let first = FrequencyControl::take_control(&kernel, &parse_cpu_list("0"), &directory).unwrap();
    let mut second =
        FrequencyControl::take_control(&kernel, &parse_cpu_list("0-1"), &directory).unwrap();
    assert_eq!(second.policies().len(), 1);
    assert!(
        matches!(
            second.errors_of_foreign_policies(),
            [FrequencyError::ControlledElsewhere { core: 0, .. }]
        ),
        "{second:?}"
    );
    second.apply_requests(&[(0, FrequencyRequest::Lowest), (1, FrequencyRequest::Lowest)]);
    assert_eq!(kernel.read_number(0, "scaling_max_freq"), 3_600_000);
    assert_eq!(kernel.read_number(1, "scaling_max_freq"), 800_000);
    drop(first);
}

#[test]
fn nothing_is_changed_if_the_journal_cannot_be_written() {
    let kernel = FakeKernel::new(&[files_without_energy_preference(0)]);
    let root = tempfile::tempdir().unwrap();
    let directory = runtime_directory(root.path());
    std::fs::remove_dir(directory.path()).unwrap();
    let absent =
        FrequencyControl::take_control(&kernel, &parse_cpu_list("0"), &directory).unwrap_err();
    assert!(
        matches!(absent, CpufreqUnavailable::NoJournal { found: Errno::NOENT, .. }),
        "{absent}"
    );
}

#[test]
fn journal_is_private_to_its_owner() {
    use std::os::unix::fs::MetadataExt;
    let (root, machine) = test_machine(&[files_without_energy_preference(0)]);
    let directory = runtime_directory(root.path());
    let _frequency =
        FrequencyControl::take_control(machine, &parse_cpu_list("0"), &directory).unwrap();
    let journal = std::fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap();
    assert_eq!(journal.metadata().unwrap().mode() & 0o777, 0o600);
}

/// A machine that detects unlocked access.
struct LockCheckingFiles<'a> {
    machine: &'a KernelFiles,
    directory: &'a RuntimeDirectory,
    looks: std::cell::Cell<u32>,
    is_trusting: std::cell::Cell<bool>,
}

impl LockCheckingFiles<'_> {
    fn check_locked(&self) {
        use rustix::fs::{FlockOperation, flock};
        if self.is_trusting.get() {
            return;
        }
        let other = std::fs::File::open(self.directory.path()).unwrap();
        let locked = flock(&other, FlockOperation::NonBlockingLockExclusive);
        assert_eq!(locked, Err(Errno::WOULDBLOCK), "another process could come in between");
        self.looks.set(self.looks.get() + 1);
    }
}

impl CpufreqFiles for &LockCheckingFiles<'_> {
    fn read_trimmed(&self, path: &str) -> Option<String> {
        self.check_locked();
        self.machine.read_trimmed(path)
    }

    fn write_value(&self, path: &str, value: &str) -> Result<(), Errno> {
        self.check_locked();
        self.machine.write_value(path, value)
    }
}

#[test]
fn frequency_files_are_read_and_written_under_one_lock() {
    let (root, machine) = test_machine(&[files_without_energy_preference(0)]);
    let directory = runtime_directory(root.path());
    let (looks, is_trusting) = Default::default();
    let jealous =
        LockCheckingFiles { machine: &machine, directory: &directory, looks, is_trusting };
    let looks = || jealous.looks.replace(0) > 0;
    let mut frequency =
        FrequencyControl::take_control(&jealous, &parse_cpu_list("0"), &directory).unwrap();
    assert!(looks());
    // The owner may change it without the lock.
    jealous.is_trusting.set(true);
    frequency.apply_requests(&[(0, FrequencyRequest::Lowest)]);
    jealous.is_trusting.set(false);
    frequency.restore_found();
    assert!(looks());
    drop(frequency);
    // A process takes control, lowers the frequency and is killed.
    let mut killed =
        FrequencyControl::take_control(machine.clone(), &parse_cpu_list("0"), &directory).unwrap();
    killed.apply_requests(&[(0, FrequencyRequest::Lowest)]);
    let journal = std::fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap().path();
    let left = std::fs::read(&journal).unwrap();
    drop(killed);
    std::fs::write(&journal, left).unwrap();
    looks();
    assert_eq!(restore_after_crash(&&jealous, &directory).cores, parse_cpu_list("0"));
    assert!(looks());
}
