//! `tenmil serve` over NVMe/TCP: start, reload on SIGHUP, and shutdown.

mod config_from_arguments;
mod connection_limits;
mod live_config;
mod ready_message;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use tenmil_base::Span;
use tenmil_drivers::LeaseEnd;
use tenmil_linux::{Clock, NamedThread};
use tenmil_rpc::target_config::{NbdListener, SharedConfig, TargetConfig};
use tenmil_rpc::{
    ConfigurationAction, ConfigurationChange, ConfigurationRequest, DeviceControls, ErrorCode,
    EventSender, GroupSession, NbdExports, NvmeConnections, RateLimits, RpcError,
    TargetConfiguration,
};
use tenmil_serve::nbd::ExportEvent;
use tenmil_serve::tcp::{DiscoveryName, Server, ServerConfig, Service, StateDirectory};

pub(super) use self::config_from_arguments::config_from_arguments;
pub(super) use self::live_config::ConfigWithText;
use self::live_config::{
    ApplyError, ExportContext, GroupMembership, LiveConfig, LiveExports, LiveNamespace,
    LiveSubsystem, TargetContext,
};
use self::ready_message::ready_message;
use super::event_log;
use super::sandbox::{self, ServedParts};
use super::service_manager;
use super::transport::ServeTransport;
use super::{
    REGIONS_MAX, ServeArguments, WATCH_INTERVAL, event_sender, log_slow_io, read_configuration,
    start_reactors,
};
use crate::commands::control_options::reload_credentials;
use crate::commands::rpc_endpoint;
use crate::flight_record;
use tenmil_bench::balance::BalancedReactors;
use tenmil_devices::pcie::regions_for;
use tenmil_devices::tcp::discovery_nqn_and_serial;

use super::socket_options;
use tenmil_base::Error;

/// Interval at which the demands of a gateway group are executed.
const GROUP_INTERVAL: Span = Span::from_ms(5);
/// Time limit for handing over the ANA groups of a gateway group. After it, their lease ends.
const LEAVE_MAX: Span = Span::from_ms(1_500);
/// Time limit of a shutdown, below the 5 seconds after which a service manager kills the process.
const END_MAX: Span = Span::from_secs(4);
const END_INTERVAL: Span = Span::from_ms(10);

