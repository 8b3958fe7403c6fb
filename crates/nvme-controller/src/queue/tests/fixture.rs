//! Host side of a queue, for tests.

use std::sync::Arc;

use tenmil_base::{BlockDevice, Instant, Random, Segment};
use tenmil_wire::{Command, Completion, IoOpcode, Status};

use crate::BouncePool;
use crate::doorbell::DoorbellPage;
use crate::executor::{ExecutorConfig, ExecutorContext};
use crate::fuzz::block_device::FakeDevice;
use crate::fuzz::fake_host::{BOUNCE, FakeHost, FakeRam, HostBehavior};
use crate::namespace::{
    CopyLimits, Namespace, NamespaceIdentity, NamespaceSnapshot, VersionedValue,
};
use crate::queue::{Queue, QueueConfig, QueueEvent};

/// A queue, its host and its block devices.
pub(super) struct QueueFixture {
    pub(super) ram: Arc<FakeRam>,
    pub(super) device: Arc<FakeDevice>,
    pub(super) published: VersionedValue<NamespaceSnapshot>,
    pub(super) doorbells: Arc<DoorbellPage>,
    pub(super) shared: ExecutorContext,
    pub(super) queue: Queue<FakeHost>,
    pub(super) host: FakeHost,
    pub(super) now: Instant,
    pub(super) events: Vec<QueueEvent>,
    pub(super) sq: HostRing,
    cq: HostRing,
    phase: bool,
    next_cid: u16,
}

/// A ring as seen by its host.
pub(super) struct HostRing {
    pub(super) at: usize,
    pub(super) size: u32,
    pub(super) index: u32,
}

/// Properties of a rig.
pub(super) struct FixtureConfig {
    pub(super) behavior: HostBehavior,
    pub(super) entries: u32,
    pub(super) cq_entries: u32,
    pub(super) buffers: u32,
    pub(super) buffer_bytes: u32,
    pub(super) contexts_max: u16,
    pub(super) seed: u64,
}

pub(super) const SHARED: HostBehavior =
    HostBehavior { shares_rings: true, shares_data: true, completes_later: false };
pub(super) const COPIED: HostBehavior =
    HostBehavior { shares_rings: true, shares_data: false, completes_later: false };
pub(super) const LATER: HostBehavior =
    HostBehavior { shares_rings: false, shares_data: false, completes_later: true };

/// Address of test data.
pub(super) const DATA: u64 = 0x2_0000;
/// Number of 512-byte blocks of the block device.
pub(super) const BLOCKS: u64 = 512;
/// MDTS of the rig.
pub(super) const TRANSFER_MAX: u32 = 64 << 10;

impl Default for FixtureConfig {
    fn default() -> Self {
        Self {
            behavior: SHARED,
            entries: 16,
            cq_entries: 16,
            buffers: 2,
            buffer_bytes: 4096,
            contexts_max: 4,
            seed: 1,
        }
    }
}

pub(super) fn fixture_ram() -> Arc<FakeRam> {
    FakeRam::new(0x8_0000, 0x1_0000)
}

pub(super) fn fixture_namespace(nsid: u32, device: &Arc<FakeDevice>) -> Namespace {
    let limits = device.limits();
    Namespace {
        nsid,
        block_shift: 9,
        metadata_size: 0,
        block_count: limits.block_count,
        is_write_protected: false,
        denies_reservations: false,
        unavailable: None,
        reservation: None,
        identity: NamespaceIdentity::default(),
        copy: CopyLimits { range_blocks_max: 16, blocks_max: 40, ranges_max: 4 },
        limits,
        device: device.clone(),
        cache: None,
    }
}

impl QueueFixture {
    /// A queue with `device` as namespace 1 of at most 4.
    pub(super) fn new(setup: &FixtureConfig, ram: &Arc<FakeRam>, device: FakeDevice) -> Self {
        let device = Arc::new(device);
        let mut namespaces = NamespaceSnapshot::new(4);
        namespaces.insert(Arc::new(fixture_namespace(1, &device)));
        let published = VersionedValue::new(Arc::new(namespaces));
        let buffer = |index: u32| Segment {
            region: BOUNCE,
            offset: u64::from(index * setup.buffer_bytes),
            len_bytes: setup.buffer_bytes,
        };
        let buffers = (0..setup.buffers).map(buffer).collect();
        let doorbells = DoorbellPage::new(4);
        let shared = ExecutorContext {
            fused_arbiter: Arc::default(),
            is_write_through: Arc::default(),
            buffers: BouncePool::new(ram.clone(), buffers),
            io_stats: None,
        };
        let host = FakeHost::new(ram, setup.behavior, setup.seed);
        let mut rig = Self {
            ram: ram.clone(),
            device,
            queue: create_queue(&host, setup, (&doorbells, &shared), &published, 1),
            published,
            doorbells,
            shared,
            host,
            now: Instant::default(),
            events: Vec::new(),
            sq: HostRing { at: 0x1000, size: setup.entries, index: 0 },
            cq: HostRing { at: 0x8000, size: setup.cq_entries, index: 0 },
            phase: true,
            next_cid: 100,
        };
        rig.queue.add_submission_queue(1, setup.entries, 0x1000).unwrap();
        rig
    }

