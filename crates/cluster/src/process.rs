//! A target process: the real service with its connections, over disks that outlive it.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::{Durability, Instant, Medium, Span};
use block::{Claim, Device, DeviceOptions};
use ctrl::controller::{NamespaceConfig, Persistence, Subsystem, SubsystemConfig};
use ctrl::namespace::Identity;
use dma::Regions;
use host::Clock;
use target::tcp::{ControllerModel, Guest, Hosts, Limits, OfferPlan, Port, Service};

use crate::bugs::InjectedBugs;
use crate::disk::Disk;
use crate::network::Network;

/// A target process that runs.
pub(crate) struct Process {
    service: Service,
    connections: Vec<Guest>,
    /// Nothing is executed before.
    paused_until: Instant,
}

/// What a process serves and how.
pub(crate) struct ProcessOptions {
    /// Its port, by number.
    pub(crate) port: usize,
    /// Which life of which process it is, for its disks.
    pub(crate) id: u64,
    /// How long after its end an association is drained (CQT).
    pub(crate) quiesce: Span,
    /// Namespaces: identifier and disk.
    pub(crate) namespaces: Vec<(u32, Export)>,
    /// What is wrong on purpose.
    pub(crate) bugs: InjectedBugs,
}

/// A disk as a namespace.
pub(crate) struct Export {
    /// The disk.
    pub(crate) disk: Disk,
    /// By which hosts recognize it.
    pub(crate) uuid: [u8; 16],
    /// What survives of its reservations.
    pub(crate) persistence: Persistence,
}

/// The subsystem that every process serves.
pub(crate) const SUBSYSTEM: &str = "nqn.2026-01.org.tenmil:cluster";

impl Process {
    /// Starts to serve.
    ///
    /// # Errors
    ///
    /// What the service says.
    pub(crate) fn start(options: ProcessOptions, network: &Network) -> Result<Self, String> {
        let ProcessOptions { port, id, quiesce, namespaces, bugs } = options;
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
        let durability = match bugs.cached_disk_is_stable {
            true => Durability::Stable,
            false => Durability::VolatileCache,
        };
        let mut configs = Vec::new();
        for (nsid, export) in namespaces {
            let Export { disk, uuid, persistence } = export;
            let medium = Arc::new(disk.open(id, &regions, durability));
            let identity = Identity { uuid, ..Identity::default() };
            let (nsid, medium) = (Some(nsid), device(medium)?);
            configs.push(NamespaceConfig {
                nsid,
                identity,
                persistence,
                ..NamespaceConfig::new(medium)
            });
        }
        let config = SubsystemConfig {
            nqn: SUBSYSTEM.to_owned(),
            ..SubsystemConfig::new("CLUSTER", configs)
        };
        let subsystem = Subsystem::new(config)?;
        service.open_port(1, Port { address: None });
        service.offer(OfferPlan {
            subsystem,
            nqn: SUBSYSTEM.to_owned(),
            hosts: Hosts::Any,
            ports: BTreeMap::from([(1, Vec::new())]),
            model: ControllerModel::Dynamic,
            masks: BTreeMap::new(),
        })?;
        network.listen(port, &regions);
        Ok(Self { service, connections: Vec::new(), paused_until: Instant::default() })
    }

    /// Accepts what has arrived and does everything that can be done now. True if anything was.
    pub(crate) fn turn(&mut self, now: Instant, port: usize, network: &Network) -> bool {
        if now < self.paused_until {
            return false;
        }
        let mut is_busy = false;
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

/// A disk as the block device that a service is given.
fn device(disk: Arc<dyn Medium>) -> Result<Arc<dyn Medium>, String> {
    // Its clock measures waits that nobody asks for here.
    let options = DeviceOptions { timing: false, ..DeviceOptions::new(Clock::start(), 1) };
    let device = Device::new("disk", disk, options).map_err(|why| why.to_string())?;
    let descriptor = device.open(Claim::WriteOnce, "target").map_err(|why| why.to_string())?;
    Ok(Arc::new(descriptor))
}
