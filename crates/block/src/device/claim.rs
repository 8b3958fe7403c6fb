//! Who may do what with a device at the same time.
//!
//! | asked for \ held | read-shared | write-once | exclusive |
//! |---|---|---|---|
//! | read-shared | yes | yes | no |
//! | write-once | yes | no | no |
//! | exclusive | no | no | no |

use std::fmt;

use base::Blame;

/// What a holder wants a device for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// To read, beside other readers and a writer. Its channels refuse whatever changes blocks.
    ReadShared,
    /// To read and write, as the only writer, beside readers.
    WriteOnce,
    /// To be alone with it.
    Exclusive,
}

/// A claim that was granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Who has it.
    pub name: String,
    /// What for.
    pub claim: Claim,
}

/// A device that was not opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimRefused {
    /// The device.
    pub device: String,
    /// Who asked.
    pub holder: String,
    /// What for.
    pub asked: Claim,
    /// What stands against it.
    pub found: Found,
}

/// Why a device was not opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// It has been removed.
    Removed,
    /// These have it, in a way that leaves no room for what was asked.
    Holders(Vec<Holder>),
    /// The machine has no descriptor left to tell of events with.
    Machine(String),
}

impl Claim {
    /// Whether both can be granted at once.
    pub const fn goes_with(self, other: Self) -> bool {
        matches!(
            (self, other),
            (Self::ReadShared, Self::ReadShared | Self::WriteOnce)
                | (Self::WriteOnce, Self::ReadShared)
        )
    }

    /// Whether it is for reading and nothing else.
    pub const fn is_read_only(self) -> bool {
        matches!(self, Self::ReadShared)
    }
}

impl ClaimRefused {
    /// Whose move it is.
    pub const fn blame(&self) -> Blame {
        match self.found {
            Found::Removed | Found::Holders(_) => Blame::Caller,
            Found::Machine(_) => Blame::Machine,
        }
    }
}

impl fmt::Display for Claim {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::ReadShared => "read-shared",
            Self::WriteOnce => "write-once",
            Self::Exclusive => "exclusive",
        })
    }
}

impl fmt::Display for ClaimRefused {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, holder, asked, found } = self;
        write!(out, "open {device} {asked} for {holder}: ")?;
        let expected = match asked {
            Claim::ReadShared => "no exclusive holder",
            Claim::WriteOnce => "readers at most",
            Claim::Exclusive => "no other holder",
        };
        match found {
            Found::Removed => out.write_str("it has been removed, expected a device that is there"),
            Found::Machine(problem) => write!(out, "{problem}, expected an event descriptor"),
            Found::Holders(holders) => {
                let held: Vec<String> =
                    holders.iter().map(|held| format!("{} ({})", held.name, held.claim)).collect();
                write!(out, "held by {}, expected {expected}", held.join(", "))
            }
        }
    }
}

impl std::error::Error for ClaimRefused {}
