//! Asynchronous events: storms, unknown types, and corrupted log pages.

use tenmil_wire::AdminOpcode;

use crate::fault_injector::{FOR_GOOD, Fault, FaultTrigger, PlannedFault, pokes};
use crate::scenario::{Scenario, ScenarioCheck};

/// Dword 0 of an Asynchronous Event Request completion (Base 2.1 §5.1.2, figure 150): type,
/// information, log page.
const fn event_dword0(kind: u32, what: u32, log: u32) -> u32 {
    kind | what << 8 | log << 16
}

const EVENTS: [(&str, u32); 12] = [
    ("error-doorbell", event_dword0(0, 0, 0x01)),
    ("error-persistent", event_dword0(0, 3, 0x01)),
    ("health-temperature", event_dword0(1, 1, 0x02)),
    ("notice-namespaces", event_dword0(2, 0, 0x04)),
    ("notice-firmware", event_dword0(2, 1, 0x03)),
    ("notice-ana", event_dword0(2, 3, 0x0c)),
    ("notice-reserved", event_dword0(2, 0x77, 0x04)),
    ("io-set-reservation", event_dword0(6, 0, 0x80)),
    ("vendor", event_dword0(7, 0, 0xc0)),
    ("reserved-kind", event_dword0(5, 9, 0xff)),
    ("zero", 0),
    ("ones", u32::MAX),
];

pub(super) fn event_scenarios() -> Vec<Scenario> {
    [event_faults(), corrupted_log_pages(), rejected_event_requests()].concat()
}

/// Each type once, in a storm, and from the start.
fn event_faults() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (name, result) in EVENTS {
        for (often, times) in [("once", 1), ("storm", 200)] {
            let musts = [
                ScenarioCheck::Attach,
                ScenarioCheck::Succeed,
                ScenarioCheck::Survive,
                ScenarioCheck::Strike(1),
            ];
            let storm = PlannedFault::for_admin_opcode(
                AdminOpcode::AsynchronousEventRequest,
                Fault::Event { result, status: 0 },
            );
            let scenario = Scenario::default_session(format!("events/{often}/{name}"), &musts);
            table.push(
                scenario.with_faults(&[storm.with_count(times)]).with_world(super::set_slow_medium),
            );
        }
    }
    table
}

/// An event whose log page is corrupted.
fn corrupted_log_pages() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (event_name, result) in [
        ("error", event_dword0(0, 3, 0x01)),
        ("health", event_dword0(1, 1, 0x02)),
        ("namespaces", event_dword0(2, 0, 0x04)),
        ("ana", event_dword0(2, 3, 0x0c)),
    ] {
        for (how_name, forgery) in [
            ("noise", pokes::page_random_fault(None)),
            ("ones", pokes::page_fill_fault(None, 0xff)),
            ("zeroes", pokes::page_fill_fault(None, 0)),
            ("swallow", Fault::Drop),
            ("refuse", Fault::Status(0x4002)),
        ] {
            let musts = [ScenarioCheck::Attach, ScenarioCheck::Strike(2)];
            let plan = [
                PlannedFault::for_admin_opcode(
                    AdminOpcode::AsynchronousEventRequest,
                    Fault::Event { result, status: 0 },
                )
                .with_count(5),
                PlannedFault::for_admin_opcode(AdminOpcode::GetLogPage, forgery),
            ];
            let name = format!("events/log/{event_name}/{how_name}");
            table.push(
                Scenario::default_session(name, &musts)
                    .with_faults(&plan)
                    .with_world(super::set_slow_medium),
            );
        }
    }
    table
}

/// The controller rejects event requests.
fn rejected_event_requests() -> Vec<Scenario> {
    let mut table = Vec::new();
    for (name, status) in [("limit", 0x4105), ("opcode", 0x4001), ("aborted", 0x0007)] {
        for (often, times) in [("once", 1), ("for-good", FOR_GOOD)] {
            let fault = Fault::Event { result: 0, status };
            let refusal =
                PlannedFault::for_admin_opcode(AdminOpcode::AsynchronousEventRequest, fault);
            let musts = [
                ScenarioCheck::Attach,
                ScenarioCheck::Succeed,
                ScenarioCheck::Survive,
                ScenarioCheck::ReportsEvent("EventsRefused"),
            ];
            let scenario =
                Scenario::default_session(format!("events/refused/{name}/{often}"), &musts);
            let plan = [refusal.with_count(times).with_trigger(FaultTrigger::Always)];
            table.push(scenario.with_faults(&plan).with_world(super::set_slow_medium));
        }
    }
    table
}
