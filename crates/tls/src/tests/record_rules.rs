//! Rules of records after the handshake, and the alert of each violation.

use tenmil_nvme_auth::Hash;

use super::known_answers::{both_ends, receive, send};
use super::{Pair, Wire, receive_all, usual_key};
use crate::alert::Alert;
use crate::cipher::{GatherList, ScatterList};
use crate::error::TlsError;
use crate::record::RecordViolation;
use crate::record_layer::{Plaintext, RecordLayer};
use crate::suite::CipherSuite;

const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const DATA: u8 = 23;

/// Parts of one violation: records of the client.
type Violate<'a> = &'a dyn Fn(&mut RecordLayer, &mut Vec<u8>);

/// Lets the server, or the client, receive records; returns its error. The peer is told with an alert,
/// and afterwards the session does nothing.
fn violation_of(is_at_server: bool, violate: Violate<'_>) -> (TlsError, Alert) {
    let mut pair = Pair::open(&usual_key(Hash::Sha256, 1));
    let Pair { client, server, client_wire, server_wire } = &mut pair;
    let (sender, sender_wire, receiver, receiver_wire) = if is_at_server {
        (client, client_wire, server, server_wire)
    } else {
        (server, server_wire, client, client_wire)
    };
    sender.send(sender_wire, b"before").unwrap();
    violate(sender.records().unwrap(), &mut sender_wire.outward);
    receiver_wire.inward.append(&mut sender_wire.outward);
    let mut part = [0; 6];
    assert_eq!(receiver.receive(receiver_wire, &mut part), Ok(Plaintext::Bytes(6)));
    assert_eq!(&part, b"before");
    let error = receive_all(receiver, receiver_wire).unwrap_err();
    assert_eq!(receive_all(receiver, receiver_wire), Err(error.clone()), "the reason stays");
    assert_eq!(receiver.send(receiver_wire, b"x"), Err(error.clone()));
    sender_wire.inward.append(&mut receiver_wire.outward);
    let end = receive_all(sender, sender_wire);
    let Err(TlsError::PeerAlert(alert)) = end else { panic!("{end:?} after {error}") };
    (error, alert)
}

fn assert_violation(expected: RecordViolation, alert: u8, violate: Violate<'_>) {
    let found = violation_of(true, violate);
    assert_eq!(found, (TlsError::BadRecord(expected), Alert(alert)));
    assert!(!found.0.to_string().is_empty());
}

#[test]
fn records_with_another_header_are_refused() {
    // Data, an alert, a handshake message and a ChangeCipherSpec in plaintext.
    for (record, kind) in [
        (&[20, 3, 3, 0, 1, 1][..], 20),
        (&[21, 3, 3, 0, 2, 1, 0], 21),
        (&[22, 3, 3, 0, 5, 24, 0, 0, 1, 0], 22),
        (&[24, 3, 3], 24),
        (&[0], 0),
    ] {
        let expected = RecordViolation::NotProtected(kind);
        assert_violation(expected, 10, &|_, out| out.extend_from_slice(record));
    }
    for len in [0_u16, 1, 16] {
        let [high, low] = len.to_be_bytes();
        let header = [23, 3, 3, high, low];
        assert_violation(RecordViolation::TooShort, 20, &|_, out| out.extend(header));
    }
    for len in [(1 << 14) + 18_u16, (1 << 14) + 256, (1 << 14) + 257, u16::MAX] {
        let [high, low] = len.to_be_bytes();
        let header = [23, 3, 3, high, low];
        assert_violation(RecordViolation::TooLong, 22, &|_, out| out.extend(header));
    }
}

#[test]
fn record_of_another_key_or_place_is_refused() {
    let refused = RecordViolation::NotAuthentic;
    assert_violation(refused, 20, &|_, out| {
        out.extend([&[23, 3, 3, 0, 17][..], &[0; 17]].concat())
    });
    let repeat = |_: &mut RecordLayer, out: &mut Vec<u8>| out.extend_from_within(..);
    assert_violation(refused, 20, &repeat);
    assert_violation(refused, 20, &|records, out| {
        records.send_record(DATA, b"lost", &mut Vec::new()).unwrap();
        records.send_record(DATA, b"next", out).unwrap();
    });
    // A KeyUpdate that was lost: the peer has another key.
    assert_violation(refused, 20, &|records, out| {
        records.send_key_update_with(0, &mut Vec::new()).unwrap();
        records.send_record(DATA, b"next", out).unwrap();
    });
}

