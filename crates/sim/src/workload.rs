//! Workload: requests drawn from a seed, with ownership of their buffers tracked and every
//! completion verified.

use core::ops::Range;
use std::collections::{BTreeMap, VecDeque};

use tenmil_base::{
    CompletionBatch, Dma, Instant, IoChannel, IoCompletion, IoStatus, Limits, Memory, Operation,
    Random, Request, RequestFlags, Segment, Span,
};

use crate::buffer_ownership::DataDirection;
use crate::data_oracle::{DataOracle, WriteEffect};
use crate::event_trace::TraceKind;
use crate::host_memory::SimDma;
use crate::sim_bus::SimBus;
use crate::violation::Violation;

/// Generator and verifier of requests.
pub struct Workload {
    bus: SimBus,
    dma: SimDma,
    profile: WorkloadProfile,
    random: Random,
    /// Model of the block contents.
    pub oracle: DataOracle,
    block_size: u32,
    outstanding: BTreeMap<u64, InflightRequest>,
    next_token: u64,
    left: u64,
    completions: CompletionBatch,
    /// Reusable buffers by size.
    free: BTreeMap<u32, Vec<Segment>>,
    /// Buffers that the device may still access because a fault completed their command early.
    tainted: Vec<Segment>,
    counts: RequestCounts,
    /// Blocks that remain to be read back.
    to_review: VecDeque<u64>,
    longest_completion: Span,
}

/// Parameters of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkloadProfile {
    /// Number of requests.
    pub count: u64,
    /// Queue depth.
    pub depth: u32,
    /// Kinds of requests.
    pub mix: OperationMix,
    /// Minimum and maximum number of blocks of a request that transfers data.
    pub blocks: (u32, u32),
    /// Number of blocks in use, from block 0 on. As many again are used for operations with an
    /// unpredictable effect.
    pub span: u64,
    /// Data layout in memory.
    pub pieces: DataLayout,
}

/// Kinds of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationMix {
    /// Reads.
    Reads,
    /// Writes.
    Writes,
    /// Reads and writes.
    ReadsAndWrites,
    /// Writes and reads with occasional flushes.
    Flushes,
    /// All operations.
    Everything,
}

/// Layout of the data of a request in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataLayout {
    /// One page-aligned segment.
    Whole,
    /// One segment with an offset in its page.
    Offset,
    /// Several segments that end at page boundaries.
    Pages,
}

/// Counts of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestCounts {
    /// Accepted requests.
    pub submitted: u64,
    /// Successful completions.
    pub succeeded: u64,
    /// Completions with the status Command Aborted By Host.
    pub aborted: u64,
    /// Other completions.
    pub failed: u64,
    /// Reads with verified data.
    pub verified: u64,
}

#[derive(Debug)]
struct InflightRequest {
    operation: Operation,
    blocks: Range<u64>,
    submitted_at: Instant,
    buffer: Option<WorkloadBuffer>,
}

/// Pages of a buffer, and the part of them that holds the data.
#[derive(Clone, Copy, Debug)]
struct WorkloadBuffer {
    pages: Segment,
    data: Segment,
}

const PAGE: u32 = 4096;
/// Offsets of data in a page are multiples of this. PRPs and SGLs require dword alignment.
const OFFSET_UNIT: u64 = 64;
const ANSWERS_MAX: usize = 64;
const BLOCK_SIZE_MAX: u32 = 4096;
/// Number of reusable buffers per size.
const BUFFERS_MAX: usize = 2;

impl Workload {
    /// Creates a workload over blocks of `block_size` bytes.
    pub fn new(
        bus: &SimBus,
        profile: WorkloadProfile,
        oracle: DataOracle,
        block_size: u32,
        random: Random,
    ) -> Self {
        Self {
            bus: bus.clone(),
            dma: SimDma::new(bus),
            profile,
            random,
            oracle,
            block_size,
            outstanding: BTreeMap::new(),
            next_token: 0x1_0000,
            left: profile.count,
            completions: CompletionBatch::with_capacity(ANSWERS_MAX),
            free: BTreeMap::new(),
            tainted: Vec::new(),
            counts: RequestCounts::default(),
            to_review: VecDeque::new(),
            longest_completion: Span::default(),
        }
    }

