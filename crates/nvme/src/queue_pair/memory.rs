//! The memory of a queue pair's two rings.

use base::{Dma, Segment};

/// Where the two rings of a queue pair are, and how deep. The controller half allocates it before
/// it creates the queues in the device, and releases it after they are gone from there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueMemory {
    /// Submission entries of 64 bytes.
    pub submission: Segment,
    /// Completion entries of 16 bytes.
    pub completion: Segment,
    /// How many submission entries; one less can be in use.
    pub submission_depth: u32,
    /// How many completion entries; one less can be in use.
    pub completion_depth: u32,
    /// The submission ring lies in the controller memory buffer, from which it was taken and to which
    /// it is given back.
    pub is_in_device: bool,
}

/// CC.IOSQES = 6 and CC.IOCQES = 4 (Base 2.1 §3.1.4.5).
const SUBMISSION_ENTRY_BYTES: u32 = 64;
const COMPLETION_ENTRY_BYTES: u32 = 16;

impl QueueMemory {
    /// Zeroed rings of these depths; `None` when there is no memory left.
    pub fn allocate<D: Dma>(dma: &D, submission_depth: u32, completion_depth: u32) -> Option<Self> {
        let submission = dma.allocate(Self::submission_bytes(submission_depth))?;
        let beside = Self::beside(dma, submission, submission_depth, completion_depth);
        if beside.is_none() {
            dma.release(submission);
        }
        beside.map(|memory| Self { is_in_device: false, ..memory })
    }

    /// The same, whose submission ring lies in memory of the device's own.
    pub(crate) fn beside<D: Dma>(
        dma: &D,
        submission: Segment,
        submission_depth: u32,
        completion_depth: u32,
    ) -> Option<Self> {
        let completion = dma.allocate(completion_depth * COMPLETION_ENTRY_BYTES)?;
        let is_in_device = true;
        Some(Self { submission, completion, submission_depth, completion_depth, is_in_device })
    }

    /// How long a submission ring of `depth` entries is.
    pub(crate) const fn submission_bytes(depth: u32) -> u32 {
        depth * SUBMISSION_ENTRY_BYTES
    }

    /// Gives the memory back. The device must not know of the queues any more.
    pub fn release<D: Dma>(self, dma: &D) {
        dma.release(self.submission);
        dma.release(self.completion);
    }

    /// How many commands can be in flight: one less than the shallower ring has entries (Base 2.1
    /// §3.3.1.2.1), and less than a command identifier can count.
    pub fn in_flight_max(&self) -> u16 {
        let depth = self.submission_depth.min(self.completion_depth);
        u16::try_from(depth.saturating_sub(1)).unwrap_or(u16::MAX).min(u16::MAX - 1)
    }
}
