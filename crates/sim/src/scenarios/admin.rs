//! Admin commands that are swallowed, refused, late, doubled or falsely answered: those of the start
//! and those that make and unmake queues.

use base::Span;
use nvme::State;
use wire::AdminOpcode;

use crate::course::{Step, Wish};
use crate::evil::{FOR_GOOD, Fault, Gate, Invented, Mischief, QueueKind, Release, Target};
use crate::scenario::{Must, Scenario};

/// When a command is sent, which decides what its failure means.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    /// Before the controller has ever been ready.
    Start,
    /// To make a queue pair: after a reset it is tried again.
    Creation,
    /// To unmake one: a reset unmakes it as well.
    Deletion,
}

/// What a fault is to the driver.
#[derive(Clone, Copy)]
enum Kind {
    /// Nothing.
    Harmless,
    /// A command that takes long, and in the end is answered.
    Late,
    /// A reason to reset: as events tell it, and as errors say it.
    Broken(&'static str, &'static str),
    /// A refusal.
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

const STUCK: Kind = Kind::Broken("Stuck", "missed its deadline and its abort");
const UNKNOWN: Kind = Kind::Broken("NotInFlight", "identifier not in flight");

const FAULTS: [(&str, Fault, Kind); 11] = [
    ("swallow", Fault::Swallow, STUCK),
    ("refuse", Fault::Status(0x4002), Kind::Refused),
    ("refuse-for-now", Fault::Status(0x0006), Kind::Refused),
    ("late-in-time", Fault::Hold(Release::After(Span::from_ms(150))), Kind::Harmless),
    ("late-after-abort", Fault::Hold(Release::After(Span::from_ms(250))), Kind::Late),
    ("late-after-everything", Fault::Hold(Release::After(Span::from_secs(9))), STUCK),
    ("duplicate", Fault::Duplicate, UNKNOWN),
    ("invent", Fault::Invent(Invented::Outside), UNKNOWN),
    ("wrong-phase", Fault::WrongPhase, Kind::Broken("AbortUnanswered", "was not answered")),
    ("result-noise", Fault::Result(u32::MAX), Kind::Harmless),
    (
        "head-outside",
        Fault::Head(0x4000),
        Kind::Broken("SubmissionHead", "impossible submission head"),
    ),
];

const COURSE: &[Step] = &[
    Step::Attach,
    Step::Work,
    Step::Ask(Wish::DeleteQueuePair),
    Step::Settle,
    Step::Repent,
    Step::Recover,
    Step::Review,
    Step::Again,
    Step::ShutDown,
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
                musts.push(Must::Strike(1));
                let plan = [Mischief::admin(opcode, fault).times(times)];
                table.push(Scenario::session(name, &musts).plan(&plan).steps(COURSE));
            }
        }
    }
    table
}

fn musts(opcode: AdminOpcode, when: When, fault: Fault, kind: Kind, for_good: bool) -> Vec<Must> {
    let is_count = opcode == AdminOpcode::SetFeatures && fault == Fault::Result(u32::MAX);
    match (kind, when) {
        // The one result that means something.
        _ if is_count => vec![Must::Refuse("number of queues is 0xffffffff"), Must::Reattach],
        (Kind::Harmless, _) => vec![Must::Succeed, Must::Hush("ResetStarted"), Must::Survive],
        (Kind::Late, _) => vec![
            Must::Succeed,
            Must::Tell("CommandOverdue"),
            Must::Hush("ResetStarted"),
            Must::Survive,
        ],
        (Kind::Broken(_, why), When::Start) => vec![Must::Refuse(why), Must::Reattach],
        (Kind::Broken(told, _), When::Creation) if for_good => {
            vec![Must::Tell(told), Must::Stand(State::Dead), Must::Reattach]
        }
        (Kind::Broken(told, _), _) => vec![Must::Succeed, Must::Tell(told), Must::Survive],
        (Kind::Refused, When::Start) => vec![Must::Refuse("expected success"), Must::Reattach],
        (Kind::Refused, _) if opcode == AdminOpcode::CreateIoCompletionQueue => {
            vec![Must::Tell("QueuePairRefused"), Must::Hush("ResetStarted"), Must::NoLanes]
        }
        // It was made, and the controller denies it: taking it back is refused, and that takes a
        // reset. What cannot be deleted is treated likewise.
        (Kind::Refused, _) => vec![Must::Tell("DeletionRefused"), Must::Survive],
    }
}

/// A completion swallowed or doubled at every single command of the start, one after the other.
fn each_step_of_the_start() -> Vec<Scenario> {
    let mut table = Vec::new();
    for number in 1..=9 {
        for (name, fault, ends_at) in [
            ("swallow", Fault::Swallow, COMMANDS_OF_START),
            ("duplicate", Fault::Duplicate, COMMANDS_OF_START - 1),
        ] {
            // Before the controller was ever ready it is given up; after that it is reset. The
            // second of two completions comes after what the first has led to.
            let verdict: &[Must] = if number <= ends_at {
                &[Must::Refuse("start up"), Must::Reattach]
            } else {
                &[Must::Tell("Recovered"), Must::Succeed, Must::Survive]
            };
            let musts = [verdict, &[Must::Strike(1)]].concat();
            let once = Mischief { target: ADMIN, ..Mischief::always(fault) }
                .gate(Gate::AdminCompletions(number))
                .times(1);
            let name = format!("admin/start/{name}/{number}");
            table.push(Scenario::session(name, &musts).plan(&[once]));
        }
    }
    table
}

const ADMIN: Target = Target { queue: QueueKind::Admin, opcode: None };
/// Identify four times for the controller and its namespace, two pages of features, one list.
const COMMANDS_OF_START: u32 = 7;

/// What the controller says it grants (Base 2.1 §5.1.25.2.1): both counts are 0's based.
fn queue_counts() -> Vec<Scenario> {
    let fine = vec![Must::Attach, Must::Succeed, Must::Survive];
    let rows = [
        ("one-of-each", 0x0000_0000, fine.clone()),
        ("fewer-submission", 0x0003_0000, fine.clone()),
        ("fewer-completion", 0x0000_0003, fine.clone()),
        ("more-than-asked", 0x00ff_00ff, fine.clone()),
        ("reserved-submission", 0x0003_ffff, fine.clone()),
        ("reserved-completion", 0xffff_0003, fine.clone()),
        ("reserved-both", 0xffff_ffff, vec![Must::Refuse("number of queues"), Must::Reattach]),
    ];
    let scenario = |(name, result, musts): (&str, u32, Vec<Must>)| {
        let lie = Mischief::admin(AdminOpcode::SetFeatures, Fault::Result(result));
        Scenario::session(format!("admin/queue-count/{name}"), &musts)
            .plan(&[lie])
            .world(|options| options.host.queue_pairs = 4)
    };
    rows.into_iter().map(scenario).collect()
}
