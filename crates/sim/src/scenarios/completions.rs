//! Faults of I/O completions: duplicate, bogus, dropped, late or wrong.

use tenmil_base::Span;
use tenmil_nvme_host::ControllerState;

use crate::fault_injector::{BogusCid, FOR_GOOD, Fault, PlannedFault, ReleaseTrigger};
use crate::scenario::{Scenario, ScenarioCheck};

/// Expected effect of a fault that occurs once or permanently.
struct FaultCase {
    name: &'static str,
    fault: Fault,
    once: &'static [ScenarioCheck],
    for_good: &'static [ScenarioCheck],
}

const HARMLESS: &[ScenarioCheck] =
    &[ScenarioCheck::Succeed, ScenarioCheck::NoEvent("ResetStarted"), ScenarioCheck::Survive];
const RESET: &[ScenarioCheck] = &[
    ScenarioCheck::ReportsEvent("InvalidCompletion"),
    ScenarioCheck::ReportsEvent("Recovered"),
    ScenarioCheck::Survive,
];
const STUCK: &[ScenarioCheck] = &[
    ScenarioCheck::ReportsEvent("CommandOverdue"),
    ScenarioCheck::ReportsEvent("CommandTimeout"),
    ScenarioCheck::Abort,
];
const DEAD: &[ScenarioCheck] = &[
    ScenarioCheck::EndState(ControllerState::Dead),
    ScenarioCheck::Abort,
    ScenarioCheck::Reattach,
];
const LATE: &[ScenarioCheck] = &[
    ScenarioCheck::Succeed,
    ScenarioCheck::ReportsEvent("CommandOverdue"),
    ScenarioCheck::Survive,
];
const FAIL: &[ScenarioCheck] =
    &[ScenarioCheck::Fail, ScenarioCheck::NoEvent("ResetStarted"), ScenarioCheck::Survive];

const ROWS: &[FaultCase] = &[
    FaultCase { name: "duplicate", fault: Fault::Duplicate, once: RESET, for_good: DEAD },
    FaultCase {
        name: "invent-outside",
        fault: Fault::Bogus(BogusCid::Outside),
        once: RESET,
        for_good: DEAD,
    },
    FaultCase {
        name: "invent-ended",
        fault: Fault::Bogus(BogusCid::Ended),
        once: RESET,
        for_good: DEAD,
    },
    FaultCase {
        name: "invent-in-flight",
        fault: Fault::Bogus(BogusCid::InFlight),
        once: RESET,
        for_good: &[ScenarioCheck::ReportsEvent("InvalidCompletion"), ScenarioCheck::Abort],
    },
    FaultCase { name: "wrong-phase", fault: Fault::WrongPhase, once: STUCK, for_good: DEAD },
    FaultCase { name: "swallow", fault: Fault::Drop, once: STUCK, for_good: DEAD },
    FaultCase {
        name: "late-in-time",
        fault: Fault::Hold(ReleaseTrigger::After(Span::from_ms(50))),
        once: HARMLESS,
        for_good: HARMLESS,
    },
    FaultCase {
        name: "late-after-abort-began",
        fault: Fault::Hold(ReleaseTrigger::After(Span::from_ms(120))),
        once: LATE,
        for_good: LATE,
    },
    FaultCase {
        name: "late-after-everything",
        fault: Fault::Hold(ReleaseTrigger::After(Span::from_secs(10))),
        once: STUCK,
        for_good: DEAD,
    },
    FaultCase {
        name: "late-after-its-abort",
        fault: Fault::Hold(ReleaseTrigger::Aborted),
        once: LATE,
        for_good: &[ScenarioCheck::ReportsEvent("CommandOverdue"), ScenarioCheck::Survive],
    },
    FaultCase {
        name: "late-after-the-reset",
        fault: Fault::Hold(ReleaseTrigger::Reset),
        once: STUCK,
        for_good: DEAD,
    },
    FaultCase { name: "status", fault: Fault::Status(0x281), once: FAIL, for_good: FAIL },
    FaultCase { name: "status-vendor", fault: Fault::Status(0x77f), once: FAIL, for_good: FAIL },
    FaultCase {
        name: "status-do-not-retry",
        fault: Fault::Status(0x4002),
        once: FAIL,
        for_good: FAIL,
    },
    FaultCase { name: "status-noise", fault: Fault::Status(0xffff), once: FAIL, for_good: FAIL },
    FaultCase {
        name: "result-noise",
        fault: Fault::Result(0xdead_beef),
        once: HARMLESS,
        for_good: HARMLESS,
    },
    // Ahead of the entries that were fetched, but perhaps not of those submitted, so it is not
    // detectable at once.
    FaultCase {
        name: "head-ahead",
        fault: Fault::Head(1),
        once: &[ScenarioCheck::Survive],
        for_good: DEAD,
    },
    FaultCase { name: "head-outside", fault: Fault::Head(0x4000), once: RESET, for_good: DEAD },
    FaultCase {
        name: "head-backwards",
        fault: Fault::Head(0xfff0),
        once: RESET,
        for_good: &[ScenarioCheck::ReportsEvent("InvalidCompletion"), ScenarioCheck::Abort],
    },
    FaultCase { name: "queue-id", fault: Fault::QueueId(7), once: HARMLESS, for_good: HARMLESS },
    FaultCase {
        name: "reserved-dword",
        fault: Fault::Reserved,
        once: HARMLESS,
        for_good: HARMLESS,
    },
    FaultCase { name: "flood", fault: Fault::Flood, once: RESET, for_good: DEAD },
];

pub(super) fn completion_scenarios() -> Vec<Scenario> {
    let mut table = Vec::new();
    for row in ROWS {
        for (work, mix, blocks) in super::WORK {
            for (often, skip, times, musts) in
                [("once", 12, 1, row.once), ("for-good", 0, FOR_GOOD, row.for_good)]
            {
                let name = format!("completions/{}/{often}/{work}", row.name);
                let musts = [musts, &[ScenarioCheck::Attach, ScenarioCheck::Strike(1)]].concat();
                let scenario = Scenario::default_session(name, &musts)
                    .with_faults(&[PlannedFault::for_io_queues(row.fault)
                        .with_skip(skip)
                        .with_count(times)])
                    .with_world(|options| super::set_workload(options, mix, blocks));
                table.push(scenario);
            }
        }
    }
    table
}
