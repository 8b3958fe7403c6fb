//! `tenmil iostat`: rates, latencies and queue depths of what a running process serves.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use serde_json::{Map, Value, json};
use tenmil_base::{Error, Instant, Span};
use tenmil_linux::Clock;

use super::rpc_endpoint::{ProcessSelector, RESPONSE_TIMEOUT, command_error, connect_to_process};
use super::write_stdout;
use tenmil_block::quantity_parser::parse_time;

/// Print the rates, latencies and queue depths of what a running tenmil process serves, until it exits
/// or Ctrl-C.
///
/// Every line is about the time since the previous report.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct IostatArguments {
    #[command(flatten)]
    process: ProcessSelector,

    /// One line for each of these
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = Grouping::Namespace)]
    by: Grouping,

    /// Only this subsystem (NQN) or NBD export (name)
    #[arg(long, value_name = "NAME")]
    export: Option<String>,

    /// Only the host with this NQN
    #[arg(long, value_name = "NQN")]
    host: Option<String>,

    /// Time between two reports
    #[arg(short, long, value_name = "TIME", default_value = "1", value_parser = parse_interval)]
    interval: Span,

    /// Stop after this many reports
    #[arg(long, value_name = "N", value_parser = super::perf::parse_integer::<u64>)]
    count: Option<u64>,

    /// Print JSON, one object per report and line
    #[arg(long)]
    json: bool,
}

/// What a line is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Grouping {
    /// A namespace of a subsystem, or an NBD export
    Namespace,
    /// A host of a subsystem
    Host,
    /// A subsystem, or an NBD export
    Export,
    /// A queue of a host and a namespace
    Queue,
}

const EXAMPLES: &str = "\
Examples:
  tenmil iostat                        every namespace, once per second
  tenmil iostat --by host --count 1    which host does how much, of one second
  tenmil iostat -i 10 --json           for programs

docs/operator/iostat.md describes the columns, and the names of --json.";

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
struct Sample {
    at: Instant,
    rows: BTreeMap<String, Row>,
}

struct Row {
    names: Value,
    sums: [u64; SUMS.len()],
}

/// Change of a row between two samples.
#[derive(Clone, Debug, PartialEq)]
struct Rates {
    reads: f64,
    read_kib: f64,
    read_await_ms: f64,
    writes: f64,
    written_kib: f64,
    write_await_ms: f64,
    flushes: f64,
    flush_await_ms: f64,
    deallocations: f64,
    queue: f64,
    busy_percent: f64,
    limited: f64,
    limit_wait_ms: f64,
    errors: f64,
}

fn parse_interval(text: &str) -> Result<Span, String> {
    let (least, most) = (Span::from_ms(100), Span::from_secs(86_400));
    let span = parse_time(text)?;
    if (least..=most).contains(&span) {
        return Ok(span);
    }
    Err(format!("`{text}` is out of range, expected a time from {least} to {most}"))
}

/// Prints reports.
pub(super) fn run_iostat(
    arguments: &IostatArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    tenmil_linux::signal::request_stop_on_sigint_or_sigterm()
        .map_err(|error| Error::environment(format!("catch Ctrl-C: {error}")))?;
    let clock = Clock::on_kernel_clock();
    let mut client = connect_to_process(&arguments.process)?;
    let mut take_sample = || {
        let parameters = arguments.parameters();
        let called = client.call_method("io_statistics", parameters, RESPONSE_TIMEOUT);
        let rows = called.map_err(command_error)?;
        Ok::<_, Error>(Sample::new(clock.now(), &rows))
    };
    let mut before = take_sample()?;
    let mut left = arguments.count.unwrap_or(u64::MAX);
    while left > 0 {
        sleep_until(&clock, before.at.after(arguments.interval));
        if tenmil_linux::signal::is_stop_requested() {
            break;
        }
        let now = take_sample()?;
        let text =
            if arguments.json { report_json(&before, &now) } else { report_text(&before, &now) };
        write_stdout(out, &text)?;
        (before, left) = (now, left - 1);
    }
    Ok(ExitCode::SUCCESS)
}

/// Waits in short steps, since Ctrl-C only sets a flag.
fn sleep_until(clock: &Clock, end: Instant) {
    let step = Span::from_ms(100);
    while clock.now() < end && !tenmil_linux::signal::is_stop_requested() {
        tenmil_linux::named_thread::sleep(step.min(end.since(clock.now())));
    }
}

impl IostatArguments {
    fn parameters(&self) -> Map<String, Value> {
        let by = match self.by {
            Grouping::Namespace => "namespace",
            Grouping::Host => "host",
            Grouping::Export => "export",
            Grouping::Queue => "queue",
        };
        let mut parameters = Map::from_iter([("by".to_owned(), by.into())]);
        for (name, value) in [("export", &self.export), ("host", &self.host)] {
            if let Some(value) = value {
                parameters.insert(name.into(), value.as_str().into());
            }
        }
        parameters
    }
}

