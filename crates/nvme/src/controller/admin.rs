//! The admin queue: who asked for what, and room that nobody can take from anybody.
//!
//! ```text
//!   |<------------------------ slots of the queue ------------------------>|
//!   | events, keep-alive, aborts, set-up: RESERVED | commands of the owner |
//! ```

use base::{Answer, Answers, Dma, Doorbell, Instant, Mmio, Span};
use wire::register::offset;
use wire::{AdminOpcode, Command, Typed};

use super::options::ControllerOptions;
use super::transfer::ListPages;
use crate::bringup::AdminQueues;
use crate::error::ControllerError;
use crate::link::{ControllerEnd, Order, Overdue, link};
use crate::queue_pair::{Full, QueueDoorbell, QueueMemory, QueuePair, QueueSetup};
use crate::techniques::Techniques;

/// The admin queue pair and what is outstanding on it.
pub(super) struct Admin<D: Dma, B: Doorbell> {
    pub(super) pair: QueuePair<D, B>,
    pub(super) link: ControllerEnd,
    pub(super) lists: ListPages<D>,
    answers: Answers,
    /// By token.
    pending: Box<[Option<Pending>]>,
    timeout: Span,
}

/// A command that is outstanding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pending {
    cid: u16,
    opcode: u8,
    purpose: Purpose,
}

/// Who waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The conversation that start-up, scans and log pages are.
    Asked,
    /// An I/O queue pair that is being created or deleted.
    Queue { id: u16 },
    /// An Asynchronous Event Request.
    Event,
    /// A Keep Alive.
    KeepAlive,
    /// The Abort of an overdue command.
    Abort { queue: u16, overdue: Overdue },
    /// The owner of the controller.
    Owner { token: u64, list: Option<u8> },
}

/// Slots that the owner's commands cannot take: 8 events, 4 aborts, the 4 commands that those name
/// and whose slots stay theirs until the abort is answered, a keep-alive, a conversation, and 2 to
/// spare for queues.
pub(super) const RESERVED: usize = 20;
/// Asynchronous Event Requests that there is room for.
pub(super) const EVENTS_MAX: u16 = 8;
/// Aborts that there is room for.
pub(super) const ABORTS_MAX: usize = 4;
/// A limit that is none.
const NO_LIMIT: Span = Span { ns: Instant::NEVER.ns };
/// Answers taken in one go.
const BATCH: usize = 16;

impl<D: Dma, B: Doorbell> Admin<D, B> {
    pub(super) fn new(
        mmio: &mut impl Mmio<Doorbell = B>,
        dma: &D,
        options: &ControllerOptions,
        memory: QueueMemory,
        doorbell_stride: u8,
    ) -> Result<(Self, AdminQueues), ControllerError> {
        let unreachable = ControllerError::Unreachable { what: "the admin queue" };
        let queues = AdminQueues {
            submission_iova: dma.iova(memory.submission).ok_or(unreachable)?,
            completion_iova: dma.iova(memory.completion).ok_or(unreachable)?,
            depth: memory.submission_depth,
        };
        let mut doorbell = |offset: usize| {
            // The admin queue's doorbells are the first two.
            mmio.doorbell(u32::try_from(offset).unwrap_or(u32::MAX))
        };
        let (controller_end, queue_end) = link(0);
        let setup =
            QueueSetup {
                memory,
                submission_doorbell: QueueDoorbell::Register(doorbell(
                    offset::submission_doorbell(0, doorbell_stride),
                )),
                completion_doorbell: QueueDoorbell::Register(doorbell(
                    offset::completion_doorbell(0, doorbell_stride),
                )),
                link: queue_end,
                timeout: options.admin_timeout,
                techniques: Techniques::default(),
            };
        let pair = QueuePair::new(dma, setup);
        let slots = pair.depth() as usize;
        assert!(slots > RESERVED, "{slots} slots, of which {RESERVED} are reserved");
        let lists =
            ListPages::allocate(dma, options.admin_pointers()).ok_or(ControllerError::Memory {
                what: "lists of admin commands",
                len_bytes: 4 * 4096,
            })?;
        let admin = Self {
            pair,
            link: controller_end,
            lists,
            answers: Answers::with_capacity(BATCH),
            pending: vec![None; slots].into_boxed_slice(),
            timeout: options.admin_timeout,
        };
        Ok((admin, queues))
    }

