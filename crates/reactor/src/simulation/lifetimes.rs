//! Panics, migrations, exits, channels, and the fate of messages meanwhile.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use tenmil_base::Span;
use tenmil_linux::CpuList;

use super::test_pollers::{FIRST, RELAXED, Ring, Tally, active, count, idle, tally};
use super::{R0, R1, SimReactorState, Simulation};
use crate::{
    ChannelProvider, Context, DetachReason, Event, Message, PollResult, Poller, PollerBuilder,
    PollerWake, ReactorError, ReactorId, ReactorOptions, SharedProvider, ThreadBuilder,
};

/// Counts its drop.
struct Dropped(Tally);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_poller_that_panics_is_dropped_and_told_of_and_the_others_go_on() {
    let mut world = Simulation::always(1);
    let (polls, drops) = (tally(), tally());
    let guard = Dropped(Arc::clone(&drops));
    let doomed = active("doomed", move |_: &mut Context<'_>| panic!("{}", guard.0.load(RELAXED)));
    let told = Arc::new(Mutex::new(None));
    let theirs = Arc::clone(&told);
    let doomed = doomed.on_panic(move |context, panicked| {
        *theirs.lock().unwrap() = Some((context.thread(), panicked));
    });
    let plan = ThreadBuilder::new("two").poller(doomed).poller(active("other", idle(&polls)));
    let thread = world.directory.spawn(plan).unwrap();
    world.iterate_all(10);
    assert!(count(&polls) >= 8, "{}", count(&polls));
    assert_eq!(count(&drops), 1);
    assert_eq!(world.kinds(), ["thread-started", "poller-panicked"]);
    let (on, panicked) = told.lock().unwrap().take().unwrap();
    assert_eq!(
        (on, panicked.poller.as_str(), panicked.panic.as_str()),
        (thread.id(), "doomed", "0")
    );
    assert_eq!(world.events()[1], Event::PollerPanicked(panicked));
    assert_eq!(world.directory.sample(world.now()).threads[0].pollers.len(), 1);
}

/// Panics in the named call.
struct Fragile(&'static str);

impl Fragile {
    fn may_panic(&self, at: &str) {
        assert!(self.0 != at, "in {at}");
    }
}

impl Poller for Fragile {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        self.may_panic("poll");
        PollResult::Idle
    }

    fn flush(&mut self) {
        self.may_panic("flush");
    }

    fn message(&mut self, _: [u64; 2], _: &mut Context<'_>) {
        self.may_panic("message");
    }

    fn arm(&mut self) -> PollResult {
        self.may_panic("arm");
        PollResult::Idle
    }

    fn disarm(&mut self) {
        self.may_panic("disarm");
    }

    fn wake_at(&self) -> tenmil_base::Instant {
        self.may_panic("wake_at");
        tenmil_base::Instant::NEVER
    }

    fn detach(&mut self, _: DetachReason) -> bool {
        self.may_panic("detach");
        true
    }

    fn attach(&mut self) {
        self.may_panic("attach");
    }
}

impl Drop for Fragile {
    fn drop(&mut self) {
        if self.0 == "drop" {
            panic!("in drop");
        }
    }
}

#[test]
fn wherever_a_poller_panics_its_thread_lives_on_and_moves_and_ends() {
    for at in ["poll", "flush", "message", "arm", "disarm", "wake_at", "detach", "attach", "drop"] {
        let mut world = Simulation::adaptive(0, 2);
        let polls = tally();
        let plan = ThreadBuilder::new("fragile")
            .on(R0)
            .poller(active("fragile", Fragile(at)))
            .poller(active("other", idle(&polls)));
        let thread = world.directory.spawn(plan).unwrap();
        world.run_until_idle();
        thread.send(Message::Data { poller: FIRST, words: [0; 2] }).unwrap();
        world.run_until_idle();
        world.directory.move_thread(thread.id(), R1).unwrap();
        world.run_until_idle();
        assert_eq!(thread.reactor(), R1, "{at}");
        let before = count(&polls);
        world.call(&thread, |_| ());
        world.run_until_idle();
        assert!(count(&polls) > before, "{at}");
        world.call(&thread, |context| context.end());
        world.run_until_idle();
        assert!(thread.is_gone(), "{at}");
        let panics = world.kinds().iter().filter(|kind| **kind == "poller-panicked").count();
        assert_eq!(panics, 1, "{at}: {:?}", world.events());
    }
}

#[test]
fn a_message_that_panics_is_told_of_and_the_next_one_runs() {
    let mut world = Simulation::always(1);
    let thread = world.directory.spawn(ThreadBuilder::new("calls")).unwrap();
    let ran = tally();
    let theirs = Arc::clone(&ran);
    world.call(&thread, |_| panic!("on purpose"));
    world.call(&thread, move |_| _ = theirs.fetch_add(1, RELAXED));
    world.iterate_all(3);
    assert_eq!(count(&ran), 1);
    assert_eq!(world.kinds(), ["thread-started", "message-panicked"]);
}

#[test]
fn a_full_mailbox_gives_the_message_back() {
    let mut world = Simulation::always(1);
    let polls = tally();
    let plan = ThreadBuilder::new("small").mailbox(2).poller(active("only", idle(&polls)));
    let thread = world.directory.spawn(plan).unwrap();
    let words = |number| Message::Data { poller: FIRST, words: [number, 0] };
    assert!(thread.send(words(0)).is_ok() && thread.send(words(1)).is_ok());
    assert!(matches!(thread.send(words(2)), Err(Message::Data { words: [2, 0], .. })));
    assert!(!thread.is_gone());
    world.iterate_all(1);
    let mut many = vec![words(2), words(3), words(4)];
    assert_eq!(thread.send_many(&mut many), 2);
    assert!(matches!(many[..], [Message::Data { words: [4, 0], .. }]));
}

#[test]
fn what_was_not_run_when_a_thread_ends_is_dropped_and_later_messages_come_back() {
    let mut world = Simulation::always(1);
    let (ran, drops) = (tally(), tally());
    let thread = world.directory.spawn(ThreadBuilder::new("ends")).unwrap();
    world.iterate_all(1);
    for _ in 0..100 {
        let (ran, guard) = (Arc::clone(&ran), Dropped(Arc::clone(&drops)));
        world.call(&thread, move |_| {
            ran.fetch_add(1, RELAXED);
            drop(guard);
        });
    }
    world.directory.end_thread(thread.id()).unwrap();
    world.iterate_all(3);
    assert_eq!(count(&drops), 100);
    assert!(count(&ran) < 100, "it ended before it had run them all");
    assert!(thread.is_gone() && thread.call(|_| ()).is_err());
    assert_eq!(world.kinds(), ["thread-started", "thread-ended"]);
    assert_eq!(world.directory.sample(world.now()).threads, []);
    let refused = world.directory.move_thread(thread.id(), R0).unwrap_err();
    assert_eq!(refused, ReactorError::UnknownThread(thread.id()));
}

fn ring_plan(ring: Ring) -> ThreadBuilder {
    let woken_by = PollerWake::OnlyWhileBusy("waits for what it has in flight");
    ThreadBuilder::new("ring").on(R0).poller(PollerBuilder::active("ring", woken_by, ring))
}

#[test]
fn a_move_waits_for_what_is_in_flight() {
    let mut world = Simulation::adaptive(0, 2);
    let in_flight = tally();
    let ring = Ring::new(&in_flight, 3);
    let log = Arc::clone(&ring.log);
    let thread = world.directory.spawn(ring_plan(ring)).unwrap();
    world.run_until_idle();
    in_flight.store(128, RELAXED);
    world.directory.move_thread(thread.id(), R1).unwrap();
    world.iterate_all(128);
    assert_eq!(thread.reactor(), R0, "it is still draining");
    world.run_until_idle();
    assert_eq!((thread.reactor(), count(&in_flight)), (R1, 0));
    assert_eq!(*log.lock().unwrap(), ["attached", "detached", "attached"]);
    assert_eq!(world.kinds(), ["thread-started", "thread-migrated"]);
    let sample = world.directory.sample(world.now());
    assert_eq!((sample.threads[0].migrations, sample.reactors[1].migrations), (1, 1));
}

/// Detaches after being asked several times.
struct Reluctant(u32);

impl Poller for Reluctant {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        PollResult::Idle
    }

