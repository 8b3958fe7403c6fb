//! Security of the live configuration: keys read from the keyring, and ports.

use std::sync::Arc;

use tenmil_base::Error;
use tenmil_keyring::{KernelPsks, Keyring, KeyringAtPath, KeyringError};
use tenmil_linux::secret_memory::secret_memory_state;
use tenmil_rpc::target_config::{
    KeySources, ListenerConfig, SecurityConfig, TargetConfig, UnreadableKey,
};
use tenmil_serve::tcp::{Port, PortSecurity, SubsystemSecurity};

use super::{ApplyError, LiveListener};

/// Security of a configuration with the keys that the keyring has now.
pub(super) struct ReadSecurity {
    /// In the order of the subsystems.
    pub(super) subsystems: Vec<SubsystemSecurity>,
    pub(super) discovery: SubsystemSecurity,
}

/// Reads all keys of a configuration.
pub(super) fn read_security(requested: &TargetConfig) -> Result<ReadSecurity, ApplyError> {
    for listener in &requested.listeners {
        check_tls_is_built_in(listener)?;
    }
    let keyring =
        match requested.names_keys() {
            false => None,
            true => Some(Keyring::open(requested.keyring.as_deref()).map_err(|why| {
                ApplyError { refused: why.into(), line: requested.keyring_line, key: "keyring" }
            })?),
        };
    let open_kernel_psks = |line| {
        let refuse = |why: KeyringError| ApplyError { refused: why.into(), line, key: "psk" };
        KernelPsks::open().map_err(refuse)
    };
    let kernel = requested.kernel_psks_line().map(open_kernel_psks).transpose()?;
    let sources = KeySources { keyring: keyring.as_ref(), kernel: kernel.as_ref() };
    let read = |security: &SecurityConfig, nqn: Option<&str>| {
        security.read_keys(sources, nqn).map_err(ApplyError::from)
    };
    let subsystems = requested.subsystems.iter();
    let subsystems = subsystems.map(|subsystem| read(&subsystem.security, Some(&subsystem.nqn)));
    let subsystems = subsystems.collect::<Result<_, _>>()?;
    // The discovery service has the hosts of all subsystems, and needs no keys of its own.
    let security = ReadSecurity { subsystems, discovery: read(&requested.discovery, None)? };
    if keyring.is_some() || kernel.is_some() {
        report_unprotected_memory();
    }
    Ok(security)
}

/// Has `tcp:` devices look up their keys in the keyring of a configuration, or in the default one.
pub(super) fn set_keyring_of_devices(config: Option<&TargetConfig>) {
    let path = config.and_then(|config| config.keyring.clone());
    tenmil_devices::tcp::set_key_source(Arc::new(KeyringAtPath { path }));
}

/// Port of the service for a listener.
pub(super) fn port(listener: LiveListener, config: &ListenerConfig) -> Port {
    Port {
        address: Some(listener.address),
        security: config.security,
        networks: config.networks.clone(),
    }
}

/// Whether connections in the clear, which a listener accepted before, must end.
pub(super) fn is_tightened(before: &ListenerConfig, now: &ListenerConfig) -> bool {
    now.security == PortSecurity::TlsRequired && before.security != PortSecurity::TlsRequired
}

/// Name of the security of a listener, as in the configuration file.
pub(super) const fn tls_name(security: PortSecurity) -> &'static str {
    match security {
        PortSecurity::Plaintext => "off",
        PortSecurity::TlsAllowed => "allowed",
        PortSecurity::TlsRequired => "required",
    }
}

fn check_tls_is_built_in(listener: &ListenerConfig) -> Result<(), ApplyError> {
    if tenmil_serve::HAS_TLS || !listener.security.accepts_tls() {
        return Ok(());
    }
    let text = format!(
        "listen at {}: `tls` is {}, but this program is built without TLS, expected one with it",
        listener.address,
        tls_name(listener.security)
    );
    let refused = Error::usage(text)
        .with_hint("install a released package, or build with `cargo build --features tls`");
    Err(ApplyError { refused, line: listener.line, key: "tls" })
}

/// Reports, once per cause, that keys may leave the memory of the process.
fn report_unprotected_memory() {
    let state = secret_memory_state();
    if let Some(why) = state.not_locked {
        tracing::warn!(
            cause = "keys-not-locked",
            "keys may be written to swap space: {why}; fix: LimitMEMLOCK=8M in the service, or `prlimit \
             --memlock`"
        );
    }
    if let Some(why) = state.dumped {
        tracing::warn!(
            cause = "keys-dumped",
            "a core dump of this process would hold keys: {why}; fix: LimitCORE=0 in the service, or \
             `ulimit -c 0`"
        );
    }
}

impl From<UnreadableKey> for ApplyError {
    fn from(UnreadableKey { error, line, key }: UnreadableKey) -> Self {
        Self { refused: error, line, key }
    }
}
