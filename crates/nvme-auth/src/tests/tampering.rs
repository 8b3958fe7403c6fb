//! Messages that are altered, replayed, reflected, reordered or invented on their way.

use proptest::prelude::*;

use super::{CONTROLLER_SECRET, Case, HOST_SECRET, Run, randomness, run, run_altered, secret};
use crate::{Concatenation, Controller, FailureReason, Group, Hash, Host, Message, Step};

const BIDIRECTIONAL: Case = Case {
    hash: Hash::Sha256,
    group: Group::Null,
    bidirectional: true,
    concatenation: Concatenation::None,
};

/// Whether a byte of a message may change without effect: it is reserved, or not valid in this
/// exchange, or part of an offer, which no response covers.
fn is_free(case: Case, message: usize, at: usize) -> bool {
    let hash_len = case.hash.len_bytes();
    let challenges = case.bidirectional || case.concatenation.generates_psk();
    if matches!(at, 2 | 3) {
        return true;
    }
    match message {
        // Descriptor: reserved, counts and identifiers.
        0 => at >= 9,
        1 => at == 7,
        // CVALID, S2 and C2 have no effect if there is neither R2 nor a PSK.
        2 if matches!(at, 7 | 9) => true,
        2 => {
            !challenges
                && (matches!(at, 8 | 12..16) || (16 + hash_len..16 + 2 * hash_len).contains(&at))
        }
        3 => matches!(at, 7 | 9..16) || (!case.bidirectional && at >= 16),
        _ => at >= 6,
    }
}

/// After a change both ends may only succeed alike, and only if the change is without effect.
fn check_altered(case: Case, run: &Run, message: usize, at: usize, change: u8) {
    let Some((host, controller)) = run.both_authenticated() else { return };
    let named = format!("{case:?}: message {message}, byte {at} ^ {change:02x}");
    let is_generated_differently =
        host.generated_psk.is_some() && host.generated_psk != controller.generated_psk;
    if is_generated_differently {
        // Without R2 the change of C2 is found by TLS, whose keys differ.
        let hash_len = case.hash.len_bytes();
        assert!(message == 2 && (16 + hash_len..16 + 2 * hash_len).contains(&at), "{named}");
        assert!(!case.bidirectional, "{named}");
        return;
    }
    assert!(is_free(case, message, at), "{named}");
    assert_eq!((host.hash, host.group), (controller.hash, controller.group), "{named}");
    assert_eq!((host.hash, host.group), (case.hash, case.group), "{named}");
    assert_eq!(host.bidirectional, controller.bidirectional, "{named}");
    assert_eq!(host.bidirectional, case.bidirectional, "{named}");
}

fn alter_every_byte(case: Case, changes: &[u8]) {
    let mut ends = case.ends();
    let clean = run(&mut ends, 1);
    assert!(clean.both_authenticated().is_some());
    let mut found = 0;
    for (message, bytes) in clean.messages.iter().enumerate() {
        for at in 0..bytes.len() {
            for &change in changes {
                let run = run_altered(&mut case.ends(), 1, |index, bytes| {
                    if index == message {
                        bytes[at] ^= change;
                    }
                });
                check_altered(case, &run, message, at, change);
                found += usize::from(run.both_authenticated().is_none());
            }
        }
    }
    assert!(found > 0);
}

#[test]
fn altered_bits_of_exchanges_without_group_are_refused() {
    for hash in [Hash::Sha256, Hash::Sha512] {
        for bidirectional in [false, true] {
            let case = Case { hash, bidirectional, ..BIDIRECTIONAL };
            alter_every_byte(case, &[1, 2, 4, 8, 16, 32, 64, 128]);
        }
    }
}

#[test]
fn altered_bytes_of_exchanges_with_a_group_are_refused() {
    let case = Case { group: Group::Ffdhe2048, ..BIDIRECTIONAL };
    alter_every_byte(Case { concatenation: Concatenation::NewTlsPsk, ..case }, &[0x01]);
    let unidirectional = Case { bidirectional: false, ..case };
    alter_every_byte(
        Case { concatenation: Concatenation::ReplaceTlsPsk, ..unidirectional },
        &[0x80],
    );
}

/// Every changed response is refused, wherever the change is.
#[test]
fn altered_responses_are_refused() {
    for (message, is_host) in [(2, false), (3, true)] {
        for at in 16..48 {
            let run = run_altered(&mut BIDIRECTIONAL.ends(), 1, |index, bytes| {
                if index == message {
                    bytes[at] ^= 1;
                }
            });
            let failure = if is_host { run.host_failure() } else { run.controller_failure() };
            assert_eq!(failure.reason, FailureReason::AuthenticationFailed);
        }
    }
}

