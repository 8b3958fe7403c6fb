//! Abort, preemption, queue deletion and stop: commands that end early, and reservation commands that
//! another party ends.

use tenmil_wire::sgl::Descriptor;
use tenmil_wire::{Command, DataPointer, Fuse, IoOpcode, Status};

use super::rig::{BLOCKS, COPIED, DATA, LATER, Rig, SHARED, Setup, io, ram};
use crate::controller::interface::AdminResult;
use crate::controller::{WriterGuard, WriterTracker};
use crate::fuzz::block_device::FakeDevice;
use crate::fuzz::host::HostBehavior;
use crate::queue::QueueEvent;

fn rig(setup: &Setup) -> Rig {
    let ram = ram();
    Rig::new(setup, &ram, FakeDevice::new(&ram, BLOCKS))
}

#[test]
fn a_command_that_waits_is_aborted_and_one_at_the_medium_is_not() {
    let mut rig = rig(&Setup { behavior: COPIED, buffers: 1, ..Setup::default() });
    rig.device.blocks().is_stuck = true;
    let running = rig.push(io(IoOpcode::Read, 0, 1));
    let waiting = rig.push(io(IoOpcode::Read, 1, 1));
    rig.ring();
    rig.poll();
    let now = rig.now;
    assert!(!rig.queue.abort(now, 1, 999), "no such command");
    assert!(!rig.queue.abort(now, 2, waiting), "no such queue");
    assert!(rig.queue.abort(now, 1, waiting));
    let aborted = rig.collect(1)[0];
    assert_eq!((aborted.cid(), aborted.status()), (waiting, Status::ABORT_REQUESTED));
    rig.device.blocks().is_stuck = false;
    assert_eq!(rig.collect(1)[0].cid(), running);
    assert_eq!(rig.shared.buffers.free(), 1);
}

#[test]
fn a_command_with_one_request_ends_by_itself() {
    let mut rig = rig(&Setup::default());
    rig.device.blocks().is_stuck = true;
    let cid = rig.push(io(IoOpcode::Read, 0, 1));
    rig.ring();
    rig.poll();
    let now = rig.now;
    assert!(!rig.queue.abort(now, 1, cid));
    rig.device.blocks().is_stuck = false;
    assert_eq!(rig.collect(1)[0].status(), Status::SUCCESS);
}

#[test]
fn a_held_command_and_half_a_pair_can_be_aborted() {
    let mut rig = rig(&Setup { contexts_max: 2, ..Setup::default() });
    let half = rig.push(io(IoOpcode::Compare, 0, 1).with_fuse(Fuse::First));
    rig.ring();
    rig.poll();
    let now = rig.now;
    assert!(rig.queue.abort(now, 1, half));
    assert_eq!(rig.collect(1)[0].cid(), half);
    rig.device.blocks().is_stuck = true;
    rig.push(io(IoOpcode::Compare, 0, 1));
    rig.push(io(IoOpcode::Compare, 0, 1));
    let held = rig.push(io(IoOpcode::Compare, 0, 1));
    rig.ring();
    rig.poll();
    assert!(rig.queue.abort(now, 1, held));
    assert_eq!(rig.collect(1)[0].cid(), held);
    rig.device.blocks().is_stuck = false;
    assert_eq!(rig.collect(2).len(), 2);
    rig.ok(io(IoOpcode::Read, 0, 1));
}

#[test]
fn a_preempted_namespace_has_its_commands_aborted() {
    let mut rig = rig(&Setup { behavior: COPIED, buffers: 1, ..Setup::default() });
    rig.device.blocks().is_stuck = true;
    for _ in 0..3 {
        rig.push(io(IoOpcode::Write, 0, 1));
    }
    rig.ring();
    rig.poll();
    assert!(abort(&mut rig, 2).all_released() && rig.peek().is_none(), "another namespace");
    let writers = abort(&mut rig, 1);
    rig.queue.check_preempted();
    assert!(!writers.all_released(), "one is at the medium");
    rig.device.blocks().is_stuck = false;
    for completion in rig.collect(3) {
        assert_eq!(completion.status(), Status::ABORTED_PREEMPT_AND_ABORT);
    }
    rig.queue.check_preempted();
    assert!(writers.all_released());
}

#[test]
fn a_preemption_waits_for_writes_that_were_outstanding_and_nothing_else() {
    let mut rig = rig(&Setup::default());
    rig.device.blocks().is_stuck = true;
    rig.push(io(IoOpcode::Read, 0, 1));
    rig.ring();
    rig.poll();
    assert!(abort(&mut rig, 1).all_released(), "it changes nothing");
    for opcode in [IoOpcode::Write, IoOpcode::WriteZeroes] {
        rig.push(io(opcode, 0, 1));
    }
    rig.ring();
    rig.poll();
    let writers = abort(&mut rig, 1);
    rig.device.blocks().is_stuck = false;
    assert_eq!(rig.collect(3).len(), 3);
    rig.device.blocks().is_stuck = true;
    for opcode in [IoOpcode::Write, IoOpcode::WriteZeroes] {
        rig.push(io(opcode, 0, 1));
    }
    rig.ring();
    rig.poll();
    assert!(!writers.all_released());
    rig.queue.check_preempted();
    assert!(writers.all_released(), "these came later");
    assert!(!abort(&mut rig, 1).all_released());
    rig.device.blocks().is_stuck = false;
    assert_eq!(rig.collect(2).len(), 2);
}

