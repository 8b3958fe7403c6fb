//! Planted mistakes. Every one of them must be found, by name.

use base::{Operation, Span};

use crate::course::{Step, Wish};
use crate::evil::{Fault, Gate, Mischief, lies};
use crate::medium::{MediumFault, MediumMischief};
use crate::planted::Planted;
use crate::scenario::{Must, Scenario};
use crate::workload::Mix;

pub(super) fn table() -> Vec<Scenario> {
    let planted = |name: &str, planted, found| {
        Scenario::session(format!("canary/{name}"), &[Must::Find(found)])
            .world(super::slow)
            .world(|options| options.planted = Some(planted))
    };
    let mut table = vec![
        planted("answers-early", Planted::AnswersEarly, "is with a device that can reach memory"),
        planted("answers-twice", Planted::AnswersTwice, "but it is not outstanding"),
        planted("forgets-answer", Planted::ForgetsAnswer, "requests unanswered"),
        planted("invents-data", Planted::InventsData, "is garbage"),
        planted("unmaps-buffer", Planted::UnmapsBuffer, "stray access: the device"),
        planted("leaks", Planted::Leaks, "bytes free in the pool"),
        planted("fidgets", Planted::Fidgets, "still something moves"),
        planted("panics", Planted::Panics, "a planted panic"),
        planted("oversleeps", Planted::Oversleeps, "requests unanswered").plan(&[Mischief::io(
            Fault::Swallow,
        )
        .skip(10)
        .times(1)]),
        planted(
            "cut-off-ignored",
            Planted::CutOffIgnored,
            "is with a device that can reach memory",
        )
        .plan(&[Mischief::always(lies::NEVER_NOT_READY).gate(Gate::Disables(1))])
        .steps(&[Step::Attach, Step::WorkSome(20), Step::Ask(Wish::Reset), Step::Work]),
    ];
    table.push(
        planted(
            "cut-off-not-awaited",
            Planted::CutOffNotAwaited,
            "is with a device that can reach memory",
        )
        .world(|options| options.cut_off_lag = Span::from_ms(5))
        .plan(&[Mischief::always(lies::NEVER_NOT_READY).gate(Gate::Disables(1))])
        .steps(&[Step::Attach, Step::WorkSome(20), Step::Ask(Wish::Reset), Step::Work]),
    );
    for done in [25, 40] {
        table.push(forgotten_flush(done));
    }
    table
}

/// A medium that answers flushes and does nothing, and a power cut that shows it.
fn forgotten_flush(done: u64) -> Scenario {
    let forgets = MediumMischief::on(Operation::Flush, MediumFault::ForgetFlush);
    Scenario::session(format!("canary/forgets-flush/{done}"), &[Must::Find("is stale")])
        .world(|options| {
            options.medium.mischief = vec![forgets];
            options.profile.mix = Mix::Flushes;
            options.profile.span = 16;
        })
        .steps(&[
            Step::Attach,
            Step::CutPowerAfter(done),
            Step::Work,
            Step::CutPower,
            Step::RestorePower,
            Step::Recover,
            Step::Review,
        ])
}

#[cfg(test)]
mod tests {
    use super::table;
    use crate::planted::Planted;
    use crate::scenario::Scenario;

    /// Without its planted mistake each of these runs is fine: what is found is the mistake.
    #[test]
    fn the_mistakes_are_found_and_nothing_else_is() {
        for scenario in table() {
            let found = scenario.run();
            assert_eq!(found.failure, None, "{}", scenario.name);
            let mut harmless = scenario.clone();
            harmless.options.planted = None;
            harmless.options.medium.mischief.clear();
            harmless.musts.clear();
            let record = harmless.run();
            assert_eq!(record.failure, None, "{} without its mistake", scenario.name);
        }
    }

    #[test]
    fn a_run_that_depends_on_more_than_its_seed_has_another_hash() {
        let scenario = |planted| {
            Scenario::session("canary/unrepeatable", &[]).world(|options| options.planted = planted)
        };
        let [first, second] = [(), ()].map(|()| scenario(Some(Planted::Unrepeatable)).run().hash);
        assert_ne!(first, second);
        let [first, second] = [(), ()].map(|()| scenario(None).run().hash);
        assert_eq!(first, second);
    }
}
