//! Requests of the owner.

use tenmil_base::{Dma, IoStatus, Memory, Segment, Span};
use tenmil_wire::admin::{
    AttachmentSelect, CommitAction, FormatNvm, GetFeatures, GetLogPage, Identify, SelfTestCode,
    SetFeatures,
};
use tenmil_wire::{Command, Status};

use super::{ControllerHarness, short_timeout_options};
use crate::{ControllerState, Event, Injection, InjectionSide, RequestError};

fn admin_completions(harness: &ControllerHarness) -> Vec<(u64, IoStatus)> {
    let reported = harness.events.iter().filter_map(|(_, event)| match event {
        Event::AdminCompleted(answer) => Some((answer.token, answer.status)),
        _ => None,
    });
    reported.collect()
}

fn allocate_page(harness: &ControllerHarness) -> Segment {
    harness.memory.allocate(4096).unwrap()
}

#[test]
fn identify_and_log_pages_land_in_the_owners_memory() {
    let mut harness = ControllerHarness::ready();
    harness.device.state().critical_warning = 3;
    let (first, second) = (allocate_page(&harness), allocate_page(&harness).slice(0, 512).unwrap());
    let identify = Identify { cns: 1, ..Identify::default() };
    harness.controller.submit_identify(harness.now, 1, identify, first).unwrap();
    let health = GetLogPage { lid: 2, nsid: u32::MAX, ..GetLogPage::default() };
    harness.controller.submit_get_log_page(harness.now, 2, health, second).unwrap();
    harness.run_for(Span::from_ms(5));
    assert_eq!(admin_completions(&harness), [(1, IoStatus::SUCCESS), (2, IoStatus::SUCCESS)]);
    let mut serial = [0; 8];
    harness.memory.load(first.slice(4, 8).unwrap(), &mut serial).unwrap();
    assert_eq!(&serial, b"SERIAL-1");
    let mut warning = [0; 1];
    harness.memory.load(second.slice(0, 1).unwrap(), &mut warning).unwrap();
    assert_eq!(warning, [3]);
}

#[test]
fn error_status_of_the_controller_is_returned_unchanged() {
    let mut harness = ControllerHarness::ready();
    harness.submit_admin(9, 0xc1);
    harness.run_for(Span::from_ms(5));
    assert_eq!(admin_completions(&harness), [(9, IoStatus(Status::INVALID_OPCODE.0))]);
}

#[test]
fn owner_commands_leave_slots_for_events_and_aborts() {
    let mut harness = ControllerHarness::ready();
    harness.device.state().unanswered_opcodes.insert(0x0a);
    let mut sent = 0;
    let refused = loop {
        let command = Command::new(0x0a);
        match harness.controller.submit_admin(harness.now, sent, command, None) {
            Ok(()) => sent += 1,
            Err(refusal) => break refusal,
        }
    };
    assert_eq!((refused, sent), (RequestError::Full, 63 - 20));
    // A namespace appears: its event, its log page and its scan have slots.
    let one = super::scripted_device::ScriptedNamespace { blocks: 1, block_shift: 9 };
    harness.device.state().change_namespace(2, Some(one));
    harness.run_until(|event| *event == Event::NamespaceAttached { id: 2 });
    harness.run_until(|event| matches!(event, Event::CommandOverdue { queue: 0, .. }));
}

#[test]
fn driver_managed_opcodes_are_rejected() {
    let mut harness = ControllerHarness::ready();
    for opcode in [0x00, 0x01, 0x04, 0x05, 0x0c, 0x7c] {
        let refused = harness.controller.submit_admin(harness.now, 1, Command::new(opcode), None);
        assert!(matches!(refused, Err(RequestError::Reserved { .. })), "{opcode:#x}");
    }
}

#[test]
fn data_longer_than_mdts_is_rejected() {
    let mut harness = ControllerHarness::ready();
    let data = harness.memory.allocate(256 * 1024).unwrap();
    for (len_bytes, fits) in [(131_072, true), (131_076, false)] {
        let data = data.slice(0, len_bytes).unwrap();
        let log = GetLogPage { lid: 0xc0, ..GetLogPage::default() };
        let sent = harness.controller.submit_get_log_page(harness.now, 1, log, data);
        assert_eq!(sent.is_ok(), fits, "{len_bytes}: {sent:?}");
    }
    let log = GetLogPage::default();
    for len_bytes in [0, 2, 4097] {
        let data = data.slice(0, len_bytes).unwrap();
        assert!(harness.controller.submit_get_log_page(harness.now, 1, log, data).is_err());
    }
    let short = data.slice(0, 4092).unwrap();
    assert!(
        harness.controller.submit_identify(harness.now, 1, Identify::default(), short).is_err()
    );
}

#[test]
fn long_transfers_can_be_sent_again_and_again() {
    let mut harness = ControllerHarness::ready();
    let data = harness.memory.allocate(65_536).unwrap();
    for token in 0..20 {
        let log = GetLogPage { lid: 0xc0, ..GetLogPage::default() };
        harness.controller.submit_get_log_page(harness.now, token, log, data).unwrap();
        harness.run_for(Span::from_ms(1));
    }
    assert_eq!(admin_completions(&harness).len(), 20);
}

