//! `tenmil perf`.

use std::io::{IsTerminal, Write};
use std::num::NonZeroU64;
use std::process::ExitCode;
use std::sync::Arc;

use base::{Blame, Span};
use clap::builder::PossibleValuesParser;
use clap::builder::TypedValueParser;
use clap::{Args, Command, FromArgMatches};
use dma::CommandStore;
use host::machine::Machine;
use host::{Clock, Cores};
use reactor::PollMode;
use reactor::schedule::Options;

use super::report_file::ReportFile;
use super::{Engines, PerfEngine, usage, write_out};
use crate::balance::parse_rules;
use crate::perf::options::{
    ArrivalLaw, CEILING_TIME, CeilingOf, CompletionCopy, CompletionDoorbell, Layer, LayerOptions,
    NULL_BLK_TIME, OpenLoop, Output, Pattern, PerfOptions, Prefetch, RAM_TIME, SizeMix, Supplies,
    Techniques, parse_map,
};
use crate::perf::outcome::PerfOutcome;
use crate::perf::progress::{LiveLine, Phase, Progress};
use crate::perf::report::{html, json, text};
use crate::{Refused, Uri};
use block::quantity::{parse_count, parse_size, parse_time};
use block::{QueueMap, Scheduler};

/// The arguments of `perf`.
#[derive(Debug, Args)]
#[command(after_help = MORE, allow_negative_numbers = true)]
pub(super) struct PerfArguments {
    #[arg(help = DEVICES)]
    #[arg(value_name = "URI", value_parser = parse_uri)]
    uris: Vec<Uri>,

    /// I/Os in flight per device and submitting thread [default: 128, or as many as the device takes]
    #[arg(short = 'q', long, value_name = "N", value_parser = whole::<u32>)]
    #[arg(help_heading = LOAD)]
    depth: Option<u32>,

    /// Bytes in one I/O: 4096, 4k, 1m
    #[arg(short = 'o', long, value_name = "SIZE", default_value = "4k", value_parser = parse_io_size)]
    #[arg(help_heading = LOAD, conflicts_with = "bs_mix")]
    io_size: SizeMix,

    /// Several sizes with their weights: 4k:70,64k:30
    #[arg(long, value_name = "MIX", value_parser = SizeMix::parse, help_heading = LOAD)]
    bs_mix: Option<SizeMix>,

    /// What to do; flush-mix is randrw with a flush for every sixteenth
    #[arg(short = 'w', long, value_name = "PATTERN", default_value = "randread")]
    #[arg(help_heading = LOAD, value_parser = named(Pattern::ALL.map(|it| (it.name(), it))))]
    pattern: Pattern,

    /// Reads in a hundred I/Os of rw, randrw and flush-mix
    #[arg(short = 'M', long, value_name = "PERCENT", default_value = "50")]
    #[arg(help_heading = LOAD, value_parser = parse_percent)]
    read_share: u8,

    /// Measure for so long: 10, 0.5, 500ms, 2m
    #[arg(short = 't', long, value_name = "TIME", default_value = "10", value_parser = parse_time)]
    #[arg(help_heading = LOAD)]
    time: Span,

    /// Run for so long before measuring
    #[arg(short = 'a', long, value_name = "TIME", default_value = "0.5", value_parser = parse_time)]
    #[arg(help_heading = LOAD)]
    warm_up: Span,

    /// Stop after so many I/Os per device and submitting thread
    #[arg(short = 'd', long, value_name = "N", value_parser = parse_count, help_heading = LOAD)]
    number_ios: Option<u64>,

    /// I/O queue pairs per device and submitting thread
    #[arg(short = 'P', long, value_name = "N", default_value = "1", value_parser = whole::<u16>)]
    #[arg(help_heading = LOAD)]
    queue_pairs: u16,

    /// Cores to submit on, a thread on each: 0,2-3 or 0x3 [default: one thread]
    #[arg(short = 'c', long, value_name = "CORES", value_parser = Cores::parse)]
    #[arg(help_heading = LOAD)]
    cores: Option<Cores>,