impl Sample {
    fn new(at: Instant, answer: &Value) -> Self {
        let rows = answer.as_array().into_iter().flatten().map(|row| {
            let names: Value =
                NAMES.iter().map(|name| ((*name).to_owned(), row[*name].clone())).collect();
            let sums = SUMS.map(|name| row[name].as_u64().unwrap_or_default());
            (names.to_string(), Row { names, sums })
        });
        Self { at, rows: rows.collect() }
    }

    /// Rows with their rates since `before`.
    fn rates<'a>(&'a self, before: &'a Self) -> impl Iterator<Item = (&'a Row, Rates)> {
        let elapsed = self.at.since(before.at);
        self.rows.iter().map(move |(key, row)| {
            let old = before.rows.get(key).map_or([0; SUMS.len()], |old| old.sums);
            // A queue that was closed leaves the rows of queues, and its counts with it.
            let mut change = row.sums;
            for (new, old) in change.iter_mut().zip(old) {
                *new = new.saturating_sub(old);
            }
            (row, Rates::new(change, elapsed))
        })
    }
}

impl Rates {
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

/// Columns of numbers: title and digits after the point.
const COLUMNS: [(&str, usize); 14] = [
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

impl Rates {
    /// Values in the order of [`COLUMNS`].
    const fn values(&self) -> [f64; COLUMNS.len()] {
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

impl Row {
    /// Name of the line: what is served, and the part of it.
    fn title(&self) -> String {
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

fn report_text(before: &Sample, now: &Sample) -> String {
    let lines: Vec<(String, Rates)> =
        now.rates(before).map(|(row, rates)| (row.title(), rates)).collect();
    let titles = lines.iter().map(|(title, _)| title.chars().count());
    let width = titles.chain(["export".len()]).max().unwrap_or_default();
    let mut text = format!("{:width$}", "export");
    for (title, _) in COLUMNS {
        let _ = write!(text, " {title:>9}");
    }
    text.push('\n');
    for (title, rates) in &lines {
        let _ = write!(text, "{title:width$}");
        for (value, (_, digits)) in rates.values().into_iter().zip(COLUMNS) {
            let _ = write!(text, " {value:>9.digits$}");
        }
        text.push('\n');
    }
    text + "\n"
}

fn report_json(before: &Sample, now: &Sample) -> String {
    let rows = now.rates(before).map(|(row, rates)| {
        let mut line = row.names.clone();
        for (name, value) in JSON_NAMES.into_iter().zip(rates.values()) {
            line[name] = json!(value);
        }
        line
    });
    let rows: Vec<Value> = rows.collect();
    let interval_ns = now.at.since(before.at).ns;
    format!("{}\n", json!({ "interval_ns": interval_ns, "rows": rows }))
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tenmil_base::{Instant, Span};

    use super::{Sample, report_json, report_text};

    fn sample(seconds: u64, reads: u64) -> Sample {
        let row = json!({
            "protocol": "nvme-tcp", "export": "nqn.x", "namespace": 1, "host": null,
            "controller": null, "queue": null,
            "reads": reads, "read_bytes": 4096 * reads, "read_errors": 1,
            "read_time_ns": 250_000 * reads,
            "writes": 7, "written_bytes": 7, "write_errors": 0, "write_time_ns": 7,
            "flushes": 3, "flush_time_ns": 9, "deallocations": 0,
            "errors": 1, "busy_ns": 500_000 * reads,
            "limited": reads / 10, "limit_wait_ns": 30_000_000 * (reads / 10),
        });
        Sample::new(Instant::default().after(Span::from_secs(seconds)), &json!([row]))
    }

    #[test]
    fn rates_are_those_between_two_samples() {
        let report = report_json(&sample(10, 1_000), &sample(12, 5_000));
        let report: Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["interval_ns"], 2_000_000_000_u64);
        let row = &report["rows"][0];
        assert_eq!((&row["export"], &row["namespace"]), (&json!("nqn.x"), &json!(1)));
        let near = |name: &str, expected: f64| {
            let found = row[name].as_f64().unwrap();
            assert!((found - expected).abs() < 1e-9, "{name}: {found}, expected {expected}");
        };
        near("reads_per_s", 2_000.0);
        near("read_kib_per_s", 8_000.0);
        near("read_await_ms", 0.25);
        near("queue_size", 0.5);
        near("util_percent", 100.0);
        near("limited_per_s", 200.0);
        near("limit_wait_ms", 30.0);
        near("writes_per_s", 0.0);
        near("write_await_ms", 0.0);
        near("errors_per_s", 0.0);
    }

    #[test]
    fn a_row_that_is_new_counts_from_zero_and_control_characters_are_not_printed() {
        let none = Sample::new(Instant::default(), &json!([]));
        let text = report_text(&none, &sample(1, 1_000));
        let words: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(words[..4], ["nqn.x/1", "1000", "4000", "0.250"]);
        let mut evil = sample(1, 1);
        let row = evil.rows.values_mut().next().unwrap();
        row.names["host"] = "a\u{1b}[2J".into();
        assert!(report_text(&none, &evil).contains("a?[2J"));
    }
}
