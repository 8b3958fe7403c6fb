//! Pollers: what a light thread does, a bounded piece at a time.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;

use base::{Instant, Span, WakeSource};

use crate::context::Context;
use crate::event::PollerPanicked;
use crate::refused::Refused;
use crate::spell::PollMode;

/// A component that is polled by its light thread, and by nobody else.
///
/// It never blocks: each of its calls does a bounded amount of work and returns. All of them but
/// [`poll`](Self::poll) have a default that suits a poller without sources of its own.
pub trait Poller: Send {
    /// Does a bounded amount of work.
    fn poll(&mut self, context: &mut Context<'_>) -> Found;

    /// Makes visible what was put together: doorbells, sockets. Called once at the end of a turn in
    /// which the thread found work, or somebody asked for it with [`Context::flush`], and after the
    /// poller was attached.
    fn flush(&mut self) {}

    /// Takes two words that somebody sent with [`Message::Words`](crate::Message::Words).
    fn message(&mut self, words: [u64; 2], context: &mut Context<'_>) {
        let _ = (words, context);
    }

    /// Called when the reactor has announced that it will sleep. Makes the wake source ready to
    /// signal, and then looks once more: [`Found::Work`] if there is work already, or may be some
    /// that nothing would announce.
    fn arm(&mut self) -> Found {
        Found::Nothing
    }

    /// Called when the sleep is over, or did not take place: the thread looks by itself again. May
    /// come without an [`arm`](Self::arm) before it.
    fn disarm(&mut self) {}

    /// Asked after [`arm`](Self::arm) has found nothing, and before: whether from now on nothing but its
    /// descriptor, a [ring](crate::Handle::ring), a message or its [time](Self::wake_at) brings it
    /// anything, whatever others on its reactor do meanwhile. If all pollers of a thread say so, the
    /// thread may be left armed and not be looked at, while others are: it costs nothing until one of
    /// these comes, and what comes while the reactor is busy with others may be seen a millisecond
    /// later. By default it is polled whenever the reactor is awake.
    fn may_doze(&self) -> bool {
        false
    }

    /// Asked when a sleep begins: whether what comes by its descriptor next may be seen as much as
    /// [`host::LINGER`] later, together with what has come to others of whom that is true. Whoever is
    /// one of a thousand that say now and then that they are there saves a wake-up for each.
    fn may_linger(&self) -> bool {
        false
    }

    /// When it wants to be polled even if nothing happens. One that is woken by its deadline has to
    /// say so: with the default it is refused.
    fn wake_at(&self) -> Instant {
        UNSAID
    }

    /// Whether it has work by itself, so that nobody may sleep. Asked of one that is woken by nothing
    /// [but itself](WokenBy::OnlyWhileBusy), which has to say so: with the default it is refused.
    fn is_busy(&self) -> Option<bool> {
        None
    }

    /// How long, counted from the last turn that found work, what is in flight is likely to take;
    /// nothing if nothing is. In hybrid mode the reactor rests for three quarters of it.
    fn expected_latency(&self) -> Option<Span> {
        None
    }

    /// The thread is about to leave its OS thread: start nothing new, and let go of what the kernel
    /// ties to an OS thread. False while something is still in flight; then it goes on being polled
    /// and is asked again next turn. After true it is polled no more until
    /// [`attach`](Self::attach).
    fn detach(&mut self, parting: Parting) -> bool {
        let _ = parting;
        true
    }

    /// The thread has come to an OS thread: the first, another, or the old one after a move that was
    /// given up. Then it is called whether or not [`detach`](Self::detach) has returned true.
    fn attach(&mut self) {}
}

/// A closure is a poller that is polled, and nothing else.
impl<F: FnMut(&mut Context<'_>) -> Found + Send> Poller for F {
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        self(context)
    }
}

/// What a poller wants that does not say when: no deadline, and no other says the same.
const UNSAID: Instant = Instant { ns: Instant::NEVER.ns - 1 };

/// Why a thread leaves its OS thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parting {
    /// It goes on elsewhere, or here if that comes to nothing: whom it serves does not notice.
    Moves,
    /// It ends.
    Ends,
}

/// What a look for work came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// There was nothing to do.
    Nothing,
    /// Something was done, or is there to be done.
    Work,
}

impl Found {
    /// `Work` if `count` things were found.
    #[inline]
    pub const fn from_count(count: usize) -> Self {
        if count == 0 { Self::Nothing } else { Self::Work }
    }

    /// Whether it is [`Found::Work`].
    #[inline]
    pub const fn is_work(self) -> bool {
        matches!(self, Self::Work)
    }
}

