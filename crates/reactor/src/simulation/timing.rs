//! Timers, time accounting and the watchdog.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tenmil_base::{Instant, Span};

use super::test_pollers::{Counter, FIRST, Tally, active, count, idle, tally};
use super::{R0, R1, Simulation};
use crate::{
    Attribution, Context, Event, PollResult, Poller, PollerBuilder, PollerId, PollerWake,
    STALL_THRESHOLD, ThreadBuilder, Watchdog,
};

const PERIOD: Span = Span::from_ms(2);

#[test]
fn a_timed_poller_is_polled_once_a_period_and_wakes_its_reactor_for_it() {
    let mut world = Simulation::adaptive(0, 1);
    let polls = tally();
    let plan =
        ThreadBuilder::new("clockwork").poller(PollerBuilder::timed("tick", PERIOD, idle(&polls)));
    world.directory.spawn(plan).unwrap();
    world.run_until_idle();
    world.live(Span::from_ms(21));
    assert_eq!(count(&polls), 10);
    let sample = world.directory.sample(world.now());
    assert!(sample.reactors[0].sleeps >= 10, "{sample:?}");
    assert_eq!(sample.threads[0].pollers[0].polls, 10, "the books are published before a sleep");
}

#[test]
fn periods_that_were_missed_are_not_made_up_for() {
    let mut world = Simulation::always(1);
    let polls = tally();
    let plan =
        ThreadBuilder::new("clockwork").poller(PollerBuilder::timed("tick", PERIOD, idle(&polls)));
    world.directory.spawn(plan).unwrap();
    world.iterate_all(2);
    world.pass_time(Span::from_ms(100));
    world.iterate_all(10);
    assert_eq!(count(&polls), 1);
    world.pass_time(PERIOD);
    world.iterate_all(10);
    assert_eq!(count(&polls), 2);
}

#[test]
fn a_hundred_timed_pollers_are_each_polled_at_their_own_time() {
    let mut world = Simulation::adaptive(3, 1);
    let polls: Vec<_> = (0..100).map(|_| tally()).collect();
    let mut plan = ThreadBuilder::new("many");
    for (number, polls) in (1..).zip(&polls) {
        plan = plan.poller(PollerBuilder::timed("tick", Span::from_ms(number), idle(polls)));
    }
    world.directory.spawn(plan).unwrap();
    world.iterate_all(1);
    let begin = world.now();
    world.live(Span::from_ms(200));
    let lived_ms = world.now().since(begin).ns / 1_000_000;
    for (number, polls) in (1..).zip(&polls) {
        let due = lived_ms / number;
        assert!(
            count(polls) + 1 >= due && count(polls) <= due + 1,
            "{number} ms: {}",
            count(polls)
        );
    }
}

#[test]
fn a_paused_poller_rests_until_it_is_resumed() {
    let mut world = Simulation::always(1);
    let (polls, ticks) = (tally(), tally());
    let plan = ThreadBuilder::new("pausing")
        .poller(active("busy", idle(&polls)))
        .poller(PollerBuilder::timed("tick", PERIOD, idle(&ticks)).paused());
    let thread = world.directory.spawn(plan).unwrap();
    world.iterate_all(1);
    world.call(&thread, |context| context.pause(FIRST));
    world.iterate_all(2);
    let before = count(&polls);
    world.pass_time(Span::from_ms(100));
    world.iterate_all(10);
    assert_eq!((count(&polls), count(&ticks)), (before, 0));
    assert!(world.directory.sample(world.now()).threads[0].pollers[1].paused);
    world.call(&thread, |context| {
        context.resume(FIRST);
        context.resume(PollerId::planned(1));
    });
    world.iterate_all(11);
    assert_eq!((count(&polls), count(&ticks)), (before + 10, 0), "due one period from now");
    world.pass_time(PERIOD);
    world.iterate_all(2);
    assert_eq!(count(&ticks), 1, "and once, although it was paused with a timer running");
}

#[test]
fn a_timed_poller_that_is_resumed_is_due_one_period_later_and_only_then() {
    let mut world = Simulation::always(1);
    let ticks = tally();
    let plan = ThreadBuilder::new("one").poller(PollerBuilder::timed("tick", PERIOD, idle(&ticks)));
    let thread = world.directory.spawn(plan).unwrap();
    world.iterate_all(2);
    let half = Span { ns: PERIOD.ns / 2 };
    world.call(&thread, |context| context.pause(FIRST));
    world.iterate_all(2);
    world.pass_time(half);
    world.call(&thread, |context| context.resume(FIRST));
    world.iterate_all(2);
    world.pass_time(half);
    world.iterate_all(10);
    assert_eq!(count(&ticks), 0, "the time at which it would have been due is forgotten");
    world.pass_time(half);
    world.iterate_all(10);
    assert_eq!(count(&ticks), 1);
}

