//! Moving bytes between pieces of host memory and a place of the controller's own.
//!
//! A host may answer at once or many turns later and in any order, so up to [`WINDOW`] accesses are
//! open at a time, each with a ticket and its own part of the place. A failed access ends the move,
//! but only once the others have ended too: until then the host may still answer into the place.

use base::{Ended, HostMemory, Memory, Progress, Segment, Ticket};

use super::{Direction, Pieces};

/// A move under way.
#[derive(Debug)]
pub(crate) struct Mover {
    /// The piece in which the next byte lies, and where in it.
    piece: usize,
    piece_offset: u32,
    /// Bytes for which no access has been made.
    left: u32,
    /// Where in the place the next byte belongs.
    at: u32,
    accesses: [Access; WINDOW],
    /// A bit for each access that is open.
    open: u8,
    has_failed: bool,
}

/// How far a move got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moved {
    /// Every byte is where it belongs.
    Whole,
    /// Tickets will end.
    Waiting,
    /// The host has no such memory, and no access is open any more.
    Failed,
}

/// The controller's own place.
pub(crate) enum Target<'a> {
    /// Ordinary bytes.
    Bytes(&'a mut [u8]),
    /// A bounce buffer.
    Buffer(&'a dyn Memory, Segment),
    /// A bounce buffer that the host's bytes are compared with.
    Expected { memory: &'a dyn Memory, segment: Segment, differs: &'a mut bool },
}

#[derive(Clone, Copy, Debug, Default)]
struct Access {
    at: u32,
    len_bytes: u32,
}

/// The most bytes of one access.
pub(crate) const ACCESS_BYTES_MAX: usize = 16 << 10;

/// Accesses that may be open at once. Tickets of a move end in these four bits, of which the
/// upper half is left to the owner.
const WINDOW: usize = 8;

impl Mover {
    /// A move of nothing, at the first piece.
    pub(crate) fn new() -> Self {
        Self {
            piece: 0,
            piece_offset: 0,
            left: 0,
            at: 0,
            accesses: [Access::default(); WINDOW],
            open: 0,
            has_failed: false,
        }
    }

    /// Begins to move the next `len_bytes`, to or from the start of the place. There is one move at a
    /// time: one that begins while accesses of another are open fails, as that does.
    pub(crate) fn begin(&mut self, len_bytes: u32) {
        if self.open != 0 {
            return self.abandon();
        }
        (self.left, self.at, self.has_failed) = (len_bytes, 0, false);
    }

    /// Whether the host still owes an answer.
    pub(crate) fn is_open(&self) -> bool {
        self.open != 0
    }

    /// Makes no more accesses. What is open still ends.
    pub(crate) fn abandon(&mut self) {
        self.has_failed = true;
    }

    /// Makes accesses, as many as may be open at once. `scratch` is [`ACCESS_BYTES_MAX`] long.
    pub(crate) fn run<H: HostMemory>(
        &mut self,
        host: &mut H,
        tickets: u32,
        pieces: &Pieces,
        direction: Direction,
        target: &mut Target<'_>,
        scratch: &mut [u8],
    ) -> Moved {
        while self.left > 0 && !self.has_failed && self.open.trailing_ones() < WINDOW_BITS {
            let Some(piece) = pieces.as_slice().get(self.piece) else {
                self.has_failed = true;
                break;
            };
            let rest = piece.len_bytes - self.piece_offset;
            let most = if piece.is_bucket { u32::MAX } else { ACCESS_U32 };
            let access = Access { at: self.at, len_bytes: rest.min(self.left).min(most) };
            if !piece.is_bucket {
                let iova = piece.iova + u64::from(self.piece_offset);
                let bytes = &mut scratch[..access.len_bytes as usize];
                let index = self.open.trailing_ones();
                let ticket = Ticket(tickets | index);
                let progress = match direction {
                    Direction::FromHost => host.read(ticket, iova, bytes).ok(),
                    Direction::ToHost if target.get(access.at, bytes) => {
                        host.write(ticket, iova, bytes).ok()
                    }
                    Direction::ToHost => None,
                };
                match progress {
                    Some(Progress::Later) => {
                        self.accesses[index as usize] = access;
                        self.open |= 1 << index;
                    }
                    Some(Progress::Done) if direction == Direction::FromHost => {
                        self.has_failed |= !target.put(access.at, bytes);
                    }
                    Some(Progress::Done) => {}
                    None => self.has_failed = true,
                }
            }
            self.step(access.len_bytes, piece.len_bytes);
        }
        match (self.open, self.has_failed) {
            (0, true) => Moved::Failed,
            (0, false) if self.left == 0 => Moved::Whole,
            _ => Moved::Waiting,
        }
    }

    /// Takes the end of an access.
    pub(crate) fn end<H: HostMemory>(
        &mut self,
        host: &mut H,
        ended: Ended,
        direction: Direction,
        target: &mut Target<'_>,
        scratch: &mut [u8],
    ) {
        let index = ended.ticket.0 & 0xf;
        if index >= WINDOW_BITS || self.open & (1 << index) == 0 {
            return;
        }
        self.open &= !(1 << index);
        let access = self.accesses[index as usize];
        match (ended.result, direction) {
            (Ok(()), Direction::FromHost) => {
                let bytes = &mut scratch[..access.len_bytes as usize];
                host.collect(ended.ticket, bytes);
                self.has_failed |= !target.put(access.at, bytes);
            }
            (Ok(()), Direction::ToHost) => {}
            (Err(_), _) => self.has_failed = true,
        }
    }

    fn step(&mut self, len_bytes: u32, piece_len_bytes: u32) {
        self.left -= len_bytes;
        self.at += len_bytes;
        self.piece_offset += len_bytes;
        if self.piece_offset == piece_len_bytes {
            (self.piece, self.piece_offset) = (self.piece + 1, 0);
        }
    }
}

const WINDOW_BITS: u32 = u8::BITS;
const ACCESS_U32: u32 = 16 << 10;
const _: () = assert!(WINDOW_BITS as usize == WINDOW && ACCESS_U32 as usize == ACCESS_BYTES_MAX);

impl Target<'_> {
    /// Takes bytes that came from the host. False if the place is not there.
    fn put(&mut self, at: u32, bytes: &[u8]) -> bool {
        match self {
            Self::Bytes(place) => {
                let place = place.get_mut(at as usize..at as usize + bytes.len());
                place.is_some_and(|place| {
                    place.copy_from_slice(bytes);
                    true
                })
            }
            Self::Buffer(memory, segment) => {
                part(*segment, at, bytes).is_some_and(|part| memory.store(part, bytes).is_ok())
            }
            Self::Expected { memory, segment, differs } => {
                let Some(part) = part(*segment, at, bytes) else { return false };
                **differs |= match equals(*memory, part, bytes) {
                    Some(is_equal) => !is_equal,
                    None => return false,
                };
                true
            }
        }
    }

    /// Hands out bytes that go to the host. False if the place is not there.
    fn get(&self, at: u32, bytes: &mut [u8]) -> bool {
        match self {
            Self::Bytes(place) => {
                let place = place.get(at as usize..at as usize + bytes.len());
                place.is_some_and(|place| {
                    bytes.copy_from_slice(place);
                    true
                })
            }
            Self::Buffer(memory, segment) | Self::Expected { memory, segment, .. } => {
                part(*segment, at, bytes).is_some_and(|part| memory.load(part, bytes).is_ok())
            }
        }
    }
}

fn part(segment: Segment, at: u32, bytes: &[u8]) -> Option<Segment> {
    segment.slice(at, u32::try_from(bytes.len()).ok()?)
}

/// Compares a part of a buffer with `bytes`, a little at a time: no second scratch is needed.
fn equals(memory: &dyn Memory, part: Segment, bytes: &[u8]) -> Option<bool> {
    let mut here = [0; 256];
    for (index, chunk) in bytes.chunks(here.len()).enumerate() {
        let at = u32::try_from(index * here.len()).ok()?;
        let here = &mut here[..chunk.len()];
        memory.load(part.slice(at, u32::try_from(chunk.len()).ok()?)?, here).ok()?;
        if here != chunk {
            return Some(false);
        }
    }
    Some(true)
}
