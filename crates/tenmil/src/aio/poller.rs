//! The device's end: a poller around a backend.

use std::sync::Arc;
use std::task::Waker;

use base::{Answer, Answers, Backend, Instant, Outcome, Request, Segment, Span};
use host::Receiver;
use reactor::{Context, Found, MeanLatency, Parting, Poller};

use super::buffer::Buffer;
use super::device::Closed;
use super::place::{LET_GO, Place, Shared, Stage};
use super::refused::Why;

/// Takes operations from the mailbox to the backend, and answers to those who wait.
pub(super) struct DevicePoller {
    shared: Arc<Shared>,
    backend: Box<dyn Backend>,
    incoming: Receiver<u32>,
    /// The number that was received last, if its place could not be had.
    stuck: Option<u32>,
    /// What the backend has not taken yet, in order.
    requests: Vec<Request>,
    /// By place.
    segments: Box<[Segment]>,
    answers: Answers,
    /// Answers whose places could not be had.
    undelivered: Vec<Answer>,
    /// Empty places that could not be given back.
    empty: Vec<u32>,
    in_flight: usize,
    latency: MeanLatency,
    /// The backend is being given requests, or has panicked when it was: which of them it has taken
    /// is not known.
    is_submitting: bool,
    is_leaving: bool,
    /// Nobody has a handle any more.
    is_let_go: bool,
    /// Dropped after the backend.
    _closed: Arc<Closed>,
}

/// How many operations are taken from the mailbox in a turn, and answers from the backend.
const BATCH: usize = 64;

impl DevicePoller {
    pub(super) fn new(
        shared: Arc<Shared>,
        backend: Box<dyn Backend>,
        incoming: Receiver<u32>,
        closed: Arc<Closed>,
    ) -> Self {
        let count = shared.count();
        Self {
            shared,
            backend,
            incoming,
            stuck: None,
            requests: Vec::with_capacity(count),
            segments: vec![Segment::default(); count].into(),
            answers: Answers::with_capacity(BATCH),
            undelivered: Vec::with_capacity(count),
            empty: Vec::with_capacity(count),
            in_flight: 0,
            latency: MeanLatency::default(),
            is_submitting: false,
            is_leaving: false,
            is_let_go: false,
            _closed: closed,
        }
    }

    /// Takes operations in. Returns how many.
    fn receive(&mut self) -> usize {
        let mut count = 0;
        while count < BATCH
            && let Some(index) = self.stuck.take().or_else(|| self.incoming.receive())
        {
            if index == LET_GO {
                self.is_let_go = true;
            } else if !self.take_in(index) {
                self.stuck = Some(index);
                break;
            }
            count += 1;
        }
        count
    }

    /// Takes one in. False if its place could not be had.
    fn take_in(&mut self, index: u32) -> bool {
        let Some(mut place) = self.shared.try_place(index) else { return false };
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
        self.requests.push(order.request(index));
        place.stage = Stage::Submitted;
        true
    }

    /// Hands over what the backend has room for. Returns how many that were.
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

    /// Asks the backend for answers and hands them out. Returns how many there were.
    fn answer(&mut self, now: Instant) -> usize {
        if self.in_flight == 0 {
            return 0;
        }
        let count = self.backend.poll(now, &mut self.answers);
        let Self { shared, answers, undelivered, empty, in_flight, .. } = self;
        self.latency.end(count);
        for answer in answers.drain() {
            *in_flight = in_flight.checked_sub(1).expect("an answer for each request, and no more");
            if !deliver(shared, answer, empty) {
                undelivered.push(answer);
            }
        }
        count
    }

    /// Tries again what could not be done because somebody else had a lock.
    fn catch_up(&mut self) {
        let Self { shared, undelivered, empty, .. } = self;
        undelivered.retain(|answer| !deliver(shared, *answer, empty));
        while let Some(index) = empty.last().copied() {
            let Some(mut line) = shared.try_line() else { return };
            let next = line.give_back(index);
            drop(line);
            empty.pop();
            if let Some(next) = next {
                next.wake();
            }
        }
    }

