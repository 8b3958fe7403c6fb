//! Host that authenticates, for the tests of authentication.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use tenmil_base::SecureChannel;
use tenmil_nvme_auth::{
    Authenticated, ChapSecret, Concatenation, ConfiguredPsk, DhExecutor, DhJob, DhResult, Failure,
    Group, Hash, Host, HostConfig, KeyHash, Policy, Randomness, SECURITY_PROTOCOL, SecretBytes,
    Step,
};
use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::fabrics::{
    AuthenticationReceive, AuthenticationSend, CNTLID_DYNAMIC, ConnectData, Connected,
};
use tenmil_wire::register::offset;
use tenmil_wire::{IoOpcode, Status, TypedCommand};

use super::test_target::{
    ENABLED, HOST, NQN, TestTarget, admin_config, admin_connect, connect_data, io_config,
    io_connect, pattern, read_or_write_command, service_limits,
};
use crate::tcp::{
    AllowedHosts, HostKeys, NamedKey, SubsystemExportConfig, SubsystemExportUpdate,
    SubsystemSecurity,
};

/// Length of the buffer of Authentication Receive.
pub(super) const BUFFER_BYTES: u32 = 4096;

/// Deterministic bytes for secrets and challenges.
pub(super) fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let block = |index: u64| {
        let seed = [seed.to_le_bytes(), index.to_le_bytes()].concat();
        Hash::Sha512.digest(&seed).expose().to_vec()
    };
    (0..).flat_map(block).take(len).collect()
}

pub(super) fn randomness(seed: u64) -> Randomness {
    Randomness::new(random_bytes(seed, Randomness::BYTES).as_slice().try_into().unwrap())
}

pub(super) fn secret(seed: u64) -> ChapSecret {
    let transform = KeyHash::Transform(Hash::Sha256);
    ChapSecret::generate(transform, SecretBytes::new(random_bytes(seed, 32))).unwrap()
}

pub(super) fn named_secret(seed: u64) -> NamedKey<ChapSecret> {
    NamedKey::new(format!("chap-{seed}"), secret(seed))
}

/// Secret of the host, and of the controller.
pub(super) const OF_HOST: u64 = 1;
pub(super) const OF_CONTROLLER: u64 = 2;

/// A policy whose exchanges need no exponentiation.
pub(super) fn fast_policy() -> Policy {
    Policy { hashes: vec![Hash::Sha256], groups: vec![Group::Null], ..Policy::default() }
}

pub(super) fn host_keys(secrets: &[u64]) -> HostKeys {
    HostKeys {
        chap_secrets: secrets.iter().copied().map(named_secret).collect(),
        controller_secret: Some(named_secret(OF_CONTROLLER)),
        ..HostKeys::default()
    }
}

/// Security of a subsystem whose host must authenticate.
pub(super) fn security(secrets: &[u64]) -> SubsystemSecurity {
    SubsystemSecurity {
        hosts: BTreeMap::from([(HOST.to_owned(), host_keys(secrets))]),
        policy: fast_policy(),
        ..SubsystemSecurity::default()
    }
}

pub(super) fn psk(seed: u64) -> ConfiguredPsk {
    let transform = KeyHash::Transform(Hash::Sha256);
    ConfiguredPsk::generate(transform, SecretBytes::new(random_bytes(seed, 32))).unwrap()
}

/// Security with pre-shared keys of the host, for which TLS is required.
pub(super) fn with_psks(seeds: &[u64]) -> SubsystemSecurity {
    let named_psk = |seed: &u64| NamedKey::new(format!("tls-{seed}"), psk(*seed));
    let keys = HostKeys { psks: seeds.iter().map(named_psk).collect(), ..HostKeys::default() };
    SubsystemSecurity {
        hosts: BTreeMap::from([(HOST.to_owned(), keys)]),
        secure_channel_required: true,
        ..SubsystemSecurity::default()
    }
}

pub(super) fn secured_target(security: SubsystemSecurity) -> TestTarget {
    TestTarget::with_options(service_limits(), |config| SubsystemExportConfig {
        security,
        ..config
    })
}

pub(super) fn host_config() -> HostConfig {
    HostConfig {
        host_nqn: HOST.to_owned(),
        subsystem_nqn: NQN.to_owned(),
        host_secret: secret(OF_HOST),
        controller_secrets: Vec::new(),
        concatenation: Concatenation::None,
        policy: fast_policy(),
    }
}

