//! Scenarios: a table, and a script for each in `guest/`.

use super::guest_images::{BUILT, QemuChoice};
use super::qemu_monitor::MonitorAction;

/// Scenario of one guest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LabScenario {
    pub(crate) name: &'static str,
    /// One-line description.
    pub(crate) about: &'static str,
    /// What is tested with what.
    pub(crate) kind: ScenarioKind,
    /// Time limit of the guest in seconds, including the boot.
    pub(crate) seconds_max: u64,
    /// Time limit of the short variant, if there is one.
    pub(crate) short_seconds_max: Option<u64>,
    /// Whether this is the short variant; the script is told so.
    pub(crate) is_short: bool,
    /// QEMU to use.
    pub(crate) emulator: QemuChoice,
    /// QEMU machine type.
    pub(crate) machine: &'static str,
    /// Further QEMU arguments. `ROOM` stands for the directory of the lab.
    pub(crate) devices: &'static [&'static str],
    /// Size in bytes of the sparse disk files, which are created anew.
    pub(crate) disk_bytes: u64,
    /// Names of the disk files: `ROOM/disk`.
    pub(crate) disks: &'static [&'static str],
    /// Monitor actions that the guest may request.
    pub(crate) deeds: &'static [MonitorAction],
    /// Whether the guest may reboot.
    pub(crate) may_restart: bool,
    /// Arguments of the companion tenmil process, if there is one, with `ROOM` as above.
    pub(crate) beside: &'static [&'static str],
    /// Whether QEMU may exit with the companion; then another is started, as after `@@ cold start`.
    pub(crate) may_end_with_beside: bool,
    /// Debian suite of the kernel, overriding the option: one with the needed features, or [`BUILT`].
    pub(crate) suite: Option<&'static str>,
    /// Whether it needs programs of the kernel's suite that this machine may lack.
    pub(crate) needs_newer: bool,
    /// Whether it needs tlshd, keyctl and an nvme-cli of the kernel's suite, for TLS and authentication.
    pub(crate) needs_secure: bool,
    /// Whether it needs the proxy that replaces bytes of connections.
    pub(crate) needs_proxy: bool,
    /// Whether it needs the CSI driver, csi-sanity, and the programs that the driver runs.
    pub(crate) needs_csi: bool,
    /// Further kernel parameters.
    pub(crate) kernel_line: &'static str,
    /// The guest script.
    pub(crate) script: &'static str,
}

/// Kind of a scenario. The short run has one scenario of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScenarioKind {
    /// Emulated SSDs and tenmil's driver.
    Ssd,
    /// Linux as the host and tenmil as the target.
    OurTarget,
    /// Tenmil as the host and Linux as the target.
    OurHost,
    /// A guest and a controller over vfio-user.
    Controller,
    /// A kernel and a disk over ublk or vhost-user.
    Disk,
    /// The block layers of Linux and tenmil, over null devices.
    BlockLayer,
    /// NVMe/TCP with TLS and DH-HMAC-CHAP, in both directions.
    Secure,
}

impl ScenarioKind {
    /// Short name.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ssd => "pcie",
            Self::OurTarget => "target",
            Self::OurHost => "host",
            Self::Controller => "vfio-user",
            Self::Disk => "disk",
            Self::BlockLayer => "block layer",
            Self::Secure => "secure",
        }
    }
}

impl LabScenario {
    /// The short variant, if there is one.
    pub(crate) fn shortened(self) -> Option<Self> {
        self.short_seconds_max.map(|seconds_max| Self {
            seconds_max,
            is_short: true,
            // No short variant uses them.
            needs_newer: false,
            ..self
        })
    }
}

/// Defaults: a machine without devices.
const BARE: LabScenario = LabScenario {
    name: "",
    about: "",
    kind: ScenarioKind::Ssd,
    seconds_max: 300,
    short_seconds_max: None,
    is_short: false,
    emulator: QemuChoice::Installed,
    machine: "q35",
    devices: &[],
    disk_bytes: 0,
    disks: &["disk"],
    deeds: &[],
    may_restart: false,
    beside: &[],
    may_end_with_beside: false,
    suite: None,
    needs_newer: false,
    needs_secure: false,
    needs_proxy: false,
    needs_csi: false,
    kernel_line: "",
    script: "",
};

