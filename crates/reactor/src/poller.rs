//! Pollers: bounded work of a light thread.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;

use tenmil_base::{Instant, Span, WakeSource};

use crate::adaptive_spin::PollMode;
use crate::context::Context;
use crate::error::ReactorError;
use crate::event::PollerPanicked;

/// Component that is polled by its light thread.
///
/// It never blocks: each call does a bounded amount of work and returns. All methods but
/// [`poll`](Self::poll) have a default for pollers without wake-up sources of their own.
pub trait Poller: Send {
    /// Does a bounded amount of work.
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult;

    /// Makes prepared work visible: doorbells, sockets. Called once at the end of an iteration in
    /// which the thread found work or a flush was requested with [`Context::request_poller_flush`], and after the
    /// poller was attached.
    fn flush(&mut self) {}

    /// Handles two words sent with [`Message::Data`](crate::Message::Data).
    fn handle_message(&mut self, words: [u64; 2], context: &mut Context<'_>) {
        let _ = (words, context);
    }

    /// Arms the wake-up source, and then checks once more: [`PollResult::Busy`] if there may be
    /// work that would not be signaled. Called after the reactor has announced its sleep.
    fn arm(&mut self) -> PollResult {
        PollResult::Idle
    }

    /// Disarms the wake-up source: the thread polls again. Called after a sleep or its omission,
    /// possibly without a preceding [`arm`](Self::arm).
    fn disarm(&mut self) {}

    /// Whether only its descriptor, a [notification](crate::ThreadHandle::notify_reactor), a message or its
    /// [deadline](Self::wake_at) brings it work, regardless of other pollers on its reactor.
    ///
    /// Evaluated before and after an [`arm`](Self::arm) that found nothing. If all pollers of a
    /// thread return true, the thread may be parked: it stays armed and is not polled while others
    /// run. It then costs nothing until one of these events, and an event that occurs while the
    /// reactor is busy may be seen a millisecond late. By default a poller is polled whenever its
    /// reactor is awake.
    fn may_park(&self) -> bool {
        false
    }

    /// Whether the next event of its descriptor may be handled up to [`tenmil_linux::COALESCE_DELAY`] late,
    /// together with those of other such pollers. Evaluated when a sleep begins. Saves a wake-up
    /// per connection where a thousand connections only send keep-alives.
    fn may_coalesce_wakeups(&self) -> bool {
        false
    }

    /// Time at which it must be polled even if nothing happens. Required of pollers woken by
    /// [`PollerWake::Deadline`]: with the default implementation they are rejected.
    fn wake_at(&self) -> Instant {
        NOT_IMPLEMENTED
    }

    /// Whether it has work of its own, so that the reactor must not sleep. Required of pollers
    /// registered with [`PollerWake::OnlyWhileBusy`]: with the default implementation they are
    /// rejected.
    fn is_busy(&self) -> Option<bool> {
        None
    }

    /// Expected completion time of its I/O in flight, counted from the last iteration that found
    /// work; `None` if nothing is in flight. In hybrid mode the reactor pauses for three quarters
    /// of it.
    fn expected_latency(&self) -> Option<Span> {
        None
    }

    /// Whether spinning can find its work before it is announced. False if its I/O takes so long that a wake-up
    /// adds little to it ([`MeanLatency::is_long`](crate::MeanLatency::is_long)). Asked before each sleep, and now and
    /// then while the reactor does not sleep.
    fn can_spin_help(&self) -> bool {
        true
    }

    /// Prepares to leave the OS thread: starts nothing new, and releases what the kernel ties to an
    /// OS thread.
    ///
    /// Returns false while I/O is in flight; then it is polled further and called again in the next
    /// iteration. After true it is not polled until [`attach`](Self::attach).
    fn try_detach(&mut self, parting: DetachReason) -> bool {
        let _ = parting;
        true
    }

    /// Attaches it to an OS thread: the first one, another one, or the same one after a canceled
    /// migration, in which case it is called whether or not [`try_detach`](Self::try_detach) has returned
    /// true.
    fn attach(&mut self) {}
}

/// A closure is a poller without any other method.
impl<F: FnMut(&mut Context<'_>) -> PollResult + Send> Poller for F {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        self(context)
    }
}

/// Default of `wake_at`, which marks it as not implemented: no deadline, and distinct from `NEVER`.
const NOT_IMPLEMENTED: Instant = Instant { ns: Instant::NEVER.ns - 1 };