/// A message of an earlier exchange, with the transaction of this one, is refused.
#[test]
fn replayed_messages_are_refused() {
    for group in [Group::Null, Group::Ffdhe2048] {
        let case = Case { group, ..BIDIRECTIONAL };
        let recorded = run(&mut case.ends(), 1).messages;
        for replayed in [1, 2, 3] {
            // The second exchange of the ends that made the recording, and the first of others.
            for again in [false, true] {
                let mut ends = case.ends();
                if again {
                    assert_eq!(run(&mut ends, 1).messages, recorded);
                }
                let run = run_altered(&mut ends, 2, |index, bytes| {
                    if index == replayed {
                        let transaction: [u8; 2] = bytes[4..6].try_into().unwrap();
                        bytes.clone_from(&recorded[replayed]);
                        bytes[4..6].copy_from_slice(&transaction);
                    }
                });
                assert!(run.both_authenticated().is_none(), "{group} {replayed}");
                let failed_local =
                    if replayed == 3 { run.host_failure() } else { run.controller_failure() };
                assert_eq!(failed_local.reason, FailureReason::AuthenticationFailed);
            }
        }
    }
}

#[test]
fn host_refuses_its_own_challenge() {
    let mut ends = BIDIRECTIONAL.ends();
    let first = run(&mut ends, 1);
    let Ok(Message::Reply(reply)) = Message::decode(&first.messages[2]) else { panic!() };
    let own = reply.challenge.unwrap();
    let run = run_altered(&mut ends, 2, |index, bytes| {
        if index == 1 {
            bytes[16..48].copy_from_slice(&own);
        }
    });
    assert_eq!(run.host_failure().reason, FailureReason::AuthenticationFailed);
    assert!(run.host_failure().detail.contains("sent back"));
}

#[test]
fn controller_refuses_its_own_challenge_and_public_value() {
    let case = Case { group: Group::Ffdhe2048, ..BIDIRECTIONAL };
    let mut sent = Vec::new();
    let challenge_back = run_altered(&mut case.ends(), 1, |index, bytes| match index {
        1 => sent.clone_from(bytes),
        2 => bytes[48..80].copy_from_slice(&sent[16..48]),
        _ => {}
    });
    let failure = challenge_back.controller_failure();
    assert_eq!(failure.reason, FailureReason::AuthenticationFailed);
    assert!(failure.detail.contains("sent back"));
    let value_back = run_altered(&mut case.ends(), 1, |index, bytes| match index {
        1 => sent.clone_from(bytes),
        2 => bytes[80..].copy_from_slice(&sent[48..]),
        _ => {}
    });
    assert_eq!(value_back.controller_failure().reason, FailureReason::IncorrectPayload);
}

/// The worst case: both ends have the same secret without transformation, and an attacker without it
/// sends a challenge of the controller to a host, and the response of that host back with the roles
/// exchanged. Roles and names are part of a response, so it matches nothing.
#[test]
fn reflected_responses_are_refused() {
    let text = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";
    let same = || crate::ChapSecret::parse(text).unwrap();
    let ends = || {
        let mut host = BIDIRECTIONAL.host_config();
        (host.host_secret, host.controller_secrets) = (same(), vec![same()]);
        let mut controller = BIDIRECTIONAL.controller_config();
        (controller.host_secrets, controller.controller_secret) = (vec![same()], Some(same()));
        (Host::new(host).unwrap(), Controller::new(controller).unwrap())
    };
    // Both names are the same machine's, which is a target and a host.
    let (mut host, mut controller) = ends();
    assert!(run(&mut (ends()), 1).both_authenticated().is_some());
    let negotiate = host.start(randomness(1));
    let Step::Message(challenge) = controller.handle_message(&negotiate, || randomness(2)) else {
        panic!("no challenge")
    };
    let Step::Message(reply) = host.handle_message(&challenge) else { panic!("no reply") };
    let Step::Message(success) = controller.handle_message(&reply, || randomness(3)) else {
        panic!("no success")
    };
    let Ok(Message::Reply(mut reply)) = Message::decode(&reply) else { panic!() };
    let Ok(Message::Success1(success)) = Message::decode(&success) else { panic!() };
    // R2 as R1 for the same challenge and number: an oracle of responses is of no use.
    let (_, mut other) = ends();
    let mut altered = challenge.clone();
    let step = other.handle_message(&negotiate, || randomness(2));
    let Step::Message(same_challenge) = step else { panic!("no challenge") };
    assert_eq!(same_challenge, altered);
    reply.response = success.response.unwrap();
    let step = other.handle_message(&Message::Reply(reply).encode(), || randomness(4));
    assert!(matches!(step, Step::Failed { .. }), "{step:?}");
    // R1 as R2.
    let (mut host, _) = ends();
    host.start(randomness(1));
    altered[16..48].fill(7);
    let Step::Message(reply) = host.handle_message(&altered) else { panic!("no reply") };
    let Ok(Message::Reply(reply)) = Message::decode(&reply) else { panic!() };
    let success = crate::Success1 { response: Some(reply.response), ..success_template() };
    let step = host.handle_message(&Message::Success1(success).encode());
    let Step::Failed { failure, .. } = step else { panic!("{step:?}") };
    assert_eq!(failure.reason, FailureReason::AuthenticationFailed);
}

