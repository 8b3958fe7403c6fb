//! Asynchronous events of the device.

use tenmil_base::Span;
use tenmil_wire::Status;
use tenmil_wire::log::event::{AsyncEvent as Notice, ErrorEvent, ImmediateEvent, NoticeEvent};

use super::device::ScriptedNamespace;
use super::{World, options};
use crate::{ControllerOptions, Event, NamespaceError, State};

const SMALL: ScriptedNamespace = ScriptedNamespace { blocks: 50, block_shift: 9 };

fn settle(world: &mut World) -> Vec<Event> {
    world.events.clear();
    world.run(Span::from_ms(50));
    world.told()
}

#[test]
fn namespaces_come_change_and_go_as_events() {
    let mut world = World::ready();
    world.device.script().change(9, Some(SMALL));
    assert_eq!(settle(&mut world), [Event::NamespaceAttached { id: 9 }]);

    let grown = ScriptedNamespace { blocks: 80, ..SMALL };
    world.device.script().change(9, Some(grown));
    let resized = Event::NamespaceResized { id: 9, from_blocks: 50, to_blocks: 80 };
    assert_eq!(settle(&mut world), [resized]);

    let formatted = ScriptedNamespace { blocks: 10, block_shift: 12 };
    world.device.script().change(9, Some(formatted));
    assert_eq!(settle(&mut world), [Event::NamespaceChanged { id: 9 }]);
    assert_eq!(world.controller.namespace(9).unwrap().block_size, 4096);

    world.device.script().change(9, None);
    assert_eq!(settle(&mut world), [Event::NamespaceDetached { id: 9 }]);
    assert!(world.controller.namespace(9).is_none());
    assert_eq!(settle(&mut world), []);
}

#[test]
fn a_change_during_a_scan_is_found_by_the_next() {
    let mut world = World::ready();
    world.device.script().change(2, Some(SMALL));
    // The scan is in progress: its list has been read, or will be.
    for _ in 0..40 {
        world.step(tenmil_base::Instant::NEVER);
    }
    world.device.script().change(3, Some(SMALL));
    world.run(Span::from_ms(50));
    let ids: Vec<u32> = world.controller.namespaces().map(|found| found.id).collect();
    assert_eq!(ids, [1, 2, 3]);
}

#[test]
fn more_changes_than_the_list_holds_are_all_found() {
    let mut world = World::ready();
    {
        let mut script = world.device.script();
        script.changed.insert(u32::MAX);
        script.namespaces.insert(5, SMALL);
        script.namespaces.insert(1, SMALL);
        script.raise(2, 0, 4);
    }
    let told = settle(&mut world);
    assert_eq!(told, [Event::NamespaceChanged { id: 1 }, Event::NamespaceAttached { id: 5 }]);
}

#[test]
fn a_list_of_nonsense_is_told_and_what_was_known_is_kept() {
    let mut world = World::ready();
    world.device.script().active_list = Some(vec![9, 9]);
    world.device.script().change(9, Some(SMALL));
    let told = settle(&mut world);
    assert!(matches!(
        told[..],
        [Event::NamespaceListUnusable { why: NamespaceError::InvalidData(_) }]
    ));
    assert_eq!(world.controller.namespaces().count(), 1);
    world.assert_state(State::Ready);
}

#[test]
fn health_comes_with_its_log_page() {
    let mut world = World::ready();
    {
        let mut script = world.device.script();
        script.critical_warning = 0b101;
        script.raise(1, 2, 2);
    }
    let told = settle(&mut world);
    let [Event::Health(health)] = &told[..] else { panic!("{told:?}") };
    assert_eq!(health.critical_warning().0, 0b101);
    assert!(health.critical_warning().spare_below_threshold());
}

