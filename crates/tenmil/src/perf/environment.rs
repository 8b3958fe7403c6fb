//! The machine that a run happens on, and what to change about it to go faster.
//!
//! Everything here is read from `/proc` and `/sys` as text; what reads it is an argument, so that
//! machines of all kinds can be tested on one.

use super::options::Machine;
use super::quantity::{parse_cores, show_cores};

/// The machine that a run happened on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Environment {
    /// The processor's name.
    pub cpu: String,
    /// The architecture that this program was built for.
    pub architecture: &'static str,
    /// The cores that this process may use.
    pub cores: Vec<u32>,
    /// Processors that the control group lets this process use at once, if it sets a limit.
    pub cpu_quota: Option<f64>,
    /// Kernel release.
    pub kernel: String,
    /// Whether this is a virtual machine.
    pub virtualised: bool,
    /// How fast the processor is allowed to be: the frequency governor, if there is one.
    pub governor: Option<String>,
    /// Cores that the scheduler leaves alone.
    pub isolated_cores: Vec<u32>,
    /// Time that the hypervisor gave to others during the run, in per cent of what was wanted.
    pub steal_percent: f64,
    /// Ticks of the time stamp counter per second; zero if unknown.
    pub tsc_hz: u64,
    /// Transparent huge pages: `always`, `madvise` or `never`.
    pub transparent_huge_pages: String,
    /// Explicit huge pages that are reserved.
    pub huge_pages_reserved: u64,
    /// What the memory of the run was made of, in words; the engine fills it in.
    pub memory_backing: String,
    /// Memory that this process may lock, in bytes; none if unlimited.
    pub lockable_bytes: Option<u64>,
    /// Whether this program was built without optimisation.
    pub debug_build: bool,
    /// Version of this program.
    pub version: &'static str,
}

/// What to change to go faster: what was found, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remedy {
    /// What was found.
    pub found: String,
    /// What to do about it.
    pub remedy: String,
}

/// Reads a small text file; none if it is not there.
pub type ReadText<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Processor time since start: how much was stolen, and how much there was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessorTime {
    stolen: u64,
    total: u64,
}

