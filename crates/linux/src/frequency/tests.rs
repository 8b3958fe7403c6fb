//! cpufreq trees as drivers create them, and a model of a kernel that refuses writes.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;

use rustix::io::Errno;
use tenmil_base::{ErrorCategory, Random};

use super::{
    CpufreqFiles, CpufreqUnavailable, Frequency, FrequencyError, FrequencyRequest, recover,
};
use crate::CpuList;
use crate::kernel_files::{KernelFiles, tests::made_of};
use crate::runtime_directory::RuntimeDirectory;

fn cores(text: &str) -> CpuList {
    CpuList::parse(text).unwrap()
}

fn runtime(root: &Path) -> RuntimeDirectory {
    RuntimeDirectory::at(root.join("run")).unwrap()
}

fn path(core: u32, name: &str) -> String {
    format!("sys/devices/system/cpu/cpu{core}/cpufreq/{name}")
}

/// CpufreqFiles of one CPU.
type Tree = Vec<(String, String)>;

fn tree(core: u32, files: &[(&str, &str)]) -> Tree {
    files.iter().map(|(name, text)| (path(core, name), format!("{text}\n"))).collect()
}

fn machine_of(trees: &[Tree]) -> (tempfile::TempDir, KernelFiles) {
    let files: Vec<(&str, &str)> =
        trees.iter().flatten().map(|(path, text)| (path.as_str(), text.as_str())).collect();
    made_of(&files)
}

fn files_of(machine: &KernelFiles, core: u32) -> Vec<Option<String>> {
    ["scaling_min_freq", "scaling_max_freq", "energy_performance_preference"]
        .map(|name| machine.text(&path(core, name)))
        .to_vec()
}

/// Model of the kernel's behavior: it keeps the minimum below the maximum, and refuses configured
/// writes.
#[derive(Debug, Default)]
struct Kernel {
    files: RefCell<BTreeMap<String, String>>,
    refusals: RefCell<BTreeMap<String, Errno>>,
    writes: RefCell<Vec<(String, String)>>,
}

impl Kernel {
    fn new(trees: &[Tree]) -> Self {
        let kernel = Self::default();
        for (path, text) in trees.iter().flatten() {
            kernel.files.borrow_mut().insert(path.clone(), text.trim().into());
        }
        kernel
    }

    fn refuse(&self, core: u32, name: &str, errno: Errno) {
        self.refusals.borrow_mut().insert(path(core, name), errno);
    }

    fn number(&self, core: u32, name: &str) -> u64 {
        self.text(&path(core, name)).unwrap().parse().unwrap()
    }
}

impl CpufreqFiles for &Kernel {
    fn text(&self, path: &str) -> Option<String> {
        self.files.borrow().get(path).cloned()
    }

    fn write(&self, path: &str, value: &str) -> Result<(), Errno> {
        if let Some(errno) = self.refusals.borrow().get(path) {
            return Err(*errno);
        }
        let before = self.files.borrow_mut().insert(path.into(), value.into());
        let before = before.ok_or(Errno::NOENT)?;
        let number = |name: &str| {
            let other = path.rsplit_once('/').map(|(directory, _)| format!("{directory}/{name}"));
            self.text(&other.unwrap()).and_then(|text| text.parse::<u64>().ok())
        };
        if number("scaling_min_freq") > number("scaling_max_freq") {
            self.files.borrow_mut().insert(path.into(), before);
            return Err(Errno::INVAL);
        }
        self.writes.borrow_mut().push((path.into(), value.into()));
        Ok(())
    }
}

fn plain(core: u32) -> Tree {
    tree(core, &[("scaling_min_freq", "800000"), ("scaling_max_freq", "3600000")])
}

fn hinted(core: u32) -> Tree {
    let mut files = plain(core);
    files.extend(tree(core, &[("energy_performance_preference", "balance_performance")]));
    files
}

#[test]
fn a_machine_without_cpufreq_says_so_in_one_line() {
    let (root, machine) = made_of(&[("sys/devices/system/cpu/online", "0-1\n")]);
    let absent = Frequency::open(machine, &cores("0-1"), &runtime(root.path())).unwrap_err();
    assert_eq!(absent, CpufreqUnavailable::NoCpufreq { cores: cores("0-1") });
    assert_eq!(
        absent.to_string(),
        "frequency scaling is unchanged: the kernel has no cpufreq for cores 0-1"
    );
    assert_eq!(absent.category(), ErrorCategory::Environment);
}

