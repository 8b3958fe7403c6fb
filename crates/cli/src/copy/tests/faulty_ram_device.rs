//! Simulated device that completes in random order, has a volatile cache, and can be made to fail.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};

use tenmil_base::{
    BlockDevice, BlockExtent, ChannelWakeup, CompletionBatch, Durability, ExtentKind, Instant,
    IoChannel, IoCompletion, IoStatus, Limits, Memory, Operation, OperationSet, Random, Request,
    Segment,
};
use tenmil_dma::RegionTable;

/// Simulated device. Clones share the blocks.
#[derive(Clone)]
pub(super) struct FaultyRamDevice(Arc<Mutex<RamState>>);

struct RamState {
    limits: Limits,
    regions: RegionTable,
    random: Random,
    /// Data that a read returns.
    bytes: Vec<u8>,
    /// Data that were flushed.
    stable: Vec<u8>,
    /// Blocks written since the last flush.
    cached: BTreeSet<usize>,
    /// Blocks of a failed flush, which no later flush covers.
    forgotten: BTreeSet<usize>,
    under_way: Vec<InFlight>,
    bad: BTreeSet<u64>,
    /// Failing operation, its status, and how many times it still fails.
    failing: Option<(Operation, IoStatus, usize)>,
    /// Completed flushes.
    flushes: usize,
    hanging: Option<Operation>,
    tells_holes: bool,
}

struct InFlight {
    request: Request,
    segment: Segment,
    /// Of a flush: the blocks that were written when it was submitted, and no others.
    cached: Vec<(usize, Vec<u8>)>,
}

struct FaultyRamChannel(FaultyRamDevice, Limits);

