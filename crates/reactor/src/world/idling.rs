//! Who may sleep, when, and what ends it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use base::{Instant, Span, WakeSource};
use host::{Turn, Wait};

use super::crew::{Counter, Device, FIRST, RELAXED, Ring, active, count, idle, tally};
use super::{R0, R1, Stage, World};
use crate::{
    Context, Found, Handle, PollMode, Poller, PollerId, ReactorOptions, Refused, Registration,
    SPELL_MAX, SPELL_MIN, ThreadPlan, WakeKind, WokenBy,
};

fn sleepless() -> Registration {
    Registration::active("deaf", WokenBy::of(WakeSource::Nothing).unwrap(), idle(&tally()))
}

#[test]
fn a_poller_that_nothing_wakes_is_refused_where_reactors_sleep() {
    let mut world = World::adaptive(0, 1);
    let refused = world.directory.spawn(ThreadPlan::new("deaf").poller(sleepless())).unwrap_err();
    let why = Refused::NoWakeSource { poller: "deaf".into(), mode: PollMode::Adaptive };
    assert_eq!(refused.why, why);
    assert_eq!(refused.plan.pollers.len(), 1, "and is given back");
    assert!(refused.to_string().contains("'deaf'"), "{refused}");

    let thread = world.directory.spawn(ThreadPlan::new("hearing")).unwrap();
    let answers = Arc::new(std::sync::Mutex::new(None));
    let theirs = Arc::clone(&answers);
    world.call(&thread, move |context| *theirs.lock().unwrap() = context.add(sleepless()).err());
    world.settle();
    let refused = answers.lock().unwrap().take().unwrap();
    assert_eq!((refused.why, refused.registration.name()), (why, "deaf"));
}

#[test]
fn a_poller_that_does_not_say_when_it_is_to_be_woken_is_refused_in_every_mode() {
    let silent = [
        (WokenBy::of(WakeSource::Deadline).unwrap().kind(), "wake_at"),
        (WakeKind::OnlyWhileBusy("waits for itself"), "is_busy"),
    ];
    let woken_by = |kind| match kind {
        WakeKind::OnlyWhileBusy(why) => WokenBy::OnlyWhileBusy(why),
        _ => WokenBy::Deadline,
    };
    for mut world in [World::always(1), World::adaptive(0, 1)] {
        for (kind, unsaid) in silent {
            let make = || Registration::active("silent", woken_by(kind), idle(&tally()));
            let why = Refused::NeverWoken { poller: "silent".into(), woken_by: kind, unsaid };
            let refused = world.directory.spawn(ThreadPlan::new("silent").poller(make()));
            assert_eq!(refused.unwrap_err().why, why);
            let thread = world.directory.spawn(ThreadPlan::new("hearing")).unwrap();
            let answers = Arc::new(std::sync::Mutex::new(None));
            let theirs = Arc::clone(&answers);
            let add = make();
            world.call(&thread, move |context| *theirs.lock().unwrap() = context.add(add).err());
            world.turn_all(4);
            assert_eq!(answers.lock().unwrap().take().unwrap().why, why);
            assert!(why.to_string().contains(unsaid), "{why}");
        }
        // A timed one is woken by its period, and one that says so by what it says.
        let timed = Registration::timed("timed", Span::from_ms(1), idle(&tally()));
        let ring = Ring::new(&tally(), 1);
        let busy = Registration::active("busy", WokenBy::OnlyWhileBusy("waits"), ring);
        world.directory.spawn(ThreadPlan::new("said").poller(timed).poller(busy)).unwrap();
        world.turn_all(4);
    }
}

#[test]
fn who_says_nothing_of_time_does_not_hold_back_the_sleep_of_others() {
    let mut world = World::adaptive(0, 1);
    let thread =
        world.directory.spawn(ThreadPlan::new("idle").poller(active("idle", idle(&tally()))));
    thread.unwrap();
    world.settle();
    assert_eq!(world.members[0].stage, Stage::Asleep(Instant::NEVER));
}

