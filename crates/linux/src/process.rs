//! Resource usage of processes.

mod identity;

use rustix::time::{ClockId, Timespec, clock_gettime};
use tenmil_base::Span;

pub use self::identity::ProcessIdentity;
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
            cpu_time: time(ClockId::ProcessCPUTime),
            // One descriptor is that of the directory being read.
            descriptors: descriptors.map(|count| count as u64 - 1),
            ..Self::of(&KernelFiles::live(), time(ClockId::Boottime))
        }
    }

    /// Parses the kernel's files, at `now` after boot.
    fn of(machine: &KernelFiles, now: Span) -> Self {
        let status = machine.text("proc/self/status").unwrap_or_default();
        let kib = |key| Some(field(&status, key)?.saturating_mul(1024));
        Self {
            age: started(machine).map(|start| Span { ns: now.ns.saturating_sub(start.ns) }),
            resident_bytes: kib("VmRSS"),
            resident_max_bytes: kib("VmHWM"),
            threads: field(&status, "Threads"),
            ..Self::default()
        }
    }
}

/// Command line of process `pid`, if it may be read.
pub fn command_line(pid: u32) -> Option<Vec<String>> {
    words(&KernelFiles::live(), pid)
}

fn words(machine: &KernelFiles, pid: u32) -> Option<Vec<String>> {
    let text = machine.text(&format!("proc/{pid}/cmdline"))?;
    let words = text.strip_suffix('\0').unwrap_or(&text).split('\0');
    Some(words.map(str::to_owned).collect())
}

/// Name of process `pid`, available until the process is reaped (proc_pid_stat(5), field 2).
pub fn name(pid: u32) -> Option<String> {
    comm(&KernelFiles::live(), pid)
}

fn comm(machine: &KernelFiles, pid: u32) -> Option<String> {
    let text = machine.text(&format!("proc/{pid}/stat"))?;
    let (head, _) = text.rsplit_once(')')?;
    Some(head.split_once('(')?.1.to_owned())
}

/// Whether process `pid` has exited or is exiting, so that the kernel only finishes work on its
/// behalf.
pub fn has_ended(pid: u32) -> bool {
    ended(&KernelFiles::live(), pid)
}

/// CPU time of process `pid` and of its children that it has waited for, in steps of 10 ms. `None`
/// if the process does not exist.
pub fn tree_cpu_time(pid: u32) -> Option<Span> {
    cpu_time(&KernelFiles::live(), pid)
}

/// proc_pid_stat(5), fields 14 to 17, in ticks; the kernel guarantees 100 per second.
fn cpu_time(machine: &KernelFiles, pid: u32) -> Option<Span> {
    const BEFORE_TIMES: usize = 14 - 3;
    let text = machine.text(&format!("proc/{pid}/stat"))?;
    let words = text.rsplit_once(')')?.1.split_whitespace().skip(BEFORE_TIMES);
    let ticks: u64 = words.take(4).filter_map(|word| word.parse::<u64>().ok()).sum();
    Some(Span { ns: ticks.saturating_mul(TICK_NS) })
}

/// proc_pid_stat(5), field 3 (state) and field 9 (flags).
fn ended(machine: &KernelFiles, pid: u32) -> bool {
    const FLAGS_AFTER_STATE: usize = 9 - 3;
    /// `PF_EXITING` (linux/sched.h).
    const EXITING: u64 = 4;
    let Some(text) = machine.text(&format!("proc/{pid}/stat")) else { return true };
    let Some((_, after_name)) = text.rsplit_once(')') else { return false };
    let mut words = after_name.split_whitespace();
    let is_dead = words.clone().next().is_some_and(|state| matches!(state, "Z" | "X"));
    let flags = words.nth(FLAGS_AFTER_STATE).and_then(|word| word.parse::<u64>().ok());
    is_dead || flags.is_some_and(|flags| flags & EXITING != 0)
}

