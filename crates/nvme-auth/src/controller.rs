//! Controller of a DH-HMAC-CHAP exchange.
//!
//! ```text
//!  Authentication Send     NEGOTIATE  ──► handle_message
//!  Authentication Receive  CHALLENGE  ◄── (DhJob)
//!  Authentication Send     REPLY      ──► handle_message
//!  Authentication Receive  SUCCESS1   ◄── (DhJob)           or FAILURE1
//!  Authentication Send     SUCCESS2   ──► handle_message    if bidirectional, or FAILURE2
//! ```

use crate::dh::{check_public_value, pad};
use crate::exchange::{Counters, OwnChallenges, check_names, matching_response};
use crate::message::{Challenge, FailureMessage, Negotiate, Reply, Success1};
use crate::response::{NumberedChallenge, Transcript};
use crate::{
    Authenticated, ChapSecret, Concatenation, ConcatenationPolicy, ConfigError, DhJob, DhResult,
    Failure, FailureReason, Group, Hash, Message, Policy, Randomness, SecretBytes, Step,
};

/// Configuration of a controller, for one host.
#[derive(Clone, Debug)]
pub struct ControllerConfig {
    /// NQN of the host.
    pub host_nqn: String,
    /// NQN of the subsystem.
    pub subsystem_nqn: String,
    /// Secrets of the host, of which it must prove that it has one. Several allow for rotation.
    pub host_secrets: Vec<ChapSecret>,
    /// Secret of the controller. Without it, a host that requests a proof is refused.
    pub controller_secret: Option<ChapSecret>,
    /// Whether the queue is an admin queue. Concatenation is refused on others.
    pub admin_queue: bool,
    /// Whether the connection is a TLS connection.
    pub secure_channel: bool,
    /// What is accepted and required.
    pub policy: Policy,
}

/// Controller of an exchange, for one queue of one connection. A host can begin another exchange at
/// any time, for re-authentication.
#[derive(Debug)]
pub struct Controller {
    config: ControllerConfig,
    state: State,
    transaction: u16,
    counters: Counters,
    own_challenges: OwnChallenges,
}

#[derive(Debug)]
enum State {
    Idle,
    AwaitingPublicValue(u64, Box<Negotiated>),
    AwaitingReply(Box<Challenging>),
    AwaitingSharedSecret(u64, Box<Challenging>, Box<Reply>),
    AwaitingSuccess2(Box<Authenticated>),
}

/// Parameters that were selected from an offer.
#[derive(Debug)]
struct Negotiated {
    concatenation: Concatenation,
    hash: Hash,
    group: Group,
    randomness: Randomness,
}

/// A challenge that was sent.
#[derive(Debug)]
struct Challenging {
    concatenation: Concatenation,
    hash: Hash,
    group: Group,
    exponent: SecretBytes,
    public_value: Vec<u8>,
    c1: NumberedChallenge,
}

impl Controller {
    /// Creates a controller.
    ///
    /// # Errors
    ///
    /// If a name is not valid, the policy permits no hash function or no group, or a secret is
    /// absent.
    pub fn new(config: ControllerConfig) -> Result<Self, ConfigError> {
        check(&config)?;
        let (counters, own_challenges) = Default::default();
        Ok(Self { config, state: State::Idle, transaction: 0, counters, own_challenges })
    }

    /// Replaces the configuration, for example with other secrets, from the next exchange on. An
    /// exchange that is not complete is abandoned. Sequence numbers go on.
    ///
    /// # Errors
    ///
    /// As of [`Self::new`]; the configuration then stays as it is.
    pub fn set_config(&mut self, config: ControllerConfig) -> Result<(), ConfigError> {
        check(&config)?;
        (self.config, self.state) = (config, State::Idle);
        Ok(())
    }

    /// Abandons an exchange that is not complete, for example because it takes too long.
    pub fn cancel(&mut self) {
        self.state = State::Idle;
    }

