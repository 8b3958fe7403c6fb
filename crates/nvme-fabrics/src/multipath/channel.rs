//! I/O channel of a multipath namespace: a queue pair for each path, and a table of requests for retries.
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
use super::path_selector::{PathSelector, PathView};
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
/// [`IoStatus::PATH_ERROR`] from then on.
///
/// A flush is sent to each controller that may have completed writes in a volatile cache, submitted by
/// any queue, and completes when all have completed it. Writes of controllers that are lost by then are
/// handled according to [`CacheScope`](crate::CacheScope).
pub struct MultipathChannel {
    shared: Arc<PathStates>,
    desk: Arc<QueueInbox>,
    lanes: Box<[PathChannel]>,
    views: Box<[PathView]>,
    route: PathSelector,
    kept: InflightRequests,
    flushes: FlushFanout,
    /// Completed writes may be in a volatile cache.
    has_cache: bool,
    limits: Limits,
    fail_fast: Span,
    /// Since when there is no usable path.
    down_since: Option<Instant>,
    resumption: Resumption,
    /// Some path is backed off.
    has_resting: bool,
    /// Completions of requests that were not submitted, or are not retried.
    failed: Vec<IoCompletion>,
    sleep: Option<Box<dyn WaitHandle>>,
}

/// One path of a queue.
struct PathChannel {
    way: Option<FabricsQueuePair>,
    /// State when last checked.
    condition: QueuePairState,
    /// Details of the last connection loss.
    cut: Option<ConnectionLossInfo>,
    /// End of its back-off.
    rests_until: Instant,
    /// Completions that are outstanding and no longer awaited.
    stale: u32,
    /// Requests being submitted, with slots as tokens.
    batch: Vec<Request>,
    /// Something was submitted and not sent.
    is_dirty: bool,
    /// Queue pair of a later controller, used when the current one has nothing outstanding.
    next: Option<FabricsQueuePair>,
}

/// Maximum number of requests submitted to a queue pair at once.
const BATCH: usize = 64;
/// Back-off of a path after a path error.
const REST: Span = Span::from_ms(100);

impl MultipathChannel {
    /// A channel over the queue pairs in `desk`. `None` if there are none yet.
    pub(super) fn new(
        shared: Arc<PathStates>,
        desk: Arc<QueueInbox>,
        count: usize,
        wishes: &MultipathOptions,
    ) -> Option<Self> {
        let ways = desk.take()?;
        let limits = ways.first()?.1.limits().clone();
        // In addition to the commands in flight, there are requests that were split.
        let depth = limits.depth_max + u32::from(wishes.sizes.parents);
        let has_cache = limits.durability == Durability::VolatileCache;
        let mut queue = Self {
            flushes: FlushFanout::new(Arc::clone(shared.caches()), has_cache),
            has_cache,
            shared,
            desk,
            lanes: (0..count).map(|_| PathChannel::new()).collect(),
            views: vec![PathView::default(); count].into(),
            route: PathSelector::new(wishes.spread),
            kept: InflightRequests::new(depth),
            limits,
            fail_fast: wishes.options.policy.fail_fast,
            down_since: None,
            resumption: Resumption::default(),
            has_resting: false,
            failed: Vec::new(),
            sleep: None,
        };
        ways.into_iter().for_each(|(path, way)| queue.welcome(path, way));
        queue.apply_changes();
        Some(queue)
    }

    /// Sets the wait handle of its thread. Without one, the thread cannot sleep while requests are in
    /// flight.
    #[must_use]
    pub fn with_sleep(mut self, sleep: Box<dyn WaitHandle>) -> Self {
        self.ways().for_each(|way| way.wakes(&*sleep));
        self.desk.set_waker(sleep.waker());
        self.sleep = Some(sleep);
        self
    }

    /// Discards completions, for a queue that is about to be dropped. Returns true once nothing is in
    /// flight.
    pub fn abandon(&mut self, now: Instant) -> bool {
        let ways = self.lanes.iter_mut().filter_map(|lane| lane.way.as_mut());
        // All of them are advanced, without short-circuiting.
        ways.map(|way| way.abandon(now)).filter(|is_done| !is_done).count() == 0
    }

