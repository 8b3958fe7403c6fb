//! Host of a DH-HMAC-CHAP exchange.
//!
//! ```text
//!  start             ──► Authentication Send     NEGOTIATE
//!  handle_message    ◄── Authentication Receive  CHALLENGE
//!  (DhJob)           ──► Authentication Send     REPLY
//!  handle_message    ◄── Authentication Receive  SUCCESS1 or FAILURE1
//!  bidirectional     ──► Authentication Send     SUCCESS2
//!  or on an error    ──► Authentication Send     FAILURE2
//! ```

use crate::dh::{check_public_value, pad};
use crate::exchange::{Counters, OwnChallenges, check_names, matching_response};
use crate::message::{Challenge, DescriptorLists, FailureMessage, Negotiate, Reply, Success1};
use crate::response::{NumberedChallenge, Transcript};
use crate::{
    Authenticated, ChapSecret, Concatenation, ConfigError, DhJob, DhResult, Failure, FailureReason,
    Group, Hash, Message, Policy, Randomness, SecretBytes, Step,
};

/// Configuration of a host.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// NQN of the host.
    pub host_nqn: String,
    /// NQN of the subsystem.
    pub subsystem_nqn: String,
    /// Secret of the host.
    pub host_secret: ChapSecret,
    /// Secrets of the controller, of which it must prove that it has one. Empty: it need not prove
    /// anything.
    pub controller_secrets: Vec<ChapSecret>,
    /// Secure channel concatenation, on an admin queue only.
    pub concatenation: Concatenation,
    /// What is offered and required.
    pub policy: Policy,
}

/// Host of an exchange, for one queue of one connection. After an exchange it can begin another one,
/// for re-authentication.
#[derive(Debug)]
pub struct Host {
    config: HostConfig,
    state: State,
    transaction: u16,
    counters: Counters,
    own_challenges: OwnChallenges,
}

#[derive(Debug)]
enum State {
    Idle,
    AwaitingChallenge(Randomness),
    AwaitingDhResult(u64, Box<Challenged>),
    AwaitingSuccess1(Box<Replied>),
}

/// A challenge that was accepted.
#[derive(Debug)]
struct Challenged {
    hash: Hash,
    group: Group,
    c1: NumberedChallenge,
    randomness: Randomness,
}

/// A reply that was sent.
#[derive(Debug)]
struct Replied {
    outcome: Authenticated,
    /// R2 for each secret of the controller; empty unless the exchange is bidirectional.
    expected: Vec<SecretBytes>,
}

impl Host {
    /// Creates a host.
    ///
    /// # Errors
    ///
    /// If a name is not valid, or the policy leaves no hash function or group for the exchange, or
    /// requires a secret of the controller that is absent.
    pub fn new(config: HostConfig) -> Result<Self, ConfigError> {
        check(&config)?;
        let (counters, own_challenges) = Default::default();
        Ok(Self { config, state: State::Idle, transaction: 0, counters, own_challenges })
    }

    /// Replaces the configuration, for example with other secrets, from the next exchange on. An
    /// exchange that is not complete is abandoned. Transaction and sequence numbers go on.
    ///
    /// # Errors
    ///
    /// As of [`Self::new`]; the configuration then stays as it is.
    pub fn set_config(&mut self, config: HostConfig) -> Result<(), ConfigError> {
        check(&config)?;
        (self.config, self.state) = (config, State::Idle);
        Ok(())
    }

    /// Begins an exchange, and abandons one that is not complete. Returns the first message.
    pub fn start(&mut self, randomness: Randomness) -> Vec<u8> {
        self.transaction = self.transaction.wrapping_add(1);
        self.state = State::AwaitingChallenge(randomness);
        let HostConfig { policy, concatenation, .. } = &self.config;
        let lists = DescriptorLists {
            hashes: policy.hashes_for(*concatenation).map(Hash::id).collect(),
            groups: policy.groups_for(*concatenation).map(Group::id).collect(),
        };
        let (transaction, concatenation) = (self.transaction, concatenation.code());
        Message::Negotiate(Negotiate { transaction, concatenation, dhchap: Some(lists) }).encode()
    }

