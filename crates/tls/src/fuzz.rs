//! Fuzzer of handshakes and records: arbitrary bytes from a client, arbitrary records of a client with
//! the right keys, and a network that cuts, changes, repeats and drops the bytes between two ends.

use std::sync::Arc;

use tenmil_nvme_auth::{Hash, SecretBytes};

use crate::cipher::ScatterList;
use crate::cipher_io::{CipherIo, Received};
use crate::error::TlsError;
use crate::psk::Psk;
use crate::record_layer::{Handover, Plaintext, RecordLayer, Side};
use crate::session::{ClientConfig, ServerConfig, TlsSession};

/// Encrypted bytes of one end, in memory.
#[derive(Default)]
struct Wire {
    inward: Vec<u8>,
    consumed: usize,
    outward: Vec<u8>,
    is_closed: bool,
}

/// One end of a connection with its plaintext.
struct End {
    session: TlsSession,
    wire: Wire,
    /// Plaintext that this end has sent and received.
    sent: Vec<u8>,
    received: Vec<u8>,
    is_shut: bool,
    error: Option<TlsError>,
}

/// Longest plaintext of a direction.
const PLAINTEXT_MAX: usize = 1 << 17;
/// Longest stream of arbitrary bytes.
const STREAM_MAX: usize = 1 << 16;

/// Runs a script: the first byte selects its kind, the others are its steps.
///
/// # Panics
///
/// If an invariant is violated: a bug of this crate or the library below, whatever the bytes are.
pub fn fuzz_tls(bytes: &[u8]) {
    match bytes.split_first() {
        Some((kind, stream)) if kind % 2 == 0 => feed_server(stream),
        Some((kind, script)) if kind & 4 != 0 => feed_records(kind & 2 != 0, script),
        Some((kind, script)) => run_network(kind & 2 != 0, script),
        None => {}
    }
}

/// Scripts from which a fuzzer starts.
#[must_use]
pub fn seed_scripts() -> Vec<(&'static str, Vec<u8>)> {
    let hello = [&[0][..], &client_hello()].concat();
    let step = |what: u8, count: u8| [what, count];
    let handshake = [step(0, 255), step(1, 255)].repeat(4).concat();
    let traffic = [step(2, 40), step(0, 20), step(0, 255), step(3, 9), step(1, 255)].concat();
    let key_updates = [step(8, 0), step(2, 3), step(0, 255), step(9, 0), step(3, 3), step(1, 255)];
    let ends = [step(10, 0), step(0, 255), step(3, 5), step(1, 255), step(11, 0), step(1, 255)];
    let whole = [&[1][..], &handshake, &traffic, &key_updates.concat(), &ends.concat()].concat();
    let byte_by_byte = [&[3][..], &[step(0, 1), step(1, 1)].repeat(600).concat()].concat();
    let changed = [&[1][..], &handshake, &[2, 40, 4, 9, 0, 255]].concat();
    let dropped = [&[1][..], &handshake, &[2, 40, 2, 7, 6, 20, 0, 255]].concat();
    let records = [
        &[5][..],
        &[0, 4, 1, 2, 3, 4, 2, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 2, 7, 7],
        &[4, 2, 24, 0, 4, 2, 0, 1, 6, 1, 1, 0, 3, 5, 6, 7, 5, 2, 1, 90, 5, 2, 1, 0],
    ];
    let records = records.concat();
    let refused = [&[7][..], &[0, 2, 1, 2, 6, 1, 1, 4, 3, 24, 0, 0, 0, 1, 9]].concat();
    vec![
        ("records", records),
        ("refused-record", refused),
        ("client-hello", hello),
        ("session", whole),
        ("session-byte-by-byte", byte_by_byte),
        ("changed-record", changed),
        ("dropped-bytes", dropped),
    ]
}

const IDENTITY: &[u8] = b"NVMe1R01 nqn.host nqn.sub x";

fn psk(hash: Hash) -> Psk {
    let secret = SecretBytes::new(vec![7; hash.len_bytes()]);
    Psk { identity: IDENTITY.to_vec(), secret, hash, derivation: None }
}

/// ClientHello with a key, whose binder is wrong.
fn client_hello() -> Vec<u8> {
    let len = |bytes: &[u8]| u8::try_from(bytes.len()).unwrap_or(u8::MAX);
    let vector = |bytes: &[u8]| [&[0, len(bytes)][..], bytes].concat();
    let identity = [&vector(IDENTITY)[..], &[0; 4]].concat();
    let binder = [&[32][..], &[0; 32]].concat();
    let extensions = [
        [&[0, 43][..], &vector(&[2, 3, 4])].concat(),
        [&[0, 45][..], &vector(&[1, 1])].concat(),
        [&[0, 41][..], &vector(&[vector(&identity), vector(&binder)].concat())].concat(),
    ];
    let body = [
        &[3, 3][..],
        &[9; 32],
        &[0],
        &vector(&[0x13, 0x01]),
        &[1, 0],
        &vector(&extensions.concat()),
    ];
    let body = body.concat();
    let message = [&[1, 0][..], &vector(&body)].concat();
    [&[22, 3, 1][..], &vector(&message)].concat()
}

