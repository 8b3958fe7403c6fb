//! Sleeping: conditions, duration, and wake-up.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tenmil_base::{Instant, Span, WakeSource};
use tenmil_linux::{EventLoop, NextStep};

use super::test_pollers::{
    FIRST, InterruptingDevice, PinnedRingPoller, RELAXED, count_of, idle_poller,
    message_woken_poller, new_count,
};
use super::{R0, R1, SimReactorState, Simulation};
use crate::{
    Context, PollMode, PollResult, Poller, PollerBuilder, PollerId, PollerWake, ReactorError,
    ReactorOptions, SPIN_MAX, SPIN_MIN, ThreadBuilder, ThreadHandle, WakeKind,
};

fn poller_without_wake() -> PollerBuilder {
    PollerBuilder::polled_each_iteration(
        "deaf",
        PollerWake::from_source(WakeSource::None).unwrap(),
        idle_poller(&new_count()),
    )
}

#[test]
fn poller_without_wake_source_is_rejected_where_reactors_sleep() {
    let mut world = Simulation::new_adaptive(0, 1);
    let refused = world
        .directory
        .spawn(ThreadBuilder::new("deaf").add_poller(poller_without_wake()))
        .unwrap_err();
    let why = ReactorError::NoWakeSource { poller: "deaf".into(), mode: PollMode::Adaptive };
    assert_eq!(refused.reason, why);
    assert_eq!(refused.builder.pollers.len(), 1, "and is given back");
    assert!(refused.to_string().contains("'deaf'"), "{refused}");

    let thread = world.directory.spawn(ThreadBuilder::new("hearing")).unwrap();
    let answers = Arc::new(std::sync::Mutex::new(None));
    let theirs = Arc::clone(&answers);
    world.send_closure(&thread, move |context| {
        *theirs.lock().unwrap() = context.add_poller(poller_without_wake()).err()
    });
    world.run_until_idle();
    let refused = answers.lock().unwrap().take().unwrap();
    assert_eq!((refused.reason, refused.poller.name()), (why, "deaf"));
}

#[test]
fn poller_without_declared_wake_is_rejected_in_every_mode() {
    let silent = [
        (PollerWake::from_source(WakeSource::Deadline).unwrap().kind(), "wake_at"),
        (WakeKind::OnlyWhileBusy("waits for itself"), "is_busy"),
    ];
    let woken_by = |kind| match kind {
        WakeKind::OnlyWhileBusy(why) => PollerWake::OnlyWhileBusy(why),
        _ => PollerWake::Deadline,
    };
    for mut world in [Simulation::new_always_polling(1), Simulation::new_adaptive(0, 1)] {
        for (kind, unsaid) in silent {
            let make = || {
                PollerBuilder::polled_each_iteration(
                    "silent",
                    woken_by(kind),
                    idle_poller(&new_count()),
                )
            };
            let why =
                ReactorError::MissingWakeCall { poller: "silent".into(), woken_by: kind, unsaid };
            let refused = world.directory.spawn(ThreadBuilder::new("silent").add_poller(make()));
            assert_eq!(refused.unwrap_err().reason, why);
            let thread = world.directory.spawn(ThreadBuilder::new("hearing")).unwrap();
            let answers = Arc::new(std::sync::Mutex::new(None));
            let theirs = Arc::clone(&answers);
            let add = make();
            world.send_closure(&thread, move |context| {
                *theirs.lock().unwrap() = context.add_poller(add).err()
            });
            world.step_all(4);
            assert_eq!(answers.lock().unwrap().take().unwrap().reason, why);
            assert!(why.to_string().contains(unsaid), "{why}");
        }
        // A timed poller is woken by its period, another one by its declared deadline.
        let timed =
            PollerBuilder::polled_each_period("timed", Span::from_ms(1), idle_poller(&new_count()));
        let ring = PinnedRingPoller::new(&new_count(), 1);
        let busy =
            PollerBuilder::polled_each_iteration("busy", PollerWake::OnlyWhileBusy("waits"), ring);
        world
            .directory
            .spawn(ThreadBuilder::new("said").add_poller(timed).add_poller(busy))
            .unwrap();
        world.step_all(4);
    }
}

