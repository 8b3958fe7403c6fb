//! Sleep of a controller's thread, and its deadline.

use tenmil_base::{Instant, Span};
use tenmil_wire::admin::SetFeatures;
use tenmil_wire::{Fuse, TypedCommand};

use super::fixture::{SHARED, TransportFixture, read_command, write_command};

impl TransportFixture {
    /// Arms the wakeups and disarms them.
    fn arm_and_disarm(&mut self) -> Option<Instant> {
        let until = self.front.arm_wakeup(self.now);
        self.front.disarm_wakeup();
        until
    }

    /// Polls until the thread may sleep, and returns the deadline.
    fn poll_until_idle(&mut self) -> Instant {
        for _ in 0..100 {
            if let Some(until) = self.arm_and_disarm() {
                return until;
            }
            self.poll_transport();
        }
        panic!("it finds no rest: {:?}", self.front.last_error());
    }

    fn new_wake_fd_count(&mut self) -> usize {
        let mut count = 0;
        self.front.for_each_new_wake_fd(|_| count += 1);
        count
    }
}

/// An idle controller with one queue pair.
fn idle_fixture() -> TransportFixture {
    let mut rig = TransportFixture::new_enabled(SHARED);
    rig.create_queue_pair(1, 1, Some(1));
    rig.poll_until_idle();
    rig
}

#[test]
fn idle_controller_may_sleep_without_deadline() {
    assert_eq!(idle_fixture().arm_and_disarm(), Some(Instant::NEVER));
}

#[test]
fn unprocessed_host_stores_keep_the_thread_awake() {
    let mut rig = idle_fixture();
    rig.push_command(1, read_command(1));
    assert!(rig.arm_and_disarm().is_some(), "no doorbell was written");
    rig.ring_submission_doorbell(1);
    assert_eq!(rig.arm_and_disarm(), None, "a submission doorbell");
    assert!(rig.take_completion(1).is_some(), "and the look was a turn");
    assert!(rig.arm_and_disarm().is_some(), "a completion doorbell that nothing waits for");
    rig.push_command(0, tenmil_wire::Command::new(0x18));
    rig.ring_submission_doorbell(0);
    assert_eq!(rig.arm_and_disarm(), None, "the admin queue");
    rig.poll_until_idle();
    rig.write_register(super::fixture::CC, 0);
    assert_eq!(rig.arm_and_disarm(), None, "a register");
}

#[test]
fn command_waiting_for_a_completion_entry_is_fetched_when_one_is_freed() {
    let mut rig = idle_fixture();
    for _ in 0..15 {
        rig.push_command(1, read_command(1));
    }
    rig.ring_submission_doorbell(1);
    rig.poll_transport();
    rig.push_command(1, read_command(1));
    rig.ring_submission_doorbell(1);
    rig.poll_until_idle();
    assert!(rig.take_completion(1).is_some(), "a place");
    assert_eq!(rig.arm_and_disarm(), None);
}

#[test]
fn device_without_wake_source_keeps_the_thread_awake_while_requests_are_in_flight() {
    let mut rig = idle_fixture();
    rig.device.contents().is_stuck = true;
    rig.push_command(1, read_command(1));
    rig.ring_submission_doorbell(1);
    rig.poll_transport();
    assert_eq!(rig.arm_and_disarm(), None);
    rig.device.contents().is_stuck = false;
    assert_eq!(rig.arm_and_disarm(), None, "and then there is the answer");
    rig.poll_until_idle();
}

#[test]
fn device_wake_source_is_armed_and_polled_once_before_sleep() {
    let mut rig = idle_fixture();
    (rig.device.contents().signals, rig.device.contents().is_stuck) = (true, true);
    rig.push_command(1, read_command(1));
    rig.ring_submission_doorbell(1);
    rig.poll_transport();
    assert_eq!(rig.front.arm_wakeup(rig.now), Some(Instant::NEVER));
    assert_eq!(rig.device.contents().armed, 1);
    rig.front.disarm_wakeup();
    rig.front.disarm_wakeup();
    assert_eq!(rig.device.contents().armed, 0);
    rig.device.contents().is_stuck = false;
    assert_eq!(rig.arm_and_disarm(), None);
    rig.poll_transport();
    assert!(rig.take_completion(1).is_some());
    assert_eq!(rig.device.contents().armed, 0);
}

#[test]
fn every_wake_descriptor_is_returned_once() {
    let mut rig = idle_fixture();
    assert_eq!(rig.new_wake_fd_count(), 0, "this medium has none");
    rig.device.contents().signals = true;
    rig.create_queue_pair(2, 2, None);
    assert_eq!(
        (rig.new_wake_fd_count(), rig.new_wake_fd_count()),
        (1, 0),
        "a new queue has a new channel"
    );
}

#[test]
fn waiting_fused_pair_keeps_the_thread_awake() {
    let mut rig = idle_fixture();
    (rig.device.contents().signals, rig.device.contents().is_stuck) = (true, true);
    rig.push_command(1, read_command(1));
    rig.push_command(1, read_command(1).with_opcode(5).with_fuse(Fuse::First));
    rig.push_command(1, write_command(1).with_fuse(Fuse::Second));
    rig.ring_submission_doorbell(1);
    rig.poll_transport();
    rig.poll_transport();
    assert_eq!(rig.arm_and_disarm(), None);
    rig.device.contents().is_stuck = false;
    rig.poll_until("the pair ends", |rig| rig.take_completion(1).is_some());
    rig.poll_until_idle();
}

#[test]
fn pending_events_are_completed_before_sleep() {
    let mut rig = idle_fixture();
    rig.push_command(0, tenmil_wire::Command::new(0x0c));
    rig.ring_submission_doorbell(0);
    rig.poll_until_idle();
    // A doorbell of a missing queue causes an event, and no poll is due to report it.
    rig.front.write_doorbell(rig.now, 6, 1);
    assert_eq!(rig.arm_and_disarm(), None, "there was something to tell");
    rig.poll_until_idle();
    assert!(rig.take_completion(0).is_some(), "and its completion was posted");
}

#[test]
fn controller_timer_limits_the_sleep() {
    let mut rig = idle_fixture();
    let timeout = SetFeatures { fid: 0x0f, cdw11: 5_000, ..SetFeatures::default() };
    rig.run_admin(timeout.to_command());
    let until = rig.poll_until_idle();
    assert!(until > rig.now && until <= rig.now.after(Span::from_secs(10)), "{until:?}");
}

#[test]
fn stopping_controller_keeps_its_thread_awake() {
    let mut rig = idle_fixture();
    (rig.device.contents().signals, rig.device.contents().is_stuck) = (true, true);
    rig.push_command(1, read_command(1));
    rig.ring_submission_doorbell(1);
    rig.poll_transport();
    rig.write_register(super::fixture::CC, 0);
    rig.poll_transport();
    assert_eq!(rig.arm_and_disarm(), None, "what was begun has not ended");
    rig.device.contents().is_stuck = false;
    rig.poll_until("it stops", |rig| rig.read_register(super::fixture::CSTS) == 0);
    assert_eq!(rig.arm_and_disarm(), Some(Instant::NEVER));
}
