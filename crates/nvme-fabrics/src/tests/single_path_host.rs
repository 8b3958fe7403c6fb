//! A host with one remote SSD over a single path, in simulated time.

use tenmil_base::{
    CompletionBatch, Error, Instant, IoChannel, IoCompletion, IoStatus, Memory, Operation, Request,
    RequestFlags, Segment, Span,
};
use tenmil_dma::{CommandStore, DeviceKind, DevicePool, MemoryBacking, MemoryMapping, RegionTable};
use tenmil_nvme_host::{ControllerOptions, Event, FastPathOptions, QueuePairOptions, QueueSizes};

use super::simulated_time::SimulatedTime;
use super::target::{BLOCK, Target, load_host_memory, pattern};
use crate::cache_tracker::CacheScope;
use crate::fabrics_controller::{ConnectError, ConnectingController, FabricsController};
use crate::fabrics_queue_pair::FabricsQueuePair;
use crate::multipath::{
    FabricsChannel, IoPolicy, Multipath, MultipathOptions, PathEvent, PathSetup,
};
use crate::options::Options;

pub(super) const SUBSYSTEM: &str = "nqn.2024-01.example:disk";
pub(super) const HOST: &str = "nqn.2024-01.example:host";

/// Time of an iteration.
const STEP: Span = Span::from_us(50);

pub(super) struct SinglePathHost {
    pub(super) target: Target,
    pub(super) regions: RegionTable,
    pub(super) memory: Segment,
    pub(super) now: Instant,
    /// A multipath of one.
    pub(super) multipath: Option<Multipath>,
    pub(super) queues: Vec<FabricsChannel>,
    /// Events of the controller; `Recovered` when its path is up again.
    pub(super) events: Vec<Event>,
    pub(super) path_events: Vec<PathEvent>,
    pub(super) completions: Vec<IoCompletion>,
    pool: DevicePool,
}

impl SinglePathHost {
    pub(super) fn new() -> Self {
        let regions = RegionTable::new(4);
        let pool = regions
            .add_mapping(MemoryMapping::new(8 << 20, MemoryBacking::Private).unwrap())
            .unwrap();
        let memory = regions
            .add_mapping(MemoryMapping::new(4 << 20, MemoryBacking::Private).unwrap())
            .unwrap();
        let pool = DevicePool::new(
            regions.clone(),
            pool,
            DeviceKind::Emulated,
            CommandStore::for_device(DeviceKind::Emulated),
        );
        pool.map_on_demand();
        Self {
            target: Target::new(),
            regions,
            memory,
            now: Instant { ns: 1_000_000 },
            multipath: None,
            queues: Vec::new(),
            events: Vec::new(),
            path_events: Vec::new(),
            completions: Vec::new(),
            pool,
        }
    }

    pub(super) fn options() -> Options {
        Options::new(SUBSYSTEM, HOST, [7; 16])
    }

    pub(super) fn free_bytes(&self) -> u64 {
        self.pool.free_bytes()
    }

    /// Connects to the target, and waits for the result.
    pub(super) fn connect(&mut self, options: Options) -> Result<(), Error> {
        let (target, regions) = (self.target.clone(), self.regions.clone());
        let make_connector = Box::new(move || target.connector(&regions));
        let setup = PathSetup { pool: self.pool.clone(), make_connector };
        let (vector, techniques) = (None, FastPathOptions::default());
        let requested_options = MultipathOptions {
            options,
            controller: ControllerOptions { queue_pairs: 8, ..ControllerOptions::default() },
            namespace: 1,
            io_policy: IoPolicy::default(),
            cache: CacheScope::default(),
            queue: QueuePairOptions { depth: 2, vector, techniques },
            sizes: QueueSizes::default(),
        };
        let multipath = Multipath::begin(vec![setup], requested_options, self.now);
        let mut multipath = multipath.map_err(|error| Error::usage(error.to_string()))?;
        loop {
            self.now = self.now.after(STEP);
            self.target.step(self.now);
            let _ = multipath.poll(self.now);
            if let Some(error) = multipath.path_error(0) {
                return Err(error.clone());
            }
            if multipath.ana_state(0).is_some() {
                self.multipath = Some(multipath);
                return Ok(());
            }
        }
    }

    /// Connects a controller without a path, and waits for the result.
    pub(super) fn connect_controller(
        &mut self,
        options: Options,
    ) -> Result<FabricsController, ConnectError> {
        let dial = self.target.connector(&self.regions);
        let requested_options =
            ControllerOptions { queue_pairs: 8, ..ControllerOptions::default() };
        let mut connecting = ConnectingController::begin(
            self.pool.clone(),
            dial,
            options,
            requested_options,
            self.now,
        )?;
        loop {
            self.now = self.now.after(STEP);
            self.target.step(self.now);
            if let Some(ended) = connecting.poll(self.now) {
                return ended;
            }
        }
    }

    /// Waits for an event of a controller without a path.
    pub(super) fn await_event(&mut self, remote: &mut FabricsController, expected: &Event) {
        loop {
            self.now = self.now.after(STEP);
            self.target.step(self.now);
            if remote.poll(self.now).as_ref() == Some(expected) {
                return;
            }
        }
    }

