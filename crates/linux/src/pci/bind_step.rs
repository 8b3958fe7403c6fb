//! Steps of binding and unbinding, each of which leaves a state that can be undone.

use super::PciAddress;
use super::bind_kernel::BindKernel;
use super::bind_obstacle::NO_IOMMU_PARAMETER;
use super::bind_records::{BindRecords, OriginalBinding};
use super::error::StepError;
use super::nvme_function::{group_node, sysfs_directory};

/// One step of binding or unbinding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BindStep {
    /// Record the original state of the function.
    Record {
        /// Bound driver.
        driver: Option<String>,
        /// Content of `driver_override`.
        driver_override: Option<String>,
        /// Value of the no-IOMMU parameter, if it is to be changed.
        no_iommu: Option<String>,
    },
    /// Set the no-IOMMU parameter.
    NoIommu {
        /// New value.
        to: String,
    },
    /// Set `driver_override`; `None` clears it.
    Override {
        /// Driver name.
        driver: Option<String>,
    },
    /// Unbind the driver.
    Unbind {
        /// Driver name.
        driver: String,
    },
    /// Probe drivers, and check that this one is bound.
    Probe {
        /// Driver name.
        driver: String,
    },
    /// Change the owner of the VFIO device nodes.
    Chown {
        /// User identifier.
        uid: u32,
    },
    /// Delete the bind record.
    RemoveRecord,
}

impl BindStep {
    /// The step as a shell command.
    pub fn shell_command(&self, address: PciAddress) -> String {
        let directory = sysfs_directory(address);
        match self {
            Self::Record { driver, .. } => {
                let driver = driver.as_deref().unwrap_or("none");
                format!("record in /run/tenmil that the driver was {driver}")
            }
            Self::NoIommu { to } => format!("echo {to} > /{NO_IOMMU_PARAMETER}"),
            Self::Override { driver } => {
                let driver = driver.as_deref().unwrap_or_default();
                format!("echo '{driver}' > /{directory}/driver_override")
            }
            Self::Unbind { driver } => {
                format!("echo {address} > /sys/bus/pci/drivers/{driver}/unbind")
            }
            Self::Probe { .. } => format!("echo {address} > /{PROBE}"),
            Self::Chown { uid } => format!("chown {uid} its device nodes in /dev/vfio"),
            Self::RemoveRecord => "remove the record in /run/tenmil".into(),
        }
    }

    /// Driver that is bound afterwards, if the step binds one.
    pub(super) fn bound_driver(&self) -> Option<&str> {
        match self {
            Self::Probe { driver } => Some(driver),
            _ => None,
        }
    }

    /// Executes the step.
    pub(super) fn run_step(
        &self,
        kernel: &dyn BindKernel,
        ledger: &BindRecords,
        address: PciAddress,
    ) -> Result<(), StepError> {
        let directory = sysfs_directory(address);
        let write =
            |path: &str, value: &str| kernel.write_file(path, value).map_err(StepError::Refused);
        match self {
            Self::Record { driver, driver_override, no_iommu } => {
                let (driver, driver_override) = (driver.clone(), driver_override.clone());
                let former =
                    OriginalBinding { driver, driver_override, no_iommu: no_iommu.clone() };
                ledger.write_record(address, &former).map_err(StepError::Records)
            }
            Self::NoIommu { to } => write(NO_IOMMU_PARAMETER, to),
            Self::Override { driver } => {
                // An empty line clears the override (Documentation/ABI/testing/sysfs-bus-pci).
                let driver = driver.as_deref().unwrap_or_default();
                write(&format!("{directory}/driver_override"), &format!("{driver}\n"))
            }
            Self::Unbind { driver } => {
                write(&format!("sys/bus/pci/drivers/{driver}/unbind"), &address.to_string())
            }
            Self::Probe { driver } => {
                write(PROBE, &address.to_string())?;
                // The kernel does not report that no driver was bound.
                let found = kernel.kernel_files().link_target_name(&format!("{directory}/driver"));
                let is_done = found.as_deref() == Some(driver);
                is_done.then_some(()).ok_or(StepError::Driver(found))
            }
            Self::Chown { uid } => {
                let nodes = device_nodes(kernel, address);
                nodes
                    .iter()
                    .try_for_each(|node| kernel.change_owner(node, *uid))
                    .map_err(StepError::Refused)
            }
            Self::RemoveRecord => ledger.remove_record(address).map_err(StepError::Records),
        }
    }
}

/// VFIO device nodes of a function: that of its group, which must exist, and its own, which exists
/// only with `CONFIG_VFIO_DEVICE_CDEV`.
fn device_nodes(kernel: &dyn BindKernel, address: PciAddress) -> Vec<String> {
    let directory = sysfs_directory(address);
    let machine = kernel.kernel_files();
    let group = group_node(machine, address);
    let own = machine.directory_entries(&format!("{directory}/vfio-dev")).into_iter();
    let own =
        own.map(|name| format!("dev/vfio/devices/{name}")).filter(|node| machine.exists(node));
    group.into_iter().chain(own).collect()
}

/// File that triggers a driver probe.
pub(super) const PROBE: &str = "sys/bus/pci/drivers_probe";