#[test]
fn admin_methods_send_their_opcode_only_if_supported() {
    let mut without = ControllerHarness::ready();
    let data = allocate_page(&without);
    let format = FormatNvm { nsid: 1, ..FormatNvm::default() };
    let now = without.now;
    let refused = [
        without.controller.submit_format(now, Span::from_secs(1), 1, format),
        without.controller.submit_create_namespace(now, 1, data),
        without.controller.submit_delete_namespace(now, 1, 1),
        without.controller.submit_namespace_attachment(now, 1, 1, AttachmentSelect::Attach, data),
        without.controller.submit_firmware_commit(now, 1, 1, CommitAction::Activate),
        without.controller.submit_self_test(now, 1, 0, SelfTestCode::Short),
        without.controller.firmware_download_commands(data).map(drop),
    ];
    for refusal in refused {
        assert!(matches!(refusal, Err(RequestError::Unsupported { .. })), "{refusal:?}");
    }

    let mut harness = ControllerHarness::ready_with(short_timeout_options(), |state| {
        state.identity.push((256, vec![0x1e])); // OACS: format, firmware, namespaces, self-test
    });
    let data = allocate_page(&harness);
    let now = harness.now;
    let before = harness.device.state().fetched.len();
    harness.controller.submit_format(now, Span::from_secs(1), 1, format).unwrap();
    harness.controller.submit_create_namespace(now, 2, data).unwrap();
    harness.controller.submit_delete_namespace(now, 3, 4).unwrap();
    harness
        .controller
        .submit_namespace_attachment(now, 4, 4, AttachmentSelect::Detach, data)
        .unwrap();
    for (index, (command, piece)) in
        harness.controller.firmware_download_commands(data).unwrap().enumerate()
    {
        let token = 10 + index as u64;
        harness.controller.submit_admin(now, token, command, Some(piece)).unwrap();
    }
    harness.controller.submit_firmware_commit(now, 5, 2, CommitAction::ActivateNow).unwrap();
    harness.controller.submit_self_test(now, 6, u32::MAX, SelfTestCode::Extended).unwrap();
    let feature = GetFeatures { fid: 2, ..GetFeatures::default() };
    harness.controller.submit_get_features(now, 7, feature, None).unwrap();
    let feature = SetFeatures { fid: 2, cdw11: 1, ..SetFeatures::default() };
    harness.controller.submit_set_features(now, 8, feature, None).unwrap();
    harness.run_for(Span::from_ms(5));
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
    assert_eq!(harness.device.state().fetched[before..], expected);
    assert!(harness.controller.submit_firmware_commit(now, 9, 8, CommitAction::Activate).is_err());
}

#[test]
fn individual_timeout_replaces_the_default() {
    let mut harness = ControllerHarness::ready();
    harness.device.state().unanswered_opcodes.insert(0x80);
    let long = Some(Span::from_secs(2));
    let command = Command::new(0x80);
    harness.controller.submit_admin_within(harness.now, long, 1, command, None).unwrap();
    let took = harness.run_until(|event| matches!(event, Event::CommandOverdue { queue: 0, .. }));
    assert!(took >= Span::from_secs(2) && took < Span::from_ms(2_500), "{took}");
}

#[test]
fn the_owner_may_abort_its_own_commands_by_token() {
    let mut harness = ControllerHarness::ready();
    harness.device.state().unanswered_opcodes.insert(0x0a);
    harness.submit_admin(5, 0x0a);
    harness.run_for(Span::from_ms(1));
    let now = harness.now;
    let missing = harness.controller.submit_abort_admin(now, 8, 77);
    assert_eq!(missing, Err(RequestError::NoSuchToken { token: 77 }));
    harness.controller.submit_abort_admin(now, 8, 5).unwrap();
    harness.run_for(Span::from_ms(5));
    let (opcode, cdw10) = *harness.device.state().fetched.last().unwrap();
    assert_eq!((opcode, cdw10 & 0xffff), (8, 0), "of the admin queue");
    assert_eq!(admin_completions(&harness), [(8, IoStatus::SUCCESS)]);
}

#[test]
fn the_owners_aborts_count_against_the_limit_of_the_controller() {
    let mut harness = ControllerHarness::ready_with(short_timeout_options(), |state| {
        state.identity.push((258, vec![1]))
    });
    harness.device.state().unanswered_opcodes.insert(0x08);
    let abort = Command::new(0x08);
    for token in [1, 2] {
        harness.controller.submit_admin(harness.now, token, abort, None).unwrap();
    }
    let refused = harness.controller.submit_admin(harness.now, 3, abort, None);
    assert_eq!(refused, Err(RequestError::Full));
}

#[test]
fn commands_are_rejected_while_the_controller_is_not_ready() {
    let mut harness = ControllerHarness::new();
    let now = harness.now;
    let refused = harness.controller.submit_admin(now, 1, Command::new(0x0a), None);
    assert_eq!(refused, Err(RequestError::NotReady));
    let mut harness = ControllerHarness::ready();
    harness.controller.reset(harness.now).unwrap();
    let refused = harness.controller.submit_admin(harness.now, 1, Command::new(0x0a), None);
    assert_eq!(refused, Err(RequestError::NotReady));
}

#[test]
fn errors_can_be_injected_into_admin_commands() {
    let mut harness = ControllerHarness::ready();
    let injection = Injection {
        opcode: 0x0a,
        side: InjectionSide::Submission,
        status: IoStatus::INTERNAL_ERROR,
        count: 1,
    };
    harness.controller.admin_queue().arm_injection(injection);
    harness.submit_admin(1, 0x0a);
    harness.submit_admin(2, 0x0a);
    harness.run_for(Span::from_ms(5));
    let mut completions = admin_completions(&harness);
    completions.sort_unstable_by_key(|(token, _)| *token);
    assert_eq!(completions, [(1, IoStatus::INTERNAL_ERROR), (2, IoStatus::SUCCESS)]);
    harness.assert_state(ControllerState::Ready);
}