    /// Handles a message of the host. `randomness` is called if it begins an exchange.
    ///
    /// While a job of the exchange is running, each message is refused, so that a host has one job
    /// at most.
    pub fn handle_message(
        &mut self,
        bytes: &[u8],
        randomness: impl FnOnce() -> Randomness,
    ) -> Step {
        let state = core::mem::replace(&mut self.state, State::Idle);
        let message = match Message::decode(bytes) {
            Ok(Message::Failure2(FailureMessage { reason, .. })) => {
                let failure = Failure::by_peer(reason.code());
                return Step::Failed { message: None, failure };
            }
            Ok(message) => message,
            Err(error) => return self.fail(Failure::local(error.reason(), error)),
        };
        let found = message.transaction();
        let step = match (state, message) {
            (
                State::Idle | State::AwaitingReply(_) | State::AwaitingSuccess2(_),
                Message::Negotiate(negotiate),
            ) => {
                self.transaction = negotiate.transaction;
                self.handle_negotiate(&negotiate, randomness)
            }
            (State::AwaitingReply(challenging), Message::Reply(reply)) => {
                self.check_transaction(found).and_then(|()| self.handle_reply(reply, challenging))
            }
            (State::AwaitingSuccess2(outcome), Message::Success2 { .. }) => self
                .check_transaction(found)
                .map(|()| Step::Authenticated { message: None, outcome: *outcome }),
            (state, message) => Err(Failure::local(
                FailureReason::IncorrectMessage,
                format!("found {}, expected {}", message.name(), state.awaited()),
            )),
        };
        step.unwrap_or_else(|failure| self.fail(failure))
    }

    /// Handles the result of a job. `None`: the job belongs to an exchange that was abandoned.
    pub fn handle_dh_result(&mut self, result: DhResult) -> Option<Step> {
        match core::mem::replace(&mut self.state, State::Idle) {
            State::AwaitingPublicValue(serial, negotiated) if serial == result.serial => {
                Some(self.challenge(*negotiated, result.public_value.unwrap_or_default()))
            }
            State::AwaitingSharedSecret(serial, challenging, reply) if serial == result.serial => {
                let session_key =
                    result.shared_secret.map(|secret| challenging.hash.digest(secret.expose()));
                let step = self.verify(*challenging, *reply, session_key);
                Some(step.unwrap_or_else(|failure| self.fail(failure)))
            }
            state => {
                self.state = state;
                None
            }
        }
    }

    fn check_transaction(&self, found: u16) -> Result<(), Failure> {
        let expected = self.transaction;
        if found == expected {
            return Ok(());
        }
        Err(Failure::local(
            FailureReason::IncorrectPayload,
            format!("found transaction {found}, expected {expected}"),
        ))
    }

    fn handle_negotiate(
        &mut self,
        negotiate: &Negotiate,
        randomness: impl FnOnce() -> Randomness,
    ) -> Result<Step, Failure> {
        let concatenation = self.check_concatenation(negotiate.concatenation)?;
        let offer = negotiate.dhchap.as_ref().ok_or_else(|| {
            let detail = "the host offers no DH-HMAC-CHAP";
            Failure::local(FailureReason::ProtocolNotUsable, detail)
        })?;
        let policy = &self.config.policy;
        let hash = policy
            .hashes_for(concatenation)
            .find(|hash| offer.hashes.contains(&hash.id()))
            .ok_or_else(|| not_usable(FailureReason::HashNotUsable, "hash", &offer.hashes))?;
        let group = policy
            .groups_for(concatenation)
            .find(|group| offer.groups.contains(&group.id()))
            .ok_or_else(|| not_usable(FailureReason::GroupNotUsable, "group", &offer.groups))?;
        let negotiated = Negotiated { concatenation, hash, group, randomness: randomness() };
        if group == Group::Null {
            return Ok(self.challenge(negotiated, Vec::new()));
        }
        let serial = self.counters.next_serial();
        let exponent = negotiated.randomness.exponent();
        self.state = State::AwaitingPublicValue(serial, Box::new(negotiated));
        Ok(Step::Compute(DhJob::new(group, exponent, true, None, serial)))
    }

