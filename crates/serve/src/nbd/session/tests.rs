//! Session in simulated time: its waits for the client, for memory and for the device.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};

use tenmil_base::{
    ChannelWakeup, CompletionBatch, Instant, IoChannel, Limits, Request, Segment, Span,
};
use tenmil_block::{Bdev, BdevOptions};
use tenmil_dma::RegionTable;
use tenmil_drivers::RamDevice;
use tenmil_linux::Clock;
use tenmil_linux::stream::Stream;
use tenmil_reactor::Poller;
use tenmil_wire::nbd::{Command, RequestHeader};

use super::{NEGOTIATION_TIMEOUT, Session, SessionParts};
use crate::nbd::exported_device::{ExportConfig, ExportedDevice};
use crate::nbd::memory::LARGE_BYTES;
use crate::nbd::pool::Pool;
use crate::nbd::progress::WINDOW;
use crate::nbd::server::MemoryLease;
use crate::nbd::session_handle::{DisconnectReason, NbdEvent, SessionHandle};
use crate::nbd::slow_query::SlowQueries;
use crate::nbd::tests::client::{handshake, request, write};

/// Session, and the client end of its socket.
struct World {
    session: Session,
    client: UnixStream,
    pool: Arc<Pool>,
    fences: Arc<AtomicUsize>,
    _news: Receiver<NbdEvent>,
    _device: Bdev,
}

/// Backend that records fences of writes; it completes nothing while it is stuck.
struct Watched {
    backend: Box<dyn IoChannel>,
    is_stuck: bool,
    fences: Arc<AtomicUsize>,
}

impl IoChannel for Watched {
    fn limits(&self) -> &Limits {
        self.backend.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        if self.is_stuck { requests.len() } else { self.backend.submit(now, requests, segments) }
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        self.backend.poll(now, completions)
    }

    fn fence_writes(&mut self) {
        self.fences.fetch_add(1, Ordering::Relaxed);
    }
}

impl ChannelWakeup for Watched {}

/// Number of blocks of the buffer pool.
const PIECES: usize = 32;

fn at(ms: u64) -> Instant {
    Instant::default().after(Span::from_ms(ms))
}

/// Time at which a client that does nothing from the beginning is too slow.
fn end() -> Instant {
    Instant::default().after(WINDOW)
}

impl World {
    fn new(is_stuck: bool) -> Self {
        Self::with(is_stuck, None)
    }

    fn with(is_stuck: bool, idle_max: Option<Span>) -> Self {
        let mut world = Self::connected(is_stuck, idle_max);
        world.send(at(0), &handshake(false));
        assert_eq!(world.replies(), 32 + 34 + 20);
        world
    }

    /// One whose client has sent nothing.
    fn greeted(is_stuck: bool) -> Self {
        Self::connected(is_stuck, None)
    }

    fn connected(is_stuck: bool, idle_max: Option<Span>) -> Self {
        let regions = RegionTable::new(16);
        let ram = Arc::new(RamDevice::new(&regions, 512, 16 << 11).unwrap());
        let device = Bdev::new("ram0", ram, BdevOptions::new(Clock::start(), 1)).unwrap();
        let exported_device = ExportedDevice::new(ExportConfig {
            name: "disk".into(),
            description: String::new(),
            uri: "ram:16m".into(),
            device: &device,
            limiter: None,
            is_read_only: false,
            allows_resize: false,
            regions: &regions,
        });
        let exported_device = Arc::new(exported_device.unwrap());
        let pool = Pool::new(&regions, u32::try_from(PIECES).unwrap() * LARGE_BYTES).unwrap();
        let (pool, fences) = (Arc::new(pool), Arc::new(AtomicUsize::new(0)));
        let (client, socket) = UnixStream::pair().unwrap();
        client.set_nonblocking(true).unwrap();
        let (event_sender, new_events) = channel();
        let backend = exported_device.medium().channel().unwrap();
        let backend = Watched { backend, is_stuck, fences: Arc::clone(&fences) };
        let session = Session::new(SessionParts {
            stream: Stream::new(OwnedFd::from(socket), regions.clone()).unwrap(),
            backend: Box::new(backend),
            exported_device: Arc::clone(&exported_device),
            handle: Arc::new(SessionHandle::new(1, "client".into(), event_sender)),
            regions: regions.clone(),
            slow_queries: SlowQueries::new(
                exported_device,
                Arc::new(tenmil_linux::thread_pool::ThreadPool::new(1, 1)),
            ),
            memory_lease: MemoryLease::take(&Arc::default(), &regions, "", (1, 1)).unwrap(),
            pool: Arc::clone(&pool),
            idle_max,
            now: at(0),
        });
        let session = session.unwrap();
        let mut world = Self { session, client, pool, fences, _news: new_events, _device: device };
        world.turn(at(0));
        assert_eq!(world.replies(), 18, "the greeting");
        world
    }

    /// Runs iterations while there is work.
    fn turn(&mut self, now: Instant) {
        for _ in 0..100 {
            self.session.disarm();
            let count = self.session.work(now);
            self.session.check_deadlines(now);
            self.session.flush();
            if count == 0 {
                break;
            }
        }
    }

