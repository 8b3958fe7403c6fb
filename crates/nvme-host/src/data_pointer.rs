//! Builds data pointers: from segments to PRP entries or an SGL (Base 2.1 §4.3).
//!
//! ```text
//!   PRP1 --> | first page, from any dword on |
//!   PRP2 --> | second page |                         if two entries are enough
//!   PRP2 --> [ list ] --> | page | page | … |        else; the list is in the slot's own memory
//!
//!   SGL1 =   data block                              if one range is enough
//!   SGL1 --> [ last segment ] --> data blocks        else; in that same memory
//! ```
//!
//! PRP entries describe whole pages, except for the start of the first and the end of the last one.
//! Segments that do not fit are described by an SGL if the controller supports it. Otherwise the pointer
//! covers as many whole blocks as possible, and the rest is left for another command.

use tenmil_base::{Dma, IoStatus, Segment};
use tenmil_wire::sgl::Descriptor;
use tenmil_wire::{Command, Status};

use crate::queue_pair::DataPointers;

/// SGL support of a controller (Identify Controller, SGLS bits 1:0, Base 2.1 §5.1.13.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SglSupport {
    /// No SGLs.
    None,
    /// SGLs with addresses and lengths that are multiples of four.
    DwordAligned,
    /// SGLs with any alignment.
    Any,
}

/// Memory that cannot be described by a data pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPointerError {
    /// The segments do not have the alignment required by the controller.
    Alignment,
    /// A segment is not in memory that the device can access.
    Unreachable,
    /// The segments have fewer bytes than the command transfers.
    TooShort,
}

/// List memory, one part for each slot, and the rules for building lists.
#[derive(Debug)]
pub struct ListPool<D> {
    dma: D,
    memory: Segment,
    iova: u64,
    list_bytes: u32,
    page_bytes: u64,
    sgl: SglSupport,
    /// A list before it is stored.
    scratch: Box<[u64]>,
    bytes: Box<[u8]>,
}

/// A data pointer, and the number of bytes it covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuiltDataPointer<P> {
    /// The pointer.
    pub pointer: P,
    /// Bytes that it covers.
    pub len_bytes: u32,
}

/// Data pointer of a command on rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pointer {
    /// The one that the command has.
    #[default]
    Own,
    /// One PRP entry, in a command that was built for PRPs.
    Page(u64),
    /// Two PRP entries.
    Prp(u64, u64),
    /// An SGL descriptor.
    Sgl(Descriptor),
}

/// Position in a list of segments.
#[derive(Clone, Copy, Debug)]
pub struct SegmentListCursor<'a> {
    segments: &'a [Segment],
    skip_bytes: u32,
}

/// Bytes that are contiguous for the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ContiguousRange {
    iova: u64,
    len_bytes: u32,
}

/// Minimum list size: enough for the ranges of Dataset Management and Copy, which use the same memory.
const LIST_BYTES_MIN: u32 = 256;
/// Maximum list size: the smallest page, to which allocations are aligned.
const LIST_BYTES_MAX: u32 = 4096;
const PRP_ENTRY_BYTES: u32 = 8;
/// Page size of the fast path; no controller is known to require larger pages.
pub(crate) const FAST_PAGE_BYTES: u32 = 4096;
const FAST_PAGE_MASK: u64 = FAST_PAGE_BYTES as u64 - 1;

/// PRP entries of contiguous memory in at most two pages, as for nearly every command. `None` if more
/// entries are needed.
#[inline(always)]
pub(crate) const fn contiguous_prps(
    iova: u64,
    len_bytes: u32,
    page_mask: u64,
) -> Option<(u64, u64)> {
    let offset = iova & page_mask;
    let end = offset + len_bytes as u64;
    // The offset of PRP1 is a multiple of four (Base 2.1 §4.3.1).
    if iova & 3 != 0 || end > 2 * (page_mask + 1) {
        return None;
    }
    if end <= page_mask + 1 {
        return Some((iova, 0));
    }
    Some((iova, (iova | page_mask) + 1))
}

impl Pointer {
    /// Sets this pointer in `command`.
    #[inline(always)]
    pub(crate) const fn store_in(self, command: Command) -> Command {
        match self {
            Self::Own => command,
            Self::Page(iova) => {
                let mut command = command;
                command.0[3] = iova;
                command
            }
            Self::Prp(first, second) => command.with_prp(first, second),
            Self::Sgl(descriptor) => command.with_sgl1(descriptor),
        }
    }
}

