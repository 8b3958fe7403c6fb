//! Rates and processor time of tenmil over NVMe/TCP beside `rbd bench` and fio's engine `rbd`, on one image and the same
//! cores, in turn.
//!
//! The processor time is sampled by `perf record`. Time in the libraries of Ceph, and that of their threads, is that of
//! librbd and librados; all other time is that of the program, that of the kernel on its threads included.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::cluster::Cluster;
use super::programs::Programs;
use crate::operate::{Report, run_program};

/// A measured load.
#[derive(Clone, Copy, Debug)]
struct Load {
    is_write: bool,
    bytes: u32,
    depth: u32,
}

/// A measurement: operations per second, and microseconds of processor time for each.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    rate: f64,
    /// Of the program around librbd and librados.
    own_us: f64,
    /// Of the threads of librbd and librados.
    library_us: f64,
}

/// Sampled processor time of a process, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
struct SampledTimes {
    own_us: f64,
    library_us: f64,
}

/// The lowest rate beside the faster one of the others.
const SHARE_MIN: f64 = 0.95;
/// The most processor time beside fio's, outside the libraries.
const TIME_MAX: f64 = 0.5;
/// Files of the libraries begin with one of these.
const LIBRARIES: [&str; 6] =
    ["librbd", "librados", "libceph", "libboost", "libstdc++", "libibverbs"];
/// Names of the threads of librbd and librados begin with one of these.
const LIBRARY_THREADS: [&str; 12] = [
    "msgr-worker",
    "io_context_pool",
    "fn-radosclient",
    "ceph_timer",
    "safe_timer",
    "admin_socket",
    "service",
    "log",
    "taskfin_librbd",
    "fn_anonymous",
    "ms_dispatch",
    "ms_local",
];

/// Measures each load with each program.
pub(super) fn measure_speed(
    programs: &Programs,
    cluster: &Cluster,
    seconds: u32,
    rounds: u32,
    report: &mut Report,
) -> Result<(), String> {
    programs.run(&["volume", "create", &cluster.uri("speed", ""), "--size", "1g"])?;
    // Every object exists, so that reads find data.
    cluster.run(
        "rbd",
        &["bench", "--io-type", "write", "--io-size", "4M", "--io-total", "1G", "speed"],
    )?;
    println!(
        "        IO/s, then microseconds of processor time for each: of the program + of librbd and librados"
    );
    println!(
        "        {:24} {:>22} {:>22} {:>22} {:>10}",
        "", "NVMe/TCP", "rbd: directly", "fio", "rbd bench"
    );
    for bytes in [4 << 10, 64 << 10] {
        for is_write in [false, true] {
            for depth in [32, 128] {
                let load = Load { is_write, bytes, depth };
                measure_load(programs, cluster, load, seconds, rounds, report)?;
            }
        }
    }
    Ok(())
}

fn measure_load(
    programs: &Programs,
    cluster: &Cluster,
    load: Load,
    seconds: u32,
    rounds: u32,
    report: &mut Report,
) -> Result<(), String> {
    let mut runs: [Vec<Measured>; 4] = Default::default();
    for _ in 0..rounds {
        runs[0].push(measure_over_tcp(programs, cluster, load, seconds)?);
        runs[1].push(measure_directly(programs, cluster, load, seconds)?);
        runs[2].push(measure_fio(cluster, load, seconds)?);
        runs[3].push(measure_bench(cluster, load, seconds)?);
    }
    let [ours, direct, fio, bench] = runs.each_ref().map(|runs| median_of(runs));
    let direction = if load.is_write { "writes" } else { "reads" };
    let what = format!("{direction} of {} KiB, depth {}", load.bytes >> 10, load.depth);
    let shown = [ours, direct, fio].map(|Measured { rate, own_us, library_us }| {
        format!("{rate:.0} {own_us:.1} + {library_us:.1}")
    });
    println!(
        "        {what:24} {:>22} {:>22} {:>22} {:>10.0}",
        shown[0], shown[1], shown[2], bench.rate
    );
    let share = ours.rate / fio.rate.max(bench.rate);
    let found = format!("{share:.2} of the faster one");
    report.check(&format!("{what}: rate"), if share >= SHARE_MIN { Ok(found) } else { Err(found) });
    let share = ours.own_us / fio.own_us.max(0.01);
    let found = format!("{share:.2} of fio's processor time outside the libraries");
    report.check(
        &format!("{what}: processor"),
        if share <= TIME_MAX { Ok(found) } else { Err(found) },
    );
    Ok(())
}

