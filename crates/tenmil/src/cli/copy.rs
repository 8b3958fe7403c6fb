//! `tenmil copy`.

mod files;
pub(super) mod line;
mod report;

use std::io::{IsTerminal, Write};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use base::{Blame, Medium};
use block::quantity::parse_size;
use block::uri::Uri;
use block::{Caps, Claim, Class, Device, DeviceOptions, Limiter, Opened, Opener, Rate};
use clap::{ArgAction, Args};
use control::{Copying, State};
use host::holders::InUse;
use host::machine::Machine;
use host::{Clock, random_seed};

use self::files::{Found, allow, check_whole, sized};
use self::line::Line;
use self::report::Report;
use super::perf::{named, whole};
use super::{running, write_out};
use crate::Refused;
use crate::copy::{
    Copy, CopyOptions, Devices, Ending, Identity, OnError, Record, Tally, Which, files_of,
    usual_path,
};
use crate::pcie::regions_for;

/// The arguments of `copy`.
#[derive(Debug, Args)]
#[command(after_help = MORE)]
pub(super) struct CopyArguments {
    /// What to read; files are opened for reading only
    #[arg(value_name = "SRC", value_parser = parse_uri)]
    source: Uri,

    /// What to write; a file that is not there is made as long as SRC
    #[arg(value_name = "DST", value_parser = parse_uri)]
    target: Uri,

    /// Write even over what this run did not create, which is lost
    #[arg(long)]
    overwrite: bool,

    /// Read both back when all is flushed, and compare
    #[arg(long)]
    verify: bool,

    /// Keep how far it is in this file, and go on from what the file says [default: DST.resume,
    /// where DST is a file]
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,

    /// What to do about blocks of SRC that cannot be read: stop, or write zeroes in their place
    #[arg(long, value_name = "WHAT", default_value = "stop")]
    #[arg(value_parser = named([("stop", OnError::Stop), ("skip", OnError::Skip)]))]
    on_error: OnError,

    /// Make holes of zeroes that SRC holds as data: yes or no
    #[arg(long, value_name = "YES", default_value = "yes", action = ArgAction::Set)]
    #[arg(value_parser = named([("yes", true), ("no", false)]))]
    sparse: bool,

    /// Bytes per second at most, reads and writes of DST together, as work in the background
    #[arg(long, value_name = "SIZE", value_parser = parse_rate)]
    limit_bytes: Option<NonZeroU64>,

    /// Requests in flight
    #[arg(short = 'q', long, value_name = "N", default_value = "8", value_parser = whole::<u32>)]
    depth: u32,

    /// Bytes in each of them; no more than both sides take at once
    #[arg(short = 'o', long, value_name = "SIZE", default_value = "1m", value_parser = parse_size)]
    request_size: u64,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

const MORE: &str = "\
Holes of SRC are not read, and become holes of DST. DST is flushed before the result is printed.
Ctrl-C ends it in order; the same command goes on where it was, as it does after a crash. Where
nothing tells a device from others (no serial number, no UUID), it goes on only with --overwrite.
`tenmil get copy` tells how far it is, from anywhere.
Exit codes: 0 copied, 4 the two differ (--verify), 130 interrupted; else as for every command.

Examples:
  tenmil copy file:/var/tmp/disk file:/mnt/backup/disk --verify
  tenmil copy file:/dev/sdb file:/srv/sdb.img --on-error skip
  tenmil copy file:/srv/disk.img file:/dev/sdc --overwrite --limit-bytes 100m
  tenmil copy file:/a 'mirror:[file:/b],[file:/c]' --overwrite --resume a.resume";

/// Two that are compared differ.
const EXIT_DIFFERENT: u8 = 4;
/// What a shell says of a process that SIGINT has ended.
const EXIT_INTERRUPTED: u8 = 130;

/// Devices stand on others, and each takes a place or two in the table of memory.
const REGIONS_MAX: usize = 1024;

/// Copies.
pub(super) fn run(
    arguments: &CopyArguments,
    command_line: &str,
    out: &mut dyn Write,
) -> Result<ExitCode, Refused> {
    host::signal::catch_interrupts()
        .map_err(|error| Refused::machine(format!("catch Ctrl-C: {error}")))?;
    let clock = Clock::start();
    let mut job = Job::prepare(arguments, clock)?;
    let report = job.work(arguments, &clock);
    let text = if arguments.json { report.as_json() } else { report.as_text() };
    // What has been done is worth telling whether or not it was all.
    write_out(out, &text)?;
    job.finish(&report, arguments, command_line)
}

/// A copy whose devices are open, claimed and allowed to be written.
struct Job {
    copy: Copy,
    record: Option<Record>,
    from: Tally,
    size_of_target: u64,
    durability: base::Durability,
}

impl Job {
    /// Opens everything. If the copy is refused, the target is as it was.
    fn prepare(arguments: &CopyArguments, clock: Clock) -> Result<Self, Refused> {
        let found = Found::look(&arguments.target);
        Self::open(arguments, &found, clock).inspect_err(|_| found.put_back())
    }

