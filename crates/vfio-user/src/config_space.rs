//! PCI configuration space of an NVMe controller.
//!
//! ```text
//!   00h  identity, command, class 01 08 02, BAR 0 (64 bits)
//!   40h  power management
//!   50h  PCI Express: endpoint with function level reset
//!   90h  MSI-X: table and pending bits in BAR 0
//!  100h  empty
//! ```
//!
//! A write changes a byte according to its mask of writable bits; its effect on the controller is
//! returned as a [`ConfigSpaceChange`].

/// Properties of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigSpaceConfig {
    /// Vendor id, also reported by Identify.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Size of BAR 0: a power of two, at least 16 KiB.
    pub bar_bytes: u32,
    /// Number of MSI-X vectors: 1 to 2048.
    pub vectors: u16,
    /// Offset of the vector table in BAR 0.
    pub table_offset: u32,
    /// Offset of the pending bits in BAR 0.
    pub pending_offset: u32,
}

/// Configuration space of a function.
#[derive(Clone, Debug)]
pub struct ConfigSpace {
    bytes: [u8; CONVENTIONAL_BYTES],
    writable: [u8; CONVENTIONAL_BYTES],
    shape: ConfigSpaceConfig,
}

/// Effect of a configuration space write on the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigSpaceChange {
    /// None.
    Nothing,
    /// MSI-X was enabled or disabled, or all vectors were masked or unmasked.
    Vectors {
        /// Whether MSI-X is enabled.
        is_enabled: bool,
        /// Whether all vectors are masked.
        is_masked: bool,
    },
    /// The function must be reset; configuration space already is.
    Reset,
}

/// Size of configuration space in bytes.
pub const CONFIGURATION_BYTES: u64 = 4096;
const CONVENTIONAL_BYTES: usize = 256;

/// Command register (PCI Express Base 6.0 §7.5.1.1.3): memory space, bus master, parity, SERR and
/// INTx disable.
const COMMAND: usize = 0x04;
const COMMAND_WRITABLE: u16 = 1 << 1 | 1 << 2 | 1 << 6 | 1 << 8 | 1 << 10;
/// Status register: capability list present.
const STATUS: usize = 0x06;
const HAS_CAPABILITIES: u16 = 1 << 4;
/// Class code: mass storage, non-volatile memory, NVM Express I/O controller (NVMe over PCIe §3.1).
const CLASS: usize = 0x09;
const NVM_EXPRESS: [u8; 3] = [0x02, 0x08, 0x01];
const CACHE_LINE: usize = 0x0c;
const BAR0: usize = 0x10;
/// 64-bit memory BAR.
const WIDE: u32 = 1 << 2;
const SUBSYSTEM: usize = 0x2c;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;

const POWER: usize = 0x40;
/// Power management capability version 3: states D0 and D3hot only, no reset between them (§7.5.2).
const POWER_VERSION: u16 = 3;
const NO_SOFT_RESET: u16 = 1 << 3;

const EXPRESS: usize = 0x50;
/// PCI Express capability version 2, endpoint (§7.5.3.2).
const EXPRESS_VERSION: u16 = 2;
/// Device capabilities: role-based error reporting and function level reset (§7.5.3.3).
const DEVICE_CAPABILITIES: u32 = 1 << 15 | 1 << 28;
/// Device control (§7.5.3.4); bit 15 initiates a function level reset.
const DEVICE_CONTROL: usize = EXPRESS + 8;
const DEVICE_CONTROL_WRITABLE: u16 = 0x7fff;
const RESET_HIGH: u8 = 1 << 7;
/// Link of one lane at the lowest speed. No data pass through it, so the value has no meaning.
const LINK: u16 = 1 | 1 << 4;

const MSIX: usize = 0x90;
/// Message control (§7.7.2.2): MSI-X enable and function mask.
const MSIX_CONTROL: usize = MSIX + 2;
const MSIX_ENABLE: u16 = 1 << 15;
const MSIX_MASK: u16 = 1 << 14;

