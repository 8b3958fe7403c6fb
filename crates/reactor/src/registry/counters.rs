//! Published counters of reactors, threads and pollers: words stored by their owner without
//! blocking and loaded by any thread.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{Counter, Instant};
use tenmil_linux::{CpuList, Notifier, ParkFlag, Sender};

use super::{ReactorId, ThreadId};
use crate::adaptive_spin::PollMode;
use crate::light_thread::ThreadBuilder;
use crate::message::Message;
use crate::poller::WakeKind;

/// Counters of a reactor. Written by it alone; on a pair of cache lines of their own.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct ReactorCounters {
    pub(crate) core: u32,
    mode: AtomicU8,
    pub(crate) sleeping: AtomicBool,
    /// Number of the mailbox or poller that runs, or ran last.
    pub(crate) running: Counter,
    /// Start of the iteration, in nanoseconds.
    pub(crate) iteration_started: Counter,
    pub(crate) iterations: Counter,
    pub(crate) busy_ns: Counter,
    pub(crate) sleeps: Counter,
    pub(crate) wakes: Counter,
    pub(crate) messages: Counter,
    pub(crate) migrations: Counter,
    pub(crate) slow_iterations: Counter,
    pub(crate) longest_iteration_ns: Counter,
    pub(crate) started: Instant,
    /// Number of the operating system's thread; 0 if it is simulated.
    pub(crate) os_thread: AtomicU32,
    /// What took the most time in the longest iteration. Locked when a new maximum is recorded.
    pub(crate) longest_attribution: Mutex<Option<String>>,
}

impl ReactorCounters {
    pub(crate) fn new(core: u32, mode: PollMode, started: Instant) -> Self {
        let count = Counter::default;
        Self {
            core,
            mode: AtomicU8::new(mode as u8),
            sleeping: AtomicBool::new(false),
            running: count(),
            iteration_started: count(),
            iterations: count(),
            busy_ns: count(),
            sleeps: count(),
            wakes: count(),
            messages: count(),
            migrations: count(),
            slow_iterations: count(),
            longest_iteration_ns: count(),
            started,
            os_thread: AtomicU32::new(0),
            longest_attribution: Mutex::new(None),
        }
    }

    pub(crate) fn poll_mode(&self) -> PollMode {
        let mode = usize::from(self.mode.load(Ordering::Relaxed));
        PollMode::ALL.get(mode).copied().unwrap_or_default()
    }

    pub(crate) fn set_poll_mode(&self, mode: PollMode) {
        self.mode.store(mode as u8, Ordering::Relaxed);
    }
}

/// Public state of a light thread: counters, mailbox and location.
#[derive(Debug)]
pub(crate) struct ThreadCounters {
    pub(crate) id: ThreadId,
    pub(crate) name: String,
    /// Number of its mailbox, unique among mailboxes and pollers.
    pub(crate) mailbox_number: u64,
    /// Permitted cores; `None` is all. Locked on access.
    mask: Mutex<Option<CpuList>>,
    /// NUMA node of its data, if declared.
    pub(crate) node: Option<u32>,
    pub(crate) mail: Sender<Message>,
    home: AtomicU32,
    /// Parking flag.
    pub(crate) park_flag: ParkFlag,
    /// Requested reactor.
    requested_reactor: AtomicU32,
    /// Whether its end was requested.
    is_end_requested: AtomicBool,
    bells: Arc<[Notifier]>,
    pub(crate) started_ns: Counter,
    pub(crate) busy_ns: Counter,
    pub(crate) messages: Counter,
    pub(crate) migrations: Counter,
    pub(crate) channels: Counter,
    pollers: Mutex<Vec<Arc<PollerCounters>>>,
}

impl ThreadCounters {
    pub(crate) fn new(
        (id, mailbox_number): (ThreadId, u64),
        plan: &ThreadBuilder,
        mail: Sender<Message>,
        home: ReactorId,
        bells: Arc<[Notifier]>,
    ) -> Self {
        let count = Counter::default;
        Self {
            id,
            name: plan.name.clone(),
            mailbox_number,
            mask: Mutex::new(plan.mask.clone()),
            node: plan.node,
            mail,
            home: AtomicU32::new(home.0),
            park_flag: ParkFlag::default(),
            requested_reactor: AtomicU32::new(home.0),
            is_end_requested: AtomicBool::new(false),
            bells,
            started_ns: count(),
            busy_ns: count(),
            messages: count(),
            migrations: count(),
            channels: count(),
            pollers: Mutex::default(),
        }
    }

