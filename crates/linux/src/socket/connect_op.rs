//! Non-blocking connect to a host name and port, with a deadline.
//!
//! A name is resolved by a pool thread, a numeric address directly. The addresses are tried one
//! after the other, each with an equal part of the remaining time.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};
use tenmil_base::{ErrorCategory, Instant, Span, WakeSource};

use crate::poll_set::{Interest, PollSet, ReadyDescriptor};
use crate::thread_pool::{BlockingTask, ThreadPool};

/// Connect in progress. Poll it when its wake source signals, and at [`wake_at`](Self::wake_at).
#[derive(Debug)]
pub struct ConnectOp {
    /// Address as given: `HOST:PORT`.
    address: String,
    state: ConnectState,
    watch: PollSet,
    deadline: Instant,
}

/// A connection was not established.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectError {
    /// The text is not `HOST:PORT`.
    InvalidAddress {
        /// Given text.
        address: String,
    },
    /// The name could not be resolved.
    NameNotResolved {
        /// Address as given.
        address: String,
        /// Error of the resolver.
        found: String,
    },
    /// All resolver threads are busy.
    Busy {
        /// Address as given.
        address: String,
    },
    /// The connection was rejected; error of the last address tried.
    Refused {
        /// Address as given.
        address: String,
        /// Socket address tried.
        at: SocketAddr,
        /// Error of the system call.
        errno: Errno,
    },
    /// The deadline passed.
    Timeout {
        /// Address as given.
        address: String,
        /// Socket address tried; `None` if the name was not resolved in time.
        at: Option<SocketAddr>,
    },
    /// No socket could be created.
    Os {
        /// Address as given.
        address: String,
        /// Error of the system call.
        errno: Errno,
    },
}

#[derive(Debug)]
enum ConnectState {
    /// Waiting for the resolver.
    Name(Arc<ResolverResult>),
    /// Waiting for the peer.
    Peer(ConnectAttempt),
    /// The result has been returned.
    Done,
}

/// Result of the resolver thread.
#[derive(Debug)]
struct ResolverResult {
    found: OnceLock<Result<Vec<SocketAddr>, String>>,
    /// Readable once the result is available.
    event: OwnedFd,
}

#[derive(Debug)]
struct ConnectAttempt {
    socket: OwnedFd,
    at: SocketAddr,
    until: Instant,
    /// Remaining addresses, in reverse order.
    remaining: Vec<SocketAddr>,
}

const READABLE: Interest = Interest { readable: true, writable: false };
const WRITABLE: Interest = Interest { readable: false, writable: true };
/// Token of the only descriptor in the poll set.
const AWAITED: u64 = 0;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

impl ConnectOp {
    /// Starts connecting to `address`: `HOST:PORT`, with IPv6 addresses in brackets.
    ///
    /// # Errors
    ///
    /// If the address is malformed, or the connect could not be started.
    pub fn start(
        address: &str,
        pool: &ThreadPool,
        now: Instant,
        deadline: Instant,
    ) -> Result<Self, ConnectError> {
        let owned = || address.to_owned();
        let machine = |errno| ConnectError::Os { address: owned(), errno };
        let (host, port) = split_host_port(address)
            .ok_or_else(|| ConnectError::InvalidAddress { address: owned() })?;
        let watch = PollSet::new().map_err(|error| machine(errno_of(&error)))?;
        let mut dial = Self { address: owned(), state: ConnectState::Done, watch, deadline };
        match host.parse::<IpAddr>() {
            Ok(number) => {
                dial.state = dial.start_attempt(vec![SocketAddr::new(number, port)], now)?
            }
            Err(_) => dial.start_resolve(host, port, pool)?,
        }
        Ok(dial)
    }

    /// Returns the connected socket or the error, once.
    pub fn poll(&mut self, now: Instant) -> Option<Result<OwnedFd, ConnectError>> {
        let outcome = match std::mem::replace(&mut self.state, ConnectState::Done) {
            ConnectState::Name(answer) => self.poll_resolver(answer, now),
            ConnectState::Peer(attempt) => self.poll_attempt(attempt, now),
            ConnectState::Done => return None,
        };
        match outcome {
            Ok(ConnectState::Done) => None,
            Ok(state) => {
                self.state = state;
                None
            }
            Err(outcome) => Some(outcome),
        }
    }