impl DataPointerError {
    /// Status of a request with such memory.
    pub const fn status(self) -> IoStatus {
        match self {
            Self::Alignment => IoStatus(Status::PRP_OFFSET_INVALID.0),
            Self::Unreachable => IoStatus::DATA_TRANSFER_ERROR,
            Self::TooShort => IoStatus::INVALID_FIELD,
        }
    }
}

impl<'a> SegmentListCursor<'a> {
    /// Position `skip_bytes` into `segments`; beyond their end, an empty cursor.
    pub fn at(segments: &'a [Segment], skip_bytes: u64) -> Self {
        let mut skip = skip_bytes;
        for (index, segment) in segments.iter().enumerate() {
            match u32::try_from(skip) {
                Ok(skip_bytes) if skip_bytes < segment.len_bytes => {
                    return Self { segments: &segments[index..], skip_bytes };
                }
                _ => skip -= u64::from(segment.len_bytes),
            }
        }
        Self { segments: &[], skip_bytes: 0 }
    }

    /// Part of a segment from here on, at most `len_max` bytes, and the position after it. `None` at the
    /// end.
    pub fn next_segment(self, len_max: u32) -> Option<(Segment, Self)> {
        let (first, rest) = self.segments.split_first()?;
        let len_bytes = (first.len_bytes - self.skip_bytes).min(len_max);
        let part = first.slice(self.skip_bytes, len_bytes)?;
        let skip_bytes = self.skip_bytes + len_bytes;
        let behind = match skip_bytes == first.len_bytes {
            true => Self { segments: rest, skip_bytes: 0 },
            false => Self { skip_bytes, ..self },
        };
        Some((part, behind))
    }

    /// Contiguous range from here on, at most `len_max` bytes, and the position after it.
    fn next_piece<D: Dma>(
        self,
        dma: &D,
        len_max: u32,
    ) -> Result<Option<(ContiguousRange, Self)>, DataPointerError> {
        let mut piece: Option<ContiguousRange> = None;
        let mut at = self;
        while let Some((first, rest)) = at.segments.split_first() {
            let so_far = piece.map_or(0, |piece| piece.len_bytes);
            let here = (first.len_bytes - at.skip_bytes).min(len_max - so_far);
            if here == 0 && first.len_bytes > 0 {
                break;
            }
            let iova = dma.iova(*first).ok_or(DataPointerError::Unreachable)?;
            let iova = iova + u64::from(at.skip_bytes);
            match &mut piece {
                None => piece = Some(ContiguousRange { iova, len_bytes: here }),
                Some(piece) if here == 0 || iova == piece.end() => piece.len_bytes += here,
                Some(_) => break,
            }
            let skip_bytes = at.skip_bytes + here;
            at = if skip_bytes == first.len_bytes {
                Self { segments: rest, skip_bytes: 0 }
            } else {
                Self { skip_bytes, ..at }
            };
        }
        Ok(piece.filter(|piece| piece.len_bytes > 0).map(|piece| (piece, at)))
    }

    /// Address of metadata from here on, and how many of `len_max` bytes are contiguous. MPTR is the
    /// address of one contiguous range, a multiple of four (Base 2.1 §4.1.1).
    pub(crate) fn contiguous_metadata<D: Dma>(
        self,
        dma: &D,
        len_max: u32,
    ) -> Result<(u64, u32), DataPointerError> {
        let (piece, _) = self.next_piece(dma, len_max)?.ok_or(DataPointerError::TooShort)?;
        if piece.iova & 3 != 0 {
            return Err(DataPointerError::Alignment);
        }
        Ok((piece.iova, piece.len_bytes))
    }
}

impl ContiguousRange {
    const fn end(self) -> u64 {
        self.iova + self.len_bytes as u64
    }
}

