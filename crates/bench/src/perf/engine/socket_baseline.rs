//! Socket micro-benchmark: I/O over TCP without the NVMe protocol.
//!
//! One thread sends requests and receives responses, the other does the reverse, with the same
//! socket engine, gather lists and number of messages in flight. Messages are as long as those of
//! NVMe/TCP without digests; their contents are ignored. It is the upper bound that a `tcp://`
//! device is compared with, measured in the same run, because on a shared machine the bound varies.

use tenmil_base::{Histogram, Segment, SendSlice, Span, Stream};
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};
use tenmil_linux::socket::{SocketEngine, SocketOptions, SocketStreamFactory, loopback_pair};
use tenmil_linux::{Clock, CpuList, NamedThread};

use super::baseline_load::repeat_for;
use super::cpu_placement::CoreAssignment;
use crate::perf::perf_options::{AccessPattern, BaselineKind, PerfOptions};
use crate::perf::perf_result::{Baseline, BaselineResult, per_second};
use tenmil_base::Error;
use tenmil_devices::Uri;

/// Parameters of the measurement.
pub(super) struct SocketBaselinePlan<'a> {
    pub(super) options: &'a PerfOptions,
    pub(super) cores: &'a CoreAssignment,
    pub(super) clock: Clock,
    pub(super) time: Span,
    pub(super) engine: SocketEngine,
}

/// One end of a connection.
struct MessageEndpoint {
    stream: Box<dyn Stream>,
    /// Length of an incoming message.
    incoming_bytes: usize,
    /// Bytes received of the current message.
    come: usize,
    outgoing: OutgoingMessages,
}

/// Outgoing messages of one end: a header and, in one direction, data.
struct OutgoingMessages {
    header: Vec<u8>,
    /// Data bytes per message.
    data_bytes: u32,
    /// Memory from which messages send their data, in round-robin order.
    data: Segment,
    next: u32,
    /// Number of messages to be sent, including a partially sent one.
    unsent: usize,
    /// Bytes sent of the first of them.
    sent: usize,
    stretches: Vec<SendSlice>,
}

/// Command capsule with its common header (TCP Transport 1.0 §3.6.2.6).
const REQUEST_BYTES: usize = 72;
/// Header of a data PDU, and response capsule (TCP Transport 1.0 §3.6.2.7 and §3.6.2.11).
const RESPONSE_BYTES: usize = 24;
/// Maximum number of messages per send; with data, each has two segments.
const BATCH: usize = 256;
/// Maximum size of the memory for outgoing data.
const DATA_MAX: u32 = 16 << 20;

impl PerfOptions {
    /// Socket engine of the message baseline, if the run has one.
    pub(in crate::perf) fn message_baseline_engine(&self) -> Option<SocketEngine> {
        let is_tcp = |uri: &Uri| matches!(uri, Uri::Block(uri) if uri.scheme() == "tcp");
        match self.baseline_kind {
            BaselineKind::TcpRing => Some(SocketEngine::IoUring),
            BaselineKind::Tcp => Some(SocketEngine::Epoll),
            BaselineKind::Own if self.uris.is_empty() => None,
            BaselineKind::Own => self.uris.iter().all(is_tcp).then_some(SocketEngine::Epoll),
        }
    }
}

