//! A device that is pulled out of its socket: at rest, under every kind of load, during a reset.
//! Where it vanishes at every single register access is enumerated elsewhere.

use nvme::State;

use crate::course::{Step, Wish};
use crate::device_memory::Reach;
use crate::evil::{Fault, Gate, Mischief};
use crate::scenario::{Must, Scenario};

pub(super) fn table() -> Vec<Scenario> {
    [under_load(), during_a_reset()].concat()
}

fn under_load() -> Vec<Scenario> {
    let mut table = Vec::new();
    let musts = [Must::Attach, Must::Stand(State::Removed), Must::Tell("Removed"), Must::Abort];
    for (work, mix, blocks) in super::WORK {
        for completions in [1, 20] {
            for queue_pairs in [1, 3] {
                let name = format!("removal/load/{work}/after-{completions}/pairs-{queue_pairs}");
                let scenario = Scenario::session(name, &musts)
                    .plan(&[Mischief::always(Fault::Gone).gate(Gate::IoCompletions(completions))])
                    .world(super::slow)
                    .world(|options| super::work(options, mix, blocks))
                    .world(|options| options.host.queue_pairs = queue_pairs);
                table.push(scenario);
            }
        }
    }
    let copied = Scenario::session("removal/load/copied", &musts)
        .plan(&[Mischief::always(Fault::Gone).gate(Gate::IoCompletions(9))])
        .world(super::slow)
        .world(|options| options.function.reach = Reach::Copied);
    table.push(copied);
    let interrupts = Scenario::session("removal/load/interrupts", &musts)
        .plan(&[Mischief::always(Fault::Gone).gate(Gate::IoCompletions(9))])
        .world(super::slow)
        .world(|options| options.host.interrupts = true);
    table.push(interrupts);
    table
}

fn during_a_reset() -> Vec<Scenario> {
    let scenario = |reads| {
        let musts = [Must::Attach, Must::Stand(State::Removed), Must::Abort];
        Scenario::session(format!("removal/reset/read-{reads}"), &musts).world(super::slow).steps(
            &[
                Step::Attach,
                Step::WorkSome(20),
                Step::Arm(Mischief::always(Fault::Gone).skip(reads)),
                Step::Ask(Wish::Reset),
                Step::Work,
            ],
        )
    };
    [0, 1, 2, 3, 4, 5, 6, 8].map(scenario).to_vec()
}