    /// Wake source that signals when [`poll`](Self::poll) makes progress.
    pub fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Descriptor(self.watch.as_fd())
    }

    /// Instant at which [`poll`](Self::poll) makes progress without a signal.
    pub fn wake_at(&self) -> Instant {
        match &self.state {
            ConnectState::Name(_) => self.deadline,
            ConnectState::Peer(attempt) => attempt.until,
            ConnectState::Done => Instant::NEVER,
        }
    }

    fn start_resolve(
        &mut self,
        host: &str,
        port: u16,
        pool: &ThreadPool,
    ) -> Result<(), ConnectError> {
        let machine = |errno| ConnectError::Os { address: self.address.clone(), errno };
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(machine)?;
        self.watch.add(&waker, AWAITED, READABLE).map_err(|error| machine(errno_of(&error)))?;
        let answer = Arc::new(ResolverResult { found: OnceLock::new(), event: waker });
        let (theirs, host) = (Arc::clone(&answer), host.to_owned());
        let job = BlockingTask::new("look up a name", move || theirs.resolve(&host, port));
        pool.submit(job).map_err(|_| ConnectError::Busy { address: self.address.clone() })?;
        self.state = ConnectState::Name(answer);
        Ok(())
    }

    fn poll_resolver(&mut self, answer: Arc<ResolverResult>, now: Instant) -> ConnectPollResult {
        match answer.found.get() {
            None if now >= self.deadline => Err(Err(self.timeout_error(None))),
            None => Ok(ConnectState::Name(answer)),
            Some(Err(found)) => {
                let (address, found) = (self.address.clone(), found.clone());
                Err(Err(ConnectError::NameNotResolved { address, found }))
            }
            Some(Ok(addresses)) => {
                let addresses = addresses.iter().rev().copied().collect();
                let _ = self.watch.remove(&answer.event);
                self.start_attempt(addresses, now).map_err(Err)
            }
        }
    }

    fn poll_attempt(&mut self, attempt: ConnectAttempt, now: Instant) -> ConnectPollResult {
        let failed = match attempt.has_peer_responded(&self.watch) {
            Ok(true) => {
                let _ = self.watch.remove(&attempt.socket);
                return Err(Ok(attempt.socket));
            }
            Ok(false) if now < attempt.until => return Ok(ConnectState::Peer(attempt)),
            Ok(false) => self.timeout_error(Some(attempt.at)),
            Err(errno) => {
                ConnectError::Refused { address: self.address.clone(), at: attempt.at, errno }
            }
        };
        if attempt.remaining.is_empty() || now >= self.deadline {
            return Err(Err(failed));
        }
        self.start_attempt(attempt.remaining, now).map_err(Err)
    }

    /// Starts a connect to the last of `addresses`, or to the one before it if that fails at once.
    fn start_attempt(
        &self,
        mut rest: Vec<SocketAddr>,
        now: Instant,
    ) -> Result<ConnectState, ConnectError> {
        let address = || self.address.clone();
        let mut failed = None;
        while let Some(at) = rest.pop() {
            // Each remaining address gets an equal part of the remaining time.
            let left = self.deadline.ns.saturating_sub(now.ns) / (rest.len() as u64 + 1);
            let until = now.after(Span { ns: left });
            let machine = |errno| ConnectError::Os { address: address(), errno };
            let family = if at.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
            let socket = match socket_with(family, SocketType::STREAM, FLAGS, None) {
                Ok(socket) => socket,
                Err(errno) => {
                    failed = Some(machine(errno));
                    continue;
                }
            };
            match connect(&socket, &at) {
                Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => {
                    let added = self.watch.add(&socket, AWAITED, WRITABLE);
                    added.map_err(|error| machine(errno_of(&error)))?;
                    return Ok(ConnectState::Peer(ConnectAttempt {
                        socket,
                        at,
                        until,
                        remaining: rest,
                    }));
                }
                Err(errno) => {
                    failed = Some(ConnectError::Refused { address: address(), at, errno })
                }
            }
        }
        let found = || "it has no address".to_owned();
        Err(failed.unwrap_or_else(|| ConnectError::NameNotResolved {
            address: address(),
            found: found(),
        }))
    }

    fn timeout_error(&self, at: Option<SocketAddr>) -> ConnectError {
        ConnectError::Timeout { address: self.address.clone(), at }
    }
}

/// Result of a poll: the next state, or the result.
type ConnectPollResult = Result<ConnectState, Result<OwnedFd, ConnectError>>;

