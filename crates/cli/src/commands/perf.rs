//! `tenmil perf`: runs I/O workloads and reports IOPS and latency.

mod fio_job;

use std::io::{IsTerminal, Write};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::builder::PossibleValuesParser;
use clap::builder::TypedValueParser;
use clap::{Args, Command, FromArgMatches};
use tenmil_base::{Error, ErrorCategory, Span};
use tenmil_dma::CommandStore;
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::storage_file::read_text;
use tenmil_linux::{Clock, CpuList};
use tenmil_reactor::PollMode;
use tenmil_reactor::thread_scheduler::Options;

use super::control_options::ControlOptions;
use super::report_file::ReportFile;
use super::{CommandEngines, PerfEngine, usage_errors, write_stdout};
use tenmil_bench::balance::parse_scheduler_rules;
use tenmil_bench::perf::perf_options::{
    AccessPattern, ArrivalProcess, BASELINE_TIME, BaselineKind, BlockLayerMode, BlockLayerOptions,
    CompletionDoorbell, FastPathSwitches, MachineResources, NULL_BLK_TIME, OpenLoop, PerfOptions,
    RAM_TIME, ReportDestination, SizeMix, parse_queue_map,
};
use tenmil_bench::perf::perf_result::PerfResult;
use tenmil_bench::perf::progress::{ProgressLine, RunPhase, RunProgress};
use tenmil_bench::perf::report::{html_report, json_report, text_report};
use tenmil_block::quantity_parser::{parse_count, parse_size, parse_time};
use tenmil_block::{IoScheduler, QueueMap};
use tenmil_devices::Uri;

/// Arguments of `perf`.
#[derive(Debug, Args)]
#[command(after_help = MORE, allow_negative_numbers = true)]
pub(super) struct PerfArguments {
    #[arg(help = DEVICES)]
    #[arg(value_name = "URI", value_parser = parse_uri)]
    uris: Vec<Uri>,

    /// Run the jobs of a job file of fio, one after the other. Options of fio that are not known are
    /// refused; docs/user/perf.md lists those that are
    #[arg(long, value_name = "FILE", help_heading = LOAD, conflicts_with_all = SET_BY_JOBS)]
    fio_job: Option<PathBuf>,

    /// Queue depth: I/Os in flight per device and submitting thread [default: 128, or the maximum of
    /// the device if that is smaller]
    #[arg(short = 'q', long, value_name = "N", value_parser = parse_integer::<u32>)]
    #[arg(help_heading = LOAD)]
    depth: Option<u32>,

    /// I/O size in bytes: 4096, 4k, 1m
    #[arg(short = 'o', long, value_name = "SIZE", default_value = "4k", value_parser = parse_io_size)]
    #[arg(help_heading = LOAD, conflicts_with = "bssplit")]
    io_size: SizeMix,

    /// Mix of I/O sizes with weights, as fio's bssplit: 4k:70,64k:30
    #[arg(long, value_name = "MIX", value_parser = SizeMix::parse, help_heading = LOAD)]
    bssplit: Option<SizeMix>,

    /// Access pattern; flush-mix is randrw with a flush as every sixteenth I/O
    #[arg(short = 'w', long, value_name = "PATTERN", default_value = "randread")]
    #[arg(help_heading = LOAD, value_parser = named_value_parser(AccessPattern::ALL.map(|it| (it.name(), it))))]
    pattern: AccessPattern,

    /// Percentage of reads in rw, randrw and flush-mix (fio's rwmixread)
    #[arg(short = 'M', long, value_name = "PERCENT", default_value = "50")]
    #[arg(help_heading = LOAD, value_parser = parse_percent)]
    rwmixread: u8,

    /// Measurement time: 10, 0.5, 500ms, 2m
    #[arg(short = 't', long, value_name = "TIME", default_value = "10", value_parser = parse_time)]
    #[arg(help_heading = LOAD)]
    time: Span,

    /// Warm-up time before the measurement
    #[arg(short = 'a', long, value_name = "TIME", default_value = "0.5", value_parser = parse_time)]
    #[arg(help_heading = LOAD)]
    warm_up: Span,

