//! Authentication of host and controller, and secure channels with generated keys.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tenmil_base::{Random, Span};
use tenmil_nvme_auth::{
    ChapSecret, Concatenation, DhExecutor, DhJob, DhResult, Group, Hash, InlineDhExecutor, KeyHash,
    Message, Policy, SecretBytes,
};
use tenmil_nvme_host::Event;

use super::simulated_time::SimulatedTime;
use super::single_path_host::{HOST, SUBSYSTEM, SinglePathHost};
use super::target::{TargetChap, Way};
use crate::authentication::{Authentication, ChapSecrets, KeyLookup, SecureRandom};
use crate::options::{Options, SecureChannelMode};

/// Repeatable random numbers.
pub(super) struct SimulatedRandom(pub(super) Mutex<Random>);

impl SecureRandom for SimulatedRandom {
    fn fill(&self, bytes: &mut [u8]) -> Result<(), String> {
        let mut random = self.0.lock().unwrap();
        bytes.fill_with(|| random.next_u64().to_le_bytes()[0]);
        Ok(())
    }
}

/// A secret that depends on a number.
pub(super) fn secret(number: u8) -> ChapSecret {
    ChapSecret::generate(KeyHash::None, SecretBytes::new(vec![number; 32])).unwrap()
}

fn policy(hash: Hash, group: Group) -> Policy {
    Policy { hashes: vec![hash], groups: vec![group], ..Policy::default() }
}

/// Without a computation, which takes long in a debug build.
pub(super) fn fast_policy() -> Policy {
    policy(Hash::Sha256, Group::Null)
}

/// Options of a host that has a secret, and may expect one of the controller.
pub(super) fn options_with(host: u8, controller: Option<u8>, policy: Policy) -> Options {
    let controller = controller.map(secret).into_iter().collect();
    let random = Arc::new(SimulatedRandom(Mutex::new(Random::new(3))));
    let secrets = ChapSecrets { host: secret(host), controller };
    let mut authentication = Authentication::new(secrets, Arc::new(InlineDhExecutor), random);
    authentication.policy = policy;
    Options { authentication: Some(authentication), ..SinglePathHost::options() }
}

/// A target that knows the secrets 1 of the host and 2 of the controller.
pub(super) fn host_with_target(policy: Policy) -> SinglePathHost {
    let host = SinglePathHost::new();
    let mut chap = TargetChap::new(secret(1), Some(secret(2)));
    chap.policy = policy;
    host.target.state().chap = Some(chap);
    host
}

fn with_chap<T>(host: &SinglePathHost, read: impl FnOnce(&mut TargetChap) -> T) -> T {
    read(host.target.state().chap.as_mut().unwrap())
}

/// Text and hint of the error of a connect that fails, after which nothing is left.
fn connect_error(host: &mut SinglePathHost, options: Options) -> (String, String) {
    let free = host.free_bytes();
    let error = host.connect(options).unwrap_err();
    (0..3).for_each(|_| host.step());
    assert_eq!(host.target.open_connection_count(), 0);
    assert_eq!(host.free_bytes(), free);
    (error.text, error.hint.unwrap_or_default())
}

#[test]
fn each_queue_is_authenticated_with_each_hash_in_both_directions() {
    for hash in Hash::ALL {
        for controller in [None, Some(2)] {
            let mut host = host_with_target(policy(hash, Group::Null));
            host.connect(options_with(1, controller, Policy::default())).unwrap();
            host.add_queue(16);
            host.write_and_verify(3, 8, 3);
            with_chap(&host, |chap| {
                assert_eq!((chap.outcomes.len(), &chap.failures[..]), (2, &[][..]));
                for outcome in &chap.outcomes {
                    assert_eq!((outcome.hash, outcome.group), (hash, Group::Null));
                    assert_eq!(outcome.bidirectional, controller.is_some());
                }
            });
            assert_eq!(host.controller().connection_stats().authentications, 1);
        }
    }
}