#[test]
fn poller_without_deadline_does_not_delay_the_sleep() {
    let mut world = Simulation::new_adaptive(0, 1);
    let thread = world.directory.spawn(
        ThreadBuilder::new("idle")
            .add_poller(message_woken_poller("idle", idle_poller(&new_count()))),
    );
    thread.unwrap();
    world.run_until_idle();
    assert_eq!(world.members[0].stage, SimReactorState::Sleeping(Instant::NEVER));
}

#[test]
fn poller_without_wake_source_is_allowed_if_no_reactor_sleeps_and_keeps_it_so() {
    let mut world = Simulation::new_always_polling(2);
    let thread = world
        .directory
        .spawn(ThreadBuilder::new("deaf").add_poller(poller_without_wake()).on_reactor(R0))
        .unwrap();
    world.step_all(2);
    let refused = world.directory.set_poll_mode(R0, PollMode::Adaptive).unwrap_err();
    assert!(matches!(refused, ReactorError::NoWakeSource { .. }), "{refused}");
    // A reactor that would sleep accepts it, and stays awake.
    world.directory.set_poll_mode(R1, PollMode::Adaptive).unwrap();
    world.directory.migrate_thread(thread.id(), R1).unwrap();
    for _ in 0..1_000 {
        world.step_all(1);
        world.advance_clock(Span::from_us(10));
        assert_eq!(world.members[1].stage, SimReactorState::Iterating);
    }
    assert_eq!(thread.reactor(), R1);
}

/// Spin time after the last work, if work came with this gap before.
fn spin_length_after_gap(gap: Span) -> Span {
    let mut world = Simulation::new_adaptive(0, 1);
    let device = InterruptingDevice::new();
    let mut theirs = device.clone();
    world
        .directory
        .spawn(ThreadBuilder::new("device").add_poller(device.poller_builder("device")))
        .unwrap();
    world.run_until_idle();
    for _ in 0..200 {
        let next = world.now().after(gap);
        theirs.complete_and_signal();
        while world.now() < next {
            world.step_all(1);
            world.advance_clock(Span { ns: gap.ns / 50 });
        }
    }
    theirs.complete_and_signal();
    while !device.is_completion_handled() {
        world.step_reactor(0);
    }
    let last = world.now();
    while world.members[0].stage == SimReactorState::Iterating {
        world.step_all(1);
        world.advance_clock(Span::from_us(1));
    }
    world.now().since(last)
}

#[test]
fn spin_length_follows_the_gaps_within_its_bounds() {
    let slack = Span::from_us(10).ns;
    let quick = spin_length_after_gap(Span::from_us(5));
    assert!(quick >= SPIN_MIN && quick.ns <= SPIN_MIN.ns + slack, "{quick}");
    let steady = spin_length_after_gap(Span::from_us(200));
    assert!(steady.ns > 300_000 && steady.ns < 500_000, "{steady}");
    let slow = spin_length_after_gap(Span::from_us(900));
    assert!(slow <= Span { ns: SPIN_MAX.ns + slack } && slow.ns > 900_000, "{slow}");
    let rare = spin_length_after_gap(Span::from_ms(20));
    assert!(rare.ns <= slack, "looking has been in vain two hundred times: {rare}");
}

/// Whether a reactor with these pollers keeps spinning after each of several pieces of work found
/// by the last of them.
fn spins_after_each_work(world: &mut Simulation, device: &mut InterruptingDevice) -> Vec<bool> {
    let mut looks = || {
        device.complete_and_signal();
        while !device.is_completion_handled() {
            world.step_reactor(0);
        }
        world.advance_clock(Span::from_us(1));
        // The iteration that found it; an idle one; an announcement; the final check.
        world.step_all(4);
        let looks = world.members[0].stage == SimReactorState::Iterating;
        world.run_until_idle();
        looks
    };
    (0..3).map(|_| looks()).collect()
}

