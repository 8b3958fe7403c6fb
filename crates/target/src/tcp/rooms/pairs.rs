//! Fused pairs: two commands that begin together, one behind the other, or not at all (Base 2.1
//! §3.4.2).
//!
//! ```text
//!   second ─── the lower page ─ all has come ─┐
//!   first ──── the upper page ─ all has come ─┴─▶ ready
//! ```
//!
//! One buffer is for both, so no pair waits for memory with memory in its hands. It has two pages,
//! which is what a connection has of its own: a pair whose data come unasked always finds that. Each
//! half has one of the pages, as any command has a buffer; that of the second half is with [`First`]
//! until it comes.

use base::Instant;
use tcp::{CommandData, Controller};
use wire::{AdminOpcode, Command, Completion, Fuse, IoOpcode, Status};

use super::{Opened, Rooms, Share, Slot, Step, Way};
use crate::tcp::memory::{Buffer, OWN_BYTES};
#[cfg(test)]
use crate::tcp::plant::{Plant, is_planted};

/// A first half whose second half has to come next.
#[derive(Debug)]
pub(super) struct First {
    pub(super) tag: u16,
    /// The page of the second half, once there is one.
    lower: Option<Buffer>,
}

/// Half of a pair that has not begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Half {
    which: Which,
    /// The other half, once both have come.
    fellow: Option<u16>,
    wait: Wait,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    First,
    Second,
}

/// What half a pair waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    Buffer,
    Data,
    /// For the other half: all of this one is there.
    Fellow,
}

/// Bytes of half a pair at most.
const HALF_BYTES: u32 = OWN_BYTES / 2;

impl First {
    pub(super) fn lower(&self) -> Option<&Buffer> {
        self.lower.as_ref()
    }
}

impl Half {
    /// Whether its host owes its data.
    #[inline]
    pub(super) fn awaits_data(self) -> bool {
        self.wait == Wait::Data
    }
}

