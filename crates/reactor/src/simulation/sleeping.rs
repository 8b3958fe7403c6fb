//! Sleeping: conditions, duration, and wake-up.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tenmil_base::{Instant, Span, WakeSource};
use tenmil_linux::{EventLoop, NextStep};

use super::test_pollers::{Counter, Device, FIRST, RELAXED, Ring, active, count, idle, tally};
use super::{R0, R1, SimReactorState, Simulation};
use crate::{
    Context, PollMode, PollResult, Poller, PollerBuilder, PollerId, PollerWake, ReactorError,
    ReactorOptions, SPIN_MAX, SPIN_MIN, ThreadBuilder, ThreadHandle, WakeKind,
};

fn sleepless() -> PollerBuilder {
    PollerBuilder::active("deaf", PollerWake::of(WakeSource::None).unwrap(), idle(&tally()))
}

#[test]
fn a_poller_that_nothing_wakes_is_refused_where_reactors_sleep() {
    let mut world = Simulation::adaptive(0, 1);
    let refused =
        world.directory.spawn(ThreadBuilder::new("deaf").poller(sleepless())).unwrap_err();
    let why = ReactorError::NoWakeSource { poller: "deaf".into(), mode: PollMode::Adaptive };
    assert_eq!(refused.reason, why);
    assert_eq!(refused.builder.pollers.len(), 1, "and is given back");
    assert!(refused.to_string().contains("'deaf'"), "{refused}");

    let thread = world.directory.spawn(ThreadBuilder::new("hearing")).unwrap();
    let answers = Arc::new(std::sync::Mutex::new(None));
    let theirs = Arc::clone(&answers);
    world.call(&thread, move |context| *theirs.lock().unwrap() = context.add(sleepless()).err());
    world.run_until_idle();
    let refused = answers.lock().unwrap().take().unwrap();
    assert_eq!((refused.reason, refused.poller.name()), (why, "deaf"));
}

#[test]
fn a_poller_that_does_not_say_when_it_is_to_be_woken_is_refused_in_every_mode() {
    let silent = [
        (PollerWake::of(WakeSource::Deadline).unwrap().kind(), "wake_at"),
        (WakeKind::OnlyWhileBusy("waits for itself"), "is_busy"),
    ];
    let woken_by = |kind| match kind {
        WakeKind::OnlyWhileBusy(why) => PollerWake::OnlyWhileBusy(why),
        _ => PollerWake::Deadline,
    };
    for mut world in [Simulation::always(1), Simulation::adaptive(0, 1)] {
        for (kind, unsaid) in silent {
            let make = || PollerBuilder::active("silent", woken_by(kind), idle(&tally()));
            let why =
                ReactorError::MissingWakeCall { poller: "silent".into(), woken_by: kind, unsaid };
            let refused = world.directory.spawn(ThreadBuilder::new("silent").poller(make()));
            assert_eq!(refused.unwrap_err().reason, why);
            let thread = world.directory.spawn(ThreadBuilder::new("hearing")).unwrap();
            let answers = Arc::new(std::sync::Mutex::new(None));
            let theirs = Arc::clone(&answers);
            let add = make();
            world.call(&thread, move |context| *theirs.lock().unwrap() = context.add(add).err());
            world.iterate_all(4);
            assert_eq!(answers.lock().unwrap().take().unwrap().reason, why);
            assert!(why.to_string().contains(unsaid), "{why}");
        }
        // A timed poller is woken by its period, another one by its declared deadline.
        let timed = PollerBuilder::timed("timed", Span::from_ms(1), idle(&tally()));
        let ring = Ring::new(&tally(), 1);
        let busy = PollerBuilder::active("busy", PollerWake::OnlyWhileBusy("waits"), ring);
        world.directory.spawn(ThreadBuilder::new("said").poller(timed).poller(busy)).unwrap();
        world.iterate_all(4);
    }
}

#[test]
fn who_says_nothing_of_time_does_not_hold_back_the_sleep_of_others() {
    let mut world = Simulation::adaptive(0, 1);
    let thread =
        world.directory.spawn(ThreadBuilder::new("idle").poller(active("idle", idle(&tally()))));
    thread.unwrap();
    world.run_until_idle();
    assert_eq!(world.members[0].stage, SimReactorState::Sleeping(Instant::NEVER));
}

