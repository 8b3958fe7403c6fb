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
use crate::tcp::buffer_pool::{Buffer, OWN_BYTES};
#[cfg(test)]
use crate::tcp::injected_bug::{InjectedBug, is_injected};

/// First half whose second half must be the next command.
#[derive(Debug)]
pub(super) struct FusedFirst {
    pub(super) tag: u16,
    /// Page of the second half, once allocated.
    second_buffer: Option<Buffer>,
}

/// Half of a pair that has not started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FusedHalf {
    pair_half: FusedPosition,
    /// Tag of the other half, once it has arrived.
    partner: Option<u16>,
    state: FusedHalfState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FusedPosition {
    First,
    Second,
}

/// State of a half of a pair: the event it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FusedHalfState {
    Buffer,
    Data,
    /// The other half: this one is complete.
    Partner,
}

/// Largest amount of data of one half.
const HALF_BYTES: u32 = OWN_BYTES / 2;

impl FusedFirst {
    pub(super) fn second_buffer(&self) -> Option<&Buffer> {
        self.second_buffer.as_ref()
    }
}

impl FusedHalf {
    /// Whether its data are outstanding.
    #[inline]
    pub(super) fn is_awaiting_data(self) -> bool {
        self.state == FusedHalfState::Data
    }
}

impl CommandTable {
    /// Admits a command that is half of a pair, or that arrives where a second half is expected.
    /// `None` if it is to be admitted like any other.
    #[cold]
    pub(super) fn admit_fused(
        &mut self,
        end: &mut ControllerConnection,
        (tag, now): (u16, Instant),
        command: &Command,
        data: &DataTransfer,
    ) -> Option<AdmitResult> {
        let field = Status::INVALID_FIELD.with_dnr();
        let status = match (self.fused_position(command), *data) {
            (Ok(None), _) => {
                self.fail_unpaired_first(end);
                return None;
            }
            (
                Ok(Some(FusedPosition::First)),
                DataTransfer::InCapsule(len_bytes @ 1..=HALF_BYTES),
            ) => {
                self.fail_unpaired_first(end);
                return Some(self.admit_fused_first(end, (tag, now), *command, (len_bytes, true)));
            }
            (
                Ok(Some(FusedPosition::First)),
                DataTransfer::FromHost(len_bytes @ 1..=HALF_BYTES),
            ) => {
                self.fail_unpaired_first(end);
                return Some(self.admit_fused_first(end, (tag, now), *command, (len_bytes, false)));
            }
            (
                Ok(Some(FusedPosition::First)),
                DataTransfer::InCapsule(1..) | DataTransfer::FromHost(1..),
            ) => Status::ATOMIC_WRITE_UNIT_EXCEEDED.with_dnr(),
            (Ok(Some(FusedPosition::Second)), _) => match &self.fused_first {
                Some(fused_first)
                    if self.matches_transfer_of_fused_first(fused_first.tag, *data) =>
                {
                    self.admit_fused_second(end, (tag, now), *command);
                    return Some(AdmitResult::Deferred);
                }
                Some(_) => {
                    self.fail_fused_first(end, field);
                    field
                }
                None => Status::ABORTED_MISSING_FUSED,
            },
            (Err(status), _) => {
                // An invalid second half fails the first half as well, as one that does not match
                // does.
                if self.is_io_command(command) && command.fuse() == Fuse::Second {
                    self.fail_fused_first(end, field);
                }
                status
            }
            (Ok(Some(FusedPosition::First)), _) => field,
        };
        self.reject(end, tag, *command, status);
        Some(AdmitResult::Deferred)
    }

    /// Half of a pair that a command is, or `None`. On an I/O queue, the first may be Compare and
    /// the second Write (NVM Command Set 1.1 §2.1.3). In all other commands, including admin and
    /// Fabrics commands, FUSE must be zero.
    fn fused_position(&self, command: &Command) -> Result<Option<FusedPosition>, Status> {
        #[cfg(test)]
        if is_fuse_ignored_by_bug(command) {
            return Ok(None);
        }
        let is_half =
            |opcode: IoOpcode| self.is_io_command(command) && command.opcode() == opcode.code();
        match command.fuse() {
            Fuse::Normal => Ok(None),
            Fuse::First if is_half(IoOpcode::Compare) => Ok(Some(FusedPosition::First)),
            Fuse::Second if is_half(IoOpcode::Write) => Ok(Some(FusedPosition::Second)),
            Fuse::First | Fuse::Second | Fuse::Reserved => Err(Status::INVALID_FIELD.with_dnr()),
        }
    }

    /// Whether it is an I/O command, as opposed to an admin or Fabrics command.
    fn is_io_command(&self, command: &Command) -> bool {
        self.access == BufferAccess::Pool && command.opcode() != AdminOpcode::FabricsCommands.code()
    }