#[test]
fn a_timed_poller_that_is_given_another_period_keeps_that_and_is_not_polled_twice() {
    let mut world = Simulation::always(1);
    let (polls, ticks) = (tally(), tally());
    let plan = ThreadBuilder::new("two")
        .poller(active("busy", idle(&polls)))
        .poller(PollerBuilder::timed("tick", PERIOD, idle(&ticks)));
    let thread = world.directory.spawn(plan).unwrap();
    world.iterate_all(2);
    let half = Span { ns: PERIOD.ns / 2 };
    for (period, shown) in [(Span { ns: PERIOD.ns * 3 }, 6), (half, 1)] {
        world.call(&thread, move |context| {
            context.set_period(FIRST, period);
            context.set_period(PollerId::planned(1), period);
        });
        world.iterate_all(2);
        let pollers = world.directory.sample(world.now()).threads[0].pollers.clone();
        assert_eq!(pollers[0].every, None, "it is polled every turn");
        assert_eq!(pollers[1].every, Some(Span::from_ms(shown)));
        let before = count(&ticks);
        world.pass_time(Span { ns: period.ns - half.ns / 2 });
        world.iterate_all(2);
        assert_eq!(count(&ticks), before, "the old period counts no more");
        for round in 1..4 {
            world.pass_time(period);
            world.iterate_all(10);
            assert_eq!(count(&ticks), before + round);
        }
    }
    assert!(count(&polls) > 60);
}

#[test]
fn a_timer_runs_once_at_its_time_even_if_its_thread_moves_and_not_if_it_is_removed() {
    let mut world = Simulation::adaptive(5, 2);
    let thread = world.directory.spawn(ThreadBuilder::new("timers").on(R0)).unwrap();
    let (ran, removed) = (tally(), tally());
    let (ours, theirs) = (Arc::clone(&ran), Arc::clone(&removed));
    world.call(&thread, move |context| {
        let at = context.now();
        let note = move |context: &mut Context<'_>| {
            ours.store(context.now().since(at).ns, Ordering::Relaxed);
        };
        context.after(Span::from_ms(7), note).unwrap();
        let gone =
            context.after(Span::from_ms(3), move |_| _ = theirs.fetch_add(1, Ordering::Relaxed));
        context.remove(gone.unwrap());
    });
    world.live(Span::from_ms(4));
    world.directory.move_thread(thread.id(), R1).unwrap();
    world.live(Span::from_ms(20));
    assert_eq!(thread.reactor(), R1);
    let late = count(&ran).checked_sub(7_000_000);
    assert!(late.is_some_and(|late| late < 100_000), "{late:?}");
    assert_eq!(count(&removed), 0);
    assert_eq!(world.directory.sample(world.now()).threads[0].pollers, [], "and is gone");
}

#[test]
fn time_is_booked_to_the_thread_that_found_work() {
    let mut world = Simulation::always(1);
    for (name, ns) in [("heavy", 3_000), ("light", 1_000), ("idle", 0)] {
        let clock = Arc::clone(&world.now_ns);
        let works = move |_: &mut Context<'_>| {
            clock.fetch_add(ns, Ordering::Relaxed);
            PollResult::from_count(usize::try_from(ns).unwrap())
        };
        let plan = ThreadBuilder::new(name).poller(active("burner", works));
        world.directory.spawn(plan).unwrap();
    }
    world.iterate_all(1_500);
    let sample = world.directory.sample(world.now());
    let busy = |index: usize| sample.threads[index].busy.ns;
    let iterations = sample.threads[0].pollers[0].polls;
    assert!(iterations > 1_000, "{sample:?}");
    assert!(busy(0).abs_diff(3_000 * iterations) < 30_000, "{sample:?}");
    // The overhead of an iteration is charged to the last one.
    assert!(busy(1).abs_diff(1_100 * iterations) < 30_000, "{sample:?}");
    assert!(busy(2) <= 5_000, "its first flush, and what a turn costs: {sample:?}");
    let busy_ns = sample.reactors[0].busy.ns;
    assert!(busy_ns.abs_diff(4_100 * iterations) < 30_000, "{sample:?}");
    let life_ns = sample.threads[0].busy.ns + sample.threads[0].idle.ns;
    assert!(life_ns.abs_diff(busy_ns) < 300_000, "{sample:?}");
}

/// A poller that takes a long time on every tenth poll.
fn stalls(world: &Simulation, found: PollResult) -> PollerBuilder {
    let (clock, mut polls) = (Arc::clone(&world.now_ns), 0_u32);
    let stall = move |_: &mut Context<'_>| {
        polls += 1;
        if polls.is_multiple_of(10) {
            clock.fetch_add(Span::from_ms(20).ns, Ordering::Relaxed);
            return found;
        }
        PollResult::Idle
    };
    active("staller", stall)
}

