//! Closing of a connection, and its time limits.

use tenmil_base::{Instant, Span, StreamError};
use tenmil_nvme_tcp::{CloseReason, Connection, DataPlacement};

use super::{ConnectionRole, TargetConnection};
use crate::tcp::command_table::{Fault, StalledSend};
use crate::tcp::event::{DisconnectReason, TargetEvent};
#[cfg(test)]
use crate::tcp::injected_bug::{InjectedBug, is_injected};

/// Oldest data that a host owes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Debt {
    /// When it was requested, and the number of commands requested then.
    asked_at: Instant,
    count: usize,
    /// Time since which none of these commands has received all its data.
    since: Instant,
}

/// Factor by which the time limit for owed data may be exceeded while others wait for memory.
const DEBT_PATIENCE: u64 = 4;

/// Number of checks of unsent responses within the time limit.
const LOOKS_PATIENT: u8 = 8;

impl TargetConnection {
    /// Handles the end of the protocol engine.
    #[cold]
    pub(super) fn protocol_closed(&mut self, now: Instant, cause: CloseReason) {
        let reason = match cause {
            CloseReason::ProtocolError(refusal) => {
                DisconnectReason::ProtocolError(refusal.to_string())
            }
            CloseReason::Terminated(refusal) => DisconnectReason::Terminated(refusal.to_string()),
            CloseReason::InvalidTermination => {
                DisconnectReason::Terminated("by a request that makes no sense".to_owned())
            }
            CloseReason::ConnectTimeout => DisconnectReason::Timeout("open its connection"),
            CloseReason::PduTimeout => DisconnectReason::Timeout("send a unit that it had begun"),
            CloseReason::Closed | CloseReason::TruncatedPdu => DisconnectReason::Closed,
        };
        self.close_with(now, reason);
    }

    /// Closes the connection after an impossible request to the protocol engine: a bug of the
    /// target that must not affect others.
    #[cold]
    pub(super) fn faulted(&mut self, now: Instant, fault: Fault) {
        let Fault { tag, command, why } = fault;
        let opcode = command.opcode();
        self.close_with(
            now,
            DisconnectReason::Internal(format!("command {tag}, opcode {opcode:02x}h: {why}")),
        );
    }

    /// Closes the connection because a buffer lies outside the pool: a bug of the target.
    #[cold]
    pub(super) fn misplaced(&mut self, now: Instant, place: DataPlacement) {
        let DataPlacement { tag, offset, len_bytes } = place;
        let what = format!("{len_bytes} bytes from {offset} of command {tag} lie nowhere");
        self.close_with(now, DisconnectReason::Internal(what));
    }

    /// Handles the end of the stream.
    #[cold]
    pub(super) fn stream_ended(&mut self, why: Option<StreamError>) {
        if let Some(StreamError(text)) = why {
            self.reason.get_or_insert(DisconnectReason::Broken(text));
        }
        let rest = self.stream.as_ref().map_or(0, |stream| stream.buffered().len());
        self.reason.get_or_insert(DisconnectReason::Closed);
        self.end.handle_eof(rest, &mut self.events);
        self.events.clear();
        (self.next_event, self.taken) = (0, 0);
    }

    /// Starts closing. The first reason is kept.
    #[cold]
    pub(super) fn close_with(&mut self, now: Instant, reason: DisconnectReason) {
        self.reason.get_or_insert(reason);
        self.rooms.cancel_waiting();
        match &mut self.role {
            ConnectionRole::Io(io) => io.stop(now),
            ConnectionRole::Admin(admin) => admin.stop(),
            ConnectionRole::AwaitingConnect
            | ConnectionRole::Discovery(_)
            | ConnectionRole::Closed => {}
        }
    }

    /// Handles a stopped queue: closes the connection, unless the response to a Disconnect is still
    /// to be sent.
    #[cold]
    pub(super) fn look_after_stopped(&mut self, now: Instant) {
        if let ConnectionRole::Io(io) = &mut self.role
            && let Some(text) = io.next_report(now)
        {
            self.service.emit(TargetEvent::Trouble(format!("{}: {text}", self.peer)));
        }
        if self.reason.is_none() && !self.ends_sent {
            self.close_with(now, DisconnectReason::AssociationEnded);
        }
    }

