//! Contents of a disk: stable sectors, and versions written since.

use std::collections::BTreeMap;
use std::ops::Range;

use tenmil_base::{Memory, Random, Segment};
use tenmil_dma::RegionTable;

use tenmil_block::SegmentCursor;

/// The sectors of a disk with a volatile cache.
#[derive(Default)]
pub(super) struct CachedSectors {
    /// Sectors that were never written are zeroes.
    stable: BTreeMap<u64, Sector>,
    /// Versions written since, oldest first, each with the number of its write.
    cached: BTreeMap<u64, Vec<(u64, Sector)>>,
    write_count: u64,
}

type Sector = [u8; SECTOR];

/// Unit that a disk writes atomically.
pub(super) const SECTOR: usize = 512;

impl CachedSectors {
    /// Number of writes.
    pub(super) fn write_count(&self) -> u64 {
        self.write_count
    }

    pub(super) fn read(&self, first: u64, segments: &[Segment], regions: &RegionTable) {
        let mut pieces = SegmentCursor::new(segments);
        let mut skip = 0;
        while let Some(piece) = pieces.take_piece((SECTOR - skip % SECTOR) as u64) {
            let newest = self.newest_sector_contents(first + (skip / SECTOR) as u64);
            let (from, len) = (skip % SECTOR, piece.len_bytes as usize);
            regions.store(piece, &newest[from..from + len]).unwrap();
            skip += len;
        }
    }

    /// Writes whole sectors; a partial last one is dropped.
    pub(super) fn write(&mut self, first: u64, bytes: &[u8]) {
        self.write_count += 1;
        for (sector, bytes) in (first..).zip(bytes.chunks_exact(SECTOR)) {
            let version = (self.write_count, bytes.try_into().unwrap());
            self.cached.entry(sector).or_default().push(version);
        }
    }

    /// Makes the newest versions stable that are not newer than this write.
    pub(super) fn persist_up_to(&mut self, range: Range<u64>, write: u64) {
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

    /// Keeps the stable version of each sector, or any version since.
    pub(super) fn drop_cached_randomly(&mut self, random: &mut Random) {
        for (sector, versions) in std::mem::take(&mut self.cached) {
            let survivor = usize::try_from(random.below(versions.len() as u64 + 1)).unwrap();
            if let Some((_, survivor)) = versions.get(survivor) {
                self.stable.insert(sector, *survivor);
            }
        }
    }

    fn newest_sector_contents(&self, sector: u64) -> Sector {
        let cached = self.cached.get(&sector).and_then(|versions| versions.last());
        let cached = cached.map(|(_, sector)| sector);
        *cached.or_else(|| self.stable.get(&sector)).unwrap_or(&[0; SECTOR])
    }
}

/// The bytes in the memory of a request.
pub(super) fn segment_bytes(regions: &RegionTable, segments: &[Segment]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for segment in segments {
        let from = bytes.len();
        bytes.resize(from + segment.len_bytes as usize, 0);
        regions.load(*segment, &mut bytes[from..]).unwrap();
    }
    bytes
}