impl ConfigSpace {
    /// Creates a function in its state after power on.
    pub fn new(shape: ConfigSpaceConfig) -> Self {
        let (bytes, writable) = ([0; CONVENTIONAL_BYTES], [0; CONVENTIONAL_BYTES]);
        let mut function = Self { bytes, writable, shape };
        function.reset();
        function
    }

    /// Resets configuration space.
    pub fn reset(&mut self) {
        let ConfigSpaceConfig { vendor, device, bar_bytes, vectors, table_offset, pending_offset } =
            self.shape;
        (self.bytes, self.writable) = ([0; CONVENTIONAL_BYTES], [0; CONVENTIONAL_BYTES]);
        self.init_u16(0x00, vendor, 0);
        self.init_u16(0x02, device, 0);
        self.init_u16(COMMAND, 0, COMMAND_WRITABLE);
        self.init_u16(STATUS, HAS_CAPABILITIES, 0);
        self.bytes[CLASS..CLASS + 3].copy_from_slice(&NVM_EXPRESS);
        self.writable[CACHE_LINE] = 0xff;
        self.init_u32(BAR0, WIDE, !(bar_bytes - 1));
        self.init_u32(BAR0 + 4, 0, u32::MAX);
        self.init_u16(SUBSYSTEM, vendor, 0);
        self.init_u16(SUBSYSTEM + 2, device, 0);
        self.bytes[CAPABILITIES] = 0x40;
        self.writable[INTERRUPT_LINE] = 0xff;

        self.init_u16(POWER, 0x01 | 0x50 << 8, 0);
        self.init_u16(POWER + 2, POWER_VERSION, 0);
        self.init_u16(POWER + 4, NO_SOFT_RESET, 3);

        self.init_u16(EXPRESS, 0x10 | 0x90 << 8, 0);
        self.init_u16(EXPRESS + 2, EXPRESS_VERSION, 0);
        self.init_u32(EXPRESS + 4, DEVICE_CAPABILITIES, 0);
        self.init_u16(DEVICE_CONTROL, 0, DEVICE_CONTROL_WRITABLE);
        self.init_u32(EXPRESS + 12, LINK.into(), 0);
        self.init_u16(EXPRESS + 16, 0, 0x0fff);
        self.init_u16(EXPRESS + 18, LINK, 0);

        self.init_u16(MSIX, 0x11, 0);
        self.init_u16(MSIX_CONTROL, vectors.saturating_sub(1) & 0x7ff, MSIX_ENABLE | MSIX_MASK);
        // The low three bits select the BAR, which is 0.
        self.init_u32(MSIX + 4, table_offset, 0);
        self.init_u32(MSIX + 8, pending_offset, 0);
    }

