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
use crate::tcp::io_queue::IoQueue;
use crate::tcp::poller::WakeSet;

impl TargetConnection {
    /// Creates the wake set, which allows the connection to sleep.
    pub(in crate::tcp) fn create_wake_set(&mut self) -> io::Result<PollerWake> {
        let source = self.stream.as_ref().map_or(WakeSource::None, |stream| stream.wake_source());
        let wake_set = WakeSet::new(source)?;
        let poller_wake = wake_set.poller_wake()?;
        self.wake_set = Some(wake_set);
        Ok(poller_wake)
    }

    pub(in crate::tcp) fn wake_set_and_queue(
        &mut self,
    ) -> (Option<&mut WakeSet>, Option<&mut IoQueue>) {
        let io = match &mut self.role {
            ConnectionRole::Io(io) => Some(&mut **io),
            _ => None,
        };
        (self.wake_set.as_mut(), io)
    }

    /// Releases what an idle connection does not need.
    pub(in crate::tcp) fn prepare_to_idle(&mut self) {
        self.commands.buffer_cache().release_idle_buffers();
    }

    /// Arms the stream. Returns true if it is ready already.
    pub(in crate::tcp) fn arm_stream(&mut self) -> bool {
        let wants_bytes = self.next_event == self.events.as_slice().len();
        let wants_space =
            self.send_state.is_awaiting_send_space() || self.send_state.has_kernel_references();
        self.stream.as_mut().is_some_and(|stream| stream.arm(wants_bytes, wants_space))
    }

    /// Whether only the socket, a wake-up or a deadline can make progress, and all of them wake the
    /// connection. Valid only after the stream was armed.
    pub(in crate::tcp) fn can_park(&self) -> bool {
        let covers_all_sources = self.wake_set.as_ref().is_some_and(WakeSet::covers_all_sources)
            && self.stream.as_ref().is_some_and(|stream| stream.is_fully_armed());
        covers_all_sources && self.is_idle()
    }

    /// Whether no command is outstanding, and the connection waits neither for memory, which other
    /// connections release without a wake-up, nor for a rate limit, nor for space in the stream.
    pub(in crate::tcp) fn is_idle(&self) -> bool {
        let is_idle = match &self.role {
            ConnectionRole::Io(io) => io.is_idle() && !io.wants_iteration(),
            ConnectionRole::AwaitingConnect
            | ConnectionRole::AwaitingAuthentication(_)
            | ConnectionRole::Admin(_)
            | ConnectionRole::Discovery(_) => true,
            ConnectionRole::Closed => false,
        };
        let waits_for_memory =
            self.commands.has_waiting() || self.next_event < self.events.as_slice().len();
        let is_sending =
            self.send_state.is_awaiting_send_space() || self.send_state.has_kernel_references();
        is_idle && !waits_for_memory && !is_sending && self.reason.is_none()
    }

    /// Whether a wake-up may be delayed: an admin queue that only receives Keep Alive.
    pub(in crate::tcp) fn may_coalesce_wakeups(&self) -> bool {
        matches!(&self.role, ConnectionRole::Admin(admin) if admin.is_last_command_keep_alive())
    }

    /// Returns to polling.
    pub(in crate::tcp) fn resume_polling(&mut self) {
        if let Some(stream) = &mut self.stream {
            stream.disarm();
        }
        if let ConnectionRole::Io(io) = &mut self.role {
            io.disarm();
        }
        self.recv_backoff.make_due();
    }

    /// Whether bytes are queued that were not offered to the stream.
    #[inline]
    pub(in crate::tcp) fn has_unsent(&self) -> bool {
        self.stream.is_some()
            && !self.send_state.is_awaiting_send_space()
            && (self.end.has_more() || self.send_state.has_unsent(&self.end))
    }

    /// Whether progress requires another iteration without any wake-up.
    pub(in crate::tcp) fn needs_iteration(&self) -> bool {
        let wants_iteration = match &self.role {
            ConnectionRole::Admin(admin) => admin.needs_iteration(),
            ConnectionRole::Io(io) => self.reason.is_some() && io.is_drained(),
            ConnectionRole::AwaitingConnect
            | ConnectionRole::AwaitingAuthentication(_)
            | ConnectionRole::Discovery(_)
            | ConnectionRole::Closed => false,
        };
        wants_iteration
            || self.commands.can_retry_allocation()
            || self.handle.is_wakeup_pending()
            || self.is_closed()
    }

