//! Parking: which threads are not polled while others on their reactor work, and what unparks them.

use std::sync::Arc;

use tenmil_base::{Instant, Interrupts, Span};

use super::test_pollers::{
    CountingPoller, DeadlinePoller, InterruptingDevice, ParkingPoller, PinnedRingPoller, RELAXED,
    SharedCount, count_of, message_woken_poller, new_count,
};
use super::{R0, R1, SimReactorState, Simulation};
use crate::light_thread::EDGE_MAX;
use crate::{
    Context, PollMode, PollResult, Poller, PollerBuilder, PollerWake, ThreadBuilder, ThreadHandle,
};

/// A thread with a device, which may park if requested, and its poller's counters.
fn spawn_device_thread(
    world: &Simulation,
    name: &str,
    dozes: bool,
) -> (InterruptingDevice, ThreadHandle, [SharedCount; 3]) {
    let device = InterruptingDevice::new();
    let poller = ParkingPoller::new(device.clone(), dozes);
    let tallies = poller.poll_arm_disarm_counters();
    let plan = ThreadBuilder::new(name)
        .on_reactor(R0)
        .add_poller(PollerBuilder::polled_each_iteration(name, device.poller_wake(), poller));
    (device, world.directory.spawn(plan).unwrap(), tallies)
}

fn polls_arms_disarms(tallies: &[SharedCount; 3]) -> [u64; 3] {
    [0, 1, 2].map(|which| count_of(&tallies[which]))
}

#[test]
fn parked_threads_are_not_polled_while_others_work() {
    let mut world = Simulation::new_adaptive(3, 1);
    let dozers: Vec<_> = (0..40).map(|_| spawn_device_thread(&world, "dozes", true)).collect();
    let (mut busy, _, theirs) = spawn_device_thread(&world, "busy", true);
    let (_, _, watchful) = spawn_device_thread(&world, "watchful", false);
    world.run_until_idle();
    let before: Vec<_> = dozers.iter().map(|(_, _, tallies)| polls_arms_disarms(tallies)).collect();
    let (at_work, on_watch) = (polls_arms_disarms(&theirs), polls_arms_disarms(&watchful));
    assert!(before.iter().all(|[polls, arms, _]| *polls > 0 && *arms > 0));
    for _ in 0..50 {
        busy.complete_and_signal();
        world.run_until_idle();
        assert!(busy.is_completion_handled());
    }
    let after: Vec<_> = dozers.iter().map(|(_, _, tallies)| polls_arms_disarms(tallies)).collect();
    assert_eq!(after, before, "neither polled nor armed nor disarmed");
    let more = |tallies: &[SharedCount; 3], than: [u64; 3]| {
        polls_arms_disarms(tallies).iter().zip(than).all(|(now, then)| *now >= then + 50)
    };
    assert!(more(&theirs, at_work) && more(&watchful, on_watch));

    let all: Vec<_> = dozers.iter().map(|(_, _, tallies)| tallies.clone()).collect();
    let threads: Vec<_> = dozers.iter().map(|(_, thread, _)| thread.clone()).collect();
    // Each is unparked by its own event, and by no other.
    for (mut device, thread, _) in dozers {
        device.complete_and_signal();
        world.run_until_idle();
        assert!(device.is_completion_handled());
        world.send_closure(&thread, |_| ());
        world.run_until_idle();
    }
    let before: Vec<_> = all.iter().map(polls_arms_disarms).collect();
    for (which, thread) in threads.iter().enumerate() {
        world.send_closure(thread, |_| ());
        world.run_until_idle();
        let after: Vec<_> = all.iter().map(polls_arms_disarms).collect();
        let roused = (0..all.len()).filter(|one| after[*one] != before[*one]).count();
        assert_eq!(roused, which + 1, "one more each time");
    }
}

/// An event for a parked thread, and the check that it was handled.
type EventAndCheck = (
    fn(&Simulation, &mut InterruptingDevice, &ThreadHandle, &SharedCount),
    fn(&InterruptingDevice, &ThreadHandle, &SharedCount) -> bool,
);

