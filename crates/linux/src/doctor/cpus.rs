//! CPUs: isolation, frequency, quotas and mitigations.

use super::{CheckSection, DoctorContext, MachineCheck, SysfsChange, shell_write_command};
use crate::CpuList;
use crate::cgroup::CgroupLimits;

const GOVERNOR: &str = "scaling_governor";
const VULNERABILITIES: &str = "sys/devices/system/cpu/vulnerabilities";
/// Vulnerabilities whose mitigations slow down system calls or interrupts.
const AT_SYSTEM_CALLS: [&str; 7] =
    ["l1tf", "mds", "meltdown", "retbleed", "spec_rstack_overflow", "spectre_v2", "vmscape"];

pub(super) fn check_cpus(patient: &DoctorContext<'_>) -> Vec<MachineCheck> {
    vec![
        check_isolated_cpus(patient),
        check_governor(patient),
        check_cpu_quota(patient),
        check_mitigations(patient),
    ]
}

fn check_isolated_cpus(patient: &DoctorContext<'_>) -> MachineCheck {
    let finding = CheckSection::Processors.new_check(
        "isolated cores",
        "those that poll",
        "on others the scheduler and its clock tick preempt a polling thread",
    );
    let machine = patient.machine;
    let Some(online) = machine.online_cpus() else {
        return finding.with_unknown("the kernel does not report which cores are online");
    };
    let Some(isolated) = machine.isolated_cpus() else {
        if online.len() < 4 {
            return finding
                .with_info(format!("none of {}, too few to keep any free", online.len()));
        }
        let last = online.iter().last().unwrap_or_default();
        let cores = format!("{}-{last}", last - 1);
        return finding.with_warning(
            format!("none of {online}"),
            format!(
                "isolcpus=managed_irq,domain,{cores} nohz_full={cores} rcu_nocbs={cores} on the \
                 kernel's command line"
            ),
        );
    };
    let usable = isolated.intersection(patient.allowed);
    if usable.is_empty() {
        return finding.with_warning(
            format!("{isolated}, of which this process may use none: it has {}", patient.allowed),
            format!("start it under taskset -c {isolated}, in a cpuset that has them"),
        );
    }
    let ticking = machine.read_cpu_list("sys/devices/system/cpu/nohz_full");
    match ticking.filter(|quiet| usable.iter().all(|core| quiet.contains(core))) {
        Some(_) => finding.with_good(format!("{isolated}, without a clock tick")),
        None => finding.with_warning(
            format!("{isolated}, with a clock tick"),
            format!("nohz_full={isolated} on the kernel's command line, if it is built with it"),
        ),
    }
}

fn check_governor(patient: &DoctorContext<'_>) -> MachineCheck {
    let finding = CheckSection::Processors.new_check(
        "frequency governor",
        "performance",
        "a polling thread is busy at any frequency, so load does not raise the frequency",
    );
    let machine = patient.machine;
    let file = |core: u32| format!("sys/devices/system/cpu/cpu{core}/cpufreq/{GOVERNOR}");
    let all: Vec<(u32, String)> = patient
        .allowed
        .iter()
        .filter_map(|core| Some((core, machine.read_trimmed(&file(core))?)))
        .collect();
    if all.is_empty() {
        return finding.with_info("the kernel does not scale the frequency here");
    }
    let others: Vec<&(u32, String)> =
        all.iter().filter(|(_, name)| name != "performance").collect();
    let Some((_, name)) = others.first() else { return finding.with_good("performance") };
    let cores: CpuList = others.iter().map(|(core, _)| *core).collect();
    let change = |(core, from): &&(u32, String)| SysfsChange {
        path: file(*core),
        from: from.clone(),
        to: "performance".into(),
    };
    let changes = others.iter().map(change).collect();
    finding
        .with_warning(
            format!("{name} on {cores}"),
            shell_write_command(
                "performance",
                "sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
            ),
        )
        .with_safe_changes(changes)
}

fn check_cpu_quota(patient: &DoctorContext<'_>) -> MachineCheck {
    let finding = CheckSection::Processors.new_check(
        "quota of the control group",
        "none, or 2 processors and more",
        "threads that poll use a quota up, and are then stopped for up to 100 ms",
    );
    let machine = patient.machine;
    if !machine.exists("proc/self/cgroup") {
        return finding.with_unknown("/proc/self/cgroup is not there");
    }
    let limits = CgroupLimits::read(machine);
    match (limits.quota, limits.quota_file) {
        (Some(quota), Some(file)) if quota < 2.0 => {
            let unlimited = if file.ends_with("cpu.max") { "max" } else { "-1" };
            let path = file.trim_start_matches('/');
            finding.with_warning(
                format!("{quota:.2} processors"),
                shell_write_command(unlimited, path),
            )
        }
        (Some(quota), _) => finding.with_good(format!("{quota:.2} processors")),
        (None, _) => finding.with_good("none"),
    }
}

fn check_mitigations(patient: &DoctorContext<'_>) -> MachineCheck {
    let finding = CheckSection::Processors.new_check(
        "mitigations that cost system calls",
        "as the machine's owner requires",
        "SSDs and shared memory are driven without system calls, files and sockets are not",
    );
    let machine = patient.machine;
    if machine.directory_entries(VULNERABILITIES).is_empty() {
        return finding.with_unknown(format!("/{VULNERABILITIES} is not there"));
    }
    let is_on = |name: &&str| {
        let text = machine.read_trimmed(&format!("{VULNERABILITIES}/{name}"));
        text.is_some_and(|text| text.starts_with("Mitigation"))
    };
    let on: Vec<&str> = AT_SYSTEM_CALLS.into_iter().filter(is_on).collect();
    finding.with_info(if on.is_empty() { "none".into() } else { on.join(", ") })
}
