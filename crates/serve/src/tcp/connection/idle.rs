//! Arming, sleeping and deadlines of a connection.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use tenmil_base::{Instant, Span, WakeSource};
use tenmil_nvme_tcp::Connection;
use tenmil_reactor::PollerWake;

use super::{ConnectionRole, TargetConnection};
use crate::tcp::connection_handle::ConnectionHandle;
use crate::tcp::event::DisconnectReason;
use crate::tcp::io::Io;
use crate::tcp::poller::WakeSet;

impl TargetConnection {
    /// Creates the wake set, which allows the connection to sleep.
    pub(in crate::tcp) fn create_wake_set(&mut self) -> io::Result<PollerWake> {
        let source = self.stream.as_ref().map_or(WakeSource::None, |stream| stream.wake_source());
        let wake_set = WakeSet::new(source)?;
        let woken_by = wake_set.woken_by()?;
        self.wake_set = Some(wake_set);
        Ok(woken_by)
    }

    pub(in crate::tcp) fn bed_and_queue(&mut self) -> (Option<&mut WakeSet>, Option<&mut Io>) {
        let io = match &mut self.role {
            ConnectionRole::Io(io) => Some(&mut **io),
            _ => None,
        };
        (self.wake_set.as_mut(), io)
    }

    /// Releases what an idle connection does not need.
    pub(in crate::tcp) fn rest(&mut self) {
        self.rooms.quota().release_idle();
        if let ConnectionRole::Io(io) = &mut self.role {
            io.publish_counters(self.worked_at);
        }
    }

    /// Arms the stream. Returns true if it is ready already.
    pub(in crate::tcp) fn arm_stream(&mut self) -> bool {
        let wants_bytes = self.next_event == self.events.as_slice().len();
        let wants_space = self.outgoing.is_blocked() || self.outgoing.is_read();
        self.stream.as_mut().is_some_and(|stream| stream.arm(wants_bytes, wants_space))
    }

    /// Whether only the socket, a wake-up or a deadline can make progress, and all of them wake the
    /// connection. Valid only after the stream was armed.
    pub(in crate::tcp) fn is_quiet(&self) -> bool {
        let hears_all = self.wake_set.as_ref().is_some_and(WakeSet::hears_all)
            && self.stream.as_ref().is_some_and(|stream| stream.is_fully_armed());
        hears_all && self.is_idle()
    }

    /// Whether nothing is outstanding, and nothing is awaited from another connection that gives no
    /// wake-up: memory for data, or for received data.
    pub(in crate::tcp) fn is_idle(&self) -> bool {
        let is_idle = match &self.role {
            ConnectionRole::Io(io) => io.is_idle() && !io.queue_wants_turn(),
            ConnectionRole::AwaitingConnect
            | ConnectionRole::Admin(_)
            | ConnectionRole::Discovery(_) => true,
            ConnectionRole::Closed => false,
        };
        let waits_for_memory =
            self.rooms.has_waiting() || self.next_event < self.events.as_slice().len();
        let is_sending = self.outgoing.is_blocked() || self.outgoing.is_read();
        is_idle && !waits_for_memory && !is_sending && self.reason.is_none()
    }

    /// Whether a wake-up may be delayed: an admin queue that only receives Keep Alive.
    pub(in crate::tcp) fn may_coalesce_wakeups(&self) -> bool {
        matches!(&self.role, ConnectionRole::Admin(admin) if admin.is_only_kept_alive())
    }

    /// Returns to polling.
    pub(in crate::tcp) fn awake(&mut self) {
        if let Some(stream) = &mut self.stream {
            stream.disarm();
        }
        if let ConnectionRole::Io(io) = &mut self.role {
            io.disarm();
        }
        self.looks.now();
    }

    /// Whether bytes are queued that were not offered to the stream.
    #[inline]
    pub(in crate::tcp) fn has_unsent(&self) -> bool {
        self.stream.is_some()
            && !self.outgoing.is_blocked()
            && (self.end.has_more() || self.outgoing.has_unsent(&self.end))
    }

