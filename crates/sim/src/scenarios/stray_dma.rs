//! Stray accesses of the device in every phase of its life, and spurious interrupts.

use tenmil_nvme_host::ControllerState;

use crate::fault_injector::{DmaFault, FOR_GOOD, Fault, FaultTrigger, PlannedFault, lies};
use crate::scenario::{Scenario, ScenarioCheck};
use crate::test_run::{OwnerAction, RunStep};

const DEEDS: [(&str, DmaFault); 4] = [
    ("stray-write", DmaFault::StrayWrite),
    ("stray-read", DmaFault::StrayRead),
    ("scribble-ring", DmaFault::ScribbleRing),
    ("scribble-buffers", DmaFault::ScribbleBuffers),
];

pub(super) fn stray_dma_scenarios() -> Vec<Scenario> {
    [stray_accesses_in_every_phase(), accesses_after_revocation(), spurious_interrupts()].concat()
}

fn stray_accesses_in_every_phase() -> Vec<Scenario> {
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
                Scenario::default_session(name, musts)
                    .with_faults(&[PlannedFault::for_all_commands(Fault::Dma(deed))
                        .with_trigger(gate)
                        .with_count(8)])
                    .with_world(super::set_slow_medium)
                    .with_steps(&[
                        RunStep::Attach,
                        RunStep::WorkPartly(20),
                        RunStep::Request(OwnerAction::Reset),
                        RunStep::Work,
                        RunStep::Request(OwnerAction::ShutDown),
                        RunStep::AwaitEnd,
                        RunStep::StopFaults,
                        RunStep::Recover,
                        RunStep::ShutDown,
                    ]),
            );
        }
    }
    table
}

/// A device that does not stop: its DMA access is revoked, and it continues to try.
fn accesses_after_revocation() -> Vec<Scenario> {
    let scenario = |(deed_name, deed)| {
        let plan = [
            PlannedFault::for_all_commands(lies::NEVER_NOT_READY)
                .with_trigger(FaultTrigger::Disables(1)),
            PlannedFault::for_all_commands(Fault::Dma(deed))
                .with_trigger(FaultTrigger::Disables(1))
                .with_count(FOR_GOOD),
        ];
        let musts = [
            ScenarioCheck::Attach,
            ScenarioCheck::Block,
            ScenarioCheck::EndState(ControllerState::Dead),
            ScenarioCheck::Reattach,
        ];
        Scenario::default_session(format!("memory/after-the-cut/{deed_name}"), &musts)
            .with_faults(&plan)
            .with_world(super::set_slow_medium)
            .with_steps(&[
                RunStep::Attach,
                RunStep::WorkPartly(20),
                RunStep::Request(OwnerAction::Reset),
                RunStep::Work,
                RunStep::Settle,
                RunStep::StopFaults,
                RunStep::Recover,
                RunStep::ShutDown,
            ])
    };
    DEEDS.map(scenario).to_vec()
}

/// Spurious interrupts wake the host without any other effect.
fn spurious_interrupts() -> Vec<Scenario> {
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
            Scenario::default_session(name, &musts)
                .with_faults(&[
                    PlannedFault::for_all_commands(Fault::Interrupt { vector }).with_count(500)
                ])
                .with_world(|options| options.host.interrupts = true),
        );
    }
    table
}
