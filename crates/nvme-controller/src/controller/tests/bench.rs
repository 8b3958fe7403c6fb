//! A controller over block devices that complete one poll later, and a host that sends it commands.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Durability, Error, Instant, IoChannel,
    IoCompletion, IoStatus, Limits, Operation, OperationSet, Request, Segment, Span,
};
use tenmil_wire::{Command, Status, TypedCommand};

use crate::controller::interface::{AdminData, AdminOutcome, AdminResult};
use crate::controller::{
    Controller, ControllerConfig, NamespaceConfig, NamespacePool, Subsystem, SubsystemConfig,
};

/// Number of blocks of every block device.
pub(super) const BLOCKS: u64 = 2048;

/// Block device that stores one byte per block, completes one poll later, and fails on request.
#[derive(Clone)]
pub(super) struct Shelf(Arc<Inner>);

struct Inner {
    limits: Limits,
    bytes: Mutex<Vec<u8>>,
    fails_at: Mutex<Option<u64>>,
    flushes: Mutex<u32>,
}

struct Channel {
    shelf: Shelf,
    taken: VecDeque<IoCompletion>,
    ready: usize,
}

pub(super) const EVERYTHING: [Operation; 10] = Operation::ALL;

impl Shelf {
    /// Block device with 512-byte blocks and all capabilities.
    pub(super) fn new() -> Self {
        Self::with(512, &EVERYTHING, Durability::VolatileCache)
    }

    pub(super) fn with(block_size: u32, can: &[Operation], durability: Durability) -> Self {
        Self::sized(block_size, BLOCKS, can, durability)
    }

    pub(super) fn sized(
        block_size: u32,
        block_count: u64,
        can: &[Operation],
        durability: Durability,
    ) -> Self {
        let limits = Limits {
            block_size,
            metadata_size: 0,
            block_count,
            request_blocks_max: 64,
            segments_max: 8,
            optimal_boundary_blocks: 256,
            atomic_write_blocks: 16,
            depth_max: 4,
            durability,
            operations: OperationSet::of(can),
        };
        let bytes = Mutex::new(vec![0xaa; usize::try_from(block_count).unwrap()]);
        let (fails_at, flushes) = (Mutex::new(None), Mutex::new(0));
        Self(Arc::new(Inner { limits, bytes, fails_at, flushes }))
    }

    /// Number of blocks that still have their initial contents.
    pub(super) fn unerased(&self) -> usize {
        self.0.bytes.lock().unwrap().iter().filter(|&&byte| byte == 0xaa).count()
    }

    pub(super) fn flushes(&self) -> u32 {
        *self.0.flushes.lock().unwrap()
    }

    pub(super) fn fail_at(&self, lba: u64) {
        *self.0.fails_at.lock().unwrap() = Some(lba);
    }

    fn work(&self, request: &Request) -> IoStatus {
        let range = request.lba..request.lba + u64::from(request.blocks);
        if range.end > self.0.limits.block_count {
            return IoStatus::LBA_OUT_OF_RANGE;
        }
        if self.0.fails_at.lock().unwrap().is_some_and(|lba| range.contains(&lba)) {
            return IoStatus::UNRECOVERED_READ;
        }
        match request.operation {
            Operation::WriteZeroes => {
                let range =
                    usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap();
                self.0.bytes.lock().unwrap()[range].fill(0);
            }
            Operation::Flush => *self.0.flushes.lock().unwrap() += 1,
            _ => {}
        }
        IoStatus::SUCCESS
    }
}

impl BlockDevice for Shelf {
    fn limits(&self) -> Limits {
        self.0.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        Ok(Box::new(Channel { shelf: self.clone(), taken: VecDeque::new(), ready: 0 }))
    }
}

impl IoChannel for Channel {
    fn limits(&self) -> &Limits {
        &self.shelf.0.limits
    }

    fn submit(&mut self, _now: Instant, requests: &[Request], _segments: &[Segment]) -> usize {
        let room = self.shelf.0.limits.depth_max as usize - self.taken.len();
        for request in requests.iter().take(room) {
            let outcome = self.shelf.work(request);
            self.taken.push_back(IoCompletion { token: request.token, status: outcome, result: 0 });
        }
        requests.len().min(room)
    }

    /// Completes the requests that were submitted before the previous poll.
    fn poll(&mut self, _now: Instant, answers: &mut CompletionBatch) -> usize {
        let count = self.ready.min(answers.remaining());
        for answer in self.taken.drain(..count) {
            answers.push(answer);
        }
        self.ready = self.taken.len();
        count
    }
}

impl ChannelWakeup for Channel {}

/// Pool of this number of bytes.
pub(super) struct Pool(pub(super) u64);

impl NamespacePool for Pool {
    fn capacity_bytes(&self) -> u64 {
        self.0
    }

    fn block_sizes(&self) -> &[u32] {
        &[512, 4096]
    }