    /// Number of paths that accept requests now.
    pub fn open_paths(&self) -> usize {
        self.views.iter().filter(|view| view.is_usable()).count()
    }

    fn ways(&self) -> impl Iterator<Item = &FabricsQueuePair> {
        self.lanes.iter().filter_map(|lane| lane.way.as_ref())
    }

    #[inline]
    fn is_ordinary(&self) -> bool {
        self.takes_new() && !self.has_resting
    }

    /// Whether new requests can be submitted at once.
    #[inline]
    fn takes_new(&self) -> bool {
        !self.desk.is_pending() && self.down_since.is_none() && !self.kept.is_isolating()
    }

    /// Submits requests to the paths, as long as the inflight table has free slots.
    #[inline]
    fn pass_on(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut taken = 0;
        for run in requests.chunks(BATCH) {
            let count = self.share_out(now, run, segments);
            self.send_batches(now, segments);
            taken += count;
            if count < run.len() {
                break;
            }
        }
        taken
    }

    /// Selects a path for each request.
    #[inline]
    fn share_out(&mut self, now: Instant, run: &[Request], segments: &[Segment]) -> usize {
        let mut count = 0;
        for request in run {
            let Some(path) = self.route.choose(&self.views) else { break };
            let Some(mut kept) = self.kept.insert(now, request, segments) else { break };
            let path = match request.operation {
                Operation::Flush => self.begin_flush(kept.token, path),
                _ => path,
            };
            kept.token = self.kept.send_to(kept.token, path);
            self.views[path].in_flight += 1;
            self.lanes[path].batch.push(kept);
            count += 1;
        }
        count
    }

    /// Registers a flush in `slot` that was routed to `path`, and returns its actual path.
    #[cold]
    fn begin_flush(&mut self, slot: u64, path: usize) -> usize {
        if !self.flushes.begin(slot) {
            return path;
        }
        // New flushes do not wait for a path that is backed off.
        let path = match self.flushes.goes(slot, reach(&self.views)) {
            FlushRoute::To(path) => path,
            FlushRoute::Anywhere | FlushRoute::Later => path,
        };
        let reach = reach(&self.views);
        self.flushes.sent(slot, self.lanes[path].association(), reach);
        path
    }

    /// Submits the batch of each path. Requests that a path does not accept are held.
    #[inline]
    fn send_batches(&mut self, now: Instant, segments: &[Segment]) {
        for (path, lane) in self.lanes.iter_mut().enumerate() {
            let (Some(way), false) = (&mut lane.way, lane.batch.is_empty()) else { continue };
            let count = way.submit(now, &lane.batch, segments);
            lane.is_dirty |= count > 0;
            for request in &lane.batch[count..] {
                self.views[path].in_flight -= 1;
                self.kept.hold_for_retry(request.token);
            }
            lane.batch.clear();
        }
    }

    /// Submits while there is no usable path, or other work comes first.
    #[cold]
    fn submit_slowly(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        if self.kept.is_empty() {
            self.poll_paths(now);
        }
        self.settle(now);
        if self.has_failed(now) && !self.is_resuming(now) {
            let room = (self.limits.depth_max as usize).saturating_sub(self.failed.len());
            let count = requests.len().min(room);
            self.failed.extend(requests[..count].iter().map(|request| failed(request.token)));
            return count;
        }
        if self.takes_new() { self.pass_on(now, requests, segments) } else { 0 }
    }

    /// Polls all paths. A caller without requests in flight need not poll, so a new connection could go
    /// unnoticed.
    fn poll_paths(&mut self, now: Instant) {
        // Only lost paths have completions, which are not awaited.
        let mut answers = CompletionBatch::with_capacity(BATCH);
        (0..self.lanes.len()).for_each(|path| self.poll_path(now, path, &mut answers));
    }

    /// Whether held and new requests have to fail.
    fn has_failed(&self, now: Instant) -> bool {
        self.down_since.is_some_and(|since| now.since(since) >= self.fail_fast)
    }

