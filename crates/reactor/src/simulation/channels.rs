//! Channels under failure: providers that panic, and visitors that find full mailboxes.

use std::sync::{Arc, Mutex};

use super::test_pollers::{RELAXED, active, count, idle, tally};
use super::{R0, R1, SimReactorState, Simulation};
use crate::{ChannelProvider, SharedProvider, ThreadBuilder, ThreadHandle};

/// Provider that panics whenever a channel is closed.
struct Sulky;

impl ChannelProvider for Sulky {
    type Channel = ();
    type Refusal = ();

    fn open(&self) -> Result<(), ()> {
        Ok(())
    }

    fn close(&self, (): ()) {
        panic!("on purpose");
    }
}

#[test]
fn an_object_that_panics_when_it_closes_a_channel_harms_nobody() {
    let mut world = Simulation::adaptive(0, 1);
    let polls = tally();
    let plan = ThreadBuilder::new("user").poller(active("innocent", idle(&polls)));
    let thread = world.directory.spawn(plan).unwrap();
    world.run_until_idle();
    let object = SharedProvider::new(Sulky);
    for _ in 0..3 {
        let object = object.clone();
        world.call(&thread, move |context| drop(context.open(&object)));
        world.run_until_idle();
    }
    let held = Arc::new(Mutex::new(None));
    let theirs = (object.clone(), Arc::clone(&held));
    world.call(&thread, move |context| *theirs.1.lock().unwrap() = context.open(&theirs.0).ok());
    world.run_until_idle();
    let before = count(&polls);
    world.call(&thread, |_| ());
    world.run_until_idle();
    assert!(count(&polls) > before, "the poller is still there");
    world.directory.end_thread(thread.id()).unwrap();
    world.run_until_idle();
    assert!(thread.is_gone() && object.threads().is_empty());
    let closed = ["channel-panicked"; 4];
    let kinds = world.kinds();
    assert_eq!(kinds[0], "thread-started");
    assert_eq!((&kinds[1..5], &kinds[5..]), (&closed[..], &["thread-ended"][..]));
    let text = world.events()[1].to_string();
    assert_eq!(text, "close a channel of thread 0 'user': panicked: on purpose");
}

/// Provider of a number per thread.
struct Numbers;

impl ChannelProvider for Numbers {
    type Channel = u64;
    type Refusal = ();

    fn open(&self) -> Result<u64, ()> {
        Ok(0)
    }
}

fn open_for_ever(world: &mut Simulation, object: &SharedProvider<Numbers>, thread: &ThreadHandle) {
    let object = object.clone();
    world.call(thread, move |context| std::mem::forget(context.open(&object).unwrap()));
    world.iterate_all(2);
}

#[test]
fn a_visitor_whose_host_ends_waits_for_room_with_the_next_one() {
    // With another thread to be visited, and with only the requester to return to.
    for has_other in [true, false] {
        let mut world = Simulation::always(2);
        let object = SharedProvider::new(Numbers);
        let spawn = |plan: ThreadBuilder| world.directory.spawn(plan.mailbox(1)).unwrap();
        let asker = spawn(ThreadBuilder::new("asker").on(R1));
        let other = spawn(ThreadBuilder::new("other").on(R1));
        let host = spawn(ThreadBuilder::new("host").on(R0));
        world.iterate_all(2);
        if has_other {
            open_for_ever(&mut world, &object, &other);
        }
        open_for_ever(&mut world, &object, &host);
        let (visited, done) = (tally(), tally());
        let theirs = (object.clone(), Arc::clone(&visited), Arc::clone(&done));
        world.call(&asker, move |context| {
            let (object, visited, done) = theirs;
            let step = move |_: &mut u64| _ = visited.fetch_add(1, RELAXED);
            context.for_each_channel(&object, step, move |_| _ = done.fetch_add(1, RELAXED));
        });
        world.step(1);
        // The visitor waits in the host's mailbox, and its next mailbox is full.
        world.directory.end_thread(host.id()).unwrap();
        world.call(if has_other { &other } else { &asker }, |_| ());
        (0..3).for_each(|_| world.step(0));
        assert!(host.is_gone());
        assert_eq!(count(&done), 0);
        world.iterate_all(10);
        assert_eq!((count(&visited), count(&done)), (u64::from(has_other), 1));
    }
}

#[test]
fn a_reactor_that_is_stopped_while_a_visitor_waits_for_room_elsewhere_ends() {
    let mut world = Simulation::always(2);
    let object = SharedProvider::new(Numbers);
    let spawn = |plan: ThreadBuilder| world.directory.spawn(plan.mailbox(1)).unwrap();
    let asker = spawn(ThreadBuilder::new("asker").on(R1));
    let host = spawn(ThreadBuilder::new("host").on(R0));
    world.iterate_all(2);
    open_for_ever(&mut world, &object, &host);
    let done = tally();
    let theirs = (object.clone(), Arc::clone(&done));
    world.call(&asker, move |context| {
        let (object, done) = theirs;
        context.for_each_channel(&object, |_| (), move |_| _ = done.fetch_add(1, RELAXED));
    });
    world.step(1);
    // The visitor waits in the host's mailbox, and the requester's mailbox is full.
    world.directory.stop(R0).unwrap();
    world.call(&asker, |_| ());
    (0..8).for_each(|_| world.step(0));
    assert!(host.is_gone());
    assert_ne!(world.members[0].stage, SimReactorState::Ended, "the visitor is still with it");
    world.iterate_all(8);
    assert_eq!((world.members[0].stage, count(&done)), (SimReactorState::Ended, 1));
}