    fn detach(&mut self, _: DetachReason) -> bool {
        self.0 = self.0.saturating_sub(1);
        self.0 == 0
    }
}

#[test]
fn nobody_sleeps_while_a_thread_is_asked_to_leave() {
    let mut world = Simulation::adaptive(0, 2);
    let plan = ThreadBuilder::new("reluctant").on(R0).poller(active("reluctant", Reluctant(500)));
    let thread = world.directory.spawn(plan).unwrap();
    world.run_until_idle();
    world.directory.move_thread(thread.id(), R1).unwrap();
    world.run_until_idle();
    assert_eq!(thread.reactor(), R1);
}

#[test]
fn a_move_is_given_up_when_a_poller_does_not_let_go_and_an_end_is_not() {
    let options = ReactorOptions { drain_max: Span::from_ms(5), ..ReactorOptions::default() };
    let mut world = Simulation::new(0, 2, &options);
    let in_flight = tally();
    in_flight.store(1, RELAXED);
    let polls = tally();
    let ring = Ring::new(&in_flight, u64::MAX);
    let plan = ring_plan(ring).poller(active("other", idle(&polls)));
    let thread = world.directory.spawn(plan).unwrap();
    world.iterate_all(2);
    world.directory.move_thread(thread.id(), R1).unwrap();
    world.iterate_all(4);
    world.pass_time(Span::from_ms(6));
    world.iterate_all(4);
    assert_eq!(thread.reactor(), R0);
    assert_eq!(world.kinds(), ["thread-started", "migration-timeout"]);
    let before = count(&polls);
    world.iterate_all(10);
    assert_eq!(count(&polls), before + 10, "all of its pollers are attached again");
    world.directory.end_thread(thread.id()).unwrap();
    world.iterate_all(4);
    assert!(!thread.is_gone());
    world.pass_time(Span::from_ms(6));
    world.iterate_all(4);
    let Some(Event::ThreadEnded { dropped_poller: cut_off, .. }) = world.events().pop() else {
        panic!()
    };
    assert_eq!(cut_off.as_deref(), Some("ring"));
}