    fn create(&mut self, block_size: u32, block_count: u64) -> Result<Arc<dyn BlockDevice>, Error> {
        Ok(Arc::new(Shelf::sized(block_size, block_count, &EVERYTHING, Durability::Persistent)))
    }
}

/// Subsystem with one controller, and its host.
pub(super) struct Bench {
    pub(super) subsystem: Subsystem,
    pub(super) controller: Controller,
    pub(super) now: Instant,
    pub(super) shelves: Vec<Shelf>,
}

impl Bench {
    /// Bench with one namespace.
    pub(super) fn new() -> Self {
        Self::over(vec![Shelf::new()])
    }

    pub(super) fn over(shelves: Vec<Shelf>) -> Self {
        Self::with(shelves, |_| {}, ControllerConfig::default())
    }

    pub(super) fn with(
        shelves: Vec<Shelf>,
        change: impl FnOnce(&mut SubsystemConfig),
        config: ControllerConfig,
    ) -> Self {
        let namespaces = shelves.iter().map(|shelf| NamespaceConfig::new(Arc::new(shelf.clone())));
        let mut subsystem = SubsystemConfig::new("T1", namespaces.collect());
        change(&mut subsystem);
        let subsystem = Subsystem::new(subsystem).unwrap();
        let now = Instant { ns: 1_000_000_000 };
        let controller = subsystem.open_controller(now, config).unwrap();
        Self { subsystem, controller, now, shelves }
    }

    /// Bench with a pool of this number of bytes.
    pub(super) fn with_pool(shelves: Vec<Shelf>, bytes: u64) -> Self {
        Self::with(
            shelves,
            |config| config.pool = Some(Box::new(Pool(bytes))),
            ControllerConfig::default(),
        )
    }

    /// Another controller of the same subsystem.
    pub(super) fn second(&self, cntlid: u16) -> Controller {
        let config = ControllerConfig { cntlid, ..ControllerConfig::default() };
        self.subsystem.open_controller(self.now, config).unwrap()
    }

    /// Submits a command; `sent` is truncated or padded with zeroes to the length that the controller
    /// expects.
    pub(super) fn step(&mut self, command: &Command, sent: &[u8]) -> (AdminOutcome, Vec<u8>) {
        step(&mut self.controller, self.now, command, sent)
    }

    /// Runs a command that completes immediately and returns no data.
    pub(super) fn run(&mut self, command: impl TypedCommand) -> Result<u32, Status> {
        self.send(command, &[])
    }

    /// Runs a command with data from the host.
    pub(super) fn send(&mut self, command: impl TypedCommand, sent: &[u8]) -> Result<u32, Status> {
        ended(self.step(&command.to_command(), sent).0)
    }

    /// Runs a command that returns data.
    pub(super) fn get(&mut self, command: impl TypedCommand) -> Result<Vec<u8>, Status> {
        let (step, data) = self.step(&command.to_command(), &[]);
        ended(step).map(|_| data)
    }

    /// Polls until a command that takes longer has completed.
    pub(super) fn wait(&mut self) -> (u16, Result<u32, Status>) {
        for _ in 0..100_000 {
            self.now = self.now.after(Span::from_us(1));
            self.controller.poll(self.now);
            if let Some(done) = self.controller.next_deferred_completion() {
                return (done.cid, ended(AdminOutcome::Done(done.end)));
            }
        }
        panic!("the command never ended");
    }

    /// Advances the time.
    pub(super) fn pass(&mut self, span: Span) {
        self.now = self.now.after(span);
        self.controller.poll(self.now);
    }

    pub(super) fn turns(&mut self, count: u32) {
        for _ in 0..count {
            self.pass(Span::from_us(1));
        }
    }
}

/// Submits a command to a controller, as a transport does.
pub(super) fn step(
    controller: &mut Controller,
    now: Instant,
    command: &Command,
    sent: &[u8],
) -> (AdminOutcome, Vec<u8>) {
    let moves = match controller.data_transfer(command) {
        Ok(moves) => moves,
        Err(status) => return (AdminOutcome::Done(AdminResult::refused(status)), Vec::new()),
    };
    let mut data = Vec::new();
    if let AdminData::FromHost(len_bytes) = moves {
        data = sent.to_vec();
        data.resize(len_bytes as usize, 0);
    }
    let step = controller.execute(now, command, &mut data);
    if let (AdminData::ToHost(len_bytes), AdminOutcome::Done(AdminResult { status, .. })) =
        (moves, step)
        && status.is_success()
    {
        assert_eq!(data.len(), len_bytes as usize, "{command:?}");
    }
    (step, data)
}

/// Result of a completed command, or its status without Do Not Retry.
pub(super) fn ended(step: AdminOutcome) -> Result<u32, Status> {
    match step {
        AdminOutcome::Done(AdminResult { status: Status::SUCCESS, result }) => Ok(result),
        AdminOutcome::Done(AdminResult { status, .. }) => Err(status.code()),
        other => panic!("expected the command to end, found {other:?}"),
    }
}
