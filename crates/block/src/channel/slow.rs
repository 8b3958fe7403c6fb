//! What a channel does beside the fast way: looks what its device is about, refuses, holds back, and
//! gives up.

use std::sync::atomic::Ordering;

use base::{Answer, Answers, Instant, Interrupts, Operation, Outcome, Request, Segment};

use super::{Channel, WRITING};
use crate::lock::{Held, Touched};

/// What becomes of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Submit,
    Answer(Outcome),
    /// Not now: somebody holds its blocks still.
    Hold,
    /// It waits beside the others until its blocks are open again.
    Wait,
}

impl Channel {
    /// Looks what the device is about: its size, who holds what, whether it is still there.
    #[cold]
    pub(super) fn attend(&mut self) {
        // First the bell, then the look: what changes after it rings again.
        self.is_deaf = !self.port.bell.unmask(0);
        let view = self.grant.shared.view();
        self.seen = view.generation;
        self.limits.block_count = view.block_count;
        self.gate.block_count = view.block_count;
        self.holds = view.holds;
        self.fences = view.fences;
        if view.is_removed && !self.is_removed {
            self.give_up();
        }
        self.set_slow();
        self.tell_if_quiet();
    }

    /// Whether there is anything that a request has to be looked at for by itself.
    pub(super) fn set_slow(&mut self) {
        self.is_slow = self.is_removed
            || !self.holds.is_empty()
            || !self.fences.is_empty()
            || !self.waiting.is_empty();
        self.is_careful = self.is_slow || self.flushes > 0;
    }

    /// The device has gone: the ways to the medium are dropped, and only then, when nothing can touch
    /// their memory any more, the requests in flight are answered.
    fn give_up(&mut self) {
        self.is_removed = true;
        let count = self.tags.in_flight();
        let mut put_by = Answers::with_capacity(count);
        for lane in 0..self.lanes.len() {
            let start = put_by.as_slice().len();
            self.lanes[lane].close(&mut put_by);
            let given = put_by.after_mut(start);
            self.judge_flushes(given);
            // The time of the last turn is not known here, and the latency of these is nobody's.
            self.tags.give_back(Instant::default(), given, self.block_shift, &self.port.meter);
        }
        self.refused.extend(put_by.as_slice().iter().copied());
        self.flushes = 0;
        for (answer, operation) in self.tags.abandon(Outcome::ABORTED_BY_HOST) {
            self.port.meter.failed(operation);
            self.refused.push(answer);
        }
        self.port.is_open.store(false, Ordering::Release);
        self.settle();
        self.give_up_waiting(Outcome::NO_DEVICE);
    }

    /// Tells those who hold blocks still that nothing of this channel is there any more.
    fn tell_if_quiet(&mut self) {
        let mine = self.port.index;
        let others = self.holds.iter().filter(|held| held.except != Some(mine));
        let is_quiet = others
            .clone()
            .all(|held| self.tags.touched().all(|touched| !touched.overlaps(&held.blocks)));
        if is_quiet && self.port.quiet.load(Ordering::Relaxed) < self.seen {
            // Pairs with the load of whoever holds: the requests there have ended before this.
            self.port.quiet.store(self.seen, Ordering::Release);
            others.for_each(|held| held.bell.clone().raise(0));
        }
    }

    /// Those in a row that may go down go together; each of the others is answered by itself, or ends
    /// the batch.
    #[cold]
    pub(super) fn submit_slowly(
        &mut self,
        now: Instant,
        lane: usize,
        requests: &[Request],
        segments: &[Segment],
    ) -> usize {
        let mut done = 0;
        while done < requests.len() {
            let room = self.room_for(requests.len() - done).saturating_sub(self.waiting.len());
            let rest = &requests[done..][..room.min(requests.len() - done)];
            let verdicts = rest.iter().map(|request| self.verdict(request));
            let good = verdicts.take_while(|verdict| *verdict == Verdict::Submit).count();
            if good > 0 {
                let taken = self.submit_looked_at(now, lane, &rest[..good], segments);
                done += taken;
                if taken < good {
                    break;
                }
                continue;
            }
            let Some(first) = rest.first() else { break };
            match self.verdict(first) {
                Verdict::Answer(outcome) => self.refuse(first, outcome),
                Verdict::Wait => self.wait_for_fence(now, first, segments),
                Verdict::Submit | Verdict::Hold => break,
            }
            done += 1;
        }
        done
    }

    pub(super) fn submit_looked_at(
        &mut self,
        now: Instant,
        lane: usize,
        requests: &[Request],
        segments: &[Segment],
    ) -> usize {
        if requests.iter().any(|request| self.touches_a_hold(request)) {
            // Let through by an older one. For the others the channel is not quiet any more.
            self.port.quiet.store(0, Ordering::Release);
        }
        let traits = self.tags.lend(now, requests, &mut self.outgoing);
        self.mark_flushes();
        let taken = self.send(now, lane, traits, segments);
        self.await_flushes(&requests[..taken]);
        taken
    }

    fn touches_a_hold(&self, request: &Request) -> bool {
        let touched = Touched::by(request);
        let mut others = self.holds.iter().filter(|held| held.except != Some(self.port.index));
        others.any(|held| touched.iter().any(|part| part.overlaps(&held.blocks)))
    }

    pub(super) fn verdict(&self, request: &Request) -> Verdict {
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
            Verdict::Answer(Outcome::NO_DEVICE)
        } else if self.gate.is_read_only && WRITING.has(operation) {
            Verdict::Answer(Outcome::WRITE_PROTECTED)
        } else if !self.gate.support.has(operation) {
            Verdict::Answer(Outcome::INVALID_OPCODE)
        } else if !is_inside {
            Verdict::Answer(Outcome::LBA_OUT_OF_RANGE)
        } else if Held::keeps_away(&self.holds, self.port.index, Touched::by(request)) {
            Verdict::Hold
        } else if self.is_fenced(request) {
            Verdict::Wait
        } else {
            Verdict::Submit
        }
    }

    pub(super) fn refuse(&mut self, request: &Request, outcome: Outcome) {
        self.port.meter.failed(request.operation as usize);
        self.refused.push(Answer { token: request.token, outcome, result: 0 });
    }

    /// Gives answers that lie ready, lets go on what waited, and says if the channel has become quiet.
    /// Returns how many answers it gave.
    #[cold]
    pub(super) fn poll_slowly(&mut self, now: Instant, answers: &mut Answers) -> usize {
        self.move_fence();
        if !self.waiting.is_empty() {
            self.go_on(now);
        }
        let given = self.refused.give(answers);
        self.tell_if_quiet();
        given
    }
}
