//! Data verification for `--verify`.

use tenmil_base::{IoStatus, Memory, Operation, Segment};
use tenmil_dma::RegionTable;

use crate::perf::result::VerifyResult;
use crate::perf::stamp::{BlockCheck, Stamp, Stamper};
use crate::perf::version_map::{Expected, VersionMap};
use crate::perf::workload::IoSpec;

/// Hooks of a queue runner around each I/O.
pub(super) trait Verifier {
    /// Whether the hooks do anything. A constant, so that they cost nothing if verification is off.
    const IS_ON: bool;

    /// Whether the I/O `draw` may start now; if so, it is recorded for task `index`.
    fn may_start(&mut self, draw: &IoSpec, index: usize) -> bool;
    /// Called before submission: the buffer may be filled.
    fn starts(&mut self, draw: &IoSpec, buffer: Segment);
    /// Called after the completion of task `index`: the buffer may be read.
    fn ended(&mut self, result: IoStatus, index: usize, buffer: Segment);
    /// Result of the verification.
    fn verified(&self) -> Option<VerifyResult>;
}

/// No verification.
pub(super) struct NoVerify;

/// Stamps every block that is written and verifies every block that is read.
pub(super) struct StampVerifier {
    ledger: VersionMap,
    stamper: Stamper,
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

    fn may_start(&mut self, _: &IoSpec, _: usize) -> bool {
        true
    }

    fn starts(&mut self, _: &IoSpec, _: Segment) {}

    fn ended(&mut self, _: IoStatus, _: usize, _: Segment) {}

    fn verified(&self) -> Option<VerifyResult> {
        None
    }
}

/// Block range of a queue runner.
pub(super) struct BlockArea {
    pub(super) device: u32,
    pub(super) first: u64,
    pub(super) count: usize,
    pub(super) block_size: u32,
}

impl StampVerifier {
    pub(super) fn new(place: &BlockArea, depth: usize, seed: u64, memory: RegionTable) -> Self {
        let nothing = IoSpec { operation: Operation::Flush, lba: 0, blocks: 0, len_bytes: 0 };
        Self {
            ledger: VersionMap::new(place.first, place.count),
            stamper: Stamper::new(seed),
            memory,
            device: place.device,
            block_size: place.block_size,
            draws: vec![nothing; depth],
            block: vec![0; place.block_size as usize],
            found: VerifyResult::default(),
        }
    }

    fn check(&mut self, lba: u64, part: Segment) {
        let Expected::Version(version) = self.ledger.expected(lba) else {
            self.found.unwritten_blocks += 1;
            return;
        };
        let stamp = Stamp { device: self.device, lba, version, token: 0 };
        let verdict = match self.memory.load(part, &mut self.block) {
            Ok(()) => self.stamper.check(stamp, &self.block),
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

    fn may_start(&mut self, draw: &IoSpec, index: usize) -> bool {
        let may = draw.blocks == 0 || self.ledger.begin(draw.operation, draw.lba, draw.blocks);
        if may {
            self.draws[index] = *draw;
        }
        may
    }

    fn starts(&mut self, draw: &IoSpec, buffer: Segment) {
        if draw.operation != Operation::Write {
            return;
        }
        for (index, lba) in (draw.lba..draw.lba + u64::from(draw.blocks)).enumerate() {
            let version = self.ledger.version_to_write(lba);
            let stamp = Stamp { device: self.device, lba, version, token: index as u64 };
            self.stamper.write(stamp, &mut self.block);
            let stored = part(buffer, index, self.block_size)
                .is_some_and(|part| self.memory.store(part, &self.block).is_ok());
            assert!(stored, "the buffer of a task is as long as its I/O");
        }
    }

    fn ended(&mut self, result: IoStatus, index: usize, buffer: Segment) {
        let draw = self.draws[index];
        if draw.blocks == 0 {
            return;
        }
        if draw.operation == Operation::Read && result.is_success() {
            for (index, lba) in (draw.lba..draw.lba + u64::from(draw.blocks)).enumerate() {
                if let Some(part) = part(buffer, index, self.block_size) {
                    self.check(lba, part);
                }
            }
        }
        self.ledger.end(draw.operation, draw.lba, draw.blocks, result.is_success());
    }

    fn verified(&self) -> Option<VerifyResult> {
        Some(self.found.clone())
    }
}

/// Block `index` of a buffer.
fn part(buffer: Segment, index: usize, block_size: u32) -> Option<Segment> {
    let skip = u32::try_from(index).ok()?.checked_mul(block_size)?;
    buffer.slice(skip, block_size)
}
