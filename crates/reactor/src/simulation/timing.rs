//! Timers, time accounting and the watchdog.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tenmil_base::{Instant, Span};

use super::test_pollers::{
    CountingPoller, FIRST, SharedCount, count_of, idle_poller, message_woken_poller, new_count,
};
use super::{R0, R1, Simulation};
use crate::{
    Context, Event, PollResult, Poller, PollerBuilder, PollerId, PollerWake, ProgressCheck,
    STALL_THRESHOLD, SlowIterationCause, ThreadBuilder, Watchdog,
};

const PERIOD: Span = Span::from_ms(2);

#[test]
fn timed_poller_is_polled_once_per_period_and_wakes_its_reactor() {
    let mut world = Simulation::new_adaptive(0, 1);
    let polls = new_count();
    let plan = ThreadBuilder::new("clockwork").add_poller(PollerBuilder::polled_each_period(
        "tick",
        PERIOD,
        idle_poller(&polls),
    ));
    world.directory.spawn(plan).unwrap();
    world.run_until_idle();
    world.run_for(Span::from_ms(21));
    assert_eq!(count_of(&polls), 10);
    let sample = world.directory.sample_statistics(world.now());
    assert!(sample.reactors[0].sleeps >= 10, "{sample:?}");
    assert_eq!(sample.threads[0].pollers[0].polls, 10, "the books are published before a sleep");
}

#[test]
fn missed_periods_are_not_repeated() {
    let mut world = Simulation::new_always_polling(1);
    let polls = new_count();
    let plan = ThreadBuilder::new("clockwork").add_poller(PollerBuilder::polled_each_period(
        "tick",
        PERIOD,
        idle_poller(&polls),
    ));
    world.directory.spawn(plan).unwrap();
    world.step_all(2);
    world.advance_clock(Span::from_ms(100));
    world.step_all(10);
    assert_eq!(count_of(&polls), 1);
    world.advance_clock(PERIOD);
    world.step_all(10);
    assert_eq!(count_of(&polls), 2);
}

#[test]
fn hundred_timed_pollers_are_each_polled_on_time() {
    let mut world = Simulation::new_adaptive(3, 1);
    let polls: Vec<_> = (0..100).map(|_| new_count()).collect();
    let mut plan = ThreadBuilder::new("many");
    for (number, polls) in (1..).zip(&polls) {
        plan = plan.add_poller(PollerBuilder::polled_each_period(
            "tick",
            Span::from_ms(number),
            idle_poller(polls),
        ));
    }
    world.directory.spawn(plan).unwrap();
    world.step_all(1);
    let begin = world.now();
    world.run_for(Span::from_ms(200));
    let lived_ms = world.now().since(begin).ns / 1_000_000;
    for (number, polls) in (1..).zip(&polls) {
        let due = lived_ms / number;
        assert!(
            count_of(polls) + 1 >= due && count_of(polls) <= due + 1,
            "{number} ms: {}",
            count_of(polls)
        );
    }
}

#[test]
fn paused_poller_is_not_polled_until_resumed() {
    let mut world = Simulation::new_always_polling(1);
    let (polls, ticks) = (new_count(), new_count());
    let plan = ThreadBuilder::new("pausing")
        .add_poller(message_woken_poller("busy", idle_poller(&polls)))
        .add_poller(
            PollerBuilder::polled_each_period("tick", PERIOD, idle_poller(&ticks)).paused(),
        );
    let thread = world.directory.spawn(plan).unwrap();
    world.step_all(1);
    world.send_closure(&thread, |context| context.pause_poller(FIRST));
    world.step_all(2);
    let before = count_of(&polls);
    world.advance_clock(Span::from_ms(100));
    world.step_all(10);
    assert_eq!((count_of(&polls), count_of(&ticks)), (before, 0));
    assert!(world.directory.sample_statistics(world.now()).threads[0].pollers[1].paused);
    world.send_closure(&thread, |context| {
        context.resume_poller(FIRST);
        context.resume_poller(PollerId::of_builder_index(1));
    });
    world.step_all(11);
    assert_eq!((count_of(&polls), count_of(&ticks)), (before + 10, 0), "due one period from now");
    world.advance_clock(PERIOD);
    world.step_all(2);
    assert_eq!(count_of(&ticks), 1, "and once, although it was paused with a timer running");
}