#[test]
fn content_without_a_permitted_type_is_refused() {
    for len in [0, 1, 100, 2000] {
        assert_violation(RecordViolation::NoContentType, 10, &|records, out| {
            records.send_record(0, &vec![0; len], out).unwrap();
        });
    }
    for kind in [1, 20, 24, 255] {
        for len in [0, 1, 100, 2000] {
            assert_violation(RecordViolation::ContentType(kind), 10, &|records, out| {
                records.send_record(kind, &vec![7; len], out).unwrap();
            });
        }
    }
    for kind in [ALERT, HANDSHAKE] {
        assert_violation(RecordViolation::EmptyContent, 10, &|records, out| {
            records.send_record(kind, &[], out).unwrap();
        });
    }
    for len in [1, 3, 4, 2000] {
        assert_violation(RecordViolation::AlertLength, 50, &|records, out| {
            records.send_record(ALERT, &vec![0; len], out).unwrap();
        });
    }
}

#[test]
fn handshake_messages_that_are_not_permitted_are_refused() {
    let send = |message: &'static [u8]| {
        move |records: &mut RecordLayer, out: &mut Vec<u8>| {
            records.send_record(HANDSHAKE, message, out).unwrap();
        }
    };
    use RecordViolation::{KeyUpdateRequest, Message, MessageLength, MessageSpansKeys};
    for kind in [0_u8, 1, 4, 13, 20, 25] {
        assert_violation(Message(kind), 10, &move |records, out| {
            records.send_record(HANDSHAKE, &[kind, 0, 0, 1, 0], out).unwrap();
        });
    }
    // A CertificateRequest, for which the client has not asked.
    let error = TlsError::BadRecord(Message(13));
    assert_eq!(violation_of(false, &send(&[13, 0, 0, 1, 0])), (error, Alert(10)));
    assert_violation(MessageLength, 50, &send(&[24, 0, 0, 0]));
    assert_violation(MessageLength, 50, &send(&[24, 0, 0, 2, 0, 0]));
    assert_violation(MessageLength, 50, &send(&[24, 255, 255, 255, 0]));
    assert_violation(KeyUpdateRequest(2), 47, &send(&[24, 0, 0, 1, 2]));
    assert_violation(MessageSpansKeys, 10, &send(&[24, 0, 0, 1, 0, 24]));
    assert_violation(MessageSpansKeys, 10, &send(&[24, 0, 0, 1, 1, 24, 0, 0, 1, 1]));
}

#[test]
fn records_between_the_parts_of_a_message_are_refused() {
    for len in [0, 1, 100, 2000] {
        assert_violation(RecordViolation::InterleavedMessage, 10, &|records, out| {
            records.send_record(HANDSHAKE, &[24, 0], out).unwrap();
            records.send_record(DATA, &vec![7; len], out).unwrap();
        });
    }
    assert_violation(RecordViolation::InterleavedMessage, 10, &|records, out| {
        records.send_record(HANDSHAKE, &[24, 0, 0, 1], out).unwrap();
        records.send_record(ALERT, &[1, 0], out).unwrap();
    });
}

