//! A device that touches memory that nobody gave it, at every stage of its life; and one that
//! signals for no reason.

use nvme::State;

use crate::course::{Step, Wish};
use crate::evil::{DmaFault, FOR_GOOD, Fault, Gate, Mischief, lies};
use crate::scenario::{Must, Scenario};

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
            ("start", Gate::Always),
            ("enabled", Gate::Enables(1)),
            ("load", Gate::IoCompletions(5)),
            ("reset", Gate::Disables(1)),
            ("after-the-reset", Gate::Enables(2)),
            ("shutdown", Gate::Shutdowns(1)),
        ] {
            let is_stray = matches!(deed, DmaFault::StrayWrite | DmaFault::StrayRead);
            let musts: &[Must] = if is_stray {
                &[Must::Attach, Must::Block, Must::Hush("Dead"), Must::Tell("is_clean: true")]
            } else {
                &[Must::Attach, Must::Strike(1)]
            };
            let name = format!("memory/{deed_name}/{stage}");
            table.push(
                Scenario::session(name, musts)
                    .plan(&[Mischief::always(Fault::Dma(deed)).gate(gate).times(8)])
                    .world(super::slow)
                    .steps(&[
                        Step::Attach,
                        Step::WorkSome(20),
                        Step::Ask(Wish::Reset),
                        Step::Work,
                        Step::Ask(Wish::ShutDown),
                        Step::AwaitEnd,
                        Step::Repent,
                        Step::Recover,
                        Step::ShutDown,
                    ]),
            );
        }
    }
    table
}

/// A device that will not let go is cut off, and goes on trying.
fn after_the_cut() -> Vec<Scenario> {
    let scenario = |(deed_name, deed)| {
        let plan = [
            Mischief::always(lies::NEVER_NOT_READY).gate(Gate::Disables(1)),
            Mischief::always(Fault::Dma(deed)).gate(Gate::Disables(1)).times(FOR_GOOD),
        ];
        let musts = [Must::Attach, Must::Block, Must::Stand(State::Dead), Must::Reattach];
        Scenario::session(format!("memory/after-the-cut/{deed_name}"), &musts)
            .plan(&plan)
            .world(super::slow)
            .steps(&[
                Step::Attach,
                Step::WorkSome(20),
                Step::Ask(Wish::Reset),
                Step::Work,
                Step::Settle,
                Step::Repent,
                Step::Recover,
                Step::ShutDown,
            ])
    };
    DEEDS.map(scenario).to_vec()
}

/// Vectors signalled for no reason wake a host for nothing, and that is all.
fn interrupts() -> Vec<Scenario> {
    let mut table = Vec::new();
    for vector in [0, 1, 2, 63, 2047] {
        let musts = [Must::Attach, Must::Succeed, Must::Survive, Must::Strike(1)];
        let name = format!("memory/interrupt/vector-{vector}");
        table.push(
            Scenario::session(name, &musts)
                .plan(&[Mischief::always(Fault::Interrupt { vector }).times(500)])
                .world(|options| options.host.interrupts = true),
        );
    }
    table
}
