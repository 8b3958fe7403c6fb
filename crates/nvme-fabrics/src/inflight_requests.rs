//! Requests in flight, stored until completion so that they can be sent again after a connection loss.
//!
//! ```text
//!   submit ──▶ slot: request and segments ──▶ queue pair, with the slot as token
//!   completion ◀── original token ◀────────────┘   or: aborted by a reset ──▶ retry
//! ```
//!
//! A request that is retried forever may be the one that breaks the connection each time, so it has to be
//! identified. A reset with another cause is no evidence against a request. A request whose own connection
//! broke is a suspect, and is retried alone: if the connection breaks again, it is the cause.

use std::collections::VecDeque;

use tenmil_base::{Instant, Operation, Request, RequestFlags, Segment, Span};

/// The requests in flight.
#[derive(Debug)]
pub(crate) struct InflightRequests {
    slots: Box<[InflightSlot]>,
    /// Segment lists of requests with more than one segment.
    lists: Box<[Vec<Segment>]>,
    free: Vec<u32>,
    /// Slots to be sent again.
    retries: VecDeque<u32>,
    /// The suspect that is in flight alone.
    probe: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
struct InflightSlot {
    request: Request,
    segment: Segment,
    /// Time of submission in [ticks](TICK_BITS).
    sent_tick: u32,
    /// Incremented when it is sent elsewhere while a completion from its previous path is outstanding.
    attempt: u16,
    /// Path that it was sent to.
    path: u8,
    /// Number of resets that it has caused, number of rejections, and whether it is a suspect.
    retry_state: u8,
}

const _: () = assert!(size_of::<InflightSlot>() == 64, "a line of the cache");

/// Whether a connection broke by itself, and with how many requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionFailure {
    NotBroken,
    ManyInFlight,
    OneInFlight,
}

/// A connection loss as first noticed. What comes to light later, while the old controller is drained, is
/// not attributed to any request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConnectionLossSnapshot {
    pub(crate) at: Instant,
    pub(crate) failure: ConnectionFailure,
}

/// Verdict on a request that ended without a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LossVerdict {
    /// The reset had another cause.
    Unrelated,
    /// Its connection broke while other requests were in flight.
    Suspect,
    /// It was alone on the connection that broke, or has missed its deadline.
    Cause,
}

/// A request that has caused this many resets is not retried.
const CAUSED_RESETS_MAX: u8 = 3;
/// Bits of `retry_state` for the number of caused resets, and for the number of rejections by a path.
const CAUSED_RESETS_MASK: u8 = 0x03;
const REJECTION: u8 = 0x04;
const REJECTIONS_MASK: u8 = 0x7c;
const SUSPECT: u8 = 0x80;

/// No path.
const NO_PATH: u8 = u8::MAX;

/// Position of the attempt in a token, above the slot.
const ATTEMPT_SHIFT: u32 = 32;

/// A tick is slightly more than a second (2^30 ns).
const TICK_BITS: u32 = 30;

impl InflightRequests {
    /// A table for `depth` requests.
    pub(crate) fn new(depth: u32) -> Self {
        let slot = InflightSlot {
            request: Request::PLACEHOLDER,
            segment: Segment::default(),
            sent_tick: 0,
            attempt: 0,
            path: NO_PATH,
            retry_state: 0,
        };
        Self {
            slots: vec![slot; depth as usize].into(),
            lists: (0..depth).map(|_| Vec::new()).collect(),
            free: (0..depth).rev().collect(),
            retries: VecDeque::with_capacity(depth as usize),
            probe: None,
        }
    }

    /// Stores a request that goes to `path`, and returns it with its token there. `None` if the table is
    /// full.
    #[inline]
    pub(crate) fn insert(
        &mut self,
        now: Instant,
        request: &Request,
        segments: &[Segment],
        path: u8,
    ) -> Option<Request> {
        let first = request.segment_first as usize;
        let count = usize::from(request.segment_count) + usize::from(request.metadata_count);
        let index = self.free.pop()?;
        let slot = &mut self.slots[index as usize];
        slot.request = *request;
        slot.sent_tick = tick_of(now);
        slot.retry_state = 0;
        slot.path = path;
        let token = token_of(index, slot.attempt);
        match count {
            0 => {}
            // A segment index outside the table is rejected by the next layer.
            1 => slot.segment = segments.get(first).copied().unwrap_or_default(),
            _ => {
                let list = &mut self.lists[index as usize];
                list.clear();
                list.extend(segments.iter().skip(first).take(count));
            }
        }
        Some(Request { token, ..*request })
    }

