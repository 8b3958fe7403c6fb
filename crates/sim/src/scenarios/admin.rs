//! Faults of admin commands (dropped, rejected, late, duplicate or with wrong results) during
//! initialization and during the creation and deletion of queues.

use tenmil_base::Span;
use tenmil_nvme_host::ControllerState;
use tenmil_wire::AdminOpcode;

use crate::fault_injector::{
    BogusCid, FOR_GOOD, Fault, FaultTarget, FaultTrigger, PlannedFault, QueueKind, ReleaseTrigger,
};
use crate::scenario::{Scenario, ScenarioCheck};
use crate::test_run::{OwnerAction, RunStep};

/// When a command is sent, which determines the effect of its failure.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CommandPhase {
    /// Before the controller has ever been ready.
    Start,
    /// Creation of a queue pair, which is retried after a reset.
    Creation,
    /// Deletion of a queue pair, which a reset achieves as well.
    Deletion,
}

/// Effect of a fault on the driver.
#[derive(Clone, Copy)]
enum FaultEffect {
    /// None.
    Harmless,
    /// A command exceeds its timeout and completes in the end.
    Late,
    /// A reset: event, and text of the error.
    Broken(&'static str, &'static str),
    /// A rejected command.
    Refused,
}

const COMMANDS: [(&str, AdminOpcode, CommandPhase); 6] = [
    ("identify", AdminOpcode::Identify, CommandPhase::Start),
    ("set-features", AdminOpcode::SetFeatures, CommandPhase::Start),
    ("create-completion-queue", AdminOpcode::CreateIoCompletionQueue, CommandPhase::Creation),
    ("create-submission-queue", AdminOpcode::CreateIoSubmissionQueue, CommandPhase::Creation),
    ("delete-submission-queue", AdminOpcode::DeleteIoSubmissionQueue, CommandPhase::Deletion),
    ("delete-completion-queue", AdminOpcode::DeleteIoCompletionQueue, CommandPhase::Deletion),
];

const STUCK: FaultEffect =
    FaultEffect::Broken("CommandTimeout", "missed its deadline and its abort");
const UNKNOWN: FaultEffect = FaultEffect::Broken("NotInFlight", "identifier not in flight");

const FAULTS: [(&str, Fault, FaultEffect); 11] = [
    ("swallow", Fault::Drop, STUCK),
    ("refuse", Fault::Status(0x4002), FaultEffect::Refused),
    ("refuse-for-now", Fault::Status(0x0006), FaultEffect::Refused),
    ("late-in-time", Fault::Hold(ReleaseTrigger::After(Span::from_ms(150))), FaultEffect::Harmless),
    ("late-after-abort", Fault::Hold(ReleaseTrigger::After(Span::from_ms(250))), FaultEffect::Late),
    ("late-after-everything", Fault::Hold(ReleaseTrigger::After(Span::from_secs(9))), STUCK),
    ("duplicate", Fault::Duplicate, UNKNOWN),
    ("invent", Fault::Bogus(BogusCid::Outside), UNKNOWN),
    ("wrong-phase", Fault::WrongPhase, FaultEffect::Broken("AbortTimeout", "timed out")),
    ("result-noise", Fault::Result(u32::MAX), FaultEffect::Harmless),
    (
        "head-outside",
        Fault::Head(0x4000),
        FaultEffect::Broken("SubmissionHead", "impossible submission head"),
    ),
];

const COURSE: &[RunStep] = &[
    RunStep::Attach,
    RunStep::Work,
    RunStep::Request(OwnerAction::DeleteQueuePair),
    RunStep::Settle,
    RunStep::StopFaults,
    RunStep::Recover,
    RunStep::ReadBack,
    RunStep::Again,
    RunStep::ShutDown,
];

pub(super) fn admin_scenarios() -> Vec<Scenario> {
    [
        admin_command_faults(),
        faults_at_each_initialization_command(),
        granted_queue_count_scenarios(),
    ]
    .concat()
}

fn admin_command_faults() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (command, opcode, when) in COMMANDS {
        for (fault_name, fault, kind) in FAULTS {
            for (often, times) in [("once", 1), ("for-good", FOR_GOOD)] {
                let name = format!("admin/{command}/{fault_name}/{often}");
                let mut musts = expected_checks(opcode, when, fault, kind, times == FOR_GOOD);
                musts.push(ScenarioCheck::Strike(1));
                let plan = [PlannedFault::for_admin_opcode(opcode, fault).with_count(times)];
                table.push(
                    Scenario::default_session(name, &musts).with_faults(&plan).with_steps(COURSE),
                );
            }
        }
    }
    table
}

