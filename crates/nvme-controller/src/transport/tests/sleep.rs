//! Sleep of a controller's thread, and its deadline.

use tenmil_base::{Instant, Span};
use tenmil_wire::admin::SetFeatures;
use tenmil_wire::{Fuse, TypedCommand};

use super::rig::{Rig, SHARED, read, write};

impl Rig {
    /// Arms the wakeups and disarms them.
    fn arm(&mut self) -> Option<Instant> {
        let until = self.front.arm(self.now);
        self.front.disarm();
        until
    }

    /// Polls until the thread may sleep, and returns the deadline.
    fn rest(&mut self) -> Instant {
        for _ in 0..100 {
            if let Some(until) = self.arm() {
                return until;
            }
            self.poll();
        }
        panic!("it finds no rest: {:?}", self.front.last_error());
    }

    fn descriptors(&mut self) -> usize {
        let mut count = 0;
        self.front.new_descriptors(|_| count += 1);
        count
    }
}

/// An idle controller with one queue pair.
fn resting() -> Rig {
    let mut rig = Rig::enabled(SHARED);
    rig.create(1, 1, Some(1));
    rig.rest();
    rig
}

#[test]
fn a_controller_at_rest_may_sleep_for_ever() {
    assert_eq!(resting().arm(), Some(Instant::NEVER));
}

#[test]
fn whatever_the_host_has_stored_keeps_the_thread_awake_until_it_is_dealt_with() {
    let mut rig = resting();
    rig.push(1, read(1));
    assert!(rig.arm().is_some(), "nobody has rung");
    rig.ring(1);
    assert_eq!(rig.arm(), None, "a submission doorbell");
    assert!(rig.take(1).is_some(), "and the look was a turn");
    assert!(rig.arm().is_some(), "a completion doorbell that nothing waits for");
    rig.push(0, tenmil_wire::Command::new(0x18));
    rig.ring(0);
    assert_eq!(rig.arm(), None, "the admin queue");
    rig.rest();
    rig.write(super::rig::CC, 0);
    assert_eq!(rig.arm(), None, "a register");
}

#[test]
fn a_command_that_waits_for_a_place_is_taken_when_the_host_has_made_one() {
    let mut rig = resting();
    for _ in 0..15 {
        rig.push(1, read(1));
    }
    rig.ring(1);
    rig.poll();
    rig.push(1, read(1));
    rig.ring(1);
    rig.rest();
    assert!(rig.take(1).is_some(), "a place");
    assert_eq!(rig.arm(), None);
}

#[test]
fn a_medium_that_wakes_nobody_keeps_the_thread_awake_while_it_owes_an_answer() {
    let mut rig = resting();
    rig.device.blocks().is_stuck = true;
    rig.push(1, read(1));
    rig.ring(1);
    rig.poll();
    assert_eq!(rig.arm(), None);
    rig.device.blocks().is_stuck = false;
    assert_eq!(rig.arm(), None, "and then there is the answer");
    rig.rest();
}

#[test]
fn a_medium_that_signals_is_armed_for_the_sleep_and_looked_at_once_more() {
    let mut rig = resting();
    (rig.device.blocks().signals, rig.device.blocks().is_stuck) = (true, true);
    rig.push(1, read(1));
    rig.ring(1);
    rig.poll();
    assert_eq!(rig.front.arm(rig.now), Some(Instant::NEVER));
    assert_eq!(rig.device.blocks().armed, 1);
    rig.front.disarm();
    rig.front.disarm();
    assert_eq!(rig.device.blocks().armed, 0);
    rig.device.blocks().is_stuck = false;
    assert_eq!(rig.arm(), None);
    rig.poll();
    assert!(rig.take(1).is_some());
    assert_eq!(rig.device.blocks().armed, 0);
}

#[test]
fn every_descriptor_is_handed_out_once() {
    let mut rig = resting();
    assert_eq!(rig.descriptors(), 0, "this medium has none");
    rig.device.blocks().signals = true;
    rig.create(2, 2, None);
    assert_eq!((rig.descriptors(), rig.descriptors()), (1, 0), "a new queue has a new channel");
}

#[test]
fn a_fused_pair_that_waits_for_its_turn_keeps_the_thread_awake() {
    let mut rig = resting();
    (rig.device.blocks().signals, rig.device.blocks().is_stuck) = (true, true);
    rig.push(1, read(1));
    rig.push(1, read(1).with_opcode(5).with_fuse(Fuse::First));
    rig.push(1, write(1).with_fuse(Fuse::Second));
    rig.ring(1);
    rig.poll();
    rig.poll();
    assert_eq!(rig.arm(), None);
    rig.device.blocks().is_stuck = false;
    rig.turn_until("the pair ends", |rig| rig.take(1).is_some());
    rig.rest();
}

#[test]
fn news_for_the_host_are_told_before_the_sleep() {
    let mut rig = resting();
    rig.push(0, tenmil_wire::Command::new(0x0c));
    rig.ring(0);
    rig.rest();
    // A doorbell of a missing queue causes an event, and no poll is due to report it.
    rig.front.ring(rig.now, 6, 1);
    assert_eq!(rig.arm(), None, "there was something to tell");
    rig.rest();
    assert!(rig.take(0).is_some(), "and it was told");
}

#[test]
fn a_sleep_ends_when_a_timer_of_the_controller_does() {
    let mut rig = resting();
    let timeout = SetFeatures { fid: 0x0f, cdw11: 5_000, ..SetFeatures::default() };
    rig.admin(timeout.to_command());
    let until = rig.rest();
    assert!(until > rig.now && until <= rig.now.after(Span::from_secs(10)), "{until:?}");
}

#[test]
fn a_controller_that_is_being_stopped_keeps_its_thread_awake() {
    let mut rig = resting();
    (rig.device.blocks().signals, rig.device.blocks().is_stuck) = (true, true);
    rig.push(1, read(1));
    rig.ring(1);
    rig.poll();
    rig.write(super::rig::CC, 0);
    rig.poll();
    assert_eq!(rig.arm(), None, "what was begun has not ended");
    rig.device.blocks().is_stuck = false;
    rig.turn_until("it stops", |rig| rig.read(super::rig::CSTS) == 0);
    assert_eq!(rig.arm(), Some(Instant::NEVER));
}
