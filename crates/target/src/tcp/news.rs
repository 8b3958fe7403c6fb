//! What has happened to connections, for people and programs.

use std::fmt;

/// Something that has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// Somebody has come.
    Connected {
        /// The connection's number, which is never used again.
        connection: u64,
        /// Who.
        peer: String,
    },
    /// A host has a controller.
    Associated {
        /// The number of its admin connection.
        connection: u64,
        /// Who.
        peer: String,
        /// The host's NVMe Qualified Name.
        host: String,
        /// The subsystem's.
        subsystem: String,
        /// The controller's number.
        cntlid: u16,
    },
    /// A Connect was refused.
    Refused {
        /// The connection's number.
        connection: u64,
        /// Who.
        peer: String,
        /// Why: what was found and what was expected.
        why: String,
    },
    /// Somebody has gone.
    Disconnected {
        /// The connection's number.
        connection: u64,
        /// Who.
        peer: String,
        /// Why.
        reason: Reason,
    },
    /// Something went wrong, in a line.
    Trouble(String),
}

/// Why a connection has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The peer has closed it.
    Closed,
    /// The host has said so, with Disconnect.
    Said,
    /// What came is refused, as this says.
    Refused(String),
    /// The peer has refused what it got, as this says.
    Terminated(String),
    /// The peer took too long for this.
    TooSlow(&'static str),
    /// The stream failed, as whoever carries it says.
    Broken(String),
    /// The host has not been heard of for its keep-alive time-out.
    KeepAliveExpired,
    /// The host has not enabled its controller in time.
    NotEnabled,
    /// Its association has ended, or its controller was reset.
    AssociationEnded,
    /// Its host has had the controller reset by another one.
    Reset,
    /// The target made a mistake: it asked its own end of the connection for what is not possible.
    Internal(String),
    /// The server ends.
    ServerEnds,
}

impl Reason {
    /// It in a word that does not change, for programs.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Said => "said",
            Self::Refused(_) => "refused",
            Self::Terminated(_) => "terminated",
            Self::TooSlow(_) => "too-slow",
            Self::Broken(_) => "broken",
            Self::KeepAliveExpired => "keep-alive-expired",
            Self::NotEnabled => "not-enabled",
            Self::AssociationEnded => "association-ended",
            Self::Reset => "reset",
            Self::Internal(_) => "internal-error",
            Self::ServerEnds => "server-ends",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => out.write_str("the host has closed it"),
            Self::Said => out.write_str("the host has disconnected"),
            Self::Refused(why) => write!(out, "the host sent what is refused: {why}"),
            Self::Terminated(why) => write!(out, "the host has terminated it: {why}"),
            Self::TooSlow(what) => write!(out, "the host took too long to {what}"),
            Self::Broken(why) => write!(out, "the stream failed: {why}"),
            Self::KeepAliveExpired => {
                out.write_str("the host was not heard of for its keep-alive time-out")
            }
            Self::NotEnabled => out.write_str("the host did not enable its controller in time"),
            Self::AssociationEnded => out.write_str("its association has ended"),
            Self::Reset => out.write_str("its host had it reset by another controller"),
            Self::Internal(what) => {
                write!(out, "an error of this target, which should be reported: {what}")
            }
            Self::ServerEnds => out.write_str("the server ends"),
        }
    }
}

impl fmt::Display for News {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connected { connection, peer } => {
                write!(out, "connection {connection}: {peer} has come")
            }
            Self::Associated { connection, peer, host, subsystem, cntlid } => write!(
                out,
                "connection {connection}: {peer} is {host} and has controller {cntlid} of {subsystem}"
            ),
            Self::Refused { connection, peer, why } => {
                write!(out, "connection {connection}: {peer} is refused: {why}")
            }
            Self::Disconnected { connection, peer, reason } => {
                write!(out, "connection {connection}: {peer} has gone: {reason}")
            }
            Self::Trouble(text) => out.write_str(text),
        }
    }
}
