//! Simulated block device: plain bytes, optionally with few operations, full at times, and with
//! completions that arrive later and out of order.

use std::collections::BTreeSet;
use std::io::{Stdin, stdin};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Durability, Error, Instant, IoChannel,
    IoCompletion, IoStatus, Limits, MediumMemory, Memory, Operation, OperationSet, Random, Request,
    RequestFlags, Segment, WakeSource,
};

use super::fake_host::FakeRam;

/// Block device in memory.
#[derive(Debug)]
pub(crate) struct FakeDevice {
    ram: Arc<FakeRam>,
    blocks: Arc<Mutex<FakeDeviceContents>>,
    limits: Limits,
    completes_later: bool,
    seeds: Mutex<Random>,
    medium: Option<MediumMemory>,
}

/// Contents and history of the device.
#[derive(Debug, Default)]
pub(crate) struct FakeDeviceContents {
    pub(crate) bytes: Vec<u8>,
    pub(crate) uncorrectable: BTreeSet<u64>,
    /// All completed requests, in order.
    pub(crate) log: Vec<Request>,
    /// Flushes fail.
    pub(crate) fails_flushes: bool,
    /// Requests are kept and not completed.
    pub(crate) is_stuck: bool,
    /// Completions are signalled, through a descriptor that never becomes readable.
    pub(crate) signals: bool,
    /// Number of armed channels.
    pub(crate) armed: u32,
}

#[derive(Debug)]
struct FakeChannel {
    ram: Arc<FakeRam>,
    blocks: Arc<Mutex<FakeDeviceContents>>,
    limits: Limits,
    random: Option<Random>,
    pending: Vec<(Request, Vec<Segment>)>,
    descriptor: Stdin,
}

impl FakeDevice {
    /// A device with 512-byte blocks and every operation that completes requests at once.
    pub(crate) fn new(ram: &Arc<FakeRam>, block_count: u64) -> Self {
        let limits = Limits {
            block_size: 512,
            metadata_size: 0,
            block_count,
            request_blocks_max: 1 << 16,
            segments_max: 64,
            optimal_boundary_blocks: 0,
            atomic_write_blocks: 8,
            depth_max: 64,
            durability: Durability::VolatileCache,
            operations: OperationSet::from_operations(&Operation::ALL)
                .without(OperationSet::from_operations(&[Operation::CompareAndWrite])),
        };
        let bytes = vec![0; usize::try_from(block_count * 512).unwrap_or(0)];
        Self {
            ram: ram.clone(),
            blocks: Arc::new(Mutex::new(FakeDeviceContents {
                bytes,
                ..FakeDeviceContents::default()
            })),
            limits,
            completes_later: false,
            seeds: Mutex::new(Random::new(0)),
            medium: None,
        }
    }

    /// Makes requests complete many polls later and out of order.
    pub(crate) fn with_random_delays(mut self, seed: u64) -> Self {
        self.completes_later = true;
        self.seeds = Mutex::new(Random::new(seed));
        self
    }

    /// Changes the limits.
    #[cfg(test)]
    pub(crate) fn with_limits(mut self, change: impl FnOnce(&mut Limits)) -> Self {
        change(&mut self.limits);
        self
    }

    /// Leaves the data of reads with [`RequestFlags::IN_PLACE`] in this memory, which the test fills.
    #[cfg(test)]
    pub(crate) fn with_medium_memory(mut self, medium: MediumMemory) -> Self {
        self.medium = Some(medium);
        self
    }

    /// Number of open channels.
    #[cfg(test)]
    pub(crate) fn open_channel_count(&self) -> usize {
        Arc::strong_count(&self.blocks) - 1
    }

    /// Contents of the device.
    #[cfg(test)]
    pub(crate) fn contents(&self) -> MutexGuard<'_, FakeDeviceContents> {
        lock(&self.blocks)
    }
}

impl BlockDevice for FakeDevice {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let random = self.completes_later.then(|| lock(&self.seeds).fork());
        Ok(Box::new(FakeChannel {
            ram: self.ram.clone(),
            blocks: self.blocks.clone(),
            limits: self.limits.clone(),
            random,
            pending: Vec::new(),
            descriptor: stdin(),
        }))
    }

    fn medium_memory(&self) -> Option<MediumMemory> {
        self.medium.clone()
    }
}

impl IoChannel for FakeChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, _: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut free_count = (self.limits.depth_max as usize).saturating_sub(self.pending.len());
        if let Some(random) = &mut self.random {
            // A block device may be full at any time.
            free_count = usize::try_from(random.below(free_count as u64 + 1)).unwrap_or(0);
        }
        let accepted = free_count.min(requests.len());
        for request in &requests[..accepted] {
            let first = request.segment_first as usize;
            let own = segments[first..][..usize::from(request.segment_count)].to_vec();
            self.pending.push((*request, own));
        }
        accepted
    }

    fn poll(&mut self, _: Instant, completions: &mut CompletionBatch) -> usize {
        let mut count = 0;
        while completions.remaining() > 0
            && !self.pending.is_empty()
            && !lock(&self.blocks).is_stuck
        {
            let mut at = 0;
            if let Some(random) = &mut self.random {
                if random.chance(1, 2) {
                    break;
                }
                at = usize::try_from(random.below(self.pending.len() as u64)).unwrap_or(0);
            }
            let (request, segments) = self.pending.remove(at);
            // A failed read has the result as well, which no device needs to set.
            let is_in_place = request.flags.has(RequestFlags::IN_PLACE);
            let segments = if is_in_place { &[] } else { &segments[..] };
            let status = self.execute(&request, segments);
            let result = if is_in_place { IoCompletion::IN_PLACE } else { 0 };
            completions.push(IoCompletion { token: request.token, status, result });
            count += 1;
        }
        count
    }
}

