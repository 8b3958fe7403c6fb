//! Commands of a connection and their data buffers.
//!
//! ```text
//!   Command ─┬─ no data ──────────────────────────────────────────────▶ ready
//!            ├─ data to the host ─── a buffer, or a place in the queue ─▶ ready
//!            ├─ data from the host ─ a buffer, or a place in the queue ─ R2T ─ data complete ─▶ ready
//!            └─ in-capsule data ──── a buffer, or the socket waits ───────── data complete ─▶ ready
//! ```
//!
//! The halves of a fused pair start together: see [`fused`].

mod fused;

use std::collections::VecDeque;
use std::ops::Range;

use tenmil_base::{Instant, InvalidSegment, Memory, RegionId, Segment};
use tenmil_nvme_tcp::{
    ControllerConnection, DataPlacement, DataTransfer, InvalidCall, PayloadDigest,
};
use tenmil_wire::tcp::Crc32c;
use tenmil_wire::{Command, Completion, Fuse, Status};

use super::memory::{Buffer, BufferCache, BufferPool, OWN_BYTES, Standing};
use fused::{FusedFirst, Half};

/// Command slots of a connection and the buffers they hold.
#[derive(Debug)]
pub(super) struct CommandTable {
    /// Slots by tag; grown to the largest number used at the same time.
    slots: Vec<CommandSlot>,
    quota: BufferCache,
    /// Tags of commands that wait for a buffer, oldest first.
    waiting: VecDeque<u16>,
    /// Whether in-capsule data found no buffer, so that the stream is not read.
    is_stuck: bool,
    /// Number of commands whose data are being received, including second halves that must follow.
    coming: u32,
    share: BufferAccess,
    first: Option<FusedFirst>,
    /// Request to the connection's protocol engine that it could not execute: a bug of the target.
    fault: Option<Fault>,
}

/// Impossible request to the protocol engine, and its command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) tag: u16,
    pub(super) command: Command,
    pub(super) why: InvalidCall,
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

/// Command in its slot.
#[derive(Debug)]
struct CommandSlot {
    command: Command,
    /// Its memory, set by [`place`](Self::place).
    buffer: Option<Buffer>,
    /// The first `len_bytes` of the buffer; empty if there is none, or it is shorter.
    data: Segment,
    len_bytes: u32,
    way: DataDirection,
    step: CommandState,
    /// When its data were requested from the host.
    asked_at: Instant,
    /// Number of consecutive checks at which its response was unsent while other connections waited
    /// for memory.
    found_untaken: u8,
    /// Whether its data arrive in the capsule. Set only for halves of fused pairs.
    is_unasked: bool,
}

/// Result of checking unsent responses that hold pool memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StalledSend {
    /// No such response.
    Nothing,
    /// There are such responses.
    Some,
    /// One of them has reached the limit of checks.
    TooLong,
}

/// Direction of a command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataDirection {
    None,
    FromHost,
    ToHost,
}

/// State of a command: what it waits for. Only this state decides how the command proceeds; the
/// host's fields are evaluated once, when the command is received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CommandState {
    Free,
    /// Ready to execute, or executing.
    Ready,
    /// Completed; the response is queued.
    Answered,
    /// Completed while its data are still being received; the response follows the data.
    Draining,
    /// Waits for a buffer.
    AwaitingBuffer,
    /// Its data are being received.
    AwaitingData,
    /// Half of a fused pair that has not started.
    Half(Half),
}

/// Result of admitting a received command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AdmitResult {
    /// The command can start.
    Ready,
    /// The command starts later.
    Later,
    /// No buffer for in-capsule data: reading must stop.
    NoBuffer,
}

/// Number of slots added at a time.
const GROWTH: usize = 4;
/// Bytes whose digest is computed at a time.
const DIGEST_BYTES: u32 = 4096;

impl CommandTable {
    pub(super) fn new(quota: BufferCache) -> Self {
        Self {
            slots: Vec::new(),
            quota,
            waiting: VecDeque::new(),
            is_stuck: false,
            coming: 0,
            share: BufferAccess::Own,
            first: None,
            fault: None,
        }
    }

