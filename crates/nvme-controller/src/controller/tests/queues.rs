//! Creation and deletion of queues, their number, Abort, doorbell buffers, and Keep Alive.

use tenmil_base::Span;
use tenmil_wire::admin::{
    Abort, CreateIoCompletionQueue, CreateIoSubmissionQueue, DeleteIoCompletionQueue,
    DeleteIoSubmissionQueue, DoorbellBufferConfig, KeepAlive, QueuePriority, SetFeatures,
};
use tenmil_wire::feature::Feature;
use tenmil_wire::{AdminOpcode, Command, Fuse, Status, TypedCommand};

use super::fixture::{ControllerFixture, FakeBlockDevice, completed_result};
use crate::controller::transport_interface::{
    AdminOutcome, CreateCompletionQueue, CreateSubmissionQueue, Priority, TransportAction,
};
use crate::controller::{ControllerConfig, TransportModel};

const COMPLETION: CreateIoCompletionQueue =
    CreateIoCompletionQueue { qid: 1, qsize: 127, pc: true, ien: true, iv: 1 };

fn create_submission_queue_command() -> CreateIoSubmissionQueue {
    CreateIoSubmissionQueue {
        qid: 1,
        qsize: 127,
        pc: true,
        cqid: 1,
        qprio: QueuePriority::Medium,
        ..CreateIoSubmissionQueue::default()
    }
}

fn fixture_with_small_limits() -> ControllerFixture {
    let config = ControllerConfig {
        io_queues_max: 8,
        queue_entries_max: 128,
        vectors: 4,
        ..ControllerConfig::default()
    };
    ControllerFixture::with_config(vec![], |_| {}, config)
}

#[test]
fn queue_commands_are_parsed_for_the_transport() {
    let mut bench = fixture_with_small_limits();
    let create = COMPLETION.to_command().with_prp(0x1000, 0);
    let expected =
        CreateCompletionQueue { cqid: 1, entries: 128, address: 0x1000, vector: Some(1) };
    assert_eq!(bench.submit(&create, &[]).0, AdminOutcome::CreateCompletionQueue(expected));

    let silent = CreateIoCompletionQueue { ien: false, iv: 9, ..COMPLETION };
    let step = bench.submit(&silent.to_command().with_prp(0x1000, 0), &[]).0;
    let expected = CreateCompletionQueue { vector: None, ..expected };
    assert_eq!(step, AdminOutcome::CreateCompletionQueue(expected), "its vector means nothing");

    let step =
        bench.submit(&create_submission_queue_command().to_command().with_prp(0x2000, 0), &[]).0;
    let expected = CreateSubmissionQueue {
        sqid: 1,
        entries: 128,
        address: 0x2000,
        cqid: 1,
        priority: Priority::Medium,
    };
    assert_eq!(step, AdminOutcome::CreateSubmissionQueue(expected));

    let delete = DeleteIoSubmissionQueue { qid: 8 }.to_command();
    assert_eq!(bench.submit(&delete, &[]).0, AdminOutcome::DeleteSubmissionQueue { sqid: 8 });
    let delete = DeleteIoCompletionQueue { qid: 8 }.to_command();
    assert_eq!(bench.submit(&delete, &[]).0, AdminOutcome::DeleteCompletionQueue { cqid: 8 });
}