    fn send(&mut self, now: Instant, bytes: &[u8]) {
        let mut left = bytes;
        while !left.is_empty() {
            match self.client.write(left) {
                Ok(count) => left = &left[count..],
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
            self.turn(now);
        }
    }

    /// Receives the replies; returns their number of bytes.
    fn replies(&mut self) -> usize {
        let mut bytes = vec![0; 1 << 20];
        self.client.read(&mut bytes).unwrap_or(0)
    }

    fn is_too_slow(&self) -> bool {
        self.session.reason == Some(DisconnectReason::TooSlow)
    }
}

#[test]
fn client_that_stops_within_a_request_is_disconnected_after_a_window() {
    let whole = write(1, 0, &[7; 1 << 16]);
    for len in [1, RequestHeader::BYTES - 1, RequestHeader::BYTES, whole.len() - 1] {
        let mut world = World::new(false);
        world.send(at(0), &whole[..len]);
        assert_eq!(world.session.wake_at(), end(), "{len} bytes");
        world.turn(Instant { ns: end().ns - 1 });
        assert!(!world.is_too_slow(), "{len} bytes");
        world.turn(end());
        assert!(world.is_too_slow() && world.session.connection.is_over(), "{len} bytes");
    }
}

#[test]
fn client_that_does_not_end_the_negotiation_is_disconnected_when_its_time_is_over() {
    let (whole, end) = (handshake(false), at(0).after(NEGOTIATION_TIMEOUT));
    // However much it says, and however late.
    for (len, when) in [(0, at(0)), (1, at(0)), (4, at(29_000)), (whole.len() - 1, at(29_000))] {
        let mut world = World::greeted(false);
        world.send(when, &whole[..len]);
        world.turn(Instant { ns: end.ns - 1 });
        assert!(!world.is_too_slow() && world.session.wake_at() <= end, "{len} bytes");
        world.turn(end);
        assert!(world.is_too_slow() && world.session.connection.is_over(), "{len} bytes");
    }
    let mut world = World::greeted(false);
    world.send(Instant { ns: end.ns - 1 }, &whole);
    world.turn(end);
    assert_eq!((world.session.reason.clone(), world.session.wake_at()), (None, Instant::NEVER));
}

#[test]
fn client_that_owes_nothing_is_idle_as_long_as_it_likes() {
    let mut world = World::new(false);
    world.send(at(0), &write(1, 0, &[7; 512]));
    assert_eq!((world.replies(), world.session.wake_at()), (16, Instant::NEVER));
    world.turn(at(1_000_000));
    world.send(at(1_000_000), &request(Command::READ, 2, 0, 512));
    assert_eq!((world.replies(), world.session.reason.clone()), (16 + 512, None));
}

#[test]
fn client_that_asks_for_nothing_is_disconnected_after_the_idle_timeout() {
    let mut world = World::with(false, Some(Span::from_ms(5000)));
    assert_eq!(world.session.wake_at(), at(5000));
    for round in 0..3 {
        let now = at(4000 * round);
        world.send(now, &request(Command::READ, round, 0, 512));
        assert_eq!((world.replies(), world.session.reason.clone()), (16 + 512, None));
        assert_eq!(world.session.wake_at(), now.after(Span::from_ms(5000)));
    }
    world.turn(at(12_999));
    assert_eq!(world.session.reason, None);
    world.turn(at(13_000));
    assert_eq!(world.session.reason, Some(DisconnectReason::Idle));
    assert!(world.session.connection.is_over());
}

#[test]
fn client_that_waits_for_an_answer_is_not_idle() {
    let mut world = World::with(true, Some(Span::from_ms(5000)));
    world.send(at(0), &write(1, 0, &[7; 512]));
    world.turn(at(100_000));
    assert_eq!((world.session.reason.clone(), world.session.deadline), (None, Instant::NEVER));
    // One that has begun to send a request is too slow, and not idle.
    let mut world = World::with(false, Some(Span::from_ms(100_000)));
    world.send(at(0), &write(1, 0, &[7; 512])[..40]);
    world.turn(end());
    assert!(world.is_too_slow());
}

#[test]
fn client_that_receives_no_replies_is_disconnected_after_a_window() {
    let mut world = World::new(false);
    for cookie in 0..8 {
        world.send(at(0), &request(Command::READ, cookie, 0, 1 << 20));
    }
    assert!(world.session.is_blocked);
    world.turn(Instant { ns: end().ns - 1 });
    assert!(!world.is_too_slow());
    // The client receives enough and gets another window.
    while world.replies() > 0 {
        world.turn(Instant { ns: end().ns - 1 });
    }
    for cookie in 0..8 {
        world.send(end(), &request(Command::READ, cookie, 0, 1 << 20));
    }
    assert!(world.session.is_blocked && !world.is_too_slow());
    world.turn(end().after(WINDOW));
    assert!(world.is_too_slow());
}

#[test]
fn request_that_waits_for_memory_goes_on_when_it_is_given_back() {
    let mut world = World::new(false);
    let mut others = Vec::new();
    assert!(world.pool.lease(PIECES, 0, &mut others));
    let whole = write(1, 0, &[7; 2 << 20]);
    world.client.write_all(&whole[..1 << 10]).unwrap();
    world.turn(at(0));
    assert!(world.session.connection.waits_for_memory());
    // The server causes the delay, not the client.
    world.turn(at(60_000));
    assert!(world.session.reason.is_none());
    world.pool.release(others.into_iter());
    world.turn(at(60_001));
    world.turn(at(60_002));
    assert!(!world.session.connection.waits_for_memory());
    world.send(at(60_002), &whole[1 << 10..]);
    assert_eq!(world.replies(), 16);
    assert!(world.pool.free() < PIECES);
    world.session.arm();
    assert_eq!(world.pool.free(), PIECES, "it sleeps without them");
}

#[test]
fn what_a_client_that_has_gone_still_writes_is_closed_to_everyone() {
    let mut world = World::new(true);
    world.send(at(0), &write(1, 0, &[7; 512]));
    assert_eq!(world.fences.load(Ordering::Relaxed), 0);
    world.client.shutdown(std::net::Shutdown::Both).unwrap();
    world.turn(at(1));
    assert!(world.fences.load(Ordering::Relaxed) > 0);
    // The session exists until its device has completed the requests.
    world.turn(at(100_000));
    assert!(!world.session.connection.is_over());
}
