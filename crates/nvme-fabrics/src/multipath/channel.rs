//! I/O channel of a remote namespace: a queue pair for each path, and a table of requests for retries.
//!
//! ```text
//!   submit ─▶ inflight table ─▶ path selector ─┬─▶ queue pair 0 ─▶ connection
//!                                              └─▶ queue pair 1 ─▶ connection
//!   poll   ◀─ inflight table ◀─ failover ◀─────┴── completions, or a lost connection
//!               └── retried on another path, at once or when permitted (see `failover`)
//! ```

use std::sync::Arc;

use tenmil_base::{
    ChannelWakeup, CompletionBatch, DoorbellStats, Durability, Instant, IoChannel, IoCompletion,
    IoStatus, Limits, Operation, Request, Segment, Span, WakeSource,
};
use tenmil_nvme_host::QueueState;

use super::MultipathOptions;
use super::failover::{self, RetryDecision};
use super::path_selector::{BatchRoute, PathSelector, PathView};
use super::path_states::{PathStates, QueueInbox};
use crate::caches::Association;
use crate::fabrics_queue_pair::{FabricsQueuePair, QueuePairState};
use crate::flushes::{self, FlushFanout, FlushResult, FlushRoute, FlushScope};
use crate::inflight::{ConnectionFailure, ConnectionLossInfo, InflightRequests};
use crate::resumption::Resumption;
use crate::wait_handle::WaitHandle;

/// I/O channel with a queue pair and connection for each path.
///
/// Submitted requests are sent in the same iteration, by the following [`flush`](IoChannel::flush). When a
/// path is lost, its requests are retried on another path as soon as permitted: reads at once, requests
/// that change blocks when the old controller can no longer execute them. When no path is left, requests
/// are held for the policy's [fast-fail time](crate::TimeoutPolicy::fail_fast), and complete with
/// [`IoStatus::PATH_ERROR`] from then on; at once if the device is gone.
/// A request completes with [`IoStatus::ABORTED_BY_HOST`] after it has three times missed its deadline, or
/// been alone on a connection that broke. Resets with other causes do not count.
///
/// A flush is sent to each controller that may have completed writes in a volatile cache, submitted by
/// any queue, and completes when all have completed it. Writes of controllers that are lost by then are
/// handled according to [`CacheScope`](crate::CacheScope): the flush fails with
/// [`IoStatus::WRITE_FAULT`] if they are lost. Each queue reports each loss once.
pub struct FabricsChannel {
    shared: Arc<PathStates>,
    inbox: Arc<QueueInbox>,
    path_channels: Box<[PathChannel]>,
    views: Box<[PathView]>,
    selector: PathSelector,
    inflight: InflightRequests,
    flushes: FlushFanout,
    /// Completed writes may be in a volatile cache.
    has_cache: bool,
    limits: Limits,
    fail_fast: Span,
    /// Since when there is no usable path.
    down_since: Option<Instant>,
    resumption: Resumption,
    /// Some path is backed off.
    has_backoff: bool,
    /// The device is gone: no path is connected any more.
    has_ended: bool,
    /// The view of a path has changed, or none was checked yet.
    is_view_new: bool,
    /// When a caller whose requests were not accepted is to submit them again.
    resubmit_at: Instant,
    /// Completions of requests that were not submitted, or are not retried.
    failed: Vec<IoCompletion>,
    wait_handle: Option<Box<dyn WaitHandle>>,
}

/// One path of a queue.
struct PathChannel {
    queue_pair: Option<FabricsQueuePair>,
    /// State when last checked.
    state: QueuePairState,
    /// Details of the last connection loss.
    loss: Option<ConnectionLossInfo>,
    /// End of its back-off.
    backoff_until: Instant,
    /// Completions that are outstanding and no longer awaited.
    stale: u32,
    /// Requests being submitted, with slots as tokens.
    batch: Vec<Request>,
    /// Something was submitted and not sent.
    has_unsent: bool,
    /// Queue pair of a later controller, used when the current one has nothing outstanding.
    next: Option<FabricsQueuePair>,
}

/// Maximum number of requests submitted to a queue pair at once.
const BATCH: usize = 64;
/// Back-off of a path after a path error.
const PATH_BACKOFF: Span = Span::from_ms(100);
/// When a caller submits again what was not accepted for want of a path.
const RESUBMIT: Span = Span::from_ms(1);

