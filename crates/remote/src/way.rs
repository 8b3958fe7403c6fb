//! A way to a namespace: the driver's queue pair, and the device's end of it, one behind the other in
//! the same thread.
//!
//! ```text
//!   submit ─▶ NamespaceQueue ─ rings ─▶ Lane ─▶ connection     sent by the flush that follows
//!   poll   ◀─ NamespaceQueue ◀─ rings ─ Lane ◀─ connection
//! ```

use base::{Answers, Backend, DoorbellCounts, Instant, Limits, Request, Segment, Span};
use nvme::{NamespaceQueue, NamespaceView, Order, QueuePair, QueueSizes};

use crate::caches::Association;
use crate::lane::Lane;
use crate::reach::Reach;
use crate::rings::Bell;
use crate::sleep::Sleep;

/// A queue pair with its connection. What a reset ends is answered with
/// [`ABORTED_BY_HOST`](base::Outcome::ABORTED_BY_HOST) once the old controller can do nothing of it
/// any more.
pub(crate) struct Way {
    queue: NamespaceQueue<Reach, Bell>,
    lane: Lane,
    sends_at_once: bool,
    /// How long a command may take.
    pub(crate) limit: Span,
}

/// What can be done with a way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    /// It takes requests.
    Open,
    /// It takes none, and may still answer some.
    Closing,
    /// There is no connection. What it has not answered it answers when the old controller can do
    /// nothing of it any more.
    Cut,
}

impl Way {
    pub(crate) fn new(
        reach: &Reach,
        pair: QueuePair<Reach, Bell>,
        lane: Lane,
        view: NamespaceView,
        sizes: QueueSizes,
        limit: Span,
    ) -> Option<Self> {
        let queue = NamespaceQueue::new(reach, pair, view, sizes)?;
        Some(Self { queue, lane, sends_at_once: true, limit })
    }

    /// Whether what is submitted is sent by the flush that follows, or by the next poll.
    #[must_use]
    pub(crate) fn sending_at_once(mut self, sends_at_once: bool) -> Self {
        self.sends_at_once = sends_at_once;
        self
    }

    pub(crate) fn queue(&mut self) -> &mut NamespaceQueue<Reach, Bell> {
        &mut self.queue
    }

    pub(crate) fn limits(&self) -> &Limits {
        self.queue.limits()
    }

    /// What its controller wants of it.
    #[inline]
    pub(crate) fn standing(&self) -> Order {
        self.queue.queue().standing()
    }

    pub(crate) fn condition(&self) -> Condition {
        match (self.lane.is_connected(), self.standing()) {
            (false, _) => Condition::Cut,
            (true, Order::Run) => Condition::Open,
            (true, _) => Condition::Closing,
        }
    }

    /// The controller that has answered what was polled last.
    #[inline]
    pub(crate) fn association(&self) -> Option<&Association> {
        self.lane.association()
    }

    /// Whether the connection has broken by itself, and has not been made again.
    pub(crate) fn is_broken(&self) -> bool {
        self.lane.is_broken()
    }

    /// Hands requests to the queue pair, as far as it takes them.
    #[inline]
    pub(crate) fn submit(
        &mut self,
        now: Instant,
        requests: &[Request],
        segments: &[Segment],
    ) -> usize {
        self.queue.submit(now, requests, segments)
    }

    /// Sends what was submitted.
    #[inline]
    pub(crate) fn flush(&mut self) {
        self.queue.flush();
        if self.sends_at_once {
            self.lane.push();
        }
    }

    /// Takes what has come. [`send_rest`](Self::send_rest) follows.
    #[inline]
    pub(crate) fn poll(&mut self, now: Instant, answers: &mut Answers) {
        self.lane.pull(now);
        self.queue.poll(now, answers);
    }

    /// Sends what data were asked for, and what was split and goes on.
    #[inline]
    pub(crate) fn send_rest(&mut self) {
        self.lane.push();
    }

    /// Takes what comes and tells nobody. True once nothing is owed any more.
    pub(crate) fn abandon(&mut self, now: Instant) -> bool {
        self.lane.push();
        self.lane.pull(now);
        let is_done = self.queue.abandon(now);
        self.lane.push();
        is_done
    }

    pub(crate) fn doorbells(&self) -> DoorbellCounts {
        self.queue.doorbells()
    }

    pub(crate) fn wake_at(&self) -> Instant {
        self.queue.wake_at().min(self.lane.wake_at())
    }

    /// What its thread sleeps on is woken by orders.
    pub(crate) fn wakes(&self, sleep: &dyn Sleep) {
        self.lane.wakes(sleep.bell());
    }

    /// Has `sleep` wake for what comes. True if the thread must not sleep.
    pub(crate) fn arm(&mut self, sleep: &mut dyn Sleep) -> bool {
        // What was answered without a command, or split and not sent, nobody tells of.
        self.lane.arm(sleep)
            || !self.queue.queue_mut().arm()
            || self.queue.wake_at() == Instant::default()
    }

    pub(crate) fn disarm(&mut self) {
        self.lane.disarm();
    }
}
