//! The command line: what is asked for, checked before anything starts, and handed to an engine.
//!
//! Exit codes: 0 done, 1 the machine is not set up for it, 2 asked for something that cannot be,
//! 3 a controller broke its contract, which includes every failed I/O. They are made from
//! [`Blame`] and never from text. `copy` has two of its own: 4 two devices differ, and
//! 130 interrupted.

mod bind;
mod complete;
mod completions;
mod copy;
mod discover;
mod doctor;
mod events;
mod evidence;
mod examples;
mod get;
mod hand;
mod identify;
mod list;
mod man;
mod mirror;
mod perf;
mod policy;
mod proxy;
mod report_file;
mod running;
mod serve;
mod set;
mod sim;
mod store;
mod top;
mod unbind;
mod usage;
mod volume;

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;

use base::Blame;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use host::file::Making;

use crate::Refused;
use crate::identify::WithController;
use crate::perf::options::PerfOptions;
use crate::perf::outcome::PerfOutcome;
use crate::perf::progress::Progress;
use crate::simulation::SimOptions;

/// A user-space NVMe storage stack.
#[derive(Debug, Parser)]
#[command(name = "tenmil", version, about, subcommand_required = true, after_help = EXAMPLES)]
#[command(max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Load SSDs and say what they, and the driver, can do.
    Perf(Box<perf::PerfArguments>),
    /// Try what others claim about such stacks on this machine, and write one page about it.
    Evidence(evidence::EvidenceArguments),
    /// List the SSDs of this machine, and those that can be emulated.
    List(list::ListArguments),
    /// Take SSDs from the kernel, for programs to drive, unless anybody uses them.
    Bind(bind::BindArguments),
    /// Give SSDs back to the drivers that had them.
    Unbind(unbind::UnbindArguments),
    /// Look for what keeps tenmil from working or from being fast here, and say what mends it.
    Doctor(doctor::DoctorArguments),
    /// Ask an SSD what it is, and decode all it answers.
    Identify(identify::IdentifyArguments),
    /// Ask a discovery service over NVMe/TCP which SSDs there are behind it.
    Discover(discover::DiscoverArguments),
    /// Print what is done about a peer that does not answer.
    Policy(policy::PolicyArguments),
    /// Copy a whole device to another.
    Copy(copy::CopyArguments),
    /// Serve block devices to others over NBD, NVMe/TCP, vfio-user or vhost-user, or to this machine by ublk.
    Serve(serve::ServeArguments),
    /// Pass TCP connections on, and split, delay, freeze or cut them.
    Proxy(proxy::ProxyArguments),
    /// Run the driver against a simulated, misbehaving controller.
    Sim(sim::SimArguments),
    /// Ask a running tenmil process; without a name, list what can be asked.
    Get(get::GetArguments),
    /// Change something in a running tenmil process.
    Set(set::SetArguments),
    /// Print what happens in a running tenmil process.
    Events(events::EventsArguments),
    /// Make a mirror of several devices, look at one, or change its legs.
    Mirror(mirror::MirrorArguments),
    /// Make a store of volumes on a device, look at one, or check all its metadata.
    Store(store::StoreArguments),
    /// Make, change, list or delete volumes, snapshots and clones.
    Volume(volume::VolumeArguments),
    /// Watch the reactors, threads and pollers of a running tenmil process.
    Top(top::TopArguments),
    /// Print what makes a shell complete command lines.
    Completions(completions::CompletionsArguments),
    /// Write the manual pages of all commands.
    Man(man::ManArguments),
    #[command(hide = true)]
    Complete(complete::CompleteArguments),
}

#[cfg(test)]
pub(crate) use perf::options_of as perf_options;

/// What does the work once the command line is understood. Tests put others in their place.
#[derive(Clone, Copy, Debug)]
pub struct Engines {
    /// Runs `perf`.
    pub perf: PerfEngine,
    /// Brings up an SSD and lets somebody ask it things.
    pub identify: WithController,
    /// Runs `sim`.
    pub sim: fn(&SimOptions, &mut dyn Write) -> Result<(), Refused>,
}

