//! Session in simulated time: its waits for the client, for memory and for the device.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};

use tenmil_base::{
    ChannelWakeup, CompletionBatch, Instant, Interrupts, IoChannel, Limits, Request, Segment, Span,
    WakeSource,
};
use tenmil_block::{Bdev, BdevOptions};
use tenmil_dma::RegionTable;
use tenmil_drivers::RamDevice;
use tenmil_linux::poll_set::PollSet;
use tenmil_linux::socket_stream::SocketStream;
use tenmil_linux::{Clock, EventFdVectors};
use tenmil_reactor::Poller;
use tenmil_wire::nbd::{Command, RequestHeader};

use super::{NEGOTIATION_TIMEOUT, SOCKET, Session, SessionParts, watch_channel};
use crate::nbd::buffer_pool::BufferPool;
use crate::nbd::connection::NegotiationStart;
use crate::nbd::connection_memory::LARGE_BYTES;
use crate::nbd::export_set::{ExportSet, OfferedExports};
use crate::nbd::exported_device::{ExportConfig, ExportedDevice};
use crate::nbd::server::ConnectionMemoryLease;
use crate::nbd::session_handle::{DisconnectReason, ExportEvent, SessionHandle};
use crate::nbd::session_stream::READABLE;
use crate::nbd::slow_query::SlowQueries;
use crate::nbd::tests::client_messages::{encode_handshake, encode_request, encode_write};
use crate::nbd::transfer_rate::WINDOW;
use crate::slow_io::SlowIoStages;

/// Session, and the client end of its socket.
struct TestSession {
    session: Session,
    client: UnixStream,
    pool: Arc<BufferPool>,
    fences: Arc<AtomicUsize>,
    _news: Receiver<ExportEvent>,
    _device: Bdev,
}

/// Backend that records fences of writes; it completes nothing while it is stuck.
struct ManualDevice {
    backend: Box<dyn IoChannel>,
    is_stuck: bool,
    fences: Arc<AtomicUsize>,
}

impl IoChannel for ManualDevice {
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

impl ChannelWakeup for ManualDevice {}

/// Number of blocks of the buffer pool.
const PIECES: usize = 32;

fn instant_at_ms(ms: u64) -> Instant {
    Instant::default().after(Span::from_ms(ms))
}

/// Time at which a client that does nothing from the beginning is too slow.
fn rate_window_end() -> Instant {
    Instant::default().after(WINDOW)
}

impl TestSession {
    fn new(is_stuck: bool) -> Self {
        Self::with_limits(is_stuck, None)
    }

    fn with_limits(is_stuck: bool, idle_max: Option<Span>) -> Self {
        let mut world = Self::in_transmission(is_stuck, idle_max);
        world.send(instant_at_ms(0), &encode_handshake(false));
        assert_eq!(world.receive_reply_bytes(), 32 + 34 + 20);
        world
    }

    /// One whose client has sent nothing.
    fn before_client_flags(is_stuck: bool) -> Self {
        Self::in_transmission(is_stuck, None)
    }

    fn in_transmission(is_stuck: bool, idle_max: Option<Span>) -> Self {
        let regions = RegionTable::new(16);
        let ram = Arc::new(RamDevice::new(&regions, 512, 16 << 11).unwrap());
        let device = Bdev::new("ram0", ram, BdevOptions::new(Clock::start(), 1)).unwrap();
        let exported_device = ExportedDevice::new(ExportConfig {
            name: "disk".into(),
            description: String::new(),
            uri: "ram:16m".into(),
            device: &device,
            limits: tenmil_block::QosLimits::default(),
            is_read_only: false,
            allows_resize: false,
            regions: &regions,
        });
        let exported_device = Arc::new(exported_device.unwrap());
        let pool = BufferPool::new(&regions, u32::try_from(PIECES).unwrap() * LARGE_BYTES).unwrap();
        let (pool, fences) = (Arc::new(pool), Arc::new(AtomicUsize::new(0)));
        let (client, socket) = UnixStream::pair().unwrap();
        client.set_nonblocking(true).unwrap();
        let (event_sender, new_events) = channel();
        let exports = ExportSet::default();
        exports.add(Arc::clone(&exported_device), vec![0]).unwrap();
        let handle = Arc::new(SessionHandle::new(1, "client".into(), event_sender));
        let registered = exports.add_session(Arc::clone(&handle), 0);
        let of_device = Arc::clone(&fences);
        let open_selected = Box::new(move |device: &ExportedDevice| {
            let backend = device.block_device().channel()?;
            Ok(Box::new(ManualDevice { backend, is_stuck, fences: of_device.clone() }) as _)
        });
        let session = Session::new(SessionParts {
            stream: SocketStream::new(OwnedFd::from(socket), regions.clone()).unwrap(),
            start: NegotiationStart::Greeting,
            offered: OfferedExports::OfListener(exports.clone(), 0),
            exports,
            registered,
            open_selected,
            handle,
            regions: regions.clone(),
            slow_queries: SlowQueries::new(Arc::new(tenmil_linux::thread_pool::ThreadPool::new(
                1, 1,
            ))),
            memory_lease: ConnectionMemoryLease::allocate(&Arc::default(), &regions, "", (1, 1))
                .unwrap(),
            pool: Arc::clone(&pool),
            idle_max,
            now: instant_at_ms(0),
        });
        let session = session.unwrap();
        let mut world = Self { session, client, pool, fences, _news: new_events, _device: device };
        world.run_until_idle(instant_at_ms(0));
        assert_eq!(world.receive_reply_bytes(), 18, "the greeting");
        world
    }

