//! What of the machine keeps tenmil from working, or from being fast, and the command that mends it.
//!
//! A finding is a line: what there is, what is advised, why, and how. What cannot be read is said to
//! be so, and never guessed. Looking changes nothing; [`apply()`] does what takes nothing away from
//! anybody, and can be undone.
//!
//! | file | what it looks at |
//! |---|---|
//! | `devices.rs` | IOMMU, VFIO, SSDs and their PCIe links |
//! | `memory.rs` | lockable memory, huge pages |
//! | `processors.rs` | isolated cores, frequency, quotas, mitigations |
//! | `kernel.rs` | io_uring, descriptors, buffers of sockets, budgets of NAPI |
//! | `network.rs` | rings, interrupts and queues of network cards |

mod apply;
mod devices;
mod kernel;
mod limits;
mod memory;
mod network;
mod processors;
#[cfg(test)]
mod tests;

use std::fmt;

pub use self::apply::{Applied, apply};
use crate::machine::Machine;
use crate::{Cores, Errno, ethtool, filters, uring};

/// What was found out about one thing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What kind of thing it is.
    pub part: Part,
    /// What is looked at: `IOMMU`, `eth0 rings`.
    pub item: String,
    /// How it stands.
    pub state: State,
    /// What there is; or why that cannot be read.
    pub found: String,
    /// What should be there.
    pub advised: &'static str,
    /// What for.
    pub why: &'static str,
    /// What to do, if there is anything to do.
    pub remedy: Option<Remedy>,
}

/// Parts of a machine, in the order in which they are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// SSDs, and what they need.
    Devices,
    /// Memory.
    Memory,
    /// Processors.
    Processors,
    /// Limits and settings of the kernel.
    Kernel,
    /// Network cards.
    Network,
}

/// How something stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// As it should be.
    Good,
    /// There is nothing to advise.
    Plain,
    /// It works, and could be faster.
    Slow,
    /// Something does not work without it.
    Missing,
    /// It cannot be read here.
    Unknown,
}

/// What to do about a finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remedy {
    /// The command, or what to do where none does it.
    pub command: String,
    /// The same as files and values, if it is safe: it takes nothing from anybody, and can be undone.
    pub changes: Vec<Change>,
}

/// A value for a file of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Which file, without the slash in front.
    pub path: String,
    /// What stands there, as it is written to put it back.
    pub from: String,
    /// What should stand there.
    pub to: String,
}

/// A machine that is looked at, and as whom.
#[derive(Clone, Copy)]
pub struct Patient<'a> {
    /// The machine.
    pub machine: &'a Machine,
    /// What can be asked of it, but not read.
    pub answers: &'a dyn Answers,
    /// The user who looks.
    pub uid: u32,
    /// The processors that may be used.
    pub allowed: &'a Cores,
}

/// What a machine answers that no file tells.
pub trait Answers {
    /// Whether an `io_uring` can be made; the error is the kernel's word.
    fn io_uring(&self) -> Result<(), String>;
    /// The rings of a network card.
    fn rings(&self, card: &str) -> Result<ethtool::Rings, Errno>;
    /// The queues of a network card.
    fn channels(&self, card: &str) -> Result<ethtool::Channels, Errno>;
    /// When a network card interrupts.
    fn coalescing(&self, card: &str) -> Result<ethtool::Coalescing, Errno>;
    /// Which packets the card with this index leads where.
    fn flowers(&self, card: u32) -> Result<Vec<filters::Flower>, Errno>;
}

/// The answers of this machine's own kernel.
#[derive(Clone, Copy, Debug)]
pub struct OwnAnswers;

impl Answers for OwnAnswers {
    fn io_uring(&self) -> Result<(), String> {
        uring::probe().map_err(|errno| errno.to_string())
    }

    fn rings(&self, card: &str) -> Result<ethtool::Rings, Errno> {
        ethtool::rings(card)
    }

