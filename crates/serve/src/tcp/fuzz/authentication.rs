//! Fuzzer of authentication: hosts with and without the secret, whose messages are altered, repeated,
//! exchanged between connections and mixed with other commands, in simulated time.
//!
//! Invariants:
//!
//! - A host without the secret has no controller, and no command of it succeeds but Connect,
//!   Authentication Send and Authentication Receive.
//! - A connection ends soon after its host falls silent.
//! - After all connections have ended, all memory, connections, controllers and jobs are released.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::{Instant, Span};
use tenmil_dma::RegionTable;
use tenmil_nvme_auth::{
    ChapSecret, Concatenation, DhExecutor, DhJob, DhResult, Group, Hash, Host, HostConfig, KeyHash,
    Policy, Randomness, SECURITY_PROTOCOL, SecretBytes, Step,
};
use tenmil_wire::fabrics::{AuthenticationReceive, AuthenticationSend};
use tenmil_wire::sgl::Descriptor;
use tenmil_wire::{AdminOpcode, Command, TypedCommand};

use super::fuzz_host::{FuzzHost, host_nqn, subsystem_nqn};
use super::simulated_stream::SimulatedStream;
use super::{TENANTS, export_subsystem};
use crate::tcp::{
    AllowedHosts, HostKeys, NamedKey, Port, PortSecurity, Service, ServiceLimits,
    SubsystemExportUpdate, SubsystemSecurity, TargetConnection,
};

/// Largest number of peers at a time, and of steps in a script.
const PEERS_MAX: usize = 4;
const STEPS_MAX: usize = 120;
/// Longest silence of a host without a controller.
const SILENCE_MAX: u64 = 45;
/// Largest buffer of Authentication Receive.
const BUFFER_BYTES: u32 = 4096;
/// Secret that hosts with a secret have, and another one.
const SECRET: u8 = 1;
const WRONG_SECRET: u8 = 9;

/// Service with its peers.
struct AuthenticationFuzz {
    regions: RegionTable,
    service: Service,
    executor: Arc<FuzzDhExecutor>,
    now: Instant,
    guests: Vec<TargetConnection>,
    peers: Vec<FuzzPeer>,
    policy: Policy,
    /// Messages that were sent or received on any connection.
    recorded: Vec<Vec<u8>>,
    seed: u8,
}

/// Host of one connection.
struct FuzzPeer {
    connection: FuzzHost,
    host: Host,
    has_secret: bool,
    /// Commands that may succeed without a controller.
    permitted: BTreeSet<u16>,
}

/// Keeps the jobs until a step runs or drops them.
#[derive(Default)]
struct FuzzDhExecutor {
    jobs: Mutex<Vec<QueuedJob>>,
}

type QueuedJob = (DhJob, Box<dyn FnOnce(DhResult) + Send>);

impl DhExecutor for FuzzDhExecutor {
    fn execute(&self, job: DhJob, done: Box<dyn FnOnce(DhResult) + Send>) {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner).push((job, done));
    }
}

impl FuzzDhExecutor {
    fn take(&self) -> Option<QueuedJob> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }
}

/// Script, consumed from the front; zero at its end.
struct ScriptBytes<'a>(&'a [u8]);

impl ScriptBytes<'_> {
    fn next_byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn next_bytes(&mut self) -> Vec<u8> {
        let count = usize::from(self.next_byte()).min(self.0.len());
        let (bytes, rest) = self.0.split_at(count);
        self.0 = rest;
        bytes.to_vec()
    }

    /// Alters a message in a third of the cases.
    fn alter(&mut self, message: &mut Vec<u8>) {
        let (how, at, value) = (self.next_byte(), self.next_byte(), self.next_byte());
        let Some(last) = message.len().checked_sub(1) else { return };
        match how % 6 {
            0 => message[usize::from(at) % (last + 1)] ^= value,
            1 => message.truncate(usize::from(at).min(last).max(1)),
            _ => {}
        }
    }
}

