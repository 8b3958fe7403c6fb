//! Who is called, who calls, and what is agreed upon.

use core::fmt;

use tcp::DigestUse;
use wire::element::Ascii;
use wire::fabrics::ConnectData;
use wire::nqn;

use crate::policy::Policy;

/// What a remote SSD is reached with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The subsystem's name.
    pub subsystem: String,
    /// Our own.
    pub host: String,
    /// Our own as a number: whoever has another is another host.
    pub host_id: [u8; 16],
    /// Whether headers have a digest.
    pub header_digest: DigestUse,
    /// Whether data have a digest.
    pub data_digest: DigestUse,
    /// What is submitted is sent by the flush that follows, in the turn of whoever submits. On. Off, it
    /// waits for the next poll: for measuring what that is worth.
    pub direct: bool,
    /// What is done about a peer that does not answer.
    pub policy: Policy,
    #[doc(hidden)]
    pub injected_bugs: InjectedBugs,
}

/// Bugs that were there once, for a simulation that has to find them.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InjectedBugs {
    /// A flush succeeds though the controller is gone that held writes in its volatile cache.
    pub flush_ignores_lost_writes: bool,
}

/// A name that no host or subsystem can have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotAName {
    /// Whose it was to be.
    pub whose: &'static str,
    /// The name.
    pub name: String,
    /// What is wrong with it.
    pub problem: nqn::Malformed,
}

impl Options {
    /// A call of `subsystem` by `host`, with nothing out of the ordinary.
    #[must_use]
    pub fn new(subsystem: &str, host: &str, host_id: [u8; 16]) -> Self {
        Self {
            subsystem: subsystem.to_owned(),
            host: host.to_owned(),
            host_id,
            header_digest: DigestUse::Off,
            data_digest: DigestUse::Off,
            direct: true,
            policy: Policy::default(),
            injected_bugs: InjectedBugs::default(),
        }
    }

    /// # Errors
    ///
    /// If one of the names is none.
    pub fn check(&self) -> Result<(), NotAName> {
        for (whose, name) in [("subsystem", &self.subsystem), ("host", &self.host)] {
            nqn::check(name).map_err(|problem| NotAName { whose, name: name.clone(), problem })?;
        }
        Ok(())
    }

    /// Whether it is the discovery service that is called.
    #[must_use]
    pub fn is_discovery(&self) -> bool {
        self.subsystem == nqn::DISCOVERY
    }

    /// What Connect carries, for controller `cntlid` or for any.
    pub(crate) fn connect_data(&self, cntlid: u16) -> ConnectData {
        ConnectData::zeroed().with(|data| {
            data.hostid(self.host_id)
                .cntlid(cntlid)
                .subnqn(Ascii::nul_padded(&self.subsystem))
                .hostnqn(Ascii::nul_padded(&self.host))
        })
    }
}

impl fmt::Display for NotAName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} `{}`: {}", self.whose, self.name, self.problem)
    }
}

impl core::error::Error for NotAName {}
