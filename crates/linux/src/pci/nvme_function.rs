//! NVMe function and its description in sysfs.
//!
//! ```text
//!   /sys/bus/pci/devices/0000:5e:00.0/
//!     class vendor device numa_node sriov_numvfs
//!     driver ──> …/drivers/nvme        driver_override
//!     iommu_group ──> …/iommu_groups/12/devices/…       functions isolated together
//!     nvme/nvme0/  model serial state cmbsz             if the kernel's driver is bound
//!       nvme0n1                                         a namespace, or
//!       nvme0c1n1                                       a path to one: its disk is nvme0n1
//! ```

use tenmil_wire::register::MemoryBufferSize;

use super::PciAddress;
use crate::device_users::{
    DevicePath, DeviceUser, ProcessesWithOpenDevices, find_processes_with_open_devices,
};
use crate::kernel_files::KernelFiles;

/// Function of the NVMe class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmeFunction {
    /// Its address.
    pub address: PciAddress,
    /// Vendor identifier.
    pub vendor: u16,
    /// Device identifier.
    pub device: u16,
    /// Bound kernel driver, if any.
    pub driver: Option<String>,
    /// Content of `driver_override`, if set.
    pub driver_override: Option<String>,
    /// IOMMU group. `None` without an IOMMU.
    pub group: Option<IommuGroup>,
    /// NUMA node.
    pub numa_node: Option<u32>,
    /// Number of enabled virtual functions.
    pub virtual_functions: u32,
    /// Controller as reported by the kernel's driver.
    pub controller: Option<KernelController>,
    /// Disks reached through it, by their names in `/dev`.
    pub disks: Vec<KernelDisk>,
}

/// Functions that the IOMMU cannot isolate from each other: all belong to one user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IommuGroup {
    /// Group number.
    pub number: u32,
    /// Other functions of the group.
    pub others: Vec<GroupMember>,
}

/// Other function of the same IOMMU group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupMember {
    /// Bus address.
    pub address: String,
    /// Bound driver.
    pub driver: Option<String>,
    /// Whether it is a bridge, which does no DMA of its own.
    pub is_bridge: bool,
}

/// Controller as reported by the kernel's driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelController {
    /// Name: `nvme0`.
    pub name: String,
    /// Model.
    pub model: Option<String>,
    /// Serial number.
    pub serial: Option<String>,
    /// State: `live`, `resetting`, `dead`.
    pub state: Option<String>,
    /// Size of the Controller Memory Buffer (CMB), if it has one.
    pub cmb_bytes: Option<u64>,
}

/// Disk reached through a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelDisk {
    /// Name: `nvme0n1`.
    pub name: String,
    /// Device number.
    pub number: Option<(u32, u32)>,
    /// Controllers that reach it, if the kernel combines several paths to one disk.
    pub controllers: Vec<String>,
}

/// Directory of PCI functions.
const DEVICES: &str = "sys/bus/pci/devices";
/// Mass storage, non-volatile memory: class and sub-class of all NVMe functions, regardless of
/// their programming interface (PCI Code and ID Assignment, class 01h, sub-class 08h).
const NON_VOLATILE: u32 = 0x01_08;
/// Bridges (class 06h).
const BRIDGE: u32 = 0x06;
const SUBSYSTEMS: &str = "sys/class/nvme-subsystem";

impl NvmeFunction {
    /// Lists all NVMe functions of `machine`, by address.
    pub fn all_nvme_functions(machine: &KernelFiles) -> Vec<Self> {
        let names = machine.directory_entries(DEVICES);
        let addresses = names.iter().filter_map(|name| name.parse().ok());
        let mut functions: Vec<Self> =
            addresses.filter_map(|address| Self::at_address(machine, address)).collect();
        functions.sort_unstable_by_key(|function| function.address);
        functions
    }

    /// Reads the function at `address`, if it exists and has the NVMe class.
    pub fn at_address(machine: &KernelFiles, address: PciAddress) -> Option<Self> {
        if class_code(machine, &address.to_string())? >> 8 != NON_VOLATILE {
            return None;
        }
        let directory = sysfs_directory(address);
        let text = |name: &str| machine.read_trimmed(&format!("{directory}/{name}"));
        let number = |name: &str| u16::try_from(parse_hex(&text(name)?)?).ok();
        let controller = kernel_controller(machine, &directory);
        let disks = controller.as_ref().map_or_else(Vec::new, |controller| {
            kernel_disks(machine, &format!("{directory}/nvme/{}", controller.name))
        });
        Some(Self {
            address,
            vendor: number("vendor")?,
            device: number("device")?,
            driver: machine.link_target_name(&format!("{directory}/driver")),
            driver_override: text("driver_override").filter(|name| is_driver_override_set(name)),
            group: iommu_group(machine, address),
            // -1 on a machine without NUMA.
            numa_node: text("numa_node").and_then(|text| text.parse().ok()),
            virtual_functions: text("sriov_numvfs").and_then(|text| text.parse().ok()).unwrap_or(0),
            controller,
            disks,
        })
    }

