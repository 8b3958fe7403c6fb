//! Asynchronous events: storms, unknown kinds, and log pages that lie about what happened.

use wire::AdminOpcode;

use crate::evil::{FOR_GOOD, Fault, Gate, Mischief, pokes};
use crate::scenario::{Must, Scenario};

/// Dword 0 of an Asynchronous Event Request (Base 2.1 §5.1.2, figure 150): type, information, log
/// page.
const fn event(kind: u32, what: u32, log: u32) -> u32 {
    kind | what << 8 | log << 16
}

const EVENTS: [(&str, u32); 12] = [
    ("error-doorbell", event(0, 0, 0x01)),
    ("error-persistent", event(0, 3, 0x01)),
    ("health-temperature", event(1, 1, 0x02)),
    ("notice-namespaces", event(2, 0, 0x04)),
    ("notice-firmware", event(2, 1, 0x03)),
    ("notice-ana", event(2, 3, 0x0c)),
    ("notice-reserved", event(2, 0x77, 0x04)),
    ("io-set-reservation", event(6, 0, 0x80)),
    ("vendor", event(7, 0, 0xc0)),
    ("reserved-kind", event(5, 9, 0xff)),
    ("zero", 0),
    ("ones", u32::MAX),
];

pub(super) fn table() -> Vec<Scenario> {
    [events(), falsified_logs(), refused()].concat()
}

/// Each kind once, in a storm, and from the start.
fn events() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (name, result) in EVENTS {
        for (often, times) in [("once", 1), ("storm", 200)] {
            let musts = [Must::Attach, Must::Succeed, Must::Survive, Must::Strike(1)];
            let storm = Mischief::admin(
                AdminOpcode::AsynchronousEventRequest,
                Fault::Event { result, status: 0 },
            );
            let scenario = Scenario::session(format!("events/{often}/{name}"), &musts);
            table.push(scenario.plan(&[storm.times(times)]).world(super::slow));
        }
    }
    table
}

/// Something is said to have happened, and the log page that tells what is nonsense.
fn falsified_logs() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (event_name, result) in [
        ("error", event(0, 3, 0x01)),
        ("health", event(1, 1, 0x02)),
        ("namespaces", event(2, 0, 0x04)),
        ("ana", event(2, 3, 0x0c)),
    ] {
        for (how_name, forgery) in [
            ("noise", pokes::noise(None)),
            ("ones", pokes::fill(None, 0xff)),
            ("zeroes", pokes::fill(None, 0)),
            ("swallow", Fault::Swallow),
            ("refuse", Fault::Status(0x4002)),
        ] {
            let musts = [Must::Attach, Must::Strike(2)];
            let plan = [
                Mischief::admin(
                    AdminOpcode::AsynchronousEventRequest,
                    Fault::Event { result, status: 0 },
                )
                .times(5),
                Mischief::admin(AdminOpcode::GetLogPage, forgery),
            ];
            let name = format!("events/log/{event_name}/{how_name}");
            table.push(Scenario::session(name, &musts).plan(&plan).world(super::slow));
        }
    }
    table
}

/// The controller does not take event requests.
fn refused() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (name, status) in [("limit", 0x4105), ("opcode", 0x4001), ("aborted", 0x0007)] {
        for (often, times) in [("once", 1), ("for-good", FOR_GOOD)] {
            let fault = Fault::Event { result: 0, status };
            let refusal = Mischief::admin(AdminOpcode::AsynchronousEventRequest, fault);
            let musts = [Must::Attach, Must::Succeed, Must::Survive, Must::Tell("EventsRefused")];
            let scenario = Scenario::session(format!("events/refused/{name}/{often}"), &musts);
            let plan = [refusal.times(times).gate(Gate::Always)];
            table.push(scenario.plan(&plan).world(super::slow));
        }
    }
    table
}
