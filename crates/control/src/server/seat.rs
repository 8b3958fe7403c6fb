//! A connection that is served: a session with a socket.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use base::Instant;
use host::local_socket::{Connection, Peer, Received};
use host::watch::{Interest, Watch};

use crate::event::Event;
use crate::refusal::Refusal;
use crate::session::{Limits, Served, Session, Step};

/// A connection that is served.
pub(super) struct Seat {
    connection: Connection,
    peer: Peer,
    session: Session,
    /// The watch reported something to receive.
    pub(super) readable: bool,
    /// What the watch looks for.
    interest: Interest,
    /// An event or an end was told since the last turn.
    told: bool,
    broken: bool,
}

/// Lines that are answered in one turn.
const LINES_MAX: usize = 4;
/// Descriptors that come with them at most.
const FILES_MAX: usize = 1;
/// Bytes that are taken in one turn.
const READ_LEN: usize = 16 << 10;

impl Seat {
    pub(super) fn new(now: Instant, connection: Connection, peer: Peer, limits: Limits) -> Self {
        let client = format!("process {} of uid {}", peer.pid, peer.uid);
        Self {
            connection,
            peer,
            session: Session::new(now, client, limits),
            readable: false,
            interest: Interest { readable: true, writable: false },
            told: false,
            broken: false,
        }
    }

    pub(super) fn peer(&self) -> Peer {
        self.peer
    }

    /// Whether there is something to do that no descriptor will tell of.
    pub(super) fn has_work(&self) -> bool {
        self.told || self.session.can_step()
    }

    pub(super) fn deadline(&self) -> Instant {
        self.session.deadline()
    }

    /// Tells an event, in the next turn.
    pub(super) fn tell(&mut self, line: &[u8]) {
        let before = self.session.to_send().len();
        self.session.tell(line);
        self.told |= self.session.to_send().len() != before || self.session.is_over().is_some();
    }

    /// Says why there is no seat, if that can be said without waiting.
    pub(super) fn turn_away(mut self, now: Instant, refusal: Refusal) {
        self.session.refuse(refusal);
        self.flush(now);
    }

    /// One turn: one read, some lines, one write. Gives back what is to be announced.
    pub(super) fn turn(&mut self, now: Instant, served: Served<'_>) -> Vec<Event> {
        self.told = false;
        if std::mem::take(&mut self.readable) {
            self.receive(now);
        }
        let mut events = Vec::new();
        for _ in 0..LINES_MAX {
            match self.session.step(served) {
                Step::Nothing => break,
                Step::Answered => {}
                Step::Changed(event) => events.push(event),
            }
        }
        self.flush(now);
        self.session.expire(now);
        events
    }

    fn receive(&mut self, now: Instant) {
        let mut bytes = [0; READ_LEN];
        let room = self.session.room().min(READ_LEN);
        if room == 0 {
            return;
        }
        let mut files = Vec::new();
        let received = self.connection.receive_files(&mut bytes[..room], &mut files, FILES_MAX);
        files.into_iter().for_each(|file| self.session.pass(file));
        match received {
            Ok(Received::Bytes(count)) => {
                self.session.receive(now, &bytes[..count]);
            }
            Ok(Received::Nothing) => {}
            Ok(Received::End) => self.session.receive_end(),
            Err(_) => self.broken = true,
        }
    }

    /// Sends what there is to send, as far as it goes.
    pub(super) fn flush(&mut self, now: Instant) {
        if self.session.to_send().is_empty() {
            return;
        }
        match self.connection.send(self.session.to_send()) {
            Ok(count) => self.session.sent(now, count),
            Err(_) => self.broken = true,
        }
    }

    /// Tells the watch what to look for. Whether the seat is kept.
    pub(super) fn keep(&mut self, watch: &Watch, token: u64) -> bool {
        if self.broken || self.session.is_over().is_some() {
            return false;
        }
        let wanted = Interest {
            readable: self.session.room() > 0,
            writable: !self.session.to_send().is_empty(),
        };
        if wanted != self.interest {
            self.interest = wanted;
            return self.change(watch, token).is_ok();
        }
        true
    }

    fn change(&self, watch: &Watch, token: u64) -> io::Result<()> {
        watch.change(&self.connection, token, self.interest)
    }
}

impl AsFd for Seat {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}
