//! Host and controller against each other.

use super::{
    CONTROLLER_SECRET, Case, HOST_NQN, HOST_SECRET, SUBSYSTEM_NQN, randomness, run, run_altered,
    secret,
};
use crate::dh::DhJob;
use crate::{
    Concatenation, ConcatenationPolicy, ConfigError, Controller, FailureReason, FailureSide, Group,
    Hash, Host, Message, Policy, Randomness, SecretBytes, Step,
};

const CONCATENATIONS: [Concatenation; 3] =
    [Concatenation::None, Concatenation::NewTlsPsk, Concatenation::ReplaceTlsPsk];

const PLAIN: Case = Case {
    hash: Hash::Sha256,
    group: Group::Null,
    bidirectional: false,
    concatenation: Concatenation::None,
};

/// Calls `visit` for each combination, and returns whether it is possible.
fn for_every_case(groups: &[Group], mut visit: impl FnMut(Case, bool)) {
    for hash in Hash::ALL {
        for &group in groups {
            for concatenation in CONCATENATIONS {
                for bidirectional in [false, true] {
                    let possible = concatenation == Concatenation::None
                        || (group != Group::Null && hash != Hash::Sha512);
                    visit(Case { hash, group, bidirectional, concatenation }, possible);
                }
            }
        }
    }
}

#[test]
fn every_combination_authenticates_both_ends_alike() {
    for_every_case(&[Group::Null, Group::Ffdhe2048], |case, possible| {
        if !possible {
            assert!(Host::new(case.host_config()).is_err(), "{case:?}");
            return;
        }
        let mut ends = case.ends();
        let run = run(&mut ends, 1);
        let Some((host, controller)) = run.both_authenticated() else {
            panic!("{case:?}: {run:?}")
        };
        assert_eq!((host.hash, host.group), (case.hash, case.group));
        assert_eq!(host.bidirectional, case.bidirectional);
        assert_eq!(controller.bidirectional, case.bidirectional);
        assert_eq!(host.peer_secret, case.bidirectional.then_some(0));
        assert_eq!(controller.peer_secret, Some(0));
        assert_eq!(host.generated_psk, controller.generated_psk);
        assert_eq!(host.generated_psk.is_some(), case.concatenation.generates_psk());
        assert_eq!(host.concatenation, case.concatenation);
        let tls = host.tls_psk(HOST_NQN, SUBSYSTEM_NQN);
        assert_eq!(tls.is_some(), case.concatenation.generates_psk());
        if let Some(tls) = tls {
            assert!(tls.identity.starts_with(&format!("NVMe1G{:02} {HOST_NQN} ", case.hash.id())));
        }
        assert_eq!(run.messages.len(), if case.bidirectional { 5 } else { 4 });
        check_sequence_numbers(case, &run.messages);
    });
}

/// S1 is never 0; S2 is 0 unless the controller is to respond.
fn check_sequence_numbers(case: Case, messages: &[Vec<u8>]) {
    let Ok(Message::Challenge(challenge)) = Message::decode(&messages[1]) else {
        panic!("{case:?}")
    };
    let Ok(Message::Reply(reply)) = Message::decode(&messages[2]) else { panic!("{case:?}") };
    assert_ne!(challenge.sequence, 0);
    assert_eq!(reply.sequence != 0, case.bidirectional);
    let has_challenge = case.bidirectional || case.concatenation.generates_psk();
    assert_eq!(reply.challenge.is_some(), has_challenge);
    assert_eq!(reply.public_value.len(), case.group.len_bytes());
}

#[test]
fn larger_groups_authenticate_too() {
    for group in [Group::Ffdhe3072, Group::Ffdhe4096, Group::Ffdhe6144, Group::Ffdhe8192] {
        let case =
            Case { group, bidirectional: true, concatenation: Concatenation::NewTlsPsk, ..PLAIN };
        let run = run(&mut case.ends(), 1);
        let Some((host, controller)) = run.both_authenticated() else { panic!("{group}: {run:?}") };
        assert_eq!(host.generated_psk, controller.generated_psk);
    }
}

