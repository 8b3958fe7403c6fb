//! Served NBD connection: a poller between a socket and an I/O channel.

#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;

use tenmil_base::{
    ChannelWakeup, CompletionBatch, Durability, Error, Instant, IoChannel, Limits, OperationSet,
    Request, Segment, Span, WakeSource,
};
use tenmil_dma::RegionTable;
use tenmil_linux::poll_set::{Interest, PollSet};
use tenmil_linux::socket_stream::{RecvResult, SocketStream};
use tenmil_reactor::{Context, DetachReason, MeanLatency, PollResult, Poller, PollerWake};

use super::buffer_pool::BufferPool;
use super::connection::{ClientCloseReason, Connection, NegotiationStart};
use super::export_set::{ExportSet, OfferedExports};
use super::exported_device::ExportedDevice;
use super::server::ConnectionMemoryLease;
use super::session_handle::{
    ConnectionPhase, DisconnectReason, NbdEvent, SessionCommand, SessionHandle,
};
use super::session_stream::{READABLE, SessionStream};
use super::slow_io::append_request;
use super::slow_query::{SlowQueries, SlowQueryResult};
use super::transfer_rate::TransferRateCheck;
use crate::recv_backoff::RecvBackoff;
use crate::slow_io::SlowIoSource;

/// Session of a client. It ends its light thread when the connection is closed.
pub(super) struct Session<S: SessionStream = SocketStream> {
    /// First field, so it is dropped first: the drop waits until the device no longer accesses the
    /// memory.
    backend: Box<dyn IoChannel>,
    /// Opens the device of the selected export, until it has.
    open_selected: Option<OpenSelectedFn>,
    stream: S,
    connection: Connection,
    results: CompletionBatch,
    slow_queries: SlowQueries,
    watch: PollSet,
    /// Whether the channel does not end a sleep, so that none begins while it has requests.
    polls_channel: bool,
    /// Readiness that the epoll set currently waits for on the socket.
    interest: Interest,
    /// Whether the last send was partial.
    is_blocked: bool,
    recv_backoff: RecvBackoff,
    /// Mean latency of the I/O channel.
    latency: MeanLatency,
    /// Deadline for selecting an export, for the next request, or for receiving the last replies.
    deadline: Instant,
    /// Idle timeout, if there is one, and the time of the last activity.
    idle_max: Option<Span>,
    active_at: Instant,
    is_closing: bool,
    /// Whether the light thread is migrating to another reactor. Nothing is started until it has arrived.
    is_migrating: bool,
    /// Progress of the request that the client is sending.
    sending: TransferRateCheck,
    /// Progress of the replies that the socket buffer has no space for.
    receiving: TransferRateCheck,
    /// When memory that other connections hold is requested again.
    lease_retry_at: Instant,
    /// When the session ends because its device was removed.
    removal_deadline: Instant,
    /// Why the session ends, as far as the cause is on this side.
    reason: Option<DisconnectReason>,
    handle: Arc<SessionHandle>,
    exports: ExportSet,
    /// The export that it is registered with.
    exported_device: Option<Arc<ExportedDevice>>,
    /// Last field: the memory outlives everything else.
    memory_lease: ConnectionMemoryLease,
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
const LEASE_RETRY_INTERVAL: Span = Span::from_ms(1);
const SOCKET: u64 = 0;
const BACKEND: u64 = 1;

/// Constructor arguments of a [`Session`].
pub(super) struct SessionParts<S> {
    pub(super) stream: S,
    pub(super) start: NegotiationStart,
    /// Exports that the client may select.
    pub(super) offered: OfferedExports,
    pub(super) exports: ExportSet,
    /// The export that it is registered with.
    pub(super) registered: Option<Arc<ExportedDevice>>,
    pub(super) open_selected: OpenSelectedFn,
    pub(super) handle: Arc<SessionHandle>,
    pub(super) regions: RegionTable,
    pub(super) slow_queries: SlowQueries,
    pub(super) memory_lease: ConnectionMemoryLease,
    pub(super) pool: Arc<BufferPool>,
    pub(super) idle_max: Option<Span>,
    pub(super) now: Instant,
}

/// Limits of a channel that accepts nothing.
const NO_LIMITS: Limits = Limits {
    block_size: 512,
    metadata_size: 0,
    block_count: 0,
    request_blocks_max: 1,
    segments_max: 1,
    optimal_boundary_blocks: 0,
    atomic_write_blocks: 1,
    depth_max: 0,
    durability: Durability::NonPersistent,
    operations: OperationSet::from_operations(&[]),
};

/// Opens a channel of the selected device.
pub(super) type OpenSelectedFn =
    Box<dyn Fn(&ExportedDevice) -> Result<Box<dyn IoChannel>, Error> + Send>;

/// Channel of a session whose client has not selected an export: it accepts no request.
struct NoChannel(Limits);

impl<S: SessionStream> Session<S> {
    pub(super) fn new(parts: SessionParts<S>) -> io::Result<Self> {
        let SessionParts {
            stream,
            start,
            offered,
            exports,
            registered,
            open_selected,
            handle,
            regions,
            slow_queries,
            memory_lease,
            ..
        } = parts;
        let SessionParts { pool, idle_max, now, .. } = parts;
        // One descriptor for the socket and the channel: a poller has a single wake source.
        let watch = PollSet::new()?;
        stream.watch(&watch, SOCKET)?;
        let backend: Box<dyn IoChannel> = match &registered {
            Some(device) => open_selected(device).map_err(io::Error::other)?,
            None => Box::new(NoChannel(NO_LIMITS)),
        };
        let polls_channel = !watch_channel(&watch, &*backend)?;
        let memory = memory_lease.memory();
        let connection = Connection::starting_at(offered, regions, memory, pool, start);
        Ok(Self {
            backend,
            open_selected: Some(open_selected),
            stream,
            connection,
            results: CompletionBatch::with_capacity(BATCH),
            slow_queries,
            watch,
            polls_channel,
            interest: READABLE,
            is_blocked: false,
            recv_backoff: RecvBackoff::default(),
            latency: MeanLatency::default(),
            deadline: now.after(NEGOTIATION_TIMEOUT),
            idle_max,
            active_at: now,
            is_closing: false,
            is_migrating: false,
            sending: TransferRateCheck::NOTHING,
            receiving: TransferRateCheck::NOTHING,
            lease_retry_at: Instant::NEVER,
            removal_deadline: Instant::NEVER,
            reason: None,
            handle,
            exports,
            exported_device: registered,
            memory_lease,
        })
    }

