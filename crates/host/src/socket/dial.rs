//! Connecting to a name and a port, with a deadline, and without blocking whoever wants it.
//!
//! A name is looked up by a thread of a pool, a number at once. The addresses found are tried one
//! after the other, each with an equal part of the time that is left.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use base::{Blame, Instant, Span, WakeSource};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};

use crate::pool::{Job, Pool};
use crate::watch::{Interest, Ready, Watch};

/// A connection that is being made. To be polled when its wake source signals, and by
/// [`wake_at`](Self::wake_at).
#[derive(Debug)]
pub struct Dial {
    /// As it was asked for: `HOST:PORT`.
    address: String,
    state: State,
    watch: Watch,
    deadline: Instant,
}

/// Why there is no connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DialError {
    /// It is not `HOST:PORT`.
    NotAnAddress {
        /// What was given.
        address: String,
    },
    /// The name is not known, or nobody could be asked.
    NoSuchName {
        /// What was to be reached.
        address: String,
        /// What the look-up said.
        found: String,
    },
    /// All threads that look names up are busy.
    Busy {
        /// What was to be reached.
        address: String,
    },
    /// An answer that was not a connection, from the last of the addresses that were tried.
    Refused {
        /// What was to be reached.
        address: String,
        /// Where that is.
        at: SocketAddr,
        /// What the kernel says.
        errno: Errno,
    },
    /// No answer in time.
    TooLate {
        /// What was to be reached.
        address: String,
        /// Where that is; none if not even the name was looked up in time.
        at: Option<SocketAddr>,
    },
    /// No socket could be had for it.
    Machine {
        /// What was to be reached.
        address: String,
        /// What the kernel says.
        errno: Errno,
    },
}

#[derive(Debug)]
enum State {
    /// A thread looks the name up.
    Name(Arc<Answer>),
    /// The other side has been asked.
    Peer(Attempt),
    /// What was found has been told.
    Over,
}

/// Where the look-up puts what it has found.
#[derive(Debug)]
struct Answer {
    found: OnceLock<Result<Vec<SocketAddr>, String>>,
    /// Readable once it is there.
    bell: OwnedFd,
}

#[derive(Debug)]
struct Attempt {
    socket: OwnedFd,
    at: SocketAddr,
    until: Instant,
    /// What is tried next, last first.
    rest: Vec<SocketAddr>,
}

const READABLE: Interest = Interest { readable: true, writable: false };
const WRITABLE: Interest = Interest { readable: false, writable: true };
/// The one descriptor of the watch, whichever it is.
const AWAITED: u64 = 0;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

impl Dial {
    /// Begins to connect to `address`: `HOST:PORT`, where a host that is an IPv6 number stands in
    /// brackets.
    ///
    /// # Errors
    ///
    /// If that is no address, or nothing could be begun.
    pub fn start(
        address: &str,
        pool: &Pool,
        now: Instant,
        deadline: Instant,
    ) -> Result<Self, DialError> {
        let owned = || address.to_owned();
        let machine = |errno| DialError::Machine { address: owned(), errno };
        let (host, port) =
            split(address).ok_or_else(|| DialError::NotAnAddress { address: owned() })?;
        let watch = Watch::new().map_err(|error| machine(errno(&error)))?;
        let mut dial = Self { address: owned(), state: State::Over, watch, deadline };
        match host.parse::<IpAddr>() {
            Ok(number) => dial.state = dial.attempt(vec![SocketAddr::new(number, port)], now)?,
            Err(_) => dial.look_up(host, port, pool)?,
        }
        Ok(dial)
    }

    /// The connected socket once it is there, or why it never will be. Told once.
    pub fn poll(&mut self, now: Instant) -> Option<Result<OwnedFd, DialError>> {
        let outcome = match std::mem::replace(&mut self.state, State::Over) {
            State::Name(answer) => self.poll_name(answer, now),
            State::Peer(attempt) => self.poll_peer(attempt, now),
            State::Over => return None,
        };
        match outcome {
            Ok(State::Over) => None,
            Ok(state) => {
                self.state = state;
                None
            }
            Err(outcome) => Some(outcome),
        }
    }