/// Reason why a thread leaves its OS thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DetachReason {
    /// The thread continues on another reactor, or on this one if the migration fails: its clients do not
    /// notice.
    Migrating,
    /// The thread ends.
    Exiting,
}

/// Result of a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollResult {
    /// No work was found.
    Idle,
    /// Work was done or is pending.
    Busy,
}

impl PollResult {
    /// `Busy` unless `count` is zero.
    #[inline]
    pub const fn from_count(count: usize) -> Self {
        if count == 0 { Self::Idle } else { Self::Busy }
    }

    /// Whether it is [`PollResult::Busy`].
    #[inline]
    pub const fn is_busy(self) -> bool {
        matches!(self, Self::Busy)
    }
}

/// Event that ends a sleep on behalf of a poller. Every registration declares one.
#[derive(Debug)]
pub enum PollerWake {
    /// This descriptor becomes readable after [`Poller::arm`], which consumes earlier signals: a
    /// descriptor that stays readable ends every sleep at once. If that continues without work, an
    /// event is recorded and the descriptor is examined only now and then: at least every 10 ms.
    /// Several descriptors are combined in one epoll instance.
    Descriptor(OwnedFd),
    /// A deadline: [`Poller::wake_at`].
    Deadline,
    /// Messages to its thread; nothing else brings it work.
    Messages,
    /// No external event brings it work while it has none, for this reason; while it has some,
    /// [`Poller::is_busy`] returns true and the reactor does not sleep.
    OnlyWhileBusy(&'static str),
    /// Nothing wakes it: it requires a reactor that never sleeps. Rejected unless the poll mode is
    /// [`PollMode::Always`].
    Never,
}

/// Kind of a wake-up source, for display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeKind {
    /// A descriptor.
    Descriptor,
    /// A deadline.
    Deadline,
    /// Messages to the thread.
    Messages,
    /// None needed, for this reason.
    OnlyWhileBusy(&'static str),
    /// None: the reactor never sleeps.
    Never,
}

impl PollerWake {
    /// Wake-up source of an I/O channel. Duplicates its descriptor.
    pub fn from_source(source: WakeSource<'_>) -> io::Result<Self> {
        Ok(match source {
            WakeSource::None => Self::Never,
            WakeSource::Deadline => Self::Deadline,
            WakeSource::Descriptor(descriptor) => {
                Self::Descriptor(descriptor.try_clone_to_owned()?)
            }
        })
    }

