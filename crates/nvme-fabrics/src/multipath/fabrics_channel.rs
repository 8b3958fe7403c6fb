//! I/O channel of a remote namespace: a queue pair for each path, and a table of requests for retries.
//!
//! ```text
//!   submit ─▶ inflight table ─▶ path selector ─┬─▶ queue pair 0 ─▶ connection
//!                                              └─▶ queue pair 1 ─▶ connection
//!   poll   ◀─ inflight table ◀─ failover ◀─────┴── completions, or a lost connection
//!               └── retried on another path, at once or when permitted (see `failover`)
//! ```

mod recovery;
mod submit;

use std::sync::Arc;

use tenmil_base::{
    ChannelWakeup, CompletionBatch, DoorbellStats, Durability, Instant, IoChannel, IoCompletion,
    IoStatus, Limits, Request, Segment, Span, WakeSource,
};

use super::MultipathOptions;
use super::path_selector::{PathSelector, PathView};
use super::path_states::{PathStates, QueueInbox};
use crate::cache_tracker::Association;
use crate::fabrics_queue_pair::{FabricsQueuePair, QueuePairState};
use crate::flush_fanout::{FlushFanout, FlushScope};
use crate::inflight_requests::{ConnectionLossSnapshot, InflightRequests};
use crate::resumption::QueueResumptionWait;
use crate::wait_handle::WaitHandle;

/// I/O channel with a queue pair and connection for each path.
///
/// Submitted requests are sent in the same iteration, by the following [`flush_submissions`](IoChannel::flush_submissions). When a
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
    resumption: QueueResumptionWait,
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
    loss: Option<ConnectionLossSnapshot>,
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
            resumption: QueueResumptionWait::default(),
            has_backoff: false,
            has_ended: false,
            is_view_new: true,
            resubmit_at: Instant::NEVER,
            failed: Vec::new(),
            wait_handle: None,
        };
        channel.apply_path_changes();
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
    pub fn accepting_path_count(&self) -> usize {
        self.views.iter().filter(|view| view.is_usable()).count()
    }

    fn queue_pairs(&self) -> impl Iterator<Item = &FabricsQueuePair> {
        self.path_channels.iter().filter_map(|path_channel| path_channel.queue_pair.as_ref())
    }

    #[inline]
    fn can_use_fast_path(&self) -> bool {
        self.accepts_requests() && !self.has_backoff && !self.is_view_new
    }

    /// Whether new requests can be submitted at once.
    #[inline]
    fn accepts_requests(&self) -> bool {
        !self.inbox.is_pending() && self.down_since.is_none() && !self.inflight.is_isolating()
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

    /// The rest of a poll with a change of a path, or with requests that are held or have failed.
    #[cold]
    fn poll_slow(&mut self, now: Instant, completions: &mut CompletionBatch) {
        if now >= self.resubmit_at {
            self.resubmit_at = Instant::NEVER;
        }
        self.update_paths(now);
        self.flush_submissions();
        let count = self.failed.len().min(completions.remaining());
        self.failed.drain(..count).for_each(|completion| completions.push(completion));
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
            queue_pair.send_remaining_data();
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
            queue_pair.send_remaining_data();
        }
        self.replace_dead_queue_pair(path);
    }

    /// Records that completed writes may be in the volatile cache of a path's controller.
    #[inline]
    fn record_writes(&self, path: usize, completed: &[IoCompletion]) {
        let mut has_changed = false;
        for completion in completed {
            has_changed |= self.inflight.may_be_unflushed(completion.token);
        }
        if has_changed && let Some(by) = self.path_channels[path].association() {
            self.shared.caches().record_write(by);
        }
    }
}

/// Whether all commands have succeeded.
#[inline]
fn are_successes(completions: &[IoCompletion]) -> bool {
    completions.iter().fold(0, |codes, completion| codes | completion.status.0) == 0
}

/// A path in the inflight table. There are at most [`PATHS_MAX`](super::PATHS_MAX).
#[expect(clippy::cast_possible_truncation, reason = "a path is less than PATHS_MAX")]
#[inline]
const fn path_number(path: usize) -> u8 {
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
fn flush_scope(views: &[PathView]) -> FlushScope {
    let mut scope = FlushScope::default();
    for (path, view) in views.iter().enumerate() {
        let without_backoff = PathView { is_backed_off: false, ..*view };
        scope.now |= u32::from(view.is_usable()) << path;
        scope.soon |= u32::from(without_backoff.is_usable()) << path;
    }
    scope
}

const fn path_error_completion(token: u64) -> IoCompletion {
    IoCompletion { token, status: IoStatus::PATH_ERROR, result: 0 }
}

impl IoChannel for FabricsChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    #[inline]
    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        if self.can_use_fast_path() {
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
    fn flush_submissions(&mut self) {
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
        let is_calm = !self.inflight.is_isolating() && self.flushes.has_only_ordinary_flushes();
        let mut is_normal = true;
        for path in 0..self.path_channels.len() {
            is_normal &= self.poll_path(now, path, is_calm, completions);
        }
        if !is_normal || !self.can_use_fast_path() || !self.failed.is_empty() {
            self.poll_slow(now, completions);
        }
        completions.len() - first
    }

    fn doorbell_stats(&self) -> DoorbellStats {
        self.queue_pairs()
            .map(FabricsQueuePair::doorbell_stats)
            .fold(DoorbellStats::default(), DoorbellStats::plus)
    }

    fn known_write_loss_count(&self) -> u64 {
        self.flushes.known_loss_count()
    }

    fn ack_repaired_write_losses(&mut self, count: u64) {
        self.flushes.acknowledge_losses(count);
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
