//! Records after the handshake.

use tenmil_nvme_auth::Hash;

use super::{Pair, receive_all, usual_key};
use crate::error::TlsError;
use crate::record_layer::Plaintext;

#[test]
fn records_may_be_cut_at_every_byte() {
    let mut pair = Pair::open(&usual_key(Hash::Sha256, 1));
    let message: Vec<u8> = (0..=255).cycle().take(300).collect();
    pair.client.send(&mut pair.client_wire, &message).unwrap();
    pair.client.send(&mut pair.client_wire, b"end").unwrap();
    let records = std::mem::take(&mut pair.client_wire.outward);
    let mut received = Vec::new();
    for byte in &records {
        pair.server_wire.inward.push(*byte);
        let (bytes, end) = receive_all(&mut pair.server, &mut pair.server_wire).unwrap();
        assert_eq!(end, Plaintext::WouldBlock);
        received.extend(bytes);
    }
    assert_eq!(received, [&message[..], b"end"].concat());
}

#[test]
fn large_sends_are_full_records() {
    for hash in [Hash::Sha256, Hash::Sha384] {
        let mut pair = Pair::open(&usual_key(hash, 1));
        let message: Vec<u8> = (0..250).cycle().take(1 << 20).collect();
        pair.server.send(&mut pair.server_wire, &message).unwrap();
        let records = pair.server_wire.outward.len();
        // Each of 64 records: header, content type and tag.
        assert_eq!(records, message.len() + 64 * 22);
        pair.deliver();
        let (bytes, _) = receive_all(&mut pair.client, &mut pair.client_wire).unwrap();
        assert!(bytes == message);
    }
}

#[test]
fn changed_record_ends_the_session_and_nothing_of_it_is_received() {
    let psk = usual_key(Hash::Sha384, 1);
    let len = 64 + 22;
    for bit in 0..8 * len {
        let mut pair = Pair::open(&psk);
        pair.client.send(&mut pair.client_wire, &[0x5a; 64]).unwrap();
        let mut record = std::mem::take(&mut pair.client_wire.outward);
        assert_eq!(record.len(), len);
        record[bit / 8] ^= 1 << (bit % 8);
        pair.server_wire.inward.extend(record);
        // A larger length only means that the rest is awaited.
        pair.server_wire.is_closed = true;
        let result = receive_all(&mut pair.server, &mut pair.server_wire);
        let error = result.expect_err(&format!("bit {bit}"));
        assert!(matches!(error, TlsError::BadRecord(_) | TlsError::Truncated), "{error:?}");
        let again = receive_all(&mut pair.server, &mut pair.server_wire).unwrap_err();
        assert_eq!(again, error, "the reason stays");
        assert!(pair.server.send(&mut pair.server_wire, b"x").is_err(), "nothing is sent any more");
    }
}

#[test]
fn repeated_dropped_and_swapped_records_are_noticed() {
    let psk = usual_key(Hash::Sha256, 1);
    for order in [&[0, 0][..], &[1], &[1, 0], &[0, 2]] {
        let mut pair = Pair::open(&psk);
        let records = [b"a", b"b", b"c"].map(|text| {
            pair.client.send(&mut pair.client_wire, text).unwrap();
            std::mem::take(&mut pair.client_wire.outward)
        });
        for index in order {
            pair.server_wire.inward.extend_from_slice(&records[*index]);
        }
        let mut received = Ok(Plaintext::WouldBlock);
        let mut part = [0; 1];
        for _ in order {
            received = pair.server.receive(&mut pair.server_wire, &mut part);
        }
        assert_eq!(received.unwrap_err().name(), "bad-record", "{order:?}");
    }
}

#[test]
fn keys_are_updated_in_both_directions() {
    let mut pair = Pair::open(&usual_key(Hash::Sha256, 1));
    for _ in 0..3 {
        pair.client.update_keys().unwrap();
        pair.client.send(&mut pair.client_wire, b"new key").unwrap();
        // KeyUpdate (RFC 8446 §4.6.3), of 5 bytes, precedes the data: two records.
        assert_eq!(pair.client_wire.outward.len(), (5 + 22) + (7 + 22));
        pair.deliver();
        let received = receive_all(&mut pair.server, &mut pair.server_wire).unwrap();
        assert_eq!(received.0, b"new key");
        pair.server.update_keys().unwrap();
        pair.server.send(&mut pair.server_wire, b"new key there").unwrap();
        pair.deliver();
        let received = receive_all(&mut pair.client, &mut pair.client_wire).unwrap();
        assert_eq!(received.0, b"new key there");
    }
}

#[test]
fn close_notify_ends_one_direction_only() {
    let mut pair = Pair::open(&usual_key(Hash::Sha256, 1));
    pair.client.send(&mut pair.client_wire, b"last").unwrap();
    pair.client.close_notify(&mut pair.client_wire);
    pair.deliver();
    let received = receive_all(&mut pair.server, &mut pair.server_wire);
    assert_eq!(received, Ok((b"last".to_vec(), Plaintext::End)));
    pair.server.send(&mut pair.server_wire, b"answer").unwrap();
    pair.deliver();
    let received = receive_all(&mut pair.client, &mut pair.client_wire);
    assert_eq!(received, Ok((b"answer".to_vec(), Plaintext::WouldBlock)));
}

#[test]
fn stream_that_ends_without_close_notify_is_truncated() {
    let mut pair = Pair::open(&usual_key(Hash::Sha256, 1));
    pair.server_wire.is_closed = true;
    let received = receive_all(&mut pair.server, &mut pair.server_wire);
    assert_eq!(received, Err(TlsError::Truncated));
}

#[test]
fn plaintext_in_the_middle_of_a_session_is_refused() {
    let mut pair = Pair::open(&usual_key(Hash::Sha256, 1));
    // Records of plaintext: data, an alert, a handshake message.
    for record in [&[23, 3, 3, 0, 2, 1, 2][..], &[21, 3, 3, 0, 2, 1, 0], &[22, 3, 3, 0, 1, 1]] {
        pair.server_wire.inward.extend_from_slice(record);
    }
    pair.server_wire.is_closed = true;
    let received = receive_all(&mut pair.server, &mut pair.server_wire);
    assert_eq!(received.unwrap_err().name(), "bad-record");
}

#[test]
fn small_receives_leave_the_rest_of_a_record() {
    let mut pair = Pair::open(&usual_key(Hash::Sha256, 1));
    pair.client.send(&mut pair.client_wire, &[7; 100]).unwrap();
    pair.deliver();
    let mut part = [0; 60];
    let received = pair.server.receive(&mut pair.server_wire, &mut part);
    assert_eq!(received, Ok(Plaintext::Bytes(60)));
    assert!(pair.server.may_have_more(), "40 bytes are decrypted and were not received");
    let received = pair.server.receive(&mut pair.server_wire, &mut part);
    assert_eq!(received, Ok(Plaintext::Bytes(40)));
    assert!(!pair.server.may_have_more());
}
