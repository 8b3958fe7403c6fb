//! Schema of `tenmil top --json`: names, meanings and types. `docs/operator/top.md` lists the fields, and the
//! tests check both the page and the output against this schema.

use tenmil_rpc::{FieldSchema, ResultType};

const fn whole(name: &'static str, help: &'static str) -> FieldSchema {
    FieldSchema::new(name, ResultType::Whole, help)
}

const fn real(name: &'static str, help: &'static str) -> FieldSchema {
    FieldSchema::new(name, ResultType::Real, help)
}

const TEXT: ResultType = ResultType::Maybe(&ResultType::Text);

const PROCESS: &[FieldSchema] = &[
    FieldSchema::new("version", ResultType::Text, "version of the program"),
    whole("pid", "number of the process"),
    FieldSchema::new("command_line", ResultType::Texts, "the words it was started with"),
    FieldSchema::new(
        "uptime_ns",
        ResultType::Maybe(&ResultType::Whole),
        "time since it was started",
    ),
];

const REACTOR: &[FieldSchema] = &[
    whole("id", "its number"),
    whole("core", "the core it was meant for"),
    FieldSchema::new("mode", ResultType::Text, "how it polls"),
    FieldSchema::new(
        "sleeping",
        ResultType::Flag,
        "whether it slept when the second sample was taken",
    ),
    FieldSchema::new(
        "stalled",
        ResultType::Flag,
        "whether it was awake and ended no iteration in between",
    ),
    real("busy_percent", "part of the time in iterations that found work"),
    real("iterations_per_second", "iterations"),
    real("sleeps_per_second", "times it went to sleep"),
    real("messages_per_second", "messages that were run on it"),
    real("migrations_per_second", "threads that migrated from other reactors"),
    whole("iterations_too_long", "iterations since it began that took longer than they may"),
    whole("longest_iteration_ns", "the longest iteration since it began"),
    FieldSchema::new(
        "longest_iteration_cause",
        TEXT,
        "what took the time in it, if it was too long",
    ),
    FieldSchema::new("running", TEXT, "the mailbox or poller that runs, or ran last"),
];

const THREAD: &[FieldSchema] = &[
    whole("id", "its number"),
    FieldSchema::new("name", ResultType::Text, "its name"),
    whole("reactor", "where it lives"),
    FieldSchema::new("mask", TEXT, "the cores it may live on; everywhere if null"),
    real("busy_percent", "part of the time in which it found work"),
    real("messages_per_second", "messages it ran"),
    whole("migrations", "migrations since it began"),
    whole("channels", "channels it has open"),
];

const POLLER: &[FieldSchema] = &[
    whole("thread_id", "number of the thread it belongs to"),
    FieldSchema::new("name", ResultType::Text, "its name"),
    FieldSchema::new("wake", ResultType::Text, "what wakes it"),
    FieldSchema::new(
        "every_ns",
        ResultType::Maybe(&ResultType::Whole),
        "its period, if it is timed",
    ),
    FieldSchema::new("paused", ResultType::Flag, "whether it is paused"),
    real("polls_per_second", "how often it was polled"),
    FieldSchema::new(
        "found_percent",
        ResultType::Maybe(&ResultType::Real),
        "part of those polls that found work; null if there were none",
    ),
];

/// Schema of the `--json` output. Its names are stable: fields may be added, but none is changed.
pub(crate) const SHAPE: ResultType = ResultType::Record(&[
    whole("monotonic_ns", "when the second sample was taken, by the clock of the reactors"),
    whole("interval_ns", "the time between the two samples, to which the rates belong"),
    FieldSchema::new("process", ResultType::Record(PROCESS), "the observed process"),
    FieldSchema::new("policy", TEXT, "how threads are spread; null without a scheduler"),
    real("busy_percent", "of all reactors together: 100 is all of them, all of the time"),
    real("sleeps_per_second", "of all reactors"),
    real("messages_per_second", "of all reactors"),
    real("migrations_per_second", "of all reactors"),
    FieldSchema::new("reactors", ResultType::Rows(REACTOR), "each reactor"),
    FieldSchema::new("threads", ResultType::Rows(THREAD), "each light thread"),
    FieldSchema::new("pollers", ResultType::Rows(POLLER), "each poller"),
]);
