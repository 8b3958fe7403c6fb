//! Simulated block device that completes late and out of order, loses unflushed data on power
//! failure, and injects media faults.
//!
//! ```text
//!   channel --submit--> in flight --due--> cache --flush--> stable
//!                            \_______________ power cut _____/
//!                              a random subset of the data left of "stable" survives
//! ```
//!
//! All channels share the blocks. Data are transferred when a request is executed, which is when it
//! completes. Until then the medium may access the memory, and it checks the memory again at that
//! moment.

mod medium_fault;
mod versioned_blocks;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Durability, Instant, IoChannel, IoCompletion,
    IoStatus, Limits, Memory, Operation, OperationSet, Random, Request, RequestFlags, Segment,
    Span,
};

use crate::device_memory::MediumMemory;
use crate::event_trace::TraceKind;
use crate::sim_bus::SimBus;
use crate::violation::Violation;
pub use medium_fault::{MediumFault, PlannedMediumFault};
use versioned_blocks::VersionedBlocks;

/// A simulated block device. Clones refer to the same blocks.
#[derive(Clone)]
pub struct SimMedium {
    state: Arc<Mutex<MediumState>>,
    limits: Limits,
}

/// Properties of the medium.
#[derive(Clone, Debug)]
pub struct MediumOptions {
    /// Block size in bytes.
    pub block_size: u32,
    /// Number of blocks.
    pub block_count: u64,
    /// Durability of a completed write.
    pub durability: Durability,
    /// Shortest and longest time of a request.
    pub latency: (Span, Span),
    /// Queue depth of a channel.
    pub depth: u32,
    /// Maximum number of blocks per request.
    pub request_blocks_max: u32,
    /// Requests should not cross multiples of this number of blocks. Zero means no boundary.
    pub optimal_boundary_blocks: u32,
    /// Whether a power cut may tear a block into its 512-byte parts.
    pub tears: bool,
    /// Planned faults.
    pub mischief: Vec<PlannedMediumFault>,
}

struct MediumState {
    bus: SimBus,
    memory: MediumMemory,
    options: MediumOptions,
    limits: Limits,
    random: Random,
    blocks: VersionedBlocks,
    under_way: Vec<PendingRequest>,
    /// Number of accepted requests.
    taken: u64,
    /// Number of executed requests.
    done: u64,
    /// Number of executed requests after which the power fails.
    cut_after: Option<u64>,
    is_powered: bool,
    is_dismantled: bool,
    channels: u32,
    faults: BTreeMap<usize, (u32, u32)>,
}

/// An accepted request.
#[derive(Clone, Debug)]
struct PendingRequest {
    channel: u32,
    number: u64,
    due: Instant,
    request: Request,
    segments: Vec<Segment>,
}

/// I/O channel of one thread.
struct SimChannel {
    state: Arc<Mutex<MediumState>>,
    limits: Limits,
    number: u32,
}

impl Default for MediumOptions {
    fn default() -> Self {
        Self {
            block_size: 512,
            block_count: 4096,
            durability: Durability::VolatileCache,
            latency: (Span::from_us(5), Span::from_us(100)),
            depth: 256,
            request_blocks_max: 256,
            optimal_boundary_blocks: 0,
            tears: false,
            mischief: Vec::new(),
        }
    }
}

impl SimMedium {
    /// Creates an empty medium behind `bus`.
    pub fn new(bus: &SimBus, options: MediumOptions, random: Random) -> Self {
        let limits = limits_of(&options);
        let state = MediumState {
            memory: MediumMemory::new(bus),
            bus: bus.clone(),
            blocks: VersionedBlocks::new(options.block_size),
            options,
            limits: limits.clone(),
            random,
            under_way: Vec::new(),
            taken: 0,
            done: 0,
            cut_after: None,
            is_powered: true,
            is_dismantled: false,
            channels: 0,
            faults: BTreeMap::new(),
        };
        Self { state: Arc::new(Mutex::new(state)), limits }
    }

    /// Number of executed requests.
    pub fn completed_request_count(&self) -> u64 {
        self.lock().done
    }

    /// Number of requests in flight.
    pub fn in_flight_count(&self) -> usize {
        self.lock().under_way.len()
    }

