//! RPC endpoints: the control socket of this process, and lookup of other processes.

use std::io::Write;
use std::sync::Arc;

use clap::Args;
use tenmil_base::{Error, Span};
use tenmil_drivers::mirror::subscribe_mirror_events;
use tenmil_drivers::pool::{subscribe_capacity, subscribe_stops};
use tenmil_drivers::subscribe_lost_writes;
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::process_stats::command_line;
use tenmil_linux::runtime_directory::RuntimeDirectory;
use tenmil_rpc::pool_commands::PoolCommands;
use tenmil_rpc::{
    EventRelay, ProcessParts, ProgramInfo, ReactorsSource, RpcClient, RpcError, RpcServer,
    SchedulerSource, TABLE, event_channel,
};

use crate::simulation::SimOptions;
use tenmil_bench::balance::{BalancedReactors, restore_frequencies};
use tenmil_bench::perf::engine;
use tenmil_bench::perf::perf_options::PerfOptions;
use tenmil_bench::perf::perf_result::PerfResult;
use tenmil_bench::perf::progress::RunProgress;

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
pub(super) fn run_perf_with_rpc(
    options: &PerfOptions,
    progress: &Arc<RunProgress>,
    watch: engine::TickFn<'_>,
) -> Result<PerfResult, Error> {
    let (theirs, steered) = (Arc::clone(progress), Arc::clone(progress));
    let state = ProcessParts::new()
        .with_part(ReactorsSource::new(move || theirs.reactors()))
        .with_part(SchedulerSource::new(move || steered.scheduler_handle()));
    let mut served = serve_control_socket(state);
    engine::run_perf(options, progress, &mut |progress| {
        if let (Some((_, relay)), Some(running)) = (&mut served, progress.reactors()) {
            relay.forward_events(&running);
        }
        watch(progress);
    })
}

/// Runs `sim` with a control socket.
pub(super) fn run_sim_with_rpc(options: &SimOptions, out: &mut dyn Write) -> Result<(), Error> {
    let _served = serve_control_socket(ProcessParts::new());
    crate::simulation::run_simulation(options, out)
}

/// RPC state of a process with these reactors.
pub(super) fn rpc_state_of_reactors(balanced: &BalancedReactors) -> ProcessParts {
    let (running, steering) =
        (reactors_handle(&balanced.reactors), balanced.balance.scheduler_handle().clone());
    ProcessParts::new()
        .with_part(ReactorsSource::new(move || Some(running.clone())))
        .with_part(SchedulerSource::new(move || Some(steering.clone())))
}

/// These reactors as an RPC object.
pub(super) fn reactors_handle(
    reactors: &tenmil_reactor::Reactors,
) -> tenmil_reactor::ReactorsHandle {
    tenmil_reactor::ReactorsHandle {
        directory: Arc::clone(reactors.registry()),
        clock: *reactors.clock(),
    }
}

/// Serves the control socket of this process for as long as the returned value lives.
///
/// The socket is optional: without it the process works, its events go to the log, and a note names the
/// reason. CPU frequencies that a killed process left changed are restored first.
pub(super) fn serve_control_socket(state: ProcessParts) -> Option<(RpcServer, EventRelay)> {
    match start_control_socket(state) {
        Ok(served) => Some(served),
        Err(why) => {
            subscribe_capacity(
                |new_events| tracing::info!(cause = %new_events.store, "{new_events}"),
            );
            subscribe_lost_writes(|new_events| tracing::warn!("{new_events}"));
            subscribe_mirror_events(|new_events| tracing::info!("{new_events}"));
            subscribe_stops(|new_events| tracing::warn!("{new_events}"));
            tracing::info!("`tenmil get` will not reach this process: {why}");
            None
        }
    }
}

