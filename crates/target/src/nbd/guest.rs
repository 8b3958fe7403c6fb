//! A connection that is served: a poller between a socket and a backend.

use std::io;
use std::sync::Arc;

use base::{Answers, Backend, Instant, Span, WakeSource};
use dma::Regions;
use host::stream::{Received, Stream};
use host::watch::{Interest, Watch};
use reactor::{Context, Found, Poller, WokenBy};

use super::connection::Connection;
use super::export::Export;
use super::server::Loan;
use super::survey::Survey;

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
    /// Until when the client has to choose an export, or to take its last answers.
    deadline: Instant,
    is_ending: bool,
    /// Kept until everything else is gone.
    loan: Loan,
}

/// How often one looks whether there is something to receive. A look is a system call, and where
/// many connections share a reactor, those that are silent must not slow those that are not.
#[derive(Debug, Default)]
struct Looks {
    /// In vain, since something was there.
    in_vain: u32,
    next: Instant,
}

/// Answers that are taken from the backend at once.
const BATCH: usize = 256;
/// How long a client may take to choose an export.
const HAGGLING_MAX: Span = Span::from_secs(30);
/// How long a client may take to receive its last answers.
const ENDING_MAX: Span = Span::from_secs(2);
/// Looks in vain until they become seldom.
const LOOKS: u32 = 64;
/// How seldom.
const SELDOM: Span = Span::from_us(20);

const SOCKET: u64 = 0;
const BACKEND: u64 = 1;
const READABLE: Interest = Interest { readable: true, writable: false };

/// What a guest is made of.
pub(super) struct GuestParts {
    pub(super) stream: Stream,
    pub(super) backend: Box<dyn Backend>,
    pub(super) export: Arc<Export>,
    pub(super) regions: Regions,
    pub(super) survey: Survey,
    pub(super) loan: Loan,
    pub(super) now: Instant,
}

impl Guest {
    pub(super) fn new(parts: GuestParts) -> io::Result<Self> {
        let GuestParts { stream, backend, export, regions, survey, loan, now } = parts;
        let watch = Watch::new()?;
        watch.add(&stream, SOCKET, READABLE)?;
        if let WakeSource::Descriptor(descriptor) = backend.wake_source() {
            watch.add(descriptor, BACKEND, READABLE)?;
        }
        Ok(Self {
            backend,
            stream,
            connection: Connection::new(export, regions, loan.memory()),
            answers: Answers::with_capacity(BATCH),
            survey,
            watch,
            interest: READABLE,
            is_blocked: false,
            looks: Looks::default(),
            deadline: now.after(HAGGLING_MAX),
            is_ending: false,
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
        if !self.looks.is_due(now) {
            return 0;
        }
        let into = self.connection.receive_into();
        if into.is_empty() {
            return 0;
        }
        match self.stream.receive(into) {
            Ok(Received::Bytes(count)) => {
                self.looks.in_vain = 0;
                self.connection.received(count);
                1
            }
            Ok(Received::Nothing) => {
                self.looks.was_in_vain(now);
                0
            }
            Ok(Received::End) => {
                self.connection.receive_end();
                1
            }
            Err(_) => {
                self.connection.broken();
                1
            }
        }
    }

    #[inline]
    fn submit(&mut self, now: Instant) -> usize {
        let (requests, segments) = self.connection.requests();
        if requests.is_empty() {
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
            for (slot, extents) in self.survey.take() {
                self.connection.surveyed(slot, &extents);
                count += 1;
            }
        }
        count
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
                self.connection.sent(count);
                self.is_blocked = !self.connection.to_send().is_empty();
            }
            Err(_) => self.connection.broken(),
        }
    }

    /// Sees to it that no wait is for ever, and that an end is one.
    fn look_after_the_end(&mut self, context: &mut Context<'_>) -> usize {
        let now = context.now();
        if !self.is_ending && self.connection.is_ending() {
            self.is_ending = true;
            self.deadline = now.after(ENDING_MAX);
        } else if !self.is_ending && !self.connection.is_haggling() {
            self.deadline = Instant::NEVER;
        }
        if now >= self.deadline {
            self.connection.broken();
        }
        if self.connection.is_over() {
            context.end();
            return 1;
        }
        0
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

    /// Whether only further turns bring it on.
    fn is_behind(&self) -> bool {
        // A backend that refuses although it has nothing in flight announces nothing.
        let refuses = !self.connection.requests().0.is_empty() && self.connection.in_flight() == 0;
        self.connection.can_step() || self.has_unsent() || refuses || self.survey.has_answers()
    }
}

impl Looks {
    #[inline]
    fn is_due(&self, now: Instant) -> bool {
        self.in_vain < LOOKS || now >= self.next
    }

    #[inline]
    fn was_in_vain(&mut self, now: Instant) {
        self.in_vain = self.in_vain.saturating_add(1);
        self.next = now.after(SELDOM);
    }
}

impl Poller for Guest {
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        let now = context.now();
        if self.is_blocked && self.looks.is_due(now) {
            self.send();
        }
        let mut count = self.receive(now);
        count += self.connection.step();
        count += self.submit(now);
        count += self.answer(now);
        count += self.find_out(context);
        count += self.look_after_the_end(context);
        // What is there to be sent is sent by the flush at the end of a turn that found work.
        count += usize::from(self.has_unsent());
        Found::from_count(count)
    }

    fn flush(&mut self) {
        self.backend.flush();
        self.send();
    }

    fn arm(&mut self) -> Found {
        // In any case: an old signal, which nobody has taken away, would end every sleep at once.
        let has_answer = self.backend.arm();
        let wanted = self.wanted();
        if wanted != self.interest {
            self.interest = wanted;
            if self.watch.change(&self.stream, SOCKET, wanted).is_err() {
                self.connection.broken();
                return Found::Work;
            }
        }
        let stays_awake = self.is_behind() || (self.connection.in_flight() > 0 && has_answer);
        Found::from_count(usize::from(stays_awake))
    }

    fn disarm(&mut self) {
        self.backend.disarm();
        // Something has come, perhaps for us.
        self.looks = Looks::default();
    }

    fn wake_at(&self) -> Instant {
        let backend = self.connection.in_flight() > 0;
        let backend = if backend { self.backend.wake_at() } else { Instant::NEVER };
        self.deadline.min(backend)
    }

    /// Lets go when the backend has nothing of its memory any more, and what was answered has been
    /// sent or cannot be.
    fn detach(&mut self) -> bool {
        self.connection.receive_end();
        self.connection.in_flight() == 0
            && (self.connection.is_over()
                || self.is_blocked
                || self.connection.to_send().is_empty())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if self.connection.in_flight() > 0 {
            // Somebody may still touch it: it is nobody's from now on.
            self.loan.lose();
        }
    }
}