    /// Opens the device of the export that the client has selected.
    #[cold]
    fn attach_selected(&mut self) {
        let Some(export) = self.connection.selected_export().cloned() else { return };
        let Some(open) = self.open_selected.take() else { return };
        let registered = self.exported_device.as_ref();
        let Some(device) = self.exports.select(&export, &self.handle, registered) else {
            // It has been removed just now.
            self.set_disconnect_reason(DisconnectReason::NoExport);
            self.connection.handle_stream_end();
            return;
        };
        self.handle.set_export(export.name());
        self.slow_queries.set_device(Arc::clone(&device));
        if registered.is_some_and(|registered| Arc::ptr_eq(registered, &device)) {
            // Its channel has been opened at the start.
            self.handle.report_connected();
            return;
        }
        let opened = open(&device).and_then(|backend| {
            let is_watched = watch_channel(&self.watch, &*backend).map_err(Error::environment)?;
            self.polls_channel = !is_watched;
            Ok(backend)
        });
        self.exported_device = Some(device);
        match opened {
            Ok(backend) => self.backend = backend,
            Err(why) => {
                self.handle.emit(NbdEvent::Error(format!("connect: {why}")));
                self.set_disconnect_reason(DisconnectReason::ServerEnds);
                self.connection.handle_stream_end();
            }
        }
        self.handle.report_connected();
    }

