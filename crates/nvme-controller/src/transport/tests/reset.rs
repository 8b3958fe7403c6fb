//! Resets and shutdowns at any point.

use tenmil_base::{Durability, Operation};
use tenmil_wire::admin::{DoorbellBufferConfig, GetLogPage};
use tenmil_wire::{Command, IoOpcode, TypedCommand};

use super::fixture::{
    CC, CSTS, DATA, ENABLED, LATER, SHARED, TransportFixture, read_command, write_command,
};
use crate::fuzz::fake_host::HostBehavior;

/// Address of the shadow doorbells, if any, followed by the event indices.
const SHADOW: u64 = DATA + 0x1_0000;
const RDY: u64 = 1;
const SHST: u64 = 3 << 2;
const OCCURRING: u64 = 1 << 2;
const COMPLETE: u64 = 2 << 2;
const NORMAL: u32 = 1 << 14;
const ABRUPT: u32 = 2 << 14;

/// Reads, writes and compares, in one page and in several.
fn push_mixed_commands(rig: &mut TransportFixture, at: usize) {
    for opcode in [IoOpcode::Read, IoOpcode::Write, IoOpcode::Compare] {
        for blocks in [1, 16] {
            rig.push_command(at, read_command(blocks).with_opcode(opcode.code()));
        }
    }
}

/// The controller is enabled again and works.
fn assert_works_after_reenable(rig: &mut TransportFixture) {
    rig.enable_controller(16);
    rig.create_queue_pair(1, 1, None);
    assert!(rig.run_command(1, write_command(16)).status().is_success());
}

/// A reset after any number of polls, with commands of every kind in flight, over hosts and block devices
/// with any delay: once RDY is 0, nothing accesses the host, and the controller works when it is enabled
/// again.
#[test]
fn no_host_memory_access_after_csts_rdy_is_cleared() {
    let copied = HostBehavior { shares_data: false, ..SHARED };
    for (seed, behavior) in (1..).zip([SHARED, copied, LATER].into_iter().cycle().take(90)) {
        let mut rig = TransportFixture::with_setup(
            behavior,
            seed,
            |device| device.with_random_delays(seed),
            |_| {},
        );
        for life in 0..2 {
            rig.enable_controller(16);
            rig.create_queue_pair(1, 1, Some(1));
            rig.create_queue_pair(2, 2, None);
            for at in [1, 2] {
                push_mixed_commands(&mut rig, at);
                rig.push_command(
                    at,
                    Command::new(IoOpcode::ReservationReport.code()).with_nsid(1).with_prp(DATA, 0),
                );
                rig.ring_submission_doorbell(at);
            }
            // Scattered pages, in a list that continues after two entries.
            let log = GetLogPage { lid: 5, numd: 16383, ..GetLogPage::default() }.to_command();
            let pages: Vec<u8> =
                (0..16_u64).flat_map(|page| (DATA + page * 0x2000).to_le_bytes()).collect();
            rig.write_host_memory(
                DATA + 0x1ff0,
                &[&pages[..8], &(DATA + 0x3000).to_le_bytes()].concat(),
            );
            rig.write_host_memory(DATA + 0x3000, &pages);
            rig.push_command(0, log.with_prp(DATA, DATA + 0x1ff0));
            rig.push_command(0, Command::new(0x0c));
            rig.ring_submission_doorbell(0);
            for _ in 0..seed * (life + 1) % 37 {
                rig.poll_transport();
            }
            rig.write_register(CC, 0);
            rig.poll_transport();
            // Nothing new is started, while started transfers may still end.
            rig.ram.forbid_new_access(true);
            rig.poll_until("the end", |rig| rig.read_register(CSTS) & RDY == 0);
            rig.ram.forbid_all_access(true);
            for _ in 0..30 {
                rig.poll_transport();
            }
            assert_eq!(rig.ram.violation_count(), 0, "seed {seed}");
            assert_eq!(rig.buffers.free_count(), 4, "seed {seed}");
            rig.ram.forbid_new_access(false);
            rig.ram.forbid_all_access(false);
        }
        assert_works_after_reenable(&mut rig);
    }
}

/// A host disconnects the controller after any number of polls: once it is informed that the controller
/// has released it, nothing accesses it, and the controller works after a reset.
#[test]
fn no_host_memory_access_after_acknowledged_revocation() {
    for (seed, behavior) in (1..).zip([SHARED, LATER].into_iter().cycle().take(60)) {
        let mut rig = TransportFixture::with_setup(
            behavior,
            seed,
            |device| device.with_random_delays(seed),
            |_| {},
        );
        rig.enable_controller(16);
        if seed % 4 == 1 {
            let config = DoorbellBufferConfig::default().to_command();
            assert!(rig.run_admin(config.with_prp(SHADOW, SHADOW + 0x1000)).status().is_success());
        }
        rig.create_queue_pair(1, 1, Some(1));
        push_mixed_commands(&mut rig, 1);
        rig.write_host_memory(SHADOW + 64, &6_u32.to_le_bytes());
        rig.ring_submission_doorbell(1);
        for _ in 0..seed % 23 {
            rig.poll_transport();
        }
        rig.ram.revoke_access(true);
        rig.poll_until("to let go", |rig| rig.ram.has_acknowledged());
        for _ in 0..30 {
            rig.poll_transport();
        }
        assert_eq!(rig.ram.violation_count(), 0, "seed {seed}");
        rig.write_register(CC, 0);
        rig.poll_until("the end", |rig| rig.read_register(CSTS) & RDY == 0);
        rig.ram.revoke_access(false);
        rig.ram.forbid_all_access(false);
        assert_works_after_reenable(&mut rig);
    }
}

