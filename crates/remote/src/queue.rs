//! A namespace of a remote SSD as a block device: the driver's queue pair, and the device's end of it,
//! one behind the other in the same thread.
//!
//! ```text
//!   submit ─▶ kept ─▶ NamespaceQueue ─ rings ─▶ Lane ─▶ connection     sent by the flush that follows
//!   poll   ◀─ kept ◀─ NamespaceQueue ◀─ rings ─ Lane ◀─ connection
//!               └── aborted by a reset: sent again once it runs, and failed if that takes too long,
//!                   or has happened too often
//! ```

use base::{
    Answer, Answers, Backend, DoorbellCounts, Instant, Limits, Outcome, Request, Segment, Span,
    WakeSource,
};
use nvme::{NamespaceQueue, NamespaceView, Order, QueuePair, QueueSizes};

use crate::kept::Kept;
use crate::lane::Lane;
use crate::reach::Reach;
use crate::rings::Bell;
use crate::sleep::Sleep;

/// A queue pair with its connection.
///
/// What is submitted is sent in the same turn, by the [`flush`](Backend::flush) that follows. When the
/// connection is lost, what was under way is held, and goes on with the next one; after the policy's
/// time to [fail fast](crate::Policy::fail_fast) it ends with [`Outcome::PATH_ERROR`], and so does
/// what is submitted then. What three resets in a row have ended, whoever asked for them, ends with
/// [`Outcome::ABORTED_BY_HOST`].
pub struct RemoteQueue {
    queue: NamespaceQueue<Reach, Bell>,
    lane: Lane,
    kept: Kept,
    /// Requests under the numbers of their slots, on their way.
    batch: Vec<Request>,
    fail_fast: Span,
    /// Since when it takes nothing.
    down_since: Option<Instant>,
    /// Answers to what was not even tried.
    failed: Vec<Answer>,
    sleep: Option<Box<dyn Sleep>>,
}

/// Requests that go to the queue pair in one go.
const BATCH: usize = 64;

impl RemoteQueue {
    pub(crate) fn new(
        reach: &Reach,
        pair: QueuePair<Reach, Bell>,
        lane: Lane,
        view: NamespaceView,
        sizes: QueueSizes,
        fail_fast: Span,
    ) -> Option<Self> {
        let queue = NamespaceQueue::new(reach, pair, view, sizes)?;
        // Beside the commands in flight there are requests that were split.
        let depth = queue.limits().depth_max + u32::from(sizes.parents);
        Some(Self {
            queue,
            lane,
            kept: Kept::new(depth),
            batch: Vec::with_capacity(BATCH),
            fail_fast,
            down_since: None,
            failed: Vec::new(),
            sleep: None,
        })
    }

    /// What its thread sleeps on. Without it, a thread cannot sleep while the queue owes an answer.
    #[must_use]
    pub fn with_sleep(mut self, sleep: Box<dyn Sleep>) -> Self {
        self.lane.wakes(sleep.bell());
        self.sleep = Some(sleep);
        self
    }

    /// The queue pair underneath.
    pub fn queue(&mut self) -> &mut NamespaceQueue<Reach, Bell> {
        &mut self.queue
    }

    /// Takes what comes and tells nobody, for a queue that is about to be dropped. True once nothing
    /// is owed any more.
    pub fn abandon(&mut self, now: Instant) -> bool {
        self.lane.push();
        self.lane.pull(now);
        let is_done = self.queue.abandon(now);
        self.lane.push();
        is_done
    }

    /// Hands requests to the queue pair, as far as it takes them.
    #[inline]
    fn pass_on(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut taken = 0;
        for run in requests.chunks(BATCH) {
            self.batch.clear();
            let kept = &mut self.kept;
            self.batch.extend(run.iter().map_while(|request| kept.keep(request, segments)));
            let count = self.queue.submit(now, &self.batch, segments);
            taken += count;
            if count < run.len() {
                for request in self.batch[count..].iter().rev() {
                    self.kept.forget(request.token);
                }
                break;
            }
        }
        taken
    }

