//! RAM device: blocks in memory; volatile, data is lost when the process exits.

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, BlockExtent, ChannelWakeup, CompletionBatch, Durability, ErrorCategory,
    ExtentKind, Instant, InvalidSegment, IoChannel, IoCompletion, IoStatus, Limits, MediumMemory,
    Memory, Operation, OperationSet, Request, RequestFlags, Segment, WakeSource,
};
use tenmil_dma::{Region, RegionTable};

use super::block_bitmap::BlockBitmap;
use super::request_validation::{SEGMENTS_MAX, valid_request_segments, validate_geometry};
use tenmil_base::Error;
use tenmil_block::CompletionQueue;
use tenmil_block::SegmentCursor;
use tenmil_block::quantity_parser::parse_size;
use tenmil_block::uri::Uri;
use tenmil_block::{BLOCK_DEFAULT, OpenedDevice, Opener, whole_block_count};

/// Blocks in a memory region of the table that requests refer to, so that data moves by one copy between
/// regions. A block that was never written, or was deallocated, reads as zeroes and uses no memory until
/// it is written.
///
/// Channels on many threads share the blocks without a lock. A channel executes its requests one after
/// another. Two threads that write the same block at the same time may leave a mix of both.
#[derive(Clone, Debug)]
pub struct RamDevice {
    limits: Limits,
    store: Arc<RamStorage>,
}

#[derive(Debug)]
struct RamChannel {
    limits: Limits,
    store: Arc<RamStorage>,
    ready: CompletionQueue,
}

#[derive(Debug)]
struct RamStorage {
    regions: RegionTable,
    /// The blocks. The region outlives all channels, and all guards of [`MediumMemory`].
    blocks: Region,
    block_size: u64,
    /// The device is larger than the caches, so non-temporal stores cost nothing.
    is_large: bool,
    /// Blocks that contain written data. All others read as zeroes.
    written: BlockBitmap,
    /// Blocks marked uncorrectable, which cannot be read until they are written.
    uncorrectable: BlockBitmap,
}

const DEPTH_MAX: u32 = 4096;
const REQUEST_BYTES_MAX: u32 = 1 << 20;

/// Size in bytes from which blocks are usually not in the cache.
const LARGE: usize = 64 << 20;
/// Bytes at the start of a block prefetched during the previous request; the hardware prefetcher
/// continues.
const AHEAD_BYTES: u32 = 1024;

/// Opens `ram:1g?block=512`.
pub(crate) fn open(opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
    Ok(opened_ram_device(ram_device_from_uri(opener, uri)?))
}

/// Opens the same with every block [written](RamDevice::new_filled). A device type for benchmarks.
///
/// # Errors
///
/// If the URI has an unknown option, or memory is exhausted.
pub fn open_ram_filled(opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
    Ok(opened_ram_device(ram_device_from_uri(opener, uri)?.new_filled()))
}

fn opened_ram_device(ram: RamDevice) -> OpenedDevice {
    OpenedDevice::without_existing_data(Arc::new(ram), "ram: volatile, lost when the process exits")
}

fn ram_device_from_uri(opener: &Opener<'_>, uri: &Uri) -> Result<RamDevice, Error> {
    let mut fields = uri.options();
    let block_size = fields.block_size()?.unwrap_or(BLOCK_DEFAULT);
    let by_key = fields.size_value("size")?;
    fields.reject_unconsumed()?;
    let by_path = match uri.path() {
        "" => None,
        path => Some(parse_size(path).map_err(|problem| uri.error(problem))?),
    };
    let size_bytes = match (by_path, by_key) {
        (Some(size), None) | (None, Some(size)) => size,
        (None, None) => return Err(uri.error("the size is missing, expected ram:1g").into()),
        (Some(_), Some(_)) => {
            return Err(uri.error("the size is given twice, expected once: ram:1g").into());
        }
    };
    RamDevice::new(opener.regions, block_size, whole_block_count(uri, size_bytes, block_size)?)
}

