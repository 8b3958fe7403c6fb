//! Data verification for `--verify`.

use tenmil_base::{IoStatus, Memory, Operation, Segment};
use tenmil_dma::RegionTable;

use crate::perf::block_stamp::{BlockCheck, BlockStamp, BlockStamper};
use crate::perf::perf_result::VerifyResult;
use crate::perf::version_map::{ExpectedContent, VersionMap};
use crate::perf::workload::IoSpec;

/// Hooks of a queue runner around each I/O.
pub(super) trait Verifier {
    /// Whether the hooks do anything. A constant, so that they cost nothing if verification is off.
    const IS_ON: bool;

    /// Whether the I/O `draw` may start now; if so, it is recorded for task `index`.
    fn try_begin_io(&mut self, draw: &IoSpec, index: usize) -> bool;
    /// Called before submission: the buffer may be filled.
    fn prepare_buffer(&mut self, draw: &IoSpec, buffer: Segment);
    /// Called after the completion of task `index`: the buffer may be read.
    fn handle_completion(&mut self, result: IoStatus, index: usize, buffer: Segment);
    /// Result of the verification.
    fn verify_result(&self) -> Option<VerifyResult>;
}

/// No verification.
pub(super) struct NoVerify;

/// Stamps every block that is written and verifies every block that is read.
pub(super) struct StampVerifier {
    ledger: VersionMap,
    stamper: BlockStamper,
    memory: RegionTable,
    device: u32,
    block_size: u32,
    /// Current I/O of each task.
    draws: Vec<IoSpec>,
    block: Vec<u8>,
    found: VerifyResult,
}

impl Verifier for NoVerify {
    const IS_ON: bool = false;

    fn try_begin_io(&mut self, _: &IoSpec, _: usize) -> bool {
        true
    }

    fn prepare_buffer(&mut self, _: &IoSpec, _: Segment) {}

    fn handle_completion(&mut self, _: IoStatus, _: usize, _: Segment) {}

    fn verify_result(&self) -> Option<VerifyResult> {
        None
    }
}

/// Block range of a queue runner.
pub(super) struct VerifiedRange {
    pub(super) device: u32,
    pub(super) first: u64,
    pub(super) count: usize,
    pub(super) block_size: u32,
}

impl StampVerifier {
    pub(super) fn new(place: &VerifiedRange, depth: usize, seed: u64, memory: RegionTable) -> Self {
        let nothing = IoSpec { operation: Operation::Flush, lba: 0, blocks: 0, len_bytes: 0 };
        Self {
            ledger: VersionMap::new(place.first, place.count),
            stamper: BlockStamper::new(seed),
            memory,
            device: place.device,
            block_size: place.block_size,
            draws: vec![nothing; depth],
            block: vec![0; place.block_size as usize],
            found: VerifyResult::default(),
        }
    }

    fn verify_block(&mut self, lba: u64, part: Segment) {
        let ExpectedContent::Version(version) = self.ledger.expected_content(lba) else {
            self.found.unwritten_blocks += 1;
            return;
        };
        let stamp = BlockStamp { device: self.device, lba, version, token: 0 };
        let verdict = match self.memory.load(part, &mut self.block) {
            Ok(()) => self.stamper.verify_block(stamp, &self.block),
            Err(stray) => panic!("the buffer of a task is memory of ours: {stray:?}"),
        };
        let count = match verdict {
            BlockCheck::Good => &mut self.found.good_blocks,
            BlockCheck::Stale { .. } => &mut self.found.stale_blocks,
            BlockCheck::Torn { .. } => &mut self.found.torn_blocks,
            BlockCheck::Misplaced { .. } => &mut self.found.misplaced_blocks,
            BlockCheck::Foreign => &mut self.found.foreign_blocks,
        };
        *count += 1;
        if verdict != BlockCheck::Good && self.found.first_bad.is_none() {
            self.found.first_bad =
                Some(format!("SSD {} block {lba}, version {version}: {verdict}", self.device));
        }
    }
}

impl Verifier for StampVerifier {
    const IS_ON: bool = true;

    fn try_begin_io(&mut self, draw: &IoSpec, index: usize) -> bool {
        let may =
            draw.blocks == 0 || self.ledger.begin_operation(draw.operation, draw.lba, draw.blocks);
        if may {
            self.draws[index] = *draw;
        }
        may
    }

    fn prepare_buffer(&mut self, draw: &IoSpec, buffer: Segment) {
        if draw.operation != Operation::Write {
            return;
        }
        for (index, lba) in (draw.lba..draw.lba + u64::from(draw.blocks)).enumerate() {
            let version = self.ledger.version_to_write(lba);
            let stamp = BlockStamp { device: self.device, lba, version, token: index as u64 };
            self.stamper.write_stamp(stamp, &mut self.block);
            let stored = block_segment(buffer, index, self.block_size)
                .is_some_and(|part| self.memory.store(part, &self.block).is_ok());
            assert!(stored, "the buffer of a task is as long as its I/O");
        }
    }

    fn handle_completion(&mut self, result: IoStatus, index: usize, buffer: Segment) {
        let draw = self.draws[index];
        if draw.blocks == 0 {
            return;
        }
        if draw.operation == Operation::Read && result.is_success() {
            for (index, lba) in (draw.lba..draw.lba + u64::from(draw.blocks)).enumerate() {
                if let Some(part) = block_segment(buffer, index, self.block_size) {
                    self.verify_block(lba, part);
                }
            }
        }
        self.ledger.end_operation(draw.operation, draw.lba, draw.blocks, result.is_success());
    }

    fn verify_result(&self) -> Option<VerifyResult> {
        Some(self.found.clone())
    }
}

/// Block `index` of a buffer.
fn block_segment(buffer: Segment, index: usize, block_size: u32) -> Option<Segment> {
    let skip = u32::try_from(index).ok()?.checked_mul(block_size)?;
    buffer.slice(skip, block_size)
}