/// Executes a script of authentication messages.
///
/// # Panics
///
/// If an invariant is violated: a bug of this crate, whatever the bytes are.
pub fn fuzz_nvme_tcp_authentication(bytes: &[u8]) {
    let mut script = ScriptBytes(bytes);
    let mut world = AuthenticationFuzz::new(script.next_byte());
    for _ in 0..STEPS_MAX {
        if script.0.is_empty() {
            break;
        }
        let (kind, whom) = (script.next_byte(), usize::from(script.next_byte()));
        world.execute_step(kind % 11, whom, &mut script);
        world.poll_until_idle();
        world.check_strangers();
    }
    world.close_and_check_released();
}

/// Scripts that reach deep states: complete exchanges, with and without the secret.
#[must_use]
pub fn authentication_seed_scripts() -> Vec<(&'static str, Vec<u8>)> {
    // Of one peer: Connect, NEGOTIATE, Receive, REPLY, Receive, SUCCESS2, and a command.
    let exchange = |kind: u8, opened: u8| {
        let run = [7, 0, 0];
        let steps: [&[u8]; 10] = [
            &[kind, 0, 0, opened],
            &[1, 0, 5, 0, 0],
            &run,
            &[3, 0, 0],
            &[2, 0, 5, 0, 0],
            &run,
            &[3, 0, 0],
            &[2, 0, 5, 0, 0],
            &[5, 0, 6, 0],
            &[1, 0, 5, 0, 0],
        ];
        steps.concat()
    };
    vec![
        ("null-group", exchange(0, 1)),
        ("group", exchange(1, 1)),
        ("both-directions", exchange(2, 3)),
        ("concatenation", exchange(5, 5)),
        ("without-the-secret", exchange(0, 0)),
    ]
}

fn secret(number: u8) -> ChapSecret {
    let bytes = SecretBytes::new(vec![number; 32]);
    ChapSecret::generate(KeyHash::None, bytes).expect("it has 32 bytes")
}

fn security(number: u8, policy: &Policy) -> SubsystemSecurity {
    let keys = HostKeys {
        chap_secrets: vec![NamedKey::new("host", secret(number))],
        controller_secret: Some(NamedKey::new("controller", secret(number + 100))),
        psks: Vec::new(),
        ..HostKeys::default()
    };
    SubsystemSecurity {
        hosts: BTreeMap::from([(host_nqn(0), keys)]),
        policy: policy.clone(),
        ..SubsystemSecurity::default()
    }
}

impl AuthenticationFuzz {
    /// Bit 0 of `how` selects a group with jobs.
    fn new(how: u8) -> Self {
        let regions = RegionTable::new(16);
        let limits = ServiceLimits {
            memory_bytes: 220 << 10,
            connections_max: PEERS_MAX,
            queue_entries: 9,
            transfer_bytes_max: 32 << 10,
            ..ServiceLimits::default()
        };
        let service = Service::new(&regions, limits).expect("the limits make sense");
        let security_of_port =
            if how & 4 == 0 { PortSecurity::Plaintext } else { PortSecurity::TlsAllowed };
        service.add_port(1, Port { security: security_of_port, ..Port::default() });
        for tenant in 0..TENANTS {
            export_subsystem(&regions, &service, tenant);
        }
        let groups = if how & 1 == 0 { vec![Group::Null] } else { vec![Group::Ffdhe2048] };
        let policy = Policy { hashes: Hash::ALL.to_vec(), groups, ..Policy::default() };
        let executor = Arc::new(FuzzDhExecutor::default());
        service.set_dh_executor(executor.clone());
        // Challenges that repeat would be a bug of their own, and a script must repeat exactly.
        let count = Mutex::new(0_u64);
        service.set_random_source(move |bytes| {
            let mut count = count.lock().unwrap_or_else(PoisonError::into_inner);
            for chunk in bytes.chunks_mut(64) {
                *count += 1;
                let digest = Hash::Sha512.digest(&count.to_le_bytes());
                chunk.copy_from_slice(&digest.expose()[..chunk.len()]);
            }
            true
        });
        let world = Self {
            regions,
            service,
            executor,
            now: Instant { ns: 1_000_000 },
            guests: Vec::new(),
            peers: Vec::new(),
            policy,
            recorded: Vec::new(),
            seed: 0,
        };
        world.set_security(SECRET);
        world
    }

