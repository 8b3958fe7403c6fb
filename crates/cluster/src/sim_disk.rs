//! Simulated disk with a volatile cache, which outlives the processes that have it open.
//!
//! ```text
//!   channel ── submit ──▶ in flight ── due ──▶ cache ── flush ──▶ stable
//!   process killed        each write is executed, in part, or not at all; the cache remains
//!   power lost            as above; of each cached block any version survives
//! ```
//!
//! Requests are executed when they are due, in any order, as the specification allows for commands
//! that are outstanding at the same time.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Durability, Instant, IoChannel, IoCompletion,
    IoStatus, Limits, Memory, Operation, OperationSet, Random, Request, RequestFlags, Segment,
    Span,
};
use tenmil_dma::RegionTable;

/// Block size in bytes. A block is written atomically.
pub(crate) const BLOCK_BYTES: usize = 512;
/// Maximum blocks per request.
const REQUEST_BLOCKS_MAX: u32 = 256;
/// Queue depth of a channel.
const DEPTH_MAX: u32 = 128;

/// A disk. Clones refer to the same disk.
#[derive(Clone)]
pub(crate) struct SimDisk(Arc<Mutex<DiskState>>);

/// Properties of a disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskOptions {
    /// Number of blocks.
    pub(crate) block_count: u64,
    /// Shortest and longest time of a normal request.
    pub(crate) latency: (Span, Span),
    /// One write in this many is slow. Zero means none.
    pub(crate) slow_one_in: u64,
    /// Maximum time of a slow write.
    pub(crate) slow_max: Span,
}

/// A disk opened by one process, as block device of its service.
pub(crate) struct SimDiskOfProcess {
    disk: SimDisk,
    process: u64,
    memory: RegionTable,
    limits: Limits,
}

struct DiskState {
    options: DiskOptions,
    random: Random,
    stable: BTreeMap<u64, BlockVersion>,
    /// Versions since the last flush, oldest first.
    cached: BTreeMap<u64, Vec<BlockVersion>>,
    under_way: Vec<InFlightRequest>,
    /// Completions that were not polled yet, by channel.
    completions: BTreeMap<u64, VecDeque<IoCompletion>>,
    channels: u64,
    taken: u64,
    /// The disk is unplugged: every request fails.
    is_absent: bool,
}

type BlockVersion = Box<[u8; BLOCK_BYTES]>;

/// An accepted request.
struct InFlightRequest {
    channel: u64,
    process: u64,
    number: u64,
    due: Instant,
    request: Request,
    segments: Vec<Segment>,
    memory: RegionTable,
}

struct DiskChannel {
    disk: SimDisk,
    number: u64,
    process: u64,
    memory: RegionTable,
    limits: Limits,
}

impl SimDisk {
    /// Creates an empty disk.
    pub(crate) fn new(options: DiskOptions, random: Random) -> Self {
        Self(Arc::new(Mutex::new(DiskState {
            options,
            random,
            stable: BTreeMap::new(),
            cached: BTreeMap::new(),
            under_way: Vec::new(),
            completions: BTreeMap::new(),
            channels: 0,
            taken: 0,
            is_absent: false,
        })))
    }

    /// Opens the disk in a process whose memory is in `memory`. `durability` is the durability of a
    /// completed write that the process assumes.
    pub(crate) fn open(
        &self,
        process: u64,
        memory: &RegionTable,
        durability: Durability,
    ) -> SimDiskOfProcess {
        let limits = Limits {
            block_size: 512,
            metadata_size: 0,
            block_count: self.lock().options.block_count,
            request_blocks_max: REQUEST_BLOCKS_MAX,
            segments_max: 64,
            optimal_boundary_blocks: 0,
            atomic_write_blocks: 1,
            depth_max: DEPTH_MAX,
            durability,
            operations: OperationSet::from_operations(&[
                Operation::Read,
                Operation::Write,
                Operation::Flush,
            ]),
        };
        SimDiskOfProcess { disk: self.clone(), process, memory: memory.clone(), limits }
    }

    /// Executes the requests that are due.
    pub(crate) fn advance_to(&self, now: Instant) {
        self.lock().advance(now);
    }

    /// Due time of the next request.
    pub(crate) fn wake_at(&self) -> Instant {
        self.lock().under_way.iter().map(|one| one.due).min().unwrap_or(Instant::NEVER)
    }

    /// Ends a process: each of its writes in flight is executed, in part, or not at all.
    pub(crate) fn kill_process(&self, process: u64) {
        self.lock().drop_requests(|one| one.process == process);
    }

