//! Queue pair, host side: two rings, two doorbells and the commands in flight.
//!
//! ```text
//!              tail -> .------------.  doorbell, once per flush
//!    submit ---------> | submission | ---------------------------> controller
//!                      '------------'                                  |
//!    slots: identifier -> token                                        |
//!                      .------------.                                  |
//!    poll <----------- | completion | <--------------------------------'
//!              head -> '------------'  doorbell, once per poll or later
//! ```
//!
//! It is used for the admin queue and for every I/O queue, and belongs to one thread. The controller
//! requests states through the queue's [`QueueLinkEnd`], which costs one load per poll. Everything off
//! the fast path is detected by checks that the fast path performs anyway: a queue that must not submit
//! has no free slots, and a special command has a flag in its slot.

mod completions;
mod deadlines;
mod doorbell;
mod injection;
mod memory;
mod shadow;
mod state;
mod submissions;
#[cfg(test)]
mod tests;

/// Barrier used by `shadow`; the model of the rings substitutes a model checker's.
use core::sync::atomic as sync;
use core::sync::atomic::{Ordering, fence};

use tenmil_base::{
    CompletionBatch, CompletionRing, Dma, Doorbell, Instant, IoCompletion, IoStatus, Span,
};
use tenmil_wire::Command;

pub use doorbell::{DoorbellSide, QueueDoorbell, ShadowDoorbell, ShadowSlot};
pub use injection::{Injection, InjectionSide};
pub use memory::QueueMemory;

use crate::fast_path::FastPathOptions;
use crate::queue_link::{QueueLinkEnd, QueueState};
use crate::slot::{InvalidCompletion, SlotFlags, SlotTable, tick_of};
use injection::Injections;

/// Queue pair.
pub struct QueuePair<D: Dma, B: Doorbell> {
    submission: D::Submission,
    slots: SlotTable,
    tail: u32,
    /// Last tail written to the doorbell.
    rung_tail: u32,
    submission_depth: u32,

    completion: D::Completion,
    head: u32,
    phase: bool,
    completion_depth: u32,
    /// Completion entries consumed since the last doorbell write.
    unrung: u32,
    /// Last submission head reported by the controller.
    fetched: u32,
    techniques: FastPathOptions,

    link: QueueLinkEnd,
    /// State word of the fast path; while the queue is off the fast path, a value that the link never
    /// has.
    ordinary: u32,
    scan_at: Instant,
    polls: u64,
    idle_polls: u64,
    submission_rings: u64,
    completion_rings: u64,
    submission_doorbell: QueueDoorbell<D, B>,
    completion_doorbell: QueueDoorbell<D, B>,
    cold: Box<ColdState<D>>,
}

/// Fields off the fast path.
struct ColdState<D> {
    dma: D,
    memory: QueueMemory,
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
    nonsense_count: u64,
    nonsense: Option<InvalidCompletion>,
    overdue_count: u64,
}

/// Parts of a queue pair.
#[derive(Debug)]
pub struct QueueSetup<D, B> {
    /// The two rings.
    pub memory: QueueMemory,
    /// Tail doorbell of the submission queue.
    pub submission_doorbell: QueueDoorbell<D, B>,
    /// Head doorbell of the completion queue.
    pub completion_doorbell: QueueDoorbell<D, B>,
    /// Queue side of the link to the controller.
    pub link: QueueLinkEnd,
    /// Command timeout, after which a command is aborted.
    pub timeout: Span,
    /// Fast-path switches.
    pub techniques: FastPathOptions,
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
    pub nonsense: u64,
    /// Commands past their deadline.
    pub overdue: u64,
    /// Injected errors.
    pub injected: u64,
}

/// Tracks the commands of split requests: gets each completion of a child, and returns the completion of
/// the request after its last child.
pub(crate) trait SplitTracker {
    fn child_ended(&mut self, token: u64, outcome: IoStatus, result: u32) -> Option<IoCompletion>;
}

/// Tracker for queues without split requests.
pub(crate) struct NoSplit;

impl SplitTracker for NoSplit {
    fn child_ended(&mut self, token: u64, outcome: IoStatus, result: u32) -> Option<IoCompletion> {
        Some(IoCompletion { token, status: outcome, result })
    }
}

/// A word that the link never has.
const NEVER: u32 = u32::MAX;

impl<D: Dma, B: Doorbell> QueuePair<D, B> {
    /// Creates a queue pair over zeroed rings; rings in device memory are zeroed here. It submits nothing
    /// before its controller has set it to `Running`.
    pub fn new(dma: &D, setup: QueueSetup<D, B>) -> Self {
        let QueueSetup { memory, submission_doorbell, completion_doorbell, link, .. } = setup;
        let QueueMemory { submission_depth, completion_depth, .. } = memory;
        let mut slots = SlotTable::new(memory.in_flight_max());
        slots.close();
        let cold = ColdState {
            dma: dma.clone(),
            memory,
            standing: QueueState::Released,
            adopted: link.state_word(),
            returning: None,
            order_at: Instant::default(),
            limit_ticks: deadlines::ticks_in(setup.timeout),
            own_limits: vec![0; slots.len()].into_boxed_slice(),
            injections: None,
            nonsense_count: 0,
            nonsense: None,
            overdue_count: 0,
        };
        let mut pair = Self {
            submission: dma.submission_ring(memory.submission, submission_depth),
            slots,
            tail: 0,
            rung_tail: 0,
            submission_depth,
            completion: dma.completion_ring(memory.completion, completion_depth),
            head: 0,
            phase: true,
            completion_depth,
            unrung: 0,
            fetched: 0,
            techniques: setup.techniques,
            link,
            ordinary: NEVER,
            scan_at: Instant::default(),
            polls: 0,
            idle_polls: 0,
            submission_rings: 0,
            completion_rings: 0,
            submission_doorbell,
            completion_doorbell,
            cold: Box::new(cold),
        };
        if memory.is_in_device {
            pair.clear_submissions();
        }
        pair
    }