impl Rooms {
    /// A command has come that says that it is half of a pair, or that comes where a second half is
    /// awaited. `None` if it is opened as any other.
    #[cold]
    pub(super) fn open_half(
        &mut self,
        end: &mut Controller,
        (tag, now): (u16, Instant),
        command: &Command,
        data: &CommandData,
    ) -> Option<Opened> {
        let field = Status::INVALID_FIELD.with_dnr();
        let status = match (self.which(command), *data) {
            (Ok(None), _) => {
                self.miss_second(end);
                return None;
            }
            (Ok(Some(Which::First)), CommandData::InCapsule(len_bytes @ 1..=HALF_BYTES)) => {
                self.miss_second(end);
                return Some(self.open_first(end, (tag, now), *command, (len_bytes, true)));
            }
            (Ok(Some(Which::First)), CommandData::FromHost(len_bytes @ 1..=HALF_BYTES)) => {
                self.miss_second(end);
                return Some(self.open_first(end, (tag, now), *command, (len_bytes, false)));
            }
            (Ok(Some(Which::First)), CommandData::InCapsule(1..) | CommandData::FromHost(1..)) => {
                Status::ATOMIC_WRITE_UNIT_EXCEEDED.with_dnr()
            }
            (Ok(Some(Which::Second)), _) => match &self.first {
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
            (Err(status), _) => {
                // A second half that is none ends the first with it, as one that does not fit does.
                if self.is_of_queue(command) && command.fuse() == Fuse::Second {
                    self.end_first(end, field);
                }
                status
            }
            (Ok(Some(Which::First)), _) => field,
        };
        self.refuse(end, tag, *command, status);
        Some(Opened::Later)
    }

    /// Which half of a pair a command is, if it is one. Of the commands of an I/O queue Compare can be
    /// the first and Write the second (NVM Command Set 1.1 §2.1.3). In all others, those of admin queues
    /// and of fabrics among them, FUSE has to be zero.
    fn which(&self, command: &Command) -> Result<Option<Which>, Status> {
        #[cfg(test)]
        if is_planted_to_pass(command) {
            return Ok(None);
        }
        let is_half =
            |opcode: IoOpcode| self.is_of_queue(command) && command.opcode() == opcode.code();
        match command.fuse() {
            Fuse::Normal => Ok(None),
            Fuse::First if is_half(IoOpcode::Compare) => Ok(Some(Which::First)),
            Fuse::Second if is_half(IoOpcode::Write) => Ok(Some(Which::Second)),
            Fuse::First | Fuse::Second | Fuse::Reserved => Err(Status::INVALID_FIELD.with_dnr()),
        }
    }

    /// Whether it is an I/O queue's command, and none of fabrics.
    fn is_of_queue(&self, command: &Command) -> bool {
        self.share == Share::Common && command.opcode() != AdminOpcode::FabricsCommands.code()
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
        let half = Half { which: Which::First, fellow: None, wait: Wait::Buffer };
        let (way, step) = (Way::FromHost, Step::Half(half));
        *self.place(tag) =
            Slot { command, len_bytes, way, step, is_unasked, asked_at: now, ..Slot::FREE };
        self.first = Some(First { tag, lower: None });
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
        // Two pages were asked for. What is not used here goes back where it came from.
        let Some([lower, upper]) = buffer.split() else { return };
        let Some(half) = self.expect_half(end, (tag, now), upper) else { return };
        if let Some(second) = half.fellow {
            self.expect_half(end, (second, now), lower);
        } else if let Some(first) = self.first.as_mut().filter(|first| first.tag == tag) {
            first.lower = Some(lower);
        }
    }

    /// The data of half a pair may come. None if it does not wait for a buffer.
    fn expect_half(
        &mut self,
        end: &mut Controller,
        (tag, now): (u16, Instant),
        buffer: Buffer,
    ) -> Option<Half> {
        let slot = &mut self.slots[usize::from(tag)];
        let Step::Half(half @ Half { wait: Wait::Buffer, .. }) = slot.step else { return None };
        slot.step = Step::Half(Half { wait: Wait::Data, ..half });
        (slot.asked_at, slot.buffer) = (now, Some(buffer));
        self.coming += 1;
        if !slot.is_unasked {
            let granted = end.grant(tag, slot.len_bytes);
            self.note(tag, granted);
        }
        Some(half)
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
        let Some(First { tag: first, lower }) = self.take_first() else { return };
        self.set_fellow(first, Some(tag));
        let Slot { len_bytes, is_unasked, .. } = self.slots[usize::from(first)];
        let half = Half { which: Which::Second, fellow: Some(first), wait: Wait::Buffer };
        let (way, step) = (Way::FromHost, Step::Half(half));
        *self.place(tag) =
            Slot { command, len_bytes, way, step, is_unasked, asked_at: now, ..Slot::FREE };
        if let Some(lower) = lower {
            self.expect_half(end, (tag, now), lower);
        }
    }

    fn set_fellow(&mut self, tag: u16, other: Option<u16>) {
        if let Step::Half(half) = &mut self.slots[usize::from(tag)].step {
            half.fellow = other;
        }
    }

    /// All data of a command have come that cannot begin by itself, or at all.
    #[cold]
    pub(super) fn half_arrived(&mut self, end: &mut Controller, tag: u16, is_intact: bool) {
        let slot = &mut self.slots[usize::from(tag)];
        let Step::Half(half @ Half { wait: Wait::Data, .. }) = slot.step else { return };
        slot.step = Step::Half(Half { wait: Wait::Fellow, ..half });
        self.coming -= 1;
        if !is_intact {
            let completion = Completion::new(0, Status::TRANSIENT_TRANSPORT_ERROR);
            return self.finish(end, tag, 0, completion);
        }
        let Some(fellow) = half.fellow else { return };
        let Step::Half(Half { wait: Wait::Fellow, .. }) = self.slots[usize::from(fellow)].step
        else {
            return;
        };
        let pair = if half.which == Which::Second { [fellow, tag] } else { [tag, fellow] };
        // Before all others that wait, and nothing comes between.
        for tag in pair.into_iter().rev() {
            self.slots[usize::from(tag)].step = Step::Ready;
            self.waiting.push_front(tag);
        }
    }

    /// Half a pair is about to end before the pair has begun, and the other half ends with it.
    #[cold]
    pub(super) fn part(&mut self, end: &mut Controller, tag: u16) {
        if self.first.as_ref().is_some_and(|first| first.tag == tag) {
            self.take_first();
        }
        let slot = &mut self.slots[usize::from(tag)];
        let Step::Half(half) = slot.step else { return };
        #[cfg(test)]
        if is_planted(Plant::Lost)
            && let Some(buffer) = slot.buffer.take()
        {
            buffer.abandon();
        }
        // From now on it is a command like any other, whose data are still to come or not.
        slot.step = if half.awaits_data() { Step::AwaitingData } else { Step::Ready };
        if let Some(fellow) = half.fellow {
            self.set_fellow(fellow, None);
            self.finish(end, fellow, 0, Completion::new(0, Status::ABORTED_FAILED_FUSED));
        }
    }

    /// Whether a command that waits is taken for what it says that it is: a planted bug.
    #[cfg(test)]
    pub(super) fn is_taken_for_half(&mut self, tag: u16) -> bool {
        let Slot { command, way, .. } = &mut self.slots[usize::from(tag)];
        let is_taken = command.fuse() == Fuse::First
            && self.share == Share::Common
            && command.opcode() == AdminOpcode::FabricsCommands.code();
        if is_taken && is_planted(Plant::Misdirected) {
            *way = Way::FromHost;
        }
        is_taken && is_planted(Plant::Overwrite)
    }

    /// Nothing more begins: no second half is awaited.
    pub(super) fn forsake_first(&mut self) {
        self.take_first();
    }
}

/// Whether FUSE of a command of fabrics is passed over when it comes: a planted bug.
#[cfg(test)]
fn is_planted_to_pass(command: &Command) -> bool {
    let is_fabrics = command.opcode() == AdminOpcode::FabricsCommands.code();
    is_fabrics && (is_planted(Plant::Overwrite) || is_planted(Plant::Misdirected))
}