    /// Signals when [`poll`](Self::poll) would get on.
    pub fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Descriptor(self.watch.as_fd())
    }

    /// When [`poll`](Self::poll) would get on although nothing has signalled.
    pub fn wake_at(&self) -> Instant {
        match &self.state {
            State::Name(_) => self.deadline,
            State::Peer(attempt) => attempt.until,
            State::Over => Instant::NEVER,
        }
    }

    fn look_up(&mut self, host: &str, port: u16, pool: &Pool) -> Result<(), DialError> {
        let machine = |errno| DialError::Machine { address: self.address.clone(), errno };
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(machine)?;
        self.watch.add(&bell, AWAITED, READABLE).map_err(|error| machine(errno(&error)))?;
        let answer = Arc::new(Answer { found: OnceLock::new(), bell });
        let (theirs, host) = (Arc::clone(&answer), host.to_owned());
        let job = Job::new("look up a name", move || theirs.find(&host, port));
        pool.submit(job).map_err(|_| DialError::Busy { address: self.address.clone() })?;
        self.state = State::Name(answer);
        Ok(())
    }

    fn poll_name(&mut self, answer: Arc<Answer>, now: Instant) -> Polled {
        match answer.found.get() {
            None if now >= self.deadline => Err(Err(self.too_late(None))),
            None => Ok(State::Name(answer)),
            Some(Err(found)) => {
                let (address, found) = (self.address.clone(), found.clone());
                Err(Err(DialError::NoSuchName { address, found }))
            }
            Some(Ok(addresses)) => {
                let addresses = addresses.iter().rev().copied().collect();
                let _ = self.watch.remove(&answer.bell);
                self.attempt(addresses, now).map_err(Err)
            }
        }
    }

    fn poll_peer(&mut self, attempt: Attempt, now: Instant) -> Polled {
        let failed = match attempt.answer(&self.watch) {
            Ok(true) => {
                let _ = self.watch.remove(&attempt.socket);
                return Err(Ok(attempt.socket));
            }
            Ok(false) if now < attempt.until => return Ok(State::Peer(attempt)),
            Ok(false) => self.too_late(Some(attempt.at)),
            Err(errno) => {
                DialError::Refused { address: self.address.clone(), at: attempt.at, errno }
            }
        };
        if attempt.rest.is_empty() || now >= self.deadline {
            return Err(Err(failed));
        }
        self.attempt(attempt.rest, now).map_err(Err)
    }

    /// Asks the last of `addresses`, or the one before it if that cannot even be asked.
    fn attempt(&self, mut rest: Vec<SocketAddr>, now: Instant) -> Result<State, DialError> {
        let address = || self.address.clone();
        let mut failed = None;
        while let Some(at) = rest.pop() {
            let left = self.deadline.ns.saturating_sub(now.ns) / (rest.len() as u64 + 1);
            let until = now.after(Span { ns: left });
            let machine = |errno| DialError::Machine { address: address(), errno };
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
                    added.map_err(|error| machine(errno(&error)))?;
                    return Ok(State::Peer(Attempt { socket, at, until, rest }));
                }
                Err(errno) => failed = Some(DialError::Refused { address: address(), at, errno }),
            }
        }
        let found = || "it has no address".to_owned();
        Err(failed.unwrap_or_else(|| DialError::NoSuchName { address: address(), found: found() }))
    }

    fn too_late(&self, at: Option<SocketAddr>) -> DialError {
        DialError::TooLate { address: self.address.clone(), at }
    }
}

/// What a poll has come to: another state, or the outcome.
type Polled = Result<State, Result<OwnedFd, DialError>>;

