//! I/O channel of a namespace of a remote controller over a single path, with a table of requests for
//! retries.
//!
//! ```text
//!   submit ─▶ inflight table ─▶ queue pair ─▶ connection      sent by the following flush
//!   poll   ◀─ inflight table ◀─ queue pair ◀─ connection
//!               └── aborted by a reset: sent again after the recovery, and failed if that takes too
//!                   long or the request was found to break the connection
//! ```

use std::sync::Arc;

use tenmil_base::{
    ChannelWakeup, CompletionBatch, DoorbellStats, Durability, Instant, IoChannel, IoCompletion,
    IoStatus, Limits, Operation, Request, Segment, Span, WakeSource,
};
use tenmil_nvme_host::{NamespaceQueue, QueueState};

use crate::caches::CacheTracker;
use crate::fabrics_queue_pair::{FabricsQueuePair, QueuePairState};
use crate::flushes::{self, FlushFanout, FlushResult, FlushScope as PathsReached};
use crate::inflight::{ConnectionFailure, ConnectionLossInfo, InflightRequests};
use crate::resumption::Resumption;
use crate::tcp_transport::TcpTransport;
use crate::wait_handle::WaitHandle;

/// I/O channel over a queue pair with its connection.
///
/// Submitted requests are sent in the same iteration, by the following [`flush`](IoChannel::flush). When
/// the connection is lost, requests in flight are held and continue on the next connection. After the
/// policy's [fast-fail time](crate::TimeoutPolicy::fail_fast) they complete with [`IoStatus::PATH_ERROR`],
/// as do newly submitted ones.
/// A request completes with [`IoStatus::ABORTED_BY_HOST`] after it has three times missed its deadline, or
/// been alone on a connection that broke. Resets with other causes do not count.
///
/// A flush fails with [`IoStatus::WRITE_FAULT`] if a controller with a volatile cache was lost after it
/// had completed writes that were not flushed, unless its successor proves that it writes through the
/// same cache ([`tenmil_wire::cache`]). Each queue reports each loss once.
pub struct FabricsChannel {
    way: FabricsQueuePair,
    kept: InflightRequests,
    caches: Arc<CacheTracker>,
    flushes: FlushFanout,
    /// Completed writes may be in a volatile cache.
    has_cache: bool,
    /// Requests being submitted, with slots as tokens.
    batch: Vec<Request>,
    fail_fast: Span,
    /// Since when it accepts nothing.
    down_since: Option<Instant>,
    /// Details of its connection loss, since then.
    cut: Option<ConnectionLossInfo>,
    resumption: Resumption,
    /// Completions of requests that were not submitted.
    failed: Vec<IoCompletion>,
    sleep: Option<Box<dyn WaitHandle>>,
}

/// Maximum number of requests submitted to the queue pair at once.
const BATCH: usize = 64;
/// The index of the single path.
const ONLY_PATH: usize = 0;
const ONLY_REACH: PathsReached = PathsReached { now: 1, soon: 1 };

impl FabricsChannel {
    pub(crate) fn new(
        way: FabricsQueuePair,
        parents: u16,
        fail_fast: Span,
        caches: Arc<CacheTracker>,
    ) -> Self {
        // In addition to the commands in flight, there are requests that were split.
        let depth = way.limits().depth_max + u32::from(parents);
        let has_cache = way.limits().durability == Durability::VolatileCache;
        Self {
            way,
            kept: InflightRequests::new(depth),
            flushes: FlushFanout::new(Arc::clone(&caches), has_cache),
            caches,
            has_cache,
            batch: Vec::with_capacity(BATCH),
            fail_fast,
            down_since: None,
            cut: None,
            resumption: Resumption::default(),
            failed: Vec::new(),
            sleep: None,
        }
    }

    /// Sets the wait handle of its thread. Without one, the thread cannot sleep while requests are in
    /// flight.
    #[must_use]
    pub fn with_sleep(mut self, sleep: Box<dyn WaitHandle>) -> Self {
        self.way.wakes(&*sleep);
        self.sleep = Some(sleep);
        self
    }

    /// The queue pair of the driver.
    pub fn queue(&mut self) -> &mut NamespaceQueue<TcpTransport> {
        self.way.queue()
    }

    /// Like [`poll`](IoChannel::poll), for an owner that submits only raw commands to the
    /// [`queue`](Self::queue): no completion is held back, and nothing is retried.
    pub fn poll_raw(&mut self, now: Instant, answers: &mut CompletionBatch) {
        self.way.poll(now, answers);
        self.way.send_rest();
    }

    /// Discards completions, for a queue that is about to be dropped. Returns true once nothing is in
    /// flight.
    pub fn abandon(&mut self, now: Instant) -> bool {
        self.way.abandon(now)
    }

