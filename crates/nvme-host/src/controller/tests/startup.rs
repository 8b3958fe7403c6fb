//! Initialization from the start to ready, and all of its failures.

use tenmil_base::{ErrorCategory, Instant, Span};
use tenmil_wire::Status;

use super::device::ScriptedNamespace;
use super::memory::SharedMemory;
use super::{Device, World, options};
use crate::bringup::BringupError;
use crate::{
    Controller, ControllerError, ControllerOptions, Event, InvalidValue, NamespaceError,
    ResetCause, State,
};

/// Runs until the controller is ready or has ended, and returns its last event.
fn outcome(world: &mut World) -> Event {
    world.run_until(|event| matches!(event, Event::Ready | Event::Dead(_) | Event::Removed));
    world.told().pop().unwrap()
}

#[test]
fn a_well_behaved_controller_becomes_ready_with_its_namespaces() {
    let mut world = World::with(options(), |script| {
        script.namespaces.insert(7, ScriptedNamespace { blocks: 50, block_shift: 9 });
    });
    world.assert_state(State::Starting);
    let took = world.run_until(|event| *event == Event::Ready);
    assert!(took < Span::from_ms(20), "{took}");
    let attached = |id| Event::NamespaceAttached { id };
    assert_eq!(world.told(), [attached(1), attached(7), Event::Ready]);
    world.assert_state(State::Ready);

    let identity = world.controller.identity().unwrap();
    assert_eq!(identity.serial, "SERIAL-1");
    assert_eq!(identity.model, "SCRIPTED SSD");
    assert_eq!(identity.limits.transfer_bytes_max, Some(131_072));
    assert_eq!(world.controller.queue_pairs_max(), 8);
    let sizes = world.controller.namespaces().map(|found| (found.id, found.block_count));
    assert_eq!(sizes.collect::<Vec<_>>(), [(1, 1000), (7, 50)]);
    assert_eq!(world.controller.namespace(7).unwrap().block_size, 512);
    assert_eq!(world.controller.namespace(1).unwrap().names.uuid, [1; 16]);
    assert_eq!(world.device.script().faults, []);
}

#[test]
fn start_up_asks_in_the_order_of_the_specification_and_only_what_suits() {
    let world = World::ready();
    let opcodes: Vec<(u8, u32)> = world.device.script().fetched.clone();
    let events = opcodes.iter().filter(|(opcode, _)| *opcode == 0x0c).count();
    assert_eq!(events, 4);
    let asked: Vec<_> = opcodes.iter().copied().filter(|(opcode, _)| *opcode != 0x0c).collect();
    let expected =
        [(6, 1), (9, 7), (9, 0x0b), (6, 2), (6, 3), (6, 0)].map(|(opcode, cdw10)| (opcode, cdw10));
    assert_eq!(asked, expected);
}

#[test]
fn optional_questions_are_asked_if_wanted_and_offered() {
    let wanted = ControllerOptions {
        shadow_doorbells: true,
        keep_alive: Some(Span::from_ms(250)),
        ..options()
    };
    let world = World::with(wanted, |script| {
        script.vs = 0x0002_0000;
        script.identity.push((256, vec![0, 1])); // OACS: doorbell buffer
        script.identity.push((320, vec![1, 0])); // KAS: 100 ms
        script.identity.push((97, vec![0x80])); // CTRATT: ELBAS
    });
    let mut world = world;
    assert_eq!(outcome(&mut world), Event::Ready);
    let fetched = world.device.script().fetched.clone();
    for (opcode, cdw10) in [(6, 6), (9, 0x16), (0x7c, 0), (9, 0x0f)] {
        assert!(fetched.contains(&(opcode, cdw10)), "{opcode:#x} {cdw10:#x}");
    }
    // The device supported none of them except the features, and none was needed.
    assert_eq!(world.controller.queue_pairs_max(), 8);
}

