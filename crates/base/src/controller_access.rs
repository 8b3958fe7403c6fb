//! Host view of a controller: registers, DMA memory and rings.

use core::fmt;

use crate::{Memory, RegionId, Segment};

/// Registers of one function.
pub trait Mmio {
    /// Handle of one doorbell register.
    type Doorbell: Doorbell;

    /// Loads 32 bits. Slow on a real device: the CPU waits for it.
    fn read32(&mut self, offset: u32) -> u32;
    /// Loads 64 bits, low half first where the bus cannot do it at once.
    fn read64(&mut self, offset: u32) -> u64;
    /// Stores 32 bits. Posted: returns before the device has seen it.
    fn write32(&mut self, offset: u32, value: u32);
    /// Stores 64 bits, low half first where the bus cannot do it at once.
    fn write64(&mut self, offset: u32, value: u64);
    /// Resolves the doorbell at `offset` once, so that ringing it needs no lookup.
    fn doorbell(&mut self, offset: u32) -> Self::Doorbell;
}

/// One doorbell register.
pub trait Doorbell {
    /// Stores `value`, after all earlier stores.
    fn ring(&mut self, value: u32);
}

/// Memory accessible by a controller, as used by the host's driver.
///
/// A handle: cheap to clone, and valid on any thread. Allocation is for set-up; the only call on
/// the I/O path is [`iova`](Self::iova).
pub trait Dma: Memory + Clone {
    /// Host side of a submission ring.
    type Submission: SubmissionRing;
    /// Host side of a completion ring.
    type Completion: CompletionRing;

    /// Allocates zeroed memory, page-aligned and contiguous for the device; `None` if none is left.
    fn allocate(&self, len_bytes: u32) -> Option<Segment>;
    /// Releases what [`allocate`](Self::allocate) returned.
    fn release(&self, segment: Segment);
    /// Maps a whole region for the device, in addition to the memory allocated here. Takes as long
    /// as the IOMMU needs.
    ///
    /// # Errors
    ///
    /// If the region cannot be mapped for the device; always, if the implementation cannot map
    /// regions.
    fn map(&self, region: RegionId) -> Result<(), DmaMapError> {
        Err(DmaMapError { region, reason: "this device reaches its own memory only" })
    }
    /// Unmaps the region: once this has returned, the device starts no access to it.
    fn unmap(&self, region: RegionId) {
        let _ = region;
    }
    /// I/O virtual address of the first byte of `segment`; `None` if the device cannot access it.
    fn iova(&self, segment: Segment) -> Option<u64>;
    /// Prepared form of [`iova`](Self::iova) for many segments with the region and length of
    /// `like`. Returns `None` for other segments, and for those that need a longer lookup, such as
    /// in a region that was never mapped: then [`iova`](Self::iova) must be called.
    #[inline(always)]
    fn iova_translator(&self, like: Segment) -> impl Fn(Segment) -> Option<u64> {
        let kind = move |segment: Segment| (segment.region, segment.len_bytes);
        move |segment| if kind(segment) == kind(like) { self.iova(segment) } else { None }
    }
    /// Maps a part of a BAR that contains device memory: submission rings may be placed there, and
    /// [`iova`](Self::iova) returns their bus addresses. Of an excessively long part only the
    /// beginning is mapped. For set-up, once.
    ///
    /// # Errors
    ///
    /// If the BAR has no such part, or it cannot be used.
    fn device_memory(&self, part: BarRange) -> Result<Segment, BarMapError> {
        let _ = part;
        Err(BarMapError::Unusable { reason: "memory in a BAR of it cannot be mapped" })
    }
    /// Wraps `memory` as a submission ring of `depth` entries.
    fn submission_ring(&self, memory: Segment, depth: u32) -> Self::Submission;
    /// Wraps `memory` as a completion ring of `depth` entries.
    fn completion_ring(&self, memory: Segment, depth: u32) -> Self::Completion;
    /// Revokes all memory access of the device, the last resort when it does not stop by itself: no
    /// new access starts. True once none that had started before is in progress either; only then
    /// the device can access nothing. Call again until true.
    #[must_use]
    fn revoke_access(&self) -> bool;
    /// Undoes [`revoke_access`](Self::revoke_access) before the device is re-enabled.
    fn restore_access(&self);
}

