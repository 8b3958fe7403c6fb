//! Requests to a thread that is migrating, or about to.

use tenmil_base::Span;
use tenmil_linux::CpuList;

use super::test_pollers::{RELAXED, Ring, Tally, count, tally};
use super::{R0, R1, SimReactorState, Simulation};
use crate::{
    PollMode, PollerBuilder, PollerWake, ReactorId, ReactorOptions, ThreadBuilder, ThreadHandle,
};

const R2: ReactorId = ReactorId(2);

fn narrow(reactors: u32) -> Simulation {
    Simulation::new(0, reactors, &ReactorOptions { inbox: 2, ..ReactorOptions::default() })
}

/// Fills the inbox of the second reactor, which is not run.
fn fill_inbox(world: &Simulation) {
    (0..2).for_each(|_| world.directory.set_poll(R1, PollMode::Adaptive).unwrap());
    assert!(world.directory.set_poll(R1, PollMode::Adaptive).is_err());
}

/// A thread that has left the first reactor and found the second one's inbox full.
fn in_between(world: &mut Simulation) -> ThreadHandle {
    let thread = world.directory.spawn(ThreadBuilder::new("traveller").on(R0)).unwrap();
    world.run_until_idle();
    fill_inbox(world);
    world.directory.move_thread(thread.id(), R1).unwrap();
    (0..8).for_each(|_| world.step(0));
    assert_eq!(thread.reactor(), R1, "it is on its way");
    thread
}

/// Lets the second reactor process commands, so that its inbox has room.
fn make_space(world: &mut Simulation) {
    (0..8).for_each(|_| world.step(1));
}

#[test]
fn a_reactor_that_is_stopped_while_a_thread_waits_for_room_elsewhere_ends() {
    let mut world = narrow(2);
    let thread = in_between(&mut world);
    world.directory.stop(R0).unwrap();
    (0..8).for_each(|_| world.step(0));
    assert_ne!(world.members[0].stage, SimReactorState::Ended, "the thread is still with it");
    world.run_until_idle();
    assert_eq!(world.members[0].stage, SimReactorState::Ended);
    assert!(!thread.is_gone());
}

#[test]
fn an_end_reaches_a_thread_on_its_way() {
    let mut world = narrow(2);
    let thread = in_between(&mut world);
    make_space(&mut world);
    // Sent to the second reactor, which does not have the thread yet.
    world.directory.end_thread(thread.id()).unwrap();
    make_space(&mut world);
    world.run_until_idle();
    assert!(thread.is_gone());
}

#[test]
fn a_move_reaches_a_thread_on_its_way() {
    let mut world = narrow(3);
    let thread = in_between(&mut world);
    make_space(&mut world);
    world.directory.move_thread(thread.id(), R2).unwrap();
    make_space(&mut world);
    world.run_until_idle();
    assert_eq!(thread.reactor(), R2);
    assert_eq!(world.kinds(), ["thread-started", "thread-migrated", "thread-migrated"]);
}

#[test]
fn an_order_that_is_refused_is_not_carried_out_later() {
    let mut world = narrow(2);
    let thread = in_between(&mut world);
    assert!(world.directory.end_thread(thread.id()).is_err(), "there is no room for it");
    assert!(world.directory.move_thread(thread.id(), R0).is_err());
    assert!(world.directory.set_mask(thread.id(), Some(CpuList::from_iter([0]))).is_err());
    world.run_until_idle();
    assert!(!thread.is_gone());
    assert_eq!(thread.reactor(), R1);
    assert_eq!(world.directory.sample(world.now()).threads[0].mask, None);
}

/// A thread on the first reactor that cannot detach at once.
fn draining(world: &mut Simulation) -> (ThreadHandle, Tally) {
    let in_flight = tally();
    let woken_by = PollerWake::OnlyWhileBusy("waits for what it has in flight");
    let ring = PollerBuilder::active("ring", woken_by, Ring::new(&in_flight, 5));
    let thread = world.directory.spawn(ThreadBuilder::new("drains").on(R0).poller(ring)).unwrap();
    world.run_until_idle();
    in_flight.store(20, RELAXED);
    world.directory.move_thread(thread.id(), R1).unwrap();
    world.iterate_all(4);
    assert_eq!(thread.reactor(), R0);
    (thread, in_flight)
}

#[test]
fn a_move_to_where_it_lives_takes_back_the_one_that_is_under_way() {
    let mut world = Simulation::adaptive(0, 2);
    let (thread, in_flight) = draining(&mut world);
    world.directory.move_thread(thread.id(), R0).unwrap();
    world.run_until_idle();
    assert_eq!((thread.reactor(), count(&in_flight)), (R0, 0));
    assert_eq!(world.kinds(), ["thread-started"]);
}

#[test]
fn a_mask_takes_back_a_move_that_leads_out_of_it_and_no_other() {
    for (mask, home) in [(&[0][..], R0), (&[0, 1], R1), (&[1, 2], R1), (&[2], R2)] {
        let mut world = Simulation::adaptive(0, 3);
        let (thread, _) = draining(&mut world);
        let cores = mask.iter().copied().collect();
        assert_eq!(world.directory.set_mask(thread.id(), Some(cores)), Ok(home), "{mask:?}");
        world.run_until_idle();
        assert_eq!(thread.reactor(), home, "{mask:?}");
    }
}