/// Two SSDs behind an IOMMU: one with two namespaces, and one in a hot-plug slot.
const PCIE: LabScenario = LabScenario {
    name: "pcie",
    about: "QEMU's NVMe devices behind an IOMMU, driven by tenmil, and one pulled under load",
    machine: "q35,kernel-irqchip=split",
    devices: &[
        "-device",
        // The address width of client processors.
        "intel-iommu,intremap=on,aw-bits=39",
        "-drive",
        "file=ROOM/disk,format=raw,if=none,id=disk",
        "-drive",
        "file=ROOM/disk2,format=raw,if=none,id=disk2",
        "-device",
        "nvme,id=fixed,serial=LAB1",
        "-device",
        "nvme-ns,bus=fixed,drive=disk,nsid=1",
        "-device",
        "nvme-ns,bus=fixed,drive=disk2,nsid=2",
        "-device",
        "pcie-root-port,id=bay,chassis=1,slot=1",
        // A drive would be deleted with its device.
        "-blockdev",
        "driver=raw,node-name=disk3,file.driver=file,file.filename=ROOM/disk3",
        "-device",
        "nvme,id=pulled,bus=bay,drive=disk3,serial=LAB2",
    ],
    disk_bytes: 256 << 20,
    disks: &["disk", "disk2", "disk3"],
    deeds: &[
        MonitorAction { name: "pull", command: PULL },
        MonitorAction { name: "put in", command: PUT_IN },
    ],
    kernel_line: "intel_iommu=on",
    seconds_max: 900,
    short_seconds_max: Some(150),
    script: include_str!("guest/pcie.sh"),
    ..BARE
};

/// A guest of the kernel with secure channel concatenation, with the programs for TLS.
const SECURE: LabScenario = LabScenario {
    kind: ScenarioKind::Secure,
    suite: Some("forky"),
    needs_secure: true,
    seconds_max: 420,
    ..BARE
};

