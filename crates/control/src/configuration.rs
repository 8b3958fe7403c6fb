//! What a target serves to whom, as one file says it.
//!
//! ```toml
//! memory = "64m"
//! state = "/var/lib/tenmil"
//!
//! [[listener]]
//! address = "127.0.0.1:4420"
//!
//! [[device]]
//! name = "pool"
//! uri = "file:/var/tmp/disk?size=10g"
//!
//! [[subsystem]]
//! nqn = "nqn.2026-01.org.example:disks"
//! hosts = ["nqn.2014-08.org.nvmexpress:uuid:4b0c28c5-5b0d-4d4f-8f4c-8e0c2e3a1d11"]
//!
//! [[subsystem.namespace]]
//! uri = "split:[device:pool]?part=0&parts=2"
//! ```
//!
//! A file is read whole and checked whole before anything is done: [`Configuration::parse`] gives
//! either something that can be served, as far as words can tell, or where it is wrong.

mod check;
mod devices;
mod file;
mod limits;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use base::Span;
use block::uri::Uri;

pub use self::devices::SCHEME;

/// A line of a file, from 1; 0 if there is no file. Where something is said is no part of what is said:
/// all lines are equal.
#[derive(Clone, Copy, Debug, Default)]
pub struct Line(pub usize);

impl PartialEq for Line {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Line {}

/// What is served to whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Configuration {
    /// Bytes of memory for data on their way; nothing leaves it to the target.
    pub memory_bytes: Option<u64>,
    /// Where the file says so.
    pub memory_line: Line,
    /// The directory for what survives a loss of power: reservations that are to persist. Without one,
    /// none do.
    pub state: Option<PathBuf>,
    /// Where the file says so.
    pub state_line: Line,
    /// Where the target listens: at least one.
    pub listeners: Vec<Listener>,
    /// What it offers: at least one.
    pub subsystems: Vec<Subsystem>,
    /// Other discovery services that hosts are told of.
    pub referrals: Vec<SocketAddr>,
    /// How many connections may be whose.
    pub limits: ConnectionLimits,
}

/// How many connections may be whose, and how long a host may be silent. What is not said follows from
/// how many connections there may be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Connections of all together.
    pub connections: Option<u32>,
    /// Those of one address, of hosts that no subsystem names.
    pub per_address: Option<u32>,
    /// Those of one host NQN.
    pub per_host: Option<u32>,
    /// Those of this machine, of hosts that no subsystem names.
    pub of_loopback: Option<u32>,
    /// Those to the discovery service.
    pub discovery: Option<u32>,
    /// Those to the discovery service, of one address.
    pub discovery_per_address: Option<u32>,
    /// Those that only hosts may have which a subsystem names.
    pub reserved: Option<u32>,
    /// Registrants of one address in a namespace, of hosts that no subsystem names.
    pub registrants_per_address: Option<u32>,
    /// The longest keep-alive time-out.
    pub keep_alive_max: Option<Span>,
    /// Where the file says so.
    pub line: Line,
}

/// A place where the target listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    /// Which.
    pub address: SocketAddr,
    /// Where the file says so.
    pub line: Line,
}

/// A subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subsystem {
    /// Its name.
    pub nqn: String,
    /// Where the file says so.
    pub line: Line,
    /// Its serial number; nothing has one made from its name.
    pub serial: Option<String>,
    /// Who may connect.
    pub hosts: Hosts,
    /// By which listeners it is reached, by their place in [`Configuration::listeners`]; in rising
    /// order, and at least one.
    pub listeners: Vec<usize>,
    /// Its namespaces, in the order of their identifiers: at least one.
    pub namespaces: Vec<Namespace>,
    /// How it is reached by which listener, where that is not the best way.
    pub paths: Vec<Path>,
}

/// Who may connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hosts {
    /// Whoever comes.
    Any,
    /// Those with these names.
    Only(Vec<String>),
}

/// A namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Its identifier.
    pub nsid: u32,
    /// Where its blocks are; a name of the file is followed by what it stands for.
    pub uri: Uri,
    /// Where the file says so.
    pub line: Line,
    /// Nobody may write.
    pub is_read_only: bool,
    /// Which of the subsystem's hosts see it; all of them, if none are named.
    pub hosts: Hosts,
    /// Its group for asymmetric access.
    pub ana_group: u32,
}

/// How a group of namespaces is reached by a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    /// Which listener, by its place.
    pub listener: usize,
    /// Which group.
    pub ana_group: u32,
    /// How.
    pub access: Access,
}

/// How well namespaces are reached (Base 2.1 §8.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// As well as they can be.
    Optimized,
    /// Not so well.
    NonOptimized,
    /// Not now.
    Inaccessible,
}

/// Where a file is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misconfigured {
    /// The line, from 1.
    pub line: usize,
    /// The key.
    pub key: String,
    /// What was found and what was expected.
    pub problem: String,
}

impl Configuration {
    /// What `text` says.
    ///
    /// # Errors
    ///
    /// The first place where it is wrong.
    pub fn parse(text: &str) -> Result<Self, Misconfigured> {
        check::check(text, file::File::parse(text)?)
    }
}

impl Subsystem {
    /// How many ANA groups it has; none if all of it is reached as well as it can be, by everybody.
    pub fn ana_groups(&self) -> u32 {
        let namespaces = self.namespaces.iter().map(|namespace| namespace.ana_group);
        let groups = namespaces.chain(self.paths.iter().map(|path| path.ana_group));
        match groups.max() {
            Some(1) if self.paths.is_empty() => 0,
            most => most.unwrap_or(0),
        }
    }
}

impl Access {
    /// All there are.
    pub const ALL: [Self; 3] = [Self::Optimized, Self::NonOptimized, Self::Inaccessible];

    /// It in a word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Optimized => "optimized",
            Self::NonOptimized => "non-optimized",
            Self::Inaccessible => "inaccessible",
        }
    }
}

impl Hosts {
    /// Whether `host` is among them.
    pub fn allow(&self, host: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Only(hosts) => hosts.iter().any(|allowed| allowed == host),
        }
    }
}

impl fmt::Display for Misconfigured {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "line {}, {}: {}", self.line, self.key, self.problem)
    }
}

impl std::error::Error for Misconfigured {}
