//! From what an end has to send to the stream.

use base::{Broken, Stream, Stretch};
use tcp::{Connection, Controller, ControllerEvent, Events, Piece, Place};

use super::rooms::Rooms;

/// What goes out on a connection.
#[derive(Debug)]
pub(super) struct Outgoing {
    stretches: Vec<Stretch>,
    released: Events<ControllerEvent>,
    /// Bytes that the stream has taken, and of these, bytes that nobody reads any more.
    taken: u64,
    told: u64,
    /// The stream had no room for all of it.
    is_blocked: bool,
}

/// Gathered lists that are sent in a turn: one, but for a connection with more to say than an end
/// queues at a time.
const SENDS_MAX: usize = 4;

impl Outgoing {
    pub(super) fn new(depth: u16) -> Self {
        Self {
            stretches: Vec::new(),
            released: Events::with_capacity(usize::from(depth) + 1),
            taken: 0,
            told: 0,
            is_blocked: false,
        }
    }

    /// Whether the stream has to have room before anything can go on.
    #[inline]
    pub(super) fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    /// Whether there is something that the stream was not offered.
    #[inline]
    pub(super) fn has_unsent(&self, end: &Controller) -> bool {
        let len = |piece: &Piece| match *piece {
            Piece::Headers { len_bytes, .. } | Piece::Payload { len_bytes, .. } => {
                u64::from(len_bytes)
            }
        };
        // What it has taken and still reads comes first among the pieces.
        let read = self.taken - self.told;
        match read {
            0 => !end.pieces().is_empty(),
            _ => end.pieces().iter().map(len).sum::<u64>() > read,
        }
    }

    /// Whether the stream still reads what it has taken.
    #[inline]
    pub(super) fn is_read(&self) -> bool {
        self.taken > self.told
    }

    /// Sends what there is to send, as far as the stream has room. How many bytes went.
    #[inline]
    pub(super) fn send(
        &mut self,
        stream: &mut dyn Stream,
        end: &mut Controller,
        rooms: &mut Rooms,
    ) -> Result<usize, Broken> {
        let mut all = 0;
        for _ in 0..SENDS_MAX {
            end.fill(rooms);
            let total = self.gather(end, rooms)?;
            if total == 0 {
                self.is_blocked = false;
                break;
            }
            let sent = stream.send(end.headers(), &self.stretches, end.has_more())?;
            self.taken += sent as u64;
            all += sent;
            self.tell(stream, end, rooms);
            self.is_blocked = sent == 0;
            if self.is_blocked || (sent == total && !end.has_more()) {
                break;
            }
        }
        Ok(all)
    }

    /// Hears what the stream does not read any more. How many commands that ends.
    #[inline]
    pub(super) fn tell(
        &mut self,
        stream: &mut dyn Stream,
        end: &mut Controller,
        rooms: &mut Rooms,
    ) -> usize {
        let released = stream.released();
        let count = usize::try_from(released - self.told).unwrap_or(usize::MAX);
        self.told = released;
        end.sent(count, &mut self.released);
        for event in self.released.as_slice() {
            if let ControllerEvent::Released { tag } = *event {
                rooms.release(tag);
            }
        }
        let ended = self.released.as_slice().len();
        self.released.clear();
        ended
    }

    /// Puts together what the stream has not taken. How many bytes that is.
    #[inline]
    fn gather(&mut self, end: &Controller, rooms: &Rooms) -> Result<usize, Broken> {
        self.stretches.clear();
        let mut skip = u32::try_from(self.taken - self.told).unwrap_or(u32::MAX);
        let mut total = 0;
        for piece in end.pieces() {
            let len = match *piece {
                Piece::Headers { len_bytes, .. } | Piece::Payload { len_bytes, .. } => len_bytes,
            };
            if skip >= len {
                skip -= len;
                continue;
            }
            let rest = len - skip;
            self.stretches.push(match *piece {
                Piece::Headers { at, .. } => Stretch::Headers { at: at + skip, len_bytes: rest },
                Piece::Payload { tag, offset, .. } => {
                    let place = Place { tag, offset: offset + skip, len_bytes: rest };
                    Stretch::Memory(rooms.segment(place).ok_or_else(|| no_buffer(place))?)
                }
            });
            skip = 0;
            total += rest as usize;
        }
        Ok(total)
    }
}

/// A command keeps its buffer until its data are sent.
#[cold]
fn no_buffer(place: Place) -> Broken {
    let Place { tag, offset, len_bytes } = place;
    Broken(format!("{len_bytes} bytes from {offset} of command {tag} lie in no buffer"))
}
