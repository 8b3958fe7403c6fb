//! Slow path of a channel: handles changes of its device, rejects and holds requests, and aborts them
//! after a removal.

use std::sync::atomic::Ordering;

use tenmil_base::{
    CompletionBatch, Instant, Interrupts, IoCompletion, IoStatus, Operation, Request, Segment,
};

use super::{Channel, WRITING};
use crate::quiesce::{QuiesceEntry, RequestRanges};

/// Decision on one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AdmitDecision {
    Submit,
    Complete(IoStatus),
    /// Not accepted now: its blocks are quiesced.
    Hold,
    /// Queued until its blocks are no longer fenced.
    Wait,
}

impl Channel {
    /// Handles changes of the device: size, quiesced ranges, fences, removal.
    #[cold]
    pub(super) fn handle_changes(&mut self) {
        // The waker is armed before the state is read: a later change raises it.
        self.is_deaf = !self.port.waker.unmask(0);
        let view = self.grant.shared.channel_view();
        self.seen = view.generation;
        self.limits.block_count = view.block_count;
        self.gate.block_count = view.block_count;
        self.holds = view.holds;
        self.fences = view.fences;
        if view.is_removed && !self.is_removed {
            self.fail_all_in_flight();
        }
        self.update_check_flags();
        self.wake_quiescers_if_drained();
    }

    /// Determines whether requests and completions need individual checks.
    pub(super) fn update_check_flags(&mut self) {
        self.is_slow = self.is_removed
            || !self.holds.is_empty()
            || !self.fences.is_empty()
            || !self.waiting.is_empty();
        self.is_careful = self.is_slow || self.flushes > 0;
    }

    /// The device has been removed. The channels below are closed first, so that no memory is accessed
    /// any more; then requests in flight are completed.
    fn fail_all_in_flight(&mut self) {
        self.is_removed = true;
        let count = self.tags.in_flight();
        let mut put_by = CompletionBatch::with_capacity(count);
        for lane in 0..self.lanes.len() {
            let start = put_by.as_slice().len();
            self.lanes[lane].close_and_drain_inbox(&mut put_by);
            let given = put_by.tail_mut(start);
            self.fail_flushes_after_loss(given);
            // The current time is not known here, and these latencies are not of interest.
            self.tags.release_tags(Instant::default(), given, self.block_shift, &self.port.meter);
        }
        self.refused.extend(put_by.as_slice().iter().copied());
        self.flushes = 0;
        for (completion, operation) in self.tags.fail_all_in_flight(IoStatus::ABORTED_BY_HOST) {
            self.port.meter.count_failure(operation, completion.status);
            self.refused.push(completion);
        }
        self.port.is_open.store(false, Ordering::Release);
        self.publish_in_flight();
        self.complete_all_waiting(IoStatus::NO_DEVICE);
    }

    /// Notifies the quiescing threads if nothing of this channel is in flight in their ranges.
    fn wake_quiescers_if_drained(&mut self) {
        let mine = self.port.index;
        let others = self.holds.iter().filter(|held| held.except != Some(mine));
        let is_quiet = others.clone().all(|held| {
            self.tags.ranges_in_flight().all(|touched| !touched.overlaps(&held.blocks))
        });
        if is_quiet && self.port.quiet.load(Ordering::Relaxed) < self.seen {
            // Pairs with the load of the quiescing thread: the requests in its range have ended before
            // this.
            self.port.quiet.store(self.seen, Ordering::Release);
            others.for_each(|held| held.waker.clone().raise(0));
        }
    }

    /// Submits consecutive permitted requests together. Each other request is completed or queued
    /// individually, or ends the batch.
    #[cold]
    pub(super) fn submit_slow_path(
        &mut self,
        now: Instant,
        lane: usize,
        requests: &[Request],
        segments: &[Segment],
    ) -> usize {
        let mut done = 0;
        while done < requests.len() {
            let room =
                self.grow_free_tags(requests.len() - done).saturating_sub(self.waiting.len());
            let rest = &requests[done..][..room.min(requests.len() - done)];
            let verdicts = rest.iter().map(|request| self.admit_decision(request));
            let good = verdicts.take_while(|verdict| *verdict == AdmitDecision::Submit).count();
            if good > 0 {
                let taken = self.submit_checked(now, lane, &rest[..good], segments);
                done += taken;
                if taken < good {
                    break;
                }
                continue;
            }
            let Some(first) = rest.first() else { break };
            match self.admit_decision(first) {
                AdmitDecision::Complete(status) => self.reject_request(first, status),
                AdmitDecision::Wait => self.queue_until_unfenced(now, first, segments),
                AdmitDecision::Submit | AdmitDecision::Hold => break,
            }
            done += 1;
        }
        done
    }

    pub(super) fn submit_checked(
        &mut self,
        now: Instant,
        lane: usize,
        requests: &[Request],
        segments: &[Segment],
    ) -> usize {
        if requests.iter().any(|request| self.overlaps_quiesced(request)) {
            // Permitted because of an older range. For the other ranges, the channel has not drained any
            // more.
            self.port.quiet.store(0, Ordering::Release);
        }
        let traits = self.tags.assign_tags(now, requests, &mut self.outgoing);
        self.store_losses_with_flushes();
        let taken = self.submit_to_context(now, lane, traits, segments);
        self.count_accepted_flushes(&requests[..taken]);
        taken
    }

    fn overlaps_quiesced(&self, request: &Request) -> bool {
        let touched = RequestRanges::of_request(request);
        let mut others = self.holds.iter().filter(|held| held.except != Some(self.port.index));
        others.any(|held| touched.iter().any(|part| part.overlaps(&held.blocks)))
    }

    pub(super) fn admit_decision(&self, request: &Request) -> AdmitDecision {
        let Request { lba, operand, operation, .. } = *request;
        let blocks = u64::from(request.blocks);
        let fits =
            |first: u64| first.checked_add(blocks).is_some_and(|end| end <= self.gate.block_count);
        let is_inside = match operation {
            Operation::Flush => true,
            Operation::Copy => fits(lba) && fits(operand),
            _ => fits(lba),
        };
        if self.is_removed {
            AdmitDecision::Complete(IoStatus::NO_DEVICE)
        } else if self.gate.is_read_only && WRITING.has(operation) {
            AdmitDecision::Complete(IoStatus::WRITE_PROTECTED)
        } else if !self.gate.support.has(operation) {
            AdmitDecision::Complete(IoStatus::INVALID_OPCODE)
        } else if !is_inside {
            AdmitDecision::Complete(IoStatus::LBA_OUT_OF_RANGE)
        } else if QuiesceEntry::blocks_request(
            &self.holds,
            self.port.index,
            RequestRanges::of_request(request),
        ) {
            AdmitDecision::Hold
        } else if self.is_fenced(request) {
            AdmitDecision::Wait
        } else {
            AdmitDecision::Submit
        }
    }

    pub(super) fn reject_request(&mut self, request: &Request, status: IoStatus) {
        self.port.meter.count_failure(request.operation as usize, status);
        self.refused.push(IoCompletion { token: request.token, status, result: 0 });
    }

    /// Delivers pending completions, submits waiting requests, and reports whether ranges have drained.
    /// Returns the number of completions delivered.
    #[cold]
    pub(super) fn poll_slow_path(
        &mut self,
        now: Instant,
        completions: &mut CompletionBatch,
    ) -> usize {
        self.shrink_own_fence();
        if !self.waiting.is_empty() {
            self.submit_unfenced_requests(now);
        }
        let given = self.refused.drain_into(completions);
        self.wake_quiescers_if_drained();
        given
    }
}
