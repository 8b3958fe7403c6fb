//! Sleep and wake-up of a polling thread without lost notifications.
//!
//! A [`Sleeper`] belongs to the thread that sleeps; a [`Notifier`] to each thread that sends it
//! work. While the sleeper polls, a notification costs one load. Before it sleeps, it announces the
//! sleep, checks all its sources once more, and blocks:
//!
//! ```text
//!   announce --> check again --> work: cancel
//!                            \--> no work: block --> notification, descriptor, or deadline
//! ```
//!
//! `wakeup/sleep_flag.rs` contains the argument, and the checks, that no wake-up is lost. Sources
//! that need not end a sleep at once are handled by `wakeup/coalesced.rs`.

mod coalesced_wake_sources;
mod epoll;
mod park_flag;
mod sleep_flag;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::{fmt, io};

use rustix::event::epoll::EventFlags;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use tenmil_base::Span;

pub use self::coalesced_wake_sources::COALESCE_DELAY;
use self::coalesced_wake_sources::CoalescedSources;
use self::epoll::{Epoll, ReadyList};
pub use self::park_flag::ParkFlag;
pub(crate) use self::sleep_flag::SleepFlag;
pub use crate::asymmetric_barrier::AsymmetricBarrier;
use crate::sync;

/// Sleeping side. May move to another thread between sleeps.
pub struct Sleeper {
    shared: Arc<SleeperShared>,
    sources: WakeSources,
    found: ReadyList,
    barrier: AsymmetricBarrier,
    /// The kernel refused the memory barrier of this announcement.
    unordered: bool,
    /// The eventfd may be readable from an earlier notification.
    stale: bool,
    /// The coalesced set is disarmed and polled explicitly, because it was ready recently.
    is_coalesced_disarmed: bool,
}

/// Waking side. Clones wake the same sleeper.
#[derive(Clone, Debug)]
pub struct Notifier(Arc<SleeperShared>);

/// Descriptors that end a sleep. Clones belong to the same sleeper and may be used from any thread.
#[derive(Clone, Debug)]
pub struct WakeSources {
    prompt: Arc<Epoll>,
    /// Coalesced descriptors: an epoll instance that is one descriptor among the prompt ones.
    coalesced: Arc<CoalescedSources>,
}

/// State shared by both sides. The flag is on a pair of cache lines of its own, so that a
/// notification is a cache hit except after a sleep.
#[derive(Debug)]
#[repr(align(128))]
struct SleeperShared {
    sleep_flag: SleepFlag,
    event: OwnedFd,
}

/// Token of the eventfd.
const NOTIFY_TOKEN: u64 = u64::MAX;
/// Token of the coalesced set.
const COALESCED_TOKEN: u64 = u64::MAX - 1;

/// Upper bound of a sleep whose barrier the kernel refused after it had granted it at first: a
/// missed notification is delayed by at most this time.
const UNORDERED_MAX: Span = Span::from_ms(1);

impl Sleeper {
    /// Creates a sleeper with the cheapest barrier that the kernel grants. Uses three descriptors.
    pub fn new() -> io::Result<Self> {
        Self::with_barrier(AsymmetricBarrier::detect())
    }

    /// Creates a sleeper that does not use `membarrier(2)`: each notification costs a full fence.
    pub fn with_fences() -> io::Result<Self> {
        Self::with_barrier(AsymmetricBarrier::FullFences)
    }

