//! Kernel limits and settings: io_uring, descriptors, sockets, NAPI.

use super::limits::resource_limit;
use super::{CheckSection, DoctorContext, MachineCheck, SysfsChange};
use crate::fd_table::DESCRIPTORS_RESERVED;

const IO_URING: &str = "proc/sys/kernel/io_uring_disabled";

/// Numeric sysctl with a recommended minimum.
struct MinimumSetting {
    name: &'static str,
    minimum: u64,
    recommended: &'static str,
    why: &'static str,
}

const MINIMUM_SETTINGS: [MinimumSetting; 5] = [
    MinimumSetting {
        name: "net.core.netdev_budget",
        minimum: 300,
        recommended: "300 or more",
        why: "packets that NAPI receives in one softirq",
    },
    MinimumSetting {
        name: "net.core.netdev_budget_usecs",
        minimum: 8000,
        recommended: "8000 or more",
        why: "time that NAPI has for one softirq",
    },
    MinimumSetting {
        name: "net.core.dev_weight",
        minimum: 64,
        recommended: "64 or more",
        why: "packets that NAPI receives from one card in one poll",
    },
    MinimumSetting {
        name: "net.core.rmem_max",
        minimum: 256 << 20,
        recommended: "268435456 or more",
        why: "the largest receive buffer that a program may ask for; nothing is reserved",
    },
    MinimumSetting {
        name: "net.core.wmem_max",
        minimum: 256 << 20,
        recommended: "268435456 or more",
        why: "the largest send buffer that a program may ask for; nothing is reserved",
    },
];

/// Recommended maximum in settings of three numbers: minimum, default and maximum.
const BUFFER_BYTES_RECOMMENDED: u64 = 128 << 20;

pub(super) fn check_kernel(patient: &DoctorContext<'_>) -> Vec<MachineCheck> {
    let mut findings = vec![check_io_uring(patient), check_fd_limit(patient)];
    findings.extend(MINIMUM_SETTINGS.iter().map(|floor| check_minimum(patient, floor)));
    findings.push(check_socket_buffers(patient, "net.ipv4.tcp_rmem"));
    findings.push(check_socket_buffers(patient, "net.ipv4.tcp_wmem"));
    findings.push(check_busy_poll(patient));
    findings
}

fn check_io_uring(patient: &DoctorContext<'_>) -> MachineCheck {
    let finding = CheckSection::Kernel.new_check(
        "io_uring",
        "allowed",
        "without it files are read and written by threads, and sockets by epoll alone",
    );
    let switch = patient.machine.read_number(IO_URING);
    match (patient.kernel.io_uring(), switch) {
        (Ok(()), _) => finding.with_good("allowed"),
        (Err(why), Some(disabled @ 1..)) => finding.with_warning(
            format!("refused ({why}), kernel.io_uring_disabled is {disabled}"),
            "sudo sysctl kernel.io_uring_disabled=0",
        ),
        (Err(why), _) => finding.with_warning(
            format!("refused ({why})"),
            "allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp \
             profile",
        ),
    }
}

fn check_fd_limit(patient: &DoctorContext<'_>) -> MachineCheck {
    let finding = CheckSection::Kernel.new_check(
        "open files",
        "65536 or more",
        "each connection takes five descriptors at a target",
    );
    let Some(found) = resource_limit(patient.machine, "Max open files") else {
        return finding.with_unknown("/proc/self/limitsis not readable");
    };
    // Every tenmil process raises its soft limit to the hard limit.
    let Some(hard) = found.hard else { return finding.with_good("without limit") };
    if hard >= DESCRIPTORS_RESERVED {
        return finding.with_good(hard.to_string());
    }
    let command = "sudo prlimit --pid $$ --nofile=65536, for good LimitNOFILE=65536 in the service";
    finding.with_warning(hard.to_string(), command)
}

fn check_minimum(patient: &DoctorContext<'_>, floor: &MinimumSetting) -> MachineCheck {
    let MinimumSetting { name, minimum: least, recommended, why } = floor;
    let finding = CheckSection::Kernel.new_check(*name, recommended, why);
    let path = sysctl_path(name);
    match patient.machine.read_number(&path) {
        None => finding.with_unknown(format!("/{path} is not there, as in a network of its own")),
        Some(found) if found >= *least => finding.with_good(found.to_string()),
        Some(found) => {
            let (from, to) = (found.to_string(), least.to_string());
            finding
                .with_warning(&*from, format!("sudo sysctl -w {name}={to}"))
                .with_safe_changes(vec![SysfsChange { path, from: from.clone(), to }])
        }
    }
}

fn check_socket_buffers(patient: &DoctorContext<'_>, name: &'static str) -> MachineCheck {
    let finding = CheckSection::Kernel.new_check(
        name,
        "134217728 or more as the last number",
        "what a connection may have in flight when the kernel adapts its buffers: 100 Gbit/s over 10 \
         ms; nothing is reserved",
    );
    let path = sysctl_path(name);
    let text = patient.machine.read_trimmed(&path).unwrap_or_default();
    let numbers: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    match numbers[..] {
        [_, _, most] if most >= BUFFER_BYTES_RECOMMENDED => {
            finding.with_good(format_value(&numbers))
        }
        [least, default, _] => {
            let (from, to) =
                (format_value(&numbers), format_value(&[least, default, BUFFER_BYTES_RECOMMENDED]));
            finding
                .with_warning(&*from, format!("sudo sysctl -w {name}='{to}'"))
                .with_safe_changes(vec![SysfsChange { path, from: from.clone(), to }])
        }
        _ => finding.with_unknown(format!("/{path} is not there, as in a network of its own")),
    }
}

fn check_busy_poll(patient: &DoctorContext<'_>) -> MachineCheck {
    let finding = CheckSection::Kernel.new_check(
        "net.core.busy_poll",
        "0",
        "tenmil sets it for its own sockets with busy-poll=; for all, every poll() in the machine \
         spins",
    );
    let path = sysctl_path("net.core.busy_poll");
    match patient.machine.read_number(&path) {
        None => finding.with_unknown(format!("/{path} is not there")),
        Some(0) => finding.with_good("0"),
        Some(found) => finding.with_info(format!("{found} us")),
    }
}

fn format_value(numbers: &[u64]) -> String {
    numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(" ")
}

fn sysctl_path(name: &str) -> String {
    format!("proc/sys/{}", name.replace('.', "/"))
}
