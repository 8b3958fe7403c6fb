//! What a channel does when a path is lost, restored or replaced, or rejects a request.

use tenmil_base::{CompletionBatch, Instant, IoCompletion, IoStatus};
use tenmil_nvme_host::QueueState;

use super::{FabricsChannel, PATH_BACKOFF, flush_scope, path_error_completion, path_number};
use crate::fabrics_queue_pair::{FabricsQueuePair, QueuePairState};
use crate::flush_fanout::{self, FlushResult, FlushRoute};
use crate::inflight_requests::{ConnectionFailure, ConnectionLossSnapshot};
use crate::multipath::failover::{self, RetryDecision};
use crate::multipath::path_selector::PathView;

impl FabricsChannel {
    /// Whether held and new requests have to fail.
    pub(super) fn must_fail_requests(&self, now: Instant) -> bool {
        let is_overdue = |since| now.since(since) >= self.fail_fast;
        self.down_since.is_some_and(|since| self.has_ended || is_overdue(since))
    }

    /// Whether the controller of an accessible path is connected again, and the queue pair of that path follows
    /// as soon as it is polled.
    pub(super) fn is_resuming(&mut self, now: Instant) -> bool {
        if self.has_ended {
            return false;
        }
        let caches = self.shared.caches();
        let next = self.path_channels.iter().zip(&self.views).enumerate();
        let next = next.filter(|(_, (_, view))| view.is_accessible());
        let next = next
            .filter_map(|(path, (path_channel, _))| {
                caches.successor_number(path, path_channel.association())
            })
            .max();
        self.resumption.must_wait(next, now, self.fail_fast)
    }

