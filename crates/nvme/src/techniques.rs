//! What makes the way of an I/O fast, each with its switch, so that its worth can be measured.

/// The techniques that a queue pair uses. [`Default`] is the fast choice of each.
///
/// How a command is stored into the ring (`movdir64b`, streaming, plain) is not here: it belongs to
/// the memory of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Techniques {
    /// Ring the submission doorbell once per flush, not once per command.
    pub doorbell_batching: bool,
    /// When the completion doorbell is rung.
    pub completion_doorbell: CompletionDoorbell,
    /// How completions leave their ring.
    pub completion_copy: CompletionCopy,
    /// Touch the slots of a whole cache line of completions before working on the first. It needs
    /// [`CompletionCopy::Line`].
    pub slot_lookahead: bool,
    /// Ask for the cache line of the submission entry this many entries ahead. Zero does not.
    pub submission_prefetch: u32,
    /// Ask for the next cache line of completions while working on this one.
    pub completion_prefetch: bool,
}

/// When a queue pair tells the controller that completion entries are free again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionDoorbell {
    /// After each completion, which is then also copied by itself.
    Each,
    /// Once per poll that found any: just before the submission doorbell that follows it, or in the
    /// next poll if none does.
    Poll,
    /// Only when the controller could run out of entries otherwise. Legal (Base 2.1 §3.3.1.2.1),
    /// though there may be devices that want to hear from their host more often.
    Deferred,
}

/// How completions leave their ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionCopy {
    /// Up to four at a time, a cache line of them, into a copy that is then worked on.
    Line,
    /// One at a time.
    Each,
}

impl Default for Techniques {
    fn default() -> Self {
        Self {
            doorbell_batching: true,
            completion_doorbell: CompletionDoorbell::Poll,
            // 43 instructions against 66: after the first load of a line the others find it in the
            // cache, so the copy is only more work.
            completion_copy: CompletionCopy::Each,
            slot_lookahead: false,
            submission_prefetch: 0,
            completion_prefetch: false,
        }
    }
}

impl Techniques {
    /// Whether anything is to be done after each command.
    pub(crate) fn is_eager(&self) -> bool {
        !self.doorbell_batching || self.submission_prefetch > 0
    }

    /// Whether completions are taken by the cache line.
    pub(crate) fn takes_lines(&self) -> bool {
        self.completion_copy == CompletionCopy::Line
            && self.completion_doorbell != CompletionDoorbell::Each
    }
}
