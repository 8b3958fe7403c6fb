//! Command-line interface: parses and validates the arguments, then runs the engine of the command.
//!
//! Exit codes: 0 success, 1 environment error (the machine is not set up), 2 usage error, 3 remote
//! error (a controller or peer violated its contract; this includes every failed I/O). They are derived
//! from [`ErrorCategory`] and never from text. `copy` adds two: 4 the devices differ, 130 interrupted.

mod apply;
mod bind;
mod config;
mod control_options;
mod copy;
mod discover;
mod doctor;
mod events;
mod get;
mod get_set_completion;
mod group;
mod help_examples;
mod identify;
mod identify_block;
mod iostat;
mod key;
mod list;
mod live_objects;
mod man;
mod mirror;
mod perf;
mod pool;
mod pool_access;
mod proxy;
mod renamed_words;
mod report_file;
mod reproduce;
mod rpc_endpoint;
mod serve;
mod set;
mod shell_completion_script;
mod support_bundle;
mod timeouts;
mod top;
mod unbind;
mod usage_errors;
mod volume;

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueHint};
use tenmil_base::text::quote_shell_word;
use tenmil_base::{Error, ErrorCategory};
use tenmil_block::{NamedDeviceType, join_device_types};
use tenmil_keyring::KeyringAtPath;
use tenmil_linux::storage_file::CreationPolicy;

use crate::process_log::LogArguments;
use tenmil_bench::perf::perf_options::PerfOptions;
use tenmil_bench::perf::perf_result::PerfResult;
use tenmil_bench::perf::progress::RunProgress;
use tenmil_devices::identify::WithAdminAccessFn;

/// A user-space NVMe storage stack.
#[derive(Debug, Parser)]
#[command(name = "tenmil", version, about, subcommand_required = true, after_help = EXAMPLES)]
#[command(max_term_width = 100)]
struct CommandLine {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run I/O workloads and report IOPS, latency and driver efficiency.
    Perf(Box<perf::PerfArguments>),
    /// Reproduce published claims about user-space storage stacks on this machine, in one report.
    Reproduce(reproduce::ReproduceArguments),
    /// List the NVMe SSDs of this machine, the emulated SSDs and the block device kinds.
    List(list::ListArguments),
    /// Bind NVMe devices to vfio-pci, unless they are in use.
    Bind(bind::BindArguments),
    /// Bind NVMe devices back to their former drivers.
    Unbind(unbind::UnbindArguments),
    /// Check this machine for missing or slow settings, and print the fix for each.
    Doctor(doctor::DoctorArguments),
    /// Show Identify data, log pages and features of a device, decoded.
    Identify(identify::IdentifyArguments),
    /// Print the discovery log of an NVMe/TCP discovery controller.
    Discover(discover::DiscoverArguments),
    /// Print the timeouts for reconnect and failover.
    Timeouts(timeouts::TimeoutsArguments),
    /// Copy one block device to another.
    Copy(copy::CopyArguments),
    /// Export block devices over NBD, NVMe/TCP, vfio-user, vhost-user or ublk.
    Serve(Box<serve::ServeArguments>),
    /// Proxy TCP connections, and fragment, delay, freeze or cut them (fault injection).
    Proxy(proxy::ProxyArguments),
    /// Query a running tenmil process; without a name, list the methods.
    Get(get::GetArguments),
    /// Change a setting of a running tenmil process.
    Set(set::SetArguments),
    /// Print the events of a running tenmil process.
    Events(events::EventsArguments),
    /// Print the rates, latencies and queue depths of what a running tenmil process serves.
    Iostat(iostat::IostatArguments),
    /// Create a mirror, show it, or change its legs.
    Mirror(mirror::MirrorArguments),
    /// Create, show, check or scrub a pool of volumes.
    Pool(pool::PoolArguments),
    /// Create, change, list or delete volumes, snapshots and clones.
    Volume(volume::VolumeArguments),
    /// Generate, import, export, list or remove keys of NVMe/TCP: TLS and DH-HMAC-CHAP.
    Key(key::KeyArguments),
    /// Collect what a report about a problem needs into one file, without secrets.
    SupportBundle(support_bundle::SupportBundleArguments),
    /// Show the reactors, threads and pollers of a running tenmil process, live.
    Top(top::TopArguments),
    /// Print a shell completion script.
    Completions(shell_completion_script::CompletionsArguments),
    /// Write the manual pages of all commands.
    Man(man::ManArguments),
    /// Show, save, check or convert the configuration of a target.
    Config(config::ConfigArguments),
    /// Apply a configuration file to a running target, or show what that would change.
    Apply(apply::ApplyArguments),
    /// Apply the configuration file of a running target again.
    Reload(apply::ReloadArguments),
    /// Create, change, list or delete NVMe subsystems of a running target.
    Subsystem(live_objects::SubsystemArguments),
    /// Create, change, list or delete namespaces of a running target.
    Namespace(live_objects::NamespaceArguments),
    /// Allow, change, list or forbid hosts of a running target.
    Host(live_objects::HostArguments),
    /// Create, change, list or delete listeners of a running target.
    Listener(live_objects::ListenerArguments),
    /// Create, change, list or delete NBD exports of a running target.
    Export(live_objects::ExportArguments),
    /// Show the gateway group of a running target, drain a gateway, or rebalance.
    Group(group::GroupArguments),
    #[command(hide = true)]
    Complete(get_set_completion::CompleteArguments),
}

