//! Resource usage of processes.

mod process_identity;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, Timespec, clock_gettime};
use tenmil_base::Span;

pub use self::process_identity::ProcessIdentity;
use crate::kernel_files::KernelFiles;

/// Resource usage of a process. Values that cannot be determined are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessStats {
    /// CPU time of all threads.
    pub cpu_time: Span,
    /// Time since the process started.
    pub age: Option<Span>,
    /// Resident memory.
    pub resident_bytes: Option<u64>,
    /// Peak resident memory.
    pub resident_max_bytes: Option<u64>,
    /// Open descriptors.
    pub descriptors: Option<u64>,
    /// Number of threads.
    pub threads: Option<u64>,
}

/// Unit in which the kernel counts CPU time.
const TICK_NS: u64 = 10_000_000;

impl ProcessStats {
    /// Reads the usage of this process. Reads a few files; not for the I/O path.
    pub fn read() -> Self {
        let descriptors = std::fs::read_dir("/proc/self/fd").ok().map(Iterator::count);
        Self {
            cpu_time: clock_time(ClockId::ProcessCPUTime),
            // One descriptor is that of the directory being read.
            descriptors: descriptors.map(|count| count as u64 - 1),
            ..Self::from_kernel_files(&KernelFiles::live_system(), clock_time(ClockId::Boottime))
        }
    }

    /// Parses the kernel's files, at `now` after boot.
    fn from_kernel_files(machine: &KernelFiles, now: Span) -> Self {
        let status = machine.read_trimmed("proc/self/status").unwrap_or_default();
        let kib = |key| Some(status_field(&status, key)?.saturating_mul(1024));
        Self {
            age: start_time_after_boot(machine)
                .map(|start| Span { ns: now.ns.saturating_sub(start.ns) }),
            resident_bytes: kib("VmRSS"),
            resident_max_bytes: kib("VmHWM"),
            threads: status_field(&status, "Threads"),
            ..Self::default()
        }
    }
}

/// Whether the kernel may write core dumps of this process (RLIMIT_CORE).
pub fn may_dump_core() -> bool {
    getrlimit(Resource::Core).current != Some(0)
}

/// Lifts the limit of locked memory (RLIMIT_MEMLOCK) of this process, which needs CAP_SYS_RESOURCE.
///
/// # Errors
///
/// The error of the system call.
pub fn lift_memory_lock_limit() -> Result<(), rustix::io::Errno> {
    setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None })
}

/// Command line of process `pid`, if it may be read.
pub fn command_line(pid: u32) -> Option<Vec<String>> {
    command_line_words(&KernelFiles::live_system(), pid)
}

fn command_line_words(machine: &KernelFiles, pid: u32) -> Option<Vec<String>> {
    let text = machine.read_trimmed(&format!("proc/{pid}/cmdline"))?;
    let words = text.strip_suffix('\0').unwrap_or(&text).split('\0');
    Some(words.map(str::to_owned).collect())
}

/// Name of process `pid`, available until the process is reaped (proc_pid_stat(5), field 2).
pub fn process_name(pid: u32) -> Option<String> {
    process_name_from(&KernelFiles::live_system(), pid)
}

fn process_name_from(machine: &KernelFiles, pid: u32) -> Option<String> {
    let text = machine.read_trimmed(&format!("proc/{pid}/stat"))?;
    let (head, _) = text.rsplit_once(')')?;
    Some(head.split_once('(')?.1.to_owned())
}

/// Whether process `pid` has exited or is exiting, so that the kernel only finishes work on its
/// behalf.
pub fn has_ended(pid: u32) -> bool {
    is_dead_or_exiting(&KernelFiles::live_system(), pid)
}

/// CPU time of process `pid` and of its children that it has waited for, in steps of 10 ms. `None`
/// if the process does not exist.
pub fn cpu_time_with_reaped_children(pid: u32) -> Option<Span> {
    cpu_time(&KernelFiles::live_system(), pid)
}

/// proc_pid_stat(5), fields 14 to 17, in ticks; the kernel guarantees 100 per second.
fn cpu_time(machine: &KernelFiles, pid: u32) -> Option<Span> {
    const BEFORE_TIMES: usize = 14 - 3;
    let text = machine.read_trimmed(&format!("proc/{pid}/stat"))?;
    let words = text.rsplit_once(')')?.1.split_whitespace().skip(BEFORE_TIMES);
    let ticks: u64 = words.take(4).filter_map(|word| word.parse::<u64>().ok()).sum();
    Some(Span { ns: ticks.saturating_mul(TICK_NS) })
}

