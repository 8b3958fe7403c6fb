//! Server of an NVMe subsystem over NVMe/TCP.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use tenmil_base::{BlockDevice, Error};
use tenmil_block::{BdevDescriptor, BdevEvent};
use tenmil_devices::tcp::discovery_nqn_and_serial;
use tenmil_linux::socket::SocketOptions;
use tenmil_nvme_controller::controller::{
    NamespaceConfig, ReservationPersistenceMode, Subsystem, SubsystemConfig,
};
use tenmil_nvme_controller::namespace::RevocableCacheInstance;
use tenmil_serve::tcp::{
    AllowedHosts, ControllerModel, DiscoveryName, PlacementPolicy, Port, Server, ServerConfig,
    Service, ServiceLimits, SubsystemExportConfig, SubsystemSecurity, TargetEvent,
};
use tenmil_wire::cache_instance::CacheInstance;
use tenmil_wire::nqn;

use super::{ListenAddress, ProtocolServer, StartedServer, claim_of_device, open_listener};
use crate::export::{Export, NvmeTcpExport};
use crate::open_devices::DeviceClaim;
use crate::runtime::RuntimeServices;

/// Parts of a running server. Fields in the order in which they are dropped.
struct NvmeTcpServer {
    /// None after it has been closed.
    server: Option<Server>,
    service: Service,
    nqn: String,
    /// Released last, so that the devices are closed by the thread that stops the server.
    _claims: Vec<Arc<DeviceClaim>>,
}

/// Namespace whose device events are handled.
struct ServedNamespace {
    nsid: u32,
    name: String,
    descriptor: Arc<BdevDescriptor>,
}

/// The only port of the service.
const PORT: u16 = 1;

/// Starts the server. Blocks.
pub(super) fn start_nvme_tcp_server(
    services: &RuntimeServices,
    export: &Export,
    asked: &NvmeTcpExport,
) -> Result<StartedServer, Error> {
    check_export(export, asked)?;
    let address = parse_socket_address(&export.address)?;
    let claims = asked.namespaces.iter().map(|device| claim_of_device(services, device));
    let claims = claims.collect::<Result<Vec<_>, _>>()?;
    let (subsystem, served) = new_subsystem(asked, &claims)?;
    let listen_socket = open_listener(&ListenAddress::Tcp(address))?;
    let address = match listen_socket.address() {
        ListenAddress::Tcp(found) => *found,
        ListenAddress::Path(_) => address,
    };
    let regions = &services.devices.regions;
    let service = Service::new(regions, ServiceLimits::default())?;
    let (discovery, serial) = discovery_nqn_and_serial(&address.to_string());
    service.set_discovery_name(DiscoveryName { nqn: discovery, serial })?;
    service.add_port(PORT, Port { address: Some(address), ..Port::default() });
    let hosts = match asked.hosts.is_empty() {
        true => AllowedHosts::Any,
        false => AllowedHosts::Listed(asked.hosts.clone()),
    };
    let config = SubsystemExportConfig {
        subsystem: subsystem.clone(),
        nqn: asked.nqn.clone(),
        hosts,
        ports: BTreeMap::from([(PORT, Vec::new())]),
        model: ControllerModel::Dynamic,
        masks: BTreeMap::new(),
        security: SubsystemSecurity::default(),
    };
    service.add_subsystem(config)?;
    let server = Server::start(ServerConfig {
        listen_sockets: vec![(listen_socket, PORT)],
        service: service.clone(),
        regions: regions.clone(),
        sockets: SocketOptions::default(),
        placement: PlacementPolicy::default(),
        reactors: Arc::clone(&services.registry),
        clock: services.devices.clock,
    });
    let server = server.map_err(|error| Error::environment(error.to_string()))?;
    let addresses = server.addresses();
    let uris = served.iter().map(|one| format!("tcp://{address}/{}?ns={}", asked.nqn, one.nsid));
    let uris = uris.collect();
    let nqn = asked.nqn.clone();
    let events = service.clone();
    let handle_events = move || {
        log_events(&events);
        served.iter().for_each(|namespace| namespace.handle_events(&subsystem));
    };
    let protocol = NvmeTcpServer { server: Some(server), service, nqn, _claims: claims };
    let handle_events = Box::new(handle_events);
    Ok(StartedServer { protocol: Box::new(protocol), addresses, uris, handle_events })
}

