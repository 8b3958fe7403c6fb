//! Controller side of a connection: receives commands, sends completions.
//!
//! ```text
//!   Command ─┬─ no data, or data to the host ────────────────────────┐
//!            ├─ data in the capsule ──▶ Data… ──▶ Arrived ───────────┤
//!            └─ data from the host ──▶ grant ──▶ R2T ──▶ Data… ──▶ Arrived
//!                                                                    ▼
//!                              reply… finish ──▶ C2HData, response ──▶ Released
//! ```
//!
//! Data are requested from the host only when the owner has a buffer for them: an R2T covers what
//! was granted and no more, so a memory limit is never exceeded. Only in-capsule data are
//! unsolicited, and their amount is bounded.

mod classify;
mod receive;
mod send;
mod slot;

use std::collections::VecDeque;
use std::fmt;

use tenmil_base::Instant;
use tenmil_wire::tcp::{ADMIN_IN_CAPSULE_BYTES, ALIGNMENT_MAX, H2C_DATA_BYTES_MIN, Role};
use tenmil_wire::{Command, Completion, Status};

use crate::connection::Connection;
use crate::endpoint::{CloseReason, ConnectionCore, Timeouts};
use crate::events::EventQueue;
use crate::pdu_body::DataPlacement;
use crate::receive::Receive;
use crate::send_queue::SendQueue;
use crate::{NegotiatedParams, NoDigest, PayloadDigest};
use slot::{CommandSlot, TransferState};

/// Controller side of a connection.
#[derive(Debug)]
pub struct ControllerConnection {
    line: ConnectionCore,
    config: ControllerConfig,
    terms: NegotiatedParams,
    queue: QueueKind,
    /// Whether SUCCESS may replace a response.
    may_omit_response: bool,
    /// SQHD of the next response.
    head: u16,
    /// Command slots, grown to the largest number used at the same time.
    slots: Vec<CommandSlot>,
    free: Vec<u16>,
    /// Slots with something to send, each once.
    jobs: VecDeque<u16>,
    /// Stream offset at which the response of each slot ends, oldest first.
    ends: Vec<(u64, u16)>,
    /// Number of these that were sent.
    ended: usize,
    /// Number of slots that cannot be released before the host sends data.
    starved: u16,
}

/// Configuration of the controller side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerConfig {
    /// Largest number of outstanding commands, at least 1. A host that respects its queue size
    /// never finds the table full.
    pub depth: u16,
    /// Largest in-capsule data of an I/O command in bytes: IOCCSZ × 16 − 64.
    pub in_capsule_bytes: u32,
    /// Largest transfer of a command in bytes (MDTS).
    pub transfer_bytes_max: u32,
    /// Alignment of data to the controller (CPDA): 0 to 31. A host that requests none (HPDA 0) is
    /// given none, since some hosts support no other value.
    pub cpda: u8,
    /// Whether header digests are offered.
    pub header_digest: bool,
    /// Whether data digests are offered.
    pub data_digest: bool,
    /// Largest data of an H2CData PDU (MAXH2CDATA): a multiple of 4, at least 4096.
    pub h2c_bytes_max: u32,
    /// Largest range of one R2T in bytes.
    pub r2t_bytes_max: u32,
    /// Largest number of outstanding R2Ts per command: 1 to 4, further limited by the host's
    /// MAXR2T.
    pub r2ts_max: u8,
    /// Largest data of a C2HData PDU. The specification sets no limit (TCP 1.0 §3.6.2.9), and some
    /// hosts accept only one PDU per command, so data are not split by default.
    pub c2h_bytes_max: u32,
    /// When a read completes without a response capsule.
    pub success: SuccessPolicy,
    /// Time limits for the host.
    pub time_limit: Timeouts,
}

/// When the SUCCESS flag replaces a response capsule (§3.3.2.1). It carries no SQHD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SuccessPolicy {
    /// Never.
    Never,
    /// If the host has disabled SQ flow control, and so does not need SQHD.
    WithoutFlowControl,
    /// Always.
    Always,
}

/// Kind of a queue, known after Connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueKind {
    /// Unknown: only Connect is expected.
    None,
    /// Admin queue.
    Admin {
        /// Entries of the submission queue: SQSIZE + 1.
        entries: u16,
        /// Whether SQ flow control is enabled, so that SQHD is valid.
        flow_control: bool,
    },
    /// I/O queue.
    Io {
        /// Entries of the submission queue: SQSIZE + 1.
        entries: u16,
        /// Whether SQ flow control is enabled, so that SQHD is valid.
        flow_control: bool,
    },
}

/// Data transfer of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataTransfer {
    /// No data.
    None,
    /// In-capsule data of this length.
    InCapsule(u32),
    /// Data from the host of this length, requested with R2Ts as buffers are granted.
    FromHost(u32),
    /// Data to the host of at most this length.
    ToHost(u32),
}

