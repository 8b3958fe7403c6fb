//! What is published about reactors, threads and pollers: plain words, stored by their owner without
//! ever waiting, loaded by anybody.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{Count, Instant};
use host::{Bell, Cores, Doze, Sender};

use super::{ReactorId, ThreadId};
use crate::message::Message;
use crate::poller::WakeKind;
use crate::spell::PollMode;
use crate::thread::ThreadPlan;

/// A reactor's books. Written by it alone; on a pair of cache lines of their own.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct ReactorRecord {
    pub(crate) core: u32,
    mode: AtomicU8,
    pub(crate) asleep: AtomicBool,
    /// The number of the mailbox or poller that runs, or ran last.
    pub(crate) running: Count,
    /// When the turn began, in nanoseconds.
    pub(crate) turn_began: Count,
    pub(crate) turns: Count,
    pub(crate) busy_ns: Count,
    pub(crate) sleeps: Count,
    pub(crate) wakes: Count,
    pub(crate) messages: Count,
    pub(crate) moves: Count,
    pub(crate) turns_too_long: Count,
    pub(crate) longest_turn_ns: Count,
    pub(crate) started: Instant,
    /// What took the time in the longest turn. Locked when that record is broken.
    pub(crate) longest_culprit: Mutex<Option<String>>,
}

impl ReactorRecord {
    pub(crate) fn new(core: u32, mode: PollMode, started: Instant) -> Self {
        let count = Count::default;
        Self {
            core,
            mode: AtomicU8::new(mode as u8),
            asleep: AtomicBool::new(false),
            running: count(),
            turn_began: count(),
            turns: count(),
            busy_ns: count(),
            sleeps: count(),
            wakes: count(),
            messages: count(),
            moves: count(),
            turns_too_long: count(),
            longest_turn_ns: count(),
            started,
            longest_culprit: Mutex::new(None),
        }
    }

    pub(crate) fn mode(&self) -> PollMode {
        let mode = usize::from(self.mode.load(Ordering::Relaxed));
        PollMode::ALL.get(mode).copied().unwrap_or_default()
    }

    pub(crate) fn set_mode(&self, mode: PollMode) {
        self.mode.store(mode as u8, Ordering::Relaxed);
    }
}

/// What everybody may know of a light thread: its books, its mailbox and where it lives.
#[derive(Debug)]
pub(crate) struct ThreadRecord {
    pub(crate) id: ThreadId,
    pub(crate) name: String,
    /// The cores it may live on; everywhere if none are named. Locked when asked and when changed.
    mask: Mutex<Option<Cores>>,
    /// The memory node where its data lies, if somebody said so.
    pub(crate) node: Option<u32>,
    pub(crate) mail: Sender<Message>,
    home: AtomicU32,
    /// Whether its reactor looks at it.
    pub(crate) doze: Doze,
    /// Where somebody wants it to live.
    wanted: AtomicU32,
    /// Whether somebody wants it to end.
    is_to_end: AtomicBool,
    bells: Arc<[Bell]>,
    pub(crate) started_ns: Count,
    pub(crate) busy_ns: Count,
    pub(crate) messages: Count,
    pub(crate) moves: Count,
    pub(crate) channels: Count,
    pollers: Mutex<Vec<Arc<PollerRecord>>>,
}

impl ThreadRecord {
    pub(crate) fn new(
        id: ThreadId,
        plan: &ThreadPlan,
        mail: Sender<Message>,
        home: ReactorId,
        bells: Arc<[Bell]>,
    ) -> Self {
        let count = Count::default;
        Self {
            id,
            name: plan.name.clone(),
            mask: Mutex::new(plan.mask.clone()),
            node: plan.node,
            mail,
            home: AtomicU32::new(home.0),
            doze: Doze::default(),
            wanted: AtomicU32::new(home.0),
            is_to_end: AtomicBool::new(false),
            bells,
            started_ns: count(),
            busy_ns: count(),
            messages: count(),
            moves: count(),
            channels: count(),
            pollers: Mutex::default(),
        }
    }

    pub(crate) fn mask(&self) -> MutexGuard<'_, Option<Cores>> {
        self.mask.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(crate) fn home(&self) -> ReactorId {
        ReactorId(self.home.load(Ordering::Relaxed))
    }

    /// To be called before the thread is handed on: what makes it visible to its new reactor (the
    /// inbox) makes this visible too.
    pub(crate) fn set_home(&self, home: ReactorId) {
        // See `want`.
        self.home.store(home.0, Ordering::SeqCst);
    }

    /// Notes where somebody wants it to live, and gives where it was wanted before. Whoever calls
    /// this tells the [`addressee`](Self::addressee) afterwards.
    ///
    /// Nothing that is wanted is overlooked. The teller stores what is wanted and then loads the
    /// home; who hands the thread on stores the home, and who takes it in then loads what is wanted.
    /// All four are in one order, so that either the thread is told where it lives, or whoever takes
    /// it in sees what it would have been told.
    pub(crate) fn want(&self, home: ReactorId) -> ReactorId {
        ReactorId(self.wanted.swap(home.0, Ordering::SeqCst))
    }

    /// Notes whether somebody wants it to end, and gives whether somebody did before. As with
    /// [`want`](Self::want), the addressee is told afterwards.
    pub(crate) fn want_end(&self, ends: bool) -> bool {
        self.is_to_end.swap(ends, Ordering::SeqCst)
    }

    /// The reactor to be told that something is wanted of the thread.
    pub(crate) fn addressee(&self) -> ReactorId {
        ReactorId(self.home.load(Ordering::SeqCst))
    }

    pub(crate) fn wanted(&self) -> ReactorId {
        ReactorId(self.wanted.load(Ordering::SeqCst))
    }

    pub(crate) fn is_to_end(&self) -> bool {
        self.is_to_end.load(Ordering::SeqCst)
    }

    /// It does not get to `to` and stays at `home`, unless it is wanted elsewhere by now.
    pub(crate) fn give_up(&self, to: ReactorId, home: ReactorId) {
        let _ = self.wanted.compare_exchange(to.0, home.0, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Wakes the reactor where the thread lives, and the thread if it dozes, to be called after a
    /// message was put in.
    ///
    /// The thread may move at any moment. If the home is still the same after its bell was rung,
    /// this load stands behind the ring's barrier, and so does the argument: a reactor that took the
    /// thread in announces its sleep later than the home was changed, so either its look at the
    /// mailbox comes after the message, or this load after the change. In the second case the bell
    /// of the new home is rung as well. A thread begins to doze before its reactor announces, so that
    /// the same is true of the look at whether it does.
    #[inline]
    pub(crate) fn ring(&self) {
        let mut home = self.home();
        loop {
            if let Some(bell) = self.bells.get(home.index()) {
                bell.ring_for(&self.doze);
            }
            let now = self.home();
            if now == home {
                return;
            }
            home = now;
        }
    }

    pub(crate) fn pollers(&self) -> MutexGuard<'_, Vec<Arc<PollerRecord>>> {
        self.pollers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A poller's books.
#[derive(Debug)]
pub(crate) struct PollerRecord {
    /// Unlike any other of the house.
    pub(crate) number: u64,
    pub(crate) name: String,
    pub(crate) wake: WakeKind,
    /// Why it cannot leave its reactor, if it cannot.
    pub(crate) tied: Option<&'static str>,
    /// Nothing if it is not timed.
    pub(crate) every_ns: Option<Count>,
    pub(crate) paused: AtomicBool,
    pub(crate) polls: Count,
    pub(crate) found: Count,
    pub(crate) woken_in_vain: Count,
}
