//! Reports write losses of a device to every channel, by failing one flush of each.
//!
//! ```text
//!   device      one failed flush (Write Fault) ──> losses + 1
//!   channel     flush submitted: stores the losses reported to its client so far
//!               flush completed: losses have increased ──> Write Fault, and told = losses
//! ```
//!
//! A device may report lost writes with a single flush, to the client that sent it: a disk behind one
//! queue, or a target whose kernel reports a failed writeback once. Clients of other channels have
//! unflushed writes on the device as well, so a flush of each of them fails, too.

use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::{CompletionBatch, Instant, IoCompletion, IoStatus, Operation, Request};

use super::Channel;

/// Number of write losses of a device, as reported by its flushes.
#[derive(Debug, Default)]
pub(crate) struct LostWriteCounter(AtomicU64);

/// Mask for Status Code and Status Code Type, without Command Retry Delay, More and Do Not Retry (NVM
/// Express Base 2.1, figure 100).
const STATUS: u16 = 0x7ff;

impl LostWriteCounter {
    pub(crate) fn count(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Counts a failed flush, whose client knew of `told` losses when it was submitted. If there are more
    /// by now, it may have failed because of those, and is not counted again.
    fn count_failed_flush(&self, reported_values: u64) {
        let _ = self.0.compare_exchange(
            reported_values,
            reported_values + 1,
            Ordering::AcqRel,
            Ordering::Acquire,
        );
    }
}

impl Channel {
    /// Stores the losses known to the client with each flush in `outgoing`.
    pub(super) fn store_losses_with_flushes(&mut self) {
        let Self { outgoing, tags, reported_values, .. } = self;
        let flushes = outgoing.iter().filter(|request| request.operation == Operation::Flush);
        flushes.for_each(|request| tags.set_reported_losses(request, *reported_values));
    }

    /// Counts the flushes among accepted requests.
    pub(super) fn count_accepted_flushes(&mut self, taken: &[Request]) {
        let flushes = taken.iter().filter(|request| request.operation == Operation::Flush);
        self.flushes += flushes.count();
        self.update_check_flags();
    }

    /// [`poll`](tenmil_base::IoChannel::poll) with a check of each completion.
    #[cold]
    pub(super) fn poll_checking_losses(
        &mut self,
        now: Instant,
        completions: &mut CompletionBatch,
    ) -> usize {
        let depth = self.tags.in_flight();
        let mut found = 0;
        for lane in 0..self.lanes.len() {
            let start = completions.len();
            found += self.lanes[lane].poll(now, completions);
            let given = completions.tail_mut(start);
            self.fail_flushes_after_loss(given);
            self.tags.release_tags(now, given, self.block_shift, &self.port.meter);
        }
        if found > 0 {
            self.port.meter.count_queue_depth(depth as u64);
            self.publish_in_flight();
            self.update_check_flags();
        }
        if !self.refused.is_empty() || self.is_slow {
            found += self.poll_slow_path(now, completions);
        }
        found
    }

    /// Fails successful flushes whose client may have lost writes. The tokens of the completions are
    /// tags.
    pub(super) fn fail_flushes_after_loss(&mut self, completions: &mut [IoCompletion]) {
        let Self { flushes, tags, reported_values, grant, .. } = self;
        let losses = &grant.shared.losses;
        for completion in completions {
            let Some(then) = tags.reported_losses(completion) else { continue };
            *flushes -= 1;
            if completion.status.0 & STATUS == IoStatus::WRITE_FAULT.0 {
                losses.count_failed_flush(then);
            } else if !completion.status.is_success() || losses.count() == then {
                continue;
            } else {
                completion.status = IoStatus::WRITE_FAULT;
            }
            *reported_values = losses.count();
        }
    }
}
