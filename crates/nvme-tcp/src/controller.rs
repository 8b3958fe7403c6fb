//! Controller side of a connection: receives commands, sends completions.
//!
//! ```text
//!   Command ─┬─ no data, or data to the host ─────────────────────────────────┐
//!            ├─ data in the capsule ─────────────────▶ Data… ─▶ DataComplete ─┤
//!            └─ data from the host ─▶ request_data ─▶ R2T ─▶ Data… ─▶ DataComplete
//!                                                                             ▼
//!                           send_data… complete ─▶ C2HData, response ─▶ Sent
//! ```
//!
//! Data are requested from the host only when the owner has a buffer for them: an R2T covers only
//! bytes passed to `request_data`, so a memory limit is never exceeded. Only in-capsule data are
//! unsolicited, and their amount is bounded.

mod data_transfer;
mod deferred_responses;
mod receive;
mod send;
mod slot;

use std::collections::VecDeque;
use std::fmt;

use tenmil_base::Instant;
use tenmil_wire::tcp::{ADMIN_IN_CAPSULE_BYTES, ALIGNMENT_MAX, H2C_DATA_BYTES_MIN, PduType, Role};
use tenmil_wire::{Command, Completion, Status};

use crate::connection_trait::Connection;
use crate::endpoint::{CloseReason, ConnectionCore, Timeouts};
use crate::events::EventQueue;
use crate::pdu_body::DataPlacement;
use crate::receive_loop::ReceivePdus;
use crate::send_queue::SendQueue;
use crate::{NegotiatedParams, NoDigest, PayloadDigest};
use deferred_responses::DeferredResponses;
use slot::{CommandSlot, TransferState};

/// Controller side of a connection.
#[derive(Debug)]
pub struct ControllerConnection {
    core: ConnectionCore,
    config: ControllerConfig,
    params: NegotiatedParams,
    queue: QueueKind,
    /// Whether SUCCESS may replace a response.
    may_omit_response: bool,
    /// SQHD of the next response.
    sqhd: u16,
    /// Command slots, grown to the largest number used at the same time.
    slots: Vec<CommandSlot>,
    free_list: Vec<u16>,
    /// Slots with something to send, each once.
    send_list: VecDeque<u16>,
    deferred: DeferredResponses,
    /// Stream offset at which the response of each slot ends, oldest first.
    response_ends: Vec<(u64, u16)>,
    /// Number of these that were sent.
    responses_sent: usize,
    /// Number of slots that cannot be released before the host sends data.
    awaiting_data: u16,
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
    /// sent CPDA 0, since some hosts support no other value.
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
    pub success: SuccessFlagPolicy,
    /// Time limits for the host.
    pub timeouts: Timeouts,
}

/// When the SUCCESS flag replaces a response capsule (§3.3.2.1). It carries no SQHD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SuccessFlagPolicy {
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
    /// Data from the host of this length, requested with R2Ts as the owner calls `request_data`.
    FromHost(u32),
    /// Data to the host of at most this length.
    ToHost(u32),
}

/// Event of the controller side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControllerEvent {
    /// The connection was negotiated.
    Open(NegotiatedParams),
    /// A command arrived. Its tag is valid until [`Sent`](Self::Sent).
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
        placement: DataPlacement,
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
    /// The connection has ended. Outstanding commands are returned by [`Connection::outstanding_tags`].
    Ended(CloseReason),
}

/// Invalid call of the owner: a bug of the owner, which no input from a host may cause. Nothing
/// has changed; the connection should be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerCallError {
    /// The command does not exist or was already completed.
    NotOutstanding,
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
const RESPONSE_BYTES_MAX: usize = 128 + 4 + 28;

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
            success: SuccessFlagPolicy::WithoutFlowControl,
            timeouts: Timeouts::default(),
        }
    }
}

impl ControllerConfig {
    /// Clamps every value to its bounds.
    const fn clamp(mut self) -> Self {
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
        if self.r2ts_max > slot::R2TS_MAX {
            self.r2ts_max = slot::R2TS_MAX;
        }
        self
    }

    /// Largest number of queued responses; further ones wait in their slots.
    const fn responses_max(&self) -> usize {
        if self.depth < 64 { self.depth as usize } else { 64 }
    }

