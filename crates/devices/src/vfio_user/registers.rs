//! BAR 0 of a vfio-user controller.

use std::sync::Arc;

use tenmil_base::{Doorbell, Memory, Mmio, Segment};
use tenmil_dma::{ForeignRegion, RegionTable};
use tenmil_vfio_user::{SparseMmapArea, region_index};

use super::connection::ConnectionHandle;

/// Registers accessed by messages, and doorbells in mapped memory or by messages.
pub(super) struct Registers {
    link: ConnectionHandle,
    regions: RegionTable,
    doorbells: Option<(Arc<ForeignRegion>, SparseMmapArea)>,
}

/// One doorbell register.
pub(super) enum VfioUserDoorbell {
    /// A word in memory that the server polls.
    Mapped {
        /// Region table that the word belongs to.
        regions: RegionTable,
        /// The word.
        word: Segment,
        /// Keeps the page mapped.
        _page: Arc<ForeignRegion>,
    },
    /// A message that wakes the server.
    Sent {
        /// The connection.
        link: ConnectionHandle,
        /// Offset in BAR 0.
        offset: u32,
    },
}

impl Registers {
    pub(super) fn new(
        link: ConnectionHandle,
        regions: &RegionTable,
        doorbells: Option<(Arc<ForeignRegion>, SparseMmapArea)>,
    ) -> Self {
        Self { link, regions: regions.clone(), doorbells }
    }

    /// Reads a register. A lost controller reads as all ones, like a removed PCI function.
    fn read<const N: usize>(&self, offset: u32) -> [u8; N] {
        let len = u32::try_from(N).unwrap_or(0);
        let read = self.link.read(region_index::BAR0, offset.into(), len);
        let bytes = read.ok().and_then(|bytes| <[u8; N]>::try_from(bytes).ok());
        bytes.unwrap_or([0xff; N])
    }
}

impl Mmio for Registers {
    type Doorbell = VfioUserDoorbell;

    fn read32(&mut self, offset: u32) -> u32 {
        u32::from_le_bytes(self.read(offset))
    }

    fn read64(&mut self, offset: u32) -> u64 {
        u64::from_le_bytes(self.read(offset))
    }

    fn write32(&mut self, offset: u32, value: u32) {
        self.link.write_device_region_no_reply(
            region_index::BAR0,
            offset.into(),
            &value.to_le_bytes(),
        );
    }

    fn write64(&mut self, offset: u32, value: u64) {
        self.link.write_device_region_no_reply(
            region_index::BAR0,
            offset.into(),
            &value.to_le_bytes(),
        );
    }

    fn doorbell(&mut self, offset: u32) -> VfioUserDoorbell {
        let sent = || VfioUserDoorbell::Sent { link: self.link.clone(), offset };
        let Some((page, area)) = &self.doorbells else { return sent() };
        let skip = u64::from(offset).wrapping_sub(area.offset);
        if skip.checked_add(4).is_none_or(|end| end > area.size) {
            return sent();
        }
        let word = Segment { region: page.id(), offset: page.offset() + skip, len_bytes: 4 };
        VfioUserDoorbell::Mapped { regions: self.regions.clone(), word, _page: Arc::clone(page) }
    }
}

impl Doorbell for VfioUserDoorbell {
    #[inline]
    fn ring(&mut self, value: u32) {
        match self {
            Self::Mapped { regions, word, .. } => {
                // In bounds: checked when the register was created.
                let _ = regions.store_u32(*word, value);
            }
            Self::Sent { link, offset } => {
                link.write_device_region_no_reply(
                    region_index::BAR0,
                    (*offset).into(),
                    &value.to_le_bytes(),
                );
            }
        }
    }
}
