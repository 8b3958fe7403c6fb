//! Blocks of a volume, read and written by a caller who waits: for streams, and whoever else goes
//! through a volume from its beginning to its end. Nothing here is on the way of an I/O.

use std::sync::Arc;

use base::{Answers, Backend, Blame, Flags, Medium, Memory, Operation, Outcome, Request, Span};
use dma::{Region, Regions};
use host::Clock;
use volume::VolumeInfo;

use super::outside::Outside;
use super::{OpenStore, PAGE_BYTES, Volume};
use crate::MediumError;

/// A channel to a volume, and memory for what it carries.
pub(super) struct Carrier {
    backend: Box<dyn Backend>,
    /// What the channel is of; it goes after the channel.
    _volume: Volume,
    regions: Regions,
    memory: Region,
    name: String,
    clock: Clock,
    blocks_max: u32,
}

/// Blocks that are carried at once at most.
pub(super) const CARRY_MAX: u32 = 256;
/// How often it looks for an answer before it leaves the processor to others between two looks.
const LOOKS_MAX: u32 = 200;
const LOOK_AGAIN: Span = Span::from_us(50);
/// How long a volume may take for one request.
const PATIENCE: Span = Span::from_secs(120);

impl Carrier {
    /// One for a volume of an open store; without its parent, what is the parent's cannot be read.
    pub(super) fn open(
        open: &Arc<OpenStore>,
        info: &VolumeInfo,
        parent: Option<Outside>,
    ) -> Result<Self, MediumError> {
        let name = format!("{}: volume `{}`", open.name, info.name);
        let machine =
            |problem: String| MediumError::new(Blame::Machine, format!("{name}: {problem}"));
        let volume = Volume::open(open, info, parent).map_err(machine)?;
        let blocks_max = volume.limits.request_blocks_max.min(CARRY_MAX);
        let memory = open.regions.allocate((blocks_max * PAGE_BYTES) as usize);
        let memory = memory.map_err(|error| machine(error.to_string()))?;
        let backend = volume.channel().map_err(machine)?;
        let (regions, clock) = (open.regions.clone(), open.clock);
        Ok(Self { backend, _volume: volume, regions, memory, name, clock, blocks_max })
    }

    /// How many blocks it carries at once.
    pub(super) const fn blocks_max(&self) -> u32 {
        self.blocks_max
    }

    /// Reads blocks, as many as there is room for in `bytes`.
    pub(super) fn read(&mut self, block: u64, bytes: &mut [u8]) -> Result<(), MediumError> {
        self.run(Operation::Read, block, blocks_in(bytes))?;
        let memory = self.memory.segment().slice(0, len_of(bytes)).unwrap_or_default();
        self.regions.load(memory, bytes).map_err(|_| self.lost())
    }

    /// Looks whether blocks can be read, as many as it carries at once, and have their checksums.
    pub(super) fn verify(&mut self, block: u64, blocks: u32) -> Result<(), Outcome> {
        match self.outcome(Operation::Read, block, blocks) {
            Outcome::SUCCESS => Ok(()),
            outcome => Err(outcome),
        }
    }

    /// Writes blocks.
    pub(super) fn write(&mut self, block: u64, bytes: &[u8]) -> Result<(), MediumError> {
        for (index, bytes) in (0..).zip(bytes.chunks((self.blocks_max * PAGE_BYTES) as usize)) {
            let memory = self.memory.segment().slice(0, len_of(bytes)).unwrap_or_default();
            self.regions.store(memory, bytes).map_err(|_| self.lost())?;
            let first = block + index * u64::from(self.blocks_max);
            self.run(Operation::Write, first, blocks_in(bytes))?;
        }
        Ok(())
    }

    /// Makes blocks read as zeroes and take no room.
    pub(super) fn trim(&mut self, block: u64, blocks: u64) -> Result<(), MediumError> {
        let mut at = block;
        while at < block + blocks {
            let count = u32::try_from(block + blocks - at).unwrap_or(u32::MAX).min(TRIM_MAX);
            self.run(Operation::Deallocate, at, count)?;
            at += u64::from(count);
        }
        Ok(())
    }

    fn run(&mut self, operation: Operation, lba: u64, blocks: u32) -> Result<(), MediumError> {
        let outcome = self.outcome(operation, lba, blocks);
        self.judge(operation, lba, blocks, outcome)
    }

    /// What comes of a request.
    fn outcome(&mut self, operation: Operation, lba: u64, blocks: u32) -> Outcome {
        let moves = operation != Operation::Deallocate;
        let len = if moves { blocks * PAGE_BYTES } else { 0 };
        let segment = self.memory.segment().slice(0, len).unwrap_or_default();
        let request = Request {
            lba,
            blocks,
            segment_count: u16::from(moves),
            operation,
            flags: Flags::NONE,
            ..Request::NOTHING
        };
        let until = self.clock.now().after(PATIENCE);
        let (mut answers, mut taken) = (Answers::with_capacity(1), false);
        for look in 0_u32.. {
            let now = self.clock.now();
            taken = taken || self.backend.submit(now, &[request], &[segment]) == 1;
            self.backend.flush();
            self.backend.poll(now, &mut answers);
            if let [answer] = answers.as_slice() {
                return answer.outcome;
            }
            if now > until {
                return Outcome::ABORTED;
            }
            match look {
                0..LOOKS_MAX => host::thread::give_way(),
                _ => host::thread::rest(LOOK_AGAIN),
            }
        }
        Outcome::ABORTED
    }

    fn judge(
        &self,
        operation: Operation,
        lba: u64,
        blocks: u32,
        outcome: Outcome,
    ) -> Result<(), MediumError> {
        if outcome.is_success() {
            return Ok(());
        }
        let doing =
            format!("{}: {} {blocks} blocks from block {lba} on", self.name, operation.name());
        Err(match outcome {
            Outcome::CAPACITY_EXCEEDED => {
                MediumError::new(Blame::Machine, format!("{doing}: the store has no room for them"))
                    .with_hint("Delete volumes or trim them, or grow it, and do it again.")
            }
            outcome => MediumError::new(
                Blame::Peer,
                format!("{doing}: status {:#x}, expected 0", outcome.0),
            ),
        })
    }

    fn lost(&self) -> MediumError {
        MediumError::new(Blame::Machine, format!("{}: memory for its blocks is gone", self.name))
    }
}

/// Blocks in one trim.
const TRIM_MAX: u32 = 1 << 16;

fn len_of(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX)
}

fn blocks_in(bytes: &[u8]) -> u32 {
    len_of(bytes) / PAGE_BYTES
}