    /// Reads from `offset` on. Bytes after the last capability are zero.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        for (at, byte) in into.iter_mut().enumerate() {
            *byte = from.checked_add(at).and_then(|at| self.bytes.get(at)).copied().unwrap_or(0);
        }
    }

    /// Writes from `offset` on, where writable.
    pub fn write(&mut self, offset: u64, from: &[u8]) -> ConfigSpaceChange {
        let first = usize::try_from(offset).unwrap_or(usize::MAX);
        let before = self.msix_enabled_and_masked();
        for (at, byte) in from.iter().enumerate() {
            let Some(at) = first.checked_add(at).filter(|at| *at < CONVENTIONAL_BYTES) else {
                break;
            };
            if at == DEVICE_CONTROL + 1 && byte & RESET_HIGH != 0 {
                self.reset();
                return ConfigSpaceChange::Reset;
            }
            let writable = self.writable[at];
            self.bytes[at] = self.bytes[at] & !writable | byte & writable;
        }
        let (is_enabled, is_masked) = self.msix_enabled_and_masked();
        if (is_enabled, is_masked) == before {
            return ConfigSpaceChange::Nothing;
        }
        ConfigSpaceChange::Vectors { is_enabled, is_masked }
    }

    /// Whether MSI-X is enabled, and whether all vectors are masked.
    pub fn msix_enabled_and_masked(&self) -> (bool, bool) {
        let control = u16::from_le_bytes([self.bytes[MSIX_CONTROL], self.bytes[MSIX_CONTROL + 1]]);
        (control & MSIX_ENABLE != 0, control & MSIX_MASK != 0)
    }

    fn init_u16(&mut self, at: usize, value: u16, writable: u16) {
        self.bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
        self.writable[at..at + 2].copy_from_slice(&writable.to_le_bytes());
    }

    fn init_u32(&mut self, at: usize, value: u32, writable: u32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        self.writable[at..at + 4].copy_from_slice(&writable.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::{ConfigSpace, ConfigSpaceChange, ConfigSpaceConfig};

    fn sample_config_space() -> ConfigSpace {
        ConfigSpace::new(ConfigSpaceConfig {
            vendor: 0x1234,
            device: 0x5678,
            bar_bytes: 0x4000,
            vectors: 17,
            table_offset: 0x2000,
            pending_offset: 0x3000,
        })
    }

    fn read32(function: &ConfigSpace, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        function.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn config_space_has_the_nvme_class_code() {
        let function = sample_config_space();
        assert_eq!(read32(&function, 0), 0x5678_1234);
        assert_eq!(read32(&function, 8) >> 8, 0x01_08_02);
    }

    /// How a kernel determines the size of a BAR.
    #[test]
    fn bar_length_is_probed_by_its_read_only_bits() {
        let mut function = sample_config_space();
        assert_eq!(function.write(0x10, &[0xff; 8]), ConfigSpaceChange::Nothing);
        assert_eq!((read32(&function, 0x10), read32(&function, 0x14)), (0xffff_c004, u32::MAX));
        function.write(0x10, &0x1_e000_0000_u64.to_le_bytes());
        assert_eq!((read32(&function, 0x10), read32(&function, 0x14)), (0xe000_0004, 1));
    }

    #[test]
    fn pci_capability_list_is_terminated_without_duplicates() {
        let function = sample_config_space();
        let mut at = read32(&function, 0x34) & 0xff;
        let mut found = Vec::new();
        while at != 0 {
            let head = read32(&function, at.into());
            found.push(head & 0xff);
            at = head >> 8 & 0xff;
        }
        assert_eq!(found, [0x01, 0x10, 0x11]);
        assert_eq!(read32(&function, 0x90) >> 16, 16, "one less than the vectors");
        assert_eq!((read32(&function, 0x94), read32(&function, 0x98)), (0x2000, 0x3000));
    }

    #[test]
    fn msix_control_writes_are_reported() {
        let mut function = sample_config_space();
        let switched = |is_enabled, is_masked| ConfigSpaceChange::Vectors { is_enabled, is_masked };
        assert_eq!(function.write(0x92, &[0, 0x80]), switched(true, false));
        assert_eq!(function.write(0x92, &[0, 0x80]), ConfigSpaceChange::Nothing);
        assert_eq!(function.write(0x93, &[0xc0]), switched(true, true));
        assert_eq!(function.write(0x04, &[6, 0]), ConfigSpaceChange::Nothing);
        assert_eq!(read32(&function, 4) & 0xffff, 6);
        assert_eq!(read32(&function, 0x90) >> 16 & 0x7ff, 16, "the size stays");
    }

    #[test]
    fn reset_restores_the_initial_config_space() {
        let mut function = sample_config_space();
        function.write(0x92, &[0, 0x80]);
        function.write(0x10, &[0xff; 8]);
        assert_eq!(function.write(0x58, &[0, 0x80]), ConfigSpaceChange::Reset);
        let (mut found, mut fresh) = ([0; 4096], [0; 4096]);
        function.read(0, &mut found);
        sample_config_space().read(0, &mut fresh);
        assert_eq!(found, fresh);
    }

    #[test]
    fn config_space_access_beyond_the_end_is_ignored() {
        let mut function = sample_config_space();
        assert_eq!(function.write(254, &[0xff; 8]), ConfigSpaceChange::Nothing);
        assert_eq!(function.write(u64::MAX, &[0xff; 8]), ConfigSpaceChange::Nothing);
        let mut bytes = [7; 4];
        function.read(u64::MAX, &mut bytes);
        assert_eq!(bytes, [0; 4]);
    }
}
