//! Data of commands on NVMe/TCP: segments of this process's memory, which need no address of a device.

use tenmil_base::{Dma, Memory, Segment};
use tenmil_nvme_host::{BuiltDataPointer, DataPointerError, DataPointers, SegmentListCursor};

use crate::remote_dma::RemoteDma;

/// Where the data of a command are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SegmentPointer {
    /// The command transfers none.
    #[default]
    None,
    /// In one segment.
    Contiguous(Segment),
    /// In one segment of a kernel buffer, which has no address in this process.
    KernelBuffer(Segment),
    /// In the segments of the list of this slot.
    Listed {
        /// Index of the slot.
        slot: u16,
        /// Total length.
        len_bytes: u32,
    },
}

/// Segment lists of commands, by slot, and memory for the data that commands need themselves.
#[derive(Debug)]
pub struct SegmentLists {
    dma: RemoteDma,
    lists: Box<[Vec<Segment>]>,
    /// Ranges of Dataset Management and Copy: a part for each slot.
    ranges: Segment,
}

/// Maximum number of segments of a command.
const SEGMENTS_MAX: usize = 256;
/// Maximum data of a command, unless the controller states a limit.
const TRANSFER_BYTES_MAX: u32 = 2 << 20;
/// Memory of a slot for ranges.
const RANGE_BYTES: u32 = 64;

impl SegmentLists {
    /// Lists for `depth` slots. `None` if memory is exhausted.
    pub(crate) fn allocate(dma: &RemoteDma, depth: u32) -> Option<Self> {
        let ranges = dma.allocate(depth.checked_mul(RANGE_BYTES)?)?;
        let lists = (0..depth).map(|_| Vec::new()).collect();
        Some(Self { dma: dma.clone(), lists, ranges })
    }

    /// Takes the list of `slot`.
    pub(crate) fn take_list(&mut self, slot: u16) -> Vec<Segment> {
        core::mem::take(&mut self.lists[usize::from(slot)])
    }

    /// Returns the memory of a list to `slot`.
    pub(crate) fn return_list(&mut self, slot: u16, list: Vec<Segment>) {
        self.lists[usize::from(slot)] = list;
    }

    fn is_kernel_buffer(&self, segment: Segment) -> bool {
        self.dma.pool().regions().kernel_buffer(segment).is_some()
    }
}

impl DataPointers for SegmentLists {
    type Pointer = SegmentPointer;

    #[inline(always)]
    fn contiguous_run(&self, like: Segment) -> impl Fn(Segment) -> Option<SegmentPointer> {
        // A segment that a device could reach exists; one of a kernel buffer has no prepared form.
        let iova_of = self.dma.iova_translator(like);
        #[inline(always)]
        move |segment| iova_of(segment).map(|_| SegmentPointer::Contiguous(segment))
    }

    fn pointer_to_contiguous(&self, segment: Segment) -> Option<SegmentPointer> {
        self.dma.iova(segment)?;
        Some(match self.is_kernel_buffer(segment) {
            false => SegmentPointer::Contiguous(segment),
            true => SegmentPointer::KernelBuffer(segment),
        })
    }

    fn build(
        &mut self,
        index: usize,
        cursor: SegmentListCursor<'_>,
        len_max: u32,
        granule: u32,
    ) -> Result<BuiltDataPointer<SegmentPointer>, DataPointerError> {
        let slot = u16::try_from(index).map_err(|_| DataPointerError::Unreachable)?;
        let mut list = self.take_list(slot);
        list.clear();
        let built = self.collect(&mut list, cursor, len_max, granule);
        let first = list.first().copied();
        let count = list.len();
        self.lists[index] = list;
        let len_bytes = built?;
        let pointer = match first {
            Some(segment) if count == 1 => {
                self.pointer_to_contiguous(segment).ok_or(DataPointerError::Alignment)?
            }
            _ => SegmentPointer::Listed { slot, len_bytes },
        };
        Ok(BuiltDataPointer { pointer, len_bytes })
    }

    fn store_data(&self, index: usize, bytes: &[u8]) -> Result<SegmentPointer, DataPointerError> {
        let len_bytes = u32::try_from(bytes.len()).map_err(|_| DataPointerError::TooShort)?;
        let slot = u32::try_from(index).map_err(|_| DataPointerError::Unreachable)?;
        let segment = self.ranges.slice(slot * RANGE_BYTES, RANGE_BYTES);
        let segment = segment.and_then(|segment| segment.slice(0, len_bytes));
        let segment = segment.ok_or(DataPointerError::Unreachable)?;
        self.dma.store(segment, bytes).map_err(|_| DataPointerError::Unreachable)?;
        Ok(SegmentPointer::Contiguous(segment))
    }

