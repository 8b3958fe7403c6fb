//! Connection forwarded by the proxy.

use std::io;
use std::os::fd::OwnedFd;

use tenmil_base::{Instant, Random, RecvResult, SendSlice, Stream, WakeSource};
use tenmil_linux::poll_set::{Interest, PollSet};
use tenmil_linux::socket::{ConnectOp, SocketStreamFactory, reset_on_close};
use tenmil_sim::sim_network::{LinkDirection, LinkOptions, ReadResult};

/// Both sockets of a connection and the fault lines between them.
pub(super) struct ProxiedConnection {
    number: u64,
    sockets: SocketStreamFactory,
    near: ProxySocket,
    far: UpstreamState,
    /// Direction towards the target.
    there: ProxyDirection,
    /// Direction towards the client.
    back: ProxyDirection,
    is_over: bool,
}

/// One of the two sockets.
struct ProxySocket {
    stream: Box<dyn Stream>,
    /// Duplicate of the socket, used to reset it.
    socket: OwnedFd,
    /// Whether the peer has closed its direction.
    has_ended: bool,
}

/// Connection to the target.
enum UpstreamState {
    Connecting(Box<ConnectOp>),
    Connected(Box<ProxySocket>),
    /// Both sockets are closed.
    Closed,
}

/// One direction.
struct ProxyDirection {
    line: LinkDirection,
    /// Bytes that left the line and are not sent yet.
    pending: Vec<u8>,
    has_ended: bool,
}

/// Result of forwarding one direction.
enum ForwardResult {
    Nothing,
    Progress,
    /// The connection must be reset, for this reason.
    Cut(String),
}

const READABLE: Interest = Interest { readable: true, writable: false };
/// Maximum number of bytes taken from a line at a time.
const CHUNK_BYTES: usize = 64 << 10;

impl ProxiedConnection {
    pub(super) fn new(
        number: u64,
        socket: OwnedFd,
        dial: ConnectOp,
        sockets: &SocketStreamFactory,
        (there, back): (LinkOptions, LinkOptions),
        mut random: Random,
    ) -> Result<Self, String> {
        let near = ProxySocket::new(socket, sockets)?;
        let (there, back) =
            (ProxyDirection::new(there, random.fork()), ProxyDirection::new(back, random.fork()));
        let (sockets, far) = (sockets.clone(), UpstreamState::Connecting(Box::new(dial)));
        Ok(Self { number, sockets, near, far, there, back, is_over: false })
    }

    pub(super) fn client_description(&self) -> String {
        self.near.stream.peer_description()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_over
    }

    /// Forwards pending bytes in both directions. Returns whether anything was done.
    pub(super) fn poll(&mut self, now: Instant, report: &mut dyn FnMut(String)) -> bool {
        let went = match &mut self.far {
            UpstreamState::Connecting(dial) => match dial.poll(now) {
                None => return false,
                Some(Err(error)) => ForwardResult::Cut(error.to_string()),
                Some(Ok(socket)) => match ProxySocket::new(socket, &self.sockets) {
                    Err(why) => ForwardResult::Cut(why),
                    Ok(side) => {
                        self.far = UpstreamState::Connected(Box::new(side));
                        ForwardResult::Progress
                    }
                },
            },
            UpstreamState::Connected(far) => {
                let there = self.there.poll(now, &mut self.near, far);
                match (there, self.back.poll(now, far, &mut self.near)) {
                    (ForwardResult::Cut(why), _) | (_, ForwardResult::Cut(why)) => {
                        ForwardResult::Cut(why)
                    }
                    (ForwardResult::Nothing, ForwardResult::Nothing) => ForwardResult::Nothing,
                    _ => ForwardResult::Progress,
                }
            }
            UpstreamState::Closed => return false,
        };
        match went {
            ForwardResult::Cut(why) => self.reset_both(&why, report),
            ForwardResult::Progress if self.there.has_ended && self.back.has_ended => {
                self.close_both("both sides have closed", report);
            }
            ForwardResult::Nothing => return false,
            ForwardResult::Progress => {}
        }
        true
    }

    /// Resets both sockets.
    fn reset_both(&mut self, why: &str, report: &mut dyn FnMut(String)) {
        reset_on_close(&self.near.socket);
        if let UpstreamState::Connected(far) = &self.far {
            reset_on_close(&far.socket);
        }
        self.close_both(why, report);
    }

    fn close_both(&mut self, why: &str, report: &mut dyn FnMut(String)) {
        let (number, there, back) =
            (self.number, self.there.line.delivered_bytes(), self.back.line.delivered_bytes());
        report(format!("connection {number}: {why}, after {there} bytes there and {back} back"));
        self.far = UpstreamState::Closed;
        self.is_over = true;
    }

    /// Time of the next timer.
    pub(super) fn wake_at(&self, now: Instant) -> Instant {
        match &self.far {
            UpstreamState::Connecting(dial) => dial.wake_at(),
            UpstreamState::Connected(_) => self.there.wake_at(now).min(self.back.wake_at(now)),
            UpstreamState::Closed => now,
        }
    }

