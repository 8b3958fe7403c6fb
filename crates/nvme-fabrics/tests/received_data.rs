//! Where received data are stored first, over real sockets between host and target: kernel buffers are
//! not copied through memory of the host, and large data are received into the memory of their command.

#![expect(clippy::unwrap_used, reason = "a test may")]

#[expect(dead_code, reason = "others use the rest")]
mod disk;
mod net;
mod queues;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tenmil_base::{
    CompletionBatch, Instant, IoChannel, IoStatus, Memory, Operation, RecvResult, Request,
    RequestFlags, Segment, SendSlice, Span, Stream, StreamError, WakeSource,
};
use tenmil_dma::{KernelBufferSource, MemoryBacking, MemoryMapping, RegionTable};
use tenmil_drivers::RamDevice;
use tenmil_linux::socket::{SocketOptions, SocketStreamFactory};
use tenmil_nvme_fabrics::{Connector, FabricsChannel, Multipath, Options, PendingConnect};
use tenmil_serve::tcp::{ServiceLimits, TargetConnection};

use disk::{NQN, service_of_device};
use net::{LoopbackNet, poll_connections};

const BLOCK: u32 = 512;
const REQUESTS: u16 = 8;
const EACH: u32 = 512 << 10;
/// What comes before data, and each response (TCP 1.0 §3.6.2).
const HEADER_BYTES: u64 = 24;

/// Bytes received by one end, by where they are stored first.
#[derive(Debug, Default)]
struct ReceivedBytes {
    to_inbox: AtomicU64,
    to_data_buffer: AtomicU64,
}

/// A stream that counts received bytes by where they are stored.
struct CountingStream {
    stream: Box<dyn Stream>,
    received_bytes: Arc<ReceivedBytes>,
}

/// Connects with streams that count.
struct CountingConnector {
    net: LoopbackNet,
    received_bytes: Arc<ReceivedBytes>,
}

struct CountingPendingConnect {
    pending: Box<dyn PendingConnect>,
    received_bytes: Arc<ReceivedBytes>,
}

impl PendingConnect for CountingPendingConnect {
    fn poll(&mut self, now: Instant) -> Option<Result<Box<dyn Stream>, StreamError>> {
        let received_bytes = Arc::clone(&self.received_bytes);
        let counting =
            |stream| Box::new(CountingStream { stream, received_bytes }) as Box<dyn Stream>;
        self.pending.poll(now).map(|stream| stream.map(counting))
    }
}

impl Connector for CountingConnector {
    fn begin_connect(&mut self, now: Instant, until: Instant) -> Box<dyn PendingConnect> {
        let pending = self.net.begin_connect(now, until);
        Box::new(CountingPendingConnect {
            pending,
            received_bytes: Arc::clone(&self.received_bytes),
        })
    }

    fn peer(&self) -> String {
        self.net.peer()
    }
}

fn count_received(into: &AtomicU64, received: RecvResult) -> RecvResult {
    if let RecvResult::Bytes(count) = received {
        into.fetch_add(count as u64, Ordering::Relaxed);
    }
    received
}

impl Stream for CountingStream {
    fn receive(&mut self) -> RecvResult {
        count_received(&self.received_bytes.to_inbox, self.stream.receive())
    }

    fn receive_up_to(&mut self, most: usize) -> RecvResult {
        count_received(&self.received_bytes.to_inbox, self.stream.receive_up_to(most))
    }

    fn buffered(&self) -> &[u8] {
        self.stream.buffered()
    }

    fn consume(&mut self, count: usize) {
        self.stream.consume(count);
    }

    fn receive_into(&mut self, into: &[Segment]) -> RecvResult {
        count_received(&self.received_bytes.to_data_buffer, self.stream.receive_into(into))
    }

    fn receive_into_and_following(&mut self, into: &[Segment], following: usize) -> RecvResult {
        let received = self.stream.receive_into_and_following(into, following);
        if let RecvResult::Bytes(_) = received {
            let behind = self.stream.buffered().len() as u64;
            let bytes = &self.received_bytes;
            bytes.to_inbox.fetch_add(behind, Ordering::Relaxed);
            count_received(&bytes.to_data_buffer, received.clone());
            bytes.to_data_buffer.fetch_sub(behind, Ordering::Relaxed);
        }
        received
    }