    /// Cuts the power. Every process that has it open must have been [killed](Self::kill_process).
    pub(crate) fn lose_power(&self) {
        self.lock().lose_power();
    }

    /// Unplugs the disk, or plugs it in again with its data.
    pub(crate) fn set_unplugged(&self, is_absent: bool) {
        self.lock().is_absent = is_absent;
    }

    /// Plugs it in again, and has it execute every write at once from now on.
    pub(crate) fn plug_in_without_delays(&self) {
        let mut state = self.lock();
        state.is_absent = false;
        state.options.slow_one_in = 0;
    }

    /// Whether it is unplugged.
    pub(crate) fn is_absent(&self) -> bool {
        self.lock().is_absent
    }

    /// Writes persistent data before any process has opened the disk.
    pub(crate) fn write_initial(&self, lba: u64, bytes: &[u8]) {
        let mut state = self.lock();
        for (lba, block) in (lba..).zip(bytes.chunks_exact(BLOCK_BYTES)) {
            state.write(lba, block);
            state.flush(lba);
        }
    }

    /// Number of requests in flight.
    pub(crate) fn in_flight_requests(&self) -> usize {
        self.lock().under_way.len()
    }

    fn lock(&self) -> MutexGuard<'_, DiskState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockDevice for SimDiskOfProcess {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, tenmil_base::Error> {
        let mut state = self.disk.lock();
        state.channels += 1;
        let number = state.channels;
        state.completions.insert(number, VecDeque::new());
        let (disk, memory, limits) = (self.disk.clone(), self.memory.clone(), self.limits.clone());
        Ok(Box::new(DiskChannel { disk, number, process: self.process, memory, limits }))
    }
}

impl IoChannel for DiskChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut state = self.disk.lock();
        let mine = state.under_way.iter().filter(|one| one.channel == self.number).count();
        let taken = requests.len().min((DEPTH_MAX as usize).saturating_sub(mine));
        for request in &requests[..taken] {
            let first = request.segment_first as usize;
            let count = usize::from(request.segment_count);
            let segments = segments.get(first..first + count).unwrap_or_default().to_vec();
            let due = state.draw_completion_time(now, request.operation);
            state.taken += 1;
            let one = InFlightRequest {
                channel: self.number,
                process: self.process,
                number: state.taken,
                due,
                request: *request,
                segments,
                memory: self.memory.clone(),
            };
            state.under_way.push(one);
        }
        taken
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let mut state = self.disk.lock();
        state.advance(now);
        let Some(waiting) = state.completions.get_mut(&self.number) else { return 0 };
        let count = waiting.len().min(completions.remaining());
        waiting.drain(..count).for_each(|completion| completions.push(completion));
        count
    }
}

impl ChannelWakeup for DiskChannel {
    fn wake_at(&self) -> Instant {
        let state = self.disk.lock();
        let has_completions =
            state.completions.get(&self.number).is_some_and(|all| !all.is_empty());
        if has_completions {
            return Instant::default();
        }
        let mine = state.under_way.iter().filter(|one| one.channel == self.number);
        mine.map(|one| one.due).min().unwrap_or(Instant::NEVER)
    }
}

impl Drop for DiskChannel {
    fn drop(&mut self) {
        let number = self.number;
        let mut state = self.disk.lock();
        state.drop_requests(|one| one.channel == number);
        state.completions.remove(&number);
    }
}

impl DiskState {
    fn draw_completion_time(&mut self, now: Instant, operation: Operation) -> Instant {
        let DiskOptions { latency: (shortest, longest), slow_one_in, slow_max, .. } = self.options;
        let spread = self.random.below(longest.ns.saturating_sub(shortest.ns) + 1);
        let mut due = now.after(Span { ns: shortest.ns + spread });
        if operation == Operation::Write && slow_one_in > 0 && self.random.chance(1, slow_one_in) {
            due = due.after(Span { ns: self.random.below(slow_max.ns) });
        }
        due
    }

    fn advance(&mut self, now: Instant) {
        loop {
            let due = self.under_way.iter().enumerate().filter(|(_, one)| one.due <= now);
            let Some((index, _)) = due.min_by_key(|(_, one)| (one.due, one.number)) else { break };
            let one = self.under_way.swap_remove(index);
            let status = self.execute(&one);
            let completion = IoCompletion { token: one.request.token, status, result: 0 };
            self.completions.entry(one.channel).or_default().push_back(completion);
        }
    }

