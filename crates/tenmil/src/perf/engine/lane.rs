//! One queue pair under load: the loop that everything else in `perf` stands around.
//!
//! ```text
//!   poll ──> answers ──> for each: count, time, draw the next ──> requests ──> submit, flush
//!                          │                                        │
//!                          └── token = index of the task ───────────┘
//! ```
//!
//! A task is one I/O in flight: it owns a buffer for as long as the run lasts, and its index is the
//! token. The clock is read once for each batch of answers. All tasks that were submitted in one
//! batch carry the same stamp, so their latencies are counted as a run and not one by one.

mod alone;

use std::collections::BTreeMap;

use base::{
    Answer, Answers, Backend, Flags, Histogram, Instant, Operation, Outcome, Request, Segment,
    Span, WakeSource,
};
use host::Clock;

pub(super) use self::alone::Bounds;
use super::scrutiny::Scrutiny;
use crate::perf::arrivals::Arrivals;
use crate::perf::outcome::{Counts, Turns};
use crate::perf::workload::{self, Draw, Workload};

/// A queue pair, its tasks, and what they have done.
pub(super) struct Lane<S> {
    backend: Box<dyn Backend>,
    addresses: workload::Lane,
    /// When each task's I/O was submitted, or was meant to be, in nanoseconds.
    sent: Box<[u64]>,
    tasks: Box<[Task]>,
    /// What all I/Os have in common, where they do: then no task needs to remember it.
    fixed: Option<Fixed>,
    /// Segment `index` is the buffer of task `index`, as long as its present I/O.
    segments: Box<[Segment]>,
    /// Drawn and not yet taken by the backend.
    requests: Vec<Request>,
    /// The request that went alone last. With one I/O in flight only its address is new each time,
    /// and whoever takes it need not wait for the stores of the rest.
    again: Request,
    answers: Answers,
    /// Tasks that wait for an arrival; empty in a closed loop.
    idle: Vec<u32>,
    /// I/Os that may still be started.
    budget: u64,
    in_flight: u32,
    /// Whether to load the tasks of a batch before working on them.
    look_at_tasks: bool,
    scrutiny: S,
    sums: Sums,
    /// Since the lane was made; the doorbells are the backend's to count.
    turns: Turns,
}

/// One I/O in flight.
#[derive(Clone, Copy, Debug)]
struct Task {
    len_bytes: u32,
    operation: Operation,
}

/// The one kind of I/O of a lane.
#[derive(Clone, Copy, Debug)]
struct Fixed {
    operation: Operation,
    len_bytes: u32,
    blocks: u32,
    segment_count: u16,
}

/// What a lane has counted since it was last cleared.
#[derive(Clone, Debug, Default)]
pub(super) struct Sums {
    pub(super) latency: BTreeMap<Operation, Histogram>,
    pub(super) bytes: u64,
    pub(super) errors: BTreeMap<u16, u64>,
    /// The longest that one batch took from its stamp to its doorbell.
    pub(super) longest_batch: Span,
    /// Of an open loop: started late because no task was idle.
    pub(super) delayed: u64,
    /// Of an open loop: when last no task was idle.
    full_until: Instant,
    /// The operation that was counted last, kept at hand.
    recent: Option<(Operation, Histogram)>,
}

/// How often a task draws another address because somebody is at the blocks it drew, before it rests
/// until the next turn.
const REDRAWS_MAX: u32 = 64;

/// Answers in a row with the same operation and the same stamp.
#[derive(Clone, Copy)]
struct Run {
    sent_ns: u64,
    operation: Operation,
    count: u64,
}

/// Answers of one batch, cut into runs of the same stamp: only where one ends is there anything to
/// do.
struct Runs {
    stamp: Instant,
    operation: Operation,
    /// The index in its batch of the answer that the present run began with.
    first: usize,
    /// When the I/Os of the present run were sent.
    sent_ns: u64,
    /// Good answers in the runs that have ended.
    good: u64,
}

