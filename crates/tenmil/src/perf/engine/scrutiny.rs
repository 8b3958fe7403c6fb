//! Looking at the data that goes by, or not: what `--verify` adds to a lane.

use base::{Memory, Operation, Outcome, Segment};
use dma::Regions;

use crate::perf::ledger::{Expected, Ledger};
use crate::perf::outcome::Verified;
use crate::perf::stamp::{Stamp, Stamper, Verdict};
use crate::perf::workload::Draw;

/// Looks at what a lane starts and what has ended.
pub(super) trait Scrutiny {
    /// Whether there is anything to look at. A constant, so that a lane that is not looked at has
    /// none of it in its loop.
    const IS_ON: bool;

    /// Whether `draw` may be in flight now, and if so, notes that it is, for task `index`.
    fn may_start(&mut self, draw: &Draw, index: usize) -> bool;
    /// It starts: its buffer may be filled.
    fn starts(&mut self, draw: &Draw, buffer: Segment);
    /// Task `index` has ended: its buffer may be read.
    fn ended(&mut self, outcome: Outcome, index: usize, buffer: Segment);
    /// What was found.
    fn verified(&self) -> Option<Verified>;
}

/// Nobody looks.
pub(super) struct Unlooked;

/// Every block that is written is stamped, and every block that is read is checked.
pub(super) struct Stamped {
    ledger: Ledger,
    stamper: Stamper,
    memory: Regions,
    device: u32,
    block_size: u32,
    /// What each task is at.
    draws: Vec<Draw>,
    block: Vec<u8>,
    found: Verified,
}

impl Scrutiny for Unlooked {
    const IS_ON: bool = false;

    fn may_start(&mut self, _: &Draw, _: usize) -> bool {
        true
    }

    fn starts(&mut self, _: &Draw, _: Segment) {}

    fn ended(&mut self, _: Outcome, _: usize, _: Segment) {}

    fn verified(&self) -> Option<Verified> {
        None
    }
}

/// Where the blocks of a lane are.
pub(super) struct Place {
    pub(super) device: u32,
    pub(super) first: u64,
    pub(super) count: usize,
    pub(super) block_size: u32,
}

impl Stamped {
    pub(super) fn new(place: &Place, depth: usize, seed: u64, memory: Regions) -> Self {
        let nothing = Draw { operation: Operation::Flush, lba: 0, blocks: 0, len_bytes: 0 };
        Self {
            ledger: Ledger::new(place.first, place.count),
            stamper: Stamper::new(seed),
            memory,
            device: place.device,
            block_size: place.block_size,
            draws: vec![nothing; depth],
            block: vec![0; place.block_size as usize],
            found: Verified::default(),
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
            Verdict::Good => &mut self.found.good_blocks,
            Verdict::Stale { .. } => &mut self.found.stale_blocks,
            Verdict::Torn { .. } => &mut self.found.torn_blocks,
            Verdict::Misplaced { .. } => &mut self.found.misplaced_blocks,
            Verdict::Foreign => &mut self.found.foreign_blocks,
        };
        *count += 1;
        if verdict != Verdict::Good && self.found.first_bad.is_none() {
            self.found.first_bad =
                Some(format!("SSD {} block {lba}, version {version}: {verdict}", self.device));
        }
    }
}

impl Scrutiny for Stamped {
    const IS_ON: bool = true;

    fn may_start(&mut self, draw: &Draw, index: usize) -> bool {
        let may = draw.blocks == 0 || self.ledger.begin(draw.operation, draw.lba, draw.blocks);
        if may {
            self.draws[index] = *draw;
        }
        may
    }

    fn starts(&mut self, draw: &Draw, buffer: Segment) {
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

    fn ended(&mut self, outcome: Outcome, index: usize, buffer: Segment) {
        let draw = self.draws[index];
        if draw.blocks == 0 {
            return;
        }
        if draw.operation == Operation::Read && outcome.is_success() {
            for (index, lba) in (draw.lba..draw.lba + u64::from(draw.blocks)).enumerate() {
                if let Some(part) = part(buffer, index, self.block_size) {
                    self.check(lba, part);
                }
            }
        }
        self.ledger.end(draw.operation, draw.lba, draw.blocks, outcome.is_success());
    }

    fn verified(&self) -> Option<Verified> {
        Some(self.found.clone())
    }
}

/// Block `index` of a buffer.
fn part(buffer: Segment, index: usize, block_size: u32) -> Option<Segment> {
    let skip = u32::try_from(index).ok()?.checked_mul(block_size)?;
    buffer.slice(skip, block_size)
}
