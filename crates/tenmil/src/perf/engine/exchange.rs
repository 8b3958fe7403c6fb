//! The bare exchange: what is left of I/O over TCP when the protocol is taken away.
//!
//! One thread sends requests and receives answers, the other does the reverse, over the same engine
//! for sockets, with the same gather lists and as many messages under way. Messages are as long as
//! those of NVMe/TCP without digests; nothing in them is looked at. It is the limit that a `tcp://`
//! device is compared with, measured in the same run, because on a shared machine it moves.

use base::{Histogram, Segment, Span, Stream, Stretch};
use dma::{Backing, Mapping, Regions};
use host::socket::{SocketEngine, SocketOptions, Sockets, loopback};
use host::{Clock, Cores, Thread};

use super::places::Places;
use super::rounds::keep_going;
use crate::perf::options::{CeilingOf, Pattern, PerfOptions};
use crate::perf::outcome::{CeilingOutcome, Limit, per_second};
use crate::{Refused, Uri};

/// What to measure.
pub(super) struct Plan<'a> {
    pub(super) options: &'a PerfOptions,
    pub(super) places: &'a Places,
    pub(super) clock: Clock,
    pub(super) time: Span,
    pub(super) engine: SocketEngine,
}

/// One end of one connection.
struct End {
    stream: Box<dyn Stream>,
    /// How long what comes is.
    incoming_bytes: usize,
    /// How much of the next message has come.
    come: usize,
    outgoing: Outgoing,
}

/// What an end sends: messages of a header and, one way, data.
struct Outgoing {
    header: Vec<u8>,
    /// In each message.
    data_bytes: u32,
    /// From where messages take their data in turn.
    data: Segment,
    next: u32,
    /// Messages that are to be sent, the one that is half sent among them.
    owed: usize,
    /// How much of the first of them was sent.
    sent: usize,
    stretches: Vec<Stretch>,
}

/// A command capsule with its common header (TCP transport specification, 3.6.2.6).
const REQUEST_BYTES: usize = 72;
/// The header of data, and a response capsule (3.6.2.7, 3.6.2.11).
const ANSWER_BYTES: usize = 24;
/// Messages in one send: with data, two stretches each.
const BATCH: usize = 256;
/// No more memory than this is sent from.
const DATA_MAX: u32 = 16 << 20;

impl PerfOptions {
    /// The engine whose bare messages the run is compared with, if it is.
    pub(in crate::perf) fn exchange_engine(&self) -> Option<SocketEngine> {
        let is_tcp = |uri: &Uri| matches!(uri, Uri::Block(uri) if uri.scheme() == "tcp");
        match self.ceiling_of {
            CeilingOf::TcpRing => Some(SocketEngine::Ring),
            CeilingOf::Tcp => Some(SocketEngine::Epoll),
            CeilingOf::Own if self.uris.is_empty() => None,
            CeilingOf::Own => self.uris.iter().all(is_tcp).then_some(SocketEngine::Epoll),
        }
    }
}