/// A time at which nothing is ever sent.
const NO_STAMP: u64 = u64::MAX;

/// What a lane is made of.
pub(super) struct LaneParts<S> {
    pub(super) backend: Box<dyn Backend>,
    pub(super) addresses: workload::Lane,
    pub(super) buffers: Vec<Segment>,
    pub(super) budget: u64,
    pub(super) look_at_tasks: bool,
    pub(super) scrutiny: S,
    /// The one operation and size of all I/Os, if there is only one of each.
    pub(super) fixed: Option<(Operation, u32)>,
}

impl<S: Scrutiny> Lane<S> {
    /// A lane with a task for each buffer, all idle.
    pub(super) fn new(parts: LaneParts<S>) -> Self {
        let depth = parts.buffers.len();
        let block_size = parts.backend.limits().block_size;
        let task = Task { len_bytes: 0, operation: Operation::Read };
        let tasks = u32::try_from(depth).expect("a depth is a small number");
        Self {
            backend: parts.backend,
            addresses: parts.addresses,
            sent: vec![0; depth].into(),
            tasks: vec![task; depth].into(),
            fixed: parts
                .fixed
                .map(|(operation, len_bytes)| Fixed::new(operation, len_bytes, block_size)),
            segments: parts.buffers.into(),
            requests: Vec::with_capacity(depth),
            again: Request::NOTHING,
            answers: Answers::with_capacity(depth),
            idle: (0..tasks).rev().collect(),
            budget: parts.budget,
            in_flight: 0,
            look_at_tasks: parts.look_at_tasks,
            scrutiny: parts.scrutiny,
            sums: Sums::default(),
            turns: Turns::default(),
        }
    }

    /// Starts as many I/Os as there are idle tasks: what a closed loop begins with.
    pub(super) fn fill(&mut self, now: Instant, workload: &mut Workload) {
        let mut waiting = std::mem::take(&mut self.idle);
        while let Some(task) = waiting.pop() {
            self.start(task, now, workload);
        }
        self.submit(now);
    }

    /// One turn of a closed loop: every I/O that has ended is followed by another. Returns how many
    /// that were, and what the time was when the clock was last read.
    #[inline]
    pub(super) fn turn(
        &mut self,
        now: Instant,
        clock: &Clock,
        workload: &mut Workload,
    ) -> (usize, Instant) {
        let count = self.backend.poll(now, &mut self.answers);
        self.turns.polls += 1;
        if count == 0 {
            self.turns.idle_polls += 1;
            if !(self.requests.is_empty() && self.idle.is_empty()) {
                self.fill(now, workload);
            }
            return (0, now);
        }
        let stamp = clock.now();
        match self.fixed {
            Some(fixed) if !S::IS_ON && self.budget >= count as u64 => {
                if count == 1 && self.requests.is_empty() {
                    self.repeat_one(stamp, fixed, workload);
                    return (1, stamp);
                }
                self.repeat(stamp, fixed, workload);
            }
            _ => self.take(stamp, |lane, task| lane.start(task, stamp, workload)),
        }
        self.submit(stamp);
        if count == 1 {
            return (1, stamp);
        }
        let end = clock.now();
        self.sums.longest_batch = self.sums.longest_batch.max(end.since(stamp));
        (count, end)
    }

    /// Where all I/Os are of one kind: each that has ended is followed by another like it, and only
    /// its address is new.
    #[inline]
    fn repeat(&mut self, stamp: Instant, fixed: Fixed, workload: &mut Workload) {
        if let Some(kept) = workload.uniform() {
            // A copy, so that it is in a register for as long as the loop lasts.
            let mut random = kept.clone();
            self.repeat_at(stamp, fixed, |lane| lane.uniform(&mut random));
            *kept = random;
        } else {
            self.repeat_at(stamp, fixed, |lane| workload.address(lane, fixed.blocks));
        }
    }