    /// Replaces the secret of the host.
    fn set_security(&self, number: u8) {
        let update = SubsystemExportUpdate {
            hosts: AllowedHosts::Listed(BTreeSet::from([host_nqn(0)])),
            ports: BTreeMap::from([(1, Vec::new())]),
            masks: BTreeMap::new(),
            security: security(number, &self.policy),
        };
        assert!(self.service.update_export(&subsystem_nqn(0), update), "it is exported");
    }

    fn execute_step(&mut self, kind: u8, whom: usize, script: &mut ScriptBytes<'_>) {
        match kind {
            0 => return self.open_connection(script.next_byte()),
            6 => return self.advance_time(u64::from(script.next_byte() % 40)),
            7 => return self.run_jobs(script.next_byte()),
            10 => {
                let number = if script.next_byte() & 1 == 0 { SECRET } else { SECRET + 1 };
                return self.set_security(number);
            }
            _ => {}
        }
        let count = self.peers.len().max(1);
        self.seed = self.seed.wrapping_add(1);
        let Some(peer) = self.peers.get_mut(whom % count) else { return };
        let message = match kind {
            1 => {
                let mut bytes = [self.seed; Randomness::BYTES];
                bytes[0] = 1;
                Some(peer.host.start(Randomness::new(&bytes)))
            }
            2 => peer.next_message(),
            4 => Some(script.next_bytes()),
            9 => {
                let at = usize::from(script.next_byte()) % self.recorded.len().max(1);
                self.recorded.get(at).cloned()
            }
            3 => {
                peer.send_receive(script.next_byte());
                None
            }
            5 => {
                peer.send_other_command(script.next_byte(), script.next_byte());
                None
            }
            _ => {
                peer.connection.close();
                None
            }
        };
        let Some(mut message) = message else { return };
        script.alter(&mut message);
        peer.send_message(&message);
        self.recorded.push(message);
    }

    /// Opens a connection. Bit 0 of `how`: with the secret; bit 1: bidirectional; bit 2: concatenation.
    fn open_connection(&mut self, how: u8) {
        if self.peers.len() >= PEERS_MAX {
            return;
        }
        let pipe = SimulatedStream::new(&self.regions, 4096, "192.0.2.1:5000".to_owned());
        let mut connection = FuzzHost::new(0, 0, &pipe);
        let Ok(guest) = self.service.accept_stream(Box::new(pipe), 1, self.now) else { return };
        self.guests.push(guest);
        let number = if how & 1 == 0 { WRONG_SECRET } else { SECRET };
        let has_group = self.policy.groups.contains(&Group::Ffdhe2048);
        let concatenation = match how & 4 != 0 && has_group {
            true => Concatenation::NewTlsPsk,
            false => Concatenation::None,
        };
        let config = HostConfig {
            host_nqn: host_nqn(0),
            subsystem_nqn: subsystem_nqn(0),
            host_secret: secret(number),
            controller_secrets: (how & 2 != 0).then(|| secret(number + 100)).into_iter().collect(),
            concatenation,
            policy: self.policy.clone(),
        };
        let host = Host::new(config).expect("the configuration is valid");
        connection.send_connect(None, |command| command);
        let permitted = BTreeSet::from([connection.last_cid()]);
        self.peers.push(FuzzPeer { connection, host, has_secret: how & 1 != 0, permitted });
    }

    fn run_jobs(&mut self, how: u8) {
        while let Some((job, done)) = self.executor.take() {
            if how & 3 != 3 {
                done(job.run());
            }
        }
    }

