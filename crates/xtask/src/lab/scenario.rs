//! What is tried in guests: a table, and a script for each in `guest/`.

/// One guest and what it has to do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// What it shows, in a line.
    pub(crate) about: &'static str,
    /// Whether it is run when nothing is asked for by name.
    pub(crate) is_short: bool,
    /// How long a guest may take, from its first instruction to its last.
    pub(crate) seconds_max: u64,
    /// QEMU's word for the machine.
    pub(crate) machine: &'static str,
    /// What QEMU puts in beside it.
    pub(crate) devices: &'static [&'static str],
    /// What the kernel is told beside what it always is.
    pub(crate) kernel_line: &'static str,
    /// What the guest does.
    pub(crate) script: &'static str,
}

/// A machine without anything.
const BARE: Scenario = Scenario {
    name: "",
    about: "",
    is_short: true,
    seconds_max: 300,
    machine: "q35",
    devices: &[],
    kernel_line: "",
    script: "",
};

/// Every scenario there is.
pub(crate) const SCENARIOS: [Scenario; 5] = [
    Scenario {
        name: "bind",
        about: "an SSD behind an IOMMU goes from Linux to vfio-pci and back; disks in use stay",
        machine: "q35,kernel-irqchip=split",
        devices: &[
            "-device",
            "intel-iommu,intremap=on",
            "-drive",
            "driver=null-co,size=64M,read-zeroes=on,snapshot=on,if=none,id=disk",
            "-device",
            "nvme,serial=LAB1,drive=disk",
        ],
        kernel_line: "intel_iommu=on",
        script: include_str!("guest/bind.sh"),
        seconds_max: 150,
        ..BARE
    },
    Scenario {
        name: "linux-host",
        about: "Linux's NVMe/TCP host and nvme-cli use what `tenmil serve` offers",
        script: include_str!("guest/linux-host.sh"),
        seconds_max: 420,
        ..BARE
    },
    Scenario {
        name: "linux-paths",
        about: "Linux's multipath over two listeners that change while it writes",
        is_short: false,
        script: include_str!("guest/linux-paths.sh"),
        ..BARE
    },
    Scenario {
        name: "linux-target",
        about: "tenmil's NVMe/TCP host uses what Linux's target offers",
        script: include_str!("guest/linux-target.sh"),
        ..BARE
    },
    Scenario {
        name: "null-blk",
        about: "the block layers of Linux and of tenmil over nothing, thread by thread (ratios only)",
        is_short: false,
        script: include_str!("guest/null-blk.sh"),
        ..BARE
    },
];

/// What all scripts begin with.
pub(crate) const BEGINNING: &str = include_str!("guest/lab.sh");

/// The first process of every guest.
pub(crate) const INIT: &str = include_str!("guest/init.sh");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_different_and_the_short_ones_end_within_a_quarter_of_an_hour() {
        let mut names: Vec<_> = SCENARIOS.iter().map(|scenario| scenario.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), SCENARIOS.len());
        let short = SCENARIOS.iter().filter(|scenario| scenario.is_short);
        assert!(short.map(|scenario| scenario.seconds_max).sum::<u64>() <= 15 * 60);
    }
}
