//! Target process: the production service and its connections, on disks that outlive the process.

use std::collections::BTreeMap;

use tenmil_base::{Instant, Span};
use tenmil_dma::RegionTable;
use tenmil_nvme_controller::controller::{
    NamespaceConfig, ReservationPersistenceMode, Subsystem, SubsystemConfig,
};
use tenmil_nvme_controller::namespace::NamespaceIdentity;
use tenmil_serve::tcp::{
    AllowedHosts, ControllerModel, MemoryDirectory, Port, Service, ServiceLimits,
    SubsystemExportConfig, TargetConnection,
};

use crate::cluster_authentication::ClusterAuthentication;
use crate::cluster_network::ClusterNetwork;
use crate::exports::{self, BackgroundChannel, ExportOpener, SimExport};
use crate::injected_bugs::InjectedBugs;

/// A running target process.
pub(crate) struct TargetProcess {
    service: Service,
    connections: Vec<TargetConnection>,
    /// The process is stopped until this time.
    paused_until: Instant,
    state: MemoryDirectory,
    background: Vec<BackgroundChannel>,
}

/// Configuration of a process.
pub(crate) struct ProcessOptions {
    /// Number of its port.
    pub(crate) port: usize,
    /// Number of its incarnation, which identifies it to its disks.
    pub(crate) id: u64,
    /// Time from the end of an association until it is drained (CQT).
    pub(crate) quiesce: Span,
    /// Exports by subsystem NQN.
    pub(crate) subsystems: BTreeMap<String, Vec<SimExport>>,
    /// Start time.
    pub(crate) now: Instant,
    /// Storage of the reservations.
    pub(crate) state: MemoryDirectory,
    /// Authentication of its hosts, and their number.
    pub(crate) authentication: (ClusterAuthentication, usize),
    /// Injected bugs.
    pub(crate) bugs: InjectedBugs,
}

/// NQN of the subsystem of a tenant.
pub(crate) fn subsystem_nqn(tenant: usize) -> String {
    format!("nqn.2026-01.org.tenmil:tenant{tenant}")
}

impl TargetProcess {
    /// Starts the service and listens.
    ///
    /// # Errors
    ///
    /// The error of the service.
    pub(crate) fn start_service(
        options: ProcessOptions,
        network: &ClusterNetwork,
    ) -> Result<Self, String> {
        let ProcessOptions { port, id, quiesce, subsystems, now, state, authentication, bugs } =
            options;
        let (authentication, hosts) = authentication;
        let regions = RegionTable::new(16);
        let limits = ServiceLimits {
            memory_bytes: 4 << 20,
            connections_max: 32,
            transfer_bytes_max: 128 << 10,
            io_queues_max: 4,
            quiesce,
            injected_bugs: tenmil_serve::tcp::InjectedBugs {
                unfenced_writes: bugs.unfenced_writes,
                unknown_resets_done: bugs.unknown_resets_done,
            },
            ..ServiceLimits::default()
        };
        let service = Service::new(&regions, limits).map_err(|error| error.to_string())?;
        authentication.set_random_source(&service, id);
        let mut background = Vec::new();
        let mut opening = ExportOpener { process: id, regions: &regions, bugs, now };
        service.add_port(1, Port { address: None, ..Port::default() });
        for (nqn, exports) in subsystems {
            let config = |export: SimExport| {
                let SimExport { nsid, number, blocks } = export;
                let (medium, turned) = opening.open_export(&blocks)?;
                background.extend(turned);
                let mut uuid = [0x11; 16];
                uuid[15] = u8::try_from(number).unwrap_or(u8::MAX);
                // Reservations are stored for the disk, not for the namespace identifier that it
                // has now.
                let known = match bugs.reservations_by_number {
                    true => "any disk".to_owned(),
                    false => format!("disk {number}"),
                };
                Ok::<_, String>(NamespaceConfig {
                    nsid: Some(nsid),
                    identity: NamespaceIdentity { uuid, ..NamespaceIdentity::default() },
                    persistence: ReservationPersistenceMode::Durable(
                        state.reservation_store(&nqn, nsid, &known),
                    ),
                    ..NamespaceConfig::new(medium)
                })
            };
            let configs: Result<Vec<NamespaceConfig>, String> =
                exports.into_iter().map(config).collect();
            let config =
                SubsystemConfig { nqn: nqn.clone(), ..SubsystemConfig::new("CLUSTER", configs?) };
            service
                .add_subsystem(SubsystemExportConfig {
                    subsystem: Subsystem::new(config).map_err(|error| error.to_string())?,
                    nqn,
                    hosts: AllowedHosts::Any,
                    ports: BTreeMap::from([(1, Vec::new())]),
                    model: ControllerModel::Dynamic,
                    masks: BTreeMap::new(),
                    security: authentication.of_subsystem(hosts),
                })
                .map_err(|error| error.to_string())?;
        }
        network.listen(port, &regions);
        Ok(Self { service, connections: Vec::new(), paused_until: opening.now, state, background })
    }

    /// Accepts connections and performs pending work. Returns true if there was any.
    pub(crate) fn poll_process(
        &mut self,
        now: Instant,
        port: usize,
        network: &ClusterNetwork,
    ) -> bool {
        if now < self.paused_until {
            return false;
        }
        exports::poll_background(&mut self.background, now);
        let mut is_busy = self.state.complete_pending_writes();
        for stream in network.accept_connections(port) {
            is_busy = true;
            // A rejected connection is dropped, which closes it.
            self.connections.extend(self.service.accept_stream(stream, 1, now));
        }
        for connection in &mut self.connections {
            is_busy |= connection.poll_once(now);
        }
        let before = self.connections.len();
        self.connections.retain(|connection| !connection.is_closed());
        while self.service.next_event().is_some() {}
        is_busy || self.connections.len() != before
    }

    /// Time at which it must be polled without an event.
    pub(crate) fn wake_at(&self) -> Instant {
        let channels = self.background.iter().map(|channel| channel.wake_at());
        channels.fold(Instant::NEVER, Instant::min).max(self.paused_until)
    }

    /// Stops the process until a time, as by SIGSTOP.
    pub(crate) fn pause_until(&mut self, until: Instant) {
        self.paused_until = until.max(self.paused_until);
    }

    /// Resources that are not released although no host is connected, if any.
    pub(crate) fn leaked_resources(&self) -> Option<String> {
        let budget = self.service.buffer_pool();
        let (connected, associations) =
            (self.service.connection_count(), self.service.association_count());
        let (free, all) = (budget.free_bytes(), budget.size_bytes());
        let is_clean =
            connected == 0 && associations == 0 && free == all && budget.waiting_connections() == 0;
        (!is_clean).then(|| {
            format!(
                "{connected} connections, {associations} associations and {} of {all} bytes are in \
                 use, expected none",
                all - free
            )
        })
    }
}