#[test]
fn wrong_secrets_are_refused_at_the_end_that_checks_them() {
    for_every_case(&[Group::Null, Group::Ffdhe2048], |case, possible| {
        if !possible || case.concatenation == Concatenation::ReplaceTlsPsk {
            return;
        }
        let mut config = case.host_config();
        config.host_secret = secret(5);
        let controller = Controller::new(case.controller_config()).unwrap();
        let run_host = run(&mut (Host::new(config).unwrap(), controller), 1);
        let failure = run_host.controller_failure();
        assert_eq!(failure.reason, FailureReason::AuthenticationFailed, "{case:?}");
        assert_eq!(failure.side, FailureSide::Local);
        assert_eq!(run_host.host_failure().side, FailureSide::Peer);
        assert_eq!(run_host.host_failure().reason, FailureReason::AuthenticationFailed);
        if case.bidirectional {
            let mut config = case.controller_config();
            config.controller_secret = Some(secret(5));
            let host = Host::new(case.host_config()).unwrap();
            let run = run(&mut (host, Controller::new(config).unwrap()), 1);
            assert_eq!(run.host_failure().side, FailureSide::Local);
            assert_eq!(run.host_failure().reason, FailureReason::AuthenticationFailed);
            assert_eq!(run.controller_failure().side, FailureSide::Peer);
        }
    });
}

#[test]
fn names_are_part_of_the_responses() {
    let case = Case { bidirectional: true, ..PLAIN };
    for (host_nqn, subsystem_nqn) in [("other", SUBSYSTEM_NQN), (HOST_NQN, "other")] {
        let mut config = case.controller_config();
        config.host_nqn = host_nqn.to_owned();
        config.subsystem_nqn = subsystem_nqn.to_owned();
        let host = Host::new(case.host_config()).unwrap();
        let run = run(&mut (host, Controller::new(config).unwrap()), 1);
        assert_eq!(run.controller_failure().reason, FailureReason::AuthenticationFailed);
    }
}

#[test]
fn each_of_several_secrets_is_accepted_and_reported() {
    let case = Case { bidirectional: true, ..PLAIN };
    let mut controller = case.controller_config();
    controller.host_secrets = vec![secret(5), secret(6), secret(HOST_SECRET)];
    let mut host = case.host_config();
    host.controller_secrets = vec![secret(7), secret(CONTROLLER_SECRET)];
    let run = run(&mut (Host::new(host).unwrap(), Controller::new(controller).unwrap()), 1);
    let (host, controller) = run.both_authenticated().unwrap();
    assert_eq!((host.peer_secret, controller.peer_secret), (Some(1), Some(2)));
}

#[test]
fn controller_selects_what_it_prefers_among_the_offered() {
    let mut host = PLAIN.host_config();
    host.policy.hashes = vec![Hash::Sha256, Hash::Sha512];
    host.policy.groups = vec![Group::Null, Group::Ffdhe2048];
    let mut controller = PLAIN.controller_config();
    controller.policy.hashes = vec![Hash::Sha384, Hash::Sha512, Hash::Sha256];
    controller.policy.groups = vec![Group::Ffdhe8192, Group::Ffdhe2048, Group::Null];
    let run = run(&mut (Host::new(host).unwrap(), Controller::new(controller).unwrap()), 1);
    let (host, _) = run.both_authenticated().unwrap();
    assert_eq!((host.hash, host.group), (Hash::Sha512, Group::Ffdhe2048));
}

#[test]
fn policies_without_overlap_fail_with_their_reason() {
    type Change = fn(&mut Policy);
    let cases: [(Change, FailureReason); 4] = [
        (|policy| policy.hashes = vec![Hash::Sha384], FailureReason::HashNotUsable),
        (|policy| policy.groups = vec![Group::Ffdhe2048], FailureReason::GroupNotUsable),
        (|policy| policy.bidirectional_required = true, FailureReason::AuthenticationFailed),
        (
            |policy| {
                policy.concatenation = ConcatenationPolicy::Required;
                policy.groups.push(Group::Ffdhe2048);
            },
            FailureReason::ConcatenationMismatch,
        ),
    ];
    for (change, reason) in cases {
        let mut config = PLAIN.controller_config();
        change(&mut config.policy);
        let host = Host::new(PLAIN.host_config()).unwrap();
        let run = run(&mut (host, Controller::new(config).unwrap()), 1);
        assert_eq!(run.controller_failure().reason, reason);
        assert_eq!(run.host_failure().reason, reason);
    }
}