    fn send(
        &mut self,
        headers: &[u8],
        stretches: &[SendSlice],
        has_more: bool,
    ) -> Result<usize, StreamError> {
        self.stream.send(headers, stretches, has_more)
    }

    fn released_bytes(&mut self) -> u64 {
        self.stream.released_bytes()
    }

    fn shutdown_write(&mut self) {
        self.stream.shutdown_write();
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.stream.wake_source()
    }

    fn arm(&mut self, wants_bytes: bool, wants_space: bool) -> bool {
        self.stream.arm(wants_bytes, wants_space)
    }

    fn peer_description(&self) -> String {
        self.stream.peer_description()
    }

    fn local_address(&self) -> Option<SocketAddr> {
        self.stream.local_address()
    }
}

/// A host with one connection for I/O, and its target.
struct HostAndTarget {
    queue: FabricsChannel,
    _multipath: Multipath,
    connections: Arc<Mutex<Vec<TargetConnection>>>,
    regions: RegionTable,
    /// Kernel buffers, whose data are in a file.
    leased: Segment,
    received_bytes: Arc<ReceivedBytes>,
    target_bytes: Arc<ReceivedBytes>,
    answers: CompletionBatch,
    now: Instant,
    /// Polls of the host after each of the target.
    host_polls: usize,
}

impl HostAndTarget {
    fn new(options: Options) -> Self {
        let regions = RegionTable::new(16);
        let limits = ServiceLimits { memory_bytes: 32 << 20, ..ServiceLimits::default() };
        let medium = RamDevice::new(&regions, BLOCK, 1 << 14).unwrap();
        let service = service_of_device(Arc::new(medium), &regions, limits);
        let sockets = || SocketStreamFactory::new(regions.clone(), SocketOptions::default());
        let (connections, received_bytes) = (Arc::default(), Arc::<ReceivedBytes>::default());
        let mut net = LoopbackNet::new([sockets(), sockets()], service, &connections);
        let target_bytes = Arc::<ReceivedBytes>::default();
        let received_by_target = Arc::clone(&target_bytes);
        net.wrap_target_stream = Box::new(move |stream| {
            Box::new(CountingStream { stream, received_bytes: Arc::clone(&received_by_target) })
        });
        let net = CountingConnector { net, received_bytes: Arc::clone(&received_bytes) };
        let mut now = Instant { ns: 1_000_000 };
        let pool = net::host_pool(&regions);
        let mut multipath = queues::connect_one_path(pool, Box::new(net), options, (1, 33), now);
        let queue =
            queues::open_queue(&mut multipath, || net::step_connections(&connections, &mut now));
        let file = MemoryMapping::new(usize::from(REQUESTS) * EACH as usize, MemoryBacking::Shared)
            .unwrap();
        let descriptor = file.descriptor().unwrap().try_clone_to_owned().unwrap();
        let data_at = |_, request, byte| u64::from(request) * u64::from(EACH) + u64::from(byte);
        let leased = regions.register_kernel_buffers(
            KernelBufferSource { descriptor, queue: 0, data_at },
            (REQUESTS, EACH),
        );
        let (leased, answers) = (leased.unwrap(), CompletionBatch::with_capacity(256));
        Self {
            queue,
            _multipath: multipath,
            connections,
            regions,
            leased,
            received_bytes,
            target_bytes,
            answers,
            now,
            host_polls: 1,
        }
    }

    fn without_digests() -> Self {
        Self::new(Options::new(NQN, "nqn.2024-01.example:host", [1; 16]))
    }

    fn request_segment(&self, request: u16, blocks: u32) -> Segment {
        self.leased.slice(u32::from(request) * EACH, blocks * BLOCK).unwrap()
    }

