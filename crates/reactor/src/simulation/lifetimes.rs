//! Panics, migrations, exits, channels, and the fate of messages meanwhile.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use tenmil_base::Span;
use tenmil_linux::CpuList;

use super::test_pollers::{
    FIRST, PinnedRingPoller, RELAXED, SharedCount, count_of, idle_poller, message_woken_poller,
    new_count,
};
use super::{R0, R1, SimReactorState, Simulation};
use crate::{
    ChannelProvider, Context, DetachReason, Event, Message, PollResult, Poller, PollerBuilder,
    PollerWake, ReactorError, ReactorId, ReactorOptions, SharedProvider, ThreadBuilder,
};

/// Counts its drop.
struct DropCounter(SharedCount);

impl Drop for DropCounter {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn panicking_poller_is_dropped_and_reported_and_others_continue() {
    let mut world = Simulation::new_always_polling(1);
    let (polls, drops) = (new_count(), new_count());
    let guard = DropCounter(Arc::clone(&drops));
    let doomed = message_woken_poller("doomed", move |_: &mut Context<'_>| {
        panic!("{}", guard.0.load(RELAXED))
    });
    let reported = Arc::new(Mutex::new(None));
    let theirs = Arc::clone(&reported);
    let doomed = doomed.on_panic(move |context, panicked| {
        *theirs.lock().unwrap() = Some((context.thread_id(), panicked));
    });
    let plan = ThreadBuilder::new("two")
        .add_poller(doomed)
        .add_poller(message_woken_poller("other", idle_poller(&polls)));
    let thread = world.directory.spawn(plan).unwrap();
    world.step_all(10);
    assert!(count_of(&polls) >= 8, "{}", count_of(&polls));
    assert_eq!(count_of(&drops), 1);
    assert_eq!(world.event_kinds(), ["thread-started", "poller-panicked"]);
    let (on, panicked) = reported.lock().unwrap().take().unwrap();
    assert_eq!(
        (on, panicked.poller.as_str(), panicked.panic.as_str()),
        (thread.id(), "doomed", "0")
    );
    assert_eq!(world.events()[1], Event::PollerPanicked(panicked));
    assert_eq!(world.directory.sample_statistics(world.now()).threads[0].pollers.len(), 1);
}

/// Panics in the named call.
struct PanickingPoller(&'static str);

impl PanickingPoller {
    fn panic_if_at(&self, at: &str) {
        assert!(self.0 != at, "in {at}");
    }
}

impl Poller for PanickingPoller {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        self.panic_if_at("poll");
        PollResult::Idle
    }

    fn flush(&mut self) {
        self.panic_if_at("flush");
    }

    fn handle_message(&mut self, _: [u64; 2], _: &mut Context<'_>) {
        self.panic_if_at("message");
    }

    fn arm(&mut self) -> PollResult {
        self.panic_if_at("arm");
        PollResult::Idle
    }

    fn disarm(&mut self) {
        self.panic_if_at("disarm");
    }

    fn wake_at(&self) -> tenmil_base::Instant {
        self.panic_if_at("wake_at");
        tenmil_base::Instant::NEVER
    }

    fn try_detach(&mut self, _: DetachReason) -> bool {
        self.panic_if_at("detach");
        true
    }

    fn attach(&mut self) {
        self.panic_if_at("attach");
    }
}

impl Drop for PanickingPoller {
    fn drop(&mut self) {
        if self.0 == "drop" {
            panic!("in drop");
        }
    }
}

