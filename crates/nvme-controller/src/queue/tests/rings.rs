//! Rings that wrap, fill up and have invalid doorbells; shadow doorbells; two submission queues on one
//! completion queue.

use tenmil_base::BlockDevice;
use tenmil_wire::{Command, IoOpcode, Status};

use super::fixture::{
    BLOCKS, COPIED, DATA, FixtureConfig, HostRing, LATER, QueueFixture, SHARED, fixture_ram,
    io_command,
};
use crate::controller::transport_interface::InvalidDoorbell;
use crate::fuzz::block_device::FakeDevice;
use crate::queue::QueueEvent;

#[test]
fn rings_wrap_and_every_command_completes_once() {
    for (behavior, seed) in [(SHARED, 0), (COPIED, 1), (LATER, 2), (LATER, 3)] {
        let ram = fixture_ram();
        let device = FakeDevice::new(&ram, BLOCKS);
        let device = if seed == 0 { device } else { device.with_random_delays(seed) };
        let setup =
            FixtureConfig { behavior, entries: 5, cq_entries: 7, seed, ..FixtureConfig::default() };
        let mut rig = QueueFixture::new(&setup, &ram, device);
        let mut outstanding = std::collections::BTreeSet::new();
        let (mut pushed, mut answered) = (0_u32, 0);
        for _ in 0..200_000 {
            while pushed < 400 && outstanding.len() < 4 {
                let blocks = if pushed.is_multiple_of(3) { 16 } else { 1 };
                let opcode =
                    if pushed.is_multiple_of(2) { IoOpcode::Read } else { IoOpcode::Write };
                assert!(outstanding.insert(rig.push_command(io_command(
                    opcode,
                    u64::from(pushed % 64),
                    blocks
                ))));
                pushed += 1;
            }
            rig.ring_submission_doorbell();
            rig.poll();
            while let Some(completion) = rig.peek_completion() {
                assert!(outstanding.remove(&completion.cid()), "seed {seed}: answered once");
                assert_eq!(completion.status(), Status::SUCCESS);
                answered += 1;
                rig.ring_completion_doorbell();
            }
            if answered == 400 {
                break;
            }
        }
        assert_eq!((answered, rig.queue.is_drained()), (400, true), "seed {seed}");
    }
}

#[test]
fn poll_fetches_several_bursts_of_immediately_completed_commands() {
    for (is_late, first) in [(false, 8), (true, 2)] {
        let ram = fixture_ram();
        let device = FakeDevice::new(&ram, BLOCKS);
        let device = if is_late { device.with_random_delays(1) } else { device };
        let mut rig = QueueFixture::new(&FixtureConfig::default(), &ram, device);
        rig.queue.set_arbitration_burst(2);
        for lba in 0..11 {
            rig.push_command(io_command(IoOpcode::Read, lba, 1));
        }
        rig.ring_submission_doorbell();
        assert_eq!(rig.poll().taken, first, "of 11");
        assert_eq!(rig.collect_completions(11).len(), 11);
        assert!(rig.queue.is_drained());
    }
}

#[test]
fn full_completion_queue_stops_fetching_until_an_entry_is_free() {
    let ram = fixture_ram();
    let setup = FixtureConfig { cq_entries: 4, ..FixtureConfig::default() };
    let mut rig = QueueFixture::new(&setup, &ram, FakeDevice::new(&ram, BLOCKS));
    for _ in 0..10 {
        rig.push_command(io_command(IoOpcode::Read, 0, 1));
    }
    rig.ring_submission_doorbell();
    let mut seen = 0;
    for round in 1..=4 {
        for _ in 0..20 {
            rig.poll();
        }
        let mut now = 0;
        while rig.peek_completion().is_some() {
            now += 1;
        }
        assert_eq!(now, if round < 4 { 3 } else { 1 }, "three places of four");
        assert_eq!(rig.device.contents().log.len(), seen + now, "none was begun without a place");
        seen += now;
        rig.ring_completion_doorbell();
    }
    assert_eq!(seen, 10);
}

#[test]
fn completion_entries_are_reserved_for_slow_commands() {
    for contexts_max in [2, 8] {
        let ram = fixture_ram();
        let setup = FixtureConfig {
            cq_entries: 3,
            contexts_max,
            behavior: LATER,
            ..FixtureConfig::default()
        };
        let mut rig =
            QueueFixture::new(&setup, &ram, FakeDevice::new(&ram, BLOCKS).with_random_delays(9));
        for _ in 0..12 {
            rig.push_command(io_command(IoOpcode::Write, 0, 16));
        }
        rig.ring_submission_doorbell();
        assert_eq!(rig.collect_completions(12).len(), 12);
    }
}