impl Answer {
    /// Looks a name up, however long that takes.
    fn find(&self, host: &str, port: u16) {
        let found = (host, port).to_socket_addrs();
        let found = found.map(Iterator::collect).map_err(|error| error.to_string());
        let _ = self.found.set(found);
        // The counter of a bell that rings once is never full.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }
}

impl Attempt {
    /// Whether the other side has answered.
    fn answer(&self, watch: &Watch) -> Result<bool, Errno> {
        let mut found: Vec<Ready> = Vec::new();
        watch.wait(Some(Span::default()), &mut found).map_err(|error| errno(&error))?;
        if found.is_empty() {
            return Ok(false);
        }
        sockopt::socket_error(&self.socket)?.map(|()| true)
    }
}

/// Host and port.
fn split(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let port = port.parse().ok().filter(|port| *port > 0)?;
    let host = match host.strip_prefix('[') {
        Some(number) => number.strip_suffix(']')?,
        None if host.contains(':') => return None,
        None => host,
    };
    (!host.is_empty()).then_some((host, port))
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

impl DialError {
    /// Whose move it is.
    pub fn blame(&self) -> Blame {
        match self {
            Self::NotAnAddress { .. } => Blame::Caller,
            Self::NoSuchName { .. } | Self::Busy { .. } | Self::Machine { .. } => Blame::Machine,
            Self::Refused { errno, .. } => match *errno {
                Errno::CONNREFUSED | Errno::CONNRESET | Errno::TIMEDOUT => Blame::Peer,
                _ => Blame::Machine,
            },
            Self::TooLate { .. } => Blame::Peer,
        }
    }

    /// What can be done about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::NotAnAddress { .. } => {
                "give a name or a number, a colon and a port, such as 192.0.2.7:4420 or \
                 [2001:db8::7]:4420"
            }
            Self::NoSuchName { .. } => {
                "check the spelling with `getent hosts NAME`, or give the number"
            }
            Self::Busy { .. } => "try again: all threads that look names up wait for an answer",
            Self::Refused { errno: Errno::CONNREFUSED, .. } => {
                "nobody listens there: check the port, and that the target is running"
            }
            Self::Refused { .. } | Self::TooLate { .. } => {
                "check that the machine is reachable (`ping`) and that no firewall drops the port"
            }
            Self::Machine { .. } => {
                "each connection takes two descriptors: see `ulimit -n`; `tenmil doctor` looks at all \
                 limits"
            }
        }
    }
}

impl fmt::Display for DialError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAnAddress { address } => {
                write!(out, "connect to '{address}': not an address, expected HOST:PORT")
            }
            Self::NoSuchName { address, found } => {
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
                at_if_other(out, address, *at)?;
                write!(out, ": {errno}")
            }
            Self::TooLate { address, at: None } => {
                write!(out, "connect to {address}: its name was not looked up in time")
            }
            Self::TooLate { address, at: Some(at) } => {
                write!(out, "connect to {address}")?;
                at_if_other(out, address, *at)?;
                write!(out, ": no answer in time")
            }
            Self::Machine { address, errno } => {
                write!(out, "connect to {address}: make a socket: {errno}")
            }
        }
    }
}

fn at_if_other(out: &mut fmt::Formatter<'_>, address: &str, at: SocketAddr) -> fmt::Result {
    let at = at.to_string();
    if at == address { Ok(()) } else { write!(out, " at {at}") }
}

