//! Model of the permitted content of a volume: the flushed data, or any later write.

use std::collections::BTreeMap;
use std::fmt;

use tenmil_base::Random;

use super::volatile_cache_disk::SECTOR_BYTES;

/// Size of a block, the unit of writes.
pub(super) const BLOCK_BYTES: usize = 4096;
const SECTORS: usize = BLOCK_BYTES / SECTOR_BYTES;
const MAGIC: u64 = 0x7465_6e6d_696c_2e63;

/// Content of a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SectorContent {
    Zero,
    /// Stamp of the write with this version.
    Stamp(u64),
    /// Neither zeroes nor a stamp for this sector.
    Foreign,
}

/// Permitted content of the blocks of a volume.
#[derive(Debug)]
pub(super) struct VolumeModel {
    /// Identity of this model, which its stamps carry; stamps of another model are foreign.
    identity: u64,
    blocks: Vec<ModelBlock>,
    version: u64,
    pub(super) counts: ModelCounts,
}

/// What was flushed and what was checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ModelCounts {
    /// Flushes and forced writes (FUA) that succeeded.
    pub(super) flushes: u64,
    /// Blocks that these made durable.
    pub(super) flushed_blocks: u64,
    /// Reads of a sector whose flushed content, or a later write, was expected and found.
    pub(super) checked_sectors: u64,
}

#[derive(Clone, Debug)]
struct ModelBlock {
    /// Durable content, which must be present unless a pending write is.
    settled: [SectorContent; SECTORS],
    /// Writes since then, oldest first.
    pending: Vec<PendingWrite>,
}

#[derive(Clone, Debug)]
struct PendingWrite {
    version: u64,
    content: SectorContent,
    state: BlockState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockState {
    InFlight,
    Completed,
    /// Not covered by later flushes: the write failed, or a flush after it did.
    Doubtful,
}

/// Writes that a flush makes durable if it succeeds.
#[derive(Clone, Debug, Default)]
pub(super) struct FlushSet(BTreeMap<usize, u64>);

/// Sector with content that is not permitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WrongSector {
    pub(super) block: usize,
    sector: usize,
    found: SectorContent,
    settled: SectorContent,
    pending: Vec<SectorContent>,
}

impl VolumeModel {
    pub(super) fn new(identity: u64, blocks: usize) -> Self {
        let block = ModelBlock { settled: [SectorContent::Zero; SECTORS], pending: Vec::new() };
        let counts = ModelCounts::default();
        Self { identity, blocks: vec![block; blocks], version: 0, counts }
    }

    pub(super) fn block_count(&self) -> usize {
        self.blocks.len()
    }

    /// Starts a write of these blocks with a stamp or zeroes. Returns its version.
    pub(super) fn begin_write(&mut self, blocks: std::ops::Range<usize>, zero: bool) -> u64 {
        self.version += 1;
        let version = self.version;
        let content = if zero { SectorContent::Zero } else { SectorContent::Stamp(version) };
        for block in &mut self.blocks[blocks] {
            block.pending.push(PendingWrite { version, content, state: BlockState::InFlight });
        }
        version
    }

    /// The data of these blocks as written by this version.
    pub(super) fn stamped_data(&self, blocks: std::ops::Range<usize>, version: u64) -> Vec<u8> {
        let sectors = blocks.flat_map(|block| (0..SECTORS).map(move |sector| (block, sector)));
        sectors
            .flat_map(|(block, sector)| stamp_sector(self.identity, block, sector, version))
            .collect()
    }

    /// Completes a write. A forced write (FUA) is durable.
    pub(super) fn end_write(&mut self, blocks: std::ops::Range<usize>, version: u64, forced: bool) {
        self.counts.flushes += u64::from(forced);
        for block in &mut self.blocks[blocks] {
            let found = block.pending.iter_mut().find(|pending| pending.version == version);
            if let Some(pending) = found.filter(|pending| pending.state == BlockState::InFlight) {
                pending.state = BlockState::Completed;
            }
            if forced {
                self.counts.flushed_blocks += u64::from(block.settle_write(version));
            }
        }
    }

    /// Fails a write: its data may be present or not.
    pub(super) fn fail_write(&mut self, blocks: std::ops::Range<usize>, version: u64) {
        for block in &mut self.blocks[blocks] {
            for pending in block.pending.iter_mut().filter(|pending| pending.version == version) {
                pending.state = BlockState::Doubtful;
            }
        }
    }

    /// Marks all pending writes doubtful after a failed flush or a lost connection.
    pub(super) fn mark_doubtful(&mut self) {
        for pending in self.blocks.iter_mut().flat_map(|block| &mut block.pending) {
            pending.state = BlockState::Doubtful;
        }
    }