    /// Wake sources: the socket and the I/O channel. While an I/O channel without a wake source has
    /// requests outstanding, [`arm`](Poller::arm) keeps the reactor awake.
    pub(super) fn poller_wake(&self) -> io::Result<PollerWake> {
        PollerWake::from_source(WakeSource::Descriptor(std::os::fd::AsFd::as_fd(&self.watch)))
    }

    #[inline]
    fn receive(&mut self, now: Instant) -> usize {
        if self.is_migrating || !self.recv_backoff.is_due(now) {
            return 0;
        }
        let into = self.connection.receive_segments();
        if into.is_empty() {
            return 0;
        }
        match self.stream.receive(into) {
            Ok(RecvResult::Bytes(count)) => {
                self.handle.count_receive(false);
                self.sending.record_transfer(count);
                self.connection.record_received(count);
                1
            }
            Ok(RecvResult::WouldBlock) => {
                self.handle.count_receive(true);
                self.recv_backoff.record_empty(now);
                0
            }
            Ok(RecvResult::Eof) => {
                self.set_disconnect_reason(DisconnectReason::Closed);
                self.connection.handle_stream_end();
                1
            }
            Err(error) => {
                self.set_disconnect_reason(DisconnectReason::Broken(error.to_string()));
                self.connection.handle_send_error();
                1
            }
        }
    }

    /// Records why the session ends. The first reason is kept.
    fn set_disconnect_reason(&mut self, reason: DisconnectReason) {
        self.reason.get_or_insert(reason);
    }

    #[inline]
    fn submit(&mut self, now: Instant) -> usize {
        let (requests, segments) = self.connection.pending_requests();
        if requests.is_empty() || self.is_migrating {
            return 0;
        }
        let taken = self.backend.submit(now, requests, segments);
        self.connection.record_submitted(taken);
        taken
    }

    #[inline]
    fn handle_slow_query_results(&mut self, now: Instant) -> usize {
        if self.connection.in_flight_requests() == 0 {
            return 0;
        }
        let count = self.backend.poll(now, &mut self.results);
        self.latency.record_completions(count);
        for result in self.results.drain() {
            self.connection.handle_completion(result);
        }
        count
    }

    fn run_slow_queries(&mut self, context: &Context<'_>) -> usize {
        let mut count = 0;
        while let Some(query) = self.connection.next_slow_query() {
            self.slow_queries.submit(query, context.thread_handle());
            count += 1;
        }
        if self.slow_queries.has_results() {
            for (slot, result) in self.slow_queries.take_results() {
                self.handle_slow_query_result(slot, result);
                count += 1;
            }
        }
        count
    }

    fn handle_slow_query_result(&mut self, slot: u16, result: SlowQueryResult) {
        match result {
            SlowQueryResult::Extents(extents) => {
                self.connection.complete_block_status(slot, &extents)
            }
            SlowQueryResult::Size(done) => {
                let done = done.map_err(|(error, text)| {
                    self.handle.emit(NbdEvent::Error(text));
                    error
                });
                self.connection.complete_resize(slot, done);
            }
        }
    }

    /// Sends all queued bytes in one call.
    #[inline]
    fn send(&mut self) {
        let segments = self.connection.unsent_segments();
        if segments.is_empty() {
            return;
        }
        match self.stream.send(segments) {
            Ok(count) => {
                self.handle.count_send();
                self.receiving.record_transfer(count);
                self.connection.record_sent(count);
                if self.connection.has_slow_requests() {
                    self.report_slow_requests(false);
                }
                self.is_blocked = !self.connection.unsent_segments().is_empty();
            }
            Err(error) => {
                self.set_disconnect_reason(DisconnectReason::Broken(error.to_string()));
                self.connection.handle_send_error();
            }
        }
    }