/// Measures with one thread on each side. With one message in flight the round trip time is
/// measured as well.
pub(super) fn measure_sockets(
    plan: &SocketBaselinePlan<'_>,
    depth: u32,
) -> Result<BaselineResult, Error> {
    let SocketBaselinePlan { options, cores, clock, time, engine } = *plan;
    let connections = options.device_count() * u32::from(options.queue_pairs);
    let sockets = |data_bytes| EndpointShared::new(engine, data_bytes, depth);
    let is_read = matches!(options.pattern, AccessPattern::Read | AccessPattern::RandRead);
    let io_bytes = options.sizes.largest_bytes();
    let (asked, completed) = if is_read { (0, io_bytes) } else { (io_bytes, 0) };
    let (host, target) = (sockets(asked)?, sockets(completed)?);
    let (mut hosts, mut targets) = (Vec::new(), Vec::new());
    let request_bytes = REQUEST_BYTES + asked as usize;
    let response_bytes = RESPONSE_BYTES + completed as usize;
    for _ in 0..connections {
        let [one, other] = loopback_pair().map_err(|error| socket_error(&error))?;
        hosts.push(host.new_endpoint(one, REQUEST_BYTES, response_bytes)?);
        targets.push(target.new_endpoint(other, RESPONSE_BYTES, request_bytes)?);
    }
    let engine = host.sockets.engine();
    let (near, far) = cores_of_both_sides(cores);
    let yields = near == far;
    let other = NamedThread::spawn("bare-target", far, move |stop| {
        while !stop.is_stopped() {
            let done: usize = targets.iter_mut().map(MessageEndpoint::receive_and_reply).sum();
            if done == 0 && yields {
                tenmil_linux::named_thread::yield_cpu();
            }
        }
    });
    let other = other.map_err(|error| socket_error(&error))?;
    let single = depth == 1 && connections == 1;
    let this = NamedThread::spawn("bare-host", near, move |_| {
        hosts.iter_mut().for_each(|end| end.outgoing.unsent = depth as usize);
        exchange_messages(&mut hosts, clock, time, single, yields)
    });
    let (count, elapsed, trips) = this.map_err(|error| socket_error(&error))?.join();
    other.stop();
    Ok(BaselineResult {
        limit: Baseline::Messages(engine),
        iops: per_second(count, elapsed),
        elapsed,
        rings: connections,
        depth,
        round_trip: single.then(|| Span { ns: trips.percentile(500_000) }),
    })
}

fn socket_error(error: &dyn std::fmt::Display) -> Error {
    Error::environment(format!("measure bare messages: {error}"))
}

/// Cores of both sides: those of the run, with the second on another CPU if there is one.
fn cores_of_both_sides(cores: &CoreAssignment) -> (Option<u32>, Option<u32>) {
    let near = cores.submit[0];
    let others = cores.device.iter().copied().find(|core| *core != near);
    let far = others.or_else(|| {
        let allowed = CpuList::allowed_cpus();
        allowed.iter().map(Some).filter(|core| *core != near).last()
    });
    (near, far.unwrap_or(near))
}

/// Keeps all messages in flight for the duration. Returns the number of responses, the elapsed
/// time, and with one message in flight the round trip times.
fn exchange_messages(
    ends: &mut [MessageEndpoint],
    clock: Clock,
    time: Span,
    single: bool,
    yields: bool,
) -> (u64, Span, Histogram) {
    ends.iter_mut().for_each(MessageEndpoint::send);
    let round = || ends.iter_mut().map(MessageEndpoint::receive_and_reply).sum::<usize>() as u64;
    repeat_for(clock, time, single, yields, round)
}

/// State shared by the connections of one side.
struct EndpointShared {
    sockets: SocketStreamFactory,
    data: Segment,
    data_bytes: u32,
}

impl EndpointShared {
    fn new(engine: SocketEngine, data_bytes: u32, depth: u32) -> Result<Self, Error> {
        let regions = RegionTable::new(1);
        let whole = data_bytes.saturating_mul(depth).min(DATA_MAX).max(data_bytes).max(4096);
        let mapping = MemoryMapping::new(whole as usize, MemoryBacking::Private);
        let mapping = mapping.map_err(|error| socket_error(&error))?;
        mapping.populate();
        let data = regions.add_mapping(mapping).map_err(|error| socket_error(&error))?;
        let data = Segment { len_bytes: whole, ..data };
        let options = SocketOptions { engine, ..SocketOptions::default() };
        let sockets = SocketStreamFactory::new(regions, options);
        match (engine, sockets.io_uring_error()) {
            (SocketEngine::IoUring, Some(why)) => Err(socket_error(&format!(
                "io_uring: {why}; expected a kernel that allows it, or --baseline=tcp"
            ))),
            _ => Ok(Self { sockets, data, data_bytes }),
        }
    }

    fn new_endpoint(
        &self,
        socket: std::os::fd::OwnedFd,
        header_bytes: usize,
        incoming_bytes: usize,
    ) -> Result<MessageEndpoint, Error> {
        let stream = self.sockets.new_stream(socket).map_err(|error| socket_error(&error))?;
        let outgoing = OutgoingMessages {
            header: vec![0; header_bytes],
            data_bytes: self.data_bytes,
            data: self.data,
            next: 0,
            unsent: 0,
            sent: 0,
            stretches: Vec::with_capacity(2 * BATCH),
        };
        Ok(MessageEndpoint { stream, incoming_bytes, come: 0, outgoing })
    }
}

