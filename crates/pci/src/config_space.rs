//! PCI configuration space of a function (PCI Local Bus 3.0 §6.1, §6.7, §6.8).

/// First 256 bytes of a configuration space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciConfigSpace {
    bytes: [u8; 256],
}

/// Command register and its bits.
pub(crate) const COMMAND: u64 = 4;
const MEMORY_SPACE: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;
const CAPABILITIES: usize = 0x34;
/// Offset, count and low bits of the base address registers (§6.2.5.1).
const BARS: usize = 0x10;
const BAR_COUNT: u8 = 6;
const BAR_IO: u64 = 1;
const BAR_TYPE: u64 = 0x7;
const BAR_LONG: u64 = 0x4;
const BAR_FLAGS: u64 = 0xf;
/// Lowest offset of a capability.
const FIRST: usize = 0x40;
const MSIX: u8 = 0x11;
/// Upper bound of capabilities that fit; a longer chain is a cycle.
const CAPABILITIES_MAX: usize = 48;

impl PciConfigSpace {
    pub(crate) fn new(bytes: [u8; 256]) -> Self {
        Self { bytes }
    }

    /// Class, subclass and programming interface.
    pub fn class_code(&self) -> u32 {
        u32::from_le_bytes([self.bytes[9], self.bytes[10], self.bytes[11], 0])
    }

    /// Vendor and device identifiers.
    pub fn vendor_and_device_id(&self) -> (u16, u16) {
        (self.read_u16(0), self.read_u16(2))
    }

    /// Command register value that enables memory space and bus mastering (DMA).
    pub(crate) fn command_with_memory_and_bus_master(&self) -> u16 {
        self.read_u16(4) | MEMORY_SPACE | BUS_MASTER
    }

    /// As above, with bus mastering disabled.
    pub(crate) fn command_with_memory_only(&self) -> u16 {
        self.command_with_memory_and_bus_master() & !BUS_MASTER
    }

    /// Size of the MSI-X table.
    pub fn msix_vector_count(&self) -> u32 {
        self.find_capability(MSIX).map_or(0, |at| u32::from(self.read_u16(at + 2) & 0x7ff) + 1)
    }

    /// Bus address of BAR `index`, if it is a memory BAR with an assigned address.
    pub(crate) fn bar_address(&self, index: u8) -> Option<u64> {
        let bar = |index: u8| {
            let at = BARS + 4 * usize::from(index);
            let [low, high] = [self.read_u16(at), self.read_u16(at + 2)];
            (index < BAR_COUNT).then(|| u64::from(high) << 16 | u64::from(low))
        };
        let low = bar(index)?;
        let is_long = low & BAR_TYPE == BAR_LONG;
        let high = if is_long { bar(index + 1)? } else { 0 };
        let address = high << 32 | low & !BAR_FLAGS;
        (low & BAR_IO == 0 && address != 0).then_some(address)
    }

    fn read_u16(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    /// Offset of the capability with this identifier, if all of it is inside.
    fn find_capability(&self, id: u8) -> Option<usize> {
        let mut at = usize::from(self.bytes[CAPABILITIES] & !3);
        for _ in 0..CAPABILITIES_MAX {
            if !(FIRST..=256 - 12).contains(&at) {
                return None;
            }
            if self.bytes[at] == id {
                return Some(at);
            }
            at = usize::from(self.bytes[at + 1] & !3);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_config_space(capabilities: &[(u8, u8, u8)]) -> PciConfigSpace {
        let mut bytes = [0; 256];
        bytes[9..12].copy_from_slice(&[2, 8, 1]);
        bytes[CAPABILITIES] = capabilities.first().map_or(0, |first| first.0);
        for (at, id, next) in capabilities {
            bytes[usize::from(*at)] = *id;
            bytes[usize::from(*at) + 1] = *next;
            bytes[usize::from(*at) + 2] = 7;
        }
        PciConfigSpace::new(bytes)
    }

    #[test]
    fn msix_capability_is_found_behind_other_capabilities() {
        let found = test_config_space(&[(0x40, 1, 0x60), (0x60, 0x10, 0xb0), (0xb0, MSIX, 0)]);
        assert_eq!((found.class_code(), found.msix_vector_count()), (0x01_0802, 8));
    }

    #[test]
    fn circular_or_truncated_capability_list_has_no_vectors() {
        for lie in [
            test_config_space(&[]),
            test_config_space(&[(0x40, 1, 0x40)]),
            test_config_space(&[(0x40, 1, 0x60), (0x60, 2, 0x40)]),
            test_config_space(&[(0xf8, MSIX, 0)]),
            test_config_space(&[(0x3c, MSIX, 0)]),
        ] {
            assert_eq!(lie.msix_vector_count(), 0);
        }
    }

    #[test]
    fn memory_bar_has_its_assigned_address() {
        let mut bytes = [0; 256];
        let bars: [u32; 6] = [0xfe80_0004, 0x08, 0xc000_000c, 0, 0x0000_e001, 0xd000_0004];
        for (place, bar) in bytes[BARS..].chunks_mut(4).zip(bars) {
            place.copy_from_slice(&bar.to_le_bytes());
        }
        let found = PciConfigSpace::new(bytes);
        let addresses: Vec<_> = (0..8).map(|index| found.bar_address(index)).collect();
        let (first, third) = (Some(0x8_fe80_0000), Some(0xc000_0000));
        assert_eq!(addresses, [first, None, third, None, None, None, None, None]);
    }

    #[test]
    fn command_register_changes_only_memory_and_bus_master_bits() {
        let mut bytes = [0; 256];
        bytes[4..6].copy_from_slice(&[0x41, 0x05]);
        let found = PciConfigSpace::new(bytes);
        assert_eq!(found.command_with_memory_and_bus_master(), 0x0547);
        bytes[4..6].copy_from_slice(&found.command_with_memory_and_bus_master().to_le_bytes());
        assert_eq!(PciConfigSpace::new(bytes).command_with_memory_only(), 0x0543);
    }
}