/// A region could not be mapped for DMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaMapError {
    /// The region.
    pub region: RegionId,
    /// Reason.
    pub reason: &'static str,
}

impl fmt::Display for DmaMapError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "show region {} to a device: {}", self.region.0, self.reason)
    }
}

impl core::error::Error for DmaMapError {}

/// Part of a BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarRange {
    /// BAR number, 0 to 5.
    pub bar: u8,
    /// Offset in the BAR.
    pub offset: u64,
    /// Length.
    pub len_bytes: u64,
}

/// A part of a BAR cannot hold a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarMapError {
    /// The part extends past the end of the BAR.
    OutOfRange {
        /// Size of the BAR; zero if it does not exist.
        bar_bytes: u64,
    },
    /// The part exists but cannot be used.
    Unusable {
        /// Reason.
        reason: &'static str,
    },
}

/// Host side of a submission ring: writes only.
pub trait SubmissionRing {
    /// Stores a whole command into entry `index`.
    fn store(&mut self, index: u32, command: &[u64; 8]);
    /// Stores the command that `make` builds of each of `items` into the entries from `first` on,
    /// until `make` returns `None`. Returns the number stored. Address lookups are done once; the
    /// entries must be between `first` and the end of the ring.
    #[inline(always)]
    fn store_built_commands<T>(
        &mut self,
        first: u32,
        items: &[T],
        mut make: impl FnMut(&T) -> Option<[u64; 8]>,
    ) -> usize {
        let stored = items.iter().zip(first..).map_while(|(item, index)| {
            self.store(index, &make(item)?);
            Some(())
        });
        stored.count()
    }
    /// Orders all stored commands before later stores, above all the doorbell.
    fn order_before_doorbell(&mut self);
}

/// Completion queue entry as two 64-bit halves, the second with the phase.
///
/// ```text
///   0           8                            16
///   | DW0  DW1  | SQHD SQID | CID, P, status |      P is bit 48 of the second half
/// ```
///
/// Loaded, stored and passed by halves: assembling dwords in memory and loading them as one word
/// would stall until all older stores have retired (failed store forwarding).
pub type CompletionEntry = [u64; 2];

/// Converts an entry to dwords 0 to 3.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the two halves of each half")]
pub const fn entry_to_dwords([first, second]: CompletionEntry) -> [u32; 4] {
    [first as u32, (first >> 32) as u32, second as u32, (second >> 32) as u32]
}

/// Converts dwords 0 to 3 to an entry.
#[inline]
pub const fn entry_from_dwords(dwords: [u32; 4]) -> CompletionEntry {
    let [a, b, c, d] = dwords;
    [a as u64 | (b as u64) << 32, c as u64 | (d as u64) << 32]
}

/// Host side of a completion ring: reads only.
pub trait CompletionRing {
    /// Loads entry `index`, the word with the phase first, if it carries `phase`.
    fn load(&self, index: u32, phase: bool) -> Option<CompletionEntry>;
    /// Loads the entries from `first` on that carry `phase`, and passes each to `take` with one of
    /// `places`, until it returns false. Returns how often it returned true. There must be an entry
    /// for each place between `first` and the end of the ring.
    #[inline(always)]
    fn load_entries<T>(
        &self,
        first: u32,
        phase: bool,
        places: &mut [T],
        mut take: impl FnMut(CompletionEntry, &mut T) -> bool,
    ) -> usize {
        let count = places.len();
        for ((taken, place), index) in places.iter_mut().enumerate().zip(first..) {
            if !self.load(index, phase).is_some_and(|entry| take(entry, place)) {
                return taken;
            }
        }
        count
    }
}
