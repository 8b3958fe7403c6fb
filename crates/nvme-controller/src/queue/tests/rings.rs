//! Rings that wrap, fill up and have invalid doorbells; shadow doorbells; two submission queues on one
//! completion queue.

use tenmil_base::BlockDevice;
use tenmil_wire::{Command, IoOpcode, Status};

use super::rig::{BLOCKS, COPIED, DATA, LATER, Rig, Ring, SHARED, Setup, io, ram};
use crate::controller::interface::InvalidDoorbell;
use crate::fuzz::block_device::FakeDevice;
use crate::queue::QueueEvent;

#[test]
fn rings_wrap_and_every_command_is_answered_once() {
    for (behavior, seed) in [(SHARED, 0), (COPIED, 1), (LATER, 2), (LATER, 3)] {
        let ram = ram();
        let device = FakeDevice::new(&ram, BLOCKS);
        let device = if seed == 0 { device } else { device.later(seed) };
        let setup = Setup { behavior, entries: 5, cq_entries: 7, seed, ..Setup::default() };
        let mut rig = Rig::new(&setup, &ram, device);
        let mut outstanding = std::collections::BTreeSet::new();
        let (mut pushed, mut answered) = (0_u32, 0);
        for _ in 0..200_000 {
            while pushed < 400 && outstanding.len() < 4 {
                let blocks = if pushed.is_multiple_of(3) { 16 } else { 1 };
                let opcode =
                    if pushed.is_multiple_of(2) { IoOpcode::Read } else { IoOpcode::Write };
                assert!(outstanding.insert(rig.push(io(opcode, u64::from(pushed % 64), blocks))));
                pushed += 1;
            }
            rig.ring();
            rig.poll();
            while let Some(completion) = rig.peek() {
                assert!(outstanding.remove(&completion.cid()), "seed {seed}: answered once");
                assert_eq!(completion.status(), Status::SUCCESS);
                answered += 1;
                rig.give_back();
            }
            if answered == 400 {
                break;
            }
        }
        assert_eq!((answered, rig.queue.is_drained()), (400, true), "seed {seed}");
    }
}

#[test]
fn a_turn_takes_several_bursts_of_what_is_answered_at_once_and_one_of_what_is_not() {
    for (is_late, first) in [(false, 8), (true, 2)] {
        let ram = ram();
        let device = FakeDevice::new(&ram, BLOCKS);
        let device = if is_late { device.later(1) } else { device };
        let mut rig = Rig::new(&Setup::default(), &ram, device);
        rig.queue.set_burst(2);
        for lba in 0..11 {
            rig.push(io(IoOpcode::Read, lba, 1));
        }
        rig.ring();
        assert_eq!(rig.poll().taken, first, "of 11");
        assert_eq!(rig.collect(11).len(), 11);
        assert!(rig.queue.is_drained());
    }
}

#[test]
fn a_full_completion_queue_holds_commands_back_until_there_is_a_place() {
    let ram = ram();
    let setup = Setup { cq_entries: 4, ..Setup::default() };
    let mut rig = Rig::new(&setup, &ram, FakeDevice::new(&ram, BLOCKS));
    for _ in 0..10 {
        rig.push(io(IoOpcode::Read, 0, 1));
    }
    rig.ring();
    let mut seen = 0;
    for round in 1..=4 {
        for _ in 0..20 {
            rig.poll();
        }
        let mut now = 0;
        while rig.peek().is_some() {
            now += 1;
        }
        assert_eq!(now, if round < 4 { 3 } else { 1 }, "three places of four");
        assert_eq!(rig.device.blocks().log.len(), seen + now, "none was begun without a place");
        seen += now;
        rig.give_back();
    }
    assert_eq!(seen, 10);
}

#[test]
fn slow_commands_do_not_take_a_place_they_have_not_got() {
    for contexts_max in [2, 8] {
        let ram = ram();
        let setup = Setup { cq_entries: 3, contexts_max, behavior: LATER, ..Setup::default() };
        let mut rig = Rig::new(&setup, &ram, FakeDevice::new(&ram, BLOCKS).later(9));
        for _ in 0..12 {
            rig.push(io(IoOpcode::Write, 0, 16));
        }
        rig.ring();
        assert_eq!(rig.collect(12).len(), 12);
    }
}