    /// Counts so far.
    pub fn request_counts(&self) -> RequestCounts {
        self.counts
    }

    /// Whether every request was submitted and has completed.
    pub fn is_done(&self) -> bool {
        self.left == 0 && self.to_review.is_empty() && self.outstanding.is_empty()
    }

    /// Longest time from a request to its completion.
    pub fn longest_completion(&self) -> Span {
        self.longest_completion
    }

    /// Number of outstanding requests.
    pub fn outstanding_requests(&self) -> usize {
        self.outstanding.len()
    }

    /// Oldest outstanding request.
    pub fn oldest_outstanding(&self) -> Option<(u64, Instant)> {
        let oldest = self.outstanding.iter().min_by_key(|(_, flight)| flight.submitted_at);
        oldest.map(|(token, flight)| (*token, flight.submitted_at))
    }

    /// Sets the limits reported by a queue. If they differ from those of the medium, data are no
    /// longer verified.
    pub fn set_limits(&mut self, limits: &Limits) {
        let is_as_agreed =
            limits.block_size == self.block_size && limits.block_count >= 2 * self.profile.span;
        if !is_as_agreed {
            self.bus.with_state(|state| state.is_scribbled = true);
            // Larger blocks than that exceed the buffers of the workload.
            self.block_size = limits.block_size.min(BLOCK_SIZE_MAX);
        }
    }

    /// Starts again with other parameters.
    pub fn restart(&mut self, profile: WorkloadProfile) {
        (self.profile, self.left) = (profile, profile.count);
    }

    /// Submits requests up to the queue depth.
    pub fn submit(&mut self, backend: &mut dyn IoChannel) {
        while self.outstanding.len() < self.profile.depth as usize {
            if let Some(lba) = self.to_review.front().copied() {
                if !self.submit_one(backend, Operation::Read, lba..lba + 1) {
                    break;
                }
                self.to_review.pop_front();
                continue;
            }
            if self.left == 0 {
                break;
            }
            let Some((operation, blocks)) = self.draw_request() else { break };
            if !self.submit_one(backend, operation, blocks) {
                break;
            }
            self.left -= 1;
        }
        backend.flush_submissions();
    }

    /// Switches to reads of every block that was ever written, and nothing after them.
    pub fn read_back_written_blocks(&mut self) {
        self.left = 0;
        self.to_review = self.oracle.blocks_written().collect();
    }

    /// Discards all outstanding requests after the host has gone. The DMA access has been revoked.
    pub fn discard_outstanding(&mut self) {
        self.left = 0;
        for (token, flight) in core::mem::take(&mut self.outstanding) {
            let now = self.bus.now();
            let returned = self.bus.with_state(|state| state.ledger.return_to_host(token, now));
            if let Err(failure) = returned {
                self.bus.report_violation(failure);
            }
            self.oracle.withdraw_uncertain(token);
            if let Some(buffer) = flight.buffer {
                self.return_buffer(buffer);
            }
        }
    }

    /// Reaps completions, verifies each, and returns the buffers.
    pub fn poll(&mut self, now: Instant, backend: &mut dyn IoChannel) -> usize {
        let mut completions =
            core::mem::replace(&mut self.completions, CompletionBatch::with_capacity(0));
        backend.poll(now, &mut completions);
        let count = completions.as_slice().len();
        completions.drain().for_each(|completion| self.handle_completion(now, completion));
        self.completions = completions;
        count
    }