    /// Stop after this many I/Os per device and submitting thread
    #[arg(short = 'd', long, value_name = "N", value_parser = parse_count, help_heading = LOAD)]
    number_ios: Option<u64>,

    /// I/O queue pairs per device and submitting thread
    #[arg(short = 'P', long, value_name = "N", default_value = "1", value_parser = parse_integer::<u16>)]
    #[arg(help_heading = LOAD)]
    queue_pairs: u16,

    /// Cores of the submitting threads, one thread on each: 0,2-3 or 0x3 [default: one thread]
    #[arg(short = 'c', long, value_name = "CORES", value_parser = CpuList::parse)]
    #[arg(help_heading = LOAD)]
    cores: Option<CpuList>,

    /// Cores of the emulated SSDs, one device thread on each [default: one thread]
    #[arg(long, value_name = "CORES", value_parser = CpuList::parse, help_heading = LOAD)]
    device_cores: Option<CpuList>,

    /// Polling mode of an idle submitting thread: poll continuously; poll briefly, then sleep; or sleep
    /// for three quarters of the usual latency, then poll
    #[arg(long, value_name = "MODE", default_value = "adaptive", help_heading = LOAD)]
    #[arg(value_parser = named_value_parser(PollMode::ALL.map(|mode| (mode.name(), mode))))]
    poll: PollMode,

    /// Placement of submitting threads: fixed cores (static), or lightly loaded threads consolidated on
    /// one core (dynamic): static, dynamic, or
    /// dynamic?period=500ms&load=20&core=80&busy=95&migration-interval=5s&scheduling-core=0
    /// with &isolated=2-3; `tenmil set scheduler` changes it during the run
    #[arg(long, value_name = "POLICY", default_value = "static", help_heading = LOAD)]
    #[arg(value_parser = parse_scheduler_rules)]
    scheduler: Options,

    /// Scale the frequency of the submitting threads' cores with their load; restored at the end
    #[arg(long, help_heading = LOAD)]
    governor: bool,

    /// Open-loop load: start this many I/Os per second, whether or not earlier ones have completed;
    /// latency counts from the intended start
    #[arg(long, value_name = "IOPS", value_parser = parse_count, help_heading = LOAD)]
    rate: Option<u64>,

