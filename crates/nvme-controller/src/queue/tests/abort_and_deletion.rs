//! Abort, preemption, queue deletion and stop: commands that end early, and reservation commands that
//! another party ends.

use tenmil_wire::sgl::Descriptor;
use tenmil_wire::{Command, DataPointer, Fuse, IoOpcode, Status};

use super::fixture::{
    BLOCKS, COPIED, DATA, FixtureConfig, LATER, QueueFixture, SHARED, fixture_ram, io_command,
};
use crate::controller::transport_interface::AdminResult;
use crate::controller::{PreemptedWriterGuard, PreemptedWriterTracker};
use crate::fuzz::block_device::FakeDevice;
use crate::fuzz::fake_host::HostBehavior;
use crate::queue::QueueEvent;

fn default_fixture(setup: &FixtureConfig) -> QueueFixture {
    let ram = fixture_ram();
    QueueFixture::new(setup, &ram, FakeDevice::new(&ram, BLOCKS))
}

#[test]
fn waiting_command_is_aborted_and_a_submitted_one_is_not() {
    let mut rig = default_fixture(&FixtureConfig {
        behavior: COPIED,
        buffers: 1,
        ..FixtureConfig::default()
    });
    rig.device.contents().is_stuck = true;
    let running = rig.push_command(io_command(IoOpcode::Read, 0, 1));
    let waiting = rig.push_command(io_command(IoOpcode::Read, 1, 1));
    rig.ring_submission_doorbell();
    rig.poll();
    let now = rig.now;
    assert!(!rig.queue.try_abort_command(now, 1, 999), "no such command");
    assert!(!rig.queue.try_abort_command(now, 2, waiting), "no such queue");
    assert!(rig.queue.try_abort_command(now, 1, waiting));
    let aborted = rig.collect_completions(1)[0];
    assert_eq!((aborted.cid(), aborted.status()), (waiting, Status::ABORT_REQUESTED));
    rig.device.contents().is_stuck = false;
    assert_eq!(rig.collect_completions(1)[0].cid(), running);
    assert_eq!(rig.shared.buffers.free_count(), 1);
}

#[test]
fn single_request_command_completes_despite_the_abort() {
    let mut rig = default_fixture(&FixtureConfig::default());
    rig.device.contents().is_stuck = true;
    let cid = rig.push_command(io_command(IoOpcode::Read, 0, 1));
    rig.ring_submission_doorbell();
    rig.poll();
    let now = rig.now;
    assert!(!rig.queue.try_abort_command(now, 1, cid));
    rig.device.contents().is_stuck = false;
    assert_eq!(rig.collect_completions(1)[0].status(), Status::SUCCESS);
}

#[test]
fn held_command_and_fused_half_can_be_aborted() {
    let mut rig = default_fixture(&FixtureConfig { contexts_max: 2, ..FixtureConfig::default() });
    let half = rig.push_command(io_command(IoOpcode::Compare, 0, 1).with_fuse(Fuse::First));
    rig.ring_submission_doorbell();
    rig.poll();
    let now = rig.now;
    assert!(rig.queue.try_abort_command(now, 1, half));
    assert_eq!(rig.collect_completions(1)[0].cid(), half);
    rig.device.contents().is_stuck = true;
    rig.push_command(io_command(IoOpcode::Compare, 0, 1));
    rig.push_command(io_command(IoOpcode::Compare, 0, 1));
    let held = rig.push_command(io_command(IoOpcode::Compare, 0, 1));
    rig.ring_submission_doorbell();
    rig.poll();
    assert!(rig.queue.try_abort_command(now, 1, held));
    assert_eq!(rig.collect_completions(1)[0].cid(), held);
    rig.device.contents().is_stuck = false;
    assert_eq!(rig.collect_completions(2).len(), 2);
    rig.run_successfully(io_command(IoOpcode::Read, 0, 1));
}