    /// Discards all outstanding requests after a power cut.
    pub fn handle_power_cut(&mut self) {
        self.oracle.record_power_cut();
        self.bus.with_state(|state| state.ledger.record_device_stop());
        for (token, flight) in core::mem::take(&mut self.outstanding) {
            let now = self.bus.now();
            let _ = self.bus.with_state(|state| state.ledger.return_to_host(token, now));
            if let Some(buffer) = flight.buffer {
                self.return_buffer(buffer);
            }
        }
    }

    /// Releases all memory. No request may be outstanding.
    pub fn release_memory(&mut self) {
        let free = core::mem::take(&mut self.free).into_values().flatten();
        let tainted = core::mem::take(&mut self.tainted);
        free.chain(tainted).for_each(|pages| self.dma.release(pages));
    }

    fn draw_request(&mut self) -> Option<(Operation, Range<u64>)> {
        let operation = self.profile.mix.draw_operation(&mut self.random);
        let (fewest, most) = self.profile.blocks;
        let count = u64::from(fewest) + self.random.below(u64::from(most - fewest) + 1);
        let WorkloadProfile { span, .. } = self.profile;
        let first = self.random.below(span - count + 1);
        let blocks = match operation {
            Operation::Flush => 0..0,
            // The effect of copies and of write uncorrectable is not predictable, so they use other
            // blocks.
            Operation::Copy | Operation::WriteUncorrectable => span + first..span + first + count,
            _ => first..first + count,
        };
        let is_write = write_effect(operation).is_some();
        // On overlap with a write in flight nothing else is drawn, so that the random sequence
        // depends on timing as little as possible.
        if is_write && self.oracle.is_being_written(&blocks) {
            return self.outstanding.is_empty().then_some((Operation::Flush, 0..0));
        }
        Some((operation, blocks))
    }

    fn submit_one(
        &mut self,
        backend: &mut dyn IoChannel,
        operation: Operation,
        blocks: Range<u64>,
    ) -> bool {
        let now = self.bus.now();
        let token = self.next_token;
        let count = blocks.end - blocks.start;
        let direction = data_direction(operation);
        let len_bytes = u32::try_from(count).unwrap_or(0) * self.block_size;
        let buffer = match direction {
            None => None,
            Some(_) => match self.allocate_buffer(len_bytes) {
                None => return false,
                some => some,
            },
        };
        // Recorded before the submission, since the device may access the buffer from then on.
        self.inform_oracle(token, operation, &blocks);
        let mut segments = Vec::new();
        if let (Some(buffer), Some(direction)) = (buffer, direction) {
            self.fill_buffer(token, operation, buffer);
            segments = self.split_data(buffer.data);
            self.mark_buffer_in_use(token, buffer, direction);
        }
        let request = Request {
            token,
            lba: blocks.start,
            operand: if operation == Operation::Copy {
                blocks.start - self.profile.span
            } else {
                0
            },
            blocks: u32::try_from(count).unwrap_or(0),
            segment_first: 0,
            segment_count: u16::try_from(segments.len()).unwrap_or(u16::MAX),
            metadata_count: 0,
            operation,
            flags: self.draw_flags(operation),
        };
        if backend.submit(now, &[request], &segments) == 0 {
            self.undo_preparation(token, operation, buffer);
            return false;
        }
        self.next_token += 1;
        self.counts.submitted += 1;
        let range = blocks.start << 16 | count;
        self.bus.record(TraceKind::Submitted, [token, operation as u64, range]);
        self.outstanding
            .insert(token, InflightRequest { operation, blocks, submitted_at: now, buffer });
        true
    }

    fn draw_flags(&mut self, operation: Operation) -> RequestFlags {
        // FUA is derived from the token, so that the model knows it before the submission.
        match operation {
            Operation::Write if self.has_fua(self.next_token) => RequestFlags::FUA,
            Operation::WriteZeroes if self.next_token.is_multiple_of(3) => RequestFlags::DEALLOCATE,
            _ => RequestFlags::NONE,
        }
    }