    fn execute(&mut self, one: &InFlightRequest) -> IoStatus {
        let Request { operation, lba, blocks, flags, .. } = one.request;
        let end = lba.saturating_add(blocks.into());
        if operation != Operation::Flush && end > self.options.block_count {
            return IoStatus::LBA_OUT_OF_RANGE;
        }
        if self.is_absent {
            return IoStatus::INTERNAL_ERROR;
        }
        match operation {
            Operation::Read => {
                let bytes: Vec<u8> = (lba..end).flat_map(|lba| *self.newest_version(lba)).collect();
                scatter_read_data(one, &bytes)
            }
            Operation::Write => {
                let Some(bytes) = gather_write_data(one) else {
                    return IoStatus::DATA_TRANSFER_ERROR;
                };
                for (lba, block) in (lba..end).zip(bytes.chunks_exact(BLOCK_BYTES)) {
                    self.write(lba, block);
                }
                if flags.has(RequestFlags::FUA) {
                    (lba..end).for_each(|lba| self.flush(lba));
                }
                IoStatus::SUCCESS
            }
            Operation::Flush => {
                let cached: Vec<u64> = self.cached.keys().copied().collect();
                cached.into_iter().for_each(|lba| self.flush(lba));
                IoStatus::SUCCESS
            }
            _ => IoStatus::INVALID_OPCODE,
        }
    }

    fn newest_version(&self, lba: u64) -> BlockVersion {
        let cached = self.cached.get(&lba).and_then(|versions| versions.last());
        let found = cached.or_else(|| self.stable.get(&lba));
        found.cloned().unwrap_or_else(|| Box::new([0; BLOCK_BYTES]))
    }

    fn write(&mut self, lba: u64, bytes: &[u8]) {
        let Ok(block) = <[u8; BLOCK_BYTES]>::try_from(bytes) else { return };
        self.cached.entry(lba).or_default().push(Box::new(block));
    }

    fn flush(&mut self, lba: u64) {
        if let Some(newest) = self.cached.remove(&lba).and_then(|mut versions| versions.pop()) {
            self.stable.insert(lba, newest);
        }
    }

    /// Drops requests without a completion. Of each write, all, some or no blocks are written.
    fn drop_requests(&mut self, is_given_up: impl Fn(&InFlightRequest) -> bool) {
        let (ended, left) = std::mem::take(&mut self.under_way).into_iter().partition(is_given_up);
        self.under_way = left;
        let ended: Vec<InFlightRequest> = ended;
        for one in ended.iter().filter(|one| one.request.operation == Operation::Write) {
            let Some(bytes) = gather_write_data(one) else { continue };
            let fate = self.random.below(3);
            for (lba, block) in (one.request.lba..).zip(bytes.chunks_exact(BLOCK_BYTES)) {
                if fate == 0 || fate == 1 && self.random.chance(1, 2) {
                    self.write(lba, block);
                }
            }
        }
    }

    fn lose_power(&mut self) {
        for (lba, versions) in std::mem::take(&mut self.cached) {
            let drawn = self.random.below(versions.len() as u64 + 1);
            let survivor = usize::try_from(drawn).ok().and_then(|index| versions.get(index));
            if let Some(survivor) = survivor {
                self.stable.insert(lba, survivor.clone());
            }
        }
    }
}

/// Data of a write.
fn gather_write_data(one: &InFlightRequest) -> Option<Vec<u8>> {
    let mut bytes = vec![0; one.request.blocks as usize * BLOCK_BYTES];
    let mut rest = &mut bytes[..];
    for segment in &one.segments {
        let (part, left) = rest.split_at_mut_checked(segment.len_bytes as usize)?;
        one.memory.load(*segment, part).ok()?;
        rest = left;
    }
    rest.is_empty().then_some(bytes)
}

/// Stores the data of a read.
fn scatter_read_data(one: &InFlightRequest, bytes: &[u8]) -> IoStatus {
    let mut rest = bytes;
    for segment in &one.segments {
        let Some((part, left)) = rest.split_at_checked(segment.len_bytes as usize) else {
            return IoStatus::DATA_TRANSFER_ERROR;
        };
        if one.memory.store(*segment, part).is_err() {
            return IoStatus::DATA_TRANSFER_ERROR;
        }
        rest = left;
    }
    if rest.is_empty() { IoStatus::SUCCESS } else { IoStatus::DATA_TRANSFER_ERROR }
}