fn measure_over_tcp(
    programs: &Programs,
    cluster: &Cluster,
    load: Load,
    seconds: u32,
) -> Result<Measured, String> {
    let server = programs.serve(cluster.directory(), "speed", &cluster.uri("speed", ""))?;
    let (depth, bytes) = (load.depth.to_string(), load.bytes.to_string());
    let pattern = if load.is_write { "randwrite" } else { "randread" };
    let time = seconds.to_string();
    let samples = cluster.directory().join("tenmil.perf");
    let mut record = record_command(&samples);
    record.args(["-p", &server.pid().to_string(), "--", "sleep", &time]);
    let recorder = start_quietly(&mut record)?;
    let arguments = [
        "perf",
        &server.uri,
        "-w",
        pattern,
        "-q",
        &depth,
        "-o",
        &bytes,
        "-t",
        &time,
        "--overwrite",
        "--json",
    ];
    let text = programs.run(&arguments)?;
    end_quietly(recorder)?;
    // The samples begin with the warm-up, whose rate is the same.
    let rate = rate_of_report(&text)?;
    measured(&samples, rate, rate * f64::from(seconds))
}

/// The same load by `tenmil perf` on the image itself.
fn measure_directly(
    programs: &Programs,
    cluster: &Cluster,
    load: Load,
    seconds: u32,
) -> Result<Measured, String> {
    let uri = cluster.uri("speed", "");
    let (depth, bytes) = (load.depth.to_string(), load.bytes.to_string());
    let pattern = if load.is_write { "randwrite" } else { "randread" };
    let report = cluster.directory().join("direct.json");
    let samples = cluster.directory().join("direct.perf");
    let mut perf = record_command(&samples);
    perf.arg("--").arg(&programs.tenmil).args(["perf", &uri, "-w", pattern, "-q", &depth]);
    perf.args(["-o", &bytes, "-t", &seconds.to_string(), "-a", "0", "--overwrite"]);
    perf.arg(format!("--json={}", report.display()));
    end_quietly(start_quietly(&mut perf)?)?;
    let text = std::fs::read_to_string(&report).map_err(|why| format!("perf --json: {why}"))?;
    let rate = rate_of_report(&text)?;
    measured(&samples, rate, rate * f64::from(seconds))
}

fn rate_of_report(text: &str) -> Result<f64, String> {
    let value: serde_json::Value =
        serde_json::from_str(text).map_err(|why| format!("perf --json: {why}"))?;
    value["iops"].as_f64().ok_or_else(|| "perf --json: no iops".to_owned())
}

fn measured(samples: &Path, rate: f64, operations: f64) -> Result<Measured, String> {
    let SampledTimes { own_us, library_us } = sampled_times(samples)?;
    Ok(Measured { rate, own_us: own_us / operations, library_us: library_us / operations })
}

fn measure_fio(cluster: &Cluster, load: Load, seconds: u32) -> Result<Measured, String> {
    let pattern = if load.is_write { "randwrite" } else { "randread" };
    let output = cluster.directory().join("fio.json");
    let samples = cluster.directory().join("fio.perf");
    let mut fio = record_command(&samples);
    fio.env("CEPH_CONF", cluster.conf()).args([
        "--",
        "fio",
        "--name=load",
        "--ioengine=rbd",
        "--clientname=admin",
        "--pool=rbd",
        "--rbdname=speed",
        "--thread",
        "--time_based",
        "--output-format=json",
        &format!("--rw={pattern}"),
        &format!("--bs={}", load.bytes),
        &format!("--iodepth={}", load.depth),
        &format!("--runtime={seconds}"),
        &format!("--output={}", output.display()),
    ]);
    end_quietly(start_quietly(&mut fio)?)?;
    let text = std::fs::read_to_string(&output).map_err(|why| format!("fio: {why}"))?;
    // Messages of librbd may precede the report.
    let text = text.find('{').map_or("", |start| &text[start..]);
    let value: serde_json::Value =
        serde_json::from_str(text).map_err(|why| format!("fio: {why}"))?;
    let job = &value["jobs"][0][if load.is_write { "write" } else { "read" }];
    let (rate, count) =
        (job["iops"].as_f64().unwrap_or(0.0), job["total_ios"].as_f64().unwrap_or(0.0));
    if count < 1.0 {
        return Err("fio has done nothing".to_owned());
    }
    measured(&samples, rate, count)
}

