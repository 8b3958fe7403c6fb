//! The memory of a connection's commands, as the queue that serves it sees it.
//!
//! ```text
//!    63                    40 39                                   0
//!   | dwords of the command | where its buffer begins in the budget |   data
//!   | 0                     | where a ring begins                   |   rings
//! ```
//!
//! How many bytes a host has named for a command, and how many its blocks are, are two things, and
//! the second is known to the queue alone. So the first is in the address: memory is reached whole or
//! not at all, and a host that named too much or too little gets a fault and nobody else's bytes.

use base::{Fault, HostMemory, Memory, Progress, Segment, Ticket, Window};
use dma::{SharedEntries, SharedHostMemory};

use super::{Budget, Buffer, PAGE_SHIFT, order_of};

/// What a queue may reach.
#[derive(Clone, Debug)]
pub(in crate::tcp) struct Reach {
    rings: SharedHostMemory,
    budget: Budget,
    whole: Segment,
    /// Where the whole lies for the rings.
    base: u64,
}

const LEN_SHIFT: u32 = 40;
const OFFSET: u64 = (1 << LEN_SHIFT) - 1;

/// The address of a command's data, `len_bytes` long: a multiple of four. None if its buffer is
/// shorter.
#[inline]
pub(in crate::tcp) fn iova_of(buffer: &Buffer, len_bytes: u32) -> Option<u64> {
    let fits = u64::from(len_bytes) <= buffer.len_bytes();
    fits.then(|| u64::from(len_bytes >> 2) << LEN_SHIFT | buffer.offset())
}

impl Reach {
    pub(in crate::tcp) fn new(budget: &Budget) -> Self {
        Self {
            rings: SharedHostMemory::new(budget.pool()),
            budget: budget.clone(),
            whole: budget.whole(),
            base: budget.iova(),
        }
    }

    /// The part of a command's data that begins at `iova`, if there is so much of it.
    fn part(&self, iova: u64, len_bytes: usize) -> Result<Segment, Fault> {
        let fault = Fault { iova, len_bytes: len_bytes as u64 };
        let len = u32::try_from(len_bytes).map_err(|_| fault)?;
        let all = u32::try_from(iova >> LEN_SHIFT << 2).map_err(|_| fault)?;
        let offset = iova & OFFSET;
        // A buffer begins at a multiple of its length.
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

impl HostMemory for Reach {
    type Entries = SharedEntries;

    fn entries(&mut self, iova: u64, len_bytes: u64) -> Result<Option<SharedEntries>, Fault> {
        self.rings.entries(self.base + iova, len_bytes)
    }

    #[inline]
    fn reach(&mut self, iova: u64, len_bytes: u32) -> Result<Option<Segment>, Fault> {
        let fault = Fault { iova, len_bytes: len_bytes.into() };
        self.window(len_bytes).and_then(|window| window.at(iova)).ok_or(fault).map(Some)
    }

    #[inline]
    fn window(&mut self, len_bytes: u32) -> Option<Window> {
        if len_bytes == 0 || len_bytes & 3 != 0 {
            return None;
        }
        Window::of(self.whole, u64::from(len_bytes >> 2) << LEN_SHIFT, len_bytes)
    }

    fn read(&mut self, _: Ticket, iova: u64, into: &mut [u8]) -> Result<Progress, Fault> {
        let part = self.part(iova, into.len())?;
        let fault = Fault { iova, len_bytes: into.len() as u64 };
        self.budget.regions().load(part, into).map_err(|_| fault)?;
        Ok(Progress::Done)
    }

    fn write(&mut self, _: Ticket, iova: u64, from: &[u8]) -> Result<Progress, Fault> {
        let part = self.part(iova, from.len())?;
        let fault = Fault { iova, len_bytes: from.len() as u64 };
        self.budget.regions().store(part, from).map_err(|_| fault)?;
        Ok(Progress::Done)
    }
}