#[test]
fn a_move_that_was_given_up_is_not_made_later() {
    let options = ReactorOptions { drain_max: Span::from_us(1), ..ReactorOptions::default() };
    let mut world = Simulation::new(0, 3, &options);
    let in_flight = tally();
    in_flight.store(1, RELAXED);
    let woken_by = PollerWake::OnlyWhileBusy("waits for what it has in flight");
    let ring = PollerBuilder::active("ring", woken_by, Ring::new(&in_flight, u64::MAX));
    let thread = world.directory.spawn(ThreadBuilder::new("holds").on(R0).poller(ring)).unwrap();
    world.iterate_all(2);
    world.directory.move_thread(thread.id(), R1).unwrap();
    world.iterate_all(20);
    assert_eq!(world.kinds(), ["thread-started", "migration-timeout"]);
    in_flight.store(0, RELAXED);
    let mask = Some(CpuList::from_iter([0, 1]));
    assert_eq!(world.directory.set_mask(thread.id(), mask), Ok(R0), "where it is");
    world.run_until_idle();
    assert_eq!(thread.reactor(), R0);
}

#[test]
fn a_paused_poller_is_polled_until_it_has_let_go() {
    let mut world = Simulation::adaptive(0, 2);
    let in_flight = tally();
    let woken_by = PollerWake::OnlyWhileBusy("waits for what it has in flight");
    let ring = PollerBuilder::active("ring", woken_by, Ring::new(&in_flight, 5));
    let plan = ThreadBuilder::new("paused").on(R0).poller(ring.paused());
    let thread = world.directory.spawn(plan).unwrap();
    world.run_until_idle();
    in_flight.store(20, RELAXED);
    world.iterate_all(200);
    assert_eq!(count(&in_flight), 20, "it is paused");
    world.directory.move_thread(thread.id(), R1).unwrap();
    world.run_until_idle();
    assert_eq!((thread.reactor(), count(&in_flight)), (R1, 0));
    in_flight.store(20, RELAXED);
    world.call(&thread, |_| ());
    world.iterate_all(200);
    assert_eq!(count(&in_flight), 20, "and still is");
    assert_eq!(world.kinds(), ["thread-started", "thread-migrated"]);
}

#[test]
fn a_thread_that_is_tied_is_not_asked_to_leave() {
    let mut world = Simulation::adaptive(0, 2);
    let in_flight = tally();
    let woken_by = PollerWake::OnlyWhileBusy("waits for what it has in flight");
    let ring = Ring::new(&in_flight, 5);
    let log = std::sync::Arc::clone(&ring.log);
    let ring = PollerBuilder::active("ring", woken_by, ring).pinned("its socket belongs to a ring");
    let thread = world.directory.spawn(ThreadBuilder::new("tied").on(R0).poller(ring)).unwrap();
    world.run_until_idle();
    let expected =
        "thread 'tied': poller 'ring' cannot leave its reactor: its socket belongs to a ring";
    let refused = world.directory.move_thread(thread.id(), R1).unwrap_err();
    assert_eq!(refused.to_string(), expected);
    let refused = world.directory.set_mask(thread.id(), Some(CpuList::from_iter([1]))).unwrap_err();
    assert_eq!(refused.to_string(), expected);
    assert_eq!(world.directory.move_thread(thread.id(), R0), Ok(()));
    assert_eq!(world.directory.set_mask(thread.id(), Some(CpuList::from_iter([0]))), Ok(R0));
    world.run_until_idle();
    assert_eq!(*log.lock().unwrap(), ["attached"], "it goes on as if nobody had asked");
    assert_eq!(world.kinds(), ["thread-started"]);
    world.directory.end_thread(thread.id()).unwrap();
    world.run_until_idle();
    assert!(thread.is_gone());
}

#[test]
fn a_move_does_not_take_back_an_end_that_the_thread_wants_itself() {
    let mut world = Simulation::adaptive(0, 2);
    let in_flight = tally();
    let woken_by = PollerWake::OnlyWhileBusy("waits for what it has in flight");
    let ring = PollerBuilder::active("ring", woken_by, Ring::new(&in_flight, 5));
    let thread = world.directory.spawn(ThreadBuilder::new("ends").on(R0).poller(ring)).unwrap();
    world.run_until_idle();
    in_flight.store(20, RELAXED);
    world.call(&thread, |context| context.end());
    world.iterate_all(4);
    assert!(!thread.is_gone(), "it has something in flight");
    world.directory.move_thread(thread.id(), R1).unwrap();
    world.run_until_idle();
    assert!(thread.is_gone());
    assert_eq!(world.kinds(), ["thread-started", "thread-ended"]);
}

#[test]
fn a_thread_that_comes_to_a_reactor_behind_the_order_to_stop_is_ended_and_not_lost() {
    let mut world = Simulation::adaptive(0, 1);
    world.directory.stop(R0).unwrap();
    // More than it processes per iteration.
    (0..8).for_each(|_| world.directory.set_poll(R0, PollMode::Adaptive).unwrap());
    let thread = world.directory.spawn(ThreadBuilder::new("late").on(R0)).unwrap();
    world.run_until_idle();
    assert!(thread.is_gone());
    assert_eq!(world.members[0].stage, SimReactorState::Ended);
    assert_eq!(world.kinds(), ["thread-started", "thread-ended"]);
}