impl ResolverResult {
    /// Resolves a name; may block for long.
    fn resolve(&self, host: &str, port: u16) {
        let found = (host, port).to_socket_addrs();
        let found = found.map(Iterator::collect).map_err(|error| error.to_string());
        let _ = self.found.set(found);
        // The counter cannot overflow: it is written once.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }
}

impl ConnectAttempt {
    /// Whether the peer has responded.
    fn has_peer_responded(&self, watch: &PollSet) -> Result<bool, Errno> {
        let mut found: Vec<ReadyDescriptor> = Vec::new();
        watch.wait(Some(Span::default()), &mut found).map_err(|error| errno_of(&error))?;
        if found.is_empty() {
            return Ok(false);
        }
        sockopt::socket_error(&self.socket)?.map(|()| true)
    }
}

/// Splits host and port.
fn split_host_port(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let port = port.parse().ok().filter(|port| *port > 0)?;
    let host = match host.strip_prefix('[') {
        Some(number) => number.strip_suffix(']')?,
        None if host.contains(':') => return None,
        None => host,
    };
    (!host.is_empty()).then_some((host, port))
}

fn errno_of(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

impl ConnectError {
    /// Error category.
    pub fn category(&self) -> ErrorCategory {
        match self {
            Self::InvalidAddress { .. } => ErrorCategory::Usage,
            Self::NameNotResolved { .. } | Self::Busy { .. } | Self::Os { .. } => {
                ErrorCategory::Environment
            }
            Self::Refused { errno, .. } => match *errno {
                Errno::CONNREFUSED | Errno::CONNRESET | Errno::TIMEDOUT => ErrorCategory::Remote,
                _ => ErrorCategory::Environment,
            },
            Self::Timeout { .. } => ErrorCategory::Remote,
        }
    }

    /// Hint for the user.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::InvalidAddress { .. } => {
                "give a name or a number, a colon and a port, such as 192.0.2.7:4420 or \
                 [2001:db8::7]:4420"
            }
            Self::NameNotResolved { .. } => {
                "check the spelling with `getent hosts NAME`, or give the number"
            }
            Self::Busy { .. } => "try again: all resolver threads wait for a response",
            Self::Refused { errno: Errno::CONNREFUSED, .. } => {
                "connection refused: check the port, and that the target is running"
            }
            Self::Refused { .. } | Self::Timeout { .. } => {
                "check that the machine is reachable (`ping`) and that no firewall drops the port"
            }
            Self::Os { .. } => {
                "each connection takes two descriptors: see `ulimit -n`; `tenmil doctor` looks at all \
                 limits"
            }
        }
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidAddress { address } => {
                write!(out, "connect to '{address}': not an address, expected HOST:PORT")
            }
            Self::NameNotResolved { address, found } => {
                write!(out, "connect to {address}: look up its name: {found}")
            }
            Self::Busy { address } => {
                write!(
                    out,
                    "connect to {address}: look up its name: as many names as can be are \
                             being looked up"
                )
            }
            Self::Refused { address, at, errno } => {
                write!(out, "connect to {address}")?;
                address_suffix(out, address, *at)?;
                write!(out, ": {errno}")
            }
            Self::Timeout { address, at: None } => {
                write!(out, "connect to {address}: its name was not looked up in time")
            }
            Self::Timeout { address, at: Some(at) } => {
                write!(out, "connect to {address}")?;
                address_suffix(out, address, *at)?;
                write!(out, ": no response in time")
            }
            Self::Os { address, errno } => {
                write!(out, "connect to {address}: make a socket: {errno}")
            }
        }
    }
}

fn address_suffix(out: &mut fmt::Formatter<'_>, address: &str, at: SocketAddr) -> fmt::Result {
    let at = at.to_string();
    if at == address { Ok(()) } else { write!(out, " at {at}") }
}

