//! Commands of a connection and their data buffers.
//!
//! ```text
//!   Command ─┬─ no data ──────────────────────────────────────────────▶ ready
//!            ├─ data to the host ─── a buffer, or the wait queue ─▶ ready
//!            ├─ data from the host ─ a buffer, or the wait queue ─ R2T ─ data complete ─▶ ready
//!            └─ in-capsule data ──── a buffer, or the stream is not read ─ data complete ─▶ ready
//! ```
//!
//! With rate limits, a command may wait for them first: see [`held_commands`].
//!
//! The halves of a fused pair start together: see [`fused_commands`].

mod command_slot;
mod fused_commands;
mod held_commands;
mod slow_io;

use std::collections::VecDeque;
use std::ops::Range;

use tenmil_base::{Instant, InvalidSegment, MediumGuard, MediumMemory, Memory, Segment};
use tenmil_nvme_tcp::{
    ControllerConnection, DataPlacement, DataTransfer, OwnerCallError, PayloadDigest,
};
use tenmil_wire::tcp::Crc32c;
use tenmil_wire::{Command, Completion, Fuse, Status};

use super::buffer_pool::{Buffer, BufferCache, BufferPool, HostMemory, OWN_BYTES};
use command_slot::{CommandSlot, CommandState};
use fused_commands::FusedFirst;
use held_commands::HeldCommands;
pub(super) use held_commands::{CopiedBlocks, LimitReport, LimitWait};
pub(super) use slow_io::SlowIoTracker;

/// Command slots of a connection and the buffers they hold.
#[derive(Debug)]
pub(super) struct CommandTable {
    /// Slots by tag; grown to the largest number used at the same time.
    slots: Vec<CommandSlot>,
    /// By tag: what keeps the memory of the medium in [`CommandState::CompletedInPlace`]. Beside the slots,
    /// of which the I/O path reads all fields.
    media: Vec<Option<MediumGuard>>,
    cache: BufferCache,
    /// Tags of commands that wait for a buffer, oldest first.
    waiting: VecDeque<u16>,
    /// Whether in-capsule data found no buffer, so that the stream is not read.
    is_stream_blocked: bool,
    /// Number of commands whose data are being received, including second halves that must follow.
    receiving: u32,
    access: BufferAccess,
    fused_first: Option<FusedFirst>,
    /// Times of the commands, while there is a threshold for slow ones.
    slow_io: Option<Box<SlowIoTracker>>,
    /// Rate limits, if there are any, and the commands that wait for them.
    held: Option<Box<HeldCommands>>,
    /// Invalid call of the connection's protocol engine: a bug of the target.
    fault: Option<ProtocolCallFault>,
}

/// Invalid call of the protocol engine, and the command that it concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProtocolCallFault {
    pub(super) tag: u16,
    pub(super) command: Command,
    pub(super) why: OwnerCallError,
}

/// Buffers that the commands of a connection may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BufferAccess {
    /// Only the connection's own pages: its host is not authorized yet.
    Own,
    /// Own pages first, then the pool.
    OwnFirst,
    /// The pool, then the own pages for in-capsule data.
    Pool,
}

/// Result of checking unsent responses that hold pool memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StalledSend {
    /// No such response.
    None,
    /// There are such responses.
    Waiting,
    /// One of them has reached the limit of checks.
    TimedOut,
}

/// Direction of a command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataDirection {
    None,
    FromHost,
    ToHost,
}

/// Result of admitting a received command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AdmitResult {
    /// The command can start.
    Ready,
    /// The command starts later.
    Deferred,
    /// No buffer for in-capsule data: reading must stop.
    NoBuffer,
}

/// Number of slots added at a time.
const GROWTH: usize = 4;
/// Bytes whose digest is computed at a time.
const DIGEST_BYTES: u32 = 4096;

