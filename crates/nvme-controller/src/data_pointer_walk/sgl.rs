//! Scatter gather lists (Base 2.1 §4.3.2).
//!
//! ```text
//!   SGL1 ─▶ data block                                  the whole transfer, or
//!   SGL1 ─▶ segment      [ block | bucket | … | segment or last segment ]
//!             └─ segment [ block | … | last segment ]
//!                  └─ last segment [ block | … | block ]
//! ```
//!
//! Descriptors beyond the length of the transfer are accepted and not read (SGLS bit 18).

use tenmil_wire::Status;
use tenmil_wire::sgl::{DataLocation, Descriptor, DescriptorKind};

use super::{Direction, HostRanges, LIST_BYTES_MAX, WalkStep, qwords};

/// Position in an SGL.
#[derive(Debug)]
pub(super) struct SglCursor {
    /// Address of the next descriptor.
    iova: u64,
    /// Bytes of this segment not yet read.
    left_bytes: u32,
    is_last: bool,
    /// Remaining descriptor budget: a host can chain segments endlessly.
    descriptors_left: u32,
}

/// SGLS value for a controller that uses this parser: any address and length, bit buckets, and lists
/// longer than the transfer (Base 2.1 §5.1.13.2.1).
pub const SGLS: u32 = 1 | 1 << 16 | 1 << 18;

/// Maximum descriptors of a command: twice the number for a transfer of 2 MiB in separate pages.
const DESCRIPTORS_MAX: u32 = 1024;
const DESCRIPTOR_BYTES: u32 = 16;

const WRONG_SEGMENT: Status = Status::INVALID_SGL_SEGMENT_DESCRIPTOR.with_dnr();
const WRONG_COUNT: Status = Status::INVALID_SGL_DESCRIPTOR_COUNT.with_dnr();
const WRONG_TYPE: Status = Status::SGL_DESCRIPTOR_TYPE_INVALID.with_dnr();
const WRONG_LENGTH: Status = Status::DATA_SGL_LENGTH_INVALID.with_dnr();

impl SglCursor {
    pub(super) fn start(
        first: Descriptor,
        left: &mut u32,
        direction: Direction,
        ranges: &mut HostRanges,
    ) -> Result<(Self, WalkStep), Status> {
        let mut segment =
            Self { iova: 0, left_bytes: 0, is_last: true, descriptors_left: DESCRIPTORS_MAX };
        if *left == 0 {
            return Ok((segment, WalkStep::Done));
        }
        // A bit bucket cannot be the only descriptor.
        if matches!(first.decode(), DescriptorKind::BitBucket { .. }) {
            return Err(WRONG_TYPE);
        }
        segment.is_last = false;
        let is_link = segment.process_descriptor(first, true, left, direction, ranges)?;
        match (is_link, *left) {
            (true, _) => {
                let next = segment.next_walk_step();
                Ok((segment, next))
            }
            (false, 0) => Ok((segment, WalkStep::Done)),
            (false, _) => Err(WRONG_LENGTH),
        }
    }

    pub(super) fn supply_segment(
        &mut self,
        list: &[u8],
        left: &mut u32,
        direction: Direction,
        ranges: &mut HostRanges,
    ) -> Result<WalkStep, Status> {
        let mut words = qwords(list);
        while let (Some(low), Some(high)) = (words.next(), words.next()) {
            self.descriptors_left = self.descriptors_left.checked_sub(1).ok_or(WRONG_COUNT)?;
            self.left_bytes = self.left_bytes.saturating_sub(DESCRIPTOR_BYTES);
            self.iova = self.iova.wrapping_add(u64::from(DESCRIPTOR_BYTES));
            let is_end = self.left_bytes == 0;
            let is_last_segment = self.is_last;
            let is_link =
                self.process_descriptor(Descriptor([low, high]), is_end, left, direction, ranges)?;
            match (is_link, is_end) {
                (true, _) => return Ok(self.next_walk_step()),
                (false, _) if *left == 0 => return Ok(WalkStep::Done),
                (false, true) if is_last_segment => return Err(WRONG_LENGTH),
                (false, true) => return Err(WRONG_SEGMENT),
                (false, false) => {}
            }
        }
        Ok(self.next_walk_step())
    }