    /// [`repeat`](Self::repeat), at the addresses that `address` draws.
    #[inline]
    fn repeat_at(
        &mut self,
        stamp: Instant,
        fixed: Fixed,
        mut address: impl FnMut(&mut workload::Lane) -> u64,
    ) {
        let answers = std::mem::replace(&mut self.answers, Answers::with_capacity(0));
        let answered = answers.as_slice();
        if self.look_at_tasks {
            answered.iter().for_each(|answer| {
                std::hint::black_box(self.sent[index_of(answer.token)]);
            });
        }
        let Self { sent, requests, addresses, sums, .. } = self;
        let Fixed { operation, len_bytes, .. } = fixed;
        let mut runs = Runs { stamp, operation, first: 0, sent_ns: NO_STAMP, good: 0 };
        requests.extend(answered.iter().enumerate().map(|(index, answer)| {
            let sent_ns = std::mem::replace(&mut sent[index_of(answer.token)], stamp.ns);
            // Something has changed or gone wrong: both in one comparison.
            if sent_ns ^ runs.sent_ns | u64::from(answer.outcome.0) != 0 {
                runs.turn(sums, index, sent_ns, answer);
            }
            fixed.request(answer.token, address(addresses))
        }));
        runs.end(sums, answered.len());
        sums.bytes += runs.good * u64::from(len_bytes);
        self.turns.completions += answered.len() as u64;
        self.budget -= answered.len() as u64;
        self.answers = answers;
        self.answers.clear();
    }

    /// One turn of an open loop: I/Os start when they arrive, and are timed from then. Returns how
    /// many ended or started, and what the time was when the clock was last read.
    pub(super) fn turn_open(
        &mut self,
        now: Instant,
        clock: &Clock,
        workload: &mut Workload,
        arrivals: &mut Arrivals,
    ) -> (usize, Instant) {
        let count = self.backend.poll(now, &mut self.answers);
        self.turns.polls += 1;
        self.turns.idle_polls += u64::from(count == 0);
        let stamp = clock.now();
        self.take(stamp, |lane, task| lane.idle.push(task));
        let waiting = self.budget;
        while self.budget > 0 && arrivals.next_due() <= stamp {
            let Some(task) = self.idle.pop() else {
                self.sums.full_until = stamp;
                break;
            };
            let Some(intended) = arrivals.due(stamp) else { break };
            self.sums.delayed += u64::from(intended <= self.sums.full_until);
            self.start(task, intended, workload);
        }
        self.submit(stamp);
        (count + usize::try_from(waiting - self.budget).unwrap_or(usize::MAX), stamp)
    }

