//! The steps by which a function changes hands, each of which leaves something that can be undone.

use super::Address;
use super::function::{directory, group_door};
use super::kernel::Kernel;
use super::ledger::{Former, Ledger};
use super::obstacle::NO_IOMMU_SWITCH;
use super::refused::NotDone;

/// One thing that is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Write down what the function was.
    Record {
        /// The driver that has it.
        driver: Option<String>,
        /// What stands in `driver_override`.
        driver_override: Option<String>,
        /// What the switch for life without an IOMMU is, if it is to be moved.
        no_iommu: Option<String>,
    },
    /// Move the switch for life without an IOMMU.
    NoIommu {
        /// Where to.
        to: String,
    },
    /// Say which driver alone may have it; none for any.
    Override {
        /// Which.
        driver: Option<String>,
    },
    /// Take it from its driver.
    Unbind {
        /// Which.
        driver: String,
    },
    /// Let drivers take it, and see that this one does.
    Probe {
        /// Which.
        driver: String,
    },
    /// Make a user the owner of the doors to it.
    Give {
        /// The user.
        uid: u32,
    },
    /// Take the record away.
    Forget,
}

impl Step {
    /// What it is, as a shell would do it.
    pub fn shown(&self, address: Address) -> String {
        let directory = directory(address);
        match self {
            Self::Record { driver, .. } => {
                let driver = driver.as_deref().unwrap_or("none");
                format!("record in /run/tenmil that the driver was {driver}")
            }
            Self::NoIommu { to } => format!("echo {to} > /{NO_IOMMU_SWITCH}"),
            Self::Override { driver } => {
                let driver = driver.as_deref().unwrap_or_default();
                format!("echo '{driver}' > /{directory}/driver_override")
            }
            Self::Unbind { driver } => {
                format!("echo {address} > /sys/bus/pci/drivers/{driver}/unbind")
            }
            Self::Probe { .. } => format!("echo {address} > /{PROBE}"),
            Self::Give { uid } => format!("chown {uid} the doors to it in /dev/vfio"),
            Self::Forget => "remove the record in /run/tenmil".into(),
        }
    }

    /// The driver that has the function afterwards, if that is what the step is for.
    pub(super) fn driver(&self) -> Option<&str> {
        match self {
            Self::Probe { driver } => Some(driver),
            _ => None,
        }
    }

    /// Does it.
    pub(super) fn run(
        &self,
        kernel: &dyn Kernel,
        ledger: &Ledger,
        address: Address,
    ) -> Result<(), NotDone> {
        let directory = directory(address);
        let write = |path: &str, value: &str| kernel.write(path, value).map_err(NotDone::Refused);
        match self {
            Self::Record { driver, driver_override, no_iommu } => {
                let (driver, driver_override) = (driver.clone(), driver_override.clone());
                let former = Former { driver, driver_override, no_iommu: no_iommu.clone() };
                ledger.write(address, &former).map_err(NotDone::Ledger)
            }
            Self::NoIommu { to } => write(NO_IOMMU_SWITCH, to),
            Self::Override { driver } => {
                // An empty line takes away what stands there (Documentation/ABI/testing/sysfs-bus-pci).
                let driver = driver.as_deref().unwrap_or_default();
                write(&format!("{directory}/driver_override"), &format!("{driver}\n"))
            }
            Self::Unbind { driver } => {
                write(&format!("sys/bus/pci/drivers/{driver}/unbind"), &address.to_string())
            }
            Self::Probe { driver } => {
                write(PROBE, &address.to_string())?;
                // The kernel does not say when no driver has taken it.
                let found = kernel.machine().link(&format!("{directory}/driver"));
                let is_done = found.as_deref() == Some(driver);
                is_done.then_some(()).ok_or(NotDone::Driver(found))
            }
            Self::Give { uid } => {
                let doors = doors(kernel, address);
                doors.iter().try_for_each(|door| kernel.give(door, *uid)).map_err(NotDone::Refused)
            }
            Self::Forget => ledger.forget(address).map_err(NotDone::Ledger),
        }
    }
}

/// The doors to a function that a program may have: that of its group, which has to be there, and its
/// own, which kernels with `CONFIG_VFIO_DEVICE_CDEV` make; all others show its name without a door.
fn doors(kernel: &dyn Kernel, address: Address) -> Vec<String> {
    let directory = directory(address);
    let machine = kernel.machine();
    let group = group_door(machine, address);
    let own = machine.names(&format!("{directory}/vfio-dev")).into_iter();
    let own = own.map(|name| format!("dev/vfio/devices/{name}")).filter(|door| machine.has(door));
    group.into_iter().chain(own).collect()
}

/// Where the kernel is told to look for a driver.
pub(super) const PROBE: &str = "sys/bus/pci/drivers_probe";