    /// The writes that a flush submitted now will cover.
    pub(super) fn writes_covered_by_flush(&self) -> FlushSet {
        let last = |block: &ModelBlock| {
            let completed = |pending: &&PendingWrite| pending.state == BlockState::Completed;
            block.pending.iter().rfind(completed).map(|pending| pending.version)
        };
        let blocks = self.blocks.iter().enumerate();
        FlushSet(blocks.filter_map(|(index, block)| Some((index, last(block)?))).collect())
    }

    /// Completes a flush. Writes that became doubtful since its submission are not covered: the reply
    /// of a failed flush and the submission of this one may have crossed on the socket.
    pub(super) fn complete_flush(&mut self, promise: &FlushSet) {
        self.counts.flushes += 1;
        for (index, version) in &promise.0 {
            let block = &mut self.blocks[*index];
            let is_kept =
                |it: &PendingWrite| it.version == *version && it.state == BlockState::Completed;
            if block.pending.iter().any(is_kept) {
                self.counts.flushed_blocks += u64::from(block.settle_write(*version));
            }
        }
    }

    /// Checks data read from the block `first` on. `exact` if no data can have been lost.
    pub(super) fn check_read(
        &mut self,
        first: usize,
        bytes: &[u8],
        exact: bool,
    ) -> Vec<WrongSector> {
        let mut wrong = Vec::new();
        for (at, content) in sector_contents(self.identity, first, bytes) {
            let (index, sector) = (first + at / SECTORS, at % SECTORS);
            let block = &self.blocks[index];
            self.counts.checked_sectors += u64::from(block.settled[sector] != SectorContent::Zero);
            let settled = block.settled[sector];
            let pending = block.pending.iter().map(|pending| pending.content);
            let newest = block.pending.last().filter(|last| last.state == BlockState::Completed);
            let fits = match newest {
                Some(newest) if exact => newest.content == content,
                _ => settled == content || pending.clone().any(|pending| pending == content),
            };
            if !fits {
                let pending = pending.collect();
                wrong.push(WrongSector { block: index, sector, found: content, settled, pending });
            }
        }
        wrong
    }

    /// Adopts data read after a flush as the durable content.
    pub(super) fn adopt_read_data(&mut self, first: usize, bytes: &[u8]) {
        for (at, content) in sector_contents(self.identity, first, bytes) {
            self.blocks[first + at / SECTORS].settled[at % SECTORS] = content;
            self.blocks[first + at / SECTORS].pending.clear();
        }
    }
}

impl ModelBlock {
    /// Returns whether the version was pending.
    fn settle_write(&mut self, version: u64) -> bool {
        let Some(at) = self.pending.iter().position(|pending| pending.version == version) else {
            return false;
        };
        self.settled = [self.pending[at].content; SECTORS];
        self.pending.drain(..=at);
        true
    }
}

fn stamp_sector(identity: u64, block: usize, sector: usize, version: u64) -> [u8; SECTOR_BYTES] {
    let mut bytes = [0; SECTOR_BYTES];
    let mut random = Random::new(identity ^ version.rotate_left(32) ^ (block * 8 + sector) as u64);
    let header = [MAGIC, identity, (block * SECTORS + sector) as u64, version];
    let body = std::iter::repeat_with(|| random.next_u64());
    for (word, value) in bytes.chunks_exact_mut(8).zip(header.into_iter().chain(body)) {
        word.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// The content of each sector in these bytes.
fn sector_contents(
    identity: u64,
    first: usize,
    bytes: &[u8],
) -> impl Iterator<Item = (usize, SectorContent)> + '_ {
    bytes.chunks_exact(SECTOR_BYTES).enumerate().map(move |(at, sector)| {
        if sector.iter().all(|byte| *byte == 0) {
            return (at, SectorContent::Zero);
        }
        let version = sector[24..].first_chunk().map_or(0, |part| u64::from_le_bytes(*part));
        let expected = stamp_sector(identity, first + at / SECTORS, at % SECTORS, version);
        (
            at,
            if sector == expected { SectorContent::Stamp(version) } else { SectorContent::Foreign },
        )
    })
}

impl fmt::Display for SectorContent {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero => out.write_str("zeroes"),
            Self::Stamp(version) => write!(out, "write {version}"),
            Self::Foreign => out.write_str("what was never written there"),
        }
    }
}

