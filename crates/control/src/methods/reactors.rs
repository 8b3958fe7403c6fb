//! Reactors, the threads that live on them, and the pollers of those.

use core::fmt;
use std::sync::{Arc, Weak};

use base::Span;
use host::Clock;
use reactor::{
    Directory, Lookout, PollMode, PollerSample, ReactorId, ReactorSample, Sample, ThreadSample,
};
use serde_json::{Value, json};

use crate::event::{Announcer, Event, EventKind};
use crate::kind::Kind;
use crate::method::{Call, Method, Need, Parameter, Verb};
use crate::refusal::{Code, Refusal, either, quoted};
use crate::shape::{Field, Shape};

/// Where a program's reactors are found, while it runs any. A program that starts them later than it
/// starts to serve gives a function that looks.
pub struct Reactors(Box<Find>);

type Find = dyn Fn() -> Option<Running> + Send + Sync;

/// Reactors that run.
#[derive(Clone, Debug)]
pub struct Running {
    /// Who lives on them, and how to give them orders.
    pub directory: Arc<Directory>,
    /// The clock that they turn by.
    pub clock: Clock,
}

const NAME: Kind = Kind::Text { len_max: 256 };
/// There are never so many reactors or threads.
const NUMBER: Kind = Kind::Whole { min: 0, max: u32::MAX as u64 };

const REACTOR: &[Field] = &[
    Field::new("id", Shape::Whole, "its number"),
    Field::new("core", Shape::Whole, "the core it was meant for"),
    Field::new("mode", Shape::Text, "how it polls"),
    Field::new("asleep", Shape::Flag, "whether it sleeps at this moment"),
    Field::new("threads", Shape::Whole, "threads that live on it"),
    Field::new("busy_ns", Shape::Whole, "time in turns that found work"),
    Field::new("idle_ns", Shape::Whole, "the rest of its time, asleep or not"),
    Field::new("busy_percent", Shape::Real, "part of its time in turns that found work"),
    Field::new("turns", Shape::Whole, "turns"),
    Field::new("sleeps", Shape::Whole, "times it went to sleep"),
    Field::new("wakes", Shape::Whole, "times it woke"),
    Field::new("messages", Shape::Whole, "messages that were run on it"),
    Field::new("moves", Shape::Whole, "threads that came from other reactors"),
    Field::new("turns_too_long", Shape::Whole, "turns that took longer than they may"),
    Field::new("longest_turn_ns", Shape::Whole, "the longest turn"),
    Field::new("longest_culprit", TEXT, "what took the time in it, if it was too long"),
    Field::new("running", TEXT, "the mailbox or poller that runs, or ran last"),
];

const THREAD: &[Field] = &[
    Field::new("id", Shape::Whole, "its number"),
    Field::new("name", Shape::Text, "its name"),
    Field::new("reactor", Shape::Whole, "where it lives"),
    Field::new("mask", TEXT, "the cores it may live on; everywhere if null"),
    Field::new(
        "node",
        Shape::Maybe(&Shape::Whole),
        "the memory node where its data lies, if known",
    ),
    Field::new("busy_ns", Shape::Whole, "time in which it found work"),
    Field::new("idle_ns", Shape::Whole, "the rest of its life"),
    Field::new("busy_percent", Shape::Real, "part of its life in which it found work"),
    Field::new("messages", Shape::Whole, "messages it has run"),
    Field::new("moves", Shape::Whole, "moves it has made"),
    Field::new("channels", Shape::Whole, "channels it has open"),
    Field::new("pollers", Shape::Whole, "its pollers"),
];

const POLLER: &[Field] = &[
    Field::new("thread", Shape::Text, "the thread it belongs to"),
    Field::new("thread_id", Shape::Whole, "number of that thread, whose name others may have too"),
    Field::new("name", Shape::Text, "its name"),
    Field::new("wake", Shape::Text, "what wakes it"),
    Field::new("every_ns", Shape::Maybe(&Shape::Whole), "its period, if it is timed"),
    Field::new("paused", Shape::Flag, "whether it is paused"),
    Field::new("polls", Shape::Whole, "how often it was polled"),
    Field::new("found", Shape::Whole, "how often it found work"),
    Field::new(
        "woken_in_vain",
        Shape::Whole,
        "sleeps that its descriptor ended at once, several in a row, with no work there",
    ),
];

const NOT_TOLD: &[Field] =
    &[Field::new("reactor", Shape::Whole, "its number"), Field::new("why", Shape::Text, "why")];

const TEXT: Shape = Shape::Maybe(&Shape::Text);

const fn optional(name: &'static str, kind: Kind, help: &'static str) -> Parameter {
    Parameter { name, kind, need: Need::Optional, help }
}

const fn required(name: &'static str, kind: Kind, help: &'static str) -> Parameter {
    Parameter { name, kind, need: Need::Required, help }
}

