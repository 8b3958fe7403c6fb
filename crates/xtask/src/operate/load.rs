//! What the API costs the data path: a server of RAM over NVMe/TCP at depth 128, in turn while its own API and
//! while that of another server answers 1 000 requests per second and 50 event streams.
//!
//! ```text
//!   core 0   reactor of tenmil serve: the data thread, alone
//!   core 1   tenmil perf, the generator of requests, the control thread of the server, and another server
//!            that is idle: they share this core
//! ```
//!
//! perf has less of its core while an API is loaded, so it sends smaller batches and fewer commands, which says
//! nothing about the data thread. With the same load on the other server's API perf has as little, so the
//! difference is what the API costs the data thread. It is measured as the rate, as CPU time for each I/O
//! (`schedstat`), and as instructions for each I/O, for which both servers run in valgrind. The machine needs
//! no hardware counters.

mod generator;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::service::free_port;
use super::{Report, curl, run_program};
use generator::{Generated, Generator};

/// Requests per second.
const REQUESTS_PER_SECOND: u32 = 1_000;
/// Event streams.
const STREAMS: usize = 50;
/// Measurements of each kind.
const ROUNDS: usize = 7;
/// Time of a measurement.
const MEASURED: Duration = Duration::from_secs(5);
/// Measurements of each kind in valgrind.
const ROUNDS_IN_VALGRIND: usize = 3;
/// Commands of a measurement in valgrind, where everything takes 50 times as long.
const COMMANDS_IN_VALGRIND: u32 = 60_000;
/// Time before a measurement.
const SETTLED: Duration = Duration::from_millis(500);
/// Time limit for the start, in valgrind too.
const START_MAX: Duration = Duration::from_secs(120);
/// Most that the API may add to the work of an I/O on the data thread, in percent.
const COST_MAX_PERCENT: f64 = 2.0;
const NQN: &str = "nqn.2026-01.org.tenmil:disk";

/// A server, and the load on its data path.
struct LoadedServer {
    server: Child,
    perf: Option<Child>,
    directory: PathBuf,
    socket: PathBuf,
    port: u16,
}

/// State of the data thread at one time.
#[derive(Clone, Copy, Debug)]
struct Reading {
    at: Instant,
    /// Commands completed since the start.
    commands: u64,
    /// CPU time of the data thread.
    cpu_ns: u64,
    /// Time that it was ready and had no core.
    waited_ns: u64,
}

/// Difference of two of them.
#[derive(Clone, Copy, Debug)]
struct Measured {
    rate: f64,
    cpu_ns_per_command: f64,
    waited_percent: f64,
}

/// Measures, and checks the cost.
pub(super) fn check_load(
    binary: &Path,
    directory: &Path,
    report: &mut Report,
) -> Result<(), String> {
    let mut server = LoadedServer::start(Command::new(binary), &[], "load", directory)?;
    let other = LoadedServer::start(Command::new(binary), &[], "other", directory)?;
    other.move_to_core_1()?;
    server.start_perf(binary)?;
    println!("  core 0: the data thread; core 1: perf, the generator and the APIs of both servers");
    let (mut quiet, mut elsewhere, mut loaded) = (Vec::new(), Vec::new(), Vec::new());
    let mut generated = Vec::new();
    for _ in 0..ROUNDS {
        quiet.push(server.measure(MEASURED)?);
        for (api, runs) in [(&other, &mut elsewhere), (&server, &mut loaded)] {
            let generator = Generator::start(&api.socket, REQUESTS_PER_SECOND, STREAMS)?;
            runs.push(server.measure(MEASURED)?);
            generated.push(generator.stop());
        }
    }
    for (name, runs) in [("no API", &quiet), ("other API", &elsewhere), ("own API", &loaded)] {
        for Measured { rate, cpu_ns_per_command, waited_percent } in runs {
            println!(
                "        {name:9} {rate:9.0} I/O/s, {cpu_ns_per_command:7.0} ns of the data thread \
                 for each, {waited_percent:4.1} % of the time it waited for its core"
            );
        }
    }
    report.check("the API answers 1000 requests per second beside 50 streams", {
        Generated::check(&generated, REQUESTS_PER_SECOND)
    });
    // Each measurement is compared with the one before it, as the machine changes.
    let changes = |of: &[Measured], value: fn(&Measured) -> f64| -> Vec<f64> {
        let pairs = of.iter().zip(&loaded);
        pairs.map(|(before, loaded)| 100.0 * (value(loaded) / value(before) - 1.0)).collect()
    };
    let rates = changes(&elsewhere, |run| run.rate);
    let costs = changes(&elsewhere, |run| run.cpu_ns_per_command);
    let list = |values: &[f64]| {
        let values = values.iter().map(|value| format!("{value:+.1}"));
        values.collect::<Vec<_>>().join(" ")
    };
    println!(
        "  note  with no API instead: rate {:+.1} %, CPU time for an I/O {:+.1} %, as perf has less of its core",
        median(changes(&quiet, |run| run.rate)),
        median(changes(&quiet, |run| run.cpu_ns_per_command)),
    );
    println!(
        "  note  CPU time of the data thread for an I/O: {:+.1} % (rounds: {})",
        median(costs.clone()),
        list(&costs)
    );
    let (change, rounds) = (median(rates.clone()), list(&rates));
    let text = format!("{change:+.1} % (rounds: {rounds})");
    report.check("rate of the data thread, against the same load on another process", {
        if change > -COST_MAX_PERCENT {
            Ok(text)
        } else {
            Err(format!("{text}, expected less than {COST_MAX_PERCENT} % lost"))
        }
    });
    drop((server, other));
    check_instructions(binary, directory, report)
}

