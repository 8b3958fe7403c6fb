//! A target process: the real service with its connections, over disks that outlive it.

use std::collections::BTreeMap;

use base::{Instant, Span};
use ctrl::controller::{NamespaceConfig, Persistence, Subsystem, SubsystemConfig};
use ctrl::namespace::Identity;
use dma::Regions;
use target::tcp::{
    ControllerModel, Guest, Hosts, Limits, MemoryDirectory, OfferPlan, Port, Service,
};

use crate::bugs::InjectedBugs;
use crate::exports::{self, Background, Export, Opening};
use crate::network::Network;

/// A target process that runs.
pub(crate) struct Process {
    service: Service,
    connections: Vec<Guest>,
    /// Nothing is executed before.
    paused_until: Instant,
    state: MemoryDirectory,
    background: Vec<Background>,
}

/// What a process serves and how.
pub(crate) struct ProcessOptions {
    /// Its port, by number.
    pub(crate) port: usize,
    /// Which life of which process it is, for its disks.
    pub(crate) id: u64,
    /// How long after its end an association is drained (CQT).
    pub(crate) quiesce: Span,
    /// Subsystems with their namespaces.
    pub(crate) subsystems: BTreeMap<String, Vec<Export>>,
    /// When it starts.
    pub(crate) now: Instant,
    /// Where reservations are kept.
    pub(crate) state: MemoryDirectory,
    /// What is wrong on purpose.
    pub(crate) bugs: InjectedBugs,
}

/// The subsystem of a tenant.
pub(crate) fn subsystem_nqn(tenant: usize) -> String {
    format!("nqn.2026-01.org.tenmil:tenant{tenant}")
}

impl Process {
    /// Starts to serve.
    ///
    /// # Errors
    ///
    /// What the service says.
    pub(crate) fn start(options: ProcessOptions, network: &Network) -> Result<Self, String> {
        let ProcessOptions { port, id, quiesce, subsystems, now, state, bugs } = options;
        let regions = Regions::new(16);
        let limits = Limits {
            memory_bytes: 4 << 20,
            connections_max: 32,
            transfer_bytes_max: 128 << 10,
            io_queues_max: 4,
            quiesce,
            injected_bugs: target::tcp::InjectedBugs {
                unfenced_writes: bugs.unfenced_writes,
                unknown_resets_done: bugs.unknown_resets_done,
            },
            ..Limits::default()
        };
        let service = Service::new(&regions, limits)?;
        let mut background = Vec::new();
        let mut opening = Opening { process: id, regions: &regions, bugs, now };
        service.open_port(1, Port { address: None });
        for (nqn, exports) in subsystems {
            let config = |export: Export| {
                let Export { nsid, number, blocks } = export;
                let (medium, turned) = opening.open(&blocks)?;
                background.extend(turned);
                let mut uuid = [0x11; 16];
                uuid[15] = u8::try_from(number).unwrap_or(u8::MAX);
                let known = match bugs.reservations_by_number {
                    true => "any disk".to_owned(),
                    false => format!("disk {number}"),
                };
                Ok::<_, String>(NamespaceConfig {
                    nsid: Some(nsid),
                    identity: Identity { uuid, ..Identity::default() },
                    persistence: Persistence::Kept(state.keeper(&nqn, nsid, &known)),
                    ..NamespaceConfig::new(medium)
                })
            };
            let configs: Result<Vec<NamespaceConfig>, String> =
                exports.into_iter().map(config).collect();
            let config =
                SubsystemConfig { nqn: nqn.clone(), ..SubsystemConfig::new("CLUSTER", configs?) };
            service.offer(OfferPlan {
                subsystem: Subsystem::new(config)?,
                nqn,
                hosts: Hosts::Any,
                ports: BTreeMap::from([(1, Vec::new())]),
                model: ControllerModel::Dynamic,
                masks: BTreeMap::new(),
            })?;
        }
        network.listen(port, &regions);
        Ok(Self { service, connections: Vec::new(), paused_until: opening.now, state, background })
    }

    /// Accepts what has arrived and does everything that can be done now. True if anything was.
    pub(crate) fn turn(&mut self, now: Instant, port: usize, network: &Network) -> bool {
        if now < self.paused_until {
            return false;
        }
        exports::turn(&mut self.background, now);
        let mut is_busy = self.state.write();
        for stream in network.arrivals(port) {
            is_busy = true;
            // What is refused is dropped, and thereby closed.
            self.connections.extend(self.service.accept(stream, 1, now));
        }
        for connection in &mut self.connections {
            is_busy |= connection.turn(now);
        }
        let before = self.connections.len();
        self.connections.retain(|connection| !connection.is_over());
        while self.service.next_news().is_some() {}
        is_busy || self.connections.len() != before
    }

    /// When to turn even if nothing comes.
    pub(crate) fn wake_at(&self) -> Instant {
        let channels = self.background.iter().map(|channel| channel.wake_at());
        channels.fold(Instant::NEVER, Instant::min).max(self.paused_until)
    }

    /// Nothing is executed for a while, as if it was stopped.
    pub(crate) fn pause(&mut self, until: Instant) {
        self.paused_until = until.max(self.paused_until);
    }

    /// What it has not released although no host is connected any more, if anything.
    pub(crate) fn leak(&self) -> Option<String> {
        let budget = self.service.budget();
        let (connected, associations) = (self.service.connected(), self.service.associations());
        let (free, all) = (budget.free_bytes(), budget.bytes());
        let is_clean = connected == 0 && associations == 0 && free == all && budget.waiting() == 0;
        (!is_clean).then(|| {
            format!(
                "{connected} connections, {associations} associations and {} of {all} bytes are in \
                 use, expected none",
                all - free
            )
        })
    }
}
