//! Authentication in a cluster: the secrets and random numbers of hosts and targets, from one seed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::Random;
use tenmil_nvme_auth::{ChapSecret, Group, Hash, InlineDhExecutor, KeyHash, Policy, SecretBytes};
use tenmil_nvme_fabrics::{Authentication, ChapSecrets, SecureRandom};
use tenmil_serve::tcp::{HostKeys, NamedKey, Service, SubsystemSecurity};

use crate::disk_access::host_nqn;

/// How the hosts and targets of a run authenticate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClusterAuthentication {
    seed: u64,
    mode: AuthenticationMode,
    group: Group,
}

/// Which ends prove their identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AuthenticationMode {
    Off,
    Host,
    HostAndController,
}

/// Random numbers of a host.
struct SimulatedRandom(Mutex<Random>);

/// Keeps the draws of a plan as they are, and apart from those of keys.
const PLAN_SALT: u64 = 0xa0_7d1f;
const HOST_SALT: u64 = 0x4057;
const TARGET_SALT: u64 = 0x7a_26e7;
/// Number of the secret of all controllers, after those of the hosts.
const CONTROLLER: u64 = 1 << 32;

impl ClusterAuthentication {
    /// Draws whether the hosts of this seed authenticate: one in three does.
    pub(crate) fn from_seed(seed: u64) -> Self {
        let mut random = Random::new(seed ^ PLAN_SALT);
        let mode = match random.below(6) {
            0 => AuthenticationMode::Host,
            1 => AuthenticationMode::HostAndController,
            _ => AuthenticationMode::Off,
        };
        let group = if random.chance(1, 4) { Group::Ffdhe2048 } else { Group::Null };
        Self { seed, mode, group }
    }

    /// Authentication of a host at a subsystem.
    pub(crate) fn of_host(self, host: usize) -> Option<Authentication> {
        let controller = match self.mode {
            AuthenticationMode::Off => return None,
            AuthenticationMode::Host => Vec::new(),
            AuthenticationMode::HostAndController => vec![self.secret(CONTROLLER)],
        };
        let secrets = ChapSecrets { host: self.secret(host as u64), controller };
        let random = Random::new(self.seed ^ HOST_SALT ^ (host as u64) << 48);
        let random = Arc::new(SimulatedRandom(Mutex::new(random)));
        let mut authentication = Authentication::new(secrets, Arc::new(InlineDhExecutor), random);
        authentication.policy = self.policy();
        Some(authentication)
    }

    /// What a subsystem requires of so many hosts.
    pub(crate) fn of_subsystem(self, hosts: usize) -> SubsystemSecurity {
        if self.mode == AuthenticationMode::Off {
            return SubsystemSecurity::default();
        }
        let keys = |host| {
            let keys = HostKeys {
                chap_secrets: vec![NamedKey::new(format!("host-{host}"), self.secret(host as u64))],
                controller_secret: Some(NamedKey::new("controller", self.secret(CONTROLLER))),
                psks: Vec::new(),
                ..HostKeys::default()
            };
            (host_nqn(host), keys)
        };
        SubsystemSecurity {
            hosts: (0..hosts).map(keys).collect::<BTreeMap<_, _>>(),
            authentication_required: true,
            policy: self.policy(),
            ..SubsystemSecurity::default()
        }
    }

    /// Gives a target repeatable random numbers. `life` distinguishes its processes.
    pub(crate) fn set_random_source(self, service: &Service, life: u64) {
        let random = Mutex::new(Random::new(self.seed ^ TARGET_SALT ^ life << 40));
        service.set_random_source(move |bytes| {
            fill(&random, bytes);
            true
        });
    }

    fn policy(self) -> Policy {
        Policy { hashes: vec![Hash::Sha256], groups: vec![self.group], ..Policy::default() }
    }

    fn secret(self, number: u64) -> ChapSecret {
        let mut random = Random::new(self.seed ^ number);
        let bytes = (0..32).map(|_| random.next_u64().to_le_bytes()[0]).collect();
        let secret =
            ChapSecret::generate(KeyHash::Transform(Hash::Sha256), SecretBytes::new(bytes));
        let Ok(secret) = secret else { unreachable!("32 bytes are a secret for SHA-256") };
        secret
    }
}

impl SecureRandom for SimulatedRandom {
    fn fill(&self, bytes: &mut [u8]) -> Result<(), String> {
        fill(&self.0, bytes);
        Ok(())
    }
}

fn fill(random: &Mutex<Random>, bytes: &mut [u8]) {
    let mut random = random.lock().unwrap_or_else(PoisonError::into_inner);
    bytes.fill_with(|| random.next_u64().to_le_bytes()[0]);
}

#[cfg(test)]
mod tests {
    use super::{AuthenticationMode, ClusterAuthentication};

    #[test]
    fn a_share_of_the_seeds_authenticates_in_each_way() {
        let modes: Vec<_> =
            (0..200).map(|seed| ClusterAuthentication::from_seed(seed).mode).collect();
        let count = |mode| modes.iter().filter(|found| **found == mode).count();
        let [host, both] = [AuthenticationMode::Host, AuthenticationMode::HostAndController];
        assert!(count(host) > 20 && count(both) > 20, "{} and {}", count(host), count(both));
        assert_eq!(ClusterAuthentication::from_seed(7), ClusterAuthentication::from_seed(7));
    }
}
