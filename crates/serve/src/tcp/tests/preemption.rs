//! Preempt and Abort, and the writes of the preempted host that its medium already has.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tenmil_base::Span;
use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::io::reservation::{
    AcquireAction, AcquireKeys, RegisterKeys, ReservationAcquire, ReservationRegister,
    ReservationType,
};
use tenmil_wire::{Status, TypedCommand};

use super::test_target::TestTarget;
use super::write_fences::{
    HELD, LET_GO, NEW, OLD, read_block, target_with_late_writes, write_command,
};
use crate::tcp::{InjectedBugs, TargetEvent};

/// Host 1 holds the reservation of namespace 1 and has a write in the medium; host 2 is registered.
struct PreemptTest {
    rig: TestTarget,
    medium: Arc<AtomicU32>,
    /// Both connections of each host.
    hosts: [(usize, usize); 2],
    /// The write of host 1.
    old: u16,
}

impl PreemptTest {
    fn new() -> Self {
        let (mut rig, medium) = target_with_late_writes(InjectedBugs::default());
        let hosts = [1, 2].map(|host| rig.connect_host_with_io_queue(host));
        for (key, (_, io)) in (1..).zip(hosts) {
            let register = ReservationRegister { nsid: 1, ..Default::default() }.to_command();
            let keys = RegisterKeys::zeroed().with(|keys| keys.nrkey(key));
            let (end, _) =
                rig.execute_command(io, &register, DataDirection::FromHost(16), keys.as_bytes());
            assert_eq!(end.status(), Status::SUCCESS);
        }
        let old = hosts[0].1;
        let mut takeover = Self { rig, medium, hosts, old: 0 };
        let tag = takeover.acquire(0, AcquireAction::Acquire, 0);
        assert_eq!(takeover.completion_status(0, tag), Some(Status::SUCCESS));
        takeover.old =
            takeover.rig.lines[old].submit(&write_command(), DataDirection::FromHost(4096), &OLD);
        takeover.rig.run_until_idle();
        assert_eq!(takeover.medium.load(Ordering::Relaxed), HELD);
        takeover
    }

    fn acquire(&mut self, host: usize, racqa: AcquireAction, preempted: u64) -> u16 {
        let rtype = ReservationType::WriteExclusive;
        let acquire = ReservationAcquire { nsid: 1, racqa, rtype, ..Default::default() };
        let key = host as u64 + 1;
        let keys = AcquireKeys::zeroed().with(|keys| keys.crkey(key).prkey(preempted));
        let line = &mut self.rig.lines[self.hosts[host].1];
        let tag = line.submit(&acquire.to_command(), DataDirection::FromHost(16), keys.as_bytes());
        self.rig.run_until_idle();
        tag
    }

    fn preempt(&mut self) -> u16 {
        self.acquire(1, AcquireAction::PreemptAndAbort, 1)
    }

    /// How a command of a host has ended, if it has.
    fn completion_status(&mut self, host: usize, tag: u16) -> Option<Status> {
        let done = self.rig.lines[self.hosts[host].1].done.remove(&tag);
        done.map(|(completion, _)| completion.status())
    }

    fn complete_old_writes(&mut self) {
        self.medium.store(LET_GO, Ordering::Relaxed);
        (0..5).for_each(|_| self.rig.advance_time(Span::from_ms(1)));
    }

    /// The new holder writes; what lies there in the end.
    fn byte_after_new_holder_writes(mut self) -> u8 {
        let new = self.hosts[1].1;
        let (end, _) =
            self.rig.execute_command(new, &write_command(), DataDirection::FromHost(4096), &NEW);
        assert_eq!(end.status(), Status::SUCCESS);
        self.complete_old_writes();
        let found = read_block(&mut self.rig, new)[0];
        self.rig.lines.clear();
        self.rig.assert_all_released();
        found
    }
}

#[test]
fn preempt_and_abort_completes_after_the_writes_of_the_preempted_host() {
    let mut takeover = PreemptTest::new();
    let tag = takeover.preempt();
    for _ in 0..9 {
        takeover.rig.advance_time(Span::from_secs(1));
        assert_eq!(takeover.completion_status(1, tag), None, "a write of host 1 is in the medium");
    }
    // It is in effect all the same.
    let old = takeover.hosts[0].1;
    let (refused, _) =
        takeover.rig.execute_command(old, &write_command(), DataDirection::FromHost(4096), &OLD);
    assert_eq!(refused.status().without_crd_more_dnr(), Status::RESERVATION_CONFLICT);
    takeover.complete_old_writes();
    assert!(takeover.completion_status(0, takeover.old).is_some());
    assert_eq!(takeover.completion_status(1, tag), Some(Status::SUCCESS));
    assert_eq!(takeover.byte_after_new_holder_writes(), NEW[0]);
}

#[test]
fn preempt_and_abort_waits_for_a_host_whose_connections_are_lost() {
    for (admin, io) in [(true, true), (true, false), (false, true)] {
        let mut takeover = PreemptTest::new();
        let tag = takeover.preempt();
        for (line, is_lost) in [(takeover.hosts[0].0, admin), (takeover.hosts[0].1, io)] {
            takeover.rig.lines[line].pipe.take_if(|_| is_lost);
        }
        takeover.rig.advance_time(Span::from_secs(1));
        assert_eq!(takeover.completion_status(1, tag), None);
        takeover.complete_old_writes();
        assert_eq!(takeover.completion_status(1, tag), Some(Status::SUCCESS));
        assert_eq!(takeover.byte_after_new_holder_writes(), NEW[0]);
    }
}

#[test]
fn preempt_and_abort_fails_if_the_device_does_not_complete_in_time() {
    let mut takeover = PreemptTest::new();
    let tag = takeover.preempt();
    takeover.rig.advance_time(Span::from_ms(9_998));
    assert_eq!(takeover.completion_status(1, tag), None);
    takeover.rig.advance_time(Span::from_ms(3));
    assert_eq!(
        takeover.completion_status(1, tag).map(Status::without_crd_more_dnr),
        Some(Status::INTERNAL_ERROR)
    );
    let is_it = |new_events: &TargetEvent| matches!(new_events, TargetEvent::Error(said) if said.contains("media have not answered writes of"));
    assert!(takeover.rig.new_events.iter().any(is_it), "{:?}", takeover.rig.new_events);
    takeover.complete_old_writes();
    assert_eq!(takeover.byte_after_new_holder_writes(), NEW[0]);
}

#[test]
fn preempt_and_abort_of_a_disconnected_host_leaks_nothing() {
    let mut takeover = PreemptTest::new();
    takeover.preempt();
    let (admin, io) = takeover.hosts[1];
    (takeover.rig.lines[admin].pipe, takeover.rig.lines[io].pipe) = (None, None);
    takeover.rig.advance_time(Span::from_ms(1));
    takeover.complete_old_writes();
    assert!(takeover.completion_status(0, takeover.old).is_some());
    takeover.rig.lines.clear();
    takeover.rig.assert_all_released();
}

#[test]
fn preempt_without_abort_completes_at_once() {
    let mut takeover = PreemptTest::new();
    let tag = takeover.acquire(1, AcquireAction::Preempt, 1);
    assert_eq!(takeover.completion_status(1, tag), Some(Status::SUCCESS));
    takeover.complete_old_writes();
    takeover.rig.lines.clear();
    takeover.rig.assert_all_released();
}
