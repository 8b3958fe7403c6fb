//! Hardware contexts: the queues to which channels submit their requests.
//!
//! A context that one channel uses is owned by it, without indirection. A context of several channels is
//! behind a lock: see [`shared_context`].

mod inbox;
#[cfg(test)]
mod loom_model;
mod shared_context;
#[cfg(test)]
mod tests;
mod wait_queue;

use std::os::fd::BorrowedFd;

use tenmil_base::{
    CompletionBatch, DoorbellStats, Error, Instant, IoChannel, Request, Segment, WakeSource,
};

pub(crate) use self::shared_context::{ContextMember, SharedContext};

/// Synchronization types of a shared context and its inboxes. Both files are compiled twice: here with
/// the real types; in `model`, which exists in tests only, with those of a model checker.
mod sync {
    pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    pub(super) use std::sync::{Arc, Mutex, MutexGuard};

    pub(super) use tenmil_linux::named_thread::yield_cpu;
    pub(super) use tenmil_linux::{Clock, EventFdVectors};

    pub(super) use crate::bdev::ChannelShared;
}

/// A channel's access to one context.
pub(crate) struct HardwareContextRef {
    way: HardwareContextAccess,
    /// Requests accepted and not completed.
    in_flight: u32,
    /// The submitter polls for completions and never sleeps for them.
    is_polled: bool,
}

enum HardwareContextAccess {
    Owned(Box<dyn IoChannel>),
    Shared(Box<ContextMember>),
    /// The device has been removed.
    Closed,
}

impl HardwareContextRef {
    pub(crate) fn owned(backend: Box<dyn IoChannel>, is_polled: bool) -> Self {
        Self { way: HardwareContextAccess::Owned(backend), in_flight: 0, is_polled }
    }

    pub(crate) fn shared(member: ContextMember, is_polled: bool) -> Self {
        Self { way: HardwareContextAccess::Shared(Box::new(member)), in_flight: 0, is_polled }
    }

    /// Submits a prefix of the requests, whose tokens are tags, and returns its length. A shared context
    /// overwrites the tokens.
    #[inline(always)]
    pub(crate) fn submit(
        &mut self,
        now: Instant,
        requests: &mut [Request],
        segments: &[Segment],
    ) -> usize {
        let taken = match &mut self.way {
            HardwareContextAccess::Owned(backend) => backend.submit(now, requests, segments),
            HardwareContextAccess::Shared(member) => member.submit(now, requests, segments),
            HardwareContextAccess::Closed => 0,
        };
        #[expect(clippy::cast_possible_truncation, reason = "no more than there are tags")]
        let count = taken as u32;
        self.in_flight += count;
        taken
    }

    #[inline]
    pub(crate) fn flush_submissions(&mut self) {
        // A shared context is flushed at submission, under the lock.
        if let HardwareContextAccess::Owned(backend) = &mut self.way {
            backend.flush_submissions();
        }
    }

    /// Appends completions, whose tokens are tags.
    #[inline]
    pub(crate) fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let count = match &mut self.way {
            HardwareContextAccess::Owned(backend) => backend.poll(now, completions),
            HardwareContextAccess::Shared(member) => member.poll(now, completions),
            HardwareContextAccess::Closed => 0,
        };
        #[expect(clippy::cast_possible_truncation, reason = "no more than there are tags")]
        let completed = count as u32;
        self.in_flight -= completed;
        count
    }

    /// As [`IoChannel::accept_write_losses`]. Not in a shared context: other members have flushes there.
    pub(crate) fn accept_write_losses(&mut self) -> Result<(), Error> {
        match &mut self.way {
            HardwareContextAccess::Owned(backend) => backend.accept_write_losses(),
            HardwareContextAccess::Shared(_) | HardwareContextAccess::Closed => Ok(()),
        }
    }

    pub(crate) fn doorbell_stats(&self) -> DoorbellStats {
        match &self.way {
            HardwareContextAccess::Owned(backend) => backend.doorbell_stats(),
            HardwareContextAccess::Shared(member) => member.doorbell_stats(),
            HardwareContextAccess::Closed => DoorbellStats::default(),
        }
    }

    pub(crate) fn wake_at(&self) -> Instant {
        match &self.way {
            HardwareContextAccess::Owned(backend) => backend.wake_at(),
            HardwareContextAccess::Shared(member) => member.wake_at(),
            HardwareContextAccess::Closed => Instant::NEVER,
        }
    }

    /// Like [`is_done_by_local_kernel`](tenmil_base::ChannelWakeup::is_done_by_local_kernel); false for polled contexts.
    pub(crate) fn is_kernel_io(&self) -> bool {
        match &self.way {
            _ if self.is_polled => false,
            HardwareContextAccess::Owned(backend) => backend.is_done_by_local_kernel(),
            HardwareContextAccess::Shared(member) => member.is_kernel_io(),
            HardwareContextAccess::Closed => false,
        }
    }

    /// Like [`arm`](tenmil_base::ChannelWakeup::arm); polled requests in flight keep the thread awake.
    pub(crate) fn arm(&mut self) -> bool {
        if self.is_polled && self.in_flight > 0 {
            return true;
        }
        match &mut self.way {
            _ if self.is_polled => false,
            HardwareContextAccess::Owned(backend) => backend.arm(),
            HardwareContextAccess::Shared(member) => member.arm(),
            HardwareContextAccess::Closed => false,
        }
    }

    pub(crate) fn disarm(&mut self) {
        match &mut self.way {
            _ if self.is_polled => {}
            HardwareContextAccess::Owned(backend) => backend.disarm(),
            HardwareContextAccess::Shared(member) => member.disarm(),
            HardwareContextAccess::Closed => {}
        }
    }

    /// Passes the descriptors that wake an armed thread to `each`.
    pub(crate) fn for_each_wake_descriptor(&self, each: &mut dyn FnMut(BorrowedFd<'_>)) {
        match &self.way {
            _ if self.is_polled => {}
            HardwareContextAccess::Owned(backend) => {
                if let WakeSource::Descriptor(descriptor) = backend.wake_source() {
                    each(descriptor);
                }
            }
            HardwareContextAccess::Shared(member) => member.descriptors(each),
            HardwareContextAccess::Closed => {}
        }
    }

    /// Closes the access to the device; for a shared context, for all of its members. Completions that
    /// other members have put into the inbox are delivered before the rest is aborted.
    pub(crate) fn close_and_drain_inbox(&mut self, completions: &mut CompletionBatch) -> usize {
        match std::mem::replace(&mut self.way, HardwareContextAccess::Closed) {
            HardwareContextAccess::Shared(mut member) => member.close(completions),
            _ => 0,
        }
    }
}
