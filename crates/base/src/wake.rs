//! Sleep and wake-up interfaces.
//!
//! A thread may sleep once every source of work has declared a wake source. The protocol is always
//! the same: the sleeper announces its sleep, checks everything once more, and only then sleeps; a
//! producer stores its work and then checks the announcement. Each side stores before it loads, so
//! at least one of the two sees the other.

use std::os::fd::BorrowedFd;

use crate::{Instant, IoChannel};

/// Wakes a thread that may be asleep after a store that it must see.
pub trait Wake {
    /// Wakes the other side; call after the store. Costs one load while it is awake: it is on the
    /// I/O path.
    fn wake(&self);
}

/// The other side never sleeps: it polls continuously.
impl Wake for () {
    #[inline]
    fn wake(&self) {}
}

/// A closure is called to wake.
impl<F: Fn()> Wake for F {
    fn wake(&self) {
        self();
    }
}

/// Wake source of a thread that waits for an I/O channel or a stream.
#[derive(Clone, Copy, Debug)]
pub enum WakeSource<'a> {
    /// None. A thread must not sleep while such a channel has outstanding requests.
    None,
    /// A deadline: everything outstanding has completed by [`ChannelWakeup::wake_at`].
    Deadline,
    /// This descriptor becomes readable; the deadline applies as well.
    Descriptor(BorrowedFd<'a>),
}

/// Sleep and wake-up of the thread that polls an [`IoChannel`]. None of these functions is called for
/// an I/O; a thread calls them before and after it sleeps.
///
/// The defaults forward to the channel below. Without one they are those of a channel that keeps its
/// thread awake while requests are outstanding.
pub trait ChannelWakeup {
    /// Channel that this one is stacked on, which gets all calls that are not implemented here.
    fn below(&self) -> Option<&dyn IoChannel> {
        None
    }

    /// The same, for calls that change it.
    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        None
    }

    /// Time at which the channel must be polled even if its wake source is silent: an internal
    /// deadline, or [`Instant::NEVER`].
    fn wake_at(&self) -> Instant {
        self.below().map_or(Instant::NEVER, |below| below.wake_at())
    }

    /// Wake source for a thread that sleeps while this channel has outstanding requests. Constant
    /// during the channel's life.
    fn wake_source(&self) -> WakeSource<'_> {
        self.below().map_or(WakeSource::None, |below| below.wake_source())
    }

    /// Whether the local kernel does all the work, on CPUs that it would share with a polling
    /// thread: then an idle thread sleeps at once instead of spinning. Constant during the
    /// channel's life. A channel stacked on several returns true if all of them do.
    fn is_done_by_local_kernel(&self) -> bool {
        self.below().is_some_and(|below| below.is_done_by_local_kernel())
    }

    /// Arms the channel before its thread sleeps: makes everything submitted visible, arms the wake
    /// source, and polls once more. True if a completion is available, or may arrive without a
    /// wake-up: then the thread must not sleep. False if every later completion wakes it.
    ///
    /// Without a wake source of its own a channel keeps its thread awake.
    fn arm(&mut self) -> bool {
        self.below_mut().is_none_or(|below| below.arm())
    }

    /// Disarms the wake source: the thread polls again. Also called if the thread did not sleep
    /// after `arm`.
    fn disarm(&mut self) {
        if let Some(below) = self.below_mut() {
            below.disarm();
        }
    }
}

/// Interrupt vector, as used by the host that sleeps on it.
pub trait InterruptVector: Send {
    /// Descriptor that becomes readable when the device signals. Constant during the vector's life.
    fn descriptor(&self) -> BorrowedFd<'_>;

    /// Clears old signals and unmasks the vector. What the device stored before this returned is
    /// visible to a following check; for later stores it signals. False if that cannot be
    /// guaranteed now: then the host must keep polling.
    fn unmask(&mut self) -> bool;

    /// Masks the vector while the host polls.
    fn mask(&mut self);
}

#[cfg(test)]
mod tests {
    use super::{ChannelWakeup, WakeSource};
    use crate::{
        CompletionBatch, DoorbellStats, Durability, Error, Instant, IoChannel, Limits,
        OperationSet, Request, Segment,
    };

    const LIMITS: Limits = Limits {
        block_size: 512,
        metadata_size: 0,
        block_count: 1,
        request_blocks_max: 1,
        segments_max: 1,
        optimal_boundary_blocks: 0,
        atomic_write_blocks: 1,
        depth_max: 1,
        durability: Durability::Persistent,
        operations: OperationSet::from_operations(&[]),
    };

    /// Implements only what every channel has to.
    struct Plain;

    /// Implements everything, and sums up the calls.
    #[derive(Default)]
    struct Full(u64);

