//! Requests that took longer than a threshold, until their replies are sent.

use tenmil_base::{Instant, Span};
use tenmil_wire::nbd::RequestHeader;

use super::{RequestSlot, Transmission};
use crate::slow_io::SlowIoStages;

/// Times of the requests of a connection.
#[derive(Debug)]
pub(in crate::nbd) struct RequestTimes {
    /// Time of the iteration.
    pub(super) now: Instant,
    /// Time from which a request is slow; the highest value if none is.
    pub(super) threshold_ns: u64,
    /// Slow requests whose replies are not sent.
    unsent: Vec<SlowRequest>,
}

/// Slow request.
#[derive(Clone, Debug)]
pub(in crate::nbd) struct SlowRequest {
    slot: u16,
    completed_at: Instant,
    /// Its header.
    pub(in crate::nbd) header: RequestHeader,
    /// What failed.
    pub(in crate::nbd) error: Option<String>,
    /// When its header was received.
    pub(in crate::nbd) received_at: Instant,
    /// Time of each stage.
    pub(in crate::nbd) stages: SlowIoStages,
}

impl Default for RequestTimes {
    fn default() -> Self {
        Self { now: Instant::default(), threshold_ns: u64::MAX, unsent: Vec::new() }
    }
}

impl Transmission {
    /// Sets the time of the iteration, and the time from which a request is slow.
    #[inline]
    pub(in crate::nbd) fn set_time(&mut self, now: Instant, threshold_ns: u64) {
        (self.times.now, self.times.threshold_ns) = (now, threshold_ns);
    }

    /// Records that the I/O channel accepted the first `count` requests of the batch.
    #[cold]
    pub(super) fn record_submit_time(&mut self, count: usize) {
        for request in &self.requests[..count] {
            let slot = u16::try_from(request.token & 0xffff).unwrap_or(0);
            let memory = &mut self.slots[usize::from(slot)];
            // Of several pieces, the first one counts. What is older is of an earlier request.
            if memory.submitted_at < memory.ready_at || memory.submitted_at == Instant::NEVER {
                memory.submitted_at = self.times.now;
            }
        }
    }

    /// Keeps a slow request that is complete until its reply is sent.
    #[cold]
    pub(super) fn record_slow_request(&mut self, slot: u16) {
        let RequestSlot { header, received_at, ready_at, submitted_at, failure, .. } =
            &self.slots[usize::from(slot)];
        let now = self.times.now;
        // A request that needs no device has not all of the times.
        let ready_at = if *ready_at < *received_at { *received_at } else { *ready_at };
        let submitted_at = (*submitted_at).clamp(ready_at, now.max(ready_at));
        let is_write = header.payload_bytes() > 0;
        let transfer = ready_at.since(*received_at);
        let stages = SlowIoStages {
            wait: if is_write { Span::default() } else { transfer },
            transfer: is_write.then_some(transfer),
            queue: submitted_at.since(ready_at),
            device: now.since(submitted_at),
            send: None,
        };
        let error = failure.as_ref().map(|failure| failure.text.to_owned());
        let (header, received_at, completed_at) = (*header, *received_at, now);
        self.times.unsent.push(SlowRequest {
            slot,
            completed_at,
            header,
            error,
            received_at,
            stages,
        });
    }

    /// Whether there are slow requests.
    #[inline]
    pub(in crate::nbd) fn has_slow_requests(&self) -> bool {
        !self.times.unsent.is_empty()
    }

    /// Next slow request whose reply was sent, or with `is_ended` one whose reply was not.
    pub(in crate::nbd) fn next_slow_request(&mut self, is_ended: bool) -> Option<SlowRequest> {
        let is_sent = |slow: &SlowRequest| self.free.contains(&slow.slot);
        let at = self.times.unsent.iter().position(|slow| is_ended || is_sent(slow))?;
        let is_sent = is_sent(&self.times.unsent[at]);
        let mut slow = self.times.unsent.swap_remove(at);
        slow.stages.send = is_sent.then(|| self.times.now.since(slow.completed_at));
        Some(slow)
    }
}