#[test]
fn diffie_hellman_is_computed_by_the_executor() {
    let mut host = host_with_target(policy(Hash::Sha384, Group::Ffdhe2048));
    host.target.state().chap.as_mut().unwrap().includes_io_queues = false;
    host.connect(options_with(1, Some(2), Policy::default())).unwrap();
    host.add_queue(16);
    host.write_and_verify(3, 8, 3);
    with_chap(&host, |chap| {
        let groups: Vec<Group> = chap.outcomes.iter().map(|outcome| outcome.group).collect();
        assert_eq!(groups, [Group::Ffdhe2048], "of the admin queue only");
    });
}

#[test]
fn wrong_or_missing_secret_ends_the_connect_with_the_fix() {
    let cases: [(Options, &str, &str); 4] = [
        (options_with(9, None, fast_policy()), "peer reports: authentication failed", "compare"),
        (
            options_with(1, Some(9), fast_policy()),
            "the response of the controller does not match its secret",
            "compare",
        ),
        (
            SinglePathHost::options(),
            "requires authentication (DH-HMAC-CHAP), and nqn.2024-01.example:host has no secret",
            "dhchap=NAME",
        ),
        (
            options_with(1, None, policy(Hash::Sha512, Group::Null)),
            "peer reports: hash function not usable",
            "compare the hash functions",
        ),
    ];
    for (options, text, hint) in cases {
        let mut host = host_with_target(fast_policy());
        let found = connect_error(&mut host, options);
        assert!(found.0.starts_with("connect to the target: "), "{found:?}");
        assert!(found.0.contains(text) && found.1.contains(hint), "{found:?}");
        let names = found.0.contains(HOST) || found.0.contains(SUBSYSTEM);
        assert!(names, "{found:?}");
        assert_eq!(host.target.state().networks.len(), 1, "one attempt: {text}");
    }
}

/// The controller is informed, and has no authenticated host.
#[test]
fn controller_that_cannot_prove_its_secret_receives_a_failure_message() {
    let mut host = host_with_target(fast_policy());
    connect_error(&mut host, options_with(1, Some(9), fast_policy()));
    with_chap(&host, |chap| {
        let (way, last) = chap.messages.last().unwrap();
        assert!(matches!(Message::decode(last), Ok(Message::Failure2(_))), "{last:?}");
        assert_eq!((*way, chap.failures.len(), chap.outcomes.len()), (Way::ToController, 1, 0));
    });
}

/// As an attacker does who clears the bits in the response to Connect.
#[test]
fn controller_that_requests_no_authentication_is_refused_if_it_has_to_prove_its_secret() {
    let mut host = host_with_target(fast_policy());
    with_chap(&host, |chap| chap.is_announced = false);
    let (text, hint) = connect_error(&mut host, options_with(1, Some(2), fast_policy()));
    assert!(text.contains("does not request authentication, expected it to prove"), "{text}");
    assert!(hint.contains("nothing on the path alters the connection"), "{hint}");
    with_chap(&host, |chap| assert_eq!(chap.messages, []));

    // Without a secret of the controller, the controller notices.
    let mut host = host_with_target(fast_policy());
    with_chap(&host, |chap| chap.is_announced = false);
    let (text, hint) = connect_error(&mut host, options_with(1, None, fast_policy()));
    assert!(text.contains("a property command was refused: "), "{text}");
    assert!(hint.contains("its Connect result did not announce"), "{hint}");

    // A controller that has no authentication at all.
    let mut host = SinglePathHost::new();
    let (text, _) = connect_error(&mut host, options_with(1, Some(2), fast_policy()));
    assert!(text.contains("does not request authentication"), "{text}");
    host.connect(options_with(1, None, fast_policy())).unwrap();
}

#[test]
fn message_that_does_not_come_ends_the_connect_in_time() {
    // NEGOTIATE, CHALLENGE, REPLY, SUCCESS1, SUCCESS2.
    for silent_from in [0, 2] {
        let mut host = host_with_target(fast_policy());
        with_chap(&host, |chap| chap.silent_from = silent_from);
        let begun = host.now;
        let (text, _) = connect_error(&mut host, options_with(1, Some(2), fast_policy()));
        assert!(text.contains("Authentication Receive was not completed within 10 s"), "{text}");
        let waited = host.now.since(begun);
        assert!((Span::from_secs(10)..Span::from_secs(11)).contains(&waited), "{waited}");
    }
}