    /// Admits a received command. Nothing is recorded if the result is
    /// [`NoBuffer`](AdmitResult::NoBuffer).
    #[inline]
    pub(super) fn open(
        &mut self,
        end: &mut ControllerConnection,
        (tag, now): (u16, Instant),
        command: &Command,
        data: DataTransfer,
    ) -> AdmitResult {
        let (way, len_bytes) = match data {
            DataTransfer::None => (DataDirection::None, 0),
            DataTransfer::InCapsule(len) | DataTransfer::FromHost(len) => {
                (DataDirection::FromHost, len)
            }
            DataTransfer::ToHost(len) => (DataDirection::ToHost, len),
        };
        let is_unasked = matches!(data, DataTransfer::InCapsule(_));
        if (command.fuse() != Fuse::Normal || self.first.is_some())
            && let Some(opened) = self.open_half(end, (tag, now), command, &data)
        {
            return opened;
        }
        let slot = self.place(tag);
        debug_assert!(slot.buffer.is_none(), "a free slot has no buffer");
        (slot.command, slot.asked_at) = (*command, now);
        (slot.len_bytes, slot.way, slot.step) = (len_bytes, way, CommandState::Ready);
        (slot.found_untaken, slot.is_unasked) = (0, false);
        slot.data = Segment::default();
        if len_bytes == 0 {
            return AdmitResult::Ready;
        }
        if self.share == BufferAccess::Own && len_bytes > OWN_BYTES {
            let completion = Completion::new(0, Status::DATA_SGL_LENGTH_INVALID.with_dnr());
            self.finish(end, tag, 0, completion);
            return AdmitResult::Later;
        }
        // In-capsule data may bypass the queue: they block the stream, so waiting behind commands
        // that need the stream would deadlock.
        let is_small = self.share != BufferAccess::Pool;
        let own = if is_small { self.quota.take_own(len_bytes) } else { None };
        let may_take = self.share != BufferAccess::Own && (self.waiting.is_empty() || is_unasked);
        let buffer = own.or_else(|| if may_take { self.quota.take(len_bytes) } else { None });
        let buffer = match buffer {
            None if is_unasked => self.quota.take_own(len_bytes),
            buffer => buffer,
        };
        let slot = &mut self.slots[usize::from(tag)];
        match (buffer, is_unasked) {
            (Some(buffer), _) => {
                slot.place(buffer, self.quota.budget());
                if is_unasked {
                    self.is_stuck = false;
                }
                self.leave_line();
                self.placed(end, (tag, now), is_unasked)
            }
            (None, true) => {
                slot.step = CommandState::Free;
                self.is_stuck = true;
                AdmitResult::NoBuffer
            }
            (None, false) => {
                slot.step = CommandState::AwaitingBuffer;
                self.waiting.push_back(tag);
                AdmitResult::Later
            }
        }
    }

    /// Returns the slot of a command, growing the table if needed.
    #[inline]
    fn place(&mut self, tag: u16) -> &mut CommandSlot {
        let index = usize::from(tag);
        if index >= self.slots.len() {
            self.grow(index);
        }
        &mut self.slots[index]
    }

    /// The least recently freed tag is used last, so an idle connection has few slots.
    #[cold]
    fn grow(&mut self, index: usize) {
        let count = (index + 1).next_multiple_of(GROWTH);
        self.slots.reserve_exact(count - self.slots.len());
        self.slots.resize_with(count, || CommandSlot::FREE);
    }

    /// Allocates a buffer for the first command in the queue.
    fn take(&mut self, len_bytes: u32) -> Option<Buffer> {
        match self.share {
            BufferAccess::Pool => self.quota.take(len_bytes),
            BufferAccess::OwnFirst => {
                let own = self.quota.take_own(len_bytes);
                own.or_else(|| self.quota.take(len_bytes))
            }
            BufferAccess::Own => self.quota.take_own(len_bytes),
        }
    }

