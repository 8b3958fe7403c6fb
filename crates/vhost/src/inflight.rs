//! What is in flight, in memory that outlives this process (vhost-user, "Inflight I/O tracking").
//!
//! ```text
//!   of each queue   | features : 8 | version : 2 | entries : 2 | last of batch : 2 | used index : 2 |
//!                   | in flight : 1 | – : 5 | next : 2 | counter : 8 |      one for each descriptor
//! ```
//!
//! A head is marked before its chain is worked on, and the mark is taken away after the driver can
//! see that it was used. Between the two steps of that, the chains that are being used hang
//! together in a list, so that whoever goes on knows which marks came too late to be taken away.
//!
//! Whatever is found here may have been written by anybody: it is checked like a ring.

use base::{Memory, NoSuchMemory, Segment};

use crate::ring::Broken;

/// The record of one queue.
#[derive(Debug)]
pub struct Record<M> {
    memory: M,
    place: Segment,
    size: u16,
    counter: u64,
    /// The two halves of the word that says how far the last batch was.
    last: u16,
    used: u16,
    /// Heads whose marks are to be taken away.
    batch: Vec<u16>,
}

/// A record that cannot be gone on with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// Another version.
    Version(u16),
    /// Another length.
    Entries(u16),
    /// A list that names what is no descriptor.
    List(u16),
    /// The memory is gone.
    Gone,
}

const HEADER_BYTES: u32 = 16;
const ENTRY_BYTES: u32 = 16;
/// The records of two queues do not share a line.
const ALIGN_BYTES: u32 = 64;
const VERSION: u16 = 1;

/// How far apart the records of two queues of `size` descriptors are.
pub const fn stride_bytes(size: u16) -> u32 {
    (HEADER_BYTES + ENTRY_BYTES * size as u32).next_multiple_of(ALIGN_BYTES)
}

impl<M: Memory> Record<M> {
    /// The record at `place`, of a queue with `size` descriptors whose used ring is at `used`, and the
    /// heads that are in flight, oldest first. Memory that nobody has written yet is an empty record.
    ///
    /// # Errors
    ///
    /// If what lies there is something else.
    pub fn open(
        memory: M,
        place: Segment,
        size: u16,
        used: u16,
    ) -> Result<(Self, Vec<u16>), Unreadable> {
        let mut record = Self { memory, place, size, counter: 0, last: 0, used, batch: Vec::new() };
        record.batch.reserve_exact(usize::from(size));
        let [version, entries] = halves(record.load(8)?);
        match (version, entries) {
            (0, 0) => {
                record.store(8, u32::from(VERSION) | u32::from(size) << 16)?;
                record.store_batch()?;
                return Ok((record, Vec::new()));
            }
            (VERSION, entries) if entries == size => {}
            (VERSION, entries) => return Err(Unreadable::Entries(entries)),
            (version, _) => return Err(Unreadable::Version(version)),
        }
        let [last, recorded] = halves(record.load(12)?);
        record.last = last;
        let mut heads = record.marked()?;
        // A driver that began anew has begun its index anew, and then there are no marks.
        if !heads.is_empty() {
            record.finish_batch(used.wrapping_sub(recorded))?;
            heads = record.marked()?;
        }
        record.store_batch()?;
        Ok((record, heads))
    }

    /// Takes away the marks of a batch that the driver can see, and whoever made it did not come so
    /// far.
    fn finish_batch(&mut self, count: u16) -> Result<(), Unreadable> {
        if count > self.size {
            return Err(Unreadable::List(count));
        }
        let mut head = self.last;
        for _ in 0..count {
            if head >= self.size {
                return Err(Unreadable::List(head));
            }
            self.store(entry(head), 0)?;
            let [_, next] = halves(self.load(entry(head) + 4)?);
            head = next;
        }
        Ok(())
    }

    /// Heads that are in flight, oldest first.
    fn marked(&mut self) -> Result<Vec<u16>, Unreadable> {
        let mut found = Vec::new();
        for head in 0..self.size {
            let at = entry(head);
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

    /// A chain was taken.
    ///
    /// # Errors
    ///
    /// If the memory is gone.
    #[inline]
    pub fn begin(&mut self, head: u16) -> Result<(), Broken> {
        let [low, high] = words(self.counter);
        self.counter = self.counter.wrapping_add(1);
        let at = entry(head);
        let marked = self
            .store(at + 8, low)
            .and_then(|()| self.store(at + 12, high))
            .and_then(|()| self.store(at, 1));
        marked.map_err(|_| Broken::Gone)
    }

    /// A chain was pushed, and is not published yet.
    ///
    /// # Errors
    ///
    /// If the memory is gone.
    #[inline]
    pub fn push(&mut self, head: u16) -> Result<(), Broken> {
        let linked = self.store(entry(head) + 4, u32::from(self.last) << 16);
        self.last = head;
        self.batch.push(head);
        linked.and_then(|()| self.store_batch()).map_err(|_| Broken::Gone)
    }

    /// What was pushed is published: `used` is the index of the used ring.
    ///
    /// # Errors
    ///
    /// If the memory is gone.
    #[inline]
    pub fn publish(&mut self, used: u16) -> Result<(), Broken> {
        let mut cleared = Ok(());
        for at in 0..self.batch.len() {
            let head = self.batch[at];
            cleared = cleared.and_then(|()| self.store(entry(head), 0));
        }
        self.batch.clear();
        self.used = used;
        cleared.and_then(|()| self.store_batch()).map_err(|_| Broken::Gone)
    }

    fn store_batch(&self) -> Result<(), Unreadable> {
        self.store(12, u32::from(self.last) | u32::from(self.used) << 16)
    }

    #[inline]
    fn load(&self, at: u32) -> Result<u32, Unreadable> {
        let place = self.place.slice(at, 4).ok_or(Unreadable::Gone)?;
        self.memory.load_u32(place).map_err(gone)
    }

    /// Stores are seen in their order: each is a release, and one who goes on after this process has
    /// ended sees all that it has stored.
    #[inline]
    fn store(&self, at: u32, value: u32) -> Result<(), Unreadable> {
        let place = self.place.slice(at, 4).ok_or(Unreadable::Gone)?;
        self.memory.store_u32(place, value).map_err(gone)
    }
}

#[inline]
fn entry(head: u16) -> u32 {
    HEADER_BYTES + u32::from(head) * ENTRY_BYTES
}

#[inline]
fn halves(word: u32) -> [u16; 2] {
    [word & 0xffff, word >> 16].map(|half| u16::try_from(half).unwrap_or(0))
}

#[inline]
fn words(value: u64) -> [u32; 2] {
    [value & 0xffff_ffff, value >> 32].map(|half| u32::try_from(half).unwrap_or(0))
}

#[cold]
fn gone(_: NoSuchMemory) -> Unreadable {
    Unreadable::Gone
}

impl core::fmt::Display for Unreadable {
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
            Self::Gone => out.write_str("the record of what is in flight is not in shared memory"),
        }
    }
}

impl core::error::Error for Unreadable {}
