//! Closing of a connection, and its time limits.

use tenmil_base::{Instant, Span, StreamError};
use tenmil_nvme_tcp::{CloseReason, Connection, DataPlacement};

use super::{ConnectionRole, TargetConnection};
use crate::tcp::command_table::{ProtocolCallFault, StalledSend};
use crate::tcp::event::{DisconnectReason, EndedAssociation, TargetEvent};
#[cfg(test)]
use crate::tcp::injected_bug::{InjectedBug, is_injected};

/// Oldest outstanding data of a host.
#[derive(Clone, Copy, Debug)]
pub(super) struct OldestAwaitedData {
    /// Time of the request, and the number of commands whose data were requested then.
    requested_at: Instant,
    count: usize,
    /// Time since which none of these commands has received all its data.
    since: Instant,
}

/// Factor by which the time limit for requested data may be exceeded while others wait for memory.
const DATA_TIMEOUT_FACTOR: u64 = 4;

/// Number of checks of unsent responses within the time limit.
const SEND_CHECKS_MAX: u8 = 8;

impl TargetConnection {
    /// Handles the end of the protocol engine.
    #[cold]
    pub(super) fn handle_protocol_close(&mut self, now: Instant, close_reason: CloseReason) {
        let reason = match close_reason {
            CloseReason::ProtocolError(violation) => {
                DisconnectReason::ProtocolError(violation.to_string())
            }
            CloseReason::Terminated(violation) => {
                DisconnectReason::Terminated(violation.to_string())
            }
            CloseReason::InvalidTermination => {
                DisconnectReason::Terminated("by an invalid termination request".to_owned())
            }
            CloseReason::ConnectTimeout => DisconnectReason::Timeout("send ICReq"),
            CloseReason::PduTimeout => DisconnectReason::Timeout("complete a PDU"),
            CloseReason::Closed | CloseReason::TruncatedPdu => DisconnectReason::Closed,
        };
        self.start_closing(now, reason);
    }

    /// Closes the connection after an invalid call of the protocol engine: a bug of the
    /// target that must not affect other connections.
    #[cold]
    pub(super) fn close_for_invalid_call(&mut self, now: Instant, fault: ProtocolCallFault) {
        let ProtocolCallFault { tag, command, why } = fault;
        let opcode = command.opcode();
        self.start_closing(
            now,
            DisconnectReason::Internal(format!("command {tag}, opcode {opcode:02x}h: {why}")),
        );
    }

    /// Closes the connection because a buffer lies outside the pool: a bug of the target.
    #[cold]
    pub(super) fn close_for_invalid_buffer(&mut self, now: Instant, placement: DataPlacement) {
        let DataPlacement { tag, offset, len_bytes } = placement;
        let what =
            format!("{len_bytes} bytes from {offset} of command {tag} lie outside the buffer pool");
        self.start_closing(now, DisconnectReason::Internal(what));
    }

    /// Handles the end of the stream.
    #[cold]
    pub(super) fn handle_stream_end(&mut self, why: Option<StreamError>) {
        if let Some(StreamError(text)) = why {
            self.reason.get_or_insert(DisconnectReason::Broken(text));
        }
        let unconsumed = self.stream.as_ref().map_or(0, |stream| stream.buffered().len());
        self.reason.get_or_insert(DisconnectReason::Closed);
        self.end.handle_eof(unconsumed, &mut self.events);
        self.events.clear();
        (self.next_event, self.consumed) = (0, 0);
    }

    /// Starts closing. The first reason is kept.
    #[cold]
    pub(super) fn start_closing(&mut self, now: Instant, reason: DisconnectReason) {
        self.reason.get_or_insert(reason);
        self.commands.cancel_waiting();
        match &mut self.role {
            ConnectionRole::Io(io) => io.stop_commands(now),
            ConnectionRole::Admin(admin) => admin.end_association(),
            ConnectionRole::AwaitingConnect
            | ConnectionRole::AwaitingAuthentication(_)
            | ConnectionRole::Discovery(_)
            | ConnectionRole::Closed => {}
        }
    }

    /// Handles a stopped queue: closes the connection, unless the response to a Disconnect is still
    /// to be sent.
    #[cold]
    pub(super) fn handle_stopped_queue(&mut self, now: Instant) {
        if let ConnectionRole::Io(io) = &mut self.role
            && let Some(text) = io.next_drain_report(now)
        {
            self.service.emit(TargetEvent::Error(format!("{}: {text}", self.peer)));
        }
        if self.reason.is_none() && !self.ends_sent {
            self.start_closing(now, DisconnectReason::AssociationEnded);
        }
    }

    /// Closes the stream, unless a TermReq is still being sent.
    #[cold]
    pub(super) fn close_unless_term_req_pending(&mut self, now: Instant) {
        // Unhandled events are irrelevant now.
        self.events.clear();
        (self.next_event, self.consumed) = (0, 0);
        self.commands.cancel_waiting();
        match &mut self.role {
            ConnectionRole::Io(io) => io.stop_commands(now),
            ConnectionRole::Admin(admin) => admin.end_association(),
            ConnectionRole::AwaitingConnect
            | ConnectionRole::AwaitingAuthentication(_)
            | ConnectionRole::Discovery(_)
            | ConnectionRole::Closed => {}
        }
        let is_sending_term_req = matches!(self.reason, Some(DisconnectReason::ProtocolError(_)))
            && !self.end.is_closed();
        if !is_sending_term_req {
            self.close_stream(now);
        } else if self.end.is_write_closed()
            && let Some(stream) = &mut self.stream
        {
            stream.shutdown_write();
        }
        if self.stream.is_none() {
            self.release_drained_queue(now);
            self.commands.release_buffers(self.zero_copy_drain.is_some());
        }
    }

