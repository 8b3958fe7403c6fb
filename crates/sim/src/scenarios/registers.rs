//! Register faults: from the first access on, during a reset, with requests in flight, during a
//! shutdown, and for a limited time.

use tenmil_nvme_host::ControllerState;

use crate::fault_injector::{Fault, FaultTrigger, PlannedFault, lies};
use crate::scenario::{Scenario, ScenarioCheck};
use crate::test_run::{OwnerAction, RunStep, SESSION};

const REFUSED: ScenarioCheck = ScenarioCheck::NoQueues;

pub(super) fn register_scenarios() -> Vec<Scenario> {
    [
        register_faults_from_the_start(),
        register_faults_during_a_reset(),
        register_faults_under_load(),
        register_faults_during_a_shutdown(),
        temporary_register_faults(),
    ]
    .concat()
}

fn register_faults_from_the_start() -> Vec<Scenario> {
    let refused = |why| {
        vec![ScenarioCheck::Refuse(why), REFUSED, ScenarioCheck::Reattach, ScenarioCheck::Strike(1)]
    };
    let fine = vec![
        ScenarioCheck::Attach,
        ScenarioCheck::Succeed,
        ScenarioCheck::Survive,
        ScenarioCheck::Strike(1),
    ];
    let rows = [
        ("never-ready", lies::NEVER_READY, refused("expected RDY=1")),
        ("never-not-ready", lies::NEVER_NOT_READY, refused("expected RDY=0")),
        ("fatal", lies::FATAL, refused("fatal")),
        ("shutdown-status-stuck", lies::SHUTDOWN_STUCK, fine.clone()),
        ("shutdown-status-reserved", lies::SHUTDOWN_RESERVED, fine.clone()),
        ("status-reserved-bits", lies::STATUS_RESERVED, fine.clone()),
        ("no-entries", lies::NO_ENTRIES, refused("CAP.MQES is 0x0")),
        ("two-entries", lies::TWO_ENTRIES, fine.clone()),
        ("no-time", lies::NO_TIME, fine.clone()),
        ("stride-max", lies::STRIDE_MAX, fine.clone()),
        ("no-command-set", lies::NO_COMMAND_SET, refused("CAP.CSS is 0x0")),
        ("large-pages", lies::LARGE_PAGES, refused("CAP.MPSMIN is 0x4")),
        ("pages-backwards", lies::PAGES_BACKWARDS, refused("at most CAP.MPSMAX")),
        ("cap-zero", lies::CAP_ZERO, refused("CAP.MQES is 0x0")),
        ("version-zero", lies::VERSION_ZERO, refused("VS is 0x0")),
        ("version-high", lies::VERSION_HIGH, fine.clone()),
        ("crto-zero", lies::CRTO_ZERO, fine),
        ("masked", Fault::Masked, refused("CAP reads as all ones")),
    ];
    let scenario = |(name, fault, musts): (&str, Fault, Vec<ScenarioCheck>)| {
        Scenario::default_session(format!("registers/start/{name}"), &musts)
            .with_faults(&[PlannedFault::for_all_commands(fault)])
    };
    rows.into_iter().map(scenario).collect()
}

/// The fault begins when CC.EN is cleared for a reset requested by the owner.
fn register_faults_during_a_reset() -> Vec<Scenario> {
    let dead = [
        ScenarioCheck::Attach,
        ScenarioCheck::EndState(ControllerState::Dead),
        ScenarioCheck::Reattach,
        ScenarioCheck::Strike(1),
    ];
    let fine = [
        ScenarioCheck::Attach,
        ScenarioCheck::ReportsEvent("Recovered"),
        ScenarioCheck::Survive,
        ScenarioCheck::Strike(1),
    ];
    let rows = [
        ("never-ready", lies::NEVER_READY, dead),
        ("never-not-ready", lies::NEVER_NOT_READY, dead),
        ("fatal", lies::FATAL, dead),
        ("no-entries", lies::NO_ENTRIES, dead),
        ("stride-max", lies::STRIDE_MAX, dead),
        ("no-command-set", lies::NO_COMMAND_SET, dead),
        ("large-pages", lies::LARGE_PAGES, dead),
        ("cap-zero", lies::CAP_ZERO, dead),
        ("version-zero", lies::VERSION_ZERO, dead),
        ("version-high", lies::VERSION_HIGH, fine),
        ("no-time", lies::NO_TIME, fine),
        ("status-reserved-bits", lies::STATUS_RESERVED, fine),
        (
            "masked",
            Fault::Masked,
            [
                ScenarioCheck::Attach,
                ScenarioCheck::EndState(ControllerState::Removed),
                ScenarioCheck::Reattach,
                ScenarioCheck::Strike(1),
            ],
        ),
    ];
    let scenario = |(name, fault, musts): (&str, Fault, [ScenarioCheck; 4])| {
        // The capabilities are read before CC.EN is cleared, so the fault must be armed before the
        // reset.
        Scenario::default_session(format!("registers/reset/{name}"), &musts)
            .with_world(super::set_slow_medium)
            .with_steps(&[
                RunStep::Attach,
                RunStep::WorkPartly(20),
                RunStep::Arm(PlannedFault::for_all_commands(fault)),
                RunStep::Request(OwnerAction::Reset),
                RunStep::Work,
                RunStep::StopFaults,
                RunStep::Recover,
                RunStep::ReadBack,
                RunStep::Again,
                RunStep::ShutDown,
            ])
    };
    rows.into_iter().map(scenario).collect()
}