#[test]
fn a_keep_alive_goes_out_twice_in_its_time() {
    let wanted = ControllerOptions { keep_alive: Some(Span::from_ms(250)), ..options() };
    let mut world = World::ready_with(wanted, |script| script.identity.push((320, vec![1, 0])));
    let before = world.device.script().fetched.len();
    world.run(Span::from_secs(3));
    let fetched = world.device.script().fetched[before..].to_vec();
    // 250 ms are three units of 100.
    assert_eq!(fetched.iter().filter(|(opcode, _)| *opcode == 0x18).count(), 20);
}

#[test]
fn fewer_queues_than_wanted_are_what_there_is() {
    for (granted, expected) in [(1, 1), (8, 8), (300, 128)] {
        let world = World::ready_with(options(), |script| script.granted = granted);
        assert_eq!(world.controller.queue_pairs_max(), expected);
    }
}

/// Unplugs the device at its first register read, at its second, and so on, until initialization ends
/// before that.
#[test]
fn vanishing_at_any_register_read_is_removal_and_cuts_the_device_off() {
    let mut reads = 0;
    for gone_at_read in 1.. {
        let memory = SharedMemory::default();
        let device = Device::new(&memory);
        device.script().gone_at_read = gone_at_read;
        let made = Controller::new(device.clone(), memory.clone(), options());
        if gone_at_read == 1 {
            let error = made.err().unwrap();
            assert!(matches!(error, ControllerError::Bringup(BringupError::Removed { .. })));
            assert_eq!(memory.allocations(), 0, "nothing is kept");
            continue;
        }
        let mut world = World::new();
        world.device.script().gone_at_read = gone_at_read;
        match outcome(&mut world) {
            Event::Removed => {
                world.assert_state(State::Removed);
                assert!(world.memory.is_cut_off());
            }
            Event::Ready => {
                reads = gone_at_read;
                break;
            }
            other => panic!("at read {gone_at_read}: {other:?}"),
        }
    }
    assert!(reads > 8, "CAP twice, VS, CC, CSTS before and after, and pauses: {reads}");
}

