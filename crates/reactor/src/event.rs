//! Event log: a bounded list of rare events, readable from any thread; the oldest entries are
//! dropped.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tenmil_base::{Instant, Span};
use tenmil_linux::frequency_control::FrequencyError;

use crate::adaptive_spin::PollMode;
use crate::light_thread::EDGE_MAX;
use crate::registry::{ReactorId, ThreadId};

/// Event on a reactor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A thread started on a reactor.
    ThreadStarted {
        /// The thread.
        thread: ThreadId,
        /// Its name.
        name: String,
        /// Its reactor.
        reactor: ReactorId,
    },
    /// A thread migrated from another reactor.
    ThreadMigrated {
        /// The thread.
        thread: ThreadId,
        /// Its name.
        name: String,
        /// Previous reactor.
        from: ReactorId,
        /// New reactor.
        to: ReactorId,
    },
    /// A thread did not detach in time, and stays where it is.
    MigrationTimeout {
        /// The thread.
        thread: ThreadId,
        /// Its name.
        name: String,
        /// The poller that still had I/O in flight.
        poller: String,
        /// Time limit that expired.
        after: Span,
    },
    /// A thread ended.
    ThreadEnded {
        /// The thread.
        thread: ThreadId,
        /// Its name.
        name: String,
        /// A poller that was dropped with I/O in flight.
        dropped_poller: Option<String>,
    },
    /// A poller panicked and was dropped.
    PollerPanicked(PollerPanicked),
    /// A message panicked; its thread continues.
    MessagePanicked {
        /// The receiving thread.
        thread: ThreadId,
        /// Its name.
        name: String,
        /// Panic message.
        panic: String,
    },
    /// A channel provider panicked while closing a thread's channel; the thread continues.
    ChannelPanicked {
        /// The thread.
        thread: ThreadId,
        /// Its name.
        name: String,
        /// Panic message.
        panic: String,
    },
    /// A task panicked; its executor continues.
    TaskPanicked {
        /// Thread of the executor.
        thread: ThreadId,
        /// Name of the executor.
        executor: String,
        /// Panic message.
        panic: String,
    },
    /// An iteration exceeded its time limit.
    SlowIteration {
        /// The reactor.
        reactor: ReactorId,
        /// Duration.
        took: Span,
        /// What took the most time in it.
        attribution: SlowIterationCause,
    },
    /// An iteration has not returned for so long that it may never do: nothing else on its reactor
    /// runs.
    ReactorStalled {
        /// The reactor.
        reactor: ReactorId,
        /// Time since the watchdog first saw this iteration.
        lasts: Span,
        /// The running poller, or the thread whose message runs.
        running: Option<String>,
        /// What the thread of the reactor is doing, with its stack as far as it is known; `None` in
        /// simulations.
        state: Option<String>,
    },
    /// The kernel refused to wait for a poller's descriptor; its reactor does not sleep.
    WaitFailed {
        /// The poller.
        poller: String,
        /// Its thread.
        thread: ThreadId,
        /// Error of the system call.
        error: String,
    },
    /// A descriptor ended many sleeps in a row at once, without work, and stays readable. From now
    /// on it is edge-triggered, and level-triggered only now and then, until the poller finds work
    /// again.
    SpuriousWakeups {
        /// The poller.
        poller: String,
        /// Its thread.
        thread: ThreadId,
        /// File descriptor number.
        descriptor: i32,
        /// Number of sleeps.
        times: u32,
    },
    /// The poll mode of a reactor changed.
    PollModeChanged {
        /// The reactor.
        reactor: ReactorId,
        /// New poll mode.
        mode: PollMode,
    },
    /// A reactor's OS thread could not be pinned to its core.
    NotPinned {
        /// The reactor.
        reactor: ReactorId,
        /// Reason.
        error: String,
    },
    /// Event of the scheduler.
    Schedule(crate::thread_scheduler::SchedulerEvent),
    /// The frequency of a core could not be set.
    Frequency(FrequencyError),
}

/// Poller that panicked. The object that it served is gone with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PollerPanicked {
    /// Name of the poller.
    pub poller: String,
    /// Its thread.
    pub thread: ThreadId,
    /// Panic message.
    pub panic: String,
}

/// What took the most time in a slow iteration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SlowIterationCause {
    /// This poller.
    Poller(String),
    /// A message to this thread.
    Message(String),
    /// Unknown: the kernel ran another process between two pollers, or several pollers shared one
    /// clock tick. After this each poller is timed for a while, so that the next occurrence can be
    /// attributed.
    Unknown,
}

/// Event with its sequence number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventRecord {
    /// Sequence number: counts up from 0 without gaps.
    pub sequence: u64,
    /// Time of the event.
    pub at: Instant,
    /// The event.
    pub event: Event,
}

