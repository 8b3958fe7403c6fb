//! Admin queue: data in both directions, queues, events, aborts.

use tenmil_wire::admin::{
    Abort, DeleteIoCompletionQueue, DeleteIoSubmissionQueue, GetLogPage, Identify, SetFeatures,
};
use tenmil_wire::sgl::Descriptor;
use tenmil_wire::{Command, DataPointer, Status, TypedCommand};

use crate::controller::transport_interface::{CreateSubmissionQueue, Priority};
use crate::transport::QueueDeletion;

use super::fixture::{CC, CSTS, DATA, ENABLED, LATER, SHARED, TransportFixture, read_command};

fn identify_controller_command() -> Command {
    Identify { cns: 1, ..Identify::default() }.to_command()
}

fn delete_submission_queue_command(qid: u16) -> Command {
    DeleteIoSubmissionQueue { qid }.to_command()
}

fn delete_completion_queue_command(qid: u16) -> Command {
    DeleteIoCompletionQueue { qid }.to_command()
}

fn event_request_command() -> Command {
    Command::new(0x0c)
}

#[test]
fn admin_data_is_transferred_by_prps_and_lists() {
    for behavior in [SHARED, LATER] {
        let mut rig = TransportFixture::new_enabled(behavior);
        rig.run_admin(identify_controller_command().with_prp(DATA, 0));
        let page = rig.read_host_memory(DATA, 4096);
        assert_eq!(&page[4..8], b"TEST");
        rig.run_admin(identify_controller_command().with_prp(DATA + 0x2e00, DATA + 0x5000));
        let split = [
            rig.read_host_memory(DATA + 0x2e00, 0x200),
            rig.read_host_memory(DATA + 0x5000, 0xe00),
        ]
        .concat();
        assert_eq!(split, page);
        // Two pages from the middle of one, through a list of two.
        let log = GetLogPage { lid: 5, numd: 2047, ..GetLogPage::default() }.to_command();
        let entries = [(DATA + 0x7000).to_le_bytes(), (DATA + 0x9000).to_le_bytes()].concat();
        rig.write_host_memory(DATA + 0x100, &entries);
        let logged = rig.run_admin(log.with_prp(DATA + 0xb800, DATA + 0x100));
        assert!(logged.status().is_success(), "{}", logged.status());
    }
}

#[test]
fn invalid_data_pointer_is_rejected_before_execution() {
    for behavior in [SHARED, LATER] {
        let mut rig = TransportFixture::new_enabled(behavior);
        let offset = Status::PRP_OFFSET_INVALID.with_dnr();
        assert_eq!(
            rig.run_admin(identify_controller_command().with_prp(DATA + 1, 0)).status(),
            offset
        );
        assert_eq!(
            rig.run_admin(identify_controller_command().with_prp(DATA + 4, 8)).status(),
            offset
        );
        let sgl = identify_controller_command().with_psdt(DataPointer::Sgl);
        let sgl = sgl.with_sgl1(Descriptor::data_block(DATA, 4096));
        let field = Status::INVALID_FIELD.with_dnr();
        assert_eq!(rig.run_admin(sgl).status(), field, "admin commands use PRPs");
        let nowhere = Status::DATA_TRANSFER_ERROR;
        assert_eq!(
            rig.run_admin(identify_controller_command().with_prp(1 << 40, 0)).status(),
            nowhere
        );
        // The host identifier is to be set from an invalid address: it keeps its value.
        let set = SetFeatures { fid: 0x81, cdw11: 1, ..SetFeatures::default() }.to_command();
        assert_eq!(rig.run_admin(set.with_prp(1 << 40, 0)).status(), nowhere);
        rig.write_host_memory(DATA, &[7; 16]);
        assert!(rig.run_admin(set.with_prp(DATA, 0)).status().is_success());
        assert_eq!(
            rig.run_admin(Command::new(0xff)).status().without_crd_more_dnr(),
            Status::INVALID_OPCODE
        );
    }
}

#[test]
fn rejected_commands_are_in_the_error_log() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    rig.create_queue_pair(1, 1, None);
    rig.run_admin(identify_controller_command().with_prp(1 << 40, 0));
    let cid = rig.run_command(1, read_command(1).with_nsid(9)).cid();
    let log = GetLogPage { lid: 1, numd: 31, ..GetLogPage::default() }.to_command();
    assert!(rig.run_admin(log.with_prp(DATA, 0)).status().is_success());
    let newest = rig.read_host_memory(DATA, 64);
    assert_eq!(newest[8..10], [1, 0], "submission queue 1");
    assert_eq!(newest[10..12], cid.to_le_bytes());
    let older = rig.read_host_memory(DATA + 64, 64);
    assert_eq!(older[8..10], [0, 0], "the admin queue");
}

