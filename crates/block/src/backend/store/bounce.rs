//! Memory of a channel's own, through which data pass that have checksums.
//!
//! Whoever asks may write to his memory while a request is under way; some guests read several parts
//! of a file into one page of which they want nothing. The checksum of what is here is that of what
//! goes to the device or came from it, whatever happens there; and what does not have the checksum on
//! record is never seen by anybody.

use std::ops::Range;

use base::{Memory, NoSuchMemory, Segment};
use dma::{Region, Regions};

use super::PAGE_BYTES;
use crate::backend::pieces::Pieces;

/// The memory of a channel: as much for each of its places as a request can have.
pub(super) struct Bounce {
    regions: Regions,
    memory: Region,
    place_bytes: u32,
}

/// Places of a channel that has such memory, and blocks in each: 8 MiB.
pub(super) const DEPTH_MAX: u32 = 64;
pub(super) const REQUEST_PAGES_MAX: u32 = 32;

const PAGE: usize = PAGE_BYTES as usize;

impl Bounce {
    pub(super) fn new(regions: &Regions, depth: u32, pages: u32) -> Result<Self, String> {
        let place_bytes = pages * PAGE_BYTES;
        let memory = regions.allocate((depth * place_bytes) as usize);
        let memory = memory.map_err(|error| error.to_string())?;
        Ok(Self { regions: regions.clone(), memory, place_bytes })
    }

    /// The memory of some blocks of the request in a place.
    pub(super) fn part(&self, slot: u32, blocks: &Range<u64>) -> Segment {
        let bytes = |blocks: u64| u32::try_from(blocks).unwrap_or(u32::MAX) * PAGE_BYTES;
        let from = slot * self.place_bytes + bytes(blocks.start);
        let len = bytes(blocks.end - blocks.start);
        self.memory.segment().slice(from, len).unwrap_or_default()
    }

    /// Takes the data of a request from whoever asked.
    pub(super) fn take(&self, slot: u32, blocks: u64, own: &[Segment]) -> Result<(), NoSuchMemory> {
        self.each(slot, blocks, own, |here, theirs, chunk| {
            self.regions.load(theirs, chunk)?;
            self.regions.store(here, chunk)
        })
    }

    /// Gives the data of a request to whoever asked.
    pub(super) fn give(&self, slot: u32, blocks: u64, own: &[Segment]) -> Result<(), NoSuchMemory> {
        self.each(slot, blocks, own, |here, theirs, chunk| {
            self.regions.load(here, chunk)?;
            self.regions.store(theirs, chunk)
        })
    }

    /// Whether what is here is what whoever asked has.
    pub(super) fn is_same(
        &self,
        slot: u32,
        blocks: u64,
        own: &[Segment],
    ) -> Result<bool, NoSuchMemory> {
        let (mut is_same, mut other) = (true, [0; PAGE]);
        self.each(slot, blocks, own, |here, theirs, chunk| {
            let other = &mut other[..chunk.len()];
            self.regions.load(here, chunk)?;
            self.regions.load(theirs, other)?;
            is_same &= chunk == other;
            Ok(())
        })?;
        Ok(is_same)
    }

    /// Goes through what is here and what whoever asked has, a piece of both at a time.
    fn each(
        &self,
        slot: u32,
        blocks: u64,
        own: &[Segment],
        mut each: impl FnMut(Segment, Segment, &mut [u8]) -> Result<(), NoSuchMemory>,
    ) -> Result<(), NoSuchMemory> {
        let here = self.part(slot, &(0..blocks));
        let (mut theirs, mut done, mut chunk) = (Pieces::of(own), 0, [0; PAGE]);
        while let Some(piece) = theirs.take(u64::from(PAGE_BYTES.min(here.len_bytes - done))) {
            let len = piece.len_bytes;
            let part = here.slice(done, len).ok_or(NoSuchMemory(here))?;
            each(part, piece, &mut chunk[..len as usize])?;
            done += len;
            if done == here.len_bytes {
                break;
            }
        }
        Ok(())
    }

    /// Adds the checksums of the blocks in a part of this memory to a list.
    pub(super) fn sum(&self, part: Segment, sums: &mut Vec<u32>) -> Result<(), NoSuchMemory> {
        let (mut page, count) = ([0; PAGE], part.len_bytes / PAGE_BYTES);
        for index in 0..count {
            let at = part.slice(index * PAGE_BYTES, PAGE_BYTES).ok_or(NoSuchMemory(part))?;
            self.regions.load(at, &mut page)?;
            sums.push(volume::checksum(&page));
        }
        Ok(())
    }
}