#[test]
fn revocation_is_acknowledged_after_device_requests_complete() {
    let mut rig = TransportFixture::with_stuck_read();
    rig.ram.revoke_access(true);
    for _ in 0..2000 {
        rig.poll_transport();
    }
    assert!(!rig.ram.has_acknowledged());
    rig.device.contents().is_stuck = false;
    rig.poll_until("to let go", |rig| rig.ram.has_acknowledged());
}

#[test]
fn csts_rdy_stays_set_until_device_requests_complete() {
    let mut rig = TransportFixture::with_stuck_read();
    rig.write_register(CC, 0);
    for _ in 0..100 {
        rig.poll_transport();
    }
    assert_eq!(rig.read_register(CSTS), RDY);
    // A host that enables it again without waiting gets it as soon as possible.
    rig.write_register(CC, ENABLED.into());
    for _ in 0..100 {
        rig.poll_transport();
    }
    rig.device.contents().is_stuck = false;
    rig.poll_until("the next life", |rig| rig.poll_transport() != crate::transport::NextPoll::Busy);
    assert_eq!(rig.read_register(CSTS), RDY);
    let now = rig.now;
    rig.front.write_doorbell(now, 2, 1);
    rig.poll_transport();
    assert!(rig.take_completion(1).is_none(), "queues of the last life are gone");
}

#[test]
fn normal_shutdown_completes_after_the_flush() {
    let mut rig = TransportFixture::new_enabled(SHARED);
    rig.create_queue_pair(1, 1, None);
    rig.run_command(1, write_command(1));
    rig.device.contents().is_stuck = true;
    rig.write_register(CC, (ENABLED | NORMAL).into());
    for _ in 0..20 {
        rig.poll_transport();
    }
    assert_eq!(rig.read_register(CSTS) & SHST, OCCURRING);
    rig.device.contents().is_stuck = false;
    rig.poll_until("completion", |rig| rig.read_register(CSTS) & SHST == COMPLETE);
    let last = rig.device.contents().log.last().map(|request| request.operation);
    assert_eq!(last, Some(Operation::Flush));
    rig.write_register(CC, 0);
    rig.poll_transport();
    assert_eq!(rig.read_register(CSTS) & RDY, 0);
    rig.enable_controller(16);
    assert_eq!(rig.read_register(CSTS) & SHST, 0, "the next life knows nothing of it");
}

#[test]
fn abrupt_shutdown_and_persistent_devices_are_not_flushed() {
    for (notice, durability) in
        [(ABRUPT, Durability::VolatileCache), (NORMAL, Durability::Persistent)]
    {
        let mut rig = TransportFixture::new(SHARED, |device| {
            device.with_limits(|limits| limits.durability = durability)
        });
        rig.enable_controller(16);
        rig.write_register(CC, (ENABLED | notice).into());
        rig.poll_transport();
        assert_eq!(rig.read_register(CSTS) & SHST, COMPLETE);
        assert!(rig.device.contents().log.is_empty());
    }
}

#[test]
fn failed_shutdown_flush_is_reported() {
    let mut rig = TransportFixture::new(SHARED, |device| {
        device.with_limits(|limits| {
            limits.operations = tenmil_base::OperationSet::from_operations(&[Operation::Write])
        })
    });
    rig.enable_controller(16);
    rig.write_register(CC, (ENABLED | NORMAL).into());
    rig.poll_until("completion", |rig| rig.read_register(CSTS) & SHST == COMPLETE);
    assert_ne!(rig.read_register(CSTS) & 2, 0, "CFS");
}

#[test]
fn vanished_ring_sets_csts_cfs() {
    let mut rig = TransportFixture::new_enabled(LATER);
    rig.create_queue_pair(1, 1, None);
    rig.ram.host_bytes().truncate(0x1000);
    let now = rig.now;
    rig.front.write_doorbell(now, 2, 1);
    rig.poll_until("the failure", |rig| rig.read_register(CSTS) & 2 != 0);
    rig.ram.host_bytes().resize(0x8_0000, 0);
    rig.write_register(CC, 0);
    rig.poll_until("the reset", |rig| rig.read_register(CSTS) == 0);
    rig.enable_controller(16);
}