    fn advance_time(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.now = self.now.after(Span::from_secs(1));
            self.poll_until_idle();
        }
    }

    fn poll_until_idle(&mut self) {
        for _ in 0..20 {
            let mut is_busy = false;
            for guest in &mut self.guests {
                is_busy |= guest.poll_once(self.now);
            }
            self.guests.retain(|guest| !guest.is_closed());
            for peer in &mut self.peers {
                peer.connection.receive_pdus();
            }
            self.peers.retain(|peer| !peer.connection.is_closed());
            while self.service.next_event().is_some() {}
            if !is_busy {
                return;
            }
        }
    }

    /// Checks that hosts without the secret have nothing.
    fn check_strangers(&self) {
        let members = self.peers.iter().filter(|peer| peer.has_secret).count();
        assert!(self.service.association_count() <= members, "a controller without a secret");
        for peer in self.peers.iter().filter(|peer| !peer.has_secret) {
            for completion in &peer.connection.ended {
                assert!(
                    !completion.status().is_success() || peer.permitted.contains(&completion.cid()),
                    "a command of a host without the secret succeeded: {completion:?}"
                );
            }
        }
    }

    fn close_and_check_released(&mut self) {
        // Hosts without a controller fall silent.
        self.advance_time(SILENCE_MAX);
        let members = self.peers.iter().filter(|peer| peer.has_secret).count();
        assert!(self.guests.len() <= members, "silent hosts stay: {:?}", self.guests);
        self.peers.drain(..).for_each(|peer| peer.connection.close());
        self.run_jobs(0);
        self.advance_time(3);
        assert!(self.guests.is_empty(), "these stay: {:?}", self.guests);
        let pool = self.service.buffer_pool();
        assert_eq!((self.service.connection_count(), self.service.association_count()), (0, 0));
        assert_eq!(pool.free_bytes(), pool.size_bytes(), "memory is back");
        while let Some((job, done)) = self.executor.take() {
            done(job.run());
        }
        assert_eq!(self.service.authentication_context().jobs.count(), 0, "jobs are left");
    }
}

impl FuzzPeer {
    /// Next message of the host, if the last data it has received lead to one.
    fn next_message(&mut self) -> Option<Vec<u8>> {
        let received = self.connection.last_data.take()?;
        let mut step = self.host.handle_message(&received);
        if let Step::Compute(job) = step {
            step = self.host.handle_dh_result(job.run())?;
        }
        match step {
            Step::Message(message) => Some(message),
            Step::Authenticated { message, .. } | Step::Failed { message, .. } => message,
            Step::Compute(_) => None,
        }
    }

    fn send_message(&mut self, message: &[u8]) {
        let tl = u32::try_from(message.len()).unwrap_or(0);
        let send = AuthenticationSend { spsp0: 1, spsp1: 1, secp: SECURITY_PROTOCOL, tl };
        let command = send.to_command().with_sgl1(Descriptor::in_capsule(0, tl));
        let cid = self.connection.send_capsule(&command, message);
        self.permitted.insert(cid);
    }

    fn send_receive(&mut self, how: u8) {
        let al = match how & 7 {
            7 => u32::from(how) * 4,
            _ => BUFFER_BYTES,
        };
        let receive = AuthenticationReceive { spsp0: 1, spsp1: 1, secp: SECURITY_PROTOCOL, al };
        let command = receive.to_command().with_sgl1(Descriptor::transport_data_block(al));
        let cid = self.connection.send_command(&command, 0);
        self.permitted.insert(cid);
    }

    /// Sends a command that needs a controller.
    fn send_other_command(&mut self, opcode: u8, kind: u8) {
        let command = Command::new(opcode).with_nsid(u32::from(kind) & 0xf);
        let is_fabrics = opcode == AdminOpcode::FabricsCommands.code();
        if is_fabrics && matches!(kind & 0xf, 5 | 6) {
            return;
        }
        self.connection.send_command(&command, 0);
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Random;

    use super::{authentication_seed_scripts, fuzz_nvme_tcp_authentication};

    #[test]
    fn random_scripts_violate_no_invariant() {
        let seeds = authentication_seed_scripts();
        seeds.iter().for_each(|(_, bytes)| fuzz_nvme_tcp_authentication(bytes));
        for seed in 0..60 {
            let mut random = Random::new(seed);
            let mut draw = |bound: u64| usize::try_from(random.below(bound)).unwrap();
            let mut bytes = seeds[draw(seeds.len() as u64)].1.clone();
            for _ in 0..draw(4) {
                let at = draw(bytes.len() as u64);
                bytes[at] = draw(256).to_le_bytes()[0];
            }
            let more = draw(120);
            bytes.extend((0..more).map(|_| draw(256).to_le_bytes()[0]));
            fuzz_nvme_tcp_authentication(&bytes);
        }
    }
}
