//! Resets and shutdowns at any point.

use tenmil_base::{Durability, Operation};
use tenmil_wire::admin::{DoorbellBufferConfig, GetLogPage};
use tenmil_wire::{Command, IoOpcode, TypedCommand};

use super::rig::{CC, CSTS, DATA, ENABLED, LATER, Rig, SHARED, read, write};
use crate::fuzz::host::HostBehavior;

/// Address of the shadow doorbells, if any, followed by the event indices.
const SHADOW: u64 = DATA + 0x1_0000;
const RDY: u64 = 1;
const SHST: u64 = 3 << 2;
const OCCURRING: u64 = 1 << 2;
const COMPLETE: u64 = 2 << 2;
const NORMAL: u32 = 1 << 14;
const ABRUPT: u32 = 2 << 14;

/// Reads, writes and compares, in one page and in several.
fn push_each_kind(rig: &mut Rig, at: usize) {
    for opcode in [IoOpcode::Read, IoOpcode::Write, IoOpcode::Compare] {
        for blocks in [1, 16] {
            rig.push(at, read(blocks).with_opcode(opcode.code()));
        }
    }
}

/// The controller is enabled again and works.
fn lives_again(rig: &mut Rig) {
    rig.enable(16);
    rig.create(1, 1, None);
    assert!(rig.run(1, write(16)).status().is_success());
}

/// A reset after any number of polls, with commands of every kind in flight, over hosts and block devices
/// with any delay: once RDY is 0, nothing accesses the host, and the controller works when it is enabled
/// again.
#[test]
fn once_it_is_not_ready_nothing_touches_the_host() {
    let copied = HostBehavior { shares_data: false, ..SHARED };
    for (seed, behavior) in (1..).zip([SHARED, copied, LATER].into_iter().cycle().take(90)) {
        let mut rig = Rig::with(behavior, seed, |device| device.later(seed), |_| {});
        for life in 0..2 {
            rig.enable(16);
            rig.create(1, 1, Some(1));
            rig.create(2, 2, None);
            for at in [1, 2] {
                push_each_kind(&mut rig, at);
                rig.push(
                    at,
                    Command::new(IoOpcode::ReservationReport.code()).with_nsid(1).with_prp(DATA, 0),
                );
                rig.ring(at);
            }
            // Scattered pages, in a list that continues after two entries.
            let log = GetLogPage { lid: 5, numd: 16383, ..GetLogPage::default() }.to_command();
            let pages: Vec<u8> =
                (0..16_u64).flat_map(|page| (DATA + page * 0x2000).to_le_bytes()).collect();
            rig.fill(DATA + 0x1ff0, &[&pages[..8], &(DATA + 0x3000).to_le_bytes()].concat());
            rig.fill(DATA + 0x3000, &pages);
            rig.push(0, log.with_prp(DATA, DATA + 0x1ff0));
            rig.push(0, Command::new(0x0c));
            rig.ring(0);
            for _ in 0..seed * (life + 1) % 37 {
                rig.poll();
            }
            rig.write(CC, 0);
            rig.poll();
            // Nothing new is started, while started transfers may still end.
            rig.ram.close(true);
            rig.turn_until("the end", |rig| rig.read(CSTS) & RDY == 0);
            rig.ram.seal(true);
            for _ in 0..30 {
                rig.poll();
            }
            assert_eq!(rig.ram.violations(), 0, "seed {seed}");
            assert_eq!(rig.buffers.free(), 4, "seed {seed}");
            rig.ram.close(false);
            rig.ram.seal(false);
        }
        lives_again(&mut rig);
    }
}

/// A host disconnects the controller after any number of polls: once it is informed that the controller
/// has released it, nothing accesses it, and the controller works after a reset.
#[test]
fn once_it_has_let_go_nothing_touches_the_host() {
    for (seed, behavior) in (1..).zip([SHARED, LATER].into_iter().cycle().take(60)) {
        let mut rig = Rig::with(behavior, seed, |device| device.later(seed), |_| {});
        rig.enable(16);
        if seed % 4 == 1 {
            let config = DoorbellBufferConfig::default().to_command();
            assert!(rig.admin(config.with_prp(SHADOW, SHADOW + 0x1000)).status().is_success());
        }
        rig.create(1, 1, Some(1));
        push_each_kind(&mut rig, 1);
        rig.fill(SHADOW + 64, &6_u32.to_le_bytes());
        rig.ring(1);
        for _ in 0..seed % 23 {
            rig.poll();
        }
        rig.ram.revoke(true);
        rig.turn_until("to let go", |rig| rig.ram.has_acknowledged());
        for _ in 0..30 {
            rig.poll();
        }
        assert_eq!(rig.ram.violations(), 0, "seed {seed}");
        rig.write(CC, 0);
        rig.turn_until("the end", |rig| rig.read(CSTS) & RDY == 0);
        rig.ram.revoke(false);
        rig.ram.seal(false);
        lives_again(&mut rig);
    }
}

