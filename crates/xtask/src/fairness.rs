//! `cargo xtask fairness`: what fifteen hosts keep beside one with many queues and a high depth.
//!
//! ```text
//!   tenmil perf, 15 hosts at the same depth ─┐
//!   tenmil perf, the sixteenth: at the same depth, then with eight queues of 128 ─┴─▶ tenmil serve
//! ```
//!
//! The rates are those that the server counts by host. Both halves of a comparison are measured in one run of
//! the fifteen, and in turn, because the machine may be busy with other things.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Options of `cargo xtask fairness`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask fairness                             both devices, at depth 4
  cargo xtask fairness --device null: --depth 1    the processor is the bottleneck")]
pub(crate) struct FairnessOptions {
    /// Program to measure
    #[arg(long, value_name = "FILE", default_value = "target/release/tenmil")]
    program: String,
    /// Served device, several times for several
    #[arg(long, value_name = "URI", default_values = ["null:", "model:p4600?size=64m"])]
    device: Vec<String>,
    /// Depth of the fifteen hosts
    #[arg(long, value_name = "N", default_value = "4")]
    depth: u32,
    /// Seconds of each measurement
    #[arg(long, value_name = "SECONDS", default_value = "3")]
    seconds: u64,
    /// Measurements of each kind, in turn
    #[arg(long, value_name = "N", default_value = "3")]
    rounds: u32,
}

/// Process that is ended when it is dropped.
struct RunningProcess(Child);

/// Commands per second by host NQN.
type Rates = BTreeMap<String, f64>;

const HOSTS: u32 = 16;
/// The host with number 15.
const NOISY: u32 = 15;
/// The share of its rate that a host has to keep.
const SHARE_MIN: f64 = 0.8;
/// Time until a load runs evenly.
const SETTLE: Duration = Duration::from_millis(1_500);

/// Measures every device. Returns whether each of the fifteen hosts keeps its share on all of them.
pub(crate) fn run_fairness(options: &FairnessOptions) -> Result<bool, String> {
    let mut is_fair = true;
    for device in &options.device {
        is_fair &= measure_device(options, device)?;
    }
    Ok(is_fair)
}

fn measure_device(options: &FairnessOptions, device: &str) -> Result<bool, String> {
    let (server, address) = start_server(options, device)?;
    let depth = options.depth.to_string();
    let _others = start_load(options, &address, 0..NOISY, &["-q", &depth])?;
    let (mut before, mut after) = (Rates::new(), Rates::new());
    for _ in 0..options.rounds {
        for (loads, rates) in
            [(&["-q", &depth][..], &mut before), (&["-q", "128", "-P", "8"][..], &mut after)]
        {
            let _last = start_load(options, &address, NOISY..HOSTS, loads)?;
            sleep(SETTLE);
            for (host, rate) in measure_rates(options, server.0.id())? {
                *rates.entry(host).or_default() += rate / f64::from(options.rounds);
            }
        }
    }
    println!("{device}, depth {depth}: commands per second of each host");
    println!("{:>6} {:>12} {:>12} {:>8}", "host", "before", "after", "kept");
    let mut lowest = f64::INFINITY;
    for number in 0..HOSTS {
        let of = |rates: &Rates| rates.get(&host_nqn(number)).copied().unwrap_or_default();
        let (before, after) = (of(&before), of(&after));
        let kept = after / before.max(1.0);
        let note = if number == NOISY { "  8 queues of 128" } else { "" };
        println!("{number:>6} {before:>12.0} {after:>12.0} {:>7.0}%{note}", kept * 100.0);
        if number != NOISY {
            lowest = lowest.min(kept);
        }
    }
    let totals = [&before, &after].map(|rates| rates.values().sum::<f64>());
    println!("{:>6} {:>12.0} {:>12.0}", "all", totals[0], totals[1]);
    println!("lowest share: {:.0}%, expected at least {:.0}%\n", lowest * 100.0, SHARE_MIN * 100.0);
    Ok(lowest >= SHARE_MIN)
}

fn host_nqn(number: u32) -> String {
    format!("nqn.2026-01.org.tenmil:host-{number}")
}

fn start_server(
    options: &FairnessOptions,
    device: &str,
) -> Result<(RunningProcess, String), String> {
    let mut serve = Command::new(&options.program);
    serve.args(["serve", device, "--listen", "tcp://127.0.0.1:0"]).stdout(Stdio::piped());
    let mut child = serve.spawn().map_err(|why| {
        format!("run {}: {why}; `cargo build --release` builds it", options.program)
    })?;
    let mut ready = String::new();
    if let Some(stdout) = child.stdout.as_mut() {
        let _ = BufReader::new(stdout).read_line(&mut ready);
    }
    let server = RunningProcess(child);
    let address = ready.split_whitespace().find_map(|word| word.strip_prefix("tcp://"));
    let address = address.ok_or_else(|| {
        format!("serve {device}: it printed `{}`, expected `ready` and an address", ready.trim())
    })?;
    Ok((server, address.to_owned()))
}

/// Starts a load of some hosts, which runs until it is dropped.
fn start_load(
    options: &FairnessOptions,
    address: &str,
    hosts: std::ops::Range<u32>,
    arguments: &[&str],
) -> Result<RunningProcess, String> {
    let mut perf = Command::new(&options.program);
    perf.arg("perf").args(arguments).args(["-t", "10m", "-a", "0", "--json=/dev/null"]);
    for number in hosts {
        let host = host_nqn(number);
        perf.arg(format!("tcp://{address}/nqn.2026-01.org.tenmil:disk/1?hostnqn={host}"));
    }
    let child = perf.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    child.map(RunningProcess).map_err(|why| format!("run {} perf: {why}", options.program))
}

/// Rates of all hosts over a time, as the server counts.
fn measure_rates(options: &FairnessOptions, server: u32) -> Result<Rates, String> {
    let (before, start) = (count_reads(options, server)?, Instant::now());
    sleep(Duration::from_secs(options.seconds));
    let (after, elapsed) = (count_reads(options, server)?, start.elapsed().as_secs_f64());
    let rate = |(host, count): (String, f64)| {
        let old = before.get(&host).copied().unwrap_or_default();
        (host, (count - old) / elapsed)
    };
    Ok(after.into_iter().map(rate).collect())
}

fn count_reads(options: &FairnessOptions, server: u32) -> Result<Rates, String> {
    let mut get = Command::new(&options.program);
    get.args(["get", "io_statistics", "by=host", "--json", "--pid", &server.to_string()]);
    let output = get.output().map_err(|why| format!("run {}: {why}", options.program))?;
    let rows: Value = serde_json::from_slice(&output.stdout).map_err(|why| {
        format!("get io_statistics: {why}: {}", String::from_utf8_lossy(&output.stderr).trim())
    })?;
    let row = |row: &Value| Some((row["host"].as_str()?.to_owned(), row["reads"].as_f64()?));
    Ok(rows.as_array().into_iter().flatten().filter_map(row).collect())
}

impl Drop for RunningProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
