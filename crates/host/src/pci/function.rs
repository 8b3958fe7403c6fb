//! An NVMe function, and all that the kernel's files tell of it.
//!
//! ```text
//!   /sys/bus/pci/devices/0000:5e:00.0/
//!     class vendor device numa_node sriov_numvfs
//!     driver ──> …/drivers/nvme        driver_override
//!     iommu_group ──> …/iommu_groups/12/devices/…       who can reach what it can
//!     nvme/nvme0/  model serial state cmbsz             if the kernel drives it
//!       nvme0n1                                         a namespace, or
//!       nvme0c1n1                                       a path to one: its disk is nvme0n1
//! ```

use wire::register::MemoryBufferSize;

use super::Address;
use crate::holders::{InUse, Openers, Place, openers};
use crate::machine::Machine;

/// A function of the NVMe class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Where it sits.
    pub address: Address,
    /// Vendor identifier.
    pub vendor: u16,
    /// Device identifier.
    pub device: u16,
    /// The kernel driver that has it, if any.
    pub driver: Option<String>,
    /// The one driver that may have it, if somebody has said so.
    pub driver_override: Option<String>,
    /// The group in which an IOMMU keeps it apart from others. None without an IOMMU.
    pub group: Option<Group>,
    /// The memory node that it is near to.
    pub numa_node: Option<u32>,
    /// Virtual functions that it has made.
    pub virtual_functions: u32,
    /// What the kernel's driver says of its controller.
    pub controller: Option<Controller>,
    /// The disks that are reached through it, by their names in `/dev`.
    pub disks: Vec<Disk>,
}

/// Functions that no IOMMU can tell apart: they are given to one user, or to none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its number.
    pub number: u32,
    /// Who else is in it.
    pub others: Vec<Neighbour>,
}

/// Another function of the same group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// Its name on its bus.
    pub address: String,
    /// The driver that has it.
    pub driver: Option<String>,
    /// Whether it is a bridge, which does not access memory by itself.
    pub is_bridge: bool,
}

/// A controller, as the kernel's driver has found it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Controller {
    /// Its name: `nvme0`.
    pub name: String,
    /// Its model.
    pub model: Option<String>,
    /// Its serial number.
    pub serial: Option<String>,
    /// Whether it lives: `live`, `resetting`, `dead`.
    pub state: Option<String>,
    /// How long its memory buffer is (CMB), if it has one.
    pub cmb_bytes: Option<u64>,
}

/// A disk that is reached through a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Its name: `nvme0n1`.
    pub name: String,
    /// Its number.
    pub number: Option<(u32, u32)>,
    /// The controllers through which it is reached, if the kernel makes one disk of several paths.
    pub controllers: Vec<String>,
}

/// Where the kernel shows the functions.
const DEVICES: &str = "sys/bus/pci/devices";
/// Mass storage, non-volatile memory: class and sub-class of all NVMe functions, whatever their
/// programming interface (PCI Code and ID Assignment, class 01h, sub-class 08h).
const NON_VOLATILE: u32 = 0x01_08;
/// Bridges of all kinds (class 06h).
const BRIDGE: u32 = 0x06;
const SUBSYSTEMS: &str = "sys/class/nvme-subsystem";

impl Function {
    /// All NVMe functions of `machine`, by address.
    pub fn all(machine: &Machine) -> Vec<Self> {
        let names = machine.names(DEVICES);
        let addresses = names.iter().filter_map(|name| name.parse().ok());
        let mut functions: Vec<Self> =
            addresses.filter_map(|address| Self::at(machine, address)).collect();
        functions.sort_by_key(|function| function.address);
        functions
    }

