//! Commands that the medium never completes, and faults in the completion of their Abort.

use tenmil_base::{Operation, Span};
use tenmil_nvme_host::State;
use tenmil_wire::AdminOpcode;

use crate::fault_injector::{BogusCid, Fault, PlannedFault, Release};
use crate::medium::{MediumFault, PlannedMediumFault};
use crate::scenario::{Scenario, ScenarioCheck};
use crate::test_run::CourseStep;

pub(super) fn table() -> Vec<Scenario> {
    [stalled(), slow_media()].concat()
}

const TO_THE_END: &[CourseStep] = &[
    CourseStep::Attach,
    CourseStep::Work,
    CourseStep::Settle,
    CourseStep::Settle,
    CourseStep::Settle,
    CourseStep::Settle,
    CourseStep::StopFaults,
    CourseStep::Recover,
    CourseStep::ReadBack,
    CourseStep::Again,
    CourseStep::ShutDown,
];

fn stalled() -> Vec<Scenario> {
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
            ("late", Some(Fault::Hold(Release::After(Span::from_ms(150))))),
            ("doubled", Some(Fault::Duplicate)),
            ("invented", Some(Fault::Bogus(BogusCid::InFlight))),
        ] {
            let musts = [
                ScenarioCheck::Attach,
                ScenarioCheck::ReportsEvent("CommandOverdue"),
                ScenarioCheck::ReportsEvent("ResetStarted"),
                ScenarioCheck::Abort,
            ];
            let stall = PlannedMediumFault::on(operation, MediumFault::Stall).skip(3).times(1);
            let plan: Vec<PlannedFault> = fault
                .into_iter()
                .map(|fault| PlannedFault::admin(AdminOpcode::Abort, fault))
                .collect();
            let scenario = |name: &str, more: &[ScenarioCheck]| {
                let name = format!("aborts/stalled-{operation_name}/{completion}/{name}");
                Scenario::session(name, &[&musts, more].concat())
                    .plan(&plan)
                    .world(|options| options.medium.mischief = vec![stall])
            };
            // The medium keeps the request, so the controller cannot be disabled. Its DMA access is
            // revoked, and it recovers when the medium completes the request.
            table.push(scenario("a-while", &[ScenarioCheck::Survive]));
            // Or the medium never does, and the controller is given up.
            table.push(
                scenario(
                    "for-good",
                    &[ScenarioCheck::EndState(State::Dead), ScenarioCheck::Reattach],
                )
                .steps(TO_THE_END),
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
            let mischief = PlannedMediumFault::always(delay).skip(10).times(2);
            let musts = [musts, &[ScenarioCheck::Attach]].concat();
            let scenario = Scenario::session(format!("aborts/slow-medium/{name}/{work}"), &musts)
                .world(|options| super::work(options, mix, blocks))
                .world(|options| options.medium.mischief = vec![mischief]);
            table.push(scenario);
        }
    }
    table
}
