//! Reactors, their light threads and pollers.

use core::fmt;
use std::sync::{Arc, Weak};

use serde_json::{Value, json};
use tenmil_base::Span;
use tenmil_reactor::{
    PollMode, PollerSample, ReactorId, ReactorSample, ReactorsHandle, Registry, StatisticsSample,
    ThreadSample, Watchdog,
};

use crate::error::{ErrorCode, RpcError, join_alternatives, quote_untrusted};
use crate::event::{Event, EventKind, EventSender};
use crate::method::{CallContext, Method, MethodKind, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::process_parts::ProcessParts;
use crate::result_type::{FieldSchema, ResultType};

/// Source of the process's reactors. A function, because a program may start them after the control
/// server.
pub struct ReactorsSource(Box<ReactorLookup>);

type ReactorLookup = dyn Fn() -> Option<ReactorsHandle> + Send + Sync;

const NAME: ParamType = ParamType::Text { len_max: 256 };
/// Larger than any number of reactors or threads.
const NUMBER: ParamType = ParamType::Whole { min: 0, max: u32::MAX as u64 };

const REACTOR: &[FieldSchema] = &[
    FieldSchema::new("id", ResultType::Whole, "identifier"),
    FieldSchema::new("core", ResultType::Whole, "core that the reactor is bound to"),
    FieldSchema::new("mode", ResultType::Text, "poll mode"),
    FieldSchema::new("sleeping", ResultType::Flag, "whether the reactor is sleeping"),
    FieldSchema::new("threads", ResultType::Whole, "number of light threads on the reactor"),
    FieldSchema::new("busy_ns", ResultType::Whole, "time in iterations that did work"),
    FieldSchema::new("idle_ns", ResultType::Whole, "remaining time, sleeping or not"),
    FieldSchema::new("busy_percent", ResultType::Real, "share of time in iterations that did work"),
    FieldSchema::new("iterations", ResultType::Whole, "number of iterations"),
    FieldSchema::new("sleeps", ResultType::Whole, "number of sleeps"),
    FieldSchema::new("wakeups", ResultType::Whole, "number of wake-ups"),
    FieldSchema::new("messages", ResultType::Whole, "number of messages executed"),
    FieldSchema::new("migrations", ResultType::Whole, "number of threads migrated to the reactor"),
    FieldSchema::new(
        "iterations_too_long",
        ResultType::Whole,
        "number of iterations that exceeded the time limit",
    ),
    FieldSchema::new("longest_iteration_ns", ResultType::Whole, "longest iteration"),
    FieldSchema::new(
        "longest_iteration_cause",
        TEXT,
        "mailbox or poller that took the time in the longest iteration, if it exceeded the limit",
    ),
    FieldSchema::new("running", TEXT, "mailbox or poller that is running or ran last"),
];

const THREAD: &[FieldSchema] = &[
    FieldSchema::new("id", ResultType::Whole, "identifier"),
    FieldSchema::new("name", ResultType::Text, "name"),
    FieldSchema::new("reactor", ResultType::Whole, "reactor that runs the thread"),
    FieldSchema::new("mask", TEXT, "affinity mask; null for all cores"),
    FieldSchema::new(
        "node",
        ResultType::Maybe(&ResultType::Whole),
        "NUMA node of its data, if known",
    ),
    FieldSchema::new("busy_ns", ResultType::Whole, "time in which the thread did work"),
    FieldSchema::new("idle_ns", ResultType::Whole, "remaining time since the thread started"),
    FieldSchema::new(
        "busy_percent",
        ResultType::Real,
        "share of time in which the thread did work",
    ),
    FieldSchema::new("messages", ResultType::Whole, "number of messages executed"),
    FieldSchema::new("migrations", ResultType::Whole, "number of migrations"),
    FieldSchema::new("channels", ResultType::Whole, "number of open I/O channels"),
    FieldSchema::new("pollers", ResultType::Whole, "number of pollers"),
];

const POLLER: &[FieldSchema] = &[
    FieldSchema::new("thread", ResultType::Text, "name of its thread"),
    FieldSchema::new(
        "thread_id",
        ResultType::Whole,
        "identifier of its thread; names are not unique",
    ),
    FieldSchema::new("name", ResultType::Text, "name"),
    FieldSchema::new("wake", ResultType::Text, "wake source"),
    FieldSchema::new("every_ns", ResultType::Maybe(&ResultType::Whole), "period of a timed poller"),
    FieldSchema::new("paused", ResultType::Flag, "whether the poller is paused"),
    FieldSchema::new("polls", ResultType::Whole, "number of polls"),
    FieldSchema::new("found", ResultType::Whole, "number of polls that found work"),
    FieldSchema::new(
        "spurious_wakeups",
        ResultType::Whole,
        "number of spurious wake-ups: sleeps ended at once, several in a row, by its descriptor without any work",
    ),
];

const NOT_SENT: &[FieldSchema] = &[
    FieldSchema::new("reactor", ResultType::Whole, "identifier"),
    FieldSchema::new("why", ResultType::Text, "reason"),
];

const TEXT: ResultType = ResultType::Maybe(&ResultType::Text);

const fn optional_parameter(name: &'static str, kind: ParamType, help: &'static str) -> Parameter {
    Parameter { name, kind, need: ParamDefault::Optional, help }
}

const fn required_parameter(name: &'static str, kind: ParamType, help: &'static str) -> Parameter {
    Parameter { name, kind, need: ParamDefault::Required, help }
}

pub(super) const METHODS: &[Method] = &[
    Method {
        verb: MethodKind::Get,
        name: "reactors",
        parameters: &[],
        answer: ResultType::Rows(REACTOR),
        help: "List the reactors and their counters since the start",
        example: "tenmil get reactors",
        run: reactors_method,
    },
    Method {
        verb: MethodKind::Get,
        name: "threads",
        parameters: &[
            optional_parameter("name", NAME, "only threads of this name"),
            optional_parameter("reactor", NUMBER, "only threads on this reactor"),
        ],
        answer: ResultType::Rows(THREAD),
        help: "List the light threads and their counters since the start",
        example: "tenmil get threads reactor=0",
        run: threads_method,
    },
    Method {
        verb: MethodKind::Get,
        name: "pollers",
        parameters: &[optional_parameter("thread", NAME, "only pollers of threads of this name")],
        answer: ResultType::Rows(POLLER),
        help: "List the pollers of the light threads",
        example: "tenmil get pollers thread=submit-0",
        run: pollers_method,
    },
    Method {
        verb: MethodKind::Get,
        name: "snapshot_stats",
        parameters: &[],
        answer: ResultType::Record(&[
            FieldSchema::new(
                "monotonic_ns",
                ResultType::Whole,
                "time of the sample on the reactors' clock",
            ),
            FieldSchema::new("reactors", ResultType::Rows(REACTOR), "same as `reactors`"),
            FieldSchema::new("threads", ResultType::Rows(THREAD), "same as `threads`"),
            FieldSchema::new("pollers", ResultType::Rows(POLLER), "same as `pollers`"),
        ]),
        help: "Show a consistent snapshot of all reactors, threads and pollers; two snapshots give rates",
        example: "tenmil get snapshot_stats --json",
        run: snapshot_stats_method,
    },
    Method {
        verb: MethodKind::Set,
        name: "poll",
        parameters: &[
            required_parameter("mode", ParamType::OneOf(&MODES), "new poll mode"),
            optional_parameter("reactor", NUMBER, "reactor to change; by default all of them"),
        ],
        answer: ResultType::Record(&[
            FieldSchema::new("mode", ResultType::Text, "new poll mode"),
            FieldSchema::new("reactors", ResultType::Wholes, "reactors that were changed"),
            FieldSchema::new(
                "refused",
                ResultType::Rows(NOT_SENT),
                "reactors that were not changed",
            ),
        ]),
        help: "Change the poll mode of reactors; if one of them must not sleep, all or none are changed; the change takes effect in the next iteration, and an event reports it",
        example: "tenmil set poll mode=always",
        run: set_reactor_poll_method,
    },
    Method {
        verb: MethodKind::Set,
        name: "thread",
        parameters: &[
            required_parameter("name", NAME, "name of the thread"),
            optional_parameter(
                "reactor",
                NUMBER,
                "reactor to migrate the thread to; its affinity mask must allow it",
            ),
            optional_parameter("mask", ParamType::Cores, "new affinity mask"),
            optional_parameter("anywhere", ParamType::Flag, "true to remove the affinity mask"),
        ],
        answer: ResultType::Record(&[
            FieldSchema::new("id", ResultType::Whole, "identifier of the thread"),
            FieldSchema::new(
                "reactor",
                ResultType::Whole,
                "reactor of the thread, or the one it migrates to",
            ),
            FieldSchema::new("mask", TEXT, "affinity mask; null for all cores"),
        ]),
        help: "Migrate a light thread or set its affinity mask; it migrates once its pollers have detached, and an event reports it",
        example: "tenmil set thread name=submit-0 reactor=1",
        run: set_thread_method,
    },
];

const MODES: [&str; 3] =
    [PollMode::ALL[0].name(), PollMode::ALL[1].name(), PollMode::ALL[2].name()];

/// Kinds of reactor events: [`tenmil_reactor::Event::kind`].
pub(super) const EVENTS: &[EventKind] = &[
    reactor_event_kind("thread-started", "a light thread was started on a reactor"),
    reactor_event_kind("thread-migrated", "a light thread migrated from another reactor"),
    reactor_event_kind(
        "migration-timeout",
        "the migration of a light thread timed out; the thread stays on its reactor",
    ),
    reactor_event_kind("thread-ended", "a light thread ended"),
    reactor_event_kind(
        "poller-panicked",
        "a poller panicked and was removed; its thread continues",
    ),
    reactor_event_kind("message-panicked", "a message panicked; its thread continues"),
    reactor_event_kind(
        "channel-panicked",
        "a channel provider panicked while closing a thread's channel",
    ),
    reactor_event_kind("task-panicked", "a task panicked; its thread continues"),
    reactor_event_kind("iteration-too-long", "an iteration exceeded the time limit"),
    reactor_event_kind(
        "reactor-stalled",
        "an iteration runs for so long that the reactor appears stalled",
    ),
    reactor_event_kind(
        "wait-unsupported",
        "the file descriptor of a poller could not be added to epoll",
    ),
    reactor_event_kind(
        "spurious-wakeups",
        "the file descriptor of a poller stays readable without work; it is ignored until that changes",
    ),
    reactor_event_kind("poll-mode-changed", "the poll mode of a reactor changed"),
    reactor_event_kind("not-pinned", "a reactor could not be pinned to its core"),
    reactor_event_kind(
        "affinity-unsatisfied",
        "no reactor is on a core in the affinity mask of a thread; the thread runs elsewhere",
    ),
    reactor_event_kind("mask-matched", "the affinity mask of such a thread can be satisfied again"),
    reactor_event_kind(
        "core-offline",
        "the core of a reactor was removed from the cpuset of the process",
    ),
    reactor_event_kind("core-online", "the core of a reactor was returned to the cpuset"),
    reactor_event_kind("no-usable-cores", "the cpuset contains none of the cores of the reactors"),
    reactor_event_kind("frequency", "the frequency of a core could not be set"),
];

const fn reactor_event_kind(name: &'static str, help: &'static str) -> EventKind {
    EventKind { name, help }
}

/// Forwards reactor events to subscribed clients. It is polled; events in between are read from the
/// directory's log, as far as that reaches back.
#[derive(Debug)]
pub struct EventRelay {
    announcer: EventSender,
    lookout: Watchdog,
    /// Directory whose events were forwarded last; a program may start other reactors later.
    followed: Weak<Registry>,
    next: u64,
}

impl EventRelay {
    /// Creates a relay that has forwarded nothing.
    pub fn new(announcer: EventSender) -> Self {
        Self { announcer, lookout: Watchdog::default(), followed: Weak::new(), next: 0 }
    }

    /// Sender that the relay uses.
    pub fn event_sender(&self) -> &EventSender {
        &self.announcer
    }

    /// Checks the reactors and forwards new events.
    pub fn forward_events(&mut self, ReactorsHandle { directory, clock }: &ReactorsHandle) {
        let followed = Arc::downgrade(directory);
        if !self.followed.ptr_eq(&followed) {
            (self.followed, self.next, self.lookout) = (followed, 0, Watchdog::default());
        }
        if !directory.has_watchdog() {
            self.lookout.check_reactors(clock.now(), directory);
        }
        let events = directory.events_since(self.next);
        self.next = events.next;
        if events.missed > 0 {
            self.announcer.report_dropped(events.missed);
        }
        for noted in &events.events {
            let name = noted.event.kind();
            let known = EVENTS.iter().find(|kind| kind.name == name);
            self.announcer.emit(Event {
                kind: known.copied().unwrap_or(reactor_event_kind(name, "")),
                text: noted.event.to_string(),
                about: json!({ "sequence": noted.sequence, "happened_at_ns": noted.at.ns }),
            });
        }
    }
}

impl ReactorsSource {
    /// Creates a source from the function `find`.
    pub fn new(find: impl Fn() -> Option<ReactorsHandle> + Send + Sync + 'static) -> Self {
        Self(Box::new(find))
    }
}

impl fmt::Debug for ReactorsSource {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("Reactors").field(&(self.0)()).finish()
    }
}

