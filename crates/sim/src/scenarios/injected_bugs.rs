//! Injected bugs. The harness must find each of them and name it.

use tenmil_base::{Operation, Span};

use crate::fault_injector::{Fault, FaultTrigger, PlannedFault, lies};
use crate::injected_bug::InjectedBug;
use crate::scenario::{Scenario, ScenarioCheck};
use crate::sim_medium::{MediumFault, PlannedMediumFault};
use crate::test_run::{OwnerAction, RunStep};
use crate::workload::OperationMix;

pub(super) fn injected_bug_scenarios() -> Vec<Scenario> {
    let planted = |name: &str, planted, found| {
        Scenario::default_session(format!("canary/{name}"), &[ScenarioCheck::Find(found)])
            .with_world(super::set_slow_medium)
            .with_world(|options| options.planted = Some(planted))
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
            .with_faults(&[PlannedFault::for_io_queues(Fault::Drop).with_skip(10).with_count(1)]),
        planted(
            "cut-off-ignored",
            InjectedBug::CutOffIgnored,
            "is with a device that can reach memory",
        )
        .with_faults(&[PlannedFault::for_all_commands(lies::NEVER_NOT_READY)
            .with_trigger(FaultTrigger::Disables(1))])
        .with_steps(&[
            RunStep::Attach,
            RunStep::WorkPartly(20),
            RunStep::Request(OwnerAction::Reset),
            RunStep::Work,
        ]),
    ];
    table.push(
        planted(
            "cut-off-not-awaited",
            InjectedBug::CutOffNotAwaited,
            "is with a device that can reach memory",
        )
        .with_world(|options| options.cut_off_lag = Span::from_ms(5))
        .with_faults(&[PlannedFault::for_all_commands(lies::NEVER_NOT_READY)
            .with_trigger(FaultTrigger::Disables(1))])
        .with_steps(&[
            RunStep::Attach,
            RunStep::WorkPartly(20),
            RunStep::Request(OwnerAction::Reset),
            RunStep::Work,
        ]),
    );
    for done in [25, 40] {
        table.push(ignored_flush(done));
    }
    table
}

/// A medium that completes flushes without executing them, and a power cut that reveals it.
fn ignored_flush(done: u64) -> Scenario {
    let forgets = PlannedMediumFault::for_operation(Operation::Flush, MediumFault::ForgetFlush);
    Scenario::default_session(
        format!("canary/forgets-flush/{done}"),
        &[ScenarioCheck::Find("is stale")],
    )
    .with_world(|options| {
        options.medium.mischief = vec![forgets];
        options.profile.mix = OperationMix::Flushes;
        options.profile.span = 16;
    })
    .with_steps(&[
        RunStep::Attach,
        RunStep::CutPowerAfter(done),
        RunStep::Work,
        RunStep::CutPower,
        RunStep::RestorePower,
        RunStep::Recover,
        RunStep::ReadBack,
    ])
}

#[cfg(test)]
mod tests {
    use super::injected_bug_scenarios;
    use crate::injected_bug::InjectedBug;
    use crate::scenario::Scenario;

    /// Without the injected bug each of these runs passes, so the violation is caused by the bug.
    #[test]
    fn every_injected_bug_is_found_and_nothing_else() {
        for scenario in injected_bug_scenarios() {
            let found = scenario.execute();
            assert_eq!(found.failure, None, "{}", scenario.name);
            let mut harmless = scenario.clone();
            harmless.options.planted = None;
            harmless.options.medium.mischief.clear();
            harmless.musts.clear();
            let record = harmless.execute();
            assert_eq!(record.failure, None, "{} without its mistake", scenario.name);
        }
    }

    #[test]
    fn nondeterministic_run_has_another_hash() {
        let scenario = |planted| {
            Scenario::default_session("canary/unrepeatable", &[])
                .with_world(|options| options.planted = planted)
        };
        let [first, second] =
            [(), ()].map(|()| scenario(Some(InjectedBug::Unrepeatable)).execute().hash);
        assert_ne!(first, second);
        let [first, second] = [(), ()].map(|()| scenario(None).execute().hash);
        assert_eq!(first, second);
    }
}
