//! BAR 0 of a function.

use base::{Doorbell, Memory, Mmio, Segment};
use vfio::Bar;

/// Registers. Those of a function that was pulled read as ones.
pub(super) struct Registers {
    bar: Bar,
}

/// One doorbell.
pub(super) struct Register {
    bar: Bar,
    /// None if the BAR is too short for it; then nobody hears it.
    word: Option<Segment>,
}

impl Registers {
    pub(super) fn new(bar: Bar) -> Self {
        Self { bar }
    }
}

impl Mmio for Registers {
    type Doorbell = Register;

    fn read32(&mut self, offset: u32) -> u32 {
        let word = self.bar.word(offset);
        let read = word.and_then(|word| self.bar.regions().load_u32(word).ok());
        // What is read after the kernel took the BAR away is not the function's.
        if self.bar.has_failed() { u32::MAX } else { read.unwrap_or(u32::MAX) }
    }

    /// Two halves, the lower one first, as any controller has to allow (PCIe Transport 1.0 §3.1).
    fn read64(&mut self, offset: u32) -> u64 {
        let low = self.read32(offset);
        u64::from(self.read32(offset + 4)) << 32 | u64::from(low)
    }

    fn write32(&mut self, offset: u32, value: u32) {
        if let Some(word) = self.bar.word(offset) {
            // It lies inside: that was just looked at.
            let _ = self.bar.regions().store_u32(word, value);
        }
    }

    fn write64(&mut self, offset: u32, value: u64) {
        let [low, high] = [value & u64::from(u32::MAX), value >> 32];
        self.write32(offset, u32::try_from(low).unwrap_or(0));
        self.write32(offset + 4, u32::try_from(high).unwrap_or(0));
    }

    fn doorbell(&mut self, offset: u32) -> Register {
        Register { bar: self.bar.clone(), word: self.bar.word(offset) }
    }
}

impl Doorbell for Register {
    #[inline]
    fn ring(&mut self, value: u32) {
        if let Some(word) = self.word {
            // It lies inside: that was looked at when it was made.
            let _ = self.bar.regions().store_u32(word, value);
        }
    }
}