#[test]
fn where_nobody_sleeps_it_may_live_and_then_nobody_may_go_to_sleep() {
    let mut world = World::always(2);
    let thread = world.directory.spawn(ThreadPlan::new("deaf").poller(sleepless()).on(R0)).unwrap();
    world.turn_all(2);
    let refused = world.directory.set_poll(R0, PollMode::Adaptive).unwrap_err();
    assert!(matches!(refused, Refused::NoWakeSource { .. }), "{refused}");
    // It may still come to a reactor that would sleep, and keeps that awake.
    world.directory.set_poll(R1, PollMode::Adaptive).unwrap();
    world.directory.move_thread(thread.id(), R1).unwrap();
    for _ in 0..1_000 {
        world.turn_all(1);
        world.pass_time(Span::from_us(10));
        assert_eq!(world.members[1].stage, Stage::Turning);
    }
    assert_eq!(thread.home(), R1);
}

/// How long after its last work a reactor goes to sleep, if work came with this gap before.
fn spell_after(gap: Span) -> Span {
    let mut world = World::adaptive(0, 1);
    let device = Device::new();
    let mut theirs = device.clone();
    world.directory.spawn(ThreadPlan::new("device").poller(device.registration("device"))).unwrap();
    world.settle();
    for _ in 0..200 {
        let next = world.now().after(gap);
        theirs.complete();
        while world.now() < next {
            world.turn_all(1);
            world.pass_time(Span { ns: gap.ns / 50 });
        }
    }
    theirs.complete();
    while !device.is_seen() {
        world.step(0);
    }
    let last = world.now();
    while world.members[0].stage == Stage::Turning {
        world.turn_all(1);
        world.pass_time(Span::from_us(1));
    }
    world.now().since(last)
}

#[test]
fn a_spell_follows_the_gaps_between_work_within_its_bounds() {
    let slack = Span::from_us(10).ns;
    let quick = spell_after(Span::from_us(5));
    assert!(quick >= SPELL_MIN && quick.ns <= SPELL_MIN.ns + slack, "{quick}");
    let steady = spell_after(Span::from_us(200));
    assert!(steady.ns > 300_000 && steady.ns < 500_000, "{steady}");
    let slow = spell_after(Span::from_us(900));
    assert!(slow <= Span { ns: SPELL_MAX.ns + slack } && slow.ns > 900_000, "{slow}");
    let rare = spell_after(Span::from_ms(20));
    assert!(rare.ns <= slack, "looking has been in vain two hundred times: {rare}");
}

/// Whether a reactor with these pollers goes on looking after each of several pieces of work that
/// the last of them found.
fn looks_on(world: &mut World, device: &mut Device) -> Vec<bool> {
    let mut looks = || {
        device.complete();
        while !device.is_seen() {
            world.step(0);
        }
        world.pass_time(Span::from_us(1));
        // The turn that found it; one that finds nothing; an announcement; the last look.
        world.turn_all(4);
        let looks = world.members[0].stage == Stage::Turning;
        world.settle();
        looks
    };
    (0..3).map(|_| looks()).collect()
}

#[test]
fn what_the_kernel_does_is_slept_for_at_once_unless_there_is_other_work_to_look_for() {
    let kernel = |device: &Device| device.registration("file").sleeps_at_once();
    let mut world = World::adaptive(0, 1);
    let mut file = Device::new();
    let alarm = Registration::timed("timed", Span::from_secs(3600), idle(&tally()));
    let plan = ThreadPlan::new("files").poller(kernel(&file)).poller(alarm);
    let thread = world.directory.spawn(plan).unwrap();
    world.settle();
    assert_eq!(looks_on(&mut world, &mut file), [false; 3], "one that is timed looks for nothing");

    let other = Device::new();
    let ssd = other.registration("ssd");
    world.call(&thread, move |context| drop(context.add(ssd)));
    world.settle();
    assert_eq!(looks_on(&mut world, &mut file), [true; 3], "an SSD on the same reactor");

    let second = PollerId::planned(2);
    world.call(&thread, move |context| context.pause(second));
    world.settle();
    assert_eq!(looks_on(&mut world, &mut file)[1..], [false; 2], "the SSD is not polled any more");

    world.directory.set_poll(R0, PollMode::Always).unwrap();
    world.turn_all(8);
    file.complete();
    world.turn_all(100);
    assert!(file.is_seen() && world.members[0].stage == Stage::Turning, "it always polls");
}

