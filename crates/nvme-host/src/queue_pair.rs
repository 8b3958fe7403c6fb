//! Queue pair, host side: the commands in flight, over a transport.
//!
//! ```text
//!    submit ---------> slots: identifier -> token ---> transport: rings in memory, or a connection
//!    poll <----------- slots: token <----------------- completions
//! ```
//!
//! It is used for the admin queue and for every I/O queue, and belongs to one thread. The controller
//! requests states through the queue's [`QueueLinkEnd`], which costs one load per poll. Everything off
//! the fast path is detected by checks that the fast path performs anyway: a queue that must not submit
//! has no free slots, and a special command has a flag in its slot.

mod completions;
mod deadlines;
mod doorbell;
mod error_injection;
mod queue_memory;
mod ring_transport;
mod shadow_doorbell;
mod state_changes;
mod submissions;
#[cfg(test)]
mod tests;
mod transport;

/// Barrier used by `shadow`; the model of the rings substitutes a model checker's.
use core::sync::atomic as sync;

use tenmil_base::{
    CompletionBatch, DoorbellStats, Instant, IoCompletion, IoStatus, SharedWaker, Span,
};
use tenmil_wire::Command;

pub use completions::CompletionSink;
pub use doorbell::{DoorbellSide, QueueDoorbell, ShadowDoorbell, ShadowSlot};
pub use error_injection::{Injection, InjectionSide};
pub use queue_memory::QueueMemory;
pub use ring_transport::{QueueSetup, RingTransport};
pub use transport::{AttachmentOf, DataPointers, PointerOf, Transport};

use crate::queue_link::{QueueLinkEnd, QueueState};
use crate::slot_table::{InvalidCompletion, SlotFlags, SlotTable, tick_of};
use error_injection::Injections;

/// Queue pair.
pub struct QueuePair<T: Transport> {
    slots: SlotTable,
    transport: T,
    link: QueueLinkEnd<AttachmentOf<T>>,
    /// State word of the fast path; while the queue is off the fast path, a value that the link never
    /// has.
    ordinary: u32,
    scan_at: Instant,
    polls: u64,
    idle_polls: u64,
    cold: Box<SlowPathState>,
}

/// Fields off the fast path.
struct SlowPathState {
    /// Last state applied, decoded and as a state word.
    standing: QueueState,
    adopted: u32,
    /// Next slot to check while parked commands are being completed.
    returning: Option<usize>,
    /// Time of the next state check, while the state is not `Running`.
    order_at: Instant,
    limit_ticks: u32,
    /// Individual time limits of commands, by slot.
    own_limits: Box<[u32]>,
    injections: Option<Injections>,
    invalid_completion_count: u64,
    invalid_completion: Option<InvalidCompletion>,
    overdue_count: u64,
}

/// The queue accepts no command now: all identifiers are in flight, or the controller has stopped the
/// queue. The command belongs to the caller again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFull;

/// Statistics of a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Commands submitted.
    pub submitted: u64,
    /// Commands ended, with any result.
    pub completed: u64,
    /// Updates of the submission doorbell.
    pub submission_doorbells: u64,
    /// Updates of the completion doorbell.
    pub completion_doorbells: u64,
    /// Number of these updates that were written to a register.
    pub doorbell_registers: u64,
    /// Commands stored into the controller memory buffer: all, or none.
    pub cmb_commands: u64,
    /// Polls.
    pub polls: u64,
    /// Polls without a completion.
    pub idle_polls: u64,
    /// Invalid completions.
    pub invalid_completions: u64,
    /// Commands past their deadline.
    pub overdue: u64,
    /// Injected errors.
    pub injected: u64,
}

/// Tracks the commands of split requests: gets each completion of a child, and returns the completion of
/// the request after its last child.
pub trait SplitTracker {
    /// A child has ended. Returns the completion of its request after the last one.
    fn handle_child_completion(
        &mut self,
        token: u64,
        status: IoStatus,
        result: u32,
    ) -> Option<IoCompletion>;
}

