//! Driver options: optimizations of the I/O path that can be switched off.

use tenmil_dma::CommandStore;

use tenmil_base::Error;

/// Driver options. The variants of each option begin with the default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Techniques {
    /// Ring the submission doorbell once per iteration rather than for each command.
    pub doorbell_batching: bool,
    /// When to ring the completion doorbell.
    pub completion_doorbell: CompletionDoorbell,
    /// Instructions that store commands. None selects what suits the kind of device.
    pub command_store: Option<CommandStore>,
    /// Data that are prefetched into the cache.
    pub prefetch: Prefetch,
    /// How completions are read from the queue.
    pub completion_copy: CompletionCopy,
    /// Use shadow doorbells, if the controller supports them.
    pub shadow_doorbells: bool,
    /// Request huge pages from the kernel.
    pub huge_pages: bool,
}

/// When the completion doorbell is rung.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionDoorbell {
    /// Once per poll.
    Poll,
    /// For each completion.
    Each,
    /// Only when the controller is about to need free entries.
    Deferred,
}

/// Data that are prefetched into the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefetch {
    /// Command slots of the next completions.
    pub slots: bool,
    /// Queue entries that are written next.
    pub ring: bool,
    /// State of `perf` per I/O.
    pub tasks: bool,
}

/// How completions are read from the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionCopy {
    /// A cache line of up to four entries at once.
    Line,
    /// One entry at a time.
    One,
}

impl Default for Techniques {
    fn default() -> Self {
        Self {
            doorbell_batching: true,
            completion_doorbell: CompletionDoorbell::Poll,
            command_store: None,
            prefetch: Prefetch { slots: false, ring: false, tasks: false },
            completion_copy: CompletionCopy::One,
            shadow_doorbells: false,
            huge_pages: true,
        }
    }
}

impl Techniques {
    /// Rejects combinations in which an option has no effect.
    pub fn check(&self) -> Result<(), Error> {
        let by_line = self.completion_copy == CompletionCopy::Line;
        if by_line && self.completion_doorbell == CompletionDoorbell::Each {
            return Err(Error::usage(
                "--completion-copy line: completions are taken one by one with --cq-doorbell each, \
                 expected --cq-doorbell poll or deferred",
            ));
        }
        if self.prefetch.slots && !by_line {
            return Err(Error::usage(
                "--prefetch slots: completions are copied one by one, expected --completion-copy \
                 line beside it",
            ));
        }
        Ok(())
    }

    /// First flag that changes an option of the driver, if any was given.
    pub fn switched_in_driver(&self) -> Option<&'static str> {
        let usual = Self::default();
        let Prefetch { slots, ring, .. } = self.prefetch;
        let switched = [
            ("--no-doorbell-batching", self.doorbell_batching != usual.doorbell_batching),
            ("--cq-doorbell", self.completion_doorbell != usual.completion_doorbell),
            ("--command-store", self.command_store != usual.command_store),
            ("--prefetch", slots || ring),
            ("--completion-copy", self.completion_copy != usual.completion_copy),
            ("--shadow-doorbells", self.shadow_doorbells != usual.shadow_doorbells),
        ];
        switched.iter().find(|(_, is_switched)| *is_switched).map(|(flag, _)| *flag)
    }
}

impl CompletionDoorbell {
    /// Name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Poll => "poll",
            Self::Each => "each",
            Self::Deferred => "deferred",
        }
    }
}

impl Prefetch {
    /// Parses `all`, `none`, or some of `slots,ring,tasks`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut prefetch = Self { slots: false, ring: false, tasks: false };
        match text {
            "all" => return Ok(Self { slots: true, ring: true, tasks: true }),
            "none" => return Ok(prefetch),
            _ => {}
        }
        for part in text.split(',') {
            match part {
                "slots" => prefetch.slots = true,
                "ring" => prefetch.ring = true,
                "tasks" => prefetch.tasks = true,
                _ => {
                    return Err(format!(
                        "no `{part}` to prefetch, expected some of slots,ring,tasks, or all, or \
                         none"
                    ));
                }
            }
        }
        Ok(prefetch)
    }

    /// Name on the command line and in reports.
    pub fn name(self) -> String {
        let parts = [(self.slots, "slots"), (self.ring, "ring"), (self.tasks, "tasks")];
        let on: Vec<&str> = parts.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect();
        match on.len() {
            0 => "none".into(),
            3 => "all".into(),
            _ => on.join(","),
        }
    }
}

impl CompletionCopy {
    /// Name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Line => "line",
            Self::One => "one",
        }
    }
}
