//! A split virtqueue, from the device's side (virtio 2.7).
//!
//! ```text
//!   descriptors   | address : 8 | length : 4 | flags : 2 | next : 2 |      size of them
//!   available     | flags : 2 | index : 2 | head : 2 …  | used event : 2 |
//!   used          | flags : 2 | index : 2 | (head : 4, length : 4) … | available event : 2 |
//! ```
//!
//! The driver may change any of it at any time. Each word is loaded once, checked, and then used as
//! it was loaded; a chain is followed for as many steps as it may have, whatever it says.

use core::fmt;
use core::sync::atomic::{Ordering, fence};

use base::{Memory, NoSuchMemory, Segment};

use crate::space::{Outside, Space};

/// Where the three parts lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPlace {
    descriptors: Segment,
    available: Segment,
    used: Segment,
    size: u16,
}

/// The device's end.
#[derive(Debug)]
pub struct Ring<M> {
    memory: M,
    place: RingPlace,
    /// The available entry to be taken next.
    next: u16,
    /// The driver's index, as it was seen last.
    seen: u16,
    /// The used entry to be written next.
    used: u16,
    /// Our index, as the driver can see it.
    published: u16,
    has_event_index: bool,
    /// Of the used ring.
    flags: u16,
}

/// What a descriptor chain is made of: first what the device may read, then what it may write.
#[derive(Debug, Default)]
pub struct Chain {
    /// What the device may read.
    pub readable: Vec<Segment>,
    /// What it may write.
    pub writable: Vec<Segment>,
    /// Bytes of the first.
    pub readable_bytes: u64,
    /// Bytes of the second.
    pub writable_bytes: u64,
}

/// What a driver did to its ring that it may not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// The available index is further ahead than the ring is long.
    Jump {
        /// The index.
        found: u16,
        /// What was taken already.
        taken: u16,
        /// Entries of the ring.
        size: u16,
    },
    /// A head, or a next, that is no descriptor.
    Descriptor {
        /// Its number.
        found: u16,
        /// How many there are.
        size: u16,
    },
    /// A head that the device has already.
    Twice {
        /// Which.
        head: u16,
    },
    /// A chain that goes on for longer than it may, or for ever.
    Long {
        /// Where it begins.
        head: u16,
        /// Descriptors that it may have.
        expected_max: u32,
    },
    /// A table of descriptors in a place where it may not be, or of a length that makes no sense.
    Indirect {
        /// In whose chain.
        head: u16,
        /// Its length in bytes.
        found: u32,
    },
    /// Something for the device to read behind something for it to write.
    Order {
        /// In whose chain.
        head: u16,
    },
    /// No room for what a request begins or ends with.
    Short {
        /// Whose.
        head: u16,
        /// Bytes that the device may read.
        readable: u64,
        /// Bytes that it may write.
        writable: u64,
    },
    /// An address outside of the guest's memory.
    Outside(Outside),
    /// The ring itself is not there any more.
    Gone,
}

/// Entries of the largest ring: more than that no chain may have, either.
pub const QUEUE_SIZE_MAX: u16 = 1024;
/// Pieces of memory in a chain: its descriptors, and some that lie across two stretches.
const PIECES_MAX: usize = QUEUE_SIZE_MAX as usize + 64;

const DESCRIPTOR_BYTES: u32 = 16;
/// Flags of a descriptor (virtio 2.7.5).
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Flag of the available ring: the driver wants no calls (virtio 2.7.7).
const NO_INTERRUPT: u16 = 1;
/// Flag of the used ring: the device wants no kicks (virtio 2.7.10).
const NO_NOTIFY: u16 = 1;

#[derive(Clone, Copy, Debug)]
struct Descriptor {
    address: u64,
    len_bytes: u32,
    flags: u16,
    next: u16,
}

impl RingPlace {
    /// A ring of `size` entries whose parts lie at these addresses of the front end.
    ///
    /// # Errors
    ///
    /// If one of them does not lie in one stretch of memory.
    pub fn new(
        space: &Space,
        size: u16,
        [descriptors, available, used]: [u64; 3],
    ) -> Result<Self, Outside> {
        let entries = u32::from(size);
        Ok(Self {
            descriptors: space.at_user(descriptors, entries * DESCRIPTOR_BYTES)?,
            available: space.at_user(available, 6 + 2 * entries)?,
            used: space.at_user(used, 6 + 8 * entries)?,
            size,
        })
    }

