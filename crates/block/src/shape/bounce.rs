//! Memory of the shaper's own: buffers that data takes a detour through, and zeroes to write.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use base::{Blame, Outcome, Segment};
use dma::{Backing, Mapping, Regions};

use crate::MediumError;
use crate::backend::pieces::Pieces;

/// Where the channels of one device get their buffers from. Cheap to clone.
///
/// ```text
///   one region        | zeroes |              shared by all channels, only ever read
///   one per channel   | buffer | buffer | …   given back when the channel closes, for the next one
/// ```
#[derive(Clone, Debug)]
pub struct BounceMemory {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    regions: Regions,
    zeroes: Segment,
    chunk_bytes: u32,
    buffers: u16,
    /// Memory of channels that have been closed. The lock is for opening and closing.
    idle: Mutex<Vec<Segment>>,
}

/// The buffers of one channel, and who waits for one.
#[derive(Debug)]
pub struct BounceBuffers {
    shared: Arc<Shared>,
    memory: Segment,
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
        let (regions, idle) = (regions.clone(), Mutex::new(Vec::new()));
        let shared = Shared { regions, zeroes, chunk_bytes, buffers, idle };
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
        let Shared { regions, chunk_bytes, buffers, idle, .. } = &*self.shared;
        let idle = idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let memory = match idle {
            Some(memory) => memory,
            None => add(regions, chunk_bytes * u32::from(*buffers))?,
        };
        Ok(BounceBuffers {
            shared: Arc::clone(&self.shared),
            memory,
            free: (0..*buffers).rev().collect(),
            waiting: VecDeque::new(),
        })
    }
}

fn add(regions: &Regions, len_bytes: u32) -> Result<Segment, MediumError> {
    let machine = |error: &dyn std::fmt::Display| {
        MediumError::new(Blame::Machine, format!("bounce memory of {len_bytes} bytes: {error}"))
    };
    let mapping = Mapping::new(len_bytes as usize, Backing::Private);
    let memory = regions.add(mapping.map_err(|error| machine(&error))?);
    let memory = memory.map_err(|error| machine(&error))?;
    Ok(Segment { len_bytes, ..memory })
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
        self.shared.zeroes
    }

    /// The first `len_bytes` of a buffer.
    pub(super) fn part(&self, buffer: u16, len_bytes: u32) -> Segment {
        let offset = u64::from(buffer) * u64::from(self.shared.chunk_bytes);
        Segment { offset: self.memory.offset + offset, len_bytes, ..self.memory }
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

impl Drop for BounceBuffers {
    fn drop(&mut self) {
        self.shared.idle.lock().unwrap_or_else(PoisonError::into_inner).push(self.memory);
    }
}
