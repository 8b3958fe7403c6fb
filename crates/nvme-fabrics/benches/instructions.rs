//! Instructions per I/O of both whole ends of NVMe/TCP, for reads of 4 KiB: counted and not timed.
//!
//! Each count is of as many reads as its name ends with, that come together. At the host all of them are
//! submitted and sent, and the answers to as many are received, copied to where they belong, and
//! handed to the caller. At the target all of them are received, executed by a disk that does nothing,
//! and answered. The socket is not in it: what has come lies ready, and what is sent goes nowhere.

#![expect(missing_docs, reason = "the macros make items of their own")]
#![expect(clippy::unwrap_used, reason = "a bench may")]

#[path = "../tests/disk/mod.rs"]
mod disk;
#[path = "../tests/queues/mod.rs"]
mod queues;

use std::sync::{Arc, Mutex};

use gungraun::{library_benchmark, library_benchmark_group, main};
use tenmil_base::{
    CompletionBatch, Instant, IoChannel, IoStatus, Operation, RecvResult, Request, Segment,
    SendSlice, Span, Stream, StreamError, WakeSource,
};
use tenmil_dma::{CommandStore, DeviceKind, DevicePool, MemoryBacking, MemoryMapping, RegionTable};
use tenmil_nvme_fabrics::{Connector, FabricsChannel, Multipath, Options, PendingConnect};
use tenmil_serve::tcp::{Service, ServiceLimits, TargetConnection};
use tenmil_sim::sim_network::{self, NetworkOptions};

use disk::{BYTES, NQN, null_disk_service, request};

/// A stream that can be told to go nowhere and to bring what it brought before.
struct ReplayStream {
    inner: Inner,
    recording: Arc<Mutex<Recording>>,
    bytes: Vec<u8>,
    at: usize,
    taken: u64,
}

type Inner = Arc<Mutex<Box<dyn Stream>>>;

#[derive(Default)]
struct Recording {
    is_played: bool,
    recorded: Vec<u8>,
    /// Bytes that went nowhere.
    sent: usize,
    /// Every stream that was made, the last one last.
    inner: Vec<Inner>,
}

impl Stream for ReplayStream {
    fn receive(&mut self) -> RecvResult {
        let mut recording = self.recording.lock().unwrap();
        if recording.is_played {
            if self.at < self.bytes.len() {
                return RecvResult::WouldBlock;
            }
            self.bytes = std::mem::take(&mut recording.recorded);
            self.at = 0;
            return RecvResult::Bytes(self.bytes.len());
        }
        let mut inner = self.inner.lock().unwrap();
        let received = inner.receive();
        let count = inner.buffered().len();
        self.bytes.drain(..self.at);
        self.at = 0;
        self.bytes.extend(inner.buffered());
        inner.consume(count);
        received
    }

    fn buffered(&self) -> &[u8] {
        &self.bytes[self.at..]
    }

    fn consume(&mut self, count: usize) {
        self.at += count;
    }

    fn receive_into(&mut self, into: &[Segment]) -> RecvResult {
        self.inner.lock().unwrap().receive_into(into)
    }

    fn send(
        &mut self,
        headers: &[u8],
        all: &[SendSlice],
        more: bool,
    ) -> Result<usize, StreamError> {
        if !self.recording.lock().unwrap().is_played {
            let sent = self.inner.lock().unwrap().send(headers, all, more)?;
            self.taken += sent as u64;
            return Ok(sent);
        }
        let len = |stretch: &SendSlice| match *stretch {
            SendSlice::Headers { len_bytes, .. } => len_bytes as usize,
            SendSlice::Memory(segment) => segment.len_bytes as usize,
        };
        let sent = all.iter().map(len).sum();
        self.recording.lock().unwrap().sent += sent;
        self.taken += sent as u64;
        Ok(sent)
    }

    fn released_bytes(&mut self) -> u64 {
        self.taken
    }

    fn shutdown_write(&mut self) {}

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::None
    }

    fn arm(&mut self, _: bool, _: bool) -> bool {
        true
    }

    fn peer_description(&self) -> String {
        String::new()
    }
}

/// The network, and who is at its other end.
struct SimTargetConnector {
    regions: RegionTable,
    service: Service,
    connections: Arc<Mutex<Vec<TargetConnection>>>,
    /// That of the host's ends, and that of the target's.
    recordings: [Arc<Mutex<Recording>>; 2],
}

struct ImmediateConnect(Option<Result<Box<dyn Stream>, StreamError>>);

impl PendingConnect for ImmediateConnect {
    fn poll(&mut self, _: Instant) -> Option<Result<Box<dyn Stream>, StreamError>> {
        self.0.take()
    }
}

impl Connector for SimTargetConnector {
    fn begin_connect(&mut self, now: Instant, _: Instant) -> Box<dyn PendingConnect> {
        let memory = || Arc::new(self.regions.clone());
        let options = NetworkOptions { inbox_bytes: 4 << 20, ..NetworkOptions::default() };
        let (ours, theirs, _) = sim_network::connected_pair(options, memory(), memory());
        let [ours, theirs] =
            [(ours, &self.recordings[0]), (theirs, &self.recordings[1])].map(|(end, recording)| {
                let inner: Inner = Arc::new(Mutex::new(Box::new(end)));
                recording.lock().unwrap().inner.push(Arc::clone(&inner));
                Box::new(ReplayStream {
                    inner,
                    recording: Arc::clone(recording),
                    bytes: Vec::new(),
                    at: 0,
                    taken: 0,
                })
            });
        self.connections.lock().unwrap().push(self.service.accept_stream(theirs, 1, now).unwrap());
        Box::new(ImmediateConnect(Some(Ok(ours))))
    }

    fn peer(&self) -> String {
        "the target".into()
    }
}

