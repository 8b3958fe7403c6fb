//! How a thread that polls goes to sleep without missing anything, and how it is woken.
//!
//! A [`Sleeper`] belongs to the thread that sleeps; a [`Bell`] to everybody who has something for
//! it. While the sleeper polls, ringing costs one load. To sleep it announces that, looks at all its
//! sources once more, and blocks:
//!
//! ```text
//!   announce --> look again --> work: cancel
//!                          \--> none: block --> a bell, a descriptor, or the deadline
//! ```
//!
//! Why no wake-up is lost is said, and checked, in `bell/handshake.rs`; what need not end a sleep at
//! once is kept in `bell/lingering.rs`.

mod doze;
mod epoll;
mod handshake;
mod lingering;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::{fmt, io};

use base::Span;
use rustix::event::epoll::EventFlags;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

pub use self::doze::Doze;
use self::epoll::{Epoll, Found};
pub(crate) use self::handshake::Handshake;
pub use self::lingering::LINGER;
use self::lingering::Lingering;
pub use crate::barrier::Barrier;
use crate::sync;

/// The end of a thread that sleeps. It may be handed to another thread between sleeps.
pub struct Sleeper {
    shared: Arc<Shared>,
    sources: Sources,
    found: Found,
    barrier: Barrier,
    /// The kernel refused the barrier of this announcement.
    unordered: bool,
    /// The descriptor of the bell may be readable from an old ring.
    stale: bool,
    /// What lingers is not heard, and is looked for: something of it was found lately.
    gathers: bool,
}

/// The end of those who wake. Clones wake the same sleeper.
#[derive(Clone, Debug)]
pub struct Bell(Arc<Shared>);

/// The descriptors that end a sleep. Clones belong to the same sleeper, and may be used from any
/// thread.
#[derive(Clone, Debug)]
pub struct Sources {
    prompt: Arc<Epoll>,
    /// Those that may wait: one more descriptor among the prompt ones.
    lingering: Arc<Lingering>,
}

/// The flag is on a pair of cache lines of its own, so that only a sleep makes ringing dear.
#[derive(Debug)]
#[repr(align(128))]
struct Shared {
    handshake: Handshake,
    event: OwnedFd,
}

/// The token of the bell itself.
const BELL: u64 = u64::MAX;
/// The token of all that lingers.
const LINGERING: u64 = u64::MAX - 1;

/// How long a sleep lasts at most if the kernel, which granted the barrier at first, refuses it now:
/// a bell that was missed for that is heard so much later.
const UNORDERED_MAX: Span = Span::from_ms(1);

impl Sleeper {
    /// A sleeper with the cheapest barrier that the kernel grants. Takes three descriptors.
    pub fn new() -> io::Result<Self> {
        Self::with_barrier(Barrier::detect())
    }

    /// A sleeper that does not ask the kernel for barriers: rings cost a full fence.
    pub fn with_fences() -> io::Result<Self> {
        Self::with_barrier(Barrier::Fences)
    }

    fn with_barrier(barrier: Barrier) -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let epoll = Epoll::new()?;
        // By the edge every write is an event and the count need not be read: it would take
        // 2^64 sleeps to overflow.
        epoll.add(&event, BELL, EventFlags::IN | EventFlags::ET)?;
        let lingering = Arc::new(Lingering::new(&epoll, LINGERING)?);
        let shared = Arc::new(Shared { handshake: Handshake::new(barrier), event });
        let sources = Sources { prompt: Arc::new(epoll), lingering };
        let found = Found::nothing();
        Ok(Self { shared, sources, found, barrier, unordered: false, stale: false, gathers: false })
    }

    /// A bell that wakes this sleeper.
    pub fn bell(&self) -> Bell {
        Bell(Arc::clone(&self.shared))
    }

    /// The descriptors that end its sleep.
    pub fn sources(&self) -> Sources {
        self.sources.clone()
    }

    /// What orders rings and sleeps.
    pub fn barrier(&self) -> Barrier {
        self.barrier
    }

    /// Says that the thread is going to sleep. Afterwards look at every source once more: what was
    /// stored before a [`Bell::ring`] that did nothing can be seen now. Then [`block`](Self::block),
    /// or [`cancel`](Self::cancel) if there is work.
    pub fn announce(&mut self) {
        self.unordered = !self.shared.handshake.announce();
    }

    /// Takes an announcement back. A ring that came meanwhile ends the next sleep at once.
    pub fn cancel(&mut self) {
        self.shared.handshake.withdraw();
    }

    /// As [`announce`](Self::announce), for a [`rest`](Self::rest).
    pub fn announce_rest(&mut self) {
        if std::mem::take(&mut self.stale) {
            // Before the announcement: whoever rings after it writes again.
            let _ = rustix::io::read(&self.shared.event, &mut [0; 8]);
        }
        self.announce();
    }

    /// Rests until a bell rings or `at_most` has passed; descriptors are not waited for. May end for
    /// no reason. Says whether the bell rang.
    pub fn rest(&mut self, at_most: Span) -> bool {
        let at_most = if self.unordered { at_most.min(UNORDERED_MAX) } else { at_most };
        let limit = Timespec {
            tv_sec: i64::try_from(at_most.ns / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(at_most.ns % 1_000_000_000).unwrap_or(0),
        };
        let mut bell = [PollFd::new(&self.shared.event, PollFlags::IN)];
        let rang = match poll(&mut bell, Some(&limit)) {
            Ok(count) => count > 0,
            Err(Errno::INTR) => false,
            Err(errno) => panic!("wait for the bell: {errno}"),
        };
        self.shared.handshake.withdraw();
        self.stale |= rang;
        rang
    }

    /// Sleeps until a bell rings, a descriptor is ready, or `at_most` has passed, and appends the
    /// tokens of ready descriptors to `ready`. May end for no reason; never ends without one of the
    /// three having had its chance. Says whether the bell rang.
    pub fn block(&mut self, at_most: Span, ready: &mut Vec<u64>) -> bool {
        let at_most = if self.unordered { at_most.min(UNORDERED_MAX) } else { at_most };
        let nap = if self.gathers { at_most.min(LINGER) } else { at_most };
        self.sources.prompt.wait(nap, &mut self.found);
        let has_time = nap < at_most && self.found.is_empty();
        let is_over = has_time && self.gather(ready);
        if has_time && !is_over {
            self.sources.prompt.wait(Span { ns: at_most.ns - nap.ns }, &mut self.found);
        }
        self.shared.handshake.withdraw();
        if is_over {
            return false;
        }
        self.take_found(ready)
    }

    /// Looks which descriptors are ready without a sleep, and appends their tokens to `ready`. What
    /// does not fit into one answer of the kernel comes with the next.
    pub fn look(&mut self, ready: &mut Vec<u64>) {
        self.sources.prompt.wait(Span::default(), &mut self.found);
        // Who rang has stored something before, and this is awake to see it.
        self.take_found(ready);
    }

    fn take_found(&mut self, ready: &mut Vec<u64>) -> bool {
        let mut rang = false;
        for token in self.found.tokens() {
            match token {
                BELL => (rang, self.stale) = (true, true),
                LINGERING => self.gathers = true,
                token => ready.push(token),
            }
        }
        if self.gathers {
            self.gather(ready);
        }
        rang
    }

    /// Takes what lingers, while it is not heard. If there is nothing it is heard again. Says whether
    /// there was.
    fn gather(&mut self, ready: &mut Vec<u64>) -> bool {
        let before = ready.len();
        self.gathers = self.sources.lingering.take(&self.sources.prompt, LINGERING, ready);
        ready.len() > before
    }
}