    /// Distribution of the intervals between the starts of an open-loop load
    #[arg(long, value_name = "LAW", default_value = "poisson", requires = "rate")]
    #[arg(help_heading = LOAD, value_parser = named_value_parser([
        ("poisson", ArrivalProcess::Poisson),
        ("uniform", ArrivalProcess::Uniform),
    ]))]
    arrivals: ArrivalProcess,

    /// Zipf distribution of addresses: the address of rank k is drawn with a frequency of 1/k^THETA
    #[arg(long, value_name = "THETA", help_heading = LOAD)]
    #[arg(value_parser = parse_theta)]
    zipf: Option<f64>,

    /// Block-layer mode: hardware queues (mq), one queue behind one lock, claims only, or no block
    /// layer [default: none for emulated SSDs, mq for all others]
    #[arg(long, value_name = "MODE", help_heading = LOAD)]
    #[arg(value_parser = named_value_parser(BlockLayerMode::ALL.map(|layer| (layer.name(), layer))))]
    block: Option<BlockLayerMode>,

    /// Hardware contexts of the block layer by type: default=2,read=1 [default: one per channel]
    #[arg(long, value_name = "MAP", value_parser = parse_queue_map, help_heading = LOAD)]
    queue_map: Option<QueueMap>,

    /// I/O scheduler of the block layer: none, merge, deadline?read=5ms&depth=8, stream-batch
    #[arg(long, value_name = "SCHEDULER", default_value = "none", help_heading = LOAD)]
    #[arg(value_parser = |text: &str| text.parse::<IoScheduler>())]
    block_scheduler: IoScheduler,

    /// Limit requests per second of each device (QoS)
    #[arg(long, value_name = "IOPS", value_parser = parse_nonzero, help_heading = LOAD)]
    limit_iops: Option<NonZeroU64>,

    /// Limit bytes per second of each device (QoS): 10m
    #[arg(long, value_name = "SIZE", value_parser = parse_nonzero_bytes, help_heading = LOAD)]
    limit_bytes: Option<NonZeroU64>,

    /// Allow writes to devices with existing data that this run did not create
    #[arg(long, help_heading = LOAD)]
    overwrite: bool,

    /// Stamp the written blocks and check the blocks read; needs a device that stores data
    #[arg(long, help_heading = LOAD)]
    verify: bool,

    /// Seed of all random numbers
    #[arg(long, value_name = "N", default_value = "1", value_parser = parse_integer::<u64>)]
    #[arg(help_heading = LOAD)]
    seed: u64,

    /// Ring the submission doorbell once per command instead of once per poll iteration
    #[arg(long, help_heading = TECHNIQUES)]
    no_doorbell_batching: bool,

    /// When the completion doorbell is rung
    #[arg(long, value_name = "WHEN", default_value = "poll", help_heading = TECHNIQUES)]
    #[arg(value_parser = named_value_parser([
        ("each", CompletionDoorbell::Each),
        ("poll", CompletionDoorbell::Poll),
        ("deferred", CompletionDoorbell::Deferred),
    ]))]
    cq_doorbell: CompletionDoorbell,

    /// Instructions that store a command into the submission ring
    #[arg(long, value_name = "HOW", default_value = "auto", help_heading = TECHNIQUES)]
    #[arg(value_parser = named_value_parser([
        ("auto", CommandStoreArgument(None)),
        ("plain", CommandStoreArgument(Some(CommandStore::Plain))),
        ("sse2", CommandStoreArgument(Some(CommandStore::Sse2))),
        ("movdir64b", CommandStoreArgument(Some(CommandStore::Movdir64b))),
    ]))]
    command_store: CommandStoreArgument,

    /// Use shadow doorbells (Doorbell Buffer Config) where the controller supports them
    #[arg(long, help_heading = TECHNIQUES)]
    shadow_doorbells: bool,

    /// Do not allocate huge pages
    #[arg(long, help_heading = TECHNIQUES)]
    no_huge_pages: bool,

    /// Afterwards, measure the upper bound without the protocol for one second and print the ratio: the
    /// ring micro-benchmark, memory copies for ram, or plain messages for tcp; with a value, plain
    /// messages over loopback
    #[arg(long, value_name = "OF", help_heading = REPORTS, num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "own", value_parser = named_value_parser([
        ("own", BaselineKind::Own),
        ("tcp", BaselineKind::Tcp),
        ("tcp-uring", BaselineKind::TcpRing),
    ]))]
    baseline: Option<BaselineKind>,

    /// Afterwards, run the same workload for two seconds over memory, so that data is moved
    #[arg(long, help_heading = REPORTS)]
    ram: bool,

    /// Afterwards, compare the block-layer modes over a null device, with one thread up to one per
    /// core, one second each: IOPS, and share of time spent waiting for the lock
    #[arg(long, help_heading = REPORTS)]
    null_blk: bool,

    /// Print JSON instead of text, or write it to FILE in addition to the text
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "", help_heading = REPORTS)]
    json: Option<String>,

    /// Write a self-contained HTML report
    #[arg(long, value_name = "FILE", help_heading = REPORTS, conflicts_with = "fio_job")]
    html: Option<String>,

    #[command(flatten)]
    control: ControlOptions,
}

/// Command store, or the default of the device. It is a type of its own because clap treats
/// `Option<Option<T>>` as a flag with an optional value.
#[derive(Clone, Copy, Debug)]
struct CommandStoreArgument(Option<CommandStore>);

const DEVICES: &str = "\
Emulated SSDs: emu:null, emu:ram, emu:file:PATH, emu:model:p4600 or emu:model:p4800x, each \
with ?count=, size=, block=, queue-size=, queues=, doorbell-cost=; or any block device: null:, \
ram:1g, file:PATH?size=1g, model:p4600, and devices built on others: KIND:[URI],[URI] [default: \
emu:null?count=21]";

/// Arguments that a job file replaces.
const SET_BY_JOBS: [&str; 33] = [
    "uris",
    "depth",
    "io_size",
    "bssplit",
    "pattern",
    "rwmixread",
    "time",
    "warm_up",
    "number_ios",
    "queue_pairs",
    "cores",
    "device_cores",
    "poll",
    "scheduler",
    "governor",
    "rate",
    "arrivals",
    "zipf",
    "block",
    "queue_map",
    "block_scheduler",
    "limit_iops",
    "limit_bytes",
    "verify",
    "seed",
    "no_doorbell_batching",
    "cq_doorbell",
    "command_store",
    "shadow_doorbells",
    "no_huge_pages",
    "baseline",
    "ram",
    "null_blk",
];