#[test]
fn errors_firmware_and_access_are_told_as_what_they_are() {
    let mut world = World::ready();
    {
        let mut script = world.device.script();
        script.raise(0, 4, 1);
        script.raise(2, 1, 3);
        script.raise(2, 3, 0x0c);
        script.raise(3, 0, 0);
    }
    let told = settle(&mut world);
    let transient = ErrorEvent::TransientInternalError;
    let shutdown = Notice::Immediate(ImmediateEvent::NormalShutdown);
    let expected = [
        Event::Notice { what: shutdown, log_page: 0 },
        Event::ErrorReported { what: transient, newest: None },
        Event::FirmwareActivation,
        Event::AccessChanged,
    ];
    assert_eq!(told, expected);
    let logs: Vec<u8> = world
        .device
        .script()
        .fetched
        .iter()
        .filter(|(opcode, _)| *opcode == 2)
        .map(|(_, cdw10)| cdw10.to_le_bytes()[0])
        .collect();
    assert_eq!(logs, [1, 3, 0x0c], "each page is read once, to let the next event come");
}

#[test]
fn an_event_without_a_name_is_passed_on() {
    let mut world = World::ready();
    world.device.script().raise(2, 0x77, 0xc5);
    let what = Notice::Notice(NoticeEvent::Reserved(0x77));
    assert_eq!(settle(&mut world), [Event::Notice { what, log_page: 0xc5 }]);
}

#[test]
fn as_many_requests_are_held_as_both_sides_want() {
    for (wanted, aerl, held) in [(4, 7, 4), (4, 0, 1), (100, 255, 8), (0, 7, 0)] {
        let asked = ControllerOptions { event_requests: wanted, ..options() };
        let mut world = World::ready_with(asked, |script| script.identity.push((259, vec![aerl])));
        world.run(Span::from_ms(20));
        assert_eq!(world.device.script().event_requests.len(), held, "{wanted} {aerl}");
        for _ in 0..20 {
            world.device.script().raise(7, 0, 0xc0);
            world.run(Span::from_ms(20));
        }
        assert_eq!(world.device.script().event_requests.len(), held, "and after events, too");
    }
}

#[test]
fn a_controller_that_refuses_warnings_still_tells_of_what_it_announces() {
    // OAES: namespaces, access, the discovery log. LPA: telemetry.
    let announced = 1_u32 << 8 | 1 << 11 | 1 << 31;
    let told = |known, announced: u32| {
        let mut world = World::with(options(), |script| {
            script.identity.push((92, announced.to_le_bytes().to_vec()));
            script.identity.push((261, vec![1 << 3]));
            script.events_known = known;
        });
        world.run_until(|event| *event == Event::Ready);
        let (told, on) = (world.told(), world.device.script().events_on);
        let refused = told.iter().find_map(|event| match event {
            Event::EventConfigurationRefused { has_notices, .. } => Some(*has_notices),
            _ => None,
        });
        world.run(Span::from_ms(20));
        assert_eq!(world.device.script().event_requests.len(), 4, "which bring errors in any case");
        (on, refused)
    };
    assert_eq!(told(u32::MAX, announced), (0x1f | 1 << 10 | announced, None));
    assert_eq!(told(0x0f | announced, announced), (announced, Some(true)));
    assert_eq!(told(0, announced), (0, Some(false)));
}

#[test]
fn a_request_that_is_refused_is_not_sent_again_and_again() {
    let mut world = World::ready_with(options(), |script| {
        script.refuse.insert(0x0c, Status::INVALID_OPCODE);
    });
    let told = settle(&mut world);
    let refused = |left| Event::EventsRefused { status: Status::INVALID_OPCODE, left };
    assert!(told.contains(&refused(0)) || world.device.script().event_requests.is_empty());
    let sent = world.device.script().fetched.iter().filter(|(opcode, _)| *opcode == 0x0c).count();
    assert_eq!(sent, 4);
    world.run(Span::from_secs(1));
    let sent = world.device.script().fetched.iter().filter(|(opcode, _)| *opcode == 0x0c).count();
    assert_eq!(sent, 4);
    world.assert_state(State::Ready);
}
