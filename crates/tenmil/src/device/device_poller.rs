//! Poller that connects the slots of a device with its I/O channel.

use std::sync::Arc;
use std::task::Waker;

use tenmil_base::{
    CompletionBatch, Instant, IoChannel, IoCompletion, IoStatus, Request, Segment, Span,
};
use tenmil_linux::Receiver;
use tenmil_reactor::{Context, DetachReason, MeanLatency, PollResult, Poller};

use super::CloseNotifier;
use super::buffer::Buffer;
use super::error::IoErrorKind;
use super::operation_slots::{CLOSE_TOKEN, OperationSlot, SharedDeviceState, SlotState};

/// Moves requests from the mailbox to the I/O channel, and completions back to the futures.
pub(super) struct DevicePoller {
    shared: Arc<SharedDeviceState>,
    backend: Box<dyn IoChannel>,
    incoming: Receiver<u32>,
    /// Index received last whose slot was locked.
    stuck: Option<u32>,
    /// Requests that the I/O channel has not accepted yet, in order.
    requests: Vec<Request>,
    /// Indexed by slot.
    segments: Box<[Segment]>,
    completions: CompletionBatch,
    /// Completions whose slots were locked.
    undelivered: Vec<IoCompletion>,
    /// Empty slots that could not be freed because the wait queue was locked.
    empty: Vec<u32>,
    in_flight: usize,
    latency: MeanLatency,
    /// Set while requests are handed to the I/O channel. Still set after a panic in there: which
    /// requests it has accepted is then unknown.
    is_submitting: bool,
    is_closing: bool,
    /// The last handle was dropped.
    is_let_go: bool,
    /// Dropped after the I/O channel.
    _closed: Arc<CloseNotifier>,
}

/// Maximum number of requests received, and of completions reaped, per iteration.
const BATCH: usize = 64;

impl DevicePoller {
    pub(super) fn new(
        shared: Arc<SharedDeviceState>,
        backend: Box<dyn IoChannel>,
        incoming: Receiver<u32>,
        closed: Arc<CloseNotifier>,
    ) -> Self {
        let count = shared.slot_count();
        Self {
            shared,
            backend,
            incoming,
            stuck: None,
            requests: Vec::with_capacity(count),
            segments: vec![Segment::default(); count].into(),
            completions: CompletionBatch::with_capacity(BATCH),
            undelivered: Vec::with_capacity(count),
            empty: Vec::with_capacity(count),
            in_flight: 0,
            latency: MeanLatency::default(),
            is_submitting: false,
            is_closing: false,
            is_let_go: false,
            _closed: closed,
        }
    }

    /// Receives requests from the mailbox. Returns their number.
    fn receive(&mut self) -> usize {
        let mut count = 0;
        while count < BATCH
            && let Some(index) = self.stuck.take().or_else(|| self.incoming.receive())
        {
            if index == CLOSE_TOKEN {
                self.is_let_go = true;
            } else if !self.receive_one(index) {
                self.stuck = Some(index);
                break;
            }
            count += 1;
        }
        count
    }

    /// Receives the request in one slot. Returns false if the slot is locked.
    fn receive_one(&mut self, index: u32) -> bool {
        let Some(mut place) = self.shared.try_lock_slot(index) else { return false };
        let Some(order) = place.order.as_ref().filter(|_| !place.is_unwanted) else {
            let emptied = std::mem::take(&mut *place);
            drop(place);
            drop(emptied);
            self.empty.push(index);
            return true;
        };
        if let Some(buffer) = &order.buffer {
            self.segments[index as usize] = buffer.segment();
        }
        self.requests.push(order.block_request(index));
        place.stage = SlotState::Submitted;
        true
    }

    /// Submits as many requests as the I/O channel accepts. Returns their number.
    fn submit(&mut self, now: Instant) -> usize {
        if self.requests.is_empty() {
            return 0;
        }
        self.is_submitting = true;
        let taken = self.backend.submit(now, &self.requests, &self.segments);
        self.is_submitting = false;
        self.requests.drain(..taken);
        self.in_flight += taken;
        taken
    }

    /// Polls the I/O channel and delivers completions. Returns their number.
    fn deliver_completions(&mut self, now: Instant) -> usize {
        if self.in_flight == 0 {
            return 0;
        }
        let count = self.backend.poll(now, &mut self.completions);
        let Self { shared, completions, undelivered, empty, in_flight, .. } = self;
        self.latency.record_completions(count);
        for completion in completions.drain() {
            *in_flight = in_flight.checked_sub(1).expect("one completion for each request");
            if !deliver_completion(shared, completion, empty) {
                undelivered.push(completion);
            }
        }
        count
    }

    /// Retries what a lock held by another thread prevented.
    fn retry_deferred(&mut self) {
        let Self { shared, undelivered, empty, .. } = self;
        undelivered.retain(|completion| !deliver_completion(shared, *completion, empty));
        while let Some(index) = empty.last().copied() {
            let Some(mut line) = shared.try_lock_wait_queue() else { return };
            let next = line.release_slot(index);
            drop(line);
            empty.pop();
            if let Some(next) = next {
                next.wake();
            }
        }
    }

