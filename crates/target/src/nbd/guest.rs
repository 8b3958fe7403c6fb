//! A connection that is served: a poller between a socket and a backend.

#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;

use base::{Answers, Backend, Instant, Span, WakeSource};
use dma::Regions;
use host::stream::{Received, Stream};
use host::watch::{Interest, Watch};
use reactor::{Context, Found, MeanLatency, Parting, Poller, WokenBy};

use super::connection::{Connection, Left};
use super::pool::Pool;
use super::progress::Progress;
use super::seat::{ConnectionPhase, News, Order, Reason, Seat};
use super::served::Served;
use super::server::Loan;
use super::survey::{Answer, Survey};
use crate::looks::Looks;

/// Whoever has connected. It ends the light thread that it lives on when the connection is over.
pub(super) struct Guest {
    /// Goes first: it waits until nobody touches the memory any more.
    backend: Box<dyn Backend>,
    stream: Stream,
    connection: Connection,
    answers: Answers,
    survey: Survey,
    watch: Watch,
    /// What the watch looks for on the socket.
    interest: Interest,
    /// What was sent last did not go out whole.
    is_blocked: bool,
    looks: Looks,
    /// Of the backend.
    latency: MeanLatency,
    /// Until when the client has to choose an export, to ask for something, or to take its last answers.
    deadline: Instant,
    /// How long it may ask for nothing, if not for ever, and when something was done for it last.
    idle_max: Option<Span>,
    active_at: Instant,
    is_ending: bool,
    /// Nothing is begun before its thread has come to where it goes.
    is_travelling: bool,
    /// What it sends of a request that it has begun.
    sending: Progress,
    /// What it takes of replies that the socket has no room for.
    receiving: Progress,
    /// When it asks again for memory that others have.
    again_at: Instant,
    /// When it goes because the device has.
    leave_at: Instant,
    /// Why it ends, as far as that is known here.
    reason: Option<Reason>,
    seat: Arc<Seat>,
    served: Arc<Served>,
    /// Kept until everything else is gone.
    loan: Loan,
}

/// Answers that are taken from the backend at once.
const BATCH: usize = 256;
/// How long a client may take to choose an export.
const HAGGLING_MAX: Span = Span::from_secs(30);
/// How long a client may take to receive its last answers.
const ENDING_MAX: Span = Span::from_secs(2);
/// How long a client may go on asking a device that has gone.
const REMOVED_MAX: Span = Span::from_ms(500);
/// How long it waits for memory that other connections have before it asks again.
const AGAIN_AFTER: Span = Span::from_ms(1);
const SOCKET: u64 = 0;
const BACKEND: u64 = 1;
const READABLE: Interest = Interest { readable: true, writable: false };

/// What a guest is made of.
pub(super) struct GuestParts {
    pub(super) stream: Stream,
    pub(super) backend: Box<dyn Backend>,
    pub(super) served: Arc<Served>,
    pub(super) seat: Arc<Seat>,
    pub(super) regions: Regions,
    pub(super) survey: Survey,
    pub(super) loan: Loan,
    pub(super) pool: Arc<Pool>,
    pub(super) idle_max: Option<Span>,
    pub(super) now: Instant,
}

impl Guest {
    pub(super) fn new(parts: GuestParts) -> io::Result<Self> {
        let GuestParts { stream, backend, served, seat, regions, survey, loan, .. } = parts;
        let GuestParts { pool, idle_max, now, .. } = parts;
        let watch = Watch::new()?;
        watch.add(&stream, SOCKET, READABLE)?;
        if let WakeSource::Descriptor(descriptor) = backend.wake_source() {
            watch.add(descriptor, BACKEND, READABLE)?;
        }
        let export = Arc::clone(served.export());
        let connection = Connection::new(export, regions, loan.memory(), pool);
        Ok(Self {
            backend,
            stream,
            connection,
            answers: Answers::with_capacity(BATCH),
            survey,
            watch,
            interest: READABLE,
            is_blocked: false,
            looks: Looks::default(),
            latency: MeanLatency::default(),
            deadline: now.after(HAGGLING_MAX),
            idle_max,
            active_at: now,
            is_ending: false,
            is_travelling: false,
            sending: Progress::NOTHING,
            receiving: Progress::NOTHING,
            again_at: Instant::NEVER,
            leave_at: Instant::NEVER,
            reason: None,
            seat,
            served,
            loan,
        })
    }

    /// What wakes it: its socket and its backend. While a backend that wakes nobody owes an answer,
    /// [`arm`](Poller::arm) keeps the reactor awake.
    pub(super) fn woken_by(&self) -> io::Result<WokenBy> {
        WokenBy::of(WakeSource::Descriptor(std::os::fd::AsFd::as_fd(&self.watch)))
    }

