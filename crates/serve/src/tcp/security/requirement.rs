//! What a connection has proved when its Connect arrives, and what it must still prove.

use tenmil_base::{Instant, SecureChannel};
use tenmil_nvme_auth::{
    ChapSecret, ConcatenationPolicy, ConfiguredPsk, Controller, ControllerConfig, KERNEL_KEYRING,
    PskKind, TlsPsk, tls_psk_candidates,
};

use super::{NamedKey, PskIdentity, SecurityState};
use crate::peer_network::is_peer_admitted;
use crate::tcp::audit::{RefusalReason, TlsKeyAudit};

/// Connection whose Connect is checked.
#[derive(Clone, Copy, Debug)]
pub(in crate::tcp) struct ConnectingQueue<'a> {
    pub(in crate::tcp) now: Instant,
    pub(in crate::tcp) host_nqn: &'a str,
    pub(in crate::tcp) subsystem_nqn: &'a str,
    pub(in crate::tcp) qid: u16,
    pub(in crate::tcp) peer: &'a str,
    pub(in crate::tcp) channel: Option<&'a SecureChannel>,
    /// Whether the port accepts TLS, so that a key for a TLS connection is of use.
    pub(in crate::tcp) accepts_tls: bool,
}

/// Queue that is connected.
#[derive(Clone, Copy, Debug)]
pub(in crate::tcp) struct ConnectedQueue<'a> {
    pub(in crate::tcp) host_nqn: &'a str,
    pub(in crate::tcp) qid: u16,
    pub(in crate::tcp) peer: &'a str,
    /// The host has generated a key for a TLS connection, and the queue serves nothing else.
    pub(in crate::tcp) awaits_secure_channel: bool,
}

/// Result of the check.
#[derive(Debug)]
pub(in crate::tcp) struct Requirement {
    /// What the secure channel has proved.
    pub(in crate::tcp) credentials: Credentials,
    /// Configuration of the authentication that is required.
    pub(in crate::tcp) authentication: Option<Box<ControllerConfig>>,
}

/// Whether a connected queue may stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::tcp) enum Verdict {
    /// It may stay.
    Permitted,
    /// A secret by which its host has authenticated was removed, and nothing else prevents it.
    SecretRemoved,
    /// It ends.
    Refused,
}

/// Keys by which a queue has proved to belong to its host. It ends when one of them is removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::tcp) struct Credentials {
    /// Configured keys with the identity of the TLS connection, of which it has used one.
    psks: Vec<ConfiguredPsk>,
    /// The same of keys that are derived already.
    tls_psks: Vec<TlsPsk>,
    /// Secrets of the authentications: of this connection, and of the one that generated its TLS key.
    secrets: Vec<ChapSecret>,
    is_secure: bool,
}

/// Rejection, with a text for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::tcp) struct Refusal {
    pub(in crate::tcp) reason: RefusalReason,
    pub(in crate::tcp) text: String,
}

impl Refusal {
    fn new(reason: RefusalReason, text: impl Into<String>) -> Self {
        Self { reason, text: text.into() }
    }
}

impl Credentials {
    /// Whether anything was proved.
    pub(in crate::tcp) fn prove_host(&self) -> bool {
        !self.psks.is_empty() || !self.tls_psks.is_empty() || !self.secrets.is_empty()
    }

    /// Whether the host has authenticated, on this connection or for its TLS key.
    pub(in crate::tcp) fn has_authenticated(&self) -> bool {
        !self.secrets.is_empty()
    }

    /// Whether the connection is a TLS connection.
    pub(in crate::tcp) const fn is_secure(&self) -> bool {
        self.is_secure
    }

    /// Adds the secret of an authentication, in place of earlier ones of this connection.
    pub(in crate::tcp) fn set_secret(&mut self, secret: ChapSecret) {
        self.secrets = vec![secret];
    }
}

