//! Split virtqueue, device side (virtio 2.7).
//!
//! ```text
//!   descriptors   | address : 8 | length : 4 | flags : 2 | next : 2 |      one per entry
//!   available     | flags : 2 | index : 2 | head : 2 …  | used event : 2 |
//!   used          | flags : 2 | index : 2 | (head : 4, length : 4) … | available event : 2 |
//! ```
//!
//! The driver may change any of it at any time. Each word is loaded once, validated, and used as
//! loaded; a chain is followed for a bounded number of steps, whatever it contains.

use core::fmt;
use core::sync::atomic::{Ordering, fence};

use tenmil_base::{InvalidSegment, Memory, Segment};

use crate::guest_memory::{GuestMemory, InvalidAddress};

/// Location of the three parts of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringAddresses {
    descriptors: Segment,
    available: Segment,
    used: Segment,
    size: u16,
}

/// Device side of a ring.
#[derive(Debug)]
pub struct Vring<M> {
    memory: M,
    place: VringAddresses,
    /// Next available index to take.
    next_available_index: u16,
    /// Available index of the driver, as last seen.
    seen: u16,
    /// Next used index to write.
    next_used_index: u16,
    /// Used index as published to the driver.
    published: u16,
    has_event_index: bool,
    /// Flags of the used ring.
    flags: u16,
}

/// Memory of a descriptor chain: device-readable segments first, then device-writable ones.
#[derive(Debug, Default)]
pub struct DescriptorChain {
    /// Device-readable segments.
    pub readable: Vec<Segment>,
    /// Device-writable segments.
    pub writable: Vec<Segment>,
    /// Total length of the readable segments in bytes.
    pub readable_bytes: u64,
    /// Total length of the writable segments in bytes.
    pub writable_bytes: u64,
}

/// Violation of the ring's rules by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VringError {
    /// The available index is further ahead than the ring is long.
    IndexJump {
        /// Available index.
        found: u16,
        /// Index taken so far.
        taken: u16,
        /// Number of entries.
        size: u16,
    },
    /// A head or next index is out of range.
    Descriptor {
        /// Index.
        found: u16,
        /// Number of descriptors.
        size: u16,
    },
    /// A head is already in flight.
    DuplicateHead {
        /// Head.
        head: u16,
    },
    /// A chain is too long or has a loop.
    Long {
        /// Head.
        head: u16,
        /// Largest number of descriptors.
        expected_max: u32,
    },
    /// An indirect table is not allowed here, or has an invalid length.
    Indirect {
        /// Head of the chain.
        head: u16,
        /// Length of the table in bytes.
        found: u32,
    },
    /// A readable descriptor follows a writable one.
    Order {
        /// Head of the chain.
        head: u16,
    },
    /// The chain has no space for a header or a status.
    Short {
        /// Head of the chain.
        head: u16,
        /// Readable bytes.
        readable: u64,
        /// Writable bytes.
        writable: u64,
    },
    /// An address is outside guest memory.
    InvalidAddress(InvalidAddress),
    /// The memory of the ring was unmapped.
    Unmapped,
}

/// Largest ring size, and the longest chain.
pub const QUEUE_SIZE_MAX: u16 = 1024;
/// Largest number of segments of a chain: its descriptors, and some that cross memory regions.
const SEGMENTS_MAX: usize = QUEUE_SIZE_MAX as usize + 64;

const DESCRIPTOR_BYTES: u32 = 16;
/// Descriptor flags (virtio 2.7.5).
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Flag of the available ring: no interrupts requested (virtio 2.7.7).
const NO_INTERRUPT: u16 = 1;
/// Flag of the used ring: no kicks requested (virtio 2.7.10).
const NO_NOTIFY: u16 = 1;

#[derive(Clone, Copy, Debug)]
struct Descriptor {
    address: u64,
    len_bytes: u32,
    flags: u16,
    next: u16,
}

impl VringAddresses {
    /// Resolves a ring of `size` entries at these addresses of the front end's process.
    ///
    /// # Errors
    ///
    /// If a part does not lie within one memory region.
    pub fn new(
        space: &GuestMemory,
        size: u16,
        [descriptors, available, used]: [u64; 3],
    ) -> Result<Self, InvalidAddress> {
        let entries = u32::from(size);
        Ok(Self {
            descriptors: space.resolve_user_address(descriptors, entries * DESCRIPTOR_BYTES)?,
            available: space.resolve_user_address(available, 6 + 2 * entries)?,
            used: space.resolve_user_address(used, 6 + 8 * entries)?,
            size,
        })
    }

