//! Exhaustive enumeration of small spaces: every register read at which a device may be removed,
//! every completion that may be lost, every medium operation after which the power may fail, and
//! every request after which a process may end.
//!
//! A run without faults determines the size of each space.

use tenmil_base::Durability;

use crate::fault_injector::{Fault, FaultTrigger, PlannedFault, QueueKind, Target};
use crate::scenario::{Scenario, ScenarioCheck};
use crate::test_run::{CourseStep, OwnerAction};
use crate::workload::Mix;
use crate::world::WorldOptions;

/// All scenarios in a fixed order.
pub fn all() -> Vec<Scenario> {
    [vanishing(), lost_completions(), power_cuts(), crashes()].concat()
}

/// A session with a reset and a shutdown, with faults on throughout.
const WHOLE: &[CourseStep] = &[
    CourseStep::Attach,
    CourseStep::WorkPartly(20),
    CourseStep::Request(OwnerAction::Reset),
    CourseStep::Work,
    CourseStep::Request(OwnerAction::ShutDown),
    CourseStep::AwaitEnd,
];
const HEALED: &[CourseStep] = &[
    CourseStep::StopFaults,
    CourseStep::Recover,
    CourseStep::ReadBack,
    CourseStep::Again,
    CourseStep::ShutDown,
];

fn base() -> Scenario {
    Scenario::session("enumeration/base", &[]).world(|options| {
        options.profile.count = 40;
        options.host.queue_pairs = 2;
    })
}

/// Removes the device, permanently or for a moment, at each register read of a session.
fn vanishing() -> Vec<Scenario> {
    let honest = base().steps(WHOLE).run();
    let steps = [WHOLE, HEALED].concat();
    let mut table = Vec::new();
    for read in 0..honest.counters.reads {
        let gone = PlannedFault::always(Fault::Gone).skip(read);
        table.push(named(format!("vanish/read-{read}")).plan(&[gone]).steps(&steps));
        let masked = PlannedFault::always(Fault::Masked).skip(2 * read).times(1);
        table.push(named(format!("mask/access-{}", 2 * read)).plan(&[masked]).steps(&steps));
    }
    for (name, gates) in [
        (
            "io",
            (1..=honest.counters.io_completions)
                .map(FaultTrigger::IoCompletions)
                .collect::<Vec<_>>(),
        ),
        (
            "admin",
            (1..=honest.counters.admin_completions).map(FaultTrigger::AdminCompletions).collect(),
        ),
    ] {
        for (number, gate) in (1..).zip(gates) {
            let gone = PlannedFault::always(Fault::Gone).gate(gate);
            let name = format!("vanish/{name}-completion-{number}");
            table.push(named(name).plan(&[gone]).steps(&steps));
        }
    }
    table
}

/// Drops each completion of a session, one at a time.
fn lost_completions() -> Vec<Scenario> {
    let honest = base().steps(WHOLE).run();
    let steps = [WHOLE, HEALED].concat();
    let mut table = Vec::new();
    for (name, queue, count) in [
        ("io", QueueKind::Io, honest.counters.io_completions),
        ("admin", QueueKind::Admin, honest.counters.admin_completions),
    ] {
        for number in 0..count {
            let lost = PlannedFault {
                target: Target { queue, opcode: None },
                ..PlannedFault::always(Fault::Drop).skip(number).times(1)
            };
            let name = format!("lost/{name}-completion-{number}");
            table.push(named(name).plan(&[lost]).steps(&steps));
        }
    }
    table
}

/// Cuts the power after each medium operation of a session of writes and flushes. Flushed data must
/// survive.
fn power_cuts() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (name, durability) in
        [("volatile", Durability::VolatileCache), ("stable", Durability::Persistent)]
    {
        let change = |options: &mut WorldOptions| {
            options.medium.durability = durability;
            options.profile.mix = Mix::Flushes;
            options.profile.span = 24;
        };
        let honest = base().world(change).steps(&[CourseStep::Attach, CourseStep::Work]).run();
        for done in 0..honest.medium_done {
            let steps = [
                CourseStep::Attach,
                CourseStep::CutPowerAfter(done),
                CourseStep::Work,
                CourseStep::CutPower,
                CourseStep::RestorePower,
                CourseStep::Recover,
                CourseStep::ReadBack,
                CourseStep::Again,
                CourseStep::ShutDown,
            ];
            let scenario = named(format!("power/{name}/after-{done}")).world(change).steps(&steps);
            table.push(Scenario {
                musts: vec![ScenarioCheck::Attach, ScenarioCheck::Reattach],
                ..scenario
            });
        }
    }
    table
}

/// Ends the process after each request of a session.
fn crashes() -> Vec<Scenario> {
    let scenario = |submitted| {
        let steps = [CourseStep::Attach, CourseStep::WorkPartly(submitted), CourseStep::Crash];
        named(format!("crash/after-{submitted}")).steps(&[&steps[..], HEALED].concat())
    };
    (0..40).map(scenario).collect()
}

fn named(name: String) -> Scenario {
    Scenario { name: format!("enumeration/{name}"), ..base() }
}

#[cfg(test)]
mod tests {
    use super::all;

    #[test]
    fn nothing_breaks_wherever_it_strikes() {
        let mut broken = Vec::new();
        for scenario in all() {
            if let Some(failure) = scenario.run().failure {
                broken.push(format!("{}: {failure}", scenario.name));
            }
        }
        assert!(broken.is_empty(), "{} broken:\n{}", broken.len(), broken.join("\n"));
    }

    #[test]
    fn the_spaces_are_as_large_as_a_life_is_long() {
        let names: Vec<String> = all().into_iter().map(|scenario| scenario.name).collect();
        for space in ["vanish/read", "vanish/io", "vanish/admin", "lost/io", "power/volatile"] {
            let count = names.iter().filter(|name| name.contains(space)).count();
            assert!(count >= 12, "{space}: {count}");
        }
    }
}
