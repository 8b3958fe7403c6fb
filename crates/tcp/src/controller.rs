//! The controller's end: commands out, completions in.
//!
//! ```text
//!   Command ─┬─ no data, or data to the host ────────────────────────┐
//!            ├─ data in the capsule ──▶ Data… ──▶ Arrived ───────────┤
//!            └─ data from the host ──▶ grant ──▶ R2T ──▶ Data… ──▶ Arrived
//!                                                                    ▼
//!                              reply… finish ──▶ C2HData, response ──▶ Released
//! ```
//!
//! Nothing is asked from the host before its owner has room for it: an R2T goes out for what was
//! granted and for no more, so a budget of memory is never exceeded. Only what comes in a capsule
//! comes unasked, and it is bounded.

mod classify;
mod receive;
mod send;
mod slot;

use std::collections::VecDeque;
use std::fmt;

use base::Instant;
use wire::tcp::{ADMIN_IN_CAPSULE_BYTES, ALIGNMENT_MAX, End, H2C_DATA_BYTES_MIN};
use wire::{Command, Completion, Status};

use crate::body::Place;
use crate::connection::Connection;
use crate::events::Events;
use crate::line::{Cause, Line, Patience};
use crate::outbox::Outbox;
use crate::{Payloads, Terms};
use slot::{Slot, State};

/// The controller's end of a connection.
#[derive(Debug)]
pub struct Controller {
    line: Line,
    config: ControllerConfig,
    terms: Terms,
    queue: QueueKind,
    /// SQHD of the next answer.
    head: u16,
    /// As many as were ever used at a time.
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// Slots with something to send, each once.
    jobs: VecDeque<u16>,
    /// Where on the outgoing stream the answer of which slot ends.
    ends: VecDeque<(u64, u16)>,
    /// Slots that cannot be released before the host has sent data.
    starved: u16,
}

/// What a controller's end is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerConfig {
    /// Commands that may be under way: at least 1. A host that keeps to its queue's size never meets
    /// a full table.
    pub depth: u16,
    /// The most data in a capsule for an I/O command: IOCCSZ × 16 − 64.
    pub in_capsule_bytes: u32,
    /// The most data of a command (MDTS).
    pub transfer_bytes_max: u32,
    /// How data to this controller are to be aligned (CPDA): 0 to 31. A host that has no wish of its
    /// own is told none, because some know no other.
    pub cpda: u8,
    /// Whether a host may have header digests.
    pub header_digest: bool,
    /// Whether a host may have data digests.
    pub data_digest: bool,
    /// The most data in one H2CData (MAXH2CDATA): a multiple of 4, and at least 4096.
    pub h2c_bytes_max: u32,
    /// The most data that one R2T asks for.
    pub r2t_bytes_max: u32,
    /// R2Ts for a command at a time: 1 to 4, and no more than the host takes.
    pub r2ts_max: u8,
    /// The most data in one C2HData. The specification sets no bound (TCP 1.0 §3.6.2.9), and hosts are
    /// known that take one unit for a command and no more, so nothing is cut unless this says so.
    pub c2h_bytes_max: u32,
    /// When a read ends with its last data, and without a response.
    pub success: SuccessFlag,
    /// How long the host is waited for.
    pub patience: Patience,
}

/// When SUCCESS takes the place of a response capsule (§3.3.2.1). It carries no SQHD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SuccessFlag {
    /// Never.
    Never,
    /// If the host has disabled SQ flow control, and so has no need for SQHD.
    WithoutFlowControl,
    /// Always.
    Always,
}

/// Which queue a connection is, once Connect has said so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueKind {
    /// None yet: only Connect is expected.
    None,
    /// The admin queue.
    Admin {
        /// Entries of the submission queue: SQSIZE and one.
        entries: u16,
        /// Whether SQHD counts.
        flow_control: bool,
    },
    /// An I/O queue.
    Io {
        /// Entries of the submission queue: SQSIZE and one.
        entries: u16,
        /// Whether SQHD counts.
        flow_control: bool,
    },
}

/// Which data a command has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandData {
    /// None.
    None,
    /// So many bytes follow in its capsule, and come without being asked for.
    InCapsule(u32),
    /// So many bytes are with the host, and come when room was granted.
    FromHost(u32),
    /// The host has room for so many bytes.
    ToHost(u32),
}