/// Start time of the process after boot: proc_pid_stat(5), field 22, in ticks of 10 ms. The second
/// field, the name, may contain any character.
fn started(machine: &KernelFiles) -> Option<Span> {
    const AFTER_NAME: usize = 22 - 3;
    let text = machine.text("proc/self/stat")?;
    let ticks: u64 = text.rsplit_once(')')?.1.split_whitespace().nth(AFTER_NAME)?.parse().ok()?;
    Some(Span { ns: ticks.saturating_mul(TICK_NS) })
}

/// Number after a key: `VmRSS:     1234 kB`.
fn field(status: &str, key: &str) -> Option<u64> {
    let mut pairs = status.lines().filter_map(|line| line.split_once(':'));
    pairs.find(|(name, _)| *name == key)?.1.split_whitespace().next()?.parse().ok()
}

fn time(clock: ClockId) -> Span {
    let Timespec { tv_sec, tv_nsec } = clock_gettime(clock);
    let whole = u64::try_from(tv_sec).unwrap_or(0).saturating_mul(1_000_000_000);
    Span { ns: whole + u64::try_from(tv_nsec).unwrap_or(0) }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Span;

    use super::{
        ProcessStats, comm, command_line, cpu_time, ended, has_ended, tree_cpu_time, words,
    };
    use crate::kernel_files::tests::made_of;

    #[test]
    fn the_files_of_the_kernel_are_read() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 1 0 0 0 5 6 0 0 20 0 4 0 3000 999 88";
        let (_root, machine) = made_of(&[
            ("proc/self/stat", stat),
            ("proc/self/status", "Name:\ta\nVmHWM:\t  300 kB\nVmRSS:\t  200 kB\nThreads:\t4\n"),
            ("proc/9/cmdline", "tenmil\0perf\0\0-t\0"),
        ]);
        let usage = ProcessStats::of(&machine, Span::from_secs(50));
        assert_eq!(usage.age, Some(Span::from_secs(20)));
        assert_eq!(usage.resident_bytes, Some(200 * 1024));
        assert_eq!(usage.resident_max_bytes, Some(300 * 1024));
        assert_eq!(usage.threads, Some(4));
        assert_eq!(words(&machine, 9).unwrap(), ["tenmil", "perf", "", "-t"]);
        assert_eq!(words(&machine, 8), None);
    }

    #[test]
    fn the_time_of_a_family_is_its_own_and_that_of_those_who_have_ended() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 1 0 0 0 5 6 70 80 20 0 4 0 3000 999 88";
        let (_root, machine) = made_of(&[("proc/7/stat", stat)]);
        assert_eq!(cpu_time(&machine, 7), Some(Span::from_ms(1610)));
        assert_eq!(cpu_time(&machine, 8), None);
        assert!(tree_cpu_time(std::process::id()).is_some());
    }

    #[test]
    fn what_is_not_there_is_not_known() {
        let (_root, machine) = made_of(&[]);
        assert_eq!(ProcessStats::of(&machine, Span::from_secs(1)), ProcessStats::default());
    }

    #[test]
    fn this_process_uses_something() {
        let usage = ProcessStats::read();
        assert!(usage.cpu_time > Span::default());
        assert!(usage.age.is_some() && usage.resident_bytes > Some(0));
        assert!(usage.threads >= Some(1) && usage.descriptors >= Some(3));
        assert!(!command_line(std::process::id()).unwrap().is_empty());
    }

    #[test]
    fn a_process_has_ended_when_it_is_gone_dead_or_on_its_way_out() {
        let stat = |state, flags| format!("7 (a) b) {state} 1 7 7 0 -1 {flags} 162 0\n");
        for (state, flags, expected) in
            [("S", 0x40_0000, false), ("R", 0x40_0004, true), ("Z", 0x40_0000, true)]
        {
            let (_root, machine) = made_of(&[("proc/7/stat", &stat(state, flags))]);
            assert_eq!(ended(&machine, 7), expected, "{state} {flags:x}");
            assert!(ended(&machine, 8), "nobody has that number");
            assert_eq!(comm(&machine, 7).as_deref(), Some("a) b"));
            assert_eq!(comm(&machine, 8), None);
        }
        assert!(!has_ended(std::process::id()));
    }
}