    /// How many entries it has.
    pub fn size(&self) -> u16 {
        self.size
    }
}

impl<M: Memory> Ring<M> {
    /// The ring at `place`, of which `next` is taken first. It wants no kicks until it is
    /// [asked for some](Self::ask_for_kicks).
    ///
    /// # Errors
    ///
    /// If it is not there.
    pub fn new(
        memory: M,
        place: RingPlace,
        next: u16,
        has_event_index: bool,
    ) -> Result<Self, Broken> {
        let word = memory.load_u32(place.used).map_err(gone)?;
        let used = high(word);
        let mut ring = Self {
            memory,
            place,
            next,
            seen: next,
            used,
            published: used,
            has_event_index,
            flags: 0,
        };
        ring.want_no_kicks()?;
        Ok(ring)
    }

    /// The index of the used ring.
    pub fn used(&self) -> u16 {
        self.used
    }

    /// The available entry to be taken next.
    pub fn next(&self) -> u16 {
        self.next
    }

    /// The head of the next chain, if there is one.
    ///
    /// # Errors
    ///
    /// If the driver's index, or the head, makes no sense.
    #[inline]
    pub fn take(&mut self) -> Result<Option<u16>, Broken> {
        if self.seen == self.next && !self.look()? {
            return Ok(None);
        }
        let size = self.place.size;
        let at = 4 + 2 * u64::from(self.next & (size - 1));
        let head = self.load_half(self.place.available, at)?;
        if head >= size {
            return Err(Broken::Descriptor { found: head, size });
        }
        self.next = self.next.wrapping_add(1);
        Ok(Some(head))
    }

    /// Looks how far the driver has come. Whether there is something to take.
    fn look(&mut self) -> Result<bool, Broken> {
        let Self { next: taken, place: RingPlace { size, available, .. }, .. } = *self;
        let found = self.load_half(available, 2)?;
        if found.wrapping_sub(taken) > size {
            return Err(Broken::Jump { found, taken, size });
        }
        self.seen = found;
        Ok(found != taken)
    }

    /// What the chain that begins at `head` is made of, in place of what was in `chain`.
    ///
    /// # Errors
    ///
    /// If it makes no sense, or names what is no memory.
    #[inline]
    pub fn follow(&self, head: u16, space: &Space, chain: &mut Chain) -> Result<(), Broken> {
        chain.clear();
        let RingPlace { descriptors, size, .. } = self.place;
        let mut index = head;
        for _ in 0..size {
            if index >= size {
                return Err(Broken::Descriptor { found: index, size });
            }
            let at = u32::from(index) * DESCRIPTOR_BYTES;
            let descriptor = self.descriptor(piece(descriptors, at)?)?;
            if descriptor.flags & INDIRECT != 0 {
                return self.follow_table(head, descriptor, space, chain);
            }
            chain.add(head, descriptor, space)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next;
        }
        Err(Broken::Long { head, expected_max: size.into() })
    }

    /// Follows a table of descriptors, with which a chain ends.
    fn follow_table(
        &self,
        head: u16,
        table: Descriptor,
        space: &Space,
        chain: &mut Chain,
    ) -> Result<(), Broken> {
        let found = table.len_bytes;
        let count = found / DESCRIPTOR_BYTES;
        let is_right = table.flags & NEXT == 0
            && found.is_multiple_of(DESCRIPTOR_BYTES)
            && (1..=u32::from(QUEUE_SIZE_MAX)).contains(&count);
        if !is_right {
            return Err(Broken::Indirect { head, found });
        }
        let count = u16::try_from(count).unwrap_or(QUEUE_SIZE_MAX);
        let mut index = 0;
        for _ in 0..count {
            if index >= count {
                return Err(Broken::Descriptor { found: index, size: count });
            }
            let descriptor = self.table_entry(table.address, index, space)?;
            if descriptor.flags & INDIRECT != 0 {
                return Err(Broken::Indirect { head, found: descriptor.len_bytes });
            }
            chain.add(head, descriptor, space)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next;
        }
        Err(Broken::Long { head, expected_max: count.into() })
    }

