//! Table of files or card settings, and the resulting checks.

use super::{FakeProbe, checks_of_machine, probe_with_unsupported_queries};
use crate::doctor::CheckSeverity;
use crate::ethtool::{NicChannels, NicCoalescing, NicRings};
use crate::kernel_files::tests::fake_kernel_files;
use crate::tc_flower::FlowerFilter;

const LIMITS: &str = "proc/self/limits";
const CMDLINE: &str = "proc/cmdline";
const CPUINFO: &str = "proc/cpuinfo";
const ONLINE: &str = "sys/devices/system/cpu/online";
const ISOLATED: &str = "sys/devices/system/cpu/isolated";
const POOL: &str = "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
const FREE: &str = "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
const GROUP: &str = "sys/kernel/iommu_groups/0/type";
const CARD: &str = "sys/class/net/eth0/device/x";

/// Item, files of the machine, and expected result: severity, value, and a part of the command.
type CheckCase = (
    &'static str,
    &'static [(&'static str, &'static str)],
    CheckSeverity,
    &'static str,
    &'static str,
);

const ROWS: &[CheckCase] = &[
    // Devices.
    ("IOMMU", &[(GROUP, "DMA\n")], CheckSeverity::Good, "on, 1 groups", ""),
    ("IOMMU", &[], CheckSeverity::Unknown, "/sys/bus/pci is not there", ""),
    (
        "IOMMU",
        &[("sys/bus/pci/x", ""), (CMDLINE, "quiet intel_iommu=off ro\n")],
        CheckSeverity::Required,
        "off, by intel_iommu=off on the kernel's command line",
        "take intel_iommu=off from",
    ),
    (
        "IOMMU",
        &[("sys/bus/pci/x", ""), (CPUINFO, "vendor_id : GenuineIntel\nflags : fpu\n")],
        CheckSeverity::Required,
        "none",
        "intel_iommu=on",
    ),
    (
        "IOMMU",
        &[("sys/bus/pci/x", ""), (CPUINFO, "vendor_id : AuthenticAMD\nflags : fpu hypervisor\n")],
        CheckSeverity::Required,
        "none, in a virtual machine",
        "give the virtual machine an IOMMU",
    ),
    ("IOMMU pass-through", &[], CheckSeverity::Info, "no IOMMU", ""),
    ("IOMMU pass-through", &[(GROUP, "identity\n")], CheckSeverity::Good, "identity", ""),
    (
        "IOMMU pass-through",
        &[(GROUP, "DMA-FQ\n"), (CPUINFO, "vendor_id : x\n")],
        CheckSeverity::Warning,
        "DMA-FQ",
        "iommu=pt",
    ),
    (
        "IOMMU pass-through",
        &[(GROUP, "DMA\n")],
        CheckSeverity::Warning,
        "DMA",
        "iommu.passthrough=1",
    ),
    (
        "IOMMU pass-through",
        &[("sys/kernel/iommu_groups/0/devices", "")],
        CheckSeverity::Unknown,
        "/sys/kernel/iommu_groups/*/type is not there",
        "",
    ),
    (
        "driver vfio-pci",
        &[("sys/bus/pci/drivers/vfio-pci/bind", "")],
        CheckSeverity::Good,
        "loaded",
        "",
    ),
    (
        "driver vfio-pci",
        &[
            ("proc/sys/kernel/osrelease", "6.12\n"),
            ("lib/modules/6.12/modules.dep", "a/vfio-pci.ko.xz:\n"),
        ],
        CheckSeverity::Required,
        "not loaded",
        "sudo modprobe vfio-pci",
    ),
    (
        "driver vfio-pci",
        &[
            ("proc/sys/kernel/osrelease", "6.12\n"),
            ("lib/modules/6.12/modules.dep", "a/vfio.ko:\n"),
        ],
        CheckSeverity::Required,
        "not among the modules of kernel 6.12",
        "CONFIG_VFIO_PCI",
    ),
    (
        "driver vfio-pci",
        &[("proc/sys/kernel/osrelease", "6.12\n")],
        CheckSeverity::Required,
        "not loaded, and /lib/modules/6.12 is not there",
        "outside the container",
    ),
    (
        "driver ublk_drv",
        &[
            ("proc/sys/kernel/osrelease", "6.12"),
            ("lib/modules/6.12/modules.dep", "a/ublk_drv.ko.xz:\n"),
        ],
        CheckSeverity::Required,
        "not loaded",
        "sudo modprobe ublk_drv",
    ),
    (
        "driver ublk_drv",
        &[("sys/module/ublk_drv/refcnt", "0")],
        CheckSeverity::Required,
        "loaded, and /dev/ublk-control is not there",
        "give this container",
    ),
    (
        "driver ublk_drv",
        &[("dev/ublk-control", "")],
        CheckSeverity::Required,
        "loaded, and user 1000 may not make disks",
        "sudo tenmil serve",
    ),
    ("/dev/vfio", &[], CheckSeverity::Info, "not there, as long as vfio is not loaded", ""),
    (
        "NVMe functions",
        &[],
        CheckSeverity::Info,
        "none on the PCI bus; emulated ones need no hardware",
        "",
    ),
    // Memory.
    (
        "lockable memory",
        &[(LIMITS, "Max locked memory         65536                65536                bytes\n")],
        CheckSeverity::Warning,
        "64 KiB",
        "sudo prlimit --pid $$ --memlock=unlimited",
    ),
    (
        "lockable memory",
        &[(LIMITS, "Max locked memory         8388608              unlimited            bytes\n")],
        CheckSeverity::Warning,
        "8 MiB",
        "ulimit -l 1048576",
    ),
    (
        "lockable memory",
        &[
            (LIMITS, "Max locked memory         8388608              8388608              bytes\n"),
            ("dev/vfio/vfio", ""),
        ],
        CheckSeverity::Required,
        "8 MiB",
        "sudo prlimit --pid $$ --memlock=unlimited",
    ),
    (
        "lockable memory",
        &[(LIMITS, "Max locked memory         2147483648           2147483648           bytes\n")],
        CheckSeverity::Good,
        "2 GiB",
        "",
    ),
    (
        "lockable memory",
        &[(LIMITS, "Max locked memory         unlimited            unlimited            bytes\n")],
        CheckSeverity::Good,
        "without limit",
        "",
    ),
    (
        "lockable memory",
        &[
            (LIMITS, "Max locked memory         65536                65536                bytes\n"),
            ("proc/self/status", "CapEff:\t0000000000004000\n"),
        ],
        CheckSeverity::Good,
        "without limit (CAP_IPC_LOCK)",
        "",
    ),
    ("lockable memory", &[], CheckSeverity::Unknown, "/proc/self/limitsis not readable", ""),
    (
        "huge pages of 2 MiB",
        &[(POOL, "600\n"), (FREE, "100\n")],
        CheckSeverity::Warning,
        "100 of 600 free",
        "echo 1012 | sudo tee /proc/sys/vm/nr_hugepages",
    ),
    (
        "huge pages of 2 MiB",
        &[(POOL, "512\n"), (FREE, "512\n")],
        CheckSeverity::Good,
        "512 of 512 free",
        "",
    ),
    ("huge pages of 2 MiB", &[], CheckSeverity::Unknown, "this kernel shows no pool of them", ""),
    (
        "transparent huge pages",
        &[("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")],
        CheckSeverity::Warning,
        "never",
        "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    ),
    (
        "transparent huge pages",
        &[("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")],
        CheckSeverity::Good,
        "madvise",
        "",
    ),
    (
        "transparent huge pages",
        &[],
        CheckSeverity::Unknown,
        "/sys/kernel/mm/transparent_hugepage/enabledis not readable",
        "",
    ),
    // CPUs.
    (
        "isolated cores",
        &[(ONLINE, "0-1\n")],
        CheckSeverity::Info,
        "none of 2, too few to keep any free",
        "",
    ),
    (
        "isolated cores",
        &[(ONLINE, "0-7\n")],
        CheckSeverity::Warning,
        "none of 0-7",
        "isolcpus=managed_irq,domain,6-7",
    ),
    (
        "isolated cores",
        &[(ONLINE, "0-7\n"), (ISOLATED, "2-3\n")],
        CheckSeverity::Warning,
        "2-3, with a clock tick",
        "nohz_full=2-3",
    ),
    (
        "isolated cores",
        &[(ONLINE, "0-7\n"), (ISOLATED, "2-3\n"), ("sys/devices/system/cpu/nohz_full", "2-5\n")],
        CheckSeverity::Good,
        "2-3, without a clock tick",
        "",
    ),
    (
        "isolated cores",
        &[(ONLINE, "0-7\n"), (ISOLATED, "6-7\n")],
        CheckSeverity::Warning,
        "6-7, of which this process may use none: it has 0-3",
        "taskset -c 6-7",
    ),
    (
        "isolated cores",
        &[],
        CheckSeverity::Unknown,
        "the kernel does not report which cores are online",
        "",
    ),
    (
        "frequency governor",
        &[
            ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n"),
            ("sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "powersave\n"),
            ("sys/devices/system/cpu/cpu2/cpufreq/scaling_governor", "powersave\n"),
        ],
        CheckSeverity::Warning,
        "powersave on 1-2",
        "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
    ),
    (
        "frequency governor",
        &[("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n")],
        CheckSeverity::Good,
        "performance",
        "",
    ),
    (
        "frequency governor",
        &[],
        CheckSeverity::Info,
        "the kernel does not scale the frequency here",
        "",
    ),
    (
        "quota of the control group",
        &[("proc/self/cgroup", "0::/box\n"), ("sys/fs/cgroup/box/cpu.max", "150000 100000\n")],
        CheckSeverity::Warning,
        "1.50 processors",
        "echo max | sudo tee /sys/fs/cgroup/box/cpu.max",
    ),
    (
        "quota of the control group",
        &[("proc/self/cgroup", "0::/box\n"), ("sys/fs/cgroup/box/cpu.max", "250000 100000\n")],
        CheckSeverity::Good,
        "2.50 processors",
        "",
    ),
    (
        "quota of the control group",
        &[("proc/self/cgroup", "0::/\n")],
        CheckSeverity::Good,
        "none",
        "",
    ),
    (
        "quota of the control group",
        &[],
        CheckSeverity::Unknown,
        "/proc/self/cgroup is not there",
        "",
    ),
    (
        "mitigations that cost system calls",
        &[
            ("sys/devices/system/cpu/vulnerabilities/meltdown", "Mitigation: PTI\n"),
            ("sys/devices/system/cpu/vulnerabilities/mds", "Not affected\n"),
            ("sys/devices/system/cpu/vulnerabilities/spectre_v1", "Mitigation: usercopy\n"),
        ],
        CheckSeverity::Info,
        "meltdown",
        "",
    ),
    (
        "mitigations that cost system calls",
        &[],
        CheckSeverity::Unknown,
        "/sys/devices/system/cpu/vulnerabilities is not there",
        "",
    ),
    // The kernel.
    ("io_uring", &[], CheckSeverity::Good, "allowed", ""),
    (
        "open files",
        &[(LIMITS, "Max open files            1024                 524288               files\n")],
        CheckSeverity::Good,
        "524288",
        "",
    ),
    (
        "open files",
        &[(LIMITS, "Max open files            1024                 20000                files\n")],
        CheckSeverity::Warning,
        "20000",
        "sudo prlimit --pid $$ --nofile=65536",
    ),
    (
        "open files",
        &[(LIMITS, "Max open files            65536                65536                files\n")],
        CheckSeverity::Good,
        "65536",
        "",
    ),
    ("open files", &[], CheckSeverity::Unknown, "/proc/self/limitsis not readable", ""),
    (
        "net.core.netdev_budget",
        &[("proc/sys/net/core/netdev_budget", "200\n")],
        CheckSeverity::Warning,
        "200",
        "sudo sysctl -w net.core.netdev_budget=300",
    ),
    (
        "net.core.netdev_budget",
        &[("proc/sys/net/core/netdev_budget", "600\n")],
        CheckSeverity::Good,
        "600",
        "",
    ),
    (
        "net.core.netdev_budget_usecs",
        &[("proc/sys/net/core/netdev_budget_usecs", "2000\n")],
        CheckSeverity::Warning,
        "2000",
        "sudo sysctl -w net.core.netdev_budget_usecs=8000",
    ),
    (
        "net.core.dev_weight",
        &[("proc/sys/net/core/dev_weight", "64\n")],
        CheckSeverity::Good,
        "64",
        "",
    ),
    (
        "net.core.rmem_max",
        &[("proc/sys/net/core/rmem_max", "212992\n")],
        CheckSeverity::Warning,
        "212992",
        "sudo sysctl -w net.core.rmem_max=268435456",
    ),
    (
        "net.core.wmem_max",
        &[],
        CheckSeverity::Unknown,
        "/proc/sys/net/core/wmem_max is not there, as in a network of its own",
        "",
    ),
    (
        "net.ipv4.tcp_rmem",
        &[("proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456\n")],
        CheckSeverity::Warning,
        "4096 131072 6291456",
        "sudo sysctl -w net.ipv4.tcp_rmem='4096 131072 134217728'",
    ),
    (
        "net.ipv4.tcp_wmem",
        &[("proc/sys/net/ipv4/tcp_wmem", "4096\t16384\t134217728\n")],
        CheckSeverity::Good,
        "4096 16384 134217728",
        "",
    ),
    (
        "net.ipv4.tcp_wmem",
        &[("proc/sys/net/ipv4/tcp_wmem", "4096 what\n")],
        CheckSeverity::Unknown,
        "/proc/sys/net/ipv4/tcp_wmem is not there, as in a network of its own",
        "",
    ),
    ("net.core.busy_poll", &[("proc/sys/net/core/busy_poll", "0\n")], CheckSeverity::Good, "0", ""),
    (
        "net.core.busy_poll",
        &[("proc/sys/net/core/busy_poll", "50\n")],
        CheckSeverity::Info,
        "50 us",
        "",
    ),
    // Network cards.
    ("network cards", &[("sys/class/net/lo/mtu", "")], CheckSeverity::Info, "none", ""),
    (
        "eth0 rings",
        &[(CARD, "")],
        CheckSeverity::Unknown,
        "the driver of eth0is not readable its rings",
        "",
    ),
    (
        "eth0 interrupts",
        &[(CARD, "")],
        CheckSeverity::Unknown,
        "the driver of eth0is not readable its coalescing",
        "",
    ),
    (
        "eth0 flower rules",
        &[(CARD, "")],
        CheckSeverity::Unknown,
        "/sys/class/net/eth0/ifindexis not readable",
        "",
    ),
    (
        "eth0 flower rules",
        &[(CARD, ""), ("sys/class/net/eth0/ifindex", "2\n")],
        CheckSeverity::Unknown,
        "the driver of eth0is not readable its filters",
        "",
    ),
    (
        "eth0 queue sets",
        &[
            (CARD, ""),
            ("sys/class/net/eth0/queues/tx-0/traffic_class", "0\n"),
            ("sys/class/net/eth0/queues/tx-1/traffic_class", "0\n"),
            ("sys/class/net/eth0/queues/tx-2/traffic_class", "0\n"),
        ],
        CheckSeverity::Info,
        "1; half of the queues for storage: sudo tc qdisc add dev eth0 root mqprio num_tc 2 map 0 1 \
         queues 2@0 1@2 hw 1 mode channel",
        "",
    ),
    (
        "eth0 XPS",
        &[(CARD, ""), ("sys/class/net/eth0/queues/tx-0/xps_cpus", "00\n")],
        CheckSeverity::Info,
        "sending queues are 1",
        "",
    ),
    (
        "eth0 XPS",
        &[
            (CARD, ""),
            ("sys/class/net/eth0/queues/tx-0/xps_cpus", "00000000,00000001\n"),
            ("sys/class/net/eth0/queues/tx-1/xps_cpus", "00000000,00000000\n"),
        ],
        CheckSeverity::Warning,
        "1 of 2 queues have no processors",
        "for i in $(seq 0 1)",
    ),
    (
        "eth0 XPS",
        &[
            (CARD, ""),
            ("sys/class/net/eth0/queues/tx-0/xps_cpus", "1\n"),
            ("sys/class/net/eth0/queues/tx-1/xps_cpus", "2\n"),
        ],
        CheckSeverity::Good,
        "2 queues have processors",
        "",
    ),
    (
        "eth0 queue sets",
        &[
            (CARD, ""),
            ("sys/class/net/eth0/queues/tx-0/traffic_class", "0\n"),
            ("sys/class/net/eth0/queues/tx-1/traffic_class", "1\n"),
        ],
        CheckSeverity::Info,
        "2; see: tc qdisc show dev eth0",
        "",
    ),
    (
        "eth0 interrupt affinity",
        &[
            ("sys/class/net/eth0/device/msi_irqs/41", ""),
            ("sys/class/net/eth0/device/msi_irqs/42", ""),
            ("proc/irq/41/smp_affinity_list", "0-3\n"),
            ("proc/irq/41/effective_affinity_list", "1\n"),
            ("proc/irq/42/smp_affinity_list", "2\n"),
            (ISOLATED, "2-3\n"),
            (ONLINE, "0-3\n"),
        ],
        CheckSeverity::Warning,
        "2 on 1-2, of which 2 are isolated",
        "isolcpus=managed_irq",
    ),
    (
        "eth0 interrupt affinity",
        &[
            ("sys/class/net/eth0/device/msi_irqs/41", ""),
            ("proc/irq/41/smp_affinity_list", "0-1\n"),
        ],
        CheckSeverity::Good,
        "1 on 0-1",
        "",
    ),
    (
        "eth0 interrupt affinity",
        &[(CARD, "")],
        CheckSeverity::Unknown,
        "its driver names no interrupts of its own",
        "",
    ),
    (
        "eth0 deferred interrupts",
        &[
            (CARD, ""),
            ("sys/class/net/eth0/napi_defer_hard_irqs", "0\n"),
            ("sys/class/net/eth0/gro_flush_timeout", "0\n"),
        ],
        CheckSeverity::Info,
        "napi_defer_hard_irqs 0, gro_flush_timeout 0 ns",
        "",
    ),
];

fn probe_with_nic_rings(receive: u32, receive_max: u32, send: u32, send_max: u32) -> FakeProbe {
    FakeProbe {
        rings: Ok(NicRings { receive, receive_max, send, send_max }),
        ..probe_with_unsupported_queries()
    }
}

fn probe_with_nic_channels(combined: u32, combined_max: u32) -> FakeProbe {
    FakeProbe {
        channels: Ok(NicChannels { combined, combined_max }),
        ..probe_with_unsupported_queries()
    }
}

fn probe_with_nic_coalescing(receive_us: u32, is_adaptive: bool) -> FakeProbe {
    FakeProbe {
        coalescing: Ok(NicCoalescing { receive_us, is_adaptive }),
        ..probe_with_unsupported_queries()
    }
}

fn probe_with_flower_filter(port: u16, queue_set: Option<u32>) -> FakeProbe {
    FakeProbe {
        flowers: Ok(vec![FlowerFilter { tcp_port: Some(port), queue_set }]),
        ..probe_with_unsupported_queries()
    }
}

#[test]
fn flower_filter_to_a_queue_set_gets_its_severity() {
    let card = [(CARD, ""), ("sys/class/net/eth0/ifindex", "2\n")];
    let class = |queue: u32| format!("sys/class/net/eth0/queues/tx-{queue}/traffic_class");
    let classes = [class(0), class(1)];
    let sets = [(classes[0].as_str(), "0\n"), (classes[1].as_str(), "1\n")];
    let with_sets: Vec<_> = card.iter().chain(&sets).copied().collect();
    let check = |files: &[(&str, &str)], reported: &FakeProbe, expected| {
        assert_severity_and_value("eth0 flower rules", files, reported, expected);
    };
    let storage = probe_with_flower_filter(4420, Some(1));
    check(&with_sets, &storage, (CheckSeverity::Good, "port 4420 goes to set 1", ""));
    check(
        &card,
        &probe_with_flower_filter(4420, None),
        (CheckSeverity::Info, "one for port 4420, which names no set", ""),
    );
    check(
        &card,
        &probe_with_flower_filter(80, Some(1)),
        (CheckSeverity::Info, "1, none for port 4420", ""),
    );
    let none = FakeProbe { flowers: Ok(Vec::new()), ..probe_with_unsupported_queries() };
    let command = "dst_port 4420 skip_sw hw_tc 1";
    check(
        &with_sets,
        &none,
        (CheckSeverity::Warning, "0, none for port 4420, and 2 sets", command),
    );
    check(
        &with_sets,
        &probe_with_flower_filter(80, Some(1)),
        (CheckSeverity::Warning, "1, none for port 4420, and 2 sets", command),
    );
}

/// Severity, value and command of one item.
fn severity_and_text(
    item: &str,
    files: &[(&str, &str)],
    reported: &FakeProbe,
) -> (CheckSeverity, String, String) {
    let (_root, machine) = fake_kernel_files(files);
    let all = checks_of_machine(&machine, reported);
    let finding = all.into_iter().find(|finding| finding.item == item);
    let finding = finding.unwrap_or_else(|| panic!("nothing is said of {item}"));
    let command = finding.fix.map(|remedy| remedy.command).unwrap_or_default();
    (finding.severity, finding.found, command)
}

fn assert_severity_and_value(
    item: &str,
    files: &[(&str, &str)],
    reported: &FakeProbe,
    expected: (CheckSeverity, &str, &str),
) {
    let (state, found, command) = severity_and_text(item, files, reported);
    let (state_expected, found_expected, part) = expected;
    assert_eq!((state, found.as_str()), (state_expected, found_expected), "{item} of {files:?}");
    assert!(command.contains(part), "{item} of {files:?}: {command}");
    let is_told = matches!(state, CheckSeverity::Warning | CheckSeverity::Required);
    assert_eq!(!command.is_empty(), is_told, "{item}: a command where something is to be done");
}

#[test]
fn every_value_gets_its_severity() {
    for (item, files, state, found, command) in ROWS {
        assert_severity_and_value(
            item,
            files,
            &probe_with_unsupported_queries(),
            (*state, found, command),
        );
    }
}

#[test]
fn every_card_reply_gets_its_severity() {
    let slow = CheckSeverity::Warning;
    for (item, reported, expected) in [
        (
            "eth0 rings",
            probe_with_nic_rings(256, 4096, 2048, 4096),
            (slow, "256 to receive, 2048 to send", "rx 1024 tx 2048"),
        ),
        (
            "eth0 rings",
            probe_with_nic_rings(1024, 4096, 1024, 4096),
            (CheckSeverity::Good, "1024 to receive, 1024 to send", ""),
        ),
        (
            "eth0 rings",
            probe_with_nic_rings(512, 512, 256, 512),
            (slow, "512 to receive, 256 to send", "rx 512 tx 512"),
        ),
        (
            "eth0 interrupts",
            probe_with_nic_coalescing(0, true),
            (CheckSeverity::Good, "adaptive", ""),
        ),
        (
            "eth0 interrupts",
            probe_with_nic_coalescing(8, false),
            (CheckSeverity::Good, "after 8 us", ""),
        ),
        (
            "eth0 interrupts",
            probe_with_nic_coalescing(0, false),
            (slow, "one for every packet", "ethtool -C eth0"),
        ),
        (
            "eth0 queues",
            probe_with_nic_channels(2, 8),
            (slow, "2 of 8", "sudo ethtool -L eth0 combined 4"),
        ),
        ("eth0 queues", probe_with_nic_channels(2, 2), (CheckSeverity::Good, "2 of 2", "")),
    ] {
        assert_severity_and_value(item, &[(CARD, ""), (ONLINE, "0-3\n")], &reported, expected);
    }
}

#[test]
fn rejected_io_uring_is_explained_by_sysctl_or_seccomp() {
    let refused = FakeProbe { io_uring: Err("EPERM".into()), ..probe_with_unsupported_queries() };
    let switch: &[(&str, &str)] = &[("proc/sys/kernel/io_uring_disabled", "2\n")];
    let expected = "refused (EPERM), kernel.io_uring_disabled is 2";
    assert_severity_and_value(
        "io_uring",
        switch,
        &refused,
        (CheckSeverity::Warning, expected, "sysctl kernel.io_uring_disabled=0"),
    );
    let open: &[(&str, &str)] = &[("proc/sys/kernel/io_uring_disabled", "0\n")];
    assert_severity_and_value(
        "io_uring",
        open,
        &refused,
        (CheckSeverity::Warning, "refused (EPERM)", "seccomp"),
    );
}
