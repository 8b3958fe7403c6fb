//! Thread that runs the TLS handshakes of accepted sockets, so that none runs on a reactor.
//!
//! ```text
//!   Acceptor ─ socket ─► HandshakeThread ─ prelude ─► TLS handshake ─ socket, session ─► reactor
//!                              │              └────── plaintext ───── socket ─────────► reactor
//!                              └ refused: unknown key, limit, deadline, plaintext where TLS is required
//! ```
//!
//! A peer that has proved nothing costs this thread at most a millisecond, its memory until its deadline,
//! and one of a bounded number of places. Half of the places of all addresses are given up earlier:
//! when they are in use, further handshakes have a tenth of the time.

mod prelude;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::{Error, Instant, Span};
use tenmil_linux::eventfd_vectors::RemoteEventFd;
use tenmil_linux::poll_set::{Interest, PollSet, ReadyDescriptor};
use tenmil_linux::socket::HandshakeSocket;
use tenmil_linux::socket_stream::RecvResult;
use tenmil_linux::{Clock, NamedThread, StopFlag};
use tenmil_tls::{CipherIo, Received, ServerConfig, TlsError, TlsSession};

pub(crate) use self::prelude::{FirstBytePrelude, Prelude, PreludeStep};
use crate::peer_network::connection_limit_key_of_peer;

/// Receiver of the sockets whose handshake has ended.
pub(crate) trait HandshakeOwner: Send + 'static {
    /// What the owner has to know of a socket: the port at which it was accepted.
    type Origin: Copy + Send;

    /// Configuration of a TLS session at `origin`.
    fn tls_config(&self, origin: Self::Origin) -> Result<ServerConfig, Error>;

    /// Whether the peer may connect at `origin`, before anything is received from it.
    fn permits(&self, peer: &str, origin: Self::Origin) -> bool {
        let _ = (peer, origin);
        true
    }

    /// Takes over a socket.
    fn open(&mut self, finished: FinishedHandshake<Self::Origin>) -> Result<(), Error>;

    /// Reports a socket that is closed.
    fn report_refused(&self, peer: &str, origin: Self::Origin, why: &Refusal);
}

/// Socket that is ready for its stream.
#[derive(Debug)]
pub(crate) struct FinishedHandshake<T> {
    pub(crate) socket: OwnedFd,
    /// Session; `None` if the peer uses plaintext.
    pub(crate) session: Option<TlsSession>,
    /// Bytes that precede those of the socket, in plaintext. With a session there are none.
    pub(crate) received: Vec<u8>,
    /// Flags that the prelude has received.
    pub(crate) flags: u32,
    /// Where the socket was accepted.
    pub(crate) origin: T,
}

/// Why a socket is closed before it reaches a reactor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The handshake has failed.
    Tls(TlsError),
    /// The address of the peer is not permitted.
    Address,
    /// The peer began in plaintext where TLS is required.
    Plaintext,
    /// The peer violated the protocol before TLS.
    Protocol(String),
    /// The peer has closed the connection.
    Closed,
    /// The handshake took too long.
    Timeout {
        /// Time that it had.
        limit: Span,
    },
    /// Too many handshakes are in progress.
    Limit {
        /// Whose handshakes are counted.
        of: &'static str,
        /// Their limit.
        limit: usize,
    },
    /// The owner has refused, or the system lacks something.
    Error(Error),
}

/// Limits of handshakes in progress.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HandshakeLimits {
    /// Handshakes of all addresses.
    pub(crate) all_max: usize,
    /// Handshakes of one address (for IPv6: one /64).
    pub(crate) per_address_max: usize,
    /// Time of a handshake.
    pub(crate) time: Span,
}

/// Running thread. Dropping it closes the sockets whose handshake is in progress.
pub(crate) struct HandshakeThread<T> {
    /// Sockets that the thread has not taken, at most as many as there are places.
    inbox: Arc<Mutex<Vec<NewSocket<T>>>>,
    inbox_max: usize,
    wake: RemoteEventFd,
    thread: Option<NamedThread<()>>,
}

/// Socket on its way to the thread.
struct NewSocket<T> {
    socket: OwnedFd,
    prelude: Box<dyn Prelude>,
    origin: T,
}

/// State of the thread.
struct Handshakes<O: HandshakeOwner> {
    owner: O,
    limits: HandshakeLimits,
    clock: Clock,
    watch: PollSet,
    woken: RemoteEventFd,
    pending: BTreeMap<u64, PendingHandshake<O::Origin>>,
    deadlines: BTreeSet<(Instant, u64)>,
    /// Handshakes in progress by address.
    addresses: BTreeMap<IpAddr, usize>,
    next_token: u64,
}

