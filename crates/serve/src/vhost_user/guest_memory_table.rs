//! Memory of a front end: its mappings and the address translation.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use tenmil_base::Error;

use tenmil_dma::{FileRange, ForeignRegion, RegionTable};
use tenmil_vhost_user::{GuestMemory, GuestRegion, MemoryChange, MemoryRegionDesc};

/// Memory of a front end at one point in time. A running virtqueue holds the table it uses.
#[derive(Debug, Default)]
pub(super) struct GuestMemoryTable {
    pieces: Vec<MappedRegion>,
    space: GuestMemory,
}

/// Mapped memory region, possibly shared by several tables.
#[derive(Clone, Debug)]
struct MappedRegion {
    area: MemoryRegionDesc,
    memory: Arc<ForeignRegion>,
}

/// Largest number of memory regions.
pub(super) const SLOTS_MAX: u16 = 256;
/// Largest amount of shared memory: 4 TiB. The total is bounded because address space that was used
/// for a region is not reused.
const BYTES_MAX: u64 = 4 << 40;

type ReceivedFile = Arc<OwnedFd>;

impl GuestMemoryTable {
    /// Returns the memory after a change.
    ///
    /// # Errors
    ///
    /// Why the change is not possible.
    pub(super) fn with_changes(
        &self,
        change: MemoryChange<ReceivedFile>,
        regions: &RegionTable,
    ) -> Result<Self, Error> {
        let pieces = match change {
            MemoryChange::Replace(areas) => {
                check_total_memory_size(areas.iter().map(|(area, _)| area))?;
                let adopt = |(area, file): (MemoryRegionDesc, ReceivedFile)| {
                    MappedRegion::map_region(area, &file, regions)
                };
                areas.into_iter().map(adopt).collect::<Result<Vec<_>, _>>()?
            }
            MemoryChange::Add(area, file) => {
                if self.pieces.len() >= usize::from(SLOTS_MAX) {
                    return Err(Error::environment(format!(
                        "{SLOTS_MAX} stretches are shared, expected fewer"
                    )));
                }
                check_total_memory_size(
                    self.pieces.iter().map(|piece| &piece.area).chain([&area]),
                )?;
                let mut pieces = self.pieces.clone();
                pieces.push(MappedRegion::map_region(area, &file, regions)?);
                pieces
            }
            MemoryChange::Remove(area) => {
                // VHOST_USER_REM_MEM_REG names a region by these fields; the offset is ignored.
                let is_it = |piece: &MappedRegion| {
                    let MemoryRegionDesc { guest, len_bytes, user, .. } = piece.area;
                    (guest, len_bytes, user) == (area.guest, area.len_bytes, area.user)
                };
                let mut pieces = self.pieces.clone();
                let at = pieces
                    .iter()
                    .position(is_it)
                    .ok_or_else(|| {
                        format!("memory at {:#x} is not shared, expected some that is", area.guest)
                    })
                    .map_err(Error::environment)?;
                pieces.remove(at);
                pieces
            }
        };
        let areas = pieces.iter().map(MappedRegion::guest_region).collect();
        let space = GuestMemory::new(areas)
            .ok_or("two stretches of memory lie over each other, expected them apart")
            .map_err(Error::environment)?;
        Ok(Self { pieces, space })
    }

    pub(super) fn guest_memory(&self) -> &GuestMemory {
        &self.space
    }

    /// Guest address of memory whose file the front end has truncated, if any.
    pub(super) fn truncated_address(&self) -> Option<u64> {
        let failed = self.pieces.iter().find(|piece| piece.memory.has_failed());
        failed.map(|piece| piece.area.guest)
    }
}

impl MappedRegion {
    fn map_region(
        area: MemoryRegionDesc,
        file: &OwnedFd,
        regions: &RegionTable,
    ) -> Result<Self, Error> {
        let range = FileRange { offset: area.file_offset, len_bytes: area.len_bytes };
        let memory = regions.map_foreign(file.as_fd(), range);
        let memory = memory
            .map_err(|why| format!("memory at {:#x}: {why}", area.guest))
            .map_err(Error::environment)?;
        Ok(Self { area, memory: Arc::new(memory) })
    }

    fn guest_region(&self) -> GuestRegion {
        let MemoryRegionDesc { guest, len_bytes, user, .. } = self.area;
        let (region, offset) = (self.memory.id(), self.memory.offset());
        GuestRegion { guest, user, len_bytes, region, offset }
    }
}

fn check_total_memory_size<'a>(
    areas: impl Iterator<Item = &'a MemoryRegionDesc>,
) -> Result<(), Error> {
    let bytes = areas.fold(0_u64, |sum, area| sum.saturating_add(area.len_bytes));
    if bytes <= BYTES_MAX {
        return Ok(());
    }
    Err(Error::environment(format!("{bytes} bytes are shared, expected {BYTES_MAX} at most")))
}