    /// Cuts the power after a number of executed requests.
    pub fn cut_power_after_requests(&self, done: u64) {
        self.lock().cut_after = Some(done);
    }

    /// Whether it has power.
    pub fn is_powered(&self) -> bool {
        self.lock().is_powered
    }

    /// Cuts the power now.
    pub fn cut_power(&self) {
        self.lock().cut_power();
    }

    /// Restores the power with the data that survived.
    pub fn restore_power(&self) {
        let mut state = self.lock();
        state.is_powered = true;
        state.cut_after = None;
    }

    /// Stops all faults. Lost data stay lost; stalled requests are executed.
    pub fn stop_faults(&self) {
        let mut state = self.lock();
        state.options.mischief.clear();
        let now = state.bus.now();
        for request in &mut state.under_way {
            if request.due == Instant::NEVER {
                request.due = now;
            }
        }
    }

    /// Due time of the next request in flight.
    pub fn wake_at(&self) -> Instant {
        self.lock().under_way.iter().map(|one| one.due).min().unwrap_or(Instant::NEVER)
    }

    /// Discards all requests in flight, at the end of a run.
    pub fn discard_in_flight(&self) {
        let mut state = self.lock();
        state.is_dismantled = true;
        state.under_way.clear();
    }

    /// Reads a block directly, without a request.
    pub fn persistent_block(&self, lba: u64) -> Vec<u8> {
        self.lock().blocks.read_block(lba)
    }

    fn lock(&self) -> MutexGuard<'_, MediumState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockDevice for SimMedium {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, tenmil_base::Error> {
        let mut state = self.lock();
        state.channels += 1;
        let (number, limits) = (state.channels, self.limits.clone());
        Ok(Box::new(SimChannel { state: Arc::clone(&self.state), limits, number }))
    }
}

impl SimChannel {
    fn lock(&self) -> MutexGuard<'_, MediumState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl IoChannel for SimChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut state = self.lock();
        if !state.is_powered {
            return 0;
        }
        let mine = state.under_way.iter().filter(|one| one.channel == self.number).count();
        let room = (self.limits.depth_max as usize).saturating_sub(mine);
        let taken = requests.len().min(room);
        for request in &requests[..taken] {
            let first = request.segment_first as usize;
            let count = usize::from(request.segment_count);
            let segments = segments.get(first..first + count).unwrap_or_default().to_vec();
            state.accept_request(now, self.number, *request, segments);
        }
        taken
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let mut state = self.lock();
        let mut count = 0;
        while completions.remaining() > 0 {
            let Some(completion) = state.execute_next(now, self.number) else { break };
            completions.push(completion);
            count += 1;
        }
        count
    }
}

impl ChannelWakeup for SimChannel {
    fn wake_at(&self) -> Instant {
        let state = self.lock();
        let mine = state.under_way.iter().filter(|one| one.channel == self.number);
        mine.map(|one| one.due).min().unwrap_or(Instant::NEVER)
    }
}

impl Drop for SimChannel {
    fn drop(&mut self) {
        let state = self.lock();
        let requests = state.under_way.iter().filter(|one| one.channel == self.number).count();
        if requests > 0 && state.is_powered && !state.is_dismantled {
            state.bus.report_violation(Violation::DroppedChannel { requests });
        }
    }
}

impl MediumState {
    fn accept_request(
        &mut self,
        now: Instant,
        channel: u32,
        request: Request,
        segments: Vec<Segment>,
    ) {
        self.taken += 1;
        let number = self.taken;
        let (shortest, longest) = self.options.latency;
        let spread = self.random.below(longest.ns.saturating_sub(shortest.ns) + 1);
        let mut due = now.after(Span { ns: shortest.ns + spread });
        match self.take_due_fault(request.operation, |fault| {
            matches!(fault, MediumFault::Stall | MediumFault::Delay(_))
        }) {
            Some(MediumFault::Stall) => due = Instant::NEVER,
            Some(MediumFault::Delay(delay)) => due = due.after(delay),
            _ => {}
        }
        self.under_way.push(PendingRequest { channel, number, due, request, segments });
    }

