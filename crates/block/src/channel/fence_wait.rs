//! Fences of a channel: it waits for those of other channels, and creates one when its own client is
//! lost. See [`write_fence`](crate::write_fence).

use tenmil_base::{Instant, IoStatus, Request, Segment};

use super::Channel;
use super::slow_path::AdmitDecision;
use crate::quiesce::RequestRanges;
use crate::write_fence::{FencedRequest, WAIT_MAX};

impl Channel {
    /// Fences the blocks that this channel is still writing, and aborts requests that have not been
    /// submitted.
    #[cold]
    pub(super) fn fence_client_writes(&mut self) {
        self.complete_all_waiting(IoStatus::ABORTED);
        self.fence_own_writes();
    }

    /// Reopens the blocks of writes that have completed.
    pub(super) fn shrink_own_fence(&mut self) {
        if self.fence.is_some() {
            self.fence_own_writes();
        }
    }

    fn fence_own_writes(&mut self) {
        let written = self.tags.written_ranges();
        if self.fence.is_some() || !written.is_empty() {
            self.fence = self.grant.shared.set_fence_blocks(self.fence, written);
        }
    }

    /// Whether a request has to wait for a fenced write. A flush does not wait: it covers completed
    /// writes only.
    pub(super) fn is_fenced(&self, request: &Request) -> bool {
        let touched = RequestRanges::of_request(request);
        touched[0] != RequestRanges::EVERYTHING
            && self.fences.iter().any(|fence| touched.iter().any(|it| it.overlaps(&fence.blocks)))
    }

    /// Queues a request until its blocks are open.
    pub(super) fn queue_until_unfenced(
        &mut self,
        now: Instant,
        request: &Request,
        table: &[Segment],
    ) {
        let count = usize::from(request.segment_count) + usize::from(request.metadata_count);
        let own = table.get(request.segment_first as usize..).and_then(|rest| rest.get(..count));
        let segments = own.unwrap_or_default().into();
        let request = Request { segment_first: 0, ..*request };
        self.waiting.push(FencedRequest { request, segments, until: now.after(WAIT_MAX) });
    }

    /// Submits waiting requests whose blocks are open, and completes those that have waited too long.
    #[cold]
    pub(super) fn submit_unfenced_requests(&mut self, now: Instant) {
        let mut has_submitted = false;
        let waiting = core::mem::take(&mut self.waiting);
        for one in waiting {
            match self.admit_decision(&one.request) {
                AdmitDecision::Complete(status) => self.reject_request(&one.request, status),
                AdmitDecision::Submit if self.try_submit_waiting_request(now, &one) => {
                    has_submitted = true
                }
                AdmitDecision::Submit | AdmitDecision::Hold | AdmitDecision::Wait
                    if now < one.until =>
                {
                    self.waiting.push(one);
                }
                _ => self.reject_request(&one.request, IoStatus::INTERRUPTED),
            }
        }
        if has_submitted {
            self.lanes.iter_mut().for_each(crate::context::HardwareContextRef::flush_submissions);
            self.publish_in_flight();
        }
        self.update_check_flags();
    }

    fn try_submit_waiting_request(&mut self, now: Instant, one: &FencedRequest) -> bool {
        if self.grow_free_tags(1) == 0 {
            return false;
        }
        self.publish_in_flight_bound(1);
        let lane = self.context_index_of(&one.request);
        self.submit_checked(now, lane, &[one.request], &one.segments) == 1
    }

    /// Completes all waiting requests with `status`.
    pub(super) fn complete_all_waiting(&mut self, status: IoStatus) {
        for one in core::mem::take(&mut self.waiting) {
            self.reject_request(&one.request, status);
        }
        self.update_check_flags();
    }

    /// Whether a waiting request could be submitted now, if there is a free tag.
    pub(super) fn can_proceed(&self) -> bool {
        self.waiting.iter().any(|one| self.admit_decision(&one.request) == AdmitDecision::Submit)
    }
}
