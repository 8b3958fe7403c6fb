//! Memory of an executor whose commands name their data as segments: no rings, and nothing to translate.

use core::fmt;
use std::sync::Arc;

use tenmil_base::{AccessFault, AccessId, AccessProgress, HostMemory, Memory, Segment};

/// Memory that the segments of commands lie in: an address is an offset in one region.
#[derive(Clone)]
pub struct SegmentMemory {
    memory: Arc<dyn Memory>,
    whole: Segment,
}

impl SegmentMemory {
    /// Memory with the segment `whole`, which contains the data of every command.
    pub fn new(memory: Arc<dyn Memory>, whole: Segment) -> Self {
        Self { memory, whole }
    }

    /// Segment of `len_bytes` at an offset of the region, if it lies inside.
    fn segment_at(&self, offset: u64, len_bytes: usize) -> Result<Segment, AccessFault> {
        let fault = AccessFault { iova: offset, len_bytes: len_bytes as u64 };
        let len = u32::try_from(len_bytes).map_err(|_| fault)?;
        let skip = offset.checked_sub(self.whole.offset).and_then(|skip| u32::try_from(skip).ok());
        skip.and_then(|skip| self.whole.slice(skip, len)).ok_or(fault)
    }
}

impl HostMemory for SegmentMemory {
    fn resolve(&mut self, iova: u64, len_bytes: u32) -> Result<Option<Segment>, AccessFault> {
        self.segment_at(iova, len_bytes as usize).map(Some)
    }

    fn read(
        &mut self,
        _: AccessId,
        iova: u64,
        into: &mut [u8],
    ) -> Result<AccessProgress, AccessFault> {
        let fault = AccessFault { iova, len_bytes: into.len() as u64 };
        let loaded = self.memory.load(self.segment_at(iova, into.len())?, into);
        loaded.map(|()| AccessProgress::Done).map_err(|_| fault)
    }

    fn write(
        &mut self,
        _: AccessId,
        iova: u64,
        from: &[u8],
    ) -> Result<AccessProgress, AccessFault> {
        let fault = AccessFault { iova, len_bytes: from.len() as u64 };
        let stored = self.memory.store(self.segment_at(iova, from.len())?, from);
        stored.map(|()| AccessProgress::Done).map_err(|_| fault)
    }
}

impl fmt::Debug for SegmentMemory {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("SegmentMemory").field("whole", &self.whole).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::SegmentMemory;
    use crate::fuzz::fake_host::{BOUNCE, FakeRam};
    use tenmil_base::{AccessId, HostMemory, Segment};

    #[test]
    fn memory_outside_of_the_segment_is_not_accessible() {
        let whole = Segment { region: BOUNCE, offset: 0x100, len_bytes: 0x200 };
        let mut memory = SegmentMemory::new(FakeRam::new(0x1000, 0x1000), whole);
        let inside = Segment { offset: 0x2ff, len_bytes: 1, ..whole };
        assert_eq!(memory.resolve(0x100, 0x200), Ok(Some(whole)));
        assert_eq!(memory.resolve(0x2ff, 1), Ok(Some(inside)));
        for (offset, len) in [(0xff, 1), (0x300, 1), (0x2ff, 2), (u64::MAX, 1), (0, 0x200)] {
            assert!(memory.resolve(offset, len).is_err(), "{offset:#x}, {len} bytes");
            let mut bytes = vec![0; len as usize];
            assert!(memory.read(AccessId(0), offset, &mut bytes).is_err());
            assert!(memory.write(AccessId(0), offset, &bytes).is_err());
        }
    }
}
