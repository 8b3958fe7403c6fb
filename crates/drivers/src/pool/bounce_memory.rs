//! Bounce memory of a channel for data with checksums.
//!
//! The client may write to its memory while a request is in flight; some guests read several parts of a
//! file into one page whose contents they discard. The checksum of the data here is that of the data on
//! the device, regardless of such changes. Data with a wrong checksum never reaches the client.

use std::ops::Range;

use tenmil_base::{Error, InvalidSegment, Memory, Segment};
use tenmil_dma::{Region, RegionTable};

use super::PAGE_BYTES;
use tenmil_block::SegmentCursor;

/// Bounce memory of a channel: for each slot, as much as a request can have.
pub(super) struct BounceMemory {
    regions: RegionTable,
    memory: Region,
    place_bytes: u32,
}

/// Slots of a channel with bounce memory, and blocks of each: 8 MiB.
pub(super) const DEPTH_MAX: u32 = 64;
pub(super) const REQUEST_PAGES_MAX: u32 = 32;

const PAGE: usize = PAGE_BYTES as usize;

impl BounceMemory {
    pub(super) fn new(regions: &RegionTable, depth: u32, pages: u32) -> Result<Self, Error> {
        let place_bytes = pages * PAGE_BYTES;
        let memory = regions.allocate_region((depth * place_bytes) as usize);
        let memory = memory.map_err(Error::environment)?;
        Ok(Self { regions: regions.clone(), memory, place_bytes })
    }

    /// The memory for some blocks of the request in a slot.
    pub(super) fn slot_segment(&self, slot: u32, blocks: &Range<u64>) -> Segment {
        let bytes = |blocks: u64| u32::try_from(blocks).unwrap_or(u32::MAX) * PAGE_BYTES;
        let from = slot * self.place_bytes + bytes(blocks.start);
        let len = bytes(blocks.end - blocks.start);
        self.memory.segment().slice(from, len).unwrap_or_default()
    }

    /// Copies the data of a request from the client.
    pub(super) fn copy_from_client(
        &self,
        slot: u32,
        blocks: u64,
        own: &[Segment],
    ) -> Result<(), InvalidSegment> {
        self.for_each_piece(slot, blocks, own, |here, theirs, chunk| {
            self.regions.load(theirs, chunk)?;
            self.regions.store(here, chunk)
        })
    }

    /// Copies the data of a request to the client.
    pub(super) fn copy_to_client(
        &self,
        slot: u32,
        blocks: u64,
        own: &[Segment],
    ) -> Result<(), InvalidSegment> {
        self.for_each_piece(slot, blocks, own, |here, theirs, chunk| {
            self.regions.load(here, chunk)?;
            self.regions.store(theirs, chunk)
        })
    }

    /// Whether the data equals the client's.
    pub(super) fn equals_client_data(
        &self,
        slot: u32,
        blocks: u64,
        own: &[Segment],
    ) -> Result<bool, InvalidSegment> {
        let (mut is_same, mut other) = (true, [0; PAGE]);
        self.for_each_piece(slot, blocks, own, |here, theirs, chunk| {
            let other = &mut other[..chunk.len()];
            self.regions.load(here, chunk)?;
            self.regions.load(theirs, other)?;
            is_same &= chunk == other;
            Ok(())
        })?;
        Ok(is_same)
    }

    /// Iterates over the bounce memory and the client's memory piece by piece.
    fn for_each_piece(
        &self,
        slot: u32,
        blocks: u64,
        own: &[Segment],
        mut each: impl FnMut(Segment, Segment, &mut [u8]) -> Result<(), InvalidSegment>,
    ) -> Result<(), InvalidSegment> {
        let here = self.slot_segment(slot, &(0..blocks));
        let (mut theirs, mut done, mut chunk) = (SegmentCursor::new(own), 0, [0; PAGE]);
        while let Some(piece) = theirs.take_piece(u64::from(PAGE_BYTES.min(here.len_bytes - done)))
        {
            let len = piece.len_bytes;
            let part = here.slice(done, len).ok_or(InvalidSegment(here))?;
            each(part, piece, &mut chunk[..len as usize])?;
            done += len;
            if done == here.len_bytes {
                break;
            }
        }
        Ok(())
    }

    /// Appends the checksums of the blocks in a part of this memory.
    pub(super) fn append_checksums(
        &self,
        part: Segment,
        sums: &mut Vec<u32>,
    ) -> Result<(), InvalidSegment> {
        let (mut page, count) = ([0; PAGE], part.len_bytes / PAGE_BYTES);
        for index in 0..count {
            let at = part.slice(index * PAGE_BYTES, PAGE_BYTES).ok_or(InvalidSegment(part))?;
            self.regions.load(at, &mut page)?;
            sums.push(tenmil_volume::block_checksum(&page));
        }
        Ok(())
    }
}