    /// Sets the buffers that the connection may use, once its host is known.
    pub(super) fn admit(&mut self, share: BufferAccess, (host, standing): (&str, Standing)) {
        self.share = share;
        self.quota.bind(host, standing);
    }

    /// Whether a command waits for the connection's own pages and they are free again.
    pub(super) fn can_go_on(&self) -> bool {
        self.share == BufferAccess::Own
            && (self.is_stuck || !self.waiting.is_empty())
            && self.quota.has_own()
    }

    /// Continues a command that has received its buffer.
    #[inline]
    fn placed(
        &mut self,
        end: &mut ControllerConnection,
        (tag, now): (u16, Instant),
        is_unasked: bool,
    ) -> AdmitResult {
        let slot = &mut self.slots[usize::from(tag)];
        if slot.way == DataDirection::ToHost {
            slot.step = CommandState::Ready;
            return AdmitResult::Ready;
        }
        slot.step = CommandState::AwaitingData;
        slot.asked_at = now;
        self.coming += 1;
        if !is_unasked {
            let granted = end.request_data(tag, slot.len_bytes);
            self.note(tag, granted);
        }
        AdmitResult::Later
    }

    /// Next waiting command that can start.
    pub(super) fn next_ready(
        &mut self,
        end: &mut ControllerConnection,
        now: Instant,
    ) -> Option<u16> {
        while let Some(&tag) = self.waiting.front() {
            let slot = &self.slots[usize::from(tag)];
            let len_bytes = match slot.step {
                CommandState::Ready => {
                    self.waiting.pop_front();
                    return Some(tag);
                }
                CommandState::AwaitingBuffer => slot.len_bytes,
                CommandState::Half(_) => OWN_BYTES,
                CommandState::Free
                | CommandState::Answered
                | CommandState::Draining
                | CommandState::AwaitingData => {
                    self.waiting.pop_front();
                    continue;
                }
            };
            let is_half = slot.step != CommandState::AwaitingBuffer;
            #[cfg(test)]
            let len_bytes = if self.is_taken_for_half(tag) { OWN_BYTES } else { len_bytes };
            let buffer = self.take(len_bytes)?;
            self.waiting.pop_front();
            self.leave_line();
            if is_half {
                self.first_placed(end, (tag, now), buffer);
                continue;
            }
            self.slots[usize::from(tag)].place(buffer, self.quota.budget());
            if self.placed(end, (tag, now), false) == AdmitResult::Ready {
                return Some(tag);
            }
        }
        None
    }

    /// Whether commands wait for a buffer.
    #[inline]
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether the host owes data.
    #[inline]
    pub(super) fn is_owed(&self) -> bool {
        self.coming > 0
    }

    /// Time since which the host has owed the oldest data, and the number of commands requested at
    /// that time.
    pub(super) fn owed_since(&self) -> Option<(Instant, usize)> {
        let is_coming = |slot: &&CommandSlot| slot.step.is_owed();
        let first = self.first.as_ref().map(|first| &self.slots[usize::from(first.tag)]);
        let coming = self.slots.iter().filter(is_coming).chain(first);
        let asked_at = coming.clone().map(|slot| slot.asked_at).min()?;
        let count = coming.filter(|slot| slot.asked_at == asked_at).count();
        Some((asked_at, count))
    }

    /// Checks the queued responses. A response that was unsent at more than `looks_max` consecutive
    /// checks, each with other connections waiting for memory, is stalled for too long.
    #[cold]
    pub(super) fn check_stalled_sends(&mut self, looks_max: u8) -> StalledSend {
        let is_wanted = self.quota.is_missed();
        let mut found = StalledSend::Nothing;
        for slot in &mut self.slots {
            let is_everybodys = slot.buffer.as_ref().is_some_and(|buffer| !buffer.is_own());
            if slot.step != CommandState::Answered || !is_everybodys {
                continue;
            }
            slot.found_untaken = if is_wanted { slot.found_untaken + 1 } else { 0 };
            if slot.found_untaken > looks_max {
                return StalledSend::TooLong;
            }
            found = StalledSend::Some;
        }
        found
    }

