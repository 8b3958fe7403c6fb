//! Taking functions from the kernel.

use super::kernel::Kernel;
use super::ledger::{Ledger, former};
use super::refused::BindError;
use super::unbind::{back, check};
use super::verdict::{Terms, Verdict, judge};
use super::{Address, Step};
use crate::{Clock, Steps, Took};

/// A function that a program may have now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Where it sits.
    pub address: Address,
    /// The driver that had it, if it is we who have taken it.
    pub former: Option<String>,
    /// Whether it was taken now, and a program could not have it before.
    pub is_new: bool,
    /// What whoever asked should know.
    pub notes: Vec<String>,
    /// What was done, and how long that took.
    pub took: Vec<Took>,
}

/// Takes functions from the kernel, all of them or none.
///
/// # Errors
///
/// The first obstacle, and nothing is changed; or a step that the kernel refused, and what was done
/// before is undone as far as the kernel lets us.
pub fn bind(
    kernel: &dyn Kernel,
    addresses: &[Address],
    terms: &Terms<'_>,
) -> Result<Vec<Bound>, BindError> {
    // Without the lock first: who may not make it is told what else is in the way.
    cleared(kernel, addresses, terms)?;
    let ledger = Ledger::open(kernel.machine())?;
    let verdicts = cleared(kernel, addresses, terms)?;
    let mut bound = Vec::new();
    for verdict in verdicts {
        let address = verdict.address;
        let mut watch = Steps::begin(Clock::kernel());
        let ran = run(kernel, &ledger, address, &verdict.steps, |step| watch.done(step));
        if let Err(error) = ran {
            // One that was bound before stays so: a program may drive it.
            let mut taken: Vec<Address> =
                verdict.takes_it().then_some(address).into_iter().collect();
            taken.extend(bound.iter().filter(|one: &&Bound| one.is_new).map(|one| one.address));
            return Err(undo(kernel, &ledger, &taken, error));
        }
        let former = former(kernel.machine(), address)?.and_then(|former| former.driver);
        let (is_new, notes) = (verdict.takes_it(), verdict.notes);
        bound.push(Bound { address, former, is_new, notes, took: watch.took() });
    }
    Ok(bound)
}

fn cleared(
    kernel: &dyn Kernel,
    addresses: &[Address],
    terms: &Terms<'_>,
) -> Result<Vec<Verdict>, BindError> {
    let verdicts = judge(kernel, addresses, terms)?;
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

/// Does steps one after the other, tells of each that is done, and ends at the first that is not.
pub(super) fn run(
    kernel: &dyn Kernel,
    ledger: &Ledger,
    address: Address,
    steps: &[Step],
    mut done: impl FnMut(String),
) -> Result<(), BindError> {
    for step in steps {
        step.run(kernel, ledger, address).map_err(|found| BindError::Step {
            address,
            step: step.clone(),
            found: Box::new(found),
            undone: false,
        })?;
        done(step.shown(address));
    }
    Ok(())
}

fn undo(
    kernel: &dyn Kernel,
    ledger: &Ledger,
    addresses: &[Address],
    error: BindError,
) -> BindError {
    let machine = kernel.machine();
    let all_back = addresses.iter().map(|address| {
        let Some(former) = former(machine, *address)? else { return Ok(()) };
        let steps = back(machine, *address, &former);
        // The kernel would wait for whoever has opened it meanwhile.
        check(kernel, *address, &steps)?;
        run(kernel, ledger, *address, &steps, drop)
    });
    // Every one of them is tried, whatever became of those before.
    let is_back = all_back.fold(true, |is_back, one: Result<(), BindError>| is_back & one.is_ok());
    match error {
        BindError::Step { address, step, found, .. } => {
            BindError::Step { address, step, found, undone: is_back }
        }
        other => other,
    }
}
