//! Commands that the medium never completes, and faults in the completion of their Abort.

use tenmil_base::{Operation, Span};
use tenmil_nvme_host::ControllerState;
use tenmil_wire::AdminOpcode;

use crate::fault_injector::{BogusCid, Fault, PlannedFault, ReleaseTrigger};
use crate::scenario::{Scenario, ScenarioCheck};
use crate::sim_medium::{MediumFault, PlannedMediumFault};
use crate::test_run::RunStep;

pub(super) fn abort_scenarios() -> Vec<Scenario> {
    [stalled_commands(), slow_media()].concat()
}

const TO_THE_END: &[RunStep] = &[
    RunStep::Attach,
    RunStep::Work,
    RunStep::Settle,
    RunStep::Settle,
    RunStep::Settle,
    RunStep::Settle,
    RunStep::StopFaults,
    RunStep::Recover,
    RunStep::ReadBack,
    RunStep::Again,
    RunStep::ShutDown,
];

fn stalled_commands() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (operation_name, operation) in
        [("read", Operation::Read), ("write", Operation::Write), ("flush", Operation::Flush)]
    {
        for (completion, fault) in [
            ("honest", None),
            ("says-aborted", Some(Fault::Result(0))),
            ("says-not-aborted", Some(Fault::Result(1))),
            ("refused", Some(Fault::Status(0x4103))),
            ("swallowed", Some(Fault::Drop)),
            ("late", Some(Fault::Hold(ReleaseTrigger::After(Span::from_ms(150))))),
            ("doubled", Some(Fault::Duplicate)),
            ("invented", Some(Fault::Bogus(BogusCid::InFlight))),
        ] {
            let musts = [
                ScenarioCheck::Attach,
                ScenarioCheck::ReportsEvent("CommandOverdue"),
                ScenarioCheck::ReportsEvent("ResetStarted"),
                ScenarioCheck::Abort,
            ];
            let stall = PlannedMediumFault::for_operation(operation, MediumFault::Stall)
                .with_skip(3)
                .with_count(1);
            let plan: Vec<PlannedFault> = fault
                .into_iter()
                .map(|fault| PlannedFault::for_admin_opcode(AdminOpcode::Abort, fault))
                .collect();
            let scenario = |name: &str, more: &[ScenarioCheck]| {
                let name = format!("aborts/stalled-{operation_name}/{completion}/{name}");
                Scenario::default_session(name, &[&musts, more].concat())
                    .with_faults(&plan)
                    .with_world(|options| options.medium.mischief = vec![stall])
            };
            // The medium keeps the request, so the controller cannot be disabled. Its DMA access is
            // revoked, and it recovers when the medium completes the request.
            table.push(scenario("a-while", &[ScenarioCheck::Survive]));
            // Or the medium never does, and the controller is given up.
            table.push(
                scenario(
                    "for-good",
                    &[ScenarioCheck::EndState(ControllerState::Dead), ScenarioCheck::Reattach],
                )
                .with_steps(TO_THE_END),
            );
        }
    }
    table
}

/// Media slower than the command timeout, by how much they exceed it.
fn slow_media() -> Vec<Scenario> {
    let rows: [(&str, u64, &[ScenarioCheck]); 4] = [
        (
            "in-time",
            60,
            &[
                ScenarioCheck::Succeed,
                ScenarioCheck::NoEvent("CommandOverdue"),
                ScenarioCheck::Survive,
            ],
        ),
        // The controller may well complete it as aborted before the medium has finished.
        (
            "after-its-time",
            150,
            &[ScenarioCheck::ReportsEvent("CommandOverdue"), ScenarioCheck::Survive],
        ),
        (
            "during-the-reset",
            400,
            &[
                ScenarioCheck::Abort,
                ScenarioCheck::ReportsEvent("Recovered"),
                ScenarioCheck::Survive,
            ],
        ),
        (
            "after-the-cut",
            1500,
            &[
                ScenarioCheck::Abort,
                ScenarioCheck::ReportsEvent("Recovered"),
                ScenarioCheck::Survive,
            ],
        ),
    ];
    let mut table = Vec::new();
    for (name, delay_ms, musts) in rows {
        for (work, mix, blocks) in super::WORK {
            let delay = MediumFault::Delay(Span::from_ms(delay_ms));
            let mischief =
                PlannedMediumFault::for_all_operations(delay).with_skip(10).with_count(2);
            let musts = [musts, &[ScenarioCheck::Attach]].concat();
            let scenario =
                Scenario::default_session(format!("aborts/slow-medium/{name}/{work}"), &musts)
                    .with_world(|options| super::set_workload(options, mix, blocks))
                    .with_world(|options| options.medium.mischief = vec![mischief]);
            table.push(scenario);
        }
    }
    table
}
