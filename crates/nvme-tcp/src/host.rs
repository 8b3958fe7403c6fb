//! Host side of a connection: sends commands, receives completions.
//!
//! The tag of a command is its slot index, and its command identifier on the wire, unless the caller
//! chooses [identifiers](HostConfig::cid_mask) of which the tag is a part. The tag is free again with
//! [`HostEvent::Completed`], which is reported once the response has arrived and all bytes of the command
//! are sent, whichever is later.
//!
//! The table has no more slots than the submission queue has entries: Connect must carry an SQSIZE
//! of at least [`HostConfig::depth`]. The queue therefore never overflows, with or without SQ flow
//! control, and SQHD, which a C2HData with SUCCESS does not carry, is not needed.

mod receive;
mod send;
mod slot;

use std::collections::VecDeque;

use tenmil_base::Instant;
use tenmil_wire::tcp::{ALIGNMENT_MAX, IcReq, PduType, Role};
use tenmil_wire::{Completion, Status};

use crate::connection_trait::Connection;
use crate::endpoint::{CloseReason, ConnectionCore, Timeouts};
use crate::events::EventQueue;
use crate::pdu_body::DataPlacement;
use crate::receive_loop::ReceivePdus;
use crate::send_queue::SendQueue;
use crate::{NegotiatedParams, PayloadDigest};
use receive::{LAST, SUCCESS};
use slot::{CommandSlot, R2tRange, TransferState};

/// Host side of a connection.
#[derive(Debug)]
pub struct HostConnection {
    core: ConnectionCore,
    config: HostConfig,
    request: IcReq,
    params: NegotiatedParams,
    /// The connection is open, without digests.
    is_open_without_digests: bool,
    slots: Box<[CommandSlot]>,
    /// The bits of a command identifier that are its tag.
    tag_mask: u16,
    free_list: Vec<u16>,
    /// Ranges requested by the controller: `r2ts_max` entries for each slot.
    r2ts: Box<[R2tRange]>,
    /// Slots with ranges to be sent, each once.
    send_list: VecDeque<u16>,
    /// Slots whose response arrived before everything was sent.
    completed_unsent: Vec<u16>,
    /// Limit of queued unsent data, and of the data of one PDU.
    send_budget_bytes: u32,
}

/// Configuration of the host side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostConfig {
    /// Largest number of outstanding commands, at least 1.
    pub depth: u16,
    /// Largest in-capsule data in bytes: 8192 on an admin queue, IOCCSZ × 16 − 64 on an I/O queue.
    /// Fabrics commands may always carry 8192.
    pub in_capsule_bytes: u32,
    /// Alignment of data to the host (HPDA): 0 to 31.
    pub hpda: u8,
    /// Use of header digests.
    pub header_digest: DigestMode,
    /// Use of data digests.
    pub data_digest: DigestMode,
    /// Largest number of outstanding R2Ts per command (MAXR2T + 1): at least 1.
    pub r2ts_max: u8,
    /// The bits of a command identifier that are its tag, if the caller chooses identifiers because its
    /// own table has indexes already. Zero if tags are assigned here.
    pub cid_mask: u16,
    /// Time limits for the controller.
    pub timeouts: Timeouts,
}

/// Use of a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DigestMode {
    /// Not requested.
    Off,
    /// Requested; a controller without it is accepted.
    Preferred,
    /// Requested; a controller without it is rejected.
    Required,
}

/// Data transfer of a command outside its submission entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataDirection {
    /// No data.
    None,
    /// From host to controller, of this length.
    FromHost(u32),
    /// From controller to host, of this length.
    ToHost(u32),
}

/// Event of the host side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostEvent {
    /// The connection was negotiated; commands can be submitted.
    Open(NegotiatedParams),
    /// Data arrived, at position `at` of the bytes passed to `receive`.
    Data {
        /// Range of the command's data.
        placement: DataPlacement,
        /// Position of the data.
        at: u32,
    },
    /// All data of a read arrived, at position `at` of the bytes passed to `receive`, and the read has
    /// succeeded: [`Data`](Self::Data) and [`Completed`](Self::Completed) in one.
    ReadCompleted {
        /// The command's data.
        placement: DataPlacement,
        /// Command identifier.
        cid: u16,
        /// Position of the data.
        at: u32,
    },
    /// A command completed, and its tag is free.
    Completed {
        /// Tag.
        tag: u16,
        /// Completion. A successful command with a wrong data digest is reported as Transient
        /// Transport Error, one whose data are incomplete as Data Transfer Error.
        completion: Completion,
        /// Bytes received.
        transferred_bytes: u32,
    },
    /// The connection has ended. Outstanding commands are returned by [`HostConnection::outstanding_tags`].
    Ended(CloseReason),
}

