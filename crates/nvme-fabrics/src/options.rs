//! Connection options: subsystem, host, and negotiated features.

use core::fmt;

use tenmil_nvme_tcp::DigestMode;
use tenmil_wire::fabrics::ConnectData;
use tenmil_wire::field_type::Ascii;
use tenmil_wire::nqn;

use crate::authentication::Authentication;
use crate::timeout_policy::TimeoutPolicy;

/// Options of a connection to a remote controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// NQN of the subsystem (SUBNQN).
    pub subsystem: String,
    /// NQN of this host (HOSTNQN).
    pub host: String,
    /// Host Identifier (HOSTID). A different identifier is a different host.
    pub host_id: [u8; 16],
    /// Header digest.
    pub header_digest: DigestMode,
    /// Data digest.
    pub data_digest: DigestMode,
    /// Send submitted requests in the following flush, in the iteration of the submitter; on by default.
    /// Otherwise they wait for the next poll, to measure the difference.
    pub direct: bool,
    /// Timeouts for an unresponsive peer.
    pub policy: TimeoutPolicy,
    /// Authentication of this host. Without it, a controller that requires it cannot be used.
    pub authentication: Option<Authentication>,
    /// Whether connections have to be secure channels.
    pub secure_channel: SecureChannelMode,
    #[doc(hidden)]
    pub injected_bugs: InjectedBugs,
}

/// Whether connections have to be secure channels (TLS). A stream of a connector says whether it is one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SecureChannelMode {
    /// Plaintext, unless the connector makes it otherwise.
    #[default]
    Off,
    /// Each connection has to be a secure channel, with keys that the connector has.
    Required,
    /// Secure channel concatenation: an authentication over a plaintext admin connection generates a key,
    /// and then all connections are secure channels with it.
    Concatenate,
}

/// Former bugs that a simulation injects to prove that it detects them.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InjectedBugs {
    /// A flush succeeds although a controller with writes in its volatile cache was lost.
    pub flush_ignores_lost_writes: bool,
}

/// Error: a name that is not a valid NQN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidNqn {
    /// The field: `subsystem` or `host`.
    pub whose: &'static str,
    /// The name.
    pub name: String,
    /// The problem.
    pub problem: nqn::NqnError,
}

impl Options {
    /// Default options for a connection of `host` to `subsystem`.
    #[must_use]
    pub fn new(subsystem: &str, host: &str, host_id: [u8; 16]) -> Self {
        Self {
            subsystem: subsystem.to_owned(),
            host: host.to_owned(),
            host_id,
            header_digest: DigestMode::Off,
            data_digest: DigestMode::Off,
            direct: true,
            policy: TimeoutPolicy::default(),
            authentication: None,
            secure_channel: SecureChannelMode::Off,
            injected_bugs: InjectedBugs::default(),
        }
    }

    /// Checks the NQNs.
    ///
    /// # Errors
    ///
    /// If one of the NQNs is invalid.
    pub fn check_nqns(&self) -> Result<(), InvalidNqn> {
        for (whose, name) in [("subsystem", &self.subsystem), ("host", &self.host)] {
            nqn::check_nqn(name).map_err(|problem| InvalidNqn {
                whose,
                name: name.clone(),
                problem,
            })?;
        }
        Ok(())
    }

    /// Whether the subsystem is the discovery service.
    #[must_use]
    pub fn is_discovery(&self) -> bool {
        self.subsystem == nqn::DISCOVERY
    }

    /// Connect data, for controller `cntlid` or for any.
    pub(crate) fn connect_data(&self, cntlid: u16) -> ConnectData {
        ConnectData::zeroed().with(|data| {
            data.hostid(self.host_id)
                .cntlid(cntlid)
                .subnqn(Ascii::nul_padded(&self.subsystem))
                .hostnqn(Ascii::nul_padded(&self.host))
        })
    }
}

impl fmt::Display for InvalidNqn {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} `{}`: {}", self.whose, self.name, self.problem)
    }
}

impl core::error::Error for InvalidNqn {}
