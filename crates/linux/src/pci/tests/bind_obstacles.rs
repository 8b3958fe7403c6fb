//! Table of machines and bind plans.

use super::fake_kernel::FakeKernel;
use super::test_tree::{FUNCTION, SECOND, SERIAL, TestTree, disk_signatures, test_address};
use crate::pci::{BindPlan, BindRequest, PciAddress, plan_bind};

/// Request in words: addresses, and options.
fn plans_for_request_text(tree: &TestTree, asked: &str) -> Vec<BindPlan> {
    let mut addresses: Vec<PciAddress> = Vec::new();
    let mut serials = Vec::new();
    for word in asked.split_whitespace().filter(|word| *word != "no-iommu") {
        match word.strip_prefix("serial=") {
            Some(serial) => serials.push(serial.to_owned()),
            None => addresses.push(test_address(word)),
        }
    }
    let no_iommu = asked.contains("no-iommu");
    let terms = BindRequest {
        owner: None,
        no_iommu,
        even_if_in_use: &serials,
        signatures: &disk_signatures,
    };
    plan_bind(&FakeKernel::new(tree), &addresses, &terms).unwrap()
}

/// Plan in one line: the obstacles, or the steps.
fn obstacles_or_taken_text(verdicts: &[BindPlan]) -> String {
    let obstacles: Vec<String> =
        verdicts.iter().flat_map(|one| &one.obstacles).map(ToString::to_string).collect();
    if obstacles.is_empty() { "taken".into() } else { obstacles.join(" | ") }
}

const IN_USE: &str = ", expected disks that are not in use";
const PART: &str = ", expected no part of something larger";