#[test]
fn invalid_tail_doorbell_is_reported_once_and_ignored() {
    let ram = fixture_ram();
    let mut rig = QueueFixture::new(&FixtureConfig::default(), &ram, FakeDevice::new(&ram, BLOCKS));
    for hostile in [16, 17, 0xffff, 0x1_0000, u32::MAX] {
        rig.events.clear();
        rig.doorbells.write_doorbell(2, hostile);
        for _ in 0..5 {
            assert_eq!(rig.poll().taken, 0);
        }
        let expected = [QueueEvent::InvalidDoorbell(InvalidDoorbell::Value)];
        assert_eq!(rig.events, expected, "{hostile:x}");
    }
    rig.run_successfully(io_command(IoOpcode::Read, 0, 1));
}

#[test]
fn invalid_head_doorbell_is_reported_and_frees_no_entry() {
    let ram = fixture_ram();
    let setup = FixtureConfig { cq_entries: 4, ..FixtureConfig::default() };
    let mut rig = QueueFixture::new(&setup, &ram, FakeDevice::new(&ram, BLOCKS));
    for _ in 0..5 {
        rig.push_command(io_command(IoOpcode::Read, 0, 1));
    }
    rig.ring_submission_doorbell();
    rig.poll();
    rig.poll();
    for hostile in [4, u32::MAX] {
        rig.events.clear();
        rig.doorbells.write_doorbell(3, hostile);
        for _ in 0..3 {
            assert_eq!(rig.poll().posted, 0);
        }
        assert_eq!(rig.events, [QueueEvent::InvalidDoorbell(InvalidDoorbell::Value)]);
    }
    // Ten were posted. A head beyond them is as invalid as one outside the ring.
    let mut rig = QueueFixture::new(&FixtureConfig::default(), &ram, FakeDevice::new(&ram, BLOCKS));
    for count in [10, 8] {
        rig.events.clear();
        for _ in 0..count {
            rig.push_command(io_command(IoOpcode::Read, 0, 1));
        }
        rig.ring_submission_doorbell();
        rig.poll();
        rig.doorbells.write_doorbell(3, 11);
    }
    assert_eq!(rig.events, [QueueEvent::InvalidDoorbell(InvalidDoorbell::Value)]);
}

#[test]
fn shadow_doorbells_are_read_and_event_indexes_published() {
    let ram = fixture_ram();
    let mut rig = QueueFixture::new(&FixtureConfig::default(), &ram, FakeDevice::new(&ram, BLOCKS));
    let (shadow, events) = (0x7000, 0x7100);
    assert_eq!(rig.queue.set_shadow(Some(1), shadow, events), Ok(true));
    assert_eq!(rig.queue.set_shadow(None, shadow + 32, events + 32), Ok(true));
    rig.push_command(io_command(IoOpcode::Read, 0, 1));
    rig.push_command(io_command(IoOpcode::Read, 0, 1));
    assert_eq!(rig.poll().taken, 0);
    rig.write_host_memory(shadow, &2_u32.to_le_bytes());
    assert_eq!(rig.poll().taken, 2, "without a ring");
    assert_eq!(
        rig.read_host_memory(events, 4),
        0_u32.to_le_bytes(),
        "a queue that is busy needs no ring"
    );
    assert!(!rig.poll().is_busy);
    assert_eq!(rig.read_host_memory(events, 4), 2_u32.to_le_bytes(), "a queue that rests does");
    // The register has no effect any more.
    rig.doorbells.write_doorbell(2, 5);
    assert_eq!(rig.poll().taken, 0);
    rig.write_host_memory(shadow, &99_u32.to_le_bytes());
    rig.poll();
    assert_eq!(rig.events, [QueueEvent::InvalidDoorbell(InvalidDoorbell::Value)]);
    assert!(rig.queue.set_shadow(Some(1), 1 << 40, events).is_err(), "nowhere");
}

#[test]
fn full_queue_with_shadow_doorbells_resumes_when_its_head_advances() {
    let ram = fixture_ram();
    let setup = FixtureConfig { cq_entries: 3, ..FixtureConfig::default() };
    let mut rig = QueueFixture::new(&setup, &ram, FakeDevice::new(&ram, BLOCKS));
    rig.queue.set_shadow(None, 0x7000, 0x7100).unwrap();
    for _ in 0..3 {
        rig.push_command(io_command(IoOpcode::Read, 0, 1));
    }
    rig.ring_submission_doorbell();
    assert_eq!(rig.poll().taken, 2);
    assert_eq!(rig.poll().taken, 0);
    rig.write_host_memory(0x7000, &2_u32.to_le_bytes());
    assert_eq!(rig.poll().taken, 1);
}

