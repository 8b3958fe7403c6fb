//! Deadline scheduler for slow devices: reads first, in ascending order, each with a deadline.
//!
//! ```text
//!             ┌ by block ── ascending, a batch at a time ┐
//!   submitted ┤                                          ├── below, up to its depth
//!             └ by age ──── requests past deadline ──────┘
//! ```

use std::fmt;

use tenmil_base::{
    ChannelWakeup, CompletionBatch, Instant, IoChannel, Limits, Operation, Request, Segment, Span,
};

use super::{must_keep_order, waits_for_data};
use crate::uri::UriOptions;
use tenmil_base::Error;

/// Scheduler that keeps a few requests below and orders the others: reads before writes, each in
/// ascending order of LBA, in batches of one kind. Requests are held only while the channel below is
/// full.
///
/// A request past its deadline is next when the current batch ends, the earliest deadline first, and
/// starts a batch of its own. Once a deadline has passed, at most these go down before that request: one
/// batch for each request with an earlier deadline, one more batch, and the requests that it must not
/// overtake. Writes wait for at most two batches of reads.
///
/// A flush is not held: it covers completed requests, which have passed this scheduler already.
pub struct DeadlineScheduler<B> {
    below: B,
    options: DeadlineOptions,
    limits: Limits,
    slots: Box<[QueuedRequest]>,
    free: Vec<u16>,
    /// Queues of reads and of writes.
    queues: [DirectionQueue; 2],
    /// Sequence number of the next request.
    next_number: u64,
    /// The queue of the current batch; `batch_left` is how many requests it may still send.
    direction: usize,
    batch_left: u16,
    /// Batches of reads sent while writes waited.
    passed_over: u16,
    /// Requests below that have not completed.
    under_way: usize,
}

/// Parameters of a deadline scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeadlineOptions {
    /// Deadline of a read.
    pub read: Span,
    /// Deadline of every other request.
    pub write: Span,
    /// Requests of one batch.
    pub batch: u16,
    /// Maximum number of requests below.
    pub depth: u16,
}

/// A waiting request.
#[derive(Debug)]
struct QueuedRequest {
    request: Request,
    segments: Vec<Segment>,
    number: u64,
    late_at: Instant,
}

/// Waiting requests of one kind, indexed by block and by age.
#[derive(Debug)]
struct DirectionQueue {
    by_block: Vec<(u64, u16)>,
    by_age: Vec<u16>,
    /// End of the last request sent.
    position: u64,
}

/// Maximum number of waiting requests.
const HELD_MAX: u16 = 256;
/// Maximum number of batches of reads sent while a write waits.
const PASSED_OVER_MAX: u16 = 2;
const READS: usize = 0;
const WRITES: usize = 1;

impl Default for DeadlineOptions {
    fn default() -> Self {
        Self { read: Span::from_ms(500), write: Span::from_secs(5), batch: 16, depth: 8 }
    }
}

impl DeadlineOptions {
    pub(super) fn parse(fields: &mut UriOptions<'_>) -> Result<Self, Error> {
        let default = Self::default();
        let mut number = |key, most, otherwise| -> Result<u16, Error> {
            let number = fields.number_value(key, 1..=most)?;
            Ok(number.and_then(|number| u16::try_from(number).ok()).unwrap_or(otherwise))
        };
        let batch = number("batch", 1024, default.batch)?;
        let depth = number("depth", 4096, default.depth)?;
        let read = fields.time_value("read")?.unwrap_or(default.read);
        let write = fields.time_value("write")?.unwrap_or(default.write);
        Ok(Self { read, write, batch, depth })
    }
}

impl fmt::Display for DeadlineOptions {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { read, write, batch, depth } = self;
        write!(out, "read={}ns&write={}ns&batch={batch}&depth={depth}", read.ns, write.ns)
    }
}

