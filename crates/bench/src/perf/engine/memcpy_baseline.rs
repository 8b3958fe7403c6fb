//! Memory copy micro-benchmark: upper bound of a load over RAM.
//!
//! It draws the same addresses in a mapping as large as all devices together, uses the same number
//! of buffers, and copies in the fastest known way: the next block is prefetched while the current
//! one is read, and stores bypass the cache. It is measured in the same run as the load, because on
//! a shared machine the bound varies.

use tenmil_base::{Memory, Operation, Segment, Span};
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};
use tenmil_linux::{Clock, NamedThread};

use super::cpu_placement::CoreAssignment;
use crate::perf::perf_options::PerfOptions;
use crate::perf::perf_result::{Baseline, BaselineResult, DeviceResult, per_second};
use crate::perf::workload::{AddressStream, BlockRange, IoSpec, Workload};
use tenmil_base::Error;

/// Source and destination of the copies.
struct CopyBuffers {
    regions: RegionTable,
    /// Start of the data; its length is not used.
    blocks: Segment,
    buffers: Segment,
    block_size: u32,
    len_bytes: u32,
    depth: u32,
}

/// Bytes of the next block that are prefetched.
const AHEAD_BYTES: u32 = 1024;

/// Measures on one thread, over memory of the total size of `devices`.
pub(super) fn measure_memcpy(
    options: &PerfOptions,
    devices: &[DeviceResult],
    places: &CoreAssignment,
    clock: Clock,
    time: Span,
) -> Result<BaselineResult, Error> {
    let store = CopyBuffers::new(options, devices)?;
    let mut workload = Workload::new(options, options.seed);
    let size_bytes: u64 = devices.iter().map(|device| device.size_bytes).sum();
    let range = BlockRange { first: 0, count: size_bytes / u64::from(store.block_size) };
    let mut queue = workload.new_address_stream(range, store.block_size);
    let depth = store.depth;
    let thread = NamedThread::spawn("bare-copy", places.submit[0], move |_| {
        let begin = clock.now();
        let (mut copies, mut now) = (0_u64, begin);
        while now.since(begin) < time {
            copies += store.copy_batch(&mut workload, &mut queue);
            now = clock.now();
        }
        (copies, now.since(begin))
    });
    let thread = thread.map_err(|error| memcpy_error(&error))?;
    let (copies, elapsed) = thread.join();
    let iops = per_second(copies, elapsed);
    Ok(BaselineResult { limit: Baseline::Copies, iops, elapsed, rings: 0, depth, round_trip: None })
}

fn memcpy_error(error: &dyn std::fmt::Display) -> Error {
    Error::environment(format!("measure the bare copy loop: {error}"))
}

impl CopyBuffers {
    fn new(options: &PerfOptions, devices: &[DeviceResult]) -> Result<Self, Error> {
        let regions = RegionTable::new(2);
        let add = |len_bytes: u64| {
            let len = usize::try_from(len_bytes).map_err(|error| memcpy_error(&error))?;
            let mapping = MemoryMapping::new(len, MemoryBacking::Private)
                .map_err(|error| memcpy_error(&error))?;
            mapping.populate();
            regions.add_mapping(mapping).map_err(|error| memcpy_error(&error))
        };
        let block_size = devices.first().map_or(512, |device| device.block_size);
        let (len_bytes, depth) = (options.sizes.largest_bytes(), options.depth);
        let blocks = add(devices.iter().map(|device| device.size_bytes).sum())?;
        let buffers = add(u64::from(len_bytes) * u64::from(depth))?;
        let store = Self { regions, blocks, buffers, block_size, len_bytes, depth };
        // Untouched pages all map the zero page and would be read from the cache, so every page is
        // written first.
        let total: u64 = devices.iter().map(|device| device.size_bytes).sum();
        for offset in (0..total).step_by(1 << 20) {
            let len_bytes = u32::try_from((total - offset).min(1 << 20)).unwrap_or(u32::MAX);
            let part = Segment { offset: blocks.offset + offset, len_bytes, ..blocks };
            store.regions.fill(part, 0x5a).map_err(|stray| memcpy_error(&format!("{stray:?}")))?;
        }
        Ok(store)
    }

    /// Performs one copy per buffer.
    fn copy_batch(&self, workload: &mut Workload, queue: &mut AddressStream) -> u64 {
        let mut draw = workload.draw_io(queue);
        for buffer in 0..self.depth {
            let next = workload.draw_io(queue);
            if next.operation == Operation::Read {
                self.regions
                    .prefetch_segment(self.block_segment(&next, AHEAD_BYTES.min(next.len_bytes)));
            }
            self.copy_io(&draw, buffer);
            draw = next;
        }
        self.regions.fence_nontemporal();
        u64::from(self.depth)
    }

    fn copy_io(&self, draw: &IoSpec, buffer: u32) {
        let offset = self.buffers.offset + u64::from(buffer) * u64::from(self.len_bytes);
        let buffer = Segment { offset, len_bytes: draw.len_bytes, ..self.buffers };
        let place = self.block_segment(draw, draw.len_bytes);
        let copied = match draw.operation {
            Operation::Read => self.regions.copy_segment(place, buffer),
            _ => self.regions.copy_nontemporal(buffer, place),
        };
        assert_eq!(copied, Ok(()), "a workload stays inside its range");
    }

    fn block_segment(&self, draw: &IoSpec, len_bytes: u32) -> Segment {
        let offset = self.blocks.offset + draw.lba * u64::from(self.block_size);
        Segment { offset, len_bytes, ..self.blocks }
    }
}
