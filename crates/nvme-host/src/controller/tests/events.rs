//! Asynchronous events of the device.

use tenmil_base::Span;
use tenmil_wire::Status;
use tenmil_wire::log::event::{AsyncEvent as Notice, ErrorEvent, ImmediateEvent, NoticeEvent};

use super::scripted_device::ScriptedNamespace;
use super::{ControllerHarness, short_timeout_options};
use crate::{ControllerOptions, ControllerState, Event, NamespaceError};

const SMALL: ScriptedNamespace = ScriptedNamespace { blocks: 50, block_shift: 9 };

fn run_and_collect_events(harness: &mut ControllerHarness) -> Vec<Event> {
    harness.events.clear();
    harness.run_for(Span::from_ms(50));
    harness.events_without_times()
}

#[test]
fn attached_changed_and_detached_namespaces_yield_events() {
    let mut harness = ControllerHarness::ready();
    harness.device.state().change_namespace(9, Some(SMALL));
    assert_eq!(run_and_collect_events(&mut harness), [Event::NamespaceAttached { id: 9 }]);

    let grown = ScriptedNamespace { blocks: 80, ..SMALL };
    harness.device.state().change_namespace(9, Some(grown));
    let resized = Event::NamespaceResized { id: 9, from_blocks: 50, to_blocks: 80 };
    assert_eq!(run_and_collect_events(&mut harness), [resized]);

    let formatted = ScriptedNamespace { blocks: 10, block_shift: 12 };
    harness.device.state().change_namespace(9, Some(formatted));
    assert_eq!(run_and_collect_events(&mut harness), [Event::NamespaceChanged { id: 9 }]);
    assert_eq!(harness.controller.namespace(9).unwrap().block_size, 4096);

    harness.device.state().change_namespace(9, None);
    assert_eq!(run_and_collect_events(&mut harness), [Event::NamespaceDetached { id: 9 }]);
    assert!(harness.controller.namespace(9).is_none());
    assert_eq!(run_and_collect_events(&mut harness), []);
}

#[test]
fn a_change_during_a_scan_is_found_by_the_next() {
    let mut harness = ControllerHarness::ready();
    harness.device.state().change_namespace(2, Some(SMALL));
    // The scan is in progress: its list has been read, or will be.
    for _ in 0..40 {
        harness.step(tenmil_base::Instant::NEVER);
    }
    harness.device.state().change_namespace(3, Some(SMALL));
    harness.run_for(Span::from_ms(50));
    let ids: Vec<u32> = harness.controller.namespaces().map(|found| found.id).collect();
    assert_eq!(ids, [1, 2, 3]);
}

#[test]
fn more_changes_than_the_list_holds_are_all_found() {
    let mut harness = ControllerHarness::ready();
    {
        let mut state = harness.device.state();
        state.changed.insert(u32::MAX);
        state.namespaces.insert(5, SMALL);
        state.namespaces.insert(1, SMALL);
        state.raise_event(2, 0, 4);
    }
    let reported = run_and_collect_events(&mut harness);
    assert_eq!(reported, [Event::NamespaceChanged { id: 1 }, Event::NamespaceAttached { id: 5 }]);
}

#[test]
fn invalid_namespace_list_is_reported_and_known_namespaces_are_kept() {
    let mut harness = ControllerHarness::ready();
    harness.device.state().active_list = Some(vec![9, 9]);
    harness.device.state().change_namespace(9, Some(SMALL));
    let reported = run_and_collect_events(&mut harness);
    assert!(matches!(
        reported[..],
        [Event::NamespaceListUnusable { why: NamespaceError::InvalidData(_) }]
    ));
    assert_eq!(harness.controller.namespaces().count(), 1);
    harness.assert_state(ControllerState::Ready);
}

#[test]
fn health_event_includes_its_log_page() {
    let mut harness = ControllerHarness::ready();
    {
        let mut state = harness.device.state();
        state.critical_warning = 0b101;
        state.raise_event(1, 2, 2);
    }
    let reported = run_and_collect_events(&mut harness);
    let [Event::Health(health)] = &reported[..] else { panic!("{reported:?}") };
    assert_eq!(health.critical_warning().0, 0b101);
    assert!(health.critical_warning().spare_below_threshold());
}