    /// Stores received bytes of a command. Ignored if the command has been completed.
    #[inline]
    pub(super) fn store(&self, place: DataPlacement, bytes: &[u8]) -> Result<(), InvalidSegment> {
        match self.segment(place) {
            Some(segment) => self.quota.budget().regions().store(segment, bytes),
            None => Ok(()),
        }
    }

    /// Segment of a command's buffer, while the command is outstanding or its response is being
    /// sent. `None` if the range exceeds the buffer, or there is none.
    #[inline]
    pub(super) fn segment(&self, place: DataPlacement) -> Option<Segment> {
        let slot = self.slots.get(usize::from(place.tag)).filter(|slot| slot.buffer.is_some())?;
        slot.data.slice(place.offset, place.len_bytes)
    }

    /// Segment of the first `len_bytes` of a command's buffer.
    pub(super) fn front_of(&self, tag: u16, len_bytes: u32) -> Option<Segment> {
        self.segment(DataPlacement { tag, offset: 0, len_bytes })
    }

    /// Handles the end of a command's data. Returns whether the command can now start, or fail if
    /// the digest is wrong.
    #[inline]
    pub(super) fn arrived(
        &mut self,
        end: &mut ControllerConnection,
        tag: u16,
        is_intact: bool,
    ) -> bool {
        let slot = &mut self.slots[usize::from(tag)];
        let is_due = slot.step == CommandState::AwaitingData;
        if is_due {
            slot.step = CommandState::Ready;
            self.coming -= 1;
        } else {
            self.half_arrived(end, tag, is_intact);
        }
        is_due
    }

    #[inline]
    pub(super) fn command(&self, tag: u16) -> &Command {
        &self.slots[usize::from(tag)].command
    }

    /// A command that starts, with its tag and the segment of its data, which is empty if it has none.
    #[inline]
    pub(super) fn started(&self, tag: u16) -> (u16, &Command, Segment) {
        let slot = &self.slots[usize::from(tag)];
        (tag, &slot.command, slot.data)
    }

    /// Completes a command that was executed; the data of a successful read are sent. Ignored if the
    /// command was dropped meanwhile.
    #[inline]
    pub(super) fn complete(
        &mut self,
        end: &mut ControllerConnection,
        tag: u16,
        status: Status,
        result: u32,
    ) {
        let slot = &mut self.slots[usize::from(tag)];
        if slot.step != CommandState::Ready {
            return;
        }
        slot.step = CommandState::Answered;
        let is_sent = slot.way == DataDirection::ToHost && status.is_success();
        let len_bytes = if is_sent { slot.len_bytes } else { 0 };
        if len_bytes == 0
            && let Some(buffer) = slot.buffer.take()
        {
            self.quota.release(buffer);
        }
        let finished = end.complete(tag, len_bytes, Completion::new(0, status).with_dw0(result));
        self.note(tag, finished);
    }

    /// Direction and length of a command's data.
    #[inline]
    pub(super) fn data(&self, tag: u16) -> (DataDirection, u32) {
        let slot = &self.slots[usize::from(tag)];
        (slot.way, slot.len_bytes)
    }

    /// Whether a command may be executing and has not been completed.
    #[inline]
    pub(super) fn is_ready(&self, tag: u16) -> bool {
        self.slots.get(usize::from(tag)).is_some_and(|slot| slot.step == CommandState::Ready)
    }

    /// Finds an outstanding command by the host's command identifier. Returns its tag and whether
    /// it may have started.
    pub(super) fn find(&self, cid: u16) -> Option<(u16, bool)> {
        let is_it = |slot: &CommandSlot| {
            !matches!(
                slot.step,
                CommandState::Free | CommandState::Answered | CommandState::Draining
            ) && slot.command.cid() == cid
        };
        let (tag, slot) = (0..).zip(&self.slots).find(|(_, slot)| is_it(slot))?;
        Some((tag, slot.step == CommandState::Ready))
    }