#[test]
fn preemption_aborts_commands_of_the_namespace() {
    let mut rig = default_fixture(&FixtureConfig {
        behavior: COPIED,
        buffers: 1,
        ..FixtureConfig::default()
    });
    rig.device.contents().is_stuck = true;
    for _ in 0..3 {
        rig.push_command(io_command(IoOpcode::Write, 0, 1));
    }
    rig.ring_submission_doorbell();
    rig.poll();
    assert!(
        preempt_namespace(&mut rig, 2).have_all_writers_finished()
            && rig.peek_completion().is_none(),
        "another namespace"
    );
    let writers = preempt_namespace(&mut rig, 1);
    rig.queue.poll_preempted_writes();
    assert!(!writers.have_all_writers_finished(), "one is at the medium");
    rig.device.contents().is_stuck = false;
    for completion in rig.collect_completions(3) {
        assert_eq!(completion.status(), Status::ABORTED_PREEMPT_AND_ABORT);
    }
    rig.queue.poll_preempted_writes();
    assert!(writers.have_all_writers_finished());
}

#[test]
fn preemption_waits_only_for_outstanding_writes() {
    let mut rig = default_fixture(&FixtureConfig::default());
    rig.device.contents().is_stuck = true;
    rig.push_command(io_command(IoOpcode::Read, 0, 1));
    rig.ring_submission_doorbell();
    rig.poll();
    assert!(preempt_namespace(&mut rig, 1).have_all_writers_finished(), "it changes nothing");
    for opcode in [IoOpcode::Write, IoOpcode::WriteZeroes] {
        rig.push_command(io_command(opcode, 0, 1));
    }
    rig.ring_submission_doorbell();
    rig.poll();
    let writers = preempt_namespace(&mut rig, 1);
    rig.device.contents().is_stuck = false;
    assert_eq!(rig.collect_completions(3).len(), 3);
    rig.device.contents().is_stuck = true;
    for opcode in [IoOpcode::Write, IoOpcode::WriteZeroes] {
        rig.push_command(io_command(opcode, 0, 1));
    }
    rig.ring_submission_doorbell();
    rig.poll();
    assert!(!writers.have_all_writers_finished());
    rig.queue.poll_preempted_writes();
    assert!(writers.have_all_writers_finished(), "these came later");
    assert!(!preempt_namespace(&mut rig, 1).have_all_writers_finished());
    rig.device.contents().is_stuck = false;
    assert_eq!(rig.collect_completions(2).len(), 2);
}

/// What of a preempted host may still write.
fn preempt_namespace(rig: &mut QueueFixture, nsid: u32) -> PreemptedWriterTracker {
    let preempted = PreemptedWriterGuard::new();
    rig.queue.abort_namespace(rig.now, nsid, &preempted);
    preempted.tracker()
}

#[test]
fn deleted_queue_completes_fetched_commands_and_fetches_no_more() {
    for behavior in [SHARED, COPIED, LATER] {
        let mut rig = default_fixture(&FixtureConfig {
            behavior,
            cq_entries: 4,
            buffers: 1,
            ..FixtureConfig::default()
        });
        rig.device.contents().is_stuck = true;
        for index in 0..8_u32 {
            rig.push_command(io_command(
                IoOpcode::Write,
                0,
                if index.is_multiple_of(2) { 16 } else { 1 },
            ));
        }
        rig.ring_submission_doorbell();
        for _ in 0..200 {
            rig.poll();
        }
        let now = rig.now;
        rig.queue.close_submission_queue(now, 1);
        rig.device.contents().is_stuck = false;
        for _ in 0..200 {
            rig.poll();
        }
        assert!(rig.queue.remove_submission_queue(1));
        assert!(rig.queue.remove_submission_queue(1), "gone is gone");
        assert_eq!(rig.queue.submission_queues().count(), 0);
        assert!(rig.queue.is_drained());
        let answered = core::iter::from_fn(|| rig.peek_completion()).count();
        assert_eq!(answered, 3, "what was taken, and no place was free for more");
        assert_eq!(rig.shared.buffers.free_count(), 1);
    }
}

