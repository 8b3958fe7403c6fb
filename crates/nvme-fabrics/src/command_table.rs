//! Command table of a connection: data locations and state of outstanding commands, by tag.

use tenmil_base::{Memory, Segment};
use tenmil_dma::DevicePool;
use tenmil_nvme_tcp::{DataPlacement, PayloadDigest};
use tenmil_wire::tcp::Crc32c;
use tenmil_wire::{AdminOpcode, IoOpcode};

/// The commands of a connection, by tag.
#[derive(Debug)]
pub(crate) struct CommandTable {
    memory: DevicePool,
    commands: Box<[CommandEntry]>,
    /// Segment lists of commands whose data is not contiguous.
    lists: Box<[Vec<Segment>]>,
    /// A list that was replaced, for its memory.
    replaced_list: Vec<Segment>,
}

/// One outstanding command.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CommandEntry {
    /// Data location, if it is contiguous.
    segment: Segment,
    pub(crate) opcode: u8,
    is_listed: bool,
    /// Exceptional conditions: [`STORE_FAILED`], [`RECEIVE_IN_PLACE`].
    pub(crate) flags: u8,
}

/// Received data could not be stored.
pub(crate) const STORE_FAILED: u8 = 1 << 0;
/// Its read data is in kernel buffers, and can only be received in place.
pub(crate) const RECEIVE_IN_PLACE: u8 = 1 << 1;

/// The two low bits of an opcode that transfers data to the controller (NVM Express Base 2.1, section
/// 3.3.2).
pub(crate) const TO_CONTROLLER: u8 = 0b01;

/// Bytes that are loaded at a time for a digest.
const CHUNK: u32 = 4096;

impl CommandTable {
    pub(crate) fn new(memory: DevicePool, depth: u16) -> Self {
        let depth = usize::from(depth);
        let lists = (0..depth).map(|_| Vec::new()).collect();
        Self {
            memory,
            commands: vec![CommandEntry::default(); depth].into(),
            lists,
            replaced_list: Vec::new(),
        }
    }

    /// Registers command `tag` with its data in `segment`.
    #[inline]
    pub(crate) fn insert(&mut self, tag: u16, opcode: u8, segment: Segment) {
        self.commands[usize::from(tag)] =
            CommandEntry { segment, opcode, is_listed: false, flags: 0 };
    }

    /// Registers command `tag` with its data in the segments of a list.
    #[cold]
    pub(crate) fn insert_list(&mut self, tag: u16, opcode: u8, list: Vec<Segment>) {
        self.insert(tag, opcode, Segment::default());
        self.commands[usize::from(tag)].is_listed = true;
        self.replaced_list = core::mem::replace(&mut self.lists[usize::from(tag)], list);
    }

    /// Takes the list that the last one [registered](Self::insert_list) has replaced.
    pub(crate) fn take_replaced_list(&mut self) -> Vec<Segment> {
        core::mem::take(&mut self.replaced_list)
    }

    /// Takes back the list of command `tag`, which was not submitted.
    pub(crate) fn take_list(&mut self, tag: u16) -> Vec<Segment> {
        core::mem::take(&mut self.lists[usize::from(tag)])
    }

    pub(crate) fn set_flag(&mut self, tag: u16, flag: u8) {
        self.commands[usize::from(tag)].flags |= flag;
    }

    #[inline]
    pub(crate) fn entry(&self, tag: u16) -> CommandEntry {
        self.commands[usize::from(tag)]
    }

    /// Number of data bytes of a command.
    #[inline]
    pub(crate) fn len_bytes(&self, tag: u16) -> u32 {
        let entry = &self.commands[usize::from(tag)];
        match entry.is_listed {
            false => entry.segment.len_bytes,
            true => self.lists[usize::from(tag)].iter().map(|segment| segment.len_bytes).sum(),
        }
    }

