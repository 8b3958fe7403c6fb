//! Commands that the medium never ends, and what the controller says to their aborts.

use base::{Operation, Span};
use nvme::State;
use wire::AdminOpcode;

use crate::course::Step;
use crate::evil::{Fault, Invented, Mischief, Release};
use crate::medium::{MediumFault, MediumMischief};
use crate::scenario::{Must, Scenario};

pub(super) fn table() -> Vec<Scenario> {
    [stalled(), slow_media()].concat()
}

const TO_THE_END: &[Step] = &[
    Step::Attach,
    Step::Work,
    Step::Settle,
    Step::Settle,
    Step::Settle,
    Step::Settle,
    Step::Repent,
    Step::Recover,
    Step::Review,
    Step::Again,
    Step::ShutDown,
];

fn stalled() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (operation_name, operation) in
        [("read", Operation::Read), ("write", Operation::Write), ("flush", Operation::Flush)]
    {
        for (answer, fault) in [
            ("honest", None),
            ("says-aborted", Some(Fault::Result(0))),
            ("says-not-aborted", Some(Fault::Result(1))),
            ("refused", Some(Fault::Status(0x4103))),
            ("swallowed", Some(Fault::Swallow)),
            ("late", Some(Fault::Hold(Release::After(Span::from_ms(150))))),
            ("doubled", Some(Fault::Duplicate)),
            ("invented", Some(Fault::Invent(Invented::InFlight))),
        ] {
            let musts = [
                Must::Attach,
                Must::Tell("CommandOverdue"),
                Must::Tell("ResetStarted"),
                Must::Abort,
            ];
            let stall = MediumMischief::on(operation, MediumFault::Stall).skip(3).times(1);
            let plan: Vec<Mischief> =
                fault.into_iter().map(|fault| Mischief::admin(AdminOpcode::Abort, fault)).collect();
            let scenario = |name: &str, more: &[Must]| {
                let name = format!("aborts/stalled-{operation_name}/{answer}/{name}");
                Scenario::session(name, &[&musts, more].concat())
                    .plan(&plan)
                    .world(|options| options.medium.mischief = vec![stall])
            };
            // The medium holds on to its memory, so the controller cannot be disabled: it is cut
            // off from memory, and comes back when the medium lets go.
            table.push(scenario("a-while", &[Must::Survive]));
            // Or it does not, and the controller is given up.
            table.push(
                scenario("for-good", &[Must::Stand(State::Dead), Must::Reattach]).steps(TO_THE_END),
            );
        }
    }
    table
}

/// A medium that takes longer than the driver waits, by how much longer.
fn slow_media() -> Vec<Scenario> {
    let rows: [(&str, u64, &[Must]); 4] = [
        ("in-time", 60, &[Must::Succeed, Must::Hush("CommandOverdue"), Must::Survive]),
        // The controller may well end it as aborted before the medium is done.
        ("after-its-time", 150, &[Must::Tell("CommandOverdue"), Must::Survive]),
        ("during-the-reset", 400, &[Must::Abort, Must::Tell("Recovered"), Must::Survive]),
        ("after-the-cut", 1500, &[Must::Abort, Must::Tell("Recovered"), Must::Survive]),
    ];
    let mut table = Vec::new();
    for (name, delay_ms, musts) in rows {
        for (work, mix, blocks) in super::WORK {
            let delay = MediumFault::Delay(Span::from_ms(delay_ms));
            let mischief = MediumMischief::always(delay).skip(10).times(2);
            let musts = [musts, &[Must::Attach]].concat();
            let scenario = Scenario::session(format!("aborts/slow-medium/{name}/{work}"), &musts)
                .world(|options| super::work(options, mix, blocks))
                .world(|options| options.medium.mischief = vec![mischief]);
            table.push(scenario);
        }
    }
    table
}
