//! Idle protocol of a transport: arming wake-ups before its thread sleeps.
//!
//! ```text
//!   sleeper       announce ── arm: completion signals ── housekeeping ── poll every doorbell ── sleep
//!   host          store a doorbell or a register ── check for an announced sleeper ── wake
//!   block device  post a completion ─────────────── check whether it is armed ─────── wake
//! ```
//!
//! Each side stores first and loads afterwards, with a barrier between the two. At least one of them
//! therefore sees the other, and no wake-up is lost. The barrier is issued by the owner of the thread.

use std::os::fd::BorrowedFd;

use tenmil_base::{Instant, Interrupts, RingMemory};

use super::{MemoryTransport, NextPoll};

impl<H: RingMemory + Clone, I: Interrupts> MemoryTransport<H, I> {
    /// Prepares for a sleep that the thread has announced, and polls everything once more. Returns the
    /// time until which the thread may sleep, unless the host or a block device wakes it earlier. Returns
    /// `None` if there is work, or if something is pending that has no wake-up.
    ///
    /// [`disarm_wakeup`](Self::disarm_wakeup) must follow, whatever the result. The caller has to provide wake-ups for
    /// two sources: accesses to slow host memory, and other controllers of the same subsystem.
    pub fn arm_wakeup(&mut self, now: Instant) -> Option<Instant> {
        let must_wake = self.queues.iter_mut().any(|signalled| signalled.queue.arm_wakeup());
        if must_wake || self.run_housekeeping(now) {
            return None;
        }
        let until = match self.poll(now) {
            NextPoll::Busy => return None,
            NextPoll::Pending(until) | NextPoll::Idle(until) => until,
        };
        let lacks_wakeup = self.is_transitioning()
            || self.queues.iter_mut().any(|signalled| signalled.queue.has_pending_without_wakeup());
        (until > now && !lacks_wakeup).then_some(until)
    }

    /// Disables completion signals after the thread has woken.
    pub fn disarm_wakeup(&mut self) {
        self.queues.iter_mut().for_each(|signalled| signalled.queue.disarm_wakeup());
    }

    /// Passes the file descriptors of block devices opened since the last call to `each`. A descriptor
    /// becomes readable when its block device has completions, and is closed with it.
    pub fn for_each_new_wake_fd(&mut self, mut each: impl FnMut(BorrowedFd<'_>)) {
        self.queues
            .iter_mut()
            .for_each(|signalled| signalled.queue.for_each_new_wake_fd(&mut each));
    }
}