#[test]
fn queues_are_created_and_deleted_in_order() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    let taken = Status::INVALID_QUEUE_IDENTIFIER;
    let pair = rig.uncreated_queue_pair(3, 2, 8);
    assert!(
        rig.create_submission_queue(&pair).has_same_code_as(Status::COMPLETION_QUEUE_INVALID),
        "no queue to feed"
    );
    assert!(
        rig.run_admin(delete_completion_queue_command(2)).status().has_same_code_as(taken),
        "no such queue"
    );
    assert!(
        rig.run_admin(delete_submission_queue_command(3)).status().has_same_code_as(taken),
        "no such queue"
    );
    assert_eq!(rig.create_completion_queue(&pair, None), Status::SUCCESS);
    assert!(rig.create_completion_queue(&pair, None).has_same_code_as(taken), "it exists");
    assert_eq!(rig.create_submission_queue(&pair), Status::SUCCESS);
    assert!(rig.create_submission_queue(&pair).has_same_code_as(taken), "it exists");
    rig.pairs.push(pair);
    assert!(rig.run_command(1, read_command(8)).status().is_success(), "queue 3 feeds queue 2");
    let other = rig.uncreated_queue_pair(1, 2, 8);
    assert_eq!(rig.create_submission_queue(&other), Status::SUCCESS, "and so may another");
    assert!(
        rig.run_admin(delete_completion_queue_command(2))
            .status()
            .has_same_code_as(Status::INVALID_QUEUE_DELETION)
    );
    assert_eq!(rig.run_admin(delete_submission_queue_command(3)).status(), Status::SUCCESS);
    assert!(
        rig.run_admin(delete_completion_queue_command(2))
            .status()
            .has_same_code_as(Status::INVALID_QUEUE_DELETION)
    );
    assert_eq!(rig.run_admin(delete_submission_queue_command(1)).status(), Status::SUCCESS);
    assert_eq!(rig.run_admin(delete_completion_queue_command(2)).status(), Status::SUCCESS);
    rig.pairs.truncate(1);
    rig.create_queue_pair(3, 2, None);
    assert!(
        rig.run_command(1, read_command(1)).status().is_success(),
        "created again, it begins anew"
    );
}

/// A user of per-queue state, such as the one of mapped doorbells, checks it between two polls. In
/// whatever order a host deletes and creates queues, a queue is gone at such a check before another one
/// has its number.
#[test]
fn queue_can_be_deleted_and_created_again_between_two_polls() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    rig.create_queue_pair(1, 1, None);
    let pair = rig.pairs[1];
    let creates = [
        rig.create_completion_queue_command(&pair, None),
        rig.create_submission_queue_command(&pair),
    ];
    let commands = [
        delete_submission_queue_command(1),
        delete_completion_queue_command(1),
        creates[0],
        creates[1],
    ];
    let (mut was_there, mut ends, mut deleted) = ([true; 2], [0; 2], [0; 2]);
    for round in 0..200 {
        let order: Vec<usize> = (0..4).map(|at| (at * (1 + round % 3) + round) % 4).collect();
        let cids: Vec<u16> =
            order.iter().map(|kind| rig.push_command(0, commands[*kind])).collect();
        rig.ring_submission_doorbell(0);
        let mut answered = 0;
        while answered < cids.len() {
            rig.poll_transport();
            for side in 0..2 {
                let is_there = rig.front.has_doorbell(2 + side);
                ends[side] += u32::from(was_there[side] && !is_there);
                was_there[side] = is_there;
            }
            while let Some(completion) = rig.take_completion(0) {
                let at = cids.iter().position(|cid| *cid == completion.cid()).unwrap();
                answered += 1;
                if completion.status().is_success() && order[at] < 2 {
                    deleted[order[at]] += 1;
                }
            }
        }
    }
    assert_eq!(ends, deleted);
    assert!(deleted.iter().all(|count| *count > 20), "{deleted:?}");
}

#[test]
fn queue_at_an_invalid_address_or_entry_size_is_rejected() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    let create = |at: u64| {
        let create = tenmil_wire::admin::CreateIoCompletionQueue {
            qid: 1,
            qsize: 7,
            pc: true,
            ..Default::default()
        };
        create.to_command().with_prp(at, 0)
    };
    assert!(rig.run_admin(create(1 << 40)).status().has_same_code_as(Status::INVALID_FIELD));
    rig.write_register(CC, u64::from(ENABLED & !(0xf << 20)));
    rig.poll_transport();
    assert!(
        rig.run_admin(create(0x8000)).status().has_same_code_as(Status::INVALID_QUEUE_SIZE),
        "IOCQES is 0"
    );
}