impl FabricsChannel {
    /// A channel over the queue pairs that come to `inbox`, of a namespace with these limits.
    pub(super) fn new(
        shared: Arc<PathStates>,
        inbox: Arc<QueueInbox>,
        count: usize,
        options: &MultipathOptions,
        limits: Limits,
    ) -> Self {
        // In addition to the commands in flight, there are requests that were split.
        let depth = limits.depth_max + u32::from(options.sizes.parents);
        let has_cache = limits.durability == Durability::VolatileCache;
        let mut channel = Self {
            flushes: FlushFanout::new(Arc::clone(shared.caches()), has_cache),
            has_cache,
            shared,
            inbox,
            path_channels: (0..count).map(|_| PathChannel::new()).collect(),
            views: vec![PathView::default(); count].into(),
            selector: PathSelector::new(options.io_policy),
            inflight: InflightRequests::new(depth),
            limits,
            fail_fast: options.options.policy.fail_fast,
            down_since: None,
            resumption: Resumption::default(),
            has_backoff: false,
            has_ended: false,
            is_view_new: true,
            resubmit_at: Instant::NEVER,
            failed: Vec::new(),
            wait_handle: None,
        };
        channel.apply_changes();
        channel
    }

    /// Sets the wait handle of its thread. Without one, the thread cannot sleep while requests are in
    /// flight.
    #[must_use]
    pub fn with_wait_handle(mut self, wait_handle: Box<dyn WaitHandle>) -> Self {
        self.queue_pairs().for_each(|queue_pair| queue_pair.set_waker(&*wait_handle));
        self.inbox.set_waker(wait_handle.waker());
        self.wait_handle = Some(wait_handle);
        self
    }

    /// Discards completions, for a queue that is about to be dropped. Returns true once nothing is in
    /// flight.
    pub fn drain(&mut self, now: Instant) -> bool {
        let queue_pairs = self
            .path_channels
            .iter_mut()
            .filter_map(|path_channel| path_channel.queue_pair.as_mut());
        // All of them are advanced, without short-circuiting.
        queue_pairs.map(|queue_pair| queue_pair.drain(now)).filter(|is_done| !is_done).count() == 0
    }

    /// Number of paths that accept requests now.
    pub fn open_paths(&self) -> usize {
        self.views.iter().filter(|view| view.is_usable()).count()
    }

    fn queue_pairs(&self) -> impl Iterator<Item = &FabricsQueuePair> {
        self.path_channels.iter().filter_map(|path_channel| path_channel.queue_pair.as_ref())
    }

    #[inline]
    fn is_normal(&self) -> bool {
        self.accepts_requests() && !self.has_backoff && !self.is_view_new
    }

    /// Whether new requests can be submitted at once.
    #[inline]
    fn accepts_requests(&self) -> bool {
        !self.inbox.is_pending() && self.down_since.is_none() && !self.inflight.is_isolating()
    }

    /// Submits requests to the paths, as long as the inflight table has free slots.
    #[inline]
    fn submit_batches(
        &mut self,
        now: Instant,
        requests: &[Request],
        segments: &[Segment],
    ) -> usize {
        let route = self.selector.route_batch(&self.views);
        let mut submitted = 0;
        for run in requests.chunks(BATCH) {
            let is_flush = |request: &Request| request.operation == Operation::Flush;
            let has_flush = self.has_cache && run.iter().any(is_flush);
            let count = match route {
                BatchRoute::To(path) if !has_flush => self.submit_to(now, path, run, segments),
                BatchRoute::Nowhere => return 0,
                BatchRoute::To(_) | BatchRoute::Each => self.submit_each(now, run, segments),
            };
            submitted += count;
            if count < run.len() {
                break;
            }
        }
        submitted
    }

    /// Submits requests that all go to `path`.
    #[inline]
    fn submit_to(
        &mut self,
        now: Instant,
        path: usize,
        run: &[Request],
        segments: &[Segment],
    ) -> usize {
        let (inflight, number) = (&mut self.inflight, number_of(path));
        let path_channel = &mut self.path_channels[path];
        let insert = |request: &Request| inflight.insert(now, request, segments, number);
        path_channel.batch.extend(run.iter().map_while(insert));
        self.send_batch(now, path, segments, IfRejected::Return)
    }