impl RamDevice {
    /// `block_count` blocks of `block_size` bytes in a new region of `regions`. Requests refer to memory
    /// of the same table.
    ///
    /// # Errors
    ///
    /// If the geometry is invalid, or memory or the region table is exhausted.
    pub fn new(regions: &RegionTable, block_size: u32, block_count: u64) -> Result<Self, Error> {
        validate_geometry("ram", block_size, block_count)?;
        let len = block_count.checked_mul(u64::from(block_size));
        let len = len.and_then(|len| usize::try_from(len).ok()).ok_or_else(|| {
            let text = format!("ram: size is {block_count} blocks, expected what can be addressed");
            Error::new(ErrorCategory::Usage, text)
        })?;
        let machine = |error: &dyn std::fmt::Display| {
            Error::new(ErrorCategory::Environment, format!("ram of {len} bytes: {error}"))
        };
        let blocks = regions.allocate_region(len).map_err(|error| machine(&error))?;
        let store = RamStorage {
            regions: regions.clone(),
            blocks,
            block_size: u64::from(block_size),
            is_large: len >= LARGE,
            written: BlockBitmap::new(block_count),
            uncorrectable: BlockBitmap::new(block_count),
        };
        let limits = Limits {
            block_size,
            metadata_size: 0,
            block_count,
            request_blocks_max: REQUEST_BYTES_MAX / block_size,
            segments_max: SEGMENTS_MAX,
            optimal_boundary_blocks: 0,
            atomic_write_blocks: 1,
            depth_max: DEPTH_MAX,
            durability: Durability::NonPersistent,
            operations: OperationSet::from_operations(&Operation::ALL),
        };
        Ok(Self { limits, store: Arc::new(store) })
    }

    /// Writes zeroes to every block, so that memory is allocated now and each read moves data.
    #[must_use]
    pub fn new_filled(self) -> Self {
        let store = &*self.store;
        for block in 0..self.limits.block_count {
            store
                .regions
                .fill(store.block_segment(block), 0)
                .expect("the region is as long as its blocks");
        }
        store.written.set(0, self.limits.block_count);
        self
    }
}

impl BlockDevice for RamDevice {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        Ok(Box::new(RamChannel {
            limits: self.limits.clone(),
            store: Arc::clone(&self.store),
            ready: CompletionQueue::with_depth(self.limits.depth_max),
        }))
    }

    fn block_status(&self, lba: u64) -> Result<BlockExtent, Error> {
        let left = self.limits.block_count.saturating_sub(lba);
        if left == 0 {
            return Ok(BlockExtent { blocks: 0, kind: ExtentKind::Hole });
        }
        let (written, blocks) = self.store.written.bit_run_at(lba, left);
        // An uncorrectable block does not read as zeroes.
        let (is_lost, blocks) = self.store.uncorrectable.bit_run_at(lba, blocks);
        Ok(BlockExtent {
            blocks,
            kind: if written || is_lost { ExtentKind::Data } else { ExtentKind::Hole },
        })
    }

    fn medium_memory(&self) -> Option<MediumMemory> {
        let store = Arc::clone(&self.store);
        Some(MediumMemory { region: store.blocks.id(), offset: 0, guard: store })
    }
}

impl IoChannel for RamChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, _now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let count = requests.len().min(self.ready.free_count());
        let (limits, store) = (&self.limits, &self.store);
        self.ready.extend(requests[..count].iter().enumerate().map(|(index, request)| {
            if let Some(next) = requests.get(index + 1).filter(|_| store.is_large) {
                store.prefetch_read(next);
            }
            if request.flags.has(RequestFlags::IN_PLACE)
                && let Some(completion) = store.complete_in_place(limits, request, segments)
            {
                return completion;
            }
            let done = valid_request_segments(limits, request, segments)
                .and_then(|own| store.execute(request, own));
            let status = done.err().unwrap_or(IoStatus::SUCCESS);
            IoCompletion { token: request.token, status, result: 0 }
        }));
        if store.is_large {
            // Orders the non-temporal stores before the completions, which may be seen by other threads.
            store.regions.fence_nontemporal();
        }
        count
    }

    fn poll(&mut self, _now: Instant, completions: &mut CompletionBatch) -> usize {
        self.ready.drain_into(completions)
    }
}

impl ChannelWakeup for RamChannel {
    fn wake_at(&self) -> Instant {
        if !self.ready.is_empty() { Instant::default() } else { Instant::NEVER }
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Deadline
    }

    fn arm(&mut self) -> bool {
        !self.ready.is_empty()
    }
}

