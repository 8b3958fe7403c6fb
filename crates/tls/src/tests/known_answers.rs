//! Records beside those of RFC 8448 and of another implementation of the same protection.

use aws_lc_rs::aead::{self, AES_128_GCM, AES_256_GCM, Aad, LessSafeKey, UnboundKey};
use aws_lc_rs::hkdf::{self, HKDF_SHA256, HKDF_SHA384, KeyType, Prk};
use tenmil_base::Random;
use tenmil_nvme_auth::SecretBytes;

use super::Wire;
use crate::cipher::{GatherList, ScatterList};
use crate::error::TlsError;
use crate::key_schedule::TrafficSecret;
use crate::record_layer::{Direction, Handover, Plaintext, RecordLayer, Side};
use crate::suite::CipherSuite;

/// RFC 8448 §3, "Simple 1-RTT Handshake": secrets, keys and protected records after the handshake.
const CLIENT_SECRET: &str = "9e 40 64 6c e7 9a 7f 9d c0 5a f8 88 9b ce 65 52
    87 5a fa 0b 06 df 00 87 f7 92 eb b7 c1 75 04 a5";
const SERVER_SECRET: &str = "a1 1a f9 f0 55 31 f8 56 ad 47 11 6b 45 a9 50 32
    82 04 b4 f4 4b fb 6b 3a 4b 4f 1f 3f cb 63 16 43";
const CLIENT_KEY: &str = "17 42 2d da 59 6e d5 d9 ac d8 90 e3 c6 3f 50 51";
const CLIENT_IV: &str = "5b 78 92 3d ee 08 57 90 33 e5 23 d9";
const SERVER_KEY: &str = "9f 02 28 3b 6c 9c 07 ef c2 6b b9 f2 ac 92 e3 56";
const SERVER_IV: &str = "cf 78 2b 88 dd 83 54 9a ad f1 e9 84";
const SERVER_TICKET: &str = "17 03 03 00 de 3a 6b 8f 90 41 4a 97 d6 95 9c 34 87 68 0d e5 13 4a 2b
    24 0e 6c ff ac 11 6e 95 d4 1d 6a f8 f6 b5 80 dc f3 d1 1d 63 c7 58 db 28 9a 01 59 40 25 2f 55 71
    3e 06 1d c1 3e 07 88 91 a3 8e fb cf 57 53 ad 8e f1 70 ad 3c 73 53 d1 6d 9d a7 73 b9 ca 7f 2b 9f
    a1 b6 c0 d4 a3 d0 3f 75 e0 9c 30 ba 1e 62 97 2a c4 6f 75 f7 b9 81 be 63 43 9b 29 99 ce 13 06 46
    15 13 98 91 d5 e4 c5 b4 06 f1 6e 3f c1 81 a7 7c a4 75 84 00 25 db 2f 0a 77 f8 1b 5a b0 5b 94 c0
    13 46 75 5f 69 23 2c 86 51 9d 86 cb ee ac 87 aa c3 47 d1 43 f9 60 5d 64 f6 50 db 4d 02 3e 70 e9
    52 ca 49 fe 51 37 12 1c 74 bc 26 97 68 7e 24 87 46 d6 df 35 30 05 f3 bc e1 86 96 12 9c 81 53 55
    6b 3b 6c 67 79 b3 7b f1 59 85 68 4f";
const CLIENT_DATA: &str = "17 03 03 00 43 a2 3f 70 54 b6 2c 94 d0 af fa fe 82 28 ba 55 cb ef ac ea
    42 f9 14 aa 66 bc ab 3f 2b 98 19 a8 a5 b4 6b 39 5b d5 4a 9a 20 44 1e 2b 62 97 4e 1f 5a 62 92 a2
    97 70 14 bd 1e 3d ea e6 3a ee bb 21 69 49 15 e4";
const SERVER_DATA: &str = "17 03 03 00 43 2e 93 7e 11 ef 4a c7 40 e5 38 ad 36 00 5f c4 a4 69 32 fc
    32 25 d0 5f 82 aa 1b 36 e3 0e fa f9 7d 90 e6 df fc 60 2d cb 50 1a 59 a8 fc c4 9c 4b f2 e5 f0 a2
    1c 00 47 c2 ab f3 32 54 0d d0 32 e1 67 c2 95 5d";
const CLIENT_CLOSE: &str =
    "17 03 03 00 13 c9 87 27 60 65 56 66 b7 4d 7f f1 15 3e fd 6d b6 d0 b0 e3";
const SERVER_CLOSE: &str =
    "17 03 03 00 13 b5 8f d6 71 66 eb f5 99 d2 47 20 cf be 7e fa 7a 88 64 a9";

fn bytes(hex: &str) -> Vec<u8> {
    hex.split_whitespace().map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect()
}

fn secret(suite: CipherSuite, bytes: Vec<u8>) -> TrafficSecret {
    TrafficSecret::new(suite, SecretBytes::new(bytes)).unwrap()
}