    /// Submits requests to the queue pair, as it accepts them.
    #[inline]
    fn pass_on(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut taken = 0;
        for run in requests.chunks(BATCH) {
            self.batch.clear();
            let (kept, mut has_flush) = (&mut self.kept, false);
            self.batch.extend(run.iter().map_while(|request| {
                has_flush |= request.operation == Operation::Flush;
                kept.insert(now, request, segments)
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

    /// Registers the flushes of the batch.
    #[cold]
    fn begin_flushes(&mut self) {
        for request in self.batch.iter().filter(|it| it.operation == Operation::Flush) {
            if self.flushes.begin(request.token) {
                self.flushes.sent(request.token, self.way.association(), ONLY_REACH);
            }
        }
    }

    /// Submits while the queue accepts nothing, or held requests come first.
    #[cold]
    fn submit_slowly(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.record_loss(now);
        if self.has_failed(now) && !self.is_resuming(now) {
            let room = (self.way.limits().depth_max as usize).saturating_sub(self.failed.len());
            let outcome = IoStatus::PATH_ERROR;
            let refuse = |request: &Request| IoCompletion {
                token: request.token,
                status: outcome,
                result: 0,
            };
            let count = requests.len().min(room);
            self.failed.extend(requests[..count].iter().map(refuse));
            return count;
        }
        self.send_again(now);
        if self.kept.is_isolating() { 0 } else { self.pass_on(now, requests, segments) }
    }

    #[inline]
    fn is_ordinary(&self) -> bool {
        self.down_since.is_none()
            && !self.kept.is_isolating()
            && self.way.standing() == QueueState::Running
    }

    /// Records since when it accepts nothing, and how the connection was lost.
    fn record_loss(&mut self, now: Instant) {
        match self.way.standing() {
            QueueState::Running => self.down_since = None,
            _ if self.down_since.is_none() => (self.down_since, self.cut) = (Some(now), None),
            _ => {}
        }
        if self.down_since.is_some() && self.way.condition() == QueuePairState::Disconnected {
            let is_alone = self.kept.in_flight() == 1 && !self.kept.has_again();
            let broken = match (self.way.is_broken(), is_alone) {
                (false, _) => ConnectionFailure::No,
                (true, false) => ConnectionFailure::UnderMany,
                (true, true) => ConnectionFailure::UnderOne,
            };
            self.cut.get_or_insert(ConnectionLossInfo { at: now, broken });
        }
    }

    /// Whether held and new requests have to fail.
    fn has_failed(&self, now: Instant) -> bool {
        let is_dead = self.way.standing() == QueueState::Dead;
        is_dead || self.down_since.is_some_and(|since| now.since(since) >= self.fail_fast)
    }

    /// Whether its controller is connected again, and this queue follows as soon as it is polled.
    fn is_resuming(&mut self, now: Instant) -> bool {
        let next = self.caches.successor(ONLY_PATH, self.way.association());
        let is_dead = self.way.standing() == QueueState::Dead;
        !is_dead && self.resumption.is_due(next, now, self.fail_fast)
    }

    /// Sends held requests again.
    fn send_again(&mut self, now: Instant) {
        while let Some((request, segments)) = self.kept.next_again(self.kept.in_flight()) {
            self.flushes.sent(request.token, self.way.association(), ONLY_REACH);
            if self.way.submit(now, &[request], segments) == 0 {
                return;
            }
            self.kept.sent_again(now, ONLY_PATH);
        }
    }

    /// Holds requests that were aborted by a reset, and completes those that have failed.
    #[cold]
    fn poll_slowly(&mut self, now: Instant, first: usize, answers: &mut CompletionBatch) {
        self.record_loss(now);
        let (kept, limit) = (&mut self.kept, self.way.limit);
        let (flushes, by) = (&mut self.flushes, self.way.association());
        let cut = self.cut.unwrap_or(ConnectionLossInfo { at: now, broken: ConnectionFailure::No });
        answers.extract(first, |answer| {
            if answer.status != IoStatus::ABORTED_BY_HOST {
                kept.clear_suspect(answer.token);
                return match flushes.answered(answer.token, answer.status, by, ONLY_REACH) {
                    FlushResult::Told => false,
                    FlushResult::MoreControllers => {
                        kept.hold_for_retry(answer.token);
                        true
                    }
                    FlushResult::Lost => {
                        answer.status = flushes::LOST;
                        false
                    }
                };
            }
            let ending = kept.ending(cut, answer.token, limit);
            let is_kept = kept.requeue(answer.token, ending);
            if !is_kept {
                flushes.forget(answer.token);
            }
            is_kept
        });
        self.give_tokens_back(first, answers);
        if self.has_failed(now) {
            while answers.remaining() > 0
                && let Some(slot) = self.kept.give_up()
            {
                self.flushes.forget(slot);
                let (token, outcome) = (self.kept.forget(slot), IoStatus::PATH_ERROR);
                answers.push(IoCompletion { token, status: outcome, result: 0 });
            }
        } else {
            self.send_again(now);
            self.way.flush();
        }
        let count = self.failed.len().min(answers.remaining());
        self.failed.drain(..count).for_each(|answer| answers.push(answer));
    }

    #[inline]
    fn give_tokens_back(&mut self, first: usize, answers: &mut CompletionBatch) {
        if !self.has_cache {
            for answer in answers.tail_mut(first) {
                answer.token = self.kept.forget(answer.token);
            }
            return;
        }
        let mut has_changed = false;
        for answer in answers.tail_mut(first) {
            has_changed |= self.kept.is_volatile(answer.token);
            answer.token = self.kept.forget(answer.token);
        }
        if has_changed && let Some(by) = self.way.association() {
            self.caches.wrote(by);
        }
    }
}

impl IoChannel for FabricsChannel {
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
    fn poll(&mut self, now: Instant, answers: &mut CompletionBatch) -> usize {
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

    fn doorbell_stats(&self) -> DoorbellStats {
        self.way.doorbells()
    }

    fn losses(&self) -> u64 {
        self.flushes.losses()
    }

    fn ack_losses(&mut self, count: u64) {
        self.flushes.acknowledge(count);
    }
}

impl ChannelWakeup for FabricsChannel {
    fn wake_at(&self) -> Instant {
        if !self.failed.is_empty() {
            return Instant::default();
        }
        let end = self.down_since.filter(|_| self.kept.has_again());
        let end = end.map_or(Instant::NEVER, |since| since.after(self.fail_fast));
        self.way.wake_at().min(end)
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.sleep.as_ref().map_or(WakeSource::None, |sleep| sleep.wake_source())
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
