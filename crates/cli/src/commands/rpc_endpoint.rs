//! RPC endpoints: the control socket of this process, and lookup of other processes.

use std::io::Write;
use std::sync::Arc;

use clap::Args;
use tenmil_base::{Error, Span};
use tenmil_drivers::mirror::subscribe_mirrors;
use tenmil_drivers::pool::{subscribe_capacity, subscribe_stops};
use tenmil_drivers::subscribe_lost_writes;
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::process::command_line;
use tenmil_linux::runtime_directory::RuntimeDirectory;
use tenmil_rpc::pool_commands::PoolCommands;
use tenmil_rpc::{
    Client, EventRelay, ProgramInfo, Reactors, RpcError, SchedulerSource, Server, ServerState,
    TABLE, announcements,
};

use crate::simulation::SimOptions;
use tenmil_bench::balance::{BalancedReactors, put_back_frequencies};
use tenmil_bench::perf::engine;
use tenmil_bench::perf::options::PerfOptions;
use tenmil_bench::perf::progress::Progress;
use tenmil_bench::perf::result::PerfResult;

/// Selects the process to call.
#[derive(Clone, Copy, Debug, Default, Args)]
pub(super) struct ProcessSelector {
    /// Process to contact; may be omitted if only one is running
    #[arg(long, value_name = "N")]
    pub(super) pid: Option<u32>,
}

/// Time limit for a response.
pub(super) const RESPONSE_TIMEOUT: Span = Span::from_secs(10);

/// Runs `perf` with a control socket.
pub(super) fn perf(
    options: &PerfOptions,
    progress: &Arc<Progress>,
    watch: engine::TickFn<'_>,
) -> Result<PerfResult, Error> {
    let (theirs, steered) = (Arc::clone(progress), Arc::clone(progress));
    let state = ServerState::new()
        .with(Reactors::new(move || theirs.reactors()))
        .with(SchedulerSource::new(move || steered.steering()));
    let mut served = serve(state);
    engine::run(options, progress, &mut |progress| {
        if let (Some((_, relay)), Some(running)) = (&mut served, progress.reactors()) {
            relay.forward_events(&running);
        }
        watch(progress);
    })
}

/// Runs `sim` with a control socket.
pub(super) fn sim(options: &SimOptions, out: &mut dyn Write) -> Result<(), Error> {
    let _served = serve(ServerState::new());
    crate::simulation::run(options, out)
}

/// RPC state of a process with these reactors.
pub(super) fn state_of(balanced: &BalancedReactors) -> ServerState {
    let (running, steering) = (of(&balanced.reactors), balanced.balance.steering().clone());
    ServerState::new()
        .with(Reactors::new(move || Some(running.clone())))
        .with(SchedulerSource::new(move || Some(steering.clone())))
}

/// These reactors as an RPC object.
pub(super) fn of(reactors: &tenmil_reactor::Reactors) -> tenmil_reactor::RunningReactors {
    tenmil_reactor::RunningReactors {
        directory: Arc::clone(reactors.registry()),
        clock: *reactors.clock(),
    }
}

/// Serves the control socket of this process for as long as the returned value lives.
///
/// The socket is optional: without it the process works, its events go to the log, and a note names the
/// reason. CPU frequencies that a killed process left changed are restored first.
pub(super) fn serve(state: ServerState) -> Option<(Server, EventRelay)> {
    match start(state) {
        Ok(served) => Some(served),
        Err(why) => {
            subscribe_capacity(
                |new_events| tracing::info!(cause = %new_events.store, "{new_events}"),
            );
            subscribe_lost_writes(|new_events| tracing::warn!("{new_events}"));
            subscribe_mirrors(|new_events| tracing::info!("{new_events}"));
            subscribe_stops(|new_events| tracing::warn!("{new_events}"));
            tracing::info!("`tenmil get` will not reach this process: {why}");
            None
        }
    }
}

