//! Peers that send anything: units that are nearly right, to both ends.
//!
//! The bytes are a script. Each step names a unit and what to do to it, so that most of what is made
//! comes far: it has the lengths, the digests and the tags that the end expects, but for the fields
//! that the script changes.

mod controller;
mod host;

use base::{Instant, Span};
use wire::tcp::{Framing, crc32c};

use crate::{Connection, Events, Payloads, Piece};
pub use controller::controller;
pub use host::host;

/// Commands at each end.
const DEPTH: u16 = 4;
/// The longest data of a command.
const BYTES_MAX: u32 = 16_384;
/// No script turns longer.
const STEPS_MAX: usize = 2_000;

/// Payloads that are all zeros.
struct Zeros;

impl Payloads for Zeros {
    fn digest(&self, _: u16, _: u32, len_bytes: u32) -> u32 {
        crc32c(&vec![0; len_bytes as usize])
    }
}

/// A script, read from its front.
struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// Zero where the script is at its end.
    fn small(&mut self) -> u8 {
        self.byte().unwrap_or(0)
    }

    /// Mostly a length that fits.
    fn len(&mut self) -> u32 {
        match self.small() {
            whole @ 0..=0x3f => u32::from(whole) * 4,
            whole @ 0x40..=0x7f => u32::from(whole - 0x40) * 256,
            odd @ 0x80..=0xbf => u32::from(odd),
            _ => u32::from_le_bytes([self.small(), self.small(), self.small(), self.small()]),
        }
    }
}

/// Digests, alignment and how the stream is cut: the first byte of a script.
struct Setting {
    header_digest: bool,
    data_digest: bool,
    alignment: u8,
    piece: usize,
}

impl Setting {
    fn of(script: &mut Script<'_>) -> Self {
        let (how, piece) = (script.small(), script.small());
        Self {
            header_digest: how & 1 != 0,
            data_digest: how & 2 != 0,
            alignment: how >> 3,
            piece: usize::from(piece).pow(2) + 1,
        }
    }

    fn framing(&self) -> Framing {
        let Self { header_digest, data_digest, alignment, .. } = *self;
        Framing { header_digest, data_digest, alignment }
    }
}

/// A unit of a header and `len` zeros, whole with digests and padding.
fn unit(framing: Framing, header: &[u8], len: u32) -> Vec<u8> {
    let mut bytes = header.to_vec();
    if framing.header_digest {
        bytes.extend(crc32c(header).to_le_bytes());
    }
    if len > 0 {
        let hlen = u8::try_from(header.len()).expect("headers are short");
        bytes.resize(bytes.len().max(framing.data_offset(hlen).into()), 0);
        let data = vec![0; len.min(2 * BYTES_MAX) as usize];
        let digest = crc32c(&data);
        bytes.extend(data);
        if framing.data_digest {
            bytes.extend(digest.to_le_bytes());
        }
    }
    bytes
}

/// Changes a header before it is given its digest, or the whole unit afterwards.
fn bend(script: &mut Script<'_>, framing: Framing, mut header: Vec<u8>, len: u32) -> Vec<u8> {
    let how = script.small();
    let (at, value) = (usize::from(script.small()), script.small());
    if how & 0xc0 == 0x40 && !header.is_empty() {
        let place = at % header.len();
        header[place] = value;
    }
    let mut whole = unit(framing, &header, len);
    if how & 0xc0 == 0x80 && !whole.is_empty() {
        let place = at % whole.len();
        whole[place] ^= value;
    }
    if how & 0xc0 == 0xc0 {
        whole.truncate(at % (whole.len() + 1));
    }
    whole
}

/// An end and its owner, whose peer sends what a script says.
struct Peer<E: Connection, O> {
    end: E,
    owner: O,
    events: Events<E::Event>,
    /// Bytes that came and were not taken.
    inbox: Vec<u8>,
    /// How often the end was told to be over.
    ends: usize,
    now: Instant,
    /// How long the pieces are that the stream is cut into.
    piece: usize,
}

/// What an owner does with an event, and what it holds to be true.
trait Owned {
    type Event;

    fn handle_event(&mut self, event: Self::Event);

    /// What a step of the script does: something at the end, or bytes that come.
    fn step(&mut self, script: &mut Script<'_>, framing: Framing, step: u8) -> Vec<u8>;
}

impl<E, O> Peer<E, O>
where
    E: Connection<Event: Copy>,
    Self: Owned<Event = E::Event>,
{
    fn new(end: E, owner: O, piece: usize) -> Self {
        let (events, inbox) = (Events::with_capacity(4), Vec::new());
        Self { end, owner, events, inbox, ends: 0, now: Instant::default(), piece }
    }

    /// Follows the script to its end.
    fn play(&mut self, script: &mut Script<'_>, framing: Framing) {
        for _ in 0..STEPS_MAX {
            let Some(step) = script.byte() else { break };
            self.now = self.now.after(Span::from_ms(1));
            let sent = self.step(script, framing, step);
            self.turn(&sent);
        }
    }

    fn turn(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(self.piece) {
            self.inbox.extend_from_slice(part);
            self.read();
        }
        self.end.fill(&Zeros);
        let len = len_of(self.end.pieces(), self.end.headers(), DEPTH);
        self.end.sent(len, &mut self.events);
        self.handle();
        self.read();
        assert!(self.end.deadline() >= self.now, "a deadline was missed");
    }

    fn read(&mut self) {
        loop {
            let taken = self.end.receive(self.now, &self.inbox, &mut self.events);
            let any = self.handle();
            self.inbox.drain(..taken);
            if taken == 0 && !any {
                return;
            }
        }
    }

    fn handle(&mut self) -> bool {
        let events = self.events.as_slice().to_vec();
        self.events.clear();
        for event in &events {
            self.handle_event(*event);
        }
        assert!(self.ends <= 1, "an end is told once");
        !events.is_empty()
    }

    fn close(&mut self) {
        self.end.receive_end(self.inbox.len(), &mut self.events);
        self.handle();
        self.end.expired(self.now.after(Span::from_secs(100)), &mut self.events);
        self.handle();
        assert!(self.end.is_over() && self.ends == 1);
    }
}

/// How many bytes the pieces have, each of which lies where it may.
fn len_of(pieces: &[Piece], headers: &[u8], tags: u16) -> usize {
    let len = |piece: &Piece| match *piece {
        Piece::Headers { at, len_bytes } => headers[at as usize..][..len_bytes as usize].len(),
        Piece::Payload { tag, offset, len_bytes } => {
            assert!(tag < tags && offset + len_bytes <= BYTES_MAX);
            len_bytes as usize
        }
    };
    pieces.iter().map(len).sum()
}

#[cfg(test)]
mod tests {
    use base::Random;

    #[test]
    fn nothing_that_must_hold_is_broken_by_scripts_of_any_kind() {
        let mut random = Random::new(0x7c9_0001);
        for _ in 0..3_000 {
            let len = random.below(400);
            let bytes: Vec<u8> = (0..len).map(|_| random.draw().to_le_bytes()[0]).collect();
            super::host(&bytes);
            super::controller(&bytes);
            // Few bits: digests off, openings that are right, units that are not bent.
            let calm: Vec<u8> = bytes.iter().map(|byte| byte & 0x3f).collect();
            super::host(&calm);
            super::controller(&calm);
        }
    }
}
