//! State changes of a queue pair requested by its controller: the queue side of `queue_link.rs`.

use tenmil_base::{CompletionBatch, Instant, IoStatus, Span};

use super::completions::complete_flagged;
use super::{NEVER, QueuePair, SplitTracker, Transport};
use crate::queue_link::{QueueState, queue_state_in};

/// Poll interval of a queue that is not running, to see its next state.
const STATE_POLL_INTERVAL: Span = Span::from_ms(1);

impl<T: Transport> QueuePair<T> {
    /// Applies the requested state, unless it is already applied, or the queue is to run again while
    /// parked commands are still being completed.
    #[cold]
    pub(super) fn apply_state(&mut self, now: Instant) {
        // Not every thread has a waker for state changes, so the state is checked periodically.
        self.cold.order_at = now.after(STATE_POLL_INTERVAL);
        let word = self.link.state_word();
        let order = queue_state_in(word);
        if word == self.cold.adopted
            || order == QueueState::Running && self.cold.returning.is_some()
        {
            return;
        }
        let attachment = self.link.take_attachment(order);
        match order {
            QueueState::Running => {
                if let Some(attachment) = attachment {
                    self.transport.attach(attachment);
                }
            }
            QueueState::Quiescing => self.slots.close(),
            QueueState::Frozen => {
                self.slots.close();
                self.transport.stop_sending();
            }
            QueueState::Released | QueueState::Dead => self.apply_released(),
        }
        self.cold.standing = order;
        self.cold.adopted = word;
        self.resume_fast_path();
        self.link.acknowledge(word, self.slots.in_flight());
    }

    /// Enables the fast path if there is no reason for the slow path.
    pub(super) fn resume_fast_path(&mut self) {
        let runs = self.cold.standing == QueueState::Running;
        if runs && self.cold.injections.as_ref().is_none_or(|injections| !injections.are_armed()) {
            self.slots.open();
            self.ordinary = self.cold.adopted;
        } else {
            self.slots.close();
            self.ordinary = NEVER;
        }
    }

    /// Polls with state changes or injections pending.
    #[cold]
    pub(super) fn poll_slow<P: SplitTracker>(
        &mut self,
        now: Instant,
        completions: &mut CompletionBatch,
        parents: &mut P,
    ) -> usize {
        let room = completions.remaining();
        self.apply_state(now);
        // Slots may be freed only while the table is open.
        self.slots.open();
        match self.cold.standing {
            QueueState::Running | QueueState::Quiescing => {
                if now >= self.scan_at {
                    self.scan_deadlines(now);
                }
                self.complete_injected(completions, parents);
                self.take_completions_slow(now, completions, parents);
            }
            QueueState::Frozen => {}
            QueueState::Released | QueueState::Dead => self.complete_parked(completions, parents),
        }
        self.resume_fast_path();
        if self.cold.standing != QueueState::Running {
            self.link.set_in_flight(self.slots.in_flight());
        }
        room - completions.remaining()
    }

    /// Applies `Released`: the device can no longer access memory. Empties the transport, and starts to
    /// complete the commands in flight.
    fn apply_released(&mut self) {
        self.slots.close();
        self.slots.forget_aborts();
        self.transport.drop_outstanding();
        self.drop_injected_completions();
        // An owner without pending commands may never poll; with nothing parked there is nothing to wait
        // for.
        self.cold.returning = (self.slots.in_flight() > 0).then_some(0);
    }

    /// Completes parked commands, as far as there is space.
    fn complete_parked<P: SplitTracker>(
        &mut self,
        completions: &mut CompletionBatch,
        parents: &mut P,
    ) {
        let Some(mut index) = self.cold.returning else { return };
        while index < self.slots.len() && completions.remaining() > 0 {
            if let Some(cid) = self.slots.in_flight_at(index)
                && let Ok(ended) = self.slots.complete(cid)
            {
                let status = IoStatus::ABORTED_BY_HOST;
                complete_flagged(ended, status, 0, parents)
                    .into_iter()
                    .for_each(|it| completions.push(it));
            }
            index += 1;
        }
        self.cold.returning = (index < self.slots.len()).then_some(index);
    }
}