    /// Reports the slow requests whose replies were sent, or at the end all others too.
    #[cold]
    fn report_slow_requests(&mut self, is_ended: bool) {
        let Some(slow) = self.connection.next_slow_request(is_ended) else { return };
        let Some(device) = self.exported_device.clone() else { return };
        let source = Arc::new(SlowIoSource {
            protocol: "nbd",
            export: device.export().name().to_owned(),
            host: None,
            peer: self.handle.peer().to_owned(),
            queue: None,
        });
        let mut next = Some(slow);
        while let Some(slow) = next {
            append_request(device.slow_io(), &source, slow);
            next = self.connection.next_slow_request(is_ended);
        }
    }

    /// Executes a command from another thread. Requests to a removed device fail with `ESHUTDOWN`
    /// for a while, which is how a server announces its shutdown ("Terminating the transmission
    /// phase").
    #[cold]
    fn execute_command(&mut self, command: SessionCommand, now: Instant) {
        match command {
            SessionCommand::Disconnect => {
                self.set_disconnect_reason(DisconnectReason::Administrative);
                self.connection.handle_stream_end();
            }
            SessionCommand::DeviceRemoved if self.connection.is_negotiating() => {
                self.set_disconnect_reason(DisconnectReason::DeviceRemoved);
                self.connection.handle_stream_end();
            }
            SessionCommand::DeviceRemoved => {
                self.set_disconnect_reason(DisconnectReason::DeviceRemoved);
                if self.removal_deadline == Instant::NEVER {
                    self.removal_deadline = now.after(REMOVED_GRACE);
                } else if now >= self.removal_deadline {
                    self.connection.handle_stream_end();
                }
            }
        }
    }

    /// Returns why the session ended.
    fn take_disconnect_reason(&mut self) -> DisconnectReason {
        let of_client =
            self.connection.client_close_reason().map(|client_close| match client_close {
                ClientCloseReason::Disconnected => DisconnectReason::ClientDisconnect,
                ClientCloseReason::NoExport => DisconnectReason::NoExport,
                ClientCloseReason::ProtocolError => DisconnectReason::ProtocolError,
            });
        self.reason.take().or(of_client).unwrap_or(DisconnectReason::ServerEnds)
    }

    /// Publishes the counters.
    #[inline]
    fn publish_counters(&self) {
        let phase = if self.connection.is_closing() {
            ConnectionPhase::Ending
        } else if self.connection.is_negotiating() {
            ConnectionPhase::Handshake
        } else {
            ConnectionPhase::Transmission
        };
        self.handle.publish_counters(
            phase,
            &self.connection.completed_stats(),
            self.connection.outstanding_requests() as u64,
        );
    }

    /// Enforces the deadlines, so that no wait is unbounded and a closing connection closes.
    fn check_deadlines(&mut self, now: Instant) {
        if !self.is_closing && self.connection.is_closing() {
            self.is_closing = true;
            self.deadline = now.after(CLOSE_TIMEOUT);
        } else if !self.is_closing && !self.connection.is_negotiating() {
            let is_idle = self.connection.outstanding_requests() == 0 && !self.is_blocked;
            let idle_max = self.idle_max.filter(|_| is_idle);
            self.deadline = idle_max.map_or(Instant::NEVER, |most| self.active_at.after(most));
        }
        if self.is_closing && self.has_in_flight() {
            // The close timeout starts at the last completion, however long that took.
            self.deadline = now.after(CLOSE_TIMEOUT);
            // The client no longer sees how its writes complete: later writes of others wait until
            // they have completed.
            self.backend.fence_writes();
        }
        let is_slow = self.sending.is_too_slow(now, self.connection.partial_request_number())
            | self.receiving.is_too_slow(now, self.is_blocked.then_some(0));
        if now >= self.deadline || is_slow {
            let is_idle = !self.is_closing && !self.connection.is_negotiating() && !is_slow;
            self.set_disconnect_reason(if is_idle {
                DisconnectReason::Idle
            } else {
                DisconnectReason::TooSlow
            });
            self.connection.handle_send_error();
        }
    }