/// Event of the controller side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControllerEvent {
    /// The connection was negotiated.
    Open(NegotiatedParams),
    /// A command arrived. Its tag is valid until [`Released`](Self::Sent).
    Command {
        /// Tag; it differs from the command identifier.
        tag: u16,
        /// Command.
        command: Command,
        /// Data transfer, or the status that the command must be completed with because its SGL is
        /// invalid.
        data: Result<DataTransfer, Status>,
    },
    /// Data arrived, at position `at` of the bytes passed to `receive`.
    Data {
        /// Range of the command's data.
        place: DataPlacement,
        /// Position of the data.
        at: u32,
    },
    /// All data of a command have arrived.
    DataComplete {
        /// Tag.
        tag: u16,
        /// Whether all data digests were correct. If not, the command must be completed, and it
        /// completes with Transient Transport Error whatever its status.
        is_intact: bool,
    },
    /// Nothing of a command is left to send: its buffers belong to the owner and its tag is free.
    Sent {
        /// Tag.
        tag: u16,
    },
    /// The connection has ended. Outstanding commands are returned by [`Connection::outstanding`].
    Ended(CloseReason),
}

/// Invalid request of the owner: a bug of the owner, which no input from a host may cause. Nothing
/// has changed; the connection should be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotPossible {
    /// The command does not exist or was already completed.
    NotUnderWay,
    /// The command has no data in this direction.
    Direction,
    /// The length exceeds the remaining data or is not a multiple of a dword.
    Length,
    /// Data of the command are in transfer.
    InTransfer,
}

/// Entries with which a list begins.
const GROWTH: usize = 4;
/// Longest header with digest and padding, a data digest, and a response with its digest.
const ANSWER_BYTES: usize = 128 + 4 + 28;

impl Default for ControllerConfig {
    fn default() -> Self {
        Self {
            depth: 128,
            in_capsule_bytes: 4096,
            transfer_bytes_max: 128 << 10,
            cpda: 0,
            header_digest: true,
            data_digest: true,
            h2c_bytes_max: 128 << 10,
            r2t_bytes_max: u32::MAX,
            r2ts_max: 1,
            c2h_bytes_max: u32::MAX,
            success: SuccessPolicy::WithoutFlowControl,
            time_limit: Timeouts::default(),
        }
    }
}

impl ControllerConfig {
    /// Clamps every value to its bounds.
    const fn sane(mut self) -> Self {
        if self.depth == 0 {
            self.depth = 1;
        }
        if self.cpda > ALIGNMENT_MAX {
            self.cpda = ALIGNMENT_MAX;
        }
        self.h2c_bytes_max &= !3;
        if self.h2c_bytes_max < H2C_DATA_BYTES_MIN {
            self.h2c_bytes_max = H2C_DATA_BYTES_MIN;
        }
        self.r2t_bytes_max &= !3;
        if self.r2t_bytes_max == 0 {
            self.r2t_bytes_max = 4;
        }
        self.c2h_bytes_max &= !3;
        if self.c2h_bytes_max == 0 {
            self.c2h_bytes_max = 4;
        }
        if self.r2ts_max == 0 {
            self.r2ts_max = 1;
        }
        if self.r2ts_max > slot::ASKS {
            self.r2ts_max = slot::ASKS;
        }
        self
    }

    /// Largest number of queued responses; further ones wait in their slots.
    const fn answers(&self) -> usize {
        if self.depth < 64 { self.depth as usize } else { 64 }
    }

    const fn header_room(&self) -> usize {
        self.answers() * 80 + 2 * ANSWER_BYTES
    }

    /// A read without a response capsule has two pieces, a header and its data: these suffice for twice as
    /// many, so that the responses to 128 reads leave in one send.
    const fn pieces_max(&self) -> usize {
        4 * self.answers() + 6
    }

    /// Upper bound of the memory of a controller side including itself, without data buffers.
    #[must_use]
    pub const fn memory_bytes(&self) -> usize {
        let sane = self.sane();
        // A list of jobs has at most twice the capacity that it uses, the others no more.
        let slot = size_of::<CommandSlot>() + 3 * size_of::<u16>() + size_of::<(u64, u16)>();
        size_of::<ControllerConnection>()
            + sane.depth as usize * slot
            + SendQueue::memory_bytes(sane.header_room(), sane.pieces_max())
    }

    /// Largest amount of unsolicited data, for which the owner must have buffers.
    #[must_use]
    pub const fn unsolicited_bytes_max(&self) -> u64 {
        let most = if self.in_capsule_bytes > ADMIN_IN_CAPSULE_BYTES {
            self.in_capsule_bytes
        } else {
            ADMIN_IN_CAPSULE_BYTES
        };
        self.sane().depth as u64 * most as u64
    }
}

