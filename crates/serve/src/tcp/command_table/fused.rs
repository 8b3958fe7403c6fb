//! Fused commands: two commands that start together, in order, or not at all (Base 2.1 §3.4.2).
//!
//! ```text
//!   second ─── lower page ─ data complete ─┐
//!   first ──── upper page ─ data complete ─┴─▶ ready
//! ```
//!
//! Both halves share one allocation, so a pair never waits for memory while holding some. It has
//! two pages, the size of a connection's own pages, so a pair with in-capsule data always finds a
//! buffer eventually. Each half has one of the pages as its buffer; the page of the second half is
//! kept in [`FusedFirst`] until that command arrives.

use tenmil_base::Instant;
use tenmil_nvme_tcp::{ControllerConnection, DataTransfer};
use tenmil_wire::{AdminOpcode, Command, Completion, Fuse, IoOpcode, Status};

use super::{AdmitResult, BufferAccess, CommandSlot, CommandState, CommandTable, DataDirection};
#[cfg(test)]
use crate::tcp::injected_bug::{InjectedBug, is_injected};
use crate::tcp::memory::{Buffer, OWN_BYTES};

/// First half whose second half must be the next command.
#[derive(Debug)]
pub(super) struct FusedFirst {
    pub(super) tag: u16,
    /// Page of the second half, once allocated.
    lower: Option<Buffer>,
}

/// Half of a pair that has not started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Half {
    which: Which,
    /// Tag of the other half, once it has arrived.
    fellow: Option<u16>,
    wait: Wait,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    First,
    Second,
}

/// State of a half: the event it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    Buffer,
    Data,
    /// The other half: this one is complete.
    Fellow,
}

/// Largest amount of data of one half.
const HALF_BYTES: u32 = OWN_BYTES / 2;

impl FusedFirst {
    pub(super) fn lower(&self) -> Option<&Buffer> {
        self.lower.as_ref()
    }
}

impl Half {
    /// Whether the host owes its data.
    #[inline]
    pub(super) fn awaits_data(self) -> bool {
        self.wait == Wait::Data
    }
}

impl CommandTable {
    /// Admits a command that is half of a pair, or that arrives where a second half is expected.
    /// `None` if it is to be admitted like any other.
    #[cold]
    pub(super) fn open_half(
        &mut self,
        end: &mut ControllerConnection,
        (tag, now): (u16, Instant),
        command: &Command,
        data: &DataTransfer,
    ) -> Option<AdmitResult> {
        let field = Status::INVALID_FIELD.with_dnr();
        let status = match (self.which(command), *data) {
            (Ok(None), _) => {
                self.fail_unpaired(end);
                return None;
            }
            (Ok(Some(Which::First)), DataTransfer::InCapsule(len_bytes @ 1..=HALF_BYTES)) => {
                self.fail_unpaired(end);
                return Some(self.open_first(end, (tag, now), *command, (len_bytes, true)));
            }
            (Ok(Some(Which::First)), DataTransfer::FromHost(len_bytes @ 1..=HALF_BYTES)) => {
                self.fail_unpaired(end);
                return Some(self.open_first(end, (tag, now), *command, (len_bytes, false)));
            }
            (
                Ok(Some(Which::First)),
                DataTransfer::InCapsule(1..) | DataTransfer::FromHost(1..),
            ) => Status::ATOMIC_WRITE_UNIT_EXCEEDED.with_dnr(),
            (Ok(Some(Which::Second)), _) => match &self.first {
                Some(first) if self.fits(first.tag, *data) => {
                    self.open_second(end, (tag, now), *command);
                    return Some(AdmitResult::Later);
                }
                Some(_) => {
                    self.end_first(end, field);
                    field
                }
                None => Status::ABORTED_MISSING_FUSED,
            },
            (Err(status), _) => {
                // An invalid second half fails the first half as well, as one that does not match
                // does.
                if self.is_of_queue(command) && command.fuse() == Fuse::Second {
                    self.end_first(end, field);
                }
                status
            }
            (Ok(Some(Which::First)), _) => field,
        };
        self.refuse(end, tag, *command, status);
        Some(AdmitResult::Later)
    }

    /// Determines which half of a pair a command is. On an I/O queue, the first may be Compare and
    /// the second Write (NVM Command Set 1.1 §2.1.3). In all other commands, including admin and
    /// Fabrics commands, FUSE must be zero.
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