    /// Submits requests whose paths are selected one by one.
    #[inline(never)]
    fn submit_each(&mut self, now: Instant, run: &[Request], segments: &[Segment]) -> usize {
        let mut count = 0;
        for request in run {
            let Some(path) = self.selector.choose(&self.views) else { break };
            let tracked = self.inflight.insert(now, request, segments, number_of(path));
            let Some(tracked) = tracked else { break };
            let path = match request.operation {
                Operation::Flush => self.begin_flush(tracked.token, path),
                _ => path,
            };
            // For the choice of the next one.
            self.views[path].in_flight += 1;
            self.path_channels[path].batch.push(tracked);
            count += 1;
        }
        let is_used = |path_channel: &PathChannel| !path_channel.batch.is_empty();
        let are_several = self.path_channels.iter().filter(|it| is_used(it)).count() > 1;
        let rejected = if are_several { IfRejected::Hold } else { IfRejected::Return };
        let mut returned = 0;
        for path in 0..self.path_channels.len() {
            let in_batch = self.path_channels[path].batch.len();
            if in_batch > 0 {
                self.views[path].in_flight -= u32::try_from(in_batch).unwrap_or(u32::MAX);
                returned += in_batch - self.send_batch(now, path, segments, rejected);
            }
        }
        count - returned
    }

    /// Registers a flush in `slot` that was routed to `path`, and returns its actual path.
    #[cold]
    fn begin_flush(&mut self, slot: u64, path: usize) -> usize {
        if !self.flushes.begin(slot) {
            return path;
        }
        // New flushes do not wait for a path that is backed off.
        let path = match self.flushes.route(slot, scope(&self.views)) {
            FlushRoute::To(path) => path,
            FlushRoute::Anywhere | FlushRoute::Later => path,
        };
        let scope = scope(&self.views);
        self.flushes.record_sent(slot, self.path_channels[path].association(), scope);
        self.inflight.set_path(slot, number_of(path));
        path
    }

    /// Submits the batch of a path. Returns how many of its requests the channel keeps.
    #[inline]
    fn send_batch(
        &mut self,
        now: Instant,
        path: usize,
        segments: &[Segment],
        rejected: IfRejected,
    ) -> usize {
        let path_channel = &mut self.path_channels[path];
        let submitted = match &mut path_channel.queue_pair {
            Some(queue_pair) => queue_pair.submit(now, &path_channel.batch, segments),
            None => 0,
        };
        path_channel.has_unsent |= submitted > 0;
        self.views[path].in_flight += u32::try_from(submitted).unwrap_or(u32::MAX);
        let kept = if submitted == path_channel.batch.len() {
            submitted
        } else {
            self.reject(path, submitted, rejected)
        };
        self.path_channels[path].batch.clear();
        kept
    }

    /// Removes or holds the requests of a batch that its path has not accepted.
    #[cold]
    fn reject(&mut self, path: usize, submitted: usize, rejected: IfRejected) -> usize {
        let batch = &self.path_channels[path].batch;
        match rejected {
            IfRejected::Hold => {
                for request in &batch[submitted..] {
                    self.inflight.hold_for_retry(request.token);
                }
                batch.len()
            }
            IfRejected::Return => {
                for request in batch[submitted..].iter().rev() {
                    self.flushes.remove(request.token);
                    self.inflight.remove(request.token);
                }
                submitted
            }
        }
    }

    /// Submits while there is no usable path, or other work comes first.
    #[cold]
    fn submit_slow_path(
        &mut self,
        now: Instant,
        requests: &[Request],
        segments: &[Segment],
    ) -> usize {
        if self.inflight.is_empty() {
            self.poll_paths(now);
        }
        self.update_paths(now);
        if self.has_failed(now) && !self.is_resuming(now) {
            let free_slots = (self.limits.depth_max as usize).saturating_sub(self.failed.len());
            let count = requests.len().min(free_slots);
            self.failed.extend(requests[..count].iter().map(|request| path_error(request.token)));
            return count;
        }
        if self.accepts_requests() {
            return self.submit_batches(now, requests, segments);
        }
        if self.down_since.is_some() {
            self.resubmit_at = now.after(RESUBMIT);
        }
        0
    }

