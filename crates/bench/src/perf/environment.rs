//! Environment of a run: the machine, and conditions that were measured during the run.

use tenmil_linux::Environment;
use tenmil_reactor::PollMode;
use tenmil_reactor::schedule::Policy;

use super::options::PerfOptions;

/// Environment of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunEnvironment {
    /// Machine, kernel and resource limits.
    pub machine: Environment,
    /// Fraction of CPU time, from 0 to 1, that the hypervisor gave to other guests during the run.
    pub stolen: f64,
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
    pub optimised: bool,
}

/// Stolen time above this fraction is reported.
const STOLEN_NOTABLE: f64 = 0.005;

impl RunEnvironment {
    /// Environment before a run, from the machine and the options.
    pub fn of(machine: Environment, options: &PerfOptions) -> Self {
        Self {
            machine,
            stolen: 0.0,
            tsc_hz: None,
            memory_backing: String::new(),
            poll: options.poll,
            scheduler: options.scheduler.policy,
            frequency_scaling: String::new(),
            optimised: !cfg!(debug_assertions),
        }
    }

    /// Conditions that distort the result, one sentence each.
    pub fn caveats(&self) -> Vec<String> {
        let mut caveats = Vec::new();
        if !self.optimised {
            caveats.push("built without optimisation: the number says nothing".into());
        }
        if self.machine.allowed.len() < 2 {
            caveats.push(
                "one processor: driver and emulated controller take turns on it, so the number is \
                 what both cost together"
                    .into(),
            );
        }
        if let Some(quota) = self.machine.quota.filter(|quota| *quota < 2.0) {
            caveats.push(format!(
                "a quota of {quota:.2} processors: polling threads use it up and are then stopped, \
                 which lowers the rate and shows as latencies of up to 100 ms"
            ));
        }
        if self.stolen > STOLEN_NOTABLE {
            caveats.push(format!(
                "{:.1} % of the time went to other guests of this host: expect more when it is \
                 quiet",
                self.stolen * 100.0
            ));
        }
        caveats
    }

    /// Recommended changes for a better result, one sentence each, the most effective first.
    pub fn remedies(&self) -> Vec<String> {
        let mut remedies = Vec::new();
        if !self.optimised {
            remedies.push("build with optimisation: `cargo run --release -- perf`".into());
        }
        remedies.extend(self.machine.recommendations());
        if self.stolen > STOLEN_NOTABLE {
            remedies.push("repeat when the host is quiet, or on a machine of its own".into());
        }
        remedies
    }

    /// Table rows of name and value.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let mut rows = machine_rows(&self.machine);
        rows.extend([
            ("stolen time", format!("{:.2} %", self.stolen * 100.0)),
            ("rings and buffers", self.memory_backing.clone()),
            ("polling", self.poll.to_string()),
            ("scheduler", self.scheduler.to_string()),
            ("frequency scaling", self.frequency_scaling.clone()),
        ]);
        if let Some(hz) = self.tsc_hz {
            rows.push(("time stamp counter", format!("{} MHz", hz / 1_000_000)));
        }
        let build = if self.optimised { "optimised" } else { "not optimised" };
        rows.push(("tenmil", format!("{}, {build}", env!("CARGO_PKG_VERSION"))));
        rows.retain(|(_, value)| !value.is_empty());
        rows
    }
}

/// Table rows of the properties that do not change between runs.
pub fn machine_rows(machine: &Environment) -> Vec<(&'static str, String)> {
    let unknown = || "unknown".to_owned();
    let processor = machine.cpu_model.clone().unwrap_or_else(unknown);
    let place = match machine.hypervisor.as_deref() {
        None => "bare metal".into(),
        Some("") => "virtual machine".into(),
        Some(name) => format!("virtual machine of {name}"),
    };
    let mut cores = format!("{} may be used", machine.allowed);
    if let Some(online) = &machine.online {
        cores += &format!(", {online} are there");
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
        ("lockable memory", lockable(machine.lockable_bytes)),
    ];
    rows.extend(machine.governor.clone().map(|governor| ("frequency governor", governor)));
    rows
}

fn lockable(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "unlimited".into(), |bytes| format!("{} KiB", bytes >> 10))
}

#[cfg(test)]
mod tests {
    use tenmil_linux::CpuList;

    use super::RunEnvironment;
    use crate::perf::report::sample::quiet_machine;

    #[test]
    fn a_quiet_machine_has_no_caveats_and_no_remedies() {
        assert_eq!(quiet_machine().caveats(), Vec::<String>::new());
        assert_eq!(quiet_machine().remedies(), Vec::<String>::new());
    }

    #[test]
    fn each_thing_that_bends_the_number_is_said() {
        let mut environment = quiet_machine();
        environment.stolen = 0.031;
        environment.optimised = false;
        environment.machine.quota = Some(1.5);
        environment.machine.allowed = CpuList::parse("1").unwrap();
        let caveats = environment.caveats();
        for (caveat, start) in caveats.iter().zip([
            "built without optimisation",
            "one processor: driver and emulated controller take turns",
            "a quota of 1.50 processors",
            "3.1 % of the time went to other guests",
        ]) {
            assert!(caveat.starts_with(start), "{caveat}");
        }
        assert_eq!(caveats.len(), 4);
        let remedies = environment.remedies();
        assert!(remedies[0].contains("cargo run --release -- perf"));
        assert!(remedies.last().unwrap().contains("when the host is quiet"));
    }

    #[test]
    fn the_table_says_what_is_known_and_leaves_out_what_is_not() {
        let mut environment = quiet_machine();
        let named = |environment: &RunEnvironment, name| {
            environment.rows().into_iter().find(|row| row.0 == name).map(|row| row.1)
        };
        assert_eq!(named(&environment, "machine").unwrap(), "virtual machine of KVM");
        assert_eq!(named(&environment, "time stamp counter").unwrap(), "2596 MHz");
        assert_eq!(named(&environment, "lockable memory").unwrap(), "64 KiB");
        assert_eq!(named(&environment, "polling").unwrap(), "hybrid");
        assert_eq!(named(&environment, "scheduler").unwrap(), "dynamic");
        assert_eq!(named(&environment, "frequency scaling").unwrap(), "left alone");
        environment.tsc_hz = None;
        assert_eq!(named(&environment, "time stamp counter"), None);
    }
}
