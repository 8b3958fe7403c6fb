//! Served NBD connection: a poller between a socket and an I/O channel.

#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;

use tenmil_base::{CompletionBatch, Instant, IoChannel, Span, WakeSource};
use tenmil_dma::RegionTable;
use tenmil_linux::poll_set::{Interest, PollSet};
use tenmil_linux::stream::{RecvResult, Stream};
use tenmil_reactor::{Context, DetachReason, MeanLatency, PollResult, Poller, PollerWake};

use super::connection::{ClientClose, Connection};
use super::exported_device::ExportedDevice;
use super::pool::Pool;
use super::progress::Progress;
use super::server::MemoryLease;
use super::session_handle::{
    ConnectionPhase, DisconnectReason, NbdEvent, SessionCommand, SessionHandle,
};
use super::slow_query::{SlowQueries, SurveyResult};
use crate::recv_backoff::RecvBackoff;

/// Session of a client. It ends its light thread when the connection is closed.
pub(super) struct Session {
    /// First field, so it is dropped first: the drop waits until the device no longer accesses the
    /// memory.
    backend: Box<dyn IoChannel>,
    stream: Stream,
    connection: Connection,
    results: CompletionBatch,
    survey: SlowQueries,
    watch: PollSet,
    /// Readiness that the epoll set currently waits for on the socket.
    interest: Interest,
    /// Whether the last send was partial.
    is_blocked: bool,
    looks: RecvBackoff,
    /// Mean latency of the I/O channel.
    latency: MeanLatency,
    /// Deadline for selecting an export, to ask for something, or for receiving the last replies.
    deadline: Instant,
    /// How long it may ask for nothing, if not for ever, and when something was done for it last.
    idle_max: Option<Span>,
    active_at: Instant,
    is_ending: bool,
    /// Whether the light thread is migrating to another reactor. Nothing is started until it has arrived.
    is_travelling: bool,
    /// Progress of the request that the client is sending.
    sending: Progress,
    /// Progress of the replies that the socket buffer has no space for.
    receiving: Progress,
    /// When memory that other connections hold is requested again.
    again_at: Instant,
    /// When the session ends because its device was removed.
    leave_at: Instant,
    /// Why the session ends, as far as the cause is on this side.
    reason: Option<DisconnectReason>,
    session: Arc<SessionHandle>,
    served: Arc<ExportedDevice>,
    /// Last field: the memory outlives everything else.
    loan: MemoryLease,
}

/// Largest number of completions polled at once.
const BATCH: usize = 256;
/// Time that a client has to select an export.
const NEGOTIATION_TIMEOUT: Span = Span::from_secs(30);
/// Time that a client has to receive the last replies.
const CLOSE_TIMEOUT: Span = Span::from_secs(2);
/// Time during which requests to a removed device still get an error reply.
const REMOVED_GRACE: Span = Span::from_ms(500);
/// Interval between attempts to lease memory that other connections hold.
const AGAIN_AFTER: Span = Span::from_ms(1);
const SOCKET: u64 = 0;
const BACKEND: u64 = 1;
const READABLE: Interest = Interest { readable: true, writable: false };

/// Constructor arguments of a [`Session`].
pub(super) struct SessionParts {
    pub(super) stream: Stream,
    pub(super) backend: Box<dyn IoChannel>,
    pub(super) served: Arc<ExportedDevice>,
    pub(super) session: Arc<SessionHandle>,
    pub(super) regions: RegionTable,
    pub(super) survey: SlowQueries,
    pub(super) loan: MemoryLease,
    pub(super) pool: Arc<Pool>,
    pub(super) idle_max: Option<Span>,
    pub(super) now: Instant,
}