pub(super) const METHODS: &[Method] = &[
    Method {
        verb: Verb::Get,
        name: "reactors",
        parameters: &[],
        answer: Shape::Rows(REACTOR),
        help: "List the reactors, and what each has done since it began",
        example: "tenmil get reactors",
        run: reactors,
    },
    Method {
        verb: Verb::Get,
        name: "threads",
        parameters: &[
            optional("name", NAME, "only threads of this name"),
            optional("reactor", NUMBER, "only those on this reactor"),
        ],
        answer: Shape::Rows(THREAD),
        help: "List the light threads, and what each has done since it began",
        example: "tenmil get threads reactor=0",
        run: threads,
    },
    Method {
        verb: Verb::Get,
        name: "pollers",
        parameters: &[optional("thread", NAME, "only those of threads of this name")],
        answer: Shape::Rows(POLLER),
        help: "List the pollers of the light threads",
        example: "tenmil get pollers thread=submit-0",
        run: pollers,
    },
    Method {
        verb: Verb::Get,
        name: "sample",
        parameters: &[],
        answer: Shape::Record(&[
            Field::new("at_ns", Shape::Whole, "when, by the clock that the reactors turn by"),
            Field::new("reactors", Shape::Rows(REACTOR), "as from `reactors`"),
            Field::new("threads", Shape::Rows(THREAD), "as from `threads`"),
            Field::new("pollers", Shape::Rows(POLLER), "as from `pollers`"),
        ]),
        help: "Tell of all reactors, threads and pollers at one moment; two such give rates",
        example: "tenmil get sample --json",
        run: sample,
    },
    Method {
        verb: Verb::Set,
        name: "poll",
        parameters: &[
            required("mode", Kind::OneOf(&MODES), "how to poll from now on"),
            optional("reactor", NUMBER, "which reactor; without it, every one"),
        ],
        answer: Shape::Record(&[
            Field::new("mode", Shape::Text, "how they were told to poll"),
            Field::new("reactors", Shape::Wholes, "which were told"),
            Field::new("refused", Shape::Rows(NOT_TOLD), "which could not be told"),
        ]),
        help: "Change how reactors poll: all or none if one of them may not sleep; each does so in its \
               next turn, and an event says so",
        example: "tenmil set poll mode=always",
        run: set_poll,
    },
    Method {
        verb: Verb::Set,
        name: "thread",
        parameters: &[
            required("name", NAME, "the thread's name"),
            optional("reactor", NUMBER, "the reactor to move it to, which its mask must allow"),
            optional("mask", Kind::Cores, "the cores it may live on from now on"),
            optional("anywhere", Kind::Flag, "true to let it live on every core from now on"),
        ],
        answer: Shape::Record(&[
            Field::new("id", Shape::Whole, "the thread's number"),
            Field::new("reactor", Shape::Whole, "where it stays, or was told to go"),
            Field::new("mask", TEXT, "the cores it may live on; everywhere if null"),
        ]),
        help: "Move a light thread, or say where it may live; it goes when its pollers have let go, \
               and an event says so",
        example: "tenmil set thread name=submit-0 reactor=1",
        run: set_thread,
    },
];

const MODES: [&str; 3] =
    [PollMode::ALL[0].name(), PollMode::ALL[1].name(), PollMode::ALL[2].name()];

/// The kinds of events that reactors have: [`reactor::Event::kind`].
pub(super) const EVENTS: &[EventKind] = &[
    kind("thread-started", "a light thread began to live on a reactor"),
    kind("thread-moved", "a light thread came from another reactor"),
    kind("move-given-up", "a light thread did not let go in time, and stays where it is"),
    kind("thread-ended", "a light thread is no more"),
    kind("poller-panicked", "a poller panicked and has been dropped; its thread goes on"),
    kind("message-panicked", "a message panicked; its thread goes on"),
    kind("channel-panicked", "a shared object panicked while it closed a thread's channel"),
    kind("task-panicked", "a task panicked; its thread goes on"),
    kind("turn-too-long", "a turn took longer than it may"),
    kind("turn-without-end", "a turn lasts for so long that it may have no end"),
    kind("not-waited-for", "a poller's descriptor could not be waited for"),
    kind(
        "woken-in-vain",
        "a poller's descriptor stays readable without work, and is heard when that changes",
    ),
    kind("poll-mode-changed", "a reactor polls in another way now"),
    kind("not-pinned", "a reactor could not be bound to its core"),
    kind("mask-unmatched", "no reactor's core is in a thread's mask; the thread runs where it can"),
    kind("mask-matched", "the mask of such a thread can be honoured again"),
    kind("core-taken", "a reactor's core was taken from the process"),
    kind("core-returned", "a reactor's core was given back"),
    kind("no-core-left", "the cpuset has none of the reactors' cores"),
    kind("frequency", "the frequency of a core could not be chosen"),
];