/// What of a preempted host may still write.
fn abort(rig: &mut Rig, nsid: u32) -> WriterTracker {
    let preempted = WriterGuard::new();
    rig.queue.abort_namespace(rig.now, nsid, &preempted);
    preempted.writers()
}

#[test]
fn a_deleted_queue_answers_what_it_has_taken_and_takes_no_more() {
    for behavior in [SHARED, COPIED, LATER] {
        let mut rig = rig(&Setup { behavior, cq_entries: 4, buffers: 1, ..Setup::default() });
        rig.device.blocks().is_stuck = true;
        for index in 0..8_u32 {
            rig.push(io(IoOpcode::Write, 0, if index.is_multiple_of(2) { 16 } else { 1 }));
        }
        rig.ring();
        for _ in 0..200 {
            rig.poll();
        }
        let now = rig.now;
        rig.queue.close_submission_queue(now, 1);
        rig.device.blocks().is_stuck = false;
        for _ in 0..200 {
            rig.poll();
        }
        assert!(rig.queue.remove_submission_queue(1));
        assert!(rig.queue.remove_submission_queue(1), "gone is gone");
        assert_eq!(rig.queue.submission_queues().count(), 0);
        assert!(rig.queue.is_drained());
        let answered = core::iter::from_fn(|| rig.peek()).count();
        assert_eq!(answered, 3, "what was taken, and no place was free for more");
        assert_eq!(rig.shared.buffers.free(), 1);
    }
}

#[test]
fn commands_of_the_queue_behind_a_deleted_one_still_find_their_queue() {
    let mut rig = rig(&Setup::default());
    rig.queue.add_submission_queue(2, 8, 0x3000).unwrap();
    rig.device.blocks().is_stuck = true;
    rig.fill(0x3000, &io(IoOpcode::Read, 0, 1).with_cid(77).to_bytes());
    rig.doorbells.ring(4, 1);
    rig.poll();
    let now = rig.now;
    rig.queue.close_submission_queue(now, 1);
    assert!(rig.queue.remove_submission_queue(1));
    rig.device.blocks().is_stuck = false;
    let completion = rig.collect(1)[0];
    assert_eq!((completion.cid(), completion.sqid(), completion.sqhd()), (77, 2, 1));
}

/// A read whose SGL has more descriptors and more pieces than are processed in one poll.
fn finely_scattered(rig: &mut Rig) -> Command {
    let block = |index: u64| Descriptor::data_block(DATA + 0x4000 + index * 32, 8).to_bytes();
    let list: Vec<u8> = (0..64).flat_map(block).collect();
    rig.fill(0x6000, &list);
    let first = Descriptor::last_segment(0x6000, 1024);
    io(IoOpcode::Read, 0, 1).with_psdt(DataPointer::Sgl).with_sgl1(first)
}

#[test]
fn a_command_that_waits_for_the_host_is_aborted_once_the_host_has_answered() {
    let mut aborted = 0;
    for turns in 0..40 {
        let setup = Setup { behavior: LATER, seed: turns + 1, ..Setup::default() };
        let mut rig = rig(&setup);
        let command = finely_scattered(&mut rig);
        let cid = rig.push(command);
        rig.ring();
        for _ in 0..turns {
            rig.poll();
        }
        let now = rig.now;
        let expected = match rig.queue.abort(now, 1, cid) {
            true => Status::ABORT_REQUESTED,
            false => Status::SUCCESS,
        };
        aborted += u32::from(!expected.is_success());
        if rig.peek().is_none() {
            assert_eq!(rig.collect(1)[0].status(), expected, "after {turns} turns");
        }
        assert_eq!(rig.shared.buffers.free(), 2);
    }
    assert!(aborted > 10, "{aborted} of 40");
}