#[test]
fn a_controller_that_is_never_ready_is_dead_within_its_deadline() {
    for lag_ms in (480..=520).step_by(4) {
        let mut world = World::with(options(), |script| script.enable_lag = Span::from_ms(lag_ms));
        match outcome(&mut world) {
            Event::Ready => assert!(lag_ms <= 500, "{lag_ms}"),
            Event::Dead(error) => {
                assert!(lag_ms > 500, "{lag_ms}");
                assert_eq!(error.category(), ErrorCategory::Remote);
                let text = error.to_string();
                assert_eq!(text, "bring up: CSTS is 0x00000000 after 500 ms, expected RDY=1");
                assert!(world.now <= Instant { ns: 501_000_000 }, "{:?}", world.now);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_controller_that_answers_nothing_is_dead_within_two_deadlines() {
    for opcode in [0x06, 0x09] {
        let mut world = World::with(options(), |script| {
            script.mute.extend([opcode, 0x08]);
        });
        let Event::Dead(error) = outcome(&mut world) else { panic!("{:?}", world.told()) };
        assert!(matches!(error, ControllerError::StartupFailed { .. }), "{error}");
        assert_eq!(error.category().exit_code(), 3);
        assert!(world.now <= Instant { ns: 500_000_000 }, "{:?}", world.now);
        assert!(world.memory.is_cut_off());
    }
}

#[test]
fn a_fatal_status_before_start_up_is_done_is_the_end() {
    let mut world = World::with(options(), |script| script.mute.extend([0x06]));
    world.run(Span::from_ms(20));
    world.device.script().fatal = true;
    let expected = ControllerError::StartupFailed { cause: ResetCause::Fatal { csts: 3 } };
    assert_eq!(outcome(&mut world), Event::Dead(expected));
    assert!(expected.hint().unwrap().contains("power-cycle"));
}

#[test]
fn refusing_what_cannot_be_done_without_is_the_end_and_the_rest_is_not() {
    let fatal = |change: fn(&mut super::device::Script)| {
        let mut world = World::with(options(), change);
        outcome(&mut world)
    };
    let refused = |command| {
        Event::Dead(ControllerError::CommandFailed { command, status: Status::INVALID_FIELD })
    };
    let identify = fatal(|script| script.refuse = [(6, Status::INVALID_FIELD)].into());
    assert_eq!(identify, refused("identify controller"));
    let queues = fatal(|script| script.refuse_features = [7].into());
    assert_eq!(queues, refused("set number of queues"));
    let events = fatal(|script| script.refuse_features = [0x0b].into());
    assert_eq!(events, Event::Ready);
}

#[test]
fn a_discovery_controller_that_does_not_say_so_is_asked_for_nothing_but_itself() {
    let discovery = ControllerOptions { is_discovery: true, ..options() };
    let mut world = World::with(discovery, |script| {
        script.identity.push((512, vec![0; 2]));
        script.refuse_features = [7].into();
        script.vs = 0x0002_0000;
    });
    assert_eq!(outcome(&mut world), Event::Ready);
    let script = world.device.script();
    let low = |cdw10: u32| cdw10 & 0xff;
    let asked = |opcode| {
        let of_it = script.fetched.iter().filter(move |(of, _)| *of == opcode);
        of_it.map(|(_, cdw10)| low(*cdw10)).collect::<Vec<u32>>()
    };
    assert_eq!((asked(0x06), asked(0x09)), (vec![1], vec![0x0b]));
}

#[test]
fn lies_are_told_by_the_name_of_their_field() {
    let lie = |change: fn(&mut super::device::Script)| {
        let mut world = World::with(options(), change);
        match outcome(&mut world) {
            Event::Dead(ControllerError::InvalidData(InvalidValue { field, found, .. })) => {
                (field, found)
            }
            other => panic!("{other:?}"),
        }
    };
    let entries = lie(|script| script.identity.push((512, vec![0x55])));
    assert_eq!(entries, ("identify controller: SQES", 0x55));
    let list = lie(|script| script.active_list = Some(vec![3, 2]));
    assert_eq!(list, ("active namespace list", 2));
    let past = lie(|script| script.active_list = Some(vec![257]));
    assert_eq!(past, ("active namespace list", 257));
}

#[test]
fn a_namespace_of_nonsense_leaves_the_others_usable() {
    let mut world = World::with(options(), |script| {
        script.namespaces.insert(2, ScriptedNamespace { blocks: 10, block_shift: 3 });
    });
    assert_eq!(outcome(&mut world), Event::Ready);
    let told = world.told();
    assert_eq!(told[0], Event::NamespaceAttached { id: 1 });
    assert!(
        matches!(told[1], Event::NamespaceUnusable { id: 2, why: NamespaceError::InvalidData(lie) }
            if lie.field == "identify namespace: LBADS")
    );
    assert!(world.controller.namespace(2).is_none());
}

#[test]
fn what_the_controller_does_not_write_is_not_taken_from_an_older_answer() {
    let mut world = World::with(options(), |script| {
        script.namespaces.insert(2, ScriptedNamespace { blocks: 10, block_shift: 9 });
        script.withheld.insert(2);
    });
    assert_eq!(outcome(&mut world), Event::Ready);
    assert_eq!(world.told(), [Event::NamespaceAttached { id: 1 }, Event::Ready]);
}

#[test]
fn without_memory_nothing_is_begun_and_nothing_kept() {
    let enough = {
        let world = World::new();
        world.memory.allocations()
    };
    assert!(enough >= 4);
    for pages in 0..40 {
        let memory = SharedMemory::with_limit(pages * 4096);
        let device = Device::new(&memory);
        match Controller::new(device, memory.clone(), options()) {
            Ok(controller) => {
                drop(controller);
                assert_eq!(memory.allocations(), 0, "{pages} pages");
                assert!(pages >= enough);
                return;
            }
            Err(error) => {
                assert_eq!(error.category(), ErrorCategory::Environment);
                assert_eq!(memory.allocations(), 0, "{pages} pages");
            }
        }
    }
    panic!("forty pages are enough for anybody");
}