/// Creates the subsystem with its namespaces, numbered from 1.
fn new_subsystem(
    asked: &NvmeTcpExport,
    claims: &[Arc<DeviceClaim>],
) -> Result<(Subsystem, Vec<ServedNamespace>), Error> {
    let serial = serial_number(&asked.nqn);
    let config = SubsystemConfig {
        nqn: asked.nqn.clone(),
        model: "tenmil target".to_owned(),
        ..SubsystemConfig::new(&serial, Vec::new())
    };
    let subsystem = Subsystem::new(config)?;
    let mut served = Vec::new();
    for (nsid, claim) in (1..).zip(claims) {
        let name = claim.open.device.name().to_owned();
        // Another server may share the device, and events have to reach the hosts of both.
        let descriptor = Arc::new(claim.descriptor.open_with_same_claim()?);
        let cache =
            tenmil_linux::random_id().map(|id| RevocableCacheInstance::new(CacheInstance(id)));
        let config = NamespaceConfig {
            nsid: Some(nsid),
            // Reservations end with the server, as the library keeps no state.
            persistence: ReservationPersistenceMode::None,
            is_read_only: descriptor.claim().is_read_only(),
            cache,
            ..NamespaceConfig::new(Arc::clone(&descriptor) as Arc<dyn BlockDevice>)
        };
        subsystem
            .add_namespace(config)
            .map_err(|why| why.with_context(format_args!("namespace {nsid}, {name}")))?;
        served.push(ServedNamespace { nsid, name, descriptor });
    }
    Ok((subsystem, served))
}

/// Checks names, and that hosts of other machines are allowed if they can reach the address.
fn check_export(export: &Export, asked: &NvmeTcpExport) -> Result<(), Error> {
    let refuse = |name: &str, why: &dyn std::fmt::Display| Error::usage(format!("`{name}`: {why}"));
    nqn::check_nqn(&asked.nqn).map_err(|why| refuse(&asked.nqn, &why))?;
    for host in &asked.hosts {
        nqn::check_nqn(host).map_err(|why| refuse(host, &why))?;
    }
    if asked.namespaces.is_empty() {
        let text = "there is no namespace, expected at least one";
        return Err(Error::usage(text).with_hint("Add devices: `Export::namespace`."));
    }
    let address = parse_socket_address(&export.address)?;
    if !address.ip().is_loopback() && asked.hosts.is_empty() && !export.allows_any {
        let text = "every host that reaches the address could connect without authentication, \
                    expected allowed hosts or an address of loopback";
        let hint = "Name the hosts with `Export::allow_host`, or call `Export::allow_any_host`.";
        return Err(Error::usage(text).with_hint(hint));
    }
    Ok(())
}

fn parse_socket_address(text: &str) -> Result<SocketAddr, Error> {
    text.parse().map_err(|_| {
        Error::usage(format!("`{text}` is no address, expected one such as 127.0.0.1:4420"))
    })
}

/// Serial number derived from the NQN, so that it is the same after a restart.
fn serial_number(nqn: &str) -> String {
    let hash = nqn.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{hash:016x}")
}

/// Logs the events of connections that a person has to know.
fn log_events(service: &Service) {
    while let Some(event) = service.next_event() {
        match event {
            TargetEvent::Rejected { .. } | TargetEvent::Notice(_) | TargetEvent::Error(_) => {
                tracing::info!("{event}");
            }
            TargetEvent::Connected { .. }
            | TargetEvent::Accepted(_)
            | TargetEvent::Authenticated(_)
            | TargetEvent::Associated { .. }
            | TargetEvent::Disconnected { .. } => {}
        }
    }
}

impl ServedNamespace {
    /// Passes the events of its device on to the hosts.
    fn handle_events(&self, subsystem: &Subsystem) {
        while let Some(event) = self.descriptor.next_event() {
            match event {
                BdevEvent::Resized { .. } | BdevEvent::Overflowed { .. } => {
                    subsystem.reread_namespace_size(self.nsid)
                }
                BdevEvent::Removed => {
                    subsystem.remove_namespace(self.nsid);
                }
                BdevEvent::MediumError { lba, blocks } => {
                    tracing::warn!("{} has lost {blocks} blocks from {lba} on", self.name);
                }
                BdevEvent::MediumChanged => {}
            }
        }
    }
}

impl ProtocolServer for NvmeTcpServer {
    fn start_closing(&mut self) {
        drop(self.server.take());
        self.service.remove_subsystem(&self.nqn);
        self.service.close_unassociated_connections();
    }

    fn is_closed(&self) -> bool {
        self.service.connection_count() == 0
    }
}
