//! Host memory of a connection's queue: the command buffers and the rings.
//!
//! ```text
//!    63                    40 39                                    0
//!   | dwords of the command  | offset of its buffer in the pool      |   data
//!   | 0                      | offset of a ring                      |   rings
//! ```
//!
//! The length that a host specifies in the SGL and the length of the command's blocks are
//! independent, and only the queue knows the latter. The address therefore contains the former: an
//! access outside of it fails, and a host that specifies a wrong length gets an error instead of
//! another host's data.

use tenmil_base::{AccessFault, AccessId, AccessProgress, HostMemory, Memory, Segment, Window};
use tenmil_dma::{SharedEntries, SharedHostMemory};

use super::{Buffer, BufferPool, PAGE_SHIFT, order_of};

/// Memory that a queue may access.
#[derive(Clone, Debug)]
pub(in crate::tcp) struct ConnectionMemory {
    rings: SharedHostMemory,
    budget: BufferPool,
    whole: Segment,
    /// Device address of the pool, for ring accesses.
    base: u64,
}

const LEN_SHIFT: u32 = 40;
const OFFSET: u64 = (1 << LEN_SHIFT) - 1;

/// Address of a command's data of `len_bytes`, a multiple of four. `None` if its buffer is shorter.
#[inline]
pub(in crate::tcp) fn iova_of(buffer: &Buffer, len_bytes: u32) -> Option<u64> {
    let fits = u64::from(len_bytes) <= buffer.len_bytes();
    fits.then(|| u64::from(len_bytes >> 2) << LEN_SHIFT | buffer.offset())
}

impl ConnectionMemory {
    pub(in crate::tcp) fn new(budget: &BufferPool) -> Self {
        Self {
            rings: SharedHostMemory::new(budget.pool()),
            budget: budget.clone(),
            whole: budget.whole(),
            base: budget.iova(),
        }
    }

    /// Segment of `len_bytes` at `iova`, if it lies within the command's data.
    fn part(&self, iova: u64, len_bytes: usize) -> Result<Segment, AccessFault> {
        let fault = AccessFault { iova, len_bytes: len_bytes as u64 };
        let len = u32::try_from(len_bytes).map_err(|_| fault)?;
        let all = u32::try_from(iova >> LEN_SHIFT << 2).map_err(|_| fault)?;
        let offset = iova & OFFSET;
        // A buffer is aligned to its size.
        let block = 1_u64 << (PAGE_SHIFT + u32::from(order_of(all)));
        let skip = offset & (block - 1);
        if skip + u64::from(len) > u64::from(all)
            || offset + u64::from(len) > u64::from(self.whole.len_bytes)
        {
            return Err(fault);
        }
        Ok(Segment { offset: self.whole.offset + offset, len_bytes: len, ..self.whole })
    }
}

impl HostMemory for ConnectionMemory {
    type Entries = SharedEntries;

    fn entries(&mut self, iova: u64, len_bytes: u64) -> Result<Option<SharedEntries>, AccessFault> {
        self.rings.entries(self.base + iova, len_bytes)
    }

    #[inline]
    fn resolve(&mut self, iova: u64, len_bytes: u32) -> Result<Option<Segment>, AccessFault> {
        let fault = AccessFault { iova, len_bytes: len_bytes.into() };
        self.direct_window(len_bytes).and_then(|window| window.at(iova)).ok_or(fault).map(Some)
    }

    #[inline]
    fn direct_window(&mut self, len_bytes: u32) -> Option<Window> {
        if len_bytes == 0 || len_bytes & 3 != 0 {
            return None;
        }
        Window::of(self.whole, u64::from(len_bytes >> 2) << LEN_SHIFT, len_bytes)
    }

    fn read(
        &mut self,
        _: AccessId,
        iova: u64,
        into: &mut [u8],
    ) -> Result<AccessProgress, AccessFault> {
        let part = self.part(iova, into.len())?;
        let fault = AccessFault { iova, len_bytes: into.len() as u64 };
        self.budget.regions().load(part, into).map_err(|_| fault)?;
        Ok(AccessProgress::Done)
    }

    fn write(
        &mut self,
        _: AccessId,
        iova: u64,
        from: &[u8],
    ) -> Result<AccessProgress, AccessFault> {
        let part = self.part(iova, from.len())?;
        let fault = AccessFault { iova, len_bytes: from.len() as u64 };
        self.budget.regions().store(part, from).map_err(|_| fault)?;
        Ok(AccessProgress::Done)
    }
}