    pub(crate) fn lock_mask(&self) -> MutexGuard<'_, Option<CpuList>> {
        self.mask.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(crate) fn current_reactor(&self) -> ReactorId {
        ReactorId(self.home.load(Ordering::Relaxed))
    }

    /// Sets the current reactor, before the handover: the inbox that publishes the thread to its
    /// new reactor publishes this too.
    pub(crate) fn set_current_reactor(&self, home: ReactorId) {
        // See `request_migration` for the memory order.
        self.home.store(home.0, Ordering::SeqCst);
    }

    /// Stores the requested reactor and returns the previous request. The caller then notifies the
    /// [`reactor_to_notify`](Self::reactor_to_notify).
    ///
    /// No request is lost. The requester stores the request and then loads the home; the old
    /// reactor stores the home at handover, and the new reactor then loads the request. All four
    /// accesses are sequentially consistent, so either the request is sent to the current home, or
    /// the new reactor sees it.
    pub(crate) fn request_migration(&self, home: ReactorId) -> ReactorId {
        ReactorId(self.requested_reactor.swap(home.0, Ordering::SeqCst))
    }

    /// Stores whether the end is requested and returns the previous value. As with
    /// [`request_migration`](Self::request_migration), the target is notified afterwards.
    pub(crate) fn swap_end_requested(&self, ends: bool) -> bool {
        self.is_end_requested.swap(ends, Ordering::SeqCst)
    }

    /// Reactor to be notified of a request.
    pub(crate) fn reactor_to_notify(&self) -> ReactorId {
        ReactorId(self.home.load(Ordering::SeqCst))
    }

    pub(crate) fn requested_reactor(&self) -> ReactorId {
        ReactorId(self.requested_reactor.load(Ordering::SeqCst))
    }

    pub(crate) fn is_end_requested(&self) -> bool {
        self.is_end_requested.load(Ordering::SeqCst)
    }

    /// Cancels a migration to `to` and stays at `home`, unless another reactor is requested by now.
    pub(crate) fn cancel_migration(&self, to: ReactorId, home: ReactorId) {
        let _ = self.requested_reactor.compare_exchange(
            to.0,
            home.0,
            Ordering::SeqCst,
            Ordering::SeqCst,
        );
    }

    /// Wakes the thread's reactor, and the thread if it is parked. Call after a message was stored.
    ///
    /// The thread may migrate at any moment. If the home is unchanged after its reactor was
    /// notified, the load of the home is ordered after the notification's barrier, and the argument
    /// of the sleep flag applies: a reactor that took the thread over announces its sleep after the
    /// home was changed, so either its check of the mailbox sees the message, or this load sees the
    /// change. In the second case the new home is notified as well. A thread is marked as parked
    /// before its reactor announces, so the same holds for the parking flag.
    #[inline]
    pub(crate) fn notify_thread(&self) {
        let mut home = self.current_reactor();
        loop {
            if let Some(waker) = self.bells.get(home.index()) {
                waker.notify_parked_thread(&self.park_flag);
            }
            let now = self.current_reactor();
            if now == home {
                return;
            }
            home = now;
        }
    }

    pub(crate) fn lock_pollers(&self) -> MutexGuard<'_, Vec<Arc<PollerCounters>>> {
        self.pollers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn try_lock_pollers(&self) -> Option<MutexGuard<'_, Vec<Arc<PollerCounters>>>> {
        self.pollers.try_lock().ok()
    }
}

/// Counters of a poller.
#[derive(Debug)]
pub(crate) struct PollerCounters {
    /// Number, unique among mailboxes and pollers.
    pub(crate) number: u64,
    pub(crate) name: String,
    pub(crate) wake: WakeKind,
    /// Reason why it is pinned, if it is.
    pub(crate) pinned: Option<&'static str>,
    /// Period; `None` if it is not timed.
    pub(crate) every_ns: Option<Counter>,
    pub(crate) paused: AtomicBool,
    pub(crate) polls: Counter,
    pub(crate) found: Counter,
    pub(crate) spurious_wakeups: Counter,
}
