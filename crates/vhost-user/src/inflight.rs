//! Inflight record: requests in flight, in memory that outlives this process (vhost-user, "Inflight
//! I/O tracking").
//!
//! ```text
//!   of each queue   | features : 8 | version : 2 | entries : 2 | last of batch : 2 | used index : 2 |
//!                   | in flight : 1 | – : 5 | next : 2 | counter : 8 |      one for each descriptor
//! ```
//!
//! A head is marked before its chain is executed, and unmarked after the used entry has become
//! visible to the driver. In between, the chains of the current batch are linked in a list, so that
//! a successor can tell which marks were not removed in time.
//!
//! The content may have been written by anyone: it is validated like a ring.

use tenmil_base::{InvalidSegment, Memory, Segment};

use crate::vring::VringError;

/// Inflight record of one queue.
#[derive(Debug)]
pub struct InflightLog<M> {
    memory: M,
    place: Segment,
    size: u16,
    counter: u64,
    /// Last head of the previous batch and the used index: the two halves of one word.
    last: u16,
    used: u16,
    /// Heads to be unmarked.
    batch: Vec<u16>,
}

/// Why an inflight record cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InflightError {
    /// Unsupported version.
    Version(u16),
    /// Wrong number of entries.
    Entries(u16),
    /// Invalid descriptor index in the batch list.
    List(u16),
    /// The memory was unmapped.
    Unmapped,
}

const HEADER_BYTES: u32 = 16;
const ENTRY_BYTES: u32 = 16;
/// Alignment of the record of a queue: a cache line.
const ALIGN_BYTES: u32 = 64;
const VERSION: u16 = 1;

/// Distance between the records of two queues of `size` descriptors, in bytes.
pub const fn stride_bytes(size: u16) -> u32 {
    (HEADER_BYTES + ENTRY_BYTES * size as u32).next_multiple_of(ALIGN_BYTES)
}

impl<M: Memory> InflightLog<M> {
    /// Opens the record at `place` for a queue of `size` descriptors whose used index is `used`.
    /// Returns it with the heads in flight, oldest first. Zeroed memory is an empty record.
    ///
    /// # Errors
    ///
    /// If the memory contains something else.
    pub fn open(
        memory: M,
        place: Segment,
        size: u16,
        used: u16,
    ) -> Result<(Self, Vec<u16>), InflightError> {
        let mut record = Self { memory, place, size, counter: 0, last: 0, used, batch: Vec::new() };
        record.batch.reserve_exact(usize::from(size));
        let [version, entries] = low_and_high_u16(record.load(8)?);
        match (version, entries) {
            (0, 0) => {
                record.store(8, u32::from(VERSION) | u32::from(size) << 16)?;
                record.store_batch()?;
                return Ok((record, Vec::new()));
            }
            (VERSION, entries) if entries == size => {}
            (VERSION, entries) => return Err(InflightError::Entries(entries)),
            (version, _) => return Err(InflightError::Version(version)),
        }
        let [last, recorded] = low_and_high_u16(record.load(12)?);
        record.last = last;
        let mut heads = record.heads_in_flight()?;
        // A restarted driver has reset its index, and then there are no marks.
        if !heads.is_empty() {
            record.complete_interrupted_batch(used.wrapping_sub(recorded))?;
            heads = record.heads_in_flight()?;
        }
        record.store_batch()?;
        Ok((record, heads))
    }

    /// Unmarks the heads of the last batch that the driver can see already, because the predecessor
    /// stopped before it unmarked them.
    fn complete_interrupted_batch(&mut self, count: u16) -> Result<(), InflightError> {
        if count > self.size {
            return Err(InflightError::List(count));
        }
        let mut head = self.last;
        for _ in 0..count {
            if head >= self.size {
                return Err(InflightError::List(head));
            }
            self.store(entry_offset(head), 0)?;
            let [_, next] = low_and_high_u16(self.load(entry_offset(head) + 4)?);
            head = next;
        }
        Ok(())
    }