    /// Whether the controller of an accessible path is connected again, and the queue pair of that path follows
    /// as soon as it is polled.
    fn is_resuming(&mut self, now: Instant) -> bool {
        let caches = self.shared.caches();
        let next = self.lanes.iter().zip(&self.views).enumerate();
        let next = next.filter(|(_, (_, view))| view.is_accessible());
        let next =
            next.filter_map(|(path, (lane, _))| caches.successor(path, lane.association())).max();
        self.resumption.is_due(next, now, self.fail_fast)
    }

    /// Applies changed path states, checks which paths are usable, and retries held requests.
    fn settle(&mut self, now: Instant) {
        if self.desk.is_pending() {
            self.apply_changes();
        }
        (0..self.lanes.len()).for_each(|path| self.succeed(path));
        if self.has_resting {
            self.end_rests(now);
        }
        if self.views.iter().any(PathView::is_usable) {
            self.down_since = None;
        } else {
            self.down_since.get_or_insert(now);
        }
        if self.has_failed(now) {
            while let Some(slot) = self.kept.give_up() {
                self.flushes.forget(slot);
                self.failed.push(failed(self.kept.forget(slot)));
            }
        } else {
            self.send_again(now);
        }
    }

    /// Ends the back-off of paths.
    fn end_rests(&mut self, now: Instant) {
        for (lane, view) in self.lanes.iter().zip(&mut self.views) {
            view.is_resting &= now < lane.rests_until;
        }
        self.has_resting = self.views.iter().any(|view| view.is_resting);
    }

    /// Applies changes published by the managing thread.
    fn apply_changes(&mut self) {
        let ways = self.desk.take().unwrap_or_default();
        for (path, view) in self.views.iter_mut().enumerate() {
            view.access = self.shared.access(path);
        }
        ways.into_iter().for_each(|(path, way)| self.welcome(path, way));
    }

    fn welcome(&mut self, path: usize, way: FabricsQueuePair) {
        if let Some(sleep) = &self.sleep {
            way.wakes(&**sleep);
        }
        self.lanes[path].next = Some(way);
        self.succeed(path);
    }

    /// Replaces a queue pair whose controller is gone, and which has nothing outstanding, by that of a
    /// later controller.
    fn succeed(&mut self, path: usize) {
        let (lane, view) = (&mut self.lanes[path], &mut self.views[path]);
        let is_over = lane.way.as_ref().is_none_or(|way| way.standing() == QueueState::Dead);
        let owes_nothing = view.in_flight == 0 && lane.stale == 0;
        if is_over && owes_nothing && (lane.way.is_some() || lane.next.is_some()) {
            lane.way = lane.next.take();
            lane.condition = QueuePairState::Disconnected;
            view.is_open = false;
        }
    }

    /// Sends held requests again, as paths permit.
    fn send_again(&mut self, now: Instant) {
        while let Some(slot) = self.kept.first_again() {
            let reach = reach(&self.views);
            let path = match self.flushes.goes(slot, reach) {
                FlushRoute::Anywhere => self.route.choose(&self.views),
                FlushRoute::To(path) => Some(path),
                FlushRoute::Later => None,
            };
            let Some(path) = path else { return };
            let (lane, view) = (&mut self.lanes[path], &mut self.views[path]);
            let Some(way) = &mut lane.way else { return };
            let next = self.kept.next_again(view.in_flight as usize);
            let Some((request, segments)) = next else { return };
            self.flushes.sent(slot, way.association(), reach);
            if way.submit(now, &[request], segments) == 0 {
                return;
            }
            view.in_flight += 1;
            lane.is_dirty = true;
            self.kept.sent_again(now, path);
        }
    }

