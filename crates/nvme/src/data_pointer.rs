//! From segments to what a command points at: PRP entries or an SGL (Base 2.1 §4.3).
//!
//! ```text
//!   PRP1 --> | first page, from any dword on |
//!   PRP2 --> | second page |                         if two entries are enough
//!   PRP2 --> [ list ] --> | page | page | … |        else; the list is in the slot's own memory
//!
//!   SGL1 =   data block                              if one piece is enough
//!   SGL1 --> [ last segment ] --> data blocks        else; in that same memory
//! ```
//!
//! PRP entries can say only whole pages, but for the beginning of the first and the end of the last.
//! Segments that do not fit this go as an SGL if the controller takes one. If it does not, as much
//! is built as can be said, in whole blocks; the rest is for another command.

use base::{Dma, Outcome, Segment};
use wire::sgl::Descriptor;
use wire::{Command, Status};

/// What a controller says about SGLs (Identify Controller, SGLS bits 1:0, Base 2.1 §5.1.13.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SglSupport {
    /// It takes none.
    None,
    /// It takes them if addresses and lengths are multiples of four.
    DwordAligned,
    /// It takes them.
    Any,
    /// It takes nothing else, and needs the length: it is at the other end of a connection.
    Only,
}

/// Memory that a command cannot be pointed at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryRefused {
    /// The segments are not aligned as the controller needs it.
    Alignment,
    /// A segment does not lie in memory that the device can reach.
    Unreachable,
    /// There are fewer bytes in the segments than the command moves.
    TooShort,
}

/// The memory for lists, a piece for each slot, and the rules for what goes into them.
#[derive(Debug)]
pub(crate) struct Lists<D> {
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

/// A data pointer, and how much of the data it points at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Built {
    pub(crate) pointer: Pointer,
    pub(crate) len_bytes: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pointer {
    Prp(u64, u64),
    Sgl(Descriptor),
}

/// A place in a list of segments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor<'a> {
    segments: &'a [Segment],
    skip_bytes: u32,
}

/// Bytes that lie together for the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    iova: u64,
    len_bytes: u32,
}

/// Enough for the ranges of Dataset Management and Copy, which use the same memory.
const LIST_BYTES_MIN: u32 = 256;
/// The smallest page there is, and what allocations are aligned to.
const LIST_BYTES_MAX: u32 = 4096;
const PRP_ENTRY_BYTES: u32 = 8;

/// The two PRP entries of memory that lies together and in at most two pages: what nearly every
/// command needs. `None` if it takes more to say.
#[inline(always)]
pub(crate) const fn contiguous(iova: u64, len_bytes: u32, page_mask: u64) -> Option<(u64, u64)> {
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
    /// `command`, pointing here.
    pub(crate) const fn put_in(self, command: Command) -> Command {
        match self {
            Self::Prp(first, second) => command.with_prp(first, second),
            Self::Sgl(descriptor) => command.with_sgl1(descriptor),
        }
    }
}

impl SglSupport {
    /// How a command points at memory that lies together, within a page.
    pub(crate) const fn pointer(self, iova: u64, len_bytes: u32) -> Pointer {
        match self {
            Self::Only => Pointer::Sgl(Descriptor::data_block(iova, len_bytes)),
            Self::None | Self::DwordAligned | Self::Any => Pointer::Prp(iova, 0),
        }
    }
}

impl MemoryRefused {
    /// How a request with such memory ends.
    pub const fn outcome(self) -> Outcome {
        match self {
            Self::Alignment => Outcome(Status::PRP_OFFSET_INVALID.0),
            Self::Unreachable => Outcome::DATA_TRANSFER_ERROR,
            Self::TooShort => Outcome::INVALID_FIELD,
        }
    }
}

