//! Application state of the live view: data from the process and selections of the user.

use std::collections::{BTreeMap, VecDeque};

use super::busy_history::BusyHistory;
use super::process_sample::{ProcessInfo, ProcessSample};
use super::rates::{SampleRates, rates_between};
use super::row_order::TableSort;
use crate::io_rates::{Grouping, IoSample};

/// Everything shown on the screen.
#[derive(Clone, Debug, Default)]
pub(crate) struct AppState {
    pub(crate) stage: ConnectionStage,
    pub(crate) process: Option<ProcessInfo>,
    /// Scheduling policy, if the process has a scheduler.
    pub(crate) policy: Option<String>,
    pub(crate) shown: Option<DisplayedSample>,
    /// Timestamp of the first sample.
    pub(crate) first_ns: Option<u64>,
    /// Newest sample, also while the display is paused.
    newest: Option<ProcessSample>,
    pub(crate) whole: BusyHistory,
    pub(crate) reactors: BTreeMap<u32, BusyHistory>,
    /// Events, newest last.
    pub(crate) happened: VecDeque<EventLine>,
    pub(crate) focus: ScreenTable,
    pub(crate) chosen: SelectedRows,
    /// Show only the threads of the selected reactor.
    pub(crate) is_narrow: bool,
    pub(crate) sorts: BTreeMap<ScreenTable, TableSort>,
    pub(crate) is_paused: bool,
    pub(crate) is_help: bool,
    pub(crate) is_over: bool,
    pub(crate) io_page: IoPage,
}

/// Page with the rates of I/O, which is shown instead of the tables of reactors.
#[derive(Clone, Debug, Default)]
pub(crate) struct IoPage {
    pub(crate) is_shown: bool,
    pub(crate) grouping: Grouping,
    /// The displayed sample, and the one that its rates are computed from.
    pub(crate) before: Option<IoSample>,
    pub(crate) now: Option<IoSample>,
    /// Newest sample, also while the display is paused.
    newest: Option<IoSample>,
    /// Selected row.
    pub(crate) chosen: usize,
}

/// State of the connection to the watched process.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum ConnectionStage {
    /// No process found yet.
    #[default]
    Looking,
    /// Several processes found; the user has to select one.
    Choosing(Vec<RunningProcess>),
    /// Connected and responding.
    Watching,
    /// Connected but not responding; the text is the error.
    Silent(String),
    /// The process has exited; the text is the error.
    Exited(String),
}

/// Process that can be watched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RunningProcess {
    pub(crate) pid: u32,
    pub(crate) command_line: String,
}

/// Displayed sample, and the rates since the previous one.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct DisplayedSample {
    pub(crate) sample: ProcessSample,
    pub(crate) rates: Option<SampleRates>,
}

/// Event of the process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EventLine {
    pub(crate) kind: String,
    pub(crate) text: String,
}

/// Table on the screen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ScreenTable {
    Reactors,
    #[default]
    Threads,
    Pollers,
    /// The table of the I/O page.
    Io,
}

/// Selected rows. Reactors and threads are selected by number, so that the selection follows them when
/// rows are reordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SelectedRows {
    pub(crate) process: usize,
    pub(crate) reactor: Option<u32>,
    pub(crate) thread: Option<u32>,
    pub(crate) poller: usize,
}

/// Data from the sampling thread.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum SamplerUpdate {
    /// Running processes, if not exactly one.
    Running(Vec<RunningProcess>),
    /// Connected to this process.
    Attached(ProcessInfo),
    /// A sample.
    Looked {
        /// Reactors, threads and pollers.
        sample: ProcessSample,
        /// Scheduling policy.
        policy: Option<String>,
    },
    /// A sample of the I/O statistics, by what the rows are about.
    LookedAtIo(Grouping, IoSample),
    /// An event of the process.
    Happened(EventLine),
    /// The process did not respond in time.
    Silent(String),
    /// The process has exited.
    Exited(String),
}

/// Maximum number of events kept.
const HAPPENED_MAX: usize = 64;

impl ScreenTable {
    /// Tables of the page of reactors.
    pub(crate) const ALL: [Self; 3] = [Self::Reactors, Self::Threads, Self::Pollers];

    /// Title of the table.
    pub(crate) const fn title(self) -> &'static str {
        match self {
            Self::Reactors => "reactors",
            Self::Threads => "threads",
            Self::Pollers => "pollers",
            Self::Io => "I/O",
        }
    }
}