    /// Handles completions other than plain successes, and changes of the path's state.
    #[cold]
    fn sort_out(&mut self, now: Instant, path: usize, first: usize, answers: &mut CompletionBatch) {
        self.note_cut(now, path);
        let reach = reach(&self.views);
        let (lane, view) = (&mut self.lanes[path], &mut self.views[path]);
        let Some(way) = &mut lane.way else { return };
        let (kept, shared, stale) = (&mut self.kept, &self.shared, &mut lane.stale);
        let flushes = &mut self.flushes;
        let cut = lane.cut.unwrap_or(ConnectionLossInfo { at: now, broken: ConnectionFailure::No });
        answers.extract(first, |answer| {
            let IoCompletion { token, status: outcome, .. } = *answer;
            if !kept.is_awaited(token) {
                *stale -= 1;
                return true;
            }
            view.in_flight -= 1;
            let is_ours = match failover::of_answer(outcome) {
                RetryDecision::Complete => {
                    kept.clear_suspect(token);
                    match flushes.answered(token, outcome, way.association(), reach) {
                        FlushResult::Told => false,
                        FlushResult::MoreControllers => {
                            kept.hold_for_retry(token);
                            true
                        }
                        FlushResult::Lost => {
                            let (token, outcome) = (kept.forget(token), flushes::LOST);
                            self.failed.push(IoCompletion { token, status: outcome, result: 0 });
                            true
                        }
                    }
                }
                RetryDecision::RetryElsewhere(access) => {
                    view.access = access;
                    shared.doubt(path);
                    kept.requeue_rejected(token, true)
                }
                RetryDecision::Interrupted => kept.requeue_rejected(token, false),
                RetryDecision::Ambiguous => {
                    (view.is_resting, lane.rests_until) = (true, now.after(REST));
                    self.has_resting = true;
                    kept.requeue_rejected(token, false)
                }
                RetryDecision::Aborted => {
                    let ending = kept.ending(cut, token, way.limit);
                    kept.requeue(token, ending)
                }
            };
            if !is_ours {
                flushes.forget(token);
            }
            is_ours
        });
        self.leave_if_cut(path, cut);
    }

    /// Records what was in flight when a connection was lost; later there is less.
    fn note_cut(&mut self, now: Instant, path: usize) {
        let (lane, view) = (&mut self.lanes[path], &self.views[path]);
        let Some(way) = &lane.way else { return };
        if way.condition() == QueuePairState::Disconnected
            && lane.condition != QueuePairState::Disconnected
        {
            let broken = match (way.is_broken(), view.in_flight) {
                (false, _) => ConnectionFailure::No,
                (true, 1) => ConnectionFailure::UnderOne,
                (true, _) => ConnectionFailure::UnderMany,
            };
            lane.cut = Some(ConnectionLossInfo { at: now, broken });
        }
    }

    /// Retries elsewhere what may be, if the connection is lost.
    fn leave_if_cut(&mut self, path: usize, cut: ConnectionLossInfo) {
        let (lane, view) = (&mut self.lanes[path], &mut self.views[path]);
        let Some(way) = &mut lane.way else { return };
        if lane.condition != way.condition() {
            lane.condition = way.condition();
        }
        view.is_open = lane.condition == QueuePairState::Open;
        if lane.condition == QueuePairState::Disconnected && view.in_flight > 0 {
            // Unsent parts of split requests must not be sent when other requests use their memory.
            way.queue().abort_unsent();
            let (count, guilty) =
                self.kept.requeue_path(path, cut, way.limit, failover::is_idempotent);
            view.in_flight -= count;
            lane.stale += count;
            for slot in guilty {
                self.flushes.forget(slot);
                let (token, outcome) = (self.kept.forget(slot), IoStatus::ABORTED_BY_HOST);
                self.failed.push(IoCompletion { token, status: outcome, result: 0 });
            }
        }
    }

    #[inline]
    fn poll_path(&mut self, now: Instant, path: usize, answers: &mut CompletionBatch) {
        let first = answers.len();
        let lane = &mut self.lanes[path];
        let Some(way) = &mut lane.way else { return };
        way.poll(now, answers);
        let new = answers.tail_mut(first);
        let is_plain = lane.condition == way.condition()
            && lane.stale == 0
            && lane.next.is_none()
            && new.iter().all(|answer| answer.status.is_success())
            && !self.kept.is_isolating()
            && self.flushes.is_empty();
        if is_plain {
            self.views[path].in_flight -= u32::try_from(new.len()).unwrap_or(u32::MAX);
        } else {
            self.sort_out(now, path, first, answers);
        }
        let mut has_changed = false;
        for answer in answers.tail_mut(first) {
            has_changed |= self.kept.is_volatile(answer.token);
            answer.token = self.kept.forget(answer.token);
        }
        let Some(way) = &mut self.lanes[path].way else { return };
        if has_changed
            && self.has_cache
            && let Some(by) = way.association()
        {
            self.shared.caches().wrote(by);
        }
        way.send_rest();
        if !is_plain {
            self.succeed(path);
        }
    }
}