impl FaultyRamDevice {
    pub(super) fn new(regions: &RegionTable, block_size: u32, len: usize, seed: u64) -> Self {
        let limits = Limits {
            block_size,
            metadata_size: 0,
            block_count: len as u64 / u64::from(block_size),
            request_blocks_max: (128 << 10) / block_size,
            segments_max: 4,
            optimal_boundary_blocks: 0,
            atomic_write_blocks: 1,
            depth_max: 3,
            durability: Durability::VolatileCache,
            operations: OperationSet::from_operations(&[
                Operation::Read,
                Operation::Write,
                Operation::WriteZeroes,
                Operation::Flush,
            ]),
        };
        Self(Arc::new(Mutex::new(RamState {
            limits,
            regions: regions.clone(),
            random: Random::new(seed),
            bytes: vec![0; len],
            stable: vec![0; len],
            cached: BTreeSet::new(),
            forgotten: BTreeSet::new(),
            under_way: Vec::new(),
            bad: BTreeSet::new(),
            failing: None,
            flushes: 0,
            hanging: None,
            tells_holes: false,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, RamState> {
        self.0.lock().unwrap()
    }

    /// Accesses the data directly, past all queues; they are durable afterwards.
    pub(super) fn with_content<T>(&self, task: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let mut state = self.lock();
        let result = task(&mut state.bytes);
        state.stable = state.bytes.clone();
        state.cached.clear();
        state.forgotten.clear();
        result
    }

    /// Simulates a power loss: some of the blocks that were not flushed survive.
    pub(super) fn lose_power(&self) {
        let mut state = self.lock();
        let block = state.limits.block_size as usize;
        let forgotten = std::mem::take(&mut state.forgotten);
        for index in &std::mem::take(&mut state.cached) | &forgotten {
            if forgotten.contains(&index) || state.random.below(2) == 0 {
                let range = index * block..(index + 1) * block;
                let old = state.stable[range.clone()].to_vec();
                state.bytes[range].copy_from_slice(&old);
            }
        }
        state.stable = state.bytes.clone();
        state.under_way.clear();
    }

    pub(super) fn report_holes(&self, tells: bool) {
        self.lock().tells_holes = tells;
    }

    pub(super) fn make_block_unreadable(&self, lba: u64) {
        self.lock().bad.insert(lba);
    }

    /// Makes every request of this kind fail.
    pub(super) fn fail_operation(&self, operation: Operation, status: IoStatus) {
        self.lock().failing = Some((operation, status, usize::MAX));
    }

    /// Makes the next flush fail as in Linux: the blocks that it covered never become durable, and the
    /// flush after it succeeds without them.
    pub(super) fn fail_one_flush(&self) {
        self.lock().failing = Some((Operation::Flush, IoStatus::WRITE_FAULT, 1));
    }

    pub(super) fn flush_count(&self) -> usize {
        self.lock().flushes
    }

    pub(super) fn stop_completing(&self, operation: Operation) {
        self.lock().hanging = Some(operation);
    }

    pub(super) fn without_operation(&self, operation: Operation) {
        let mut state = self.lock();
        state.limits.operations =
            state.limits.operations.without(OperationSet::from_operations(&[operation]));
    }

    pub(super) fn in_flight(&self) -> usize {
        self.lock().under_way.len()
    }
}

impl BlockDevice for FaultyRamDevice {
    fn limits(&self) -> Limits {
        self.lock().limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, tenmil_base::Error> {
        Ok(Box::new(FaultyRamChannel(self.clone(), self.limits())))
    }

    fn block_status(&self, lba: u64) -> Result<BlockExtent, tenmil_base::Error> {
        let state = self.lock();
        let block = state.limits.block_size as usize;
        let blocks = state.limits.block_count - lba;
        if !state.tells_holes {
            return Ok(BlockExtent { blocks, kind: ExtentKind::Data });
        }
        let from = usize::try_from(lba).unwrap() * block;
        let is_zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
        let mut rest = state.bytes[from..].chunks(block).map(is_zero);
        let first = rest.next().unwrap_or(false);
        let blocks = 1 + rest.take_while(|zero| *zero == first).count() as u64;
        Ok(BlockExtent { blocks, kind: if first { ExtentKind::Hole } else { ExtentKind::Data } })
    }
}

impl IoChannel for FaultyRamChannel {
    fn limits(&self) -> &Limits {
        &self.1
    }

    fn submit(&mut self, _now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut state = self.0.lock();
        let room = (self.1.depth_max as usize).saturating_sub(state.under_way.len());
        let taken = requests.len().min(room);
        for request in &requests[..taken] {
            assert!(self.1.operations.has(request.operation), "{request:?}");
            let segment = segments.get(request.segment_first as usize).copied();
            let segment = segment.unwrap_or_default();
            let cached = if request.operation == Operation::Flush {
                state.cached.iter().map(|index| (*index, state.block(*index).to_vec())).collect()
            } else {
                Vec::new()
            };
            state.under_way.push(InFlight { request: *request, segment, cached });
        }
        taken
    }

    fn poll(&mut self, _now: Instant, completions: &mut CompletionBatch) -> usize {
        let mut state = self.0.lock();
        let mut count = 0;
        while completions.remaining() > 0 && !state.under_way.is_empty() {
            let len = state.under_way.len() as u64 + 1;
            let index = usize::try_from(state.random.below(len)).unwrap();
            let Some(InFlight { request, .. }) = state.under_way.get(index) else { break };
            if state.hanging == Some(request.operation) {
                break;
            }
            let one = state.under_way.remove(index);
            let (request, status) = (one.request, state.execute_request(one));
            completions.push(IoCompletion { token: request.token, status, result: 0 });
            count += 1;
        }
        count
    }
}

impl ChannelWakeup for FaultyRamChannel {}

impl RamState {
    fn block(&self, index: usize) -> &[u8] {
        let block = self.limits.block_size as usize;
        &self.bytes[index * block..(index + 1) * block]
    }

    fn execute_request(&mut self, InFlight { request, segment, cached }: InFlight) -> IoStatus {
        self.flushes += usize::from(request.operation == Operation::Flush);
        if let Some((operation, status, times)) = &mut self.failing
            && *operation == request.operation
            && *times > 0
        {
            *times -= 1;
            let status = *status;
            for (index, _) in cached {
                self.cached.remove(&index);
                self.forgotten.insert(index);
            }
            return status;
        }
        let block = self.limits.block_size as usize;
        let first = usize::try_from(request.lba).unwrap();
        let count = request.blocks as usize;
        let range = first * block..(first + count) * block;
        match request.operation {
            Operation::Read => {
                let blocks = request.lba..request.lba + u64::from(request.blocks);
                if self.bad.range(blocks).next().is_some() {
                    return IoStatus::UNRECOVERED_READ;
                }
                self.regions.store(segment, &self.bytes[range]).unwrap();
            }
            Operation::Write => self.regions.load(segment, &mut self.bytes[range]).unwrap(),
            Operation::WriteZeroes => self.bytes[range].fill(0),
            _ => {
                for (index, bytes) in cached {
                    if self.block(index) == bytes {
                        self.cached.remove(&index);
                    }
                    self.stable[index * block..(index + 1) * block].copy_from_slice(&bytes);
                }
                return IoStatus::SUCCESS;
            }
        }
        if request.operation != Operation::Read {
            self.cached.extend(first..first + count);
        }
        IoStatus::SUCCESS
    }
}