impl<'a> Cursor<'a> {
    /// The place `skip_bytes` into `segments`; at or behind their end if there are no more.
    pub(crate) fn at(segments: &'a [Segment], skip_bytes: u64) -> Self {
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

    /// What lies together from here on, at most `len_max` bytes, and the place behind it.
    fn next_piece<D: Dma>(
        self,
        dma: &D,
        len_max: u32,
    ) -> Result<Option<(Piece, Self)>, MemoryRefused> {
        let mut piece: Option<Piece> = None;
        let mut at = self;
        while let Some((first, rest)) = at.segments.split_first() {
            let so_far = piece.map_or(0, |piece| piece.len_bytes);
            let here = (first.len_bytes - at.skip_bytes).min(len_max - so_far);
            if here == 0 && first.len_bytes > 0 {
                break;
            }
            let iova = dma.iova(*first).ok_or(MemoryRefused::Unreachable)?;
            let iova = iova + u64::from(at.skip_bytes);
            match &mut piece {
                None => piece = Some(Piece { iova, len_bytes: here }),
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

    /// The address of metadata from here on, and how many of `len_max` bytes of it lie together.
    /// MPTR is the address of one such run, a multiple of four (Base 2.1 §4.1.1).
    pub(crate) fn metadata<D: Dma>(
        self,
        dma: &D,
        len_max: u32,
    ) -> Result<(u64, u32), MemoryRefused> {
        let (piece, _) = self.next_piece(dma, len_max)?.ok_or(MemoryRefused::TooShort)?;
        if piece.iova & 3 != 0 {
            return Err(MemoryRefused::Alignment);
        }
        Ok((piece.iova, piece.len_bytes))
    }
}

impl Piece {
    const fn end(self) -> u64 {
        self.iova + self.len_bytes as u64
    }
}

impl<D: Dma> Lists<D> {
    /// Memory for the lists of `slots` commands that move up to `transfer_bytes_max` each. `None`
    /// when there is no memory left.
    pub(crate) fn allocate(
        dma: &D,
        slots: u32,
        transfer_bytes_max: u32,
        page_bytes: u32,
        sgl: SglSupport,
    ) -> Option<Self> {
        let entries = transfer_bytes_max.div_ceil(page_bytes);
        let wanted = entries.saturating_mul(PRP_ENTRY_BYTES).max(LIST_BYTES_MIN);
        // A power of two, so that no list crosses a page: its last entry would be a pointer then.
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

    /// Whose memory it is.
    pub(crate) fn dma(&self) -> &D {
        &self.dma
    }

    /// Gives the memory back. No command that names it is in flight.
    pub(crate) fn release(&self) {
        self.dma.release(self.memory);
    }

    /// How much one command can move at most, however its memory lies.
    pub(crate) fn transfer_bytes_max(&self) -> u32 {
        let pages = u64::from(self.list_bytes / PRP_ENTRY_BYTES);
        u32::try_from(pages * self.page_bytes).unwrap_or(u32::MAX)
    }

    /// Stores `bytes` in the memory of slot `index` and returns where the device finds them.
    pub(crate) fn store(&self, index: usize, bytes: &[u8]) -> Result<u64, MemoryRefused> {
        let len_bytes = u32::try_from(bytes.len()).map_err(|_| MemoryRefused::TooShort)?;
        let offset = u32::try_from(index).map_err(|_| MemoryRefused::Unreachable)?;
        let offset = offset * self.list_bytes;
        let place = self.memory.slice(offset, len_bytes).ok_or(MemoryRefused::Unreachable)?;
        self.dma.store(place, bytes).map_err(|_| MemoryRefused::Unreachable)?;
        Ok(self.iova + u64::from(offset))
    }

    /// As [`store`](Self::store), as what a command points with.
    pub(crate) fn store_data(&self, index: usize, bytes: &[u8]) -> Result<Pointer, MemoryRefused> {
        let iova = self.store(index, bytes)?;
        let len_bytes = u32::try_from(bytes.len()).map_err(|_| MemoryRefused::TooShort)?;
        Ok(self.sgl.pointer(iova, len_bytes))
    }

    /// Points at `len_max` bytes from `cursor` on, or at as many of them as one command can, in
    /// multiples of `granule`, of which `len_max` is one. A list goes to the memory of slot `index`.
    pub(crate) fn build(
        &mut self,
        index: usize,
        cursor: Cursor<'_>,
        len_max: u32,
        granule: u32,
    ) -> Result<Built, MemoryRefused> {
        let (first, _) = cursor.next_piece(&self.dma, len_max)?.ok_or(MemoryRefused::TooShort)?;
        if self.sgl == SglSupport::Only {
            let built = self.build_sgl(index, cursor, len_max, granule)?;
            return built.ok_or(MemoryRefused::Alignment);
        }
        if first.len_bytes == len_max
            && let Some((one, two)) = contiguous(first.iova, len_max, self.page_bytes - 1)
        {
            return Ok(Built { pointer: Pointer::Prp(one, two), len_bytes: len_max });
        }
        if self.sgl == SglSupport::None {
            return self.build_prp(index, cursor, len_max, granule);
        }
        // What two PRP entries can say needs no list, and an SGL of two pieces does.
        if u64::from(len_max) <= 2 * self.page_bytes
            && let Ok(built) = self.build_prp(index, cursor, len_max, granule)
            && built.len_bytes == len_max
            && !self.has_list(built.pointer)
        {
            return Ok(built);
        }
        match self.build_sgl(index, cursor, len_max, granule)? {
            Some(built) => Ok(built),
            None => self.build_prp(index, cursor, len_max, granule),
        }
    }

    fn has_list(&self, pointer: Pointer) -> bool {
        let lists = self.iova..self.iova + u64::from(self.memory.len_bytes);
        matches!(pointer, Pointer::Prp(_, second) if lists.contains(&second))
    }

    /// `None` if the controller wants it better aligned.
    fn build_sgl(
        &mut self,
        index: usize,
        cursor: Cursor<'_>,
        len_max: u32,
        granule: u32,
    ) -> Result<Option<Built>, MemoryRefused> {
        let descriptors_max = self.scratch.len() / 2;
        let (mut at, mut count, mut total) = (cursor, 0, 0);
        while total < len_max && count < descriptors_max {
            let next = at.next_piece(&self.dma, len_max - total)?;
            let (piece, behind) = next.ok_or(MemoryRefused::TooShort)?;
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
        // Whole blocks: the last descriptors lose what would be part of one.
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
        Ok(Some(Built { pointer: Pointer::Sgl(descriptor), len_bytes: total }))
    }

    fn build_prp(
        &mut self,
        index: usize,
        cursor: Cursor<'_>,
        len_max: u32,
        granule: u32,
    ) -> Result<Built, MemoryRefused> {
        let page_mask = self.page_bytes - 1;
        let (mut at, mut total) = (cursor, 0_u32);
        // Behind the bytes that are covered, and how many entries of the list that took.
        let (mut first, mut end, mut listed) = (None, 0_u64, 0_usize);
        'pieces: while total < len_max {
            let next = at.next_piece(&self.dma, len_max - total)?;
            let (piece, behind) = next.ok_or(MemoryRefused::TooShort)?;
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
        let first = first.ok_or(MemoryRefused::TooShort)?;
        let len_bytes = total - total % granule;
        if len_bytes == 0 || first & 3 != 0 {
            return Err(MemoryRefused::Alignment);
        }
        // Whole blocks may need fewer entries than were found.
        let pages = ((first & page_mask) + u64::from(len_bytes)).div_ceil(self.page_bytes);
        let second = match pages {
            ..=1 => 0,
            2 => self.scratch[0],
            _ => self.store_scratch(index, listed.min(usize::try_from(pages - 1).unwrap_or(0)))?,
        };
        Ok(Built { pointer: Pointer::Prp(first, second), len_bytes })
    }

    fn store_scratch(&mut self, index: usize, words: usize) -> Result<u64, MemoryRefused> {
        let (chunks, _) = self.bytes.as_chunks_mut::<8>();
        for (chunk, word) in chunks.iter_mut().zip(&self.scratch[..words]) {
            *chunk = word.to_le_bytes();
        }
        self.store(index, &self.bytes[..words * 8])
    }
}

#[cfg(test)]
mod tests;