/// Machine, request, and expected plan.
const TREES: [(&str, &str, &str); 58] = [
    // Not in use.
    ("", FUNCTION, "taken"),
    ("second-disk", FUNCTION, "taken"),
    ("holds nvme0n1 GPT 0ab4", FUNCTION, "taken"),
    ("holds nvme0n1p1 ext4 \"home\"", FUNCTION, "taken"),
    ("driver none", FUNCTION, "taken"),
    ("driver uio_pci_generic", FUNCTION, "taken"),
    ("driver vfio-pci", FUNCTION, "taken"),
    ("driver vfio-pci; no-iommu; no-vfio", FUNCTION, "taken"),
    ("override nvme", FUNCTION, "taken"),
    ("class 0x010803", FUNCTION, "taken"),
    ("paths nvme0", FUNCTION, "taken"),
    ("mount-mapped /", FUNCTION, "taken"),
    ("exported nvme9n1 nqn.x; loop nvme9n1; btrfs nvme9n1 0ab4", FUNCTION, "taken"),
    ("open 41 dd /dev/nvme0n12", FUNCTION, "taken"),
    ("swap nvme0n10", FUNCTION, "taken"),
    // In use.
    ("mount nvme0n1 /srv", FUNCTION, "nvme0n1 is mounted at /srv"),
    ("mount nvme0n1p1 /srv", FUNCTION, "nvme0n1p1 is mounted at /srv"),
    ("second-disk; mount nvme0n2 /b", FUNCTION, "nvme0n2 is mounted at /b"),
    ("mount-many nvme0n1p1 /b", FUNCTION, "nvme0n1p1 is mounted at /b"),
    ("swap nvme0n1", FUNCTION, "/dev/nvme0n1 is swapped to"),
    ("swap nvme0n1p1", FUNCTION, "/dev/nvme0n1p1 is swapped to"),
    ("mapped nvme0n1 LVM vg-root", FUNCTION, "dm-0 (LVM vg-root) stands on nvme0n1"),
    (
        "mapped nvme0n1p1 LVM vg-root; mount-mapped /",
        FUNCTION,
        "dm-0 (LVM vg-root) stands on nvme0n1p1 and dm-0 is mounted at /",
    ),
    ("mapped nvme0n1p1 CRYPT home", FUNCTION, "dm-0 (cipher home) stands on nvme0n1p1"),
    ("mapped nvme0n1 mpath m1", FUNCTION, "dm-0 (multipath m1) stands on nvme0n1"),
    ("mapped nvme0n1 part x", FUNCTION, "dm-0 (x) stands on nvme0n1"),
    ("held nvme0n1 md127", FUNCTION, "md127 stands on nvme0n1"),
    ("held nvme0n1p1 md0", FUNCTION, "md0 stands on nvme0n1p1"),
    ("held nvme0n1 bcache0", FUNCTION, "bcache0 stands on nvme0n1"),
    ("btrfs nvme0n1 0ab4", FUNCTION, "btrfs 0ab4 stands on nvme0n1"),
    ("btrfs nvme0n1p1 0ab4", FUNCTION, "btrfs 0ab4 stands on nvme0n1p1"),
    ("loop nvme0n1", FUNCTION, "loop0 stands on nvme0n1"),
    ("exported nvme0n1 nqn.x", FUNCTION, "the kernel's target with nqn.x stands on nvme0n1"),
    ("open 41 qemu /dev/nvme0n1", FUNCTION, "process 41 (qemu) has nvme0n1 open"),
    ("open 41 nvme /dev/nvme0", FUNCTION, "process 41 (nvme) has nvme0 open"),
    ("paths nvme0; mount nvme0n1 /srv", FUNCTION, "nvme0n1 is mounted at /srv"),
    ("mount nvme0n1 /srv; claimed nvme0n1", FUNCTION, "nvme0n1 is mounted at /srv"),
    ("claimed nvme0n1", FUNCTION, "the kernel has nvme0n1 in use"),
    (
        "second-disk; claimed nvme0n2; swap nvme0n1",
        FUNCTION,
        "/dev/nvme0n1 is swapped to, expected disks that are not in use | the kernel has nvme0n2 in use, expected disks that are not in use",
    ),
    // Member of an array or pool.
    ("member nvme0n1 ZFS member \"tank\"", FUNCTION, "nvme0n1 holds ZFS member \"tank\""),
    ("member nvme0n1p1 LVM2 physical volume", FUNCTION, "nvme0n1p1 holds LVM2 physical volume"),
    ("member nvme0n1 Btrfs", FUNCTION, "nvme0n1 holds Btrfs"),
    (
        "member nvme0n1p1 ZFS member \"t\"; claimed nvme0n1",
        FUNCTION,
        "nvme0n1p1 holds ZFS member \"t\", expected no part of something larger | the kernel has \
         nvme0n1 in use, expected disks that are not in use",
    ),
    (
        "paths nvme0 nvme1",
        FUNCTION,
        "nvme0n1 is reached through nvme0 and nvme1, expected this controller alone",
    ),
    // Not examinable.
    (
        "no-node nvme0n1",
        FUNCTION,
        "nvme0n1 cannot be read (entity not found), expected to see whether it is in use",
    ),
    // Bound although in use.
    (
        "mount nvme0n1p1 /srv; member nvme0n1 x; claimed nvme0n1",
        "0000:5e:00.0 serial=S4EW",
        "taken",
    ),
    (
        "mount nvme0n1p1 /srv; no-iommu",
        "0000:5e:00.0 serial=S4EW",
        "it has no IOMMU group, expected an IOMMU that is on",
    ),
    // IOMMU group.
    ("neighbour 0000:5e:00.1 none 0x010601", FUNCTION, "taken"),
    ("neighbour 0000:5e:00.1 vfio-pci 0x010601", FUNCTION, "taken"),
    ("neighbour 0000:5d:00.0 pcieport 0x060400", FUNCTION, "taken"),
    ("neighbour 0000:5d:00.0 shpchp 0x060400", FUNCTION, "taken"),
    (
        "neighbour 0000:5e:00.1 ahci 0x010601; neighbour 0000:5e:00.2 e1000e 0x020000",
        FUNCTION,
        "IOMMU group 12 has 0000:5e:00.1 (driver ahci) and 0000:5e:00.2 (driver e1000e), too, \
         expected nothing that others drive",
    ),
    (
        "second-function 12",
        FUNCTION,
        "IOMMU group 12 has 0000:5f:00.0 (driver nvme), too, expected nothing that others drive",
    ),
    ("second-function 12", "0000:5e:00.0 0000:5f:00.0", "taken"),
    ("second-function 13; paths nvme0 nvme1", "0000:5e:00.0 0000:5f:00.0", "taken"),
    // No IOMMU.
    ("no-iommu", FUNCTION, "it has no IOMMU group, expected an IOMMU that is on"),
    ("no-iommu", "0000:5e:00.0 no-iommu", "taken"),
    (
        "no-iommu; no-switch",
        "0000:5e:00.0 no-iommu",
        "/sys/module/vfio/parameters/enable_unsafe_noiommu_mode is not there, expected vfio with \
         that switch",
    ),
];

