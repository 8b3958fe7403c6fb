//! State shared by an executor, its wakers and its handles.
//!
//! A producer stores its data first, then sets `new_events`, and then notifies the thread. The executor
//! clears `new_events` before it checks, so anything it has not seen sets it again; its
//! [`arm`](crate::Poller::arm) checks `new_events` last.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

use tenmil_linux::{Receiver, Sender, mailbox};

use super::current_executor;
use super::sleep::SleepTimers;
use super::{SpawnTaskErrorKind, ThreadHandle};

/// Polled future of a task. Returns the panic message, if it panicked.
pub(super) type TaskFuture = Pin<Box<dyn Future<Output = Option<String>> + Send>>;

pub(super) struct ExecutorShared {
    thread: ThreadHandle,
    incoming: Sender<TaskFuture>,
    tasks_max: u32,
    /// Reserved slots, including those of tasks not yet received.
    reserved: AtomicU32,
    is_gone: AtomicBool,
    has_pending: AtomicBool,
    /// One bit per task that was woken from outside.
    woken: Box<[AtomicU64]>,
    /// Whether a task is in the ready list. Accessed by the executor's OS thread only.
    queued: Box<[AtomicBool]>,
    alarms: Mutex<SleepTimers>,
    has_new_alarms: AtomicBool,
}

/// Waker of the task in slot `index`. A waker that outlives its task causes a spurious wake-up of
/// the slot's next task.
struct TaskWaker {
    shared: Arc<ExecutorShared>,
    index: u32,
}

impl ExecutorShared {
    pub(super) fn new(thread: &ThreadHandle, tasks_max: u32) -> (Arc<Self>, Receiver<TaskFuture>) {
        let count = tasks_max as usize;
        let (incoming, receiver) = mailbox(count);
        let shared = Self {
            thread: thread.clone(),
            incoming,
            tasks_max,
            reserved: AtomicU32::new(0),
            is_gone: AtomicBool::new(false),
            has_pending: AtomicBool::new(false),
            woken: (0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            queued: (0..count).map(|_| AtomicBool::new(false)).collect(),
            alarms: Mutex::default(),
            has_new_alarms: AtomicBool::new(false),
        };
        (Arc::new(shared), receiver)
    }

    /// Wakers of all slots.
    pub(super) fn slot_wakers(self: &Arc<Self>) -> Box<[Waker]> {
        let waker = |index| Waker::from(Arc::new(TaskWaker { shared: Arc::clone(self), index }));
        (0..self.tasks_max).map(waker).collect()
    }

    /// Number of the executor, unique among living executors.
    pub(super) fn executor_number(self: &Arc<Self>) -> usize {
        Arc::as_ptr(self).addr()
    }

    pub(super) fn task_count(&self) -> u32 {
        self.reserved.load(Ordering::Relaxed)
    }

    pub(super) fn has_ended(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    /// Reserves a slot for a task.
    pub(super) fn reserve_slot(&self) -> Result<(), SpawnTaskErrorKind> {
        if self.has_ended() {
            return Err(SpawnTaskErrorKind::ThreadGone);
        }
        let more = |taken: u32| (taken < self.tasks_max).then_some(taken + 1);
        // Pairs with the release in `give_back`: a reserved slot is empty.
        let taken = self.reserved.fetch_update(Ordering::Acquire, Ordering::Relaxed, more);
        taken.map(drop).map_err(|_| SpawnTaskErrorKind::TableFull { tasks_max: self.tasks_max })
    }

    /// Releases a slot, which is free in the table already.
    pub(super) fn release_slot(&self) {
        self.reserved.fetch_sub(1, Ordering::Release);
    }

    /// Submits a task with a reserved slot. An executor that is gone drops it.
    pub(super) fn submit_task(&self, task: TaskFuture) {
        // There is a mailbox entry for every slot, so a send fails only if the executor is gone.
        drop(self.incoming.send(task));
        self.set_pending_and_notify();
    }

    /// Announces stored data.
    pub(super) fn set_pending_and_notify(&self) {
        // Pairs with the exchange in `swap_pending_flag`.
        self.has_pending.store(true, Ordering::Release);
        self.thread.notify_reactor();
    }

    #[inline]
    pub(super) fn has_pending(&self) -> bool {
        self.has_pending.load(Ordering::Acquire)
    }

    /// Clears the announcement flag and returns it. An exchange, so that it reads the last of
    /// several announcements and sees what all of them have stored.
    #[inline]
    pub(super) fn swap_pending_flag(&self) -> bool {
        self.has_pending() && self.has_pending.swap(false, Ordering::AcqRel)
    }

    /// Calls `body` with each task that was woken from outside.
    pub(super) fn for_each_woken_task(&self, mut body: impl FnMut(u32)) {
        for (first, word) in (0..).step_by(64).zip(&self.woken) {
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut bits = word.swap(0, Ordering::AcqRel);
            while bits != 0 {
                body(first + bits.trailing_zeros());
                bits &= bits - 1;
            }
        }
    }

    /// Marks a task as ready, if it was not. On the executor's own OS thread, so a load and a store
    /// suffice.
    #[inline]
    pub(super) fn try_mark_ready(&self, index: u32) -> Option<u32> {
        let queued = &self.queued[index as usize];
        let is_new = !queued.load(Ordering::Relaxed);
        is_new.then(|| {
            queued.store(true, Ordering::Relaxed);
            index
        })
    }

    /// Marks a task as not ready. A wake-up from now on counts.
    #[inline]
    pub(super) fn clear_ready(&self, index: u32) {
        self.queued[index as usize].store(false, Ordering::Relaxed);
    }

    /// Announces a timer that must be set.
    pub(super) fn set_new_timer_flag(&self) {
        self.has_new_alarms.store(true, Ordering::Relaxed);
        self.set_pending_and_notify();
    }

    /// The timers, if some must be set. Call after `swap_pending_flag`, whose exchange orders this too.
    pub(super) fn lock_new_timers(&self) -> Option<MutexGuard<'_, SleepTimers>> {
        let has = self.has_new_alarms.load(Ordering::Relaxed)
            && self.has_new_alarms.swap(false, Ordering::Relaxed);
        has.then(|| self.lock_timers())
    }

    pub(super) fn lock_timers(&self) -> MutexGuard<'_, SleepTimers> {
        self.alarms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes the executor.
    pub(super) fn close(&self) {
        self.is_gone.store(true, Ordering::Release);
        let waiting = self.lock_timers().wake_all();
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let Self { shared, index } = &**self;
        if current_executor::wake_local_task(shared.executor_number(), || {
            shared.try_mark_ready(*index)
        }) {
            return;
        }
        let (word, bit) = (*index as usize / 64, 1 << (index % 64));
        // Pairs with the exchange in `for_each_woken_task`.
        if shared.woken[word].fetch_or(bit, Ordering::AcqRel) & bit == 0 {
            shared.set_pending_and_notify();
        }
    }
}