/// Runs `perf`: tells the progress as it goes, and lets the caller look at it now and then.
pub type PerfEngine =
    fn(&PerfOptions, &Arc<Progress>, &mut dyn FnMut(&Progress)) -> Result<PerfOutcome, Refused>;

impl Engines {
    /// The real ones.
    pub fn real() -> Self {
        Self {
            perf: |options, progress, watch| running::perf(options, progress, watch),
            identify: crate::emu::with_controller,
            sim: running::sim,
        }
    }
}

const EXAMPLES: &str = "\
Examples:
  tenmil perf                              21 emulated SSDs, 10 s, and a page to look at
  tenmil perf 'emu:ram?count=4' -w randrw  four SSDs that move data
  tenmil evidence --quick                  which claims hold here, on one page, in three minutes
  tenmil list                              what there is
  tenmil doctor                            what is missing or slow here, and what mends it
  tenmil identify emu:null                 what an SSD says about itself
  tenmil sim --seeds 1000                  a thousand misbehaving controllers
  tenmil serve ram:1g -l nbd:/tmp/s        a block device for any NBD client
  tenmil copy file:/a file:/b --verify     a device to another, holes kept
  tenmil discover tcp://127.0.0.1:8009     which SSDs another machine has
  tenmil get                               what a running process can be asked
  tenmil top                               what its threads do, second by second

An emulated SSD needs no hardware, no root and no huge pages.
Exit codes: 0 done; 1 the machine is not set up for it, and `tenmil doctor` may know why; 2 asked for
something that cannot be; 3 a device or a peer did not do what it should.";

/// Does what `arguments` ask for, the program's name first, and says how it went.
pub fn run(arguments: impl IntoIterator<Item = OsString>, engines: &Engines) -> ExitCode {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let mut out = io::stdout().lock();
    crate::log::start();
    if let Err(error) = host::signal::ignore_file_size() {
        tracing::info!("ignore SIGXFSZ: {error}");
    }
    host::file::set_making(Making::Recorded);
    let done = dispatch(&arguments, engines, &mut out);
    // What opened a file and wrote nothing that mattered has not made it so far.
    let done = done.and_then(|code| Ok(host::file::keep().map(|()| code)?));
    crate::log::drain();
    match done {
        Ok(code) => code,
        Err(refused) => {
            // All devices are closed by now.
            host::file::put_back();
            let mut errors = io::stderr().lock();
            // With standard error closed there is nobody left to tell.
            // Text from a peer is one line; a refusal of a command line may have several.
            let text = refused.to_string();
            let text = match refused.blame {
                Blame::Peer => base::text::plain(&text),
                Blame::Caller | Blame::Machine => base::text::plain_lines(&text),
            };
            let _ = writeln!(errors, "error: {text}");
            if let Some(hint) = &refused.hint {
                let _ = writeln!(errors, "hint: {}", base::text::plain_lines(hint));
            }
            ExitCode::from(refused.blame.exit_code())
        }
    }
}

impl Command {
    /// Whether it makes no file, and none grows.
    fn only_reads(&self) -> bool {
        match self {
            Self::Identify(_) => true,
            Self::Perf(perf) => perf.only_reads(),
            Self::Mirror(mirror) => mirror.only_reads(),
            Self::Store(store) => store.only_reads(),
            Self::Volume(volume) => volume.only_reads(),
            _ => false,
        }
    }
}