#[test]
fn computation_that_is_dropped_ends_the_connect_in_time() {
    struct Overloaded;
    impl DhExecutor for Overloaded {
        fn execute(&self, _: DhJob, _: Box<dyn FnOnce(DhResult) + Send>) {}
    }
    let mut host = host_with_target(policy(Hash::Sha256, Group::Ffdhe2048));
    let mut options = options_with(1, None, Policy::default());
    options.authentication.as_mut().unwrap().executor = Arc::new(Overloaded);
    let (text, _) = connect_error(&mut host, options);
    assert!(text.contains("a Diffie-Hellman computation was not completed within 10 s"), "{text}");
}

#[test]
fn random_numbers_that_are_missing_are_reported() {
    struct NoRandom;
    impl SecureRandom for NoRandom {
        fn fill(&self, _: &mut [u8]) -> Result<(), String> {
            Err("the kernel refuses".to_owned())
        }
    }
    let mut host = host_with_target(fast_policy());
    let mut options = options_with(1, None, fast_policy());
    options.authentication.as_mut().unwrap().random = Arc::new(NoRandom);
    let (text, _) = connect_error(&mut host, options);
    assert!(text.contains("random numbers for a challenge: the kernel refuses"), "{text}");
}

#[test]
fn controller_is_authenticated_again_after_each_loss() {
    let mut host = host_with_target(fast_policy());
    host.connect(options_with(1, Some(2), fast_policy())).unwrap();
    host.add_queue(16);
    for round in 0..3 {
        host.write_and_verify(round, 8, round);
        host.events.clear();
        host.target.cut();
        host.run_until(|host| host.events.contains(&Event::QueuePairResumed { id: 1 }));
        assert_eq!(host.target.open_connection_count(), 2);
    }
    host.write_and_verify(9, 8, 9);
    with_chap(&host, |chap| assert_eq!(chap.outcomes.len(), 8, "two queues, four times"));
}

/// A target whose secrets were replaced without those of the host: no retry can help.
#[test]
fn authentication_that_fails_after_a_loss_ends_reconnecting() {
    let mut host = host_with_target(fast_policy());
    host.connect(options_with(1, None, fast_policy())).unwrap();
    with_chap(&host, |chap| chap.host_secrets = vec![secret(8)]);
    let begun = host.now;
    host.target.cut();
    host.run_until(|host| {
        let now = host.now;
        host.multipath().failure_reason(now).is_some()
    });
    assert!(host.now.since(begun) < Span::from_secs(60));
    let now = host.now;
    let why = host.multipath().failure_reason(now).unwrap().to_owned();
    assert!(why.contains("peer reports: authentication failed"), "{why}");
}

/// Looks secrets up that change, some time after that was started.
struct SlowLookup {
    found: Mutex<Option<ChapSecrets>>,
    authentication: Mutex<Option<Authentication>>,
    starts: AtomicUsize,
    is_in_progress: AtomicBool,
}

impl KeyLookup for SlowLookup {
    fn start(&self) {
        assert!(!self.is_in_progress.swap(true, Ordering::Relaxed), "one at a time");
        self.starts.fetch_add(1, Ordering::Relaxed);
    }

    fn is_in_progress(&self) -> bool {
        self.is_in_progress.load(Ordering::Relaxed)
    }
}

impl SlowLookup {
    fn finish(&self) {
        if let Some(found) = self.found.lock().unwrap().take() {
            self.authentication.lock().unwrap().as_ref().unwrap().replace_secrets(found);
        }
        self.is_in_progress.store(false, Ordering::Relaxed);
    }
}

