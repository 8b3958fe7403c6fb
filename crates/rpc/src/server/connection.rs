//! Served connection: a session and its socket.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use tenmil_base::Instant;
use tenmil_linux::local_socket::{LocalConnection, PeerCredentials, RecvResult};
use tenmil_linux::poll_set::{Interest, PollSet};

use crate::error::RpcError;
use crate::event::Event;
use crate::session::{LineResult, ServerContext, Session, SessionLimits};

/// Served connection.
pub(super) struct ServerConnection {
    connection: LocalConnection,
    peer: PeerCredentials,
    session: Session,
    /// Whether the socket was reported readable.
    pub(super) readable: bool,
    /// Readiness that the epoll set waits for.
    interest: Interest,
    /// Whether an event or an end was queued since the last iteration.
    has_queued: bool,
    broken: bool,
}

/// Largest number of lines processed in an iteration.
const LINES_MAX: usize = 4;
/// Largest number of file descriptors per receive call.
const FILES_MAX: usize = 1;
/// Largest number of bytes received in an iteration.
const READ_LEN: usize = 16 << 10;

impl ServerConnection {
    pub(super) fn new(
        now: Instant,
        connection: LocalConnection,
        peer: PeerCredentials,
        limits: SessionLimits,
    ) -> Self {
        let client = format!("process {} of uid {}", peer.pid, peer.uid);
        Self {
            connection,
            peer,
            session: Session::new(now, client, limits),
            readable: false,
            interest: Interest { readable: true, writable: false },
            has_queued: false,
            broken: false,
        }
    }

    pub(super) fn peer(&self) -> PeerCredentials {
        self.peer
    }

    /// Whether there is work that no file descriptor will signal.
    pub(super) fn has_unsignaled_work(&self) -> bool {
        self.has_queued || self.session.can_process_line()
    }

    pub(super) fn deadline(&self) -> Instant {
        self.session.deadline()
    }

    /// Queues an event for the next iteration.
    pub(super) fn queue_event(&mut self, line: &[u8]) {
        let before = self.session.unsent_bytes().len();
        self.session.queue_event(line);
        self.has_queued |=
            self.session.unsent_bytes().len() != before || self.session.close_reason().is_some();
    }

    /// Sends an error to a rejected client, if that is possible without blocking.
    pub(super) fn reject(mut self, now: Instant, refusal: RpcError) {
        self.session.reject_client(refusal);
        self.flush(now);
    }

    /// One iteration: one receive, a few lines, one send. Returns the events to emit.
    pub(super) fn poll(&mut self, now: Instant, served: ServerContext<'_>) -> Vec<Event> {
        self.has_queued = false;
        if std::mem::take(&mut self.readable) {
            self.receive(now);
        }
        let mut events = Vec::new();
        for _ in 0..LINES_MAX {
            match self.session.process_line(served) {
                LineResult::Nothing => break,
                LineResult::Replied => {}
                LineResult::Changed(event) => events.push(event),
            }
        }
        self.flush(now);
        self.session.close_if_timed_out(now);
        events
    }

    fn receive(&mut self, now: Instant) {
        let mut bytes = [0; READ_LEN];
        let room = self.session.receive_capacity_bytes().min(READ_LEN);
        if room == 0 {
            return;
        }
        let mut files = Vec::new();
        let received = self.connection.receive_files(&mut bytes[..room], &mut files, FILES_MAX);
        files.into_iter().for_each(|file| self.session.store_received_fd(file));
        match received {
            Ok(RecvResult::Bytes(count)) => {
                self.session.receive(now, &bytes[..count]);
            }
            Ok(RecvResult::WouldBlock) => {}
            Ok(RecvResult::Eof) => self.session.handle_stream_end(),
            Err(_) => self.broken = true,
        }
    }

    /// Sends as much as the socket accepts.
    pub(super) fn flush(&mut self, now: Instant) {
        if self.session.unsent_bytes().is_empty() {
            return;
        }
        match self.connection.send(self.session.unsent_bytes()) {
            Ok(count) => self.session.record_sent(now, count),
            Err(_) => self.broken = true,
        }
    }

    /// Updates the epoll registration. Returns false if the connection is to be closed.
    pub(super) fn update_registration(&mut self, watch: &PollSet, token: u64) -> bool {
        if self.broken || self.session.close_reason().is_some() {
            return false;
        }
        let wanted = Interest {
            readable: self.session.receive_capacity_bytes() > 0,
            writable: !self.session.unsent_bytes().is_empty(),
        };
        if wanted != self.interest {
            self.interest = wanted;
            return self.set_interest(watch, token).is_ok();
        }
        true
    }

    fn set_interest(&self, watch: &PollSet, token: u64) -> io::Result<()> {
        watch.modify(&self.connection, token, self.interest)
    }
}

impl AsFd for ServerConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}