/// Reads a small text file of the kernel's.
pub fn read_text(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

impl Machine {
    /// The machine that this is.
    pub fn look(read: ReadText<'_>) -> Self {
        let kib = read("/proc/meminfo").and_then(|text| number_after(&text, "MemAvailable:"));
        Self {
            cores: cores_allowed(read),
            memory_available_bytes: kib.map_or(u64::MAX, |kib| kib.saturating_mul(1024)),
        }
    }
}

impl Environment {
    /// The machine that this is. What only the run can tell is filled in by the engine.
    pub fn look(read: ReadText<'_>) -> Self {
        let first_core = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor";
        let isolated = read("/sys/devices/system/cpu/isolated").unwrap_or_default();
        let cpuinfo = read("/proc/cpuinfo").unwrap_or_default();
        Self {
            cpu: processor_name(&cpuinfo),
            architecture: std::env::consts::ARCH,
            cores: cores_allowed(read),
            cpu_quota: cpu_quota(read),
            kernel: trimmed(read("/proc/sys/kernel/osrelease")),
            virtualised: cpuinfo.split_whitespace().any(|flag| flag == "hypervisor"),
            governor: read(first_core).map(|text| text.trim().into()),
            isolated_cores: parse_cores(isolated.trim()).unwrap_or_default(),
            steal_percent: 0.0,
            tsc_hz: 0,
            transparent_huge_pages: chosen(
                &read("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default(),
            ),
            huge_pages_reserved: read("/proc/meminfo")
                .and_then(|text| number_after(&text, "HugePages_Total:"))
                .unwrap_or(0),
            memory_backing: String::new(),
            lockable_bytes: lockable(&read("/proc/self/limits").unwrap_or_default()),
            debug_build: cfg!(debug_assertions),
            version: env!("CARGO_PKG_VERSION"),
        }
    }

    /// Processors' worth of time that this process can have.
    #[expect(clippy::cast_precision_loss, reason = "machines have fewer than 2^53 cores")]
    pub fn processors(&self) -> f64 {
        let cores = self.cores.len().max(1) as f64;
        self.cpu_quota.map_or(cores, |quota| quota.min(cores))
    }

    /// What to change to go faster, the most effective first.
    pub fn remedies(&self) -> Vec<Remedy> {
        let mut remedies = Vec::new();
        let mut add = |found: String, remedy: &str| {
            remedies.push(Remedy { found, remedy: remedy.into() });
        };
        if self.debug_build {
            let found = "this program was built without optimisation".into();
            add(found, "cargo run --release -- perf");
        }
        if self.cores.len() < 2 {
            let found = "one processor: the driver and the emulated controller take turns on it, \
                         so the number is for both together and far below either";
            add(found.into(), "run on two processors or more");
        }
        if let Some(quota) = self.cpu_quota.filter(|quota| *quota < 2.0) {
            let found = format!(
                "a quota of {quota:.2} processors: the kernel stops the polling threads when it \
                 is used up, which lowers the rate and shows as latency of up to 100 ms"
            );
            add(found, "give the control group a cpu.max of at least 2 processors");
        }
        if self.steal_percent >= 1.0 {
            let found = format!(
                "{:.1} % of the processor time went to other guests of this host",
                self.steal_percent
            );
            add(found, "repeat when the host is quiet, or run on a machine of its own");
        }
        if self.memory_backing.contains("4 KiB") && self.transparent_huge_pages == "never" {
            let found = "rings and buffers lie in 4 KiB pages".into();
            let remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root";
            add(found, remedy);
        }
        if let Some(governor) = self.governor.as_ref().filter(|name| *name != "performance") {
            let found = format!("the frequency governor is `{governor}`");
            add(found, "cpupower frequency-set -g performance, as root");
        }
        if self.isolated_cores.is_empty() && self.cores.len() >= 4 {
            let found = "no isolated cores: the scheduler may put other work beside ours".into();
            add(found, "boot with isolcpus=2-3 nohz_full=2-3 and use -c 2 --device-cores 3");
        }
        remedies
    }

    /// Rows for a table: what, and how it is here.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let cores = match self.cpu_quota {
            Some(quota) => format!("{} (quota of {quota:.2})", show_cores(&self.cores)),
            None => show_cores(&self.cores),
        };
        let kind = if self.virtualised { "virtual machine" } else { "no hypervisor seen" };
        let mut rows = vec![
            ("processor", format!("{} ({}, {kind})", self.cpu, self.architecture)),
            ("cores", cores),
            ("kernel", self.kernel.clone()),
            ("steal", format!("{:.1} %", self.steal_percent)),
            ("memory", self.memory_backing.clone()),
            (
                "huge pages",
                format!(
                    "transparent: {}; reserved: {}",
                    self.transparent_huge_pages, self.huge_pages_reserved
                ),
            ),
        ];
        if self.tsc_hz > 0 {
            let mhz = self.tsc_hz / 1_000_000;
            rows.push(("time stamp counter", format!("{mhz} MHz")));
        }
        if let Some(governor) = &self.governor {
            rows.push(("governor", governor.clone()));
        }
        if !self.isolated_cores.is_empty() {
            rows.push(("isolated cores", show_cores(&self.isolated_cores)));
        }
        let build = if self.debug_build { "without optimisation" } else { "optimised" };
        rows.push(("tenmil", format!("{}, {build}", self.version)));
        rows.retain(|(_, value)| !value.is_empty());
        rows
    }
}

