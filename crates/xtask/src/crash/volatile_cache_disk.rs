//! Disk with a volatile cache: files whose sectors become durable with a sync.
//!
//! ```text
//!   write ──▶ volatile: every version of a sector since the last sync ── sync ──▶ durable
//!                 └── power loss: any of these versions, or the durable one, for each sector
//! ```

use std::collections::BTreeMap;

use tenmil_base::Random;

use crate::fuse_protocol::{FileSize, ROOT};

/// Size of a sector, which is atomic at a power loss.
pub(super) const SECTOR_BYTES: usize = 512;
const SECTOR: u64 = SECTOR_BYTES as u64;

/// Files of one disk.
#[derive(Debug, Default)]
pub(super) struct VolatileCacheMedium {
    files: BTreeMap<u64, VolatileFile>,
    names: BTreeMap<String, u64>,
    names_durable: BTreeMap<String, u64>,
    nodes_made: u64,
    /// Number of power losses: a file handle from before a power loss no longer reaches the disk.
    pub(super) epoch: u64,
}

/// Data of a sector; `None` stands for zeroes.
type Sector = Option<Box<[u8; SECTOR_BYTES]>>;

/// File with durable and volatile sectors.
#[derive(Debug, Default)]
pub(super) struct VolatileFile {
    len: u64,
    len_durable: u64,
    durable: BTreeMap<u64, Sector>,
    /// Versions of each sector since the last sync, oldest first.
    volatile: BTreeMap<u64, Vec<Sector>>,
}

/// Unsynced data that survive a power loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SurvivingData {
    /// None.
    Nothing,
    /// The newest version of each sector.
    All,
    /// For each sector any of its versions, or the durable one.
    Any,
}

impl SurvivingData {
    pub(super) fn draw_random(random: &mut Random) -> Self {
        match random.below(4) {
            0 => Self::Nothing,
            1 => Self::All,
            _ => Self::Any,
        }
    }
}

impl VolatileCacheMedium {
    /// Node number of a file name.
    pub(super) fn find_node(&self, name: &str) -> Option<u64> {
        self.names.get(name).copied()
    }

    /// File names with node numbers, in order.
    pub(super) fn names_with_nodes(&self) -> impl Iterator<Item = (&String, u64)> {
        self.names.iter().map(|(name, node)| (name, *node))
    }

    pub(super) fn file_mut(&mut self, node: u64) -> Option<&mut VolatileFile> {
        self.files.get_mut(&node)
    }

    /// Node number of a file name; creates the file if it does not exist.
    pub(super) fn create(&mut self, name: &str) -> u64 {
        if let Some(node) = self.find_node(name) {
            return node;
        }
        self.nodes_made += 1;
        let node = ROOT + self.nodes_made;
        self.files.insert(node, VolatileFile::default());
        self.names.insert(name.to_owned(), node);
        node
    }

    pub(super) fn unlink(&mut self, name: &str) -> bool {
        self.names.remove(name).is_some()
    }

    /// Syncs the directory.
    pub(super) fn sync_directory(&mut self) {
        self.names_durable = self.names.clone();
    }

    /// Removes all files, as on a new disk.
    pub(super) fn remove_all(&mut self) {
        let (nodes_made, epoch) = (self.nodes_made, self.epoch + 1);
        *self = Self { nodes_made, epoch, ..Self::default() };
    }

    /// Number of sectors that are not durable.
    pub(super) fn unsynced_sectors(&self) -> usize {
        self.files.values().map(|file| file.volatile.len()).sum()
    }

    /// Simulates a power loss: of the unsynced data, `keep` survives.
    pub(super) fn lose_power(&mut self, keep: SurvivingData, random: &mut Random) {
        self.epoch += 1;
        self.lose_cache(keep, random);
        self.names = self.names_durable.clone();
    }

    /// Loses unsynced data as in a power loss, while files stay open.
    pub(super) fn lose_cache(&mut self, keep: SurvivingData, random: &mut Random) {
        for file in self.files.values_mut() {
            file.lose_unsynced(keep, random);
        }
    }
}

impl VolatileFile {
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Size for the kernel.
    pub(super) fn size(&self) -> FileSize {
        let sectors = self.durable.len() + self.volatile.len();
        FileSize { len: self.len, allocated_bytes: sectors as u64 * SECTOR }
    }

