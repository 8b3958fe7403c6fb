//! Parking: which threads are not polled while others on their reactor work, and what unparks them.

use std::sync::Arc;

use tenmil_base::{Instant, Interrupts, Span};

use super::test_pollers::{
    Alarm, Counter, Device, Dozing, RELAXED, Ring, Tally, active, count, tally,
};
use super::{R0, R1, SimReactorState, Simulation};
use crate::thread::EDGE_MAX;
use crate::{
    Context, PollMode, PollResult, Poller, PollerBuilder, PollerWake, ThreadBuilder, ThreadHandle,
};

/// A thread with a device, which may park if requested, and its poller's counters.
fn device(world: &Simulation, name: &str, dozes: bool) -> (Device, ThreadHandle, [Tally; 3]) {
    let device = Device::new();
    let poller = Dozing::new(device.clone(), dozes);
    let tallies = poller.tallies();
    let plan = ThreadBuilder::new(name).on(R0).poller(PollerBuilder::active(
        name,
        device.woken_by(),
        poller,
    ));
    (device, world.directory.spawn(plan).unwrap(), tallies)
}

fn counts(tallies: &[Tally; 3]) -> [u64; 3] {
    [0, 1, 2].map(|which| count(&tallies[which]))
}

#[test]
fn those_who_doze_are_not_looked_at_while_others_work_and_those_who_do_not_are() {
    let mut world = Simulation::adaptive(3, 1);
    let dozers: Vec<_> = (0..40).map(|_| device(&world, "dozes", true)).collect();
    let (mut busy, _, theirs) = device(&world, "busy", true);
    let (_, _, watchful) = device(&world, "watchful", false);
    world.run_until_idle();
    let before: Vec<_> = dozers.iter().map(|(_, _, tallies)| counts(tallies)).collect();
    let (at_work, on_watch) = (counts(&theirs), counts(&watchful));
    assert!(before.iter().all(|[polls, arms, _]| *polls > 0 && *arms > 0));
    for _ in 0..50 {
        busy.complete();
        world.run_until_idle();
        assert!(busy.is_seen());
    }
    let after: Vec<_> = dozers.iter().map(|(_, _, tallies)| counts(tallies)).collect();
    assert_eq!(after, before, "neither polled nor armed nor disarmed");
    let more = |tallies: &[Tally; 3], than: [u64; 3]| {
        counts(tallies).iter().zip(than).all(|(now, then)| *now >= then + 50)
    };
    assert!(more(&theirs, at_work) && more(&watchful, on_watch));

    let all: Vec<_> = dozers.iter().map(|(_, _, tallies)| tallies.clone()).collect();
    let threads: Vec<_> = dozers.iter().map(|(_, thread, _)| thread.clone()).collect();
    // Each is unparked by its own event, and by no other.
    for (mut device, thread, _) in dozers {
        device.complete();
        world.run_until_idle();
        assert!(device.is_seen());
        world.call(&thread, |_| ());
        world.run_until_idle();
    }
    let before: Vec<_> = all.iter().map(counts).collect();
    for (which, thread) in threads.iter().enumerate() {
        world.call(thread, |_| ());
        world.run_until_idle();
        let after: Vec<_> = all.iter().map(counts).collect();
        let roused = (0..all.len()).filter(|one| after[*one] != before[*one]).count();
        assert_eq!(roused, which + 1, "one more each time");
    }
}

/// An event for a parked thread, and the check that it was handled.
type Comes = (
    fn(&Simulation, &mut Device, &ThreadHandle, &Tally),
    fn(&Device, &ThreadHandle, &Tally) -> bool,
);

const FOR_A_DOZER: [(&str, Comes); 5] = [
    (
        "a message",
        (
            |world, _, to, seen| {
                let seen = Arc::clone(seen);
                world.call(to, move |_| _ = seen.fetch_add(1, RELAXED));
            },
            |_, _, seen| count(seen) == 1,
        ),
    ),
    ("a device", (|_, device, _, _| device.complete(), |device, _, _| device.is_seen())),
    (
        "an end",
        (|world, _, to, _| world.directory.end_thread(to.id()).unwrap(), |_, to, _| to.is_gone()),
    ),
    (
        "a move",
        (
            |world, _, to, _| world.directory.move_thread(to.id(), R1).unwrap(),
            |_, to, _| to.reactor() == R1,
        ),
    ),
    (
        // State that a poller sees when polled, followed by a notification.
        "a ring",
        (
            |_, device, to, _| {
                device.note();
                to.notify();
            },
            |device, _, _| device.is_seen(),
        ),
    ),
];