/// Tracker for queues without split requests.
pub(crate) struct NoSplitTracker;

impl SplitTracker for NoSplitTracker {
    fn handle_child_completion(
        &mut self,
        token: u64,
        status: IoStatus,
        result: u32,
    ) -> Option<IoCompletion> {
        Some(IoCompletion { token, status, result })
    }
}

/// A word that the link never has.
const NEVER: u32 = u32::MAX;

impl<T: Transport> QueuePair<T> {
    /// Creates a queue pair over an empty transport, whose commands are aborted after `timeout`. It
    /// submits nothing before its controller has set it to `Running`.
    pub fn with_transport(
        transport: T,
        link: QueueLinkEnd<AttachmentOf<T>>,
        timeout: Span,
    ) -> Self {
        let mut slots = SlotTable::new(transport.depth());
        slots.close();
        let cold = SlowPathState {
            standing: QueueState::Released,
            adopted: link.state_word(),
            returning: None,
            order_at: Instant::default(),
            limit_ticks: deadlines::timeout_to_ticks(timeout),
            own_limits: vec![0; slots.len()].into_boxed_slice(),
            injections: None,
            invalid_completion_count: 0,
            invalid_completion: None,
            overdue_count: 0,
        };
        Self {
            slots,
            transport,
            link,
            ordinary: NEVER,
            scan_at: Instant::default(),
            polls: 0,
            idle_polls: 0,
            cold: Box::new(cold),
        }
    }

    /// Replaces the transport of a queue pair with nothing in flight by the result of `change`.
    ///
    /// # Panics
    ///
    /// A command is in flight, or the depths differ.
    pub fn map_transport<U: Transport<Attachment = AttachmentOf<T>>>(
        self,
        change: impl FnOnce(T) -> U,
    ) -> QueuePair<U> {
        let depth = self.transport.depth();
        assert!(self.slots.in_flight() == 0, "a command is in flight");
        let transport = change(self.transport);
        assert!(transport.depth() == depth, "the slots are for {depth} commands");
        let Self { slots, link, ordinary, scan_at, polls, idle_polls, cold, .. } = self;
        QueuePair { slots, transport, link, ordinary, scan_at, polls, idle_polls, cold }
    }

    /// The transport.
    #[inline]
    pub fn transport(&self) -> &T {
        &self.transport
    }

    /// The transport, to maintain it.
    #[inline]
    pub fn transport_mut(&mut self) -> &mut T {
        &mut self.transport
    }

    /// Submits a command and returns its identifier. The next [`flush`](Self::flush) makes it visible to
    /// the controller.
    ///
    /// `token` is returned in the completion. Until then, the controller may access the command's memory.
    #[inline]
    pub fn submit(&mut self, now: Instant, token: u64, command: Command) -> Result<u16, QueueFull> {
        self.check_state(now);
        let command = command.with_cid(0);
        self.enqueue(tick_of(now), token, SlotFlags::NONE, (command, Default::default()), None)
            .ok_or(QueueFull)
    }

    /// Like [`submit`](Self::submit), with an individual timeout. The nanoseconds of [`Instant::NEVER`]
    /// mean no timeout, as needed by an Asynchronous Event Request.
    pub fn submit_within(
        &mut self,
        now: Instant,
        timeout: Span,
        token: u64,
        command: Command,
    ) -> Result<u16, QueueFull> {
        self.check_state(now);
        let entry = (command.with_cid(0), Default::default());
        self.enqueue_within(now, timeout, token, entry, None).ok_or(QueueFull)
    }

    /// Like [`submit_within`](Self::submit_within), for a command with this data pointer.
    pub(crate) fn submit_pointer_within(
        &mut self,
        now: Instant,
        timeout: Span,
        token: u64,
        command: Command,
        pointer: PointerOf<T>,
    ) -> Result<u16, QueueFull> {
        self.check_state(now);
        let entry = (command.with_cid(0), pointer);
        self.enqueue_within(now, timeout, token, entry, None).ok_or(QueueFull)
    }

