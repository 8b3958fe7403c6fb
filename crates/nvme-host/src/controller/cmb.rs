//! Controller memory buffer (CMB, Base 2.1 §8.2.1): controller memory in one of its BARs, used for
//! submission queue rings.
//!
//! ```text
//!   CMBLOC, CMBSZ          location: BAR, offset, length
//!      '-- mapped          Dma::device_memory
//!            '-- CMBMSC    the address range is programmed
//!                  '-- a ring in whole pages for each queue pair, as long as there are any
//! ```
//!
//! Before 1.4, the two registers are always readable, and the controller recognizes its buffer by the
//! address of the BAR. Since then (CAP.CMBS), they are readable once CMBMSC.CRE is set, and addresses
//! from CMBMSC.CBA on belong to the buffer once CMSE is set. The driver programs the address of the BAR,
//! so rings have the same addresses either way, and no host memory ever has them.
//!
//! CMBMSC survives a reset by CC.EN, but no other reset, so it is written at every initialization.

use core::fmt;
use std::collections::BTreeMap;

use tenmil_base::{BarMapError, BarRange, Dma, Mmio, Segment};
use tenmil_wire::register::{
    ALL_ONES, MemoryBufferControl, MemoryBufferLocation, MemoryBufferSize, MemoryBufferStatus,
};

use super::{Controller, QueueTransports};
use crate::bringup::{BringupError, Register};
use crate::error::{CmbRegisterError, ControllerError, InvalidValue};
use crate::queue_pair::QueueMemory;

/// Use of a controller memory buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CmbMode {
    /// Its registers are not accessed.
    #[default]
    Ignored,
    /// Its registers are enabled, and its address range is disabled: a previous driver may have
    /// programmed one.
    Enabled,
    /// Rings of I/O submission queues are placed there, as long as there is space.
    SubmissionQueues,
}

/// Reason why a ring requested in the controller memory buffer is in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CmbUnavailable {
    /// There is no buffer (CMBSZ.SZ is 0).
    Absent,
    /// It does not support submission queues (CMBSZ.SQS is 0).
    NoQueues,
    /// It cannot be mapped.
    Unusable {
        /// Reason.
        why: &'static str,
    },
    /// The controller rejects the address of the BAR (CMBSTS.CBAI).
    AddressRefused {
        /// That address.
        address: u64,
    },
    /// It is full.
    Full {
        /// Free bytes, which may be fragmented.
        free_bytes: u64,
        /// Contiguous bytes requested.
        len_bytes: u32,
    },
}

/// State of a controller's buffer, as far as it is known.
#[derive(Debug, Default)]
pub(super) enum CmbState {
    /// Not checked yet.
    #[default]
    Unknown,
    /// Not usable for rings.
    Unused(CmbUnavailable),
    /// In use for rings.
    Open(OpenCmb),
}

/// Mapped buffer with rings.
#[derive(Debug)]
pub(super) struct OpenCmb {
    /// Values of CMBLOC and CMBSZ when it was mapped.
    registers: [u32; 2],
    memory: Segment,
    /// Device address of its first byte.
    address: u64,
    pages: PageRunAllocator,
}

/// Allocated pages: start and length of each run.
#[derive(Debug)]
struct PageRunAllocator {
    count: u32,
    taken: BTreeMap<u32, u32>,
}

const PAGE: u32 = 4096;
/// Largest defined size unit: 64 GiB.
const UNIT_MAX: u8 = 6;

impl<M: Mmio, D: Dma, Q: QueueTransports<M, D>> Controller<M, D, Q> {
    /// Applies the configured use of the buffer. The controller has just become ready, and has no I/O
    /// queue.
    pub(super) fn configure_cmb(&mut self, has_control: bool) -> Result<(), ControllerError> {
        let wanted = self.options.memory_buffer;
        if wanted == CmbMode::Ignored {
            return Ok(());
        }
        if has_control {
            self.write_cmbmsc(MemoryBufferControl::zeroed().with(|it| it.cre(true)));
        }
        if wanted == CmbMode::Enabled {
            return Ok(());
        }
        let size = self.read_cmb_register(Register::Cmbsz)?;
        let location = self.read_cmb_register(Register::Cmbloc)?;
        let registers = [location, size];
        match &self.buffer {
            CmbState::Unknown => {
                self.buffer = self.find_cmb(registers, has_control)?;
                Ok(())
            }
            CmbState::Unused(_) => Ok(()),
            // After a reset, rings still use the old address, so the buffer must not have moved.
            CmbState::Open(open) => {
                let address = open.address;
                if open.registers != registers {
                    return Err(location_changed_error(registers).into());
                }
                match has_control && !self.program_cmb_address(address)? {
                    true => Err(address_not_retained_error(address).into()),
                    false => Ok(()),
                }
            }
        }
    }