impl<B: IoChannel> DeadlineScheduler<B> {
    /// Creates a scheduler over `below`. Allocates here and never again.
    pub fn new(below: B, options: &DeadlineOptions) -> Self {
        let depth_max = below.limits().depth_max.min(HELD_MAX.into());
        let limits = Limits { depth_max, ..below.limits().clone() };
        let segments_max = usize::from(limits.segments_max);
        let metadata_max = if limits.metadata_size > 0 { segments_max } else { 0 };
        let slot = || QueuedRequest {
            request: Request::PLACEHOLDER,
            segments: Vec::with_capacity(segments_max + metadata_max),
            number: 0,
            late_at: Instant::NEVER,
        };
        let queue = || DirectionQueue {
            by_block: Vec::with_capacity(HELD_MAX.into()),
            by_age: Vec::with_capacity(HELD_MAX.into()),
            position: 0,
        };
        Self {
            below,
            options: *options,
            limits,
            slots: (0..HELD_MAX).map(|_| slot()).collect(),
            free: (0..HELD_MAX).rev().collect(),
            queues: [queue(), queue()],
            next_number: 0,
            direction: READS,
            batch_left: 0,
            passed_over: 0,
            under_way: 0,
        }
    }

    fn held_count(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The number of requests that may still go below.
    fn free_depth_below(&self) -> usize {
        usize::from(self.options.depth).saturating_sub(self.under_way)
    }

    /// Holds a request. Returns false if its segments are invalid or exceed the limits.
    fn queue_request(&mut self, now: Instant, request: &Request, segments: &[Segment]) -> bool {
        let count = usize::from(request.segment_count) + usize::from(request.metadata_count);
        let own = segments.get(request.segment_first as usize..).and_then(|rest| rest.get(..count));
        let Some(index) = self.free.last().copied() else { return false };
        let slot = &mut self.slots[usize::from(index)];
        let Some(own) = own.filter(|own| own.len() <= slot.segments.capacity()) else {
            return false;
        };
        self.free.pop();
        slot.segments.clear();
        slot.segments.extend_from_slice(own);
        slot.request = Request { segment_first: 0, ..*request };
        slot.number = self.next_number;
        self.next_number += 1;
        let direction = if waits_for_data(request) { READS } else { WRITES };
        let time_limit = [self.options.read, self.options.write][direction];
        slot.late_at = now.after(time_limit);
        self.queues[direction].insert(request.lba, index);
        true
    }

    /// Sends waiting requests up to the depth. Returns whether any was sent.
    fn dispatch(&mut self, now: Instant) -> bool {
        let mut has_sent = false;
        while self.held_count() > 0 && self.free_depth_below() > 0 {
            let Some((direction, chosen)) = self.choose_next(now) else { break };
            let index = self.first_that_must_precede(chosen);
            let slot = &self.slots[usize::from(index)];
            if self.below.submit(now, &[slot.request], &slot.segments) == 0 {
                break;
            }
            has_sent = true;
            self.under_way += 1;
            // A request sent only because it must precede the chosen one does not count toward the batch;
            // the choice is repeated.
            if index == chosen {
                self.record_dispatch(direction, index);
            }
            self.remove_dispatched(index);
        }
        has_sent
    }

    /// The queue and the request to send next. Does not change state.
    fn choose_next(&self, now: Instant) -> Option<(usize, u16)> {
        // A started batch continues in its direction, in ascending block order.
        if self.batch_left > 0
            && let Some(next) = self.queues[self.direction].next()
        {
            return Some((self.direction, next));
        }
        let eldest = |direction: usize| {
            let index = *self.queues[direction].by_age.first()?;
            Some((self.slots[usize::from(index)].late_at, direction, index))
        };
        let (read, write) = (eldest(READS), eldest(WRITES));
        // A late request is sent before a new batch starts.
        let late = [read, write].into_iter().flatten().filter(|(late_at, ..)| *late_at <= now);
        if let Some((_, direction, index)) = late.min() {
            return Some((direction, index));
        }
        // Reads are preferred until writes have been passed over too often.
        let direction = match (read, write) {
            (None, None) => return None,
            (Some(_), None) => READS,
            (None, Some(_)) => WRITES,
            (Some(_), Some(_)) if self.passed_over >= PASSED_OVER_MAX => WRITES,
            (Some(_), Some(_)) => READS,
        };
        let queue = &self.queues[direction];
        let first = || queue.by_block.first().map(|(_, index)| *index);
        Some((direction, queue.next().or_else(first)?))
    }

    /// The oldest request that `index` must not overtake, or `index` itself.
    fn first_that_must_precede(&self, index: u16) -> u16 {
        let mut chosen = index;
        loop {
            let QueuedRequest { request, number, .. } = &self.slots[usize::from(chosen)];
            let in_the_way = |other: &&u16| {
                let other = &self.slots[usize::from(**other)];
                other.number < *number && must_keep_order(&other.request, request)
            };
            let held = self.queues.iter().flat_map(|queue| &queue.by_age);
            match held
                .filter(in_the_way)
                .min_by_key(|other| self.slots[usize::from(**other)].number)
            {
                Some(elder) => chosen = *elder,
                None => return chosen,
            }
        }
    }

    /// Counts a request sent from queue `turn` toward the current batch.
    fn record_dispatch(&mut self, turn: usize, index: u16) {
        let Request { lba, blocks, .. } = self.slots[usize::from(index)].request;
        if self.batch_left == 0 || self.direction != turn {
            let others_wait = !self.queues[WRITES].by_age.is_empty();
            self.passed_over = if turn == READS && others_wait { self.passed_over + 1 } else { 0 };
            (self.direction, self.batch_left) = (turn, self.options.batch.max(1));
        }
        self.batch_left -= 1;
        self.queues[turn].position = lba.saturating_add(u64::from(blocks));
    }

    /// Frees the entry of a request that has been sent.
    fn remove_dispatched(&mut self, index: u16) {
        let lba = self.slots[usize::from(index)].request.lba;
        self.queues.iter_mut().for_each(|queue| queue.remove(lba, index));
        self.free.push(index);
    }

    /// Submits requests unchanged.
    fn pass_through(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let count = self.below.submit(now, requests, segments);
        self.under_way += count;
        count
    }

    /// Accepts one request. Returns false if there is no free entry.
    fn accept_request(&mut self, now: Instant, request: &Request, segments: &[Segment]) -> bool {
        let waits = request.operation != Operation::Flush;
        if waits && self.queue_request(now, request, segments) {
            return true;
        }
        // A flush is not held. A request that cannot be held is rejected by the channel below.
        self.pass_through(now, std::slice::from_ref(request), segments) == 1
    }
}

impl DirectionQueue {
    fn insert(&mut self, lba: u64, index: u16) {
        let at = self.by_block.partition_point(|entry| *entry < (lba, index));
        self.by_block.insert(at, (lba, index));
        self.by_age.push(index);
    }