    /// Whether it is an I/O command, as opposed to an admin or Fabrics command.
    fn is_of_queue(&self, command: &Command) -> bool {
        self.share == BufferAccess::Pool && command.opcode() != AdminOpcode::FabricsCommands.code()
    }

    /// Fails a first half whose second half did not follow.
    pub(super) fn fail_unpaired(&mut self, end: &mut ControllerConnection) {
        self.end_first(end, Status::ABORTED_MISSING_FUSED);
    }

    /// Fails the first half that waits for its second half, if there is one.
    fn end_first(&mut self, end: &mut ControllerConnection, status: Status) {
        if let Some(FusedFirst { tag, .. }) = self.first {
            self.finish(end, tag, 0, Completion::new(0, status));
        }
    }

    /// Stops waiting for the second half, which the host owed like data.
    fn take_first(&mut self) -> Option<FusedFirst> {
        let first = self.first.take()?;
        self.coming -= 1;
        Some(first)
    }

    /// Admits a first half and allocates memory for both. If that fails for in-capsule data, the
    /// command is admitted again later.
    fn open_first(
        &mut self,
        end: &mut ControllerConnection,
        (tag, now): (u16, Instant),
        command: Command,
        (len_bytes, is_unasked): (u32, bool),
    ) -> AdmitResult {
        let may_take = self.waiting.is_empty() || is_unasked;
        let mut buffer = if may_take { self.quota.take(OWN_BYTES) } else { None };
        if is_unasked {
            buffer = buffer.or_else(|| self.quota.take_own(OWN_BYTES));
            self.is_stuck = buffer.is_none();
            if self.is_stuck {
                return AdmitResult::NoBuffer;
            }
        }
        let half = Half { which: Which::First, fellow: None, wait: Wait::Buffer };
        let (way, step) = (DataDirection::FromHost, CommandState::Half(half));
        *self.place(tag) = CommandSlot {
            command,
            len_bytes,
            way,
            step,
            is_unasked,
            asked_at: now,
            ..CommandSlot::FREE
        };
        self.first = Some(FusedFirst { tag, lower: None });
        self.coming += 1;
        if let Some(buffer) = buffer {
            self.leave_line();
            self.first_placed(end, (tag, now), buffer);
        } else {
            self.waiting.push_back(tag);
        }
        AdmitResult::Later
    }

    /// Distributes the buffer of a pair to its halves.
    pub(super) fn first_placed(
        &mut self,
        end: &mut ControllerConnection,
        (tag, now): (u16, Instant),
        buffer: Buffer,
    ) {
        // Two pages were allocated. A page that is not used here is returned on drop.
        let Some([lower, upper]) = buffer.split() else { return };
        let Some(half) = self.expect_half(end, (tag, now), upper) else { return };
        if let Some(second) = half.fellow {
            self.expect_half(end, (second, now), lower);
        } else if let Some(first) = self.first.as_mut().filter(|first| first.tag == tag) {
            first.lower = Some(lower);
        }
    }

    /// Requests or expects the data of a half. `None` if it does not wait for a buffer.
    fn expect_half(
        &mut self,
        end: &mut ControllerConnection,
        (tag, now): (u16, Instant),
        buffer: Buffer,
    ) -> Option<Half> {
        let slot = &mut self.slots[usize::from(tag)];
        let CommandState::Half(half @ Half { wait: Wait::Buffer, .. }) = slot.step else {
            return None;
        };
        slot.step = CommandState::Half(Half { wait: Wait::Data, ..half });
        slot.asked_at = now;
        slot.place(buffer, self.quota.budget());
        self.coming += 1;
        if !slot.is_unasked {
            let granted = end.request_data(tag, slot.len_bytes);
            self.note(tag, granted);
        }
        Some(half)
    }

    /// Whether data match those of the first half: same length and same transfer method. With
    /// different methods, data that were received by one could block the stream in front of those
    /// awaited by the other.
    fn fits(&self, first: u16, data: DataTransfer) -> bool {
        let first = &self.slots[usize::from(first)];
        match data {
            DataTransfer::InCapsule(len) => first.is_unasked && len == first.len_bytes,
            DataTransfer::FromHost(len) => !first.is_unasked && len == first.len_bytes,
            DataTransfer::None | DataTransfer::ToHost(_) => false,
        }
    }