    /// Implements only what every stacked channel has to.
    struct Stacked(Full);

    impl IoChannel for Plain {
        fn limits(&self) -> &Limits {
            &LIMITS
        }

        fn submit(&mut self, _: Instant, _: &[Request], _: &[Segment]) -> usize {
            0
        }

        fn poll(&mut self, _: Instant, _: &mut CompletionBatch) -> usize {
            0
        }
    }

    impl ChannelWakeup for Plain {}

    impl IoChannel for Full {
        fn limits(&self) -> &Limits {
            &LIMITS
        }

        fn submit(&mut self, _: Instant, _: &[Request], _: &[Segment]) -> usize {
            2
        }

        fn poll(&mut self, _: Instant, _: &mut CompletionBatch) -> usize {
            3
        }

        fn flush_submissions(&mut self) {
            self.0 += 1;
        }

        fn doorbell_stats(&self) -> DoorbellStats {
            DoorbellStats { submission: 4, ..DoorbellStats::default() }
        }

        fn fence_writes(&mut self) {
            self.0 += 10;
        }

        fn known_write_loss_count(&self) -> u64 {
            self.0
        }

        fn ack_repaired_write_losses(&mut self, count: u64) {
            self.0 += count * 100;
        }

        fn accept_write_losses(&mut self) -> Result<(), Error> {
            Err(Error::usage("its own"))
        }
    }

    impl ChannelWakeup for Full {
        fn wake_at(&self) -> Instant {
            Instant { ns: 6 }
        }

        fn wake_source(&self) -> WakeSource<'_> {
            WakeSource::Deadline
        }

        fn is_done_by_local_kernel(&self) -> bool {
            true
        }

        fn arm(&mut self) -> bool {
            self.0 += 1000;
            false
        }

        fn disarm(&mut self) {
            self.0 += 10_000;
        }
    }

    impl IoChannel for Stacked {
        fn limits(&self) -> &Limits {
            self.0.limits()
        }

        fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
            self.0.submit(now, requests, segments)
        }

        fn poll(&mut self, now: Instant, answers: &mut CompletionBatch) -> usize {
            self.0.poll(now, answers)
        }
    }

    impl ChannelWakeup for Stacked {
        fn below(&self) -> Option<&dyn IoChannel> {
            Some(&self.0)
        }

        fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
            Some(&mut self.0)
        }
    }

    /// Calls everything that a stacked channel forwards.
    fn assert_forwards(channel: &mut impl IoChannel) {
        assert_eq!(channel.doorbell_stats().submission, 4);
        assert_eq!(channel.accept_write_losses().unwrap_err().text, "its own");
        assert_eq!(channel.wake_at(), Instant { ns: 6 });
        assert!(matches!(channel.wake_source(), WakeSource::Deadline));
        assert!(channel.is_done_by_local_kernel());
        assert!(!channel.arm());
        channel.disarm();
        channel.flush_submissions();
        channel.ack_repaired_write_losses(1);
        assert_eq!(channel.known_write_loss_count(), 11_101);
    }

    #[test]
    fn stacked_channel_forwards_what_it_does_not_implement() {
        assert_forwards(&mut Stacked(Full::default()));
    }

    #[test]
    fn stacked_channel_does_not_forward_fences() {
        let mut stacked = Stacked(Full::default());
        stacked.fence_writes();
        assert_eq!(stacked.known_write_loss_count(), 0);
    }

    #[test]
    fn boxed_channel_forwards_everything() {
        let mut boxed: Box<dyn IoChannel> = Box::new(Full::default());
        assert_forwards(&mut boxed);
        boxed.fence_writes();
        assert_eq!(boxed.known_write_loss_count(), 11_111);
        let mut outer: Box<dyn IoChannel> = Box::new(boxed);
        outer.fence_writes();
        assert_eq!(outer.known_write_loss_count(), 11_121);
        let mut answers = CompletionBatch::with_capacity(1);
        assert_eq!(outer.submit(Instant::NEVER, &[], &[]), 2);
        assert_eq!(outer.poll(Instant::NEVER, &mut answers), 3);
    }

    #[test]
    fn channel_without_wake_source_keeps_its_thread_awake() {
        let mut plain = Plain;
        plain.flush_submissions();
        plain.disarm();
        assert!(plain.arm());
        assert_eq!(plain.wake_at(), Instant::NEVER);
        assert!(matches!(plain.wake_source(), WakeSource::None));
        assert!(!plain.is_done_by_local_kernel());
        plain.ack_repaired_write_losses(1);
        assert!(plain.accept_write_losses().is_ok());
        assert_eq!(plain.known_write_loss_count(), 0);
        assert_eq!(plain.doorbell_stats(), DoorbellStats::default());
    }
}
