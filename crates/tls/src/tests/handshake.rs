//! Handshakes, and the reasons for which they fail.

use std::slice::from_ref;
use tenmil_nvme_auth::{Derivation, Hash, IdentityVersion, SecretBytes};

use super::{Pair, Wire, key, receive_all, usual_key};
use crate::alert::Alert;
use crate::error::TlsError;
use crate::psk::Psk;
use crate::record_layer::Plaintext;
use crate::session::{ClientConfig, TlsSession};

#[test]
fn both_suites_and_identity_versions_negotiate() {
    for hash in [Hash::Sha256, Hash::Sha384] {
        for version in [IdentityVersion::Zero, IdentityVersion::One] {
            let psk = key(hash, 7, version, Derivation::Specification);
            let mut pair = Pair::open(&psk);
            let expected = match hash {
                Hash::Sha256 => "TLS_AES_128_GCM_SHA256",
                _ => "TLS_AES_256_GCM_SHA384",
            };
            for session in [&pair.client, &pair.server] {
                let channel = session.secure_channel().unwrap();
                assert_eq!(channel.cipher_suite, expected);
                assert_eq!(
                    channel.psk_identity.as_deref().map(str::as_bytes),
                    Some(&*psk.identity)
                );
            }
            assert_eq!(pair.server.derivation(), Some(Derivation::Specification));
            pair.client.send(&mut pair.client_wire, b"ICReq").unwrap();
            pair.deliver();
            let received = receive_all(&mut pair.server, &mut pair.server_wire);
            assert_eq!(received, Ok((b"ICReq".to_vec(), Plaintext::WouldBlock)));
        }
    }
}

#[test]
fn handshake_may_be_cut_at_every_byte() {
    let psk = usual_key(Hash::Sha384, 1);
    // One byte at a time, in both directions.
    let mut pair = Pair::new(from_ref(&psk), from_ref(&psk));
    (pair.client_wire.cut, pair.server_wire.cut) = (Some(1), Some(1));
    assert_eq!(pair.handshake(), (Ok(true), Ok(true)));

    // The ClientHello in two parts, cut at each byte.
    let mut pair = Pair::new(from_ref(&psk), from_ref(&psk));
    assert_eq!(pair.client.handshake(&mut pair.client_wire), Ok(false));
    let hello = std::mem::take(&mut pair.client_wire.outward);
    assert!(hello.len() > 200, "{}", hello.len());
    for cut in 1..hello.len() {
        let mut server = Pair::new(from_ref(&psk), from_ref(&psk)).server;
        let mut wire = Wire { inward: hello[..cut].to_vec(), ..Wire::default() };
        assert_eq!(server.handshake(&mut wire), Ok(false), "{cut}");
        assert!(wire.outward.is_empty(), "{cut}: nothing is answered to a part");
        wire.inward.extend_from_slice(&hello[cut..]);
        assert_eq!(server.handshake(&mut wire), Ok(false), "{cut}");
        assert!(!wire.outward.is_empty(), "{cut}: the whole is answered");
    }
}

#[test]
fn stream_that_ends_during_the_handshake_is_a_reason() {
    let psk = usual_key(Hash::Sha256, 1);
    let mut pair = Pair::new(from_ref(&psk), from_ref(&psk));
    assert_eq!(pair.client.handshake(&mut pair.client_wire), Ok(false));
    let hello = std::mem::take(&mut pair.client_wire.outward);
    for cut in [0, 1, 5, 100, hello.len() - 1] {
        let mut server = Pair::new(from_ref(&psk), from_ref(&psk)).server;
        let inward = hello[..cut].to_vec();
        let mut wire = Wire { inward, is_closed: true, ..Wire::default() };
        assert_eq!(server.handshake(&mut wire), Err(TlsError::ClosedInHandshake), "{cut}");
    }
    pair.client_wire.is_closed = true;
    let error = pair.client.handshake(&mut pair.client_wire).unwrap_err();
    assert_eq!(error.name(), "key-refused");
    assert!(error.to_string().contains("NVMe1R01 nqn.2014-08"), "{error}");
}

#[test]
fn unknown_identity_is_refused_with_its_name() {
    let (ours, theirs) = (usual_key(Hash::Sha256, 1), usual_key(Hash::Sha256, 2));
    let mut pair = Pair::new(from_ref(&ours), &[theirs]);
    let (client, server) = pair.handshake();
    let expected = TlsError::UnknownIdentity {
        identities: vec![ours.identity.clone()],
        searched: "the configured keys".into(),
    };
    assert_eq!(server, Err(expected));
    let text = server.unwrap_err().to_string();
    assert!(text.contains("no key for identity \"NVMe1R01 nqn."), "{text}");
    let refused = TlsError::KeyRefused { alert: Some(Alert(115)), identities: vec![ours.identity] };
    assert_eq!(client, Err(refused));
}

#[test]
fn wrong_key_of_a_known_identity_is_refused_before_anything_is_answered() {
    let right = usual_key(Hash::Sha384, 1);
    let wrong = Psk { secret: SecretBytes::new(vec![9; 48]), ..right.clone() };
    let mut pair = Pair::new(&[wrong], from_ref(&right));
    let (client, server) = pair.handshake();
    assert_eq!(server, Err(TlsError::WrongKey { identity: right.identity.clone() }));
    let refused = TlsError::KeyRefused { alert: Some(Alert(51)), identities: vec![right.identity] };
    assert_eq!(client, Err(refused));
    assert_eq!(pair.client_wire.inward, Alert(51).plaintext_record(), "one alert");
}

