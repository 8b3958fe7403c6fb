//! One connection through the proxy.

use std::io;
use std::os::fd::OwnedFd;

use base::{Instant, Random, Received, Stream, Stretch, WakeSource};
use host::socket::{Dial, Sockets, reset_at_end};
use host::watch::{Interest, Watch};
use sim::network::{Arrival, Line, LineOptions};

/// Both sides of a connection and what lies between them.
pub(super) struct Link {
    number: u64,
    sockets: Sockets,
    near: Side,
    far: Far,
    /// Towards the target.
    there: Way,
    /// Towards whoever connected.
    back: Way,
    is_over: bool,
}

/// One of the two sockets.
struct Side {
    stream: Box<dyn Stream>,
    /// The same socket once more, to reset it by.
    socket: OwnedFd,
    /// Nothing more comes from it.
    has_ended: bool,
}

/// The side of the target.
enum Far {
    Dialling(Box<Dial>),
    Connected(Box<Side>),
    /// Both sides are closed.
    Gone,
}

/// One direction.
struct Way {
    line: Line,
    /// Came out of the line and has not been sent.
    pending: Vec<u8>,
    has_ended: bool,
}

/// How a turn of a direction went.
enum Went {
    Nothing,
    Something,
    /// The connection is to be broken, and why.
    Cut(String),
}

const READABLE: Interest = Interest { readable: true, writable: false };
/// As much comes out of a line at once.
const PORTION_BYTES: usize = 64 << 10;

impl Link {
    pub(super) fn new(
        number: u64,
        socket: OwnedFd,
        dial: Dial,
        sockets: &Sockets,
        (there, back): (LineOptions, LineOptions),
        mut random: Random,
    ) -> Result<Self, String> {
        let near = Side::new(socket, sockets)?;
        let (there, back) = (Way::new(there, random.fork()), Way::new(back, random.fork()));
        let (sockets, far) = (sockets.clone(), Far::Dialling(Box::new(dial)));
        Ok(Self { number, sockets, near, far, there, back, is_over: false })
    }

    pub(super) fn from(&self) -> String {
        self.near.stream.peer()
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Moves what can be moved, both ways.
    pub(super) fn turn(&mut self, now: Instant, tell: &mut dyn FnMut(String)) -> bool {
        let went = match &mut self.far {
            Far::Dialling(dial) => match dial.poll(now) {
                None => return false,
                Some(Err(error)) => Went::Cut(error.to_string()),
                Some(Ok(socket)) => match Side::new(socket, &self.sockets) {
                    Err(why) => Went::Cut(why),
                    Ok(side) => {
                        self.far = Far::Connected(Box::new(side));
                        Went::Something
                    }
                },
            },
            Far::Connected(far) => {
                let there = self.there.turn(now, &mut self.near, far);
                match (there, self.back.turn(now, far, &mut self.near)) {
                    (Went::Cut(why), _) | (_, Went::Cut(why)) => Went::Cut(why),
                    (Went::Nothing, Went::Nothing) => Went::Nothing,
                    _ => Went::Something,
                }
            }
            Far::Gone => return false,
        };
        match went {
            Went::Cut(why) => self.cut(&why, tell),
            Went::Something if self.there.has_ended && self.back.has_ended => {
                self.end("both sides have closed", tell);
            }
            Went::Nothing => return false,
            Went::Something => {}
        }
        true
    }

    /// Resets both sides.
    fn cut(&mut self, why: &str, tell: &mut dyn FnMut(String)) {
        reset_at_end(&self.near.socket);
        if let Far::Connected(far) = &self.far {
            reset_at_end(&far.socket);
        }
        self.end(why, tell);
    }

    fn end(&mut self, why: &str, tell: &mut dyn FnMut(String)) {
        let (number, there, back) = (self.number, self.there.line.given(), self.back.line.given());
        tell(format!("connection {number}: {why}, after {there} bytes there and {back} back"));
        self.far = Far::Gone;
        self.is_over = true;
    }

    /// When something is due although nothing comes.
    pub(super) fn wake_at(&self, now: Instant) -> Instant {
        match &self.far {
            Far::Dialling(dial) => dial.wake_at(),
            Far::Connected(_) => self.there.wake_at(now).min(self.back.wake_at(now)),
            Far::Gone => now,
        }
    }

    /// Has `watch` wake for both sides. True if there is something to do already.
    pub(super) fn arm(&mut self, now: Instant, watch: &Watch) -> io::Result<bool> {
        match &mut self.far {
            Far::Dialling(dial) => {
                add(watch, dial.wake_source())?;
                Ok(false)
            }
            Far::Connected(far) => {
                let near = self.near.arm(watch, &self.there, &self.back)?;
                let far = far.arm(watch, &self.back, &self.there)?;
                let is_due = self.there.wake_at(now).min(self.back.wake_at(now)) <= now;
                Ok(near || far || is_due)
            }
            Far::Gone => Ok(true),
        }
    }

    pub(super) fn disarm(&mut self) {
        self.near.stream.disarm();
        if let Far::Connected(far) = &mut self.far {
            far.stream.disarm();
        }
    }
}

fn add(watch: &Watch, source: WakeSource<'_>) -> io::Result<()> {
    match source {
        WakeSource::Descriptor(descriptor) => watch.add(descriptor, 0, READABLE),
        WakeSource::Nothing | WakeSource::Deadline => Ok(()),
    }
}

impl Side {
    fn new(socket: OwnedFd, sockets: &Sockets) -> Result<Self, String> {
        let again = socket.try_clone().map_err(|error| format!("copy a descriptor: {error}"))?;
        let stream = sockets.stream(socket).map_err(|error| error.to_string())?;
        Ok(Self { stream, socket: again, has_ended: false })
    }

