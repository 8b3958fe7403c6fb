//! A block device of your own: a read-only disk whose blocks contain their own number. The trait
//! implementation of [`Numbers`] is all that a device needs; every other layer works on top of it.

use std::error::Error;

use tenmil::aio::{BufferPool, Device};
use tenmil_base::{
    ChannelWakeup, CompletionBatch, Durability, Instant, IoChannel, IoCompletion, IoStatus, Limits,
    Memory, Operation, OperationSet, Request, Segment, WakeSource,
};
use tenmil_dma::{CommandStore, DeviceKind, DevicePool, RegionTable};
use tenmil_linux::{Clock, CpuList};
use tenmil_reactor::{ReactorOptions, Reactors, ThreadBuilder};

const BLOCK: u32 = 512;
const DEPTH: u32 = 64;

/// Disk whose blocks contain their number.
struct Numbers {
    regions: RegionTable,
    limits: Limits,
    /// Completions that have not been polled yet.
    ready: Vec<IoCompletion>,
}

impl Numbers {
    fn new(regions: RegionTable, block_count: u64) -> Self {
        let limits = Limits {
            block_size: BLOCK,
            metadata_size: 0,
            block_count,
            request_blocks_max: 256,
            segments_max: 1,
            optimal_boundary_blocks: 0,
            atomic_write_blocks: 1,
            depth_max: DEPTH,
            durability: Durability::Persistent,
            operations: OperationSet::of(&[Operation::Read, Operation::Flush]),
        };
        Self { regions, limits, ready: Vec::with_capacity(DEPTH as usize) }
    }

    /// Executes a request. A request outside the limits completes with an error status.
    fn answer(&self, request: &Request, segments: &[Segment]) -> IoStatus {
        let blocks = request.lba..request.lba.saturating_add(request.blocks.into());
        match request.operation {
            Operation::Flush => return IoStatus::SUCCESS,
            Operation::Read if blocks.end <= self.limits.block_count => {}
            Operation::Read => return IoStatus::LBA_OUT_OF_RANGE,
            _ => return IoStatus::INVALID_OPCODE,
        }
        // The segment index comes from the caller and is checked before use.
        let Some(into) = segments.get(request.segment_first as usize) else {
            return IoStatus::DATA_TRANSFER_ERROR;
        };
        for (skip, number) in (0..).step_by(BLOCK as usize).zip(blocks) {
            let mut block = [0; BLOCK as usize];
            block[..8].copy_from_slice(&number.to_le_bytes());
            let part = into.slice(skip, BLOCK);
            if part.is_none_or(|part| self.regions.store(part, &block).is_err()) {
                return IoStatus::DATA_TRANSFER_ERROR;
            }
        }
        IoStatus::SUCCESS
    }
}

impl IoChannel for Numbers {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, _: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let taken = requests.len().min(DEPTH as usize - self.ready.len());
        for request in &requests[..taken] {
            let outcome = self.answer(request, segments);
            self.ready.push(IoCompletion { token: request.token, status: outcome, result: 0 });
        }
        taken
    }

    fn poll(&mut self, _: Instant, answers: &mut CompletionBatch) -> usize {
        let count = answers.remaining().min(self.ready.len());
        self.ready.drain(..count).for_each(|answer| answers.push(answer));
        count
    }
}

impl ChannelWakeup for Numbers {
    // These three functions let the thread sleep: no external event ever wakes this device.
    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Deadline
    }

    fn wake_at(&self) -> Instant {
        if self.ready.is_empty() { Instant::NEVER } else { Instant::default() }
    }

    fn arm(&mut self) -> bool {
        !self.ready.is_empty()
    }
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let clock = Clock::start();
    let reactors = Reactors::start(&CpuList::allowed(), &ReactorOptions::default(), &clock)?;
    let storage = reactors.spawn(ThreadBuilder::new("storage"))?;
    let regions = RegionTable::new(16);
    let memory = regions.allocate(1 << 20)?;
    let (kind, store) = (DeviceKind::Emulated, CommandStore::Plain);
    let pool = DevicePool::new(regions.clone(), memory.segment(), kind, store);

    let numbers = Box::new(Numbers::new(regions, 1_000_000));
    let device = Device::on(&storage, "numbers", numbers, &BufferPool::new(pool))?;
    let buffer = device.buffer(2 * BLOCK).ok_or("no memory for a buffer")?;
    let buffer = smol::block_on(device.read(4711, buffer))?;
    let mut number = [0; 8];
    buffer.load(BLOCK, &mut number);
    assert_eq!(u64::from_le_bytes(number), 4712);

    let refused = smol::block_on(device.write(0, buffer)).expect_err("it cannot be written");
    println!("block 4712 says so; a write: {refused}");
    Ok(())
}
