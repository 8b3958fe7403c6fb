//! Server of a device over NBD.

use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::Error;
use tenmil_serve::nbd::{ExportConfig, ExportSet, ExportedDevice, NbdEvent, Server, ServerConfig};

use super::{ListenAddress, ProtocolServer, StartedServer, claim_of_device, open_listener};
use crate::export::{Export, NbdExport, NbdTls};
use crate::open_devices::DeviceClaim;
use crate::runtime::RuntimeServices;

/// Parts of a running server. Fields in the order in which they are dropped.
struct NbdServer {
    /// None after it has been closed.
    server: Arc<Mutex<Option<Server>>>,
    exports: ExportSet,
    /// Released last, so that the device is closed by the thread that stops the server.
    _claim: Arc<DeviceClaim>,
}

/// Largest number of connections.
const CONNECTIONS_MAX: usize = 64;

/// Starts the server. Blocks.
pub(super) fn start_nbd_server(
    services: &RuntimeServices,
    export: &Export,
    exported: &NbdExport,
) -> Result<StartedServer, Error> {
    let NbdExport { devices, tls } = exported;
    let [(name, device)] = devices.as_slice() else {
        let text = format!("there are {} devices, expected one", devices.len());
        return Err(Error::usage(text).with_hint("Add one device: `Export::device`."));
    };
    let claim = claim_of_device(services, device)?;
    let is_read_only = claim.descriptor.claim().is_read_only();
    let address = match export.address.parse() {
        Ok(address) => ListenAddress::Tcp(address),
        Err(_) if export.address.starts_with('/') || export.address.starts_with("./") => {
            ListenAddress::Path(export.address.clone().into())
        }
        Err(_) => {
            let text = format!(
                "`{}` is no address, expected one such as 127.0.0.1:10809, /run/disk.sock or ./disk.sock",
                export.address
            );
            return Err(Error::usage(text));
        }
    };
    let is_remote = matches!(&address, ListenAddress::Tcp(at) if !at.ip().is_loopback());
    let is_authenticated = tls.as_ref().is_some_and(NbdTls::authenticates_clients);
    if is_remote && !is_read_only && !is_authenticated && !export.allows_any {
        let text = "every client that reaches the address could write without authentication, expected \
                    an address of loopback or a device that is open read-only";
        let hint = "Open the device with Access::ReadOnly, set TLS that authenticates clients, or call \
                    `Export::allow_any_host`.";
        return Err(Error::usage(text).with_hint(hint));
    }
    let config = ExportConfig {
        name: name.clone(),
        description: claim.open.description.clone(),
        uri: device.name().to_owned(),
        device: &claim.open.device,
        limits: tenmil_block::QosLimits::default(),
        is_read_only,
        allows_resize: false,
        regions: &services.devices.regions,
    };
    let served = Arc::new(ExportedDevice::from_descriptor(
        config,
        claim.descriptor.open_with_same_claim()?,
    )?);
    let server = Server::start(ServerConfig {
        listen_sockets: vec![open_listener(&address)?],
        exports: vec![Arc::clone(&served)],
        regions: services.devices.regions.clone(),
        reactors: Arc::clone(&services.registry),
        clock: services.devices.clock,
        connections_max: CONNECTIONS_MAX,
        per_address_max: ServerConfig::default_per_address_max(CONNECTIONS_MAX),
        idle_max: None,
        tls: tls.as_ref().map(NbdTls::of_listener).transpose()?,
    });
    let server = server.map_err(|error| Error::environment(error.to_string()))?;
    let addresses = server.addresses();
    let requires_tls = tls.as_ref().is_some_and(NbdTls::is_required);
    let uris = addresses.iter().map(|address| nbd_uri(address, name, requires_tls)).collect();
    let exports = server.exports().clone();
    let server = Arc::new(Mutex::new(Some(server)));
    let events = Arc::clone(&server);
    let handle_events = Box::new(move || {
        // Locked only for a moment, when the server is closed.
        if let Ok(server) = events.try_lock() {
            server.iter().for_each(log_events);
        }
    });
    let protocol = Box::new(NbdServer { server, exports, _claim: claim });
    Ok(StartedServer { protocol, addresses, uris, handle_events })
}

/// Logs the events of connections that a person has to know.
fn log_events(server: &Server) {
    while let Some(event) = server.next_event() {
        if let NbdEvent::Error(text) = event {
            tracing::info!("{text}");
        }
    }
}

/// URI of the NBD specification.
fn nbd_uri(address: &ListenAddress, name: &str, requires_tls: bool) -> String {
    let scheme = if requires_tls { "nbds" } else { "nbd" };
    let name: String = name.bytes().map(percent_encoded).collect();
    match address {
        ListenAddress::Tcp(address) => format!("{scheme}://{address}/{name}"),
        ListenAddress::Path(path) => format!("{scheme}+unix:///{name}?socket={}", path.display()),
    }
}

/// A byte of a name, escaped unless it may stand in a URI.
fn percent_encoded(byte: u8) -> String {
    match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
            char::from(byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    }
}

impl ProtocolServer for NbdServer {
    fn start_closing(&mut self) {
        let server = self.server.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Joins the thread that accepts, so that the list of connections is complete.
        drop(server);
        self.exports.disconnect_all();
    }

    fn is_closed(&self) -> bool {
        self.exports.has_no_connections()
    }

    fn replace_nbd_tls(&self, tls: &NbdTls) -> Result<(), Error> {
        let server = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        let tls = tls.of_listener()?;
        server.as_ref().map_or(Ok(()), |server| server.replace_tls(&tls))
    }
}