#[test]
fn kernel_completed_io_is_not_spun_for_unless_other_work_is() {
    let kernel = |device: &InterruptingDevice| device.poller_builder("file").no_spin();
    let mut world = Simulation::new_adaptive(0, 1);
    let mut file = InterruptingDevice::new();
    let alarm = PollerBuilder::polled_each_period(
        "timed",
        Span::from_secs(3600),
        idle_poller(&new_count()),
    );
    let plan = ThreadBuilder::new("files").add_poller(kernel(&file)).add_poller(alarm);
    let thread = world.directory.spawn(plan).unwrap();
    world.run_until_idle();
    assert_eq!(
        spins_after_each_work(&mut world, &mut file),
        [false; 3],
        "one that is timed looks for nothing"
    );

    let other = InterruptingDevice::new();
    let ssd = other.poller_builder("ssd");
    world.send_closure(&thread, move |context| drop(context.add_poller(ssd)));
    world.run_until_idle();
    assert_eq!(
        spins_after_each_work(&mut world, &mut file),
        [true; 3],
        "an SSD on the same reactor"
    );

    let second = PollerId::of_builder_index(2);
    world.send_closure(&thread, move |context| context.pause_poller(second));
    world.run_until_idle();
    assert_eq!(
        spins_after_each_work(&mut world, &mut file)[1..],
        [false; 2],
        "the SSD is not polled any more"
    );

    world.directory.set_poll_mode(R0, PollMode::Always).unwrap();
    world.step_all(8);
    file.complete_and_signal();
    world.step_all(100);
    assert!(
        file.is_completion_handled() && world.members[0].stage == SimReactorState::Iterating,
        "it always polls"
    );
}

#[test]
fn slow_device_is_not_spun_for_unless_a_fast_one_is_polled_too() {
    let mut world = Simulation::new_adaptive(0, 1);
    let mut slow = InterruptingDevice::new();
    slow.is_slow = true;
    let plan = ThreadBuilder::new("slow").add_poller(slow.poller_builder("slow"));
    let thread = world.directory.spawn(plan).unwrap();
    world.run_until_idle();
    assert_eq!(spins_after_each_work(&mut world, &mut slow)[1..], [false; 2]);

    let fast = InterruptingDevice::new().poller_builder("fast");
    world.send_closure(&thread, move |context| drop(context.add_poller(fast)));
    world.run_until_idle();
    assert_eq!(spins_after_each_work(&mut world, &mut slow), [true; 3]);
}

#[test]
fn device_wakes_its_armed_reactor_and_a_paused_poller_does_not() {
    let mut world = Simulation::new_adaptive(0, 1);
    let device = InterruptingDevice::new();
    let mut theirs = device.clone();
    let plan = ThreadBuilder::new("device").add_poller(device.poller_builder("device"));
    let thread = world.directory.spawn(plan).unwrap();
    assert_eq!(world.run_until_idle(), Instant::NEVER);
    theirs.complete_and_signal();
    world.run_until_idle();
    assert!(device.is_completion_handled());

    world.send_closure(&thread, |context| context.pause_poller(FIRST));
    theirs.complete_and_signal();
    world.step_all(1);
    world.run_until_idle();
    device.event_vectors().unmask(0);
    tenmil_base::Interrupts::raise(&mut device.event_vectors(), 0);
    let iterations = || world.directory.sample_statistics(world.now()).reactors[0].iterations;
    let before = iterations();
    assert_eq!(world.members[0].stage, SimReactorState::Sleeping(Instant::NEVER));
    assert_eq!(iterations(), before);
    world.step_all(10);
    assert_eq!(
        world.members[0].stage,
        SimReactorState::Sleeping(Instant::NEVER),
        "it sleeps through it"
    );
    world.send_closure(&thread, |context| context.resume_poller(FIRST));
    theirs.complete_and_signal();
    world.run_until_idle();
    assert!(device.is_completion_handled());
}

/// An external event, and the check that it was handled.
type WakeEventAndCheck = (
    fn(&mut Simulation, &InterruptingDevice, &ThreadHandle),
    fn(&Simulation, &InterruptingDevice, &ThreadHandle) -> bool,
);