/// Handshake in progress.
struct PendingHandshake<T> {
    io: SocketIo,
    prelude: Box<dyn Prelude>,
    session: Option<TlsSession>,
    origin: T,
    address: Option<IpAddr>,
    deadline: Instant,
    time_limit: Span,
    interest: Interest,
}

/// Bytes of a socket before it has a stream.
pub(crate) struct SocketIo {
    socket: HandshakeSocket,
    received: Vec<u8>,
    consumed: usize,
    unsent: Vec<u8>,
    error: Option<io::Error>,
}

/// Progress of a handshake.
enum Step {
    /// More bytes have to be received or sent first.
    Await,
    /// The socket is to be handed over, with its session if it has one.
    Done,
    Refused(Refusal),
}

const WAKE: u64 = 0;
const FIRST_SOCKET: u64 = 1;
const READABLE: Interest = Interest { readable: true, writable: false };
/// Bytes per receive call.
const RECEIVE_BYTES: usize = 4 << 10;
/// A handshake that begins while half of the places are in use has this part of the time.
const CROWDED_DIVISOR: u64 = 10;

impl Default for HandshakeLimits {
    fn default() -> Self {
        Self { all_max: 1024, per_address_max: 128, time: Span::from_secs(10) }
    }
}

impl<T: Copy + Send + 'static> HandshakeThread<T> {
    /// Starts the thread.
    pub(crate) fn start(
        name: &str,
        owner: impl HandshakeOwner<Origin = T>,
        limits: HandshakeLimits,
        clock: Clock,
    ) -> io::Result<Self> {
        let (woken, wake) = RemoteEventFd::pair()?;
        let woken = RemoteEventFd::new(woken)?;
        let watch = PollSet::new()?;
        watch.add(&woken, WAKE, READABLE)?;
        let inbox = Arc::<Mutex<Vec<NewSocket<T>>>>::default();
        let theirs = Arc::clone(&inbox);
        let mut handshakes = Handshakes {
            owner,
            limits,
            clock,
            watch,
            woken,
            pending: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            addresses: BTreeMap::new(),
            next_token: FIRST_SOCKET,
        };
        let thread = NamedThread::spawn(name, None, move |stop| handshakes.run(&theirs, stop))?;
        Ok(Self { inbox, inbox_max: limits.all_max, wake, thread: Some(thread) })
    }

    /// Hands over an accepted socket. The thread checks the limits.
    ///
    /// # Errors
    ///
    /// If so many sockets wait for the thread that this one would not get a place.
    pub(crate) fn add(
        &self,
        socket: OwnedFd,
        prelude: Box<dyn Prelude>,
        origin: T,
    ) -> Result<(), Error> {
        let mut inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        if inbox.len() >= self.inbox_max {
            let limit = Refusal::Limit { of: "all addresses", limit: self.inbox_max };
            return Err(Error::environment(limit));
        }
        inbox.push(NewSocket { socket, prelude, origin });
        drop(inbox);
        self.wake.signal();
        Ok(())
    }
}

impl<T> Drop for HandshakeThread<T> {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        thread.stop_flag().set();
        self.wake.signal();
        // Dropping the thread joins it.
        drop(thread);
    }
}

impl<O: HandshakeOwner> Handshakes<O> {
    fn run(&mut self, inbox: &Mutex<Vec<NewSocket<O::Origin>>>, stop: &StopFlag) {
        let mut ready: Vec<ReadyDescriptor> = Vec::new();
        while !stop.is_stopped() {
            let now = self.clock.now();
            let timeout = self.deadlines.first().map(|(deadline, _)| deadline.since(now));
            if self.watch.wait(timeout, &mut ready).is_err() {
                // Without epoll the loop would only spin; sockets are closed when it ends.
                return;
            }
            // Before the inbox is emptied: a signal after that is for what comes next.
            self.woken.clear_signals();
            let new = std::mem::take(&mut *inbox.lock().unwrap_or_else(PoisonError::into_inner));
            for socket in new {
                self.add(socket);
            }
            for found in &ready {
                if found.token >= FIRST_SOCKET {
                    self.advance(found.token);
                }
            }
            self.end_overdue();
        }
    }

