//! Split: a range of a device as a device of its own.

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, BlockExtent, ChannelWakeup, CompletionBatch, ErrorCategory, Instant, IoChannel,
    IoCompletion, IoStatus, Limits, Operation, Request, Segment,
};

use super::request_validation::validate_block_range;
use tenmil_base::Error;
use tenmil_block::CompletionQueue;
use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};

/// A range of blocks of another device. Blocks outside it are not accessible.
///
/// The parts of one device share its resources: the queue depth limit applies to each part separately,
/// while the volatile cache and its flushes are common to all.
pub struct SplitDevice {
    inner: Arc<dyn BlockDevice>,
    first: u64,
    limits: Limits,
}

struct SplitChannel {
    inner: Box<dyn IoChannel>,
    first: u64,
    limits: Limits,
    /// Requests accepted and not completed.
    outstanding: usize,
    /// The batch being submitted, with LBAs relative to the device below.
    batch: Vec<Request>,
    /// Completions of rejected requests.
    ready: CompletionQueue,
}

/// Maximum number of requests submitted at once.
const BATCH: usize = 256;

/// Opens `split:[URI]?part=0&parts=4` or `split:[URI]?offset=1m&size=4m`.
pub(crate) fn open(opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
    let child = uri.single_child()?;
    let mut fields = uri.options();
    let parts = fields.number_value("parts", 1..=u64::from(u32::MAX))?;
    let part = fields.number_value("part", 0..=parts.unwrap_or(1) - 1)?;
    let (offset, size) = (fields.size_value("offset")?, fields.size_value("size")?);
    fields.reject_unconsumed()?;
    let by_bytes = offset.is_some() || size.is_some();
    if by_bytes == parts.is_some() || part.is_some() != parts.is_some() {
        let problem = "which part is not clear, expected part=0&parts=4 or offset=1m&size=4m";
        return Err(uri.error(problem).into());
    }
    let below = opener.open(child)?;
    let limits = below.medium.limits();
    let (first, count) = match (part, parts) {
        (Some(part), Some(parts)) => equal_part_range(&limits, part, parts),
        _ => range_from_offset_and_size(uri, &limits, offset.unwrap_or(0), size)?,
    };
    let split = SplitDevice::new(Arc::clone(&below.medium), first, count)
        .map_err(|error| Error::new(ErrorCategory::Usage, format!("{uri:#}: {error}")))?;
    let last = first + count - 1;
    let description = format!("split: blocks {first} to {last} of {}", below.description);
    Ok(below.with_device_stacked_on(Arc::new(split), description))
}

/// The blocks of one of several equal parts, aligned to the optimal boundary of the device if it has one.
/// The remainder of an uneven division is in no part.
fn equal_part_range(limits: &Limits, part: u64, parts: u64) -> (u64, u64) {
    let unit = u64::from(limits.optimal_boundary_blocks).max(1);
    let each = limits.block_count / parts;
    let each = if each >= unit { each - each % unit } else { each };
    (part * each, each)
}

fn range_from_offset_and_size(
    uri: &Uri,
    limits: &Limits,
    offset: u64,
    size: Option<u64>,
) -> Result<(u64, u64), Error> {
    let block = u64::from(limits.block_size);
    let whole = |key: &str, bytes: u64| {
        let problem =
            || format!("{key} is {bytes} bytes, expected a multiple of the block of {block} bytes");
        if bytes.is_multiple_of(block) { Ok(bytes / block) } else { Err(uri.error(problem())) }
    };
    let first = whole("offset", offset)?;
    let count = match size {
        Some(size) => whole("size", size)?,
        None => limits.block_count.saturating_sub(first),
    };
    Ok((first, count))
}