/// A server that receives arbitrary bytes: it never opens, and answers nothing but an alert before a
/// ClientHello with a valid binder has arrived.
fn feed_server(stream: &[u8]) {
    let mut server = End::server(Hash::Sha256);
    server.wire.inward = stream[..stream.len().min(STREAM_MAX)].to_vec();
    server.wire.is_closed = true;
    server.step();
    server.step();
    assert!(server.session.secure_channel().is_none(), "the client has proved nothing");
}

/// A server that receives records of any content and type from a client with the right keys: it
/// receives their data in order until one is refused, and tells the client.
fn feed_records(is_sha384: bool, script: &[u8]) {
    let [mut client, mut server] = both_ends(is_sha384);
    let mut wire = Wire::default();
    let (mut sent, mut received, mut into) = (Vec::new(), Vec::new(), vec![0; 1 + 255 * 79]);
    let mut rest = &script[..script.len().min(STREAM_MAX)];
    while let [what, len, behind @ ..] = rest {
        let content = &behind[..behind.len().min(usize::from(*len))];
        rest = &behind[content.len()..];
        let repeated = content.repeat(64);
        let padded = [content, &[23, 0, 0, 0]].concat();
        let (content_type, content) = match what % 8 {
            0 | 1 => (23, content),
            2 => (23, &repeated[..]),
            3 => (0, &padded[..]),
            4 => (22, content),
            5 => (21, content),
            6 => {
                let request = content.first().copied().unwrap_or(0);
                let _ = client.send_key_update_with(request, &mut wire.inward);
                continue;
            }
            _ => (*len, content),
        };
        let _ = client.send_record(content_type, content, &mut wire.inward);
        let inner = [content, &[content_type]].concat();
        let end = inner.iter().rposition(|byte| *byte != 0).unwrap_or(0);
        if inner[end] == 23 {
            sent.extend_from_slice(&inner[..end]);
        }
        let part = usize::from(*what) * 79 + 1;
        loop {
            let mut list = ScatterList::new();
            let (first, second) = into[..part].split_at_mut(part / 3);
            list.add_bytes(first);
            list.add_bytes(second);
            match server.receive(&mut wire, &mut list) {
                Ok(Plaintext::Bytes(count)) => received.extend_from_slice(&into[..count]),
                Ok(Plaintext::WouldBlock) => break,
                Ok(Plaintext::End) => return,
                Err(error) => {
                    let is_told = !wire.outward.is_empty();
                    assert_eq!(is_told, !matches!(error, TlsError::PeerAlert(_)), "{error}");
                    return;
                }
            }
            assert!(sent.starts_with(&received), "the server received something else");
        }
        assert!(sent == received, "data were withheld");
    }
}

/// Both ends of a connection whose handshake has ended.
fn both_ends(is_sha384: bool) -> [RecordLayer; 2] {
    let (suite, len) = if is_sha384 { (2, 48) } else { (1, 32) };
    let state = [0, 0, 0, 0, 0, 0, 0, 1, 3, 4, 0x13, suite];
    let serialized = [&state[..], &[0; 16], &[0x40, 0], &vec![7; 3 * len]].concat();
    let handover = Handover::parse(&SecretBytes::new(serialized)).expect("the format is known");
    [Side::Client, Side::Server].map(|side| {
        RecordLayer::new(side, &handover, Vec::new()).expect("the keys have their lengths")
    })
}

/// Two ends, and a network that follows the script.
fn run_network(is_sha384: bool, script: &[u8]) {
    let hash = if is_sha384 { Hash::Sha384 } else { Hash::Sha256 };
    let (mut client, mut server) = (End::client(hash), End::server(hash));
    let mut is_intact = true;
    client.step();
    for step in script.chunks_exact(2) {
        let count = usize::from(step[1]);
        match step[0] % 12 {
            0 => deliver(&mut client, &mut server, count),
            1 => deliver(&mut server, &mut client, count),
            2 => client.send(count),
            3 => server.send(count),
            4 => is_intact &= !change(&mut client.wire.outward, count),
            5 => is_intact &= !change(&mut server.wire.outward, count),
            6 => is_intact &= !remove(&mut client.wire.outward, count),
            7 => is_intact &= !repeat(&mut server.wire.outward, count),
            8 => drop(client.session.update_keys()),
            9 => drop(server.session.update_keys()),
            10 => client.shut_down(),
            _ => server.wire.is_closed |= count.is_multiple_of(16),
        }
        client.step();
        server.step();
        // Whatever the network does, what is received is what was sent, in order.
        assert!(client.sent.starts_with(&server.received), "the server received something else");
        assert!(server.sent.starts_with(&client.received), "the client received something else");
        if is_intact && !server.wire.is_closed {
            assert_eq!((&client.error, &server.error), (&None, &None), "nothing was changed");
        }
    }
}

