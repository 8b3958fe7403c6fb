//! Control server: a thread that serves the method table on a Unix socket and sleeps while idle.
//!
//! It shares no lock and no memory with the data path except through the parts of the
//! [`ProcessParts`]. In one iteration every connection gets the same share: one receive, a few lines
//! answered, one send. A client that sends more than others therefore delays only itself.

mod connection;

use core::fmt;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::json;
use tenmil_base::{Instant, Interrupts, Span};
use tenmil_linux::clock::utc_now;
use tenmil_linux::local_socket::{LocalConnection, LocalListener, PeerCredentials};
use tenmil_linux::poll_set::{Interest, PollSet, ReadyDescriptor};
use tenmil_linux::runtime_directory::{RuntimeDirectory, current_uid};
use tenmil_linux::{Clock, EventFdVectors, NamedThread, StopFlag};

use crate::error::{ErrorCode, RpcError};
use crate::event::{ENDING, Event, EventReceiver};
use crate::method::MethodRegistry;
use crate::process_parts::ProcessParts;
use crate::session::{ServerContext, SessionLimits};
use connection::ServerConnection;

/// Running control server. Dropping it notifies subscribed clients, closes all connections, removes
/// the socket and joins the thread.
#[derive(Debug)]
pub struct RpcServer {
    path: PathBuf,
    wake: EventFdVectors,
    thread: Option<NamedThread<()>>,
}

/// Error of starting a server.
#[derive(Debug)]
pub struct ServerError {
    path: PathBuf,
    error: io::Error,
}

/// Largest number of connections.
const CONNECTIONS_MAX: usize = 64;
/// Largest number of connections of one process.
const CONNECTIONS_PER_PROCESS_MAX: usize = 16;
/// Largest number of events sent in an iteration.
const EVENTS_MAX: usize = 64;
/// Pause after a failed accept, usually caused by running out of file descriptors.
const ACCEPT_AGAIN: Span = Span::from_ms(100);

const LISTENER: u64 = 0;
const WAKE: u64 = 1;
const FIRST_SLOT: u64 = 2;
const READABLE: Interest = Interest { readable: true, writable: false };
const NOTHING: Interest = Interest { readable: false, writable: false };

impl RpcServer {
    /// Serves `table` and `state` as process `pid` in `directory`, and forwards events.
    pub fn start(
        directory: &RuntimeDirectory,
        pid: u32,
        table: &'static MethodRegistry,
        state: ProcessParts,
        announcements: EventReceiver,
    ) -> Result<Self, ServerError> {
        let path = directory.socket_of(pid);
        let refused = |error| ServerError { path: path.clone(), error };
        let listener = LocalListener::bind(directory, pid).map_err(refused)?;
        let wake = announcements.wake.clone();
        let room = ServerLoop::new(listener, table, state, announcements).map_err(refused)?;
        let thread = NamedThread::spawn("control", None, move |stop| room.run_until_stopped(stop));
        let thread = thread.map_err(refused)?;
        Ok(Self { path, wake, thread: Some(thread) })
    }

    /// Path of the socket.
    pub fn socket_path(&self) -> &Path {
        &self.path
    }
}

impl Drop for RpcServer {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        thread.stop_flag().set();
        self.wake.raise(0);
        // Dropping the thread joins it.
        drop(thread);
    }
}

impl fmt::Display for ServerError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "listen at {}: {}", self.path.display(), self.error)
    }
}

impl core::error::Error for ServerError {}

/// State of the server thread.
struct ServerLoop {
    listener: LocalListener,
    watch: PollSet,
    clock: Clock,
    table: &'static MethodRegistry,
    state: ProcessParts,
    announcements: EventReceiver,
    connections: Vec<Option<ServerConnection>>,
    /// Events of the last wait.
    ready: Vec<ReadyDescriptor>,
    /// Time until which accepting is paused.
    closed_until: Option<Instant>,
    /// Whether further events are pending.
    more_events: bool,
}

impl ServerLoop {
    fn new(
        listener: LocalListener,
        table: &'static MethodRegistry,
        state: ProcessParts,
        announcements: EventReceiver,
    ) -> io::Result<Self> {
        let watch = PollSet::new()?;
        watch.add(&listener, LISTENER, READABLE)?;
        let wake = announcements.wake.descriptor(0).ok_or(io::ErrorKind::InvalidInput)?;
        watch.add(wake, WAKE, READABLE)?;
        let connections = (0..CONNECTIONS_MAX).map(|_| None).collect();
        let clock = crate::event::event_clock();
        Ok(Self {
            listener,
            watch,
            clock,
            table,
            state,
            announcements,
            connections,
            ready: Vec::new(),
            closed_until: None,
            more_events: false,
        })
    }

    /// Serves until it is stopped.
    fn run_until_stopped(mut self, stop: &StopFlag) {
        while !stop.is_stopped() {
            match self.wait_for_work() {
                Ok(wants_in) => self.poll(wants_in),
                // Without epoll the loop would only spin.
                Err(_) => return,
            }
        }
        let text = "the process stops serving".to_owned();
        self.broadcast(&Event { kind: ENDING, text, about: json!({}) });
        let now = self.clock.now();
        self.connections.iter_mut().flatten().for_each(|connection| connection.flush(now));
    }