/// Starts nothing after a detach request, and never detaches.
struct Deaf {
    heard: Tally,
    is_leaving: bool,
}

impl Poller for Deaf {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        self.heard.fetch_add(u64::from(!self.is_leaving), RELAXED);
        PollResult::Idle
    }

    fn detach(&mut self, _: DetachReason) -> bool {
        self.is_leaving = true;
        false
    }

    fn attach(&mut self) {
        self.is_leaving = false;
    }
}

#[test]
fn whoever_has_held_on_to_a_move_that_was_given_up_goes_on_as_before() {
    let options = ReactorOptions { drain_max: Span::from_ms(5), ..ReactorOptions::default() };
    // Once with a poller that panics when asked, before the others are.
    for is_fragile in [false, true] {
        let mut world = Simulation::new(0, 2, &options);
        let heard = tally();
        let deaf = Deaf { heard: Arc::clone(&heard), is_leaving: false };
        let mut plan = ThreadBuilder::new("deaf").on(R0);
        if is_fragile {
            plan = plan.poller(active("second", Second(0)));
        }
        let thread = world.directory.spawn(plan.poller(active("deaf", deaf))).unwrap();
        world.iterate_all(2);
        world.directory.move_thread(thread.id(), R1).unwrap();
        world.iterate_all(4);
        let before = count(&heard);
        world.iterate_all(4);
        assert_eq!(count(&heard), before, "it begins nothing while it is asked to leave");
        world.pass_time(Span::from_ms(6));
        world.iterate_all(4);
        assert_eq!(thread.reactor(), R0);
        let before = count(&heard);
        world.iterate_all(10);
        assert_eq!(count(&heard), before + 10, "and goes on when nobody asks any more");
    }
}

/// Panics when attached for the second time.
struct Second(u32);

impl Poller for Second {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        PollResult::Idle
    }

    fn attach(&mut self) {
        self.0 += 1;
        assert!(self.0 < 2, "on purpose");
    }
}

#[test]
fn messages_that_are_sent_during_a_move_arrive_in_order_at_the_new_home() {
    let mut world = Simulation::adaptive(0, 2);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let thread = world.directory.spawn(ThreadBuilder::new("post").on(R0)).unwrap();
    world.run_until_idle();
    world.directory.move_thread(thread.id(), R1).unwrap();
    for number in 0..200 {
        let seen = Arc::clone(&seen);
        world.call(&thread, move |context| seen.lock().unwrap().push((number, context.reactor())));
        // The old reactor runs slowly, and the new one now and then.
        if number % 3 == 0 {
            world.step(0);
        }
        if number % 7 == 0 {
            world.step(1);
        }
    }
    world.run_until_idle();
    let seen = seen.lock().unwrap();
    assert!(seen.iter().map(|(number, _)| *number).eq(0..200), "{seen:?}");
    assert_eq!(seen[199].1, R1);
}