    /// Replaces the doorbell registers by the results of `wrap`: for a model of the path between host and
    /// register. It is generic, so it costs nothing where it is not used.
    pub fn map_registers<C: Doorbell>(self, mut wrap: impl FnMut(B) -> C) -> QueuePair<D, C> {
        QueuePair {
            submission_doorbell: self.submission_doorbell.map(&mut wrap),
            completion_doorbell: self.completion_doorbell.map(&mut wrap),
            submission: self.submission,
            slots: self.slots,
            tail: self.tail,
            rung_tail: self.rung_tail,
            submission_depth: self.submission_depth,
            completion: self.completion,
            head: self.head,
            phase: self.phase,
            completion_depth: self.completion_depth,
            unrung: self.unrung,
            fetched: self.fetched,
            techniques: self.techniques,
            link: self.link,
            ordinary: self.ordinary,
            scan_at: self.scan_at,
            polls: self.polls,
            idle_polls: self.idle_polls,
            submission_rings: self.submission_rings,
            completion_rings: self.completion_rings,
            cold: self.cold,
        }
    }

    /// Submits a command and returns its identifier. The next [`flush`](Self::flush) makes it visible to
    /// the controller.
    ///
    /// `token` is returned in the completion. Until then, the controller may access the command's memory.
    #[inline]
    pub fn submit(&mut self, now: Instant, token: u64, command: Command) -> Result<u16, QueueFull> {
        self.check_state(now);
        self.enqueue(tick_of(now), token, SlotFlags::NONE, command.with_cid(0)).ok_or(QueueFull)
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
        self.enqueue_within(now, timeout, token, command.with_cid(0)).ok_or(QueueFull)
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
        self.enqueue_fused(tick_of(now), SlotFlags::NONE, first, second).ok_or(QueueFull)
    }

    /// Handles completions, as far as `answers` has space, and checks state changes and deadlines.
    /// Returns the number of completions added.
    #[inline]
    pub fn poll(&mut self, now: Instant, answers: &mut CompletionBatch) -> usize {
        self.poll_with(now, answers, &mut NoSplit)
    }

    /// Prepares for sleeping until an interrupt: writes all pending doorbells, so that the controller has
    /// a reason to interrupt, and checks the ring once more. The thread may sleep only if this returns
    /// true.
    pub fn arm(&mut self) -> bool {
        self.flush();
        if self.unrung > 0 {
            self.ring_completion();
        }
        // The controller posts an entry and then checks whether to interrupt; the host enables interrupts
        // and then checks for an entry. With a barrier between, one of them sees the other.
        fence(Ordering::SeqCst);
        let has_order = self.link.state_word() != self.cold.adopted;
        let takes = matches!(self.cold.standing, QueueState::Running | QueueState::Quiescing);
        let has_entry = takes && self.completion.load(self.head, self.phase).is_some();
        !has_order && !has_entry
    }

    /// Time of the next poll, even without activity.
    pub fn wake_at(&self) -> Instant {
        if self.cold.returning.is_some() || self.has_injected_answers() {
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
        u32::from(self.cold.memory.in_flight_max())
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
    pub(crate) fn report_lost_writes(&self) {
        self.link.report_lost_writes();
    }

    /// Memory of the rings, which the controller frees.
    pub fn memory(&self) -> QueueMemory {
        self.cold.memory
    }

    /// Last invalid completion.
    pub fn last_invalid_completion(&self) -> Option<InvalidCompletion> {
        self.cold.nonsense
    }

    /// Statistics.
    pub fn stats(&self) -> QueueStats {
        let submission_writes = self.submission_doorbell.writes(self.submission_rings);
        let completion_writes = self.completion_doorbell.writes(self.completion_rings);
        QueueStats {
            submitted: self.slots.sent(),
            completed: self.slots.ended(),
            submission_doorbells: self.submission_rings,
            completion_doorbells: self.completion_rings,
            doorbell_registers: submission_writes + completion_writes,
            cmb_commands: if self.cold.memory.is_in_device { self.slots.sent() } else { 0 },
            polls: self.polls,
            idle_polls: self.idle_polls,
            nonsense: self.cold.nonsense_count,
            overdue: self.cold.overdue_count,
            injected: self.cold.injections.as_ref().map_or(0, Injections::count),
        }
    }
}

/// `index` advanced by `count`, which is less than `depth`.
#[inline]
const fn step(index: u32, count: u32, depth: u32) -> u32 {
    let next = index + count;
    if next < depth { next } else { next - depth }
}

/// Number of entries from `from` to `to` in a ring.
#[inline]
const fn distance(from: u32, to: u32, depth: u32) -> u32 {
    let ahead = to.wrapping_sub(from);
    if to < from { ahead.wrapping_add(depth) } else { ahead }
}
