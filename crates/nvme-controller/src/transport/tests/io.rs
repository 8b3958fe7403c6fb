//! I/O through a complete controller.

use tenmil_wire::admin::DoorbellBufferConfig;
use tenmil_wire::{Command, IoOpcode, Status, TypedCommand};

use super::fixture::{DATA, LATER, SHARED, TransportFixture, read_command, write_command};
use crate::transport::NextPoll;

#[test]
fn data_written_is_read_through_every_queue_pair() {
    for behavior in [SHARED, LATER] {
        let mut rig = TransportFixture::new_enabled(behavior);
        rig.create_queue_pair(1, 3, None);
        rig.create_queue_pair(4, 1, None);
        for at in [1, 2] {
            let bytes: Vec<u8> =
                (0..8192_usize).map(|byte| (byte * at % 251).to_le_bytes()[0]).collect();
            rig.write_host_memory(DATA, &bytes);
            assert!(rig.run_command(at, write_command(16)).status().is_success());
            rig.write_host_memory(DATA, &[0; 8192]);
            assert!(rig.run_command(at, read_command(16)).status().is_success());
            assert_eq!(rig.read_host_memory(DATA, 8192), bytes);
        }
        assert_eq!(rig.buffers.free_count(), 4);
    }
}

#[test]
fn reservation_commands_are_executed_by_the_controller() {
    for behavior in [SHARED, LATER] {
        let mut rig = TransportFixture::new_enabled(behavior);
        rig.create_queue_pair(1, 1, None);
        rig.write_host_memory(DATA, &[0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]);
        let command = |opcode: IoOpcode| Command::new(opcode.code()).with_nsid(1).with_prp(DATA, 0);
        let registered = rig.run_command(1, command(IoOpcode::ReservationRegister));
        assert!(registered.status().is_success(), "{}", registered.status());
        rig.write_host_memory(DATA, &[5, 0, 0, 0, 0, 0, 0, 0]);
        // Acquire, exclusive access.
        let acquired = rig.run_command(1, command(IoOpcode::ReservationAcquire).with_cdw10(2 << 8));
        assert!(acquired.status().is_success(), "{}", acquired.status());
        assert!(rig.run_command(1, read_command(1)).status().is_success(), "the holder reads");
        let report = rig.run_command(1, command(IoOpcode::ReservationReport).with_cdw10(15));
        assert!(report.status().is_success(), "{}", report.status());
        let page = rig.read_host_memory(DATA, 7);
        assert_eq!((page[4], page[5]), (2, 1), "exclusive access, one registrant");
    }
}

#[test]
fn shadow_doorbells_replace_the_doorbell_registers() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    rig.create_queue_pair(1, 1, None);
    let config = DoorbellBufferConfig::default().to_command();
    let (shadow, events) = (DATA + 0x1_0000, DATA + 0x1_1000);
    assert!(rig.run_admin(config.with_prp(shadow, events)).status().is_success());
    rig.create_queue_pair(2, 2, None);
    for (at, qid) in [(1_usize, 1_u64), (2, 2)] {
        rig.push_command(at, read_command(1));
        rig.write_host_memory(shadow + qid * 64, &1_u32.to_le_bytes());
        rig.poll_until("the answer", |rig| rig.take_completion(at).is_some());
        rig.poll_transport();
        rig.poll_transport();
        assert_eq!(
            rig.read_host_memory(events + qid * 64, 4),
            1_u32.to_le_bytes(),
            "ring me from there on"
        );
    }
    let nowhere = rig.run_admin(config.with_prp(1 << 40, events)).status();
    assert!(nowhere.has_same_code_as(Status::INVALID_FIELD), "{nowhere}");
    // Memory that is not shared cannot be polled.
    let mut rig = TransportFixture::new_enabled(LATER);
    rig.create_queue_pair(1, 1, None);
    assert!(
        rig.run_admin(config.with_prp(shadow, events))
            .status()
            .has_same_code_as(Status::INVALID_FIELD)
    );
}

#[test]
fn disabled_write_cache_forces_unit_access() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    rig.create_queue_pair(1, 1, None);
    let set = |cdw11| {
        let set = tenmil_wire::admin::SetFeatures { fid: 6, cdw11, ..Default::default() };
        set.to_command()
    };
    rig.run_command(1, write_command(1));
    assert!(rig.run_admin(set(0)).status().is_success());
    rig.run_command(1, write_command(1));
    assert!(rig.run_admin(set(1)).status().is_success());
    rig.run_command(1, write_command(1));
    let forced: Vec<bool> = rig
        .device
        .contents()
        .log
        .iter()
        .map(|request| request.flags.has(tenmil_base::RequestFlags::FUA))
        .collect();
    assert_eq!(forced, [false, true, false]);
}

#[test]
fn namespace_growth_and_removal_reach_the_queues() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    rig.create_queue_pair(1, 1, None);
    assert!(rig.run_command(1, read_command(1)).status().is_success());
    rig.subsystem.remove_namespace(1);
    let gone = rig.run_command(1, read_command(1)).status();
    assert!(gone.has_same_code_as(Status::INVALID_FIELD), "{gone}");
}

#[test]
fn poll_returns_the_next_poll_time() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    rig.create_queue_pair(1, 1, None);
    while rig.poll_transport() == NextPoll::Busy {}
    assert!(matches!(rig.poll_transport(), NextPoll::Idle(_)));
    rig.device.contents().is_stuck = true;
    rig.push_command(1, read_command(1));
    rig.ring_submission_doorbell(1);
    assert_eq!(rig.poll_transport(), NextPoll::Busy);
    while rig.poll_transport() == NextPoll::Busy {}
    assert!(matches!(rig.poll_transport(), NextPoll::Pending(_)), "a medium owes an answer");
    rig.device.contents().is_stuck = false;
    assert_eq!(rig.poll_transport(), NextPoll::Busy);
}
