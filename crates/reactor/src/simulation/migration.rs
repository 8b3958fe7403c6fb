//! Requests to a thread that is migrating, or about to.

use tenmil_base::Span;
use tenmil_linux::CpuList;

use super::test_pollers::{PinnedRingPoller, RELAXED, SharedCount, count_of, new_count};
use super::{R0, R1, SimReactorState, Simulation};
use crate::{
    PollMode, PollerBuilder, PollerWake, ReactorId, ReactorOptions, ThreadBuilder, ThreadHandle,
};

const R2: ReactorId = ReactorId(2);

fn simulation_with_small_inboxes(reactors: u32) -> Simulation {
    Simulation::new(0, reactors, &ReactorOptions { inbox: 2, ..ReactorOptions::default() })
}

/// Fills the inbox of the second reactor, which is not run.
fn fill_inbox(world: &Simulation) {
    (0..2).for_each(|_| world.directory.set_poll_mode(R1, PollMode::Adaptive).unwrap());
    assert!(world.directory.set_poll_mode(R1, PollMode::Adaptive).is_err());
}

/// A thread that has left the first reactor and found the second one's inbox full.
fn thread_in_transit(world: &mut Simulation) -> ThreadHandle {
    let thread = world.directory.spawn(ThreadBuilder::new("traveller").on_reactor(R0)).unwrap();
    world.run_until_idle();
    fill_inbox(world);
    world.directory.migrate_thread(thread.id(), R1).unwrap();
    (0..8).for_each(|_| world.step_reactor(0));
    assert_eq!(thread.reactor(), R1, "it is on its way");
    thread
}

/// Lets the second reactor process commands, so that its inbox has room.
fn drain_inbox(world: &mut Simulation) {
    (0..8).for_each(|_| world.step_reactor(1));
}

#[test]
fn stopping_reactor_ends_while_a_thread_awaits_inbox_space() {
    let mut world = simulation_with_small_inboxes(2);
    let thread = thread_in_transit(&mut world);
    world.directory.stop_reactor(R0).unwrap();
    (0..8).for_each(|_| world.step_reactor(0));
    assert_ne!(world.members[0].stage, SimReactorState::Ended, "the thread is still with it");
    world.run_until_idle();
    assert_eq!(world.members[0].stage, SimReactorState::Ended);
    assert!(!thread.has_ended());
}

#[test]
fn end_request_reaches_a_thread_in_transit() {
    let mut world = simulation_with_small_inboxes(2);
    let thread = thread_in_transit(&mut world);
    drain_inbox(&mut world);
    // Sent to the second reactor, which does not have the thread yet.
    world.directory.end_thread(thread.id()).unwrap();
    drain_inbox(&mut world);
    world.run_until_idle();
    assert!(thread.has_ended());
}

#[test]
fn migration_request_reaches_a_thread_in_transit() {
    let mut world = simulation_with_small_inboxes(3);
    let thread = thread_in_transit(&mut world);
    drain_inbox(&mut world);
    world.directory.migrate_thread(thread.id(), R2).unwrap();
    drain_inbox(&mut world);
    world.run_until_idle();
    assert_eq!(thread.reactor(), R2);
    assert_eq!(world.event_kinds(), ["thread-started", "thread-migrated", "thread-migrated"]);
}

#[test]
fn rejected_migration_request_is_not_executed_later() {
    let mut world = simulation_with_small_inboxes(2);
    let thread = thread_in_transit(&mut world);
    assert!(world.directory.end_thread(thread.id()).is_err(), "there is no room for it");
    assert!(world.directory.migrate_thread(thread.id(), R0).is_err());
    assert!(world.directory.set_thread_mask(thread.id(), Some(CpuList::from_iter([0]))).is_err());
    world.run_until_idle();
    assert!(!thread.has_ended());
    assert_eq!(thread.reactor(), R1);
    assert_eq!(world.directory.sample_statistics(world.now()).threads[0].mask, None);
}

/// A thread on the first reactor that cannot detach at once.
fn thread_with_io_in_flight(world: &mut Simulation) -> (ThreadHandle, SharedCount) {
    let in_flight = new_count();
    let woken_by = PollerWake::OnlyWhileBusy("waits for what it has in flight");
    let ring = PollerBuilder::polled_each_iteration(
        "ring",
        woken_by,
        PinnedRingPoller::new(&in_flight, 5),
    );
    let thread = world
        .directory
        .spawn(ThreadBuilder::new("drains").on_reactor(R0).add_poller(ring))
        .unwrap();
    world.run_until_idle();
    in_flight.store(20, RELAXED);
    world.directory.migrate_thread(thread.id(), R1).unwrap();
    world.step_all(4);
    assert_eq!(thread.reactor(), R0);
    (thread, in_flight)
}

#[test]
fn migration_to_the_current_reactor_cancels_the_pending_one() {
    let mut world = Simulation::new_adaptive(0, 2);
    let (thread, in_flight) = thread_with_io_in_flight(&mut world);
    world.directory.migrate_thread(thread.id(), R0).unwrap();
    world.run_until_idle();
    assert_eq!((thread.reactor(), count_of(&in_flight)), (R0, 0));
    assert_eq!(world.event_kinds(), ["thread-started"]);
}

#[test]
fn mask_change_cancels_only_a_migration_outside_the_mask() {
    for (mask, home) in [(&[0][..], R0), (&[0, 1], R1), (&[1, 2], R1), (&[2], R2)] {
        let mut world = Simulation::new_adaptive(0, 3);
        let (thread, _) = thread_with_io_in_flight(&mut world);
        let cores = mask.iter().copied().collect();
        assert_eq!(world.directory.set_thread_mask(thread.id(), Some(cores)), Ok(home), "{mask:?}");
        world.run_until_idle();
        assert_eq!(thread.reactor(), home, "{mask:?}");
    }
}