    pub(super) fn truncate(&mut self, len: u64) {
        if len < self.len {
            self.zero_range(len, self.len - len);
        }
        self.len = len;
    }

    fn newest_sector(&self, sector: u64) -> Option<&[u8; SECTOR_BYTES]> {
        let found = match self.volatile.get(&sector).and_then(|versions| versions.last()) {
            Some(newest) => newest,
            None => self.durable.get(&sector)?,
        };
        found.as_deref()
    }

    /// Reads up to `len` bytes at `offset`, limited by the end of the file.
    pub(super) fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let left = usize::try_from(self.len.saturating_sub(offset)).unwrap_or(usize::MAX);
        let mut bytes = vec![0; len.min(left)];
        for piece in sector_pieces(offset, bytes.len()) {
            if let Some(sector) = self.newest_sector(piece.sector) {
                bytes[piece.at..piece.at + piece.len]
                    .copy_from_slice(&sector[piece.within..piece.within + piece.len]);
            }
        }
        bytes
    }

    pub(super) fn write(&mut self, offset: u64, bytes: &[u8]) {
        for piece in sector_pieces(offset, bytes.len()) {
            let mut sector = Box::new([0; SECTOR_BYTES]);
            if piece.len < SECTOR_BYTES
                && let Some(before) = self.newest_sector(piece.sector)
            {
                sector.copy_from_slice(before);
            }
            sector[piece.within..piece.within + piece.len]
                .copy_from_slice(&bytes[piece.at..piece.at + piece.len]);
            self.volatile.entry(piece.sector).or_default().push(Some(sector));
        }
        self.len = self.len.max(offset + bytes.len() as u64);
    }

    /// Makes a range read as zeroes.
    pub(super) fn zero_range(&mut self, offset: u64, len: u64) {
        let end = offset.saturating_add(len).min(self.len);
        let len = usize::try_from(end.saturating_sub(offset)).unwrap_or(0);
        for piece in sector_pieces(offset, len) {
            let Some(before) = self.newest_sector(piece.sector) else { continue };
            let mut sector = None;
            if piece.len < SECTOR_BYTES {
                let mut kept = Box::new(*before);
                kept[piece.within..piece.within + piece.len].fill(0);
                sector = Some(kept);
            }
            self.volatile.entry(piece.sector).or_default().push(sector);
        }
    }

    /// Offset of the next data, or the next hole, from `offset` on (lseek(2)).
    pub(super) fn seek_data_or_hole(&self, offset: u64, data: bool) -> Option<u64> {
        if offset >= self.len {
            return None;
        }
        let sectors = offset / SECTOR..self.len.div_ceil(SECTOR);
        let found =
            sectors.into_iter().find(|sector| self.newest_sector(*sector).is_some() == data);
        match found {
            Some(sector) => Some((sector * SECTOR).max(offset)),
            None => (!data).then_some(self.len),
        }
    }

    /// Makes all sectors durable.
    pub(super) fn sync(&mut self) {
        for (sector, mut versions) in std::mem::take(&mut self.volatile) {
            self.make_sector_durable(sector, versions.pop().flatten());
        }
        self.len_durable = self.len;
    }

    /// Makes a range durable, for a synchronous write.
    pub(super) fn sync_range(&mut self, offset: u64, len: usize) {
        for piece in sector_pieces(offset, len) {
            if let Some(mut versions) = self.volatile.remove(&piece.sector) {
                self.make_sector_durable(piece.sector, versions.pop().flatten());
            }
        }
        self.len_durable = self.len_durable.max(self.len.min(offset + len as u64));
    }

    fn make_sector_durable(&mut self, sector: u64, newest: Sector) {
        match newest {
            Some(bytes) => self.durable.insert(sector, Some(bytes)),
            None => self.durable.remove(&sector),
        };
    }

    fn lose_unsynced(&mut self, keep: SurvivingData, random: &mut Random) {
        for (sector, mut versions) in std::mem::take(&mut self.volatile) {
            let kept = match keep {
                SurvivingData::Nothing => 0,
                SurvivingData::All => versions.len(),
                SurvivingData::Any => {
                    usize::try_from(random.below(versions.len() as u64 + 1)).unwrap_or_default()
                }
            };
            if kept > 0 {
                versions.truncate(kept);
                self.make_sector_durable(sector, versions.pop().flatten());
            }
        }
        if keep != SurvivingData::All {
            self.len = self.len_durable;
        }
        self.len_durable = self.len;
        let end = self.len.div_ceil(SECTOR);
        self.durable.retain(|sector, _| *sector < end);
    }
}

