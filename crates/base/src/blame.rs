//! Whose move it is when something went wrong.

/// Whose move it is. Exit codes and retry policies are made from this, never from text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// The caller asked for something that cannot be.
    Caller,
    /// The machine is not set up for it.
    Machine,
    /// The controller or peer broke its contract.
    Peer,
}

impl Blame {
    /// The exit code of a program that ends for this reason: 2 for the caller, 1 for the machine,
    /// 3 for the peer.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Machine => 1,
            Self::Caller => 2,
            Self::Peer => 3,
        }
    }
}
