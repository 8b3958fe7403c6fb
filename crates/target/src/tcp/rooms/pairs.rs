//! Fused pairs: two commands that begin together, one behind the other, or not at all (Base 2.1
//! §3.4.2).
//!
//! ```text
//!   second ─── the lower page ─ all has come ─┐
//!   first ──── the upper page ─ all has come ─┴─▶ ready
//! ```
//!
//! One buffer is for both, so no pair waits for memory with memory in its hands. It has two pages,
//! which is what a connection has of its own: a pair whose data come unasked always finds that. The
//! second half, which ends last, has the buffer, and lends a page of it to the first.

use base::Instant;
use tcp::{CommandData, Controller};
use wire::{AdminOpcode, Command, Completion, Fuse, Status};

use super::{Opened, Rooms, Share, Slot, Step, Way};
use crate::tcp::memory::{Buffer, OWN_BYTES};

/// A first half whose second half has to come next.
#[derive(Debug)]
pub(super) struct First {
    pub(super) tag: u16,
    /// The buffer of both, once there is one.
    buffer: Option<Buffer>,
}

/// Bytes of half a pair at most.
const HALF_BYTES: u32 = OWN_BYTES / 2;

impl Rooms {
    /// A command has come that is half of a pair, or that comes where a second half is awaited. `None`
    /// if it is opened as any other.
    #[cold]
    pub(super) fn open_half(
        &mut self,
        end: &mut Controller,
        (tag, now): (u16, Instant),
        command: &Command,
        data: &CommandData,
    ) -> Option<Opened> {
        // Elsewhere there are no pairs, and whoever executes the command says so.
        if self.share != Share::Common {
            return None;
        }
        let is_fabrics = command.opcode() == AdminOpcode::FabricsCommands.code();
        let fuse = if is_fabrics { Fuse::Normal } else { command.fuse() };
        if fuse != Fuse::Second {
            self.miss_second(end);
        }
        let field = Status::INVALID_FIELD.with_dnr();
        let status = match (fuse, *data) {
            (Fuse::Normal, _) => return None,
            (Fuse::First, CommandData::InCapsule(len_bytes @ 1..=HALF_BYTES)) => {
                return Some(self.open_first(end, (tag, now), *command, (len_bytes, true)));
            }
            (Fuse::First, CommandData::FromHost(len_bytes @ 1..=HALF_BYTES)) => {
                return Some(self.open_first(end, (tag, now), *command, (len_bytes, false)));
            }
            (Fuse::First, CommandData::InCapsule(1..) | CommandData::FromHost(1..)) => {
                Status::ATOMIC_WRITE_UNIT_EXCEEDED.with_dnr()
            }
            (Fuse::Second, _) => match &self.first {
                Some(first) if self.fits(first.tag, *data) => {
                    self.open_second(end, (tag, now), *command);
                    return Some(Opened::Later);
                }
                Some(_) => {
                    self.end_first(end, field);
                    field
                }
                None => Status::ABORTED_MISSING_FUSED,
            },
            (Fuse::First | Fuse::Reserved, _) => field,
        };
        self.refuse(end, tag, *command, status);
        Some(Opened::Later)
    }

    /// What comes next is not the second half of a pair, if one is awaited.
    pub(super) fn miss_second(&mut self, end: &mut Controller) {
        self.end_first(end, Status::ABORTED_MISSING_FUSED);
    }

    /// Ends the first half whose second half is awaited, if there is one.
    fn end_first(&mut self, end: &mut Controller, status: Status) {
        if let Some(First { tag, .. }) = self.first {
            self.finish(end, tag, 0, Completion::new(0, status));
        }
    }

    /// No second half is awaited any more. Its host has owed it, as others owe data.
    fn take_first(&mut self) -> Option<First> {
        let first = self.first.take()?;
        self.coming -= 1;
        Some(first)
    }

    /// Opens a first half with room for both. What comes unasked and finds none comes here again.
    fn open_first(
        &mut self,
        end: &mut Controller,
        (tag, now): (u16, Instant),
        command: Command,
        (len_bytes, is_unasked): (u32, bool),
    ) -> Opened {
        let may_take = self.waiting.is_empty() || is_unasked;
        let mut buffer = if may_take { self.purse.take(OWN_BYTES) } else { None };
        if is_unasked {
            buffer = buffer.or_else(|| self.purse.take_own(OWN_BYTES));
            self.is_stuck = buffer.is_none();
            if self.is_stuck {
                return Opened::NoRoom;
            }
        }
        let (way, step) = (Way::FromHost, Step::Waiting);
        *self.place(tag) =
            Slot { command, len_bytes, way, step, is_unasked, asked_at: now, ..Slot::FREE };
        self.first = Some(First { tag, buffer: None });
        self.coming += 1;
        if let Some(buffer) = buffer {
            self.leave_line();
            self.first_placed(end, (tag, now), buffer);
        } else {
            self.waiting.push_back(tag);
        }
        Opened::Later
    }