#[test]
fn what_is_for_one_who_dozes_is_seen_at_whatever_stage_its_reactor_is() {
    type Is = fn(SimReactorState) -> bool;
    let stages: [(&str, Is); 4] = [
        ("turning", |stage| stage == SimReactorState::Turning),
        ("tired", |stage| matches!(stage, SimReactorState::Tired(_))),
        ("announced", |stage| matches!(stage, SimReactorState::Announced(_))),
        ("sleeping", |stage| matches!(stage, SimReactorState::Sleeping(_))),
    ];
    for (what, (comes, is_seen)) in FOR_A_DOZER {
        for (when, is_it) in stages {
            for is_first_doze in [true, false] {
                let mut world = Simulation::adaptive(1, 2);
                let (mut dozer, thread, tallies) = device(&world, "dozes", true);
                let (mut other, _, _) = device(&world, "other", true);
                if is_first_doze {
                    world.iterate_all(3);
                } else {
                    world.run_until_idle();
                    other.complete();
                    world.iterate_all(3);
                }
                while !is_it(world.members[0].stage) {
                    world.iterate_all(1);
                    world.pass_time(Span::from_us(1));
                }
                let seen = tally();
                let before = counts(&tallies);
                comes(&world, &mut dozer, &thread, &seen);
                world.run_until_idle();
                assert!(is_seen(&dozer, &thread, &seen), "{what} while {when}");
                assert!(counts(&tallies)[0] > before[0] || thread.is_gone(), "{what} while {when}");
                // Later events are handled too.
                if !thread.is_gone() {
                    dozer.complete();
                    world.run_until_idle();
                    assert!(dozer.is_seen(), "a device after {what} while {when}");
                }
            }
        }
    }
}

#[test]
fn time_gets_up_one_who_dozes_asleep_and_awake() {
    for keeps_awake in [false, true] {
        let mut world = Simulation::adaptive(1, 1);
        let (next, rung) = (tally(), tally());
        next.store(world.now().after(Span::from_ms(9)).ns, RELAXED);
        let gap = Span::from_secs(3_600);
        let alarm = Alarm { next, rung: Arc::clone(&rung), gap };
        let alarm = Dozing::new(alarm, true);
        let polls = Arc::clone(&alarm.polls);
        let plan = ThreadBuilder::new("waits").poller(PollerBuilder::active(
            "alarm",
            PollerWake::Deadline,
            alarm,
        ));
        world.directory.spawn(plan).unwrap();
        let (mut other, _, _) = device(&world, "other", false);
        world.run_until_idle();
        let before = count(&polls);
        let mut live = |span: Span| {
            let end = world.now().after(span);
            while world.now() < end {
                if keeps_awake {
                    other.complete();
                }
                world.step(0);
                world.pass_time(Span::from_us(5));
            }
        };
        live(Span::from_ms(8));
        assert_eq!((count(&rung), count(&polls)), (0, before));
        live(Span::from_ms(2));
        assert_eq!(count(&rung), 1);
    }
}

/// Finds work in every iteration, or is busy without any, as long as requested.
struct Restless {
    works: bool,
    until: Tally,
    now: Instant,
}

impl Poller for Restless {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        self.now = context.now();
        PollResult::from_count(usize::from(self.works && self.is_busy() == Some(true)))
    }

    fn is_busy(&self) -> Option<bool> {
        Some(self.now.ns < count(&self.until))
    }
}

#[test]
fn a_descriptor_of_one_who_dozes_is_heard_by_a_reactor_that_does_not_sleep() {
    for works in [true, false] {
        let mut world = Simulation::adaptive(1, 1);
        let until = tally();
        let restless = Restless { works, until: Arc::clone(&until), now: Instant::default() };
        let waits = PollerWake::OnlyWhileBusy("waits for its time");
        let plan = ThreadBuilder::new("restless")
            .poller(PollerBuilder::active("restless", waits, restless));
        let restless = world.directory.spawn(plan).unwrap();
        let mut dozers: Vec<_> = (0..5).map(|_| device(&world, "dozes", true)).collect();
        world.run_until_idle();
        until.store(u64::MAX, RELAXED);
        world.call(&restless, |_| ());
        world.iterate_all(5);
        assert_eq!(world.members[0].stage, SimReactorState::Turning);
        let sleeps = |world: &Simulation| world.directory.sample(world.now()).reactors[0].sleeps;
        let slept = sleeps(&world);
        for (round, (dozer, _, tallies)) in dozers.iter_mut().enumerate() {
            let before = counts(tallies);
            let came = world.now();
            dozer.complete();
            while !dozer.is_seen() {
                world.step(0);
                world.pass_time(Span::from_us(2));
                let waits = world.now().since(came);
                assert!(waits < Span::from_us(2_100), "round {round}, works: {works}, {waits}");
            }
            assert_eq!(sleeps(&world), slept, "it was awake all the time");
            assert!(counts(tallies)[0] <= before[0] + 2, "it dozed until then");
        }
        let (_, _, tallies) = dozers.swap_remove(0);
        let before = counts(&tallies);
        (0..100).for_each(|_| world.step(0));
        assert!(counts(&tallies)[0] >= before[0] + 90, "who has got up is looked at in every turn");
        until.store(0, RELAXED);
        world.run_until_idle();
        let rests = counts(&tallies);
        world.call(&restless, |_| ());
        world.run_until_idle();
        assert_eq!(counts(&tallies), rests, "and dozes again after the next sleep");
    }
}