fn culprits(world: &Simulation) -> Vec<Attribution> {
    let cause = |event| match event {
        Event::SlowIteration { took, attribution: cause, .. } => {
            assert!(took >= Span::from_ms(20), "{took}");
            Some(cause)
        }
        _ => None,
    };
    world.events().into_iter().filter_map(cause).collect()
}

#[test]
fn a_turn_that_is_too_long_is_told_with_the_name_of_the_poller() {
    let mut world = Simulation::always(1);
    let stalls = stalls(&world, PollResult::Busy);
    let plan = ThreadBuilder::new("mixed").poller(active("idle", idle(&tally()))).poller(stalls);
    world.directory.spawn(plan).unwrap();
    world.iterate_all(40);
    let named = culprits(&world);
    assert!(named.len() >= 3, "{named:?}");
    assert_eq!(named, vec![Attribution::Poller("staller".into()); named.len()]);
    let sample = world.directory.sample(world.now());
    assert_eq!(sample.reactors[0].slow_iterations, named.len() as u64);
    assert!(sample.reactors[0].longest_iteration >= Span::from_ms(20));
}

#[test]
fn one_that_stalls_and_finds_nothing_is_named_at_once_and_nobody_else_is_blamed() {
    let mut world = Simulation::always(1);
    let stalls = stalls(&world, PollResult::Idle);
    let works = Counter { polls: tally(), works: true };
    let plan = ThreadBuilder::new("mixed").poller(stalls).poller(active("works", works));
    world.directory.spawn(plan).unwrap();
    world.iterate_all(40);
    let named = culprits(&world);
    assert!(named.len() >= 3, "{named:?}");
    assert_eq!(named, vec![Attribution::Poller("staller".into()); named.len()]);
}

/// Takes a long time for its first flush.
struct SlowFlush(Option<Arc<std::sync::atomic::AtomicU64>>);

impl Poller for SlowFlush {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        PollResult::Idle
    }

    fn flush(&mut self) {
        if let Some(clock) = self.0.take() {
            clock.fetch_add(Span::from_ms(20).ns, Ordering::Relaxed);
        }
    }
}

#[test]
fn a_flush_that_stalls_is_named_after_its_poller_and_the_next_turn_blames_nobody_for_it() {
    let mut world = Simulation::always(1);
    let clock = Arc::clone(&world.now_ns);
    let plan = ThreadBuilder::new("mixed")
        .poller(active("before", idle(&tally())))
        .poller(active("flushes", SlowFlush(Some(clock))))
        .poller(stalls(&world, PollResult::Idle));
    world.directory.spawn(plan).unwrap();
    world.iterate_all(15);
    let names = ["flushes", "staller"].map(|name| Attribution::Poller(name.into()));
    assert_eq!(culprits(&world), names);
}

#[test]
fn nobody_is_blamed_for_time_that_passes_between_two_turns_or_in_a_sleep() {
    let mut world = Simulation::always(1);
    let plan = ThreadBuilder::new("two")
        .poller(active("one", idle(&tally())))
        .poller(active("other", idle(&tally())));
    world.directory.spawn(plan).unwrap();
    world.iterate_all(3);
    world.pass_time(Span::from_ms(20));
    world.iterate_all(3);
    assert_eq!(culprits(&world), [Attribution::Unknown]);

    let mut world = Simulation::adaptive(1, 1);
    let plan = ThreadBuilder::new("two")
        .poller(PollerBuilder::timed("tick", Span::from_secs(1), idle(&tally())))
        .poller(stalls(&world, PollResult::Idle));
    let thread = world.directory.spawn(plan).unwrap();
    while culprits(&world).is_empty() {
        // A sleep of a second before each iteration.
        world.live(Span::from_secs(1));
        world.call(&thread, |_| ());
    }
    assert_eq!(culprits(&world), [Attribution::Poller("staller".into())]);
}

#[test]
fn a_message_that_stalls_is_named_after_its_thread() {
    let mut world = Simulation::always(1);
    let thread = world.directory.spawn(ThreadBuilder::new("slow")).unwrap();
    world.iterate_all(2);
    let clock = Arc::clone(&world.now_ns);
    world.call(&thread, move |_| _ = clock.fetch_add(Span::from_ms(20).ns, Ordering::Relaxed));
    world.iterate_all(2);
    assert_eq!(culprits(&world), [Attribution::Message("slow".into())]);
}

#[test]
fn who_runs_and_since_when_can_be_seen_from_outside() {
    let mut world = Simulation::always(1);
    let plan = ThreadBuilder::new("one").poller(active("only", idle(&tally())));
    world.directory.spawn(plan).unwrap();
    world.iterate_all(3);
    let began = world.now();
    world.iterate_all(1);
    let sample = world.directory.sample(Instant::NEVER);
    assert_eq!(sample.reactors[0].running.as_deref(), Some("only"));
    assert_eq!(sample.reactors[0].iteration_started, began);
}