impl CommandTable {
    pub(super) fn new(cache: BufferCache) -> Self {
        Self {
            slots: Vec::new(),
            media: Vec::new(),
            cache,
            waiting: VecDeque::new(),
            is_stream_blocked: false,
            receiving: 0,
            access: BufferAccess::Own,
            fused_first: None,
            slow_io: None,
            held: None,
            fault: None,
        }
    }

    /// Admits a received command. Nothing is recorded if the result is
    /// [`NoBuffer`](AdmitResult::NoBuffer).
    #[inline]
    pub(super) fn admit(
        &mut self,
        end: &mut ControllerConnection,
        (tag, now): (u16, Instant),
        command: &Command,
        data: DataTransfer,
    ) -> AdmitResult {
        let (direction, len_bytes) = match data {
            DataTransfer::None => (DataDirection::None, 0),
            DataTransfer::InCapsule(len) | DataTransfer::FromHost(len) => {
                (DataDirection::FromHost, len)
            }
            DataTransfer::ToHost(len) => (DataDirection::ToHost, len),
        };
        let is_in_capsule = matches!(data, DataTransfer::InCapsule(_));
        if (command.fuse() != Fuse::Normal || self.fused_first.is_some())
            && let Some(result) = self.admit_fused(end, (tag, now), command, &data)
        {
            if self.held.is_some() && result != AdmitResult::NoBuffer {
                self.charge_fused(now, command, len_bytes);
            }
            return result;
        }
        let slot = self.slot_mut(tag);
        debug_assert!(slot.buffer.is_none(), "a free slot has no buffer");
        (slot.command, slot.received_at) = (*command, now);
        (slot.len_bytes, slot.direction, slot.state) = (len_bytes, direction, CommandState::Ready);
        (slot.stalled_checks, slot.is_in_capsule) = (0, false);
        slot.data = Segment::default();
        if self.held.is_some()
            && let Some(result) = self.hold_received(now, tag, is_in_capsule && len_bytes > 0)
        {
            return result;
        }
        if len_bytes == 0 {
            return AdmitResult::Ready;
        }
        if self.access == BufferAccess::Own && len_bytes > OWN_BYTES {
            let completion = Completion::new(0, Status::DATA_SGL_LENGTH_INVALID.with_dnr());
            self.complete_with(end, tag, 0, completion);
            return AdmitResult::Deferred;
        }
        // In-capsule data may bypass the wait queue: they block the stream, so waiting behind commands
        // that need the stream would deadlock.
        let is_small = self.access != BufferAccess::Pool;
        let own = if is_small { self.cache.allocate_own_pages(len_bytes) } else { None };
        let may_allocate =
            self.access != BufferAccess::Own && (self.waiting.is_empty() || is_in_capsule);
        let buffer =
            own.or_else(|| if may_allocate { self.cache.allocate(len_bytes) } else { None });
        let buffer = match buffer {
            None if is_in_capsule => self.cache.allocate_own_pages(len_bytes),
            buffer => buffer,
        };
        let slot = &mut self.slots[usize::from(tag)];
        match (buffer, is_in_capsule) {
            (Some(buffer), _) => {
                slot.set_buffer(buffer, self.cache.pool());
                if is_in_capsule {
                    self.is_stream_blocked = false;
                }
                self.leave_wait_queue();
                self.start_transfer(end, (tag, now), is_in_capsule)
            }
            (None, true) => {
                slot.state = CommandState::Free;
                self.is_stream_blocked = true;
                AdmitResult::NoBuffer
            }
            (None, false) => {
                slot.state = CommandState::AwaitingBuffer;
                self.waiting.push_back(tag);
                AdmitResult::Deferred
            }
        }
    }

    /// Returns the slot of a command, growing the table if needed.
    #[inline]
    fn slot_mut(&mut self, tag: u16) -> &mut CommandSlot {
        let index = usize::from(tag);
        if index >= self.slots.len() {
            self.grow_to(index);
        }
        &mut self.slots[index]
    }