    /// Requests memory again that other connections held.
    #[inline]
    fn retry_allocation(&mut self, now: Instant) {
        if !self.connection.is_waiting_for_memory() {
            self.lease_retry_at = Instant::NEVER;
        } else if now >= self.lease_retry_at {
            self.connection.retry_allocation();
            self.lease_retry_at = now.after(LEASE_RETRY_INTERVAL);
        } else if self.lease_retry_at == Instant::NEVER {
            self.lease_retry_at = now.after(LEASE_RETRY_INTERVAL);
        }
    }

    fn socket_interest(&mut self) -> Interest {
        Interest {
            readable: !self.connection.receive_segments().is_empty(),
            writable: self.is_blocked && !self.connection.unsent_segments().is_empty(),
        }
    }

    /// Whether bytes are queued that no send call has been tried for.
    #[inline]
    fn has_unsent(&self) -> bool {
        !self.is_blocked && !self.connection.unsent_segments().is_empty()
    }

    /// Whether the device has not completed everything that the client requested.
    fn has_in_flight(&self) -> bool {
        self.has_unsubmitted() || self.connection.in_flight_requests() > 0
    }

    /// Whether the I/O channel has not accepted all requests.
    fn has_unsubmitted(&self) -> bool {
        !self.connection.pending_requests().0.is_empty()
    }

    /// Whether nothing that was accepted for sending is left on this side, or it cannot be sent.
    fn is_flushed(&mut self, now: Instant) -> bool {
        let is_flushed = self.stream.is_flushed() || now >= self.deadline;
        if is_flushed {
            self.stream.shut_down();
        }
        is_flushed
    }

    /// Whether progress requires another iteration without any wake-up.
    fn needs_iteration(&self) -> bool {
        // A channel that refuses requests with nothing in flight gives no wake-up, unless it names
        // a time to retry.
        let refuses = self.has_unsubmitted()
            && self.connection.in_flight_requests() == 0
            && self.backend.wake_at() == Instant::NEVER;
        self.connection.can_step()
            || self.has_unsent()
            || refuses
            || self.slow_queries.has_results()
    }
}

impl<S: SessionStream> Session<S> {
    /// Moves requests and completions between client and device. Returns the amount of work.
    #[inline]
    fn run_iteration(&mut self, now: Instant) -> usize {
        if let Some(device) = &self.exported_device {
            self.connection.set_time(now, device.slow_io().threshold_ns());
        }
        self.latency.account_in_flight(now, self.connection.in_flight_requests());
        if let Some(command) = self.handle.pending_command() {
            self.execute_command(command, now);
        }
        if self.is_blocked && self.recv_backoff.is_due(now) {
            self.send();
        }
        self.retry_allocation(now);
        let before = self.connection.outstanding_requests();
        let received = self.receive(now);
        // Order matters: bytes received now become requests of this iteration and are submitted at
        // once.
        let mut count = received + self.connection.step();
        if self.open_selected.is_some() && !self.connection.is_negotiating() {
            self.attach_selected();
        }
        if received > 0 {
            self.recv_backoff.record_requests(
                now,
                self.connection.outstanding_requests().saturating_sub(before),
            );
        }
        count += self.submit(now);
        count += self.handle_slow_query_results(now);
        if count > 0 {
            self.active_at = now;
        }
        count
    }
}

impl<S: SessionStream> Poller for Session<S> {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        let now = context.now();
        let mut count = self.run_iteration(now) + self.run_slow_queries(context);
        self.check_deadlines(now);
        if self.connection.is_finished() && self.is_flushed(now) {
            context.request_thread_end();
            count += 1;
        }
        // Queued bytes are sent by the flush at the end of an iteration that did work, so they
        // count as work.
        count += usize::from(self.has_unsent());
        PollResult::from_count(count)
    }

    fn flush(&mut self) {
        self.backend.flush_submissions();
        self.send();
        self.publish_counters();
    }

