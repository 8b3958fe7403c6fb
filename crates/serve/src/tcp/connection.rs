//! Served NVMe/TCP connection: a poller between a stream and a queue.
//!
//! ```text
//!   Stream ─ bytes ─▶ Controller ─ events ─▶ CommandTable ─▶ role: not connected, admin or I/O queue
//!   Stream ◀─ one gathered list ─ SendState ◀─ Controller ◀─ completion ──┘
//! ```

mod authentication;
mod fabrics_connect;
mod idle;
mod teardown;
mod zero_copy_drain;

use std::fmt;
use std::sync::Arc;

use tenmil_base::{Instant, RecvResult, Segment, Stream};
use tenmil_nvme_controller::transport::fabrics::AssociationEndReason;
use tenmil_nvme_tcp::{Connection, ControllerConnection, ControllerEvent, EventQueue};
use tenmil_wire::opcode::FabricsType;
use tenmil_wire::{Completion, Status};

use self::authentication::UnauthenticatedQueue;
use self::fabrics_connect::PendingConnect;
use self::teardown::OldestAwaitedData;
use self::zero_copy_drain::ZeroCopyDrain;
use super::admin_queue::AdminQueue;
use super::admission::AdmittedConnection;
use super::authentication::QueueAuthentication;
use super::buffer_pool::BufferCache;
use super::command_table::{AdmitResult, CommandTable, CopiedBlocks, LimitReport};
use super::connection_handle::ConnectionHandle;
use super::discovery::DiscoveryController;
use super::event::{DisconnectReason, TargetEvent};
use super::io_queue::{IoQueue, StartResult};
use super::poller::WakeSet;
use super::send_state::SendState;
use super::service::Service;
use crate::recv_backoff::RecvBackoff;

/// NVMe/TCP connection of a target.
pub struct TargetConnection {
    /// `None` once it is closed.
    stream: Option<Box<dyn Stream>>,
    /// Closed stream whose send buffers the kernel still references.
    zero_copy_drain: Option<ZeroCopyDrain>,
    end: ControllerConnection,
    commands: CommandTable,
    role: ConnectionRole,
    events: EventQueue<ControllerEvent>,
    /// Index of the first event that was not handled, for lack of a buffer.
    next_event: usize,
    /// Received bytes that the events refer to.
    consumed: usize,
    send_state: SendState,
    /// Deadline for Connect, or the time of the next retry of a pending Connect, or of the next check of
    /// an authentication.
    connect_by: Instant,
    pending_connect: Option<PendingConnect>,
    /// Authentications of the queue, once there was one.
    authentication: Option<Box<QueueAuthentication>>,
    /// Time since which the stream has accepted nothing.
    blocked_since: Option<Instant>,
    /// Oldest outstanding data at the last check.
    awaited_data: Option<OldestAwaitedData>,
    /// Time of the next check for overdue data and stalled responses.
    timeout_check_at: Instant,
    /// Why the connection ends.
    reason: Option<DisconnectReason>,
    /// Whether the connection ends once everything queued has been sent.
    ends_sent: bool,
    /// Why it then ends; `None`: the host has disconnected.
    end_reason: Option<DisconnectReason>,
    /// Time at which it was accepted.
    accepted_at: Instant,
    /// Time of the last poll.
    worked_at: Instant,
    /// Wake sources, if the connection may sleep.
    wake_set: Option<WakeSet>,
    recv_backoff: RecvBackoff,
    /// The last data that were not small belonged to a transfer of [`HEADER_ALONE_BYTES_MIN`] or more.
    is_receiving_large: bool,
    /// Whether the connection is migrating to another reactor; it receives nothing until it has
    /// arrived.
    is_migrating: bool,
    service: Service,
    handle: Arc<ConnectionHandle>,
    admitted: AdmittedConnection,
    id: u64,
    peer: String,
    port: u16,
}

/// Role of a connection.
enum ConnectionRole {
    /// Connect has not been received.
    AwaitingConnect,
    /// Connect was accepted, and the host must authenticate before there is a queue.
    AwaitingAuthentication(Box<UnauthenticatedQueue>),
    Admin(Box<AdminQueue>),
    Io(Box<IoQueue>),
    Discovery(Box<DiscoveryController>),
    /// The queue is released.
    Closed,
}