#[test]
fn where_nobody_sleeps_it_may_live_and_then_nobody_may_go_to_sleep() {
    let mut world = Simulation::always(2);
    let thread =
        world.directory.spawn(ThreadBuilder::new("deaf").poller(sleepless()).on(R0)).unwrap();
    world.iterate_all(2);
    let refused = world.directory.set_poll(R0, PollMode::Adaptive).unwrap_err();
    assert!(matches!(refused, ReactorError::NoWakeSource { .. }), "{refused}");
    // A reactor that would sleep accepts it, and stays awake.
    world.directory.set_poll(R1, PollMode::Adaptive).unwrap();
    world.directory.move_thread(thread.id(), R1).unwrap();
    for _ in 0..1_000 {
        world.iterate_all(1);
        world.pass_time(Span::from_us(10));
        assert_eq!(world.members[1].stage, SimReactorState::Turning);
    }
    assert_eq!(thread.reactor(), R1);
}

/// Spin time after the last work, if work came with this gap before.
fn spell_after(gap: Span) -> Span {
    let mut world = Simulation::adaptive(0, 1);
    let device = Device::new();
    let mut theirs = device.clone();
    world
        .directory
        .spawn(ThreadBuilder::new("device").poller(device.registration("device")))
        .unwrap();
    world.run_until_idle();
    for _ in 0..200 {
        let next = world.now().after(gap);
        theirs.complete();
        while world.now() < next {
            world.iterate_all(1);
            world.pass_time(Span { ns: gap.ns / 50 });
        }
    }
    theirs.complete();
    while !device.is_seen() {
        world.step(0);
    }
    let last = world.now();
    while world.members[0].stage == SimReactorState::Turning {
        world.iterate_all(1);
        world.pass_time(Span::from_us(1));
    }
    world.now().since(last)
}

#[test]
fn a_spell_follows_the_gaps_between_work_within_its_bounds() {
    let slack = Span::from_us(10).ns;
    let quick = spell_after(Span::from_us(5));
    assert!(quick >= SPIN_MIN && quick.ns <= SPIN_MIN.ns + slack, "{quick}");
    let steady = spell_after(Span::from_us(200));
    assert!(steady.ns > 300_000 && steady.ns < 500_000, "{steady}");
    let slow = spell_after(Span::from_us(900));
    assert!(slow <= Span { ns: SPIN_MAX.ns + slack } && slow.ns > 900_000, "{slow}");
    let rare = spell_after(Span::from_ms(20));
    assert!(rare.ns <= slack, "looking has been in vain two hundred times: {rare}");
}

/// Whether a reactor with these pollers keeps spinning after each of several pieces of work found
/// by the last of them.
fn looks_on(world: &mut Simulation, device: &mut Device) -> Vec<bool> {
    let mut looks = || {
        device.complete();
        while !device.is_seen() {
            world.step(0);
        }
        world.pass_time(Span::from_us(1));
        // The iteration that found it; an idle one; an announcement; the final check.
        world.iterate_all(4);
        let looks = world.members[0].stage == SimReactorState::Turning;
        world.run_until_idle();
        looks
    };
    (0..3).map(|_| looks()).collect()
}

#[test]
fn what_the_kernel_does_is_slept_for_at_once_unless_there_is_other_work_to_look_for() {
    let kernel = |device: &Device| device.registration("file").no_spin();
    let mut world = Simulation::adaptive(0, 1);
    let mut file = Device::new();
    let alarm = PollerBuilder::timed("timed", Span::from_secs(3600), idle(&tally()));
    let plan = ThreadBuilder::new("files").poller(kernel(&file)).poller(alarm);
    let thread = world.directory.spawn(plan).unwrap();
    world.run_until_idle();
    assert_eq!(looks_on(&mut world, &mut file), [false; 3], "one that is timed looks for nothing");

    let other = Device::new();
    let ssd = other.registration("ssd");
    world.call(&thread, move |context| drop(context.add(ssd)));
    world.run_until_idle();
    assert_eq!(looks_on(&mut world, &mut file), [true; 3], "an SSD on the same reactor");

    let second = PollerId::planned(2);
    world.call(&thread, move |context| context.pause(second));
    world.run_until_idle();
    assert_eq!(looks_on(&mut world, &mut file)[1..], [false; 2], "the SSD is not polled any more");

    world.directory.set_poll(R0, PollMode::Always).unwrap();
    world.iterate_all(8);
    file.complete();
    world.iterate_all(100);
    assert!(
        file.is_seen() && world.members[0].stage == SimReactorState::Turning,
        "it always polls"
    );
}

