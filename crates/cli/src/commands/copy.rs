//! `tenmil copy`: copies one block device to another, resumable.

mod copy_report;
pub(super) mod progress_bar;
mod target_files;

use std::io::{IsTerminal, Write};
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{ArgAction, Args};
use tenmil_base::{BlockDevice, Error, ErrorCategory};
use tenmil_block::quantity_parser::parse_size;
use tenmil_block::uri::Uri;
use tenmil_block::{
    Bdev, BdevOptions, Claim, IoClass, OpenedDevice, Opener, QosLimiter, QosLimits, RateLimit,
};
use tenmil_linux::device_users::DeviceUser;
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::{Clock, random_seed};
use tenmil_rpc::{CopyProgress, ProcessParts};

use self::copy_report::CopyReport;
use self::progress_bar::ProgressBar;
use self::target_files::{
    OriginalTargetFiles, check_existing_data, check_source_sizes, with_source_size,
};
use super::control_options::ControlOptions;
use super::perf::{named_value_parser, parse_integer};
use super::{rpc_endpoint, write_stdout};
use crate::copy::{
    CheckpointFile, CopyAbort, CopyDevices, CopyOptions, CopySide, CopyStats, DeviceIdentity,
    ReadErrorPolicy, ValidatedCopy, backing_files, default_path,
};
use tenmil_devices::pcie::regions_for;

/// Arguments of `copy`.
#[derive(Debug, Args)]
#[command(after_help = MORE)]
pub(super) struct CopyArguments {
    /// Source device; files are opened read-only
    #[arg(value_name = "SRC", value_parser = parse_uri)]
    source: Uri,

    /// Target device; a missing file is created with the size of SRC
    #[arg(value_name = "DST", value_parser = parse_uri)]
    target: Uri,

    /// Overwrite existing data that this run did not create
    #[arg(long)]
    overwrite: bool,

    /// After the flush, read both devices back and compare
    #[arg(long)]
    verify: bool,

    /// Checkpoint file: record progress and resume from it [default: DST.resume, if DST is a file]
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,

    /// Action on unreadable blocks of SRC: stop, or skip (write zeroes to DST)
    #[arg(long, value_name = "WHAT", default_value = "stop")]
    #[arg(value_parser = named_value_parser([("stop", ReadErrorPolicy::Stop), ("skip", ReadErrorPolicy::Skip)]))]
    on_error: ReadErrorPolicy,

    /// Turn zeroes in SRC into holes of DST: yes or no
    #[arg(long, value_name = "YES", default_value = "yes", action = ArgAction::Set)]
    #[arg(value_parser = named_value_parser([("yes", true), ("no", false)]))]
    sparse: bool,

    /// Limit of bytes per second, reads and writes of DST together, in the background class
    #[arg(long, value_name = "SIZE", value_parser = parse_rate)]
    limit_bytes: Option<NonZeroU64>,

    /// Requests in flight
    #[arg(short = 'q', long, value_name = "N", default_value = "8", value_parser = parse_integer::<u32>)]
    depth: u32,

    /// Bytes per request, limited to the maximum transfer of both devices
    #[arg(short = 'o', long, value_name = "SIZE", default_value = "1m", value_parser = parse_size)]
    request_size: u64,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    control: ControlOptions,
}

const MORE: &str = "\
Holes of SRC are not read, and become holes of DST. DST is flushed before the result is printed.
Ctrl-C ends it in order; the same command resumes it, also after a crash. Where
a device cannot be identified (no serial number, no UUID), it resumes only with --overwrite.
`tenmil get copy` shows its progress.
Exit codes: 0 copied, 4 the two differ (--verify), 130 interrupted; else as for every command.

Examples:
  tenmil copy /var/tmp/disk file:/mnt/backup/disk --verify
  tenmil copy /dev/sdb file:/srv/sdb.img --on-error skip
  tenmil copy /srv/disk.img /dev/sdc --overwrite --limit-bytes 100m
  tenmil copy /dev/sdb 'mirror:[/dev/sdc],[/dev/sdd]' --overwrite --resume sdb.resume

