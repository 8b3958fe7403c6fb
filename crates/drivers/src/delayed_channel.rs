//! I/O channel that delays completions.
//!
//! The device below executes a request at once. No clock is read: the completion time follows from the
//! time of submission.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Error, Instant, IoChannel, IoCompletion, Limits,
    Request, Segment,
};

use tenmil_block::CompletionQueue;

/// Computes completion times.
pub(crate) trait CompletionTiming: Send {
    /// Passes to `each` the completion time of each of `requests`, which are submitted now.
    fn completion_times(
        &mut self,
        now: Instant,
        requests: &[Request],
        each: &mut dyn FnMut(Instant),
    );
}

/// I/O channel over another one, with completion times.
pub(crate) struct DelayedChannel<T> {
    inner: Box<dyn IoChannel>,
    limits: Limits,
    timing: T,
    slots: Box<[DelayedRequest]>,
    free: Vec<u32>,
    /// The batch being submitted, with slots as tokens.
    batch: Vec<Request>,
    /// Completions polled from below.
    below: CompletionBatch,
    /// Due time of each slot, earliest first.
    timers: BinaryHeap<Reverse<(Instant, u32)>>,
    ready: CompletionQueue,
}

/// A request in flight: it completes once it is due and the device below has completed it.
#[derive(Clone, Copy, Debug, Default)]
struct DelayedRequest {
    token: u64,
    completion: Option<IoCompletion>,
    due: bool,
}

const DEPTH_MAX: u32 = 4096;

/// The limits of a delayed device over `inner`.
pub(crate) fn delayed_device_limits(inner: &dyn BlockDevice) -> Limits {
    let inner = inner.limits();
    Limits { depth_max: inner.depth_max.min(DEPTH_MAX), ..inner }
}

impl<T: CompletionTiming> DelayedChannel<T> {
    /// Opens a channel of `medium` with the completion times of `timing`. Allocates here and never again.
    pub(crate) fn open(medium: &dyn BlockDevice, timing: T) -> Result<Self, Error> {
        let limits = delayed_device_limits(medium);
        let depth = limits.depth_max;
        let room = depth as usize;
        Ok(Self {
            inner: medium.channel()?,
            timing,
            slots: vec![DelayedRequest::default(); room].into(),
            free: (0..depth).rev().collect(),
            batch: Vec::with_capacity(room),
            below: CompletionBatch::with_capacity(room),
            timers: BinaryHeap::with_capacity(room),
            ready: CompletionQueue::with_depth(depth),
            limits,
        })
    }
}

impl<T: CompletionTiming> IoChannel for DelayedChannel<T> {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        // A completion that waits to be polled has freed its slot, and still counts.
        let room = self.free.len().saturating_sub(self.ready.len());
        let with_slots = requests.iter().zip(self.free.iter().rev()).take(room);
        self.batch.clear();
        self.batch.extend(
            with_slots.map(|(request, slot)| Request { token: u64::from(*slot), ..*request }),
        );
        let taken = self.inner.submit(now, &self.batch, segments);
        // `inner` accepts a prefix. Only the accepted requests take slots and draw a completion time.
        let Self { timing, slots, free, timers, .. } = self;
        let mut tokens = requests[..taken].iter().map(|request| request.token);
        timing.completion_times(now, &requests[..taken], &mut |due_at| {
            if let (Some(slot), Some(token)) = (free.pop(), tokens.next()) {
                slots[slot as usize] = DelayedRequest { token, completion: None, due: false };
                timers.push(Reverse((due_at, slot)));
            }
        });
        taken
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        self.inner.poll(now, &mut self.below);
        for completion in self.below.drain() {
            let Ok(slot) = u32::try_from(completion.token) else { continue };
            self.slots[slot as usize].completion = Some(completion);
            complete_if_due(&mut self.slots, slot, &mut self.free, &mut self.ready);
        }
        while let Some(&Reverse((due_at, slot))) = self.timers.peek()
            && due_at <= now
        {
            self.timers.pop();
            self.slots[slot as usize].due = true;
            complete_if_due(&mut self.slots, slot, &mut self.free, &mut self.ready);
        }
        self.ready.drain_into(completions)
    }
}

impl<T: CompletionTiming> ChannelWakeup for DelayedChannel<T> {
    fn below(&self) -> Option<&dyn IoChannel> {
        Some(&self.inner)
    }

    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        Some(&mut self.inner)
    }

    fn wake_at(&self) -> Instant {
        if !self.ready.is_empty() {
            return Instant::default();
        }
        let timer = self.timers.peek().map_or(Instant::NEVER, |Reverse((due_at, _))| *due_at);
        timer.min(self.inner.wake_at())
    }

    /// Completions are held back here.
    fn is_done_by_local_kernel(&self) -> bool {
        false
    }

    fn arm(&mut self) -> bool {
        // A request that is not due needs no signal: its due time is in `wake_at`.
        let busy_below = self.inner.arm();
        !self.ready.is_empty() || busy_below
    }
}

/// Moves a request from its slot to the completions if it is due and completed below.
fn complete_if_due(
    slots: &mut [DelayedRequest],
    slot: u32,
    free: &mut Vec<u32>,
    ready: &mut CompletionQueue,
) {
    let DelayedRequest { token, completion: Some(completion), due: true } = slots[slot as usize]
    else {
        return;
    };
    ready.push(IoCompletion { token, ..completion });
    free.push(slot);
}