#[test]
fn a_device_wakes_whom_it_was_asked_to_and_a_paused_one_does_not() {
    let mut world = Simulation::adaptive(0, 1);
    let device = Device::new();
    let mut theirs = device.clone();
    let plan = ThreadBuilder::new("device").poller(device.registration("device"));
    let thread = world.directory.spawn(plan).unwrap();
    assert_eq!(world.run_until_idle(), Instant::NEVER);
    theirs.complete();
    world.run_until_idle();
    assert!(device.is_seen());

    world.call(&thread, |context| context.pause(FIRST));
    theirs.complete();
    world.iterate_all(1);
    world.run_until_idle();
    device.vectors().unmask(0);
    tenmil_base::Interrupts::raise(&mut device.vectors(), 0);
    let iterations = || world.directory.sample(world.now()).reactors[0].iterations;
    let before = iterations();
    assert_eq!(world.members[0].stage, SimReactorState::Sleeping(Instant::NEVER));
    assert_eq!(iterations(), before);
    world.iterate_all(10);
    assert_eq!(
        world.members[0].stage,
        SimReactorState::Sleeping(Instant::NEVER),
        "it sleeps through it"
    );
    world.call(&thread, |context| context.resume(FIRST));
    theirs.complete();
    world.run_until_idle();
    assert!(device.is_seen());
}

/// An external event, and the check that it was handled.
type Comes =
    (fn(&mut Simulation, &Device, &ThreadHandle), fn(&Simulation, &Device, &ThreadHandle) -> bool);

const ANYTHING: [(&str, Comes); 4] = [
    (
        "a message",
        (|world, _, to| world.call(to, |context| context.end()), |_, _, to| to.is_gone()),
    ),
    (
        "an order",
        (|world, _, to| world.directory.end_thread(to.id()).unwrap(), |_, _, to| to.is_gone()),
    ),
    ("a device", (|_, device, _| device.clone().complete(), |_, device, _| device.is_seen())),
    (
        "a thread",
        (
            |world, _, _| drop(world.directory.spawn(ThreadBuilder::new("new")).unwrap()),
            |world, _, _| world.kinds().len() == 2,
        ),
    ),
];

#[test]
fn whatever_comes_is_seen_at_whatever_stage_of_falling_asleep_it_comes() {
    type Is = fn(SimReactorState) -> bool;
    let stages: [(&str, Is); 4] = [
        ("turning", |stage| stage == SimReactorState::Turning),
        ("tired", |stage| matches!(stage, SimReactorState::Tired(_))),
        ("announced", |stage| matches!(stage, SimReactorState::Announced(_))),
        ("sleeping", |stage| matches!(stage, SimReactorState::Sleeping(_))),
    ];
    for (what, (comes, is_seen)) in ANYTHING {
        for (when, is_it) in stages {
            let mut world = Simulation::adaptive(0, 1);
            let device = Device::new();
            let plan = ThreadBuilder::new("device").poller(device.registration("device"));
            let thread = world.directory.spawn(plan).unwrap();
            world.run_until_idle();
            world.call(&thread, |_| ());
            world.iterate_all(3);
            while !is_it(world.members[0].stage) {
                world.iterate_all(1);
                world.pass_time(Span::from_us(1));
            }
            comes(&mut world, &device, &thread);
            world.run_until_idle();
            assert!(is_seen(&world, &device, &thread), "{what} while {when}");
        }
    }
}