    /// Polls all paths. A caller without requests in flight need not poll, so a new connection could go
    /// unnoticed.
    fn poll_paths(&mut self, now: Instant) {
        // Only lost paths have completions, which are not awaited.
        let mut completions = CompletionBatch::with_capacity(BATCH);
        for path in 0..self.path_channels.len() {
            self.poll_path(now, path, false, &mut completions);
        }
    }

    /// Whether held and new requests have to fail.
    fn has_failed(&self, now: Instant) -> bool {
        let is_overdue = |since| now.since(since) >= self.fail_fast;
        self.down_since.is_some_and(|since| self.has_ended || is_overdue(since))
    }

    /// Whether the controller of an accessible path is connected again, and the queue pair of that path follows
    /// as soon as it is polled.
    fn is_resuming(&mut self, now: Instant) -> bool {
        if self.has_ended {
            return false;
        }
        let caches = self.shared.caches();
        let next = self.path_channels.iter().zip(&self.views).enumerate();
        let next = next.filter(|(_, (_, view))| view.is_accessible());
        let next = next
            .filter_map(|(path, (path_channel, _))| {
                caches.successor(path, path_channel.association())
            })
            .max();
        self.resumption.is_due(next, now, self.fail_fast)
    }

    /// The rest of a poll with a change of a path, or with requests that are held or have failed.
    #[cold]
    fn poll_slow(&mut self, now: Instant, completions: &mut CompletionBatch) {
        if now >= self.resubmit_at {
            self.resubmit_at = Instant::NEVER;
        }
        self.update_paths(now);
        self.flush();
        let count = self.failed.len().min(completions.remaining());
        self.failed.drain(..count).for_each(|completion| completions.push(completion));
    }

    /// Applies changed path states, checks which paths are usable, and retries held requests.
    fn update_paths(&mut self, now: Instant) {
        if self.inbox.is_pending() {
            self.apply_changes();
        }
        (0..self.path_channels.len()).for_each(|path| self.replace_dead_queue_pair(path));
        if self.has_backoff {
            self.end_backoff(now);
        }
        self.is_view_new = false;
        if self.views.iter().any(PathView::is_usable) {
            self.down_since = None;
        } else {
            self.down_since.get_or_insert(now);
        }
        if self.has_failed(now) {
            while let Some(slot) = self.inflight.pop_retry() {
                self.flushes.remove(slot);
                self.failed.push(path_error(self.inflight.remove(slot)));
            }
        } else {
            self.send_retries(now);
        }
    }

    /// Ends the back-off of paths.
    fn end_backoff(&mut self, now: Instant) {
        for (path_channel, view) in self.path_channels.iter().zip(&mut self.views) {
            view.is_backed_off &= now < path_channel.backoff_until;
        }
        self.has_backoff = self.views.iter().any(|view| view.is_backed_off);
    }

    /// Applies changes published by the managing thread.
    fn apply_changes(&mut self) {
        let queue_pairs = self.inbox.take().unwrap_or_default();
        self.has_ended = self.shared.has_ended();
        for (path, view) in self.views.iter_mut().enumerate() {
            view.access = self.shared.access(path);
        }
        queue_pairs
            .into_iter()
            .for_each(|(path, queue_pair)| self.set_next_queue_pair(path, queue_pair));
    }

    fn set_next_queue_pair(&mut self, path: usize, queue_pair: FabricsQueuePair) {
        if let Some(wait_handle) = &self.wait_handle {
            queue_pair.set_waker(&**wait_handle);
        }
        self.path_channels[path].next = Some(queue_pair);
        self.replace_dead_queue_pair(path);
    }

    /// Replaces a queue pair whose controller is dead, and which has nothing outstanding, by that of a
    /// later controller.
    fn replace_dead_queue_pair(&mut self, path: usize) {
        let (path_channel, view) = (&mut self.path_channels[path], &mut self.views[path]);
        let is_dead = path_channel
            .queue_pair
            .as_ref()
            .is_none_or(|queue_pair| queue_pair.driver_state() == QueueState::Dead);
        let is_idle = view.in_flight == 0 && path_channel.stale == 0;
        if is_dead && is_idle && (path_channel.queue_pair.is_some() || path_channel.next.is_some())
        {
            path_channel.queue_pair = path_channel.next.take();
            path_channel.state = QueuePairState::Disconnected;
            view.is_open = false;
        }
    }