/// Measures with one thread on each side, and with one message under way, how long a round trip
/// takes.
pub(super) fn measure(plan: &Plan<'_>, depth: u32) -> Result<CeilingOutcome, Refused> {
    let Plan { options, places, clock, time, engine } = *plan;
    let connections = options.device_count() * u32::from(options.queue_pairs);
    let sockets = |data_bytes| Side::new(engine, data_bytes, depth);
    let is_read = matches!(options.pattern, Pattern::Read | Pattern::RandRead);
    let io_bytes = options.sizes.largest();
    let (asked, answered) = if is_read { (0, io_bytes) } else { (io_bytes, 0) };
    let (host, target) = (sockets(asked)?, sockets(answered)?);
    let (mut hosts, mut targets) = (Vec::new(), Vec::new());
    let request_bytes = REQUEST_BYTES + asked as usize;
    let answer_bytes = ANSWER_BYTES + answered as usize;
    for _ in 0..connections {
        let [one, other] = loopback().map_err(|error| refuse(&error))?;
        hosts.push(host.end(one, REQUEST_BYTES, answer_bytes)?);
        targets.push(target.end(other, ANSWER_BYTES, request_bytes)?);
    }
    let engine = host.sockets.engine();
    let (near, far) = cores(places);
    let gives_way = near == far;
    let other = Thread::spawn("bare-target", far, move |stop| {
        while !stop.is_stopped() {
            let done: usize = targets.iter_mut().map(End::turn).sum();
            if done == 0 && gives_way {
                host::thread::give_way();
            }
        }
    });
    let other = other.map_err(|error| refuse(&error))?;
    let single = depth == 1 && connections == 1;
    let this = Thread::spawn("bare-host", near, move |_| {
        hosts.iter_mut().for_each(|end| end.outgoing.owed = depth as usize);
        exchange(&mut hosts, clock, time, single, gives_way)
    });
    let (count, elapsed, trips) = this.map_err(|error| refuse(&error))?.join();
    other.stop();
    Ok(CeilingOutcome {
        limit: Limit::Messages(engine),
        iops: per_second(count, elapsed),
        elapsed,
        rings: connections,
        depth,
        round_trip: single.then(|| Span { ns: trips.percentile(500_000) }),
    })
}

fn refuse(error: &dyn std::fmt::Display) -> Refused {
    Refused::machine(format!("measure bare messages: {error}"))
}

/// Where the two sides run: where the run does, and on another processor if there is one.
fn cores(places: &Places) -> (Option<u32>, Option<u32>) {
    let near = places.submit[0];
    let others = places.device.iter().copied().find(|core| *core != near);
    let far = others.or_else(|| {
        let allowed = Cores::allowed();
        allowed.iter().map(Some).filter(|core| *core != near).last()
    });
    (near, far.unwrap_or(near))
}

/// Keeps all messages under way for a while: how many came back, in what time, and where one is
/// under way, how long each trip was.
fn exchange(
    ends: &mut [End],
    clock: Clock,
    time: Span,
    single: bool,
    gives_way: bool,
) -> (u64, Span, Histogram) {
    ends.iter_mut().for_each(End::send);
    let round = || ends.iter_mut().map(End::turn).sum::<usize>() as u64;
    keep_going(clock, time, single, gives_way, round)
}

/// What the ends of one side share.
struct Side {
    sockets: Sockets,
    data: Segment,
    data_bytes: u32,
}

impl Side {
    fn new(engine: SocketEngine, data_bytes: u32, depth: u32) -> Result<Self, Refused> {
        let regions = Regions::new(1);
        let whole = data_bytes.saturating_mul(depth).min(DATA_MAX).max(data_bytes).max(4096);
        let mapping = Mapping::new(whole as usize, Backing::Private);
        let mapping = mapping.map_err(|error| refuse(&error))?;
        mapping.populate();
        let data = regions.add(mapping).map_err(|error| refuse(&error))?;
        let data = Segment { len_bytes: whole, ..data };
        let options = SocketOptions { engine, ..SocketOptions::default() };
        let sockets = Sockets::new(regions, options);
        match (engine, sockets.why_no_ring()) {
            (SocketEngine::Ring, Some(why)) => Err(refuse(&format!(
                "io_uring: {why}; expected a kernel that allows it, or --ceiling=tcp"
            ))),
            _ => Ok(Self { sockets, data, data_bytes }),
        }
    }

    fn end(
        &self,
        socket: std::os::fd::OwnedFd,
        header_bytes: usize,
        incoming_bytes: usize,
    ) -> Result<End, Refused> {
        let stream = self.sockets.stream(socket).map_err(|error| refuse(&error))?;
        let outgoing = Outgoing {
            header: vec![0; header_bytes],
            data_bytes: self.data_bytes,
            data: self.data,
            next: 0,
            owed: 0,
            sent: 0,
            stretches: Vec::with_capacity(2 * BATCH),
        };
        Ok(End { stream, incoming_bytes, come: 0, outgoing })
    }
}

