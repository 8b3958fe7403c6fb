//! Machine and limits under which a measurement was made, with improvements.

use rustix::process::{Resource, getrlimit};

use crate::kernel_files::KernelFiles;
use crate::{CpuList, cgroup, uring_engine};

/// Machine, kernel and limits of this process, to be printed with every measurement. Values that
/// cannot be determined are `None`.
#[derive(Clone, Debug, PartialEq)]
pub struct MachineEnvironment {
    /// CPU model.
    pub cpu_model: Option<String>,
    /// Kernel release.
    pub kernel: String,
    /// Online CPUs.
    pub online: Option<CpuList>,
    /// CPUs available to this process.
    pub allowed: CpuList,
    /// CPU quota of the control group, in CPUs. `None` is unlimited.
    pub quota: Option<f64>,
    /// File that sets the quota.
    pub quota_file: Option<String>,
    /// Hypervisor; empty if it is unnamed. `None` on bare metal.
    pub hypervisor: Option<String>,
    /// cpufreq governor.
    pub governor: Option<String>,
    /// Transparent huge page mode: `always`, `madvise` or `never`.
    pub transparent_huge_pages: Option<String>,
    /// Free explicit 2 MiB pages.
    pub huge_pages_free: u64,
    /// Limit of lockable memory in bytes. `None` is unlimited.
    pub lockable_bytes: Option<u64>,
    /// Whether the kernel permits `io_uring`; the error is the kernel's text.
    pub io_uring: Result<(), String>,
    /// Whether any two of the available CPUs share a physical core.
    pub shares_cores: bool,
}

/// CPU time of a set of CPUs since boot, in clock ticks; the difference of two describes an
/// interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTime {
    total: u64,
    idle: u64,
    steal: u64,
    interrupts: u64,
}

impl MachineEnvironment {
    /// Reads the environment. Takes a few milliseconds; not for the I/O path.
    pub fn read() -> Self {
        let ring = uring_engine::check_io_uring().map_err(|errno| errno.to_string());
        Self::from_kernel_files(&KernelFiles::live_system(), CpuList::allowed_cpus(), ring)
    }

    fn from_kernel_files(
        machine: &KernelFiles,
        allowed: CpuList,
        io_uring: Result<(), String>,
    ) -> Self {
        let limits = cgroup::CgroupLimits::read(machine);
        let governor = "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor";
        Self {
            cpu_model: machine
                .cpuinfo_value("model name")
                .or_else(|| machine.cpuinfo_value("CPU part")),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            online: machine.online_cpus(),
            quota: limits.quota,
            quota_file: limits.quota_file,
            hypervisor: hypervisor_name(machine),
            governor: machine.read_trimmed(governor),
            transparent_huge_pages: transparent_huge_pages(machine),
            huge_pages_free: machine.meminfo_value("HugePages_Free").unwrap_or(0),
            lockable_bytes: getrlimit(Resource::Memlock).current,
            io_uring,
            shares_cores: has_hyperthread_siblings(machine, &allowed),
            allowed,
        }
    }

    /// Usable CPUs: the available ones, or the quota if that is smaller.
    #[expect(clippy::cast_precision_loss, reason = "a count of processors")]
    pub fn usable_cpu_count(&self) -> f64 {
        let allowed = self.allowed.len() as f64;
        self.quota.map_or(allowed, |quota| quota.min(allowed))
    }

    /// Changes that would improve performance: a sentence each, with the command. Most effective
    /// first.
    pub fn recommendations(&self) -> Vec<String> {
        let all = [
            self.cpu_recommendation(),
            self.quota_recommendation(),
            self.governor_recommendation(),
            self.sibling_recommendation(),
            self.thp_recommendation(),
            self.huge_page_recommendation(),
            self.io_uring_recommendation(),
        ];
        all.into_iter().flatten().collect()
    }

    fn cpu_recommendation(&self) -> Option<String> {
        let only = self.allowed.iter().next().filter(|_| self.allowed.len() == 1)?;
        let online = self.online.as_ref().filter(|online| online.len() > 1);
        Some(online.map_or_else(
            || "driver and device share one processor; give the machine a second".into(),
            |online| {
                format!(
                    "only core {only} of {online} may be used, so driver and device share it; \
                     start under `taskset -c {online}`"
                )
            },
        ))
    }

    fn quota_recommendation(&self) -> Option<String> {
        let (quota, file) = (self.quota.filter(|quota| *quota < 2.0)?, self.quota_file.as_ref()?);
        let unlimited = if file.ends_with("cpu.max") { "max" } else { "-1" };
        Some(format!(
            "the control group allows {quota:.2} processors and a polling pair needs 2; lift it \
             with `echo {unlimited} | sudo tee {file}`"
        ))
    }