#[test]
fn a_device_wakes_whom_it_was_asked_to_and_a_paused_one_does_not() {
    let mut world = World::adaptive(0, 1);
    let device = Device::new();
    let mut theirs = device.clone();
    let plan = ThreadPlan::new("device").poller(device.registration("device"));
    let thread = world.directory.spawn(plan).unwrap();
    assert_eq!(world.settle(), Instant::NEVER);
    theirs.complete();
    world.settle();
    assert!(device.is_seen());

    world.call(&thread, |context| context.pause(FIRST));
    theirs.complete();
    world.turn_all(1);
    world.settle();
    device.vectors().unmask(0);
    base::Interrupts::raise(&mut device.vectors(), 0);
    let turns = || world.directory.sample(world.now()).reactors[0].turns;
    let before = turns();
    assert_eq!(world.members[0].stage, Stage::Asleep(Instant::NEVER));
    assert_eq!(turns(), before);
    world.turn_all(10);
    assert_eq!(world.members[0].stage, Stage::Asleep(Instant::NEVER), "it sleeps through it");
    world.call(&thread, |context| context.resume(FIRST));
    theirs.complete();
    world.settle();
    assert!(device.is_seen());
}

/// Something that comes from outside, and how one sees that it was dealt with.
type Comes = (fn(&mut World, &Device, &Handle), fn(&World, &Device, &Handle) -> bool);

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
            |world, _, _| drop(world.directory.spawn(ThreadPlan::new("new")).unwrap()),
            |world, _, _| world.kinds().len() == 2,
        ),
    ),
];

#[test]
fn whatever_comes_is_seen_at_whatever_stage_of_falling_asleep_it_comes() {
    type Is = fn(Stage) -> bool;
    let stages: [(&str, Is); 4] = [
        ("turning", |stage| stage == Stage::Turning),
        ("tired", |stage| matches!(stage, Stage::Tired(_))),
        ("announced", |stage| matches!(stage, Stage::Announced(_))),
        ("asleep", |stage| matches!(stage, Stage::Asleep(_))),
    ];
    for (what, (comes, is_seen)) in ANYTHING {
        for (when, is_it) in stages {
            let mut world = World::adaptive(0, 1);
            let device = Device::new();
            let plan = ThreadPlan::new("device").poller(device.registration("device"));
            let thread = world.directory.spawn(plan).unwrap();
            world.settle();
            world.call(&thread, |_| ());
            world.turn_all(3);
            while !is_it(world.members[0].stage) {
                world.turn_all(1);
                world.pass_time(Span::from_us(1));
            }
            comes(&mut world, &device, &thread);
            world.settle();
            assert!(is_seen(&world, &device, &thread), "{what} while {when}");
        }
    }
}

#[test]
fn one_that_is_busy_keeps_its_reactor_awake_until_it_is_not() {
    let mut world = World::adaptive(0, 1);
    let in_flight = tally();
    let ring = Ring::new(&in_flight, u64::MAX);
    let woken_by = WokenBy::OnlyWhileBusy("has nothing in flight by itself");
    let plan = ThreadPlan::new("ring").poller(Registration::active("ring", woken_by, ring));
    in_flight.store(1, RELAXED);
    world.directory.spawn(plan).unwrap();
    for _ in 0..3_000 {
        world.turn_all(1);
        world.pass_time(Span::from_us(1));
        assert!(!matches!(world.members[0].stage, Stage::Asleep(_)));
    }
    let sleeps = |world: &World| world.directory.sample(world.now()).reactors[0].sleeps;
    assert_eq!(sleeps(&world), 0);
    in_flight.store(0, RELAXED);
    world.settle();
    assert_eq!(sleeps(&world), 1);
}