    fn channels(&self, card: &str) -> Result<ethtool::Channels, Errno> {
        ethtool::channels(card)
    }

    fn coalescing(&self, card: &str) -> Result<ethtool::Coalescing, Errno> {
        ethtool::coalescing(card)
    }

    fn flowers(&self, card: u32) -> Result<Vec<filters::Flower>, Errno> {
        filters::flowers(card)
    }
}

/// Looks at everything. Nothing is changed.
pub fn examine(patient: &Patient<'_>) -> Vec<Finding> {
    const PARTS: [fn(&Patient<'_>) -> Vec<Finding>; 5] =
        [devices::examine, memory::examine, processors::examine, kernel::examine, network::examine];
    PARTS.iter().flat_map(|examine| examine(patient)).collect()
}

/// Looks at this machine, as whoever runs this process.
pub fn examine_this() -> Vec<Finding> {
    let (machine, allowed) = (Machine::this(), Cores::allowed());
    let uid = crate::runtime_directory::uid();
    examine(&Patient { machine: &machine, answers: &OwnAnswers, uid, allowed: &allowed })
}

impl Part {
    /// All of them, in order.
    pub const ALL: [Self; 5] =
        [Self::Devices, Self::Memory, Self::Processors, Self::Kernel, Self::Network];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Devices => "devices",
            Self::Memory => "memory",
            Self::Processors => "processors",
            Self::Kernel => "kernel",
            Self::Network => "network",
        }
    }

    /// A finding about `item`, of which nothing is known yet.
    fn finding(self, item: impl Into<String>, advised: &'static str, why: &'static str) -> Finding {
        let (state, found) = (State::Unknown, String::new());
        Finding { part: self, item: item.into(), state, found, advised, why, remedy: None }
    }
}

impl State {
    /// In one word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Plain => "plain",
            Self::Slow => "slow",
            Self::Missing => "missing",
            Self::Unknown => "unknown",
        }
    }
}

impl Finding {
    fn good(self, found: impl Into<String>) -> Self {
        Self { state: State::Good, found: found.into(), ..self }
    }

    fn plain(self, found: impl Into<String>) -> Self {
        Self { state: State::Plain, found: found.into(), ..self }
    }

    fn slow(self, found: impl Into<String>, command: impl Into<String>) -> Self {
        self.with(State::Slow, found.into(), command.into())
    }

    fn missing(self, found: impl Into<String>, command: impl Into<String>) -> Self {
        self.with(State::Missing, found.into(), command.into())
    }

    /// It cannot be read, for this reason.
    fn unknown(self, why: impl Into<String>) -> Self {
        Self { state: State::Unknown, found: why.into(), ..self }
    }

    fn with(self, state: State, found: String, command: String) -> Self {
        let remedy = Some(Remedy { command, changes: Vec::new() });
        Self { state, found, remedy, ..self }
    }

    /// The same, which `apply` may do.
    fn safe(mut self, changes: Vec<Change>) -> Self {
        if let Some(remedy) = &mut self.remedy {
            remedy.changes = changes;
        }
        self
    }
}

/// `slow     THP: never; advised madvise or always: fewer …; mend: echo …`.
impl fmt::Display for Finding {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { item, state, found, advised, why, .. } = self;
        write!(out, "{:<8} {item}: ", state.name())?;
        match state {
            State::Unknown => write!(out, "not readable here: {found}")?,
            _ => out.write_str(found)?,
        }
        if !advised.is_empty() {
            write!(out, "; advised {advised}")?;
        }
        if *state != State::Good && !why.is_empty() {
            write!(out, ": {why}")?;
        }
        match &self.remedy {
            Some(remedy) => write!(out, "; mend: {}", remedy.command),
            None => Ok(()),
        }
    }
}

/// Turns a value over to the superuser's shell.
fn echo(value: &str, path: &str) -> String {
    format!("echo {value} | sudo tee /{path}")
}