fn start_control_socket(state: ProcessParts) -> Result<(RpcServer, EventRelay), String> {
    let directory = RuntimeDirectory::of_user().map_err(|error| error.to_string())?;
    restore_frequencies(&KernelFiles::live_system(), &directory, &|text| tracing::info!("{text}"));
    let (announcer, announced) =
        event_channel().map_err(|error| format!("make an event descriptor: {error}"))?;
    let log = crate::process_log::process_log().cloned();
    let state = state.with_part(ProgramInfo { version: env!("CARGO_PKG_VERSION"), log });
    let paths = tenmil_devices::tcp::paths_of_all();
    tenmil_rpc::subscribe_path_events(paths, announcer.clone());
    let state = state.with_part(paths.clone());
    let state = state.with_part(PoolCommands::new(tenmil::KINDS, announcer.clone()));
    let server = RpcServer::start(&directory, std::process::id(), &TABLE, state, announced)
        .map_err(|refused| refused.to_string())?;
    let event_sender = announcer.clone();
    subscribe_capacity(move |new_events| {
        tracing::info!(cause = %new_events.store, "{new_events}");
        event_sender.emit_capacity_event(new_events);
    });
    let event_sender = announcer.clone();
    subscribe_lost_writes(move |new_events| {
        tracing::warn!("{new_events}");
        event_sender.emit_lost_write(new_events);
    });
    let event_sender = announcer.clone();
    subscribe_mirror_events(move |new_events| {
        tracing::info!("{new_events}");
        event_sender.emit_mirror_event(new_events);
    });
    let event_sender = announcer.clone();
    subscribe_stops(move |new_events| {
        tracing::warn!("{new_events}");
        event_sender.emit_pool_stop(new_events);
    });
    Ok((server, EventRelay::new(announcer)))
}

/// Connects to the selected process.
pub(super) fn connect_to_process(whom: ProcessSelector) -> Result<RpcClient, Error> {
    let directory = runtime_directory()?;
    let pid = choose_process(whom.pid, &listening_processes(&directory)?)?;
    RpcClient::connect(&directory.socket_of(pid), RESPONSE_TIMEOUT).map_err(command_error)
}

/// The runtime directory with the sockets of this user's processes.
pub(super) fn runtime_directory() -> Result<RuntimeDirectory, Error> {
    RuntimeDirectory::of_user().map_err(|error| {
        Error::environment(error.to_string())
            .with_hint("find out what created it, and remove it if it is not needed")
    })
}

/// Process IDs of the processes that listen in `directory`.
pub(super) fn listening_processes(directory: &RuntimeDirectory) -> Result<Vec<u32>, Error> {
    directory.listening_processes().map_err(|error| {
        Error::environment(format!("look into {}: {error}", directory.path().display()))
    })
}

/// Selects the process with the given ID, or the only one that is running.
pub(super) fn choose_process(wanted: Option<u32>, running: &[u32]) -> Result<u32, Error> {
    match (wanted, running) {
        (Some(pid), _) if running.contains(&pid) => Ok(pid),
        (None, [pid]) => Ok(*pid),
        (None, []) => Err(Error::usage("no tenmil process of this user runs, expected one")
            .with_hint("start one that runs for a while, such as `tenmil perf emu:null -t 60`")),
        (None, _) => Err(Error::usage(format!(
            "{} tenmil processes run, expected --pid with one of {}",
            running.len(),
            processes_text(running)
        ))),
        (Some(pid), []) => Err(Error::usage(format!(
            "--pid {pid}: no tenmil process of this user runs, expected one"
        ))),
        (Some(pid), _) => Err(Error::usage(format!(
            "--pid {pid}: it is no tenmil process of this user that runs, expected one of {}",
            processes_text(running)
        ))),
    }
}

/// `4711 (tenmil perf), 4712 (tenmil perf -t 60)`.
fn processes_text(running: &[u32]) -> String {
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
pub(super) fn command_error(refusal: RpcError) -> Error {
    let RpcError { category, message, hint, .. } = refusal;
    Error { category, text: message, hint }
}

#[cfg(test)]
mod tests {
    use super::choose_process;

    #[test]
    fn only_process_is_selected_by_default() {
        assert_eq!(choose_process(None, &[7]), Ok(7));
        assert_eq!(choose_process(Some(8), &[7, 8]), Ok(8));
    }

    #[test]
    fn none_or_several_processes_are_an_error_that_lists_them() {
        let none = choose_process(None, &[]).unwrap_err();
        assert_eq!(none.category.exit_code(), 2);
        assert!(none.hint.unwrap().contains("tenmil perf"));
        let us = std::process::id();
        let several = choose_process(None, &[us, u32::MAX]).unwrap_err();
        assert!(several.text.starts_with("2 tenmil processes run, expected --pid with one of "));
        assert!(several.text.contains(&format!("{us} (")), "with its command line: {several}");
        assert!(several.text.ends_with("4294967295"), "{several}");
        let other = choose_process(Some(5), &[u32::MAX]).unwrap_err();
        assert!(other.text.starts_with("--pid 5: ") && other.text.ends_with("4294967295"));
        assert!(choose_process(Some(5), &[]).unwrap_err().text.starts_with("--pid 5: "));
    }
}
