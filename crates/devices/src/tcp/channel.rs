//! Namespace of a remote controller as a block device, over one or several paths.

use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Instant, IoChannel, Limits, Request,
    ReservationHolder, Reservations, Segment, Span, WakeSource,
};
use tenmil_linux::Clock;
use tenmil_nvme_fabrics::{TimeoutPolicy, WaitHandle};

use super::opening::Opening;
use super::reservations::{ReservationQueue, ReservedNamespace};
use super::wait_set::WaitSet;
use crate::size_watch::SizeWatch;
use tenmil_base::Error;

/// Source of queues: the connections to remote controllers, and their admin thread.
pub(super) trait QueueSource: Send + Sync + 'static {
    /// Queue to the namespace, used by one thread.
    type Queue: IoChannel + Send + 'static;

    /// A requested queue.
    type Ticket: Copy + Send + 'static;

    /// Requests another queue, with connections of its own. Waits for nothing: the queue is connected
    /// when the device is.
    fn open_queue(&self) -> Result<Self::Ticket, Error>;

    /// The requested queue, once it is connected. The error has the reason why it is not.
    fn take_queue(&self, ticket: Self::Ticket) -> Result<Option<Self::Queue>, Error>;

    /// Cancels a requested queue that has not been taken.
    fn close_queue(&self, ticket: Self::Ticket);

    /// Whether the device is connected, as far as is known.
    fn is_up(&self) -> bool;

    /// What the thread of a queue sleeps on.
    fn with_wait_handle(queue: Self::Queue, sleep: Box<dyn WaitHandle>) -> Self::Queue;

    /// The clock of the queues, and when what waits for a connection fails.
    fn clock(&self) -> (&Clock, &TimeoutPolicy);

    /// Name of the target, for errors.
    fn address(&self) -> &str;

    /// Another queue, which is waited for as long as a connection may take.
    fn queue(&self) -> Result<Self::Queue, Error> {
        let (clock, policy) = self.clock();
        let end = clock.now().after(policy.connect);
        let idle_wait = idle_wait()?;
        let ticket = self.open_queue()?;
        let taken = loop {
            match self.take_queue(ticket) {
                Ok(Some(queue)) => return Ok(Self::with_wait_handle(queue, Box::new(idle_wait))),
                Ok(None) if clock.now() < end => tenmil_linux::named_thread::yield_cpu(),
                Ok(None) => {
                    let address = self.address();
                    let why = format!("tcp://{address}: a queue was not connected in time");
                    break Error::remote(why);
                }
                Err(refused) => break refused,
            }
        };
        self.close_queue(ticket);
        Err(taken)
    }

    /// Maximum number of queues.
    fn queues_max(&self) -> u32;

    /// See [`BlockDevice::supports_kernel_buffers`].
    fn supports_kernel_buffers(&self) -> Result<u32, Error>;

    /// See [`BlockDevice::identity`].
    fn identity(&self) -> Option<String>;

    /// See [`BlockDevice::failure_reason`].
    fn failure(&self) -> Option<String>;

    /// The namespace, if it takes reservations that exclude other hosts from writing.
    fn reserved(&self) -> Option<ReservedNamespace>;

    /// A queue for reservation commands.
    fn reservation_queue(&self) -> Result<ReservationQueue, Error>;

    /// How long the namespace is by now.
    fn growth(&self) -> &SizeWatch;

    /// Polls a queue that is about to be dropped, and discards its completions. True once no
    /// request can access memory any more.
    fn abandon(&self, queue: &mut Self::Queue) -> bool;
}

/// Remote namespace as a block device.
pub(super) struct RemoteDevice<Q: QueueSource> {
    /// Queue from which the limits were read; the first channel uses it. Dropped before the
    /// controllers.
    first: Mutex<Option<Q::Queue>>,
    behind: Arc<Q>,
    limits: Limits,
    reserved: Option<ReservedNamespace>,
}

