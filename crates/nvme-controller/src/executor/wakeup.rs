//! Arming before the thread sleeps: what an executor or its queue waits for, and what wakes the thread.
//!
//! | waits for | woken by |
//! |---|---|
//! | a command, a free completion entry | the host, through a doorbell |
//! | a request completion, space in a block device, a context | the block device: descriptor or deadline |
//! | a bounce buffer | none needed: the queue that frees one is busy, and then all queues are polled |
//! | exclusivity for a fused pair, or its release | none: the thread stays awake |

use std::os::fd::BorrowedFd;

use tenmil_base::HostMemory;

use super::Executor;
use super::channel::NamespaceChannel;

impl<H: HostMemory> Executor<H> {
    /// Enables completion signals before the thread sleeps. Returns true if the thread must stay awake.
    /// The caller then polls once more, and checks [`has_pending_without_wakeup`](Self::has_pending_without_wakeup) if that poll found
    /// nothing. `is_held` is whether the owner has a command that could not begin.
    pub fn arm_wakeup(&mut self, is_held: bool) -> bool {
        let has_stuck_work = !self.capacity_waiters.is_empty()
            && self.namespace_table.channels().all(|channel| channel.is_idle());
        if has_stuck_work || self.waits_for_exclusivity(is_held) {
            return true;
        }
        self.namespace_table.channels().any(NamespaceChannel::arm_wakeup)
    }

    /// Whether, since [`arm_wakeup`](Self::arm_wakeup), something is pending that has no wake-up.
    pub fn has_pending_without_wakeup(&mut self, is_held: bool) -> bool {
        self.waits_for_exclusivity(is_held)
            || self.namespace_table.channels().any(|channel| channel.has_pending_without_wakeup())
    }

    /// Whether a command waits for exclusivity or its release, or an acknowledgment is due.
    fn waits_for_exclusivity(&self, is_held: bool) -> bool {
        let is_held = is_held && self.fused_participant.is_exclusivity_held();
        self.waiting_pair_context().is_some()
            || is_held
            || self.fused_participant.must_acknowledge()
    }

    /// Disables completion signals after the thread has woken.
    pub fn disarm_wakeup(&mut self) {
        self.namespace_table.channels().for_each(NamespaceChannel::disarm_wakeup);
    }

    /// Passes the descriptors of block devices opened since the last call to `each`. A descriptor becomes
    /// readable when a completion is available; closing a channel closes its descriptor.
    pub fn for_each_new_wake_fd(&mut self, each: &mut dyn FnMut(BorrowedFd<'_>)) {
        for channel in self.namespace_table.channels() {
            channel.take_new_wake_fd().into_iter().for_each(&mut *each);
        }
    }
}
