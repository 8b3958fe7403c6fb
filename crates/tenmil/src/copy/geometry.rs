//! What fits both sides: how much goes at once, and where the end is.

use base::{Limits, Operation};

use super::CopyOptions;
use crate::Refused;

/// How a copy between two devices is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    /// Bytes in the larger of the two blocks: what everything but the end is a multiple of.
    pub(super) unit: u64,
    /// Bytes that are read at once.
    pub(super) chunk: u64,
    /// Bytes that become zeroes at once.
    pub(super) zero_chunk: u64,
    /// Bytes in a block of the source.
    pub(super) source_block: u64,
    /// Bytes in a block of the target.
    pub(super) target_block: u64,
    /// Bytes of the source: where the copy ends.
    pub(super) size: u64,
    /// Whether the target has an operation for zeroes.
    pub(super) has_zeroes: bool,
    /// Whether the target has a flush.
    pub(super) has_flush: bool,
    /// Chunks in flight.
    pub(super) depth: usize,
}

/// The most that one request makes zeroes of.
const ZERO_BYTES_MAX: u64 = 16 << 20;

impl Geometry {
    /// What fits `source` and `target`, which are called so.
    pub(super) fn of(
        (source_name, source): (&str, &Limits),
        (target_name, target): (&str, &Limits),
        options: &CopyOptions,
    ) -> Result<Self, Refused> {
        let size = size_bytes(source);
        let room = size_bytes(target);
        let target_block = u64::from(target.block_size);
        if room < size.next_multiple_of(target_block) {
            return Err(Refused::caller(format!(
                "copy to {target_name}: it has {room} bytes, expected at least the {size} of \
                 {source_name}"
            )));
        }
        for (name, limits) in [(source_name, source), (target_name, target)] {
            if limits.metadata_size != 0 {
                let found = limits.metadata_size;
                return Err(Refused::caller(format!(
                    "copy {name}: its blocks have {found} bytes of metadata, expected none"
                )));
            }
        }
        let needs =
            [(source_name, source, Operation::Read), (target_name, target, Operation::Write)];
        for (name, limits, operation) in needs {
            if !limits.support.has(operation) {
                let operation = operation.name();
                return Err(Refused::caller(format!("copy {name}: it has no {operation}")));
            }
        }
        let unit = u64::from(source.block_size.max(target.block_size));
        let most =
            |limits: &Limits| u64::from(limits.request_blocks_max) * u64::from(limits.block_size);
        let chunk = options.request_bytes.min(most(source)).min(most(target)).min(CHUNK_MAX);
        let chunk = chunk - chunk % unit;
        if chunk == 0 {
            return Err(Refused::caller(format!(
                "copy {source_name} to {target_name}: blocks have {unit} bytes, expected at most \
                 the {} that go at once",
                options.request_bytes.min(most(source)).min(most(target))
            )));
        }
        let has_zeroes = target.support.has(Operation::WriteZeroes);
        Ok(Self {
            unit,
            chunk,
            zero_chunk: if has_zeroes { ZERO_BYTES_MAX.max(unit) } else { chunk },
            source_block: u64::from(source.block_size),
            target_block,
            size,
            has_zeroes,
            has_flush: target.support.has(Operation::Flush),
            depth: options.depth.clamp(1, DEPTH_MAX) as usize,
        })
    }

    /// `at` rounded down to a unit, except that the end is the end.
    pub(super) const fn floor(&self, at: u64) -> u64 {
        if at >= self.size { self.size } else { at - at % self.unit }
    }

    /// `at` rounded up to a unit, and no further than the end.
    pub(super) fn ceiling(&self, at: u64) -> u64 {
        at.next_multiple_of(self.unit).min(self.size)
    }

    /// So many bytes of the source in whole blocks of the target.
    pub(super) const fn in_target(&self, len_bytes: u64) -> u64 {
        len_bytes.next_multiple_of(self.target_block)
    }
}

/// A chunk is named by 32 bits.
const CHUNK_MAX: u64 = 1 << 30;
const DEPTH_MAX: u32 = 1024;

/// How long a device is.
pub(super) fn size_bytes(limits: &Limits) -> u64 {
    limits.block_count.saturating_mul(u64::from(limits.block_size))
}