    /// What wakes a thread that waits for this lane.
    pub(super) fn wake_source(&self) -> WakeSource<'_> {
        self.backend.wake_source()
    }

    /// Whether a thread that waits for it sleeps at once: [`Backend::is_done_by_kernel`].
    pub(super) fn is_done_by_kernel(&self) -> bool {
        self.backend.is_done_by_kernel()
    }

    /// Gets ready for a sleep: [`Backend::arm`].
    pub(super) fn arm(&mut self) -> bool {
        !self.requests.is_empty() || self.backend.arm()
    }

    /// The sleep is over.
    pub(super) fn disarm(&mut self) {
        self.backend.disarm();
    }

    /// When it wants a turn even if nothing happens.
    pub(super) fn wake_at(&self) -> Instant {
        self.backend.wake_at()
    }

    /// Takes what has ended and starts nothing: the end of a run.
    pub(super) fn drain(&mut self, now: Instant) {
        self.in_flight -= u32::try_from(self.requests.len()).unwrap_or(0);
        for request in self.requests.drain(..) {
            self.scrutiny.ended(Outcome::ABORTED, index_of(request.token), Segment::default());
        }
        self.backend.flush();
        self.backend.poll(now, &mut self.answers);
        self.take(now, |lane, task| lane.idle.push(task));
    }

    /// How often each thing has happened since the lane was made.
    pub(super) fn turns(&self) -> Turns {
        let rung = self.backend.doorbells();
        Turns {
            submission_doorbells: rung.submission,
            completion_doorbells: rung.completion,
            doorbell_registers: rung.registers,
            cmb_commands: rung.cmb_commands,
            ..self.turns
        }
    }

    /// What looks at the data.
    pub(super) fn scrutiny(&self) -> &S {
        &self.scrutiny
    }

    /// I/Os that have been started and have not ended.
    pub(super) fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Whether every I/O that it may start has ended.
    pub(super) fn is_done(&self) -> bool {
        self.budget == 0 && self.in_flight == 0
    }

    /// Forgets what was counted: the end of the warm-up.
    pub(super) fn clear(&mut self) {
        self.sums = Sums::default();
    }

    /// The plain sums of what was counted.
    pub(super) fn counts(&self) -> Counts {
        self.sums.counts()
    }

    /// What was counted.
    pub(super) fn sums(&self) -> Sums {
        let mut sums = self.sums.clone();
        sums.settle();
        sums
    }

    /// Goes through the answers: counts each, and hands its task on.
    #[inline]
    fn take(&mut self, now: Instant, mut next: impl FnMut(&mut Self, u32)) {
        let answers = std::mem::replace(&mut self.answers, Answers::with_capacity(0));
        if self.look_at_tasks {
            for answer in answers.as_slice() {
                std::hint::black_box(self.sent[index_of(answer.token)]);
            }
        }
        let mut run = Run { sent_ns: 0, operation: Operation::Read, count: 0 };
        for answer in answers.as_slice() {
            let index = index_of(answer.token);
            let (sent_ns, Task { len_bytes, operation }) = (self.sent[index], self.tasks[index]);
            if answer.outcome.is_success() {
                if sent_ns != run.sent_ns || operation != run.operation {
                    self.sums.count(run, now);
                    run = Run { sent_ns, operation, count: 0 };
                }
                run.count += 1;
                self.sums.bytes += u64::from(len_bytes);
            } else {
                self.sums.fail(answer.outcome);
            }
            if S::IS_ON {
                self.scrutiny.ended(answer.outcome, index, self.segments[index]);
            }
            #[expect(clippy::cast_possible_truncation, reason = "an index of the task table")]
            next(self, answer.token as u32);
        }
        self.sums.count(run, now);
        let count = answers.as_slice().len();
        self.turns.completions += count as u64;
        self.in_flight -= u32::try_from(count).unwrap_or(0);
        self.answers = answers;
        self.answers.clear();
    }

    /// Draws the next I/O for `task` and puts it with the requests, or lets the task rest if there
    /// is nothing more to do, or nothing that may be done now.
    #[inline]
    fn start(&mut self, task: u32, sent: Instant, workload: &mut Workload) {
        if self.budget == 0 {
            return;
        }
        let mut draw = workload.draw(&mut self.addresses);
        if S::IS_ON {
            let tries = (0..REDRAWS_MAX).find(|_| {
                self.scrutiny.may_start(&draw, task as usize) || {
                    draw = workload.draw(&mut self.addresses);
                    false
                }
            });
            if tries.is_none() {
                self.idle.push(task);
                return;
            }
        }
        self.put(task, sent, draw);
    }

    #[inline]
    fn put(&mut self, task: u32, sent: Instant, draw: Draw) {
        let index = task as usize;
        let Draw { operation, lba, blocks, len_bytes } = draw;
        self.sent[index] = sent.ns;
        self.tasks[index] = Task { len_bytes, operation };
        self.segments[index].len_bytes = len_bytes;
        if S::IS_ON {
            self.scrutiny.starts(&draw, self.segments[index]);
        }
        self.budget -= 1;
        self.in_flight += 1;
        let moves_data = matches!(operation, Operation::Read | Operation::Write);
        self.requests.push(Request {
            token: u64::from(task),
            lba,
            operand: 0,
            blocks,
            segment_first: task,
            segment_count: u16::from(moves_data),
            metadata_count: 0,
            operation,
            flags: Flags::NONE,
        });
    }

    /// Hands over what was drawn; what the backend has no room for stays for the next turn.
    #[inline]
    fn submit(&mut self, now: Instant) {
        let taken = self.backend.submit(now, &self.requests, &self.segments);
        self.backend.flush();
        if taken == self.requests.len() {
            self.requests.clear();
        } else {
            self.requests.drain(..taken);
        }
    }
}

