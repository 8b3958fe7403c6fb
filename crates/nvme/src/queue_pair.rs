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

mod deadlines;
mod doorbell;
mod injection;
mod memory;
mod orders;
#[cfg(test)]
mod tests;

use core::sync::atomic::{Ordering, fence};

use base::{
    Answer, Answers, CompletionRing, Dma, Doorbell, Instant, Outcome, Span, SubmissionRing,
};
use wire::Command;

pub use doorbell::{QueueDoorbell, ShadowDoorbell, ShadowPlace, Side};
pub use injection::{Injection, InjectionSide};
pub use memory::QueueMemory;

use crate::link::{Order, QueueEnd, ResetReason};
use crate::slot::{Mark, Nonsense, SlotTable, tick_of};
use crate::techniques::{CompletionDoorbell, Techniques};
use injection::Injections;

/// A queue pair.
pub struct QueuePair<D: Dma, B: Doorbell> {
    submission: D::Submission,
    slots: SlotTable,
    tail: u32,
    /// The tail that the controller was told last.
    rung_tail: u32,
    submission_depth: u32,
    batching: bool,
    prefetch_ahead: u32,

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
    ended: u64,
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
    /// A queue pair over zeroed rings. It submits nothing before its controller has ordered it to
    /// run.
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
            limit_ticks: deadlines::ticks_in(setup.timeout),
            own_limits: vec![0; slots.len()].into_boxed_slice(),
            injections: None,
            nonsense_count: 0,
            nonsense: None,
            overdue_count: 0,
        };
        Self {
            submission: dma.submission_ring(memory.submission, submission_depth),
            slots,
            tail: 0,
            rung_tail: 0,
            submission_depth,
            batching: setup.techniques.doorbell_batching,
            prefetch_ahead: setup.techniques.submission_prefetch.min(submission_depth - 1),
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
            ended: 0,
            polls: 0,
            idle_polls: 0,
            submission_rings: 0,
            completion_rings: 0,
            submission_doorbell,
            completion_doorbell,
            cold: Box::new(cold),
        }
    }

    /// Hands in a command and returns the identifier it was given. The controller hears of it at
    /// the next [`flush`](Self::flush).
    ///
    /// `token` comes back with the answer. Until then the controller may touch the memory that the
    /// command names.
    #[inline]
    pub fn submit(&mut self, now: Instant, token: u64, command: Command) -> Result<u16, Full> {
        self.heed();
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
        self.heed();
        self.enqueue_within(now, timeout, token, Mark::NONE, command.with_cid(0)).ok_or(Full)
    }

    /// Hands in both halves of a fused operation, or neither: they lie in adjacent entries and the
    /// doorbell is rung for both at once (Base 2.1 §3.4.2).
    pub fn submit_fused(
        &mut self,
        now: Instant,
        first: (u64, Command),
        second: (u64, Command),
    ) -> Result<[u16; 2], Full> {
        self.heed();
        self.enqueue_fused(tick_of(now), Mark::NONE, first, second).ok_or(Full)
    }

    /// Tells the controller of everything submitted so far.
    #[inline]
    pub fn flush(&mut self) {
        if self.tail != self.rung_tail {
            self.ring_submission();
        }
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
        !has_order && self.completion.load(self.head, self.phase).is_none()
    }

    /// When to poll even if nothing happens.
    pub fn wake_at(&self) -> Instant {
        if self.cold.returning.is_some() || self.has_injected_answers() {
            Instant::default()
        } else if self.slots.in_flight() > 0 {
            self.scan_at
        } else {
            Instant::NEVER
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
        QueueStats {
            submitted: self.ended + u64::from(self.slots.in_flight()),
            completed: self.ended,
            submission_doorbells: self.submission_rings,
            completion_doorbells: self.completion_rings,
            polls: self.polls,
            idle_polls: self.idle_polls,
            nonsense: self.cold.nonsense_count,
            overdue: self.cold.overdue_count,
            injected: self.cold.injections.as_ref().map_or(0, Injections::count),
        }
    }

    /// Adopts a new order, if there is one. Once per batch, before commands go in.
    #[inline]
    pub(crate) fn heed(&mut self) {
        if self.link.word() != self.ordinary {
            self.adopt_order();
        }
    }

    /// The index that the next command will have, so that its list can be written first.
    #[inline]
    pub(crate) fn next_index(&self) -> Option<usize> {
        self.slots.next_index()
    }

    /// As [`next_index`](Self::next_index), for a fused pair.
    pub(crate) fn next_two_indexes(&self) -> Option<[usize; 2]> {
        self.slots.next_two_indexes()
    }

    /// Puts a command, whose identifier field is zero, into the ring.
    #[inline]
    pub(crate) fn enqueue(
        &mut self,
        tick: u32,
        token: u64,
        mark: Mark,
        mut command: Command,
    ) -> Option<u16> {
        let Some(cid) = self.slots.take(token, tick, mark) else {
            return self.enqueue_injected(tick, token, mark, command);
        };
        command.0[0] |= u64::from(cid) << 16;
        self.put(&command);
        if !self.batching {
            self.flush();
        }
        Some(cid)
    }

    /// As [`enqueue`](Self::enqueue), with a time limit of its own.
    pub(crate) fn enqueue_within(
        &mut self,
        now: Instant,
        timeout: Span,
        token: u64,
        mark: Mark,
        command: Command,
    ) -> Option<u16> {
        let cid = self.enqueue(tick_of(now), token, mark.and(Mark::TIMED), command)?;
        self.limit(now, cid, timeout);
        Some(cid)
    }

    /// Puts both halves of a fused operation into the ring, or neither.
    pub(crate) fn enqueue_fused(
        &mut self,
        tick: u32,
        mark: Mark,
        first: (u64, Command),
        second: (u64, Command),
    ) -> Option<[u16; 2]> {
        if self.slots.next_two_indexes().is_none() || self.cold.standing != Order::Run {
            return None;
        }
        // No doorbell between the two, whatever the technique, and no injection into a pair.
        let was_closed = self.slots.is_closed();
        self.slots.open();
        let cids = [(first, wire::Fuse::First), (second, wire::Fuse::Second)].map(
            |((token, command), fuse)| {
                let cid = self.slots.take(token, tick, mark)?;
                self.put(&command.with_fuse(fuse).with_cid(cid));
                Some(cid)
            },
        );
        if was_closed {
            self.slots.close();
        }
        if !self.batching {
            self.flush();
        }
        match cids {
            [Some(first), Some(second)] => Some([first, second]),
            _ => unreachable!("two slots were free"),
        }
    }

    #[inline]
    fn put(&mut self, command: &Command) {
        self.submission.store(self.tail, &command.0);
        self.tail = step(self.tail, 1, self.submission_depth);
        if self.prefetch_ahead != 0 {
            self.submission.prefetch(step(self.tail, self.prefetch_ahead, self.submission_depth));
        }
    }

    #[inline]
    pub(crate) fn poll_with<P: Parents>(
        &mut self,
        now: Instant,
        answers: &mut Answers,
        parents: &mut P,
    ) -> usize {
        self.polls += 1;
        let room = answers.room();
        if self.link.word() != self.ordinary {
            self.poll_ordered(now, answers, parents);
        } else {
            if now >= self.scan_at {
                self.scan(now);
            }
            self.take_completions(answers, parents);
        }
        let count = room - answers.room();
        self.idle_polls += u64::from(count == 0);
        count
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "at most as many as the ring has entries")]
    fn take_completions<P: Parents>(&mut self, answers: &mut Answers, parents: &mut P) {
        // Each completion gives at most one answer, and nonsense must not keep us here for ever.
        let budget = answers.room().min(self.completion_depth as usize);
        let mut line = [[0; 4]; 4];
        let mut taken = 0;
        while taken < budget {
            let count = self.load(&mut line).min(budget - taken);
            if count == 0 {
                break;
            }
            let entries = &line[..count];
            if self.techniques.slot_lookahead {
                entries.iter().for_each(|entry| self.slots.touch(low_half(entry[3])));
            }
            for entry in entries {
                self.end(entry, answers, parents);
            }
            taken += count;
            self.advance(count as u32);
        }
        if self.unrung > 0 && self.techniques.completion_doorbell == CompletionDoorbell::Poll {
            self.ring_completion();
        }
    }

    /// Copies completions out of their ring and returns how many.
    #[inline]
    fn load(&self, line: &mut [[u32; 4]; 4]) -> usize {
        if self.by_line {
            return self.completion.load_line(self.head, self.phase, line);
        }
        let Some(entry) = self.completion.load(self.head, self.phase) else { return 0 };
        line[0] = entry;
        1
    }

    /// Ends the command that a completion names.
    #[inline]
    fn end<P: Parents>(&mut self, entry: &[u32; 4], answers: &mut Answers, parents: &mut P) {
        let [result, _, head, cid_status] = *entry;
        self.note_fetched(low_half(head));
        match self.slots.complete(low_half(cid_status)) {
            Ok(ended) => {
                self.ended += 1;
                let outcome = Outcome(low_half(cid_status >> 17));
                if ended.mark == Mark::NONE {
                    answers.push(Answer { token: ended.token, outcome, result });
                } else {
                    let outcome = self.injected_outcome(low_half(cid_status), ended.mark, outcome);
                    end_special(ended, outcome, result, answers, parents);
                }
            }
            Err(nonsense) => self.report(nonsense),
        }
    }

    /// Checks how far the controller says it has read (SQHD): between where it was and our tail.
    #[inline]
    fn note_fetched(&mut self, head: u16) {
        let head = u32::from(head);
        let unfetched = distance(head, self.tail, self.submission_depth);
        let before = distance(self.fetched, self.tail, self.submission_depth);
        if head >= self.submission_depth || unfetched > before {
            self.report(Nonsense::SubmissionHead { head: low_half(head) });
        } else {
            self.fetched = head;
        }
    }

    #[inline]
    fn advance(&mut self, count: u32) {
        self.head += count;
        self.unrung += count;
        if self.head >= self.completion_depth {
            self.head = 0;
            self.phase = !self.phase;
        }
        if self.techniques.completion_prefetch {
            self.completion.prefetch(self.head);
        }
        if self.techniques.completion_doorbell == CompletionDoorbell::Each {
            self.ring_completion();
        }
    }

    /// The controller can post as many completions as are in flight. If it might find fewer free
    /// entries than that, it has to hear how many we have taken before it hears of new commands.
    #[inline]
    fn ring_submission(&mut self) {
        if self.unrung + self.slots.in_flight() >= self.completion_depth {
            self.ring_completion();
        }
        self.submission.publish();
        self.submission_doorbell.ring(self.tail);
        self.rung_tail = self.tail;
        self.submission_rings += 1;
    }

    #[inline]
    fn ring_completion(&mut self) {
        self.completion_doorbell.ring(self.head);
        self.unrung = 0;
        self.completion_rings += 1;
    }

    /// A completion that cannot be is counted and skipped, and the controller half is asked for a
    /// reset.
    #[cold]
    fn report(&mut self, nonsense: Nonsense) {
        self.cold.nonsense_count += 1;
        self.cold.nonsense = Some(nonsense);
        self.link.want_reset(ResetReason::Nonsense(nonsense));
    }
}

#[cold]
fn end_special<P: Parents>(
    ended: crate::slot::Ended,
    outcome: Outcome,
    result: u32,
    answers: &mut Answers,
    parents: &mut P,
) {
    let answer = if ended.mark.has(Mark::CHILD) {
        parents.child_ended(ended.token, outcome, result)
    } else {
        Some(Answer { token: ended.token, outcome, result })
    };
    if let Some(answer) = answer {
        answers.push(answer);
    }
}

/// `index` moved on by `count`, which is less than `depth`.
#[inline]
const fn step(index: u32, count: u32, depth: u32) -> u32 {
    let next = index + count;
    if next >= depth { next - depth } else { next }
}

/// How many entries lie between `from` and `to` in a ring.
#[inline]
const fn distance(from: u32, to: u32, depth: u32) -> u32 {
    let ahead = to.wrapping_sub(from);
    if to < from { ahead.wrapping_add(depth) } else { ahead }
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
const fn low_half(word: u32) -> u16 {
    word as u16
}