#[test]
fn resumed_timed_poller_is_due_one_period_later() {
    let mut world = Simulation::new_always_polling(1);
    let ticks = new_count();
    let plan = ThreadBuilder::new("one").add_poller(PollerBuilder::polled_each_period(
        "tick",
        PERIOD,
        idle_poller(&ticks),
    ));
    let thread = world.directory.spawn(plan).unwrap();
    world.step_all(2);
    let half = Span { ns: PERIOD.ns / 2 };
    world.send_closure(&thread, |context| context.pause_poller(FIRST));
    world.step_all(2);
    world.advance_clock(half);
    world.send_closure(&thread, |context| context.resume_poller(FIRST));
    world.step_all(2);
    world.advance_clock(half);
    world.step_all(10);
    assert_eq!(count_of(&ticks), 0, "the time at which it would have been due is forgotten");
    world.advance_clock(half);
    world.step_all(10);
    assert_eq!(count_of(&ticks), 1);
}

#[test]
fn timed_poller_with_changed_period_is_not_polled_twice() {
    let mut world = Simulation::new_always_polling(1);
    let (polls, ticks) = (new_count(), new_count());
    let plan = ThreadBuilder::new("two")
        .add_poller(message_woken_poller("busy", idle_poller(&polls)))
        .add_poller(PollerBuilder::polled_each_period("tick", PERIOD, idle_poller(&ticks)));
    let thread = world.directory.spawn(plan).unwrap();
    world.step_all(2);
    let half = Span { ns: PERIOD.ns / 2 };
    for (period, shown) in [(Span { ns: PERIOD.ns * 3 }, 6), (half, 1)] {
        world.send_closure(&thread, move |context| {
            context.set_poller_period(FIRST, period);
            context.set_poller_period(PollerId::of_builder_index(1), period);
        });
        world.step_all(2);
        let pollers = world.directory.sample_statistics(world.now()).threads[0].pollers.clone();
        assert_eq!(pollers[0].every, None, "it is polled every turn");
        assert_eq!(pollers[1].every, Some(Span::from_ms(shown)));
        let before = count_of(&ticks);
        world.advance_clock(Span { ns: period.ns - half.ns / 2 });
        world.step_all(2);
        assert_eq!(count_of(&ticks), before, "the old period counts no more");
        for round in 1..4 {
            world.advance_clock(period);
            world.step_all(10);
            assert_eq!(count_of(&ticks), before + round);
        }
    }
    assert!(count_of(&polls) > 60);
}

#[test]
fn one_shot_timer_fires_once_even_after_migration_and_not_if_removed() {
    let mut world = Simulation::new_adaptive(5, 2);
    let thread = world.directory.spawn(ThreadBuilder::new("timers").on_reactor(R0)).unwrap();
    let (ran, removed) = (new_count(), new_count());
    let (ours, theirs) = (Arc::clone(&ran), Arc::clone(&removed));
    world.send_closure(&thread, move |context| {
        let at = context.now();
        let note = move |context: &mut Context<'_>| {
            ours.store(context.now().since(at).ns, Ordering::Relaxed);
        };
        context.call_after(Span::from_ms(7), note).unwrap();
        let gone = context
            .call_after(Span::from_ms(3), move |_| _ = theirs.fetch_add(1, Ordering::Relaxed));
        context.remove_poller(gone.unwrap());
    });
    world.run_for(Span::from_ms(4));
    world.directory.migrate_thread(thread.id(), R1).unwrap();
    world.run_for(Span::from_ms(20));
    assert_eq!(thread.reactor(), R1);
    let late = count_of(&ran).checked_sub(7_000_000);
    assert!(late.is_some_and(|late| late < 100_000), "{late:?}");
    assert_eq!(count_of(&removed), 0);
    assert_eq!(
        world.directory.sample_statistics(world.now()).threads[0].pollers,
        [],
        "and is gone"
    );
}

