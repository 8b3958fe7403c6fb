//! BAR 0 of the other process's controller.

use std::sync::Arc;

use base::{Doorbell, Memory, Mmio, Segment};
use dma::{Adopted, Regions};
use vfu::{Area, region_index};

use super::link::Link;

/// Registers by message, and doorbells by whichever way there is.
pub(super) struct Registers {
    link: Link,
    regions: Regions,
    doorbells: Option<(Arc<Adopted>, Area)>,
}

/// One doorbell.
pub(super) enum Register {
    /// A word that the other process looks at.
    Mapped {
        /// Whose region it is in.
        regions: Regions,
        /// The word.
        word: Segment,
        /// Kept as long as it can be rung.
        _page: Arc<Adopted>,
    },
    /// A message that wakes the other process.
    Sent {
        /// By which connection.
        link: Link,
        /// Where in BAR 0.
        offset: u32,
    },
}

impl Registers {
    pub(super) fn new(
        link: Link,
        regions: &Regions,
        doorbells: Option<(Arc<Adopted>, Area)>,
    ) -> Self {
        Self { link, regions: regions.clone(), doorbells }
    }

    /// What is not there any more reads as ones, like a device that was pulled.
    fn read<const N: usize>(&self, offset: u32) -> [u8; N] {
        let len = u32::try_from(N).unwrap_or(0);
        let read = self.link.read(region_index::BAR0, offset.into(), len);
        let bytes = read.ok().and_then(|bytes| <[u8; N]>::try_from(bytes).ok());
        bytes.unwrap_or([0xff; N])
    }
}

impl Mmio for Registers {
    type Doorbell = Register;

    fn read32(&mut self, offset: u32) -> u32 {
        u32::from_le_bytes(self.read(offset))
    }

    fn read64(&mut self, offset: u32) -> u64 {
        u64::from_le_bytes(self.read(offset))
    }

    fn write32(&mut self, offset: u32, value: u32) {
        self.link.post(region_index::BAR0, offset.into(), &value.to_le_bytes());
    }

    fn write64(&mut self, offset: u32, value: u64) {
        self.link.post(region_index::BAR0, offset.into(), &value.to_le_bytes());
    }

    fn doorbell(&mut self, offset: u32) -> Register {
        let sent = || Register::Sent { link: self.link.clone(), offset };
        let Some((page, area)) = &self.doorbells else { return sent() };
        let skip = u64::from(offset).wrapping_sub(area.offset);
        if skip.checked_add(4).is_none_or(|end| end > area.size) {
            return sent();
        }
        let word = Segment { region: page.id(), offset: page.offset() + skip, len_bytes: 4 };
        Register::Mapped { regions: self.regions.clone(), word, _page: Arc::clone(page) }
    }
}

impl Doorbell for Register {
    #[inline]
    fn ring(&mut self, value: u32) {
        match self {
            Self::Mapped { regions, word, .. } => {
                // It lies inside: that was looked at when it was made.
                let _ = regions.store_u32(*word, value);
            }
            Self::Sent { link, offset } => {
                link.post(region_index::BAR0, (*offset).into(), &value.to_le_bytes());
            }
        }
    }
}
