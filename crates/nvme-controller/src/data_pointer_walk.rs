//! Data pointer parsing: from the PRPs or the SGL of a command to a list of host memory ranges.
//!
//! ```text
//!   Command ── start ──▶ Walk ── List { iova, len } ──▶ (read from the host, now or later)
//!                          ▲                                   │
//!                          └──────────── feed(bytes) ──────────┘
//!                        Walk ── Done ──▶ HostRanges ──▶ resolve to segments, or HostCopy
//! ```
//!
//! The walk performs no I/O. It requests the parts of a list that it needs, sees each part once, and
//! checks all of it: lengths, offsets, types and the number of descriptors. Every rejection carries the
//! status that the specification defines for it. Admin and I/O commands share it.

use tenmil_base::Segment;
use tenmil_wire::{Command, DataPointer, Status};

mod host_copy;
mod prp;
mod sgl;

pub use sgl::SGLS;

pub(crate) use host_copy::{ACCESS_BYTES_MAX, CopyState, HostCopy, LocalBuffer};

/// Iterator over the PRPs or the SGL of one command.
#[derive(Debug)]
pub(crate) struct DataPointerWalk {
    kind: PointerKind,
    /// Bytes without a host range yet.
    left: u32,
    direction: Direction,
}

/// Direction of a command's data transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// The controller reads host memory.
    FromHost,
    /// The controller writes host memory.
    ToHost,
}

/// Next input that a walk needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WalkStep {
    /// This part of a PRP list or an SGL segment.
    List { iova: u64, len_bytes: u32 },
    /// None: every byte has a host range.
    Done,
}

/// Host memory ranges in data order, with adjacent ranges merged.
#[derive(Debug)]
pub(crate) struct HostRanges {
    list: Vec<HostRange>,
    ranges_max: usize,
}

/// One contiguous host memory range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostRange {
    pub(crate) iova: u64,
    pub(crate) len_bytes: u32,
    /// The bytes are discarded: an SGL bit bucket.
    pub(crate) is_bucket: bool,
}

#[derive(Debug)]
enum PointerKind {
    Prp(prp::PrpCursor),
    Sgl(sgl::SglCursor),
}

/// Maximum bytes of a list that a walk requests at once.
pub(crate) const LIST_BYTES_MAX: usize = 512;

impl DataPointerWalk {
    /// A walk without data.
    pub(crate) const fn empty() -> Self {
        Self {
            kind: PointerKind::Prp(prp::PrpCursor::NONE),
            left: 0,
            direction: Direction::FromHost,
        }
    }

    /// Starts at the data pointer of `command`, which moves `len_bytes`.
    pub(crate) fn start(
        command: &Command,
        len_bytes: u32,
        direction: Direction,
        page_shift: u8,
        ranges: &mut HostRanges,
    ) -> Result<(Self, WalkStep), Status> {
        ranges.list.clear();
        let mut left = len_bytes;
        let (kind, next) = match command.psdt() {
            DataPointer::Prp => {
                let (list, next) = prp::PrpCursor::start(command, &mut left, page_shift, ranges)?;
                (PointerKind::Prp(list), next)
            }
            DataPointer::Sgl => {
                let (segment, next) =
                    sgl::SglCursor::start(command.sgl1(), &mut left, direction, ranges)?;
                (PointerKind::Sgl(segment), next)
            }
            // MPTR as an SGL is not supported (SGLS bit 19), and 11b is reserved.
            DataPointer::SglAndMetadataSgl | DataPointer::Reserved => {
                return Err(Status::INVALID_FIELD.with_dnr());
            }
        };
        Ok((Self { kind, left, direction }, next))
    }

    /// Walk over data in one segment, of which a command moves `len_bytes`: all, if `is_exact`. The range is
    /// the whole segment.
    pub(crate) fn for_segment(
        segment: Segment,
        len_bytes: u32,
        is_exact: bool,
        ranges: &mut HostRanges,
    ) -> Result<(Self, WalkStep), Status> {
        ranges.list.clear();
        if segment.len_bytes < len_bytes || (is_exact && segment.len_bytes != len_bytes) {
            return Err(Status::DATA_SGL_LENGTH_INVALID.with_dnr());
        }
        ranges.push(segment.offset, segment.len_bytes)?;
        Ok((Self::empty(), WalkStep::Done))
    }

    /// Processes the requested part of the list.
    pub(crate) fn supply_list(
        &mut self,
        list: &[u8],
        ranges: &mut HostRanges,
    ) -> Result<WalkStep, Status> {
        match &mut self.kind {
            PointerKind::Prp(state) => state.supply_list(list, &mut self.left, ranges),
            PointerKind::Sgl(state) => {
                state.supply_segment(list, &mut self.left, self.direction, ranges)
            }
        }
    }
}