/// Says when it is armed that its deadline has come nearer.
struct Impatient {
    wake_at: Instant,
    polls: super::crew::Tally,
}

impl Poller for Impatient {
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        if context.now() < self.wake_at {
            return Found::Nothing;
        }
        self.wake_at = Instant::NEVER;
        self.polls.fetch_add(1, Ordering::Relaxed);
        Found::Work
    }

    fn arm(&mut self) -> Found {
        if count(&self.polls) == 0 {
            self.wake_at = Instant { ns: 5_000_000 };
        }
        Found::Nothing
    }

    fn wake_at(&self) -> Instant {
        self.wake_at
    }
}

#[test]
fn a_deadline_that_comes_nearer_at_the_last_look_is_kept() {
    let mut world = World::adaptive(0, 1);
    let polls = tally();
    let poller = Impatient { wake_at: Instant::NEVER, polls: Arc::clone(&polls) };
    let registration = Registration::active("impatient", WokenBy::Deadline, poller);
    world.directory.spawn(ThreadPlan::new("one").poller(registration)).unwrap();
    assert_eq!(world.settle(), Instant { ns: 5_000_000 });
    world.live(Span::from_ms(10));
    world.settle();
    assert_eq!(count(&polls), 1);
}

#[test]
fn one_that_always_polls_never_sleeps_and_a_change_of_mode_wakes_one_that_does() {
    let mut world = World::adaptive(0, 2);
    world.settle();
    world.directory.set_poll(R0, PollMode::Always).unwrap();
    for _ in 0..100 {
        world.turn_all(1);
        world.pass_time(Span::from_ms(1));
    }
    assert_eq!(world.members[0].stage, Stage::Turning);
    assert_eq!(world.members[1].stage, Stage::Asleep(Instant::NEVER));
    let sample = world.directory.sample(world.now());
    let modes: Vec<_> = sample.reactors.iter().map(|reactor| reactor.mode).collect();
    assert_eq!(modes, [PollMode::Always, PollMode::Adaptive]);
    assert_eq!((sample.reactors[0].asleep, sample.reactors[1].asleep), (false, true));
    assert_eq!(world.kinds(), ["poll-mode-changed"]);
    world.directory.set_poll(R0, PollMode::Adaptive).unwrap();
    world.settle();
}

#[test]
fn all_are_told_how_to_poll_or_none_where_that_can_be_known() {
    let mut world = World::always(2);
    let plan = ThreadPlan::new("deaf").poller(sleepless()).on(R1);
    world.directory.spawn(plan).unwrap();
    world.turn_all(2);
    let modes = |world: &World| {
        let sample = world.directory.sample(world.now());
        sample.reactors.iter().map(|reactor| reactor.mode).collect::<Vec<_>>()
    };
    let refused = world.directory.set_poll_of_all(PollMode::Adaptive).unwrap_err();
    assert!(matches!(refused, Refused::NoWakeSource { .. }), "{refused}");
    world.turn_all(2);
    assert_eq!(modes(&world), [PollMode::Always; 2], "the first would have obeyed");

    let options = ReactorOptions { inbox: 2, ..ReactorOptions::default() };
    let mut world = World::new(0, 3, &options);
    while world.directory.set_poll(R1, PollMode::Adaptive).is_ok() {}
    let not_told = world.directory.set_poll_of_all(PollMode::Hybrid).unwrap();
    assert_eq!(not_told, [(R1, Refused::InboxFull(R1))]);
    world.turn_all(2);
    assert_eq!(modes(&world), [PollMode::Hybrid, PollMode::Adaptive, PollMode::Hybrid]);
}

/// Has something in flight that takes 80 us.
struct Slow(Counter);

impl Poller for Slow {
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        self.0.poll(context)
    }

    fn message(&mut self, _: [u64; 2], _: &mut Context<'_>) {}

    fn expected_latency(&self) -> Option<Span> {
        Some(Span::from_us(80))
    }
}