#[test]
fn every_driver_is_taken_to_both_ends_and_back() {
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
        let files = [tree(0, &common), tree(0, &about)].concat();
        let (root, machine) = machine_of(&[files]);
        let before = files_of(&machine, 0);
        let directory = runtime(root.path());
        let mut frequency = Frequency::open(machine.clone(), &cores("0"), &directory).unwrap();
        let domain = &frequency.policies()[0];
        assert_eq!((domain.driver(), domain.governor()), (Some(driver), Some(governor)));
        assert_eq!(files_of(&machine, 0), before, "looking changes nothing");

        for (speed, khz, word) in [
            (FrequencyRequest::Highest, "3600000", "performance"),
            (FrequencyRequest::Lowest, "800000", "power"),
        ] {
            assert_eq!(frequency.apply(&[(0, speed)]), []);
            let khz = Some(khz.to_owned());
            let expected = [khz.clone(), khz, hint.then(|| word.to_owned())];
            assert_eq!(files_of(&machine, 0), expected, "{driver} at {speed:?}");
        }
        drop(frequency);
        assert_eq!(files_of(&machine, 0), before, "{driver} as it was");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "nothing is left");
    }
}

#[test]
fn steps_are_those_the_driver_names_within_the_range_that_was_found() {
    let mut files = plain(0);
    files.extend(tree(0, &[("scaling_available_frequencies", "4000000 2400000 1200000 400000 ")]));
    let kernel = Kernel::new(&[files]);
    let root = tempfile::tempdir().unwrap();
    let mut frequency = Frequency::open(&kernel, &cores("0"), &runtime(root.path())).unwrap();
    assert_eq!(frequency.policies()[0].steps_khz(), [800_000, 1_200_000, 2_400_000, 3_600_000]);
    let mut visited = Vec::new();
    let wishes = [
        FrequencyRequest::Up,
        FrequencyRequest::Down,
        FrequencyRequest::Down,
        FrequencyRequest::Keep,
        FrequencyRequest::Down,
        FrequencyRequest::Down,
    ];
    for speed in wishes.into_iter().chain([FrequencyRequest::Up]) {
        assert_eq!(frequency.apply(&[(0, speed)]), []);
        visited.push(kernel.number(0, "scaling_max_freq") / 1000);
    }
    assert_eq!(visited, [3600, 2400, 1200, 1200, 800, 800, 1200]);
}

#[test]
fn a_driver_that_names_no_frequencies_has_equal_steps() {
    let (root, machine) = machine_of(&[plain(0)]);
    let frequency = Frequency::open(machine, &cores("0"), &runtime(root.path())).unwrap();
    let steps = frequency.policies()[0].steps_khz();
    assert_eq!((steps.len(), steps[0], steps[1], steps[10]), (11, 800_000, 1_080_000, 3_600_000));
}

#[test]
fn a_range_that_is_a_point_leaves_nothing_to_choose() {
    let files = tree(0, &[("scaling_min_freq", "2000000"), ("scaling_max_freq", "2000000")]);
    let kernel = Kernel::new(&[files]);
    let root = tempfile::tempdir().unwrap();
    let mut frequency = Frequency::open(&kernel, &cores("0"), &runtime(root.path())).unwrap();
    for speed in [
        FrequencyRequest::Highest,
        FrequencyRequest::Lowest,
        FrequencyRequest::Up,
        FrequencyRequest::Down,
    ] {
        assert_eq!(frequency.apply(&[(0, speed)]), []);
    }
    assert!(kernel.writes.borrow().is_empty());
}

#[test]
fn the_range_is_never_upside_down_whatever_is_wished() {
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
        let kernel = Kernel::new(&[hinted(0), plain(1)]);
        let before = kernel.files.borrow().clone();
        let root = tempfile::tempdir().unwrap();
        let mut frequency = Frequency::open(&kernel, &cores("0-1"), &runtime(root.path())).unwrap();
        for _ in 0..40 {
            let mut draw = || speeds[usize::try_from(random.below(6)).unwrap()];
            let errors = frequency.apply(&[(0, draw()), (1, draw())]);
            assert_eq!(errors, [], "seed {seed}: the kernel refuses min > max");
        }
        drop(frequency);
        assert_eq!(*kernel.files.borrow(), before, "seed {seed}");
    }
}

#[test]
fn what_the_kernel_refuses_is_told_once_with_file_value_and_errno() {
    let kernel = Kernel::new(&[plain(0)]);
    kernel.refuse(0, "scaling_max_freq", Errno::ACCESS);
    kernel.refuse(0, "scaling_min_freq", Errno::ACCESS);
    let root = tempfile::tempdir().unwrap();
    let mut frequency = Frequency::open(&kernel, &cores("0"), &runtime(root.path())).unwrap();
    let errors = frequency.apply(&[(0, FrequencyRequest::Highest)]);
    let shown: Vec<String> = errors.iter().map(ToString::to_string).collect();
    let file = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_min_freq";
    assert_eq!(shown, [format!("write 3600000 to {file}: {}", Errno::ACCESS)]);
    assert!(errors[0].hint().unwrap().contains(&format!("`sudo chown $USER {file}`")));
    assert_eq!(frequency.apply(&[(0, FrequencyRequest::Highest)]), [], "told already");
    assert_eq!(frequency.apply(&[(0, FrequencyRequest::Lowest)]).len(), 1, "another value");

    kernel.refusals.borrow_mut().clear();
    assert_eq!(frequency.apply(&[(0, FrequencyRequest::Highest)]), []);
    assert_eq!(kernel.number(0, "scaling_min_freq"), 3_600_000, "tried again");
}

