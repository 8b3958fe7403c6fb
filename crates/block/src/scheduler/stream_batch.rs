//! Stream-batch scheduler: holds requests and sends them at once over a stream.
//!
//! ```text
//!   submitted ── held ── count, bytes or time reached ── one batch ── flush below after the last
//! ```

use std::fmt;

use tenmil_base::{
    ChannelWakeup, CompletionBatch, Instant, IoChannel, Limits, Operation, Request, RequestFlags,
    Segment, Span,
};

use crate::uri::UriOptions;
use tenmil_base::Error;

/// Scheduler that holds requests until there are enough of them or the oldest has waited long enough, and
/// submits them as one batch followed by a flush of the channel below. A flush call does not send the
/// held requests. A flush request or a FUA write does, and so does a batch that is large enough by
/// itself, which goes down unchanged.
pub struct StreamBatchScheduler<B> {
    below: B,
    options: StreamBatchOptions,
    depth_max: usize,
    held: Vec<Request>,
    /// Segments of the held requests.
    segments: Vec<Segment>,
    held_bytes: u64,
    /// When the oldest held request has waited long enough.
    due_at: Instant,
    /// The channel below accepts no more of the held requests.
    is_stuck: bool,
    /// Requests below that have not completed.
    under_way: usize,
}

/// Thresholds at which held requests are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamBatchOptions {
    /// Number of requests.
    pub count: u16,
    /// Bytes of data.
    pub bytes: u64,
    /// Maximum wait of the oldest request.
    pub time: Span,
}

impl Default for StreamBatchOptions {
    fn default() -> Self {
        Self { count: 16, bytes: 64 << 10, time: Span::from_us(50) }
    }
}

/// Maximum number of held requests.
const COUNT_MAX: u64 = 1024;

impl StreamBatchOptions {
    pub(super) fn parse(fields: &mut UriOptions<'_>) -> Result<Self, Error> {
        let default = Self::default();
        let count = fields.number_value("count", 1..=COUNT_MAX)?;
        Ok(Self {
            count: count.and_then(|count| u16::try_from(count).ok()).unwrap_or(default.count),
            bytes: fields.size_value("bytes")?.unwrap_or(default.bytes),
            time: fields.time_value("time")?.unwrap_or(default.time),
        })
    }
}

impl fmt::Display for StreamBatchOptions {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { count, bytes, time } = self;
        write!(out, "count={count}&bytes={bytes}&time={}ns", time.ns)
    }
}

impl<B: IoChannel> StreamBatchScheduler<B> {
    /// Creates a scheduler over `below`. Allocates here and never again.
    pub fn new(below: B, options: &StreamBatchOptions) -> Self {
        let limits = below.limits();
        let count = usize::from(options.count.max(1));
        let segments_max =
            usize::from(limits.segments_max) * if limits.metadata_size > 0 { 2 } else { 1 };
        Self {
            depth_max: limits.depth_max as usize,
            options: *options,
            held: Vec::with_capacity(count),
            segments: Vec::with_capacity(count * segments_max),
            held_bytes: 0,
            due_at: Instant::NEVER,
            is_stuck: false,
            under_way: 0,
            below,
        }
    }

    fn is_full(&self) -> bool {
        self.held.len() >= usize::from(self.options.count.max(1))
    }

    fn must_dispatch(&self, now: Instant) -> bool {
        self.is_full() || self.held_bytes >= self.options.bytes || self.due_at <= now
    }

    /// Holds a request. Returns false if its segments are invalid, or if they exceed the segment table.
    fn hold_request(&mut self, now: Instant, request: &Request, segments: &[Segment]) -> bool {
        let count = usize::from(request.segment_count) + usize::from(request.metadata_count);
        let own = segments.get(request.segment_first as usize..).and_then(|rest| rest.get(..count));
        let Some(own) =
            own.filter(|own| own.len() <= self.segments.capacity() - self.segments.len())
        else {
            return false;
        };
        let segment_first = u32::try_from(self.segments.len()).unwrap_or(u32::MAX);
        self.segments.extend_from_slice(own);
        self.held.push(Request { segment_first, ..*request });
        self.held_bytes += own.iter().map(|segment| u64::from(segment.len_bytes)).sum::<u64>();
        let hurries = request.operation == Operation::Flush || request.flags.has(RequestFlags::FUA);
        let due_at = if hurries { now } else { now.after(self.options.time) };
        self.due_at = self.due_at.min(due_at);
        true
    }

    /// Sends held requests, as the channel below accepts them.
    fn dispatch_batch(&mut self, now: Instant) {
        if self.held.is_empty() {
            return;
        }
        let count = self.below.submit(now, &self.held, &self.segments);
        self.under_way += count;
        self.held.drain(..count);
        self.is_stuck = !self.held.is_empty();
        if !self.is_stuck {
            self.segments.clear();
            self.held_bytes = 0;
            self.due_at = Instant::NEVER;
        }
        if count > 0 {
            self.below.flush_submissions();
        }
    }

    /// Submits a batch unchanged.
    fn pass_through(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let count = self.below.submit(now, requests, segments);
        self.under_way += count;
        if count > 0 {
            self.below.flush_submissions();
        }
        count
    }
}

impl<B: IoChannel> IoChannel for StreamBatchScheduler<B> {
    fn limits(&self) -> &Limits {
        self.below.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let room = self.depth_max.saturating_sub(self.under_way + self.held.len());
        let requests = &requests[..requests.len().min(room)];
        let mut taken = 0;
        while let Some(request) = requests.get(taken) {
            if self.is_stuck {
                break;
            }
            let rest = &requests[taken..];
            if self.held.is_empty() && rest.len() >= usize::from(self.options.count) {
                return taken + self.pass_through(now, rest, segments);
            }
            if self.hold_request(now, request, segments) {
                taken += 1;
            } else if self.held.is_empty() {
                // A request that cannot be held: the channel below accepts or rejects it.
                let count = self.pass_through(now, &rest[..1], segments);
                taken += count;
                if count == 0 {
                    break;
                }
            } else {
                self.dispatch_batch(now);
            }
            if self.must_dispatch(now) {
                self.dispatch_batch(now);
            }
        }
        taken
    }

    #[inline]
    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let count = self.below.poll(now, completions);
        self.under_way -= count;
        if self.is_stuck || self.due_at <= now {
            self.dispatch_batch(now);
        }
        count
    }
}

impl<B: IoChannel> ChannelWakeup for StreamBatchScheduler<B> {
    fn below(&self) -> Option<&dyn IoChannel> {
        Some(&self.below)
    }

    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        Some(&mut self.below)
    }

    fn wake_at(&self) -> Instant {
        // When the channel below is full, its next completion wakes the thread.
        let due_at = if self.is_stuck { Instant::NEVER } else { self.due_at };
        due_at.min(self.below.wake_at())
    }

    fn arm(&mut self) -> bool {
        let needs_polling = self.is_stuck && self.under_way == 0;
        (needs_polling && self.below.wake_at() == Instant::NEVER) || self.below.arm()
    }
}
