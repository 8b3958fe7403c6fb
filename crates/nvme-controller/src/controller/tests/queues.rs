//! Creation and deletion of queues, their number, Abort, doorbell buffers, and Keep Alive.

use tenmil_base::Span;
use tenmil_wire::admin::{
    Abort, CreateIoCompletionQueue, CreateIoSubmissionQueue, DeleteIoCompletionQueue,
    DeleteIoSubmissionQueue, DoorbellBufferConfig, KeepAlive, QueuePriority, SetFeatures,
};
use tenmil_wire::feature::Feature;
use tenmil_wire::{AdminOpcode, Command, Fuse, Status, TypedCommand};

use super::bench::{Bench, Shelf, ended};
use crate::controller::interface::{
    AdminOutcome, ControllerSignal, CreateCompletionQueue, CreateSubmissionQueue, Priority,
};
use crate::controller::{ControllerConfig, TransportModel};

const COMPLETION: CreateIoCompletionQueue =
    CreateIoCompletionQueue { qid: 1, qsize: 127, pc: true, ien: true, iv: 1 };

fn submission() -> CreateIoSubmissionQueue {
    CreateIoSubmissionQueue {
        qid: 1,
        qsize: 127,
        pc: true,
        cqid: 1,
        qprio: QueuePriority::Medium,
        ..CreateIoSubmissionQueue::default()
    }
}

fn small() -> Bench {
    let config = ControllerConfig {
        io_queues_max: 8,
        queue_entries_max: 128,
        vectors: 4,
        ..ControllerConfig::default()
    };
    Bench::with(vec![], |_| {}, config)
}

#[test]
fn queues_are_created_and_deleted_by_the_front_end_as_parsed() {
    let mut bench = small();
    let create = COMPLETION.to_command().with_prp(0x1000, 0);
    let expected =
        CreateCompletionQueue { cqid: 1, entries: 128, address: 0x1000, vector: Some(1) };
    assert_eq!(bench.step(&create, &[]).0, AdminOutcome::CreateCompletionQueue(expected));

    let silent = CreateIoCompletionQueue { ien: false, iv: 9, ..COMPLETION };
    let step = bench.step(&silent.to_command().with_prp(0x1000, 0), &[]).0;
    let expected = CreateCompletionQueue { vector: None, ..expected };
    assert_eq!(step, AdminOutcome::CreateCompletionQueue(expected), "its vector means nothing");

    let step = bench.step(&submission().to_command().with_prp(0x2000, 0), &[]).0;
    let expected = CreateSubmissionQueue {
        sqid: 1,
        entries: 128,
        address: 0x2000,
        cqid: 1,
        priority: Priority::Medium,
    };
    assert_eq!(step, AdminOutcome::CreateSubmissionQueue(expected));

    let delete = DeleteIoSubmissionQueue { qid: 8 }.to_command();
    assert_eq!(bench.step(&delete, &[]).0, AdminOutcome::DeleteSubmissionQueue { sqid: 8 });
    let delete = DeleteIoCompletionQueue { qid: 8 }.to_command();
    assert_eq!(bench.step(&delete, &[]).0, AdminOutcome::DeleteCompletionQueue { cqid: 8 });
}

#[test]
fn every_field_of_a_queue_that_cannot_be_is_refused() {
    let mut bench = small();
    let completions = [
        (CreateIoCompletionQueue { qid: 0, ..COMPLETION }, Status::INVALID_QUEUE_IDENTIFIER),
        (CreateIoCompletionQueue { qid: 9, ..COMPLETION }, Status::INVALID_QUEUE_IDENTIFIER),
        (CreateIoCompletionQueue { qsize: 0, ..COMPLETION }, Status::INVALID_QUEUE_SIZE),
        (CreateIoCompletionQueue { qsize: 128, ..COMPLETION }, Status::INVALID_QUEUE_SIZE),
        (CreateIoCompletionQueue { pc: false, ..COMPLETION }, Status::INVALID_FIELD),
        (CreateIoCompletionQueue { iv: 4, ..COMPLETION }, Status::INVALID_INTERRUPT_VECTOR),
    ];
    for (create, status) in completions {
        let step = bench.step(&create.to_command().with_prp(0x1000, 0), &[]).0;
        assert_eq!(ended(step), Err(status), "{create:?}");
    }
    let it = submission();
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
        let step = bench.step(&create.to_command().with_prp(0x1000, 0), &[]).0;
        assert_eq!(ended(step), Err(status), "{create:?}");
    }
    for command in [COMPLETION.to_command(), it.to_command()] {
        let step = bench.step(&command.with_prp(0x1004, 0), &[]).0;
        assert_eq!(ended(step), Err(Status::PRP_OFFSET_INVALID));
    }
    for qid in [0, 9] {
        let status = Err(Status::INVALID_QUEUE_IDENTIFIER);
        assert_eq!(bench.run(DeleteIoSubmissionQueue { qid }), status);
        assert_eq!(bench.run(DeleteIoCompletionQueue { qid }), status);
    }
}