    /// The function at `address`, if it is there and of the NVMe class.
    pub fn at(machine: &Machine, address: Address) -> Option<Self> {
        if class(machine, &address.to_string())? >> 8 != NON_VOLATILE {
            return None;
        }
        let directory = directory(address);
        let text = |name: &str| machine.text(&format!("{directory}/{name}"));
        let number = |name: &str| u16::try_from(hex(&text(name)?)?).ok();
        let controller = controller(machine, &directory);
        let disks = controller.as_ref().map_or_else(Vec::new, |controller| {
            disks(machine, &format!("{directory}/nvme/{}", controller.name))
        });
        Some(Self {
            address,
            vendor: number("vendor")?,
            device: number("device")?,
            driver: machine.link(&format!("{directory}/driver")),
            driver_override: text("driver_override").filter(|name| is_given(name)),
            group: group(machine, address),
            // A machine of one node writes -1.
            numa_node: text("numa_node").and_then(|text| text.parse().ok()),
            virtual_functions: text("sriov_numvfs").and_then(|text| text.parse().ok()).unwrap_or(0),
            controller,
            disks,
        })
    }

    /// The class code of whatever is at `address`.
    pub fn class_at(machine: &Machine, address: Address) -> Option<u32> {
        class(machine, &address.to_string())
    }

    /// Its model if the kernel's driver knows it, or else its numbers.
    pub fn model(&self) -> String {
        let model = self.controller.as_ref().and_then(|controller| controller.model.clone());
        model.unwrap_or_else(|| format!("{:04x}:{:04x}", self.vendor, self.device))
    }

    /// Its serial number, if the kernel's driver has asked for it.
    pub fn serial(&self) -> Option<&str> {
        self.controller.as_ref()?.serial.as_deref()
    }

    /// Who uses it: its disks, and whoever has a door to it open.
    pub fn used_by(&self, machine: &Machine) -> Openers {
        let mut openers = openers(machine, &self.nodes(machine));
        let used = self.disks.iter().flat_map(|disk| {
            let path = format!("/dev/{}", disk.name).into();
            InUse::of(machine, &Place { path, device: disk.number })
        });
        openers.found = used.chain(std::mem::take(&mut openers.found)).collect();
        openers
    }

    /// The names under `/dev` by which its disks, partitions and controller are reached.
    fn nodes(&self, machine: &Machine) -> Vec<String> {
        let mut nodes = Vec::new();
        let directory = directory(self.address);
        if let Some(controller) = &self.controller {
            nodes.push(format!("/dev/{}", controller.name));
            let generic = machine.names(&format!("{directory}/nvme/{}", controller.name));
            let generic = generic.into_iter().filter(|name| name.starts_with("ng"));
            nodes.extend(generic.map(|name| format!("/dev/{name}")));
        }
        for disk in &self.disks {
            nodes.push(format!("/dev/{}", disk.name));
            nodes.extend(disk.partitions(machine).into_iter().map(|name| format!("/dev/{name}")));
        }
        nodes.extend(group_door(machine, self.address).map(|door| format!("/{door}")));
        let mut put = |directory: &str, kind: &str, place: &str| {
            let names = machine.names(&format!("{directory}/{kind}"));
            nodes.extend(names.into_iter().map(|name| format!("{place}{name}")));
        };
        put(&directory, "uio", "/dev/");
        put(&directory, "vfio-dev", OWN_DOORS);
        // Whoever drives another function of its group keeps all others from this one.
        for other in self.group.iter().flat_map(|group| &group.others) {
            put(&format!("{DEVICES}/{}", other.address), "vfio-dev", OWN_DOORS);
        }
        nodes
    }
}

impl Disk {
    /// The names of its partitions.
    pub fn partitions(&self, machine: &Machine) -> Vec<String> {
        let directory = format!("sys/block/{}", self.name);
        let is_partition = |name: &String| machine.has(&format!("{directory}/{name}/partition"));
        machine.names(&directory).into_iter().filter(is_partition).collect()
    }
}

/// Where doors of single functions are.
const OWN_DOORS: &str = "/dev/vfio/devices/";

/// The directory of the function at `address`.
pub(super) fn directory(address: Address) -> String {
    format!("{DEVICES}/{address}")
}

/// Whether a driver is named in `driver_override`, which holds this text if none is.
pub(super) fn is_given(name: &str) -> bool {
    !name.is_empty() && name != "(null)"
}

fn class(machine: &Machine, name: &str) -> Option<u32> {
    hex(&machine.text(&format!("{DEVICES}/{name}/class"))?)
}

