//! Before its thread sleeps: what a queue waits for, and whether that will wake anybody.
//!
//! | waits for | woken by |
//! |---|---|
//! | a command, a place in the completion queue | the host, which rings a doorbell |
//! | an answer, room in a medium, a work area | the medium: its descriptor or its deadline |
//! | a bounce buffer | nobody, but whoever gives one back is busy, and then all queues turn again |
//! | a fused pair's turn, or the end of another's | nobody: the thread stays awake |

use std::os::fd::BorrowedFd;

use base::HostMemory;

use super::Queue;
use super::channel::Channel;

impl<H: HostMemory> Queue<H> {
    /// Gets ready for a sleep of the thread: lets the media signal. True if the thread must stay
    /// awake. A turn has to follow that finds nothing, and then [`is_unheard`](Self::is_unheard)
    /// is to be asked.
    pub fn arm(&mut self) -> bool {
        let has_stuck_work = !self.want_room.is_empty()
            && self.directory.channels().all(|channel| channel.is_idle());
        if has_stuck_work || self.waits_for_floor() {
            return true;
        }
        self.directory.channels().any(Channel::arm)
    }

    /// Whether, since [`arm`](Self::arm), something has come up that wakes nobody.
    pub fn is_unheard(&mut self) -> bool {
        self.waits_for_floor() || self.directory.channels().any(|channel| channel.is_unheard())
    }

    /// Whether a turn on the floor is waited for, its end, or this queue's word.
    fn waits_for_floor(&self) -> bool {
        let is_held = self.held.is_some() && self.voice.is_floor_taken();
        self.waiting_pair().is_some() || is_held || self.voice.owes_word()
    }

    /// The thread is awake: media need not signal.
    pub fn disarm(&mut self) {
        self.directory.channels().for_each(Channel::disarm);
    }

    /// Hands out the descriptors of media that have been opened since this was last called. They
    /// become readable when an answer is there; closing a channel closes its descriptor.
    pub fn new_descriptors(&mut self, each: &mut dyn FnMut(BorrowedFd<'_>)) {
        for channel in self.directory.channels() {
            channel.new_descriptor().into_iter().for_each(&mut *each);
        }
    }
}
