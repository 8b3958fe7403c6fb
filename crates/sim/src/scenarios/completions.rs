//! Completions of I/O commands that are doubled, invented, swallowed, late or false.

use base::Span;
use nvme::State;

use crate::evil::{FOR_GOOD, Fault, Invented, Mischief, Release};
use crate::scenario::{Must, Scenario};

/// What a fault leads to, once and for good.
struct Row {
    name: &'static str,
    fault: Fault,
    once: &'static [Must],
    for_good: &'static [Must],
}

const HARMLESS: &[Must] = &[Must::Succeed, Must::Hush("ResetStarted"), Must::Survive];
const RESET: &[Must] = &[Must::Tell("Nonsense"), Must::Tell("Recovered"), Must::Survive];
const STUCK: &[Must] = &[Must::Tell("CommandOverdue"), Must::Tell("Stuck"), Must::Abort];
const DEAD: &[Must] = &[Must::Stand(State::Dead), Must::Abort, Must::Reattach];
const LATE: &[Must] = &[Must::Succeed, Must::Tell("CommandOverdue"), Must::Survive];
const FAIL: &[Must] = &[Must::Fail, Must::Hush("ResetStarted"), Must::Survive];

const ROWS: &[Row] = &[
    Row { name: "duplicate", fault: Fault::Duplicate, once: RESET, for_good: DEAD },
    Row {
        name: "invent-outside",
        fault: Fault::Invent(Invented::Outside),
        once: RESET,
        for_good: DEAD,
    },
    Row {
        name: "invent-ended",
        fault: Fault::Invent(Invented::Ended),
        once: RESET,
        for_good: DEAD,
    },
    Row {
        name: "invent-in-flight",
        fault: Fault::Invent(Invented::InFlight),
        once: RESET,
        for_good: &[Must::Tell("Nonsense"), Must::Abort],
    },
    Row { name: "wrong-phase", fault: Fault::WrongPhase, once: STUCK, for_good: DEAD },
    Row { name: "swallow", fault: Fault::Swallow, once: STUCK, for_good: DEAD },
    Row {
        name: "late-in-time",
        fault: Fault::Hold(Release::After(Span::from_ms(50))),
        once: HARMLESS,
        for_good: HARMLESS,
    },
    Row {
        name: "late-after-abort-began",
        fault: Fault::Hold(Release::After(Span::from_ms(120))),
        once: LATE,
        for_good: LATE,
    },
    Row {
        name: "late-after-everything",
        fault: Fault::Hold(Release::After(Span::from_secs(10))),
        once: STUCK,
        for_good: DEAD,
    },
    Row {
        name: "late-after-its-abort",
        fault: Fault::Hold(Release::Aborted),
        once: LATE,
        for_good: &[Must::Tell("CommandOverdue"), Must::Survive],
    },
    Row {
        name: "late-after-the-reset",
        fault: Fault::Hold(Release::Reset),
        once: STUCK,
        for_good: DEAD,
    },
    Row { name: "status", fault: Fault::Status(0x281), once: FAIL, for_good: FAIL },
    Row { name: "status-vendor", fault: Fault::Status(0x77f), once: FAIL, for_good: FAIL },
    Row { name: "status-do-not-retry", fault: Fault::Status(0x4002), once: FAIL, for_good: FAIL },
    Row { name: "status-noise", fault: Fault::Status(0xffff), once: FAIL, for_good: FAIL },
    Row {
        name: "result-noise",
        fault: Fault::Result(0xdead_beef),
        once: HARMLESS,
        for_good: HARMLESS,
    },
    // Ahead of what was read, but perhaps not of what was submitted: nobody can tell at once.
    Row { name: "head-ahead", fault: Fault::Head(1), once: &[Must::Survive], for_good: DEAD },
    Row { name: "head-outside", fault: Fault::Head(0x4000), once: RESET, for_good: DEAD },
    Row {
        name: "head-backwards",
        fault: Fault::Head(0xfff0),
        once: RESET,
        for_good: &[Must::Tell("Nonsense"), Must::Abort],
    },
    Row { name: "queue-id", fault: Fault::QueueId(7), once: HARMLESS, for_good: HARMLESS },
    Row { name: "reserved-dword", fault: Fault::Reserved, once: HARMLESS, for_good: HARMLESS },
    Row { name: "flood", fault: Fault::Flood, once: RESET, for_good: DEAD },
];

pub(super) fn table() -> Vec<Scenario> {
    let mut table = Vec::new();
    for row in ROWS {
        for (work, mix, blocks) in super::WORK {
            for (often, skip, times, musts) in
                [("once", 12, 1, row.once), ("for-good", 0, FOR_GOOD, row.for_good)]
            {
                let name = format!("completions/{}/{often}/{work}", row.name);
                let musts = [musts, &[Must::Attach, Must::Strike(1)]].concat();
                let scenario = Scenario::session(name, &musts)
                    .plan(&[Mischief::io(row.fault).skip(skip).times(times)])
                    .world(|options| super::work(options, mix, blocks));
                table.push(scenario);
            }
        }
    }
    table
}
