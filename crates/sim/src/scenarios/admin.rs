//! Faults of admin commands (dropped, rejected, late, duplicate or with wrong results) during
//! initialization and during the creation and deletion of queues.

use tenmil_base::Span;
use tenmil_nvme_host::State;
use tenmil_wire::AdminOpcode;

use crate::fault_injector::{
    BogusCid, FOR_GOOD, Fault, FaultTrigger, PlannedFault, QueueKind, Release, Target,
};
use crate::scenario::{Scenario, ScenarioCheck};
use crate::test_run::{CourseStep, OwnerAction};

/// When a command is sent, which determines the effect of its failure.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    /// Before the controller has ever been ready.
    Start,
    /// Creation of a queue pair, which is retried after a reset.
    Creation,
    /// Deletion of a queue pair, which a reset achieves as well.
    Deletion,
}

/// Effect of a fault on the driver.
#[derive(Clone, Copy)]
enum Kind {
    /// None.
    Harmless,
    /// A command exceeds its timeout and completes in the end.
    Late,
    /// A reset: event, and text of the error.
    Broken(&'static str, &'static str),
    /// A rejected command.
    Refused,
}

const COMMANDS: [(&str, AdminOpcode, When); 6] = [
    ("identify", AdminOpcode::Identify, When::Start),
    ("set-features", AdminOpcode::SetFeatures, When::Start),
    ("create-completion-queue", AdminOpcode::CreateIoCompletionQueue, When::Creation),
    ("create-submission-queue", AdminOpcode::CreateIoSubmissionQueue, When::Creation),
    ("delete-submission-queue", AdminOpcode::DeleteIoSubmissionQueue, When::Deletion),
    ("delete-completion-queue", AdminOpcode::DeleteIoCompletionQueue, When::Deletion),
];

const STUCK: Kind = Kind::Broken("CommandTimeout", "missed its deadline and its abort");
const UNKNOWN: Kind = Kind::Broken("NotInFlight", "identifier not in flight");

const FAULTS: [(&str, Fault, Kind); 11] = [
    ("swallow", Fault::Drop, STUCK),
    ("refuse", Fault::Status(0x4002), Kind::Refused),
    ("refuse-for-now", Fault::Status(0x0006), Kind::Refused),
    ("late-in-time", Fault::Hold(Release::After(Span::from_ms(150))), Kind::Harmless),
    ("late-after-abort", Fault::Hold(Release::After(Span::from_ms(250))), Kind::Late),
    ("late-after-everything", Fault::Hold(Release::After(Span::from_secs(9))), STUCK),
    ("duplicate", Fault::Duplicate, UNKNOWN),
    ("invent", Fault::Bogus(BogusCid::Outside), UNKNOWN),
    ("wrong-phase", Fault::WrongPhase, Kind::Broken("AbortTimeout", "timed out")),
    ("result-noise", Fault::Result(u32::MAX), Kind::Harmless),
    (
        "head-outside",
        Fault::Head(0x4000),
        Kind::Broken("SubmissionHead", "impossible submission head"),
    ),
];

const COURSE: &[CourseStep] = &[
    CourseStep::Attach,
    CourseStep::Work,
    CourseStep::Request(OwnerAction::DeleteQueuePair),
    CourseStep::Settle,
    CourseStep::StopFaults,
    CourseStep::Recover,
    CourseStep::ReadBack,
    CourseStep::Again,
    CourseStep::ShutDown,
];

pub(super) fn table() -> Vec<Scenario> {
    [commands(), each_step_of_the_start(), queue_counts()].concat()
}

fn commands() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (command, opcode, when) in COMMANDS {
        for (fault_name, fault, kind) in FAULTS {
            for (often, times) in [("once", 1), ("for-good", FOR_GOOD)] {
                let name = format!("admin/{command}/{fault_name}/{often}");
                let mut musts = musts(opcode, when, fault, kind, times == FOR_GOOD);
                musts.push(ScenarioCheck::Strike(1));
                let plan = [PlannedFault::admin(opcode, fault).times(times)];
                table.push(Scenario::session(name, &musts).plan(&plan).steps(COURSE));
            }
        }
    }
    table
}

fn musts(
    opcode: AdminOpcode,
    when: When,
    fault: Fault,
    kind: Kind,
    for_good: bool,
) -> Vec<ScenarioCheck> {
    let is_count = opcode == AdminOpcode::SetFeatures && fault == Fault::Result(u32::MAX);
    match (kind, when) {
        // The only result that is interpreted.
        _ if is_count => {
            vec![ScenarioCheck::Refuse("number of queues is 0xffffffff"), ScenarioCheck::Reattach]
        }
        (Kind::Harmless, _) => vec![
            ScenarioCheck::Succeed,
            ScenarioCheck::NoEvent("ResetStarted"),
            ScenarioCheck::Survive,
        ],
        (Kind::Late, _) => vec![
            ScenarioCheck::Succeed,
            ScenarioCheck::ReportsEvent("CommandOverdue"),
            ScenarioCheck::NoEvent("ResetStarted"),
            ScenarioCheck::Survive,
        ],
        (Kind::Broken(_, why), When::Start) => {
            vec![ScenarioCheck::Refuse(why), ScenarioCheck::Reattach]
        }
        (Kind::Broken(driver_events, _), When::Creation) if for_good => {
            vec![
                ScenarioCheck::ReportsEvent(driver_events),
                ScenarioCheck::EndState(State::Dead),
                ScenarioCheck::Reattach,
            ]
        }
        (Kind::Broken(driver_events, _), _) => {
            vec![
                ScenarioCheck::Succeed,
                ScenarioCheck::ReportsEvent(driver_events),
                ScenarioCheck::Survive,
            ]
        }
        (Kind::Refused, When::Start) => {
            vec![ScenarioCheck::Refuse("expected success"), ScenarioCheck::Reattach]
        }
        (Kind::Refused, _) if opcode == AdminOpcode::CreateIoCompletionQueue => {
            vec![
                ScenarioCheck::ReportsEvent("QueuePairRefused"),
                ScenarioCheck::NoEvent("ResetStarted"),
                ScenarioCheck::NoQueues,
            ]
        }
        // The queue exists although the controller reports a failure: deleting it is rejected,
        // which requires a reset. A queue that cannot be deleted is treated alike.
        (Kind::Refused, _) => {
            vec![ScenarioCheck::ReportsEvent("QueueDeletionFailed"), ScenarioCheck::Survive]
        }
    }
}

/// Drops or duplicates the completion of each command of the initialization, one at a time.
fn each_step_of_the_start() -> Vec<Scenario> {
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
            let once = PlannedFault { target: ADMIN, ..PlannedFault::always(fault) }
                .gate(FaultTrigger::AdminCompletions(number))
                .times(1);
            let name = format!("admin/start/{name}/{number}");
            table.push(Scenario::session(name, &musts).plan(&[once]));
        }
    }
    table
}

const ADMIN: Target = Target { queue: QueueKind::Admin, opcode: None };
/// Identify four times for the controller and its namespace, two Get Features, one list.
const COMMANDS_OF_START: u32 = 7;

/// Number of Queues granted by the controller (Base 2.1 §5.1.25.2.1). Both counts are 0's based.
fn queue_counts() -> Vec<Scenario> {
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
        let lie = PlannedFault::admin(AdminOpcode::SetFeatures, Fault::Result(result));
        Scenario::session(format!("admin/queue-count/{name}"), &musts)
            .plan(&[lie])
            .world(|options| options.host.queue_pairs = 4)
    };
    rows.into_iter().map(scenario).collect()
}