#[test]
fn one_that_is_busy_keeps_its_reactor_awake_until_it_is_not() {
    let mut world = Simulation::adaptive(0, 1);
    let in_flight = tally();
    let ring = Ring::new(&in_flight, u64::MAX);
    let woken_by = PollerWake::OnlyWhileBusy("has nothing in flight by itself");
    let plan = ThreadBuilder::new("ring").poller(PollerBuilder::active("ring", woken_by, ring));
    in_flight.store(1, RELAXED);
    world.directory.spawn(plan).unwrap();
    for _ in 0..3_000 {
        world.iterate_all(1);
        world.pass_time(Span::from_us(1));
        assert!(!matches!(world.members[0].stage, SimReactorState::Sleeping(_)));
    }
    let sleeps = |world: &Simulation| world.directory.sample(world.now()).reactors[0].sleeps;
    assert_eq!(sleeps(&world), 0);
    in_flight.store(0, RELAXED);
    world.run_until_idle();
    assert_eq!(sleeps(&world), 1);
}

/// Reports in `arm` that its deadline has moved closer.
struct Impatient {
    wake_at: Instant,
    polls: super::test_pollers::Tally,
}

impl Poller for Impatient {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        if context.now() < self.wake_at {
            return PollResult::Idle;
        }
        self.wake_at = Instant::NEVER;
        self.polls.fetch_add(1, Ordering::Relaxed);
        PollResult::Busy
    }

    fn arm(&mut self) -> PollResult {
        if count(&self.polls) == 0 {
            self.wake_at = Instant { ns: 5_000_000 };
        }
        PollResult::Idle
    }

    fn wake_at(&self) -> Instant {
        self.wake_at
    }
}

#[test]
fn a_deadline_that_comes_nearer_at_the_last_look_is_kept() {
    let mut world = Simulation::adaptive(0, 1);
    let polls = tally();
    let poller = Impatient { wake_at: Instant::NEVER, polls: Arc::clone(&polls) };
    let registration = PollerBuilder::active("impatient", PollerWake::Deadline, poller);
    world.directory.spawn(ThreadBuilder::new("one").poller(registration)).unwrap();
    assert_eq!(world.run_until_idle(), Instant { ns: 5_000_000 });
    world.live(Span::from_ms(10));
    world.run_until_idle();
    assert_eq!(count(&polls), 1);
}

#[test]
fn one_that_always_polls_never_sleeps_and_a_change_of_mode_wakes_one_that_does() {
    let mut world = Simulation::adaptive(0, 2);
    world.run_until_idle();
    world.directory.set_poll(R0, PollMode::Always).unwrap();
    for _ in 0..100 {
        world.iterate_all(1);
        world.pass_time(Span::from_ms(1));
    }
    assert_eq!(world.members[0].stage, SimReactorState::Turning);
    assert_eq!(world.members[1].stage, SimReactorState::Sleeping(Instant::NEVER));
    let sample = world.directory.sample(world.now());
    let modes: Vec<_> = sample.reactors.iter().map(|reactor| reactor.mode).collect();
    assert_eq!(modes, [PollMode::Always, PollMode::Adaptive]);
    assert_eq!((sample.reactors[0].sleeping, sample.reactors[1].sleeping), (false, true));
    assert_eq!(world.kinds(), ["poll-mode-changed"]);
    world.directory.set_poll(R0, PollMode::Adaptive).unwrap();
    world.run_until_idle();
}

#[test]
fn all_are_told_how_to_poll_or_none_where_that_can_be_known() {
    let mut world = Simulation::always(2);
    let plan = ThreadBuilder::new("deaf").poller(sleepless()).on(R1);
    world.directory.spawn(plan).unwrap();
    world.iterate_all(2);
    let modes = |world: &Simulation| {
        let sample = world.directory.sample(world.now());
        sample.reactors.iter().map(|reactor| reactor.mode).collect::<Vec<_>>()
    };
    let refused = world.directory.set_poll_of_all(PollMode::Adaptive).unwrap_err();
    assert!(matches!(refused, ReactorError::NoWakeSource { .. }), "{refused}");
    world.iterate_all(2);
    assert_eq!(modes(&world), [PollMode::Always; 2], "the first would have obeyed");

    let options = ReactorOptions { inbox: 2, ..ReactorOptions::default() };
    let mut world = Simulation::new(0, 3, &options);
    while world.directory.set_poll(R1, PollMode::Adaptive).is_ok() {}
    let not_told = world.directory.set_poll_of_all(PollMode::Hybrid).unwrap();
    assert_eq!(not_told, [(R1, ReactorError::InboxFull(R1))]);
    world.iterate_all(2);
    assert_eq!(modes(&world), [PollMode::Hybrid, PollMode::Adaptive, PollMode::Hybrid]);
}