    /// Runs iterations while there is work.
    fn run_until_idle(&mut self, now: Instant) {
        for _ in 0..100 {
            self.session.disarm();
            let count = self.session.run_iteration(now);
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
            self.run_until_idle(now);
        }
    }

    /// Receives the replies; returns their number of bytes.
    fn receive_reply_bytes(&mut self) -> usize {
        let mut bytes = vec![0; 1 << 20];
        self.client.read(&mut bytes).unwrap_or(0)
    }

    fn was_disconnected_as_too_slow(&self) -> bool {
        self.session.reason == Some(DisconnectReason::TooSlow)
    }
}

#[test]
fn client_that_stops_within_a_request_is_disconnected_after_the_rate_window() {
    let whole = encode_write(1, 0, &[7; 1 << 16]);
    for len in [1, RequestHeader::BYTES - 1, RequestHeader::BYTES, whole.len() - 1] {
        let mut world = TestSession::new(false);
        world.send(instant_at_ms(0), &whole[..len]);
        assert_eq!(world.session.wake_at(), rate_window_end(), "{len} bytes");
        world.run_until_idle(Instant { ns: rate_window_end().ns - 1 });
        assert!(!world.was_disconnected_as_too_slow(), "{len} bytes");
        world.run_until_idle(rate_window_end());
        assert!(
            world.was_disconnected_as_too_slow() && world.session.connection.is_finished(),
            "{len} bytes"
        );
    }
}

#[test]
fn client_that_does_not_finish_negotiation_is_disconnected_at_the_timeout() {
    let (whole, end) = (encode_handshake(false), instant_at_ms(0).after(NEGOTIATION_TIMEOUT));
    // However much it says, and however late.
    for (len, when) in [
        (0, instant_at_ms(0)),
        (1, instant_at_ms(0)),
        (4, instant_at_ms(29_000)),
        (whole.len() - 1, instant_at_ms(29_000)),
    ] {
        let mut world = TestSession::before_client_flags(false);
        world.send(when, &whole[..len]);
        world.run_until_idle(Instant { ns: end.ns - 1 });
        assert!(
            !world.was_disconnected_as_too_slow() && world.session.wake_at() <= end,
            "{len} bytes"
        );
        world.run_until_idle(end);
        assert!(
            world.was_disconnected_as_too_slow() && world.session.connection.is_finished(),
            "{len} bytes"
        );
    }
    let mut world = TestSession::before_client_flags(false);
    world.send(Instant { ns: end.ns - 1 }, &whole);
    world.run_until_idle(end);
    assert_eq!((world.session.reason.clone(), world.session.wake_at()), (None, Instant::NEVER));
}

#[test]
fn client_without_partial_request_may_be_idle_indefinitely() {
    let mut world = TestSession::new(false);
    world.send(instant_at_ms(0), &encode_write(1, 0, &[7; 512]));
    assert_eq!((world.receive_reply_bytes(), world.session.wake_at()), (16, Instant::NEVER));
    world.run_until_idle(instant_at_ms(1_000_000));
    world.send(instant_at_ms(1_000_000), &encode_request(Command::READ, 2, 0, 512));
    assert_eq!((world.receive_reply_bytes(), world.session.reason.clone()), (16 + 512, None));
}

#[test]
fn client_without_requests_is_disconnected_after_the_idle_timeout() {
    let mut world = TestSession::with_limits(false, Some(Span::from_ms(5000)));
    assert_eq!(world.session.wake_at(), instant_at_ms(5000));
    for round in 0..3 {
        let now = instant_at_ms(4000 * round);
        world.send(now, &encode_request(Command::READ, round, 0, 512));
        assert_eq!((world.receive_reply_bytes(), world.session.reason.clone()), (16 + 512, None));
        assert_eq!(world.session.wake_at(), now.after(Span::from_ms(5000)));
    }
    world.run_until_idle(instant_at_ms(12_999));
    assert_eq!(world.session.reason, None);
    world.run_until_idle(instant_at_ms(13_000));
    assert_eq!(world.session.reason, Some(DisconnectReason::Idle));
    assert!(world.session.connection.is_finished());
}

#[test]
fn client_with_outstanding_request_is_not_idle() {
    let mut world = TestSession::with_limits(true, Some(Span::from_ms(5000)));
    world.send(instant_at_ms(0), &encode_write(1, 0, &[7; 512]));
    world.run_until_idle(instant_at_ms(100_000));
    assert_eq!((world.session.reason.clone(), world.session.deadline), (None, Instant::NEVER));
    // One that has begun to send a request is too slow, and not idle.
    let mut world = TestSession::with_limits(false, Some(Span::from_ms(100_000)));
    world.send(instant_at_ms(0), &encode_write(1, 0, &[7; 512])[..40]);
    world.run_until_idle(rate_window_end());
    assert!(world.was_disconnected_as_too_slow());
}

#[test]
fn client_that_does_not_receive_replies_is_disconnected_after_the_rate_window() {
    let mut world = TestSession::new(false);
    for cookie in 0..8 {
        world.send(instant_at_ms(0), &encode_request(Command::READ, cookie, 0, 1 << 20));
    }
    assert!(world.session.is_blocked);
    world.run_until_idle(Instant { ns: rate_window_end().ns - 1 });
    assert!(!world.was_disconnected_as_too_slow());
    // The client receives enough and gets another window.
    while world.receive_reply_bytes() > 0 {
        world.run_until_idle(Instant { ns: rate_window_end().ns - 1 });
    }
    for cookie in 0..8 {
        world.send(rate_window_end(), &encode_request(Command::READ, cookie, 0, 1 << 20));
    }
    assert!(world.session.is_blocked && !world.was_disconnected_as_too_slow());
    world.run_until_idle(rate_window_end().after(WINDOW));
    assert!(world.was_disconnected_as_too_slow());
}

#[test]
fn request_waiting_for_memory_continues_when_memory_is_freed() {
    let mut world = TestSession::new(false);
    let mut others = Vec::new();
    assert!(world.pool.try_lease_buffers(PIECES, 0, &mut others));
    let whole = encode_write(1, 0, &[7; 2 << 20]);
    world.client.write_all(&whole[..1 << 10]).unwrap();
    world.run_until_idle(instant_at_ms(0));
    assert!(world.session.connection.is_waiting_for_memory());
    // The server causes the delay, not the client.
    world.run_until_idle(instant_at_ms(60_000));
    assert!(world.session.reason.is_none());
    world.pool.release_buffers(others.into_iter());
    world.run_until_idle(instant_at_ms(60_001));
    world.run_until_idle(instant_at_ms(60_002));
    assert!(!world.session.connection.is_waiting_for_memory());
    world.send(instant_at_ms(60_002), &whole[1 << 10..]);
    assert_eq!(world.receive_reply_bytes(), 16);
    assert!(world.pool.free_buffer_count() < PIECES);
    world.session.arm();
    assert_eq!(world.pool.free_buffer_count(), PIECES, "it sleeps without them");
}

#[test]
fn writes_in_flight_of_a_closed_session_fence_their_blocks() {
    let mut world = TestSession::new(true);
    world.send(instant_at_ms(0), &encode_write(1, 0, &[7; 512]));
    assert_eq!(world.fences.load(Ordering::Relaxed), 0);
    world.client.shutdown(std::net::Shutdown::Both).unwrap();
    world.run_until_idle(instant_at_ms(1));
    assert!(world.fences.load(Ordering::Relaxed) > 0);
    // The session exists until its device has completed the requests.
    world.run_until_idle(instant_at_ms(100_000));
    assert!(!world.session.connection.is_finished());
}

#[test]
fn slow_request_is_logged_with_stages_that_add_up() {
    let mut world = TestSession::new(false);
    let export = world.session.exported_device.clone().unwrap();
    let write = encode_write(7, 512, &[7; 4096]);
    let mut write_slowly = |begin| {
        world.send(instant_at_ms(begin), &write[..1000]);
        world.send(instant_at_ms(begin + 5), &write[1000..]);
    };
    write_slowly(1);
    assert_eq!(export.slow_io().log().next_command(), None, "there is no threshold");
    export.slow_io().set_threshold(Some(Span::from_ms(5)));
    write_slowly(10);
    let slow = export.slow_io().log().next_command().unwrap();
    let expected = SlowIoStages {
        transfer: Some(Span::from_ms(5)),
        send: Some(Span::default()),
        ..SlowIoStages::default()
    };
    assert_eq!((slow.received_at, slow.stages), (instant_at_ms(10), expected));
    assert_eq!(
        (slow.operation, slow.start, slow.len_bytes, slow.id),
        ("write", Some(512), 4096, 7)
    );
    assert_eq!((slow.source.export.as_str(), slow.source.peer.as_str()), ("disk", "client"));
    export.slow_io().set_threshold(Some(Span::from_ms(6)));
    write_slowly(20);
    assert_eq!(export.slow_io().log().next_command(), None, "it is faster");
    assert_eq!(export.slow_io().count(), 1);
}

/// Channel whose wake source is a set in a set, as of a stack of devices.
struct DeepChannel {
    event: EventFdVectors,
    sets: Vec<PollSet>,
}

impl DeepChannel {
    fn new(depth: usize) -> Self {
        let event = EventFdVectors::new(1).unwrap();
        let mut sets: Vec<PollSet> = Vec::new();
        for _ in 0..depth {
            let set = PollSet::new().unwrap();
            match sets.last() {
                Some(inner) => set.add(inner, 0, READABLE).unwrap(),
                None => set.add(event.descriptor(0).unwrap(), 0, READABLE).unwrap(),
            }
            sets.push(set);
        }
        Self { event, sets }
    }
}

impl ChannelWakeup for DeepChannel {
    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Descriptor(match self.sets.last() {
            Some(set) => set.as_fd(),
            None => self.event.descriptor(0).unwrap(),
        })
    }
}