/// Serves until SIGTERM or Ctrl-C.
pub(super) fn serve_nvme_tcp(
    arguments: &ServeArguments,
    requested: ConfigWithText,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let config = &requested.config;
    let (sockets, placement) = socket_options::parse_socket_options(&arguments.socket)?;
    let clock = Clock::start();
    let namespaces = config.subsystems.iter().flat_map(|subsystem| &subsystem.namespaces);
    let regions = regions_for(namespaces.map(|namespace| &namespace.uri), REGIONS_MAX);
    let limits = connection_limits::service_limits(arguments, config)
        .map_err(|unfit| apply_error_in_file(arguments, unfit))?;
    let service = Service::new(&regions, limits).map_err(|why| {
        let refused = Error::environment(why);
        apply_error_in_file(
            arguments,
            ApplyError { refused, line: config.memory_line, key: "buffer-memory" },
        )
    })?;
    set_discovery_name(&service, config)?;
    let state = open_state_directory(config, &arguments.adopt_reservations)
        .map_err(|unfit| apply_error_in_file(arguments, unfit))?;
    if let Some(path) = &config.state {
        flight_record::set_state_directory(path.clone());
    }
    let balanced = start_reactors(arguments, &clock)?;
    let reactors = &balanced.reactors;
    let server = Server::start(ServerConfig {
        listen_sockets: Vec::new(),
        service: service.clone(),
        regions: regions.clone(),
        sockets,
        placement,
        reactors: Arc::clone(reactors.registry()),
        clock,
    });
    let server = server.map_err(|error| Error::environment(format!("serve: {error}")))?;
    let devices = DeviceControls::default();
    let hands = devices.clone();
    let published = TargetConfiguration::default();
    let exports = NbdExports::new(Vec::new());
    let lease_end = LeaseEnd::default();
    let joined = config.group.as_ref();
    let shared = SharedConfig::of_config(&requested.text).unwrap_or_default();
    let joined = joined.map(|group| {
        GroupSession::start(group, &config.subsystems, &shared, lease_end.clone(), clock)
    });
    let (session, group_threads) = joined.transpose()?.unzip();
    let context = TargetContext {
        service: service.clone(),
        server,
        regions,
        clock,
        state,
        devices,
        published: published.clone(),
        file: arguments.config.clone(),
        nbd: ExportContext {
            reactors: Arc::clone(reactors.registry()),
            published: exports.clone(),
        },
        group: session.clone().map(|session| GroupMembership { session, lease_end }),
    };
    let mut standing = LiveConfig::new(context);
    standing
        .apply_config(requested)
        .map_err(|unfit| apply_error_in_file(arguments, unfit))?
        .into_result()?;
    tenmil_linux::storage_file::commit_created()?;
    sandbox::run_as_user(arguments, &served_parts(arguments, &standing))?;
    let state = rpc_endpoint::rpc_state_of_reactors(&balanced)
        .with_part(NvmeConnections(service.clone()))
        .with_part(RateLimits(service.clone()))
        .with_part(published.clone())
        .with_part(exports)
        .with_part(hands);
    let is_in_group = session.is_some();
    let state = match session {
        Some(session) => state.with_part(session),
        None => state,
    };
    let watch_interval = if is_in_group { GROUP_INTERVAL } else { WATCH_INTERVAL };
    // The control socket comes last, so that RPC clients see a complete configuration.
    let mut asking = rpc_endpoint::serve_control_socket(state);
    if let Some(announcer) = event_sender(&asking) {
        published.set_event_sender(announcer.clone());
    }
    sandbox::drop_rights(arguments, &served_parts(arguments, &standing), event_sender(&asking));
    rpc_endpoint::set_ready(&asking);
    service_manager::announce_ready(out, &ready_message(arguments, &standing))?;
    let mut refused = None;
    while !tenmil_linux::signal::is_stop_requested() {
        change_configuration(arguments, &mut standing, &published, event_sender(&asking));
        log_events(&service, event_sender(&asking));
        log_export_events(standing.exports(), event_sender(&asking));
        sandbox::log_denied_calls(event_sender(&asking));
        service_manager::keep_alive(reactors);
        standing.handle_device_events();
        standing.drive_group();
        refused = standing.refusal_of_group();
        if refused.is_some() {
            break;
        }
        if let Some((_, relay)) = &mut asking {
            relay.forward_events(&rpc_endpoint::reactors_handle(reactors));
        }
        tenmil_linux::named_thread::sleep(watch_interval);
    }
    service_manager::report_stopping();
    let leave_by = clock.now().after(LEAVE_MAX);
    while !standing.leave_group() && clock.now() < leave_by {
        tenmil_linux::named_thread::sleep(END_INTERVAL);
    }
    drop(group_threads);
    let ended = shut_down(clock, standing, balanced, &service);
    match refused {
        Some(refused) => Err(refused),
        None => ended,
    }
}

/// Names the discovery subsystem: its NQN and serial number identify this machine and these listeners.
fn set_discovery_name(service: &Service, requested: &TargetConfig) -> Result<(), Error> {
    let addresses: Vec<String> =
        requested.listeners.iter().map(|listener| listener.address.to_string()).collect();
    let (nqn, serial) = discovery_nqn_and_serial(&addresses.join(","));
    service.set_discovery_name(DiscoveryName { nqn, serial }).map_err(Error::environment)
}

/// Opens the state directory for reservations that persist across power loss, if one is configured.
fn open_state_directory(
    requested: &TargetConfig,
    adopted: &[String],
) -> Result<Option<StateDirectory>, ApplyError> {
    if requested.state.is_none() && !adopted.is_empty() {
        let text = "--adopt-reservations without a state directory, expected one";
        let refused =
            Error::usage(text).with_hint("name it with --state-dir, or `state-dir` in the file");
        return Err(ApplyError { refused, line: requested.state_line, key: "state-dir" });
    }
    let opened = requested.state.as_deref().map(StateDirectory::open).transpose();
    let opened =
        opened.and_then(|state| state.map(|state| state.adopt_records(adopted)).transpose());
    let refuse = |why| ApplyError {
        refused: Error::environment(why),
        line: requested.state_line,
        key: "state-dir",
    };
    opened.map_err(refuse)
}