    /// Whether work is left that only another iteration can finish.
    fn has_deferred_work(&self) -> bool {
        let waits_for_lock =
            self.stuck.is_some() || !self.undelivered.is_empty() || !self.empty.is_empty();
        // An I/O channel that rejects requests while it has none in flight announces nothing,
        // unless it reports a time at which to retry.
        let refuses = !self.requests.is_empty()
            && self.in_flight == 0
            && self.backend.wake_at() == Instant::NEVER;
        waits_for_lock || !self.incoming.is_empty() || refuses
    }

    /// Whether all work is done and no handle is left that could bring more.
    fn is_finished(&self) -> bool {
        let has_nothing = self.in_flight == 0 && self.requests.is_empty();
        self.is_let_go && has_nothing && self.undelivered.is_empty() && self.empty.is_empty()
    }
}

/// Delivers a completion to its slot. Returns false if the slot is locked.
fn deliver_completion(
    shared: &SharedDeviceState,
    completion: IoCompletion,
    empty: &mut Vec<u32>,
) -> bool {
    let index = slot_of(&completion);
    let Some(mut place) = shared.try_lock_slot(index) else { return false };
    assert_eq!(place.stage, SlotState::Submitted, "request {index} was completed");
    if place.is_unwanted {
        let emptied = std::mem::take(&mut *place);
        drop(place);
        drop(emptied);
        empty.push(index);
        return true;
    }
    place.stage = slot_state_of(completion.status);
    let waker = place.waker.take();
    drop(place);
    if let Some(waker) = waker {
        waker.wake();
    }
    true
}

fn slot_of(completion: &IoCompletion) -> u32 {
    u32::try_from(completion.token).expect("tokens are numbers of places")
}

fn slot_state_of(status: IoStatus) -> SlotState {
    SlotState::Completed(if status.is_success() {
        Ok(())
    } else {
        Err(IoErrorKind::Status(status))
    })
}

impl Poller for DevicePoller {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        let now = context.now();
        self.latency.account_in_flight(now, self.in_flight);
        let mut count = if self.is_closing { 0 } else { self.receive() + self.submit(now) };
        count += self.deliver_completions(now);
        if !(self.undelivered.is_empty() && self.empty.is_empty()) {
            self.retry_deferred();
            count += 1;
        }
        if self.is_finished()
            && let Some(me) = context.current_poller()
        {
            context.remove_poller(me);
            count += 1;
        }
        PollResult::from_count(count)
    }

    fn flush(&mut self) {
        self.backend.flush_submissions();
    }

    fn arm(&mut self) -> PollResult {
        // Armed in any case: an event left pending from earlier would end every sleep at once.
        let has_answer = self.backend.arm();
        let stays_awake = self.has_deferred_work() || (self.in_flight > 0 && has_answer);
        PollResult::from_count(usize::from(stays_awake))
    }

    fn disarm(&mut self) {
        self.backend.disarm();
    }

    fn wake_at(&self) -> Instant {
        let is_waiting = self.in_flight > 0 || !self.requests.is_empty();
        if is_waiting { self.backend.wake_at() } else { Instant::NEVER }
    }

    fn is_busy(&self) -> Option<bool> {
        Some(self.in_flight > 0)
    }

    fn expected_latency(&self) -> Option<Span> {
        self.latency.mean_latency().filter(|_| self.in_flight > 0)
    }

    fn can_spin_help(&self) -> bool {
        !self.latency.is_long()
    }

    /// Detaches once the device accesses none of this device's buffers any more.
    fn try_detach(&mut self, _: DetachReason) -> bool {
        self.is_closing = true;
        self.in_flight == 0
    }

    fn attach(&mut self) {
        self.is_closing = false;
    }
}

impl Drop for DevicePoller {
    /// Completes all waiting futures with an error. Buffers that the device may still access are
    /// leaked.
    fn drop(&mut self) {
        let Self { shared, requests, undelivered, is_submitting, .. } = self;
        shared.set_removed();
        let waiting = shared.lock_wait_queue().close_queue();
        for completion in undelivered.drain(..) {
            shared.lock_slot(slot_of(&completion)).stage = slot_state_of(completion.status);
        }
        for index in (0..).take(shared.slot_count()) {
            let mut place = shared.lock_slot(index);
            let was_taken =
                *is_submitting || !requests.iter().any(|request| request.token == u64::from(index));
            place.fail_removed(was_taken);
            let emptied = if place.is_unwanted {
                std::mem::take(&mut *place)
            } else {
                OperationSlot::default()
            };
            let waker = place.waker.take();
            drop(place);
            drop(emptied);
            if let Some(waker) = waker {
                waker.wake();
            }
        }
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl OperationSlot {
    /// Fails the operation because the device was removed. The buffer is leaked if the I/O channel had
    /// accepted the request, since the device may still access it.
    fn fail_removed(&mut self, was_taken: bool) {
        if !matches!(self.stage, SlotState::Sent | SlotState::Submitted) {
            return;
        }
        let buffer = self.order.as_mut().and_then(|order| order.buffer.take());
        if self.stage == SlotState::Submitted && was_taken {
            buffer.into_iter().for_each(Buffer::leak_memory);
        } else if let Some(order) = &mut self.order {
            order.buffer = buffer;
        }
        self.stage = SlotState::Completed(Err(IoErrorKind::DeviceRemoved));
    }
}
