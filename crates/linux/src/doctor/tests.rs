//! Machines made of files, and their checks.

mod apply_fixes;
mod devices;
mod severities;

use super::{
    CheckSection, DoctorContext, KernelProbe, MachineCheck, check_this_machine, run_checks,
};
use crate::ethtool::{NicChannels, NicCoalescing, NicRings};
use crate::kernel_files::KernelFiles;
use crate::kernel_files::tests::fake_kernel_files;
use crate::tc_flower::FlowerFilter;
use crate::{CpuList, Errno};

/// A card with these settings, or none.
struct FakeProbe {
    io_uring: Result<(), String>,
    rings: Result<NicRings, Errno>,
    channels: Result<NicChannels, Errno>,
    coalescing: Result<NicCoalescing, Errno>,
    flowers: Result<Vec<FlowerFilter>, Errno>,
}

impl KernelProbe for FakeProbe {
    fn io_uring(&self) -> Result<(), String> {
        self.io_uring.clone()
    }

    fn nic_rings(&self, _: &str) -> Result<NicRings, Errno> {
        self.rings
    }

    fn nic_channels(&self, _: &str) -> Result<NicChannels, Errno> {
        self.channels
    }

    fn coalescing(&self, _: &str) -> Result<NicCoalescing, Errno> {
        self.coalescing
    }

    fn flower_filters(&self, card: u32) -> Result<Vec<FlowerFilter>, Errno> {
        assert_eq!(card, 2, "the only card that there is");
        self.flowers.clone()
    }
}

fn probe_with_unsupported_queries() -> FakeProbe {
    let no = Errno::OPNOTSUPP;
    FakeProbe {
        io_uring: Ok(()),
        rings: Err(no),
        channels: Err(no),
        coalescing: Err(no),
        flowers: Err(no),
    }
}

fn checks_of_machine(machine: &KernelFiles, reported: &FakeProbe) -> Vec<MachineCheck> {
    let allowed = CpuList::parse("0-3").unwrap();
    run_checks(&DoctorContext { machine, kernel: reported, uid: 1000, allowed: &allowed })
}

/// A machine with many slow settings.
const SLOW: &[(&str, &str)] = &[
    ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
    ("proc/sys/net/core/rmem_max", "212992\n"),
    ("proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456\n"),
    ("sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "powersave\n"),
    ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "0\n"),
    ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "0\n"),
    ("proc/sys/vm/nr_hugepages", "0\n"),
    ("proc/self/cgroup", "0::/box\n"),
    ("sys/fs/cgroup/box/cpu.max", "150000 100000\n"),
    ("proc/sys/kernel/io_uring_disabled", "2\n"),
];

#[test]
fn check_is_formatted_on_one_line() {
    let (_root, machine) = fake_kernel_files(SLOW);
    let all = checks_of_machine(&machine, &probe_with_unsupported_queries());
    for finding in all.iter().chain(&check_this_machine()) {
        let line = finding.to_string();
        assert!(!line.contains('\n') && line.starts_with(finding.severity.name()), "{line}");
        assert!(!finding.found.is_empty(), "{line}");
    }
    let line = all.iter().find(|one| one.item == "net.core.rmem_max").unwrap().to_string();
    assert_eq!(
        line,
        "slow     net.core.rmem_max: 212992; recommended 268435456 or more: the largest receive buffer \
         that a program may ask for; nothing is reserved; fix: sudo sysctl -w \
         net.core.rmem_max=268435456"
    );
    let missing = all.iter().find(|one| one.item == "net.core.wmem_max").unwrap().to_string();
    assert!(
        missing.starts_with("unknown  net.core.wmem_max: not readable here: /proc/sys"),
        "{missing}"
    );
}

#[test]
fn checks_of_this_machine_cover_all_sections() {
    let all = check_this_machine();
    for part in CheckSection::ALL {
        assert!(all.iter().any(|finding| finding.section == part), "{part:?}");
    }
    assert!(all.windows(2).all(|two| two[0].section <= two[1].section), "part by part");
}