    fn with_barrier(barrier: AsymmetricBarrier) -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let epoll = Epoll::new()?;
        // Edge-triggered: every write is an event and the count need not be read. It would overflow
        // after 2^64 sleeps.
        epoll.add(&event, NOTIFY_TOKEN, EventFlags::IN | EventFlags::ET)?;
        let lingering = Arc::new(CoalescedSources::new(&epoll, COALESCED_TOKEN)?);
        let shared = Arc::new(SleeperShared { sleep_flag: SleepFlag::new(barrier), event });
        let sources = WakeSources { prompt: Arc::new(epoll), coalesced: lingering };
        let found = ReadyList::empty();
        Ok(Self {
            shared,
            sources,
            found,
            barrier,
            unordered: false,
            stale: false,
            is_coalesced_disarmed: false,
        })
    }

    /// Returns a notifier that wakes this sleeper.
    pub fn notifier(&self) -> Notifier {
        Notifier(Arc::clone(&self.shared))
    }

    /// Returns the set of descriptors that end its sleep.
    pub fn sources(&self) -> WakeSources {
        self.sources.clone()
    }

    /// Barrier that orders notifications and sleeps.
    pub fn barrier(&self) -> AsymmetricBarrier {
        self.barrier
    }

    /// Announces that the thread is about to sleep.
    ///
    /// Afterwards the caller checks every source once more: what was stored before a
    /// [`Notifier::notify`] that had no effect is visible now. Then it calls
    /// [`sleep_until_ready`](Self::sleep_until_ready), or [`cancel_sleep`](Self::cancel_sleep) if there is work.
    pub fn announce_sleep(&mut self) {
        self.unordered = !self.shared.sleep_flag.announce();
    }

    /// Withdraws an announcement. A notification in between ends the next sleep at once.
    pub fn cancel_sleep(&mut self) {
        self.shared.sleep_flag.cancel();
    }

    /// As [`announce_sleep`](Self::announce_sleep), before a [`sleep_without_descriptors`](Self::sleep_without_descriptors).
    pub fn announce_sleep_without_descriptors(&mut self) {
        if std::mem::take(&mut self.stale) {
            // Cleared before the announcement: a later notification writes again.
            let _ = rustix::io::read(&self.shared.event, &mut [0; 8]);
        }
        self.announce_sleep();
    }

    /// Sleeps until a notification arrives or `at_most` has passed, without waiting for
    /// descriptors. May return spuriously. Returns whether a notification arrived.
    pub fn sleep_without_descriptors(&mut self, at_most: Span) -> bool {
        let at_most = if self.unordered { at_most.min(UNORDERED_MAX) } else { at_most };
        let limit = Timespec {
            tv_sec: i64::try_from(at_most.ns / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(at_most.ns % 1_000_000_000).unwrap_or(0),
        };
        let mut waker = [PollFd::new(&self.shared.event, PollFlags::IN)];
        let rang = match poll(&mut waker, Some(&limit)) {
            Ok(count) => count > 0,
            Err(Errno::INTR) => false,
            Err(errno) => panic!("wait for the bell: {errno}"),
        };
        self.shared.sleep_flag.cancel();
        self.stale |= rang;
        rang
    }

    /// Sleeps until a notification arrives, a descriptor is ready, or `at_most` has passed, and
    /// appends the tokens of ready descriptors to `ready`. May return spuriously. Every return has
    /// checked all three conditions. Returns whether a notification arrived.
    pub fn sleep_until_ready(&mut self, at_most: Span, ready: &mut Vec<u64>) -> bool {
        let at_most = if self.unordered { at_most.min(UNORDERED_MAX) } else { at_most };
        // While the coalesced set is disarmed, it is polled after COALESCE_DELAY at the latest.
        let nap = if self.is_coalesced_disarmed { at_most.min(COALESCE_DELAY) } else { at_most };
        self.sources.prompt.wait(nap, &mut self.found);
        let has_time = nap < at_most && self.found.is_empty();
        let is_over = has_time && self.poll_coalesced(ready);
        if has_time && !is_over {
            self.sources.prompt.wait(Span { ns: at_most.ns - nap.ns }, &mut self.found);
        }
        self.shared.sleep_flag.cancel();
        if is_over {
            return false;
        }
        self.drain_ready(ready)
    }

    /// Polls for ready descriptors without sleeping, and appends their tokens to `ready`. What
    /// exceeds one call is reported by the next.
    pub fn poll_ready(&mut self, ready: &mut Vec<u64>) {
        self.sources.prompt.wait(Span::default(), &mut self.found);
        // Notifications are irrelevant here: their work was stored before and the thread is awake.
        self.drain_ready(ready);
    }

    fn drain_ready(&mut self, ready: &mut Vec<u64>) -> bool {
        let mut rang = false;
        for token in self.found.tokens() {
            match token {
                NOTIFY_TOKEN => (rang, self.stale) = (true, true),
                COALESCED_TOKEN => self.is_coalesced_disarmed = true,
                token => ready.push(token),
            }
        }
        if self.is_coalesced_disarmed {
            self.poll_coalesced(ready);
        }
        rang
    }

    /// Polls the coalesced set while it is disarmed; rearms it if nothing is ready. Returns whether
    /// anything was ready.
    fn poll_coalesced(&mut self, ready: &mut Vec<u64>) -> bool {
        let before = ready.len();
        self.is_coalesced_disarmed =
            self.sources.coalesced.take_ready(&self.sources.prompt, COALESCED_TOKEN, ready);
        ready.len() > before
    }
}