#[test]
fn queue_with_shadow_doorbells_is_idle_after_any_value_is_seen() {
    let ram = fixture_ram();
    let setup = FixtureConfig { cq_entries: 2, ..FixtureConfig::default() };
    let mut rig = QueueFixture::new(&setup, &ram, FakeDevice::new(&ram, BLOCKS));
    rig.queue.set_shadow(Some(1), 0x7000, 0x7100).unwrap();
    rig.queue.set_shadow(None, 0x7020, 0x7120).unwrap();
    rig.push_command(io_command(IoOpcode::Read, 0, 1));
    rig.write_host_memory(0x7000, &1_u32.to_le_bytes());
    assert_eq!(rig.poll().posted, 1, "its only place is taken");
    for (shadow, rung) in [(0x7020, 1_u32), (0x7020, 77), (0x7000, 99)] {
        rig.write_host_memory(shadow, &rung.to_le_bytes());
        let busy = (0..10).filter(|_| rig.poll().is_busy).count();
        assert!(busy <= 2, "busy {busy} times after {rung} was rung at {shadow:#x}");
    }
    assert_eq!(rig.events, [QueueEvent::InvalidDoorbell(InvalidDoorbell::Value)]);
    assert_eq!(
        rig.read_host_memory(0x7120, 4),
        1_u32.to_le_bytes(),
        "the host knows what was seen"
    );
}

#[test]
fn two_submission_queues_share_a_completion_queue() {
    let ram = fixture_ram();
    let setup = FixtureConfig { cq_entries: 4, ..FixtureConfig::default() };
    let mut rig = QueueFixture::new(&setup, &ram, FakeDevice::new(&ram, BLOCKS));
    rig.queue.add_submission_queue(2, 8, 0x3000).unwrap();
    let mut cids = [vec![], vec![]];
    let mut other = HostRing { at: 0x3000, size: 8, index: 0 };
    for _ in 0..6 {
        cids[0].push(rig.push_command(io_command(IoOpcode::Read, 0, 1)));
        core::mem::swap(&mut rig.sq, &mut other);
        cids[1].push(rig.push_command(io_command(IoOpcode::Write, 1, 16)));
        core::mem::swap(&mut rig.sq, &mut other);
    }
    rig.ring_submission_doorbell();
    rig.doorbells.write_doorbell(4, 6);
    let mut seen = [vec![], vec![]];
    for completion in rig.collect_completions(12) {
        seen[usize::from(completion.sqid()) - 1].push(completion.cid());
    }
    assert_eq!(seen, cids);
}

#[test]
fn inaccessible_ring_is_rejected_and_a_vanished_one_fails_the_queue() {
    let ram = fixture_ram();
    let mut rig = QueueFixture::new(&FixtureConfig::default(), &ram, FakeDevice::new(&ram, BLOCKS));
    assert!(rig.queue.add_submission_queue(2, 8, 1 << 40).is_err());
    assert!(rig.queue.add_submission_queue(2, 8, u64::MAX - 64).is_err());
    let setup = FixtureConfig { behavior: LATER, ..FixtureConfig::default() };
    let mut rig = QueueFixture::new(&setup, &ram, FakeDevice::new(&ram, BLOCKS));
    rig.push_command(io_command(IoOpcode::Read, 0, 1));
    rig.ring_submission_doorbell();
    rig.ram.host_bytes().truncate(0x1000);
    for _ in 0..100 {
        rig.poll();
    }
    assert!(matches!(rig.events[..], [QueueEvent::RingFault(_)]), "said once");
    assert!(rig.queue.is_drained());
}

#[test]
fn queue_is_send() {
    fn assert_send<T: Send>(_: &T) {}
    let ram = fixture_ram();
    let rig = QueueFixture::new(&FixtureConfig::default(), &ram, FakeDevice::new(&ram, BLOCKS));
    assert_send(&rig.queue);
    assert_eq!(rig.device.limits().block_size, 512);
}

#[test]
fn idle_and_waiting_queues_report_their_state() {
    let ram = fixture_ram();
    let mut rig = QueueFixture::new(&FixtureConfig::default(), &ram, FakeDevice::new(&ram, BLOCKS));
    let idle = crate::queue::PollStats::default();
    assert_eq!(rig.poll(), idle);
    rig.device.contents().is_stuck = true;
    rig.push_command(Command::new(IoOpcode::Read.code()).with_nsid(1).with_prp(DATA, 0));
    rig.ring_submission_doorbell();
    let turned = rig.poll();
    assert!(turned.is_busy && turned.is_pending && turned.taken == 1);
    let turned = rig.poll();
    assert!(!turned.is_busy && turned.is_pending);
    rig.device.contents().is_stuck = false;
    assert_eq!(rig.poll().posted, 1);
    assert_eq!(rig.poll(), idle);
}