fn with_lookup(mut options: Options) -> (Options, Arc<SlowLookup>) {
    let authentication = options.authentication.as_mut().unwrap();
    let lookup = Arc::new(SlowLookup {
        found: Mutex::new(None),
        authentication: Mutex::new(Some(authentication.clone())),
        starts: AtomicUsize::new(0),
        is_in_progress: AtomicBool::new(false),
    });
    authentication.lookup = Some(lookup.clone());
    (options, lookup)
}

/// A target that has another secret of the host, or of its own, after a restart.
#[test]
fn refused_secrets_are_looked_up_before_the_next_attempt() {
    for is_of_host in [true, false] {
        let mut host = host_with_target(fast_policy());
        let (options, lookup) = with_lookup(options_with(1, Some(2), fast_policy()));
        host.connect(options).unwrap();
        host.add_queue(16);
        host.write_and_verify(3, 8, 3);
        let rotated = match is_of_host {
            true => ChapSecrets { host: secret(5), controller: vec![secret(2)] },
            false => ChapSecrets { host: secret(1), controller: vec![secret(6)] },
        };
        with_chap(&host, |chap| {
            chap.host_secrets = vec![rotated.host.clone()];
            chap.controller_secret = Some(rotated.controller[0].clone());
        });
        host.events.clear();
        host.target.cut();
        host.run_until(|_| lookup.is_in_progress());
        // Nothing is tried with the old secrets meanwhile.
        let attempts = host.controller().connection_stats().attempts;
        host.run_for(Span::from_secs(8));
        assert_eq!(host.controller().connection_stats().attempts, attempts);
        *lookup.found.lock().unwrap() = Some(rotated);
        lookup.finish();
        let begun = host.now;
        host.run_until(|host| host.events.contains(&Event::QueuePairResumed { id: 1 }));
        assert!(host.now.since(begun) < Span::from_secs(1));
        host.write_and_verify(4, 8, 4);
        assert_eq!(lookup.starts.load(Ordering::Relaxed), 1);
    }
}

#[test]
fn secrets_that_are_still_the_same_end_reconnecting() {
    let mut host = host_with_target(fast_policy());
    let (options, lookup) = with_lookup(options_with(1, None, fast_policy()));
    host.connect(options).unwrap();
    with_chap(&host, |chap| chap.host_secrets = vec![secret(8)]);
    host.target.cut();
    host.run_until(|_| lookup.is_in_progress());
    lookup.finish();
    let begun = host.now;
    host.run_until(|host| {
        let now = host.now;
        host.multipath().failure_reason(now).is_some()
    });
    assert!(host.now.since(begun) < Span::from_secs(2));
    assert_eq!(lookup.starts.load(Ordering::Relaxed), 1);
}

/// A keyring on a file system that hangs.
#[test]
fn lookup_that_does_not_end_is_given_up_after_the_loss_timeout() {
    let mut host = host_with_target(fast_policy());
    let (options, lookup) = with_lookup(options_with(1, None, fast_policy()));
    let give_up = options.policy.give_up;
    host.connect(options).unwrap();
    with_chap(&host, |chap| chap.host_secrets = vec![secret(8)]);
    host.target.cut();
    let begun = host.now;
    while host.now.since(begun) < give_up.max(Span::from_secs(1)) {
        host.now = host.now.after(Span::from_ms(50));
        host.step();
    }
    host.run_until(|host| {
        let now = host.now;
        host.multipath().failure_reason(now).is_some()
    });
    assert!(lookup.is_in_progress() && lookup.starts.load(Ordering::Relaxed) == 1);
}

/// Rotation: the target has both secrets for a while, the host gets the new one, and then the target forgets
/// the old one. No connection is lost.
#[test]
fn replaced_secrets_are_used_at_once_without_losing_a_connection() {
    let mut host = host_with_target(fast_policy());
    let options = options_with(1, Some(2), fast_policy());
    let authentication = options.authentication.clone().unwrap();
    host.connect(options).unwrap();
    host.add_queue(16);
    with_chap(&host, |chap| {
        chap.host_secrets = vec![secret(1), secret(5)];
        chap.controller_secret = Some(secret(6));
    });
    let controller = vec![secret(2), secret(6)];
    authentication.replace_secrets(ChapSecrets { host: secret(5), controller });
    host.run_until(|host| with_chap(host, |chap| chap.outcomes.len() == 3));
    with_chap(&host, |chap| {
        assert_eq!(chap.outcomes[2].peer_secret, Some(1), "the new secret");
        chap.host_secrets.remove(0);
    });
    host.run_for(Span::from_ms(100));
    let stats = host.controller().connection_stats();
    assert_eq!((stats.lost, stats.authentications), (0, 2));
    host.add_queue(16);
    host.write_and_verify(3, 8, 3);
    with_chap(&host, |chap| assert_eq!(chap.outcomes.len(), 4, "the new queue"));
}

