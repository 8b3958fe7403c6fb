//! Handshakes over loopback, with an owner that records what it gets.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use tenmil_base::{Error, Span};
use tenmil_linux::Clock;
use tenmil_linux::socket::{HandshakeSocket, loopback_pair};
use tenmil_linux::socket_stream::RecvResult;
use tenmil_nvme_auth::{Hash, SecretBytes};
use tenmil_tls::{ClientConfig, Psk, ServerConfig, TlsError, TlsSession};

use super::{
    FinishedHandshake, FirstBytePrelude, HandshakeLimits, HandshakeOwner, HandshakeThread, Refusal,
    SocketIo,
};

/// What the owner got.
#[derive(Debug)]
enum Outcome {
    Open(Box<FinishedHandshake<u16>>),
    Refused(Refusal),
}

struct RecordingOwner {
    config: ServerConfig,
    outcomes: Sender<Outcome>,
}

struct TestThread {
    thread: HandshakeThread<u16>,
    outcomes: Receiver<Outcome>,
}

impl HandshakeOwner for RecordingOwner {
    type Origin = u16;

    fn tls_config(&self, _: u16) -> Result<ServerConfig, Error> {
        Ok(self.config.clone())
    }

    fn open(&mut self, finished: FinishedHandshake<u16>) -> Result<(), Error> {
        let _ = self.outcomes.send(Outcome::Open(Box::new(finished)));
        Ok(())
    }

    fn report_refused(&self, _: &str, _: u16, why: &Refusal) {
        let _ = self.outcomes.send(Outcome::Refused(why.clone()));
    }
}

fn psk(identity: &[u8]) -> Psk {
    let secret = SecretBytes::new(vec![7; 32]);
    Psk { identity: identity.to_vec(), secret, hash: Hash::Sha256, derivation: None }
}

impl TestThread {
    fn start(limits: HandshakeLimits) -> Self {
        let (sender, outcomes) = channel();
        let config = ServerConfig::with_psks(Arc::new(vec![psk(b"host")])).unwrap();
        let owner = RecordingOwner { config, outcomes: sender };
        let thread = HandshakeThread::start("test", owner, limits, Clock::start()).unwrap();
        Self { thread, outcomes }
    }

    /// Adds a connection, and returns its client end.
    fn connect(&self, accepts_plaintext: bool) -> HandshakeSocket {
        let [client, server] = loopback_pair().unwrap();
        let prelude = Box::new(FirstBytePrelude { accepts_plaintext });
        self.thread.add(server, prelude, 9).unwrap();
        HandshakeSocket::new(client).unwrap()
    }

    /// Waits until the thread has taken over every connection.
    fn wait_for_empty_inbox(&self) {
        while !self.thread.inbox.lock().unwrap().is_empty() {
            tenmil_linux::named_thread::yield_cpu();
        }
    }

    fn outcome(&self) -> Outcome {
        self.outcomes.recv_timeout(Duration::from_secs(20)).unwrap()
    }

    fn refusal(&self) -> Refusal {
        match self.outcome() {
            Outcome::Refused(why) => why,
            Outcome::Open(open) => panic!("{open:?}"),
        }
    }
}

/// Runs the client's side; returns its error.
fn handshake(socket: HandshakeSocket, identity: &[u8]) -> Result<(SocketIo, TlsSession), TlsError> {
    let config = ClientConfig::with_psks([psk(identity)]).unwrap();
    let (mut io, mut session) = (SocketIo::new(socket), TlsSession::client(&config).unwrap());
    loop {
        let is_open = session.handshake(&mut io)?;
        io.flush();
        if is_open {
            return Ok((io, session));
        }
        tenmil_linux::named_thread::yield_cpu();
    }
}

#[test]
fn session_reaches_the_owner_with_what_follows_it() {
    let test = TestThread::start(HandshakeLimits::default());
    let (mut io, mut session) = handshake(test.connect(false), b"host").unwrap();
    session.send(&mut io, b"first request").unwrap();
    io.flush();
    let Outcome::Open(open) = test.outcome() else { panic!() };
    assert_eq!((open.origin, open.received.len()), (9, 0));
    let mut server = open.session.unwrap();
    let channel = server.secure_channel().unwrap();
    assert_eq!(channel.psk_identity.as_deref(), Some("host"));
    let mut io = SocketIo::new(HandshakeSocket::new(open.socket).unwrap());
    let mut into = [0; 64];
    let count = loop {
        match server.receive(&mut io, &mut into).unwrap() {
            tenmil_tls::Plaintext::Bytes(count) => break count,
            _ => tenmil_linux::named_thread::yield_cpu(),
        }
    };
    assert_eq!(&into[..count], b"first request");
}