/// Unusable machines, and invalid addresses.
const REST: [(&str, &str, &str); 9] = [
    (
        "no-vfio; module vfio/pci/vfio-pci.ko.xz",
        FUNCTION,
        "driver vfio-pci is not loaded in kernel 6.12.0, expected it to be",
    ),
    ("no-vfio", FUNCTION, "kernel 6.12.0 has no driver vfio-pci, expected one that has"),
    ("virtual 2", FUNCTION, "virtual functions are 2, expected none"),
    (
        "vmd 10000:01:00.0",
        "10000:01:00.0",
        "it is in domain 10000, behind Intel VMD, expected a slot of the machine itself",
    ),
    ("class 0x020000", FUNCTION, "class is 020000, expected 0108xx, that of NVMe"),
    ("", "0000:5e:00.7", "no such function, expected one of 0000:5e:00.0"),
    ("gone", FUNCTION, "no such function, and this machine has no NVMe function at all"),
    (
        "locked sys/bus/pci/drivers_probe; mount nvme0n1 /srv",
        FUNCTION,
        "/sys/bus/pci/drivers_probe may not be written, expected to run as root | nvme0n1 is \
         mounted at /srv, expected disks that are not in use",
    ),
    (
        "mount nvme0n1 /srv; no-iommu; no-vfio",
        FUNCTION,
        "nvme0n1 is mounted at /srv, expected disks that are not in use | it has no IOMMU group, \
         expected an IOMMU that is on | kernel 6.12.0 has no driver vfio-pci, expected one that has",
    ),
];

#[test]
fn every_machine_state_gets_its_expected_obstacles() {
    for (words, asked, expected) in TREES.into_iter().chain(REST) {
        let tree = TestTree::with_functions(words);
        let found = obstacles_or_taken_text(&plans_for_request_text(&tree, asked));
        let short = found.strip_suffix(IN_USE).or_else(|| found.strip_suffix(PART));
        let short = short.filter(|_| !found.contains(" | ")).unwrap_or(&found);
        assert_eq!(short, expected, "`{words}`, asked for {asked}");
    }
}

#[test]
fn planning_changes_nothing() {
    for (words, asked, _) in TREES.into_iter().chain(REST) {
        let tree = TestTree::with_functions(words);
        let before = tree.driver_state();
        plans_for_request_text(&tree, asked);
        assert_eq!(tree.driver_state(), before, "{words}");
    }
}