    /// Sends a command of our own. There is room for it by design.
    ///
    /// # Panics
    ///
    /// If there is not, or the queue is not running: we have lost count.
    pub(super) fn ask(&mut self, now: Instant, purpose: Purpose, command: &impl Typed) {
        self.send(now, purpose, command.to_command());
    }

    /// As [`ask`](Self::ask), with a command that names memory.
    pub(super) fn send(&mut self, now: Instant, purpose: Purpose, command: Command) {
        let timeout = if purpose == Purpose::Event { NO_LIMIT } else { self.timeout };
        let sent = self.enqueue(now, purpose, command, timeout);
        assert!(sent, "no room for {purpose:?}");
    }

    /// Whether the owner may send one more command.
    pub(super) fn has_room_for_owner(&self) -> bool {
        let owners = self.count(|purpose| matches!(purpose, Purpose::Owner { .. }));
        self.link.order() == Order::Run && owners < self.pending.len() - RESERVED
    }

    /// Sends a command of the owner's, for whom there must be room.
    pub(super) fn send_for_owner(
        &mut self,
        now: Instant,
        token: u64,
        command: Command,
        list: Option<u8>,
        timeout: Option<Span>,
    ) -> bool {
        let timeout = timeout.unwrap_or(self.timeout);
        self.enqueue(now, Purpose::Owner { token, list }, command, timeout)
    }

    fn enqueue(&mut self, now: Instant, purpose: Purpose, command: Command, timeout: Span) -> bool {
        let Some(index) = self.pending.iter().position(Option::is_none) else { return false };
        let opcode = command.opcode();
        match self.pair.submit_within(now, timeout, index as u64, command) {
            Ok(cid) => {
                self.pending[index] = Some(Pending { cid, opcode, purpose });
                true
            }
            Err(Full) => false,
        }
    }

    /// Rings the doorbell for what was sent, takes the next answers and says whom they are for.
    pub(super) fn take(&mut self, now: Instant) -> Vec<(Purpose, Answer)> {
        self.pair.flush();
        self.pair.poll(now, &mut self.answers);
        let mut taken = Vec::with_capacity(self.answers.as_slice().len());
        for answer in self.answers.drain() {
            let index = usize::try_from(answer.token).unwrap_or(usize::MAX);
            // The queue pair has checked that the command was in flight, and the token is ours.
            let Some(pending) = self.pending.get_mut(index).and_then(Option::take) else {
                unreachable!("an answer with a token that was never given")
            };
            taken.push((pending.purpose, answer));
        }
        taken
    }

    /// How many commands are outstanding for such purposes.
    pub(super) fn count(&self, wanted: impl Fn(&Purpose) -> bool) -> usize {
        self.pending.iter().flatten().filter(|pending| wanted(&pending.purpose)).count()
    }

    /// How many Aborts are outstanding, whoever asked for them.
    pub(super) fn aborts(&self) -> usize {
        let aborts = |pending: &&Pending| pending.opcode == AdminOpcode::Abort.code();
        self.pending.iter().flatten().filter(aborts).count()
    }

    /// The purpose of the command with this identifier.
    pub(super) fn purpose_of(&self, cid: u16) -> Option<Purpose> {
        let pending = self.pending.iter().flatten().find(|pending| pending.cid == cid);
        pending.map(|pending| pending.purpose)
    }

    /// The identifier of the owner's command with this token.
    pub(super) fn cid_of(&self, wanted: u64) -> Option<u16> {
        let matches = |purpose| matches!(purpose, Purpose::Owner { token, .. } if token == wanted);
        let pending = self.pending.iter().flatten().find(|pending| matches(pending.purpose));
        pending.map(|pending| pending.cid)
    }

    /// Whether anything is awaited that will come by itself soon, events being another matter.
    pub(super) fn is_busy(&self) -> bool {
        self.count(|purpose| *purpose != Purpose::Event) > 0
    }
}
