//! What is on the screen, as a plain value: what came from the process, and what the person who
//! looks has chosen.

use std::collections::{BTreeMap, VecDeque};

use super::minute::Minute;
use super::order::Sort;
use super::rates::{Rates, rates};
use super::sample::{Process, Sample};

/// Everything that is shown.
#[derive(Clone, Debug, Default)]
pub(crate) struct State {
    pub(crate) stage: Stage,
    pub(crate) process: Option<Process>,
    /// How threads are spread, if the process has a scheduler.
    pub(crate) policy: Option<String>,
    pub(crate) shown: Option<Shown>,
    /// When the first sample was taken.
    pub(crate) first_ns: Option<u64>,
    /// The newest sample, even while another is shown.
    newest: Option<Sample>,
    pub(crate) whole: Minute,
    pub(crate) reactors: BTreeMap<u32, Minute>,
    /// What has happened, newest last.
    pub(crate) happened: VecDeque<Happened>,
    pub(crate) focus: Table,
    pub(crate) chosen: Chosen,
    /// Only the threads of the chosen reactor are shown.
    pub(crate) is_narrow: bool,
    pub(crate) sorts: BTreeMap<Table, Sort>,
    pub(crate) is_paused: bool,
    pub(crate) is_help: bool,
    pub(crate) is_over: bool,
}

/// How far the connection is.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum Stage {
    /// Nobody is there yet; the text says whom we wait for.
    #[default]
    Looking,
    /// Several are there; somebody has to choose.
    Choosing(Vec<Running>),
    /// It answers.
    Watching,
    /// It does not answer in time, but is there.
    Silent(String),
    /// It has gone away.
    Gone(String),
}

/// A process that can be watched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Running {
    pub(crate) pid: u32,
    pub(crate) command_line: String,
}

/// A sample, and the rates that led to it if there was one before.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Shown {
    pub(crate) sample: Sample,
    pub(crate) rates: Option<Rates>,
}

/// Something that the process told of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Happened {
    pub(crate) kind: String,
    pub(crate) text: String,
}

/// One of the tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Table {
    Reactors,
    #[default]
    Threads,
    Pollers,
}

/// Which rows are chosen. Reactors and threads are chosen by their numbers, so that the choice
/// stays with them wherever they are shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Chosen {
    pub(crate) process: usize,
    pub(crate) reactor: Option<u32>,
    pub(crate) thread: Option<u32>,
    pub(crate) poller: usize,
}

/// What comes from the other side.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum News {
    /// Those that could be watched: none, or several.
    Running(Vec<Running>),
    /// We are connected to this one.
    Attached(Process),
    /// It was asked and answered.
    Looked {
        /// What it does.
        sample: Sample,
        /// How it spreads its threads.
        policy: Option<String>,
    },
    /// It said something.
    Happened(Happened),
    /// It did not answer in time.
    Silent(String),
    /// It has gone away.
    Gone(String),
}

/// As many events are kept.
const HAPPENED_MAX: usize = 64;

impl Table {
    pub(crate) const ALL: [Self; 3] = [Self::Reactors, Self::Threads, Self::Pollers];

    /// What it shows, in a word.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Reactors => "reactors",
            Self::Threads => "threads",
            Self::Pollers => "pollers",
        }
    }
}

impl State {
    /// Takes in what came.
    pub(crate) fn take(&mut self, news: News) {
        match news {
            News::Running(running) if running.is_empty() => self.nobody(),
            News::Running(running) => {
                self.chosen.process = self.chosen.process.min(running.len() - 1);
                self.stage = Stage::Choosing(running);
            }
            News::Attached(process) => self.attach(process),
            News::Looked { sample, policy } => self.look(sample, policy),
            News::Happened(happened) => {
                self.happened.push_back(happened);
                if self.happened.len() > HAPPENED_MAX {
                    self.happened.pop_front();
                }
            }
            News::Silent(why) => self.stage = Stage::Silent(why),
            News::Gone(why) => self.stage = Stage::Gone(why),
        }
    }

    /// What is known of one that has gone stays on the screen.
    fn nobody(&mut self) {
        if !matches!(self.stage, Stage::Gone(_)) {
            self.stage = Stage::Looking;
        }
    }

    /// A new process: nothing that was measured of another is true of it.
    fn attach(&mut self, process: Process) {
        let Self { focus, is_help, is_over, .. } = *self;
        let sorts = std::mem::take(&mut self.sorts);
        let process = Some(process);
        *self = Self {
            stage: Stage::Watching,
            process,
            focus,
            sorts,
            is_help,
            is_over,
            ..Self::default()
        };
    }