/// What has happened at a controller's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControllerEvent {
    /// The host has opened the connection.
    Open(Terms),
    /// A command has come, and has a tag until [`Released`](Self::Released).
    Command {
        /// Its tag, which is not its identifier.
        tag: u16,
        /// The command.
        command: Command,
        /// Its data, or what it is to be finished with because its SGL cannot be.
        data: Result<CommandData, Status>,
    },
    /// Data have come: from byte `at` of the bytes that were given, to where they belong.
    Data {
        /// Where they belong.
        place: Place,
        /// Where they lie.
        at: u32,
    },
    /// All data of a command have come.
    Arrived {
        /// Which.
        tag: u16,
        /// Whether they are those that the host has sent. If not, the command is to be finished,
        /// and ends with a Transient Transport Error whatever it is finished with.
        is_intact: bool,
    },
    /// Nothing of a command is left to send: its buffers are the owner's, and its tag is free.
    Released {
        /// Which.
        tag: u16,
    },
    /// The connection has ended. What is under way is told by [`Connection::outstanding`].
    Ended(Cause),
}

/// Why an owner cannot have what it asked for: a mistake of the owner, which nothing that a host sends
/// may lead to. Nothing has changed, and the connection should end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotPossible {
    /// There is no such command, or it was finished before.
    NotUnderWay,
    /// The data of the command go the other way, or nowhere.
    Direction,
    /// The command has not so many data, or they are no whole dwords.
    Length,
    /// Data of the command are on their way.
    InTransfer,
}

/// The longest header with digest and padding, a data digest, and a response with its digest.
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
            success: SuccessFlag::WithoutFlowControl,
            patience: Patience::default(),
        }
    }
}

impl ControllerConfig {
    /// With every value within its bounds.
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

    /// Answers that are queued at a time; the others wait in their slots.
    const fn answers(&self) -> usize {
        if self.depth < 64 { self.depth as usize } else { 64 }
    }

    const fn header_room(&self) -> usize {
        self.answers() * 80 + 2 * ANSWER_BYTES
    }

    const fn pieces_max(&self) -> usize {
        3 * self.answers() + 6
    }

    /// Bytes of memory that a controller's end takes, payload not counted: all that it ever
    /// allocates, and itself.
    #[must_use]
    pub const fn memory_bytes(&self) -> usize {
        let sane = self.sane();
        // A list that grows has room for twice as much as is in it at most.
        let slot = size_of::<Slot>() + 3 * size_of::<u16>() + 2 * size_of::<(u64, u16)>();
        size_of::<Controller>()
            + sane.depth as usize * slot
            + Outbox::memory_bytes(sane.header_room(), sane.pieces_max())
    }

