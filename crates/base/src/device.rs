//! The host's view of a controller: its registers, and the memory shared with it.

use core::fmt;

use crate::{Memory, RegionId, Segment};

/// Registers of one function.
pub trait Mmio {
    /// A handle to one doorbell register.
    type Doorbell: Doorbell;

    /// Loads 32 bits. Slow on a real device: the processor waits for it.
    fn read32(&mut self, offset: u32) -> u32;
    /// Loads 64 bits, low half first where the bus cannot do it at once.
    fn read64(&mut self, offset: u32) -> u64;
    /// Stores 32 bits. Posted: returns before the device has seen it.
    fn write32(&mut self, offset: u32, value: u32);
    /// Stores 64 bits, low half first where the bus cannot do it at once.
    fn write64(&mut self, offset: u32, value: u64);
    /// The doorbell at `offset`, resolved once so that ringing it looks nothing up.
    fn doorbell(&mut self, offset: u32) -> Self::Doorbell;
}

/// One doorbell register.
pub trait Doorbell {
    /// Stores `value`, after everything that was stored before.
    fn ring(&mut self, value: u32);
}

/// Memory that a controller can reach, as the host's driver uses it.
///
/// A handle: cheap to clone, and valid on any thread. Allocation is for set-up; the only call on
/// the way of an I/O is [`iova`](Self::iova).
pub trait Dma: Memory + Clone {
    /// The host's end of a submission ring.
    type Submission: SubmissionRing;
    /// The host's end of a completion ring.
    type Completion: CompletionRing;

    /// Zeroed memory, page-aligned and contiguous for the device; `None` when there is none left.
    fn allocate(&self, len_bytes: u32) -> Option<Segment>;
    /// Gives back what [`allocate`](Self::allocate) gave.
    fn release(&self, segment: Segment);
    /// Lets the device reach all of a region beside the memory that is allocated from here. Takes as
    /// long as the device's IOMMU does.
    ///
    /// # Errors
    ///
    /// If the device cannot be shown that region; and always, if it can be shown none.
    fn map(&self, region: RegionId) -> Result<(), NotMapped> {
        Err(NotMapped { region, why: "this device reaches its own memory only" })
    }
    /// Takes the region away again: once this has returned, no access of the device to it begins.
    fn unmap(&self, region: RegionId) {
        let _ = region;
    }
    /// The address at which the device finds the first byte of `segment`; `None` if the segment
    /// does not lie in memory that the device can reach.
    fn iova(&self, segment: Segment) -> Option<u64>;
    /// [`iova`](Self::iova) for many segments like this one, of its region and its length: what can
    /// be found out beforehand is. Others have no address here, nor do those that take a longer look,
    /// as all of a region that was never named: `None` means that [`iova`](Self::iova) has to be
    /// asked.
    #[inline(always)]
    fn iovas(&self, like: Segment) -> impl Fn(Segment) -> Option<u64> {
        let kind = move |segment: Segment| (segment.region, segment.len_bytes);
        move |segment| if kind(segment) == kind(like) { self.iova(segment) } else { None }
    }
    /// Maps a part of one of the device's BARs, in which it has memory of its own: submission rings
    /// may lie there, and [`iova`](Self::iova) says where the device finds them. Of a part that is
    /// longer than anybody needs, only the beginning is mapped. For set-up, once.
    ///
    /// # Errors
    ///
    /// If the BAR has no such part, or cannot be used so.
    fn device_memory(&self, part: BarPart) -> Result<Segment, NoDeviceMemory> {
        let _ = part;
        Err(NoDeviceMemory::Unusable { why: "memory in a BAR of it cannot be mapped" })
    }
    /// Wraps `memory` as a submission ring of `depth` entries.
    fn submission_ring(&self, memory: Segment, depth: u32) -> Self::Submission;
    /// Wraps `memory` as a completion ring of `depth` entries.
    fn completion_ring(&self, memory: Segment, depth: u32) -> Self::Completion;
    /// Cuts the device off from all memory, the last resort when it would not stop by itself: from
    /// now on no access of it begins, whatever it tries. True once none that had begun before is
    /// under way either; only then can it touch nothing. To be called again until it is.
    #[must_use]
    fn cut_off(&self) -> bool;
    /// Undoes [`cut_off`](Self::cut_off) before the device is brought up again.
    fn reconnect(&self);
}

/// A region that a device cannot be shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotMapped {
    /// Which.
    pub region: RegionId,
    /// What stands in the way.
    pub why: &'static str,
}

impl fmt::Display for NotMapped {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "show region {} to a device: {}", self.region.0, self.why)
    }
}

impl core::error::Error for NotMapped {}

/// A part of a BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarPart {
    /// Which BAR, 0 to 5.
    pub bar: u8,
    /// Where in it the part begins.
    pub offset: u64,
    /// How long it is.
    pub len_bytes: u64,
}

/// A part of a BAR in which no ring can lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoDeviceMemory {
    /// The BAR ends before the part does.
    Outside {
        /// How long the BAR is; zero if there is none.
        bar_bytes: u64,
    },
    /// The part is there.
    Unusable {
        /// What stands in the way.
        why: &'static str,
    },
}

/// The host's end of a submission ring: it writes and never reads.
pub trait SubmissionRing {
    /// Copies a whole command into entry `index`.
    fn store(&mut self, index: u32, command: &[u64; 8]);
    /// Stores what `make` makes of each of `items` into the entries from `first` on, until it makes
    /// nothing of one. Returns how many were stored. Whatever a store has to find out is found out
    /// once; the entries must lie between `first` and the end of the ring.
    #[inline(always)]
    fn store_each<T>(
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
    /// Puts every stored command before whatever is stored next, the doorbell above all.
    fn publish(&mut self);
    /// Says that entry `index` will be written soon.
    fn prefetch(&self, index: u32);
}

/// A completion as it lies in its ring: two halves of 64 bits, the second with the phase.
///
/// ```text
///   0           8                            16
///   | DW0  DW1  | SQHD SQID | CID, P, status |      P is bit 48 of the second half
/// ```
///
/// It is loaded and stored by halves, and so it is handed on by halves: to put words together in
/// memory and load them as one makes the processor wait until all older stores have left it.
pub type CompletionEntry = [u64; 2];

/// An entry as dwords 0 to 3.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the two halves of each half")]
pub const fn entry_to_dwords([first, second]: CompletionEntry) -> [u32; 4] {
    [first as u32, (first >> 32) as u32, second as u32, (second >> 32) as u32]
}

/// Dwords 0 to 3 as an entry.
#[inline]
pub const fn entry_from_dwords(dwords: [u32; 4]) -> CompletionEntry {
    let [a, b, c, d] = dwords;
    [a as u64 | (b as u64) << 32, c as u64 | (d as u64) << 32]
}

/// The host's end of a completion ring: it reads and never writes.
pub trait CompletionRing {
    /// Loads entry `index`, the word with the phase first, if it carries `phase`.
    fn load(&self, index: u32, phase: bool) -> Option<CompletionEntry>;
    /// Loads the entries from `first` on that carry `phase`, and hands each to `take` with one of
    /// `places`, until it returns false. Returns how many it returned true for. There must be an
    /// entry for each place between `first` and the end of the ring.
    #[inline(always)]
    fn load_each<T>(
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
    /// Copies the entries from `index` to the end of its cache line, as long as they carry `phase`,
    /// and returns how many that were: at most four.
    fn load_line(&self, index: u32, phase: bool, into: &mut [CompletionEntry; 4]) -> usize;
    /// Says that entry `index` will be read soon.
    fn prefetch(&self, index: u32);
}
