//! Messages: round trips, truncations, changed bits, arbitrary bytes.

use proptest::collection::vec;
use proptest::prelude::*;

use crate::message::{Challenge, DescriptorLists, FailureMessage, Negotiate, Reply, Success1};
use crate::{FailureReason, Message, MessageError, SecretBytes};

fn bytes(len: impl Into<proptest::collection::SizeRange>) -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), len)
}

fn negotiate() -> impl Strategy<Value = Message> {
    let lists = (bytes(0..=30), bytes(0..=30));
    let lists =
        proptest::option::of(lists.prop_map(|(hashes, groups)| DescriptorLists { hashes, groups }));
    (any::<u16>(), any::<u8>(), lists).prop_map(|(transaction, concatenation, dhchap)| {
        Message::Negotiate(Negotiate { transaction, concatenation, dhchap })
    })
}

fn challenge() -> impl Strategy<Value = Message> {
    (any::<(u16, u8, u8, u32)>(), bytes(0..=64), bytes(0..=1024)).prop_map(
        |((transaction, hash, group, sequence), challenge, public_value)| {
            Message::Challenge(Challenge {
                transaction,
                hash,
                group,
                sequence,
                challenge,
                public_value,
            })
        },
    )
}

fn reply() -> impl Strategy<Value = Message> {
    let both = (0_usize..=64).prop_flat_map(|len| (bytes(len), proptest::option::of(bytes(len))));
    (any::<(u16, u32)>(), both, bytes(0..=1024)).prop_map(
        |((transaction, sequence), (response, challenge), public_value)| {
            let response = SecretBytes::new(response);
            Message::Reply(Reply { transaction, sequence, response, challenge, public_value })
        },
    )
}

fn success1() -> impl Strategy<Value = Message> {
    (any::<u16>(), bytes(0..=64), any::<bool>()).prop_map(|(transaction, response, valid)| {
        let hash_len_bytes = u8::try_from(response.len()).unwrap();
        let response = valid.then(|| SecretBytes::new(response));
        Message::Success1(Success1 { transaction, hash_len_bytes, response })
    })
}