/// Record layer of RFC 8448 after so many records.
fn rfc_8448(side: Side, client_sequence: u64, server_sequence: u64) -> RecordLayer {
    let suite = CipherSuite::Aes128GcmSha256;
    let handover = Handover {
        client: Direction {
            secret: secret(suite, bytes(CLIENT_SECRET)),
            sequence: client_sequence,
        },
        server: Direction {
            secret: secret(suite, bytes(SERVER_SECRET)),
            sequence: server_sequence,
        },
        content_bytes_max: 1 << 14,
    };
    RecordLayer::new(side, &handover, Vec::new()).unwrap()
}

/// Both ends of a connection after a handshake with these sequence numbers.
pub(super) fn both_ends(suite: CipherSuite, sequence: u64) -> [RecordLayer; 2] {
    let len = suite.hash().len_bytes();
    let direction = |seed| Direction { secret: secret(suite, vec![seed; len]), sequence };
    [Side::Client, Side::Server].map(|side| {
        let (client, server) = (direction(1), direction(2));
        let handover = Handover { client, server, content_bytes_max: 1 << 14 };
        RecordLayer::new(side, &handover, Vec::new()).unwrap()
    })
}

pub(super) fn send(from: &mut RecordLayer, bytes: &[u8]) -> Vec<u8> {
    let mut wire = Wire::default();
    let mut list = GatherList::new();
    list.add_bytes(bytes);
    from.send(&mut wire, &mut list).unwrap();
    wire.outward
}

fn close(from: &mut RecordLayer) -> Vec<u8> {
    let mut wire = Wire::default();
    from.close(&mut wire);
    wire.outward
}

/// Receives up to `len` bytes.
pub(super) fn receive(
    to: &mut RecordLayer,
    wire: &mut Wire,
    len: usize,
) -> Result<(Vec<u8>, Plaintext), TlsError> {
    let mut into = vec![0; len];
    let mut list = ScatterList::new();
    list.add_bytes(&mut into);
    let received = to.receive(wire, &mut list)?;
    into.truncate(if let Plaintext::Bytes(count) = received { count } else { 0 });
    Ok((into, received))
}

#[test]
fn keys_and_records_are_those_of_rfc_8448() {
    let suite = CipherSuite::Aes128GcmSha256;
    for (of_side, key, iv) in
        [(CLIENT_SECRET, CLIENT_KEY, CLIENT_IV), (SERVER_SECRET, SERVER_KEY, SERVER_IV)]
    {
        let keys = secret(suite, bytes(of_side)).keys().unwrap();
        assert_eq!(keys.key.expose(), bytes(key));
        assert_eq!(keys.iv[..], bytes(iv));
    }
    let data: Vec<u8> = (0..50).collect();
    let mut client = rfc_8448(Side::Client, 0, 0);
    assert_eq!(send(&mut client, &data), bytes(CLIENT_DATA));
    assert_eq!(close(&mut client), bytes(CLIENT_CLOSE));
    // The first record of the server is a ticket, which ours never sends.
    let mut server = rfc_8448(Side::Server, 0, 1);
    assert_eq!(send(&mut server, &data), bytes(SERVER_DATA));
    assert_eq!(close(&mut server), bytes(SERVER_CLOSE));

    for (receiver, records) in [
        (&mut server, &[CLIENT_DATA, CLIENT_CLOSE][..]),
        (&mut client, &[SERVER_TICKET, SERVER_DATA, SERVER_CLOSE]),
    ] {
        let inward = records.iter().flat_map(|record| bytes(record)).collect();
        let mut wire = Wire { inward, ..Wire::default() };
        assert_eq!(receive(receiver, &mut wire, 99), Ok((data.clone(), Plaintext::Bytes(50))));
        assert_eq!(receive(receiver, &mut wire, 99), Ok((Vec::new(), Plaintext::End)));
    }
}

/// The same protection by aws-lc-rs: HKDF and AEAD as RFC 8446 composes them.
struct Reference {
    suite: CipherSuite,
    secret: Vec<u8>,
    sequence: u64,
}

#[derive(Clone, Copy)]
struct Length(usize);

impl KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

impl Reference {
    fn expand(&self, label: &str, len: usize) -> Vec<u8> {
        let hash: hkdf::Algorithm = match self.suite {
            CipherSuite::Aes128GcmSha256 => HKDF_SHA256,
            CipherSuite::Aes256GcmSha384 => HKDF_SHA384,
        };
        let label = format!("tls13 {label}");
        let lengths = [0, u8::try_from(len).unwrap(), u8::try_from(label.len()).unwrap()];
        let info: [&[u8]; 3] = [&lengths, label.as_bytes(), &[0]];
        let mut out = vec![0; len];
        let prk = Prk::new_less_safe(hash, &self.secret);
        prk.expand(&info, Length(len)).unwrap().fill(&mut out).unwrap();
        out
    }

    fn update(&mut self) {
        self.secret = self.expand("traffic upd", self.secret.len());
        self.sequence = 0;
    }

