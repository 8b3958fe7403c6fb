//! NVMe PCI functions as shown by `tenmil list`.

use std::fmt;

use serde_json::{Value, json};
use tenmil_linux::device_users::ProcessesWithOpenDevices;
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::pci::{GroupMember, NvmeFunction};

/// One-line summary of a function.
pub(super) struct NvmeFunctionLine<'a>(pub(super) &'a NvmeFunction);

/// Function and its users.
#[derive(Debug)]
pub(super) struct FunctionWithUsers {
    function: NvmeFunction,
    used: ProcessesWithOpenDevices,
}

impl FunctionWithUsers {
    /// All NVMe functions of `machine`.
    pub(super) fn all_nvme(machine: &KernelFiles) -> Vec<Self> {
        let shown = |function: NvmeFunction| Self { used: function.disk_users(machine), function };
        NvmeFunction::all_nvme_functions(machine).into_iter().map(shown).collect()
    }

    /// The function as JSON, with its users.
    pub(super) fn as_json(&self) -> Value {
        let Self { function, used } = self;
        let mut shown = function_json(function);
        shown["used_by"] = used.found.iter().map(ToString::to_string).collect();
        shown["processes_not_seen"] = used.hidden.into();
        shown
    }
}

/// The function as JSON, without its users.
pub(super) fn function_json(function: &NvmeFunction) -> Value {
    let controller = function.controller.as_ref();
    let others = function.group.iter().flat_map(|group| &group.others);
    let others: Vec<Value> =
        others.map(|other| json!({ "address": other.address, "driver": other.driver })).collect();
    json!({
        "address": function.address.to_string(),
        "vendor": function.vendor,
        "device": function.device,
        "model": controller.and_then(|controller| controller.model.as_deref()),
        "serial": function.serial(),
        "controller": controller.map(|controller| &controller.name),
        "state": controller.and_then(|controller| controller.state.as_deref()),
        "disks": function.disks.iter().map(|disk| &disk.name).collect::<Vec<_>>(),
        "driver": function.driver,
        "driver_override": function.driver_override,
        "iommu_group": function.group.as_ref().map(|group| group.number),
        "iommu_group_others": others,
        "numa_node": function.numa_node,
        "cmb_bytes": controller.and_then(|controller| controller.cmb_bytes),
    })
}

impl fmt::Display for NvmeFunctionLine<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let function = self.0;
        write!(out, "{}  {}", function.address, function.model())?;
        if let Some(serial) = function.serial() {
            write!(out, ", serial {serial}")?;
        }
        write!(out, ", driver {}", function.driver.as_deref().unwrap_or("none"))?;
        match &function.group {
            Some(group) => write!(out, ", IOMMU group {}", group.number)?,
            None => out.write_str(", no IOMMU group")?,
        }
        function.numa_node.map_or(Ok(()), |node| write!(out, ", node {node}"))
    }
}

/// One line for the function, and one for each obstacle to binding it.
impl fmt::Display for FunctionWithUsers {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { function, used } = self;
        writeln!(out, "  {}", NvmeFunctionLine(function))?;
        let state = function.controller.as_ref().and_then(|one| one.state.as_deref());
        if let Some(state) = state.filter(|state| *state != "live") {
            writeln!(out, "      its controller is {state}")?;
        }
        if let Some(bytes) = function.controller.as_ref().and_then(|one| one.cmb_bytes) {
            writeln!(out, "      it has a controller memory buffer of {bytes} bytes")?;
        }
        used.found.iter().try_for_each(|used| writeln!(out, "      {used}"))?;
        if used.hidden > 0 {
            writeln!(out, "      what {} processes have open is shown to root only", used.hidden)?;
        }
        let others = function.group.iter().flat_map(|group| &group.others);
        others.into_iter().try_for_each(|other| format_group_member(out, other))
    }
}

fn format_group_member(out: &mut fmt::Formatter<'_>, other: &GroupMember) -> fmt::Result {
    let driver = other.driver.as_deref().unwrap_or("none");
    writeln!(out, "      {} is in its IOMMU group, driver {driver}", other.address)
}

#[cfg(test)]
mod tests {
    use tenmil_linux::device_users::{DeviceUser, ProcessesWithOpenDevices};
    use tenmil_linux::pci::{GroupMember, IommuGroup, KernelController, NvmeFunction};

    use super::FunctionWithUsers;

    fn test_function_info() -> FunctionWithUsers {
        let text = |text: &str| Some(text.to_owned());
        let (model, serial, state) = (text("Disk 9"), text("S4EW"), text("resetting"));
        let other =
            GroupMember { address: "0000:5e:00.1".into(), driver: text("ahci"), is_bridge: false };
        let function = NvmeFunction {
            address: "5e:00.0".parse().unwrap(),
            vendor: 0x8086,
            device: 0x0a54,
            driver: text("nvme"),
            driver_override: None,
            group: Some(IommuGroup { number: 12, others: vec![other] }),
            numa_node: Some(1),
            virtual_functions: 0,
            controller: Some(KernelController {
                name: "nvme0".into(),
                model,
                serial,
                state,
                cmb_bytes: Some(4 << 20),
            }),
            disks: Vec::new(),
        };
        let mounted = DeviceUser::Mounted { device: "nvme0n1p1".into(), at: "/srv".into() };
        FunctionWithUsers {
            function,
            used: ProcessesWithOpenDevices { found: vec![mounted], hidden: 7 },
        }
    }

    #[test]
    fn function_is_listed_with_its_bind_obstacles() {
        assert_eq!(
            test_function_info().to_string(),
            "  0000:5e:00.0  Disk 9, serial S4EW, driver nvme, IOMMU group 12, node 1\n      \
             its controller is resetting\n      \
             it has a controller memory buffer of 4194304 bytes\n      nvme0n1p1 is mounted at /srv\n      \
             what 7 processes have open is shown to root only\n      \
             0000:5e:00.1 is in its IOMMU group, driver ahci\n"
        );
        let mut bare = test_function_info();
        bare.function = NvmeFunction {
            driver: None,
            group: None,
            controller: None,
            numa_node: None,
            ..bare.function
        };
        bare.used = ProcessesWithOpenDevices::default();
        assert_eq!(bare.to_string(), "  0000:5e:00.0  8086:0a54, driver none, no IOMMU group\n");
    }

    #[test]
    fn function_json_has_the_same_content() {
        let json = test_function_info().as_json();
        assert_eq!(json["address"], "0000:5e:00.0");
        assert_eq!((&json["driver"], &json["device"]), (&"nvme".into(), &0x0a54.into()));
        assert_eq!(json["used_by"][0], "nvme0n1p1 is mounted at /srv");
        assert_eq!(json["iommu_group_others"][0]["driver"], "ahci");
    }
}