    /// Fails a first half whose second half did not follow.
    pub(super) fn fail_unpaired_first(&mut self, end: &mut ControllerConnection) {
        self.fail_fused_first(end, Status::ABORTED_MISSING_FUSED);
    }

    /// Fails the first half that waits for its second half, if there is one.
    fn fail_fused_first(&mut self, end: &mut ControllerConnection, status: Status) {
        if let Some(FusedFirst { tag, .. }) = self.fused_first {
            self.complete_with(end, tag, 0, Completion::new(0, status));
        }
    }

    /// Stops waiting for the second half, which counts as outstanding data.
    fn remove_fused_first(&mut self) -> Option<FusedFirst> {
        let fused_first = self.fused_first.take()?;
        self.receiving -= 1;
        Some(fused_first)
    }

    /// Admits a first half and allocates memory for both. If that fails for in-capsule data, the
    /// command is admitted again later.
    fn admit_fused_first(
        &mut self,
        end: &mut ControllerConnection,
        (tag, now): (u16, Instant),
        command: Command,
        (len_bytes, is_in_capsule): (u32, bool),
    ) -> AdmitResult {
        let may_allocate = self.waiting.is_empty() || is_in_capsule;
        let mut buffer = if may_allocate { self.cache.allocate(OWN_BYTES) } else { None };
        if is_in_capsule {
            buffer = buffer.or_else(|| self.cache.allocate_own_pages(OWN_BYTES));
            self.is_stream_blocked = buffer.is_none();
            if self.is_stream_blocked {
                return AdmitResult::NoBuffer;
            }
        }
        let half = FusedHalf {
            pair_half: FusedPosition::First,
            partner: None,
            state: FusedHalfState::Buffer,
        };
        let (direction, state) = (DataDirection::FromHost, CommandState::Half(half));
        *self.slot_mut(tag) = CommandSlot {
            command,
            len_bytes,
            direction,
            state,
            is_in_capsule,
            received_at: now,
            requested_at: now,
            ..CommandSlot::FREE
        };
        self.fused_first = Some(FusedFirst { tag, second_buffer: None });
        self.receiving += 1;
        if let Some(buffer) = buffer {
            self.leave_wait_queue();
            self.assign_pair_buffer(end, (tag, now), buffer);
        } else {
            self.waiting.push_back(tag);
        }
        AdmitResult::Deferred
    }

    /// Distributes the buffer of a pair to its halves.
    pub(super) fn assign_pair_buffer(
        &mut self,
        end: &mut ControllerConnection,
        (tag, now): (u16, Instant),
        buffer: Buffer,
    ) {
        // Two pages were allocated. A page that is not used here is returned on drop.
        let Some([second_buffer, upper]) = buffer.split_pages() else { return };
        let Some(half) = self.start_fused_transfer(end, (tag, now), upper) else { return };
        if let Some(second) = half.partner {
            self.start_fused_transfer(end, (second, now), second_buffer);
        } else if let Some(fused_first) =
            self.fused_first.as_mut().filter(|fused_first| fused_first.tag == tag)
        {
            fused_first.second_buffer = Some(second_buffer);
        }
    }

    /// Requests or expects the data of a half. `None` if it does not wait for a buffer.
    fn start_fused_transfer(
        &mut self,
        end: &mut ControllerConnection,
        (tag, now): (u16, Instant),
        buffer: Buffer,
    ) -> Option<FusedHalf> {
        let slot = &mut self.slots[usize::from(tag)];
        let CommandState::Half(half @ FusedHalf { state: FusedHalfState::Buffer, .. }) = slot.state
        else {
            return None;
        };
        slot.state = CommandState::Half(FusedHalf { state: FusedHalfState::Data, ..half });
        slot.requested_at = now;
        slot.set_buffer(buffer, self.cache.pool());
        self.receiving += 1;
        if !slot.is_in_capsule {
            let result = end.request_data(tag, slot.len_bytes);
            self.record_fault(tag, result);
        }
        Some(half)
    }

    /// Whether data match those of the first half: same length and same transfer method. With
    /// different methods, data that were received by one could block the stream in front of those
    /// awaited by the other.
    fn matches_transfer_of_fused_first(&self, fused_first: u16, data: DataTransfer) -> bool {
        let fused_first = &self.slots[usize::from(fused_first)];
        match data {
            DataTransfer::InCapsule(len) => {
                fused_first.is_in_capsule && len == fused_first.len_bytes
            }
            DataTransfer::FromHost(len) => {
                !fused_first.is_in_capsule && len == fused_first.len_bytes
            }
            DataTransfer::None | DataTransfer::ToHost(_) => false,
        }
    }