    /// Heads in flight, oldest first.
    fn heads_in_flight(&mut self) -> Result<Vec<u16>, InflightError> {
        let mut found = Vec::new();
        for head in 0..self.size {
            let at = entry_offset(head);
            if self.load(at)? & 0xff == 0 {
                continue;
            }
            let counter = u64::from(self.load(at + 8)?) | u64::from(self.load(at + 12)?) << 32;
            found.push((counter, head));
        }
        found.sort_unstable();
        self.counter = found.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        Ok(found.into_iter().map(|(_, head)| head).collect())
    }

    /// Marks a chain as in flight.
    ///
    /// # Errors
    ///
    /// If the memory was unmapped.
    #[inline]
    pub fn mark_in_flight(&mut self, head: u16) -> Result<(), VringError> {
        let [low, high] = low_and_high_u32(self.counter);
        self.counter = self.counter.wrapping_add(1);
        let at = entry_offset(head);
        let marked = self
            .store(at + 8, low)
            .and_then(|()| self.store(at + 12, high))
            .and_then(|()| self.store(at, 1));
        marked.map_err(|_| VringError::Unmapped)
    }

    /// Adds a chain to the batch: its used entry was written but not published.
    ///
    /// # Errors
    ///
    /// If the memory was unmapped.
    #[inline]
    pub fn add_to_batch(&mut self, head: u16) -> Result<(), VringError> {
        let linked = self.store(entry_offset(head) + 4, u32::from(self.last) << 16);
        self.last = head;
        self.batch.push(head);
        linked.and_then(|()| self.store_batch()).map_err(|_| VringError::Unmapped)
    }

    /// Unmarks the batch after its publication. `used` is the used index.
    ///
    /// # Errors
    ///
    /// If the memory was unmapped.
    #[inline]
    pub fn publish_batch(&mut self, used: u16) -> Result<(), VringError> {
        let mut cleared = Ok(());
        for at in 0..self.batch.len() {
            let head = self.batch[at];
            cleared = cleared.and_then(|()| self.store(entry_offset(head), 0));
        }
        self.batch.clear();
        self.used = used;
        cleared.and_then(|()| self.store_batch()).map_err(|_| VringError::Unmapped)
    }

    fn store_batch(&self) -> Result<(), InflightError> {
        self.store(12, u32::from(self.last) | u32::from(self.used) << 16)
    }

    #[inline]
    fn load(&self, at: u32) -> Result<u32, InflightError> {
        let place = self.place.slice(at, 4).ok_or(InflightError::Unmapped)?;
        self.memory.load_u32(place).map_err(unmapped_error)
    }

    /// Stores a word. Each store is a release, so a successor sees the stores in their order, up to
    /// the last one.
    #[inline]
    fn store(&self, at: u32, value: u32) -> Result<(), InflightError> {
        let place = self.place.slice(at, 4).ok_or(InflightError::Unmapped)?;
        self.memory.store_u32(place, value).map_err(unmapped_error)
    }
}

#[inline]
fn entry_offset(head: u16) -> u32 {
    HEADER_BYTES + u32::from(head) * ENTRY_BYTES
}

#[inline]
fn low_and_high_u16(word: u32) -> [u16; 2] {
    [word & 0xffff, word >> 16].map(|half| u16::try_from(half).unwrap_or(0))
}

#[inline]
fn low_and_high_u32(value: u64) -> [u32; 2] {
    [value & 0xffff_ffff, value >> 32].map(|half| u32::try_from(half).unwrap_or(0))
}

#[cold]
fn unmapped_error(_: InvalidSegment) -> InflightError {
    InflightError::Unmapped
}

impl core::fmt::Display for InflightError {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Version(found) => {
                write!(out, "the record of what is in flight has version {found}, expected 1")
            }
            Self::Entries(found) => write!(
                out,
                "the record of what is in flight is for {found} descriptors, expected as many as \
                 the queue has"
            ),
            Self::List(found) => write!(
                out,
                "the record of what is in flight names {found} in its last batch, expected a \
                 descriptor of the queue"
            ),
            Self::Unmapped => {
                out.write_str("the record of what is in flight is not in shared memory")
            }
        }
    }
}

impl core::error::Error for InflightError {}