fn expected_checks(
    opcode: AdminOpcode,
    when: CommandPhase,
    fault: Fault,
    kind: FaultEffect,
    for_good: bool,
) -> Vec<ScenarioCheck> {
    let is_count = opcode == AdminOpcode::SetFeatures && fault == Fault::Result(u32::MAX);
    match (kind, when) {
        // The only result that is interpreted.
        _ if is_count => {
            vec![ScenarioCheck::Refuse("number of queues is 0xffffffff"), ScenarioCheck::Reattach]
        }
        (FaultEffect::Harmless, _) => vec![
            ScenarioCheck::Succeed,
            ScenarioCheck::NoEvent("ResetStarted"),
            ScenarioCheck::Survive,
        ],
        (FaultEffect::Late, _) => vec![
            ScenarioCheck::Succeed,
            ScenarioCheck::ReportsEvent("CommandOverdue"),
            ScenarioCheck::NoEvent("ResetStarted"),
            ScenarioCheck::Survive,
        ],
        (FaultEffect::Broken(_, why), CommandPhase::Start) => {
            vec![ScenarioCheck::Refuse(why), ScenarioCheck::Reattach]
        }
        (FaultEffect::Broken(driver_events, _), CommandPhase::Creation) if for_good => {
            vec![
                ScenarioCheck::ReportsEvent(driver_events),
                ScenarioCheck::EndState(ControllerState::Dead),
                ScenarioCheck::Reattach,
            ]
        }
        (FaultEffect::Broken(driver_events, _), _) => {
            vec![
                ScenarioCheck::Succeed,
                ScenarioCheck::ReportsEvent(driver_events),
                ScenarioCheck::Survive,
            ]
        }
        (FaultEffect::Refused, CommandPhase::Start) => {
            vec![ScenarioCheck::Refuse("expected success"), ScenarioCheck::Reattach]
        }
        (FaultEffect::Refused, _) if opcode == AdminOpcode::CreateIoCompletionQueue => {
            vec![
                ScenarioCheck::ReportsEvent("QueuePairRefused"),
                ScenarioCheck::NoEvent("ResetStarted"),
                ScenarioCheck::NoQueues,
            ]
        }
        // The queue exists although the controller reports a failure: deleting it is rejected,
        // which requires a reset. A queue that cannot be deleted is treated alike.
        (FaultEffect::Refused, _) => {
            vec![ScenarioCheck::ReportsEvent("QueueDeletionFailed"), ScenarioCheck::Survive]
        }
    }
}

/// Drops or duplicates the completion of each command of the initialization, one at a time.
fn faults_at_each_initialization_command() -> Vec<Scenario> {
    let mut table = Vec::new();
    for number in 1..=9 {
        for (name, fault, ends_at) in [
            ("swallow", Fault::Drop, COMMANDS_OF_START),
            ("duplicate", Fault::Duplicate, COMMANDS_OF_START - 1),
        ] {
            // Before the controller was ever ready it is given up; afterwards it is reset. The
            // second one of two completions arrives after the effect of the first.
            let verdict: &[ScenarioCheck] = if number <= ends_at {
                &[ScenarioCheck::Refuse("start up"), ScenarioCheck::Reattach]
            } else {
                &[
                    ScenarioCheck::ReportsEvent("Recovered"),
                    ScenarioCheck::Succeed,
                    ScenarioCheck::Survive,
                ]
            };
            let musts = [verdict, &[ScenarioCheck::Strike(1)]].concat();
            let once = PlannedFault { target: ADMIN, ..PlannedFault::for_all_commands(fault) }
                .with_trigger(FaultTrigger::AdminCompletions(number))
                .with_count(1);
            let name = format!("admin/start/{name}/{number}");
            table.push(Scenario::default_session(name, &musts).with_faults(&[once]));
        }
    }
    table
}

const ADMIN: FaultTarget = FaultTarget { queue: QueueKind::Admin, opcode: None };
/// Identify four times for the controller and its namespace, two Get Features, one list.
const COMMANDS_OF_START: u32 = 7;

/// Number of Queues granted by the controller (Base 2.1 §5.1.25.2.1). Both counts are 0's based.
fn granted_queue_count_scenarios() -> Vec<Scenario> {
    let fine = vec![ScenarioCheck::Attach, ScenarioCheck::Succeed, ScenarioCheck::Survive];
    let rows = [
        ("one-of-each", 0x0000_0000, fine.clone()),
        ("fewer-submission", 0x0003_0000, fine.clone()),
        ("fewer-completion", 0x0000_0003, fine.clone()),
        ("more-than-asked", 0x00ff_00ff, fine.clone()),
        ("reserved-submission", 0x0003_ffff, fine.clone()),
        ("reserved-completion", 0xffff_0003, fine.clone()),
        (
            "reserved-both",
            0xffff_ffff,
            vec![ScenarioCheck::Refuse("number of queues"), ScenarioCheck::Reattach],
        ),
    ];
    let scenario = |(name, result, musts): (&str, u32, Vec<ScenarioCheck>)| {
        let lie = PlannedFault::for_admin_opcode(AdminOpcode::SetFeatures, Fault::Result(result));
        Scenario::default_session(format!("admin/queue-count/{name}"), &musts)
            .with_faults(&[lie])
            .with_world(|options| options.host.queue_pairs = 4)
    };
    rows.into_iter().map(scenario).collect()
}