/// Converts an apply error; with a configuration file it names the line and key.
fn apply_error_in_file(arguments: &ServeArguments, unfit: ApplyError) -> Error {
    match &arguments.config {
        Some(path) => unfit.in_file(path),
        None => unfit.refused,
    }
}

/// The parts on which the rights of the target depend.
fn served_parts<'a>(arguments: &ServeArguments, standing: &'a LiveConfig) -> ServedParts<'a> {
    let namespaces = standing.subsystems().iter().flat_map(LiveSubsystem::namespaces);
    let nbd_ports = standing.exports().listeners().filter_map(NbdListener::port);
    let uris: Vec<_> =
        namespaces.chain(standing.exports().devices()).map(LiveNamespace::uri).collect();
    // Exports by arguments get no new listeners and no keys.
    let is_nbd_alone = arguments.config.is_none() && standing.addresses().next().is_none();
    let needs_keys = !is_nbd_alone || uris.iter().any(|uri| sandbox::names_keys(uri));
    ServedParts {
        transport: if is_nbd_alone { ServeTransport::Nbd } else { ServeTransport::NvmeTcp },
        uris,
        socket_files: standing.exports().listeners().filter_map(NbdListener::socket_file).collect(),
        ports: standing.addresses().map(|address| address.port()).chain(nbd_ports).collect(),
        state: standing.state_directory(),
        keyring: standing.keyring_directory().filter(|_| needs_keys),
        // The configuration, or one that replaces it, may have keys there.
        may_read_kernel_keys: !is_nbd_alone && tenmil_keyring::KernelPsks::open().is_ok(),
        group_store: standing.group_store(),
        read_again: standing.nbd_files(),
    }
}

/// Logs the events of the service and forwards them to RPC clients.
fn log_events(service: &Service, announcer: Option<&EventSender>) {
    while let Some(new_events) = service.next_event() {
        event_log::log_target_event(&new_events);
        if let Some(announcer) = announcer {
            announcer.emit_target_event(&new_events);
        }
    }
    log_slow_io(service.slow_io_log(), announcer);
}

/// Logs the events of NBD exports and forwards their events to RPC clients.
fn log_export_events(exports: &LiveExports, announcer: Option<&EventSender>) {
    while let Some(ExportEvent { export, event }) = exports.next_event() {
        event_log::log_nbd_event(&export, &event);
        if let Some(announcer) = announcer {
            announcer.emit_export_event(&export, &event);
        }
    }
    for (export, _) in exports.exports() {
        log_slow_io(export.slow_io().log(), announcer);
    }
}

/// Applies the configuration file again after SIGHUP, and executes the requests of clients in their order.
fn change_configuration(
    arguments: &ServeArguments,
    standing: &mut LiveConfig,
    published: &TargetConfiguration,
    announcer: Option<&EventSender>,
) {
    let is_reload =
        |request: &ConfigurationRequest| matches!(request.action, ConfigurationAction::Reload);
    let (reloads, changes): (Vec<_>, Vec<_>) =
        published.take_requests().into_iter().partition(is_reload);
    let is_signaled = tenmil_linux::signal::take_reload_request();
    if is_signaled || !reloads.is_empty() {
        reload_credentials(announcer);
    }
    match &arguments.config {
        // One reload answers all that were requested.
        Some(path) if is_signaled || !reloads.is_empty() => {
            service_manager::report_reload(
                || reload_configuration(path, standing, published, announcer, reloads),
                Option::clone,
            );
        }
        None if is_signaled && standing.has_nbd_tls() => {
            let _ = service_manager::report_reload(
                || reload_nbd_tls(standing, announcer),
                |applied| applied.as_ref().err().cloned(),
            );
        }
        None if is_signaled => {
            tracing::info!("SIGHUP is ignored: there is no configuration file to read again");
            service_manager::report_reload(|| (), |()| None);
        }
        _ => {}
    }
    for request in changes {
        standing.execute_request(request, announcer);
    }
}

/// Reads the certificate and the keys of NBD again, for clients that connect from now on. After an error the
/// former ones stay, and the error is returned.
fn reload_nbd_tls(
    standing: &mut LiveConfig,
    announcer: Option<&EventSender>,
) -> Result<(), String> {
    let applied = standing.reload_nbd_tls();
    match &applied {
        Ok(()) => tracing::info!("TLS: the certificate and the keys were read again"),
        Err(refused) => tracing::warn!("TLS: nothing is changed: {}", refused.text),
    }
    if let Some(announcer) = announcer {
        for (export, _) in standing.exports().exports() {
            announcer.emit_tls_reload(export.export().name(), applied.as_ref().err());
        }
    }
    applied.map_err(|refused| refused.text)
}

