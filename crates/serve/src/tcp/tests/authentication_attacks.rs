//! Attacks on authentication: altered, cut, repeated, reordered and reflected messages, and floods.

use tenmil_base::Span;
use tenmil_nvme_auth::{Group, Host, HostConfig, Message, Policy, SECURITY_PROTOCOL, Step};
use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::fabrics::{AuthenticationSend, CNTLID_DYNAMIC};
use tenmil_wire::{Status, TypedCommand};

use super::authenticating_host::{
    DeferredDhExecutor, ExchangeResult, OF_CONTROLLER, OF_HOST, fast_policy, host_config,
    named_secret, randomness, secret, secured_target, security,
};
use super::test_target::{TestTarget, admin_config, admin_connect, connect_data, service_limits};
use crate::tcp::{AdmissionLimits, ServiceLimits, SubsystemExportConfig, SubsystemSecurity};

fn bidirectional() -> HostConfig {
    HostConfig { controller_secrets: vec![secret(OF_CONTROLLER)], ..host_config() }
}

/// Bytes of a message that the receiver ignores (Base 2.2 §8.3.4.5).
fn is_reserved(number: usize, at: usize) -> bool {
    match number {
        // NEGOTIATE: reserved, and the lists behind their entries.
        0 => matches!(at, 2..=3 | 9 | 13..=41 | 43..),
        // CHALLENGE, behind 16 bytes and a challenge of 32 bytes the padding.
        1 => matches!(at, 2..=3 | 7 | 48..),
        // REPLY.
        2 => matches!(at, 2..=3 | 7 | 9 | 80..),
        // SUCCESS1.
        3 => matches!(at, 2..=3 | 7 | 9..=15 | 48..),
        // SUCCESS2.
        _ => matches!(at, 2..=3 | 6..),
    }
}

/// No altered byte lets a host in, unless the receiver ignores it.
#[test]
fn every_altered_byte_of_every_message_is_refused() {
    for number in 0..5 {
        let mut len = 1;
        let mut at = 0;
        while at < len {
            for flip in [0x01, 0x80] {
                let mut rig = secured_target(security(&[OF_HOST]));
                let (line, _) = rig.connect_unauthenticated();
                let mut host = Host::new(bidirectional()).unwrap();
                let result = rig.run_exchange(line, &mut host, 3, &mut |index, message| {
                    if index == number {
                        // The padding of a received message is not looked at one by one.
                        len = message.len().min(96);
                        message[at] ^= flip;
                    }
                });
                rig.run_until_idle();
                let is_accepted = matches!(result, ExchangeResult::Authenticated(_));
                let has_controller = rig.service.association_count() == 1;
                let what = format!("message {number}, byte {at} ^ {flip:#x}: {result:?}");
                if is_reserved(number, at) {
                    assert!(!is_accepted || has_controller, "{what}");
                } else {
                    assert!(!has_controller, "{what}");
                }
                rig.end_all();
            }
            at += 1;
        }
        assert!(len > 8, "message {number} was transferred");
    }
}

/// A connection that ends at any byte leaves nothing behind.
#[test]
fn connection_cut_at_every_byte_of_an_exchange_leaves_nothing() {
    let total = {
        let mut rig = secured_target(security(&[OF_HOST]));
        let (line, _) = rig.connect_unauthenticated();
        rig.authenticate(line, bidirectional()).outcome();
        let total = [true, false].map(|is_up| rig.lines[line].bytes_transferred(is_up));
        rig.end_all();
        total
    };
    for (is_up, total) in [true, false].into_iter().zip(total) {
        for most in (1..total).step_by(if total > 4000 { 37 } else { 1 }) {
            let mut rig = secured_target(security(&[OF_HOST]));
            rig.allowance = Some((is_up, most));
            let line = rig.open_connection(admin_config());
            if rig.lines[line].pipe.is_some() {
                rig.submit_connect(line, &admin_connect(), &connect_data(CNTLID_DYNAMIC));
            }
            if rig.lines[line].pipe.is_some() {
                let mut host = Host::new(bidirectional()).unwrap();
                rig.run_exchange(line, &mut host, 1, &mut |_, _| {});
            }
            rig.end_all();
        }
    }
}

