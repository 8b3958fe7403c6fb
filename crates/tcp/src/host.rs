//! The host's end: commands in, completions out.
//!
//! The tag of a command is its index in the table and its command identifier on the wire. It is free
//! again with [`HostEvent::Done`], which comes once the controller has answered and nothing of the
//! command is left to send, whichever is later.
//!
//! The table holds no more commands than the submission queue: Connect is to be sent with an SQSIZE
//! of at least [`HostConfig::depth`]. So the queue never overflows, with SQ flow control or without
//! it, and SQHD, which a C2HData with SUCCESS does not carry, is not needed.

mod receive;
mod send;
mod slot;

use std::collections::VecDeque;

use base::Instant;
use wire::Completion;
use wire::tcp::{ALIGNMENT_MAX, End, IcReq, PduType};

use crate::body::Place;
use crate::connection::Connection;
use crate::events::Events;
use crate::line::{Cause, Line, Patience};
use crate::outbox::Outbox;
use crate::{Payloads, Terms};
pub(crate) use receive::{padding, whole};
use slot::{Ask, Slot, State};

/// The host's end of a connection.
#[derive(Debug)]
pub struct Host {
    line: Line,
    config: HostConfig,
    request: IcReq,
    terms: Terms,
    slots: Box<[Slot]>,
    free: Vec<u16>,
    /// Ranges that the controller has asked for: `r2ts_max` places for each slot.
    asks: Box<[Ask]>,
    /// Slots with ranges to be sent, each once.
    pending: VecDeque<u16>,
    /// Slots that were answered before all of them was sent.
    answered: Vec<u16>,
    /// Data that are queued at a time, and that one unit has at most.
    portion_bytes: u32,
}

/// What a host's end is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostConfig {
    /// Commands that may be outstanding: at least 1.
    pub depth: u16,
    /// The most data in a capsule: 8192 on an admin queue, IOCCSZ × 16 − 64 on others. Fabrics
    /// commands may always carry 8192.
    pub in_capsule_bytes: u32,
    /// How data to this host are to be aligned (HPDA): 0 to 31.
    pub hpda: u8,
    /// Whether headers have a digest.
    pub header_digest: DigestUse,
    /// Whether data have a digest.
    pub data_digest: DigestUse,
    /// R2Ts that may be outstanding for a command: at least 1.
    pub r2ts_max: u8,
    /// Whether the caller chooses the tags of commands: one whose own table has numbers already.
    pub names_tags: bool,
    /// How long the controller is waited for.
    pub patience: Patience,
}

/// Whether a digest is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DigestUse {
    /// It is not asked for.
    Off,
    /// It is asked for; a controller without it is taken all the same.
    Offered,
    /// A controller without it is refused.
    Required,
}

/// Which data a command moves outside of its entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// None.
    None,
    /// So many bytes from host to controller.
    FromHost(u32),
    /// So many bytes from controller to host.
    ToHost(u32),
}

/// What has happened at a host's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostEvent {
    /// The controller has opened the connection; commands can be submitted.
    Open(Terms),
    /// Data have come: from byte `at` of the bytes that were given, to where they belong.
    Data {
        /// Where they belong.
        place: Place,
        /// Where they lie.
        at: u32,
    },
    /// A command has ended, and its tag is free.
    Done {
        /// Which.
        tag: u16,
        /// How. A success whose data came damaged is a Transient Transport Error here, one whose
        /// data did not all come a Data Transfer Error.
        completion: Completion,
        /// Bytes that came to the host.
        moved_bytes: u32,
    },
    /// The connection has ended. What is outstanding is told by [`Host::outstanding`].
    Ended(Cause),
}

/// There is no room for a command now: the table is full, or the list of what is to be sent, or the
/// connection is not open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// The longest header with digest and padding: data behind a command begin at a multiple of 128.
const CAPSULE_BYTES: usize = 128;
/// Headers of data units that are queued beside all capsules.
const DATA_HEADERS: usize = 16;
/// Whatever comes from an open connection's controller begins with as much as data do.
const _: () = {
    let of_data = PduType::C2HData.header_bytes();
    assert!(PduType::CapsuleResp.header_bytes() == of_data);
    assert!(PduType::R2t.header_bytes() == of_data);
    assert!(PduType::C2HTermReq.header_bytes() == of_data);
};
/// The portion in which data go, unless another one is set.
const PORTION_BYTES: u32 = 256 << 10;

impl Default for HostConfig {
    fn default() -> Self {
        Self {
            depth: 128,
            in_capsule_bytes: 0,
            hpda: 0,
            header_digest: DigestUse::Off,
            data_digest: DigestUse::Off,
            r2ts_max: 1,
            names_tags: false,
            patience: Patience::default(),
        }
    }
}