    fn arm(&mut self, watch: &Watch, from: &Way, to: &Way) -> io::Result<bool> {
        let wants_bytes = !self.has_ended && from.line.room() > 0;
        let wants_room = !to.pending.is_empty();
        add(watch, self.stream.wake_source())?;
        Ok(self.stream.arm(wants_bytes, wants_room))
    }
}

impl Way {
    fn new(options: LineOptions, random: Random) -> Self {
        Self { line: Line::new(options, random), pending: Vec::new(), has_ended: false }
    }

    fn turn(&mut self, now: Instant, from: &mut Side, to: &mut Side) -> Went {
        let came = match self.take_in(now, from) {
            Went::Cut(why) => return Went::Cut(why),
            Went::Something => true,
            Went::Nothing => false,
        };
        match self.give_out(now, to) {
            Went::Nothing if came => Went::Something,
            went => went,
        }
    }

    /// Puts into the line what has come, as far as there is room in it.
    fn take_in(&mut self, now: Instant, from: &mut Side) -> Went {
        if from.has_ended || self.line.room() == 0 {
            return Went::Nothing;
        }
        let received = from.stream.receive();
        let count = self.line.put(now, from.stream.bytes());
        from.stream.consume(count);
        match received {
            Received::Broken(broken) => Went::Cut(broken.to_string()),
            Received::End if from.stream.bytes().is_empty() => {
                from.has_ended = true;
                self.line.close();
                Went::Something
            }
            _ if count > 0 => Went::Something,
            _ => Went::Nothing,
        }
    }

    /// Sends what comes out of the line.
    fn give_out(&mut self, now: Instant, to: &mut Side) -> Went {
        if self.has_ended {
            return Went::Nothing;
        }
        if self.pending.is_empty() {
            self.pending.resize(PORTION_BYTES, 0);
            let arrival = self.line.take(now, &mut self.pending);
            self.pending.truncate(if let Arrival::Bytes(count) = arrival { count } else { 0 });
            match arrival {
                Arrival::Bytes(_) => {}
                Arrival::Nothing => return Went::Nothing,
                Arrival::Cut => return Went::Cut("it was cut".to_owned()),
                Arrival::End => {
                    to.stream.shut_down();
                    self.has_ended = true;
                    return Went::Something;
                }
            }
        }
        let len_bytes = u32::try_from(self.pending.len()).unwrap_or(u32::MAX);
        let all = [Stretch::Headers { at: 0, len_bytes }];
        match to.stream.send(&self.pending, &all, false) {
            Err(broken) => Went::Cut(broken.to_string()),
            Ok(0) => Went::Nothing,
            Ok(count) => {
                self.pending.drain(..count);
                Went::Something
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
