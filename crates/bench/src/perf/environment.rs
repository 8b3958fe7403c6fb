//! Environment of a run: the machine, and conditions that were measured during the run.

use tenmil_linux::MachineEnvironment;
use tenmil_reactor::PollMode;
use tenmil_reactor::thread_scheduler::Policy;

use super::perf_options::PerfOptions;

/// Environment of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunEnvironment {
    /// Machine, kernel and resource limits.
    pub machine: MachineEnvironment,
    /// Fraction of CPU time, from 0 to 1, that the hypervisor gave to other guests during the run.
    pub steal: f64,
    /// Frequency of the time stamp counter, if it is usable.
    pub tsc_hz: Option<u64>,
    /// Description of the pages of rings and buffers, such as `2 MiB pages`.
    pub memory_backing: String,
    /// Poll mode of the reactors.
    pub poll: PollMode,
    /// Scheduling policy of the threads.
    pub scheduler: Policy,
    /// Description of the frequency scaling, such as `left alone`.
    pub frequency_scaling: String,
    /// Whether this program was built with optimization.
    pub optimized: bool,
}

/// Steal time above this fraction is reported.
const STEAL_NOTABLE: f64 = 0.005;

impl RunEnvironment {
    /// Environment before a run, from the machine and the options.
    pub fn from_machine(machine: MachineEnvironment, options: &PerfOptions) -> Self {
        Self {
            machine,
            steal: 0.0,
            tsc_hz: None,
            memory_backing: String::new(),
            poll: options.poll,
            scheduler: options.scheduler.policy,
            frequency_scaling: String::new(),
            optimized: !cfg!(debug_assertions),
        }
    }

    /// Conditions that distort the result, one sentence each.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if !self.optimized {
            warnings.push("built without optimization: the number is not meaningful".into());
        }
        if self.machine.allowed.len() < 2 {
            warnings.push(
                "one processor: driver and emulated controller share it, so the number is the \
                 cost of both"
                    .into(),
            );
        }
        if let Some(quota) = self.machine.quota.filter(|quota| *quota < 2.0) {
            warnings.push(format!(
                "a quota of {quota:.2} processors: polling threads exhaust it and are then throttled, \
                 which lowers the rate and causes latencies of up to 100 ms"
            ));
        }
        if self.steal > STEAL_NOTABLE {
            warnings.push(format!(
                "{:.1} % of the time was steal time, used by other virtual machines: the result is \
                 higher without it",
                self.steal * 100.0
            ));
        }
        warnings
    }

    /// Recommended changes for a better result, one sentence each, the most effective first.
    pub fn recommendations(&self) -> Vec<String> {
        let mut recommendations = Vec::new();
        if !self.optimized {
            recommendations.push("build with optimization: `cargo run --release -- perf`".into());
        }
        recommendations.extend(self.machine.recommendations());
        if self.steal > STEAL_NOTABLE {
            recommendations
                .push("repeat without other load on the host, or on a dedicated machine".into());
        }
        recommendations
    }

    /// Table rows of name and value.
    pub fn table_rows(&self) -> Vec<(&'static str, String)> {
        let mut rows = machine_rows(&self.machine);
        rows.extend([
            ("steal time", format!("{:.2} %", self.steal * 100.0)),
            ("rings and buffers", self.memory_backing.clone()),
            ("polling", self.poll.to_string()),
            ("scheduler", self.scheduler.to_string()),
            ("frequency scaling", self.frequency_scaling.clone()),
        ]);
        if let Some(hz) = self.tsc_hz {
            rows.push(("time stamp counter", format!("{} MHz", hz / 1_000_000)));
        }
        let build = if self.optimized { "optimized" } else { "not optimized" };
        rows.push(("tenmil", format!("{}, {build}", env!("CARGO_PKG_VERSION"))));
        rows.retain(|(_, value)| !value.is_empty());
        rows
    }
}

/// Table rows of the properties that do not change between runs.
pub fn machine_rows(machine: &MachineEnvironment) -> Vec<(&'static str, String)> {
    let unknown = || "unknown".to_owned();
    let processor = machine.cpu_model.clone().unwrap_or_else(unknown);
    let place = match machine.hypervisor.as_deref() {
        None => "bare metal".into(),
        Some("") => "virtual machine".into(),
        Some(name) => format!("virtual machine of {name}"),
    };
    let mut cores = format!("{} may be used", machine.allowed);
    if let Some(online) = &machine.online {
        cores += &format!(", {online} are online");
    }
    if let Some(quota) = machine.quota {
        cores += &format!(", quota of {quota:.2}");
    }
    let pages = machine.transparent_huge_pages.clone().unwrap_or_else(|| "none".into());
    let mut rows = vec![
        ("processor", format!("{processor} ({})", std::env::consts::ARCH)),
        ("machine", place),
        ("cores", cores),
        ("kernel", machine.kernel.clone()),
        (
            "huge pages",
            format!("transparent: {pages}; reserved and free: {}", machine.huge_pages_free),
        ),
        ("lockable memory", lockable_memory_text(machine.lockable_bytes)),
    ];
    rows.extend(machine.governor.clone().map(|governor| ("frequency governor", governor)));
    rows
}

fn lockable_memory_text(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "unlimited".into(), |bytes| format!("{} KiB", bytes >> 10))
}

#[cfg(test)]
mod tests {
    use tenmil_linux::CpuList;

    use super::RunEnvironment;
    use crate::perf::report::sample_result::quiet_machine;

    #[test]
    fn quiet_machine_has_no_warnings_and_no_recommendations() {
        assert_eq!(quiet_machine().warnings(), Vec::<String>::new());
        assert_eq!(quiet_machine().recommendations(), Vec::<String>::new());
    }

    #[test]
    fn each_distorting_condition_is_reported() {
        let mut environment = quiet_machine();
        environment.steal = 0.031;
        environment.optimized = false;
        environment.machine.quota = Some(1.5);
        environment.machine.allowed = CpuList::parse("1").unwrap();
        let warnings = environment.warnings();
        for (warning, start) in warnings.iter().zip([
            "built without optimization",
            "one processor: driver and emulated controller share it",
            "a quota of 1.50 processors",
            "3.1 % of the time was steal time",
        ]) {
            assert!(warning.starts_with(start), "{warning}");
        }
        assert_eq!(warnings.len(), 4);
        let recommendations = environment.recommendations();
        assert!(recommendations[0].contains("cargo run --release -- perf"));
        assert!(recommendations.last().unwrap().contains("without other load"));
    }

    #[test]
    fn table_shows_known_properties_only() {
        let mut environment = quiet_machine();
        let named = |environment: &RunEnvironment, name| {
            environment.table_rows().into_iter().find(|row| row.0 == name).map(|row| row.1)
        };
        assert_eq!(named(&environment, "machine").unwrap(), "virtual machine of KVM");
        assert_eq!(named(&environment, "time stamp counter").unwrap(), "2596 MHz");
        assert_eq!(named(&environment, "lockable memory").unwrap(), "64 KiB");
        assert_eq!(named(&environment, "polling").unwrap(), "hybrid");
        assert_eq!(named(&environment, "scheduler").unwrap(), "dynamic");
        assert_eq!(named(&environment, "frequency scaling").unwrap(), "unchanged");
        environment.tsc_hz = None;
        assert_eq!(named(&environment, "time stamp counter"), None);
    }
}