impl SplitDevice {
    /// The `count` blocks of `inner` from `first` on.
    ///
    /// # Errors
    ///
    /// If `count` is zero, or the range exceeds `inner`.
    pub fn new(inner: Arc<dyn BlockDevice>, first: u64, count: u64) -> Result<Self, Error> {
        let whole = inner.limits();
        let end = first.checked_add(count).filter(|end| count > 0 && *end <= whole.block_count);
        if end.is_none() {
            let text = format!(
                "split: {count} blocks from {first} on, expected at least 1 and all of them below {}",
                whole.block_count
            );
            return Err(Error::new(ErrorCategory::Usage, text));
        }
        let boundary = whole.optimal_boundary_blocks;
        let keeps_boundary = boundary > 0 && first.is_multiple_of(u64::from(boundary));
        let optimal_boundary_blocks = if keeps_boundary { boundary } else { 0 };
        let limits = Limits { block_count: count, optimal_boundary_blocks, ..whole };
        Ok(Self { inner, first, limits })
    }
}

impl BlockDevice for SplitDevice {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        Ok(Box::new(SplitChannel {
            inner: self.inner.channel()?,
            first: self.first,
            outstanding: 0,
            batch: Vec::with_capacity(BATCH),
            ready: CompletionQueue::with_depth(self.limits.depth_max),
            limits: self.limits.clone(),
        }))
    }

    fn channels_max(&self) -> u32 {
        self.inner.channels_max()
    }

    fn block_status(&self, lba: u64) -> Result<BlockExtent, Error> {
        let left = self.limits.block_count.saturating_sub(lba);
        let BlockExtent { blocks, kind: holds } =
            self.inner.block_status(self.first.saturating_add(lba))?;
        Ok(BlockExtent { blocks: blocks.min(left), kind: holds })
    }
}

impl SplitChannel {
    /// Fills the batch with leading requests that are inside the range.
    fn translate_batch(&mut self, requests: &[Request]) {
        let Self { limits, first, batch, .. } = self;
        let fitting = requests.iter().take(BATCH);
        let fitting = fitting.take_while(|request| validate_block_range(limits, request).is_ok());
        batch.clear();
        batch.extend(fitting.map(|request| {
            let is_flush = request.operation == Operation::Flush;
            let is_copy = request.operation == Operation::Copy;
            Request {
                lba: if is_flush { request.lba } else { request.lba + *first },
                operand: if is_copy { request.operand + *first } else { request.operand },
                ..*request
            }
        }));
    }
}

impl IoChannel for SplitChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let room = (self.limits.depth_max as usize).saturating_sub(self.outstanding);
        let requests = &requests[..requests.len().min(room)];
        let mut done = 0;
        while let Some(next) = requests.get(done) {
            self.translate_batch(&requests[done..]);
            if self.batch.is_empty() {
                let status = IoStatus::LBA_OUT_OF_RANGE;
                self.ready.push(IoCompletion { token: next.token, status, result: 0 });
                done += 1;
                continue;
            }
            let taken = self.inner.submit(now, &self.batch, segments);
            done += taken;
            if taken < self.batch.len() {
                break;
            }
        }
        self.outstanding += done;
        done
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let count = self.ready.drain_into(completions) + self.inner.poll(now, completions);
        self.outstanding -= count;
        count
    }
}

impl ChannelWakeup for SplitChannel {
    fn below(&self) -> Option<&dyn IoChannel> {
        Some(&self.inner)
    }

    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        Some(&mut self.inner)
    }

    fn wake_at(&self) -> Instant {
        if !self.ready.is_empty() { Instant::default() } else { self.inner.wake_at() }
    }

    fn arm(&mut self) -> bool {
        let busy_below = self.inner.arm();
        !self.ready.is_empty() || busy_below
    }
}