    /// Processes one descriptor. Returns true if it links to another segment.
    fn process_descriptor(
        &mut self,
        descriptor: Descriptor,
        is_end: bool,
        left: &mut u32,
        direction: Direction,
        ranges: &mut HostRanges,
    ) -> Result<bool, Status> {
        match descriptor.decode() {
            DescriptorKind::DataBlock { location: DataLocation::Address(iova), len_bytes } => {
                let len_bytes = len_bytes.min(*left);
                if len_bytes > 0 {
                    ranges.push(iova, len_bytes)?;
                    *left -= len_bytes;
                }
                Ok(false)
            }
            // "If used in a transfer to the controller, the length is treated as zero."
            DescriptorKind::BitBucket { len_bytes } => {
                let len_bytes =
                    if direction == Direction::ToHost { len_bytes.min(*left) } else { 0 };
                if len_bytes > 0 {
                    ranges.push_bit_bucket(len_bytes)?;
                    *left -= len_bytes;
                }
                Ok(false)
            }
            DescriptorKind::Segment { location: DataLocation::Address(iova), len_bytes } => {
                self.follow_segment_descriptor(iova, len_bytes, false, is_end).map(|()| true)
            }
            DescriptorKind::LastSegment { location: DataLocation::Address(iova), len_bytes } => {
                self.follow_segment_descriptor(iova, len_bytes, true, is_end).map(|()| true)
            }
            _ => Err(WRONG_TYPE),
        }
    }

    fn follow_segment_descriptor(
        &mut self,
        iova: u64,
        len_bytes: u32,
        is_last: bool,
        is_end: bool,
    ) -> Result<(), Status> {
        if self.is_last {
            return Err(WRONG_SEGMENT);
        }
        if !is_end {
            return Err(WRONG_COUNT);
        }
        if len_bytes == 0 || !len_bytes.is_multiple_of(DESCRIPTOR_BYTES) {
            return Err(WRONG_SEGMENT);
        }
        (self.iova, self.left_bytes, self.is_last) = (iova, len_bytes, is_last);
        Ok(())
    }

    fn next_walk_step(&self) -> WalkStep {
        let len_max = u32::try_from(LIST_BYTES_MAX).unwrap_or(u32::MAX);
        WalkStep::List { iova: self.iova, len_bytes: self.left_bytes.min(len_max) }
    }
}

#[cfg(test)]
mod tests {
    use super::{DESCRIPTORS_MAX, WRONG_COUNT, WRONG_LENGTH, WRONG_SEGMENT, WRONG_TYPE};
    use crate::data_pointer_walk::tests::{host_range, walk_data_pointer};
    use crate::data_pointer_walk::{Direction, HostRange};
    use tenmil_wire::sgl::Descriptor;
    use tenmil_wire::{Command, DataPointer, Status};

    fn walk_sgl(
        first: Descriptor,
        len: u32,
        direction: Direction,
        memory: &[u8],
    ) -> Result<Vec<HostRange>, Status> {
        let command = Command::new(2).with_psdt(DataPointer::Sgl).with_sgl1(first);
        walk_data_pointer(&command, len, direction, memory)
    }

    fn memory_with_descriptors(at: usize, descriptors: &[Descriptor]) -> Vec<u8> {
        let mut memory = vec![0; 0x10000];
        put_descriptors(&mut memory, at, descriptors);
        memory
    }

    fn put_descriptors(memory: &mut [u8], at: usize, descriptors: &[Descriptor]) {
        for (index, descriptor) in descriptors.iter().enumerate() {
            memory[at + index * 16..][..16].copy_from_slice(&descriptor.to_bytes());
        }
    }

    const READ: Direction = Direction::ToHost;
    const WRITE: Direction = Direction::FromHost;

    #[test]
    fn single_data_block_may_be_longer_than_the_transfer() {
        assert_eq!(
            walk_sgl(Descriptor::data_block(0x1001, 512), 512, READ, &[]),
            Ok(vec![host_range(0x1001, 512)])
        );
        assert_eq!(
            walk_sgl(Descriptor::data_block(0x1000, 900), 512, READ, &[]),
            Ok(vec![host_range(0x1000, 512)])
        );
        assert_eq!(
            walk_sgl(Descriptor::data_block(0x1000, 511), 512, READ, &[]),
            Err(WRONG_LENGTH)
        );
    }

