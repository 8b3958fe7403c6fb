//! ClientHellos that no client of this crate sends.

use std::slice::from_ref;
use std::sync::Arc;

use tenmil_nvme_auth::{Derivation, Hash, IdentityVersion};

use super::{Pair, Wire, key, usual_key};
use crate::client_hello::{CLIENT_HELLO_BYTES_MAX, ClientHello, reassemble};
use crate::error::TlsError;
use crate::session::{ServerConfig, TlsSession};

/// ClientHello of a client with this key, as a message.
fn hello_of_client() -> Vec<u8> {
    let psk = usual_key(Hash::Sha256, 1);
    let mut pair = Pair::new(from_ref(&psk), from_ref(&psk));
    assert_eq!(pair.client.handshake(&mut pair.client_wire), Ok(false));
    reassemble(&pair.client_wire.outward).unwrap().unwrap()
}

/// Records of a message, each with up to `len` bytes.
fn records_of(message: &[u8], len: usize) -> Vec<u8> {
    let record = |part: &[u8]| {
        let len = u16::try_from(part.len()).unwrap().to_be_bytes();
        [&[22, 3, 1, len[0], len[1]], part].concat()
    };
    message.chunks(len).flat_map(record).collect()
}

fn server_result(records: Vec<u8>) -> Result<bool, TlsError> {
    let source = Arc::new(vec![usual_key(Hash::Sha256, 1)]);
    let mut server = TlsSession::server(&ServerConfig::with_psks(source).unwrap()).unwrap();
    server.handshake(&mut Wire { inward: records, ..Wire::default() })
}

/// Replaces bytes of the message that occur once.
fn replace(message: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let found: Vec<usize> =
        (0..message.len() - from.len()).filter(|at| message[*at..].starts_with(from)).collect();
    assert_eq!(found.len(), 1, "{from:?}");
    let mut changed = message.to_vec();
    changed[found[0]..found[0] + to.len()].copy_from_slice(to);
    changed
}

#[test]
fn message_may_be_split_over_records() {
    let message = hello_of_client();
    for len in [1, 2, 3, 100, message.len()] {
        assert_eq!(server_result(records_of(&message, len)), Ok(false), "{len}");
    }
}

#[test]
fn every_prefix_of_a_message_is_malformed_and_none_panics() {
    let message = hello_of_client();
    assert!(ClientHello::parse(&message).unwrap().offers_psk());
    for len in 0..message.len() {
        match ClientHello::parse(&message[..len]) {
            Err(error) => assert_eq!(error.name(), "malformed-client-hello", "{len}"),
            // A message of TLS 1.2 may end before the extensions.
            Ok(hello) => assert_eq!(hello.select_psk(&Vec::new()), Err(TlsError::NoTls13)),
        }
    }
}

#[test]
fn missing_parts_are_named() {
    let message = hello_of_client();
    let cases = [
        // supported_versions with TLS 1.2 only.
        (replace(&message, &[0x03, 0x04], &[0x03, 0x03]), "no-tls-1.3"),
        // psk_key_exchange_modes: psk_ke.
        (replace(&message, &[0, 45, 0, 2, 1, 1], &[0, 45, 0, 2, 1, 0]), "no-psk-dhe-ke"),
        // The same extension as early_data.
        (replace(&message, &[0, 45, 0, 2, 1, 1], &[0, 42, 0, 2, 1, 1]), "no-psk-dhe-ke"),
    ];
    for (message, expected) in cases {
        assert_eq!(server_result(records_of(&message, 4096)).unwrap_err().name(), expected);
    }
}

#[test]
fn endless_and_oversized_messages_are_refused() {
    // A message that promises more than is accepted.
    let too_long = [22, 3, 1, 0, 4, 1, 0, 0xff, 0xff];
    assert_eq!(server_result(too_long.to_vec()).unwrap_err().name(), "malformed-client-hello");
    // Records of one byte each, more of them than any ClientHello has.
    let endless = records_of(&vec![1; 1 + CLIENT_HELLO_BYTES_MAX], 1);
    assert_eq!(server_result(endless).unwrap_err().name(), "malformed-client-hello");
    // Empty records.
    assert_eq!(server_result(vec![22, 3, 1, 0, 0]).unwrap_err().name(), "malformed-client-hello");
    // Another message.
    assert_eq!(
        server_result(records_of(&[2, 0, 0, 1, 0], 9)).unwrap_err().name(),
        "malformed-client-hello"
    );
}

#[test]
fn suite_of_the_key_must_be_offered() {
    // The client offers SHA-256 suites only, and has a key with SHA-384.
    let psk = key(Hash::Sha384, 1, IdentityVersion::One, Derivation::Specification);
    let mut pair = Pair::new(from_ref(&psk), from_ref(&psk));
    assert_eq!(pair.client.handshake(&mut pair.client_wire), Ok(false));
    let message = reassemble(&pair.client_wire.outward).unwrap().unwrap();
    let hello = ClientHello::parse(&message).unwrap();
    let without = hello.with_suites(&[0x1301, 0x1303]);
    let error = without.select_psk(&vec![psk]).unwrap_err();
    assert_eq!(error.name(), "no-common-suite");
    let text = error.to_string();
    assert!(text.ends_with("expected TLS_AES_256_GCM_SHA384, which its key requires"), "{text}");
    assert!(text.contains("TLS_AES_128_GCM_SHA256 0x1303"), "{text}");
}