#[test]
fn it_does_not_let_go_as_long_as_a_medium_may_touch_the_host() {
    let mut rig = Rig::stuck();
    rig.ram.revoke(true);
    for _ in 0..2000 {
        rig.poll();
    }
    assert!(!rig.ram.has_acknowledged());
    rig.device.blocks().is_stuck = false;
    rig.turn_until("to let go", |rig| rig.ram.has_acknowledged());
}

#[test]
fn it_stays_ready_as_long_as_a_medium_may_touch_the_host() {
    let mut rig = Rig::stuck();
    rig.write(CC, 0);
    for _ in 0..100 {
        rig.poll();
    }
    assert_eq!(rig.read(CSTS), RDY);
    // A host that enables it again without waiting gets it as soon as possible.
    rig.write(CC, ENABLED.into());
    for _ in 0..100 {
        rig.poll();
    }
    rig.device.blocks().is_stuck = false;
    rig.turn_until("the next life", |rig| rig.poll() != crate::transport::NextPoll::Busy);
    assert_eq!(rig.read(CSTS), RDY);
    let now = rig.now;
    rig.front.ring(now, 2, 1);
    rig.poll();
    assert!(rig.take(1).is_none(), "queues of the last life are gone");
}

#[test]
fn a_normal_shutdown_is_complete_when_the_medium_is_flushed() {
    let mut rig = Rig::enabled(SHARED);
    rig.create(1, 1, None);
    rig.run(1, write(1));
    rig.device.blocks().is_stuck = true;
    rig.write(CC, (ENABLED | NORMAL).into());
    for _ in 0..20 {
        rig.poll();
    }
    assert_eq!(rig.read(CSTS) & SHST, OCCURRING);
    rig.device.blocks().is_stuck = false;
    rig.turn_until("completion", |rig| rig.read(CSTS) & SHST == COMPLETE);
    let last = rig.device.blocks().log.last().map(|request| request.operation);
    assert_eq!(last, Some(Operation::Flush));
    rig.write(CC, 0);
    rig.poll();
    assert_eq!(rig.read(CSTS) & RDY, 0);
    rig.enable(16);
    assert_eq!(rig.read(CSTS) & SHST, 0, "the next life knows nothing of it");
}

#[test]
fn an_abrupt_shutdown_and_a_stable_medium_flush_nothing() {
    for (notice, durability) in
        [(ABRUPT, Durability::VolatileCache), (NORMAL, Durability::Persistent)]
    {
        let mut rig =
            Rig::new(SHARED, |device| device.limited(|limits| limits.durability = durability));
        rig.enable(16);
        rig.write(CC, (ENABLED | notice).into());
        rig.poll();
        assert_eq!(rig.read(CSTS) & SHST, COMPLETE);
        assert!(rig.device.blocks().log.is_empty());
    }
}

#[test]
fn a_flush_that_fails_at_shutdown_is_not_kept_quiet() {
    let mut rig = Rig::new(SHARED, |device| {
        device.limited(|limits| {
            limits.operations = tenmil_base::OperationSet::of(&[Operation::Write])
        })
    });
    rig.enable(16);
    rig.write(CC, (ENABLED | NORMAL).into());
    rig.turn_until("completion", |rig| rig.read(CSTS) & SHST == COMPLETE);
    assert_ne!(rig.read(CSTS) & 2, 0, "CFS");
}

#[test]
fn a_ring_that_vanishes_is_a_fatal_status() {
    let mut rig = Rig::enabled(LATER);
    rig.create(1, 1, None);
    rig.ram.host().truncate(0x1000);
    let now = rig.now;
    rig.front.ring(now, 2, 1);
    rig.turn_until("the failure", |rig| rig.read(CSTS) & 2 != 0);
    rig.ram.host().resize(0x8_0000, 0);
    rig.write(CC, 0);
    rig.turn_until("the reset", |rig| rig.read(CSTS) == 0);
    rig.enable(16);
}
