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
use crate::flushes::{self, FlushFanout, FlushResult, FlushScope};
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
    queue_pair: FabricsQueuePair,
    inflight: InflightRequests,
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
    loss: Option<ConnectionLossInfo>,
    resumption: Resumption,
    /// Completions of requests that were not submitted.
    failed: Vec<IoCompletion>,
    wait_handle: Option<Box<dyn WaitHandle>>,
}

/// Maximum number of requests submitted to the queue pair at once.
const BATCH: usize = 64;
/// The index of the single path.
const ONLY_PATH: usize = 0;
const ONLY_PATH_SCOPE: FlushScope = FlushScope { now: 1, soon: 1 };

impl FabricsChannel {
    pub(crate) fn new(
        queue_pair: FabricsQueuePair,
        parents: u16,
        fail_fast: Span,
        caches: Arc<CacheTracker>,
    ) -> Self {
        // In addition to the commands in flight, there are requests that were split.
        let depth = queue_pair.limits().depth_max + u32::from(parents);
        let has_cache = queue_pair.limits().durability == Durability::VolatileCache;
        Self {
            queue_pair,
            inflight: InflightRequests::new(depth),
            flushes: FlushFanout::new(Arc::clone(&caches), has_cache),
            caches,
            has_cache,
            batch: Vec::with_capacity(BATCH),
            fail_fast,
            down_since: None,
            loss: None,
            resumption: Resumption::default(),
            failed: Vec::new(),
            wait_handle: None,
        }
    }

    /// Sets the wait handle of its thread. Without one, the thread cannot sleep while requests are in
    /// flight.
    #[must_use]
    pub fn with_wait_handle(mut self, wait_handle: Box<dyn WaitHandle>) -> Self {
        self.queue_pair.set_waker(&*wait_handle);
        self.wait_handle = Some(wait_handle);
        self
    }

    /// The queue pair of the driver.
    pub fn queue(&mut self) -> &mut NamespaceQueue<TcpTransport> {
        self.queue_pair.queue()
    }

    /// Like [`poll`](IoChannel::poll), for an owner that submits only raw commands to the
    /// [`queue`](Self::queue): no completion is held back, and nothing is retried.
    pub fn poll_raw(&mut self, now: Instant, completions: &mut CompletionBatch) {
        self.queue_pair.poll(now, completions);
        self.queue_pair.send_rest();
    }

    /// Discards completions, for a queue that is about to be dropped. Returns true once nothing is in
    /// flight.
    pub fn drain(&mut self, now: Instant) -> bool {
        self.queue_pair.drain(now)
    }

    /// Submits requests to the queue pair, as it accepts them.
    #[inline]
    fn submit_batches(
        &mut self,
        now: Instant,
        requests: &[Request],
        segments: &[Segment],
    ) -> usize {
        let mut submitted = 0;
        for run in requests.chunks(BATCH) {
            self.batch.clear();
            let (inflight, mut has_flush) = (&mut self.inflight, false);
            self.batch.extend(run.iter().map_while(|request| {
                has_flush |= request.operation == Operation::Flush;
                inflight.insert(now, request, segments)
            }));
            if has_flush && self.has_cache {
                self.begin_flushes();
            }
            let submitted_count = self.queue_pair.submit(now, &self.batch, segments);
            submitted += submitted_count;
            if submitted_count < run.len() {
                for request in self.batch[submitted_count..].iter().rev() {
                    self.flushes.remove(request.random_token);
                    self.inflight.remove(request.random_token);
                }
                break;
            }
        }
        submitted
    }

    /// Registers the flushes of the batch.
    #[cold]
    fn begin_flushes(&mut self) {
        for request in self.batch.iter().filter(|it| it.operation == Operation::Flush) {
            if self.flushes.begin(request.random_token) {
                self.flushes.record_sent(
                    request.random_token,
                    self.queue_pair.association(),
                    ONLY_PATH_SCOPE,
                );
            }
        }
    }

    /// Submits while the queue accepts nothing, or held requests come first.
    #[cold]
    fn submit_slow_path(
        &mut self,
        now: Instant,
        requests: &[Request],
        segments: &[Segment],
    ) -> usize {
        self.record_loss(now);
        if self.has_failed(now) && !self.is_resuming(now) {
            let free_slots =
                (self.queue_pair.limits().depth_max as usize).saturating_sub(self.failed.len());
            let outcome = IoStatus::PATH_ERROR;
            let refuse = |request: &Request| IoCompletion {
                token: request.random_token,
                status: outcome,
                result: 0,
            };
            let submitted_count = requests.len().min(free_slots);
            self.failed.extend(requests[..submitted_count].iter().map(refuse));
            return submitted_count;
        }
        self.send_retries(now);
        if self.inflight.is_isolating() { 0 } else { self.submit_batches(now, requests, segments) }
    }

    #[inline]
    fn is_normal(&self) -> bool {
        self.down_since.is_none()
            && !self.inflight.is_isolating()
            && self.queue_pair.driver_state() == QueueState::Running
    }

    /// Records since when it accepts nothing, and how the connection was lost.
    fn record_loss(&mut self, now: Instant) {
        match self.queue_pair.driver_state() {
            QueueState::Running => self.down_since = None,
            _ if self.down_since.is_none() => (self.down_since, self.loss) = (Some(now), None),
            _ => {}
        }
        if self.down_since.is_some() && self.queue_pair.state() == QueuePairState::Disconnected {
            let is_only_request = self.inflight.in_flight() == 1 && !self.inflight.has_retries();
            let failure = match (self.queue_pair.is_broken(), is_only_request) {
                (false, _) => ConnectionFailure::NotBroken,
                (true, false) => ConnectionFailure::ManyInFlight,
                (true, true) => ConnectionFailure::OneInFlight,
            };
            self.loss.get_or_insert(ConnectionLossInfo { at: now, failure });
        }
    }