const FOR_A_DOZER: [(&str, EventAndCheck); 5] = [
    (
        "a message",
        (
            |world, _, to, seen| {
                let seen = Arc::clone(seen);
                world.send_closure(to, move |_| _ = seen.fetch_add(1, RELAXED));
            },
            |_, _, seen| count_of(seen) == 1,
        ),
    ),
    (
        "a device",
        (
            |_, device, _, _| device.complete_and_signal(),
            |device, _, _| device.is_completion_handled(),
        ),
    ),
    (
        "an end",
        (|world, _, to, _| world.directory.end_thread(to.id()).unwrap(), |_, to, _| to.has_ended()),
    ),
    (
        "a move",
        (
            |world, _, to, _| world.directory.migrate_thread(to.id(), R1).unwrap(),
            |_, to, _| to.reactor() == R1,
        ),
    ),
    (
        // State that a poller sees when polled, followed by a notification.
        "a ring",
        (
            |_, device, to, _| {
                device.complete_without_signal();
                to.notify_reactor();
            },
            |device, _, _| device.is_completion_handled(),
        ),
    ),
];

#[test]
fn event_for_a_parked_thread_is_handled_in_every_reactor_state() {
    type Is = fn(SimReactorState) -> bool;
    let stages: [(&str, Is); 4] = [
        ("iterating", |stage| stage == SimReactorState::Iterating),
        ("wants to sleep", |stage| matches!(stage, SimReactorState::WantsSleep(_))),
        ("has announced its sleep", |stage| matches!(stage, SimReactorState::SleepAnnounced(_))),
        ("sleeping", |stage| matches!(stage, SimReactorState::Sleeping(_))),
    ];
    for (what, (comes, is_seen)) in FOR_A_DOZER {
        for (when, is_it) in stages {
            for is_first_doze in [true, false] {
                let mut world = Simulation::new_adaptive(1, 2);
                let (mut dozer, thread, tallies) = spawn_device_thread(&world, "dozes", true);
                let (mut other, _, _) = spawn_device_thread(&world, "other", true);
                if is_first_doze {
                    world.step_all(3);
                } else {
                    world.run_until_idle();
                    other.complete_and_signal();
                    world.step_all(3);
                }
                while !is_it(world.members[0].stage) {
                    world.step_all(1);
                    world.advance_clock(Span::from_us(1));
                }
                let seen = new_count();
                let before = polls_arms_disarms(&tallies);
                comes(&world, &mut dozer, &thread, &seen);
                world.run_until_idle();
                assert!(is_seen(&dozer, &thread, &seen), "{what} while {when}");
                assert!(
                    polls_arms_disarms(&tallies)[0] > before[0] || thread.has_ended(),
                    "{what} while {when}"
                );
                // Later events are handled too.
                if !thread.has_ended() {
                    dozer.complete_and_signal();
                    world.run_until_idle();
                    assert!(dozer.is_completion_handled(), "a device after {what} while {when}");
                }
            }
        }
    }
}

#[test]
fn deadline_unparks_a_thread_whether_the_reactor_sleeps_or_not() {
    for keeps_awake in [false, true] {
        let mut world = Simulation::new_adaptive(1, 1);
        let (next, rung) = (new_count(), new_count());
        next.store(world.now().after(Span::from_ms(9)).ns, RELAXED);
        let gap = Span::from_secs(3_600);
        let alarm = DeadlinePoller { next, rung: Arc::clone(&rung), gap };
        let alarm = ParkingPoller::new(alarm, true);
        let polls = Arc::clone(&alarm.polls);
        let plan = ThreadBuilder::new("waits").add_poller(PollerBuilder::polled_each_iteration(
            "alarm",
            PollerWake::Deadline,
            alarm,
        ));
        world.directory.spawn(plan).unwrap();
        let (mut other, _, _) = spawn_device_thread(&world, "other", false);
        world.run_until_idle();
        let before = count_of(&polls);
        let mut live = |span: Span| {
            let end = world.now().after(span);
            while world.now() < end {
                if keeps_awake {
                    other.complete_and_signal();
                }
                world.step_reactor(0);
                world.advance_clock(Span::from_us(5));
            }
        };
        live(Span::from_ms(8));
        assert_eq!((count_of(&rung), count_of(&polls)), (0, before));
        live(Span::from_ms(2));
        assert_eq!(count_of(&rung), 1);
    }
}

