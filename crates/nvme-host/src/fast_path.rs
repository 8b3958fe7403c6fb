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
    /// Method of copying completions from their ring.
    pub completion_copy: CompletionCopy,
    /// Touch the slots of all completions in a cache line before the first one is processed. Requires
    /// [`CompletionCopy::Line`].
    pub slot_lookahead: bool,
    /// Prefetch distance of submission entries; zero disables the prefetch.
    pub submission_prefetch: u32,
    /// Prefetch the next cache line of completions while processing the current one.
    pub completion_prefetch: bool,
}

/// Time at which a queue pair writes the completion doorbell, which frees completion entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionDoorbell {
    /// After each completion, which is then also copied individually.
    Each,
    /// Once per poll that found any: just before the next submission doorbell, or in the next poll if
    /// there is none.
    Poll,
    /// Only when the controller could otherwise run out of entries. This is permitted (Base 2.1
    /// §3.3.1.2.1), but some devices may expect more frequent writes.
    Deferred,
}

/// Method of copying completions from their ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionCopy {
    /// Up to four at a time: a cache line is copied, and the copy is processed.
    Line,
    /// One at a time.
    Each,
}

impl Default for FastPathOptions {
    fn default() -> Self {
        Self {
            doorbell_batching: true,
            completion_doorbell: CompletionDoorbell::Poll,
            // 43 instructions against 66: after the first load, the other entries of the line are in the
            // cache, so the copy is only additional work.
            completion_copy: CompletionCopy::Each,
            slot_lookahead: false,
            submission_prefetch: 0,
            completion_prefetch: false,
        }
    }
}

impl FastPathOptions {
    /// Whether work follows each command: a doorbell write or a prefetch.
    pub(crate) fn is_eager(&self) -> bool {
        !self.doorbell_batching || self.submission_prefetch > 0
    }

    /// Whether completions are copied per cache line.
    pub(crate) fn copies_lines(&self) -> bool {
        self.completion_copy == CompletionCopy::Line
            && self.completion_doorbell != CompletionDoorbell::Each
    }
}