    /// Completes a command; the first `len_bytes` of its buffer are sent to the host.
    #[inline]
    pub(super) fn finish(
        &mut self,
        end: &mut ControllerConnection,
        tag: u16,
        len_bytes: u32,
        completion: Completion,
    ) {
        let step = self.slots[usize::from(tag)].step;
        if matches!(step, CommandState::AwaitingBuffer | CommandState::Half(_)) {
            self.leave_others(end, tag);
        }
        let slot = &mut self.slots[usize::from(tag)];
        // Data still being received may be on their way into the buffer until the response is sent.
        let is_coming = slot.step == CommandState::AwaitingData;
        slot.step = if is_coming { CommandState::Draining } else { CommandState::Answered };
        if len_bytes == 0
            && !is_coming
            && let Some(buffer) = slot.buffer.take()
        {
            self.quota.release(buffer);
        }
        let finished = end.complete(tag, len_bytes, completion);
        self.note(tag, finished);
    }

    /// Records the first impossible request.
    #[inline]
    fn note(&mut self, tag: u16, done: Result<(), InvalidCall>) {
        if let Err(why) = done {
            let command = self.slots[usize::from(tag)].command;
            self.fault.get_or_insert(Fault { tag, command, why });
        }
    }

    /// Impossible request to the protocol engine, if any. The connection cannot continue.
    #[inline]
    pub(super) fn fault(&self) -> Option<Fault> {
        self.fault
    }

    /// Drops a started command without a response, after a controller reset.
    pub(super) fn forget(&mut self, end: &mut ControllerConnection, tag: u16) {
        self.release(tag);
        let forgotten = end.drop_command(tag);
        self.note(tag, forgotten);
    }

    /// Completes a command that was rejected on arrival.
    pub(super) fn refuse(
        &mut self,
        end: &mut ControllerConnection,
        tag: u16,
        command: Command,
        status: Status,
    ) {
        self.fail_unpaired(end);
        *self.place(tag) =
            CommandSlot { command, step: CommandState::Answered, ..CommandSlot::FREE };
        let finished = end.complete(tag, 0, Completion::new(0, status));
        self.note(tag, finished);
    }

    /// Frees the slot and the buffer of a command whose response has been sent.
    #[inline(always)]
    pub(super) fn release(&mut self, tag: u16) {
        let Some(slot) = self.slots.get_mut(usize::from(tag)) else { return };
        if slot.step != CommandState::Answered {
            self.coming -= u32::from(slot.step.is_owed());
        }
        slot.step = CommandState::Free;
        if let Some(buffer) = slot.buffer.take() {
            self.quota.release(buffer);
        }
    }

    /// Removes a command that waits for a buffer or for the other half of its pair.
    #[cold]
    fn leave_others(&mut self, end: &mut ControllerConnection, tag: u16) {
        self.waiting.retain(|waiting| *waiting != tag);
        self.leave_line();
        self.fail_partner(end, tag);
    }

    /// Leaves the pool's wait queue when nothing of this connection waits any more.
    #[inline]
    fn leave_line(&mut self) {
        if self.quota.is_waiting() && self.waiting.is_empty() && !self.is_stuck {
            self.quota.stop_waiting();
        }
    }

    /// Cancels all waiting commands and returns idle buffers: nothing new starts.
    pub(super) fn cancel_waiting(&mut self) {
        for tag in core::mem::take(&mut self.waiting) {
            self.slots[usize::from(tag)].step = CommandState::Free;
        }
        self.is_stuck = false;
        self.forsake_first();
        self.quota.stop_waiting();
        self.quota.release_idle();
    }

    /// Releases buffers after the stream was closed. No more data are received into buffers, so
    /// only the buffers of executing commands are kept, and with `answers_are_read` those of queued
    /// responses, which the kernel may still read.
    pub(super) fn give_back(&mut self, answers_are_read: bool) {
        self.cancel_waiting();
        for tag in (0_u16..).take(self.slots.len()) {
            let step = self.slots[usize::from(tag)].step;
            let is_read =
                answers_are_read && matches!(step, CommandState::Answered | CommandState::Draining);
            if !self.is_ready(tag) && !is_read {
                self.release(tag);
            }
        }
    }

