//! A namespace of a remote SSD as a block device: the driver's queue pair, and the device's end of it,
//! one behind the other in the same thread.

use base::{Answers, Backend, DoorbellCounts, Instant, Limits, Request, Segment, WakeSource};
use nvme::{NamespaceQueue, NamespaceView, QueuePair, QueueSizes};

use crate::lane::Lane;
use crate::reach::Reach;
use crate::rings::Bell;
use crate::sleep::Sleep;

/// A queue pair with its connection.
///
/// What is submitted is sent in the same turn, by the [`flush`](Backend::flush) that follows.
pub struct RemoteQueue {
    queue: NamespaceQueue<Reach, Bell>,
    lane: Lane,
    sleep: Option<Box<dyn Sleep>>,
}

impl RemoteQueue {
    pub(crate) fn new(
        reach: &Reach,
        pair: QueuePair<Reach, Bell>,
        lane: Lane,
        view: NamespaceView,
        sizes: QueueSizes,
    ) -> Option<Self> {
        let queue = NamespaceQueue::new(reach, pair, view, sizes)?;
        Some(Self { queue, lane, sleep: None })
    }

    /// What its thread sleeps on. Without it, a thread cannot sleep while the queue owes an answer.
    #[must_use]
    pub fn with_sleep(mut self, sleep: Box<dyn Sleep>) -> Self {
        self.lane.wakes(sleep.bell());
        self.sleep = Some(sleep);
        self
    }

    /// The queue pair underneath.
    pub fn queue(&mut self) -> &mut NamespaceQueue<Reach, Bell> {
        &mut self.queue
    }

    /// Takes what comes and tells nobody, for a queue that is about to be dropped. True once nothing
    /// is owed any more.
    pub fn abandon(&mut self, now: Instant) -> bool {
        self.lane.push();
        self.lane.pull(now);
        let is_done = self.queue.abandon(now);
        self.lane.push();
        is_done
    }
}

impl Backend for RemoteQueue {
    fn limits(&self) -> &Limits {
        self.queue.limits()
    }

    #[inline]
    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.queue.submit(now, requests, segments)
    }

    #[inline]
    fn flush(&mut self) {
        self.queue.flush();
        self.lane.push();
    }

    #[inline]
    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        self.lane.pull(now);
        let count = self.queue.poll(now, answers);
        // What data were asked for, and what was split and goes on.
        self.lane.push();
        count
    }

    fn doorbells(&self) -> DoorbellCounts {
        self.queue.doorbells()
    }

    fn wake_at(&self) -> Instant {
        self.queue.wake_at().min(self.lane.wake_at())
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.sleep.as_ref().map_or(WakeSource::Nothing, |sleep| sleep.wake_source())
    }

    fn arm(&mut self) -> bool {
        let Some(sleep) = &mut self.sleep else { return true };
        sleep.clear();
        let has_work = self.lane.arm(&mut **sleep);
        // What was answered without a command, or split and not sent, nobody tells of.
        has_work || !self.queue.queue_mut().arm() || self.queue.wake_at() == Instant::default()
    }

    fn disarm(&mut self) {
        self.lane.disarm();
    }
}