    /// Frees the slot of a request that has completed, or was not sent. Returns its original token.
    #[inline]
    pub(crate) fn remove(&mut self, slot: u64) -> u64 {
        let index = slot_index_of(slot);
        self.free.push(index);
        let slot = &mut self.slots[index as usize];
        slot.path = NO_PATH;
        slot.request.token
    }

    /// Whether no request is in flight.
    pub(crate) fn is_empty(&self) -> bool {
        self.slots.len() == self.free.len()
    }

    /// Verdict on the request in `slot` after the loss of its connection, with command timeout `command_timeout`.
    pub(crate) fn loss_verdict(
        &self,
        loss: ConnectionLossSnapshot,
        slot: u64,
        command_timeout: Span,
    ) -> LossVerdict {
        let index = slot_index_of(slot);
        let age = tick_of(loss.at).wrapping_sub(self.slots[index as usize].sent_tick);
        let is_overdue = u64::from(age) << TICK_BITS >= command_timeout.ns;
        match loss.failure {
            ConnectionFailure::OneInFlight => LossVerdict::Cause,
            ConnectionFailure::ManyInFlight if self.probe == Some(index) => LossVerdict::Cause,
            ConnectionFailure::ManyInFlight => LossVerdict::Suspect,
            ConnectionFailure::NotBroken => {
                if is_overdue {
                    LossVerdict::Cause
                } else {
                    LossVerdict::Unrelated
                }
            }
        }
    }

    /// Schedules a retry of the request in `slot`, if that is permitted and it has not caused too many
    /// resets. Returns whether it is retried.
    pub(crate) fn requeue_after_loss(&mut self, slot: u64, loss_verdict: LossVerdict) -> bool {
        let index = slot_index_of(slot);
        self.end_probe(index);
        let slot = &mut self.slots[index as usize];
        match loss_verdict {
            LossVerdict::Unrelated => {}
            LossVerdict::Suspect => slot.retry_state |= SUSPECT,
            LossVerdict::Cause => slot.retry_state = (slot.retry_state | SUSPECT) + 1,
        }
        let is_permitted = slot.retry_state & CAUSED_RESETS_MASK < CAUSED_RESETS_MAX
            && is_repeatable(&slot.request);
        slot.path = NO_PATH;
        if is_permitted {
            self.retries.push_back(index);
        }
        is_permitted
    }

    /// Whether new requests have to wait: retries come first, or a suspect is in flight alone.
    #[inline]
    pub(crate) fn is_isolating(&self) -> bool {
        !self.retries.is_empty() || self.probe.is_some()
    }

    /// Clears the suspicion of the request in `slot`, which has completed.
    pub(crate) fn clear_suspect(&mut self, slot: u64) {
        self.end_probe(slot_index_of(slot));
    }

    fn end_probe(&mut self, index: u32) {
        self.probe = self.probe.filter(|probe| *probe != index);
    }

    /// The next request to retry, with its token and segments. A suspect waits until the `in_flight`
    /// others on its path have completed, and others wait for it.
    pub(crate) fn next_retry(&self, in_flight: usize) -> Option<(Request, &[Segment])> {
        let index = *self.retries.front()?;
        let InflightSlot { request, segment, retry_state, attempt, .. } =
            &self.slots[index as usize];
        if self.probe.is_some() || retry_state & SUSPECT != 0 && in_flight > 0 {
            return None;
        }
        let count = usize::from(request.segment_count) + usize::from(request.metadata_count);
        let segments = match count {
            0 | 1 => core::slice::from_ref(segment),
            _ => &self.lists[index as usize],
        };
        let token = token_of(index, *attempt);
        Some((Request { token, segment_first: 0, ..*request }, segments))
    }

    /// Records that the next retry was sent to `path`.
    pub(crate) fn record_retry(&mut self, now: Instant, path: u8) {
        let Some(index) = self.retries.pop_front() else { return };
        let slot = &mut self.slots[index as usize];
        slot.path = path;
        slot.sent_tick = tick_of(now);
        if slot.retry_state & SUSPECT != 0 {
            self.probe = Some(index);
        }
    }

    /// Removes the next retry, and returns its slot.
    pub(crate) fn pop_retry(&mut self) -> Option<u64> {
        self.retries.pop_front().map(u64::from)
    }

    /// Records that the request in `slot` goes to another path.
    pub(crate) fn set_path(&mut self, slot: u64, path: u8) {
        self.slots[slot_index_of(slot) as usize].path = path;
    }

