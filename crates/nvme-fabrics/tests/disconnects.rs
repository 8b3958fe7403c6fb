//! A thousand cuts at random moments and bytes, under a load that verifies what it reads: our own host
//! and target over networks that are made for it, in simulated time. A second host is served all the
//! while as if nothing happened, and in the end nothing is left of the first.

#![expect(clippy::unwrap_used, reason = "a test may")]

#[expect(dead_code, reason = "this test uses a part of it")]
mod disk;
mod queues;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use tenmil_base::{
    CompletionBatch, Instant, IoChannel, IoStatus, Memory, Operation, Random, Request,
    RequestFlags, Segment, Span, Stream, StreamError,
};
use tenmil_dma::{CommandStore, DeviceKind, DevicePool, MemoryBacking, MemoryMapping, RegionTable};
use tenmil_drivers::RamDevice;
use tenmil_nvme_fabrics::{Connector, FabricsChannel, Multipath, Options, PendingConnect};
use tenmil_serve::tcp::{Service, ServiceLimits, TargetConnection};
use tenmil_sim::sim_network::{self, LinkFault, LinkTransferDirection, NetworkOptions, SimNetwork};

use disk::{NQN, service_of_device};

const BLOCK: u32 = 512;
/// Blocks of a cell: data that do not travel in a capsule.
const CELL_BLOCKS: u32 = 24;
const CELLS: u64 = 12;
const CUTS: u64 = 1000;
/// A turn, and one while the host that is cut is away and waits.
const STEP: Span = Span::from_us(50);
const IDLE_STEP: Span = Span::from_us(500);
/// A host whose connections are never cut never waits for longer: less than the other one for its end.
const LATENCY_MAX: Span = Span::from_ms(100);

type Networks = Arc<Mutex<Vec<SimNetwork>>>;
type Connections = Arc<Mutex<Vec<TargetConnection>>>;

/// Dials the target over a network of its own each time.
struct SimConnector {
    regions: RegionTable,
    service: Service,
    connections: Connections,
    networks: Networks,
    random: Random,
}

struct ImmediateConnect(Option<Box<dyn Stream>>);

impl Connector for SimConnector {
    fn begin_connect(&mut self, now: Instant, _: Instant) -> Box<dyn PendingConnect> {
        let options = NetworkOptions::with_splitting(self.random.next_u64());
        let memory = || Arc::new(self.regions.clone()) as Arc<dyn Memory>;
        let (ours, theirs, network) = sim_network::connected_pair(options, memory(), memory());
        network.advance(now);
        self.networks.lock().unwrap().push(network);
        let connection = self.service.accept_stream(Box::new(theirs), 1, now).unwrap();
        self.connections.lock().unwrap().push(connection);
        Box::new(ImmediateConnect(Some(Box::new(ours))))
    }

    fn peer(&self) -> String {
        "the target".to_owned()
    }
}

impl PendingConnect for ImmediateConnect {
    fn poll(&mut self, _: Instant) -> Option<Result<Box<dyn Stream>, StreamError>> {
        self.0.take().map(Ok)
    }
}

/// What was asked of a cell.
#[derive(Clone, Copy)]
struct PendingRequest {
    operation: Operation,
    at: Instant,
}

/// A host with a queue and a load.
struct LoadHost {
    multipath: Multipath,
    queue: FabricsChannel,
    regions: RegionTable,
    memory: Segment,
    networks: Networks,
    random: Random,
    /// Where its cells begin.
    first: u64,
    /// How often each cell was written, and what is under way there.
    written: Vec<u64>,
    under_way: BTreeMap<u64, PendingRequest>,
    done: u64,
    /// Requests that were alone on three connections that broke, and were asked for once more.
    given_up: u64,
    /// Those of them that there was no room for yet.
    again: Vec<(u64, Operation)>,
    slowest: Span,
}

struct TargetRig {
    regions: RegionTable,
    service: Service,
    connections: Connections,
    now: Instant,
}

impl TargetRig {
    fn new() -> Self {
        let regions = RegionTable::new(16);
        let quiesce = Span::from_ms(20);
        let limits = ServiceLimits {
            memory_bytes: 16 << 20,
            connections_max: 16,
            quiesce,
            ..ServiceLimits::default()
        };
        let ram = Arc::new(RamDevice::new(&regions, BLOCK, 4096).unwrap());
        let service = service_of_device(ram, &regions, limits);
        Self {
            regions,
            service,
            connections: Connections::default(),
            now: Instant { ns: 1_000_000 },
        }
    }