    /// Whether progress requires another iteration without any wake-up.
    pub(in crate::tcp) fn is_behind(&self) -> bool {
        let wants_iteration = match &self.role {
            ConnectionRole::Admin(admin) => admin.wants_iteration(),
            ConnectionRole::Io(io) => self.reason.is_some() && io.is_drained(),
            ConnectionRole::AwaitingConnect
            | ConnectionRole::Discovery(_)
            | ConnectionRole::Closed => false,
        };
        wants_iteration || self.rooms.can_go_on() || self.handle.is_called() || self.is_over()
    }

    /// Prepares a migration. Returns true once the thread holds nothing of the connection: the
    /// stream is released and no command is executing. A connection whose stream is tied to its
    /// reactor continues unaffected.
    pub(in crate::tcp) fn may_move(&mut self) -> bool {
        let is_idle = match &self.role {
            ConnectionRole::Io(io) => io.is_idle(),
            ConnectionRole::AwaitingConnect
            | ConnectionRole::Admin(_)
            | ConnectionRole::Discovery(_)
            | ConnectionRole::Closed => true,
        };
        // A closed connection can move once the devices and the kernel have released its memory.
        let has_let_go = self.is_drained() && self.draining.is_none();
        let Some(stream) = &mut self.stream else { return has_let_go };
        self.is_travelling = !stream.is_thread_bound();
        is_idle && stream.detach_thread()
    }

    /// Calls `put` with every block that the connection holds.
    pub(in crate::tcp) fn each_block(&self, put: &mut dyn FnMut(Range<u32>)) {
        self.rooms.each_block(put);
    }

    /// Time since which its host has owed the oldest data.
    pub(in crate::tcp) fn owed_since(&self) -> Option<Instant> {
        self.rooms.owed_since().map(|(since, _)| since)
    }

    /// Whether other hosts wait for memory that its commands hold.
    pub(in crate::tcp) fn is_missed(&self) -> bool {
        self.rooms.is_missed()
    }

    /// Host of its I/O queue, if it has one.
    pub(in crate::tcp) fn io_host(&self) -> Option<&str> {
        match &self.role {
            ConnectionRole::Io(io) => Some(&io.association().host.nqn),
            _ => None,
        }
    }

    /// Completes a migration.
    pub(in crate::tcp) fn arrive(&mut self) {
        self.is_travelling = false;
        self.looks.now();
    }

    /// Closes the connection because its light thread ends.
    pub(in crate::tcp) fn leave(&mut self) {
        if self.reason.is_none() {
            self.close_with(self.worked_at, DisconnectReason::ServerEnds);
        }
        self.close(self.worked_at);
    }

    pub(in crate::tcp) fn worked_at(&self) -> Instant {
        self.worked_at
    }

    pub(in crate::tcp) fn connection_handle(&self) -> &Arc<ConnectionHandle> {
        &self.handle
    }

    /// Time of the next poll without any event.
    pub(in crate::tcp) fn next_deadline(&self) -> Instant {
        let role = match &self.role {
            ConnectionRole::Admin(admin) => admin.wake_at(),
            ConnectionRole::Io(io) => io.wake_at(),
            ConnectionRole::Discovery(discovery) => discovery.wake_at(),
            ConnectionRole::AwaitingConnect | ConnectionRole::Closed => Instant::NEVER,
        };
        self.deadline().min(role).min(self.next_release())
    }

    /// Mean latency of outstanding commands.
    pub(in crate::tcp) fn latency(&self) -> Option<Span> {
        match &self.role {
            ConnectionRole::Io(io) => io.expected_latency(),
            _ => None,
        }
    }

    /// Earliest deadline of the connection itself.
    #[inline]
    pub(in crate::tcp) fn deadline(&self) -> Instant {
        let blocked = match self.blocked_since {
            Some(since) => since.after(self.service.limits().time_limit),
            None => Instant::NEVER,
        };
        self.end.deadline().min(self.connect_by).min(blocked).min(self.debts_check)
    }
}