fn running_reactors(call: &CallContext<'_>) -> Result<ReactorsHandle, RpcError> {
    reactors_of_process(call.state)
}

fn reactors_of_process(parts: &ProcessParts) -> Result<ReactorsHandle, RpcError> {
    let found = (parts.find_part::<ReactorsSource>("reactors")?.0)();
    found.ok_or_else(|| {
        let message = "this process runs no reactors now, expected one that does";
        RpcError::usage(ErrorCode::NotFound, message)
    })
}

fn sample_reactors(call: &CallContext<'_>) -> Result<StatisticsSample, RpcError> {
    sample_of_process(call.state)
}

/// Statistics of the reactors that the process runs now.
pub(crate) fn sample_of_process(parts: &ProcessParts) -> Result<StatisticsSample, RpcError> {
    let ReactorsHandle { directory, clock } = reactors_of_process(parts)?;
    Ok(directory.sample_statistics(clock.now()))
}

fn snapshot_stats_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let sample = sample_reactors(call)?;
    Ok(json!({
        "monotonic_ns": sample.at.ns,
        "reactors": reactor_rows(&sample),
        "threads": thread_rows(&sample, |_| true),
        "pollers": poller_rows(&sample, |_| true),
    }))
}

fn reactors_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    Ok(reactor_rows(&sample_reactors(call)?))
}

