//! Arming of a queue before its thread sleeps: what the queue waits for, and what wakes the thread.
//!
//! | waits for | woken by |
//! |---|---|
//! | a command, a free completion entry | the host, through a doorbell |
//! | a request completion, space in a block device, a context | the block device: descriptor or deadline |
//! | a bounce buffer | none needed: the queue that frees one is busy, and then all queues are polled |
//! | exclusivity for a fused pair, or its release | none: the thread stays awake |

use std::os::fd::BorrowedFd;

use tenmil_base::HostMemory;

use super::Queue;
use super::channel::Channel;

impl<H: HostMemory> Queue<H> {
    /// Enables completion signals before the thread sleeps. Returns true if the thread must stay awake.
    /// The caller then polls once more, and checks [`is_unheard`](Self::is_unheard) if that poll found
    /// nothing.
    pub fn arm(&mut self) -> bool {
        let has_stuck_work = !self.want_room.is_empty()
            && self.directory.channels().all(|channel| channel.is_idle());
        if has_stuck_work || self.waits_for_floor() {
            return true;
        }
        self.directory.channels().any(Channel::arm)
    }

    /// Whether, since [`arm`](Self::arm), something is pending that has no wake-up.
    pub fn is_unheard(&mut self) -> bool {
        self.waits_for_floor() || self.directory.channels().any(|channel| channel.lacks_wakeup())
    }

    /// Whether the queue waits for exclusivity or its release, or owes an acknowledgment.
    fn waits_for_floor(&self) -> bool {
        let is_held = self.held.is_some() && self.voice.is_held();
        self.waiting_pair().is_some() || is_held || self.voice.must_ack()
    }

    /// Disables completion signals after the thread has woken.
    pub fn disarm(&mut self) {
        self.directory.channels().for_each(Channel::disarm);
    }

    /// Passes the descriptors of block devices opened since the last call to `each`. A descriptor becomes
    /// readable when a completion is available; closing a channel closes its descriptor.
    pub fn new_descriptors(&mut self, each: &mut dyn FnMut(BorrowedFd<'_>)) {
        for channel in self.directory.channels() {
            channel.new_descriptor().into_iter().for_each(&mut *each);
        }
    }
}