#[test]
fn endless_records_without_data_are_refused() {
    for many in [
        &|records: &mut RecordLayer, out: &mut Vec<u8>| {
            records.send_record(DATA, &[], out).unwrap()
        },
        &|records: &mut RecordLayer, out: &mut Vec<u8>| {
            records.send_key_update_with(1, out).unwrap()
        },
        &|records: &mut RecordLayer, out: &mut Vec<u8>| {
            records.send_record(ALERT, &[1, 90], out).unwrap()
        },
    ] as [Violate<'_>; 3]
    {
        assert_violation(RecordViolation::TooManyWithoutData, 10, &|records, out| {
            (0..33).for_each(|_| many(records, out));
        });
        let [mut client, mut server] = both_ends(CipherSuite::Aes128GcmSha256, 0);
        let mut wire = Wire::default();
        for size in [1, 2000] {
            (0..32).for_each(|_| many(&mut client, &mut wire.inward));
            client.send_record(DATA, &vec![5; size], &mut wire.inward).unwrap();
            let received = receive(&mut server, &mut wire, 3000);
            assert_eq!(received, Ok((vec![5; size], Plaintext::Bytes(size))));
        }
    }
}

#[test]
fn alerts_end_the_session_but_two() {
    for (content, expected) in [([2, 40], 40), ([1, 80], 80), ([0, 10], 10), ([2, 255], 255)] {
        let mut pair = Pair::open(&usual_key(Hash::Sha384, 1));
        let out = &mut pair.client_wire.outward;
        pair.client.records().unwrap().send_record(ALERT, &content, out).unwrap();
        pair.deliver();
        let error = receive_all(&mut pair.server, &mut pair.server_wire).unwrap_err();
        assert_eq!(error, TlsError::PeerAlert(Alert(expected)));
        assert!(pair.server_wire.outward.is_empty(), "an alert is not answered");
    }
    // user_canceled, then close_notify, of either level. What follows is ignored.
    for level in [1, 2] {
        let mut pair = Pair::open(&usual_key(Hash::Sha256, 1));
        let records = pair.client.records().unwrap();
        let out = &mut pair.client_wire.outward;
        records.send_record(ALERT, &[level, 90], out).unwrap();
        records.send_record(DATA, b"last", out).unwrap();
        records.send_record(ALERT, &[level, 0], out).unwrap();
        records.send_record(DATA, b"ignored", out).unwrap();
        out.extend([0; 30]);
        pair.deliver();
        for expected in [&b"last"[..], b""] {
            let received = receive_all(&mut pair.server, &mut pair.server_wire);
            assert_eq!(received, Ok((expected.to_vec(), Plaintext::End)));
        }
        pair.server.send(&mut pair.server_wire, b"answer").unwrap();
    }
}

#[test]
fn nothing_is_sent_after_close_notify() {
    let mut pair = Pair::open(&usual_key(Hash::Sha256, 1));
    pair.client.close_notify(&mut pair.client_wire);
    let sent = pair.client_wire.outward.len();
    assert_eq!(sent, 2 + 22);
    pair.client.close_notify(&mut pair.client_wire);
    assert!(pair.client.send(&mut pair.client_wire, b"x").is_err());
    assert_eq!(pair.client_wire.outward.len(), sent);
}

#[test]
fn requests_of_a_key_update_are_answered_once_before_the_next_data() {
    let mut pair = Pair::open(&usual_key(Hash::Sha384, 1));
    for requests in [1, 2, 5] {
        for _ in 0..requests {
            let out = &mut pair.client_wire.outward;
            pair.client.records().unwrap().send_key_update_with(1, out).unwrap();
        }
        pair.client.send(&mut pair.client_wire, b"request").unwrap();
        pair.deliver();
        let received = receive_all(&mut pair.server, &mut pair.server_wire).unwrap();
        assert_eq!(received.0, b"request");
        assert!(pair.server_wire.outward.is_empty(), "nothing is sent without data");
        pair.server.send(&mut pair.server_wire, b"answer").unwrap();
        assert_eq!(pair.server_wire.outward.len(), (5 + 22) + (6 + 22));
        pair.deliver();
        let received = receive_all(&mut pair.client, &mut pair.client_wire).unwrap();
        assert_eq!(received.0, b"answer");
        pair.client.send(&mut pair.client_wire, b"next").unwrap();
        assert_eq!(pair.client_wire.outward.len(), 4 + 22, "the answer requests nothing");
        pair.deliver();
        receive_all(&mut pair.server, &mut pair.server_wire).unwrap();
        pair.server.send(&mut pair.server_wire, b"next").unwrap();
        assert_eq!(pair.server_wire.outward.len(), 4 + 22, "and there is one of it");
        pair.deliver();
        receive_all(&mut pair.client, &mut pair.client_wire).unwrap();
    }
}

#[test]
fn tickets_are_ignored_by_the_client() {
    let mut pair = Pair::open(&usual_key(Hash::Sha256, 1));
    let records = pair.server.records().unwrap();
    let out = &mut pair.server_wire.outward;
    let ticket = [&[4, 0, 0x40, 0][..], &[9; 0x4000]].concat();
    for part in ticket.chunks(5000) {
        records.send_record(HANDSHAKE, part, out).unwrap();
    }
    records.send_record(DATA, b"data", out).unwrap();
    pair.deliver();
    let received = receive_all(&mut pair.client, &mut pair.client_wire);
    assert_eq!(received, Ok((b"data".to_vec(), Plaintext::WouldBlock)));
}

#[test]
fn keys_are_updated_before_their_last_record() {
    for suite in [CipherSuite::Aes128GcmSha256, CipherSuite::Aes256GcmSha384] {
        let [mut client, mut server] = both_ends(suite, 0);
        // A record of a few bytes has two blocks.
        client.set_blocks_per_key_max(8);
        let mut wire = Wire::default();
        for round in 0..20_u8 {
            let sent = send(&mut client, &[round]);
            // Three records with data and the KeyUpdate have one key.
            let update_len = if round > 0 && round % 3 == 0 { 5 + 22 } else { 0 };
            assert_eq!(sent.len(), update_len + 1 + 22, "{round}");
            wire.inward.extend(sent);
            assert_eq!(receive(&mut server, &mut wire, 9).unwrap().0, [round]);
        }
        // In the middle of one send. Two small records have the same key as the first full ones.
        client.set_blocks_per_key_max(3 * ((1 << 10) + 2) + 2);
        let message: Vec<u8> = (0..250).cycle().take(10 << 14).collect();
        let sent = send(&mut client, &message);
        assert_eq!(sent.len(), message.len() + 10 * 22 + 3 * (5 + 22));
        wire.inward.extend(sent);
        assert!(receive(&mut server, &mut wire, message.len()).unwrap().0 == message);
    }
}

#[test]
fn sequence_numbers_do_not_wrap() {
    let suite = CipherSuite::Aes128GcmSha256;
    let [mut client, mut server] = both_ends(suite, u64::MAX - 2);
    client.set_blocks_per_key_max(u64::MAX);
    let mut wire = Wire::default();
    client.send_record(DATA, b"one", &mut wire.inward).unwrap();
    client.send_record(DATA, b"two", &mut wire.inward).unwrap();
    assert_eq!(receive(&mut server, &mut wire, 9).unwrap().0, b"onetwo");
    let [mut client, _] = both_ends(suite, u64::MAX);
    client.set_blocks_per_key_max(u64::MAX);
    let mut list = GatherList::new();
    list.add_bytes(b"three");
    let result = client.send(&mut wire, &mut list);
    assert_eq!(result, Err(TlsError::BadRecord(RecordViolation::SequenceEnd)));
    assert!(wire.outward.is_empty(), "no nonce is used twice");
}

/// Into the destination and into the session's buffer.
#[test]
fn byte_that_was_changed_anywhere_is_noticed_and_nothing_is_delivered() {
    for suite in [CipherSuite::Aes128GcmSha256, CipherSuite::Aes256GcmSha384] {
        for size in [1, 700, 1500] {
            let record = {
                let [mut client, _] = both_ends(suite, 0);
                send(&mut client, &vec![0x5a; size])
            };
            for at in 0..record.len() {
                let [_, mut server] = both_ends(suite, 0);
                let mut wire = Wire { inward: record.clone(), is_closed: true, ..Wire::default() };
                wire.inward[at] ^= 1 << (at % 8);
                let mut into = vec![0x77; 2000];
                let (first, second) = into.split_at_mut(333);
                let mut list = ScatterList::new();
                list.add_bytes(first);
                list.add_bytes(second);
                let error = server.receive(&mut wire, &mut list).unwrap_err();
                assert_eq!(list.left_bytes(), 2000, "{at}");
                let is_length = matches!(at, 3 | 4);
                let expected = TlsError::BadRecord(RecordViolation::NotAuthentic);
                assert!(error == expected || is_length || at == 0, "{at}: {error}");
                let seen = into.iter().all(|byte| matches!(byte, 0 | 0x77));
                assert!(seen, "{at}: the destination holds what is not authentic");
            }
        }
    }
}

#[test]
fn bytes_before_a_violation_are_delivered_before_its_error() {
    let mut pair = Pair::open(&usual_key(Hash::Sha256, 1));
    pair.client.send(&mut pair.client_wire, &[1; 3000]).unwrap();
    pair.client_wire.outward.extend([22, 3, 3, 0, 1, 1]);
    pair.deliver();
    let mut into = [0; 5000];
    let received = pair.server.receive(&mut pair.server_wire, &mut into);
    assert_eq!(received, Ok(Plaintext::Bytes(3000)));
    assert!(pair.server.may_have_more(), "the error is known");
    let received = pair.server.receive(&mut pair.server_wire, &mut into);
    let expected = TlsError::BadRecord(RecordViolation::NotProtected(22));
    assert_eq!(received, Err(expected));
}

#[test]
fn records_that_came_with_the_handshake_are_received_first() {
    let mut pair = Pair::open(&usual_key(Hash::Sha256, 1));
    let message: Vec<u8> = (0..=255).cycle().take(40_000).collect();
    pair.client.send(&mut pair.client_wire, &message).unwrap();
    let records = std::mem::take(&mut pair.client_wire.outward);
    for cut in [0, 1, 5, 30_000, records.len()] {
        let mut pair = Pair::open(&usual_key(Hash::Sha256, 1));
        pair.client.send(&mut pair.client_wire, &message).unwrap();
        let records = std::mem::take(&mut pair.client_wire.outward);
        pair.server.push_received(&records[..cut]);
        pair.server_wire.inward.extend_from_slice(&records[cut..]);
        assert!(cut < 30_000 || pair.server.may_have_more());
        let received = receive_all(&mut pair.server, &mut pair.server_wire).unwrap();
        assert!(received == (message.clone(), Plaintext::WouldBlock), "{cut}");
    }
}