    /// Number of entries.
    pub fn size(&self) -> u16 {
        self.size
    }
}

impl<M: Memory> Vring<M> {
    /// Opens the ring at `place`, starting at available index `next`. Kicks are disabled until
    /// [`ask_for_kicks`](Self::enable_kicks).
    ///
    /// # Errors
    ///
    /// If its memory cannot be accessed.
    pub fn new(
        memory: M,
        place: VringAddresses,
        next: u16,
        has_event_index: bool,
    ) -> Result<Self, VringError> {
        let word = memory.load_u32(place.used).map_err(unmapped_error)?;
        let used = high_u16(word);
        let mut ring = Self {
            memory,
            place,
            next_available_index: next,
            seen: next,
            next_used_index: used,
            published: used,
            has_event_index,
            flags: 0,
        };
        ring.disable_kicks()?;
        Ok(ring)
    }

    /// Next used index to write.
    pub fn used_index(&self) -> u16 {
        self.next_used_index
    }

    /// Next available index to take.
    pub fn next_available_index(&self) -> u16 {
        self.next_available_index
    }

    /// Takes the next available chain. Returns its head.
    ///
    /// # Errors
    ///
    /// If the available index or the head is invalid.
    #[inline]
    pub fn take_head(&mut self) -> Result<Option<u16>, VringError> {
        if self.seen == self.next_available_index && !self.load_available()? {
            return Ok(None);
        }
        let size = self.place.size;
        let at = 4 + 2 * u64::from(self.next_available_index & (size - 1));
        let head = self.load_u16(self.place.available, at)?;
        if head >= size {
            return Err(VringError::Descriptor { found: head, size });
        }
        self.next_available_index = self.next_available_index.wrapping_add(1);
        Ok(Some(head))
    }

    /// Loads the available index. Returns whether there is something to take.
    fn load_available(&mut self) -> Result<bool, VringError> {
        let Self {
            next_available_index: taken, place: VringAddresses { size, available, .. }, ..
        } = *self;
        let found = self.load_u16(available, 2)?;
        if found.wrapping_sub(taken) > size {
            return Err(VringError::IndexJump { found, taken, size });
        }
        self.seen = found;
        Ok(found != taken)
    }

    /// Replaces the content of `chain` by the chain that starts at `head`.
    ///
    /// # Errors
    ///
    /// If the chain is invalid or lies outside guest memory.
    #[inline]
    pub fn resolve_chain(
        &self,
        head: u16,
        space: &GuestMemory,
        chain: &mut DescriptorChain,
    ) -> Result<(), VringError> {
        chain.clear();
        let VringAddresses { descriptors, size, .. } = self.place;
        let mut index = head;
        for _ in 0..size {
            if index >= size {
                return Err(VringError::Descriptor { found: index, size });
            }
            let at = u32::from(index) * DESCRIPTOR_BYTES;
            let descriptor = self.load_descriptor(segment_after(descriptors, at)?)?;
            if descriptor.flags & INDIRECT != 0 {
                return self.follow_indirect_table(head, descriptor, space, chain);
            }
            chain.add_descriptor(head, descriptor, space)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next;
        }
        Err(VringError::Long { head, expected_max: size.into() })
    }

    /// Follows an indirect table, which ends a chain.
    fn follow_indirect_table(
        &self,
        head: u16,
        table: Descriptor,
        space: &GuestMemory,
        chain: &mut DescriptorChain,
    ) -> Result<(), VringError> {
        let found = table.len_bytes;
        let count = found / DESCRIPTOR_BYTES;
        let is_right = table.flags & NEXT == 0
            && found.is_multiple_of(DESCRIPTOR_BYTES)
            && (1..=u32::from(QUEUE_SIZE_MAX)).contains(&count);
        if !is_right {
            return Err(VringError::Indirect { head, found });
        }
        let count = u16::try_from(count).unwrap_or(QUEUE_SIZE_MAX);
        let mut index = 0;
        for _ in 0..count {
            if index >= count {
                return Err(VringError::Descriptor { found: index, size: count });
            }
            let descriptor = self.indirect_descriptor(table.address, index, space)?;
            if descriptor.flags & INDIRECT != 0 {
                return Err(VringError::Indirect { head, found: descriptor.len_bytes });
            }
            chain.add_descriptor(head, descriptor, space)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next;
        }
        Err(VringError::Long { head, expected_max: count.into() })
    }

