//! Fast-path optimizations of a queue pair, each with a switch, so that its effect can be measured.

/// Fast-path switches of a queue pair. [`Default`] selects the fastest setting of each.
///
/// The instruction that stores a command into the ring (`movdir64b`, non-temporal, plain) is not selected
/// here: it belongs to the memory of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FastPathOptions {
    /// Write the submission doorbell once per flush, not once per command.
    pub doorbell_batching: bool,
    /// Time of the completion doorbell write.
    pub completion_doorbell: CompletionDoorbell,
}

/// Time at which a queue pair writes the completion doorbell, which frees completion entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionDoorbell {
    /// After each completion.
    Each,
    /// Once per poll that found any: just before the next submission doorbell, or in the next poll if
    /// there is none.
    Poll,
    /// Only when the controller could otherwise run out of entries. This is permitted (Base 2.1
    /// §3.3.1.2.1), but some devices may expect more frequent writes.
    Deferred,
}

impl Default for FastPathOptions {
    fn default() -> Self {
        Self { doorbell_batching: true, completion_doorbell: CompletionDoorbell::Poll }
    }
}