/// Has I/O in flight that takes 80 us.
struct Slow(Counter);

impl Poller for Slow {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        self.0.poll(context)
    }

    fn message(&mut self, _: [u64; 2], _: &mut Context<'_>) {}

    fn expected_latency(&self) -> Option<Span> {
        Some(Span::from_us(80))
    }
}

/// Runs until the reactor pauses, and returns the end of the pause.
fn rests(world: &mut Simulation) -> Instant {
    for _ in 0..10 {
        if let SimReactorState::Resting(until) = world.members[0].stage {
            return until;
        }
        world.step(0);
    }
    panic!("{:?}", world.stages())
}

fn hybrid(pollers: impl IntoIterator<Item = PollerBuilder>) -> (Simulation, ThreadHandle) {
    let options = ReactorOptions { poll: PollMode::Hybrid, ..ReactorOptions::default() };
    let mut world = Simulation::new(0, 1, &options);
    let plan = pollers.into_iter().fold(ThreadBuilder::new("slow"), ThreadBuilder::poller);
    let thread = world.directory.spawn(plan).unwrap();
    world.live(Span::from_ms(5));
    (world, thread)
}

#[test]
fn a_message_ends_a_rest_at_whatever_stage_of_it_it_comes() {
    type Is = fn(SimReactorState) -> bool;
    let stages: [(&str, Is); 4] = [
        ("turning", |stage| stage == SimReactorState::Turning),
        ("weary", |stage| matches!(stage, SimReactorState::Weary(_))),
        ("leaning", |stage| matches!(stage, SimReactorState::Leaning(_))),
        ("resting", |stage| matches!(stage, SimReactorState::Resting(_))),
    ];
    type Comes = fn(&mut Simulation, &ThreadHandle, super::test_pollers::Tally);
    let comes: [(&str, Comes); 2] = [
        ("message", |world, thread, seen| {
            world.call(thread, move |_| _ = seen.fetch_add(1, RELAXED));
        }),
        ("order", |world, _, seen| {
            let note = move |_: &mut Context<'_>| _ = seen.fetch_add(1, RELAXED);
            world.directory.spawn(ThreadBuilder::new("new").first(note)).unwrap();
        }),
    ];
    for (when, is_it) in stages {
        for (what, comes) in comes {
            let (mut world, thread) = hybrid([active("slow", Slow(idle(&tally())))]);
            world.call(&thread, |_| ());
            // The reactor wakes, works, and pauses again.
            while world.members[0].stage != SimReactorState::Turning {
                world.step(0);
            }
            world.step(0);
            while !is_it(world.members[0].stage) {
                world.step(0);
            }
            let seen = tally();
            comes(&mut world, &thread, Arc::clone(&seen));
            // No time passes.
            (0..8).for_each(|_| world.step(0));
            assert_eq!(count(&seen), 1, "a {what} while {when}: {:?}", world.stages());
        }
    }
}

#[test]
fn no_deadline_is_rested_over() {
    let due = Span::from_us(30);
    let ticks = tally();
    let (mut world, thread) = hybrid([
        active("slow", Slow(idle(&tally()))),
        PollerBuilder::timed("tick", Span::from_ms(10), idle(&ticks)),
    ]);
    world.call(&thread, move |context| context.set_period(PollerId::planned(1), due));
    while world.members[0].stage != SimReactorState::Turning {
        world.step(0);
    }
    let now = world.now();
    let until = rests(&mut world);
    assert_eq!(until, now.after(due), "and not 60 us");
    let before = count(&ticks);
    world.pass_time(due);
    (0..2).for_each(|_| world.step(0));
    assert_eq!(count(&ticks), before + 1);
}

/// Has work two milliseconds after it was requested.
struct Later {
    asked: super::test_pollers::Tally,
    done: super::test_pollers::Tally,
    at: Instant,
}