    /// Its kind.
    pub const fn kind(&self) -> WakeKind {
        match self {
            Self::Descriptor(_) => WakeKind::Descriptor,
            Self::Deadline => WakeKind::Deadline,
            Self::Messages => WakeKind::Messages,
            Self::OnlyWhileBusy(reason) => WakeKind::OnlyWhileBusy(reason),
            Self::Never => WakeKind::Never,
        }
    }
}

/// Callback after a poller panicked, run on its own thread.
pub(crate) type PanicHandler = Box<dyn FnOnce(&mut Context<'_>, PollerPanicked) + Send>;

/// Poller with its registration options.
pub struct PollerBuilder {
    pub(crate) name: String,
    pub(crate) poller: Box<dyn Poller>,
    pub(crate) wake: PollerWake,
    pub(crate) every: Option<Span>,
    pub(crate) paused: bool,
    pub(crate) no_spin: bool,
    pub(crate) pinned: Option<&'static str>,
    pub(crate) on_panic: Option<PanicHandler>,
}

impl PollerBuilder {
    /// A poller that is polled in every iteration. Its wake-up source must be declared: there is no
    /// default.
    ///
    /// ```compile_fail
    /// # use tenmil_reactor as reactor;
    /// # struct Idle;
    /// # impl tenmil_reactor::Poller for Idle {
    /// #     fn poll(&mut self, _: &mut tenmil_reactor::Context<'_>) -> tenmil_reactor::PollResult {
    /// #         tenmil_reactor::PollResult::Idle
    /// #     }
    /// # }
    /// tenmil_reactor::PollerBuilder::polled_each_iteration("idle", Idle);
    /// ```
    ///
    /// ```
    /// # use tenmil_reactor as reactor;
    /// # struct Idle;
    /// # impl tenmil_reactor::Poller for Idle {
    /// #     fn poll(&mut self, _: &mut tenmil_reactor::Context<'_>) -> tenmil_reactor::PollResult {
    /// #         tenmil_reactor::PollResult::Idle
    /// #     }
    /// # }
    /// tenmil_reactor::PollerBuilder::polled_each_iteration("idle", tenmil_reactor::PollerWake::Messages, Idle);
    /// ```
    pub fn polled_each_iteration(
        name: &str,
        woken_by: PollerWake,
        poller: impl Poller + 'static,
    ) -> Self {
        Self::new(name, woken_by, None, Box::new(poller))
    }

    /// A poller that is polled once every `period` and wakes its reactor for that; at most once per
    /// iteration, however short the period is.
    pub fn polled_each_period(name: &str, period: Span, poller: impl Poller + 'static) -> Self {
        Self::new(name, PollerWake::Deadline, Some(period), Box::new(poller))
    }

    fn new(name: &str, woken_by: PollerWake, every: Option<Span>, poller: Box<dyn Poller>) -> Self {
        let name = name.to_owned();
        Self {
            name,
            poller,
            wake: woken_by,
            every,
            paused: false,
            no_spin: false,
            pinned: None,
            on_panic: None,
        }
    }

    /// Starts it paused.
    #[must_use]
    pub fn paused(self) -> Self {
        Self { paused: true, ..self }
    }

    /// Declares that spinning does not help it: the local kernel does the work, on the same CPUs.
    /// In adaptive mode a reactor sleeps at once instead of after the spin time if all its active
    /// pollers declare this.
    #[must_use]
    pub fn no_spin(self) -> Self {
        Self { no_spin: true, ..self }
    }

    /// Pins it to its first reactor, for this reason: the first half of a sentence, such as "its
    /// socket belongs to a ring". Its thread is not migrated; requests for that are rejected.
    #[must_use]
    pub fn pinned(self, reason: &'static str) -> Self {
        Self { pinned: Some(reason), ..self }
    }

    /// Sets the callback that runs after it panicked and was dropped, for instance to inform its
    /// clients.
    #[must_use]
    pub fn on_panic(
        self,
        tell: impl FnOnce(&mut Context<'_>, PollerPanicked) + Send + 'static,
    ) -> Self {
        Self { on_panic: Some(Box::new(tell)), ..self }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Checks that a reactor in this poll mode can run it.
    pub(crate) fn check_poll_mode(&self, mode: PollMode) -> Result<(), ReactorError> {
        let Self { name, poller, wake: woken_by, every, .. } = self;
        let unsaid = match woken_by {
            PollerWake::Never if mode != PollMode::Always => {
                return Err(ReactorError::NoWakeSource { poller: name.clone(), mode });
            }
            PollerWake::Deadline if every.is_none() && poller.wake_at() == NOT_IMPLEMENTED => {
                "wake_at"
            }
            PollerWake::OnlyWhileBusy(_) if poller.is_busy().is_none() => "is_busy",
            _ => return Ok(()),
        };
        Err(ReactorError::MissingWakeCall {
            poller: name.clone(),
            woken_by: woken_by.kind(),
            unsaid,
        })
    }
}

/// Time at which a poller must be polled even if nothing happens.
pub(crate) fn wake_at(poller: &dyn Poller) -> Instant {
    Some(poller.wake_at()).filter(|at| *at != NOT_IMPLEMENTED).unwrap_or(Instant::NEVER)
}

/// Number of a poller within its thread. Not reused soon after the poller is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PollerId(u32);

impl PollerId {
    /// Number of the poller at `index` of a [`ThreadBuilder`](crate::ThreadBuilder).
    pub const fn of_builder_index(index: u16) -> Self {
        Self::new(index, 0)
    }

    pub(crate) const fn new(index: u16, generation: u16) -> Self {
        Self((generation as u32) << 16 | index as u32)
    }

    pub(crate) const fn index(self) -> usize {
        (self.0 & 0xffff) as usize
    }
}

impl fmt::Debug for PollerBuilder {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, wake: woken_by, every, paused, .. } = self;
        let mut out = out.debug_struct("Registration");
        out.field("name", name).field("woken_by", woken_by);
        out.field("every", every).field("paused", paused).finish_non_exhaustive()
    }
}

impl fmt::Display for WakeKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Descriptor => out.write_str("descriptor"),
            Self::Deadline => out.write_str("deadline"),
            Self::Messages => out.write_str("messages"),
            Self::OnlyWhileBusy(reason) => write!(out, "only while busy: {reason}"),
            Self::Never => out.write_str("nothing"),
        }
    }
}
