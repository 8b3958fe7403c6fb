//! What a disk holds: what is stable, and what was written since.

use std::collections::BTreeMap;
use std::ops::Range;

use base::{Memory, Random, Segment};
use dma::Regions;

use crate::backend::pieces::Pieces;

/// The sectors of a disk with a volatile cache.
#[derive(Default)]
pub(super) struct Sectors {
    /// Sectors that were never written are zeroes.
    stable: BTreeMap<u64, Sector>,
    /// What was written since, oldest first, each with the number of the write.
    cached: BTreeMap<u64, Vec<(u64, Sector)>>,
    writes: u64,
}

type Sector = [u8; SECTOR];

/// What a disk writes as a whole, or not at all.
pub(super) const SECTOR: usize = 512;

impl Sectors {
    /// How many writes there have been.
    pub(super) fn writes(&self) -> u64 {
        self.writes
    }

    pub(super) fn read(&self, first: u64, segments: &[Segment], regions: &Regions) {
        let mut pieces = Pieces::of(segments);
        let mut skip = 0;
        while let Some(piece) = pieces.take((SECTOR - skip % SECTOR) as u64) {
            let newest = self.newest(first + (skip / SECTOR) as u64);
            let (from, len) = (skip % SECTOR, piece.len_bytes as usize);
            regions.store(piece, &newest[from..from + len]).unwrap();
            skip += len;
        }
    }

    /// Whole sectors; what is left over of the last one is dropped.
    pub(super) fn write(&mut self, first: u64, bytes: &[u8]) {
        self.writes += 1;
        for (sector, bytes) in (first..).zip(bytes.chunks_exact(SECTOR)) {
            let version = (self.writes, bytes.try_into().unwrap());
            self.cached.entry(sector).or_default().push(version);
        }
    }

    /// Makes the newest versions stable, as far as they are not newer than this write.
    pub(super) fn settle(&mut self, range: Range<u64>, write: u64) {
        let settled: Vec<u64> = self.cached.range(range).map(|(sector, _)| *sector).collect();
        for sector in settled {
            let mut older = self.cached.remove(&sector).unwrap();
            let newer = older.split_off(older.partition_point(|(number, _)| *number <= write));
            if let Some((_, newest)) = older.pop() {
                self.stable.insert(sector, newest);
            }
            if !newer.is_empty() {
                self.cached.insert(sector, newer);
            }
        }
    }

    /// Keeps of each sector what is stable, or any version since.
    pub(super) fn cut(&mut self, random: &mut Random) {
        for (sector, versions) in std::mem::take(&mut self.cached) {
            let survivor = usize::try_from(random.below(versions.len() as u64 + 1)).unwrap();
            if let Some((_, survivor)) = versions.get(survivor) {
                self.stable.insert(sector, *survivor);
            }
        }
    }

    fn newest(&self, sector: u64) -> Sector {
        let cached = self.cached.get(&sector).and_then(|versions| versions.last());
        let cached = cached.map(|(_, sector)| sector);
        *cached.or_else(|| self.stable.get(&sector)).unwrap_or(&[0; SECTOR])
    }
}

/// The bytes of a request's memory.
pub(super) fn gather(regions: &Regions, segments: &[Segment]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for segment in segments {
        let from = bytes.len();
        bytes.resize(from + segment.len_bytes as usize, 0);
        regions.load(*segment, &mut bytes[from..]).unwrap();
    }
    bytes
}