/// Events since a sequence number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventBatch {
    /// The events, oldest first.
    pub events: Vec<EventRecord>,
    /// Number of requested events that were already dropped.
    pub missed: u64,
    /// Sequence number for the next query.
    pub next: u64,
}

/// Bounded event log. Its lock is taken when an event occurs, never by an iteration without one.
#[derive(Debug)]
pub(crate) struct EventLog {
    capacity: usize,
    kept: Mutex<EventBuffer>,
}

#[derive(Debug, Default)]
struct EventBuffer {
    noted: VecDeque<EventRecord>,
    next: u64,
}

impl EventLog {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, kept: Mutex::default() }
    }

    pub(crate) fn append(&self, at: Instant, event: Event) {
        let mut kept = self.lock_buffer();
        let sequence = kept.next;
        kept.next += 1;
        kept.noted.push_back(EventRecord { sequence, at, event });
        if kept.noted.len() > self.capacity {
            kept.noted.pop_front();
        }
    }

    /// All stored events from sequence number `from` on.
    pub(crate) fn events_since(&self, from: u64) -> EventBatch {
        let kept = self.lock_buffer();
        let oldest = kept.next - kept.noted.len() as u64;
        let noted = kept.noted.iter().filter(|noted| noted.sequence >= from).cloned().collect();
        EventBatch { events: noted, missed: oldest.saturating_sub(from), next: kept.next }
    }

    fn lock_buffer(&self) -> MutexGuard<'_, EventBuffer> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Event {
    /// Name of the kind of event, for filters and documentation.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::ThreadStarted { .. } => "thread-started",
            Self::ThreadMigrated { .. } => "thread-migrated",
            Self::MigrationTimeout { .. } => "migration-timeout",
            Self::ThreadEnded { .. } => "thread-ended",
            Self::PollerPanicked(_) => "poller-panicked",
            Self::MessagePanicked { .. } => "message-panicked",
            Self::ChannelPanicked { .. } => "channel-panicked",
            Self::TaskPanicked { .. } => "task-panicked",
            Self::SlowIteration { .. } => "iteration-too-long",
            Self::ReactorStalled { .. } => "reactor-stalled",
            Self::WaitFailed { .. } => "wait-unsupported",
            Self::SpuriousWakeups { .. } => "spurious-wakeups",
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
            Self::ThreadMigrated { thread, name, from, to } => {
                write!(out, "thread {thread} '{name}' moved from reactor {from} to {to}")
            }
            Self::MigrationTimeout { thread, name, poller, after } => write!(
                out,
                "move thread {thread} '{name}': poller '{poller}' still had something in flight \
                 after {after}"
            ),
            Self::ThreadEnded { thread, name, dropped_poller: None } => {
                write!(out, "thread {thread} '{name}' ended")
            }
            Self::ThreadEnded { thread, name, dropped_poller: Some(poller) } => write!(
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
            Self::SlowIteration { reactor, took, attribution: cause } => {
                write!(out, "an iteration of reactor {reactor} took {took}: {cause}")
            }
            Self::ReactorStalled { reactor, lasts, running, state } => {
                write!(
                    out,
                    "an iteration of reactor {reactor} has run for more than {lasts} and may not end: {} runs",
                    running.as_deref().unwrap_or("an unknown poller")
                )?;
                state.as_ref().map_or(Ok(()), |state| write!(out, "; {state}"))
            }
            Self::WaitFailed { poller, thread, error } => {
                write!(out, "wait for poller '{poller}' of thread {thread}: {error}")
            }
            Self::SpuriousWakeups { poller, thread, descriptor, times } => write!(
                out,
                "poller '{poller}' of thread {thread}: descriptor {descriptor} ended {times} sleeps \
                 in a row and there was no work, expected it to be readable only while there is \
                 some; from now on only changes wake it, and a poll every {EDGE_MAX}"
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

impl fmt::Display for SlowIterationCause {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Poller(name) => write!(out, "poller '{name}'"),
            Self::Message(name) => write!(out, "a message to thread '{name}'"),
            Self::Unknown => out.write_str("an unknown cause, or the kernel"),
        }
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Instant;

    use super::{Event, EventLog};
    use crate::adaptive_spin::PollMode;
    use crate::registry::ReactorId;

    #[test]
    fn full_event_log_drops_and_counts_the_oldest() {
        let list = EventLog::new(3);
        let event = Event::PollModeChanged { reactor: ReactorId(0), mode: PollMode::Always };
        for ns in 0..5 {
            list.append(Instant { ns }, event.clone());
        }
        let all = list.events_since(0);
        let sequences: Vec<_> = all.events.iter().map(|noted| noted.sequence).collect();
        assert_eq!((sequences.as_slice(), all.missed, all.next), ([2, 3, 4].as_slice(), 2, 5));
        let new = list.events_since(4);
        assert_eq!((new.events.len(), new.missed), (1, 0));
        assert_eq!(list.events_since(all.next).events, []);
    }
}
