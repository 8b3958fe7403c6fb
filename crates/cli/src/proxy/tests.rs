use std::collections::BTreeSet;

use tenmil_base::{RecvResult, SendSlice, Span, Stream};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;
use tenmil_linux::socket::{
    ConnectOp, ListenAddress, SocketOptions, SocketStreamFactory, StreamListener,
};
use tenmil_linux::thread_pool::ThreadPool;
use tenmil_sim::sim_network::{LinkFault, LinkFaults, LinkOptions};

use super::{FaultProxy, ProxyConfig};

/// Proxy, client and target, polled by one thread.
struct ProxyTest {
    clock: Clock,
    proxy: FaultProxy,
    listener: StreamListener,
    pool: ThreadPool,
    sockets: SocketStreamFactory,
    reported: Vec<String>,
}

fn any_address() -> ListenAddress {
    ListenAddress::Tcp("127.0.0.1:0".parse().unwrap())
}

impl ProxyTest {
    fn new(there: LinkOptions, back: LinkOptions) -> Self {
        let listener = StreamListener::open(&any_address()).unwrap();
        let plan = ProxyConfig {
            listen: "127.0.0.1:0".parse().unwrap(),
            target: listener.address().to_string(),
            there,
            back,
            seed: 7,
        };
        Self {
            clock: Clock::start(),
            proxy: FaultProxy::new(plan).unwrap(),
            listener,
            pool: ThreadPool::new(1, 1),
            sockets: SocketStreamFactory::new(RegionTable::new(1), SocketOptions::default()),
            reported: Vec::new(),
        }
    }

    fn poll(&mut self) {
        let reported = &mut self.reported;
        self.proxy.poll(self.clock.now(), &mut |line| reported.push(line));
    }

    /// Polls until `found` returns a value.
    fn poll_until<T>(&mut self, mut found: impl FnMut(&mut Self) -> Option<T>) -> T {
        let late = self.clock.now().after(Span::from_secs(20));
        while self.clock.now() < late {
            self.poll();
            if let Some(found) = found(self) {
                return found;
            }
            self.proxy.wait_for_event(self.clock.now(), Span::from_us(100)).unwrap();
        }
        panic!("it never happens; {:?}", self.reported);
    }

    /// Connects a client and accepts at the target.
    fn connect(&mut self) -> [Box<dyn Stream>; 2] {
        let now = self.clock.now();
        let address = self.proxy.address().to_string();
        let late = now.after(Span::from_secs(10));
        let mut dial = ConnectOp::start(&address, &self.pool, now, late).unwrap();
        let near = self.poll_until(|world| dial.poll(world.clock.now())).unwrap();
        let far = self.poll_until(|world| world.listener.accept().unwrap());
        [near, far].map(|socket| self.sockets.new_stream(socket).unwrap())
    }

    /// Receives until the end: the byte count and how it ended.
    fn drain(&mut self, stream: &mut dyn Stream) -> (usize, RecvResult) {
        let over = self.poll_until(|_| match stream.receive() {
            RecvResult::Bytes(_) | RecvResult::WouldBlock => None,
            over => Some(over),
        });
        (stream.buffered().len(), over)
    }
}

fn send(stream: &mut dyn Stream, bytes: &[u8]) {
    let len_bytes = u32::try_from(bytes.len()).unwrap();
    let all = [SendSlice::Headers { at: 0, len_bytes }];
    assert_eq!(stream.send(bytes, &all, false), Ok(bytes.len()));
}

fn proxy_with_faults(at: u64, fault: LinkFault) -> LinkOptions {
    LinkOptions { faults: LinkFaults::single(at, fault), ..LinkOptions::default() }
}