const LOAD: &str = "Workload";
const TECHNIQUES: &str = "Driver";
const REPORTS: &str = "Reports";

const MORE: &str = "\
Without any argument: 21 emulated SSDs that complete commands and transfer no data, random reads of
4 KiB, depth 128 each, one submitting thread, one device thread, 10 seconds; then one second of the
ring micro-benchmark for the ratio, two seconds over memory with data transfers, and the report
tenmil-perf.html. With any argument only the requested workload runs.

Examples:
  tenmil perf                                      21 emulated SSDs, and the report tenmil-perf.html
  tenmil perf -t 5 --baseline                      the rate, and its ratio to the micro-benchmark
  tenmil perf null: -q 128 --baseline=tcp          the rate of 4 KiB messages over loopback
  tenmil perf emu:null -q 1                        latency of one I/O at a time
  tenmil perf emu:null --no-doorbell-batching      effect of one driver option
  tenmil perf 'emu:ram?size=1g' -w randrw -M 70 --bssplit 4k:70,64k:30 --zipf 0.99
  tenmil perf emu:model:p4600 --rate 200k          latency of an open-loop load
  tenmil perf 'emu:file:/tmp/disk?size=1g' -w randrw --verify
  tenmil perf ram:4g -w randrw                     any block device, without the NVMe driver
  tenmil perf /tmp/disk -w randwrite --overwrite
  tenmil perf 'emu:null?count=21' --block mq       the same driver under the block layer
  tenmil perf --null-blk --html null-blk.html      queues and a lock, by number of threads
  tenmil perf --fio-job job.fio                    the jobs of a job file of fio
  tenmil perf emu:null --json | jq .iops

Without link-time optimization: cargo run --profile release-no-lto -- perf
Exit codes: 0 all I/Os succeeded, 1 machine not set up, 2 invalid arguments, 3 I/Os failed.";

/// Runs `perf` and prints the report. `command` is the command line that repeats the run.
pub(super) fn run_perf(
    arguments: &PerfArguments,
    command: &str,
    engines: &CommandEngines,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    if let Some(file) = &arguments.fio_job {
        return run_fio_jobs(file, arguments, engines, out);
    }
    let mut options = arguments.options();
    if command == "tenmil perf" {
        options = options.with_default_baseline_and_report();
    }
    options.validate(&MachineResources::probe_machine(&KernelFiles::live_system()))?;
    arguments.control.prepare()?;
    let json_path = match &options.json {
        Some(ReportDestination::File(path)) => Some(path.as_str()),
        _ => None,
    };
    let html_path = options.html.as_deref();
    if let (Some(json), Some(html)) = (json_path, html_path)
        && json == html
    {
        let text = format!("--json and --html: both are {html}, expected a file for each");
        return Err(Error::usage(text));
    }
    let promise = |flag, path: Option<&str>| path.map(|path| ReportFile::open(flag, path));
    let json_file = promise("--json", json_path).transpose()?;
    let html_file = promise("--html", html_path).transpose()?;
    let result = run_engine(&options, engines.perf)?;
    let files = [
        json_file.map(|file| file.write_report(&json_report::render_json(&result))),
        html_file.map(|file| file.write_report(&html_report::render_page(&result, command))),
    ];
    // A failure to write one report, such as a full disk, does not discard the result.
    let (written, lost): (Vec<_>, Vec<_>) = files.into_iter().flatten().partition(Result::is_ok);
    let written: Vec<String> = written.into_iter().flatten().collect();
    let report = match options.json {
        Some(ReportDestination::Standard) => json_report::render_json(&result),
        _ => text_report::render_text(&result, &written),
    };
    write_stdout(out, &report)?;
    match lost.into_iter().find_map(Result::err) {
        Some(lost) => Err(lost),
        None => Ok(exit_code(&result)),
    }
}