    fn add(&mut self, new: NewSocket<O::Origin>) {
        let NewSocket { socket, prelude, origin } = new;
        let io = match HandshakeSocket::new(socket) {
            Ok(socket) => SocketIo::new(socket),
            Err(error) => {
                let why = Refusal::Error(Error::environment(error));
                return self.owner.report_refused("a peer", origin, &why);
            }
        };
        let address = connection_limit_key_of_peer(io.socket.peer());
        let is_permitted = self.owner.permits(io.socket.peer(), origin);
        let refusal =
            if is_permitted { self.exceeded_limit(address) } else { Some(Refusal::Address) };
        if let Some(why) = refusal {
            return self.owner.report_refused(io.socket.peer(), origin, &why);
        }
        let token = self.next_token;
        if let Err(error) = self.watch.add(&io.socket, token, READABLE) {
            let why = Refusal::Error(Error::environment(error));
            return self.owner.report_refused(io.socket.peer(), origin, &why);
        }
        self.next_token += 1;
        let is_crowded = self.pending.len() >= self.limits.all_max / 2;
        let divisor = if is_crowded { CROWDED_DIVISOR } else { 1 };
        let time_limit = Span { ns: self.limits.time.ns / divisor };
        let deadline = self.clock.now().after(time_limit);
        self.deadlines.insert((deadline, token));
        if let Some(address) = address {
            *self.addresses.entry(address).or_default() += 1;
        }
        let pending = PendingHandshake {
            io,
            prelude,
            session: None,
            origin,
            address,
            deadline,
            time_limit,
            interest: READABLE,
        };
        self.pending.insert(token, pending);
        // The first bytes have usually arrived with the connection.
        self.advance(token);
    }

    fn exceeded_limit(&self, address: Option<IpAddr>) -> Option<Refusal> {
        let HandshakeLimits { all_max, per_address_max, .. } = self.limits;
        if self.pending.len() >= all_max {
            return Some(Refusal::Limit { of: "all addresses", limit: all_max });
        }
        let found = address.and_then(|address| self.addresses.get(&address)).copied();
        (found.unwrap_or(0) >= per_address_max)
            .then_some(Refusal::Limit { of: "its address", limit: per_address_max })
    }

    /// Makes progress with one handshake.
    fn advance(&mut self, token: u64) {
        let Some(pending) = self.pending.get_mut(&token) else { return };
        match pending.step(&self.owner) {
            Step::Await => {
                let interest = Interest { readable: true, writable: !pending.io.unsent.is_empty() };
                if interest != pending.interest {
                    pending.interest = interest;
                    // A socket that is not watched ends at its deadline.
                    let _ = self.watch.modify(&pending.io.socket, token, interest);
                }
            }
            Step::Done => self.hand_over(token),
            Step::Refused(why) => self.refuse(token, &why),
        }
    }

    fn hand_over(&mut self, token: u64) {
        let Some(pending) = self.remove(token) else { return };
        let PendingHandshake { io, mut session, origin, prelude, .. } = pending;
        let SocketIo { socket, mut received, consumed, .. } = io;
        let peer = socket.peer().to_owned();
        received.drain(..consumed);
        if let Some(session) = &mut session {
            session.push_received(&std::mem::take(&mut received));
        }
        let (socket, flags) = (socket.into(), prelude.received_flags());
        let finished = FinishedHandshake { socket, session, received, flags, origin };
        if let Err(error) = self.owner.open(finished) {
            self.owner.report_refused(&peer, origin, &Refusal::Error(error));
        }
    }

    fn refuse(&mut self, token: u64, why: &Refusal) {
        let Some(mut pending) = self.remove(token) else { return };
        // The alert is what the peer is told; a socket that has no space for it gets none.
        pending.io.flush();
        pending.io.socket.shutdown_write();
        self.owner.report_refused(pending.io.socket.peer(), pending.origin, why);
    }

    fn remove(&mut self, token: u64) -> Option<PendingHandshake<O::Origin>> {
        let pending = self.pending.remove(&token)?;
        self.deadlines.remove(&(pending.deadline, token));
        let _ = self.watch.remove(&pending.io.socket);
        if let Some(address) = pending.address
            && let Some(count) = self.addresses.get_mut(&address)
        {
            *count -= 1;
            if *count == 0 {
                self.addresses.remove(&address);
            }
        }
        Some(pending)
    }

    fn end_overdue(&mut self) {
        let now = self.clock.now();
        while let Some((deadline, token)) = self.deadlines.first().copied()
            && deadline <= now
        {
            let limit = self.pending.get(&token).map(|pending| pending.time_limit);
            self.deadlines.remove(&(deadline, token));
            self.refuse(token, &Refusal::Timeout { limit: limit.unwrap_or_default() });
        }
    }
}

impl<T: Copy> PendingHandshake<T> {
    fn step(&mut self, owner: &impl HandshakeOwner<Origin = T>) -> Step {
        self.io.flush();
        let step = match &mut self.session {
            None => self.step_prelude(owner),
            Some(session) => step_session(session, &mut self.io),
        };
        match self.io.error.take() {
            Some(error) => Step::Refused(Refusal::Error(Error::environment(error))),
            None => step,
        }
    }