/// proc_pid_stat(5), field 3 (state) and field 9 (flags).
fn is_dead_or_exiting(machine: &KernelFiles, pid: u32) -> bool {
    const FLAGS_AFTER_STATE: usize = 9 - 3;
    /// `PF_EXITING` (linux/sched.h).
    const EXITING: u64 = 4;
    let Some(text) = machine.read_trimmed(&format!("proc/{pid}/stat")) else { return true };
    let Some((_, after_name)) = text.rsplit_once(')') else { return false };
    let mut words = after_name.split_whitespace();
    let is_dead = words.clone().next().is_some_and(|state| matches!(state, "Z" | "X"));
    let flags = words.nth(FLAGS_AFTER_STATE).and_then(|word| word.parse::<u64>().ok());
    is_dead || flags.is_some_and(|flags| flags & EXITING != 0)
}

/// Start time of the process after boot: proc_pid_stat(5), field 22, in ticks of 10 ms. The second
/// field, the name, may contain any character.
fn start_time_after_boot(machine: &KernelFiles) -> Option<Span> {
    const AFTER_NAME: usize = 22 - 3;
    let text = machine.read_trimmed("proc/self/stat")?;
    let ticks: u64 = text.rsplit_once(')')?.1.split_whitespace().nth(AFTER_NAME)?.parse().ok()?;
    Some(Span { ns: ticks.saturating_mul(TICK_NS) })
}

/// Number after a key: `VmRSS:     1234 kB`.
fn status_field(status: &str, key: &str) -> Option<u64> {
    let mut pairs = status.lines().filter_map(|line| line.split_once(':'));
    pairs.find(|(name, _)| *name == key)?.1.split_whitespace().next()?.parse().ok()
}

fn clock_time(clock: ClockId) -> Span {
    let Timespec { tv_sec, tv_nsec } = clock_gettime(clock);
    let whole = u64::try_from(tv_sec).unwrap_or(0).saturating_mul(1_000_000_000);
    Span { ns: whole + u64::try_from(tv_nsec).unwrap_or(0) }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Span;

    use super::{
        ProcessStats, command_line, command_line_words, cpu_time, cpu_time_with_reaped_children,
        has_ended, is_dead_or_exiting, process_name_from,
    };
    use crate::kernel_files::tests::fake_kernel_files;

    #[test]
    fn kernel_files_are_parsed() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 1 0 0 0 5 6 0 0 20 0 4 0 3000 999 88";
        let (_root, machine) = fake_kernel_files(&[
            ("proc/self/stat", stat),
            ("proc/self/status", "Name:\ta\nVmHWM:\t  300 kB\nVmRSS:\t  200 kB\nThreads:\t4\n"),
            ("proc/9/cmdline", "tenmil\0perf\0\0-t\0"),
        ]);
        let usage = ProcessStats::from_kernel_files(&machine, Span::from_secs(50));
        assert_eq!(usage.age, Some(Span::from_secs(20)));
        assert_eq!(usage.resident_bytes, Some(200 * 1024));
        assert_eq!(usage.resident_max_bytes, Some(300 * 1024));
        assert_eq!(usage.threads, Some(4));
        assert_eq!(command_line_words(&machine, 9).unwrap(), ["tenmil", "perf", "", "-t"]);
        assert_eq!(command_line_words(&machine, 8), None);
    }

    #[test]
    fn tree_cpu_time_includes_reaped_children() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 1 0 0 0 5 6 70 80 20 0 4 0 3000 999 88";
        let (_root, machine) = fake_kernel_files(&[("proc/7/stat", stat)]);
        assert_eq!(cpu_time(&machine, 7), Some(Span::from_ms(1610)));
        assert_eq!(cpu_time(&machine, 8), None);
        assert!(cpu_time_with_reaped_children(std::process::id()).is_some());
    }

    #[test]
    fn unknown_values_are_none() {
        let (_root, machine) = fake_kernel_files(&[]);
        assert_eq!(
            ProcessStats::from_kernel_files(&machine, Span::from_secs(1)),
            ProcessStats::default()
        );
    }

    #[test]
    fn stats_of_this_process_are_nonzero() {
        let usage = ProcessStats::read();
        assert!(usage.cpu_time > Span::default());
        assert!(usage.age.is_some() && usage.resident_bytes > Some(0));
        assert!(usage.threads >= Some(1) && usage.descriptors >= Some(3));
        assert!(!command_line(std::process::id()).unwrap().is_empty());
    }

    #[test]
    fn dead_or_exiting_process_has_ended() {
        let stat = |state, flags| format!("7 (a) b) {state} 1 7 7 0 -1 {flags} 162 0\n");
        for (state, flags, expected) in
            [("S", 0x40_0000, false), ("R", 0x40_0004, true), ("Z", 0x40_0000, true)]
        {
            let (_root, machine) = fake_kernel_files(&[("proc/7/stat", &stat(state, flags))]);
            assert_eq!(is_dead_or_exiting(&machine, 7), expected, "{state} {flags:x}");
            assert!(is_dead_or_exiting(&machine, 8), "no process has that number");
            assert_eq!(process_name_from(&machine, 7).as_deref(), Some("a) b"));
            assert_eq!(process_name_from(&machine, 8), None);
        }
        assert!(!has_ended(std::process::id()));
    }
}
