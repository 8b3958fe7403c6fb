//! Channels under failure: providers that panic, and visitors that find full mailboxes.

use std::sync::{Arc, Mutex};

use super::test_pollers::{RELAXED, count_of, idle_poller, message_woken_poller, new_count};
use super::{R0, R1, SimReactorState, Simulation};
use crate::{ChannelProvider, SharedProvider, ThreadBuilder, ThreadHandle};

/// Provider that panics whenever a channel is closed.
struct CloseFailingProvider;

impl ChannelProvider for CloseFailingProvider {
    type Channel = ();
    type Refusal = ();

    fn open_channel(&self) -> Result<(), ()> {
        Ok(())
    }

    fn close_channel(&self, (): ()) {
        panic!("on purpose");
    }
}

#[test]
fn provider_that_panics_on_close_affects_no_other_channel() {
    let mut world = Simulation::new_adaptive(0, 1);
    let polls = new_count();
    let plan = ThreadBuilder::new("user")
        .add_poller(message_woken_poller("innocent", idle_poller(&polls)));
    let thread = world.directory.spawn(plan).unwrap();
    world.run_until_idle();
    let object = SharedProvider::new(CloseFailingProvider);
    for _ in 0..3 {
        let object = object.clone();
        world.send_closure(&thread, move |context| drop(context.open_channel(&object)));
        world.run_until_idle();
    }
    let held = Arc::new(Mutex::new(None));
    let theirs = (object.clone(), Arc::clone(&held));
    world.send_closure(&thread, move |context| {
        *theirs.1.lock().unwrap() = context.open_channel(&theirs.0).ok()
    });
    world.run_until_idle();
    let before = count_of(&polls);
    world.send_closure(&thread, |_| ());
    world.run_until_idle();
    assert!(count_of(&polls) > before, "the poller is still there");
    world.directory.end_thread(thread.id()).unwrap();
    world.run_until_idle();
    assert!(thread.has_ended() && object.threads_with_channel().is_empty());
    let closed = ["channel-panicked"; 4];
    let kinds = world.event_kinds();
    assert_eq!(kinds[0], "thread-started");
    assert_eq!((&kinds[1..5], &kinds[5..]), (&closed[..], &["thread-ended"][..]));
    let text = world.events()[1].to_string();
    assert_eq!(text, "close a channel of thread 0 'user': panicked: on purpose");
}

/// Provider of a number per thread.
struct NumberedChannelProvider;

impl ChannelProvider for NumberedChannelProvider {
    type Channel = u64;
    type Refusal = ();

    fn open_channel(&self) -> Result<u64, ()> {
        Ok(0)
    }
}

fn open_channel_forever(
    world: &mut Simulation,
    object: &SharedProvider<NumberedChannelProvider>,
    thread: &ThreadHandle,
) {
    let object = object.clone();
    world.send_closure(thread, move |context| {
        std::mem::forget(context.open_channel(&object).unwrap())
    });
    world.step_all(2);
}

#[test]
fn channel_visit_continues_at_the_next_thread_when_a_full_thread_ends() {
    // With another thread to be visited, and with only the requester to return to.
    for has_other in [true, false] {
        let mut world = Simulation::new_always_polling(2);
        let object = SharedProvider::new(NumberedChannelProvider);
        let spawn = |plan: ThreadBuilder| world.directory.spawn(plan.mailbox_size(1)).unwrap();
        let asker = spawn(ThreadBuilder::new("asker").on_reactor(R1));
        let other = spawn(ThreadBuilder::new("other").on_reactor(R1));
        let host = spawn(ThreadBuilder::new("host").on_reactor(R0));
        world.step_all(2);
        if has_other {
            open_channel_forever(&mut world, &object, &other);
        }
        open_channel_forever(&mut world, &object, &host);
        let (visited, done) = (new_count(), new_count());
        let theirs = (object.clone(), Arc::clone(&visited), Arc::clone(&done));
        world.send_closure(&asker, move |context| {
            let (object, visited, done) = theirs;
            let step = move |_: &mut u64| _ = visited.fetch_add(1, RELAXED);
            context.for_each_channel(&object, step, move |_| _ = done.fetch_add(1, RELAXED));
        });
        world.step_reactor(1);
        // The visitor waits in the host's mailbox, and its next mailbox is full.
        world.directory.end_thread(host.id()).unwrap();
        world.send_closure(if has_other { &other } else { &asker }, |_| ());
        (0..3).for_each(|_| world.step_reactor(0));
        assert!(host.has_ended());
        assert_eq!(count_of(&done), 0);
        world.step_all(10);
        assert_eq!((count_of(&visited), count_of(&done)), (u64::from(has_other), 1));
    }
}

#[test]
fn stopping_reactor_ends_while_a_channel_visit_awaits_mailbox_space() {
    let mut world = Simulation::new_always_polling(2);
    let object = SharedProvider::new(NumberedChannelProvider);
    let spawn = |plan: ThreadBuilder| world.directory.spawn(plan.mailbox_size(1)).unwrap();
    let asker = spawn(ThreadBuilder::new("asker").on_reactor(R1));
    let host = spawn(ThreadBuilder::new("host").on_reactor(R0));
    world.step_all(2);
    open_channel_forever(&mut world, &object, &host);
    let done = new_count();
    let theirs = (object.clone(), Arc::clone(&done));
    world.send_closure(&asker, move |context| {
        let (object, done) = theirs;
        context.for_each_channel(&object, |_| (), move |_| _ = done.fetch_add(1, RELAXED));
    });
    world.step_reactor(1);
    // The visitor waits in the host's mailbox, and the requester's mailbox is full.
    world.directory.stop_reactor(R0).unwrap();
    world.send_closure(&asker, |_| ());
    (0..8).for_each(|_| world.step_reactor(0));
    assert!(host.has_ended());
    assert_ne!(world.members[0].stage, SimReactorState::Ended, "the visitor is still with it");
    world.step_all(8);
    assert_eq!((world.members[0].stage, count_of(&done)), (SimReactorState::Ended, 1));
}
