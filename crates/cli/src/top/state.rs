//! Application state of the live view: data from the process and selections of the user.

use std::collections::{BTreeMap, VecDeque};

use super::history::MinuteHistory;
use super::order::Sort;
use super::rates::{Rates, rates};
use super::sample::{Process, Sample};

/// Everything shown on the screen.
#[derive(Clone, Debug, Default)]
pub(crate) struct AppState {
    pub(crate) stage: ConnectionStage,
    pub(crate) process: Option<Process>,
    /// Scheduling policy, if the process has a scheduler.
    pub(crate) policy: Option<String>,
    pub(crate) shown: Option<DisplayedSample>,
    /// Timestamp of the first sample.
    pub(crate) first_ns: Option<u64>,
    /// Newest sample, also while the display is paused.
    newest: Option<Sample>,
    pub(crate) whole: MinuteHistory,
    pub(crate) reactors: BTreeMap<u32, MinuteHistory>,
    /// Events, newest last.
    pub(crate) happened: VecDeque<EventLine>,
    pub(crate) focus: Table,
    pub(crate) chosen: Chosen,
    /// Show only the threads of the selected reactor.
    pub(crate) is_narrow: bool,
    pub(crate) sorts: BTreeMap<Table, Sort>,
    pub(crate) is_paused: bool,
    pub(crate) is_help: bool,
    pub(crate) is_over: bool,
}

/// State of the connection to the watched process.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum ConnectionStage {
    /// No process found yet.
    #[default]
    Looking,
    /// Several processes found; the user has to select one.
    Choosing(Vec<Running>),
    /// Connected and responding.
    Watching,
    /// Connected but not responding; the text is the error.
    Silent(String),
    /// The process has exited; the text is the error.
    Exited(String),
}

/// Process that can be watched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Running {
    pub(crate) pid: u32,
    pub(crate) command_line: String,
}

/// Displayed sample, and the rates since the previous one.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct DisplayedSample {
    pub(crate) sample: Sample,
    pub(crate) rates: Option<Rates>,
}

/// Event of the process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EventLine {
    pub(crate) kind: String,
    pub(crate) text: String,
}

/// Table on the screen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Table {
    Reactors,
    #[default]
    Threads,
    Pollers,
}

/// Selected rows. Reactors and threads are selected by number, so that the selection follows them when
/// rows are reordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Chosen {
    pub(crate) process: usize,
    pub(crate) reactor: Option<u32>,
    pub(crate) thread: Option<u32>,
    pub(crate) poller: usize,
}

/// Data from the sampling thread.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Update {
    /// Running processes, if not exactly one.
    Running(Vec<Running>),
    /// Connected to this process.
    Attached(Process),
    /// A sample.
    Looked {
        /// Reactors, threads and pollers.
        sample: Sample,
        /// Scheduling policy.
        policy: Option<String>,
    },
    /// An event of the process.
    Happened(EventLine),
    /// The process did not respond in time.
    Silent(String),
    /// The process has exited.
    Exited(String),
}

/// Maximum number of events kept.
const HAPPENED_MAX: usize = 64;

impl Table {
    pub(crate) const ALL: [Self; 3] = [Self::Reactors, Self::Threads, Self::Pollers];

    /// Title of the table.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Reactors => "reactors",
            Self::Threads => "threads",
            Self::Pollers => "pollers",
        }
    }
}

impl AppState {
    /// Applies an update.
    pub(crate) fn take(&mut self, new_events: Update) {
        match new_events {
            Update::Running(running) if running.is_empty() => self.reset_stage(),
            Update::Running(running) => {
                self.chosen.process = self.chosen.process.min(running.len() - 1);
                self.stage = ConnectionStage::Choosing(running);
            }
            Update::Attached(process) => self.attach(process),
            Update::Looked { sample, policy } => self.select(sample, policy),
            Update::Happened(happened) => {
                self.happened.push_back(happened);
                if self.happened.len() > HAPPENED_MAX {
                    self.happened.pop_front();
                }
            }
            Update::Silent(why) => self.stage = ConnectionStage::Silent(why),
            Update::Exited(why) => self.stage = ConnectionStage::Exited(why),
        }
    }

    /// The last data of a process that has exited stay on the screen.
    fn reset_stage(&mut self) {
        if !matches!(self.stage, ConnectionStage::Exited(_)) {
            self.stage = ConnectionStage::Looking;
        }
    }

    /// Resets the measurements for a new process.
    fn attach(&mut self, process: Process) {
        let Self { focus, is_help, is_over, .. } = *self;
        let sorts = std::mem::take(&mut self.sorts);
        let process = Some(process);
        *self = Self {
            stage: ConnectionStage::Watching,
            process,
            focus,
            sorts,
            is_help,
            is_over,
            ..Self::default()
        };
    }