#[test]
fn commands_of_other_submission_queues_survive_a_queue_deletion() {
    let mut rig = default_fixture(&FixtureConfig::default());
    rig.queue.add_submission_queue(2, 8, 0x3000).unwrap();
    rig.device.contents().is_stuck = true;
    rig.write_host_memory(0x3000, &io_command(IoOpcode::Read, 0, 1).with_cid(77).to_bytes());
    rig.doorbells.write_doorbell(4, 1);
    rig.poll();
    let now = rig.now;
    rig.queue.close_submission_queue(now, 1);
    assert!(rig.queue.remove_submission_queue(1));
    rig.device.contents().is_stuck = false;
    let completion = rig.collect_completions(1)[0];
    assert_eq!((completion.cid(), completion.sqid(), completion.sqhd()), (77, 2, 1));
}

/// A read whose SGL has more descriptors and more pieces than are processed in one poll.
fn read_with_many_sgl_descriptors(rig: &mut QueueFixture) -> Command {
    let block = |index: u64| Descriptor::data_block(DATA + 0x4000 + index * 32, 8).to_bytes();
    let list: Vec<u8> = (0..64).flat_map(block).collect();
    rig.write_host_memory(0x6000, &list);
    let first = Descriptor::last_segment(0x6000, 1024);
    io_command(IoOpcode::Read, 0, 1).with_psdt(DataPointer::Sgl).with_sgl1(first)
}

#[test]
fn command_awaiting_host_memory_is_aborted_after_the_access() {
    let mut aborted = 0;
    for turns in 0..40 {
        let setup = FixtureConfig { behavior: LATER, seed: turns + 1, ..FixtureConfig::default() };
        let mut rig = default_fixture(&setup);
        let command = read_with_many_sgl_descriptors(&mut rig);
        let cid = rig.push_command(command);
        rig.ring_submission_doorbell();
        for _ in 0..turns {
            rig.poll();
        }
        let now = rig.now;
        let expected = match rig.queue.try_abort_command(now, 1, cid) {
            true => Status::ABORT_REQUESTED,
            false => Status::SUCCESS,
        };
        aborted += u32::from(!expected.is_success());
        if rig.peek_completion().is_none() {
            assert_eq!(rig.collect_completions(1)[0].status(), expected, "after {turns} turns");
        }
        assert_eq!(rig.shared.buffers.free_count(), 2);
    }
    assert!(aborted > 10, "{aborted} of 40");
}

/// Commands of every kind in flight, stopped after any number of polls: only transfers already in flight
/// change host memory afterwards, and nothing does once the queue is drained.
#[test]
fn stopped_queue_completes_nothing_and_ends_host_accesses() {
    let hosts: [HostBehavior; 3] = [SHARED, COPIED, LATER];
    for (seed, behavior) in (1..).zip(hosts.into_iter().cycle().take(60)) {
        let ram = fixture_ram();
        let device = FakeDevice::new(&ram, BLOCKS).with_random_delays(seed);
        let setup = FixtureConfig { behavior, seed, buffers: 1, ..FixtureConfig::default() };
        let mut rig = QueueFixture::new(&setup, &ram, device);
        for opcode in [IoOpcode::Read, IoOpcode::Write, IoOpcode::Compare, IoOpcode::Copy] {
            rig.push_command(io_command(opcode, 8, 1));
            rig.push_command(io_command(opcode, 8, 16));
        }
        let scattered = read_with_many_sgl_descriptors(&mut rig);
        rig.push_command(scattered);
        rig.push_command(scattered.with_opcode(IoOpcode::Write.code()));
        rig.push_command(io_command(IoOpcode::Compare, 0, 1).with_fuse(Fuse::First));
        rig.push_command(io_command(IoOpcode::Write, 0, 1).with_fuse(Fuse::Second));
        rig.ring_submission_doorbell();
        for _ in 0..seed {
            rig.poll();
        }
        let now = rig.now;
        rig.queue.stop(now);
        ram.forbid_new_access(true);
        let before = rig.read_host_memory(0x8000, 0x1000);
        let mut turns = 0;
        while !rig.queue.is_drained() {
            assert_eq!(rig.poll().taken, 0);
            turns += 1;
            assert!(turns < 2000, "seed {seed}: it drains");
        }
        if behavior.shares_rings {
            assert_eq!(
                rig.read_host_memory(0x8000, 0x1000),
                before,
                "seed {seed}: nothing was answered"
            );
        }
        ram.forbid_all_access(true);
        for _ in 0..50 {
            rig.poll();
        }
        assert_eq!(ram.violation_count(), 0, "seed {seed}");
        assert_eq!(rig.shared.buffers.free_count(), 1, "seed {seed}: buffers are back");
    }
}