const ANYTHING: [(&str, WakeEventAndCheck); 4] = [
    (
        "a message",
        (
            |world, _, to| world.send_closure(to, |context| context.request_thread_end()),
            |_, _, to| to.has_ended(),
        ),
    ),
    (
        "an order",
        (|world, _, to| world.directory.end_thread(to.id()).unwrap(), |_, _, to| to.has_ended()),
    ),
    (
        "a device",
        (
            |_, device, _| device.clone().complete_and_signal(),
            |_, device, _| device.is_completion_handled(),
        ),
    ),
    (
        "a thread",
        (
            |world, _, _| drop(world.directory.spawn(ThreadBuilder::new("new")).unwrap()),
            |world, _, _| world.event_kinds().len() == 2,
        ),
    ),
];

#[test]
fn event_is_handled_at_every_stage_of_going_to_sleep() {
    type Is = fn(SimReactorState) -> bool;
    let stages: [(&str, Is); 4] = [
        ("iterating", |stage| stage == SimReactorState::Iterating),
        ("wants to sleep", |stage| matches!(stage, SimReactorState::WantsSleep(_))),
        ("has announced its sleep", |stage| matches!(stage, SimReactorState::SleepAnnounced(_))),
        ("sleeping", |stage| matches!(stage, SimReactorState::Sleeping(_))),
    ];
    for (what, (comes, is_seen)) in ANYTHING {
        for (when, is_it) in stages {
            let mut world = Simulation::new_adaptive(0, 1);
            let device = InterruptingDevice::new();
            let plan = ThreadBuilder::new("device").add_poller(device.poller_builder("device"));
            let thread = world.directory.spawn(plan).unwrap();
            world.run_until_idle();
            world.send_closure(&thread, |_| ());
            world.step_all(3);
            while !is_it(world.members[0].stage) {
                world.step_all(1);
                world.advance_clock(Span::from_us(1));
            }
            comes(&mut world, &device, &thread);
            world.run_until_idle();
            assert!(is_seen(&world, &device, &thread), "{what} while {when}");
        }
    }
}

#[test]
fn busy_poller_keeps_its_reactor_awake() {
    let mut world = Simulation::new_adaptive(0, 1);
    let in_flight = new_count();
    let ring = PinnedRingPoller::new(&in_flight, u64::MAX);
    let woken_by = PollerWake::OnlyWhileBusy("has nothing in flight by itself");
    let plan = ThreadBuilder::new("ring")
        .add_poller(PollerBuilder::polled_each_iteration("ring", woken_by, ring));
    in_flight.store(1, RELAXED);
    world.directory.spawn(plan).unwrap();
    for _ in 0..3_000 {
        world.step_all(1);
        world.advance_clock(Span::from_us(1));
        assert!(!matches!(world.members[0].stage, SimReactorState::Sleeping(_)));
    }
    let sleeps =
        |world: &Simulation| world.directory.sample_statistics(world.now()).reactors[0].sleeps;
    assert_eq!(sleeps(&world), 0);
    in_flight.store(0, RELAXED);
    world.run_until_idle();
    assert_eq!(sleeps(&world), 1);
}

/// Reports in `arm` that its deadline has moved closer.
struct EarlierDeadlinePoller {
    wake_at: Instant,
    polls: super::test_pollers::SharedCount,
}

impl Poller for EarlierDeadlinePoller {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        if context.now() < self.wake_at {
            return PollResult::Idle;
        }
        self.wake_at = Instant::NEVER;
        self.polls.fetch_add(1, Ordering::Relaxed);
        PollResult::Busy
    }

    fn arm(&mut self) -> PollResult {
        if count_of(&self.polls) == 0 {
            self.wake_at = Instant { ns: 5_000_000 };
        }
        PollResult::Idle
    }

    fn wake_at(&self) -> Instant {
        self.wake_at
    }
}

#[test]
fn deadline_moved_earlier_in_arm_is_met() {
    let mut world = Simulation::new_adaptive(0, 1);
    let polls = new_count();
    let poller = EarlierDeadlinePoller { wake_at: Instant::NEVER, polls: Arc::clone(&polls) };
    let registration =
        PollerBuilder::polled_each_iteration("impatient", PollerWake::Deadline, poller);
    world.directory.spawn(ThreadBuilder::new("one").add_poller(registration)).unwrap();
    assert_eq!(world.run_until_idle(), Instant { ns: 5_000_000 });
    world.run_for(Span::from_ms(10));
    world.run_until_idle();
    assert_eq!(count_of(&polls), 1);
}