    /// While it takes nothing, or what it could not take before is still to be sent.
    #[cold]
    fn submit_slowly(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.look(now);
        if self.has_failed(now) {
            let room = (self.queue.limits().depth_max as usize).saturating_sub(self.failed.len());
            let outcome = Outcome::PATH_ERROR;
            let refuse = |request: &Request| Answer { token: request.token, outcome, result: 0 };
            let count = requests.len().min(room);
            self.failed.extend(requests[..count].iter().map(refuse));
            return count;
        }
        self.send_again(now);
        if self.kept.has_again() { 0 } else { self.pass_on(now, requests, segments) }
    }

    #[inline]
    fn is_ordinary(&self) -> bool {
        self.down_since.is_none()
            && !self.kept.has_again()
            && self.queue.queue().standing() == Order::Run
    }

    /// Notes whether it takes anything.
    fn look(&mut self, now: Instant) {
        match self.queue.queue().standing() {
            Order::Run => self.down_since = None,
            _ => {
                self.down_since.get_or_insert(now);
            }
        }
    }

    /// Whether it is to fail what it has, or gets.
    fn has_failed(&self, now: Instant) -> bool {
        let is_dead = self.queue.queue().standing() == Order::Dead;
        is_dead || self.down_since.is_some_and(|since| now.since(since) >= self.fail_fast)
    }

    /// Sends again what a reset has ended.
    fn send_again(&mut self, now: Instant) {
        while let Some((request, segments)) = self.kept.next_again() {
            if self.queue.submit(now, &[request], segments) == 0 {
                return;
            }
            self.kept.pop_again();
        }
    }

    /// Holds what a reset has ended, and tells what has failed.
    #[cold]
    fn poll_slowly(&mut self, now: Instant, first: usize, answers: &mut Answers) {
        self.look(now);
        let kept = &mut self.kept;
        answers.sift(first, |answer| {
            answer.outcome == Outcome::ABORTED_BY_HOST && kept.send_again(answer.token)
        });
        self.give_tokens_back(first, answers);
        if self.has_failed(now) {
            while answers.room() > 0
                && let Some(slot) = self.kept.pop_again()
            {
                let (token, outcome) = (self.kept.forget(slot), Outcome::PATH_ERROR);
                answers.push(Answer { token, outcome, result: 0 });
            }
        } else {
            self.send_again(now);
            self.queue.flush();
        }
        let count = self.failed.len().min(answers.room());
        self.failed.drain(..count).for_each(|answer| answers.push(answer));
    }

    #[inline]
    fn give_tokens_back(&mut self, first: usize, answers: &mut Answers) {
        for answer in answers.after_mut(first) {
            answer.token = self.kept.forget(answer.token);
        }
    }
}

impl Backend for RemoteQueue {
    fn limits(&self) -> &Limits {
        self.queue.limits()
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
        self.queue.flush();
        self.lane.push();
    }

    #[inline]
    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        self.lane.pull(now);
        let first = answers.len();
        self.queue.poll(now, answers);
        if self.is_ordinary() && self.failed.is_empty() {
            self.give_tokens_back(first, answers);
        } else {
            self.poll_slowly(now, first, answers);
        }
        // What data were asked for, and what was split and goes on.
        self.lane.push();
        answers.len() - first
    }

    fn doorbells(&self) -> DoorbellCounts {
        self.queue.doorbells()
    }

    fn wake_at(&self) -> Instant {
        if !self.failed.is_empty() {
            return Instant::default();
        }
        let end = self.down_since.filter(|_| self.kept.has_again());
        let end = end.map_or(Instant::NEVER, |since| since.after(self.fail_fast));
        self.queue.wake_at().min(self.lane.wake_at()).min(end)
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.sleep.as_ref().map_or(WakeSource::Nothing, |sleep| sleep.wake_source())
    }

    fn arm(&mut self) -> bool {
        let Some(sleep) = &mut self.sleep else { return true };
        sleep.clear();
        let has_work = self.lane.arm(&mut **sleep) || !self.failed.is_empty();
        // What was answered without a command, or split and not sent, nobody tells of.
        has_work || !self.queue.queue_mut().arm() || self.queue.wake_at() == Instant::default()
    }

    fn disarm(&mut self) {
        self.lane.disarm();
    }
}