    fn poll_connections(&self) {
        let mut connections = std::mem::take(&mut *self.connections.lock().unwrap());
        connections.iter_mut().for_each(|connection| {
            connection.poll_once(self.now);
        });
        connections.retain(|connection| !connection.is_closed());
        self.connections.lock().unwrap().extend(connections);
        while self.service.next_event().is_some() {}
    }

    /// A host that is connected, and has a queue.
    fn connect_host(&mut self, number: u8) -> LoadHost {
        let networks = Networks::default();
        let line = SimConnector {
            regions: self.regions.clone(),
            service: self.service.clone(),
            connections: Arc::clone(&self.connections),
            networks: Arc::clone(&networks),
            random: Random::new(number.into()),
        };
        let region = |bytes| {
            self.regions
                .add_mapping(MemoryMapping::new(bytes, MemoryBacking::Private).unwrap())
                .unwrap()
        };
        let (pool, memory) = (region(8 << 20), region(1 << 20));
        let (kind, store) = (DeviceKind::Emulated, CommandStore::Plain);
        let pool = DevicePool::new(self.regions.clone(), pool, kind, store);
        pool.map_on_demand();
        let name = format!("nqn.2024-01.example:host-{number}");
        let mut options = Options::new(NQN, &name, [number; 16]);
        options.policy.detect = Span::from_ms(100);
        options.policy.retry = Span::from_ms(5);
        let mut multipath =
            queues::connect_one_path(pool, Box::new(line), options, (1, 16), self.now);
        let queue = queues::open_queue(&mut multipath, || {
            self.now = self.now.after(STEP);
            networks.lock().unwrap().iter().for_each(|network| network.advance(self.now));
            self.poll_connections();
            self.now
        });
        LoadHost {
            multipath,
            queue,
            regions: self.regions.clone(),
            memory,
            networks,
            random: Random::new(100 + u64::from(number)),
            first: u64::from(number) * CELLS * u64::from(CELL_BLOCKS),
            written: vec![0; usize::try_from(CELLS).unwrap()],
            under_way: BTreeMap::new(),
            done: 0,
            given_up: 0,
            again: Vec::new(),
            slowest: Span::default(),
        }
    }
}

impl LoadHost {
    fn buffer(&self, cell: u64) -> Segment {
        let len = CELL_BLOCKS * BLOCK;
        self.memory.slice(u32::try_from(cell).unwrap() * len, len).unwrap()
    }

    /// What a cell holds after so many writes.
    fn cell_content(&self, cell: u64, written: u64) -> Vec<u8> {
        let seed = self.first ^ cell << 20 ^ written << 32;
        let len = u64::from(CELL_BLOCKS * BLOCK);
        if written == 0 {
            return vec![0; usize::try_from(len).unwrap()];
        }
        (0..len)
            .map(|at| {
                (at.wrapping_mul(31) ^ at >> 9 ^ Random::new(seed).next_u64()).to_le_bytes()[0]
            })
            .collect()
    }

    /// Begins something on a cell that rests.
    fn submit(&mut self, now: Instant) {
        let cell = self.random.below(CELLS);
        if self.under_way.contains_key(&cell) {
            return;
        }
        let index = usize::try_from(cell).unwrap();
        let operation = if self.random.chance(1, 2) { Operation::Write } else { Operation::Read };
        let place = self.buffer(cell);
        if operation == Operation::Write {
            let bytes = self.cell_content(cell, self.written[index] + 1);
            self.regions.store(place, &bytes).unwrap();
        } else {
            self.regions.fill(place, 0xa5).unwrap();
        }
        if self.try_submit(now, cell, operation) {
            self.written[index] += u64::from(operation == Operation::Write);
            self.under_way.insert(cell, PendingRequest { operation, at: now });
        }
        self.queue.flush_submissions();
    }

    /// Whether there is room for it.
    fn try_submit(&mut self, now: Instant, cell: u64, operation: Operation) -> bool {
        let request = Request {
            token: cell,
            lba: self.first + cell * u64::from(CELL_BLOCKS),
            operand: 0,
            segment_first: 0,
            blocks: CELL_BLOCKS,
            segment_count: 1,
            metadata_count: 0,
            operation,
            flags: RequestFlags::NONE,
        };
        self.queue.submit(now, &[request], &[self.buffer(cell)]) == 1
    }

