//! Fuzzers of both ends: peers that send almost correct PDUs.
//!
//! The input is a script. Each step names a PDU and how to modify it, so that most of the generated
//! input gets far: lengths, digests and tags are as expected, except in the fields that the script
//! changes.

mod controller;
mod host;

use tenmil_base::{Instant, Span};
use tenmil_wire::tcp::{PduFraming, crc32c};

use crate::{Connection, EventQueue, PayloadDigest, SendPiece};
pub use controller::fuzz_controller;
pub use host::fuzz_host;

/// Largest number of commands at each end.
const DEPTH: u16 = 4;
/// Longest data of a command.
const BYTES_MAX: u32 = 16_384;
/// Largest number of steps.
const STEPS_MAX: usize = 2_000;

/// Payloads of zeroes.
struct Zeros;

impl PayloadDigest for Zeros {
    fn data_digest(&self, _: u16, _: u32, len_bytes: u32) -> u32 {
        crc32c(&vec![0; len_bytes as usize])
    }
}

/// Script, consumed from the front.
struct FuzzScript<'a>(&'a [u8]);

impl FuzzScript<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// Next byte; zero at the end of the script.
    fn byte_or_zero(&mut self) -> u8 {
        self.byte().unwrap_or(0)
    }

    /// Next length, usually a valid one.
    fn next_len(&mut self) -> u32 {
        match self.byte_or_zero() {
            pdu @ 0..=0x3f => u32::from(pdu) * 4,
            pdu @ 0x40..=0x7f => u32::from(pdu - 0x40) * 256,
            odd @ 0x80..=0xbf => u32::from(odd),
            _ => u32::from_le_bytes([
                self.byte_or_zero(),
                self.byte_or_zero(),
                self.byte_or_zero(),
                self.byte_or_zero(),
            ]),
        }
    }
}

/// Digests, alignment and fragmentation: the first bytes of a script.
struct SessionParams {
    header_digest: bool,
    data_digest: bool,
    alignment: u8,
    fragment_bytes: usize,
}

impl SessionParams {
    fn from_script(script: &mut FuzzScript<'_>) -> Self {
        let (mode, fragment_bytes) = (script.byte_or_zero(), script.byte_or_zero());
        Self {
            header_digest: mode & 1 != 0,
            data_digest: mode & 2 != 0,
            alignment: mode >> 3,
            fragment_bytes: usize::from(fragment_bytes).pow(2) + 1,
        }
    }

    fn framing(&self) -> PduFraming {
        let Self { header_digest, data_digest, alignment, .. } = *self;
        PduFraming { header_digest, data_digest, alignment }
    }
}