#[test]
fn always_polling_reactor_never_sleeps_and_a_mode_change_wakes_a_sleeping_one() {
    let mut world = Simulation::new_adaptive(0, 2);
    world.run_until_idle();
    world.directory.set_poll_mode(R0, PollMode::Always).unwrap();
    for _ in 0..100 {
        world.step_all(1);
        world.advance_clock(Span::from_ms(1));
    }
    assert_eq!(world.members[0].stage, SimReactorState::Iterating);
    assert_eq!(world.members[1].stage, SimReactorState::Sleeping(Instant::NEVER));
    let sample = world.directory.sample_statistics(world.now());
    let modes: Vec<_> = sample.reactors.iter().map(|reactor| reactor.mode).collect();
    assert_eq!(modes, [PollMode::Always, PollMode::Adaptive]);
    assert_eq!((sample.reactors[0].sleeping, sample.reactors[1].sleeping), (false, true));
    assert_eq!(world.event_kinds(), ["poll-mode-changed"]);
    world.directory.set_poll_mode(R0, PollMode::Adaptive).unwrap();
    world.run_until_idle();
}

#[test]
fn poll_mode_of_all_reactors_changes_or_of_none() {
    let mut world = Simulation::new_always_polling(2);
    let plan = ThreadBuilder::new("deaf").add_poller(poller_without_wake()).on_reactor(R1);
    world.directory.spawn(plan).unwrap();
    world.step_all(2);
    let modes = |world: &Simulation| {
        let sample = world.directory.sample_statistics(world.now());
        sample.reactors.iter().map(|reactor| reactor.mode).collect::<Vec<_>>()
    };
    let refused = world.directory.set_poll_mode_of_all(PollMode::Adaptive).unwrap_err();
    assert!(matches!(refused, ReactorError::NoWakeSource { .. }), "{refused}");
    world.step_all(2);
    assert_eq!(modes(&world), [PollMode::Always; 2], "the first would have obeyed");

    let options = ReactorOptions { inbox: 2, ..ReactorOptions::default() };
    let mut world = Simulation::new(0, 3, &options);
    while world.directory.set_poll_mode(R1, PollMode::Adaptive).is_ok() {}
    let not_told = world.directory.set_poll_mode_of_all(PollMode::Hybrid).unwrap();
    assert_eq!(not_told, [(R1, ReactorError::InboxFull(R1))]);
    world.step_all(2);
    assert_eq!(modes(&world), [PollMode::Hybrid, PollMode::Adaptive, PollMode::Hybrid]);
}

/// Has work two milliseconds after it was requested.
struct DelayedWorkPoller {
    asked: super::test_pollers::SharedCount,
    done: super::test_pollers::SharedCount,
    at: Instant,
}

impl Poller for DelayedWorkPoller {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        if self.asked.swap(0, RELAXED) > 0 {
            self.at = context.now().after(Span::from_ms(2));
            return PollResult::Busy;
        }
        let is_due = context.now() >= self.at;
        if is_due {
            self.at = Instant::NEVER;
            self.done.fetch_add(1, RELAXED);
        }
        PollResult::from_count(usize::from(is_due))
    }

    fn wake_at(&self) -> Instant {
        self.at
    }
}