/// Each message of a complete exchange, sent in place of another one.
#[test]
fn message_out_of_order_is_refused() {
    let mut messages = Vec::new();
    {
        let mut rig = secured_target(security(&[OF_HOST]));
        let (line, _) = rig.connect_unauthenticated();
        let mut host = Host::new(bidirectional()).unwrap();
        let record = &mut |_, message: &mut Vec<u8>| messages.push(message.clone());
        rig.run_exchange(line, &mut host, 3, record).outcome();
    }
    for number in [0, 2, 4] {
        for (wrong, message) in messages.iter().enumerate() {
            if wrong == number || number == 2 && wrong == 0 {
                continue;
            }
            let mut rig = secured_target(security(&[OF_HOST]));
            let (line, _) = rig.connect_unauthenticated();
            let mut host = Host::new(bidirectional()).unwrap();
            let result = rig.run_exchange(line, &mut host, 3, &mut |index, sent| {
                if index == number {
                    sent.clone_from(message);
                }
            });
            rig.run_until_idle();
            assert_eq!(
                rig.service.association_count(),
                0,
                "message {wrong} in place of {number}: {result:?}"
            );
            rig.end_all();
        }
    }
}

/// All messages of a host, recorded and sent again on another connection.
#[test]
fn recorded_exchange_is_of_no_use() {
    let mut rig = secured_target(security(&[OF_HOST]));
    let (line, _) = rig.connect_unauthenticated();
    let mut messages = Vec::new();
    let mut host = Host::new(host_config()).unwrap();
    let record = &mut |_, message: &mut Vec<u8>| messages.push(message.clone());
    rig.run_exchange(line, &mut host, 3, record).outcome();
    let (thief, _) = rig.connect_unauthenticated();
    assert_eq!(rig.send_message(thief, &messages[0]), Some(Status::SUCCESS));
    rig.receive_message(thief).unwrap().unwrap();
    assert_eq!(rig.send_message(thief, &messages[2]), Some(Status::SUCCESS));
    let failure = rig.receive_message(thief).unwrap().unwrap();
    assert!(matches!(Message::decode(&failure), Ok(Message::Failure1(_))), "{failure:?}");
    rig.run_until_idle();
    assert_eq!(rig.service.association_count(), 1, "that of the host");
    rig.end_all();
}

/// A reply to an earlier challenge of the same connection.
#[test]
fn reply_to_a_replaced_challenge_is_refused() {
    let mut rig = secured_target(security(&[OF_HOST]));
    let (line, _) = rig.connect_unauthenticated();
    let mut host = Host::new(host_config()).unwrap();
    let negotiate = host.start(randomness(1));
    rig.send_message(line, &negotiate);
    let challenge = rig.receive_message(line).unwrap().unwrap();
    let Step::Message(reply) = host.handle_message(&challenge) else { panic!("it replies") };
    rig.send_message(line, &negotiate);
    rig.receive_message(line).unwrap().unwrap();
    rig.send_message(line, &reply);
    let failure = rig.receive_message(line).unwrap().unwrap();
    assert!(matches!(Message::decode(&failure), Ok(Message::Failure1(_))), "{failure:?}");
    rig.end_all();
}

/// A peer without the secret has the target answer its own challenge: on the same connection, and on a
/// second one on which it plays the controller for a host.
#[test]
fn reflected_challenge_is_refused() {
    // The secret of both ends is the same, which makes a reflection worth trying.
    let mut offered = security(&[OF_HOST]);
    for keys in offered.hosts.values_mut() {
        keys.controller_secret = Some(named_secret(OF_HOST));
    }
    let mut rig = secured_target(offered);
    let (line, _) = rig.connect_unauthenticated();
    let config = HostConfig {
        host_secret: secret(66),
        controller_secrets: vec![secret(66)],
        ..host_config()
    };
    let mut host = Host::new(config).unwrap();
    let mut challenge = Vec::new();
    let result = rig.run_exchange(line, &mut host, 2, &mut |number, message| match number {
        1 => challenge.clone_from(message),
        2 => {
            // C2 of the reply becomes C1.
            let c1 = challenge[16..48].to_vec();
            message[48..80].copy_from_slice(&c1);
        }
        _ => {}
    });
    assert!(matches!(result, ExchangeResult::Failed(_)), "{result:?}");
    rig.run_until_idle();
    assert_eq!(rig.service.association_count(), 0);
    rig.end_all();
}