/// Goes on until it rests, and says until when.
fn rests(world: &mut World) -> Instant {
    for _ in 0..10 {
        if let Stage::Resting(until) = world.members[0].stage {
            return until;
        }
        world.step(0);
    }
    panic!("{:?}", world.stages())
}

fn hybrid(pollers: impl IntoIterator<Item = Registration>) -> (World, Handle) {
    let options = ReactorOptions { poll: PollMode::Hybrid, ..ReactorOptions::default() };
    let mut world = World::new(0, 1, &options);
    let plan = pollers.into_iter().fold(ThreadPlan::new("slow"), ThreadPlan::poller);
    let thread = world.directory.spawn(plan).unwrap();
    world.live(Span::from_ms(5));
    (world, thread)
}

#[test]
fn a_message_ends_a_rest_at_whatever_stage_of_it_it_comes() {
    type Is = fn(Stage) -> bool;
    let stages: [(&str, Is); 4] = [
        ("turning", |stage| stage == Stage::Turning),
        ("weary", |stage| matches!(stage, Stage::Weary(_))),
        ("leaning", |stage| matches!(stage, Stage::Leaning(_))),
        ("resting", |stage| matches!(stage, Stage::Resting(_))),
    ];
    type Comes = fn(&mut World, &Handle, super::crew::Tally);
    let comes: [(&str, Comes); 2] = [
        ("message", |world, thread, seen| {
            world.call(thread, move |_| _ = seen.fetch_add(1, RELAXED));
        }),
        ("order", |world, _, seen| {
            let note = move |_: &mut Context<'_>| _ = seen.fetch_add(1, RELAXED);
            world.directory.spawn(ThreadPlan::new("new").first(note)).unwrap();
        }),
    ];
    for (when, is_it) in stages {
        for (what, comes) in comes {
            let (mut world, thread) = hybrid([active("slow", Slow(idle(&tally())))]);
            world.call(&thread, |_| ());
            // The reactor wakes, works, and rests for it.
            while world.members[0].stage != Stage::Turning {
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
        Registration::timed("tick", Span::from_ms(10), idle(&ticks)),
    ]);
    world.call(&thread, move |context| context.set_period(PollerId::planned(1), due));
    while world.members[0].stage != Stage::Turning {
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

/// Has something to do two milliseconds after it was asked.
struct Later {
    asked: super::crew::Tally,
    done: super::crew::Tally,
    at: Instant,
}

impl Poller for Later {
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        if self.asked.swap(0, RELAXED) > 0 {
            self.at = context.now().after(Span::from_ms(2));
            return Found::Work;
        }
        let is_due = context.now() >= self.at;
        if is_due {
            self.at = Instant::NEVER;
            self.done.fetch_add(1, RELAXED);
        }
        Found::from_count(usize::from(is_due))
    }

    fn wake_at(&self) -> Instant {
        self.at
    }
}

#[test]
fn time_does_not_stand_still_for_a_reactor_that_awaits_a_deadline_awake() {
    // However many looks share the last reading of the clock.
    for looks in 0..8 {
        let mut world = World::adaptive(0, 1);
        let (asked, done) = (tally(), tally());
        let later = Later { asked: asked.clone(), done: done.clone(), at: Instant::NEVER };
        world.directory.spawn(ThreadPlan::new("later").poller(active("later", later))).unwrap();
        (0..8 + looks).for_each(|_| world.step(0));
        asked.store(1, RELAXED);
        world.step(0);
        // As if it had not had a processor: the deadline is near when it looks again.
        world.pass_time(Span::from_us(1_995));
        let mut now = world.now();
        for _ in 0..100 {
            let reactor = &mut world.members[0].reactor;
            assert_eq!(reactor.turn(now), Wait::Again, "too near to sleep for");
            let wants_time = reactor.wants_time();
            world.pass_time(Span::from_us(1));
            now = if wants_time { world.now() } else { now };
            if count(&done) > 0 {
                break;
            }
        }
        assert_eq!(count(&done), 1, "after {looks} looks");
    }
}

/// Its descriptor is readable all the time, and it knows of work only now and then.
struct Stuck {
    work: super::crew::Tally,
}

impl Poller for Stuck {
    fn poll(&mut self, _: &mut Context<'_>) -> Found {
        let found = self.work.swap(0, RELAXED);
        Found::from_count(usize::try_from(found).unwrap())
    }
}

#[test]
fn a_descriptor_that_stays_readable_is_told_once_and_does_not_keep_its_reactor_awake() {
    let mut world = World::adaptive(0, 1);
    let vectors = host::EventVectors::new(1).unwrap();
    vectors.unmask(0);
    base::Interrupts::raise(&mut vectors.clone(), 0);
    let descriptor = vectors.descriptor(0).unwrap().try_clone_to_owned().unwrap();
    let (work, polls) = (tally(), tally());
    let stuck = Stuck { work: Arc::clone(&work) };
    let plan = ThreadPlan::new("two")
        .poller(Registration::active("stuck", WokenBy::Descriptor(descriptor), stuck))
        .poller(active("beside", idle(&polls)));
    world.directory.spawn(plan).unwrap();
    let sleeps = |world: &World| world.directory.sample(world.now()).reactors[0].sleeps;
    let mut live = |span: Span| {
        let (end, before) = (world.now().after(span), sleeps(&world));
        while world.now() < end {
            world.step(0);
            match world.members[0].stage {
                // As the kernel would: it wakes at once if there is something, or at the deadline.
                Stage::Asleep(deadline) => {
                    world.step(0);
                    if let Stage::Asleep(_) = world.members[0].stage {
                        world.now_ns.store(deadline.min(end).ns, RELAXED);
                    }
                }
                _ => world.pass_time(Span { ns: 500 }),
            }
        }
        (sleeps(&world) - before, world.kinds(), world.directory.sample(world.now()))
    };
    let (spent, kinds, sample) = live(Span::from_secs(1));
    assert_eq!(kinds, ["thread-started", "woken-in-vain"]);
    // 32, then one each time it is believed, another for what it is found readable by then, and a
    // sleep without it in between.
    assert!(spent < 32 + 3 * 120, "{spent} sleeps in a second");
    let pollers = &sample.threads[0].pollers;
    assert!((32..200).contains(&pollers[0].woken_in_vain), "{pollers:?}");
    assert_eq!(pollers[1].woken_in_vain, 0);
    assert!(count(&polls) < 100_000, "{} polls in a second", count(&polls));

    // A true signal is seen within the bound.
    let slack = Span::from_ms(1);
    for _ in 0..20 {
        work.store(1, RELAXED);
        live(Span { ns: crate::thread::WARY_MAX.ns + slack.ns });
        assert_eq!(count(&work), 0, "it is seen {} later at most", crate::thread::WARY_MAX);
    }
    let (_, kinds, _) = live(Span::from_ms(1));
    assert!(kinds.len() > 5, "and the descriptor is believed again, and told again: {kinds:?}");
}

/// Waits for a device together with others, to whom most of its signals belong.
struct Among {
    vectors: host::EventVectors,
    /// What is for itself, and when it was seen.
    mine: super::crew::Tally,
    seen: super::crew::Tally,
}

impl Poller for Among {
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        let found = self.mine.swap(0, RELAXED);
        if found > 0 {
            self.seen.store(context.now().ns, RELAXED);
        }
        Found::from_count(usize::try_from(found).unwrap())
    }

    fn arm(&mut self) -> Found {
        self.vectors.unmask(0);
        Found::from_count(usize::try_from(self.mine.load(RELAXED)).unwrap())
    }
}

#[test]
fn a_descriptor_that_signals_for_others_is_not_stuck_and_never_heard_late() {
    let mut world = World::adaptive(0, 1);
    let mut vectors = host::EventVectors::new(1).unwrap();
    let descriptor = vectors.descriptor(0).unwrap().try_clone_to_owned().unwrap();
    let (mine, seen) = (tally(), tally());
    let among =
        Among { vectors: vectors.clone(), mine: Arc::clone(&mine), seen: Arc::clone(&seen) };
    let among = Registration::active("among", WokenBy::Descriptor(descriptor), among);
    world.directory.spawn(ThreadPlan::new("one").poller(among)).unwrap();
    let fall_asleep = |world: &mut World| {
        // As long as a turn takes, or until it wakes by itself.
        for _ in 0..5_000 {
            world.step(0);
            if let Stage::Asleep(_) = world.members[0].stage {
                return;
            }
            world.pass_time(Span::from_us(1));
        }
        panic!("it never sleeps");
    };
    for round in 0..100 {
        for _ in 0..70 {
            fall_asleep(&mut world);
            base::Interrupts::raise(&mut vectors, 0);
            world.step(0);
        }
        fall_asleep(&mut world);
        let now = world.now();
        mine.store(1, RELAXED);
        base::Interrupts::raise(&mut vectors, 0);
        for _ in 0..4 {
            world.step(0);
        }
        assert_eq!(count(&seen), now.ns, "round {round}");
    }
    assert_eq!(world.kinds(), ["thread-started"], "nobody is accused");
}

/// Shows something when it is flushed.
#[derive(Default)]
struct Shows {
    shown: super::crew::Tally,
    asks: bool,
}

impl Poller for Shows {
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        if std::mem::take(&mut self.asks) {
            context.flush();
        }
        Found::Nothing
    }

    fn flush(&mut self) {
        self.shown.fetch_add(1, RELAXED);
    }
}