/// The fault begins with requests in flight and no reset requested.
fn register_faults_under_load() -> Vec<Scenario> {
    let rows = [
        ("fatal", lies::FATAL, "Fatal"),
        ("ready-lost", lies::NEVER_READY, "NotReady"),
        ("masked", Fault::Masked, "Removed"),
    ];
    let mut table = Vec::new();
    for (name, fault, driver_events) in rows {
        for (work, mix, blocks) in super::WORK {
            let musts = [
                ScenarioCheck::Attach,
                ScenarioCheck::ReportsEvent(driver_events),
                ScenarioCheck::Abort,
                ScenarioCheck::Reattach,
            ];
            let name = format!("registers/load/{name}/{work}");
            let scenario = Scenario::default_session(name, &musts)
                .with_faults(&[PlannedFault::for_all_commands(fault)
                    .with_trigger(FaultTrigger::IoCompletions(10))])
                .with_world(super::set_slow_medium)
                .with_world(|options| super::set_workload(options, mix, blocks));
            table.push(scenario);
        }
    }
    table
}

/// The fault begins when CC.SHN is set.
fn register_faults_during_a_shutdown() -> Vec<Scenario> {
    let unclean = [
        ScenarioCheck::Attach,
        ScenarioCheck::Succeed,
        ScenarioCheck::ReportsEvent("is_clean: false"),
        ScenarioCheck::Strike(1),
    ];
    let clean = [
        ScenarioCheck::Attach,
        ScenarioCheck::Succeed,
        ScenarioCheck::ReportsEvent("is_clean: true"),
        ScenarioCheck::Strike(1),
    ];
    let removed = [
        ScenarioCheck::Attach,
        ScenarioCheck::Succeed,
        ScenarioCheck::ReportsEvent("Removed"),
        ScenarioCheck::Strike(1),
    ];
    let rows = [
        ("stuck", lies::SHUTDOWN_STUCK, unclean),
        ("reserved", lies::SHUTDOWN_RESERVED, unclean),
        ("fatal", lies::FATAL, clean),
        ("never-not-ready", lies::NEVER_NOT_READY, unclean),
        ("never-ready", lies::NEVER_READY, clean),
        ("masked", Fault::Masked, removed),
        ("gone", Fault::Gone, removed),
    ];
    let scenario = |(name, fault, musts): (&str, Fault, [ScenarioCheck; 4])| {
        Scenario::default_session(format!("registers/shutdown/{name}"), &musts)
            .with_faults(&[
                PlannedFault::for_all_commands(fault).with_trigger(FaultTrigger::Shutdowns(1))
            ])
            .with_steps(&[
                RunStep::Attach,
                RunStep::Work,
                RunStep::Request(OwnerAction::ShutDown),
                RunStep::AwaitEnd,
                RunStep::StopFaults,
                RunStep::Recover,
                RunStep::ReadBack,
                RunStep::Again,
                RunStep::ShutDown,
            ])
    };
    rows.into_iter().map(scenario).collect()
}

/// The fault occurs a few times only.
fn temporary_register_faults() -> Vec<Scenario> {
    let mut table = Vec::new();
    for times in [1, 3, 10] {
        let fine = [
            ScenarioCheck::Attach,
            ScenarioCheck::Succeed,
            ScenarioCheck::Survive,
            ScenarioCheck::Strike(1),
        ];
        for (name, fault) in
            [("never-ready", lies::NEVER_READY), ("never-not-ready", lies::NEVER_NOT_READY)]
        {
            let scenario =
                Scenario::default_session(format!("registers/while/{name}/{times}"), &fine);
            table.push(
                scenario
                    .with_faults(&[PlannedFault::for_all_commands(fault).with_count(times)])
                    .with_steps(SESSION),
            );
        }
        let name = format!("registers/while/masked/{times}");
        let musts = [ScenarioCheck::Refuse("all ones"), ScenarioCheck::Reattach];
        // A single read is enough: the driver does not wait for a controller that reads as all
        // ones.
        let masked = PlannedFault::for_all_commands(Fault::Masked).with_count(times);
        table.push(Scenario::default_session(name, &musts).with_faults(&[masked]));
    }
    table
}
