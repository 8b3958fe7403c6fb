//! I/O through a complete controller.

use tenmil_wire::admin::DoorbellBufferConfig;
use tenmil_wire::{Command, IoOpcode, Status, TypedCommand};

use super::rig::{DATA, LATER, Rig, SHARED, read, write};
use crate::transport::NextPoll;

#[test]
fn what_is_written_is_read_through_every_pair() {
    for behavior in [SHARED, LATER] {
        let mut rig = Rig::enabled(behavior);
        rig.create(1, 3, None);
        rig.create(4, 1, None);
        for at in [1, 2] {
            let bytes: Vec<u8> =
                (0..8192_usize).map(|byte| (byte * at % 251).to_le_bytes()[0]).collect();
            rig.fill(DATA, &bytes);
            assert!(rig.run(at, write(16)).status().is_success());
            rig.fill(DATA, &[0; 8192]);
            assert!(rig.run(at, read(16)).status().is_success());
            assert_eq!(rig.bytes(DATA, 8192), bytes);
        }
        assert_eq!(rig.buffers.free(), 4);
    }
}

#[test]
fn reservations_are_decided_by_the_controller() {
    for behavior in [SHARED, LATER] {
        let mut rig = Rig::enabled(behavior);
        rig.create(1, 1, None);
        rig.fill(DATA, &[0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]);
        let command = |opcode: IoOpcode| Command::new(opcode.code()).with_nsid(1).with_prp(DATA, 0);
        let registered = rig.run(1, command(IoOpcode::ReservationRegister));
        assert!(registered.status().is_success(), "{}", registered.status());
        rig.fill(DATA, &[5, 0, 0, 0, 0, 0, 0, 0]);
        // Acquire, exclusive access.
        let acquired = rig.run(1, command(IoOpcode::ReservationAcquire).with_cdw10(2 << 8));
        assert!(acquired.status().is_success(), "{}", acquired.status());
        assert!(rig.run(1, read(1)).status().is_success(), "the holder reads");
        let report = rig.run(1, command(IoOpcode::ReservationReport).with_cdw10(15));
        assert!(report.status().is_success(), "{}", report.status());
        let page = rig.bytes(DATA, 7);
        assert_eq!((page[4], page[5]), (2, 1), "exclusive access, one registrant");
    }
}

#[test]
fn doorbell_buffers_take_the_place_of_the_registers() {
    let mut rig = Rig::enabled(SHARED);
    rig.create(1, 1, None);
    let config = DoorbellBufferConfig::default().to_command();
    let (shadow, events) = (DATA + 0x1_0000, DATA + 0x1_1000);
    assert!(rig.admin(config.with_prp(shadow, events)).status().is_success());
    rig.create(2, 2, None);
    for (at, qid) in [(1_usize, 1_u64), (2, 2)] {
        rig.push(at, read(1));
        rig.fill(shadow + qid * 64, &1_u32.to_le_bytes());
        rig.turn_until("the answer", |rig| rig.take(at).is_some());
        rig.poll();
        rig.poll();
        assert_eq!(rig.bytes(events + qid * 64, 4), 1_u32.to_le_bytes(), "ring me from there on");
    }
    let nowhere = rig.admin(config.with_prp(1 << 40, events)).status();
    assert!(nowhere.is(Status::INVALID_FIELD), "{nowhere}");
    // Memory that is not shared cannot be polled.
    let mut rig = Rig::enabled(LATER);
    rig.create(1, 1, None);
    assert!(rig.admin(config.with_prp(shadow, events)).status().is(Status::INVALID_FIELD));
}

#[test]
fn a_write_cache_that_is_switched_off_forces_every_write() {
    let mut rig = Rig::enabled(SHARED);
    rig.create(1, 1, None);
    let set = |cdw11| {
        let set = tenmil_wire::admin::SetFeatures { fid: 6, cdw11, ..Default::default() };
        set.to_command()
    };
    rig.run(1, write(1));
    assert!(rig.admin(set(0)).status().is_success());
    rig.run(1, write(1));
    assert!(rig.admin(set(1)).status().is_success());
    rig.run(1, write(1));
    let forced: Vec<bool> = rig
        .device
        .blocks()
        .log
        .iter()
        .map(|request| request.flags.has(tenmil_base::RequestFlags::FUA))
        .collect();
    assert_eq!(forced, [false, true, false]);
}

#[test]
fn a_namespace_that_grows_or_goes_is_seen_by_the_queues() {
    let mut rig = Rig::enabled(SHARED);
    rig.create(1, 1, None);
    assert!(rig.run(1, read(1)).status().is_success());
    rig.subsystem.remove_namespace(1);
    let gone = rig.run(1, read(1)).status();
    assert!(gone.is(Status::INVALID_FIELD), "{gone}");
}

#[test]
fn a_turn_says_when_to_turn_again() {
    let mut rig = Rig::enabled(SHARED);
    rig.create(1, 1, None);
    while rig.poll() == NextPoll::Busy {}
    assert!(matches!(rig.poll(), NextPoll::Idle(_)));
    rig.device.blocks().is_stuck = true;
    rig.push(1, read(1));
    rig.ring(1);
    assert_eq!(rig.poll(), NextPoll::Busy);
    while rig.poll() == NextPoll::Busy {}
    assert!(matches!(rig.poll(), NextPoll::Pending(_)), "a medium owes an answer");
    rig.device.blocks().is_stuck = false;
    assert_eq!(rig.poll(), NextPoll::Busy);
}