/// Constructor arguments of a [`TargetConnection`].
pub(super) struct ConnectionParts {
    pub(super) service: Service,
    pub(super) stream: Box<dyn Stream>,
    pub(super) handle: Arc<ConnectionHandle>,
    pub(super) cache: BufferCache,
    pub(super) connection: u64,
    pub(super) peer: String,
    pub(super) port: u16,
    pub(super) admitted: AdmittedConnection,
    pub(super) now: Instant,
}

/// Largest number of events per batch.
const EVENTS: usize = 64;
/// Smallest amount of data that is received directly into its buffer, with a system call of its own
/// instead of a copy.
const DIRECT_BYTES: u32 = 16 << 10;
/// While transfers of this size or more are received, headers are received without the data behind them, so
/// that the data are received directly.
const HEADER_ALONE_BYTES_MIN: u32 = 128 << 10;
/// Largest number of receive calls in an iteration.
const RECVS_MAX: usize = 4;

impl TargetConnection {
    pub(super) fn new(parts: ConnectionParts) -> Self {
        let ConnectionParts {
            service,
            stream,
            handle,
            cache,
            connection,
            peer,
            port,
            admitted,
            now,
        } = parts;
        let config = service.limits().controller_config();
        Self {
            stream: Some(stream),
            zero_copy_drain: None,
            end: ControllerConnection::new(config, now),
            commands: CommandTable::new(cache),
            role: ConnectionRole::AwaitingConnect,
            events: EventQueue::with_capacity(EVENTS),
            next_event: 0,
            consumed: 0,
            send_state: SendState::new(),
            // A connection without a queue counts towards the limits and holds its own pages, so the
            // time until Connect is bounded.
            connect_by: now.after(admitted.fabrics_connect_timeout()),
            pending_connect: None,
            authentication: None,
            blocked_since: None,
            awaited_data: None,
            timeout_check_at: Instant::NEVER,
            reason: None,
            ends_sent: false,
            end_reason: None,
            accepted_at: now,
            worked_at: now,
            wake_set: None,
            recv_backoff: RecvBackoff::default(),
            is_receiving_large: false,
            is_migrating: false,
            service,
            handle,
            admitted,
            id: connection,
            peer,
            port,
        }
    }

    /// Does all work that is possible now. Returns whether there was any.
    pub fn poll_once(&mut self, now: Instant) -> bool {
        self.recv_backoff.make_due();
        let count = self.process_commands(now);
        self.send(now);
        count > 0
    }