impl AppState {
    /// Applies an update.
    pub(crate) fn apply_update(&mut self, new_events: SamplerUpdate) {
        match new_events {
            SamplerUpdate::Running(running) if running.is_empty() => {
                self.look_for_process_unless_exited()
            }
            SamplerUpdate::Running(running) => {
                self.chosen.process = self.chosen.process.min(running.len() - 1);
                self.stage = ConnectionStage::Choosing(running);
            }
            SamplerUpdate::Attached(process) => self.show_new_process(process),
            SamplerUpdate::Looked { sample, policy } => self.show_sample(sample, policy),
            SamplerUpdate::LookedAtIo(grouping, sample) => {
                self.io_page.show(grouping, sample, self.is_paused)
            }
            SamplerUpdate::Happened(happened) => {
                self.happened.push_back(happened);
                if self.happened.len() > HAPPENED_MAX {
                    self.happened.pop_front();
                }
            }
            SamplerUpdate::Silent(why) => self.stage = ConnectionStage::Silent(why),
            SamplerUpdate::Exited(why) => self.stage = ConnectionStage::Exited(why),
        }
    }

    /// The last data of a process that has exited stay on the screen.
    fn look_for_process_unless_exited(&mut self) {
        if !matches!(self.stage, ConnectionStage::Exited(_)) {
            self.stage = ConnectionStage::Looking;
        }
    }

    /// Resets the measurements for a new process.
    fn show_new_process(&mut self, process: ProcessInfo) {
        let Self { focus, is_help, is_over, .. } = *self;
        let IoPage { is_shown, grouping, .. } = self.io_page;
        let io_page = IoPage { is_shown, grouping, ..IoPage::default() };
        let sorts = std::mem::take(&mut self.sorts);
        let process = Some(process);
        *self = Self {
            stage: ConnectionStage::Watching,
            process,
            focus,
            sorts,
            is_help,
            is_over,
            io_page,
            ..Self::default()
        };
    }

    fn show_sample(&mut self, sample: ProcessSample, policy: Option<String>) {
        self.stage = ConnectionStage::Watching;
        self.first_ns.get_or_insert(sample.monotonic_ns);
        let before = self.newest.replace(sample.clone());
        if self.is_paused {
            return;
        }
        let rates =
            before.map(|before| rates_between(&before, &sample)).filter(|it| it.span_ns > 0);
        if let Some(rates) = &rates {
            self.whole.record_busy(sample.monotonic_ns, rates.whole.busy_percent);
            self.reactors.retain(|id, _| sample.reactors.iter().any(|reactor| reactor.id == *id));
            for (reactor, rates) in sample.reactors.iter().zip(&rates.reactors) {
                let minute = self.reactors.entry(reactor.id).or_default();
                minute.record_busy(sample.monotonic_ns, rates.busy_percent);
            }
        }
        self.policy = policy;
        self.shown = Some(DisplayedSample { sample, rates });
    }
}

impl IoPage {
    /// Rows are those of the present grouping: a sample of the former one that is late is dropped.
    fn show(&mut self, grouping: Grouping, sample: IoSample, is_paused: bool) {
        if grouping != self.grouping {
            return;
        }
        let before = self.newest.replace(sample.clone());
        if !is_paused {
            (self.before, self.now) = (before, Some(sample));
        }
    }

