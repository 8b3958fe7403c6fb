//! Identity of a process and its machine, comparable by other processes and machines.

use rustix::fs::stat;
use rustix::process::{Pid, test_kill_process};

use crate::Errno;
use crate::kernel_files::KernelFiles;

/// Identity of a process. Values that cannot be determined are zero or empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// Random identifier of the boot, drawn by the kernel.
    pub boot: u128,
    /// Machine identifier: machine-id(5).
    pub machine: u128,
    /// Identifier of the PID namespace.
    pub pid_namespace: u64,
    /// Process identifier.
    pub pid: u32,
    /// Start time in ticks after boot: proc_pid_stat(5), field 22.
    pub started: u64,
    /// Host name.
    pub host: String,
}

impl ProcessIdentity {
    /// Returns the identity of this process.
    pub fn of_this_process() -> Self {
        Self::of_process(&KernelFiles::live_system(), std::process::id())
    }

    fn of_process(machine: &KernelFiles, pid: u32) -> Self {
        let number = |path| {
            let text: String =
                machine.read_trimmed(path)?.chars().filter(|one| *one != '-').collect();
            u128::from_str_radix(&text, 16).ok()
        };
        Self {
            boot: number("proc/sys/kernel/random/boot_id").unwrap_or(0),
            machine: number("etc/machine-id").unwrap_or(0),
            pid_namespace: stat(machine.path_of("proc/self/ns/pid"))
                .map_or(0, |found| found.st_ino),
            pid,
            started: started_ticks(machine, pid).unwrap_or(0),
            host: machine.read_trimmed("proc/sys/kernel/hostname").unwrap_or_default(),
        }
    }

    /// Whether both processes belong to the same boot and PID namespace, so that either can check
    /// whether the other runs.
    pub fn is_same_boot(&self, other: &Self) -> bool {
        let is_known = self.boot != 0 && self.pid_namespace != 0;
        is_known && (self.boot, self.pid_namespace) == (other.boot, other.pid_namespace)
    }

    /// Whether the process is known to have exited: it belongs to this boot and namespace, and its
    /// PID is unused or belongs to a process with another start time. False if that cannot be
    /// determined.
    pub fn is_gone(&self) -> bool {
        let machine = KernelFiles::live_system();
        let here = Self::of_process(&machine, std::process::id());
        self.is_same_boot(&here) && self.pid != 0 && self.has_ended(&machine, process_exists)
    }

    /// Whether the process is known to belong to an earlier boot of this machine, and so to have
    /// exited: the machine identifier and host name match, the boot identifier differs, and `since`
    /// (seconds since 1970) is before this boot.
    ///
    /// A machine that was cloned with its machine-id(5) and host name is taken for the original;
    /// one that opened something after this machine's boot is not.
    pub fn is_of_earlier_boot(&self, since: u64) -> bool {
        let machine = KernelFiles::live_system();
        self.is_of_earlier_boot_than(
            &machine,
            &Self::of_process(&machine, std::process::id()),
            since,
        )
    }

    fn is_of_earlier_boot_than(&self, machine: &KernelFiles, here: &Self, since: u64) -> bool {
        let is_known = self.machine != 0 && self.boot != 0 && here.boot != 0;
        let is_named = !self.host.is_empty() && self.host == here.host;
        let is_before = boot_time(machine).is_some_and(|booted| since < booted);
        is_known && is_named && self.machine == here.machine && self.boot != here.boot && is_before
    }

    fn has_ended(&self, machine: &KernelFiles, exists: impl Fn(u32) -> bool) -> bool {
        match started_ticks(machine, self.pid) {
            Some(started) if self.started != 0 && started != self.started => true,
            // A zombie: exited, not yet reaped by its parent.
            Some(_) => is_dead(machine, self.pid),
            // Files of other users may be hidden (hidepid); whether a process exists is visible to
            // all.
            None => !exists(self.pid),
        }
    }
}

/// Boot time in seconds since 1970: `btime` of proc_stat(5).
fn boot_time(machine: &KernelFiles) -> Option<u64> {
    let text = machine.read_trimmed("proc/stat")?;
    text.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok())
}

fn process_exists(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_none_or(|pid| test_kill_process(pid) != Err(Errno::SRCH))
}