    fn step_prelude(&mut self, owner: &impl HandshakeOwner<Origin = T>) -> Step {
        match self.prelude.step(&mut self.io) {
            PreludeStep::Await => {
                self.io.flush();
                Step::Await
            }
            PreludeStep::Plaintext if self.io.unsent.is_empty() => Step::Done,
            PreludeStep::Plaintext => Step::Await,
            PreludeStep::Refused(why) => Step::Refused(why),
            PreludeStep::StartTls => {
                let session = owner
                    .tls_config(self.origin)
                    .and_then(|config| TlsSession::server(&config).map_err(Error::from));
                match session {
                    Ok(session) => step_session(self.session.insert(session), &mut self.io),
                    Err(error) => Step::Refused(Refusal::Error(error)),
                }
            }
        }
    }
}

fn step_session(session: &mut TlsSession, io: &mut SocketIo) -> Step {
    let result = session.handshake(io);
    io.flush();
    match result {
        Ok(true) if io.unsent.is_empty() => Step::Done,
        Ok(_) => Step::Await,
        Err(TlsError::ClosedInHandshake) => Step::Refused(Refusal::Closed),
        Err(error) => Step::Refused(Refusal::Tls(error)),
    }
}

impl SocketIo {
    fn new(socket: HandshakeSocket) -> Self {
        Self { socket, received: Vec::new(), consumed: 0, unsent: Vec::new(), error: None }
    }

    /// The socket.
    pub(crate) const fn socket(&self) -> &HandshakeSocket {
        &self.socket
    }

    /// Whether bytes have not been sent.
    pub(crate) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Sends what was not sent, as far as there is space.
    pub(crate) fn flush(&mut self) {
        while !self.unsent.is_empty() {
            match self.socket.send(&self.unsent) {
                Ok(0) => return,
                Ok(count) => drop(self.unsent.drain(..count)),
                Err(error) => {
                    self.error.get_or_insert(error);
                    return;
                }
            }
        }
    }

    /// Unconsumed bytes; receives if there are fewer than `count`. `None` if there are fewer still.
    pub(crate) fn receive_at_least(&mut self, count: usize) -> Result<Option<&[u8]>, Refusal> {
        while self.received.len() - self.consumed < count {
            match self.receive_more() {
                RecvResult::Bytes(_) => {}
                RecvResult::WouldBlock => return Ok(None),
                RecvResult::Eof => return Err(Refusal::Closed),
            }
        }
        Ok(Some(&self.received[self.consumed..]))
    }

    fn receive_more(&mut self) -> RecvResult {
        self.received.drain(..self.consumed);
        self.consumed = 0;
        let filled = self.received.len();
        self.received.resize(filled + RECEIVE_BYTES, 0);
        let result = self.socket.receive(&mut self.received[filled..]);
        let result = result.unwrap_or_else(|error| {
            self.error.get_or_insert(error);
            RecvResult::Eof
        });
        let count = if let RecvResult::Bytes(count) = result { count } else { 0 };
        self.received.truncate(filled + count);
        result
    }
}

impl CipherIo for SocketIo {
    fn received(&mut self) -> Received<'_> {
        if self.consumed == self.received.len() {
            match self.receive_more() {
                RecvResult::Bytes(_) => {}
                RecvResult::WouldBlock => return Received::WouldBlock,
                RecvResult::Eof => return Received::End,
            }
        }
        Received::Bytes(&self.received[self.consumed..])
    }

    fn consume(&mut self, count: usize) {
        self.consumed += count;
    }

    fn outgoing(&mut self) -> &mut Vec<u8> {
        &mut self.unsent
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tls(error) => error.fmt(out),
            Self::Address => {
                out.write_str("its address is in no network that may connect to the port")
            }
            Self::Plaintext => {
                out.write_str("the peer began in plaintext, expected TLS, which is required here")
            }
            Self::Protocol(text) => out.write_str(text),
            Self::Closed => out.write_str("TLS handshake: the peer closed the connection"),
            Self::Timeout { limit } => {
                write!(out, "TLS handshake: it was not finished within {limit}")
            }
            Self::Limit { of, limit } => write!(
                out,
                "TLS handshake: {limit} handshakes of {of} are in progress, expected fewer"
            ),
            Self::Error(error) => error.fmt(out),
        }
    }
}

impl<T> fmt::Debug for HandshakeThread<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("HandshakeThread").finish_non_exhaustive()
    }
}