    /// Sends held requests again, as paths permit.
    fn send_retries(&mut self, now: Instant) {
        while let Some(slot) = self.inflight.first_retry() {
            let scope = scope(&self.views);
            let path = match self.flushes.route(slot, scope) {
                FlushRoute::Anywhere => self.selector.choose(&self.views),
                FlushRoute::To(path) => Some(path),
                FlushRoute::Later => None,
            };
            let Some(path) = path else { return };
            let (path_channel, view) = (&mut self.path_channels[path], &mut self.views[path]);
            let Some(queue_pair) = &mut path_channel.queue_pair else { return };
            let next = self.inflight.next_retry(view.in_flight as usize);
            let Some((request, segments)) = next else { return };
            self.flushes.record_sent(slot, queue_pair.association(), scope);
            if queue_pair.submit(now, &[request], segments) == 0 {
                return;
            }
            view.in_flight += 1;
            path_channel.has_unsent = true;
            self.inflight.record_retry(now, number_of(path));
        }
    }

    /// Handles completions other than plain successes, and changes of the path's state.
    #[cold]
    fn handle_exceptions(
        &mut self,
        now: Instant,
        path: usize,
        first: usize,
        completions: &mut CompletionBatch,
    ) {
        self.record_loss(now, path);
        let scope = scope(&self.views);
        let (path_channel, view) = (&mut self.path_channels[path], &mut self.views[path]);
        let Some(queue_pair) = &mut path_channel.queue_pair else { return };
        let (inflight, shared, stale) = (&mut self.inflight, &self.shared, &mut path_channel.stale);
        let flushes = &mut self.flushes;
        let loss = path_channel
            .loss
            .unwrap_or(ConnectionLossInfo { at: now, failure: ConnectionFailure::NotBroken });
        completions.extract_if(first, |completion| {
            let IoCompletion { token, status, .. } = *completion;
            if !inflight.is_awaited(token) {
                *stale -= 1;
                return true;
            }
            view.in_flight -= 1;
            let is_removed = match failover::retry_decision(status) {
                RetryDecision::Complete => {
                    inflight.clear_suspect(token);
                    match flushes.handle_completion(token, status, queue_pair.association(), scope)
                    {
                        FlushResult::Final => false,
                        FlushResult::MoreControllers => {
                            inflight.hold_for_retry(token);
                            true
                        }
                        FlushResult::Lost => {
                            let (token, status) = (inflight.remove(token), flushes::LOST);
                            self.failed.push(IoCompletion { token, status, result: 0 });
                            true
                        }
                    }
                }
                RetryDecision::RetryElsewhere(access) => {
                    view.access = access;
                    shared.report_stale(path);
                    inflight.requeue_rejected(token, true)
                }
                RetryDecision::Interrupted => inflight.requeue_rejected(token, false),
                RetryDecision::Ambiguous => {
                    (view.is_backed_off, path_channel.backoff_until) =
                        (true, now.after(PATH_BACKOFF));
                    self.has_backoff = true;
                    inflight.requeue_rejected(token, false)
                }
                RetryDecision::Aborted => {
                    let loss_verdict =
                        inflight.loss_verdict(loss, token, queue_pair.command_timeout);
                    inflight.requeue(token, loss_verdict)
                }
            };
            if !is_removed {
                flushes.remove(token);
            }
            is_removed
        });
        self.requeue_lost_path(path, loss);
    }

    /// Records what was in flight when a connection was lost; later there is less.
    fn record_loss(&mut self, now: Instant, path: usize) {
        let (path_channel, view) = (&mut self.path_channels[path], &self.views[path]);
        let Some(queue_pair) = &path_channel.queue_pair else { return };
        let state = queue_pair.state();
        if path_channel.state == QueuePairState::Open && state != QueuePairState::Open {
            path_channel.loss = None;
        }
        if state == QueuePairState::Disconnected
            && path_channel.state != QueuePairState::Disconnected
        {
            let failure = match (queue_pair.is_broken(), view.in_flight) {
                (false, _) => ConnectionFailure::NotBroken,
                (true, 1) => ConnectionFailure::OneInFlight,
                (true, _) => ConnectionFailure::ManyInFlight,
            };
            path_channel.loss = Some(ConnectionLossInfo { at: now, failure });
        }
    }

