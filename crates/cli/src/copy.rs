//! Copy of one block device to another.
//!
//! ```text
//!   source ──extents──> holes ───────────────────> holes of the target, or WriteZeroes
//!      └────read──────> data, several requests ──> write
//!                                 │
//!                    periodically: flush ──> checkpoint, from which a later run resumes
//! ```
//!
//! Everything runs on the caller's thread: an extent query may block on the device, and only this copy
//! waits for it. Memory is bounded by the queue depth, and requests do not exceed the transfer limits
//! of either device.

mod byte_channel;
mod checkpoint;
mod comparison;
mod copy_engine;
mod copy_loop;
mod copy_result;
mod device_identity;
mod request_sizes;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use tenmil_base::BlockDevice;
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;

pub use self::checkpoint::{CheckpointFile, default_path};
pub use self::copy_engine::CheckpointSink;
pub use self::copy_loop::CopyProgressFn;
pub use self::copy_result::{CompareResult, CopyAbort, CopySide, CopyStats};
pub use self::device_identity::{DeviceIdentity, backing_files};

use self::comparison::CopyComparison;
use self::copy_engine::CopyEngine;
use self::request_sizes::CopyRequestSizes;
use tenmil_base::Error;

/// Copy parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyOptions {
    /// Requests in flight.
    pub depth: u32,
    /// Bytes per request, limited to the maximum transfer of both devices.
    pub request_bytes: u64,
    /// Whether zeroes in the source become holes of the target.
    pub sparse: bool,
    /// Action on unreadable blocks.
    pub on_error: ReadErrorPolicy,
}

/// Action on unreadable blocks of the source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReadErrorPolicy {
    /// Stop, and report the range.
    #[default]
    Stop,
    /// Write zeroes instead, and count them.
    Skip,
}

/// Source and target of a copy, and the region table for its buffers.
pub struct CopyDevices {
    /// Source device.
    pub source: Arc<dyn BlockDevice>,
    /// Target device.
    pub target: Arc<dyn BlockDevice>,
    /// DMA region table for the buffers, shared with both devices.
    pub regions: RegionTable,
}

/// Validated copy.
pub struct ValidatedCopy {
    devices: CopyDevices,
    options: CopyOptions,
    geometry: CopyRequestSizes,
}

impl Default for CopyOptions {
    fn default() -> Self {
        let (depth, request_bytes) = (8, 1 << 20);
        Self { depth, request_bytes, sparse: true, on_error: ReadErrorPolicy::Stop }
    }
}

impl ValidatedCopy {
    /// Creates a copy between two devices, with their names for errors.
    ///
    /// # Errors
    ///
    /// If the target is smaller than the source, or a device lacks a required operation.
    pub fn new(
        devices: CopyDevices,
        options: CopyOptions,
        (source, target): (&str, &str),
    ) -> Result<Self, Error> {
        let limits = (devices.source.limits(), devices.target.limits());
        let geometry =
            CopyRequestSizes::from_limits((source, &limits.0), (target, &limits.1), &options)?;
        Ok(Self { devices, options, geometry })
    }

    /// Size of the source in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.geometry.size
    }

    /// Bytes per request.
    pub fn chunk_bytes(&self) -> u64 {
        self.geometry.chunk
    }

    /// Copies everything that `from` does not record as done. On return no request is in flight, and
    /// everything up to [`CopyStats::until`] is durable on the target.
    pub fn run(
        &self,
        from: CopyStats,
        clock: &Clock,
        keep: &mut dyn CheckpointSink,
        watch: &mut CopyProgressFn<'_>,
    ) -> (CopyStats, Option<CopyAbort>) {
        let began = from.clone();
        let pass = CopyEngine::new(&self.devices, &self.options, self.geometry, from, keep);
        let driven = pass.and_then(|mut pass| {
            copy_loop::run_copy_task(&mut pass, clock, &mut *watch)?;
            Ok(pass.into_result())
        });
        driven.unwrap_or_else(|text| (began, Some(CopyAbort::Machine(text))))
    }

    /// Reads and compares both devices, except the ranges that `tally` records as unreadable.
    pub fn compare(
        &self,
        tally: &CopyStats,
        clock: &Clock,
        watch: &mut CopyProgressFn<'_>,
    ) -> (CompareResult, Option<CopyAbort>) {
        let check = CopyComparison::new(&self.devices, self.geometry, tally);
        let driven = check.and_then(|mut check| {
            copy_loop::run_copy_task(&mut check, clock, &mut *watch)?;
            Ok(check.into_result())
        });
        driven.unwrap_or_else(|text| (CompareResult::default(), Some(CopyAbort::Machine(text))))
    }
}

/// Stores nothing: for copies that cannot be resumed.
impl CheckpointSink for () {
    fn store_checkpoint(
        &mut self,
        _until: u64,
        _lost: &[std::ops::Range<u64>],
    ) -> Result<(), String> {
        Ok(())
    }
}