impl QueueKind {
    const fn entries(self) -> u16 {
        match self {
            Self::None => 0,
            Self::Admin { entries, .. } | Self::Io { entries, .. } => entries,
        }
    }

    const fn has_flow_control(self) -> bool {
        match self {
            Self::None => true,
            Self::Admin { flow_control, .. } | Self::Io { flow_control, .. } => flow_control,
        }
    }
}

impl ControllerConnection {
    /// Creates the controller side of an accepted stream.
    #[must_use]
    pub fn new(config: ControllerConfig, now: Instant) -> Self {
        let config = config.sane();
        let out = SendQueue::growing(config.header_room(), config.pieces_max());
        Self {
            line: ConnectionCore::new(Role::Controller, config.time_limit, out, now),
            config,
            terms: NegotiatedParams::default(),
            queue: QueueKind::None,
            may_omit_response: config.success == SuccessPolicy::Always,
            head: 0,
            slots: Vec::new(),
            free: (0..config.depth).rev().collect(),
            jobs: VecDeque::new(),
            ends: Vec::new(),
            ended: 0,
            starved: 0,
        }
    }

    /// Sets the kind of the queue. Must be called before Connect is completed, so that its response
    /// carries the right SQHD. A queue with more entries than [`ControllerConfig::depth`] must be
    /// rejected: its host may send more commands than there are slots.
    pub fn connected(&mut self, queue: QueueKind) {
        self.queue = queue;
        self.may_omit_response = match self.config.success {
            SuccessPolicy::Never => false,
            SuccessPolicy::WithoutFlowControl => !queue.has_flow_control(),
            SuccessPolicy::Always => true,
        };
        self.head = if queue.entries() > 1 { self.head % queue.entries() } else { 0 };
    }

    /// Whether no further command is accepted until one is released.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Whether every command waits for data from the host.
    fn is_starved(&self) -> bool {
        self.starved == self.config.depth
    }

    /// Grants a buffer for the next `len_bytes` of a command's data, which are then requested. A
    /// multiple of a dword.
    ///
    /// # Errors
    ///
    /// If the command has fewer remaining, or was completed.
    pub fn request_data(&mut self, tag: u16, len_bytes: u32) -> Result<(), NotPossible> {
        self.ready(tag, TransferState::FromHost, len_bytes)?;
        self.queue_job(tag);
        Ok(())
    }

    /// Queues the next `len_bytes` of read data, which more will follow. A multiple of a dword.
    ///
    /// # Errors
    ///
    /// If the host has no space for them, or the command was completed.
    pub fn send_data(&mut self, tag: u16, len_bytes: u32) -> Result<(), NotPossible> {
        self.ready(tag, TransferState::ToHost, len_bytes)?;
        self.queue_job(tag);
        Ok(())
    }

    /// Completes a command: queues its last `len_bytes` of data and its response. Command
    /// identifier and SQHD are filled in here. No data are accepted for the command afterwards;
    /// requested data still in transfer are discarded. Events of the command that are already in a
    /// batch must be ignored as well.
    ///
    /// # Errors
    ///
    /// If the host has no space for the data, or the command was completed.
    #[inline(always)]
    pub fn complete(
        &mut self,
        tag: u16,
        len_bytes: u32,
        completion: Completion,
    ) -> Result<(), NotPossible> {
        if len_bytes > 0 {
            if self.send_whole(tag, len_bytes, completion) {
                return Ok(());
            }
            self.ready(tag, TransferState::ToHost, len_bytes)?;
        }
        let slot = self.under_way(tag)?;
        let is_false = slot.is_damaged && completion.status().is_success();
        slot.completion = if is_false {
            completion.with_status(Status::TRANSIENT_TRANSPORT_ERROR)
        } else {
            completion
        };
        // Granted data that were not requested yet are not requested any more.
        slot.is_answered = true;
        let is_fed =
            slot.state == TransferState::FromHost && slot.came < slot.len_bytes && slot.asks == 0;
        self.starved -= u16::from(is_fed);
        if let Some(body) = self.line.body.as_mut().filter(|body| body.tag == tag) {
            body.is_wanted = false;
        }
        let has_more = !self.may_queue_now() || self.queue_unit(tag, &NoDigest);
        if has_more {
            self.queue_job(tag);
        }
        Ok(())
    }

    /// Records that the socket has sent `count` bytes of the pieces, like [`sent`](Connection::sent), and
    /// calls `release` with the tag of each command of which nothing is left to send.
    #[inline]
    pub fn sent_each(&mut self, count: usize, mut release: impl FnMut(u16)) {
        self.line.out.sent(count);
        while let Some(tag) = self.next_ended() {
            release(tag);
        }
        self.forget_ended();
    }