/// A command cannot be submitted now: all tags or the send queue are in use, or the connection is
/// not open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CannotSubmit;

/// Longest header with digest and padding: data after a command are aligned to at most 128 bytes.
const CAPSULE_BYTES: usize = 128;
/// Number of data headers that fit into the send queue beside all capsules.
const DATA_HEADERS: usize = 16;
/// All headers that a controller sends on an open connection have the length of a C2HData header.
const _: () = {
    let len = PduType::C2HData.header_bytes();
    assert!(PduType::CapsuleResp.header_bytes() == len);
    assert!(PduType::R2t.header_bytes() == len);
    assert!(PduType::C2HTermReq.header_bytes() == len);
};
/// Default of [`set_send_budget`](HostConnection::set_send_budget).
const SEND_BUDGET_BYTES: u32 = 256 << 10;

impl Default for HostConfig {
    fn default() -> Self {
        Self {
            depth: 128,
            in_capsule_bytes: 0,
            hpda: 0,
            header_digest: DigestMode::Off,
            data_digest: DigestMode::Off,
            r2ts_max: 1,
            cid_mask: 0,
            timeouts: Timeouts::default(),
        }
    }
}

impl HostConfig {
    /// Clamps every value to its bounds.
    const fn clamp(mut self) -> Self {
        if self.depth == 0 {
            self.depth = 1;
        }
        if self.depth == u16::MAX {
            self.depth = u16::MAX - 1;
        }
        if self.r2ts_max == 0 {
            self.r2ts_max = 1;
        }
        if self.hpda > ALIGNMENT_MAX {
            self.hpda = ALIGNMENT_MAX;
        }
        self
    }

    const fn header_capacity(&self) -> usize {
        (self.depth as usize + DATA_HEADERS) * (CAPSULE_BYTES + 4)
    }

    const fn pieces_max(&self) -> usize {
        3 * (self.depth as usize + DATA_HEADERS)
    }

    /// Upper bound of the memory of a host side including itself, without data buffers.
    #[must_use]
    pub const fn memory_bytes(&self) -> usize {
        let clamped = self.clamp();
        let slot = size_of::<CommandSlot>() + 3 * size_of::<u16>();
        let r2ts = clamped.r2ts_max as usize * size_of::<R2tRange>();
        size_of::<HostConnection>()
            + clamped.depth as usize * (slot + r2ts)
            + SendQueue::memory_bytes(clamped.header_capacity(), clamped.pieces_max())
    }
}

impl HostConnection {
    /// Creates the host side of a new stream, with ICReq queued.
    #[must_use]
    pub fn new(config: HostConfig, now: Instant) -> Self {
        let config = config.clamp();
        let (depth, r2ts_max) = (usize::from(config.depth), usize::from(config.r2ts_max));
        let out = SendQueue::new(config.header_capacity(), config.pieces_max());
        let is_requested = |digest| digest != DigestMode::Off;
        let request = IcReq::new(
            config.hpda,
            is_requested(config.header_digest),
            is_requested(config.data_digest),
            u32::from(config.r2ts_max) - 1,
        );
        let mut core = ConnectionCore::new(Role::Host, config.timeouts, out, now);
        core.queue_pdu_header(request.as_bytes(), 0);
        Self {
            core,
            config,
            request,
            params: NegotiatedParams::default(),
            is_open_without_digests: false,
            slots: vec![CommandSlot::FREE; depth].into(),
            tag_mask: if config.cid_mask == 0 { u16::MAX } else { config.cid_mask },
            free_list: (0..config.depth).rev().filter(|_| config.cid_mask == 0).collect(),
            r2ts: vec![R2tRange::default(); depth * r2ts_max].into(),
            send_list: VecDeque::with_capacity(depth),
            completed_unsent: Vec::with_capacity(depth),
            send_budget_bytes: SEND_BUDGET_BYTES,
        }
    }