fn dispatch(
    arguments: &[OsString],
    engines: &Engines,
    out: &mut dyn Write,
) -> Result<ExitCode, Refused> {
    let mut command = grammar();
    let parsed = command.try_get_matches_from_mut(arguments);
    let parsed = parsed.and_then(|matches| Arguments::from_arg_matches(&matches));
    if parsed.as_ref().is_ok_and(|arguments| arguments.command.only_reads()) {
        host::file::refuse_making();
    }
    match parsed {
        Err(error) if !error.use_stderr() => {
            write_out(out, &error.render().to_string())?;
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => Err(usage::refusal(&error, &command, arguments)),
        Ok(Arguments { command: Command::Perf(perf) }) => {
            perf::run(&perf, &command_line(arguments), engines, out)
        }
        Ok(Arguments { command: Command::Evidence(evidence) }) => {
            evidence::run(&evidence, &command_line(arguments), out)
        }
        Ok(Arguments { command: Command::List(list) }) => list::run(&list, out),
        Ok(Arguments { command: Command::Bind(bind) }) => bind::run(&bind, out),
        Ok(Arguments { command: Command::Unbind(unbind) }) => unbind::run(&unbind, out),
        Ok(Arguments { command: Command::Doctor(doctor) }) => doctor::run(&doctor, out),
        Ok(Arguments { command: Command::Identify(identify) }) => {
            identify::run(&identify, engines, out)
        }
        Ok(Arguments { command: Command::Discover(discover) }) => discover::run(&discover, out),
        Ok(Arguments { command: Command::Policy(policy) }) => policy::run(&policy, out),
        Ok(Arguments { command: Command::Copy(copy) }) => {
            copy::run(&copy, &command_line(arguments), out)
        }
        Ok(Arguments { command: Command::Serve(serve) }) => serve::run(&serve, out),
        Ok(Arguments { command: Command::Proxy(proxy) }) => proxy::run(&proxy, out),
        Ok(Arguments { command: Command::Get(get) }) => get::run(&get, out),
        Ok(Arguments { command: Command::Set(set) }) => set::run(&set, out),
        Ok(Arguments { command: Command::Events(events) }) => events::run(&events, out),
        Ok(Arguments { command: Command::Mirror(mirror) }) => mirror::run(&mirror, out),
        Ok(Arguments { command: Command::Store(store) }) => store::run(&store, out),
        Ok(Arguments { command: Command::Volume(volume) }) => volume::run(&volume, out),
        Ok(Arguments { command: Command::Top(top) }) => top::run(&top, out),
        Ok(Arguments { command: Command::Completions(asked) }) => {
            completions::run(&asked, grammar(), out)
        }
        Ok(Arguments { command: Command::Man(man) }) => man::run(&man, grammar(), out),
        Ok(Arguments { command: Command::Complete(_) }) => complete::run(out),
        Ok(Arguments { command: Command::Sim(sim) }) => {
            (engines.sim)(&sim.options(), out)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// All commands, with examples for each.
fn grammar() -> clap::Command {
    examples::handed_down(Arguments::command())
}

/// Writes to standard output; a pipe that was closed is the machine's move.
fn write_out(out: &mut dyn Write, text: &str) -> Result<(), Refused> {
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(|error| Refused::machine(format!("write to standard output: {error}")))
}

/// The command line as it can be typed again.
fn command_line(arguments: &[OsString]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=:,./+@%".contains(c);
    let quoted = arguments.iter().skip(1).map(|argument| {
        let text = argument.to_string_lossy();
        if !text.is_empty() && text.chars().all(plain) {
            text.into_owned()
        } else {
            format!("'{}'", text.replace('\'', r"'\''"))
        }
    });
    core::iter::once("tenmil".to_owned()).chain(quoted).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::{command_line, grammar};

    /// Names of commands that have no example.
    fn without_example(command: &clap::Command, names: &mut Vec<String>) {
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        if !help.contains("xample") || !help.contains(command.get_name()) {
            names.push(command.get_name().to_owned());
        }
        for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
            without_example(inner, names);
        }
    }

    #[test]
    fn every_command_has_an_example_in_its_help() {
        let mut names = Vec::new();
        without_example(&grammar(), &mut names);
        assert_eq!(names, Vec::<String>::new());
    }

    #[test]
    fn a_command_line_is_quoted_where_a_shell_would_read_it_otherwise() {
        let words = ["/bin/tenmil", "perf", "emu:null?count=2", "-t", "5", "it's", ""];
        let words: Vec<OsString> = words.iter().map(Into::into).collect();
        assert_eq!(command_line(&words), r"tenmil perf 'emu:null?count=2' -t 5 'it'\''s' ''");
    }
}
