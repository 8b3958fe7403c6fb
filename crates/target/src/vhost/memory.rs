//! The memory of a front end: mapped, and where its addresses are.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use dma::{Adopted, FilePart, Regions};
use vhost::{Area, MemoryArea, MemoryChange, Space};

/// All memory of a front end at one time. Lanes keep the one that they work with.
#[derive(Debug, Default)]
pub(super) struct Table {
    pieces: Vec<Piece>,
    space: Space,
}

/// A stretch of it, which several tables may have.
#[derive(Clone, Debug)]
struct Piece {
    area: MemoryArea,
    memory: Arc<Adopted>,
}

/// Stretches that a front end may share at a time.
pub(super) const SLOTS_MAX: u16 = 256;
/// Bytes that it may share at a time: 4 TiB, for address space that was used for a region stays used.
const BYTES_MAX: u64 = 4 << 40;

type File = Arc<OwnedFd>;

impl Table {
    /// The memory after a change.
    ///
    /// # Errors
    ///
    /// Why there is none.
    pub(super) fn changed(
        &self,
        change: MemoryChange<File>,
        regions: &Regions,
    ) -> Result<Self, String> {
        let pieces = match change {
            MemoryChange::Replace(areas) => {
                check_bytes(areas.iter().map(|(area, _)| area))?;
                let adopt = |(area, file): (MemoryArea, File)| Piece::adopt(area, &file, regions);
                areas.into_iter().map(adopt).collect::<Result<Vec<_>, _>>()?
            }
            MemoryChange::Add(area, file) => {
                if self.pieces.len() >= usize::from(SLOTS_MAX) {
                    return Err(format!("{SLOTS_MAX} stretches are shared, expected fewer"));
                }
                check_bytes(self.pieces.iter().map(|piece| &piece.area).chain([&area]))?;
                let mut pieces = self.pieces.clone();
                pieces.push(Piece::adopt(area, &file, regions)?);
                pieces
            }
            MemoryChange::Remove(area) => {
                let is_it = |piece: &Piece| {
                    let MemoryArea { guest, len_bytes, user, .. } = piece.area;
                    (guest, len_bytes, user) == (area.guest, area.len_bytes, area.user)
                };
                let mut pieces = self.pieces.clone();
                let at = pieces.iter().position(is_it).ok_or_else(|| {
                    format!("memory at {:#x} is not shared, expected some that is", area.guest)
                })?;
                pieces.remove(at);
                pieces
            }
        };
        let areas = pieces.iter().map(Piece::place).collect();
        let space = Space::new(areas)
            .ok_or("two stretches of memory lie over each other, expected them apart")?;
        Ok(Self { pieces, space })
    }

    pub(super) fn space(&self) -> &Space {
        &self.space
    }

    /// The guest address of memory that the front end has taken back without a word, if it has.
    pub(super) fn failed(&self) -> Option<u64> {
        let failed = self.pieces.iter().find(|piece| piece.memory.has_failed());
        failed.map(|piece| piece.area.guest)
    }
}

impl Piece {
    fn adopt(area: MemoryArea, file: &OwnedFd, regions: &Regions) -> Result<Self, String> {
        let part = FilePart { offset: area.file_offset, len_bytes: area.len_bytes };
        let memory = regions.adopt(file.as_fd(), part);
        let memory = memory.map_err(|why| format!("memory at {:#x}: {why}", area.guest))?;
        Ok(Self { area, memory: Arc::new(memory) })
    }

    fn place(&self) -> Area {
        let MemoryArea { guest, len_bytes, user, .. } = self.area;
        let (region, offset) = (self.memory.id(), self.memory.offset());
        Area { guest, user, len_bytes, region, offset }
    }
}

fn check_bytes<'a>(areas: impl Iterator<Item = &'a MemoryArea>) -> Result<(), String> {
    let bytes = areas.fold(0_u64, |sum, area| sum.saturating_add(area.len_bytes));
    if bytes <= BYTES_MAX {
        return Ok(());
    }
    Err(format!("{bytes} bytes are shared, expected {BYTES_MAX} at most"))
}