    /// Submits both commands of a fused operation, or neither: they occupy adjacent entries, and the
    /// doorbell is written for both at once (Base 2.1 §3.4.2).
    pub fn submit_fused(
        &mut self,
        now: Instant,
        first: (u64, Command),
        second: (u64, Command),
    ) -> Result<[u16; 2], QueueFull> {
        self.check_state(now);
        let [first, second] =
            [first, second].map(|(token, command)| (token, command, Default::default()));
        self.enqueue_fused(tick_of(now), SlotFlags::NONE, first, second, None).ok_or(QueueFull)
    }

    /// Handles completions, as far as `completions` has space, and checks state changes and deadlines.
    /// Returns the number of completions added.
    #[inline]
    pub fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        self.poll_with_tracker(now, completions, &mut NoSplitTracker)
    }

    /// Prepares for sleeping until an interrupt: sends everything, so that the controller has a reason to
    /// interrupt, and checks for completions once more. The thread may sleep only if this returns
    /// true.
    pub fn arm(&mut self) -> bool {
        self.flush();
        let takes = matches!(self.cold.standing, QueueState::Running | QueueState::Quiescing);
        let has_entry = self.transport.arm(takes);
        let has_order = self.link.state_word() != self.cold.adopted;
        !has_order && !has_entry
    }

    /// Sets the waker of the queue's thread, for state changes that the controller requests.
    pub fn set_waker(&self, waker: SharedWaker) {
        self.link.set_waker(waker);
    }

    /// Time of the next poll, even without activity.
    pub fn wake_at(&self) -> Instant {
        if self.cold.returning.is_some() || self.has_injected_completions() {
            Instant::default()
        } else {
            match self.cold.standing {
                QueueState::Running if self.slots.in_flight() > 0 => self.scan_at,
                // All identifiers are reserved until their Aborts have ended.
                QueueState::Running if self.slots.next_index().is_none() => self.scan_at,
                QueueState::Running | QueueState::Dead => Instant::NEVER,
                QueueState::Quiescing | QueueState::Frozen | QueueState::Released => {
                    self.cold.order_at
                }
            }
        }
    }

    /// Commands in flight or parked.
    #[inline]
    pub fn in_flight(&self) -> u32 {
        self.slots.in_flight()
    }

    /// Maximum commands in flight.
    pub fn depth(&self) -> u32 {
        u32::from(self.transport.depth())
    }

    /// State that the queue has applied.
    pub fn state(&self) -> QueueState {
        self.cold.standing
    }

    /// Whether completed writes may be lost with the controller's cache, for which no flush has failed.
    pub fn has_lost_writes(&self) -> bool {
        self.link.has_lost_writes()
    }

    /// Records that a flush fails for the lost writes.
    pub(crate) fn note_lost_writes_reported(&self) {
        self.link.note_lost_writes_reported();
    }

    /// Last invalid completion.
    pub fn last_invalid_completion(&self) -> Option<InvalidCompletion> {
        self.cold.invalid_completion
    }

    /// Statistics.
    pub fn stats(&self) -> QueueStats {
        let DoorbellStats { submission, completion, registers, cmb_commands } =
            self.transport.doorbell_stats(self.slots.sent_count());
        QueueStats {
            submitted: self.slots.sent_count(),
            completed: self.slots.ended_count(),
            submission_doorbells: submission,
            completion_doorbells: completion,
            doorbell_registers: registers,
            cmb_commands,
            polls: self.polls,
            idle_polls: self.idle_polls,
            invalid_completions: self.cold.invalid_completion_count,
            overdue: self.cold.overdue_count,
            injected: self.cold.injections.as_ref().map_or(0, Injections::injected_count),
        }
    }
}