#[cfg(test)]
pub(crate) use perf::parse_options as perf_options;

/// Engines that the parsed command line runs. Tests substitute their own.
#[derive(Clone, Copy, Debug)]
pub struct CommandEngines {
    /// Runs `perf`.
    pub perf: PerfEngine,
    /// Attaches one SSD and runs a closure with its controller.
    pub identify: WithAdminAccessFn,
}

/// Runs `perf`: updates the progress during the run and calls the closure with it periodically.
pub type PerfEngine =
    fn(&PerfOptions, &Arc<RunProgress>, &mut dyn FnMut(&RunProgress)) -> Result<PerfResult, Error>;

impl CommandEngines {
    /// The engines of the program.
    pub fn production() -> Self {
        Self {
            perf: |options, progress, watch| {
                rpc_endpoint::run_perf_with_rpc(options, progress, watch)
            },
            identify: tenmil_devices::emu::with_controller,
        }
    }
}

/// Device types for commands that only look: volumes and mirrors get no owner by being opened.
const LOOKING_KINDS: &[NamedDeviceType<'static>] = &join_device_types::<{ tenmil::KINDS.len() + 2 }>(
    &[
        ("volume", &tenmil_drivers::pool::open_volume_read_only),
        ("mirror", &tenmil_drivers::mirror::open_mirror_read_only),
    ],
    tenmil::KINDS,
);

const EXAMPLES: &str = "\
Examples:
  tenmil perf                              21 emulated SSDs, 10 s, and a page to look at
  tenmil perf 'emu:ram?count=4' -w randrw  four SSDs that move data
  tenmil reproduce --quick                 which claims hold here, on one page, in three minutes
  tenmil list                              SSDs and device kinds
  tenmil doctor                            missing or slow settings of this machine, and the fix
  tenmil identify emu:null                 Identify data of an SSD
  tenmil serve ram:1g -l nbd:/tmp/s        a block device for any NBD client
  tenmil copy /dev/sda file:a --verify     one device to another, preserving holes
  tenmil discover tcp://127.0.0.1:8009     subsystems that another machine serves
  tenmil key generate psk db               a TLS key for NVMe/TCP
  tenmil get                               queries that a running process supports
  tenmil top                               load of its reactors and threads, live
  tenmil support-bundle                    one file for a report about a problem

An emulated SSD needs no hardware, no root and no huge pages.
Exit codes: 0 success; 1 the machine is not set up for it (see `tenmil doctor`); 2 invalid use;
3 a device or a peer failed.";

/// Runs the command in `arguments` (program name first) and returns its exit code.
pub fn run_command_line(
    arguments: impl IntoIterator<Item = OsString>,
    engines: &CommandEngines,
) -> ExitCode {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let mut out = io::stdout().lock();
    crate::process_log::start_process_log();
    if let Err(error) = tenmil_linux::signal::ignore_file_size_signal() {
        tracing::info!("ignore SIGXFSZ: {error}");
    }
    tenmil_linux::storage_file::set_creation_policy(CreationPolicy::Recorded);
    tenmil_devices::tcp::set_key_source(Arc::new(KeyringAtPath::default()));
    let done = dispatch(&arguments, engines, &mut out);
    // What opened a file and wrote nothing that mattered has not made it so far.
    let done =
        done.and_then(|code| Ok(tenmil_linux::storage_file::commit_created().map(|()| code)?));
    crate::process_log::drain_process_log();
    match done {
        Ok(code) => code,
        Err(refused) => {
            // All devices are closed here, so files that this run created or grew can be restored.
            tenmil_linux::storage_file::undo_created();
            crate::process_log::write_final_error(&refused, final_error_text(&refused));
            ExitCode::from(refused.category.exit_code())
        }
    }
}