impl HostRanges {
    /// Creates an empty list for at most `ranges_max` ranges. It keeps its capacity for reuse.
    pub(crate) fn with_max_ranges(ranges_max: usize) -> Self {
        Self { list: Vec::new(), ranges_max }
    }

    /// The ranges.
    pub(crate) fn as_slice(&self) -> &[HostRange] {
        &self.list
    }

    /// Removes all ranges.
    pub(crate) fn clear(&mut self) {
        self.list.clear();
    }

    /// Appends bytes, or extends the last range if they are adjacent to it.
    fn push(&mut self, iova: u64, len_bytes: u32) -> Result<(), Status> {
        // An address space does not wrap: this range is never accessible.
        if iova.checked_add(u64::from(len_bytes)).is_none() {
            return Err(Status::DATA_TRANSFER_ERROR);
        }
        if let Some(last) = self.list.last_mut()
            && !last.is_bucket
            && last.iova + u64::from(last.len_bytes) == iova
        {
            last.len_bytes += len_bytes;
            return Ok(());
        }
        self.append(HostRange { iova, len_bytes, is_bucket: false })
    }

    fn push_bit_bucket(&mut self, len_bytes: u32) -> Result<(), Status> {
        self.append(HostRange { iova: 0, len_bytes, is_bucket: true })
    }

    fn append(&mut self, range: HostRange) -> Result<(), Status> {
        if self.list.len() == self.ranges_max {
            return Err(Status::INVALID_SGL_DESCRIPTOR_COUNT.with_dnr());
        }
        self.list.push(range);
        Ok(())
    }
}

/// The 64-bit words of a list.
fn qwords(list: &[u8]) -> impl Iterator<Item = u64> + '_ {
    list.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{DataPointerWalk, Direction, HostRange, HostRanges, LIST_BYTES_MAX, WalkStep};
    use tenmil_wire::{Command, Status};

    /// Walks to the end over a host memory that begins at address zero.
    pub(crate) fn walk_data_pointer(
        command: &Command,
        total_bytes: u32,
        direction: Direction,
        memory: &[u8],
    ) -> Result<Vec<HostRange>, Status> {
        let mut ranges = HostRanges::with_max_ranges(300);
        let (mut walk, mut next) =
            DataPointerWalk::start(command, total_bytes, direction, 12, &mut ranges)?;
        for _ in 0..10_000 {
            let WalkStep::List { iova, len_bytes } = next else {
                let placed: u32 = ranges.as_slice().iter().map(|range| range.len_bytes).sum();
                assert_eq!(placed, total_bytes, "every byte has one place");
                return Ok(ranges.as_slice().to_vec());
            };
            assert!(len_bytes as usize <= LIST_BYTES_MAX && len_bytes > 0);
            let start = usize::try_from(iova).unwrap();
            let list =
                memory.get(start..start + len_bytes as usize).ok_or(Status::DATA_TRANSFER_ERROR)?;
            next = walk.supply_list(list, &mut ranges)?;
        }
        panic!("the walk does not end");
    }

    pub(crate) fn host_range(iova: u64, len_bytes: u32) -> HostRange {
        HostRange { iova, len_bytes, is_bucket: false }
    }

    #[test]
    fn reserved_psdt_is_an_invalid_field() {
        for psdt in
            [tenmil_wire::DataPointer::SglAndMetadataSgl, tenmil_wire::DataPointer::Reserved]
        {
            let command = Command::new(2).with_psdt(psdt);
            assert_eq!(
                walk_data_pointer(&command, 512, Direction::ToHost, &[]),
                Err(Status::INVALID_FIELD.with_dnr())
            );
        }
    }

    #[test]
    fn adjacent_ranges_are_merged_and_address_overflow_is_rejected() {
        let mut ranges = HostRanges::with_max_ranges(2);
        ranges.push(0x1000, 0x1000).unwrap();
        ranges.push(0x2000, 0x10).unwrap();
        ranges.push(0x4000, 0x10).unwrap();
        assert_eq!(ranges.as_slice(), [host_range(0x1000, 0x1010), host_range(0x4000, 0x10)]);
        assert_eq!(ranges.push(u64::MAX - 1, 4), Err(Status::DATA_TRANSFER_ERROR));
        assert_eq!(ranges.push(0, 4), Err(Status::INVALID_SGL_DESCRIPTOR_COUNT.with_dnr()));
    }
}