impl Poller for Later {
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
fn time_does_not_stand_still_for_a_reactor_that_awaits_a_deadline_awake() {
    // Regardless of the number of polls that share a clock reading.
    for looks in 0..8 {
        let mut world = Simulation::adaptive(0, 1);
        let (asked, done) = (tally(), tally());
        let later = Later { asked: asked.clone(), done: done.clone(), at: Instant::NEVER };
        world.directory.spawn(ThreadBuilder::new("later").poller(active("later", later))).unwrap();
        (0..8 + looks).for_each(|_| world.step(0));
        asked.store(1, RELAXED);
        world.step(0);
        // As if preempted: the deadline is close when it runs again.
        world.pass_time(Span::from_us(1_995));
        let mut now = world.now();
        for _ in 0..100 {
            let reactor = &mut world.members[0].reactor;
            assert_eq!(reactor.iterate(now), NextStep::Again, "too near to sleep for");
            let wants_time = reactor.needs_clock();
            world.pass_time(Span::from_us(1));
            now = if wants_time { world.now() } else { now };
            if count(&done) > 0 {
                break;
            }
        }
        assert_eq!(count(&done), 1, "after {looks} looks");
    }
}

/// Its descriptor is always readable, but it rarely has work.
struct Stuck {
    work: super::test_pollers::Tally,
}

impl Poller for Stuck {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        let found = self.work.swap(0, RELAXED);
        PollResult::from_count(usize::try_from(found).unwrap())
    }
}

#[test]
fn a_descriptor_that_stays_readable_is_told_once_and_does_not_keep_its_reactor_awake() {
    let mut world = Simulation::adaptive(0, 1);
    let vectors = tenmil_linux::EventVectors::new(1).unwrap();
    vectors.unmask(0);
    tenmil_base::Interrupts::raise(&mut vectors.clone(), 0);
    let descriptor = vectors.descriptor(0).unwrap().try_clone_to_owned().unwrap();
    let (work, polls) = (tally(), tally());
    let stuck = Stuck { work: Arc::clone(&work) };
    let plan = ThreadBuilder::new("two")
        .poller(PollerBuilder::active("stuck", PollerWake::Descriptor(descriptor), stuck))
        .poller(active("beside", idle(&polls)));
    world.directory.spawn(plan).unwrap();
    let sleeps = |world: &Simulation| world.directory.sample(world.now()).reactors[0].sleeps;
    let mut live = |span: Span| {
        let (end, before) = (world.now().after(span), sleeps(&world));
        while world.now() < end {
            world.step(0);
            match world.members[0].stage {
                // As the kernel does: it wakes at once if a descriptor is ready, or at the
                // deadline.
                SimReactorState::Sleeping(deadline) => {
                    world.step(0);
                    if let SimReactorState::Sleeping(_) = world.members[0].stage {
                        world.now_ns.store(deadline.min(end).ns, RELAXED);
                    }
                }
                _ => world.pass_time(Span { ns: 500 }),
            }
        }
        (sleeps(&world) - before, world.kinds(), world.directory.sample(world.now()))
    };
    let (spent, kinds, sample) = live(Span::from_secs(1));
    assert_eq!(kinds, ["thread-started", "spurious-wakeups"]);
    // 32, then one whenever it is level-triggered again, one for its readiness at that moment, and
    // a sleep without it in between.
    assert!(spent < 32 + 3 * 120, "{spent} sleeps in a second");
    let pollers = &sample.threads[0].pollers;
    assert!((32..200).contains(&pollers[0].spurious_wakeups), "{pollers:?}");
    assert_eq!(pollers[1].spurious_wakeups, 0);
    assert!(count(&polls) < 100_000, "{} polls in a second", count(&polls));

    // A real signal is seen within the bound.
    let slack = Span::from_ms(1);
    for _ in 0..20 {
        work.store(1, RELAXED);
        live(Span { ns: crate::thread::EDGE_MAX.ns + slack.ns });
        assert_eq!(count(&work), 0, "it is seen {} later at most", crate::thread::EDGE_MAX);
    }
    let (_, kinds, _) = live(Span::from_ms(1));
    assert!(kinds.len() > 5, "and the descriptor is believed again, and told again: {kinds:?}");
}

/// Shares a device with other threads, to which most of its signals belong.
struct Among {
    vectors: tenmil_linux::EventVectors,
    /// Its own event, and the time at which it was seen.
    mine: super::test_pollers::Tally,
    seen: super::test_pollers::Tally,
}

