//! Submission of requests to the paths of a channel.

use tenmil_base::{Instant, Operation, Request, Segment};

use super::{
    BATCH, FabricsChannel, PathChannel, RESUBMIT, flush_scope, path_error_completion, path_number,
};
use crate::flush_fanout::FlushRoute;
use crate::multipath::path_selector::BatchRoute;

/// What becomes of a request that a path does not accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RejectedRequestHandling {
    /// It is returned to the submitter. It is one of the last of its batch.
    Return,
    /// It is held, because later ones of its batch were accepted by other paths.
    Hold,
}

impl FabricsChannel {
    /// Submits requests to the paths, as long as the inflight table has free slots.
    #[inline]
    pub(super) fn submit_batches(
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
                BatchRoute::To(path) if !has_flush => self.submit_to_path(now, path, run, segments),
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
    fn submit_to_path(
        &mut self,
        now: Instant,
        path: usize,
        run: &[Request],
        segments: &[Segment],
    ) -> usize {
        let (inflight, number) = (&mut self.inflight, path_number(path));
        let path_channel = &mut self.path_channels[path];
        let insert = |request: &Request| inflight.insert(now, request, segments, number);
        path_channel.batch.extend(run.iter().map_while(insert));
        self.send_batch(now, path, segments, RejectedRequestHandling::Return)
    }

    /// Submits requests whose paths are selected one by one.
    #[inline(never)]
    fn submit_each(&mut self, now: Instant, run: &[Request], segments: &[Segment]) -> usize {
        let mut count = 0;
        for request in run {
            let Some(path) = self.selector.choose(&self.views) else { break };
            let tracked = self.inflight.insert(now, request, segments, path_number(path));
            let Some(tracked) = tracked else { break };
            let path = match request.operation {
                Operation::Flush => self.register_flush(tracked.token, path),
                _ => path,
            };
            // For the choice of the next one.
            self.views[path].in_flight += 1;
            self.path_channels[path].batch.push(tracked);
            count += 1;
        }
        let is_used = |path_channel: &PathChannel| !path_channel.batch.is_empty();
        let are_several = self.path_channels.iter().filter(|it| is_used(it)).count() > 1;
        let rejected = if are_several {
            RejectedRequestHandling::Hold
        } else {
            RejectedRequestHandling::Return
        };
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
    fn register_flush(&mut self, slot: u64, path: usize) -> usize {
        if !self.flushes.register_flush(slot) {
            return path;
        }
        // New flushes do not wait for a path that is backed off.
        let path = match self.flushes.route(slot, flush_scope(&self.views)) {
            FlushRoute::To(path) => path,
            FlushRoute::Anywhere | FlushRoute::Later => path,
        };
        let scope = flush_scope(&self.views);
        self.flushes.record_sent(slot, self.path_channels[path].association(), scope);
        self.inflight.set_path(slot, path_number(path));
        path
    }

    /// Submits the batch of a path. Returns how many of its requests the channel keeps.
    #[inline]
    fn send_batch(
        &mut self,
        now: Instant,
        path: usize,
        segments: &[Segment],
        rejected: RejectedRequestHandling,
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
            self.remove_or_hold_rejected(path, submitted, rejected)
        };
        self.path_channels[path].batch.clear();
        kept
    }

    /// Removes or holds the requests of a batch that its path has not accepted.
    #[cold]
    fn remove_or_hold_rejected(
        &mut self,
        path: usize,
        submitted: usize,
        rejected: RejectedRequestHandling,
    ) -> usize {
        let batch = &self.path_channels[path].batch;
        match rejected {
            RejectedRequestHandling::Hold => {
                for request in &batch[submitted..] {
                    self.inflight.hold_for_retry(request.token);
                }
                batch.len()
            }
            RejectedRequestHandling::Return => {
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
    pub(super) fn submit_slow_path(
        &mut self,
        now: Instant,
        requests: &[Request],
        segments: &[Segment],
    ) -> usize {
        if self.inflight.is_empty() {
            self.poll_paths(now);
        }
        self.update_paths(now);
        if self.must_fail_requests(now) && !self.is_resuming(now) {
            let free_slots = (self.limits.depth_max as usize).saturating_sub(self.failed.len());
            let count = requests.len().min(free_slots);
            self.shared.counters().count_unserved(count);
            self.failed.extend(
                requests[..count].iter().map(|request| path_error_completion(request.token)),
            );
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
}
