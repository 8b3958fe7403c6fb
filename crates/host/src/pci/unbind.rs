//! Giving functions back to the drivers that had them.

use super::bind::run;
use super::function::{directory, is_given};
use super::kernel::Kernel;
use super::ledger::{Former, Ledger, former, is_plain, recorded};
use super::obstacle::NO_IOMMU_SWITCH;
use super::refused::BindError;
use super::{Address, Function, Step, VFIO};
use crate::holders::InUse;
use crate::machine::Machine;

/// Which functions are given back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    /// All of which it is recorded that we have taken them.
    All,
    /// These.
    These(Vec<Address>),
    /// These, and to this driver, whatever is recorded.
    To(Vec<Address>, String),
}

/// How functions are given back. Nothing is changed.
///
/// # Errors
///
/// If nothing is recorded of one, a program drives it, or its driver is not there.
pub fn plan_back(
    kernel: &dyn Kernel,
    which: &Which,
) -> Result<Vec<(Address, Vec<Step>)>, BindError> {
    let machine = kernel.machine();
    let (addresses, to) = match which {
        Which::All => (recorded(machine), None),
        Which::These(addresses) => (addresses.clone(), None),
        Which::To(addresses, driver) => (addresses.clone(), Some(driver.clone())),
    };
    let plan = |address: Address| {
        let driver = machine.link(&format!("{}/driver", directory(address)));
        let former = match &to {
            Some(driver) => {
                let (driver, driver_override) = (Some(driver.clone()), None);
                Former { driver, driver_override, no_iommu: None }
            }
            None => former(machine, address)?.ok_or(BindError::NotOurs { address, driver })?,
        };
        let steps = back(machine, address, &former);
        check(kernel, address, &steps)?;
        Ok((address, steps))
    };
    addresses.into_iter().map(plan).collect()
}

/// Gives functions back, and tells which. One that cannot be given back does not keep the others;
/// the first error is told as well: those of [`plan_back`], and a step that the kernel refused.
pub fn unbind(kernel: &dyn Kernel, which: &Which) -> (Vec<Address>, Result<(), BindError>) {
    let machine = kernel.machine();
    let one_by_one = match which {
        Which::All => recorded(machine).into_iter().map(|one| Which::These(vec![one])).collect(),
        Which::These(these) => these.iter().map(|one| Which::These(vec![*one])).collect(),
        Which::To(these, driver) => {
            these.iter().map(|one| Which::To(vec![*one], driver.clone())).collect::<Vec<_>>()
        }
    };
    if one_by_one.is_empty() {
        return (Vec::new(), Ok(()));
    }
    let ledger = match Ledger::open(machine) {
        Ok(ledger) => ledger,
        Err(error) => return (Vec::new(), Err(error)),
    };
    let (mut done, mut error) = (Vec::new(), None);
    for one in one_by_one {
        let given = plan_back(kernel, &one).and_then(|plans| {
            for (address, steps) in plans {
                run(kernel, &ledger, address, &steps, drop)?;
                done.push(address);
            }
            Ok(())
        });
        error = error.or(given.err());
    }
    (done, error.map_or(Ok(()), Err))
}

/// The steps from what is now to what was. They depend on nothing but these two, so they can be
/// taken from wherever a crash has left a function.
pub(super) fn back(machine: &Machine, address: Address, former: &Former) -> Vec<Step> {
    let text = |name: &str| machine.text(&format!("{}/{name}", directory(address)));
    let driver = machine.link(&format!("{}/driver", directory(address)));
    let pinned = text("driver_override").filter(|name| is_given(name));
    let mut steps = Vec::new();
    // One that is not there any more, or that somebody else has, is left as it is.
    let is_there = text("class").is_some();
    let is_ours = driver.as_deref().is_none_or(|driver| driver == VFIO);
    if is_there && is_ours && driver != former.driver {
        if former.driver.is_some() {
            steps.push(Step::Override { driver: former.driver.clone() });
        }
        steps.extend(driver.map(|driver| Step::Unbind { driver }));
        steps.extend(former.driver.clone().map(|driver| Step::Probe { driver }));
        steps.push(Step::Override { driver: former.driver_override.clone() });
    } else if is_there && pinned.as_deref() == Some(VFIO) && pinned != former.driver_override {
        steps.push(Step::Override { driver: former.driver_override.clone() });
    } else if is_there && pinned.is_some() && pinned == former.driver {
        // A crash on the way back, after the driver had it again.
        steps.push(Step::Override { driver: former.driver_override.clone() });
    }
    let others = recorded(machine).into_iter().filter(|other| *other != address);
    let mut others = others.filter_map(|other| super::ledger::former(machine, other).ok()?);
    if let Some(to) = &former.no_iommu
        && !others.any(|other| other.no_iommu.is_some())
        && machine.text(NO_IOMMU_SWITCH).as_ref() != Some(to)
    {
        steps.push(Step::NoIommu { to: to.clone() });
    }
    steps.push(Step::Forget);
    steps
}

/// Looks whether steps back can be taken at all, and no program keeps the kernel waiting.
pub(super) fn check(
    kernel: &dyn Kernel,
    address: Address,
    steps: &[Step],
) -> Result<(), BindError> {
    let machine = kernel.machine();
    for step in steps {
        match step {
            Step::Probe { driver }
                if !is_plain(driver) || !machine.has(&format!("sys/bus/pci/drivers/{driver}")) =>
            {
                let driver = driver.clone();
                return Err(BindError::NoDriver { address, driver });
            }
            Step::Unbind { .. } => {
                let function = Function::at(machine, address);
                let users = function.map(|function| function.used_by(machine)).unwrap_or_default();
                let is_open = |used: &InUse| matches!(used, InUse::Open { .. });
                let by: Vec<InUse> = users.found.into_iter().filter(is_open).collect();
                // The kernel would wait for them, for ever.
                if !by.is_empty() {
                    return Err(BindError::Driven { address, by });
                }
            }
            _ => {}
        }
    }
    Ok(())
}