    /// Cores for emulated SSDs, a thread on each [default: one thread]
    #[arg(long, value_name = "CORES", value_parser = Cores::parse, help_heading = LOAD)]
    device_cores: Option<Cores>,

    /// What a submitting thread does when there is nothing to do: look for ever, look for a while
    /// and then sleep, or rest for three quarters of the usual latency first
    #[arg(long, value_name = "MODE", default_value = "adaptive", help_heading = LOAD)]
    #[arg(value_parser = named(PollMode::ALL.map(|mode| (mode.name(), mode))))]
    poll: PollMode,

    /// How submitting threads are spread: each stays on its core, or those that do little gather on
    /// one: static, dynamic, or dynamic?period=500ms&load=20&core=80&busy=95&rest=5s&gather=0 with
    /// &isolated=2-3; `tenmil set scheduler` switches while it runs
    #[arg(long, value_name = "POLICY", default_value = "static", help_heading = LOAD)]
    #[arg(value_parser = parse_rules)]
    scheduler: Options,

    /// Choose how fast the submitting threads' cores run, by their load; put back at the end
    #[arg(long, help_heading = LOAD)]
    governor: bool,

    /// Start so many I/Os per second, whether or not earlier ones have ended; latency counts from
    /// the intended start
    #[arg(long, value_name = "IOPS", value_parser = parse_count, help_heading = LOAD)]
    rate: Option<u64>,