#[test]
fn queue_deletion_waits_for_device_requests_without_blocking_others() {
    let mut rig = TransportFixture::with_stuck_read();
    let deletion = rig.push_command(0, delete_submission_queue_command(1));
    rig.ring_submission_doorbell(0);
    for _ in 0..50 {
        rig.poll_transport();
    }
    assert!(rig.take_completion(0).is_none(), "a command is still at the medium");
    assert!(
        rig.run_admin(delete_submission_queue_command(1))
            .status()
            .has_same_code_as(Status::INVALID_QUEUE_IDENTIFIER),
        "going"
    );
    assert!(rig.run_admin(identify_controller_command().with_prp(DATA, 0)).status().is_success());
    rig.device.contents().is_stuck = false;
    rig.poll_until("the deletion", |rig| {
        rig.take_completion(0).is_some_and(|done| done.cid() == deletion)
    });
    assert!(
        rig.take_completion(1).is_some_and(|done| done.status().is_success()),
        "answered first"
    );
}

#[test]
fn invalid_doorbell_value_is_reported_by_an_event() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    rig.create_queue_pair(1, 1, None);
    let requests = [
        rig.push_command(0, event_request_command()),
        rig.push_command(0, event_request_command()),
    ];
    rig.ring_submission_doorbell(0);
    for _ in 0..10 {
        rig.poll_transport();
    }
    assert!(rig.take_completion(0).is_none(), "parked");
    let now = rig.now;
    rig.front.write_doorbell(now, 2, 99);
    let mut reported = Vec::new();
    rig.poll_until("the event", |rig| {
        reported.extend(rig.take_completion(0));
        !reported.is_empty()
    });
    assert_eq!((reported[0].cid(), reported[0].status()), (requests[0], Status::SUCCESS));
    assert_eq!(reported[0].dw0(), 0x0001_0100, "error, invalid doorbell value, error log");
    let log = GetLogPage { lid: 1, numd: 15, ..GetLogPage::default() }.to_command();
    assert!(rig.run_admin(log.with_prp(DATA, 0)).status().is_success());
    for missing in [2 * 2, 2 * 2 + 1, 2 * 40, u32::MAX] {
        let now = rig.now;
        rig.front.write_doorbell(now, missing, 1);
    }
    rig.poll_until("the event", |rig| {
        reported.extend(rig.take_completion(0));
        reported.len() > 1
    });
    assert_eq!(
        (reported[1].cid(), reported[1].dw0()),
        (requests[1], 0x0001_0000),
        "doorbell register"
    );
}

#[test]
fn held_event_requests_can_be_aborted_and_executing_commands_cannot() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    rig.create_queue_pair(1, 1, None);
    let parked = rig.push_command(0, event_request_command());
    rig.ring_submission_doorbell(0);
    rig.poll_transport();
    let abort = |sqid, abort_cid| Abort { sqid, abort_cid }.to_command();
    assert_eq!(rig.run_admin(abort(0, 999)).dw0(), 1, "no such command");
    rig.push_command(0, abort(0, parked));
    rig.ring_submission_doorbell(0);
    let mut answers = Vec::new();
    rig.poll_until("both answers", |rig| {
        answers.extend(rig.take_completion(0));
        answers.len() == 2
    });
    answers.sort_by_key(|answer| answer.cid());
    assert_eq!((answers[0].cid(), answers[0].status()), (parked, Status::ABORT_REQUESTED));
    assert_eq!((answers[1].status(), answers[1].dw0()), (Status::SUCCESS, 0));
    rig.device.contents().is_stuck = true;
    let running = rig.push_command(1, read_command(1));
    rig.ring_submission_doorbell(1);
    rig.poll_transport();
    assert_eq!(rig.run_admin(abort(1, running)).dw0(), 1);
}

#[test]
fn completed_aborts_free_their_limits() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    for _ in 0..10 {
        let parked = rig.push_command(0, event_request_command());
        rig.ring_submission_doorbell(0);
        rig.poll_transport();
        rig.push_command(0, Abort { sqid: 0, abort_cid: parked }.to_command());
        rig.ring_submission_doorbell(0);
        let mut answers = Vec::new();
        rig.poll_until("both answers", |rig| {
            answers.extend(rig.take_completion(0));
            answers.len() == 2
        });
        let are_known = |answer: &tenmil_wire::Completion| {
            answer.status().is_success() || answer.status() == Status::ABORT_REQUESTED
        };
        assert!(answers.iter().all(are_known), "{answers:?}");
    }
}