fn message() -> impl Strategy<Value = Message> {
    let failure = any::<(u16, u8)>().prop_map(|(transaction, code)| FailureMessage {
        transaction,
        reason: FailureReason::from_code(code),
    });
    prop_oneof![
        negotiate(),
        challenge(),
        reply(),
        success1(),
        any::<u16>().prop_map(|transaction| Message::Success2 { transaction }),
        failure.clone().prop_map(Message::Failure1),
        failure.prop_map(Message::Failure2),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn message_survives_encoding(message in message()) {
        prop_assert_eq!(Message::decode(&message.encode()), Ok(message.clone()));
        // A buffer of Authentication Receive is longer than the message.
        let mut buffer = message.encode();
        buffer.resize(4096, 0xa5);
        prop_assert_eq!(Message::decode(&buffer), Ok(message));
    }

    #[test]
    fn every_truncation_is_refused(message in message()) {
        let encoded = message.encode();
        let optional = match &message {
            Message::Success1(Success1 { response: None, hash_len_bytes, .. }) => usize::from(*hash_len_bytes),
            _ => 0,
        };
        for len in 0..encoded.len() - optional {
            let error = Message::decode(&encoded[..len]).unwrap_err();
            let truncated = matches!(error, MessageError::Truncated(_));
            prop_assert!(truncated, "{} of {} bytes: {error}", len, encoded.len());
        }
    }

    #[test]
    fn every_changed_bit_is_decoded_or_refused(message in message()) {
        let mut bytes = message.encode();
        for bit in 0..8 * bytes.len() {
            bytes[bit / 8] ^= 1 << (bit % 8);
            if let Ok(decoded) = Message::decode(&bytes) {
                prop_assert_eq!(Message::decode(&decoded.encode()), Ok(decoded));
            }
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn arbitrary_bytes_are_decoded_or_refused(
        kind in 0_u8..2, id in prop_oneof![0_u8..5, 0xf0_u8..0xf2], rest in bytes(0..300),
    ) {
        let bytes = [&[kind, id][..], &rest].concat();
        if let Err(error) = Message::decode(&bytes) {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}

/// Layouts of `include/linux/nvme.h` (Linux 7.3).
#[test]
fn fields_are_where_linux_has_them() {
    let lists = DescriptorLists { hashes: vec![1, 2], groups: vec![0, 3, 5] };
    let negotiate = Message::Negotiate(Negotiate {
        transaction: 0x0102,
        concatenation: 2,
        dhchap: Some(lists),
    });
    let bytes = negotiate.encode();
    assert_eq!(bytes.len(), 72);
    assert_eq!(bytes[..15], [0, 0, 0, 0, 2, 1, 2, 1, 1, 0, 2, 3, 1, 2, 0]);
    assert_eq!(bytes[42..46], [0, 3, 5, 0]);
    let challenge = Message::Challenge(Challenge {
        transaction: 0x0102,
        hash: 1,
        group: 2,
        sequence: 0x0a0b_0c0d,
        challenge: vec![7; 32],
        public_value: vec![9; 384],
    });
    let bytes = challenge.encode();
    assert_eq!(bytes[..17], [1, 1, 0, 0, 2, 1, 32, 0, 1, 2, 0x80, 1, 0xd, 0xc, 0xb, 0xa, 7]);
    assert_eq!((bytes[47], bytes[48], bytes.len()), (7, 9, 432));
    let reply = Message::Reply(Reply {
        transaction: 0x0102,
        sequence: 0x0a0b_0c0d,
        response: SecretBytes::new(vec![7; 48]),
        challenge: Some(vec![8; 48]),
        public_value: vec![9; 256],
    });
    let bytes = reply.encode();
    assert_eq!(bytes[..17], [1, 2, 0, 0, 2, 1, 48, 0, 1, 0, 0, 1, 0xd, 0xc, 0xb, 0xa, 7]);
    assert_eq!((bytes[64], bytes[112], bytes.len()), (8, 9, 368));
    let response = Some(SecretBytes::new(vec![7; 32]));
    let success = Message::Success1(Success1 { transaction: 3, hash_len_bytes: 32, response });
    let bytes = success.encode();
    assert_eq!(bytes[..17], [1, 3, 0, 0, 3, 0, 32, 0, 1, 0, 0, 0, 0, 0, 0, 0, 7]);
    assert_eq!(bytes.len(), 48);
    let bytes = Message::Success2 { transaction: 3 }.encode();
    assert_eq!(bytes, [1, 4, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let failure = FailureMessage { transaction: 3, reason: FailureReason::GroupNotUsable };
    assert_eq!(Message::Failure1(failure.clone()).encode(), [0, 0xf1, 0, 0, 3, 0, 1, 5]);
    assert_eq!(Message::Failure2(failure).encode(), [0, 0xf0, 0, 0, 3, 0, 1, 5]);
}

#[test]
fn fields_with_forbidden_values_are_named() {
    let refused = |bytes: &[u8]| Message::decode(bytes).unwrap_err().to_string();
    assert_eq!(
        refused(&[1, 9, 0, 0, 0, 0, 0, 0]),
        "parse message: found type 01 and id 09, not known"
    );
    assert_eq!(refused(&[0; 7]), "parse message: 7 bytes, expected at least 8");
    assert_eq!(
        refused(&[0, 0xf1, 0, 0, 0, 0, 2, 1]),
        "parse reason code of FAILURE: found 2, expected 1"
    );
    let mut reply = [0; 16];
    reply[..2].copy_from_slice(&[1, 2]);
    reply[8] = 2;
    assert_eq!(refused(&reply), "parse CVALID of REPLY: found 2, expected 0 or 1");
    let mut negotiate = [0; 72];
    negotiate[7..11].copy_from_slice(&[1, 1, 0, 31]);
    assert_eq!(refused(&negotiate), "parse HALEN of NEGOTIATE: found 31, expected at most 30");
}

/// A descriptor of another protocol, such as KX-HMAC-CHAP, may precede that of DH-HMAC-CHAP.
#[test]
fn descriptors_of_other_protocols_are_skipped() {
    let lists = DescriptorLists { hashes: vec![1], groups: vec![10, 20, 0] };
    let offer = Negotiate { transaction: 1, concatenation: 0, dhchap: Some(lists) };
    let mut bytes = Message::Negotiate(offer.clone()).encode();
    bytes[7] = 2;
    bytes.splice(8..8, [2; 64]);
    assert_eq!(Message::decode(&bytes), Ok(Message::Negotiate(offer)));
    bytes[7] = 1;
    let Ok(Message::Negotiate(other)) = Message::decode(&bytes) else { panic!("not decoded") };
    assert_eq!(other.dhchap, None);
}
