//! Requests of the owner.

use tenmil_base::{Dma, IoStatus, Memory, Segment, Span};
use tenmil_wire::admin::{
    AttachmentSelect, CommitAction, FormatNvm, GetFeatures, GetLogPage, Identify, SelfTestCode,
    SetFeatures,
};
use tenmil_wire::{Command, Status};

use super::{World, options};
use crate::{Event, Injection, InjectionSide, RequestError, State};

fn completions(world: &World) -> Vec<(u64, IoStatus)> {
    let told = world.events.iter().filter_map(|(_, event)| match event {
        Event::AdminCompleted(answer) => Some((answer.token, answer.status)),
        _ => None,
    });
    told.collect()
}

fn page(world: &World) -> Segment {
    world.memory.allocate(4096).unwrap()
}

#[test]
fn identify_and_log_pages_land_in_the_owners_memory() {
    let mut world = World::ready();
    world.device.script().critical_warning = 3;
    let (first, second) = (page(&world), page(&world).slice(0, 512).unwrap());
    let identify = Identify { cns: 1, ..Identify::default() };
    world.controller.submit_identify(world.now, 1, identify, first).unwrap();
    let health = GetLogPage { lid: 2, nsid: u32::MAX, ..GetLogPage::default() };
    world.controller.get_log_page(world.now, 2, health, second).unwrap();
    world.run(Span::from_ms(5));
    assert_eq!(completions(&world), [(1, IoStatus::SUCCESS), (2, IoStatus::SUCCESS)]);
    let mut serial = [0; 8];
    world.memory.load(first.slice(4, 8).unwrap(), &mut serial).unwrap();
    assert_eq!(&serial, b"SERIAL-1");
    let mut warning = [0; 1];
    world.memory.load(second.slice(0, 1).unwrap(), &mut warning).unwrap();
    assert_eq!(warning, [3]);
}

#[test]
fn a_refusal_of_the_controllers_comes_back_as_it_is() {
    let mut world = World::ready();
    world.submit_admin(9, 0xc1);
    world.run(Span::from_ms(5));
    assert_eq!(completions(&world), [(9, IoStatus(Status::INVALID_OPCODE.0))]);
}

#[test]
fn events_and_aborts_keep_their_room_however_much_the_owner_sends() {
    let mut world = World::ready();
    world.device.script().mute.insert(0x0a);
    let mut sent = 0;
    let refused = loop {
        let command = Command::new(0x0a);
        match world.controller.submit_admin(world.now, sent, command, None) {
            Ok(()) => sent += 1,
            Err(refusal) => break refusal,
        }
    };
    assert_eq!((refused, sent), (RequestError::Full, 63 - 20));
    // A namespace appears: its event, its log page and its scan have slots.
    let one = super::device::ScriptedNamespace { blocks: 1, block_shift: 9 };
    world.device.script().change(2, Some(one));
    world.run_until(|event| *event == Event::NamespaceAttached { id: 2 });
    world.run_until(|event| matches!(event, Event::CommandOverdue { queue: 0, .. }));
}

#[test]
fn commands_that_the_driver_keeps_account_of_are_refused() {
    let mut world = World::ready();
    for opcode in [0x00, 0x01, 0x04, 0x05, 0x0c, 0x7c] {
        let refused = world.controller.submit_admin(world.now, 1, Command::new(opcode), None);
        assert!(matches!(refused, Err(RequestError::Reserved { .. })), "{opcode:#x}");
    }
}

#[test]
fn data_longer_than_the_controller_takes_are_refused() {
    let mut world = World::ready();
    let data = world.memory.allocate(256 * 1024).unwrap();
    for (len_bytes, fits) in [(131_072, true), (131_076, false)] {
        let data = data.slice(0, len_bytes).unwrap();
        let log = GetLogPage { lid: 0xc0, ..GetLogPage::default() };
        let sent = world.controller.get_log_page(world.now, 1, log, data);
        assert_eq!(sent.is_ok(), fits, "{len_bytes}: {sent:?}");
    }
    let log = GetLogPage::default();
    for len_bytes in [0, 2, 4097] {
        let data = data.slice(0, len_bytes).unwrap();
        assert!(world.controller.get_log_page(world.now, 1, log, data).is_err());
    }
    let short = data.slice(0, 4092).unwrap();
    assert!(world.controller.submit_identify(world.now, 1, Identify::default(), short).is_err());
}

#[test]
fn long_transfers_can_be_sent_again_and_again() {
    let mut world = World::ready();
    let data = world.memory.allocate(65_536).unwrap();
    for token in 0..20 {
        let log = GetLogPage { lid: 0xc0, ..GetLogPage::default() };
        world.controller.get_log_page(world.now, token, log, data).unwrap();
        world.run(Span::from_ms(1));
    }
    assert_eq!(completions(&world).len(), 20);
}