    /// Retries elsewhere what may be, if the connection is lost.
    fn requeue_lost_path(&mut self, path: usize, loss: ConnectionLossInfo) {
        let (path_channel, view) = (&mut self.path_channels[path], &mut self.views[path]);
        let Some(queue_pair) = &mut path_channel.queue_pair else { return };
        if path_channel.state != queue_pair.state() {
            path_channel.state = queue_pair.state();
        }
        view.is_open = path_channel.state == QueuePairState::Open;
        if path_channel.state == QueuePairState::Disconnected && view.in_flight > 0 {
            // Unsent parts of split requests must not be sent when other requests use their memory.
            queue_pair.queue().abort_unsent();
            let (count, not_retried) = self.inflight.requeue_path(
                number_of(path),
                loss,
                queue_pair.command_timeout,
                failover::is_idempotent,
            );
            view.in_flight -= count;
            path_channel.stale += count;
            for slot in not_retried {
                self.flushes.remove(slot);
                let (token, status) = (self.inflight.remove(slot), IoStatus::ABORTED_BY_HOST);
                self.failed.push(IoCompletion { token, status, result: 0 });
            }
        }
    }

    /// Polls a path. `is_calm`: nothing is held or isolated, and no flush needs attention. Returns false if
    /// the state of the path or one of its completions needed attention.
    #[inline]
    fn poll_path(
        &mut self,
        now: Instant,
        path: usize,
        is_calm: bool,
        completions: &mut CompletionBatch,
    ) -> bool {
        let first = completions.len();
        let path_channel = &mut self.path_channels[path];
        let Some(queue_pair) = &mut path_channel.queue_pair else { return true };
        queue_pair.poll(now, completions);
        let completed = completions.tail_mut(first);
        let is_normal = is_calm
            && path_channel.state == queue_pair.state()
            && path_channel.stale == 0
            && path_channel.next.is_none()
            && are_successes(completed);
        if !is_normal {
            self.poll_path_slow(now, path, first, completions);
            return false;
        }
        self.views[path].in_flight -= u32::try_from(completed.len()).unwrap_or(u32::MAX);
        if self.has_cache {
            self.record_writes(path, completed);
        }
        for completion in completions.tail_mut(first) {
            completion.token = self.inflight.remove(completion.token);
        }
        if let Some(queue_pair) = &mut self.path_channels[path].queue_pair {
            queue_pair.send_rest();
        }
        true
    }

    #[cold]
    fn poll_path_slow(
        &mut self,
        now: Instant,
        path: usize,
        first: usize,
        completions: &mut CompletionBatch,
    ) {
        self.is_view_new = true;
        self.handle_exceptions(now, path, first, completions);
        if self.has_cache {
            self.record_writes(path, completions.tail_mut(first));
        }
        for completion in completions.tail_mut(first) {
            completion.token = self.inflight.remove(completion.token);
        }
        if let Some(queue_pair) = &mut self.path_channels[path].queue_pair {
            queue_pair.send_rest();
        }
        self.replace_dead_queue_pair(path);
    }

    /// Records that completed writes may be in the volatile cache of a path's controller.
    #[inline]
    fn record_writes(&self, path: usize, completed: &[IoCompletion]) {
        let mut has_changed = false;
        for completion in completed {
            has_changed |= self.inflight.is_volatile(completion.token);
        }
        if has_changed && let Some(by) = self.path_channels[path].association() {
            self.shared.caches().record_write(by);
        }
    }
}

/// What becomes of a request that a path does not accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IfRejected {
    /// It is returned to the submitter. It is one of the last of its batch.
    Return,
    /// It is held, because later ones of its batch were accepted by other paths.
    Hold,
}

/// Whether all commands have succeeded.
#[inline]
fn are_successes(completions: &[IoCompletion]) -> bool {
    completions.iter().fold(0, |codes, completion| codes | completion.status.0) == 0
}

/// A path in the inflight table. There are at most [`PATHS_MAX`](super::PATHS_MAX).
#[expect(clippy::cast_possible_truncation, reason = "a path is less than PATHS_MAX")]
#[inline]
const fn number_of(path: usize) -> u8 {
    path as u8
}

