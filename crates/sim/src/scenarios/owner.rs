//! What an owner may ask for at any time: resets, deletions and shutdowns with requests under way,
//! and a process that ends without a word.

use base::Span;
use nvme::State;

use crate::course::{Step, Wish};
use crate::device_memory::Reach;
use crate::scenario::{Must, Scenario};

pub(super) fn table() -> Vec<Scenario> {
    [wishes(), crashes()].concat()
}

fn wishes() -> Vec<Scenario> {
    let rows: [(&str, Wish, &[Must]); 5] = [
        ("reset", Wish::Reset, &[Must::Tell("Recovered"), Must::Stand(State::Ready)]),
        (
            "subsystem-reset",
            Wish::ResetSubsystem,
            &[Must::Tell("Recovered"), Must::Stand(State::Ready)],
        ),
        (
            "delete-queue-pair",
            Wish::DeleteQueuePair,
            &[Must::Tell("QueuePairDeleted"), Must::Hush("ResetStarted"), Must::Survive],
        ),
        ("shutdown", Wish::ShutDown, &[Must::Tell("is_clean: true"), Must::Stand(State::ShutDown)]),
        (
            "abrupt-shutdown",
            Wish::ShutDownAbruptly,
            &[Must::Tell("is_clean: true"), Must::Stand(State::ShutDown)],
        ),
    ];
    let mut table = Vec::new();
    for (wish_name, wish, musts) in rows {
        for (work, mix, blocks) in super::WORK {
            for (medium, latency) in [
                ("fast", (Span::from_us(5), Span::from_us(50))),
                ("slow", (Span::from_ms(2), Span::from_ms(30))),
            ] {
                let musts = [musts, &[Must::Attach]].concat();
                let name = format!("owner/{wish_name}/{work}/{medium}");
                let scenario = Scenario::session(name, &musts)
                    .world(|options| super::work(options, mix, blocks))
                    .world(|options| options.medium.latency = latency)
                    .steps(&[
                        Step::Attach,
                        Step::WorkSome(20),
                        Step::Ask(wish),
                        Step::WorkSome(10),
                        Step::Settle,
                        Step::Repent,
                        Step::Recover,
                        Step::Review,
                        Step::Again,
                        Step::ShutDown,
                    ]);
                table.push(scenario);
            }
        }
    }
    table
}

/// The process ends; the next one finds the device as it was left, its requests still at work.
fn crashes() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (reach_name, reach) in [
        ("direct", Reach::Direct),
        ("copied", Reach::Copied),
        ("late", Reach::Late(Span::from_us(100))),
    ] {
        for submitted in [0, 1, 20, 40] {
            let musts = [Must::Attach, Must::Reattach];
            let name = format!("owner/crash/{reach_name}/after-{submitted}");
            let scenario = Scenario::session(name, &musts)
                .world(super::slow)
                .world(|options| options.function.reach = reach)
                .steps(&[
                    Step::Attach,
                    Step::WorkSome(submitted),
                    Step::Crash,
                    Step::Recover,
                    Step::Review,
                    Step::Again,
                    Step::ShutDown,
                ]);
            table.push(scenario);
        }
    }
    table
}
