//! Stray accesses of the device in every phase of its life, and spurious interrupts.

use tenmil_nvme_host::State;

use crate::fault_injector::{DmaFault, FOR_GOOD, Fault, FaultTrigger, PlannedFault, lies};
use crate::scenario::{Scenario, ScenarioCheck};
use crate::test_run::{CourseStep, OwnerAction};

const DEEDS: [(&str, DmaFault); 4] = [
    ("stray-write", DmaFault::StrayWrite),
    ("stray-read", DmaFault::StrayRead),
    ("scribble-ring", DmaFault::ScribbleRing),
    ("scribble-buffers", DmaFault::ScribbleBuffers),
];

pub(super) fn table() -> Vec<Scenario> {
    [at_every_stage(), after_the_cut(), interrupts()].concat()
}

fn at_every_stage() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (deed_name, deed) in DEEDS {
        for (stage, gate) in [
            ("start", FaultTrigger::Always),
            ("enabled", FaultTrigger::Enables(1)),
            ("load", FaultTrigger::IoCompletions(5)),
            ("reset", FaultTrigger::Disables(1)),
            ("after-the-reset", FaultTrigger::Enables(2)),
            ("shutdown", FaultTrigger::Shutdowns(1)),
        ] {
            let is_stray = matches!(deed, DmaFault::StrayWrite | DmaFault::StrayRead);
            let musts: &[ScenarioCheck] = if is_stray {
                &[
                    ScenarioCheck::Attach,
                    ScenarioCheck::Block,
                    ScenarioCheck::NoEvent("Dead"),
                    ScenarioCheck::ReportsEvent("is_clean: true"),
                ]
            } else {
                &[ScenarioCheck::Attach, ScenarioCheck::Strike(1)]
            };
            let name = format!("memory/{deed_name}/{stage}");
            table.push(
                Scenario::session(name, musts)
                    .plan(&[PlannedFault::always(Fault::Dma(deed)).gate(gate).times(8)])
                    .world(super::slow)
                    .steps(&[
                        CourseStep::Attach,
                        CourseStep::WorkPartly(20),
                        CourseStep::Request(OwnerAction::Reset),
                        CourseStep::Work,
                        CourseStep::Request(OwnerAction::ShutDown),
                        CourseStep::AwaitEnd,
                        CourseStep::StopFaults,
                        CourseStep::Recover,
                        CourseStep::ShutDown,
                    ]),
            );
        }
    }
    table
}

/// A device that does not stop: its DMA access is revoked, and it continues to try.
fn after_the_cut() -> Vec<Scenario> {
    let scenario = |(deed_name, deed)| {
        let plan = [
            PlannedFault::always(lies::NEVER_NOT_READY).gate(FaultTrigger::Disables(1)),
            PlannedFault::always(Fault::Dma(deed)).gate(FaultTrigger::Disables(1)).times(FOR_GOOD),
        ];
        let musts = [
            ScenarioCheck::Attach,
            ScenarioCheck::Block,
            ScenarioCheck::EndState(State::Dead),
            ScenarioCheck::Reattach,
        ];
        Scenario::session(format!("memory/after-the-cut/{deed_name}"), &musts)
            .plan(&plan)
            .world(super::slow)
            .steps(&[
                CourseStep::Attach,
                CourseStep::WorkPartly(20),
                CourseStep::Request(OwnerAction::Reset),
                CourseStep::Work,
                CourseStep::Settle,
                CourseStep::StopFaults,
                CourseStep::Recover,
                CourseStep::ShutDown,
            ])
    };
    DEEDS.map(scenario).to_vec()
}

/// Spurious interrupts wake the host without any other effect.
fn interrupts() -> Vec<Scenario> {
    let mut table = Vec::new();
    for vector in [0, 1, 2, 63, 2047] {
        let musts = [
            ScenarioCheck::Attach,
            ScenarioCheck::Succeed,
            ScenarioCheck::Survive,
            ScenarioCheck::Strike(1),
        ];
        let name = format!("memory/interrupt/vector-{vector}");
        table.push(
            Scenario::session(name, &musts)
                .plan(&[PlannedFault::always(Fault::Interrupt { vector }).times(500)])
                .world(|options| options.host.interrupts = true),
        );
    }
    table
}