#[test]
fn a_turn_that_does_not_end_is_told_once_while_it_lasts() {
    let mut world = Simulation::adaptive(1, 2);
    let plan = ThreadBuilder::new("one").on(R0).poller(active("only", idle(&tally())));
    world.directory.spawn(plan).unwrap();
    world.iterate_all(3);
    let endless =
        |world: &Simulation| world.kinds().iter().filter(|k| **k == "reactor-stalled").count();
    let mut lookout = Watchdog::default();
    lookout.check(world.now(), &world.directory);
    world.pass_time(STALL_THRESHOLD);
    lookout.check(world.now(), &world.directory);
    assert_eq!(endless(&world), 0, "not for longer than it may");
    for _ in 0..3 {
        world.pass_time(Span::from_ms(1));
        lookout.check(world.now(), &world.directory);
    }
    let told = world.events().into_iter().find(|event| event.kind() == "reactor-stalled");
    assert!(
        matches!(told, Some(Event::ReactorStalled { running: Some(name), .. }) if name == "only")
    );
    assert_eq!(endless(&world), 2, "once for each turn: nobody has turned either reactor");
    world.iterate_all(1);
    world.pass_time(STALL_THRESHOLD);
    lookout.check(world.now(), &world.directory);
    assert_eq!(endless(&world), 2, "it has ended");
}

#[test]
fn a_reactor_that_sleeps_or_has_ended_is_in_no_turn() {
    let mut world = Simulation::adaptive(1, 2);
    world.run_until_idle();
    assert!(world.directory.sample(world.now()).reactors.iter().all(|reactor| reactor.sleeping));
    world.directory.stop(R1).unwrap();
    while !world.directory.has_ended(R1) {
        world.step(1);
    }
    let mut lookout = Watchdog::default();
    for _ in 0..3 {
        lookout.check(world.now(), &world.directory);
        world.pass_time(Span { ns: 2 * STALL_THRESHOLD.ns });
    }
    assert!(!world.kinds().contains(&"reactor-stalled"));
}

#[test]
fn a_poller_with_a_deadline_is_polled_when_it_has_come() {
    let mut world = Simulation::adaptive(1, 1);
    let (next, rung) = (tally(), tally());
    next.store(world.now().after(Span::from_ms(9)).ns, Ordering::Relaxed);
    let gap = Span::from_secs(3_600);
    let alarm = super::test_pollers::Alarm { next, rung: Arc::clone(&rung), gap };
    let plan = ThreadBuilder::new("waits").poller(PollerBuilder::active(
        "alarm",
        PollerWake::Deadline,
        alarm,
    ));
    world.directory.spawn(plan).unwrap();
    world.live(Span::from_ms(8));
    assert_eq!(count(&rung), 0);
    world.live(Span::from_ms(1));
    world.run_until_idle();
    assert_eq!(count(&rung), 1);
}

/// Counts its polls, and stops an iteration that would not end.
fn once_a_turn(polls: &Tally) -> impl Poller + use<> {
    let (polls, mut last) = (Arc::clone(polls), None);
    move |context: &mut Context<'_>| {
        assert_ne!(last.replace(context.now()), Some(context.now()), "twice in a turn");
        polls.fetch_add(1, Ordering::Relaxed);
        PollResult::Idle
    }
}

#[test]
fn a_period_of_no_time_at_all_is_once_in_a_turn() {
    let mut world = Simulation::always(1);
    let (hasty, changed, once) = (tally(), tally(), tally());
    let theirs = Arc::clone(&once);
    let plan = ThreadBuilder::new("hasty")
        .poller(PollerBuilder::timed("hasty", Span::default(), once_a_turn(&hasty)))
        .poller(PollerBuilder::timed("changed", Span::from_secs(1), once_a_turn(&changed)))
        .first(move |context| {
            context.set_period(PollerId::planned(1), Span::default());
            context
                .after(Span::default(), move |_| _ = theirs.fetch_add(1, Ordering::Relaxed))
                .unwrap();
        });
    world.directory.spawn(plan).unwrap();
    world.iterate_all(1);
    // A timer with period zero would block the next iteration forever.
    let sample = world.directory.sample(world.now());
    let periods: Vec<_> =
        sample.threads[0].pollers.iter().filter_map(|poller| poller.every).collect();
    assert!(periods.len() == 3 && periods.iter().all(|every| every.ns > 0), "{periods:?}");
    world.iterate_all(9);
    assert_eq!(count(&once), 1);
    for polls in [hasty, changed] {
        assert!((8..=10).contains(&count(&polls)), "{}", count(&polls));
    }
}
