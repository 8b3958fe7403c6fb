//! What happened: a bounded list that everybody may read, in which the oldest make room.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use base::{Instant, Span};
use host::frequency::FrequencyError;

use crate::directory::{ReactorId, ThreadId};
use crate::spell::PollMode;
use crate::thread::WARY_MAX;

/// Something that happened on a reactor, rare enough to be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A thread began to live on a reactor.
    ThreadStarted {
        /// Which.
        thread: ThreadId,
        /// Its name.
        name: String,
        /// Where.
        reactor: ReactorId,
    },
    /// A thread came from another reactor.
    ThreadMoved {
        /// Which.
        thread: ThreadId,
        /// Its name.
        name: String,
        /// Whence.
        from: ReactorId,
        /// Whither.
        to: ReactorId,
    },
    /// A thread did not let go in time, and stays where it is.
    MoveGivenUp {
        /// Which.
        thread: ThreadId,
        /// Its name.
        name: String,
        /// The poller that still had something in flight.
        poller: String,
        /// How long it was waited for.
        after: Span,
    },
    /// A thread is no more.
    ThreadEnded {
        /// Which.
        thread: ThreadId,
        /// Its name.
        name: String,
        /// The poller that was dropped although it still had something in flight.
        cut_off: Option<String>,
    },
    /// A poller panicked; it has been dropped.
    PollerPanicked(PollerPanicked),
    /// A message panicked; its thread goes on.
    MessagePanicked {
        /// Whose message.
        thread: ThreadId,
        /// The thread's name.
        name: String,
        /// What the panic said.
        panic: String,
    },
    /// A shared object panicked while it closed a thread's channel; the thread goes on.
    ChannelPanicked {
        /// Whose channel.
        thread: ThreadId,
        /// The thread's name.
        name: String,
        /// What the panic said.
        panic: String,
    },
    /// A task panicked; its executor goes on.
    TaskPanicked {
        /// The thread of its executor.
        thread: ThreadId,
        /// The executor's name.
        executor: String,
        /// What the panic said.
        panic: String,
    },
    /// A turn took longer than it may.
    TurnTooLong {
        /// Whose.
        reactor: ReactorId,
        /// How long.
        took: Span,
        /// What took the longest in it.
        culprit: Culprit,
    },
    /// A turn has lasted for so long that it may have no end: nothing else on its reactor runs, and
    /// whatever it serves stands still.
    TurnWithoutEnd {
        /// Whose.
        reactor: ReactorId,
        /// How long somebody has seen it last.
        lasts: Span,
        /// The poller that runs, or the thread whose message does.
        running: Option<String>,
    },
    /// A poller's descriptor could not be waited for; its reactor does not sleep.
    NotWaitedFor {
        /// Which poller.
        poller: String,
        /// Its thread.
        thread: ThreadId,
        /// What the kernel answered.
        error: String,
    },
    /// A descriptor ended so many sleeps in a row at once, its poller found nothing, and it stays
    /// readable. From now on it is heard when that changes, and else only now and then, until the
    /// poller finds work again.
    WokenInVain {
        /// Which poller.
        poller: String,
        /// Its thread.
        thread: ThreadId,
        /// The descriptor's number in this process.
        descriptor: i32,
        /// How many sleeps.
        times: u32,
    },
    /// A reactor polls in another way now.
    PollModeChanged {
        /// Which.
        reactor: ReactorId,
        /// How.
        mode: PollMode,
    },
    /// A reactor's OS thread could not be bound to its core, and runs where the kernel likes.
    NotPinned {
        /// Which.
        reactor: ReactorId,
        /// Why.
        error: String,
    },
    /// The scheduler has something to tell.
    Schedule(crate::schedule::Event),
    /// The frequency of a core could not be chosen.
    Frequency(FrequencyError),
}

/// A poller that panicked. The object it served is gone with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PollerPanicked {
    /// Its name.
    pub poller: String,
    /// Its thread.
    pub thread: ThreadId,
    /// What the panic said.
    pub panic: String,
}

/// Who took the time in a turn that was too long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Culprit {
    /// This poller.
    Poller(String),
    /// A message to this thread.
    Message(String),
    /// It cannot be told: the kernel ran somebody else on the core between two of them, or several
    /// shared a tick of its clock. Now and then each poller is timed for a while after this, so that
    /// it can be named the next time.
    Unknown,
}

/// An event with its place in the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Noted {
    /// Counts up from 0; no number is left out or used twice.
    pub sequence: u64,
    /// When.
    pub at: Instant,
    /// What.
    pub event: Event,
}

/// A look at the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Events {
    /// What happened, oldest first.
    pub noted: Vec<Noted>,
    /// How many of those asked for have made room already.
    pub missed: u64,
    /// What to ask for next time.
    pub next: u64,
}

/// The list itself. Its lock is taken when something happened, never by a turn in which nothing did.
#[derive(Debug)]
pub(crate) struct EventList {
    capacity: usize,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    noted: VecDeque<Noted>,
    next: u64,
}