impl std::fmt::Debug for SplitDevice {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { first, limits, .. } = self;
        out.debug_struct("Split")
            .field("first", first)
            .field("limits", limits)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tenmil_base::{
        BlockDevice, BlockExtent, CompletionBatch, ExtentKind, Instant, IoStatus, Limits, Memory,
        Operation, Request, RequestFlags,
    };
    use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};

    use super::{SplitDevice, equal_part_range};
    use crate::{NullDevice, RamDevice};

    #[test]
    fn requests_outside_the_part_are_rejected() {
        let regions = RegionTable::new(2);
        let ram = Arc::new(RamDevice::new(&regions, 512, 64).unwrap());
        let memory = regions
            .add_mapping(MemoryMapping::new(32 << 10, MemoryBacking::Private).unwrap())
            .unwrap();
        regions.fill(memory, 7).unwrap();
        let mut part = SplitDevice::new(ram.clone(), 16, 32).unwrap().channel().unwrap();
        let request = |operation, lba, operand, blocks: u32| Request {
            token: 5,
            lba,
            operand,
            segment_first: 0,
            blocks,
            segment_count: u16::from(operation != Operation::Copy),
            metadata_count: 0,
            operation,
            flags: RequestFlags::NONE,
        };
        let write = |lba, blocks| request(Operation::Write, lba, 0, blocks);
        let outside = IoStatus::LBA_OUT_OF_RANGE;
        for (request, expected) in [
            (write(0, 32), IoStatus::SUCCESS),
            (write(31, 2), outside),
            (write(32, 1), outside),
            (write(u64::MAX, 1), outside),
            (write(u64::MAX - 15, 1), outside),
            (request(Operation::Copy, 0, 30, 3), outside),
            (request(Operation::Copy, 30, 0, 3), outside),
            (request(Operation::Copy, 0, 16, 16), IoStatus::SUCCESS),
        ] {
            let data = memory.slice(0, request.blocks * 512).unwrap();
            let mut completions = CompletionBatch::with_capacity(1);
            assert_eq!(part.submit(Instant::default(), &[request], &[data]), 1);
            assert_eq!(part.poll(Instant::default(), &mut completions), 1);
            assert_eq!(completions.as_slice()[0].status, expected, "{request:?}");
        }
        let mut whole = ram.channel().unwrap();
        let mut completions = CompletionBatch::with_capacity(1);
        whole.submit(Instant::default(), &[request(Operation::Read, 0, 0, 64)], &[memory]);
        whole.poll(Instant::default(), &mut completions);
        let mut bytes = vec![1; 64 * 512];
        regions.load(memory, &mut bytes).unwrap();
        for (lba, block) in bytes.chunks(512).enumerate() {
            let expected = if (16..48).contains(&lba) { 7 } else { 0 };
            assert!(block.iter().all(|byte| *byte == expected), "block {lba}");
        }
    }

    #[test]
    fn rejected_requests_count_as_outstanding_until_polled() {
        let null = NullDevice::new(512, 64).unwrap();
        let depth = null.limits().depth_max as usize;
        let mut part = SplitDevice::new(Arc::new(null), 0, 32).unwrap().channel().unwrap();
        let flags = RequestFlags::NONE;
        let request = Request {
            token: 0,
            lba: 40,
            operand: 0,
            segment_first: 0,
            blocks: 1,
            segment_count: 0,
            metadata_count: 0,
            operation: Operation::Verify,
            flags,
        };
        let batch = vec![request; depth + 1];
        assert_eq!(part.submit(Instant::default(), &batch, &[]), depth);
        assert!(part.arm(), "answers lie ready");
        assert_eq!(part.wake_at(), Instant::default());
        let mut completions = CompletionBatch::with_capacity(10);
        assert_eq!(part.poll(Instant::default(), &mut completions), 10);
        assert_eq!(part.submit(Instant::default(), &batch, &[]), 10);
    }

    #[test]
    fn equal_parts_end_at_atomic_boundaries() {
        let limits = |block_count, optimal_boundary_blocks| Limits {
            block_count,
            optimal_boundary_blocks,
            ..NullDevice::new(512, 1).unwrap().limits()
        };
        assert_eq!(equal_part_range(&limits(103, 0), 3, 4), (75, 25));
        assert_eq!(equal_part_range(&limits(103, 8), 3, 4), (72, 24));
        assert_eq!(equal_part_range(&limits(20, 8), 1, 4), (5, 5), "smaller than the boundary");
    }

    #[test]
    fn block_status_extent_ends_at_the_part_end() {
        let part = SplitDevice::new(Arc::new(NullDevice::new(512, 64).unwrap()), 8, 16).unwrap();
        assert_eq!(part.block_status(4), Ok(BlockExtent { blocks: 12, kind: ExtentKind::Data }));
        assert_eq!(part.block_status(16), Ok(BlockExtent { blocks: 0, kind: ExtentKind::Data }));
    }
}
