//! Injected bugs. The harness must find each of them and name it.

use tenmil_base::{Operation, Span};

use crate::fault_injector::{Fault, FaultTrigger, PlannedFault, lies};
use crate::injected_bug::InjectedBug;
use crate::medium::{MediumFault, PlannedMediumFault};
use crate::scenario::{Scenario, ScenarioCheck};
use crate::test_run::{CourseStep, OwnerAction};
use crate::workload::Mix;

pub(super) fn table() -> Vec<Scenario> {
    let planted = |name: &str, planted, found| {
        Scenario::session(format!("canary/{name}"), &[ScenarioCheck::Find(found)])
            .world(super::slow)
            .world(|options| options.planted = Some(planted))
    };
    let mut table = vec![
        planted(
            "answers-early",
            InjectedBug::CompletesEarly,
            "is with a device that can reach memory",
        ),
        planted("answers-twice", InjectedBug::CompletesTwice, "but it is not outstanding"),
        planted("forgets-answer", InjectedBug::ForgetsCompletion, "requests unanswered"),
        planted("invents-data", InjectedBug::InventsData, "is garbage"),
        planted("unmaps-buffer", InjectedBug::UnmapsBuffer, "stray access: the device"),
        planted("leaks", InjectedBug::Leaks, "bytes free in the pool"),
        planted("fidgets", InjectedBug::Fidgets, "without coming to rest"),
        planted("panics", InjectedBug::Panics, "a planted panic"),
        planted("oversleeps", InjectedBug::Oversleeps, "requests unanswered")
            .plan(&[PlannedFault::io(Fault::Drop).skip(10).times(1)]),
        planted(
            "cut-off-ignored",
            InjectedBug::CutOffIgnored,
            "is with a device that can reach memory",
        )
        .plan(&[PlannedFault::always(lies::NEVER_NOT_READY).gate(FaultTrigger::Disables(1))])
        .steps(&[
            CourseStep::Attach,
            CourseStep::WorkPartly(20),
            CourseStep::Request(OwnerAction::Reset),
            CourseStep::Work,
        ]),
    ];
    table.push(
        planted(
            "cut-off-not-awaited",
            InjectedBug::CutOffNotAwaited,
            "is with a device that can reach memory",
        )
        .world(|options| options.cut_off_lag = Span::from_ms(5))
        .plan(&[PlannedFault::always(lies::NEVER_NOT_READY).gate(FaultTrigger::Disables(1))])
        .steps(&[
            CourseStep::Attach,
            CourseStep::WorkPartly(20),
            CourseStep::Request(OwnerAction::Reset),
            CourseStep::Work,
        ]),
    );
    for done in [25, 40] {
        table.push(forgotten_flush(done));
    }
    table
}

/// A medium that completes flushes without executing them, and a power cut that reveals it.
fn forgotten_flush(done: u64) -> Scenario {
    let forgets = PlannedMediumFault::on(Operation::Flush, MediumFault::ForgetFlush);
    Scenario::session(format!("canary/forgets-flush/{done}"), &[ScenarioCheck::Find("is stale")])
        .world(|options| {
            options.medium.mischief = vec![forgets];
            options.profile.mix = Mix::Flushes;
            options.profile.span = 16;
        })
        .steps(&[
            CourseStep::Attach,
            CourseStep::CutPowerAfter(done),
            CourseStep::Work,
            CourseStep::CutPower,
            CourseStep::RestorePower,
            CourseStep::Recover,
            CourseStep::ReadBack,
        ])
}

#[cfg(test)]
mod tests {
    use super::table;
    use crate::injected_bug::InjectedBug;
    use crate::scenario::Scenario;

    /// Without the injected bug each of these runs passes, so the violation is caused by the bug.
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
        let [first, second] =
            [(), ()].map(|()| scenario(Some(InjectedBug::Unrepeatable)).run().hash);
        assert_ne!(first, second);
        let [first, second] = [(), ()].map(|()| scenario(None).run().hash);
        assert_eq!(first, second);
    }
}