impl fmt::Debug for Sleeper {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Sleeper").field("barrier", &self.barrier).finish_non_exhaustive()
    }
}

impl Notifier {
    /// Wakes the sleeper; call after a store that it must see. Costs a load while the sleeper
    /// polls, and one system call for the first notification of a sleep.
    #[inline]
    pub fn notify(&self) {
        if self.0.sleep_flag.claim_wakeup() {
            self.0.write_eventfd();
        }
    }

    /// As [`notify`](Self::notify), after a store for one of the light threads that the sleeper
    /// runs, which is unparked if it is parked. Costs one more load while it is not parked.
    #[inline]
    pub fn notify_parked_thread(&self, doze: &ParkFlag) {
        if self.0.sleep_flag.notify_parked_and_claim_wakeup(doze) {
            self.0.write_eventfd();
        }
    }

    /// Whether a parked thread was [notified](Self::notify_parked_thread). The sleeper checks this in
    /// every iteration, and once more after it has announced a sleep.
    #[inline]
    pub fn has_notified_parked_thread(&self) -> bool {
        self.0.sleep_flag.has_notified_parked_thread()
    }

    /// Clears that flag. If it was set, each parked thread that was notified [reports
    /// it](ParkFlag::is_notified).
    pub fn clear_notified_parked_thread(&self) -> bool {
        self.0.sleep_flag.clear_notified_parked_thread()
    }
}

impl tenmil_base::Wake for Notifier {
    #[inline]
    fn wake(&self) {
        self.notify();
    }
}

impl SleeperShared {
    #[cold]
    fn write_eventfd(&self) {
        let written = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        debug_assert!(matches!(written, Ok(8) | Err(Errno::AGAIN)), "{written:?}");
    }
}

impl WakeSources {
    /// Makes a descriptor end sleeps while it is readable, with a token for [`Sleeper::sleep_until_ready`]. A
    /// caller that waits for other events adds its own epoll instance.
    ///
    /// The tokens `u64::MAX` and the one below it are rejected.
    pub fn add_source(&self, source: impl AsFd, token: u64) -> io::Result<()> {
        if token >= COALESCED_TOKEN {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.prompt.add(source, token, EventFlags::IN)
    }

    /// Makes an added descriptor edge-triggered: it ends a sleep when new data arrives, and once if
    /// it is readable now.
    pub fn set_edge_triggered(&self, source: impl AsFd, token: u64) -> io::Result<()> {
        self.prompt.modify(source, token, EventFlags::IN | EventFlags::ET)
    }

    /// Makes it level-triggered again, as it was when added.
    pub fn set_level_triggered(&self, source: impl AsFd, token: u64) -> io::Result<()> {
        self.prompt.modify(source, token, EventFlags::IN)
    }

    /// Coalesces an added descriptor: it ends a sleep while readable, but up to [`COALESCE_DELAY`]
    /// later if another coalesced descriptor has ended one recently, so that several are reported
    /// together.
    pub fn set_coalesced(&self, source: impl AsFd, token: u64) -> io::Result<()> {
        // Added to the new set before it leaves the old one, so that no event is missed.
        self.coalesced.add_source(&source, token)?;
        self.prompt.remove(source)
    }

    /// Makes a coalesced descriptor prompt and level-triggered again.
    pub fn set_prompt(&self, source: impl AsFd, token: u64) -> io::Result<()> {
        // Added to the new set before it leaves the old one, so that no event is missed.
        self.prompt.add(&source, token, EventFlags::IN)?;
        self.coalesced.remove_source(source)
    }

    /// Removes a descriptor that is not coalesced. Call before it is closed.
    pub fn remove_source(&self, source: impl AsFd) -> io::Result<()> {
        self.prompt.remove(source)
    }
}

#[cfg(test)]
mod tests;