#[test]
fn the_number_of_queues_is_granted_up_to_the_limit_and_fixed_by_the_first_queue() {
    let mut bench = small();
    let set = |dword| SetFeatures {
        fid: Feature::NumberOfQueues.code(),
        cdw11: dword,
        ..SetFeatures::default()
    };
    assert_eq!(bench.run(set(0x00ff_0003)), Ok(0x0007_0003), "0's based, eight at most");
    assert_eq!(bench.controller.queues_granted(), (4, 8));
    for dword in [0xffff_0000, 0x0000_ffff, 0xffff_ffff] {
        assert_eq!(bench.run(set(dword)), Err(Status::INVALID_FIELD));
    }
    let beyond = CreateIoSubmissionQueue { qid: 5, ..submission() };
    let step = bench.step(&beyond.to_command().with_prp(0x1000, 0), &[]).0;
    assert_eq!(ended(step), Err(Status::INVALID_QUEUE_IDENTIFIER), "four were granted");

    bench.run(set(0x0001_0003)).unwrap();
    let unheld = CreateIoSubmissionQueue { cqid: 3, ..submission() };
    let step = bench.step(&unheld.to_command().with_prp(0x1000, 0), &[]).0;
    assert_eq!(ended(step), Err(Status::COMPLETION_QUEUE_INVALID), "two were granted");

    bench.controller.queue_created();
    assert_eq!(bench.run(set(0)), Err(Status::COMMAND_SEQUENCE_ERROR));
    bench.controller.reset(bench.now);
    assert_eq!(bench.run(set(0)), Ok(0));
}

#[test]
fn aborts_are_limited_until_they_are_answered() {
    let config = ControllerConfig { aborts_max: 2, ..ControllerConfig::default() };
    let mut bench = Bench::with(vec![], |_| {}, config);
    let abort = Abort { sqid: 3, abort_cid: 7 }.to_command();
    let expected = AdminOutcome::Abort { sqid: 3, cid: 7 };
    assert_eq!(bench.step(&abort, &[]).0, expected);
    assert_eq!(bench.step(&abort, &[]).0, expected);
    assert_eq!(ended(bench.step(&abort, &[]).0), Err(Status::ABORT_COMMAND_LIMIT_EXCEEDED));
    bench.controller.abort_ended();
    assert_eq!(bench.step(&abort, &[]).0, expected);
}

#[test]
fn doorbell_buffers_are_two_pages() {
    let mut bench = Bench::new();
    let config =
        |shadow, event| DoorbellBufferConfig { shadow_doorbells: shadow, event_indexes: event };
    let step = bench.step(&config(0x1000, 0x2000).to_command(), &[]).0;
    assert_eq!(step, AdminOutcome::DoorbellBuffers { shadow: 0x1000, event_index: 0x2000 });
    for (shadow, event) in [(0, 0x2000), (0x1000, 0), (0x1004, 0x2000), (0x1000, 0x2800)] {
        assert_eq!(bench.run(config(shadow, event)), Err(Status::INVALID_FIELD));
    }
}

#[test]
fn a_silent_host_is_given_up_and_any_command_keeps_it_alive() {
    let mut bench = Bench::new();
    let set =
        SetFeatures { fid: Feature::KeepAliveTimer.code(), cdw11: 950, ..SetFeatures::default() };
    bench.run(set).unwrap();
    bench.pass(Span::from_ms(999));
    assert_eq!(bench.controller.next_signal(), None, "rounded up to a second");
    bench.run(KeepAlive {}).unwrap();
    bench.pass(Span::from_ms(999));
    bench.controller.note_io_activity(bench.now);
    bench.pass(Span::from_ms(999));
    assert_eq!(bench.controller.next_signal(), None);
    let wake_at = bench.controller.wake_at(bench.now);
    assert_eq!(wake_at, bench.now.after(Span::from_secs(1)), "another interval has begun");
    bench.pass(Span::from_ms(999));
    assert_eq!(bench.controller.next_signal(), None);
    bench.pass(Span::from_ms(1));
    assert_eq!(bench.controller.next_signal(), Some(ControllerSignal::KeepAliveExpired));
    bench.pass(Span::from_secs(10));
    assert_eq!(bench.controller.next_signal(), None, "once");
}

#[test]
fn what_is_not_offered_is_an_invalid_opcode() {
    let mut bench = Bench::new();
    let offered = [
        0x00, 0x01, 0x02, 0x04, 0x05, 0x06, 0x08, 0x09, 0x0a, 0x0c, 0x10, 0x11, 0x14, 0x18, 0x7c,
        0x80,
    ];
    for opcode in 0..=255 {
        let refused = matches!(
            bench.step(&Command::new(opcode), &[]).0,
            AdminOutcome::Done(end) if end.status.is(Status::INVALID_OPCODE)
        );
        assert_eq!(refused, !offered.contains(&opcode), "{opcode:#04x}");
        let known = AdminOpcode::from_u8(opcode).is_some_and(|it| bench.controller.supports(it));
        assert_eq!(known, !refused);
    }
}

#[test]
fn over_fabrics_there_are_no_queue_commands() {
    let transport = TransportModel::Fabrics {
        command_capsule_bytes: 8256,
        descriptors_max: 1,
        quiesce: Span::from_ms(500),
    };
    let config = ControllerConfig { transport, ..ControllerConfig::default() };
    let mut bench = Bench::with(vec![Shelf::new()], |_| {}, config);
    for opcode in [0x00, 0x01, 0x04, 0x05, 0x7c] {
        let step = bench.step(&Command::new(opcode), &[]).0;
        assert_eq!(ended(step), Err(Status::INVALID_OPCODE), "{opcode:#04x}");
    }
}

#[test]
fn no_admin_command_is_half_of_a_pair() {
    let mut bench = Bench::new();
    for fuse in [Fuse::First, Fuse::Second, Fuse::Reserved] {
        let command = KeepAlive {}.to_command().with_fuse(fuse);
        assert_eq!(ended(bench.step(&command, &[]).0), Err(Status::INVALID_FIELD));
    }
}
