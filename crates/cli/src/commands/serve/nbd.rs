//! NBD: one device, with or without TLS.

mod tls;

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use serde_json::json;
use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_block::{Bdev, BdevOptions, OpenedDevice, Opener, QosLimiter, QosLimits, RateLimit};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;
use tenmil_linux::socket_stream::ListenAddress;
use tenmil_rpc::{DeviceControls, NbdExports};
use tenmil_serve::nbd::{ExportConfig, ExportedDevice, Server, ServerConfig};

pub(super) use self::tls::{NbdTlsArguments, load_tls};
use super::event_log;
use super::sandbox::{self, ServedParts};
use super::service_manager;
use super::transport::ServeTransport;
use super::{
    REGIONS_MAX, ServeArguments, WATCH_INTERVAL, event_sender, log_slow_io, open_listener,
    start_reactors,
};
use crate::commands::rpc_endpoint;

/// NBD clients that may be connected at once.
pub(super) const CLIENTS_MAX: u32 = 64;

/// Serves one device over NBD until SIGTERM or Ctrl-C.
pub(super) fn serve_nbd(
    arguments: &ServeArguments,
    uri: &Uri,
    listen: &[(ListenAddress, bool)],
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    check_writable_export_is_local(arguments, listen)?;
    let required: Vec<bool> = listen.iter().map(|(_, required)| *required).collect();
    let tls = arguments.nbd_tls.load(required.clone())?;
    let clock = Clock::start();
    let regions = RegionTable::new(REGIONS_MAX);
    let opener = Opener { regions: &regions, clock, seed: 1, kinds: tenmil::KINDS };
    let uri = uri.clone();
    let requested = if arguments.read_only { uri.clone().read_only() } else { uri.clone() };
    let opened = opener.open(&requested).map_err(|error| Error {
        category: error.category(),
        text: format!("open {error}"),
        hint: None,
    })?;
    let devices = DeviceControls::new(opened.handles.clone());
    let served = Arc::new(claim_device_for_export(arguments, &uri, opened, &regions, clock)?);
    let listen_sockets =
        listen.iter().map(|(address, _)| open_listener(address)).collect::<Result<Vec<_>, _>>()?;
    served.slow_io().set_threshold(arguments.slow_io);
    let balanced = start_reactors(arguments, &clock)?;
    let reactors = &balanced.reactors;
    let connections_max = arguments.max_connections.unwrap_or(CLIENTS_MAX);
    let server = Server::start(ServerConfig {
        listen_sockets,
        exports: vec![Arc::clone(&served)],
        regions: regions.clone(),
        reactors: Arc::clone(reactors.registry()),
        clock,
        connections_max: connections_max as usize,
        per_address_max: arguments.connections_per_address.map_or_else(
            || ServerConfig::default_per_address_max(connections_max as usize),
            |most| most as usize,
        ),
        idle_max: arguments.nbd_idle_timeout,
        tls,
    });
    let server = server.map_err(|error| Error::environment(format!("serve: {error}")))?;
    tenmil_linux::storage_file::commit_created()?;
    let addresses = server.addresses();
    let mut parts = ServedParts::at_addresses(ServeTransport::Nbd, vec![&uri], &addresses);
    parts.read_again = arguments.nbd_tls.files();
    sandbox::run_as_user(arguments, &parts)?;
    let state = rpc_endpoint::rpc_state_of_reactors(&balanced);
    let state =
        state.with_part(NbdExports::new(vec![Arc::clone(&served)], clock)).with_part(devices);
    let mut requested = rpc_endpoint::serve_control_socket(state);
    sandbox::drop_rights(arguments, &parts, event_sender(&requested));
    rpc_endpoint::set_ready(&requested);
    service_manager::announce_ready(out, &ready_message(arguments, &served, &server, &required))?;
    while !tenmil_linux::signal::is_stop_requested() {
        while let Some(new_events) = server.next_event() {
            event_log::log_nbd_event(served.export().name(), &new_events);
            if let Some((_, relay)) = &requested {
                relay.event_sender().emit_export_event(served.export().name(), &new_events);
            }
        }
        if tenmil_linux::signal::take_reload_request() {
            let applied = service_manager::report_reload(
                || reload_tls(arguments, &server, &required),
                |applied| applied.as_ref().err().map(|refused| refused.text.clone()),
            );
            if let Some(announcer) = event_sender(&requested) {
                announcer.emit_tls_reload(served.export().name(), applied.err().as_ref());
            }
        }
        log_slow_io(served.slow_io().log(), event_sender(&requested));
        sandbox::log_denied_calls(event_sender(&requested));
        service_manager::keep_alive(reactors);
        if let Some((_, relay)) = &mut requested {
            relay.forward_events(&rpc_endpoint::reactors_handle(reactors));
        }
        tenmil_linux::named_thread::sleep(WATCH_INTERVAL);
    }
    service_manager::report_stopping();
    // First the listeners are closed, then the connections are drained: completed requests are still
    // replied to.
    drop(server);
    balanced.stop();
    Ok(ExitCode::SUCCESS)
}