/// Finds work in every iteration, or is busy without any, as long as requested.
struct BusyPoller {
    works: bool,
    until: SharedCount,
    now: Instant,
}

impl Poller for BusyPoller {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        self.now = context.now();
        PollResult::from_count(usize::from(self.works && self.is_busy() == Some(true)))
    }

    fn is_busy(&self) -> Option<bool> {
        Some(self.now.ns < count_of(&self.until))
    }
}

#[test]
fn descriptor_of_a_parked_thread_is_noticed_by_a_busy_reactor() {
    for works in [true, false] {
        let mut world = Simulation::new_adaptive(1, 1);
        let until = new_count();
        let restless = BusyPoller { works, until: Arc::clone(&until), now: Instant::default() };
        let waits = PollerWake::OnlyWhileBusy("waits for its time");
        let plan = ThreadBuilder::new("restless")
            .add_poller(PollerBuilder::polled_each_iteration("restless", waits, restless));
        let restless = world.directory.spawn(plan).unwrap();
        let mut dozers: Vec<_> =
            (0..5).map(|_| spawn_device_thread(&world, "dozes", true)).collect();
        world.run_until_idle();
        until.store(u64::MAX, RELAXED);
        world.send_closure(&restless, |_| ());
        world.step_all(5);
        assert_eq!(world.members[0].stage, SimReactorState::Iterating);
        let sleeps =
            |world: &Simulation| world.directory.sample_statistics(world.now()).reactors[0].sleeps;
        let slept = sleeps(&world);
        for (round, (dozer, _, tallies)) in dozers.iter_mut().enumerate() {
            let before = polls_arms_disarms(tallies);
            let came = world.now();
            dozer.complete_and_signal();
            while !dozer.is_completion_handled() {
                world.step_reactor(0);
                world.advance_clock(Span::from_us(2));
                let waits = world.now().since(came);
                assert!(waits < Span::from_us(2_100), "round {round}, works: {works}, {waits}");
            }
            assert_eq!(sleeps(&world), slept, "it was awake all the time");
            assert!(polls_arms_disarms(tallies)[0] <= before[0] + 2, "it dozed until then");
        }
        let (_, _, tallies) = dozers.swap_remove(0);
        let before = polls_arms_disarms(&tallies);
        (0..100).for_each(|_| world.step_reactor(0));
        assert!(
            polls_arms_disarms(&tallies)[0] >= before[0] + 90,
            "who has got up is looked at in every turn"
        );
        until.store(0, RELAXED);
        world.run_until_idle();
        let rests = polls_arms_disarms(&tallies);
        world.send_closure(&restless, |_| ());
        world.run_until_idle();
        assert_eq!(polls_arms_disarms(&tallies), rests, "and dozes again after the next sleep");
    }
}

#[test]
fn always_polling_reactor_parks_no_thread_and_a_mode_change_unparks_all() {
    let mut world = Simulation::new_adaptive(1, 1);
    let (_, _, tallies) = spawn_device_thread(&world, "dozes", true);
    world.run_until_idle();
    let before = polls_arms_disarms(&tallies);
    world.directory.set_poll_mode(R0, PollMode::Always).unwrap();
    world.step_all(100);
    assert!(polls_arms_disarms(&tallies)[0] > before[0] + 90);
    world.directory.set_poll_mode(R0, PollMode::Hybrid).unwrap();
    world.run_until_idle();
    let before = polls_arms_disarms(&tallies);
    let (mut other, ..) = spawn_device_thread(&world, "other", true);
    other.complete_and_signal();
    world.run_until_idle();
    assert!(other.is_completion_handled());
    assert_eq!(polls_arms_disarms(&tallies), before, "in hybrid mode it dozes");
}

