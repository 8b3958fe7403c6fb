//! Minimal driver, for tests.

use std::sync::Arc;

use tenmil_base::{Instant, Segment, Span};
use tenmil_wire::admin::{CreateIoCompletionQueue, CreateIoSubmissionQueue};
use tenmil_wire::{Command, Completion, Status, TypedCommand};

use crate::BouncePool;
use crate::controller::{ControllerConfig, NamespaceConfig, Subsystem, SubsystemConfig};
use crate::fuzz::block_device::FakeDevice;
use crate::fuzz::fake_host::{BOUNCE, FakeHost, FakeRam, HostBehavior, RecordedInterrupts};
use crate::transport::{MemoryTransport, MemoryTransportConfig, NextPoll};

/// A controller and its host.
pub(super) struct TransportFixture {
    pub(super) ram: Arc<FakeRam>,
    pub(super) device: Arc<FakeDevice>,
    pub(super) subsystem: Subsystem,
    pub(super) front: MemoryTransport<FakeHost, RecordedInterrupts>,
    pub(super) raised_vectors: RecordedInterrupts,
    pub(super) buffers: BouncePool,
    pub(super) now: Instant,
    pub(super) pairs: Vec<HostQueuePair>,
    next_cid: u16,
}

/// A queue pair as seen by its host: submission queue `sqid` uses completion queue `cqid`.
#[derive(Clone, Copy)]
pub(super) struct HostQueuePair {
    pub(super) sqid: u16,
    pub(super) cqid: u16,
    sq: u64,
    cq: u64,
    entries: u32,
    tail: u32,
    head: u32,
    phase: bool,
}

pub(super) const SHARED: HostBehavior =
    HostBehavior { shares_rings: true, shares_data: true, completes_later: false };
pub(super) const LATER: HostBehavior =
    HostBehavior { shares_rings: false, shares_data: false, completes_later: true };

pub(super) const CAP: u32 = 0x00;
pub(super) const CC: u32 = 0x14;
pub(super) const CSTS: u32 = 0x1c;
pub(super) const AQA: u32 = 0x24;
pub(super) const ASQ: u32 = 0x28;
pub(super) const ACQ: u32 = 0x30;
/// IOCQES 4, IOSQES 6, pages of 4 KiB, round robin, NVM command set, enabled.
pub(super) const ENABLED: u32 = 4 << 20 | 6 << 16 | 1;
/// Address of test data.
pub(super) const DATA: u64 = 0x4_0000;
const RINGS: u64 = 0x1000;

impl TransportFixture {
    pub(super) fn new(
        behavior: HostBehavior,
        device: impl FnOnce(FakeDevice) -> FakeDevice,
    ) -> Self {
        Self::with_setup(behavior, 1, device, |_| {})
    }

    pub(super) fn with_setup(
        behavior: HostBehavior,
        seed: u64,
        device: impl FnOnce(FakeDevice) -> FakeDevice,
        change: impl FnOnce(&mut ControllerConfig),
    ) -> Self {
        let ram = FakeRam::new(0x8_0000, 0x4000);
        let device = Arc::new(device(FakeDevice::new(&ram, 512)));
        let namespaces = vec![NamespaceConfig::new(device.clone())];
        let subsystem = Subsystem::new(SubsystemConfig::new("TEST", namespaces)).unwrap();
        let mut config = ControllerConfig {
            io_queues_max: 4,
            vectors: 5,
            transfer_bytes_max: 1 << 16,
            queue_entries_max: 64,
            ..ControllerConfig::default()
        };
        change(&mut config);
        let now = Instant { ns: 1_000_000 };
        let controller = subsystem.open_controller(now, config).unwrap();
        let buffer =
            |index: u64| Segment { region: BOUNCE, offset: index * 0x1000, len_bytes: 0x1000 };
        let buffers = BouncePool::new(ram.clone(), (0..4).map(buffer).collect());
        let (host, raised_vectors) =
            (FakeHost::new(&ram, behavior, seed), RecordedInterrupts::default());
        let front = MemoryTransport::new(
            controller,
            host,
            raised_vectors.clone(),
            buffers.clone(),
            MemoryTransportConfig {
                in_flight_max: 16,
                contexts_max: 8,
                ..MemoryTransportConfig::default()
            },
        );
        let pairs = Vec::new();
        Self { ram, device, subsystem, front, raised_vectors, buffers, now, pairs, next_cid: 0 }
    }

