//! A channel whose answers are kept back until they are due.
//!
//! What a request does to the blocks, the device underneath does at once. Nothing here reads a
//! clock: when an answer is due is computed from the time of its submission.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use base::{
    Answer, Answers, Backend, DoorbellCounts, Instant, Limits, Medium, Request, Segment, WakeSource,
};

use super::ready::Ready;

/// Says how long answers are kept back.
pub(crate) trait Timing: Send {
    /// Gives `each` the instant at which each of `requests`, submitted now, is to be answered.
    fn schedule(&mut self, now: Instant, requests: &[Request], each: &mut dyn FnMut(Instant));
}

/// A channel over another one, with its timing.
pub(crate) struct HeldChannel<T> {
    inner: Box<dyn Backend>,
    limits: Limits,
    timing: T,
    slots: Box<[Slot]>,
    free: Vec<u32>,
    /// The batch that goes down, with slots for tokens.
    batch: Vec<Request>,
    /// What came up from below.
    below: Answers,
    /// When each slot is due, soonest first.
    timers: BinaryHeap<Reverse<(Instant, u32)>>,
    ready: Ready,
}

/// A request under way: it is answered once it is due and the medium underneath has answered it.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    token: u64,
    answer: Option<Answer>,
    due: bool,
}

const DEPTH_MAX: u32 = 4096;

/// The limits of a held medium over `inner`.
pub(crate) fn limits(inner: &dyn Medium) -> Limits {
    let inner = inner.limits();
    Limits { depth_max: inner.depth_max.min(DEPTH_MAX), ..inner }
}

impl<T: Timing> HeldChannel<T> {
    /// A channel of `medium` whose answers come when `timing` says. Allocates here and never again.
    pub(crate) fn open(medium: &dyn Medium, timing: T) -> Result<Self, String> {
        let limits = limits(medium);
        let depth = limits.depth_max;
        let room = depth as usize;
        Ok(Self {
            inner: medium.channel()?,
            timing,
            slots: vec![Slot::default(); room].into(),
            free: (0..depth).rev().collect(),
            batch: Vec::with_capacity(room),
            below: Answers::with_capacity(room),
            timers: BinaryHeap::with_capacity(room),
            ready: Ready::with_depth(depth),
            limits,
        })
    }
}

impl<T: Timing> Backend for HeldChannel<T> {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        // An answer that waits to be polled has given its slot back, and still counts.
        let room = self.free.len().saturating_sub(self.ready.len());
        let with_slots = requests.iter().zip(self.free.iter().rev()).take(room);
        self.batch.clear();
        self.batch.extend(
            with_slots.map(|(request, slot)| Request { token: u64::from(*slot), ..*request }),
        );
        let taken = self.inner.submit(now, &self.batch, segments);
        let Self { timing, slots, free, timers, .. } = self;
        let mut tokens = requests[..taken].iter().map(|request| request.token);
        timing.schedule(now, &requests[..taken], &mut |due_at| {
            if let (Some(slot), Some(token)) = (free.pop(), tokens.next()) {
                slots[slot as usize] = Slot { token, answer: None, due: false };
                timers.push(Reverse((due_at, slot)));
            }
        });
        taken
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        self.inner.poll(now, &mut self.below);
        for answer in self.below.drain() {
            let Ok(slot) = u32::try_from(answer.token) else { continue };
            self.slots[slot as usize].answer = Some(answer);
            end_if_done(&mut self.slots, slot, &mut self.free, &mut self.ready);
        }
        while let Some(&Reverse((due_at, slot))) = self.timers.peek()
            && due_at <= now
        {
            self.timers.pop();
            self.slots[slot as usize].due = true;
            end_if_done(&mut self.slots, slot, &mut self.free, &mut self.ready);
        }
        self.ready.give(answers)
    }

    fn doorbells(&self) -> DoorbellCounts {
        self.inner.doorbells()
    }

    fn wake_at(&self) -> Instant {
        if self.ready.len() > 0 {
            return Instant::default();
        }
        let timer = self.timers.peek().map_or(Instant::NEVER, |Reverse((due_at, _))| *due_at);
        timer.min(self.inner.wake_at())
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.inner.wake_source()
    }

    fn arm(&mut self) -> bool {
        // What is not due yet needs nobody to signal it: the deadline stands in `wake_at`.
        let busy_below = self.inner.arm();
        self.ready.len() > 0 || busy_below
    }

    fn disarm(&mut self) {
        self.inner.disarm();
    }

    fn acknowledge_losses(&mut self) -> Result<(), String> {
        self.inner.acknowledge_losses()
    }
}

/// Moves a request from its slot to the answers if it is due and answered below.
fn end_if_done(slots: &mut [Slot], slot: u32, free: &mut Vec<u32>, ready: &mut Ready) {
    let Slot { token, answer: Some(answer), due: true } = slots[slot as usize] else { return };
    ready.push(Answer { token, ..answer });
    free.push(slot);
}