    fn indirect_descriptor(
        &self,
        table: u64,
        index: u16,
        space: &GuestMemory,
    ) -> Result<Descriptor, VringError> {
        let skip = u64::from(index) * u64::from(DESCRIPTOR_BYTES);
        let outside = InvalidAddress { address: table, len_bytes: DESCRIPTOR_BYTES.into() };
        let address = table.checked_add(skip).ok_or(VringError::InvalidAddress(outside))?;
        let mut bytes = [0; DESCRIPTOR_BYTES as usize];
        let mut rest = &mut bytes[..];
        // The entry may cross two memory regions.
        let mut pieces = Vec::new();
        space
            .resolve_guest_address(address, DESCRIPTOR_BYTES, 2, &mut pieces)
            .map_err(VringError::InvalidAddress)?;
        for piece in pieces {
            let (first, others) = rest.split_at_mut(piece.len_bytes as usize);
            self.memory.load(piece, first).map_err(unmapped_error)?;
            rest = others;
        }
        Ok(Descriptor::parse(&bytes))
    }

    #[inline]
    fn load_descriptor(&self, at: Segment) -> Result<Descriptor, VringError> {
        let mut bytes = [0; DESCRIPTOR_BYTES as usize];
        let at = at.slice(0, DESCRIPTOR_BYTES).ok_or(VringError::Unmapped)?;
        self.memory.load(at, &mut bytes).map_err(unmapped_error)?;
        Ok(Descriptor::parse(&bytes))
    }

    /// Writes a used entry with `len_bytes` written. It becomes visible to the driver with
    /// [`publish_used_index`](Self::publish_used_index).
    ///
    /// # Errors
    ///
    /// If the memory of the ring was unmapped.
    #[inline]
    pub fn write_used(&mut self, head: u16, len_bytes: u32) -> Result<(), VringError> {
        let at = 4 + 8 * u32::from(self.next_used_index & (self.place.size - 1));
        let entry = u64::from(head) | u64::from(len_bytes) << 32;
        let place = segment_after(self.place.used, at)?.slice(0, 8).ok_or(VringError::Unmapped)?;
        self.memory.store(place, &entry.to_le_bytes()).map_err(unmapped_error)?;
        self.next_used_index = self.next_used_index.wrapping_add(1);
        Ok(())
    }

    /// Publishes the used index.
    ///
    /// # Errors
    ///
    /// If the memory of the ring was unmapped.
    #[inline]
    pub fn publish_used_index(&mut self) -> Result<(), VringError> {
        self.store_used_flags_and_index()
    }