#[test]
fn concatenation_depends_on_queue_channel_and_policy() {
    let case = Case { group: Group::Ffdhe2048, concatenation: Concatenation::NewTlsPsk, ..PLAIN };
    let attempt = |concatenation, admin_queue, secure_channel, policy| {
        let case = Case { concatenation, ..case };
        let mut config = case.controller_config();
        (config.admin_queue, config.secure_channel) = (admin_queue, secure_channel);
        config.policy.concatenation = policy;
        let host = Host::new(case.host_config()).unwrap();
        let run = run(&mut (host, Controller::new(config).unwrap()), 1);
        let succeeded = run.both_authenticated().is_some();
        if !succeeded {
            assert_eq!(run.host_failure().reason, FailureReason::ConcatenationMismatch);
        }
        succeeded
    };
    for admin_queue in [false, true] {
        for secure_channel in [false, true] {
            for policy in [
                ConcatenationPolicy::Refused,
                ConcatenationPolicy::Allowed,
                ConcatenationPolicy::Required,
            ] {
                let permitted = admin_queue && policy != ConcatenationPolicy::Refused;
                let required =
                    policy == ConcatenationPolicy::Required && admin_queue && !secure_channel;
                let attempt =
                    |concatenation| attempt(concatenation, admin_queue, secure_channel, policy);
                assert_eq!(attempt(Concatenation::None), !required);
                assert_eq!(attempt(Concatenation::NewTlsPsk), permitted && !secure_channel);
                assert_eq!(attempt(Concatenation::ReplaceTlsPsk), permitted && secure_channel);
            }
        }
    }
}

/// A host of another make may offer the null group together with concatenation.
#[test]
fn controller_refuses_the_null_group_with_concatenation() {
    let mut ends = PLAIN.ends();
    let run = run_altered(&mut ends, 1, |index, bytes| {
        if index == 0 {
            bytes[6] = Concatenation::NewTlsPsk.code();
        }
    });
    assert_eq!(run.controller_failure().reason, FailureReason::GroupNotUsable);
}

#[test]
fn host_refuses_what_it_did_not_offer() {
    let case = Case { group: Group::Ffdhe2048, ..PLAIN };
    for (at, value, reason) in [
        (8, Hash::Sha384.id(), FailureReason::HashNotUsable),
        (8, 9, FailureReason::HashNotUsable),
        (9, Group::Null.id(), FailureReason::GroupNotUsable),
        (9, Group::Ffdhe3072.id(), FailureReason::GroupNotUsable),
    ] {
        let run = run_altered(&mut case.ends(), 1, |index, bytes| {
            if index == 1 {
                bytes[at] = value;
            }
        });
        assert_eq!(run.host_failure().reason, reason);
        assert_eq!(run.controller_failure().reason, reason);
    }
}

#[test]
fn degenerate_public_values_are_refused() {
    let case = Case { group: Group::Ffdhe2048, ..PLAIN };
    let prime = Group::Ffdhe2048.prime();
    let minus = |less: u8| {
        let mut value = prime.to_vec();
        *value.last_mut().unwrap() -= less;
        value
    };
    let small = |value: u8| [vec![0; 255], vec![value]].concat();
    let all_ones = vec![0xff; 256];
    for value in [small(0), small(1), minus(1), minus(0), all_ones] {
        for message in [1, 2] {
            let run = run_altered(&mut case.ends(), 1, |index, bytes| {
                if index == message {
                    let at = bytes.len() - 256;
                    bytes[at..].copy_from_slice(&value);
                }
            });
            let failure = if message == 1 { run.host_failure() } else { run.controller_failure() };
            assert_eq!(failure.reason, FailureReason::IncorrectPayload);
            assert!(failure.detail.ends_with("is degenerate, expected 2 to p-2"), "{failure}");
        }
    }
    for value in [small(2), minus(2)] {
        assert_eq!(crate::dh::check_public_value(Group::Ffdhe2048, &value), Ok(()));
    }
    assert!(crate::dh::check_public_value(Group::Ffdhe2048, &[]).is_err());
    assert!(crate::dh::check_public_value(Group::Ffdhe2048, &[1; 257]).is_err());
    assert!(crate::dh::check_public_value(Group::Ffdhe2048, &[2]).is_ok());
}