    fn check_concatenation(&self, code: u8) -> Result<Concatenation, Failure> {
        let ControllerConfig { admin_queue, secure_channel, policy, .. } = &self.config;
        let mismatch = |detail: &str| {
            let detail = format!("SC_C is {code:02x}, {detail}");
            Err(Failure::local(FailureReason::ConcatenationMismatch, detail))
        };
        let Some(concatenation) = Concatenation::from_code(code) else {
            return mismatch("expected 00, 02 or 03");
        };
        let requested = concatenation.generates_psk();
        let policy = policy.concatenation;
        match concatenation {
            _ if requested && policy == ConcatenationPolicy::Refused => {
                mismatch("and concatenation is not permitted")
            }
            _ if requested && !admin_queue => mismatch("expected 00 on an I/O queue"),
            Concatenation::None
                if policy == ConcatenationPolicy::Required && *admin_queue && !secure_channel =>
            {
                mismatch("expected 02, because a secure channel is required")
            }
            Concatenation::NewTlsPsk if *secure_channel => {
                mismatch("expected 00 or 03 on a TLS connection")
            }
            Concatenation::ReplaceTlsPsk if !secure_channel => {
                mismatch("expected 00 or 02 without a TLS connection")
            }
            _ => Ok(concatenation),
        }
    }

    fn challenge(&mut self, negotiated: Negotiated, public_value: Vec<u8>) -> Step {
        let Negotiated { concatenation, hash, group, randomness } = negotiated;
        let sequence = self.counters.next_sequence(&randomness);
        let c1 = NumberedChallenge { challenge: randomness.challenge(hash), sequence };
        self.own_challenges.record(&c1.challenge);
        let message = Challenge {
            transaction: self.transaction,
            hash: hash.id(),
            group: group.id(),
            sequence,
            challenge: c1.challenge.clone(),
            public_value: pad(&public_value, group.len_bytes()),
        };
        let exponent = randomness.exponent();
        self.state = State::AwaitingReply(Box::new(Challenging {
            concatenation,
            hash,
            group,
            exponent,
            public_value,
            c1,
        }));
        Step::Message(Message::Challenge(message).encode())
    }

    fn handle_reply(
        &mut self,
        reply: Reply,
        challenging: Box<Challenging>,
    ) -> Result<Step, Failure> {
        self.check_reply(&reply, &challenging)?;
        if challenging.group == Group::Null {
            return self.verify(*challenging, reply, None);
        }
        let serial = self.counters.next_serial();
        let (group, exponent) = (challenging.group, challenging.exponent.clone());
        let peer = Some(reply.public_value.clone());
        self.state = State::AwaitingSharedSecret(serial, challenging, Box::new(reply));
        Ok(Step::Compute(DhJob::new(group, exponent, false, peer, serial)))
    }

    /// Checks what needs no secret.
    fn check_reply(&self, reply: &Reply, challenging: &Challenging) -> Result<(), Failure> {
        let malformed = |detail| Err(Failure::local(FailureReason::IncorrectPayload, detail));
        let refused =
            |detail: &str| Err(Failure::local(FailureReason::AuthenticationFailed, detail));
        let Challenging { hash, group, concatenation, public_value, .. } = challenging;
        let (found, expected) = (reply.response.len(), hash.len_bytes());
        if found != expected {
            return malformed(format!("response of {hash} has {found} bytes, expected {expected}"));
        }
        match &reply.challenge {
            Some(c2) if self.own_challenges.contains(c2) => {
                return refused("the challenge is one of this controller, sent back");
            }
            None if concatenation.generates_psk() => {
                return refused("the host sends no challenge, expected one for the TLS key");
            }
            _ => {}
        }
        if is_bidirectional(reply) {
            if self.config.controller_secret.is_none() {
                return refused("the host requests a response, and the controller has no secret");
            }
        } else if self.config.policy.bidirectional_required {
            return refused("the host requests no response, expected a challenge for both");
        }
        match group {
            Group::Null if reply.public_value.is_empty() => Ok(()),
            Group::Null => {
                let found = reply.public_value.len();
                malformed(format!("public value of group null has {found} bytes, expected none"))
            }
            _ => {
                if let Err(error) = check_public_value(*group, &reply.public_value) {
                    return malformed(error.to_string());
                }
                let len = group.len_bytes();
                if pad(&reply.public_value, len) == pad(public_value, len) {
                    return malformed("the public value is that of this controller".to_owned());
                }
                Ok(())
            }
        }
    }

