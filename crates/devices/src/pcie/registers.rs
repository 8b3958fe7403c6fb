//! BAR 0 of a function.

use tenmil_base::{Doorbell, Memory, Mmio, Segment};
use tenmil_pci::MappedBar;

/// Controller registers. Those of a removed function read as ones.
pub(super) struct Registers {
    bar: MappedBar,
}

/// One doorbell register.
pub(super) struct BarDoorbell {
    bar: MappedBar,
    /// None if the BAR is too short for it. Writes are ignored then.
    word: Option<Segment>,
}

impl Registers {
    pub(super) fn new(bar: MappedBar) -> Self {
        Self { bar }
    }
}

impl Mmio for Registers {
    type Doorbell = BarDoorbell;

    fn read32(&mut self, offset: u32) -> u32 {
        let word = self.bar.register_segment(offset);
        let read = word.and_then(|word| self.bar.regions().load_u32(word).ok());
        // A value read after the BAR was revoked does not come from the function.
        if self.bar.has_access_failed() { u32::MAX } else { read.unwrap_or(u32::MAX) }
    }

    /// Reads two halves, the lower one first, which every controller supports (PCIe Transport 1.0
    /// §3.1).
    fn read64(&mut self, offset: u32) -> u64 {
        let low = self.read32(offset);
        u64::from(self.read32(offset + 4)) << 32 | u64::from(low)
    }

    fn write32(&mut self, offset: u32, value: u32) {
        if let Some(word) = self.bar.register_segment(offset) {
            // In bounds: checked above.
            let _ = self.bar.regions().store_u32(word, value);
        }
    }

    fn write64(&mut self, offset: u32, value: u64) {
        let [low, high] = [value & u64::from(u32::MAX), value >> 32];
        self.write32(offset, u32::try_from(low).unwrap_or(0));
        self.write32(offset + 4, u32::try_from(high).unwrap_or(0));
    }

    fn doorbell(&mut self, offset: u32) -> BarDoorbell {
        BarDoorbell { bar: self.bar.clone(), word: self.bar.register_segment(offset) }
    }
}

impl Doorbell for BarDoorbell {
    #[inline]
    fn ring(&mut self, value: u32) {
        if let Some(word) = self.word {
            // In bounds: checked when the register was created.
            let _ = self.bar.regions().store_u32(word, value);
        }
    }
}