impl SecurityState {
    /// Checks a Connect, before or after authentication.
    pub(in crate::tcp) fn requirement(
        &self,
        queue: &ConnectingQueue<'_>,
    ) -> Result<Requirement, Refusal> {
        let security = &self.security;
        if !is_peer_admitted(&security.networks, queue.peer) {
            let text = "its address is in no network that may use the subsystem";
            return Err(Refusal::new(RefusalReason::AddressNotPermitted, text));
        }
        let credentials = self.credentials_of_channel(queue)?;
        // A generated key belongs to a host that has authenticated.
        let has_authenticated = credentials.has_authenticated();
        let has_secrets =
            security.keys_of_host(queue.host_nqn).is_some_and(|keys| !keys.chap_secrets.is_empty());
        if security.authentication_required && !has_secrets && !has_authenticated {
            let text = format!(
                "authentication is required, and no DH-HMAC-CHAP secret of {} is configured",
                display_name(queue.host_nqn)
            );
            return Err(Refusal::new(RefusalReason::NoSecret, text));
        }
        let is_asked = queue.qid == 0 || security.authenticate_io_queues;
        let authenticates = has_secrets && !has_authenticated && is_asked;
        if security.secure_channel_required && queue.channel.is_none() {
            let can_generate_key = authenticates
                && queue.qid == 0
                && queue.accepts_tls
                && security.policy.concatenation != ConcatenationPolicy::Refused;
            if !can_generate_key {
                let text =
                    "its connection is plaintext, expected TLS: a secure channel is required";
                return Err(Refusal::new(RefusalReason::SecureChannelRequired, text));
            }
        }
        let authentication = match authenticates {
            true => Some(Box::new(self.checked_controller_config(queue)?)),
            false => None,
        };
        Ok(Requirement { credentials, authentication })
    }

    /// Configuration of authentications of a queue; `None` if its host has no secret. `is_connected`:
    /// the queue exists already, so that its authentication cannot replace a plaintext connection.
    pub(in crate::tcp) fn controller_config(
        &self,
        queue: &ConnectingQueue<'_>,
        is_connected: bool,
    ) -> Option<ControllerConfig> {
        let keys = self.security.keys_of_host(queue.host_nqn)?;
        let mut policy = self.security.policy.clone();
        if queue.channel.is_none() {
            if is_connected || !queue.accepts_tls {
                policy.concatenation = ConcatenationPolicy::Refused;
            } else if self.security.secure_channel_required {
                policy.concatenation = ConcatenationPolicy::Required;
            }
        }
        let config = ControllerConfig {
            host_nqn: queue.host_nqn.to_owned(),
            subsystem_nqn: queue.subsystem_nqn.to_owned(),
            host_secrets: keys.chap_secrets(),
            controller_secret: keys.controller_secret(),
            admin_queue: queue.qid == 0,
            secure_channel: queue.channel.is_some(),
            policy,
        };
        (!config.host_secrets.is_empty()).then_some(config)
    }

    fn checked_controller_config(
        &self,
        queue: &ConnectingQueue<'_>,
    ) -> Result<ControllerConfig, Refusal> {
        let refuse = |text| Refusal::new(RefusalReason::NoSecret, text);
        let config = self
            .controller_config(queue, false)
            .ok_or_else(|| refuse("no secret of the host is configured".to_owned()))?;
        Controller::new(config.clone()).map_err(|error| refuse(error.to_string()))?;
        Ok(config)
    }

    /// What the secure channel of a connection proves. Its identity must name the host and the
    /// subsystem of Connect, and its key must still be valid.
    fn credentials_of_channel(&self, queue: &ConnectingQueue<'_>) -> Result<Credentials, Refusal> {
        let mismatch = |text: String| Refusal::new(RefusalReason::IdentityMismatch, text);
        let Some(channel) = queue.channel else { return Ok(Credentials::default()) };
        let Some(text) = &channel.psk_identity else {
            return Err(mismatch("its TLS connection uses no pre-shared key".to_owned()));
        };
        let identity = PskIdentity::parse(text)
            .ok_or_else(|| mismatch("the identity of its TLS key names no host".to_owned()))?;
        if (identity.host_nqn, identity.subsystem_nqn) != (queue.host_nqn, queue.subsystem_nqn) {
            return Err(mismatch(format!(
                "its Connect names {} and {}, expected {} and {} of its TLS key",
                display_name(queue.host_nqn),
                queue.subsystem_nqn,
                identity.host_nqn,
                identity.subsystem_nqn
            )));
        }
        let mut credentials = Credentials { is_secure: true, ..Credentials::default() };
        match identity.kind {
            PskKind::Retained => {
                let psks = self.psks_of_identity(&identity);
                credentials.psks = psks.map(|psk| psk.key.clone()).collect();
                credentials.tls_psks = self.tls_psks_of_identity(&identity);
            }
            PskKind::Generated => {
                credentials.secrets = self.generated.secrets_of_identity(queue.now, identity.text);
            }
        }
        if !credentials.prove_host() {
            let text = format!("the key of its TLS connection has expired or was removed: {text}");
            return Err(Refusal::new(RefusalReason::KeyNotValid, text));
        }
        Ok(credentials)
    }

