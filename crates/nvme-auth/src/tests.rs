//! Both ends against each other, against published vectors, and against OpenSSL.

mod codec;
mod exchange;
mod known_answers;
mod openssl;
mod secrets;
mod tampering;
mod text;

use crate::{
    Authenticated, ChapSecret, Concatenation, Controller, ControllerConfig, Failure, Group, Hash,
    Host, HostConfig, KeyHash, Policy, Randomness, SecretBytes, Step,
};

const HOST_NQN: &str = "nqn.2014-08.org.example:host";
const SUBSYSTEM_NQN: &str = "nqn.2014-08.org.example:subsystem";

/// Bytes that look random and derive from a seed.
fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let block = |index: u64| {
        let seed = [seed.to_le_bytes(), index.to_le_bytes()].concat();
        Hash::Sha512.digest(&seed).expose().to_vec()
    };
    (0..).flat_map(block).take(len).collect()
}

fn randomness(seed: u64) -> Randomness {
    let bytes = random_bytes(seed, Randomness::BYTES);
    Randomness::new(bytes.as_slice().try_into().unwrap())
}

fn secret(seed: u64) -> ChapSecret {
    let transform = KeyHash::Transform(Hash::Sha256);
    ChapSecret::generate(transform, SecretBytes::new(random_bytes(seed, 32))).unwrap()
}

fn hex(digits: &str) -> Vec<u8> {
    let digits: Vec<u8> = digits
        .chars()
        .filter_map(|digit| digit.to_digit(16))
        .map(|digit| u8::try_from(digit).unwrap())
        .collect();
    digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

/// Parameters of an exchange.
#[derive(Clone, Copy, Debug)]
struct Case {
    hash: Hash,
    group: Group,
    bidirectional: bool,
    concatenation: Concatenation,
}

const HOST_SECRET: u64 = 1001;
const CONTROLLER_SECRET: u64 = 1002;

impl Case {
    fn host_config(self) -> HostConfig {
        HostConfig {
            host_nqn: HOST_NQN.to_owned(),
            subsystem_nqn: SUBSYSTEM_NQN.to_owned(),
            host_secret: secret(HOST_SECRET),
            controller_secrets: self
                .bidirectional
                .then(|| secret(CONTROLLER_SECRET))
                .into_iter()
                .collect(),
            concatenation: self.concatenation,
            policy: self.policy(),
        }
    }

    fn controller_config(self) -> ControllerConfig {
        ControllerConfig {
            host_nqn: HOST_NQN.to_owned(),
            subsystem_nqn: SUBSYSTEM_NQN.to_owned(),
            host_secrets: vec![secret(HOST_SECRET)],
            controller_secret: Some(secret(CONTROLLER_SECRET)),
            admin_queue: true,
            secure_channel: self.concatenation == Concatenation::ReplaceTlsPsk,
            policy: self.policy(),
        }
    }

    fn policy(self) -> Policy {
        Policy { hashes: vec![self.hash], groups: vec![self.group], ..Policy::default() }
    }

    fn ends(self) -> (Host, Controller) {
        let host = Host::new(self.host_config()).unwrap();
        (host, Controller::new(self.controller_config()).unwrap())
    }
}

/// What an exchange ended with, and the messages as they were delivered.
#[derive(Debug, Default)]
struct Run {
    host: Option<Result<Authenticated, Failure>>,
    controller: Option<Result<Authenticated, Failure>>,
    messages: Vec<Vec<u8>>,
}

impl Run {
    fn both_authenticated(&self) -> Option<(&Authenticated, &Authenticated)> {
        let host = self.host.as_ref()?.as_ref().ok()?;
        Some((host, self.controller.as_ref()?.as_ref().ok()?))
    }

    fn host_failure(&self) -> &Failure {
        self.host.as_ref().unwrap().as_ref().unwrap_err()
    }

    fn controller_failure(&self) -> &Failure {
        self.controller.as_ref().unwrap().as_ref().unwrap_err()
    }
}

/// Runs an exchange to its end. `alter` changes a message on its way.
fn run_altered(
    (host, controller): &mut (Host, Controller),
    seed: u64,
    mut alter: impl FnMut(usize, &mut Vec<u8>),
) -> Run {
    let mut run = Run::default();
    let mut next = Some(host.start(randomness(2 * seed)));
    while let Some(mut message) = next.take() {
        let index = run.messages.len();
        alter(index, &mut message);
        run.messages.push(message.clone());
        let (step, outcome) = if index % 2 == 0 {
            let mut step = controller.handle_message(&message, || randomness(2 * seed + 1));
            while let Step::Compute(job) = step {
                step = controller.handle_dh_result(job.run()).unwrap();
            }
            (step, &mut run.controller)
        } else {
            let mut step = host.handle_message(&message);
            while let Step::Compute(job) = step {
                step = host.handle_dh_result(job.run()).unwrap();
            }
            (step, &mut run.host)
        };
        next = match step {
            Step::Compute(_) => unreachable!("jobs have run"),
            Step::Message(message) => Some(message),
            Step::Authenticated { message, outcome: authenticated } => {
                *outcome = Some(Ok(authenticated));
                message
            }
            Step::Failed { message, failure } => {
                *outcome = Some(Err(failure));
                message
            }
        };
    }
    run
}

fn run(ends: &mut (Host, Controller), seed: u64) -> Run {
    run_altered(ends, seed, |_, _| ())
}
