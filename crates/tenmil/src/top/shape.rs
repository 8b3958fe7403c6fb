//! What `tenmil top --json` promises: names, meanings and kinds. `docs/top.md` lists them, and the
//! tests hold both the page and the output to this.

use control::{Field, Shape};

const fn whole(name: &'static str, help: &'static str) -> Field {
    Field::new(name, Shape::Whole, help)
}

const fn real(name: &'static str, help: &'static str) -> Field {
    Field::new(name, Shape::Real, help)
}

const TEXT: Shape = Shape::Maybe(&Shape::Text);

const PROCESS: &[Field] = &[
    Field::new("version", Shape::Text, "version of the program"),
    whole("pid", "number of the process"),
    Field::new("command_line", Shape::Texts, "the words it was started with"),
    Field::new("uptime_ns", Shape::Maybe(&Shape::Whole), "time since it was started"),
];

const REACTOR: &[Field] = &[
    whole("id", "its number"),
    whole("core", "the core it was meant for"),
    Field::new("mode", Shape::Text, "how it polls"),
    Field::new("asleep", Shape::Flag, "whether it slept when the second sample was taken"),
    Field::new("stuck", Shape::Flag, "whether it was awake and ended no turn in between"),
    real("busy_percent", "part of the time in turns that found work"),
    real("turns_per_second", "turns"),
    real("sleeps_per_second", "times it went to sleep"),
    real("messages_per_second", "messages that were run on it"),
    real("moves_per_second", "threads that came from other reactors"),
    whole("turns_too_long", "turns since it began that took longer than they may"),
    whole("longest_turn_ns", "the longest turn since it began"),
    Field::new("longest_culprit", TEXT, "what took the time in it, if it was too long"),
    Field::new("running", TEXT, "the mailbox or poller that runs, or ran last"),
];

const THREAD: &[Field] = &[
    whole("id", "its number"),
    Field::new("name", Shape::Text, "its name"),
    whole("reactor", "where it lives"),
    Field::new("mask", TEXT, "the cores it may live on; everywhere if null"),
    real("busy_percent", "part of the time in which it found work"),
    real("messages_per_second", "messages it ran"),
    whole("moves", "moves it has made since it began"),
    whole("channels", "channels it has open"),
];

const POLLER: &[Field] = &[
    whole("thread_id", "number of the thread it belongs to"),
    Field::new("name", Shape::Text, "its name"),
    Field::new("wake", Shape::Text, "what wakes it"),
    Field::new("every_ns", Shape::Maybe(&Shape::Whole), "its period, if it is timed"),
    Field::new("paused", Shape::Flag, "whether it is paused"),
    real("polls_per_second", "how often it was polled"),
    Field::new(
        "found_percent",
        Shape::Maybe(&Shape::Real),
        "part of those polls that found work; null if there were none",
    ),
];

/// What `--json` prints. The names are published: there may be more, and none changes.
pub(crate) const SHAPE: Shape = Shape::Record(&[
    whole("at_ns", "when the second sample was taken, by the clock that the reactors turn by"),
    whole("interval_ns", "the time between the two samples, to which the rates belong"),
    Field::new("process", Shape::Record(PROCESS), "who was asked"),
    Field::new("policy", TEXT, "how threads are spread; null without a scheduler"),
    real("busy_percent", "of all reactors together: 100 is all of them, all of the time"),
    real("sleeps_per_second", "of all reactors"),
    real("messages_per_second", "of all reactors"),
    real("moves_per_second", "of all reactors"),
    Field::new("reactors", Shape::Rows(REACTOR), "each reactor"),
    Field::new("threads", Shape::Rows(THREAD), "each light thread"),
    Field::new("pollers", Shape::Rows(POLLER), "each poller"),
]);