#[test]
fn invalid_queue_creation_fields_are_rejected() {
    let mut bench = fixture_with_small_limits();
    let completions = [
        (CreateIoCompletionQueue { qid: 0, ..COMPLETION }, Status::INVALID_QUEUE_IDENTIFIER),
        (CreateIoCompletionQueue { qid: 9, ..COMPLETION }, Status::INVALID_QUEUE_IDENTIFIER),
        (CreateIoCompletionQueue { qsize: 0, ..COMPLETION }, Status::INVALID_QUEUE_SIZE),
        (CreateIoCompletionQueue { qsize: 128, ..COMPLETION }, Status::INVALID_QUEUE_SIZE),
        (CreateIoCompletionQueue { pc: false, ..COMPLETION }, Status::INVALID_FIELD),
        (CreateIoCompletionQueue { iv: 4, ..COMPLETION }, Status::INVALID_INTERRUPT_VECTOR),
    ];
    for (create, status) in completions {
        let step = bench.submit(&create.to_command().with_prp(0x1000, 0), &[]).0;
        assert_eq!(completed_result(step), Err(status), "{create:?}");
    }
    let it = create_submission_queue_command();
    let submissions = [
        (CreateIoSubmissionQueue { qid: 0, ..it }, Status::INVALID_QUEUE_IDENTIFIER),
        (CreateIoSubmissionQueue { qid: 9, ..it }, Status::INVALID_QUEUE_IDENTIFIER),
        (CreateIoSubmissionQueue { cqid: 0, ..it }, Status::INVALID_QUEUE_IDENTIFIER),
        (CreateIoSubmissionQueue { cqid: 9, ..it }, Status::INVALID_QUEUE_IDENTIFIER),
        (CreateIoSubmissionQueue { qsize: 0, ..it }, Status::INVALID_QUEUE_SIZE),
        (CreateIoSubmissionQueue { qsize: 128, ..it }, Status::INVALID_QUEUE_SIZE),
        (CreateIoSubmissionQueue { pc: false, ..it }, Status::INVALID_FIELD),
        (CreateIoSubmissionQueue { nvmsetid: 1, ..it }, Status::INVALID_FIELD),
    ];
    for (create, status) in submissions {
        let step = bench.submit(&create.to_command().with_prp(0x1000, 0), &[]).0;
        assert_eq!(completed_result(step), Err(status), "{create:?}");
    }
    for command in [COMPLETION.to_command(), it.to_command()] {
        let step = bench.submit(&command.with_prp(0x1004, 0), &[]).0;
        assert_eq!(completed_result(step), Err(Status::PRP_OFFSET_INVALID));
    }
    for qid in [0, 9] {
        let status = Err(Status::INVALID_QUEUE_IDENTIFIER);
        assert_eq!(bench.run_without_data(DeleteIoSubmissionQueue { qid }), status);
        assert_eq!(bench.run_without_data(DeleteIoCompletionQueue { qid }), status);
    }
}

#[test]
fn number_of_queues_is_limited_and_fixed_once_a_queue_exists() {
    let mut bench = fixture_with_small_limits();
    let set = |dword| SetFeatures {
        fid: Feature::NumberOfQueues.code(),
        cdw11: dword,
        ..SetFeatures::default()
    };
    assert_eq!(
        bench.run_without_data(set(0x00ff_0003)),
        Ok(0x0007_0003),
        "0's based, eight at most"
    );
    assert_eq!(bench.controller.granted_queue_counts(), (4, 8));
    for dword in [0xffff_0000, 0x0000_ffff, 0xffff_ffff] {
        assert_eq!(bench.run_without_data(set(dword)), Err(Status::INVALID_FIELD));
    }
    let beyond = CreateIoSubmissionQueue { qid: 5, ..create_submission_queue_command() };
    let step = bench.submit(&beyond.to_command().with_prp(0x1000, 0), &[]).0;
    assert_eq!(completed_result(step), Err(Status::INVALID_QUEUE_IDENTIFIER), "four were granted");

    bench.run_without_data(set(0x0001_0003)).unwrap();
    let unheld = CreateIoSubmissionQueue { cqid: 3, ..create_submission_queue_command() };
    let step = bench.submit(&unheld.to_command().with_prp(0x1000, 0), &[]).0;
    assert_eq!(completed_result(step), Err(Status::COMPLETION_QUEUE_INVALID), "two were granted");

    bench.controller.note_queue_created();
    assert_eq!(bench.run_without_data(set(0)), Err(Status::COMMAND_SEQUENCE_ERROR));
    bench.controller.reset(bench.now);
    assert_eq!(bench.run_without_data(set(0)), Ok(0));
}

#[test]
fn abort_limit_applies_until_aborts_complete() {
    let config = ControllerConfig { aborts_max: 2, ..ControllerConfig::default() };
    let mut bench = ControllerFixture::with_config(vec![], |_| {}, config);
    let abort = Abort { sqid: 3, abort_cid: 7 }.to_command();
    let expected = AdminOutcome::Abort { sqid: 3, cid: 7 };
    assert_eq!(bench.submit(&abort, &[]).0, expected);
    assert_eq!(bench.submit(&abort, &[]).0, expected);
    assert_eq!(
        completed_result(bench.submit(&abort, &[]).0),
        Err(Status::ABORT_COMMAND_LIMIT_EXCEEDED)
    );
    bench.controller.note_abort_completed();
    assert_eq!(bench.submit(&abort, &[]).0, expected);
}

