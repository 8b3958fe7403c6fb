//! A block device of your own: a read-only disk whose blocks contain their own number. The
//! implementations of two traits, for the device and its channels, are all that it needs: every other
//! layer works on top of them.

use std::error::Error;
use std::sync::Arc;

use tenmil::driver::{
    BlockDevice, ChannelWakeup, CompletionBatch, Durability, Instant, IoChannel, IoCompletion,
    IoStatus, Limits, Memory, Operation, OperationSet, RegionTable, Request, Segment, WakeSource,
};
use tenmil::{Access, Export, Runtime};

const BLOCK: u32 = 512;
const DEPTH: u32 = 64;

/// Disk whose blocks contain their number.
struct NumberedDisk {
    /// Memory of the requests.
    regions: RegionTable,
    limits: Limits,
}

/// Channel of one thread to the disk.
struct NumberedDiskChannel {
    regions: RegionTable,
    limits: Limits,
    /// Completions that have not been polled yet.
    ready: Vec<IoCompletion>,
}

impl NumberedDisk {
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
            operations: OperationSet::from_operations(&[Operation::Read, Operation::Flush]),
        };
        Self { regions, limits }
    }
}

impl BlockDevice for NumberedDisk {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, tenmil::Error> {
        Ok(Box::new(NumberedDiskChannel {
            regions: self.regions.clone(),
            limits: self.limits.clone(),
            ready: Vec::with_capacity(DEPTH as usize),
        }))
    }
}

impl NumberedDiskChannel {
    /// Executes a request. A request outside the limits completes with an error status.
    fn execute_request(&self, request: &Request, segments: &[Segment]) -> IoStatus {
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

impl IoChannel for NumberedDiskChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, _: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let taken = requests.len().min(DEPTH as usize - self.ready.len());
        for request in &requests[..taken] {
            let status = self.execute_request(request, segments);
            self.ready.push(IoCompletion { token: request.token, status, result: 0 });
        }
        taken
    }

    fn poll(&mut self, _: Instant, completions: &mut CompletionBatch) -> usize {
        let count = completions.remaining().min(self.ready.len());
        self.ready.drain(..count).for_each(|completion| completions.push(completion));
        count
    }
}

impl ChannelWakeup for NumberedDiskChannel {
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
    let rt = Runtime::new()?;
    let numbers = NumberedDisk::new(rt.regions().clone(), 1_000_000);
    let device = rt.block_on(rt.attach("numbers", Arc::new(numbers), Access::ReadOnly))?;
    let buffer = rt.block_on(device.read(4711, device.buffer(2 * BLOCK)?))?;
    let mut number = [0; 8];
    buffer.load(BLOCK, &mut number);
    assert_eq!(u64::from_le_bytes(number), 4712);

    let refused = rt.block_on(device.write(0, buffer)).expect_err("it cannot be written");
    println!("block 4712 contains its number; a write: {refused}");

    // It is served like any other device.
    let server = rt.block_on(rt.serve(Export::nvme_tcp("127.0.0.1:0").namespace(device)))?;
    let host = rt.block_on(rt.open(&server.uris()[0], Access::ReadOnly))?;
    let buffer = rt.block_on(host.read(815, host.buffer(BLOCK)?))?;
    buffer.load(0, &mut number);
    assert_eq!(u64::from_le_bytes(number), 815);
    Ok(())
}