#[test]
fn ends_are_used_again_for_reauthentication() {
    for group in [Group::Null, Group::Ffdhe2048] {
        let case = Case { group, bidirectional: true, ..PLAIN };
        let mut ends = case.ends();
        let mut numbers = Vec::new();
        for seed in 1..4 {
            let run = run(&mut ends, seed);
            assert!(run.both_authenticated().is_some(), "{run:?}");
            let Ok(Message::Challenge(challenge)) = Message::decode(&run.messages[1]) else {
                panic!()
            };
            let Ok(Message::Reply(reply)) = Message::decode(&run.messages[2]) else { panic!() };
            numbers.push((challenge.transaction, challenge.sequence, reply.sequence));
        }
        for pair in numbers.windows(2) {
            assert_eq!(pair[1].0, pair[0].0 + 1);
            assert_eq!(pair[1].1, pair[0].1.wrapping_add(1));
            assert_eq!(pair[1].2, pair[0].2.wrapping_add(1));
        }
    }
}

#[test]
fn failed_ends_can_be_used_again() {
    let case = Case { bidirectional: true, ..PLAIN };
    let mut ends = case.ends();
    let failed = run_altered(&mut ends, 1, |index, bytes| {
        if index == 2 {
            bytes[20] ^= 1;
        }
    });
    assert!(failed.both_authenticated().is_none());
    assert!(run(&mut ends, 2).both_authenticated().is_some());
}

#[test]
fn result_of_an_abandoned_exchange_is_ignored() {
    let case = Case { group: Group::Ffdhe2048, ..PLAIN };
    let (mut host, mut controller) = case.ends();
    let negotiate = host.start(randomness(1));
    let Step::Compute(stale) = controller.handle_message(&negotiate, || randomness(2)) else {
        panic!("no job")
    };
    controller.cancel();
    let negotiate = host.start(randomness(3));
    let Step::Compute(job) = controller.handle_message(&negotiate, || randomness(4)) else {
        panic!("no job")
    };
    assert!(controller.handle_dh_result(stale.run()).is_none());
    let Some(Step::Message(challenge)) = controller.handle_dh_result(job.run()) else {
        panic!("no challenge")
    };
    let Step::Compute(stale) = host.handle_message(&challenge) else { panic!("no job") };
    host.start(randomness(5));
    let mut challenge = challenge;
    challenge[4..6].copy_from_slice(&3_u16.to_le_bytes());
    let Step::Compute(job) = host.handle_message(&challenge) else { panic!("no job") };
    assert!(host.handle_dh_result(stale.run()).is_none());
    assert!(matches!(host.handle_dh_result(job.run()), Some(Step::Message(_))));
}

/// A host that sends more while a job is running gets no second job.
#[test]
fn messages_during_a_job_end_the_exchange() {
    let case = Case { group: Group::Ffdhe2048, ..PLAIN };
    let (mut host, mut controller) = case.ends();
    let negotiate = host.start(randomness(1));
    assert!(matches!(controller.handle_message(&negotiate, || randomness(2)), Step::Compute(_)));
    let step = controller.handle_message(&negotiate, || randomness(3));
    let Step::Failed { failure, message: Some(_) } = step else { panic!("{step:?}") };
    assert_eq!(failure.reason, FailureReason::IncorrectMessage);
}

