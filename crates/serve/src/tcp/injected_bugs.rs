//! Bugs that tests enable, to prove that the tests detect them.

/// Injected bugs: all off, except in tests of a simulator.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InjectedBugs {
    /// Outstanding writes of an ended association do not fence later ones, and a new association is
    /// admitted before the queues of the old one have stopped.
    pub unfenced_writes: bool,
    /// A Cross-Controller Reset of an unknown controller is completed successfully.
    pub unknown_resets_done: bool,
}