#[test]
fn masks_and_numbers_are_checked_before_anything_moves() {
    let world = Simulation::always(2);
    let refused = world
        .directory
        .spawn(ThreadBuilder::new("far").affinity(CpuList::from_iter([7])))
        .unwrap_err();
    assert_eq!(refused.to_string(), "thread 'far': mask 7, expected one of the cores 0-1");
    let unknown = ReactorId(9);
    let refused = world.directory.spawn(ThreadBuilder::new("far").on(unknown)).unwrap_err();
    assert_eq!(refused.reason, ReactorError::UnknownReactor { reactor: unknown, count: 2 });
    let plan = ThreadBuilder::new("near").affinity(CpuList::from_iter([1]));
    let thread = world.directory.spawn(plan).unwrap();
    assert_eq!(thread.reactor(), R1);
    let refused = world.directory.move_thread(thread.id(), R0).unwrap_err();
    assert_eq!(refused.to_string(), "thread 'near': mask 1, expected one of the cores 0");
}

#[test]
fn a_mask_that_is_changed_moves_the_thread_if_it_must_and_holds_from_then_on() {
    let mut world = Simulation::always(3);
    let thread = world.directory.spawn(ThreadBuilder::new("roamer").on(R0)).unwrap();
    world.directory.spawn(ThreadBuilder::new("settler").on(R1)).unwrap();
    world.iterate_all(2);
    let set = |mask: Option<&[u32]>| {
        let mask = mask.map(|cores| cores.iter().copied().collect());
        world.directory.set_mask(thread.id(), mask)
    };
    assert_eq!(set(Some(&[0, 1])), Ok(R0), "it may stay");
    assert_eq!(set(Some(&[1, 2])), Ok(ReactorId(2)), "where there is more room");
    let refused = set(Some(&[7])).unwrap_err();
    assert_eq!(refused.to_string(), "thread 'roamer': mask 7, expected one of the cores 0-2");
    world.iterate_all(4);
    assert_eq!(thread.reactor(), ReactorId(2));
    let sample = world.directory.sample(world.now());
    assert_eq!(sample.threads[0].mask, Some(CpuList::from_iter([1, 2])));
    assert!(world.directory.move_thread(thread.id(), R0).is_err());
    assert_eq!(world.directory.set_mask(thread.id(), None), Ok(ReactorId(2)));
    assert_eq!(world.directory.move_thread(thread.id(), R0), Ok(()));
    world.iterate_all(4);
    assert_eq!(thread.reactor(), R0);
    let none = world.directory.set_mask(crate::ThreadId(9), None);
    assert_eq!(none, Err(ReactorError::UnknownThread(crate::ThreadId(9))));
}

#[test]
fn threads_are_spread_and_a_full_inbox_gives_the_plan_back() {
    let options = ReactorOptions { inbox: 2, ..ReactorOptions::default() };
    let world = Simulation::new(0, 2, &options);
    let spawn = |name: &str| world.directory.spawn(ThreadBuilder::new(name));
    let homes: Vec<_> = (0..4).map(|_| spawn("one").unwrap().reactor().0).collect();
    assert_eq!(homes, [0, 1, 0, 1]);
    let polls = tally();
    let plan = ThreadBuilder::new("late").poller(active("poller", idle(&polls)));
    let refused = world.directory.spawn(plan).unwrap_err();
    assert!(matches!(refused.reason, ReactorError::InboxFull(_)), "{refused}");
    assert_eq!((refused.builder.name.as_str(), refused.builder.pollers.len()), ("late", 1));
}

#[test]
fn a_stopped_reactor_has_ended_all_of_its_threads_and_those_on_their_way_to_it_come_back() {
    let mut world = Simulation::adaptive(0, 2);
    let in_flight = tally();
    let ring = Ring::new(&in_flight, 5);
    let log = Arc::clone(&ring.log);
    let thread = world.directory.spawn(ring_plan(ring)).unwrap();
    let ended = world.directory.spawn(ThreadBuilder::new("ends").on(R1)).unwrap();
    world.run_until_idle();
    in_flight.store(20, RELAXED);
    world.directory.move_thread(thread.id(), R1).unwrap();
    world.directory.stop(R1).unwrap();
    world.run_until_idle();
    assert_eq!(world.members[1].stage, SimReactorState::Ended);
    assert!(ended.is_gone() && !thread.is_gone());
    assert_eq!(thread.reactor(), R0);
    assert_eq!(*log.lock().unwrap(), ["attached", "detached", "attached"]);
    assert_eq!(world.directory.stop(R1), Err(ReactorError::Stopped(R1)));
    assert_eq!(world.kinds()[2..], ["thread-ended"], "and nothing has moved");
    world.directory.stop(R0).unwrap();
    world.run_until_idle();
    assert!(thread.is_gone());
}