    /// Stores received data.
    #[inline]
    pub(crate) fn store_received(&mut self, placement: DataPlacement, bytes: &[u8]) {
        let DataPlacement { tag, offset, len_bytes } = placement;
        let entry = &mut self.commands[usize::from(tag)];
        if !entry.is_listed {
            let stored = entry.segment.slice(offset, len_bytes);
            let stored = stored.map(|segment| self.memory.store(segment, bytes));
            entry.flags |= u8::from(stored != Some(Ok(()))) * STORE_FAILED;
            return;
        }
        self.store_listed(placement, bytes);
    }

    #[cold]
    fn store_listed(&mut self, placement: DataPlacement, bytes: &[u8]) {
        let (mut rest, mut failed) = (bytes, false);
        let Self { memory, lists, commands, .. } = self;
        for_each_segment_of(&lists[usize::from(placement.tag)], placement, |segment| {
            let (part, more) = rest.split_at(segment.len_bytes as usize);
            failed |= memory.store(segment, part).is_err();
            rest = more;
        });
        let has_failed = failed || !rest.is_empty();
        commands[usize::from(placement.tag)].flags |= u8::from(has_failed) * STORE_FAILED;
    }

    /// Passes the memory of a data range to `handle`, segment by segment.
    #[inline]
    pub(crate) fn for_each_segment(
        &self,
        placement: DataPlacement,
        mut handle: impl FnMut(Segment),
    ) {
        let entry = &self.commands[usize::from(placement.tag)];
        if entry.is_listed {
            for_each_segment_of(&self.lists[usize::from(placement.tag)], placement, handle);
        } else if let Some(segment) = entry.segment.slice(placement.offset, placement.len_bytes) {
            handle(segment);
        }
    }
}

impl CommandEntry {
    /// Whether it may have an effect visible to others, so that a late execution does harm.
    pub(crate) fn has_side_effects(self, is_admin: bool) -> bool {
        if is_admin {
            let is_format = self.opcode == AdminOpcode::FormatNvm.code()
                || self.opcode == AdminOpcode::Sanitize.code();
            return is_format || self.opcode & 0b11 == TO_CONTROLLER;
        }
        let has_no_effect = [IoOpcode::Flush, IoOpcode::Compare, IoOpcode::Verify];
        self.opcode & 0b11 != 0b10
            && !has_no_effect.iter().any(|opcode| opcode.code() == self.opcode)
    }
}

impl PayloadDigest for CommandTable {
    fn data_digest(&self, tag: u16, offset: u32, len_bytes: u32) -> u32 {
        let (mut digest, mut chunk) = (Crc32c::new(), [0; CHUNK as usize]);
        self.for_each_segment(DataPlacement { tag, offset, len_bytes }, |segment| {
            let mut at = 0;
            while let Some(part) = next_chunk(segment, at) {
                let bytes = &mut chunk[..part.len_bytes as usize];
                // Memory that was removed cannot be sent either, which ends the connection.
                let _ = self.memory.load(part, bytes);
                digest.update(bytes);
                at += part.len_bytes;
            }
        });
        digest.value()
    }
}

/// The next part of `segment`, from `at` on, to load.
fn next_chunk(segment: Segment, at: u32) -> Option<Segment> {
    let len_bytes = (segment.len_bytes - at).min(CHUNK);
    segment.slice(at, len_bytes).filter(|part| part.len_bytes > 0)
}

/// The parts of `segments` within `placement`.
fn for_each_segment_of(
    segments: &[Segment],
    placement: DataPlacement,
    mut handle: impl FnMut(Segment),
) {
    let (mut skip, mut left) = (placement.offset, placement.len_bytes);
    for segment in segments {
        if skip >= segment.len_bytes {
            skip -= segment.len_bytes;
            continue;
        }
        let part = segment.slice(skip, left.min(segment.len_bytes - skip));
        let Some(part) = part.filter(|part| part.len_bytes > 0) else { return };
        handle(part);
        (skip, left) = (0, left - part.len_bytes);
    }
}