/// I/O channel: one queue.
struct RemoteChannel<Q: QueueSource> {
    queue: Queue<Q>,
    /// Dropped after the queue.
    behind: Arc<Q>,
}

/// A queue, as soon as there is one.
enum Queue<Q: QueueSource> {
    Open(Q::Queue),
    Opening(Box<Opening<Q::Ticket>>),
}

/// How long a channel waits for its queue while the device is connected: a refusal is returned to the
/// opener. A lost device may not be detected yet, and other openers wait behind.
const OPEN_WAIT: Span = Span::from_ms(100);

impl<Q: QueueSource> RemoteDevice<Q> {
    pub(super) fn new(behind: Q) -> Result<Self, Error> {
        let first = behind.queue()?;
        let limits = first.limits().clone();
        let reserved = behind.reserved();
        Ok(Self { behind: Arc::new(behind), limits, reserved, first: Mutex::new(Some(first)) })
    }
}

impl<Q: QueueSource> BlockDevice for RemoteDevice<Q> {
    fn limits(&self) -> Limits {
        self.behind.growth().limits(&self.limits)
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner).take();
        let behind = Arc::clone(&self.behind);
        let channel = match first {
            Some(queue) => Ok(RemoteChannel { queue: Queue::Open(queue), behind }),
            None => RemoteChannel::open(behind, self.limits()),
        };
        Ok(Box::new(channel.map_err(|refused| refused.text).map_err(Error::environment)?))
    }

    fn channels_max(&self) -> u32 {
        self.behind.queues_max()
    }

    fn supports_kernel_buffers(&self) -> Result<u32, Error> {
        self.behind.supports_kernel_buffers()
    }

    fn identity(&self) -> Option<String> {
        self.behind.identity()
    }

    fn failure_reason(&self) -> Option<String> {
        self.behind.failure()
    }

    fn reservations(&self) -> Option<&dyn Reservations> {
        self.reserved.is_some().then_some(self)
    }

    fn refresh_size(&self) -> Result<u64, Error> {
        Ok(self.behind.growth().block_count(&self.limits))
    }
}

impl<Q: QueueSource> RemoteDevice<Q> {
    fn to_reserve(&self) -> Result<(&ReservedNamespace, ReservationQueue), Error> {
        let namespace = self
            .reserved
            .as_ref()
            .ok_or("the namespace takes no reservations")
            .map_err(Error::environment)?;
        let queue = self
            .behind
            .reservation_queue()
            .map_err(|refused| refused.text)
            .map_err(Error::environment)?;
        Ok((namespace, queue))
    }
}

impl<Q: QueueSource> Reservations for RemoteDevice<Q> {
    fn holder(&self) -> Result<Option<ReservationHolder>, Error> {
        let (namespace, queue) = self.to_reserve()?;
        namespace.holder(queue)
    }

    fn acquire(&self, key: u64, preempted: Option<u64>) -> Result<bool, Error> {
        let (namespace, queue) = self.to_reserve()?;
        namespace.acquire(queue, key, preempted)
    }

    fn release(&self, key: u64) -> Result<(), Error> {
        let (namespace, queue) = self.to_reserve()?;
        namespace.release(queue, key)
    }
}

impl<Q: QueueSource> RemoteChannel<Q> {
    /// A channel whose queue is connected when the device is. Nothing is waited for while the device
    /// is absent.
    fn open(behind: Arc<Q>, limits: Limits) -> Result<Self, Error> {
        let idle_wait = idle_wait()?;
        let ticket = behind.open_queue()?;
        let fail_fast = behind.clock().1.fail_fast;
        let opening = Opening::new(ticket, limits, Box::new(idle_wait), fail_fast);
        let mut channel = Self { queue: Queue::Opening(Box::new(opening)), behind };
        let end = channel.behind.clock().0.now().after(OPEN_WAIT);
        while channel.behind.is_up() && channel.behind.clock().0.now() < end && !channel.take()? {
            tenmil_linux::named_thread::yield_cpu();
        }
        Ok(channel)
    }