impl MessageEndpoint {
    /// Receives messages and sends as many. Returns the number received.
    #[inline]
    fn receive_and_reply(&mut self) -> usize {
        self.stream.receive();
        let waiting = self.stream.buffered().len();
        self.come += waiting;
        self.stream.consume(waiting);
        let count = self.come / self.incoming_bytes;
        self.come %= self.incoming_bytes;
        self.outgoing.unsent += count;
        if self.outgoing.unsent > 0 {
            self.send();
        }
        count
    }

    #[inline]
    fn send(&mut self) {
        self.outgoing.gather_list();
        let OutgoingMessages { header, stretches, unsent, .. } = &self.outgoing;
        let has_more = *unsent > BATCH;
        // A closed connection sends nothing; the other side ends the measurement.
        let sent = self.stream.send(header, stretches, has_more).unwrap_or(0);
        self.outgoing.record_sent(sent);
    }
}

impl OutgoingMessages {
    fn message_bytes(&self) -> usize {
        self.header.len() + self.data_bytes as usize
    }

    /// Builds the gather list of the owed messages, up to the limit of one send.
    #[inline]
    fn gather_list(&mut self) {
        self.stretches.clear();
        let header_bytes = u32::try_from(self.header.len()).unwrap_or(0);
        let mut skip = u32::try_from(self.sent).unwrap_or(0);
        for index in 0..self.unsent.min(BATCH) {
            let at = skip.min(header_bytes);
            skip -= at;
            if at < header_bytes {
                self.stretches.push(SendSlice::Headers { at, len_bytes: header_bytes - at });
            }
            if self.data_bytes > 0 {
                let data = self.data_segment(index);
                let rest = data.slice(skip, self.data_bytes - skip).unwrap_or(data);
                self.stretches.push(SendSlice::Memory(rest));
            }
            skip = 0;
        }
    }

    /// Data segment of the message `index` after the next.
    #[inline]
    fn data_segment(&self, index: usize) -> Segment {
        let cores = self.data.len_bytes / self.data_bytes;
        let index = u32::try_from(index).unwrap_or(0);
        let place = self.next.wrapping_add(index) % cores;
        let offset = self.data.offset + u64::from(place * self.data_bytes);
        Segment { offset, len_bytes: self.data_bytes, ..self.data }
    }

    #[inline]
    fn record_sent(&mut self, sent: usize) {
        let sent = self.sent + sent;
        let done = sent / self.message_bytes();
        self.sent = sent % self.message_bytes();
        self.unsent -= done;
        self.next = self.next.wrapping_add(u32::try_from(done).unwrap_or(0));
    }
}

#[cfg(test)]
mod tests {
    use tenmil_linux::Clock;
    use tenmil_linux::socket::{SocketEngine, loopback_pair};

    use super::{EndpointShared, MessageEndpoint};

    /// Both sides on one thread, with one and with many messages in flight, and with messages
    /// larger than any buffer: every message is replied to and counted once.
    #[test]
    fn every_message_is_answered_once() {
        for engine in [SocketEngine::Epoll, SocketEngine::IoUring] {
            for (depth, data_bytes) in [(1, 4096), (128, 4096), (3, 0), (4, 1 << 20)] {
                let Ok(side) = EndpointShared::new(engine, data_bytes, depth) else {
                    assert_eq!(engine, SocketEngine::IoUring, "only a ring may be refused");
                    continue;
                };
                let none = EndpointShared::new(engine, 0, depth).unwrap();
                let [one, other] = loopback_pair().unwrap();
                let mut host = none.new_endpoint(one, 72, 24 + data_bytes as usize).unwrap();
                let mut target = side.new_endpoint(other, 24, 72).unwrap();
                complete_all(&mut host, &mut target, depth as usize);
            }
        }
    }

    fn complete_all(host: &mut MessageEndpoint, target: &mut MessageEndpoint, depth: usize) {
        let clock = Clock::start();
        let late = clock.now().after(tenmil_base::Span::from_secs(20));
        host.outgoing.unsent = depth;
        let (mut asked, mut completed) = (0, 0);
        while completed < 20 * depth {
            assert!(clock.now() < late, "{completed} of {asked} answered");
            asked += target.receive_and_reply();
            completed += host.receive_and_reply();
            assert!(completed <= asked && asked <= completed + depth, "{completed} of {asked}");
        }
    }
}