impl std::error::Error for DialError {}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener};
    use std::os::fd::OwnedFd;

    use base::{Blame, Instant, Span, WakeSource};

    use super::{Dial, DialError, split};
    use crate::pool::{Job, Pool};
    use crate::watch::{Interest, Watch};

    const START: Instant = Instant { ns: 1000 };

    fn soon() -> Instant {
        START.after(Span::from_secs(5))
    }

    fn pool() -> Pool {
        Pool::new(1, 4)
    }

    /// Sleeps on the wake source until there is an outcome.
    fn outcome(dial: &mut Dial) -> Result<OwnedFd, DialError> {
        let sleep = Watch::new().unwrap();
        let WakeSource::Descriptor(source) = dial.wake_source() else { panic!("no descriptor") };
        sleep.add(source, 0, Interest { readable: true, writable: false }).unwrap();
        for _ in 0..100 {
            if let Some(outcome) = dial.poll(START) {
                assert!(dial.poll(START).is_none(), "it is told once");
                assert_eq!(dial.wake_at(), Instant::NEVER);
                return outcome;
            }
            assert!(dial.wake_at() <= soon());
            sleep.wait(Some(Span::from_secs(20)), &mut Vec::new()).unwrap();
        }
        panic!("signals that bring nothing on");
    }

    #[test]
    fn a_number_and_a_name_are_reached() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        for host in ["127.0.0.1", "localhost"] {
            let address = format!("{host}:{port}");
            let mut dial = Dial::start(&address, &pool(), START, soon()).unwrap();
            let socket = outcome(&mut dial).unwrap();
            let (_, from) = listener.accept().unwrap();
            let here = rustix::net::getsockname(&socket).unwrap();
            assert_eq!(SocketAddr::try_from(here).unwrap(), from);
        }
    }

    #[test]
    fn a_port_that_nobody_listens_on_is_refused_by_name() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        drop(listener);
        let mut dial = Dial::start(&address, &pool(), START, soon()).unwrap();
        let error = outcome(&mut dial).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("connect to {address}: Connection refused (os error 111)")
        );
        assert_eq!(error.blame(), Blame::Peer);
        assert!(error.hint().starts_with("nobody listens"), "{}", error.hint());
    }

    #[test]
    fn a_peer_that_does_not_answer_is_given_up_at_the_deadline() {
        // A listener that accepts nobody and whose queue is full answers no more.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let mut waiting = Vec::new();
        let mut late = loop {
            let mut dial = Dial::start(&address, &pool(), START, soon()).unwrap();
            match dial.poll(START) {
                Some(socket) => waiting.push(socket.unwrap()),
                None => break dial,
            }
            assert!(waiting.len() < 100, "the queue is never full");
        };
        assert!(late.poll(Instant { ns: soon().ns - 1 }).is_none());
        assert_eq!(late.wake_at(), soon());
        let error = late.poll(soon()).unwrap().unwrap_err();
        assert_eq!(error.to_string(), format!("connect to {address}: no answer in time"));
    }

    #[test]
    fn a_name_that_is_not_looked_up_in_time_is_given_up_too() {
        let pool = Pool::new(1, 1);
        let (release, held) = std::sync::mpsc::channel::<()>();
        let (begin, begun) = std::sync::mpsc::channel();
        let hold = move || {
            begin.send(()).unwrap();
            let _ = held.recv();
        };
        pool.submit(Job::new("hold", hold)).unwrap();
        begun.recv().unwrap();
        let mut dial = Dial::start("localhost:9", &pool, START, soon()).unwrap();
        assert!(dial.poll(START).is_none());
        assert_eq!(dial.wake_at(), soon());
        let error = dial.poll(soon()).unwrap().unwrap_err();
        assert_eq!(error.to_string(), "connect to localhost:9: its name was not looked up in time");
        let busy = Dial::start("localhost:9", &pool, START, soon()).unwrap_err();
        assert_eq!(busy, DialError::Busy { address: "localhost:9".to_owned() });
        drop(release);
    }

    #[test]
    fn a_name_that_nobody_has_is_said_to_be_one() {
        let mut dial = Dial::start("no.such.name.invalid:4420", &pool(), START, soon()).unwrap();
        let error = outcome(&mut dial).unwrap_err();
        assert!(matches!(error, DialError::NoSuchName { .. }), "{error}");
        assert!(error.to_string().starts_with("connect to no.such.name.invalid:4420: look up its"));
    }

    #[test]
    fn what_is_no_address_is_refused_at_once() {
        assert_eq!(split("[::1]:4420"), Some(("::1", 4420)));
        assert_eq!(split("a.b:1"), Some(("a.b", 1)));
        for address in ["", ":1", "a", "a:", "a:0", "a:65536", "a:x", "::1:1", "[::1:1", "[]:1"] {
            let refused = Dial::start(address, &pool(), START, soon()).unwrap_err();
            assert_eq!(refused.blame(), Blame::Caller, "{address}: {refused}");
            assert!(refused.to_string().contains("expected HOST:PORT"), "{refused}");
        }
    }
}