#[test]
fn authentication_that_fails_while_connected_is_a_loss() {
    let mut host = host_with_target(fast_policy());
    let options = options_with(1, None, fast_policy());
    let authentication = options.authentication.clone().unwrap();
    host.connect(options).unwrap();
    with_chap(&host, |chap| chap.silent_from = 0);
    authentication.request_reauthentication();
    host.run_until(|host| host.controller().connection_stats().lost == 1);
    let why = host.controller().last_error().unwrap().text;
    assert!(why.contains("Authentication Receive was not completed within 10 s"), "{why}");
    with_chap(&host, |chap| chap.silent_from = usize::MAX);
    host.run_until(|host| host.events.contains(&Event::Recovered));
}

/// What an attacker on the way can do with the messages of an exchange.
#[test]
fn altered_replayed_reflected_and_reordered_messages_are_refused() {
    type Change = fn(Way, &mut Vec<u8>, &[(Way, Vec<u8>)]);
    fn decoded(message: &[u8]) -> Message {
        Message::decode(message).unwrap()
    }
    let attacks: [(&str, Change, &str); 7] = [
        (
            "another hash is selected",
            |_, message, _| {
                if let Message::Challenge(mut challenge) = decoded(message) {
                    challenge.hash = 3;
                    *message = Message::Challenge(challenge).encode();
                }
            },
            "controller selected hash 03, which was not offered",
        ),
        (
            "the challenge is altered",
            |_, message, _| {
                if let Message::Challenge(mut challenge) = decoded(message) {
                    challenge.challenge[0] ^= 1;
                    *message = Message::Challenge(challenge).encode();
                }
            },
            "peer reports: authentication failed",
        ),
        (
            "the challenge of the host is not passed on",
            |_, message, _| {
                if let Message::Reply(mut reply) = decoded(message) {
                    reply.challenge = None;
                    reply.sequence = 0;
                    *message = Message::Reply(reply).encode();
                }
            },
            "the controller did not respond",
        ),
        (
            "the response of the host is sent back as that of the controller",
            |_, message, before| {
                if let Message::Success1(mut success) = decoded(message) {
                    let Message::Reply(reply) = decoded(&before[2].1) else { unreachable!() };
                    success.response = Some(reply.response);
                    *message = Message::Success1(success).encode();
                }
            },
            "the response of the controller does not match its secret",
        ),
        (
            "the result comes instead of the challenge",
            |_, message, before| {
                if let Message::Challenge(_) = decoded(message) {
                    let transaction = decoded(&before[0].1).transaction();
                    let success = tenmil_nvme_auth::Success1 {
                        transaction,
                        hash_len_bytes: 32,
                        response: None,
                    };
                    *message = Message::Success1(success).encode();
                }
            },
            "found SUCCESS1, expected CHALLENGE",
        ),
        (
            "the challenge comes twice",
            |_, message, before| {
                if let Message::Success1(_) = decoded(message) {
                    *message = before[1].1.clone();
                }
            },
            "found CHALLENGE, expected SUCCESS1",
        ),
        (
            "a message is cut",
            |way, message, _| {
                if way == Way::ToHost {
                    message.truncate(4);
                }
            },
            "expected",
        ),
    ];
    for (what, change, expected) in attacks {
        let mut host = host_with_target(fast_policy());
        with_chap(&host, |chap| chap.attacker = Some(Box::new(change)));
        let (text, _) = connect_error(&mut host, options_with(1, Some(2), fast_policy()));
        assert!(text.contains(expected), "{what}: {text}");
        // A controller that is not asked to prove its identity has authenticated the host, who refuses it.
        let is_host_proved = what == "the challenge of the host is not passed on";
        with_chap(&host, |chap| assert_eq!(chap.outcomes.len(), usize::from(is_host_proved)));
    }
}