    fn seal(&mut self, content_type: u8, content: &[u8], out: &mut Vec<u8>) {
        let (algorithm, len) = match self.suite {
            CipherSuite::Aes128GcmSha256 => (&AES_128_GCM, 16),
            CipherSuite::Aes256GcmSha384 => (&AES_256_GCM, 32),
        };
        let key = LessSafeKey::new(UnboundKey::new(algorithm, &self.expand("key", len)).unwrap());
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&self.sequence.to_be_bytes());
        for (byte, of_iv) in nonce.iter_mut().zip(self.expand("iv", 12)) {
            *byte ^= of_iv;
        }
        self.sequence += 1;
        let len = u16::try_from(content.len() + 17).unwrap().to_be_bytes();
        let header = [23, 3, 3, len[0], len[1]];
        let mut sealed = [content, &[content_type]].concat();
        let nonce = aead::Nonce::assume_unique_for_key(nonce);
        key.seal_in_place_append_tag(nonce, Aad::from(header), &mut sealed).unwrap();
        out.extend(header);
        out.extend(sealed);
    }
}

/// Sizes around those of blocks and records.
fn sizes() -> Vec<usize> {
    let around = [1023, 1024, 4096, 8192, 16_383, 16_384, 16_385, 32_767, 32_768, 32_769, 100_000];
    (1..=130).chain(around).collect()
}

#[test]
fn records_of_any_pieces_are_those_of_another_implementation() {
    let mut random = Random::new(7);
    let mut below = |limit: usize| usize::try_from(random.below(limit as u64)).unwrap();
    for suite in [CipherSuite::Aes128GcmSha256, CipherSuite::Aes256GcmSha384] {
        let [mut client, _] = both_ends(suite, 0);
        let secret = vec![1; suite.hash().len_bytes()];
        let mut reference = Reference { suite, secret, sequence: 0 };
        for (round, size) in sizes().into_iter().enumerate() {
            let message: Vec<u8> = (0..=255).cycle().skip(size).take(size).collect();
            let mut wire = Wire::default();
            let mut list = GatherList::new();
            let mut rest = &message[..];
            while !rest.is_empty() {
                // Headers, and data behind them.
                let len = if round % 2 == 0 { 1 + below(40) } else { rest.len() };
                let len = if below(3) == 0 { len * 300 } else { len }.min(rest.len());
                list.add_bytes(&rest[..len]);
                rest = &rest[len..];
                if list.left_bytes() < message.len() - rest.len() {
                    break;
                }
            }
            let count = list.left_bytes();
            if round % 20 == 19 {
                client.update_keys();
            }
            client.send(&mut wire, &mut list).unwrap();
            let mut expected = Vec::new();
            if round % 20 == 19 {
                reference.seal(22, &[24, 0, 0, 1, 0], &mut expected);
                reference.update();
            }
            for content in message[..count].chunks(1 << 14) {
                reference.seal(23, content, &mut expected);
            }
            assert!(wire.outward == expected, "{suite:?}, {size} bytes");
        }
    }
}

#[test]
fn records_of_another_implementation_are_received_into_any_pieces() {
    let mut random = Random::new(8);
    let mut below = |limit: usize| usize::try_from(random.below(limit as u64)).unwrap();
    for suite in [CipherSuite::Aes128GcmSha256, CipherSuite::Aes256GcmSha384] {
        let [_, mut server] = both_ends(suite, 0);
        let secret = vec![1; suite.hash().len_bytes()];
        let mut reference = Reference { suite, secret, sequence: 0 };
        let (mut wire, mut sent) = (Wire::default(), Vec::new());
        for (round, size) in sizes().into_iter().enumerate() {
            let message: Vec<u8> = (0..=255).cycle().skip(size).take(size.min(1 << 14)).collect();
            // Every third record is padded, as far as its length permits it.
            let padding = if round % 3 == 0 { below((1 << 14) - message.len() + 1) } else { 0 };
            match padding {
                0 => reference.seal(23, &message, &mut wire.inward),
                _ => {
                    let padded = [&message[..], &[23], &vec![0; padding - 1]].concat();
                    reference.seal(0, &padded, &mut wire.inward);
                }
            }
            if round % 20 == 19 {
                let request = u8::from(round % 40 == 19);
                reference.seal(22, &[24, 0, 0, 1, request], &mut wire.inward);
                reference.update();
            }
            sent.extend(message);
        }
        let mut received = Vec::new();
        while received.len() < sent.len() {
            let mut into = vec![0x77; 1 + below(40_000)];
            let mut list = ScatterList::new();
            let mut rest = &mut into[..];
            while !rest.is_empty() {
                let len = (1 + below(if rest.len().is_multiple_of(2) { 100 } else { 20_000 }))
                    .min(rest.len());
                let (piece, behind) = rest.split_at_mut(len);
                list.add_bytes(piece);
                rest = behind;
            }
            let Ok(Plaintext::Bytes(count)) = server.receive(&mut wire, &mut list) else {
                panic!("{} of {} bytes", received.len(), sent.len())
            };
            received.extend_from_slice(&into[..count]);
            assert!(sent.starts_with(&received), "{suite:?}, {} bytes", received.len());
        }
    }
}
