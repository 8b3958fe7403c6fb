//! Exhaustive enumeration of small spaces: every register read at which a device may be removed,
//! every completion that may be lost, every medium operation after which the power may fail, and
//! every request after which a process may end.
//!
//! A run without faults determines the size of each space.

use tenmil_base::Durability;

use crate::fault_injector::{Fault, FaultTarget, FaultTrigger, PlannedFault, QueueKind};
use crate::scenario::{Scenario, ScenarioCheck};
use crate::simulation::WorldOptions;
use crate::test_run::{OwnerAction, RunStep};
use crate::workload::OperationMix;

/// All scenarios in a fixed order.
pub fn all_scenarios() -> Vec<Scenario> {
    [
        removals_at_every_register_read(),
        drops_of_every_completion(),
        power_cuts_after_every_operation(),
        crashes_after_every_request(),
    ]
    .concat()
}

/// A session with a reset and a shutdown, with faults on throughout.
const WHOLE: &[RunStep] = &[
    RunStep::Attach,
    RunStep::WorkPartly(20),
    RunStep::Request(OwnerAction::Reset),
    RunStep::Work,
    RunStep::Request(OwnerAction::ShutDown),
    RunStep::AwaitEnd,
];
const HEALED: &[RunStep] =
    &[RunStep::StopFaults, RunStep::Recover, RunStep::ReadBack, RunStep::Again, RunStep::ShutDown];

fn base_scenario() -> Scenario {
    Scenario::default_session("enumeration/base", &[]).with_world(|options| {
        options.profile.count = 40;
        options.host.queue_pairs = 2;
    })
}

/// Removes the device, permanently or for a moment, at each register read of a session.
fn removals_at_every_register_read() -> Vec<Scenario> {
    let honest = base_scenario().with_steps(WHOLE).execute();
    let steps = [WHOLE, HEALED].concat();
    let mut table = Vec::new();
    for read in 0..honest.counters.reads {
        let gone = PlannedFault::for_all_commands(Fault::Gone).with_skip(read);
        table.push(
            named_scenario(format!("vanish/read-{read}")).with_faults(&[gone]).with_steps(&steps),
        );
        let masked =
            PlannedFault::for_all_commands(Fault::Masked).with_skip(2 * read).with_count(1);
        table.push(
            named_scenario(format!("mask/access-{}", 2 * read))
                .with_faults(&[masked])
                .with_steps(&steps),
        );
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
            let gone = PlannedFault::for_all_commands(Fault::Gone).with_trigger(gate);
            let name = format!("vanish/{name}-completion-{number}");
            table.push(named_scenario(name).with_faults(&[gone]).with_steps(&steps));
        }
    }
    table
}

/// Drops each completion of a session, one at a time.
fn drops_of_every_completion() -> Vec<Scenario> {
    let honest = base_scenario().with_steps(WHOLE).execute();
    let steps = [WHOLE, HEALED].concat();
    let mut table = Vec::new();
    for (name, queue, count) in [
        ("io", QueueKind::Io, honest.counters.io_completions),
        ("admin", QueueKind::Admin, honest.counters.admin_completions),
    ] {
        for number in 0..count {
            let lost = PlannedFault {
                target: FaultTarget { queue, opcode: None },
                ..PlannedFault::for_all_commands(Fault::Drop).with_skip(number).with_count(1)
            };
            let name = format!("lost/{name}-completion-{number}");
            table.push(named_scenario(name).with_faults(&[lost]).with_steps(&steps));
        }
    }
    table
}

/// Cuts the power after each medium operation of a session of writes and flushes. Flushed data must
/// survive.
fn power_cuts_after_every_operation() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (name, durability) in
        [("volatile", Durability::VolatileCache), ("stable", Durability::Persistent)]
    {
        let change = |options: &mut WorldOptions| {
            options.medium.durability = durability;
            options.profile.mix = OperationMix::Flushes;
            options.profile.span = 24;
        };
        let honest = base_scenario()
            .with_world(change)
            .with_steps(&[RunStep::Attach, RunStep::Work])
            .execute();
        for done in 0..honest.medium_done {
            let steps = [
                RunStep::Attach,
                RunStep::CutPowerAfter(done),
                RunStep::Work,
                RunStep::CutPower,
                RunStep::RestorePower,
                RunStep::Recover,
                RunStep::ReadBack,
                RunStep::Again,
                RunStep::ShutDown,
            ];
            let scenario = named_scenario(format!("power/{name}/after-{done}"))
                .with_world(change)
                .with_steps(&steps);
            table.push(Scenario {
                musts: vec![ScenarioCheck::Attach, ScenarioCheck::Reattach],
                ..scenario
            });
        }
    }
    table
}

/// Ends the process after each request of a session.
fn crashes_after_every_request() -> Vec<Scenario> {
    let scenario = |submitted| {
        let steps = [RunStep::Attach, RunStep::WorkPartly(submitted), RunStep::Crash];
        named_scenario(format!("crash/after-{submitted}"))
            .with_steps(&[&steps[..], HEALED].concat())
    };
    (0..40).map(scenario).collect()
}

fn named_scenario(name: String) -> Scenario {
    Scenario { name: format!("enumeration/{name}"), ..base_scenario() }
}

#[cfg(test)]
mod tests {
    use super::all_scenarios;

    #[test]
    fn every_enumerated_scenario_passes() {
        let mut broken = Vec::new();
        for scenario in all_scenarios() {
            if let Some(failure) = scenario.execute().failure {
                broken.push(format!("{}: {failure}", scenario.name));
            }
        }
        assert!(broken.is_empty(), "{} broken:\n{}", broken.len(), broken.join("\n"));
    }

    #[test]
    fn enumerations_cover_a_whole_session() {
        let names: Vec<String> =
            all_scenarios().into_iter().map(|scenario| scenario.name).collect();
        for space in ["vanish/read", "vanish/io", "vanish/admin", "lost/io", "power/volatile"] {
            let count = names.iter().filter(|name| name.contains(space)).count();
            assert!(count >= 12, "{space}: {count}");
        }
    }
}
