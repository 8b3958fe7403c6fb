//! Schema of `tenmil top --json`: names, meanings and types. `docs/operator/top.md` lists the fields, and the
//! tests check both the page and the output against this schema.

use tenmil_rpc::{FieldSchema, ResultType};

const fn integer_field(name: &'static str, help: &'static str) -> FieldSchema {
    FieldSchema::new(name, ResultType::Whole, help)
}

const fn number_field(name: &'static str, help: &'static str) -> FieldSchema {
    FieldSchema::new(name, ResultType::Real, help)
}

const TEXT: ResultType = ResultType::Maybe(&ResultType::Text);

const PROCESS: &[FieldSchema] = &[
    FieldSchema::new("version", ResultType::Text, "version of the program"),
    integer_field("pid", "number of the process"),
    FieldSchema::new("command_line", ResultType::Texts, "the words it was started with"),
    FieldSchema::new(
        "uptime_ns",
        ResultType::Maybe(&ResultType::Whole),
        "time since it was started",
    ),
];

const REACTOR: &[FieldSchema] = &[
    integer_field("id", "its number"),
    integer_field("core", "the core it was meant for"),
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
    number_field("busy_percent", "part of the time in iterations that found work"),
    number_field("iterations_per_second", "iterations"),
    number_field("sleeps_per_second", "times it went to sleep"),
    number_field("messages_per_second", "messages that were run on it"),
    number_field("migrations_per_second", "threads that migrated from other reactors"),
    integer_field(
        "iterations_too_long",
        "iterations since it began that took longer than they may",
    ),
    integer_field("longest_iteration_ns", "the longest iteration since it began"),
    FieldSchema::new(
        "longest_iteration_cause",
        TEXT,
        "what took the time in it, if it was too long",
    ),
    FieldSchema::new("running", TEXT, "the mailbox or poller that runs, or ran last"),
];

const THREAD: &[FieldSchema] = &[
    integer_field("id", "its number"),
    FieldSchema::new("name", ResultType::Text, "its name"),
    integer_field("reactor", "where it lives"),
    FieldSchema::new("mask", TEXT, "the cores it may live on; everywhere if null"),
    number_field("busy_percent", "part of the time in which it found work"),
    number_field("messages_per_second", "messages it ran"),
    integer_field("migrations", "migrations since it began"),
    integer_field("channels", "channels it has open"),
];

const POLLER: &[FieldSchema] = &[
    integer_field("thread_id", "number of the thread it belongs to"),
    FieldSchema::new("name", ResultType::Text, "its name"),
    FieldSchema::new("wake", ResultType::Text, "what wakes it"),
    FieldSchema::new(
        "every_ns",
        ResultType::Maybe(&ResultType::Whole),
        "its period, if it is timed",
    ),
    FieldSchema::new("paused", ResultType::Flag, "whether it is paused"),
    number_field("polls_per_second", "how often it was polled"),
    FieldSchema::new(
        "found_percent",
        ResultType::Maybe(&ResultType::Real),
        "part of those polls that found work; null if there were none",
    ),
];

const WHOLE: ResultType = ResultType::Maybe(&ResultType::Whole);

const IO: &[FieldSchema] = &[
    FieldSchema::new("protocol", ResultType::Text, "nvme-tcp, nbd, vfio-user, vhost-user or ublk"),
    FieldSchema::new(
        "export",
        ResultType::Text,
        "subsystem, NBD export, or where a device is served",
    ),
    FieldSchema::new("namespace", WHOLE, "namespace identifier; null for NBD"),
    FieldSchema::new("host", TEXT, "always null: a row is of all hosts"),
    FieldSchema::new("controller", WHOLE, "always null: a row is of all controllers"),
    FieldSchema::new("queue", WHOLE, "always null: a row is of all queues"),
    number_field("reads_per_s", "successful reads per second"),
    number_field("read_kib_per_s", "KiB read per second"),
    number_field("read_await_ms", "mean latency of reads"),
    number_field("writes_per_s", "successful writes per second"),
    number_field("written_kib_per_s", "KiB written per second"),
    number_field("write_await_ms", "mean latency of writes"),
    number_field("flushes_per_s", "successful flushes per second"),
    number_field("flush_await_ms", "mean latency of flushes"),
    number_field("deallocations_per_s", "successful deallocations per second"),
    number_field("queue_size", "mean number of commands in flight"),
    number_field("util_percent", "share of the time with commands in flight, of the busiest queue"),
    number_field("limited_per_s", "commands per second that waited for a limit"),
    number_field("limit_wait_ms", "mean time that these waited"),
    number_field("errors_per_s", "failed commands per second"),
];

/// Schema of the `--json` output. Its names are stable: fields may be added, but none is changed.
pub(crate) const SHAPE: ResultType = ResultType::Record(&[
    integer_field("monotonic_ns", "when the second sample was taken, by the clock of the reactors"),
    integer_field("interval_ns", "the time between the two samples, to which the rates belong"),
    FieldSchema::new("process", ResultType::Record(PROCESS), "the observed process"),
    FieldSchema::new("policy", TEXT, "how threads are spread; null without a scheduler"),
    number_field("busy_percent", "of all reactors together: 100 is all of them, all of the time"),
    number_field("sleeps_per_second", "of all reactors"),
    number_field("messages_per_second", "of all reactors"),
    number_field("migrations_per_second", "of all reactors"),
    FieldSchema::new("reactors", ResultType::Rows(REACTOR), "each reactor"),
    FieldSchema::new("threads", ResultType::Rows(THREAD), "each light thread"),
    FieldSchema::new("pollers", ResultType::Rows(POLLER), "each poller"),
    FieldSchema::new("io", ResultType::Rows(IO), "I/O of each namespace and export that is served"),
]);