#[test]
fn time_is_charged_to_the_thread_that_found_work() {
    let mut world = Simulation::new_always_polling(1);
    for (name, ns) in [("heavy", 3_000), ("light", 1_000), ("idle", 0)] {
        let clock = Arc::clone(&world.now_ns);
        let works = move |_: &mut Context<'_>| {
            clock.fetch_add(ns, Ordering::Relaxed);
            PollResult::from_count(usize::try_from(ns).unwrap())
        };
        let plan = ThreadBuilder::new(name).add_poller(message_woken_poller("burner", works));
        world.directory.spawn(plan).unwrap();
    }
    world.step_all(1_500);
    let sample = world.directory.sample_statistics(world.now());
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
fn stalling_poller(world: &Simulation, found: PollResult) -> PollerBuilder {
    let (clock, mut polls) = (Arc::clone(&world.now_ns), 0_u32);
    let stall = move |_: &mut Context<'_>| {
        polls += 1;
        if polls.is_multiple_of(10) {
            clock.fetch_add(Span::from_ms(20).ns, Ordering::Relaxed);
            return found;
        }
        PollResult::Idle
    };
    message_woken_poller("staller", stall)
}

fn slow_iteration_causes(world: &Simulation) -> Vec<SlowIterationCause> {
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
fn too_long_iteration_is_reported_with_the_poller_name() {
    let mut world = Simulation::new_always_polling(1);
    let stalls = stalling_poller(&world, PollResult::Busy);
    let plan = ThreadBuilder::new("mixed")
        .add_poller(message_woken_poller("idle", idle_poller(&new_count())))
        .add_poller(stalls);
    world.directory.spawn(plan).unwrap();
    world.step_all(40);
    let named = slow_iteration_causes(&world);
    assert!(named.len() >= 3, "{named:?}");
    assert_eq!(named, vec![SlowIterationCause::Poller("staller".into()); named.len()]);
    let sample = world.directory.sample_statistics(world.now());
    assert_eq!(sample.reactors[0].slow_iterations, named.len() as u64);
    assert!(sample.reactors[0].longest_iteration >= Span::from_ms(20));
}

#[test]
fn stall_of_an_idle_poller_is_attributed_only_to_it() {
    let mut world = Simulation::new_always_polling(1);
    let stalls = stalling_poller(&world, PollResult::Idle);
    let works = CountingPoller { polls: new_count(), works: true };
    let plan = ThreadBuilder::new("mixed")
        .add_poller(stalls)
        .add_poller(message_woken_poller("works", works));
    world.directory.spawn(plan).unwrap();
    world.step_all(40);
    let named = slow_iteration_causes(&world);
    assert!(named.len() >= 3, "{named:?}");
    assert_eq!(named, vec![SlowIterationCause::Poller("staller".into()); named.len()]);
}

/// Takes a long time for its first flush.
struct SlowFlushPoller(Option<Arc<std::sync::atomic::AtomicU64>>);

impl Poller for SlowFlushPoller {
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
fn slow_flush_is_attributed_to_its_poller_only_once() {
    let mut world = Simulation::new_always_polling(1);
    let clock = Arc::clone(&world.now_ns);
    let plan = ThreadBuilder::new("mixed")
        .add_poller(message_woken_poller("before", idle_poller(&new_count())))
        .add_poller(message_woken_poller("flushes", SlowFlushPoller(Some(clock))))
        .add_poller(stalling_poller(&world, PollResult::Idle));
    world.directory.spawn(plan).unwrap();
    world.step_all(15);
    let names = ["flushes", "staller"].map(|name| SlowIterationCause::Poller(name.into()));
    assert_eq!(slow_iteration_causes(&world), names);
}

#[test]
fn time_between_iterations_and_in_sleep_is_attributed_to_none() {
    let mut world = Simulation::new_always_polling(1);
    let plan = ThreadBuilder::new("two")
        .add_poller(message_woken_poller("one", idle_poller(&new_count())))
        .add_poller(message_woken_poller("other", idle_poller(&new_count())));
    world.directory.spawn(plan).unwrap();
    world.step_all(3);
    world.advance_clock(Span::from_ms(20));
    world.step_all(3);
    assert_eq!(slow_iteration_causes(&world), [SlowIterationCause::Unknown]);

    let mut world = Simulation::new_adaptive(1, 1);
    let plan = ThreadBuilder::new("two")
        .add_poller(PollerBuilder::polled_each_period(
            "tick",
            Span::from_secs(1),
            idle_poller(&new_count()),
        ))
        .add_poller(stalling_poller(&world, PollResult::Idle));
    let thread = world.directory.spawn(plan).unwrap();
    while slow_iteration_causes(&world).is_empty() {
        // A sleep of a second before each iteration.
        world.run_for(Span::from_secs(1));
        world.send_closure(&thread, |_| ());
    }
    assert_eq!(slow_iteration_causes(&world), [SlowIterationCause::Poller("staller".into())]);
}

#[test]
fn slow_message_is_attributed_to_its_thread() {
    let mut world = Simulation::new_always_polling(1);
    let thread = world.directory.spawn(ThreadBuilder::new("slow")).unwrap();
    world.step_all(2);
    let clock = Arc::clone(&world.now_ns);
    world.send_closure(&thread, move |_| {
        _ = clock.fetch_add(Span::from_ms(20).ns, Ordering::Relaxed)
    });
    world.step_all(2);
    assert_eq!(slow_iteration_causes(&world), [SlowIterationCause::Message("slow".into())]);
}

#[test]
fn running_poller_and_its_start_are_visible_to_observers() {
    let mut world = Simulation::new_always_polling(1);
    let plan = ThreadBuilder::new("one")
        .add_poller(message_woken_poller("only", idle_poller(&new_count())));
    world.directory.spawn(plan).unwrap();
    world.step_all(3);
    let began = world.now();
    world.step_all(1);
    let sample = world.directory.sample_statistics(Instant::NEVER);
    assert_eq!(sample.reactors[0].running.as_deref(), Some("only"));
    assert_eq!(sample.reactors[0].iteration_started, began);
}

#[test]
fn endless_iteration_is_reported_once_while_it_lasts() {
    let mut world = Simulation::new_adaptive(1, 2);
    let plan = ThreadBuilder::new("one")
        .on_reactor(R0)
        .add_poller(message_woken_poller("only", idle_poller(&new_count())));
    world.directory.spawn(plan).unwrap();
    world.step_all(3);
    let endless = |world: &Simulation| {
        world.event_kinds().iter().filter(|k| **k == "reactor-stalled").count()
    };
    let mut lookout = Watchdog::default();
    lookout.check_reactors(world.now(), &world.directory);
    world.advance_clock(STALL_THRESHOLD);
    lookout.check_reactors(world.now(), &world.directory);
    assert_eq!(endless(&world), 0, "not for longer than it may");
    for _ in 0..3 {
        world.advance_clock(Span::from_ms(1));
        lookout.check_reactors(world.now(), &world.directory);
    }
    let reported = world.events().into_iter().find(|event| event.kind() == "reactor-stalled");
    assert!(
        matches!(reported, Some(Event::ReactorStalled { running: Some(name), .. }) if name == "poller 'only' of thread 'one'")
    );
    assert_eq!(endless(&world), 2, "once for each iteration: neither reactor has ended its own");
    world.step_all(1);
    world.advance_clock(STALL_THRESHOLD);
    lookout.check_reactors(world.now(), &world.directory);
    assert_eq!(endless(&world), 2, "it has ended");
}

#[test]
fn sleeping_or_ended_reactor_reports_no_running_iteration() {
    let mut world = Simulation::new_adaptive(1, 2);
    world.run_until_idle();
    assert!(
        world
            .directory
            .sample_statistics(world.now())
            .reactors
            .iter()
            .all(|reactor| reactor.sleeping)
    );
    world.directory.stop_reactor(R1).unwrap();
    while !world.directory.has_reactor_ended(R1) {
        world.step_reactor(1);
    }
    let mut lookout = Watchdog::default();
    for _ in 0..3 {
        lookout.check_reactors(world.now(), &world.directory);
        world.advance_clock(Span { ns: 2 * STALL_THRESHOLD.ns });
    }
    assert!(!world.event_kinds().contains(&"reactor-stalled"));
}

#[test]
fn only_an_awake_reactor_without_a_new_iteration_makes_no_progress() {
    let mut world = Simulation::new_adaptive(1, 2);
    let plan = ThreadBuilder::new("one")
        .on_reactor(R0)
        .add_poller(message_woken_poller("only", idle_poller(&new_count())));
    world.directory.spawn(plan).unwrap();
    world.step_all(3);
    let mut check = ProgressCheck::default();
    assert_eq!(
        check.find_stalled_reactor(&world.directory),
        None,
        "the first call has nothing before it"
    );
    world.step_all(1);
    assert_eq!(check.find_stalled_reactor(&world.directory), None);
    for _ in 0..2 {
        let stalled = check.find_stalled_reactor(&world.directory).unwrap();
        assert_eq!((stalled.reactor, stalled.running.as_deref()), (R0, Some("only")));
    }
    world.run_until_idle();
    for _ in 0..2 {
        assert_eq!(check.find_stalled_reactor(&world.directory), None, "both sleep");
    }
}

#[test]
fn poller_with_a_deadline_is_polled_when_it_passes() {
    let mut world = Simulation::new_adaptive(1, 1);
    let (next, rung) = (new_count(), new_count());
    next.store(world.now().after(Span::from_ms(9)).ns, Ordering::Relaxed);
    let gap = Span::from_secs(3_600);
    let alarm = super::test_pollers::DeadlinePoller { next, rung: Arc::clone(&rung), gap };
    let plan = ThreadBuilder::new("waits").add_poller(PollerBuilder::polled_each_iteration(
        "alarm",
        PollerWake::Deadline,
        alarm,
    ));
    world.directory.spawn(plan).unwrap();
    world.run_for(Span::from_ms(8));
    assert_eq!(count_of(&rung), 0);
    world.run_for(Span::from_ms(1));
    world.run_until_idle();
    assert_eq!(count_of(&rung), 1);
}

/// Counts its polls, and stops an iteration that would not end.
fn counting_poller_with_limit(polls: &SharedCount) -> impl Poller + use<> {
    let (polls, mut last) = (Arc::clone(polls), None);
    move |context: &mut Context<'_>| {
        assert_ne!(last.replace(context.now()), Some(context.now()), "twice in a turn");
        polls.fetch_add(1, Ordering::Relaxed);
        PollResult::Idle
    }
}

#[test]
fn period_of_zero_polls_once_per_iteration() {
    let mut world = Simulation::new_always_polling(1);
    let (hasty, changed, once) = (new_count(), new_count(), new_count());
    let theirs = Arc::clone(&once);
    let plan = ThreadBuilder::new("hasty")
        .add_poller(PollerBuilder::polled_each_period(
            "hasty",
            Span::default(),
            counting_poller_with_limit(&hasty),
        ))
        .add_poller(PollerBuilder::polled_each_period(
            "changed",
            Span::from_secs(1),
            counting_poller_with_limit(&changed),
        ))
        .run_first(move |context| {
            context.set_poller_period(PollerId::of_builder_index(1), Span::default());
            context
                .call_after(Span::default(), move |_| _ = theirs.fetch_add(1, Ordering::Relaxed))
                .unwrap();
        });
    world.directory.spawn(plan).unwrap();
    world.step_all(1);
    // A timer with period zero would block the next iteration forever.
    let sample = world.directory.sample_statistics(world.now());
    let periods: Vec<_> =
        sample.threads[0].pollers.iter().filter_map(|poller| poller.every).collect();
    assert!(periods.len() == 3 && periods.iter().all(|every| every.ns > 0), "{periods:?}");
    world.step_all(9);
    assert_eq!(count_of(&once), 1);
    for polls in [hasty, changed] {
        assert!((8..=10).contains(&count_of(&polls)), "{}", count_of(&polls));
    }
}