fn measure_bench(cluster: &Cluster, load: Load, seconds: u32) -> Result<Measured, String> {
    let kind = if load.is_write { "write" } else { "read" };
    let (bytes, depth) = (load.bytes.to_string(), load.depth.to_string());
    // It ends by the amount; the time limit ends it earlier.
    let mut bench = Command::new("timeout");
    bench.args(["--signal=INT", &seconds.to_string(), "rbd", "-c"]).arg(cluster.conf()).args([
        "bench",
        "--io-type",
        kind,
        "--io-pattern",
        "rand",
        "--io-size",
        &bytes,
        "--io-threads",
        &depth,
        "--io-total",
        "1T",
        "--rbd-cache=false",
        "speed",
    ]);
    let output = bench.output().map_err(|why| format!("rbd bench: {why}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // Lines of progress: seconds, operations, operations per second, bytes per second.
    let is_progress =
        |line: &&str| line.trim_start().starts_with(|first: char| first.is_ascii_digit());
    let last = text.lines().rfind(is_progress);
    let rate = last.and_then(|line| line.split_whitespace().nth(2)?.parse().ok());
    let rate = rate.ok_or_else(|| format!("rbd bench: `{}`", text.trim()))?;
    Ok(Measured { rate, ..Measured::default() })
}

/// `perf record` to a file, without a process.
fn record_command(samples: &Path) -> Command {
    let mut record = Command::new("perf");
    record.args(["record", "--quiet", "-e", "cpu-clock", "-F", "997", "-o"]).arg(samples);
    record
}

fn start_quietly(command: &mut Command) -> Result<Child, String> {
    let quiet = command.stdout(Stdio::null()).stderr(Stdio::null());
    quiet.spawn().map_err(|why| format!("run perf: {why}"))
}

fn end_quietly(mut child: Child) -> Result<(), String> {
    match child.wait() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("perf record: {status}")),
        Err(why) => Err(format!("perf record: {why}")),
    }
}

/// What was sampled, by threads and libraries.
fn sampled_times(samples: &Path) -> Result<SampledTimes, String> {
    let mut report = Command::new("perf");
    report.args([
        "report",
        "--stdio",
        "--sort",
        "comm,dso",
        "--show-total-period",
        "-t",
        ";",
        "-i",
    ]);
    let text = run_program(report.arg(samples))?;
    let mut times = SampledTimes::default();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let fields: Vec<&str> = line.split(';').map(str::trim).collect();
        let [_, period, thread, library] = fields[..] else { continue };
        let Ok(period_ns) = period.parse::<f64>() else { continue };
        let is_library = LIBRARIES.iter().any(|prefix| library.starts_with(prefix))
            || LIBRARY_THREADS.iter().any(|prefix| thread.starts_with(prefix));
        *(if is_library { &mut times.library_us } else { &mut times.own_us }) += period_ns / 1e3;
    }
    if times.own_us + times.library_us > 0.0 {
        Ok(times)
    } else {
        Err("perf report: no samples".to_owned())
    }
}

fn median_of(runs: &[Measured]) -> Measured {
    let median = |value: fn(&Measured) -> f64| {
        let mut values: Vec<f64> = runs.iter().map(value).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or_default()
    };
    Measured {
        rate: median(|run| run.rate),
        own_us: median(|run| run.own_us),
        library_us: median(|run| run.library_us),
    }
}