    const fn header_capacity(&self) -> usize {
        self.responses_max() * 80 + 2 * RESPONSE_BYTES_MAX
    }

    /// Largest number of queued pieces. A read without a response capsule has two, a header and its data:
    /// 128 such reads are sent at once.
    const fn pieces_max(&self) -> usize {
        4 * self.responses_max() + 6
    }

    /// Upper bound of the memory of a controller side including itself, without data buffers.
    #[must_use]
    pub const fn memory_bytes(&self) -> usize {
        let clamped = self.clamp();
        // The send list has at most twice the capacity that it uses, the other lists no more.
        let slot = size_of::<CommandSlot>() + 3 * size_of::<u16>() + size_of::<(u64, u16)>();
        size_of::<ControllerConnection>()
            + clamped.depth as usize * slot
            + SendQueue::memory_bytes(clamped.header_capacity(), clamped.pieces_max())
    }

    /// Largest amount of unsolicited data, for which the owner must have buffers.
    #[must_use]
    pub const fn unsolicited_bytes_max(&self) -> u64 {
        let limit = if self.in_capsule_bytes > ADMIN_IN_CAPSULE_BYTES {
            self.in_capsule_bytes
        } else {
            ADMIN_IN_CAPSULE_BYTES
        };
        self.clamp().depth as u64 * limit as u64
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
        let config = config.clamp();
        let out = SendQueue::with_growth(config.header_capacity(), config.pieces_max());
        Self {
            core: ConnectionCore::new(Role::Controller, config.timeouts, out, now),
            config,
            params: NegotiatedParams::default(),
            queue: QueueKind::None,
            may_omit_response: config.success == SuccessFlagPolicy::Always,
            sqhd: 0,
            slots: Vec::new(),
            free_list: (0..config.depth).rev().collect(),
            send_list: VecDeque::new(),
            deferred: DeferredResponses::default(),
            response_ends: Vec::new(),
            responses_sent: 0,
            awaiting_data: 0,
        }
    }

    /// Sets the kind of the queue. Must be called before Connect is completed: the response to Connect
    /// carries SQHD. A queue with more entries than [`ControllerConfig::depth`] must be
    /// rejected: its host may send more commands than there are slots.
    pub fn set_queue_kind(&mut self, queue: QueueKind) {
        self.queue = queue;
        self.may_omit_response = match self.config.success {
            SuccessFlagPolicy::Never => false,
            SuccessFlagPolicy::WithoutFlowControl => !queue.has_flow_control(),
            SuccessFlagPolicy::Always => true,
        };
        self.sqhd = if queue.entries() > 1 { self.sqhd % queue.entries() } else { 0 };
    }

    /// Whether no further command is accepted until one is released.
    #[must_use]
    pub fn is_command_table_full(&self) -> bool {
        self.free_list.is_empty()
    }

    /// Whether every command waits for data from the host.
    fn do_all_commands_await_data(&self) -> bool {
        self.awaiting_data == self.config.depth
    }

    /// Grants a buffer for the next `len_bytes` of a command's data, which are then requested. A
    /// multiple of a dword.
    ///
    /// # Errors
    ///
    /// If the command has fewer remaining, or was completed.
    pub fn request_data(&mut self, tag: u16, len_bytes: u32) -> Result<(), OwnerCallError> {
        self.add_ready_bytes(tag, TransferState::FromHost, len_bytes)?;
        self.add_to_send_list(tag);
        Ok(())
    }

    /// Queues the next `len_bytes` of read data, which more will follow. A multiple of a dword.
    ///
    /// # Errors
    ///
    /// If the host has no space for them, or the command was completed.
    pub fn send_data(&mut self, tag: u16, len_bytes: u32) -> Result<(), OwnerCallError> {
        self.add_ready_bytes(tag, TransferState::ToHost, len_bytes)?;
        self.add_to_send_list(tag);
        Ok(())
    }