#[test]
fn keys_with_the_same_identity_are_tried() {
    let version = IdentityVersion::Zero;
    let keys: Vec<Psk> = [1, 2, 3]
        .iter()
        .flat_map(|seed| {
            [Derivation::Specification, Derivation::LibnvmeBefore115]
                .map(|derivation| key(Hash::Sha256, *seed, version, derivation))
        })
        .collect();
    assert!(keys.iter().all(|psk| psk.identity == keys[0].identity));
    for psk in &keys {
        let mut pair = Pair::new(from_ref(psk), &keys);
        assert_eq!(pair.handshake(), (Ok(true), Ok(true)));
        assert_eq!(pair.server.derivation(), psk.derivation);
    }
    let stranger = key(Hash::Sha256, 4, version, Derivation::Specification);
    let (_, server) = Pair::new(&[stranger], &keys).handshake();
    assert_eq!(server.unwrap_err().name(), "wrong-key");
}

#[test]
fn first_offered_key_that_the_server_has_is_used() {
    let offered = [1, 2, 3].map(|seed| usual_key(Hash::Sha256, seed));
    let mut pair = Pair::new(&offered, &[offered[2].clone(), offered[1].clone()]);
    assert_eq!(pair.handshake(), (Ok(true), Ok(true)));
    let channel = pair.client.secure_channel().unwrap();
    assert_eq!(channel.psk_identity.as_deref().map(str::as_bytes), Some(&*offered[1].identity));
}

#[test]
fn keys_of_both_suites_may_be_offered_together() {
    for used in [Hash::Sha256, Hash::Sha384] {
        let offered = [usual_key(Hash::Sha384, 1), usual_key(Hash::Sha256, 1)];
        let mut pair = Pair::new(&offered, &[usual_key(used, 1)]);
        assert_eq!(pair.handshake(), (Ok(true), Ok(true)), "{used}");
    }
}

#[test]
fn client_without_keys_is_an_error_and_equal_identities_are_offered_once() {
    assert!(ClientConfig::with_psks(Vec::<Psk>::new()).is_err());
    let first = key(Hash::Sha256, 1, IdentityVersion::Zero, Derivation::Specification);
    let second = key(Hash::Sha256, 1, IdentityVersion::Zero, Derivation::LibnvmeBefore115);
    let mut pair = Pair::new(&[first.clone(), second], &[first]);
    assert_eq!(pair.handshake(), (Ok(true), Ok(true)));
}

#[test]
fn plaintext_peers_are_recognized() {
    // An ICReq PDU, and an alert.
    for bytes in [&[0, 0, 128, 0, 128, 0, 0, 0][..], &Alert(40).plaintext_record()] {
        let mut server = Pair::new(&[usual_key(Hash::Sha256, 1)], &[]).server;
        let mut wire = Wire { inward: bytes.to_vec(), ..Wire::default() };
        let expected = TlsError::NotTls { first_byte: bytes[0] };
        assert_eq!(server.handshake(&mut wire), Err(expected.clone()));
        assert_eq!(server.handshake(&mut wire), Err(expected), "the reason stays");
        assert!(wire.outward.is_empty(), "nothing is answered in the clear");
    }
}

#[test]
fn tampered_handshake_records_never_open_a_session() {
    let psk = usual_key(Hash::Sha256, 1);
    let mut pair = Pair::new(from_ref(&psk), from_ref(&psk));
    assert_eq!(pair.client.handshake(&mut pair.client_wire), Ok(false));
    let hello = pair.client_wire.outward.clone();
    for at in 0..hello.len() {
        let mut changed = hello.clone();
        changed[at] ^= 0x20;
        let mut server = Pair::new(from_ref(&psk), from_ref(&psk)).server;
        let mut wire = Wire { inward: changed, ..Wire::default() };
        let result = server.handshake(&mut wire);
        // A changed length may only mean that more is awaited. Every other byte is covered by the
        // binder, but the version of the record, which is no part of the message.
        assert!(result == Ok(false) || result.is_err(), "{at}");
        if result == Ok(false) && !wire.outward.is_empty() {
            assert!(at < 5, "byte {at} was changed, and the server has answered");
        }
    }
    pair.deliver();
    assert_eq!(pair.server.handshake(&mut pair.server_wire), Ok(false));
    let answer = std::mem::take(&mut pair.server_wire.outward);
    for at in (0..answer.len()).step_by(3) {
        let config = ClientConfig::with_psks([psk.clone()]).unwrap();
        let mut client = TlsSession::client(&config).unwrap();
        let mut wire = Wire::default();
        assert_eq!(client.handshake(&mut wire), Ok(false));
        // Another session's answer, with or without a change.
        let mut changed = answer.clone();
        changed[at] ^= 1;
        wire.inward = changed;
        wire.is_closed = true;
        assert!(client.handshake(&mut wire).is_err(), "{at}");
        assert!(client.secure_channel().is_none());
    }
}

#[test]
fn session_moves_between_threads_in_the_middle_of_the_handshake() {
    let psk = usual_key(Hash::Sha384, 3);
    let mut pair = Pair::new(from_ref(&psk), from_ref(&psk));
    let mut is_open = false;
    for _ in 0..4 {
        (pair, is_open) = std::thread::scope(|scope| {
            let step = scope.spawn(move || {
                let client = pair.client.handshake(&mut pair.client_wire).unwrap();
                pair.deliver();
                let server = pair.server.handshake(&mut pair.server_wire).unwrap();
                pair.deliver();
                (pair, client && server)
            });
            step.join().unwrap()
        });
    }
    assert!(is_open);
}