    fn governor_recommendation(&self) -> Option<String> {
        let governor = self.governor.as_ref().filter(|governor| *governor != "performance")?;
        Some(format!(
            "the frequency governor is {governor}; fix the clock with `echo performance | sudo tee \
             /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor`"
        ))
    }

    fn sibling_recommendation(&self) -> Option<String> {
        self.shares_cores.then(|| {
            "some processors share a physical core; choose two that do not (`lscpu -e`) with `-c`"
                .into()
        })
    }

    fn thp_recommendation(&self) -> Option<String> {
        (self.transparent_huge_pages.as_deref() == Some("never")).then(|| {
            "transparent huge pages are off; allow them with `echo madvise | sudo tee \
             /sys/kernel/mm/transparent_hugepage/enabled`"
                .into()
        })
    }

    fn huge_page_recommendation(&self) -> Option<String> {
        (self.huge_pages_free == 0).then(|| {
            "no explicit huge pages are reserved; reserve 1 GiB with `echo 512 | sudo tee \
             /proc/sys/vm/nr_hugepages`"
                .into()
        })
    }

    fn io_uring_recommendation(&self) -> Option<String> {
        let reason = self.io_uring.as_ref().err()?;
        Some(format!(
            "io_uring is refused ({reason}), so file media use threads; allow it with `sudo sysctl \
             kernel.io_uring_disabled=0`, or in the container's seccomp profile"
        ))
    }
}

impl CpuTime {
    /// Reads the CPU time of `cores`.
    pub fn read(cores: &CpuList) -> Self {
        Self::from_kernel_files(&KernelFiles::live_system(), cores)
    }

    fn from_kernel_files(machine: &KernelFiles, cores: &CpuList) -> Self {
        let text = machine.read_trimmed("proc/stat").unwrap_or_default();
        let mut time = Self { total: 0, idle: 0, steal: 0, interrupts: 0 };
        for line in text.lines() {
            let core = line.strip_prefix("cpu").and_then(|rest| rest.split_once(' '));
            let Some((number, fields)) = core else { continue };
            if number.parse().is_ok_and(|core| cores.contains(core)) {
                time.add_cpu_line(fields);
            }
        }
        time
    }

    /// Adds one CPU's line: user nice system idle iowait irq softirq steal; guest time is included
    /// in user.
    fn add_cpu_line(&mut self, fields: &str) {
        for (index, field) in fields.split_whitespace().take(8).enumerate() {
            let ticks: u64 = field.parse().unwrap_or(0);
            self.total += ticks;
            match index {
                3 | 4 => self.idle += ticks,
                5 | 6 => self.interrupts += ticks,
                7 => self.steal += ticks,
                _ => {}
            }
        }
    }

    /// Share of the time since `earlier`, from 0 to 1, in which the hypervisor ran other guests
    /// although this one was runnable.
    #[expect(clippy::cast_precision_loss, reason = "shown to people")]
    pub fn steal_since(self, earlier: Self) -> f64 {
        let total = self.total.saturating_sub(earlier.total).max(1);
        self.steal.saturating_sub(earlier.steal) as f64 / total as f64
    }

    /// Share of the time since `earlier`, from 0 to 1, used by programs of this machine. Excludes
    /// interrupts, whose work may serve any program.
    #[expect(clippy::cast_precision_loss, reason = "shown to people")]
    pub fn used_fraction_since(self, earlier: Self) -> f64 {
        let total = self.total.saturating_sub(earlier.total);
        let idle = self.idle.saturating_sub(earlier.idle);
        let steal = self.steal.saturating_sub(earlier.steal);
        let interrupts = self.interrupts.saturating_sub(earlier.interrupts);
        total.saturating_sub(idle + steal + interrupts) as f64 / total.max(1) as f64
    }
}

/// Word in brackets: `always [madvise] never`.
fn transparent_huge_pages(machine: &KernelFiles) -> Option<String> {
    let text = machine.read_trimmed("sys/kernel/mm/transparent_hugepage/enabled")?;
    let (_, from) = text.split_once('[')?;
    from.split_once(']').map(|(word, _)| word.to_owned())
}

fn hypervisor_name(machine: &KernelFiles) -> Option<String> {
    let named = ["sys/class/dmi/id/sys_vendor", "sys/hypervisor/type"];
    let name = named.iter().find_map(|path| machine.read_trimmed(path)).unwrap_or_default();
    let flags = machine.cpuinfo_value("flags").unwrap_or_default();
    let guest = flags.split(' ').any(|flag| flag == "hypervisor")
        || machine.exists("sys/hypervisor/type")
        || machine.exists("sys/firmware/devicetree/base/hypervisor");
    guest.then_some(name)
}