#[test]
fn one_poller_that_may_not_park_keeps_its_thread_unparked() {
    let mut world = Simulation::new_adaptive(1, 1);
    let (mut other, ..) = spawn_device_thread(&world, "other", false);
    let in_flight = new_count();
    let ring = ParkingPoller::new(PinnedRingPoller::new(&in_flight, 1), true);
    let polls = Arc::clone(&ring.polls);
    let watchful = ParkingPoller::new(CountingPoller::default(), false);
    let waits = PollerWake::OnlyWhileBusy("has nothing in flight by itself");
    let plan = ThreadBuilder::new("two")
        .add_poller(PollerBuilder::polled_each_iteration("ring", waits, ring))
        .add_poller(message_woken_poller("watchful", watchful));
    world.directory.spawn(plan).unwrap();
    world.run_until_idle();
    let before = count_of(&polls);
    // Without a notification: found only by polling.
    in_flight.store(1, RELAXED);
    other.complete_and_signal();
    world.run_until_idle();
    assert!(count_of(&polls) > before && count_of(&in_flight) == 0);
}

/// Panics when it is disarmed.
struct DisarmPanicPoller;

impl Poller for DisarmPanicPoller {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        PollResult::Idle
    }

    fn disarm(&mut self) {
        panic!("on purpose");
    }

    fn may_park(&self) -> bool {
        true
    }
}

#[test]
fn poller_that_panics_while_unparking_is_dropped_and_others_continue() {
    let mut world = Simulation::new_adaptive(1, 1);
    let plan = ThreadBuilder::new("brittle")
        .add_poller(message_woken_poller("brittle", DisarmPanicPoller));
    let brittle = world.directory.spawn(plan).unwrap();
    let (mut dozer, thread, _) = spawn_device_thread(&world, "dozes", true);
    world.run_until_idle();
    let answers = new_count();
    let theirs = Arc::clone(&answers);
    world.send_closure(&brittle, move |_| _ = theirs.fetch_add(1, RELAXED));
    world.send_closure(&thread, |_| ());
    dozer.complete_and_signal();
    world.run_until_idle();
    assert!(dozer.is_completion_handled());
    assert_eq!(count_of(&answers), 1, "its thread goes on");
    assert_eq!(world.event_kinds().last(), Some(&"poller-panicked"));
}

#[test]
fn permanently_readable_descriptor_does_not_unpark_its_thread_forever() {
    let mut world = Simulation::new_adaptive(0, 1);
    let mut vectors = tenmil_linux::EventFdVectors::new(1).unwrap();
    let descriptor = vectors.descriptor(0).unwrap().try_clone_to_owned().unwrap();
    vectors.unmask(0);
    vectors.raise(0);
    let stuck = ParkingPoller::new(CountingPoller::default(), true);
    let stuck =
        PollerBuilder::polled_each_iteration("stuck", PollerWake::Descriptor(descriptor), stuck);
    world.directory.spawn(ThreadBuilder::new("stuck").add_poller(stuck)).unwrap();
    let sleeps =
        |world: &Simulation| world.directory.sample_statistics(world.now()).reactors[0].sleeps;
    let end = world.now().after(Span::from_secs(1));
    while world.now() < end {
        world.step_reactor(0);
        match world.members[0].stage {
            SimReactorState::Sleeping(deadline) => {
                world.step_reactor(0);
                if let SimReactorState::Sleeping(_) = world.members[0].stage {
                    world.now_ns.store(deadline.min(end).ns, RELAXED);
                }
            }
            _ => world.advance_clock(Span { ns: 500 }),
        }
    }
    assert_eq!(world.event_kinds(), ["thread-started", "spurious-wakeups"]);
    let most = 32 + 4 * (Span::from_secs(1).ns / EDGE_MAX.ns) + 20;
    assert!(sleeps(&world) < most, "{} sleeps in a second", sleeps(&world));
}

#[test]
fn stopping_reactor_unparks_all_threads() {
    let mut world = Simulation::new_adaptive(1, 1);
    let threads: Vec<_> = (0..5).map(|_| spawn_device_thread(&world, "dozes", true).1).collect();
    world.run_until_idle();
    world.directory.stop_reactor(R0).unwrap();
    for _ in 0..100 {
        world.step_reactor(0);
    }
    assert_eq!(world.members[0].stage, SimReactorState::Ended);
    assert!(threads.iter().all(ThreadHandle::has_ended));
}