#[test]
fn thread_survives_a_poller_panic_in_any_call_and_still_migrates_and_ends() {
    for at in ["poll", "flush", "message", "arm", "disarm", "wake_at", "detach", "attach", "drop"] {
        let mut world = Simulation::new_adaptive(0, 2);
        let polls = new_count();
        let plan = ThreadBuilder::new("fragile")
            .on_reactor(R0)
            .add_poller(message_woken_poller("fragile", PanickingPoller(at)))
            .add_poller(message_woken_poller("other", idle_poller(&polls)));
        let thread = world.directory.spawn(plan).unwrap();
        world.run_until_idle();
        thread.send(Message::Data { poller: FIRST, words: [0; 2] }).unwrap();
        world.run_until_idle();
        world.directory.migrate_thread(thread.id(), R1).unwrap();
        world.run_until_idle();
        assert_eq!(thread.reactor(), R1, "{at}");
        let before = count_of(&polls);
        world.send_closure(&thread, |_| ());
        world.run_until_idle();
        assert!(count_of(&polls) > before, "{at}");
        world.send_closure(&thread, |context| context.request_thread_end());
        world.run_until_idle();
        assert!(thread.has_ended(), "{at}");
        let panics = world.event_kinds().iter().filter(|kind| **kind == "poller-panicked").count();
        assert_eq!(panics, 1, "{at}: {:?}", world.events());
    }
}

#[test]
fn panicking_message_is_reported_and_the_next_one_runs() {
    let mut world = Simulation::new_always_polling(1);
    let thread = world.directory.spawn(ThreadBuilder::new("calls")).unwrap();
    let ran = new_count();
    let theirs = Arc::clone(&ran);
    world.send_closure(&thread, |_| panic!("on purpose"));
    world.send_closure(&thread, move |_| _ = theirs.fetch_add(1, RELAXED));
    world.step_all(3);
    assert_eq!(count_of(&ran), 1);
    assert_eq!(world.event_kinds(), ["thread-started", "message-panicked"]);
}

#[test]
fn full_mailbox_returns_the_message() {
    let mut world = Simulation::new_always_polling(1);
    let polls = new_count();
    let plan = ThreadBuilder::new("small")
        .mailbox_size(2)
        .add_poller(message_woken_poller("only", idle_poller(&polls)));
    let thread = world.directory.spawn(plan).unwrap();
    let words = |number| Message::Data { poller: FIRST, words: [number, 0] };
    assert!(thread.send(words(0)).is_ok() && thread.send(words(1)).is_ok());
    assert!(matches!(thread.send(words(2)), Err(Message::Data { words: [2, 0], .. })));
    assert!(!thread.has_ended());
    world.step_all(1);
    let mut many = vec![words(2), words(3), words(4)];
    assert_eq!(thread.send_many(&mut many), 2);
    assert!(matches!(many[..], [Message::Data { words: [4, 0], .. }]));
}

#[test]
fn pending_messages_are_dropped_when_a_thread_ends_and_later_ones_returned() {
    let mut world = Simulation::new_always_polling(1);
    let (ran, drops) = (new_count(), new_count());
    let thread = world.directory.spawn(ThreadBuilder::new("ends")).unwrap();
    world.step_all(1);
    for _ in 0..100 {
        let (ran, guard) = (Arc::clone(&ran), DropCounter(Arc::clone(&drops)));
        world.send_closure(&thread, move |_| {
            ran.fetch_add(1, RELAXED);
            drop(guard);
        });
    }
    world.directory.end_thread(thread.id()).unwrap();
    world.step_all(3);
    assert_eq!(count_of(&drops), 100);
    assert!(count_of(&ran) < 100, "it ended before it had run them all");
    assert!(thread.has_ended() && thread.send_closure(|_| ()).is_err());
    assert_eq!(world.event_kinds(), ["thread-started", "thread-ended"]);
    assert_eq!(world.directory.sample_statistics(world.now()).threads, []);
    let refused = world.directory.migrate_thread(thread.id(), R0).unwrap_err();
    assert_eq!(refused, ReactorError::UnknownThread(thread.id()));
}

fn thread_with_ring(ring: PinnedRingPoller) -> ThreadBuilder {
    let woken_by = PollerWake::OnlyWhileBusy("waits for what it has in flight");
    ThreadBuilder::new("ring")
        .on_reactor(R0)
        .add_poller(PollerBuilder::polled_each_iteration("ring", woken_by, ring))
}