    /// Class code of the function at `address`.
    pub fn class_code_at(machine: &KernelFiles, address: PciAddress) -> Option<u32> {
        class_code(machine, &address.to_string())
    }

    /// Model if known to the kernel's driver, else vendor and device identifiers.
    pub fn model(&self) -> String {
        let model = self.controller.as_ref().and_then(|controller| controller.model.clone());
        model.unwrap_or_else(|| format!("{:04x}:{:04x}", self.vendor, self.device))
    }

    /// Serial number, if known to the kernel's driver.
    pub fn serial(&self) -> Option<&str> {
        self.controller.as_ref()?.serial.as_deref()
    }

    /// Users of its disks and processes with its device nodes open.
    pub fn disk_users(&self, machine: &KernelFiles) -> ProcessesWithOpenDevices {
        let mut openers = find_processes_with_open_devices(machine, &self.device_nodes(machine));
        let used = self.disks.iter().flat_map(|disk| {
            let path = format!("/dev/{}", disk.name).into();
            DeviceUser::users_of(machine, &DevicePath { path, device: disk.number })
        });
        openers.found = used.chain(std::mem::take(&mut openers.found)).collect();
        openers
    }

    /// Device nodes of its disks, partitions and controller.
    fn device_nodes(&self, machine: &KernelFiles) -> Vec<String> {
        let mut nodes = Vec::new();
        let directory = sysfs_directory(self.address);
        if let Some(controller) = &self.controller {
            nodes.push(format!("/dev/{}", controller.name));
            let generic =
                machine.directory_entries(&format!("{directory}/nvme/{}", controller.name));
            let generic = generic.into_iter().filter(|name| name.starts_with("ng"));
            nodes.extend(generic.map(|name| format!("/dev/{name}")));
        }
        for disk in &self.disks {
            nodes.push(format!("/dev/{}", disk.name));
            nodes.extend(disk.partitions(machine).into_iter().map(|name| format!("/dev/{name}")));
        }
        nodes.extend(group_node(machine, self.address).map(|node| format!("/{node}")));
        let mut put = |directory: &str, kind: &str, place: &str| {
            let names = machine.directory_entries(&format!("{directory}/{kind}"));
            nodes.extend(names.into_iter().map(|name| format!("{place}{name}")));
        };
        put(&directory, "uio", "/dev/");
        put(&directory, "vfio-dev", DEVICE_NODES);
        // A program that uses another function of the IOMMU group excludes others from this one.
        for other in self.group.iter().flat_map(|group| &group.others) {
            put(&format!("{DEVICES}/{}", other.address), "vfio-dev", DEVICE_NODES);
        }
        nodes
    }
}

impl KernelDisk {
    /// Names of the partitions.
    pub fn partitions(&self, machine: &KernelFiles) -> Vec<String> {
        let directory = format!("sys/block/{}", self.name);
        let is_partition = |name: &String| machine.exists(&format!("{directory}/{name}/partition"));
        machine.directory_entries(&directory).into_iter().filter(is_partition).collect()
    }
}

/// Directory of VFIO device nodes of single functions.
const DEVICE_NODES: &str = "/dev/vfio/devices/";

/// Sysfs directory of the function at `address`.
pub(super) fn sysfs_directory(address: PciAddress) -> String {
    format!("{DEVICES}/{address}")
}

/// Whether `driver_override` names a driver; "(null)" means unset.
pub(super) fn is_driver_override_set(name: &str) -> bool {
    !name.is_empty() && name != "(null)"
}

fn class_code(machine: &KernelFiles, name: &str) -> Option<u32> {
    parse_hex(&machine.read_trimmed(&format!("{DEVICES}/{name}/class"))?)
}