impl PathChannel {
    fn new() -> Self {
        Self {
            way: None,
            condition: QueuePairState::Disconnected,
            cut: None,
            rests_until: Instant::default(),
            stale: 0,
            batch: Vec::with_capacity(BATCH),
            is_dirty: false,
            next: None,
        }
    }

    /// The association that the completions of the last poll belong to.
    fn association(&self) -> Option<&Association> {
        self.way.as_ref()?.association()
    }
}

/// Paths that accept requests, now or after their back-off.
fn reach(views: &[PathView]) -> FlushScope {
    let mut reach = FlushScope::default();
    for (path, view) in views.iter().enumerate() {
        let rested = PathView { is_resting: false, ..*view };
        reach.now |= u32::from(view.is_usable()) << path;
        reach.soon |= u32::from(rested.is_usable()) << path;
    }
    reach
}

const fn failed(token: u64) -> IoCompletion {
    IoCompletion { token, status: IoStatus::PATH_ERROR, result: 0 }
}

impl IoChannel for MultipathChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    #[inline]
    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        if self.is_ordinary() {
            let taken = self.pass_on(now, requests, segments);
            if taken > 0 {
                return taken;
            }
        }
        // The table is full, or there is no known usable path.
        self.submit_slowly(now, requests, segments)
    }

    #[inline]
    fn flush(&mut self) {
        for lane in self.lanes.iter_mut().filter(|lane| lane.is_dirty) {
            lane.is_dirty = false;
            if let Some(way) = &mut lane.way {
                way.flush();
            }
        }
    }

    #[inline]
    fn poll(&mut self, now: Instant, answers: &mut CompletionBatch) -> usize {
        let first = answers.len();
        (0..self.lanes.len()).for_each(|path| self.poll_path(now, path, answers));
        if !self.is_ordinary() || !self.views.iter().any(PathView::is_usable) {
            self.settle(now);
            self.flush();
        }
        let count = self.failed.len().min(answers.remaining());
        self.failed.drain(..count).for_each(|answer| answers.push(answer));
        answers.len() - first
    }

    fn doorbell_stats(&self) -> DoorbellStats {
        self.ways()
            .map(FabricsQueuePair::doorbells)
            .fold(DoorbellStats::default(), DoorbellStats::sum)
    }

    fn losses(&self) -> u64 {
        self.flushes.losses()
    }

    fn ack_losses(&mut self, count: u64) {
        self.flushes.acknowledge(count);
    }
}

impl ChannelWakeup for MultipathChannel {
    fn wake_at(&self) -> Instant {
        if !self.failed.is_empty() {
            return Instant::default();
        }
        let end = self.down_since.filter(|_| self.kept.has_again());
        let end = end.map_or(Instant::NEVER, |since| since.after(self.fail_fast));
        let rests = self.lanes.iter().zip(&self.views).filter(|(_, view)| view.is_resting);
        let end = rests.map(|(lane, _)| lane.rests_until).fold(end, Instant::min);
        self.ways().map(FabricsQueuePair::wake_at).fold(end, Instant::min)
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.sleep.as_ref().map_or(WakeSource::None, |sleep| sleep.wake_source())
    }

    fn arm(&mut self) -> bool {
        let Some(sleep) = &mut self.sleep else { return true };
        sleep.clear();
        let ways = self.lanes.iter_mut().filter_map(|lane| lane.way.as_mut());
        // All of them are armed, without short-circuiting.
        let busy = ways.map(|way| way.arm(&mut **sleep)).filter(|is_busy| *is_busy).count();
        busy > 0 || !self.failed.is_empty() || self.desk.is_pending()
    }

    fn disarm(&mut self) {
        self.lanes
            .iter_mut()
            .filter_map(|lane| lane.way.as_mut())
            .for_each(FabricsQueuePair::disarm);
    }
}
