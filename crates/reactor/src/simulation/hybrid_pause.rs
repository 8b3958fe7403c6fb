//! Pauses of a reactor in hybrid mode: their length, and what ends them.

use std::sync::Arc;

use tenmil_base::{Instant, Span};

use super::test_pollers::{
    CountingPoller, FIRST, RELAXED, SharedCount, count_of, idle_poller, message_woken_poller,
    new_count,
};
use super::{SimReactorState, Simulation};
use crate::{
    Context, PollMode, PollResult, Poller, PollerBuilder, PollerId, ReactorOptions, ThreadBuilder,
    ThreadHandle,
};

/// Has I/O in flight that takes 80 us.
struct InFlightPoller(CountingPoller);

impl Poller for InFlightPoller {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        self.0.poll(context)
    }

    fn handle_message(&mut self, _: [u64; 2], _: &mut Context<'_>) {}

    fn expected_latency(&self) -> Option<Span> {
        Some(Span::from_us(80))
    }
}

/// Runs until the reactor pauses, and returns the end of the pause.
fn run_until_pausing(world: &mut Simulation) -> Instant {
    for _ in 0..10 {
        if let SimReactorState::Pausing(until) = world.members[0].stage {
            return until;
        }
        world.step_reactor(0);
    }
    panic!("{:?}", world.reactor_states())
}

fn simulation_in_hybrid_mode(
    pollers: impl IntoIterator<Item = PollerBuilder>,
) -> (Simulation, ThreadHandle) {
    let options = ReactorOptions { poll: PollMode::Hybrid, ..ReactorOptions::default() };
    let mut world = Simulation::new(0, 1, &options);
    let plan = pollers.into_iter().fold(ThreadBuilder::new("slow"), ThreadBuilder::add_poller);
    let thread = world.directory.spawn(plan).unwrap();
    world.run_for(Span::from_ms(5));
    (world, thread)
}

#[test]
fn message_ends_a_hybrid_pause_at_any_stage() {
    type Is = fn(SimReactorState) -> bool;
    let stages: [(&str, Is); 4] = [
        ("iterating", |stage| stage == SimReactorState::Iterating),
        ("wants to pause", |stage| matches!(stage, SimReactorState::WantsPause(_))),
        ("has announced a pause", |stage| matches!(stage, SimReactorState::PauseAnnounced(_))),
        ("pausing", |stage| matches!(stage, SimReactorState::Pausing(_))),
    ];
    type WakeEventAndCheck = fn(&mut Simulation, &ThreadHandle, SharedCount);
    let comes: [(&str, WakeEventAndCheck); 2] = [
        ("message", |world, thread, seen| {
            world.send_closure(thread, move |_| _ = seen.fetch_add(1, RELAXED));
        }),
        ("order", |world, _, seen| {
            let note = move |_: &mut Context<'_>| _ = seen.fetch_add(1, RELAXED);
            world.directory.spawn(ThreadBuilder::new("new").run_first(note)).unwrap();
        }),
    ];
    for (when, is_it) in stages {
        for (what, comes) in comes {
            let (mut world, thread) = simulation_in_hybrid_mode([message_woken_poller(
                "slow",
                InFlightPoller(idle_poller(&new_count())),
            )]);
            world.send_closure(&thread, |_| ());
            // The reactor wakes, works, and pauses again.
            while world.members[0].stage != SimReactorState::Iterating {
                world.step_reactor(0);
            }
            world.step_reactor(0);
            while !is_it(world.members[0].stage) {
                world.step_reactor(0);
            }
            let seen = new_count();
            comes(&mut world, &thread, Arc::clone(&seen));
            // No time passes.
            (0..8).for_each(|_| world.step_reactor(0));
            assert_eq!(count_of(&seen), 1, "a {what} while {when}: {:?}", world.reactor_states());
        }
    }
}

#[test]
fn hybrid_pause_never_exceeds_a_deadline() {
    let due = Span::from_us(30);
    let ticks = new_count();
    let (mut world, thread) = simulation_in_hybrid_mode([
        message_woken_poller("slow", InFlightPoller(idle_poller(&new_count()))),
        PollerBuilder::polled_each_period("tick", Span::from_ms(10), idle_poller(&ticks)),
    ]);
    world.send_closure(&thread, move |context| {
        context.set_poller_period(PollerId::of_builder_index(1), due)
    });
    while world.members[0].stage != SimReactorState::Iterating {
        world.step_reactor(0);
    }
    let now = world.now();
    let until = run_until_pausing(&mut world);
    assert_eq!(until, now.after(due), "and not 60 us");
    let before = count_of(&ticks);
    world.advance_clock(due);
    (0..2).for_each(|_| world.step_reactor(0));
    assert_eq!(count_of(&ticks), before + 1);
}

#[test]
fn hybrid_pause_is_three_quarters_of_the_latency() {
    let options = ReactorOptions { poll: PollMode::Hybrid, ..ReactorOptions::default() };
    let mut world = Simulation::new(0, 1, &options);
    let polls = new_count();
    let slow = InFlightPoller(idle_poller(&polls));
    let thread = world
        .directory
        .spawn(ThreadBuilder::new("slow").add_poller(message_woken_poller("slow", slow)))
        .unwrap();
    world.step_all(1);
    world.run_for(Span::from_ms(1));
    let message = crate::Message::Data { poller: FIRST, words: [0; 2] };
    thread.send(message).unwrap();
    while !matches!(world.members[0].stage, SimReactorState::Iterating) {
        world.step_reactor(0);
    }
    let now = world.now();
    let until = run_until_pausing(&mut world);
    assert_eq!(until.since(now), Span::from_us(60));
    let before = count_of(&polls);
    world.step_all(10);
    assert_eq!(count_of(&polls), before, "a paused reactor polls nothing");
    world.advance_clock(Span::from_us(60));
    world.step_all(40);
    assert!(count_of(&polls) > before + 30, "then it polls, and pauses no second time");
}