/// Commands of every kind in flight, stopped after any number of polls: only transfers already in flight
/// change host memory afterwards, and nothing does once the queue is drained.
#[test]
fn a_stopped_queue_answers_nothing_and_lets_go_of_the_host() {
    let hosts: [HostBehavior; 3] = [SHARED, COPIED, LATER];
    for (seed, behavior) in (1..).zip(hosts.into_iter().cycle().take(60)) {
        let ram = ram();
        let device = FakeDevice::new(&ram, BLOCKS).later(seed);
        let setup = Setup { behavior, seed, buffers: 1, ..Setup::default() };
        let mut rig = Rig::new(&setup, &ram, device);
        for opcode in [IoOpcode::Read, IoOpcode::Write, IoOpcode::Compare, IoOpcode::Copy] {
            rig.push(io(opcode, 8, 1));
            rig.push(io(opcode, 8, 16));
        }
        let scattered = finely_scattered(&mut rig);
        rig.push(scattered);
        rig.push(scattered.with_opcode(IoOpcode::Write.code()));
        rig.push(io(IoOpcode::Compare, 0, 1).with_fuse(Fuse::First));
        rig.push(io(IoOpcode::Write, 0, 1).with_fuse(Fuse::Second));
        rig.ring();
        for _ in 0..seed {
            rig.poll();
        }
        let now = rig.now;
        rig.queue.stop(now);
        ram.close(true);
        let before = rig.bytes(0x8000, 0x1000);
        let mut turns = 0;
        while !rig.queue.is_drained() {
            assert_eq!(rig.poll().taken, 0);
            turns += 1;
            assert!(turns < 2000, "seed {seed}: it drains");
        }
        if behavior.shares_rings {
            assert_eq!(rig.bytes(0x8000, 0x1000), before, "seed {seed}: nothing was answered");
        }
        ram.seal(true);
        for _ in 0..50 {
            rig.poll();
        }
        assert_eq!(ram.violations(), 0, "seed {seed}");
        assert_eq!(rig.shared.buffers.free(), 1, "seed {seed}: buffers are back");
    }
}

#[test]
fn a_stuck_medium_keeps_the_queue_from_being_drained() {
    let mut rig = rig(&Setup::default());
    rig.device.blocks().is_stuck = true;
    rig.push(io(IoOpcode::Read, 0, 1));
    rig.ring();
    rig.poll();
    let now = rig.now;
    rig.queue.stop(now);
    for _ in 0..100 {
        rig.poll();
    }
    assert!(!rig.queue.is_drained(), "the medium may still write to the host");
    rig.device.blocks().is_stuck = false;
    rig.poll();
    assert!(rig.queue.is_drained());
    assert!(rig.peek().is_none());
}

#[test]
fn reservation_commands_are_decided_elsewhere_and_their_data_moved_here() {
    for behavior in [SHARED, LATER] {
        let mut rig = rig(&Setup { behavior, ..Setup::default() });
        rig.fill(DATA, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
        for (opcode, len) in [
            (IoOpcode::ReservationRegister, 16),
            (IoOpcode::ReservationAcquire, 16),
            (IoOpcode::ReservationRelease, 8),
        ] {
            let cid = rig.push(io(opcode, 0, 1));
            let (ticket, bytes) = event(&mut rig);
            assert_eq!(bytes, rig.bytes(DATA, len));
            let (now, status) = (rig.now, Status::RESERVATION_CONFLICT);
            rig.queue.complete_reservation(now, ticket, AdminResult::refused(status), &[]);
            rig.queue.complete_reservation(now, ticket, AdminResult::OK, &[]);
            let completion = rig.collect(1)[0];
            assert_eq!((completion.cid(), completion.status()), (cid, status), "decided once");
        }
        rig.fill(DATA, &[0xee; 32]);
        rig.push(io(IoOpcode::ReservationReport, 0, 1).with_cdw10(5));
        let (ticket, bytes) = event(&mut rig);
        assert!(bytes.is_empty());
        let now = rig.now;
        rig.queue.complete_reservation(now, ticket, AdminResult::OK, &[7; 64]);
        assert_eq!(rig.collect(1)[0].status(), Status::SUCCESS);
        assert_eq!(rig.bytes(DATA, 25), [[7; 24].as_slice(), &[0xee]].concat(), "six dwords");
        let too_long = io(IoOpcode::ReservationReport, 0, 1).with_cdw10(u32::MAX);
        assert_eq!(rig.status(too_long), Status::INVALID_FIELD.with_dnr());
    }
}

#[test]
fn what_the_controller_decides_between_turns_is_told_of_by_the_next() {
    let mut rig = rig(&Setup::default());
    let cid = rig.push(io(IoOpcode::ReservationRegister, 0, 1));
    let (ticket, _) = event(&mut rig);
    let now = rig.now;
    assert!(!rig.queue.abort(now, 1, cid), "it may have been decided by now");
    assert_eq!(rig.queue.poll(now).posted, 0);
    rig.queue.complete_reservation(now, ticket, AdminResult::OK, &[]);
    assert_eq!(rig.queue.poll(now).posted, 1, "or its vector is not signalled");
    assert_eq!(rig.queue.poll(now).posted, 0, "once");
    assert_eq!(rig.collect(1)[0].status(), Status::SUCCESS);
}

fn event(rig: &mut Rig) -> (u32, Vec<u8>) {
    rig.ring();
    rig.events.clear();
    for _ in 0..1000 {
        rig.poll();
        if let Some(QueueEvent::Reservation { ticket, bytes, .. }) = rig.events.pop() {
            return (ticket, bytes);
        }
    }
    panic!("no letter came");
}