    /// Whether the driver requests an interrupt for the entries published since the last call.
    ///
    /// # Errors
    ///
    /// If the memory of the ring was unmapped.
    #[inline]
    pub fn needs_interrupt(&mut self) -> Result<bool, VringError> {
        let (old, new) = (self.published, self.next_used_index);
        if old == new {
            return Ok(false);
        }
        self.published = new;
        // Full fence between the store of the used index and the load of the driver's request.
        // Pairs with the driver's, which stores its request and then loads the used index.
        fence(Ordering::SeqCst);
        if !self.has_event_index {
            let flags = self.load_u16(self.place.available, 0)?;
            return Ok(flags & NO_INTERRUPT == 0);
        }
        let at = 4 + 2 * u64::from(self.place.size);
        let event = self.load_u16(self.place.available, at)?;
        // Whether the event index lies among the new entries (virtio 2.7.10.1).
        Ok(new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old))
    }

    /// Enables kicks and checks the ring once more. Returns true if a chain is available already.
    ///
    /// # Errors
    ///
    /// If the memory of the ring was unmapped or the available index is invalid.
    pub fn enable_kicks(&mut self) -> Result<bool, VringError> {
        if self.has_event_index {
            let at = 4 + 8 * u32::from(self.place.size);
            let event =
                segment_after(self.place.used, at)?.slice(0, 2).ok_or(VringError::Unmapped)?;
            self.memory
                .store(event, &self.next_available_index.to_le_bytes())
                .map_err(unmapped_error)?;
        } else {
            self.flags = 0;
            self.store_used_flags_and_index()?;
        }
        // Full fence between the store of this request and the load of the available index. Pairs
        // with the driver's, which stores the index and then loads the request.
        fence(Ordering::SeqCst);
        Ok(self.seen != self.next_available_index || self.load_available()?)
    }

    /// Disables kicks, because the ring is polled. With event index nothing has to be stored: the
    /// requested index has been passed already.
    ///
    /// # Errors
    ///
    /// If the memory of the ring was unmapped.
    pub fn disable_kicks(&mut self) -> Result<(), VringError> {
        if self.has_event_index || self.flags == NO_NOTIFY {
            return Ok(());
        }
        self.flags = NO_NOTIFY;
        self.store_used_flags_and_index()
    }

    /// Stores flags and index of the used ring as one word; only the device writes them.
    #[inline]
    fn store_used_flags_and_index(&mut self) -> Result<(), VringError> {
        let word = u32::from(self.flags) | u32::from(self.next_used_index) << 16;
        self.memory.store_u32(self.place.used, word).map_err(unmapped_error)
    }

    /// Loads 16 bits at offset `at` of a part, through the aligned word that contains them.
    #[inline]
    fn load_u16(&self, part: Segment, at: u64) -> Result<u16, VringError> {
        let offset = part.offset + at;
        let word = Segment { offset: offset & !3, len_bytes: 4, ..part };
        let word = self.memory.load_u32(word).map_err(unmapped_error)?;
        Ok(if offset & 2 == 0 { low_u16(word) } else { high_u16(word) })
    }
}

impl DescriptorChain {
    fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
        (self.readable_bytes, self.writable_bytes) = (0, 0);
    }

    #[inline]
    fn add_descriptor(
        &mut self,
        head: u16,
        descriptor: Descriptor,
        space: &GuestMemory,
    ) -> Result<(), VringError> {
        let Descriptor { address, len_bytes, flags, .. } = descriptor;
        let outside = VringError::InvalidAddress;
        if flags & WRITE != 0 {
            self.writable_bytes += u64::from(len_bytes);
            let pieces = &mut self.writable;
            return space
                .resolve_guest_address(address, len_bytes, SEGMENTS_MAX, pieces)
                .map_err(outside);
        }
        if !self.writable.is_empty() {
            return Err(VringError::Order { head });
        }
        self.readable_bytes += u64::from(len_bytes);
        space
            .resolve_guest_address(address, len_bytes, SEGMENTS_MAX, &mut self.readable)
            .map_err(outside)
    }
}

impl Descriptor {
    #[inline]
    fn parse(bytes: &[u8; DESCRIPTOR_BYTES as usize]) -> Self {
        let word = u128::from_le_bytes(*bytes);
        let half = |shift: u32| u64::try_from(word >> shift & u128::from(u64::MAX)).unwrap_or(0);
        let tail = half(64);
        Self {
            address: half(0),
            len_bytes: u32::try_from(tail & 0xffff_ffff).unwrap_or(0),
            flags: low_u16(u32::try_from(tail >> 32).unwrap_or(0)),
            next: high_u16(u32::try_from(tail >> 32).unwrap_or(0)),
        }
    }
}

#[inline]
fn segment_after(part: Segment, skip: u32) -> Result<Segment, VringError> {
    let left = part.len_bytes.checked_sub(skip).ok_or(VringError::Unmapped)?;
    part.slice(skip, left).ok_or(VringError::Unmapped)
}

#[inline]
fn low_u16(word: u32) -> u16 {
    u16::try_from(word & 0xffff).unwrap_or(0)
}

#[inline]
fn high_u16(word: u32) -> u16 {
    u16::try_from(word >> 16).unwrap_or(0)
}

#[cold]
fn unmapped_error(_: InvalidSegment) -> VringError {
    VringError::Unmapped
}

impl fmt::Display for VringError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::IndexJump { found, taken, size } => {
                write!(out, "available index {found} after {taken}, expected at most {size} more")
            }
            Self::Descriptor { found, size } => {
                write!(out, "descriptor {found}, expected one below {size}")
            }
            Self::DuplicateHead { head } => {
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
            Self::InvalidAddress(outside) => outside.fmt(out),
            Self::Unmapped => out.write_str("the ring is not in shared memory any more"),
        }
    }
}

impl core::error::Error for VringError {}