    fn open(arguments: &CopyArguments, files: &Found, clock: Clock) -> Result<Self, Refused> {
        let regions = regions_for([&arguments.source, &arguments.target], REGIONS_MAX);
        let seed = random_seed();
        let opener = Opener { regions: &regions, clock, seed, more: crate::KINDS };
        let source = open(&opener, &arguments.source.clone().to_read())?;
        check_whole(&arguments.source)?;
        let source_limits = source.medium.limits();
        let size = source_limits.block_count * u64::from(source_limits.block_size);
        // A record that fits says that an earlier run was allowed to.
        let has_record = record_path(arguments)?.is_some_and(|path| path.exists());
        files.allow(arguments.overwrite || has_record)?;
        let target = open(&opener, &sized(&arguments.target, size)?)?;
        let target_limits = target.medium.limits();
        let (record, from) = match record_path(arguments)? {
            None => (None, None),
            Some(path) => {
                let source = Identity::of(Which::Source, &arguments.source, &source_limits);
                let target = Identity::of(Which::Target, &arguments.target, &target_limits);
                let (record, from) = Record::open(path, source, target)?;
                check_record(&record, from.as_ref(), files, arguments.overwrite)?;
                (Some(record), from)
            }
        };
        allow(target.existing, arguments.overwrite || from.is_some())?;

        let names = (arguments.source.to_string(), arguments.target.to_string());
        let durability = target_limits.durability;
        let devices = Devices {
            source: claim(&names.0, source.medium, Claim::ReadShared, None, clock)?,
            target: claim(&names.1, target.medium, Claim::Exclusive, arguments.limit_bytes, clock)?,
            regions: regions.clone(),
        };
        let copy = Copy::new(devices, arguments.options(), (&names.0, &names.1))?;
        host::file::keep()?;
        let size_of_target = target_limits.block_count * u64::from(target_limits.block_size);
        Ok(Self { copy, record, from: from.unwrap_or_default(), size_of_target, durability })
    }

    /// Copies, and compares if that was asked for.
    fn work(&mut self, arguments: &CopyArguments, clock: &Clock) -> Report {
        let mut line = Line::new(std::io::stderr().is_terminal(), clock.now());
        self.say(arguments, &mut line);
        let began = (clock.now(), self.from.until);
        let names = (arguments.source.to_string(), arguments.target.to_string());
        let copying = Copying::new(&names.0, &names.1, self.copy.size_bytes());
        copying.begin(false, began.0, began.1);
        let _served = running::serve(State::new().with(copying.clone()));
        let mut nothing = ();
        let keep: &mut dyn crate::copy::Keep = match &mut self.record {
            Some(record) => record,
            None => &mut nothing,
        };
        // Before the first byte: whoever finds the target half written finds out of what.
        let kept = keep.keep(self.from.until, &self.from.lost);
        let (tally, ending) = match kept {
            Err(text) => (self.from.clone(), Some(Ending::Record(text))),
            Ok(()) => self.copy.run(self.from.clone(), clock, keep, &mut |now, progress| {
                copying.reach(now, progress.0);
                line.turn("copying", now, progress, &mut std::io::stderr());
                !host::signal::interrupted()
            }),
        };
        let copied_at = clock.now();
        let mut report = Report {
            source: names.0,
            target: names.1,
            size_bytes: self.copy.size_bytes(),
            resumed_at: began.1,
            tally,
            ending,
            comparison: None,
            durability: self.durability,
            took: copied_at.since(began.0),
        };
        if arguments.verify && report.ending.is_none() {
            line.begin(copied_at);
            copying.begin(true, copied_at, 0);
            let (comparison, ending) =
                self.copy.compare(&report.tally, clock, &mut |now, progress| {
                    copying.reach(now, progress.0);
                    line.turn("comparing", now, progress, &mut std::io::stderr());
                    !host::signal::interrupted()
                });
            (report.comparison, report.ending) = (Some(comparison), ending);
        }
        line.clear(&mut std::io::stderr());
        report
    }

    fn say(&self, arguments: &CopyArguments, line: &mut Line) {
        let mut say = |text: String| line.note(&text, &mut std::io::stderr());
        let size = self.copy.size_bytes();
        for file in files_of(&arguments.source) {
            for used in InUse::look(&Machine::this(), &file) {
                say(format!("{used}: what is copied may not be of one moment"));
            }
        }
        if self.size_of_target > size {
            let (target, more) = (&arguments.target, self.size_of_target - size);
            say(format!(
                "{target} is {more} bytes longer than {}; those stay as they are",
                arguments.source
            ));
        }
        if let Some(record) = &self.record
            && self.from.until > 0
        {
            say(format!(
                "goes on at byte {} of {size}, as {} says",
                self.from.until,
                record.path().display()
            ));
            for path in record.unmarked() {
                say(format!("{path} is taken for the one that the record is of: nothing tells it"));
            }
        }
    }