#[test]
fn migration_waits_for_io_in_flight() {
    let mut world = Simulation::new_adaptive(0, 2);
    let in_flight = new_count();
    let ring = PinnedRingPoller::new(&in_flight, 3);
    let log = Arc::clone(&ring.log);
    let thread = world.directory.spawn(thread_with_ring(ring)).unwrap();
    world.run_until_idle();
    in_flight.store(128, RELAXED);
    world.directory.migrate_thread(thread.id(), R1).unwrap();
    world.step_all(128);
    assert_eq!(thread.reactor(), R0, "it is still draining");
    world.run_until_idle();
    assert_eq!((thread.reactor(), count_of(&in_flight)), (R1, 0));
    assert_eq!(*log.lock().unwrap(), ["attached", "detached", "attached"]);
    assert_eq!(world.event_kinds(), ["thread-started", "thread-migrated"]);
    let sample = world.directory.sample_statistics(world.now());
    assert_eq!((sample.threads[0].migrations, sample.reactors[1].migrations), (1, 1));
}

/// Detaches after being asked several times.
struct SlowDetachPoller(u32);

impl Poller for SlowDetachPoller {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        PollResult::Idle
    }

    fn try_detach(&mut self, _: DetachReason) -> bool {
        self.0 = self.0.saturating_sub(1);
        self.0 == 0
    }
}

#[test]
fn reactor_does_not_sleep_while_a_thread_detaches() {
    let mut world = Simulation::new_adaptive(0, 2);
    let plan = ThreadBuilder::new("reluctant")
        .on_reactor(R0)
        .add_poller(message_woken_poller("reluctant", SlowDetachPoller(500)));
    let thread = world.directory.spawn(plan).unwrap();
    world.run_until_idle();
    world.directory.migrate_thread(thread.id(), R1).unwrap();
    world.run_until_idle();
    assert_eq!(thread.reactor(), R1);
}

#[test]
fn migration_times_out_if_a_poller_does_not_detach_but_ending_does_not() {
    let options = ReactorOptions { drain_max: Span::from_ms(5), ..ReactorOptions::default() };
    let mut world = Simulation::new(0, 2, &options);
    let in_flight = new_count();
    in_flight.store(1, RELAXED);
    let polls = new_count();
    let ring = PinnedRingPoller::new(&in_flight, u64::MAX);
    let plan =
        thread_with_ring(ring).add_poller(message_woken_poller("other", idle_poller(&polls)));
    let thread = world.directory.spawn(plan).unwrap();
    world.step_all(2);
    world.directory.migrate_thread(thread.id(), R1).unwrap();
    world.step_all(4);
    world.advance_clock(Span::from_ms(6));
    world.step_all(4);
    assert_eq!(thread.reactor(), R0);
    assert_eq!(world.event_kinds(), ["thread-started", "migration-timeout"]);
    let before = count_of(&polls);
    world.step_all(10);
    assert_eq!(count_of(&polls), before + 10, "all of its pollers are attached again");
    world.directory.end_thread(thread.id()).unwrap();
    world.step_all(4);
    assert!(!thread.has_ended());
    world.advance_clock(Span::from_ms(6));
    world.step_all(4);
    let Some(Event::ThreadEnded { dropped_poller: cut_off, .. }) = world.events().pop() else {
        panic!()
    };
    assert_eq!(cut_off.as_deref(), Some("ring"));
}

/// Starts nothing after a detach request, and never detaches.
struct NeverDetachingPoller {
    heard: SharedCount,
    is_leaving: bool,
}

impl Poller for NeverDetachingPoller {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        self.heard.fetch_add(u64::from(!self.is_leaving), RELAXED);
        PollResult::Idle
    }

    fn try_detach(&mut self, _: DetachReason) -> bool {
        self.is_leaving = true;
        false
    }

    fn attach(&mut self) {
        self.is_leaving = false;
    }
}