impl fmt::Display for WrongSector {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { block, sector, found, settled, pending } = self;
        write!(out, "block {block}, sector {sector}: {found}, expected {settled} (flushed)")?;
        pending.iter().try_for_each(|pending| write!(out, " or {pending}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKS: std::ops::Range<usize> = 1..2;

    fn write_and_complete(model: &mut VolumeModel) -> u64 {
        let version = model.begin_write(BLOCKS, false);
        model.end_write(BLOCKS, version, false);
        version
    }

    #[test]
    fn flushed_write_must_be_present_and_an_unflushed_one_may() {
        let mut model = VolumeModel::new(9, 4);
        let first = write_and_complete(&mut model);
        assert!(model.check_read(1, &[0; BLOCK_BYTES], false).is_empty());
        assert_eq!(model.check_read(1, &[0; BLOCK_BYTES], true).len(), SECTORS);
        let promise = model.writes_covered_by_flush();
        let second = write_and_complete(&mut model);
        model.complete_flush(&promise);
        assert_eq!(model.check_read(1, &[0; BLOCK_BYTES], false).len(), SECTORS);
        for version in [first, second] {
            assert!(model.check_read(1, &model.stamped_data(BLOCKS, version), false).is_empty());
        }
        let mut torn = model.stamped_data(BLOCKS, first);
        torn[512..1024].copy_from_slice(&model.stamped_data(BLOCKS, second)[512..1024]);
        assert!(model.check_read(1, &torn, false).is_empty());
        torn[600] ^= 1;
        assert_eq!(model.check_read(1, &torn, false).len(), 1);
    }

    #[test]
    fn stamp_of_another_block_or_volume_is_foreign() {
        let mut model = VolumeModel::new(9, 4);
        let version = model.begin_write(0..4, false);
        assert!(!model.check_read(1, &model.stamped_data(2..3, version), false).is_empty());
        let other = VolumeModel::new(8, 4);
        assert!(!model.check_read(1, &other.stamped_data(BLOCKS, version), false).is_empty());
    }

    #[test]
    fn flush_after_a_failed_one_does_not_cover_earlier_writes() {
        let mut model = VolumeModel::new(9, 4);
        write_and_complete(&mut model);
        model.mark_doubtful();
        let promise = model.writes_covered_by_flush();
        model.complete_flush(&promise);
        assert!(model.check_read(1, &[0; BLOCK_BYTES], false).is_empty());
        let newer = write_and_complete(&mut model);
        let promise = model.writes_covered_by_flush();
        model.complete_flush(&promise);
        assert!(model.check_read(1, &model.stamped_data(BLOCKS, newer), true).is_empty());
        assert!(!model.check_read(1, &[0; BLOCK_BYTES], false).is_empty());
    }

    #[test]
    fn flush_in_flight_while_another_fails_does_not_cover_earlier_writes() {
        let mut model = VolumeModel::new(9, 4);
        write_and_complete(&mut model);
        let promise = model.writes_covered_by_flush();
        model.mark_doubtful();
        model.complete_flush(&promise);
        assert!(model.check_read(1, &[0; BLOCK_BYTES], false).is_empty());
    }

    #[test]
    fn failed_write_must_not_return_after_a_newer_one_was_flushed() {
        let mut model = VolumeModel::new(9, 4);
        let old = model.begin_write(BLOCKS, false);
        model.fail_write(BLOCKS, old);
        assert!(model.check_read(1, &model.stamped_data(BLOCKS, old), false).is_empty());
        write_and_complete(&mut model);
        let promise = model.writes_covered_by_flush();
        model.complete_flush(&promise);
        assert!(!model.check_read(1, &model.stamped_data(BLOCKS, old), false).is_empty());
    }

    #[test]
    fn fua_write_is_durable_on_completion() {
        let mut model = VolumeModel::new(9, 4);
        let version = model.begin_write(BLOCKS, true);
        assert!(model.check_read(1, &[0; BLOCK_BYTES], false).is_empty());
        model.end_write(BLOCKS, version, true);
        let next = model.begin_write(BLOCKS, false);
        model.end_write(BLOCKS, next, true);
        assert!(!model.check_read(1, &[0; BLOCK_BYTES], false).is_empty());
    }

    #[test]
    fn read_data_is_expected_from_then_on() {
        let mut model = VolumeModel::new(9, 4);
        let version = write_and_complete(&mut model);
        model.mark_doubtful();
        let bytes = model.stamped_data(BLOCKS, version);
        model.adopt_read_data(1, &bytes);
        assert!(!model.check_read(1, &[0; BLOCK_BYTES], false).is_empty());
        assert!(model.check_read(1, &bytes, false).is_empty());
    }
}
