//! `tenmil iostat`: rates, latencies and queue depths of what a running process serves.

use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use serde_json::{Map, Value, json};
use tenmil_base::{Error, Instant, Span};
use tenmil_linux::Clock;

use super::rpc_endpoint::{ProcessSelector, RESPONSE_TIMEOUT, command_error, connect_to_process};
use super::write_stdout;
use crate::io_rates::{COLUMNS, Grouping, IoRates, IoSample, json_row};
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

const EXAMPLES: &str = "\
Examples:
  tenmil iostat                        every namespace, once per second
  tenmil iostat --by host --count 1    which host does how much, of one second
  tenmil iostat -i 10 --json           for programs

docs/operator/iostat.md describes the columns, and the names of --json.";

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
        Ok::<_, Error>(IoSample::new(clock.now(), &rows))
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
        let mut parameters = self.by.parameters();
        for (name, value) in [("export", &self.export), ("host", &self.host)] {
            if let Some(value) = value {
                parameters.insert(name.into(), value.as_str().into());
            }
        }
        parameters
    }
}

fn report_text(before: &IoSample, now: &IoSample) -> String {
    let lines: Vec<(String, IoRates)> =
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

fn report_json(before: &IoSample, now: &IoSample) -> String {
    let rows = now.rates(before).map(|(row, rates)| json_row(row, &rates));
    let rows: Vec<Value> = rows.collect();
    let interval_ns = now.at.since(before.at).ns;
    format!("{}\n", json!({ "interval_ns": interval_ns, "rows": rows }))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tenmil_base::{Instant, Span};

    use super::{IoSample, report_json, report_text};

    fn sample(seconds: u64, reads: u64) -> IoSample {
        sample_of_host(&Value::Null, seconds, reads)
    }

    fn sample_of_host(host: &Value, seconds: u64, reads: u64) -> IoSample {
        let row = json!({
            "protocol": "nvme-tcp", "export": "nqn.x", "namespace": 1, "host": host,
            "controller": null, "queue": null,
            "reads": reads, "read_bytes": 4096 * reads, "read_errors": 1,
            "read_time_ns": 250_000 * reads,
            "writes": 7, "written_bytes": 7, "write_errors": 0, "write_time_ns": 7,
            "flushes": 3, "flush_time_ns": 9, "deallocations": 0,
            "errors": 1, "busy_ns": 500_000 * reads,
            "limited": reads / 10, "limit_wait_ns": 30_000_000 * (reads / 10),
        });
        IoSample::new(Instant::default().after(Span::from_secs(seconds)), &json!([row]))
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
        let none = IoSample::new(Instant::default(), &json!([]));
        let text = report_text(&none, &sample(1, 1_000));
        let words: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(words[..4], ["nqn.x/1", "1000", "4000", "0.250"]);
        let evil = sample_of_host(&json!("a\u{1b}[2J"), 1, 1);
        assert!(report_text(&none, &evil).contains("a?[2J"));
    }
}