#[test]
fn number_of_queues_is_fixed_once_a_queue_exists() {
    let set = SetFeatures { fid: 7, cdw11: 0x0001_0001, ..SetFeatures::default() }.to_command();
    let mut rig = TransportFixture::new_enabled(SHARED);
    assert_eq!(rig.run_admin(set).dw0(), 0x0001_0001);
    let pair = rig.uncreated_queue_pair(1, 1, 8);
    assert_eq!(rig.create_completion_queue(&pair, None), Status::SUCCESS);
    assert!(rig.run_admin(set).status().has_same_code_as(Status::COMMAND_SEQUENCE_ERROR));
}

#[test]
fn completion_queue_being_deleted_accepts_no_submission_queue() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    let pair = rig.uncreated_queue_pair(1, 1, 8);
    assert_eq!(rig.create_completion_queue(&pair, None), Status::SUCCESS);
    rig.front.deletions.push(QueueDeletion::Completion { cid: 999, cqid: 1 });
    // Before the next check of the deletions, which would complete it.
    let create = CreateSubmissionQueue {
        sqid: 1,
        entries: 8,
        address: 0x9000,
        cqid: 1,
        priority: Priority::Low,
    };
    let refused = rig.front.create_submission_queue(create);
    assert_eq!(refused, Err(Status::COMPLETION_QUEUE_INVALID.with_dnr()));
    assert_eq!(
        rig.front.check_delete_completion_queue(1),
        Err(Status::INVALID_QUEUE_IDENTIFIER.with_dnr())
    );
}

#[test]
fn completion_queue_deletion_waits_for_posted_completions() {
    for seed in 0..300 {
        let mut rig = TransportFixture::with_setup(
            LATER,
            seed,
            |device| device.with_random_delays(seed),
            |_| {},
        );
        rig.enable_controller(16);
        rig.create_queue_pair(1, 1, None);
        for _ in 0..6 {
            rig.push_command(1, read_command(1));
        }
        rig.ring_submission_doorbell(1);
        for _ in 0..seed % 60 {
            rig.poll_transport();
        }
        assert!(rig.run_admin(delete_submission_queue_command(1)).status().is_success());
        assert!(rig.run_admin(delete_completion_queue_command(1)).status().is_success());
        let answers: Vec<_> = core::iter::from_fn(|| rig.take_completion(1)).collect();
        let taken = answers.iter().map(|answer| usize::from(answer.sqhd())).max().unwrap_or(0);
        assert_eq!(answers.len(), taken, "seed {seed}: every command that was taken");
    }
}

#[test]
fn smallest_admin_queue_works_with_held_event_requests() {
    for behavior in [SHARED, LATER] {
        let mut rig = TransportFixture::new(behavior, |device| device);
        rig.enable_controller(2);
        rig.push_command(0, event_request_command());
        rig.ring_submission_doorbell(0);
        for _ in 0..50 {
            rig.poll_transport();
        }
        for _ in 0..9 {
            assert!(
                rig.run_admin(identify_controller_command().with_prp(DATA, 0))
                    .status()
                    .is_success()
            );
        }
        assert_eq!(rig.read_register(CSTS), 1);
    }
}

#[test]
fn full_admin_completion_queue_receives_no_more_entries() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    for _ in 0..15 {
        rig.push_command(0, identify_controller_command().with_prp(DATA, 0));
    }
    rig.ring_submission_doorbell(0);
    for _ in 0..50 {
        rig.poll_transport();
    }
    let mut count = 0;
    while rig.take_completion(0).is_some() {
        count += 1;
    }
    assert_eq!(count, 15);
    assert!(rig.run_admin(identify_controller_command().with_prp(DATA, 0)).status().is_success());
}

#[test]
fn format_erases_user_data() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    rig.create_queue_pair(1, 1, None);
    rig.device.contents().bytes.fill(0xaa);
    let format = tenmil_wire::admin::FormatNvm {
        nsid: 1,
        ses: tenmil_wire::admin::SecureErase::UserData,
        ..Default::default()
    };
    assert_eq!(rig.run_admin(format.to_command()).status(), Status::SUCCESS);
    rig.poll_transport();
    assert!(rig.run_command(1, read_command(8)).status().is_success());
    assert_eq!(rig.read_host_memory(DATA, 4096), vec![0; 4096], "erased");
}

#[test]
fn health_log_includes_io_queue_counters() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    rig.create_queue_pair(1, 1, None);
    for _ in 0..3 {
        rig.run_command(1, read_command(8));
    }
    let log = GetLogPage { lid: 2, nsid: u32::MAX, numd: 127, ..Default::default() };
    assert!(rig.run_admin(log.to_command().with_prp(DATA, 0)).status().is_success());
    // Host Read Commands, bytes 64 to 79 (Base 2.1 §5.1.12.1.3).
    assert_eq!(rig.read_host_memory(DATA + 64, 2), [3, 0]);
}