`file:` before DST creates a file; a path alone is a file or device that exists.";

/// Exit code if the compared devices differ.
const EXIT_DIFFERENT: u8 = 4;
/// Exit status of a process that SIGINT has ended, by shell convention (128 + 2).
const EXIT_INTERRUPTED: u8 = 130;

/// Capacity of the DMA region table: a device and each device below it use one or two entries.
const REGIONS_MAX: usize = 1024;

/// Runs the copy and prints its report.
pub(super) fn run_copy(
    arguments: &CopyArguments,
    command_line: &str,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    tenmil_linux::signal::request_stop_on_sigint_or_sigterm()
        .map_err(|error| Error::environment(format!("catch Ctrl-C: {error}")))?;
    arguments.control.prepare()?;
    let clock = Clock::start();
    let mut job = PreparedCopy::prepare(arguments, clock)?;
    let report = job.copy_and_verify(arguments, &clock);
    let text = if arguments.json { report.as_json() } else { report.as_text() };
    // The report is printed for a partial copy, too.
    write_stdout(out, &text)?;
    job.finish(&report, arguments, command_line)
}

/// A copy whose devices are open, claimed and cleared for writing.
struct PreparedCopy {
    copy: ValidatedCopy,
    record: Option<CheckpointFile>,
    from: CopyStats,
    size_of_target: u64,
    durability: tenmil_base::Durability,
}

impl PreparedCopy {
    /// Opens the devices and the checkpoint. On an error the target is left unchanged.
    fn prepare(arguments: &CopyArguments, clock: Clock) -> Result<Self, Error> {
        let found = OriginalTargetFiles::inspect(&arguments.target);
        Self::open(arguments, &found, clock).inspect_err(|_| found.restore_original())
    }

    fn open(
        arguments: &CopyArguments,
        files: &OriginalTargetFiles,
        clock: Clock,
    ) -> Result<Self, Error> {
        let regions = regions_for([&arguments.source, &arguments.target], REGIONS_MAX);
        let seed = random_seed();
        let opener = Opener { regions: &regions, clock, seed, kinds: tenmil::KINDS };
        let source = open_device(&opener, &arguments.source.clone().read_only())?;
        check_source_sizes(&arguments.source)?;
        let source_limits = source.medium.limits();
        let size = source_limits.block_count * u64::from(source_limits.block_size);
        // An existing checkpoint shows that an earlier run had permission to write.
        let has_record = checkpoint_path(arguments)?.is_some_and(|path| path.exists());
        files.check_overwrite_allowed(arguments.overwrite || has_record)?;
        let target = open_device(&opener, &with_source_size(&arguments.target, size)?)?;
        let target_limits = target.medium.limits();
        let (record, from) = match checkpoint_path(arguments)? {
            None => (None, None),
            Some(path) => {
                let source = DeviceIdentity::from_device(
                    CopySide::Source,
                    &arguments.source,
                    &source_limits,
                );
                let target = DeviceIdentity::from_device(
                    CopySide::Target,
                    &arguments.target,
                    &target_limits,
                );
                let (record, from) = CheckpointFile::open(path, source, target)?;
                check_checkpoint(&record, from.as_ref(), files, arguments.overwrite)?;
                (Some(record), from)
            }
        };
        check_existing_data(target.existing, arguments.overwrite || from.is_some())?;

        let names = (arguments.source.to_string(), arguments.target.to_string());
        let durability = target_limits.durability;
        let devices = CopyDevices {
            source: claim_device(&names.0, source.medium, Claim::ReadShared, None, clock)?,
            target: claim_device(
                &names.1,
                target.medium,
                Claim::Exclusive,
                arguments.limit_bytes,
                clock,
            )?,
            regions: regions.clone(),
        };
        let copy = ValidatedCopy::new(devices, arguments.options(), (&names.0, &names.1))?;
        tenmil_linux::storage_file::commit_created()?;
        let size_of_target = target_limits.block_count * u64::from(target_limits.block_size);
        Ok(Self { copy, record, from: from.unwrap_or_default(), size_of_target, durability })
    }