impl Poller for Among {
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
fn a_descriptor_that_signals_for_others_is_not_stuck_and_never_heard_late() {
    let mut world = Simulation::adaptive(0, 1);
    let mut vectors = tenmil_linux::EventVectors::new(1).unwrap();
    let descriptor = vectors.descriptor(0).unwrap().try_clone_to_owned().unwrap();
    let (mine, seen) = (tally(), tally());
    let among =
        Among { vectors: vectors.clone(), mine: Arc::clone(&mine), seen: Arc::clone(&seen) };
    let among = PollerBuilder::active("among", PollerWake::Descriptor(descriptor), among);
    world.directory.spawn(ThreadBuilder::new("one").poller(among)).unwrap();
    let fall_asleep = |world: &mut Simulation| {
        // For the duration of an iteration, or until it wakes by itself.
        for _ in 0..5_000 {
            world.step(0);
            if let SimReactorState::Sleeping(_) = world.members[0].stage {
                return;
            }
            world.pass_time(Span::from_us(1));
        }
        panic!("it never sleeps");
    };
    for round in 0..100 {
        for _ in 0..70 {
            fall_asleep(&mut world);
            tenmil_base::Interrupts::raise(&mut vectors, 0);
            world.step(0);
        }
        fall_asleep(&mut world);
        let now = world.now();
        mine.store(1, RELAXED);
        tenmil_base::Interrupts::raise(&mut vectors, 0);
        for _ in 0..4 {
            world.step(0);
        }
        assert_eq!(count(&seen), now.ns, "round {round}");
    }
    assert_eq!(world.kinds(), ["thread-started"], "nobody is accused");
}

/// Sets a flag when it is flushed.
#[derive(Default)]
struct Shows {
    shown: super::test_pollers::Tally,
    asks: bool,
}

impl Poller for Shows {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        if std::mem::take(&mut self.asks) {
            context.flush();
        }
        PollResult::Idle
    }

    fn flush(&mut self) {
        self.shown.fetch_add(1, RELAXED);
    }
}

#[test]
fn what_is_ready_at_the_beginning_is_made_visible_and_so_is_what_somebody_asks_for() {
    let mut world = Simulation::adaptive(0, 2);
    let flushes = |asks| {
        let shown = tally();
        (Arc::clone(&shown), active("shows", Shows { shown, asks }))
    };
    let ((first, one), (later, two), (asking, three)) =
        (flushes(false), flushes(false), flushes(true));
    let thread = world.directory.spawn(ThreadBuilder::new("shows").poller(one).on(R0)).unwrap();
    world.run_until_idle();
    assert_eq!(count(&first), 1, "its first words");
    world.call(&thread, move |context| drop(context.add(two)));
    world.run_until_idle();
    assert!(count(&later) >= 1, "of one that came later too");
    world.call(&thread, move |context| drop(context.add(three)));
    world.run_until_idle();
    let before = count(&first);
    assert!(count(&asking) >= 2, "and what it asked for");
    world.directory.move_thread(thread.id(), R1).unwrap();
    world.run_until_idle();
    assert_eq!((thread.reactor(), count(&first)), (R1, before + 1), "and after a move");
    world.live(Span::from_ms(50));
    assert_eq!(count(&first), before + 1, "and not without a reason");
}

#[test]
fn in_hybrid_mode_three_quarters_of_the_latency_are_rested() {
    let options = ReactorOptions { poll: PollMode::Hybrid, ..ReactorOptions::default() };
    let mut world = Simulation::new(0, 1, &options);
    let polls = tally();
    let slow = Slow(idle(&polls));
    let thread =
        world.directory.spawn(ThreadBuilder::new("slow").poller(active("slow", slow))).unwrap();
    world.iterate_all(1);
    world.live(Span::from_ms(1));
    let message = crate::Message::Data { poller: FIRST, words: [0; 2] };
    thread.send(message).unwrap();
    while !matches!(world.members[0].stage, SimReactorState::Turning) {
        world.step(0);
    }
    let now = world.now();
    let until = rests(&mut world);
    assert_eq!(until.since(now), Span::from_us(60));
    let before = count(&polls);
    world.iterate_all(10);
    assert_eq!(count(&polls), before, "a rest is a rest");
    world.pass_time(Span::from_us(60));
    world.iterate_all(40);
    assert!(count(&polls) > before + 30, "then it looks, and rests no second time");
}