/// How an exchange ended for the host.
#[derive(Debug)]
pub(super) enum ExchangeResult {
    Authenticated(Authenticated),
    #[expect(dead_code, reason = "for messages of tests")]
    Failed(Failure),
    /// The target has rejected a command.
    Rejected(Status),
    /// The target has ended the connection.
    Disconnected,
}

impl ExchangeResult {
    pub(super) fn outcome(self) -> Authenticated {
        match self {
            Self::Authenticated(outcome) => outcome,
            other => panic!("{other:?}"),
        }
    }
}

impl TestTarget {
    /// Replaces the security of the subsystem, and lets the connections notice it.
    pub(super) fn set_security(&mut self, security: SubsystemSecurity) {
        let update = SubsystemExportUpdate {
            hosts: AllowedHosts::Any,
            ports: BTreeMap::from([(1, Vec::new())]),
            masks: BTreeMap::new(),
            security,
        };
        assert!(self.service.update_export(NQN, update), "it is exported");
        self.run_until_idle();
    }

    /// Replaces the security of the discovery service, and lets the connections notice it.
    pub(super) fn set_discovery_security(&mut self, security: SubsystemSecurity) {
        self.service.set_discovery_security(security);
        self.run_until_idle();
    }

    /// Writes a block through an I/O queue.
    pub(super) fn write_block(&mut self, io: usize, seed: u32) -> Status {
        let command = read_or_write_command(IoOpcode::Write.code(), 0, 8);
        let bytes = pattern(seed, 4096);
        self.execute_command(io, &command, DataDirection::FromHost(4096), &bytes).0.status()
    }

    /// Sends a message; returns the status, or `None` if the connection has ended.
    pub(super) fn send_message(&mut self, line: usize, message: &[u8]) -> Option<Status> {
        self.lines[line].pipe.as_ref()?;
        let tl = u32::try_from(message.len()).unwrap();
        let send = AuthenticationSend { spsp0: 1, spsp1: 1, secp: SECURITY_PROTOCOL, tl };
        let data = DataDirection::FromHost(tl);
        let tag = self.lines[line].submit(&send.to_command(), data, message);
        self.run_until_idle();
        self.lines[line].done.remove(&tag).map(|(completion, _)| completion.status())
    }

    /// Submits an Authentication Receive; returns its tag.
    pub(super) fn submit_receive(&mut self, line: usize) -> u16 {
        let receive =
            AuthenticationReceive { spsp0: 1, spsp1: 1, secp: SECURITY_PROTOCOL, al: BUFFER_BYTES };
        let data = DataDirection::ToHost(BUFFER_BYTES);
        let tag = self.lines[line].submit(&receive.to_command(), data, &[]);
        self.run_until_idle();
        tag
    }

    /// Receives a message; the status, or `None` if the connection has ended.
    pub(super) fn receive_message(&mut self, line: usize) -> Option<Result<Vec<u8>, Status>> {
        self.lines[line].pipe.as_ref()?;
        let tag = self.submit_receive(line);
        let (completion, bytes) = self.lines[line].done.remove(&tag)?;
        let status = completion.status();
        Some(if status.is_success() { Ok(bytes) } else { Err(status) })
    }

    /// Runs an exchange to its end. `alter` may change each message, which it gets with its number.
    pub(super) fn run_exchange(
        &mut self,
        line: usize,
        host: &mut Host,
        seed: u64,
        alter: &mut dyn FnMut(usize, &mut Vec<u8>),
    ) -> ExchangeResult {
        let mut number = 0;
        let mut altered = |message: &mut Vec<u8>| {
            alter(number, message);
            number += 1;
        };
        let mut message = host.start(randomness(seed));
        loop {
            altered(&mut message);
            match self.send_message(line, &message) {
                Some(Status::SUCCESS) => {}
                Some(status) => return ExchangeResult::Rejected(status),
                None => return ExchangeResult::Disconnected,
            }
            let mut received = match self.receive_message(line) {
                Some(Ok(received)) => received,
                Some(Err(status)) => return ExchangeResult::Rejected(status),
                None => return ExchangeResult::Disconnected,
            };
            altered(&mut received);
            let mut step = host.handle_message(&received);
            if let Step::Compute(job) = step {
                step = host.handle_dh_result(job.run()).unwrap();
            }
            match step {
                Step::Message(next) => message = next,
                Step::Authenticated { message: None, outcome } => {
                    return ExchangeResult::Authenticated(outcome);
                }
                Step::Authenticated { message: Some(mut last), outcome } => {
                    altered(&mut last);
                    return match self.send_message(line, &last) {
                        Some(Status::SUCCESS) => ExchangeResult::Authenticated(outcome),
                        Some(status) => ExchangeResult::Rejected(status),
                        None => ExchangeResult::Disconnected,
                    };
                }
                Step::Failed { message, failure } => {
                    if let Some(message) = message {
                        self.send_message(line, &message);
                    }
                    return ExchangeResult::Failed(failure);
                }
                Step::Compute(_) => panic!("one job leads to another"),
            }
        }
    }

