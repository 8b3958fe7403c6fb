//! Clients that connect while another one has the device: each gets the error `EBUSY`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use tenmil_base::Instant;
use tenmil_linux::local_socket::{LocalConnection, RecvResult};
use tenmil_vfio_user::{HEADER_BYTES, Server};

use super::endpoint::TIME_LIMIT;

/// Rejected clients whose error reply is not yet sent.
#[derive(Debug, Default)]
pub(super) struct RejectedClients {
    waiting: Vec<RejectedClient>,
}

#[derive(Debug)]
struct RejectedClient {
    connection: LocalConnection,
    server: Server<Arc<OwnedFd>>,
    until: Instant,
}

/// Largest number of clients that get a reply; further ones are closed without a reply.
const WAITING_MAX: usize = 8;

impl RejectedClients {
    /// Adds a client. Returns its socket, if it will get a reply.
    pub(super) fn add_client(
        &mut self,
        now: Instant,
        connection: LocalConnection,
    ) -> Option<BorrowedFd<'_>> {
        if self.waiting.len() >= WAITING_MAX {
            return None;
        }
        let (server, until) = (Server::new_rejecting(), now.after(TIME_LIMIT));
        self.waiting.push(RejectedClient { connection, server, until });
        self.waiting.last().map(|visitor| visitor.connection.as_fd())
    }

    /// Replies to clients whose first message has arrived, and closes those that are silent for too
    /// long.
    pub(super) fn poll(&mut self, now: Instant) {
        self.waiting.retain_mut(|visitor| visitor.until > now && !visitor.poll_until_replied());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Earliest deadline of a silent client.
    pub(super) fn wake_at(&self) -> Instant {
        let ends = self.waiting.iter().map(|visitor| visitor.until);
        ends.min().unwrap_or(Instant::NEVER)
    }
}

impl RejectedClient {
    fn poll_until_replied(&mut self) -> bool {
        let mut buffer = [0; 4096];
        loop {
            let len = self.server.receive_len().clamp(1, buffer.len().max(HEADER_BYTES));
            let mut files = Vec::new();
            match self.connection.receive_files(&mut buffer[..len], &mut files, 0) {
                Ok(RecvResult::WouldBlock) => return false,
                Ok(RecvResult::Bytes(count)) => {
                    let received =
                        self.server.handle_received(&buffer[..count], std::iter::empty());
                    let request = received.and_then(|()| self.server.next_request());
                    if request.is_err() {
                        break;
                    }
                }
                Ok(RecvResult::Eof) | Err(_) => return true,
            }
        }
        if let Some(completion) = self.server.next_outgoing() {
            // One short message into an empty socket buffer. If it cannot be sent, closing the
            // socket suffices.
            let _ = self.connection.send_files(completion.bytes, &[]);
        }
        true
    }
}