    fn arm(&mut self) -> PollResult {
        // Always arm: a stale signal that was not consumed would end every wait at once.
        let has_answer = self.backend.arm();
        self.connection.release_unused_memory();
        let wanted = self.socket_interest();
        let before = std::mem::replace(&mut self.interest, wanted);
        let is_stream_ready = match self.stream.arm(&self.watch, SOCKET, before, wanted) {
            Ok(is_ready) => is_ready,
            Err(error) => {
                self.set_disconnect_reason(DisconnectReason::Broken(error.to_string()));
                self.connection.handle_send_error();
                return PollResult::Busy;
            }
        };
        let is_reported = self.handle.pending_command().is_some() && self.reason.is_none();
        let stays_awake = is_reported
            || is_stream_ready
            || self.needs_iteration()
            || (self.connection.in_flight_requests() > 0 && (has_answer || self.polls_channel));
        PollResult::from_count(usize::from(stays_awake))
    }

    fn disarm(&mut self) {
        self.backend.disarm();
        // The wake-up may have been for this socket.
        self.recv_backoff.make_due();
    }

    fn wake_at(&self) -> Instant {
        let backend = self.connection.in_flight_requests() > 0 || self.has_unsubmitted();
        let backend = if backend { self.backend.wake_at() } else { Instant::NEVER };
        let client =
            self.sending.window_end().min(self.receiving.window_end()).min(self.lease_retry_at);
        self.deadline.min(self.removal_deadline).min(client).min(backend)
    }

    fn expected_latency(&self) -> Option<Span> {
        self.latency.mean_latency().filter(|_| self.connection.in_flight_requests() > 0)
    }

    fn can_spin_help(&self) -> bool {
        !self.latency.is_long()
    }

    /// Before a migration: ready when nothing is in flight. Before the end: ready when in addition
    /// all replies have been sent, or cannot be sent.
    fn try_detach(&mut self, parting: DetachReason) -> bool {
        self.is_migrating = parting == DetachReason::Migrating;
        let has_drained = self.connection.in_flight_requests() == 0;
        if self.is_migrating {
            return has_drained && self.stream.detach_from_thread();
        }
        self.connection.handle_stream_end();
        has_drained
            && (self.connection.is_finished()
                || self.is_blocked
                || self.connection.unsent_segments().is_empty())
    }

    fn attach(&mut self) {
        self.is_migrating = false;
        // Data may have arrived during the migration.
        self.recv_backoff.make_due();
    }
}

/// Adds the wake source of a channel to the set of its session. Returns false if it would not end a sleep: a stack
/// of devices may have a set at each level, and the reactor's set is around that of the session, which is more than
/// the kernel permits. Then the session's set has the socket alone, because it could not be waited for otherwise.
fn watch_channel(watch: &PollSet, channel: &dyn IoChannel) -> io::Result<bool> {
    let WakeSource::Descriptor(descriptor) = channel.wake_source() else { return Ok(true) };
    if !watch.add_nested(descriptor, BACKEND, READABLE)? {
        return Ok(false);
    }
    // A session that has no reactor yet gets one: what the kernel will say then.
    let is_shallow = PollSet::new()?.add_nested(watch, BACKEND, READABLE)?;
    if !is_shallow {
        watch.remove(descriptor)?;
    }
    Ok(is_shallow)
}

impl ChannelWakeup for NoChannel {
    fn arm(&mut self) -> bool {
        false
    }
}

impl IoChannel for NoChannel {
    fn limits(&self) -> &Limits {
        &self.0
    }

    fn submit(&mut self, _: Instant, _: &[Request], _: &[Segment]) -> usize {
        0
    }

    fn poll(&mut self, _: Instant, _: &mut CompletionBatch) -> usize {
        0
    }
}

impl<S: SessionStream> Drop for Session<S> {
    fn drop(&mut self) {
        self.publish_counters();
        self.report_slow_requests(true);
        match &self.exported_device {
            Some(device) => device.remove_session(self.handle.id()),
            None => self.exports.remove_session(self.handle.id()),
        }
        let reason = self.take_disconnect_reason();
        self.handle.report_disconnected(reason);
        if self.connection.in_flight_requests() > 0 {
            // The device may still write to this memory, so it must never be reused.
            self.memory_lease.leak();
        }
    }
}