#[test]
fn every_obstacle_has_a_fix() {
    for (words, asked, mends) in [
        ("mount nvme0n1p1 /srv", FUNCTION, "End it with `sudo umount /srv`."),
        (
            "mapped nvme0n1p1 LVM vg-root; mount-mapped /",
            FUNCTION,
            "End it with `sudo umount /`, then `sudo lvchange -an /dev/mapper/vg-root`.",
        ),
        ("claimed nvme0n1", FUNCTION, "Look for it with `lsblk /dev/nvme0n1`"),
        ("member nvme0n1 x", FUNCTION, "erase the signature with `sudo wipefs -a /dev/nvme0n1`"),
        ("no-node nvme0n1", FUNCTION, "See that `sudo head -c 1 /dev/nvme0n1` can read it."),
        ("paths nvme0 nvme1", FUNCTION, "Name the functions of all of them together."),
        (
            "virtual 2",
            FUNCTION,
            "`echo 0 | sudo tee /sys/bus/pci/devices/0000:5e:00.0/sriov_numvfs`",
        ),
        ("vmd 10000:01:00.0", "10000:01:00.0", "Switch VMD off for its slot"),
        (
            "neighbour 0000:5e:00.1 ahci 0x010601",
            FUNCTION,
            "`echo 0000:5e:00.1 | sudo tee /sys/bus/pci/devices/0000:5e:00.1/driver/unbind`",
        ),
        (
            "no-iommu",
            FUNCTION,
            "--unsafe-no-iommu the device, and so the process that drives it, can read",
        ),
        ("no-iommu; no-switch", "0000:5e:00.0 no-iommu", "`sudo modprobe vfio`"),
        ("no-vfio; module x/vfio-pci.ko", FUNCTION, "`sudo modprobe vfio-pci`"),
        ("no-vfio; module x/vfio.ko", FUNCTION, "a kernel that is built with CONFIG_VFIO_PCI"),
        ("class 0x020000", FUNCTION, "`tenmil list`"),
        ("gone", FUNCTION, "`tenmil list`"),
        ("locked sys/bus/pci/drivers_probe", FUNCTION, "Run it under `sudo`"),
    ] {
        let verdicts = plans_for_request_text(&TestTree::with_functions(words), asked);
        let obstacle = &verdicts[0].obstacles[0];
        let remedy = obstacle.fix();
        assert!(remedy.contains(mends), "`{words}`: {remedy}");
        let offers = remedy.contains("--even-if-in-use");
        assert_eq!(offers, obstacle.is_overridden_by_serial(), "`{words}`: {remedy}");
        assert!(
            !remedy.contains(SERIAL),
            "the operator has to look the serial number up: {remedy}"
        );
    }
}

#[test]
fn serial_number_of_no_disk_is_rejected() {
    let tree = TestTree::with_functions("second-function 13; mount nvme0n1 /srv");
    let wrong = ["S5XX".to_owned()];
    let terms = BindRequest {
        owner: None,
        no_iommu: false,
        even_if_in_use: &wrong,
        signatures: &disk_signatures,
    };
    let judged = |addresses: &[PciAddress]| plan_bind(&FakeKernel::new(&tree), addresses, &terms);
    let refused = judged(&[test_address(FUNCTION)]).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "--even-if-in-use is `S5XX`, expected the serial number of a disk that is named"
    );
    let both = judged(&[test_address(FUNCTION), test_address(SECOND)]).unwrap();
    assert_eq!(both[0].obstacles.len(), 1, "the other's number opens nothing");
    assert_eq!(both[1].obstacles, []);
}

#[test]
fn overridden_obstacles_and_unreadable_processes_are_noted() {
    let tree = TestTree::with_functions("mount nvme0n1p1 /srv; closed 41; holds nvme0n1 GPT 0ab4");
    let verdicts = plans_for_request_text(&tree, "0000:5e:00.0 serial=S4EW");
    assert_eq!(
        verdicts[0].notes,
        [
            "what 1 processes have open cannot be seen",
            "nvme0n1 holds GPT 0ab4",
            "taken all the same: nvme0n1p1 is mounted at /srv, expected disks that are not in use",
        ]
    );
    let tree = TestTree::with_functions("no-iommu");
    let verdicts = plans_for_request_text(&tree, "0000:5e:00.0 no-iommu");
    assert!(verdicts[0].notes[0].contains("can read and write all memory"));
}