impl IoChannel for DeepChannel {
    fn limits(&self) -> &Limits {
        unreachable!("no request")
    }

    fn submit(&mut self, _: Instant, _: &[Request], _: &[Segment]) -> usize {
        unreachable!("no request")
    }

    fn poll(&mut self, _: Instant, _: &mut CompletionBatch) -> usize {
        unreachable!("no request")
    }
}

#[test]
fn channel_of_a_deep_stack_is_polled_and_the_socket_still_waited_for() {
    let is_watched = |depth: usize, has_reactor: bool| {
        let mut channel = DeepChannel::new(depth);
        let (reactor, watch) = (PollSet::new().unwrap(), PollSet::new().unwrap());
        let mut socket = EventFdVectors::new(1).unwrap();
        watch.add(socket.descriptor(0).unwrap(), SOCKET, READABLE).unwrap();
        if has_reactor {
            reactor.add(&watch, 0, READABLE).unwrap();
        }
        let is_watched = watch_channel(&watch, &channel).unwrap();
        if !has_reactor {
            // It is never too deep for the reactor.
            reactor.add(&watch, 0, READABLE).unwrap();
        }
        let mut found = Vec::new();
        channel.event.raise(0);
        reactor.wait(Some(Span::default()), &mut found).unwrap();
        assert_eq!(!found.is_empty(), is_watched, "{depth} sets");
        socket.raise(0);
        reactor.wait(Some(Span::default()), &mut found).unwrap();
        assert_eq!(found.len(), 1, "{depth} sets");
        is_watched
    };
    for depth in 0..=5 {
        // With one export the reactor comes last, with several it is there when one is selected.
        let found = [false, true].map(|has_reactor| is_watched(depth, has_reactor));
        match depth {
            0..=2 => assert_eq!(found, [true; 2], "{depth} sets"),
            3 => {}
            _ => assert_eq!(found, [false; 2], "{depth} sets"),
        }
    }
}
