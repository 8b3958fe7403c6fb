//! Sleeping: whether a front end has anything to do, and until when it has not.
//!
//! ```text
//!   sleeper   announce ── arm: media signal ── tend ── turn: look at every doorbell ── sleep
//!   host      store a doorbell or a register ── look whether somebody has announced ── wake
//!   medium    store an answer ───────────────── look whether it is armed ───────────── wake
//! ```
//!
//! Each side stores first and looks then, with a barrier between the two; so one of them sees the
//! other, and nothing is slept over. The barrier is the affair of whoever owns the thread.

use std::os::fd::BorrowedFd;

use base::{HostMemory, Instant, Interrupts};

use super::{MemoryFrontEnd, Wait};

impl<H: HostMemory + Clone, I: Interrupts> MemoryFrontEnd<H, I> {
    /// Gets ready for a sleep of the thread, which has announced it, and looks at everything once
    /// more. The answer is until when the thread may sleep, if neither the host nor a medium wakes
    /// it before; `None` if there is work, or if something is awaited that would wake nobody.
    ///
    /// [`disarm`](Self::disarm) has to follow, whatever the answer. Two things are the caller's:
    /// answers of a host whose memory is slow, and other controllers of the same subsystem. They
    /// wake nobody.
    pub fn arm(&mut self, now: Instant) -> Option<Instant> {
        let must_wake = self.queues.iter_mut().any(|served| served.queue.arm());
        if must_wake || self.tend(now) {
            return None;
        }
        let until = match self.turn(now) {
            Wait::Busy => return None,
            Wait::Pending(until) | Wait::Idle(until) => until,
        };
        let is_unheard =
            self.is_in_motion() || self.queues.iter_mut().any(|served| served.queue.is_unheard());
        (until > now && !is_unheard).then_some(until)
    }

    /// The thread is awake: media need not signal their answers.
    pub fn disarm(&mut self) {
        self.queues.iter_mut().for_each(|served| served.queue.disarm());
    }

    /// Hands out the descriptors of media that have been opened since this was last called. Each
    /// becomes readable when its medium has something to say and is closed with it.
    pub fn new_descriptors(&mut self, mut each: impl FnMut(BorrowedFd<'_>)) {
        self.queues.iter_mut().for_each(|served| served.queue.new_descriptors(&mut each));
    }
}