impl Session {
    pub(super) fn new(parts: SessionParts) -> io::Result<Self> {
        let SessionParts { stream, backend, served, session, regions, survey, loan, .. } = parts;
        let SessionParts { pool, idle_max, now, .. } = parts;
        let watch = PollSet::new()?;
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
            results: CompletionBatch::with_capacity(BATCH),
            survey,
            watch,
            interest: READABLE,
            is_blocked: false,
            looks: RecvBackoff::default(),
            latency: MeanLatency::default(),
            deadline: now.after(NEGOTIATION_TIMEOUT),
            idle_max,
            active_at: now,
            is_ending: false,
            is_travelling: false,
            sending: Progress::NOTHING,
            receiving: Progress::NOTHING,
            again_at: Instant::NEVER,
            leave_at: Instant::NEVER,
            reason: None,
            session,
            served,
            loan,
        })
    }

    /// Wake sources: the socket and the I/O channel. While an I/O channel without a wake source has
    /// requests outstanding, [`arm`](Poller::arm) keeps the reactor awake.
    pub(super) fn woken_by(&self) -> io::Result<PollerWake> {
        PollerWake::of(WakeSource::Descriptor(std::os::fd::AsFd::as_fd(&self.watch)))
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
            Ok(RecvResult::Bytes(count)) => {
                self.session.received(false);
                self.sending.record_transfer(count);
                self.connection.received(count);
                1
            }
            Ok(RecvResult::WouldBlock) => {
                self.session.received(true);
                self.looks.record_empty(now);
                0
            }
            Ok(RecvResult::Eof) => {
                self.end_for(DisconnectReason::Closed);
                self.connection.receive_end();
                1
            }
            Err(error) => {
                self.end_for(DisconnectReason::Broken(error.to_string()));
                self.connection.broken();
                1
            }
        }
    }

    /// Records why the session ends. The first reason is kept.
    fn end_for(&mut self, reason: DisconnectReason) {
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
    fn result(&mut self, now: Instant) -> usize {
        if self.connection.in_flight() == 0 {
            return 0;
        }
        let count = self.backend.poll(now, &mut self.results);
        self.latency.end(count);
        for result in self.results.drain() {
            self.connection.handle_completion(result);
        }
        count
    }

    fn find_out(&mut self, context: &Context<'_>) -> usize {
        let mut count = 0;
        while let Some(question) = self.connection.next_question() {
            self.survey.submit(question, context.handle());
            count += 1;
        }
        if self.survey.has_results() {
            for (slot, result) in self.survey.take() {
                self.pass_on(slot, result);
                count += 1;
            }
        }
        count
    }

    fn pass_on(&mut self, slot: u16, result: SurveyResult) {
        match result {
            SurveyResult::Extents(extents) => self.connection.block_status_done(slot, &extents),
            SurveyResult::Size(done) => {
                let done = done.map_err(|(error, text)| {
                    self.session.emit(NbdEvent::Error(text));
                    error
                });
                self.connection.resized(slot, done);
            }
        }
    }

    /// Sends all queued bytes in one call.
    #[inline]
    fn send(&mut self) {
        let segments = self.connection.to_send();
        if segments.is_empty() {
            return;
        }
        match self.stream.send(segments) {
            Ok(count) => {
                self.session.sent();
                self.receiving.record_transfer(count);
                self.connection.sent(count);
                self.is_blocked = !self.connection.to_send().is_empty();
            }
            Err(error) => {
                self.end_for(DisconnectReason::Broken(error.to_string()));
                self.connection.broken();
            }
        }
    }

    /// Executes a command from another thread. Requests to a removed device fail with `ESHUTDOWN`
    /// for a while, which is how a server announces its shutdown ("Terminating the transmission
    /// phase").
    #[cold]
    fn obey(&mut self, requested_close: SessionCommand, now: Instant) {
        match requested_close {
            SessionCommand::Disconnect => {
                self.end_for(DisconnectReason::Administrative);
                self.connection.receive_end();
            }
            SessionCommand::DeviceRemoved if self.connection.is_haggling() => {
                self.end_for(DisconnectReason::DeviceRemoved);
                self.connection.receive_end();
            }
            SessionCommand::DeviceRemoved => {
                self.end_for(DisconnectReason::DeviceRemoved);
                if self.leave_at == Instant::NEVER {
                    self.leave_at = now.after(REMOVED_GRACE);
                } else if now >= self.leave_at {
                    self.connection.receive_end();
                }
            }
        }
    }

    /// Returns why the session ended.
    fn reason(&mut self) -> DisconnectReason {
        let of_client = self.connection.left().map(|left| match left {
            ClientClose::Disconnected => DisconnectReason::ClientDisconnect,
            ClientClose::NothingChosen => DisconnectReason::NoExport,
            ClientClose::Nonsense => DisconnectReason::ProtocolError,
        });
        self.reason.take().or(of_client).unwrap_or(DisconnectReason::ServerEnds)
    }

    /// Publishes the counters.
    #[inline]
    fn show(&self) {
        let phase = if self.connection.is_ending() {
            ConnectionPhase::Ending
        } else if self.connection.is_haggling() {
            ConnectionPhase::Handshake
        } else {
            ConnectionPhase::Transmission
        };
        self.session.show(phase, &self.connection.done(), self.connection.under_way() as u64);
    }

    /// Enforces the deadlines, so that no wait is unbounded and a closing connection closes.
    fn look_after_the_end(&mut self, now: Instant) {
        if !self.is_ending && self.connection.is_ending() {
            self.is_ending = true;
            self.deadline = now.after(CLOSE_TIMEOUT);
        } else if !self.is_ending && !self.connection.is_haggling() {
            let is_idle = self.connection.under_way() == 0 && !self.is_blocked;
            let idle_max = self.idle_max.filter(|_| is_idle);
            self.deadline = idle_max.map_or(Instant::NEVER, |most| self.active_at.after(most));
        }
        if self.is_ending && self.owes() {
            // The close timeout starts at the last completion, however long that took.
            self.deadline = now.after(CLOSE_TIMEOUT);
            // The client no longer sees how its writes complete: later writes of others wait until
            // they have completed.
            self.backend.fence_writes();
        }
        let is_slow = self.sending.is_too_slow(now, self.connection.awaited())
            | self.receiving.is_too_slow(now, self.is_blocked.then_some(0));
        if now >= self.deadline || is_slow {
            let is_idle = !self.is_ending && !self.connection.is_haggling() && !is_slow;
            self.end_for(if is_idle { DisconnectReason::Idle } else { DisconnectReason::TooSlow });
            self.connection.broken();
        }
    }

    /// Requests memory again that other connections held.
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

    /// Whether bytes are queued that no send call has been tried for.
    #[inline]
    fn has_unsent(&self) -> bool {
        !self.is_blocked && !self.connection.to_send().is_empty()
    }

    /// Whether the device has not completed everything that the client requested.
    fn owes(&self) -> bool {
        self.wants_space() || self.connection.in_flight() > 0
    }

    /// Whether the I/O channel has not accepted all requests.
    fn wants_space(&self) -> bool {
        !self.connection.requests().0.is_empty()
    }

    /// Whether progress requires another iteration without any wake-up.
    fn is_behind(&self) -> bool {
        // A channel that refuses requests with nothing in flight gives no wake-up, unless it names
        // a time to retry.
        let refuses = self.wants_space()
            && self.connection.in_flight() == 0
            && self.backend.wake_at() == Instant::NEVER;
        self.connection.can_step() || self.has_unsent() || refuses || self.survey.has_results()
    }
}