fn hex(text: &str) -> Option<u32> {
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// The door to the group of a function, whether an IOMMU has made the group or VFIO itself.
pub(super) fn group_door(machine: &Machine, address: Address) -> Option<String> {
    let (number, is_real) = group_number(machine, address)?;
    Some(if is_real { format!("dev/vfio/{number}") } else { format!("dev/vfio/noiommu-{number}") })
}

/// The number of a function's group, and whether an IOMMU is behind it: one that VFIO drives without
/// has a group all the same, as long as VFIO drives it, and that is called so
/// (drivers/vfio/group.c, `vfio_noiommu_group_alloc`).
fn group_number(machine: &Machine, address: Address) -> Option<(u32, bool)> {
    let number = machine.link(&format!("{}/iommu_group", directory(address)))?;
    let number = number.parse().ok()?;
    let name = machine.text(&format!("sys/kernel/iommu_groups/{number}/name"));
    Some((number, name.as_deref() != Some("vfio-noiommu")))
}

fn group(machine: &Machine, address: Address) -> Option<Group> {
    let (number, _) = group_number(machine, address).filter(|(_, is_real)| *is_real)?;
    let own = address.to_string();
    let names = machine.names(&format!("sys/kernel/iommu_groups/{number}/devices"));
    let neighbour = |name: String| Neighbour {
        driver: machine.link(&format!("{DEVICES}/{name}/driver")),
        is_bridge: class(machine, &name).is_some_and(|class| class >> 16 == BRIDGE),
        address: name,
    };
    let others = names.into_iter().filter(|name| *name != own).map(neighbour).collect();
    Some(Group { number, others })
}

fn controller(machine: &Machine, directory: &str) -> Option<Controller> {
    let name = machine.names(&format!("{directory}/nvme")).into_iter().next()?;
    let text = |file: &str| {
        let text = machine.text(&format!("{directory}/nvme/{name}/{file}"));
        // Until a controller has said what it is, the kernel writes that it knows nothing so.
        text.filter(|text| !matches!(text.as_str(), "" | "(efault)" | "(null)"))
    };
    let (model, serial, state) = (text("model"), text("serial"), text("state"));
    let cmbsz = text("cmbsz").and_then(|text| text.parse().ok()).map(MemoryBufferSize);
    let cmb_bytes = cmbsz.and_then(|size| size.len_bytes()).filter(|bytes| *bytes > 0);
    Some(Controller { name, model, serial, state, cmb_bytes })
}

fn disks(machine: &Machine, controller: &str) -> Vec<Disk> {
    let names = machine.names(controller);
    let mut disks: Vec<Disk> = names
        .iter()
        .filter_map(|name| {
            let disk = disk_of(name)?;
            let controllers = if disk == *name { Vec::new() } else { paths_to(machine, &disk) };
            let number = number(machine, &disk);
            Some(Disk { name: disk, number, controllers })
        })
        .collect();
    disks.dedup();
    disks
}

fn number(machine: &Machine, disk: &str) -> Option<(u32, u32)> {
    let text = machine.text(&format!("sys/block/{disk}/dev"))?;
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The disk behind a name in a controller's directory: of `nvme0n1` itself, of the path `nvme0c1n1`
/// the disk `nvme0n1`; other names are of no disk.
fn disk_of(name: &str) -> Option<String> {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (before, space) = name.strip_prefix("nvme")?.rsplit_once('n')?;
    let (subsystem, path) = before.split_once('c').map_or((before, "0"), |parts| parts);
    (digits(subsystem) && digits(path) && digits(space)).then(|| format!("nvme{subsystem}n{space}"))
}

/// The controllers of the subsystem that has this disk, by name.
fn paths_to(machine: &Machine, disk: &str) -> Vec<String> {
    let subsystems = machine.names(SUBSYSTEMS).into_iter();
    let mut directories = subsystems.map(|name| format!("{SUBSYSTEMS}/{name}"));
    let own = directories.find(|directory| machine.has(&format!("{directory}/{disk}")));
    let names = own.map_or_else(Vec::new, |own| machine.names(&own));
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
    fn the_disk_of_a_path_is_that_of_its_subsystem() {
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