impl PathChannel {
    fn new() -> Self {
        Self {
            queue_pair: None,
            state: QueuePairState::Disconnected,
            loss: None,
            backoff_until: Instant::default(),
            stale: 0,
            batch: Vec::with_capacity(BATCH),
            has_unsent: false,
            next: None,
        }
    }

    /// The association that the completions of the last poll belong to.
    fn association(&self) -> Option<&Association> {
        self.queue_pair.as_ref()?.association()
    }
}

/// Paths that accept requests, now or after their back-off.
fn scope(views: &[PathView]) -> FlushScope {
    let mut scope = FlushScope::default();
    for (path, view) in views.iter().enumerate() {
        let without_backoff = PathView { is_backed_off: false, ..*view };
        scope.now |= u32::from(view.is_usable()) << path;
        scope.soon |= u32::from(without_backoff.is_usable()) << path;
    }
    scope
}

const fn path_error(token: u64) -> IoCompletion {
    IoCompletion { token, status: IoStatus::PATH_ERROR, result: 0 }
}

impl IoChannel for FabricsChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    #[inline]
    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        if self.is_normal() {
            let submitted = self.submit_batches(now, requests, segments);
            // A channel that is full accepts more after a poll.
            if submitted > 0 || !self.inflight.is_empty() {
                return submitted;
            }
        }
        // There is no usable path, or its state has changed since the last poll.
        self.submit_slow_path(now, requests, segments)
    }

    #[inline]
    fn flush(&mut self) {
        for path_channel in
            self.path_channels.iter_mut().filter(|path_channel| path_channel.has_unsent)
        {
            path_channel.has_unsent = false;
            if let Some(queue_pair) = &mut path_channel.queue_pair {
                queue_pair.flush();
            }
        }
    }

    #[inline]
    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let first = completions.len();
        let is_calm = !self.inflight.is_isolating() && self.flushes.is_empty();
        let mut is_normal = true;
        for path in 0..self.path_channels.len() {
            is_normal &= self.poll_path(now, path, is_calm, completions);
        }
        if !is_normal || !self.is_normal() || !self.failed.is_empty() {
            self.poll_slow(now, completions);
        }
        completions.len() - first
    }

    fn doorbell_stats(&self) -> DoorbellStats {
        self.queue_pairs()
            .map(FabricsQueuePair::doorbells)
            .fold(DoorbellStats::default(), DoorbellStats::plus)
    }

    fn write_losses(&self) -> u64 {
        self.flushes.losses()
    }

    fn ack_repaired_losses(&mut self, count: u64) {
        self.flushes.acknowledge(count);
    }
}

impl ChannelWakeup for FabricsChannel {
    fn wake_at(&self) -> Instant {
        if !self.failed.is_empty() {
            return Instant::default();
        }
        let end = self.down_since.filter(|_| self.inflight.has_retries());
        let end = end.map_or(Instant::NEVER, |since| since.after(self.fail_fast));
        let end = end.min(self.resubmit_at);
        let backed_off =
            self.path_channels.iter().zip(&self.views).filter(|(_, view)| view.is_backed_off);
        let end =
            backed_off.map(|(path_channel, _)| path_channel.backoff_until).fold(end, Instant::min);
        self.queue_pairs().map(FabricsQueuePair::wake_at).fold(end, Instant::min)
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.wait_handle.as_ref().map_or(WakeSource::None, |wait_handle| wait_handle.wake_source())
    }

    fn arm(&mut self) -> bool {
        let Some(wait_handle) = &mut self.wait_handle else { return true };
        wait_handle.clear();
        let queue_pairs = self
            .path_channels
            .iter_mut()
            .filter_map(|path_channel| path_channel.queue_pair.as_mut());
        // All of them are armed, without short-circuiting.
        let busy = queue_pairs
            .map(|queue_pair| queue_pair.arm(&mut **wait_handle))
            .filter(|is_busy| *is_busy)
            .count();
        busy > 0 || !self.failed.is_empty() || self.inbox.is_pending()
    }

    fn disarm(&mut self) {
        self.path_channels
            .iter_mut()
            .filter_map(|path_channel| path_channel.queue_pair.as_mut())
            .for_each(FabricsQueuePair::disarm);
    }
}