    /// Does the same with several requests at once, each `blocks` long and behind the one before.
    fn run_requests(&mut self, operation: Operation, blocks: u32, segments: &[Segment]) {
        let request = |token: u32| Request {
            token: token.into(),
            lba: u64::from(token * blocks),
            operand: 0,
            segment_first: token,
            blocks,
            segment_count: 1,
            metadata_count: 0,
            operation,
            flags: RequestFlags::NONE,
        };
        let count = u32::try_from(segments.len()).unwrap();
        let requests: Vec<Request> = (0..count).map(request).collect();
        assert_eq!(self.queue.submit(self.now, &requests, segments), requests.len());
        self.queue.flush_submissions();
        let (mut ended, mut turns) = (0, 0);
        while ended < segments.len() {
            self.now = self.now.after(Span::from_us(10));
            poll_connections(&self.connections, self.now);
            for _ in 0..self.host_polls {
                self.queue.poll(self.now, &mut self.answers);
                self.queue.flush_submissions();
            }
            for answer in self.answers.drain() {
                assert_eq!(answer.status, IoStatus::SUCCESS, "{answer:?}");
                ended += 1;
            }
            turns += 1;
            assert!(turns < 1_000_000, "{ended} have ended");
        }
    }

    /// Bytes that have come to the inbox, to their place, and through a copy of the lender's.
    fn received_counts(&self) -> [u64; 3] {
        let [inbox, direct] = inbox_and_direct_bytes(&self.received_bytes);
        [inbox, direct, self.regions.copied_bytes(self.leased.region)]
    }
}

/// Bytes received into the inbox and directly into data buffers, by one end.
fn inbox_and_direct_bytes(received: &ReceivedBytes) -> [u64; 2] {
    [&received.to_inbox, &received.to_data_buffer].map(|bytes| bytes.load(Ordering::Relaxed))
}

fn pattern(seed: u32, len_bytes: u32) -> Vec<u8> {
    (0..len_bytes).map(|at| (at / 7 + 31 * seed + at % 251).to_le_bytes()[0]).collect()
}

/// The buffers are those of a file, which cannot be registered with a ring, so here the streams copy:
/// at the place where a ring would move the data, and nowhere else.
#[test]
fn kernel_buffer_data_bypass_the_receive_buffer() {
    let mut pair = HostAndTarget::without_digests();
    for (seed, blocks) in [(1, 1), (2, 8), (3, 16), (4, 100), (5, 1024)] {
        let len_bytes = blocks * BLOCK;
        let parts: Vec<Segment> =
            (0..REQUESTS).map(|request| pair.request_segment(request, blocks)).collect();
        for (number, part) in (0..).zip(&parts) {
            pair.regions.store(*part, &pattern(10 * seed + number, len_bytes)).unwrap();
        }
        let data = u64::from(len_bytes) * u64::from(REQUESTS);
        let before = pair.received_counts();
        pair.run_requests(Operation::Write, blocks, &parts);
        let written = pair.received_counts();
        assert_eq!(written[1], before[1], "nothing comes but headers");
        for part in &parts {
            pair.regions.store(*part, &vec![0; len_bytes as usize]).unwrap();
        }
        let before = pair.received_counts();
        pair.run_requests(Operation::Read, blocks, &parts);
        let read = pair.received_counts();
        let [inbox, place, copied] = [0, 1, 2].map(|at| read[at] - before[at]);
        assert_eq!((place, copied), (data, data), "of {blocks} blocks");
        assert!(inbox.is_multiple_of(HEADER_BYTES), "{inbox}");
        assert!(inbox >= HEADER_BYTES * u64::from(REQUESTS) && inbox <= data.max(24 * 16));
        for (number, part) in (0..).zip(&parts) {
            let mut found = vec![0; len_bytes as usize];
            pair.regions.load(*part, &mut found).unwrap();
            assert!(found == pattern(10 * seed + number, len_bytes), "{blocks} blocks at {number}");
        }
    }
}