    /// Executes the request of `channel` that is due first.
    fn execute_next(&mut self, now: Instant, channel: u32) -> Option<IoCompletion> {
        let due = |one: &PendingRequest| one.channel == channel && one.due <= now;
        let next = self.under_way.iter().enumerate().filter(|(_, one)| due(one));
        let (index, _) = next.min_by_key(|(_, one)| (one.due, one.number))?;
        let PendingRequest { request, segments, .. } = self.under_way.swap_remove(index);
        let status = self.execute_request(&request, &segments);
        let range = request.lba << 16 | u64::from(request.blocks);
        self.bus.record(TraceKind::Medium, [request.operation as u64, range, status.0.into()]);
        self.done += 1;
        if self.cut_after.is_some_and(|after| self.done >= after) {
            self.cut_power();
            return None;
        }
        Some(IoCompletion { token: request.token, status, result: 0 })
    }

    fn execute_request(&mut self, request: &Request, segments: &[Segment]) -> IoStatus {
        let Request { operation, lba, blocks, .. } = *request;
        let end = lba.checked_add(u64::from(blocks));
        if operation != Operation::Flush && end.is_none_or(|end| end > self.limits.block_count) {
            return IoStatus::LBA_OUT_OF_RANGE;
        }
        let struck = self.take_due_fault(operation, |fault| {
            !matches!(fault, MediumFault::Stall | MediumFault::Delay(_))
        });
        if let Some(MediumFault::Fail(status)) = struck {
            return status;
        }
        let status = self.apply_operation(request, segments, struck);
        let forced = request.flags.has(RequestFlags::FUA) && status.is_success();
        if forced && struck != Some(MediumFault::ForgetFlush) {
            self.blocks.flush_range(lba..lba + u64::from(blocks));
        }
        status
    }

    fn apply_operation(
        &mut self,
        request: &Request,
        segments: &[Segment],
        struck: Option<MediumFault>,
    ) -> IoStatus {
        let Request { operation, lba, blocks, operand, .. } = *request;
        let range = lba..lba + u64::from(blocks);
        match operation {
            Operation::Read => match self.blocks.read_range(range) {
                Some(bytes) => self.scatter_data(segments, &bytes),
                None => IoStatus::UNRECOVERED_READ,
            },
            Operation::Write => match self.gather_data(segments, blocks) {
                Some(bytes) => self.write_blocks(lba, &bytes, struck),
                None => IoStatus::DATA_TRANSFER_ERROR,
            },
            Operation::Compare => {
                match (self.gather_data(segments, blocks), self.blocks.read_range(range)) {
                    (None, _) => IoStatus::DATA_TRANSFER_ERROR,
                    (_, None) => IoStatus::UNRECOVERED_READ,
                    (Some(there), Some(here)) if here == there => IoStatus::SUCCESS,
                    _ => IoStatus::COMPARE_FAILURE,
                }
            }
            Operation::Verify => match self.blocks.read_range(range) {
                Some(_) => IoStatus::SUCCESS,
                None => IoStatus::UNRECOVERED_READ,
            },
            Operation::WriteZeroes | Operation::Deallocate => {
                let bytes = vec![0; blocks as usize * self.options.block_size as usize];
                self.write_blocks(lba, &bytes, struck)
            }
            Operation::WriteUncorrectable => {
                self.blocks.make_unreadable(range);
                IoStatus::SUCCESS
            }
            Operation::Copy => match self.blocks.read_range(operand..operand + u64::from(blocks)) {
                Some(bytes) => self.write_blocks(lba, &bytes, struck),
                None => IoStatus::UNRECOVERED_READ,
            },
            Operation::CompareAndWrite => {
                let both = self.gather_data(segments, 2 * blocks);
                let both = both.as_deref().map(|bytes| bytes.split_at(bytes.len() / 2));
                match (both, self.blocks.read_range(range)) {
                    (None, _) => IoStatus::DATA_TRANSFER_ERROR,
                    (_, None) => IoStatus::UNRECOVERED_READ,
                    (Some((expected, new)), Some(here)) if expected == here => {
                        self.write_blocks(lba, new, struck)
                    }
                    _ => IoStatus::COMPARE_FAILURE,
                }
            }
            Operation::Flush => {
                if struck != Some(MediumFault::ForgetFlush) {
                    self.blocks.flush();
                }
                IoStatus::SUCCESS
            }
        }
    }

