//! Which connections the server has, and which it admits.
//!
//! If all connections are taken, the one that has waited longest for a complete request is closed for a
//! new one, so that clients that connect and send nothing exclude no other.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;

use hyper::body::Bytes;
use tenmil_linux::local_socket::PeerCredentials;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::event_stream::EventQueue;
use crate::error::{ErrorCode, RpcError};
use crate::passed_fd::PassedFd;

/// Connections of a server.
#[derive(Default)]
pub(super) struct Connections {
    by_id: RefCell<BTreeMap<u64, Rc<ConnectionState>>>,
    last_id: Cell<u64>,
}

/// State of a connection that its task and the server share.
pub(super) struct ConnectionState {
    id: u64,
    pub(super) peer: Peer,
    /// Time since which it has waited for a complete request head; none while a request is processed.
    waits_since: Cell<Option<Instant>>,
    /// Tells the task to close the connection at once.
    pub(super) close: Notify,
    /// Tells the task to close the connection when the current response is sent.
    pub(super) finish: Notify,
    /// File descriptor that came with a request.
    pub(super) passed: PassedFd,
    /// Events to send, if it has subscribed.
    events: RefCell<Option<Rc<EventQueue>>>,
}

/// Client at the other end.
#[derive(Clone, Copy, Debug)]
pub(super) enum Peer {
    /// Process of this machine.
    Process(PeerCredentials),
    /// TCP client.
    Tcp { address: SocketAddr, security: TcpSecurity },
}

/// How a TCP connection is protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TcpSecurity {
    /// Not at all; it is from this machine.
    Plaintext,
    /// TLS. The client may be anybody.
    Tls,
    /// TLS with a verified certificate of the client.
    ClientCertificate,
}

/// Largest number of connections.
pub(super) const CONNECTIONS_MAX: usize = 128;
/// Largest number of connections of one process.
pub(super) const CONNECTIONS_PER_PROCESS_MAX: usize = 96;
/// Largest number of connections over TCP, so that some remain for the sockets.
pub(super) const TCP_CONNECTIONS_MAX: usize = 96;

impl Connections {
    /// Admits a connection, or returns the error to send.
    pub(super) fn admit(&self, peer: Peer) -> Result<Rc<ConnectionState>, RpcError> {
        let is_like_peer = |state: &&Rc<ConnectionState>| peer.shares_limit_with(state.peer);
        let (of_peer, limit) = {
            let by_id = self.by_id.borrow();
            (by_id.values().filter(is_like_peer).count(), peer.connections_max())
        };
        if of_peer >= limit && !self.close_longest_waiting(is_like_peer) {
            return Err(peer.too_many_error());
        }
        let is_full = self.by_id.borrow().len() >= CONNECTIONS_MAX;
        if is_full && !self.close_longest_waiting(|_| true) {
            let text = format!(
                "connect: all {CONNECTIONS_MAX} connections are taken, expected a free one"
            );
            return Err(RpcError::environment(ErrorCode::Busy, text));
        }
        let id = self.last_id.get() + 1;
        self.last_id.set(id);
        let state = Rc::new(ConnectionState {
            id,
            peer,
            waits_since: Cell::new(Some(Instant::now())),
            close: Notify::new(),
            finish: Notify::new(),
            passed: PassedFd::default(),
            events: RefCell::new(None),
        });
        self.by_id.borrow_mut().insert(id, Rc::clone(&state));
        Ok(state)
    }

    /// Closes one of the connections that wait for a request. Returns whether there was one.
    fn close_longest_waiting(&self, fits: impl Fn(&&Rc<ConnectionState>) -> bool) -> bool {
        let mut by_id = self.by_id.borrow_mut();
        let waiting = by_id.values().filter(&fits);
        let waiting = waiting.filter_map(|state| Some((state.waits_since.get()?, state.id)));
        let Some(found) = waiting.min().and_then(|(_, id)| by_id.remove(&id)) else {
            return false;
        };
        found.close.notify_one();
        true
    }

    /// Removes a connection that has ended.
    pub(super) fn remove(&self, state: &ConnectionState) {
        self.by_id.borrow_mut().remove(&state.id);
    }

    pub(super) fn has_subscribers(&self) -> bool {
        self.by_id.borrow().values().any(|state| state.events.borrow().is_some())
    }

    /// Queues an event for the clients that have subscribed to it. One that has too much unsent already
    /// is disconnected.
    pub(super) fn send_event(&self, kind: &str, text: &Bytes) {
        for state in self.by_id.borrow().values() {
            let events = state.events.borrow();
            if events.as_ref().is_some_and(|queue| !queue.queue_event(kind, text)) {
                state.close.notify_one();
            }
        }
    }

    /// Ends the event streams, and closes each connection when its response is sent.
    pub(super) fn finish_all(&self) {
        for state in self.by_id.borrow().values() {
            if let Some(queue) = &*state.events.borrow() {
                queue.end();
            }
            state.finish.notify_one();
        }
    }
}

impl ConnectionState {
    /// Description of the client, for events.
    pub(super) fn client_text(&self) -> String {
        match self.peer {
            Peer::Process(peer) => format!("process {} of uid {}", peer.pid, peer.uid),
            Peer::Tcp { address, .. } => format!("client {address}"),
        }
    }

    /// Records that a request is being processed.
    pub(super) fn begin_request(&self) {
        self.waits_since.set(None);
    }

    /// Records that a response was sent, and that the connection waits for the next request.
    pub(super) fn end_request(&self) {
        self.waits_since.set(Some(Instant::now()));
        self.events.take();
    }

    /// Subscribes to events.
    pub(super) fn subscribe(&self, queue: Rc<EventQueue>) {
        self.events.replace(Some(queue));
    }
}

impl Peer {
    /// Whether connections of both count for the same limit.
    fn shares_limit_with(self, other: Self) -> bool {
        match (self, other) {
            (Self::Process(one), Self::Process(other)) => one.pid == other.pid,
            (Self::Tcp { .. }, Self::Tcp { .. }) => true,
            _ => false,
        }
    }

    fn connections_max(self) -> usize {
        match self {
            Self::Process(_) => CONNECTIONS_PER_PROCESS_MAX,
            Self::Tcp { .. } => TCP_CONNECTIONS_MAX,
        }
    }

    fn too_many_error(self) -> RpcError {
        let text = match self {
            Self::Process(peer) => format!(
                "connect: process {} has {CONNECTIONS_PER_PROCESS_MAX} already, expected fewer",
                peer.pid
            ),
            Self::Tcp { .. } => {
                format!("connect: TCP clients have {TCP_CONNECTIONS_MAX} already, expected fewer")
            }
        };
        RpcError::usage(ErrorCode::Busy, text)
    }
}