    /// Registers both sockets with `watch`. Returns true if there is work already.
    pub(super) fn arm(&mut self, now: Instant, watch: &PollSet) -> io::Result<bool> {
        match &mut self.far {
            UpstreamState::Connecting(dial) => {
                add_wake_source(watch, dial.wake_source())?;
                Ok(false)
            }
            UpstreamState::Connected(far) => {
                let near = self.near.arm(watch, &self.there, &self.back)?;
                let far = far.arm(watch, &self.back, &self.there)?;
                let is_due = self.there.wake_at(now).min(self.back.wake_at(now)) <= now;
                Ok(near || far || is_due)
            }
            UpstreamState::Closed => Ok(true),
        }
    }

    pub(super) fn disarm(&mut self) {
        self.near.stream.disarm();
        if let UpstreamState::Connected(far) = &mut self.far {
            far.stream.disarm();
        }
    }
}

fn add_wake_source(watch: &PollSet, source: WakeSource<'_>) -> io::Result<()> {
    match source {
        WakeSource::Descriptor(descriptor) => watch.add(descriptor, 0, READABLE),
        WakeSource::None | WakeSource::Deadline => Ok(()),
    }
}

impl ProxySocket {
    fn new(socket: OwnedFd, sockets: &SocketStreamFactory) -> Result<Self, String> {
        let again = socket.try_clone().map_err(|error| format!("copy a descriptor: {error}"))?;
        let stream = sockets.new_stream(socket).map_err(|error| error.to_string())?;
        Ok(Self { stream, socket: again, has_ended: false })
    }

    fn arm(
        &mut self,
        watch: &PollSet,
        from: &ProxyDirection,
        to: &ProxyDirection,
    ) -> io::Result<bool> {
        let wants_bytes = !self.has_ended && from.line.free_capacity_bytes() > 0;
        let wants_space = !to.pending.is_empty();
        add_wake_source(watch, self.stream.wake_source())?;
        Ok(self.stream.arm(wants_bytes, wants_space))
    }
}

impl ProxyDirection {
    fn new(options: LinkOptions, random: Random) -> Self {
        Self { line: LinkDirection::new(options, random), pending: Vec::new(), has_ended: false }
    }

    fn poll(
        &mut self,
        now: Instant,
        from: &mut ProxySocket,
        to: &mut ProxySocket,
    ) -> ForwardResult {
        let came = match self.receive(now, from) {
            ForwardResult::Cut(why) => return ForwardResult::Cut(why),
            ForwardResult::Progress => true,
            ForwardResult::Nothing => false,
        };
        match self.send(now, to) {
            ForwardResult::Nothing if came => ForwardResult::Progress,
            went => went,
        }
    }

    /// Moves received bytes into the line, as far as its buffer has space.
    fn receive(&mut self, now: Instant, from: &mut ProxySocket) -> ForwardResult {
        if from.has_ended || self.line.free_capacity_bytes() == 0 {
            return ForwardResult::Nothing;
        }
        let received = from.stream.receive();
        let count = self.line.accept_bytes(now, from.stream.buffered());
        from.stream.consume(count);
        match received {
            RecvResult::Failed(broken) => ForwardResult::Cut(broken.to_string()),
            // The end is forwarded only after all bytes received before it.
            RecvResult::Eof if from.stream.buffered().is_empty() => {
                from.has_ended = true;
                self.line.close();
                ForwardResult::Progress
            }
            _ if count > 0 => ForwardResult::Progress,
            _ => ForwardResult::Nothing,
        }
    }

    /// Sends bytes that leave the line.
    fn send(&mut self, now: Instant, to: &mut ProxySocket) -> ForwardResult {
        if self.has_ended {
            return ForwardResult::Nothing;
        }
        if self.pending.is_empty() {
            self.pending.resize(CHUNK_BYTES, 0);
            let arrival = self.line.read_arrived(now, &mut self.pending);
            self.pending.truncate(if let ReadResult::Bytes(count) = arrival { count } else { 0 });
            match arrival {
                ReadResult::Bytes(_) => {}
                ReadResult::Nothing => return ForwardResult::Nothing,
                ReadResult::Cut => return ForwardResult::Cut("it was cut".to_owned()),
                ReadResult::End => {
                    to.stream.shutdown_write();
                    self.has_ended = true;
                    return ForwardResult::Progress;
                }
            }
        }
        let len_bytes = u32::try_from(self.pending.len()).unwrap_or(u32::MAX);
        let all = [SendSlice::Headers { at: 0, len_bytes }];
        match to.stream.send(&self.pending, &all, false) {
            Err(broken) => ForwardResult::Cut(broken.to_string()),
            Ok(0) => ForwardResult::Nothing,
            Ok(count) => {
                self.pending.drain(..count);
                ForwardResult::Progress
            }
        }
    }

    fn wake_at(&self, now: Instant) -> Instant {
        if self.has_ended || !self.pending.is_empty() {
            return Instant::NEVER;
        }
        self.line.wake_at(now)
    }
}
