//! Flushes of a channel, judged by what any channel of the device has been told.
//!
//! ```text
//!   device      one failed flush (Write Fault) ──> losses + 1
//!   channel     flush: keeps the losses that its client has been told when it is submitted
//!               answer: there are others now ──> Write Fault, and told = losses
//! ```
//!
//! A device may report lost writes with a single flush, to the client whose flush it was: a disk behind
//! one queue, or a target whose kernel reports a failed writeback once. Clients of the other channels have
//! unflushed writes there as well, so each of them fails a flush, too.

use std::sync::atomic::{AtomicU64, Ordering};

use base::{Answer, Answers, Instant, Operation, Outcome, Request};

use super::Channel;

/// How often writes of a device were lost, as far as flushes have told.
#[derive(Debug, Default)]
pub(crate) struct Losses(AtomicU64);

/// The status code and its type: without Command Retry Delay, More and Do Not Retry (NVM Express Base 2.1,
/// figure 100).
const STATUS: u16 = 0x7ff;

impl Losses {
    pub(crate) fn count(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// A flush has failed whose client had been told of so many when it was submitted. If there are more
    /// by now, it may have failed for those, and counts for nothing new.
    fn report(&self, told: u64) {
        let _ = self.0.compare_exchange(told, told + 1, Ordering::AcqRel, Ordering::Acquire);
    }
}

impl Channel {
    /// Keeps with the flushes in `outgoing` what their client has been told.
    pub(super) fn mark_flushes(&mut self) {
        let Self { outgoing, tags, told, .. } = self;
        let flushes = outgoing.iter().filter(|request| request.operation == Operation::Flush);
        flushes.for_each(|request| tags.set_told(request, *told));
    }

    /// Of these, flushes have an answer to come.
    pub(super) fn await_flushes(&mut self, taken: &[Request]) {
        let flushes = taken.iter().filter(|request| request.operation == Operation::Flush);
        self.flushes += flushes.count();
        self.set_slow();
    }

    /// As [`poll`](base::Backend::poll), with a look at each answer.
    #[cold]
    pub(super) fn poll_carefully(&mut self, now: Instant, answers: &mut Answers) -> usize {
        let depth = self.tags.in_flight();
        let mut found = 0;
        for lane in 0..self.lanes.len() {
            let start = answers.len();
            found += self.lanes[lane].poll(now, answers);
            let given = answers.after_mut(start);
            self.judge_flushes(given);
            self.tags.give_back(now, given, self.block_shift, &self.port.meter);
        }
        if found > 0 {
            self.port.meter.polled(depth as u64);
            self.settle();
            self.set_slow();
        }
        if self.refused.len() > 0 || self.is_slow {
            found += self.poll_slowly(now, answers);
        }
        found
    }

    /// Fails the flushes among answers, whose tokens are tags, of whose client writes may be lost.
    pub(super) fn judge_flushes(&mut self, answers: &mut [Answer]) {
        let Self { flushes, tags, told, grant, .. } = self;
        let losses = &grant.shared.losses;
        for answer in answers {
            let Some(then) = tags.told_of(answer) else { continue };
            *flushes -= 1;
            if answer.outcome.0 & STATUS == Outcome::WRITE_FAULT.0 {
                losses.report(then);
            } else if !answer.outcome.is_success() || losses.count() == then {
                continue;
            } else {
                answer.outcome = Outcome::WRITE_FAULT;
            }
            *told = losses.count();
        }
    }
}