impl ProcessorTime {
    /// Processor time up to now.
    pub fn look(read: ReadText<'_>) -> Self {
        let text = read("/proc/stat").unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with("cpu ")).unwrap_or_default();
        // proc(5): user nice system idle iowait irq softirq steal; guest time is in user already.
        let times: Vec<u64> =
            line.split_whitespace().skip(1).take(8).filter_map(|text| text.parse().ok()).collect();
        let idle = times.get(3).unwrap_or(&0) + times.get(4).unwrap_or(&0);
        let total = times.iter().sum::<u64>() - idle;
        Self { stolen: times.get(7).copied().unwrap_or(0), total }
    }

    /// The share of the processor time wanted since `earlier` that went to others, in per cent.
    #[expect(clippy::cast_precision_loss, reason = "shown to people")]
    pub fn steal_percent_since(self, earlier: Self) -> f64 {
        let wanted = self.total.saturating_sub(earlier.total);
        let stolen = self.stolen.saturating_sub(earlier.stolen);
        if wanted == 0 { 0.0 } else { stolen as f64 * 100.0 / wanted as f64 }
    }
}

fn cores_allowed(read: ReadText<'_>) -> Vec<u32> {
    let status = read("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    list.and_then(|list| parse_cores(list.trim()).ok()).unwrap_or_else(|| vec![0])
}

/// The tightest limit on the way from our control group to the root (cgroup version 2 `cpu.max`,
/// version 1 `cpu.cfs_quota_us`), in processors.
#[expect(clippy::cast_precision_loss, reason = "quotas are small numbers")]
fn cpu_quota(read: ReadText<'_>) -> Option<f64> {
    let membership = read("/proc/self/cgroup").unwrap_or_default();
    let mut limits: Vec<f64> = Vec::new();
    for line in membership.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next().unwrap_or(""), parts.next().unwrap_or("/"));
        let mut path = path.trim_end_matches('/').to_owned();
        loop {
            if controllers.is_empty() {
                let text = read(&format!("/sys/fs/cgroup{path}/cpu.max")).unwrap_or_default();
                let mut words = text.split_whitespace().map(str::parse::<u64>);
                if let (Some(Ok(quota)), Some(Ok(period @ 1..))) = (words.next(), words.next()) {
                    limits.push(quota as f64 / period as f64);
                }
            } else if controllers.split(',').any(|name| name == "cpu") {
                let number = |name: &str| -> Option<u64> {
                    read(&format!("/sys/fs/cgroup/cpu{path}/{name}"))?.trim().parse().ok()
                };
                // A quota of -1 is no quota, and no u64.
                let quota = number("cpu.cfs_quota_us");
                if let (Some(quota), Some(period @ 1..)) = (quota, number("cpu.cfs_period_us")) {
                    limits.push(quota as f64 / period as f64);
                }
            }
            match path.rfind('/') {
                Some(slash) => path.truncate(slash),
                None => break,
            }
        }
    }
    limits.into_iter().reduce(f64::min)
}