    fn find_cmb(
        &mut self,
        registers: [u32; 2],
        has_control: bool,
    ) -> Result<CmbState, ControllerError> {
        let unused = |why| Ok(CmbState::Unused(why));
        let [location, size] = registers;
        let Some(part) = cmb_bar_range(MemoryBufferLocation(location), MemoryBufferSize(size))?
        else {
            return unused(CmbUnavailable::Absent);
        };
        if !MemoryBufferSize(size).sqs() {
            return unused(CmbUnavailable::NoQueues);
        }
        let memory = match self.dma.device_memory(part) {
            Ok(memory) => memory,
            Err(BarMapError::Unusable { reason: why }) => {
                return unused(CmbUnavailable::Unusable { why });
            }
            Err(BarMapError::OutOfRange { bar_bytes }) => {
                let end = part.offset + part.len_bytes;
                return Err(CmbRegisterError::OutOfBar { bar: part.bar, end, bar_bytes }.into());
            }
        };
        let Some(address) = self.dma.iova(memory) else {
            return unused(CmbUnavailable::Unusable { why: "it has no address" });
        };
        if has_control && !self.program_cmb_address(address)? {
            return unused(CmbUnavailable::AddressRefused { address });
        }
        let pages = PageRunAllocator { count: memory.len_bytes / PAGE, taken: BTreeMap::new() };
        Ok(CmbState::Open(OpenCmb { registers, memory, address, pages }))
    }

    /// Programs the address of the buffer. Returns false if the controller rejects it.
    fn program_cmb_address(&mut self, address: u64) -> Result<bool, ControllerError> {
        let shown = MemoryBufferControl::zeroed().with(|it| it.cre(true));
        let cba = address / u64::from(PAGE);
        self.write_cmbmsc(shown.with(|it| it.cmse(true).cba(cba)));
        let status = MemoryBufferStatus(self.read_cmb_register(Register::Cmbsts)?);
        if status.cbai() {
            self.write_cmbmsc(shown);
        }
        Ok(!status.cbai())
    }

    /// Writes CMBMSC, upper half first: the address takes effect when the lower half with CMSE is
    /// written.
    fn write_cmbmsc(&mut self, value: MemoryBufferControl) {
        let (at, halves) = (Register::Cmbmsc.offset(), value.0.to_le_bytes());
        let [a, b, c, d, e, f, g, h] = halves;
        self.mmio.write32(at + 4, u32::from_le_bytes([e, f, g, h]));
        self.mmio.write32(at, u32::from_le_bytes([a, b, c, d]));
    }

    fn read_cmb_register(&mut self, register: Register) -> Result<u32, ControllerError> {
        match self.mmio.read32(register.offset()) {
            ALL_ONES => Err(BringupError::Removed { register }.into()),
            value => Ok(value),
        }
    }

    /// Allocates two rings of `depth` entries. Also returns why the submission ring is not in the buffer,
    /// if it was requested there.
    pub(super) fn allocate_rings(
        &mut self,
        depth: u32,
    ) -> (Option<QueueMemory>, Option<CmbUnavailable>) {
        let in_host = |dma: &D| QueueMemory::allocate(dma, depth, depth);
        let why = match &mut self.buffer {
            CmbState::Unknown => return (in_host(&self.dma), None),
            CmbState::Unused(why) => *why,
            CmbState::Open(open) => {
                match open.allocate(QueueMemory::submission_ring_bytes(depth)) {
                    Ok(submission) => {
                        let memory = QueueMemory::allocate_with_submission_ring(
                            &self.dma, submission, depth, depth,
                        );
                        if memory.is_none() {
                            open.release_ring(submission);
                        }
                        return (memory, None);
                    }
                    Err(why) => why,
                }
            }
        };
        (in_host(&self.dma), Some(why))
    }
}

impl CmbState {
    /// Frees the rings of a queue pair that has been deleted from the device.
    pub(super) fn release<D: Dma>(&mut self, dma: &D, memory: QueueMemory) {
        match self {
            Self::Open(open) if memory.is_in_device => {
                open.release_ring(memory.submission);
                dma.release(memory.completion);
            }
            _ => memory.release(dma),
        }
    }
}

impl OpenCmb {
    fn allocate(&mut self, len_bytes: u32) -> Result<Segment, CmbUnavailable> {
        let first = self.pages.allocate(len_bytes.div_ceil(PAGE));
        let segment = first.and_then(|first| self.memory.slice(first * PAGE, len_bytes));
        segment.ok_or_else(|| CmbUnavailable::Full {
            free_bytes: u64::from(self.pages.free_count()) * u64::from(PAGE),
            len_bytes,
        })
    }

    fn release_ring(&mut self, ring: Segment) {
        let skip = ring.offset - self.memory.offset;
        // The ring was allocated here, so the offset is within the length of a segment.
        self.pages.taken.remove(&u32::try_from(skip / u64::from(PAGE)).unwrap_or(u32::MAX));
    }
}

impl PageRunAllocator {
    /// Allocates the first sufficiently long run of free pages.
    fn allocate(&mut self, wanted: u32) -> Option<u32> {
        let mut first = 0;
        for (start, count) in &self.taken {
            if start - first >= wanted {
                break;
            }
            first = start + count;
        }
        let fits = wanted <= self.count - first;
        fits.then(|| {
            self.taken.insert(first, wanted);
            first
        })
    }

