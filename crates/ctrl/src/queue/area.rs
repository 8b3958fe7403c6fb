//! Work areas: what a command needs that takes more than one request.
//!
//! How many there may be is known at start; there are as many as were ever needed at a time, and each
//! has the lists that it has needed so far. A command that needs one when all are taken stays at the
//! head of its submission queue until one is free, in order.

use base::{Request, Segment};
use wire::{Command, Status};

use super::job::Job;
use crate::transfer::{Direction, Mover, Pieces, Walk};

/// The areas of a queue.
#[derive(Debug)]
pub(super) struct Areas {
    areas: Vec<Area>,
    free: Vec<u16>,
    count_max: u16,
    /// Pieces of the longest transfer.
    pieces_max: usize,
}

/// One area.
#[derive(Debug)]
pub(super) struct Area {
    /// The command it is for.
    pub(super) slot: u16,
    pub(super) channel: u16,
    pub(super) command: Command,
    pub(super) job: Job,
    pub(super) wait: Wait,
    pub(super) walk: Walk,
    pub(super) direction: Direction,
    pub(super) pieces: Pieces,
    pub(super) mover: Mover,
    /// Where the medium reaches the data.
    pub(super) segments: Vec<Segment>,
    /// The part of them that one request needs.
    pub(super) part: Vec<Segment>,
    /// Bytes that are not blocks: ranges, keys, reports.
    pub(super) bytes: Vec<u8>,
    pub(super) buffer: Option<Segment>,
    /// Compared bytes were not the same.
    pub(super) differs: bool,
    /// It ends with this as soon as nobody touches its memory.
    pub(super) cancelled: Option<Status>,
}

/// What a command waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// Nothing: it is being worked on, or there is no command.
    Nothing,
    /// For a part of a PRP list or an SGL, this long.
    List { len_bytes: u32 },
    /// For a bounce buffer.
    Buffer { is_zeroed: bool },
    /// For the host to give or take bytes.
    Host(Aim),
    /// For the medium to have room for this request.
    Room(Request),
    /// For the medium's answer.
    Medium,
    /// For the controller to decide.
    Controller,
    /// For the first half of its fused pair, or for the pair's turn.
    Pair,
}

/// What bytes of the host are moved to or from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Aim {
    /// The area's own bytes.
    Bytes,
    /// The bounce buffer.
    Buffer,
    /// The bounce buffer, which is compared with them.
    Check,
}

impl Areas {
    /// At most `count_max` areas for transfers of at most `transfer_bytes_max`.
    pub(super) fn new(count_max: u16, transfer_bytes_max: u32) -> Self {
        let pages = (transfer_bytes_max >> 12) as usize + 2;
        let (areas, free) = (Vec::new(), Vec::new());
        Self { areas, free, count_max, pieces_max: pages.max(256) }
    }

    /// How many more could be taken.
    pub(super) fn room(&self) -> usize {
        usize::from(self.count_max) - (self.areas.len() - self.free.len())
    }

    /// Whether no area is taken.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.free.len() == self.areas.len()
    }

    /// Whether a command with an area goes to this channel.
    pub(super) fn use_channel(&self, channel: u16) -> bool {
        self.areas.iter().any(|area| !matches!(area.job, Job::Idle) && area.channel == channel)
    }

    /// Takes an area for the command in `slot`.
    pub(super) fn take(
        &mut self,
        slot: u16,
        channel: u16,
        command: Command,
        job: Job,
    ) -> Option<u16> {
        let index = self.free.pop().or_else(|| self.another())?;
        let area = &mut self.areas[usize::from(index)];
        (area.slot, area.channel, area.command, area.job) = (slot, channel, command, job);
        area.wait = Wait::Nothing;
        area.mover = Mover::new();
        area.pieces.clear();
        area.segments.clear();
        area.bytes.clear();
        (area.differs, area.cancelled) = (false, None);
        Some(index)
    }

    /// One more area, if there may be one.
    #[cold]
    fn another(&mut self) -> Option<u16> {
        let index = u16::try_from(self.areas.len()).ok().filter(|index| *index < self.count_max)?;
        self.areas.push(Area::new(self.pieces_max));
        Some(index)
    }

    /// Gives an area back. One that somebody may still touch is never used again.
    pub(super) fn release(&mut self, index: u16) {
        let area = &mut self.areas[usize::from(index)];
        if area.buffer.is_some() || area.mover.is_open() {
            return;
        }
        area.job = Job::Idle;
        area.wait = Wait::Nothing;
        self.free.push(index);
    }

    pub(super) fn get(&mut self, index: u16) -> &mut Area {
        &mut self.areas[usize::from(index)]
    }

    /// The area that a ticket or a letter names, if there is a command in it.
    pub(super) fn find(&mut self, index: u32) -> Option<(u16, &mut Area)> {
        let index = u16::try_from(index).ok()?;
        let area = self.areas.get_mut(usize::from(index))?;
        (!matches!(area.job, Job::Idle)).then_some((index, area))
    }
}