    /// An enabled controller.
    pub(super) fn new_enabled(behavior: HostBehavior) -> Self {
        let mut rig = Self::new(behavior, |device| device);
        rig.enable_controller(16);
        rig
    }

    /// Same, with a read in flight in a block device that does not complete it.
    pub(super) fn with_stuck_read() -> Self {
        let mut rig = Self::new_enabled(SHARED);
        rig.create_queue_pair(1, 1, None);
        rig.device.contents().is_stuck = true;
        rig.push_command(1, read_command(1));
        rig.ring_submission_doorbell(1);
        rig.poll_transport();
        rig
    }

    pub(super) fn enable_controller(&mut self, entries: u32) {
        let pair = HostQueuePair {
            sqid: 0,
            cqid: 0,
            sq: RINGS,
            cq: RINGS + 0x1000,
            entries,
            tail: 0,
            head: 0,
            phase: true,
        };
        self.clear_rings(pair);
        self.pairs = vec![pair];
        self.write_register(AQA, u64::from((entries - 1) << 16 | (entries - 1)));
        self.front.write_register(self.now, ASQ, 8, pair.sq);
        self.front.write_register(self.now, ACQ, 8, pair.cq);
        self.write_register(CC, ENABLED.into());
        self.poll_transport();
        assert_eq!(self.read_register(CSTS), 1, "{:?}", self.front.last_error());
    }

    pub(super) fn read_register(&self, at: u32) -> u64 {
        self.front.read_register(at, 4)
    }

    pub(super) fn write_register(&mut self, at: u32, value: u64) {
        self.front.write_register(self.now, at, 4, value);
    }

    pub(super) fn poll_transport(&mut self) -> NextPoll {
        self.now = self.now.after(Span::from_us(1));
        self.front.poll(self.now)
    }

    /// Polls until `is_done`, or fails.
    pub(super) fn poll_until(&mut self, what: &str, mut is_done: impl FnMut(&mut Self) -> bool) {
        for _ in 0..20_000 {
            if is_done(self) {
                return;
            }
            self.poll_transport();
        }
        panic!("{what} does not happen: {:?}", self.front.last_error());
    }

    /// Creates completion queue `cqid` and submission queue `sqid` on it, with a vector.
    pub(super) fn create_queue_pair(&mut self, sqid: u16, cqid: u16, vector: Option<u16>) {
        let pair = self.uncreated_queue_pair(sqid, cqid, 16);
        assert_eq!(self.create_completion_queue(&pair, vector), Status::SUCCESS);
        assert_eq!(self.create_submission_queue(&pair), Status::SUCCESS);
        self.pairs.push(pair);
    }

    /// Rings for a queue pair that is not created yet.
    pub(super) fn uncreated_queue_pair(
        &mut self,
        sqid: u16,
        cqid: u16,
        entries: u32,
    ) -> HostQueuePair {
        let base = RINGS + 0x2000;
        let pair = HostQueuePair {
            sqid,
            cqid,
            sq: base + u64::from(sqid) * 0x1000,
            cq: base + 0x8000 + u64::from(cqid) * 0x1000,
            entries,
            tail: 0,
            head: 0,
            phase: true,
        };
        self.clear_rings(pair);
        pair
    }

    pub(super) fn create_completion_queue(
        &mut self,
        pair: &HostQueuePair,
        vector: Option<u16>,
    ) -> Status {
        self.run_admin(self.create_completion_queue_command(pair, vector)).status()
    }

    pub(super) fn create_completion_queue_command(
        &self,
        pair: &HostQueuePair,
        vector: Option<u16>,
    ) -> Command {
        let create = CreateIoCompletionQueue {
            qid: pair.cqid,
            qsize: u16::try_from(pair.entries - 1).unwrap(),
            pc: true,
            ien: vector.is_some(),
            iv: vector.unwrap_or(0),
        };
        create.to_command().with_prp(pair.cq, 0)
    }

