//! Bounce buffers for unaligned memory, and a buffer of zeroes.

use std::collections::VecDeque;
use std::sync::Arc;

use tenmil_base::{ErrorCategory, IoStatus, Segment};
use tenmil_dma::{Region, RegionTable};

use crate::segment_cursor::SegmentCursor;
use tenmil_base::Error;

/// Creates the bounce buffers of the channels of one device. Cheap to clone.
///
/// ```text
///   one region        | zeroes |              shared by all channels, read-only
///   one per channel   | buffer | buffer | …   freed when the channel closes
/// ```
#[derive(Clone, Debug)]
pub struct BounceBufferAllocator {
    shared: Arc<SharedBounceMemory>,
}

#[derive(Debug)]
struct SharedBounceMemory {
    regions: RegionTable,
    zeroes: Region,
    chunk_bytes: u32,
    buffers: u16,
}

/// The bounce buffers of one channel, and the parents that wait for one.
#[derive(Debug)]
pub struct BounceBuffers {
    shared: Arc<SharedBounceMemory>,
    memory: Region,
    free: Vec<u16>,
    waiting: VecDeque<u16>,
}

impl BounceBufferAllocator {
    /// Configures `buffers` of `chunk_bytes` each for every channel; one is enough. Requests refer to the
    /// same region table.
    ///
    /// # Errors
    ///
    /// If `buffers` is zero, `chunk_bytes` is not a power of two, or memory is exhausted.
    pub fn new(regions: &RegionTable, chunk_bytes: u32, buffers: u16) -> Result<Self, Error> {
        let caller = |text| Error::new(ErrorCategory::Usage, text);
        if buffers == 0 {
            return Err(caller("bounce memory: 0 buffers, expected at least 1".to_owned()));
        }
        if !chunk_bytes.is_power_of_two() || chunk_bytes.checked_mul(buffers.into()).is_none() {
            let text = format!(
                "bounce memory: {buffers} buffers of {chunk_bytes} bytes, expected a power of two \
                 and less than 4 GiB in all"
            );
            return Err(caller(text));
        }
        let zeroes = allocate_region(regions, chunk_bytes)?;
        let shared = SharedBounceMemory { regions: regions.clone(), zeroes, chunk_bytes, buffers };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Size of a buffer in bytes.
    pub fn chunk_bytes(&self) -> u32 {
        self.shared.chunk_bytes
    }

    /// Allocates the buffers of one more channel.
    ///
    /// # Errors
    ///
    /// If memory is exhausted.
    pub fn allocate_channel_buffers(&self) -> Result<BounceBuffers, Error> {
        let SharedBounceMemory { regions, chunk_bytes, buffers, .. } = &*self.shared;
        let memory = allocate_region(regions, chunk_bytes * u32::from(*buffers))?;
        Ok(BounceBuffers {
            shared: Arc::clone(&self.shared),
            memory,
            free: (0..*buffers).rev().collect(),
            waiting: VecDeque::new(),
        })
    }
}

fn allocate_region(regions: &RegionTable, len_bytes: u32) -> Result<Region, Error> {
    regions.allocate_region(len_bytes as usize).map_err(|error| {
        Error::new(
            ErrorCategory::Environment,
            format!("bounce memory of {len_bytes} bytes: {error}"),
        )
    })
}

impl BounceBuffers {
    /// Reserves the wait queue, so that nothing is allocated later.
    pub(super) fn reserve_buffers(&mut self, waiters_max: usize) {
        self.waiting.reserve(waiters_max);
    }

    /// Size in bytes of a buffer and of the zeroes.
    pub(super) fn chunk_bytes(&self) -> u32 {
        self.shared.chunk_bytes
    }

    /// Memory that contains zeroes.
    pub(super) fn zero_segment(&self) -> Segment {
        Segment { len_bytes: self.shared.chunk_bytes, ..self.shared.zeroes.segment() }
    }

    /// The first `len_bytes` of a buffer.
    pub(super) fn buffer_segment(&self, buffer: u16, len_bytes: u32) -> Segment {
        let offset = u64::from(buffer) * u64::from(self.shared.chunk_bytes);
        Segment { region: self.memory.id(), offset, len_bytes }
    }

    /// Takes a free buffer. If there is none or others wait already, appends `who` to the wait queue.
    pub(super) fn take_buffer_or_wait(&mut self, who: u16) -> Option<u16> {
        let buffer = if self.waiting.is_empty() { self.free.pop() } else { None };
        if buffer.is_none() {
            self.waiting.push_back(who);
        }
        buffer
    }

    /// Frees a buffer. The parent that has waited longest gets it at once and is returned.
    pub(super) fn release_buffer(&mut self, buffer: u16) -> Option<u16> {
        let next = self.waiting.pop_front();
        if next.is_none() {
            self.free.push(buffer);
        }
        next
    }

    /// Removes `who` from the wait queue.
    pub(super) fn leave_wait_queue(&mut self, who: u16) {
        self.waiting.retain(|waiter| *waiter != who);
    }

    /// Copies from a request's memory, at offset `skip_bytes`, to a buffer.
    pub(super) fn copy_request_to_buffer(
        &self,
        from: &[Segment],
        skip_bytes: u64,
        to: Segment,
    ) -> Result<(), IoStatus> {
        self.for_each_slice(from, skip_bytes, to, |memory, own| {
            self.shared.regions.copy_segment(memory, own)
        })
    }

    /// Copies from a buffer to a request's memory, at offset `skip_bytes`.
    pub(super) fn copy_buffer_to_request(
        &self,
        from: Segment,
        to: &[Segment],
        skip_bytes: u64,
    ) -> Result<(), IoStatus> {
        self.for_each_slice(to, skip_bytes, from, |memory, own| {
            self.shared.regions.copy_segment(own, memory)
        })
    }

    /// Whether a buffer equals a request's memory at offset `skip_bytes`.
    pub(super) fn compare_with_memory(
        &self,
        own: Segment,
        with: &[Segment],
        skip_bytes: u64,
    ) -> Result<(), IoStatus> {
        let mut equal = true;
        self.for_each_slice(with, skip_bytes, own, |memory, own| {
            equal = equal && self.shared.regions.segments_equal(memory, own)?;
            Ok(())
        })?;
        if equal { Ok(()) } else { Err(IoStatus::COMPARE_FAILURE) }
    }

    fn for_each_slice(
        &self,
        segments: &[Segment],
        skip_bytes: u64,
        own: Segment,
        mut step: impl FnMut(Segment, Segment) -> Result<(), tenmil_base::InvalidSegment>,
    ) -> Result<(), IoStatus> {
        let mut pieces = SegmentCursor::new(segments);
        let skipped: Result<(), tenmil_base::InvalidSegment> =
            pieces.take_each_piece(skip_bytes, |_, _| Ok(()));
        let moved = skipped.and_then(|()| {
            pieces.take_each_piece(own.len_bytes.into(), |piece, done| {
                let at = Segment { offset: own.offset + done, len_bytes: piece.len_bytes, ..own };
                step(piece, at)
            })
        });
        moved.map_err(|_| IoStatus::DATA_TRANSFER_ERROR)
    }
}
