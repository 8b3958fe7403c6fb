//! SSDs on the PCI bus and their prerequisites: IOMMU, VFIO, accessible device nodes.

use std::os::unix::fs::MetadataExt;

use super::{CheckSection, DoctorContext, MachineCheck};
use crate::pci::{NvmeFunction, VFIO};
use crate::ublk::CONTROL;

const GROUPS: &str = "sys/kernel/iommu_groups";
/// Smaller maximum read requests make an SSD fetch a buffer in more pieces.
const READ_REQUEST: u32 = 512;

pub(super) fn check_devices(patient: &DoctorContext<'_>) -> Vec<MachineCheck> {
    let functions = NvmeFunction::all_nvme_functions(patient.machine);
    let mut findings = vec![
        check_iommu(patient),
        check_vfio_modules(patient),
        check_module(patient),
        check_device_nodes(patient),
    ];
    findings.push(check_ublk_driver(patient));
    if functions.is_empty() {
        let none = CheckSection::Devices.new_check("NVMe functions", "", "");
        findings.push(none.with_info("none on the PCI bus; emulated ones need no hardware"));
    }
    for function in &functions {
        findings.push(check_ssd(function));
        findings.push(check_pcie_max_read_request(patient, function));
    }
    findings
}

fn check_iommu(patient: &DoctorContext<'_>) -> MachineCheck {
    let finding = CheckSection::Devices.new_check(
        "IOMMU",
        "on",
        "`tenmil bind` gives an SSD only to a program that it keeps to its own memory",
    );
    let machine = patient.machine;
    let groups = machine.directory_entries(GROUPS).len();
    if groups > 0 {
        return finding.with_good(format!("on, {groups} groups"));
    }
    if !machine.exists("sys/bus/pci") {
        return finding.with_unknown("/sys/bus/pci is not there");
    }
    let line = machine.read_trimmed("proc/cmdline");
    let is_off = |line: &String| {
        let words = ["intel_iommu=off", "amd_iommu=off", "iommu=off"];
        line.split(' ').find(|word| words.contains(word)).map(str::to_owned)
    };
    if let Some(word) = line.as_ref().and_then(is_off) {
        return finding.with_required(
            format!("off, by {word} on the kernel's command line"),
            format!("take {word} from the kernel's command line and start anew"),
        );
    }
    let firmware = "switch on VT-d, AMD-Vi or the SMMU in the firmware";
    let vendor = machine.cpuinfo_value("vendor_id");
    let command = match vendor.as_deref() {
        Some("GenuineIntel") => {
            format!("{firmware}, and add intel_iommu=on to the kernel's command line")
        }
        _ => firmware.to_owned(),
    };
    let flags = machine.cpuinfo_value("flags").unwrap_or_default();
    let is_guest = flags.split(' ').any(|flag| flag == "hypervisor");
    if is_guest {
        return finding.with_required(
            "none, in a virtual machine",
            format!("give the virtual machine an IOMMU (QEMU: -device intel-iommu,intremap=on); {command}"),
        );
    }
    finding.with_required("none", command)
}

fn check_vfio_modules(patient: &DoctorContext<'_>) -> MachineCheck {
    let finding = CheckSection::Devices.new_check(
        "IOMMU pass-through",
        "identity",
        "the kernel's own devices, such as network cards, then cost no translation; SSDs under VFIO \
         remain isolated",
    );
    let machine = patient.machine;
    let groups = machine.directory_entries(GROUPS);
    if groups.is_empty() {
        return finding.with_info("no IOMMU");
    }
    let mut kinds: Vec<String> = groups
        .iter()
        .filter_map(|group| machine.read_trimmed(&format!("{GROUPS}/{group}/type")))
        .collect();
    kinds.sort_unstable();
    kinds.dedup();
    if kinds.is_empty() {
        return finding.with_unknown(format!("/{GROUPS}/*/type is not there"));
    }
    let translated = |kind: &String| kind.starts_with("DMA");
    if !kinds.iter().any(translated) {
        return finding.with_good(kinds.join(" and "));
    }
    let word = if machine.cpuinfo_value("vendor_id").is_some() {
        "iommu=pt"
    } else {
        "iommu.passthrough=1"
    };
    finding.with_warning(
        kinds.join(" and "),
        format!("add {word} to the kernel's command line and start anew"),
    )
}