    /// The most payload that can come unasked: what its owner must have room for.
    #[must_use]
    pub const fn unasked_bytes(&self) -> u64 {
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

impl Controller {
    /// An end on a stream that was just accepted.
    #[must_use]
    pub fn new(config: ControllerConfig, now: Instant) -> Self {
        let config = config.sane();
        let out = Outbox::growing(config.header_room(), config.pieces_max());
        Self {
            line: Line::new(End::Controller, config.patience, out, now),
            config,
            terms: Terms::default(),
            queue: QueueKind::None,
            head: 0,
            slots: Vec::new(),
            free: (0..config.depth).rev().collect(),
            jobs: VecDeque::new(),
            ends: VecDeque::new(),
            starved: 0,
        }
    }

    /// Connect has said which queue this is. Said before Connect is finished, so that its answer has
    /// the right SQHD. A queue with more entries than [`ControllerConfig::depth`] is to be refused:
    /// its host may send more than there are places.
    pub fn connected(&mut self, queue: QueueKind) {
        self.queue = queue;
        self.head = if queue.entries() > 1 { self.head % queue.entries() } else { 0 };
    }

    /// Whether no further command is taken before one is released.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Whether every command waits for data from the host.
    fn is_starved(&self) -> bool {
        self.starved == self.config.depth
    }

    /// There is room for the next `len_bytes` of the data of a command, which are asked for. Whole
    /// dwords.
    ///
    /// # Errors
    ///
    /// If the command has not so many, or is at its end.
    pub fn grant(&mut self, tag: u16, len_bytes: u32) -> Result<(), NotPossible> {
        self.ready(tag, State::FromHost, len_bytes)?;
        self.queue_job(tag);
        Ok(())
    }

    /// The next `len_bytes` of what a command reads are ready to be sent, and more will follow.
    /// Whole dwords.
    ///
    /// # Errors
    ///
    /// If the host has no room for so many, or the command is at its end.
    pub fn reply(&mut self, tag: u16, len_bytes: u32) -> Result<(), NotPossible> {
        self.ready(tag, State::ToHost, len_bytes)?;
        self.queue_job(tag);
        Ok(())
    }

    /// A command is done: its last `len_bytes` are ready to be sent, and then its answer. Identifier
    /// and SQHD are written here. After this no data come for it; those that were asked for and are
    /// on their way are passed over. What a batch of events already tells of it is to be passed over
    /// as well.
    ///
    /// # Errors
    ///
    /// If the host has no room for so many, or the command is at its end.
    #[inline]
    pub fn finish(
        &mut self,
        tag: u16,
        len_bytes: u32,
        completion: Completion,
    ) -> Result<(), NotPossible> {
        if len_bytes > 0 {
            self.ready(tag, State::ToHost, len_bytes)?;
        }
        let slot = self.under_way(tag)?;
        let is_false = slot.is_damaged && completion.status().is_success();
        slot.completion = if is_false {
            completion.with_status(Status::TRANSIENT_TRANSPORT_ERROR)
        } else {
            completion
        };
        // What was granted and not asked for is not asked for any more.
        slot.is_answered = true;
        let is_fed = slot.state == State::FromHost && slot.came < slot.len_bytes && slot.asks == 0;
        self.starved -= u16::from(is_fed);
        if let Some(body) = self.line.body.as_mut().filter(|body| body.tag == tag) {
            body.is_wanted = false;
        }
        self.queue_job(tag);
        Ok(())
    }

    /// A command is never answered: its host has forgotten it, by a reset of its controller. Its tag
    /// is free at once.
    ///
    /// # Errors
    ///
    /// If its data come or are sent, or it is at its end.
    pub fn forget(&mut self, tag: u16) -> Result<(), NotPossible> {
        let slot = self.under_way(tag)?;
        if !slot.is_still() {
            return Err(NotPossible::InTransfer);
        }
        slot.state = State::Free;
        self.free.push(tag);
        Ok(())
    }

    /// A command that its owner has not finished.
    #[inline]
    fn under_way(&mut self, tag: u16) -> Result<&mut Slot, NotPossible> {
        let slot = self.slots.get_mut(usize::from(tag));
        slot.filter(|slot| slot.is_under_way()).ok_or(NotPossible::NotUnderWay)
    }

    /// The next `len_bytes` of a command's data, which go this way, may come or are ready to be sent.
    #[inline]
    fn ready(&mut self, tag: u16, state: State, len_bytes: u32) -> Result<(), NotPossible> {
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

impl Connection for Controller {
    type Event = ControllerEvent;

    #[inline]
    fn line(&self) -> &Line {
        &self.line
    }

    #[inline]
    fn line_mut(&mut self) -> &mut Line {
        &mut self.line
    }

    #[inline]
    fn receive(
        &mut self,
        now: Instant,
        bytes: &[u8],
        events: &mut Events<ControllerEvent>,
    ) -> usize {
        self.read(now, bytes, events)
    }

    #[inline]
    fn fill(&mut self, payloads: &impl Payloads) {
        self.queue_units(payloads);
    }

    #[inline]
    fn has_more(&self) -> bool {
        !self.jobs.is_empty()
    }

    #[inline]
    fn sent(&mut self, count: usize, events: &mut Events<ControllerEvent>) {
        self.line.out.sent(count);
        let sent = self.line.out.sent_bytes();
        while let Some(&(end, tag)) = self.ends.front()
            && end <= sent
            && events.room() > 0
        {
            self.ends.pop_front();
            self.slots[usize::from(tag)].state = State::Free;
            self.free.push(tag);
            events.push(ControllerEvent::Released { tag });
        }
    }

    fn outstanding(&self) -> impl Iterator<Item = u16> + '_ {
        let taken = (0..).zip(&self.slots).filter(|(_, slot)| slot.state != State::Free);
        taken.map(|(tag, _)| tag)
    }
}

impl From<Cause> for ControllerEvent {
    fn from(cause: Cause) -> Self {
        Self::Ended(cause)
    }
}