    /// Releases the queue, if the devices have nothing outstanding.
    pub(super) fn release_drained_queue(&mut self, now: Instant) {
        match core::mem::replace(&mut self.role, ConnectionRole::Closed) {
            ConnectionRole::Io(io) if io.is_drained() => io.close_queue(now),
            role => self.role = role,
        }
    }

    /// The association that ends with this connection, which is that of its admin queue. Its I/O queues are closed
    /// by now, unless a device has not completed their commands.
    pub(super) fn ended_association(&self) -> Option<EndedAssociation> {
        let ConnectionRole::Admin(admin) = &self.role else { return None };
        let association = admin.association();
        Some(EndedAssociation {
            host: association.host.nqn.clone(),
            subsystem: association.export().nqn().to_owned(),
            cntlid: association.cntlid,
            lasted: self.worked_at.since(self.accepted_at),
            totals: association.totals_of_closed_queues(),
        })
    }

    /// Whether no command is executing in a device.
    pub(super) fn is_drained(&self) -> bool {
        match &self.role {
            ConnectionRole::Io(_) => false,
            ConnectionRole::Admin(admin) => admin.are_io_queues_gone(),
            ConnectionRole::AwaitingConnect
            | ConnectionRole::AwaitingAuthentication(_)
            | ConnectionRole::Discovery(_)
            | ConnectionRole::Closed => true,
        }
    }

    /// Handles expired deadlines.
    #[cold]
    pub(super) fn handle_deadlines(&mut self, now: Instant) -> usize {
        if now >= self.connect_by {
            self.connect_by = Instant::NEVER;
            let waits = self.reason.is_none()
                && (self.retry_pending_connect(now) || self.check_authentication(now));
            if !waits {
                self.start_closing(now, DisconnectReason::Timeout("connect"));
            }
        }
        let time_limit = self.service.limits().time_limit;
        if self.blocked_since.is_some_and(|since| now >= since.after(time_limit)) {
            self.blocked_since = None;
            self.start_closing(now, DisconnectReason::Timeout("receive requested data"));
        }
        if now >= self.timeout_check_at {
            self.check_transfer_timeouts(now);
        }
        if self.commands.is_stream_blocked_by_limits() {
            // The host cannot complete a PDU that is not read.
            self.end.restart_pdu_timeout(now);
        }
        self.end.handle_deadline(now, &mut self.events);
        self.handle_events(now) + 1
    }

    /// Schedules checks of how long responses hold pool memory.
    #[cold]
    pub(super) fn schedule_timeout_check(&mut self, now: Instant) {
        self.timeout_check_at = self.timeout_check_at.min(now.after(self.timeout_check_interval()));
    }

    /// Interval of these checks.
    fn timeout_check_interval(&self) -> Span {
        Span { ns: self.service.limits().time_limit.ns / u64::from(SEND_CHECKS_MAX) }
    }

    /// Checks for overdue data and stalled responses.
    fn check_transfer_timeouts(&mut self, now: Instant) {
        self.timeout_check_at = Instant::NEVER;
        if self.is_host_data_overdue(now) {
            return self.start_closing(now, DisconnectReason::Timeout("send requested data"));
        }
        if self.awaited_data.is_some() {
            self.schedule_timeout_check(now);
        }
        match self.commands.check_stalled_sends(SEND_CHECKS_MAX) {
            StalledSend::None => {}
            StalledSend::Waiting => self.schedule_timeout_check(now),
            StalledSend::TimedOut => {
                self.start_closing(
                    now,
                    DisconnectReason::Timeout(
                        "receive requested data while others waited for memory",
                    ),
                );
            }
        }
    }
}

impl TargetConnection {
    /// Whether requested data are overdue. The time limit starts when the data were requested,
    /// and restarts when all data of one of the oldest commands have arrived. Single bytes do not
    /// restart it: a host must complete what it started. While others wait for its memory, the host
    /// has four times the limit in total, however many commands it completes.
    fn is_host_data_overdue(&mut self, now: Instant) -> bool {
        #[cfg(test)]
        if is_injected(InjectedBug::Renewed) {
            return false;
        }
        let time_limit = self.service.limits().time_limit;
        let Some((requested_at, count)) = self.commands.oldest_data_request() else {
            self.awaited_data = None;
            return false;
        };
        if self.commands.is_stream_blocked_by_limits() {
            // The data may lie behind those that are not read.
            self.awaited_data = Some(OldestAwaitedData { requested_at, count, since: now });
            return false;
        }
        let since = match self.awaited_data {
            Some(awaited_data)
                if (awaited_data.requested_at, awaited_data.count) == (requested_at, count) =>
            {
                awaited_data.since
            }
            Some(awaited_data)
                if awaited_data.requested_at == requested_at && awaited_data.count < count =>
            {
                awaited_data.since
            }
            Some(_) => now,
            None => requested_at,
        };
        self.awaited_data = Some(OldestAwaitedData { requested_at, count, since });
        let limit = Span { ns: time_limit.ns * DATA_TIMEOUT_FACTOR };
        now >= since.after(time_limit)
            || now >= requested_at.after(limit) && self.commands.others_need_memory()
    }
}