#[test]
fn what_is_ready_at_the_beginning_is_made_visible_and_so_is_what_somebody_asks_for() {
    let mut world = World::adaptive(0, 2);
    let flushes = |asks| {
        let shown = tally();
        (Arc::clone(&shown), active("shows", Shows { shown, asks }))
    };
    let ((first, one), (later, two), (asking, three)) =
        (flushes(false), flushes(false), flushes(true));
    let thread = world.directory.spawn(ThreadPlan::new("shows").poller(one).on(R0)).unwrap();
    world.settle();
    assert_eq!(count(&first), 1, "its first words");
    world.call(&thread, move |context| drop(context.add(two)));
    world.settle();
    assert!(count(&later) >= 1, "of one that came later too");
    world.call(&thread, move |context| drop(context.add(three)));
    world.settle();
    let before = count(&first);
    assert!(count(&asking) >= 2, "and what it asked for");
    world.directory.move_thread(thread.id(), R1).unwrap();
    world.settle();
    assert_eq!((thread.home(), count(&first)), (R1, before + 1), "and after a move");
    world.live(Span::from_ms(50));
    assert_eq!(count(&first), before + 1, "and not without a reason");
}

#[test]
fn in_hybrid_mode_three_quarters_of_the_latency_are_rested() {
    let options = ReactorOptions { poll: PollMode::Hybrid, ..ReactorOptions::default() };
    let mut world = World::new(0, 1, &options);
    let polls = tally();
    let slow = Slow(idle(&polls));
    let thread =
        world.directory.spawn(ThreadPlan::new("slow").poller(active("slow", slow))).unwrap();
    world.turn_all(1);
    world.live(Span::from_ms(1));
    let message = crate::Message::Words { poller: FIRST, words: [0; 2] };
    thread.send(message).unwrap();
    while !matches!(world.members[0].stage, Stage::Turning) {
        world.step(0);
    }
    let now = world.now();
    let until = rests(&mut world);
    assert_eq!(until.since(now), Span::from_us(60));
    let before = count(&polls);
    world.turn_all(10);
    assert_eq!(count(&polls), before, "a rest is a rest");
    world.pass_time(Span::from_us(60));
    world.turn_all(40);
    assert!(count(&polls) > before + 30, "then it looks, and rests no second time");
}