/// Part of one sector, with its offset in a buffer.
struct SectorPiece {
    sector: u64,
    within: usize,
    at: usize,
    len: usize,
}

fn sector_pieces(offset: u64, len: usize) -> impl Iterator<Item = SectorPiece> {
    let mut at = 0;
    std::iter::from_fn(move || {
        if at == len {
            return None;
        }
        let here = offset + at as u64;
        let within = usize::try_from(here % SECTOR).unwrap_or_default();
        let piece = SectorPiece {
            sector: here / SECTOR,
            within,
            at,
            len: (SECTOR_BYTES - within).min(len - at),
        };
        at += piece.len;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_medium() -> (VolatileCacheMedium, u64) {
        let mut medium = VolatileCacheMedium::default();
        let node = medium.create("disk");
        medium.sync_directory();
        let file = medium.file_mut(node).unwrap();
        file.truncate(8192);
        file.write(0, &[1; 1024]);
        file.sync();
        (medium, node)
    }

    #[test]
    fn synced_sectors_survive_and_others_are_lost() {
        let (mut medium, node) = test_medium();
        let file = medium.file_mut(node).unwrap();
        file.write(512, &[2; 512]);
        assert_eq!(file.read(0, 1024)[512..], [2; 512]);
        assert_eq!(medium.unsynced_sectors(), 1);
        medium.lose_power(SurvivingData::Nothing, &mut Random::new(1));
        assert_eq!(medium.file_mut(node).unwrap().read(0, 2048)[..1024], [1; 1024]);
        assert_eq!((medium.epoch, medium.unsynced_sectors()), (1, 0));
    }

    #[test]
    fn any_version_of_an_unsynced_sector_may_survive() {
        let mut seen = [false; 4];
        for seed in 0..64 {
            let (mut medium, node) = test_medium();
            let file = medium.file_mut(node).unwrap();
            file.write(0, &[2; 512]);
            file.write(0, &[3; 512]);
            file.zero_range(0, 512);
            medium.lose_power(SurvivingData::Any, &mut Random::new(seed));
            let found = medium.file_mut(node).unwrap().read(0, 1024);
            assert!(found[..512].iter().all(|byte| *byte == found[0]));
            assert_eq!(found[512..], [1; 512]);
            seen[usize::from(found[0])] = true;
        }
        assert_eq!(seen, [true; 4]);
    }

    #[test]
    fn synchronous_write_makes_only_its_range_durable() {
        let (mut medium, node) = test_medium();
        let file = medium.file_mut(node).unwrap();
        file.write(0, &[2; 512]);
        file.write(4096, &[3; 512]);
        file.sync_range(4096, 512);
        medium.lose_power(SurvivingData::Nothing, &mut Random::new(1));
        let found = medium.file_mut(node).unwrap().read(0, 8192);
        assert_eq!((found[0], found[4096]), (1, 3));
    }

    #[test]
    fn name_in_an_unsynced_directory_is_lost() {
        let (mut medium, _) = test_medium();
        let node = medium.create("other");
        medium.file_mut(node).unwrap().sync();
        medium.lose_power(SurvivingData::All, &mut Random::new(1));
        assert_eq!((medium.find_node("other"), medium.find_node("disk").is_some()), (None, true));
    }

    #[test]
    fn partial_sectors_keep_their_other_bytes_and_holes_are_found() {
        let (mut medium, node) = test_medium();
        let file = medium.file_mut(node).unwrap();
        file.write(100, &[7; 10]);
        assert_eq!(file.read(98, 14), [1, 1, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 1, 1]);
        file.zero_range(600, 8);
        assert_eq!(file.read(598, 4), [1, 1, 0, 0]);
        assert_eq!(
            (file.seek_data_or_hole(0, false), file.seek_data_or_hole(1024, true)),
            (Some(1024), None)
        );
        file.truncate(512);
        file.truncate(8192);
        assert_eq!(file.read(512, 512), [0; 512]);
    }
}