/// Encodes a PDU of a header and `len` zeroes, with digests and padding.
fn encode_pdu(framing: PduFraming, header: &[u8], len: u32) -> Vec<u8> {
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

/// Modifies a header before its digest is computed, or the whole PDU afterwards.
fn mutate_pdu(
    script: &mut FuzzScript<'_>,
    framing: PduFraming,
    mut header: Vec<u8>,
    len: u32,
) -> Vec<u8> {
    let mode = script.byte_or_zero();
    let (at, value) = (usize::from(script.byte_or_zero()), script.byte_or_zero());
    if mode & 0xc0 == 0x40 && !header.is_empty() {
        let placement = at % header.len();
        header[placement] = value;
    }
    let mut pdu = encode_pdu(framing, &header, len);
    if mode & 0xc0 == 0x80 && !pdu.is_empty() {
        let placement = at % pdu.len();
        pdu[placement] ^= value;
    }
    if mode & 0xc0 == 0xc0 {
        pdu.truncate(at % (pdu.len() + 1));
    }
    pdu
}

/// End under test and its owner, with a scripted peer.
struct ScriptedSession<E: Connection, O> {
    end: E,
    owner: O,
    events: EventQueue<E::Event>,
    /// Received bytes that were not consumed.
    unconsumed: Vec<u8>,
    /// Number of times the end of the connection was reported.
    close_events: usize,
    now: Instant,
    /// Size of the fragments of the stream.
    fragment_bytes: usize,
}

/// Behavior and invariants of an owner.
trait EndpointOwner {
    type Event;

    fn handle_event(&mut self, event: Self::Event);

    /// Executes a step of the script: an action of the owner, or bytes from the peer.
    fn step(&mut self, script: &mut FuzzScript<'_>, framing: PduFraming, step: u8) -> Vec<u8>;
}

impl<E, O> ScriptedSession<E, O>
where
    E: Connection<Event: Copy>,
    Self: EndpointOwner<Event = E::Event>,
{
    fn new(end: E, owner: O, fragment_bytes: usize) -> Self {
        let (events, unconsumed) = (EventQueue::with_capacity(4), Vec::new());
        Self {
            end,
            owner,
            events,
            unconsumed,
            close_events: 0,
            now: Instant::default(),
            fragment_bytes,
        }
    }

    /// Executes the script to its end.
    fn run_script(&mut self, script: &mut FuzzScript<'_>, framing: PduFraming) {
        for _ in 0..STEPS_MAX {
            let Some(step) = script.byte() else { break };
            self.now = self.now.after(Span::from_ms(1));
            let sent = self.step(script, framing, step);
            self.exchange(&sent);
        }
    }

    fn exchange(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(self.fragment_bytes) {
            self.unconsumed.extend_from_slice(part);
            self.receive();
        }
        self.end.fill_send_queue(&Zeros);
        let len = checked_pieces_len(self.end.send_pieces(), self.end.header_bytes(), DEPTH);
        self.end.record_sent(len, &mut self.events);
        self.handle_events();
        self.receive();
        assert!(self.end.deadline() >= self.now, "a deadline was missed");
    }

    fn receive(&mut self) {
        loop {
            let consumed = self.end.receive(self.now, &self.unconsumed, &mut self.events);
            let had_events = self.handle_events();
            self.unconsumed.drain(..consumed);
            if consumed == 0 && !had_events {
                return;
            }
        }
    }

    fn handle_events(&mut self) -> bool {
        let events = self.events.as_slice().to_vec();
        self.events.clear();
        for event in &events {
            self.handle_event(*event);
        }
        assert!(self.close_events <= 1, "the end is reported once");
        !events.is_empty()
    }

    fn close(&mut self) {
        self.end.handle_eof(self.unconsumed.len(), &mut self.events);
        self.handle_events();
        self.end.handle_deadline(self.now.after(Span::from_secs(100)), &mut self.events);
        self.handle_events();
        assert!(self.end.is_closed() && self.close_events == 1);
    }
}

/// Total length of the pieces, after checking their bounds.
fn checked_pieces_len(pieces: &[SendPiece], headers: &[u8], tags: u16) -> usize {
    let len = |fragment_bytes: &SendPiece| match *fragment_bytes {
        SendPiece::Headers { at, len_bytes } => headers[at as usize..][..len_bytes as usize].len(),
        SendPiece::Payload { tag, offset, len_bytes } => {
            assert!(tag < tags && offset + len_bytes <= BYTES_MAX);
            len_bytes as usize
        }
    };
    pieces.iter().map(len).sum()
}

#[cfg(test)]
mod tests {
    use tenmil_base::Random;

    #[test]
    fn random_scripts_violate_no_invariant() {
        let mut random = Random::new(0x7c9_0001);
        for _ in 0..3_000 {
            let len = random.below(400);
            let bytes: Vec<u8> = (0..len).map(|_| random.next_u64().to_le_bytes()[0]).collect();
            super::fuzz_host(&bytes);
            super::fuzz_controller(&bytes);
            // Few bits: digests off, valid connection setup, unmodified PDUs.
            let unmodified: Vec<u8> = bytes.iter().map(|byte| byte & 0x3f).collect();
            super::fuzz_host(&unmodified);
            super::fuzz_controller(&unmodified);
        }
    }
}
