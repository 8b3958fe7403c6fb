//! Memory: lockable bytes and huge pages.

use super::limits::{is_capable, limit};
use super::{Check, DoctorContext, Section, SysfsChange, write_command};

const LOCKABLE: u64 = 1 << 30;
/// Queues of one SSD with 16 pairs of 255 commands, and buffers: with less, `pcie:` does not start.
const LOCKABLE_BYTES_MIN: u64 = 24 << 20;
const RAISE_LIMIT: &str = "sudo prlimit --pid $$ --memlock=unlimited, for good LimitMEMLOCK=infinity in the \
    service or `* - memlock unlimited` in /etc/security/limits.conf";
const HUGE_PAGES: u64 = 512;
/// CAP_IPC_LOCK (capabilities(7)): locked memory is not limited.
const IPC_LOCK: u32 = 14;
const TRANSPARENT: &str = "sys/kernel/mm/transparent_hugepage/enabled";

pub(super) fn examine(patient: &DoctorContext<'_>) -> Vec<Check> {
    vec![lockable(patient), huge(patient), transparent(patient)]
}

fn lockable(patient: &DoctorContext<'_>) -> Check {
    let finding = Section::Memory.check(
        "lockable memory",
        "1 GiB or more",
        "memory that an SSD under VFIO reaches is locked, and so are registered buffers",
    );
    if is_capable(patient.machine, IPC_LOCK) {
        return finding.good("without limit (CAP_IPC_LOCK)");
    }
    let Some(found) = limit(patient.machine, "Max locked memory") else {
        return finding.unknown("/proc/self/limitsis not readable");
    };
    let Some(soft) = found.soft.filter(|soft| *soft < LOCKABLE) else {
        return finding.good(found.soft.map_or_else(|| "without limit".into(), kib));
    };
    let command = match found.hard.is_none_or(|hard| hard >= LOCKABLE) {
        true => "ulimit -l 1048576",
        false => RAISE_LIMIT,
    };
    // Required where VFIO is present.
    match soft < LOCKABLE_BYTES_MIN && patient.machine.has("dev/vfio/vfio") {
        true => finding.missing(kib(soft), command),
        false => finding.slow(kib(soft), command),
    }
}

fn huge(patient: &DoctorContext<'_>) -> Check {
    let finding = Section::Memory.check(
        "huge pages of 2 MiB",
        "512 free",
        "rings and buffers in them need one entry of the IOMMU and the TLB where small pages need 512",
    );
    let number = |name: &str| {
        patient.machine.number(&format!("sys/kernel/mm/hugepages/hugepages-2048kB/{name}"))
    };
    match (number("nr_hugepages"), number("free_hugepages")) {
        (Some(all), Some(free)) if free >= HUGE_PAGES => {
            finding.good(format!("{free} of {all} free"))
        }
        (Some(all), Some(free)) => finding.slow(
            format!("{free} of {all} free"),
            write_command(
                &(all - free.min(all) + HUGE_PAGES).to_string(),
                "proc/sys/vm/nr_hugepages",
            ),
        ),
        _ => finding.unknown("this kernel shows no pool of them"),
    }
}

fn transparent(patient: &DoctorContext<'_>) -> Check {
    let finding = Section::Memory.check(
        "transparent huge pages",
        "madvise or always",
        "tenmil requests them where no others are reserved",
    );
    let text = patient.machine.text(TRANSPARENT);
    // The word in brackets is active: `always [madvise] never`.
    let word = text.as_ref().and_then(|text| Some(text.split_once('[')?.1.split_once(']')?.0));
    match word {
        Some("never") => {
            let (from, to) = ("never".into(), "madvise".into());
            finding.slow("never", write_command("madvise", TRANSPARENT)).safe(vec![SysfsChange {
                path: TRANSPARENT.into(),
                from,
                to,
            }])
        }
        Some(word) => finding.good(word),
        None => finding.unknown(format!("/{TRANSPARENT}is not readable")),
    }
}

fn kib(bytes: u64) -> String {
    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;
    match bytes {
        _ if bytes >= GIB && bytes.is_multiple_of(GIB) => format!("{} GiB", bytes / GIB),
        _ if bytes >= MIB && bytes.is_multiple_of(MIB) => format!("{} MiB", bytes / MIB),
        _ => format!("{} KiB", bytes / 1024),
    }
}
