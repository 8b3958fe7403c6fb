use std::collections::BTreeSet;

use tenmil_base::{RecvResult, SendSlice, Span, Stream};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;
use tenmil_linux::socket::{Address, ConnectOp, SocketFactory, SocketOptions, StreamListener};
use tenmil_linux::thread_pool::ThreadPool;
use tenmil_sim::network::{Fault, Faults, LinkOptions};

use super::{Proxy, ProxyPlan};

/// Proxy, client and target, polled by one thread.
struct World {
    clock: Clock,
    proxy: Proxy,
    listener: StreamListener,
    pool: ThreadPool,
    sockets: SocketFactory,
    told: Vec<String>,
}

fn any() -> Address {
    Address::Tcp("127.0.0.1:0".parse().unwrap())
}

impl World {
    fn new(there: LinkOptions, back: LinkOptions) -> Self {
        let listener = StreamListener::open(&any()).unwrap();
        let plan = ProxyPlan {
            listen: "127.0.0.1:0".parse().unwrap(),
            target: listener.address().to_string(),
            there,
            back,
            seed: 7,
        };
        Self {
            clock: Clock::start(),
            proxy: Proxy::new(plan).unwrap(),
            listener,
            pool: ThreadPool::new(1, 1),
            sockets: SocketFactory::new(RegionTable::new(1), SocketOptions::default()),
            told: Vec::new(),
        }
    }

    fn poll(&mut self) {
        let told = &mut self.told;
        self.proxy.poll(self.clock.now(), &mut |line| told.push(line));
    }

    /// Polls until `found` returns a value.
    fn until<T>(&mut self, mut found: impl FnMut(&mut Self) -> Option<T>) -> T {
        let late = self.clock.now().after(Span::from_secs(20));
        while self.clock.now() < late {
            self.poll();
            if let Some(found) = found(self) {
                return found;
            }
            self.proxy.sleep(self.clock.now(), Span::from_us(100)).unwrap();
        }
        panic!("it never happens; {:?}", self.told);
    }

    /// Connects a client and accepts at the target.
    fn connect(&mut self) -> [Box<dyn Stream>; 2] {
        let now = self.clock.now();
        let address = self.proxy.address().to_string();
        let late = now.after(Span::from_secs(10));
        let mut dial = ConnectOp::start(&address, &self.pool, now, late).unwrap();
        let near = self.until(|world| dial.poll(world.clock.now())).unwrap();
        let far = self.until(|world| world.listener.accept().unwrap());
        [near, far].map(|socket| self.sockets.stream(socket).unwrap())
    }

    /// Receives until the end: the byte count and how it ended.
    fn drain(&mut self, stream: &mut dyn Stream) -> (usize, RecvResult) {
        let over = self.until(|_| match stream.receive() {
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

fn faulty(at: u64, fault: Fault) -> LinkOptions {
    LinkOptions { faults: Faults::one(at, fault), ..LinkOptions::default() }
}

#[test]
fn bytes_pass_unchanged_both_ways_and_ends_pass_too() {
    let rough = LinkOptions {
        splits: true,
        delay: Span::from_us(300),
        jitter: Span::from_us(300),
        room_bytes: 5000,
        ..LinkOptions::default()
    };
    let mut world = World::new(rough.clone(), rough);
    let [mut near, mut far] = world.connect();
    let bytes: Vec<u8> = (0..=250).cycle().take(60_000).collect();
    send(near.as_mut(), &bytes);
    near.shutdown_write();
    assert_eq!(world.drain(far.as_mut()), (bytes.len(), RecvResult::Eof));
    assert_eq!(far.buffered(), bytes);
    send(far.as_mut(), &bytes[..1000]);
    drop(far);
    assert_eq!(world.drain(near.as_mut()), (1000, RecvResult::Eof));
    world.until(|world| (world.proxy.connections() == 0).then_some(()));
    assert!(world.told[0].starts_with("connection 1: from 127.0.0.1:"), "{:?}", world.told);
    let over = "connection 1: both sides have closed, after 60000 bytes there and 1000 back";
    assert_eq!(world.told[1], over);
}

#[test]
fn a_cut_resets_both_ends_after_exactly_so_many_bytes() {
    for at in [1, 4095, 9999] {
        let mut world = World::new(faulty(at, Fault::Cut), LinkOptions::default());
        let [mut near, mut far] = world.connect();
        send(near.as_mut(), &[7; 10_000]);
        let (_, over) = world.drain(near.as_mut());
        assert!(matches!(over, RecvResult::Failed(_)), "{over:?}");
        let (count, over) = world.drain(far.as_mut());
        assert!(matches!(over, RecvResult::Failed(_)), "{over:?}");
        assert!(count as u64 <= at, "{count} of {at}");
        assert_eq!(world.proxy.connections(), 0);
    }
}

#[test]
fn a_frozen_connection_goes_on_and_a_closed_one_has_ended() {
    let frozen = Span::from_ms(30);
    let mut world = World::new(faulty(10, Fault::Freeze(frozen)), faulty(5, Fault::Close));
    let [mut near, mut far] = world.connect();
    let begun = world.clock.now();
    send(near.as_mut(), &[7; 20]);
    world.until(|_| {
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
fn what_falls_into_a_black_hole_never_comes_and_disturbs_nobody_else() {
    let mut world = World::new(faulty(3, Fault::BlackHole), LinkOptions::default());
    let pairs = [world.connect(), world.connect()];
    let mut ports = BTreeSet::new();
    for [mut near, mut far] in pairs {
        send(near.as_mut(), b"abcdef");
        send(far.as_mut(), b"back");
        world.until(|_| {
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
fn a_target_that_is_not_there_is_named_and_its_guest_sent_away() {
    let mut world = World::new(LinkOptions::default(), LinkOptions::default());
    let nowhere = world.listener.address().to_string();
    world.listener = StreamListener::open(&any()).unwrap();
    let now = world.clock.now();
    let address = world.proxy.address().to_string();
    let mut dial =
        ConnectOp::start(&address, &world.pool, now, now.after(Span::from_secs(10))).unwrap();
    // The connection may be reset before the client has seen it established.
    if let Ok(near) = world.until(|world| dial.poll(world.clock.now())) {
        let mut near = world.sockets.stream(near).unwrap();
        let (count, over) = world.drain(near.as_mut());
        assert!(count == 0 && matches!(over, RecvResult::Failed(_)), "{over:?}");
    }
    world.until(|world| (world.told.len() == 2).then_some(()));
    let why = format!("connection 1: connect to {nowhere}: Connection refused");
    assert!(world.told[1].starts_with(&why), "{:?}", world.told);
}
