//! A namespace of an attached controller as a medium.

use std::sync::{Arc, Mutex, PoisonError};

use base::{
    Answers, Backend, DoorbellCounts, Instant, Limits, Medium, Request, Segment, WakeSource,
};

use super::{Attached, Bus, Lent};
use crate::Refused;

/// The namespace.
pub(super) struct AttachedMedium<B: Bus> {
    /// The queue pair that told what all are like, until somebody wants it.
    first: Mutex<Option<AttachedChannel<B>>>,
    attached: Arc<Attached<B>>,
    limits: Limits,
}

/// A queue pair of it.
struct AttachedChannel<B: Bus> {
    lent: Lent<B>,
    /// Dropped after the queue pair.
    attached: Arc<Attached<B>>,
}

impl<B: Bus> AttachedMedium<B> {
    pub(super) fn new(attached: Attached<B>) -> Result<Self, Refused> {
        let attached = Arc::new(attached);
        let first = AttachedChannel::new(&attached)?;
        let limits = first.lent.queue.limits().clone();
        Ok(Self { attached, limits, first: Mutex::new(Some(first)) })
    }
}

impl<B: Bus> AttachedChannel<B> {
    fn new(attached: &Arc<Attached<B>>) -> Result<Self, Refused> {
        Ok(Self { lent: attached.queue()?, attached: Arc::clone(attached) })
    }
}

impl<B: Bus> Medium for AttachedMedium<B> {
    fn limits(&self) -> Limits {
        self.attached.growth.limits(&self.limits)
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner).take();
        let channel = match first {
            Some(channel) => channel,
            None => AttachedChannel::new(&self.attached).map_err(|refused| refused.text)?,
        };
        Ok(Box::new(channel))
    }

    fn channels_max(&self) -> u32 {
        self.attached.queues_max()
    }

    fn notice_size(&self) -> Result<u64, String> {
        Ok(self.attached.growth.block_count(&self.limits))
    }

    fn lost(&self) -> Option<String> {
        self.attached.lost()
    }
}

impl<B: Bus> Backend for AttachedChannel<B> {
    fn limits(&self) -> &Limits {
        self.lent.queue.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.lent.queue.submit(now, requests, segments)
    }

    fn flush(&mut self) {
        self.lent.queue.flush();
    }

    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        self.lent.queue.poll(now, answers)
    }

    fn doorbells(&self) -> DoorbellCounts {
        self.lent.queue.doorbells()
    }

    fn wake_at(&self) -> Instant {
        self.lent.queue.wake_at()
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.lent.queue.wake_source()
    }

    fn arm(&mut self) -> bool {
        self.lent.queue.arm()
    }

    fn disarm(&mut self) {
        self.lent.queue.disarm();
    }
}

impl<B: Bus> Drop for AttachedChannel<B> {
    /// Waits until the controller touches no memory of a request any more: it answers what it has, or
    /// is found lost by the thread that tends it.
    fn drop(&mut self) {
        while !self.lent.queue.abandon(self.attached.clock.now()) {
            host::thread::give_way();
        }
        if let Some(vector) = self.lent.vector {
            self.attached.release_vector(vector);
        }
    }
}