    /// Admits the second half of a pair.
    fn admit_fused_second(
        &mut self,
        end: &mut ControllerConnection,
        (tag, now): (u16, Instant),
        command: Command,
    ) {
        let Some(FusedFirst { tag: fused_first, second_buffer }) = self.remove_fused_first() else {
            return;
        };
        self.set_fused_partner(fused_first, Some(tag));
        let CommandSlot { len_bytes, is_in_capsule, .. } = self.slots[usize::from(fused_first)];
        let half = FusedHalf {
            pair_half: FusedPosition::Second,
            partner: Some(fused_first),
            state: FusedHalfState::Buffer,
        };
        let (direction, state) = (DataDirection::FromHost, CommandState::Half(half));
        *self.slot_mut(tag) = CommandSlot {
            command,
            len_bytes,
            direction,
            state,
            is_in_capsule,
            received_at: now,
            requested_at: now,
            ..CommandSlot::FREE
        };
        if let Some(second_buffer) = second_buffer {
            self.start_fused_transfer(end, (tag, now), second_buffer);
        }
    }

    fn set_fused_partner(&mut self, tag: u16, other: Option<u16>) {
        if let CommandState::Half(half) = &mut self.slots[usize::from(tag)].state {
            half.partner = other;
        }
    }

    /// Handles the end of the data of a command that cannot start by itself, or at all.
    #[cold]
    pub(super) fn handle_fused_data_complete(
        &mut self,
        end: &mut ControllerConnection,
        tag: u16,
        is_intact: bool,
    ) {
        let slot = &mut self.slots[usize::from(tag)];
        let CommandState::Half(half @ FusedHalf { state: FusedHalfState::Data, .. }) = slot.state
        else {
            return;
        };
        slot.state = CommandState::Half(FusedHalf { state: FusedHalfState::Partner, ..half });
        self.receiving -= 1;
        if !is_intact {
            let completion = Completion::new(0, Status::TRANSIENT_TRANSPORT_ERROR);
            return self.complete_with(end, tag, 0, completion);
        }
        let Some(partner) = half.partner else { return };
        let CommandState::Half(FusedHalf { state: FusedHalfState::Partner, .. }) =
            self.slots[usize::from(partner)].state
        else {
            return;
        };
        let pair =
            if half.pair_half == FusedPosition::Second { [partner, tag] } else { [tag, partner] };
        // At the front of the queue, in order, so that nothing comes between.
        for tag in pair.into_iter().rev() {
            self.slots[usize::from(tag)].state = CommandState::Ready;
            self.waiting.push_front(tag);
        }
    }

    /// Fails the other half, because this one is about to complete before the pair has started.
    #[cold]
    pub(super) fn fail_fused_partner(&mut self, end: &mut ControllerConnection, tag: u16) {
        if self.fused_first.as_ref().is_some_and(|fused_first| fused_first.tag == tag) {
            self.remove_fused_first();
        }
        let slot = &mut self.slots[usize::from(tag)];
        let CommandState::Half(half) = slot.state else { return };
        #[cfg(test)]
        if is_injected(InjectedBug::Lost)
            && let Some(buffer) = slot.buffer.take()
        {
            buffer.leak_block();
        }
        // From here on it is an ordinary command, whose data may still be arriving.
        slot.state =
            if half.is_awaiting_data() { CommandState::AwaitingData } else { CommandState::Ready };
        if let Some(partner) = half.partner {
            self.set_fused_partner(partner, None);
            self.complete_with(end, partner, 0, Completion::new(0, Status::ABORTED_FAILED_FUSED));
        }
    }

    /// Whether a waiting command is treated according to its FUSE field: a reintroduced bug.
    #[cfg(test)]
    pub(super) fn is_treated_as_fused_by_bug(&mut self, tag: u16) -> bool {
        let CommandSlot { command, direction, .. } = &mut self.slots[usize::from(tag)];
        let is_taken = command.fuse() == Fuse::First
            && self.access == BufferAccess::Pool
            && command.opcode() == AdminOpcode::FabricsCommands.code();
        if is_taken && is_injected(InjectedBug::Misdirected) {
            *direction = DataDirection::FromHost;
        }
        is_taken && is_injected(InjectedBug::Overwrite)
    }

    /// Stops waiting for a second half: nothing new starts.
    pub(super) fn cancel_fused_first(&mut self) {
        self.remove_fused_first();
    }
}

/// Whether FUSE of a Fabrics command is ignored on arrival: a reintroduced bug.
#[cfg(test)]
fn is_fuse_ignored_by_bug(command: &Command) -> bool {
    let is_fabrics = command.opcode() == AdminOpcode::FabricsCommands.code();
    is_fabrics && (is_injected(InjectedBug::Overwrite) || is_injected(InjectedBug::Misdirected))
}
