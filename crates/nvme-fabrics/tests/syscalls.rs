//! System calls per I/O over real sockets, counted by the engine of the sockets and held to a bound.
//!
//! Host and target take turns in one thread, over TCP on loopback, where what is sent has come when
//! the call returns: the counts are the same each time, however busy the machine is.

#![expect(clippy::unwrap_used, reason = "a test may")]

mod disk;
mod net;
mod queues;

use std::sync::{Arc, Mutex};

use tenmil_base::{
    CompletionBatch, Instant, IoChannel, IoStatus, Operation, Request, Segment, Span,
};
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};
use tenmil_linux::socket::{SocketOptions, SocketStats, SocketStreamFactory};
use tenmil_nvme_fabrics::{FabricsChannel, Multipath, Options};
use tenmil_serve::tcp::{ServiceLimits, TargetConnection};

use disk::{BYTES, NQN, null_disk_service, request};
use net::{LoopbackNet, poll_connections};

/// Memory for the data of all queues together.
const DATA_BYTES: usize = 1 << 20;
/// Turns of both sides that are counted.
const ITERATIONS: u32 = 200;

/// A host with some connections, and its target.
struct HostAndTarget {
    queues: Vec<FabricsChannel>,
    _multipath: Multipath,
    connections: Arc<Mutex<Vec<TargetConnection>>>,
    ours: SocketStreamFactory,
    theirs: SocketStreamFactory,
    segments: Vec<Segment>,
    answers: CompletionBatch,
    now: Instant,
}

/// What was counted, for each I/O.
#[derive(Debug)]
struct SyscallCounts {
    ios: u64,
    host: SocketStats,
    target: SocketStats,
}

impl HostAndTarget {
    /// So many connections with I/O queues.
    fn with_queues(queues: u16) -> Self {
        let regions = RegionTable::new(16);
        let limits = ServiceLimits { memory_bytes: 32 << 20, ..ServiceLimits::default() };
        let service = null_disk_service(&regions, limits);
        let data = regions
            .add_mapping(MemoryMapping::new(DATA_BYTES, MemoryBacking::Private).unwrap())
            .unwrap();
        let sockets = || SocketStreamFactory::new(regions.clone(), SocketOptions::default());
        let (ours, theirs, connections) = (sockets(), sockets(), Arc::default());
        let (mine, its) = (ours.clone(), theirs.clone());
        let net = LoopbackNet::new([mine, its], service, &connections);
        let mut now = Instant { ns: 1_000_000 };
        let options = Options::new(NQN, "nqn.2024-01.example:host", [1; 16]);
        let pool = net::host_pool(&regions);
        let mut multipath =
            queues::connect_one_path(pool, Box::new(net), options, (queues, 129), now);
        let make = |_| {
            queues::open_queue(&mut multipath, || net::step_connections(&connections, &mut now))
        };
        let queues: Vec<FabricsChannel> = (0..queues).map(make).collect();
        let places = u32::try_from(DATA_BYTES).unwrap() / BYTES;
        let segments = (0..places).map(|at| data.slice(at * BYTES, BYTES).unwrap()).collect();
        let answers = CompletionBatch::with_capacity(256);
        Self { queues, _multipath: multipath, connections, ours, theirs, segments, answers, now }
    }

    /// Keeps `depth` I/Os under way on each connection for some turns.
    fn run_load(&mut self, depth: u64, operation: Operation) -> SyscallCounts {
        let requests: Vec<Request> = (0..depth).map(|number| request(number, operation)).collect();
        self.now = self.now.after(Span::from_us(100));
        for queue in &mut self.queues {
            assert_eq!(queue.submit(self.now, &requests, &self.segments), requests.len());
            queue.flush_submissions();
        }
        let (host, target) = (self.ours.socket_stats(), self.theirs.socket_stats());
        let mut ios = 0;
        for _ in 0..ITERATIONS {
            self.now = self.now.after(Span::from_us(20));
            poll_connections(&self.connections, self.now);
            ios += self.poll_host(operation);
        }
        let (host, target) =
            (socket_stats_since(&self.ours, host), socket_stats_since(&self.theirs, target));
        SyscallCounts { ios, host, target }
    }

    /// Each I/O that has ended is followed by another.
    fn poll_host(&mut self, operation: Operation) -> u64 {
        let mut ios = 0;
        for queue in &mut self.queues {
            queue.poll(self.now, &mut self.answers);
            let again: Vec<Request> = self
                .answers
                .drain()
                .map(|answer| {
                    assert_eq!(answer.status, IoStatus::SUCCESS);
                    request(answer.token, operation)
                })
                .collect();
            if !again.is_empty() {
                assert_eq!(queue.submit(self.now, &again, &self.segments), again.len());
                queue.flush_submissions();
            }
            ios += again.len() as u64;
        }
        ios
    }
}

fn socket_stats_since(sockets: &SocketStreamFactory, before: SocketStats) -> SocketStats {
    let now = sockets.socket_stats();
    SocketStats {
        receives: now.receives - before.receives,
        receives_empty: now.receives_empty - before.receives_empty,
        sends: now.sends - before.sends,
        ..SocketStats::default()
    }
}

impl SyscallCounts {
    fn per_io(&self, calls: u64) -> f64 {
        calls as f64 / self.ios as f64
    }

    /// Whether both sides stay below so many calls for each I/O, together.
    fn are_calls_at_most(&self, host: f64, target: f64) -> bool {
        let found = [self.host, self.target].map(|of| self.per_io(of.receives + of.sends));
        println!("{:.3} calls per I/O at the host, {:.3} at the target", found[0], found[1]);
        self.ios > 0 && found[0] <= host && found[1] <= target
    }
}

/// Fails unless some load has at most so many calls for each I/O: other programs may delay what one side
/// sends to the other, which costs more calls.
#[track_caller]
fn assert_calls_at_most((queues, depth, operation): (u16, u64, Operation), host: f64, target: f64) {
    let is_within = |_| {
        HostAndTarget::with_queues(queues)
            .run_load(depth, operation)
            .are_calls_at_most(host, target)
    };
    assert!((0..5).any(is_within), "expected at most {host} at the host, {target} at the target");
}

#[test]
fn at_depth_32_a_read_takes_a_tenth_of_a_system_call_at_either_end() {
    assert_calls_at_most((1, 32, Operation::Read), 0.07, 0.1);
}

#[test]
fn at_depth_32_a_write_takes_a_tenth_of_a_system_call_at_either_end() {
    assert_calls_at_most((1, 32, Operation::Write), 0.07, 0.1);
}

#[test]
fn an_io_alone_is_received_by_one_call_and_sent_by_another_at_either_end() {
    // One more at the target is a look at the admin connection, in each turn here.
    assert_calls_at_most((1, 1, Operation::Read), 2.02, 3.02);
}

#[test]
fn many_connections_take_half_a_system_call_per_read() {
    assert_calls_at_most((16, 4, Operation::Read), 0.51, 0.53);
}