/// All scenarios.
pub(crate) const SCENARIOS: [LabScenario; 24] = [
    LabScenario {
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
    LabScenario {
        name: "linux-host",
        kind: ScenarioKind::OurTarget,
        about: "Linux's NVMe/TCP host and nvme-cli use what `tenmil serve` offers",
        needs_newer: true,
        script: include_str!("guest/linux-host.sh"),
        seconds_max: 600,
        short_seconds_max: Some(200),
        ..BARE
    },
    LabScenario {
        name: "linux-paths",
        kind: ScenarioKind::OurTarget,
        about: "Linux's multipath over two listeners that change while it writes",
        script: include_str!("guest/linux-paths.sh"),
        ..BARE
    },
    LabScenario {
        name: "linux-live",
        kind: ScenarioKind::OurTarget,
        about: "Linux's host while namespaces, hosts, listeners, ANA states and limits change by commands",
        script: include_str!("guest/linux-live.sh"),
        ..BARE
    },
    LabScenario {
        name: "csi",
        kind: ScenarioKind::OurTarget,
        about: "the CSI driver with Linux's nvme-tcp: data of volumes, snapshots and clones, and csi-sanity",
        needs_csi: true,
        seconds_max: 900,
        script: include_str!("guest/csi.sh"),
        ..BARE
    },
    LabScenario {
        name: "linux-target",
        kind: ScenarioKind::OurHost,
        about: "tenmil's NVMe/TCP host uses what Linux's target offers",
        script: include_str!("guest/linux-target.sh"),
        short_seconds_max: Some(150),
        ..BARE
    },
    PCIE,
    LabScenario {
        name: "iommufd",
        about: "the same by their own device nodes, on a kernel with iommufd, which Debian's lack",
        suite: Some(BUILT),
        seconds_max: 1200,
        short_seconds_max: None,
        script: concat!(include_str!("guest/iommufd.sh"), include_str!("guest/pcie.sh")),
        ..PCIE
    },
    LabScenario {
        name: "one-group",
        about: "two SSDs that are one to the IOMMU: one process has both, or none",
        devices: &[
            "-device",
            "intel-iommu,intremap=on,aw-bits=39",
            "-drive",
            "file=ROOM/disk,format=raw,if=none,id=disk",
            "-drive",
            "file=ROOM/disk2,format=raw,if=none,id=disk2",
            "-device",
            "nvme,serial=LAB1,drive=disk,addr=8.0,multifunction=on",
            "-device",
            "nvme,serial=LAB2,drive=disk2,addr=8.1",
        ],
        disk_bytes: 64 << 20,
        disks: &["disk", "disk2"],
        deeds: &[],
        suite: Some(BUILT),
        seconds_max: 300,
        short_seconds_max: None,
        script: include_str!("guest/one-group.sh"),
        ..PCIE
    },
    LabScenario {
        name: "cmb",
        about: "QEMU's NVMe devices whose submission queues lie in memory of their own, old and new",
        machine: "q35,kernel-irqchip=split",
        devices: &[
            "-device",
            "intel-iommu,intremap=on,aw-bits=39",
            "-drive",
            "file=ROOM/disk,format=raw,if=none,id=disk",
            "-drive",
            "file=ROOM/disk2,format=raw,if=none,id=disk2",
            "-drive",
            "file=ROOM/disk3,format=raw,if=none,id=disk3",
            "-device",
            "nvme,serial=LAB1,drive=disk,cmb_size_mb=4",
            "-device",
            // CMB registers as before NVMe 1.4.
            "nvme,serial=LAB2,drive=disk2,cmb_size_mb=4,legacy-cmb=on",
            "-device",
            "nvme,serial=LAB3,drive=disk3",
        ],
        disk_bytes: 64 << 20,
        disks: &["disk", "disk2", "disk3"],
        kernel_line: "intel_iommu=on",
        seconds_max: 420,
        script: include_str!("guest/cmb.sh"),
        ..BARE
    },
    LabScenario {
        name: "no-iommu",
        about: "QEMU's NVMe device without an IOMMU, on a kernel that lets it be driven all the same",
        suite: Some(BUILT),
        devices: &[
            "-drive",
            "file=ROOM/disk,format=raw,if=none,id=disk",
            "-device",
            "nvme,serial=LAB1,drive=disk",
        ],
        disk_bytes: 256 << 20,
        seconds_max: 420,
        script: include_str!("guest/no-iommu.sh"),
        ..BARE
    },
    LabScenario {
        name: "vfio-user",
        kind: ScenarioKind::Controller,
        about: "a stock guest whose disk is `tenmil serve … --listen vfio-user:PATH`",
        emulator: QemuChoice::Newer,
        machine: "q35,memory-backend=ram",
        devices: &[
            "-object",
            "memory-backend-memfd,id=ram,size=2G,share=on",
            "-device",
            r#"{"driver":"vfio-user-pci","socket":{"type":"unix","path":"ROOM/nvme.sock"}}"#,
        ],
        disk_bytes: 256 << 20,
        may_restart: true,
        beside: &["serve", "file:ROOM/disk", "--listen", "vfio-user:ROOM/nvme.sock"],
        may_end_with_beside: true,
        script: include_str!("guest/vfio-user.sh"),
        short_seconds_max: Some(150),
        ..BARE
    },
    LabScenario {
        name: "vhost-user",
        kind: ScenarioKind::Disk,
        about: "a guest whose virtio disk is `tenmil serve … --listen vhost-user:PATH`, killed twice",
        machine: "q35,memory-backend=ram",
        devices: &[
            "-object",
            "memory-backend-memfd,id=ram,size=2G,share=on",
            "-chardev",
            "socket,id=disk,path=ROOM/blk.sock,reconnect=1",
            "-device",
            "vhost-user-blk-pci,chardev=disk",
        ],
        disk_bytes: 256 << 20,
        beside: &["serve", "file:ROOM/disk", "--listen", "vhost-user:ROOM/blk.sock"],
        script: include_str!("guest/vhost-user.sh"),
        short_seconds_max: Some(150),
        ..BARE
    },
    LabScenario {
        name: "ublk",
        kind: ScenarioKind::Disk,
        about: "a disk of the kernel's own that is `tenmil serve … --listen ublk:N`, and its recovery",
        devices: &[
            "-drive",
            "file=ROOM/disk,format=raw,if=none,id=disk",
            "-device",
            "nvme,drive=disk,serial=LAB1",
        ],
        disk_bytes: 320 << 20,
        seconds_max: 480,
        script: concat!(include_str!("guest/ublk-disk.sh"), include_str!("guest/ublk.sh")),
        ..BARE
    },
    LabScenario {
        name: "ublk-zero-copy",
        kind: ScenarioKind::Disk,
        about: "the same of a newer kernel, with zero copy of the data of requests",
        suite: Some("forky"),
        devices: &[
            "-drive",
            "file=ROOM/disk,format=raw,if=none,id=disk",
            "-device",
            "nvme,drive=disk,serial=LAB1",
        ],
        disk_bytes: 320 << 20,
        seconds_max: 600,
        script: concat!(
            include_str!("guest/ublk-disk.sh"),
            include_str!("guest/ublk-zero-copy.sh")
        ),
        ..BARE
    },
    LabScenario {
        name: "ublk-tcp",
        about: "a disk of such a kernel's behind NVMe/TCP: data go between it and sockets",
        suite: Some("forky"),
        is_short: false,
        seconds_max: 900,
        script: concat!(include_str!("guest/ublk-disk.sh"), include_str!("guest/ublk-tcp.sh")),
        ..BARE
    },
    LabScenario {
        name: "null-blk",
        kind: ScenarioKind::BlockLayer,
        about: "the block layers of Linux and of tenmil over nothing, thread by thread (ratios only)",
        script: include_str!("guest/null-blk.sh"),
        short_seconds_max: Some(100),
        ..BARE
    },
    // First of its kind: if it fails, the peers of the others cannot be trusted.
    LabScenario {
        name: "secure-linux",
        about: "Linux's host and target with TLS and authentication: the lab checks itself",
        script: concat!(include_str!("guest/secure.sh"), include_str!("guest/secure-linux.sh")),
        ..SECURE
    },
    LabScenario {
        name: "secure-target",
        about: "Linux's host uses `tenmil serve` by TLS, authentication and both",
        script: concat!(include_str!("guest/secure.sh"), include_str!("guest/secure-target.sh")),
        ..SECURE
    },
    LabScenario {
        name: "secure-host",
        about: "tenmil's host uses Linux's target by TLS, authentication and both",
        script: concat!(include_str!("guest/secure.sh"), include_str!("guest/secure-host.sh")),
        ..SECURE
    },
    LabScenario {
        name: "secure-keys",
        about: "keys of the kernel's keyring, and keys that are replaced, at both of tenmil's ends",
        script: concat!(include_str!("guest/secure.sh"), include_str!("guest/secure-keys.sh")),
        ..SECURE
    },
    LabScenario {
        name: "secure-altered",
        about: "a proxy strips TLS and authentication between Linux and tenmil, and is refused",
        needs_proxy: true,
        script: concat!(include_str!("guest/secure.sh"), include_str!("guest/secure-altered.sh")),
        ..SECURE
    },
    LabScenario {
        name: "secure-chain",
        about: "Linux's host, `tenmil serve`, Linux's target in a row, every hop secure",
        short_seconds_max: Some(100),
        script: concat!(include_str!("guest/secure.sh"), include_str!("guest/secure-chain.sh")),
        ..SECURE
    },
    LabScenario {
        name: "secure-older",
        about: "both directions with Debian 13, whose programs derive keys in their own way",
        suite: Some("trixie"),
        script: concat!(include_str!("guest/secure.sh"), include_str!("guest/secure-older.sh")),
        ..SECURE
    },
];

/// Command that removes the SSD from its slot.
const PULL: &str = r#"{"execute":"device_del","arguments":{"id":"pulled"}}"#;
/// Command that inserts it again.
const PUT_IN: &str = r#"{"execute":"device_add","arguments":{"driver":"nvme","id":"pulled","bus":"bay","drive":"disk3","serial":"LAB2"}}"#;

/// Prologue of all scripts.
pub(crate) const BEGINNING: &str = include_str!("guest/lab.sh");

/// First process of every guest.
pub(crate) const INIT: &str = include_str!("guest/init.sh");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scenario_names_are_unique() {
        let mut names: Vec<_> = SCENARIOS.iter().map(|scenario| scenario.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), SCENARIOS.len());
    }

    #[test]
    fn short_run_has_one_scenario_of_each_kind_and_ends_within_seventeen_minutes() {
        let short: Vec<_> = SCENARIOS.iter().filter_map(|known| known.shortened()).collect();
        for scenario in &SCENARIOS {
            let of_kind = short.iter().filter(|other| other.kind == scenario.kind);
            assert_eq!(of_kind.count(), 1, "{:?}", scenario.kind);
        }
        assert!(short.iter().all(|scenario| scenario.is_short));
        assert!(short.iter().map(|scenario| scenario.seconds_max).sum::<u64>() <= 17 * 60);
    }
}