    #[inline]
    fn receive(&mut self, now: Instant) -> usize {
        if self.is_travelling || !self.looks.is_due(now) {
            return 0;
        }
        let into = self.connection.receive_into();
        if into.is_empty() {
            return 0;
        }
        match self.stream.receive(into) {
            Ok(Received::Bytes(count)) => {
                self.seat.received(false);
                self.sending.moved(count);
                self.connection.received(count);
                1
            }
            Ok(Received::Nothing) => {
                self.seat.received(true);
                self.looks.was_in_vain(now);
                0
            }
            Ok(Received::End) => {
                self.end_for(Reason::Closed);
                self.connection.receive_end();
                1
            }
            Err(error) => {
                self.end_for(Reason::Broken(error.to_string()));
                self.connection.broken();
                1
            }
        }
    }

    /// Notes why it ends. The first reason is the one.
    fn end_for(&mut self, reason: Reason) {
        self.reason.get_or_insert(reason);
    }

    #[inline]
    fn submit(&mut self, now: Instant) -> usize {
        let (requests, segments) = self.connection.requests();
        if requests.is_empty() || self.is_travelling {
            return 0;
        }
        let taken = self.backend.submit(now, requests, segments);
        self.connection.taken(taken);
        taken
    }

    #[inline]
    fn answer(&mut self, now: Instant) -> usize {
        if self.connection.in_flight() == 0 {
            return 0;
        }
        let count = self.backend.poll(now, &mut self.answers);
        self.latency.end(count);
        for answer in self.answers.drain() {
            self.connection.answer(answer);
        }
        count
    }

    fn find_out(&mut self, context: &Context<'_>) -> usize {
        let mut count = 0;
        while let Some(question) = self.connection.next_question() {
            self.survey.ask(question, context.handle());
            count += 1;
        }
        if self.survey.has_answers() {
            for (slot, answer) in self.survey.take() {
                self.pass_on(slot, answer);
                count += 1;
            }
        }
        count
    }

    fn pass_on(&mut self, slot: u16, answer: Answer) {
        match answer {
            Answer::Extents(extents) => self.connection.surveyed(slot, &extents),
            Answer::Size(done) => {
                let done = done.map_err(|(error, text)| {
                    self.seat.tell(News::Trouble(text));
                    error
                });
                self.connection.resized(slot, done);
            }
        }
    }

    /// Sends all there is, in one call.
    #[inline]
    fn send(&mut self) {
        let segments = self.connection.to_send();
        if segments.is_empty() {
            return;
        }
        match self.stream.send(segments) {
            Ok(count) => {
                self.seat.sent();
                self.receiving.moved(count);
                self.connection.sent(count);
                self.is_blocked = !self.connection.to_send().is_empty();
            }
            Err(error) => {
                self.end_for(Reason::Broken(error.to_string()));
                self.connection.broken();
            }
        }
    }

    /// Does what somebody has ordered. Whoever asks a device that has gone is told so for a while,
    /// which is how a server says that it wants to end ("Terminating the transmission phase").
    #[cold]
    fn obey(&mut self, order: Order, now: Instant) {
        match order {
            Order::Leave => {
                self.end_for(Reason::Told);
                self.connection.receive_end();
            }
            Order::DeviceRemoved if self.connection.is_haggling() => {
                self.end_for(Reason::DeviceRemoved);
                self.connection.receive_end();
            }
            Order::DeviceRemoved => {
                self.end_for(Reason::DeviceRemoved);
                if self.leave_at == Instant::NEVER {
                    self.leave_at = now.after(REMOVED_MAX);
                } else if now >= self.leave_at {
                    self.connection.receive_end();
                }
            }
        }
    }

    /// Why it has ended, once it has.
    fn reason(&mut self) -> Reason {
        let of_client = self.connection.left().map(|left| match left {
            Left::Said => Reason::Said,
            Left::NothingChosen => Reason::NothingChosen,
            Left::Nonsense => Reason::Nonsense,
        });
        self.reason.take().or(of_client).unwrap_or(Reason::ServerEnds)
    }

    /// Shows what it has done.
    #[inline]
    fn show(&self) {
        let phase = if self.connection.is_ending() {
            ConnectionPhase::Ending
        } else if self.connection.is_haggling() {
            ConnectionPhase::Handshake
        } else {
            ConnectionPhase::Transmission
        };
        self.seat.show(phase, &self.connection.done(), self.connection.under_way() as u64);
    }

    /// Sees to it that no wait is for ever, and that an end is one.
    fn look_after_the_end(&mut self, now: Instant) {
        if !self.is_ending && self.connection.is_ending() {
            self.is_ending = true;
            self.deadline = now.after(ENDING_MAX);
        } else if !self.is_ending && !self.connection.is_haggling() {
            let is_idle = self.connection.under_way() == 0 && !self.is_blocked;
            let idle_max = self.idle_max.filter(|_| is_idle);
            self.deadline = idle_max.map_or(Instant::NEVER, |most| self.active_at.after(most));
        }
        if self.is_ending && self.owes() {
            // The client takes its time from the last answer on, however long that took.
            self.deadline = now.after(ENDING_MAX);
            // Nobody hears how its writes end: what is written after them waits until they have.
            self.backend.fence_writes();
        }
        let is_slow = self.sending.is_too_slow(now, self.connection.awaited())
            | self.receiving.is_too_slow(now, self.is_blocked.then_some(0));
        if now >= self.deadline || is_slow {
            let is_idle = !self.is_ending && !self.connection.is_haggling() && !is_slow;
            self.end_for(if is_idle { Reason::Idle } else { Reason::TooSlow });
            self.connection.broken();
        }
    }

