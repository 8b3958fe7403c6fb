//! The controller memory buffer (CMB, Base 2.1 §8.2.1): memory of the controller's own in one of its
//! BARs, with rings of submission queues in it.
//!
//! ```text
//!   CMBLOC, CMBSZ          where it is: BAR, offset, length
//!      '-- mapped          Dma::device_memory
//!            '-- CMBMSC    the controller is told at which addresses it is
//!                  '-- a ring in whole pages for each queue pair, as long as there are any
//! ```
//!
//! Before 1.4 the two registers can be read at any time, and the controller knows its buffer by the
//! address of the BAR. Since then (CAP.CMBS) they can be read once CMBMSC.CRE is set, and addresses
//! that begin at CMBMSC.CBA are the buffer's once CMSE is set. The address of the BAR is what it is
//! told, so that rings have the same addresses either way, and no memory of the host ever has them.
//!
//! CMBMSC outlives a reset by CC.EN, but no other, so it is written each time a controller comes up.

use core::fmt;
use std::collections::BTreeMap;

use base::{BarPart, Dma, Mmio, NoDeviceMemory, Segment};
use wire::register::{
    ALL_ONES, MemoryBufferControl, MemoryBufferLocation, MemoryBufferSize, MemoryBufferStatus,
};

use super::Controller;
use crate::bringup::{BringupError, Register};
use crate::error::{BufferLie, ControllerError, Lie};
use crate::queue_pair::QueueMemory;

/// What is done with a controller memory buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryBufferUse {
    /// None of its registers is touched.
    #[default]
    Ignored,
    /// It is told to show its registers, and to take no address for its own: whoever had the
    /// controller before may have told it some.
    Shown,
    /// Rings of I/O submission queues lie there, as long as there is room.
    Queues,
}

/// Why a ring that was to lie in the controller memory buffer lies in the host's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotInBuffer {
    /// There is no buffer (CMBSZ.SZ is 0).
    Absent,
    /// It is for other things than submission queues (CMBSZ.SQS is 0).
    NoQueues,
    /// It cannot be mapped.
    Unusable {
        /// What stands in the way.
        why: &'static str,
    },
    /// The controller would not have it at the address of its BAR (CMBSTS.CBAI).
    AddressRefused {
        /// That address.
        address: u64,
    },
    /// There is no room in it.
    NoRoom {
        /// How much is left, perhaps in several pieces.
        free_bytes: u64,
        /// How much was wanted in a row.
        len_bytes: u32,
    },
}

/// The buffer of a controller, as far as it is known.
#[derive(Debug, Default)]
pub(super) enum MemoryBuffer {
    /// Nobody has looked.
    #[default]
    Unknown,
    /// No ring can ever lie there.
    Unused(NotInBuffer),
    /// Rings lie there.
    Open(Open),
}

/// A buffer in which rings lie.
#[derive(Debug)]
pub(super) struct Open {
    /// CMBLOC and CMBSZ as they were.
    registers: [u32; 2],
    memory: Segment,
    /// Where the controller finds its first byte.
    address: u64,
    pages: Pages,
}

/// Which pages are taken: where each run begins, and how long it is.
#[derive(Debug)]
struct Pages {
    count: u32,
    taken: BTreeMap<u32, u32>,
}

const PAGE: u32 = 4096;
/// The largest unit that is defined: 64 GiB.
const UNIT_MAX: u8 = 6;

impl<M: Mmio, D: Dma> Controller<M, D> {
    /// Does with the buffer what the options say. The controller has just become ready, and has no
    /// I/O queue.
    pub(super) fn open_buffer(&mut self, has_control: bool) -> Result<(), ControllerError> {
        let wanted = self.options.memory_buffer;
        if wanted == MemoryBufferUse::Ignored {
            return Ok(());
        }
        if has_control {
            self.control_buffer(MemoryBufferControl::zeroed().with(|it| it.cre(true)));
        }
        if wanted == MemoryBufferUse::Shown {
            return Ok(());
        }
        let size = self.buffer_register(Register::Cmbsz)?;
        let location = self.buffer_register(Register::Cmbloc)?;
        let registers = [location, size];
        match &self.buffer {
            MemoryBuffer::Unknown => {
                self.buffer = self.find_buffer(registers, has_control)?;
                Ok(())
            }
            MemoryBuffer::Unused(_) => Ok(()),
            MemoryBuffer::Open(open) => {
                let address = open.address;
                if open.registers != registers {
                    return Err(changed(registers).into());
                }
                match has_control && !self.tell_address(address)? {
                    true => Err(forgotten(address).into()),
                    false => Ok(()),
                }
            }
        }
    }

