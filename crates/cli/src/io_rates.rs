//! Rates between two samples of the method `io_statistics`, as `tenmil iostat` and `tenmil top` show them.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use clap::ValueEnum;
use serde_json::{Map, Value};
use tenmil_base::{Instant, Span};

/// What a row is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Grouping {
    /// A namespace of a subsystem, or an NBD export
    #[default]
    Namespace,
    /// A host of a subsystem
    Host,
    /// A subsystem, or an NBD export
    Export,
    /// A queue of a host and a namespace
    Queue,
}

impl Grouping {
    /// Name as a parameter of the method.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Namespace => "namespace",
            Self::Host => "host",
            Self::Export => "export",
            Self::Queue => "queue",
        }
    }

    /// Parameters of the method.
    pub(crate) fn parameters(self) -> Map<String, Value> {
        Map::from_iter([("by".to_owned(), self.name().into())])
    }
}

/// Counters that are sums since the start of the process: names in the result of `io_statistics`.
const SUMS: [&str; 15] = [
    "reads",
    "read_bytes",
    "read_errors",
    "read_time_ns",
    "writes",
    "written_bytes",
    "write_errors",
    "write_time_ns",
    "flushes",
    "flush_time_ns",
    "deallocations",
    "errors",
    "busy_ns",
    "limited",
    "limit_wait_ns",
];

/// What the rows of two reports are matched by.
const NAMES: [&str; 6] = ["protocol", "export", "namespace", "host", "controller", "queue"];

/// Counters of all rows at one time.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct IoSample {
    pub(crate) at: Instant,
    rows: BTreeMap<String, IoRow>,
}

/// Names of a row, and its sums.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct IoRow {
    pub(crate) names: Value,
    sums: [u64; SUMS.len()],
}

/// Change of a row between two samples.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct IoRates {
    pub(crate) reads: f64,
    pub(crate) read_kib: f64,
    pub(crate) read_await_ms: f64,
    pub(crate) writes: f64,
    pub(crate) written_kib: f64,
    pub(crate) write_await_ms: f64,
    pub(crate) flushes: f64,
    pub(crate) flush_await_ms: f64,
    pub(crate) deallocations: f64,
    pub(crate) queue: f64,
    pub(crate) busy_percent: f64,
    pub(crate) limited: f64,
    pub(crate) limit_wait_ms: f64,
    pub(crate) errors: f64,
}

impl IoSample {
    /// Sample from a result of the method.
    pub(crate) fn new(at: Instant, answer: &Value) -> Self {
        let rows = answer.as_array().into_iter().flatten().map(|row| {
            let names: Value =
                NAMES.iter().map(|name| ((*name).to_owned(), row[*name].clone())).collect();
            let sums = SUMS.map(|name| row[name].as_u64().unwrap_or_default());
            (names.to_string(), IoRow { names, sums })
        });
        Self { at, rows: rows.collect() }
    }

    /// Rows with their rates since `before`.
    pub(crate) fn rates<'a>(
        &'a self,
        before: &'a Self,
    ) -> impl Iterator<Item = (&'a IoRow, IoRates)> {
        let elapsed = self.at.since(before.at);
        self.rows.iter().map(move |(key, row)| {
            let old = before.rows.get(key).map_or([0; SUMS.len()], |old| old.sums);
            // A queue that was closed leaves the rows of queues, and its counts with it.
            let mut change = row.sums;
            for (new, old) in change.iter_mut().zip(old) {
                *new = new.saturating_sub(old);
            }
            (row, IoRates::new(change, elapsed))
        })
    }
}

impl IoRates {
    #[expect(clippy::cast_precision_loss, reason = "shown to people")]
    fn new(change: [u64; SUMS.len()], elapsed: Span) -> Self {
        let elapsed_ns = elapsed.ns.max(1) as f64;
        let of = |name: &str| {
            let at = SUMS.iter().position(|known| *known == name).expect("a name of the table");
            change[at] as f64
        };
        let rate = |name| of(name) * 1e9 / elapsed_ns;
        let mean_ms = |time, count| of(time) / of(count).max(1.0) / 1e6;
        let times = of("read_time_ns") + of("write_time_ns") + of("flush_time_ns");
        Self {
            reads: rate("reads"),
            read_kib: rate("read_bytes") / 1024.0,
            read_await_ms: mean_ms("read_time_ns", "reads"),
            writes: rate("writes"),
            written_kib: rate("written_bytes") / 1024.0,
            write_await_ms: mean_ms("write_time_ns", "writes"),
            flushes: rate("flushes"),
            flush_await_ms: mean_ms("flush_time_ns", "flushes"),
            deallocations: rate("deallocations"),
            queue: times / elapsed_ns,
            busy_percent: (of("busy_ns") * 100.0 / elapsed_ns).min(100.0),
            limited: rate("limited"),
            limit_wait_ms: mean_ms("limit_wait_ns", "limited"),
            errors: rate("errors"),
        }
    }
}

impl IoRow {
    /// Name of the line: what is served, and the part of it.
    pub(crate) fn title(&self) -> String {
        let mut title = self.names["export"].as_str().unwrap_or_default().to_owned();
        if let Some(nsid) = self.names["namespace"].as_u64() {
            let _ = write!(title, "/{nsid}");
        }
        if let Some(host) = self.names["host"].as_str() {
            let host = if host.is_empty() { "other hosts" } else { host };
            let _ = write!(title, " {host}");
        }
        if let (Some(controller), Some(queue)) =
            (self.names["controller"].as_u64(), self.names["queue"].as_u64())
        {
            let _ = write!(title, " {controller}:{queue}");
        }
        // A host chooses its NQN.
        title
            .chars()
            .map(|c| if tenmil_base::text::is_terminal_control(c) { '?' } else { c })
            .collect()
    }
}

/// Columns of numbers: title and digits after the point.
pub(crate) const COLUMNS: [(&str, usize); 14] = [
    ("r/s", 0),
    ("rkB/s", 0),
    ("r_await", 3),
    ("w/s", 0),
    ("wkB/s", 0),
    ("w_await", 3),
    ("f/s", 0),
    ("f_await", 3),
    ("d/s", 0),
    ("aqu-sz", 2),
    ("%util", 1),
    ("lim/s", 0),
    ("lim_wait", 1),
    ("err/s", 0),
];

impl IoRates {
    /// Values in the order of [`COLUMNS`].
    pub(crate) const fn values(&self) -> [f64; COLUMNS.len()] {
        [
            self.reads,
            self.read_kib,
            self.read_await_ms,
            self.writes,
            self.written_kib,
            self.write_await_ms,
            self.flushes,
            self.flush_await_ms,
            self.deallocations,
            self.queue,
            self.busy_percent,
            self.limited,
            self.limit_wait_ms,
            self.errors,
        ]
    }
}

/// Names in JSON, in the order of [`COLUMNS`].
const JSON_NAMES: [&str; COLUMNS.len()] = [
    "reads_per_s",
    "read_kib_per_s",
    "read_await_ms",
    "writes_per_s",
    "written_kib_per_s",
    "write_await_ms",
    "flushes_per_s",
    "flush_await_ms",
    "deallocations_per_s",
    "queue_size",
    "util_percent",
    "limited_per_s",
    "limit_wait_ms",
    "errors_per_s",
];

/// Names of a row with its rates.
pub(crate) fn json_row(row: &IoRow, rates: &IoRates) -> Value {
    let mut line = row.names.clone();
    for (name, value) in JSON_NAMES.into_iter().zip(rates.values()) {
        line[name] = value.into();
    }
    line
}