    /// How the time between two such starts is drawn
    #[arg(long, value_name = "LAW", default_value = "poisson", requires = "rate")]
    #[arg(help_heading = LOAD, value_parser = named([
        ("poisson", ArrivalLaw::Poisson),
        ("uniform", ArrivalLaw::Uniform),
    ]))]
    arrivals: ArrivalLaw,

    /// Draw some addresses more often than others: the one of rank k as often as 1/k^THETA
    #[arg(long, value_name = "THETA", help_heading = LOAD)]
    #[arg(value_parser = parse_theta)]
    zipf: Option<f64>,

    /// What stands between the load and each device: the block layer with queues, one queue behind
    /// one lock, nothing but claims, or nothing [default: none for emulated SSDs, mq for all else]
    #[arg(long, value_name = "MODE", help_heading = LOAD)]
    #[arg(value_parser = named(Layer::ALL.map(|layer| (layer.name(), layer))))]
    block: Option<Layer>,

    /// Hardware contexts of the block layer by type: default=2,read=1 [default: one per channel]
    #[arg(long, value_name = "MAP", value_parser = parse_map, help_heading = LOAD)]
    queue_map: Option<QueueMap>,

    /// In what order the block layer hands requests down: none, merge, deadline?read=5ms&depth=8,
    /// stream-batch
    #[arg(long, value_name = "SCHEDULER", default_value = "none", help_heading = LOAD)]
    #[arg(value_parser = |text: &str| text.parse::<Scheduler>())]
    block_scheduler: Scheduler,

    /// Let so many requests per second through to each device
    #[arg(long, value_name = "IOPS", value_parser = at_least_one, help_heading = LOAD)]
    limit_iops: Option<NonZeroU64>,

    /// Let so many bytes per second through to each device: 10m
    #[arg(long, value_name = "SIZE", value_parser = some_bytes, help_heading = LOAD)]
    limit_bytes: Option<NonZeroU64>,

    /// Write to devices that hold something which this run did not create
    #[arg(long, help_heading = LOAD)]
    overwrite: bool,

    /// Stamp what is written and check what is read; needs a medium that keeps data
    #[arg(long, help_heading = LOAD)]
    verify: bool,

    /// What all random numbers are made from
    #[arg(long, value_name = "N", default_value = "1", value_parser = whole::<u64>)]
    #[arg(help_heading = LOAD)]
    seed: u64,

    /// Ring the submission doorbell for each command, not once per turn
    #[arg(long, help_heading = TECHNIQUES)]
    no_doorbell_batching: bool,

    /// When the completion doorbell rings
    #[arg(long, value_name = "WHEN", default_value = "poll", help_heading = TECHNIQUES)]
    #[arg(value_parser = named([
        ("each", CompletionDoorbell::Each),
        ("poll", CompletionDoorbell::Poll),
        ("deferred", CompletionDoorbell::Deferred),
    ]))]
    cq_doorbell: CompletionDoorbell,

    /// How a command is stored into its ring
    #[arg(long, value_name = "HOW", default_value = "auto", help_heading = TECHNIQUES)]
    #[arg(value_parser = named([
        ("auto", StoreChoice(None)),
        ("plain", StoreChoice(Some(CommandStore::Plain))),
        ("sse2", StoreChoice(Some(CommandStore::Sse2))),
        ("avx512", StoreChoice(Some(CommandStore::Avx512))),
        ("movdir64b", StoreChoice(Some(CommandStore::Movdir64b))),
    ]))]
    command_store: StoreChoice,

    /// What is fetched ahead: some of slots,ring,tasks, or all, or none
    #[arg(long, value_name = "WHAT", default_value = "none", value_parser = Prefetch::parse)]
    #[arg(help_heading = TECHNIQUES)]
    prefetch: Prefetch,

    /// How completions leave their ring: a cache line at once, or one by one
    #[arg(long, value_name = "HOW", default_value = "one", help_heading = TECHNIQUES)]
    #[arg(value_parser = named([
        ("line", CompletionCopy::Line),
        ("one", CompletionCopy::One),
    ]))]
    completion_copy: CompletionCopy,

    /// Keep doorbells in memory, where the controller can
    #[arg(long, help_heading = TECHNIQUES)]
    shadow_doorbells: bool,

    /// Do not ask for huge pages
    #[arg(long, help_heading = TECHNIQUES)]
    no_huge_pages: bool,

    /// Then measure for a second what is left without the protocol, and the ratio: the bare ring,
    /// bare copies for memory, bare messages for tcp; or with a value, bare messages over loopback
    #[arg(long, value_name = "OF", help_heading = REPORTS, num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "own", value_parser = named([
        ("own", CeilingOf::Own),
        ("tcp", CeilingOf::Tcp),
        ("tcp-uring", CeilingOf::TcpRing),
    ]))]
    ceiling: Option<CeilingOf>,

    /// Then run for two seconds over memory: the same with data that moves
    #[arg(long, help_heading = REPORTS)]
    ram: bool,

    /// Then compare the modes of the block layer over a null device, from one thread to one on
    /// every core, a second each: IOPS, and the share of time spent waiting for the lock
    #[arg(long, help_heading = REPORTS)]
    null_blk: bool,

    /// Print JSON in place of the text, or write it to FILE beside the text
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "", help_heading = REPORTS)]
    json: Option<String>,

    /// Write a page that needs nothing but itself
    #[arg(long, value_name = "FILE", help_heading = REPORTS)]
    html: Option<String>,
}

/// A store, or whatever suits the device. A type of its own, since an option of an option would be
/// read as a flag that may be absent.
#[derive(Clone, Copy, Debug)]
struct StoreChoice(Option<CommandStore>);

const DEVICES: &str = "\
Emulated SSDs: emu:null, emu:ram, emu:file:PATH, emu:model:p4600 or emu:model:p4800x, each \
with ?count=, size=, block=, entries=, queues=, doorbell=; or any block device: null:, ram:1g, \
file:PATH?size=1g, model:p4600, and what stands on others: KIND:[URI],[URI] [default: \
emu:null?count=21]";

const LOAD: &str = "Load";
const TECHNIQUES: &str = "Fast path, one switch per technique";
const REPORTS: &str = "Reports";

const MORE: &str = "\
Without any argument: 21 emulated SSDs that answer and move no data, random reads of 4 KiB, depth
128 each, one submitting thread, one device thread, 10 seconds; then one second of the bare ring
for the ratio, two seconds over memory for a figure that moves data, and tenmil-perf.html.
With any argument, only what is asked for happens.