/// Has panics reported by the log of the process, which blocks no thread. For the program: a library leaves
/// the panic hook alone.
pub fn install_panic_logging() {
    crate::process_log::install_panic_hook();
    crate::flight_record::extend_panic_hook();
}

/// The lines of the error that ends the process.
fn final_error_text(refused: &Error) -> String {
    // Text from a peer is printed as one line; an error of a command line may have several.
    let text = refused.to_string();
    let text = match refused.category {
        ErrorCategory::Remote => tenmil_base::text::escape(&text),
        ErrorCategory::Usage | ErrorCategory::Environment => tenmil_base::text::escape_lines(&text),
    };
    let hint = refused.hint.as_ref();
    let hint = hint.map(|hint| format!("hint: {}\n", tenmil_base::text::escape_lines(hint)));
    format!("error: {text}\n{}", hint.unwrap_or_default())
}

impl Command {
    /// Whether the command runs until it is stopped, so that the lines of its log have times.
    fn runs_long(&self) -> bool {
        matches!(self, Self::Serve(_) | Self::Proxy(_))
    }

    /// Whether the command creates and grows no file.
    fn creates_and_grows_no_file(&self) -> bool {
        match self {
            Self::Identify(_) => true,
            Self::Perf(perf) => perf.creates_and_grows_no_file(),
            Self::Mirror(mirror) => mirror.creates_and_grows_no_file(),
            Self::Pool(store) => store.creates_and_grows_no_file(),
            Self::Volume(volume) => volume.only_reads(),
            _ => false,
        }
    }
}

