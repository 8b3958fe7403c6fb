//! Asynchronous events: storms, unknown types, and corrupted log pages.

use tenmil_wire::AdminOpcode;

use crate::fault_injector::{FOR_GOOD, Fault, FaultTrigger, PlannedFault, pokes};
use crate::scenario::{Scenario, ScenarioCheck};

/// Dword 0 of an Asynchronous Event Request completion (Base 2.1 §5.1.2, figure 150): type,
/// information, log page.
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

/// Each type once, in a storm, and from the start.
fn events() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (name, result) in EVENTS {
        for (often, times) in [("once", 1), ("storm", 200)] {
            let musts = [
                ScenarioCheck::Attach,
                ScenarioCheck::Succeed,
                ScenarioCheck::Survive,
                ScenarioCheck::Strike(1),
            ];
            let storm = PlannedFault::admin(
                AdminOpcode::AsynchronousEventRequest,
                Fault::Event { result, status: 0 },
            );
            let scenario = Scenario::session(format!("events/{often}/{name}"), &musts);
            table.push(scenario.plan(&[storm.times(times)]).world(super::slow));
        }
    }
    table
}

/// An event whose log page is corrupted.
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
            ("swallow", Fault::Drop),
            ("refuse", Fault::Status(0x4002)),
        ] {
            let musts = [ScenarioCheck::Attach, ScenarioCheck::Strike(2)];
            let plan = [
                PlannedFault::admin(
                    AdminOpcode::AsynchronousEventRequest,
                    Fault::Event { result, status: 0 },
                )
                .times(5),
                PlannedFault::admin(AdminOpcode::GetLogPage, forgery),
            ];
            let name = format!("events/log/{event_name}/{how_name}");
            table.push(Scenario::session(name, &musts).plan(&plan).world(super::slow));
        }
    }
    table
}

/// The controller rejects event requests.
fn refused() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (name, status) in [("limit", 0x4105), ("opcode", 0x4001), ("aborted", 0x0007)] {
        for (often, times) in [("once", 1), ("for-good", FOR_GOOD)] {
            let fault = Fault::Event { result: 0, status };
            let refusal = PlannedFault::admin(AdminOpcode::AsynchronousEventRequest, fault);
            let musts = [
                ScenarioCheck::Attach,
                ScenarioCheck::Succeed,
                ScenarioCheck::Survive,
                ScenarioCheck::ReportsEvent("EventsRefused"),
            ];
            let scenario = Scenario::session(format!("events/refused/{name}/{often}"), &musts);
            let plan = [refusal.times(times).gate(FaultTrigger::Always)];
            table.push(scenario.plan(&plan).world(super::slow));
        }
    }
    table
}