    /// There is a buffer for a first half, and for its second half.
    pub(super) fn first_placed(
        &mut self,
        end: &mut Controller,
        (tag, now): (u16, Instant),
        buffer: Buffer,
    ) {
        self.expect_half(end, (tag, now), buffer.upper_page());
        if let Some(second) = self.slots[usize::from(tag)].fellow {
            self.expect_half(end, (second, now), buffer);
        } else if let Some(first) = &mut self.first {
            first.buffer = Some(buffer);
        }
    }

    /// The data of half a pair may come.
    fn expect_half(&mut self, end: &mut Controller, (tag, now): (u16, Instant), buffer: Buffer) {
        let slot = &mut self.slots[usize::from(tag)];
        (slot.step, slot.asked_at, slot.buffer) = (Step::HalfComing, now, Some(buffer));
        self.coming += 1;
        if !slot.is_unasked {
            end.grant(tag, slot.len_bytes);
        }
    }

    /// Whether such data may be those of the second half: as many as those of the first, and on the same
    /// way. Of two ways, what has come by the one could stand before what is waited for by the other.
    fn fits(&self, first: u16, data: CommandData) -> bool {
        let first = &self.slots[usize::from(first)];
        match data {
            CommandData::InCapsule(len) => first.is_unasked && len == first.len_bytes,
            CommandData::FromHost(len) => !first.is_unasked && len == first.len_bytes,
            CommandData::None | CommandData::ToHost(_) => false,
        }
    }

    /// Opens the second half of the pair whose first half has come.
    fn open_second(&mut self, end: &mut Controller, (tag, now): (u16, Instant), command: Command) {
        let Some(First { tag: first, buffer }) = self.take_first() else { return };
        let fellow = &mut self.slots[usize::from(first)];
        fellow.fellow = Some(tag);
        let (len_bytes, is_unasked) = (fellow.len_bytes, fellow.is_unasked);
        let (way, step, fellow) = (Way::FromHost, Step::HalfBare, Some(first));
        *self.place(tag) =
            Slot { command, len_bytes, way, step, is_unasked, fellow, asked_at: now, ..Slot::FREE };
        if let Some(buffer) = buffer {
            self.expect_half(end, (tag, now), buffer);
        }
    }

    /// All data of a command have come that cannot begin by itself, or at all.
    #[cold]
    pub(super) fn half_arrived(&mut self, end: &mut Controller, tag: u16, is_intact: bool) {
        let slot = &mut self.slots[usize::from(tag)];
        if slot.step != Step::HalfComing {
            return;
        }
        slot.step = Step::HalfThere;
        let (fellow, is_second) = (slot.fellow, slot.command.fuse() == Fuse::Second);
        self.coming -= 1;
        if !is_intact {
            let completion = Completion::new(0, Status::TRANSIENT_TRANSPORT_ERROR);
            return self.finish(end, tag, 0, completion);
        }
        let Some(fellow) = fellow else { return };
        if self.slots[usize::from(fellow)].step == Step::HalfThere {
            let pair = if is_second { [fellow, tag] } else { [tag, fellow] };
            // Before all others that wait, and nothing comes between.
            for tag in pair.into_iter().rev() {
                let slot = &mut self.slots[usize::from(tag)];
                (slot.step, slot.fellow) = (Step::Ready, None);
                self.waiting.push_front(tag);
            }
        }
    }

    /// Half a pair is about to end before the pair has begun, and the other half ends with it.
    #[cold]
    pub(super) fn part(&mut self, end: &mut Controller, tag: u16) {
        let is_first = self.first.as_ref().is_some_and(|first| first.tag == tag);
        let lent = if is_first { self.take_first() } else { None };
        let slot = &mut self.slots[usize::from(tag)];
        // From now on it is a command like any other, whose data are still to come or not.
        slot.step = if slot.step == Step::HalfComing { Step::Coming } else { Step::Ready };
        if slot.command.fuse() == Fuse::First {
            // Nothing comes there any more: the page may be somebody else's in a moment.
            slot.buffer = None;
        }
        let fellow = slot.fellow.take();
        if let Some(buffer) = lent.and_then(|first| first.buffer) {
            self.purse.give(buffer);
        }
        if let Some(fellow) = fellow {
            self.slots[usize::from(fellow)].fellow = None;
            self.finish(end, fellow, 0, Completion::new(0, Status::ABORTED_FAILED_FUSED));
        }
    }

    /// Nothing more begins: no second half is awaited.
    pub(super) fn forsake_first(&mut self) {
        if let Some(First { tag, buffer: Some(buffer) }) = self.take_first() {
            self.slots[usize::from(tag)].buffer = None;
            self.purse.give(buffer);
        }
    }
}