fn dispatch(
    arguments: &[OsString],
    engines: &CommandEngines,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    // Before anything prints an argument.
    key::check_no_key_in_arguments(arguments)?;
    let mut command = clap_command();
    let parsed = command.try_get_matches_from_mut(arguments).and_then(|matches| {
        let log = LogArguments::from_arg_matches(&matches)?;
        Ok((log, CommandLine::from_arg_matches(&matches)?))
    });
    let parsed = match parsed {
        Ok((log, line)) => {
            crate::process_log::configure_process_log(&log, line.command.runs_long())?;
            Ok(line)
        }
        Err(error) => Err(error),
    };
    if parsed.as_ref().is_ok_and(|arguments| arguments.command.creates_and_grows_no_file()) {
        tenmil_linux::storage_file::reject_creation();
    }
    match parsed {
        Err(error) if !error.use_stderr() => {
            write_stdout(out, &error.render().to_string())?;
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => Err(usage_errors::usage_error(&error, &command, arguments)),
        Ok(CommandLine { command: Command::Perf(perf) }) => {
            perf::run_perf(&perf, &quoted_command_line(arguments), engines, out)
        }
        Ok(CommandLine { command: Command::Reproduce(reproduce) }) => {
            reproduce::run_reproduce(&reproduce, &quoted_command_line(arguments), out)
        }
        Ok(CommandLine { command: Command::List(list) }) => list::run_list(&list, out),
        Ok(CommandLine { command: Command::Bind(bind) }) => bind::run_bind(&bind, out),
        Ok(CommandLine { command: Command::Unbind(unbind) }) => unbind::run_unbind(&unbind, out),
        Ok(CommandLine { command: Command::Doctor(doctor) }) => doctor::run_doctor(&doctor, out),
        Ok(CommandLine { command: Command::Identify(identify) }) => {
            identify::run_identify(&identify, engines, out)
        }
        Ok(CommandLine { command: Command::Discover(discover) }) => {
            discover::run_discover(&discover, out)
        }
        Ok(CommandLine { command: Command::Timeouts(policy) }) => {
            timeouts::run_timeouts(&policy, out)
        }
        Ok(CommandLine { command: Command::Copy(copy) }) => {
            copy::run_copy(&copy, &quoted_command_line(arguments), out)
        }
        Ok(CommandLine { command: Command::Serve(serve) }) => serve::run_serve(&serve, out),
        Ok(CommandLine { command: Command::Proxy(proxy) }) => proxy::run_proxy(&proxy, out),
        Ok(CommandLine { command: Command::Get(get) }) => get::run_get(&get, out),
        Ok(CommandLine { command: Command::Set(set) }) => set::run_set(&set, out),
        Ok(CommandLine { command: Command::Events(events) }) => events::run_events(&events, out),
        Ok(CommandLine { command: Command::Iostat(iostat) }) => iostat::run_iostat(&iostat, out),
        Ok(CommandLine { command: Command::Mirror(mirror) }) => mirror::run_mirror(&mirror, out),
        Ok(CommandLine { command: Command::Pool(store) }) => pool::run_pool(&store, out),
        Ok(CommandLine { command: Command::Volume(volume) }) => volume::run_volume(&volume, out),
        Ok(CommandLine { command: Command::Key(key) }) => key::run_key(&key, out),
        Ok(CommandLine { command: Command::SupportBundle(bundle) }) => {
            support_bundle::run_support_bundle(&bundle, out)
        }
        Ok(CommandLine { command: Command::Top(top) }) => top::run_top(&top, out),
        Ok(CommandLine { command: Command::Completions(asked) }) => {
            shell_completion_script::run_completions(&asked, clap_command(), out)
        }
        Ok(CommandLine { command: Command::Man(man) }) => man::run_man(&man, clap_command(), out),
        Ok(CommandLine { command: Command::Config(config) }) => config::run_config(&config, out),
        Ok(CommandLine { command: Command::Apply(apply) }) => apply::run_apply(&apply, out),
        Ok(CommandLine { command: Command::Reload(reload) }) => apply::run_reload(&reload, out),
        Ok(CommandLine { command: Command::Subsystem(object) }) => object.run(out),
        Ok(CommandLine { command: Command::Namespace(object) }) => object.run(out),
        Ok(CommandLine { command: Command::Host(object) }) => object.run(out),
        Ok(CommandLine { command: Command::Listener(object) }) => object.run(out),
        Ok(CommandLine { command: Command::Export(object) }) => object.run(out),
        Ok(CommandLine { command: Command::Group(group) }) => group::run_group(&group, out),
        Ok(CommandLine { command: Command::Complete(_) }) => get_set_completion::run_complete(out),
    }
}

/// All commands, each with its examples.
fn clap_command() -> clap::Command {
    let command = LogArguments::augment_args(CommandLine::command());
    with_path_completion(help_examples::inherit_examples(command))
}

/// Placeholders of arguments that are devices.
const DEVICE_NAMES: [&str; 7] = ["URI", "VOLUME", "SRC", "DST", "LEG", "OLD", "NEW"];

/// Has shells complete devices as paths: an existing path is a device.
fn with_path_completion(command: clap::Command) -> clap::Command {
    let with_hint = |argument: clap::Arg| {
        let names = argument.get_value_names().unwrap_or_default();
        match names.iter().any(|name| DEVICE_NAMES.contains(&name.as_str())) {
            true => argument.value_hint(ValueHint::AnyPath),
            false => argument,
        }
    };
    command.mut_args(with_hint).mut_subcommands(with_path_completion)
}

/// Writes to standard output; a failure, such as a closed pipe, is an environment error.
fn write_stdout(out: &mut dyn Write, text: &str) -> Result<(), Error> {
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(|error| Error::environment(format!("write to standard output: {error}")))
}

/// The command line, quoted for a shell.
fn quoted_command_line(arguments: &[OsString]) -> String {
    let quoted =
        arguments.iter().skip(1).map(|argument| quote_shell_word(&argument.to_string_lossy()));
    core::iter::once("tenmil".to_owned()).chain(quoted).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::{clap_command, quoted_command_line};

    /// Names of commands that have no example.
    fn commands_without_example(command: &clap::Command, names: &mut Vec<String>) {
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        if !help.contains("xample") || !help.contains(command.get_name()) {
            names.push(command.get_name().to_owned());
        }
        for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
            commands_without_example(inner, names);
        }
    }

    #[test]
    fn every_command_has_an_example_in_its_help() {
        let mut names = Vec::new();
        commands_without_example(&clap_command(), &mut names);
        assert_eq!(names, Vec::<String>::new());
    }

    #[test]
    fn a_command_line_is_quoted_where_a_shell_would_read_it_otherwise() {
        let words = ["/bin/tenmil", "perf", "emu:null?count=2", "-t", "5", "it's", ""];
        let words: Vec<OsString> = words.iter().map(Into::into).collect();
        assert_eq!(
            quoted_command_line(&words),
            r"tenmil perf 'emu:null?count=2' -t 5 'it'\''s' ''"
        );
    }
}
