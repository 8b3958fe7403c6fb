//! Memory: lockable bytes and huge pages.

use super::limits::{has_capability, resource_limit};
use super::{CheckSection, DoctorContext, MachineCheck, SysfsChange, shell_write_command};

const LOCKABLE: u64 = 1 << 30;
/// Queues of one SSD with 16 pairs of 255 commands, and buffers: with less, `pcie:` does not start.
const LOCKABLE_BYTES_MIN: u64 = 24 << 20;
const RAISE_LIMIT: &str = "sudo prlimit --pid $$ --memlock=unlimited, for good LimitMEMLOCK=infinity in the \
    service or `* - memlock unlimited` in /etc/security/limits.conf";
const HUGE_PAGES: u64 = 512;
/// CAP_IPC_LOCK (capabilities(7)): locked memory is not limited.
const IPC_LOCK: u32 = 14;
const TRANSPARENT: &str = "sys/kernel/mm/transparent_hugepage/enabled";

pub(super) fn check_memory(patient: &DoctorContext<'_>) -> Vec<MachineCheck> {
    vec![
        check_lockable_memory(patient),
        check_huge_pages(patient),
        check_transparent_huge_pages(patient),
    ]
}

fn check_lockable_memory(patient: &DoctorContext<'_>) -> MachineCheck {
    let finding = CheckSection::Memory.new_check(
        "lockable memory",
        "1 GiB or more",
        "memory that an SSD under VFIO reaches is locked, and so are registered buffers",
    );
    if has_capability(patient.machine, IPC_LOCK) {
        return finding.with_good("without limit (CAP_IPC_LOCK)");
    }
    let Some(found) = resource_limit(patient.machine, "Max locked memory") else {
        return finding.with_unknown("/proc/self/limitsis not readable");
    };
    let Some(soft) = found.soft.filter(|soft| *soft < LOCKABLE) else {
        return finding.with_good(found.soft.map_or_else(|| "without limit".into(), kib_text));
    };
    let command = match found.hard.is_none_or(|hard| hard >= LOCKABLE) {
        true => "ulimit -l 1048576",
        false => RAISE_LIMIT,
    };
    // Required where VFIO is present.
    match soft < LOCKABLE_BYTES_MIN && patient.machine.exists("dev/vfio/vfio") {
        true => finding.with_required(kib_text(soft), command),
        false => finding.with_warning(kib_text(soft), command),
    }
}

fn check_huge_pages(patient: &DoctorContext<'_>) -> MachineCheck {
    let finding = CheckSection::Memory.new_check(
        "huge pages of 2 MiB",
        "512 free",
        "rings and buffers in them need one entry of the IOMMU and the TLB where small pages need 512",
    );
    let number = |name: &str| {
        patient.machine.read_number(&format!("sys/kernel/mm/hugepages/hugepages-2048kB/{name}"))
    };
    match (number("nr_hugepages"), number("free_hugepages")) {
        (Some(all), Some(free)) if free >= HUGE_PAGES => {
            finding.with_good(format!("{free} of {all} free"))
        }
        (Some(all), Some(free)) => finding.with_warning(
            format!("{free} of {all} free"),
            shell_write_command(
                &(all - free.min(all) + HUGE_PAGES).to_string(),
                "proc/sys/vm/nr_hugepages",
            ),
        ),
        _ => finding.with_unknown("this kernel shows no pool of them"),
    }
}

fn check_transparent_huge_pages(patient: &DoctorContext<'_>) -> MachineCheck {
    let finding = CheckSection::Memory.new_check(
        "transparent huge pages",
        "madvise or always",
        "tenmil requests them where no others are reserved",
    );
    let text = patient.machine.read_trimmed(TRANSPARENT);
    // The word in brackets is active: `always [madvise] never`.
    let word = text.as_ref().and_then(|text| Some(text.split_once('[')?.1.split_once(']')?.0));
    match word {
        Some("never") => {
            let (from, to) = ("never".into(), "madvise".into());
            finding
                .with_warning("never", shell_write_command("madvise", TRANSPARENT))
                .with_safe_changes(vec![SysfsChange { path: TRANSPARENT.into(), from, to }])
        }
        Some(word) => finding.with_good(word),
        None => finding.with_unknown(format!("/{TRANSPARENT}is not readable")),
    }
}

fn kib_text(bytes: u64) -> String {
    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;
    match bytes {
        _ if bytes >= GIB && bytes.is_multiple_of(GIB) => format!("{} GiB", bytes / GIB),
        _ if bytes >= MIB && bytes.is_multiple_of(MIB) => format!("{} MiB", bytes / MIB),
        _ => format!("{} KiB", bytes / 1024),
    }
}
