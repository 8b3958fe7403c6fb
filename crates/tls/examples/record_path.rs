//! Speed of the record path beside that of the bare cipher, and processor time of a handshake:
//! `cargo run --release -p tenmil-tls --example record_path`.
//!
//! One thread is both ends, without a socket. All times are processor time of that thread, and bare
//! cipher and records alternate, so the ratio is meaningful on a shared machine; the rates are not.

use std::hint::black_box;
use std::sync::Arc;

use aws_lc_rs::aead::{AES_128_GCM, AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use rustix::time::{ClockId, clock_gettime};
use tenmil_nvme_auth::{Hash, SecretBytes};
use tenmil_tls::{
    CipherIo, ClientConfig, Plaintext, Psk, Received, ServerConfig, TlsError, TlsSession,
};

/// Encrypted bytes between two ends.
#[derive(Default)]
struct Wire {
    inward: Vec<u8>,
    consumed: usize,
    outward: Vec<u8>,
}

/// Encrypted bytes that are dropped, as by a socket whose cost is not measured.
#[derive(Default)]
struct Sink(Vec<u8>);

/// Rounds of which the median is printed.
const ROUNDS: usize = 15;
/// Bytes between two readings of the clock, which is a system call: those of a receive buffer of a
/// socket.
const BATCH_BYTES: usize = 256 << 10;
/// Bytes of a round.
const ROUND_BYTES: usize = 32 << 20;

fn main() -> Result<(), TlsError> {
    println!("suite sizes in KiB; MB/s of one core, median of {ROUNDS}; ratio to the bare cipher");
    println!("{:>24} {:>5} {:>7} {:>14} {:>14}", "suite", "KiB", "cipher", "encrypt", "decrypt");
    for hash in [Hash::Sha256, Hash::Sha384] {
        for kib in [4, 16, 128] {
            measure_records(hash, kib << 10)?;
        }
    }
    for hash in [Hash::Sha256, Hash::Sha384] {
        measure_handshake(hash)?;
    }
    Ok(())
}

/// Processor time of this thread in seconds.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

fn timed(act: impl FnOnce() -> Result<(), TlsError>) -> Result<f64, TlsError> {
    let start = cpu_seconds();
    act()?;
    Ok(cpu_seconds() - start)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn measure_records(hash: Hash, size: usize) -> Result<(), TlsError> {
    let [mut client, mut server] = open_pair(hash)?;
    let [_, mut discarding] = open_pair(hash)?;
    let message: Vec<u8> = (0..=255).cycle().take(size).collect();
    let mut into = vec![0; size];
    let mut sink = Sink::default();
    let (mut cipher, mut encrypt, mut decrypt) = (Vec::new(), Vec::new(), Vec::new());
    let mut key = BareCipher::new(hash);
    for _ in 0..ROUNDS {
        cipher.push(timed(|| key.seal_all(size))?);
        let (mut encrypting, mut decrypting) = (0.0, 0.0);
        for _ in 0..ROUND_BYTES / BATCH_BYTES {
            encrypting += timed(|| {
                for _ in 0..BATCH_BYTES / size {
                    sink.0.clear();
                    discarding.0.send(&mut sink, &message)?;
                    black_box(&sink.0);
                }
                Ok(())
            })?;
            for _ in 0..BATCH_BYTES / size {
                server.0.send(&mut server.1, &message)?;
            }
            std::mem::swap(&mut client.1.inward, &mut server.1.outward);
            client.1.consumed = 0;
            decrypting += timed(|| {
                (0..BATCH_BYTES / size).try_for_each(|_| receive_exactly(&mut client, &mut into))
            })?;
            client.1.inward.clear();
        }
        encrypt.push(encrypting);
        decrypt.push(decrypting);
    }
    assert!(into == message, "the bytes arrive");
    let suite = client.0.secure_channel().map_or("", |channel| channel.cipher_suite);
    let rate = |seconds: Vec<f64>| ROUND_BYTES as f64 / median(seconds) / 1e6;
    let (cipher, encrypt, decrypt) = (rate(cipher), rate(encrypt), rate(decrypt));
    println!(
        "{suite:>24} {:>5} {cipher:>7.0} {encrypt:>7.0} ({:.2}) {decrypt:>7.0} ({:.2})",
        size >> 10,
        encrypt / cipher,
        decrypt / cipher,
    );
    Ok(())
}

fn receive_exactly((session, wire): &mut End, into: &mut [u8]) -> Result<(), TlsError> {
    let mut filled = 0;
    while filled < into.len() {
        match session.receive(wire, &mut into[filled..])? {
            Plaintext::Bytes(count) => filled += count,
            other => panic!("{other:?} after {filled} bytes"),
        }
    }
    Ok(())
}

type End = (TlsSession, Wire);

fn configs(hash: Hash) -> Result<(ClientConfig, ServerConfig), TlsError> {
    let psk = Psk {
        identity: b"NVMe1R01 nqn.2014-08.org.nvmexpress:uuid:host nqn.2026-01.io.tenmil:sub"
            .to_vec(),
        secret: SecretBytes::new(vec![7; hash.len_bytes()]),
        hash,
        derivation: None,
    };
    let client = ClientConfig::with_psks([psk.clone()])?;
    Ok((client, ServerConfig::with_psks(Arc::new(vec![psk]))?))
}

fn open_pair(hash: Hash) -> Result<[End; 2], TlsError> {
    let (client, server) = configs(hash)?;
    let mut client = (TlsSession::client(&client)?, Wire::default());
    let mut server = (TlsSession::server(&server)?, Wire::default());
    loop {
        let is_client_open = client.0.handshake(&mut client.1)?;
        server.1.inward.append(&mut client.1.outward);
        let is_server_open = server.0.handshake(&mut server.1)?;
        client.1.inward.append(&mut server.1.outward);
        if is_client_open && is_server_open {
            return Ok([client, server]);
        }
    }
}

/// Processor time of the two ends of a handshake, each for itself.
fn measure_handshake(hash: Hash) -> Result<(), TlsError> {
    const HANDSHAKES: usize = 300;
    let (mut at_client, mut at_server) = (Vec::new(), Vec::new());
    let (client_config, server_config) = configs(hash)?;
    for _ in 0..HANDSHAKES {
        let (mut client_seconds, mut server_seconds) = (0.0, 0.0);
        let (mut client, mut server) = (None, None);
        let (mut client_wire, mut server_wire) = (Wire::default(), Wire::default());
        let (mut is_client_open, mut is_server_open) = (false, false);
        while !(is_client_open && is_server_open) {
            client_seconds += timed(|| {
                let session = match client.take() {
                    Some(session) => session,
                    None => TlsSession::client(&client_config)?,
                };
                is_client_open = client.insert(session).handshake(&mut client_wire)?;
                Ok(())
            })?;
            server_wire.inward.append(&mut client_wire.outward);
            server_seconds += timed(|| {
                let session = match server.take() {
                    Some(session) => session,
                    None => TlsSession::server(&server_config)?,
                };
                is_server_open = server.insert(session).handshake(&mut server_wire)?;
                Ok(())
            })?;
            client_wire.inward.append(&mut server_wire.outward);
        }
        at_client.push(client_seconds * 1e6);
        at_server.push(server_seconds * 1e6);
    }
    let (at_client, at_server) = (median(at_client), median(at_server));
    println!("handshake with {hash}: client {at_client:.0} us, server {at_server:.0} us");
    Ok(())
}

/// The cipher of a suite without TLS, in place, on records of 16 KiB as TLS would make them.
struct BareCipher {
    key: LessSafeKey,
    nonce: u64,
}

impl BareCipher {
    fn new(hash: Hash) -> Self {
        let algorithm = if hash == Hash::Sha256 { &AES_128_GCM } else { &AES_256_GCM };
        let key = UnboundKey::new(algorithm, &vec![7; algorithm.key_len()]).expect("its length");
        Self { key: LessSafeKey::new(key), nonce: 0 }
    }

    fn seal_all(&mut self, size: usize) -> Result<(), TlsError> {
        let mut bytes = vec![0x5a; size];
        for _ in 0..ROUND_BYTES / size {
            for record in bytes.chunks_mut(16 << 10) {
                self.nonce += 1;
                let mut nonce = [0; 12];
                nonce[4..].copy_from_slice(&self.nonce.to_be_bytes());
                let nonce = Nonce::assume_unique_for_key(nonce);
                let header = Aad::from([23, 3, 3, 0x40, 0x11]);
                let tag = self.key.seal_in_place_separate_tag(nonce, header, record);
                assert!(black_box(tag).is_ok(), "a record is short");
            }
        }
        Ok(())
    }
}

impl CipherIo for Sink {
    fn received(&mut self) -> Received<'_> {
        Received::WouldBlock
    }

    fn consume(&mut self, _: usize) {}

    fn outgoing(&mut self) -> &mut Vec<u8> {
        &mut self.0
    }
}

impl CipherIo for Wire {
    fn received(&mut self) -> Received<'_> {
        match &self.inward[self.consumed..] {
            [] => Received::WouldBlock,
            bytes => Received::Bytes(bytes),
        }
    }

    fn consume(&mut self, count: usize) {
        self.consumed += count;
        if self.consumed == self.inward.len() {
            self.inward.clear();
            self.consumed = 0;
        }
    }

    fn outgoing(&mut self) -> &mut Vec<u8> {
        &mut self.outward
    }
}