#[test]
fn timed_out_migration_is_not_executed_later() {
    let options = ReactorOptions { drain_max: Span::from_us(1), ..ReactorOptions::default() };
    let mut world = Simulation::new(0, 3, &options);
    let in_flight = new_count();
    in_flight.store(1, RELAXED);
    let woken_by = PollerWake::OnlyWhileBusy("waits for what it has in flight");
    let ring = PollerBuilder::polled_each_iteration(
        "ring",
        woken_by,
        PinnedRingPoller::new(&in_flight, u64::MAX),
    );
    let thread =
        world.directory.spawn(ThreadBuilder::new("holds").on_reactor(R0).add_poller(ring)).unwrap();
    world.step_all(2);
    world.directory.migrate_thread(thread.id(), R1).unwrap();
    world.step_all(20);
    assert_eq!(world.event_kinds(), ["thread-started", "migration-timeout"]);
    in_flight.store(0, RELAXED);
    let mask = Some(CpuList::from_iter([0, 1]));
    assert_eq!(world.directory.set_thread_mask(thread.id(), mask), Ok(R0), "where it is");
    world.run_until_idle();
    assert_eq!(thread.reactor(), R0);
}

#[test]
fn paused_poller_is_polled_until_it_has_detached() {
    let mut world = Simulation::new_adaptive(0, 2);
    let in_flight = new_count();
    let woken_by = PollerWake::OnlyWhileBusy("waits for what it has in flight");
    let ring = PollerBuilder::polled_each_iteration(
        "ring",
        woken_by,
        PinnedRingPoller::new(&in_flight, 5),
    );
    let plan = ThreadBuilder::new("paused").on_reactor(R0).add_poller(ring.paused());
    let thread = world.directory.spawn(plan).unwrap();
    world.run_until_idle();
    in_flight.store(20, RELAXED);
    world.step_all(200);
    assert_eq!(count_of(&in_flight), 20, "it is paused");
    world.directory.migrate_thread(thread.id(), R1).unwrap();
    world.run_until_idle();
    assert_eq!((thread.reactor(), count_of(&in_flight)), (R1, 0));
    in_flight.store(20, RELAXED);
    world.send_closure(&thread, |_| ());
    world.step_all(200);
    assert_eq!(count_of(&in_flight), 20, "and still is");
    assert_eq!(world.event_kinds(), ["thread-started", "thread-migrated"]);
}

#[test]
fn pinned_thread_is_not_asked_to_detach() {
    let mut world = Simulation::new_adaptive(0, 2);
    let in_flight = new_count();
    let woken_by = PollerWake::OnlyWhileBusy("waits for what it has in flight");
    let ring = PinnedRingPoller::new(&in_flight, 5);
    let log = std::sync::Arc::clone(&ring.log);
    let ring = PollerBuilder::polled_each_iteration("ring", woken_by, ring)
        .pinned("its socket belongs to a ring");
    let thread =
        world.directory.spawn(ThreadBuilder::new("tied").on_reactor(R0).add_poller(ring)).unwrap();
    world.run_until_idle();
    let expected =
        "thread 'tied': poller 'ring' cannot leave its reactor: its socket belongs to a ring";
    let refused = world.directory.migrate_thread(thread.id(), R1).unwrap_err();
    assert_eq!(refused.to_string(), expected);
    let refused =
        world.directory.set_thread_mask(thread.id(), Some(CpuList::from_iter([1]))).unwrap_err();
    assert_eq!(refused.to_string(), expected);
    assert_eq!(world.directory.migrate_thread(thread.id(), R0), Ok(()));
    assert_eq!(world.directory.set_thread_mask(thread.id(), Some(CpuList::from_iter([0]))), Ok(R0));
    world.run_until_idle();
    assert_eq!(*log.lock().unwrap(), ["attached"], "the poller is not asked to detach");
    assert_eq!(world.event_kinds(), ["thread-started"]);
    world.directory.end_thread(thread.id()).unwrap();
    world.run_until_idle();
    assert!(thread.has_ended());
}

#[test]
fn migration_does_not_cancel_the_end_of_a_thread() {
    let mut world = Simulation::new_adaptive(0, 2);
    let in_flight = new_count();
    let woken_by = PollerWake::OnlyWhileBusy("waits for what it has in flight");
    let ring = PollerBuilder::polled_each_iteration(
        "ring",
        woken_by,
        PinnedRingPoller::new(&in_flight, 5),
    );
    let thread =
        world.directory.spawn(ThreadBuilder::new("ends").on_reactor(R0).add_poller(ring)).unwrap();
    world.run_until_idle();
    in_flight.store(20, RELAXED);
    world.send_closure(&thread, |context| context.request_thread_end());
    world.step_all(4);
    assert!(!thread.has_ended(), "it has something in flight");
    world.directory.migrate_thread(thread.id(), R1).unwrap();
    world.run_until_idle();
    assert!(thread.has_ended());
    assert_eq!(world.event_kinds(), ["thread-started", "thread-ended"]);
}

#[test]
fn thread_arriving_after_a_stop_command_is_ended_and_not_lost() {
    let mut world = Simulation::new_adaptive(0, 1);
    world.directory.stop_reactor(R0).unwrap();
    // More than it processes per iteration.
    (0..8).for_each(|_| world.directory.set_poll_mode(R0, PollMode::Adaptive).unwrap());
    let thread = world.directory.spawn(ThreadBuilder::new("late").on_reactor(R0)).unwrap();
    world.run_until_idle();
    assert!(thread.has_ended());
    assert_eq!(world.members[0].stage, SimReactorState::Ended);
    assert_eq!(world.event_kinds(), ["thread-started", "thread-ended"]);
}