    fn find_buffer(
        &mut self,
        registers: [u32; 2],
        has_control: bool,
    ) -> Result<MemoryBuffer, ControllerError> {
        let unused = |why| Ok(MemoryBuffer::Unused(why));
        let [location, size] = registers;
        let Some(part) = part_of(MemoryBufferLocation(location), MemoryBufferSize(size))? else {
            return unused(NotInBuffer::Absent);
        };
        if !MemoryBufferSize(size).sqs() {
            return unused(NotInBuffer::NoQueues);
        }
        let memory = match self.dma.device_memory(part) {
            Ok(memory) => memory,
            Err(NoDeviceMemory::Unusable { why }) => return unused(NotInBuffer::Unusable { why }),
            Err(NoDeviceMemory::Outside { bar_bytes }) => {
                let end = part.offset + part.len_bytes;
                return Err(BufferLie::Outside { bar: part.bar, end, bar_bytes }.into());
            }
        };
        let Some(address) = self.dma.iova(memory) else {
            return unused(NotInBuffer::Unusable { why: "it has no address" });
        };
        if has_control && !self.tell_address(address)? {
            return unused(NotInBuffer::AddressRefused { address });
        }
        let pages = Pages { count: memory.len_bytes / PAGE, taken: BTreeMap::new() };
        Ok(MemoryBuffer::Open(Open { registers, memory, address, pages }))
    }

    /// Tells the controller at which address its buffer is. False if it does not want that.
    fn tell_address(&mut self, address: u64) -> Result<bool, ControllerError> {
        let shown = MemoryBufferControl::zeroed().with(|it| it.cre(true));
        let cba = address / u64::from(PAGE);
        self.control_buffer(shown.with(|it| it.cmse(true).cba(cba)));
        let status = MemoryBufferStatus(self.buffer_register(Register::Cmbsts)?);
        if status.cbai() {
            self.control_buffer(shown);
        }
        Ok(!status.cbai())
    }

    /// Writes CMBMSC, the half with most of the address first: it counts from the moment at which the
    /// other one, with CMSE in it, has come.
    fn control_buffer(&mut self, value: MemoryBufferControl) {
        let (at, halves) = (Register::Cmbmsc.offset(), value.0.to_le_bytes());
        let [a, b, c, d, e, f, g, h] = halves;
        self.mmio.write32(at + 4, u32::from_le_bytes([e, f, g, h]));
        self.mmio.write32(at, u32::from_le_bytes([a, b, c, d]));
    }

    fn buffer_register(&mut self, register: Register) -> Result<u32, ControllerError> {
        match self.mmio.read32(register.offset()) {
            ALL_ONES => Err(BringupError::Gone { register }.into()),
            value => Ok(value),
        }
    }

    /// Memory for two rings of `depth` entries, and why the submission ring does not lie in the
    /// buffer if it was to.
    pub(super) fn allocate_rings(
        &mut self,
        depth: u32,
    ) -> (Option<QueueMemory>, Option<NotInBuffer>) {
        let in_host = |dma: &D| QueueMemory::allocate(dma, depth, depth);
        let why = match &mut self.buffer {
            MemoryBuffer::Unknown => return (in_host(&self.dma), None),
            MemoryBuffer::Unused(why) => *why,
            MemoryBuffer::Open(open) => match open.take(QueueMemory::submission_bytes(depth)) {
                Ok(submission) => {
                    let memory = QueueMemory::beside(&self.dma, submission, depth, depth);
                    if memory.is_none() {
                        open.give_back(submission);
                    }
                    return (memory, None);
                }
                Err(why) => why,
            },
        };
        (in_host(&self.dma), Some(why))
    }
}

impl MemoryBuffer {
    /// Gives back the rings of a queue pair that is gone from the device.
    pub(super) fn release<D: Dma>(&mut self, dma: &D, memory: QueueMemory) {
        match self {
            Self::Open(open) if memory.is_in_device => {
                open.give_back(memory.submission);
                dma.release(memory.completion);
            }
            _ => memory.release(dma),
        }
    }
}

impl Open {
    fn take(&mut self, len_bytes: u32) -> Result<Segment, NotInBuffer> {
        let first = self.pages.take(len_bytes.div_ceil(PAGE));
        let segment = first.and_then(|first| self.memory.slice(first * PAGE, len_bytes));
        segment.ok_or_else(|| NotInBuffer::NoRoom {
            free_bytes: u64::from(self.pages.free()) * u64::from(PAGE),
            len_bytes,
        })
    }