    /// Whether a completion with this token is still awaited.
    #[inline]
    pub(crate) fn is_awaited(&self, token: u64) -> bool {
        u64::from(self.slots[slot_index_of(token) as usize].attempt) == token >> ATTEMPT_SHIFT
    }

    /// Schedules the request in `slot`, which was not sent, or not executed by its path.
    pub(crate) fn hold_for_retry(&mut self, slot: u64) {
        let index = slot_index_of(slot);
        self.end_probe(index);
        self.slots[index as usize].path = NO_PATH;
        self.retries.push_back(index);
    }

    /// Schedules a retry of the request in `slot`, which a path has rejected, if that is permitted and it
    /// has not been rejected too often. Returns whether it is retried.
    pub(crate) fn requeue_rejected(&mut self, slot: u64, is_undone: bool) -> bool {
        self.clear_suspect(slot);
        let of = &mut self.slots[slot_index_of(slot) as usize];
        // Other parts of a split copy may have been executed.
        let is_undone = is_undone && of.request.operation != Operation::Copy;
        let is_permitted = of.retry_state & REJECTIONS_MASK < REJECTIONS_MASK
            && (is_undone || is_repeatable(&of.request));
        if is_permitted {
            of.retry_state += REJECTION;
            self.hold_for_retry(slot);
        }
        is_permitted
    }

    /// Schedules retries of the requests outstanding on `path` that may be retried elsewhere at once, as
    /// determined by `is_permitted`. `loss` is how the path was lost, and `command_timeout` the command timeout. Returns
    /// their number, whose completions are no longer awaited, and the slots of those that must not be
    /// retried. A suspect there no longer blocks others.
    pub(crate) fn requeue_path(
        &mut self,
        path: u8,
        loss: ConnectionLossSnapshot,
        command_timeout: Span,
        is_permitted: impl Fn(Operation) -> bool,
    ) -> (u32, Vec<u64>) {
        let (mut count, mut not_retried) = (0, Vec::new());
        for index in 0..u32::try_from(self.slots.len()).unwrap_or(u32::MAX) {
            let slot = &self.slots[index as usize];
            if slot.path != path {
                continue;
            }
            if !is_permitted(slot.request.operation) {
                self.end_probe(index);
                continue;
            }
            let loss_verdict = self.loss_verdict(loss, index.into(), command_timeout);
            let slot = &mut self.slots[index as usize];
            slot.attempt = slot.attempt.wrapping_add(1);
            count += 1;
            if !self.requeue_after_loss(index.into(), loss_verdict) {
                not_retried.push(index.into());
            }
        }
        (count, not_retried)
    }

    /// The slot of the next retry.
    pub(crate) fn first_retry(&self) -> Option<u64> {
        self.retries.front().map(|index| u64::from(*index))
    }

    /// Whether the effect of the request in `slot` may be in a volatile cache.
    #[inline]
    pub(crate) fn may_be_unflushed(&self, slot: u64) -> bool {
        let Request { operation, flags, .. } = self.slots[slot_index_of(slot) as usize].request;
        modifies_blocks(operation) && !flags.has(RequestFlags::FUA)
    }

    /// Whether there are retries.
    pub(crate) fn has_retries(&self) -> bool {
        !self.retries.is_empty()
    }
}

/// Whether a completed operation may be in a volatile cache.
#[inline]
const fn modifies_blocks(operation: Operation) -> bool {
    !matches!(
        operation,
        Operation::Read | Operation::Flush | Operation::Verify | Operation::Compare
    )
}

/// Whether a request has the same effect if it is executed again, possibly after a partial execution.
fn is_repeatable(request: &Request) -> bool {
    match request.operation {
        // The first execution may have overwritten the source of the second.
        Operation::Copy => request.lba.abs_diff(request.operand) >= u64::from(request.blocks),
        Operation::CompareAndWrite => false,
        _ => true,
    }
}

/// The token of a slot's request on its path.
#[inline]
fn token_of(index: u32, attempt: u16) -> u64 {
    u64::from(index) | u64::from(attempt) << ATTEMPT_SHIFT
}

#[expect(clippy::cast_possible_truncation, reason = "the tokens are our own")]
#[inline]
const fn slot_index_of(slot: u64) -> u32 {
    slot as u32
}

#[expect(clippy::cast_possible_truncation, reason = "ticks wrap after a century")]
#[inline]
const fn tick_of(now: Instant) -> u32 {
    (now.ns >> TICK_BITS) as u32
}

#[cfg(test)]
mod tests;