impl RamStorage {
    fn execute(&self, request: &Request, segments: &[Segment]) -> Result<(), IoStatus> {
        let (first, count) = (request.lba, u64::from(request.blocks));
        match request.operation {
            Operation::Read => self.read(first, count, segments),
            Operation::Write => self.write(first, count, &mut SegmentCursor::new(segments)),
            // The device is volatile, as its durability states; there is nothing to flush.
            Operation::Flush => Ok(()),
            Operation::Deallocate => {
                self.written.clear(first, count);
                Ok(())
            }
            Operation::WriteZeroes => {
                self.written.clear(first, count);
                self.uncorrectable.clear(first, count);
                Ok(())
            }
            Operation::Compare => self.compare(first, count, &mut SegmentCursor::new(segments)),
            Operation::WriteUncorrectable => {
                self.uncorrectable.set(first, count);
                Ok(())
            }
            Operation::Verify => self.check_readable(first, count),
            Operation::Copy => self.copy(request.operand, first, count),
            Operation::CompareAndWrite => self.compare_and_write(first, count, segments),
        }
    }

    /// Completes a read without a copy, if its blocks are all written and readable.
    #[cold]
    #[inline(never)]
    fn complete_in_place(
        &self,
        limits: &Limits,
        request: &Request,
        segments: &[Segment],
    ) -> Option<IoCompletion> {
        valid_request_segments(limits, request, segments).ok()?;
        let (first, count) = (request.lba, u64::from(request.blocks));
        let is_in_place = request.operation == Operation::Read
            && !self.uncorrectable.any_set(first, count)
            && self.written.bit_run_at(first, count) == (true, count);
        let status = IoStatus::SUCCESS;
        let result = IoCompletion::IN_PLACE;
        is_in_place.then_some(IoCompletion { token: request.token, status, result })
    }

    /// Prefetches the first bytes that `request` will read, and the bitmap word of its blocks.
    #[inline]
    fn prefetch_read(&self, request: &Request) {
        self.written.prefetch(request.lba);
        if request.operation == Operation::Read {
            // A prefetch out of range has no effect; the request is rejected when it is executed.
            let offset = request.lba.wrapping_mul(self.block_size);
            self.regions.prefetch_segment(self.segment_at(offset, AHEAD_BYTES));
        }
    }

    fn check_readable(&self, first: u64, count: u64) -> Result<(), IoStatus> {
        if self.uncorrectable.any_set(first, count) {
            Err(IoStatus::UNRECOVERED_READ)
        } else {
            Ok(())
        }
    }

    fn read(&self, first: u64, count: u64, segments: &[Segment]) -> Result<(), IoStatus> {
        self.check_readable(first, count)?;
        let mut pieces = SegmentCursor::new(segments);
        self.for_each_written_run(first, count, |written, from, len_bytes| {
            pieces.take_each_piece(len_bytes, |piece, done| {
                if written {
                    self.regions.copy_segment(self.segment_at(from + done, piece.len_bytes), piece)
                } else {
                    self.regions.fill(piece, 0)
                }
            })
        })
        .map_err(|_| IoStatus::DATA_TRANSFER_ERROR)
    }

    fn write(
        &self,
        first: u64,
        count: u64,
        pieces: &mut SegmentCursor<'_>,
    ) -> Result<(), IoStatus> {
        let from = first * self.block_size;
        pieces
            .take_each_piece(count * self.block_size, |piece, done| {
                let place = self.segment_at(from + done, piece.len_bytes);
                if self.is_large {
                    self.regions.copy_nontemporal(piece, place)
                } else {
                    self.regions.copy_segment(piece, place)
                }
            })
            .map_err(|_| IoStatus::DATA_TRANSFER_ERROR)?;
        self.written.set(first, count);
        self.uncorrectable.clear(first, count);
        Ok(())
    }

    /// The expected data precedes the new data in the segments.
    fn compare_and_write(
        &self,
        first: u64,
        count: u64,
        segments: &[Segment],
    ) -> Result<(), IoStatus> {
        let mut pieces = SegmentCursor::new(segments);
        self.compare(first, count, &mut pieces)?;
        self.write(first, count, &mut pieces)
    }