fn check_module(patient: &DoctorContext<'_>) -> MachineCheck {
    let finding = CheckSection::Devices.new_check(
        "driver vfio-pci",
        "loaded",
        "through it the kernel lets a program drive an SSD",
    );
    if patient.machine.exists(&format!("sys/bus/pci/drivers/{VFIO}")) {
        return finding.with_good("loaded");
    }
    module_not_loaded(finding, patient, "vfio-pci", "CONFIG_VFIO_PCI")
}

/// Check of a kernel module that is not loaded, and whether it could be.
fn module_not_loaded(
    finding: MachineCheck,
    patient: &DoctorContext<'_>,
    module: &str,
    option: &str,
) -> MachineCheck {
    let machine = patient.machine;
    let release = machine.read_trimmed("proc/sys/kernel/osrelease").unwrap_or_default();
    match machine.read_trimmed(&format!("lib/modules/{release}/modules.dep")) {
        Some(modules) if modules.contains(&format!("/{module}.ko")) => {
            finding.with_required("not loaded", format!("sudo modprobe {module}"))
        }
        Some(_) => finding.with_required(
            format!("not among the modules of kernel {release}"),
            format!("use a kernel that is built with {option}"),
        ),
        None => finding.with_required(
            format!("not loaded, and /lib/modules/{release} is not there"),
            format!("sudo modprobe {module} outside the container, or a kernel with {option}"),
        ),
    }
}

fn check_ublk_driver(patient: &DoctorContext<'_>) -> MachineCheck {
    let finding = CheckSection::Devices.new_check(
        "driver ublk_drv",
        "loaded, and this user root",
        "`tenmil serve --listen ublk:` makes disks of this machine by it",
    );
    let (machine, uid) = (patient.machine, patient.uid);
    match (machine.exists(CONTROL), uid) {
        (true, 0) => finding.with_good(format!("loaded, /{CONTROL} may be used")),
        (true, uid) => finding.with_required(
            format!("loaded, and user {uid} may not make disks"),
            "sudo tenmil serve …: the kernel requires CAP_SYS_ADMIN",
        ),
        (false, _) if machine.exists("sys/module/ublk_drv") => finding.with_required(
            format!("loaded, and /{CONTROL} is not there"),
            "give this container the host's /dev, or run outside of it",
        ),
        (false, _) => module_not_loaded(finding, patient, "ublk_drv", "CONFIG_BLK_DEV_UBLK"),
    }
}

fn check_device_nodes(patient: &DoctorContext<'_>) -> MachineCheck {
    let finding = CheckSection::Devices.new_check(
        "/dev/vfio",
        "device nodes that this user may open",
        "the driver of an SSD opens /dev/vfio/vfio and the device node of its group",
    );
    let machine = patient.machine;
    if !machine.exists("dev/vfio/vfio") {
        return finding.with_info("not there, as long as vfio is not loaded");
    }
    let is_group_node = |name: &String| {
        let number = name.strip_prefix("noiommu-").unwrap_or(name);
        name == "vfio" || number.bytes().all(|byte| byte.is_ascii_digit())
    };
    let groups = own_group_ids(patient);
    let names: Vec<String> =
        machine.directory_entries("dev/vfio").into_iter().filter(is_group_node).collect();
    let closed = |name: &&String| {
        let found = std::fs::metadata(machine.path_of(&format!("dev/vfio/{name}")));
        found.is_ok_and(|found| {
            let bits = match () {
                () if patient.uid == 0 => return false,
                () if found.uid() == patient.uid => found.mode() >> 6,
                () if groups.contains(&found.gid()) => found.mode() >> 3,
                () => found.mode(),
            };
            bits & 6 != 6
        })
    };
    let closed: Vec<&String> = names.iter().filter(closed).collect();
    let Some(first) = closed.first() else { return finding.with_good(names.join(", ")) };
    let path = format!("/dev/vfio/{first}");
    let all = closed.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", ");
    let command = match first.as_str() {
        "vfio" => format!("sudo chmod 0666 {path}"),
        _ => format!("sudo chown {} {path}, or tenmil bind --owner {}", patient.uid, patient.uid),
    };
    finding.with_required(format!("user {} may not open {all}", patient.uid), command)
}

/// Groups of the calling process (proc_pid_status(5)).
fn own_group_ids(patient: &DoctorContext<'_>) -> Vec<u32> {
    let text = patient.machine.read_trimmed("proc/self/status").unwrap_or_default();
    let lines = text.lines().filter_map(|line| {
        let own = line.strip_prefix("Gid:").and_then(|ids| ids.split_whitespace().nth(1));
        own.or_else(|| line.strip_prefix("Groups:"))
    });
    lines.flat_map(str::split_whitespace).filter_map(|id| id.parse().ok()).collect()
}