#[test]
fn nobody_dozes_where_nobody_sleeps_and_a_change_of_mode_gets_all_up() {
    let mut world = Simulation::adaptive(1, 1);
    let (_, _, tallies) = device(&world, "dozes", true);
    world.run_until_idle();
    let before = counts(&tallies);
    world.directory.set_poll(R0, PollMode::Always).unwrap();
    world.iterate_all(100);
    assert!(counts(&tallies)[0] > before[0] + 90);
    world.directory.set_poll(R0, PollMode::Hybrid).unwrap();
    world.run_until_idle();
    let before = counts(&tallies);
    let (mut other, ..) = device(&world, "other", true);
    other.complete();
    world.run_until_idle();
    assert!(other.is_seen());
    assert_eq!(counts(&tallies), before, "in hybrid mode it dozes");
}

#[test]
fn one_poller_that_may_not_keeps_its_thread_from_dozing() {
    let mut world = Simulation::adaptive(1, 1);
    let (mut other, ..) = device(&world, "other", false);
    let in_flight = tally();
    let ring = Dozing::new(Ring::new(&in_flight, 1), true);
    let polls = Arc::clone(&ring.polls);
    let watchful = Dozing::new(Counter::default(), false);
    let waits = PollerWake::OnlyWhileBusy("has nothing in flight by itself");
    let plan = ThreadBuilder::new("two")
        .poller(PollerBuilder::active("ring", waits, ring))
        .poller(active("watchful", watchful));
    world.directory.spawn(plan).unwrap();
    world.run_until_idle();
    let before = count(&polls);
    // Without a notification: found only by polling.
    in_flight.store(1, RELAXED);
    other.complete();
    world.run_until_idle();
    assert!(count(&polls) > before && count(&in_flight) == 0);
}

/// Panics when it is disarmed.
struct Brittle;

impl Poller for Brittle {
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
fn one_that_panics_as_it_gets_up_is_gone_and_others_go_on() {
    let mut world = Simulation::adaptive(1, 1);
    let plan = ThreadBuilder::new("brittle").poller(active("brittle", Brittle));
    let brittle = world.directory.spawn(plan).unwrap();
    let (mut dozer, thread, _) = device(&world, "dozes", true);
    world.run_until_idle();
    let answers = tally();
    let theirs = Arc::clone(&answers);
    world.call(&brittle, move |_| _ = theirs.fetch_add(1, RELAXED));
    world.call(&thread, |_| ());
    dozer.complete();
    world.run_until_idle();
    assert!(dozer.is_seen());
    assert_eq!(count(&answers), 1, "its thread goes on");
    assert_eq!(world.kinds().last(), Some(&"poller-panicked"));
}

#[test]
fn a_descriptor_that_stays_readable_does_not_doze_its_thread_into_waking_for_ever() {
    let mut world = Simulation::adaptive(0, 1);
    let mut vectors = tenmil_linux::EventVectors::new(1).unwrap();
    let descriptor = vectors.descriptor(0).unwrap().try_clone_to_owned().unwrap();
    vectors.unmask(0);
    vectors.raise(0);
    let stuck = Dozing::new(Counter::default(), true);
    let stuck = PollerBuilder::active("stuck", PollerWake::Descriptor(descriptor), stuck);
    world.directory.spawn(ThreadBuilder::new("stuck").poller(stuck)).unwrap();
    let sleeps = |world: &Simulation| world.directory.sample(world.now()).reactors[0].sleeps;
    let end = world.now().after(Span::from_secs(1));
    while world.now() < end {
        world.step(0);
        match world.members[0].stage {
            SimReactorState::Sleeping(deadline) => {
                world.step(0);
                if let SimReactorState::Sleeping(_) = world.members[0].stage {
                    world.now_ns.store(deadline.min(end).ns, RELAXED);
                }
            }
            _ => world.pass_time(Span { ns: 500 }),
        }
    }
    assert_eq!(world.kinds(), ["thread-started", "spurious-wakeups"]);
    let most = 32 + 4 * (Span::from_secs(1).ns / EDGE_MAX.ns) + 20;
    assert!(sleeps(&world) < most, "{} sleeps in a second", sleeps(&world));
}

#[test]
fn a_reactor_that_stops_gets_everybody_up_to_go() {
    let mut world = Simulation::adaptive(1, 1);
    let threads: Vec<_> = (0..5).map(|_| device(&world, "dozes", true).1).collect();
    world.run_until_idle();
    world.directory.stop(R0).unwrap();
    for _ in 0..100 {
        world.step(0);
    }
    assert_eq!(world.members[0].stage, SimReactorState::Ended);
    assert!(threads.iter().all(ThreadHandle::is_gone));
}