#[test]
fn poller_continues_after_a_timed_out_migration() {
    let options = ReactorOptions { drain_max: Span::from_ms(5), ..ReactorOptions::default() };
    // Once with a poller that panics when asked, before the others are.
    for is_fragile in [false, true] {
        let mut world = Simulation::new(0, 2, &options);
        let heard = new_count();
        let deaf = NeverDetachingPoller { heard: Arc::clone(&heard), is_leaving: false };
        let mut plan = ThreadBuilder::new("deaf").on_reactor(R0);
        if is_fragile {
            plan = plan.add_poller(message_woken_poller("second", SecondAttachPanicPoller(0)));
        }
        let thread =
            world.directory.spawn(plan.add_poller(message_woken_poller("deaf", deaf))).unwrap();
        world.step_all(2);
        world.directory.migrate_thread(thread.id(), R1).unwrap();
        world.step_all(4);
        let before = count_of(&heard);
        world.step_all(4);
        assert_eq!(count_of(&heard), before, "it begins nothing while it is asked to leave");
        world.advance_clock(Span::from_ms(6));
        world.step_all(4);
        assert_eq!(thread.reactor(), R0);
        let before = count_of(&heard);
        world.step_all(10);
        assert_eq!(count_of(&heard), before + 10, "and continues when the request has timed out");
    }
}

/// Panics when attached for the second time.
struct SecondAttachPanicPoller(u32);

impl Poller for SecondAttachPanicPoller {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        PollResult::Idle
    }

    fn attach(&mut self) {
        self.0 += 1;
        assert!(self.0 < 2, "on purpose");
    }
}

#[test]
fn messages_sent_during_migration_arrive_in_order() {
    let mut world = Simulation::new_adaptive(0, 2);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let thread = world.directory.spawn(ThreadBuilder::new("post").on_reactor(R0)).unwrap();
    world.run_until_idle();
    world.directory.migrate_thread(thread.id(), R1).unwrap();
    for number in 0..200 {
        let seen = Arc::clone(&seen);
        world.send_closure(&thread, move |context| {
            seen.lock().unwrap().push((number, context.reactor_id()))
        });
        // The old reactor runs slowly, and the new one now and then.
        if number % 3 == 0 {
            world.step_reactor(0);
        }
        if number % 7 == 0 {
            world.step_reactor(1);
        }
    }
    world.run_until_idle();
    let seen = seen.lock().unwrap();
    assert!(seen.iter().map(|(number, _)| *number).eq(0..200), "{seen:?}");
    assert_eq!(seen[199].1, R1);
}

#[test]
fn masks_and_reactor_numbers_are_checked_before_migration() {
    let world = Simulation::new_always_polling(2);
    let refused = world
        .directory
        .spawn(ThreadBuilder::new("far").affinity(CpuList::from_iter([7])))
        .unwrap_err();
    assert_eq!(refused.to_string(), "thread 'far': mask 7, expected one of the cores 0-1");
    let unknown = ReactorId(9);
    let refused = world.directory.spawn(ThreadBuilder::new("far").on_reactor(unknown)).unwrap_err();
    assert_eq!(refused.reason, ReactorError::UnknownReactor { reactor: unknown, count: 2 });
    let plan = ThreadBuilder::new("near").affinity(CpuList::from_iter([1]));
    let thread = world.directory.spawn(plan).unwrap();
    assert_eq!(thread.reactor(), R1);
    let refused = world.directory.migrate_thread(thread.id(), R0).unwrap_err();
    assert_eq!(refused.to_string(), "thread 'near': mask 1, expected one of the cores 0");
}