/// Recorded from another connection: neither end accepts them, because its own challenge is a new one.
#[test]
fn messages_of_an_earlier_connection_are_refused() {
    let mut host = host_with_target(fast_policy());
    host.connect(options_with(1, Some(2), fast_policy())).unwrap();
    let recorded = with_chap(&host, |chap| core::mem::take(&mut chap.messages));
    assert_eq!(recorded.len(), 5);
    for (number, way) in [(1, Way::ToHost), (2, Way::ToController), (3, Way::ToHost)] {
        let mut host = host_with_target(fast_policy());
        // The target is another process with other random numbers.
        let mut options = options_with(1, Some(2), fast_policy());
        let random = Arc::new(SimulatedRandom(Mutex::new(Random::new(99))));
        options.authentication.as_mut().unwrap().random = random;
        let message = recorded[number].1.clone();
        with_chap(&host, |chap| {
            chap.random = Random::new(98);
            chap.attacker = Some(Box::new(move |found, bytes, before| {
                if before.len() == number {
                    assert_eq!(found, way);
                    bytes.clone_from(&message);
                }
            }));
        });
        let (text, _) = connect_error(&mut host, options);
        assert!(text.contains("authentication failed"), "{number}: {text}");
    }
}

/// Of an exchange that succeeds, of one that fails, and of one that is repeated when it is cut.
#[test]
fn message_buffers_are_not_reused_while_the_network_can_send_them() {
    for (controller, is_cut) in [(2, false), (9, false), (2, true)] {
        let mut host = host_with_target(fast_policy());
        host.target.state().network.release_lag = Span::from_ms(200);
        let options = options_with(1, Some(controller), fast_policy());
        let authentication = options.authentication.clone().unwrap();
        let free = host.free_bytes();
        assert_eq!(host.connect(options).is_ok(), controller == 2);
        if is_cut {
            for _ in 0..3 {
                host.events.clear();
                authentication.request_reauthentication();
                host.run_for(Span::from_ms(1));
                host.target.cut();
                host.run_until(|host| host.events.contains(&Event::Recovered));
            }
        }
        host.run_for(Span::from_secs(1));
        let networks = host.target.state().networks.clone();
        let strays: Vec<String> =
            networks.iter().flat_map(|network| network.changed_unreleased_memory()).collect();
        assert_eq!(strays, [""; 0], "{controller} {is_cut}");
        if host.multipath.is_some() {
            host.shut_down();
        }
        host.multipath = None;
        assert_eq!(host.free_bytes(), free, "{controller} {is_cut}");
    }
}

#[test]
fn secure_channel_that_is_required_is_not_replaced_by_plaintext() {
    let mut host = SinglePathHost::new();
    let required = SecureChannelMode::Required;
    let options = Options { secure_channel: required, ..SinglePathHost::options() };
    let (text, _) = connect_error(&mut host, options);
    assert_eq!(text, "connect to the target: the connection is plaintext, expected TLS");
    assert_eq!(host.target.state().connects, [], "nothing was said in plaintext");
}

#[test]
fn controller_that_requires_a_secure_channel_is_named_when_tls_is_off() {
    let mut host = host_with_target(fast_policy());
    with_chap(&host, |chap| chap.requires_secure_channel = true);
    let (text, hint) = connect_error(&mut host, options_with(1, None, fast_policy()));
    assert!(text.contains("requires a TLS connection, and TLS is off"), "{text}");
    assert!(hint.contains("tls=concatenate"), "{hint}");
}

/// Options for secure channel concatenation.
fn concatenating(controller: Option<u8>) -> Options {
    let secure_channel = SecureChannelMode::Concatenate;
    let policy = policy(Hash::Sha256, Group::Ffdhe2048);
    Options { secure_channel, ..options_with(1, controller, policy) }
}