impl Runs {
    /// The answer with this index begins another run, or is bad and in none.
    #[inline(never)]
    fn turn(&mut self, sums: &mut Sums, index: usize, sent_ns: u64, answer: &Answer) {
        self.end(sums, index);
        if answer.outcome.is_success() {
            (self.first, self.sent_ns) = (index, sent_ns);
        } else {
            sums.fail(answer.outcome);
            (self.first, self.sent_ns) = (index + 1, NO_STAMP);
        }
    }

    /// Counts the present run, which ends before the answer with this index.
    fn end(&mut self, sums: &mut Sums, index: usize) {
        let count = (index - self.first) as u64;
        let Self { sent_ns, operation, .. } = *self;
        sums.count(Run { sent_ns, operation, count }, self.stamp);
        self.good += count;
    }
}

impl Fixed {
    fn new(operation: Operation, len_bytes: u32, block_size: u32) -> Self {
        let moves_data = matches!(operation, Operation::Read | Operation::Write);
        let blocks = len_bytes >> block_size.trailing_zeros();
        Self { operation, len_bytes, blocks, segment_count: u16::from(moves_data) }
    }

    /// The next I/O of the task that `token` names.
    #[inline(always)]
    fn request(self, token: u64, lba: u64) -> Request {
        #[expect(clippy::cast_possible_truncation, reason = "an index of the task table")]
        let segment_first = token as u32;
        Request {
            token,
            lba,
            operand: 0,
            segment_first,
            blocks: self.blocks,
            segment_count: self.segment_count,
            metadata_count: 0,
            operation: self.operation,
            flags: Flags::NONE,
        }
    }
}

impl Sums {
    /// Counts a run of answers that ended at `now`.
    #[inline]
    fn count(&mut self, run: Run, now: Instant) {
        if run.count == 0 {
            return;
        }
        if self.recent.as_ref().is_none_or(|(operation, _)| *operation != run.operation) {
            self.turn_to(run.operation);
        }
        if let Some((_, histogram)) = &mut self.recent {
            histogram.record_many(now.ns.saturating_sub(run.sent_ns), run.count);
        }
    }

    /// Takes another operation's histogram at hand.
    fn turn_to(&mut self, operation: Operation) {
        self.settle();
        let histogram = self.latency.remove(&operation).unwrap_or_default();
        self.recent = Some((operation, histogram));
    }

    fn settle(&mut self) {
        if let Some((operation, histogram)) = self.recent.take() {
            self.latency.insert(operation, histogram);
        }
    }

    #[cold]
    fn fail(&mut self, outcome: Outcome) {
        *self.errors.entry(outcome.0).or_default() += 1;
    }

    /// The plain sums.
    pub(super) fn counts(&self) -> Counts {
        let mut counts = Counts { bytes: self.bytes, ..Counts::default() };
        let recent = self.recent.as_ref().map(|(operation, histogram)| (operation, histogram));
        for (operation, histogram) in self.latency.iter().chain(recent) {
            let count = histogram.count();
            counts.ios += count;
            match operation {
                Operation::Read => counts.reads += count,
                Operation::Write => counts.writes += count,
                _ => {}
            }
        }
        counts.errors = self.errors.values().sum();
        counts
    }
}

/// The task of a token.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "tokens are indices of the task table")]
fn index_of(token: u64) -> usize {
    token as usize
}