    /// Copies, and compares with `--verify`.
    fn copy_and_verify(&mut self, arguments: &CopyArguments, clock: &Clock) -> CopyReport {
        let mut line = ProgressBar::new(std::io::stderr().is_terminal(), clock.now());
        self.print_notes(arguments, &mut line);
        let began = (clock.now(), self.from.until);
        let names = (arguments.source.to_string(), arguments.target.to_string());
        let copying = CopyProgress::new(&names.0, &names.1, self.copy.size_bytes());
        copying.begin_phase(false, began.0, began.1);
        let served =
            rpc_endpoint::serve_control_socket(ProcessParts::new().with_part(copying.clone()));
        rpc_endpoint::set_ready(&served);
        let mut nothing = ();
        let keep: &mut dyn crate::copy::CheckpointSink = match &mut self.record {
            Some(record) => record,
            None => &mut nothing,
        };
        // The checkpoint is stored before the first write, so that a partly written target can be
        // identified.
        let kept = keep.store_checkpoint(self.from.until, &self.from.lost);
        let (tally, ending) = match kept {
            Err(text) => (self.from.clone(), Some(CopyAbort::Record(text))),
            Ok(()) => self.copy.run(self.from.clone(), clock, keep, &mut |now, progress| {
                copying.update_done_bytes(now, progress.0);
                line.update("copying", now, progress, &mut std::io::stderr());
                !tenmil_linux::signal::is_stop_requested()
            }),
        };
        let copied_at = clock.now();
        let mut report = CopyReport {
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
            line.begin_phase(copied_at);
            copying.begin_phase(true, copied_at, 0);
            let (comparison, ending) =
                self.copy.compare(&report.tally, clock, &mut |now, progress| {
                    copying.update_done_bytes(now, progress.0);
                    line.update("comparing", now, progress, &mut std::io::stderr());
                    !tenmil_linux::signal::is_stop_requested()
                });
            (report.comparison, report.ending) = (Some(comparison), ending);
        }
        line.clear(&mut std::io::stderr());
        report
    }

    fn print_notes(&self, arguments: &CopyArguments, line: &mut ProgressBar) {
        let mut say = |text: String| line.note(&text, &mut std::io::stderr());
        let size = self.copy.size_bytes();
        for file in backing_files(&arguments.source) {
            for used in DeviceUser::users_of_path(&KernelFiles::live_system(), &file) {
                say(format!("{used}: what is copied may not be of one moment"));
            }
        }
        if self.size_of_target > size {
            let (target, more) = (&arguments.target, self.size_of_target - size);
            say(format!(
                "{target:#} is {more} bytes longer than {:#}; those stay as they are",
                arguments.source
            ));
        }
        if let Some(record) = &self.record
            && self.from.until > 0
        {
            say(format!(
                "resuming at byte {} of {size}, recorded in {}",
                self.from.until,
                record.file_path().display()
            ));
            for path in record.unidentified_devices() {
                say(format!(
                    "{path} cannot be identified; assuming it is the device of the record"
                ));
            }
        }
    }

    /// Removes the checkpoint after success, and returns the exit code.
    fn finish(
        self,
        report: &CopyReport,
        arguments: &CopyArguments,
        command_line: &str,
    ) -> Result<ExitCode, Error> {
        let hint = report.ending.is_some().then(|| self.resume_hint(arguments, command_line));
        if report.ending.is_none()
            && let Some(record) = self.record
        {
            record.remove().map_err(Error::environment)?;
        }
        match &report.ending {
            Some(CopyAbort::Interrupted) => {
                if let Some(hint) = hint {
                    // With standard error closed, the exit code is the only indication.
                    let _ = writeln!(std::io::stderr(), "hint: {hint}");
                }
                Ok(ExitCode::from(EXIT_INTERRUPTED))
            }
            Some(ending) => {
                let CopyReport { source, target, .. } = report;
                let text = format!("copy {source:#} to {target:#}: {ending}");
                Err(Error { category: ending.category(), text, hint })
            }
            None if report.comparison.as_ref().is_some_and(|found| found.different > 0) => {
                Ok(ExitCode::from(EXIT_DIFFERENT))
            }
            None if !report.tally.lost.is_empty() => {
                Ok(ExitCode::from(ErrorCategory::Remote.exit_code()))
            }
            None => Ok(ExitCode::SUCCESS),
        }
    }