/// Whose turn is counted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MeasuredSide {
    Host,
    Target,
}

/// A queue with the answers to all of its reads lying ready at the host, or the reads at the target.
struct ReadBatch {
    queue: FabricsChannel,
    connections: Arc<Mutex<Vec<TargetConnection>>>,
    recording: Arc<Mutex<Recording>>,
    _multipath: Multipath,
    answers: CompletionBatch,
    requests: Vec<Request>,
    segments: Vec<Segment>,
    now: Instant,
}

impl ReadBatch {
    fn host(count: u64) -> Self {
        Self::of_side(count, MeasuredSide::Host)
    }

    fn target(count: u64) -> Self {
        Self::of_side(count, MeasuredSide::Target)
    }

    fn of_side(count: u64, end: MeasuredSide) -> Self {
        let regions = RegionTable::new(16);
        let service = null_disk_service(&regions, ServiceLimits::default());
        let pool = regions
            .add_mapping(MemoryMapping::new(16 << 20, MemoryBacking::Private).unwrap())
            .unwrap();
        let data = regions
            .add_mapping(MemoryMapping::new(4 << 20, MemoryBacking::Private).unwrap())
            .unwrap();
        let store = CommandStore::for_device(DeviceKind::Emulated);
        let pool = DevicePool::new(regions.clone(), pool, DeviceKind::Emulated, store);
        pool.map_on_demand();
        let connections = Arc::new(Mutex::new(Vec::new()));
        let recordings: [Arc<Mutex<Recording>>; 2] = Default::default();
        let net = SimTargetConnector {
            regions,
            service,
            connections: Arc::clone(&connections),
            recordings: recordings.clone(),
        };
        let mut now = Instant { ns: 1_000_000 };
        let options = Options::new(NQN, "nqn.2024-01.example:host", [1; 16]);
        let mut turn = |connections: &Mutex<Vec<TargetConnection>>| {
            now = now.after(Span::from_us(100));
            connections
                .lock()
                .unwrap()
                .iter_mut()
                .for_each(|connection| while connection.poll_once(now) {});
            now
        };
        let at = turn(&connections);
        let mut multipath = queues::connect_one_path(pool, Box::new(net), options, (32, 129), at);
        let queue = queues::open_queue(&mut multipath, || turn(&connections));
        let at = turn(&connections);
        let requests = (0..count).map(|number| request(number, Operation::Read)).collect();
        let segments = (0..256).map(|at| data.slice(at * BYTES, BYTES).unwrap()).collect();
        let mut this = Self {
            queue,
            connections,
            recording: Arc::clone(&recordings[1]),
            _multipath: multipath,
            answers: CompletionBatch::with_capacity(256),
            requests,
            segments,
            now: at,
        };
        // Twice for real, so that everything has been used.
        for _ in 0..2 {
            this.submit();
            let mut ended = 0;
            while ended < count {
                let now = turn(&this.connections);
                ended += this.queue.poll(now, &mut this.answers) as u64;
                this.answers.clear();
            }
        }
        // And then so that what comes lies ready.
        this.submit();
        match end {
            MeasuredSide::Host => record_stream(&recordings[0], || _ = turn(&this.connections)),
            MeasuredSide::Target => record_stream(&recordings[1], || {}),
        }
        this
    }

    fn submit(&mut self) {
        let taken = self.queue.submit(self.now, &self.requests, &self.segments);
        assert_eq!(taken, self.requests.len());
        self.queue.flush_submissions();
    }

    #[inline(never)]
    fn poll_target(&mut self) {
        let mut connections = self.connections.lock().unwrap();
        let connection = connections.last_mut().unwrap();
        // A connection answers 256 in an iteration.
        for _ in 0..self.requests.len().div_ceil(256) {
            assert!(connection.poll_once(self.now));
        }
    }

    #[inline(never)]
    fn poll_host(&mut self) {
        let count = self.queue.poll(self.now, &mut self.answers);
        assert_eq!(count, self.requests.len());
        let is_well = |answer: &tenmil_base::IoCompletion| answer.status == IoStatus::SUCCESS;
        assert!(self.answers.as_slice().iter().all(is_well));
        self.answers.clear();
        self.submit();
    }
}

/// What would come now lies ready, and nothing comes or goes any more. The line holds less than all
/// answers, so the other end has to go on when some have been taken from it.
fn record_stream(recording: &Mutex<Recording>, mut other: impl FnMut()) {
    let inner = Arc::clone(recording.lock().unwrap().inner.last().unwrap());
    loop {
        other();
        let mut inner = inner.lock().unwrap();
        let before = inner.buffered().len();
        while let RecvResult::Bytes(_) = inner.receive() {}
        if inner.buffered().len() == before {
            break;
        }
    }
    let mut recording = recording.lock().unwrap();
    recording.recorded = inner.lock().unwrap().buffered().to_vec();
    recording.is_played = true;
}

#[library_benchmark]
#[bench::depth_1(args = (1), setup = ReadBatch::host)]
#[bench::depth_128(args = (128), setup = ReadBatch::host)]
fn remote_host(mut turn: ReadBatch) -> ReadBatch {
    turn.poll_host();
    turn
}

#[library_benchmark]
#[bench::depth_1(args = (1), setup = ReadBatch::target)]
#[bench::depth_128(args = (128), setup = ReadBatch::target)]
fn remote_target(mut turn: ReadBatch) -> ReadBatch {
    turn.poll_target();
    let data = turn.requests.len() * BYTES as usize;
    assert!(turn.recording.lock().unwrap().sent > data, "all of them were answered");
    turn
}

library_benchmark_group!(name = turn; benchmarks = remote_host, remote_target);
main!(library_benchmark_groups = turn);