#[test]
fn bytes_and_stream_ends_are_forwarded_both_ways() {
    let rough = LinkOptions {
        splits: true,
        delay: Span::from_us(300),
        jitter: Span::from_us(300),
        room_bytes: 5000,
        ..LinkOptions::default()
    };
    let mut world = ProxyTest::new(rough.clone(), rough);
    let [mut near, mut far] = world.connect();
    let bytes: Vec<u8> = (0..=250).cycle().take(60_000).collect();
    send(near.as_mut(), &bytes);
    near.shutdown_write();
    assert_eq!(world.drain(far.as_mut()), (bytes.len(), RecvResult::Eof));
    assert_eq!(far.buffered(), bytes);
    send(far.as_mut(), &bytes[..1000]);
    drop(far);
    assert_eq!(world.drain(near.as_mut()), (1000, RecvResult::Eof));
    world.poll_until(|world| (world.proxy.open_connection_count() == 0).then_some(()));
    assert!(world.reported[0].starts_with("connection 1: from 127.0.0.1:"), "{:?}", world.reported);
    let over = "connection 1: both sides have closed, after 60000 bytes there and 1000 back";
    assert_eq!(world.reported[1], over);
}

#[test]
fn cut_resets_both_sockets_after_the_given_bytes() {
    for at in [1, 4095, 9999] {
        let mut world =
            ProxyTest::new(proxy_with_faults(at, LinkFault::Cut), LinkOptions::default());
        let [mut near, mut far] = world.connect();
        send(near.as_mut(), &[7; 10_000]);
        let (_, over) = world.drain(near.as_mut());
        assert!(matches!(over, RecvResult::Failed(_)), "{over:?}");
        let (count, over) = world.drain(far.as_mut());
        assert!(matches!(over, RecvResult::Failed(_)), "{over:?}");
        assert!(count as u64 <= at, "{count} of {at}");
        assert_eq!(world.proxy.open_connection_count(), 0);
    }
}

#[test]
fn frozen_connection_resumes_and_a_closed_one_has_ended() {
    let frozen = Span::from_ms(30);
    let mut world = ProxyTest::new(
        proxy_with_faults(10, LinkFault::Freeze(frozen)),
        proxy_with_faults(5, LinkFault::Close),
    );
    let [mut near, mut far] = world.connect();
    let begun = world.clock.now();
    send(near.as_mut(), &[7; 20]);
    world.poll_until(|_| {
        far.receive();
        (far.buffered().len() == 20).then_some(())
    });
    assert!(world.clock.now().since(begun) >= frozen);
    send(far.as_mut(), &[8; 20]);
    assert_eq!(world.drain(near.as_mut()), (5, RecvResult::Eof));
    send(near.as_mut(), &[9; 4]);
    near.shutdown_write();
    assert_eq!(world.drain(far.as_mut()), (24, RecvResult::Eof), "the other way goes on");
}

#[test]
fn black_hole_drops_data_of_one_connection_only() {
    let mut world =
        ProxyTest::new(proxy_with_faults(3, LinkFault::BlackHole), LinkOptions::default());
    let pairs = [world.connect(), world.connect()];
    let mut ports = BTreeSet::new();
    for [mut near, mut far] in pairs {
        send(near.as_mut(), b"abcdef");
        send(far.as_mut(), b"back");
        world.poll_until(|_| {
            near.receive();
            far.receive();
            (near.buffered() == b"back" && !far.buffered().is_empty()).then_some(())
        });
        assert_eq!(far.buffered(), b"abc");
        ports.insert(near.peer_description());
    }
    assert_eq!(ports.len(), 1, "both went through the proxy");
}

#[test]
fn unreachable_target_is_named_and_its_client_disconnected() {
    let mut world = ProxyTest::new(LinkOptions::default(), LinkOptions::default());
    let nowhere = world.listener.address().to_string();
    world.listener = StreamListener::open(&any_address()).unwrap();
    let now = world.clock.now();
    let address = world.proxy.address().to_string();
    let mut dial =
        ConnectOp::start(&address, &world.pool, now, now.after(Span::from_secs(10))).unwrap();
    // The connection may be reset before the client has seen it established.
    if let Ok(near) = world.poll_until(|world| dial.poll(world.clock.now())) {
        let mut near = world.sockets.new_stream(near).unwrap();
        let (count, over) = world.drain(near.as_mut());
        assert!(count == 0 && matches!(over, RecvResult::Failed(_)), "{over:?}");
    }
    world.poll_until(|world| (world.reported.len() == 2).then_some(()));
    let why = format!("connection 1: connect to {nowhere}: Connection refused");
    assert!(world.reported[1].starts_with(&why), "{:?}", world.reported);
}