    /// Leaks the buffers of queued responses, because the kernel may read them indefinitely.
    /// Returns their total length in bytes.
    pub(super) fn keep_answers(&mut self) -> u64 {
        let is_read = |slot: &&mut CommandSlot| {
            matches!(slot.step, CommandState::Answered | CommandState::Draining)
        };
        self.slots.iter_mut().filter(is_read).map(CommandSlot::abandon).sum()
    }

    /// Leaks the buffers of executing commands, because the device may access them indefinitely,
    /// and releases all others.
    pub(super) fn abandon_begun(&mut self) {
        self.give_back(false);
        self.slots.iter_mut().for_each(|slot| _ = slot.abandon());
    }

    /// Releases everything: the connection has ended and no command is executing.
    pub(super) fn clear(&mut self) {
        for tag in (0_u16..).take(self.slots.len()) {
            self.release(tag);
        }
        self.give_back(false);
    }

    /// Returns idle buffers if another connection waits for memory.
    #[inline]
    pub(super) fn release_if_scarce(&mut self) {
        if self.quota.has_waiters() {
            self.quota.release_idle();
        }
    }

    /// Calls `put` with every block that the connection holds, in use or idle.
    pub(super) fn each_block(&self, put: &mut dyn FnMut(Range<u32>)) {
        let used = self.slots.iter().filter_map(|slot| slot.buffer.as_ref());
        let lower = self.first.as_ref().and_then(FusedFirst::lower);
        used.chain(lower).chain(self.quota.idle()).for_each(|buffer| put(buffer.pages()));
    }

    /// Whether other hosts wait for memory that this connection's commands hold.
    pub(super) fn is_missed(&self) -> bool {
        self.quota.is_missed()
    }

    pub(super) fn quota(&mut self) -> &mut BufferCache {
        &mut self.quota
    }

    pub(super) fn budget(&self) -> &BufferPool {
        self.quota.budget()
    }
}

impl CommandSlot {
    const FREE: Self = Self {
        command: Command([0; 8]),
        buffer: None,
        data: Segment { region: RegionId(0), offset: 0, len_bytes: 0 },
        len_bytes: 0,
        way: DataDirection::None,
        step: CommandState::Free,
        asked_at: Instant::NEVER,
        found_untaken: 0,
        is_unasked: false,
    };

    /// Gives the command its buffer.
    #[inline]
    fn place(&mut self, buffer: Buffer, budget: &BufferPool) {
        self.data = buffer.segment(budget, self.len_bytes).unwrap_or_default();
        self.buffer = Some(buffer);
    }

    /// Leaks the buffer. Returns its length in bytes.
    fn abandon(&mut self) -> u64 {
        let Some(buffer) = self.buffer.take() else { return 0 };
        let len_bytes = buffer.len_bytes();
        buffer.abandon();
        len_bytes
    }
}

impl CommandState {
    /// Whether the host owes data, requested by an R2T or in the capsule.
    #[inline]
    fn is_owed(self) -> bool {
        match self {
            Self::AwaitingData | Self::Draining => true,
            Self::Half(half) => half.awaits_data(),
            Self::Free | Self::Ready | Self::Answered | Self::AwaitingBuffer => false,
        }
    }
}

impl PayloadDigest for CommandTable {
    fn digest(&self, tag: u16, offset: u32, len_bytes: u32) -> u32 {
        let mut digest = Crc32c::new();
        let mut bytes = [0; DIGEST_BYTES as usize];
        let end = offset + len_bytes;
        let mut at = offset;
        while at < end {
            let count = (end - at).min(DIGEST_BYTES);
            let into = &mut bytes[..count as usize];
            if let Some(segment) = self.segment(DataPlacement { tag, offset: at, len_bytes: count })
            {
                // The buffer lies in a region that lives as long as its pool.
                let _ = self.quota.budget().regions().load(segment, into);
            }
            digest.update(into);
            at += count;
        }
        digest.value()
    }
}