    fn table_entry(&self, table: u64, index: u16, space: &Space) -> Result<Descriptor, Broken> {
        let skip = u64::from(index) * u64::from(DESCRIPTOR_BYTES);
        let outside = Outside { address: table, len_bytes: DESCRIPTOR_BYTES.into() };
        let address = table.checked_add(skip).ok_or(Broken::Outside(outside))?;
        let mut bytes = [0; DESCRIPTOR_BYTES as usize];
        let mut rest = &mut bytes[..];
        // It may lie across two stretches.
        let mut pieces = Vec::new();
        space.resolve(address, DESCRIPTOR_BYTES, 2, &mut pieces).map_err(Broken::Outside)?;
        for piece in pieces {
            let (first, others) = rest.split_at_mut(piece.len_bytes as usize);
            self.memory.load(piece, first).map_err(gone)?;
            rest = others;
        }
        Ok(Descriptor::read(&bytes))
    }

    #[inline]
    fn descriptor(&self, at: Segment) -> Result<Descriptor, Broken> {
        let mut bytes = [0; DESCRIPTOR_BYTES as usize];
        let at = at.slice(0, DESCRIPTOR_BYTES).ok_or(Broken::Gone)?;
        self.memory.load(at, &mut bytes).map_err(gone)?;
        Ok(Descriptor::read(&bytes))
    }

    /// Puts a chain into the used ring, of which `len_bytes` were written. The driver sees it after
    /// [`publish`](Self::publish).
    ///
    /// # Errors
    ///
    /// If the ring is gone.
    #[inline]
    pub fn push(&mut self, head: u16, len_bytes: u32) -> Result<(), Broken> {
        let at = 4 + 8 * u32::from(self.used & (self.place.size - 1));
        let entry = u64::from(head) | u64::from(len_bytes) << 32;
        let place = piece(self.place.used, at)?.slice(0, 8).ok_or(Broken::Gone)?;
        self.memory.store(place, &entry.to_le_bytes()).map_err(gone)?;
        self.used = self.used.wrapping_add(1);
        Ok(())
    }

    /// Lets the driver see what was pushed.
    ///
    /// # Errors
    ///
    /// If the ring is gone.
    #[inline]
    pub fn publish(&mut self) -> Result<(), Broken> {
        self.store_used()
    }

    /// Whether the driver wants to be called about what was published since this was asked last.
    ///
    /// # Errors
    ///
    /// If the ring is gone.
    #[inline]
    pub fn wants_call(&mut self) -> Result<bool, Broken> {
        let (old, new) = (self.published, self.used);
        if old == new {
            return Ok(false);
        }
        self.published = new;
        // Between our index and the driver's wish: it stores the wish, then looks for our index.
        fence(Ordering::SeqCst);
        if !self.has_event_index {
            let flags = self.load_half(self.place.available, 0)?;
            return Ok(flags & NO_INTERRUPT == 0);
        }
        let at = 4 + 2 * u64::from(self.place.size);
        let event = self.load_half(self.place.available, at)?;
        // Whether the event lies among what is new (virtio 2.7.10.1).
        Ok(new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old))
    }

    /// Asks for a kick with the next chain, and looks once more. True if there is one already.
    ///
    /// # Errors
    ///
    /// If the ring is gone, or makes no sense.
    pub fn ask_for_kicks(&mut self) -> Result<bool, Broken> {
        if self.has_event_index {
            let at = 4 + 8 * u32::from(self.place.size);
            let event = piece(self.place.used, at)?.slice(0, 2).ok_or(Broken::Gone)?;
            self.memory.store(event, &self.next.to_le_bytes()).map_err(gone)?;
        } else {
            self.flags = 0;
            self.store_used()?;
        }
        // Between our wish and the driver's index: it stores the index, then looks for our wish.
        fence(Ordering::SeqCst);
        Ok(self.seen != self.next || self.look()?)
    }

    /// Wants no kicks: the ring is looked at. With an event index nothing has to be said: the one
    /// that was asked for lies behind.
    ///
    /// # Errors
    ///
    /// If the ring is gone.
    pub fn want_no_kicks(&mut self) -> Result<(), Broken> {
        if self.has_event_index || self.flags == NO_NOTIFY {
            return Ok(());
        }
        self.flags = NO_NOTIFY;
        self.store_used()
    }

    /// Flags and index of the used ring are ours alone, so they are stored as one.
    #[inline]
    fn store_used(&mut self) -> Result<(), Broken> {
        let word = u32::from(self.flags) | u32::from(self.used) << 16;
        self.memory.store_u32(self.place.used, word).map_err(gone)
    }

    /// Loads 16 bits of a part, `at` bytes in, by the aligned word around them.
    #[inline]
    fn load_half(&self, part: Segment, at: u64) -> Result<u16, Broken> {
        let offset = part.offset + at;
        let word = Segment { offset: offset & !3, len_bytes: 4, ..part };
        let word = self.memory.load_u32(word).map_err(gone)?;
        Ok(if offset & 2 == 0 { low(word) } else { high(word) })
    }
}