#[test]
fn changed_mask_migrates_the_thread_if_needed_and_stays_in_effect() {
    let mut world = Simulation::new_always_polling(3);
    let thread = world.directory.spawn(ThreadBuilder::new("roamer").on_reactor(R0)).unwrap();
    world.directory.spawn(ThreadBuilder::new("settler").on_reactor(R1)).unwrap();
    world.step_all(2);
    let set = |mask: Option<&[u32]>| {
        let mask = mask.map(|cores| cores.iter().copied().collect());
        world.directory.set_thread_mask(thread.id(), mask)
    };
    assert_eq!(set(Some(&[0, 1])), Ok(R0), "it may stay");
    assert_eq!(set(Some(&[1, 2])), Ok(ReactorId(2)), "where there is more room");
    let refused = set(Some(&[7])).unwrap_err();
    assert_eq!(refused.to_string(), "thread 'roamer': mask 7, expected one of the cores 0-2");
    world.step_all(4);
    assert_eq!(thread.reactor(), ReactorId(2));
    let sample = world.directory.sample_statistics(world.now());
    assert_eq!(sample.threads[0].mask, Some(CpuList::from_iter([1, 2])));
    assert!(world.directory.migrate_thread(thread.id(), R0).is_err());
    assert_eq!(world.directory.set_thread_mask(thread.id(), None), Ok(ReactorId(2)));
    assert_eq!(world.directory.migrate_thread(thread.id(), R0), Ok(()));
    world.step_all(4);
    assert_eq!(thread.reactor(), R0);
    let none = world.directory.set_thread_mask(crate::ThreadId(9), None);
    assert_eq!(none, Err(ReactorError::UnknownThread(crate::ThreadId(9))));
}

#[test]
fn threads_are_spread_and_a_full_inbox_returns_the_builder() {
    let options = ReactorOptions { inbox: 2, ..ReactorOptions::default() };
    let world = Simulation::new(0, 2, &options);
    let spawn = |name: &str| world.directory.spawn(ThreadBuilder::new(name));
    let homes: Vec<_> = (0..4).map(|_| spawn("one").unwrap().reactor().0).collect();
    assert_eq!(homes, [0, 1, 0, 1]);
    let polls = new_count();
    let plan =
        ThreadBuilder::new("late").add_poller(message_woken_poller("poller", idle_poller(&polls)));
    let refused = world.directory.spawn(plan).unwrap_err();
    assert!(matches!(refused.reason, ReactorError::InboxFull(_)), "{refused}");
    assert_eq!((refused.builder.name.as_str(), refused.builder.pollers.len()), ("late", 1));
}

#[test]
fn stopped_reactor_ends_its_threads_and_returns_those_in_transit() {
    let mut world = Simulation::new_adaptive(0, 2);
    let in_flight = new_count();
    let ring = PinnedRingPoller::new(&in_flight, 5);
    let log = Arc::clone(&ring.log);
    let thread = world.directory.spawn(thread_with_ring(ring)).unwrap();
    let ended = world.directory.spawn(ThreadBuilder::new("ends").on_reactor(R1)).unwrap();
    world.run_until_idle();
    in_flight.store(20, RELAXED);
    world.directory.migrate_thread(thread.id(), R1).unwrap();
    world.directory.stop_reactor(R1).unwrap();
    world.run_until_idle();
    assert_eq!(world.members[1].stage, SimReactorState::Ended);
    assert!(ended.has_ended() && !thread.has_ended());
    assert_eq!(thread.reactor(), R0);
    assert_eq!(*log.lock().unwrap(), ["attached", "detached", "attached"]);
    assert_eq!(world.directory.stop_reactor(R1), Err(ReactorError::Stopped(R1)));
    assert_eq!(world.event_kinds()[2..], ["thread-ended"], "and nothing has moved");
    world.directory.stop_reactor(R0).unwrap();
    world.run_until_idle();
    assert!(thread.has_ended());
}

struct CountingProvider {
    opened: SharedCount,
    closed: SharedCount,
}

impl ChannelProvider for CountingProvider {
    type Channel = u64;
    type Refusal = &'static str;