    /// Number of commands that can be submitted, as far as tags are concerned, if this table
    /// assigns them.
    #[inline]
    #[must_use]
    pub fn free_tags(&self) -> usize {
        self.free_list.len()
    }

    /// Sets the limit of queued unsent data, above which no further data PDU is queued, and of the
    /// data of one PDU, whatever the controller accepts. A command never waits behind more than
    /// this. The default is 256 KiB; a multiple of 4.
    #[inline]
    pub fn set_send_budget(&mut self, bytes: u32) {
        self.send_budget_bytes = bytes;
    }

    /// Number of bytes, at least one, that may be received after `unconsumed` bytes without
    /// reaching data that could be [received directly](Connection::next_direct_placement). For owners whose data
    /// have no address, so that storing them from a receive buffer should be avoided.
    #[must_use]
    pub fn receivable_bytes_before_data(&self, unconsumed: usize) -> usize {
        let header = PduType::C2HData.header_bytes() + self.core.incoming.header_digest_bytes();
        let remaining = match &self.core.body {
            Some(body) if body.padding_before_direct_data() > 0 => {
                body.padding_before_direct_data()
            }
            Some(body) => (body.remaining_bytes() + usize::from(header)).saturating_sub(unconsumed),
            None => usize::from(header).saturating_sub(unconsumed),
        };
        // PDUs that are longer than this header and carry no data are parsed as they arrive.
        if remaining == 0 { usize::MAX } else { remaining }
    }

    /// Number of bytes from the end of the data that are being [received
    /// directly](Connection::next_direct_placement) to the next data: the header of the next data, and
    /// before it the response, if this one is the last and does not report success itself.
    #[inline]
    #[must_use]
    pub fn bytes_between_data(&self) -> usize {
        let digest = self.core.incoming.header_digest_bytes();
        let header = usize::from(PduType::C2HData.header_bytes() + digest);
        let response = usize::from(PduType::CapsuleResp.header_bytes() + digest);
        let has_response =
            self.core.body.as_ref().is_some_and(|body| body.flags & (LAST | SUCCESS) == LAST);
        header + usize::from(has_response) * response
    }

    /// Tag of the next command. The payload must be available under this tag.
    #[inline]
    #[must_use]
    pub fn next_tag(&self) -> Option<u16> {
        self.free_list.last().copied()
    }
}

impl Connection for HostConnection {
    type Event = HostEvent;

    #[inline]
    fn connection_core(&self) -> &ConnectionCore {
        &self.core
    }

    #[inline]
    fn connection_core_mut(&mut self) -> &mut ConnectionCore {
        &mut self.core
    }

    #[inline]
    fn receive(&mut self, now: Instant, bytes: &[u8], events: &mut EventQueue<HostEvent>) -> usize {
        self.receive_pdus(now, bytes, events)
    }

    #[inline]
    fn fill_send_queue(&mut self, payloads: &impl PayloadDigest) {
        if !self.send_list.is_empty() {
            self.queue_write_data(payloads);
        }
    }

    #[inline]
    fn has_more(&self) -> bool {
        !self.send_list.is_empty()
    }

    #[inline]
    fn record_sent(&mut self, count: usize, events: &mut EventQueue<HostEvent>) {
        self.core.send_queue.record_sent(count);
        if !self.completed_unsent.is_empty() {
            self.handle_sent_commands(events);
        }
    }

    fn outstanding_tags(&self) -> impl Iterator<Item = u16> + '_ {
        let is_outstanding = |tag: &u16| self.slots[usize::from(*tag)].state != TransferState::Free;
        (0..self.config.depth).filter(is_outstanding)
    }
}

impl HostEvent {
    /// Splits [`ReadCompleted`](Self::ReadCompleted) into `Data` and `Completed`; any other event is returned
    /// as it is.
    pub fn split_read_completed(self) -> impl Iterator<Item = Self> {
        let (first, second) = match self {
            Self::ReadCompleted { placement, cid, at } => {
                let completion = Completion::new(cid, Status::SUCCESS);
                let transferred_bytes = placement.len_bytes;
                let completed =
                    Self::Completed { tag: placement.tag, completion, transferred_bytes };
                (Self::Data { placement, at }, Some(completed))
            }
            other => (other, None),
        };
        core::iter::once(first).chain(second)
    }
}

impl From<CloseReason> for HostEvent {
    fn from(reason: CloseReason) -> Self {
        Self::Ended(reason)
    }
}
