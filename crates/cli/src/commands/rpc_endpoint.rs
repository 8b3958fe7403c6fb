//! RPC endpoints: the control socket of this process, and lookup of other processes.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use tenmil_base::{Error, Span};
use tenmil_drivers::mirror::subscribe_mirror_events;
use tenmil_drivers::pool::{subscribe_capacity, subscribe_stops};
use tenmil_drivers::subscribe_lost_writes;
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::process_stats::command_line;
use tenmil_linux::running_processes::{ListeningProcess, ProcessSearch};
use tenmil_linux::runtime_directory::RuntimeDirectory;
use tenmil_rpc::pool_commands::PoolCommands;
use tenmil_rpc::{
    ControlEndpoint, ControlListeners, EventRelay, HttpCredentials, OtlpExport, ProcessParts,
    ProgramInfo, ReactorsSource, RpcClient, RpcError, RpcServer, SchedulerSource, TABLE,
    event_channel,
};

use super::control_options::{
    CONTROL_VARIABLE, PreparedControl, read_certificate, read_public, read_token, take_prepared,
};
use tenmil_bench::balance::{BalancedReactors, restore_frequencies};
use tenmil_bench::perf::engine;
use tenmil_bench::perf::perf_options::PerfOptions;
use tenmil_bench::perf::perf_result::PerfResult;
use tenmil_bench::perf::progress::RunProgress;

/// Selects the process to call.
#[derive(Clone, Debug, Default, Args)]
pub(super) struct ProcessSelector {
    /// Process to contact; may be omitted if only one is running
    #[arg(long, value_name = "N")]
    pub(super) pid: Option<u32>,

    /// Process to contact, by the name that its --instance gave it
    #[arg(long, value_name = "NAME", conflicts_with = "pid")]
    pub(super) instance: Option<String>,

    /// Control socket of the process to contact, or its URL, https://HOST:PORT
    /// [default: $TENMIL_CONTROL]
    #[arg(long, value_name = "PATH", conflicts_with_all = ["pid", "instance"])]
    pub(super) control: Option<PathBuf>,

    /// Authority that has signed the certificate of the process at https://, a PEM file
    /// [default: $TENMIL_CONTROL_CA]
    #[arg(long, value_name = "FILE")]
    control_ca: Option<PathBuf>,

    /// Certificate chain of this client for https://, a PEM file [default: $TENMIL_CONTROL_CERTIFICATE]
    #[arg(long, value_name = "FILE", requires = "control_key")]
    control_certificate: Option<PathBuf>,

    /// Private key of --control-certificate, a PEM file that only its owner may access
    /// [default: $TENMIL_CONTROL_KEY]
    #[arg(long, value_name = "FILE", requires = "control_certificate")]
    control_key: Option<PathBuf>,