    fn remove(&mut self, lba: u64, index: u16) {
        if let Ok(at) = self.by_block.binary_search(&(lba, index)) {
            self.by_block.remove(at);
            self.by_age.retain(|other| *other != index);
        }
    }

    /// The next request in ascending order; `None` at the end.
    fn next(&self) -> Option<u16> {
        let at = self.by_block.partition_point(|(lba, _)| *lba < self.position);
        self.by_block.get(at).map(|(_, index)| *index)
    }
}

impl<B: IoChannel> IoChannel for DeadlineScheduler<B> {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let taken_before = self.under_way + self.held_count();
        let room = (self.limits.depth_max as usize).saturating_sub(taken_before);
        let requests = &requests[..requests.len().min(room)];
        if self.held_count() == 0 && requests.len() <= self.free_depth_below() {
            return self.pass_through(now, requests, segments);
        }
        let taken = requests
            .iter()
            .take_while(|request| self.accept_request(now, request, segments))
            .count();
        self.dispatch(now);
        taken
    }

    #[inline]
    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let count = self.below.poll(now, completions);
        // The device may have been resized.
        self.limits.block_count = self.below.limits().block_count;
        self.under_way -= count;
        if self.held_count() > 0 && self.dispatch(now) {
            self.below.flush_submissions();
        }
        count
    }
}

impl<B: IoChannel> ChannelWakeup for DeadlineScheduler<B> {
    fn below(&self) -> Option<&dyn IoChannel> {
        Some(&self.below)
    }

    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        Some(&mut self.below)
    }

    fn arm(&mut self) -> bool {
        let needs_polling = self.held_count() > 0 && self.under_way == 0;
        (needs_polling && self.below.wake_at() == Instant::NEVER) || self.below.arm()
    }
}