#[test]
fn endless_negotiation_ends_the_connection() {
    let mut rig = secured_target(security(&[OF_HOST]));
    let (line, _) = rig.connect_unauthenticated();
    let mut host = Host::new(host_config()).unwrap();
    let mut accepted = 0;
    while rig.service.connection_count() > 0 {
        let negotiate = host.start(randomness(accepted));
        rig.send_message(line, &negotiate);
        accepted += 1;
        assert!(accepted < 10, "it would go on");
    }
    assert_eq!(accepted, 5);
    rig.end_all();
}

/// Many Sends at once, more than the connection's own pages hold.
#[test]
fn flood_of_messages_on_one_connection_needs_no_memory_of_others() {
    let mut rig = secured_target(security(&[OF_HOST]));
    let (line, _) = rig.connect_unauthenticated();
    let free = rig.service.buffer_pool().free_bytes();
    let send = AuthenticationSend { spsp0: 1, spsp1: 1, secp: SECURITY_PROTOCOL, tl: 8000 };
    let bytes = vec![0; 8000];
    for _ in 0..30 {
        rig.lines[line].submit(&send.to_command(), DataDirection::FromHost(8000), &bytes);
    }
    rig.run_until_idle();
    assert_eq!(rig.service.buffer_pool().free_bytes(), free);
    assert_eq!(rig.lines[line].done.len(), 30, "each is answered");
    assert_eq!(rig.service.association_count(), 0);
    rig.end_all();
}

/// As many connections as one address may open, each with a job: others are served, and in the end
/// nothing is left.
#[test]
fn flood_of_unauthenticated_connections_excludes_no_known_host() {
    const FLOOD: usize = 20;
    let policy = Policy { groups: vec![Group::Ffdhe2048], ..fast_policy() };
    let limits = ServiceLimits {
        connections_max: 64,
        admission: Some(AdmissionLimits {
            unconnected_per_address_max: FLOOD,
            per_address_max: FLOOD,
            reserved: 8,
            ..AdmissionLimits::default_for(64)
        }),
        ..service_limits()
    };
    let offered = SubsystemSecurity { policy: policy.clone(), ..security(&[OF_HOST]) };
    let mut rig = TestTarget::with_options(limits, |config| SubsystemExportConfig {
        security: offered,
        ..config
    });
    let executor = DeferredDhExecutor::install(&rig);
    rig.traits.peer = Some("192.0.2.66:1".parse().unwrap());
    let config = HostConfig { policy: policy.clone(), ..host_config() };
    let free = rig.service.buffer_pool().free_bytes();
    for index in 0..FLOOD {
        let (line, _) = rig.connect_unauthenticated();
        let negotiate = Host::new(config.clone()).unwrap().start(randomness(index as u64));
        rig.send_message(line, &negotiate);
    }
    let refused = {
        let (_, far) = super::test_target::TestStream::pair(&rig.regions);
        rig.service.accept_stream(Box::new(far.with_traits(&rig.traits)), 1, rig.now)
    };
    assert!(refused.is_err(), "the address has too many connections");
    assert_eq!(rig.service.association_count(), 0);
    assert_eq!(
        free - rig.service.buffer_pool().free_bytes(),
        FLOOD as u64 * 8192,
        "each has only its own pages"
    );
    assert_eq!(executor.count(), crate::tcp::authentication::RUNNING_MAX, "no more run at a time");
    // A known host from elsewhere: its jobs take turns with those of the flood.
    rig.traits.peer = Some("198.51.100.1:1".parse().unwrap());
    let (line, _) = rig.connect_unauthenticated();
    let mut host = Host::new(config).unwrap();
    let negotiate = host.start(randomness(1000));
    rig.send_message(line, &negotiate);
    let receive = rig.submit_receive(line);
    executor.run_oldest();
    executor.run_oldest();
    rig.run_until_idle();
    // It is the second address: the job that followed was its own.
    executor.run_newest();
    rig.run_until_idle();
    assert!(rig.lines[line].done.contains_key(&receive), "it has its challenge");
    rig.advance_time(Span::from_secs(31));
    assert_eq!(rig.service.connection_count(), 0, "no exchange was completed in time");
    executor.run_all();
    assert_eq!(rig.service.authentication_context().jobs.count(), 0);
    rig.end_all();
}