fn threads_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let name = call.arguments.text("name");
    let reactor = call.arguments.integer("reactor");
    let wanted = |thread: &ThreadSample| {
        name.is_none_or(|name| thread.name == name)
            && reactor.is_none_or(|reactor| u64::from(thread.home.0) == reactor)
    };
    Ok(thread_rows(&sample_reactors(call)?, wanted))
}

fn pollers_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let name = call.arguments.text("thread");
    Ok(poller_rows(&sample_reactors(call)?, |thread| name.is_none_or(|name| thread.name == name)))
}

fn reactor_rows(sample: &StatisticsSample) -> Value {
    let row = |reactor: &ReactorSample| {
        let here = sample.threads.iter().filter(|thread| thread.home == reactor.id);
        json!({
            "id": reactor.id.0,
            "core": reactor.core,
            "mode": reactor.mode.name(),
            "sleeping": reactor.sleeping,
            "threads": here.count(),
            "busy_ns": reactor.busy.ns,
            "idle_ns": reactor.idle.ns,
            "busy_percent": busy_percent(reactor.busy, reactor.idle),
            "iterations": reactor.iterations,
            "sleeps": reactor.sleeps,
            "wakeups": reactor.wakes,
            "messages": reactor.messages,
            "migrations": reactor.migrations,
            "iterations_too_long": reactor.slow_iterations,
            "longest_iteration_ns": reactor.longest_iteration.ns,
            "longest_iteration_cause": reactor.longest_attribution,
            "running": reactor.running,
        })
    };
    sample.reactors.iter().map(row).collect()
}