    fn has_fua(&self, token: u64) -> bool {
        matches!(self.profile.mix, OperationMix::Flushes | OperationMix::Everything)
            && token.is_multiple_of(7)
    }

    fn inform_oracle(&mut self, token: u64, operation: Operation, blocks: &Range<u64>) {
        let is_forced = self.has_fua(token) && operation == Operation::Write;
        match (operation, write_effect(operation)) {
            (Operation::Read, _) => self.oracle.record_read_submitted(token, blocks.clone()),
            (Operation::Flush, _) => self.oracle.record_flush_submitted(token),
            (Operation::Copy | Operation::WriteUncorrectable, _) | (_, None) => {}
            (_, Some(leaves)) => {
                self.oracle.record_write_submitted(token, blocks.clone(), leaves, is_forced);
            }
        }
    }

    /// Undoes the preparation of a request that was rejected. None of its commands may have been
    /// stored.
    fn undo_preparation(
        &mut self,
        token: u64,
        operation: Operation,
        buffer: Option<WorkloadBuffer>,
    ) {
        self.oracle.withdraw_write(token, operation == Operation::Read);
        let now = self.bus.now();
        let returned = self.bus.with_state(|state| state.ledger.return_to_host(token, now));
        if let Err(failure) = returned {
            self.bus.report_violation(failure);
        }
        if let Some(buffer) = buffer {
            self.return_buffer(buffer);
        }
    }

    fn mark_buffer_in_use(&self, token: u64, buffer: WorkloadBuffer, direction: DataDirection) {
        if let Some(iova) = self.bus.iova_of(buffer.pages) {
            let len_bytes = u64::from(buffer.pages.len_bytes);
            self.bus.with_state(|state| {
                state.ledger.mark_in_use(token, &[(iova, len_bytes)], direction)
            });
        }
    }

    fn allocate_buffer(&mut self, len_bytes: u32) -> Option<WorkloadBuffer> {
        let offset = match self.profile.pieces {
            DataLayout::Offset => {
                let drawn = self.random.below(u64::from(PAGE) / OFFSET_UNIT) * OFFSET_UNIT;
                u32::try_from(drawn).unwrap_or(0)
            }
            DataLayout::Whole | DataLayout::Pages => 0,
        };
        let needed = (offset + len_bytes).next_multiple_of(PAGE);
        let free = self.free.entry(needed).or_default().pop();
        let pages = free.or_else(|| self.dma.allocate(needed))?;
        let data = pages.slice(offset, len_bytes)?;
        Some(WorkloadBuffer { pages, data })
    }

    fn fill_buffer(&mut self, token: u64, operation: Operation, buffer: WorkloadBuffer) {
        let mut bytes = vec![0xa5; buffer.data.len_bytes as usize];
        if operation == Operation::Write {
            self.oracle.fill_with_stamps(token, &mut bytes);
        }
        // Cannot fail: the memory was just allocated.
        let _ = self.dma.store(buffer.data, &bytes);
    }

    fn split_data(&self, data: Segment) -> Vec<Segment> {
        if self.profile.pieces != DataLayout::Pages {
            return vec![data];
        }
        let pages = (0..data.len_bytes).step_by(PAGE as usize);
        pages.filter_map(|at| data.slice(at, PAGE.min(data.len_bytes - at))).collect()
    }