    /// Goes on, and checks what has come.
    fn poll_and_check(&mut self, now: Instant) {
        let mut networks = self.networks.lock().unwrap();
        let old = networks.len().saturating_sub(8);
        networks.drain(..old);
        networks.iter().for_each(|network| network.advance(now));
        drop(networks);
        while self.multipath.poll(now).is_some() {}
        while let Some((cell, operation)) = self.again.pop() {
            if !self.try_submit(now, cell, operation) {
                self.again.push((cell, operation));
                break;
            }
        }
        let mut answers = CompletionBatch::with_capacity(32);
        self.queue.poll(now, &mut answers);
        self.queue.flush_submissions();
        for answer in answers.drain() {
            let cell = answer.token;
            let PendingRequest { operation, at } = self.under_way.remove(&cell).expect("once");
            if answer.status == IoStatus::ABORTED_BY_HOST {
                self.under_way.insert(cell, PendingRequest { operation, at });
                self.again.push((cell, operation));
                self.given_up += 1;
                continue;
            }
            assert_eq!(answer.status, IoStatus::SUCCESS, "{operation:?} of cell {cell}");
            self.slowest = self.slowest.max(now.since(at));
            self.done += 1;
            if operation == Operation::Read {
                let place = self.buffer(cell);
                let mut found = vec![0; place.len_bytes as usize];
                self.regions.load(place, &mut found).unwrap();
                let written = self.written[usize::try_from(cell).unwrap()];
                assert!(
                    found == self.cell_content(cell, written),
                    "cell {cell} after {written} writes"
                );
            }
        }
    }

    /// Number of times that its controller was lost.
    fn loss_count(&mut self) -> u64 {
        self.multipath.path_controller(0).unwrap().connection_stats().lost
    }

    /// Cuts one of its newest connections: now, or at the next byte that goes there or comes back.
    fn cut_random_connection(&mut self) {
        let networks = self.networks.lock().unwrap();
        let newest = networks.len().saturating_sub(2);
        let which = newest + usize::try_from(self.random.below(2)).unwrap();
        let Some(network) = networks.get(which) else { return };
        match self.random.below(3) {
            0 => network.cut_links(),
            1 => network.inject_fault(LinkTransferDirection::Upstream, LinkFault::Cut),
            _ => network.inject_fault(LinkTransferDirection::Downstream, LinkFault::Cut),
        }
    }
}

#[test]
fn thousand_random_cuts_under_load_lose_no_data_leak_nothing_and_delay_no_other_host() {
    let mut target_rig = TargetRig::new();
    let mut undisturbed = target_rig.connect_host(1);
    let mut disturbed = target_rig.connect_host(2);
    let mut random = Random::new(7);
    let mut cuts = 0;
    while cuts < CUTS {
        for host in [&mut undisturbed, &mut disturbed] {
            host.submit(target_rig.now);
        }
        // Not while it is away: each cut is one of a connection that works.
        let is_there = disturbed.multipath.path_controller(0).unwrap().lost_since().is_none();
        if is_there && random.chance(1, 24) {
            disturbed.cut_random_connection();
            cuts += 1;
        }
        target_rig.poll_connections();
        disturbed.poll_and_check(target_rig.now);
        undisturbed.poll_and_check(target_rig.now);
        target_rig.now = target_rig.now.after(if is_there { STEP } else { IDLE_STEP });
    }
    for _ in 0..100_000 {
        target_rig.poll_connections();
        disturbed.poll_and_check(target_rig.now);
        undisturbed.poll_and_check(target_rig.now);
        target_rig.now = target_rig.now.after(STEP);
        if disturbed.under_way.is_empty() && undisturbed.under_way.is_empty() {
            break;
        }
    }
    assert!(disturbed.under_way.is_empty(), "{} left", disturbed.under_way.len());
    let (lost, done) = (disturbed.loss_count(), disturbed.done);
    println!("{lost} losses, {done} I/Os verified, beside {} of the other host", undisturbed.done);
    assert!(lost > CUTS / 2 && done > CUTS, "{lost} losses, {done} I/Os");
    // Few of those that were cut have met three cuts alone.
    assert!(disturbed.given_up < CUTS / 20, "{} given up", disturbed.given_up);
    assert_eq!((undisturbed.loss_count(), undisturbed.given_up), (0, 0));
    assert!(undisturbed.slowest < LATENCY_MAX, "the other host waited {}", undisturbed.slowest);

    for host in [&mut disturbed, &mut undisturbed] {
        host.multipath.shut_down(target_rig.now);
    }
    for _ in 0..10_000 {
        target_rig.poll_connections();
        disturbed.poll_and_check(target_rig.now);
        undisturbed.poll_and_check(target_rig.now);
        target_rig.now = target_rig.now.after(STEP);
    }
    drop((disturbed, undisturbed));
    for _ in 0..10_000 {
        target_rig.poll_connections();
        target_rig.now = target_rig.now.after(STEP);
    }
    let budget = target_rig.service.buffer_pool();
    assert_eq!(
        (target_rig.service.connection_count(), target_rig.service.association_count()),
        (0, 0)
    );
    assert_eq!(budget.free_bytes(), budget.size_bytes(), "all memory is back");
}
