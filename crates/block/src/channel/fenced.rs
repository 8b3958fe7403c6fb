//! What a channel does about fences: it waits for those of others, and makes one when its own client
//! has gone. See [`fence`](crate::fence).

use base::{Instant, Outcome, Request, Segment};

use super::Channel;
use super::slow::Verdict;
use crate::fence::{WAIT_MAX, Waiting};
use crate::lock::Touched;

impl Channel {
    /// Closes what this channel still writes to everyone, and gives up what has not begun.
    #[cold]
    pub(super) fn end_client(&mut self) {
        self.give_up_waiting(Outcome::ABORTED);
        self.set_fence();
    }

    /// Opens the blocks again whose writes have been answered.
    pub(super) fn move_fence(&mut self) {
        if self.fence.is_some() {
            self.set_fence();
        }
    }

    fn set_fence(&mut self) {
        let written = self.tags.written();
        if self.fence.is_some() || !written.is_empty() {
            self.fence = self.grant.shared.set_fence(self.fence, written);
        }
    }

    /// Whether a request has to wait for the end of a write that nobody waits for any more. A flush
    /// does not: it is for what has been answered.
    pub(super) fn is_fenced(&self, request: &Request) -> bool {
        let touched = Touched::by(request);
        touched[0] != Touched::EVERYTHING
            && self.fences.iter().any(|fence| touched.iter().any(|it| it.overlaps(&fence.blocks)))
    }

    /// Puts a request aside.
    pub(super) fn wait_for_fence(&mut self, now: Instant, request: &Request, table: &[Segment]) {
        let count = usize::from(request.segment_count) + usize::from(request.metadata_count);
        let own = table.get(request.segment_first as usize..).and_then(|rest| rest.get(..count));
        let segments = own.unwrap_or_default().into();
        let request = Request { segment_first: 0, ..*request };
        self.waiting.push(Waiting { request, segments, until: now.after(WAIT_MAX) });
    }

    /// Submits what need not wait any more, and answers what has waited too long.
    #[cold]
    pub(super) fn go_on(&mut self, now: Instant) {
        let mut has_submitted = false;
        let waiting = core::mem::take(&mut self.waiting);
        for one in waiting {
            match self.verdict(&one.request) {
                Verdict::Answer(outcome) => self.refuse(&one.request, outcome),
                Verdict::Submit if self.submit_one_more(now, &one) => has_submitted = true,
                Verdict::Submit | Verdict::Hold | Verdict::Wait if now < one.until => {
                    self.waiting.push(one);
                }
                _ => self.refuse(&one.request, Outcome::INTERRUPTED),
            }
        }
        if has_submitted {
            self.lanes.iter_mut().for_each(crate::context::Lane::flush);
            self.settle();
        }
        self.set_slow();
    }

    fn submit_one_more(&mut self, now: Instant, one: &Waiting) -> bool {
        if self.room_for(1) == 0 {
            return false;
        }
        self.announce(1);
        let lane = self.lane_of(&one.request);
        self.submit_looked_at(now, lane, &[one.request], &one.segments) == 1
    }

    /// Answers what waits.
    pub(super) fn give_up_waiting(&mut self, outcome: Outcome) {
        for one in core::mem::take(&mut self.waiting) {
            self.refuse(&one.request, outcome);
        }
        self.set_slow();
    }

    /// Whether something that waited could be submitted now, if there is room for it.
    pub(super) fn may_go_on(&self) -> bool {
        self.waiting.iter().any(|one| self.verdict(&one.request) == Verdict::Submit)
    }
}
