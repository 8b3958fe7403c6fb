//! What an executor shares with those who wake and spawn its tasks.
//!
//! Whoever has something for it stores that first, then sets `news`, and then rings its thread's
//! bell. The executor takes `news` back before it looks, so what it has not seen sets it again; and
//! its [`arm`](crate::Poller::arm) looks at `news` last of all.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

use host::{Receiver, Sender, mailbox};

use super::here;
use super::sleep::Alarms;
use super::{Handle, Lack};

/// What is polled. It ends with what its panic said, if it panicked.
pub(super) type Task = Pin<Box<dyn Future<Output = Option<String>> + Send>>;

pub(super) struct Shared {
    thread: Handle,
    incoming: Sender<Task>,
    tasks_max: u32,
    /// Places that are taken, those of tasks on their way included.
    taken: AtomicU32,
    is_gone: AtomicBool,
    news: AtomicBool,
    /// A bit for each task that somebody woke from outside.
    woken: Box<[AtomicU64]>,
    /// Whether a task is among those that are ready. Touched by the executor's OS thread alone.
    queued: Box<[AtomicBool]>,
    alarms: Mutex<Alarms>,
    has_new_alarms: AtomicBool,
}

/// The waker of whoever has place `index`. One that outlives its task wakes its successor, for
/// nothing.
struct TaskWaker {
    shared: Arc<Shared>,
    index: u32,
}

impl Shared {
    pub(super) fn new(thread: &Handle, tasks_max: u32) -> (Arc<Self>, Receiver<Task>) {
        let count = tasks_max as usize;
        let (incoming, receiver) = mailbox(count);
        let shared = Self {
            thread: thread.clone(),
            incoming,
            tasks_max,
            taken: AtomicU32::new(0),
            is_gone: AtomicBool::new(false),
            news: AtomicBool::new(false),
            woken: (0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            queued: (0..count).map(|_| AtomicBool::new(false)).collect(),
            alarms: Mutex::default(),
            has_new_alarms: AtomicBool::new(false),
        };
        (Arc::new(shared), receiver)
    }

    /// The wakers of all places.
    pub(super) fn wakers(self: &Arc<Self>) -> Box<[Waker]> {
        let waker = |index| Waker::from(Arc::new(TaskWaker { shared: Arc::clone(self), index }));
        (0..self.tasks_max).map(waker).collect()
    }

    /// Unlike that of any other executor that lives.
    pub(super) fn number(self: &Arc<Self>) -> usize {
        Arc::as_ptr(self).addr()
    }

    pub(super) fn count(&self) -> u32 {
        self.taken.load(Ordering::Relaxed)
    }

    pub(super) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    /// Takes a place for a task.
    pub(super) fn reserve(&self) -> Result<(), Lack> {
        if self.is_gone() {
            return Err(Lack::Thread);
        }
        let more = |taken: u32| (taken < self.tasks_max).then_some(taken + 1);
        // Pairs with the release in `give_back`: whoever takes a place finds it empty.
        let taken = self.taken.fetch_update(Ordering::Acquire, Ordering::Relaxed, more);
        taken.map(drop).map_err(|_| Lack::Room { tasks_max: self.tasks_max })
    }

    /// Gives a place back. The table has it already.
    pub(super) fn give_back(&self) {
        self.taken.fetch_sub(1, Ordering::Release);
    }

    /// Hands over a task for which there is a place. An executor that is gone drops it.
    pub(super) fn admit(&self, task: Task) {
        // There is a slot for each place, so what does not fit is for an executor that is gone.
        drop(self.incoming.send(task));
        self.announce();
    }

    /// There is something to be seen.
    pub(super) fn announce(&self) {
        // Pairs with the exchange in `take_news`.
        self.news.store(true, Ordering::Release);
        self.thread.ring();
    }

    #[inline]
    pub(super) fn has_news(&self) -> bool {
        self.news.load(Ordering::Acquire)
    }

    /// Whether there was something to be seen. An exchange, so that it reads from the last of those
    /// who announced something, and sees what they all have stored.
    #[inline]
    pub(super) fn take_news(&self) -> bool {
        self.has_news() && self.news.swap(false, Ordering::AcqRel)
    }

    /// Calls `body` with each task that was woken from outside.
    pub(super) fn take_woken(&self, mut body: impl FnMut(u32)) {
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

    /// Notes that a task is ready, if that was not known. On the executor's own OS thread, so a load
    /// and a store are enough.
    #[inline]
    pub(super) fn queue(&self, index: u32) -> Option<u32> {
        let queued = &self.queued[index as usize];
        let is_new = !queued.load(Ordering::Relaxed);
        is_new.then(|| {
            queued.store(true, Ordering::Relaxed);
            index
        })
    }

    /// Notes that a task is not ready any more. A wake-up from now on counts.
    #[inline]
    pub(super) fn unqueue(&self, index: u32) {
        self.queued[index as usize].store(false, Ordering::Relaxed);
    }

    /// An alarm was put in that has to be set.
    pub(super) fn announce_alarm(&self) {
        self.has_new_alarms.store(true, Ordering::Relaxed);
        self.announce();
    }

    /// The alarms, if some have to be set. To be called after `take_news`, whose exchange orders
    /// this too.
    pub(super) fn new_alarms(&self) -> Option<MutexGuard<'_, Alarms>> {
        let has = self.has_new_alarms.load(Ordering::Relaxed)
            && self.has_new_alarms.swap(false, Ordering::Relaxed);
        has.then(|| self.alarms())
    }

    pub(super) fn alarms(&self) -> MutexGuard<'_, Alarms> {
        self.alarms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The executor is no more.
    pub(super) fn close(&self) {
        self.is_gone.store(true, Ordering::Release);
        let waiting = self.alarms().close();
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let Self { shared, index } = &**self;
        if here::wake(shared.number(), || shared.queue(*index)) {
            return;
        }
        let (word, bit) = (*index as usize / 64, 1 << (index % 64));
        // Pairs with the exchange in `take_woken`.
        if shared.woken[word].fetch_or(bit, Ordering::AcqRel) & bit == 0 {
            shared.announce();
        }
    }
}
