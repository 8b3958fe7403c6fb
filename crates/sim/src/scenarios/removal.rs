//! Surprise removal: idle, under every workload, and during a reset. Removal at every single
//! register access is enumerated elsewhere.

use tenmil_nvme_host::State;

use crate::device_memory::DataAccess;
use crate::fault_injector::{Fault, FaultTrigger, PlannedFault};
use crate::scenario::{Scenario, ScenarioCheck};
use crate::test_run::{CourseStep, OwnerAction};

pub(super) fn table() -> Vec<Scenario> {
    [under_load(), during_a_reset()].concat()
}

fn under_load() -> Vec<Scenario> {
    let mut table = Vec::new();
    let musts = [
        ScenarioCheck::Attach,
        ScenarioCheck::EndState(State::Removed),
        ScenarioCheck::ReportsEvent("Removed"),
        ScenarioCheck::Abort,
    ];
    for (work, mix, blocks) in super::WORK {
        for completions in [1, 20] {
            for queue_pairs in [1, 3] {
                let name = format!("removal/load/{work}/after-{completions}/pairs-{queue_pairs}");
                let scenario = Scenario::session(name, &musts)
                    .plan(&[PlannedFault::always(Fault::Gone)
                        .gate(FaultTrigger::IoCompletions(completions))])
                    .world(super::slow)
                    .world(|options| super::work(options, mix, blocks))
                    .world(|options| options.host.queue_pairs = queue_pairs);
                table.push(scenario);
            }
        }
    }
    let copied = Scenario::session("removal/load/copied", &musts)
        .plan(&[PlannedFault::always(Fault::Gone).gate(FaultTrigger::IoCompletions(9))])
        .world(super::slow)
        .world(|options| options.function.reach = DataAccess::Copied);
    table.push(copied);
    let interrupts = Scenario::session("removal/load/interrupts", &musts)
        .plan(&[PlannedFault::always(Fault::Gone).gate(FaultTrigger::IoCompletions(9))])
        .world(super::slow)
        .world(|options| options.host.interrupts = true);
    table.push(interrupts);
    table
}

fn during_a_reset() -> Vec<Scenario> {
    let scenario = |reads| {
        let musts =
            [ScenarioCheck::Attach, ScenarioCheck::EndState(State::Removed), ScenarioCheck::Abort];
        Scenario::session(format!("removal/reset/read-{reads}"), &musts).world(super::slow).steps(
            &[
                CourseStep::Attach,
                CourseStep::WorkPartly(20),
                CourseStep::Arm(PlannedFault::always(Fault::Gone).skip(reads)),
                CourseStep::Request(OwnerAction::Reset),
                CourseStep::Work,
            ],
        )
    };
    [0, 1, 2, 3, 4, 5, 6, 8].map(scenario).to_vec()
}
