//! Machines made of files, and their checks.

mod applied;
mod devices;
mod values;

use super::{Check, DoctorContext, KernelProbe, Section, examine, examine_this};
use crate::ethtool::{Channels, Coalescing, Rings};
use crate::kernel_files::KernelFiles;
use crate::kernel_files::tests::made_of;
use crate::tc_flower::FlowerFilter;
use crate::{CpuList, Errno};

/// A card with these settings, or none.
struct Told {
    io_uring: Result<(), String>,
    rings: Result<Rings, Errno>,
    channels: Result<Channels, Errno>,
    coalescing: Result<Coalescing, Errno>,
    flowers: Result<Vec<FlowerFilter>, Errno>,
}

impl KernelProbe for Told {
    fn io_uring(&self) -> Result<(), String> {
        self.io_uring.clone()
    }

    fn rings(&self, _: &str) -> Result<Rings, Errno> {
        self.rings
    }

    fn channels(&self, _: &str) -> Result<Channels, Errno> {
        self.channels
    }

    fn coalescing(&self, _: &str) -> Result<Coalescing, Errno> {
        self.coalescing
    }

    fn flower_filters(&self, card: u32) -> Result<Vec<FlowerFilter>, Errno> {
        assert_eq!(card, 2, "the only card that there is");
        self.flowers.clone()
    }
}

fn silent() -> Told {
    let no = Errno::OPNOTSUPP;
    Told {
        io_uring: Ok(()),
        rings: Err(no),
        channels: Err(no),
        coalescing: Err(no),
        flowers: Err(no),
    }
}

fn look(machine: &KernelFiles, told: &Told) -> Vec<Check> {
    let allowed = CpuList::parse("0-3").unwrap();
    examine(&DoctorContext { machine, kernel: told, uid: 1000, allowed: &allowed })
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
fn a_finding_is_one_line() {
    let (_root, machine) = made_of(SLOW);
    let all = look(&machine, &silent());
    for finding in all.iter().chain(&examine_this()) {
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
fn this_machine_is_looked_at_in_all_its_parts() {
    let all = examine_this();
    for part in Section::ALL {
        assert!(all.iter().any(|finding| finding.section == part), "{part:?}");
    }
    assert!(all.windows(2).all(|two| two[0].section <= two[1].section), "part by part");
}