    /// Configured keys with an identity.
    fn psks_of_identity<'a>(
        &'a self,
        identity: &PskIdentity<'a>,
    ) -> impl Iterator<Item = &'a NamedKey<ConfiguredPsk>> {
        let PskIdentity { text, host_nqn, subsystem_nqn, .. } = *identity;
        let keys = self.security.keys_of_host(host_nqn);
        let psks = keys.into_iter().flat_map(|keys| &keys.psks);
        psks.filter(move |psk| {
            let candidates =
                tls_psk_candidates(std::slice::from_ref(&psk.key), host_nqn, subsystem_nqn);
            candidates.iter().any(|candidate| candidate.identity == text)
        })
    }

    /// Names of the keys with the identity of a TLS connection.
    pub(in crate::tcp) fn tls_key_names(
        &self,
        now: Instant,
        identity: &str,
    ) -> Option<TlsKeyAudit> {
        let identity = PskIdentity::parse(identity)?;
        match identity.kind {
            PskKind::Retained => {
                let names = self.psks_of_identity(&identity).map(|psk| psk.name.clone());
                // A key of the kernel's keyring has the name of that keyring.
                let of_kernel = self.tls_psks_of_identity(&identity);
                let of_kernel = of_kernel.first().map(|_| KERNEL_KEYRING.to_owned());
                let names = names.chain(of_kernel).collect();
                Some(TlsKeyAudit { names, is_generated: false })
            }
            PskKind::Generated => {
                let secrets = self.generated.secrets_of_identity(now, identity.text);
                let name = |secret| self.secret_name(identity.host_nqn, secret);
                let names = secrets.iter().filter_map(name).map(str::to_owned).collect();
                Some(TlsKeyAudit { names, is_generated: true })
            }
        }
    }

    /// Name of a secret of a host.
    pub(in crate::tcp) fn secret_name(&self, host_nqn: &str, secret: &ChapSecret) -> Option<&str> {
        let keys = self.security.keys_of_host(host_nqn)?;
        let found = keys.chap_secrets.iter().find(|known| known.key == *secret)?;
        Some(&found.name)
    }

    /// Name of the secret by which the controller proves its identity to a host.
    pub(in crate::tcp) fn controller_secret_name(&self, host_nqn: &str) -> Option<&str> {
        let secret = self.security.keys_of_host(host_nqn)?.controller_secret.as_ref()?;
        Some(&secret.name)
    }

    /// Keys with an identity that are derived already.
    fn tls_psks_of_identity(&self, identity: &PskIdentity<'_>) -> Vec<TlsPsk> {
        let keys = self.security.keys_of_host(identity.host_nqn);
        let psks = keys.into_iter().flat_map(|keys| &keys.tls_psks);
        psks.filter(|psk| psk.identity == identity.text).cloned().collect()
    }

    /// Whether a connected queue may stay: its keys are still there, and it fulfills what is required.
    pub(in crate::tcp) fn judge_queue(
        &self,
        credentials: &Credentials,
        queue: &ConnectedQueue<'_>,
    ) -> Verdict {
        let ConnectedQueue { host_nqn, qid, peer, awaits_secure_channel } = *queue;
        let security = &self.security;
        let keys = security.keys_of_host(host_nqn);
        let has_psk = |psk: &ConfiguredPsk| {
            keys.is_some_and(|keys| keys.psks.iter().any(|known| known.key == *psk))
        };
        let has_tls_psk = |psk: &TlsPsk| keys.is_some_and(|keys| keys.tls_psks.contains(psk));
        let is_permitted = credentials.psks.iter().all(has_psk)
            && credentials.tls_psks.iter().all(has_tls_psk)
            && is_peer_admitted(&security.networks, peer)
            && (credentials.is_secure
                || !security.secure_channel_required
                || awaits_secure_channel)
            && (credentials.has_authenticated() || !security.authentication_required || qid != 0);
        if !is_permitted {
            return Verdict::Refused;
        }
        match credentials.secrets.iter().all(|secret| self.has_secret(host_nqn, secret)) {
            true => Verdict::Permitted,
            false => Verdict::SecretRemoved,
        }
    }

    /// Whether a secret of a host is valid.
    pub(in crate::tcp) fn has_secret(&self, host_nqn: &str, secret: &ChapSecret) -> bool {
        let keys = self.security.keys_of_host(host_nqn);
        keys.is_some_and(|keys| keys.has_chap_secret(secret))
    }
}

fn display_name(host_nqn: &str) -> &str {
    if host_nqn.is_empty() { "a host without an NQN" } else { host_nqn }
}
