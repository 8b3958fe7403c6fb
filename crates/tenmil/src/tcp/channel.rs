//! A namespace of remote SSDs as a medium, however many paths lead to it.

use std::sync::{Arc, Mutex, PoisonError};

use base::{
    Answers, Backend, DoorbellCounts, Instant, Limits, Medium, Request, ReservationHolder,
    Reservations, Segment, Span, WakeSource,
};
use host::Clock;
use remote::{Policy, Sleep};

use super::opening::Opening;
use super::reservations::{ReservationQueue, ReservedNamespace};
use super::sleep::Pillow;
use crate::Refused;
use crate::growth::Growth;

/// What stands behind a medium: connections to remote SSDs, and who tends them.
pub(super) trait Queues: Send + Sync + 'static {
    /// A queue to the namespace, for one thread.
    type Queue: Backend + Send + 'static;

    /// A queue that was asked for.
    type Ticket: Copy + Send + 'static;

    /// Asks for another queue, with connections of its own. Waits for nothing: the queue is connected
    /// when the device is.
    fn open_queue(&self) -> Result<Self::Ticket, Refused>;

    /// The queue that was asked for, once it is connected. The error says why it is not.
    fn take_queue(&self, ticket: Self::Ticket) -> Result<Option<Self::Queue>, Refused>;

    /// Gives up a queue that was asked for and has not been taken.
    fn close_queue(&self, ticket: Self::Ticket);

    /// Whether the device is connected, as far as is known.
    fn is_up(&self) -> bool;

    /// What the thread of a queue sleeps on.
    fn with_sleep(queue: Self::Queue, sleep: Box<dyn Sleep>) -> Self::Queue;

    /// The clock of the queues, and when what waits for a connection fails.
    fn clock(&self) -> (&Clock, &Policy);

    /// Who is called, for errors.
    fn address(&self) -> &str;

    /// Another queue, which is waited for as long as a connection may take.
    fn queue(&self) -> Result<Self::Queue, Refused> {
        let (clock, policy) = self.clock();
        let end = clock.now().after(policy.connect);
        let pillow = pillow()?;
        let ticket = self.open_queue()?;
        let taken = loop {
            match self.take_queue(ticket) {
                Ok(Some(queue)) => return Ok(Self::with_sleep(queue, Box::new(pillow))),
                Ok(None) if clock.now() < end => host::thread::give_way(),
                Ok(None) => {
                    let address = self.address();
                    let why = format!("tcp://{address}: a queue was not connected in time");
                    break Refused::peer(why);
                }
                Err(refused) => break refused,
            }
        };
        self.close_queue(ticket);
        Err(taken)
    }

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
    queue: Queue<Q>,
    /// Dropped after the queue.
    behind: Arc<Q>,
}

/// A queue, as soon as there is one.
enum Queue<Q: Queues> {
    Open(Q::Queue),
    Opening(Box<Opening<Q::Ticket>>),
}

/// How long a channel waits for its queue while the device is connected: a refusal is told to the
/// opener. The device may be gone without anybody knowing yet, and other openers queue up behind.
const OPEN_WAIT: Span = Span::from_ms(100);

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
        let behind = Arc::clone(&self.behind);
        let channel = match first {
            Some(queue) => Ok(RemoteChannel { queue: Queue::Open(queue), behind }),
            None => RemoteChannel::open(behind, self.limits()),
        };
        Ok(Box::new(channel.map_err(|refused| refused.text)?))
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

impl<Q: Queues> RemoteChannel<Q> {
    /// A channel whose queue is connected when the device is. Nothing is waited for while the device
    /// is absent.
    fn open(behind: Arc<Q>, limits: Limits) -> Result<Self, Refused> {
        let pillow = pillow()?;
        let ticket = behind.open_queue()?;
        let fail_fast = behind.clock().1.fail_fast;
        let opening = Opening::new(ticket, limits, Box::new(pillow), fail_fast);
        let mut channel = Self { queue: Queue::Opening(Box::new(opening)), behind };
        let end = channel.behind.clock().0.now().after(OPEN_WAIT);
        while channel.behind.is_up() && channel.behind.clock().0.now() < end && !channel.take()? {
            host::thread::give_way();
        }
        Ok(channel)
    }

    /// Takes the queue, if it is connected by now. Whether it is open.
    fn take(&mut self) -> Result<bool, Refused> {
        let Queue::Opening(opening) = &mut self.queue else { return Ok(true) };
        let Some(queue) = self.behind.take_queue(opening.ticket)? else { return Ok(false) };
        let mut queue = match opening.sleep.take() {
            Some(sleep) => Q::with_sleep(queue, sleep),
            None => queue,
        };
        queue.heed_losses(opening.heeded);
        self.queue = Queue::Open(queue);
        Ok(true)
    }

    /// As [`take`](Self::take), now and then. Why there is no queue, nobody can be told.
    #[cold]
    fn look(&mut self, now: Instant) {
        if let Queue::Opening(opening) = &mut self.queue
            && opening.is_to_look(now)
        {
            let _ = self.take();
        }
    }
}

impl<Q: Queues> Backend for RemoteChannel<Q> {
    fn limits(&self) -> &Limits {
        match &self.queue {
            Queue::Open(queue) => queue.limits(),
            Queue::Opening(opening) => &opening.limits,
        }
    }

    #[inline]
    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        if let Queue::Opening(_) = self.queue {
            self.look(now);
        }
        match &mut self.queue {
            Queue::Open(queue) => queue.submit(now, requests, segments),
            Queue::Opening(opening) => opening.submit(now, requests),
        }
    }

    #[inline]
    fn flush(&mut self) {
        if let Queue::Open(queue) = &mut self.queue {
            queue.flush();
        }
    }

    #[inline]
    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        match &mut self.queue {
            Queue::Open(queue) => queue.poll(now, answers),
            Queue::Opening(opening) => {
                let count = opening.poll(answers);
                if opening.owes_nothing() {
                    self.look(now);
                }
                count
            }
        }
    }

    fn doorbells(&self) -> DoorbellCounts {
        match &self.queue {
            Queue::Open(queue) => queue.doorbells(),
            Queue::Opening(_) => DoorbellCounts::default(),
        }
    }

    fn losses(&self) -> u64 {
        match &self.queue {
            Queue::Open(queue) => queue.losses(),
            Queue::Opening(_) => 0,
        }
    }

    fn heed_losses(&mut self, count: u64) {
        match &mut self.queue {
            Queue::Open(queue) => queue.heed_losses(count),
            Queue::Opening(opening) => opening.heeded = opening.heeded.max(count),
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

    fn disarm(&mut self) {
        if let Queue::Open(queue) = &mut self.queue {
            queue.disarm();
        }
    }
}

impl<Q: Queues> Drop for RemoteChannel<Q> {
    /// Waits until nobody touches memory of a request any more: it answers what it has, or is found
    /// lost by the thread that tends it.
    fn drop(&mut self) {
        match &mut self.queue {
            Queue::Open(queue) => {
                while !self.behind.abandon(queue) {
                    host::thread::give_way();
                }
            }
            Queue::Opening(opening) => self.behind.close_queue(opening.ticket),
        }
    }
}

fn pillow() -> Result<Pillow, Refused> {
    let refused = |error| Refused::machine(format!("make a descriptor to sleep on: {error}"));
    Pillow::new().map_err(refused)
}

#[cfg(test)]
mod tests;