#[test]
fn clock_advances_for_a_reactor_that_spins_until_a_deadline() {
    // Regardless of the number of polls that share a clock reading.
    for looks in 0..8 {
        let mut world = Simulation::new_adaptive(0, 1);
        let (asked, done) = (new_count(), new_count());
        let later =
            DelayedWorkPoller { asked: asked.clone(), done: done.clone(), at: Instant::NEVER };
        world
            .directory
            .spawn(ThreadBuilder::new("later").add_poller(message_woken_poller("later", later)))
            .unwrap();
        (0..8 + looks).for_each(|_| world.step_reactor(0));
        asked.store(1, RELAXED);
        world.step_reactor(0);
        // As if preempted: the deadline is close when it runs again.
        world.advance_clock(Span::from_us(1_995));
        let mut now = world.now();
        for _ in 0..100 {
            let reactor = &mut world.members[0].reactor;
            assert_eq!(reactor.iterate(now), NextStep::Again, "too near to sleep for");
            let wants_time = reactor.needs_clock();
            world.advance_clock(Span::from_us(1));
            now = if wants_time { world.now() } else { now };
            if count_of(&done) > 0 {
                break;
            }
        }
        assert_eq!(count_of(&done), 1, "after {looks} looks");
    }
}

/// Its descriptor is always readable, but it rarely has work.
struct AlwaysReadablePoller {
    work: super::test_pollers::SharedCount,
}

impl Poller for AlwaysReadablePoller {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        let found = self.work.swap(0, RELAXED);
        PollResult::from_count(usize::try_from(found).unwrap())
    }
}

#[test]
fn permanently_readable_descriptor_is_reported_once_and_allows_sleep() {
    let mut world = Simulation::new_adaptive(0, 1);
    let vectors = tenmil_linux::EventFdVectors::new(1).unwrap();
    vectors.unmask(0);
    tenmil_base::Interrupts::raise(&mut vectors.clone(), 0);
    let descriptor = vectors.descriptor(0).unwrap().try_clone_to_owned().unwrap();
    let (work, polls) = (new_count(), new_count());
    let stuck = AlwaysReadablePoller { work: Arc::clone(&work) };
    let plan = ThreadBuilder::new("two")
        .add_poller(PollerBuilder::polled_each_iteration(
            "stuck",
            PollerWake::Descriptor(descriptor),
            stuck,
        ))
        .add_poller(message_woken_poller("beside", idle_poller(&polls)));
    world.directory.spawn(plan).unwrap();
    let sleeps =
        |world: &Simulation| world.directory.sample_statistics(world.now()).reactors[0].sleeps;
    let mut live = |span: Span| {
        let (end, before) = (world.now().after(span), sleeps(&world));
        while world.now() < end {
            world.step_reactor(0);
            match world.members[0].stage {
                // As the kernel does: it wakes at once if a descriptor is ready, or at the
                // deadline.
                SimReactorState::Sleeping(deadline) => {
                    world.step_reactor(0);
                    if let SimReactorState::Sleeping(_) = world.members[0].stage {
                        world.now_ns.store(deadline.min(end).ns, RELAXED);
                    }
                }
                _ => world.advance_clock(Span { ns: 500 }),
            }
        }
        (
            sleeps(&world) - before,
            world.event_kinds(),
            world.directory.sample_statistics(world.now()),
        )
    };
    let (spent, kinds, sample) = live(Span::from_secs(1));
    assert_eq!(kinds, ["thread-started", "spurious-wakeups"]);
    // 32, then one whenever it is level-triggered again, one for its readiness at that moment, and
    // a sleep without it in between.
    assert!(spent < 32 + 3 * 120, "{spent} sleeps in a second");
    let pollers = &sample.threads[0].pollers;
    assert!((32..200).contains(&pollers[0].spurious_wakeups), "{pollers:?}");
    assert_eq!(pollers[1].spurious_wakeups, 0);
    assert!(count_of(&polls) < 100_000, "{} polls in a second", count_of(&polls));

    // A real signal is seen within the bound.
    let slack = Span::from_ms(1);
    for _ in 0..20 {
        work.store(1, RELAXED);
        live(Span { ns: crate::light_thread::EDGE_MAX.ns + slack.ns });
        assert_eq!(
            count_of(&work),
            0,
            "it is seen {} later at most",
            crate::light_thread::EDGE_MAX
        );
    }
    let (_, kinds, _) = live(Span::from_ms(1));
    assert!(kinds.len() > 5, "and the descriptor is watched again, and reported again: {kinds:?}");
}