    /// Handles a message of the controller.
    pub fn handle_message(&mut self, bytes: &[u8]) -> Step {
        let state = core::mem::replace(&mut self.state, State::Idle);
        let message = match Message::decode(bytes) {
            Ok(Message::Failure1(FailureMessage { reason, .. })) => {
                let failure = Failure::by_peer(reason.code());
                return Step::Failed { message: None, failure };
            }
            Ok(message) => message,
            Err(error) => return self.fail(Failure::local(error.reason(), error)),
        };
        let found = message.transaction();
        let step = match (state, message) {
            (State::AwaitingChallenge(randomness), Message::Challenge(challenge)) => self
                .check_transaction(found)
                .and_then(|()| self.handle_challenge(challenge, randomness)),
            (State::AwaitingSuccess1(replied), Message::Success1(success)) => self
                .check_transaction(found)
                .and_then(|()| self.handle_success1(&success, *replied)),
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
            State::AwaitingDhResult(serial, challenged) if serial == result.serial => {
                let session_key =
                    result.shared_secret.map(|secret| challenged.hash.digest(secret.expose()));
                let public_value = result.public_value.unwrap_or_default();
                Some(self.reply(*challenged, session_key, public_value))
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

    fn handle_challenge(
        &mut self,
        challenge: Challenge,
        randomness: Randomness,
    ) -> Result<Step, Failure> {
        let (hash, group) = self.check_challenge(&challenge)?;
        let Challenge { sequence, challenge, public_value, .. } = challenge;
        let c1 = NumberedChallenge { challenge, sequence };
        let challenged = Challenged { hash, group, c1, randomness };
        if group == Group::Null {
            return Ok(self.reply(challenged, None, Vec::new()));
        }
        let serial = self.counters.next_serial();
        let exponent = challenged.randomness.exponent();
        self.state = State::AwaitingDhResult(serial, Box::new(challenged));
        Ok(Step::Compute(DhJob::new(group, exponent, true, Some(public_value), serial)))
    }

    fn check_challenge(&self, challenge: &Challenge) -> Result<(Hash, Group), Failure> {
        let HostConfig { policy, concatenation, .. } = &self.config;
        let hash = policy
            .hashes_for(*concatenation)
            .find(|hash| hash.id() == challenge.hash)
            .ok_or_else(|| not_offered(FailureReason::HashNotUsable, "hash", challenge.hash))?;
        let group = policy
            .groups_for(*concatenation)
            .find(|group| group.id() == challenge.group)
            .ok_or_else(|| {
            not_offered(FailureReason::GroupNotUsable, "group", challenge.group)
        })?;
        let (found, expected) = (challenge.challenge.len(), hash.len_bytes());
        let malformed = |detail| Failure::local(FailureReason::IncorrectPayload, detail);
        if found != expected {
            return Err(malformed(format!(
                "challenge of {hash} has {found} bytes, expected {expected}"
            )));
        }
        if self.own_challenges.contains(&challenge.challenge) {
            let detail = "the challenge is one of this host, sent back";
            return Err(Failure::local(FailureReason::AuthenticationFailed, detail));
        }
        match group {
            Group::Null if challenge.public_value.is_empty() => {}
            Group::Null => {
                let found = challenge.public_value.len();
                let detail = format!("public value of group null has {found} bytes, expected none");
                return Err(malformed(detail));
            }
            _ => check_public_value(group, &challenge.public_value)
                .map_err(|error| malformed(error.to_string()))?,
        }
        Ok((hash, group))
    }

    /// Sends R1, and C2 if the controller is to respond or a PSK is to be generated.
    fn reply(
        &mut self,
        challenged: Challenged,
        session_key: Option<SecretBytes>,
        public_value: Vec<u8>,
    ) -> Step {
        let Challenged { hash, group, c1, randomness } = challenged;
        let bidirectional = !self.config.controller_secrets.is_empty();
        let concatenation = self.config.concatenation;
        let transcript =
            Transcript { hash, transaction: self.transaction, concatenation, session_key };
        let sequence = if bidirectional { self.counters.next_sequence(&randomness) } else { 0 };
        let c2 = NumberedChallenge { challenge: randomness.challenge(hash), sequence };
        let config = &self.config;
        let (host_nqn, subsystem_nqn) = (&config.host_nqn, &config.subsystem_nqn);
        let key = config.host_secret.response_key(host_nqn);
        let response = transcript.host_response(&key, &c1, host_nqn, subsystem_nqn);
        let expected = config.controller_secrets.iter().map(|secret| {
            let key = secret.response_key(subsystem_nqn);
            transcript.controller_response(&key, &c2, host_nqn, subsystem_nqn)
        });
        let expected = expected.collect();
        let generated_psk = concatenation
            .generates_psk()
            .then(|| transcript.generated_psk(&c1.challenge, &c2.challenge))
            .flatten();
        let challenge = (bidirectional || concatenation.generates_psk()).then_some(c2.challenge);
        if let Some(challenge) = &challenge {
            self.own_challenges.record(challenge);
        }
        let outcome = Authenticated {
            hash,
            group,
            bidirectional,
            peer_secret: None,
            concatenation,
            generated_psk,
        };
        self.state = State::AwaitingSuccess1(Box::new(Replied { outcome, expected }));
        let public_value = pad(&public_value, group.len_bytes());
        let transaction = self.transaction;
        let reply = Reply { transaction, sequence, response, challenge, public_value };
        Step::Message(Message::Reply(reply).encode())
    }

    fn handle_success1(&self, success: &Success1, replied: Replied) -> Result<Step, Failure> {
        let Replied { mut outcome, expected } = replied;
        let (found, hash_len) = (usize::from(success.hash_len_bytes), outcome.hash.len_bytes());
        let malformed = |detail: &str| Failure::local(FailureReason::IncorrectPayload, detail);
        if found != hash_len {
            let detail = format!("hash length is {found}, expected {hash_len}");
            return Err(malformed(&detail));
        }
        if !outcome.bidirectional {
            if success.response.is_some() {
                return Err(malformed("the controller responds to no challenge"));
            }
            return Ok(Step::Authenticated { message: None, outcome });
        }
        let failed = |detail: &str| Failure::local(FailureReason::AuthenticationFailed, detail);
        let response =
            success.response.as_ref().ok_or_else(|| failed("the controller did not respond"))?;
        let matching = matching_response(&expected, response)
            .ok_or_else(|| failed("the response of the controller does not match its secret"))?;
        outcome.peer_secret = Some(matching);
        let message = Message::Success2 { transaction: self.transaction }.encode();
        Ok(Step::Authenticated { message: Some(message), outcome })
    }

    fn fail(&mut self, failure: Failure) -> Step {
        self.state = State::Idle;
        let (transaction, reason) = (self.transaction, failure.reason);
        let message = Message::Failure2(FailureMessage { transaction, reason }).encode();
        Step::Failed { message: Some(message), failure }
    }
}

impl State {
    const fn awaited(&self) -> &'static str {
        match self {
            Self::Idle => "no message",
            Self::AwaitingChallenge(_) => "CHALLENGE",
            Self::AwaitingDhResult(..) => "no message before the reply",
            Self::AwaitingSuccess1(_) => "SUCCESS1",
        }
    }
}

fn not_offered(reason: FailureReason, what: &str, id: u8) -> Failure {
    Failure::local(reason, format!("controller selected {what} {id:02x}, which was not offered"))
}

/// Whether an end can be configured so.
fn check(config: &HostConfig) -> Result<(), ConfigError> {
    check_names(&config.host_nqn, &config.subsystem_nqn)?;
    let HostConfig { policy, concatenation, .. } = config;
    if policy.hashes_for(*concatenation).next().is_none() {
        return Err(ConfigError::NoHash);
    }
    if policy.groups_for(*concatenation).next().is_none() {
        return Err(ConfigError::NoGroup);
    }
    if policy.bidirectional_required && config.controller_secrets.is_empty() {
        return Err(ConfigError::NoControllerSecret);
    }
    Ok(())
}