#[test]
fn stuck_device_request_prevents_draining() {
    let mut rig = default_fixture(&FixtureConfig::default());
    rig.device.contents().is_stuck = true;
    rig.push_command(io_command(IoOpcode::Read, 0, 1));
    rig.ring_submission_doorbell();
    rig.poll();
    let now = rig.now;
    rig.queue.stop(now);
    for _ in 0..100 {
        rig.poll();
    }
    assert!(!rig.queue.is_drained(), "the medium may still write to the host");
    rig.device.contents().is_stuck = false;
    rig.poll();
    assert!(rig.queue.is_drained());
    assert!(rig.peek_completion().is_none());
}

#[test]
fn queue_transfers_data_of_reservation_commands_that_the_controller_executes() {
    for behavior in [SHARED, LATER] {
        let mut rig = default_fixture(&FixtureConfig { behavior, ..FixtureConfig::default() });
        rig.write_host_memory(DATA, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
        for (opcode, len) in [
            (IoOpcode::ReservationRegister, 16),
            (IoOpcode::ReservationAcquire, 16),
            (IoOpcode::ReservationRelease, 8),
        ] {
            let cid = rig.push_command(io_command(opcode, 0, 1));
            let (ticket, bytes) = next_reservation_event(&mut rig);
            assert_eq!(bytes, rig.read_host_memory(DATA, len));
            let (now, status) = (rig.now, Status::RESERVATION_CONFLICT);
            rig.queue.complete_reservation_command(now, ticket, AdminResult::failure(status), &[]);
            rig.queue.complete_reservation_command(now, ticket, AdminResult::OK, &[]);
            let completion = rig.collect_completions(1)[0];
            assert_eq!((completion.cid(), completion.status()), (cid, status), "decided once");
        }
        rig.write_host_memory(DATA, &[0xee; 32]);
        rig.push_command(io_command(IoOpcode::ReservationReport, 0, 1).with_cdw10(5));
        let (ticket, bytes) = next_reservation_event(&mut rig);
        assert!(bytes.is_empty());
        let now = rig.now;
        rig.queue.complete_reservation_command(now, ticket, AdminResult::OK, &[7; 64]);
        assert_eq!(rig.collect_completions(1)[0].status(), Status::SUCCESS);
        assert_eq!(
            rig.read_host_memory(DATA, 25),
            [[7; 24].as_slice(), &[0xee]].concat(),
            "six dwords"
        );
        let too_long = io_command(IoOpcode::ReservationReport, 0, 1).with_cdw10(u32::MAX);
        assert_eq!(rig.run_for_status(too_long), Status::INVALID_FIELD.with_dnr());
    }
}

#[test]
fn reservation_completed_between_polls_is_posted_by_the_next_poll() {
    let mut rig = default_fixture(&FixtureConfig::default());
    let cid = rig.push_command(io_command(IoOpcode::ReservationRegister, 0, 1));
    let (ticket, _) = next_reservation_event(&mut rig);
    let now = rig.now;
    assert!(!rig.queue.try_abort_command(now, 1, cid), "it may have been decided by now");
    assert_eq!(rig.queue.poll(now).posted, 0);
    rig.queue.complete_reservation_command(now, ticket, AdminResult::OK, &[]);
    assert_eq!(rig.queue.poll(now).posted, 1, "or its vector is not signalled");
    assert_eq!(rig.queue.poll(now).posted, 0, "once");
    assert_eq!(rig.collect_completions(1)[0].status(), Status::SUCCESS);
}

fn next_reservation_event(rig: &mut QueueFixture) -> (u32, Vec<u8>) {
    rig.ring_submission_doorbell();
    rig.events.clear();
    for _ in 0..1000 {
        rig.poll();
        if let Some(QueueEvent::Reservation { ticket, bytes, .. }) = rig.events.pop() {
            return (ticket, bytes);
        }
    }
    panic!("no letter came");
}