/// Delivers `count` bytes, or all if `count` is 255.
fn deliver(from: &mut End, to: &mut End, count: usize) {
    let len = from.wire.outward.len();
    let count = if count == 255 { len } else { count.min(len) };
    to.wire.inward.extend(from.wire.outward.drain(..count));
}

/// Changes a bit; returns whether there was one.
fn change(bytes: &mut [u8], at: usize) -> bool {
    let Some(len) = bytes.len().checked_sub(1) else { return false };
    bytes[at % (len + 1)] ^= 1 << (at % 8);
    true
}

/// Removes bytes from the front; returns whether there were any.
fn remove(bytes: &mut Vec<u8>, count: usize) -> bool {
    bytes.drain(..count.min(bytes.len())).count() > 0
}

/// Repeats bytes of the end; returns whether there were any.
fn repeat(bytes: &mut Vec<u8>, count: usize) -> bool {
    let from = bytes.len() - count.min(bytes.len());
    bytes.extend_from_within(from..);
    from < bytes.len() && count > 0
}

impl End {
    fn client(hash: Hash) -> Self {
        let config = ClientConfig::with_psks([psk(hash)]).expect("there is a key");
        Self::new(TlsSession::client(&config).expect("there is memory"))
    }

    fn server(hash: Hash) -> Self {
        let config = ServerConfig::with_psks(Arc::new(vec![psk(hash)])).expect("there is memory");
        Self::new(TlsSession::server(&config).expect("there is memory"))
    }

    fn new(session: TlsSession) -> Self {
        let (wire, sent, received) = (Wire::default(), Vec::new(), Vec::new());
        Self { session, wire, sent, received, is_shut: false, error: None }
    }

    fn send(&mut self, count: usize) {
        // Squares, so that some are longer than a record.
        let byte = |at: usize| u8::try_from(at % 251).unwrap_or_default();
        let bytes: Vec<u8> = (self.sent.len()..).take(count * count).map(byte).collect();
        if !self.is_shut
            && self.sent.len() + bytes.len() <= PLAINTEXT_MAX
            && self.session.send(&mut self.wire, &bytes).is_ok()
        {
            self.sent.extend(bytes);
        }
    }

    fn shut_down(&mut self) {
        self.is_shut |= self.session.secure_channel().is_some();
        self.session.close_notify(&mut self.wire);
    }

    /// Does everything that is possible now. An error is the same from then on.
    fn step(&mut self) {
        if self.session.secure_channel().is_none() {
            match self.session.handshake(&mut self.wire) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => return self.record(error),
            }
        }
        let mut part = [0; 5000];
        loop {
            match self.session.receive(&mut self.wire, &mut part) {
                Ok(Plaintext::Bytes(count)) => self.received.extend_from_slice(&part[..count]),
                Ok(Plaintext::WouldBlock | Plaintext::End) => return,
                Err(error) => return self.record(error),
            }
        }
    }

    fn record(&mut self, error: TlsError) {
        assert!(!error.to_string().is_empty());
        let first = self.error.get_or_insert_with(|| error.clone());
        assert_eq!(*first, error, "the reason stays");
    }
}

impl CipherIo for Wire {
    fn received(&mut self) -> Received<'_> {
        match &self.inward[self.consumed..] {
            [] if self.is_closed => Received::End,
            [] => Received::WouldBlock,
            bytes => Received::Bytes(bytes),
        }
    }

    fn consume(&mut self, count: usize) {
        self.consumed += count;
    }

    fn outgoing(&mut self) -> &mut Vec<u8> {
        &mut self.outward
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Random;

    use super::{fuzz_tls, seed_scripts};

    #[test]
    fn seeds_and_their_mutations_violate_nothing() {
        let mut random = Random::new(1);
        let mut hello = super::End::server(super::Hash::Sha256);
        hello.wire.inward = super::client_hello();
        hello.step();
        assert_eq!(hello.error.unwrap().name(), "wrong-key", "the seed is well formed");
        for (_, seed) in seed_scripts() {
            fuzz_tls(&seed);
            for _ in 0..100 {
                let mut changed = seed.clone();
                for _ in 0..1 + random.below(4) {
                    let at = usize::try_from(random.below(changed.len() as u64)).unwrap();
                    changed[at] = u8::try_from(random.below(256)).unwrap();
                }
                fuzz_tls(&changed);
            }
        }
    }
}