fn thread_rows(sample: &StatisticsSample, wanted: impl Fn(&ThreadSample) -> bool) -> Value {
    let row = |thread: &ThreadSample| {
        json!({
            "id": thread.id.0,
            "name": thread.name,
            "reactor": thread.home.0,
            "mask": thread.mask.as_ref().map(ToString::to_string),
            "node": thread.node,
            "busy_ns": thread.busy.ns,
            "idle_ns": thread.idle.ns,
            "busy_percent": busy_percent(thread.busy, thread.idle),
            "messages": thread.messages,
            "migrations": thread.migrations,
            "channels": thread.channels,
            "pollers": thread.pollers.len(),
        })
    };
    sample.threads.iter().filter(|thread| wanted(thread)).map(row).collect()
}

fn poller_rows(sample: &StatisticsSample, wanted: impl Fn(&ThreadSample) -> bool) -> Value {
    let row = |thread: &ThreadSample, poller: &PollerSample| {
        json!({
            "thread": thread.name,
            "thread_id": thread.id.0,
            "name": poller.name,
            "wake": poller.wake.to_string(),
            "every_ns": poller.every.map(|every| every.ns),
            "paused": poller.paused,
            "polls": poller.polls,
            "found": poller.found,
            "spurious_wakeups": poller.spurious_wakeups,
        })
    };
    let wanted = sample.threads.iter().filter(|thread| wanted(thread));
    wanted.flat_map(|thread| thread.pollers.iter().map(move |poller| row(thread, poller))).collect()
}