/// Counts instructions of the data thread for an I/O, in turn with the load on its own API and on another's.
///
/// Only one thread of a process in valgrind runs at a time, so the API answers far fewer requests there, also
/// for each command of the data path: the result has their number. At the full rate, CPU time is measured.
fn check_instructions(binary: &Path, directory: &Path, report: &mut Report) -> Result<(), String> {
    if run_program(Command::new("valgrind").arg("--version")).is_err() {
        report.skip("instructions of the data thread", "no valgrind: apt-get install valgrind");
        return Ok(());
    }
    let symbols = run_program(Command::new("nm").arg("-C").arg(binary)).unwrap_or_default();
    if !symbols.contains(DATA_FUNCTION) {
        let reason = "the program has no symbols, by which its data thread is found: --only load without --package";
        report.skip("instructions of the data thread", reason);
        return Ok(());
    }
    // Those of an earlier run.
    for entry in std::fs::read_dir(directory).map_err(|why| why.to_string())?.flatten() {
        if entry.file_name().to_string_lossy().starts_with("callgrind.out") {
            let _ = std::fs::remove_file(entry.path());
        }
    }
    let other = LoadedServer::start(Command::new(binary), &[], "other", directory)?;
    other.move_to_core_1()?;
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--separate-threads=yes", "--instr-atstart=no"]);
    valgrind.args(["--fair-sched=yes", "--trace-children=no"]);
    valgrind.arg(format!("--callgrind-out-file={}", directory.join("callgrind.out").display()));
    // Its system calls are not those of the program, so the program may not restrict them.
    valgrind.arg(binary);
    let mut server = LoadedServer::start(valgrind, &["--sandbox", "off"], "load", directory)?;
    let (mut elsewhere, mut loaded, mut rates) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS_IN_VALGRIND {
        let generator = Generator::start(&server.socket, REQUESTS_PER_SECOND, STREAMS)?;
        let counted = server.count_instructions(binary, &format!("loaded{round}"));
        let rate = generator.stop().rate();
        loaded.push(counted?);
        rates.push(rate);
        // As many as this server has answered, so that perf has as much of its core.
        #[expect(clippy::cast_possible_truncation, reason = "at most a thousand")]
        let per_second = rate.max(1.0) as u32;
        let generator = Generator::start(&other.socket, per_second, STREAMS)?;
        let counted = server.count_instructions(binary, &format!("elsewhere{round}"));
        generator.stop();
        elsewhere.push(counted?);
    }
    let costs = elsewhere.iter().zip(&loaded);
    let costs: Vec<f64> =
        costs.map(|(elsewhere, loaded)| 100.0 * (loaded / elsewhere - 1.0)).collect();
    let cost = median(costs);
    let text = format!(
        "{:.0} with the load elsewhere, {:.0} with it here, {cost:+.2} %, with {:.0} requests/s in valgrind",
        median(elsewhere),
        median(loaded),
        median(rates)
    );
    let result = if cost < COST_MAX_PERCENT {
        Ok(text)
    } else {
        Err(format!("{text}, expected less than {COST_MAX_PERCENT} %"))
    };
    report.check("instructions of the data thread for an I/O", result);
    Ok(())
}

