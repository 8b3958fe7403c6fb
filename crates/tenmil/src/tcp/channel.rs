//! A namespace of remote SSDs as a medium, however many paths lead to it.

use std::sync::{Arc, Mutex, PoisonError};

use base::{
    Answers, Backend, DoorbellCounts, Instant, Limits, Medium, Request, ReservationHolder,
    Reservations, Segment, WakeSource,
};

use super::reservations::{ReservationQueue, ReservedNamespace};
use crate::Refused;
use crate::growth::Growth;

/// What stands behind a medium: connections to remote SSDs, and who tends them.
pub(super) trait Queues: Send + Sync + 'static {
    /// A queue to the namespace, for one thread.
    type Queue: Backend + Send + 'static;

    /// Another queue, with connections of its own.
    fn queue(&self) -> Result<Self::Queue, Refused>;

    /// How many queues there can be.
    fn queues_max(&self) -> u32;

    /// As [`Medium::takes_lent`].
    fn takes_lent(&self) -> Result<u32, String>;

    /// As [`Medium::identity`].
    fn identity(&self) -> Option<String>;

    /// The namespace, if it takes reservations that exclude other hosts from writing.
    fn reserved(&self) -> Option<ReservedNamespace>;

    /// A queue for reservation commands.
    fn reservation_queue(&self) -> Result<ReservationQueue, Refused>;

    /// How long the namespace is by now.
    fn growth(&self) -> &Growth;

    /// Takes what comes to a queue that is about to be dropped, and tells nobody. True once nothing is
    /// owed any more.
    fn abandon(&self, queue: &mut Self::Queue) -> bool;
}

/// The namespace.
pub(super) struct RemoteMedium<Q: Queues> {
    /// The queue that told what all are like, until somebody wants it. Dropped before its SSDs.
    first: Mutex<Option<Q::Queue>>,
    behind: Arc<Q>,
    limits: Limits,
    reserved: Option<ReservedNamespace>,
}

/// A queue of it.
struct RemoteChannel<Q: Queues> {
    queue: Q::Queue,
    /// Dropped after the queue.
    behind: Arc<Q>,
}

impl<Q: Queues> RemoteMedium<Q> {
    pub(super) fn new(behind: Q) -> Result<Self, Refused> {
        let first = behind.queue()?;
        let limits = first.limits().clone();
        let reserved = behind.reserved();
        Ok(Self { behind: Arc::new(behind), limits, reserved, first: Mutex::new(Some(first)) })
    }
}

impl<Q: Queues> Medium for RemoteMedium<Q> {
    fn limits(&self) -> Limits {
        self.behind.growth().limits(&self.limits)
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner).take();
        let queue = match first {
            Some(queue) => queue,
            None => self.behind.queue().map_err(|refused| refused.text)?,
        };
        Ok(Box::new(RemoteChannel { queue, behind: Arc::clone(&self.behind) }))
    }

    fn channels_max(&self) -> u32 {
        self.behind.queues_max()
    }

    fn takes_lent(&self) -> Result<u32, String> {
        self.behind.takes_lent()
    }

    fn identity(&self) -> Option<String> {
        self.behind.identity()
    }

    fn reservations(&self) -> Option<&dyn Reservations> {
        self.reserved.is_some().then_some(self)
    }

    fn notice_size(&self) -> Result<u64, String> {
        Ok(self.behind.growth().block_count(&self.limits))
    }
}

impl<Q: Queues> RemoteMedium<Q> {
    fn to_reserve(&self) -> Result<(&ReservedNamespace, ReservationQueue), String> {
        let namespace = self.reserved.as_ref().ok_or("the namespace takes no reservations")?;
        let queue = self.behind.reservation_queue().map_err(|refused| refused.text)?;
        Ok((namespace, queue))
    }
}

impl<Q: Queues> Reservations for RemoteMedium<Q> {
    fn holder(&self) -> Result<Option<ReservationHolder>, String> {
        let (namespace, queue) = self.to_reserve()?;
        namespace.holder(queue)
    }

    fn acquire(&self, key: u64, preempted: Option<u64>) -> Result<bool, String> {
        let (namespace, queue) = self.to_reserve()?;
        namespace.acquire(queue, key, preempted)
    }

    fn release(&self, key: u64) -> Result<(), String> {
        let (namespace, queue) = self.to_reserve()?;
        namespace.release(queue, key)
    }
}

impl<Q: Queues> Backend for RemoteChannel<Q> {
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

    fn losses(&self) -> u64 {
        self.queue.losses()
    }

    fn heed_losses(&mut self, count: u64) {
        self.queue.heed_losses(count);
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

impl<Q: Queues> Drop for RemoteChannel<Q> {
    /// Waits until nobody touches memory of a request any more: it answers what it has, or is found
    /// lost by the thread that tends it.
    fn drop(&mut self) {
        while !self.behind.abandon(&mut self.queue) {
            host::thread::give_way();
        }
    }
}