impl HostConfig {
    /// With every value within its bounds.
    const fn sane(mut self) -> Self {
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

    const fn header_room(&self) -> usize {
        (self.depth as usize + DATA_HEADERS) * (CAPSULE_BYTES + 4)
    }

    const fn pieces_max(&self) -> usize {
        3 * (self.depth as usize + DATA_HEADERS)
    }

    /// Bytes of memory that a host's end takes, payload not counted: all that it ever allocates, and
    /// itself.
    #[must_use]
    pub const fn memory_bytes(&self) -> usize {
        let sane = self.sane();
        let slot = size_of::<Slot>() + 3 * size_of::<u16>();
        let asks = sane.r2ts_max as usize * size_of::<Ask>();
        size_of::<Host>()
            + sane.depth as usize * (slot + asks)
            + Outbox::memory_bytes(sane.header_room(), sane.pieces_max())
    }
}

impl Host {
    /// An end on a stream that has just been made. ICReq lies ready to be sent.
    #[must_use]
    pub fn new(config: HostConfig, now: Instant) -> Self {
        let config = config.sane();
        let (depth, asks_max) = (usize::from(config.depth), usize::from(config.r2ts_max));
        let out = Outbox::new(config.header_room(), config.pieces_max());
        let asks = |digest| digest != DigestUse::Off;
        let request = IcReq::new(
            config.hpda,
            asks(config.header_digest),
            asks(config.data_digest),
            u32::from(config.r2ts_max) - 1,
        );
        let mut line = Line::new(End::Host, config.patience, out, now);
        line.push(request.as_bytes(), 0);
        Self {
            line,
            config,
            request,
            terms: Terms::default(),
            slots: vec![Slot::FREE; depth].into(),
            free: (0..config.depth).rev().filter(|_| !config.names_tags).collect(),
            asks: vec![Ask::default(); depth * asks_max].into(),
            pending: VecDeque::with_capacity(depth),
            answered: Vec::with_capacity(depth),
            portion_bytes: PORTION_BYTES,
        }
    }

    /// How many commands can be submitted, as far as the table goes, if the tags are its own.
    #[inline]
    #[must_use]
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Data that are queued and not sent, beyond which no further unit of data is queued, and the most
    /// in one unit, whatever the controller takes: a command never waits behind more than that. 256 KiB
    /// unless this is called; a multiple of 4.
    #[inline]
    pub fn set_portion(&mut self, bytes: u32) {
        self.portion_bytes = bytes;
    }

    /// How many bytes may be received behind `waiting` that were not taken without coming upon data
    /// that could be [read straight](Connection::direct) to where they belong: at least one. For an
    /// owner whose data have no address, so that they should not be stored from here.
    #[must_use]
    pub fn before_data(&self, waiting: usize) -> usize {
        let header = PduType::C2HData.header_bytes() + self.line.incoming.header_digest_bytes();
        let left = match &self.line.body {
            Some(body) => body.before_direct(),
            None => usize::from(header).saturating_sub(waiting),
        };
        // What is longer than its header and is not data is read as it comes.
        if left == 0 { usize::MAX } else { left }
    }

    /// The tag that the next command will have: its data are to be there under this name.
    #[inline]
    #[must_use]
    pub fn next_tag(&self) -> Option<u16> {
        self.free.last().copied()
    }
}

impl Connection for Host {
    type Event = HostEvent;

    #[inline]
    fn line(&self) -> &Line {
        &self.line
    }

    #[inline]
    fn line_mut(&mut self) -> &mut Line {
        &mut self.line
    }

    #[inline]
    fn receive(&mut self, now: Instant, bytes: &[u8], events: &mut Events<HostEvent>) -> usize {
        self.read(now, bytes, events)
    }

    #[inline]
    fn fill(&mut self, payloads: &impl Payloads) {
        if !self.pending.is_empty() {
            self.fill_data(payloads);
        }
    }

    #[inline]
    fn has_more(&self) -> bool {
        !self.pending.is_empty()
    }

    #[inline]
    fn sent(&mut self, count: usize, events: &mut Events<HostEvent>) {
        self.line.out.sent(count);
        if !self.answered.is_empty() {
            self.end_answered(events);
        }
    }

    fn outstanding(&self) -> impl Iterator<Item = u16> + '_ {
        let is_taken = |tag: &u16| self.slots[usize::from(*tag)].state != State::Free;
        (0..self.config.depth).filter(is_taken)
    }
}

impl From<Cause> for HostEvent {
    fn from(cause: Cause) -> Self {
        Self::Ended(cause)
    }
}
