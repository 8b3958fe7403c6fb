//! Admin queue: the purpose of each outstanding command, and slots reserved for the driver.
//!
//! ```text
//!   |<------------------------ slots of the queue ------------------------>|
//!   | events, keep-alive, aborts, set-up: RESERVED | commands of the owner |
//! ```

use tenmil_base::{CompletionBatch, Instant, IoCompletion, Segment, Span};
use tenmil_wire::{AdminOpcode, Command, TypedCommand};

use super::admin_pointers::AdminPointers;
use crate::error::ControllerError;
use crate::queue_link::{ControllerLinkEnd, QueueState, TimedOutCommand, create_link};
use crate::queue_pair::{AttachmentOf, PointerOf, QueueFull, QueuePair, Transport};

/// Admin queue pair with its outstanding commands.
pub(super) struct AdminQueuePair<T: Transport> {
    pub(super) pair: QueuePair<T>,
    pub(super) link: ControllerLinkEnd<AttachmentOf<T>>,
    pub(super) pointers: AdminPointers<T::Pointers>,
    completions: CompletionBatch,
    /// Indexed by token.
    pending: Box<[Option<PendingAdminCommand>]>,
    timeout: Span,
}

/// Outstanding command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PendingAdminCommand {
    cid: u16,
    opcode: u8,
    purpose: AdminCommandPurpose,
}

/// Purpose of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AdminCommandPurpose {
    /// The driver's own query: start-up, scans and log pages.
    DriverQuery,
    /// Creation or deletion of an I/O queue pair.
    Queue { id: u16 },
    /// Asynchronous Event Request.
    Event,
    /// Keep Alive.
    KeepAlive,
    /// Abort of a timed-out command.
    Abort { queue: u16, overdue: TimedOutCommand },
    /// Command of the controller's owner.
    Owner { token: u64, list: Option<u8> },
}

/// Slots that are not available to the owner: 8 events, 4 aborts, the 4 commands to which these refer and
/// whose slots stay reserved until the abort completes, a keep-alive, a query, and 2 for queues.
pub(super) const RESERVED: usize = 20;
/// Maximum outstanding Asynchronous Event Requests.
pub(super) const EVENTS_MAX: u16 = 8;
/// Maximum outstanding Aborts.
pub(super) const ABORTS_MAX: usize = 4;
/// Timeout value that means none.
const NO_LIMIT: Span = Span { ns: Instant::NEVER.ns };
/// Completions handled at once.
const BATCH: usize = 16;

impl<T: Transport> AdminQueuePair<T> {
    /// The queue over its transport, with a builder of data pointers. Fails without one.
    pub(super) fn new(
        transport: T,
        pointers: Option<T::Pointers>,
        timeout: Span,
    ) -> Result<Self, ControllerError> {
        let pointers = pointers.ok_or(ControllerError::Memory {
            what: "lists of admin commands",
            len_bytes: 4 * 4096,
        })?;
        let (controller_end, queue_end) = create_link(0);
        let pair = QueuePair::with_transport(transport, queue_end, timeout);
        let slots = pair.depth() as usize;
        assert!(slots > RESERVED, "{slots} slots, of which {RESERVED} are reserved");
        Ok(Self {
            pair,
            link: controller_end,
            pointers: AdminPointers::new(pointers),
            completions: CompletionBatch::with_capacity(BATCH),
            pending: vec![None; slots].into_boxed_slice(),
            timeout,
        })
    }

    /// Sends an admin command of the driver. A slot is reserved for it.
    ///
    /// # Panics
    ///
    /// There is no free slot, or the queue is not running: a bug in the slot accounting.
    pub(super) fn submit_internal(
        &mut self,
        now: Instant,
        purpose: AdminCommandPurpose,
        command: &impl TypedCommand,
    ) {
        self.submit_internal_with_data(now, purpose, command.to_command(), None);
    }