#[test]
fn a_tail_outside_the_ring_is_reported_once_and_changes_nothing() {
    let ram = ram();
    let mut rig = Rig::new(&Setup::default(), &ram, FakeDevice::new(&ram, BLOCKS));
    for hostile in [16, 17, 0xffff, 0x1_0000, u32::MAX] {
        rig.events.clear();
        rig.doorbells.ring(2, hostile);
        for _ in 0..5 {
            assert_eq!(rig.poll().taken, 0);
        }
        let expected = [QueueEvent::InvalidDoorbell(InvalidDoorbell::Value)];
        assert_eq!(rig.events, expected, "{hostile:x}");
    }
    rig.ok(io(IoOpcode::Read, 0, 1));
}

#[test]
fn a_head_that_was_never_filled_is_reported_and_gives_no_place() {
    let ram = ram();
    let setup = Setup { cq_entries: 4, ..Setup::default() };
    let mut rig = Rig::new(&setup, &ram, FakeDevice::new(&ram, BLOCKS));
    for _ in 0..5 {
        rig.push(io(IoOpcode::Read, 0, 1));
    }
    rig.ring();
    rig.poll();
    rig.poll();
    for hostile in [4, u32::MAX] {
        rig.events.clear();
        rig.doorbells.ring(3, hostile);
        for _ in 0..3 {
            assert_eq!(rig.poll().posted, 0);
        }
        assert_eq!(rig.events, [QueueEvent::InvalidDoorbell(InvalidDoorbell::Value)]);
    }
    // Ten were posted. A head beyond them is as invalid as one outside the ring.
    let mut rig = Rig::new(&Setup::default(), &ram, FakeDevice::new(&ram, BLOCKS));
    for count in [10, 8] {
        rig.events.clear();
        for _ in 0..count {
            rig.push(io(IoOpcode::Read, 0, 1));
        }
        rig.ring();
        rig.poll();
        rig.doorbells.ring(3, 11);
    }
    assert_eq!(rig.events, [QueueEvent::InvalidDoorbell(InvalidDoorbell::Value)]);
}

#[test]
fn shadow_doorbells_are_followed_and_the_host_is_told_when_to_ring() {
    let ram = ram();
    let mut rig = Rig::new(&Setup::default(), &ram, FakeDevice::new(&ram, BLOCKS));
    let (shadow, events) = (0x7000, 0x7100);
    assert_eq!(rig.queue.set_shadow(Some(1), shadow, events), Ok(true));
    assert_eq!(rig.queue.set_shadow(None, shadow + 32, events + 32), Ok(true));
    rig.push(io(IoOpcode::Read, 0, 1));
    rig.push(io(IoOpcode::Read, 0, 1));
    assert_eq!(rig.poll().taken, 0);
    rig.fill(shadow, &2_u32.to_le_bytes());
    assert_eq!(rig.poll().taken, 2, "without a ring");
    assert_eq!(rig.bytes(events, 4), 0_u32.to_le_bytes(), "a queue that is busy needs no ring");
    assert!(!rig.poll().is_busy);
    assert_eq!(rig.bytes(events, 4), 2_u32.to_le_bytes(), "a queue that rests does");
    // The register has no effect any more.
    rig.doorbells.ring(2, 5);
    assert_eq!(rig.poll().taken, 0);
    rig.fill(shadow, &99_u32.to_le_bytes());
    rig.poll();
    assert_eq!(rig.events, [QueueEvent::InvalidDoorbell(InvalidDoorbell::Value)]);
    assert!(rig.queue.set_shadow(Some(1), 1 << 40, events).is_err(), "nowhere");
}

#[test]
fn a_full_queue_in_shadow_goes_on_when_its_head_moves() {
    let ram = ram();
    let setup = Setup { cq_entries: 3, ..Setup::default() };
    let mut rig = Rig::new(&setup, &ram, FakeDevice::new(&ram, BLOCKS));
    rig.queue.set_shadow(None, 0x7000, 0x7100).unwrap();
    for _ in 0..3 {
        rig.push(io(IoOpcode::Read, 0, 1));
    }
    rig.ring();
    assert_eq!(rig.poll().taken, 2);
    assert_eq!(rig.poll().taken, 0);
    rig.fill(0x7000, &2_u32.to_le_bytes());
    assert_eq!(rig.poll().taken, 1);
}