    /// A capsule has no address of metadata: they are interleaved with the data.
    fn metadata_address(
        &self,
        _: SegmentListCursor<'_>,
        _: u32,
    ) -> Result<(u64, u32), DataPointerError> {
        Err(DataPointerError::Unreachable)
    }

    fn transfer_bytes_max(&self) -> u32 {
        TRANSFER_BYTES_MAX
    }

    fn release(&self) {
        self.dma.release(self.ranges);
    }
}

impl SegmentLists {
    /// Collects the segments of `len_max` bytes, or of as many as a list may have, in multiples of
    /// `granule`. Returns the number of bytes.
    fn collect(
        &self,
        list: &mut Vec<Segment>,
        cursor: SegmentListCursor<'_>,
        len_max: u32,
        granule: u32,
    ) -> Result<u32, DataPointerError> {
        let (mut at, mut total) = (cursor, 0);
        while total < len_max && list.len() < SEGMENTS_MAX {
            let next = at.next_segment(len_max - total);
            let (part, rest) = next.ok_or(DataPointerError::TooShort)?;
            at = rest;
            if part.len_bytes == 0 {
                continue;
            }
            self.dma.iova(part).ok_or(DataPointerError::Unreachable)?;
            total += part.len_bytes;
            list.push(part);
        }
        // Whole blocks only: the last segments are shortened by a partial block.
        let mut excess = total % granule;
        total -= excess;
        while excess > 0
            && let Some(last) = list.pop()
        {
            let removed_bytes = excess.min(last.len_bytes);
            excess -= removed_bytes;
            list.extend(
                last.slice(0, last.len_bytes - removed_bytes).filter(|rest| rest.len_bytes > 0),
            );
        }
        // NVMe/TCP transfers dwords (NVM Express TCP Transport 1.0, section 3.6.2.8).
        if total == 0 || total & 3 != 0 {
            return Err(DataPointerError::Alignment);
        }
        if list.len() > 1 && list.iter().any(|segment| self.is_kernel_buffer(*segment)) {
            return Err(DataPointerError::Unreachable);
        }
        Ok(total)
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Segment;
    use tenmil_dma::{
        CommandStore, DeviceKind, DevicePool, MemoryBacking, MemoryMapping, RegionTable,
    };
    use tenmil_nvme_host::{BuiltDataPointer, DataPointerError, DataPointers, SegmentListCursor};

    use super::{RemoteDma, SEGMENTS_MAX, SegmentLists, SegmentPointer};

    fn lists() -> (SegmentLists, Segment) {
        let regions = RegionTable::new(4);
        let memory = regions
            .add_mapping(MemoryMapping::new(1 << 20, MemoryBacking::Private).unwrap())
            .unwrap();
        let data = regions
            .add_mapping(MemoryMapping::new(1 << 20, MemoryBacking::Private).unwrap())
            .unwrap();
        let store = CommandStore::for_device(DeviceKind::Emulated);
        let pool = DevicePool::new(regions, memory, DeviceKind::Emulated, store);
        pool.map_on_demand();
        (SegmentLists::allocate(&RemoteDma::new(pool), 4).unwrap(), data)
    }

    #[test]
    fn list_that_is_too_long_is_truncated_to_whole_blocks() {
        let (mut lists, data) = lists();
        // 300 segments of 24 bytes for blocks of 512.
        let segments: Vec<Segment> = (0..300).map(|at| data.slice(at * 64, 24).unwrap()).collect();
        let built = lists.build(1, SegmentListCursor::at(&segments, 0), 7168, 512).unwrap();
        let found = u32::try_from(SEGMENTS_MAX).unwrap() * 24;
        let len_bytes = found - found % 512;
        let pointer = SegmentPointer::Listed { slot: 1, len_bytes };
        assert_eq!(built, BuiltDataPointer { pointer, len_bytes });
        let list = lists.take_list(1);
        assert_eq!(list.iter().map(|segment| segment.len_bytes).sum::<u32>(), len_bytes);
        assert_eq!(list[..10], segments[..10]);
    }

    #[test]
    fn unaligned_or_short_data_are_rejected() {
        let (mut lists, data) = lists();
        let two = [data.slice(0, 3).unwrap(), data.slice(8, 3).unwrap()];
        let build = |lists: &mut SegmentLists, segments: &[Segment], len| {
            lists.build(0, SegmentListCursor::at(segments, 0), len, 1)
        };
        assert_eq!(build(&mut lists, &two[..1], 3), Err(DataPointerError::Alignment));
        assert_eq!(build(&mut lists, &two, 6), Err(DataPointerError::Alignment));
        assert_eq!(build(&mut lists, &two, 8), Err(DataPointerError::TooShort));
        let nowhere = Segment { offset: u64::from(data.len_bytes), ..two[0] };
        assert_eq!(build(&mut lists, &[nowhere], 3), Err(DataPointerError::Unreachable));
    }
}
