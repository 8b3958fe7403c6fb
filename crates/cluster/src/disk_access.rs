//! Access of a host to a disk: memory, paths, and a multipath queue.

use std::ops::Range;

use tenmil_base::{Instant, IoChannel, Segment, Span};
use tenmil_dma::{CommandStore, DeviceKind, DevicePool, MemoryBacking, MemoryMapping, RegionTable};
use tenmil_nvme_fabrics::{
    CacheScope, Multipath, MultipathOptions, Options, PathSetup, QueueRequest, TimeoutPolicy,
};
use tenmil_nvme_host::{ControllerOptions, FastPathOptions, QueuePairOptions, QueueSizes};

use crate::cluster_authentication::ClusterAuthentication;
use crate::cluster_network::ClusterNetwork;
use crate::cluster_plan::HostPlan;
use crate::injected_bugs::InjectedBugs;

/// Paths of a host to a disk.
pub(crate) struct MultipathAccess {
    /// Region table with all memory.
    pub(crate) regions: RegionTable,
    /// Memory for data.
    pub(crate) memory: Segment,
    /// Multipath driver.
    pub(crate) multipath: Multipath,
    ticket: QueueRequest,
    /// Queue, once it has been created.
    pub(crate) queue: Option<Box<dyn IoChannel>>,
}

/// Address of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ExportAddress {
    /// First process.
    pub(crate) process: usize,
    /// Number of processes that export it.
    pub(crate) processes: usize,
    /// Subsystem NQN.
    pub(crate) subsystem: String,
    /// Namespace identifier.
    pub(crate) nsid: u32,
    /// Authentication there.
    pub(crate) authentication: ClusterAuthentication,
}

const QUEUE_PAIRS: u16 = 2;

impl MultipathAccess {
    /// Starts to connect all paths, with `bytes` of memory for data.
    ///
    /// # Errors
    ///
    /// If the memory cannot be mapped.
    pub(crate) fn new(
        (number, bugs): (usize, InjectedBugs),
        plan: &HostPlan,
        address: &ExportAddress,
        (network, bytes): (&ClusterNetwork, usize),
        now: Instant,
    ) -> Result<Self, String> {
        let regions = RegionTable::new(8);
        let mapping =
            MemoryMapping::new(bytes, MemoryBacking::Private).map_err(|error| error.to_string())?;
        let memory = regions.add_mapping(mapping).map_err(|error| format!("{error:?}"))?;
        let mut multipath = Self::with_paths_to_all(
            (number, bugs),
            plan,
            address,
            (network, &regions, QUEUE_PAIRS),
            now,
        )?;
        let ticket = multipath.open_queue();
        Ok(Self { regions, memory, multipath, ticket, queue: None })
    }

    /// Paths to all processes that serve a disk, over which a host has so many queues.
    ///
    /// # Errors
    ///
    /// If there is no memory for them.
    pub(crate) fn with_paths_to_all(
        (number, bugs): (usize, InjectedBugs),
        plan: &HostPlan,
        address: &ExportAddress,
        (network, regions, queue_pairs): (&ClusterNetwork, &RegionTable, u16),
        now: Instant,
    ) -> Result<Multipath, String> {
        let paths: Result<Vec<PathSetup>, String> = address
            .process_range()
            .map(|process| path_to_process(regions, network, number, process))
            .collect();
        let names = (host_nqn(number), host_id(number));
        let mut options = Options::new(&address.subsystem, &names.0, names.1);
        options.policy = TimeoutPolicy {
            detect: plan.detect,
            connect: Span::from_secs(1),
            retry: Span::from_ms(200),
            fail_fast: plan.fail_fast,
            give_up: Span::from_secs(600),
        };
        options.authentication = address.authentication.of_host(number);
        options.injected_bugs = tenmil_nvme_fabrics::InjectedBugs {
            flush_ignores_lost_writes: bugs.flush_ignores_lost_writes,
        };
        let controller = ControllerOptions {
            queue_pairs,
            io_timeout: plan.io_timeout,
            ..ControllerOptions::default()
        };
        let wishes = MultipathOptions {
            options,
            controller,
            namespace: address.nsid,
            io_policy: plan.io_policy,
            cache: CacheScope::Shared,
            queue: QueuePairOptions {
                depth: 32,
                vector: None,
                techniques: FastPathOptions::default(),
            },
            sizes: QueueSizes::default(),
        };
        Multipath::begin(paths?, wishes, now).map_err(|error| error.to_string())
    }

    /// Takes the queue if it was just created. Returns true in that case.
    pub(crate) fn take_new_queue(&mut self) -> bool {
        if self.queue.is_some() {
            return false;
        }
        let queue = self.multipath.take_queue(self.ticket);
        self.queue = queue.map(|queue| Box::new(queue) as Box<dyn IoChannel>);
        self.queue.is_some()
    }
}

impl ExportAddress {
    fn process_range(&self) -> Range<usize> {
        self.process..self.process + self.processes
    }
}

/// NQN of a host.
pub(crate) fn host_nqn(number: usize) -> String {
    format!("nqn.2026-01.org.tenmil:host{number}")
}

/// Host Identifier of a host.
pub(crate) fn host_id(number: usize) -> [u8; 16] {
    [u8::try_from(number + 1).unwrap_or(u8::MAX); 16]
}

/// Path from a host to a process.
fn path_to_process(
    regions: &RegionTable,
    network: &ClusterNetwork,
    host: usize,
    process: usize,
) -> Result<PathSetup, String> {
    let mapping =
        MemoryMapping::new(2 << 20, MemoryBacking::Private).map_err(|error| error.to_string())?;
    let memory = regions.add_mapping(mapping).map_err(|error| format!("{error:?}"))?;
    let store = CommandStore::for_device(DeviceKind::Emulated);
    let pool = DevicePool::new(regions.clone(), memory, DeviceKind::Emulated, store);
    pool.map_on_demand();
    let (network, regions) = (network.clone(), regions.clone());
    Ok(PathSetup {
        pool,
        make_connector: Box::new(move || network.connector(host, process, &regions)),
    })
}