    /// Adds slots up to `index`. The least recently freed tag is used last, so an idle connection has few
    /// slots.
    #[cold]
    fn grow_to(&mut self, index: usize) {
        let count = (index + 1).next_multiple_of(GROWTH);
        self.slots.reserve_exact(count - self.slots.len());
        self.slots.resize_with(count, || CommandSlot::FREE);
    }

    /// Allocates a buffer for the first command in the queue.
    fn allocate_buffer(&mut self, len_bytes: u32) -> Option<Buffer> {
        match self.access {
            BufferAccess::Pool => self.cache.allocate(len_bytes),
            BufferAccess::OwnFirst => {
                let own = self.cache.allocate_own_pages(len_bytes);
                own.or_else(|| self.cache.allocate(len_bytes))
            }
            BufferAccess::Own => self.cache.allocate_own_pages(len_bytes),
        }
    }

    /// Sets the buffers that the connection may use, once its host is known.
    pub(super) fn set_buffer_access(&mut self, access: BufferAccess, host: HostMemory<'_>) {
        self.access = access;
        self.cache.set_host(host);
    }

    /// Whether a command waits for the connection's own pages and they are free again.
    pub(super) fn can_retry_allocation(&self) -> bool {
        self.access == BufferAccess::Own
            && (self.is_stream_blocked || !self.waiting.is_empty())
            && self.cache.has_free_own_pages()
    }

    /// Continues a command that has received its buffer.
    #[inline]
    fn start_transfer(
        &mut self,
        end: &mut ControllerConnection,
        (tag, now): (u16, Instant),
        is_in_capsule: bool,
    ) -> AdmitResult {
        let slot = &mut self.slots[usize::from(tag)];
        if slot.direction == DataDirection::ToHost {
            slot.state = CommandState::Ready;
            return AdmitResult::Ready;
        }
        slot.state = CommandState::AwaitingData;
        slot.requested_at = now;
        self.receiving += 1;
        if !is_in_capsule {
            let result = end.request_data(tag, slot.len_bytes);
            self.record_fault(tag, result);
        }
        AdmitResult::Deferred
    }

    /// Next waiting command that can start.
    pub(super) fn next_ready(
        &mut self,
        end: &mut ControllerConnection,
        now: Instant,
    ) -> Option<u16> {
        if self.held.is_some()
            && let Some(tag) = self.next_released(end, now)
        {
            return Some(tag);
        }
        while let Some(&tag) = self.waiting.front() {
            let slot = &self.slots[usize::from(tag)];
            let len_bytes = match slot.state {
                CommandState::Ready => {
                    self.waiting.pop_front();
                    return Some(tag);
                }
                CommandState::AwaitingBuffer => slot.len_bytes,
                CommandState::Half(_) => OWN_BYTES,
                CommandState::Free
                | CommandState::Completed
                | CommandState::CompletedInPlace
                | CommandState::Draining
                | CommandState::AwaitingLimit
                | CommandState::AwaitingData => {
                    self.waiting.pop_front();
                    continue;
                }
            };
            let is_half = slot.state != CommandState::AwaitingBuffer;
            #[cfg(test)]
            let len_bytes =
                if self.is_treated_as_fused_by_bug(tag) { OWN_BYTES } else { len_bytes };
            let buffer = self.allocate_buffer(len_bytes)?;
            self.waiting.pop_front();
            self.leave_wait_queue();
            if is_half {
                self.assign_pair_buffer(end, (tag, now), buffer);
                continue;
            }
            self.slots[usize::from(tag)].set_buffer(buffer, self.cache.pool());
            if self.start_transfer(end, (tag, now), false) == AdmitResult::Ready {
                return Some(tag);
            }
        }
        None
    }