/// Reads the certificate and the keys again, for clients that connect from now on. After an error the
/// former ones stay.
fn reload_tls(arguments: &ServeArguments, server: &Server, required: &[bool]) -> Result<(), Error> {
    let tls = arguments.nbd_tls.load(required.to_vec());
    let applied = tls.and_then(|tls| match tls {
        Some(tls) => server.replace_tls(&tls),
        None => Ok(()),
    });
    match &applied {
        Ok(()) => tracing::info!("TLS: the certificate and the keys were read again"),
        Err(refused) => tracing::warn!("TLS: nothing is changed: {}", refused.text),
    }
    applied
}

/// Rejects writable exports on non-loopback addresses, unless all clients there authenticate by TLS or
/// they were explicitly allowed.
pub(super) fn check_writable_export_is_local(
    arguments: &ServeArguments,
    listen: &[(ListenAddress, bool)],
) -> Result<(), Error> {
    let authenticates = arguments.nbd_tls.authenticates_clients();
    let is_open = |(address, requires_tls): &&(ListenAddress, bool)| {
        let is_remote = matches!(address, ListenAddress::Tcp(at) if !at.ip().is_loopback());
        is_remote && !(*requires_tls && authenticates)
    };
    let Some((remote, requires_tls)) = listen.iter().find(is_open) else { return Ok(()) };
    if arguments.read_only || arguments.allow_remote_write {
        return Ok(());
    }
    let text = format!(
        "listen at {}: other machines could write there without authentication, expected an address of \
         loopback, --read-only or --allow-remote-write",
        listen_text(remote, *requires_tls)
    );
    let hint =
        "Add --read-only, or --allow-remote-write if every client that can connect may write.";
    Err(Error::usage(text).with_hint(hint))
}

/// Wraps the opened device in a block-layer device and claims it for the export.
fn claim_device_for_export(
    arguments: &ServeArguments,
    uri: &Uri,
    opened: OpenedDevice,
    regions: &RegionTable,
    clock: Clock,
) -> Result<ExportedDevice, Error> {
    let ServeArguments { export_name, read_only, allow_resize, limit_iops, limit_bytes, .. } =
        arguments;
    let refuse = |why: Error| Error::new(why.category(), format!("serve {uri:#}: {why}"));
    let uri = uri.to_string();
    let total = RateLimit { iops: *limit_iops, bytes: *limit_bytes };
    let limiter = QosLimiter::new(QosLimits { total, ..QosLimits::default() });
    let options = BdevOptions { limiter: Some(limiter.clone()), ..BdevOptions::new(clock, 1) };
    let device = Bdev::new(&uri, opened.medium, options).map_err(refuse)?;
    let plan = ExportConfig {
        name: export_name.clone().unwrap_or_else(|| uri.clone()),
        description: opened.description,
        uri: uri.clone(),
        device: &device,
        limiter: Some(limiter),
        is_read_only: *read_only,
        allows_resize: *allow_resize,
        regions,
    };
    ExportedDevice::new(plan).map_err(refuse)
}

/// The ready message, as text or JSON.
fn ready_message(
    arguments: &ServeArguments,
    served: &ExportedDevice,
    server: &Server,
    requires_tls: &[bool],
) -> String {
    let bound = server.addresses();
    let addresses = || bound.iter().zip(requires_tls.iter().copied());
    let listens: Vec<String> = addresses().map(|(at, tls)| listen_text(at, tls)).collect();
    if !arguments.json {
        return format!("ready {}\n", listens.join(" "));
    }
    let export = served.export();
    let line = json!({
        "ready": true,
        "listen": listens,
        "connect": addresses().map(|(at, tls)| nbd_uri(at, tls)).collect::<Vec<_>>(),
        "uri": served.uri(),
        "name": export.name(),
        "description": export.description(),
        "size_bytes": export.size_bytes(),
        "block_size": export.block_size(),
        "read_only": export.is_read_only(),
    });
    format!("{line}\n")
}

/// An address in the syntax of `--listen`.
fn listen_text(address: &ListenAddress, requires_tls: bool) -> String {
    let scheme = if requires_tls { "nbds" } else { "nbd" };
    match address {
        ListenAddress::Path(path) => format!("{scheme}:{}", path.display()),
        ListenAddress::Tcp(port) => format!("{scheme}://{port}"),
    }
}

/// An address as an NBD URI.
fn nbd_uri(address: &ListenAddress, requires_tls: bool) -> String {
    let scheme = if requires_tls { "nbds" } else { "nbd" };
    match address {
        ListenAddress::Path(path) => format!("{scheme}+unix:///?socket={}", path.display()),
        ListenAddress::Tcp(port) => format!("{scheme}://{port}"),
    }
}
