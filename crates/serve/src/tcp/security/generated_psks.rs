//! TLS keys that authentications with secure channel concatenation have generated (Base 2.2
//! §8.3.4.5.9).

use std::collections::VecDeque;

use tenmil_base::{Instant, Span};
use tenmil_nvme_auth::{Authenticated, ChapSecret, IdentityVersion, TlsPsk, generated_tls_psk};

use super::PskIdentity;

/// Generated keys of one subsystem.
#[derive(Debug, Default)]
pub(in crate::tcp) struct GeneratedPsks {
    /// Oldest first, so in the order of their expiry.
    psks: VecDeque<GeneratedPsk>,
}

#[derive(Debug)]
struct GeneratedPsk {
    host_nqn: String,
    /// The key with an identity of each version.
    tls_psks: Vec<TlsPsk>,
    /// Secret by which the host authenticated.
    secret: ChapSecret,
    expires_at: Instant,
}

/// Time for which a generated key may be used for new connections, as in Linux.
pub(in crate::tcp) const GENERATED_PSK_LIFE: Span = Span::from_secs(3600);

/// Largest number of keys of a host: one for each path, with some reserve. The oldest is removed.
const PSKS_PER_HOST_MAX: usize = 64;

impl GeneratedPsks {
    /// Adds the key that an authentication with `secret` has generated, in place of the one with
    /// identity `replaced`. Returns false if it generated none.
    pub(in crate::tcp) fn insert(
        &mut self,
        now: Instant,
        (host_nqn, subsystem_nqn): (&str, &str),
        outcome: &Authenticated,
        secret: ChapSecret,
        replaced: Option<&str>,
    ) -> bool {
        let Some(generated) = &outcome.generated_psk else { return false };
        let derive = |version| {
            generated_tls_psk(generated, outcome.hash, version, host_nqn, subsystem_nqn).ok()
        };
        // Version 0 is absent if the names are too long for it.
        let versions = [IdentityVersion::One, IdentityVersion::Zero];
        let tls_psks: Vec<TlsPsk> = versions.into_iter().filter_map(derive).collect();
        if tls_psks.is_empty() {
            return false;
        }
        self.remove_expired(now);
        if let Some(identity) = replaced {
            self.psks.retain(|psk| !psk.has_identity(identity));
        }
        let of_host = |psk: &GeneratedPsk| psk.host_nqn == host_nqn;
        if self.psks.iter().filter(|psk| of_host(psk)).count() >= PSKS_PER_HOST_MAX
            && let Some(oldest) = self.psks.iter().position(of_host)
        {
            self.psks.remove(oldest);
        }
        let expires_at = now.after(GENERATED_PSK_LIFE);
        self.psks.push_back(GeneratedPsk {
            host_nqn: host_nqn.to_owned(),
            tls_psks,
            secret,
            expires_at,
        });
        true
    }

    /// Keys with an identity that have not expired, the newest first.
    pub(in crate::tcp) fn tls_psks(&self, now: Instant, identity: &PskIdentity<'_>) -> Vec<TlsPsk> {
        let usable = self.psks.iter().rev().filter(|psk| now < psk.expires_at);
        let tls_psks = usable.flat_map(|psk| &psk.tls_psks);
        tls_psks.filter(|psk| psk.identity == identity.text).cloned().collect()
    }

    /// Secrets by which the host authenticated that generated the keys with an identity. With version
    /// 0 there may be several; with none, no key exists or all have expired.
    pub(in crate::tcp) fn secrets_of_identity(
        &self,
        now: Instant,
        identity: &str,
    ) -> Vec<ChapSecret> {
        let usable = self.psks.iter().filter(|psk| now < psk.expires_at);
        usable.filter(|psk| psk.has_identity(identity)).map(|psk| psk.secret.clone()).collect()
    }

    /// Removes the keys of hosts whose secret is no longer valid.
    pub(in crate::tcp) fn retain_secrets(&mut self, is_valid: impl Fn(&str, &ChapSecret) -> bool) {
        self.psks.retain(|psk| is_valid(&psk.host_nqn, &psk.secret));
    }

    /// Removes expired keys.
    pub(in crate::tcp) fn remove_expired(&mut self, now: Instant) {
        while self.psks.front().is_some_and(|psk| psk.expires_at <= now) {
            self.psks.pop_front();
        }
    }

    /// Number of keys.
    #[cfg(test)]
    pub(in crate::tcp) fn len(&self) -> usize {
        self.psks.len()
    }
}

impl GeneratedPsk {
    fn has_identity(&self, identity: &str) -> bool {
        self.tls_psks.iter().any(|psk| psk.identity == identity)
    }
}
