//! What a host reaches a disk with: memory, paths, and a queue over them.

use std::ops::Range;

use base::{Backend, Instant, Segment, Span};
use dma::{Backing, CommandStore, DeviceKind, DevicePool, Mapping, Regions};
use nvme::{ControllerOptions, QueuePairOptions, QueueSizes, Techniques};
use remote::{Cache, Multipath, MultipathOptions, Options, PathSetup, Policy, QueueTicket};

use crate::bugs::InjectedBugs;
use crate::network::Network;
use crate::plan::HostPlan;

/// The paths of a host to a disk.
pub(crate) struct Link {
    /// All its memory.
    pub(crate) regions: Regions,
    /// That for data.
    pub(crate) memory: Segment,
    /// The paths.
    pub(crate) multipath: Multipath,
    ticket: QueueTicket,
    /// The queue, once there is one.
    pub(crate) queue: Option<Box<dyn Backend>>,
}

/// Where a disk is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    /// The first process.
    pub(crate) process: usize,
    /// How many serve it.
    pub(crate) processes: usize,
    /// The subsystem.
    pub(crate) subsystem: String,
    /// The namespace.
    pub(crate) nsid: u32,
}

const QUEUE_PAIRS: u16 = 2;

impl Link {
    /// Paths that begin to call, and so many bytes for data.
    ///
    /// # Errors
    ///
    /// If there is no memory for it.
    pub(crate) fn new(
        (number, bugs): (usize, InjectedBugs),
        plan: &HostPlan,
        address: &Address,
        (network, bytes): (&Network, usize),
        now: Instant,
    ) -> Result<Self, String> {
        let regions = Regions::new(8);
        let mapping = Mapping::new(bytes, Backing::Private).map_err(|error| error.to_string())?;
        let memory = regions.add(mapping).map_err(|error| format!("{error:?}"))?;
        let mut multipath =
            Self::paths((number, bugs), plan, address, (network, &regions, QUEUE_PAIRS), now)?;
        let ticket = multipath.open_queue();
        Ok(Self { regions, memory, multipath, ticket, queue: None })
    }

    /// Paths to all processes that serve a disk, over which a host has so many queues.
    ///
    /// # Errors
    ///
    /// If there is no memory for them.
    pub(crate) fn paths(
        (number, bugs): (usize, InjectedBugs),
        plan: &HostPlan,
        address: &Address,
        (network, regions, queue_pairs): (&Network, &Regions, u16),
        now: Instant,
    ) -> Result<Multipath, String> {
        let paths: Result<Vec<PathSetup>, String> =
            address.all().map(|process| path(regions, network, number, process)).collect();
        let names = (host_nqn(number), host_id(number));
        let mut options = Options::new(&address.subsystem, &names.0, names.1);
        options.policy = Policy {
            detect: plan.detect,
            connect: Span::from_secs(1),
            retry: Span::from_ms(200),
            fail_fast: plan.fail_fast,
            give_up: Span::from_secs(600),
        };
        options.injected_bugs =
            remote::InjectedBugs { flush_ignores_lost_writes: bugs.flush_ignores_lost_writes };
        let controller = ControllerOptions {
            queue_pairs,
            io_timeout: plan.io_timeout,
            ..ControllerOptions::default()
        };
        let wishes = MultipathOptions {
            options,
            controller,
            namespace: address.nsid,
            spread: plan.spread,
            cache: Cache::Shared,
            queue: QueuePairOptions { depth: 32, vector: None, techniques: Techniques::default() },
            sizes: QueueSizes::default(),
        };
        Multipath::begin(paths?, wishes, now).map_err(|error| error.to_string())
    }

    /// Takes the queue, once there is one. True if that is now.
    pub(crate) fn take_queue(&mut self) -> bool {
        if self.queue.is_some() {
            return false;
        }
        let queue = self.multipath.take_queue(self.ticket);
        self.queue = queue.map(|queue| Box::new(queue) as Box<dyn Backend>);
        self.queue.is_some()
    }
}

impl Address {
    fn all(&self) -> Range<usize> {
        self.process..self.process + self.processes
    }
}

/// The name of a host.
pub(crate) fn host_nqn(number: usize) -> String {
    format!("nqn.2026-01.org.tenmil:host{number}")
}

/// Its Host Identifier.
pub(crate) fn host_id(number: usize) -> [u8; 16] {
    [u8::try_from(number + 1).unwrap_or(u8::MAX); 16]
}

/// A path from a host to a process.
fn path(
    regions: &Regions,
    network: &Network,
    host: usize,
    process: usize,
) -> Result<PathSetup, String> {
    let mapping = Mapping::new(2 << 20, Backing::Private).map_err(|error| error.to_string())?;
    let memory = regions.add(mapping).map_err(|error| format!("{error:?}"))?;
    let store = CommandStore::for_device(DeviceKind::Emulated);
    let pool = DevicePool::new(regions.clone(), memory, DeviceKind::Emulated, store);
    pool.map_on_use();
    let (network, regions) = (network.clone(), regions.clone());
    Ok(PathSetup { pool, dial: Box::new(move || network.dial(host, process, &regions)) })
}