fn parse_hex(text: &str) -> Option<u32> {
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// VFIO group node of a function, for an IOMMU group or a no-IOMMU group.
pub(super) fn group_node(machine: &KernelFiles, address: PciAddress) -> Option<String> {
    let (number, is_real) = group_number(machine, address)?;
    Some(if is_real { format!("dev/vfio/{number}") } else { format!("dev/vfio/noiommu-{number}") })
}

/// Group number of a function, and whether it is an IOMMU group. In no-IOMMU mode VFIO creates a
/// group with a distinct name while it is bound (drivers/vfio/group.c, `vfio_noiommu_group_alloc`).
fn group_number(machine: &KernelFiles, address: PciAddress) -> Option<(u32, bool)> {
    let number = machine.link_target_name(&format!("{}/iommu_group", sysfs_directory(address)))?;
    let number = number.parse().ok()?;
    let name = machine.read_trimmed(&format!("sys/kernel/iommu_groups/{number}/name"));
    Some((number, name.as_deref() != Some("vfio-noiommu")))
}

fn iommu_group(machine: &KernelFiles, address: PciAddress) -> Option<IommuGroup> {
    let (number, _) = group_number(machine, address).filter(|(_, is_real)| *is_real)?;
    let own = address.to_string();
    let names = machine.directory_entries(&format!("sys/kernel/iommu_groups/{number}/devices"));
    let neighbour = |name: String| GroupMember {
        driver: machine.link_target_name(&format!("{DEVICES}/{name}/driver")),
        is_bridge: class_code(machine, &name).is_some_and(|class| class >> 16 == BRIDGE),
        address: name,
    };
    let others = names.into_iter().filter(|name| *name != own).map(neighbour).collect();
    Some(IommuGroup { number, others })
}

fn kernel_controller(machine: &KernelFiles, directory: &str) -> Option<KernelController> {
    let name = machine.directory_entries(&format!("{directory}/nvme")).into_iter().next()?;
    let text = |file: &str| {
        let text = machine.read_trimmed(&format!("{directory}/nvme/{name}/{file}"));
        // Placeholders that the kernel writes until the controller has been identified.
        text.filter(|text| !matches!(text.as_str(), "" | "(efault)" | "(null)"))
    };
    let (model, serial, state) = (text("model"), text("serial"), text("state"));
    let cmbsz = text("cmbsz").and_then(|text| text.parse().ok()).map(MemoryBufferSize);
    let cmb_bytes = cmbsz.and_then(|size| size.len_bytes()).filter(|bytes| *bytes > 0);
    Some(KernelController { name, model, serial, state, cmb_bytes })
}

fn kernel_disks(machine: &KernelFiles, controller: &str) -> Vec<KernelDisk> {
    let names = machine.directory_entries(controller);
    let mut disks: Vec<KernelDisk> = names
        .iter()
        .filter_map(|name| {
            let disk = disk_of(name)?;
            let controllers =
                if disk == *name { Vec::new() } else { controllers_of_disk(machine, &disk) };
            let number = device_number(machine, &disk);
            Some(KernelDisk { name: disk, number, controllers })
        })
        .collect();
    disks.dedup();
    disks
}

fn device_number(machine: &KernelFiles, disk: &str) -> Option<(u32, u32)> {
    let text = machine.read_trimmed(&format!("sys/block/{disk}/dev"))?;
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Disk for a name in a controller's directory: `nvme0n1` for itself and for the path `nvme0c1n1`;
/// `None` for other names.
fn disk_of(name: &str) -> Option<String> {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (before, space) = name.strip_prefix("nvme")?.rsplit_once('n')?;
    let (subsystem, path) = before.split_once('c').map_or((before, "0"), |parts| parts);
    (digits(subsystem) && digits(path) && digits(space)).then(|| format!("nvme{subsystem}n{space}"))
}

/// Names of the controllers of the subsystem that has this disk.
fn controllers_of_disk(machine: &KernelFiles, disk: &str) -> Vec<String> {
    let subsystems = machine.directory_entries(SUBSYSTEMS).into_iter();
    let mut directories = subsystems.map(|name| format!("{SUBSYSTEMS}/{name}"));
    let own = directories.find(|directory| machine.exists(&format!("{directory}/{disk}")));
    let names = own.map_or_else(Vec::new, |own| machine.directory_entries(&own));
    let is_controller = |name: &String| {
        let number = name.strip_prefix("nvme").unwrap_or_default();
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    };
    names.into_iter().filter(is_controller).collect()
}

#[cfg(test)]
mod tests {
    use super::disk_of;

    #[test]
    fn disk_of_a_path_is_the_disk_of_its_subsystem() {
        for (name, disk) in [
            ("nvme0n1", Some("nvme0n1")),
            ("nvme12c3n45", Some("nvme12n45")),
            ("nvme0", None),
            ("ng0n1", None),
            ("nvme0n", None),
            ("nvmen1", None),
            ("nvme0cn1", None),
            ("power", None),
        ] {
            assert_eq!(disk_of(name).as_deref(), disk, "{name}");
        }
    }
}