    /// Authenticates a queue.
    pub(super) fn authenticate(&mut self, line: usize, config: HostConfig) -> ExchangeResult {
        let mut host = Host::new(config).unwrap();
        self.run_exchange(line, &mut host, line as u64, &mut |_, _| {})
    }

    /// Opens an admin connection and sends Connect; returns the line and dword 0.
    pub(super) fn connect_unauthenticated(&mut self) -> (usize, Connected) {
        let line = self.open_connection(admin_config());
        let completion =
            self.execute_connect(line, &admin_connect(), &connect_data(CNTLID_DYNAMIC));
        assert_eq!(completion.status(), Status::SUCCESS);
        (line, Connected(completion.dw0()))
    }

    /// Connects and authenticates an admin queue, and enables its controller.
    pub(super) fn connect_authenticated_admin(&mut self, config: HostConfig) -> (usize, u16) {
        let (line, connected) = self.connect_unauthenticated();
        assert!(connected.authentication_required());
        self.authenticate(line, config).outcome();
        assert_eq!(self.set_property(line, offset::CC, ENABLED).status(), Status::SUCCESS);
        (line, connected.cntlid())
    }

    /// Connects and authenticates an I/O queue.
    pub(super) fn connect_authenticated_io(
        &mut self,
        (cntlid, qid): (u16, u16),
        config: HostConfig,
    ) -> usize {
        let line = self.open_connection(io_config());
        let completion = self.execute_connect(line, &io_connect(qid), &connect_data(cntlid));
        assert_eq!(completion.status(), Status::SUCCESS);
        assert!(Connected(completion.dw0()).authentication_required());
        self.authenticate(line, config).outcome();
        line
    }

    /// Connects over TLS with an identity; returns the line and the completion.
    pub(super) fn connect_over_tls(
        &mut self,
        identity: &str,
        qid: u16,
        data: &ConnectData,
    ) -> (usize, tenmil_wire::Completion) {
        self.traits.channel = Some(SecureChannel {
            cipher_suite: "TLS_AES_128_GCM_SHA256",
            psk_identity: Some(identity.to_owned()),
        });
        let (config, connect) = match qid {
            0 => (admin_config(), admin_connect()),
            qid => (io_config(), io_connect(qid)),
        };
        let line = self.open_connection(config);
        self.traits.channel = None;
        let completion = self.execute_connect(line, &connect, data);
        (line, completion)
    }

    /// Ends all connections of hosts, and checks that everything is released.
    pub(super) fn end_all(&mut self) {
        self.lines.clear();
        self.assert_all_released();
    }
}

/// Executor that keeps its jobs until they are run.
#[derive(Default)]
pub(super) struct DeferredDhExecutor {
    jobs: Mutex<Vec<DeferredJob>>,
}

type DeferredJob = (DhJob, Box<dyn FnOnce(DhResult) + Send>);

impl DeferredDhExecutor {
    pub(super) fn install(rig: &TestTarget) -> Arc<Self> {
        let executor = Arc::new(Self::default());
        rig.service.set_dh_executor(executor.clone());
        executor
    }

    pub(super) fn count(&self) -> usize {
        self.jobs.lock().unwrap().len()
    }

    pub(super) fn run_all(&self) {
        while let Some((job, done)) = self.take() {
            done(job.run());
        }
    }

    /// Runs the job that has waited the longest.
    pub(super) fn run_oldest(&self) {
        let (job, done) = self.jobs.lock().unwrap().remove(0);
        done(job.run());
    }

    /// Runs the job that was added last.
    pub(super) fn run_newest(&self) {
        let (job, done) = self.take().expect("there is a job");
        done(job.run());
    }

    pub(super) fn drop_all(&self) {
        while self.take().is_some() {}
    }

    fn take(&self) -> Option<DeferredJob> {
        self.jobs.lock().unwrap().pop()
    }
}

impl DhExecutor for DeferredDhExecutor {
    fn execute(&self, job: DhJob, done: Box<dyn FnOnce(DhResult) + Send>) {
        self.jobs.lock().unwrap().push((job, done));
    }
}