#[test]
fn a_refused_hint_does_not_keep_the_range_from_being_set() {
    // As intel_pstate and amd-pstate do under the governor `performance`.
    let kernel = Kernel::new(&[hinted(0)]);
    kernel.refuse(0, "energy_performance_preference", Errno::BUSY);
    let root = tempfile::tempdir().unwrap();
    let mut frequency = Frequency::open(&kernel, &cores("0"), &runtime(root.path())).unwrap();
    let errors = frequency.apply(&[(0, FrequencyRequest::Lowest)]);
    assert!(errors[0].to_string().starts_with("write power to /sys/"), "{errors:?}");
    assert_eq!(kernel.number(0, "scaling_max_freq"), 800_000);
    assert_eq!(frequency.restore(), [], "it was never changed, so there is nothing to put back");
}

#[test]
fn a_domain_with_a_foreign_core_is_never_made_slower() {
    let mut files = plain(0);
    files.extend(tree(0, &[("affected_cpus", "0 1")]));
    let kernel = Kernel::new(&[files]);
    let root = tempfile::tempdir().unwrap();
    let directory = runtime(root.path());
    let mut frequency = Frequency::open(&kernel, &cores("0"), &directory).unwrap();
    assert!(frequency.policies()[0].is_shared());
    frequency.apply(&[(0, FrequencyRequest::Highest)]);
    assert_eq!(kernel.number(0, "scaling_min_freq"), 3_600_000);
    for slower in [FrequencyRequest::Lowest, FrequencyRequest::Down, FrequencyRequest::Restore] {
        frequency.apply(&[(0, FrequencyRequest::Highest)]);
        frequency.apply(&[(0, slower)]);
        assert_eq!(frequency.policies()[0].range_khz(), (800_000, 3_600_000), "as it was found");
    }
    drop(frequency);

    let mut both = Frequency::open(&kernel, &cores("0-1"), &directory).unwrap();
    assert_eq!((both.policies().len(), both.policies()[0].is_shared()), (1, false));
    both.apply(&[(0, FrequencyRequest::Lowest), (1, FrequencyRequest::Highest)]);
    assert_eq!(kernel.number(0, "scaling_min_freq"), 3_600_000, "the greatest wish counts");
    both.apply(&[(0, FrequencyRequest::Lowest), (1, FrequencyRequest::Lowest)]);
    assert_eq!(kernel.number(0, "scaling_max_freq"), 800_000);
}

#[test]
fn after_a_crash_the_next_start_puts_everything_back() {
    let (root, machine) = machine_of(&[hinted(0), plain(1)]);
    let before = [files_of(&machine, 0), files_of(&machine, 1)];
    let directory = runtime(root.path());
    let mut frequency = Frequency::open(machine.clone(), &cores("0-1"), &directory).unwrap();
    frequency.apply(&[(0, FrequencyRequest::Lowest), (1, FrequencyRequest::Highest)]);

    assert_eq!(recover(&machine, &directory).cores, CpuList::default(), "its process lives");
    let journal = std::fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap().path();
    // An unlocked file is what a killed process leaves.
    let left = directory.path().join("1-0.frequency");
    std::fs::copy(&journal, &left).unwrap();
    assert_ne!([files_of(&machine, 0), files_of(&machine, 1)], before);
    let recovered = recover(&machine, &directory);
    assert_eq!((recovered.cores, recovered.errors), (cores("0-1"), Vec::new()));
    assert_eq!([files_of(&machine, 0), files_of(&machine, 1)], before);
    assert!(!left.exists() && journal.exists());
}

#[test]
fn what_cannot_be_put_back_is_kept_for_somebody_who_can() {
    let kernel = Kernel::new(&[plain(0)]);
    let root = tempfile::tempdir().unwrap();
    let directory = runtime(root.path());
    let left = directory.path().join("1-0.frequency");
    std::fs::write(&left, "0 400000 3000000 -\n7 1 2 -\n").unwrap();
    kernel.refuse(0, "scaling_max_freq", Errno::PERM);
    let recovered = recover(&&kernel, &directory);
    assert_eq!((recovered.cores.len(), recovered.errors.len()), (0, 1), "there is no core 7");
    assert!(left.exists());
    kernel.refusals.borrow_mut().clear();
    assert_eq!(recover(&&kernel, &directory).cores, cores("0"));
    assert_eq!(kernel.number(0, "scaling_min_freq"), 400_000);
    assert!(!left.exists());
}