fn check_ssd(function: &NvmeFunction) -> MachineCheck {
    let finding = CheckSection::Devices.new_check(
        function.address.to_string(),
        "a driver, and a controller that is live",
        "",
    );
    let model = function.model();
    let state = function.controller.as_ref().and_then(|one| one.state.as_deref());
    match (function.driver.as_deref(), state) {
        (None, _) => finding.with_warning(
            format!("{model}, no driver"),
            format!("sudo tenmil unbind {} --to nvme", function.address),
        ),
        (Some(driver), Some(state)) if state != "live" => finding.with_required(
            format!("{model}, driver {driver}, its controller is {state}"),
            format!("sudo dmesg | grep {}", function.address),
        ),
        (Some(driver), _) => finding.with_good(format!("{model}, driver {driver}")),
    }
}

fn check_pcie_max_read_request(
    patient: &DoctorContext<'_>,
    function: &NvmeFunction,
) -> MachineCheck {
    let address = function.address;
    let finding = CheckSection::Devices.new_check(
        format!("{address} PCIe read request"),
        "512 bytes or more",
        "an SSD fetches what is written to it in pieces of this size",
    );
    let path = format!("sys/bus/pci/devices/{address}/config");
    let Some(config) = patient.machine.read_bytes(&path) else {
        return finding.with_unknown(format!("/{path} is not there"));
    };
    match pcie_max_read_request(&config) {
        Some(bytes) if bytes >= READ_REQUEST => finding.with_good(format!("{bytes} bytes")),
        Some(bytes) => finding.with_warning(
            format!("{bytes} bytes"),
            format!("sudo setpci -s {address} CAP_EXP+8.w=2000:7000"),
        ),
        None if config.len() <= 64 => {
            finding.with_unknown("its capabilities are shown to root only")
        }
        None => finding.with_unknown("it has no PCI Express capability"),
    }
}

/// Maximum read request size of a function (PCI Express Base Specification, Device Control
/// Register, bits 14:12). The walk of the capability list is bounded, since the list may be a
/// cycle.
fn pcie_max_read_request(config: &[u8]) -> Option<u32> {
    const CAPABILITY_POINTER: usize = 0x34;
    const EXPRESS: u8 = 0x10;
    const CAPABILITIES_MAX: usize = 48;
    let byte = |at: usize| config.get(at).copied();
    let mut at = usize::from(byte(CAPABILITY_POINTER)? & !3);
    for _ in 0..CAPABILITIES_MAX {
        if at < 0x40 {
            return None;
        }
        if byte(at)? == EXPRESS {
            let size = byte(at + 9)? >> 4 & 7;
            return (size <= 5).then(|| 128 << size);
        }
        at = usize::from(byte(at + 1)? & !3);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::pcie_max_read_request;

    fn test_config_space(capabilities: &[(u8, u8, u8)]) -> Vec<u8> {
        let mut config = vec![0; 256];
        config[0x34] = capabilities[0].0;
        for (index, (at, kind, control)) in capabilities.iter().enumerate() {
            let at = usize::from(*at);
            config[at] = *kind;
            config[at + 1] = capabilities.get(index + 1).map_or(0, |next| next.0);
            config[at + 9] = *control;
        }
        config
    }

    #[test]
    fn max_read_request_is_found_behind_other_capabilities() {
        let express = |control| test_config_space(&[(0x40, 1, 0), (0x70, 0x10, control)]);
        for (control, bytes) in [(0x00, 128), (0x2f, 512), (0x5f, 4096), (0xd0, 4096)] {
            assert_eq!(pcie_max_read_request(&express(control)), Some(bytes), "{control:#x}");
        }
        assert_eq!(pcie_max_read_request(&express(0x60)), None, "a size that is not defined");
    }

    #[test]
    fn endless_or_invalid_capability_list_is_ignored() {
        let mut circle = test_config_space(&[(0x40, 1, 0)]);
        circle[0x41] = 0x40;
        assert_eq!(pcie_max_read_request(&circle), None);
        assert_eq!(pcie_max_read_request(&circle[..64]), None);
        assert_eq!(pcie_max_read_request(&[]), None);
        let cut = &test_config_space(&[(0x40, 0x10, 0x50)])[..0x49];
        assert_eq!(pcie_max_read_request(cut), None, "the register is not shown");
        assert_eq!(pcie_max_read_request(&test_config_space(&[(0x40, 1, 0)])), None);
    }
}