/// Runs the jobs of a file and prints the report of each. Ends after the first one with errors.
fn run_fio_jobs(
    file: &Path,
    arguments: &PerfArguments,
    engines: &CommandEngines,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let refuse = |why: Error| why.with_context(format!("perf --fio-job {}", file.display()));
    let text = read_text(file).map_err(|why| refuse(Error::usage(why.to_string())))?;
    let jobs = fio_job::parse_jobs(&text).map_err(refuse)?;
    let parsed = jobs.iter().map(|job| {
        let of_job = |why: Error| refuse(why.with_context(format!("job {}", job.name)));
        parse_arguments(&job.words).map_err(of_job)
    });
    // All are checked before the first one runs.
    let parsed = parsed.collect::<Result<Vec<_>, _>>()?;
    if let Some(json) = arguments.json.as_deref().filter(|json| !json.is_empty() && jobs.len() > 1)
    {
        let text = format!("--json={json}: the file has {} jobs, expected one", jobs.len());
        return Err(refuse(Error::usage(text)));
    }
    for (job, mut own) in jobs.iter().zip(parsed) {
        let command = format!("tenmil perf {}", job.words.join(" "));
        own.json.clone_from(&arguments.json);
        own.overwrite = arguments.overwrite;
        own.control = arguments.control.clone();
        if own.json.is_none() {
            write_stdout(out, &format!("job {}: {command}\n\n", job.name))?;
        }
        let code = run_perf(&own, &command, engines, out)?;
        if code != ExitCode::SUCCESS {
            return Ok(code);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The options that the argument list `words` stands for.
pub(crate) fn parse_options(words: &[String]) -> Result<PerfOptions, Error> {
    parse_arguments(words).map(|arguments| arguments.options())
}

fn parse_arguments(words: &[String]) -> Result<PerfArguments, Error> {
    let mut command = PerfArguments::augment_args(Command::new("perf"));
    let matches = command
        .try_get_matches_from_mut(core::iter::once("perf").chain(words.iter().map(String::as_str)));
    let parsed = matches.and_then(|matches| PerfArguments::from_arg_matches(&matches));
    parsed.map_err(|error| usage_errors::usage_error(&error, &command, &[]))
}

/// Runs the engine until it ends or Ctrl-C, with a progress line if standard error is a terminal.
fn run_engine(options: &PerfOptions, engine: PerfEngine) -> Result<PerfResult, Error> {
    tenmil_linux::signal::request_stop_on_sigint_or_sigterm()
        .map_err(|error| Error::environment(format!("catch Ctrl-C: {error}")))?;
    let clock = Clock::start();
    let mut errors = std::io::stderr();
    let mut line = ProgressLine::new(errors.is_terminal(), clock.now());
    let progress = Arc::new(RunProgress::new(options.cores.len().max(1)));
    let result = engine(options, &progress, &mut |progress| {
        let length = phase_duration(options, progress.phase());
        // A closed terminal does not end the measurement.
        let _ = line.update(clock.now(), progress, length, &mut errors);
        let _ = line.print_notes(progress, &mut errors);
    });
    let _ = line.print_notes(&progress, &mut std::io::stderr());
    let _ = line.clear(&mut std::io::stderr());
    result
}

fn phase_duration(options: &PerfOptions, phase: RunPhase) -> Span {
    match phase {
        RunPhase::BringUp => Span::default(),
        RunPhase::WarmUp => options.warm_up,
        RunPhase::Measure => options.time,
        RunPhase::Baseline => options.baseline_time.unwrap_or_default(),
        RunPhase::Ram => options.ram.unwrap_or_default(),
        RunPhase::NullBlk => options.null_blk.unwrap_or_default(),
    }
}

/// The exit code of a run: a failed I/O or a verification error is a remote error.
fn exit_code(result: &PerfResult) -> ExitCode {
    match result.missing.first() {
        _ if !result.has_no_errors() => ExitCode::from(ErrorCategory::Remote.exit_code()),
        Some(refused) => ExitCode::from(refused.category.exit_code()),
        None => ExitCode::SUCCESS,
    }
}

impl PerfArguments {
    /// Whether the workload writes nothing, so that no file is created or grown.
    pub(super) fn creates_and_grows_no_file(&self) -> bool {
        !self.pattern.has_writes() && self.fio_job.is_none()
    }

    fn options(&self) -> PerfOptions {
        let usual = PerfOptions::default();
        PerfOptions {
            uris: match (self.uris.as_slice(), self.null_blk) {
                ([], false) => usual.uris,
                ([], true) => vec![Uri::Block(tenmil_block::uri::Uri::new("null", ""))],
                (uris, _) => uris.to_vec(),
            },
            depth: self.depth.unwrap_or(usual.depth),
            depth_may_be_less: self.depth.is_none(),
            sizes: self.bssplit.clone().unwrap_or_else(|| self.io_size.clone()),
            pattern: self.pattern,
            read_percent: self.rwmixread,
            time: self.time,
            warm_up: self.warm_up,
            cores: self.cores.clone().unwrap_or_default(),
            device_cores: self.device_cores.clone().unwrap_or_default(),
            queue_pairs: self.queue_pairs,
            io_count: self.number_ios,
            rate: self.rate.map(|per_second| OpenLoop { per_second, arrivals: self.arrivals }),
            zipf: self.zipf,
            layer: BlockLayerOptions {
                layer: self.block,
                map: self.queue_map,
                scheduler: self.block_scheduler,
                limit_iops: self.limit_iops,
                limit_bytes: self.limit_bytes,
            },
            null_blk: self.null_blk.then_some(NULL_BLK_TIME.min(self.time)),
            overwrite: self.overwrite,
            verify: self.verify,
            poll: self.poll,
            scheduler: self.scheduler.clone(),
            governor: self.governor,
            techniques: FastPathSwitches {
                doorbell_batching: !self.no_doorbell_batching,
                completion_doorbell: self.cq_doorbell,
                command_store: self.command_store.0,
                shadow_doorbells: self.shadow_doorbells,
                huge_pages: !self.no_huge_pages,
            },
            baseline_time: self.baseline.map(|_| BASELINE_TIME),
            baseline_kind: self.baseline.unwrap_or_default(),
            ram: self.ram.then_some(RAM_TIME),
            json: self.json.as_ref().map(|path| match path.as_str() {
                "" | "-" => ReportDestination::Standard,
                path => ReportDestination::File(path.into()),
            }),
            html: self.html.clone(),
            seed: self.seed,
        }
    }
}

/// Value parser that accepts exactly these names.
pub(super) fn named_value_parser<T, const N: usize>(
    choices: [(&'static str, T); N],
) -> impl TypedValueParser<Value = T>
where
    T: Clone + Send + Sync + 'static,
{
    let names = choices.each_ref().map(|(name, _)| *name);
    PossibleValuesParser::new(names).map(move |name| {
        let choice = choices.iter().find(|(known, _)| *known == name);
        choice.expect("the parser before this one accepts known names only").1.clone()
    })
}

fn parse_uri(text: &str) -> Result<Uri, Error> {
    text.parse()
}

pub(super) fn parse_integer<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    let most = u64::MAX >> (64 - 8 * size_of::<T>());
    let refuse = |_| format!("`{text}` is too large, expected at most {most}");
    T::try_from(parse_count(text)?).map_err(refuse)
}

pub(super) fn parse_nonzero(text: &str) -> Result<NonZeroU64, String> {
    let count = parse_count(text)?;
    NonZeroU64::new(count).ok_or_else(|| format!("`{text}` is none, expected at least 1"))
}

pub(super) fn parse_nonzero_bytes(text: &str) -> Result<NonZeroU64, String> {
    let size = parse_size(text)?;
    NonZeroU64::new(size).ok_or_else(|| format!("`{text}` is none, expected at least 1"))
}

fn parse_percent(text: &str) -> Result<u8, String> {
    match text.parse() {
        Ok(percent @ 0..=100) => Ok(percent),
        _ => Err(format!("read share is `{text}`, expected 0 to 100")),
    }
}

fn parse_theta(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| format!("`{text}` is not a number, expected one such as 0.99"))
}

/// Parses a single I/O size; a mix has an option of its own.
fn parse_io_size(text: &str) -> Result<SizeMix, String> {
    parse_size(text).and_then(|_| SizeMix::parse(text))
}

#[cfg(test)]
#[path = "perf_tests.rs"]
mod tests;