struct Cache {
    opened: Tally,
    closed: Tally,
}

impl ChannelProvider for Cache {
    type Channel = u64;
    type Refusal = &'static str;

    fn open(&self) -> Result<u64, &'static str> {
        if self.opened.fetch_add(1, RELAXED) < 10 { Ok(0) } else { Err("no more than ten") }
    }

    fn close(&self, channel: u64) {
        self.closed.fetch_add(channel, RELAXED);
    }
}

fn cache() -> (SharedProvider<Cache>, Tally, Tally) {
    let (opened, closed) = (tally(), tally());
    let cache = Cache { opened: Arc::clone(&opened), closed: Arc::clone(&closed) };
    (SharedProvider::new(cache), opened, closed)
}

#[test]
fn a_channel_opens_at_its_first_use_and_closes_after_its_last() {
    let mut world = Simulation::adaptive(0, 2);
    let (object, opened, closed) = cache();
    let thread = world.directory.spawn(ThreadBuilder::new("user").on(R0)).unwrap();
    let held = Arc::new(Mutex::new(Vec::new()));
    for _ in 0..2 {
        let (object, held) = (object.clone(), Arc::clone(&held));
        world.call(&thread, move |context| {
            let channel = context.open(&object).unwrap();
            *context.channel(&channel).unwrap() += 50;
            held.lock().unwrap().push(channel);
        });
    }
    world.run_until_idle();
    assert_eq!((count(&opened), object.threads().len()), (1, 1));
    world.directory.move_thread(thread.id(), R1).unwrap();
    world.run_until_idle();
    drop(held.lock().unwrap().pop());
    world.call(&thread, |_| ());
    world.run_until_idle();
    assert_eq!((count(&closed), object.threads().len()), (0, 1), "one use is left");
    held.lock().unwrap().clear();
    world.call(&thread, |_| ());
    world.run_until_idle();
    assert_eq!((count(&closed), object.threads().len()), (100, 0), "both uses were of one channel");
}

#[test]
fn every_channel_is_visited_once_on_its_own_thread_and_then_the_asker_is_told() {
    let mut world = Simulation::adaptive(0, 2);
    let (object, ..) = cache();
    let mut plans: Vec<_> =
        (0..6).map(|number| ThreadBuilder::new(&format!("user-{number}"))).collect();
    plans[3] = ThreadBuilder::new("full").mailbox(1);
    let threads: Vec<_> =
        plans.into_iter().map(|plan| world.directory.spawn(plan).unwrap()).collect();
    let held = Arc::new(Mutex::new(Vec::new()));
    for thread in &threads[1..] {
        let (object, held) = (object.clone(), Arc::clone(&held));
        world
            .call(thread, move |context| held.lock().unwrap().push(context.open(&object).unwrap()));
        world.run_until_idle();
    }
    let done = tally();
    let theirs = (object.clone(), Arc::clone(&done));
    world.call(&threads[0], move |context| {
        let (object, done) = theirs;
        let step = |channel: &mut u64| *channel += 1;
        context.for_each_channel(&object, step, move |_| _ = done.fetch_add(1, RELAXED));
    });
    // One mailbox is full, and another thread ends before the visitor arrives.
    world.call(&threads[3], |_| ());
    world.directory.end_thread(threads[4].id()).unwrap();
    world.run_until_idle();
    assert_eq!(count(&done), 1);
    let sums = tally();
    for channel in held.lock().unwrap().drain(..) {
        let sums = Arc::clone(&sums);
        for thread in threads.iter().filter(|thread| !thread.is_gone()) {
            let (object, sums) = (channel.object().clone(), Arc::clone(&sums));
            world.call(thread, move |context| {
                let Ok(own) = context.open(&object) else { return };
                sums.fetch_max(*context.channel(&own).unwrap(), RELAXED);
            });
            world.run_until_idle();
        }
    }
    assert_eq!(count(&sums), 1, "nobody was visited twice");
}