    /// File with the token of the process at https:// or http:// [default: $TENMIL_CONTROL_TOKEN]
    #[arg(long, value_name = "FILE")]
    control_token: Option<PathBuf>,
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
    set_ready(&served);
    engine::run_perf(options, progress, &mut |progress| {
        if let (Some((_, relay)), Some(running)) = (&mut served, progress.reactors()) {
            relay.forward_events(&running);
        }
        watch(progress);
    })
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

/// Serves the control socket of this process for as long as the returned value lives. The process is
/// starting until [`set_ready`].
///
/// The socket in the runtime directory is optional: without it the process works, its events go to the
/// log, and a note names the reason. CPU frequencies that a killed process left changed are restored
/// first.
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

/// Records that the process serves what it was started for, as `/readyz` reports it.
pub(super) fn set_ready(served: &Option<(RpcServer, EventRelay)>) {
    if let Some((server, _)) = served {
        server.readiness().set_ready();
    }
}

/// Adds the socket in the runtime directory to the listeners of the command line. It may be missing if
/// there are others.
fn open_listeners() -> Result<(ControlListeners, Option<OtlpExport>), String> {
    let PreparedControl { mut listeners, instance, otlp } = take_prepared();
    let opened = RuntimeDirectory::of_user().map_err(|error| error.to_string());
    let opened = opened.and_then(|directory| {
        restore_frequencies(&KernelFiles::live_system(), &directory, &|text| {
            tracing::info!("{text}")
        });
        let added =
            listeners.add_process_socket(&directory, std::process::id(), instance.as_deref());
        added.map_err(|refused| refused.to_string())
    });
    match opened {
        Err(why) if listeners.is_empty() => Err(why),
        Err(why) => {
            tracing::info!("`tenmil get` reaches this process with --control only: {why}");
            Ok((listeners, otlp))
        }
        Ok(()) => Ok((listeners, otlp)),
    }
}

fn start_control_socket(state: ProcessParts) -> Result<(RpcServer, EventRelay), String> {
    let (listeners, otlp) = open_listeners()?;
    let (announcer, announced) =
        event_channel().map_err(|error| format!("make an event descriptor: {error}"))?;
    let log = crate::process_log::process_log().cloned();
    let state = state.with_part(ProgramInfo { version: env!("CARGO_PKG_VERSION"), log });
    let paths = tenmil_devices::tcp::paths_of_all();
    tenmil_rpc::subscribe_path_events(paths, announcer.clone());
    let state = state.with_part(paths.clone());
    let state = state.with_part(PoolCommands::new(tenmil::KINDS, announcer.clone()));
    let state = match otlp {
        Some(export) => state.with_part(export),
        None => state,
    };
    let server = RpcServer::start_at(listeners, &TABLE, state, announced)
        .map_err(|refused| refused.to_string())?;
    for (address, has_tls) in server.tcp_addresses() {
        let scheme = if *has_tls { "https" } else { "http" };
        tracing::info!("HTTP API at {scheme}://{address}/");
    }
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
pub(super) fn connect_to_process(whom: &ProcessSelector) -> Result<RpcClient, Error> {
    let endpoint = match whom.endpoint()? {
        Some(endpoint) => endpoint,
        None => ControlEndpoint::Socket(choose_process(whom, &process_search()?)?.socket),
    };
    RpcClient::connect_to(&endpoint, RESPONSE_TIMEOUT).map_err(command_error)
}

impl ProcessSelector {
    /// Socket or URL that the command line or the environment names.
    pub(super) fn endpoint(&self) -> Result<Option<ControlEndpoint>, Error> {
        if self.pid.is_some() || self.instance.is_some() {
            return Ok(None);
        }
        let Some(path) = or_variable(&self.control, CONTROL_VARIABLE) else { return Ok(None) };
        match path.to_str().filter(|text| ControlEndpoint::is_url(text)) {
            Some(url) => ControlEndpoint::from_url(url, self.credentials()?).map(Some),
            None => Ok(Some(ControlEndpoint::Socket(path))),
        }
    }

    /// Reads the files of the options for a TCP port.
    fn credentials(&self) -> Result<HttpCredentials, Error> {
        let ca = or_variable(&self.control_ca, "TENMIL_CONTROL_CA");
        let chain = or_variable(&self.control_certificate, "TENMIL_CONTROL_CERTIFICATE");
        let key = or_variable(&self.control_key, "TENMIL_CONTROL_KEY");
        let token = or_variable(&self.control_token, "TENMIL_CONTROL_TOKEN");
        let certificate = match (chain, key) {
            (Some(chain), Some(key)) => Some(read_certificate(&chain, &key)?),
            (None, None) => None,
            _ => {
                let text = "TENMIL_CONTROL_CERTIFICATE and TENMIL_CONTROL_KEY: one is missing, \
                            expected both or none";
                return Err(Error::usage(text));
            }
        };
        Ok(HttpCredentials {
            ca_pem: ca.as_deref().map(read_public).transpose()?,
            certificate,
            token: token.as_deref().map(read_token).transpose()?,
        })
    }
}

/// Value of an option, or else of the variable.
fn or_variable(option: &Option<PathBuf>, variable: &str) -> Option<PathBuf> {
    let variable = || std::env::var_os(variable).filter(|path| !path.is_empty());
    option.clone().or_else(|| variable().map(PathBuf::from))
}

/// Search for the processes that this user may control.
pub(super) fn process_search() -> Result<ProcessSearch, Error> {
    ProcessSearch::of_user().map_err(|error| {
        Error::environment(error.to_string())
            .with_hint("find out what created it, and remove it if it is not needed")
    })
}

/// Selects the process with the given identifier or name, or the only one that is running.
pub(super) fn choose_process(
    wanted: &ProcessSelector,
    search: &ProcessSearch,
) -> Result<ListeningProcess, Error> {
    let unreadable = |error: io::Error| {
        let path = search.own_directory().path().display();
        Error::environment(format!("look into {path}: {error}"))
    };
    let (option, found) = match (wanted.pid, &wanted.instance) {
        (Some(pid), _) => (format!("--pid {pid}"), search.find_pid(pid)),
        (None, Some(name)) => (format!("--instance {name}"), search.find_instance(name)),
        (None, None) => {
            return only_process(search.processes().map_err(unreadable)?);
        }
    };
    if let Some(process) = found.map_err(unreadable)? {
        return Ok(process);
    }
    let running = search.all_processes().map_err(unreadable)?;
    Err(Error::usage(if running.is_empty() {
        format!("{option}: no tenmil process of this user runs, expected one")
    } else {
        let listed = processes_text(&running);
        format!(
            "{option}: it is no tenmil process of this user that runs, expected one of {listed}"
        )
    }))
}

fn only_process(mut running: Vec<ListeningProcess>) -> Result<ListeningProcess, Error> {
    match (running.pop(), running.len()) {
        (Some(process), 0) => Ok(process),
        (None, _) => Err(Error::usage("no tenmil process of this user runs, expected one")
            .with_hint("start one that runs for a while, such as `tenmil perf emu:null -t 60`")),
        (Some(last), others) => {
            running.push(last);
            Err(Error::usage(format!(
                "{} tenmil processes run, expected --pid with one of {}",
                others + 1,
                processes_text(&running)
            )))
        }
    }
}

/// `4711 (tenmil perf), 4712 (db: tenmil serve …)`.
fn processes_text(running: &[ListeningProcess]) -> String {
    let one = |process: &ListeningProcess| {
        let ListeningProcess { pid, instance, .. } = process;
        let name = instance.as_ref().map(|name| format!("{name}: ")).unwrap_or_default();
        match command_line(*pid) {
            Some(words) => format!("{pid} ({name}{})", shortened(&words)),
            None => pid.to_string(),
        }
    };
    running.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// Begin of a command line, on one line.
pub(super) fn shortened(words: &[String]) -> String {
    let words = words.join(" ");
    words.chars().filter(|c| !tenmil_base::text::is_terminal_control(*c)).take(60).collect()
}

/// Converts an RPC error of the server or client to a command error.
pub(super) fn command_error(refusal: RpcError) -> Error {
    let RpcError { category, message, hint, .. } = refusal;
    Error { category, text: message, hint }
}

#[cfg(test)]
mod tests {
    use tenmil_linux::running_processes::{ListeningProcess, ProcessSearch};
    use tenmil_linux::runtime_directory::RuntimeDirectory;

    use super::{ProcessSelector, choose_process, only_process};

    fn process(pid: u32, instance: Option<&str>) -> ListeningProcess {
        let instance = instance.map(str::to_owned);
        ListeningProcess { pid, uid: 0, instance, socket: "/run/x".into() }
    }

    #[test]
    fn only_process_is_selected_by_default() {
        assert_eq!(only_process(vec![process(7, None)]).unwrap().pid, 7);
    }

    #[test]
    fn none_or_several_processes_are_an_error_that_lists_them() {
        let none = only_process(Vec::new()).unwrap_err();
        assert_eq!(none.category.exit_code(), 2);
        assert!(none.hint.unwrap().contains("tenmil perf"));
        let us = std::process::id();
        let several = only_process(vec![process(us, Some("db")), process(u32::MAX, None)]);
        let several = several.unwrap_err();
        assert!(several.text.starts_with("2 tenmil processes run, expected --pid with one of "));
        assert!(several.text.contains(&format!("{us} (db: ")), "with its command line: {several}");
        assert!(several.text.ends_with("4294967295"), "{several}");
    }

    #[test]
    fn process_that_does_not_run_is_named() {
        let root = tempfile::tempdir().unwrap();
        let directory = RuntimeDirectory::at_path(root.path().join("run")).unwrap();
        let search = ProcessSearch::in_directory(directory.clone());
        let by_pid = ProcessSelector { pid: Some(5), ..ProcessSelector::default() };
        let refused = choose_process(&by_pid, &search).unwrap_err();
        assert!(refused.text.starts_with("--pid 5: no tenmil process"), "{refused}");
        let _other = std::os::unix::net::UnixListener::bind(directory.socket_of(7)).unwrap();
        let refused = choose_process(&by_pid, &search).unwrap_err();
        assert!(refused.text.contains("expected one of 7"), "{refused}");
        let by_name = ProcessSelector { instance: Some("a".into()), ..ProcessSelector::default() };
        let refused = choose_process(&by_name, &search).unwrap_err();
        assert!(refused.text.starts_with("--instance a: "), "{refused}");
    }
}