#[test]
fn generated_key_secures_all_connections_and_is_generated_anew_after_a_loss() {
    for controller in [None, Some(2)] {
        let mut host = host_with_target(Policy::default());
        host.connect(concatenating(controller)).unwrap();
        host.add_queue(16);
        host.write_and_verify(3, 8, 3);
        let first = with_chap(&host, |chap| {
            assert_eq!(chap.outcomes[0].concatenation, Concatenation::NewTlsPsk);
            let Ok(Message::Reply(reply)) = Message::decode(&chap.messages[2].1) else {
                panic!("{:?}", chap.messages)
            };
            assert_eq!(reply.sequence == 0, controller.is_none(), "0: no response is requested");
            chap.generated_identities[0].clone()
        });
        assert!(first.starts_with("NVMe1G01 "), "{first}");
        let expected = [None, Some(first.clone()), Some(first.clone())];
        assert_eq!(host.target.state().identities, expected);
        assert_eq!(host.target.state().connects, [0, 0, 1]);
        assert_eq!(host.target.open_connection_count(), 2, "the plaintext connection is closed");

        host.events.clear();
        host.target.cut();
        host.run_until(|host| host.events.contains(&Event::QueuePairResumed { id: 1 }));
        host.write_and_verify(4, 8, 4);
        let second = with_chap(&host, |chap| chap.generated_identities[1].clone());
        assert_ne!(first, second);
        let expected = [None, Some(second.clone()), Some(second)];
        assert_eq!(host.target.state().identities[3..], expected);
    }
}

#[test]
fn generated_key_is_replaced_before_its_hour_is_over() {
    let mut host = host_with_target(Policy::default());
    host.connect(concatenating(Some(2))).unwrap();
    host.add_queue(16);
    let begun = host.now;
    while with_chap(&host, |chap| chap.outcomes.len()) < 2 {
        host.now = host.now.after(Span::from_ms(100));
        host.step();
        assert!(host.now.since(begun) < Span::from_secs(3600));
    }
    host.run_for(Span::from_ms(100));
    with_chap(&host, |chap| {
        assert_eq!(chap.outcomes[1].concatenation, Concatenation::ReplaceTlsPsk);
        chap.generated_identities.remove(0);
    });
    assert_eq!(host.controller().connection_stats().lost, 0);
    host.add_queue(16);
    host.write_and_verify(3, 8, 3);
    let expected = with_chap(&host, |chap| chap.generated_identities[0].clone());
    assert_eq!(host.target.state().identities.last(), Some(&Some(expected)), "of the new queue");
}

#[test]
fn controller_that_does_not_authenticate_generates_no_key() {
    let mut host = host_with_target(Policy::default());
    with_chap(&host, |chap| chap.is_announced = false);
    let (text, _) = connect_error(&mut host, concatenating(None));
    assert!(text.contains("expected it to agree on a TLS key"), "{text}");

    let mut host = SinglePathHost::new();
    let secure_channel = SecureChannelMode::Concatenate;
    let options = Options { secure_channel, ..SinglePathHost::options() };
    let (text, hint) = connect_error(&mut host, options);
    assert!(text.contains("concatenation without a secret of this host"), "{text}");
    assert!(hint.contains("dhchap=NAME"), "{hint}");
}

/// An attacker between the two connections cannot open the second one in place of the controller.
#[test]
fn secure_channel_with_a_key_that_the_target_does_not_have_is_not_opened() {
    let mut host = host_with_target(Policy::default());
    with_chap(&host, |chap| {
        chap.attacker = Some(Box::new(|_, message, _| {
            if let Ok(Message::Success1(mut success)) = Message::decode(message) {
                success.response = None;
                *message = Message::Success1(success).encode();
            }
        }));
    });
    let (text, _) = connect_error(&mut host, concatenating(Some(2)));
    assert!(text.contains("the controller did not respond"), "{text}");
    assert_eq!(host.target.state().identities, [None]);
}