    /// Replaces the snapshot of namespace 1.
    pub(super) fn change_namespace(&self, change: impl FnOnce(&mut Namespace)) {
        let mut changed = fixture_namespace(1, &self.device);
        change(&mut changed);
        let mut namespaces = NamespaceSnapshot::new(4);
        namespaces.insert(Arc::new(changed));
        self.published.publish(Arc::new(namespaces));
    }

    /// Stores a command in the ring and returns its identifier.
    pub(super) fn push_command(&mut self, command: Command) -> u16 {
        self.next_cid += 1;
        let cid = self.next_cid;
        let at = self.sq.at + self.sq.index as usize * 64;
        self.ram.host_bytes()[at..at + 64].copy_from_slice(&command.with_cid(cid).to_bytes());
        self.sq.index = (self.sq.index + 1) % self.sq.size;
        cid
    }

    pub(super) fn ring_submission_doorbell(&mut self) {
        self.doorbells.write_doorbell(2, self.sq.index);
    }

    pub(super) fn poll(&mut self) -> crate::queue::PollStats {
        self.now = self.now.after(tenmil_base::Span::from_us(1));
        let turned = self.queue.poll(self.now);
        while let Some(event) = self.queue.next_event() {
            self.events.push(event);
        }
        turned
    }

    /// The next completion, if present. Its entry is not freed.
    pub(super) fn peek_completion(&mut self) -> Option<Completion> {
        let at = self.cq.at + self.cq.index as usize * 16;
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&self.ram.host_bytes()[at..at + 16]);
        let completion = Completion::from_bytes(&bytes);
        if completion.phase() != self.phase {
            return None;
        }
        self.cq.index = (self.cq.index + 1) % self.cq.size;
        self.phase ^= self.cq.index == 0;
        Some(completion)
    }

    pub(super) fn ring_completion_doorbell(&mut self) {
        self.doorbells.write_doorbell(3, self.cq.index);
    }

    /// Polls until `count` commands have completed.
    pub(super) fn collect_completions(&mut self, count: usize) -> Vec<Completion> {
        let mut completions = Vec::new();
        for _ in 0..50_000 {
            while let Some(completion) = self.peek_completion() {
                completions.push(completion);
                self.ring_completion_doorbell();
            }
            if completions.len() >= count {
                assert_eq!(completions.len(), count, "nothing is answered twice");
                return completions;
            }
            self.poll();
        }
        panic!("{} of {count} commands were answered", completions.len());
    }

    /// Runs one command to completion.
    pub(super) fn run_command(&mut self, command: Command) -> Completion {
        let cid = self.push_command(command);
        self.ring_submission_doorbell();
        let completion = self.collect_completions(1)[0];
        assert_eq!((completion.cid(), completion.sqid()), (cid, 1));
        assert_eq!(u32::from(completion.sqhd()), self.sq.index, "all entries have been taken");
        completion
    }

    pub(super) fn run_for_status(&mut self, command: Command) -> Status {
        self.run_command(command).status()
    }

    /// Runs a command that has to succeed.
    pub(super) fn run_successfully(&mut self, command: Command) -> Completion {
        let completion = self.run_command(command);
        assert_eq!(completion.status(), Status::SUCCESS, "{command:?}");
        completion
    }

    pub(super) fn write_host_memory(&mut self, at: u64, bytes: &[u8]) {
        let at = usize::try_from(at).unwrap();
        self.ram.host_bytes()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub(super) fn read_host_memory(&self, at: u64, len: usize) -> Vec<u8> {
        let at = usize::try_from(at).unwrap();
        self.ram.host_bytes()[at..at + len].to_vec()
    }

    /// Fills memory with bytes that differ everywhere.
    pub(super) fn fill_with_random_bytes(&mut self, at: u64, len: usize, seed: u64) -> Vec<u8> {
        let mut random = Random::new(seed);
        let bytes: Vec<u8> = (0..len).map(|_| random.next_u64().to_le_bytes()[0]).collect();
        self.write_host_memory(at, &bytes);
        bytes
    }
}

/// A queue with completion queue `cqid`, whose entries begin at 8000h.
pub(super) fn create_queue(
    host: &FakeHost,
    setup: &FixtureConfig,
    (doorbells, shared): (&Arc<DoorbellPage>, &ExecutorContext),
    published: &VersionedValue<NamespaceSnapshot>,
    cqid: u16,
) -> Queue<FakeHost> {
    let config = QueueConfig {
        cqid,
        entries: setup.cq_entries,
        address: 0x8000 + u64::from(cqid - 1) * 0x1000,
        burst: 64,
        executor: ExecutorConfig {
            page_shift: 12,
            transfer_bytes_max: TRANSFER_MAX,
            in_flight_max: 32,
            contexts_max: setup.contexts_max,
        },
    };
    let (doorbells, shared) = (doorbells.clone(), shared.clone());
    Queue::new(host.clone(), &config, doorbells, shared, published.reader()).unwrap()
}

/// A command on blocks of namespace 1, with its data at [`DATA`].
pub(super) fn io_command(opcode: IoOpcode, lba: u64, blocks: u32) -> Command {
    let mut command = Command::new(opcode.code()).with_nsid(1).with_prp(DATA, DATA + 0x1000);
    command.0[5] = lba;
    command.with_cdw12(blocks - 1)
}

impl QueueFixture {
    pub(super) fn device_operations(&self) -> tenmil_base::OperationSet {
        self.device.limits().operations
    }
}