impl Area {
    fn new(pieces_max: usize) -> Self {
        Self {
            slot: 0,
            channel: 0,
            command: Command::default(),
            job: Job::Idle,
            wait: Wait::Nothing,
            walk: Walk::idle(),
            direction: Direction::FromHost,
            pieces: Pieces::at_most(pieces_max),
            mover: Mover::new(),
            segments: Vec::new(),
            part: Vec::new(),
            bytes: Vec::new(),
            buffer: None,
            differs: false,
            cancelled: None,
        }
    }

    /// Whether a host or a medium may still answer for it.
    pub(super) fn is_touched(&self) -> bool {
        matches!(self.wait, Wait::List { .. } | Wait::Host(_) | Wait::Medium)
    }

    /// Collects the segments of `len_bytes` from byte `at_bytes` on. False if they are not there.
    pub(super) fn cut(&mut self, at_bytes: u32, len_bytes: u32) -> bool {
        self.part.clear();
        let (mut skip, mut left) = (at_bytes, len_bytes);
        for segment in &self.segments {
            if skip >= segment.len_bytes {
                skip -= segment.len_bytes;
                continue;
            }
            let take = (segment.len_bytes - skip).min(left);
            let Some(part) = segment.slice(skip, take) else { return false };
            self.part.push(part);
            (skip, left) = (0, left - take);
            if left == 0 {
                return true;
            }
        }
        left == 0
    }
}

#[cfg(test)]
mod tests {
    use base::{RegionId, Segment};
    use wire::{Command, IoOpcode};

    use super::super::job::{FlushAll, Job};
    use super::{Area, Areas};

    #[test]
    fn there_are_as_many_areas_as_were_ever_wanted_at_once_and_no_more_than_there_may_be() {
        let mut areas = Areas::new(2, 4096);
        let take = |areas: &mut Areas| {
            areas.take(
                0,
                0,
                Command::new(IoOpcode::Flush.code()),
                Job::FlushAll(FlushAll::default()),
            )
        };
        assert_eq!(take(&mut areas), Some(0));
        areas.release(0);
        assert_eq!((take(&mut areas), areas.areas.len()), (Some(0), 1), "one is enough so far");
        assert_eq!((take(&mut areas), take(&mut areas)), (Some(1), None));
        assert_eq!(areas.room(), 0);
        areas.release(1);
        assert_eq!(areas.room(), 1);
    }

    #[test]
    fn a_part_of_some_segments_is_cut_at_both_ends() {
        let segment = |offset, len_bytes| Segment { region: RegionId(1), offset, len_bytes };
        let mut area = Area::new(8);
        area.segments.extend([segment(0, 100), segment(1000, 50), segment(2000, 100)]);
        assert!(area.cut(80, 100));
        assert_eq!(area.part, [segment(80, 20), segment(1000, 50), segment(2000, 30)]);
        assert!(area.cut(100, 50));
        assert_eq!(area.part, [segment(1000, 50)]);
        assert!(area.cut(0, 250));
        assert!(!area.cut(200, 51), "past the end");
    }
}
