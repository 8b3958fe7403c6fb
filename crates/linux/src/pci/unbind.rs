//! Returning functions to their original drivers.

use super::bind::run_steps;
use super::bind_kernel::BindKernel;
use super::bind_obstacle::NO_IOMMU_PARAMETER;
use super::bind_records::{
    BindRecords, OriginalBinding, functions_bound_by_tenmil, is_valid_driver_name, original_binding,
};
use super::error::BindError;
use super::nvme_function::{is_driver_override_set, sysfs_directory};
use super::{BindStep, NvmeFunction, PciAddress, VFIO};
use crate::device_users::DeviceUser;
use crate::kernel_files::KernelFiles;

/// Functions to return.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnbindSelection {
    /// All functions recorded as bound by tenmil.
    All,
    /// These functions.
    These(Vec<PciAddress>),
    /// These functions, to this driver, regardless of the records.
    To(Vec<PciAddress>, String),
}

/// Plans the steps that return functions. Changes nothing.
///
/// # Errors
///
/// If a function has no record, is used by a program, or its driver is missing.
pub fn plan_unbind(
    kernel: &dyn BindKernel,
    which: &UnbindSelection,
) -> Result<Vec<(PciAddress, Vec<BindStep>)>, BindError> {
    let machine = kernel.kernel_files();
    let (addresses, to) = match which {
        UnbindSelection::All => (functions_bound_by_tenmil(machine), None),
        UnbindSelection::These(addresses) => (addresses.clone(), None),
        UnbindSelection::To(addresses, driver) => (addresses.clone(), Some(driver.clone())),
    };
    let plan = |address: PciAddress| {
        let driver = machine.link_target_name(&format!("{}/driver", sysfs_directory(address)));
        let former = match &to {
            Some(driver) => {
                let (driver, driver_override) = (Some(driver.clone()), None);
                OriginalBinding { driver, driver_override, no_iommu: None }
            }
            None => original_binding(machine, address)?
                .ok_or(BindError::NotRecorded { address, driver })?,
        };
        let steps = unbind_steps(machine, address, &former);
        check_unbind_possible(kernel, address, &steps)?;
        Ok((address, steps))
    };
    addresses.into_iter().map(plan).collect()
}

/// Returns functions to their drivers, and lists them. A function that cannot be returned does not
/// affect the others; the first error is returned: one of [`plan_unbind`], or a step refused by the
/// kernel.
pub fn unbind_functions(
    kernel: &dyn BindKernel,
    which: &UnbindSelection,
) -> (Vec<PciAddress>, Result<(), BindError>) {
    let machine = kernel.kernel_files();
    let selections = match which {
        UnbindSelection::All => functions_bound_by_tenmil(machine)
            .into_iter()
            .map(|one| UnbindSelection::These(vec![one]))
            .collect(),
        UnbindSelection::These(these) => {
            these.iter().map(|one| UnbindSelection::These(vec![*one])).collect()
        }
        UnbindSelection::To(these, driver) => these
            .iter()
            .map(|one| UnbindSelection::To(vec![*one], driver.clone()))
            .collect::<Vec<_>>(),
    };
    if selections.is_empty() {
        return (Vec::new(), Ok(()));
    }
    let ledger = match BindRecords::open_locked(machine) {
        Ok(ledger) => ledger,
        Err(error) => return (Vec::new(), Err(error)),
    };
    let (mut done, mut error) = (Vec::new(), None);
    // One at a time, so that an error does not affect the others.
    for one in selections {
        let given = plan_unbind(kernel, &one).and_then(|plans| {
            for (address, steps) in plans {
                run_steps(kernel, &ledger, address, &steps, drop)?;
                done.push(address);
            }
            Ok(())
        });
        error = error.or(given.err());
    }
    (done, error.map_or(Ok(()), Err))
}

/// Steps from the current to the original state. They depend on nothing else, so they apply at
/// whatever point a crash left a function.
pub(super) fn unbind_steps(
    machine: &KernelFiles,
    address: PciAddress,
    former: &OriginalBinding,
) -> Vec<BindStep> {
    let text = |name: &str| machine.read_trimmed(&format!("{}/{name}", sysfs_directory(address)));
    let driver = machine.link_target_name(&format!("{}/driver", sysfs_directory(address)));
    let pinned = text("driver_override").filter(|name| is_driver_override_set(name));
    let mut steps = Vec::new();
    // A function that is missing, or bound to a third driver, is left as it is.
    let is_there = text("class").is_some();
    let is_ours = driver.as_deref().is_none_or(|driver| driver == VFIO);
    if is_there && is_ours && driver != former.driver {
        if former.driver.is_some() {
            steps.push(BindStep::Override { driver: former.driver.clone() });
        }
        steps.extend(driver.map(|driver| BindStep::Unbind { driver }));
        steps.extend(former.driver.clone().map(|driver| BindStep::Probe { driver }));
        steps.push(BindStep::Override { driver: former.driver_override.clone() });
    } else if is_there && pinned.as_deref() == Some(VFIO) && pinned != former.driver_override {
        // Only the override was set: a crash before the unbind, or after a failed probe.
        steps.push(BindStep::Override { driver: former.driver_override.clone() });
    } else if is_there && pinned.is_some() && pinned == former.driver {
        // A crash during the return, after the driver was bound again.
        steps.push(BindStep::Override { driver: former.driver_override.clone() });
    }
    // The last function without an IOMMU restores the no-IOMMU parameter.
    let others = functions_bound_by_tenmil(machine).into_iter().filter(|other| *other != address);
    let mut others = others.filter_map(|other| original_binding(machine, other).ok()?);
    if let Some(to) = &former.no_iommu
        && !others.any(|other| other.no_iommu.is_some())
        && machine.read_trimmed(NO_IOMMU_PARAMETER).as_ref() != Some(to)
    {
        steps.push(BindStep::NoIommu { to: to.clone() });
    }
    steps.push(BindStep::RemoveRecord);
    steps
}

/// Checks that the steps are possible, and that no program has the function open.
pub(super) fn check_unbind_possible(
    kernel: &dyn BindKernel,
    address: PciAddress,
    steps: &[BindStep],
) -> Result<(), BindError> {
    let machine = kernel.kernel_files();
    for step in steps {
        match step {
            BindStep::Probe { driver }
                if !is_valid_driver_name(driver)
                    || !machine.exists(&format!("sys/bus/pci/drivers/{driver}")) =>
            {
                let driver = driver.clone();
                return Err(BindError::NoDriver { address, driver });
            }
            BindStep::Unbind { .. } => {
                let function = NvmeFunction::at_address(machine, address);
                let users =
                    function.map(|function| function.disk_users(machine)).unwrap_or_default();
                let is_open = |used: &DeviceUser| matches!(used, DeviceUser::Open { .. });
                let by: Vec<DeviceUser> = users.found.into_iter().filter(is_open).collect();
                // The unbind would block until they close it, possibly forever.
                if !by.is_empty() {
                    return Err(BindError::InUse { address, by });
                }
            }
            _ => {}
        }
    }
    Ok(())
}