#[test]
fn doorbell_buffer_config_takes_two_pages() {
    let mut bench = ControllerFixture::new();
    let config =
        |shadow, event| DoorbellBufferConfig { shadow_doorbells: shadow, event_indexes: event };
    let step = bench.submit(&config(0x1000, 0x2000).to_command(), &[]).0;
    assert_eq!(step, AdminOutcome::DoorbellBuffers { shadow: 0x1000, event_index: 0x2000 });
    for (shadow, event) in [(0, 0x2000), (0x1000, 0), (0x1004, 0x2000), (0x1000, 0x2800)] {
        assert_eq!(bench.run_without_data(config(shadow, event)), Err(Status::INVALID_FIELD));
    }
}

#[test]
fn keep_alive_expires_without_commands() {
    let mut bench = ControllerFixture::new();
    let set =
        SetFeatures { fid: Feature::KeepAliveTimer.code(), cdw11: 950, ..SetFeatures::default() };
    bench.run_without_data(set).unwrap();
    bench.advance_time(Span::from_ms(999));
    assert_eq!(bench.controller.next_transport_action(), None, "rounded up to a second");
    bench.run_without_data(KeepAlive {}).unwrap();
    bench.advance_time(Span::from_ms(999));
    bench.controller.note_io_activity(bench.now);
    bench.advance_time(Span::from_ms(999));
    assert_eq!(bench.controller.next_transport_action(), None);
    let wake_at = bench.controller.wake_at(bench.now);
    assert_eq!(wake_at, bench.now.after(Span::from_secs(1)), "another interval has begun");
    bench.advance_time(Span::from_ms(999));
    assert_eq!(bench.controller.next_transport_action(), None);
    bench.advance_time(Span::from_ms(1));
    assert_eq!(bench.controller.next_transport_action(), Some(TransportAction::KeepAliveExpired));
    bench.advance_time(Span::from_secs(10));
    assert_eq!(bench.controller.next_transport_action(), None, "once");
}

#[test]
fn unsupported_command_is_an_invalid_opcode() {
    let mut bench = ControllerFixture::new();
    let offered = [
        0x00, 0x01, 0x02, 0x04, 0x05, 0x06, 0x08, 0x09, 0x0a, 0x0c, 0x10, 0x11, 0x14, 0x18, 0x7c,
        0x80,
    ];
    for opcode in 0..=255 {
        let refused = matches!(
            bench.submit(&Command::new(opcode), &[]).0,
            AdminOutcome::Done(end) if end.status.has_same_code_as(Status::INVALID_OPCODE)
        );
        assert_eq!(refused, !offered.contains(&opcode), "{opcode:#04x}");
        let known = AdminOpcode::from_u8(opcode)
            .is_some_and(|it| bench.controller.supports_admin_opcode(it));
        assert_eq!(known, !refused);
    }
}

#[test]
fn queue_commands_are_rejected_over_fabrics() {
    let transport = TransportModel::Fabrics {
        command_capsule_bytes: 8256,
        descriptors_max: 1,
        quiesce: Span::from_ms(500),
    };
    let config = ControllerConfig { transport, ..ControllerConfig::default() };
    let mut bench = ControllerFixture::with_config(vec![FakeBlockDevice::new()], |_| {}, config);
    for opcode in [0x00, 0x01, 0x04, 0x05, 0x7c] {
        let step = bench.submit(&Command::new(opcode), &[]).0;
        assert_eq!(completed_result(step), Err(Status::INVALID_OPCODE), "{opcode:#04x}");
    }
}

#[test]
fn fused_admin_commands_are_rejected() {
    let mut bench = ControllerFixture::new();
    for fuse in [Fuse::First, Fuse::Second, Fuse::Reserved] {
        let command = KeepAlive {}.to_command().with_fuse(fuse);
        assert_eq!(completed_result(bench.submit(&command, &[]).0), Err(Status::INVALID_FIELD));
    }
}