    fn compare(
        &self,
        first: u64,
        count: u64,
        pieces: &mut SegmentCursor<'_>,
    ) -> Result<(), IoStatus> {
        self.check_readable(first, count)?;
        self.for_each_written_run(first, count, |written, from, len_bytes| {
            pieces.take_each_piece(len_bytes, |piece, done| {
                let equal = if written {
                    self.regions
                        .segments_equal(self.segment_at(from + done, piece.len_bytes), piece)
                } else {
                    is_zero(&self.regions, piece)
                };
                match equal {
                    Ok(true) => Ok(()),
                    Ok(false) => Err(IoStatus::COMPARE_FAILURE),
                    Err(InvalidSegment(_)) => Err(IoStatus::DATA_TRANSFER_ERROR),
                }
            })
        })
    }

    /// Copies block by block, from the end that an overlap does not overwrite first.
    fn copy(&self, source: u64, target: u64, count: u64) -> Result<(), IoStatus> {
        self.check_readable(source, count)?;
        for step in 0..count {
            let block = if source < target { count - 1 - step } else { step };
            let (from, to) = (source + block, target + block);
            if self.written.is_set(from) {
                let (from, to) = (self.block_segment(from), self.block_segment(to));
                self.regions.copy_segment(from, to).map_err(|_| IoStatus::INTERNAL_ERROR)?;
                self.written.set(target + block, 1);
            } else {
                self.written.clear(to, 1);
            }
        }
        self.uncorrectable.clear(target, count);
        Ok(())
    }

    /// Calls `each` for runs of written or unwritten blocks: with which it is, the byte offset of the run
    /// and its length.
    fn for_each_written_run<E>(
        &self,
        first: u64,
        count: u64,
        mut each: impl FnMut(bool, u64, u64) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut done = 0;
        while done < count {
            let (written, run) = self.written.bit_run_at(first + done, count - done);
            each(written, (first + done) * self.block_size, run * self.block_size)?;
            done += run;
        }
        Ok(())
    }

    fn block_segment(&self, block: u64) -> Segment {
        // A block is at most 64 KiB.
        let len_bytes = u32::try_from(self.block_size).unwrap_or(u32::MAX);
        self.segment_at(block * self.block_size, len_bytes)
    }

    /// A segment of the storage.
    fn segment_at(&self, offset: u64, len_bytes: u32) -> Segment {
        Segment { region: self.blocks.id(), offset, len_bytes }
    }
}

