//! Memory of the shaper's own: buffers that data takes a detour through, and zeroes to write.

use std::collections::VecDeque;
use std::sync::Arc;

use base::{Blame, Outcome, Segment};
use dma::{Region, Regions};

use crate::MediumError;
use crate::backend::pieces::Pieces;

/// Where the channels of one device get their buffers from. Cheap to clone.
///
/// ```text
///   one region        | zeroes |              shared by all channels, only ever read
///   one per channel   | buffer | buffer | …   goes when the channel closes
/// ```
#[derive(Clone, Debug)]
pub struct BounceMemory {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    regions: Regions,
    zeroes: Region,
    chunk_bytes: u32,
    buffers: u16,
}

/// The buffers of one channel, and who waits for one.
#[derive(Debug)]
pub struct BounceBuffers {
    shared: Arc<Shared>,
    memory: Region,
    free: Vec<u16>,
    waiting: VecDeque<u16>,
}

impl BounceMemory {
    /// `buffers` of `chunk_bytes` each for every channel; one is enough. Requests name memory of the
    /// same table of regions.
    ///
    /// # Errors
    ///
    /// If there is to be no buffer, a chunk is not a power of two, or there is no memory.
    pub fn new(regions: &Regions, chunk_bytes: u32, buffers: u16) -> Result<Self, MediumError> {
        let caller = |text| MediumError::new(Blame::Caller, text);
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
        let zeroes = add(regions, chunk_bytes)?;
        let shared = Shared { regions: regions.clone(), zeroes, chunk_bytes, buffers };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Bytes in a buffer.
    pub fn chunk_bytes(&self) -> u32 {
        self.shared.chunk_bytes
    }

    /// The buffers of one more channel.
    ///
    /// # Errors
    ///
    /// If there is no memory for them.
    pub fn channel(&self) -> Result<BounceBuffers, MediumError> {
        let Shared { regions, chunk_bytes, buffers, .. } = &*self.shared;
        let memory = add(regions, chunk_bytes * u32::from(*buffers))?;
        Ok(BounceBuffers {
            shared: Arc::clone(&self.shared),
            memory,
            free: (0..*buffers).rev().collect(),
            waiting: VecDeque::new(),
        })
    }
}

fn add(regions: &Regions, len_bytes: u32) -> Result<Region, MediumError> {
    regions.allocate(len_bytes as usize).map_err(|error| {
        MediumError::new(Blame::Machine, format!("bounce memory of {len_bytes} bytes: {error}"))
    })
}

impl BounceBuffers {
    /// Makes room for so many to wait, so that nothing is allocated later.
    pub(super) fn reserve(&mut self, waiters_max: usize) {
        self.waiting.reserve(waiters_max);
    }

    /// Bytes in a buffer, and in the zeroes.
    pub(super) fn chunk_bytes(&self) -> u32 {
        self.shared.chunk_bytes
    }

    /// Memory that holds zeroes.
    pub(super) fn zeroes(&self) -> Segment {
        Segment { len_bytes: self.shared.chunk_bytes, ..self.shared.zeroes.segment() }
    }

    /// The first `len_bytes` of a buffer.
    pub(super) fn part(&self, buffer: u16, len_bytes: u32) -> Segment {
        let offset = u64::from(buffer) * u64::from(self.shared.chunk_bytes);
        Segment { region: self.memory.id(), offset, len_bytes }
    }

    /// A buffer for `who`, unless there is none or others wait already: then `who` waits behind
    /// them.
    pub(super) fn take(&mut self, who: u16) -> Option<u16> {
        let buffer = if self.waiting.is_empty() { self.free.pop() } else { None };
        if buffer.is_none() {
            self.waiting.push_back(who);
        }
        buffer
    }

    /// Takes a buffer back. If somebody waits, it is theirs at once: who has waited longest.
    pub(super) fn give_back(&mut self, buffer: u16) -> Option<u16> {
        let next = self.waiting.pop_front();
        if next.is_none() {
            self.free.push(buffer);
        }
        next
    }

    /// Forgets that `who` waits.
    pub(super) fn leave(&mut self, who: u16) {
        self.waiting.retain(|waiter| *waiter != who);
    }

    /// Copies from a request's memory, `skip_bytes` in, to a buffer.
    pub(super) fn gather(
        &self,
        from: &[Segment],
        skip_bytes: u64,
        to: Segment,
    ) -> Result<(), Outcome> {
        self.each(from, skip_bytes, to, |memory, own| self.shared.regions.copy(memory, own))
    }

    /// Copies from a buffer to a request's memory, `skip_bytes` in.
    pub(super) fn scatter(
        &self,
        from: Segment,
        to: &[Segment],
        skip_bytes: u64,
    ) -> Result<(), Outcome> {
        self.each(to, skip_bytes, from, |memory, own| self.shared.regions.copy(own, memory))
    }

    /// Whether a buffer holds what lies `skip_bytes` into a request's memory.
    pub(super) fn compare(
        &self,
        own: Segment,
        with: &[Segment],
        skip_bytes: u64,
    ) -> Result<(), Outcome> {
        let mut equal = true;
        self.each(with, skip_bytes, own, |memory, own| {
            equal = equal && self.shared.regions.equal(memory, own)?;
            Ok(())
        })?;
        if equal { Ok(()) } else { Err(Outcome::COMPARE_FAILURE) }
    }

    fn each(
        &self,
        segments: &[Segment],
        skip_bytes: u64,
        own: Segment,
        mut step: impl FnMut(Segment, Segment) -> Result<(), base::NoSuchMemory>,
    ) -> Result<(), Outcome> {
        let mut pieces = Pieces::of(segments);
        let skipped: Result<(), base::NoSuchMemory> = pieces.take_each(skip_bytes, |_, _| Ok(()));
        let moved = skipped.and_then(|()| {
            pieces.take_each(own.len_bytes.into(), |piece, done| {
                let at = Segment { offset: own.offset + done, len_bytes: piece.len_bytes, ..own };
                step(piece, at)
            })
        });
        moved.map_err(|_| Outcome::DATA_TRANSFER_ERROR)
    }
}