    /// Asks again for memory that other connections had.
    #[inline]
    fn try_again(&mut self, now: Instant) {
        if !self.connection.waits_for_memory() {
            self.again_at = Instant::NEVER;
        } else if now >= self.again_at {
            self.connection.try_again();
            self.again_at = now.after(AGAIN_AFTER);
        } else if self.again_at == Instant::NEVER {
            self.again_at = now.after(AGAIN_AFTER);
        }
    }

    fn wanted(&mut self) -> Interest {
        Interest {
            readable: !self.connection.receive_into().is_empty(),
            writable: self.is_blocked && !self.connection.to_send().is_empty(),
        }
    }

    /// Whether there is something to be sent that was not tried yet.
    #[inline]
    fn has_unsent(&self) -> bool {
        !self.is_blocked && !self.connection.to_send().is_empty()
    }

    /// Whether the device has not answered all that the client has asked.
    fn owes(&self) -> bool {
        self.wants_room() || self.connection.in_flight() > 0
    }

    /// Whether the backend has not taken all it was asked for.
    fn wants_room(&self) -> bool {
        !self.connection.requests().0.is_empty()
    }

    /// Whether only further turns bring it on.
    fn is_behind(&self) -> bool {
        // A backend that refuses although it has nothing in flight announces nothing, unless it says
        // when to try again.
        let refuses = self.wants_room()
            && self.connection.in_flight() == 0
            && self.backend.wake_at() == Instant::NEVER;
        self.connection.can_step() || self.has_unsent() || refuses || self.survey.has_answers()
    }
}

impl Guest {
    /// What client and backend have for it. How much that was.
    #[inline]
    fn work(&mut self, now: Instant) -> usize {
        self.latency.pass(now, self.connection.in_flight());
        if let Some(order) = self.seat.ordered() {
            self.obey(order, now);
        }
        if self.is_blocked && self.looks.is_due(now) {
            self.send();
        }
        self.try_again(now);
        let before = self.connection.under_way();
        let received = self.receive(now);
        let mut count = received + self.connection.step();
        if received > 0 {
            self.looks.found_requests(now, self.connection.under_way().saturating_sub(before));
        }
        count += self.submit(now);
        count += self.answer(now);
        if count > 0 {
            self.active_at = now;
        }
        count
    }
}

impl Poller for Guest {
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        let now = context.now();
        let mut count = self.work(now) + self.find_out(context);
        self.look_after_the_end(now);
        if self.connection.is_over() {
            context.end();
            count += 1;
        }
        // What is there to be sent is sent by the flush at the end of a turn that found work.
        count += usize::from(self.has_unsent());
        Found::from_count(count)
    }

    fn flush(&mut self) {
        self.backend.flush();
        self.send();
        self.show();
    }

    fn arm(&mut self) -> Found {
        // In any case: an old signal, which nobody has taken away, would end every sleep at once.
        let has_answer = self.backend.arm();
        self.connection.release();
        let wanted = self.wanted();
        if wanted != self.interest {
            self.interest = wanted;
            if let Err(error) = self.watch.change(&self.stream, SOCKET, wanted) {
                self.end_for(Reason::Broken(error.to_string()));
                self.connection.broken();
                return Found::Work;
            }
        }
        let is_told = self.seat.ordered().is_some() && self.reason.is_none();
        let stays_awake =
            is_told || self.is_behind() || (self.connection.in_flight() > 0 && has_answer);
        Found::from_count(usize::from(stays_awake))
    }

    fn disarm(&mut self) {
        self.backend.disarm();
        // Something has come, perhaps for us.
        self.looks.now();
    }

    fn wake_at(&self) -> Instant {
        let backend = self.connection.in_flight() > 0 || self.wants_room();
        let backend = if backend { self.backend.wake_at() } else { Instant::NEVER };
        let client = self.sending.until().min(self.receiving.until()).min(self.again_at);
        self.deadline.min(self.leave_at).min(client).min(backend)
    }

    fn expected_latency(&self) -> Option<Span> {
        self.latency.mean().filter(|_| self.connection.in_flight() > 0)
    }

    /// Lets go when the backend has nothing of its memory any more; for ever, when what was answered
    /// has been sent as well, or cannot be.
    fn detach(&mut self, parting: Parting) -> bool {
        self.is_travelling = parting == Parting::Moves;
        let has_drained = self.connection.in_flight() == 0;
        if self.is_travelling {
            return has_drained;
        }
        self.connection.receive_end();
        has_drained
            && (self.connection.is_over()
                || self.is_blocked
                || self.connection.to_send().is_empty())
    }

    fn attach(&mut self) {
        self.is_travelling = false;
        // Something may have come on the way.
        self.looks.now();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.show();
        self.served.leave(self.seat.id());
        let reason = self.reason();
        self.seat.has_gone(reason);
        if self.connection.in_flight() > 0 {
            // Somebody may still touch it: it is nobody's from now on.
            self.loan.lose();
        }
    }
}