    pub(super) fn create_submission_queue(&mut self, pair: &HostQueuePair) -> Status {
        self.run_admin(self.create_submission_queue_command(pair)).status()
    }

    pub(super) fn create_submission_queue_command(&self, pair: &HostQueuePair) -> Command {
        let create = CreateIoSubmissionQueue {
            qid: pair.sqid,
            qsize: u16::try_from(pair.entries - 1).unwrap(),
            pc: true,
            cqid: pair.cqid,
            ..CreateIoSubmissionQueue::default()
        };
        create.to_command().with_prp(pair.sq, 0)
    }

    /// Runs an admin command to completion.
    pub(super) fn run_admin(&mut self, command: Command) -> Completion {
        self.run_command(0, command)
    }

    /// Runs a command on the pair at `at` to completion.
    pub(super) fn run_command(&mut self, at: usize, command: Command) -> Completion {
        let cid = self.push_command(at, command);
        self.ring_submission_doorbell(at);
        let mut found = None;
        self.poll_until("an answer", |rig| {
            found = rig.take_completion(at);
            found.is_some()
        });
        let completion = found.unwrap();
        assert_eq!((completion.cid(), completion.sqid()), (cid, self.pairs[at].sqid));
        completion
    }

    /// Stores a command and returns its identifier.
    pub(super) fn push_command(&mut self, at: usize, command: Command) -> u16 {
        self.next_cid += 1;
        let (cid, pair) = (self.next_cid, &mut self.pairs[at]);
        let place = pair.sq + u64::from(pair.tail) * 64;
        pair.tail = (pair.tail + 1) % pair.entries;
        self.write_host_memory(place, &command.with_cid(cid).to_bytes());
        cid
    }

    pub(super) fn ring_submission_doorbell(&mut self, at: usize) {
        let HostQueuePair { sqid, tail, .. } = self.pairs[at];
        self.front.write_doorbell(self.now, u32::from(sqid) * 2, tail);
    }

    /// Takes a completion, if present, and frees its entry.
    pub(super) fn take_completion(&mut self, at: usize) -> Option<Completion> {
        let pair = &mut self.pairs[at];
        let place = usize::try_from(pair.cq).unwrap() + pair.head as usize * 16;
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&self.ram.host_bytes()[place..place + 16]);
        let completion = Completion::from_bytes(&bytes);
        if completion.phase() != pair.phase {
            return None;
        }
        pair.head = (pair.head + 1) % pair.entries;
        pair.phase ^= pair.head == 0;
        let (cqid, head) = (pair.cqid, pair.head);
        self.front.write_doorbell(self.now, u32::from(cqid) * 2 + 1, head);
        Some(completion)
    }

    pub(super) fn write_host_memory(&mut self, at: u64, bytes: &[u8]) {
        let at = usize::try_from(at).unwrap();
        self.ram.host_bytes()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub(super) fn read_host_memory(&self, at: u64, len: usize) -> Vec<u8> {
        let at = usize::try_from(at).unwrap();
        self.ram.host_bytes()[at..at + len].to_vec()
    }

    pub(super) fn take_raised_vectors(&self) -> Vec<u16> {
        core::mem::take(&mut self.raised_vectors.0.lock().unwrap())
    }

    fn clear_rings(&mut self, pair: HostQueuePair) {
        self.write_host_memory(pair.sq, &[0; 0x1000]);
        self.write_host_memory(pair.cq, &[0; 0x1000]);
    }
}

/// A read of the first blocks into [`DATA`].
pub(super) fn read_command(blocks: u32) -> Command {
    Command::new(2).with_nsid(1).with_prp(DATA, DATA + 0x1000).with_cdw12(blocks - 1)
}

/// A write of the first blocks from [`DATA`].
pub(super) fn write_command(blocks: u32) -> Command {
    read_command(blocks).with_opcode(1)
}