    fn open_channel(&self) -> Result<u64, &'static str> {
        if self.opened.fetch_add(1, RELAXED) < 10 { Ok(0) } else { Err("no more than ten") }
    }

    fn close_channel(&self, channel: u64) {
        self.closed.fetch_add(channel, RELAXED);
    }
}

fn counting_provider() -> (SharedProvider<CountingProvider>, SharedCount, SharedCount) {
    let (opened, closed) = (new_count(), new_count());
    let cache = CountingProvider { opened: Arc::clone(&opened), closed: Arc::clone(&closed) };
    (SharedProvider::new(cache), opened, closed)
}

#[test]
fn channel_opens_at_first_use_and_closes_after_the_last() {
    let mut world = Simulation::new_adaptive(0, 2);
    let (object, opened, closed) = counting_provider();
    let thread = world.directory.spawn(ThreadBuilder::new("user").on_reactor(R0)).unwrap();
    let held = Arc::new(Mutex::new(Vec::new()));
    for _ in 0..2 {
        let (object, held) = (object.clone(), Arc::clone(&held));
        world.send_closure(&thread, move |context| {
            let channel = context.open_channel(&object).unwrap();
            *context.channel(&channel).unwrap() += 50;
            held.lock().unwrap().push(channel);
        });
    }
    world.run_until_idle();
    assert_eq!((count_of(&opened), object.threads_with_channel().len()), (1, 1));
    world.directory.migrate_thread(thread.id(), R1).unwrap();
    world.run_until_idle();
    drop(held.lock().unwrap().pop());
    world.send_closure(&thread, |_| ());
    world.run_until_idle();
    assert_eq!((count_of(&closed), object.threads_with_channel().len()), (0, 1), "one use is left");
    held.lock().unwrap().clear();
    world.send_closure(&thread, |_| ());
    world.run_until_idle();
    assert_eq!(
        (count_of(&closed), object.threads_with_channel().len()),
        (100, 0),
        "both uses were of one channel"
    );
}

#[test]
fn every_channel_is_visited_once_on_its_thread_and_then_the_origin_is_notified() {
    let mut world = Simulation::new_adaptive(0, 2);
    let (object, ..) = counting_provider();
    let mut plans: Vec<_> =
        (0..6).map(|number| ThreadBuilder::new(&format!("user-{number}"))).collect();
    plans[3] = ThreadBuilder::new("full").mailbox_size(1);
    let threads: Vec<_> =
        plans.into_iter().map(|plan| world.directory.spawn(plan).unwrap()).collect();
    let held = Arc::new(Mutex::new(Vec::new()));
    for thread in &threads[1..] {
        let (object, held) = (object.clone(), Arc::clone(&held));
        world.send_closure(thread, move |context| {
            held.lock().unwrap().push(context.open_channel(&object).unwrap())
        });
        world.run_until_idle();
    }
    let done = new_count();
    let theirs = (object.clone(), Arc::clone(&done));
    world.send_closure(&threads[0], move |context| {
        let (object, done) = theirs;
        let step = |channel: &mut u64| *channel += 1;
        context.for_each_channel(&object, step, move |_| _ = done.fetch_add(1, RELAXED));
    });
    // One mailbox is full, and another thread ends before the visitor arrives.
    world.send_closure(&threads[3], |_| ());
    world.directory.end_thread(threads[4].id()).unwrap();
    world.run_until_idle();
    assert_eq!(count_of(&done), 1);
    let sums = new_count();
    for channel in held.lock().unwrap().drain(..) {
        let sums = Arc::clone(&sums);
        for thread in threads.iter().filter(|thread| !thread.has_ended()) {
            let (object, sums) = (channel.shared_provider().clone(), Arc::clone(&sums));
            world.send_closure(thread, move |context| {
                let Ok(own) = context.open_channel(&object) else { return };
                sums.fetch_max(*context.channel(&own).unwrap(), RELAXED);
            });
            world.run_until_idle();
        }
    }
    assert_eq!(count_of(&sums), 1, "no channel was visited twice");
}