    /// Puts the record away if it has done its duty, and says how it ended.
    fn finish(
        self,
        report: &Report,
        arguments: &CopyArguments,
        command_line: &str,
    ) -> Result<ExitCode, Refused> {
        let hint = report.ending.is_some().then(|| self.how_to_go_on(arguments, command_line));
        if report.ending.is_none()
            && let Some(record) = self.record
        {
            record.remove().map_err(Refused::machine)?;
        }
        match &report.ending {
            Some(Ending::Interrupted) => {
                if let Some(hint) = hint {
                    // With standard error closed the exit code still says it.
                    let _ = writeln!(std::io::stderr(), "hint: {hint}");
                }
                Ok(ExitCode::from(EXIT_INTERRUPTED))
            }
            Some(ending) => {
                let Report { source, target, .. } = report;
                let text = format!("copy {source} to {target}: {ending}");
                Err(Refused { blame: ending.blame(), text, hint })
            }
            None if report.comparison.as_ref().is_some_and(|found| found.different > 0) => {
                Ok(ExitCode::from(EXIT_DIFFERENT))
            }
            None if !report.tally.lost.is_empty() => Ok(ExitCode::from(Blame::Peer.exit_code())),
            None => Ok(ExitCode::SUCCESS),
        }
    }

    fn how_to_go_on(&self, arguments: &CopyArguments, command_line: &str) -> String {
        let Some(record) = &self.record else {
            return "The same command begins anew; with --resume FILE a copy can go on from where \
                    it was."
                .to_owned();
        };
        let needs_more = !record.unmarked().is_empty() && !arguments.overwrite;
        let more = if needs_more { " --overwrite" } else { "" };
        format!("To go on from there: {command_line}{more}")
    }
}

impl CopyArguments {
    fn options(&self) -> CopyOptions {
        let (depth, request_bytes) = (self.depth, self.request_size);
        CopyOptions { depth, request_bytes, sparse: self.sparse, on_error: self.on_error }
    }
}

fn open(opener: &Opener<'_>, uri: &Uri) -> Result<Opened, Refused> {
    opener.open(uri).map_err(|error| {
        let refused = Refused::of(error.blame(), format!("open {error}"));
        match error.hint() {
            Some(hint) => refused.with_hint(hint),
            None => refused,
        }
    })
}

/// Refuses to go on, or to write because somebody was once allowed to, where the record cannot be
/// known to be of what is there.
fn check_record(
    record: &Record,
    from: Option<&Tally>,
    files: &Found,
    overwrite: bool,
) -> Result<(), Refused> {
    let Some(from) = from else { return Ok(()) };
    files.check(record.path(), from.until)?;
    let unmarked = record.unmarked();
    if overwrite || unmarked.is_empty() {
        return Ok(());
    }
    let (record, unmarked) = (record.path().display(), unmarked.join(" and "));
    let text = format!(
        "go on with the copy of {record}: nothing tells {unmarked} from others, expected a serial \
         number, a UUID or a file"
    );
    Err(Refused::caller(text).with_hint(format!(
        "To begin anew, remove {record}; to go on all the same, add --overwrite."
    )))
}

/// Where the record of this copy lies, if it has one.
fn record_path(arguments: &CopyArguments) -> Result<Option<PathBuf>, Refused> {
    let CopyArguments { target, resume, .. } = arguments;
    match resume {
        None => Ok(usual_path(target)),
        Some(_) if files_of(target).is_empty() => Err(Refused::caller(format!(
            "--resume: {target} stands on no file and does not outlive this run, expected a target \
             that does"
        ))),
        Some(path) => Ok(Some(path.clone())),
    }
}

/// The block layer above a medium, claimed for this copy.
fn claim(
    name: &str,
    medium: Arc<dyn Medium>,
    claim: Claim,
    limit: Option<NonZeroU64>,
    clock: Clock,
) -> Result<Arc<dyn Medium>, Refused> {
    let total = Rate { iops: None, bytes: limit };
    let limiter = limit.map(|_| Limiter::new(Caps { total, ..Caps::default() }));
    let options = DeviceOptions { limiter, ..DeviceOptions::new(clock, random_seed()) };
    let device = Device::new(name, medium, options)?;
    let descriptor = device
        .open(claim, "copy")
        .map_err(|refused| Refused::of(refused.blame(), refused.to_string()))?;
    let class = if limit.is_some() { Class::Background } else { Class::Foreground };
    Ok(Arc::new(descriptor.with_class(class)))
}

fn parse_uri(text: &str) -> Result<Uri, String> {
    text.parse::<Uri>().map_err(|error| error.to_string())
}

fn parse_rate(text: &str) -> Result<NonZeroU64, String> {
    let bytes = parse_size(text)?;
    NonZeroU64::new(bytes).ok_or_else(|| format!("`{text}` is nothing, expected at least 1"))
}