    /// Tag of the next command of which everything was sent: it is free.
    #[inline(always)]
    fn next_ended(&mut self) -> Option<u16> {
        let (end, tag) = *self.ends.get(self.ended)?;
        if end > self.line.out.sent_bytes() {
            return None;
        }
        self.ended += 1;
        self.slots[usize::from(tag)].state = TransferState::Free;
        self.free.push(tag);
        Some(tag)
    }

    /// Empties the list if all of it was sent.
    #[inline]
    fn forget_ended(&mut self) {
        if self.ended == self.ends.len() {
            self.ends.clear();
            self.ended = 0;
        }
    }

    /// Records that a command ends with what is queued now.
    #[inline(always)]
    fn push_end(&mut self, tag: u16) {
        if self.ends.len() == self.ends.capacity() {
            self.make_room_for_end();
        }
        self.ends.push((self.line.out.queued_bytes(), tag));
    }

    #[cfg(test)]
    pub(crate) fn ends_capacity(&self) -> usize {
        self.ends.capacity()
    }

    /// Removes what was sent from the list, which grows only for commands that were not: at most as many as
    /// there may be.
    #[cold]
    fn make_room_for_end(&mut self) {
        self.ends.drain(..core::mem::take(&mut self.ended));
        let len = self.ends.len();
        let most = usize::from(self.config.depth).max(GROWTH);
        self.ends.reserve_exact((2 * len).clamp(GROWTH, most).saturating_sub(len).max(1));
    }

    /// Drops a command without a response, because a controller reset has ended it. Its tag is free
    /// at once.
    ///
    /// # Errors
    ///
    /// If its data are in transfer, or it was completed.
    pub fn drop_command(&mut self, tag: u16) -> Result<(), NotPossible> {
        let slot = self.under_way(tag)?;
        if !slot.is_still() {
            return Err(NotPossible::InTransfer);
        }
        slot.state = TransferState::Free;
        self.free.push(tag);
        Ok(())
    }

    /// Slot of a command that its owner has not completed.
    #[inline]
    fn under_way(&mut self, tag: u16) -> Result<&mut CommandSlot, NotPossible> {
        let slot = self.slots.get_mut(usize::from(tag));
        slot.filter(|slot| slot.is_in_flight()).ok_or(NotPossible::NotUnderWay)
    }

    /// Adds the next `len_bytes` of a command's data in this direction to what may be transferred.
    #[inline]
    fn ready(&mut self, tag: u16, state: TransferState, len_bytes: u32) -> Result<(), NotPossible> {
        let slot = self.under_way(tag)?;
        if slot.state != state {
            return Err(NotPossible::Direction);
        }
        if len_bytes & 3 != 0 || len_bytes > slot.len_bytes - slot.ready {
            return Err(NotPossible::Length);
        }
        slot.ready += len_bytes;
        Ok(())
    }

    #[inline]
    fn queue_job(&mut self, tag: u16) {
        let slot = &mut self.slots[usize::from(tag)];
        if !slot.is_queued {
            slot.is_queued = true;
            self.jobs.push_back(tag);
        }
    }
}

impl fmt::Display for NotPossible {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::NotUnderWay => "the command is not under way",
            Self::Direction => "its data go another way",
            Self::Length => "it has not so many data",
            Self::InTransfer => "its data are on their way",
        })
    }
}

impl Connection for ControllerConnection {
    type Event = ControllerEvent;

    #[inline]
    fn core(&self) -> &ConnectionCore {
        &self.line
    }

    #[inline]
    fn core_mut(&mut self) -> &mut ConnectionCore {
        &mut self.line
    }

    #[inline]
    fn receive(
        &mut self,
        now: Instant,
        bytes: &[u8],
        events: &mut EventQueue<ControllerEvent>,
    ) -> usize {
        self.read(now, bytes, events)
    }

    #[inline]
    fn fill(&mut self, payloads: &impl PayloadDigest) {
        self.queue_units(payloads);
    }

    #[inline]
    fn has_more(&self) -> bool {
        !self.jobs.is_empty()
    }

    #[inline]
    fn sent(&mut self, count: usize, events: &mut EventQueue<ControllerEvent>) {
        self.line.out.sent(count);
        while events.room() > 0
            && let Some(tag) = self.next_ended()
        {
            events.push(ControllerEvent::Sent { tag });
        }
        self.forget_ended();
    }

    fn outstanding(&self) -> impl Iterator<Item = u16> + '_ {
        let taken = (0..).zip(&self.slots).filter(|(_, slot)| slot.state != TransferState::Free);
        taken.map(|(tag, _)| tag)
    }
}

impl From<CloseReason> for ControllerEvent {
    fn from(cause: CloseReason) -> Self {
        Self::Ended(cause)
    }
}
