//! Request sizes and limits that suit both devices.

use tenmil_base::{Limits, Operation};

use super::CopyOptions;
use tenmil_base::Error;

/// Request sizes of a copy between two devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CopyRequestSizes {
    /// Larger of both block sizes in bytes; every request but the last is a multiple of it.
    pub(super) unit: u64,
    /// Bytes per read.
    pub(super) chunk: u64,
    /// Bytes per WriteZeroes.
    pub(super) zero_chunk: u64,
    /// Block size of the source in bytes.
    pub(super) source_block: u64,
    /// Block size of the target in bytes.
    pub(super) target_block: u64,
    /// Size of the source in bytes, where the copy ends.
    pub(super) size: u64,
    /// Whether the target supports WriteZeroes.
    pub(super) has_zeroes: bool,
    /// Whether the target supports Flush.
    pub(super) has_flush: bool,
    /// Chunks in flight.
    pub(super) depth: usize,
}

/// Maximum number of bytes per WriteZeroes.
const ZERO_BYTES_MAX: u64 = 16 << 20;

impl CopyRequestSizes {
    /// Derives the sizes from the limits of both devices; the names are for errors.
    pub(super) fn from_limits(
        (source_name, source): (&str, &Limits),
        (target_name, target): (&str, &Limits),
        options: &CopyOptions,
    ) -> Result<Self, Error> {
        let size = size_bytes(source);
        let room = size_bytes(target);
        let target_block = u64::from(target.block_size);
        // The last block is padded with zeroes, so the target needs space for the whole block.
        if room < size.next_multiple_of(target_block) {
            return Err(Error::usage(format!(
                "copy to {target_name}: it has {room} bytes, expected at least the {size} of \
                 {source_name}"
            )));
        }
        for (name, limits) in [(source_name, source), (target_name, target)] {
            if limits.metadata_size != 0 {
                let found = limits.metadata_size;
                return Err(Error::usage(format!(
                    "copy {name}: its blocks have {found} bytes of metadata, expected none"
                )));
            }
        }
        let needs =
            [(source_name, source, Operation::Read), (target_name, target, Operation::Write)];
        for (name, limits, operation) in needs {
            if !limits.operations.has(operation) {
                let operation = operation.name();
                return Err(Error::usage(format!("copy {name}: it has no {operation}")));
            }
        }
        // Requests are multiples of the larger block size, so that both devices accept their ranges.
        let unit = u64::from(source.block_size.max(target.block_size));
        let most =
            |limits: &Limits| u64::from(limits.request_blocks_max) * u64::from(limits.block_size);
        let chunk = options.request_bytes.min(most(source)).min(most(target)).min(CHUNK_MAX);
        let chunk = chunk - chunk % unit;
        if chunk == 0 {
            return Err(Error::usage(format!(
                "copy {source_name} to {target_name}: blocks have {unit} bytes, expected at most \
                 the {} that go at once",
                options.request_bytes.min(most(source)).min(most(target))
            )));
        }
        let has_zeroes = target.operations.has(Operation::WriteZeroes);
        Ok(Self {
            unit,
            chunk,
            zero_chunk: if has_zeroes { ZERO_BYTES_MAX.max(unit) } else { chunk },
            source_block: u64::from(source.block_size),
            target_block,
            size,
            has_zeroes,
            has_flush: target.operations.has(Operation::Flush),
            depth: options.depth.clamp(1, DEPTH_MAX) as usize,
        })
    }

    /// Rounds `at` down to a unit; the end of the source stays as it is.
    pub(super) const fn round_down(&self, at: u64) -> u64 {
        if at >= self.size { self.size } else { at - at % self.unit }
    }

    /// Rounds `at` up to a unit, at most to the end of the source.
    pub(super) fn round_up(&self, at: u64) -> u64 {
        at.next_multiple_of(self.unit).min(self.size)
    }

    /// Rounds a length up to whole blocks of the target.
    pub(super) const fn round_up_to_target_block(&self, len_bytes: u64) -> u64 {
        len_bytes.next_multiple_of(self.target_block)
    }
}

/// The length of a chunk is a 32-bit number.
const CHUNK_MAX: u64 = 1 << 30;
const DEPTH_MAX: u32 = 1024;

/// Size of a device in bytes.
pub(super) fn size_bytes(limits: &Limits) -> u64 {
    limits.block_count.saturating_mul(u64::from(limits.block_size))
}