impl std::error::Error for ConnectError {}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener};
    use std::os::fd::OwnedFd;

    use tenmil_base::{ErrorCategory, Instant, Span, WakeSource};

    use super::{ConnectError, ConnectOp, split_host_port};
    use crate::poll_set::{Interest, PollSet};
    use crate::thread_pool::{BlockingTask, ThreadPool};

    const START: Instant = Instant { ns: 1000 };

    fn deadline_soon() -> Instant {
        START.after(Span::from_secs(5))
    }

    fn test_pool() -> ThreadPool {
        ThreadPool::new(1, 4)
    }

    /// Sleeps on the wake source until there is a result.
    fn connect_result(dial: &mut ConnectOp) -> Result<OwnedFd, ConnectError> {
        let sleep = PollSet::new().unwrap();
        let WakeSource::Descriptor(source) = dial.wake_source() else { panic!("no descriptor") };
        sleep.add(source, 0, Interest { readable: true, writable: false }).unwrap();
        for _ in 0..100 {
            if let Some(outcome) = dial.poll(START) {
                assert!(dial.poll(START).is_none(), "it is reported once");
                assert_eq!(dial.wake_at(), Instant::NEVER);
                return outcome;
            }
            assert!(dial.wake_at() <= deadline_soon());
            sleep.wait(Some(Span::from_secs(20)), &mut Vec::new()).unwrap();
        }
        panic!("signals that bring nothing on");
    }

    #[test]
    fn ip_address_and_host_name_connect() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        for host in ["127.0.0.1", "localhost"] {
            let address = format!("{host}:{port}");
            let mut dial =
                ConnectOp::start(&address, &test_pool(), START, deadline_soon()).unwrap();
            let socket = connect_result(&mut dial).unwrap();
            let (_, from) = listener.accept().unwrap();
            let here = rustix::net::getsockname(&socket).unwrap();
            assert_eq!(SocketAddr::try_from(here).unwrap(), from);
        }
    }

    #[test]
    fn port_without_listener_is_refused_by_name() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        drop(listener);
        let mut dial = ConnectOp::start(&address, &test_pool(), START, deadline_soon()).unwrap();
        let error = connect_result(&mut dial).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("connect to {address}: Connection refused (os error 111)")
        );
        assert_eq!(error.category(), ErrorCategory::Remote);
        assert!(error.hint().starts_with("connection refused"), "{}", error.hint());
    }

    #[test]
    fn unresponsive_peer_times_out_at_the_deadline() {
        // A listener that accepts nothing and whose backlog is full does not respond.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let mut waiting = Vec::new();
        let mut late = loop {
            let mut dial =
                ConnectOp::start(&address, &test_pool(), START, deadline_soon()).unwrap();
            match dial.poll(START) {
                Some(socket) => waiting.push(socket.unwrap()),
                None => break dial,
            }
            assert!(waiting.len() < 100, "the queue is never full");
        };
        assert!(late.poll(Instant { ns: deadline_soon().ns - 1 }).is_none());
        assert_eq!(late.wake_at(), deadline_soon());
        let error = late.poll(deadline_soon()).unwrap().unwrap_err();
        assert_eq!(error.to_string(), format!("connect to {address}: no response in time"));
    }

    #[test]
    fn slow_name_resolution_times_out() {
        let pool = ThreadPool::new(1, 1);
        let (release, held) = std::sync::mpsc::channel::<()>();
        let (begin, begun) = std::sync::mpsc::channel();
        let hold = move || {
            begin.send(()).unwrap();
            let _ = held.recv();
        };
        pool.submit(BlockingTask::new("hold", hold)).unwrap();
        begun.recv().unwrap();
        let mut dial = ConnectOp::start("localhost:9", &pool, START, deadline_soon()).unwrap();
        assert!(dial.poll(START).is_none());
        assert_eq!(dial.wake_at(), deadline_soon());
        let error = dial.poll(deadline_soon()).unwrap().unwrap_err();
        assert_eq!(error.to_string(), "connect to localhost:9: its name was not looked up in time");
        let busy = ConnectOp::start("localhost:9", &pool, START, deadline_soon()).unwrap_err();
        assert_eq!(busy, ConnectError::Busy { address: "localhost:9".to_owned() });
        drop(release);
    }

    #[test]
    fn unknown_host_name_is_reported() {
        let mut dial =
            ConnectOp::start("no.such.name.invalid:4420", &test_pool(), START, deadline_soon())
                .unwrap();
        let error = connect_result(&mut dial).unwrap_err();
        assert!(matches!(error, ConnectError::NameNotResolved { .. }), "{error}");
        assert!(error.to_string().starts_with("connect to no.such.name.invalid:4420: look up its"));
    }

    #[test]
    fn invalid_address_is_rejected_at_once() {
        assert_eq!(split_host_port("[::1]:4420"), Some(("::1", 4420)));
        assert_eq!(split_host_port("a.b:1"), Some(("a.b", 1)));
        for address in ["", ":1", "a", "a:", "a:0", "a:65536", "a:x", "::1:1", "[::1:1", "[]:1"] {
            let refused =
                ConnectOp::start(address, &test_pool(), START, deadline_soon()).unwrap_err();
            assert_eq!(refused.category(), ErrorCategory::Usage, "{address}: {refused}");
            assert!(refused.to_string().contains("expected HOST:PORT"), "{refused}");
        }
    }
}