#[test]
fn nothing_is_believed_that_was_not_written_by_us() {
    let kernel = Kernel::new(&[hinted(0)]);
    let root = tempfile::tempdir().unwrap();
    let directory = runtime(root.path());
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
    let recovered = recover(&&kernel, &directory);
    assert_eq!(recovered.errors.len(), lines.len());
    for (error, line) in recovered.errors.iter().zip(lines) {
        assert!(matches!(error, FrequencyError::Journal { .. }), "{error}");
        assert!(error.to_string().ends_with(&format!("line is '{line}'")), "{error}");
    }
    assert!(kernel.writes.borrow().is_empty());
}

#[test]
fn a_core_that_another_process_has_in_charge_is_left_to_it() {
    let kernel = Kernel::new(&[plain(0), plain(1)]);
    let root = tempfile::tempdir().unwrap();
    let directory = runtime(root.path());
    let first = Frequency::open(&kernel, &cores("0"), &directory).unwrap();
    let mut second = Frequency::open(&kernel, &cores("0-1"), &directory).unwrap();
    assert_eq!(second.policies().len(), 1);
    assert!(
        matches!(
            second.controlled_elsewhere(),
            [FrequencyError::ControlledElsewhere { core: 0, .. }]
        ),
        "{second:?}"
    );
    second.apply(&[(0, FrequencyRequest::Lowest), (1, FrequencyRequest::Lowest)]);
    assert_eq!(kernel.number(0, "scaling_max_freq"), 3_600_000);
    assert_eq!(kernel.number(1, "scaling_max_freq"), 800_000);
    drop(first);
}

#[test]
fn without_a_place_to_write_it_down_nothing_is_changed() {
    let kernel = Kernel::new(&[plain(0)]);
    let root = tempfile::tempdir().unwrap();
    let directory = runtime(root.path());
    std::fs::remove_dir(directory.path()).unwrap();
    let absent = Frequency::open(&kernel, &cores("0"), &directory).unwrap_err();
    assert!(
        matches!(absent, CpufreqUnavailable::NoJournal { found: Errno::NOENT, .. }),
        "{absent}"
    );
}

#[test]
fn the_file_is_for_its_owner_alone() {
    use std::os::unix::fs::MetadataExt;
    let (root, machine) = machine_of(&[plain(0)]);
    let directory = runtime(root.path());
    let _frequency = Frequency::open(machine, &cores("0"), &directory).unwrap();
    let journal = std::fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap();
    assert_eq!(journal.metadata().unwrap().mode() & 0o777, 0o600);
}

/// A machine that detects unlocked access.
struct Jealous<'a> {
    machine: &'a KernelFiles,
    directory: &'a RuntimeDirectory,
    looks: std::cell::Cell<u32>,
    is_trusting: std::cell::Cell<bool>,
}

impl Jealous<'_> {
    fn check(&self) {
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

impl CpufreqFiles for &Jealous<'_> {
    fn text(&self, path: &str) -> Option<String> {
        self.check();
        self.machine.text(path)
    }

    fn write(&self, path: &str, value: &str) -> Result<(), Errno> {
        self.check();
        self.machine.write(path, value)
    }
}

#[test]
fn nobody_comes_between_what_was_found_and_who_has_it() {
    let (root, machine) = machine_of(&[plain(0)]);
    let directory = runtime(root.path());
    let (looks, is_trusting) = Default::default();
    let jealous = Jealous { machine: &machine, directory: &directory, looks, is_trusting };
    let looks = || jealous.looks.replace(0) > 0;
    let mut frequency = Frequency::open(&jealous, &cores("0"), &directory).unwrap();
    assert!(looks());
    // The owner may change it without the lock.
    jealous.is_trusting.set(true);
    frequency.apply(&[(0, FrequencyRequest::Lowest)]);
    jealous.is_trusting.set(false);
    frequency.restore();
    assert!(looks());
    drop(frequency);
    // A process takes control, lowers the frequency and is killed.
    let mut killed = Frequency::open(machine.clone(), &cores("0"), &directory).unwrap();
    killed.apply(&[(0, FrequencyRequest::Lowest)]);
    let journal = std::fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap().path();
    let left = std::fs::read(&journal).unwrap();
    drop(killed);
    std::fs::write(&journal, left).unwrap();
    looks();
    assert_eq!(recover(&&jealous, &directory).cores, cores("0"));
    assert!(looks());
}
