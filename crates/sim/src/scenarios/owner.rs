//! Actions of the owner at any time: resets, deletions and shutdowns with requests in flight, and a
//! crash of the process.

use tenmil_base::Span;
use tenmil_nvme_host::ControllerState;

use crate::device_memory::DataAccessMode;
use crate::scenario::{Scenario, ScenarioCheck};
use crate::test_run::{OwnerAction, RunStep};

pub(super) fn owner_scenarios() -> Vec<Scenario> {
    [owner_actions(), process_crashes()].concat()
}

fn owner_actions() -> Vec<Scenario> {
    let rows: [(&str, OwnerAction, &[ScenarioCheck]); 5] = [
        (
            "reset",
            OwnerAction::Reset,
            &[
                ScenarioCheck::ReportsEvent("Recovered"),
                ScenarioCheck::EndState(ControllerState::Ready),
            ],
        ),
        (
            "subsystem-reset",
            OwnerAction::ResetSubsystem,
            &[
                ScenarioCheck::ReportsEvent("Recovered"),
                ScenarioCheck::EndState(ControllerState::Ready),
            ],
        ),
        (
            "delete-queue-pair",
            OwnerAction::DeleteQueuePair,
            &[
                ScenarioCheck::ReportsEvent("QueuePairDeleted"),
                ScenarioCheck::NoEvent("ResetStarted"),
                ScenarioCheck::Survive,
            ],
        ),
        (
            "shutdown",
            OwnerAction::ShutDown,
            &[
                ScenarioCheck::ReportsEvent("is_clean: true"),
                ScenarioCheck::EndState(ControllerState::ShutDown),
            ],
        ),
        (
            "abrupt-shutdown",
            OwnerAction::ShutDownAbruptly,
            &[
                ScenarioCheck::ReportsEvent("is_clean: true"),
                ScenarioCheck::EndState(ControllerState::ShutDown),
            ],
        ),
    ];
    let mut table = Vec::new();
    for (wish_name, wish, musts) in rows {
        for (work, mix, blocks) in super::WORK {
            for (medium, latency) in [
                ("fast", (Span::from_us(5), Span::from_us(50))),
                ("slow", (Span::from_ms(2), Span::from_ms(30))),
            ] {
                let musts = [musts, &[ScenarioCheck::Attach]].concat();
                let name = format!("owner/{wish_name}/{work}/{medium}");
                let scenario = Scenario::default_session(name, &musts)
                    .with_world(|options| super::set_workload(options, mix, blocks))
                    .with_world(|options| options.medium.latency = latency)
                    .with_steps(&[
                        RunStep::Attach,
                        RunStep::WorkPartly(20),
                        RunStep::Request(wish),
                        RunStep::WorkPartly(10),
                        RunStep::Settle,
                        RunStep::StopFaults,
                        RunStep::Recover,
                        RunStep::ReadBack,
                        RunStep::Again,
                        RunStep::ShutDown,
                    ]);
                table.push(scenario);
            }
        }
    }
    table
}

/// The process ends; the next host finds the device with requests still in progress.
fn process_crashes() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (reach_name, reach) in [
        ("direct", DataAccessMode::Direct),
        ("copied", DataAccessMode::Copied),
        ("late", DataAccessMode::Late(Span::from_us(100))),
    ] {
        for submitted in [0, 1, 20, 40] {
            let musts = [ScenarioCheck::Attach, ScenarioCheck::Reattach];
            let name = format!("owner/crash/{reach_name}/after-{submitted}");
            let scenario = Scenario::default_session(name, &musts)
                .with_world(super::set_slow_medium)
                .with_world(|options| options.function.reach = reach)
                .with_steps(&[
                    RunStep::Attach,
                    RunStep::WorkPartly(submitted),
                    RunStep::Crash,
                    RunStep::Recover,
                    RunStep::ReadBack,
                    RunStep::Again,
                    RunStep::ShutDown,
                ]);
            table.push(scenario);
        }
    }
    table
}
