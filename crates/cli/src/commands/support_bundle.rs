//! `tenmil support-bundle`: what a report about a problem needs, as one file, without secrets.
//!
//! ```text
//!   manifest.txt                 contents, versions, what is missing and why
//!   methods/NAME.json            result of every `get` method without parameters
//!   events.jsonl                 events of some seconds
//!   process/…                    limits, status and cgroup of the process
//!   system/…                     kernel, CPU, memory
//!   flight-recorder/…            files written after panics and stalls
//!   log/…                        end of a log file, if one is named
//! ```
//!
//! Every text passes [`redact()`], which removes keys and the options of device URIs.

mod redact;
mod tar_archive;

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde_json::{Map, Value};
use tenmil_base::{Error, Instant, Span};
use tenmil_block::quantity_parser::parse_time;
use tenmil_linux::Clock;
use tenmil_linux::clock::utc_now;
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::runtime_directory::RuntimeDirectory;
use tenmil_linux::storage_file::error_text;
use tenmil_rpc::{MethodKind, ParamDefault, RpcClient, TABLE};

use super::rpc_endpoint::{ProcessSelector, RESPONSE_TIMEOUT, command_error, connect_to_process};
use super::write_stdout;
use redact::redact;
use tar_archive::TarArchive;

/// Collect what a report about a problem needs into one file, without secrets.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct SupportBundleArguments {
    #[command(flatten)]
    process: ProcessSelector,

    /// File to write; it must not exist [default: tenmil-support-TIME.tar]
    #[arg(short, long, value_name = "FILE.tar")]
    output: Option<PathBuf>,

    /// How long to collect events
    #[arg(short, long, value_name = "TIME", default_value = "3", value_parser = parse_time)]
    time: Span,

    /// Log file of which the end is included; without one, the bundle has no log
    #[arg(long, value_name = "FILE")]
    log_file: Option<PathBuf>,

    /// Directory of flight-recorder files, if the server has a state directory
    #[arg(long, value_name = "DIRECTORY")]
    state_dir: Option<PathBuf>,

    /// Contact no process: only the machine, and the flight-recorder files of processes that have ended
    #[arg(long, conflicts_with_all = ["pid", "instance", "control"])]
    no_process: bool,
}

const EXAMPLES: &str = "\
Examples:
  tenmil support-bundle                            of the only process that runs
  tenmil support-bundle --pid 4711 -o disk.tar --log-file /var/log/tenmil.log
  tenmil support-bundle --no-process               after a crash
      tar -tf tenmil-support-20260101T120000.tar   what is in it

Keys are not in it: a configuration has their names only. The options of device URIs are removed,
names of hosts, subsystems, devices and addresses are not: look at the file before it is sent.";

/// Files of a process.
const PROCESS_FILES: [&str; 6] = ["status", "limits", "cgroup", "sched", "smaps_rollup", "io"];
/// Files of the machine.
const SYSTEM_FILES: [&str; 9] = [
    "proc/version",
    "proc/cpuinfo",
    "proc/meminfo",
    "proc/loadavg",
    "proc/uptime",
    "proc/pressure/cpu",
    "proc/pressure/io",
    "proc/pressure/memory",
    "etc/os-release",
];
/// Files of the cgroup of a process.
const CGROUP_FILES: [&str; 7] = [
    "cpu.max",
    "cpu.stat",
    "cpuset.cpus.effective",
    "memory.max",
    "memory.current",
    "memory.events",
    "pids.current",
];
/// Length of the end of a log file.
const LOG_BYTES: u64 = 1 << 20;
/// Largest flight-recorder file, and number of them.
const RECORD_BYTES_MAX: u64 = 4 << 20;
const RECORDS_MAX: usize = 64;
/// Largest number of events.
const EVENTS_MAX: usize = 100_000;
/// Longest wait for an event.
const WAIT: Span = Span::from_ms(200);

/// Bundle that is being filled.
struct Bundle {
    archive: TarArchive,
    /// Lines of the manifest about what is missing.
    missing: Vec<String>,
}