    /// Applies changed path states, checks which paths are usable, and retries held requests.
    pub(super) fn update_paths(&mut self, now: Instant) {
        if self.inbox.is_pending() {
            self.apply_path_changes();
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
        if self.must_fail_requests(now) {
            while let Some(slot) = self.inflight.pop_retry() {
                self.shared.counters().count_unserved(1);
                self.flushes.remove(slot);
                self.failed.push(path_error_completion(self.inflight.remove(slot)));
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
    pub(super) fn apply_path_changes(&mut self) {
        let queue_pairs = self.inbox.take().unwrap_or_default();
        self.has_ended = self.shared.is_device_gone();
        for (path, view) in self.views.iter_mut().enumerate() {
            view.access = self.shared.ana_state(path);
        }
        queue_pairs
            .into_iter()
            .for_each(|(path, queue_pair)| self.set_next_queue_pair(path, queue_pair));
    }

    pub(super) fn set_next_queue_pair(&mut self, path: usize, queue_pair: FabricsQueuePair) {
        if let Some(wait_handle) = &self.wait_handle {
            queue_pair.set_waker(&**wait_handle);
        }
        self.path_channels[path].next = Some(queue_pair);
        self.replace_dead_queue_pair(path);
    }

    /// Replaces a queue pair whose controller is dead, and which has nothing outstanding, by that of a
    /// later controller.
    pub(super) fn replace_dead_queue_pair(&mut self, path: usize) {
        let (path_channel, view) = (&mut self.path_channels[path], &mut self.views[path]);
        let is_dead = path_channel
            .queue_pair
            .as_ref()
            .is_none_or(|queue_pair| queue_pair.driver_state() == QueueState::Dead);
        let is_idle = view.in_flight == 0 && path_channel.stale == 0;
        if is_dead && is_idle && (path_channel.queue_pair.is_some() || path_channel.next.is_some())
        {
            path_channel.queue_pair = path_channel.next.take();
            // The controller thread may have attached its connection already.
            let state = path_channel.queue_pair.as_ref().map(FabricsQueuePair::state);
            path_channel.state = state.unwrap_or(QueuePairState::Disconnected);
            view.is_open = path_channel.state == QueuePairState::Open;
        }
    }

    /// Sends held requests again, as paths permit.
    fn send_retries(&mut self, now: Instant) {
        while let Some(slot) = self.inflight.first_retry() {
            let scope = flush_scope(&self.views);
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
            self.inflight.record_retry(now, path_number(path));
        }
    }

    /// Handles completions other than plain successes, and changes of the path's state.
    #[cold]
    pub(super) fn handle_exceptions(
        &mut self,
        now: Instant,
        path: usize,
        first: usize,
        completions: &mut CompletionBatch,
    ) {
        self.record_connection_loss(now, path);
        let scope = flush_scope(&self.views);
        let (path_channel, view) = (&mut self.path_channels[path], &mut self.views[path]);
        let Some(queue_pair) = &mut path_channel.queue_pair else { return };
        let (inflight, shared, stale) = (&mut self.inflight, &self.shared, &mut path_channel.stale);
        let flushes = &mut self.flushes;
        let loss = path_channel
            .loss
            .unwrap_or(ConnectionLossSnapshot { at: now, failure: ConnectionFailure::NotBroken });
        completions.remove_if(first, |completion| {
            let IoCompletion { token, status, .. } = *completion;
            if !inflight.is_awaited(token) {
                *stale -= 1;
                return true;
            }
            view.in_flight -= 1;
            let decision = failover::retry_decision(status);
            let is_removed = match decision {
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
                            let (token, status) = (inflight.remove(token), flush_fanout::LOST);
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
                    inflight.requeue_after_loss(token, loss_verdict)
                }
            };
            if !is_removed {
                flushes.remove(token);
            } else if decision != RetryDecision::Complete {
                shared.counters().count_retries(path, 1);
            }
            is_removed
        });
        self.requeue_lost_path(path, loss);
    }

    /// Records what was in flight when a connection was lost; later there is less.
    fn record_connection_loss(&mut self, now: Instant, path: usize) {
        let (path_channel, view) = (&mut self.path_channels[path], &self.views[path]);
        let Some(queue_pair) = &path_channel.queue_pair else { return };
        let state = queue_pair.state();
        if path_channel.state == QueuePairState::Open && state != QueuePairState::Open {
            path_channel.loss = None;
        }
        if state == QueuePairState::Disconnected
            && path_channel.state != QueuePairState::Disconnected
        {
            let failure = match (queue_pair.is_connection_lost(), view.in_flight) {
                (false, _) => ConnectionFailure::NotBroken,
                (true, 1) => ConnectionFailure::OneInFlight,
                (true, _) => ConnectionFailure::ManyInFlight,
            };
            path_channel.loss = Some(ConnectionLossSnapshot { at: now, failure });
        }
    }

    /// Retries elsewhere what may be, if the connection is lost.
    fn requeue_lost_path(&mut self, path: usize, loss: ConnectionLossSnapshot) {
        let (path_channel, view) = (&mut self.path_channels[path], &mut self.views[path]);
        let Some(queue_pair) = &mut path_channel.queue_pair else { return };
        if path_channel.state != queue_pair.state() {
            path_channel.state = queue_pair.state();
        }
        view.is_open = path_channel.state == QueuePairState::Open;
        if path_channel.state == QueuePairState::Disconnected && view.in_flight > 0 {
            // Unsent parts of split requests must not be sent when other requests use their memory.
            queue_pair.driver_queue().abort_unsent();
            let (count, not_retried) = self.inflight.requeue_path(
                path_number(path),
                loss,
                queue_pair.command_timeout,
                failover::is_idempotent,
            );
            view.in_flight -= count;
            path_channel.stale += count;
            let retried = u64::from(count) - not_retried.len() as u64;
            self.shared.counters().count_retries(path, retried);
            for slot in not_retried {
                self.flushes.remove(slot);
                let (token, status) = (self.inflight.remove(slot), IoStatus::ABORTED_BY_HOST);
                self.failed.push(IoCompletion { token, status, result: 0 });
            }
        }
    }
}