    /// Whether commands wait for a buffer or for a rate limit.
    #[inline]
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty() || self.held.as_ref().is_some_and(|held| held.has_held())
    }

    /// Whether data requested from the host are outstanding.
    #[inline]
    pub(super) fn awaits_host_data(&self) -> bool {
        self.receiving > 0
    }

    /// Time at which the oldest outstanding data were requested, and the number of commands whose data were
    /// requested then.
    pub(super) fn oldest_data_request(&self) -> Option<(Instant, usize)> {
        let is_receiving = |slot: &&CommandSlot| slot.state.awaits_host_data();
        let fused_first =
            self.fused_first.as_ref().map(|fused_first| &self.slots[usize::from(fused_first.tag)]);
        let receiving = self.slots.iter().filter(is_receiving).chain(fused_first);
        let requested_at = receiving.clone().map(|slot| slot.requested_at).min()?;
        let count = receiving.filter(|slot| slot.requested_at == requested_at).count();
        Some((requested_at, count))
    }

    /// Checks the queued responses. A response that was unsent at more than `checks_max` consecutive
    /// checks, each with other connections waiting for memory, is stalled for too long.
    #[cold]
    pub(super) fn check_stalled_sends(&mut self, checks_max: u8) -> StalledSend {
        let others_need_memory = self.cache.others_need_memory();
        let mut found = StalledSend::None;
        for slot in &mut self.slots {
            let is_from_pool =
                slot.buffer.as_ref().is_some_and(|buffer| !buffer.is_from_own_pages());
            if slot.state != CommandState::Completed || !is_from_pool {
                continue;
            }
            slot.stalled_checks = if others_need_memory { slot.stalled_checks + 1 } else { 0 };
            if slot.stalled_checks > checks_max {
                return StalledSend::TimedOut;
            }
            found = StalledSend::Waiting;
        }
        found
    }

    /// Stores received bytes of a command. Ignored if the command has been completed.
    #[inline]
    pub(super) fn store_received(
        &self,
        placement: DataPlacement,
        bytes: &[u8],
    ) -> Result<(), InvalidSegment> {
        match self.buffer_segment(placement) {
            Some(segment) => self.cache.pool().regions().store(segment, bytes),
            None => Ok(()),
        }
    }

    /// Segment of a command's buffer, while the command is outstanding or its response is being
    /// sent. `None` if the range exceeds the buffer, or there is none.
    #[inline]
    pub(super) fn buffer_segment(&self, placement: DataPlacement) -> Option<Segment> {
        let slot =
            self.slots.get(usize::from(placement.tag)).filter(|slot| slot.buffer.is_some())?;
        slot.data.slice(placement.offset, placement.len_bytes)
    }

    /// Segment of the data of a response, in a buffer or in the medium's memory, while it is being sent.
    #[inline]
    pub(super) fn send_segment(&self, placement: DataPlacement) -> Option<Segment> {
        let has_memory = |slot: &&CommandSlot| {
            slot.buffer.is_some() || slot.state == CommandState::CompletedInPlace
        };
        let slot = self.slots.get(usize::from(placement.tag)).filter(has_memory)?;
        slot.data.slice(placement.offset, placement.len_bytes)
    }

    /// Segment of the first `len_bytes` of a command's buffer.
    pub(super) fn data_segment(&self, tag: u16, len_bytes: u32) -> Option<Segment> {
        self.buffer_segment(DataPlacement { tag, offset: 0, len_bytes })
    }

    /// Handles the end of a command's data. Returns whether the command can now start, or fail if
    /// the digest is wrong.
    #[inline]
    pub(super) fn handle_data_complete(
        &mut self,
        end: &mut ControllerConnection,
        (tag, now): (u16, Instant),
        is_intact: bool,
    ) -> bool {
        let slot = &mut self.slots[usize::from(tag)];
        let is_complete = slot.state == CommandState::AwaitingData;
        if is_complete {
            slot.state = CommandState::Ready;
            self.receiving -= 1;
            if self.held.is_some() && is_intact && self.hold_complete(now, tag) {
                return false;
            }
        } else {
            self.handle_fused_data_complete(end, tag, is_intact);
        }
        is_complete
    }

    #[inline]
    pub(super) fn command_of_tag(&self, tag: u16) -> &Command {
        &self.slots[usize::from(tag)].command
    }

    /// A command that starts, with its tag and the segment of its data, which is empty if it has none.
    #[inline]
    pub(super) fn command_with_segment(&self, tag: u16) -> (u16, &Command, Segment) {
        let slot = &self.slots[usize::from(tag)];
        (tag, &slot.command, slot.data)
    }

    /// Completes a command that was executed; the data of a successful read are sent. Ignored if the
    /// command was dropped meanwhile.
    #[inline]
    pub(super) fn complete_executed(
        &mut self,
        end: &mut ControllerConnection,
        tag: u16,
        status: Status,
        result: u32,
    ) {
        let slot = &mut self.slots[usize::from(tag)];
        if slot.state != CommandState::Ready {
            return;
        }
        slot.state = CommandState::Completed;
        let is_sent = slot.direction == DataDirection::ToHost && status.is_success();
        let len_bytes = if is_sent { slot.len_bytes } else { 0 };
        if len_bytes == 0
            && let Some(buffer) = slot.buffer.take()
        {
            self.cache.release_buffer(buffer);
        }
        let result = end.complete(tag, len_bytes, Completion::new(0, status).with_dw0(result));
        self.record_fault(tag, result);
    }

    /// Completes a read whose data are in the memory of the medium, from where they are sent: the buffer
    /// is released now, and the memory of the medium is kept until the response has been sent. Ignored if
    /// the command was dropped meanwhile.
    pub(super) fn complete_in_place(
        &mut self,
        end: &mut ControllerConnection,
        tag: u16,
        medium: MediumMemory,
    ) {
        let slot = &mut self.slots[usize::from(tag)];
        if slot.state != CommandState::Ready {
            return;
        }
        let (MediumMemory { region, offset, guard }, len_bytes) = (medium, slot.len_bytes);
        slot.state = CommandState::CompletedInPlace;
        slot.data = Segment { region, offset, len_bytes };
        self.media.resize(self.media.len().max(self.slots.len()), None);
        self.media[usize::from(tag)] = Some(guard);
        let slot = &mut self.slots[usize::from(tag)];
        if let Some(buffer) = slot.buffer.take() {
            self.cache.release_buffer(buffer);
        }
        let result = end.complete(tag, len_bytes, Completion::new(0, Status::SUCCESS));
        self.record_fault(tag, result);
    }

    /// Direction and length of a command's data.
    #[inline]
    pub(super) fn data_direction_and_len(&self, tag: u16) -> (DataDirection, u32) {
        let slot = &self.slots[usize::from(tag)];
        (slot.direction, slot.len_bytes)
    }

    /// Whether a command may be executing and has not been completed.
    #[inline]
    pub(super) fn is_executing(&self, tag: u16) -> bool {
        self.slots.get(usize::from(tag)).is_some_and(|slot| slot.state == CommandState::Ready)
    }

    /// Finds an outstanding command by the host's command identifier. Returns its tag and whether
    /// it may have started.
    pub(super) fn find_by_cid(&self, cid: u16) -> Option<(u16, bool)> {
        let matches = |slot: &CommandSlot| {
            !matches!(
                slot.state,
                CommandState::Free
                    | CommandState::Completed
                    | CommandState::CompletedInPlace
                    | CommandState::Draining
            ) && slot.command.cid() == cid
        };
        let (tag, slot) = (0..).zip(&self.slots).find(|(_, slot)| matches(slot))?;
        Some((tag, slot.state == CommandState::Ready))
    }

    /// Completes a command; the first `len_bytes` of its buffer are sent to the host.
    #[inline]
    pub(super) fn complete_with(
        &mut self,
        end: &mut ControllerConnection,
        tag: u16,
        len_bytes: u32,
        completion: Completion,
    ) {
        let state = self.slots[usize::from(tag)].state;
        if matches!(state, CommandState::AwaitingBuffer | CommandState::Half(_)) {
            self.remove_waiting(end, tag);
        }
        if state == CommandState::AwaitingLimit {
            self.remove_held(tag);
        }
        let slot = &mut self.slots[usize::from(tag)];
        // Data still being received may be stored in the buffer until the response is sent.
        let is_receiving = slot.state == CommandState::AwaitingData;
        slot.state = if is_receiving { CommandState::Draining } else { CommandState::Completed };
        if len_bytes == 0
            && !is_receiving
            && let Some(buffer) = slot.buffer.take()
        {
            self.cache.release_buffer(buffer);
        }
        let result = end.complete(tag, len_bytes, completion);
        self.record_fault(tag, result);
    }

    /// Records the first invalid call.
    #[inline]
    fn record_fault(&mut self, tag: u16, done: Result<(), OwnerCallError>) {
        if let Err(why) = done {
            let command = self.slots[usize::from(tag)].command;
            self.fault.get_or_insert(ProtocolCallFault { tag, command, why });
        }
    }

    /// Invalid call of the protocol engine, if any. The connection cannot continue.
    #[inline]
    pub(super) fn recorded_fault(&self) -> Option<ProtocolCallFault> {
        self.fault
    }

    /// Drops a started command without a response, after a controller reset.
    pub(super) fn drop_command(&mut self, end: &mut ControllerConnection, tag: u16) {
        self.release_command(tag);
        let result = end.drop_command(tag);
        self.record_fault(tag, result);
    }

    /// Completes a command that was rejected on arrival.
    pub(super) fn reject(
        &mut self,
        end: &mut ControllerConnection,
        tag: u16,
        command: Command,
        status: Status,
    ) {
        self.fail_unpaired_first(end);
        *self.slot_mut(tag) =
            CommandSlot { command, state: CommandState::Completed, ..CommandSlot::FREE };
        let result = end.complete(tag, 0, Completion::new(0, status));
        self.record_fault(tag, result);
    }

    /// Frees the slot and the buffer of a command whose response has been sent.
    #[inline(always)]
    pub(super) fn release_command(&mut self, tag: u16) {
        let Some(slot) = self.slots.get_mut(usize::from(tag)) else { return };
        if slot.state != CommandState::Completed {
            self.receiving -= u32::from(slot.state.awaits_host_data());
            release_medium(&mut self.media, tag);
        }
        slot.state = CommandState::Free;
        if let Some(buffer) = slot.buffer.take() {
            self.cache.release_buffer(buffer);
        }
    }

    /// Removes a command that waits for a buffer or for the other half of its pair.
    #[cold]
    fn remove_waiting(&mut self, end: &mut ControllerConnection, tag: u16) {
        self.waiting.retain(|waiting| *waiting != tag);
        self.leave_wait_queue();
        self.fail_fused_partner(end, tag);
    }

    /// Leaves the pool's wait queue once no command of this connection waits.
    #[inline]
    fn leave_wait_queue(&mut self) {
        if self.cache.is_waiting() && self.waiting.is_empty() && !self.is_stream_blocked {
            self.cache.stop_waiting();
        }
    }

    /// Cancels all waiting commands and returns idle buffers: nothing new starts.
    pub(super) fn cancel_waiting(&mut self) {
        for tag in core::mem::take(&mut self.waiting) {
            self.slots[usize::from(tag)].state = CommandState::Free;
        }
        self.is_stream_blocked = false;
        self.cancel_held();
        self.cancel_fused_first();
        self.cache.stop_waiting();
        self.cache.release_idle_buffers();
    }

    /// Releases buffers after the stream was closed. No more data are received into buffers, so
    /// only the buffers of executing commands are kept, and with `responses_are_referenced` those of queued
    /// responses, which the kernel may still read.
    pub(super) fn release_buffers(&mut self, responses_are_referenced: bool) {
        self.cancel_waiting();
        for tag in (0_u16..).take(self.slots.len()) {
            let state = self.slots[usize::from(tag)].state;
            let is_read = responses_are_referenced && state.has_response();
            if !self.is_executing(tag) && !is_read {
                self.release_command(tag);
            }
        }
    }

    /// Leaks the memory of queued responses, because the kernel may read it indefinitely: their buffers,
    /// and the media of those that are sent in place. Returns the length of their data and buffers in
    /// bytes.
    pub(super) fn leak_response_memory(&mut self) -> u64 {
        let is_read = |slot: &&mut CommandSlot| slot.state.has_response();
        let mut len_bytes: u64 =
            self.slots.iter_mut().filter(is_read).map(CommandSlot::leak_buffer).sum();
        for (slot, medium) in self.slots.iter().zip(&mut self.media) {
            if let Some(guard) = medium.take() {
                core::mem::forget(guard);
                len_bytes += u64::from(slot.data.len_bytes);
            }
        }
        len_bytes
    }

    /// Leaks the buffers of executing commands, because the device may access them indefinitely,
    /// and releases all others.
    pub(super) fn leak_executing(&mut self) {
        self.release_buffers(false);
        self.slots.iter_mut().for_each(|slot| _ = slot.leak_buffer());
    }

    /// Releases everything: the connection has ended and no command is executing.
    pub(super) fn release_all(&mut self) {
        for tag in (0_u16..).take(self.slots.len()) {
            self.release_command(tag);
        }
        self.release_buffers(false);
    }

    /// Returns idle buffers if another connection waits for memory.
    #[inline]
    pub(super) fn release_idle_if_others_wait(&mut self) {
        if self.cache.should_release_idle() {
            self.cache.release_idle_buffers();
        }
    }

    /// Calls `put` with every block that the connection holds, in use or idle.
    pub(super) fn for_each_block(&self, put: &mut dyn FnMut(Range<u32>)) {
        let used = self.slots.iter().filter_map(|slot| slot.buffer.as_ref());
        let second_buffer = self.fused_first.as_ref().and_then(FusedFirst::second_buffer);
        used.chain(second_buffer)
            .chain(self.cache.idle_buffers())
            .for_each(|buffer| put(buffer.pages()));
    }

    /// Whether other hosts wait for memory that this connection's commands hold.
    pub(super) fn others_need_memory(&self) -> bool {
        self.cache.others_need_memory()
    }

    pub(super) fn buffer_cache(&mut self) -> &mut BufferCache {
        &mut self.cache
    }

    pub(super) fn buffer_pool(&self) -> &BufferPool {
        self.cache.pool()
    }
}

/// Releases the memory of the medium that a command has, if any.
#[cold]
#[inline(never)]
fn release_medium(media: &mut [Option<MediumGuard>], tag: u16) {
    if let Some(medium) = media.get_mut(usize::from(tag)) {
        *medium = None;
    }
}

impl PayloadDigest for CommandTable {
    fn data_digest(&self, tag: u16, offset: u32, len_bytes: u32) -> u32 {
        let mut digest = Crc32c::new();
        let mut bytes = [0; DIGEST_BYTES as usize];
        let end = offset + len_bytes;
        let mut at = offset;
        while at < end {
            let count = (end - at).min(DIGEST_BYTES);
            let into = &mut bytes[..count as usize];
            if let Some(segment) =
                self.send_segment(DataPlacement { tag, offset: at, len_bytes: count })
            {
                // The buffer lies in a region that lives as long as its pool.
                let _ = self.cache.pool().regions().load(segment, into);
            }
            digest.update(into);
            at += count;
        }
        digest.value()
    }
}