    /// Prepares a migration. Returns true once the thread holds nothing of the connection: the
    /// stream is released and no command is executing. A connection whose stream is tied to its
    /// reactor continues unaffected.
    pub(in crate::tcp) fn prepare_migration(&mut self) -> bool {
        let is_idle = match &self.role {
            ConnectionRole::Io(io) => io.is_idle(),
            ConnectionRole::AwaitingConnect
            | ConnectionRole::AwaitingAuthentication(_)
            | ConnectionRole::Admin(_)
            | ConnectionRole::Discovery(_)
            | ConnectionRole::Closed => true,
        };
        // A closed connection can move once the devices and the kernel have released its memory.
        let is_released = self.is_drained() && self.zero_copy_drain.is_none();
        let Some(stream) = &mut self.stream else { return is_released };
        self.is_migrating = !stream.is_thread_bound();
        is_idle && stream.detach_from_thread()
    }

    /// Calls `put` with every block that the connection holds.
    pub(in crate::tcp) fn for_each_block(&self, put: &mut dyn FnMut(Range<u32>)) {
        self.commands.for_each_block(put);
    }

    /// Time at which the oldest outstanding data were requested from the host.
    pub(in crate::tcp) fn oldest_data_request_time(&self) -> Option<Instant> {
        self.commands.oldest_data_request().map(|(since, _)| since)
    }

    /// Whether other hosts wait for memory that its commands hold.
    pub(in crate::tcp) fn others_need_memory(&self) -> bool {
        self.commands.others_need_memory()
    }

    /// Host of its I/O queue, if it has one.
    pub(in crate::tcp) fn host_of_io_queue(&self) -> Option<&str> {
        match &self.role {
            ConnectionRole::Io(io) => Some(&io.association().host.nqn),
            _ => None,
        }
    }

    /// Completes a migration.
    pub(in crate::tcp) fn finish_migration(&mut self) {
        self.is_migrating = false;
        self.recv_backoff.make_due();
    }

    /// Closes the connection because its light thread ends.
    pub(in crate::tcp) fn close_on_thread_end(&mut self) {
        if self.reason.is_none() {
            self.start_closing(self.worked_at, DisconnectReason::ServerEnds);
        }
        self.close_unless_term_req_pending(self.worked_at);
    }

    pub(in crate::tcp) fn last_work_time(&self) -> Instant {
        self.worked_at
    }

    pub(in crate::tcp) fn connection_handle(&self) -> &Arc<ConnectionHandle> {
        &self.handle
    }

    /// Time of the next poll without any event.
    pub(in crate::tcp) fn next_poll_time(&self) -> Instant {
        let role = match &self.role {
            ConnectionRole::Admin(admin) => admin.wake_at(),
            ConnectionRole::Io(io) => io.wake_at(),
            ConnectionRole::Discovery(discovery) => discovery.wake_at(),
            ConnectionRole::AwaitingConnect
            | ConnectionRole::AwaitingAuthentication(_)
            | ConnectionRole::Closed => Instant::NEVER,
        };
        let limit = self.commands.limit_retry_at();
        self.earliest_deadline().min(role).min(self.next_release_check()).min(limit)
    }

    /// Mean latency of outstanding commands.
    pub(in crate::tcp) fn mean_command_latency(&self) -> Option<Span> {
        match &self.role {
            ConnectionRole::Io(io) => io.expected_latency(),
            _ => None,
        }
    }

    /// Whether commands complete so soon that spinning finds them.
    pub(in crate::tcp) fn may_complete_soon(&self) -> bool {
        match &self.role {
            ConnectionRole::Io(io) => !io.has_long_latency(),
            ConnectionRole::Admin(_) | ConnectionRole::Discovery(_) | ConnectionRole::Closed => {
                false
            }
            ConnectionRole::AwaitingConnect | ConnectionRole::AwaitingAuthentication(_) => true,
        }
    }

    /// Earliest deadline of the connection itself.
    #[inline]
    pub(in crate::tcp) fn earliest_deadline(&self) -> Instant {
        let blocked = match self.blocked_since {
            Some(since) => since.after(self.service.limits().time_limit),
            None => Instant::NEVER,
        };
        self.end.deadline().min(self.connect_by).min(blocked).min(self.timeout_check_at)
    }
}