    /// Whether the connection has ended with no command executing, and can be dropped.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        let is_ended = self.reason.is_some() && (self.stream.is_none() || self.end.is_closed());
        is_ended && self.zero_copy_drain.is_none() && self.is_drained()
    }

    /// Why the connection ends; `None` while it does not.
    #[must_use]
    pub fn disconnect_reason(&self) -> Option<&DisconnectReason> {
        self.reason.as_ref()
    }

    /// Connection id.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Receives, executes and completes commands. Returns the amount of work.
    #[inline]
    pub(super) fn process_commands(&mut self, now: Instant) -> usize {
        self.worked_at = now;
        if let ConnectionRole::Io(io) = &mut self.role {
            io.record_idle_iteration(now);
        }
        let is_wakeup_pending = self.handle.take_wakeup();
        let mut count = usize::from(is_wakeup_pending);
        if self.send_state.is_awaiting_send_space() && self.recv_backoff.is_due(now) {
            self.send(now);
            count += usize::from(!self.send_state.is_awaiting_send_space());
        }
        if self.send_state.has_kernel_references()
            && let Some(stream) = &mut self.stream
        {
            count += self.send_state.release_sent(&mut **stream, &mut self.end, &mut self.commands);
        }
        if self.reason.is_none() {
            // A migrating connection receives nothing more on this thread, but executes what it has
            // received.
            if self.is_migrating {
                count += self.handle_events(now) + self.parse_received(now);
            } else if self.recv_backoff.is_due(now) {
                count += self.receive_paced(now);
            }
            if self.commands.has_waiting() {
                count += self.start_waiting_commands(now);
            }
        } else {
            // Closing: input is discarded until the peer closes, and the kernel may still reference
            // sent memory.
            count += self.discard_input(now) + self.poll_kernel_release(now);
        }
        count += self.poll_role(now, is_wakeup_pending);
        self.commands.release_idle_if_others_wait();
        if let Some(fault) = self.commands.recorded_fault() {
            self.close_for_invalid_call(now, fault);
        }
        if now >= self.earliest_deadline() {
            count += self.handle_deadlines(now);
        }
        // Not before everything queued was offered to the stream: responses, and a TermReq.
        if self.reason.is_some() && !self.has_unsent() {
            self.close_unless_term_req_pending(now);
        }
        count
    }

    /// Receives and adapts the receive pacing.
    #[inline]
    fn receive_paced(&mut self, now: Instant) -> usize {
        let count = self.receive(now);
        if count == 0 {
            self.recv_backoff.record_empty(now);
        } else {
            self.recv_backoff.record_data(now);
        }
        if self.timeout_check_at == Instant::NEVER && self.commands.awaits_host_data() {
            self.schedule_timeout_check(now);
        }
        count
    }

    /// Receives what is available. One call returns everything that is available, so another one
    /// would be empty, unless the first call ended where data for a separate buffer begin, or
    /// filled that buffer.
    #[inline]
    fn receive(&mut self, now: Instant) -> usize {
        let mut count = 0;
        if !self.events.as_slice().is_empty() {
            count = self.handle_events(now);
        }
        let (mut is_last, mut has_partial_command) = (false, false);
        for _ in 0..RECVS_MAX {
            // An event that waits for a buffer is handled before more bytes are received.
            if self.next_event < self.events.as_slice().len() {
                break;
            }
            let segment = self.direct_receive_segment();
            let following = self.end.data_header_bytes();
            let Some(stream) = &mut self.stream else { break };
            let received = match segment {
                Some(segment) => stream.receive_into_and_following(&[segment], following),
                None if self.is_receiving_large => {
                    stream.receive_up_to(self.end.bytes_to_data_header(stream.buffered()))
                }
                None => stream.receive(),
            };
            match received {
                RecvResult::Bytes(bytes) => {
                    count += 1;
                    if let Some(segment) = segment {
                        let direct = u32::try_from(bytes).unwrap_or(u32::MAX);
                        let direct = direct.min(segment.len_bytes);
                        self.end.received_direct(now, direct, &mut self.events);
                        count += self.handle_events(now);
                        // A short read has emptied the socket.
                        is_last = bytes < segment.len_bytes as usize + following;
                    }
                }
                RecvResult::WouldBlock => {
                    count += self.parse_received(now);
                    break;
                }
                RecvResult::Eof => {
                    count += self.parse_received(now);
                    self.handle_stream_end(None);
                    break;
                }
                RecvResult::Failed(why) => {
                    count += self.parse_received(now);
                    self.handle_stream_end(Some(why));
                    break;
                }
            }
            let is_header_alone = segment.is_none() && self.is_receiving_large;
            count += self.parse_received(now);
            if is_last || segment.is_none() && self.direct_receive_segment().is_none() {
                // The start of a command is followed by its rest, once.
                has_partial_command =
                    is_header_alone && !has_partial_command && self.has_buffered();
                if !is_last && has_partial_command {
                    continue;
                }
                self.is_receiving_large &= !is_header_alone;
                break;
            }
        }
        count
    }

    /// Buffer that the next data can be received into directly.
    #[inline]
    fn direct_receive_segment(&mut self) -> Option<Segment> {
        let placement = self
            .end
            .next_direct_placement()
            .filter(|placement| placement.len_bytes >= DIRECT_BYTES)?;
        let stream = self.stream.as_ref()?;
        if !stream.buffered().is_empty() {
            return None;
        }
        self.record_large_data(placement.tag);
        self.commands.buffer_segment(placement)
    }

    /// Whether received bytes were not consumed.
    fn has_buffered(&self) -> bool {
        self.stream.as_ref().is_some_and(|stream| !stream.buffered().is_empty())
    }

    /// Records data of command `tag`, which are not small.
    fn record_large_data(&mut self, tag: u16) {
        let (_, transfer_bytes) = self.commands.data_direction_and_len(tag);
        self.is_receiving_large = transfer_bytes >= HEADER_ALONE_BYTES_MIN;
    }

    /// Discards input until the peer closes a connection that has ended.
    #[cold]
    fn discard_input(&mut self, now: Instant) -> usize {
        let Some(stream) = &mut self.stream else { return 0 };
        let count = stream.buffered().len();
        stream.consume(count);
        match stream.receive() {
            RecvResult::Bytes(_) => 1,
            RecvResult::WouldBlock => 0,
            RecvResult::Eof | RecvResult::Failed(_) => {
                self.close_stream(now);
                1
            }
        }
    }

    /// Parses the received bytes, as far as there are buffers.
    #[inline]
    fn parse_received(&mut self, now: Instant) -> usize {
        let mut count = 0;
        while self.next_event == self.events.as_slice().len() {
            let Some(stream) = &self.stream else { break };
            let bytes = stream.buffered();
            if bytes.is_empty() {
                break;
            }
            self.consumed = self.end.receive(now, bytes, &mut self.events);
            let is_blocked_by_buffers = self.consumed == 0 && self.events.as_slice().is_empty();
            count += self.handle_events(now);
            if is_blocked_by_buffers {
                break;
            }
        }
        count
    }

    /// Handles pending events. Stops when there is no buffer for received data.
    #[inline]
    fn handle_events(&mut self, now: Instant) -> usize {
        let first = self.next_event;
        // Handling an event adds none.
        let mut events = core::mem::replace(&mut self.events, EventQueue::with_capacity(EVENTS));
        let left = &events.as_slice()[first..];
        let count = left.iter().take_while(|event| self.handle_event(now, event)).count();
        if count < left.len() {
            (self.events, self.next_event) = (events, first + count);
            return count;
        }
        events.clear();
        (self.events, self.next_event) = (events, 0);
        // Events of `Data` refer to bytes in the stream's buffer, so the bytes are consumed only
        // after all events have been handled.
        if self.consumed > 0
            && let Some(stream) = &mut self.stream
        {
            stream.consume(core::mem::take(&mut self.consumed));
        }
        count
    }

    /// Handles one event. Returns false if there is no buffer for it now.
    #[inline]
    fn handle_event(&mut self, now: Instant, event: &ControllerEvent) -> bool {
        match *event {
            ControllerEvent::Command { tag, ref command, data: Ok(data) } => {
                match self.commands.admit(&mut self.end, (tag, now), command, data) {
                    AdmitResult::Ready => self.start_command(now, tag),
                    AdmitResult::Deferred => {}
                    AdmitResult::NoBuffer => return false,
                }
            }
            ControllerEvent::Command { tag, command, data: Err(status) } => {
                self.commands.reject(&mut self.end, tag, command, status.with_dnr());
            }
            ControllerEvent::Data { placement, at } => {
                if placement.len_bytes >= DIRECT_BYTES {
                    self.record_large_data(placement.tag);
                }
                let Some(stream) = &self.stream else { return true };
                let bytes = stream.buffered().get(at as usize..).unwrap_or_default();
                let bytes = bytes.get(..placement.len_bytes as usize).unwrap_or_default();
                if self.commands.store_received(placement, bytes).is_err() {
                    self.close_for_invalid_buffer(now, placement);
                }
            }
            ControllerEvent::DataComplete { tag, is_intact } => {
                if self.commands.handle_data_complete(&mut self.end, (tag, now), is_intact) {
                    self.handle_data_complete(now, tag, is_intact);
                }
            }
            ControllerEvent::Sent { tag } => self.commands.release_command(tag),
            ControllerEvent::Open(params) => {
                let mut info = self.handle.lock_info();
                (info.header_digest, info.data_digest) = (params.header_digest, params.data_digest);
            }
            ControllerEvent::Ended(close_reason) => self.handle_protocol_close(now, close_reason),
        }
        true
    }

    #[inline]
    fn handle_data_complete(&mut self, now: Instant, tag: u16, is_intact: bool) {
        if is_intact {
            return self.start_command(now, tag);
        }
        let completion = Completion::new(0, Status::TRANSIENT_TRANSPORT_ERROR);
        self.commands.complete_with(&mut self.end, tag, 0, completion);
    }

    /// Starts a command that has all its data.
    #[inline(always)]
    fn start_command(&mut self, now: Instant, tag: u16) {
        let Self { role, commands, .. } = self;
        match role {
            ConnectionRole::Io(io) => {
                if io.queue_ready_command(commands, tag) == StartResult::Fabrics {
                    self.execute_fabrics_on_io_queue(now, tag);
                }
            }
            ConnectionRole::Admin(_) | ConnectionRole::Discovery(_) => {
                self.start_admin_command(now, tag)
            }
            ConnectionRole::AwaitingConnect => self.handle_connect(now, tag),
            ConnectionRole::AwaitingAuthentication(_) => self.start_unauthenticated(now, tag),
            ConnectionRole::Closed => {}
        }
    }

    /// Starts a command on an admin queue.
    #[inline(never)]
    fn start_admin_command(&mut self, now: Instant, tag: u16) {
        if self.try_authentication_command(now, tag) {
            return;
        }
        let Self { role, commands, end, .. } = self;
        match role {
            ConnectionRole::Admin(admin) => admin.start_command(now, commands, end, tag),
            ConnectionRole::Discovery(discovery) => {
                discovery.execute_command(now, commands, end, tag)
            }
            _ => {}
        }
    }

    /// Executes a Fabrics command on an I/O queue: Disconnect (Base 2.1 §6.4), or a further
    /// authentication.
    #[cold]
    fn execute_fabrics_on_io_queue(&mut self, now: Instant, tag: u16) {
        if self.try_authentication_command(now, tag) {
            return;
        }
        let kind = FabricsType::from_u8(self.commands.command_of_tag(tag).nsid().to_le_bytes()[0]);
        let status = match kind {
            Some(FabricsType::Disconnect) => {
                self.ends_sent = true;
                if let ConnectionRole::Io(io) = &mut self.role {
                    io.stop_commands(now);
                }
                self.commands.cancel_held();
                Status::SUCCESS
            }
            Some(FabricsType::Connect) => Status::COMMAND_SEQUENCE_ERROR.with_dnr(),
            _ => Status::INVALID_OPCODE.with_dnr(),
        };
        self.commands.complete_with(&mut self.end, tag, 0, Completion::new(0, status));
    }

    fn start_waiting_commands(&mut self, now: Instant) -> usize {
        let mut count = 0;
        while let Some(tag) = self.commands.next_ready(&mut self.end, now) {
            count += 1;
            self.start_command(now, tag);
        }
        if let Some(LimitReport { has_new, waits, copied }) = self.commands.take_limit_report()
            && let ConnectionRole::Io(io) = &mut self.role
        {
            if has_new || !waits.is_empty() {
                io.record_limit_waits(now, &waits);
            }
            for CopiedBlocks { nsid, blocks } in copied {
                let bytes = io.bytes_of_blocks(nsid, blocks);
                self.commands.charge_copied(now, nsid, bytes);
            }
        }
        count
    }

    #[inline]
    fn poll_role(&mut self, now: Instant, is_wakeup_pending: bool) -> usize {
        let Self { role, commands, end, .. } = self;
        match role {
            ConnectionRole::Io(io) => {
                let count = io.poll_once(now, commands, end);
                if io.is_stopping() {
                    self.handle_stopped_queue(now);
                }
                count
            }
            // The association ends with its admin connection, so only this one maps its end to a
            // reason.
            ConnectionRole::Admin(admin) => {
                let polled = admin.poll_association(now, is_wakeup_pending, commands, end);
                if let Some(text) = polled.error {
                    self.service.emit(TargetEvent::Error(format!("{}: {text}", self.peer)));
                }
                let reason = match polled.end_reason {
                    Some(AssociationEndReason::KeepAliveExpired) => {
                        Some(DisconnectReason::KeepAliveExpired)
                    }
                    Some(AssociationEndReason::EnableTimeout) => Some(DisconnectReason::NotEnabled),
                    Some(AssociationEndReason::Reset) => Some(DisconnectReason::Reset),
                    Some(AssociationEndReason::CredentialsRevoked) => {
                        Some(DisconnectReason::CredentialsRevoked)
                    }
                    Some(
                        AssociationEndReason::ConnectionLost
                        | AssociationEndReason::SubsystemRemoved,
                    ) => Some(DisconnectReason::AssociationEnded),
                    None => None,
                };
                if let Some(reason) = reason {
                    self.start_closing(now, reason);
                }
                polled.count + self.poll_authentication_if(now, is_wakeup_pending)
            }
            ConnectionRole::Discovery(discovery) => {
                let is_authenticating =
                    self.authentication.as_ref().is_some_and(|one| one.is_in_progress());
                let count = discovery.poll_event_requests(is_wakeup_pending, commands, end);
                if discovery.is_keep_alive_expired(now) {
                    self.start_closing(now, DisconnectReason::KeepAliveExpired);
                } else if is_wakeup_pending && self.service.is_closing() {
                    self.start_closing(now, DisconnectReason::ServerEnds);
                } else if discovery.is_revoked(now, is_wakeup_pending, is_authenticating) {
                    self.start_closing(now, DisconnectReason::CredentialsRevoked);
                }
                count + self.poll_authentication_if(now, is_wakeup_pending)
            }
            // Without Connect it belongs to no subsystem; a service that closes wakes it.
            ConnectionRole::AwaitingConnect | ConnectionRole::AwaitingAuthentication(_) => {
                if is_wakeup_pending && self.service.is_closing() {
                    self.start_closing(now, DisconnectReason::ServerEnds);
                }
                self.poll_authentication_if(now, is_wakeup_pending)
            }
            ConnectionRole::Closed => 0,
        }
    }

    /// Sends queued PDUs.
    #[inline]
    pub(super) fn send(&mut self, now: Instant) {
        let Some(stream) = &mut self.stream else { return };
        match self.send_state.send_queued(&mut **stream, &mut self.end, &mut self.commands) {
            Ok(count) => {
                if self.commands.has_unsent_slow_io() {
                    self.commands.report_sent_slow_io(now);
                }
                if !self.send_state.is_awaiting_send_space() {
                    self.blocked_since = None;
                } else if count > 0 || self.blocked_since.is_none() {
                    self.blocked_since = Some(now);
                }
                if self.send_state.is_awaiting_send_space()
                    || self.send_state.has_kernel_references()
                {
                    self.schedule_timeout_check(now);
                }
            }
            Err(why) => self.handle_stream_end(Some(why)),
        }
        if self.ends_sent && self.end.send_pieces().is_empty() && !self.end.has_more() {
            let reason = self.end_reason.take().unwrap_or(DisconnectReason::HostDisconnect);
            self.start_closing(now, reason);
        }
        if self.reason.is_some() {
            self.close_unless_term_req_pending(now);
        }
    }
}

impl Drop for TargetConnection {
    fn drop(&mut self) {
        self.service.remove_connection(self.id);
        self.close_stream(self.worked_at);
        if self.zero_copy_drain.is_some() {
            self.leak_referenced_memory();
        }
        let (connection, peer) = (self.id, self.peer.clone());
        let reason = self.reason.take().unwrap_or(DisconnectReason::ServerEnds);
        let association = self.ended_association().map(Box::new);
        self.service.emit(TargetEvent::Disconnected { connection, peer, reason, association });
        self.release_drained_queue(self.worked_at);
        match &self.role {
            ConnectionRole::Io(io) => {
                self.service.report_abandoned_commands(&self.peer, io.outstanding_commands())
            }
            _ => return self.commands.release_all(),
        }
        self.commands.leak_executing();
    }
}

impl fmt::Debug for TargetConnection {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("TargetConnection")
            .field("id", &self.id)
            .field("peer", &self.peer)
            .field("reason", &self.reason)
            .finish_non_exhaustive()
    }
}
