//! A queue pair as its host sees it: two rings, two doorbells and the commands in flight.
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
//! It serves the admin queue and every I/O queue alike, and belongs to one thread. What the
//! controller half wants of it comes through its [`QueueEnd`]: one load per poll. Everything that
//! is not the ordinary course of an I/O hides behind tests that this course makes anyway: a queue
//! that may not submit has no free slots, and a command that is special has a mark in its slot.

mod completions;
mod deadlines;
mod doorbell;
mod injection;
mod memory;
mod orders;
mod shadow;
mod submissions;
#[cfg(test)]
mod tests;

/// What `shadow` takes its barrier from: a model checker's, in the model of the rings.
use core::sync::atomic as sync;
use core::sync::atomic::{Ordering, fence};

use base::{Answer, Answers, CompletionRing, Dma, Doorbell, Instant, Outcome, Span};
use wire::Command;

pub use doorbell::{QueueDoorbell, ShadowDoorbell, ShadowPlace, Side};
pub use injection::{Injection, InjectionSide};
pub use memory::QueueMemory;

use crate::link::{Order, QueueEnd};
use crate::slot::{Mark, Nonsense, SlotTable, tick_of};
use crate::techniques::Techniques;
use injection::Injections;

/// A queue pair.
pub struct QueuePair<D: Dma, B: Doorbell> {
    submission: D::Submission,
    slots: SlotTable,
    tail: u32,
    /// The tail that the controller was told last.
    rung_tail: u32,
    submission_depth: u32,
    /// Something is to be done after each command: a doorbell or a prefetch.
    is_eager: bool,

    completion: D::Completion,
    head: u32,
    phase: bool,
    completion_depth: u32,
    /// Completions taken since the controller was told so.
    unrung: u32,
    /// The last submission head that the controller reported.
    fetched: u32,
    by_line: bool,
    techniques: Techniques,

    link: QueueEnd,
    /// The order word under which nothing is out of the ordinary; never one that the link carries
    /// while something is.
    ordinary: u32,
    scan_at: Instant,
    polls: u64,
    idle_polls: u64,
    submission_rings: u64,
    completion_rings: u64,
    submission_doorbell: QueueDoorbell<D, B>,
    completion_doorbell: QueueDoorbell<D, B>,
    cold: Box<Cold<D>>,
}

/// What an ordinary I/O does not touch.
struct Cold<D> {
    dma: D,
    memory: QueueMemory,
    /// The order that was adopted last, in words and as the link carries it.
    standing: Order,
    adopted: u32,
    /// While parked commands are being answered: the slot to look at next.
    returning: Option<usize>,
    /// When to look for the next order, while the one that stands is not to run.
    order_at: Instant,
    limit_ticks: u32,
    /// The limits of commands that have their own, by slot.
    own_limits: Box<[u32]>,
    injections: Option<Injections>,
    nonsense_count: u64,
    nonsense: Option<Nonsense>,
    overdue_count: u64,
}

/// What a queue pair is made of.
#[derive(Debug)]
pub struct QueueSetup<D, B> {
    /// The two rings.
    pub memory: QueueMemory,
    /// The submission queue's tail doorbell.
    pub submission_doorbell: QueueDoorbell<D, B>,
    /// The completion queue's head doorbell.
    pub completion_doorbell: QueueDoorbell<D, B>,
    /// The queue's end of the link to its controller.
    pub link: QueueEnd,
    /// How long a command may take before it is aborted.
    pub timeout: Span,
    /// What makes it fast.
    pub techniques: Techniques,
}

/// The queue takes no command now: all identifiers are in flight, or its controller has told it to
/// stop. The command is the caller's again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// What a queue pair has counted since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Commands handed in.
    pub submitted: u64,
    /// Commands that have ended, one way or another.
    pub completed: u64,
    /// Times the submission doorbell was rung.
    pub submission_doorbells: u64,
    /// Times the completion doorbell was rung.
    pub completion_doorbells: u64,
    /// How many of both were written to a register.
    pub doorbell_registers: u64,
    /// How many of the commands were stored into the controller memory buffer: all, or none.
    pub cmb_commands: u64,
    /// Polls.
    pub polls: u64,
    /// Polls that found nothing.
    pub idle_polls: u64,
    /// Completions that could not be.
    pub nonsense: u64,
    /// Commands that missed their deadline.
    pub overdue: u64,
    /// Errors injected.
    pub injected: u64,
}

/// Whoever splits requests into several commands: told of each that has ended, it says whether the
/// request has, too.
pub(crate) trait Parents {
    fn child_ended(&mut self, token: u64, outcome: Outcome, result: u32) -> Option<Answer>;
}

/// For queues on which nothing is split.
pub(crate) struct NoParents;

impl Parents for NoParents {
    fn child_ended(&mut self, token: u64, outcome: Outcome, result: u32) -> Option<Answer> {
        Some(Answer { token, outcome, result })
    }
}

/// A word that the link never carries.
const NEVER: u32 = u32::MAX;

