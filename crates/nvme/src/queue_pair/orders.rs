//! What a queue pair does when its controller wants something of it: the other half of `link.rs`.

use base::{Answers, Dma, Doorbell, Instant, Outcome, Span, SubmissionRing};

use super::completions::end_special;
use super::{NEVER, Parents, QueuePair};
use crate::link::{Order, order_in};

/// How often a queue that has been told not to run wants to be polled: for the next order.
const ORDER_PAUSE: Span = Span::from_ms(1);

impl<D: Dma, B: Doorbell> QueuePair<D, B> {
    /// Adopts the order in force, unless it has been adopted already or parked commands are still
    /// to be answered before the queue may run again.
    #[cold]
    pub(super) fn adopt_order(&mut self, now: Instant) {
        // Nobody calls when the order changes: a look now and then, and not all the time.
        self.cold.order_at = now.after(ORDER_PAUSE);
        let word = self.link.word();
        let order = order_in(word);
        if word == self.cold.adopted || order == Order::Run && self.cold.returning.is_some() {
            return;
        }
        match order {
            Order::Run => {}
            Order::Quiesce => self.slots.close(),
            Order::Freeze => {
                self.slots.close();
                // What the controller has not heard of, it will not hear of.
                (self.rung_tail, self.unrung) = (self.tail, 0);
            }
            Order::Release | Order::Dead => self.release(),
        }
        self.cold.standing = order;
        self.cold.adopted = word;
        self.be_ordinary_if_so();
        self.link.adopt(word, self.slots.in_flight());
    }

    /// With nothing unusual to do, the next polls take the short way.
    pub(super) fn be_ordinary_if_so(&mut self) {
        let runs = self.cold.standing == Order::Run;
        if runs && self.cold.injections.as_ref().is_none_or(|injections| !injections.are_armed()) {
            self.slots.open();
            self.ordinary = self.cold.adopted;
        } else {
            self.slots.close();
            self.ordinary = NEVER;
        }
    }

    /// A poll that is out of the ordinary.
    #[cold]
    pub(super) fn poll_ordered<P: Parents>(
        &mut self,
        now: Instant,
        answers: &mut Answers,
        parents: &mut P,
    ) -> usize {
        let room = answers.room();
        self.adopt_order(now);
        // Slots are freed only while the table is open.
        self.slots.open();
        match self.cold.standing {
            Order::Run | Order::Quiesce => {
                if now >= self.scan_at {
                    self.scan(now);
                }
                self.answer_injected(answers, parents);
                self.take_completions_slowly(answers, parents);
            }
            Order::Freeze => {}
            Order::Release | Order::Dead => self.return_parked(answers, parents),
        }
        self.be_ordinary_if_so();
        if self.cold.standing != Order::Run {
            self.link.count(self.slots.in_flight());
        }
        room - answers.room()
    }

    /// The device can touch no memory any more: begins again with empty rings, and with answering
    /// what was in flight.
    fn release(&mut self) {
        self.slots.close();
        self.slots.forget_aborts();
        let memory = self.cold.memory;
        // Cannot fail for memory that holds a ring; if it did, its phase bits would be nonsense and be
        // refused as that.
        let _ = self.cold.dma.fill(memory.completion, 0);
        if memory.is_in_device {
            self.clear_submissions();
        } else {
            let _ = self.cold.dma.fill(memory.submission, 0);
        }
        (self.tail, self.rung_tail, self.fetched) = (0, 0, 0);
        (self.head, self.phase, self.unrung) = (0, true, 0);
        self.submission_doorbell.restart();
        self.completion_doorbell.restart();
        self.forget_injected_answers();
        // Who is owed nothing may never poll: with nothing parked there is nothing to wait for.
        self.cold.returning = (self.slots.in_flight() > 0).then_some(0);
    }

    /// Zeroes the submission ring by the stores that its memory takes, which may not be any.
    pub(super) fn clear_submissions(&mut self) {
        for index in 0..self.submission_depth {
            self.submission.store(index, &[0; 8]);
        }
    }

    /// Answers parked commands, as far as there is room.
    fn return_parked<P: Parents>(&mut self, answers: &mut Answers, parents: &mut P) {
        let Some(mut index) = self.cold.returning else { return };
        while index < self.slots.len() && answers.room() > 0 {
            if let Some(cid) = self.slots.in_flight_at(index)
                && let Ok(ended) = self.slots.complete(cid)
            {
                let outcome = Outcome::ABORTED_BY_HOST;
                end_special(ended, outcome, 0, parents).into_iter().for_each(|it| answers.push(it));
            }
            index += 1;
        }
        self.cold.returning = (index < self.slots.len()).then_some(index);
    }
}
