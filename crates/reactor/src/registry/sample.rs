//! Sample of all statistics as plain values.

use tenmil_base::{Instant, Span};
use tenmil_linux::CpuList;

use super::{ReactorId, ThreadId};
use crate::adaptive_spin::PollMode;
use crate::poller::WakeKind;

/// State of all reactors and threads at one moment, accurate to about a millisecond.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StatisticsSample {
    /// Time of the sample.
    pub at: Instant,
    /// Reactors, by number.
    pub reactors: Vec<ReactorSample>,
    /// Threads, by number.
    pub threads: Vec<ThreadSample>,
}

/// Statistics of a reactor. Counters start with it and never decrease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReactorSample {
    /// Reactor number.
    pub id: ReactorId,
    /// Its core.
    pub core: u32,
    /// Poll mode.
    pub mode: PollMode,
    /// Whether it is asleep now.
    pub sleeping: bool,
    /// Iterations.
    pub iterations: u64,
    /// Time in iterations that found work.
    pub busy: Span,
    /// Remaining time, asleep or not.
    pub idle: Span,
    /// Number of sleeps.
    pub sleeps: u64,
    /// Number of wake-ups.
    pub wakes: u64,
    /// Messages run.
    pub messages: u64,
    /// Threads that arrived from other reactors.
    pub migrations: u64,
    /// Iterations that exceeded the time limit.
    pub slow_iterations: u64,
    /// Longest iteration.
    pub longest_iteration: Span,
    /// What took the most time in it, if it exceeded the limit.
    pub longest_attribution: Option<String>,
    /// Mailbox or poller that runs, or ran last. Comparing two samples reveals an iteration that
    /// does not return, and what runs in it.
    pub running: Option<String>,
    /// Start of the current iteration.
    pub iteration_started: Instant,
}

/// Statistics of a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadSample {
    /// Thread number.
    pub id: ThreadId,
    /// Thread name.
    pub name: String,
    /// Its reactor.
    pub home: ReactorId,
    /// Permitted cores; `None` is all.
    pub mask: Option<CpuList>,
    /// NUMA node of its data, if known.
    pub node: Option<u32>,
    /// Time in which it found work.
    pub busy: Span,
    /// Remaining time of its life.
    pub idle: Span,
    /// Messages run.
    pub messages: u64,
    /// Migrations.
    pub migrations: u64,
    /// Open channels.
    pub channels: u64,
    /// Its pollers.
    pub pollers: Vec<PollerSample>,
}

/// Statistics of a poller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PollerSample {
    /// Name.
    pub name: String,
    /// Wake-up source.
    pub wake: WakeKind,
    /// Reason why it is pinned, if it is.
    pub pinned: Option<&'static str>,
    /// Period, if it is timed.
    pub every: Option<Span>,
    /// Whether it is paused.
    pub paused: bool,
    /// Polls.
    pub polls: u64,
    /// Polls that found work.
    pub found: u64,
    /// Sleeps that its descriptor ended at once without work, several times in a row.
    pub spurious_wakeups: u64,
}