fn processor_name(cpuinfo: &str) -> String {
    let named = |key: &str| {
        let line = cpuinfo.lines().find(|line| line.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let part = || named("CPU part").map(|part| format!("part {part}"));
    named("model name").or_else(part).unwrap_or_else(|| "unknown".into())
}

/// The word in brackets: `always [madvise] never`.
fn chosen(text: &str) -> String {
    let inside = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    inside.map_or_else(|| "not there".into(), |(word, _)| word.into())
}

fn lockable(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    line.split_whitespace().next()?.parse().ok()
}

fn number_after(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_whitespace().next()?.parse().ok()
}

fn trimmed(text: Option<String>) -> String {
    text.unwrap_or_default().trim().into()
}

#[cfg(test)]
mod tests {
    use super::{Environment, Machine, ProcessorTime, read_text};

    fn guest(path: &str) -> Option<String> {
        let text = match path {
            "/proc/cpuinfo" => "model name\t: Fast One\nflags\t\t: fpu hypervisor\n",
            "/proc/self/status" => "Name:\tx\nCpus_allowed_list:\t0,2-3\n",
            "/proc/meminfo" => "MemAvailable:    1024 kB\nHugePages_Total:       7\n",
            "/proc/sys/kernel/osrelease" => "6.12.0\n",
            "/proc/self/cgroup" => "0::/a/b\n",
            "/sys/fs/cgroup/a/b/cpu.max" => "max 100000\n",
            "/sys/fs/cgroup/a/cpu.max" => "150000 100000\n",
            "/sys/fs/cgroup/cpu.max" => "400000 100000\n",
            "/sys/kernel/mm/transparent_hugepage/enabled" => "always madvise [never]\n",
            "/proc/self/limits" => "Max locked memory         65536      65536      bytes\n",
            "/proc/stat" => "cpu  100 0 50 1000 10 0 0 50 0 0\ncpu0 1 1\n",
            _ => return None,
        };
        Some(text.into())
    }

    #[test]
    fn a_machine_is_read_from_what_its_kernel_says() {
        let environment = Environment::look(&guest);
        assert_eq!(environment.cpu, "Fast One");
        assert_eq!(environment.cores, [0, 2, 3]);
        assert_eq!(environment.kernel, "6.12.0");
        assert!(environment.virtualised);
        assert_eq!(environment.transparent_huge_pages, "never");
        assert_eq!(environment.huge_pages_reserved, 7);
        assert_eq!(environment.lockable_bytes, Some(65_536));
        assert_eq!(environment.cpu_quota, Some(1.5), "the tightest of all levels");
        assert!((environment.processors() - 1.5).abs() < 1e-9);
        let machine = Machine::look(&guest);
        assert_eq!(machine.memory_available_bytes, 1 << 20);
        assert_eq!(machine.cores, environment.cores);
    }

    #[test]
    fn a_quota_of_the_first_version_of_control_groups_is_seen() {
        let old = |path: &str| match path {
            "/proc/self/cgroup" => Some("4:cpu,cpuacct:/x\n".into()),
            "/sys/fs/cgroup/cpu/x/cpu.cfs_quota_us" => Some("-1\n".into()),
            "/sys/fs/cgroup/cpu/cpu.cfs_quota_us" => Some("50000\n".into()),
            "/sys/fs/cgroup/cpu/cpu.cfs_period_us" => Some("100000\n".into()),
            _ => None,
        };
        assert_eq!(Environment::look(&old).cpu_quota, Some(0.5));
    }

    #[test]
    fn a_machine_that_says_nothing_is_no_accident() {
        let environment = Environment::look(&|_| None);
        assert_eq!(environment.cores, [0]);
        assert_eq!(environment.cpu_quota, None);
        assert_eq!(ProcessorTime::look(&|_| None), ProcessorTime::default());
    }

    #[test]
    fn steal_is_a_share_of_the_time_that_was_wanted() {
        let earlier = ProcessorTime::look(&guest);
        assert_eq!(earlier, ProcessorTime { stolen: 50, total: 200 });
        let later = ProcessorTime { stolen: 75, total: 300 };
        assert!((later.steal_percent_since(earlier) - 25.0).abs() < 1e-9);
        assert!(earlier.steal_percent_since(earlier).abs() < 1e-9);
    }

    #[test]
    fn each_thing_that_slows_a_run_down_has_its_remedy() {
        let mut environment = Environment::look(&guest);
        environment.debug_build = false;
        let quiet = environment.remedies();
        assert_eq!(quiet.len(), 1, "{quiet:?}");
        assert!(quiet[0].found.starts_with("a quota of 1.50 processors"));

        environment.memory_backing = "4 KiB pages".into();
        environment.governor = Some("powersave".into());
        environment.steal_percent = 3.0;
        environment.cores = vec![0];
        environment.debug_build = true;
        let found: Vec<String> =
            environment.remedies().into_iter().map(|remedy| remedy.found).collect();
        assert_eq!(found.len(), 6, "{found:?}");
        assert!(found[1].starts_with("one processor:"));
        assert!(found[3].starts_with("3.0 % of the processor time"));
    }

    #[test]
    fn this_machine_has_a_processor_and_a_kernel() {
        let environment = Environment::look(&read_text);
        assert!(!environment.cores.is_empty());
        assert!(!environment.kernel.is_empty());
    }
}