    /// Whether there is something that only further turns can bring to an end.
    fn is_behind(&self) -> bool {
        let waits_for_lock =
            self.stuck.is_some() || !self.undelivered.is_empty() || !self.empty.is_empty();
        // A backend that refuses although it has nothing in flight announces nothing, unless it says
        // when to try again.
        let refuses = !self.requests.is_empty()
            && self.in_flight == 0
            && self.backend.wake_at() == Instant::NEVER;
        waits_for_lock || !self.incoming.is_empty() || refuses
    }

    /// Whether nothing is left to be done, and nobody can bring anything.
    fn is_over(&self) -> bool {
        let has_nothing = self.in_flight == 0 && self.requests.is_empty();
        self.is_let_go && has_nothing && self.undelivered.is_empty() && self.empty.is_empty()
    }
}

/// Brings an answer to its place. False if that could not be had.
fn deliver(shared: &Shared, answer: Answer, empty: &mut Vec<u32>) -> bool {
    let index = place_of(&answer);
    let Some(mut place) = shared.try_place(index) else { return false };
    assert_eq!(place.stage, Stage::Submitted, "place {index} was answered");
    if place.is_unwanted {
        let emptied = std::mem::take(&mut *place);
        drop(place);
        drop(emptied);
        empty.push(index);
        return true;
    }
    place.stage = answered(answer.outcome);
    let waker = place.waker.take();
    drop(place);
    if let Some(waker) = waker {
        waker.wake();
    }
    true
}

fn place_of(answer: &Answer) -> u32 {
    u32::try_from(answer.token).expect("tokens are numbers of places")
}

fn answered(outcome: Outcome) -> Stage {
    Stage::Answered(if outcome.is_success() { Ok(()) } else { Err(Why::Outcome(outcome)) })
}

impl Poller for DevicePoller {
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        let now = context.now();
        self.latency.pass(now, self.in_flight);
        let mut count = if self.is_leaving { 0 } else { self.receive() + self.submit(now) };
        count += self.answer(now);
        if !(self.undelivered.is_empty() && self.empty.is_empty()) {
            self.catch_up();
            count += 1;
        }
        if self.is_over()
            && let Some(me) = context.poller()
        {
            context.remove(me);
            count += 1;
        }
        Found::from_count(count)
    }

    fn flush(&mut self) {
        self.backend.flush();
    }

    fn arm(&mut self) -> Found {
        // In any case: an old signal, which nobody has taken away, would end every sleep at once.
        let has_answer = self.backend.arm();
        let stays_awake = self.is_behind() || (self.in_flight > 0 && has_answer);
        Found::from_count(usize::from(stays_awake))
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
        self.latency.mean().filter(|_| self.in_flight > 0)
    }

    /// Lets go when the device has nothing of its memory any more.
    fn detach(&mut self, _: Parting) -> bool {
        self.is_leaving = true;
        self.in_flight == 0
    }

    fn attach(&mut self) {
        self.is_leaving = false;
    }
}

impl Drop for DevicePoller {
    /// Tells everybody who waits. What the device may still touch is nobody's from now on.
    fn drop(&mut self) {
        let Self { shared, requests, undelivered, is_submitting, .. } = self;
        shared.set_gone();
        let waiting = shared.line().close();
        for answer in undelivered.drain(..) {
            shared.place(place_of(&answer)).stage = answered(answer.outcome);
        }
        for index in (0..).take(shared.count()) {
            let mut place = shared.place(index);
            let was_taken =
                *is_submitting || !requests.iter().any(|request| request.token == u64::from(index));
            place.cut_off(was_taken);
            let emptied =
                if place.is_unwanted { std::mem::take(&mut *place) } else { Place::default() };
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

impl Place {
    /// The device is gone. What it had taken and has not answered it may still touch.
    fn cut_off(&mut self, was_taken: bool) {
        if !matches!(self.stage, Stage::Sent | Stage::Submitted) {
            return;
        }
        let buffer = self.order.as_mut().and_then(|order| order.buffer.take());
        if self.stage == Stage::Submitted && was_taken {
            buffer.into_iter().for_each(Buffer::lose);
        } else if let Some(order) = &mut self.order {
            order.buffer = buffer;
        }
        self.stage = Stage::Answered(Err(Why::Gone));
    }
}
