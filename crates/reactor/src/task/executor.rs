//! The executor: a table of tasks and the list of those that are ready.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Poll, Waker};

use base::Instant;
use host::Receiver;

use super::shared::{Shared, Task};
use super::{Handle, Tasks, here};
use crate::context::Context;
use crate::event::Event;
use crate::panicked::panic_text;
use crate::poller::{Found, Poller, Registration, WokenBy};

/// A poller that polls futures. When it is dropped it drops them all, and those who wait for them
/// are told.
pub struct Executor {
    shared: Arc<Shared>,
    name: String,
    incoming: Receiver<Task>,
    places: Box<[Option<Task>]>,
    wakers: Box<[Waker]>,
    free: Vec<u32>,
    ready: VecDeque<u32>,
    /// Those that woke while others were polled; empty between polls.
    woken: Vec<u32>,
    /// When the first alarm is due, or was before it was given up.
    next_alarm: Instant,
}

/// How many tasks are polled in a turn.
const BATCH: usize = 32;

impl Executor {
    /// An executor for at most `tasks_max` tasks, to be added to `thread` and no other.
    pub fn new(thread: &Handle, name: &str, tasks_max: u32) -> (Self, Tasks) {
        let (shared, incoming) = Shared::new(thread, tasks_max);
        let count = tasks_max as usize;
        let executor = Self {
            wakers: shared.wakers(),
            shared: Arc::clone(&shared),
            name: name.to_owned(),
            incoming,
            places: (0..count).map(|_| None).collect(),
            free: (0..tasks_max).rev().collect(),
            ready: VecDeque::with_capacity(count),
            woken: Vec::with_capacity(count),
            next_alarm: Instant::NEVER,
        };
        (executor, Tasks(shared))
    }

    /// As a poller of its thread.
    pub fn registration(self) -> Registration {
        let name = self.name.clone();
        // Tasks and wake-ups from outside ring the thread's bell, as messages do.
        Registration::active(&name, WokenBy::Messages, self)
    }

    /// Takes in what came from outside. Returns whether there was anything.
    fn heed(&mut self, now: Instant) -> bool {
        let Self { shared, incoming, places, free, ready, .. } = self;
        if !shared.take_news() {
            return false;
        }
        while let Some(task) = incoming.receive() {
            // Whoever sent it has reserved a place.
            let Some(index) = free.pop() else { unreachable!("a task without a place") };
            places[index as usize] = Some(task);
            ready.extend(shared.queue(index));
        }
        shared.take_woken(|index| ready.extend(shared.queue(index)));
        if let Some(mut alarms) = self.shared.new_alarms() {
            self.next_alarm = alarms.set(now);
        }
        true
    }

    /// Wakes those whose alarms are due. Returns whether there were any.
    fn ring_alarms(&mut self, now: Instant) -> bool {
        if now < self.next_alarm {
            return false;
        }
        let due = |shared: &Shared| shared.alarms().take_due(now);
        // What a waker does is not known: not under the lock.
        while let Some(waker) = due(&self.shared) {
            waker.wake();
        }
        self.next_alarm = self.shared.alarms().next();
        true
    }

    /// Polls tasks that are ready. Returns how many.
    fn run(&mut self, context: &Context<'_>) -> usize {
        let count = self.ready.len().min(BATCH);
        for _ in 0..count {
            if let Some(index) = self.ready.pop_front() {
                self.run_one(index, context);
            }
        }
        count
    }

    fn run_one(&mut self, index: u32, context: &Context<'_>) {
        self.shared.unqueue(index);
        let place = &mut self.places[index as usize];
        let Some(task) = place else { return };
        let mut waking = std::task::Context::from_waker(&self.wakers[index as usize]);
        let polled = catch_unwind(AssertUnwindSafe(|| task.as_mut().poll(&mut waking)));
        let panic = match polled {
            Ok(Poll::Pending) => return,
            Ok(Poll::Ready(panic)) => panic,
            Err(panic) => Some(panic_text(&*panic)),
        };
        let dropped = catch_unwind(AssertUnwindSafe(|| *place = None));
        self.free.push(index);
        self.shared.give_back();
        let panic = panic.or_else(|| dropped.err().map(|panic| panic_text(&*panic)));
        if let Some(panic) = panic {
            let (thread, executor) = (context.thread(), self.name.clone());
            let event = Event::TaskPanicked { thread, executor, panic };
            context.directory().note(context.now(), event);
        }
    }
}

impl Poller for Executor {
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        let now = context.now();
        if self.ready.is_empty() && !self.shared.has_news() && now < self.next_alarm {
            return Found::Nothing;
        }
        let visit = here::enter(self.shared.number(), std::mem::take(&mut self.woken));
        let mut found = self.heed(now) | self.ring_alarms(now);
        found |= self.run(context) > 0;
        // Alarms that tasks have set just now count from this turn on.
        found |= self.heed(now);
        self.woken = visit.leave();
        self.ready.extend(self.woken.drain(..));
        Found::from_count(usize::from(found))
    }

    fn arm(&mut self) -> Found {
        Found::from_count(usize::from(!self.ready.is_empty() || self.shared.has_news()))
    }

    fn wake_at(&self) -> Instant {
        self.next_alarm
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        self.shared.close();
        for place in &mut self.places {
            // A panic of one must not keep the others from being dropped; nobody is left to tell.
            let _ = catch_unwind(AssertUnwindSafe(|| *place = None));
        }
    }
}

impl fmt::Debug for Executor {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, free, ready, .. } = self;
        let mut out = out.debug_struct("Executor");
        out.field("name", name).field("free", &free.len()).field("ready", &ready.len());
        out.finish_non_exhaustive()
    }
}