    #[test]
    fn sgl_segments_are_followed_to_the_last_segment() {
        let block = Descriptor::data_block;
        let mut memory =
            memory_with_descriptors(0x100, &[block(0x5000, 8), Descriptor::segment(0x200, 32)]);
        put_descriptors(
            &mut memory,
            0x200,
            &[block(0x6000, 0), Descriptor::last_segment(0x300, 32)],
        );
        put_descriptors(&mut memory, 0x300, &[block(0x7000, 8), block(0x7008, 16)]);
        let walked = walk_sgl(Descriptor::segment(0x100, 32), 32, READ, &memory);
        assert_eq!(walked, Ok(vec![host_range(0x5000, 8), host_range(0x7000, 24)]));
        let walked = walk_sgl(Descriptor::segment(0x100, 32), 33, READ, &memory);
        assert_eq!(walked, Err(WRONG_LENGTH), "the list is a byte too short");
    }

    #[test]
    fn bit_bucket_consumes_read_bytes_only() {
        let list = [
            Descriptor::data_block(0x5000, 8),
            Descriptor::bit_bucket(8),
            Descriptor::data_block(0x6000, 8),
        ];
        let memory = memory_with_descriptors(0x100, &list);
        let first = Descriptor::last_segment(0x100, 48);
        let bucket = HostRange { iova: 0, len_bytes: 8, is_bucket: true };
        let walked = walk_sgl(first, 24, READ, &memory);
        assert_eq!(walked, Ok(vec![host_range(0x5000, 8), bucket, host_range(0x6000, 8)]));
        let walked = walk_sgl(first, 16, WRITE, &memory);
        assert_eq!(walked, Ok(vec![host_range(0x5000, 8), host_range(0x6000, 8)]));
        assert_eq!(walk_sgl(Descriptor::bit_bucket(8), 8, READ, &[]), Err(WRONG_TYPE));
    }

    #[test]
    fn every_malformed_sgl_has_its_status() {
        let block = Descriptor::data_block(0x5000, 8);
        let wrong = |first: Descriptor, list: &[Descriptor]| {
            walk_sgl(first, 64, READ, &memory_with_descriptors(0x100, list)).unwrap_err()
        };
        let segment = Descriptor::segment;
        let last = Descriptor::last_segment;
        assert_eq!(wrong(segment(0x100, 0), &[]), WRONG_SEGMENT, "empty");
        assert_eq!(wrong(segment(0x100, 24), &[]), WRONG_SEGMENT, "a descriptor and a half");
        assert_eq!(wrong(segment(0x100, 32), &[block, block]), WRONG_SEGMENT, "no link at its end");
        assert_eq!(
            wrong(last(0x100, 32), &[block, last(0x200, 16)]),
            WRONG_SEGMENT,
            "after the last"
        );
        assert_eq!(
            wrong(segment(0x100, 32), &[last(0x200, 16), block]),
            WRONG_COUNT,
            "not at the end"
        );
        assert_eq!(wrong(last(0x100, 16), &[block]), WRONG_LENGTH, "too short");
        assert_eq!(wrong(Descriptor::in_capsule(0, 64), &[]), WRONG_TYPE, "there is no capsule");
        assert_eq!(wrong(Descriptor::keyed_data_block(0, 64, 1, false), &[]), WRONG_TYPE);
        assert_eq!(wrong(Descriptor::transport_data_block(64), &[]), WRONG_TYPE);
        assert_eq!(wrong(Descriptor::new(0, 64, 9, 0), &[]), WRONG_TYPE);
        assert_eq!(wrong(last(0x100, 16), &[Descriptor::new(0, 64, 0, 5)]), WRONG_TYPE);
        assert_eq!(wrong(segment(0xffff_0000, 16), &[]), Status::DATA_TRANSFER_ERROR);
    }

    #[test]
    fn endless_sgl_is_rejected() {
        let memory = memory_with_descriptors(0x100, &[Descriptor::segment(0x100, 16)]);
        assert_eq!(walk_sgl(Descriptor::segment(0x100, 16), 64, READ, &memory), Err(WRONG_COUNT));
        let empty = vec![Descriptor::data_block(0x5000, 0); DESCRIPTORS_MAX as usize + 1];
        let memory = memory_with_descriptors(0x100, &empty);
        let len = u32::try_from(empty.len() * 16).unwrap();
        assert_eq!(
            walk_sgl(Descriptor::last_segment(0x100, len), 64, READ, &memory),
            Err(WRONG_COUNT)
        );
    }
}
