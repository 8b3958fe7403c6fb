//! Bugs that tests put back, to see that they are found.

/// Which bugs a service has on purpose: none, except in the tests of a simulator.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InjectedBugs {
    /// What the media still write for an ended association is open to everyone, and a new association
    /// is admitted before the queues of the old one have stopped.
    pub unfenced_writes: bool,
    /// A Cross-Controller Reset of a controller that this service has never given out is answered as
    /// done.
    pub unknown_resets_done: bool,
}