/// Whether a segment contains only zeroes.
fn is_zero(regions: &RegionTable, segment: Segment) -> Result<bool, InvalidSegment> {
    let mut bytes = [0; 512];
    let mut pieces = SegmentCursor::new(std::slice::from_ref(&segment));
    while let Some(piece) = pieces.take_piece(bytes.len() as u64) {
        let bytes = &mut bytes[..piece.len_bytes as usize];
        regions.load(piece, bytes)?;
        if bytes.iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use tenmil_base::{
        BlockDevice, BlockExtent, CompletionBatch, ErrorCategory, ExtentKind, Instant,
        IoCompletion, IoStatus, Memory, Operation, Request, RequestFlags, Segment,
    };
    use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};
    use tenmil_linux::NamedThread;

    use super::RamDevice;

    #[test]
    fn filled_ram_device_has_all_blocks_mapped() {
        let regions = RegionTable::new(2);
        let ram = RamDevice::new(&regions, 512, 1000).unwrap();
        assert_eq!(ram.block_status(0), Ok(BlockExtent { blocks: 1000, kind: ExtentKind::Hole }));
        let ram = ram.new_filled();
        assert_eq!(ram.block_status(0), Ok(BlockExtent { blocks: 1000, kind: ExtentKind::Data }));
    }

    /// Writes every block of its share repeatedly, with the round in every byte, and reads each back at
    /// once. Returns the number of mismatches.
    fn count_write_read_mismatches(
        ram: &RamDevice,
        regions: &RegionTable,
        memory: Segment,
        first: u64,
    ) -> usize {
        let mut channel = ram.channel().unwrap();
        let mut completions = CompletionBatch::with_capacity(4);
        let (out, back) = (memory.slice(0, 512).unwrap(), memory.slice(512, 512).unwrap());
        let request = |operation, lba, segment_first| Request {
            token: 0,
            lba,
            operand: 0,
            blocks: 1,
            segment_first,
            segment_count: u16::from(operation != Operation::Deallocate),
            metadata_count: 0,
            operation,
            flags: RequestFlags::NONE,
        };
        let mut wrong = 0;
        for round in 1..=200_u8 {
            // Every second block, so that two threads share each bitmap word.
            for lba in (first..128).step_by(2) {
                regions.fill(out, round).unwrap();
                let batch = [
                    request(Operation::Deallocate, lba, 0),
                    request(Operation::Write, lba, 0),
                    request(Operation::Read, lba, 1),
                ];
                assert_eq!(channel.submit(Instant::default(), &batch, &[out, back]), 3);
                assert_eq!(channel.poll(Instant::default(), &mut completions), 3);
                let done =
                    completions.drain().all(|completion| completion.status == IoStatus::SUCCESS);
                let same = regions.segments_equal(out, back).unwrap();
                wrong += usize::from(!done || !same);
            }
        }
        wrong
    }

    #[test]
    fn channels_on_two_threads_do_not_interfere() {
        let regions = RegionTable::new(3);
        let ram = RamDevice::new(&regions, 512, 128).unwrap();
        let threads = [0, 1].map(|first| {
            let memory = regions
                .add_mapping(MemoryMapping::new(1024, MemoryBacking::Private).unwrap())
                .unwrap();
            let (ram, regions) = (ram.clone(), regions.clone());
            NamedThread::spawn("hammer", None, move |_| {
                count_write_read_mismatches(&ram, &regions, memory, first)
            })
            .unwrap()
        });
        assert_eq!(threads.map(NamedThread::join), [0, 0]);
    }

    #[test]
    fn unwritten_ram_blocks_are_holes() {
        let regions = RegionTable::new(2);
        let ram = RamDevice::new(&regions, 512, 200).unwrap();
        let memory =
            regions.add_mapping(MemoryMapping::new(4096, MemoryBacking::Private).unwrap()).unwrap();
        let request = |operation, lba| Request {
            token: 0,
            lba,
            operand: 0,
            segment_first: 0,
            blocks: 8,
            segment_count: u16::from(operation == Operation::Write),
            metadata_count: 0,
            operation,
            flags: RequestFlags::NONE,
        };
        let mut channel = ram.channel().unwrap();
        let batch = [request(Operation::Write, 60), request(Operation::Deallocate, 66)];
        assert_eq!(channel.submit(Instant::default(), &batch, &[memory]), 2);
        let extent = |blocks, holds| Ok(BlockExtent { blocks, kind: holds });
        assert_eq!(ram.block_status(0), extent(60, ExtentKind::Hole));
        assert_eq!(ram.block_status(61), extent(5, ExtentKind::Data));
        assert_eq!(ram.block_status(66), extent(134, ExtentKind::Hole));
        assert_eq!(ram.block_status(200), extent(0, ExtentKind::Hole), "past the end");
    }

    #[test]
    fn flagged_read_of_written_blocks_leaves_its_data_in_the_medium() {
        let regions = RegionTable::new(2);
        let ram = RamDevice::new(&regions, 512, 200).unwrap();
        let memory =
            regions.add_mapping(MemoryMapping::new(4096, MemoryBacking::Private).unwrap()).unwrap();
        let mut channel = ram.channel().unwrap();
        let mut run = |operation, lba, flags| {
            let moves = matches!(operation, Operation::Read | Operation::Write);
            let request = Request {
                lba,
                blocks: 8,
                segment_count: u16::from(moves),
                operation,
                flags,
                ..Request::PLACEHOLDER
            };
            let mut completions = CompletionBatch::with_capacity(1);
            assert_eq!(channel.submit(Instant::default(), &[request], &[memory]), 1);
            channel.poll(Instant::default(), &mut completions);
            let IoCompletion { status, result, .. } = completions.as_slice()[0];
            (status, result)
        };
        let (plain, flagged) = (RequestFlags::NONE, RequestFlags::IN_PLACE);
        regions.fill(memory, 7).unwrap();
        assert_eq!(run(Operation::Write, 60, flagged), (IoStatus::SUCCESS, 0), "no read");
        let medium = ram.medium_memory().unwrap();
        let place = medium.at_byte(60 * 512);
        let mut bytes = vec![0; 4096];
        let in_medium = Segment { region: place.region, offset: place.offset, len_bytes: 4096 };
        regions.load(in_medium, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 4096]);

        let mut read = |lba, flags| {
            regions.fill(memory, 1).unwrap();
            let (status, result) = run(Operation::Read, lba, flags);
            regions.load(memory, &mut bytes).unwrap();
            (status, result, [bytes[0], bytes[4095]])
        };
        assert_eq!(read(60, flagged), (IoStatus::SUCCESS, IoCompletion::IN_PLACE, [1, 1]));
        assert_eq!(read(60, plain), (IoStatus::SUCCESS, 0, [7, 7]));
        assert_eq!(read(56, flagged), (IoStatus::SUCCESS, 0, [0, 7]), "partly written");
        assert_eq!(read(64, flagged), (IoStatus::SUCCESS, 0, [7, 0]));
        assert_eq!(read(0, flagged), (IoStatus::SUCCESS, 0, [0, 0]), "unwritten");
        assert_eq!(read(193, flagged).0, IoStatus::LBA_OUT_OF_RANGE);
        assert_eq!(run(Operation::WriteUncorrectable, 67, plain), (IoStatus::SUCCESS, 0));
        let mut status = |lba| run(Operation::Read, lba, flagged);
        assert_eq!(status(60), (IoStatus::UNRECOVERED_READ, 0));
        assert_eq!(run(Operation::Deallocate, 60, plain), (IoStatus::SUCCESS, 0));
        assert_eq!(run(Operation::Write, 67, plain), (IoStatus::SUCCESS, 0));
        assert_eq!(run(Operation::Read, 60, flagged), (IoStatus::SUCCESS, 0), "deallocated");

        drop((ram, channel));
        assert!(regions.contains(in_medium), "the guard keeps it");
        drop((medium, place));
        assert!(!regions.contains(in_medium));
    }

    #[test]
    fn non_temporal_writes_are_visible_in_the_same_batch() {
        let regions = RegionTable::new(4);
        let ram = RamDevice::new(&regions, 512, 96 << 11).unwrap();
        let memory = regions
            .add_mapping(MemoryMapping::new(3 * 4096, MemoryBacking::Private).unwrap())
            .unwrap();
        let [out, back, again] = [0, 1, 2].map(|page| memory.slice(page * 4096, 4096).unwrap());
        let bytes: Vec<u8> = (0..4096_u32).map(|byte| (byte % 249) as u8).collect();
        regions.store(out, &bytes).unwrap();
        let request = |operation, segment_first| Request {
            token: 0,
            lba: 100_000,
            operand: 0,
            segment_first,
            blocks: 8,
            segment_count: 1,
            metadata_count: 0,
            operation,
            flags: RequestFlags::NONE,
        };
        let mut channel = ram.channel().unwrap();
        let batch = [request(Operation::Write, 0), request(Operation::Read, 1)];
        assert_eq!(channel.submit(Instant::default(), &batch, &[out, back]), 2);
        let mut found = vec![0; 4096];
        regions.load(back, &mut found).unwrap();
        assert_eq!(found, bytes);
        let (ram, table) = (ram.clone(), regions.clone());
        let other = NamedThread::spawn("reader", None, move |_| {
            let mut channel = ram.channel().unwrap();
            channel.submit(Instant::default(), &[request(Operation::Read, 0)], &[again]);
            let mut found = vec![0; 4096];
            table.load(again, &mut found).unwrap();
            found
        });
        assert_eq!(other.unwrap().join(), bytes);
    }

    #[test]
    fn invalid_ram_block_size_is_rejected() {
        let regions = RegionTable::new(1);
        for (block_size, block_count) in [(0, 1), (100, 1), (256, 1), (1 << 17, 1), (512, 0)] {
            let error = RamDevice::new(&regions, block_size, block_count).unwrap_err();
            assert_eq!(error.category(), ErrorCategory::Usage, "{error}");
        }
        assert_eq!(
            RamDevice::new(&regions, 512, u64::MAX).unwrap_err().category(),
            ErrorCategory::Usage
        );
        let huge = RamDevice::new(&regions, 512, 1 << 52).unwrap_err();
        assert_eq!(huge.category(), ErrorCategory::Environment, "{huge}");
    }
}