impl fmt::Debug for Sleeper {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Sleeper").field("barrier", &self.barrier).finish_non_exhaustive()
    }
}

impl Bell {
    /// To be called after a store that the sleeper should see. Costs a load while it polls, and the
    /// first ring of a sleep a system call.
    #[inline]
    pub fn ring(&self) {
        if self.0.handshake.claim() {
            self.0.wake();
        }
    }

    /// As [`ring`](Self::ring), after a store that is for this one of those for whom the sleeper
    /// sleeps: it is looked at again if it dozes. Costs a load more while it does not.
    #[inline]
    pub fn ring_for(&self, doze: &Doze) {
        if self.0.handshake.claim_for(doze) {
            self.0.wake();
        }
    }

    /// Whether somebody [was rung for](Self::ring_for) who dozes. To be asked by the sleeper in every
    /// turn, and once more after it has announced a sleep.
    #[inline]
    pub fn is_called(&self) -> bool {
        self.0.handshake.is_called()
    }

    /// Takes that note away. If there was one, each of those that doze and were rung for
    /// [says so](Doze::is_rung).
    pub fn take_call(&self) -> bool {
        self.0.handshake.take_call()
    }
}

impl base::Wake for Bell {
    #[inline]
    fn wake(&self) {
        self.ring();
    }
}

impl Shared {
    #[cold]
    fn wake(&self) {
        let written = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        debug_assert!(matches!(written, Ok(8) | Err(Errno::AGAIN)), "{written:?}");
    }
}

impl Sources {
    /// Makes a descriptor end sleeps while it is readable, with a token for [`Sleeper::block`]. One
    /// who waits for more than that adds an epoll instance of their own.
    ///
    /// The tokens `u64::MAX` and the one below it are refused.
    pub fn add(&self, source: impl AsFd, token: u64) -> io::Result<()> {
        if token >= LINGERING {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.prompt.add(source, token, EventFlags::IN)
    }

    /// From now on a descriptor that was added ends a sleep when something new comes to it, and once
    /// if it is readable now: not for as long as it is.
    pub fn hear_changes(&self, source: impl AsFd, token: u64) -> io::Result<()> {
        self.prompt.modify(source, token, EventFlags::IN | EventFlags::ET)
    }

    /// From now on it ends sleeps while it is readable, as at first.
    pub fn hear_readable(&self, source: impl AsFd, token: u64) -> io::Result<()> {
        self.prompt.modify(source, token, EventFlags::IN)
    }

    /// From now on a descriptor that was added ends a sleep while it is readable, but as much as
    /// [`LINGER`] later if another one of these has ended one lately: several are seen at once.
    pub fn let_linger(&self, source: impl AsFd, token: u64) -> io::Result<()> {
        self.lingering.add(&source, token)?;
        self.prompt.remove(source)
    }

    /// From now on it does not linger, and ends sleeps while it is readable, as at first.
    pub fn hurry(&self, source: impl AsFd, token: u64) -> io::Result<()> {
        self.prompt.add(&source, token, EventFlags::IN)?;
        self.lingering.remove(source)
    }

    /// Forgets a descriptor that does not linger. To be called before it is closed.
    pub fn remove(&self, source: impl AsFd) -> io::Result<()> {
        self.prompt.remove(source)
    }
}

#[cfg(test)]
mod tests;
