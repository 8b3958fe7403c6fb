//! Hardware contexts: where the requests of a channel go.
//!
//! A context that one channel uses is owned by it, and nothing stands between. One that several use
//! lies behind a lock, see [`shared`].

mod inbox;
#[cfg(test)]
mod model;
mod shared;
#[cfg(test)]
mod tests;
mod waiters;

use std::os::fd::BorrowedFd;

use base::{Answers, Backend, DoorbellCounts, Instant, Request, Segment, WakeSource};

pub(crate) use self::shared::{Member, SharedContext};

/// The words that a shared context and its inboxes are written in. Both are compiled twice: here the
/// words mean the real thing; in `model`, which exists in tests only, a module of the same name gives
/// them the types of a model checker.
mod sync {
    pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    pub(super) use std::sync::{Arc, Mutex, MutexGuard};

    pub(super) use host::thread::give_way;
    pub(super) use host::{Clock, EventVectors};

    pub(super) use crate::device::Port;
}

/// A channel's way to one context.
pub(crate) struct Lane {
    way: Way,
    /// Requests that it has taken and not answered.
    in_flight: u32,
    /// Whoever submits here polls for the answers and never sleeps for them.
    is_polled: bool,
}

enum Way {
    Owned(Box<dyn Backend>),
    Shared(Box<Member>),
    /// The device has been removed.
    Closed,
}

impl Lane {
    pub(crate) fn owned(backend: Box<dyn Backend>, is_polled: bool) -> Self {
        Self { way: Way::Owned(backend), in_flight: 0, is_polled }
    }

    pub(crate) fn shared(member: Member, is_polled: bool) -> Self {
        Self { way: Way::Shared(Box::new(member)), in_flight: 0, is_polled }
    }

    /// Takes requests off the front, whose tokens are tags. Where the context is shared they are
    /// written over.
    #[inline(always)]
    pub(crate) fn submit(
        &mut self,
        now: Instant,
        requests: &mut [Request],
        segments: &[Segment],
    ) -> usize {
        let taken = match &mut self.way {
            Way::Owned(backend) => backend.submit(now, requests, segments),
            Way::Shared(member) => member.submit(now, requests, segments),
            Way::Closed => 0,
        };
        #[expect(clippy::cast_possible_truncation, reason = "no more than there are tags")]
        let count = taken as u32;
        self.in_flight += count;
        taken
    }

    #[inline]
    pub(crate) fn flush(&mut self) {
        // A shared context is flushed as it is submitted to, while the lock is held.
        if let Way::Owned(backend) = &mut self.way {
            backend.flush();
        }
    }

    /// Appends answers, whose tokens are tags.
    #[inline]
    pub(crate) fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        let count = match &mut self.way {
            Way::Owned(backend) => backend.poll(now, answers),
            Way::Shared(member) => member.poll(now, answers),
            Way::Closed => 0,
        };
        #[expect(clippy::cast_possible_truncation, reason = "no more than there are tags")]
        let answered = count as u32;
        self.in_flight -= answered;
        count
    }

    /// As [`Backend::acknowledge_losses`]. In a shared context nobody can: others have flushes there.
    pub(crate) fn acknowledge_losses(&mut self) -> Result<(), String> {
        match &mut self.way {
            Way::Owned(backend) => backend.acknowledge_losses(),
            Way::Shared(_) | Way::Closed => Ok(()),
        }
    }

    pub(crate) fn doorbells(&self) -> DoorbellCounts {
        match &self.way {
            Way::Owned(backend) => backend.doorbells(),
            Way::Shared(member) => member.doorbells(),
            Way::Closed => DoorbellCounts::default(),
        }
    }

    pub(crate) fn wake_at(&self) -> Instant {
        match &self.way {
            Way::Owned(backend) => backend.wake_at(),
            Way::Shared(member) => member.wake_at(),
            Way::Closed => Instant::NEVER,
        }
    }

    /// As [`Backend::is_done_by_kernel`]; what is polled for is looked for.
    pub(crate) fn is_done_by_kernel(&self) -> bool {
        match &self.way {
            _ if self.is_polled => false,
            Way::Owned(backend) => backend.is_done_by_kernel(),
            Way::Shared(member) => member.is_done_by_kernel(),
            Way::Closed => false,
        }
    }

    /// As [`Backend::arm`]; what is polled for keeps its thread awake.
    pub(crate) fn arm(&mut self) -> bool {
        if self.is_polled && self.in_flight > 0 {
            return true;
        }
        match &mut self.way {
            _ if self.is_polled => false,
            Way::Owned(backend) => backend.arm(),
            Way::Shared(member) => member.arm(),
            Way::Closed => false,
        }
    }

    pub(crate) fn disarm(&mut self) {
        match &mut self.way {
            _ if self.is_polled => {}
            Way::Owned(backend) => backend.disarm(),
            Way::Shared(member) => member.disarm(),
            Way::Closed => {}
        }
    }

    /// The descriptors that wake a thread which has armed it.
    pub(crate) fn descriptors(&self, each: &mut dyn FnMut(BorrowedFd<'_>)) {
        match &self.way {
            _ if self.is_polled => {}
            Way::Owned(backend) => {
                if let WakeSource::Descriptor(descriptor) = backend.wake_source() {
                    each(descriptor);
                }
            }
            Way::Shared(member) => member.descriptors(each),
            Way::Closed => {}
        }
    }

    /// Drops the way to the medium: of all its users, if it is shared. Answers that others have
    /// put by are still polled before the rest is given up.
    pub(crate) fn close(&mut self, answers: &mut Answers) -> usize {
        match std::mem::replace(&mut self.way, Way::Closed) {
            Way::Shared(mut member) => member.close(answers),
            _ => 0,
        }
    }
}
