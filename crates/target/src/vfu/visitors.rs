//! Clients that come while another has the device: each is told so, and goes.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use base::Instant;
use host::local_socket::{Connection, Received};
use vfu::{HEADER_BYTES, Server};

use super::guest::PATIENCE;

/// Those who have come and have not been answered.
#[derive(Debug, Default)]
pub(super) struct Visitors {
    waiting: Vec<Visitor>,
}

#[derive(Debug)]
struct Visitor {
    connection: Connection,
    server: Server<Arc<OwnedFd>>,
    until: Instant,
}

/// So many are answered at a time; more are let go without a word.
const WAITING_MAX: usize = 8;

impl Visitors {
    /// The socket of whoever has come, if he is waited for.
    pub(super) fn receive(
        &mut self,
        now: Instant,
        connection: Connection,
    ) -> Option<BorrowedFd<'_>> {
        if self.waiting.len() >= WAITING_MAX {
            return None;
        }
        let (server, until) = (Server::turning_away(), now.after(PATIENCE));
        self.waiting.push(Visitor { connection, server, until });
        self.waiting.last().map(|visitor| visitor.connection.as_fd())
    }

    /// Answers whoever has said what he wants, and lets go of who says nothing.
    pub(super) fn turn(&mut self, now: Instant) {
        self.waiting.retain_mut(|visitor| visitor.until > now && !visitor.is_answered());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// When one that says nothing is let go.
    pub(super) fn wake_at(&self) -> Instant {
        let ends = self.waiting.iter().map(|visitor| visitor.until);
        ends.min().unwrap_or(Instant::NEVER)
    }
}

impl Visitor {
    fn is_answered(&mut self) -> bool {
        let mut buffer = [0; 4096];
        loop {
            let wanted = self.server.wanted().clamp(1, buffer.len().max(HEADER_BYTES));
            let mut files = Vec::new();
            match self.connection.receive_files(&mut buffer[..wanted], &mut files, 0) {
                Ok(Received::Nothing) => return false,
                Ok(Received::Bytes(count)) => {
                    let received = self.server.receive(&buffer[..count], std::iter::empty());
                    let answered = received.and_then(|()| self.server.next_request());
                    if answered.is_err() {
                        break;
                    }
                }
                Ok(Received::End) | Err(_) => return true,
            }
        }
        if let Some(answer) = self.server.outgoing() {
            // One short message into an empty socket: if it does not go, the end says enough.
            let _ = self.connection.send_files(answer.bytes, &[]);
        }
        true
    }
}