    /// Like [`submit_internal`](Self::submit_internal), for a command with data in `data`, which is within
    /// a page.
    pub(super) fn submit_internal_with_data(
        &mut self,
        now: Instant,
        purpose: AdminCommandPurpose,
        command: Command,
        data: Option<Segment>,
    ) {
        let timeout = if purpose == AdminCommandPurpose::Event { NO_LIMIT } else { self.timeout };
        let pointer = data.map(|data| self.pointers.within_page(data)).unwrap_or_default();
        let sent = self.enqueue(now, purpose, (command, pointer), timeout);
        assert!(sent, "no room for {purpose:?}");
    }

    /// Whether the owner may send one more command.
    pub(super) fn has_owner_slot(&self) -> bool {
        let owners =
            self.outstanding_count(|purpose| matches!(purpose, AdminCommandPurpose::Owner { .. }));
        self.link.state() == QueueState::Running && owners < self.pending.len() - RESERVED
    }

    /// Sends a command of the owner, for which a slot must be free.
    pub(super) fn submit_for_owner(
        &mut self,
        now: Instant,
        token: u64,
        command: (Command, PointerOf<T>),
        list: Option<u8>,
        timeout: Option<Span>,
    ) -> bool {
        let timeout = timeout.unwrap_or(self.timeout);
        self.enqueue(now, AdminCommandPurpose::Owner { token, list }, command, timeout)
    }

    fn enqueue(
        &mut self,
        now: Instant,
        purpose: AdminCommandPurpose,
        (command, pointer): (Command, PointerOf<T>),
        timeout: Span,
    ) -> bool {
        let Some(index) = self.pending.iter().position(Option::is_none) else { return false };
        let opcode = command.opcode();
        let submitted =
            self.pair.submit_pointer_within(now, timeout, index as u64, command, pointer);
        match submitted {
            Ok(cid) => {
                self.pending[index] = Some(PendingAdminCommand { cid, opcode, purpose });
                true
            }
            Err(QueueFull) => false,
        }
    }

    /// Writes the doorbell for commands sent, and returns the next completions with their purposes.
    pub(super) fn take_completions(
        &mut self,
        now: Instant,
    ) -> Vec<(AdminCommandPurpose, IoCompletion)> {
        self.pair.flush();
        self.pair.poll(now, &mut self.completions);
        let mut taken = Vec::with_capacity(self.completions.as_slice().len());
        for answer in self.completions.drain() {
            let index = usize::try_from(answer.token).unwrap_or(usize::MAX);
            // The queue pair has checked that the command was in flight, and the token came from here.
            let Some(pending) = self.pending.get_mut(index).and_then(Option::take) else {
                unreachable!("an answer with a token that was never given")
            };
            taken.push((pending.purpose, answer));
        }
        taken
    }

    /// Number of outstanding commands with matching purposes.
    pub(super) fn outstanding_count(&self, wanted: impl Fn(&AdminCommandPurpose) -> bool) -> usize {
        self.pending.iter().flatten().filter(|pending| wanted(&pending.purpose)).count()
    }

    /// Number of outstanding Aborts, of the driver and of the owner.
    pub(super) fn outstanding_abort_count(&self) -> usize {
        let aborts = |pending: &&PendingAdminCommand| pending.opcode == AdminOpcode::Abort.code();
        self.pending.iter().flatten().filter(aborts).count()
    }

    /// Purpose of the command with this identifier.
    pub(super) fn purpose_of(&self, cid: u16) -> Option<AdminCommandPurpose> {
        let pending = self.pending.iter().flatten().find(|pending| pending.cid == cid);
        pending.map(|pending| pending.purpose)
    }

    /// Identifier of the owner's command with this token.
    pub(super) fn cid_of(&self, wanted: u64) -> Option<u16> {
        let matches = |purpose| matches!(purpose, AdminCommandPurpose::Owner { token, .. } if token == wanted);
        let pending = self.pending.iter().flatten().find(|pending| matches(pending.purpose));
        pending.map(|pending| pending.cid)
    }

    /// Whether a command other than an Asynchronous Event Request is outstanding.
    pub(super) fn is_busy(&self) -> bool {
        self.outstanding_count(|purpose| *purpose != AdminCommandPurpose::Event) > 0
    }
}