    /// Admits the second half of a pair.
    fn open_second(
        &mut self,
        end: &mut ControllerConnection,
        (tag, now): (u16, Instant),
        command: Command,
    ) {
        let Some(FusedFirst { tag: first, lower }) = self.take_first() else { return };
        self.set_fellow(first, Some(tag));
        let CommandSlot { len_bytes, is_unasked, .. } = self.slots[usize::from(first)];
        let half = Half { which: Which::Second, fellow: Some(first), wait: Wait::Buffer };
        let (way, step) = (DataDirection::FromHost, CommandState::Half(half));
        *self.place(tag) = CommandSlot {
            command,
            len_bytes,
            way,
            step,
            is_unasked,
            asked_at: now,
            ..CommandSlot::FREE
        };
        if let Some(lower) = lower {
            self.expect_half(end, (tag, now), lower);
        }
    }

    fn set_fellow(&mut self, tag: u16, other: Option<u16>) {
        if let CommandState::Half(half) = &mut self.slots[usize::from(tag)].step {
            half.fellow = other;
        }
    }

    /// Handles the end of the data of a command that cannot start by itself, or at all.
    #[cold]
    pub(super) fn half_arrived(
        &mut self,
        end: &mut ControllerConnection,
        tag: u16,
        is_intact: bool,
    ) {
        let slot = &mut self.slots[usize::from(tag)];
        let CommandState::Half(half @ Half { wait: Wait::Data, .. }) = slot.step else { return };
        slot.step = CommandState::Half(Half { wait: Wait::Fellow, ..half });
        self.coming -= 1;
        if !is_intact {
            let completion = Completion::new(0, Status::TRANSIENT_TRANSPORT_ERROR);
            return self.finish(end, tag, 0, completion);
        }
        let Some(fellow) = half.fellow else { return };
        let CommandState::Half(Half { wait: Wait::Fellow, .. }) =
            self.slots[usize::from(fellow)].step
        else {
            return;
        };
        let pair = if half.which == Which::Second { [fellow, tag] } else { [tag, fellow] };
        // At the front of the queue, in order, so that nothing comes between.
        for tag in pair.into_iter().rev() {
            self.slots[usize::from(tag)].step = CommandState::Ready;
            self.waiting.push_front(tag);
        }
    }

    /// Fails the other half, because this one is about to complete before the pair has started.
    #[cold]
    pub(super) fn fail_partner(&mut self, end: &mut ControllerConnection, tag: u16) {
        if self.first.as_ref().is_some_and(|first| first.tag == tag) {
            self.take_first();
        }
        let slot = &mut self.slots[usize::from(tag)];
        let CommandState::Half(half) = slot.step else { return };
        #[cfg(test)]
        if is_injected(InjectedBug::Lost)
            && let Some(buffer) = slot.buffer.take()
        {
            buffer.abandon();
        }
        // From here on it is an ordinary command, whose data may still be arriving.
        slot.step =
            if half.awaits_data() { CommandState::AwaitingData } else { CommandState::Ready };
        if let Some(fellow) = half.fellow {
            self.set_fellow(fellow, None);
            self.finish(end, fellow, 0, Completion::new(0, Status::ABORTED_FAILED_FUSED));
        }
    }

    /// Whether a waiting command is treated according to its FUSE field: a reintroduced bug.
    #[cfg(test)]
    pub(super) fn is_taken_for_half(&mut self, tag: u16) -> bool {
        let CommandSlot { command, way, .. } = &mut self.slots[usize::from(tag)];
        let is_taken = command.fuse() == Fuse::First
            && self.share == BufferAccess::Pool
            && command.opcode() == AdminOpcode::FabricsCommands.code();
        if is_taken && is_injected(InjectedBug::Misdirected) {
            *way = DataDirection::FromHost;
        }
        is_taken && is_injected(InjectedBug::Overwrite)
    }

    /// Stops waiting for a second half: nothing new starts.
    pub(super) fn forsake_first(&mut self) {
        self.take_first();
    }
}

/// Whether FUSE of a Fabrics command is ignored on arrival: a reintroduced bug.
#[cfg(test)]
fn is_planted_to_pass(command: &Command) -> bool {
    let is_fabrics = command.opcode() == AdminOpcode::FabricsCommands.code();
    is_fabrics && (is_injected(InjectedBug::Overwrite) || is_injected(InjectedBug::Misdirected))
}
