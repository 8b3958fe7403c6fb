//! A controller over block devices that complete one poll later, and a host that sends it commands.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Durability, Error, Instant, IoChannel,
    IoCompletion, IoStatus, Limits, Operation, OperationSet, Request, Segment, Span,
};
use tenmil_wire::{Command, Status, TypedCommand};

use crate::controller::transport_interface::{AdminDataTransfer, AdminOutcome, AdminResult};
use crate::controller::{
    Controller, ControllerConfig, NamespaceConfig, NamespacePool, Subsystem, SubsystemConfig,
};

/// Number of blocks of every block device.
pub(super) const BLOCKS: u64 = 2048;

/// Block device that stores one byte per block, completes one poll later, and fails on request.
#[derive(Clone)]
pub(super) struct FakeBlockDevice(Arc<FakeBlockDeviceState>);

struct FakeBlockDeviceState {
    limits: Limits,
    bytes: Mutex<Vec<u8>>,
    fails_at: Mutex<Option<u64>>,
    flushes: Mutex<u32>,
}

struct FakeBlockChannel {
    shelf: FakeBlockDevice,
    taken: VecDeque<IoCompletion>,
    ready: usize,
}

pub(super) const EVERYTHING: [Operation; 10] = Operation::ALL;

impl FakeBlockDevice {
    /// Block device with 512-byte blocks and all capabilities.
    pub(super) fn new() -> Self {
        Self::with_block_size(512, &EVERYTHING, Durability::VolatileCache)
    }

    pub(super) fn with_block_size(
        block_size: u32,
        can: &[Operation],
        durability: Durability,
    ) -> Self {
        Self::with_geometry(block_size, BLOCKS, can, durability)
    }