    /// A queue pair without retries, and its controller.
    pub(super) fn queue_pair_without_retries(
        &mut self,
        depth: u32,
    ) -> (FabricsController, FabricsQueuePair) {
        let mut remote = self.connect_controller(Self::options()).unwrap();
        self.await_event(&mut remote, &Event::Ready);
        let options =
            QueuePairOptions { depth, vector: None, techniques: FastPathOptions::default() };
        let id = remote.controller().create_queue_pair(self.now, options).unwrap();
        self.await_event(&mut remote, &Event::QueuePairCreated { id });
        let queue_pair = remote.take_queue_pair(id, 1, QueueSizes::default()).unwrap();
        (remote, queue_pair)
    }

    /// Whether its path is connected. False if it cannot be.
    pub(super) fn await_connection(&mut self) -> bool {
        self.connect(Self::options()).is_ok()
    }

    /// A host that is connected to its target.
    pub(super) fn connected() -> Self {
        let mut host = Self::new();
        host.connect(Self::options()).unwrap();
        host
    }

    /// The same, with a queue of this number of entries.
    pub(super) fn with_queue(depth: u32) -> Self {
        let mut host = Self::connected();
        host.add_queue(depth);
        host
    }

    pub(super) fn add_queue(&mut self, depth: u32) {
        let multipath = self.multipath();
        multipath.set_queue_depth(depth);
        let ticket = multipath.open_queue();
        let count = self.queues.len();
        self.run_until(|host| {
            let taken = host.multipath().take_queue(ticket);
            host.queues.extend(taken);
            host.queues.len() > count
        });
    }

    pub(super) fn multipath(&mut self) -> &mut Multipath {
        self.multipath.as_mut().unwrap()
    }

    pub(super) fn controller(&mut self) -> &mut FabricsController {
        self.multipath().path_controller(0).unwrap()
    }

    /// Shuts the controller down, and waits until it has.
    pub(super) fn shut_down(&mut self) {
        let now = self.now;
        self.multipath().shut_down(now);
        self.run_until(|host| !host.multipath().is_shutting_down());
        self.step();
    }

    /// One iteration of the threads of the queues only.
    pub(super) fn poll_queues(&mut self) {
        let mut completions = CompletionBatch::with_capacity(64);
        for queue in &mut self.queues {
            queue.poll(self.now, &mut completions);
            self.completions.extend(completions.drain());
            queue.flush_submissions();
        }
    }

    /// The part of the memory for request number `number`, of this number of blocks.
    pub(super) fn buffer(&self, number: u64, blocks: u32) -> Segment {
        let len = blocks * u32::try_from(BLOCK).unwrap();
        self.memory.slice(u32::try_from(number).unwrap() * len, len).unwrap()
    }

    pub(super) fn request(
        operation: Operation,
        lba: u64,
        segments: &[Segment],
        token: u64,
    ) -> Request {
        let bytes: u32 = segments.iter().map(|segment| segment.len_bytes).sum();
        Request {
            token,
            lba,
            operand: 0,
            segment_first: 0,
            blocks: bytes / u32::try_from(BLOCK).unwrap(),
            segment_count: u16::try_from(segments.len()).unwrap(),
            metadata_count: 0,
            operation,
            flags: RequestFlags::NONE,
        }
    }

    /// Submits one request on queue `queue`.
    pub(super) fn submit(
        &mut self,
        queue: usize,
        operation: Operation,
        lba: u64,
        segments: &[Segment],
        token: u64,
    ) -> bool {
        let request = Self::request(operation, lba, segments, token);
        let taken = self.queues[queue].submit(self.now, &[request], segments);
        self.queues[queue].flush_submissions();
        taken == 1
    }

    /// Executes one request and waits for its completion.
    #[track_caller]
    pub(super) fn run_request(
        &mut self,
        operation: Operation,
        lba: u64,
        segments: &[Segment],
    ) -> IoStatus {
        self.run_until(|host| host.submit(0, operation, lba, segments, 4711));
        self.run_until(|host| host.completions.iter().any(|completion| completion.token == 4711));
        let at = self.completions.iter().position(|completion| completion.token == 4711).unwrap();
        self.completions.remove(at).status
    }

    /// Writes a pattern and reads it back into other memory.
    #[track_caller]
    pub(super) fn write_and_verify(&mut self, lba: u64, blocks: u32, seed: u64) {
        let (from, to) = (self.buffer(0, blocks), self.buffer(1, blocks));
        let bytes = pattern(seed, from.len_bytes as usize);
        self.regions.store(from, &bytes).unwrap();
        self.regions.fill(to, 0).unwrap();
        assert_eq!(self.run_request(Operation::Write, lba, &[from]), IoStatus::SUCCESS);
        assert_eq!(self.run_request(Operation::Read, lba, &[to]), IoStatus::SUCCESS);
        assert!(load_host_memory(&self.regions, to) == bytes, "{blocks} blocks at {lba}");
    }
}

impl SimulatedTime for SinglePathHost {
    fn now_mut(&mut self) -> &mut Instant {
        &mut self.now
    }

    fn step(&mut self) {
        self.now = self.now.after(STEP);
        self.target.step(self.now);
        if let Some(event) = self.multipath.as_mut().and_then(|it| it.poll(self.now)) {
            self.events.extend(match &event {
                PathEvent::Up { .. } => Some(Event::Recovered),
                PathEvent::Controller { event, .. } => Some(event.clone()),
                _ => None,
            });
            self.path_events.push(event);
        }
        self.poll_queues();
    }

    fn event_log(&self) -> String {
        format!("{:?}", self.path_events)
    }
}
