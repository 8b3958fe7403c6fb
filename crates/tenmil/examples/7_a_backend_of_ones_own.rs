//! A backend of one's own: a disk whose every block holds its own number, and that cannot be written.
//! What is under [`Numbers`] is all that a device has to be; everything else that the project has
//! stands on that.

use std::error::Error;

use base::{
    Answer, Answers, Backend, Durability, Instant, Limits, Memory, Operation, Outcome, Request,
    Segment, Support, WakeSource,
};
use dma::{CommandStore, DeviceKind, DevicePool, Regions};
use host::{Clock, Cores};
use reactor::{ReactorOptions, Reactors, ThreadPlan};
use tenmil::aio::{Buffers, Device};

const BLOCK: u32 = 512;
const DEPTH: u32 = 64;

/// Blocks that are numbers.
struct Numbers {
    regions: Regions,
    limits: Limits,
    /// What has been answered, and not yet been asked for.
    ready: Vec<Answer>,
}

impl Numbers {
    fn new(regions: Regions, block_count: u64) -> Self {
        let limits = Limits {
            block_size: BLOCK,
            metadata_size: 0,
            block_count,
            request_blocks_max: 256,
            segments_max: 1,
            optimal_boundary_blocks: 0,
            atomic_write_blocks: 1,
            depth_max: DEPTH,
            durability: Durability::Stable,
            support: Support::of(&[Operation::Read, Operation::Flush]),
        };
        Self { regions, limits, ready: Vec::with_capacity(DEPTH as usize) }
    }

    /// Does what is asked. Whoever calls has kept to the limits, or learns that it has not.
    fn answer(&self, request: &Request, segments: &[Segment]) -> Outcome {
        let blocks = request.lba..request.lba.saturating_add(request.blocks.into());
        match request.operation {
            Operation::Flush => return Outcome::SUCCESS,
            Operation::Read if blocks.end <= self.limits.block_count => {}
            Operation::Read => return Outcome::LBA_OUT_OF_RANGE,
            _ => return Outcome::INVALID_OPCODE,
        }
        // Numbers that come from elsewhere are looked at before they are used.
        let Some(into) = segments.get(request.segment_first as usize) else {
            return Outcome::DATA_TRANSFER_ERROR;
        };
        for (skip, number) in (0..).step_by(BLOCK as usize).zip(blocks) {
            let mut block = [0; BLOCK as usize];
            block[..8].copy_from_slice(&number.to_le_bytes());
            let part = into.slice(skip, BLOCK);
            if part.is_none_or(|part| self.regions.store(part, &block).is_err()) {
                return Outcome::DATA_TRANSFER_ERROR;
            }
        }
        Outcome::SUCCESS
    }
}

impl Backend for Numbers {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, _: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let taken = requests.len().min(DEPTH as usize - self.ready.len());
        for request in &requests[..taken] {
            let outcome = self.answer(request, segments);
            self.ready.push(Answer { token: request.token, outcome, result: 0 });
        }
        taken
    }

    fn poll(&mut self, _: Instant, answers: &mut Answers) -> usize {
        let count = answers.room().min(self.ready.len());
        self.ready.drain(..count).for_each(|answer| answers.push(answer));
        count
    }

    // Three lines by which its thread may sleep: nothing from outside ever wakes this device.
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
    let reactors = Reactors::start(&Cores::allowed(), &ReactorOptions::default(), &clock)?;
    let storage = reactors.spawn(ThreadPlan::new("storage"))?;
    let regions = Regions::new(16);
    let memory = regions.allocate(1 << 20)?;
    let (kind, store) = (DeviceKind::Emulated, CommandStore::Plain);
    let pool = DevicePool::new(regions.clone(), memory.segment(), kind, store);

    let numbers = Box::new(Numbers::new(regions, 1_000_000));
    let device = Device::on(&storage, "numbers", numbers, &Buffers::new(pool))?;
    let buffer = device.buffer(2 * BLOCK).ok_or("no memory for a buffer")?;
    let buffer = smol::block_on(device.read(4711, buffer))?;
    let mut number = [0; 8];
    buffer.load(BLOCK, &mut number);
    assert_eq!(u64::from_le_bytes(number), 4712);

    let refused = smol::block_on(device.write(0, buffer)).expect_err("it cannot be written");
    println!("block 4712 says so; a write: {refused}");
    Ok(())
}