impl<D: Dma> ListPool<D> {
    /// Allocates list memory for `slots` commands of up to `transfer_bytes_max` each. `None` if memory is
    /// exhausted.
    pub(crate) fn allocate(
        dma: &D,
        slots: u32,
        transfer_bytes_max: u32,
        page_bytes: u32,
        sgl: SglSupport,
    ) -> Option<Self> {
        let entries = transfer_bytes_max.div_ceil(page_bytes);
        let wanted = entries.saturating_mul(PRP_ENTRY_BYTES).max(LIST_BYTES_MIN);
        // A power of two, so that no list crosses a page, where the last entry would be a pointer.
        let list_bytes = wanted.min(page_bytes).min(LIST_BYTES_MAX).next_power_of_two();
        let memory = dma.allocate(slots.checked_mul(list_bytes)?)?;
        let Some(iova) = dma.iova(memory) else {
            dma.release(memory);
            return None;
        };
        Some(Self {
            dma: dma.clone(),
            memory,
            iova,
            list_bytes,
            page_bytes: u64::from(page_bytes),
            sgl,
            scratch: vec![0; (list_bytes / PRP_ENTRY_BYTES) as usize].into_boxed_slice(),
            bytes: vec![0; list_bytes as usize].into_boxed_slice(),
        })
    }

    /// Stores `bytes` in the memory of slot `index` and returns their device address.
    pub(crate) fn store(&self, index: usize, bytes: &[u8]) -> Result<u64, DataPointerError> {
        let len_bytes = u32::try_from(bytes.len()).map_err(|_| DataPointerError::TooShort)?;
        let offset = u32::try_from(index).map_err(|_| DataPointerError::Unreachable)?;
        let offset = offset * self.list_bytes;
        let place = self.memory.slice(offset, len_bytes).ok_or(DataPointerError::Unreachable)?;
        self.dma.store(place, bytes).map_err(|_| DataPointerError::Unreachable)?;
        Ok(self.iova + u64::from(offset))
    }

    fn uses_list(&self, pointer: Pointer) -> bool {
        let lists = self.iova..self.iova + u64::from(self.memory.len_bytes);
        matches!(pointer, Pointer::Prp(_, second) if lists.contains(&second))
    }

    /// Builds an SGL. Returns `None` if the controller requires better alignment.
    fn build_sgl(
        &mut self,
        index: usize,
        cursor: SegmentListCursor<'_>,
        len_max: u32,
        granule: u32,
    ) -> Result<Option<BuiltDataPointer<Pointer>>, DataPointerError> {
        let descriptors_max = self.scratch.len() / 2;
        let (mut at, mut count, mut total) = (cursor, 0, 0);
        while total < len_max && count < descriptors_max {
            let next = at.next_piece(&self.dma, len_max - total)?;
            let (piece, behind) = next.ok_or(DataPointerError::TooShort)?;
            let aligned = piece.iova & 3 == 0 && piece.len_bytes & 3 == 0;
            if self.sgl == SglSupport::DwordAligned && !aligned {
                return Ok(None);
            }
            let Descriptor(words) = Descriptor::data_block(piece.iova, piece.len_bytes);
            self.scratch[2 * count..2 * count + 2].copy_from_slice(&words);
            (at, count, total) = (behind, count + 1, total + piece.len_bytes);
        }
        let mut excess = total % granule;
        total -= excess;
        // Whole blocks only: the last descriptors are shortened by a partial block.
        while excess > 0 {
            let last = &mut self.scratch[2 * count - 1];
            let cut = excess.min(u32::try_from(*last & u64::from(u32::MAX)).unwrap_or(0));
            *last -= u64::from(cut);
            excess -= cut;
            count -= usize::from(*last & u64::from(u32::MAX) == 0);
        }
        if count == 0 {
            return Ok(None);
        }
        let descriptor = if count == 1 {
            Descriptor([self.scratch[0], self.scratch[1]])
        } else {
            let iova = self.store_scratch(index, 2 * count)?;
            let len_bytes = u32::try_from(count * Descriptor::BYTES).unwrap_or(u32::MAX);
            Descriptor::last_segment(iova, len_bytes)
        };
        Ok(Some(BuiltDataPointer { pointer: Pointer::Sgl(descriptor), len_bytes: total }))
    }