impl Session {
    /// Moves requests and completions between client and device. Returns the amount of work.
    #[inline]
    fn work(&mut self, now: Instant) -> usize {
        self.latency.account(now, self.connection.in_flight());
        if let Some(requested_close) = self.session.ordered() {
            self.obey(requested_close, now);
        }
        if self.is_blocked && self.looks.is_due(now) {
            self.send();
        }
        self.try_again(now);
        let before = self.connection.under_way();
        let received = self.receive(now);
        // Order matters: bytes received now become requests of this iteration and are submitted at
        // once.
        let mut count = received + self.connection.step();
        if received > 0 {
            self.looks.found_requests(now, self.connection.under_way().saturating_sub(before));
        }
        count += self.submit(now);
        count += self.result(now);
        if count > 0 {
            self.active_at = now;
        }
        count
    }
}

impl Poller for Session {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        let now = context.now();
        let mut count = self.work(now) + self.find_out(context);
        self.look_after_the_end(now);
        if self.connection.is_over() {
            context.end();
            count += 1;
        }
        // Queued bytes are sent by the flush at the end of an iteration that did work, so they
        // count as work.
        count += usize::from(self.has_unsent());
        PollResult::from_count(count)
    }

    fn flush(&mut self) {
        self.backend.flush();
        self.send();
        self.show();
    }

    fn arm(&mut self) -> PollResult {
        // Always arm: a stale signal that was not consumed would end every wait at once.
        let has_answer = self.backend.arm();
        self.connection.release();
        let wanted = self.wanted();
        if wanted != self.interest {
            self.interest = wanted;
            if let Err(error) = self.watch.change(&self.stream, SOCKET, wanted) {
                self.end_for(DisconnectReason::Broken(error.to_string()));
                self.connection.broken();
                return PollResult::Busy;
            }
        }
        let is_told = self.session.ordered().is_some() && self.reason.is_none();
        let stays_awake =
            is_told || self.is_behind() || (self.connection.in_flight() > 0 && has_answer);
        PollResult::from_count(usize::from(stays_awake))
    }

    fn disarm(&mut self) {
        self.backend.disarm();
        // The wake-up may have been for this socket.
        self.looks.now();
    }

    fn wake_at(&self) -> Instant {
        let backend = self.connection.in_flight() > 0 || self.wants_space();
        let backend = if backend { self.backend.wake_at() } else { Instant::NEVER };
        let client = self.sending.until().min(self.receiving.until()).min(self.again_at);
        self.deadline.min(self.leave_at).min(client).min(backend)
    }

    fn expected_latency(&self) -> Option<Span> {
        self.latency.mean().filter(|_| self.connection.in_flight() > 0)
    }

    /// Before a migration: ready when nothing is in flight. Before the end: ready when in addition
    /// all replies have been sent, or cannot be sent.
    fn detach(&mut self, parting: DetachReason) -> bool {
        self.is_travelling = parting == DetachReason::Migrating;
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
        // Data may have arrived during the migration.
        self.looks.now();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.show();
        self.served.remove_session(self.session.id());
        let reason = self.reason();
        self.session.has_disconnected(reason);
        if self.connection.in_flight() > 0 {
            // The device may still write to this memory, so it must never be reused.
            self.loan.lose();
        }
    }
}