/// Applies the configuration file again, and answers the clients that requested it; on an error the
/// running configuration stays. Returns why nothing was changed, if so.
fn reload_configuration(
    path: &Path,
    standing: &mut LiveConfig,
    published: &TargetConfiguration,
    announcer: Option<&EventSender>,
    requests: Vec<ConfigurationRequest>,
) -> Option<String> {
    let before = published.served();
    let read = read_configuration(path);
    let applied = read.and_then(|requested| {
        standing.apply_config(requested).map_err(|unfit| unfit.in_file(path))
    });
    let shown = path.display().to_string();
    match &applied {
        Ok(changes) => {
            let done = match changes.done.is_empty() {
                true => "nothing has changed".to_owned(),
                false => changes.done.join("; "),
            };
            event_log::log_configuration(&shown, &done, &changes.failed);
        }
        Err(refused) => {
            let hint = refused.hint.as_ref().map_or_else(String::new, |hint| format!(" ({hint})"));
            event_log::log_refused_configuration(&shown, &format!("{}{hint}", refused.text));
        }
    }
    let after = published.served();
    let served = [before.as_deref(), after.as_deref()];
    let difference = match served {
        [Some(before), Some(after)] => before.config.difference_to(&after.config),
        _ => Vec::new(),
    };
    if let Some(announcer) = announcer {
        let all = applied.as_ref().map(|changes| [&changes.done[..], &changes.failed].concat());
        let all = all.as_deref().map_err(|refused| refused.text.as_str());
        announcer.emit_configuration_event(&shown, all);
    }
    let change = applied.map(|changes| ConfigurationChange {
        difference,
        changes: changes.done,
        failed: changes.failed,
        saved_to: Some(path.to_path_buf()),
    });
    for request in requests {
        let done = change.as_ref().map_err(|refused| {
            let error = RpcError::usage(ErrorCode::Failed, refused.text.clone());
            match refused.hint() {
                Some(hint) => error.with_hint(hint.to_owned()),
                None => error,
            }
        });
        request.answer(done, served, announcer);
    }
    change.err().map(|refused| refused.text)
}

/// Shuts down: closes the listeners, drains connections and closes devices. What is not finished within
/// the time limit is abandoned and named in the error.
fn shut_down(
    clock: Clock,
    standing: LiveConfig,
    balanced: BalancedReactors,
    service: &Service,
) -> Result<ExitCode, Error> {
    let until = clock.now().after(END_MAX);
    let served = standing.subsystems().iter().flat_map(LiveSubsystem::namespaces);
    let served: Vec<String> = served.map(|one| one.uri().to_string()).collect();
    let abandoned = service.abandoned_commands();
    let leave = move |_: &tenmil_linux::StopFlag| {
        // Listeners first, then connections, then the devices they use.
        let devices = standing.close_listeners();
        balanced.stop();
        drop(devices);
    };
    let closing = NamedThread::spawn("ending", None, leave)
        .map_err(|error| Error::environment(format!("end: {error}")))?;
    let mut is_whole = true;
    while !closing.is_finished() && is_whole {
        tenmil_linux::named_thread::sleep(END_INTERVAL);
        is_whole = clock.now() < until;
    }
    log_events(service, None);
    if is_whole {
        closing.join();
        return match service.abandoned_commands() - abandoned {
            0 => Ok(ExitCode::SUCCESS),
            commands => Err(Error::remote(format!(
                "shut down: {commands} commands are abandoned: the devices have not completed them, expected them \
                 to: {}",
                served.join(", ")
            ))),
        };
    }
    // The thread may be blocked in a device for good; it ends with the process.
    std::mem::forget(closing);
    let (connected, devices) = (service.connection_count(), served.join(", "));
    // A device or a peer that does not respond, as for every other server.
    Err(Error::remote(format!(
        "end: {connected} connections and their devices are given up after {} s, expected them to \
         let go: {devices}",
        END_MAX.ns / 1_000_000_000
    )))
}