/// Writes the bundle and prints its path.
pub(super) fn run_support_bundle(
    arguments: &SupportBundleArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let path = output_path(arguments)?;
    let mut bundle = Bundle { archive: TarArchive::new(utc_now()), missing: Vec::new() };
    if !arguments.no_process {
        let mut client = connect_to_process(&arguments.process)?;
        let pid = bundle.add_methods(&mut client)?;
        bundle.add_events(&mut client, arguments.time)?;
        if let Some(pid) = pid {
            bundle.add_process(pid);
        }
    }
    bundle.add_system();
    let directories = RuntimeDirectory::of_user().map(|directory| directory.path().to_owned());
    for directory in directories.into_iter().chain(arguments.state_dir.clone()) {
        bundle.add_flight_records(&directory);
    }
    if let Some(log) = &arguments.log_file {
        bundle.add_log(log)?;
    }
    bundle.add_manifest();
    write_new_file(&path, &bundle.archive.finish())?;
    write_stdout(out, &format!("{}\n", path.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// Path of the file, with a name that its format has.
fn output_path(arguments: &SupportBundleArguments) -> Result<PathBuf, Error> {
    let path = arguments.output.clone().unwrap_or_else(|| {
        let time: String =
            utc_now().to_string().chars().take(19).filter(|c| c.is_ascii_alphanumeric()).collect();
        format!("tenmil-support-{time}.tar").into()
    });
    if path.extension().is_none_or(|extension| extension != "tar") {
        let text = format!("--output {}: expected a name that ends in .tar", path.display());
        return Err(Error::usage(text).with_hint("compress it afterwards: `gzip FILE.tar`"));
    }
    Ok(path)
}

fn write_new_file(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let refuse = |error: io::Error| {
        let text = format!("write {}: {}", path.display(), error_text(&error));
        match error.kind() {
            io::ErrorKind::AlreadyExists | io::ErrorKind::NotFound => Error::usage(text),
            _ => Error::environment(text),
        }
    };
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(path).map_err(refuse)?;
    file.write_all(bytes).map_err(refuse)
}

impl Bundle {
    /// Adds a text without secrets.
    fn add_text(&mut self, name: &str, text: &str) {
        self.archive.add_file(name, redact(text).as_bytes());
    }

    /// Adds the results of all `get` methods that need no parameter. Returns the process's number.
    fn add_methods(&mut self, client: &mut RpcClient) -> Result<Option<u32>, Error> {
        let mut pid = None;
        let needs_none = |method: &&tenmil_rpc::Method| {
            let mut parameters = method.parameters.iter();
            method.verb == MethodKind::Get
                && parameters.all(|parameter| parameter.need != ParamDefault::Required)
        };
        for method in TABLE.methods().filter(needs_none) {
            let name = method.request_name();
            match client.call_method(&name, Map::new(), RESPONSE_TIMEOUT) {
                Ok(answer) => {
                    if name == "process" {
                        pid = answer["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
                    }
                    self.add_text(&format!("methods/{name}.json"), &format!("{answer:#}\n"));
                }
                // A process has not everything; one that does not respond has to be reported.
                Err(refused) if refused.category == tenmil_base::ErrorCategory::Remote => {
                    return Err(command_error(refused));
                }
                Err(refused) => {
                    self.missing.push(format!("methods/{name}.json: {}", refused.message))
                }
            }
        }
        Ok(pid)
    }

    /// Adds the events that occur within a time, one object per line.
    fn add_events(&mut self, client: &mut RpcClient, time: Span) -> Result<(), Error> {
        client.call_method("events", Map::new(), RESPONSE_TIMEOUT).map_err(command_error)?;
        let clock = Clock::on_kernel_clock();
        let end: Instant = clock.now().after(time);
        let mut lines = String::new();
        let mut count = 0;
        while clock.now() < end && count < EVENTS_MAX {
            let wait = WAIT.min(end.since(clock.now()));
            let Some(event): Option<Value> = client.next_event(wait).map_err(command_error)? else {
                continue;
            };
            lines.push_str(&format!("{event}\n"));
            count += 1;
        }
        self.add_text("events.jsonl", &lines);
        Ok(())
    }

    /// Adds what the kernel knows about a process and its cgroup.
    fn add_process(&mut self, pid: u32) {
        let machine = KernelFiles::live_system();
        for name in PROCESS_FILES {
            self.add_kernel_file(
                &machine,
                &format!("proc/{pid}/{name}"),
                &format!("process/{name}"),
            );
        }
        let cgroup = machine.read_trimmed(&format!("proc/{pid}/cgroup")).unwrap_or_default();
        let Some(path) = cgroup.lines().find_map(|line| line.strip_prefix("0::/")) else { return };
        for name in CGROUP_FILES {
            let file = format!("sys/fs/cgroup/{path}/{name}").replace("//", "/");
            self.add_kernel_file(&machine, &file, &format!("process/cgroup/{name}"));
        }
    }

    fn add_system(&mut self) {
        let machine = KernelFiles::live_system();
        for path in SYSTEM_FILES {
            let name = path.rsplit_once("proc/").map_or(path, |(_, name)| name).replace('/', "-");
            self.add_kernel_file(&machine, path, &format!("system/{name}"));
        }
    }

    fn add_kernel_file(&mut self, machine: &KernelFiles, path: &str, name: &str) {
        match machine.read_trimmed(path) {
            Some(text) => self.add_text(name, &format!("{text}\n")),
            None => self.missing.push(format!("{name}: /{path} cannot be read")),
        }
    }

    /// Adds the flight-recorder files of a directory.
    fn add_flight_records(&mut self, directory: &Path) {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let is_record =
            |name: &String| name.starts_with("flight-recorder-") && name.ends_with(".txt");
        let mut names: Vec<String> = names.filter(is_record).collect();
        names.sort_unstable();
        for name in names.iter().take(RECORDS_MAX) {
            match read_end(&directory.join(name), RECORD_BYTES_MAX) {
                Ok(text) => self.add_text(&format!("flight-recorder/{name}"), &text),
                Err(error) => self.missing.push(format!("flight-recorder/{name}: {error}")),
            }
        }
        if names.len() > RECORDS_MAX {
            let count = names.len() - RECORDS_MAX;
            self.missing
                .push(format!("{count} more flight-recorder files of {}", directory.display()));
        }
    }

    /// Adds the end of a log file.
    fn add_log(&mut self, path: &Path) -> Result<(), Error> {
        let text = read_end(path, LOG_BYTES).map_err(|error| {
            Error::usage(format!("--log-file {}: {}", path.display(), error_text(&error)))
        })?;
        self.add_text("log/end.log", &text);
        Ok(())
    }

    fn add_manifest(&mut self) {
        let mut text = format!(
            "support bundle of tenmil {}\nwritten: {}\nbuild: {} {}, TLS {}, {} build\n",
            env!("CARGO_PKG_VERSION"),
            utc_now(),
            std::env::consts::ARCH,
            std::env::consts::OS,
            if tenmil_serve::HAS_TLS { "built in" } else { "not built in" },
            if cfg!(debug_assertions) { "debug" } else { "release" },
        );
        text.push_str("\nfiles:\n");
        for name in self.archive.names() {
            text.push_str(&format!("  {name}\n"));
        }
        if !self.missing.is_empty() {
            text.push_str("\nnot there:\n");
            for line in &self.missing {
                text.push_str(&format!("  {line}\n"));
            }
        }
        self.add_text("manifest.txt", &text);
    }
}

/// The last `len_max` bytes of a regular file, as text.
fn read_end(path: &Path, len_max: u64) -> io::Result<String> {
    let mut file = OpenOptions::new().read(true).open(path)?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(io::Error::other("it is no regular file, expected one"));
    }
    file.seek(SeekFrom::Start(found.len().saturating_sub(len_max)))?;
    let mut bytes = Vec::new();
    file.take(len_max).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