fn set_reactor_poll_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let directory = running_reactors(call)?.directory;
    let mode = call.arguments.text("mode").and_then(PollMode::parse).unwrap_or_default();
    let (asked, not_told) = match integer_argument(call, "reactor").map(ReactorId) {
        Some(reactor) => {
            (vec![reactor], directory.set_poll_mode(reactor, mode).map(|()| Vec::new()))
        }
        None => (directory.reactors().collect(), directory.set_poll_mode_of_all(mode)),
    };
    let not_told = not_told.map_err(|why| reactor_rpc_error("set poll", &why))?;
    match not_told.first() {
        Some((_, why)) if not_told.len() == asked.len() => Err(reactor_rpc_error("set poll", why)),
        _ => Ok(poll_mode_result(mode, &asked, &not_told)),
    }
}

fn poll_mode_result(
    mode: PollMode,
    asked: &[ReactorId],
    not_told: &[(ReactorId, tenmil_reactor::ReactorError)],
) -> Value {
    let is_told = |id: &&ReactorId| not_told.iter().all(|(other, _)| other != *id);
    let reported: Vec<u32> = asked.iter().filter(is_told).map(|reactor| reactor.0).collect();
    let row = |(reactor, why): &(ReactorId, tenmil_reactor::ReactorError)| json!({ "reactor": reactor.0, "why": why.to_string() });
    let refused: Vec<Value> = not_told.iter().map(row).collect();
    json!({ "mode": mode.name(), "reactors": reported, "refused": refused })
}

fn set_thread_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let ReactorsHandle { directory, clock } = running_reactors(call)?;
    let sample = directory.sample_statistics(clock.now());
    let name = call.arguments.text("name").unwrap_or_default();
    let found = sample.threads.iter().find(|thread| thread.name == name).ok_or_else(|| {
        let mut names: Vec<&str> = sample.threads.iter().map(|it| it.name.as_str()).collect();
        names.truncate(NAMES_MAX);
        let (name, expected) = (quote_untrusted(name), join_alternatives(&names));
        let message = format!("set thread: no thread {name}, expected {expected}");
        RpcError::usage(ErrorCode::NotFound, message)
    })?;
    let reactor = integer_argument(call, "reactor").map(ReactorId);
    let mask = call.arguments.cores("mask");
    let anywhere = call.arguments.boolean("anywhere").unwrap_or(false);
    let (home, mask) = match (reactor, mask, anywhere) {
        (Some(reactor), None, false) => {
            let reported = directory.migrate_thread(found.id, reactor);
            (reported.map(|()| reactor), found.mask.as_ref())
        }
        (None, Some(mask), false) => {
            (directory.set_thread_mask(found.id, Some(mask.clone())), Some(mask))
        }
        (None, None, true) => (directory.set_thread_mask(found.id, None), None),
        // More than one could be executed in part: the first succeeds and the second fails.
        _ => {
            let message = "set thread: expected one of `reactor`, `mask` and `anywhere=true`";
            return Err(RpcError::usage(ErrorCode::BadValue, message));
        }
    };
    let home = home.map_err(|why| reactor_rpc_error("set thread", &why))?;
    let mask = mask.map(ToString::to_string);
    Ok(json!({ "id": found.id.0, "reactor": home.0, "mask": mask }))
}

/// Largest number of names in an error message.
const NAMES_MAX: usize = 8;

fn integer_argument(call: &CallContext<'_>, name: &str) -> Option<u32> {
    call.arguments.integer(name).and_then(|number| u32::try_from(number).ok())
}

fn reactor_rpc_error(what: &str, why: &tenmil_reactor::ReactorError) -> RpcError {
    let message = format!("{what}: {why}");
    RpcError { code: ErrorCode::Failed, category: why.category(), message, hint: None }
}

#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn busy_percent(busy: Span, idle: Span) -> f64 {
    let all = busy.ns.saturating_add(idle.ns).max(1);
    busy.ns as f64 * 100.0 / all as f64
}

#[cfg(test)]
mod tests;