fn has_hyperthread_siblings(machine: &KernelFiles, allowed: &CpuList) -> bool {
    let siblings = |core| {
        machine.hyperthread_siblings(core).map_or(0, |cores| cores.intersection(allowed).len())
    };
    allowed.iter().any(|core| siblings(core) > 1)
}

#[cfg(test)]
mod tests {
    use super::{CpuTime, MachineEnvironment};
    use crate::CpuList;
    use crate::kernel_files::tests::fake_kernel_files;

    fn core_list(text: &str) -> CpuList {
        CpuList::parse(text).unwrap()
    }

    #[test]
    fn slow_machine_gets_recommendations() {
        let (_root, machine) = fake_kernel_files(&[
            ("proc/cpuinfo", "model name : Slow 1\nflags : fpu hypervisor sse2\n"),
            ("proc/meminfo", "HugePages_Free: 0\n"),
            ("proc/self/cgroup", "0::/box\n"),
            ("sys/fs/cgroup/box/cpu.max", "150000 100000\n"),
            ("sys/class/dmi/id/sys_vendor", "Clouds\n"),
            ("sys/devices/system/cpu/online", "0-3\n"),
            ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
        ]);
        let found =
            MachineEnvironment::from_kernel_files(&machine, core_list("1"), Err("EPERM".into()));
        assert_eq!(found.cpu_model.as_deref(), Some("Slow 1"));
        assert_eq!(found.hypervisor.as_deref(), Some("Clouds"));
        assert!((found.usable_cpu_count() - 1.0).abs() < 1e-9);
        let remedies = found.recommendations();
        for (remedy, expected) in remedies.iter().zip([
            "`taskset -c 0-3`",
            "`echo max | sudo tee /sys/fs/cgroup/box/cpu.max`",
            "`echo performance | sudo tee",
            "`echo madvise | sudo tee",
            "`echo 512 | sudo tee",
            "`sudo sysctl kernel.io_uring_disabled=0`",
        ]) {
            assert!(remedy.contains(expected), "{remedy}");
        }
        assert_eq!(remedies.len(), 6, "{remedies:?}");
    }

    #[test]
    fn fast_machine_gets_no_recommendations() {
        let (_root, machine) = fake_kernel_files(&[
            ("proc/cpuinfo", "model name : Fast 9\nflags : fpu sse2\n"),
            ("proc/meminfo", "HugePages_Free: 64\n"),
            ("sys/devices/system/cpu/online", "0-3\n"),
            ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n"),
            ("sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0,2\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n"),
        ]);
        let found = MachineEnvironment::from_kernel_files(&machine, core_list("0-1"), Ok(()));
        assert_eq!(found.hypervisor, None);
        assert_eq!(found.transparent_huge_pages.as_deref(), Some("always"));
        assert_eq!(found.recommendations(), Vec::<String>::new());
        assert!((found.usable_cpu_count() - 2.0).abs() < 1e-9);

        let shared = MachineEnvironment::from_kernel_files(&machine, core_list("0-3"), Ok(()));
        assert!(shared.shares_cores && shared.recommendations()[0].contains("lscpu -e"));
    }

    #[test]
    fn steal_time_is_a_fraction_of_the_time_between_two_samples() {
        let at = |line| {
            CpuTime::from_kernel_files(
                &fake_kernel_files(&[("proc/stat", line)]).1,
                &core_list("1,3"),
            )
        };
        let before = at("cpu  9 0\ncpu0 1 1\ncpu1 90 0 50 800 10 0 0 40 7 7\ncpu3 10 0 0\n");
        let after = at("cpu  9 0\ncpu0 5 1\ncpu1 140 0 50 815 10 2 3 70 9 9\ncpu3 10 0 0\n");
        assert!((after.steal_since(before) - 0.3).abs() < 1e-9);
        assert!((after.used_fraction_since(before) - 0.5).abs() < 1e-9);
        assert!(before.used_fraction_since(before).abs() < 1e-9);
        assert!(before.steal_since(before).abs() < 1e-9);
        assert!(CpuTime::read(&CpuList::allowed_cpus()).total > 0);
    }

    #[test]
    fn environment_of_this_machine_is_read() {
        let found = MachineEnvironment::read();
        assert!(!found.kernel.is_empty() && found.usable_cpu_count() > 0.0);
    }
}
