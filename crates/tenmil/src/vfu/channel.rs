//! A namespace of another process's controller as a medium.

use std::sync::{Arc, Mutex, PoisonError};

use base::{
    Answers, Backend, DoorbellCounts, Instant, Limits, Medium, Request, Segment, WakeSource,
};

use super::attached::{Attached, Lent};
use crate::Refused;

/// The namespace.
pub(super) struct VfuMedium {
    /// The queue pair that told what all are like, until somebody wants it.
    first: Mutex<Option<VfuChannel>>,
    attached: Arc<Attached>,
    limits: Limits,
}

/// A queue pair of it.
struct VfuChannel {
    lent: Lent,
    /// Dropped after the queue pair.
    attached: Arc<Attached>,
}

impl VfuMedium {
    pub(super) fn new(attached: Attached) -> Result<Self, Refused> {
        let attached = Arc::new(attached);
        let first = VfuChannel::new(&attached)?;
        let limits = first.lent.queue.limits().clone();
        Ok(Self { attached, limits, first: Mutex::new(Some(first)) })
    }
}

impl VfuChannel {
    fn new(attached: &Arc<Attached>) -> Result<Self, Refused> {
        Ok(Self { lent: attached.queue()?, attached: Arc::clone(attached) })
    }
}

impl Medium for VfuMedium {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner).take();
        let channel = match first {
            Some(channel) => channel,
            None => VfuChannel::new(&self.attached).map_err(|refused| refused.text)?,
        };
        Ok(Box::new(channel))
    }

    fn channels_max(&self) -> u32 {
        self.attached.queues_max()
    }
}

impl Backend for VfuChannel {
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

impl Drop for VfuChannel {
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