    /// Closes the stream, unless a TermReq is still being sent.
    #[cold]
    pub(super) fn close(&mut self, now: Instant) {
        // Unhandled events are irrelevant now.
        self.events.clear();
        (self.next_event, self.taken) = (0, 0);
        self.rooms.cancel_waiting();
        match &mut self.role {
            ConnectionRole::Io(io) => io.stop(now),
            ConnectionRole::Admin(admin) => admin.stop(),
            ConnectionRole::AwaitingConnect
            | ConnectionRole::Discovery(_)
            | ConnectionRole::Closed => {}
        }
        let is_telling = matches!(self.reason, Some(DisconnectReason::ProtocolError(_)))
            && !self.end.is_closed();
        if !is_telling {
            self.close_stream(now);
        } else if self.end.is_write_closed()
            && let Some(stream) = &mut self.stream
        {
            stream.shutdown_write();
        }
        if self.stream.is_none() {
            self.leave_queue(now);
            self.rooms.give_back(self.draining.is_some());
        }
    }

    /// Releases the queue, if the devices have nothing outstanding.
    pub(super) fn leave_queue(&mut self, now: Instant) {
        match core::mem::replace(&mut self.role, ConnectionRole::Closed) {
            ConnectionRole::Io(io) if io.is_drained() => io.close_queue(now),
            role => self.role = role,
        }
    }

    /// Whether no command is executing in a device.
    pub(super) fn is_drained(&self) -> bool {
        match &self.role {
            ConnectionRole::Io(_) => false,
            ConnectionRole::Admin(admin) => admin.is_drained(),
            ConnectionRole::AwaitingConnect
            | ConnectionRole::Discovery(_)
            | ConnectionRole::Closed => true,
        }
    }

    /// Handles expired deadlines.
    #[cold]
    pub(super) fn expire(&mut self, now: Instant) -> usize {
        if now >= self.connect_by {
            self.connect_by = Instant::NEVER;
            let waits = self.reason.is_none() && self.connect_again(now);
            if !waits {
                self.close_with(now, DisconnectReason::Timeout("connect"));
            }
        }
        let time_limit = self.service.limits().time_limit;
        if self.blocked_since.is_some_and(|since| now >= since.after(time_limit)) {
            self.blocked_since = None;
            self.close_with(now, DisconnectReason::Timeout("take what it asked for"));
        }
        if now >= self.debts_check {
            self.check_debts(now);
        }
        self.end.handle_deadline(now, &mut self.events);
        self.handle_events(now) + 1
    }

    /// Schedules checks of how long responses hold pool memory.
    #[cold]
    pub(super) fn watch_untaken(&mut self, now: Instant) {
        self.debts_check = self.debts_check.min(now.after(self.interval()));
    }

    /// Interval of these checks.
    fn interval(&self) -> Span {
        Span { ns: self.service.limits().time_limit.ns / u64::from(LOOKS_PATIENT) }
    }

    /// Checks for overdue data and stalled responses.
    fn check_debts(&mut self, now: Instant) {
        self.debts_check = Instant::NEVER;
        if self.owes_for_too_long(now) {
            return self.close_with(now, DisconnectReason::Timeout("send what it was asked for"));
        }
        if self.debt.is_some() {
            self.watch_untaken(now);
        }
        match self.rooms.check_stalled_sends(LOOKS_PATIENT) {
            StalledSend::Nothing => {}
            StalledSend::Some => self.watch_untaken(now),
            StalledSend::TooLong => {
                self.close_with(
                    now,
                    DisconnectReason::Timeout("take what it asked for, while others waited"),
                );
            }
        }
    }
}

impl TargetConnection {
    /// Whether the host owes data for too long. The time limit starts when the data were requested,
    /// and restarts when all data of one of the oldest commands have arrived. Single bytes do not
    /// restart it: a host must complete what it started. While others wait for its memory, the host
    /// has four times the limit in total, however many commands it completes.
    fn owes_for_too_long(&mut self, now: Instant) -> bool {
        #[cfg(test)]
        if is_injected(InjectedBug::Renewed) {
            return false;
        }
        let time_limit = self.service.limits().time_limit;
        let Some((asked_at, count)) = self.rooms.owed_since() else {
            self.debt = None;
            return false;
        };
        let since = match self.debt {
            Some(debt) if (debt.asked_at, debt.count) == (asked_at, count) => debt.since,
            Some(debt) if debt.asked_at == asked_at && debt.count < count => debt.since,
            Some(_) => now,
            None => asked_at,
        };
        self.debt = Some(Debt { asked_at, count, since });
        let most = Span { ns: time_limit.ns * DEBT_PATIENCE };
        now >= since.after(time_limit) || now >= asked_at.after(most) && self.rooms.is_missed()
    }
}