impl<D: Dma, B: Doorbell> QueuePair<D, B> {
    /// A queue pair over zeroed rings; one in memory of the device's own is zeroed here. It submits
    /// nothing before its controller has ordered it to run.
    pub fn new(dma: &D, setup: QueueSetup<D, B>) -> Self {
        let QueueSetup { memory, submission_doorbell, completion_doorbell, link, .. } = setup;
        let QueueMemory { submission_depth, completion_depth, .. } = memory;
        let mut slots = SlotTable::new(memory.in_flight_max());
        slots.close();
        let cold = Cold {
            dma: dma.clone(),
            memory,
            standing: Order::Release,
            adopted: link.word(),
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
            is_eager: setup.techniques.is_eager(),
            completion: dma.completion_ring(memory.completion, completion_depth),
            head: 0,
            phase: true,
            completion_depth,
            unrung: 0,
            fetched: 0,
            by_line: setup.techniques.takes_lines(),
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

    /// The same queue pair, which rings what `wrap` makes of its doorbell registers: for a model of
    /// what lies between a host and a register. No doorbell pays for what another one is.
    pub fn map_registers<C: Doorbell>(self, mut wrap: impl FnMut(B) -> C) -> QueuePair<D, C> {
        QueuePair {
            submission_doorbell: self.submission_doorbell.map(&mut wrap),
            completion_doorbell: self.completion_doorbell.map(&mut wrap),
            submission: self.submission,
            slots: self.slots,
            tail: self.tail,
            rung_tail: self.rung_tail,
            submission_depth: self.submission_depth,
            is_eager: self.is_eager,
            completion: self.completion,
            head: self.head,
            phase: self.phase,
            completion_depth: self.completion_depth,
            unrung: self.unrung,
            fetched: self.fetched,
            by_line: self.by_line,
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

    /// Hands in a command and returns the identifier it was given. The controller hears of it at
    /// the next [`flush`](Self::flush).
    ///
    /// `token` comes back with the answer. Until then the controller may touch the memory that the
    /// command names.
    #[inline]
    pub fn submit(&mut self, now: Instant, token: u64, command: Command) -> Result<u16, Full> {
        self.heed(now);
        self.enqueue(tick_of(now), token, Mark::NONE, command.with_cid(0)).ok_or(Full)
    }

    /// As [`submit`](Self::submit), with a time limit of its own. A limit of [`Instant::NEVER`]'s
    /// nanoseconds is none, as an Asynchronous Event Request wants it.
    pub fn submit_within(
        &mut self,
        now: Instant,
        timeout: Span,
        token: u64,
        command: Command,
    ) -> Result<u16, Full> {
        self.heed(now);
        self.enqueue_within(now, timeout, token, command.with_cid(0)).ok_or(Full)
    }

    /// Hands in both halves of a fused operation, or neither: they lie in adjacent entries and the
    /// doorbell is rung for both at once (Base 2.1 §3.4.2).
    pub fn submit_fused(
        &mut self,
        now: Instant,
        first: (u64, Command),
        second: (u64, Command),
    ) -> Result<[u16; 2], Full> {
        self.heed(now);
        self.enqueue_fused(tick_of(now), Mark::NONE, first, second).ok_or(Full)
    }

    /// Takes what has completed, as far as there is room for answers, and looks after orders and
    /// deadlines. Returns how many answers were added.
    #[inline]
    pub fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        self.poll_with(now, answers, &mut NoParents)
    }

    /// Gets ready to sleep until the controller interrupts: tells it everything that it has not
    /// heard, so that it has a reason to interrupt, and looks at the ring once more. Only if this
    /// returns true is there nothing to do.
    pub fn arm(&mut self) -> bool {
        self.flush();
        if self.unrung > 0 {
            self.ring_completion();
        }
        // The controller posts and then looks whether to interrupt; we ask for interrupts and then
        // look whether it has posted.
        fence(Ordering::SeqCst);
        let has_order = self.link.word() != self.cold.adopted;
        let takes = matches!(self.cold.standing, Order::Run | Order::Quiesce);
        let has_entry = takes && self.completion.load(self.head, self.phase).is_some();
        !has_order && !has_entry
    }

    /// When to poll even if nothing happens.
    pub fn wake_at(&self) -> Instant {
        if self.cold.returning.is_some() || self.has_injected_answers() {
            Instant::default()
        } else {
            match self.cold.standing {
                Order::Run if self.slots.in_flight() > 0 => self.scan_at,
                // All identifiers are kept back until their Aborts have ended.
                Order::Run if self.slots.next_index().is_none() => self.scan_at,
                Order::Run | Order::Dead => Instant::NEVER,
                Order::Quiesce | Order::Freeze | Order::Release => self.cold.order_at,
            }
        }
    }

    /// How many commands are in flight or parked.
    #[inline]
    pub fn in_flight(&self) -> u32 {
        self.slots.in_flight()
    }

    /// How many can be in flight.
    pub fn depth(&self) -> u32 {
        u32::from(self.cold.memory.in_flight_max())
    }

    /// The order that is being followed.
    pub fn standing(&self) -> Order {
        self.cold.standing
    }

    /// Whether completed writes may be lost with the controller's cache, for which no flush has failed.
    pub fn has_lost_writes(&self) -> bool {
        self.link.has_lost_writes()
    }

    /// A flush fails for them.
    pub(crate) fn report_lost_writes(&self) {
        self.link.report_lost_writes();
    }

    /// The memory of the rings, which the controller half releases.
    pub fn memory(&self) -> QueueMemory {
        self.cold.memory
    }

    /// The last completion that could not be.
    pub fn last_nonsense(&self) -> Option<Nonsense> {
        self.cold.nonsense
    }

    /// What has happened so far.
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

/// `index` moved on by `count`, which is less than `depth`.
#[inline]
const fn step(index: u32, count: u32, depth: u32) -> u32 {
    let next = index + count;
    if next < depth { next } else { next - depth }
}

/// How many entries lie between `from` and `to` in a ring.
#[inline]
const fn distance(from: u32, to: u32, depth: u32) -> u32 {
    let ahead = to.wrapping_sub(from);
    if to < from { ahead.wrapping_add(depth) } else { ahead }
}