    fn build_prp(
        &mut self,
        index: usize,
        cursor: SegmentListCursor<'_>,
        len_max: u32,
        granule: u32,
    ) -> Result<BuiltDataPointer<Pointer>, DataPointerError> {
        let page_mask = self.page_bytes - 1;
        let (mut at, mut total) = (cursor, 0_u32);
        // End of the bytes covered, and the number of list entries used.
        let (mut first, mut end, mut listed) = (None, 0_u64, 0_usize);
        'pieces: while total < len_max {
            let next = at.next_piece(&self.dma, len_max - total)?;
            let (piece, behind) = next.ok_or(DataPointerError::TooShort)?;
            if first.is_some() && (piece.iova | end) & page_mask != 0 {
                break;
            }
            let mut from = piece.iova;
            while from < piece.end() {
                let until = piece.end().min((from | page_mask) + 1);
                if first.is_none() {
                    first = Some(from);
                } else if let Some(entry) = self.scratch.get_mut(listed) {
                    *entry = from;
                    listed += 1;
                } else {
                    break 'pieces;
                }
                // At most a page.
                total += u32::try_from(until - from).unwrap_or(0);
                (from, end) = (until, until);
            }
            at = behind;
        }
        let first = first.ok_or(DataPointerError::TooShort)?;
        let len_bytes = total - total % granule;
        if len_bytes == 0 || first & 3 != 0 {
            return Err(DataPointerError::Alignment);
        }
        // Whole blocks may need fewer entries than were collected.
        let pages = ((first & page_mask) + u64::from(len_bytes)).div_ceil(self.page_bytes);
        let second = match pages {
            ..=1 => 0,
            2 => self.scratch[0],
            _ => self.store_scratch(index, listed.min(usize::try_from(pages - 1).unwrap_or(0)))?,
        };
        Ok(BuiltDataPointer { pointer: Pointer::Prp(first, second), len_bytes })
    }

    fn store_scratch(&mut self, index: usize, words: usize) -> Result<u64, DataPointerError> {
        let (chunks, _) = self.bytes.as_chunks_mut::<8>();
        for (chunk, word) in chunks.iter_mut().zip(&self.scratch[..words]) {
            *chunk = word.to_le_bytes();
        }
        self.store(index, &self.bytes[..words * 8])
    }
}

impl<D: Dma> DataPointers for ListPool<D> {
    type Pointer = Pointer;

    #[inline(always)]
    fn contiguous_run(&self, like: Segment) -> impl Fn(Segment) -> Option<Pointer> {
        let iova_of = self.dma.iova_translator(like);
        #[inline(always)]
        move |segment| {
            let iova = iova_of(segment)?;
            if iova & FAST_PAGE_MASK == 0 { Some(Pointer::Page(iova)) } else { None }
        }
    }

    #[inline]
    fn pointer_to_contiguous(&self, segment: Segment) -> Option<Pointer> {
        let iova = self.dma.iova(segment)?;
        let (one, two) = contiguous_prps(iova, segment.len_bytes, FAST_PAGE_MASK)?;
        Some(Pointer::Prp(one, two))
    }

    fn build(
        &mut self,
        index: usize,
        cursor: SegmentListCursor<'_>,
        len_max: u32,
        granule: u32,
    ) -> Result<BuiltDataPointer<Pointer>, DataPointerError> {
        let (first, _) =
            cursor.next_piece(&self.dma, len_max)?.ok_or(DataPointerError::TooShort)?;
        if first.len_bytes == len_max
            && let Some((one, two)) = contiguous_prps(first.iova, len_max, self.page_bytes - 1)
        {
            return Ok(BuiltDataPointer { pointer: Pointer::Prp(one, two), len_bytes: len_max });
        }
        if self.sgl == SglSupport::None {
            return self.build_prp(index, cursor, len_max, granule);
        }
        // Two PRP entries need no list, while an SGL of two ranges needs one.
        if u64::from(len_max) <= 2 * self.page_bytes
            && let Ok(built) = self.build_prp(index, cursor, len_max, granule)
            && built.len_bytes == len_max
            && !self.uses_list(built.pointer)
        {
            return Ok(built);
        }
        match self.build_sgl(index, cursor, len_max, granule)? {
            Some(built) => Ok(built),
            None => self.build_prp(index, cursor, len_max, granule),
        }
    }

    fn store_data(&self, index: usize, bytes: &[u8]) -> Result<Pointer, DataPointerError> {
        Ok(Pointer::Prp(self.store(index, bytes)?, 0))
    }

    fn metadata_address(
        &self,
        cursor: SegmentListCursor<'_>,
        len_max: u32,
    ) -> Result<(u64, u32), DataPointerError> {
        cursor.contiguous_metadata(&self.dma, len_max)
    }

    fn transfer_bytes_max(&self) -> u32 {
        let pages = u64::from(self.list_bytes / PRP_ENTRY_BYTES);
        u32::try_from(pages * self.page_bytes).unwrap_or(u32::MAX)
    }

    fn release(&self) {
        self.dma.release(self.memory);
    }
}

#[cfg(test)]
mod tests;