    fn look(&mut self, sample: Sample, policy: Option<String>) {
        self.stage = Stage::Watching;
        self.first_ns.get_or_insert(sample.at_ns);
        let before = self.newest.replace(sample.clone());
        if self.is_paused {
            return;
        }
        let rates = before.map(|before| rates(&before, &sample)).filter(|it| it.span_ns > 0);
        if let Some(rates) = &rates {
            self.whole.record(sample.at_ns, rates.whole.busy_percent);
            self.reactors.retain(|id, _| sample.reactors.iter().any(|reactor| reactor.id == *id));
            for (reactor, rates) in sample.reactors.iter().zip(&rates.reactors) {
                let minute = self.reactors.entry(reactor.id).or_default();
                minute.record(sample.at_ns, rates.busy_percent);
            }
        }
        self.policy = policy;
        self.shown = Some(Shown { sample, rates });
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{Happened, News, Running, Stage, State};
    use crate::top::sample::{Poller, Process, Reactor, Sample, Thread};

    const SECOND: u64 = 1_000_000_000;

    /// A process with so many of each, after `seconds` in which reactor and thread `n` were busy
    /// for `10 n` percent of the time.
    pub(crate) fn sample(seconds: u64, reactors: u32, threads: u32) -> Sample {
        let busy_ns = |id: u32| seconds * (SECOND / 10) * u64::from(id.min(10));
        let reactor = |id| Reactor {
            id,
            core: id,
            mode: "adaptive".into(),
            asleep: id == 0,
            busy_ns: busy_ns(id),
            turns: seconds * 1_000,
            sleeps: seconds * 40,
            messages: seconds * 3_200,
            longest_turn_ns: 250_000,
            longest_culprit: Some(format!("poller 'queue-{id}'")),
            ..Reactor::default()
        };
        let thread = |id| Thread {
            id,
            name: format!("thread-{id}"),
            reactor: id % reactors.max(1),
            mask: (id % 2 == 0).then(|| "0-3".into()),
            busy_ns: busy_ns(id),
            messages: seconds * 7,
            moves: u64::from(id),
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
            at_ns: seconds * SECOND,
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

    /// A screen that has watched such a process for a while.
    pub(crate) fn watching(reactors: u32, threads: u32) -> State {
        let mut state = State::default();
        state.take(News::Attached(process()));
        for seconds in 1..=20 {
            let sample = sample(seconds, reactors, threads);
            state.take(News::Looked { sample, policy: Some("dynamic".into()) });
        }
        let text = "thread 3 'thread-3' moved from reactor 0 to 1".to_owned();
        state.take(News::Happened(Happened { kind: "thread-moved".into(), text }));
        state
    }

    #[test]
    fn the_first_sample_has_no_rates_and_the_second_has() {
        let mut state = State::default();
        state.take(News::Attached(process()));
        let look = |seconds| News::Looked { sample: sample(seconds, 2, 3), policy: None };
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
            state.take(News::Looked { sample: sample(seconds, 2, 3), policy: None });
        }
        assert_eq!((&state.shown, state.policy.as_deref()), (&held, Some("dynamic")));
        state.is_paused = false;
        state.take(News::Looked { sample: sample(26, 2, 3), policy: None });
        let shown = state.shown.unwrap();
        assert_eq!((shown.sample.at_ns, shown.rates.unwrap().span_ns), (26 * SECOND, SECOND));
    }

    #[test]
    fn one_that_has_gone_stays_on_the_screen_until_another_comes() {
        let mut state = watching(2, 3);
        state.take(News::Gone("the process closed the connection".into()));
        state.take(News::Running(Vec::new()));
        assert!(matches!(state.stage, Stage::Gone(_)) && state.shown.is_some());
        state.take(News::Attached(process()));
        assert_eq!(state.stage, Stage::Watching);
        assert!(state.shown.is_none() && state.happened.is_empty() && state.reactors.is_empty());
        state.take(News::Looked { sample: sample(1, 1, 1), policy: None });
        assert_eq!(state.shown.unwrap().rates, None, "the counters of another are nothing to it");
    }

    #[test]
    fn one_that_is_late_is_shown_again_when_it_answers() {
        let mut state = watching(1, 1);
        state.take(News::Silent("no answer within 1 s".into()));
        assert!(matches!(state.stage, Stage::Silent(_)));
        state.take(News::Looked { sample: sample(30, 1, 1), policy: None });
        assert_eq!(state.stage, Stage::Watching);
    }

    #[test]
    fn the_choice_of_a_process_stays_within_those_that_run() {
        let mut state = State::default();
        let running = |count| (0..count).map(|pid| Running { pid, ..Running::default() }).collect();
        state.take(News::Running(running(5)));
        state.chosen.process = 4;
        state.take(News::Running(running(2)));
        assert_eq!(state.chosen.process, 1);
    }

    #[test]
    fn only_so_many_events_are_kept() {
        let mut state = State::default();
        (0..1_000).for_each(|_| state.take(News::Happened(Happened::default())));
        assert_eq!(state.happened.len(), super::HAPPENED_MAX);
    }
}