    fn resume_hint(&self, arguments: &CopyArguments, command_line: &str) -> String {
        let Some(record) = &self.record else {
            return "The same command begins anew; with --resume FILE a copy can go on from where \
                    it was."
                .to_owned();
        };
        let needs_more = !record.unidentified_devices().is_empty() && !arguments.overwrite;
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

fn open_device(opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
    opener.open(uri).map_err(|error| {
        let refused = Error::new(error.category(), format!("open {error}"));
        match error.hint() {
            Some(hint) => refused.with_hint(hint),
            None => refused,
        }
    })
}

/// Rejects a checkpoint that cannot be matched to these devices: neither resume nor the permission to
/// overwrite may be derived from it.
fn check_checkpoint(
    record: &CheckpointFile,
    from: Option<&CopyStats>,
    files: &OriginalTargetFiles,
    overwrite: bool,
) -> Result<(), Error> {
    let Some(from) = from else { return Ok(()) };
    files.check_checkpoint(record.file_path(), from.until)?;
    let unmarked = record.unidentified_devices();
    if overwrite || unmarked.is_empty() {
        return Ok(());
    }
    let (record, unmarked) = (record.file_path().display(), unmarked.join(" and "));
    let text = format!(
        "resume the copy of {record}: {unmarked} cannot be identified, expected a serial \
         number, a UUID or a file"
    );
    Err(Error::usage(text).with_hint(format!(
        "To start over, remove {record}; to resume all the same, add --overwrite."
    )))
}

/// Path of the checkpoint file, if this copy has one.
fn checkpoint_path(arguments: &CopyArguments) -> Result<Option<PathBuf>, Error> {
    let CopyArguments { target, resume, .. } = arguments;
    match resume {
        None => Ok(default_path(target)),
        Some(_) if backing_files(target).is_empty() => Err(Error::usage(format!(
            "--resume: {target:#} stands on no file and does not outlive this run, expected a target \
             that does"
        ))),
        Some(path) => Ok(Some(path.clone())),
    }
}

/// The block-layer device above a medium, claimed for this copy.
fn claim_device(
    name: &str,
    medium: Arc<dyn BlockDevice>,
    claim: Claim,
    limit: Option<NonZeroU64>,
    clock: Clock,
) -> Result<Arc<dyn BlockDevice>, Error> {
    let total = RateLimit { iops: None, bytes: limit };
    let limiter = limit.map(|_| QosLimiter::new(QosLimits { total, ..QosLimits::default() }));
    let options = BdevOptions { limiter, ..BdevOptions::new(clock, random_seed()) };
    let device = Bdev::new(name, medium, options)?;
    let descriptor = device
        .open(claim, "copy")
        .map_err(|refused| Error::new(refused.category(), refused.to_string()))?;
    let class = if limit.is_some() { IoClass::Background } else { IoClass::Foreground };
    Ok(Arc::new(descriptor.with_io_class(class)))
}

fn parse_uri(text: &str) -> Result<Uri, String> {
    text.parse::<Uri>().map_err(|error| error.to_string())
}

fn parse_rate(text: &str) -> Result<NonZeroU64, String> {
    let bytes = parse_size(text)?;
    NonZeroU64::new(bytes).ok_or_else(|| format!("`{text}` is nothing, expected at least 1"))
}
