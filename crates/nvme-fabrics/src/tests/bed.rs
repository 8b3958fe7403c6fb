//! A host with one remote SSD, in simulated time.

use tenmil_base::{
    CompletionBatch, Instant, IoChannel, IoCompletion, IoStatus, Memory, Operation, Request,
    RequestFlags, Segment, Span,
};
use tenmil_dma::{CommandStore, DeviceKind, DevicePool, MemoryBacking, MemoryMapping, RegionTable};
use tenmil_nvme_host::{
    ControllerOptions, Event, FastPathOptions, QueuePairOptions, QueueSizes, State,
};

use super::target::{BLOCK, Target, load, pattern};
use super::turning::Turning;
use crate::channel::FabricsChannel;
use crate::controller::{ConnectError, Connecting, FabricsController};
use crate::options::Options;

pub(super) const SUBSYSTEM: &str = "nqn.2024-01.example:disk";
pub(super) const HOST: &str = "nqn.2024-01.example:host";

/// Time of an iteration.
const TURN: Span = Span::from_us(50);

pub(super) struct Bed {
    pub(super) target: Target,
    pub(super) regions: RegionTable,
    pub(super) memory: Segment,
    pub(super) now: Instant,
    pub(super) remote: Option<FabricsController>,
    pub(super) queues: Vec<FabricsChannel>,
    pub(super) events: Vec<Event>,
    pub(super) completions: Vec<IoCompletion>,
    pool: DevicePool,
}

impl Bed {
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
            remote: None,
            queues: Vec::new(),
            events: Vec::new(),
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
    pub(super) fn call(&mut self, options: Options) -> Result<(), ConnectError> {
        let dial = self.target.dial(&self.regions);
        let wishes = ControllerOptions { queue_pairs: 8, ..ControllerOptions::default() };
        let mut calling = Connecting::begin(self.pool.clone(), dial, options, wishes, self.now)?;
        loop {
            self.now = self.now.after(TURN);
            self.target.turn(self.now);
            if let Some(ended) = calling.poll(self.now) {
                self.remote = Some(ended?);
                return Ok(());
            }
        }
    }

    /// Connects and waits until the controller is ready. False if it does not become ready.
    pub(super) fn is_reached(&mut self) -> bool {
        if self.call(Self::options()).is_err() {
            return false;
        }
        while self.remote().is_usable() {
            if self.remote().controller().state() == State::Ready {
                return true;
            }
            self.turn();
        }
        self.remote = None;
        false
    }

    /// A bed with a connected target and a ready controller.
    pub(super) fn ready() -> Self {
        let mut bed = Self::new();
        bed.call(Self::options()).unwrap();
        bed.turn_until(|bed| bed.remote().controller().state() == State::Ready);
        bed
    }

    /// The same, with a queue of this number of entries.
    pub(super) fn with_queue(depth: u32) -> Self {
        let mut bed = Self::ready();
        bed.add_queue(depth);
        bed
    }

    pub(super) fn add_queue(&mut self, depth: u32) {
        let techniques = FastPathOptions::default();
        let options = QueuePairOptions { depth, vector: None, techniques };
        let now = self.now;
        self.turn_until(|bed| bed.remote().controller().state() == State::Ready);
        let id = self.remote().controller().create_queue_pair(now, options).unwrap();
        self.turn_until(|bed| bed.events.contains(&Event::QueuePairCreated { id }));
        let queue = self.remote().take_queue(id, 1, QueueSizes::default()).unwrap();
        self.queues.push(queue);
    }

    pub(super) fn remote(&mut self) -> &mut FabricsController {
        self.remote.as_mut().unwrap()
    }

    /// One iteration of the threads of the queues only.
    pub(super) fn turn_queues(&mut self) {
        let mut completions = CompletionBatch::with_capacity(64);
        for queue in &mut self.queues {
            queue.poll(self.now, &mut completions);
            self.completions.extend(completions.drain());
            queue.flush();
        }
    }

    /// The part of the memory for request number `number`, of this number of blocks.
    pub(super) fn place(&self, number: u64, blocks: u32) -> Segment {
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
            random_token: token,
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
        self.queues[queue].flush();
        taken == 1
    }

    /// Executes one request and waits for its completion.
    #[track_caller]
    pub(super) fn run(&mut self, operation: Operation, lba: u64, segments: &[Segment]) -> IoStatus {
        self.turn_until(|bed| bed.submit(0, operation, lba, segments, 4711));
        self.turn_until(|bed| bed.completions.iter().any(|completion| completion.token == 4711));
        let at = self.completions.iter().position(|completion| completion.token == 4711).unwrap();
        self.completions.remove(at).status
    }

    /// Writes a pattern and reads it back into other memory.
    #[track_caller]
    pub(super) fn exchange(&mut self, lba: u64, blocks: u32, seed: u64) {
        let (from, to) = (self.place(0, blocks), self.place(1, blocks));
        let bytes = pattern(seed, from.len_bytes as usize);
        self.regions.store(from, &bytes).unwrap();
        self.regions.fill(to, 0).unwrap();
        assert_eq!(self.run(Operation::Write, lba, &[from]), IoStatus::SUCCESS);
        assert_eq!(self.run(Operation::Read, lba, &[to]), IoStatus::SUCCESS);
        assert!(load(&self.regions, to) == bytes, "{blocks} blocks at {lba}");
    }
}

impl Turning for Bed {
    fn now(&mut self) -> &mut Instant {
        &mut self.now
    }

    fn turn(&mut self) {
        self.now = self.now.after(TURN);
        self.target.turn(self.now);
        if let Some(remote) = &mut self.remote {
            self.events.extend(remote.poll(self.now));
        }
        self.turn_queues();
    }

    fn story(&self) -> String {
        format!("{:?}", self.events)
    }
}