    /// Takes the queue, if it is connected by now. Whether it is open.
    fn take(&mut self) -> Result<bool, Error> {
        let Queue::Opening(opening) = &mut self.queue else { return Ok(true) };
        let Some(queue) = self.behind.take_queue(opening.ticket)? else { return Ok(false) };
        let mut queue = match opening.sleep.take() {
            Some(sleep) => Q::with_wait_handle(queue, sleep),
            None => queue,
        };
        queue.ack_repaired_losses(opening.acknowledged);
        self.queue = Queue::Open(queue);
        Ok(true)
    }

    /// As [`take`](Self::take), now and then. The reason for a missing queue cannot be reported here.
    #[cold]
    fn try_take_periodically(&mut self, now: Instant) {
        if let Queue::Opening(opening) = &mut self.queue
            && opening.is_check_due(now)
        {
            let _ = self.take();
        }
    }
}

impl<Q: QueueSource> IoChannel for RemoteChannel<Q> {
    fn limits(&self) -> &Limits {
        match &self.queue {
            Queue::Open(queue) => queue.limits(),
            Queue::Opening(opening) => &opening.limits,
        }
    }

    #[inline]
    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        if let Queue::Opening(_) = self.queue {
            self.try_take_periodically(now);
        }
        match &mut self.queue {
            Queue::Open(queue) => queue.submit(now, requests, segments),
            Queue::Opening(opening) => opening.submit(now, requests),
        }
    }

    #[inline]
    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        match &mut self.queue {
            Queue::Open(queue) => queue.poll(now, completions),
            Queue::Opening(opening) => {
                let count = opening.poll(completions);
                if opening.is_settled() {
                    self.try_take_periodically(now);
                }
                count
            }
        }
    }

    fn write_losses(&self) -> u64 {
        match &self.queue {
            Queue::Open(queue) => queue.write_losses(),
            Queue::Opening(_) => 0,
        }
    }

    fn ack_repaired_losses(&mut self, count: u64) {
        match &mut self.queue {
            Queue::Open(queue) => queue.ack_repaired_losses(count),
            Queue::Opening(opening) => opening.acknowledged = opening.acknowledged.max(count),
        }
    }
}

impl<Q: QueueSource> ChannelWakeup for RemoteChannel<Q> {
    fn below(&self) -> Option<&dyn IoChannel> {
        match &self.queue {
            Queue::Open(queue) => Some(queue),
            Queue::Opening(_) => None,
        }
    }

    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        match &mut self.queue {
            Queue::Open(queue) => Some(queue),
            Queue::Opening(_) => None,
        }
    }

    fn wake_at(&self) -> Instant {
        match &self.queue {
            Queue::Open(queue) => queue.wake_at(),
            Queue::Opening(opening) => opening.wake_at(),
        }
    }

    fn wake_source(&self) -> WakeSource<'_> {
        match &self.queue {
            Queue::Open(queue) => queue.wake_source(),
            Queue::Opening(opening) => opening.wake_source(),
        }
    }

    fn arm(&mut self) -> bool {
        match &mut self.queue {
            Queue::Open(queue) => queue.arm(),
            Queue::Opening(opening) => opening.arm(),
        }
    }
}

impl<Q: QueueSource> Drop for RemoteChannel<Q> {
    /// Waits until no request can access memory any more: either the peer completes all requests,
    /// or the admin thread finds it lost.
    fn drop(&mut self) {
        match &mut self.queue {
            Queue::Open(queue) => {
                while !self.behind.abandon(queue) {
                    tenmil_linux::named_thread::yield_cpu();
                }
            }
            Queue::Opening(opening) => self.behind.close_queue(opening.ticket),
        }
    }
}

fn idle_wait() -> Result<WaitSet, Error> {
    let refused = |error| Error::environment(format!("make a descriptor to sleep on: {error}"));
    WaitSet::new().map_err(refused)
}

#[cfg(test)]
mod tests;