    fn free_count(&self) -> u32 {
        self.count - self.taken.values().sum::<u32>()
    }
}

/// Part of a BAR that contains the buffer, if there is one.
fn cmb_bar_range(
    location: MemoryBufferLocation,
    size: MemoryBufferSize,
) -> Result<Option<BarRange>, CmbRegisterError> {
    let lie = |field, found: u8, expected| {
        CmbRegisterError::Field(InvalidValue { field, found: found.into(), expected })
    };
    if size.sz() == 0 {
        return Ok(None);
    }
    // With a defined unit, neither offset nor length can overflow 64 bits.
    let sizes = size.unit_bytes().zip(size.len_bytes()).filter(|_| size.szu() <= UNIT_MAX);
    let Some((unit, len_bytes)) = sizes else {
        return Err(lie("CMBSZ.SZU", size.szu(), "at most 6: units of 64 GiB"));
    };
    match location.bir() {
        bar @ (0 | 2..=5) => {
            Ok(Some(BarRange { bar, offset: unit * u64::from(location.ofst()), len_bytes }))
        }
        bar => Err(lie("CMBLOC.BIR", bar, "0 or 2 to 5")),
    }
}

fn location_changed_error([location, size]: [u32; 2]) -> CmbRegisterError {
    let found = u64::from(size) << 32 | u64::from(location);
    let expected = "what they were before the reset, as queues lie there";
    CmbRegisterError::Field(InvalidValue { field: "CMBLOC and CMBSZ above it", found, expected })
}

fn address_not_retained_error(address: u64) -> CmbRegisterError {
    let (field, expected) = ("CMBMSC.CBA", "to be taken as before the reset");
    CmbRegisterError::Field(InvalidValue { field, found: address, expected })
}

impl fmt::Display for CmbUnavailable {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => out.write_str("there is no controller memory buffer (CMBSZ.SZ is 0)"),
            Self::NoQueues => out.write_str(
                "the controller memory buffer takes no submission queues (CMBSZ.SQS is 0)",
            ),
            Self::Unusable { why } => {
                write!(out, "the controller memory buffer is of no use: {why}")
            }
            Self::AddressRefused { address } => write!(
                out,
                "the controller does not take {address:#x} for its memory buffer (CMBSTS.CBAI is 1)"
            ),
            Self::Full { free_bytes, len_bytes } => write!(
                out,
                "the controller memory buffer has {free_bytes} bytes left, expected {len_bytes} in \
                 a row"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use tenmil_base::BarRange;
    use tenmil_wire::register::{MemoryBufferLocation, MemoryBufferSize};

    use super::{PageRunAllocator, cmb_bar_range};

    fn bar_range(location: u32, size: u32) -> Result<Option<BarRange>, String> {
        let found = cmb_bar_range(MemoryBufferLocation(location), MemoryBufferSize(size));
        found.map_err(|lie| lie.to_string())
    }

    #[test]
    fn cmb_registers_yield_a_bar_range_or_an_error() {
        // 4 MiB in units of 1 MiB, at the third unit of BAR 2.
        let part = BarRange { bar: 2, offset: 3 << 20, len_bytes: 4 << 20 };
        assert_eq!(bar_range(3 << 12 | 2, 4 << 12 | 2 << 8 | 1), Ok(Some(part)));
        assert_eq!(
            bar_range(3 << 12 | 7, 2 << 8 | 1),
            Ok(None),
            "without a length nothing else counts"
        );
        for bir in [1, 6, 7] {
            let text = format!("CMBLOC.BIR is {bir:#x}, expected 0 or 2 to 5");
            assert_eq!(bar_range(bir, 1 << 12), Err(text));
        }
        for unit in 7..16 {
            let text = format!("CMBSZ.SZU is {unit:#x}, expected at most 6: units of 64 GiB");
            assert_eq!(bar_range(0, 1 << 12 | unit << 8), Err(text));
        }
        let most = bar_range(0xffff_f005, 0xffff_f600).unwrap().unwrap();
        assert_eq!((most.offset, most.len_bytes), (0xf_ffff << 36, 0xf_ffff << 36));
    }

    #[test]
    fn pages_are_allocated_once_and_released() {
        let mut pages = PageRunAllocator { count: 8, taken: BTreeMap::new() };
        let taken = [3, 2, 3].map(|count| pages.allocate(count));
        assert_eq!(taken, [Some(0), Some(3), Some(5)]);
        assert_eq!((pages.allocate(1), pages.free_count()), (None, 0));
        pages.taken.remove(&3);
        assert_eq!(
            (pages.allocate(3), pages.allocate(1), pages.allocate(1)),
            (None, Some(3), Some(4))
        );
        pages.taken.remove(&0);
        assert_eq!((pages.allocate(4), pages.allocate(3), pages.free_count()), (None, Some(0), 0));
    }
}