    fn give_back(&mut self, ring: Segment) {
        let skip = ring.offset - self.memory.offset;
        // It was taken from here, so it begins within a segment's length.
        self.pages.taken.remove(&u32::try_from(skip / u64::from(PAGE)).unwrap_or(u32::MAX));
    }
}

impl Pages {
    /// The first of so many free pages in a row, which are taken now.
    fn take(&mut self, wanted: u32) -> Option<u32> {
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

    fn free(&self) -> u32 {
        self.count - self.taken.values().sum::<u32>()
    }
}

/// The part of a BAR that is the buffer, if there is one.
fn part_of(
    location: MemoryBufferLocation,
    size: MemoryBufferSize,
) -> Result<Option<BarPart>, BufferLie> {
    let lie =
        |field, found: u8, expected| BufferLie::Field(Lie { field, found: found.into(), expected });
    if size.sz() == 0 {
        return Ok(None);
    }
    // A unit that is defined makes neither an offset nor a length that is too much for 64 bits.
    let sizes = size.unit_bytes().zip(size.len_bytes()).filter(|_| size.szu() <= UNIT_MAX);
    let Some((unit, len_bytes)) = sizes else {
        return Err(lie("CMBSZ.SZU", size.szu(), "at most 6: units of 64 GiB"));
    };
    match location.bir() {
        bar @ (0 | 2..=5) => {
            Ok(Some(BarPart { bar, offset: unit * u64::from(location.ofst()), len_bytes }))
        }
        bar => Err(lie("CMBLOC.BIR", bar, "0 or 2 to 5")),
    }
}

fn changed([location, size]: [u32; 2]) -> BufferLie {
    let found = u64::from(size) << 32 | u64::from(location);
    let expected = "what they were before the reset, as queues lie there";
    BufferLie::Field(Lie { field: "CMBLOC and CMBSZ above it", found, expected })
}

fn forgotten(address: u64) -> BufferLie {
    let (field, expected) = ("CMBMSC.CBA", "to be taken as before the reset");
    BufferLie::Field(Lie { field, found: address, expected })
}

impl fmt::Display for NotInBuffer {
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
            Self::NoRoom { free_bytes, len_bytes } => write!(
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

    use base::BarPart;
    use wire::register::{MemoryBufferLocation, MemoryBufferSize};

    use super::{Pages, part_of};

    fn of(location: u32, size: u32) -> Result<Option<BarPart>, String> {
        let found = part_of(MemoryBufferLocation(location), MemoryBufferSize(size));
        found.map_err(|lie| lie.to_string())
    }

    #[test]
    fn the_two_registers_name_a_part_of_a_bar_or_lie_about_it() {
        // 4 MiB in units of 1 MiB, at the third of them of BAR 2.
        let part = BarPart { bar: 2, offset: 3 << 20, len_bytes: 4 << 20 };
        assert_eq!(of(3 << 12 | 2, 4 << 12 | 2 << 8 | 1), Ok(Some(part)));
        assert_eq!(of(3 << 12 | 7, 2 << 8 | 1), Ok(None), "without a length nothing else counts");
        for bir in [1, 6, 7] {
            let text = format!("CMBLOC.BIR is {bir:#x}, expected 0 or 2 to 5");
            assert_eq!(of(bir, 1 << 12), Err(text));
        }
        for unit in 7..16 {
            let text = format!("CMBSZ.SZU is {unit:#x}, expected at most 6: units of 64 GiB");
            assert_eq!(of(0, 1 << 12 | unit << 8), Err(text));
        }
        let most = of(0xffff_f005, 0xffff_f600).unwrap().unwrap();
        assert_eq!((most.offset, most.len_bytes), (0xf_ffff << 36, 0xf_ffff << 36));
    }

    #[test]
    fn pages_are_taken_once_and_come_back() {
        let mut pages = Pages { count: 8, taken: BTreeMap::new() };
        let taken = [3, 2, 3].map(|count| pages.take(count));
        assert_eq!(taken, [Some(0), Some(3), Some(5)]);
        assert_eq!((pages.take(1), pages.free()), (None, 0));
        pages.taken.remove(&3);
        assert_eq!((pages.take(3), pages.take(1), pages.take(1)), (None, Some(3), Some(4)));
        pages.taken.remove(&0);
        assert_eq!((pages.take(4), pages.take(3), pages.free()), (None, Some(0), 0));
    }
}