Examples:
  tenmil perf                                      the main job; then look at tenmil-perf.html
  tenmil perf -t 5 --ceiling                       the rate, and how much of the possible it is
  tenmil perf null: -q 128 --ceiling=tcp           what bare messages of 4 KiB do over loopback
  tenmil perf emu:null -q 1                        the round trip of one I/O
  tenmil perf emu:null --no-doorbell-batching      what a technique is worth
  tenmil perf 'emu:ram?size=1g' -w randrw -M 70 --bs-mix 4k:70,64k:30 --zipf 0.99
  tenmil perf emu:model:p4600 --rate 200k          latency under a load that does not wait
  tenmil perf 'emu:file:/tmp/disk?size=1g' -w randrw --verify
  tenmil perf ram:4g -w randrw                     any block device, without a driver
  tenmil perf file:/tmp/disk -w randwrite --overwrite
  tenmil perf 'emu:null?count=21' --block mq       the same driver under the block layer
  tenmil perf --null-blk --html null-blk.html      queues against a lock, thread by thread
  tenmil perf emu:null --json | jq .iops

Without link-time optimisation: cargo run --profile release-no-lto -- perf
Exit codes: 0 all I/Os ended well, 1 machine not set up, 2 bad arguments, 3 I/Os failed.";

/// Runs `perf` and reports. `command` is how to run it again.
pub(super) fn run(
    arguments: &PerfArguments,
    command: &str,
    engines: &Engines,
    out: &mut dyn Write,
) -> Result<ExitCode, Refused> {
    let mut options = arguments.options();
    if command == "tenmil perf" {
        options = options.with_extras();
    }
    options.check(&Supplies::look(&Machine::this()))?;
    let json_path = match &options.json {
        Some(Output::File(path)) => Some(path.as_str()),
        _ => None,
    };
    let html_path = options.html.as_deref();
    if let (Some(json), Some(html)) = (json_path, html_path)
        && json == html
    {
        let text = format!("--json and --html: both are {html}, expected a file for each");
        return Err(Refused::caller(text));
    }
    let promise = |flag, path: Option<&str>| path.map(|path| ReportFile::promise(flag, path));
    let json_file = promise("--json", json_path).transpose()?;
    let html_file = promise("--html", html_path).transpose()?;
    let outcome = measure(&options, engines.perf)?;
    let files = [
        json_file.map(|file| file.write(&json::render(&outcome))),
        html_file.map(|file| file.write(&html::render(&outcome, command))),
    ];
    // A disk that is full is no reason to keep the result to ourselves.
    let (written, lost): (Vec<_>, Vec<_>) = files.into_iter().flatten().partition(Result::is_ok);
    let written: Vec<String> = written.into_iter().flatten().collect();
    let report = match options.json {
        Some(Output::Standard) => json::render(&outcome),
        _ => text::render(&outcome, &written),
    };
    write_out(out, &report)?;
    match lost.into_iter().find_map(Result::err) {
        Some(lost) => Err(lost),
        None => Ok(exit_code(&outcome)),
    }
}

/// What these words ask `perf` for.
pub(crate) fn options_of(words: &[String]) -> Result<PerfOptions, Refused> {
    let mut command = PerfArguments::augment_args(Command::new("perf"));
    let matches = command
        .try_get_matches_from_mut(core::iter::once("perf").chain(words.iter().map(String::as_str)));
    let parsed = matches.and_then(|matches| PerfArguments::from_arg_matches(&matches));
    parsed
        .map(|arguments| arguments.options())
        .map_err(|error| usage::refusal(&error, &command, &[]))
}

/// Runs the engine, with a live line where somebody can see it, until it is done or Ctrl-C.
fn measure(options: &PerfOptions, engine: PerfEngine) -> Result<PerfOutcome, Refused> {
    host::signal::catch_interrupts()
        .map_err(|error| Refused::machine(format!("catch Ctrl-C: {error}")))?;
    let clock = Clock::start();
    let mut errors = std::io::stderr();
    let mut line = LiveLine::new(errors.is_terminal(), clock.now());
    let progress = Arc::new(Progress::new(options.cores.len().max(1)));
    let outcome = engine(options, &progress, &mut |progress| {
        let length = phase_length(options, progress.phase());
        // A terminal that is gone is no reason to stop measuring.
        let _ = line.turn(clock.now(), progress, length, &mut errors);
        let _ = line.tell(progress, &mut errors);
    });
    let _ = line.tell(&progress, &mut std::io::stderr());
    let _ = line.clear(&mut std::io::stderr());
    outcome
}