impl LoadedServer {
    /// Starts the server, with the data thread on core 0 and every other thread on core 1.
    fn start(
        mut program: Command,
        more: &[&str],
        name: &str,
        directory: &Path,
    ) -> Result<Self, String> {
        let port = free_port()?;
        let file = |kind: &str| directory.join(format!("{name}-{kind}"));
        let create = |path: &Path| std::fs::File::create(path).map_err(|why| why.to_string());
        let (socket, out, err) = (file("control"), file("server.out"), file("server.err"));
        program.args(["serve", "ram:256m", "-l", &format!("tcp://127.0.0.1:{port}")]);
        program.args(["--cores", "0", "--json", "--exit-with-parent", "--control"]).arg(&socket);
        program.args(more);
        program.stdin(Stdio::null()).stdout(create(&out)?).stderr(create(&err)?);
        let _ = std::fs::remove_file(&socket);
        let server = program.spawn().map_err(|why| format!("start the server: {why}"))?;
        let directory = directory.to_owned();
        let mut new = Self { server, perf: None, directory, socket, port };
        let begun = Instant::now();
        while !std::fs::read_to_string(&out).unwrap_or_default().contains('\n') {
            if !matches!(new.server.try_wait(), Ok(None)) || begun.elapsed() > START_MAX {
                let said = std::fs::read_to_string(&err).unwrap_or_default();
                return Err(format!("start the server: {}", said.trim()));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        for thread in new.threads()? {
            let core = if thread.is_data { "0" } else { "1" };
            run_program(Command::new("taskset").args(["-c", "-p", core, &thread.id]))?;
        }
        Ok(new)
    }

    /// Moves all threads to core 1.
    fn move_to_core_1(&self) -> Result<(), String> {
        for thread in self.threads()? {
            run_program(Command::new("taskset").args(["-c", "-p", "1", &thread.id]))?;
        }
        Ok(())
    }

    /// `tenmil perf` on core 1.
    fn perf_command(&self, binary: &Path) -> Result<Command, String> {
        let log = std::fs::File::create(self.directory.join("load-perf.log"));
        let uri = format!("tcp://127.0.0.1:{}/{NQN}/1", self.port);
        let mut perf = Command::new("taskset");
        perf.args(["-c", "1"]).arg(binary);
        perf.args(["perf", &uri, "-w", "randread", "-q", "128", "--cores", "1"]);
        perf.stdin(Stdio::null()).stdout(Stdio::null());
        perf.stderr(log.map_err(|why| why.to_string())?);
        Ok(perf)
    }

    /// Starts perf for a long time, and waits until it has completed commands.
    fn start_perf(&mut self, binary: &Path) -> Result<(), String> {
        let mut perf = self.perf_command(binary)?;
        perf.args(["-t", "30m"]);
        self.perf = Some(perf.spawn().map_err(|why| format!("start perf: {why}"))?);
        let begun = Instant::now();
        while self.reading()?.commands < 1_000 {
            if begun.elapsed() > START_MAX {
                return Err("perf completes no commands: see load-perf.log".to_owned());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    fn measure(&self, time: Duration) -> Result<Measured, String> {
        std::thread::sleep(SETTLED);
        let before = self.reading()?;
        std::thread::sleep(time);
        let after = self.reading()?;
        let seconds = after.at.duration_since(before.at).as_secs_f64();
        let commands = (after.commands - before.commands) as f64;
        Ok(Measured {
            rate: commands / seconds,
            cpu_ns_per_command: (after.cpu_ns - before.cpu_ns) as f64 / commands.max(1.0),
            waited_percent: (after.waited_ns - before.waited_ns) as f64 / seconds / 1e7,
        })
    }

    /// Instructions of the data thread for a command, of a run of perf from its connect to its end: so what
    /// is counted and the commands belong together, however long valgrind takes to begin and to end.
    fn count_instructions(&mut self, binary: &Path, name: &str) -> Result<f64, String> {
        let pid = self.server.id().to_string();
        let control =
            |argument: &str| run_program(Command::new("callgrind_control").arg(argument).arg(&pid));
        control("--instr=on")?;
        control("--zero")?;
        let before = self.reading()?;
        let mut perf = self.perf_command(binary)?;
        perf.args(["--number-ios", &COMMANDS_IN_VALGRIND.to_string(), "--time", "60"]);
        run_program(&mut perf)?;
        let after = self.reading()?;
        control(&format!("--dump={name}"))?;
        control("--instr=off")?;
        let counted = instructions_of_data_thread(&self.directory, name)?;
        Ok(counted as f64 / ((after.commands - before.commands) as f64).max(1.0))
    }

    fn reading(&self) -> Result<Reading, String> {
        let socket = self.socket.display().to_string();
        let url = "http://tenmil/v1/io_statistics?by=export";
        let text = curl(&["--fail", "--unix-socket", &socket, url])?;
        let rows: serde_json::Value = serde_json::from_str(&text).map_err(|why| why.to_string())?;
        let data = self.threads()?.into_iter().find(|thread| thread.is_data);
        let data = data.ok_or("the server has no thread of a reactor")?;
        let path = format!("/proc/{}/task/{}/schedstat", self.server.id(), data.id);
        let stat = std::fs::read_to_string(&path).map_err(|why| format!("{path}: {why}"))?;
        let mut numbers = stat.split_whitespace().map(|number| number.parse().unwrap_or(0));
        Ok(Reading {
            at: Instant::now(),
            commands: rows[0]["reads"].as_u64().unwrap_or(0),
            cpu_ns: numbers.next().unwrap_or(0),
            waited_ns: numbers.next().unwrap_or(0),
        })
    }

    fn threads(&self) -> Result<Vec<Thread>, String> {
        let tasks = format!("/proc/{}/task", self.server.id());
        let listed = std::fs::read_dir(&tasks).map_err(|why| format!("{tasks}: {why}"))?;
        let threads = listed.filter_map(|entry| {
            let entry = entry.ok()?;
            let name = std::fs::read_to_string(entry.path().join("comm")).ok()?;
            let id = entry.file_name().into_string().ok()?;
            Some(Thread { id, is_data: name.starts_with(DATA_THREAD) })
        });
        Ok(threads.collect())
    }
}

/// Part of the names of functions that the data thread calls.
const DATA_FUNCTION: &str = "tenmil_nvme_controller::executor";
/// Begin of the name of a thread that runs a reactor.
const DATA_THREAD: &str = "reactor";

struct Thread {
    id: String,
    is_data: bool,
}

impl Drop for LoadedServer {
    fn drop(&mut self) {
        for child in self.perf.iter_mut().chain([&mut self.server]) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The dump of this name has a file for each thread. The data thread is the one that has executed most commands.
fn instructions_of_data_thread(directory: &Path, name: &str) -> Result<u64, String> {
    let listed = std::fs::read_dir(directory).map_err(|why| why.to_string())?;
    let mut most = None;
    for path in listed.filter_map(|entry| Some(entry.ok()?.path())) {
        let is_dump = path.file_name().and_then(|name| name.to_str());
        if !is_dump.is_some_and(|name| name.starts_with("callgrind.out.")) {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        if !text.contains(name) || !text.contains(DATA_FUNCTION) {
            continue;
        }
        let totals = text.lines().find_map(|line| line.strip_prefix("totals: "));
        let total = totals.and_then(|text| text.trim().parse::<u64>().ok());
        most = most.max(total);
    }
    most.ok_or_else(|| format!("callgrind has written no dump {name} of the data thread"))
}

/// Median of an odd number of values.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn median_is_the_middle_value() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]).to_bits(), 2.0_f64.to_bits());
        assert!(median(Vec::new()).is_nan());
    }
}
