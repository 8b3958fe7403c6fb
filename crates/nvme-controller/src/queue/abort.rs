//! Early termination of commands: abort, preemption, queue deletion, and stopping a queue.

use tenmil_base::{Instant, RingMemory};
use tenmil_wire::Status;

use super::Queue;
use crate::controller::PreemptedWriterGuard;
use crate::executor::{CommandTag, low_16_bits};

impl<H: RingMemory> Queue<H> {
    /// Tries to abort a command (Base 2.1 §5.1.1). Returns true if it completes, now or later, as
    /// aborted. A command that a block device already executes, or that was never fetched, is not
    /// affected.
    pub fn try_abort_command(&mut self, now: Instant, sqid: u16, cid: u16) -> bool {
        let Some(index) = self.submissions.iter().position(|queue| queue.id == sqid) else {
            return false;
        };
        let tag = CommandTag { stream: low_16_bits(index as u64), id: cid };
        let is_aborted = match self.held {
            // The held command has no slot yet: it completes as soon as a completion entry is free.
            Some((held_index, command)) if held_index == index && command.cid() == cid => {
                let has_room = self.fetch_budget(1) == 1;
                if has_room {
                    self.held = None;
                    self.submissions[index].in_flight += 1;
                    self.executor.reject_command(tag, &command, Status::ABORT_REQUESTED);
                }
                has_room
            }
            _ => self.executor.try_abort_command(now, tag),
        };
        self.post_finished();
        is_aborted
    }

    /// Aborts the outstanding commands of a namespace after its reservation was preempted: see
    /// [`Executor::abort_namespace`](crate::executor::Executor::abort_namespace).
    pub fn abort_namespace(&mut self, now: Instant, nsid: u32, preempted: &PreemptedWriterGuard) {
        self.executor.abort_namespace(now, nsid, preempted);
        self.post_finished();
    }

    /// See [`Executor::poll_preempted_writes`](crate::executor::Executor::poll_preempted_writes).
    pub fn poll_preempted_writes(&mut self) {
        self.executor.poll_preempted_writes();
    }

    /// Stops fetching from a submission queue; commands already fetched are completed.
    pub fn close_submission_queue(&mut self, now: Instant, sqid: u16) {
        let Some(index) = self.submissions.iter().position(|queue| queue.id == sqid) else {
            return;
        };
        self.submissions[index].is_closing = true;
        self.held.take_if(|(held_index, _)| *held_index == index);
        self.executor.cancel_stream(now, low_16_bits(index as u64));
        self.post_finished();
    }

    /// Removes a closed submission queue once all its commands have completed. Returns true if it is
    /// removed.
    pub fn remove_submission_queue(&mut self, sqid: u16) -> bool {
        let Some(index) = self.submissions.iter().position(|queue| queue.id == sqid) else {
            return true;
        };
        let queue = &self.submissions[index];
        if !queue.is_closing || queue.in_flight > 0 || queue.is_fetching() {
            return false;
        }
        self.submissions.remove(index);
        self.executor.remove_command_stream(low_16_bits(index as u64));
        if let Some((held_index, _)) = &mut self.held {
            *held_index -= usize::from(*held_index > index);
        }
        true
    }

    /// Stops the queue: starts no new access to host memory and posts no completions. The caller polls
    /// the queue until it [`is_drained`](Self::is_drained).
    pub fn stop(&mut self, now: Instant) {
        self.held = None;
        self.executor.stop(now);
        self.post_finished();
    }

    /// After [`stop`](Self::stop): see [`Executor::fence_writes`](crate::executor::Executor::fence_writes).
    pub fn fence_writes(&mut self) {
        self.executor.fence_writes();
    }

    /// Whether no request and no host access is in flight. A stopped queue may then be dropped, and its
    /// memory belongs to the host again.
    pub fn is_drained(&self) -> bool {
        self.executor.in_flight_count() == 0 && self.ring_accesses == 0
    }

    /// Whether only first halves of fused pairs are outstanding; these access nothing before their second
    /// halves arrive. Stays true, once it is true, as long as the queue is paused.
    pub fn is_idle_except_fused_halves(&self) -> bool {
        self.executor.is_idle_except_fused_halves() && self.ring_accesses == 0
    }

    /// Commands being executed. Halves of fused pairs that wait do not count.
    pub fn executing_count(&self) -> usize {
        self.executor.executing_count()
    }
}