impl ChannelWakeup for FakeChannel {
    fn wake_source(&self) -> WakeSource<'_> {
        if lock(&self.blocks).signals {
            WakeSource::Descriptor(self.descriptor.as_fd())
        } else {
            WakeSource::None
        }
    }

    fn arm(&mut self) -> bool {
        let mut blocks = lock(&self.blocks);
        blocks.armed += 1;
        !blocks.is_stuck && !self.pending.is_empty()
    }

    fn disarm(&mut self) {
        lock(&self.blocks).armed -= 1;
    }
}

impl FakeChannel {
    fn execute(&self, request: &Request, segments: &[Segment]) -> IoStatus {
        let mut blocks = lock(&self.blocks);
        blocks.log.push(*request);
        if !self.limits.operations.has(request.operation) {
            return IoStatus::INVALID_OPCODE;
        }
        let end = request.lba.checked_add(request.blocks.into());
        if end.is_none_or(|end| end > self.limits.block_count) {
            return IoStatus::LBA_OUT_OF_RANGE;
        }
        let moves =
            matches!(request.operation, Operation::Read | Operation::Write | Operation::Compare);
        let len: u64 = segments.iter().map(|segment| u64::from(segment.len_bytes)).sum();
        let is_too_large = request.blocks > self.limits.request_blocks_max
            || segments.len() > self.limits.segments_max.into();
        let moves = moves && !request.flags.has(RequestFlags::IN_PLACE);
        if moves && (len != u64::from(request.blocks) * 512 || is_too_large) {
            return IoStatus::INVALID_FIELD;
        }
        let range = request.lba..request.lba + u64::from(request.blocks);
        match request.operation {
            Operation::Flush if blocks.fails_flushes => IoStatus::WRITE_FAULT,
            Operation::Flush => IoStatus::SUCCESS,
            Operation::CompareAndWrite => IoStatus::INVALID_OPCODE,
            Operation::Read | Operation::Compare | Operation::Verify
                if blocks.uncorrectable.range(range.clone()).next().is_some() =>
            {
                IoStatus::UNRECOVERED_READ
            }
            Operation::Verify => IoStatus::SUCCESS,
            Operation::Read => {
                self.for_each_segment(request, segments, &mut blocks.bytes, |memory, part, here| {
                    memory.store(part, here).map(|()| true)
                })
            }
            Operation::Compare => {
                self.for_each_segment(request, segments, &mut blocks.bytes, |memory, part, here| {
                    let mut there = vec![0; here.len()];
                    memory.load(part, &mut there).map(|()| there == here)
                })
            }
            Operation::Write => {
                blocks.uncorrectable.retain(|block| !range.contains(block));
                self.for_each_segment(request, segments, &mut blocks.bytes, |memory, part, here| {
                    memory.load(part, here).map(|()| true)
                })
            }
            Operation::WriteZeroes | Operation::Deallocate => {
                blocks.uncorrectable.retain(|block| !range.contains(block));
                blocks.bytes[byte_range(&range)].fill(0);
                IoStatus::SUCCESS
            }
            Operation::WriteUncorrectable => {
                blocks.uncorrectable.extend(range);
                IoStatus::SUCCESS
            }
            Operation::Copy => {
                let source = request.operand..request.operand + u64::from(request.blocks);
                let bytes = blocks.bytes[byte_range(&source)].to_vec();
                blocks.bytes[byte_range(&range)].copy_from_slice(&bytes);
                IoStatus::SUCCESS
            }
        }
    }

    /// Runs `f` on each segment and the corresponding bytes of the device.
    fn for_each_segment(
        &self,
        request: &Request,
        segments: &[Segment],
        bytes: &mut [u8],
        f: impl Fn(&FakeRam, Segment, &mut [u8]) -> Result<bool, tenmil_base::InvalidSegment>,
    ) -> IoStatus {
        let mut at = usize::try_from(request.lba * 512).unwrap_or(0);
        for segment in segments {
            let here = &mut bytes[at..at + segment.len_bytes as usize];
            at += here.len();
            match f(&self.ram, *segment, here) {
                Ok(true) => {}
                Ok(false) => return IoStatus::COMPARE_FAILURE,
                Err(_) => return IoStatus::DATA_TRANSFER_ERROR,
            }
        }
        IoStatus::SUCCESS
    }
}

fn byte_range(range: &core::ops::Range<u64>) -> core::ops::Range<usize> {
    let byte = |block: u64| usize::try_from(block * 512).unwrap_or(usize::MAX);
    byte(range.start)..byte(range.end)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
