//! A namespace of a remote SSD as a medium.

use std::sync::{Arc, Mutex, PoisonError};

use base::{
    Answers, Backend, DoorbellCounts, Instant, Limits, Medium, Request, Segment, WakeSource,
};
use remote::RemoteQueue;

use super::attached::Attached;
use crate::Refused;

/// The namespace.
pub(super) struct RemoteMedium {
    /// The queue that told what all are like, until somebody wants it. Dropped before its SSD.
    first: Mutex<Option<RemoteQueue>>,
    attached: Arc<Attached>,
    limits: Limits,
}

/// A queue of it.
struct RemoteChannel {
    queue: RemoteQueue,
    /// Dropped after the queue.
    attached: Arc<Attached>,
}

impl RemoteMedium {
    pub(super) fn new(attached: Attached) -> Result<Self, Refused> {
        let first = attached.queue()?;
        let limits = first.limits().clone();
        Ok(Self { attached: Arc::new(attached), limits, first: Mutex::new(Some(first)) })
    }
}

impl Medium for RemoteMedium {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner).take();
        let queue = match first {
            Some(queue) => queue,
            None => self.attached.queue().map_err(|refused| refused.text)?,
        };
        Ok(Box::new(RemoteChannel { queue, attached: Arc::clone(&self.attached) }))
    }

    fn channels_max(&self) -> u32 {
        self.attached.queues_max()
    }
}

impl Backend for RemoteChannel {
    fn limits(&self) -> &Limits {
        self.queue.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.queue.submit(now, requests, segments)
    }

    fn flush(&mut self) {
        self.queue.flush();
    }

    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        self.queue.poll(now, answers)
    }

    fn doorbells(&self) -> DoorbellCounts {
        self.queue.doorbells()
    }

    fn wake_at(&self) -> Instant {
        self.queue.wake_at()
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.queue.wake_source()
    }

    fn arm(&mut self) -> bool {
        self.queue.arm()
    }

    fn disarm(&mut self) {
        self.queue.disarm();
    }
}

impl Drop for RemoteChannel {
    /// Waits until the SSD touches no memory of a request any more: it answers what it has, or is
    /// found lost by the thread that tends it.
    fn drop(&mut self) {
        while !self.queue.abandon(self.attached.clock.now()) {
            host::thread::give_way();
        }
    }
}