#[test]
fn helpers_send_what_their_names_say_and_only_to_controllers_that_have_it() {
    let mut without = World::ready();
    let data = page(&without);
    let format = FormatNvm { nsid: 1, ..FormatNvm::default() };
    let now = without.now;
    let refused = [
        without.controller.format(now, Span::from_secs(1), 1, format),
        without.controller.create_namespace(now, 1, data),
        without.controller.delete_namespace(now, 1, 1),
        without.controller.attach_namespace(now, 1, 1, AttachmentSelect::Attach, data),
        without.controller.commit_firmware(now, 1, 1, CommitAction::Activate),
        without.controller.self_test(now, 1, 0, SelfTestCode::Short),
        without.controller.firmware_chunks(data).map(drop),
    ];
    for refusal in refused {
        assert!(matches!(refusal, Err(RequestError::Unsupported { .. })), "{refusal:?}");
    }

    let mut world = World::ready_with(options(), |script| {
        script.identity.push((256, vec![0x1e])); // OACS: format, firmware, namespaces, self-test
    });
    let data = page(&world);
    let now = world.now;
    let before = world.device.script().fetched.len();
    world.controller.format(now, Span::from_secs(1), 1, format).unwrap();
    world.controller.create_namespace(now, 2, data).unwrap();
    world.controller.delete_namespace(now, 3, 4).unwrap();
    world.controller.attach_namespace(now, 4, 4, AttachmentSelect::Detach, data).unwrap();
    for (index, (command, piece)) in world.controller.firmware_chunks(data).unwrap().enumerate() {
        let token = 10 + index as u64;
        world.controller.submit_admin(now, token, command, Some(piece)).unwrap();
    }
    world.controller.commit_firmware(now, 5, 2, CommitAction::ActivateNow).unwrap();
    world.controller.self_test(now, 6, u32::MAX, SelfTestCode::Extended).unwrap();
    let feature = GetFeatures { fid: 2, ..GetFeatures::default() };
    world.controller.get_features(now, 7, feature, None).unwrap();
    let feature = SetFeatures { fid: 2, cdw11: 1, ..SetFeatures::default() };
    world.controller.set_features(now, 8, feature, None).unwrap();
    world.run(Span::from_ms(5));
    let expected = [
        (0x80, 0),
        (0x0d, 0),
        (0x0d, 1),
        (0x15, 1),
        (0x11, 1023),
        (0x10, 3 << 3 | 2),
        (0x14, 2),
        (0x0a, 2),
        (0x09, 2),
    ];
    assert_eq!(world.device.script().fetched[before..], expected);
    assert!(world.controller.commit_firmware(now, 9, 8, CommitAction::Activate).is_err());
}

#[test]
fn a_time_limit_of_its_own_replaces_the_usual_one() {
    let mut world = World::ready();
    world.device.script().mute.insert(0x80);
    let long = Some(Span::from_secs(2));
    let command = Command::new(0x80);
    world.controller.submit_admin_within(world.now, long, 1, command, None).unwrap();
    let took = world.run_until(|event| matches!(event, Event::CommandOverdue { queue: 0, .. }));
    assert!(took >= Span::from_secs(2) && took < Span::from_ms(2_500), "{took}");
}

#[test]
fn the_owner_may_abort_its_own_commands_by_token() {
    let mut world = World::ready();
    world.device.script().mute.insert(0x0a);
    world.submit_admin(5, 0x0a);
    world.run(Span::from_ms(1));
    let now = world.now;
    let missing = world.controller.abort_admin(now, 8, 77);
    assert_eq!(missing, Err(RequestError::NoSuchToken { token: 77 }));
    world.controller.abort_admin(now, 8, 5).unwrap();
    world.run(Span::from_ms(5));
    let (opcode, cdw10) = *world.device.script().fetched.last().unwrap();
    assert_eq!((opcode, cdw10 & 0xffff), (8, 0), "of the admin queue");
    assert_eq!(completions(&world), [(8, IoStatus::SUCCESS)]);
}

#[test]
fn the_owners_aborts_count_against_the_limit_of_the_controller() {
    let mut world = World::ready_with(options(), |script| script.identity.push((258, vec![1])));
    world.device.script().mute.insert(0x08);
    let abort = Command::new(0x08);
    for token in [1, 2] {
        world.controller.submit_admin(world.now, token, abort, None).unwrap();
    }
    let refused = world.controller.submit_admin(world.now, 3, abort, None);
    assert_eq!(refused, Err(RequestError::Full));
}

#[test]
fn nothing_is_taken_while_the_controller_is_not_ready() {
    let mut world = World::new();
    let now = world.now;
    let refused = world.controller.submit_admin(now, 1, Command::new(0x0a), None);
    assert_eq!(refused, Err(RequestError::NotReady));
    let mut world = World::ready();
    world.controller.reset(world.now).unwrap();
    let refused = world.controller.submit_admin(world.now, 1, Command::new(0x0a), None);
    assert_eq!(refused, Err(RequestError::NotReady));
}

#[test]
fn errors_can_be_injected_into_admin_commands() {
    let mut world = World::ready();
    let injection = Injection {
        opcode: 0x0a,
        side: InjectionSide::Submission,
        status: IoStatus::INTERNAL_ERROR,
        count: 1,
    };
    world.controller.admin_queue().inject(injection);
    world.submit_admin(1, 0x0a);
    world.submit_admin(2, 0x0a);
    world.run(Span::from_ms(5));
    let mut completions = completions(&world);
    completions.sort_unstable_by_key(|(token, _)| *token);
    assert_eq!(completions, [(1, IoStatus::INTERNAL_ERROR), (2, IoStatus::SUCCESS)]);
    world.assert_state(State::Ready);
}