/// What ends a sleep on behalf of a poller. Nobody can be registered without saying so.
#[derive(Debug)]
pub enum WokenBy {
    /// This descriptor becomes readable once [`Poller::arm`] has been called, which takes away what
    /// old signals have left: a descriptor that stays readable ends every sleep at once. If it goes
    /// on like that and the poller finds nothing, an event says so, and the descriptor is listened to
    /// only now and then: every 10 ms at the least. Two descriptors are one epoll instance.
    Descriptor(OwnedFd),
    /// Time does: [`Poller::wake_at`].
    Deadline,
    /// Messages to its thread do, and nothing else brings work.
    Messages,
    /// Nothing brings it work from outside while it has none, for this reason; while it has some,
    /// [`Poller::is_busy`] says so and nobody sleeps.
    OnlyWhileBusy(&'static str),
    /// Nothing does: it can live only where nobody ever sleeps. Refused unless the poll mode is
    /// [`PollMode::Always`].
    Nothing,
}

/// The kind of a wake source, for showing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeKind {
    /// A descriptor.
    Descriptor,
    /// A deadline.
    Deadline,
    /// Messages to the thread.
    Messages,
    /// None is needed, for this reason.
    OnlyWhileBusy(&'static str),
    /// None: the reactor never sleeps.
    Nothing,
}

impl WokenBy {
    /// What wakes a thread that waits for a backend. Takes a descriptor of its own.
    pub fn of(source: WakeSource<'_>) -> io::Result<Self> {
        Ok(match source {
            WakeSource::Nothing => Self::Nothing,
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
            Self::Nothing => WakeKind::Nothing,
        }
    }
}

/// What is done about a poller that panicked, on its own thread.
pub(crate) type WhenPanicked = Box<dyn FnOnce(&mut Context<'_>, PollerPanicked) + Send>;

/// A poller and what its thread has to know about it.
pub struct Registration {
    pub(crate) name: String,
    pub(crate) poller: Box<dyn Poller>,
    pub(crate) woken_by: WokenBy,
    pub(crate) every: Option<Span>,
    pub(crate) paused: bool,
    pub(crate) sleeps_at_once: bool,
    pub(crate) tied: Option<&'static str>,
    pub(crate) when_panicked: Option<WhenPanicked>,
}

impl Registration {
    /// A poller that is polled every turn. What wakes it must be said: there is no default.
    ///
    /// ```compile_fail
    /// # use tenmil_reactor as reactor;
    /// # struct Idle;
    /// # impl reactor::Poller for Idle {
    /// #     fn poll(&mut self, _: &mut reactor::Context<'_>) -> reactor::Found {
    /// #         reactor::Found::Nothing
    /// #     }
    /// # }
    /// reactor::Registration::active("idle", Idle);
    /// ```
    ///
    /// ```
    /// # use tenmil_reactor as reactor;
    /// # struct Idle;
    /// # impl reactor::Poller for Idle {
    /// #     fn poll(&mut self, _: &mut reactor::Context<'_>) -> reactor::Found {
    /// #         reactor::Found::Nothing
    /// #     }
    /// # }
    /// reactor::Registration::active("idle", reactor::WokenBy::Messages, Idle);
    /// ```
    pub fn active(name: &str, woken_by: WokenBy, poller: impl Poller + 'static) -> Self {
        Self::new(name, woken_by, None, Box::new(poller))
    }

    /// A poller that is polled once every `period`, and wakes its reactor for that; never more than
    /// once in a turn, however short the period is.
    pub fn timed(name: &str, period: Span, poller: impl Poller + 'static) -> Self {
        Self::new(name, WokenBy::Deadline, Some(period), Box::new(poller))
    }

    fn new(name: &str, woken_by: WokenBy, every: Option<Span>, poller: Box<dyn Poller>) -> Self {
        let name = name.to_owned();
        Self {
            name,
            poller,
            woken_by,
            every,
            paused: false,
            sleeps_at_once: false,
            tied: None,
            when_panicked: None,
        }
    }

    /// It begins paused.
    #[must_use]
    pub fn paused(self) -> Self {
        Self { paused: true, ..self }
    }

    /// Looking for what it waits for is of no use: the kernel of this machine brings it, on the same
    /// processors. In adaptive mode a reactor sleeps as soon as there is nothing to do, rather than
    /// after a spell, if all pollers that it polls every turn say so.
    #[must_use]
    pub fn sleeps_at_once(self) -> Self {
        Self { sleeps_at_once: true, ..self }
    }

    /// It can live on the reactor where it begins and on no other, for this reason: the first half of
    /// a sentence, such as "its socket belongs to a ring". Its thread is not moved: whoever wants
    /// that is refused.
    #[must_use]
    pub fn tied(self, reason: &'static str) -> Self {
        Self { tied: Some(reason), ..self }
    }

    /// What is done if it panics, after it has been dropped: those it served are told.
    #[must_use]
    pub fn when_panicked(
        self,
        tell: impl FnOnce(&mut Context<'_>, PollerPanicked) + Send + 'static,
    ) -> Self {
        Self { when_panicked: Some(Box::new(tell)), ..self }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether a reactor of this mode can do with it.
    pub(crate) fn check(&self, mode: PollMode) -> Result<(), Refused> {
        let Self { name, poller, woken_by, every, .. } = self;
        let unsaid = match woken_by {
            WokenBy::Nothing if mode != PollMode::Always => {
                return Err(Refused::NoWakeSource { poller: name.clone(), mode });
            }
            WokenBy::Deadline if every.is_none() && poller.wake_at() == UNSAID => "wake_at",
            WokenBy::OnlyWhileBusy(_) if poller.is_busy().is_none() => "is_busy",
            _ => return Ok(()),
        };
        Err(Refused::NeverWoken { poller: name.clone(), woken_by: woken_by.kind(), unsaid })
    }
}

/// When a poller wants to be polled even if nothing happens.
pub(crate) fn wake_at(poller: &dyn Poller) -> Instant {
    Some(poller.wake_at()).filter(|at| *at != UNSAID).unwrap_or(Instant::NEVER)
}

/// A poller's number within its thread. Not used again soon after its poller is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PollerId(u32);

impl PollerId {
    /// The number that the poller at `index` of a [`ThreadPlan`](crate::ThreadPlan) will have.
    pub const fn planned(index: u16) -> Self {
        Self::new(index, 0)
    }

    pub(crate) const fn new(index: u16, generation: u16) -> Self {
        Self((generation as u32) << 16 | index as u32)
    }

    pub(crate) const fn index(self) -> usize {
        (self.0 & 0xffff) as usize
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, woken_by, every, paused, .. } = self;
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
            Self::Nothing => out.write_str("nothing"),
        }
    }
}
