//! Surprise removal: idle, under every workload, and during a reset. Removal at every single
//! register access is enumerated elsewhere.

use tenmil_nvme_host::ControllerState;

use crate::device_memory::DataAccessMode;
use crate::fault_injector::{Fault, FaultTrigger, PlannedFault};
use crate::scenario::{Scenario, ScenarioCheck};
use crate::test_run::{OwnerAction, RunStep};

pub(super) fn removal_scenarios() -> Vec<Scenario> {
    [removal_under_load(), removal_during_a_reset()].concat()
}

fn removal_under_load() -> Vec<Scenario> {
    let mut table = Vec::new();
    let musts = [
        ScenarioCheck::Attach,
        ScenarioCheck::EndState(ControllerState::Removed),
        ScenarioCheck::ReportsEvent("Removed"),
        ScenarioCheck::Abort,
    ];
    for (work, mix, blocks) in super::WORK {
        for completions in [1, 20] {
            for queue_pairs in [1, 3] {
                let name = format!("removal/load/{work}/after-{completions}/pairs-{queue_pairs}");
                let scenario = Scenario::default_session(name, &musts)
                    .with_faults(&[PlannedFault::for_all_commands(Fault::Gone)
                        .with_trigger(FaultTrigger::IoCompletions(completions))])
                    .with_world(super::set_slow_medium)
                    .with_world(|options| super::set_workload(options, mix, blocks))
                    .with_world(|options| options.host.queue_pairs = queue_pairs);
                table.push(scenario);
            }
        }
    }
    let copied = Scenario::default_session("removal/load/copied", &musts)
        .with_faults(&[PlannedFault::for_all_commands(Fault::Gone)
            .with_trigger(FaultTrigger::IoCompletions(9))])
        .with_world(super::set_slow_medium)
        .with_world(|options| options.function.reach = DataAccessMode::Copied);
    table.push(copied);
    let interrupts = Scenario::default_session("removal/load/interrupts", &musts)
        .with_faults(&[PlannedFault::for_all_commands(Fault::Gone)
            .with_trigger(FaultTrigger::IoCompletions(9))])
        .with_world(super::set_slow_medium)
        .with_world(|options| options.host.interrupts = true);
    table.push(interrupts);
    table
}

fn removal_during_a_reset() -> Vec<Scenario> {
    let scenario = |reads| {
        let musts = [
            ScenarioCheck::Attach,
            ScenarioCheck::EndState(ControllerState::Removed),
            ScenarioCheck::Abort,
        ];
        Scenario::default_session(format!("removal/reset/read-{reads}"), &musts)
            .with_world(super::set_slow_medium)
            .with_steps(&[
                RunStep::Attach,
                RunStep::WorkPartly(20),
                RunStep::Arm(PlannedFault::for_all_commands(Fault::Gone).with_skip(reads)),
                RunStep::Request(OwnerAction::Reset),
                RunStep::Work,
            ])
    };
    [0, 1, 2, 3, 4, 5, 6, 8].map(scenario).to_vec()
}