#[test]
fn impossible_configurations_are_refused() {
    let host = |change: fn(&mut crate::HostConfig)| {
        let mut config = PLAIN.host_config();
        change(&mut config);
        Host::new(config).err()
    };
    assert_eq!(host(|_| ()), None);
    assert_eq!(host(|config| config.policy.hashes.clear()), Some(ConfigError::NoHash));
    assert_eq!(host(|config| config.policy.groups.clear()), Some(ConfigError::NoGroup));
    assert_eq!(
        host(|config| config.concatenation = Concatenation::NewTlsPsk),
        Some(ConfigError::NoGroup)
    );
    assert_eq!(
        host(|config| config.policy.bidirectional_required = true),
        Some(ConfigError::NoControllerSecret)
    );
    assert!(matches!(host(|config| config.host_nqn.push('\0')), Some(ConfigError::Nqn(_))));
    let controller = |change: fn(&mut crate::ControllerConfig)| {
        let mut config = PLAIN.controller_config();
        change(&mut config);
        Controller::new(config).err()
    };
    assert_eq!(controller(|config| config.host_secrets.clear()), Some(ConfigError::NoHostSecret));
    assert_eq!(
        controller(|config| {
            config.policy.bidirectional_required = true;
            config.controller_secret = None;
        }),
        Some(ConfigError::NoControllerSecret)
    );
    assert_eq!(
        controller(|config| config.policy.concatenation = ConcatenationPolicy::Required),
        Some(ConfigError::NoGroup)
    );
}

/// 0 marks a challenge that asks for no response.
#[test]
fn sequence_numbers_begin_at_random_and_skip_0() {
    for (first, expected) in [(0, [1, 2, 3]), (u32::MAX - 1, [u32::MAX - 1, u32::MAX, 1])] {
        let mut random = [7; Randomness::BYTES];
        random[128..].copy_from_slice(&u32::to_be_bytes(first));
        let mut counters = crate::exchange::Counters::default();
        let found = [(); 3].map(|()| counters.next_sequence(&Randomness::new(&random)));
        assert_eq!(found, expected);
    }
}

#[test]
fn reply_without_challenge_is_refused_with_concatenation() {
    let case = Case { group: Group::Ffdhe2048, concatenation: Concatenation::NewTlsPsk, ..PLAIN };
    let run = run_altered(&mut case.ends(), 1, |index, bytes| {
        if index == 2 {
            bytes[8] = 0;
        }
    });
    assert_eq!(run.controller_failure().reason, FailureReason::AuthenticationFailed);
    assert!(run.host_failure().detail.is_empty());
}

/// g^xy is hashed with its leading zeros.
#[test]
fn powers_are_as_long_as_the_prime() {
    for group in &Group::ALL[1..] {
        let mut exponent = vec![0; 64];
        exponent[63] = 3;
        let job = DhJob::new(*group, SecretBytes::new(exponent), true, Some(vec![5]), 0);
        let result = job.run();
        let padded = |value| crate::dh::pad(&[value], group.len_bytes());
        assert_eq!(result.public_value, Some(padded(8)));
        assert_eq!(result.shared_secret.unwrap().expose(), padded(125));
    }
}

/// Rotation: the controller accepts both secrets, then the host has the new one, then only that is
/// accepted.
#[test]
fn secrets_are_rotated_without_a_new_connection() {
    let mut ends = PLAIN.ends();
    assert!(run(&mut ends, 1).both_authenticated().is_some());
    let both = vec![secret(HOST_SECRET), secret(5)];
    let new = crate::ControllerConfig { host_secrets: both, ..PLAIN.controller_config() };
    ends.1.set_config(new).unwrap();
    assert_eq!(run(&mut ends, 2).both_authenticated().unwrap().1.peer_secret, Some(0));
    ends.0.set_config(crate::HostConfig { host_secret: secret(5), ..PLAIN.host_config() }).unwrap();
    assert_eq!(run(&mut ends, 3).both_authenticated().unwrap().1.peer_secret, Some(1));
    let new =
        crate::ControllerConfig { host_secrets: vec![secret(5)], ..PLAIN.controller_config() };
    ends.1.set_config(new).unwrap();
    let run4 = run(&mut ends, 4);
    assert!(run4.both_authenticated().is_some());
    assert_eq!(Message::decode(&run4.messages[0]).unwrap().transaction(), 4);
    let old = crate::HostConfig { host_secret: secret(HOST_SECRET), ..PLAIN.host_config() };
    ends.0.set_config(old).unwrap();
    assert!(run(&mut ends, 5).both_authenticated().is_none());
    let none = crate::ControllerConfig { host_secrets: Vec::new(), ..PLAIN.controller_config() };
    assert_eq!(ends.1.set_config(none), Err(ConfigError::NoHostSecret));
}