    /// Completes a command: queues its last `len_bytes` of data and its response. Command
    /// identifier and SQHD are filled in here. No data are accepted for the command afterwards;
    /// requested data still in transfer are discarded. Events of the command that are already in an
    /// event queue must be ignored as well.
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
    ) -> Result<(), OwnerCallError> {
        if len_bytes > 0 {
            if self.try_queue_all_data_at_once(tag, len_bytes, completion) {
                return Ok(());
            }
            self.add_ready_bytes(tag, TransferState::ToHost, len_bytes)?;
        }
        let slot = self.outstanding_slot(tag)?;
        let has_wrong_digest = slot.is_damaged && completion.status().is_success();
        slot.completion = if has_wrong_digest {
            completion.with_status(Status::TRANSIENT_TRANSPORT_ERROR)
        } else {
            completion
        };
        // Data for which no R2T was sent are not requested any more; data of an outstanding R2T must still
        // be received before the response, or the host would send them to a reused TTAG.
        slot.is_completed = true;
        let no_longer_awaits_data = slot.state == TransferState::FromHost
            && slot.received < slot.len_bytes
            && slot.r2t_count == 0;
        self.awaiting_data -= u16::from(no_longer_awaits_data);
        if let Some(body) = self.core.body.as_mut().filter(|body| body.tag == tag) {
            body.is_needed = false;
        }
        let has_more = !self.may_queue_now() || self.queue_next_pdu(tag, &NoDigest);
        if has_more {
            self.add_to_send_list(tag);
        }
        Ok(())
    }

    /// Records that the socket has sent `count` bytes of the pieces, like
    /// [`record_sent`](Connection::record_sent), and calls `release` with the tag of each command of which
    /// all bytes are sent.
    #[inline]
    pub fn record_sent_each(&mut self, count: usize, mut release: impl FnMut(u16)) {
        self.core.send_queue.record_sent(count);
        while let Some(tag) = self.free_next_sent_command() {
            release(tag);
        }
        self.clear_sent_response_ends();
    }

    /// Frees the tag of the next command of which everything was sent, and returns it.
    #[inline(always)]
    fn free_next_sent_command(&mut self) -> Option<u16> {
        let (end, tag) = *self.response_ends.get(self.responses_sent)?;
        if end > self.core.send_queue.sent_bytes() {
            return None;
        }
        self.responses_sent += 1;
        self.slots[usize::from(tag)].state = TransferState::Free;
        self.free_list.push(tag);
        Some(tag)
    }

    /// Empties the list of response ends if all of it was sent.
    #[inline]
    fn clear_sent_response_ends(&mut self) {
        if self.responses_sent == self.response_ends.len() {
            self.response_ends.clear();
            self.responses_sent = 0;
        }
    }

    /// Records that the last byte of a command is queued now.
    #[inline(always)]
    fn record_response_end(&mut self, tag: u16) {
        if self.response_ends.len() == self.response_ends.capacity() {
            self.grow_response_ends();
        }
        self.response_ends.push((self.core.send_queue.queued_bytes(), tag));
    }

    #[cfg(test)]
    pub(crate) fn response_ends_capacity(&self) -> usize {
        self.response_ends.capacity()
    }

    /// Removes sent entries from the list of response ends, which grows for unsent ones only: to at most the
    /// depth.
    #[cold]
    fn grow_response_ends(&mut self) {
        self.response_ends.drain(..core::mem::take(&mut self.responses_sent));
        let len = self.response_ends.len();
        let limit = usize::from(self.config.depth).max(GROWTH);
        self.response_ends.reserve_exact((2 * len).clamp(GROWTH, limit).saturating_sub(len).max(1));
    }

    /// Drops a command without a response, because a controller reset has ended it. Its tag is free
    /// at once.
    ///
    /// # Errors
    ///
    /// If its data are in transfer, or it was completed.
    pub fn drop_command(&mut self, tag: u16) -> Result<(), OwnerCallError> {
        let slot = self.outstanding_slot(tag)?;
        if !slot.is_data_idle() {
            return Err(OwnerCallError::InTransfer);
        }
        slot.state = TransferState::Free;
        self.free_list.push(tag);
        Ok(())
    }

    /// Slot of a command that its owner has not completed.
    #[inline]
    fn outstanding_slot(&mut self, tag: u16) -> Result<&mut CommandSlot, OwnerCallError> {
        let slot = self.slots.get_mut(usize::from(tag));
        slot.filter(|slot| slot.is_outstanding()).ok_or(OwnerCallError::NotOutstanding)
    }

    /// Adds the next `len_bytes` of a command's data in this direction to what may be transferred.
    #[inline]
    fn add_ready_bytes(
        &mut self,
        tag: u16,
        state: TransferState,
        len_bytes: u32,
    ) -> Result<(), OwnerCallError> {
        let slot = self.outstanding_slot(tag)?;
        if slot.state != state {
            return Err(OwnerCallError::Direction);
        }
        if len_bytes & 3 != 0 || len_bytes > slot.len_bytes - slot.ready {
            return Err(OwnerCallError::Length);
        }
        slot.ready += len_bytes;
        Ok(())
    }

    #[inline]
    fn add_to_send_list(&mut self, tag: u16) {
        let slot = &mut self.slots[usize::from(tag)];
        if !slot.is_in_send_list {
            slot.is_in_send_list = true;
            self.send_list.push_back(tag);
        }
    }
}