#[test]
fn error_firmware_and_ana_notices_yield_their_events() {
    let mut harness = ControllerHarness::ready();
    {
        let mut state = harness.device.state();
        state.raise_event(0, 4, 1);
        state.raise_event(2, 1, 3);
        state.raise_event(2, 3, 0x0c);
        state.raise_event(3, 0, 0);
    }
    let reported = run_and_collect_events(&mut harness);
    let transient = ErrorEvent::TransientInternalError;
    let shutdown = Notice::Immediate(ImmediateEvent::NormalShutdown);
    let expected = [
        Event::Notice { what: shutdown, log_page: 0 },
        Event::ErrorReported { what: transient, newest: None },
        Event::FirmwareActivation,
        Event::AccessChanged,
    ];
    assert_eq!(reported, expected);
    let logs: Vec<u8> = harness
        .device
        .state()
        .fetched
        .iter()
        .filter(|(opcode, _)| *opcode == 2)
        .map(|(_, cdw10)| cdw10.to_le_bytes()[0])
        .collect();
    assert_eq!(logs, [1, 3, 0x0c], "each page is read once, to let the next event come");
}

#[test]
fn unknown_notice_is_forwarded() {
    let mut harness = ControllerHarness::ready();
    harness.device.state().raise_event(2, 0x77, 0xc5);
    let what = Notice::Notice(NoticeEvent::Reserved(0x77));
    assert_eq!(run_and_collect_events(&mut harness), [Event::Notice { what, log_page: 0xc5 }]);
}

#[test]
fn outstanding_event_requests_are_limited_by_option_and_aerl() {
    for (wanted, aerl, held) in [(4, 7, 4), (4, 0, 1), (100, 255, 8), (0, 7, 0)] {
        let asked = ControllerOptions { event_requests: wanted, ..short_timeout_options() };
        let mut harness =
            ControllerHarness::ready_with(asked, |state| state.identity.push((259, vec![aerl])));
        harness.run_for(Span::from_ms(20));
        assert_eq!(harness.device.state().event_requests.len(), held, "{wanted} {aerl}");
        for _ in 0..20 {
            harness.device.state().raise_event(7, 0, 0xc0);
            harness.run_for(Span::from_ms(20));
        }
        assert_eq!(harness.device.state().event_requests.len(), held, "and after events, too");
    }
}

#[test]
fn rejected_event_configuration_falls_back_to_announced_notices() {
    // OAES: namespaces, access, the discovery log. LPA: telemetry.
    let announced = 1_u32 << 8 | 1 << 11 | 1 << 31;
    let reported = |known, announced: u32| {
        let mut harness = ControllerHarness::with_device(short_timeout_options(), |state| {
            state.identity.push((92, announced.to_le_bytes().to_vec()));
            state.identity.push((261, vec![1 << 3]));
            state.events_known = known;
        });
        harness.run_until(|event| *event == Event::Ready);
        let (reported, on) = (harness.events_without_times(), harness.device.state().events_on);
        let refused = reported.iter().find_map(|event| match event {
            Event::EventConfigurationRefused { has_notices, .. } => Some(*has_notices),
            _ => None,
        });
        harness.run_for(Span::from_ms(20));
        assert_eq!(
            harness.device.state().event_requests.len(),
            4,
            "which bring errors in any case"
        );
        (on, refused)
    };
    assert_eq!(reported(u32::MAX, announced), (0x1f | 1 << 10 | announced, None));
    assert_eq!(reported(0x0f | announced, announced), (announced, Some(true)));
    assert_eq!(reported(0, announced), (0, Some(false)));
}

#[test]
fn rejected_event_request_is_not_repeated() {
    let mut harness = ControllerHarness::ready_with(short_timeout_options(), |state| {
        state.refuse.insert(0x0c, Status::INVALID_OPCODE);
    });
    let reported = run_and_collect_events(&mut harness);
    let refused = |left| Event::EventsRefused { status: Status::INVALID_OPCODE, left };
    assert!(reported.contains(&refused(0)) || harness.device.state().event_requests.is_empty());
    let sent = harness.device.state().fetched.iter().filter(|(opcode, _)| *opcode == 0x0c).count();
    assert_eq!(sent, 4);
    harness.run_for(Span::from_secs(1));
    let sent = harness.device.state().fetched.iter().filter(|(opcode, _)| *opcode == 0x0c).count();
    assert_eq!(sent, 4);
    harness.assert_state(ControllerState::Ready);
}