    fn write_blocks(&mut self, lba: u64, bytes: &[u8], struck: Option<MediumFault>) -> IoStatus {
        let blocks = bytes.len() as u64 / u64::from(self.options.block_size);
        match struck {
            Some(MediumFault::LostWrite) => {}
            Some(MediumFault::Misdirect { by }) => {
                let last = self.limits.block_count - blocks;
                self.blocks.write_blocks(((lba + by) % self.limits.block_count).min(last), bytes);
            }
            Some(MediumFault::Tear) => {
                let before = self.blocks.read_range(lba..lba + blocks);
                let before = before.unwrap_or(vec![0; bytes.len()]);
                let half = bytes.len() / 2;
                self.blocks.write_blocks(lba, &[&bytes[..half], &before[half..]].concat());
            }
            _ => self.blocks.write_blocks(lba, bytes),
        }
        if self.options.durability == Durability::Persistent {
            self.blocks.flush();
        }
        IoStatus::SUCCESS
    }

    fn gather_data(&self, segments: &[Segment], blocks: u32) -> Option<Vec<u8>> {
        let mut bytes = vec![0; blocks as usize * self.options.block_size as usize];
        let mut rest = &mut bytes[..];
        for segment in segments {
            let (part, left) = rest.split_at_mut_checked(segment.len_bytes as usize)?;
            self.memory.load(*segment, part).ok()?;
            rest = left;
        }
        rest.is_empty().then_some(bytes)
    }

    fn scatter_data(&self, segments: &[Segment], bytes: &[u8]) -> IoStatus {
        let mut rest = bytes;
        for segment in segments {
            let Some((part, left)) = rest.split_at_checked(segment.len_bytes as usize) else {
                return IoStatus::DATA_TRANSFER_ERROR;
            };
            if self.memory.store(*segment, part).is_err() {
                return IoStatus::DATA_TRANSFER_ERROR;
            }
            rest = left;
        }
        if rest.is_empty() { IoStatus::SUCCESS } else { IoStatus::DATA_TRANSFER_ERROR }
    }

    fn cut_power(&mut self) {
        self.is_powered = false;
        for one in std::mem::take(&mut self.under_way) {
            // A write in flight may have reached the cache partially.
            if one.request.operation == Operation::Write && self.random.chance(1, 2) {
                self.write_partially(&one);
            }
        }
        self.blocks.lose_power(&mut self.random, self.options.tears);
    }

    /// Writes a random subset of the blocks of a request.
    fn write_partially(&mut self, one: &PendingRequest) {
        let Some(bytes) = self.gather_data(&one.segments, one.request.blocks) else { return };
        let blocks = bytes.chunks_exact(self.options.block_size as usize);
        for (lba, block) in (one.request.lba..self.limits.block_count).zip(blocks) {
            if self.random.chance(1, 2) {
                self.blocks.write_blocks(lba, block);
            }
        }
    }

    fn take_due_fault(
        &mut self,
        operation: Operation,
        is_wanted: impl Fn(&MediumFault) -> bool,
    ) -> Option<MediumFault> {
        for (index, planned) in self.options.mischief.iter().enumerate() {
            if !is_wanted(&planned.fault) || planned.operation.is_some_and(|of| of != operation) {
                continue;
            }
            let (seen, done) = self.faults.entry(index).or_default();
            *seen += 1;
            if *seen <= planned.skip || *done >= planned.times {
                continue;
            }
            *done += 1;
            return Some(planned.fault);
        }
        None
    }
}

fn limits_of(options: &MediumOptions) -> Limits {
    Limits {
        block_size: options.block_size,
        metadata_size: 0,
        block_count: options.block_count,
        request_blocks_max: options.request_blocks_max,
        segments_max: 64,
        optimal_boundary_blocks: options.optimal_boundary_blocks,
        atomic_write_blocks: 1,
        depth_max: options.depth,
        durability: options.durability,
        operations: OperationSet::from_operations(&Operation::ALL),
    }
}

#[cfg(test)]
mod tests;