impl End {
    /// Takes messages and sends as many. Returns how many came.
    #[inline]
    fn turn(&mut self) -> usize {
        self.stream.receive();
        let waiting = self.stream.bytes().len();
        self.come += waiting;
        self.stream.consume(waiting);
        let count = self.come / self.incoming_bytes;
        self.come %= self.incoming_bytes;
        self.outgoing.owed += count;
        if self.outgoing.owed > 0 {
            self.send();
        }
        count
    }

    #[inline]
    fn send(&mut self) {
        self.outgoing.list();
        let Outgoing { header, stretches, owed, .. } = &self.outgoing;
        let has_more = *owed > BATCH;
        // One that has gone sends nothing: the other side ends the measurement.
        let sent = self.stream.send(header, stretches, has_more).unwrap_or(0);
        self.outgoing.advance(sent);
    }
}

impl Outgoing {
    fn message_bytes(&self) -> usize {
        self.header.len() + self.data_bytes as usize
    }

    /// Lists what is owed, as far as it goes in one send.
    #[inline]
    fn list(&mut self) {
        self.stretches.clear();
        let header_bytes = u32::try_from(self.header.len()).unwrap_or(0);
        let mut skip = u32::try_from(self.sent).unwrap_or(0);
        for index in 0..self.owed.min(BATCH) {
            let at = skip.min(header_bytes);
            skip -= at;
            if at < header_bytes {
                self.stretches.push(Stretch::Headers { at, len_bytes: header_bytes - at });
            }
            if self.data_bytes > 0 {
                let data = self.place(index);
                let rest = data.slice(skip, self.data_bytes - skip).unwrap_or(data);
                self.stretches.push(Stretch::Memory(rest));
            }
            skip = 0;
        }
    }

    /// The data of the message that is so many after the next.
    #[inline]
    fn place(&self, index: usize) -> Segment {
        let places = self.data.len_bytes / self.data_bytes;
        let index = u32::try_from(index).unwrap_or(0);
        let place = self.next.wrapping_add(index) % places;
        let offset = self.data.offset + u64::from(place * self.data_bytes);
        Segment { offset, len_bytes: self.data_bytes, ..self.data }
    }

    #[inline]
    fn advance(&mut self, sent: usize) {
        let sent = self.sent + sent;
        let done = sent / self.message_bytes();
        self.sent = sent % self.message_bytes();
        self.owed -= done;
        self.next = self.next.wrapping_add(u32::try_from(done).unwrap_or(0));
    }
}

#[cfg(test)]
mod tests {
    use host::Clock;
    use host::socket::{SocketEngine, loopback};

    use super::{End, Side};

    /// Both sides on one thread, message by message and with many under way, and sizes that no buffer
    /// holds: what goes out comes back, and nothing is counted that did not.
    #[test]
    fn every_message_is_answered_once() {
        for engine in [SocketEngine::Epoll, SocketEngine::Ring] {
            for (depth, data_bytes) in [(1, 4096), (128, 4096), (3, 0), (4, 1 << 20)] {
                let Ok(side) = Side::new(engine, data_bytes, depth) else {
                    assert_eq!(engine, SocketEngine::Ring, "only a ring may be refused");
                    continue;
                };
                let none = Side::new(engine, 0, depth).unwrap();
                let [one, other] = loopback().unwrap();
                let mut host = none.end(one, 72, 24 + data_bytes as usize).unwrap();
                let mut target = side.end(other, 24, 72).unwrap();
                answer_all(&mut host, &mut target, depth as usize);
            }
        }
    }

    fn answer_all(host: &mut End, target: &mut End, depth: usize) {
        let clock = Clock::start();
        let late = clock.now().after(base::Span::from_secs(20));
        host.outgoing.owed = depth;
        let (mut asked, mut answered) = (0, 0);
        while answered < 20 * depth {
            assert!(clock.now() < late, "{answered} of {asked} answered");
            asked += target.turn();
            answered += host.turn();
            assert!(answered <= asked && asked <= answered + depth, "{answered} of {asked}");
        }
    }
}
