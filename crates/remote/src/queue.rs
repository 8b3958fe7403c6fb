//! A namespace of a remote SSD as a block device: a way to it, and requests that are kept until they
//! are answered.
//!
//! ```text
//!   submit ─▶ kept ─▶ way ─▶ connection      sent by the flush that follows
//!   poll   ◀─ kept ◀─ way ◀─ connection
//!               └── aborted by a reset: sent again once it runs, and failed if that takes too long,
//!                   or it was found to be what breaks the peer
//! ```

use std::sync::Arc;

use base::{
    Answer, Answers, Backend, DoorbellCounts, Durability, Instant, Limits, Operation, Outcome,
    Request, Segment, Span, WakeSource,
};
use nvme::{NamespaceQueue, Order};

use crate::caches::Caches;
use crate::flushes::{self, Flushes, Reach as PathsReached, Worth};
use crate::kept::{Broken, Cut, Kept};
use crate::reach::Reach;
use crate::rings::Bell;
use crate::sleep::Sleep;
use crate::way::{Condition, Way};

/// A queue pair with its connection.
///
/// What is submitted is sent in the same turn, by the [`flush`](Backend::flush) that follows. When the
/// connection is lost, what was under way is held, and goes on with the next one; after the policy's
/// time to [fail fast](crate::Policy::fail_fast) it ends with [`Outcome::PATH_ERROR`], and so does
/// what is submitted then. What has three times missed its deadline, or been alone on a connection
/// that broke, ends with [`Outcome::ABORTED_BY_HOST`]; resets that others have caused do not count.
///
/// A flush fails with [`Outcome::WRITE_FAULT`] if a controller with a volatile cache was lost after it
/// had completed writes that were not flushed, unless its successor proves that it writes through the
/// same cache ([`wire::cache`]). Each queue says so once for each loss.
pub struct RemoteQueue {
    way: Way,
    kept: Kept,
    caches: Arc<Caches>,
    flushes: Flushes,
    /// Completed writes may lie in a volatile cache.
    has_cache: bool,
    /// Requests under the numbers of their slots, on their way.
    batch: Vec<Request>,
    fail_fast: Span,
    /// Since when it takes nothing.
    down_since: Option<Instant>,
    /// How its connection has gone, since then.
    cut: Option<Cut>,
    /// Answers to what was not even tried.
    failed: Vec<Answer>,
    sleep: Option<Box<dyn Sleep>>,
}

/// Requests that go to the queue pair in one go.
const BATCH: usize = 64;
/// Where all requests go.
const ONLY_PATH: usize = 0;
const ONLY_REACH: PathsReached = PathsReached { now: 1, soon: 1 };

impl RemoteQueue {
    pub(crate) fn new(way: Way, parents: u16, fail_fast: Span, caches: Arc<Caches>) -> Self {
        // Beside the commands in flight there are requests that were split.
        let depth = way.limits().depth_max + u32::from(parents);
        let has_cache = way.limits().durability == Durability::VolatileCache;
        Self {
            way,
            kept: Kept::new(depth),
            flushes: Flushes::new(Arc::clone(&caches), has_cache),
            caches,
            has_cache,
            batch: Vec::with_capacity(BATCH),
            fail_fast,
            down_since: None,
            cut: None,
            failed: Vec::new(),
            sleep: None,
        }
    }

    /// What its thread sleeps on. Without it, a thread cannot sleep while the queue owes an answer.
    #[must_use]
    pub fn with_sleep(mut self, sleep: Box<dyn Sleep>) -> Self {
        self.way.wakes(&*sleep);
        self.sleep = Some(sleep);
        self
    }

    /// The queue pair underneath.
    pub fn queue(&mut self) -> &mut NamespaceQueue<Reach, Bell> {
        self.way.queue()
    }

    /// As [`poll`](Backend::poll), for an owner that submits only raw commands to the
    /// [`queue`](Self::queue): no answer is kept back, and nothing is sent again.
    pub fn poll_raw(&mut self, now: Instant, answers: &mut Answers) {
        self.way.poll(now, answers);
        self.way.send_rest();
    }

    /// Takes what comes and tells nobody, for a queue that is about to be dropped. True once nothing
    /// is owed any more.
    pub fn abandon(&mut self, now: Instant) -> bool {
        self.way.abandon(now)
    }

    /// Hands requests to the queue pair, as far as it takes them.
    #[inline]
    fn pass_on(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut taken = 0;
        for run in requests.chunks(BATCH) {
            self.batch.clear();
            let (kept, mut has_flush) = (&mut self.kept, false);
            self.batch.extend(run.iter().map_while(|request| {
                has_flush |= request.operation == Operation::Flush;
                kept.keep(now, request, segments)
            }));
            if has_flush && self.has_cache {
                self.begin_flushes();
            }
            let count = self.way.submit(now, &self.batch, segments);
            taken += count;
            if count < run.len() {
                for request in self.batch[count..].iter().rev() {
                    self.flushes.forget(request.token);
                    self.kept.forget(request.token);
                }
                break;
            }
        }
        taken
    }

    /// Notes what the flushes of the batch have to make durable.
    #[cold]
    fn begin_flushes(&mut self) {
        for request in self.batch.iter().filter(|it| it.operation == Operation::Flush) {
            if self.flushes.begin(request.token) {
                self.flushes.sent(request.token, self.way.association(), ONLY_REACH);
            }
        }
    }