fn start(state: ServerState) -> Result<(Server, EventRelay), String> {
    let directory = RuntimeDirectory::of_user().map_err(|error| error.to_string())?;
    put_back_frequencies(&KernelFiles::live(), &directory, &|text| tracing::info!("{text}"));
    let (announcer, announced) =
        announcements().map_err(|error| format!("make an event descriptor: {error}"))?;
    let log = crate::log::of_process().cloned();
    let state = state.with(ProgramInfo { version: env!("CARGO_PKG_VERSION"), log });
    let paths = tenmil_devices::tcp::paths_of_all();
    tenmil_rpc::announce_path_changes(paths, announcer.clone());
    let state = state.with(paths.clone());
    let state = state.with(PoolCommands::new(tenmil::KINDS, announcer.clone()));
    let server = Server::start(&directory, std::process::id(), &TABLE, state, announced)
        .map_err(|refused| refused.to_string())?;
    let teller = announcer.clone();
    subscribe_capacity(move |new_events| {
        tracing::info!(cause = %new_events.store, "{new_events}");
        teller.announce_capacity(new_events);
    });
    let teller = announcer.clone();
    subscribe_lost_writes(move |new_events| {
        tracing::warn!("{new_events}");
        teller.announce_lost_write(new_events);
    });
    let teller = announcer.clone();
    subscribe_mirrors(move |new_events| {
        tracing::info!("{new_events}");
        teller.announce_mirror(new_events);
    });
    let teller = announcer.clone();
    subscribe_stops(move |new_events| {
        tracing::warn!("{new_events}");
        teller.announce_stop(new_events);
    });
    Ok((server, EventRelay::new(announcer)))
}

/// Connects to the selected process.
pub(super) fn connect(whom: ProcessSelector) -> Result<Client, Error> {
    let directory = directory()?;
    let pid = choose(whom.pid, &listening(&directory)?)?;
    Client::connect(&directory.socket_of(pid), RESPONSE_TIMEOUT).map_err(refused)
}

/// The runtime directory with the sockets of this user's processes.
pub(super) fn directory() -> Result<RuntimeDirectory, Error> {
    RuntimeDirectory::of_user().map_err(|error| {
        Error::environment(error.to_string())
            .with_hint("find out what created it, and remove it if it is not needed")
    })
}

/// Process IDs of the processes that listen in `directory`.
pub(super) fn listening(directory: &RuntimeDirectory) -> Result<Vec<u32>, Error> {
    directory.listening().map_err(|error| {
        Error::environment(format!("look into {}: {error}", directory.path().display()))
    })
}

/// Selects the process with the given ID, or the only one that is running.
pub(super) fn choose(wanted: Option<u32>, running: &[u32]) -> Result<u32, Error> {
    match (wanted, running) {
        (Some(pid), _) if running.contains(&pid) => Ok(pid),
        (None, [pid]) => Ok(*pid),
        (None, []) => Err(Error::usage("no tenmil process of this user runs, expected one")
            .with_hint("start one that runs for a while, such as `tenmil perf emu:null -t 60`")),
        (None, _) => Err(Error::usage(format!(
            "{} tenmil processes run, expected --pid with one of {}",
            running.len(),
            listed(running)
        ))),
        (Some(pid), []) => Err(Error::usage(format!(
            "--pid {pid}: no tenmil process of this user runs, expected one"
        ))),
        (Some(pid), _) => Err(Error::usage(format!(
            "--pid {pid}: it is no tenmil process of this user that runs, expected one of {}",
            listed(running)
        ))),
    }
}

/// `4711 (tenmil perf), 4712 (tenmil perf -t 60)`.
fn listed(running: &[u32]) -> String {
    let one = |pid: &u32| match command_line(*pid) {
        Some(words) => {
            let words: String = words
                .join(" ")
                .chars()
                .filter(|c| !tenmil_base::text::is_terminal_control(*c))
                .take(60)
                .collect();
            format!("{pid} ({words})")
        }
        None => pid.to_string(),
    };
    running.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// Converts an RPC error of the server or client to a command error.
pub(super) fn refused(refusal: RpcError) -> Error {
    let RpcError { category, message, hint, .. } = refusal;
    Error { category, text: message, hint }
}

#[cfg(test)]
mod tests {
    use super::choose;

    #[test]
    fn the_only_process_is_meant_unless_one_is_named() {
        assert_eq!(choose(None, &[7]), Ok(7));
        assert_eq!(choose(Some(8), &[7, 8]), Ok(8));
    }

    #[test]
    fn none_or_several_are_refused_with_what_there_is() {
        let none = choose(None, &[]).unwrap_err();
        assert_eq!(none.category.exit_code(), 2);
        assert!(none.hint.unwrap().contains("tenmil perf"));
        let us = std::process::id();
        let several = choose(None, &[us, u32::MAX]).unwrap_err();
        assert!(several.text.starts_with("2 tenmil processes run, expected --pid with one of "));
        assert!(several.text.contains(&format!("{us} (")), "with its command line: {several}");
        assert!(several.text.ends_with("4294967295"), "{several}");
        let other = choose(Some(5), &[u32::MAX]).unwrap_err();
        assert!(other.text.starts_with("--pid 5: ") && other.text.ends_with("4294967295"));
        assert!(choose(Some(5), &[]).unwrap_err().text.starts_with("--pid 5: "));
    }
}