const fn kind(name: &'static str, help: &'static str) -> EventKind {
    EventKind { name, help }
}

/// Passes the events of reactors on to whoever follows events. To be called now and then; what
/// happened meanwhile is in the directory's list, as far as that reaches back.
#[derive(Debug)]
pub struct Relay {
    announcer: Announcer,
    lookout: Lookout,
    /// Whose events it has passed on. A program may start other reactors after these.
    heard: Weak<Directory>,
    next: u64,
}

impl Relay {
    /// One that has passed nothing on yet.
    pub fn new(announcer: Announcer) -> Self {
        Self { announcer, lookout: Lookout::default(), heard: Weak::new(), next: 0 }
    }

    /// What it announces with, for others who have something to say.
    pub fn announcer(&self) -> &Announcer {
        &self.announcer
    }

    /// Looks after the reactors, and passes on what is new.
    pub fn pass_on(&mut self, Running { directory, clock }: &Running) {
        let heard = Arc::downgrade(directory);
        if !self.heard.ptr_eq(&heard) {
            (self.heard, self.next, self.lookout) = (heard, 0, Lookout::default());
        }
        self.lookout.look(clock.now(), directory);
        let events = directory.events_since(self.next);
        self.next = events.next;
        if events.missed > 0 {
            self.announcer.announce_lost(events.missed);
        }
        for noted in &events.noted {
            let name = noted.event.kind();
            let known = EVENTS.iter().find(|kind| kind.name == name);
            self.announcer.announce(Event {
                kind: known.copied().unwrap_or(kind(name, "")),
                text: noted.event.to_string(),
                about: json!({ "sequence": noted.sequence, "happened_at_ns": noted.at.ns }),
            });
        }
    }
}

impl Reactors {
    /// Those that `find` finds.
    pub fn new(find: impl Fn() -> Option<Running> + Send + Sync + 'static) -> Self {
        Self(Box::new(find))
    }
}

impl fmt::Debug for Reactors {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("Reactors").field(&(self.0)()).finish()
    }
}

fn running(call: &Call<'_>) -> Result<Running, Refusal> {
    let found = (call.state.part::<Reactors>("reactors")?.0)();
    found.ok_or_else(|| {
        let message = "this process runs no reactors now, expected one that does";
        Refusal::caller(Code::Absent, message)
    })
}

fn look(call: &Call<'_>) -> Result<Sample, Refusal> {
    let Running { directory, clock } = running(call)?;
    Ok(directory.sample(clock.now()))
}

fn sample(call: &Call<'_>) -> Result<Value, Refusal> {
    let sample = look(call)?;
    Ok(json!({
        "at_ns": sample.at.ns,
        "reactors": reactor_rows(&sample),
        "threads": thread_rows(&sample, |_| true),
        "pollers": poller_rows(&sample, |_| true),
    }))
}

fn reactors(call: &Call<'_>) -> Result<Value, Refusal> {
    Ok(reactor_rows(&look(call)?))
}

fn threads(call: &Call<'_>) -> Result<Value, Refusal> {
    let name = call.arguments.text("name");
    let reactor = call.arguments.whole("reactor");
    let wanted = |thread: &ThreadSample| {
        name.is_none_or(|name| thread.name == name)
            && reactor.is_none_or(|reactor| u64::from(thread.home.0) == reactor)
    };
    Ok(thread_rows(&look(call)?, wanted))
}

fn pollers(call: &Call<'_>) -> Result<Value, Refusal> {
    let name = call.arguments.text("thread");
    Ok(poller_rows(&look(call)?, |thread| name.is_none_or(|name| thread.name == name)))
}

fn reactor_rows(sample: &Sample) -> Value {
    let row = |reactor: &ReactorSample| {
        let here = sample.threads.iter().filter(|thread| thread.home == reactor.id);
        json!({
            "id": reactor.id.0,
            "core": reactor.core,
            "mode": reactor.mode.name(),
            "asleep": reactor.asleep,
            "threads": here.count(),
            "busy_ns": reactor.busy.ns,
            "idle_ns": reactor.idle.ns,
            "busy_percent": percent(reactor.busy, reactor.idle),
            "turns": reactor.turns,
            "sleeps": reactor.sleeps,
            "wakes": reactor.wakes,
            "messages": reactor.messages,
            "moves": reactor.moves,
            "turns_too_long": reactor.turns_too_long,
            "longest_turn_ns": reactor.longest_turn.ns,
            "longest_culprit": reactor.longest_culprit,
            "running": reactor.running,
        })
    };
    sample.reactors.iter().map(row).collect()
}

