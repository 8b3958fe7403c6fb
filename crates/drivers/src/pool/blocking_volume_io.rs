//! Blocking volume I/O for streams and other sequential work. Not on the I/O path.

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, CompletionBatch, ErrorCategory, IoChannel, IoStatus, Memory, Operation, Request,
    RequestFlags, Span,
};
use tenmil_dma::{Region, RegionTable};
use tenmil_linux::Clock;
use tenmil_volume::VolumeInfo;

use super::parent_image::ParentImage;
use super::{OpenPool, PAGE_BYTES, VolumeDevice};
use tenmil_base::Error;

/// An I/O channel to a volume, and memory for its data.
pub(super) struct BlockingVolumeIo {
    backend: Box<dyn IoChannel>,
    /// The volume of the channel; dropped after it.
    _volume: VolumeDevice,
    regions: RegionTable,
    memory: Region,
    name: String,
    clock: Clock,
    blocks_max: u32,
}

/// Maximum number of blocks in one transfer.
pub(super) const CARRY_MAX: u32 = 256;
/// Polls that yield the CPU before polls are spaced by [`RETRY_INTERVAL`].
const POLLS_MAX: u32 = 200;
const RETRY_INTERVAL: Span = Span::from_us(50);
/// Maximum time of one request.
const TIME_LIMIT: Span = Span::from_secs(120);

impl BlockingVolumeIo {
    /// Opens a volume of an open pool. Without its parent, blocks of the parent cannot be read.
    pub(super) fn open(
        open: &Arc<OpenPool>,
        info: &VolumeInfo,
        parent: Option<ParentImage>,
    ) -> Result<Self, Error> {
        let name = format!("{}: volume `{}`", open.name, info.name);
        let machine =
            |problem: Error| Error::new(ErrorCategory::Environment, format!("{name}: {problem}"));
        let volume = VolumeDevice::open(open, info, parent).map_err(machine)?;
        let blocks_max = volume.limits.request_blocks_max.min(CARRY_MAX);
        let memory = open.regions.allocate_region((blocks_max * PAGE_BYTES) as usize);
        let memory = memory.map_err(|error| machine(Error::environment(error)))?;
        let backend = volume.channel().map_err(machine)?;
        let (regions, clock) = (open.regions.clone(), open.clock);
        Ok(Self { backend, _volume: volume, regions, memory, name, clock, blocks_max })
    }

    /// Maximum number of blocks in one transfer.
    pub(super) const fn blocks_max(&self) -> u32 {
        self.blocks_max
    }

    /// Reads as many blocks as `bytes` holds.
    pub(super) fn read(&mut self, block: u64, bytes: &mut [u8]) -> Result<(), Error> {
        self.run_request(Operation::Read, block, block_count(bytes))?;
        let memory = self.memory.segment().slice(0, byte_count(bytes)).unwrap_or_default();
        self.regions.load(memory, bytes).map_err(|_| self.freed_memory_error())
    }

    /// Reads blocks, at most [`blocks_max`](Self::blocks_max), to verify that they are readable and match
    /// their checksums.
    pub(super) fn verify(&mut self, block: u64, blocks: u32) -> Result<(), IoStatus> {
        match self.run_for_status(Operation::Read, block, blocks) {
            IoStatus::SUCCESS => Ok(()),
            status => Err(status),
        }
    }

    /// Writes blocks.
    pub(super) fn write(&mut self, block: u64, bytes: &[u8]) -> Result<(), Error> {
        for (index, bytes) in (0..).zip(bytes.chunks((self.blocks_max * PAGE_BYTES) as usize)) {
            let memory = self.memory.segment().slice(0, byte_count(bytes)).unwrap_or_default();
            self.regions.store(memory, bytes).map_err(|_| self.freed_memory_error())?;
            let first = block + index * u64::from(self.blocks_max);
            self.run_request(Operation::Write, first, block_count(bytes))?;
        }
        Ok(())
    }

    /// Deallocates blocks: they read as zeroes and use no space.
    pub(super) fn deallocate(&mut self, block: u64, blocks: u64) -> Result<(), Error> {
        let mut at = block;
        while at < block + blocks {
            let count = u32::try_from(block + blocks - at).unwrap_or(u32::MAX).min(TRIM_MAX);
            self.run_request(Operation::Deallocate, at, count)?;
            at += u64::from(count);
        }
        Ok(())
    }

    fn run_request(&mut self, operation: Operation, lba: u64, blocks: u32) -> Result<(), Error> {
        let status = self.run_for_status(operation, lba, blocks);
        self.check_status(operation, lba, blocks, status)
    }

    /// Executes a request, and returns its status.
    fn run_for_status(&mut self, operation: Operation, lba: u64, blocks: u32) -> IoStatus {
        let moves = operation != Operation::Deallocate;
        let len = if moves { blocks * PAGE_BYTES } else { 0 };
        let segment = self.memory.segment().slice(0, len).unwrap_or_default();
        let request = Request {
            lba,
            blocks,
            segment_count: u16::from(moves),
            operation,
            flags: RequestFlags::NONE,
            ..Request::PLACEHOLDER
        };
        let until = self.clock.now().after(TIME_LIMIT);
        let (mut completions, mut taken) = (CompletionBatch::with_capacity(1), false);
        for look in 0_u32.. {
            let now = self.clock.now();
            taken = taken || self.backend.submit(now, &[request], &[segment]) == 1;
            self.backend.flush_submissions();
            self.backend.poll(now, &mut completions);
            if let [completion] = completions.as_slice() {
                return completion.status;
            }
            if now > until {
                return IoStatus::ABORTED;
            }
            match look {
                0..POLLS_MAX => tenmil_linux::named_thread::yield_cpu(),
                _ => tenmil_linux::named_thread::sleep(RETRY_INTERVAL),
            }
        }
        IoStatus::ABORTED
    }

    fn check_status(
        &self,
        operation: Operation,
        lba: u64,
        blocks: u32,
        status: IoStatus,
    ) -> Result<(), Error> {
        if status.is_success() {
            return Ok(());
        }
        let doing =
            format!("{}: {} {blocks} blocks from block {lba} on", self.name, operation.name());
        Err(match status {
            IoStatus::CAPACITY_EXCEEDED => Error::new(
                ErrorCategory::Environment,
                format!("{doing}: the pool has no space for them"),
            )
            .with_hint("Delete volumes or trim them, or grow it, and do it again."),
            status => {
                Error::new(ErrorCategory::Remote, format!("{doing}: {status}, expected success"))
            }
        })
    }

    fn freed_memory_error(&self) -> Error {
        Error::new(
            ErrorCategory::Environment,
            format!("{}: memory for its blocks was freed", self.name),
        )
    }
}

/// Maximum number of blocks in one deallocate.
const TRIM_MAX: u32 = 1 << 16;

fn byte_count(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX)
}

fn block_count(bytes: &[u8]) -> u32 {
    byte_count(bytes) / PAGE_BYTES
}
