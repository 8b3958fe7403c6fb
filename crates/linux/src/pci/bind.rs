//! Binding functions to vfio-pci.

use super::bind_kernel::BindKernel;
use super::bind_plan::{BindPlan, BindRequest, plan_bind};
use super::bind_records::{BindRecords, original_binding};
use super::error::BindError;
use super::unbind::{check_unbind_possible, unbind_steps};
use super::{BindStep, PciAddress};
use crate::{Clock, StepTimer, StepTiming};

/// Function available to a user-space program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundDevice {
    /// Its address.
    pub address: PciAddress,
    /// Original driver, if tenmil has unbound it.
    pub original_driver: Option<String>,
    /// Whether it was bound now and was not available before.
    pub is_new: bool,
    /// Notes for the user.
    pub notes: Vec<String>,
    /// Completed steps with their durations.
    pub timings: Vec<StepTiming>,
}

/// Binds functions, all or none.
///
/// # Errors
///
/// The first obstacle, with nothing changed; or a step refused by the kernel, with the earlier
/// steps undone as far as possible.
pub fn bind_functions(
    kernel: &dyn BindKernel,
    addresses: &[PciAddress],
    terms: &BindRequest<'_>,
) -> Result<Vec<BoundDevice>, BindError> {
    // Checked without the lock first: a user without permission for the lock learns of the other
    // obstacles.
    plan_without_obstacles(kernel, addresses, terms)?;
    let ledger = BindRecords::open_locked(kernel.kernel_files())?;
    // Checked again under the lock, since the state may have changed.
    let verdicts = plan_without_obstacles(kernel, addresses, terms)?;
    let mut bound = Vec::new();
    for verdict in verdicts {
        let address = verdict.address;
        let mut watch = StepTimer::begin(Clock::on_kernel_clock());
        let ran =
            run_steps(kernel, &ledger, address, &verdict.steps, |step| watch.finish_step(step));
        if let Err(error) = ran {
            // A function that was bound before stays bound: a program may use it.
            let mut taken: Vec<PciAddress> =
                verdict.is_unbinding().then_some(address).into_iter().collect();
            taken.extend(
                bound.iter().filter(|one: &&BoundDevice| one.is_new).map(|one| one.address),
            );
            return Err(undo_steps(kernel, &ledger, &taken, error));
        }
        let former =
            original_binding(kernel.kernel_files(), address)?.and_then(|former| former.driver);
        let (is_new, notes) = (verdict.is_unbinding(), verdict.notes);
        bound.push(BoundDevice {
            address,
            original_driver: former,
            is_new,
            notes,
            timings: watch.timings(),
        });
    }
    Ok(bound)
}

fn plan_without_obstacles(
    kernel: &dyn BindKernel,
    addresses: &[PciAddress],
    terms: &BindRequest<'_>,
) -> Result<Vec<BindPlan>, BindError> {
    let verdicts = plan_bind(kernel, addresses, terms)?;
    let count: usize = verdicts.iter().map(|verdict| verdict.obstacles.len()).sum();
    let first = verdicts.iter().find_map(|verdict| Some((verdict, verdict.obstacles.first()?)));
    match first {
        None => Ok(verdicts),
        Some((verdict, obstacle)) => Err(BindError::Obstacle {
            address: verdict.address,
            obstacle: Box::new(obstacle.clone()),
            more: count - 1,
        }),
    }
}

/// Runs steps in order, reports each completed one, and stops at the first failure.
pub(super) fn run_steps(
    kernel: &dyn BindKernel,
    ledger: &BindRecords,
    address: PciAddress,
    steps: &[BindStep],
    mut done: impl FnMut(String),
) -> Result<(), BindError> {
    for step in steps {
        step.run_step(kernel, ledger, address).map_err(|found| BindError::Step {
            address,
            step: step.clone(),
            found: Box::new(found),
            undone: false,
        })?;
        done(step.shell_command(address));
    }
    Ok(())
}

fn undo_steps(
    kernel: &dyn BindKernel,
    ledger: &BindRecords,
    addresses: &[PciAddress],
    error: BindError,
) -> BindError {
    let machine = kernel.kernel_files();
    let all_back = addresses.iter().map(|address| {
        let Some(former) = original_binding(machine, *address)? else { return Ok(()) };
        let steps = unbind_steps(machine, *address, &former);
        // The unbind would block if a program had opened the function meanwhile.
        check_unbind_possible(kernel, *address, &steps)?;
        run_steps(kernel, ledger, *address, &steps, drop)
    });
    // Each is attempted, regardless of the others.
    let is_back = all_back.fold(true, |is_back, one: Result<(), BindError>| is_back & one.is_ok());
    match error {
        BindError::Step { address, step, found, .. } => {
            BindError::Step { address, step, found, undone: is_back }
        }
        other => other,
    }
}
