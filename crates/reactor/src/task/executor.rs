//! Executor: a table of tasks and the list of ready ones.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::task::{Poll, Waker};

use tenmil_base::Instant;
use tenmil_linux::Receiver;

use super::executor_shared::{ExecutorShared, TaskFuture};
use super::{ExecutorHandle, ThreadHandle, current_executor};
use crate::context::Context;
use crate::event::Event;
use crate::panic_text::panic_text;
use crate::poller::{PollResult, Poller, PollerBuilder, PollerWake};

/// Poller that polls futures. Its drop drops them all and completes their join handles.
pub struct Executor {
    shared: Arc<ExecutorShared>,
    name: String,
    incoming: Receiver<TaskFuture>,
    slots: Box<[Option<TaskFuture>]>,
    wakers: Box<[Waker]>,
    free: Vec<u32>,
    ready: VecDeque<u32>,
    /// Tasks woken while others were polled; empty between polls.
    woken: Vec<u32>,
    /// Due time of the earliest timer, possibly canceled since.
    next_timer: Instant,
}

/// Maximum number of tasks polled per iteration.
const BATCH: usize = 32;

impl Executor {
    /// Creates an executor for at most `tasks_max` tasks, to be added to `thread` only.
    pub fn new(thread: &ThreadHandle, name: &str, tasks_max: u32) -> (Self, ExecutorHandle) {
        let (shared, incoming) = ExecutorShared::new(thread, tasks_max);
        let count = tasks_max as usize;
        let executor = Self {
            wakers: shared.slot_wakers(),
            shared: Arc::clone(&shared),
            name: name.to_owned(),
            incoming,
            slots: (0..count).map(|_| None).collect(),
            free: (0..tasks_max).rev().collect(),
            ready: VecDeque::with_capacity(count),
            woken: Vec::with_capacity(count),
            next_timer: Instant::NEVER,
        };
        (executor, ExecutorHandle(shared))
    }

    /// Converts the executor to a poller of its thread.
    pub fn into_poller_builder(self) -> PollerBuilder {
        let name = self.name.clone();
        // Spawning and waking from outside notify the thread, as messages do.
        PollerBuilder::polled_each_iteration(&name, PollerWake::Messages, self)
    }

    /// Receives tasks and wake-ups from outside. Returns whether there were any.
    fn receive_tasks_and_wakes(&mut self, now: Instant) -> bool {
        let Self { shared, incoming, slots: places, free, ready, .. } = self;
        if !shared.swap_pending_flag() {
            return false;
        }
        while let Some(task) = incoming.receive() {
            // The sender has reserved a slot.
            let Some(index) = free.pop() else { unreachable!("a task without a place") };
            places[index as usize] = Some(task);
            ready.extend(shared.try_mark_ready(index));
        }
        shared.for_each_woken_task(|index| ready.extend(shared.try_mark_ready(index)));
        if let Some(mut alarms) = self.shared.lock_new_timers() {
            self.next_timer = alarms.set_new_timers(now);
        }
        true
    }

    /// Wakes the tasks whose timers are due. Returns whether there were any.
    fn wake_due_sleeps(&mut self, now: Instant) -> bool {
        if now < self.next_timer {
            return false;
        }
        let due = |shared: &ExecutorShared| shared.lock_timers().take_due(now);
        // A waker may run arbitrary code: not under the lock.
        while let Some(waker) = due(&self.shared) {
            waker.wake();
        }
        self.next_timer = self.shared.lock_timers().earliest_deadline();
        true
    }

    /// Polls ready tasks. Returns their number.
    fn poll_ready_tasks(&mut self, context: &Context<'_>) -> usize {
        // Tasks woken meanwhile wait for the next iteration, which bounds this one.
        let count = self.ready.len().min(BATCH);
        for _ in 0..count {
            if let Some(index) = self.ready.pop_front() {
                self.poll_task(index, context);
            }
        }
        count
    }

    fn poll_task(&mut self, index: u32, context: &Context<'_>) {
        // Cleared before the poll, so that a wake-up during the poll counts.
        self.shared.clear_ready(index);
        let place = &mut self.slots[index as usize];
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
        self.shared.release_slot();
        let panic = panic.or_else(|| dropped.err().map(|panic| panic_text(&*panic)));
        if let Some(panic) = panic {
            let (thread, executor) = (context.thread_id(), self.name.clone());
            let event = Event::TaskPanicked { thread, executor, panic };
            context.registry().record_event(context.now(), event);
        }
    }
}

impl Poller for Executor {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        let now = context.now();
        if self.ready.is_empty() && !self.shared.has_pending() && now < self.next_timer {
            return PollResult::Idle;
        }
        let visit = current_executor::set_current_executor(
            self.shared.executor_number(),
            std::mem::take(&mut self.woken),
        );
        let mut found = self.receive_tasks_and_wakes(now) | self.wake_due_sleeps(now);
        found |= self.poll_ready_tasks(context) > 0;
        // Timers that tasks created in this poll count from this iteration on.
        found |= self.receive_tasks_and_wakes(now);
        self.woken = visit.end_and_take_woken();
        self.ready.extend(self.woken.drain(..));
        PollResult::from_count(usize::from(found))
    }

    fn arm(&mut self) -> PollResult {
        PollResult::from_count(usize::from(!self.ready.is_empty() || self.shared.has_pending()))
    }

    fn wake_at(&self) -> Instant {
        self.next_timer
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        self.shared.close();
        for place in &mut self.slots {
            // A panic in one drop must not prevent the other drops; there is no one left to report
            // it to.
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
