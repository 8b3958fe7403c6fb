//! What the configuration space of a function says (PCI Local Bus 3.0 §6.1, §6.7, §6.8).

/// The first 256 bytes of a configuration space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Configuration {
    bytes: [u8; 256],
}

/// The command register and its bits.
pub(crate) const COMMAND: u64 = 4;
const MEMORY_SPACE: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;
const CAPABILITIES: usize = 0x34;
/// Where the first capability may lie.
const FIRST: usize = 0x40;
const MSIX: u8 = 0x11;
/// More capabilities than that do not fit, so there is a circle.
const CAPABILITIES_MAX: usize = 48;

impl Configuration {
    pub(crate) fn new(bytes: [u8; 256]) -> Self {
        Self { bytes }
    }

    /// Class, subclass and programming interface.
    pub fn class(&self) -> u32 {
        u32::from_le_bytes([self.bytes[9], self.bytes[10], self.bytes[11], 0])
    }

    /// Vendor and device.
    pub fn identity(&self) -> (u16, u16) {
        (self.word(0), self.word(2))
    }

    /// What the command register is to be so that memory space answers and the function may reach
    /// memory.
    pub(crate) fn command_on(&self) -> u16 {
        self.word(4) | MEMORY_SPACE | BUS_MASTER
    }

    /// The same, with the function reaching no memory.
    pub(crate) fn command_quiet(&self) -> u16 {
        self.word(4) & !BUS_MASTER
    }

    /// How many vectors its table of MSI-X has.
    pub fn vectors(&self) -> u32 {
        self.capability(MSIX).map_or(0, |at| u32::from(self.word(at + 2) & 0x7ff) + 1)
    }

    fn word(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    /// Where the capability with this identifier lies, if all of it is there.
    fn capability(&self, id: u8) -> Option<usize> {
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

    fn space(capabilities: &[(u8, u8, u8)]) -> Configuration {
        let mut bytes = [0; 256];
        bytes[9..12].copy_from_slice(&[2, 8, 1]);
        bytes[CAPABILITIES] = capabilities.first().map_or(0, |first| first.0);
        for (at, id, next) in capabilities {
            bytes[usize::from(*at)] = *id;
            bytes[usize::from(*at) + 1] = *next;
            bytes[usize::from(*at) + 2] = 7;
        }
        Configuration::new(bytes)
    }

    #[test]
    fn vectors_are_found_behind_other_capabilities() {
        let found = space(&[(0x40, 1, 0x60), (0x60, 0x10, 0xb0), (0xb0, MSIX, 0)]);
        assert_eq!((found.class(), found.vectors()), (0x01_0802, 8));
    }

    #[test]
    fn a_circle_or_a_capability_that_does_not_fit_has_no_vectors() {
        for lie in [
            space(&[]),
            space(&[(0x40, 1, 0x40)]),
            space(&[(0x40, 1, 0x60), (0x60, 2, 0x40)]),
            space(&[(0xf8, MSIX, 0)]),
            space(&[(0x3c, MSIX, 0)]),
        ] {
            assert_eq!(lie.vectors(), 0);
        }
    }

    #[test]
    fn the_command_register_is_changed_by_its_two_bits_only() {
        let mut bytes = [0; 256];
        bytes[4..6].copy_from_slice(&[0x41, 0x05]);
        let found = Configuration::new(bytes);
        assert_eq!(found.command_on(), 0x0547);
        bytes[4..6].copy_from_slice(&found.command_on().to_le_bytes());
        assert_eq!(Configuration::new(bytes).command_quiet(), 0x0543);
    }
}