/// proc_pid_stat(5), the fields after the name, which may contain any character.
fn stat_fields(machine: &KernelFiles, pid: u32) -> Option<String> {
    let text = machine.read_trimmed(&format!("proc/{pid}/stat"))?;
    Some(text.rsplit_once(')')?.1.to_owned())
}

fn started_ticks(machine: &KernelFiles, pid: u32) -> Option<u64> {
    const AFTER_NAME: usize = 22 - 3;
    stat_fields(machine, pid)?.split_whitespace().nth(AFTER_NAME)?.parse().ok()
}

fn is_dead(machine: &KernelFiles, pid: u32) -> bool {
    let fields = stat_fields(machine, pid).unwrap_or_default();
    fields.split_whitespace().next().is_some_and(|state| matches!(state, "Z" | "X"))
}

#[cfg(test)]
mod tests {
    use super::ProcessIdentity;
    use crate::kernel_files::tests::fake_kernel_files;

    #[test]
    fn process_is_gone_only_if_that_is_certain() {
        let stat = |state: &str, started| {
            format!("7 (a ) b) {state} 1 7 7 0 -1 4 1 0 0 0 5 6 0 0 20 0 4 0 {started} 999 88")
        };
        let process = ProcessIdentity { pid: 7, started: 3000, ..ProcessIdentity::default() };
        for (state, started, expected) in
            [("S", 3000, false), ("S", 3001, true), ("Z", 3000, true), ("R", 3000, false)]
        {
            let (_root, machine) = fake_kernel_files(&[("proc/7/stat", &stat(state, started))]);
            let found = process.has_ended(&machine, |_| true);
            assert_eq!(found, expected, "{state} {started}");
        }
        let (_root, machine) = fake_kernel_files(&[]);
        assert!(process.has_ended(&machine, |_| false));
        assert!(!process.has_ended(&machine, |_| true), "its files are hidden");
    }

    #[test]
    fn process_of_an_earlier_boot_is_gone() {
        let (_root, machine) =
            fake_kernel_files(&[("proc/stat", "cpu 1 2\nbtime 5000\nprocesses 9")]);
        let host = "db".to_owned();
        let here = ProcessIdentity { boot: 2, machine: 7, host, ..ProcessIdentity::default() };
        let former = ProcessIdentity { boot: 1, ..here.clone() };
        assert!(former.is_of_earlier_boot_than(&machine, &here, 4999));
        assert!(
            !former.is_of_earlier_boot_than(&machine, &here, 5000),
            "a copy of this machine is up"
        );
        assert!(!here.is_of_earlier_boot_than(&machine, &here, 4999), "it may be there");
        for other in [
            ProcessIdentity { machine: 8, ..former.clone() },
            ProcessIdentity { host: "db2".into(), ..former.clone() },
            ProcessIdentity { host: String::new(), ..former.clone() },
            ProcessIdentity { boot: 0, ..former.clone() },
        ] {
            assert!(!other.is_of_earlier_boot_than(&machine, &here, 4999), "{other:?}");
        }
        let nameless = ProcessIdentity { machine: 0, ..here };
        let former = ProcessIdentity { boot: 1, ..nameless.clone() };
        assert!(
            !former.is_of_earlier_boot_than(&machine, &nameless, 4999),
            "no machine has a number"
        );
        let (_root, silent) = fake_kernel_files(&[]);
        assert!(!former.is_of_earlier_boot_than(&silent, &nameless, 4999));
    }

    #[test]
    fn only_a_process_of_this_boot_and_machine_can_be_known_to_be_gone() {
        let this = ProcessIdentity::of_this_process();
        assert!(this.is_same_boot(&this) && !this.is_gone() && this.started > 0);
        let gone = ProcessIdentity { started: this.started + 1, ..this.clone() };
        assert!(gone.is_gone(), "another one had the number");
        for other in [
            ProcessIdentity { boot: this.boot + 1, ..gone.clone() },
            ProcessIdentity { pid_namespace: this.pid_namespace + 1, ..gone.clone() },
            ProcessIdentity { boot: 0, ..gone },
            ProcessIdentity::default(),
        ] {
            assert!(!other.is_gone(), "{other:?}");
        }
    }
}