/// Digests are computed over the bytes, so they have to be copied; nothing goes wrong for that.
#[test]
fn with_digests_kernel_buffer_data_are_copied_intact() {
    use tenmil_nvme_fabrics::DigestMode::Required;
    let options = Options::new(NQN, "nqn.2024-01.example:host", [1; 16]);
    let mut pair =
        HostAndTarget::new(Options { header_digest: Required, data_digest: Required, ..options });
    for blocks in [1, 8, 500] {
        let parts: Vec<Segment> =
            (0..REQUESTS).map(|request| pair.request_segment(request, blocks)).collect();
        for part in &parts {
            pair.regions.store(*part, &pattern(blocks, part.len_bytes)).unwrap();
        }
        pair.run_requests(Operation::Write, blocks, &parts);
        for part in &parts {
            pair.regions.store(*part, &vec![0; part.len_bytes as usize]).unwrap();
        }
        pair.run_requests(Operation::Read, blocks, &parts);
        for part in &parts {
            let mut found = vec![0; part.len_bytes as usize];
            pair.regions.load(*part, &mut found).unwrap();
            assert!(found == pattern(blocks, part.len_bytes), "{blocks} blocks");
        }
    }
}

/// Large data pass through no receive buffer: headers are received with the data before them, or alone.
/// Except for a few transfers, only the target may copy the first data behind several commands, which it
/// receives as a whole. How many of them come at once is the kernel's matter, so a quarter is allowed; a
/// receiver that copies everything has four times that.
#[test]
fn large_data_are_received_into_the_memory_of_their_command() {
    const BLOCKS: u32 = (128 << 10) / BLOCK;
    const EACH_BYTES: u64 = 128 << 10;
    const ROUNDS: u64 = 16;
    /// For a transfer: a command, and its data in two PDUs; and keep-alives.
    const HEADERS_MAX: u64 = 72 + 2 * HEADER_BYTES + 24;
    let mut pair = HostAndTarget::without_digests();
    let buffers = net::host_pool(&pair.regions);
    let parts: Vec<Segment> = (0..REQUESTS)
        .map(|_| tenmil_base::Dma::allocate(&buffers, BLOCKS * BLOCK).unwrap())
        .collect();
    for (operation, host_polls) in
        [(Operation::Write, 1), (Operation::Write, 64), (Operation::Read, 1), (Operation::Read, 64)]
    {
        // With many, the host sends all data before the target receives any.
        pair.host_polls = host_polls;
        // The first transfer is recognized as a large one.
        pair.run_requests(operation, BLOCKS, &parts);
        for (number, part) in (0..).zip(&parts) {
            let data = pattern(number, part.len_bytes);
            pair.regions.store(*part, &data).unwrap();
        }
        let receiver = match operation {
            Operation::Write => Arc::clone(&pair.target_bytes),
            _ => Arc::clone(&pair.received_bytes),
        };
        let before = inbox_and_direct_bytes(&receiver);
        (0..ROUNDS).for_each(|_| pair.run_requests(operation, BLOCKS, &parts));
        let after = inbox_and_direct_bytes(&receiver);
        let transfers = ROUNDS * u64::from(REQUESTS);
        let data = transfers * u64::from(BLOCKS * BLOCK);
        let [inbox, direct] = [0, 1].map(|at| after[at] - before[at]);
        let headers = (inbox + direct).checked_sub(data).unwrap();
        assert!(headers <= transfers * HEADERS_MAX, "{operation:?}: {headers} bytes of headers");
        let copied = data - direct;
        // After a keep-alive, which comes by the clock, the next transfer has to be recognized again.
        let copied_max = if operation == Operation::Read { 4 } else { 2 * ROUNDS } * EACH_BYTES;
        assert!(copied <= copied_max, "{operation:?}: {copied} of {data} bytes were copied");
    }
    for part in &parts {
        pair.regions.store(*part, &vec![0; part.len_bytes as usize]).unwrap();
    }
    pair.run_requests(Operation::Read, BLOCKS, &parts);
    for (number, part) in (0..).zip(&parts) {
        let mut found = vec![0; part.len_bytes as usize];
        pair.regions.load(*part, &mut found).unwrap();
        assert!(found == pattern(number, part.len_bytes), "request {number}");
    }
}