    fn handle_completion(&mut self, now: Instant, completion: IoCompletion) {
        let IoCompletion { token, status, result } = completion;
        self.bus.record(TraceKind::Completed, [token, status.0.into(), result.into()]);
        let Some(flight) = self.outstanding.remove(&token) else {
            return self.bus.report_violation(Violation::CompletedTwice { token });
        };
        self.longest_completion = self.longest_completion.max(now.since(flight.submitted_at));
        match status {
            IoStatus::SUCCESS => self.counts.succeeded += 1,
            IoStatus::ABORTED_BY_HOST => self.counts.aborted += 1,
            _ => self.counts.failed += 1,
        }
        let returned = self.bus.with_state(|state| state.ledger.return_to_host(token, now));
        let is_tainted = match returned {
            Ok(is_tainted) => is_tainted,
            Err(failure) => return self.bus.report_violation(failure),
        };
        if is_tainted {
            // The device may still change these blocks at any time, so they are not verified any
            // more.
            self.oracle.stop_checking(token, flight.blocks.clone());
        } else if let Err(failure) = self.check_data(token, &flight, status) {
            self.bus.report_violation(failure);
        }
        match flight.buffer {
            Some(buffer) if is_tainted => self.tainted.push(buffer.pages),
            Some(buffer) => self.return_buffer(buffer),
            None => {}
        }
    }

    fn check_data(
        &mut self,
        token: u64,
        flight: &InflightRequest,
        status: IoStatus,
    ) -> Result<(), Violation> {
        let is_success = status.is_success();
        match (flight.operation, flight.buffer) {
            (Operation::Read, Some(buffer)) => {
                let mut bytes = vec![0; buffer.data.len_bytes as usize];
                let _ = self.dma.load(buffer.data, &mut bytes);
                let is_evidence = is_success && !self.bus.with_state(|state| state.is_scribbled);
                self.counts.verified += u64::from(is_evidence);
                let bytes = is_evidence.then_some(&bytes[..]);
                let looked = self.oracle.verify_read_data(token, bytes);
                looked.map_err(|complaint| Violation::Data { token, complaint })
            }
            (Operation::Flush, _) => {
                self.oracle.record_flush_ended(token, is_success);
                Ok(())
            }
            _ => {
                self.oracle.record_write_ended(token, is_success);
                Ok(())
            }
        }
    }

    /// Keeps some buffers for the next request of the same size and releases the others, so that a
    /// late access hits unmapped memory.
    fn return_buffer(&mut self, buffer: WorkloadBuffer) {
        let kept = self.free.entry(buffer.pages.len_bytes).or_default();
        if kept.len() < BUFFERS_MAX {
            kept.push(buffer.pages)
        } else {
            self.dma.release(buffer.pages)
        }
    }
}

impl OperationMix {
    fn draw_operation(self, random: &mut Random) -> Operation {
        use Operation::{
            Compare, Copy, Deallocate, Flush, Read, Verify, Write, WriteUncorrectable, WriteZeroes,
        };
        let choices: &[Operation] = match self {
            Self::Reads => &[Read],
            Self::Writes => &[Write],
            Self::ReadsAndWrites => &[Read, Write],
            Self::Flushes => &[Write, Write, Write, Read, Read, Flush],
            Self::Everything => &[
                Read,
                Write,
                Read,
                Write,
                Flush,
                Deallocate,
                WriteZeroes,
                Compare,
                WriteUncorrectable,
                Verify,
                Copy,
            ],
        };
        let drawn = random.below(choices.len() as u64);
        usize::try_from(drawn).ok().and_then(|index| choices.get(index)).copied().unwrap_or(Read)
    }
}

/// Effect of an operation on its blocks. `None` if it changes nothing.
fn write_effect(operation: Operation) -> Option<WriteEffect> {
    match operation {
        Operation::Write | Operation::CompareAndWrite => Some(WriteEffect::Stamps),
        Operation::WriteZeroes => Some(WriteEffect::Zeroes),
        Operation::Deallocate | Operation::Copy | Operation::WriteUncorrectable => {
            Some(WriteEffect::Anything)
        }
        Operation::Read | Operation::Flush | Operation::Compare | Operation::Verify => None,
    }
}

fn data_direction(operation: Operation) -> Option<DataDirection> {
    match operation {
        Operation::Read => Some(DataDirection::FromDevice),
        Operation::Write | Operation::Compare => Some(DataDirection::ToDevice),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