#[test]
fn a_queue_in_shadow_rests_once_it_has_seen_everything_valid_or_not() {
    let ram = ram();
    let setup = Setup { cq_entries: 2, ..Setup::default() };
    let mut rig = Rig::new(&setup, &ram, FakeDevice::new(&ram, BLOCKS));
    rig.queue.set_shadow(Some(1), 0x7000, 0x7100).unwrap();
    rig.queue.set_shadow(None, 0x7020, 0x7120).unwrap();
    rig.push(io(IoOpcode::Read, 0, 1));
    rig.fill(0x7000, &1_u32.to_le_bytes());
    assert_eq!(rig.poll().posted, 1, "its only place is taken");
    for (shadow, rung) in [(0x7020, 1_u32), (0x7020, 77), (0x7000, 99)] {
        rig.fill(shadow, &rung.to_le_bytes());
        let busy = (0..10).filter(|_| rig.poll().is_busy).count();
        assert!(busy <= 2, "busy {busy} times after {rung} was rung at {shadow:#x}");
    }
    assert_eq!(rig.events, [QueueEvent::InvalidDoorbell(InvalidDoorbell::Value)]);
    assert_eq!(rig.bytes(0x7120, 4), 1_u32.to_le_bytes(), "the host knows what was seen");
}

#[test]
fn two_submission_queues_share_a_completion_queue_and_its_places() {
    let ram = ram();
    let setup = Setup { cq_entries: 4, ..Setup::default() };
    let mut rig = Rig::new(&setup, &ram, FakeDevice::new(&ram, BLOCKS));
    rig.queue.add_submission_queue(2, 8, 0x3000).unwrap();
    let mut cids = [vec![], vec![]];
    let mut other = Ring { at: 0x3000, size: 8, index: 0 };
    for _ in 0..6 {
        cids[0].push(rig.push(io(IoOpcode::Read, 0, 1)));
        core::mem::swap(&mut rig.sq, &mut other);
        cids[1].push(rig.push(io(IoOpcode::Write, 1, 16)));
        core::mem::swap(&mut rig.sq, &mut other);
    }
    rig.ring();
    rig.doorbells.ring(4, 6);
    let mut seen = [vec![], vec![]];
    for completion in rig.collect(12) {
        seen[usize::from(completion.sqid()) - 1].push(completion.cid());
    }
    assert_eq!(seen, cids);
}

#[test]
fn a_ring_that_is_not_there_is_refused_and_one_that_vanishes_breaks_the_queue() {
    let ram = ram();
    let mut rig = Rig::new(&Setup::default(), &ram, FakeDevice::new(&ram, BLOCKS));
    assert!(rig.queue.add_submission_queue(2, 8, 1 << 40).is_err());
    assert!(rig.queue.add_submission_queue(2, 8, u64::MAX - 64).is_err());
    let setup = Setup { behavior: LATER, ..Setup::default() };
    let mut rig = Rig::new(&setup, &ram, FakeDevice::new(&ram, BLOCKS));
    rig.push(io(IoOpcode::Read, 0, 1));
    rig.ring();
    rig.ram.host().truncate(0x1000);
    for _ in 0..100 {
        rig.poll();
    }
    assert!(matches!(rig.events[..], [QueueEvent::RingFault(_)]), "said once");
    assert!(rig.queue.is_drained());
}

#[test]
fn a_queue_may_move_to_another_thread() {
    fn is_send<T: Send>(_: &T) {}
    let ram = ram();
    let rig = Rig::new(&Setup::default(), &ram, FakeDevice::new(&ram, BLOCKS));
    is_send(&rig.queue);
    assert_eq!(rig.device.limits().block_size, 512);
}

#[test]
fn an_idle_queue_says_so_and_a_waiting_one_too() {
    let ram = ram();
    let mut rig = Rig::new(&Setup::default(), &ram, FakeDevice::new(&ram, BLOCKS));
    let idle = crate::queue::PollStats::default();
    assert_eq!(rig.poll(), idle);
    rig.device.blocks().is_stuck = true;
    rig.push(Command::new(IoOpcode::Read.code()).with_nsid(1).with_prp(DATA, 0));
    rig.ring();
    let turned = rig.poll();
    assert!(turned.is_busy && turned.is_pending && turned.taken == 1);
    let turned = rig.poll();
    assert!(!turned.is_busy && turned.is_pending);
    rig.device.blocks().is_stuck = false;
    assert_eq!(rig.poll().posted, 1);
    assert_eq!(rig.poll(), idle);
}