impl fmt::Display for OwnerCallError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::NotOutstanding => "the command is not outstanding, or is already completed",
            Self::Direction => "the command transfers no data in this direction",
            Self::Length => {
                "the length exceeds the command's remaining data, or is not a multiple of 4"
            }
            Self::InTransfer => "data of the command are in transfer",
        })
    }
}

impl ControllerConnection {
    /// Length of the header of a data PDU, with its digest.
    #[inline]
    #[must_use]
    pub fn data_header_bytes(&self) -> usize {
        usize::from(PduType::H2CData.header_bytes() + self.core.incoming.header_digest_bytes())
    }

    /// Number of bytes that can be received behind the `buffered` ones, which were not consumed, without
    /// reaching data that could be [received directly](Connection::next_direct_placement): the rest of a
    /// command or of data, and the header of a data PDU.
    #[must_use]
    pub fn bytes_to_data_header(&self, buffered: &[u8]) -> usize {
        let header = self.data_header_bytes();
        let remaining = match (&self.core.body, buffered.first()) {
            (Some(body), _) => (body.remaining_bytes() + header).saturating_sub(buffered.len()),
            (None, Some(kind)) if *kind == PduType::CapsuleCmd as u8 => {
                let digest = self.core.incoming.header_digest_bytes();
                let capsule = usize::from(PduType::CapsuleCmd.header_bytes() + digest);
                capsule.saturating_sub(buffered.len()) + header
            }
            _ => header.saturating_sub(buffered.len()),
        };
        if remaining == 0 { usize::MAX } else { remaining }
    }
}

impl Connection for ControllerConnection {
    type Event = ControllerEvent;

    #[inline]
    fn connection_core(&self) -> &ConnectionCore {
        &self.core
    }

    #[inline]
    fn connection_core_mut(&mut self) -> &mut ConnectionCore {
        &mut self.core
    }

    #[inline]
    fn receive(
        &mut self,
        now: Instant,
        bytes: &[u8],
        events: &mut EventQueue<ControllerEvent>,
    ) -> usize {
        self.receive_pdus(now, bytes, events)
    }

    #[inline]
    fn fill_send_queue(&mut self, payloads: &impl PayloadDigest) {
        self.queue_pdus(payloads);
    }

    #[inline]
    fn has_more(&self) -> bool {
        !self.send_list.is_empty()
    }

    #[inline]
    fn record_sent(&mut self, count: usize, events: &mut EventQueue<ControllerEvent>) {
        self.core.send_queue.record_sent(count);
        while events.remaining_capacity() > 0
            && let Some(tag) = self.free_next_sent_command()
        {
            events.push(ControllerEvent::Sent { tag });
        }
        self.clear_sent_response_ends();
    }

    fn outstanding_tags(&self) -> impl Iterator<Item = u16> + '_ {
        let outstanding =
            (0..).zip(&self.slots).filter(|(_, slot)| slot.state != TransferState::Free);
        outstanding.map(|(tag, _)| tag)
    }
}

impl From<CloseReason> for ControllerEvent {
    fn from(reason: CloseReason) -> Self {
        Self::Ended(reason)
    }
}