fn phase_length(options: &PerfOptions, phase: Phase) -> Span {
    match phase {
        Phase::BringUp => Span::default(),
        Phase::WarmUp => options.warm_up,
        Phase::Measure => options.time,
        Phase::Ceiling => options.ceiling.unwrap_or_default(),
        Phase::Ram => options.ram.unwrap_or_default(),
        Phase::NullBlk => options.null_blk.unwrap_or_default(),
    }
}

/// A failed I/O, or a block that is not what was written, is the controller's doing.
fn exit_code(outcome: &PerfOutcome) -> ExitCode {
    match outcome.missing.first() {
        _ if !outcome.is_clean() => ExitCode::from(Blame::Peer.exit_code()),
        Some(refused) => ExitCode::from(refused.blame.exit_code()),
        None => ExitCode::SUCCESS,
    }
}

impl PerfArguments {
    /// Whether nothing is written: no file is made or grown for that.
    pub(super) fn only_reads(&self) -> bool {
        !self.pattern.writes()
    }

    fn options(&self) -> PerfOptions {
        let usual = PerfOptions::default();
        PerfOptions {
            uris: match (self.uris.as_slice(), self.null_blk) {
                ([], false) => usual.uris,
                ([], true) => vec![Uri::Block(block::uri::Uri::new("null", ""))],
                (uris, _) => uris.to_vec(),
            },
            depth: self.depth.unwrap_or(usual.depth),
            depth_may_be_less: self.depth.is_none(),
            sizes: self.bs_mix.clone().unwrap_or_else(|| self.io_size.clone()),
            pattern: self.pattern,
            read_percent: self.read_share,
            time: self.time,
            warm_up: self.warm_up,
            cores: self.cores.clone().unwrap_or_default(),
            device_cores: self.device_cores.clone().unwrap_or_default(),
            queue_pairs: self.queue_pairs,
            io_count: self.number_ios,
            rate: self.rate.map(|per_second| OpenLoop { per_second, arrivals: self.arrivals }),
            zipf: self.zipf,
            layer: LayerOptions {
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
            techniques: Techniques {
                doorbell_batching: !self.no_doorbell_batching,
                completion_doorbell: self.cq_doorbell,
                command_store: self.command_store.0,
                prefetch: self.prefetch,
                completion_copy: self.completion_copy,
                shadow_doorbells: self.shadow_doorbells,
                huge_pages: !self.no_huge_pages,
            },
            ceiling: self.ceiling.map(|_| CEILING_TIME),
            ceiling_of: self.ceiling.unwrap_or_default(),
            ram: self.ram.then_some(RAM_TIME),
            json: self.json.as_ref().map(|path| match path.as_str() {
                "" | "-" => Output::Standard,
                path => Output::File(path.into()),
            }),
            html: self.html.clone(),
            seed: self.seed,
        }
    }
}

/// A parser that accepts these names and nothing else.
pub(super) fn named<T, const N: usize>(
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

fn parse_uri(text: &str) -> Result<Uri, Refused> {
    text.parse()
}

pub(super) fn whole<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    let most = u64::MAX >> (64 - 8 * size_of::<T>());
    let refuse = |_| format!("`{text}` is too large, expected at most {most}");
    T::try_from(parse_count(text)?).map_err(refuse)
}

pub(super) fn at_least_one(text: &str) -> Result<NonZeroU64, String> {
    let count = parse_count(text)?;
    NonZeroU64::new(count).ok_or_else(|| format!("`{text}` is none, expected at least 1"))
}

pub(super) fn some_bytes(text: &str) -> Result<NonZeroU64, String> {
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

/// One size; a mix has a flag of its own.
fn parse_io_size(text: &str) -> Result<SizeMix, String> {
    parse_size(text).and_then(|_| SizeMix::parse(text))
}

#[cfg(test)]
#[path = "perf_tests.rs"]
mod tests;