/// Shares a device with other threads, to which most of its signals belong.
struct SharedDevicePoller {
    vectors: tenmil_linux::EventFdVectors,
    /// Its own event, and the time at which it was seen.
    mine: super::test_pollers::SharedCount,
    seen: super::test_pollers::SharedCount,
}

impl Poller for SharedDevicePoller {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        let found = self.mine.swap(0, RELAXED);
        if found > 0 {
            self.seen.store(context.now().ns, RELAXED);
        }
        PollResult::from_count(usize::try_from(found).unwrap())
    }

    fn arm(&mut self) -> PollResult {
        self.vectors.unmask(0);
        PollResult::from_count(usize::try_from(self.mine.load(RELAXED)).unwrap())
    }
}

#[test]
fn shared_device_descriptor_is_not_reported_as_stuck() {
    let mut world = Simulation::new_adaptive(0, 1);
    let mut vectors = tenmil_linux::EventFdVectors::new(1).unwrap();
    let descriptor = vectors.descriptor(0).unwrap().try_clone_to_owned().unwrap();
    let (mine, seen) = (new_count(), new_count());
    let among = SharedDevicePoller {
        vectors: vectors.clone(),
        mine: Arc::clone(&mine),
        seen: Arc::clone(&seen),
    };
    let among =
        PollerBuilder::polled_each_iteration("among", PollerWake::Descriptor(descriptor), among);
    world.directory.spawn(ThreadBuilder::new("one").add_poller(among)).unwrap();
    let fall_asleep = |world: &mut Simulation| {
        // For the duration of an iteration, or until it wakes by itself.
        for _ in 0..5_000 {
            world.step_reactor(0);
            if let SimReactorState::Sleeping(_) = world.members[0].stage {
                return;
            }
            world.advance_clock(Span::from_us(1));
        }
        panic!("it never sleeps");
    };
    for round in 0..100 {
        for _ in 0..70 {
            fall_asleep(&mut world);
            tenmil_base::Interrupts::raise(&mut vectors, 0);
            world.step_reactor(0);
        }
        fall_asleep(&mut world);
        let now = world.now();
        mine.store(1, RELAXED);
        tenmil_base::Interrupts::raise(&mut vectors, 0);
        for _ in 0..4 {
            world.step_reactor(0);
        }
        assert_eq!(count_of(&seen), now.ns, "round {round}");
    }
    assert_eq!(world.event_kinds(), ["thread-started"], "no warning is emitted");
}

/// Sets a flag when it is flushed.
#[derive(Default)]
struct FlushFlagPoller {
    shown: super::test_pollers::SharedCount,
    asks: bool,
}

impl Poller for FlushFlagPoller {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        if std::mem::take(&mut self.asks) {
            context.request_poller_flush();
        }
        PollResult::Idle
    }

    fn flush(&mut self) {
        self.shown.fetch_add(1, RELAXED);
    }
}

#[test]
fn ready_pollers_are_flushed_at_the_start_and_on_request() {
    let mut world = Simulation::new_adaptive(0, 2);
    let flushes = |asks| {
        let shown = new_count();
        (Arc::clone(&shown), message_woken_poller("shows", FlushFlagPoller { shown, asks }))
    };
    let ((first, one), (later, two), (asking, three)) =
        (flushes(false), flushes(false), flushes(true));
    let thread =
        world.directory.spawn(ThreadBuilder::new("shows").add_poller(one).on_reactor(R0)).unwrap();
    world.run_until_idle();
    assert_eq!(count_of(&first), 1, "its first words");
    world.send_closure(&thread, move |context| drop(context.add_poller(two)));
    world.run_until_idle();
    assert!(count_of(&later) >= 1, "of one that came later too");
    world.send_closure(&thread, move |context| drop(context.add_poller(three)));
    world.run_until_idle();
    let before = count_of(&first);
    assert!(count_of(&asking) >= 2, "and what it asked for");
    world.directory.migrate_thread(thread.id(), R1).unwrap();
    world.run_until_idle();
    assert_eq!((thread.reactor(), count_of(&first)), (R1, before + 1), "and after a move");
    world.run_for(Span::from_ms(50));
    assert_eq!(count_of(&first), before + 1, "and not without a reason");
}