impl Chain {
    fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
        (self.readable_bytes, self.writable_bytes) = (0, 0);
    }

    #[inline]
    fn add(&mut self, head: u16, descriptor: Descriptor, space: &Space) -> Result<(), Broken> {
        let Descriptor { address, len_bytes, flags, .. } = descriptor;
        let outside = Broken::Outside;
        if flags & WRITE != 0 {
            self.writable_bytes += u64::from(len_bytes);
            let pieces = &mut self.writable;
            return space.resolve(address, len_bytes, PIECES_MAX, pieces).map_err(outside);
        }
        if !self.writable.is_empty() {
            return Err(Broken::Order { head });
        }
        self.readable_bytes += u64::from(len_bytes);
        space.resolve(address, len_bytes, PIECES_MAX, &mut self.readable).map_err(outside)
    }
}

impl Descriptor {
    #[inline]
    fn read(bytes: &[u8; DESCRIPTOR_BYTES as usize]) -> Self {
        let word = u128::from_le_bytes(*bytes);
        let half = |shift: u32| u64::try_from(word >> shift & u128::from(u64::MAX)).unwrap_or(0);
        let tail = half(64);
        Self {
            address: half(0),
            len_bytes: u32::try_from(tail & 0xffff_ffff).unwrap_or(0),
            flags: low(u32::try_from(tail >> 32).unwrap_or(0)),
            next: high(u32::try_from(tail >> 32).unwrap_or(0)),
        }
    }
}

#[inline]
fn piece(part: Segment, skip: u32) -> Result<Segment, Broken> {
    let left = part.len_bytes.checked_sub(skip).ok_or(Broken::Gone)?;
    part.slice(skip, left).ok_or(Broken::Gone)
}

#[inline]
fn low(word: u32) -> u16 {
    u16::try_from(word & 0xffff).unwrap_or(0)
}

#[inline]
fn high(word: u32) -> u16 {
    u16::try_from(word >> 16).unwrap_or(0)
}

#[cold]
fn gone(_: NoSuchMemory) -> Broken {
    Broken::Gone
}

impl fmt::Display for Broken {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Jump { found, taken, size } => {
                write!(out, "available index {found} after {taken}, expected at most {size} more")
            }
            Self::Descriptor { found, size } => {
                write!(out, "descriptor {found}, expected one below {size}")
            }
            Self::Twice { head } => {
                write!(out, "chain {head} was given twice, expected it once until it is used")
            }
            Self::Long { head, expected_max } => {
                write!(out, "chain {head} goes on, expected its end after {expected_max} at most")
            }
            Self::Indirect { head, found } => write!(
                out,
                "chain {head} has a table of {found} bytes, expected a last one of 1 to \
                 {QUEUE_SIZE_MAX} descriptors"
            ),
            Self::Order { head } => {
                write!(out, "chain {head} has something to read behind something to write")
            }
            Self::Short { head, readable, writable } => write!(
                out,
                "chain {head} has {readable} bytes to read and {writable} to write, expected 16 and \
                 1 or more"
            ),
            Self::Outside(outside) => outside.fmt(out),
            Self::Gone => out.write_str("the ring is not in shared memory any more"),
        }
    }
}

impl core::error::Error for Broken {}