#[test]
fn plaintext_reaches_the_owner_only_where_it_is_accepted() {
    let test = TestThread::start(HandshakeLimits::default());
    let socket = test.connect(true);
    assert_eq!(socket.send(&[0, 0, 128, 0]).unwrap(), 4);
    let Outcome::Open(open) = test.outcome() else { panic!() };
    assert!(open.session.is_none());
    let server = HandshakeSocket::new(open.socket).unwrap();
    assert_eq!(server.peek_byte().unwrap(), Some(0), "all bytes are left in the socket");

    let socket = test.connect(false);
    assert_eq!(socket.send(&[0, 0, 128, 0]).unwrap(), 4);
    assert_eq!(test.refusal(), Refusal::Plaintext);
    let mut into = [0; 8];
    let end = loop {
        match socket.receive(&mut into).unwrap() {
            RecvResult::WouldBlock => tenmil_linux::named_thread::yield_cpu(),
            end => break end,
        }
    };
    assert_eq!(end, RecvResult::Eof, "nothing is answered in the clear");
}

#[test]
fn unknown_identity_is_refused_at_both_ends() {
    let test = TestThread::start(HandshakeLimits::default());
    let client = handshake(test.connect(false), b"stranger").map(drop).unwrap_err();
    assert!(client.to_string().contains("unknown_psk_identity"), "{client}");
    let why = test.refusal().to_string();
    assert!(why.contains("no key for identity \"stranger\" in the configured keys"), "{why}");
}

#[test]
fn silent_and_slow_peers_are_ended_at_their_deadline() {
    let limits = HandshakeLimits { time: Span::from_ms(50), ..HandshakeLimits::default() };
    let test = TestThread::start(limits);
    let silent = test.connect(true);
    let slow = test.connect(false);
    assert_eq!(slow.send(&[22, 3, 1]).unwrap(), 3);
    for _ in 0..2 {
        assert_eq!(test.refusal(), Refusal::Timeout { limit: limits.time });
    }
    let text = Refusal::Timeout { limit: Span::from_secs(10) }.to_string();
    assert!(text.contains("not finished within 10"), "{text}");
    drop((silent, slow));
    // A peer that closes is no longer waited for.
    drop(test.connect(false));
    assert_eq!(test.refusal(), Refusal::Closed);
}

#[test]
fn handshakes_of_one_address_are_bounded_and_their_places_return() {
    let limits = HandshakeLimits { per_address_max: 3, ..HandshakeLimits::default() };
    let test = TestThread::start(limits);
    let held: Vec<HandshakeSocket> = (0..3).map(|_| test.connect(false)).collect();
    let _refused = test.connect(false);
    assert_eq!(test.refusal(), Refusal::Limit { of: "its address", limit: 3 });
    drop(held);
    for _ in 0..3 {
        assert_eq!(test.refusal(), Refusal::Closed);
    }
    assert!(handshake(test.connect(false), b"host").is_ok());
}

#[test]
fn handshakes_have_less_time_while_many_are_in_progress() {
    let limits = HandshakeLimits { all_max: 4, time: Span::from_secs(5), per_address_max: 100 };
    let test = TestThread::start(limits);
    let _held: Vec<HandshakeSocket> = (0..4).map(|_| test.connect(false)).collect();
    // Otherwise there may be no place for the next one in the inbox.
    test.wait_for_empty_inbox();
    let _refused = test.connect(false);
    assert_eq!(test.refusal(), Refusal::Limit { of: "all addresses", limit: 4 });
    for _ in 0..2 {
        assert_eq!(test.refusal(), Refusal::Timeout { limit: Span::from_ms(500) });
    }
}

#[test]
fn dropped_thread_closes_what_is_in_progress() {
    let test = TestThread::start(HandshakeLimits::default());
    let socket = test.connect(false);
    assert_eq!(socket.send(&[22]).unwrap(), 1);
    drop(test.thread);
    let mut into = [0; 8];
    let end = loop {
        match socket.receive(&mut into) {
            Ok(RecvResult::WouldBlock) => tenmil_linux::named_thread::yield_cpu(),
            end => break end.unwrap(),
        }
    };
    assert_eq!(end, RecvResult::Eof);
    let _: OwnedFd = socket.into();
}