    /// Changes what the rows are about, and forgets the samples.
    pub(crate) fn set_grouping(&mut self, grouping: Grouping) {
        *self = Self { is_shown: self.is_shown, grouping, ..Self::default() };
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{AppState, ConnectionStage, EventLine, RunningProcess, SamplerUpdate};
    use crate::top::process_sample::{
        PollerSample, ProcessInfo, ProcessSample, ReactorSample, ThreadSample,
    };

    const SECOND: u64 = 1_000_000_000;

    /// A sample with this many reactors and threads, after `seconds` in which reactor and thread `n`
    /// were busy for `10 n` percent of the time.
    pub(crate) fn test_sample(seconds: u64, reactors: u32, threads: u32) -> ProcessSample {
        let busy_ns = |id: u32| seconds * (SECOND / 10) * u64::from(id.min(10));
        let reactor = |id| ReactorSample {
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
            ..ReactorSample::default()
        };
        let thread = |id| ThreadSample {
            id,
            name: format!("thread-{id}"),
            reactor: id % reactors.max(1),
            mask: (id % 2 == 0).then(|| "0-3".into()),
            busy_ns: busy_ns(id),
            messages: seconds * 7,
            migrations: u64::from(id),
            channels: 1,
        };
        let poller = |thread_id| PollerSample {
            thread_id,
            name: format!("queue-{thread_id}"),
            wake: "a descriptor".into(),
            polls: seconds * 100,
            found: seconds * 25,
            ..PollerSample::default()
        };
        ProcessSample {
            monotonic_ns: seconds * SECOND,
            reactors: (0..reactors).map(reactor).collect(),
            threads: (0..threads).map(thread).collect(),
            pollers: (0..threads).map(poller).collect(),
        }
    }

    pub(crate) fn test_process() -> ProcessInfo {
        ProcessInfo {
            version: "0.1.0".into(),
            pid: 4711,
            command_line: ["tenmil", "perf", "emu:null"].map(str::to_owned).into(),
            uptime_ns: Some(3_723 * SECOND),
        }
    }

    /// State after watching such a process for a while.
    pub(crate) fn watching_state(reactors: u32, threads: u32) -> AppState {
        let mut state = AppState::default();
        state.apply_update(SamplerUpdate::Attached(test_process()));
        for seconds in 1..=20 {
            let sample = test_sample(seconds, reactors, threads);
            state.apply_update(SamplerUpdate::Looked { sample, policy: Some("dynamic".into()) });
        }
        let text = "thread 3 'thread-3' moved from reactor 0 to 1".to_owned();
        state.apply_update(SamplerUpdate::Happened(EventLine {
            kind: "thread-migrated".into(),
            text,
        }));
        state
    }

    #[test]
    fn first_sample_has_no_rates_and_the_second_has() {
        let mut state = AppState::default();
        state.apply_update(SamplerUpdate::Attached(test_process()));
        let look =
            |seconds| SamplerUpdate::Looked { sample: test_sample(seconds, 2, 3), policy: None };
        state.apply_update(look(1));
        assert_eq!(state.shown.as_ref().unwrap().rates, None);
        state.apply_update(look(3));
        let rates = state.shown.as_ref().unwrap().rates.as_ref().unwrap();
        assert_eq!(rates.span_ns, 2 * SECOND);
        assert_eq!(state.whole.busy_by_interval(1), [Some(5.0)]);
        assert_eq!(state.reactors[&1].busy_by_interval(1), [Some(10.0)]);
    }

    #[test]
    fn pause_freezes_the_display_and_ends_without_a_jump() {
        let mut state = watching_state(2, 3);
        let held = state.shown.clone();
        state.is_paused = true;
        for seconds in 21..=25 {
            state.apply_update(SamplerUpdate::Looked {
                sample: test_sample(seconds, 2, 3),
                policy: None,
            });
        }
        assert_eq!((&state.shown, state.policy.as_deref()), (&held, Some("dynamic")));
        state.is_paused = false;
        state.apply_update(SamplerUpdate::Looked { sample: test_sample(26, 2, 3), policy: None });
        let shown = state.shown.unwrap();
        assert_eq!(
            (shown.sample.monotonic_ns, shown.rates.unwrap().span_ns),
            (26 * SECOND, SECOND)
        );
    }

    #[test]
    fn exited_process_stays_displayed_until_another_is_attached() {
        let mut state = watching_state(2, 3);
        state.apply_update(SamplerUpdate::Exited("the process closed the connection".into()));
        state.apply_update(SamplerUpdate::Running(Vec::new()));
        assert!(matches!(state.stage, ConnectionStage::Exited(_)) && state.shown.is_some());
        state.apply_update(SamplerUpdate::Attached(test_process()));
        assert_eq!(state.stage, ConnectionStage::Watching);
        assert!(state.shown.is_none() && state.happened.is_empty() && state.reactors.is_empty());
        state.apply_update(SamplerUpdate::Looked { sample: test_sample(1, 1, 1), policy: None });
        assert_eq!(state.shown.unwrap().rates, None, "the counters of another are nothing to it");
    }

    #[test]
    fn late_process_is_shown_again_when_it_responds() {
        let mut state = watching_state(1, 1);
        state.apply_update(SamplerUpdate::Silent("no response within 1 s".into()));
        assert!(matches!(state.stage, ConnectionStage::Silent(_)));
        state.apply_update(SamplerUpdate::Looked { sample: test_sample(30, 1, 1), policy: None });
        assert_eq!(state.stage, ConnectionStage::Watching);
    }

    #[test]
    fn process_selection_stays_within_the_running_ones() {
        let mut state = AppState::default();
        let running = |count| {
            (0..count).map(|pid| RunningProcess { pid, ..RunningProcess::default() }).collect()
        };
        state.apply_update(SamplerUpdate::Running(running(5)));
        state.chosen.process = 4;
        state.apply_update(SamplerUpdate::Running(running(2)));
        assert_eq!(state.chosen.process, 1);
    }

    #[test]
    fn event_list_is_bounded() {
        let mut state = AppState::default();
        (0..1_000).for_each(|_| state.apply_update(SamplerUpdate::Happened(EventLine::default())));
        assert_eq!(state.happened.len(), super::HAPPENED_MAX);
    }
}