    fn select(&mut self, sample: Sample, policy: Option<String>) {
        self.stage = ConnectionStage::Watching;
        self.first_ns.get_or_insert(sample.monotonic_ns);
        let before = self.newest.replace(sample.clone());
        if self.is_paused {
            return;
        }
        let rates = before.map(|before| rates(&before, &sample)).filter(|it| it.span_ns > 0);
        if let Some(rates) = &rates {
            self.whole.record(sample.monotonic_ns, rates.whole.busy_percent);
            self.reactors.retain(|id, _| sample.reactors.iter().any(|reactor| reactor.id == *id));
            for (reactor, rates) in sample.reactors.iter().zip(&rates.reactors) {
                let minute = self.reactors.entry(reactor.id).or_default();
                minute.record(sample.monotonic_ns, rates.busy_percent);
            }
        }
        self.policy = policy;
        self.shown = Some(DisplayedSample { sample, rates });
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{AppState, ConnectionStage, EventLine, Running, Update};
    use crate::top::sample::{Poller, Process, Reactor, Sample, Thread};

    const SECOND: u64 = 1_000_000_000;

    /// A sample with this many reactors and threads, after `seconds` in which reactor and thread `n`
    /// were busy for `10 n` percent of the time.
    pub(crate) fn sample(seconds: u64, reactors: u32, threads: u32) -> Sample {
        let busy_ns = |id: u32| seconds * (SECOND / 10) * u64::from(id.min(10));
        let reactor = |id| Reactor {
            id,
            core: id,
            mode: "adaptive".into(),
            sleeping: id == 0,
            busy_ns: busy_ns(id),
            iterations: seconds * 1_000,
            sleeps: seconds * 40,
            messages: seconds * 3_200,
            longest_iteration_ns: 250_000,
            longest_iteration_cause: Some(format!("poller 'queue-{id}'")),
            ..Reactor::default()
        };
        let thread = |id| Thread {
            id,
            name: format!("thread-{id}"),
            reactor: id % reactors.max(1),
            mask: (id % 2 == 0).then(|| "0-3".into()),
            busy_ns: busy_ns(id),
            messages: seconds * 7,
            migrations: u64::from(id),
            channels: 1,
        };
        let poller = |thread_id| Poller {
            thread_id,
            name: format!("queue-{thread_id}"),
            wake: "a descriptor".into(),
            polls: seconds * 100,
            found: seconds * 25,
            ..Poller::default()
        };
        Sample {
            monotonic_ns: seconds * SECOND,
            reactors: (0..reactors).map(reactor).collect(),
            threads: (0..threads).map(thread).collect(),
            pollers: (0..threads).map(poller).collect(),
        }
    }

    pub(crate) fn process() -> Process {
        Process {
            version: "0.1.0".into(),
            pid: 4711,
            command_line: ["tenmil", "perf", "emu:null"].map(str::to_owned).into(),
            uptime_ns: Some(3_723 * SECOND),
        }
    }

    /// State after watching such a process for a while.
    pub(crate) fn watching(reactors: u32, threads: u32) -> AppState {
        let mut state = AppState::default();
        state.take(Update::Attached(process()));
        for seconds in 1..=20 {
            let sample = sample(seconds, reactors, threads);
            state.take(Update::Looked { sample, policy: Some("dynamic".into()) });
        }
        let text = "thread 3 'thread-3' moved from reactor 0 to 1".to_owned();
        state.take(Update::Happened(EventLine { kind: "thread-migrated".into(), text }));
        state
    }

    #[test]
    fn the_first_sample_has_no_rates_and_the_second_has() {
        let mut state = AppState::default();
        state.take(Update::Attached(process()));
        let look = |seconds| Update::Looked { sample: sample(seconds, 2, 3), policy: None };
        state.take(look(1));
        assert_eq!(state.shown.as_ref().unwrap().rates, None);
        state.take(look(3));
        let rates = state.shown.as_ref().unwrap().rates.as_ref().unwrap();
        assert_eq!(rates.span_ns, 2 * SECOND);
        assert_eq!(state.whole.pieces(1), [Some(5.0)]);
        assert_eq!(state.reactors[&1].pieces(1), [Some(10.0)]);
    }

    #[test]
    fn a_pause_holds_the_picture_and_ends_without_a_leap() {
        let mut state = watching(2, 3);
        let held = state.shown.clone();
        state.is_paused = true;
        for seconds in 21..=25 {
            state.take(Update::Looked { sample: sample(seconds, 2, 3), policy: None });
        }
        assert_eq!((&state.shown, state.policy.as_deref()), (&held, Some("dynamic")));
        state.is_paused = false;
        state.take(Update::Looked { sample: sample(26, 2, 3), policy: None });
        let shown = state.shown.unwrap();
        assert_eq!(
            (shown.sample.monotonic_ns, shown.rates.unwrap().span_ns),
            (26 * SECOND, SECOND)
        );
    }

    #[test]
    fn one_that_has_gone_stays_on_the_screen_until_another_comes() {
        let mut state = watching(2, 3);
        state.take(Update::Exited("the process closed the connection".into()));
        state.take(Update::Running(Vec::new()));
        assert!(matches!(state.stage, ConnectionStage::Exited(_)) && state.shown.is_some());
        state.take(Update::Attached(process()));
        assert_eq!(state.stage, ConnectionStage::Watching);
        assert!(state.shown.is_none() && state.happened.is_empty() && state.reactors.is_empty());
        state.take(Update::Looked { sample: sample(1, 1, 1), policy: None });
        assert_eq!(state.shown.unwrap().rates, None, "the counters of another are nothing to it");
    }

    #[test]
    fn one_that_is_late_is_shown_again_when_it_answers() {
        let mut state = watching(1, 1);
        state.take(Update::Silent("no response within 1 s".into()));
        assert!(matches!(state.stage, ConnectionStage::Silent(_)));
        state.take(Update::Looked { sample: sample(30, 1, 1), policy: None });
        assert_eq!(state.stage, ConnectionStage::Watching);
    }

    #[test]
    fn the_choice_of_a_process_stays_within_those_that_run() {
        let mut state = AppState::default();
        let running = |count| (0..count).map(|pid| Running { pid, ..Running::default() }).collect();
        state.take(Update::Running(running(5)));
        state.chosen.process = 4;
        state.take(Update::Running(running(2)));
        assert_eq!(state.chosen.process, 1);
    }

    #[test]
    fn only_so_many_events_are_kept() {
        let mut state = AppState::default();
        (0..1_000).for_each(|_| state.take(Update::Happened(EventLine::default())));
        assert_eq!(state.happened.len(), super::HAPPENED_MAX);
    }
}
