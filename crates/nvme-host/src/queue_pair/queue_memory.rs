//! Memory of a queue pair's rings.

use tenmil_base::{Dma, Segment};

/// Location and depth of the two rings of a queue pair. The controller allocates them before it creates
/// the queues in the device, and frees them after it has deleted the queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueMemory {
    /// Submission entries of 64 bytes.
    pub submission: Segment,
    /// Completion entries of 16 bytes.
    pub completion: Segment,
    /// Number of submission entries; one less can be in use.
    pub submission_depth: u32,
    /// Number of completion entries; one less can be in use.
    pub completion_depth: u32,
    /// The submission ring is in the controller memory buffer, from which it was allocated.
    pub is_in_device: bool,
}

/// CC.IOSQES = 6 and CC.IOCQES = 4 (Base 2.1 §3.1.4.5).
const SUBMISSION_ENTRY_BYTES: u32 = 64;
const COMPLETION_ENTRY_BYTES: u32 = 16;

impl QueueMemory {
    /// Allocates zeroed rings of these depths; `None` if memory is exhausted.
    pub fn allocate<D: Dma>(dma: &D, submission_depth: u32, completion_depth: u32) -> Option<Self> {
        let submission = dma.allocate(Self::submission_ring_bytes(submission_depth))?;
        let beside = Self::allocate_with_submission_ring(
            dma,
            submission,
            submission_depth,
            completion_depth,
        );
        if beside.is_none() {
            dma.release(submission);
        }
        beside.map(|memory| Self { is_in_device: false, ..memory })
    }

    /// Like [`allocate`](Self::allocate), with the submission ring in the given device memory.
    pub(crate) fn allocate_with_submission_ring<D: Dma>(
        dma: &D,
        submission: Segment,
        submission_depth: u32,
        completion_depth: u32,
    ) -> Option<Self> {
        let completion = dma.allocate(completion_depth * COMPLETION_ENTRY_BYTES)?;
        let is_in_device = true;
        Some(Self { submission, completion, submission_depth, completion_depth, is_in_device })
    }

    /// Bytes of a submission ring with `depth` entries.
    pub(crate) const fn submission_ring_bytes(depth: u32) -> u32 {
        depth * SUBMISSION_ENTRY_BYTES
    }

    /// Frees the memory. The queues must not exist in the device anymore.
    pub fn release<D: Dma>(self, dma: &D) {
        dma.release(self.submission);
        dma.release(self.completion);
    }

    /// Maximum commands in flight: one less than the entries of the smaller ring (Base 2.1 §3.3.1.2.1),
    /// and fewer than there are command identifiers.
    pub fn in_flight_max(&self) -> u16 {
        let depth = self.submission_depth.min(self.completion_depth);
        u16::try_from(depth.saturating_sub(1)).unwrap_or(u16::MAX).min(u16::MAX - 1)
    }
}