fn success_template() -> crate::Success1 {
    crate::Success1 { transaction: 1, hash_len_bytes: 32, response: None }
}

/// A proxy removes the request for R2 and the response itself.
#[test]
fn stripped_bidirectional_authentication_is_refused_by_the_host() {
    let strip: [fn(&mut Vec<u8>); 2] = [|bytes| bytes[8] = 0, |bytes| bytes[12..16].fill(0)];
    for strip in strip {
        let run = run_altered(&mut BIDIRECTIONAL.ends(), 1, |index, bytes| {
            if index == 2 {
                strip(bytes);
            }
        });
        assert_eq!(run.host_failure().reason, FailureReason::AuthenticationFailed);
    }
}

/// A peer without secrets forges each message that would end an exchange.
#[test]
fn forged_success_message_is_refused() {
    let (mut host, mut controller) = BIDIRECTIONAL.ends();
    let negotiate = host.start(randomness(1));
    let success2 = Message::Success2 { transaction: 1 }.encode();
    let early = controller.handle_message(&success2, || randomness(2));
    assert!(matches!(early, Step::Failed { .. }));
    let step = controller.handle_message(&negotiate, || randomness(2));
    assert!(matches!(step, Step::Message(_)));
    let early = controller.handle_message(&success2, || randomness(2));
    assert!(matches!(early, Step::Failed { .. }));
    let success1 = Message::Success1(success_template()).encode();
    assert!(matches!(host.handle_message(&success1), Step::Failed { .. }));
}

/// Messages for a state machine, from genuine ones of other exchanges to noise.
fn hostile() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let genuine: Vec<Vec<u8>> = [false, true]
        .into_iter()
        .flat_map(|bidirectional| {
            let case = Case { bidirectional, ..BIDIRECTIONAL };
            let config = crate::HostConfig { host_secret: secret(77), ..case.host_config() };
            let mut controller = case.controller_config();
            controller.host_secrets = vec![secret(77)];
            controller.controller_secret = Some(secret(78));
            let controller = Controller::new(controller).unwrap();
            let host = Host::new(crate::HostConfig {
                controller_secrets: bidirectional.then(|| secret(78)).into_iter().collect(),
                ..config
            });
            run(&mut (host.unwrap(), controller), 9).messages
        })
        .collect();
    let message = (proptest::sample::select(genuine), any::<(usize, u8, bool)>()).prop_map(
        |(mut message, (at, value, alter))| {
            if alter {
                let at = at % message.len();
                message[at] = value;
            }
            message
        },
    );
    let noise = proptest::collection::vec(any::<u8>(), 0..200);
    proptest::collection::vec(prop_oneof![9 => message, 1 => noise], 1..12)
}

proptest! {
    #[test]
    fn no_sequence_of_messages_without_the_secret_authenticates(messages in hostile()) {
        assert_ne!(HOST_SECRET, 77);
        assert_ne!(CONTROLLER_SECRET, 78);
        let (mut host, mut controller) = BIDIRECTIONAL.ends();
        host.start(randomness(1));
        for message in messages {
            let step = controller.handle_message(&message, || randomness(2));
            let authenticated = matches!(step, Step::Authenticated { .. });
            prop_assert!(!authenticated);
            let step = host.handle_message(&message);
            let authenticated = matches!(step, Step::Authenticated { .. });
            prop_assert!(!authenticated);
            if matches!(step, Step::Failed { .. }) {
                host.start(randomness(3));
            }
        }
    }
}