    /// While it takes nothing, or what it could not take before is still to be sent.
    #[cold]
    fn submit_slowly(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.look(now);
        if self.has_failed(now) {
            let room = (self.way.limits().depth_max as usize).saturating_sub(self.failed.len());
            let outcome = Outcome::PATH_ERROR;
            let refuse = |request: &Request| Answer { token: request.token, outcome, result: 0 };
            let count = requests.len().min(room);
            self.failed.extend(requests[..count].iter().map(refuse));
            return count;
        }
        self.send_again(now);
        if self.kept.is_cautious() { 0 } else { self.pass_on(now, requests, segments) }
    }

    #[inline]
    fn is_ordinary(&self) -> bool {
        self.down_since.is_none() && !self.kept.is_cautious() && self.way.standing() == Order::Run
    }

    /// Notes whether it takes anything.
    fn look(&mut self, now: Instant) {
        match self.way.standing() {
            Order::Run => self.down_since = None,
            _ if self.down_since.is_none() => (self.down_since, self.cut) = (Some(now), None),
            _ => {}
        }
        if self.down_since.is_some() && self.way.condition() == Condition::Cut {
            let is_alone = self.kept.in_flight() == 1 && !self.kept.has_again();
            let broken = match (self.way.is_broken(), is_alone) {
                (false, _) => Broken::No,
                (true, false) => Broken::UnderMany,
                (true, true) => Broken::UnderOne,
            };
            self.cut.get_or_insert(Cut { at: now, broken });
        }
    }

    /// Whether it is to fail what it has, or gets.
    fn has_failed(&self, now: Instant) -> bool {
        let is_dead = self.way.standing() == Order::Dead;
        is_dead || self.down_since.is_some_and(|since| now.since(since) >= self.fail_fast)
    }

    /// Sends again what a reset has ended.
    fn send_again(&mut self, now: Instant) {
        while let Some((request, segments)) = self.kept.next_again(self.kept.in_flight()) {
            self.flushes.sent(request.token, self.way.association(), ONLY_REACH);
            if self.way.submit(now, &[request], segments) == 0 {
                return;
            }
            self.kept.sent_again(now, ONLY_PATH);
        }
    }

    /// Holds what a reset has ended, and tells what has failed.
    #[cold]
    fn poll_slowly(&mut self, now: Instant, first: usize, answers: &mut Answers) {
        self.look(now);
        let (kept, limit) = (&mut self.kept, self.way.limit);
        let (flushes, by) = (&mut self.flushes, self.way.association());
        let cut = self.cut.unwrap_or(Cut { at: now, broken: Broken::No });
        answers.sift(first, |answer| {
            if answer.outcome != Outcome::ABORTED_BY_HOST {
                kept.acquit(answer.token);
                return match flushes.answered(answer.token, answer.outcome, by, ONLY_REACH) {
                    Worth::Told => false,
                    Worth::NotAll => {
                        kept.hold(answer.token);
                        true
                    }
                    Worth::Lost => {
                        answer.outcome = flushes::LOST;
                        false
                    }
                };
            }
            let ending = kept.ending(cut, answer.token, limit);
            let is_kept = kept.send_again(answer.token, ending);
            if !is_kept {
                flushes.forget(answer.token);
            }
            is_kept
        });
        self.give_tokens_back(first, answers);
        if self.has_failed(now) {
            while answers.room() > 0
                && let Some(slot) = self.kept.give_up()
            {
                self.flushes.forget(slot);
                let (token, outcome) = (self.kept.forget(slot), Outcome::PATH_ERROR);
                answers.push(Answer { token, outcome, result: 0 });
            }
        } else {
            self.send_again(now);
            self.way.flush();
        }
        let count = self.failed.len().min(answers.room());
        self.failed.drain(..count).for_each(|answer| answers.push(answer));
    }

    #[inline]
    fn give_tokens_back(&mut self, first: usize, answers: &mut Answers) {
        if !self.has_cache {
            for answer in answers.after_mut(first) {
                answer.token = self.kept.forget(answer.token);
            }
            return;
        }
        let mut has_changed = false;
        for answer in answers.after_mut(first) {
            has_changed |= self.kept.is_volatile(answer.token);
            answer.token = self.kept.forget(answer.token);
        }
        if has_changed && let Some(by) = self.way.association() {
            self.caches.wrote(by);
        }
    }
}

impl Backend for RemoteQueue {
    fn limits(&self) -> &Limits {
        self.way.limits()
    }

    #[inline]
    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        if !self.is_ordinary() {
            return self.submit_slowly(now, requests, segments);
        }
        self.pass_on(now, requests, segments)
    }

    #[inline]
    fn flush(&mut self) {
        self.way.flush();
    }

    #[inline]
    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        let first = answers.len();
        self.way.poll(now, answers);
        if self.is_ordinary() && self.failed.is_empty() && self.flushes.is_empty() {
            self.give_tokens_back(first, answers);
        } else {
            self.poll_slowly(now, first, answers);
        }
        self.way.send_rest();
        answers.len() - first
    }

    fn doorbells(&self) -> DoorbellCounts {
        self.way.doorbells()
    }

    fn losses(&self) -> u64 {
        self.flushes.losses()
    }

    fn heed_losses(&mut self, count: u64) {
        self.flushes.heed(count);
    }

    fn wake_at(&self) -> Instant {
        if !self.failed.is_empty() {
            return Instant::default();
        }
        let end = self.down_since.filter(|_| self.kept.has_again());
        let end = end.map_or(Instant::NEVER, |since| since.after(self.fail_fast));
        self.way.wake_at().min(end)
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.sleep.as_ref().map_or(WakeSource::Nothing, |sleep| sleep.wake_source())
    }

    fn arm(&mut self) -> bool {
        let Some(sleep) = &mut self.sleep else { return true };
        sleep.clear();
        self.way.arm(&mut **sleep) || !self.failed.is_empty()
    }

    fn disarm(&mut self) {
        self.way.disarm();
    }
}
