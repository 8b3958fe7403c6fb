//! A look at all books at once, as plain values.

use base::{Instant, Span};
use host::Cores;

use super::{ReactorId, ThreadId};
use crate::poller::WakeKind;
use crate::spell::PollMode;

/// All reactors and all threads, as of one moment, to about a millisecond.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// When.
    pub at: Instant,
    /// The reactors, by number.
    pub reactors: Vec<ReactorSample>,
    /// The threads, by number.
    pub threads: Vec<ThreadSample>,
}

/// One reactor. Counters begin with it and never run backwards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReactorSample {
    /// Its number.
    pub id: ReactorId,
    /// The core it was meant for.
    pub core: u32,
    /// How it polls.
    pub mode: PollMode,
    /// Whether it sleeps at this moment.
    pub asleep: bool,
    /// Turns.
    pub turns: u64,
    /// Time in turns that found work.
    pub busy: Span,
    /// The rest of its time, asleep or not.
    pub idle: Span,
    /// Times it went to sleep.
    pub sleeps: u64,
    /// Times it woke.
    pub wakes: u64,
    /// Messages that were run on it.
    pub messages: u64,
    /// Threads that came from other reactors.
    pub moves: u64,
    /// Turns that took longer than they may.
    pub turns_too_long: u64,
    /// The longest turn.
    pub longest_turn: Span,
    /// What took the time in it, if it was too long.
    pub longest_culprit: Option<String>,
    /// The mailbox or poller that runs, or ran last; and since when the turn lasts. Who compares
    /// two samples sees a turn that does not end, and in whom.
    pub running: Option<String>,
    /// When the turn began.
    pub turn_began: Instant,
}

/// One thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadSample {
    /// Its number.
    pub id: ThreadId,
    /// Its name.
    pub name: String,
    /// Where it lives.
    pub home: ReactorId,
    /// Where it may live; everywhere if there is none.
    pub mask: Option<Cores>,
    /// The memory node where its data lies, if that is known.
    pub node: Option<u32>,
    /// Time in which it found work.
    pub busy: Span,
    /// The rest of its life.
    pub idle: Span,
    /// Messages it has run.
    pub messages: u64,
    /// Moves it has made.
    pub moves: u64,
    /// Channels it has open.
    pub channels: u64,
    /// Its pollers.
    pub pollers: Vec<PollerSample>,
}

/// One poller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PollerSample {
    /// Its name.
    pub name: String,
    /// What wakes it.
    pub wake: WakeKind,
    /// Why it cannot leave its reactor, if it cannot.
    pub tied: Option<&'static str>,
    /// Its period, if it is timed.
    pub every: Option<Span>,
    /// Whether it is paused.
    pub paused: bool,
    /// How often it was polled.
    pub polls: u64,
    /// How often it found work.
    pub found: u64,
    /// How often its descriptor ended a sleep at once although there was no work, several times in a
    /// row.
    pub woken_in_vain: u64,
}