impl EventList {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, kept: Mutex::default() }
    }

    pub(crate) fn note(&self, at: Instant, event: Event) {
        let mut kept = self.kept();
        let sequence = kept.next;
        kept.next += 1;
        kept.noted.push_back(Noted { sequence, at, event });
        if kept.noted.len() > self.capacity {
            kept.noted.pop_front();
        }
    }

    /// All that are kept from number `from` on.
    pub(crate) fn since(&self, from: u64) -> Events {
        let kept = self.kept();
        let oldest = kept.next - kept.noted.len() as u64;
        let noted = kept.noted.iter().filter(|noted| noted.sequence >= from).cloned().collect();
        Events { noted, missed: oldest.saturating_sub(from), next: kept.next }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Event {
    /// One word for what happened, for filters and documentation.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::ThreadStarted { .. } => "thread-started",
            Self::ThreadMoved { .. } => "thread-moved",
            Self::MoveGivenUp { .. } => "move-given-up",
            Self::ThreadEnded { .. } => "thread-ended",
            Self::PollerPanicked(_) => "poller-panicked",
            Self::MessagePanicked { .. } => "message-panicked",
            Self::ChannelPanicked { .. } => "channel-panicked",
            Self::TaskPanicked { .. } => "task-panicked",
            Self::TurnTooLong { .. } => "turn-too-long",
            Self::TurnWithoutEnd { .. } => "turn-without-end",
            Self::NotWaitedFor { .. } => "not-waited-for",
            Self::WokenInVain { .. } => "woken-in-vain",
            Self::PollModeChanged { .. } => "poll-mode-changed",
            Self::NotPinned { .. } => "not-pinned",
            Self::Schedule(event) => event.kind(),
            Self::Frequency(_) => "frequency",
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ThreadStarted { thread, name, reactor } => {
                write!(out, "thread {thread} '{name}' started on reactor {reactor}")
            }
            Self::ThreadMoved { thread, name, from, to } => {
                write!(out, "thread {thread} '{name}' moved from reactor {from} to {to}")
            }
            Self::MoveGivenUp { thread, name, poller, after } => write!(
                out,
                "move thread {thread} '{name}': poller '{poller}' still had something in flight \
                 after {after}"
            ),
            Self::ThreadEnded { thread, name, cut_off: None } => {
                write!(out, "thread {thread} '{name}' ended")
            }
            Self::ThreadEnded { thread, name, cut_off: Some(poller) } => write!(
                out,
                "thread {thread} '{name}' ended with something in flight in poller '{poller}'"
            ),
            Self::PollerPanicked(panicked) => write!(out, "{panicked}"),
            Self::MessagePanicked { thread, name, panic } => {
                write!(out, "a message to thread {thread} '{name}' panicked: {panic}")
            }
            Self::ChannelPanicked { thread, name, panic } => {
                write!(out, "close a channel of thread {thread} '{name}': panicked: {panic}")
            }
            Self::TaskPanicked { thread, executor, panic } => {
                write!(out, "a task of '{executor}' on thread {thread} panicked: {panic}")
            }
            Self::TurnTooLong { reactor, took, culprit } => {
                write!(out, "a turn of reactor {reactor} took {took}: {culprit}")
            }
            Self::TurnWithoutEnd { reactor, lasts, running } => write!(
                out,
                "a turn of reactor {reactor} lasts for more than {lasts} and may have no end: '{}' runs",
                running.as_deref().unwrap_or("somebody unknown")
            ),
            Self::NotWaitedFor { poller, thread, error } => {
                write!(out, "wait for poller '{poller}' of thread {thread}: {error}")
            }
            Self::WokenInVain { poller, thread, descriptor, times } => write!(
                out,
                "poller '{poller}' of thread {thread}: descriptor {descriptor} ended {times} sleeps \
                 in a row and there was no work, expected it to be readable only while there is \
                 some; it is heard when it changes, and every {WARY_MAX} at the least"
            ),
            Self::PollModeChanged { reactor, mode } => {
                write!(out, "reactor {reactor} polls in mode {mode}")
            }
            Self::NotPinned { reactor, error } => write!(out, "reactor {reactor}: {error}"),
            Self::Schedule(event) => write!(out, "{event}"),
            Self::Frequency(error) => write!(out, "{error}"),
        }
    }
}

impl fmt::Display for PollerPanicked {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { poller, thread, panic } = self;
        write!(out, "poller '{poller}' of thread {thread} panicked: {panic}")
    }
}

impl std::error::Error for PollerPanicked {}

impl fmt::Display for Culprit {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Poller(name) => write!(out, "poller '{name}'"),
            Self::Message(name) => write!(out, "a message to thread '{name}'"),
            Self::Unknown => out.write_str("somebody unknown, or the kernel"),
        }
    }
}

#[cfg(test)]
mod tests {
    use base::Instant;

    use super::{Event, EventList};
    use crate::directory::ReactorId;
    use crate::spell::PollMode;

    #[test]
    fn the_oldest_make_room_and_are_counted() {
        let list = EventList::new(3);
        let event = Event::PollModeChanged { reactor: ReactorId(0), mode: PollMode::Always };
        for ns in 0..5 {
            list.note(Instant { ns }, event.clone());
        }
        let all = list.since(0);
        let sequences: Vec<_> = all.noted.iter().map(|noted| noted.sequence).collect();
        assert_eq!((sequences.as_slice(), all.missed, all.next), ([2, 3, 4].as_slice(), 2, 5));
        let new = list.since(4);
        assert_eq!((new.noted.len(), new.missed), (1, 0));
        assert_eq!(list.since(all.next).noted, []);
    }
}