fn thread_rows(sample: &Sample, wanted: impl Fn(&ThreadSample) -> bool) -> Value {
    let row = |thread: &ThreadSample| {
        json!({
            "id": thread.id.0,
            "name": thread.name,
            "reactor": thread.home.0,
            "mask": thread.mask.as_ref().map(ToString::to_string),
            "node": thread.node,
            "busy_ns": thread.busy.ns,
            "idle_ns": thread.idle.ns,
            "busy_percent": percent(thread.busy, thread.idle),
            "messages": thread.messages,
            "moves": thread.moves,
            "channels": thread.channels,
            "pollers": thread.pollers.len(),
        })
    };
    sample.threads.iter().filter(|thread| wanted(thread)).map(row).collect()
}

fn poller_rows(sample: &Sample, wanted: impl Fn(&ThreadSample) -> bool) -> Value {
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
            "woken_in_vain": poller.woken_in_vain,
        })
    };
    let wanted = sample.threads.iter().filter(|thread| wanted(thread));
    wanted.flat_map(|thread| thread.pollers.iter().map(move |poller| row(thread, poller))).collect()
}

fn set_poll(call: &Call<'_>) -> Result<Value, Refusal> {
    let directory = running(call)?.directory;
    let mode = call.arguments.text("mode").and_then(PollMode::parse).unwrap_or_default();
    let (asked, not_told) = match number(call, "reactor").map(ReactorId) {
        Some(reactor) => (vec![reactor], directory.set_poll(reactor, mode).map(|()| Vec::new())),
        None => (directory.reactors().collect(), directory.set_poll_of_all(mode)),
    };
    let not_told = not_told.map_err(|why| refused("set poll", &why))?;
    match not_told.first() {
        Some((_, why)) if not_told.len() == asked.len() => Err(refused("set poll", why)),
        _ => Ok(told(mode, &asked, &not_told)),
    }
}

fn told(mode: PollMode, asked: &[ReactorId], not_told: &[(ReactorId, reactor::Refused)]) -> Value {
    let is_told = |id: &&ReactorId| not_told.iter().all(|(other, _)| other != *id);
    let told: Vec<u32> = asked.iter().filter(is_told).map(|reactor| reactor.0).collect();
    let row = |(reactor, why): &(ReactorId, reactor::Refused)| json!({ "reactor": reactor.0, "why": why.to_string() });
    let refused: Vec<Value> = not_told.iter().map(row).collect();
    json!({ "mode": mode.name(), "reactors": told, "refused": refused })
}

fn set_thread(call: &Call<'_>) -> Result<Value, Refusal> {
    let Running { directory, clock } = running(call)?;
    let sample = directory.sample(clock.now());
    let name = call.arguments.text("name").unwrap_or_default();
    let found = sample.threads.iter().find(|thread| thread.name == name).ok_or_else(|| {
        let mut names: Vec<&str> = sample.threads.iter().map(|it| it.name.as_str()).collect();
        names.truncate(NAMES_MAX);
        let (name, expected) = (quoted(name), either(&names));
        let message = format!("set thread: no thread {name}, expected {expected}");
        Refusal::caller(Code::Absent, message)
    })?;
    let reactor = number(call, "reactor").map(ReactorId);
    let mask = call.arguments.cores("mask");
    let anywhere = call.arguments.flag("anywhere").unwrap_or(false);
    let (home, mask) = match (reactor, mask, anywhere) {
        (Some(reactor), None, false) => {
            let told = directory.move_thread(found.id, reactor);
            (told.map(|()| reactor), found.mask.as_ref())
        }
        (None, Some(mask), false) => (directory.set_mask(found.id, Some(mask.clone())), Some(mask)),
        (None, None, true) => (directory.set_mask(found.id, None), None),
        // More than one: the first could be done and the second refused.
        _ => {
            let message = "set thread: expected one of `reactor`, `mask` and `anywhere=true`";
            return Err(Refusal::caller(Code::BadValue, message));
        }
    };
    let home = home.map_err(|why| refused("set thread", &why))?;
    let mask = mask.map(ToString::to_string);
    Ok(json!({ "id": found.id.0, "reactor": home.0, "mask": mask }))
}

/// More names in a refusal would only hide what it says.
const NAMES_MAX: usize = 8;

fn number(call: &Call<'_>, name: &str) -> Option<u32> {
    call.arguments.whole(name).and_then(|number| u32::try_from(number).ok())
}

fn refused(what: &str, why: &reactor::Refused) -> Refusal {
    let message = format!("{what}: {why}");
    Refusal { code: Code::NotDone, blame: why.blame(), message, hint: None }
}

#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn percent(busy: Span, idle: Span) -> f64 {
    let all = busy.ns.saturating_add(idle.ns).max(1);
    busy.ns as f64 * 100.0 / all as f64
}

#[cfg(test)]
mod tests;