    /// Waits for work. Returns whether a connection is pending.
    fn wait_for_work(&mut self) -> io::Result<bool> {
        let at_once = self.more_events
            || self.connections.iter().flatten().any(ServerConnection::has_unsignaled_work);
        let connections = self.connections.iter().flatten().map(ServerConnection::deadline);
        let until = connections.chain(self.closed_until).min().unwrap_or(Instant::NEVER);
        let timeout = match until {
            _ if at_once => Some(Span::default()),
            Instant::NEVER => None,
            until => Some(until.since(self.clock.now())),
        };
        let mut wants_in = false;
        self.watch.wait(timeout, &mut self.ready)?;
        for ready in &self.ready {
            match ready.token {
                LISTENER => wants_in = true,
                WAKE => {
                    // Signals are masked: unmasking first ensures that a later event signals again,
                    // and everything emitted before is handled before the next wait.
                    self.announcements.wake.unmask(0);
                    self.more_events = true;
                }
                token => {
                    let connection = usize::try_from(token - FIRST_SLOT).ok();
                    let connection =
                        connection.and_then(|index| self.connections.get_mut(index)?.as_mut());
                    connection
                        .into_iter()
                        .for_each(|connection| connection.readable |= ready.readable);
                }
            }
        }
        Ok(wants_in)
    }

    /// One iteration: pending connections, events, and every connection once.
    fn poll(&mut self, wants_in: bool) {
        let now = self.clock.now();
        if self.closed_until.is_some_and(|until| until <= now) {
            self.closed_until = None;
            // If this fails, the next iteration due for another reason tries again.
            let _ = self.watch.modify(&self.listener, LISTENER, READABLE);
        }
        if wants_in && self.closed_until.is_none() {
            self.accept(now);
        }
        self.forward_events();
        for index in 0..self.connections.len() {
            let Some(connection) = &mut self.connections[index] else { continue };
            let served = ServerContext { table: self.table, state: &self.state };
            let events = connection.poll(now, served);
            if !connection.update_registration(&self.watch, FIRST_SLOT + index as u64) {
                // Closing removes it from the epoll set.
                self.connections[index] = None;
            }
            events.iter().for_each(|event| self.broadcast(event));
        }
    }

    fn accept(&mut self, now: Instant) {
        // Bounded, so that many pending connections do not delay the accepted ones.
        for _ in 0..CONNECTIONS_MAX {
            match self.listener.accept() {
                Ok(Some(connection)) => self.admit_connection(now, connection),
                Ok(None) => return,
                Err(_) => {
                    self.closed_until = Some(now.after(ACCEPT_AGAIN));
                    let _ = self.watch.modify(&self.listener, LISTENER, NOTHING);
                    return;
                }
            }
        }
    }

    /// Admits a connection, or sends an error.
    fn admit_connection(&mut self, now: Instant, connection: LocalConnection) {
        let Ok(peer) = connection.peer() else { return };
        let refusal =
            check_peer_uid(peer, current_uid()).and_then(|()| self.find_slot_for_peer(peer));
        let connection = ServerConnection::new(now, connection, peer, SessionLimits::USUAL);
        match refusal {
            Ok(index) => {
                if self.watch.add(&connection, FIRST_SLOT + index as u64, READABLE).is_ok() {
                    self.connections[index] = Some(connection);
                }
            }
            Err(refusal) => connection.reject(now, refusal),
        }
    }

    fn find_slot_for_peer(&self, peer: PeerCredentials) -> Result<usize, RpcError> {
        let of_peer = self
            .connections
            .iter()
            .flatten()
            .filter(|connection| connection.peer().pid == peer.pid);
        if of_peer.count() >= CONNECTIONS_PER_PROCESS_MAX {
            return Err(RpcError::usage(
                ErrorCode::Busy,
                format!(
                    "connect: process {} has {CONNECTIONS_PER_PROCESS_MAX} already, expected fewer",
                    peer.pid
                ),
            ));
        }
        self.connections.iter().position(Option::is_none).ok_or_else(|| {
            RpcError::environment(
                ErrorCode::Busy,
                format!(
                    "connect: all {CONNECTIONS_MAX} connections are taken, expected a free one"
                ),
            )
        })
    }

    fn forward_events(&mut self) {
        if !std::mem::take(&mut self.more_events) {
            return;
        }
        for _ in 0..EVENTS_MAX {
            let Some(event) = self.announcements.next() else { return };
            self.broadcast(&event);
        }
        self.more_events = true;
    }

    /// Sends an event to subscribed clients. It is sent when the connection is next processed, in
    /// this iteration.
    fn broadcast(&mut self, event: &Event) {
        let line = event.to_line(self.clock.now(), utc_now());
        self.connections.iter_mut().flatten().for_each(|connection| connection.queue_event(&line));
    }
}

/// Whether `peer` may control a process of user `uid`.
fn check_peer_uid(peer: PeerCredentials, uid: u32) -> Result<(), RpcError> {
    if peer.uid == uid || peer.uid == 0 {
        return Ok(());
    }
    Err(RpcError::usage(
        ErrorCode::NotAllowed,
        format!("connect: user is uid {}, expected uid {uid} or 0", peer.uid),
    ))
}

#[cfg(test)]
mod tests;