    /// Whether held and new requests have to fail.
    fn has_failed(&self, now: Instant) -> bool {
        let is_dead = self.queue_pair.driver_state() == QueueState::Dead;
        is_dead || self.down_since.is_some_and(|since| now.since(since) >= self.fail_fast)
    }

    /// Whether its controller is connected again, and this queue follows as soon as it is polled.
    fn is_resuming(&mut self, now: Instant) -> bool {
        let next = self.caches.successor(ONLY_PATH, self.queue_pair.association());
        let is_dead = self.queue_pair.driver_state() == QueueState::Dead;
        !is_dead && self.resumption.is_due(next, now, self.fail_fast)
    }

    /// Sends held requests again.
    fn send_retries(&mut self, now: Instant) {
        while let Some((request, segments)) = self.inflight.next_retry(self.inflight.in_flight()) {
            self.flushes.record_sent(
                request.random_token,
                self.queue_pair.association(),
                ONLY_PATH_SCOPE,
            );
            if self.queue_pair.submit(now, &[request], segments) == 0 {
                return;
            }
            self.inflight.record_retry(now, ONLY_PATH);
        }
    }

    /// Holds requests that were aborted by a reset, and completes those that have failed.
    #[cold]
    fn poll_slow_path(&mut self, now: Instant, first: usize, completions: &mut CompletionBatch) {
        self.record_loss(now);
        let (inflight, command_timeout) = (&mut self.inflight, self.queue_pair.command_timeout);
        let (flushes, by) = (&mut self.flushes, self.queue_pair.association());
        let loss = self
            .loss
            .unwrap_or(ConnectionLossInfo { at: now, failure: ConnectionFailure::NotBroken });
        completions.extract_if(first, |completion| {
            if completion.status != IoStatus::ABORTED_BY_HOST {
                inflight.clear_suspect(completion.token);
                return match flushes.handle_completion(
                    completion.token,
                    completion.status,
                    by,
                    ONLY_PATH_SCOPE,
                ) {
                    FlushResult::Final => false,
                    FlushResult::MoreControllers => {
                        inflight.hold_for_retry(completion.token);
                        true
                    }
                    FlushResult::Lost => {
                        completion.status = flushes::LOST;
                        false
                    }
                };
            }
            let loss_verdict = inflight.loss_verdict(loss, completion.token, command_timeout);
            let is_kept = inflight.requeue(completion.token, loss_verdict);
            if !is_kept {
                flushes.remove(completion.token);
            }
            is_kept
        });
        self.restore_tokens(first, completions);
        if self.has_failed(now) {
            while completions.remaining() > 0
                && let Some(slot) = self.inflight.pop_retry()
            {
                self.flushes.remove(slot);
                let (token, outcome) = (self.inflight.remove(slot), IoStatus::PATH_ERROR);
                completions.push(IoCompletion { token, status: outcome, result: 0 });
            }
        } else {
            self.send_retries(now);
            self.queue_pair.flush();
        }
        let submitted_count = self.failed.len().min(completions.remaining());
        self.failed.drain(..submitted_count).for_each(|completion| completions.push(completion));
    }

    #[inline]
    fn restore_tokens(&mut self, first: usize, completions: &mut CompletionBatch) {
        if !self.has_cache {
            for completion in completions.tail_mut(first) {
                completion.token = self.inflight.remove(completion.token);
            }
            return;
        }
        let mut has_changed = false;
        for completion in completions.tail_mut(first) {
            has_changed |= self.inflight.is_volatile(completion.token);
            completion.token = self.inflight.remove(completion.token);
        }
        if has_changed && let Some(by) = self.queue_pair.association() {
            self.caches.record_write(by);
        }
    }
}

impl IoChannel for FabricsChannel {
    fn limits(&self) -> &Limits {
        self.queue_pair.limits()
    }

    #[inline]
    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        if !self.is_normal() {
            return self.submit_slow_path(now, requests, segments);
        }
        self.submit_batches(now, requests, segments)
    }

    #[inline]
    fn flush(&mut self) {
        self.queue_pair.flush();
    }

    #[inline]
    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let first = completions.len();
        self.queue_pair.poll(now, completions);
        if self.is_normal() && self.failed.is_empty() && self.flushes.is_empty() {
            self.restore_tokens(first, completions);
        } else {
            self.poll_slow_path(now, first, completions);
        }
        self.queue_pair.send_rest();
        completions.len() - first
    }

    fn doorbell_stats(&self) -> DoorbellStats {
        self.queue_pair.doorbells()
    }

    fn write_losses(&self) -> u64 {
        self.flushes.losses()
    }

    fn ack_repaired_losses(&mut self, submitted_count: u64) {
        self.flushes.acknowledge(submitted_count);
    }
}

impl ChannelWakeup for FabricsChannel {
    fn wake_at(&self) -> Instant {
        if !self.failed.is_empty() {
            return Instant::default();
        }
        let end = self.down_since.filter(|_| self.inflight.has_retries());
        let end = end.map_or(Instant::NEVER, |since| since.after(self.fail_fast));
        self.queue_pair.wake_at().min(end)
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.wait_handle.as_ref().map_or(WakeSource::None, |wait_handle| wait_handle.wake_source())
    }

    fn arm(&mut self) -> bool {
        let Some(wait_handle) = &mut self.wait_handle else { return true };
        wait_handle.clear();
        self.queue_pair.arm(&mut **wait_handle) || !self.failed.is_empty()
    }

    fn disarm(&mut self) {
        self.queue_pair.disarm();
    }
}