    pub(super) fn with_geometry(
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
            operations: OperationSet::from_operations(can),
        };
        let bytes = Mutex::new(vec![0xaa; usize::try_from(block_count).unwrap()]);
        let (fails_at, flushes) = (Mutex::new(None), Mutex::new(0));
        Self(Arc::new(FakeBlockDeviceState { limits, bytes, fails_at, flushes }))
    }

    /// Number of blocks that still have their initial contents.
    pub(super) fn nonzero_blocks(&self) -> usize {
        self.0.bytes.lock().unwrap().iter().filter(|&&byte| byte == 0xaa).count()
    }

    pub(super) fn flush_count(&self) -> u32 {
        *self.0.flushes.lock().unwrap()
    }

    pub(super) fn fail_request_at(&self, lba: u64) {
        *self.0.fails_at.lock().unwrap() = Some(lba);
    }

    fn execute(&self, request: &Request) -> IoStatus {
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

impl BlockDevice for FakeBlockDevice {
    fn limits(&self) -> Limits {
        self.0.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        Ok(Box::new(FakeBlockChannel { shelf: self.clone(), taken: VecDeque::new(), ready: 0 }))
    }
}

impl IoChannel for FakeBlockChannel {
    fn limits(&self) -> &Limits {
        &self.shelf.0.limits
    }

    fn submit(&mut self, _now: Instant, requests: &[Request], _segments: &[Segment]) -> usize {
        let room = self.shelf.0.limits.depth_max as usize - self.taken.len();
        for request in requests.iter().take(room) {
            let outcome = self.shelf.execute(request);
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

impl ChannelWakeup for FakeBlockChannel {}

/// Pool of this number of bytes.
pub(super) struct FakePool(pub(super) u64);

impl NamespacePool for FakePool {
    fn capacity_bytes(&self) -> u64 {
        self.0
    }

    fn block_sizes(&self) -> &[u32] {
        &[512, 4096]
    }

    fn create_block_device(
        &mut self,
        block_size: u32,
        block_count: u64,
    ) -> Result<Arc<dyn BlockDevice>, Error> {
        Ok(Arc::new(FakeBlockDevice::with_geometry(
            block_size,
            block_count,
            &EVERYTHING,
            Durability::Persistent,
        )))
    }
}

/// Subsystem with one controller, and its host.
pub(super) struct ControllerFixture {
    pub(super) subsystem: Subsystem,
    pub(super) controller: Controller,
    pub(super) now: Instant,
    pub(super) shelves: Vec<FakeBlockDevice>,
}

impl ControllerFixture {
    /// Bench with one namespace.
    pub(super) fn new() -> Self {
        Self::with_devices(vec![FakeBlockDevice::new()])
    }

    pub(super) fn with_devices(shelves: Vec<FakeBlockDevice>) -> Self {
        Self::with_config(shelves, |_| {}, ControllerConfig::default())
    }

    pub(super) fn with_config(
        shelves: Vec<FakeBlockDevice>,
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
    pub(super) fn with_pool(shelves: Vec<FakeBlockDevice>, bytes: u64) -> Self {
        Self::with_config(
            shelves,
            |config| config.pool = Some(Box::new(FakePool(bytes))),
            ControllerConfig::default(),
        )
    }

    /// Another controller of the same subsystem.
    pub(super) fn open_second_controller(&self, cntlid: u16) -> Controller {
        let config = ControllerConfig { cntlid, ..ControllerConfig::default() };
        self.subsystem.open_controller(self.now, config).unwrap()
    }

    /// Submits a command; `sent` is truncated or padded with zeroes to the length that the controller
    /// expects.
    pub(super) fn submit(&mut self, command: &Command, sent: &[u8]) -> (AdminOutcome, Vec<u8>) {
        submit_to_controller(&mut self.controller, self.now, command, sent)
    }

    /// Runs a command that completes immediately and returns no data.
    pub(super) fn run_without_data(&mut self, command: impl TypedCommand) -> Result<u32, Status> {
        self.run_with_data(command, &[])
    }

    /// Runs a command with data from the host.
    pub(super) fn run_with_data(
        &mut self,
        command: impl TypedCommand,
        sent: &[u8],
    ) -> Result<u32, Status> {
        completed_result(self.submit(&command.to_command(), sent).0)
    }

    /// Runs a command that returns data.
    pub(super) fn run_for_data(&mut self, command: impl TypedCommand) -> Result<Vec<u8>, Status> {
        let (step, data) = self.submit(&command.to_command(), &[]);
        completed_result(step).map(|_| data)
    }

    /// Polls until a command that takes longer has completed.
    pub(super) fn poll_until_deferred_completion(&mut self) -> (u16, Result<u32, Status>) {
        for _ in 0..100_000 {
            self.now = self.now.after(Span::from_us(1));
            self.controller.poll(self.now);
            if let Some(done) = self.controller.next_deferred_completion() {
                return (done.cid, completed_result(AdminOutcome::Done(done.end)));
            }
        }
        panic!("the command never ended");
    }

    /// Advances the time.
    pub(super) fn advance_time(&mut self, span: Span) {
        self.now = self.now.after(span);
        self.controller.poll(self.now);
    }

    pub(super) fn poll_times(&mut self, count: u32) {
        for _ in 0..count {
            self.advance_time(Span::from_us(1));
        }
    }
}

/// Submits a command to a controller, as a transport does.
pub(super) fn submit_to_controller(
    controller: &mut Controller,
    now: Instant,
    command: &Command,
    sent: &[u8],
) -> (AdminOutcome, Vec<u8>) {
    let moves = match controller.command_data_length(command) {
        Ok(moves) => moves,
        Err(status) => return (AdminOutcome::Done(AdminResult::failure(status)), Vec::new()),
    };
    let mut data = Vec::new();
    if let AdminDataTransfer::FromHost(len_bytes) = moves {
        data = sent.to_vec();
        data.resize(len_bytes as usize, 0);
    }
    let step = controller.execute(now, command, &mut data);
    if let (AdminDataTransfer::ToHost(len_bytes), AdminOutcome::Done(AdminResult { status, .. })) =
        (moves, step)
        && status.is_success()
    {
        assert_eq!(data.len(), len_bytes as usize, "{command:?}");
    }
    (step, data)
}

/// Result of a completed command, or its status without Do Not Retry.
pub(super) fn completed_result(step: AdminOutcome) -> Result<u32, Status> {
    match step {
        AdminOutcome::Done(AdminResult { status: Status::SUCCESS, result }) => Ok(result),
        AdminOutcome::Done(AdminResult { status, .. }) => Err(status.without_crd_more_dnr()),
        other => panic!("expected the command to end, found {other:?}"),
    }
}