    /// Compares R1, and computes R2 and the PSK.
    fn verify(
        &mut self,
        challenging: Challenging,
        reply: Reply,
        session_key: Option<SecretBytes>,
    ) -> Result<Step, Failure> {
        let Challenging { concatenation, hash, group, c1, .. } = challenging;
        let transaction = self.transaction;
        let transcript = Transcript { hash, transaction, concatenation, session_key };
        let config = &self.config;
        let (host_nqn, subsystem_nqn) = (&config.host_nqn, &config.subsystem_nqn);
        let expected = config.host_secrets.iter().map(|secret| {
            let key = secret.response_key(host_nqn);
            transcript.host_response(&key, &c1, host_nqn, subsystem_nqn)
        });
        let expected: Vec<_> = expected.collect();
        let matching = matching_response(&expected, &reply.response).ok_or_else(|| {
            let detail = "the response of the host does not match its secret";
            Failure::local(FailureReason::AuthenticationFailed, detail)
        })?;
        let bidirectional = is_bidirectional(&reply);
        let sequence = reply.sequence;
        let c2 = NumberedChallenge { challenge: reply.challenge.unwrap_or_default(), sequence };
        let secret = config.controller_secret.as_ref().filter(|_| bidirectional);
        let response = secret.map(|secret| {
            let key = secret.response_key(subsystem_nqn);
            transcript.controller_response(&key, &c2, host_nqn, subsystem_nqn)
        });
        let generated_psk = concatenation
            .generates_psk()
            .then(|| transcript.generated_psk(&c1.challenge, &c2.challenge))
            .flatten();
        let outcome = Authenticated {
            hash,
            group,
            bidirectional,
            peer_secret: Some(matching),
            concatenation,
            generated_psk,
        };
        let hash_len_bytes = u8::try_from(hash.len_bytes()).unwrap_or(u8::MAX);
        let message =
            Message::Success1(Success1 { transaction, hash_len_bytes, response }).encode();
        if bidirectional {
            self.state = State::AwaitingSuccess2(Box::new(outcome));
            return Ok(Step::Message(message));
        }
        Ok(Step::Authenticated { message: Some(message), outcome })
    }

    fn fail(&mut self, failure: Failure) -> Step {
        self.state = State::Idle;
        let (transaction, reason) = (self.transaction, failure.reason);
        let message = Message::Failure1(FailureMessage { transaction, reason }).encode();
        Step::Failed { message: Some(message), failure }
    }
}

impl State {
    const fn awaited(&self) -> &'static str {
        match self {
            Self::Idle => "NEGOTIATE",
            Self::AwaitingPublicValue(..) => "no message before the challenge",
            Self::AwaitingReply(_) => "REPLY",
            Self::AwaitingSharedSecret(..) => "no message before the result",
            Self::AwaitingSuccess2(_) => "SUCCESS2",
        }
    }
}

/// Whether a host requests a response. Sequence number 0 marks a challenge that is only for a PSK
/// (Base 2.2 §8.3.4.5.4).
const fn is_bidirectional(reply: &Reply) -> bool {
    reply.challenge.is_some() && reply.sequence != 0
}

fn not_usable(reason: FailureReason, what: &str, ids: &[u8]) -> Failure {
    let ids: Vec<_> = ids.iter().map(|id| format!("{id:02x}")).collect();
    let detail = format!("host offers {what} [{}], of which none is usable", ids.join(" "));
    Failure::local(reason, detail)
}

/// Whether an end can be configured so.
fn check(config: &ControllerConfig) -> Result<(), ConfigError> {
    check_names(&config.host_nqn, &config.subsystem_nqn)?;
    let policy = &config.policy;
    let concatenation = match policy.concatenation {
        ConcatenationPolicy::Required => Concatenation::NewTlsPsk,
        ConcatenationPolicy::Refused | ConcatenationPolicy::Allowed => Concatenation::None,
    };
    if policy.hashes_for(concatenation).next().is_none() {
        return Err(ConfigError::NoHash);
    }
    if policy.groups_for(concatenation).next().is_none() {
        return Err(ConfigError::NoGroup);
    }
    if config.host_secrets.is_empty() {
        return Err(ConfigError::NoHostSecret);
    }
    if policy.bidirectional_required && config.controller_secret.is_none() {
        return Err(ConfigError::NoControllerSecret);
    }
    Ok(())
}
